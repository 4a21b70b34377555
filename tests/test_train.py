"""train.py and data.py on a tiny target: formats, resume, interrupts, two processes, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import train
from support import data

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a word tokenizer and chat template, and 24 conversations about nothing."""
    folder = tmp_path_factory.mktemp("tiny")
    words = ["<end>", "<user>", "<assistant>", "<system>", "<unk>"] + [f"w{i}" for i in range(43)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", pad_token="<end>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(24):
            ids = torch.randint(5, 48, (20,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    return folder


def options(folder, out, *more):
    return [
        "--method",
        "glide",
        "--target",
        str(folder),
        "--data",
        str(folder / "data.jsonl"),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--draft-vocab",
        "32",
        "--intermediate-size",
        "16",
        "--held-out",
        "4",
        "--eval-every",
        "4",
        "--save-every",
        "4",
        *more,
    ]


def run(*arguments, **kwargs):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        **kwargs,
    )


def weights(out):
    return torch.load(out / "training_state.pt", weights_only=True)["model"]


def test_reading_every_form(folder, tmp_path):
    _, tokenizer = train.common.load_target(str(folder))
    records = [
        {"prompt_ids": [5, 6], "response_ids": [7, 8]},
        {"prompt": "w1 w2", "response": "w3"},
        {
            "messages": [
                {"role": "user", "content": "w1"},
                {"role": "assistant", "content": "w2"},
                {"role": "user", "content": "w3"},
                {"role": "assistant", "content": "w4"},
            ]
        },
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        {"text": "w1 w2 w3"},
    ]
    path = tmp_path / "forms.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    learned = [
        [tokenizer.convert_ids_to_tokens(int(i)) for i in ids[mask]]
        for ids, mask in data.read_conversations(str(path), tokenizer, 64)
    ]
    assert learned == [
        ["w2", "w3"],
        ["w3", "<end>"],
        ["w2", "<end>", "w4", "<end>"],
        ["w2", "<end>"],
        ["w2", "w3"],
    ]


def test_loss_is_on_responses_and_never_on_the_first_token(folder):
    _, tokenizer = train.common.load_target(str(folder))
    for ids, mask in data.read_conversations(str(folder / "data.jsonl"), tokenizer, 15):
        assert len(ids) == len(mask) == 15
        assert mask.tolist() == [False] * 6 + [True] * 9


def test_several_data_files_and_no_held_out_conversation_in_training(folder, tmp_path, monkeypatch):
    lines = (folder / "data.jsonl").read_text().splitlines()
    for name, part in (
        ("a", [*lines[:6], *lines[20:]]),
        ("b", lines[6:]),
    ):  # both end with the same four
        (tmp_path / name).write_text("\n".join(part) + "\n")
    taken = []
    monkeypatch.setattr(
        train, "Features", lambda target, sequences, *_: taken.append(sequences) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        more = ["--data", str(tmp_path / "a"), str(tmp_path / "b")]
        train.main(options(folder, tmp_path / "out", "--steps", "1", *more))
    _, tokenizer = train.common.load_target(str(folder))
    expected = [
        ids for ids, _ in data.read_conversations(str(folder / "data.jsonl"), tokenizer, 512)
    ][:20]
    assert [ids.tolist() for ids, _ in taken[0]] == [ids.tolist() for ids in expected]
    (tmp_path / "same").write_text("\n".join([lines[0]] * 4) + "\n")
    with pytest.raises(ValueError, match="every conversation is among the 2 held out"):
        train.main(
            options(folder, tmp_path / "out", "--steps", "1", "--data", str(tmp_path / "same"))
        )


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 3}',
        "[1]",
        "{",
        '{"messages": [{"role": "user"}]}',
        '{"text": null}',
        '{"prompt_ids": [1], "response_ids": [4800]}',
    ],
)
def test_bad_line_is_named_by_number(folder, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "w1 w2"}\n' + line + "\n")
    with pytest.raises(ValueError, match="bad.jsonl, line 2: "):
        train.main(options(folder, tmp_path / "out", "--steps", "1", "--data", str(path)))


@pytest.mark.parametrize(
    "more, said",
    [
        (["--steps", "1", "--minutes", "1"], "either --steps or --minutes"),
        (["--steps", "1", "--resume"], "nothing to resume"),
        (["--steps", "1", "--data", "missing.jsonl"], "missing.jsonl"),
        (["--steps", "1", "--target", "no/such-target"], "no/such-target"),
        (["--steps", "1", "--batch-size", "3", "--accumulate", "2"], "multiple"),
        (["--steps", "1", "--kv-layer", "7"], "kv_layer 7"),
    ],
)
def test_bad_options_are_named(folder, tmp_path, more, said):
    with pytest.raises(ValueError, match=said):
        train.main(options(folder, tmp_path / "out", *more))


@pytest.mark.parametrize(
    "more, said",
    [
        (["--data", "missing.jsonl"], "train.py: no data file missing.jsonl"),
        (["--method", "nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(folder, tmp_path, more, said):
    done = run("train.py", *options(folder, tmp_path / "out", "--steps", "1", *more))
    assert (
        done.returncode == 2
        and said in done.stderr.splitlines()[-1]
        and "Traceback" not in done.stderr
    )


def test_training_lowers_the_loss_and_never_overwrites_a_drafter(folder, tmp_path):
    train.main(options(folder, tmp_path / "a", "--steps", "40"))
    curve = json.loads((tmp_path / "a" / "curve.json").read_text())
    assert (
        curve[-1]["step"] == 40
        and curve[-1]["loss"] < curve[0]["loss"]
        and curve[-1]["alpha"] > curve[0]["alpha"]
    )
    assert load_file(tmp_path / "a" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="already holds a drafter"):
        train.main(options(folder, tmp_path / "a", "--steps", "40"))


@pytest.mark.parametrize("features", [False, True])
def test_resume_gives_the_same_weights_bit_for_bit(folder, tmp_path, features):
    more = ["--features", str(tmp_path / "features")] if features else []
    train.main(options(folder, tmp_path / "whole", "--steps", "12", *more))
    process = subprocess.Popen(
        [sys.executable, "train.py", *options(folder, tmp_path / "cut", "--steps", "12", *more)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (tmp_path / "cut" / "training_state.pt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)  # at whatever moment
    process.wait()
    assert not list((tmp_path / "cut").glob("*.tmp"))
    train.main(options(folder, tmp_path / "cut", "--steps", "12", "--resume", *more))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    curves = [
        [
            {k: v for k, v in row.items() if k != "minutes"}
            for row in json.loads((out / "curve.json").read_text())
        ]
        for out in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert curves[0] == curves[1]


def test_interrupt_saves_and_exits_cleanly(folder, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "train.py", *options(folder, tmp_path / "out", "--steps", "100000")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (tmp_path / "out" / "training_state.pt").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors
    assert json.loads(output.splitlines()[-1])["interrupted"] is True


def test_two_processes_train_as_one(folder, tmp_path):
    more = ["--steps", "6", "--eval-every", "1"]
    train.main(options(folder, tmp_path / "one", *more))
    train.main(options(folder, tmp_path / "parts", *more, "--accumulate", "2"))
    done = run(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29611",
        "train.py",
        *options(folder, tmp_path / "two", *more),
    )
    assert done.returncode == 0, done.stderr
    losses = {
        name: [row["loss"] for row in json.loads((tmp_path / name / "curve.json").read_text())]
        for name in ("one", "parts", "two")
    }
    assert losses["two"] == pytest.approx(losses["one"], abs=2e-4)
    assert losses["parts"] == pytest.approx(losses["one"], abs=2e-4)


def test_features_from_disk_equal_features_on_the_fly(folder, tmp_path):
    target, tokenizer = train.common.load_target(str(folder), dtype=torch.bfloat16)
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 64)[:9]
    sequences = [(ids[: 20 - i], mask[: 20 - i]) for i, (ids, mask) in enumerate(sequences)]
    stored = train.Features(target, sequences, [1], str(tmp_path))
    wider = train.Features(target, sequences, [0, 1], str(tmp_path))
    for features in (stored, wider, train.Features(target, sequences, [1], str(tmp_path))):
        made = train.make_batch([0, 5, 2], sequences, features, torch.arange(3), 0.0, "cpu")
        direct = train.Features(target, sequences, [1], None)
        fresh = train.make_batch([0, 5, 2], sequences, direct, torch.arange(3), 0.0, "cpu")
        for row, length in enumerate(made.lengths):
            pairs = [(made.hidden[row], fresh.hidden[row])]
            pairs += [
                (a[row].transpose(0, 1), b[row].transpose(0, 1))
                for a, b in zip(made.kv[1], fresh.kv[1])
            ]
            for a, b in pairs:
                torch.testing.assert_close(
                    a[:length].float(), b[:length].float(), atol=0.05, rtol=0.05
                )


def test_make_data_resumes_and_cuts_a_half_written_line(folder, tmp_path):
    path = tmp_path / "made.jsonl"
    arguments = [
        "--make-data",
        "6",
        "--target",
        str(folder),
        "--out",
        str(path),
        "--device",
        "cpu",
        "--data-batch",
        "8",
    ]
    train.main(arguments)
    whole = path.read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert len(records) == 6 and len({r["prompt"] for r in records}) == 6
    for record in records:
        assert 4 <= len(record["prompt"].split()) <= 100 and record["response_ids"]
        assert (
            record["prompt_ids"][0] == 1 and record["prompt_ids"][-1] == 2
        )  # <user> ... <assistant>
    path.write_bytes(whole + b'{"prompt": "cut')
    train.main([*arguments[:1], "8", *arguments[2:]])
    assert path.read_bytes().startswith(whole)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 8
    assert (
        len(data.read_conversations(str(path), train.common.load_target(str(folder))[1], 512)) == 8
    )
