"""packed.py: same numbers, same decoding."""

import gc

import torch
from tiny import family, make_glide, make_llama

import common
import glide
from support import packed


def test_packed_layers_compute_the_same_for_any_number_of_rows():
    for bias in (True, False):
        layer = torch.nn.Linear(33, 50, bias=bias).requires_grad_(False)
        shapes = ((), (1,), (2,), (3,), (5,), (40,), (1, 1), (2, 3), (1, 7))
        inputs = [torch.randn(*shape, 33) for shape in shapes]
        expected = [layer(x) for x in inputs]
        layer = packed.PackedLinear(layer)
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-5)


def test_packed_decoding_is_still_lossless():
    target = make_llama().float()
    drafter = packed.pack(make_glide(target, draft_vocab=20))
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 40, "do_sample": False}
    truth = target.generate(ids, **options)
    packed.pack(target)
    assert torch.equal(target.generate(ids, **options), truth)
    output = target.generate(ids, custom_generate=glide.generate, drafter=drafter, **options)
    assert torch.equal(output, truth)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.state_dict().items())


def test_a_drafters_head_is_packed_once():
    target = packed.pack(make_llama().float())
    one, other = (packed.pack(make_glide(target, draft_vocab=size)) for size in (20, 30))
    whole = target.get_output_embeddings()
    heads = [common.draft_head(target, drafter.draft_ids) for drafter in (one, other, one)]
    assert heads[0] is heads[2] and heads[1].out_features == 30 and len(whole.selected) == 2
    x = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(heads[0](x), x @ whole.weight[one.draft_ids].T)
    granite = packed.pack(family("Granite", logits_scaling=4.0).float().requires_grad_(False))
    few = torch.tensor([3, 30, 31])
    logits = common.target_logits(granite, x, few)
    torch.testing.assert_close(common.draft_head(granite, few)(x), logits)
    del one, heads
    gc.collect()
    assert len(whole.selected) == 1  # with the drafter its head is given up


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    target = packed.pack(make_llama().float())
    assert not any(isinstance(module, packed.PackedLinear) for module in target.modules())
