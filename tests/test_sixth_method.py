"""The eight steps of tests/README.md, followed literally for two more methods: one without weights
(tools/ngram.py), and one that is trained, a copy of GLIDE without two of its Config's fields."""

import ast
import importlib
import re
import shutil
import subprocess
import sys

import pytest
import test_families
from test_house import ROOT

STEPS = (ROOT / "tests" / "README.md").read_text().split("eight steps\n")[1].split("\n## ")[0]


def without_fields(source, *names):
    """Source of a method whose Config has no such fields; where it read them it reads numbers."""
    lines = source.splitlines(keepends=True)
    [config] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    ]
    for node in config.body[::-1]:
        if isinstance(node, ast.AnnAssign) and node.target.id in names:
            del lines[node.lineno - 1 : node.end_lineno]
    source = "".join(lines)
    for name in names:
        source = re.sub(rf"\b(?:\w+\.)*config\.{name}\b", "24", source)
    return source


def sixth(name):
    """The file of a sixth method."""
    if name == "ngram":
        return (ROOT / "tests" / "tools" / "ngram.py").read_text()
    source = (ROOT / "glide.py").read_text()
    return without_fields(source, "intermediate_size", "draft_vocab")


NAMES = ("ngram", "glimpse")


def test_the_steps_are_eight_and_name_what_the_files_have():
    assert re.findall(r"^(\d)\. ", STEPS, re.MULTILINE) == list("12345678")
    wanted = set(
        re.findall(r"`(Config|Drafter|build|loss|alpha|propose|generate|VARIANTS)\b", STEPS)
    )
    assert len(wanted) == 8
    for name, optional in (("ngram", {"Drafter", "build", "loss", "alpha"}), ("glimpse", set())):
        body = ast.parse(sixth(name)).body
        made = {node.name for node in body if hasattr(node, "name")}
        made |= {node.targets[0].id for node in body if isinstance(node, ast.Assign)}
        assert wanted - made == optional, name


@pytest.mark.parametrize("name", NAMES)
def test_a_sixth_method_decodes_without_loss(name, tmp_path, monkeypatch):
    """The heart of it, here; the whole of it, in a copy of the repository, is the next test."""
    (tmp_path / f"{name}.py").write_text(sixth(name))
    monkeypatch.syspath_prepend(tmp_path)
    fields = importlib.import_module(name).Config.__dataclass_fields__
    assert not {"intermediate_size", "draft_vocab", "base"} & set(fields)
    test = test_families.test_trains_saves_loads_and_decodes_without_loss
    test("Llama", name, tmp_path / "drafter")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_eight_steps_are_enough(name, tmp_path):
    """Its file and its name in METHODS: nothing else is edited."""
    copy = tmp_path / "copy"
    unneeded = shutil.ignore_patterns(".git", "checkpoints", "conversations", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=unneeded)
    (copy / f"{name}.py").write_text(sixth(name))
    cli = copy / "support" / "cli.py"
    known = re.search(r"^METHODS = \((.*)\)", cli.read_text(), re.MULTILINE)
    cli.write_text(cli.read_text().replace(known[1], f'{known[1]}, "{name}"'))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    for files, selected in (
        (["test_families.py", "test_properties.py"], ["-k", name]),
        (["test_house.py"], []),
    ):
        run = [*command, *selected, *(f"tests/{file}" for file in files)]
        done = subprocess.run(run, cwd=copy, capture_output=True, text=True)
        passed = re.search(r"(\d+) passed", done.stdout)
        assert done.returncode == 0, done.stdout[-3000:]
        assert int(passed[1]) >= 5 and "skipped" not in done.stdout
