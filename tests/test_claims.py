"""The verdicts of results/claims.md by hand, and its figures as the page has them."""

import re
from functools import partial

import claims
import pytest
import tables

from support.measuring import report

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


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("cpu_variants.json: falcon:paper / falcon:chain", "confirmed"),
        ("cpu_variants.json: cape / glide", "confirmed"),  # both are GLIDE's
        ("cpu_main.json: falcon / medusa", "open"),
        ("cpu_rivals_falcon.json: falcon@k2-tall / falcon@k3-tall", "open"),
    ],
)
def test_two_drafters_differ_in_more_than_a_claim(words, verdict):
    assert claims.row_of(f"- | {words}")[-1] == verdict


def test_changed_figures_are_computed_anew():
    """All at once, of ratios and of points, and a verdict."""
    figure = re.compile(r"\d\.\d+ ((?:points )?\()")
    assert len(figure.findall(PAGE)) > 30
    changed = figure.sub(r"9.9 \1", PAGE).replace("| confirmed |", "| open |")
    assert tables.written(changed) == PAGE
    with pytest.raises(ValueError):  # a row without a line in the comment
        tables.written(PAGE.replace("- | confidence\n", ""))
    with pytest.raises(AssertionError, match="nodes a round"):
        claims.sizes("4.1")


def test_the_page_counts_its_verdicts():
    assert PAGE.count("| confirmed |") == 4 and PAGE.count("| the opposite |") == 1
    words = " ".join(PAGE.split())
    assert "Four are confirmed. Of one we saw the opposite," in words


def percents(file, ours, theirs):
    """How many percent higher a tau is, and the ends of its interval."""
    sums = [claims.sums_of(file, names) for names in (ours, theirs)]
    figures = report.bootstrap(claims.ratio_of_taus, *sums)
    return [100 * (x - 1) for x in figures]


def test_figures_that_pages_tell_in_words_follow_from_the_runs():
    sums = partial(claims.sums_of, "cpu_main.json")
    won = claims.ratio_of_speeds(sums("glide"), sums("falcon")) > 1
    csgd, none = (f"falcon@{x}&falcon@{x}-seed1" for x in ("csgd", "no-csgd"))
    learned = partial(percents, "cpu_falcon.json")
    lstm, low, high = learned("falcon@csgd", "falcon@linear")
    less, *ends = (-x for x in learned(csgd, none))
    above, *between = learned(csgd, "eagle@eagle")
    told = {
        "README.md": ["faster than Falcon on all 16 prompts."],
        "results/log.md": [
            f"raised tau by {lstm:.0f}% ({low:.0f} to {high:.0f}%)",
            f"tau is {less:.0f}% lower with it ({ends[1]:.1f} to {ends[0]:.0f}%)",
            f"{above:.0f}% above EAGLE ({between[0]:.1f} to {between[1]:.0f}%)",
        ],
    }
    read = claims.read("cpu_cost.json")["reading"]["7000"]
    plain = claims.read("cpu_lengths.json")["lengths"]["7000"]["plain"]["by_prompt"]
    written = sum(plain["seconds"]) / len(plain["seconds"])
    assert round(read) == 16 and round(read / written) == 2  # README.md says so
    assert won.all() and len(won) == 16
    for page, texts in told.items():
        words = " ".join((claims.RESULTS.parent / page).read_text().split())
        for text in texts:
            assert text in words, text
