"""A method file and common.py, copied into a folder where nothing else is, decode."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import make_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support import cli

ROOT = Path(__file__).parent.parent


def base_of(method):
    """The method whose chains another one expands by default; None for the others."""
    return getattr(cli.import_method(method).Config(), "base", None)


EXPANDERS = [method for method in cli.METHODS if base_of(method)]
WITH_DEMO = [*EXPANDERS, *(name for name in cli.METHODS if name in cli.trainable())]


def save_target(folder):
    """A tiny target with a tokenizer of words and a chat template."""
    words = {f"w{i}": i for i in range(48)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    bare.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
    bare.save_pretrained(folder)
    make_llama(vocab=48).to(torch.float32).save_pretrained(folder)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What happened in a folder for each method; tools/alone.py runs in a process of its own."""
    top = tmp_path_factory.mktemp("elsewhere")
    save_target(top / "alone" / "target")
    folders = []
    for method in cli.METHODS:
        needed = [method, base_of(method)] if base_of(method) else [method]
        folders.append((top / "alone" / method, ["common", *needed]))
    for method in EXPANDERS:
        folders.append((top / "incomplete" / method, ["common", method]))
    for folder, names in folders:
        folder.mkdir(parents=True)
        for name in names:
            shutil.copy(ROOT / f"{name}.py", folder)
    script = ROOT / "tests" / "tools" / "alone.py"
    command = [sys.executable, "-I", script, *(folder for folder, _ in folders)]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", cli.METHODS)
def test_a_method_file_and_common_decode_alone(told, method):
    here = told[f"alone/{method}"]
    assert not here["support"], "support/ was found, so this test would prove nothing"
    assert here["same"]
    assert here["drafted"] > 0


def test_the_example_of_the_readme_runs(told):
    assert [here["example"] for here in told.values() if "example" in here] == [True]


@pytest.mark.parametrize("method", WITH_DEMO)
def test_a_lone_file_as_a_script_ends_with_one_line(told, method):
    """support/default_target.py, which fetches the default target, is not there."""
    code, errors = told[f"alone/{method}"]["script"]
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith(f"{method}.py: no target named, and support/default_target.py")


@pytest.mark.parametrize("method", EXPANDERS)
def test_a_file_that_expands_chains_says_whose(told, method):
    code, errors = told[f"incomplete/{method}"]["script"]
    assert code == 2
    assert errors.startswith(f"{method}.py: {base_of(method)}.py, whose drafts it expands")
    assert errors.count("\n") == 1


def imported(file):
    """The modules that a file imports when it is imported itself; functions may import more."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("method", cli.METHODS)
def test_a_method_imports_common_and_installed_packages_only(method):
    own = {path.stem for path in ROOT.glob("*.py")} | {"support", "tests"}
    names = set(imported(f"{method}.py"))
    assert names & own == {"common"}
    assert all(importlib.util.find_spec(name) for name in names)


def test_common_imports_no_method():
    own = {path.stem for path in ROOT.glob("*.py")} | {"support", "tests"}
    assert not set(imported("common.py")) & own
