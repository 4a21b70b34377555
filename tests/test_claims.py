"""The verdicts of results/claims.md, and CAPE's sets of a fixed size, by hand."""

import json

import claims
import pytest
import tables
import torch
from stop_rules import Round

CSGD = claims.printed((3.34, 2.78), bonus=1)


@pytest.mark.parametrize(
    ("low", "high", "paper", "expected"),
    [
        (0.90, 0.99, None, "the opposite"),
        (0.90, 0.99, claims.printed((3, 2)), "the opposite"),
        (1.00, 1.10, claims.printed((1.1, 1)), "not shown"),
        (0.98, 1.05, CSGD, "not shown"),
        (1.01, 1.14, CSGD, "smaller"),
        (1.01, 1.15, CSGD, "confirmed"),
        (1.01, 1.02, None, "confirmed"),
        (1.01, 1.02, claims.printed((2.61, 2.17), time=True), "confirmed"),
        (1.01, 1.10, claims.Paper(1.05, 1.9), "confirmed"),  # its smallest size counts
    ],
)
def test_verdicts(low, high, paper, expected):
    assert claims.verdict(claims.Seen("", low, high), paper) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((5e6, 3.9e6), "not compared: fewer than 4M token-steps"),
        ((4e6, 4.3e6), None),
        ((9e6, 5e6), "not compared: one side trained 1.8 times as long"),
        ((5e6, 6e6), "not compared: one side trained 1.2 times as long"),
        ((), None),
        ((5e6,), None),  # plain decoding has no drafter
    ],
)
def test_training_of_both_sides(steps, expected):
    seen = claims.Seen("", 1.1, 1.2, steps=steps)
    assert claims.unfair(seen) == expected
    assert claims.unfair(seen._replace(equal_steps=True)) is None


def test_the_sentence_of_a_row_can_be_read_aloud():
    """One sentence of at most 40 words, written by hand on the page."""
    page = (claims.RESULTS / "claims.md").read_text()
    found = {match[3]: match[4] for match in tables.TABLE.finditer(page)}
    for paper in claims.CLAIMS:
        _, _, *lines = found[paper].strip().splitlines()
        assert len(lines) == len(claims.rows_of(paper))
        for line in lines:
            sentence = line.strip("| ").split(" | ")[-1]
            assert sentence.endswith(".") and ". " not in sentence, line
            assert len(sentence.split()) <= 40, line


def test_a_table_keeps_the_sentences_of_its_claims():
    """Also where a claim is put before them; a claim without a sentence has a dash."""
    seen = claims.Seen("1.00")
    ours, theirs = (claims.Row(claim, None, seen, "reported") for claim in "ab")
    old = claims.claim_table([ours], "").replace("reported | -", "reported | It is so.")
    assert claims.claim_table([ours], old) == old
    *_, new, kept = claims.claim_table([theirs, ours], old).splitlines()
    assert new == "| 1 | b | - | 1.00 | reported | - |"
    assert kept == "| 2 | a | - | 1.00 | reported | It is so. |"


def test_curves_of_glide_s_layers_do_not_cross():
    """Which is why their rows are judged with fewer token-steps than others."""

    def alphas(layer):
        runs = sorted(claims.RESULTS.glob(f"curves/gpu_glide_{layer}_s*.json"))
        rows = [each for run in runs for each in json.loads(run.read_text())]
        return {
            step: [each["eval_alpha"] for each in rows if each["step"] == step]
            for step in range(500, 1001, 125)
        }

    for better, worse in (("29", "none"), ("18", "none"), ("29", "0"), ("18", "29")):
        ours, theirs = alphas(better), alphas(worse)
        assert all(min(ours[step]) > max(theirs[step]) for step in ours)


def test_a_gap_below_zero_keeps_its_sign():
    """Layer 0 and none, by equal steps: .3162 and .3214, .3161 and .3164."""
    seen = claims.layers("0", "none")
    assert seen.figure == "+0.3 points (-0.0 to +0.5)"
    assert claims.verdict(seen, None) == "not shown"


def test_figures_in_the_notes_on_falcon():
    paper, chain = (
        claims.arm_of(claims.VARIANTS, f"falcon:{name}").sums
        for name in ("paper", "chain")
    )
    ratio = claims.bootstrap(
        lambda a, b: (claims.tau(a) - 1) / (claims.tau(b) - 1), paper, chain
    )
    assert [round(number, 2) for number in ratio] == [1.9, 1.73, 2.13]
    arms = claims.report.arms_of(claims.read(claims.VARIANTS))
    answers = arms["falcon:paper"]["answers"]
    accepted = [each for answer in answers for each in answer["accepted"]]
    assert round(sum(accepted) / len(accepted), 2) == 2.12
    below = sum(max(0, each - 4) for each in accepted)
    assert round(below / len(accepted), 2) == 0.11
    arms = claims.report.arms_of(claims.read(claims.ALIKE_FALCON))
    names = ("k2", "k2-seed1", "no-csgd", "no-csgd-seed1")
    levels = [arms[f"falcon@{name}"]["acceptance_by_position"] for name in names]
    assert [round(each[1] / each[0], 2) for each in levels] == [0.37, 0.37, 0.32, 0.34]


def test_figures_on_the_second_token_of_a_pass():
    runs = claims.read("csgd_tau.json")["runs"]
    page = " ".join((claims.RESULTS / "log" / "training.md").read_text().split())
    for name in ("csgd:pair", "no_csgd:pair"):
        counts = runs[name]["second"].values()
        _, first, both = map(sum, zip(*counts))
        assert f"{100 * both / first:.0f}%" in page
        assert f"({both} of {first})" in page


def test_rank_of_coding():
    seen = claims.rank_of_coding(claims.MAIN, "ctc_drafter", "medusa")
    assert seen.figure == "rank 2 and 1 of 8"
    assert seen.what.startswith("`ctc_drafter`: math 2.44, coding 2.37")


def test_points_are_judged_by_zero_and_by_the_paper_s_points():
    seen = claims.Seen("", 4.7, 5.1, neutral=0.0)
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


def test_fixed_sizes_and_equal_nodes():
    """The paper's sets have 1 and 7."""
    rounds = [Round(confidence=[0.9, 0.1], rank=1) for _ in range(40)]
    rule = claims.fixed(1.5)
    assert [rule(rounds[0], 2), rule(rounds[0], 2)] == [[1, 2], [1, 2]]
    size = claims.equal_nodes([rounds], claims.by_paper, gamma=2)
    assert size == pytest.approx(4, abs=0.1)


def test_head_and_fixed_lengths_at_an_equal_discard_rate(monkeypatch):
    """A head that knows how much is accepted, and one that says the same everywhere."""
    agreed = [4, 0, 0, 0, 0, 1, 0, 2, 1, 0] * 4

    def answers(judge):
        row = [Round(confidence=[1.0] * 5, accepts=judge(n), agreed=n) for n in agreed]
        return [row, row[::-1]] * 3

    def seen(judge):
        monkeypatch.setattr(claims.stop_rules, "read", lambda path: answers(judge))
        return claims.frontier("rounds.json.gz")

    blind = seen(lambda n: [0.5] * 4)  # .5 and .25: it drafts three tokens, like K = 3
    assert blind.low == blind.high == 1.0
    assert seen(lambda n: [1.0] * n + [0.0] * (4 - n)).low > 1.1


def test_cost_of_a_head_is_compared_with_a_line(monkeypatch):
    def arm(passes, draft_ms):
        offered = [9, passes, passes]  # the first round does not count
        return {"draft_ms": draft_ms, "answers": [{"offered": offered}]}

    arms = {"head": arm(3, 12.0), "two": arm(2, 8.0), "four": arm(4, 12.0)}
    monkeypatch.setattr(claims, "read", lambda file: None)
    monkeypatch.setattr(claims.report, "arms_of", lambda result: arms)
    seen = claims.head_cost("run.json", "head", "two", "four")
    assert seen.figure == "1.20 in time"
    assert seen.what == "12.0 and 10.0 ms for 3.00 passes"


def test_kinds_of_prompts_are_those_of_the_files():
    kinds = claims.kinds_of(claims.read(claims.MAIN))
    assert kinds[0] == {"file": "math", "category": "gsm"}
    assert {kind["file"] for kind in kinds} == {"math", "python", "chat"}
