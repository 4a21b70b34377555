"""glide.py: block mask, cross-attention, loss, what build copies, the drafter's own
cache.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from tiny import check, drawn, family, make_glide, make_llama, random_batch

import common
import glide


def batch_of(target, **options):
    """A random batch with all keys and values; 9, 12 and 7 tokens."""
    layers = range(target.config.num_hidden_layers)
    return random_batch(target, layers=layers, **options)


def phases(drafter, rows=3):
    """The phases of the next pass over `rows` sequences."""
    state = torch.get_rng_state()
    phases = torch.randint(drafter.config.block_size, (rows,)).tolist()
    torch.set_rng_state(state)
    return phases


def test_the_block_mask_is_the_one_that_is_drawn():
    """Phase 1 as in its docstring, and the others of blocks of three."""
    drawings = {
        0: ["......", "......", "......", "xxx...", "xxx...", "xxx..."],
        1: ["......", "......", "xx....", "xx....", "xx....", "xxxxx."],
        2: ["......", "x.....", "x.....", "x.....", "xxxx..", "xxxx.."],
    }
    got = glide.block_mask(6, 3, torch.tensor([0, 1, 2]))
    check("the shape", (3, 1, 6, 6), tuple(got.shape))
    for phase, expected in drawings.items():
        check(f"length 6, block_size 3, phase {phase}", expected, drawn(got[phase]))


def attention_by_loop(layer, x, keys, values, angles, mask):
    """Cross-attention of x (T, D) head by head; 4 of 8 numbers turn: 0 with 2 and 1
    with 3.
    """
    q_rows = layer.q_proj.weight.view(4, 8, 32)  # (H, Dh, D)
    out = torch.zeros(len(x), 4, 8, dtype=x.dtype)
    for t, h in itertools.product(range(len(x)), range(4)):
        q = q_rows[h] @ x[t]
        q = q / (q.square().mean() + 1e-6).sqrt() * layer.q_norm.weight
        turned = q.clone()
        for low, angle in enumerate(angles[t].tolist()):
            turned[low] = q[low] * math.cos(angle) - q[low + 2] * math.sin(angle)
            turned[low + 2] = q[low + 2] * math.cos(angle) + q[low] * math.sin(angle)
        seen = mask[t].nonzero()[:, 0]
        if len(seen):
            # Two query heads share a key head.
            k, v = keys[h // 2, seen], values[h // 2, seen]
            out[t, h] = (k @ turned / math.sqrt(8)).softmax(0) @ v
    return out.flatten(1) @ layer.o_proj.weight.T


def test_cross_attention_is_attention_of_grouped_heads_with_partial_rotary():
    """Normed, partly rotated queries against a loop; rows 0 and 1 read nothing."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    layer = glide.CrossAttention(glide.Config(target=shape, query_norm=True)).double()
    torch.nn.init.uniform_(layer.q_norm.weight, 0.5, 2)
    x = torch.randn(5, 32, dtype=torch.float64, requires_grad=True)
    keys, values = torch.randn(2, 2, 5, 8, dtype=torch.float64)  # (Hkv, P, Dh) each
    angles = torch.rand(5, 2, dtype=torch.float64)
    wide = torch.cat([angles, angles], dim=-1)[None]  # (1, T, R)
    mask = glide.block_mask(5, 2, torch.tensor([0]))

    got = layer(x[None], (keys[None], values[None]), (wide.cos(), wide.sin()), mask)[0]
    expected = attention_by_loop(layer, x, keys, values, angles, mask[0, 0])
    torch.testing.assert_close(got, expected)
    assert torch.equal(got[:2], torch.zeros(2, 32, dtype=torch.float64))
    got.square().sum().backward()
    assert x.grad.isfinite().all() and layer.q_proj.weight.grad.isfinite().all()


# --------------------------------------------------------------------------------- loss


@torch.no_grad()
def draft_log_probs(drafter, target, batch, row, place, phase):
    """log q_draft (Vd,) of one position, from a forward over the tokens up to it."""
    blocks = [(i + phase) // drafter.config.block_size for i in range(place + 1)]
    mask = torch.tensor([[query > key for key in blocks] for query in blocks])
    mask = mask[None, None]
    part = slice(row, row + 1), slice(None), slice(place + 1)
    kv = {layer: tuple(x[part] for x in both) for layer, both in batch.kv.items()}
    ids = batch.input_ids[row : row + 1, : place + 1]
    hidden = drafter(target, ids, torch.arange(place + 1)[None], kv, cross_mask=mask)
    head = target.get_output_embeddings().weight[drafter.vocab_ids]
    return (hidden[0, -1] @ head.T).log_softmax(-1)


@pytest.mark.parametrize("distill", [True, False])
def test_the_loss_is_the_cross_entropy_worked_by_hand(llama, distill):
    """Position by position, with the draft vocabulary 10 to 39; and so the acceptance,
    which is the overlap of both distributions.
    """
    batch = batch_of(llama)
    drafter = make_glide(llama, draft_vocab=30, distill=distill)
    drafter.vocab_ids.copy_(torch.arange(10, 40))
    state = torch.get_rng_state()
    phase = phases(drafter)
    terms = []
    overlap = 0.0
    for row, t in batch.loss_mask.nonzero().tolist():
        log_q = draft_log_probs(drafter, llama, batch, row, t - 1, phase[row])
        p_target = llama(batch.input_ids[row : row + 1, :t]).logits[0, -1].softmax(-1)
        overlap += float(torch.minimum(p_target[10:40], log_q.exp()).sum())
        token = int(batch.input_ids[row, t])
        if distill:
            teacher = p_target[10:40] / p_target[10:40].sum()
            terms.append(-float((teacher * log_q).sum()))
        elif 10 <= token < 40:
            terms.append(-float(log_q[token - 10]))
    total, weight = glide.loss(drafter, llama, batch)
    check(
        f"distill={distill}, 9, 12 and 7 tokens, all but 3 to be predicted, phases "
        f"{phase}, which are {[round(x, 3) for x in terms]}: their sum and number",
        (pytest.approx(sum(terms), rel=1e-5), len(terms)),
        (float(total.detach()), int(weight)),
    )
    torch.set_rng_state(state)  # the same phases again
    total, count = glide.acceptance(drafter, llama, batch)
    assert (float(total.detach()), count) == (pytest.approx(overlap, rel=1e-5), 19)


def test_the_expected_speedup_is_that_of_table_1():
    """Vicuna-7B on GSM8K; and a drafter that is always right and costs nothing."""
    assert glide.expected_speedup(0.648, 5, 0.067) == pytest.approx(1.97, abs=0.005)
    assert glide.expected_speedup(1.0, 4, 0.0) == 5


def test_the_best_gamma_is_not_that_of_the_mean_alpha():
    """The example of the docstring."""

    def best(*alphas):
        def speed(gamma):
            return sum(glide.expected_speedup(alpha, gamma, 0.1) for alpha in alphas)

        return max(range(1, 21), key=speed)

    assert (best(0.6), best(0.9, 0.3)) == (3, 8)


# -------------------------------------------------------------------------------- build


def test_layers_start_as_the_top_and_cross_attention_as_the_layer_that_it_reads():
    target = family("Qwen3")
    for name_of, weight in target.named_parameters():
        if "norm" in name_of:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    layers = target.model.layers
    for options, read in (({}, [2]), ({"num_layers": 2, "kv_layer": 0}, [0, 0])):
        drafter = make_glide(target, **options)
        assert drafter.kv_layers == read
        pairs = [(drafter.norm, target.model.norm)]
        for ours, top, index in zip(
            drafter.layers, layers[-len(read) :], read, strict=True
        ):
            glimpsed = layers[index]
            pairs += [
                (ours.input_layernorm, top.input_layernorm),
                (ours.self_attn.k_proj, top.self_attn.k_proj),
                (ours.mlp.down_proj, top.mlp.down_proj),
                (ours.cross_layernorm, glimpsed.input_layernorm),
                (ours.cross_attn.q_proj, glimpsed.self_attn.q_proj),
                (ours.cross_attn.o_proj, glimpsed.self_attn.o_proj),
                (ours.cross_attn.q_norm, glimpsed.self_attn.q_norm),
            ]
        for ours, theirs in pairs:
            torch.testing.assert_close(
                ours.weight.double(), theirs.weight, atol=1e-6, rtol=1e-6
            )


def test_a_drafter_of_all_layers_without_cross_attention_is_the_target():
    target = make_llama(rms_norm_eps=1e-5)  # as the drafter's
    drafter = make_glide(target, num_layers=3, cross_attention=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = drafter(target, ids, torch.arange(4)[None], {})
    expected, _ = common.target_features(target, ids)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-5)


# ----------------------------------------------------------------------------- drafting


def mixed_gemma():
    """A Gemma-3 whose layers 0 and 2 rotate otherwise than 1 and 3."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = family("Gemma3", sliding_window=64, layer_types=kinds)
    places = torch.arange(40)[None]
    sliding, full = (common.rotary(target, places, layer)[0] for layer in (2, 3))
    assert not torch.allclose(sliding, full, atol=0.1)
    return target


@pytest.mark.parametrize(
    "options, read", [({}, [2]), ({"num_layers": 2, "kv_layer": -1}, [2, 3])]
)
def test_queries_are_rotated_as_the_keys_that_they_meet(options, read):
    """By the tables of the layer that is read: in this Gemma-3 the layers differ."""
    target = mixed_gemma()
    drafter = make_glide(target, **options)
    seen = []  # the tables that each cross-attention is given
    for layer in drafter.layers:
        layer.cross_attn.register_forward_pre_hook(
            lambda _, given: seen.append(given[2])
        )
    glide.training_pass(drafter, target, batch_of(target, lengths=(9,)))
    for tables, layer in zip(seen, read, strict=True):
        expected = common.rotary(target, torch.arange(9)[None], layer)
        torch.testing.assert_close(tables, expected)


TARGETS = {
    "Llama": make_llama,
    "Gemma3": mixed_gemma,
    "GPT2": partial(family, "GPT2"),
    "GPTNeoX": partial(family, "GPTNeoX", partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"kv_layer": 0}])
@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_training_with_the_block_mask_computes_the_states_of_drafting(name, options):
    """Every block is a round: its tokens are fed one by one, and the target has the
    ones before.
    """
    target = TARGETS[name]()
    drafter = make_glide(target, block_size=4, **options)
    batch = batch_of(target, lengths=(14,), prompt=1)
    while phases(drafter, 1) != [0]:
        torch.rand(())
    expected = glide.training_pass(drafter, target, batch)
    cache = common.DraftCache(drafter.config.num_layers)
    head = common.draft_head(target, drafter.vocab_ids)
    logits = []
    for place in range(13):
        if place % 4 == 0:
            ids = batch.input_ids[:, : place + 1]
            decoding = common.start(target, input_ids=ids, max_new_tokens=1)
        newest = batch.input_ids[:, place : place + 1]
        hidden = glide.feed(drafter, decoding, cache, newest)
        logits.append(head(hidden).float())
    torch.testing.assert_close(torch.cat(logits), expected)


@pytest.mark.parametrize("length", [512, 513, 1030])
@torch.no_grad()
def test_a_prompt_is_read_as_if_fed_at_once(length):
    """`propose` feeds parts of 512 tokens; here, blocks of one token give the mask of
    the whole.
    """
    target = make_llama(max_position_embeddings=2048)
    drafter = make_glide(target, num_layers=2)
    ids = torch.randint(
        48, (1, length), generator=torch.Generator().manual_seed(length)
    )
    decoding = common.start(target, input_ids=ids, max_new_tokens=1)
    cache = common.DraftCache(2)
    head = common.draft_head(target, drafter.vocab_ids)
    _, q_draft = next(glide.propose(drafter, decoding, cache, head))

    _, kv = common.target_features(target, ids, drafter.kv_layers)
    mask = glide.block_mask(length, 1, torch.tensor([0]))
    expected = drafter(target, ids, torch.arange(length)[None], kv, cross_mask=mask)
    expected = head(expected[0, -1]).float().softmax(-1)
    torch.testing.assert_close(q_draft, expected)
