"""Copies from the context: what is found, how it joins any draft, and that nothing is lost."""

import collections
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import chi_square_p_value, enumerate_joint, random_tree, slow

import common

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def found_by_search(text, most):
    """The definition, by searching the whole text from its end."""
    for n, length in ((4, most), (3, most // 2), (2, most // 3)):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[end - n : end] == text[-n:]:
                copy = list(text[end:])
                while len(copy) < length:
                    copy.append(copy[end - len(text)])
                return copy[:length]
    return []


@settings(max_examples=300, deadline=None)
@given(TEXT, st.integers(1, 9), st.integers(1, 5))
def test_find_against_a_search(text, most, step):
    """Called with a growing text, a few tokens more each time, as a decode loop does."""
    lookup = common.Lookup(most)
    for end in range(1, len(text) + 1, step):
        assert lookup.find(torch.tensor([text[:end]])) == found_by_search(text[:end], most)


def test_find_by_hand():
    """Six tokens after four that stood before, three after three, two after two; loops go on."""
    assert common.Lookup(6).find(torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3, 4]])) == [
        5,
        6,
        1,
        2,
        3,
        4,
    ]
    assert common.Lookup(6).find(torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3]])) == [4, 5, 6]
    assert common.Lookup(6).find(torch.tensor([[1, 2, 3, 4, 9, 2, 3]])) == [4, 9]
    assert common.Lookup(5).find(torch.tensor([[7, 8, 9, 7, 8, 9, 7]])) == [8, 9, 7, 8, 9]


def paths(draft):
    """Every node as the tokens on its way from the root."""
    ways = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()):
        ways.append((*(ways[parent] if parent >= 0 else ()), token))
    return ways


@settings(max_examples=200, deadline=None)
@given(TEXT, st.integers(0, 8), st.integers(0, 6), st.integers(0, 2**20))
def test_merge_against_brute_force(text, nodes, room, seed):
    """The merged tree holds the draft's paths, first and unchanged, and the copy's, each once."""
    draft = random_tree(torch.Generator().manual_seed(seed), nodes, 9)
    draft.probs = torch.rand(nodes, 9) if seed % 2 else None
    merged = common.Lookup(6).merge(draft, torch.tensor([text]), room)
    copy = found_by_search(text, 6)[:room]
    before, after = paths(draft), paths(merged)
    assert after[: len(before)] == before and len(set(after)) == len(after)
    assert set(after) == set(before) | {tuple(copy[:end]) for end in range(1, len(copy) + 1)}
    assert merged.copied == len(after) - len(before)
    assert merged.probs is draft.probs  # no row for a copy: it was not sampled


def test_a_copy_shares_all_that_it_begins_with():
    """The draft is 5 6 9, the copy 5 6 7 1: it branches off after 6."""
    draft = common.Draft(torch.tensor([5, 6, 9]), torch.tensor([-1, 0, 1]))
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]])
    merged = common.Lookup(4).merge(draft, text, 9)
    assert merged.tokens.tolist() == [5, 6, 9, 7, 1] and merged.copied == 2
    assert merged.parents.tolist() == [-1, 0, 1, 1, 3]


def test_nothing_is_copied_by_default(llama):
    draft = random_tree(torch.Generator().manual_seed(0), 4, 48)
    text = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    assert common.Lookup(0).merge(draft, text, 9) is draft


@torch.no_grad()
def decode(target, ids, new, do_sample=False, copies=6, drafted=0, stats=None):
    """A decode loop that drafts `drafted` tokens sampled from a flat distribution, and copies."""
    cache, end = common.GrowingCache(target.config.num_hidden_layers), ids.shape[1] + new
    lookup, vocab = common.Lookup(copies), target.config.vocab_size
    common.forward(target, ids[:, :-1], cache)
    while ids.shape[1] < end:
        room = end - ids.shape[1] - 1
        probs = torch.full((min(drafted, room), vocab), 1 / vocab)
        tokens = torch.randint(vocab, (len(probs),))
        draft = common.Draft(tokens, torch.arange(len(tokens)) - 1, probs)
        if drafted > 1 and len(tokens) > 1:  # two more siblings: sampled, certain
            draft = common.Draft(
                torch.cat([tokens, torch.randint(vocab, (1,)), torch.randint(vocab, (1,))]),
                torch.cat([draft.parents, torch.tensor([-1, -1])]),
                torch.cat([probs, probs[:1]]),
            )
        draft = lookup.merge(draft, ids, room)
        verified = common.verify(target, ids, draft, cache, None, do_sample, stats)
        ids = torch.cat([ids, verified.tokens], dim=1)
    return ids


@pytest.mark.parametrize("drafted", [0, 3])
def test_greedy_output_is_plain_decoding(llama, drafted):
    ids, stats = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]]), common.Stats()
    torch.manual_seed(0)
    truth = llama.generate(ids, max_new_tokens=60, do_sample=False)
    assert torch.equal(decode(llama, ids, 60, drafted=drafted, stats=stats), truth)
    offered, accepted = (sum(column) for column in zip(*stats.copies))
    assert 0 < accepted <= offered <= stats.drafted


def counts_of(target, ids, draws, **options):
    counts = collections.Counter()
    for _ in range(draws):
        output = decode(target, ids, 3, do_sample=True, **options)
        counts[tuple(output[0, ids.shape[1] :].tolist())] += 1
    return counts


@pytest.mark.parametrize("drafted", [slow(0), 2])
def test_sampled_output_follows_the_target(small_llama, drafted):
    """Copies beside and beneath sampled siblings and a deterministic one."""
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    torch.manual_seed(5)
    counts = counts_of(small_llama, ids, 500, drafted=drafted)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, ids, 3)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [0, 2])
def test_negative_control_a_copy_that_is_taken_without_a_draw(small_llama, monkeypatch, drafted):
    monkeypatch.setattr(
        common,
        "_draw",
        lambda scores, siblings, draft: (
            int(draft.tokens[-draft.copied])
            if draft.copied
            else int(torch.multinomial(scores.softmax(-1), 1))
        ),
    )
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    torch.manual_seed(5)
    counts = counts_of(small_llama, ids, 300, drafted=drafted)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, ids, 3)) < 1e-6


def test_stats_count_accepted_copies(llama):
    """Two drafted tokens that are wrong, and a copy of which the first two tokens are right."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    truth = llama.generate(ids, max_new_tokens=3, do_sample=False)[0, 8:].tolist()
    wrong = (truth[0] + 1) % 48
    tokens = [wrong, wrong, *truth[:2], (truth[2] + 1) % 48]
    draft = common.Draft(torch.tensor(tokens), torch.tensor([-1, 0, -1, 2, 3]), None, copied=3)
    cache, stats = common.GrowingCache(3), common.Stats()
    common.forward(llama, ids[:, :-1], cache)
    common.verify(llama, ids, draft, cache, stats=stats)
    assert stats.copies == [(3, 2)] and stats.accepted == [2]


def test_a_lookup_takes_no_longer_in_a_longer_text():
    """A dictionary that grows, no search: a round at 80,000 tokens costs what one at 400 does."""
    draft = common.Draft(torch.tensor([0, 1]), torch.tensor([-1, 0]), torch.zeros(2, 50_000))
    texts = {size: torch.arange(2, 2 + size // 2).repeat(4)[None] for size in (400, 80_000)}
    lookups = {size: common.Lookup(16) for size in texts}
    times = {size: [] for size in texts}
    for size, text in texts.items():
        lookups[size].merge(draft, text[:, :size], 16)
    for step in range(1, 401):  # in turns, so that both meet the same machine
        for size, text in texts.items():
            start = time.perf_counter()
            merged = lookups[size].merge(draft, text[:, : size + step], 16)
            times[size].append(time.perf_counter() - start)
            assert merged.copied == 16
    short, long = (sorted(each)[200] for each in times.values())
    assert long < 2 * short, (short, long)


def test_a_record_of_each_round(llama):
    """Stats.trace: off by default; the records hold what the counters say."""
    ids, stats = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]]), common.Stats(trace=[])
    decode(llama, ids, 30, stats=stats)
    assert [len(each["path"]) for each in stats.trace] == stats.accepted
    assert sum(len(each["draft"].tokens) for each in stats.trace) == stats.drafted
    whole = [token for each in stats.trace for token in each["committed"]]
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
    assert whole == truth
    assert common.Stats().trace is None
    for each in stats.trace:
        before = torch.tensor([[*ids[0].tolist(), *truth][: each["prefix"] + 1]])  # up to the root
        for way, p_target in zip(paths(each["draft"]), each["p_target"]):
            text = torch.cat([before, torch.tensor([way[:-1]], dtype=torch.long)], dim=1)
            expected = llama(text).logits[0, -1].float().softmax(-1)[way[-1]]
            assert p_target == pytest.approx(float(expected), abs=1e-5)
