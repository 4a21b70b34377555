"""Bad options and bad files: one line, exit code 2, and nothing that was written is lost."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bench import files  # noqa: F401  a fixture: bare target, GLIDE drafter, prompts
from test_house import METHODS
from test_train import folder  # noqa: F401  a fixture: target with a chat template, conversations
from tiny import slow

import bench
import train
from support import cli, data

ROOT = Path(bench.__file__).parent
NONSENSE = ["", "x", "nan", "inf", "-inf", "1e400", "0x10", "1,5", "-5", "٣x", "\n"]
NONSENSE += [str(2**63), "9" * 5000]


def snapshot(top):
    """What is in a folder, to the byte."""
    found = {}
    for path in Path(top).rglob("*"):
        found[path] = path.read_bytes() if path.is_file() else None
    return found


def refused(capsys, main, argv, name="train.py"):
    """Run `main` as `__main__` does; the line that it was refused with, or None if it worked."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *argv])
            cli.run(main)
    except SystemExit as end:
        lines = capsys.readouterr().err.splitlines()
        lines = [line for line in lines if line.startswith(name) or "Traceback" in line]
        assert end.code == 2 and len(lines) == 1 and len(lines[0]) > len(name) + 8, lines
        return lines[0]
    capsys.readouterr()
    return None


@pytest.fixture
def training(folder, tmp_path, monkeypatch):  # noqa: F811
    """The arguments of a run of two steps; what it would write to."""
    monkeypatch.chdir(tmp_path)
    words = f"--method glide --target {folder} --data {folder}/data.jsonl --out {tmp_path}/out"
    words += " --steps 1 --device cpu --draft-vocab 32 --intermediate-size 16 --held-out 2"
    words += " --batch-size 2"
    return lambda *more: [*words.split(), *more]


@pytest.fixture
def benching(files, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    words = f"--method glide --target {files}/target --checkpoint {files}/glide"
    words += f" --prompts {files}/prompts.jsonl --max-new-tokens 4 --num-prompts 1"
    return lambda *more: [*words.split(), *more]


# ------------------------------------------------------------------------------------------ options


def numeric_options(program, method):
    """Every option of a command that takes a number."""
    seen = []

    def stop(self, argv=None):
        seen.append(self)
        raise ValueError("seen")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="seen"):
        patch.setattr(cli.OneLineParser, "parse_args", stop)
        program.main(["--method", method, *(["--out", "x"] if program is train else [])])
    return [
        action.option_strings[0]
        for action in seen[0]._actions
        if getattr(action.type, "__name__", "") in ("int", "float")
    ]


def test_every_option_is_guarded():
    """No option of either command reads a number without bounds: int is nobody's type."""
    assert numeric_options(train, "glide") and numeric_options(bench, "glide")
    for path in (*ROOT.glob("*.py"), *(ROOT / "support").glob("*.py")):
        text = path.read_text().replace(" ", "")
        assert "type=int" not in text and "type=float" not in text, path


@pytest.mark.parametrize(
    "program, method",
    [(bench, method) for method in METHODS] + [(train, m) for m in METHODS if m != "cape"],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_numbers_that_are_none_are_refused_while_parsing(program, method, capsys, monkeypatch):
    for flag in numeric_options(program, method):
        for value in NONSENSE:
            argv = ["--method", method, f"{flag}={value}"]
            argv += ["--out", "x"] if program is train else []
            line = refused(capsys, program.main, argv)
            assert line and f"argument {flag}: " in line


@pytest.mark.slow
def test_training_with_any_number_works_or_says_why(training, capsys, tmp_path):
    """The values that parse: a run of one step, or one line."""
    kept = tmp_path / "out"
    long = "--steps --batch-size --accumulate --num-layers --intermediate-size".split()
    for flag in numeric_options(train, "glide"):
        if flag in ("--make-data", "--minutes"):
            continue
        largest = [] if flag in long else [str(2**31 - 1)]  # not nonsense, but it takes long
        for value in ("0", "1", "3", "0.5", *largest):
            line = refused(capsys, train.main, training(f"{flag}={value}"))
            assert line or (kept / "model.safetensors").is_file(), (flag, value)
            for file in kept.glob("*"):
                file.unlink()


@pytest.mark.parametrize(
    "more, said",
    [
        (["--tree", "5"], "argument --tree: give JSON like"),
        (["--tree", '[["a"]]'], "argument --tree"),
        (["--tree", "[[0, 1.5]]"], "argument --tree"),
        (["--tree", "[" * 100000], "argument --tree"),
        (["--tree", "[[1, 0]]"], "tree path [1, 0] has no parent"),
        (["--tree", "[[]]"], "tree path"),
        (["--k", "0"], "k at least 1"),
        (["--fusion", "x"], "fusion is lstm"),
    ],
)
def test_falcons_own_options(training, capsys, more, said):
    line = refused(capsys, train.main, [w if w != "glide" else "falcon" for w in training(*more)])
    assert line is None and "path" in said or said in line  # a tree is not looked at while training


@pytest.mark.parametrize(
    "more, said",
    [
        (["--layers", "[99]"], "layers [99]"),
        (["--layers", "[]"], "layers []"),
        (["--layers", '["1"]'], "--layers"),
        (["--base", "os"], "base 'os' is no method that drafts chains"),
        (["--base", "falcon"], "base 'falcon'"),
        (["--base", "../x"], "base '../x'"),
        (["--stage", "x"], "unknown stage"),
        (["--base", "glide", "--base-checkpoint", "nowhere"], "no drafter in nowhere"),
        (["--draft-model", "."], "cannot load target '.'"),
    ],
)
def test_specdecpps_own_options(training, capsys, more, said):
    argv = [w if w != "glide" else "specdecpp" for w in training()]
    place = argv.index("--intermediate-size")
    assert said in refused(capsys, train.main, [*argv[:place], *argv[place + 2 :], *more])


@pytest.mark.parametrize(
    "more, said",
    [
        (["--device", "nonsense"], "argument --device"),
        (["--device", "cuda:7"], "no 'cuda:7'; use --device cpu"),
        (["--device", "meta"], "argument --device"),
        (["--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--minutes", "1"], "either --steps or --minutes"),
        (["--target", ""], "cannot load target ''"),
        (["--out", "file"], "file"),
        (["--features", "file"], "file"),
        (["--data", "."], "no data file ."),
        (["--init", "nowhere"], "no drafter in nowhere"),
        (["--resume"], "nothing to resume"),
        (["--make-data", "4", "--out", "."], "cannot append to ."),
        (["--make-data", "4", "--out", "a/b.jsonl"], "in a folder that exists"),
        (["--make-data", "4", "--out", "x.jsonl.gz"], "plain .jsonl"),
        (["--make-data", "4", "--out", "file"], "something else than our conversations"),
        (["--make-data", "4", "--out", "half"], "something else than our conversations"),
    ],
)
def test_train_options(training, capsys, tmp_path, more, said):
    (tmp_path / "file").write_bytes(b"notes\n\xff\n")
    (tmp_path / "half").write_text('{"prompt": "a"}\nnotes without an end')
    before = snapshot(tmp_path)
    assert said in refused(capsys, train.main, training(*more))
    after = snapshot(tmp_path)
    assert {path: text for path, text in after.items() if path in before} == before
    assert not [path for path in after if path.is_file() and path not in before]


@pytest.mark.parametrize(
    "more, said",
    [
        (["--json", "."], "--json .: no such folder or not a file"),
        (["--plot", "file"], "is not a folder"),
        (["--prompts", "."], "no prompt file ."),
        (["--table", "."], "directory"),
        (["--table", "file"], "is not a result"),
        (["--device", "cuda:99"], "argument --device"),
        (["--dtype", "x"], "argument --dtype"),
        (["--expansion", "none"], "--expansion (an option of cape); see --help"),
        (["--checkpoint", "file"], "no drafter in file"),
        (["--draft-model", "file"], "cannot load target 'file'"),
        (["--num-prompts=-1"], "--num-prompts: must be at least 0"),
        (["--top-p", "1.1"], "argument --top-p"),
        (["--seed=-1"], "argument --seed"),
        (["--method", ""], "unknown method ''"),
        (["--method", "all:x"], "unknown method 'all'"),
        (["--method", "os"], "unknown method 'os'"),
        (["--method", "cape", "--base", "os"], "base 'os'"),
        (["--method", "cape", "--base", "falcon"], "base 'falcon'"),
        (["--method", "cape", "--base", "cape"], "base 'cape'"),
        (["--method", "cape", "--sizes", "[1]"], "sizes needs one entry more"),
        (["--method", "cape", "--sizes", "[-1, 1, 1, 1]"], "none negative"),
        (["--method", "cape", "--sizes", "{}"], "argument --sizes"),
        (["--method", "cape", "--bounds", '["a"]'], "argument --bounds"),
        (["--method", "cape", "--expansion", "x"], "unknown expansion 'x'"),
    ],
)
def test_bench_options(benching, capsys, tmp_path, more, said):
    (tmp_path / "file").write_bytes(b"notes\n\xff\n")
    before = snapshot(tmp_path)
    assert said in refused(capsys, bench.main, benching(*more), "bench.py")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "more",
    [
        ["--method", "cape", "--sizes", "[9999, 9999, 9999, 9999]"],
        slow(["--method", "cape", "--max-tokens", "0"]),
        slow(["--method", "cape", "--expansion", "beam", "--width", "0"]),
        ["--method", "cape", "--expansion", "beam", "--width", "9999", "--gamma", "1"],
        slow(["--method", "cape", "--gamma", "0"]),
        ["--gamma", "0"],
        ["--gamma", str(2**31 - 1)],
        ["--num-prompts", "9999"],
    ],
)
def test_extreme_but_sensible_options_work(benching, capsys, more):
    assert refused(capsys, bench.main, benching(*more), "bench.py") is None


@pytest.mark.parametrize(
    "argv, said",
    [
        slow("train.py --method nonsense --out x", "train.py: argument --method: invalid choice"),
        slow("bench.py --table /dev/null", "bench.py: /dev/null is not a result of bench.py"),
        slow("bench.py --method nope", "bench.py: unknown method 'nope'"),
    ],
)
def test_the_real_commands(argv, said):
    command = [sys.executable, *argv.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv, said",
    [
        ("train.py --out x", "train.py: nothing to do: give --method NAME with --data and --out"),
        ("bench.py --method nope", "bench.py: unknown method 'nope'"),
        ("bench.py --method glide --seed x", "argument --seed: invalid int value: 'x'; see --help"),
    ],
)
def test_commands_in_this_process(capsys, argv, said):
    name, *options = argv.split()
    assert said in refused(capsys, {"train.py": train, "bench.py": bench}[name].main, options, name)


# -------------------------------------------------------------------------------------------- files

GOOD = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}
BAD_LINES = [
    b"\xff\xfe",
    b"{",
    b"null",
    b"3",
    b'"text"',
    b"[]",
    b"{}",
    b"[" * 100000,
    b'{"a":' * 50000,
    b"\0",
    b"NaN",
    b'{"text": 5}',
    b'{"text": null}',
    b'{"text": ["w1", "w2"]}',
    b'{"text": {"a": 1}}',
    b'{"text": "\\ud800"}',
    b'{"prompt": "w1"}',
    b'{"prompt": 1, "response": "w1"}',
    b'{"prompt": "w1", "response": null}',
    b'{"prompt": ["w1"], "response": {}}',
    b'{"messages": []}',
    b'{"messages": 4}',
    b'{"messages": [[]]}',
    b'{"messages": [{"role": "assistant"}]}',
    b'{"messages": [{"role": 3, "content": 4}]}',
    b'{"messages": [{"role": "user", "content": "w1"}]}',
    b'{"conversations": [{"from": "robot", "value": "w1"}]}',
    b'{"conversations": {"from": "human"}}',
    b'{"prompt_ids": [5], "response_ids": 7}',
    b'{"prompt_ids": [5], "response_ids": "w7"}',
    b'{"prompt_ids": [5], "response_ids": [7.5]}',
    b'{"prompt_ids": [5], "response_ids": [true]}',
    b'{"prompt_ids": [5], "response_ids": [null]}',
    b'{"prompt_ids": [5], "response_ids": [[7]]}',
    b'{"prompt_ids": null, "response_ids": [7]}',
    b'{"response_ids": [7]}',
    b'{"prompt_ids": [5], "response_ids": [-1]}',
    b'{"prompt_ids": [5], "response_ids": [48]}',
    b'{"prompt_ids": [5], "response_ids": [100000000000000000000000]}',
    b'{"prompt_ids": [5], "response_ids": [1e400]}',
    b'{"prompt_ids": [5], "response_ids": [' + b"9" * 5000 + b"]}",
    b'{"prompt_ids": {"5": 1}, "response_ids": [7]}',
]


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:60].decode(errors="replace"))
def test_a_bad_line_of_training_data(training, capsys, tmp_path, line):
    (tmp_path / "d.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    before = snapshot(tmp_path)
    said = refused(capsys, train.main, training("--data", "d.jsonl"))
    assert said.startswith("train.py: d.jsonl, line 3: ") and snapshot(tmp_path) == before


def test_bad_files_of_training_data(training, capsys, tmp_path):
    good = gzip.compress(json.dumps(GOOD).encode() * 50)
    cases = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n \n",
        "binary.jsonl": os.urandom(500),
        "plain.jsonl.gz": b"{}\n",
        "cut.jsonl.gz": good[:-9],
        "flipped.jsonl.gz": good[:14] + b"\xff\xff\xff" + good[17:],
        "none.jsonl.gz": b"",
        "prompts.jsonl": b'{"prompt_ids": [5], "response_ids": []}\n',
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        said = refused(capsys, train.main, training("--data", name))
        assert said and name in said, name
    assert not (tmp_path / "out").exists()


def mutated(value, pick):
    """The JSON value with one part replaced by something else."""
    if isinstance(value, (dict, list)) and value and pick.random() < 0.8:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = pick.choice(list(copy)) if isinstance(copy, dict) else pick.randrange(len(copy))
        if pick.random() < 0.2:
            del copy[key]
        else:
            copy[key] = mutated(copy[key], pick)
        return copy
    odd = [None, True, -1, 1.5, 10**30, float("nan"), "", "w1", "\ud800"]
    return pick.choice([*odd, [], {}, [[]], [None], {"a": []}])


@pytest.mark.parametrize("seed", range(4))
def test_mutated_training_data(training, capsys, tmp_path, seed):
    pick = random.Random(seed)
    forms = [
        GOOD,
        {"prompt": "w1 w2", "response": "w3"},
        {"text": "w1 w2 w3"},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2 w3"}]},
    ]
    _, tokenizer = train.common.load_target(training()[3])
    for _ in range(250):
        record = mutated(pick.choice(forms), pick)
        (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
        try:
            sequences = train.data.read_conversations("d.jsonl", tokenizer, 64)
        except ValueError as problem:
            assert "\n" not in str(problem) and "d.jsonl" in str(problem)
        else:
            for ids, mask in sequences:
                assert (ids.dtype, mask.dtype) == (torch.long, torch.bool)
                assert ids.shape == mask.shape and not mask[0]
                assert 0 <= int(ids.min()) and int(ids.max()) < 48


BAD_PROMPTS = [
    b"\xff\xfe",
    b"{",
    b"null",
    b"[]",
    b"3",
    b"{}",
    b'{"turns": 3}',
    b'{"turns": []}',
    b'{"turns": [3]}',
    b'{"turns": {"0": "a"}}',
    b'{"turns": [["a"]]}',
    b'{"turns": [null]}',
    b"[" * 100000,
    b'{"turns": ["\\ud800"]}',
    b'{"turn": ["a"]}',
]


@pytest.mark.parametrize("line", BAD_PROMPTS, ids=lambda line: line[:40].decode(errors="replace"))
def test_a_bad_line_of_prompts(benching, capsys, tmp_path, line):
    (tmp_path / "p.jsonl").write_bytes(b'{"turns": ["a"]}\n\n' + line + b"\n")
    (tmp_path / "r.json").write_text("kept")
    argv = benching("--prompts", "p.jsonl", "--json", "r.json")
    said = refused(capsys, bench.main, argv, "bench.py")
    assert said == 'bench.py: p.jsonl, line 3: not a JSON object with "turns": ["...", ...]'
    assert (tmp_path / "r.json").read_text() == "kept"


def test_odd_but_valid_prompts(tmp_path):
    """Any line separator but \\n is text; numbers, lists and nothing may be question ids."""
    line = '{"turns": ["a\u2028b\u0085c"], "question_id": [1], "category": null}'
    (tmp_path / "p.jsonl").write_bytes(line.encode())
    [prompt] = data.read_prompts([tmp_path / "p.jsonl"], 0)
    assert prompt == {"turns": ["a\u2028b\u0085c"], "question_id": [1], "category": "None"}


def test_bad_files_of_prompts_and_results(benching, capsys, tmp_path):
    contents = {"empty.jsonl": b"", "blank.jsonl": b"\n\n", "binary.jsonl": b"\x80" * 99}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert name in refused(capsys, bench.main, benching("--prompts", name), "bench.py")
        assert name in refused(capsys, bench.main, ["--table", name], "bench.py")


def test_mutated_results_are_shown_or_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = json.loads((ROOT / "results" / "cpu_falcon_refit.json").read_text())
    pick = random.Random(0)
    for _ in range(300):
        (tmp_path / "r.json").write_text(json.dumps(mutated(result, pick)))
        line = refused(capsys, bench.main, ["--table", "r.json"], "bench.py")
        assert line in (None, "bench.py: r.json is not a result of bench.py --json")
