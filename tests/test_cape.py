"""cape.py: set sizes, the expanded proposal, its mask; lossless with extras."""

import pytest
import torch
from chat import refused
from tiny import Table, check, draft_of, drawn, untrained

import cape
import common
from support import cli

ROOT = torch.tensor([[0]])


def trajectory_of(q_drafts):
    """A chain of the most probable tokens of these distributions."""
    steps = []
    for q_draft in torch.tensor(q_drafts):
        steps.append((q_draft.argmax(keepdim=True), q_draft))
    return common.chain(steps, ROOT)


def test_the_set_size_at_the_borders_of_the_papers_ranges():
    config = cape.Config()
    sizes = {0.01: 7, 0.3: 7, 0.31: 5, 0.6: 5, 0.61: 3, 0.8: 3, 0.81: 1, 1.0: 1}
    assert {p: cape.set_size(p, config) for p in sizes} == sizes
    assert 4 * (1 + max(config.sizes)) == 32  # the limit of 5.3, for chains of four


@pytest.mark.parametrize(
    "settings, tokens, parents",
    [
        # the example of `expand`
        (([2, 1], [0.55]), [1, 0, 2, 3, 1], [-1, 0, -1, -1, 0]),
        (([0, 3], [0.55]), [1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]),
        # a confidence of .5 belongs to the range that ends there
        (([1, 0], [0.5]), [1, 0, 2], [-1, 0, -1]),
        (([1], []), [1, 0, 2, 1], [-1, 0, -1, 0]),
        (([0], []), [1, 0], [-1, 0]),
    ],
)
def test_an_expanded_proposal_worked_by_hand(settings, tokens, parents):
    q_drafts = [[0.1, 0.5, 0.25, 0.15], [0.6, 0.3, 0.06, 0.04]]
    sizes, bounds = settings
    trajectory = trajectory_of(q_drafts)
    draft = cape.expand(trajectory, cape.Config(sizes=sizes, bounds=bounds))
    told = f"q_draft {q_drafts}, sizes {sizes}, bounds {bounds}"
    check(told, (tokens, parents), (draft.tokens.tolist(), draft.parents))
    same = torch.equal(draft.probs, torch.tensor(q_drafts))
    assert same, "probs are to stay the trajectory's: a row for each drawn node"
    assert trajectory.parents == [-1, 0], "the trajectory itself is to stay as it was"


def test_a_set_leaves_out_the_drawn_token_and_not_the_likeliest():
    q_draft = torch.tensor([0.1, 0.5, 0.25, 0.15])
    drawn = common.chain([(torch.tensor([2]), q_draft)], ROOT)
    draft = cape.expand(drawn, cape.Config(sizes=[0, 2, 0], bounds=[0.4, 0.5]))
    told = "2 was drawn of .1 .5 .25 .15, S(.5) = 2"
    check(told, [2, 1, 3], draft.tokens.tolist())
    check(told, {"confidences": [0.5], "counts": [2]}, draft.notes)


def test_a_set_is_no_larger_than_what_can_be_drafted():
    fixed = cape.Config(sizes=[4], bounds=[])
    draft = cape.expand(trajectory_of([[0.0, 0.7, 0.3]]), fixed)
    told = "1 was drawn of 0 .7 .3, S(.7) = 4"
    check(f"{told}: a count is S(p), not what is left", [4], draft.notes["counts"])
    check(told, [1, 2], draft.tokens.tolist())
    nothing = common.chain([], ROOT)
    assert cape.expand(nothing, fixed) is nothing, "an empty one is returned as it is"


def mask_cape(counts):
    """Mask_CAPE (beta, beta) as in 4.2: i = j, or j <= gamma and pos(i) > j."""
    gamma = len(counts)
    pos = torch.arange(1, gamma + 1)
    pos = torch.cat([pos, pos.repeat_interleave(torch.tensor(counts))])  # (beta,)
    j = torch.arange(1, len(pos) + 1)
    return (j[:, None] == j) | (j <= gamma) & (pos[:, None] > j)


@pytest.mark.parametrize(
    "counts", [[0], [3], [2, 1, 1], [0, 4, 0], [5, 0, 2, 1, 3]], ids=str
)
def test_the_mask_is_the_papers_formula(counts):
    # Confidences .1, .2, ... give each step the size that its set has here.
    steps = range(len(counts))
    q_drafts = [[0.1 * (n + 1)] + [(0.9 - 0.1 * n) / 15] * 15 for n in steps]
    bounds = [0.1 * n + 0.05 for n in steps[1:]]
    draft = cape.expand(
        trajectory_of(q_drafts), cape.Config(sizes=counts, bounds=bounds)
    )
    sees = common.tree_mask(draft.parents)[1:, 1:]  # without the root, which all see
    told = f"counts {counts}, parents {draft.parents}"
    check(told, drawn(mask_cape(counts)), drawn(sees))


def test_only_chains_are_expanded():
    q_draft = torch.tensor([0.1, 0.5, 0.25, 0.15])
    tree = draft_of([1, 2], [-1, -1], torch.stack([q_draft, q_draft]))
    for draft in (tree, draft_of([1, 2], [-1, 0])):  # siblings, and no probabilities
        with refused("give it the drafts of glide or specdecpp"):
            cape.expand(draft, cape.Config())
    with refused("cannot change gamma: it can change sizes, bounds"):
        next(cape.drafts([], gamma=3))


def test_any_generator_of_chains_can_be_expanded(llama):
    """SpecDec++'s as well, with the head that ends its rounds."""
    specdecpp = cli.import_method("specdecpp")
    drafter = untrained(specdecpp, llama, layers=[0, 1])
    ids = torch.tensor([[9, 8, 7]])
    options = {"input_ids": ids, "max_new_tokens": 30, "do_sample": False}
    decoding = common.start(llama, **options)
    lengths = set()
    for draft in cape.drafts(specdecpp.drafts(decoding, drafter, threshold=0.6)):
        counts = draft.notes.get("counts", [])
        assert len(draft.notes.get("chances", [])) >= len(counts) - 1
        lengths.add(len(counts))
        decoding.verify(draft)
    assert torch.equal(decoding.ids, llama.generate(**options))
    assert lengths - {0, 1}, "no round drafted two tokens"


def test_sampled_output_follows_the_target():
    """Of answers whose trajectories have two tokens, drawn from a table."""
    table = Table()

    def expanded(decoding):
        return cape.drafts(table.chains(decoding), sizes=[3, 2, 2, 1])

    assert table.p_value(expanded, draws=1000, length=3) > 1e-3
