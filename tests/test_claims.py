"""The verdicts of results/claims.md, and the replay of CAPE's sets, by hand."""

import claims
import expansion
import pytest
import torch

import common

EXCLUDED = "not shown; the paper's size is excluded"


@pytest.mark.parametrize(
    ("low", "high", "paper", "expected"),
    [
        (0.90, 0.99, None, "the opposite"),
        (0.90, 0.99, claims.over(3, 2), "the opposite"),
        (1.00, 1.10, claims.over(1.1, 1), "not shown"),
        (0.98, 1.05, claims.with_bonus(3.34, 2.78), EXCLUDED),
        (1.01, 1.14, claims.with_bonus(3.34, 2.78), "smaller"),
        (1.01, 1.15, claims.with_bonus(3.34, 2.78), "confirmed"),
        (1.01, 1.02, None, "confirmed"),
        (1.01, 1.02, claims.over(2.61, 2.17, time=True), "confirmed"),
        (1.01, 1.10, claims.Paper(1.05, 1.9), "confirmed"),  # its smallest size counts
    ],
)
def test_verdicts(low, high, paper, expected):
    assert claims.verdict(claims.Seen("", low, high), paper) == expected


def test_points_are_judged_by_zero_and_by_the_paper_s_points():
    seen = claims.Seen("", 0.8, 1.2, neutral=0.0, most=4.9)
    assert claims.verdict(seen, claims.Paper(5.4, 23.5)) == "smaller"
    assert claims.verdict(seen._replace(low=-0.1), None) == "not shown"


def arm(tokens, forwards, draft_ms=None):
    nothing = torch.zeros(len(tokens))
    sums = torch.stack(
        [torch.tensor(tokens), torch.tensor(forwards), nothing, nothing], 1
    )
    return claims.Arm(sums.double(), None, draft_ms, 30.0, None)


def test_prompts_are_drawn_for_both_arms_at_once():
    easy_and_hard = arm([10.0, 20.0, 60.0], [10.0, 10.0, 10.0])
    twice = easy_and_hard.sums * torch.tensor([2.0, 1, 1, 1])
    ratio = claims.bootstrap(
        lambda a, b: claims.tau(a) / claims.tau(b), twice, easy_and_hard.sums
    )
    assert ratio == (2.0, 2.0, 2.0)
    value, low, high = claims.bootstrap(claims.tau, easy_and_hard.sums)
    assert value == 3.0 and low < 2 < 4 < high


def test_flat_cost():
    """Tau 2, and drafting takes a third of a plain forward."""
    assert claims.flat(arm([20.0], [10.0], draft_ms=10.0)) == pytest.approx(1.5)


def test_a_place_by_hand():
    q_draft = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.0, 0.2, 0.8]])
    draft = common.Draft(torch.tensor([1, 0, 2]), [-1, 0, 1], q_draft)
    confidences = [0.6, 0.5, 0.8]
    assert expansion.place_of(draft, [1, 0, 2, 2]) == [3, -1, *confidences]
    assert expansion.place_of(draft, [1, 2, 2]) == [1, 1, *confidences]
    assert expansion.place_of(draft, [0]) == [0, 2, *confidences]
    assert expansion.place_of(draft, [1, 0, 0]) == [2, -1, *confidences]


def test_a_replay_by_hand():
    places = [
        [1, 2, 0.9, 0.2],  # the second step misses, and its second extra would be right
        [0, 5, 0.1, 0.5],
        [2, -1, 0.9, 0.9],
        [0, 1, 0.2, 0.2],
        [1, -1, 0.7, 0.7],
        [0, 1, 0.9, 0.9],  # the last token
    ]

    def counts(rule):
        return expansion.replay([places], rule, gamma=2).tolist()[0]

    # Without extras rounds begin at places 0, 2 and 5.
    assert counts(expansion.fixed(0)) == [6, 3, 6]
    # With two, place 0 commits three tokens, then 3, then 5.
    assert counts(expansion.fixed(2)) == [6, 3, 18]
    # With one, place 0 commits two, and 2 commits three.
    assert counts(expansion.fixed(1)) == [6, 3, 12]
    # The paper's sizes: 1 + 7, 7 + 7, 1 + 1.
    assert counts(expansion.paper) == [6, 3, 6 + 8 + 14 + 2]


def test_fixed_sizes_and_equal_nodes():
    rule = expansion.fixed(1.5)
    assert [rule(0.5) for _ in range(4)] == [1, 2, 1, 2]
    places = [[[0, 1, 0.9, 0.1]] * 40]
    size = expansion.equal_nodes(places, expansion.paper, gamma=2)
    assert size == pytest.approx(4, abs=0.1)  # the paper's sets have 1 and 7


def test_kinds_of_prompts_are_those_of_the_files():
    kinds = claims.kinds_of(claims.read(claims.MAIN))
    assert kinds[0] == {"file": "math", "category": "gsm"}
    assert {kind["file"] for kind in kinds} == {"math", "python", "chat"}
