"""Each exercise, made: the test it names goes red, and says what went in, what was expected and
what came out."""

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys

import coursework
import pytest
from test_house import ROOT

README = (ROOT / "tests" / "README.md").read_text()


def test_the_table_lists_the_exercises():
    rows = re.findall(r"^\| `(\w+\.\w+)`.* \| `([\w/.:]+)` \|$", README, re.MULTILINE)
    assert dict(rows) == {name: each.test for name, each in coursework.EXERCISES.items()}


def arguments_of(test, request):
    """The first of the arguments that a test is parametrised with, and its fixtures."""
    given = {}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].replace(",", " ").split()
            first = next(iter(mark.args[1]))
            if isinstance(first, type(pytest.param())):
                first = first.values if len(names) > 1 else first.values[0]
            given |= dict(zip(names, [first] if len(names) == 1 else first))
    wanted = set(inspect.signature(test).parameters) - set(given)
    return given | {name: request.getfixturevalue(name) for name in wanted}


@pytest.mark.parametrize("name", coursework.EXERCISES)
def test_a_blank_is_noticed_and_the_message_says_how(name, request, monkeypatch):
    """Here the body is exchanged in place; the copies themselves are made below."""
    path = coursework.source_of(name)
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    function = name.partition(".")[2]
    source = coursework.blanked((ROOT / path).read_text(), name)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", "") == function]
    namespace = dict(vars(module))
    exec(compile(tree, str(path), "exec"), namespace)
    real, blank = (inspect.unwrap(each[function]) for each in (vars(module), namespace))
    assert blank.__doc__ == real.__doc__
    assert list(inspect.signature(blank).parameters) == list(inspect.signature(real).parameters)
    file, _, test = coursework.EXERCISES[name].test.partition("::")
    test = getattr(importlib.import_module(file.split("/")[1].removesuffix(".py")), test)
    arguments = arguments_of(test, request)
    monkeypatch.setattr(real, "__code__", blank.__code__)
    with pytest.raises(AssertionError) as caught:
        test(**arguments)
    message = str(caught.value).lower()
    given, expected, rest = message.partition("expected")
    assert re.search(r"[\d\[]", given) and expected and "got" in rest, message


def test_a_copy_differs_in_one_function_only(tmp_path, monkeypatch, capsys):
    small = tmp_path / "repository"
    shutil.copytree(ROOT / "tests", small / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "falcon.py", small)
    monkeypatch.setattr(coursework, "ROOT", small)
    monkeypatch.setattr(sys, "argv", ["coursework.py", "falcon.glance", str(tmp_path / "out")])
    coursework.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith(
        "python -m pytest -n 0 -x tests/test_falcon.py::test_glancing_worked_by_hand"
    )
    before, after = (
        ast.parse((folder / "falcon.py").read_text()) for folder in (small, tmp_path / "out")
    )
    other = [
        new.name
        for old, new in zip(before.body, after.body, strict=True)
        if ast.dump(old) != ast.dump(new)
    ]
    assert other == ["glance"]
    for wrong, line in (
        (["falcon.glance", str(tmp_path / "out")], "is there already; name a new folder"),
        (["falcon.nothing", "new"], "no exercise 'falcon.nothing'; there are common.ancestor_mask"),
        (["falcon.glance"], "name a new folder for the copy"),
    ):
        monkeypatch.setattr(sys, "argv", ["coursework.py", *wrong])
        with pytest.raises(SystemExit) as ended:
            coursework.main()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and line in error and error.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["coursework.py"])
    coursework.main()
    assert len(capsys.readouterr().out.splitlines()) == len(coursework.EXERCISES)


@pytest.mark.slow
@pytest.mark.parametrize("name", coursework.EXERCISES)
def test_the_printed_command_is_red_in_the_copy(name, tmp_path):
    out = tmp_path / "copy"
    made = subprocess.run(
        [sys.executable, "tests/coursework.py", name, out], cwd=ROOT, capture_output=True, text=True
    )
    command = made.stdout.splitlines()[-1].replace("python", sys.executable)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = "\n".join(line for line in done.stdout.splitlines() if line.startswith("E ")).lower()
    assert "expected" in shown and "got" in shown, shown
    shutil.rmtree(out)
