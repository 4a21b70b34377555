"""common.py: mask, caches, verification, copies from the context, decoding, what is refused."""

import collections
import contextlib
import itertools
import random
import sys
import types
from functools import partial

import pytest
import torch
import transformers
from tiny import (
    FAMILIES,
    chi_square_p_value,
    draft_of,
    drawn,
    family,
    make_glide,
    make_llama,
    paths,
    random_tree,
    sampled_p_value,
)
from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor

import cape
import common
import falcon
import glide
from support import default_target
from support.rivals.lookup import Lookup

IDS = torch.tensor([[3, 1, 4, 1, 5]])
assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def make_family(name):
    return family(name, **FAMILIES[name])


def opened(target, **options):
    """A Decoding of IDS, by default a greedy one of at most nine tokens."""
    return common.open_decoding(target, IDS, **{"max_new_tokens": 9, "do_sample": False} | options)


def start(target, ids):
    """A cache that holds all of ids (1, T) but the newest token."""
    cache = common.GrowingCache(target.config.get_text_config().num_hidden_layers)
    if ids.shape[1] > 1:
        common.forward(target, ids[:, :-1], cache)
    return cache


# ---------------------------------------------------------------------------------------- mask


def test_the_mask_of_the_docstring():
    mask = common.ancestor_mask(torch.tensor([-1, 0, 0, 1]), 2, torch.float64)
    expected = ["xxx....", "xxxx...", "xxxxx..", "xxxx.x.", "xxxxx.x"]
    got = drawn(mask == 0)
    assert got == expected, f"expected {expected}\ngot {got}"
    assert mask.shape == (1, 1, 5, 7), f"expected the shape (1, 1, 5, 7), got {tuple(mask.shape)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_against_brute_force(dtype):
    """A row attends to the prefix, the root, and the nodes on its way; depth gives positions."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        nodes, prefix = torch.randint(0, 12, (2,), generator=generator).tolist()
        draft = random_tree(generator, nodes, 30)
        parents = draft.parents.tolist()
        ways = [[]]  # of the root and each node, the nodes down to it
        for node, parent in enumerate(parents):
            ways.append([*ways[parent + 1], node])
        expected = []
        for way in ways:
            row = "".join("x" if node in way else "." for node in range(nodes))
            expected.append("x" * (prefix + 1) + row)
        ids = torch.arange(prefix + 1)[None]
        fed, mask, positions = common.tree_inputs(ids, draft, dtype)
        got = drawn(mask == 0)
        told = [f"given parents {parents}, prefix {prefix}", "expected", *expected, "got", *got]
        assert got == expected, "\n".join(told)
        lowest = torch.finfo(dtype).min
        numbers = set(mask.flatten().tolist())
        assert numbers <= {0.0, lowest}, f"expected the numbers 0 and {lowest}, got {numbers}"
        assert fed[0].tolist() == [prefix, *draft.tokens.tolist()]
    late = common.Draft(torch.tensor([1, 2]), torch.tensor([1, -1]))
    with pytest.raises(AssertionError, match="before its parent"):
        common.tree_inputs(ids, late, dtype)
        assert positions[0].tolist() == [prefix + len(way) for way in ways]


# -------------------------------------------------------------------------------------- caches


def test_a_growing_layer_holds_what_a_list_would():
    """Rows are appended, cut off, and moved together, in any order."""
    chance = random.Random(0)
    layer = common.GrowingLayer()
    truth = []
    addresses = set()
    for step in range(300):
        new = [100 * step + i for i in range(chance.randint(1, 5))]
        rows = torch.tensor(new, dtype=torch.float64).view(1, 1, -1, 1)
        keys, values = layer.update(rows, -rows)
        truth += new
        assert keys.flatten().tolist() == truth
        assert torch.equal(values, -keys)
        addresses.add(keys.data_ptr())
        if step % 3 == 0:
            truth = truth[: chance.randint(len(truth) - 3, len(truth))]
            layer.cut(len(truth))
        begin = chance.randint(max(0, len(truth) - 4), len(truth))
        kept = [n for n in range(begin, len(truth)) if chance.random() < 0.7]
        layer.move(torch.tensor(kept, dtype=torch.long), begin)
        layer.cut(begin + len(kept))
        truth = truth[:begin] + [truth[n] for n in kept]
        assert layer.keys.flatten().tolist() == truth
    assert len(addresses) < 6, "the buffer moves only when it doubles"


def test_a_draft_cache_forgets_rejected_tokens():
    cache = common.DraftCache(1)

    def rewind(*ids):
        return cache.rewind(torch.tensor([ids]))[0].tolist()

    def consume(*tokens):
        rows = torch.zeros(1, 1, len(tokens), 1)
        cache.layers[0].update(rows, rows)
        return cache.record(torch.tensor([tokens]))[0].tolist()

    assert rewind(3, 4, 5) == [3, 4, 5]
    assert consume(3, 4, 5) == [0, 1, 2]
    assert consume(6) == [3]
    assert consume(7) == [4]
    # 6 was accepted, 7 rejected, 9 is the target's own.
    assert rewind(3, 4, 5, 6, 9) == [9]
    assert cache.get_seq_length() == 4
    assert consume(9) == [4]
    # All was accepted. The last draft token, 1, and the bonus token have no rows yet.
    assert rewind(3, 4, 5, 6, 9, 1, 2) == [1, 2]
    # Both are fed. A leaf, 8, took the place of 1.
    assert consume(1, 2) == [5, 6]
    assert rewind(3, 4, 5, 6, 9, 8, 2) == [8, 2]
    # The newest token is fed again even if its row is there.
    assert rewind(3, 4, 5) == [5]


# ---------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", FAMILIES)
def test_target_logits_are_the_targets_own(name):
    """Including soft caps (Gemma-2), scaling (Granite, Cohere) and a bias of the LM head."""
    target = make_family(name)
    if name == "Llama":
        target.lm_head.bias = torch.nn.Parameter(torch.randn(40, dtype=torch.float64))
    ids = torch.arange(1, 9)[None]
    truth = target(ids).logits.float()
    hidden, _ = common.target_features(target, ids)
    if name in ("Gemma2", "Granite", "Cohere"):  # or this test would prove nothing
        plain = hidden @ target.get_output_embeddings().weight.T
        assert not torch.allclose(plain, target(ids).logits, atol=0.1)
    few = torch.tensor([3, 30, 31])
    assert_close(common.target_logits(target, hidden), truth)
    assert_close(common.target_logits(target, hidden, few), truth[..., few])
    if name not in ("Llama", "Gemma2"):  # a draft head has no bias and no cap
        assert_close(common.draft_head(target, few)(hidden).float(), truth[..., few])


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Gemma3"])
def test_rotated_keys_are_those_that_the_target_caches(name, monkeypatch):
    """Of Phi-3 only half the numbers turn; Gemma-3 has two tables."""
    target = make_family(name)
    attention = sys.modules[type(target).__module__]
    rotate = attention.apply_rotary_pos_emb
    unrotated = []  # of each layer

    def noted(q, k, *tables):
        unrotated.append(k)
        return rotate(q, k, *tables)

    monkeypatch.setattr(attention, "apply_rotary_pos_emb", noted)
    _, kv = common.target_features(target, torch.arange(1, 9)[None], range(4))
    for layer in range(4):
        tables = common.rotary(target, torch.arange(8)[None], layer)
        torch.testing.assert_close(common.rotate(unrotated[layer], tables), kv[layer][0])


def test_widened_tables_by_hand():
    """The example of the docstring: numbers beyond the first R do not turn."""
    cos = torch.tensor([[[0.5, 0.25, 0.5, 0.25]]])
    sin = torch.tensor([[[0.1, 0.2, 0.1, 0.2]]])
    cos, sin = common.whole_rotary((cos, sin), 8)
    assert cos.flatten().tolist() == [0.5, 0.25, 1, 1, 0.5, 0.25, 1, 1]
    assert sin.flatten() == pytest.approx([0.1, 0.2, 0, 0, 0.1, 0.2, 0, 0])


# ---------------------------------------------------------------------------------- the greedy walk


def next_token(target, ids, processor):
    scores = target(ids).logits[:, -1].float()
    return int(processor(ids, scores).argmax())


def helped_tree(target, ids, processor, generator):
    """A random tree; half of its nodes hold what the target says after their parent."""
    draft = random_tree(generator, 9, target.config.vocab_size)
    for node in range(9):
        if torch.rand((), generator=generator) < 0.5:
            above = paths(draft)[node][:-1]
            text = torch.cat([ids, torch.tensor([above], dtype=torch.long)], dim=1)
            draft.tokens[node] = next_token(target, text, processor)
    return draft


@pytest.mark.parametrize("name", FAMILIES)
def test_verify_sees_every_node_as_plain_decoding_would(name):
    """Each node gets the logits of its own prefix, and the cache is that of the accepted path."""
    target = make_family(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (1, 5), generator=generator)
    cache = start(target, ids)
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    accepted = 0
    for _ in range(6):
        draft = helped_tree(target, ids, penalty, generator)
        verified = common.verify(target, ids, draft, cache, penalty)
        # What was committed is what plain decoding says, and the walk went as far as it could.
        for token in verified.tokens[0].tolist():
            assert token == next_token(target, ids, penalty)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        last = verified.path[-1] if verified.path else -1
        assert (last, int(ids[0, -1])) not in draft.children()
        assert [int(draft.tokens[n]) for n in verified.path] == verified.tokens[0, :-1].tolist()
        for ours, fresh in zip(cache.layers, start(target, ids).layers):
            assert_close(ours.keys, fresh.keys)
            assert_close(ours.values, fresh.values)
        whole, _ = common.target_features(target, ids[:, :-1])
        rows = verified.hidden.shape[1]
        assert_close(verified.hidden, whole[:, -rows:])
        for node, path in enumerate(paths(draft)):
            text = torch.cat([ids[:, :-rows], torch.tensor([path])], dim=1)
            truth = target(text).logits[:, -1]
            torch.testing.assert_close(verified.logits[:, node + 1], truth, atol=1e-4, rtol=1e-4)
        accepted += len(verified.path)
    assert accepted > 3, "or no row would have been moved"


def test_greedy_walk_takes_the_longest_accepted_path(llama):
    ids = torch.tensor([[5, 6, 7]])
    truth = llama.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    wrong = [(token + 1) % 48 for token in truth]
    # root -> wrong0 and truth0; truth0 -> wrong1 and truth1; truth1 -> truth2
    tokens = [wrong[0], truth[0], wrong[1], truth[1], truth[2]]
    parents = [-1, -1, 1, 1, 3]
    verified = common.verify(llama, ids, draft_of(tokens, parents), start(llama, ids))
    given = f"given tokens {tokens}, parents {parents}, and a target that says {truth}"
    path, got = verified.path, verified.tokens[0].tolist()
    assert path == [1, 3, 4], f"{given}: expected the path [1, 3, 4], got {path}"
    assert got == truth, f"{given}: expected all of that to be committed, got {got}"


def test_greedy_compares_in_float32_as_transformers_does(llama):
    """Where float64 sees a difference that float32 does not, the lower id is the argmax."""
    ids = torch.tensor([[3, 4]])
    logits = torch.zeros(1, 1, 48, dtype=torch.float64)
    logits[0, 0, 5] = 1
    logits[0, 0, 7] = 1 + 1e-12
    assert logits.argmax() == 7
    empty = common.chain([], ids)
    verified = common.verify(llama, ids, empty, start(llama, ids), scored=(logits, logits))
    assert verified.tokens.tolist() == [[5]]


# --------------------------------------------------------------------------- the sampled walk


def law_of_draw(p_target, q_draft, grid=50):
    """The exact distribution of `_draw` below two siblings drawn without replacement.

    All siblings and `grid` values of each uniform number are visited; of the final draw the
    distribution is added. Returns the share of accepted siblings as well.
    """
    law = torch.zeros_like(p_target)
    accepted = 0.0
    uniforms = iter(())
    left = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *_, **__: torch.tensor(next(uniforms)))
        patch.setattr(common, "sample", lambda probs: left.append(probs) or torch.tensor([-1]))
        for first, second in itertools.permutations(range(len(p_target)), 2):
            rest = without(q_draft, first)
            weight = q_draft[first] * rest[second]
            q = torch.stack([q_draft, q_draft.roll(-1), rest])
            draft = draft_of([first, 0, second], [-1, 0, -1], q)  # node 1 is no sibling
            for u, v in itertools.product(range(grid), repeat=2):
                uniforms = iter([(u + 0.5) / grid, (v + 0.5) / grid])
                token = common._draw(p_target.log(), [0, 2], draft)
                here = left.pop() if token < 0 else torch.eye(len(p_target))[token]
                law += weight * here / grid**2
                accepted += float(weight) * (token >= 0) / grid**2
    return law, accepted


P_TARGET = torch.tensor([0.35, 0.55, 0.1])
Q_DRAFT = torch.tensor([0.2, 0.05, 0.75])


def without(q_draft, token):
    """What is drawn from once `token` was drawn: siblings hold different tokens."""
    left = q_draft.clone()
    left[token] = 0
    return left / left.sum()


def test_draws_follow_the_target_exactly():
    law, accepted = law_of_draw(P_TARGET, Q_DRAFT)
    expected, q, got = ([round(x, 3) for x in row.tolist()] for row in (P_TARGET, Q_DRAFT, law))
    given = f"p_target {expected}, two siblings drawn from q_draft {q} without replacement"
    told = f"{given}: returned tokens should have the shares of p_target: expected {expected}"
    assert got == pytest.approx(expected, abs=0.015), f"{told}, got {got}"
    # .35 by the first sibling; .65 are left, all after token 2, with the residual .23 .77 0 and
    # q .8 .2 0: the second sibling is accepted in .43 of these.
    assert accepted == pytest.approx(0.35 + 0.65 * 0.431, abs=0.015), (
        f"{given}: one of two siblings is to be accepted in 0.63 of the cases, got {accepted:.2f}"
    )


def test_a_drafter_that_agrees_but_for_rounding_leaves_no_residual(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-24))
    draft = draft_of([1], [-1], P_TARGET[None] * (1 + 1e-6))  # so that the token is rejected
    assert common._draw(P_TARGET.log(), [0], draft) in range(3)


def test_a_sample_is_where_the_running_sum_passes_a_uniform_number():
    probs = torch.tensor([0.5, 0.3, 0.2]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.6, 0.79, 0.999])[:, None]
    assert common.sample(probs, uniform)[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
    # Tokens of probability 0 are never drawn, and weights need not sum to 1.
    gaps = torch.tensor([[0.0, 0.2, 0.0, 0.2, 0.0]]).expand(3, -1)
    uniform = torch.tensor([[0.0], [0.5], [1 - 2**-53]], dtype=torch.float64)
    assert common.sample(gaps, uniform)[:, 0].tolist() == [1, 3, 3]
    # A million rare tokens keep their share of 1e-3, which float32 would lose.
    rare = torch.tensor([1.0, *[1e-9] * 1_000_000])
    half = torch.tensor([1 - 0.5e-3], dtype=torch.float64)
    assert 400_000 < int(common.sample(rare, half)) < 600_000


Q = torch.tensor([0.3, 0.05, 0.05, 0.2, 0.1, 0.25, 0.05])


def sampled_and_deterministic():
    """Two siblings drawn from Q without replacement and a child; 4 and 5 beside, 2 below them."""
    first = torch.multinomial(Q, 1)
    rest = without(Q, first)
    drawn = torch.cat([first, torch.multinomial(rest, 1), torch.multinomial(Q.flip(0), 1)]).tolist()
    parents = [-1, -1, 0, -1, -1, 0]
    return draft_of([*drawn, 4, 5, 2], parents, torch.stack([Q, rest, Q.flip(0)]))


def residual(p, q):
    left = (p - q).clamp(min=0)
    return left / left.sum()


def chance_of_acceptance(p_target):
    """The probability that a child of the root is accepted, from the definition."""
    accepted = float(torch.minimum(p_target, Q).sum())
    left = residual(p_target, Q)
    for token, rejected in enumerate((Q - p_target).clamp(min=0).tolist()):
        rest = without(Q, token)
        hit = float(torch.minimum(left, rest).sum())
        hit += (1 - hit) * float(residual(left, rest)[[4, 5]].sum())
        accepted += rejected * hit
    return accepted


def test_sampled_output_follows_the_target(small_llama):
    """And as much of the draft is accepted as can be: rejecting everything is lossless as well."""
    accepted = []

    def decode(target, input_ids, **given):
        decoding = common.Decoding(target, input_ids, **given)
        accepted.append(bool(decoding.verify(sampled_and_deterministic()).path))
        if not decoding.done:
            decoding.verify(draft_of([], []))
        return decoding.ids

    p = sampled_p_value(small_llama, IDS, 2, draws=600, custom_generate=decode)
    told = "the sampled texts do not follow the target: by a chi-square test"
    assert p > 0.001, f"{told} p = {p:.1e}, expected above 0.001"
    p_target = small_llama(IDS).logits[0, -1].float().softmax(-1)
    expected = chance_of_acceptance(p_target)
    spread = 4 * (expected * (1 - expected) / len(accepted)) ** 0.5
    got = sum(accepted) / len(accepted)
    assert abs(got - expected) <= spread, (
        f"given p_target {p_target.tolist()}, q_draft {Q.tolist()}: expected a child of the root "
        f"to be accepted in {expected:.3f} +- {spread:.3f} of the rounds, got {got:.3f}"
    )


def test_each_draw_is_given_all_sampled_siblings(llama, monkeypatch):
    """The first node is accepted, and no child of it."""
    answers = iter([1, 7])
    offered = []

    def draw(scores, siblings, draft):
        offered.append(siblings)
        return next(answers)

    monkeypatch.setattr(common, "_draw", draw)
    tokens, parents = [1, 2, 3, 4, 5], [-1, -1, 0, -1, 0]
    draft = draft_of(tokens, parents, torch.stack([Q, Q, Q]))  # nodes 3 and 4 are not sampled
    common.verify(llama, IDS, draft, start(llama, IDS), do_sample=True)
    given = f"given tokens {tokens}, parents {parents}, of which nodes 0 to 2 were sampled"
    assert offered == [[0, 1], [2]], f"{given}: expected siblings [[0, 1], [2]], got {offered}"


# -------------------------------------------------------------------------------------- copies


def found_by_search(text, most):
    """What Lookup finds, by its definition: search the whole text from its end."""
    for n, length in ((4, most), (3, most // 2), (2, most // 3)):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copy = text[end:]
                while len(copy) < length:
                    copy.append(copy[end - len(text)])
                return copy[:length]
    return []


def random_text(chance):
    return [chance.randint(0, 3) for _ in range(chance.randint(1, 30))]


def test_copies_are_found_as_by_a_search():
    """The text grows by a few tokens from call to call, as while decoding."""
    chance = random.Random(0)
    for _ in range(200):
        text = random_text(chance)
        most = chance.randint(0, 9)
        lookup = Lookup(most)
        for end in range(1, len(text) + 1, chance.randint(1, 5)):
            expected = found_by_search(text[:end], most) if most else []
            assert lookup.find(torch.tensor([text[:end]])) == expected, (text[:end], most)


def test_a_copy_shares_all_that_it_begins_with():
    """The draft is 5 6 9 and the copy 5 6 7 1, so it branches off after 6."""
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]])
    merged = Lookup(4).merge(draft_of([5, 6, 9], [-1, 0, 1]), text, 9)
    assert merged.tokens.tolist() == [5, 6, 9, 7, 1]
    assert merged.parents.tolist() == [-1, 0, 1, 1, 3]


def test_a_merged_tree_holds_the_drafts_paths_and_the_copys():
    """The draft's nodes stay first and unchanged, and no path is there twice."""
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        text = random_text(chance)
        nodes = chance.randint(0, 8)
        room = chance.randint(0, 6)
        draft = random_tree(generator, nodes, 9)
        draft.probs = torch.rand(nodes, 9)
        draft.q = torch.rand(nodes)
        merged = Lookup(6).merge(draft, torch.tensor([text]), room)
        copy = found_by_search(text, 6)[:room]
        before, after = paths(draft), paths(merged)
        assert after[:nodes] == before
        assert len(set(after)) == len(after) == len(merged.q)
        assert set(after) == set(before) | {tuple(copy[:n]) for n in range(1, len(copy) + 1)}
        assert merged.copied == len(after) - nodes
        assert merged.probs is draft.probs, "a copy was not sampled"


# ------------------------------------------------------------------------------------ Decoding


def test_an_answer_ends_inside_the_accepted_tokens(llama):
    """Three tokens are accepted; the answer ends at the second one."""
    truth = llama.generate(IDS, max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    assert len(set(truth)) == 4
    for options in ({"eos_token_id": truth[1]}, {"max_new_tokens": 2}):
        decoding = opened(llama, **options)
        told = []
        decoding.streamer = types.SimpleNamespace(put=told.append, end=partial(told.append, "end"))
        verified = decoding.verify(draft_of([*truth[:3], 9], [-1, 0, 1, -1]))
        assert verified.tokens.tolist() == [truth]
        assert decoding.done
        assert decoding.ids[0, 5:].tolist() == truth[:2]
        assert decoding.hidden.shape[1] == 2
        new, last = told
        assert new.flatten().tolist() == truth[:2]
        assert last == "end"
        stats = decoding.stats
        assert (stats.target_forwards, stats.drafted, stats.emitted) == (1, 4, 2)
        assert (stats.offered, stats.accepted) == ([3], [2])


def test_every_round_leaves_a_place_for_the_bonus_token_and_the_states_of_its_rows(llama):
    whole = llama.generate(IDS, max_new_tokens=6, do_sample=False)
    truth = whole[0, 5:].tolist()
    states, _ = common.target_features(llama, whole)
    decoding = opened(llama, max_new_tokens=6)
    before = 0
    for draft, cached in (
        (draft_of([truth[0], truth[1], 0], [-1, 0, 0]), 4),
        (draft_of([], []), 7),
        (draft_of([truth[4]], [-1]), 8),
    ):
        assert not decoding.done
        assert decoding.room == 11 - (cached + 1) - 1
        torch.testing.assert_close(decoding.hidden, states[:, before:cached])
        decoding.verify(draft)
        before = cached
    assert decoding.done
    assert torch.equal(decoding.ids, whole)
    stats = decoding.stats
    assert (stats.offered, stats.accepted) == ([2, 0, 1], [2, 0, 1])
    assert (stats.drafted, stats.emitted, stats.target_forwards) == (4, 6, 3)


def test_the_clock_books_prefill_drafting_and_verification(llama, monkeypatch):
    moments = iter([0, 5, 7, 10, 14, 20, 21])
    monkeypatch.setattr(common, "time", types.SimpleNamespace(perf_counter=lambda: next(moments)))
    decoding = opened(llama)
    for _ in range(3):
        decoding.verify(draft_of([], []))
    assert decoding.stats.seconds == {"prefill": 5, "verify": 2 + 4 + 1, "draft": 3 + 6}


def test_pick_takes_the_argmax_of_what_can_be_drafted(llama):
    decoding = opened(llama, repetition_penalty=4.0)
    vocab_ids = torch.tensor([4, 7, 30])
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    token, q_draft = decoding.pick(logits, vocab_ids, IDS)
    assert token.tolist() == [7], "4 stands in the text, so its logit is 3 / 4"
    expected = torch.tensor([0.75, 2.0, 1.0]).softmax(-1)
    torch.testing.assert_close(q_draft[vocab_ids], expected)
    assert q_draft.sum() == pytest.approx(1)
    token, _ = decoding.pick(logits, vocab_ids, torch.tensor([[9]]))
    assert token.tolist() == [4]


def test_pick_draws_from_the_distribution_that_it_returns(small_llama):
    decoding = opened(small_llama, do_sample=True, temperature=0.5, top_k=0)
    logits = torch.tensor([[0.0, 0.5, 1.0]])
    vocab_ids = torch.tensor([1, 4, 6])
    torch.manual_seed(0)
    counts = collections.Counter()
    for _ in range(500):
        token, q_draft = decoding.pick(logits, vocab_ids, decoding.ids)
        counts[int(token)] += 1
    torch.testing.assert_close(q_draft[vocab_ids], (logits[0] * 2).softmax(-1))
    expected = {int(token): float(q_draft[token]) for token in vocab_ids}
    assert chi_square_p_value(counts, expected) > 1e-3


@pytest.mark.parametrize("scores", [float("-inf"), float("nan")])
def test_pick_gives_nothing_where_the_processors_allow_nothing(llama, scores):
    decoding = opened(llama)
    decoding.logits_processor = lambda ids, given: torch.full_like(given, scores)
    assert decoding.pick(torch.zeros(1, 48), torch.arange(48), IDS) is None


# ------------------------------------------------------------------------------ what is refused


def refused(message):
    return pytest.raises(common.UserError, match=message)


ONE_LAYER = DynamicCache()
ONE_LAYER.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
MARK = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)


@pytest.mark.parametrize(
    "message, options",
    [
        ("attention_mask has zeros", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}),
        ("one prompt, without beams", {"num_beams": 2}),
        ("assisted_generation is not supported", {"prompt_lookup_num_tokens": 3}),
        ("position_ids are counted from 0", {"position_ids": torch.arange(1, 6)[None]}),
        ("guidance_scale .* leave it out", {"guidance_scale": 1.5}),
        ("SynthID .* leave it out", {"watermarking_config": MARK}),
        ("only text", {"inputs_embeds": torch.zeros(1, 5, 32, dtype=torch.float64)}),
        ("already holds tokens: pass all tokens, and no cache", {"past_key_values": ONE_LAYER}),
    ],
)
def test_a_request_that_trees_cannot_decode_is_refused(llama, message, options):
    with refused(message):
        opened(llama, **options)


def test_a_call_without_the_targets_generate_is_told_of_it(llama):
    with refused("call target.generate"):
        common.Decoding(llama, IDS, max_new_tokens=4)


def test_flash_attention_is_told_what_to_load(llama, monkeypatch):
    monkeypatch.setattr(llama.config, "_attn_implementation_internal", "flash_attention_2")
    with refused("attn_implementation='sdpa'"):
        common.check_target(llama)


CHUNKS = {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 16}
BORDER = {"original_max_position_embeddings": 15}  # beyond, all positions get the long factors
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
LONG_ROPE = {"rope_parameters": ROPE | BORDER} | BORDER


@pytest.mark.parametrize(
    "reach, name, options",
    [
        ("context", "Llama", {"max_position_embeddings": 16}),
        ("sliding window", "Mistral", {"sliding_window": 16}),
        ("sliding window", "Gemma2", {"sliding_window": 16}),
        ("attention chunk", "Llama", CHUNKS),
        ("range of short RoPE factors", "Phi3", LONG_ROPE),
    ],
)
def test_what_a_target_attends_to_is_used_up_to_its_end_and_not_beyond(reach, name, options):
    target = family(name, **options)
    opened(target, max_new_tokens=11)
    with refused(f"17 exceed the target's {reach} of 16: lower max_new_tokens"):
        opened(target, max_new_tokens=12)


def test_a_prompt_beyond_the_border_of_long_rope_stays_beyond_it():
    """Four of its five tokens are cached at first: beyond a border of three, but not of four."""
    for border in (3, 4):
        original = {"original_max_position_embeddings": border}
        target = family("Phi3", rope_parameters=ROPE | original, **original)
        with refused("short RoPE") if border == 4 else contextlib.nullcontext():
            opened(target)


def test_the_default_target_is_read_from_its_folder(folder, monkeypatch):
    monkeypatch.setattr(default_target, "folder", lambda: folder)
    assert common.load_target()[0].config.vocab_size == 48


@pytest.mark.parametrize(
    "message, name, options",
    [
        ("no position_ids", "Mpt", {}),
        ("alibi", "Llama", {"alibi": True}),
        ("{'conv'} layers cannot undo", "Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    ],
)
def test_a_target_that_would_misread_a_tree_is_refused(message, name, options):
    target = family(name, **options)
    with refused(message):
        opened(target)


# ----------------------------------------------------------------------------------- the drafter


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_norms_around_zero_are_left_alone(name):
    """Gemma's norms scale by 1 + weight, a drafter's by weight."""
    target = make_family(name)
    for weight_name, weight in target.named_parameters():
        if "norm" in weight_name:
            weight.copy_(0.5 + 0.1 * torch.randn_like(weight))
    drafter = make_glide(target)
    assert torch.equal(drafter.norm.weight, torch.ones(32))
    layer = drafter.layers[0]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    theirs = target.model.layers[-1].self_attn
    assert torch.equal(layer.self_attn.q_proj.weight, theirs.q_proj.weight.float())


def test_a_target_whose_logits_are_computed_otherwise_gets_no_drafter(tmp_path):
    """Here its LM head doubles them, which no field of its config tells."""
    target = make_llama()
    make_glide(target).save_pretrained(tmp_path)
    target.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with refused("logits do not follow from its last hidden states"):
        make_glide(target)
    with refused("logits do not follow from its last hidden states"):
        common.load_drafter(glide.Drafter, tmp_path, target)


def test_a_drafter_that_does_not_fit_is_one_line(llama, tmp_path):
    load = partial(common.load_drafter, glide.Drafter, tmp_path)
    with refused("no drafter in .* make one with train.py --out"):
        load(llama)
    make_glide(llama).save_pretrained(tmp_path)
    load(llama)
    with refused("another target .*vocab_size 48 != 40.*: train one with train.py"):
        load(make_family("Llama"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with refused("holds no glide drafter, or a damaged one"):
        load(llama)
    (tmp_path / "config.json").write_text("{")
    with refused("holds no glide drafter, or a damaged one"):
        load(llama)


def test_a_drafter_or_config_of_another_kind_is_refused(llama):
    drafter = make_glide(llama)
    common.check_drafter(drafter, glide.Drafter, llama, drafter.config)
    with refused("the drafter is a <class 'glide.Drafter'>: load a <class 'falcon.Drafter'>"):
        common.check_drafter(drafter, falcon.Drafter, llama)
    with refused("the drafter is for another target .*vocab_size 48 != 40"):
        common.check_drafter(drafter, glide.Drafter, make_family("Llama"))
    with refused("config is a <class 'dict'>: pass a <class 'glide.Config'>"):
        common.check_drafter(drafter, glide.Drafter, llama, {"gamma": 1})
    with refused("config is a <class 'glide.Config'>: pass a <class 'cape.Config'>"):
        options = {"custom_generate": cape.generate, "base": glide, "base_drafter": drafter}
        llama.generate(IDS, **options, config=drafter.config, max_new_tokens=4)
    with refused(r"the drafter is torch.float32 on cpu: move it with \.to\(target"):
        common.check_drafter(drafter.float(), glide.Drafter, llama)


def test_overlap_is_summed_over_all_rows(llama):
    hidden = torch.randn(300, 32).double()  # more than are taken at a time
    vocab_ids = torch.arange(0, 48, 2)
    q_draft = torch.rand(300, 24).double().softmax(-1)
    p_target = common.target_logits(llama, hidden).softmax(-1)[:, vocab_ids]
    expected = torch.minimum(p_target, q_draft.float()).sum()
    torch.testing.assert_close(common.overlap(llama, hidden, q_draft, vocab_ids), expected)


def test_the_gpu_is_waited_for_at_each_look_at_the_clock(llama, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    stats = common.Stats(sync=True)
    decoding = common.open_decoding(llama, IDS, stats=stats, max_new_tokens=4)
    decoding.verify(common.chain([], decoding.ids))
    assert waited == [llama.device] * 2


def test_the_demo_says_how_many_tokens_a_forward_gave(folder, monkeypatch, capsys):
    target, tokenizer = common.load_target(str(folder))

    def generate(target, input_ids, stats, drafter, **options):
        assert tokenizer.decode(input_ids[0]) == "<user> w1 w2 <end> <assistant>"
        stats.emitted, stats.target_forwards = 3, 2
        return torch.cat([input_ids, torch.tensor([[5, 6, 7]])], dim=1)

    monkeypatch.setattr(sys, "argv", ["glide.py", "w1 w2"])
    monkeypatch.setattr(common, "load_target", lambda: (target, tokenizer))
    monkeypatch.setattr(common, "load_drafter", lambda *_: None)
    common.demo(generate, glide.Drafter, "glide")
    assert capsys.readouterr().out == "w0 w1 w2\n\n3 tokens, 1.50 per target forward\n"
