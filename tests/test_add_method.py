"""The steps of tests/README.md for two more methods, in a copy of the repository: one
without weights (tools/ngram.py), and one that is trained. Nothing but their files and
names is added.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import coursework
import ngram
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy with the files ngram.py and glimpse.py, and both names in METHODS."""
    folder = tmp_path_factory.mktemp("more") / "copy"
    coursework.copy_of(folder)
    files = {
        "ngram": ROOT / "tests" / "tools" / "ngram.py",
        "glimpse": ROOT / "glide.py",
    }
    for name, path in files.items():
        shutil.copy(path, folder / f"{name}.py")
    cli = folder / "support" / "cli.py"
    added = r'\1, "ngram", "glimpse")'
    cli.write_text(
        re.sub(r"^(METHODS = \(.*)\)", added, cli.read_text(), flags=re.MULTILINE)
    )
    (folder / "tests" / "tools" / "ngram.py").unlink()
    (folder / "tests" / "test_add_method.py").unlink()
    return folder


def test_bigrams_by_hand():
    assert ngram.propose([5, 6, 7, 5], 3) == [6, 7, 5]
    assert ngram.propose([5, 6, 5, 7, 5], 2) == [7, 5]  # 7 followed 5 last
    assert ngram.propose([5, 6, 7], 3) == []


@pytest.mark.slow
def test_two_more_methods_pass_the_quick_tests_that_go_through_all(copy):
    """Among them the tests of losslessness, greedy and sampled."""
    through_all = re.compile(r"\bcli\.(METHODS|present|trainable)\b")
    files = []
    for path in sorted((copy / "tests").glob("test_*.py")):
        # The pages, which test_docs.py reads, name two files that the copy lacks.
        if path.name != "test_docs.py" and through_all.search(path.read_text()):
            files.append(f"tests/{path.name}")
    assert "tests/test_lossless.py" in files and len(files) > 5
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    for name in ("ngram", "glimpse"):
        passed = re.findall(rf"(\w+)\.py::.*\b{name}\b.* PASSED", done.stdout)
        assert passed.count("test_lossless") >= 2
