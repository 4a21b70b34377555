"""Break the code in one place at a time, in a copy of it, and see that a test turns red.

    python tests/tools/mutation.py                  # all; exit code 1 if a mutant survives
    python tests/tools/mutation.py glide.py         # those of one file
    python tests/tools/mutation.py --sample 6       # six of all, drawn by the commit's hash

A mutant replaces a piece of text that occurs once, see mutants.py. It makes the program wrong, not
merely different.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # where this is run as a script

import coursework  # noqa: E402
from mutants import MUTANTS  # noqa: E402


def first_red(copy: Path, files: tuple[str, ...]) -> str:
    """The first test of some test files that fails in a copy; "" if all pass."""
    for file in files:
        told = coursework.outcomes(copy, file, (), ["-x"])
        if not told:
            return f"{file}, which does not end"
        for test, what in told.items():
            if what:
                return test or f"{file}, which cannot be imported"
    return ""


def noticed_by(copy: Path, path: str, files: tuple[str, ...], old: str, new: str) -> str:
    """The test that notices a mutant; "" if it survives."""
    whole = (copy / path).read_text()
    if whole.count(old) != 1:
        raise SystemExit(f"{path} has this text {whole.count(old)} times, not once: {old!r}")
    (copy / path).write_text(whole.replace(old, new))
    found = first_red(copy, files)
    (copy / path).write_text(whole)
    return found


def chosen(names: list[str], sample: int | None) -> list[tuple]:
    """The mutants to try, (path, tests, old, new, what)."""
    mutants = []
    for path, (files, changes) in MUTANTS.items():
        if path in names or not names:
            mutants += [(path, files, *change) for change in changes]
    if sample is None:
        return mutants
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return random.Random(commit).sample(mutants, min(sample, len(mutants)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help=f"of which files: {' '.join(MUTANTS)}")
    parser.add_argument("--sample", type=int, metavar="N", help="only N, by the commit's hash")
    args = parser.parse_args()
    unknown = set(args.files) - set(MUTANTS)
    if unknown:
        parser.error(f"no mutants of {' '.join(unknown)}; there are {' '.join(MUTANTS)}")
    mutants = chosen(args.files, args.sample)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants within a second would share theirs

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        coursework.copy_of(copy, "conversations", "results")
        for files in dict.fromkeys(mutant[1] for mutant in mutants):
            red = first_red(copy, files)
            if red:
                print(f"{red} fails without any mutant; a red test would mean nothing")
                return 1
        survivors = 0
        for path, files, old, new, what in mutants:
            start = time.monotonic()
            found = noticed_by(copy, path, files, old, new)
            survivors += not found
            seconds = time.monotonic() - start
            print(f"{path}: {what}: {found or 'SURVIVES'} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
