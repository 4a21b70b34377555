"""Every method on every family of targets: a training step, save, load, lossless decoding; what is
refused, and how."""

import dataclasses
import functools
import importlib
import json
import runpy

import ngram
import pytest
import torch
import transformers
from test_common import family, sighted
from test_house import METHODS, ROOT
from tiny import chi_square_p_value, enumerate_joint, slow
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import bench
import common
import train
from support import data

VOCAB = 13  # few tokens, so that even an untrained drafter hits some
TARGETS = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, MHA": {"num_key_value_heads": 4},
    "Llama, MQA, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Llama, biases": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": None},
    "Mistral, window": {"sliding_window": 32},
    "Qwen2": {},
    "Qwen2, tied": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Qwen3, MQA": {"num_key_value_heads": 1},
    "Gemma2": {},
    "Gemma2, capped": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "Gemma2, untied": {"tie_word_embeddings": False},
    "Gemma3": {},
    "Gemma3, window": {"sliding_window": 32},
    "Phi3": {},
    "Phi3, tied": {"tie_word_embeddings": True},
    "GPT2": {},
    "GPT2, untied": {"tie_word_embeddings": False},
    "GPTNeoX": {},
    "GPTNeoX, tied": {"tie_word_embeddings": True},
    "Olmo": {},  # norms without weights
    "Olmo2": {},  # norms after the sub-layers
}
# what differs little from another one waits for the slow suite
LONG_TAIL = {
    "Llama, tied",
    "Llama, MHA",
    "Llama, biases",
    "Llama, MQA, tied",
    "Mistral",
    "Mistral, window",
    "Qwen2",
    "Qwen2, tied",
    "Qwen3",
    "Qwen3, MQA",
    "Gemma2",
    "Gemma2, untied",
    "Gemma3",
    "Gemma3, window",
    "Phi3",
    "Phi3, tied",
    "GPT2, untied",
    "GPTNeoX",
    "GPTNeoX, tied",
    "Olmo",
    "Olmo2",
}
CASES = [slow(name) if name in LONG_TAIL else name for name in TARGETS]


HITS = {}  # accepted draft tokens by method


@functools.cache
def make_target(name, vocab=VOCAB):
    """The tiny target in float64, frozen, and what it answers to a prompt of seven tokens."""
    target = family(name.split(",")[0], vocab_size=vocab, **TARGETS[name]).requires_grad_(False)
    ids = torch.randint(1, vocab, (1, 7), generator=torch.Generator().manual_seed(4))
    return target, ids, target.generate(ids, max_new_tokens=20, do_sample=False)


def make_batch(target, drafter):
    generator = torch.Generator().manual_seed(0)
    sequences = [
        (torch.randint(1, VOCAB, (n,), generator=generator), torch.arange(n) >= 3)
        for n in (9, 14, 6)
    ]
    features = train.Features(target, sequences, list(drafter.kv_layers), None)
    return train.make_batch([0, 1, 2], sequences, features, torch.arange(3), 0.3, "cpu")


def make_drafter(name, target, folder, **options):
    """The keyword arguments of `generate` for a method, with a drafter if it has one: trained by
    one step of the method's loss, saved and loaded again.

    Args: options: fields of its Config; those that other methods have are small ones here.
    """
    module = importlib.import_module(name)
    arguments = {"custom_generate": module.generate}
    fields = {field.name for field in dataclasses.fields(module.Config)}
    if not hasattr(module, "build"):  # nothing is trained
        if "base" in fields:  # it works on another method's drafter
            base = importlib.import_module(module.Config().base)
            drafter = make_drafter(base.__name__, target, folder, **options)["drafter"]
            arguments |= {"base": base, "base_drafter": drafter}
        return arguments
    if "stop" in fields:  # SpecDec++ has no trained head here
        arguments["stop"] = "fixed"
    small = {"intermediate_size": 16, "draft_vocab": 11}
    small = {key: value for key, value in small.items() if key in fields}
    config = module.Config(target=common.target_shape(target), **small | options)
    drafter = module.build(config, target, torch.arange(VOCAB)).float().train()
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in drafter.parameters() if p.requires_grad], lr=1e-3)
    batch = make_batch(target, drafter)
    loss = module.loss(drafter, target, batch)
    loss.backward()
    grads = {key: p.grad for key, p in drafter.named_parameters() if p.requires_grad}
    assert loss.isfinite() and all(g is None or g.isfinite().all() for g in grads.values())
    assert [key for key, g in grads.items() if g is not None and g.abs().sum() > 0], (
        "nothing learns"
    )
    optimizer.step()
    assert any(not torch.equal(before[key], value) for key, value in drafter.state_dict().items())
    with torch.no_grad():
        total, count = module.alpha(drafter.eval(), target, batch)
    assert 0 <= float(total) <= count
    drafter.save_pretrained(folder)
    weights = {key: x for key, x in drafter.state_dict().items() if x.is_floating_point()}
    held = [key for key, weight in weights.items() if VOCAB in weight.shape]
    assert not held, f"{held}: embedding and LM head are the target's"
    loaded = common.load_drafter(module.Drafter, folder, target)
    for (key, ours), theirs in zip(drafter.state_dict().items(), loaded.state_dict().values()):
        assert torch.equal(ours.to(theirs.dtype), theirs), key
    return arguments | {"drafter": loaded}


def most_free(method) -> dict:
    """The options of a method's variant with copies from the context, and a tree by confidence."""
    variants = getattr(importlib.import_module(method), "VARIANTS", {})
    return variants.get("both") or variants.get("copies") or {}


class Streamer:
    """Notes what transformers' streamers get: the prompt, then tokens as they come, then an end."""

    def __init__(self):
        self.got = []

    def put(self, tokens):
        self.got.append(tokens.flatten().tolist())

    def end(self):
        self.got.append("end")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target_name", CASES)
def test_trains_saves_loads_and_decodes_without_loss(target_name, method, tmp_path):
    target, ids, truth = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    stats, streamer = common.Stats(), Streamer()
    given = {"stats": stats, "token_streamer": streamer} | arguments
    with torch.no_grad():
        output = target.generate(ids, max_new_tokens=20, do_sample=False, **given)
    assert torch.equal(output, truth)
    prompt, *rounds, last = streamer.got
    assert (prompt, last) == (ids[0].tolist(), "end")
    assert sum(rounds, []) == truth[0, ids.shape[1] :].tolist()
    assert stats.emitted == 20 and stats.drafted > 0
    HITS[method] = HITS.get(method, 0) + sum(stats.accepted)
    penalised = dict(
        max_new_tokens=12, do_sample=False, repetition_penalty=1.4, no_repeat_ngram_size=3
    )
    with torch.no_grad():
        assert torch.equal(
            target.generate(ids, **penalised, **arguments), target.generate(ids, **penalised)
        )
        free = arguments | most_free(method) | {"stats": common.Stats()}
        output = target.generate(ids, max_new_tokens=20, do_sample=False, **free)
    assert torch.equal(output, truth) and free["stats"].emitted == 20


def test_some_drafts_were_accepted():
    """Otherwise the comparisons above would never have moved a cache row."""
    assert set(HITS) <= set(METHODS) and min(HITS.values(), default=1) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target_name", ["Mistral, window", slow("Gemma3, window")])
def test_a_sliding_window_is_used_up_to_its_end_and_not_beyond(target_name, method, tmp_path):
    target, ids, _ = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    truth = target.generate(ids, max_new_tokens=25, do_sample=False)
    assert torch.equal(
        target.generate(ids, max_new_tokens=25, do_sample=False, **arguments), truth
    )  # 32 in all
    with pytest.raises(ValueError, match="33 exceed the target's sliding window of 32"):
        target.generate(ids, max_new_tokens=26, do_sample=False, **arguments)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
WIDE = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3}


def make_other(name, **options):
    """A random model of a family that the tests above do not have, in float64."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    return model.double().eval().requires_grad_(False)


MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}
CONVOLUTION = WIDE | {"layer_types": ["conv", "full_attention"]}
CHUNKS = WIDE | {"attention_chunk_size": 16, "num_local_experts": 2, "head_dim": 8}


@pytest.mark.parametrize(
    "message, name, options",
    [
        ("no position_ids", "Mpt", MPT),
        ("ALiBi", "Falcon", SMALL | {"alibi": True}),
        ("layers of another kind", "Lfm2", CONVOLUTION),
        ("attention chunk of 16", "Llama4Text", CHUNKS | {"intermediate_size_mlp": 48}),
    ],
)
def test_targets_that_would_misread_a_tree_are_refused(message, name, options):
    target = make_other(name, **options)
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[3, 4]]), max_new_tokens=20, custom_generate=ngram.generate)


def test_longrope_is_refused_where_an_answer_crosses_its_border():
    """Beyond 32 tokens a forward takes other rotary factors, for the rows in the cache as well."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    rope |= {"original_max_position_embeddings": 32}
    options = WIDE | {"max_position_embeddings": 256, "original_max_position_embeddings": 32}
    target = make_other("Phi3", **options, rope_parameters=rope)
    ids = torch.arange(40)[None] % (VOCAB - 1) + 1
    for prompt, new, crosses in ((27, 6, 0), (27, 7, 1), (33, 1, 1), (34, 9, 0)):
        asked = {"max_new_tokens": new, "do_sample": False}
        if crosses:
            with pytest.raises(ValueError, match="longrope across 32 tokens"):
                target.generate(ids[:, :prompt], custom_generate=ngram.generate, **asked)
        else:
            answer = target.generate(ids[:, :prompt], custom_generate=ngram.generate, **asked)
            assert torch.equal(answer, target.generate(ids[:, :prompt], **asked))


SHARED = WIDE | {"num_hidden_layers": 4, "head_dim": 8, "num_kv_shared_layers": 2}
SHARED |= {"layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4}
SHARED |= {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 4}


@pytest.mark.parametrize(
    "name, options",
    [
        ("OPT", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
        slow("Gemma3nText", SHARED),
    ],
)
def test_a_wrapped_decoder_and_shared_keys_and_values(name, options):
    """OPT's states come from a module inside its base model; half of Gemma-3n's cache is empty."""
    target = make_other(name, **options)
    ids = torch.tensor([[3, 4, 3, 5, 3, 4, 3, 5]])
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    given = {"custom_generate": ngram.generate, "copies": 6}
    assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False, **given), plain)


@pytest.mark.parametrize("method", METHODS)
def test_the_text_side_of_a_target_that_sees_images(method, tmp_path):
    """Gemma-3's layers, rotary tables and final norm lie deeper than a text model's."""
    target = sighted(vocab_size=VOCAB)
    given = make_drafter(method, target, tmp_path)
    ids = torch.tensor([[3, 4, 3, 5, 3, 4, 3, 5]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, **given), plain)
    if method in ("glide", "falcon", "ctc_drafter"):
        module, config = importlib.import_module(method), given["drafter"].config
        fresh, text = module.build(config, target, torch.arange(VOCAB)), target.get_decoder()
        ours, theirs = getattr(fresh, "layers", [fresh])[0].self_attn, text.layers[-1].self_attn
        assert torch.equal(ours.q_proj.weight, theirs.q_proj.weight.float())
        assert torch.equal(fresh.norm.weight, text.norm.weight.float())  # zeros: Gemma adds 1


def test_soft_caps_matter():
    """Otherwise the capped target above would prove nothing."""
    target, ids, _ = make_target("Gemma2, capped")
    plain = make_target("Gemma2")[0]
    plain = type(plain)(type(plain.config)(**plain.config.to_dict())).double().eval()
    plain.load_state_dict(target.state_dict())
    capped, other = target(ids).logits, plain(ids).logits
    assert capped.abs().max() <= 2 and not torch.allclose(capped, other, atol=0.1)
    half = (
        type(plain)(
            type(plain.config)(**{**plain.config.to_dict(), "final_logit_softcapping": 2.0})
        )
        .double()
        .eval()
    )
    half.load_state_dict(target.state_dict())
    assert not torch.allclose(capped, half(ids).logits, atol=1e-3)  # attention's cap alone


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("Mistral, window", "GPTNeoX")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target_name", [slow("Gemma2, capped"), slow("GPT2"), *LONG])
def test_sampled_output_follows_the_target(target_name, method, tmp_path):
    target, ids, _ = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    torch.manual_seed(0)
    counts = {}
    for _ in range(1000):
        output = target.generate(ids, max_new_tokens=2, do_sample=True, top_k=0, **arguments)
        key = tuple(output[0, 7:].tolist())
        counts[key] = counts.get(key, 0) + 1
    assert chi_square_p_value(counts, enumerate_joint(target, ids, 2)) > 1e-4


# -------------------------------------------------------------------- tokenizers without a template


@pytest.fixture
def bare_tokenizer():
    words = {w: i for i, w in enumerate(["<end>", "<unk>", *(f"w{i}" for i in range(30))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


def test_without_a_template_training_takes_the_turns_in_order(bare_tokenizer, tmp_path):
    record = {
        "messages": [
            {"role": "user", "content": "w1 w2"},
            {"role": "assistant", "content": "w3"},
            {"role": "user", "content": "w4"},
            {"role": "assistant", "content": "w5 w6"},
        ]
    }
    (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
    [(ids, mask)] = data.read_conversations(str(tmp_path / "d.jsonl"), bare_tokenizer, 64)
    assert bare_tokenizer.convert_ids_to_tokens(ids.tolist()) == [
        "w1",
        "w2",
        "w3",
        "w4",
        "w5",
        "w6",
    ]
    assert mask.tolist() == [False, False, True, False, True, True]


def test_without_a_template_bench_joins_the_turns(bare_tokenizer):
    encoded = bench.encode(bare_tokenizer, ["w1 w2", "w3", "w4"], "cpu")
    assert bare_tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist()) == [
        "w1",
        "w2",
        "w3",
        "w4",
    ]


def test_without_a_template_no_data_is_made(bare_tokenizer, tmp_path):
    with pytest.raises(
        ValueError, match="no chat template; self-distilled data needs a chat model"
    ):
        data.make_conversations(
            make_target("Llama")[0], bare_tokenizer, 2, str(tmp_path / "d.jsonl")
        )
    assert not list(tmp_path.iterdir())


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize("method", [m if m == "cape" else slow(m) for m in METHODS])
@pytest.mark.parametrize("template", [None, slow(TEMPLATE)])
def test_the_demo_of_every_file(bare_tokenizer, template, method, tmp_path, capsys, monkeypatch):
    """What `python falcon.py` does once it has loaded the default target."""
    target = family("Llama", vocab_size=VOCAB, max_position_embeddings=256).requires_grad_(False)
    bare_tokenizer.chat_template = template
    arguments = make_drafter(method, target, tmp_path)
    drafter = arguments.get("drafter", arguments.get("base_drafter"))
    if "stop" in arguments:
        drafter.config.stop = arguments["stop"]
    monkeypatch.setattr(common, "load_target", lambda: (target, bare_tokenizer))
    monkeypatch.setattr(common, "load_drafter", lambda *_: drafter)
    runpy.run_path(str(ROOT / f"{method}.py"), run_name="__main__")
    answer, blank, figures = capsys.readouterr().out.splitlines()[-3:]
    assert 64 < len(answer.split()) <= 128 and not blank and figures.startswith("128 tokens, ")
    assert float(figures.split()[2]) > 1
