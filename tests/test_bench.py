"""bench.py and report.py on a tiny random target: the protocol, the figures, the output and every
bad input."""

import json
import re
import subprocess
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
from support import data, fitting, report

torch.set_num_threads(1)
ROOT = Path(bench.__file__).parent


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with a byte tokenizer, a GLIDE drafter for it, and a prompt file."""
    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "<eos>": 256
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        folder / "target"
    )
    target = LlamaForCausalLM(
        LlamaConfig(
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
    ).eval()
    target.save_pretrained(folder / "target")
    config = glide.Config(target=common.target_shape(target), intermediate_size=48, draft_vocab=0)
    glide.build(config, target, torch.arange(257)).save_pretrained(folder / "glide")
    (folder / "prompts.jsonl").write_text(
        '{"question_id": 1, "category": "talk", "turns": ["Hello there", "And then?"]}\n\n'
        '{"question_id": 2, "category": "sums", "turns": ["Two and two"]}\n'
    )
    return folder


def command(files, *extra, method="glide"):
    return [
        "--method",
        method,
        "--target",
        str(files / "target"),
        "--checkpoint",
        str(files / "glide"),
        "--prompts",
        str(files / "prompts.jsonl"),
        "--max-new-tokens",
        "12",
        "--dtype",
        "float64",
        *extra,
    ]


def run(capsys, argv):
    bench.main(argv)
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


@pytest.fixture
def fake(monkeypatch):
    """A method named `fake`, without a drafter: plain decoding that replaces token number `wrong`,
    if it is set."""

    @dataclass
    class Config:
        wrong: int = field(default=-1, metadata={"help": "where to cheat", "decode": True})
        depth: int = field(default=2, metadata={"help": "not for decoding"})

    def generate(
        target,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        wrong=-1,
        stats=None,
        **model_kwargs,
    ):
        module.seen.append((input_ids.tolist(), wrong))
        cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
        start, done = input_ids.shape[1], False
        while not done:
            draft = common.Draft(torch.tensor([3]), torch.tensor([-1]))
            verified = common.verify(
                target, input_ids, draft, cache, logits_processor, False, stats
            )
            tokens = (
                (verified.tokens + 1) % 256
                if input_ids.shape[1] - start == wrong
                else verified.tokens
            )
            input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats)
        return input_ids

    module = types.ModuleType("fake")
    module.Config, module.generate, module.VARIANTS, module.seen = (
        Config,
        generate,
        {"late": {"wrong": 5}},
        [],
    )
    real = bench.import_method
    monkeypatch.setattr(
        bench, "import_method", lambda name: module if name == "fake" else real(name)
    )
    return module


# --------------------------------------------------------------------------------------- whole runs


def test_a_run_prints_tables_and_ends_with_the_promised_json(files, capsys, tmp_path):
    result, out = run(
        capsys, command(files, "--gamma", "3", "--show", "--json", str(tmp_path / "r.json"))
    )
    assert {
        "target",
        "device",
        "dtype",
        "commit",
        "prompts",
        "max_new_tokens",
        "temperature",
        "arms",
    } <= set(result)
    assert (
        result["prompts"] == 2
        and result["dtype"] == "float64"
        and set(result["arms"]) == {"baseline", "glide"}
    )
    promised = {
        "tokens_per_s",
        "speedup",
        "speedup_ci",
        "tau",
        "accepted_per_round",
        "alpha",
        "acceptance_by_position",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "n_target_per_token",
        "n_discarded_per_token",
        "overhead",
        "identical_to_greedy",
    }
    for arm in result["arms"].values():
        assert promised <= set(arm) and arm["identical_to_greedy"] is True and arm["overhead"] > 1
    baseline, ours = result["arms"]["baseline"], result["arms"]["glide"]
    assert (baseline["tau"], baseline["speedup"], baseline["speedup_ci"]) == (1.0, 1.0, [1.0, 1.0])
    assert (
        baseline["alpha"] is None
        and baseline["draft_ms"] is None
        and baseline["loop"] in ("transformers", "plain")
    )
    assert (
        len(ours["acceptance_by_position"]) == 3 and 0 <= ours["alpha"] <= 1
    )  # --gamma reached the method
    assert ours["tau"] == pytest.approx(
        ours["accepted_per_round"] + 1, abs=0.35
    )  # rounds cut by the length limit
    assert ours["tau"] * ours["n_target_per_token"] == pytest.approx(1, abs=1e-3)
    assert set(ours["by_category"]) == {"talk", "sums"}
    assert (
        json.loads((tmp_path / "r.json").read_text()) == result
        and len(list(tmp_path.iterdir())) == 1
    )
    assert report.tables(result) in out and "glide, accepted draft tokens highlighted:" in out


def test_table_renders_what_the_run_printed(files, capsys, tmp_path):
    _, out = run(capsys, command(files, "--num-prompts", "1", "--json", str(tmp_path / "r.json")))
    bench.main(["--table", str(tmp_path / "r.json")])
    assert capsys.readouterr().out.strip() in out


def test_pictures(files, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    run(
        capsys,
        command(files, "--plot", str(tmp_path / "pictures"), "--cost-curve", "--context", "20"),
    )
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"speedup.png", "time.png", "acceptance.png", "cost.png"}


def test_sampling_has_no_greedy_verdict(files, capsys):
    result, _ = run(capsys, command(files, "--temperature", "0.8", "--top-p", "0.9"))
    assert result["temperature"] == 0.8
    assert all(
        arm["identical_to_greedy"] is None and arm["diverged"] is None
        for arm in result["arms"].values()
    )


def test_peers_with_a_draft_model(files, capsys):
    result, _ = run(capsys, command(files, "--peers", "--draft-model", str(files / "target")))
    arms = result["arms"]
    peers = {"prompt-lookup", "assisted:constant", "assisted:heuristic", "assisted:confidence"}
    assert set(arms) == {"baseline", "glide"} | peers
    assert all(arms[name]["identical_to_greedy"] for name in peers)
    # the target drafts for itself: 5 tokens a round and the bonus make 12 tokens of two rounds; 20
    # make one
    assert arms["assisted:constant"]["tau"] == 6 and arms["assisted:heuristic"]["tau"] >= 6
    assert (
        arms["assisted:constant"]["n_discarded_per_token"] == 0
        and arms["assisted:constant"]["draft_ms"] > 0
    )


def test_cost_curve_alone(files, capsys):
    result, out = run(
        capsys, ["--cost-curve", "--target", str(files / "target"), "--context", "100"]
    )
    assert list(result["cost_curve"]["by_tokens"]) == [
        str(n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    ]
    assert set(result["cost_curve"]["by_context"]) == {"128"}  # 192 is the last that fits
    assert "at 100 tokens of context" in out and "arms" not in result


# ----------------------------------------------------------------------------------------- protocol


def test_a_wrong_answer_is_reported_with_position_and_margin(files, fake, capsys):
    argv = command(files, method="fake")
    argv = [word for word in argv if word not in ("--checkpoint", str(files / "glide"))]
    result, out = run(capsys, [*argv, "--wrong", "2"])
    arm = result["arms"]["fake"]
    assert arm["identical_to_greedy"] is False and arm["diverged"] == 3
    assert arm["first_divergence"]["position"] == 2 and arm["first_divergence"]["question_id"] == 1
    assert arm["first_divergence"]["top2_margin"] > 0
    assert "first in prompt 1 at new token 3" in out and "3 differ" in out and arm["alpha"] is None


def test_variants_and_what_wins(files, fake, capsys):
    argv = [
        word
        for word in command(files, method="fake:all")
        if word not in ("--checkpoint", str(files / "glide"))
    ]
    result, _ = run(capsys, argv)
    assert set(result["arms"]) == {"baseline", "fake", "fake:late"}
    assert (
        result["arms"]["fake"]["identical_to_greedy"]
        and not result["arms"]["fake:late"]["identical_to_greedy"]
    )
    with pytest.raises(ValueError, match="unrecognized arguments: --depth"):
        bench.parse(["--method", "fake", "--depth", "3"])


def test_another_folders_drafter_beside_the_given_one(files, capsys):
    spec = f"glide:gamma2@{files / 'glide'}"
    argv = [
        word
        for word in command(files, method=spec)
        if word not in ("--checkpoint", str(files / "glide"))
    ]
    result, _ = run(capsys, argv)
    assert set(result["arms"]) == {"baseline", "glide:gamma2@glide"}
    assert len(result["arms"]["glide:gamma2@glide"]["acceptance_by_position"]) == 2
    with pytest.raises(ValueError, match="no drafter in /nowhere"):
        bench.main([argv[0], "glide@/nowhere", *argv[2:]])


def test_every_arm_sees_the_baselines_answers_in_rotating_order(files, fake):
    target, tokenizer = common.load_target(str(files / "target"), dtype=torch.float64)
    arms = [
        bench.Arm("transformers", {}),
        bench.Arm("plain", {"custom_generate": bench.plain_generate}, reports=True),
        bench.Arm("fake", {"custom_generate": fake.generate, "wrong": 0}, reports=True),
    ]
    order, play = [], bench.Arm.play

    def spy(self, target, encoded, **options):
        order.append((self.name, tokenizer.decode(encoded["input_ids"][0])))
        return play(self, target, encoded, **options)

    bench.Arm.play = spy
    try:
        prompts = data.read_prompts([files / "prompts.jsonl"], 0)
        turns = bench.run(
            target, tokenizer, arms, prompts, {"do_sample": False, "max_new_tokens": 6}
        )
    finally:
        bench.Arm.play = play
    names = [name for name, _ in order[3:]]  # after the warm-up
    assert names == [
        "transformers",
        "plain",
        "fake",
        "plain",
        "fake",
        "transformers",
        "fake",
        "transformers",
        "plain",
    ]
    first = tokenizer.decode(turns[0]["answer"], skip_special_tokens=True)
    assert {text for _, text in order[6:9]} == {f"Hello there\n{first}\nAnd then?\n"}
    assert arms[0].answers[0].tokens == arms[1].answers[0].tokens != arms[2].answers[0].tokens


def test_an_interrupt_keeps_the_whole_turns(files, capsys, monkeypatch):
    calls, play = [], bench.Arm.play

    def stop(self, *args, **options):
        calls.append(self.name)
        if len(calls) == 3 + 3 + 2:  # warm-up, a whole turn, two arms of the next
            raise KeyboardInterrupt
        return play(self, *args, **options)

    monkeypatch.setattr(bench.Arm, "play", stop)
    result, _ = run(capsys, command(files))
    assert (
        result["interrupted"] and result["prompts"] == 1 and result["arms"]["glide"]["tokens"] == 12
    )


def test_an_interrupt_between_two_arms_leaves_them_aligned(files, capsys, monkeypatch):
    def stop(target, encoded, reference, tokens, calls=[]):  # noqa: B006
        calls.append(tokens)
        if len(calls) == 5:  # the second arm of the second turn
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
    assert (
        arm["identical_to_greedy"]
        and len(arm["acceptance_by_position"]) == 2
        and arm["draft_ms"] > 0
    )
    with pytest.raises(ValueError, match="base 'nope' is no method that drafts chains"):
        bench.main(command(files, "--base", "nope", method="fake"))


def test_the_clock_leaves_out_the_prefill_and_nested_modules():
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, torch.nn.ReLU())
    clock = bench.Clock()
    with clock.watch({"target": [outer], "drafter": [inner]}):
        with clock.timer("prefill"), clock.timer("draft"):
            outer(torch.zeros(1, 2))
        with clock.timer("verify"):
            outer(torch.zeros(1, 2))
            inner(torch.zeros(1, 2))
    outer(torch.zeros(1, 2))  # no longer watched
    assert [(kind, prefill) for kind, *_, prefill in clock.calls] == [
        ("target", True),
        ("target", False),
        ("drafter", False),
    ]
    _, start, end, *_ = clock.calls[1]
    assert clock.total("target") == end - start and clock.total("drafter") > 0
    assert [name for name, *_ in clock.timers] == ["draft", "prefill", "verify"]


def test_plain_loop_equals_generate(files):
    target, tokenizer = common.load_target(str(files / "target"), dtype=torch.float64)
    encoded = bench.encode(tokenizer, ["Once upon"], "cpu")
    options = {"do_sample": False, "max_new_tokens": 20, "repetition_penalty": 1.3}
    plain = bench.Arm("plain", {"custom_generate": bench.plain_generate}, reports=True)
    answer = plain.play(target, encoded, **options)
    theirs = bench.Arm("transformers", {}).play(target, encoded, **options)
    assert answer.tokens == theirs.tokens and answer.forwards == theirs.forwards == len(
        answer.tokens
    )
    assert (
        theirs.rounds == len(answer.tokens) - 1
    )  # its first token belongs to the prompt's forward
    assert 0 < answer.in_target < answer.decode_seconds < answer.seconds


def test_chat_template_alternates_roles(files):
    _, tokenizer = common.load_target(str(files / "target"))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ids = bench.encode(tokenizer, ["a", "b", "c"], "cpu")["input_ids"][0]
    assert tokenizer.decode(ids) == "<user>a<assistant>b<user>c<assistant>"


def test_prompts_are_spread_over_the_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [str(i)]}) + "\n" for i in range(10)))
    assert [p["turns"][0] for p in data.read_prompts([path], 4)] == ["0", "2", "5", "7"]
    assert len(data.read_prompts([path], 0)) == len(data.read_prompts([path], 99)) == 10
    assert data.read_prompts([path], 1)[0] == {
        "question_id": "p-1",
        "category": "p",
        "turns": ["0"],
    }


# ------------------------------------------------------------------------------------------ figures


def answer(tokens, seconds, **given):
    defaults = {
        "decode_seconds": seconds / 2,
        "timers": {},
        "in_target": seconds / 4,
        "in_drafter": 0.0,
        "forwards": tokens,
        "rounds": tokens,
        "drafted": 0,
        "offered": [],
        "accepted": [],
    }
    return bench.Answer(list(range(tokens)), seconds, **{**defaults, **given})


def test_figures_of_a_hand_worked_case():
    turns = [
        {"prompt": 0, "question_id": 7, "category": "a"},
        {"prompt": 1, "question_id": 8, "category": "b"},
    ]
    baseline = bench.Arm("plain", {}, answers=[answer(10, 2.0), answer(6, 2.0)], same=[None, None])
    ours = bench.Arm(
        "x",
        {},
        same=[None, {"position": 3, "top2_margin": 0.1}],
        answers=[
            answer(
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
            ),
            answer(
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
            ),
        ],
    )
    got = report.figures(ours, baseline, turns, greedy=True)
    assert got["tokens_per_s"] == pytest.approx(16 / 3, abs=1e-4) and got[
        "speedup"
    ] == pytest.approx(4 / 3, abs=1e-4)
    assert (
        got["tau"] == 2.0 and got["accepted_per_round"] == 1.0 and got["n_target_per_token"] == 0.5
    )
    assert got["n_discarded_per_token"] == pytest.approx((21 - 8) / 16, abs=1e-4)
    assert got["acceptance_by_position"] == [
        0.7143,
        0.2857,
        0.1429,
    ]  # 5, 2, 1 of the 7 rounds that offered as much
    assert (got["draft_ms"], got["verify_ms"], got["other_ms"]) == (75.0, 125.0, 50.0)
    assert got["timers_ms"]["tree"] == 12.5 and got["overhead"] == 2.0
    assert got["identical_to_greedy"] is False and got["diverged"] == 1
    assert got["first_divergence"] == {"question_id": 8, "position": 3, "top2_margin": 0.1}
    assert got["by_category"] == {
        "a": {"speedup": 2.0, "tau": 2.5},
        "b": {"speedup": 1.0, "tau": 1.5},
    }
    low, high = got["speedup_ci"]
    assert low == 1.0 and high == 2.0  # with two prompts the redraws are {a, a}, {a, b} and {b, b}


def test_highlight_marks_the_accepted_tokens():
    tokenizer = types.SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join("abcdefgh"[i] for i in ids)
    )
    text = report.highlight(
        tokenizer, answer(7, 1.0, accepted=[2, 0, 5])
    )  # the last round was cut short
    assert text == "\x1b[30;42mab\x1b[0mcd\x1b[30;42mefg\x1b[0m"


def test_markdown_is_aligned():
    assert report.markdown(["arm", "x"], [["glide", 1.25], ["b", None]]) == (
        "| arm   |    x |\n|-------|-----:|\n| glide | 1.25 |\n| b     |    - |"
    )


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--method", "nope"], "unknown method 'nope'; there are .*glide"),
        (["--method", "glide:nope"], "glide has no variant 'nope'"),
        (["--method", "glide", "--gamma", "x"], "argument --gamma: invalid int value: 'x'"),
        (["--method", "glide", "--wat"], "unrecognized arguments: --wat"),
        (["--method", "glide", "--checkpoint", "/nowhere"], "no drafter in /nowhere"),
        (["--method", "glide", "--target", "/nowhere"], "cannot load target '/nowhere'"),
        (["--method", "glide", "--prompts", "/nowhere.jsonl"], "no prompt file /nowhere.jsonl"),
        (
            ["--method", "glide", "--max-new-tokens", "250"],
            "prompt 1 may take .* the target's context is 256",
        ),
        (["--method", "glide", "--max-new-tokens", "0"], "--max-new-tokens: must be at least 1"),
        (["--method", "glide", "--temperature", "-1"], "--temperature: must be at least 0"),
        (["--method", "glide", "--top-p", "0"], "--top-p must be above 0"),
        (
            ["--method", "glide", "--json", "/nowhere/r.json"],
            "--json /nowhere/r.json: no such folder",
        ),
        (["--method", "glide", "glide:all"], "--checkpoint goes with exactly one --method"),
        (
            ["--cost-curve", "--context", "250"],
            "--context 250 .* exceed the target's context of 256",
        ),
        (["--table", "/nowhere.json"], "nowhere.json"),
        ([], "nothing to do"),
    ],
)
def test_bad_options(files, argv, message):
    given = {"--target": str(files / "target"), "--prompts": str(files / "prompts.jsonl")}
    if "--method" in argv:
        given["--checkpoint"] = str(files / "glide")
    argv = argv + [
        word for flag, value in given.items() if flag not in argv and argv for word in (flag, value)
    ]
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
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).save_pretrained(tmp_path)
    for file in (files / "target").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="has 20 tokens and the target 257"):
        bench.main(command(files, "--peers", "--draft-model", str(tmp_path)))
    with pytest.raises(ValueError, match="glide drafts with a network of its own"):
        bench.main(command(files, "--draft-model", str(files / "target")))


def test_all_takes_what_has_a_checkpoint(files, capsys, monkeypatch, tmp_path):
    argv = [
        word
        for word in command(files, method="all")
        if word not in ("--checkpoint", str(files / "glide"))
    ]
    monkeypatch.setattr(
        bench.Loader,
        "drafter",
        lambda self, module, checkpoint=None: common.load_drafter(
            module.Drafter, tmp_path / module.__name__, self.target
        ).to(self.target.dtype),
    )
    with pytest.raises(ValueError, match="no method has a drafter"):
        bench.main(argv)
    assert "bench.py: without glide: no drafter in" in capsys.readouterr().err
    (tmp_path / "glide").symlink_to(files / "glide")
    result, _ = run(capsys, argv)
    assert (
        set(result["arms"]) >= {"baseline", "glide", "prompt-lookup"}
        and "falcon" not in result["arms"]
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_results_say_where_they_come_from(path):
    result = report.read_result(str(path))
    assert all(
        result[key] for key in ("target", "device", "dtype", "commit", "command", "versions")
    )
    assert result["seed"] >= 0 and not re.search(r"/(root|home|work|tmp)/", path.read_text())


def test_beside_the_papers_figures():
    arm = {
        "tau": 1.5,
        "accepted_per_round": 0.5,
        "alpha": 0.2,
        "speedup": 1.25,
        "draft_ms": 5.0,
        "verify_ms": 40.0,
        "other_ms": 5.0,
        "timers_ms": {"draft": 5.0, "verify": 40.0},
    }
    note, table = report._paper_tables({"baseline": arm, "falcon@k3": arm, "falcon:paper": arm})
    assert "Vicuna-7B" in note and "GLIDE" not in note
    row = "falcon@k3|1.50|0.50|0.20|1.25|5.0|80%|10%|2.52|0.72|2.96"
    assert [line.replace(" ", "").strip("|") for line in table.split("\n")[2:]] == [row]


def test_something_else_than_a_result(tmp_path):
    (tmp_path / "r.json").write_text('{"arms": 3}')
    with pytest.raises(ValueError, match="is not a result of bench.py --json"):
        bench.main(["--table", str(tmp_path / "r.json")])


def test_mistakes_end_with_one_line_and_code_2():
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), "--method", "nope"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("bench.py: unknown method 'nope'") and done.stderr.count("\n") == 1
    )


def test_help_lists_the_methods_options_and_the_figures(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["--method", "glide", "--help"])
    out = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "--gamma" in out
        and "--intermediate-size" not in out
        and "overhead" in out
    )


def test_bench_keeps_to_its_limit():
    assert len((ROOT / "bench.py").read_text().splitlines()) <= 600


# ------------------------------------------------------------------------------- sweeps and fitting


def test_the_sweep_of_a_chain_without_a_head(files, capsys, tmp_path):
    result, out = run(capsys, command(files, "--sweep"))
    sweep, arm = result["sweep"], result["arms"]["glide"]
    assert (
        set(sweep["points"]) == {"K", "confidence", "entropy", "oracle"}
        and not sweep["calibration"]
    )
    assert "Stop rules, replayed" in out and "Acceptance by the drafter's confidence" in out
    again, _ = run(capsys, command(files, "--sweep", "--gamma", "2"))
    fixed, measured = sweep["points"]["K"]["2"], again["arms"]["glide"]
    assert fixed[:2] == pytest.approx(
        [measured["n_target_per_token"], measured["n_discarded_per_token"]], abs=1e-3
    )
    assert arm["n_target_per_token"] >= sweep["points"]["oracle"][""][0]
    pytest.importorskip("matplotlib")
    assert len(report.plot([result], tmp_path)) == 5


def test_sweeps_at_the_edges(files, capsys, tmp_path):
    result, _ = run(capsys, command(files, "--sweep", method="cape"))  # on the chains of its base
    assert set(result["sweep"]["points"]) == {"K", "confidence", "entropy", "oracle"}
    result, out = run(capsys, command(files, "--sweep", "--max-new-tokens", "1"))
    assert (
        result["sweep"]["points"]["K"]["4"][:2] == [1, 0]
        and not result["sweep"]["acceptance_by_confidence"]
    )
    assert result["sweep"]["r2"] is None and "too few draft lengths to fit" in out
    pytest.importorskip("matplotlib")
    report.plot([result], tmp_path)


def test_several_heads_on_one_draft_model(files, capsys, tmp_path, monkeypatch):
    target, _ = common.load_target(str(files / "target"))
    runs, features = [], common.target_features
    monkeypatch.setattr(common, "target_features", lambda *args: runs.append(1) or features(*args))
    for number, options in enumerate(
        ({"base": "glide"}, {"draft_model": str(files / "target")}, {"layers": [0]})
    ):
        folders = []
        for depth in (0, 2):
            torch.manual_seed(1)  # the draft model is the same
            config = specdecpp.Config(
                target=common.target_shape(target), stage="head", head_depth=depth, **options
            )
            folders.append(str(tmp_path / f"{number}D{depth}"))
            specdecpp.build(config, target, torch.arange(257)).save_pretrained(folders[-1])
        given = command(
            files, "--sweep", folders[1], "--json", str(tmp_path / "r.json"), method="specdecpp"
        )
        given[given.index("--checkpoint") + 1] = folders[0]
        with unittest.mock.patch.object(bench.cli, "ROOT", tmp_path):
            (tmp_path / "checkpoints").mkdir(exist_ok=True)
            if number == 0:
                (tmp_path / "checkpoints" / "glide").symlink_to(files / "glide")
                for name in bench.cli.METHODS:
                    (tmp_path / f"{name}.py").touch()
            result, out = run(capsys, given)
        assert len(runs) == 3 * (
            number + 1
        )  # once an answer, for alpha: what the base reads came with it
        assert list(result["sweep"]["points"])[3:] == ["head", f"{number}D2", "oracle"]
        assert [each["head_depth"] for each in result["sweep"]["calibration"].values()] == [0, 2]
        assert (
            "head, log w_rej added: predicted" in out
            and result["arms"]["specdecpp"]["identical_to_greedy"]
        )


def test_what_cannot_be_swept_is_said_before_measuring(files, monkeypatch):
    monkeypatch.setattr(bench, "run", None)
    with pytest.raises(ValueError, match="no acceptance head trained on the draft model of cape"):
        bench.main(command(files, "--sweep", str(files / "glide"), method="cape"))
    with pytest.raises(ValueError, match="no acceptance head trained on the draft model of glide"):
        bench.main(command(files, "--sweep", str(files / "glide")))
    with pytest.raises(ValueError, match="leaves nothing open"):
        bench.main(command(files, "--refit"))


def test_refitting_cape(files, capsys):
    result, out = run(capsys, command(files, "--refit", "--context", "64", method="cape"))
    fitted = result["fitted"]["cape"]
    assert fitted["paper"] == [7, 5, 3, 1] and len(fitted["sizes"]) == 4
    assert sum(fitted["frequency"]) == pytest.approx(1, abs=1e-3)
    assert "Fitted to this machine, cape: sizes" in out


def test_the_cost_between_measured_counts():
    times = fitting.milliseconds({"1": 10.0, "2": 20.0, "4": 50.0}, 6)
    assert times == [10, 10, 20, 35, 50, 50, 50]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--method", "glide", "--sweep", "--temperature", "1"], "leave out --temperature"),
        (["--cost-curve", "--refit"], "greedy drafts of a --method"),
    ],
)
def test_bad_sweeps(argv, words):
    with pytest.raises(ValueError, match=words):
        bench.parse(argv)
