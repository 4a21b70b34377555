"""The rivals without weights: beam search as a draft, and copies from the context alone."""

import pytest
import torch
from tiny import decoding_of

import common
import glide
from support.rivals import beam, lookup


@pytest.fixture(scope="module")
def drafter(llama):
    torch.manual_seed(5)
    config = glide.Config(intermediate_size=48, draft_vocab=20)
    return glide.build(config, llama, torch.arange(48)).double().eval()


def paths_of(draft):
    """Every node as the tokens on its way from the root."""
    paths = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token))
    return paths


def beams_by_hand(target, drafter, ids, depth, width):
    """{proposal: probability} of beam search (5.1), each scored by a drafter without memory."""
    beams = {(): 1.0}
    for _ in range(depth):
        grown = {}
        for path, probability in beams.items():
            whole = torch.cat([ids, torch.tensor([path], dtype=torch.long)], dim=1)
            steps = glide.propose(
                drafter, with_ids(target, ids, whole), glide.Memory(drafter, target)
            )
            _, q_draft, _ = next(steps)
            for token, q in enumerate(q_draft.tolist()):
                grown[(*path, token)] = probability * q
        best = sorted(grown, key=grown.get, reverse=True)[:width]
        beams = {path: grown[path] for path in best}
    return beams


def with_ids(target, cached, whole):
    """A decoding whose target has cached `cached`, and whose tokens are `whole`."""
    decoding = decoding_of(target, cached, max_new_tokens=9, do_sample=False)
    decoding.ids = whole
    return decoding


@pytest.mark.parametrize("depth, width", [(0, 4), (1, 4), (3, 1), (3, 4), (2, 25)])
@torch.no_grad()
def test_the_tree_is_that_of_the_best_proposals(llama, drafter, depth, width):
    ids = torch.tensor([[9, 8, 7]])
    options = {"do_sample": True, "suppress_tokens": list(range(28, 38))}
    decoding = decoding_of(llama, ids, max_new_tokens=9, **options)
    memory = glide.Memory(drafter, llama)
    draft = beam.propose(glide, drafter, decoding, memory, depth, width)
    beams = beams_by_hand(llama, drafter, ids, depth, width)
    expected = {path[:end] for path in beams for end in range(1, depth + 1)}
    paths = paths_of(draft)
    assert len(paths) == len(set(paths)) and set(paths) == expected, (
        f"input: width {width}, {depth} tokens; proposals left {sorted(beams)}\n"
        f"expected: nodes {sorted(expected)}\ngot: {sorted(paths)}"
    )
    q_of = dict(zip(paths, draft.q.tolist()))
    for path, probability in beams.items():  # q along a proposal multiplies to its score
        product = 1.0
        for end in range(1, depth + 1):
            product *= q_of[path[:end]]
        assert product == pytest.approx(probability, rel=1e-4)
    # Only a copy of the decoding ranks greedily and without processors.
    assert torch.equal(decoding.ids, ids) and decoding.do_sample and decoding.logits_processor


@pytest.mark.parametrize("config", [{}, {"width": 1}, {"gamma": 0}, beam.VARIANTS["width8"]])
def test_greedy_output_with_beams_is_the_targets(llama, drafter, config):
    ids = torch.tensor([[9, 8, 7]])
    options = {"base": glide, "base_drafter": drafter, "config": beam.Config(**config)}
    for more in ({}, {"repetition_penalty": 1.5}):
        truth = llama.generate(ids, max_new_tokens=30, do_sample=False, **more)
        stats = common.Stats()
        output = llama.generate(
            ids,
            custom_generate=beam.generate,
            max_new_tokens=30,
            do_sample=False,
            stats=stats,
            **options,
            **more,
        )
        assert torch.equal(output, truth) and stats.emitted == 30
    wide = config.get("width", 4) > 1 and config.get("gamma") != 0
    assert (stats.drafted > sum(stats.offered)) == wide  # more than one token a level


def test_proposals_leave_the_bonus_token_a_place(llama, drafter):
    decoding = decoding_of(llama, torch.tensor([[9, 8, 7]]), max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        draft = next(beam.drafts(decoding, glide, drafter, beam.Config(gamma=4)))
    assert max(len(path) for path in paths_of(draft)) == 2


def test_a_beam_of_no_width_is_a_mistake():
    with pytest.raises(common.Mistake, match="width 0: take at least 1"):
        beam.Config(width=0)


def test_copies_alone_give_the_targets_greedy_output_in_fewer_forwards(llama):
    """The greedy answer of a small model ends in a loop, which can be copied."""
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=200, do_sample=False)
    forwards = []
    for most in (0, 4, 16):
        stats = common.Stats()
        output = llama.generate(
            ids,
            custom_generate=lookup.generate,
            config=lookup.Config(most=most),
            max_new_tokens=200,
            do_sample=False,
            stats=stats,
        )
        assert torch.equal(output, truth) and stats.emitted == 200
        assert stats.copies == list(zip(stats.offered, stats.accepted))  # all drafts are copies
        forwards.append(stats.target_forwards)
    assert forwards[0] == 200 and forwards[1] > forwards[2], forwards


def test_the_lookup_drafts_what_followed_before(llama):
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3, 4]])
    decoding = decoding_of(llama, ids, max_new_tokens=5, do_sample=False)
    draft = next(lookup.drafts(decoding, lookup.Config(most=16)))
    assert draft.tokens.tolist() == [5, 6, 1, 2]  # a fifth would leave the bonus token no place
    assert draft.parents.tolist() == [-1, 0, 1, 2]
