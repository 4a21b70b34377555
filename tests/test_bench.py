"""bench.py on a tiny random target: whole runs, interrupts, bad input, sweeps and fitting."""

import json
import re
import sys
import types
import unittest.mock
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import bench
import common
import glide
import specdecpp
from support import arms, cli, data, report

torch.set_num_threads(1)
ROOT = Path(bench.__file__).parent
TURNS = [
    {"question_id": 1, "category": "talk", "turns": ["Hello there", "And then?"]},
    {"question_id": 2, "category": "sums", "turns": ["Two and two"]},
]
PLAIN = {"do_sample": False}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with a byte tokenizer, a GLIDE drafter for it, and a prompt file."""
    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder / "target")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=256,
        bos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(folder / "target")
    config = glide.Config(target=common.target_shape(target), intermediate_size=48, draft_vocab=0)
    glide.build(config, target, torch.arange(257)).save_pretrained(folder / "glide")
    lines = [json.dumps(prompt) for prompt in TURNS]
    (folder / "prompts.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder


def without_checkpoint(files, *extra, method):
    """The command line of a run that does not say where its drafter is."""
    given = {
        "--method": method,
        "--target": str(files / "target"),
        "--prompts": str(files / "prompts.jsonl"),
        "--max-new-tokens": "12",
        "--dtype": "float64",
    }
    return [word for pair in given.items() for word in pair] + [*extra]


def command(files, *extra, method="glide"):
    checkpoint = ("--checkpoint", str(files / "glide"))
    return without_checkpoint(files, *checkpoint, *extra, method=method)


def run(capsys, argv):
    """The result of a run, read from the last line of its output, and the output."""
    bench.main(argv)
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


@pytest.fixture
def fake(monkeypatch):
    """A method named `fake`, without a drafter: it drafts token 3, and cheats at token `wrong`."""

    @dataclass
    class Config:
        wrong: int = field(default=-1, metadata={"help": "where to cheat", "decode": True})
        copies: int = field(default=0, metadata={"help": "tokens copied", "decode": True})
        depth: int = field(default=2, metadata={"help": "not for decoding"})

    def generate(
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        wrong=-1,
        copies=0,
        stats=None,
        **model_kwargs,
    ):
        module.seen.append((input_ids.tolist(), wrong))
        cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
        lookup = common.Lookup(copies)
        start, done = input_ids.shape[1], False
        while not done:
            draft = common.Draft(torch.tensor([3]), torch.tensor([-1]))
            draft = lookup.merge(draft, input_ids, generation_config.max_length)
            verified = common.verify(
                target, input_ids, draft, cache, logits_processor, False, stats
            )
            tokens = verified.tokens
            if input_ids.shape[1] - start == wrong:
                tokens = (tokens + 1) % 256
            input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats)
        return input_ids

    module = types.ModuleType("fake")
    module.Config = Config
    module.generate = generate
    module.VARIANTS = {"late": {"wrong": 5}, "copies": {"copies": 10}}
    module.seen = []
    real = cli.import_method
    monkeypatch.setattr(cli, "import_method", lambda name: module if name == "fake" else real(name))
    return module


# --------------------------------------------------------------------------------------- whole runs


def test_a_run_prints_tables_and_ends_with_the_promised_json(files, capsys, tmp_path):
    argv = command(files, "--gamma", "3", "--json", str(tmp_path / "r.json"))
    result, out = run(capsys, argv)
    promised = "target device dtype commit prompts max_new_tokens temperature arms"
    assert set(promised.split()) <= set(result)
    assert result["prompts"] == 2 and result["dtype"] == "float64"
    assert set(result["arms"]) == {"baseline", "glide"}
    promised = "tokens_per_s speedup speedup_ci tau accepted_per_round alpha draft_ms verify_ms"
    promised += " other_ms acceptance_by_position n_target_per_token n_discarded_per_token"
    promised += " overhead identical_to_greedy"
    for arm in result["arms"].values():
        assert set(promised.split()) <= set(arm)
        assert arm["identical_to_greedy"] is True and arm["overhead"] > 1
    baseline, ours = result["arms"]["baseline"], result["arms"]["glide"]
    assert (baseline["tau"], baseline["speedup"], baseline["speedup_ci"]) == (1.0, 1.0, [1.0, 1.0])
    assert baseline["alpha"] is None and baseline["draft_ms"] is None
    assert baseline["loop"] in ("transformers", "plain")
    assert len(ours["acceptance_by_position"]) == 3  # --gamma reached the method
    assert 0 <= ours["alpha"] <= 1
    # but for the rounds that the length limit cuts
    assert ours["tau"] == pytest.approx(ours["accepted_per_round"] + 1, abs=0.35)
    assert ours["tau"] * ours["n_target_per_token"] == pytest.approx(1, abs=1e-3)
    assert set(ours["by_category"]) == {"talk", "sums"}
    assert ours["method"] == "glide" and ours["settings"]["gamma"] == 3
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert len(list(tmp_path.iterdir())) == 1
    assert report.tables(result) in out


def test_table_renders_what_the_run_printed(files, capsys, tmp_path):
    _, out = run(capsys, command(files, "--num-prompts", "1", "--json", str(tmp_path / "r.json")))
    bench.main(["--table", str(tmp_path / "r.json")])
    assert capsys.readouterr().out.strip() in out


@pytest.mark.slow
def test_pictures(files, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    run(capsys, command(files, "--plot", str(folder), "--cost-curve", "--context", "20"))
    names = {path.name for path in folder.iterdir()}
    assert names == {"speedup.svg", "time.svg", "acceptance.svg", "cost.svg"}


def test_sampling_has_no_greedy_verdict(files, capsys):
    result, _ = run(capsys, command(files, "--temperature", "0.8", "--top-p", "0.9"))
    assert (result["temperature"], result["top_p"]) == (0.8, 0.9)
    for arm in result["arms"].values():
        assert arm["identical_to_greedy"] is None and arm["diverged"] is None


def test_a_method_that_never_drafts_decodes_like_any_other(files, capsys):
    arm = run(capsys, command(files, "--gamma", "0"))[0]["arms"]["glide"]
    assert arm["tau"] == 1 and arm["other_ms"] > 0 and arm["overhead"] > 1


@pytest.mark.slow
def test_peers_with_a_draft_model(files, capsys):
    result, _ = run(capsys, command(files, "--peers", "--draft-model", str(files / "target")))
    found = result["arms"]
    peers = {"copies", "prompt-lookup"} | {f"assisted:{name}" for name in arms.ASSISTED}
    assert set(found) == {"baseline", "glide"} | peers
    assert all(found[name]["identical_to_greedy"] for name in peers)
    # the target drafts for itself: 5 tokens and the bonus make 12 tokens of two rounds
    assert found["assisted:constant"]["tau"] == 6 and found["assisted:heuristic"]["tau"] >= 6
    assert found["assisted:constant"]["n_discarded_per_token"] == 0
    assert found["assisted:constant"]["draft_ms"] > 0


def test_cost_curve_alone(files, capsys):
    argv = ["--cost-curve", "--target", str(files / "target"), "--context", "100"]
    result, out = run(capsys, argv)
    assert result["cost_curve"]["context"] == 100
    assert "at 100 tokens of context" in out and "arms" not in result


# -------------------------------------------------------------------------- copies from the context


def test_copies_beside_a_method_and_alone(files, fake, capsys):
    argv = without_checkpoint(files, "--variants", "copies", method="fake")
    argv[argv.index("fake")] = "fake"
    argv.insert(argv.index("fake") + 1, "copies")
    argv.insert(argv.index("fake") + 2, "prompt-lookup")
    argv[argv.index("--max-new-tokens") + 1] = "40"  # the tiny target soon repeats itself
    result, out = run(capsys, argv)
    assert list(result["arms"]) == ["baseline", "fake", "fake:copies", "copies", "prompt-lookup"]
    plain, with_copies, alone = (result["arms"][n] for n in ("fake", "fake:copies", "copies"))
    assert all(arm["identical_to_greedy"] for arm in result["arms"].values())
    assert plain["copies"] is None and plain["against"] == {}
    for arm in (with_copies, alone):
        offered, accepted = arm["copies"]
        assert 0 < accepted <= offered < 1
        assert set(arm["by_category"]) == {"talk", "sums"}
    assert with_copies["tau"] > plain["tau"] and alone["tau"] > 1
    ratio, low, high = with_copies["against"]["fake"]
    assert low <= ratio <= high
    assert ratio == pytest.approx(with_copies["speedup"] / plain["speedup"], rel=1e-3)
    assert re.search(r"\| fake:copies \| +fake \|", out) and "offered, accepted" in out


def test_two_variants_at_once(files, fake, capsys):
    argv = without_checkpoint(files, "--num-prompts", "1", method="fake:late+copies")
    result, _ = run(capsys, argv)
    [arm] = [a for name, a in result["arms"].items() if name == "fake:late+copies"]
    assert arm["settings"] == {"wrong": 5, "copies": 10, "depth": 2, "base": ""}
    assert {wrong for _, wrong in fake.seen} == {5}


# -------------------------------------------------------------------------- variants and interrupts


def test_a_wrong_answer_is_reported_with_position_and_margin(files, fake, capsys):
    result, out = run(capsys, without_checkpoint(files, "--wrong", "2", method="fake"))
    arm = result["arms"]["fake"]
    assert arm["identical_to_greedy"] is False and arm["diverged"] == 3
    assert arm["first_divergence"]["position"] == 2 and arm["first_divergence"]["question_id"] == 1
    assert arm["first_divergence"]["top2_margin"] > 0
    assert "first in prompt 1 at new token 3" in out and "3 differ" in out and arm["alpha"] is None


def test_variants_and_what_wins(files, fake, capsys):
    result, _ = run(capsys, without_checkpoint(files, method="fake:all"))
    assert set(result["arms"]) == {"baseline", "fake", "fake:late", "fake:copies"}
    assert result["arms"]["fake"]["identical_to_greedy"]
    assert not result["arms"]["fake:late"]["identical_to_greedy"]


def test_another_folders_drafter_beside_the_given_one(files, capsys):
    argv = without_checkpoint(files, method=f"glide:gamma2@{files / 'glide'}")
    result, _ = run(capsys, argv)
    assert set(result["arms"]) == {"baseline", "glide:gamma2@glide"}
    assert len(result["arms"]["glide:gamma2@glide"]["acceptance_by_position"]) == 2
    with pytest.raises(ValueError, match="no drafter in /nowhere"):
        bench.main(without_checkpoint(files, method="glide@/nowhere"))


def test_a_drafter_is_compared_with_the_shipped_one(files, tmp_path, capsys, monkeypatch):
    """A ratio with its interval, of the same answers; the shipped one is compared with nothing."""
    (tmp_path / "checkpoints").symlink_to(files)
    (tmp_path / "other").symlink_to(files / "glide")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    argv = without_checkpoint(files, method="glide")
    argv[2:2] = [f"glide@{tmp_path / 'other'}"]
    arms = run(capsys, argv)[0]["arms"]
    shipped, other = arms["glide"], arms["glide@other"]
    assert shipped["against"] == {} and list(other["against"]) == ["glide"]
    ratio, low, high = other["against"]["glide"]
    assert low <= ratio <= high
    assert ratio == pytest.approx(other["speedup"] / shipped["speedup"], rel=1e-3)


def test_an_interrupt_keeps_the_whole_turns(files, capsys, monkeypatch):
    calls, play = [], bench.Arm.play

    def stop(self, *args, **options):
        calls.append(self.name)
        if len(calls) == 3 + 3 + 2:  # warm-up, a whole turn, two arms of the next
            raise KeyboardInterrupt
        return play(self, *args, **options)

    monkeypatch.setattr(bench.Arm, "play", stop)
    result, _ = run(capsys, command(files))
    assert result["interrupted"] and result["prompts"] == 1
    assert result["arms"]["glide"]["tokens"] == 12


def test_an_interrupt_between_two_arms_leaves_them_aligned(files, capsys, monkeypatch):
    calls = []

    def stop(target, encoded, reference, tokens):
        calls.append(tokens)
        if len(calls) == 6:  # the last arm of the second turn
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "divergence", stop)
    result, _ = run(capsys, command(files))
    assert result["interrupted"] and {arm["tokens"] for arm in result["arms"].values()} == {12}


def test_a_method_on_the_drafter_of_another(files, fake, capsys):
    @dataclass
    class Config:
        base: str = field(default="glide", metadata={"help": "whose drafter", "decode": True})
        gamma: int = field(default=2, metadata={"help": "length", "decode": True})

    def generate(*args, base, base_drafter, gamma=2, stats=None, **kwargs):
        assert base is glide and isinstance(base_drafter, glide.Drafter)
        return glide.generate(*args, drafter=base_drafter, gamma=gamma, stats=stats, **kwargs)

    fake.Config, fake.generate, fake.VARIANTS = Config, generate, {}
    result, _ = run(capsys, command(files, method="fake"))
    arm = result["arms"]["fake"]
    assert arm["identical_to_greedy"] and arm["draft_ms"] > 0
    assert len(arm["acceptance_by_position"]) == 2
    assert arm["settings"]["base"] == "glide" and arm["settings"]["cross_attention"] is True
    with pytest.raises(ValueError, match="base 'nope' is no method that drafts chains"):
        bench.main(command(files, "--base", "nope", method="fake"))


# ------------------------------------------------------------------------------------- command line


def test_show_prints_the_question_and_all_answers(files, capsys):
    _, out = run(capsys, command(files, "--show", "--num-prompts", "1"))
    assert "question:\nHello there\n" in out and "\x1b" not in out
    plain = out.split("plain decoding:\n")[1].split("\n\nglide, accepted")[0]
    marked = out.split("accepted draft tokens in brackets:\n")[1].rpartition("\n\n{")[0]
    assert re.sub(r"[][]", "", marked) == re.sub(r"[][]", "", plain) != marked


def test_the_json_line_is_last_unless_on_a_terminal(files, capsys, monkeypatch):
    argv = ["--cost-curve", "--target", str(files / "target"), "--context", "8"]
    monkeypatch.setattr(bench, "cost_curve", lambda *_: {})
    result, out = run(capsys, argv)
    asked, again = run(capsys, [*argv, "--json", "-"])
    assert asked | {"command": ""} == result | {"command": ""}
    assert out.count('{"target"') == again.count('{"target"') == 1  # once, not twice
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bench.main(argv)
    assert "{" not in capsys.readouterr().out
    assert run(capsys, [*argv, "--json", "-"])[0] == asked


# ---------------------------------------------------------------------------------------- bad input


GLIDE = ["--method", "glide"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--method", "nope"], "unknown method 'nope'; there are .*glide"),
        (["--method", "glide:nope"], "glide has no variant 'nope'"),
        (["--method", "glide:gamma1+nope"], "glide has no variant 'gamma1.nope'"),
        ([*GLIDE, "--gamma", "x"], "argument --gamma: invalid int value: 'x'"),
        ([*GLIDE, "--wat"], "unrecognized arguments: --wat"),
        ([*GLIDE, "--checkpoint", "/nowhere"], "no drafter in /nowhere"),
        ([*GLIDE, "--target", "/nowhere"], "cannot load target '/nowhere'"),
        ([*GLIDE, "--prompts", "/nowhere.jsonl"], "no prompt file /nowhere.jsonl"),
        ([*GLIDE, "--max-new-tokens", "250"], "prompt 1 may take .* target's context is 256"),
        ([*GLIDE, "--max-new-tokens", "0"], "--max-new-tokens: must be at least 1"),
        ([*GLIDE, "--temperature", "-1"], "--temperature: must be at least 0"),
        ([*GLIDE, "--top-p", "0"], "--top-p must be above 0"),
        ([*GLIDE, "--json", "/nowhere/r.json"], "--json /nowhere/r.json: no such folder"),
        (["--method", "glide", "glide:all"], "--checkpoint goes with exactly one --method"),
        (["--cost-curve", "--context", "250"], "--context 250 .* exceed the target's context"),
        (["--table", "/nowhere.json"], "nowhere.json"),
        ([], "nothing to do"),
        ([*GLIDE, "--sweep", "--temperature", "1"], "leave out --temperature"),
        (["--cost-curve", "--refit"], "greedy drafts of a --method"),
    ],
)
def test_bad_options(files, argv, message):
    given = {"--target": str(files / "target"), "--prompts": str(files / "prompts.jsonl")}
    if "--method" in argv:
        given["--checkpoint"] = str(files / "glide")
    argv = list(argv)
    for flag, value in given.items():
        if argv and flag not in argv:
            argv += [flag, value]
    with pytest.raises((ValueError, OSError), match=message):
        bench.main(argv)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no prompts in"),
        ('{"turns": ["a"]}\nnot json\n', "line 2: not a JSON object"),
        ('{"turns": "a"}\n', "line 1"),
        ('{"turns": []}\n', "line 1"),
        ('["a"]\n', "line 1"),
        ('{"prompt": "a"}\n', "line 1"),
    ],
)
def test_bad_prompt_files(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.read_prompts([tmp_path / "p.jsonl"], 0)


def test_a_draft_model_of_another_vocabulary(files, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=20, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for file in (files / "target").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="has 20 tokens and the target 257"):
        bench.main(command(files, "--peers", "--draft-model", str(tmp_path)))
    with pytest.raises(ValueError, match="glide drafts with a network of its own"):
        bench.main(command(files, "--draft-model", str(files / "target")))


def test_all_takes_what_has_a_checkpoint(files, capsys, monkeypatch, tmp_path):
    argv = without_checkpoint(files, method="all")

    def drafter(self, module, checkpoint=None):
        found = common.load_drafter(module.Drafter, tmp_path / module.__name__, self.target)
        return found.to(self.target.dtype)

    monkeypatch.setattr(bench.Loader, "drafter", drafter)
    with pytest.raises(ValueError, match="no method has a drafter"):
        bench.main(argv)
    assert "bench.py: without glide: no drafter in" in capsys.readouterr().err
    (tmp_path / "glide").symlink_to(files / "glide")
    result, _ = run(capsys, argv)
    assert set(result["arms"]) >= {"baseline", "glide", "copies", "prompt-lookup"}
    assert "falcon" not in result["arms"]


def test_sampling_is_cut_by_top_p_alone(files, capsys, monkeypatch):
    """No top-k: transformers' own default would keep 50 tokens."""
    seen, play, seeds = [], bench.Arm.play, []

    def spy(self, target, encoded, **options):
        seen.append(options)
        return play(self, target, encoded, **options)

    monkeypatch.setattr(bench.Arm, "play", spy)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    sampling = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
    run(capsys, command(files, *sampling, "--num-prompts", "1"))
    assert seeds == [7]
    found = {(o["do_sample"], o["temperature"], o["top_p"], o["top_k"]) for o in seen}
    assert found == {(True, 0.8, 0.9, 0)}


def test_an_assisted_arm_runs_with_its_own_settings(llama, monkeypatch):
    seen = []

    def generate(**options):
        seen.append(options["assistant_model"].generation_config)
        llama(options["input_ids"])
        return options["input_ids"]

    monkeypatch.setattr(llama, "generate", generate)
    kwargs = {"assistant_model": types.SimpleNamespace(generation_config=None)}
    for name in ("a", "b", "a"):
        arm = bench.Arm(name, kwargs, assistant_config=name)
        arm.play(llama, {"input_ids": torch.tensor([[1, 2, 3]])})
    assert seen == ["a", "b", "a"]


def test_assisted_peers_differ_in_their_settings(files):
    target, _ = common.load_target(str(files / "target"))
    args = types.SimpleNamespace(draft_model=str(files / "target"))
    for each in arms.Loader(target, args).peers()[1:]:
        own = each["assistant_config"]
        count, schedule, threshold = arms.ASSISTED[each["name"].removeprefix("assisted:")]
        assert own.num_assistant_tokens == count
        assert own.num_assistant_tokens_schedule == schedule
        assert own.assistant_confidence_threshold == threshold


def test_a_variant_of_another_folder_is_compared_with_that_folders_drafter(files):
    args = bench.parse(without_checkpoint(files, method=f"glide:gamma2@{files / 'glide'}"))
    target, _ = common.load_target(str(files / "target"))
    [found] = arms.Loader(target, args).method(args.method[0])
    assert (found["name"], found["plain"]) == ("glide:gamma2@glide", "glide@glide")


def test_of_two_variants_together_the_last_one_is_what_is_compared(files):
    args = bench.parse(without_checkpoint(files, method=f"glide:gamma2+copies@{files / 'glide'}"))
    target, _ = common.load_target(str(files / "target"))
    [found] = arms.Loader(target, args).method(args.method[0])
    assert found["plain"] == "glide:gamma2@glide"


def test_a_variant_wins_over_the_command_line(files):
    args = bench.parse(command(files, "--gamma", "4", method="glide:gamma2"))
    target, _ = common.load_target(str(files / "target"))
    [found] = arms.Loader(target, args).method("glide:gamma2")
    assert found["kwargs"]["gamma"] == 2


# ------------------------------------------------------------------------------- sweeps and fitting


def test_the_sweep_of_a_chain_without_a_head(files, capsys, tmp_path):
    result, out = run(capsys, command(files, "--sweep"))
    sweep, arm = result["sweep"], result["arms"]["glide"]
    assert set(sweep["points"]) == {"K", "confidence", "entropy", "oracle"}
    assert not sweep["calibration"]
    assert sweep["t_draft_ms"] > 0 and sweep["t_target_ms"] > 0  # of this arm, not of plain loops
    assert "Stop rules, replayed" in out and "Acceptance by the drafter's confidence" in out
    again, _ = run(capsys, command(files, "--sweep", "--gamma", "2"))
    fixed, measured = sweep["points"]["K"]["2"], again["arms"]["glide"]
    rates = [measured["n_target_per_token"], measured["n_discarded_per_token"]]
    assert fixed[:2] == pytest.approx(rates, abs=1e-3)
    assert arm["n_target_per_token"] >= sweep["points"]["oracle"][""][0]


def test_sweeps_at_the_edges(files, capsys, tmp_path):
    result, _ = run(capsys, command(files, "--sweep", method="cape"))  # on the chains of its base
    assert set(result["sweep"]["points"]) == {"K", "confidence", "entropy", "oracle"}
    result, out = run(capsys, command(files, "--sweep", "--max-new-tokens", "1"))
    assert result["sweep"]["points"]["K"]["4"][:2] == [1, 0]
    assert not result["sweep"]["acceptance_by_confidence"]
    assert result["sweep"]["r2"] is None and "too few draft lengths to fit" in out


@pytest.mark.slow
def test_several_heads_on_one_draft_model(files, capsys, tmp_path, monkeypatch):
    target, _ = common.load_target(str(files / "target"))
    runs, features = [], common.target_features
    monkeypatch.setattr(common, "target_features", lambda *args: runs.append(1) or features(*args))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "glide").symlink_to(files / "glide")
    for name in cli.METHODS:
        (tmp_path / f"{name}.py").touch()
    kinds = ({"base": "glide"}, {"draft_model": str(files / "target")}, {"layers": [0]})
    for number, options in enumerate(kinds):
        folders = []
        for depth in (0, 2):
            torch.manual_seed(1)  # the draft model is the same
            shape = common.target_shape(target)
            config = specdecpp.Config(target=shape, stage="head", head_depth=depth, **options)
            folders.append(str(tmp_path / f"{number}D{depth}"))
            specdecpp.build(config, target, torch.arange(257)).save_pretrained(folders[-1])
        given = command(files, "--sweep", folders[1], method="specdecpp")
        given[given.index("--checkpoint") + 1] = folders[0]
        with unittest.mock.patch.object(cli, "ROOT", tmp_path):
            result, out = run(capsys, given)
        assert len(runs) == 3 * (number + 1)  # once an answer, for alpha, with what the base reads
        assert list(result["sweep"]["points"])[3:] == ["head", f"{number}D2", "oracle"]
        depths = [each["head_depth"] for each in result["sweep"]["calibration"].values()]
        assert depths == [0, 2]
        assert "head, log w_rej added: predicted" in out
        assert result["arms"]["specdecpp"]["identical_to_greedy"]


def test_what_cannot_be_swept_is_said_before_measuring(files, monkeypatch):
    monkeypatch.setattr(bench, "run", None)
    for name in ("cape", "glide"):
        words = f"no acceptance head trained on the draft model of {name}"
        with pytest.raises(ValueError, match=words):
            bench.main(command(files, "--sweep", str(files / "glide"), method=name))
    with pytest.raises(ValueError, match="leaves nothing open"):
        bench.main(command(files, "--refit"))


def test_refitting_cape_and_copies(files, capsys):
    own = ["--gamma", "2", "--bounds", "[0.1, 0.2, 0.3]"]
    result, out = run(capsys, command(files, "--refit", "--context", "64", *own, method="cape"))
    fitted = result["fitted"]["cape"]
    assert fitted["paper"] == [7, 5, 3, 1] and len(fitted["sizes"]) == 4
    assert fitted["bounds"] == [0.1, 0.2, 0.3]  # the arm's, not the defaults
    assert sum(fitted["frequency"]) == pytest.approx(1, abs=1e-3)
    assert "Fitted to this machine, cape: sizes" in out and 0 <= fitted["least_worth"] < 1
    assert set(result["fitted"]["copies"]["by_match"]) == {"4", "3", "2"}
    assert "Copies from the context, by tokens that match" in out


def test_refitting_copies_alone(files, capsys):
    argv = without_checkpoint(files, "--refit", "--context", "64", method="copies")
    result, _ = run(capsys, argv)
    assert list(result["fitted"]) == ["copies"]
