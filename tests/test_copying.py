"""A method file and common.py, copied into a folder where nothing else is, decode."""

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import chat
import pytest

import common
from support import cli

ROOT = Path(__file__).parent.parent


# CAPE has no drafter of its own: it expands the drafts of GLIDE.
def imported(method: str) -> list[str]:
    """The other methods that a method's file imports, such as glide in cape.py."""
    found = re.findall(r"^ *import (\w+)", (ROOT / f"{method}.py").read_text(), re.M)
    return [name for name in found if name in cli.METHODS]


NEEDS = {method: imported(method) for method in cli.METHODS if imported(method)}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What happened in a folder for each method; tools/alone.py runs in a process of
    its own.
    """
    top = tmp_path_factory.mktemp("elsewhere")
    chat.make_chat(top / "alone" / "target")
    folders = {f"incomplete/{method}": ["common", method] for method in NEEDS}
    for method in cli.METHODS:
        folders[f"alone/{method}"] = ["common", method, *NEEDS.get(method, [])]
    for folder, names in folders.items():
        (top / folder).mkdir(parents=True)
        for name in names:
            shutil.copy(ROOT / f"{name}.py", top / folder)
    script = ROOT / "tests" / "tools" / "alone.py"
    command = [sys.executable, "-I", script, *folders]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", cli.METHODS)
def test_a_method_file_and_common_decode_alone(told, method):
    here = told[f"alone/{method}"]
    assert not here["support"], "support/ was found, so this test would prove nothing"
    assert here["same"]
    assert here["drafted"] > 0


NO_TARGET = "the default target and .gguf files need support/default_target.py"
WITH_DEMO = [name for name in cli.METHODS if name in (*NEEDS, *cli.trainable())]
ENDS = [(f"alone/{method}", NO_TARGET) for method in WITH_DEMO]
ENDS += [("incomplete/cape", "glide.py, whose drafts")]


@pytest.mark.parametrize("folder, said", ENDS)
def test_a_script_that_lacks_a_file_ends_with_one_line(told, folder, said):
    code, errors = told[folder]["script"]
    assert code == 2
    # Where torchao is installed, it complains on import of what it lacks.
    lines = [line for line in errors.splitlines() if "torchao" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{Path(folder).name}.py: {said}")


def test_a_copied_support_folder_may_lack_the_default_target(monkeypatch):
    """As one that holds packed.py alone."""
    monkeypatch.delitem(sys.modules, "support.default_target", raising=False)
    monkeypatch.setitem(sys.modules, "support", types.ModuleType("support"))
    with pytest.raises(common.UserError, match=NO_TARGET):
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
