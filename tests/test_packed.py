"""packed.py: same numbers, same decoding, and a choice that is never slower."""

import copy
import gc
import itertools
import types

import pytest
import torch
from tiny import family, make_glide, make_llama

import common
import glide
from support import packed

# ["linear"] on a machine without the others
HERE = packed.candidates(make_llama().half().float())


def is_packed(model):
    return any(isinstance(module, packed.PackedLinear) for module in model.modules())


def test_every_kernel_computes_the_same_for_any_number_of_rows():
    shapes = ((), (1,), (2,), (3,), (5,), (40,), (1, 1), (2, 3), (1, 7))
    for bias, *kernels in itertools.product((True, False), HERE, HERE):
        layer = torch.nn.Linear(33, 50, bias=bias).bfloat16().float()
        layer.requires_grad_(False)
        ours = packed.PackedLinear(layer, kernels)
        for shape in shapes:
            x = torch.randn(*shape, 33)
            torch.testing.assert_close(ours(x), layer(x), atol=1e-5, rtol=1e-5)


def test_an_lstm_is_packed_with_its_state():
    for kernels in itertools.product(HERE, HERE):
        whole = torch.nn.Module()
        whole.lstm = torch.nn.LSTM(20, 30, num_layers=2, batch_first=True)
        whole.other = torch.nn.LSTM(20, 30, bidirectional=True)
        whole.linear = torch.nn.Linear(30, 30).bfloat16().float()
        assert "float16" not in packed.candidates(whole)  # it would round the LSTM's
        whole.bfloat16().float().requires_grad_(False)
        twin = packed.pack(whole, kernels)
        assert type(twin.lstm) is packed.PackedLSTM and type(twin.other) is type(
            whole.other
        )
        assert twin.state_dict().keys() == whole.state_dict().keys()
        x = torch.randn(3, 5, 20)
        expected, (h, c) = whole.lstm(x)
        start, state = twin.lstm(x[:, :2])
        end, state = twin.lstm(x[:, 2:], state)
        torch.testing.assert_close(torch.cat([start, end], dim=1), expected)
        torch.testing.assert_close(state, (h, c))


def test_a_packed_target_is_a_second_object_over_the_same_weights():
    target = make_llama().float()
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 40, "do_sample": False}
    truth = target.generate(ids, **options)
    twin = packed.pack(target)
    drafter = packed.pack(make_glide(target, draft_vocab=20))
    assert is_packed(twin) and is_packed(drafter) and not is_packed(target)
    assert target.config._attn_implementation == "sdpa"
    assert twin.config._attn_implementation != "sdpa"
    weights = dict(twin.named_parameters())
    copied = copy.deepcopy(twin).half()
    assert {weight.dtype for weight in copied.parameters()} == {torch.float16}
    for name, weight in target.named_parameters():
        assert weights[name].data_ptr() == weight.data_ptr()
        assert weight.dtype == torch.float32
    for model in (target, twin):
        assert torch.equal(model.generate(ids, **options), truth)
        decoder = common.speculate(glide.drafts, drafter)
        output = model.generate(ids, custom_generate=decoder, **options)
        assert torch.equal(output, truth)


def test_a_kernel_that_is_slow_here_is_not_chosen(monkeypatch):
    """By a clock that kernels move: each is fastest for some numbers of rows."""
    cost = {("linear", 1): 3, ("onednn", 1): 2, ("float16", 1): 9}
    for name, seconds in (("linear", 4), ("onednn", 5), ("float16", 3)):
        cost[name, packed.SEVERAL] = seconds
    now = [0.0]

    def prepare(kernel, weight, bias):
        def product(rows):
            now[0] += cost[kernel, len(rows)]

        return product

    monkeypatch.setattr(packed, "prepare", prepare)
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(packed, "time", clock)
    model = make_llama().float()
    names = ["onednn", "linear", "float16"]
    for offered in (names, names[1:]):
        assert packed.fastest(model, offered) == (offered[0], "float16")


def test_float16_is_offered_only_where_it_holds_the_weights():
    if "float16" not in HERE:
        pytest.skip("this torch has no float16 kernel")
    target = make_llama().float()
    for dtype, offered in ((torch.float16, 1), (torch.bfloat16, 1), (None, 0)):
        with torch.no_grad():
            for weight in packed.packable(target):
                weight.normal_(std=0.1)
                if dtype:
                    weight.copy_(weight.to(dtype))
        assert ("float16" in packed.candidates(target)) == offered
    with torch.no_grad():
        weight.fill_(1e5)  # more than float16 has
    assert not packed.is_float16(weight)
    assert "float16" not in packed.pack(target, ("float16", "float16")).kernels


def test_a_drafters_head_is_packed_once():
    target = packed.pack(make_llama().float())
    one = packed.pack(make_glide(target, draft_vocab=20))
    other = packed.pack(make_glide(target, draft_vocab=30))
    whole = target.get_output_embeddings()
    heads = [common.draft_head(target, each.vocab_ids) for each in (one, other, one)]
    assert heads[0] is heads[2] and heads[1].out_features == 30
    assert len(whole.selected) == 2
    x = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(heads[0](x), x @ whole.weight[one.vocab_ids].T)
    granite = packed.pack(family("Granite", logits_scaling=4.0).float())
    few = torch.tensor([3, 30, 31])
    logits = common.target_logits(granite, x, few)
    torch.testing.assert_close(common.draft_head(granite, few)(x), logits)
    del one, heads
    gc.collect()
    assert len(whole.selected) == 1  # with the drafter its head is given up


def test_what_has_no_kernels_stays_as_it_is(monkeypatch):
    target = make_llama()  # float64
    assert packed.pack(target) is target and not is_packed(target)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    assert packed.candidates(make_llama().float()) == ["linear"]


def test_layers_that_read_one_input_share_a_product():
    """Same bits as apart, also if the names mislead or the input is written to."""
    kernels = [name for name in HERE if name != "linear"][-1:] * 2
    if not kernels:
        pytest.skip("no kernel here packs a weight")
    parent = torch.nn.Module()
    for name, size, bias in (("q", 40, True), ("k", 16, False), ("v", 16, True)):
        layer = torch.nn.Linear(32, size, bias=bias).half().float()
        setattr(parent, f"{name}_proj", layer.requires_grad_(False))
    names = packed.TOGETHER[0]
    apart = [packed.PackedLinear(getattr(parent, name), kernels) for name in names]
    packed.join(parent, names, kernels)
    joined = [getattr(parent, name) for name in names]
    shared = joined[0].outputs.func
    assert all(layer.outputs.func is shared for layer in joined)
    calls = []
    product = shared.product
    shared.product = lambda x: calls.append(len(x)) or product(x)
    for shape in ((1, 1), (1, 5), (2, 3)):
        x, other = torch.randn(2, *shape, 32)
        with torch.no_grad():
            for order in (1, -1):
                calls.clear()
                for mine, theirs in zip(joined[::order], apart[::order]):
                    assert torch.equal(mine(x), theirs(x))
                assert len(calls) == 1 and shared.newest[0] is None  # nothing is kept
            for mine, theirs, given in zip(joined, apart, (x, other, x)):
                assert torch.equal(mine(given), theirs(given))
            for mine, theirs in zip(joined, apart):
                assert torch.equal(mine(x), theirs(x))
                x += 1
    with torch.inference_mode():  # such tensors do not count what is written into them
        x = torch.randn(1, 2, 32)
        assert torch.equal(joined[1](x), apart[1](x))


def test_a_norm_is_replaced_only_where_the_bits_are_the_same():
    llama, gemma = make_llama().float(), family("Gemma").float()
    for model, replaced in ((llama, True), (gemma, False)):
        norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
        assert norms
        for norm in norms:
            with torch.no_grad():
                norm.weight.normal_()
            short = packed.short_norm(norm)
            assert (short is not None) == replaced
            if replaced:
                x = torch.randn(3, 5, norm.weight.shape[0])
                assert short.weight is norm.weight
                assert torch.equal(short(x), norm(x))
    assert packed.short_norm(torch.nn.RMSNorm(4)) is None


@pytest.mark.parametrize("name", ["Qwen3Next", "FalconMamba"])
def test_a_norm_that_takes_more_than_one_tensor_or_has_no_parameter_can_be_packed(name):
    """These families are refused later, in one line."""
    target = family(name).float()
    norms = [m for m in target.modules() if "RMSNorm" in type(m).__name__]
    assert norms
    packed.pack(target)


@pytest.mark.parametrize("name", ["Llama", "Falcon"])
def test_attention_is_replaced_only_where_the_model_looks_it_up(name):
    """Falcon's layers call torch themselves, and take any name but sdpa for eager."""
    target = family(name).float()
    twin = packed.pack(target)
    replaced = twin.config._attn_implementation == packed.ATTENTION
    assert replaced == (name == "Llama") and (replaced or twin is not target)
    ids = torch.randint(0, 40, (1, 9))
    torch.testing.assert_close(twin(ids).logits, target(ids).logits)
