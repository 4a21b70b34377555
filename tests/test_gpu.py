"""results/tools/gpu.sh with a `python` that only writes down what it is asked to do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bench
import train

ROOT = Path(bench.__file__).parent
STUB = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
with open(os.environ["ASKED"], "a") as file:
    print(json.dumps(words), file=file)
for name in ("--json", "--out"):
    if name in words:
        path = Path(words[words.index(name) + 1])
        if name == "--out" and "--method" in words:
            path.mkdir(parents=True)
            path = path / "config.json"
        path.touch()
"""
pytestmark = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("timeout")),
    reason="gpu.sh needs bash and timeout",
)


@pytest.fixture
def stage(tmp_path):
    """A function that runs a stage, and returns (exit code, commands, stderr)."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    asked = tmp_path / "asked"

    def run(*words, **more):
        asked.write_text("")
        env = os.environ | {"ASKED": str(asked)} | more
        env["PATH"] = f"{stub.parent}:{env['PATH']}"
        script = ROOT / "results" / "tools" / "gpu.sh"
        command = ["bash", script, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        lines = asked.read_text().splitlines()
        return done.returncode, [json.loads(line) for line in lines], done.stderr

    return run


@pytest.mark.parametrize("more, dtypes", [([], 2), (["--rehearse"], 1)])
def test_every_command_exists_and_is_given_once(stage, tmp_path, more, dtypes):
    out = str(tmp_path / "out")
    code, commands, _ = stage("time", out, *more)
    assert code == 0
    programs = ["bench.py", "bench.py", "results/tools/costs.py"] * dtypes
    programs.append("results/tools/launches.py")
    assert [words[0] for words in commands] == programs
    for program, *words in commands[:-1]:
        args = bench.command.parse(words, "")
        if program == "bench.py":
            bench.check(args)
    files = [words[words.index("--json") + 1] for words in commands]
    assert len({*files}) == len(files) <= 8
    assert {Path(file).parent for file in files} == {Path(out, "time")}

    code, (data, *commands), _ = stage("train", out, *more)
    assert code == 0
    args, _ = train.command.parse(data[1:], "")
    assert args.make_data and args.out == f"{out}/conversations.jsonl"
    commands = [words for words in commands if words != ["-", *words[1:]]]
    names = {"glide", "ctc_drafter", "falcon", "eagle", "medusa"}
    names |= {"specdecpp-draft", "specdecpp"}
    assert {Path(words[words.index("--out") + 1]).name for words in commands} == names
    assert len(commands) == len(names)
    for program, *words in commands:
        args, module = train.command.parse(words, "")
        assert program == "train.py" and module and args.steps and not args.minutes
        name = Path(args.out).name
        start = f"{out}/drafters/specdecpp-draft"
        if name != "specdecpp":
            start = f"checkpoints/{name.removesuffix('-draft')}"
        assert args.init == start
        assert all((ROOT / file).is_file() for file in args.data)
        assert args.out == f"{out}/drafters/{name}"

    code, commands, _ = stage("rows", out, *more)
    assert code == 0 and len(commands) == 2
    arms = bench.command.parse(commands[0][1:], "").method
    for arm, name in (("cape:cpu", "glide"), ("falcon:paper", "falcon")):
        assert f"{arm}@{out}/drafters/{name}" in arms
    for name in ("time", "rows"):  # what is done stays
        assert stage(name, out, *more)[:2] == (0, [])
    assert [words[0] for words in stage("train", out, *more)[1]] == ["-"]  # it packs


def test_it_stops_when_the_time_is_up(stage, tmp_path):
    code, commands, said = stage("time", str(tmp_path / "out"), MINUTES="0")
    assert code == 75 and not commands and "run it again to continue" in said


def test_a_wrong_command_line_is_one_line(stage, tmp_path):
    for words in ([], ["time"], ["sometime", str(tmp_path / "out")]):
        code, commands, said = stage(*words)
        assert code and not commands and "usage: bash results/tools/gpu.sh" in said
    assert not (tmp_path / "out").exists()
