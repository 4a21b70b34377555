"""common.py: mask, caches, verification, decoding, what is refused."""

import collections
import contextlib
import itertools
import json
import random
import re
import sys
from functools import partial

import pytest
import tiny
import torch
import transformers
from chat import refused
from tiny import (
    FAMILIES,
    Table,
    check,
    chi_square_p_value,
    draft_of,
    drawn,
    family,
    make_glide,
    make_llama,
    make_streamer,
    paths,
    random_tree,
    untrained,
)
from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor

import common
import ctc_drafter
import falcon
import glide
from support import cli, default_target
from support.rivals import eagle

IDS = torch.tensor([[3, 1, 4, 1, 5]])
assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def make_family(name):
    return family(name, **FAMILIES[name])


opened = partial(tiny.opened, input_ids=IDS)


def cached(target, ids):
    """A cache that holds all of ids (1, T) but the newest token."""
    cache = common.GrowingCache(target.config.get_text_config().num_hidden_layers)
    target(ids[:, :-1], past_key_values=cache)
    return cache


# -------------------------------------------------------------------------------- masks


def test_the_mask_of_the_docstring():
    expected = ["x....", "xx...", "xxx..", "xx.x.", "xxx.x"]
    check("parents -1 0 0 1", expected, drawn(common.tree_mask([-1, 0, 0, 1])))


def test_the_mask_against_brute_force():
    """A row sees the root and the nodes on its way, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        nodes = int(torch.randint(0, 12, (), generator=generator))
        parents = random_tree(generator, nodes, 30).parents
        ways = [[]]  # of the root and each node, the nodes down to it
        for node, parent in enumerate(parents):
            ways.append([*ways[parent + 1], node])
        rows = [["x" if n in way else "." for n in range(nodes)] for way in ways]
        expected = ["".join(["x", *row]) for row in rows]
        check(f"parents {parents}", expected, drawn(common.tree_mask(parents)))
    with pytest.raises(AssertionError, match="before its children"):
        draft_of([7, 8], [1, -1]).depths()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_target_reads_of_a_tree(dtype):
    """After three cached tokens. The depth gives the position, by which a window of
    three reaches back; two nodes are siblings.
    """
    kinds = ["sliding_attention", "full_attention"]
    target = family("Gemma3", layer_types=kinds * 2, sliding_window=3).to(dtype)
    draft = draft_of([7, 8, 9, 6], [-1, 0, 0, 1])
    ids = torch.tensor([[1, 2, 3, 4]])
    fed, masks, positions = common.tree_inputs(target, ids, draft)
    assert fed.tolist() == [[4, 7, 8, 9, 6]]
    assert positions.tolist() == [[3, 4, 5, 5, 6]]
    drawings = {
        "full_attention": ["xxxx....", "xxxxx...", "xxxxxx..", "xxxxx.x.", "xxxxxx.x"],
        "sliding_attention": [
            ".xxx....",
            "..xxx...",
            "...xxx..",
            "...xx.x.",
            "....xx.x",
        ],
    }
    assert {kind: drawn(mask == 0) for kind, mask in masks.items()} == drawings
    for mask in masks.values():
        assert (mask.shape, mask.dtype) == ((1, 1, 5, 8), dtype)
        assert set(mask.flatten().tolist()) == {0.0, torch.finfo(dtype).min}


# ------------------------------------------------------------------------------- caches


def test_a_growing_layer_holds_what_a_list_would():
    """Rows are appended, cut off, and moved together, in any order."""
    chance = random.Random(0)
    cache = common.GrowingCache(1)
    [layer] = cache.layers
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
            cache.cut(len(truth))
        begin = chance.randint(max(0, len(truth) - 4), len(truth))
        kept = [n for n in range(begin, len(truth)) if chance.random() < 0.7]
        cache.move(torch.tensor(kept, dtype=torch.long), begin)
        cache.cut(begin + len(kept))
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


# --------------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", FAMILIES)
def test_target_logits_are_the_targets_own(name):
    """Including soft caps (Gemma-2), scaling (Granite, Cohere) and a bias of the LM
    head.
    """
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
        assert_close(common.rotate(unrotated[layer], tables), kv[layer][0])


def test_widened_tables_by_hand():
    """The example of the docstring: numbers beyond the first R do not turn."""
    cos = torch.tensor([[[0.5, 0.25, 0.5, 0.25]]])
    sin = torch.tensor([[[0.1, 0.2, 0.1, 0.2]]])
    cos, sin = common.whole_rotary((cos, sin), 8, torch.float32)
    assert cos.flatten().tolist() == [0.5, 0.25, 1, 1, 0.5, 0.25, 1, 1]
    assert sin.flatten() == pytest.approx([0.1, 0.2, 0, 0, 0.1, 0.2, 0, 0])


# ---------------------------------------------------------------------- the greedy walk


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
    """Each node gets the logits of its own prefix, and the cache is that of the
    accepted path.
    """
    target = make_family(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (1, 5), generator=generator)
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    decoding = opened(target, input_ids=ids, max_new_tokens=99, repetition_penalty=1.3)
    accepted = 0
    for _ in range(6):
        before = decoding.ids
        draft = helped_tree(target, before, penalty, generator)
        logits, hidden = common.score(target, before, draft, decoding.cache)
        path = decoding.commit(draft, logits, hidden)
        # What was committed is what plain decoding says, and the walk went as far as it
        # could.
        tokens = decoding.ids[0, before.shape[1] :].tolist()
        text = before
        for token in tokens:
            assert token == next_token(target, text, penalty)
            text = torch.cat([text, torch.tensor([[token]])], dim=1)
        last = path[-1] if path else -1
        assert (last, tokens[-1]) not in draft.children()
        assert [int(draft.tokens[n]) for n in path] == tokens[:-1]
        for ours, fresh in zip(decoding.cache.layers, cached(target, text).layers):
            assert_close(ours.keys, fresh.keys)
            assert_close(ours.values, fresh.values)
        whole, _ = common.target_features(target, text[:, :-1])
        assert_close(decoding.hidden, whole)
        for node, way in enumerate(paths(draft)):
            text = torch.cat([before, torch.tensor([way])], dim=1)
            truth = target(text).logits[0, -1]
            torch.testing.assert_close(logits[node + 1], truth, atol=1e-4, rtol=1e-4)
        accepted += len(path)
    assert accepted > 3, "or no row would have been moved"


def test_greedy_walk_takes_the_longest_accepted_path():
    """The target says 5 6 7 8, whatever stands before."""
    # root -> 9 and 5; 5 -> 9 and 6; 6 -> 7
    draft = draft_of([9, 5, 9, 6, 7], [-1, -1, 1, 1, 3])
    truth = [5, 6, 7, 8]
    asked = []

    def choose(node):
        asked.append(node)
        return truth[len(asked) - 1]

    path, tokens = common.walk(draft, choose, lambda: False)
    given = "tokens 9 5 9 6 7, parents -1 -1 1 1 3, and a target that says 5 6 7 8"
    check(f"{given}: the path", [1, 3, 4], path)
    check(f"{given}: the tokens", truth, tokens)
    check(f"{given}: what choose is called with", [-1, 1, 3, 4], asked)


@pytest.mark.parametrize("end, path", [(1, [1]), (2, [1, 3]), (4, [1, 3, 4])])
def test_a_walk_does_not_go_beyond_the_end_of_the_answer(end, path):
    """At a token that a node holds, which then is accepted, or at the bonus token."""
    draft = draft_of([9, 5, 9, 6, 7], [-1, -1, 1, 1, 3])
    truth = iter([5, 6, 7, 8])
    ends = iter([n == end for n in range(1, 5)])
    got = common.walk(draft, lambda node: next(truth), lambda: next(ends))
    check(f"the answer ends after {end} tokens", (path, [5, 6, 7, 8][:end]), got)


def test_greedy_compares_in_float32_as_transformers_does(llama):
    """Where float64 sees a difference that float32 does not, the lower id is the
    argmax.
    """
    logits = torch.zeros(1, 48, dtype=torch.float64)
    logits[0, 5] = 1
    logits[0, 7] = 1 + 1e-12
    assert logits.argmax() == 7
    decoding = opened(llama)
    draft = common.chain([], IDS)
    _, hidden = common.score(llama, IDS, draft, decoding.cache)
    decoding.commit(draft, logits, hidden)
    assert decoding.ids[0, -1] == 5


# --------------------------------------------------------------------- the sampled walk


def law_of_draw(p_target, draws):
    """The exact distribution of what `draw` returns, over all draws of siblings.

    draws: pairs of a probability and the siblings that are drawn with it.
    Returns the distribution, the probability that a sibling is accepted, and how many
    of the calls asked for a uniform number.

    `draw` accepts a sibling if its uniform number lies below a border. Where the border
    lies is found by bisection on what `draw` does; of its final draw the distribution
    is added.
    """
    law = torch.zeros_like(p_target)
    accepted = 0.0
    asked = 0
    uniforms = []
    left = []

    def rand(*size, **options):
        return torch.zeros(*size, **options) + uniforms.pop(0)

    def final(probs):
        left.append(probs / probs.sum())
        return torch.tensor([-1])

    def returned(siblings, numbers):
        nonlocal asked
        uniforms[:] = numbers
        token = common.rejection_sample(p_target, siblings)
        asked += len(uniforms) < len(numbers)
        return token

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        patch.setattr(common, "sample", final)
        for weight, siblings in draws:
            count = len(siblings)
            for n in range(count):
                numbers = [1.0] * count  # 1 rejects those that can be rejected
                numbers[n], step = 0.0, 0.5
                while step > 1e-14:
                    numbers[n] += step
                    token = returned(siblings, numbers)
                    # It was sibling n if no number was asked for after this one.
                    if token >= 0 and len(uniforms) == count - n - 1:
                        law[token] += weight * step
                    else:
                        numbers[n] -= step
                    step /= 2
                accepted += weight * numbers[n]
                weight *= 1 - numbers[n]
            token = returned(siblings, [1.0] * count)
            rest = left.pop() if token < 0 else torch.eye(len(p_target))[token]
            law += weight * rest
    return law, float(accepted), asked


def two_siblings(q_draft, replace=False):
    """All draws of two siblings from q_draft: (probability, siblings)."""
    for first, second in itertools.product(range(len(q_draft)), repeat=2):
        rest = q_draft if replace else without(q_draft, first)
        if weight := float(q_draft[first] * rest[second]):
            yield weight, [(first, q_draft), (second, rest)]


P_TARGET = torch.tensor([0.35, 0.55, 0.1], dtype=torch.float64)
Q_DRAFT = torch.tensor([0.2, 0.05, 0.75], dtype=torch.float64)


def without(q_draft, token):
    """What is drawn from once `token` was drawn: siblings hold different tokens."""
    left = q_draft.clone()
    left[token] = 0
    return left / left.sum()


def test_draws_follow_the_target_exactly():
    law, accepted, asked = law_of_draw(P_TARGET, two_siblings(Q_DRAFT))
    expected, q, got = (
        [round(x, 3) for x in row.tolist()] for row in (P_TARGET, Q_DRAFT, law)
    )
    given = f"p_target {expected}, two siblings from q_draft {q} without replacement"
    check(f"{given}: the shares of returned tokens", expected, got)
    # .35 by the first sibling; .65 are left, all after token 2, with the residual .23
    # .77 0 and q .8 .2 0: the second sibling is accepted in .43 of these.
    share = pytest.approx(0.35 + 0.65 * 0.431, abs=1e-3)
    check(f"{given}: the share of accepted siblings", share, accepted)
    # Numbers from elsewhere would be other ones in each run, and so would the verdict.
    assert asked, f"{given}: expected torch.rand to be called, got no call"


def random_pair(generator, vocab):
    """A p_target, and a q_draft that is near it."""
    noise = torch.randn(2, vocab, generator=generator, dtype=torch.float64)
    p_target = (2 * noise[0]).softmax(-1)
    return p_target, (p_target.log() + noise[1]).softmax(-1)


def in_order_of_q(q_draft):
    """Siblings as they were drawn, but judged as if the likelier one had come first."""
    for weight, [(first, _), (second, _)] in two_siblings(q_draft):
        first, second = sorted((first, second), key=lambda token: -q_draft[token])
        yield weight, [(first, q_draft), (second, without(q_draft, first))]


def without_duplicates(q_draft):
    """Siblings drawn with replacement, where an equal one is not judged again."""
    for weight, siblings in two_siblings(q_draft, replace=True):
        equal = siblings[0][0] == siblings[1][0]
        yield weight, siblings[:1] if equal else siblings


def argmax(q_draft, claimed):
    """The likeliest token of q_draft, submitted as drawn from it or as it is."""
    token = [int(q_draft.argmax())]
    draft = draft_of(token, [-1], q_draft[None] if claimed else None)
    return [(1.0, draft.sampled().get(-1, []))]


@pytest.mark.parametrize(
    "ours, theirs, vocab, pairs, distance",
    [
        (two_siblings, in_order_of_q, 6, 6, 0.16),
        (partial(two_siblings, replace=True), without_duplicates, 6, 6, 0.008),
        (partial(argmax, claimed=False), partial(argmax, claimed=True), 50, 99, 0.39),
    ],
    ids=["siblings in order of q", "a duplicate dropped", "an argmax judged by p / q"],
)
def test_how_far_from_the_target_wrong_siblings_lead(
    ours, theirs, vocab, pairs, distance
):
    """The total variation, a mean over random pairs of p and q: none with ours."""
    generator = torch.Generator().manual_seed(2)
    wrong = []
    for _ in range(pairs):
        p_target, q_draft = random_pair(generator, vocab)
        law = law_of_draw(p_target, ours(q_draft))[0]
        torch.testing.assert_close(law, p_target, atol=1e-12, rtol=0)
        law = law_of_draw(p_target, theirs(q_draft))[0]
        wrong.append(float((law - p_target).abs().sum()) / 2)
    assert sum(wrong) / len(wrong) == pytest.approx(distance, rel=0.1)


def test_a_rejection_that_leaves_nothing_but_rounding_errors(monkeypatch):
    """In float32 q_draft may exceed p_target everywhere; 0 / 0 is no distribution."""
    p_target = [0.0, 0.5, 0.5]
    q_draft = [1e-7, 0.5, 0.5]  # it adds up to 1.0000001
    got = set()
    for _ in range(20):  # token 0 is rejected for certain
        siblings = [(0, torch.tensor(q_draft))]
        got.add(common.rejection_sample(torch.tensor(p_target), siblings))
    given = f"p_target {p_target}, token 0 drafted from q_draft {q_draft}, so that "
    check(f"{given} p - q leaves nothing: draws from p_target", {1, 2}, got)
    # torch.rand may give 0 as well.
    monkeypatch.setattr(torch, "rand", torch.zeros)
    got = common.rejection_sample(torch.tensor(p_target), siblings)
    assert got != 0, "torch.rand gave 0, and token 0 was accepted: p_target has it at 0"


def test_the_table_of_draw_is_right():
    """Its numbers are those of the test of the exact distribution above."""
    table = {}
    for line in common.rejection_sample.__doc__.splitlines():
        name, *numbers = re.split(r"  +", line.strip().partition("    m")[0])
        with contextlib.suppress(ValueError):
            table[name] = [float(number) for number in numbers]
    p, q = table["p_target"], table["q_draft"]
    assert p == pytest.approx([*P_TARGET.tolist(), 1])
    assert q == pytest.approx([*Q_DRAFT.tolist(), 1])
    drafted = [min(each) for each in zip(p[:3], q)]
    left = [max(p_x - q_x, 0) for p_x, q_x in zip(p[:3], q)]
    assert table["drafted and accepted"] == pytest.approx([*drafted, sum(drafted)])
    assert table["after a rejection"] == pytest.approx([*left, sum(left)])
    both = zip(table["drafted and accepted"], table["after a rejection"])
    assert [sum(each) for each in both] == pytest.approx(p)


def test_a_sample_is_where_the_running_sum_passes_a_uniform_number(monkeypatch):
    def sample(probs, uniform):
        monkeypatch.setattr(torch, "rand_like", lambda like: uniform)
        return common.sample(probs)

    probs = torch.tensor([0.5, 0.3, 0.2]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.6, 0.79, 0.999])[:, None]
    assert sample(probs, uniform)[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
    # Tokens of probability 0 are never drawn, and weights need not sum to 1.
    gaps = torch.tensor([[0.0, 0.2, 0.0, 0.2, 0.0]]).expand(3, -1)
    uniform = torch.tensor([[0.0], [0.5], [1 - 2**-53]], dtype=torch.float64)
    assert sample(gaps, uniform)[:, 0].tolist() == [1, 3, 3]
    # A million rare tokens keep their share of 1e-3, which float32 would lose.
    rare = torch.tensor([1.0, *[1e-9] * 1_000_000])
    half = torch.tensor([1 - 0.5e-3], dtype=torch.float64)
    assert 400_000 < int(sample(rare, half)) < 600_000


Q = torch.tensor([0.3, 0.05, 0.05, 0.2, 0.1, 0.25, 0.05])


def sampled_and_deterministic():
    """Two siblings drawn from Q without replacement and a child; 4 and 5 beside, 2
    below them.
    """
    first = torch.multinomial(Q, 1)
    rest = without(Q, first)
    drawn = torch.cat(
        [first, torch.multinomial(rest, 1), torch.multinomial(Q.flip(0), 1)]
    ).tolist()
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


def test_sampled_output_follows_the_target():
    """And as much of the draft is accepted as can be: rejecting everything is lossless
    as well.
    """
    table = Table(vocab=7)

    def drafts(decoding):
        while True:  # the second token is drawn without a draft
            begins = decoding.ids.shape[1] == 3
            yield sampled_and_deterministic() if begins else draft_of([], [])

    p = table.p_value(drafts, draws=1500)
    told = "the sampled texts do not follow the target: by a chi-square test"
    assert p > 0.001, f"{told} p = {p:.1e}, expected above 0.001"
    accepted = [bool(path) for draft, path in table.rounds if len(draft.tokens)]
    p_target = torch.tensor(table.next_probs(()))
    expected = chance_of_acceptance(p_target)
    spread = 4 * (expected * (1 - expected) / len(accepted)) ** 0.5
    check(
        f"p_target {p_target.tolist()}, q_draft {Q.tolist()}: the share of rounds in "
        "which a child of the root is accepted",
        pytest.approx(expected, abs=spread),
        sum(accepted) / len(accepted),
    )


def test_each_draw_is_given_all_sampled_siblings(llama, monkeypatch):
    """The first node is accepted, and no child of it; nodes 3 and 4 are not sampled."""
    answers = iter([1, 7])
    offered = []

    def draw(p_target, siblings):
        offered.append([(token, q_draft.tolist()) for token, q_draft in siblings])
        return next(answers)

    monkeypatch.setattr(common, "rejection_sample", draw)
    rows = torch.eye(48)[:3]
    draft = draft_of([1, 2, 3, 4, 5], [-1, -1, 0, -1, 0], rows)
    opened(llama, do_sample=True).verify(draft)
    first, second, third = rows.tolist()
    assert offered == [[(1, first), (2, second)], [(3, third)]]


# ----------------------------------------------------------------------------- Decoding


def test_an_answer_ends_inside_the_accepted_tokens(llama):
    """Three tokens would be accepted; the answer ends at the second one."""
    truth = llama.generate(IDS, max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    assert len(set(truth)) == 4
    draft = draft_of([*truth[:3], 9], [-1, 0, 1, -1])
    second = [lambda ids, scores: torch.tensor([ids.shape[1] >= 7])]
    ends = ({"eos_token_id": truth[1]}, {"max_new_tokens": 2})
    for options in (*ends, {"stopping_criteria": second}):
        decoding = opened(llama, **options)
        assert decoding.verify(draft) == [0, 1]
        assert decoding.done
        assert decoding.ids[0, 5:].tolist() == truth[:2]
        # All but the newest token are cached, as after every round, and nothing else.
        assert decoding.hidden.shape[1] == decoding.cached == 6
        for ours, fresh in zip(
            decoding.cache.layers, cached(llama, decoding.ids).layers
        ):
            assert_close(ours.keys, fresh.keys)


def test_an_answer_without_an_end_knows_none(llama):
    ids = [None, 3, [3, 4], torch.tensor(3), torch.tensor([3, 4]), [torch.tensor(3)]]
    got = [opened(llama, eos_token_id=each).eos_ids for each in ids]
    assert got == [set(), {3}, {3, 4}, {3}, {3, 4}, {3}]


# ---------------------------------------------------------------------------- speculate


def test_what_speculate_streams_counts_and_returns(llama):
    """Two accepted nodes of three, an empty draft, and one that is right. Every round
    finds a place for the bonus token, and the states of the rows before it.
    """
    whole = llama.generate(IDS, max_new_tokens=6, do_sample=False)
    truth = whole[0, 5:].tolist()
    states, _ = common.target_features(llama, whole)
    trees = [
        draft_of([truth[0], truth[1], 0], [-1, 0, 0]),
        draft_of([], []),
        draft_of([truth[4]], [-1]),
    ]
    streamer, told = make_streamer()
    stats = common.Stats()
    rounds = []

    def each(decoding, draft, path):
        stats(decoding, draft, path)
        rounds.append((draft, path, decoding.ids.shape[1]))

    def drafts(decoding, trees, start=0):
        for tree, rows in zip(trees[start:], (4, 7, 8)):
            assert decoding.max_depth == 11 - (rows + 1) - 1
            torch.testing.assert_close(decoding.hidden, states[:, :rows])
            yield tree

    given = {"streamer": streamer, "callback": each, "start": 1}
    decoder = common.speculate(drafts, [None, *trees], **given)
    options = {"max_new_tokens": 6, "do_sample": False}
    output = llama.generate(IDS, custom_generate=decoder, **options)
    assert torch.equal(output, whole)
    assert told == [IDS[0].tolist(), truth[:3], truth[3:4], truth[4:], "end"]
    assert rounds == [(trees[0], [0, 1], 8), (trees[1], [], 9), (trees[2], [0], 11)]
    assert (stats.offered, stats.accepted) == ([2, 0, 1], [2, 0, 1])
    assert (stats.drafted, stats.emitted, stats.target_forwards) == (4, 6, 3)


def test_a_generator_that_ends_early_or_never_is_noticed(llama):
    def decode(drafts):
        decoder = common.speculate(drafts)
        return llama.generate(IDS, custom_generate=decoder, max_new_tokens=6)

    empty = draft_of([], [])
    endless = decode(lambda decoding: itertools.repeat(empty))
    assert endless.shape[1] == 5 + 6
    with pytest.raises(AssertionError, match="ended before the answer"):
        decode(lambda decoding: [empty, empty])


def test_a_drafter_whose_logits_are_no_numbers_costs_drafts_only(llama):
    """Its token is some id, which `draw` rejects."""
    nan = torch.full((48,), float("nan"))
    for do_sample in (True, False):
        decoding = opened(llama, do_sample=do_sample, top_k=0)
        token, q_draft = common.pick(decoding, nan, torch.arange(48), [])
        assert 0 <= int(token) < 48
        decoding.verify(common.chain([(token, q_draft)], decoding.ids))


def test_probabilities_that_are_no_numbers_are_named(llama):
    with refused("are not numbers: its logits overflow"):
        common.rejection_sample(torch.tensor([0.5, float("nan")]), [])


def test_pick_takes_the_argmax_of_what_can_be_drafted(llama):
    decoding = opened(llama, repetition_penalty=4.0)
    vocab_ids = torch.tensor([4, 7, 30])
    logits = torch.tensor([3.0, 2.0, 1.0])
    token, q_draft = common.pick(decoding, logits, vocab_ids, [])
    assert token.tolist() == [7], "4 stands in the text, so its logit is 3 / 4"
    expected = torch.tensor([0.75, 2.0, 1.0]).softmax(-1)
    torch.testing.assert_close(q_draft[vocab_ids], expected)
    assert q_draft.sum() == pytest.approx(1)
    token, _ = common.pick(decoding, logits, vocab_ids, [7])
    assert token.tolist() == [30], "7 was drafted before, so its logit is 2 / 4"


def test_pick_draws_from_the_distribution_that_it_returns(small_llama):
    decoding = opened(small_llama, do_sample=True, temperature=0.5, top_k=0)
    logits = torch.tensor([0.0, 0.5, 1.0])
    vocab_ids = torch.tensor([1, 4, 6])
    torch.manual_seed(0)
    counts = collections.Counter()
    for _ in range(500):
        token, q_draft = common.pick(decoding, logits, vocab_ids, [])
        counts[int(token)] += 1
    torch.testing.assert_close(q_draft[vocab_ids], (logits * 2).softmax(-1))
    expected = {int(token): float(q_draft[token]) for token in vocab_ids}
    assert chi_square_p_value(counts, expected) > 1e-3


@pytest.mark.parametrize("scores", [float("-inf"), float("nan")])
def test_pick_gives_nothing_where_the_processors_allow_nothing(llama, scores):
    decoding = opened(llama)
    decoding.logits_processor = lambda ids, given: torch.full_like(given, scores)
    assert common.pick(decoding, torch.zeros(48), torch.arange(48), []) is None


# ------------------------------------------------------------------- logits processors


PROMPT = torch.tensor([[3, 12, 13, 3, 12]])


def once_different(call):
    calls = itertools.count(1)
    return lambda ids, scores: scores * (next(calls) != call)


def never_back():
    """It follows a text on, and does not notice that a shorter one is meant again."""
    longest = [0]

    def processor(ids, scores):
        longest[0] = max(longest[0], ids.shape[1])
        return scores * longest[0]

    return processor


class Log(transformers.LogitsProcessor):
    """What it keeps grows with each call, and is not a number."""

    def __init__(self, kept, grow):
        self.kept, self.grow = kept, grow

    def __call__(self, ids, scores):
        self.grow(self.kept)
        return scores


def one_buffer():
    """Its answers count its calls, and all of them share their memory."""
    buffer = torch.zeros(1, 48)

    def processor(ids, scores):
        return buffer.add_(1)

    return processor


def failing(ids, scores):
    assert ids.shape[1] == PROMPT.shape[1], "a matcher that was told of the prompt"
    return scores


@pytest.mark.parametrize(
    "processor, message",
    [
        (once_different(4), "function gives other answers"),
        (once_different(6), "function gives other answers"),
        (never_back(), "function gives other answers"),
        (one_buffer(), "function gives other answers"),
        (Log([], lambda kept: kept.append(1)), "Log gives other answers, or counts"),
        (Log(torch.zeros(1), lambda kept: kept.add_(1)), "Log .* or counts"),
        (Log({}, lambda kept: kept.update({len(kept): 1})), "Log .* or counts"),
        (failing, "function fails .a matcher"),
    ],
)
def test_a_processor_with_a_state_is_refused_by_name(llama, processor, message):
    with refused(message):
        common.start(
            llama, input_ids=PROMPT, max_new_tokens=4, logits_processor=[processor]
        )


def test_a_processor_that_writes_in_its_ids_changes_no_prompt(llama):
    def processor(ids, scores):
        ids[:, 0] = 1
        return scores

    options = {"logits_processor": [processor], "max_new_tokens": 4}
    decoding = common.start(llama, input_ids=PROMPT, **options)
    assert decoding.ids.tolist() == [[3, 12, 13, 3, 12]]


def test_processors_of_transformers_that_depend_on_the_ids_are_taken(llama):
    """Some of them prepare themselves at the first call."""
    options = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    options |= {"bad_words_ids": [[5, 6]], "sequence_bias": {(7,): 1.5}}
    options |= {"suppress_tokens": [8], "begin_suppress_tokens": [9]}
    options |= {"min_new_tokens": 3, "forced_eos_token_id": 2, "eos_token_id": 2}
    options |= {"exponential_decay_length_penalty": (3, 1.1)}
    options |= {"renormalize_logits": True}
    options |= {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "min_p": 0.01}
    options |= {"typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3}
    options |= {"watermarking_config": transformers.WatermarkingConfig()}
    decoding = common.start(
        llama, input_ids=PROMPT, max_new_tokens=9, do_sample=True, **options
    )
    assert len(decoding.logits_processor) >= 15


# ---------------------------------------------------------------------- what is refused


ONE_LAYER = DynamicCache()
ONE_LAYER.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
MARK = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)


REQUESTS = {
    "attention_mask has zeros": {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
    "with beam_search: .* to None": {"num_beams": 2},
    "with assisted_generation: .* to None": {"prompt_lookup_num_tokens": 3},
    "do not count from 0: leave it out": {"position_ids": torch.arange(1, 6)[None]},
    "FreeGuidance.* asked again about a text": {"guidance_scale": 1.5},
    "SynthID.* asked again about a text": {"watermarking_config": MARK},
    "with inputs_embeds": {"inputs_embeds": torch.zeros(1, 5, 32, dtype=torch.float64)},
    "a cache that holds tokens .see common.start": {common.CACHE: ONE_LAYER},
    "with return_dict_in_generate": {"return_dict_in_generate": True},
    "2 rows of 5 ids": {"num_return_sequences": 2, "do_sample": True},
}


@pytest.mark.parametrize("message", REQUESTS)
def test_a_request_that_trees_cannot_decode_is_refused(llama, message):
    with refused(message):
        opened(llama, **REQUESTS[message])


def test_a_call_without_the_targets_generate_is_told_of_it(llama):
    with refused("call target.generate"):
        common.Decoding(llama, IDS, max_new_tokens=4)


def test_flash_attention_is_told_what_to_load(llama, monkeypatch):
    name = "_attn_implementation_internal"
    monkeypatch.setattr(llama.config, name, "flash_attention_2")
    with refused("attn_implementation='sdpa'"):
        common.check_target(llama)


# Beyond a border all positions get the long factors.
BORDER = {"original_max_position_embeddings": 15}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
LONG_ROPE = {"rope_parameters": ROPE | BORDER} | BORDER


SHORT = {"max_position_embeddings": 16}


@pytest.mark.parametrize("name, options", [("Llama", SHORT), ("Phi3", LONG_ROPE)])
def test_what_a_target_attends_to_is_used_up_to_its_end_and_not_beyond(name, options):
    target = family(name, **options)
    opened(target, max_new_tokens=11)
    with refused("prompt \\+ new tokens = 17, more than the 16 positions"):
        opened(target, max_new_tokens=12)


def test_a_prompt_beyond_the_border_of_long_rope_stays_beyond_it():
    """Four of its five tokens are cached at first: beyond a border of three, but not of
    four.
    """
    for border in (3, 4):
        original = {"original_max_position_embeddings": border}
        target = family("Phi3", rope_parameters=ROPE | original, **original)
        with (
            refused("more than the 5 pos") if border == 4 else contextlib.nullcontext()
        ):
            opened(target)


def test_the_default_target_is_read_from_its_folder(folder, monkeypatch):
    monkeypatch.setattr(default_target, "folder", lambda: folder)
    assert common.load_target()[0].config.vocab_size == 48


# -------------------------------------------------------------------------- the drafter


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
    """Here its LM head scales them, which no field of its config tells."""
    make_glide(make_llama()).save_pretrained(tmp_path)
    target = make_llama()
    target.lm_head.register_forward_hook(lambda module, given, logits: 1.04 * logits)
    with refused("logits do not follow from its last hidden states"):
        make_glide(target)
    with refused("logits do not follow from its last hidden states"):
        common.load_drafter(glide.Drafter, tmp_path, target)


def test_a_drafter_of_another_kind_is_refused(llama, tmp_path):
    drafter = make_glide(llama)
    common.check_drafter(drafter, glide.Drafter, llama)
    with refused("is a <class 'glide.Drafter'>: load a <class 'falcon.Drafter'>"):
        common.check_drafter(drafter, falcon.Drafter, llama)
    drafter.save_pretrained(tmp_path)
    for use in (
        lambda target: common.check_drafter(drafter, glide.Drafter, target),
        lambda target: common.load_drafter(glide.Drafter, tmp_path, target),
    ):
        with refused("is for another target .*vocab_size 48 != 40.*: train one with"):
            use(make_family("Llama"))
    with refused(r"the drafter is torch.float32 on cpu: move it with \.to\(target"):
        common.check_drafter(drafter.float(), glide.Drafter, llama)


PAST = {  # method: settings that its config.json once had
    "falcon": {"norms": True, "bias": True, "layer": {}},
    "specdecpp": {"keep": 0.15},
    "ctc_drafter": {"sampled": 2},
    "medusa": {"sampled": 2},
}


@pytest.mark.parametrize("method", PAST)
def test_settings_of_the_past_are_read(method, llama, tmp_path):
    module = cli.import_method(method)
    drafter = untrained(module, llama)
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PAST[method]))
    loaded = common.load_drafter(module.Drafter, tmp_path, llama)
    assert loaded.config == drafter.config


def test_a_drafter_of_another_architecture_is_no_falcon(llama, tmp_path):
    """config.json once told by `norms` which of them it had: here they are EAGLE's."""
    untrained(eagle, llama).save_pretrained(tmp_path)
    with refused("no falcon drafter.*feature_norm"):
        common.load_drafter(falcon.Drafter, tmp_path, llama)


@pytest.mark.parametrize("module", [falcon, ctc_drafter])
def test_a_drafter_starts_as_the_targets_top_layers(module):
    target = make_llama()
    for place, norm in enumerate(p for p in target.parameters() if p.dim() == 1):
        norm.fill_(0.5 + place)  # a random target's are all 1, as a new drafter's are
    drafter = untrained(module, target, fusion="linear", draft_vocab=9)
    layers = getattr(drafter, "layers", [drafter])
    pairs = [*zip(layers, target.model.layers[-len(layers) :])]
    for ours, theirs in [*pairs, (drafter.norm, target.model.norm)]:
        for name, weight in theirs.named_parameters():
            assert_close(ours.get_parameter(name), weight)
    assert drafter.vocab_ids.tolist() == list(range(39, 48))
    a, b = torch.randn(2, 32, dtype=torch.double)
    assert_close(drafter.fusion(torch.cat([a, b])), a + b)


def test_overlap_is_summed_over_all_rows(llama):
    hidden = torch.randn(300, 32).double()  # more than are taken at a time
    vocab_ids = torch.arange(0, 48, 2)
    q_draft = torch.rand(300, 24).double().softmax(-1)
    p_target = common.target_logits(llama, hidden).softmax(-1)[:, vocab_ids]
    expected = torch.minimum(p_target, q_draft.float()).sum()
    assert_close(common.overlap(llama, hidden, q_draft, vocab_ids), expected)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_demo_streams_and_sets_accepted_tokens_apart(
    folder, monkeypatch, capsys, terminal
):
    target, tokenizer = common.load_target(str(folder))
    target.config.max_position_embeddings = 512
    asked = tokenizer("<user> w1 w2 <end> <assistant>", return_tensors="pt").input_ids
    whole = target.generate(asked, max_new_tokens=160, do_sample=False)
    whole = whole[0, asked.shape[1] :]

    def drafts(decoding, drafter):
        yield draft_of(whole[:2].tolist(), [-1, 0])
        while not decoding.done:
            yield draft_of([], [])

    monkeypatch.setattr(sys, "argv", ["glide.py", "w1 w2"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(common, "load_target", lambda: (target, tokenizer))
    monkeypatch.setattr(common, "load_drafter", lambda *_: torch.nn.Module())
    common.demo(glide.Drafter, "glide", drafts)
    out = capsys.readouterr().out
    green, plain = ("\033[32m", "\033[0m") if terminal else ("", "")
    accepted = tokenizer.decode(whole[:2], skip_special_tokens=True)
    assert out.startswith(f"{green}{accepted}{plain}")
    answer, _, last = (
        out.replace("\033[32m", "").replace("\033[0m", "").rpartition("\n\n")
    )
    assert answer == tokenizer.decode(whole, skip_special_tokens=True)
    counts = f"{len(whole)} tokens, 2 accepted from the drafter"
    tau = len(whole) / (len(whole) - 2)
    ending = "tokens per target forward (plain decoding: 1)\n"
    assert last == f"{counts}; {tau:.2f} {ending}"
