"""Break the code in one place at a time, in a copy of it, and see that a test turns
red.

    python tests/tools/mutation.py                # all; exit code 1 if one survives
    python tests/tools/mutation.py glide.py         # those of one file
    python tests/tools/mutation.py --sample 6     # six, drawn by the commit's hash

A mutant replaces a piece of text that occurs once, see mutants.py. It makes the program
wrong, not merely different.

The tests run in children, each a fork of a process that has imported torch and the
other large packages, and no file of the repository that a mutant may change.
"""

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

# What most tests need, so that no child has to import it again.
import accelerate.state  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # where this is run as a script

import coursework  # noqa: E402
from mutants import MUTANTS  # noqa: E402


class Reds:
    """A plugin of pytest: the names of what fails."""

    def __init__(self):
        self.names = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.names.append(report.nodeid.partition("::")[2].partition("[")[0])

    def pytest_collectreport(self, report):  # a file that cannot be imported
        if report.failed:
            self.names.append(Path(report.nodeid).name)


def run(copy: Path, tests: str, sender) -> None:
    """In a child: send the first of a file's tests that fails; "" if all pass."""
    for module in ("coursework", "mutants"):  # the copy has its own, first on its path
        del sys.modules[module]
    os.chdir(copy)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a third of a second
    reds = Reds()
    options = "-x -p no:cacheprovider --tb=no".split()
    code = pytest.main([*options, f"tests/{tests}"], [reds])
    sender.send([*reds.names, f"{tests} stops"][0] if code else "")


def first_red(copy: Path, file: str) -> str:
    """The first of a file's tests that fails in a copy; "" if all pass."""
    files = [coursework.tests_of(Path(file).name)]
    if file == "common.py":  # whose lower part is tested on targets of many kinds
        files += ["test_targets.py", "test_long.py", "test_loading.py"]
    fork = multiprocessing.get_context("fork")
    for tests in files:
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=run, args=(copy, tests, sender))
        child.start()
        sender.close()  # the child's own end is the only one: it shows when it dies
        red = f"{tests}, which does not end"
        try:
            if receiver.poll(coursework.SECONDS):
                red = receiver.recv()
        except EOFError:
            red = f"{tests}, which dies"
        child.kill()
        child.join()
        if red:
            return red
    return ""


def noticed_by(copy: Path, file: str, old: str, new: str) -> str:
    """The test that notices a mutant; "" if it survives."""
    whole = (copy / file).read_text()
    if whole.count(old) != 1:
        raise SystemExit(
            f"{file} has this text {whole.count(old)} times, not once: {old!r}"
        )
    mutant = whole.replace(old, new)
    compile(mutant, file, "exec")  # a SyntaxError here is a mistake in mutants.py
    (copy / file).write_text(mutant)
    found = first_red(copy, file)
    (copy / file).write_text(whole)
    return found


def chosen(files: list[str], sample: int | None) -> list[tuple]:
    """The mutants to try, (file, old, new, what)."""
    mutants = []
    for file in files or MUTANTS:
        mutants += [(file, *change) for change in MUTANTS[file]]
    if sample is None:
        return mutants
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return random.Random(commit).sample(mutants, min(sample, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help=f"of which files: {' '.join(MUTANTS)}")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only N, by the commit's hash"
    )
    args = parser.parse_args()
    unknown = set(args.files) - set(MUTANTS)
    if unknown:
        parser.error(
            f"no mutants of {' '.join(unknown)}; there are {' '.join(MUTANTS)}"
        )
    mutants = chosen(args.files, args.sample)

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        coursework.copy_of(copy, "conversations", "results")
        for file in dict.fromkeys(mutant[0] for mutant in mutants):
            red = first_red(copy, file)
            if red:
                print(f"{red} fails without any mutant; a red test would mean nothing")
                return 1
        # These runs have left the bytecode of all files. From now on none is written:
        # two mutants within a second would share theirs.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        survivors = 0
        for file, old, new, what in mutants:
            found = noticed_by(copy, file, old, new)
            survivors += not found
            print(f"{file}: {what}: {found or 'SURVIVES'}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
