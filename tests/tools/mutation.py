"""Break the code in many places, one at a time, in a copy of it, and see that a test goes red.

    python tests/tools/mutation.py              # all; exit code 1 if a mutant survives
    python tests/tools/mutation.py glide cape   # those of mutants/glide.py and mutants/cape.py
    python tests/tools/mutation.py --sample 10  # ten of all, drawn by the commit's hash

A mutant is one replacement of text that makes the program wrong, not merely different; each file of
mutants/ lists some, and the tests that must notice them. Equivalent ones are left out: a refused
sampled sibling, for instance, cannot be drawn again: what is left of its probability is zero.
"""

import argparse
import importlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
QUICK = (  # names of the tests that most mutants fall to, in seconds
    "mask or sight or loss or hand or defin or alpha or labels or collapse or sums or trie or walk"
    " or expan or size"
)


def pytest(folder: Path, tests: list[str], quick: bool = False) -> tuple[bool, str]:
    """Run test files: whether none failed, and the first red test."""
    files = [f"tests/{name}" for name in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-x",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    command += ["-k", QUICK] if quick else []
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return False, "a test that did not end"
    red = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    first = red[0].split("::")[-1].split(" - ")[0] if red else done.stdout[-200:]
    return done.returncode in (0, 5), first  # 5: no such test


def outcome(copy: Path, mutant: tuple, tests: list[str]) -> tuple[bool, str]:
    """Whether a mutant (file, old, new, what) survives, and which test noticed it."""
    file, old, new, _ = mutant
    path = copy / file
    text, start = path.read_text(), time.monotonic()
    if text.count(old) != 1:
        return True, f"STALE: the text occurs {text.count(old)} times"
    path.write_text(text.replace(old, new))
    survives, first = pytest(copy, tests, quick=True)
    if survives:
        survives, first = pytest(copy, tests)
    path.write_text(text)
    seconds = time.monotonic() - start
    return survives, "SURVIVES" if survives else f"{first} ({seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in (HERE / "mutants").glob("*.py"))
    parser.add_argument("groups", nargs="*", choices=[*known, []], default=[])
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only N, drawn by the commit's hash"
    )
    args = parser.parse_args()
    sys.path.insert(0, str(HERE / "mutants"))
    modules = [importlib.import_module(name) for name in args.groups or known]
    mutants = [(mutant, module.TESTS) for module in modules for mutant in module.MUTANTS]
    if args.sample:
        git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        mutants = random.Random(commit).sample(mutants, min(args.sample, len(mutants)))
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        unneeded = shutil.ignore_patterns(".git", "checkpoints", "conversations", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=unneeded)
        for tests in dict.fromkeys(tuple(tests) for _, tests in mutants):  # else red means nothing
            green, first = pytest(copy, list(tests))
            if not green:
                print(f"{', '.join(tests)}: red without any mutant: {first}")
                return 1
        print(f"| {'file':22} | {'mutant':45} | noticed by")
        for mutant, tests in mutants:
            survives, what = outcome(copy, mutant, tests)
            survivors += survives
            print(f"| {mutant[0]:22} | {mutant[3]:45} | {what}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
