"""A set exercise turns its tests red, and grading says what is wrong in a solution."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import coursework
import pytest

ROOT = Path(__file__).parent.parent


def functions(source):
    """{name: function} of a file's top level."""
    return {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}


def changed(before, after):
    """The names of the functions that are not the same in two files."""
    return [key for key in before if ast.dump(before[key]) != ast.dump(after[key])]


@pytest.mark.parametrize("name", coursework.EXERCISES)
def test_a_blank_changes_the_body_of_one_function_and_its_tests_exist(name):
    source = (ROOT / coursework.file_of(name)).read_text()
    before = functions(source)
    after = functions(coursework.blanked(source, name))
    [function] = changed(before, after)
    assert function == name.partition(".")[2]
    old, new = before[function], after[function]
    assert ast.get_docstring(old) == ast.get_docstring(new)
    assert ast.dump(old.args) == ast.dump(new.args)
    there = functions((ROOT / "tests" / coursework.tests_of(name)).read_text())
    assert set(coursework.EXERCISES[name].tests) <= set(there)


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["falcon.glance", "."], ". is there already: name a new folder"),
        (["falcon.no", "new"], "no exercise 'falcon.no': take one of common.tree_mask"),
        (["falcon.glance"], "name a new folder for the copy, after the exercises"),
        (["--grade", "."], "name an exercise, or several"),
        (["falcon.glance", "--grade", "prompts"], "no falcon.py in prompts or in its"),
        (["falcon.glance", "--results", "x"], "--results goes with --grade SOLUTIONS"),
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


def test_a_copy_for_students_is_small_and_tells_no_solution(tmp_path):
    """Two functions are blank, one of them in a file with a third that is not."""
    out = tmp_path / "new"
    coursework.make(["common.rejection_sample", "glide.block_mask", "common.walk"], out)
    blank = [path.name for path in out.glob("*.py") if "To be wr" in path.read_text()]
    assert sorted(blank) == ["common.py", "glide.py"]
    assert (out / "common.py").read_text().count("# To be written.") == 2
    before = functions((ROOT / "common.py").read_text())
    after = functions((out / "common.py").read_text())
    assert changed(before, after) == ["walk", "rejection_sample"]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4e6
    assert {"assignment.md", "falcon.py", "test_verify.py"} <= {x.name for x in files}
    assert not {"solutions.md", "mutants.py", "checkpoints"} & {x.name for x in files}
    # Nor does a text among the prompts, some of which are files of this repository.
    names = "|".join(name.partition(".")[2] for name in coursework.EXERCISES)
    for path in files:
        if path.suffix != ".py":
            assert not re.search(
                rf"def ({names})\(", path.read_text("utf-8", "replace")
            )
    assert (out / "AGENTS.md").read_text().count("\n") == 6


def test_the_points_of_the_assignment_add_up():
    """And each coded part begins with the first of its tests, of five points each."""
    rows = []
    for line in (ROOT / "tests" / "assignment.md").read_text().splitlines():
        if cells := re.match(r"\| (\w\d?) \| (.*) \| (\d+) \| \d+ \| (.*)\|", line):
            rows.append([cell.strip() for cell in cells.groups()])
    assert sum(int(points) for _, _, points, _ in rows) == 100
    coded = [row for row in rows if row[1].startswith("code: ")]
    assert len(coded) == 3
    for _, about, points, command in coded:
        name = about.removeprefix("code: ").strip("`")
        tests = coursework.EXERCISES[name].tests
        assert int(points) == coursework.POINTS * len(tests)
        assert command == f"`tests/{coursework.tests_of(name)}::{tests[0]}`"
    solutions = ROOT / "tests" / "solutions.md"  # a student's copy has none
    answers = solutions.read_text() if solutions.exists() else ""
    worth = {part: int(points) for part, _, points, _ in rows}
    parts = re.findall(r"^## (\w\d?) \((.*) points.*\)$", answers, re.MULTILINE)
    for part, told in parts:
        numbers = [int(number) for number in re.findall(r"\d+", told)]
        count = 5 if told == "3" else 1  # "3 points each", of five questions
        assert worth[part] == count * sum(numbers), part
    assert len(parts) == 3 or not answers


def test_a_file_is_found_under_the_names_that_browsers_give_it(tmp_path):
    for other in ("glide_old.py", "my glide.py", "glide.txt", "falcon (1).py"):
        (tmp_path / other).touch()
    assert coursework.handed_in(tmp_path, "glide.py") == []
    given = ["glide (1).py", "glide(2).py", "glide-3.py", "glide.py"]
    for name in given:
        (tmp_path / name).touch()
    found = coursework.handed_in(tmp_path, "glide.py")
    assert [path.name for path in found] == sorted(given)


def test_each_exercise_is_graded_beside_files_of_this_clone(
    tmp_path, monkeypatch, capsys
):
    """A student's wrong glide.py is gone when the tests of common.py run."""
    run = []

    def outcomes(copy, file, tests):
        sources = [(copy / each).read_text() for each in ("common.py", "glide.py")]
        run.append((file, sources))
        wrong = "expected 1, got 2" if file == "test_glide.py" else ""
        return dict.fromkeys(tests, wrong)

    monkeypatch.setattr(coursework, "outcomes", outcomes)
    student = tmp_path / "ann"
    student.mkdir()
    (student / "common (1).py").write_text("ours")
    (student / "glide.py").write_text("theirs")
    names = ["glide.block_mask", "common.rejection_sample", "falcon.glance"]
    results = tmp_path / "results.json"
    assert coursework.grade(names, student, results) == 2
    common, glide = ((ROOT / each).read_text() for each in ("common.py", "glide.py"))
    assert run == [
        ("test_glide.py", [common, "theirs"]),
        ("test_verify.py", ["ours", glide]),
    ]
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "ann, common.rejection_sample: 3 of 3 tests pass",
        "ann, falcon.glance: 0 of 2 tests pass",
        "    glancing worked by hand: no falcon.py",
        "    glancing against the definition: no falcon.py",
    ]
    # Gradescope sums up the scores.
    entries = json.loads(results.read_text())["tests"]
    assert len(entries) == 2 + 3 + 2
    assert sum(entry["score"] for entry in entries) == 3 * coursework.POINTS
    assert sum(entry["max_score"] for entry in entries) == 7 * coursework.POINTS
    assert entries[0] == {
        "name": "glide.block_mask: test_the_block_mask_is_the_one_that_is_drawn",
        "max_score": coursework.POINTS,
        "score": 0,
        "status": "failed",
        "output": "expected 1, got 2",
    }
    # Two files that may be meant, and a second student.
    (student / "common.py").write_text("ours, too")
    assert coursework.grade(["common.rejection_sample"], tmp_path) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith(": common (1).py and common.py are there: keep one")
    (tmp_path / "ben").mkdir()
    with pytest.raises(ValueError, match="for one student"):
        coursework.grade(["common.rejection_sample"], tmp_path, results)


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
    """One is right, one is no Python, and one is a copy in which the printed command is
    red; all have edited their tests.
    """
    name = "specdecpp.oracle"
    right = (ROOT / "specdecpp.py").read_text()
    how = {"cwd": ROOT, "capture_output": True, "text": True}
    command = [sys.executable, "tests/coursework.py", name]
    made = subprocess.run([*command, tmp_path / "ben"], **how)
    begin = made.stdout.splitlines()[-1].replace("python", sys.executable)
    done = subprocess.run(begin, shell=True, **how)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "expected" in done.stdout and "got" in done.stdout
    for student, source in (
        ("anna", right),
        ("carla", right.replace("def oracle(", "def oracle(:")),
    ):
        (tmp_path / student / "tests").mkdir(parents=True)
        (tmp_path / student / "specdecpp.py").write_text(source)
    for edited in tmp_path.glob("*/tests"):
        fake = "def test_the_oracle_against_all_stopping_policies(): pass\n"
        (edited / "test_specdecpp.py").write_text(fake)
    done = subprocess.run([*command, "--grade", tmp_path], **how)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "anna, specdecpp.oracle: 1 of 1 tests pass"
    assert lines[1] == "ben, specdecpp.oracle: 0 of 1 tests pass"
    about = "    the oracle against all stopping policies: "
    assert lines[2].startswith(f"{about}agrees [False, False, ")
    assert lines[2].endswith("expected 7 target forwards, got 0")
    assert lines[3] == "carla, specdecpp.oracle: 0 of 1 tests pass"
    assert lines[4].startswith(about) and "SyntaxError" in lines[4]
    assert len(lines) == 5
