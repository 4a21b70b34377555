"""bench.py on tiny random targets: protocol, figures, arms, the command line and its tables."""

import copy
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import chat
import pytest
import torch
from tiny import make_llama

import bench
import cape
import common
import glide
from common import UserError
from support import arms as arms_of
from support import cli, packed, report
from support.arms import Arm, plain_arm, plain_loops

ROOT = Path(bench.__file__).parent
TURNS = [
    {"question_id": 1, "category": "talk", "turns": ["w1 w2", "w3"]},
    {"question_id": 2, "category": "sums", "turns": ["w4 w5 w6"]},
]
GREEDY = {"do_sample": False}
ASKED = [{"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)}]


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """The current folder: a target with 48 words, a GLIDE drafter for it, and a prompt file."""
    folder = tmp_path_factory.mktemp("bench")
    chat.make_chat(folder / "target")
    target = make_llama(layers=2, max_position_embeddings=256)  # without an end token
    target.save_pretrained(folder / "target")
    config = glide.Config(intermediate_size=48, draft_vocab=0)
    glide.build(config, target, torch.arange(48)).save_pretrained(folder / "glide")
    lines = [json.dumps(prompt) for prompt in TURNS]
    (folder / "prompts.jsonl").write_text("\n\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def command(*extra, method="glide@glide"):
    """A command line for the target and prompts of `files`."""
    words = f"--method {method} --target target --dtype float64 --prompts prompts.jsonl"
    return [*words.split(), "--max-new-tokens", "12", *extra]


def run(capsys, argv):
    """The result of a run, read from the last line of its output, and the output."""
    bench.main(argv)
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


def load(**options):
    """Target, tokenizer and options of a command line."""
    args = bench.parse(command(**options))
    return *common.load_target(args.target, dtype=torch.float64), args


@pytest.fixture
def fake(monkeypatch):
    """A method without weights: it drafts token 3, and cheats at new token `wrong`."""

    @dataclass
    class Config:
        wrong: int = common.option(-1, "where to cheat", decode=True)

    def drafts(decoding, config):
        length = decoding.ids.shape[1]
        while not decoding.done:
            yield common.Draft(torch.tensor([3]), torch.tensor([-1]))
            if decoding.ids.shape[1] - length == config.wrong + 1:
                decoding.ids[0, -1] = (decoding.ids[0, -1] + 1) % 48

    module = SimpleNamespace(Config=Config, VARIANTS={"late": {"wrong": 5}}, drafts=drafts)
    real = cli.import_method
    monkeypatch.setattr(cli, "import_method", lambda name: module if name == "fake" else real(name))
    return module


@pytest.fixture
def played(monkeypatch):
    """Records the calls of `bench.play`; Ctrl-C is pressed at call number `interrupt`."""
    real = bench.play
    record = SimpleNamespace(calls=[], interrupt=None)

    def play(arm, asked, options):
        record.calls.append((arm, asked, dict(options)))
        if len(record.calls) == record.interrupt:
            raise KeyboardInterrupt
        return real(arm, asked, options)

    monkeypatch.setattr(bench, "play", play)
    return record


# --------------------------------------------------------------------------------- whole runs


def test_a_run_ends_with_the_promised_json_and_its_tables_can_be_printed_again(capsys, tmp_path):
    file = tmp_path / "r.json"
    options = ("--gamma", "3", "--json", str(file), "--max-new-tokens", "24")
    arms = "glide@glide glide+copies@glide lookup"
    last_line, out = run(capsys, command(*options, method=arms))
    bench.main(["--table", str(file)])
    assert capsys.readouterr().out.strip() in out and report.LEGEND in out
    written = json.loads(file.read_text())
    assert written.keys() == last_line.keys()
    promised = "target device dtype commit command prompts max_new_tokens temperature arms"
    assert set(promised.split()) <= set(written)
    assert list(written["arms"]) == ["baseline", "glide@glide", "glide+copies@glide", "lookup"]

    target, tokenizer, _ = load()
    asked = bench.encode(tokenizer, TURNS[0]["turns"][:1], "cpu")
    plain = target.generate(**asked, max_new_tokens=24, **GREEDY)[0, asked["input_ids"].shape[1] :]
    promised = {*report.COLUMNS, "acceptance_by_position", "by_prompt", "drafted", "accepted"}
    for figures in written["arms"].values():
        assert promised <= set(figures) and figures["identical_to_greedy"] is True
        assert figures["answers"][0]["tokens"] == plain.tolist()
        assert [answer["prompt"] for answer in figures["answers"]] == [0, 0, 1]
    ours = written["arms"]["glide@glide"]
    assert len(ours["acceptance_by_position"]) == 3 and ours["settings"]["gamma"] == 3
    assert 0 <= ours["alpha"] <= 1 and ours["draft_ms"] > 0 and ours["verify_ms"] > 0
    assert written["arms"]["glide+copies@glide"]["drafted"] > ours["drafted"]


def test_the_json_is_left_out_on_a_terminal(capsys, monkeypatch):
    argv = ["--cost-curve", "--target", "target"]
    result, _ = run(capsys, argv)
    assert list(result["cost_curve"]["by_tokens"]) == list(map(str, bench.COUNTS))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    bench.main(argv)
    assert "{" not in capsys.readouterr().out


def test_the_cost_of_a_forward_is_the_median_after_a_warm_up(llama, monkeypatch):
    seconds = (second for took in itertools.cycle([9, 1, 5, 2, 4, 3]) for second in (0, took))
    moments = itertools.accumulate(seconds)
    monkeypatch.setattr(bench, "clock", lambda _: next(moments))
    fed = []
    hook = llama.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    curve = bench.cost_curve(llama)
    hook.remove()
    assert curve["by_tokens"] == {str(count): 3000 for count in bench.COUNTS}
    assert fed == [count for count in bench.COUNTS for _ in range(6)]


def test_sampling_has_no_greedy_verdict_and_is_cut_by_top_p_alone(capsys, played):
    sampling = ["--temperature", "0.8", "--top-p", "0.9", "--num-prompts", "1"]
    result, _ = run(capsys, command(*sampling))
    for arm in result["arms"].values():
        assert arm["identical_to_greedy"] is None and arm["diverged"] is None
    for _, _, options in played.calls:  # transformers' own default would keep 50 tokens
        del options["max_new_tokens"]
        assert options == {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}


def test_a_sweep_is_measured_and_shown(capsys):
    result, out = run(capsys, command("--sweep", "--num-prompts", "1"))
    points = result["sweep"]["points"]
    assert set(points) == {"K", "confidence", "entropy", "oracle"}
    n_target, n_discarded, speed = points["K"]["2"]
    row = f"| K | 2 | {n_target:.2f} | {n_discarded:.2f} | {speed:.1f} |"
    assert row in " ".join(out.split())


def test_batches_are_measured_and_filled(capsys):
    result, out = run(capsys, command("--batch-size", "2"))
    batch = result["batch"]
    assert (batch["size"], batch["batches"]) == (2, 1) and "arms" not in result
    ours = batch["arms"]["glide@glide"]
    assert ours["identical_to_greedy"] and ours["tau"] > 1 and ours["tokens"] == 36
    assert ours["draft_ms"] is None and ours["speedup_ci"] is None
    assert set(batch["arms"]["baseline"]["loops"]) == {"stock", "one by one", "plain"}
    assert "1 batches of 2" in out
    copying = command("--batch-size", "2", method="glide+copies@glide")
    copies = run(capsys, copying)[0]["batch"]["arms"]["glide+copies@glide"]
    assert copies["identical_to_greedy"] and copies["drafted"] != ours["drafted"]


# ----------------------------------------------------------------------------------- protocol


def conversation(fake, played, seed=0):
    """The turns of a run of five arms, and (arm, question) in the order of playing."""
    target, tokenizer, _ = load()
    arms = plain_loops(target, target)
    for wrong in (-1, 0, 1):
        arms.append(Arm(f"fake{wrong}", target, fake, {"config": fake.Config(wrong=wrong)}))
    options = {**GREEDY, "max_new_tokens": 4}
    groups = [[prompt] for prompt in TURNS]
    played.calls = []
    turns = bench.run(tokenizer, arms, groups, options, seed)
    order = []
    for arm, asked, _ in played.calls:
        order.append((arm.name, tokenizer.decode(asked[0]["input_ids"][0])))
    return turns, order


def test_every_arm_answers_every_turn_in_an_order_of_its_own(fake, played):
    turns, order = conversation(fake, played)
    names = [name for name, _ in order]
    rounds = [names[start : start + 5] for start in range(5, 20, 5)]  # after the warm-up
    assert len(order) == 20 and all(len(set(each)) == 5 for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3
    assert conversation(fake, played)[1] == order
    assert conversation(fake, played, seed=1)[1] != order

    # The earlier turns are the first arm's answers, whoever answers now.
    _, tokenizer, _ = load()
    said = tokenizer.decode(turns[0].answers["stock"].rows[0], skip_special_tokens=True)
    second = bench.encode(tokenizer, ["w1 w2", said, "w3"], "cpu")["input_ids"][0]
    assert {text for _, text in order[10:15]} == {tokenizer.decode(second)}
    assert {text for _, text in order[15:]} == {"<user> w4 w5 w6 <end> <assistant>"}
    assert turns[0].answers["plain"].rows == turns[0].answers["stock"].rows
    assert [turn.prompt for turn in turns] == [0, 0, 1]


def test_a_wrong_answer_is_reported_with_position_and_margin(fake, capsys):
    result, out = run(capsys, command(method="fake:late fake"))
    late = result["arms"]["fake:late"]
    assert late["identical_to_greedy"] is False and late["diverged"] == 3
    assert result["arms"]["fake"]["identical_to_greedy"] is True
    gone = late["first_divergence"]
    assert (gone["question_id"], gone["position"]) == (1, 5) and gone["top2_margin"] > 0
    assert "first in prompt 1 at new token 6" in out and late["alpha"] is None


def test_where_answers_part_and_the_margin_there(llama):
    """By another token, by an early end, and by a late one."""
    ids = ASKED[0]["input_ids"]
    said = llama.generate(ids, max_new_tokens=5, **GREEDY)[0, 3:].tolist()
    for wrong, place in (([*said[:2], 47, *said[3:]], 2), (said[:3], 3), ([*said, 1], 5)):
        answers = {"x": bench.Answer([said, wrong], 1, []), "y": bench.Answer([said, said], 1, [])}
        turns = [bench.Turn(0, [7, 8], ASKED * 2, answers)]
        found = bench.divergence("x", Arm("y", llama), turns)
        text = torch.cat([ids, ids.new_tensor([said[:place]])], dim=1)
        best, second = llama(text).logits[0, -1].topk(2).values.tolist()
        margin = pytest.approx(best - second, rel=1e-4)
        assert not found["identical_to_greedy"] and found["diverged"] == 1
        first = {"question_id": 8, "position": place, "top2_margin": margin}
        assert found["first_divergence"] == first


def test_the_loops_of_transformers_are_counted(llama):
    """Assisted by a copy of the target, so that all drafts are right."""
    options = {**GREEDY, "max_new_tokens": 12}
    plain = bench.play(Arm("stock", llama), ASKED, options)
    assert plain.stats[0].target_forwards == 12 and plain.stats[0].drafted == 0
    arm = Arm("assisted", llama, kwargs={"assistant_model": copy.deepcopy(llama)})
    helped = bench.play(arm, ASKED, options)
    figures = report.figures(arm, turns_of(assisted=[helped]))
    assert helped.rows == plain.rows
    assert figures["forwards"] < 12 and figures["accepted"] == 12 - figures["forwards"]
    missed = figures["drafted"] - figures["accepted"]
    assert missed <= 1, "the last forward may lack its bonus token"
    assert figures["accepted_per_round"] == pytest.approx(figures["tau"] - 1)
    assert figures["draft_ms"] is figures["verify_ms"] is figures["other_ms"] is None
    ours = bench.play(plain_arm(llama), ASKED, options)
    assert ours.rows == plain.rows and ours.stats[0].target_forwards == 12


def test_alpha_is_that_of_the_answers_tokens_and_no_others(llama):
    """A method whose alpha is the share of even ids shows which tokens count."""
    rows = [[2, 4, 6, 8, 10, 11, 12], [1, 2]]
    prompts = [torch.tensor([[1, 3, 5]]), torch.tensor([[2, 2, 2, 2]])]
    turns = []
    for number, (prompt, row) in enumerate(zip(prompts, rows)):
        answers = {"plain": bench.Answer([row], 1.0, [])}
        turns.append(bench.Turn(number, [number], [{"input_ids": prompt}], answers))

    def acceptance(drafter, target, batch):
        assert batch.hidden.shape[:2] == batch.input_ids.shape
        counted = batch.input_ids[batch.loss_mask]
        return (counted % 2 == 0).sum(), len(counted)

    module = SimpleNamespace(acceptance=acceptance)
    drafter = SimpleNamespace(kv_layers=[])
    arm = Arm("x", llama, module)
    assert bench.acceptance_rate(arm, drafter, turns, "plain") == 7 / 9


# ------------------------------------------------------------------------------------ figures


def answer(tokens, wall, **counts):
    """An Answer of so many tokens; plain decoding unless told otherwise."""
    stats = common.Stats(**{"target_forwards": tokens, **counts})
    return bench.Answer([list(range(tokens))], wall, [stats])


def turns_of(prompts=None, **answers):
    """Turns of arms NAME=[an Answer for each turn], each turn a prompt unless told otherwise."""
    turns = []
    for number, row in enumerate(zip(*answers.values())):
        played = dict(zip(answers, row))
        prompt = prompts[number] if prompts else number
        turns.append(bench.Turn(prompt, [prompt], [], played))
    return turns


def test_figures_of_a_hand_worked_case():
    seconds = {"prefill": 0.2, "draft": 0.15, "verify": 0.5}
    rounds = {"target_forwards": 4, "offered": [3, 3, 3, 3], "accepted": [3, 0, 2, 1]}
    first = answer(10, 1.0, seconds=seconds, drafted=12, **rounds)
    seconds = {"prefill": 0.8, "draft": 0.45, "verify": 0.5}
    rounds = {"target_forwards": 4, "offered": [3, 3, 3, 0], "accepted": [0, 1, 1, 0]}
    second = answer(6, 2.0, seconds=seconds, drafted=9, **rounds)
    turns = turns_of(x=[first, second])
    got = report.figures(Arm("x", None, copies=16), turns)
    assert got["tokens_per_s"] == 16 / 3
    assert (got["tau"], got["accepted_per_round"], got["n_target_per_token"]) == (2.0, 1.0, 0.5)
    assert (got["drafted"], got["accepted"]) == (21, 8)
    assert got["n_discarded_per_token"] == (21 - 8) / 16
    # 5, 2 and 1 of the 7 rounds that offered as much
    assert got["acceptance_by_position"] == [5 / 7, 2 / 7, 1 / 7]
    # 8 verifications and 6 drafts, as the first of an answer is part of the prefill
    assert got["draft_ms"] == pytest.approx(100) and got["verify_ms"] == pytest.approx(125)
    assert got["other_ms"] == pytest.approx(1000 * (3 - 2.6) / 8)
    assert got["settings"] == {"copies": 16}
    assert got["by_prompt"] == {"tokens": [10, 6], "seconds": [1.0, 2.0], "forwards": [4, 4]}


def test_the_baseline_is_the_fastest_plain_decoding(llama):
    """Whoever it is; and every arm is also compared with stock transformers."""
    target = packed.pack(make_llama().float())
    loops = plain_loops(llama, target)
    seconds = {"stock": 8.0, "transformers": 8.0, "plain": 8.0}
    assert [loop.name for loop in loops] == list(seconds)
    for fastest in seconds:
        took = seconds | {fastest: 4.0}
        turns = turns_of(x=[answer(10, 1.0)], **{name: [answer(10, s)] for name, s in took.items()})
        found = bench.summary([Arm("x", target)], loops, turns, greedy=True)
        assert list(found) == ["baseline", "x"] and found["baseline"]["loop"] == fastest
        assert found["baseline"]["tokens_per_s"] == 2.5 and found["x"]["speedup"] == 4.0
        assert found["baseline"]["vs_stock"] == took["stock"] / 4
        assert found["x"]["vs_stock"] == took["stock"]
        for name, told in found["baseline"]["loops"].items():
            assert told["tokens_per_s"] == 10 / took[name]
            assert told["vs_stock"] == took["stock"] / took[name]


def test_stock_transformers_on_the_target_as_loaded_is_always_a_candidate(capsys, monkeypatch):
    """No packed layer may be in it, whatever else the run decodes with."""
    seen = []
    real = bench.plain_loops
    monkeypatch.setattr(bench, "plain_loops", lambda *a: seen.append(real(*a)) or seen[-1])
    for size in ("1", "2"):
        argv = command("--batch-size", size, "--kernel", "linear", method="lookup")
        result, _ = run(capsys, [*argv, "--dtype", "float32"])
        assert result["kernels"] == ["linear", "linear"]
        stock, *others = seen.pop()
        assert (stock.module, stock.padded) == (None, size == "2")
        layers = [type(module) for module in stock.target.modules()]
        assert torch.nn.Linear in layers and packed.PackedLinear not in layers
        for loop in others:
            assert any(isinstance(m, packed.PackedLinear) for m in loop.target.modules())
        told = (result.get("arms") or result["batch"]["arms"])["baseline"]["loops"]
        assert {"stock", "transformers", "plain"} <= told.keys()


# ---------------------------------------------------------------------------------- intervals


def paired(ours, theirs, prompts=None):
    """The interval of answers of 10 tokens that took these seconds."""
    played = {"x": [answer(10, s) for s in ours], "plain": [answer(10, s) for s in theirs]}
    turns = turns_of(prompts=prompts, **played)
    figures = [report.figures(Arm(name, None), turns)["by_prompt"] for name in played]
    return report.paired(*figures)


def test_an_interval_by_hand():
    assert paired([1, 2, 3, 4], [2, 2, 2, 2]) == (0.8, None)  # too few prompts
    # All draws of five prompts out of five, of which 95% lie within.
    draws = sorted(3 * 5 / sum(draw) for draw in itertools.product([1, 2, 3, 4, 5], repeat=5))
    within = [draws[len(draws) * 25 // 1000], draws[len(draws) * 975 // 1000]]
    assert paired([1, 2, 3, 4, 5], [3] * 5) == (1, pytest.approx(within, rel=0.03))
    # Five prompts of two unequal turns, which are redrawn together: always the same ratio.
    prompts = [n // 2 for n in range(10)]
    assert paired([1.0, 4.0] * 5, [5.0] * 10, prompts) == (2, pytest.approx([2, 2]))
    # Prompts of very different speeds, one arm always 1.5 times the other.
    seconds = [0.1, 1.0, 3.0, 20.0, 7.0]
    ratio, interval = paired([s / 1.5 for s in seconds], seconds)
    assert [ratio, *interval] == pytest.approx([1.5, 1.5, 1.5])


# --------------------------------------------------------------------------------------- arms


def test_an_arm_is_a_method_with_variants_copies_and_a_folder(fake):
    words = "glide@glide glide:gamma2+copies@glide cape@glide fake:late lookup"
    target, _, args = load(method=words)
    plain, other, ours, late, lookup = arms_of.make_arms(target, args)
    assert plain.name == "glide@glide" and plain.module is glide and plain.copies == 0
    assert plain.kwargs["config"] == plain.kwargs["drafter"].config
    assert (other.name, other.copies) == ("glide:gamma2+copies@glide", 16)
    assert other.kwargs["drafter"] is plain.kwargs["drafter"]  # read once
    assert (other.kwargs["config"].gamma, plain.kwargs["config"].gamma) == (2, 5)
    assert ours.kwargs["base"] is glide and ours.kwargs["base_drafter"] is plain.kwargs["drafter"]
    assert isinstance(ours.kwargs["config"], cape.Config) and ours.kwargs["config"].gamma == 4
    assert late.kwargs["config"].wrong == 5 and set(lookup.kwargs) == {"config"}
    for args.gamma in (0, 4):  # as --gamma 4 would set it
        plain, other, *_ = arms_of.make_arms(target, args)
        assert (plain.kwargs["config"].gamma, other.kwargs["config"].gamma) == (args.gamma, 2)


def test_all_takes_what_has_a_drafter_for_this_target(files, capsys, monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "glide").symlink_to(files / "glide")
    target, _, args = load(method="all")
    monkeypatch.setattr(arms_of, "cli", SimpleNamespace(**{**vars(cli), "ROOT": tmp_path}))
    names = [arm.name for arm in arms_of.make_arms(target, args)]
    assert {"glide", "cape", "cape:cpu", "lookup", "prompt-lookup"} <= set(names)
    assert not {"falcon", "medusa", "assisted"} & set(names)
    noted = capsys.readouterr().err
    assert "without falcon: no drafter in" in noted and "without assisted: " in noted


def test_an_interrupted_run_says_so_and_keeps_whole_turns(capsys, played):
    played.interrupt = 3 + 3 + 2  # three arms: warm-up, the first turn, a part of the second
    result, out = run(capsys, command())
    assert result["interrupted"] is True and "; interrupted" in out
    assert [arm["tokens"] for arm in result["arms"].values()] == [12, 12]
    played.calls = []
    played.interrupt = 3 + 2
    with pytest.raises(KeyboardInterrupt):
        bench.main(command())


def test_sampled_answers_follow_from_the_seed(capsys, tmp_path):
    said = []
    for name in ("a", "b"):
        torch.rand(3)
        options = ("--temperature", "1", "--num-prompts", "1", "--checkpoint", "glide")
        run(capsys, command(*options, "--json", str(tmp_path / name), method="glide"))
        arms = json.loads((tmp_path / name).read_text())["arms"]
        said.append([answer["tokens"] for answer in arms["glide"]["answers"]])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--method glide:nope", "glide has no variant 'nope'; its variants: gamma1"),
        ("--method glide@/nowhere", "no drafter in /nowhere"),
        ("--method cape --base falcon", "base 'falcon' drafts no chains: take glide or specdecpp"),
        ("--method glide:gamma1+gamma2", r"write NAME\[:VARIANT\]\[\+copies\]\[@DIR\]"),
        ("--method glide@glide glide@./glide", "two arms would be called glide@glide"),
        ("--method glide@glide --max-new-tokens 300", "exceed the target's context of 256: lower"),
        ("--method glide --prompts /nowhere.jsonl", "no prompt file /nowhere.jsonl"),
        ("--method glide --sweep --temperature 1", "leave out --temperature"),
        ("--method glide --peers --batch-size 2", "need --batch-size 1"),
        ("--method glide --top-p 0.5", "--top-p needs a --temperature"),
        ("--method glide@glide --checkpoint glide", "goes with one --method that has no @DIR"),
        ("--method glide@glide --batch-size 4", "2 prompts fill no batch"),
        ("--table prompts.jsonl --method glide", "--table takes no other option"),
        ("--method glide --json nowhere/run.json", "cannot write nowhere/run.json: name a file in"),
        ("--table prompts.jsonl", "is not a result of bench.py --json"),
        ("--table prompts.jsonl --plot prompts.jsonl", "is a file; name a folder to draw in"),
        ("", "nothing to do"),
    ],
)
def test_a_mistake_is_explained(argv, message):
    with pytest.raises(UserError, match=message):
        bench.main(["--target", "target", "--prompts", "prompts.jsonl", *argv.split()])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("cpu_*.json")), ids=lambda path: path.stem
)
def test_results_can_be_printed_and_say_where_they_come_from(path):
    result = report.read_result(str(path))
    for key in ("target", "device", "dtype", "commit", "command", "versions"):
        assert result[key]
    assert not any(f"/{name}/" in path.read_text() for name in ("root", "home", "work", "tmp"))
