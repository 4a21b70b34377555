"""Set an exercise: a copy of the repository in which one function is to be written. Grade it, too.

    python tests/coursework.py                              # lists the exercises
    python tests/coursework.py falcon.glance OUT            # makes a copy in the new folder OUT
    python tests/coursework.py falcon.glance --grade SOLUTIONS

Signature and docstring stay. The stand-in for the body runs and is wrong, so that the tests fail by
showing what went in, what was expected and what came out. SOLUTIONS is such a copy, or a folder
with one for each student. Grading takes the file of the exercise from it and all tests from here.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600  # a solution may run for ever


class Exercise:
    def __init__(self, stand_in: str, *tests: str, part: type | None = None):
        self.stand_in = stand_in  # code in place of what is to be written
        self.tests = tests  # all of them must pass; the first one is a good start
        self.part = part  # only the first statement of this kind is to be written


EXERCISES = {
    "common.tree_mask": Exercise(
        "size = len(parents) + 1\nreturn torch.ones(size, size, dtype=torch.bool)  # all see all",
        "test_the_mask_of_the_docstring",
        "test_the_mask_against_brute_force",
        "test_verify_sees_every_node_as_plain_decoding_would",
    ),
    "common.walk": Exercise(
        "tokens = [choose(-1, [])]  # the target's own token; accepts nothing\nended(tokens)",
        "test_greedy_walk_takes_the_longest_accepted_path",
        "test_a_walk_does_not_go_beyond_the_end_of_the_answer",
        "test_verify_sees_every_node_as_plain_decoding_would",
        "test_each_draw_is_given_all_sampled_siblings",
        "test_sampled_output_follows_the_target",
        "test_an_answer_ends_inside_the_accepted_tokens",
        part=ast.While,
    ),
    "common.draw": Exercise(
        "if siblings:\n    return siblings[0][0]  # accepts whatever was drafted",
        "test_draws_follow_the_target_exactly",
        "test_sampled_output_follows_the_target",
        part=ast.For,
    ),
    "glide.block_mask": Exercise(
        "return torch.zeros(len(phase), 1, length, length, dtype=torch.bool)  # nothing is read",
        "test_the_block_mask_is_the_one_that_is_drawn",
        "test_training_with_the_block_mask_computes_the_states_of_drafting",
    ),
    "glide.loss": Exercise(
        "return torch.zeros(()), 1",
        "test_the_loss_is_the_cross_entropy_worked_by_hand",
    ),
    "cape.expand": Exercise(
        "return trajectory  # without extras",
        "test_an_expanded_proposal_worked_by_hand",
        "test_a_set_leaves_out_the_drawn_token_and_not_the_likeliest",
        "test_a_set_is_no_larger_than_what_can_be_drafted",
        "test_the_mask_is_the_papers_formula",
    ),
    "specdecpp.until_stop": Exercise(
        "yield from ()  # drafts nothing",
        "test_algorithm_2_by_hand",
        "test_a_round_holds_two_tokens_to_max_draft",
    ),
    "specdecpp.draw": Exercise(
        "count = int(batch.loss_mask.sum())\n"
        "return model.vocab_ids.new_zeros(count), torch.zeros(count)",
        "test_labels_against_brute_force",
        "test_the_mean_label_is_the_acceptance_rate",
    ),
    "specdecpp.mix": Exercise(
        "return batch.input_ids, batch.loss_mask  # nothing is mixed in",
        "test_the_mixture_by_hand",
        "test_labels_against_brute_force",
    ),
    "specdecpp.oracle": Exercise("return 0", "test_the_oracle_against_all_stopping_policies"),
    "falcon.relaxed_mask": Exercise(
        "return torch.zeros(len(phase), 1, length, length, dtype=torch.bool)  # nothing is seen",
        "test_relaxed_mask_drawing_and_definition",
    ),
    "falcon.glance": Exercise(
        "return torch.zeros_like(learns)  # no answer is revealed",
        "test_glancing_worked_by_hand",
        "test_glancing_against_the_definition",
        "test_noise_and_glancing_do_not_depend_on_padding_or_batch",
    ),
    "ctc_drafter.slot_mask": Exercise(
        "rows = anchors.shape[1] * slots\n"
        "return torch.zeros(len(anchors), 1, rows, length + rows, dtype=torch.bool)",
        "test_the_mask_against_a_loop",
        "test_drafting_round_by_round_equals_one_training_pass",
    ),
    "ctc_drafter.prefix_search": Exercise(
        "return defaultdict(float)",
        "test_prefix_search_on_the_two_slots_of_its_docstring",
        "test_prefix_search_keeps_the_likeliest_prefixes",
        "test_prefix_search_sums_over_all_alignments",
    ),
}


def file_of(name: str) -> str:
    """The file that an exercise is in."""
    return f"{name.partition('.')[0]}.py"


def tests_of(name: str) -> str:
    """The file that its tests are in."""
    file = file_of(name)
    return "test_verify.py" if file == "common.py" else f"test_{file}"


def blanked(source: str, name: str) -> str:
    """The file's source with the stand-in in place of what is to be written."""
    exercise = EXERCISES[name]
    for node in ast.parse(source).body:
        if getattr(node, "name", "") == name.partition(".")[2]:
            function = node
    # 1. Which lines leave: all after the docstring, or one statement.
    start = function.body[0].end_lineno
    end = function.end_lineno
    indent = function.body[0].col_offset
    if exercise.part:
        found = (node for node in ast.walk(function) if isinstance(node, exercise.part))
        statement = next(found)
        start = statement.lineno - 1
        end = statement.end_lineno
        indent = statement.col_offset
    # 2. The stand-in takes their place.
    code = f"# To be written.\n{exercise.stand_in}"
    lines = source.splitlines()
    lines[start:end] = textwrap.indent(code, " " * indent).splitlines()
    return "\n".join(lines) + "\n"


def copy_of(out: Path, *left_out: str) -> None:
    """Copy the repository to the new folder `out`, without history, caches and runs."""
    unneeded = (".git", ".venv", "__pycache__", ".*_cache", "runs", *left_out)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"  # `out` may lie in the repository
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unneeded))
        shutil.move(copy, out)


def make(name: str, out: Path) -> None:
    """Copy the repository to the new folder `out`, with one function blanked."""
    if out.exists():
        raise ValueError(f"{out} is there already: name a new folder")
    copy_of(out, "mutants.py", "test_docs.py")  # they quote what is to be written
    path = out / file_of(name)
    path.write_text(blanked(path.read_text(), name))


def told_in(output: str) -> list[str]:
    """The lines of pytest's output that report an error."""
    return re.findall(r"^E +(.*)", output, re.MULTILINE)


def wrong_with(case: ElementTree.Element) -> str:
    """One line that says what went wrong in a test; "" if it passed."""
    problems = [*case.findall("failure"), *case.findall("error")]
    if not problems:
        return ""
    text = problems[0].text.rstrip()
    place = text.rpartition("\n")[2]  # falcon.py:301: IndexError
    message = "\n".join(told_in(text)).removeprefix("AssertionError: ")
    message = message.partition("\nassert ")[0]  # what pytest adds
    if message.startswith("assert "):
        message = message.partition("\n")[0]
        message = re.sub(r"^assert (.*) == (.*)", r"expected \2, got \1", message)
    parts = re.split(r"(?=\bexpected |\bgot )", " ".join(message.split()))
    message = " ".join(textwrap.shorten(part, 300, placeholder=" ...") for part in parts if part)
    return message if "Assertion" in place else f"{message} ({place})"


def outcomes(folder: Path, file: str, tests: tuple[str, ...], options=()) -> dict[str, str]:
    """{test: "" if it passes, or one line on its first case that does not} in a copy."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    named = [f"tests/{file}::{test}" for test in tests] or [f"tests/{file}"]
    command = [sys.executable, *"-m pytest -vv -p no:cacheprovider --junitxml=report.xml".split()]
    command += [*options, *named]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, f"it does not end within {SECONDS} seconds")
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        test = case.get("name", "").partition("[")[0]
        found[test] = found.get(test) or wrong_with(case)
    missing = ["it did not run", *told_in(done.stdout + done.stderr)][-1]
    return {test: found.get(test, missing) for test in tests or found}


def grade(name: str, solutions: Path) -> int:
    """Run all tests of an exercise on each solution; returns how many do not pass them."""
    file = file_of(name)
    folders = [solutions]
    if not (solutions / file).is_file():
        folders = sorted(path for path in solutions.glob("*") if path.is_dir())
    if not any((folder / file).is_file() for folder in folders):
        raise ValueError(f"no {file} in {solutions} or in its folders: give the students' copies")
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        copy_of(copy, "checkpoints", "conversations", "results")
        for folder in folders:
            if not (folder / file).is_file():
                print(f"{folder.name}: no {file}")
                failed += 1
                continue
            shutil.copy(folder / file, copy / file)
            told = outcomes(copy, tests_of(name), EXERCISES[name].tests)
            wrong = {test: what for test, what in told.items() if what}
            print(f"{folder.name}: {len(told) - len(wrong)} of {len(told)} tests pass")
            for test, what in wrong.items():
                about = test.removeprefix("test_").replace("_", " ")
                print(f"    {about}: {what}")
            failed += bool(wrong)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="which function; without it they are listed")
    parser.add_argument("out", nargs="?", type=Path, help="a new folder for the copy")
    parser.add_argument("--grade", type=Path, metavar="SOLUTIONS", help="one copy, or a folder")
    args = parser.parse_args()
    if args.name is None and args.grade is None:
        for name, exercise in EXERCISES.items():
            print(f"{name:27} {len(exercise.tests)} tests in tests/{tests_of(name)}")
        return 0
    try:
        if args.name not in EXERCISES:
            named = f"no exercise {args.name!r}" if args.name else "name the exercise"
            raise ValueError(f"{named}: take one of {', '.join(EXERCISES)}")
        if args.grade:
            return int(grade(args.name, args.grade) > 0)
        if args.out is None:
            raise ValueError("name a new folder for the copy, after the exercise")
        make(args.name, args.out)
    except (ValueError, OSError) as problem:
        print(f"coursework.py: {problem}", file=sys.stderr)
        return 2
    test = f"tests/{tests_of(args.name)}::{EXERCISES[args.name].tests[0]}"
    print(f"Write {args.name} in {args.out / file_of(args.name)}. Begin with this test:")
    print(f"cd {args.out} && python -m pytest -x {test}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
