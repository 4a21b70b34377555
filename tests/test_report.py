"""report.py: every figure by hand, and those of a whole run by reading its raw record again."""

import json
import random
import re
import subprocess
import types
from pathlib import Path

import pytest
import torch
from test_bench import command, files, run  # noqa: F401  a fixture: target, GLIDE drafter, prompts

import bench
from support import report

ROOT = Path(bench.__file__).parent


def answer(tokens, seconds, **given):
    """A bench.Answer of so many tokens; plain decoding unless told otherwise."""
    fields = {
        "decode_seconds": seconds / 2,
        "in_target": seconds / 4,
        "forwards": tokens,
        "rounds": tokens,
    }
    return bench.Answer(list(range(tokens)), seconds, **{**fields, **given})


def arm(name, *answers, **given):
    return bench.Arm(name, {}, answers=list(answers), same=[None] * len(answers), **given)


def turn(prompt, category="a"):
    return {"prompt": prompt, "question_id": 7 + prompt, "category": category}


# ------------------------------------------------------------------------------------------ figures


def test_figures_of_a_hand_worked_case():
    turns = [turn(0, "a"), turn(1, "b")]
    baseline = arm("plain", answer(10, 2.0), answer(6, 2.0))
    first = answer(
        10,
        1.0,
        decode_seconds=0.8,
        timers={"draft": 0.2, "verify": 0.5},
        in_target=0.4,
        in_drafter=0.1,
        forwards=4,
        rounds=4,
        drafted=12,
        offered=[3, 3, 3, 3],
        accepted=[3, 0, 2, 1],
        copies=[(0, 0), (2, 1), (5, 0), (1, 1)],
    )
    second = answer(
        6,
        2.0,
        decode_seconds=1.2,
        timers={"draft": 0.4, "verify": 0.5, "tree": 0.1},
        in_target=0.4,
        in_drafter=0.1,
        forwards=4,
        rounds=4,
        drafted=9,
        offered=[3, 3, 3, 0],
        accepted=[0, 1, 1, 0],
        copies=[(0, 0), (0, 0), (0, 0), (4, 2)],
        memory=2**21,
    )
    ours = arm("x", first, second)
    ours.same[1] = {"position": 3, "top2_margin": 0.1}
    got = report.figures(ours, baseline, turns, greedy=True)
    assert got["tokens_per_s"] == pytest.approx(16 / 3, abs=1e-4)
    assert got["speedup"] == pytest.approx(4 / 3, abs=1e-4)
    assert got["tau"] == 2.0 and got["accepted_per_round"] == 1.0
    assert got["n_target_per_token"] == 0.5
    assert got["n_discarded_per_token"] == pytest.approx((21 - 8) / 16, abs=1e-4)
    # 5, 2 and 1 of the 7 rounds that offered as much
    assert got["acceptance_by_position"] == [0.7143, 0.2857, 0.1429]
    assert (got["draft_ms"], got["verify_ms"], got["other_ms"]) == (75.0, 125.0, 50.0)
    assert got["timers_ms"]["tree"] == 12.5 and got["overhead"] == 2.0
    assert got["identical_to_greedy"] is False and got["diverged"] == 1
    assert got["first_divergence"] == {"question_id": 8, "position": 3, "top2_margin": 0.1}
    assert got["copies"] == [0.5, 0.375] and got["memory_mb"] == 2.0
    assert got["by_category"] == {
        "a": {"speedup": 2.0, "tau": 2.5, "copies": [0.75, 0.5]},
        "b": {"speedup": 1.0, "tau": 1.5, "copies": [0.25, 0.25]},
    }
    assert got["by_prompt"] == {"tokens": [10, 6], "seconds": [1.0, 2.0], "forwards": [4, 4]}
    assert got["speedup_ci"] == [1.0, 2.0]  # two prompts: the redraws are {a, a}, {a, b}, {b, b}


def test_loops_that_do_not_report_accept_all_but_one_token_a_forward():
    theirs = answer(10, 1.0, forwards=4, rounds=3, drafted=9, timers={"draft": 0.1, "verify": 0.3})
    got = report.figures(arm("x", theirs), arm("plain", answer(10, 1.0)), [turn(0)], greedy=False)
    assert got["accepted_per_round"] == 1.5 and got["n_discarded_per_token"] == 0.3
    assert got["draft_ms"] == pytest.approx(100 / 3, abs=1e-3)
    assert got["acceptance_by_position"] == [] and got["copies"] is None
    assert got["identical_to_greedy"] is None and got["first_divergence"] is None


def test_a_target_that_is_replayed_has_no_overhead():
    replayed = answer(10, 1.0, in_target=0.0, in_drafter=0.2)
    got = report.figures(arm("x", replayed), arm("plain", answer(10, 1.0)), [turn(0)], greedy=True)
    assert got["overhead"] is None


# ---------------------------------------------------------------------------------------- intervals


def test_prompts_are_redrawn_with_all_their_turns():
    """Two identical prompts of two unequal turns: whatever is redrawn, the ratio is the same."""
    turns = [turn(0), turn(0), turn(1), turn(1)]
    pair = (answer(10, 1.0), answer(10, 4.0))
    ratio, low, high = report.paired_ratio(
        arm("x", *pair, *pair), arm("plain", *(answer(10, 5.0) for _ in turns)), turns
    )
    assert ratio == low == high == 2.0


def test_one_fast_prompt_of_three_moves_the_upper_bound():
    """All three draws are the fast prompt in 1 of 27 redraws, which is more than 2.5%."""
    turns = [turn(i) for i in range(3)]
    ours = arm("x", answer(10, 0.1), answer(10, 1.0), answer(10, 1.0))
    baseline = arm("plain", *(answer(10, 1.0) for _ in turns))
    ratio, low, high = report.paired_ratio(ours, baseline, turns)
    assert ratio == pytest.approx(3 / 2.1) and low == 1.0
    assert high == pytest.approx(10.0)  # 5 and 95% would leave it out


def test_the_interval_covers_what_it_promises():
    """Of 200 experiments of 30 prompts with a known ratio, about 95% hold it within."""
    pick = random.Random(0)
    turns = [turn(i) for i in range(30)]
    inside = 0
    for _ in range(200):
        seconds = [pick.lognormvariate(0, 0.5) for _ in turns]
        ours = arm("x", *(answer(10, s) for s in seconds))
        plain = arm("plain", *(answer(10, 1.0) for _ in turns))
        _, low, high = report.paired_ratio(ours, plain, turns, resamples=300)
        inside += low <= 1 / 2.718281828**0.125 <= high  # of mean seconds e^(0.5^2 / 2)
    assert 0.85 < inside / 200 < 0.99


def test_a_paired_ratio_forgets_what_prompts_have_in_common():
    """Prompts of very different speeds, ours always 1.5 times the other's: no doubt about it."""
    turns = [turn(i) for i in range(4)]
    speeds = [0.1, 1.0, 3.0, 20.0]
    other = arm("glide", *(answer(10, s) for s in speeds))
    ours = arm("glide:copies", *(answer(10, s / 1.5) for s in speeds))
    assert report.paired_ratio(ours, other, turns) == pytest.approx([1.5, 1.5, 1.5])


def test_any_two_arms_of_a_file_can_be_compared_by_any_rate():
    """Two prompts: tau 3 and 2 against 1.5 and 1, alpha 0.6 and 0.4 against 0.3 and 0.4."""
    ours = {"tokens": [30, 20], "seconds": [5, 5], "forwards": [10, 10]}
    theirs = {"tokens": [30, 20], "seconds": [10, 5], "forwards": [20, 20]}
    ours |= {"alpha_sum": [6, 4], "alpha_count": [10, 10]}
    theirs |= {"alpha_sum": [3, 4], "alpha_count": [10, 10]}
    assert report.paired(ours, theirs, "tau") == [2.0, 2.0, 2.0]
    assert report.paired(ours, theirs, "alpha") == pytest.approx([10 / 7, 1.0, 2.0])
    assert report.paired(ours, theirs) == [1.5, 1.0, 2.0]


# ---------------------------------------------------------------- a whole run, read naively again


def share(part, whole):
    return round(part / whole, 4)


def test_the_figures_of_a_run_are_those_of_its_raw_record(files, capsys, monkeypatch):  # noqa: F811
    """Every round of every answer is recorded aside, and counted again by plain loops."""
    records, play = {}, bench.Arm.play

    class Recorder(bench.Clock):
        """Keeps itself, and reads the clock once more at the ends of an answer's rounds."""

        def __init__(self, **options):
            super().__init__(**options)
            clocks.append(self)

    def spy(self, target, encoded, **options):
        answer = play(self, target, encoded, **options)
        records.setdefault(self.name, []).append((answer.tokens, answer.seconds, clocks[-1]))
        records[self.name][-1] += (answer.decode_seconds,)
        return answer

    clocks = []
    monkeypatch.setattr(bench, "Clock", Recorder)
    monkeypatch.setattr(bench.Arm, "play", spy)
    argv = command(files, "--gamma", "3", "--max-new-tokens", "24")
    argv.insert(2, "copies")
    checkpoint = argv.index("--checkpoint")
    glide_at = f"glide@{argv[checkpoint + 1]}"
    del argv[checkpoint : checkpoint + 2]
    argv[1] = glide_at
    result, _ = run(capsys, argv)
    category = ["talk", "talk", "sums"]  # of the three turns; the first two are one prompt
    prompt = [0, 0, 1]
    records = {name: record[1:] for name, record in records.items()}  # without the warm-up
    rate = {}
    for name, record in records.items():
        rate[name] = sum(len(r[0]) for r in record) / sum(r[1] for r in record)
    plain = max(("transformers", "plain"), key=rate.get)
    assert result["arms"]["baseline"]["loop"] == plain
    for name in ("glide@glide", "copies"):
        figures, record = result["arms"][name], records[name]
        emitted = rounds = accepted = thrown = 0
        reached, offered_to = [0] * 30, [0] * 30
        milliseconds, in_forward, decoding, with_copy, copy_taken = {}, 0.0, 0.0, 0, 0
        for tokens, seconds, clock, decode_seconds in record:
            emitted += len(tokens)
            decoding += decode_seconds
            for offer, taken in zip(clock.offered, clock.accepted):
                rounds += 1
                accepted += taken
                thrown -= taken
                for level in range(30):
                    offered_to[level] += offer > level
                    reached[level] += taken > level
            thrown += clock.drafted
            for offer, taken in clock.copies:
                with_copy += offer > 0
                copy_taken += taken > 0
            prefill = [(start, end) for what, start, end in clock.timers if what == "prefill"]
            before = sum(end - start for start, end in prefill)
            assert 0 < decode_seconds < seconds - before
            for what, start, end in clock.timers:
                if what != "prefill":
                    milliseconds[what] = milliseconds.get(what, 0.0) + 1000 * (end - start)
            for _, start, end, *_ in clock.calls:
                if not any(begin <= start and end <= stop for begin, stop in prefill):
                    in_forward += end - start
        assert 2 * decoding > sum(r[1] for r in record)  # most of the time is decoding
        assert figures["tokens"] == emitted == sum(len(r[0]) for r in records[plain])
        assert figures["tau"] == share(emitted, rounds)
        assert figures["accepted_per_round"] == share(accepted, rounds)
        assert figures["n_target_per_token"] == share(rounds, emitted)
        assert figures["n_discarded_per_token"] == share(thrown, emitted)
        depth = sum(count > 0 for count in offered_to)
        rates = [share(a, b) for a, b in zip(reached[:depth], offered_to[:depth])]
        assert figures["acceptance_by_position"] == rates and depth >= 3
        assert figures["draft_ms"] == pytest.approx(milliseconds["draft"] / rounds, abs=1e-3)
        assert figures["verify_ms"] == pytest.approx(milliseconds["verify"] / rounds, abs=1e-3)
        other = 1000 * decoding - milliseconds["draft"] - milliseconds["verify"]
        assert figures["other_ms"] == pytest.approx(other / rounds, abs=1e-3)
        assert figures["overhead"] == pytest.approx(decoding / in_forward, abs=1e-3)
        assert figures["tokens_per_s"] == pytest.approx(rate[name], rel=1e-4)
        assert figures["speedup"] == pytest.approx(rate[name] / rate[plain], abs=1e-4)
        if name == "copies":
            assert figures["copies"] == [share(with_copy, rounds), share(copy_taken, rounds)]
            assert with_copy
        ratios = []  # with two prompts a redraw is one of four, equally likely
        for redrawn in ((0, 0), (0, 1), (1, 0), (1, 1)):
            total = [0.0] * 4
            for each in redrawn:
                for i in range(3):
                    if prompt[i] == each:
                        ours, theirs = record[i], records[plain][i]
                        numbers = (len(ours[0]), ours[1], len(theirs[0]), theirs[1])
                        total = [a + b for a, b in zip(total, numbers)]
            ratios.append(total[0] / total[1] * total[3] / total[2])
        assert figures["speedup_ci"] == pytest.approx([min(ratios), max(ratios)], abs=1e-4)
        for kind in ("talk", "sums"):
            rows = [i for i in range(3) if category[i] == kind]
            count = sum(len(record[i][0]) for i in rows)
            forwards = sum(len(record[i][2].accepted) for i in rows)
            ours = count / sum(record[i][1] for i in rows)
            theirs = sum(len(records[plain][i][0]) for i in rows)
            theirs /= sum(records[plain][i][1] for i in rows)
            assert figures["by_category"][kind]["tau"] == share(count, forwards)
            assert figures["by_category"][kind]["speedup"] == pytest.approx(ours / theirs, abs=1e-4)


# ------------------------------------------------------------------------------------ tables, texts


def test_markdown_is_aligned():
    assert report.markdown(["arm", "x"], [["glide", 1.25], ["b", None]]) == (
        "| arm   |    x |\n|-------|-----:|\n| glide | 1.25 |\n| b     |    - |"
    )


def test_highlight_marks_the_accepted_tokens():
    letters = types.SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join("abcdefgh"[i] for i in ids)
    )
    cut = answer(7, 1.0, accepted=[2, 0, 5])  # the last round was cut short
    assert report.highlight(letters, cut) == "\x1b[30;42mab\x1b[0mcd\x1b[30;42mefg\x1b[0m"
    assert report.highlight(letters, cut, colour=False) == "[ab]cd[efg]"


NUMBERS = {
    "tau": 1.5,
    "accepted_per_round": 0.5,
    "alpha": 0.2,
    "speedup": 1.25,
    "draft_ms": 5.0,
    "verify_ms": 40.0,
    "other_ms": 5.0,
    "timers_ms": {"draft": 5.0, "verify": 40.0},
}


def measured(method, variant, **settings):
    return {**NUMBERS, "method": method, "variant": variant, "settings": settings}


def test_the_papers_figures_go_by_method_variant_and_config():
    known = [
        (("falcon", "", {"k": 3, "csgd": True}), {"accepted": 2.52, "speedup": 2.96}),
        (("falcon", "chain", {"k": 2, "csgd": False}), {"accepted": 1.64, "speedup": 2.06}),
        (("falcon", "", {"k": 5, "csgd": True}), None),
        (("falcon", "", {"k": 3, "csgd": False}), None),
        (("falcon", "", {"k": 3, "csgd": True, "copies": 10}), None),
        (("falcon", "copies", {"k": 3, "csgd": True, "copies": 10}), None),
        (("glide", "", {"cross_attention": True, "copies": 0}), {"speedup": 1.96, "draft_ms": 5.3}),
        (("glide", "", {"cross_attention": False}), None),
        (("glide", "", {}), None),
        (("cape", "", {"base": "specdecpp"}), None),
        (("ctc_drafter", "none", {"kind": "medusa"}), {"tau": 2.58, "speedup": 2.13}),
        (("ctc_drafter", "", {"kind": "ctc"}), None),  # our transform is not the paper's
    ]
    for (method, variant, settings), figures in known:
        assert report.papers_figures(measured(method, variant, **settings)) == figures
    assert report.papers_figures(NUMBERS) is None  # a folder or an arm may have any name


def test_beside_the_papers_figures():
    falcon = measured("falcon", "", k=3, csgd=True)
    arms = {"baseline": NUMBERS, "falcon@any": falcon, "falcon@k3": measured("falcon", "", k=9)}
    note, table = report._paper_tables(arms)
    assert "Vicuna-7B" in note and "GLIDE" not in note and "leaves out the bonus" in note
    head, _, *rows = (line.replace(" ", "").strip("|") for line in table.split("\n"))
    assert head == ("arm|tau|accepted|speedup|draftms|verify|draft|paper'saccepted|paper'sspeedup")
    assert rows == ["falcon@any|1.50|0.50|1.25|5.0|80%|10%|2.52|2.96"]
    assert report._paper_tables({"baseline": NUMBERS}) == []


def test_copies_by_category_are_offered_then_accepted():
    shares = {"a": {"copies": [0.5, 0.1]}, "b": {"copies": None}}
    arms = {"baseline": {"by_category": shares}}
    arms["x"] = {"copies": [0.25, 0.05], "by_category": shares}
    _, table = report._copy_tables(arms)
    row = [cell.strip() for cell in table.split("\n")[-1].strip("|").split("|")]
    assert row == ["x", "25%", "5%", "50% (10%)", "0% (0%)"]


def test_bins_stand_below_their_predictions():
    table = report._bins("predicted", [[0.9, 0.2, 40], [0.15, 0.05, 3]])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
    assert rows[0] == ["predicted", "0.90", "0.15"]
    assert rows[2:] == [["accepted", "0.20", "0.05"], ["tokens", "40", "3"]]


def test_one_prompt_gives_no_interval_worth_the_name(files, capsys):  # noqa: F811
    _, out = run(capsys, command(files, "--num-prompts", "1"))
    assert "1 prompt (no interval), up to 12 tokens a turn" in out
    _, out = run(capsys, command(files))
    assert "2 prompts, up to 12 tokens a turn" in out and "no interval" not in out


def test_settings_are_numbers_words_and_lists():
    facts = {"k": 2, "target": {"a": 1}, "tree": [[0]], "csgd": True, "draft_model": "/some/where"}
    made = bench.Arm("x", {"drafter": object(), "chain": True, "k": 3}, facts=facts)
    assert report.settings(made) == {"k": 3, "tree": [[0]], "csgd": True, "chain": True}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_results_say_where_they_come_from(path):
    result = report.read_result(str(path))
    for key in ("target", "device", "dtype", "commit", "command", "versions"):
        assert result[key]
    assert result["seed"] >= 0 and not re.search(r"/(root|home|work|tmp)/", path.read_text())


def test_a_result_of_edited_code_says_so(tmp_path, monkeypatch, llama):
    file = tmp_path / "report.py"
    file.write_text("edited = False\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(report, "__file__", str(file))
    facts = dict(target=None, max_new_tokens=1, temperature=0.0, top_p=1.0, seed=0, argv=[])
    clean = report.header(types.SimpleNamespace(**facts), llama, 1)["commit"]
    file.write_text("edited = True\n")
    edited = report.header(types.SimpleNamespace(**facts), llama, 1)["commit"]
    assert edited == f"{clean}-dirty"


def test_something_else_than_a_result(tmp_path):
    (tmp_path / "r.json").write_text('{"arms": 3}')
    with pytest.raises(ValueError, match="is not a result of bench.py --json"):
        bench.main(["--table", str(tmp_path / "r.json")])


def test_a_result_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    report.write_result({"a": 1}, str(path))
    with pytest.raises(TypeError):
        report.write_result({"a": torch.zeros(1)}, str(path))

    def full(self, other):
        raise OSError("no space")

    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(OSError):
        report.write_result({"a": 2}, str(path))
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]
