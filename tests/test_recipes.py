"""checkpoints/train.sh: its commands are understood, and are one schedule over all data each."""

import os
import subprocess
from pathlib import Path

import pytest

import common
import train
from support import data

ROOT = Path(train.__file__).parent


@pytest.mark.parametrize("gpu", [False, True])
def test_the_commands_that_made_the_checkpoints_are_understood(tmp_path, gpu, monkeypatch):
    """checkpoints/train.sh with a python that notes its arguments instead of training."""
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    script = f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not gpu)}\necho "$@" >> {tmp_path}/said\n'
    script += 'while [ "$1" != --out ]; do shift; done\nmkdir -p "$2"\n'
    stand_in.write_text(script)
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "checkpoints" / "train.sh"), str(tmp_path / "out")]
    subprocess.run(command, env=env, check=True, timeout=60)
    said = (tmp_path / "said").read_text().splitlines()
    trained, made = [], []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "train", lambda args, overrides: trained.append((args, overrides)))
    monkeypatch.setattr(common, "load_target", lambda *_, **__: (None, None))
    monkeypatch.setattr(data, "make_conversations", lambda *given: made.append(given))
    for line in said:
        script, *argv = line.split(" ")
        assert script == "train.py"
        train.main(argv)
    assert len(trained) == 7 and len(made) == gpu
    for args, overrides in trained:
        head = overrides.get("stage") == "head"
        assert bool(args.init) == head and args.steps >= (1000 if head else 10000)
        files = [Path(path) for path in args.data]
        assert gpu or sorted(files) == sorted(Path("conversations").glob("*.jsonl.gz"))
    again = len(said)
    subprocess.run([*command, "glide"], env=env, check=True, timeout=60)
    assert gpu or len((tmp_path / "said").read_text().splitlines()) == again  # all is done
