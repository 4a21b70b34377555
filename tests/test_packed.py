"""packed.py: same numbers, same decoding, embeddings and weights untouched."""

import gc
import os

import torch
from test_glide import decode, make_drafter
from tiny import make_llama
from transformers.integrations import sdpa_attention

import common
from support import packed


def test_packed_layers_compute_the_same_for_any_number_of_rows():
    layer = torch.nn.Linear(33, 50).requires_grad_(False)
    shapes = ((1,), (2,), (3,), (5,), (40,), (1, 1), (2, 3), (1, 7))
    inputs = [torch.randn(*shape, 33) for shape in shapes]
    expected = [layer(x) for x in inputs]
    layer = packed.pack(layer)
    for x, y in zip(inputs, expected):
        torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)


def test_other_types_are_left_alone(monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_SDPA_FORCE_GQA", raising=False)
    layer = torch.nn.Linear(8, 8).double()
    assert packed.pack(layer) is layer
    assert "TRANSFORMERS_SDPA_FORCE_GQA" not in os.environ  # it would slow a GPU down
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double(), torch.nn.Tanh()]
    model = packed.pack(torch.nn.Sequential(*layers))
    kinds = [packed.PackedLinear, torch.nn.Linear, torch.nn.Tanh]
    assert [type(module) for module in model] == kinds


def test_packed_decoding_is_still_lossless():
    target = make_llama().float()
    drafter = packed.pack(make_drafter(target, draft_vocab=20).float())
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    truth = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=40, do_sample=False)
    packed.pack(target)
    output, stats = decode(target, drafter, torch.tensor([[5, 6, 7]]))
    assert torch.equal(output, truth) and stats.emitted == 40
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())


def test_a_verification_copies_no_keys_and_values(monkeypatch):
    """transformers would repeat grouped ones for each query head, where there is a mask."""
    monkeypatch.delenv("TRANSFORMERS_SDPA_FORCE_GQA", raising=False)
    target, ids = make_llama().float(), torch.arange(1, 9)[None]
    copied = []

    def repeat(states, times):
        copied.append(states.shape)
        return states.repeat_interleave(times, dim=1)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat)

    def verify():
        cache = common.GrowingCache(3)
        common.forward(target, ids, cache)
        mask = common.ancestor_mask(torch.tensor([-1, 0, 0]), 8, torch.float32)
        return common.forward(target, ids[:, :4], cache, attention_mask=mask)[0]

    expected = verify()
    assert copied
    copied.clear()
    packed.pack(target)
    torch.testing.assert_close(verify(), expected, atol=1e-5, rtol=1e-5)
    assert not copied


def test_a_drafters_head_is_packed_once():
    target = packed.pack(make_llama().float())
    one, other = (packed.pack(make_drafter(target, draft_vocab=size).float()) for size in (20, 30))
    whole = target.get_output_embeddings()
    heads = [common.draft_head(target, drafter.draft_ids) for drafter in (one, other, one)]
    assert heads[0] is heads[2] and heads[1].out_features == 30 and len(whole.selected) == 2
    x = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(heads[0](x), x @ whole.weight[one.draft_ids].T)
    del one, heads
    gc.collect()
    assert len(whole.selected) == 1  # with the drafter its head is given up
