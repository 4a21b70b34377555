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
import io
import multiprocessing
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SECONDS = 240  # a mutant may make a test wait for ever
LIBRARIES = (  # imported once, for all the tests to come
    "hypothesis",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
QUICK = (  # names of the tests that most mutants fall to, in seconds
    "mask or sight or loss or hand or defin or alpha or labels or collapse or sums or trie or walk"
    " or expan or size"
)


def run_pytest(folder: Path, options: list[str], answer) -> None:
    """In a process of its own: send pytest's exit code and the first red test through `answer`."""
    import pytest

    os.chdir(folder)
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = pytest.main(["-n", "0", "-x", "-p", "no:cacheprovider", *options])
    red = [line for line in out.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
    answer.send(
        (int(code), red[0].split("::")[-1].split(" - ")[0] if red else out.getvalue()[-300:])
    )
    answer.close()
    os._exit(0)  # threads that a test left behind do not matter


def pytest_in(folder: Path, options: list[str]) -> tuple[bool, str]:
    """Run tests in a copy of the repository: whether none failed, and the first red test.

    The process is forked from this one, which has imported the libraries already.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=run_pytest, args=(folder, options, there))
    process.start()
    there.close()
    try:
        code, first = here.recv() if here.poll(SECONDS) else (1, "a test that did not end")
    except EOFError:
        code, first = 1, "a test that killed the process"
    process.kill()
    process.join()
    return code in (0, 5), first  # 5: no such test


def outcome(copy: Path, mutant: tuple, tests: list[str]) -> tuple[bool, str]:
    """Whether a mutant (file, old, new, what) survives, and which test noticed it."""
    file, old, new, _ = mutant
    path = copy / file
    text, start = path.read_text(), time.monotonic()
    if text.count(old) != 1:
        return True, f"STALE: the text occurs {text.count(old)} times"
    files = [f"tests/{name}" for name in tests]
    path.write_text(text.replace(old, new))
    survives, first = pytest_in(copy, [*files, "-k", QUICK])
    if survives:
        survives, first = pytest_in(copy, files)
    path.write_text(text)
    seconds = time.monotonic() - start
    return survives, "SURVIVES" if survives else f"{first} ({seconds:.0f} s)"


def check(job: tuple) -> tuple[tuple, bool, str]:
    """One mutant, in this process's own copy of the repository; or the tests without a mutant."""
    mutant, tests, temporary = job
    copy = Path(temporary) / str(os.getpid())
    if not copy.exists():
        unneeded = shutil.ignore_patterns(".git", "checkpoints", "conversations", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=unneeded)
    if mutant is None:
        green, first = pytest_in(copy, [f"tests/{name}" for name in tests])
        return (", ".join(tests),), not green, first
    return mutant, *outcome(copy, mutant, list(tests))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(path.stem for path in (HERE / "mutants").glob("*.py"))
    parser.add_argument("groups", nargs="*", choices=[*known, []], default=[])
    parser.add_argument("--sample", type=int, metavar="N", help="only N, by the commit's hash")
    parser.add_argument("--jobs", type=int, metavar="N", default=2, help="at a time (default: 2)")
    args = parser.parse_args()
    mutants = []
    for name in args.groups or known:  # not imported: sys.modules is for the code's own `name`
        module = runpy.run_path(str(HERE / "mutants" / f"{name}.py"))
        mutants += [(mutant, tuple(module["TESTS"])) for mutant in module["MUTANTS"]]
    if args.sample:
        git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        mutants = random.Random(commit).sample(mutants, min(args.sample, len(mutants)))

    sys.dont_write_bytecode = True  # two mutants of one size within a second would share theirs
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    for name in LIBRARIES:
        importlib.import_module(name)
    survivors = 0
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(args.jobs, fork) as pool:
        groups = dict.fromkeys(tests for _, tests in mutants)
        for (name,), red, first in pool.map(check, [(None, tests, temporary) for tests in groups]):
            if red:  # a red test would then mean nothing
                print(f"{name}: red without any mutant: {first}")
                return 1
        print(f"| {'file':22} | {'mutant':45} | noticed by")
        jobs = [(mutant, tests, temporary) for mutant, tests in mutants]
        for mutant, survives, what in pool.map(check, jobs):
            survivors += survives
            print(f"| {mutant[0]:22} | {mutant[3]:45} | {what}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
