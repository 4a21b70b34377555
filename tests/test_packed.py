"""packed.py: same numbers, same decoding, other models untouched."""

import gc

import torch
from tiny import make_llama
from transformers.integrations import sdpa_attention

import common
import glide
from support import packed


def make_drafter(target, draft_vocab):
    config = glide.Config(intermediate_size=48, draft_vocab=draft_vocab)
    counts = torch.arange(target.config.vocab_size)
    return glide.build(config, target, counts).to(target.dtype).eval()


def test_packed_layers_compute_the_same_for_any_number_of_rows():
    for bias in (True, False):
        layer = torch.nn.Linear(33, 50, bias=bias).requires_grad_(False)
        shapes = ((), (1,), (2,), (3,), (5,), (40,), (1, 1), (2, 3), (1, 7))
        inputs = [torch.randn(*shape, 33) for shape in shapes]
        expected = [layer(x) for x in inputs]
        layer = packed.pack(layer)
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)


def test_other_types_are_left_alone():
    layer = torch.nn.Linear(8, 8).double()
    assert packed.pack(layer) is layer
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double(), torch.nn.Tanh()]
    model = packed.pack(torch.nn.Sequential(*layers))
    kinds = [packed.PackedLinear, torch.nn.Linear, torch.nn.Tanh]
    assert [type(module) for module in model] == kinds
    assert packed.pack(make_llama()).config._attn_implementation == "sdpa"  # float64


def test_packed_decoding_is_still_lossless():
    target = make_llama().float()
    drafter = packed.pack(make_drafter(target, 20))
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 40, "do_sample": False}
    truth = target.generate(ids, **options)
    packed.pack(target)
    assert torch.equal(target.generate(ids, **options), truth)
    output = target.generate(ids, custom_generate=glide.generate, drafter=drafter, **options)
    assert torch.equal(output, truth)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())


def test_only_a_packed_model_copies_no_keys_and_values(monkeypatch):
    """transformers repeats grouped ones for each query head, where there is a mask."""
    copied = []
    repeat = sdpa_attention.repeat_kv

    def note(states, times):
        copied.append(states.shape)
        return repeat(states, times)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", note)
    target, other = make_llama().float(), make_llama().float()
    packed.pack(target)
    ids = torch.arange(1, 9)[None]
    draft = common.Draft(torch.tensor([3, 4, 5]), torch.tensor([-1, 0, 0]))
    logits = []
    for model in (target, other):
        cache = common.GrowingCache(3)
        common.forward(model, ids, cache)
        fed, mask, positions = common.tree_inputs(ids, draft, 8, torch.float32)
        logits.append(common.forward(model, fed, cache, mask, positions)[0])
        assert bool(copied) == (model is other)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_a_drafters_head_is_packed_once():
    target = packed.pack(make_llama().float())
    one, other = (packed.pack(make_drafter(target, size)) for size in (20, 30))
    whole = target.get_output_embeddings()
    heads = [common.draft_head(target, drafter.draft_ids) for drafter in (one, other, one)]
    assert heads[0] is heads[2] and heads[1].out_features == 30 and len(whole.selected) == 2
    x = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(heads[0](x), x @ whole.weight[one.draft_ids].T)
    del one, heads
    gc.collect()
    assert len(whole.selected) == 1  # with the drafter its head is given up
