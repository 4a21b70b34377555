"""cape.py: the expansion, its mask, lossless decoding on top of GLIDE, the refitted table."""

import collections

import pytest
import torch
from conftest import chi_square_p_value, enumerate_joint, make_llama

import cape
import common
import glide
from support import fitting

KINDS = [{}, {"expansion": "fixed"}, {"expansion": "none"}, {"expansion": "beam", "width": 4}]


def make_drafter(target, **options):
    config = glide.Config(
        target=common.target_shape(target), intermediate_size=48, draft_vocab=0, **options
    )
    torch.manual_seed(5)
    return glide.build(config, target, torch.arange(target.config.vocab_size)).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    output = target.generate(
        ids, custom_generate=cape.generate, base=glide, base_drafter=drafter, **options
    )
    return output, options["stats"]


def steps_of(probs):
    """Draft steps with the given distributions, each drafting its argmax."""
    probs = torch.tensor(probs)
    return [(q.argmax(keepdim=True), q, None) for q in probs]


def test_set_size_is_the_papers_table():
    sizes, bounds = cape.Config().sizes, cape.Config().bounds
    got = [cape.set_size(p, sizes, bounds) for p in (0.01, 0.3, 0.31, 0.6, 0.61, 0.8, 0.81, 1.0)]
    assert got == [7, 7, 5, 5, 3, 3, 1, 1]


def test_expansion_takes_the_next_best_tokens_in_the_papers_order():
    steps = steps_of(
        [[0.1, 0.5, 0.3, 0.1, 0.0], [0.05, 0.05, 0.2, 0.6, 0.1], [0.9, 0.04, 0.03, 0.02, 0.01]]
    )
    draft = cape.expand(steps, [2, 1, 0], 32, torch.tensor([[0]]), False)
    assert draft.tokens.tolist() == [1, 3, 0, 2, 0, 2] or draft.tokens.tolist() == [
        1,
        3,
        0,
        2,
        3,
        2,
    ]
    assert draft.parents.tolist() == [-1, 0, 1, -1, -1, 0] and draft.probs is None
    sampled = cape.expand(steps, [2, 1, 0], 32, torch.tensor([[0]]), True)
    assert (
        sampled.probs[:3].sum(-1).tolist() == pytest.approx([1, 1, 1])
        and not sampled.probs[3:].any()
    )


def test_a_token_of_probability_zero_is_no_extra():
    draft = cape.expand(steps_of([[0.0, 1.0, 0.0]]), [2], 32, torch.tensor([[0]]), False)
    assert draft.tokens.tolist() == [1]


def test_the_mask_is_the_papers_formula():
    """Mask_CAPE(i, j): j is in the trajectory and before i's position, or i = j; and everything
    sees the root."""
    generator = torch.Generator().manual_seed(0)
    for gamma in (1, 3, 5):
        steps = steps_of(torch.rand(gamma, 20, generator=generator).softmax(-1).tolist())
        counts = torch.randint(0, 6, (gamma,), generator=generator).tolist()
        draft = cape.expand(steps, counts, 32, torch.tensor([[0]]), False)
        position = [
            *range(1, gamma + 1),
            *(step + 1 for step, count in enumerate(counts) for _ in range(count)),
        ]
        mask = common.ancestor_mask(draft.parents, 0, torch.float32)[0, 0] == 0
        assert len(draft.tokens) == len(position) and mask[:, 0].all()
        for i in range(1, len(position) + 1):
            for j in range(1, len(position) + 1):
                assert bool(mask[i, j]) == ((j <= gamma and position[i - 1] > j) or i == j)


@pytest.mark.parametrize("limit", [3, 5, 9, 32])
def test_the_limit_drops_the_least_likely_extras(limit):
    generator = torch.Generator().manual_seed(1)
    steps = steps_of((3 * torch.rand(5, 30, generator=generator)).softmax(-1).tolist())
    whole = cape.expand(steps, [7] * 5, 1000, torch.tensor([[0]]), False)
    cut = cape.expand(steps, [7] * 5, limit, torch.tensor([[0]]), False)
    assert len(cut.tokens) == max(5, limit) and cut.tokens[:5].tolist() == whole.tokens[:5].tolist()
    chain = torch.tensor([float(q.max()) for _, q, _ in steps])

    def worth(draft):
        levels = (draft.parents[5:] + 1).tolist()
        return [
            float(chain[:level].prod() * steps[level][1][token])
            for level, token in zip(levels, draft.tokens[5:].tolist())
        ]

    assert sorted(worth(cut)) == pytest.approx(
        sorted(sorted(worth(whole), reverse=True)[: len(cut.tokens) - 5])
    )


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("length", [1, 6])
def test_greedy_output_is_the_targets(llama, options, length):
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for gamma in (0, 1, 5):
        for drafter in (
            make_drafter(llama),
            make_drafter(llama, num_layers=2, cross_attention=False),
        ):
            output, stats = decode(llama, drafter, ids, gamma=gamma, **options)
            assert torch.equal(output, truth) and stats.emitted == 40
    penalised = llama.generate(ids, max_new_tokens=40, do_sample=False, repetition_penalty=1.5)
    assert torch.equal(
        decode(llama, make_drafter(llama), ids, repetition_penalty=1.5, **options)[0], penalised
    )


def test_extras_are_accepted_and_then_consumed(llama, monkeypatch):
    """An accepted leaf counts, and drafting goes on as if the drafter had proposed it."""
    drafts, real = [], common.verify

    def spy(target, ids, draft, cache, *more):
        verified = real(target, ids, draft, cache, *more)
        drafts.append((ids, draft, verified))
        return verified

    monkeypatch.setattr(common, "verify", spy)
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    _, expanded = decode(
        llama, drafter, ids, max_new_tokens=120, sizes=[40, 40, 40, 40], max_tokens=500
    )
    assert any(verified.path and verified.path[-1] >= 5 for _, _, verified in drafts)
    for ids, draft, _ in drafts:  # what a drafter without memory would have proposed
        cache = common.GrowingCache(3)
        common.forward(llama, ids[:, :-1], cache)
        steps = glide.propose(drafter, llama, ids, cache, glide.new_memory(drafter, llama))
        depth = int((draft.parents == torch.arange(len(draft.parents)) - 1).int().cumprod(0).sum())
        assert [int(next(steps)[0]) for _ in range(depth)] == draft.tokens[:depth].tolist()
    _, chain = decode(
        llama, drafter, torch.tensor([[9, 8, 7]]), max_new_tokens=120, expansion="none"
    )
    assert expanded.target_forwards < chain.target_forwards


def test_beam_is_the_best_continuations(llama):
    """Every level of the tree holds the `width` most probable prefixes among all that extend the
    level before."""
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    cache = common.GrowingCache(3)
    common.forward(llama, ids[:, :-1], cache)
    draft = cape.beam(glide, drafter, llama, ids, cache, glide.new_memory(drafter, llama), 3, 4)
    beams = [(1.0, [])]
    expected = []
    for _ in range(3):
        grown = []
        for p, path in beams:
            whole = torch.cat([ids, torch.tensor([path], dtype=torch.long)], dim=1)
            q = next(glide.propose(drafter, llama, whole, cache, glide.new_memory(drafter, llama)))[
                1
            ]
            grown += [(p * float(q[t]), [*path, t]) for t in range(48)]
        beams = sorted(grown, reverse=True)[:4]
        expected.append(sorted(path for _, path in beams))
    paths = []
    for node, parent in enumerate(draft.parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), int(draft.tokens[node])])
    assert [sorted(p for p in paths if len(p) == depth) for depth in (1, 2, 3)] == expected


@pytest.mark.parametrize("options", KINDS)
def test_sampled_output_follows_the_target(small_llama, options):
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    counts = collections.Counter()
    torch.manual_seed(0)
    options = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 3,
        "gamma": 2,
        "sizes": [3, 2, 2, 1],
    } | options
    for _ in range(500):
        counts[tuple(decode(small_llama, drafter, prompt, **options)[0][0, 2:].tolist())] += 1
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) > 0.001


def test_negative_control_accepting_every_extra_is_noticed(small_llama, monkeypatch):
    """Leaves that claim to be drawn from next to nothing are always accepted; that must show."""
    real = cape.expand

    def wrong(steps, counts, limit, ids, do_sample):
        draft = real(steps, counts, limit, ids, do_sample)
        if steps:
            draft.probs[len(steps) :] = 1e-9
        return draft

    monkeypatch.setattr(cape, "expand", wrong)
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    counts = collections.Counter()
    torch.manual_seed(0)
    for _ in range(500):
        output, _ = decode(
            small_llama,
            drafter,
            prompt,
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            gamma=2,
            sizes=[3, 2, 2, 1],
        )
        counts[tuple(output[0, 2:].tolist())] += 1
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) < 1e-4


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
    for options in KINDS:
        assert decode(
            target, make_drafter(target).bfloat16(), torch.tensor([[4, 5, 6]]), **options
        )[0].shape == (1, 43)
