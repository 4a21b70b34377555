"""Each exercise, set: its tests turn red, and grading says of each solution what is wrong."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import coursework
import pytest

ROOT = Path(__file__).parent.parent


def functions(source):
    """{name: function} of a file's top level."""
    return {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}


@pytest.mark.parametrize("name", coursework.EXERCISES)
def test_a_blank_changes_the_body_of_one_function_and_its_tests_exist(name):
    source = (ROOT / coursework.file_of(name)).read_text()
    before = functions(source)
    after = functions(coursework.blanked(source, name))
    changed = [key for key in before if ast.dump(before[key]) != ast.dump(after[key])]
    assert changed == [name.partition(".")[2]]
    old, new = before[changed[0]], after[changed[0]]
    assert ast.get_docstring(old) == ast.get_docstring(new)
    assert ast.dump(old.args) == ast.dump(new.args)
    there = functions((ROOT / "tests" / coursework.tests_of(name)).read_text())
    assert set(coursework.EXERCISES[name].tests) <= set(there)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["falcon.glance", "."], ". is there already: name a new folder"),
        (["falcon.nothing", "new"], "no exercise 'falcon.nothing': take one of common.tree_mask"),
        (["falcon.glance"], "name a new folder for the copy, after the exercise"),
        (["falcon.glance", "--grade", "prompts"], "no falcon.py in prompts or in its folders"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["coursework.py", *arguments])
    assert coursework.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"coursework.py: {line}")
    assert error.count("\n") == 1


def test_without_arguments_the_exercises_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coursework.py"])
    assert coursework.main() == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(coursework.EXERCISES)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coursework") / "copy"
    coursework.copy_of(folder, "checkpoints", "conversations", "results")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", coursework.EXERCISES)
def test_a_blank_turns_its_tests_red(name, copy):
    tests = coursework.EXERCISES[name].tests
    path = copy / coursework.file_of(name)
    whole = path.read_text()
    path.write_text(coursework.blanked(whole, name))
    told = coursework.outcomes(copy, coursework.tests_of(name), tests)
    path.write_text(whole)
    assert all(told.values()), told  # each has a line that says what is wrong
    first = told[tests[0]]
    assert "expected" in first and "got" in first, first


@pytest.mark.slow
def test_solutions_are_graded_by_the_tests_of_this_clone(tmp_path):
    """One is right, one is blank, one is no Python; another edited its own tests."""
    name = "specdecpp.oracle"
    right = (ROOT / "specdecpp.py").read_text()
    for student, source in (
        ("anna", right),
        ("ben", coursework.blanked(right, name)),
        ("carla", right.replace("def oracle(", "def oracle(:")),
    ):
        (tmp_path / student / "tests").mkdir(parents=True)
        (tmp_path / student / "specdecpp.py").write_text(source)
        edited = tmp_path / student / "tests" / "test_specdecpp.py"
        edited.write_text("def test_the_oracle_against_all_stopping_policies(): pass\n")
    command = [sys.executable, "tests/coursework.py", name, "--grade", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "anna: 1 of 1 tests pass"
    assert lines[1] == "ben: 0 of 1 tests pass"
    about = "    the oracle against all stopping policies: "
    assert lines[2].startswith(f"{about}agrees [False, False, ")
    assert lines[2].endswith("expected 7 target forwards, got 0")
    assert lines[3] == "carla: 0 of 1 tests pass"
    assert lines[4].startswith(about) and "SyntaxError" in lines[4]
    assert len(lines) == 5


@pytest.mark.slow
def test_the_printed_command_is_red_in_the_copy(tmp_path):
    out = tmp_path / "copy"
    make = [sys.executable, "tests/coursework.py", "falcon.relaxed_mask", out]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    command = made.stdout.splitlines()[-1].replace("python", sys.executable)
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "expected" in done.stdout and "got" in done.stdout
    shutil.rmtree(out)
