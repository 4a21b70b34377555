"""Published drafters' formats: what is read computes what the format means."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from chat import refused
from safetensors.torch import save_file
from tiny import decode, family, make_llama, untrained
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

import common
import falcon
import specdecpp
from support.interop import authors, export
from support.rivals import eagle

D, V, HEADS, SIZE = 16, 48, 2, 24  # of the target in `folder`, SIZE of its drafter
PROMPT = torch.tensor([[5, 9, 47, 6, 5, 47, 5]])
EAGLE = {
    "hidden_size": D,
    "intermediate_size": SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}


eagle_for = partial(untrained, eagle, intermediate_size=SIZE)


@pytest.fixture(scope="module")
def target(folder):
    return common.load_target(str(folder))[0]


def numbers(**shapes):
    """Random weights by name, of these shapes."""
    torch.manual_seed(3)
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def close(ours, theirs):
    return (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


class Published(torch.nn.Module):
    """EAGLE's drafter as its authors publish it: a layer of Llama, or of Qwen2, which
    has biases, without the norm before its attention.
    """

    def __init__(self, biases):
        super().__init__()
        more = {"attention_bias": biases, "attn_implementation": "eager"}
        config = LlamaConfig(**EAGLE, **more)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = torch.nn.Identity()
        layer.self_attn.o_proj.bias = None
        self.layers = torch.nn.ModuleList([layer])
        self.fc = torch.nn.Linear(2 * D, D, bias=biases)
        self.rotary = LlamaRotaryEmbedding(config)
        torch.manual_seed(3)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.3)

    def forward(self, features, embeds):
        """Predictions (T, D) from features (T, D) and the next tokens' embeddings."""
        x = self.fc(torch.cat([embeds, features], dim=-1))[None]
        tables = self.rotary(x, torch.arange(len(features))[None])
        mask = torch.full((len(features),) * 2, float("-inf")).triu(1)
        return self.layers[0](x, mask[None, None], position_embeddings=tables)[0]


def written(folder, tmp_path, method, config, weights, file, *more):
    """The folder that authors.py makes of a published one."""
    source, out = tmp_path / "published", tmp_path / "out"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(weights, source / file)
    else:
        torch.save(weights, source / file)
    argv = [method, str(source), str(out), "--target", str(folder), *more]
    authors.main(argv)
    return out


def decodes_as_plain(target, drafts, drafter):
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ours, _ = decode(target, PROMPT, partial(drafts, drafter=drafter), **options)
    return torch.equal(ours, target.generate(PROMPT, **options))


@pytest.mark.parametrize("biases", [False, True])
def test_eagle(folder, target, tmp_path, biases):
    published = Published(biases)
    weights = published.state_dict()
    embedding = target.get_input_embeddings().weight
    stored = weights | {"embed_tokens.weight": embedding.clone()}
    file = "pytorch_model.bin" if biases else "model.safetensors"
    out = written(folder, tmp_path, "eagle", EAGLE, stored, file)
    drafter = common.load_drafter(eagle.Drafter, out, target)
    features = torch.randn(1, 6, D)
    with torch.no_grad():
        expected = published(features[0], embedding[PROMPT[0, 1:]])
        fused, _ = drafter.fuse(target, features, PROMPT[:, 1:])
        positions = torch.arange(6)[None]
        mask = falcon.relaxed_mask(6, 1, torch.zeros(1, dtype=torch.long))
        found = drafter.attend(target, fused, positions, mask)[0]
    assert close(found, expected)
    # The newest prediction is fed back as it is, without a norm.
    assert decodes_as_plain(target, eagle.drafts, drafter)
    if biases:
        with refused("engines read only EAGLE's architecture"):
            export.eagle_files(drafter, target)
        return
    config, found = export.eagle_files(drafter, target)
    assert config["rms_norm_eps"] == EAGLE["rms_norm_eps"]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_head_of_specdecpp(folder, target, tmp_path):
    """One residual block, applied D times; two outputs, of which the second accepts."""
    block = numbers(weight=(D, D), bias=(D,))
    outputs = numbers(weight=(2, D), bias=(2,))
    stored = {f"model.2.{name}": x for name, x in outputs.items()}
    for n in range(2):
        stored |= {f"model.{n}.linear.{name}": x.clone() for name, x in block.items()}
    config = {"hidden_size": D, "num_layers": 2}
    more = ("--draft-model", str(folder))
    file = "model.safetensors"
    out = written(folder, tmp_path, "specdecpp", config, stored, file, *more)
    drafter = common.load_drafter(specdecpp.Drafter, out, target)
    states = torch.randn(5, D)
    x = states
    for _ in range(2):
        x = x + F.silu(F.linear(x, block["weight"], block["bias"]))
    both = F.linear(x, outputs["weight"], outputs["bias"]).softmax(-1)
    assert close(drafter.head(states).sigmoid(), both[:, 1])
    assert decodes_as_plain(target, specdecpp.drafts, drafter)


def test_what_is_exported_is_what_the_authors_format_holds(folder, target, tmp_path):
    """EAGLE's drafter leaves in a folder that the same reader takes."""
    drafter = eagle_for(target)
    with torch.no_grad():  # a new drafter's fusion is a sum, the same in any order
        for weight in drafter.parameters():
            weight.normal_()
    drafter.save_pretrained(tmp_path / "ours")
    out = str(tmp_path / "engine")
    argv = ["eagle", str(tmp_path / "ours"), out, "--engine", "--target", str(folder)]
    export.main(argv)
    again = authors.convert("eagle", out, target)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["vocab_size"] == V
    for number, other in enumerate(({"bias": True}, {"k": 2}, {"num_layers": 2})):
        eagle_for(target, **other).save_pretrained(tmp_path / str(number))
        argv[1], argv[2] = str(tmp_path / str(number)), str(tmp_path / "no")
        with refused("engines read only EAGLE's"):
            export.main(argv)
    assert not (tmp_path / "no").exists()
    with refused("eagle can only .*: add --engine"):
        export.main(argv[:3])


@pytest.mark.parametrize(
    "name, said",
    [
        ("GPT2", "engines have no format"),  # learned positions
        ("Gemma3", "engines have no format"),  # two rotations
        ("Cohere", "eagle.py rotates as the target"),  # other pairs
    ],
)
def test_eagle_leaves_for_targets_that_rotate_as_llama_alone(name, said):
    with refused(said):
        export.eagle_files(eagle_for(family(name)), family(name))
    # The scaling of a rotation leaves with it.
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    other = family("Llama", rope_parameters=scaling)
    config, _ = export.eagle_files(eagle_for(other), other)
    assert config["rope_parameters"]["factor"] == 4.0


def test_a_new_eagle_starts_at_the_size_of_the_features():
    """The target's layers would be 100 times too loud, as those of a real one are."""
    target = make_llama()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight.mul_(100)
    drafter = eagle_for(target)
    ids = torch.arange(1, 9)[None]
    hidden = common.last_hidden(target, ids)
    x, _ = drafter.fuse(target, hidden[:, :-1], ids[:, 1:])
    predicted = drafter.attend(target, x, torch.arange(7)[None], None)
    assert predicted.norm() < 3 * hidden.norm()


def test_the_authors_falcon_can_be_built(target):
    """LSTM, k = 2 and no norms, with their first layer's input as it is."""
    drafter = eagle_for(target, k=2, fusion="lstm", num_layers=2)
    names = drafter.state_dict().keys()
    assert [name for name in names if "input_layernorm" in name] == [
        "layers.1.input_layernorm.weight"
    ]
    assert "fusion.weight_hh_l1" in names and "norm.weight" not in names
    assert decodes_as_plain(target, eagle.drafts, drafter.eval())


def test_copied_layers_leave_as_a_causal_lm(folder, target, tmp_path):
    config = specdecpp.Config(layers=[0, -1], draft_vocab=32)
    drafter = specdecpp.build(config, target, torch.arange(V))
    drafter.save_pretrained(tmp_path / "ours")
    out = str(tmp_path / "lm")
    where = ["specdecpp", str(tmp_path / "ours"), out]
    export.main([*where, "--engine", "--target", str(folder)])
    lm, tokenizer = common.load_target(out)
    assert len(tokenizer) == V
    model = specdecpp.model_of(drafter, target)
    with torch.no_grad():
        expected = model.logits(model.hidden(PROMPT))
        assert close(lm(PROMPT).logits[..., drafter.vocab_ids], expected)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assisted = target.generate(PROMPT, assistant_model=lm, **options)
    assert torch.equal(assisted, target.generate(PROMPT, **options))
    with refused("no engine reads glide's drafters"):
        export.main(["glide", *where[1:2], str(tmp_path / "x"), "--engine"])


def test_what_is_not_in_the_format_is_named(folder, tmp_path):
    good = Published(biases=False).state_dict()

    def named(said, config=EAGLE, **weights):
        given = {name: x for name, x in (good | weights).items() if x is not None}
        with refused(f"published.*{said}"):
            written(folder, tmp_path, "eagle", config, given, "model.safetensors")

    named("not in eagle's format .'fc.weight'", **{"fc.weight": None})
    missing = "layers.0.self_attn.q_proj.weight"
    named(f"format .*Missing key.*{missing}", **{missing: None})
    named("format .*size mismatch", **{missing: torch.zeros(D, D + 1)})
    named("format .*Unexpected key.*norm.weight", **{"norm.weight": torch.ones(D)})
    embedding = {"embed_tokens.weight": torch.ones(V, D)}
    named("its embedding is not the target's", **embedding)
    named("rotates by base 500000", config=EAGLE | {"rope_theta": 500000.0})
    named(r"it has \(4, 1\) heads", config=EAGLE | {"num_attention_heads": 4})
    # Vicuna's drafters name only the heads; the target here shares its key heads.
    heads = {key: x for key, x in EAGLE.items() if key != "num_key_value_heads"}
    named(rf"it has \({HEADS}, {HEADS}\) heads", config=heads)
    without = {key: x for key, x in EAGLE.items() if "rms" not in key}
    named("format .'rms_norm_eps'", config=without)
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    argv = ["eagle", f"{tmp_path}/empty", f"{tmp_path}/out", "--target", str(folder)]
    with refused("empty has no config.json with"):
        authors.main(argv)
    (tmp_path / "empty" / "config.json").write_text("{}")
    for file in authors.FILES:
        (tmp_path / "empty" / file).write_bytes(b"damaged")
        with refused("empty is not in eagle's format"):
            authors.main(argv)
        (tmp_path / "empty" / file).unlink()
    with refused("no a/b/c, here or on the hub"):
        authors.main([argv[0], "a/b/c", *argv[2:]])
    with refused("--draft-model goes with specdecpp"):
        authors.main(["specdecpp", *argv[1:]])
