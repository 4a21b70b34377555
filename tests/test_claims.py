"""The verdicts of results/claims.md and its figures, by hand."""

import re

import claims
import pytest
import tables
import torch
from stop_rules import Round

PAGE = (claims.RESULTS / "claims.md").read_text()


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.90, 0.99, "the opposite"),
        (0.98, 1.05, "open"),
        (1.004, 1.10, "open"),  # as it is printed, it begins at 1.00
        (0.90, 0.996, "open"),
        (1.01, 1.02, "confirmed"),
    ],
)
def test_verdicts(low, high, verdict):
    assert claims.VERDICTS[claims.factor(1.0, low, high).side] == verdict


def test_points_are_judged_by_zero():
    assert claims.points(4.9, 4.7, 5.1).side == 1
    assert claims.points(-4.9, -5.1, -0.1).side == -1
    open_ = claims.Seen("+0.3 points (-0.0 to +0.5)", 0)
    assert claims.points(0.3, -0.04, 0.5) == open_


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("3.34/2.78 +1", "1.15"),
        ("3.34/2.13 2.78/1.64 +1", "1.39 to 1.43"),
        ("18.88/17.62 20.61/18.55 in time", "1.07 to 1.11 in time"),
        ("5.4 23.5 points", "+5.4 to +23.5 points"),
        ("-", "-"),
    ],
)
def test_the_paper_s_figures_in_our_unit(words, shown):
    assert claims.printed(words) == shown


def sums(tokens, forwards):
    return torch.tensor([tokens, forwards, [torch.nan] * len(tokens)]).T.double()


def test_layers_are_judged_only_where_their_curves_do_not_cross(monkeypatch):
    """Two seeds each; one of `both` is behind at one of five steps."""

    def curve(*alphas):
        steps = zip(range(500, 1001, 125), alphas, strict=True)
        return [{"step": step, "eval_alpha": alpha} for step, alpha in steps]

    low, high = curve(*[0.2] * 5), curve(*[0.3] * 4, 0.25)
    crossed = curve(0.4, 0.1, 0.4, 0.4, 0.4)
    layers = {"low": [low, low], "high": [high, high], "both": [high, crossed]}
    monkeypatch.setattr(claims, "read", lambda file: layers)
    for pair, figure, side in (
        ("high / low", "+5.0 points (+5.0 to +5.0)", 1),
        ("low / high", "-5.0 points (-5.0 to -5.0)", -1),
        ("both / low", "+12.5 points (+5.0 to +20.0)", 0),
    ):
        assert claims.layers(pair) == claims.Seen(figure, side)


def test_every_verdict_is_held_to_its_run(monkeypatch):
    """Where the counts of one side change, so do the figure and the verdict."""
    words = "3.34/2.78 +1 | run.json: m:ours / m:theirs = here"
    counts = {"m:theirs": [10.0, 20.0, 30.0]}
    monkeypatch.setattr(
        claims, "sums_of", lambda file, name: sums(counts[name], [10.0] * 3)
    )
    for factor, verdict in (
        (1.2, "confirmed"),
        (1.0, "open"),
        (0.5, "the opposite"),
    ):
        counts["m:ours"] = [factor * count for count in counts["m:theirs"]]
        figure = f"{factor:.2f} ({factor:.2f}-{factor:.2f})"
        assert claims.row_of(words) == ["1.15", f"{figure} here", verdict]
        assert claims.row_of(f"{words} | no test")[-1] == "no test"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("cpu_variants.json: falcon:paper / falcon:chain", "confirmed"),
        ("cpu_variants.json: cape / cape:none", "confirmed"),  # both are GLIDE's
        ("cpu_main.json: falcon / medusa", "open"),
        ("cpu_rivals_falcon.json: falcon@k2-tall / falcon@k3-tall", "open"),
    ],
)
def test_two_drafters_differ_in_more_than_a_claim(words, verdict):
    assert claims.row_of(f"- | {words}")[-1] == verdict


def test_a_table_keeps_the_first_and_the_last_cells_of_its_rows(monkeypatch):
    monkeypatch.setattr(claims, "seen_of", lambda words: claims.Seen("1.00"))
    old = (
        "| claim |\n| --- |\n| a | - | 9.99 | confirmed | So. |\n| b | - | - | - | - |"
    )
    new = claims.table("- | x: y / z\n3/2 | x: y / z | no test", old).splitlines()
    assert new[2:] == [
        "| a | - | 1.00 | open | So. |",
        "| b | 1.50 | 1.00 | no test | - |",
    ]
    with pytest.raises(ValueError):
        claims.table("- | x: y / z", old)


def test_changed_figures_are_computed_anew():
    """All at once, of ratios and of points, and a verdict."""
    figure = re.compile(r"\d\.\d+ ((?:points )?\()")
    assert len(figure.findall(PAGE)) > 30
    changed = figure.sub(r"9.9 \1", PAGE).replace("| confirmed |", "| open |")
    assert tables.written(changed) == PAGE


def test_the_page_counts_its_verdicts():
    assert PAGE.count("| confirmed |") == 5 and PAGE.count("| the opposite |") == 0
    assert "Five are confirmed." in " ".join(PAGE.split())


def test_prompts_are_drawn_for_both_arms_at_once():
    easy_and_hard = sums([10.0, 20.0, 60.0], [10.0, 10.0, 10.0])
    twice = easy_and_hard * torch.tensor([2.0, 1, 1])
    ratio = claims.bootstrap(claims.ratio_of_taus, twice, easy_and_hard)
    assert ratio == (2.0, 2.0, 2.0)
    value, low, high = claims.bootstrap(claims.tau, easy_and_hard)
    assert value == 3.0 and low < 2 < 4 < high


def test_sets_of_one_size(monkeypatch):
    """The paper's sets have 1 and 7, so as many nodes are in sets of 4."""
    rounds = [Round(confidence=[0.9, 0.1], rank=1) for _ in range(40)]
    rule = claims.fixed(1.5)
    assert [rule(rounds[0], 2), rule(rounds[0], 2)] == [[1, 2], [1, 2]]
    monkeypatch.setattr(claims.stop_rules, "read", lambda path: [rounds] * 3)
    assert claims.sizes("4", gamma=2).figure == "1.000 (1.000-1.000)"
    with pytest.raises(AssertionError, match="nodes a round"):
        claims.sizes("4.1", gamma=2)


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
    two_over_one = claims.rules("rounds: K 2 / K 1")
    assert two_over_one == claims.rules("rounds: K / K 1")
    assert float(two_over_one.figure[:5]) > 1.5 and two_over_one.side == 1
    assert claims.rules("rounds: K 1 / K 1").figure == "1.000 (1.000-1.000)"


def test_prompts_are_named_by_their_files():
    result = claims.read("cpu_main.json")
    files = tables.files_of_prompts(result)
    assert files[0] == "math" and len(files) == result["prompts"]
