"""The verdicts of results/claims.md and its figures, by hand."""

import claims
import pytest
import tables
import torch
from stop_rules import Round

CSGD = claims.printed("3.34/2.78 +1")


@pytest.mark.parametrize(
    ("low", "high", "paper", "expected"),
    [
        (0.90, 0.99, None, "the opposite"),
        (0.90, 0.99, claims.printed("3/2"), "the opposite"),
        (1.00, 1.10, claims.printed("1.1/1"), "not shown"),
        (0.98, 1.05, CSGD, "not shown"),
        (1.01, 1.14, CSGD, "smaller"),
        (1.01, 1.15, CSGD, "confirmed"),
        (1.01, 1.02, None, "confirmed"),
        (1.01, 1.02, claims.printed("2.61/2.17 in time"), "confirmed"),
        (1.01, 1.10, claims.printed("1.05 1.9"), "confirmed"),  # its smallest counts
    ],
)
def test_verdicts(low, high, paper, expected):
    seen = claims.Seen("", low, high)
    assert claims.verdict(seen, paper) == expected
    assert claims.verdict(seen._replace(alike=False), paper) == "open"


def test_points_are_judged_by_zero_and_by_the_paper_s_points():
    paper = claims.printed("5.4 23.5 points")
    assert claims.verdict(claims.points(4.9, 4.7, 5.1), paper) == "smaller"
    assert claims.verdict(claims.points(0.3, -0.04, 0.5), None) == "not shown"
    assert claims.points(0.3, -0.04, 0.5).figure == "+0.3 points (-0.0 to +0.5)"


def test_the_paper_s_figures_in_our_unit():
    for words, shown in (
        ("3.34/2.78 +1", "1.15"),
        ("3.34/2.13 2.78/1.64 +1", "1.39 to 1.43"),
        ("18.88/17.62 20.61/18.55 in time", "1.07 to 1.11 in time"),
        ("5.4 23.5 points", "+5.4 to +23.5 points"),
        ("-", "None"),
    ):
        assert str(claims.printed(words)) == shown


def arm(tokens, forwards, draft_ms=None, steps=None):
    sums = torch.tensor([tokens, forwards, [torch.nan] * len(tokens)]).T.double()
    return claims.Arm(sums, None, draft_ms, 30.0, steps)


def test_training_of_both_sides():
    for steps, expected in (
        ((3.9e6, 3.9e6), False),  # fewer than four million
        ((4e6, 4.3e6), True),
        ((9e6, 5e6), False),
        ((5e6, 6e6), False),  # a fifth more
    ):
        both = [arm([1.0], [1.0], steps=each) for each in steps]
        assert claims.alike(*both) == expected


def test_token_steps_are_those_of_all_stages():
    stages = claims.read("curves/glide.json")
    total = sum(stage[-1]["tokens"] for stage in stages)
    assert len(stages) > 1 and total > stages[-1][-1]["tokens"]
    for name in ("glide", "cape:cpu", "beam+copies"):
        assert claims.token_steps(name) == total
    assert claims.token_steps("lookup") is None
    assert claims.token_steps("falcon@k2-tall") == claims.token_steps("falcon@k2") > 2e6


def test_layers_are_judged_only_where_their_curves_do_not_cross(monkeypatch):
    """Two seeds each; one of `both` is behind at one of five steps."""

    def curve(*alphas):
        steps = zip(range(500, 1001, 125), alphas, strict=True)
        return [{"step": step, "eval_alpha": alpha} for step, alpha in steps]

    low, high = curve(*[0.2] * 5), curve(*[0.3] * 4, 0.25)
    crossed = curve(0.4, 0.1, 0.4, 0.4, 0.4)
    layers = {"low": [low, low], "high": [high, high], "both": [high, crossed]}
    monkeypatch.setattr(claims, "read", lambda file: layers)
    for ours, theirs, figure, alike in (
        ("high", "low", "+5.0 points (+5.0 to +5.0)", True),
        ("low", "high", "-5.0 points (-5.0 to -5.0)", True),
        ("both", "low", "+12.5 points (+5.0 to +20.0)", False),
    ):
        seen = claims.layers(ours, theirs)
        assert (seen.figure, seen.alike) == (figure, alike)


def test_every_verdict_is_held_to_its_run(monkeypatch):
    """Where the counts of one side change, so do the figure and the verdict."""
    words = "CSGD | 3.34/2.78 +1 | run.json: ours / theirs = here"
    counts = {"theirs": [10.0, 20.0, 30.0]}
    steps = {"ours": 5e6, "theirs": 5e6}

    def arm_of(file, name):
        return arm(counts[name], [10.0, 10.0, 10.0], steps=steps[name])

    monkeypatch.setattr(claims, "arm_of", arm_of)
    verdicts = {1.2: "confirmed", 1.1: "smaller", 0.5: "the opposite"}
    for factor, verdict in verdicts.items():
        counts["ours"] = [factor * count for count in counts["theirs"]]
        cells = claims.row_of(words)
        assert cells[1:3] == ["1.15", f"{factor:.2f} ({factor:.2f}-{factor:.2f}) here"]
        assert cells[-1] == verdict
        assert claims.row_of(f"{words} | open")[-1] == "open"
    steps["ours"] = 9e6
    assert claims.row_of(words)[-1] == "open"


def test_a_table_keeps_the_last_cells_of_its_claims(monkeypatch):
    """Also where a claim is put before them; a claim without one has a dash."""
    monkeypatch.setattr(claims, "seen_of", lambda words: claims.Seen("1.00"))
    old = claims.table("a | - | x: y / z | open", "").replace("open | -", "open | So.")
    assert claims.table("a | - | x: y / z | open", old) == old
    rows = "b | - | x: y / z | open\na | - | x: y / z | open"
    *_, new, kept = claims.table(rows, old).splitlines()
    assert new == "| b | - | 1.00 | - | open | - |"
    assert kept == "| a | - | 1.00 | - | open | So. |"


def test_prompts_are_drawn_for_both_arms_at_once():
    easy_and_hard = arm([10.0, 20.0, 60.0], [10.0, 10.0, 10.0])
    twice = easy_and_hard.sums * torch.tensor([2.0, 1, 1])
    ratio = claims.bootstrap(claims.ratio_of_taus, twice, easy_and_hard.sums)
    assert ratio == (2.0, 2.0, 2.0)
    value, low, high = claims.bootstrap(claims.tau, easy_and_hard.sums)
    assert value == 3.0 and low < 2 < 4 < high


def test_flat_cost():
    """Tau 2, and drafting takes a third of a plain forward."""
    assert claims.flat(arm([20.0], [10.0], draft_ms=10.0)) == pytest.approx(1.5)


def test_fixed_sizes_and_equal_nodes():
    """The paper's sets have 1 and 7."""
    rounds = [Round(confidence=[0.9, 0.1], rank=1) for _ in range(40)]
    rule = claims.fixed(1.5)
    assert [rule(rounds[0], 2), rule(rounds[0], 2)] == [[1, 2], [1, 2]]
    size = claims.equal_nodes([rounds], claims.by_paper, gamma=2)
    assert size == pytest.approx(4, abs=0.1)


def test_acceptance_by_confidence(monkeypatch):
    """The upper half is accepted; a round without a draft does not count."""
    rounds = [Round(confidence=[c], agreed=c > 0.5) for c in (0.9, 0.1, 0.8, 0.2)]
    answers = [[*rounds, Round()]] * 5
    monkeypatch.setattr(claims.stop_rules, "read", lambda path: answers)
    assert claims.by_confidence().figure == "+100.0 points (+100.0 to +100.0)"


def test_stop_rules_with_some_of_their_settings(monkeypatch):
    """Drafts of two are right: K = 1 needs two forwards for three tokens, K = 2 one."""
    rounds = [Round([1, 1], [1, 1], agreed=2), Round([1], [1], agreed=1), Round()]
    monkeypatch.setattr(claims.stop_rules, "read", lambda path: [rounds] * 6)
    two_over_one = claims.rules("rounds", "K 2", "K 1")
    assert two_over_one.figure == claims.rules("rounds", "K", "K 1").figure
    assert two_over_one.low > 1.5 > claims.rules("rounds", "K 1", "K 1").high == 1.0


def test_prompts_are_named_by_their_files():
    result = claims.read(claims.MAIN)
    files = tables.files_of_prompts(result)
    assert files[0] == "math" and len(files) == result["prompts"]
