"""cape.py: the expansion, its mask, trees by confidence, beams; lossless on GLIDE; the refit."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_glide import (  # noqa: F401  bigram is a fixture
    REPEATING,
    bigram,
    make_bigram_drafter,
    make_drafter,
    spy_on_drafts,
)
from tiny import chi_square_p_value, make_llama

import cape
import common
import glide
from support import fitting

KINDS = {
    "cape": {},
    "fixed": {"expansion": "fixed"},
    "none": {"expansion": "none"},
    "beam": {"expansion": "beam", "width": 3},
    "confidence": {"expansion": "confidence", "least_worth": 0.1},
    "copies": {"copies": 6},
    "both": {"expansion": "confidence", "least_worth": 0.02, "copies": 6},
}
ROOT = torch.tensor([[0]])


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 24, "stats": common.Stats()} | options
    options |= {"base": glide, "base_drafter": drafter}
    return target.generate(ids, custom_generate=cape.generate, **options), options["stats"]


def steps_of(probs):
    """Draft steps with the given distributions, each drafting its argmax."""
    probs = torch.tensor(probs)
    return [(q_draft.argmax(keepdim=True), q_draft, None) for q_draft in probs]


def random_steps(gamma, vocab, seed, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.rand(gamma, vocab, generator=generator)
    return steps_of(scores.softmax(-1).tolist())


def extras_of(steps, draft):
    """{(step, token): worth} of the extras of a draft, from the definition."""
    worth = {}
    for parent, token in zip(draft.parents[len(steps) :].tolist(), draft.tokens[len(steps) :]):
        before = [float(q_draft[drafted]) for drafted, q_draft, _ in steps[: parent + 1]]
        own = float(steps[parent + 1][1][token])
        worth[parent + 1, int(token)] = float(torch.tensor([1.0, *before, own]).prod())
    return worth


# ---------------------------------------------------------------------------------------- expansion


def test_set_size_is_the_papers_table():
    sizes, bounds = cape.Config().sizes, cape.Config().bounds
    got = [cape.set_size(p, sizes, bounds) for p in (0.01, 0.3, 0.31, 0.6, 0.61, 0.8, 0.81, 1.0)]
    assert got == [7, 7, 5, 5, 3, 3, 1, 1]


def test_how_many_extras_each_expansion_wants():
    wanted = {
        "cape": [7, 1],
        "none": [0, 0],
        "fixed": [4, 4],
        "confidence": [32, 32],
    }
    for expansion, counts in wanted.items():
        assert cape.extras_wanted(cape.Config(expansion=expansion), [0.2, 0.9]) == counts


def test_the_example_of_expand():
    """The one in its docstring, and what else it takes: the next best, in the order of the sets."""
    steps = steps_of([[0.1, 0.6, 0.25, 0.05], [0.5, 0.3, 0.15, 0.05]])
    for counts, limit, least, tokens, parents in (
        ([2, 1], 4, 0.0, [1, 0, 2, 1], [-1, 0, -1, 0]),
        ([2, 1], 32, 0.0, [1, 0, 2, 0, 1], [-1, 0, -1, -1, 0]),
        ([3, 0], 32, 0.0, [1, 0, 2, 0, 3], [-1, 0, -1, -1, -1]),
        ([3, 3], 32, 0.12, [1, 0, 2, 1], [-1, 0, -1, 0]),  # .25 and .18 are worth more
        ([3, 3], 32, 0.2, [1, 0, 2], [-1, 0, -1]),
        ([0, 0], 32, 0.0, [1, 0], [-1, 0]),
        ([3, 3], 1, 0.0, [1, 0], [-1, 0]),  # the trajectory stays whatever the limit
    ):
        draft = cape.expand(steps, counts, limit, ROOT, False, least)
        got = None if draft is None else (draft.tokens.tolist(), draft.parents.tolist())
        assert got == (tokens, parents), (
            f"input: q_draft {[q_draft.tolist() for _, q_draft, _ in steps]}, counts {counts}, "
            f"max_tokens {limit}, least_worth {least}\nexpected: tokens {tokens}, parents {parents}"
            f"\ngot: {got}"
        )
        assert draft.probs is None
    sampled = cape.expand(steps, [2, 1], 32, ROOT, True)
    assert torch.equal(sampled.probs, torch.stack([step[1] for step in steps]))  # none for extras
    assert len(sampled.tokens) == 5


def test_a_token_of_probability_zero_is_no_extra():
    draft = cape.expand(steps_of([[0.0, 1.0, 0.0]]), [2], 32, ROOT, False)
    assert draft.tokens.tolist() == [1]


def test_the_mask_is_the_papers_formula():
    """Mask_CAPE(i, j): j is drafted and before i, or i = j; and everything sees the root."""
    generator = torch.Generator().manual_seed(0)
    for gamma in (1, 3, 5):
        steps = random_steps(gamma, 20, seed=gamma)
        counts = torch.randint(0, 6, (gamma,), generator=generator).tolist()
        position = list(range(1, gamma + 1))
        for step, count in enumerate(counts):
            position += [step + 1] * count
        expected = torch.ones(len(position) + 1, len(position) + 1, dtype=torch.bool)
        expected[0, 1:] = False
        for i in range(1, len(position) + 1):
            for j in range(1, len(position) + 1):
                expected[i, j] = (j <= gamma and position[i - 1] > j) or i == j
        draft = cape.expand(steps, counts, 32, ROOT, False)
        got = None
        if draft is not None:
            got = common.ancestor_mask(draft.parents, 0, torch.float32)[0, 0] == 0
        assert got is not None and torch.equal(got, expected), (
            f"input: a trajectory of {gamma}, and {counts} extras for its steps\n"
            f"expected: this mask of the root, the trajectory, the extras\n{expected.int()}\n"
            f"got: {got if got is None else got.int()}"
        )


@pytest.mark.parametrize("limit", [3, 5, 9, 32])
def test_the_limit_drops_the_least_likely_extras(limit):
    steps = random_steps(5, 30, seed=1, sharpness=3)
    whole = cape.expand(steps, [7] * 5, 1000, ROOT, False)
    cut = cape.expand(steps, [7] * 5, limit, ROOT, False)
    assert len(cut.tokens) == max(5, limit) and cut.tokens[:5].tolist() == whole.tokens[:5].tolist()
    all_extras, kept = extras_of(steps, whole), extras_of(steps, cut)
    expected = sorted(all_extras, key=all_extras.get, reverse=True)[: len(kept)]
    assert sorted(kept) == sorted(expected), (
        f"input: {all_extras} by (step, token), {limit} nodes at most, 5 of them the trajectory\n"
        f"expected: {sorted(expected)}\ngot: {sorted(kept)}"
    )


# ------------------------------------------------------------------------------ trees by confidence


@pytest.mark.parametrize("least_worth", [0.0, 0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_tree_by_confidence_holds_what_is_worth_it(seed, least_worth):
    """Of all nodes of five steps, those that are worth more than asked, and none else."""
    steps = random_steps(5, 12, seed, sharpness=5)
    expected, reached = {}, 1.0
    for step, (drafted, q_draft, _) in enumerate(steps):
        for token, probability in enumerate(q_draft.tolist()):
            if reached * probability > least_worth:
                expected[step, token] = reached * probability
        reached *= float(q_draft[drafted])
    taken = list(cape.worthwhile(iter(steps), least_worth))
    draft = cape.expand(taken, [1000] * len(taken), 1000, ROOT, False, least_worth)
    got = [(step, int(token)) for step, (token, _, _) in enumerate(taken)]
    got += extras_of(taken, draft)
    assert sorted(got) == sorted(expected), (
        f"input: worth by (step, token) {expected}, least_worth {least_worth}\n"
        f"expected: {sorted(expected)}\ngot: {sorted(got)}"
    )


def test_no_pass_of_the_drafter_for_what_cannot_pay():
    """Where the trajectory is not reached, the drafter is not asked; a drawn token itself stays."""
    asked = []

    def proposer():
        for token in (1, 2, 1):
            asked.append(token)
            yield torch.tensor([token]), torch.tensor([0.1, 0.7, 0.2]), None

    kept = [int(token) for token, _, _ in cape.worthwhile(proposer(), 0.15)]
    assert (kept, asked) == ([1, 2], [1, 2]), (
        "input: steps of probabilities .1 .7 .2 that draw 1, 2, 1; least_worth .15\n"
        "expected: 1 (worth .7) and 2 (best of its step .49, itself .14) stay, and no third step\n"
        f"got: {kept} of {asked} asked for"
    )


@pytest.mark.parametrize("least_worth, drafted", [(0.0, True), (1.0, False)])
def test_a_round_may_draft_nothing(llama, least_worth, drafted):
    ids = torch.tensor([[9, 8, 7]])
    options = {"expansion": "confidence", "least_worth": least_worth}
    output, stats = decode(llama, make_drafter(llama), ids, **options)
    assert torch.equal(output, llama.generate(ids, max_new_tokens=24, do_sample=False))
    assert (stats.drafted > 0) == drafted


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets(llama, kind):
    for length, gamma in ((1, 5), (6, 1), (6, 0)):
        ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
        drafter = make_drafter(llama, cross_attention=length > 1, num_layers=2 - gamma % 2)
        truth = llama.generate(ids, max_new_tokens=24, do_sample=False)
        output, stats = decode(llama, drafter, ids, gamma=gamma, **KINDS[kind])
        assert torch.equal(output, truth) and stats.emitted == 24
    penalised = llama.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.5)
    options = {"max_new_tokens": 12, "repetition_penalty": 1.5} | KINDS[kind]
    assert torch.equal(decode(llama, drafter, ids, **options)[0], penalised)


@pytest.mark.parametrize("kind", ["copies", "both"])
def test_copies_save_forwards(bigram, kind):  # noqa: F811
    options = {"base": glide, "base_drafter": make_bigram_drafter(bigram.target)} | KINDS[kind]
    stats = {copies: common.Stats() for copies in (0, 6)}
    for copies in stats:
        more = {"copies": copies, "stats": stats[copies]}
        answer = bigram.answer(cape.generate, REPEATING, 60, **options | more)
        assert answer == bigram.greedy(60)
    assert sum(accepted for _, accepted in stats[6].copies) > 0
    assert stats[6].target_forwards < stats[0].target_forwards


def test_the_limit_is_for_capes_own_nodes(bigram, monkeypatch):  # noqa: F811
    """Copies come on top of `max_tokens`."""
    rounds = spy_on_drafts(monkeypatch)
    drafter = make_bigram_drafter(bigram.target)
    options = {"base": glide, "base_drafter": drafter, "max_tokens": 7, "copies": 6}
    bigram.answer(cape.generate, REPEATING, 30, **options)
    own = [len(draft.tokens) - draft.copied for _, draft in rounds]
    assert max(own) == 7 and max(len(draft.tokens) for _, draft in rounds) > 7


def test_the_papers_sizes_are_not_cut_by_least_worth(llama):
    """However unlikely the extras are."""
    options = {"gamma": 2, "sizes": [4] * 4, "least_worth": 0.9, "max_new_tokens": 12}
    _, stats = decode(llama, make_drafter(llama), torch.tensor([[9, 8, 7]]), **options)
    assert stats.drafted == 5 * sum(stats.offered)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bonus_token_has_room(llama, monkeypatch, kind):
    """No draft is so deep that its bonus token would come after the last place."""
    rounds = spy_on_drafts(monkeypatch)
    decode(llama, make_drafter(llama), REPEATING, max_new_tokens=9, gamma=4, **KINDS[kind])
    for ids, draft in rounds:
        depth = int((common.ancestor_mask(draft.parents, 0, torch.float32) == 0).sum(-1).max()) - 1
        assert ids.shape[1] + depth + 1 <= 16, (
            f"input: {ids.shape[1]} of at most 16 tokens\nexpected: depth {15 - ids.shape[1]} or "
            f"less\ngot: a draft of depth {depth}"
        )


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_is_noted_of_a_round(llama, do_sample):
    """Confidence and size of the set for each step, probability of each node."""
    stats = common.Stats(trace=[])
    decode(llama, make_drafter(llama), REPEATING, stats=stats, do_sample=do_sample)
    for record in stats.trace:
        confidences, counts = record["confidences"], record["counts"]
        sizes, bounds = cape.Config().sizes, cape.Config().bounds
        assert counts == [cape.set_size(p, sizes, bounds) for p in confidences]
        assert len(counts) == 0 or 0 < min(confidences) <= max(confidences) <= 1
        assert len(counts) <= len(record["draft"].tokens) <= 32
        if do_sample and counts:  # whatever was drawn, the confidence is the likeliest token's
            largest = record["draft"].probs[: len(counts)].max(-1).values
            assert confidences == pytest.approx(largest.tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_may_not_be_said_is_not_drafted(llama, monkeypatch, do_sample):
    """The trajectory comes from the processed distribution, and so do the extras."""
    rounds = spy_on_drafts(monkeypatch)
    options = {"do_sample": do_sample, "suppress_tokens": list(range(24))}
    decode(llama, make_drafter(llama), torch.tensor([[29, 28, 27]]), **options)
    drafted = torch.cat([draft.tokens for _, draft in rounds])
    assert len(drafted) > 9 and drafted.min() >= 24


def test_the_probability_of_every_node_is_noted():
    """The tree of expand's example; a Stats without a trace is told nothing."""
    steps = steps_of([[0.1, 0.6, 0.25, 0.05], [0.5, 0.3, 0.15, 0.05]])
    stats = common.Stats(trace=[])
    cape.expand(steps, [2, 1], 32, ROOT, False, 0.0, stats)
    assert stats.noted["q_nodes"] == pytest.approx([0.6, 0.5, 0.25, 0.1, 0.3])
    untraced = common.Stats()
    cape.expand(steps, [2, 1], 32, ROOT, False, 0.0, untraced)
    assert not untraced.noted


def test_extras_are_accepted_and_then_consumed(llama, monkeypatch):
    """An accepted leaf counts, and drafting goes on as if the drafter had proposed it."""
    rounds = spy_on_drafts(monkeypatch)
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    options = {"max_new_tokens": 60, "sizes": [40, 40, 40, 40], "max_tokens": 500}
    _, expanded = decode(llama, drafter, ids, **options)
    for ids, draft in rounds:  # what a drafter without memory would have proposed
        cache = common.GrowingCache(3)
        common.forward(llama, ids[:, :-1], cache)
        steps = glide.propose(drafter, llama, ids, cache, glide.new_memory(drafter, llama))
        in_line = draft.parents == torch.arange(len(draft.parents)) - 1
        depth = int(in_line.int().cumprod(0).sum())
        assert [int(next(steps)[0]) for _ in range(depth)] == draft.tokens[:depth].tolist()
    _, chain = decode(llama, drafter, ids[:, :3], max_new_tokens=60, expansion="none")
    assert expanded.target_forwards < chain.target_forwards


def test_what_reads_the_prompt_is_timed_as_prefill(llama):
    """A prompt of one token is read by the drafter only, in the first of two rounds or more."""
    drafter, prompt = make_drafter(llama), torch.tensor([[9]])
    for tokens, timers in ((1, {"prefill", "verify"}), (12, {"prefill", "draft", "verify"})):
        _, stats = decode(llama, drafter, prompt, max_new_tokens=tokens)
        assert set(stats.seconds) == timers


# -------------------------------------------------------------------------------------------- beams


@pytest.mark.parametrize("gamma, width", [(1, 4), (3, 1), (3, 4), (2, 60)])
def test_beam_is_the_tree_of_the_best_proposals(bigram, gamma, width):  # noqa: F811
    """Section 5.1 by brute force: what is kept at the end, all of length gamma, as one tree."""
    drafter, target = make_bigram_drafter(bigram.target), bigram.target
    cache, memory = common.GrowingCache(1), glide.new_memory(drafter, target)
    draft = cape.beam(glide, drafter, target, ROOT, cache, memory, gamma, width)
    embeds = target.get_input_embeddings().weight
    logits = 4 * F.linear(embeds, target.get_output_embeddings().weight)  # (V, V)
    log_q = logits.log_softmax(-1)
    beams = {(): 0.0}
    for _ in range(gamma):
        grown = {}
        for path, token in itertools.product(beams, range(bigram.VOCAB)):
            newest = path[-1] if path else int(ROOT)
            grown[(*path, token)] = beams[path] + float(log_q[newest, token])
        best = sorted(grown, key=grown.get, reverse=True)[:width]
        beams = {path: grown[path] for path in best}
    expected = {path[:depth] for path in beams for depth in range(1, gamma + 1)}
    got = []
    for node, parent in enumerate(draft.parents.tolist()):
        above = got[parent] if parent >= 0 else ()
        got.append((*above, int(draft.tokens[node])))
    assert len(got) == len(set(got)) and set(got) == expected, (
        f"input: width {width}, {gamma} tokens; proposals left {sorted(beams)}\n"
        f"expected: nodes {sorted(expected)}\ngot: {sorted(got)}"
    )


def test_beam_of_a_drafter_with_memory(llama):
    """The drafter's cache goes from beam to beam: each is as if it were drafted alone."""
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    cache = common.GrowingCache(3)
    common.forward(llama, ids[:, :-1], cache)
    draft = cape.beam(glide, drafter, llama, ids, cache, glide.new_memory(drafter, llama), 3, 4)
    beams = [(1.0, [])]
    for _ in range(3):
        grown = []
        for p, path in beams:
            whole = torch.cat([ids, torch.tensor([path], dtype=torch.long)], dim=1)
            memory = glide.new_memory(drafter, llama)
            _, q_draft, _ = next(glide.propose(drafter, llama, whole, cache, memory))
            grown += [(p * q, [*path, token]) for token, q in enumerate(q_draft.tolist())]
        beams = sorted(grown, reverse=True)[:4]
    paths = []
    for node, parent in enumerate(draft.parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), int(draft.tokens[node])])
    assert sorted(p for p in paths if len(p) == 3) == sorted(path for _, path in beams)


# ----------------------------------------------------------------------------------------- sampling


def sample(bigram, kind, draws=400, **more):  # noqa: F811
    options = {"base": glide, "base_drafter": make_bigram_drafter(bigram.target), "gamma": 2}
    options |= {"sizes": [3, 2, 2, 1]} | KINDS[kind] | more
    counts = bigram.sample(cape.generate, REPEATING, 3, draws, **options)
    return chi_square_p_value(counts, bigram.joint(REPEATING, 3))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind not in ("cape", "both") else ())
        for kind in KINDS
    ],
)
def test_sampled_output_follows_the_target(bigram, kind):  # noqa: F811
    assert sample(bigram, kind) > 0.001


@pytest.mark.slow
def test_negative_control_accepting_every_extra_is_noticed(bigram, monkeypatch):  # noqa: F811
    """Leaves that claim to be drawn from next to nothing are always accepted; that must show."""
    real = cape.expand

    def wrong(steps, *more):
        draft = real(steps, *more)
        if steps:
            extras = len(draft.tokens) - len(steps)
            claimed = draft.probs.new_full((extras, draft.probs.shape[1]), 1e-9)
            draft.probs = torch.cat([draft.probs, claimed])
        return draft

    monkeypatch.setattr(cape, "expand", wrong)
    assert sample(bigram, "cape") < 1e-4


@pytest.mark.slow
def test_negative_control_a_cut_by_the_drawn_token_is_noticed(bigram, monkeypatch):  # noqa: F811
    """A trajectory without the tokens that are unlikely themselves: its draws are no draws."""

    def wrong(steps, least_worth):
        for token, q_draft, hidden in steps:
            if float(q_draft[token]) <= least_worth:
                return
            yield token, q_draft, hidden

    options = {"least_worth": 0.2, "draws": 700}
    assert sample(bigram, "confidence", **options) > 0.001
    monkeypatch.setattr(cape, "worthwhile", wrong)
    assert sample(bigram, "confidence", **options) < 1e-4


# ----------------------------------------------------------------------------------------- the rest


def test_bad_tables_are_refused(llama):
    drafter, ids = make_drafter(llama), torch.tensor([[1, 2]])
    for options, said in (
        ({"expansion": "more"}, "unknown expansion"),
        ({"sizes": [1, 2]}, "one entry more"),
        ({"bounds": [0.6, 0.3, 0.8]}, "must ascend"),
    ):
        with pytest.raises(ValueError, match=said):
            decode(llama, drafter, ids, **options)


def test_rank_acceptance_counts():
    table = fitting.rank_acceptance(
        torch.tensor([0.1, 0.3, 0.5, 0.9, 0.9]), torch.tensor([0, 2, 1, 0, 11]), [0.3, 0.6], 4
    )
    assert table.tolist() == [[0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.5, 0, 0, 0]]


def test_refit_follows_acceptance_and_cost():
    acceptance = torch.tensor([[0.3, 0.2, 0.1, 0.05], [0.9, 0.02, 0.01, 0.0]])
    frequency = torch.tensor([0.5, 0.5])
    free, dear = [10.0] * 34, [10.0 + 5 * n for n in range(34)]
    assert fitting.refit_sizes(acceptance, frequency, dear, 5.0, 5) == [0, 0]
    generous = fitting.refit_sizes(acceptance, frequency, free, 5.0, 3)
    assert generous[0] == 3 and generous[0] >= generous[1]
    slight = fitting.refit_sizes(acceptance, frequency, [10 + 0.3 * n for n in range(34)], 5.0, 3)
    assert sum(slight) <= sum(generous) and slight[0] > slight[1]


def test_half_precision_runs():
    target = make_llama().bfloat16()
    drafter = make_drafter(target).bfloat16()
    for options in KINDS.values():
        output, _ = decode(target, drafter, torch.tensor([[4, 5, 6]]), **options)
        assert output.shape == (1, 27)
