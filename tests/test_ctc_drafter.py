"""ctc_drafter.py: transform and loss by brute force; mask, windows and sampling."""

import dataclasses
import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from tiny import Table, check, drawn, opened, paths, random_batch, untrained

import common
import ctc_drafter
from support.rivals import medusa

SIZES = {"anchors": 6, "slots": 8, "labels": 4}
make_drafter = partial(untrained, ctc_drafter, seed=5, **SIZES)


# ----------------------------------------------------------------------- by brute force


def some_slots(slots=4, symbols=3, seed=0):
    """Random q_slots (S, symbols + 1), the blank last."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(slots, symbols + 1, generator=generator, dtype=torch.double)
    return scores.softmax(-1)


def by_collapsing(q_slots):
    """{sequence: probability}, summed over every alignment."""
    blank = q_slots.shape[1] - 1
    exact = defaultdict(float)
    for alignment in itertools.product(range(blank + 1), repeat=len(q_slots)):
        q = [float(q_slots[slot, symbol]) for slot, symbol in enumerate(alignment)]
        exact[ctc_drafter.collapse(alignment, blank)] += math.prod(q)
    return exact


def beginnings(q_slots):
    """{prefix: probability that the sequence begins with it}, over every alignment."""
    starts = defaultdict(float)
    for sequence, probability in by_collapsing(q_slots).items():
        for end in range(1, len(sequence) + 1):
            starts[sequence[:end]] += probability
    return starts


# ---------------------------------------------------------------------------- transform

TWO = torch.tensor(
    [[0.6, 0.0, 0.4], [0.2, 0.5, 0.3]], dtype=torch.double
)  # a, b, blank


def top(q_slots, symbols):
    """The slots' likeliest symbols; the ids of the tokens are 0, 1, 2, ..."""
    vocab_ids = torch.arange(q_slots.shape[1] - 1)
    return ctc_drafter.top_symbols(q_slots, vocab_ids, symbols)


def test_collapse_merges_before_it_drops_blanks():
    for alignment, sequence in (
        ("aaebcc", "abc"),
        ("aebeec", "abc"),
        ("aeabee", "aab"),
        ("ee", ""),
        ("", ""),
        ("aaa", "a"),
        ("aba", "aba"),
    ):
        assert ctc_drafter.collapse(alignment, "e") == tuple(sequence)


def test_the_likeliest_tokens_of_a_slot_and_its_blank_are_tried():
    q_slots = torch.tensor([[0.1, 0.2, 0.4, 0.3], [0.25, 0.0, 0.15, 0.6]])
    slots = ctc_drafter.top_symbols(q_slots, torch.tensor([4, 6, 9]), 2)
    ids = [[token for token, _ in slot] for slot in slots]
    assert ids == [[9, 6, ctc_drafter.BLANK], [4, 9, ctc_drafter.BLANK]]
    q = [[q for _, q in slot] for slot in slots]
    assert q == [pytest.approx([0.4, 0.2, 0.3]), pytest.approx([0.25, 0.15, 0.6])]
    assert len(top(q_slots, 99)[0]) == 4


FREE = {"eos_ids": (), "max_depth": 99}


def prefix_search(choices, candidates, **limits):
    return ctc_drafter.prefix_search(choices, candidates, **FREE | limits)


def likeliest_alignments(choices, nodes, merge=True, **limits):
    limits = FREE | limits
    return ctc_drafter.likeliest_alignments(choices, nodes, merge=merge, **limits)


@pytest.mark.parametrize("seed", range(4))
def test_prefix_search_sums_over_all_alignments(seed):
    q_slots = some_slots(seed=seed)
    exact = beginnings(q_slots)
    found = prefix_search(top(q_slots, 3), candidates=1000)
    for prefix in sorted(exact.keys() | found.keys()):
        told = f"slots, blank last:\n{q_slots}\n{prefix}"
        check(told, pytest.approx(exact[prefix]), found.get(prefix, 0.0))


def test_prefix_search_on_the_two_slots_of_the_example():
    found = prefix_search(top(TWO, 2), candidates=9)
    found = {prefix: q for prefix, q in found.items() if q}
    expected = {(0,): 0.68, (1,): 0.20, (0, 1): 0.30}
    check(f"given {TWO.tolist()}", pytest.approx(expected), found)


def test_prefix_search_keeps_the_likeliest_prefixes():
    """After slot 1 the likeliest are a, .5, and the empty prefix, .4."""
    two = [[0.5, 0.1, 0.4], [0.3, 0.6, 0.1]]  # a, b, blank
    three = [[0.5, 0.1, 0.4], [0.3, 0.4, 0.3], [0.2, 0.2, 0.6]]
    for slots, symbols, candidates, expected in (
        (two, 2, 2, {"a": 0.62, "b": 0.34, "ab": 0.3}),  # b is dropped after slot 1
        (two, 2, 1, {"a": 0.5, "b": 0.1, "ab": 0.3}),  # all but a are
        (two, 1, 9, {"a": 0.5, "b": 0.24, "ab": 0.3}),  # a in slot 1, b in slot 2
        # after slot 2: a .42, ab .2, b .16, and the empty prefix .12
        (three, 2, 2, {"a": 0.62, "b": 0.26, "ab": 0.284, "aa": 0.03, "aba": 0.04}),
    ):
        q_slots = torch.tensor(slots, dtype=torch.double)
        found = prefix_search(top(q_slots, symbols), candidates)
        got = {"".join("ab"[i] for i in prefix): q for prefix, q in found.items() if q}
        told = f"slots {slots}, symbols {symbols}, candidates {candidates}"
        check(told, pytest.approx(expected), got)


@pytest.mark.parametrize("room", [{"max_depth": 1}, {"eos_ids": {0, 1}}])
def test_a_complete_prefix_takes_no_place_in_the_beam(room):
    """The one place is the empty prefix's, .25, although 0 has .4 and 1 has .35."""
    q_slots = torch.tensor([[0.4, 0.35, 0.25], [0.1, 0.9, 0.0]], dtype=torch.double)
    found = prefix_search(top(q_slots, 2), candidates=1, **room)
    expected = {(0,): 0.4 + 0.25 * 0.1, (1,): 0.35 + 0.25 * 0.9}
    check(f"slots {q_slots.tolist()}, {room}", pytest.approx(expected), found)


SEARCHES = [likeliest_alignments, partial(likeliest_alignments, merge=False)]


@pytest.mark.parametrize("search", SEARCHES)
def test_what_follows_an_end_takes_no_place_among_the_sequences(search):
    q_slots = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.4, 0.0]])  # 0, 1 and the blank
    found = search(top(q_slots, 2), 3, eos_ids={0})
    best = sorted(found, key=found.get, reverse=True)[:3]
    assert best == [(0,), (1,), (1, 0)]


@pytest.mark.parametrize("search", SEARCHES)
def test_sequences_beyond_the_room_and_impossible_ones_take_no_place(search):
    for max_depth in (1, 2, 3):
        found = search(top(some_slots(), 3), 3, max_depth=max_depth)
        assert len(found) >= 3 and max(map(len, found)) <= max_depth
    sure = torch.eye(3)  # the first slot says 0, the second 1, and the third is blank
    assert search(top(sure, 2), 9) == {(0,): 1.0, (0, 1): 1.0}


def test_the_other_searches_on_the_two_slots_of_the_example():
    """By the likeliest alignment, and without a transform."""
    best = {(0,): 0.6, (0, 1): 0.3}
    for search, last in zip(SEARCHES, ({(1,): 0.2}, {(0, 0): 0.12})):
        assert search(top(TWO, 2), 9) == pytest.approx(best | last)
        found = search(top(TWO, 2), 2)
        assert {path: found[path] for path in best} == pytest.approx(best)


def test_alignments_that_continue_alike_are_continued_once():
    """Forty slots that say a or blank have 2^40 alignments, but twenty sequences."""
    slots = top(torch.tensor([[0.5, 0.5]] * 40), 1)
    found = likeliest_alignments(slots, nodes=99)
    assert sorted(map(len, found)) == [*range(1, 21)]


def test_the_tree_is_a_trie_of_the_likeliest_prefixes():
    prefixes = {(3,): 0.6, (3, 5): 0.4, (3, 5, 5): 0.1}
    prefixes |= {(4,): 0.3, (4, 5): 0.25, (6,): 0.05}

    def tree(prefixes, nodes=9, first=()):
        return ctc_drafter.token_tree(torch.tensor([[1, 2]]), prefixes, nodes, first)

    draft = tree(prefixes, nodes=4)
    assert draft.tokens.tolist() == [3, 5, 4, 5] and draft.parents == [-1, 0, -1, 2]
    assert draft.notes == {"q": [0.6, 0.4, 0.3, 0.25]} and draft.probs is None
    assert paths(tree(prefixes, nodes=3, first=[(6,)])) == [(6,), (3,), (3, 5)]
    # Rounding may put a prefix before its own beginning.
    assert paths(tree({(3,): 0.5, (3, 5): 0.5000001})) == [(3,)]
    nothing = tree({})
    assert nothing.tokens.dtype == torch.long and nothing.tokens.shape == (0,)
    assert nothing.parents == [] and nothing.notes == {"q": []}


def first_draft(target, monkeypatch, changes, **options):
    """A draft where the slots say 5 5 blank 6 6 6 7 blank."""
    q_slots = torch.full((8, 49), 0.05 / 48)
    q_slots[torch.arange(8), [5, 5, 48, 6, 6, 6, 7, 48]] = 0.95
    monkeypatch.setattr(ctc_drafter, "fill_slots", lambda *_: q_slots.log())
    decoding = opened(target, **options)
    return next(ctc_drafter.drafts(decoding, make_drafter(target), **changes))


LIKELIEST = {"prefixes": (5, 6, 7), "alignments": (5, 6, 7), "none": (5, 5)}


@pytest.mark.parametrize("transform", LIKELIEST)
def test_slots_are_merged_before_the_tree_is_built(llama, monkeypatch, transform):
    likeliest = LIKELIEST[transform]
    count = len(likeliest)
    draft = first_draft(llama, monkeypatch, {"transform": transform, "nodes": count})
    assert paths(draft) == [likeliest[:end] for end in range(1, count + 1)]
    assert len(draft.notes["q"]) == count and len(draft.notes["q_slots"]) == 8
    assert draft.notes["vocab_ids"].tolist() == list(range(48))


@pytest.mark.parametrize("transform", LIKELIEST)
def test_nothing_is_drafted_after_an_end_or_the_last_token(
    llama, monkeypatch, transform
):
    changes = {"transform": transform, "nodes": 9}
    for options in ({"eos_token_id": [5, 6]}, {"max_new_tokens": 3}):
        drafted = paths(first_draft(llama, monkeypatch, changes, **options))
        assert max(map(len, drafted)) == 2
        for path in drafted:
            if "eos_token_id" in options:
                assert not {5, 6} & {*path[:-1]}
    # The last token is the bonus token's.
    assert not paths(first_draft(llama, monkeypatch, changes, max_new_tokens=1))


# --------------------------------------------------------------------- loss and windows


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_ctc_loss_equals_a_sum_over_all_alignments(slots):
    """Every window of three labels, also those whose repeats need five slots."""
    labels = torch.tensor([*itertools.product(range(2), repeat=3)])  # (8, 3)
    q_slots = torch.stack(
        [some_slots(slots, symbols=2, seed=seed) for seed in range(8)]
    )
    expected = 0.0
    for window, q in zip(labels.tolist(), q_slots):
        probability = by_collapsing(q)[tuple(window)]
        if probability > 0:  # it fits into the slots
            expected -= math.log(probability)
    assert float(ctc_drafter.ctc_loss(q_slots.log(), labels)) == pytest.approx(expected)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_loss_and_acceptance_of_a_batch_by_hand(small_llama, weight):
    """What cannot be drafted keeps its share of p_target in the acceptance rate."""
    options = dict(slots=4, labels=2, draft_vocab=5)
    drafter = make_drafter(small_llama, first_token=weight, **options)
    batch = random_batch(small_llama, lengths=(8, 6))
    anchors, labels, _ = ctc_drafter.anchors_and_labels(drafter, small_llama, batch)
    log_q = ctc_drafter.training_log_q(drafter, small_llama, batch, anchors).detach()
    expected = 0.0
    overlap = 0.0
    used = (anchors >= 0).nonzero().tolist()
    for q_slots, window, (row, n) in zip(log_q.exp(), labels, used):
        expected -= math.log(by_collapsing(q_slots)[tuple(window.tolist())])
        starts = beginnings(q_slots)
        ids = batch.input_ids[row, : anchors[row, n] + 2]  # up to x_(i+1)
        p_target = small_llama(ids[None]).logits[0, -1].softmax(-1)
        p_drafted = p_target[drafter.vocab_ids]
        for token, p in enumerate(p_drafted.tolist()):
            label = p / float(p_drafted.sum())
            expected -= weight * label * math.log(starts[token,])
            overlap += min(p, starts[token,])
    total, windows = ctc_drafter.loss(drafter, small_llama, batch)
    assert int(windows) == 4 + 2  # responses of 5 and 3 tokens, windows of 2
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
    total, windows = ctc_drafter.acceptance(drafter, small_llama, batch)
    assert windows == 4 + 2
    assert float(total.detach()) == pytest.approx(overlap, rel=1e-4)


@pytest.mark.parametrize("first_token", [0.0, 1.0])
def test_probabilities_that_are_too_small_for_a_float_leave_finite_gradients(
    llama, first_token
):
    """A class at -inf would leave a finite loss, and gradients that are not numbers."""
    drafter = make_drafter(llama, first_token=first_token).float()
    drafter.norm.weight.data *= 300
    drafter.blank.weight.data *= 10
    batch = random_batch(llama)
    anchors, *_ = ctc_drafter.anchors_and_labels(drafter, llama, batch)
    log_q = ctc_drafter.training_log_q(drafter, llama, batch, anchors)
    assert (log_q.exp() == 0).any() and log_q.isfinite().all()
    total, _ = ctc_drafter.loss(drafter, llama, batch)
    total.backward()
    assert total.isfinite()
    for name, weight in drafter.named_parameters():
        assert weight.grad.isfinite().all(), name


def test_a_batch_without_a_whole_window_gives_zeros(llama):
    drafter = make_drafter(llama, first_token=0.5)
    total, count = ctc_drafter.loss(drafter, llama, random_batch(llama, lengths=(6, 2)))
    total.backward()
    assert float(total.detach()) == 0 and int(count) == 0
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), name
    assert ctc_drafter.acceptance(drafter, llama, random_batch(llama, (6, 2)))[1] == 0


@pytest.mark.parametrize("prompt", [1, 3])
def test_windows_hold_what_the_target_says_after_the_newest_token(llama, prompt):
    """Each row whose four labels are all of the response is an anchor, once."""
    drafter = make_drafter(llama, anchors=20)
    batch = random_batch(llama, prompt=prompt)
    anchors, labels, _ = ctc_drafter.anchors_and_labels(drafter, llama, batch)
    best = llama(batch.input_ids).logits.argmax(-1)  # best[t] follows x_t
    labels = iter(labels.tolist())
    for row, length in enumerate((9, 12, 7)):
        chosen = [anchor for anchor in anchors[row].tolist() if anchor >= 0]
        assert sorted(chosen) == list(range(max(prompt, 2) - 2, length - 5))
        for anchor in chosen:
            assert next(labels) == best[row, anchor + 1 : anchor + 5].tolist()
    # Of row 0's three or more, any two may be left.
    few = make_drafter(llama, anchors=2)
    torch.manual_seed(0)
    seen = set()
    for _ in range(60):
        anchors, *_ = ctc_drafter.anchors_and_labels(few, llama, batch)
        seen.add(tuple(sorted(anchors[0].tolist())))
    rows = range(max(prompt, 2) - 2, 9 - 5)
    assert seen == set(itertools.combinations(rows, 2))


def test_windows_of_a_second_turn_do_not_cross_what_the_user_says(llama):
    batch = random_batch(llama, lengths=(16,), prompt=2)
    batch.loss_mask[0, 8:10] = False
    drafter = make_drafter(llama, anchors=20)
    anchors, *_ = ctc_drafter.anchors_and_labels(drafter, llama, batch)
    chosen = anchors[anchors >= 0].tolist()
    assert sorted(chosen) == [0, 1, 2, 8, 9, 10]  # labels 2-5 ... 4-7, 10-13 ...


# ------------------------------------------------------------------------- architecture


def test_the_mask_against_a_loop():
    anchors, length, slots = torch.tensor([[0, 2, 5], [4, 4, 1]]), 6, 3
    got = ctc_drafter.slot_mask(anchors, length, slots)
    expected = torch.zeros(2, 1, 9, 15, dtype=torch.bool)
    for b, query, key in itertools.product(range(2), range(9), range(15)):
        if key < length:
            expected[b, 0, query, key] = key <= int(anchors[b, query // slots])
        else:
            expected[b, 0, query, key] = (key - length) // slots == query // slots
    given = f"length 6, 3 slots, anchors {anchors.tolist()}"
    for index, rows in enumerate(zip(drawn(expected), drawn(got))):
        b, query = divmod(index, 9)
        check(f"{given}: what slot {query} of 9 of sequence {b} sees", *rows)
    check(f"{given}: the shape", (2, 1, 9, 15), tuple(got.shape))


def test_drafting_round_by_round_equals_one_training_pass(llama):
    """With a cache of rows or without: the slots after a newest token are the same."""
    drafter = make_drafter(llama)
    batch = random_batch(llama, lengths=(12,), prompt=1)
    anchors = torch.arange(11)[None]
    log_q = ctc_drafter.training_log_q(drafter, llama, batch, anchors)
    decoding = common.start(llama, input_ids=batch.input_ids[:, :1], max_new_tokens=20)
    memory = ctc_drafter.Memory(drafter, llama)
    for end in (3, 4, 8, 12):  # tokens committed
        decoding.ids = batch.input_ids[:, :end]
        decoding.buffer, decoding.cached = batch.hidden, end - 1
        drafted = ctc_drafter.fill_slots(drafter, decoding, memory)
        torch.testing.assert_close(drafted, log_q[end - 2], atol=1e-4, rtol=1e-4)
        assert memory.cache.get_seq_length() == end - 1


# ----------------------------------------------------------------------------- sampling


MAKE = {ctc_drafter: make_drafter, medusa: partial(untrained, medusa, anchors=6)}
BOTH = pytest.mark.parametrize("method", MAKE, ids=lambda method: method.__name__)


def sampling(target, **options):
    given = {"input_ids": torch.tensor([[4, 2, 3]]), "do_sample": True, "top_k": 0}
    return opened(target, **given | options)


def processed(q, temperature, kept):
    """q (V,) at a temperature, then only the `kept` likeliest tokens."""
    q = q ** (1 / temperature)
    q = q.where(q >= q.topk(kept).values[-1], 0)
    return q / q.sum()


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_the_marginal_of_the_first_token_is_a_sum_over_all_alignments(slots):
    """What it lacks of 1 is the probability that all slots are blank."""
    q_slots = some_slots(slots, seed=slots)
    exact = beginnings(q_slots)
    found = ctc_drafter.first_token_log_q(q_slots.log()[None])[0].exp()
    assert found.tolist() == pytest.approx([exact[token,] for token in range(3)])
    assert float(1 - found.sum()) == pytest.approx(float(q_slots[:, -1].prod()))


@pytest.mark.parametrize("transform", LIKELIEST)
def test_the_first_token_is_drawn_from_its_marginal(
    small_llama, monkeypatch, transform
):
    """Through the logits processors, from the draft vocabulary."""
    drafter = make_drafter(small_llama, slots=4, labels=2, draft_vocab=3)
    q_slots = some_slots()
    monkeypatch.setattr(ctc_drafter, "fill_slots", lambda *_: q_slots.log())
    starts = beginnings(q_slots)
    q = [starts[token,] for token in range(3)]
    if transform == "none":  # it is slot 1's
        q = q_slots[0, :3].tolist()
    expected = torch.zeros(7)
    expected[drafter.vocab_ids] = processed(torch.tensor(q), 0.5, kept=2)

    def trees(count, **options):
        decoding = sampling(small_llama, **options)
        changes = {"transform": transform, "symbols": 2, "nodes": 6}
        drafts = ctc_drafter.drafts(decoding, drafter, **changes)
        return list(itertools.islice(drafts, count))  # nothing is verified

    torch.manual_seed(0)
    seen = set()
    for draft in trees(50, temperature=0.5, top_k=2):
        assert draft.parents[0] == -1 and draft.probs.shape == (1, 7)
        torch.testing.assert_close(draft.probs[0], expected, atol=1e-5, rtol=1e-5)
        first = int(draft.tokens[0])
        assert draft.notes["q"][0] == pytest.approx(float(draft.probs[0, first]))
        assert len(draft.tokens) == 6 == len(set(paths(draft)))
        seen.add(first)
    assert len(seen) == 2  # the two that are kept


def test_a_drawn_token_that_the_search_left_out_has_nothing_below_it(small_llama):
    """Nor does one that a logits processor forces; and nothing is drawn in vain."""
    q_slots = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.8, 0.1, 0.0]])
    vocab_ids = torch.tensor([2, 5, 6])
    config = ctc_drafter.Config(slots=2, labels=2, symbols=1, nodes=3)

    def tree(nodes=3, **options):
        changed = dataclasses.replace(config, nodes=nodes)
        decoding = sampling(small_llama, **options)
        return ctc_drafter.make_tree(decoding, q_slots.log(), vocab_ids, changed)

    torch.manual_seed(0)
    trees = {tuple(paths(tree())) for _ in range(50)}
    found = ((2,), (2, 5))
    assert trees == {found, ((5,), *found), ((6,), *found)}
    forced = tree(prefix_allowed_tokens_fn=lambda *_: [3])  # it cannot be drafted
    assert paths(forced) == [(3,), *found]
    assert forced.probs.tolist() == [[0, 0, 0, 1, 0, 0, 0]]
    assert tree(nodes=0).probs is None
    nothing = tree(suppress_tokens=[2, 5, 6])  # all that can be drafted is forbidden
    assert nothing.probs is None and paths(nothing) == [*found]


def test_slots_that_are_blank_for_certain_still_draw(small_llama):
    """Their tokens' probabilities are too small for a float, their logarithms not."""
    drafter = make_drafter(small_llama)
    drafter.blank.bias.data.fill_(500.0)
    draft = next(ctc_drafter.drafts(sampling(small_llama), drafter))
    assert not draft.notes["q_slots"][:, :-1].any() and len(draft.tokens) == 1
    assert draft.probs.sum() == pytest.approx(1) and draft.probs.max() < 0.99


def p_value(method, monkeypatch, **options):
    """Of answers that are drafted by slots which always say the same."""
    table = Table(**options)
    generator = torch.Generator().manual_seed(3)
    log_q = (1.5 * torch.randn(4, 6, generator=generator)).log_softmax(-1)
    monkeypatch.setattr(medusa, "run_heads", lambda *_: log_q[:, :5])
    monkeypatch.setattr(ctc_drafter, "fill_slots", lambda *_: log_q)
    drafter = MAKE[method](table.target)
    drafts = partial(method.drafts, drafter=drafter, nodes=4, symbols=2)
    return table.p_value(drafts, draws=1000)


FILTERED = {"temperature": 0.5, "top_p": 0.9}


@BOTH
@pytest.mark.parametrize("options", [{}, FILTERED], ids=str)
def test_sampled_answers_follow_the_target(method, options, monkeypatch):
    assert p_value(method, monkeypatch, **options) > 1e-3


def lying(pick):
    """A q_draft that is too small, so that the token is accepted too often."""

    def wrong(*args):
        token, q_draft = pick(*args)
        return token, q_draft * 0.7

    return wrong


def unprocessed(pick):
    """A q_draft before the processors."""

    def wrong(decoding, logits, vocab_ids, drafted):
        token, q_draft = pick(decoding, logits, vocab_ids, drafted)
        return token, q_draft.index_copy(0, vocab_ids, logits.softmax(-1).float())

    return wrong


@BOTH
@pytest.mark.parametrize("wrong", [lying, unprocessed])
def test_negative_controls_of_sampled_answers(method, wrong, monkeypatch):
    monkeypatch.setattr(common, "pick", wrong(common.pick))
    assert p_value(method, monkeypatch, **FILTERED) < 1e-6
