"""Two processes with gloo: the losses of one, a target in halves, a killed rank."""

import importlib
import json
import os
import signal
import socket
import sys
import time

import pytest
import torch
from test_faults import TRAINED, Run, assert_whole
from test_train import folder, options  # noqa: F401  folder is a fixture

import common
import train

torch.set_num_threads(1)


def launch(argv, world=2):
    """train.py as torchrun would start it, in forks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world):
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("MASTER_PORT", port),
                                ("MASTER_ADDR", "127.0.0.1")):
                patch.setenv(name, str(value))
            runs.append(Run(argv))
    return runs


def arguments(method, folder, out, *more):  # noqa: F811
    argv = options(folder, out, "--steps", "4", "--eval-every", "1", *more)
    argv[argv.index("glide")] = method
    if method == "specdecpp":
        place = argv.index("--intermediate-size")
        del argv[place : place + 2]
        argv += ["--layers", "[0, 1]"]
    return argv


def losses(out):
    return [row["loss"] for row in json.loads((out / "curve.json").read_text()) if row["loss"] is not None]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole target", "sharded target"])
@pytest.mark.parametrize("method", TRAINED)
def test_two_processes_have_the_losses_of_one(folder, tmp_path, method, sharded):  # noqa: F811
    train.main(arguments(method, folder, tmp_path / "one"))
    runs = launch(arguments(method, folder, tmp_path / "two", *["--shard-target"] * sharded))
    for code, text in [run.end() for run in runs]:
        assert code == 0, text
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 4 and two == pytest.approx(one, abs=2e-3)
    target, _ = common.load_target(str(folder))
    first, second = (common.load_drafter(importlib.import_module(method).Drafter, tmp_path / name, target).state_dict()
                     for name in ("one", "two"))
    for name in first:
        torch.testing.assert_close(first[name].float(), second[name].float(), atol=0.02, rtol=0.02)


def test_a_sharded_target_is_in_halves_before_and_after_a_forward(folder, tmp_path, monkeypatch):  # noqa: F811
    """Each process holds half of every layer's weights, and the same features come out."""
    target, _ = common.load_target(str(folder))
    ids = torch.arange(5, 25)[None]
    whole = common.target_features(target, ids, [1])
    shard = train.shard

    def checked(target, device, world):
        full = sum(p.numel() for layer in target.model.layers for p in layer.parameters())
        shard(target, device, world)

        def held():
            return sum(p.to_local().numel() for layer in target.model.layers for p in layer.parameters())

        assert held() <= full // 2 + 64
        hidden, kv = common.target_features(target, ids, [1])
        torch.testing.assert_close(hidden, whole[0])
        torch.testing.assert_close(kv[1], whole[1][1])
        assert held() <= full // 2 + 64
        print("SEEN", held(), full)

    monkeypatch.setattr(train, "shard", checked)  # the forks inherit it
    for code, text in [run.end() for run in launch(arguments("glide", folder, tmp_path / "two", "--shard-target"))]:
        assert code == 0 and "SEEN" in text, text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_with_a_message(folder, tmp_path, victim):  # noqa: F811
    out = tmp_path / "out"
    runs = launch(options(folder, out, "--steps", "100000", "--save-every", "2"))
    begun = time.monotonic()
    while not (out / "config.json").exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    assert runs[victim].kill()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(runs[1 - victim].process, signal.SIGKILL))
    signal.alarm(60)  # so that a hang is a failure and not a hang
    code, text = runs[1 - victim].end()
    signal.alarm(0)
    assert code == 2 and "Traceback" not in text
    assert text.endswith("train.py: another process of this run has ended or is out of reach; go on with --resume\n")
    step = assert_whole(out, common.load_target(str(folder))[0])
    train.main(options(folder, out, "--steps", str(step + 3), "--resume"))


def test_sharding_alone_is_refused(folder, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="--shard-target needs torchrun"):
        train.main(arguments("glide", folder, tmp_path / "out", "--shard-target"))
    assert not (tmp_path / "out").exists() and "RANK" not in os.environ and sys.argv[0] != "train.py"
