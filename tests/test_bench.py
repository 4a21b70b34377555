"""bench.py on tiny random targets: protocol, figures, arms, command line, tables."""

import copy
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from chat import TURNS, command, refused
from tiny import make_glide, make_llama, untrained

import bench
import cape
import common
import falcon
import glide
from common import UserError
from support import cli, packed
from support.measuring import arms as arms_of
from support.measuring import report
from support.measuring.arms import Arm, plain_drafts, plain_loops
from support.measuring.report import Answer
from support.rivals import eagle

GREEDY = {"do_sample": False}
ASKED = [{"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)}]


@pytest.fixture(scope="module", autouse=True)
def here(measured):
    """The current folder has what command lines of chat.py name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(measured)
        yield


def parse(argv):
    return bench.command.read(bench.command.options(bench.__doc__), argv)


def run(capsys, argv):
    """The result of a run, and its output."""
    bench.main([*argv, "--json", "run.json"])
    with open("run.json") as file:
        return json.load(file), capsys.readouterr().out


@pytest.fixture(scope="module")
def loaded(measured):
    """The target of command lines and its tokenizer, without its saved settings."""
    target, tokenizer = common.load_target("target", dtype=torch.float64)
    cli.plain_settings(target)
    return target, tokenizer


def threes(decoding):
    """A method: it drafts token 3."""
    while not decoding.done:
        yield common.Draft(torch.tensor([3]), [-1])


def cheats_at(place):
    """A method that drafts token 3, and commits a wrong new token at `place`."""

    def drafts(decoding):
        length = decoding.ids.shape[1]
        for draft in threes(decoding):
            yield draft
            if decoding.ids.shape[1] - length == place + 1:
                decoding.ids[0, -1] = (decoding.ids[0, -1] + 1) % 48

    return drafts


# --------------------------------------------------------------------------- whole runs


def test_a_run_ends_with_the_promised_json_and_its_tables_can_be_printed_again(
    loaded, capsys
):
    arms = ["glide:gamma=3@glide", "glide:gamma=3+copies@glide", "lookup"]
    words = command("--max-new-tokens", "24", method=" ".join(arms))
    written, out = run(capsys, words)
    assert report.tables(written) in out and report.LEGEND in out
    promised = "target device dtype commit command prompts max_new_tokens temperature"
    assert {*promised.split(), "arms"} <= set(written)
    assert list(written["arms"]) == ["baseline", *arms]

    target, tokenizer = loaded
    asked = bench.encode(tokenizer, TURNS[0]["turns"][:1], "cpu")
    whole = target.generate(**asked, max_new_tokens=24, **GREEDY)
    plain = whole[0, asked["input_ids"].shape[1] :]
    promised = {*report.COLUMNS, "by_prompt"}
    promised |= {"drafted", "accepted"}
    for figures in written["arms"].values():
        assert promised <= set(figures) and figures["identical_to_greedy"] is True
        assert figures["answers"][0]["tokens"] == plain.tolist()
        assert [answer["prompt"] for answer in figures["answers"]] == [0, 0, 1]
        assert [answer["question_id"] for answer in figures["answers"]] == [1, 1, 2]
    ours, copying, lookup = (written["arms"][arm] for arm in arms)
    assert 0 <= ours["alpha"] <= 1 and ours["draft_ms"] > 0 and ours["verify_ms"] > 0
    assert copying["drafted"] > ours["drafted"]
    assert ours["settings"]["gamma"] == 3
    assert "copies" not in ours["settings"] and copying["settings"]["copies"] == 16
    assert lookup["settings"] == {"most": 16} and lookup["alpha"] is None


def test_sampled_answers_follow_from_the_seed_and_have_no_greedy_verdict(tmp_path):
    said = []
    for more in ([], [], ["--top-p", "0.5"]):
        torch.rand(3)
        options = ["--temperature", "1", "--num-prompts", "1", *more]
        arms = {"method": "glide@glide prompt-lookup"}
        bench.main(command(*options, "--json", str(tmp_path / "run"), **arms))
        found = json.loads((tmp_path / "run").read_text())["arms"]
        for arm in found.values():
            assert arm["identical_to_greedy"] is None and arm["diverged"] is None
        said.append([each["tokens"] for each in found["glide@glide"]["answers"]])
    assert said[0] == said[1]


def test_transformers_own_settings_are_none_of_ours():
    """Its default would sample among 50 tokens."""
    sampling = command("--temperature", "0.8", "--top-p", "0.9")
    expected = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    expected["max_new_tokens"] = 12
    assert bench.generate_options(parse(sampling)) == expected
    greedy = bench.generate_options(parse(command()))
    assert greedy == {"do_sample": False, "max_new_tokens": 12}


# ----------------------------------------------------------------------------- protocol


def conversation(loaded, seed=0):
    """What was asked and answered in a run of five arms; (arm, question) in order."""
    target, tokenizer = loaded
    order = []

    def arm_called(name, drafts):
        def noted(decoding):
            order.append((name, tokenizer.decode(decoding.ids[0])))
            return drafts(decoding)

        return Arm(name, target, noted)

    arms = [arm_called(name, plain_drafts) for name in ("first", "second")]
    arms += [arm_called(f"cheat {place}", cheats_at(place)) for place in (0, 1, 2)]
    options = GREEDY | {"max_new_tokens": 4}
    asked, answers = bench.ask(tokenizer, arms, TURNS, options, seed)
    return asked, answers, order


def test_every_arm_answers_every_turn_in_an_order_of_its_own(loaded):
    asked, answers, order = conversation(loaded)
    names = [name for name, _ in order]
    starts = range(5, 20, 5)  # after the warm-up
    rounds = [names[start : start + 5] for start in starts]
    assert len(order) == 20 and all(len(set(each)) == 5 for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3
    assert conversation(loaded)[2] == order
    assert conversation(loaded, seed=1)[2] != order

    # The earlier turns are the first arm's answers, whoever answers now.
    tokenizer = loaded[1]
    first = answers["first"]
    said = tokenizer.decode(first[0].tokens, skip_special_tokens=True)
    second = bench.encode(tokenizer, ["w1 w2", said, "w3"], "cpu")["input_ids"]
    assert torch.equal(asked[1]["input_ids"], second)
    assert {text for _, text in order[10:15]} == {tokenizer.decode(second[0])}
    assert {text for _, text in order[15:]} == {"<user> w4 w5 w6 <end> <assistant>"}
    others = [each.tokens for each in answers["second"]]
    assert others == [each.tokens for each in first]
    places = [(each.prompt, each.question_id) for each in first]
    assert places == [(0, 1), (0, 1), (1, 2)]


def compared(loaded, *arms, prompts=TURNS):
    """The part of a result that the answers of these arms make."""
    args = parse(command())
    target, tokenizer = loaded
    options = bench.generate_options(args)
    return bench.compare(args, target, target, tokenizer, arms, prompts, options)


def test_a_wrong_answer_is_reported_with_position_and_margin(loaded):
    arms = [Arm("late", loaded[0], cheats_at(5)), Arm("never", loaded[0], threes)]
    result = compared(loaded, *arms)
    late = result["arms"]["late"]
    assert late["identical_to_greedy"] is False and late["diverged"] == 3
    assert result["arms"]["never"]["identical_to_greedy"] is True
    gone = late["first_divergence"]
    assert (gone["question_id"], gone["position"]) == (1, 5) and gone["top2_margin"] > 0
    header = report.header(parse(command()), loaded[0])
    said = "late leaves greedy decoding in 3 answers, first in prompt 1 at new token 6"
    assert said in report.tables(header | result)


def test_where_answers_part_and_the_margin_there(llama):
    """By another token, by an early end, and by a late one."""
    ids = ASKED[0]["input_ids"]
    said = llama.generate(ids, max_new_tokens=5, **GREEDY)[0, 3:].tolist()
    reference = [Answer(tokens=said), Answer(tokens=said)]
    wrongs = (([*said[:2], 47, *said[3:]], 2), (said[:3], 3), ([*said, 1], 5))
    for wrong, place in wrongs:
        ours = [Answer(tokens=said, question_id=7), Answer(tokens=wrong, question_id=8)]
        found = bench.divergence(llama, ASKED * 2, ours, reference)
        text = torch.cat([ids, ids.new_tensor([said[:place]])], dim=1)
        best, second = llama(text).logits[0, -1].topk(2).values.tolist()
        margin = pytest.approx(best - second, rel=1e-4)
        assert not found["identical_to_greedy"] and found["diverged"] == 1
        first = {"question_id": 8, "position": place, "top2_margin": margin}
        assert found["first_divergence"] == first


def test_the_loops_of_transformers_are_counted(llama):
    """Assisted by a copy of the target, so that all drafts are right."""
    options = {**GREEDY, "max_new_tokens": 12}
    plain = bench.play(Arm("stock", llama), ASKED[0], options)
    assert plain.target_forwards == 12 and plain.drafted == 0
    arm = Arm("assisted", llama, kwargs={"assistant_model": copy.deepcopy(llama)})
    helped = bench.play(arm, ASKED[0], options)
    figures = report.figures([helped])
    assert helped.tokens == plain.tokens
    assert figures["forwards"] < 12 and figures["accepted"] == 12 - figures["forwards"]
    missed = figures["drafted"] - figures["accepted"]
    assert missed <= 1, "the last forward may lack its bonus token"
    assert figures["draft_ms"] is figures["verify_ms"] is figures["other_ms"] is None
    ours = bench.play(Arm("plain", llama, plain_drafts), ASKED[0], options)
    assert ours.tokens == plain.tokens and ours.target_forwards == 12


def test_drafting_and_verifying_are_timed_apart(llama, monkeypatch):
    """By a clock that shows a second more at each look, and ten more for each draft."""
    moments = itertools.count()
    monkeypatch.setattr(bench, "clock", lambda _: next(moments))

    def slowly(decoding):
        for draft in plain_drafts(decoding):
            for _ in range(10):
                next(moments)
            yield draft

    options = {**GREEDY, "max_new_tokens": 4}
    answer = bench.play(Arm("x", llama, slowly), ASKED[0], options)
    # A second after each round is no phase's, nor one before and after them all.
    assert answer.seconds == {"prefill": 11, "draft": 3 * 11, "verify": 4, "other": 6}


def test_alpha_is_that_of_the_answers_tokens_and_no_others(llama, monkeypatch):
    """A method whose alpha is the share of even ids shows which tokens count."""
    answers = [Answer(tokens=[2, 4, 6, 8, 10, 11, 12]), Answer(tokens=[1, 2])]
    asked = [{"input_ids": torch.tensor([ids])} for ids in ([1, 3, 5], [2, 2, 2, 2])]

    def acceptance(drafter, target, batch):
        assert batch.hidden.shape[:2] == batch.input_ids.shape
        counted = batch.input_ids[batch.loss_mask]
        return (counted % 2 == 0).sum(), len(counted)

    module = SimpleNamespace(acceptance=acceptance)
    arm = Arm("x", llama, module=module, drafter=SimpleNamespace(kv_layers=[]))
    assert bench.acceptance_rate(arm, asked, answers) == 7 / 9
    # Of many answers some are drawn, and not the first ones.
    monkeypatch.setattr(bench, "ALPHA_ANSWERS", 8)
    alpha = bench.acceptance_rate(
        arm, [asked[1]] * 20, answers[1:] * 8 + [Answer(tokens=[4])] * 12
    )
    assert 0.5 < alpha < 1


# ------------------------------------------------------------------------------ figures


def answered(tokens, prompt=0, **counted):
    """An Answer, by plain decoding unless it counts something else."""
    counted = {"target_forwards": tokens} | counted
    return Answer(prompt=prompt, tokens=list(range(tokens)), **counted)


def test_a_lack_of_memory_for_alpha_loses_no_figure(loaded, capsys):
    def acceptance(*given):
        raise torch.OutOfMemoryError("a long text")

    module, drafter = SimpleNamespace(acceptance=acceptance), make_glide(loaded[0])
    arm = Arm("x", loaded[0], plain_drafts, module, drafter)
    figures = compared(loaded, arm)["arms"]["x"]
    assert figures["alpha"] is None and figures["tau"] == 1
    assert "no memory for alpha of x" in capsys.readouterr().err


def took(seconds, prompt=0):
    """Ten tokens by plain decoding."""
    return answered(10, prompt, seconds=Counter(other=seconds))


def test_figures_of_a_hand_worked_case():
    seconds = Counter(prefill=0.2, draft=0.15, verify=0.5, other=0.15)
    first = {"target_forwards": 4, "drafted": 12, "seconds": seconds}
    first = answered(10, **first, offered=[3, 3, 3, 3], accepted=[3, 0, 2, 1])
    seconds = Counter(prefill=0.8, draft=0.45, verify=0.5, other=0.25)
    second = {"target_forwards": 4, "drafted": 9, "seconds": seconds}
    second = answered(6, 1, **second, offered=[3, 3, 3, 0], accepted=[0, 1, 1, 0])
    got = report.figures([first, second])
    assert got["tokens_per_s"] == pytest.approx(16 / 3)
    assert got["tau"] == 2.0
    assert (got["drafted"], got["accepted"]) == (21, 8)
    assert got["n_discarded_per_token"] == (21 - 8) / 16
    # 8 verifications and 6 drafts, as the first of an answer is part of the prefill
    assert got["draft_ms"] == pytest.approx(100)
    assert got["verify_ms"] == pytest.approx(125)
    assert got["other_ms"] == pytest.approx(1000 * 0.4 / 8)
    seconds = pytest.approx([1.0, 2.0])
    by_prompt = {"tokens": [10, 6], "seconds": seconds, "forwards": [4, 4]}
    assert got["by_prompt"] == by_prompt
    told = {"target_forwards": 4, "drafted": 12, "offered": [3, 3, 3, 3]}
    assert told.items() <= got["answers"][0].items()


def test_the_baseline_is_the_fastest_plain_decoding(llama):
    """Whoever it is; and every arm is also compared with stock transformers."""
    target = packed.pack(make_llama().float())
    loops = plain_loops(llama, target)
    seconds = {"stock": 8.0, "transformers": 8.0, "plain": 8.0}
    assert [loop.name for loop in loops] == list(seconds)
    for fastest in seconds:
        each = seconds | {fastest: 4.0, "x": 1.0}
        answers = {name: [took(each[name])] for name in each}
        found = bench.summary([Arm("x", target)], loops, ASKED, answers, greedy=True)
        assert list(found) == ["baseline", "x"] and found["baseline"]["loop"] == fastest
        assert found["baseline"]["tokens_per_s"] == 2.5 and found["x"]["speedup"] == 4.0
        assert found["baseline"]["vs_stock"] == each["stock"] / 4
        assert found["x"]["vs_stock"] == each["stock"]
        for name, told in found["baseline"]["loops"].items():
            assert told["tokens_per_s"] == 10 / each[name]
            assert told["vs_stock"] == each["stock"] / each[name]


def test_stock_transformers_on_the_target_as_loaded_is_always_a_candidate(
    capsys, monkeypatch
):
    """No packed layer may be in it, whatever else the run decodes with."""
    monkeypatch.setattr(packed, "fastest", lambda *_: ("linear", "linear"))
    argv = command("--dtype", "float32", method="lookup")
    result, _ = run(capsys, argv)
    assert result["kernels"] == ["linear", "linear"]
    told = result["arms"]["baseline"]["loops"]
    assert {"stock", "transformers", "plain"} <= told.keys()  # two of the packed target

    loaded, target, _ = bench.load(parse(argv))
    stock, *others = plain_loops(loaded, target)
    assert stock.drafts is None
    layers = [type(module) for module in stock.target.modules()]
    assert torch.nn.Linear in layers and packed.PackedLinear not in layers
    for loop in others:
        assert any(isinstance(m, packed.PackedLinear) for m in loop.target.modules())


# ---------------------------------------------------------------------------- intervals


def paired(ours, theirs, prompts=None):
    """The interval of answers of 10 tokens that took these seconds."""
    figures = []
    for seconds in (ours, theirs):
        answers = list(map(took, seconds, prompts or range(len(seconds))))
        figures.append(report.figures(answers)["by_prompt"])
    return report.paired(*figures)


def test_an_interval_by_hand():
    assert paired([1, 2, 3, 4], [2, 2, 2, 2]) == (0.8, None)  # too few prompts
    # All draws of five prompts out of five, of which 95% lie within.
    draws = itertools.product([1, 2, 3, 4, 5], repeat=5)
    draws = sorted(3 * 5 / sum(draw) for draw in draws)
    within = [draws[len(draws) * 25 // 1000], draws[len(draws) * 975 // 1000]]
    assert paired([1, 2, 3, 4, 5], [3] * 5) == (1, pytest.approx(within, rel=0.03))
    # Five prompts of two unequal turns, which are redrawn together: always one ratio.
    prompts = [n // 2 for n in range(10)]
    assert paired([1.0, 4.0] * 5, [5.0] * 10, prompts) == (2, pytest.approx([2, 2]))
    # Prompts of very different speeds, one arm always 1.5 times the other.
    seconds = [0.1, 1.0, 3.0, 20.0, 7.0]
    ratio, interval = paired([s / 1.5 for s in seconds], seconds)
    assert [ratio, *interval] == pytest.approx([1.5, 1.5, 1.5])


# --------------------------------------------------------------------------------- arms


def parts(text):
    """What an arm's text says, without what most texts leave out."""
    said = arms_of.parse(text)._asdict()
    if said["base"] == said["name"]:
        del said["base"]
    if said["window"] == {"window": common.WINDOW}:
        del said["window"]
    return {name: value for name, value in said.items() if value}


CAPE = {"name": "cape", "base": "glide", "chain": {"gamma": 4}}
SIZES = {"changes": {"sizes": [2, 1, 1, 0]}}
FIXED = {"name": "cape", "base": "specdecpp"}
COPYING = {"copies": True, "folder": "a"}
ARMS = {
    "glide@a/b+c": {"name": "glide", "folder": "a/b+c"},
    "glide:gamma=2+copies@a": {"name": "glide", "changes": {"gamma": 2}} | COPYING,
    "eagle:tree=+copies@a": {"name": "eagle", "changes": {"tree": []}} | COPYING,
    "glide:window=64": {"name": "glide", "window": {"window": 64}},
    "cape:window=none": CAPE | {"window": {"window": None}},
    "cape": CAPE,
    "cape:sizes=2-1-1-0": CAPE | SIZES,
    "cape:sizes=3,bounds=": CAPE | {"changes": {"sizes": [3], "bounds": []}},
    "cape:cpu": CAPE | SIZES | {"chain": {"gamma": 3}},
    "cape:cpu,gamma=2": CAPE | SIZES | {"chain": {"gamma": 2}},
    "specdecpp+cape:stop=fixed+copies": FIXED
    | {"chain": {"gamma": 4, "stop": "fixed"}, "copies": True},
    "specdecpp+cape:K2,cpu,gamma=5": FIXED
    | SIZES
    | {"chain": {"gamma": 5, "stop": "fixed"}},
    "specdecpp:threshold=.5": {"name": "specdecpp", "changes": {"threshold": 0.5}},
    "beam:width=8": {"name": "beam", "base": "glide", "changes": {"width": 8}},
}


def test_the_text_of_an_arm():
    assert {text: parts(text) for text in ARMS} == ARMS


def chain_of(arm, **options):
    """The first draft of an arm after ASKED, greedily."""
    options = {**GREEDY, "max_new_tokens": 12} | options
    return next(arm.drafts(common.start(arm.target, **ASKED[0], **options)))


def test_arms_draft_as_they_are_told(loaded):
    texts = [
        "glide@glide",
        "glide:gamma=2@glide",
        "cape:sizes=1,bounds=@glide",
        "specdecpp+cape:stop=fixed,gamma=2,sizes=3,bounds=@specdecpp",
        "glide:gamma=2+copies@glide",
        "lookup",
    ]
    target, _ = loaded
    made = arms_of.make_arms([*texts, texts[0]], target)
    assert [arm.name for arm in made] == texts
    plain, short, expanded, other, copying, lookup = made
    assert plain.module is glide and isinstance(plain.drafter, glide.Drafter)
    assert short.drafter is plain.drafter  # read once
    window = {"window": common.WINDOW}
    assert plain.settings == {"gamma": 3} | window
    assert short.settings == {"gamma": 2} | window
    assert len(chain_of(plain).tokens) == 3 and len(chain_of(short).tokens) == 2

    assert expanded.module is other.module is cape and expanded.drafter is None
    own = {"sizes": [1], "bounds": []}
    assert expanded.settings == {"base": "glide", "gamma": 4} | own | window
    assert chain_of(expanded).parents == [-1, 0, 1, 2, -1, 0, 1, 2]
    assert torch.equal(chain_of(expanded).tokens[:3], chain_of(plain).tokens)
    assert other.settings["base"] == "specdecpp" and other.settings["stop"] == "fixed"
    assert chain_of(other).parents == [-1, 0, -1, -1, -1, 0, 0, 0]

    assert copying.settings == {"gamma": 2, "copies": 16} | window
    repeating = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7]])}
    decoding = common.start(target, **repeating, max_new_tokens=12, **GREEDY)
    draft = next(copying.drafts(decoding))
    assert len(draft.tokens) > 2 and draft.notes["copied"] == len(draft.tokens) - 2
    assert lookup.settings == {"most": 16} and lookup.drafter is None


def test_settings_and_a_window_reach_the_drafts(loaded, monkeypatch):
    seen = []
    monkeypatch.setattr(glide, "drafts", lambda *_, **given: seen.append(given))
    texts = ["glide:gamma=2,window=64@glide", "cape:window=none@glide"]
    for arm in arms_of.make_arms(texts, loaded[0]):
        arm.drafts(None)
    assert seen == [{"gamma": 2, "window": 64}, {"gamma": 4, "window": None}]


def test_eagle_has_a_drafter_and_a_file_of_its_own(loaded, tmp_path):
    target, _ = loaded
    for module, name in ((falcon, "falcon"), (eagle, "eagle")):
        untrained(module, target).save_pretrained(tmp_path / name)
    texts = ["falcon", "eagle", "eagle:chain+copies"]
    made = arms_of.make_arms(texts, target, shipped=tmp_path)
    assert [arm.module for arm in made] == [falcon, eagle, eagle]
    others = {"window": common.WINDOW, "copies": 16}
    assert made[2].settings == falcon.VARIANTS["chain"] | others
    assert [chain_of(arm).notes["k"] for arm in made] == [2, 1, 1]
    assert chain_of(made[2]).parents == [-1, 0, 1, 2]
    with refused("holds no eagle drafter"):
        arms_of.make_arms([f"eagle@{tmp_path}/falcon"], target, shipped=tmp_path)


def raising(problem, when):
    """Plain decoding that raises a problem; when: a function of the number of the turn,
    of which the first is the warm-up, and of the text.
    """
    turns = itertools.count()

    def drafts(decoding):
        if when(next(turns), decoding.ids):
            raise problem
        return plain_drafts(decoding)

    return drafts


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")], ids=repr
)
def test_an_interrupted_run_says_so_and_keeps_whole_turns(loaded, problem):
    """So does one that lacks memory."""

    def ran(turn):
        drafts = raising(problem, lambda number, _: number == turn)
        return compared(loaded, Arm("x", loaded[0], drafts))

    result = ran(2)
    assert result["interrupted"] is True
    assert [arm["tokens"] for arm in result["arms"].values()] == [12, 12]
    header = report.header(parse(command()), loaded[0])
    assert "; some turns not answered" in report.tables(header | result)
    with pytest.raises(type(problem)):
        ran(1)
    assert "interrupted" not in ran(9)


def test_a_prompt_that_is_too_long_is_left_out_and_the_others_stay(loaded, capsys):
    """Also the first one, because the warm-up asks the shortest."""
    long = {"question_id": 7, "turns": ["word " * 200]}
    first = raising(UserError("too long"), lambda number, _: number == 1)
    by_length = raising(UserError("too long"), lambda _, ids: ids.shape[1] > 100)
    for drafts, asked, left_out in ((first, TURNS, 1), (by_length, [long, *TURNS], 7)):
        result = compared(loaded, Arm("x", loaded[0], drafts), prompts=asked)
        assert result["prompts"] == len(asked) - 1
        said = f"prompt {left_out} was not answered in full: too long"
        assert said in capsys.readouterr().err


def test_a_small_margin_is_no_tie():
    assert report.rounded([3e-5, 1.23456789, float("nan")]) == [3e-5, 1.23457, None]


MISTAKES = [
    ("", "nothing to do"),
    ("--method glide:nope", r"glide has no variant 'nope' \(it has paper\)"),
    ("--method cape:nope", r"'nope' \(it has paper, none, fixed, cpu\)"),
    ("--method glide:width=3", "decoding cannot change width: it can change gamma"),
    ("--method glide:gamma=x", "gamma 'x': take an int of at least 0"),
    ("--method cape:sizes=2-x", "'sizes=2-x': write a list as numbers"),
    ("--method cape:sizes=2-1", "one size more than bounds"),
    ("--method glide:=3", "glide has no variant ''"),
    ("--method falcon+copies:depth=3", "falcon[+]copies:depth=3 is not an arm"),
    ("--method +glide", "[+]glide is not an arm"),
    ("--method glide@runs/x+copies", "write [+]copies before @DIR"),
    ("--method falcon+cape", r"write \[BASE\+\]NAME\[:SETTINGS\]\[\+copies\]\[@DIR\]"),
    ("--method glide+lookup", "BASE is glide or specdecpp, only for cape"),
    # Arms are read before the target.
    ("--method flacon --target /nowhere", "unknown method 'flacon': take glide"),
    ("--method glide@/nowhere", "no drafter in /nowhere"),
    ("--method lookup@glide", "lookup has no weights: leave out @glide"),
    ("--method glide@glide --max-new-tokens 300", "than the 256 positions of the"),
    ("--method glide --prompts /nowhere.jsonl", "cannot read /nowhere.jsonl"),
    ("--method glide --prompt x", "--prompt: not allowed with argument --prompts"),
    ("--method glide --top-p 0.5", "--top-p needs a --temperature"),
    ("--method glide --json /dev/null", "cannot write /dev/null: name a file in"),
    ("--method glide --json nowhere/run.json", "cannot write nowhere/run.json: name a"),
]


@pytest.mark.parametrize("argv, message", MISTAKES)
def test_a_mistake_is_explained(argv, message):
    with refused(message):
        bench.main(["--target", "target", "--prompts", "prompts.jsonl", *argv.split()])


def test_results_can_be_printed_and_say_where_they_come_from():
    for path in (cli.ROOT / "results").glob("cpu_*.json"):
        result = json.loads(path.read_text())
        assert report.tables(result)
        for key in ("target", "device", "dtype", "commit", "command", "versions"):
            assert result[key], path
        text = path.read_text()
        assert not any(f"/{name}/" in text for name in ("root", "home", "work", "tmp"))
