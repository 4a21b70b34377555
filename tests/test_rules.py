"""The tools of results/tools/ that measure: stop_rules.py (a record counts what
decoding does; rules and figures by hand), costs.py, lengths.py and batches.py.
"""

import ast
import dataclasses
import itertools
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import batches
import costs
import lengths
import pytest
import stop_rules
import torch
from chat import command, refused
from stop_rules import Round
from tiny import make_glide, slow, untrained

import common
import glide
import specdecpp

ROOT = Path(__file__).parent.parent
PROMPT = torch.tensor([[9, 8, 7]])
TURN = {"input_ids": PROMPT, "max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def drafter(llama):
    """Two layers and a head."""
    return untrained(specdecpp, llama, seed=5, head_depth=2)


def make_arm(target, drafter, name="specdecpp", module=specdecpp):
    """What the sweep reads of an Arm."""
    return SimpleNamespace(name=name, target=target, module=module, drafter=drafter)


def record(target, drafter, turn=TURN, **fields):
    """The rounds of a turn, as the sweep records them."""
    arm = make_arm(target, drafter, **fields)
    return stop_rules.record(stop_rules.longest_chains(arm), target, turn)


@pytest.fixture(scope="module")
def recorded(llama, drafter):
    """The rounds of TURN; a test takes a copy of what it changes."""
    return record(llama, drafter)


# ------------------------------------------------------------------------ the recording


@pytest.mark.parametrize("name", ["K=2", slow("K=12"), "head=0.1", "head=0.7"])
@pytest.mark.parametrize("place", [None, 11])
def test_replayed_counts_are_those_of_decoding(llama, drafter, name, place):
    """Up to a limit of tokens, or to an end-of-sequence token."""
    turn = dict(TURN)
    if place is not None:
        turn["eos_token_id"] = int(llama.generate(**TURN)[0, 3 + place])
    kind, value = name.split("=")
    setting = int(value) if kind == "K" else float(value)
    rule = {"threshold": setting, "max_draft": stop_rules.LONGEST}
    if kind == "K":
        rule = {"stop": "fixed", "gamma": setting}
    stats = common.Stats()
    drafts = common.speculate(specdecpp.drafts, drafter, callback=stats, **rule)
    llama.generate(**turn, custom_generate=drafts)
    rounds = record(llama, drafter, turn)
    assert len(rounds) == stats.emitted
    function, _ = stop_rules.RULES[kind]
    expected = stats.target_forwards, stats.drafted - sum(stats.accepted)
    assert stop_rules.count(rounds, function, setting)[:2] == expected


def test_rounds_joined_by_hand():
    """The first two first tokens are accepted, so a draft from place 0 has both."""
    rounds = [
        Round([5, 9, 9], [0.5, 0.1, 0.1], [1.0, 9.0, 9.0], [0.7, 0.1], agreed=1),
        Round([6, 8, 8], [0.6, 0.2, 0.2], [2.0, 9.0, 9.0], [0.8, 0.2], agreed=1),
        Round([7, 4], [0.9, 0.3], [3.0, 4.0], [0.4], agreed=0),
        Round([2], [0.4], [5.0], agreed=1),
        Round(agreed=0),
    ]
    last = dataclasses.replace(rounds[2])
    stop_rules.join(rounds)
    assert rounds[0] == Round(
        [5, 6, 7, 4],
        [0.5, 0.6, 0.9, 0.3],
        [1.0, 2.0, 3.0, 4.0],
        [0.7, 0.8, 0.4],
        agreed=2,
    )
    assert rounds[1].tokens == [6, 7, 4] and rounds[1].agreed == 1
    assert rounds[2] == last and rounds[3].tokens == [2] and rounds[3].agreed == 1


def test_a_sampled_draft_goes_on_as_the_next_one_does(llama):
    """The target itself drafts, so all its tokens are accepted."""
    turn = TURN | {"do_sample": True, "top_k": 0}
    rounds = record(llama, specdecpp.wrap(llama, llama), turn)
    assert [each.agreed for each in rounds] == [*range(19, -1, -1)]
    for each, after in itertools.pairwise(rounds):
        assert each.tokens[1:] == after.tokens[: stop_rules.LONGEST - 1]


def test_a_round_by_hand():
    steps = [
        (torch.tensor([1]), torch.tensor([0.5, 0.5])),
        (torch.tensor([0]), torch.tensor([0.8, 0.2])),
        (torch.tensor([0]), torch.tensor([0.8, 0.2])),
    ]
    each = stop_rules.round_of(common.chain(steps, PROMPT, chances=[0.9, 0.45]))
    assert each.tokens == [1, 0, 0]
    assert each.confidence == pytest.approx([0.5, 0.8, 0.8])
    assert each.entropy == pytest.approx([0.6931, 0.5004, 0.5004], abs=1e-4)
    assert each.accepts == pytest.approx([0.9, 0.5])
    assert stop_rules.round_of(common.chain([], PROMPT)) == Round()


def test_a_round_is_judged_by_the_answer():
    q_draft = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.0, 0.2, 0.8]])
    draft = common.Draft(torch.tensor([1, 0, 2]), [-1, 0, 1], q_draft)
    others = stop_rules.likeliest(draft)
    assert others == [[2, 0], [2, 1], [1]]  # of the third step, one has probability 0
    for answer, agreed, rank in (
        ([1, 0, 2, 2], 3, -1),
        ([1, 2, 2], 1, 1),
        ([0], 0, 2),
        ([1, 0, 0], 2, -1),
        ([1], 1, -1),  # the answer ends
    ):
        each = stop_rules.round_of(draft)
        stop_rules.judge(each, others, answer)
        assert (each.agreed, each.rank) == (agreed, rank)


def test_every_place_is_recorded_to_the_full_length(llama, drafter):
    """Whatever the drafter's own rule, with a head or without; fewer near the end."""
    impatient = dataclasses.replace(drafter.config, threshold=0.0, max_draft=3, gamma=2)
    unjudged = dataclasses.replace(impatient, stage="draft")
    lengths = [min(stop_rules.LONGEST, 19 - place) for place in range(20)]
    for config, judged in ((impatient, True), (unjudged, False)):
        other = specdecpp.Drafter(config).double()
        other.load_state_dict(drafter.state_dict())
        rounds = record(llama, other)
        assert [len(each.tokens) for each in rounds] == lengths
        accepts = [max(0, length - 1) if judged else 0 for length in lengths]
        assert [len(each.accepts) for each in rounds] == accepts
    rounds = record(llama, make_glide(llama, gamma=2), name="glide", module=glide)
    assert [len(each.tokens) for each in rounds] == lengths


# ---------------------------------------------------------------------------- the rules


def test_replay_by_hand():
    """Five tokens; the first draft of the first round is right, and all others wrong.

    Rates are of the tokens of all answers: another one has one token at one forward.
    """
    rounds = [
        Round([1] * m, [0.5] * m, agreed=n)
        for m, n in zip((4, 3, 2, 1, 0), (1, 0, 0, 0, 0))
    ]
    fixed, _ = stop_rules.RULES["K"]
    assert stop_rules.count(rounds, fixed, 3) == (4, 2 + 2 + 1, 3 + 2 + 1)
    assert stop_rules.count(rounds, fixed, 1) == (4, 0 + 1 + 1, 1 + 1 + 1)
    answers = [rounds, [Round()]]

    def rates(rule):
        found = stop_rules.points(answers, rule, t_draft=0.02, t_target=0.1)
        for *each, speed in found.values():
            assert speed == pytest.approx(specdecpp.throughput(*each, 0.02, 0.1))
        return {setting: row[:2] for setting, row in found.items()}

    assert rates("K")["3"] == pytest.approx((5 / 6, 5 / 6))
    # Disagreements at 1, 2, 3, and at 4, which is the last place.
    assert rates("oracle")[""] == pytest.approx((5 / 6, 0))
    assert specdecpp.oracle([each.agreed > 0 for each in rounds]) == 4


@pytest.mark.parametrize(
    "rule, setting, length",
    [
        ("confidence", 0.1, 5),  # never: more than all tokens
        ("entropy", 1.5, 3),
        ("head", 0.1, 3),
        ("head", 0.7, 5),
    ],
)
def test_lengths_by_hand(rule, setting, length):
    """Products of the head's: .95, .475, .4275. It judges a token only once the next
    one has been drafted.
    """
    each = Round([1] * 4, [0.8, 0.6, 0.2, 0.9], [0.2, 0.8, 1.7, 2.5], [0.95, 0.5, 0.9])
    assert stop_rules.RULES[rule][0](each, setting) == length


# ---------------------------------------------------------------------------- the sweep


def test_the_sweep_of_a_run(llama, drafter, recorded, tmp_path):
    arm = make_arm(llama, drafter)
    result = stop_rules.sweep(arm, [TURN])
    for rule in stop_rules.RULES:
        found = stop_rules.points([recorded], rule, t_draft=0.1, t_target=1.0)
        for setting, row in found.items():
            assert result["points"][rule][setting] == pytest.approx(row)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"sweep": result}))
    for ours, theirs in zip(*stop_rules.read(path), recorded, strict=True):
        assert repr(ours.tokens) == repr(theirs.tokens) and ours.agreed == theirs.agreed
        assert ours.confidence == pytest.approx(theirs.confidence, abs=6e-4)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=6e-3)
        assert ours.accepts == pytest.approx(theirs.accepts, abs=6e-4)


def test_arms_of_other_trees_than_chains_are_refused():
    said = "does not draft plain chains: take glide or specdecpp"
    for name in ("cape", "falcon", "specdecpp+cape", "glide:gamma=3+copies"):
        with refused(said):
            stop_rules.longest_chains(make_arm(None, None, name))
    stop_rules.longest_chains(make_arm(None, None, "specdecpp:threshold=0.5@a+b"))


def test_the_examples_of_the_docstring_run(capsys, monkeypatch):
    """Rules of your own, on the records in this repository."""
    monkeypatch.chdir(ROOT)
    _, code = stop_rules.__doc__.split("    import cape\n")
    code, _ = code.split("\nEach prints")
    exec("import cape\n" + textwrap.dedent(code), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        value, (low, high) = ast.literal_eval(line)
        assert 0.9 < low < value < high < 1.1


def test_a_sweep_is_recorded_and_shown(measured, monkeypatch, capsys, tmp_path):
    """Of sampled chains, whose drafter has no head."""
    monkeypatch.chdir(measured)
    file = tmp_path / "sweep.json"
    options = ("--num-prompts", "1", "--temperature", "1", "--json", str(file))
    stop_rules.main(command(*options))
    out = capsys.readouterr().out
    points = json.loads(file.read_text())["sweep"]["points"]
    assert len(stop_rules.read(file)) == 2  # the turns of a prompt
    assert set(points) == {"K", "confidence", "product", "entropy", "oracle"}
    n_target, n_discarded, speed = points["K"]["2"]
    row = f"| K | 2 | {n_target:.2f} | {n_discarded:.2f} | {speed:.2f} |"
    assert row in " ".join(out.split())


# ----------------------------------------------------------------- what a forward costs


def test_a_cost_curve_is_printed_and_written(measured, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "CONTEXT", 32)  # the target has a context of 256
    file = str(tmp_path / "costs.json")
    costs.main(["--target", str(measured / "target"), "--json", file])
    assert "at 32 tokens of context" in capsys.readouterr().out
    curve = json.loads(Path(file).read_text())["cost_curve"]
    assert list(curve["by_tokens"]) == list(map(str, costs.COUNTS))
    assert list(json.loads(Path(file).read_text())["reading"]) == ["256"]


def test_the_cost_of_a_forward_is_the_median_after_a_warm_up(llama, monkeypatch):
    took = itertools.cycle([9, 1, 5, 2, 4, 3])
    seconds = (second for each in took for second in (0, each))
    moments = itertools.accumulate(seconds)
    monkeypatch.setattr(costs, "clock", lambda _: next(moments))
    common.check_target(llama)  # its trial is no part of what is counted
    fed = []
    hook = llama.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    curve = costs.cost_curve(llama)
    hook.remove()
    assert curve["by_tokens"] == {str(count): 3000 for count in costs.COUNTS}
    assert fed == [count for count in costs.COUNTS for _ in range(6)]


def test_arms_are_timed_by_the_length_of_the_prompt(
    measured, monkeypatch, tmp_path, capsys
):
    """Every answer has all its tokens, although arms take over one another's cache."""
    monkeypatch.chdir(measured)
    file = tmp_path / "lengths.json"
    options = ["--lengths", "64", "90", "--num-prompts", "2", "--json", str(file)]
    lengths.main(command(*options))
    by_length = json.loads(file.read_text())["lengths"]
    assert list(by_length) == ["64", "90"]
    for found in by_length.values():
        assert found["plain"]["tau"] == 1 and found["plain"]["speedup"] == 1
        for arm in found.values():
            assert arm["by_prompt"]["tokens"] == [12, 12]
    noted = capsys.readouterr()
    assert "leaves greedy decoding" not in noted.err and "glide@glide" in noted.out
    with refused("prompt-lookup and assisted keep no cache"):
        lengths.main(command(method="prompt-lookup"))


def test_batches_are_timed_by_size(measured, monkeypatch, capsys):
    monkeypatch.chdir(measured)
    words = "--target target --prompts prompts.jsonl --max-new-tokens 6 --method"
    argv = [
        *words.split(),
        "glide@glide",
        "--json",
        "batches.json",
        "--sizes",
        "1",
        "2",
    ]
    batches.main(argv)
    assert "leaves greedy" not in capsys.readouterr().err
    sizes = json.loads(Path("batches.json").read_text())["sizes"]
    for size, count in (("1", 2), ("2", 1)):
        tokens = [arm["by_prompt"]["tokens"] for arm in sizes[size].values()]
        assert all(each == tokens[0] for each in tokens)
        assert len(tokens[0]) == count and sizes[size]["glide@glide"]["speedup"] > 0
    with refused("2 prompts fill no batch of 4"):
        batches.main([*argv, "4"])
    with refused("answer one at a time"):
        batches.main([*argv, "--method", "prompt-lookup"])
