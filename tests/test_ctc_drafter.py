"""ctc_drafter.py: the transform and the loss against brute force, the mask, windows, decoding."""

import dataclasses
import itertools
import math
from collections import defaultdict

import pytest
import torch
from tiny import drawn, make_llama, paths, random_batch

import common
import ctc_drafter


def make_drafter(target, **options):
    settings = dict(intermediate_size=48, draft_vocab=0, anchors=6, slots=8, window=4)
    config = ctc_drafter.Config(**settings | options)
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return ctc_drafter.build(config, target, counts).double().eval()


# ---------------------------------------------------------------------------------- by brute force


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
        chosen = [float(q_slots[slot, symbol]) for slot, symbol in enumerate(alignment)]
        exact[ctc_drafter.collapse(alignment, blank)] += math.prod(chosen)
    return exact


def beginnings(q_slots):
    """{prefix: probability that the sequence begins with it}, summed over every alignment."""
    starts = defaultdict(float)
    for sequence, probability in by_collapsing(q_slots).items():
        for end in range(1, len(sequence) + 1):
            starts[sequence[:end]] += probability
    return starts


# -------------------------------------------------------------------------------------- transform


def test_collapse_merges_before_it_drops_blanks():
    for alignment, sequence in (
        ("aaebecce", "abc"),  # the two of the header
        ("aeabeeee", "aab"),
        ("ee", ""),
        ("", ""),
        ("aaa", "a"),
        ("aba", "aba"),
    ):
        assert ctc_drafter.collapse(alignment, "e") == tuple(sequence)


@pytest.mark.parametrize("seed", range(4))
def test_prefix_search_sums_over_all_alignments(seed):
    q_slots = some_slots(seed=seed)
    exact = beginnings(q_slots)
    found = ctc_drafter.prefix_search(q_slots, symbols=3, candidates=1000)
    for prefix in sorted(exact.keys() | found.keys()):
        expected, got = exact[prefix], found.get(prefix, 0.0)
        told = f"slots, blank last:\n{q_slots}\n{prefix}: expected {expected:.6f}, got {got:.6f}"
        assert got == pytest.approx(expected), told


def test_prefix_search_on_the_two_slots_of_its_docstring():
    q_slots = torch.tensor([[0.6, 0.0, 0.4], [0.2, 0.5, 0.3]], dtype=torch.double)  # a, b, blank
    found = ctc_drafter.prefix_search(q_slots, symbols=2, candidates=9)
    found = {prefix: q for prefix, q in found.items() if q}
    expected = {(0,): 0.68, (1,): 0.20, (0, 1): 0.30}
    told = f"given {q_slots.tolist()}: expected {expected}, got {found}"
    assert found == pytest.approx(expected), told


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
        found = ctc_drafter.prefix_search(q_slots, symbols, candidates)
        got = {"".join("ab"[i] for i in prefix): q for prefix, q in found.items() if q}
        told = f"slots {slots}, symbols {symbols}, candidates {candidates}: expected {expected}"
        assert got == pytest.approx(expected), f"{told}, got {got}"


@pytest.mark.parametrize("merge", [True, False])
def test_alignments_are_the_most_probable_combinations(merge):
    q_slots = some_slots(slots=3, symbols=4, seed=2)
    values = {}
    for combination in itertools.product(range(5), repeat=3):
        chosen = [float(q_slots[slot, symbol]) for slot, symbol in enumerate(combination)]
        values[combination] = math.prod(chosen)
    expected = defaultdict(float)
    for combination in sorted(values, key=values.get, reverse=True)[:7]:
        sequence = tuple(itertools.takewhile(lambda symbol: symbol != 4, combination))
        if merge:
            sequence = ctc_drafter.collapse(combination, 4)
        for end in range(1, len(sequence) + 1):
            expected[sequence[:end]] += values[combination]
    found = ctc_drafter.alignments(q_slots, symbols=4, candidates=7, merge=merge)
    assert found == pytest.approx(expected)


def test_the_tree_is_a_trie_of_the_likeliest_prefixes():
    prefixes = {(3,): 0.6, (3, 5): 0.4, (3, 5, 5): 0.1, (4,): 0.3, (4, 5): 0.25, (6,): 0.05}
    draft = ctc_drafter.token_tree(prefixes, torch.arange(10) * 10, nodes=4, depth=9)
    assert draft.tokens.tolist() == [30, 50, 40, 50] and draft.parents.tolist() == [-1, 0, -1, 2]
    assert draft.q.tolist() == pytest.approx([0.6, 0.4, 0.3, 0.25]) and draft.probs is None
    shallow = ctc_drafter.token_tree(prefixes, torch.arange(10), nodes=9, depth=1)
    assert shallow.tokens.tolist() == [3, 4, 6] and shallow.parents.tolist() == [-1, -1, -1]
    rounded = {(3,): 0.5, (3, 5): 0.5000001}  # sums of the same terms in another order
    assert ctc_drafter.token_tree(rounded, torch.arange(10), 9, 9).tokens.tolist() == [3]
    nothing = ctc_drafter.token_tree(prefixes, torch.arange(10), nodes=9, depth=0)
    assert nothing.tokens.dtype == nothing.parents.dtype == torch.long
    assert nothing.tokens.shape == nothing.parents.shape == nothing.q.shape == (0,)


@pytest.mark.parametrize(
    "transform, likeliest", [("prefixes", (5, 6, 7)), ("alignments", (5, 6, 7)), ("none", (5, 5))]
)
def test_slots_are_merged_before_the_tree_is_built(llama, monkeypatch, transform, likeliest):
    """The slots say 5 5 blank 6 6 6 7 blank."""
    q_slots = torch.full((8, 49), 0.05 / 48)
    q_slots[torch.arange(8), [5, 5, 48, 6, 6, 6, 7, 48]] = 0.95
    monkeypatch.setattr(ctc_drafter, "fill_slots", lambda *_: q_slots)
    drafter = make_drafter(llama)
    decoding = common.open_decoding(llama, torch.tensor([[9, 8, 7]]), max_new_tokens=9)
    count = len(likeliest)
    config = dataclasses.replace(drafter.config, transform=transform, nodes=count)
    draft = next(ctc_drafter.drafts(decoding, drafter, config))
    assert paths(draft) == [likeliest[:end] for end in range(1, count + 1)]


# ------------------------------------------------------------------------------- loss and windows


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_ctc_loss_equals_a_sum_over_all_alignments(slots):
    """Every window of three labels, also those whose repeats need five slots."""
    labels = torch.tensor([*itertools.product(range(2), repeat=3)])  # (8, 3)
    q_slots = torch.stack([some_slots(slots, symbols=2, seed=seed) for seed in range(8)])
    expected = 0.0
    for window, q in zip(labels.tolist(), q_slots):
        probability = by_collapsing(q)[tuple(window)]
        if probability > 0:  # it fits into the slots
            expected -= math.log(probability)
    assert float(ctc_drafter.ctc_loss(q_slots.log(), labels)) == pytest.approx(expected)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_loss_and_acceptance_of_a_batch_by_hand(small_llama, weight):
    """What cannot be drafted keeps its share of p_target in the acceptance rate."""
    options = dict(slots=4, window=2, draft_vocab=5)
    drafter = make_drafter(small_llama, first_token=weight, **options)
    batch = random_batch(small_llama, lengths=(8, 6))
    anchors, labels = ctc_drafter.windows(drafter, small_llama, batch)
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
            teacher = p / float(p_drafted.sum())
            expected -= weight * teacher * math.log(starts[token,])
            overlap += min(p, starts[token,])
    total, windows = ctc_drafter.loss(drafter, small_llama, batch)
    assert int(windows) == 4 + 2  # responses of 5 and 3 tokens, windows of 2
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
    total, windows = ctc_drafter.acceptance(drafter, small_llama, batch)
    assert windows == 4 + 2 and float(total.detach()) == pytest.approx(overlap, rel=1e-4)


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
    anchors, labels = ctc_drafter.windows(drafter, llama, batch)
    best = llama(batch.input_ids).logits.argmax(-1)  # best[t] follows x_t
    labels = iter(labels.tolist())
    for row, length in enumerate((9, 12, 7)):
        chosen = [anchor for anchor in anchors[row].tolist() if anchor >= 0]
        assert sorted(chosen) == list(range(max(prompt, 2) - 2, length - 5))
        for anchor in chosen:
            assert next(labels) == best[row, anchor + 1 : anchor + 5].tolist()
    few = make_drafter(llama, anchors=1)  # one of several, drawn anew by a new seed
    seen = set()
    for step in range(9):
        again = dataclasses.replace(batch, seed=batch.seed + step)
        seen.add(tuple(ctc_drafter.windows(few, llama, again)[0][:, 0].tolist()))
    assert len(seen) > 1


def test_windows_of_a_second_turn_do_not_cross_what_the_user_says(llama):
    batch = random_batch(llama, lengths=(16,), prompt=2)
    batch.loss_mask[0, 8:10] = False
    anchors, _ = ctc_drafter.windows(make_drafter(llama, anchors=20), llama, batch)
    chosen = anchors[anchors >= 0].tolist()
    assert sorted(chosen) == [0, 1, 2, 8, 9, 10]  # labels 2-5 ... 4-7, 10-13 ...


# ----------------------------------------------------------------------------------- architecture


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
        place = f"{given}: what slot {query} of 9 of sequence {b} sees"
        assert rows[0] == rows[1], f"{place}: expected {rows[0]}, got {rows[1]}"
    shape = tuple(got.shape)
    assert shape == expected.shape, f"{given}: expected shape (2, 1, 9, 15), got {shape}"


def test_drafting_round_by_round_equals_one_training_pass(llama):
    """With a cache of rows or without: the slots after a newest token are the same."""
    drafter = make_drafter(llama)
    batch = random_batch(llama, lengths=(12,), prompt=1)
    anchors = torch.arange(11)[None]
    log_q = ctc_drafter.training_log_q(drafter, llama, batch, anchors)
    decoding = common.open_decoding(llama, batch.input_ids[:, :1], max_new_tokens=20)
    cache = common.GrowingCache(1)
    head = common.draft_head(llama, drafter.vocab_ids)
    start = 0
    for end in (3, 4, 8, 12):  # tokens committed
        decoding.ids = batch.input_ids[:, :end]
        decoding.hidden = batch.hidden[:, start : end - 1]
        q_slots = ctc_drafter.fill_slots(drafter, decoding, cache, head)
        torch.testing.assert_close(q_slots.log(), log_q[end - 2], atol=1e-4, rtol=1e-4)
        start = end - 1
        assert cache.get_seq_length() == start


def test_the_layer_and_the_final_norm_start_as_the_targets():
    target = make_llama()
    for place, norm in enumerate(p for p in target.parameters() if p.dim() == 1):
        norm.fill_(0.5 + place)  # a random target's are all 1, as a new drafter's are
    drafter = make_drafter(target, draft_vocab=9)
    for name, theirs in target.model.layers[-1].named_parameters():
        torch.testing.assert_close(drafter.get_parameter(name), theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)
    assert drafter.vocab_ids.tolist() == list(range(39, 48))
    a, b = torch.randn(2, 32, dtype=torch.double)
    torch.testing.assert_close(drafter.fusion(torch.cat([a, b])), a + b)


@torch.no_grad()
def test_slots_stand_after_their_anchor(llama, monkeypatch):
    """Row i has position i, and the slots after it i + 1, i + 2, ..."""
    drafter = make_drafter(llama, slots=2, window=2)
    seen = []
    real = common.rotary
    monkeypatch.setattr(common, "rotary", lambda *args: seen.append(args[1:]) or real(*args))
    hidden = torch.zeros(1, 3, 32, dtype=torch.double)
    drafter(llama, hidden, torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 2]]))
    [(positions, layer)] = seen
    assert positions.tolist() == [[0, 1, 2, 1, 2, 3, 4]] and layer == -1
