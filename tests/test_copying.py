"""A method file and common.py, copied into a folder where nothing else is, decode."""

import importlib
import inspect
import re
import runpy
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from chat import refused
from tiny import untrained

import common
from support import cli

ROOT = Path(__file__).parent.parent


# CAPE has no drafter of its own: it expands the drafts of GLIDE.
def imported(method: str) -> list[str]:
    """The other methods that a method's file imports, such as glide in cape.py."""
    found = re.findall(r"^ *import (\w+)", (ROOT / f"{method}.py").read_text(), re.M)
    return [name for name in found if name in cli.METHODS]


NEEDS = {method: imported(method) for method in cli.METHODS if imported(method)}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A function that copies files into a folder, and they are imported from there."""
    ours = {"common", "bench", "train", "support", *cli.METHODS}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        monkeypatch.delitem(sys.modules, name)
    for name in ours - sys.modules.keys():  # what is imported now leaves at the end
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    others = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    monkeypatch.chdir(tmp_path)

    def copy(*names):
        for name in names:
            shutil.copy(ROOT / f"{name}.py", tmp_path)

    return copy


@pytest.mark.parametrize("method", cli.METHODS)
def test_a_method_file_and_common_decode_alone(copied, method, folder, tmp_path):
    copied("common", method, *NEEDS.get(method, []))
    with pytest.raises(ImportError):
        importlib.import_module("support")
    module, theirs = map(importlib.import_module, (method, "common"))
    assert theirs is not common and Path(module.__file__).parent == tmp_path
    target, tokenizer = theirs.load_target(str(folder))
    expands = "chains" in inspect.signature(module.drafts).parameters
    owner = importlib.import_module("glide") if expands else module
    drafts = owner.drafts
    if hasattr(owner, "Drafter"):
        untrained(owner, target, draft_vocab=16).save_pretrained("drafter")
        drafter = theirs.load_drafter(owner.Drafter, "drafter", target)
        drafts = partial(drafts, drafter=drafter)

    def of_the_method(decoding):
        return module.drafts(drafts(decoding)) if expands else drafts(decoding)

    ids = tokenizer("w1 w2 w3 w1 w2", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False}
    stats = theirs.Stats()
    decoder = theirs.speculate(of_the_method, callback=stats)
    output = target.generate(ids, custom_generate=decoder, **options)
    assert torch.equal(output, target.generate(ids, **options))
    assert stats.drafted > 0


NO_TARGET = "the default target and .gguf files need support/default_target.py"
WITH_DEMO = [name for name in cli.METHODS if name in (*NEEDS, *cli.trainable())]
ENDS = [(method, NEEDS.get(method, []), NO_TARGET) for method in WITH_DEMO]
ENDS += [("cape", [], "glide.py, whose drafts")]


@pytest.mark.parametrize("method, others, said", ENDS)
def test_a_script_that_lacks_a_file_ends_with_one_line(
    copied, method, others, said, monkeypatch, capsys
):
    copied("common", method, *others)
    monkeypatch.setattr(sys, "argv", [f"{method}.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"{method}.py", run_name="__main__")
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"{method}.py: {said}")


def test_a_copied_support_folder_may_lack_the_default_target(monkeypatch):
    """As one that holds only packed.py."""
    monkeypatch.delitem(sys.modules, "support.default_target", raising=False)
    monkeypatch.setitem(sys.modules, "support", types.ModuleType("support"))
    with refused(NO_TARGET):
        common.load_target()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lengths", "stop_rules", "tables"])
def test_a_tool_of_results_starts_as_a_script(tmp_path, name):
    """From any folder; pytest's own path would hide what a script does not find."""
    script = ROOT / "results" / "tools" / f"{name}.py"
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"usage: {name}.py" in done.stdout
