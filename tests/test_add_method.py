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
def test_all_quick_tests_pass_with_two_more_methods(copy):
    """Those of losslessness, greedy and sampled, among them: they find both in METHODS.
    No copies of the copy are made, and the pages name two files that it lacks.
    """
    without = ["--ignore=tests/test_coursework.py", "--ignore=tests/test_docs.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *without]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 200
