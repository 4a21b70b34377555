"""Write a drafter and its code as a folder that transformers decodes with.

    python -m support.interop.export falcon checkpoints/falcon OUT
    python -m support.interop.export falcon checkpoints/falcon OUT --target your/model

The first writes only the drafter, for programs that have the target. The second also
writes the target: whoever loads OUT with trust_remote_code=True decodes with drafts.
Both may be uploaded to the hub. OUT/custom_generate has relative imports, so it also
works as a part of a package.

    python -m support.interop.export specdecpp checkpoints/specdecpp OUT --engine
    python -m support.interop.export eagle runs/eagle OUT --engine

These write what other engines read, for the target that the drafter was made for
(--target, without which it is the default one). SpecDec++'s draft model becomes an
ordinary causal LM with two layers and the target's tokenizer: for transformers'
assistant_model=, for vLLM and SGLang as a draft model, and for llama.cpp's converter.
It drafts without the head. EAGLE's drafter becomes a folder in EAGLE's own format.
"""

import copy
import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import common
from support import cli, default_target, files
from support.interop.authors import check_rotation

# It runs from a cache of transformers and does not learn which folder it came from.
GENERATE = '''"""`generate` with drafts of {method}.py; written by its export.py."""

import weakref
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import StoppingCriteriaList, StopStringCriteria

from .common import UserError, load_drafter, speculate
from .{method} import Drafter, drafts

DRAFTER = {drafter!r}  # None: beside the weights of the target
loaded = weakref.WeakKeyDictionary()  # {{model: {{(path, device, dtype): drafter}}}}


def generate(
    inputs=None, *, model, drafter=DRAFTER, settings=None, streamer=None,
    generation_config=None, stopping_criteria=None, stop_strings=None, tokenizer=None,
    **given,
):
    """As that of transformers, for one prompt and without beams.

    drafter: a folder, or an id of the hub. settings: of the method, as {{"gamma": 3}}.
    """
    known = loaded.setdefault(model, {{}})
    key = drafter, model.device, model.dtype
    if key not in known:
        folder = Path(drafter or model.name_or_path)
        if not drafter and not folder.is_dir():  # the target is on the hub
            folder = Path(snapshot_download(str(folder), allow_patterns="drafter/*"))
        path = drafter or folder / "drafter"
        known[key] = load_drafter(Drafter, path, model)
    given = {{name: value for name, value in given.items() if value is not None}}
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if texts := stop_strings or getattr(generation_config, "stop_strings", None):
        if tokenizer is None:
            raise UserError("stop_strings need tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, texts))
        given["stop_strings"] = None  # of transformers, which would want the tokenizer
    given |= {{"stopping_criteria": criteria, "generation_config": generation_config}}
    decode = speculate(drafts, known[key], streamer=streamer, **settings or {{}})
    # Not model.generate, which may be this function.
    return type(model).generate(model, inputs, custom_generate=decode, **given)
'''


def write(method: str, drafter: str, out: Path, target: str | None) -> None:
    """Write the folder `out` for a method's drafter, given by its folder or id."""
    with files.whole_folder(out) as part:
        Drafter = cli.import_method(method).Drafter
        if target is None:
            network = common.read_drafter(Drafter, drafter)
            place = part
        else:
            model, tokenizer = common.load_target(cli.target(target), dtype="auto")
            network = common.load_drafter(Drafter, drafter, model)
            place = part / "drafter"
            save_target(model, part)
            tokenizer.save_pretrained(part)
        network.bfloat16().save_pretrained(place)  # with a card, README.md
        code = part / "custom_generate"
        code.mkdir(parents=True)
        for name in (method, "common"):
            text = (cli.ROOT / f"{name}.py").read_text("utf-8")
            text = re.sub(r"^import common$", "from . import common", text, flags=re.M)
            text = re.sub(r"^from common ", "from .common ", text, flags=re.M)
            (code / f"{name}.py").write_text(text, "utf-8")
        known = str(out.resolve()) if target is None else None
        text = GENERATE.format(method=method, drafter=known)
        (code / "generate.py").write_text(text, "utf-8")  # the path may hold any letter


def save_target(model, folder: Path) -> None:
    """Save a target, whole.

    Raises UserError for an adapter, of which transformers saves only itself, and for
    quantised weights that cannot be saved.
    """
    if getattr(model, "peft_config", None):
        raise common.UserError(
            "the target has an adapter, which would be saved without its base: merge "
            "it (merge_and_unload of PEFT), save that, and name its folder"
        )
    # transformers does not save layers for multi-token prediction. A config that still
    # counts them would make other programs look for them.
    config = model.config.get_text_config()
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if getattr(config, name, None):
            setattr(config, name, 0)
            print(f"export: saved without multi-token prediction ({name} is 0)")
    try:
        model.save_pretrained(folder)
    except Exception as error:  # each kind of quantisation has its own
        reason = common.one_line(error)
        raise common.UserError(f"the target cannot be saved ({reason})") from error


# --------------------------------------------------------------------- other engines


def rotation_of(target) -> dict:
    """How the target's layers rotate, if all do so as Llama's; else a UserError."""
    config = target.config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rotation:  # none, or one for each kind of layers
        raise common.UserError(
            "the drafter's layers rotate as Llama's, and the target's do not: engines "
            "have no format for it"
        )
    return rotation


def causal_lm(drafter, target):
    """The copied layers of a SpecDec++ drafter, as a causal LM of transformers.

    It has the target's embedding and LM head, so it drafts from the whole vocabulary.
    """
    ours, whole = drafter.config, target.config.get_text_config()
    if ours.draft_model:
        raise common.UserError(
            f"the drafter holds only a head: load {ours.draft_model}"
        )
    rotation_of(target)
    config = common.llama_config(ours.target, ours.intermediate_size)
    names = ("vocab_size", "max_position_embeddings", "rope_parameters")
    names += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config.update({name: getattr(whole, name) for name in names})
    config.num_hidden_layers = len(ours.layers)
    model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    model = model.to(target.device)
    check_rotation(config.to_dict(), target)
    # Without an embedding; the rest of a drafter is its head and its vocabulary.
    model.get_decoder().load_state_dict(drafter.state_dict(), strict=False)
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(target.get_output_embeddings())
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval().requires_grad_(False)


def eagle_files(drafter, target) -> tuple[dict, dict]:
    """The config and the weights of an EAGLE drafter, as its authors name them.

    Raises UserError for a drafter of another architecture.
    """
    config = drafter.config
    right = (config.k, config.num_layers, config.fusion) == (1, 1, "linear")
    biased = config.bias or config.layer.get("attention_bias")
    if not right or biased:
        raise common.UserError(
            "engines read only EAGLE's architecture, without biases: train eagle "
            "with its defaults of k, num_layers, fusion and bias"
        )
    weights = drafter.state_dict()
    del weights["vocab_ids"]
    # Ours reads feature and embedding in this order, theirs the other way round.
    feature, embed = weights.pop("fusion.weight").chunk(2, dim=1)  # (D, D) each
    weights["fc.weight"] = torch.cat([embed, feature], dim=1)
    whole = target.config.get_text_config()
    rotation = rotation_of(target)
    shape = common.llama_config(config.target, config.intermediate_size).to_diff_dict()
    shape |= config.layer
    shape |= {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": whole.vocab_size,
        "max_position_embeddings": whole.max_position_embeddings,
        "rope_theta": rotation["rope_theta"],
        "rope_parameters": rotation,
    }
    check_rotation(shape, target)
    return shape, {name: x.contiguous() for name, x in weights.items()}


def write_engine(method: str, drafter: str, out: Path, target: str | None) -> None:
    """Write the folder `out` for other engines, see above."""
    model, tokenizer = common.load_target(target, dtype="auto")
    network = common.load_drafter(cli.import_method(method).Drafter, drafter, model)
    with files.whole_folder(out) as part:
        if method == "specdecpp":
            causal_lm(network, model).save_pretrained(part)
            tokenizer.save_pretrained(part)
            # transformers 5 writes the base only into rope_parameters, where older
            # readers (mlx-lm 0.32 among them) do not look.
            path = part / "config.json"
            config = json.loads(path.read_bytes())
            base = (config.get("rope_parameters") or {}).get("rope_theta")
            if base is not None:
                files.write(path, json.dumps(config | {"rope_theta": base}, indent=1))
        else:
            shape, weights = eagle_files(network, model)
            (part / "config.json").write_text(json.dumps(shape, indent=1) + "\n")
            save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
            # For SGLang's --speculative-token-map.
            torch.save(network.vocab_ids.cpu(), part / "vocab_ids.pt")


def main(argv: list[str] | None = None) -> None:
    """Write a folder."""
    parser = cli.OneLineParser(description=__doc__)
    ours = [name for name in cli.METHODS if name in cli.trainable()]
    parser.add_argument("method", choices=[*ours, "eagle"])
    parser.add_argument("drafter", help="its folder, or an id of the hub")
    parser.add_argument("out", type=Path, help="the folder to write")
    about = "write this target as well; with --engine: what the drafter was made for; "
    parser.add_argument("--target", help=about + cli.TARGET_HELP)
    parser.add_argument(
        "--engine", action="store_true", help="for vLLM, SGLang and others; see above"
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    engine = args.method in ("specdecpp", "eagle")
    common.refuse(
        (args.out.exists(), f"{args.out} exists already: give another folder"),
        (
            args.engine and not engine,
            f"no engine reads {args.method}'s drafters: take specdecpp or eagle",
        ),
        (
            args.method == "eagle" and not args.engine,
            "eagle can only be written for other engines: add --engine",
        ),
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    where = args.method, args.drafter, args.out
    if args.engine:
        write_engine(*where, cli.target(args.target or default_target.NAME))
    else:
        write(*where, args.target)
    print(f"export.py: wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
