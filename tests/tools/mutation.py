"""Break the code in one place at a time, in a copy of it, and see that a test turns
red.

    python tests/tools/mutation.py                # all; exit code 1 if one survives
    python tests/tools/mutation.py glide.py         # those of one file
    python tests/tools/mutation.py --sample 6     # six, drawn by the commit's hash

A mutant replaces a piece of text that occurs once, see mutants.py. It makes the program
wrong, not merely different.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # where this is run as a script

import coursework  # noqa: E402
from mutants import MUTANTS  # noqa: E402


def first_red(copy: Path, file: str) -> str:
    """The first of a file's tests that fails in a copy; "" if all pass."""
    files = [coursework.tests_of(Path(file).name)]
    if file == "common.py":  # whose lower part is tested on targets of many kinds
        files += ["test_targets.py", "test_long.py", "test_loading.py"]
    for tests in files:
        told = coursework.outcomes(copy, tests, (), ["-x"])
        if not told:
            return f"{tests}, which does not end"
        for test, what in told.items():
            if what:
                return test
    return ""


def noticed_by(copy: Path, file: str, old: str, new: str) -> str:
    """The test that notices a mutant; "" if it survives."""
    whole = (copy / file).read_text()
    if whole.count(old) != 1:
        raise SystemExit(
            f"{file} has this text {whole.count(old)} times, not once: {old!r}"
        )
    (copy / file).write_text(whole.replace(old, new))
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
    os.environ["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # two mutants within a second would share theirs
    )

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        coursework.copy_of(copy, "conversations", "results")
        for file in dict.fromkeys(mutant[0] for mutant in mutants):
            red = first_red(copy, file)
            if red:
                print(f"{red} fails without any mutant; a red test would mean nothing")
                return 1
        survivors = 0
        for file, old, new, what in mutants:
            found = noticed_by(copy, file, old, new)
            survivors += not found
            print(f"{file}: {what}: {found or 'SURVIVES'}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
