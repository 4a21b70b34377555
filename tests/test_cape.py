"""cape.py: set sizes, the expanded proposal and its mask; lossless with extras accepted."""

import itertools

import pytest
import torch
from tiny import make_glide, sampled_p_value

import cape
import common
import glide

ROOT = torch.tensor([[0]])


def decode(target, drafter, ids, config, **options):
    options = {"do_sample": False, "max_new_tokens": 24} | options
    options |= {"base": glide, "base_drafter": drafter, "config": config}
    return target.generate(ids, custom_generate=cape.generate, **options)


def trajectory_of(q_drafts):
    """A chain of the most probable tokens of these distributions."""
    steps = []
    for q_draft in torch.tensor(q_drafts):
        steps.append((q_draft.argmax(keepdim=True), q_draft, None))
    return common.chain(steps, ROOT)


def random_trajectory(gamma, vocab, seed):
    scores = torch.rand(gamma, vocab, generator=torch.Generator().manual_seed(seed))
    return trajectory_of((4 * scores).softmax(-1).tolist())


# ----------------------------------------------------------------------------------- expansion


def test_the_set_size_at_the_borders_of_the_papers_ranges():
    config = cape.Config()
    sizes = {0.01: 7, 0.3: 7, 0.31: 5, 0.6: 5, 0.61: 3, 0.8: 3, 0.81: 1, 1.0: 1}
    got = {p: cape.set_size(p, config.sizes, config.bounds) for p in sizes}
    assert got == sizes
    most = config.gamma * (1 + max(config.sizes))
    assert most == 32  # the limit of 5.3


@pytest.mark.parametrize(
    "settings, tokens, parents, q",
    [
        # the example of expand
        (([2, 1], [0.55]), [1, 0, 2, 3, 1], [-1, 0, -1, -1, 0], [0.5, 0.6, 0.25, 0.15, 0.3]),
        (([0, 3], [0.55]), [1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [0.5, 0.6, 0.3, 0.06, 0.04]),
        # a confidence of .5 belongs to the range that ends there
        (([1, 0], [0.5]), [1, 0, 2], [-1, 0, -1], [0.5, 0.6, 0.25]),
        (([1], []), [1, 0, 2, 1], [-1, 0, -1, 0], [0.5, 0.6, 0.25, 0.3]),
        (([0], []), [1, 0], [-1, 0], [0.5, 0.6]),
    ],
)
def test_an_expanded_proposal_worked_by_hand(settings, tokens, parents, q):
    q_drafts = [[0.1, 0.5, 0.25, 0.15], [0.6, 0.3, 0.06, 0.04]]
    sizes, bounds = settings
    draft = cape.expand(trajectory_of(q_drafts), cape.Config(sizes=sizes, bounds=bounds))
    got = None if draft is None else (draft.tokens.tolist(), draft.parents.tolist())
    assert got == (tokens, parents), (
        f"input: q_draft {q_drafts}, sizes {sizes}, bounds {bounds}\n"
        f"expected: tokens {tokens}, parents {parents}\ngot: {got}"
    )
    assert draft.q.tolist() == pytest.approx(q), f"expected q {q}, got {draft.q.tolist()}"
    same = draft.probs is not None and torch.equal(draft.probs, torch.tensor(q_drafts))
    assert same, "probs are to stay the trajectory's: a row for each drawn node, no more"


def test_a_set_leaves_out_the_drawn_token_and_not_the_likeliest():
    q_draft = torch.tensor([0.1, 0.5, 0.25, 0.15])
    drawn = common.chain([(torch.tensor([2]), q_draft, None)], ROOT)
    draft = cape.expand(drawn, cape.Config(sizes=[0, 2, 0], bounds=[0.4, 0.5]))
    assert draft.q.tolist() == pytest.approx([0.25, 0.5, 0.15]), "q of the tokens 2 1 3"
    got = draft.tokens.tolist()
    assert got == [2, 1, 3], f"2 was drawn of .1 .5 .25 .15, S(.5) = 2: expected 2 1 3, got {got}"
    told = "expected the confidence 0.5, of the largest, and the count 2"
    assert draft.notes == {"confidences": [0.5], "counts": [2]}, f"{told}, got {draft.notes}"


def test_a_set_is_no_larger_than_what_can_be_drafted():
    fixed = cape.Config(sizes=[4], bounds=[])
    draft = cape.expand(trajectory_of([[0.0, 0.7, 0.3]]), fixed)
    assert draft.notes["counts"] == [4], "a count is S(p), not how many extras were left"
    got = draft.tokens.tolist()
    assert got == [1, 2], f"1 was drawn of 0 .7 .3, four extras: expected tokens 1 2, got {got}"
    nothing = common.chain([], ROOT)
    got = cape.expand(nothing, fixed)
    assert got is nothing, f"expected an empty trajectory as it was given, got {got}"


# ---------------------------------------------------------------------------------------- mask


@pytest.mark.parametrize(
    "counts", [[], [0], [3], [2, 1, 1], [0, 4, 0], [5, 0, 2, 1, 3]], ids=lambda counts: str(counts)
)
def test_the_mask_is_the_papers_formula_and_the_ancestor_mask_of_the_tree(counts):
    """Mask_CAPE(i, j): j <= gamma and pos(i) > j, or i = j. The root is seen by all."""
    gamma = len(counts)
    pos = {i: i for i in range(1, gamma + 1)}  # of the trajectory, then of the sets
    for step, count in enumerate(counts, 1):
        for _ in range(count):
            pos[len(pos) + 1] = step
    beta = len(pos)
    expected = torch.zeros(beta, beta, dtype=torch.bool)
    for i, j in itertools.product(range(1, beta + 1), repeat=2):
        expected[i - 1, j - 1] = (j <= gamma and pos[i] > j) or i == j
    got = cape.cape_mask(counts)
    assert got is not None and torch.equal(got, expected), (
        f"input: a trajectory of {gamma}, sets of {counts}\nexpected:\n{expected.int()}\n"
        f"got:\n{got if got is None else got.int()}"
    )

    # Confidences .1, .2, ... give each step the size that its set has here.
    q_drafts = [[0.1 * (n + 1)] + [(0.9 - 0.1 * n) / 15] * 15 for n in range(gamma)]
    bounds = [0.1 * n + 0.15 for n in range(gamma - 1)]
    if gamma:
        draft = cape.expand(trajectory_of(q_drafts), cape.Config(sizes=counts, bounds=bounds))
        tree = common.ancestor_mask(draft.parents, 0, torch.float32)[0, 0] == 0
        told = f"counts {counts}: the tree of the parents {draft.parents.tolist()} has another mask"
        assert torch.equal(tree[1:, 1:], expected), told
        assert tree[:, 0].all() and not tree[0, 1:].any()


# ------------------------------------------------------------------------------------ decoding


WIDE = {"sizes": [40], "bounds": []}  # nearly every token beside each of the trajectory's


@pytest.mark.parametrize("options", [{"gamma": 1}, {"gamma": 0}, WIDE])
def test_greedy_output_is_the_targets(llama, options):
    """Its VARIANTS are in test_lossless.py."""
    ids = torch.randint(1, 48, (1, 6), generator=torch.Generator().manual_seed(6))
    drafter = make_glide(llama)
    for more in ({}, {"repetition_penalty": 1.5}, {"suppress_tokens": list(range(24))}):
        truth = llama.generate(ids, max_new_tokens=24, do_sample=False, **more)
        assert torch.equal(decode(llama, drafter, ids, cape.Config(**options), **more), truth)


@torch.no_grad()
def test_an_accepted_extra_keeps_its_row_and_drafting_goes_on_from_it(llama):
    """Its key and value are those of a plain forward over the text."""
    drafter = make_glide(llama)
    extras_accepted = 0
    decoding = common.open_decoding(
        llama, torch.tensor([[9, 8, 7]]), max_new_tokens=60, do_sample=False
    )
    for draft in cape.drafts(decoding, glide, drafter, cape.Config(**WIDE)):
        # A drafter without memory drafts the same.
        steps = glide.propose(drafter, decoding, glide.Memory(drafter, llama))
        trajectory = draft.tokens[: len(draft.probs)] if draft.probs is not None else []
        assert [int(next(steps)[0]) for _ in trajectory] == list(trajectory)
        verified = decoding.verify(draft)
        extras_accepted += any(node >= len(draft.probs) for node in verified.path)
        plain = common.GrowingCache(3)
        common.forward(llama, decoding.ids[:, :-1], plain)
        for ours, theirs in zip(decoding.cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
            torch.testing.assert_close(ours.values, theirs.values)
    assert extras_accepted > 5


def test_a_name_as_base_and_a_drafter_of_another_base_are_mistakes(llama):
    drafter = make_glide(llama)
    options = {"base_drafter": drafter, "custom_generate": cape.generate, "max_new_tokens": 4}
    with pytest.raises(common.Mistake, match="base 'glide': pass a module that drafts chains"):
        llama.generate(torch.tensor([[1, 2]]), base="glide", **options)
    with pytest.raises(common.Mistake, match="drafter is a "):
        llama.generate(torch.tensor([[1, 2]]), base=glide, **options | {"base_drafter": llama})


# ------------------------------------------------------------------------------------ sampling


def p_value(target, sizes):
    prompt = torch.tensor([[1, 2, 3]])
    config = cape.Config(gamma=2, sizes=sizes)
    given = {"base": glide, "base_drafter": make_glide(target), "config": config}
    return sampled_p_value(target, prompt, 3, draws=400, custom_generate=cape.generate, **given)


@pytest.mark.parametrize("sizes", [[3, 2, 2, 1], [6, 6, 6, 6]])
def test_sampled_output_follows_the_target(small_llama, sizes):
    assert p_value(small_llama, sizes) > 1e-3


def test_negative_control_extras_that_claim_to_be_drawn_are_noticed(small_llama, monkeypatch):
    """Leaves that say they were drawn from next to nothing are always accepted."""
    real = cape.expand

    def wrong(trajectory, config):
        draft = real(trajectory, config)
        if draft.probs is not None:
            extras = len(draft.tokens) - len(draft.probs)
            claimed = draft.probs.new_full((extras, 7), 1e-9)
            draft.probs = torch.cat([draft.probs, claimed])
        return draft

    monkeypatch.setattr(cape, "expand", wrong)
    assert p_value(small_llama, [3, 2, 2, 1]) < 1e-6
