"""Read a drafter that its authors have published, and write it as a folder of ours.

    python -m support.interop.authors eagle yuhuili/EAGLE-LLaMA3-Instruct-8B OUT \\
        --target meta-llama/Meta-Llama-3-8B-Instruct
    python -m support.interop.authors specdecpp hacky/acchead-llama2-chat-7bx70b OUT \\
        --target meta-llama/Llama-2-70b-chat-hf \\
        --draft-model meta-llama/Llama-2-7b-chat-hf

A drafter is named by its folder or its id on the hub. OUT is an ordinary drafter:
bench.py takes eagle@OUT, and `load_drafter` reads it as an eagle.Drafter or a
specdecpp.Drafter. Formats:

    eagle       EAGLE-1 and EAGLE-2: config.json, and pytorch_model.bin or
                model.safetensors
    specdecpp   the head: config.json and model.safetensors. One residual block is
                applied several times

The formats were tried with random weights, against a few lines that state what each
computes. The published weights were not tried.
"""

import json
import sys
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import common
import specdecpp
from common import UserError
from support import cli, files
from support.rivals import eagle


def eagle_drafter(theirs: dict, weights: dict[str, Tensor], target):
    """An EAGLE drafter (Li et al., 2024).

    theirs: its config. weights: by their names in its file.
    """
    shape = common.target_shape(target)
    check_embedding(weights.pop("embed_tokens.weight", None), target)
    queries = theirs["num_attention_heads"]
    heads = queries, theirs.get("num_key_value_heads") or queries  # as its code has it
    if heads != (shape["num_heads"], shape["num_kv_heads"]):
        raise UserError(f"it has {heads} heads, and eagle.py as many as the target")
    check_rotation(theirs, target)
    config = eagle.Config(
        target=shape,
        num_layers=theirs["num_hidden_layers"],
        intermediate_size=theirs["intermediate_size"],
        bias="fc.bias" in weights,
        layer={
            "rms_norm_eps": theirs["rms_norm_eps"],
            "attention_bias": "layers.0.self_attn.q_proj.bias" in weights,
        },
        draft_vocab=0,
    )
    # Theirs reads embedding and feature in this order, ours the other way round.
    embed, feature = weights.pop("fc.weight").chunk(2, dim=1)  # (D, D) each
    weights["fusion.weight"] = torch.cat([feature, embed], dim=1)
    if config.bias:
        weights["fusion.bias"] = weights.pop("fc.bias")
    if config.layer["attention_bias"]:  # of q, k and v; LlamaConfig means o as well
        for n in range(config.num_layers):
            weights[f"layers.{n}.self_attn.o_proj.bias"] = torch.zeros(
                shape["hidden_size"]
            )
    return eagle.Drafter(config), weights


def specdecpp_head(theirs: dict, weights: dict[str, Tensor], target, draft_model: str):
    """SpecDec++'s acceptance head, for the draft model that it was trained on."""
    depth = theirs["num_layers"]
    config = specdecpp.Config(
        target=common.target_shape(target),
        stage="head",
        head_depth=depth,
        draft_model=draft_model,
        width=theirs["hidden_size"],
        draft_vocab=0,
    )
    renamed = {}
    for name in ("weight", "bias"):
        for n in range(depth):  # one block under D names
            renamed[f"head.blocks.{n}.{name}"] = weights.pop(f"model.{n}.linear.{name}")
        # The softmax of two outputs is the sigmoid of their difference.
        rejected, accepted = weights.pop(f"model.{depth}.{name}")
        renamed[f"head.out.{name}"] = (accepted - rejected)[None]
    return specdecpp.Drafter(config), renamed | weights


def check_embedding(theirs: Tensor | None, target) -> None:
    """Raise a UserError unless a drafter's embedding is a copy of the target's."""
    ours = target.get_input_embeddings().weight
    if theirs is None:
        return
    same = theirs.shape == ours.shape
    # One of the two may have been rounded to another dtype.
    if not (same and torch.allclose(theirs.to(ours), ours, atol=1e-2, rtol=1e-2)):
        raise UserError("its embedding is not the target's: name its own target")


def check_rotation(theirs: dict, target) -> None:
    """Raise a UserError unless a drafter rotates as the target's top layer does."""
    like = torch.empty(0)
    positions = torch.tensor([[0, 1, 100, 1000]])
    own = LlamaRotaryEmbedding(LlamaConfig(**theirs))(like, positions)
    tables = common.rotary(target, positions.to(target.device), -1)
    for ours, table in zip(own, tables):
        table = table.float().cpu()
        if ours.shape != table.shape or not torch.allclose(ours, table, atol=1e-2):
            raise UserError(
                f"it rotates by base {theirs.get('rope_theta', 10000)}, and the target "
                "otherwise; eagle.py rotates as the target"
            )


READERS = {"eagle": eagle_drafter, "specdecpp": specdecpp_head}
FILES = ("model.safetensors", "pytorch_model.bin")


def convert(method: str, source: str, target, **more):
    """The drafter of ours that a published one becomes, in the dtype of its weights.

    method: one of READERS. source: a folder, or an id of the hub.
    Raises UserError if a file, a key or a shape is not what the format has.
    """
    folder = Path(source)
    try:
        if not folder.is_dir():
            wanted = ["config.json", *FILES]
            folder = Path(snapshot_download(source, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # of the hub, the network and the cache
        reason = common.one_line(error)
        raise UserError(f"no {source}, here or on the hub ({reason})") from error
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None or not (folder / "config.json").is_file():
        raise UserError(f"{source} has no config.json with {' or '.join(FILES)}")
    try:
        theirs = json.loads((folder / "config.json").read_bytes())
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        dtype = next(iter(weights.values())).dtype
        drafter, weights = READERS[method](theirs, weights, target, **more)
        weights["vocab_ids"] = drafter.vocab_ids
        drafter.load_state_dict(weights)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except Exception as error:  # readers of damaged files raise many kinds
        reason = common.one_line(error)
        raise UserError(f"{source} is not in {method}'s format ({reason})") from error
    return drafter.to(dtype).eval()


def main(argv: list[str] | None = None) -> None:
    """Write the drafter."""
    parser = cli.OneLineParser(description=__doc__)
    parser.add_argument("method", choices=READERS)
    parser.add_argument("source", help="the published drafter: a folder, or an id")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--target", type=cli.target, help=cli.TARGET_HELP)
    parser.add_argument("--draft-model", help="of SpecDec++: the LM that drafts")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    common.refuse(
        (args.out.exists(), f"{args.out} exists already: give another folder"),
        (
            (args.method == "specdecpp") != bool(args.draft_model),
            "--draft-model goes with specdecpp, which needs it",
        ),
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)  # before a long load
    target, _ = common.load_target(args.target, dtype="auto")
    more = {"draft_model": args.draft_model} if args.draft_model else {}
    drafter = convert(args.method, args.source, target, **more)
    with files.whole_folder(args.out) as part:
        drafter.save_pretrained(part)
    print(f"authors.py: wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
