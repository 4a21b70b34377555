"""Set an exercise: a copy of the repository in which one function is to be written.

    python tests/coursework.py                      # lists the exercises
    python tests/coursework.py falcon.glance OUT    # makes a copy in the new folder OUT

Signature, comments above it and docstring stay. What is left of the body runs and is wrong, so that
the test fails by showing what went in, what was expected and what came out.
"""

import argparse
import ast
import inspect
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Exercise(NamedTuple):
    test: str  # says when the function is right, and fails until then
    stand_in: str  # code in place of what is to be written
    part: type | None = None  # only the first statement of this kind is to be written, not all
    file: str | None = None  # where the function is, if not in the file of its module

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]


EXERCISES = {
    "common.ancestor_mask": Exercise(
        "tests/test_common.py::test_mask_against_brute_force",
        "rows = len(parents) + 1\n"
        "return torch.zeros(1, 1, rows, prefix + rows, dtype=dtype)  # all see all",
    ),
    "common.verify": Exercise(
        "tests/test_common.py::test_greedy_walk_takes_the_longest_accepted_path",
        "committed = [int(logits[0, 0].argmax())]  # the target's own token; accepts nothing",
        part=ast.While,
    ),
    "common._draw": Exercise(
        "tests/test_common.py::test_sampled_output_follows_the_target",
        "pass  # no sampled token is ever accepted",
        part=ast.For,
    ),
    "glide.block_mask": Exercise(
        "tests/test_glide.py::test_block_mask_against_the_definition",
        "return torch.zeros(len(phase), 1, length, length, dtype=torch.bool)  # none sees any",
    ),
    "glide.loss": Exercise(
        "tests/test_glide.py::test_loss_against_a_hand_worked_case",
        "return torch.zeros(())",
    ),
    "cape.expand": Exercise(
        "tests/test_cape.py::test_the_mask_is_the_papers_formula",
        "return common.chain(steps, input_ids)  # the trajectory without extras",
    ),
    "specdecpp.until_stop": Exercise(
        "tests/test_specdecpp.py::test_algorithm_2_by_hand",
        "yield from ()  # drafts nothing",
    ),
    "specdecpp.labelled": Exercise(
        "tests/test_specdecpp.py::test_labels_against_brute_force",
        "return None",
    ),
    "specdecpp.oracle": Exercise(
        "tests/test_specdecpp.py::test_the_oracle_against_all_stopping_policies",
        "return 0",
    ),
    "falcon.relaxed_mask": Exercise(
        "tests/test_falcon.py::test_relaxed_mask_drawing_and_definition",
        "return torch.zeros(len(phase), 1, length, length, dtype=torch.bool)  # none sees any",
    ),
    "falcon.glance": Exercise(
        "tests/test_falcon.py::test_glancing_worked_by_hand",
        "return torch.zeros_like(where)  # no slot is shown its answer",
    ),
    "fitting.fit_tree": Exercise(
        "tests/test_falcon.py::test_fit_tree_against_all_trees",
        "return []  # plain decoding",
        file="support/fitting.py",
    ),
    "ctc_drafter.slot_mask": Exercise(
        "tests/test_ctc_drafter.py::test_the_mask_against_a_loop",
        "rows = anchors.shape[1] * slots\n"
        "return torch.zeros(len(anchors), 1, rows, length + rows, dtype=torch.bool)",
    ),
    "ctc_drafter.prefix_search": Exercise(
        "tests/test_ctc_drafter.py::test_prefix_search_sums_all_alignments",
        "return {}",
    ),
}


def source_of(name: str) -> Path:
    """The file that an exercise is in, relative to the repository."""
    return Path(EXERCISES[name].file or f"{name.partition('.')[0]}.py")


def blanked(source: str, name: str) -> str:
    """The file's source with the stand-in in place of what is to be written."""
    exercise, function_name = EXERCISES[name], name.partition(".")[2]
    [function] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function_name
    ]
    lines = source.splitlines()
    if exercise.part:
        first = next(node for node in ast.walk(function) if isinstance(node, exercise.part))
        start, end = first.lineno - 1, first.end_lineno
    else:
        first = function.body[1]  # after the docstring
        start, end = function.body[0].end_lineno, function.end_lineno
    note = f"# To be written, until {exercise.test_file} is green:\n"
    code = textwrap.indent(note + exercise.stand_in, " " * first.col_offset)
    return "\n".join([*lines[:start], *code.splitlines(), *lines[end:]]) + "\n"


def make(name: str, out: Path) -> None:
    """Copy the repository to the new folder `out`, with one function blanked.

    Raises: ValueError: there is no such exercise, or `out` is there already.
    """
    if name not in EXERCISES:
        raise ValueError(f"no exercise {name!r}; there are {', '.join(EXERCISES)}")
    if out.exists():
        raise ValueError(f"{out} is there already; name a new folder")
    # the mutants quote lines that are to be written
    ours = shutil.ignore_patterns(
        ".git", "__pycache__", ".*_cache", ".hypothesis", "mutants", out.name
    )
    shutil.copytree(ROOT, out, ignore=ours)
    path = out / source_of(name)
    path.write_text(blanked(path.read_text(), name))


def main() -> None:
    summary = inspect.cleandoc(__doc__)
    parser = argparse.ArgumentParser(
        description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="which function; without it they are listed")
    parser.add_argument("out", nargs="?", type=Path, help="a new folder for the copy")
    args = parser.parse_args()
    if not args.name:
        for name, exercise in EXERCISES.items():
            print(f"{name:27} {exercise.test}")
        return
    try:
        if not args.out:
            raise ValueError("name a new folder for the copy, after the exercise")
        make(args.name, args.out)
    except (ValueError, OSError) as problem:
        print(f"coursework.py: {problem}", file=sys.stderr)
        sys.exit(2)
    print(f"Write {args.name} in {args.out / source_of(args.name)}. It is right when this passes:")
    print(f"cd {args.out} && python -m pytest -n 0 -x {EXERCISES[args.name].test}")


if __name__ == "__main__":
    main()
