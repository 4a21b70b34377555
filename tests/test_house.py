"""The house rules that a machine can check."""

import ast
import dataclasses
import importlib
import re
import runpy
from pathlib import Path

import pytest

from support import cli

ROOT = Path(__file__).parent.parent
METHODS = cli.METHODS
LIMITS = {"bench": 600, "common": 580} | dict.fromkeys([*METHODS, "train"], 550)


def source(name):
    return (ROOT / f"{name}.py").read_text()


def imported(name):
    """Top-level names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("name", LIMITS)
def test_files_stay_short(name):
    lines = source(name).splitlines()
    assert len(lines) <= LIMITS[name]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", METHODS)
def test_a_method_imports_common_and_libraries_only(name):
    local = {path.stem for path in ROOT.glob("*.py")} | {"support"}
    assert set(imported(name)) & local == {"common"}


def test_every_mutant_is_of_a_line_that_is_there_once():
    """Or tests/tools/mutation.py, which takes an hour for all, would tell so late."""
    for path in (ROOT / "tests" / "tools" / "mutants").glob("*.py"):
        for file, old, new, what in runpy.run_path(str(path))["MUTANTS"]:
            assert (ROOT / file).read_text().count(old) == 1 and new != old, f"{path.name}: {what}"


def test_what_lies_on_top():
    assert {path.stem for path in ROOT.glob("*.py")} == {*METHODS, "common", "train", "bench"}


def test_common_knows_no_method():
    assert not set(imported("common")) & set(METHODS) and not re.search(
        r"method\s*==", source("common")
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_docstring_has_paper_table_and_deviations(name):
    text = importlib.import_module(name).__doc__
    assert "arXiv" in text and "symbol" in text and "section" in text
    deviations = text[text.index("Deviations") :]
    numbered = re.findall(r"^ +\d+\. (.*)", deviations, re.MULTILINE)
    assert numbered and all(
        re.match(r"(ours|upstream != paper|paper silent)[:,;]", line) for line in numbered
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_option_has_a_default_and_help(name):
    config = importlib.import_module(name).Config
    config()
    assert all(field.metadata.get("help") for field in dataclasses.fields(config))


def test_copies_of_a_helper_are_identical():
    """Small layers are repeated in the files that need them; a copy that drifts is a bug
    waiting."""
    own = {
        "Config",
        "Drafter",
        "Layer",
        "build",
        "loss",
        "alpha",
        "propose",
        "generate",
        "new_memory",
        "training_logits",
        "expand",
        "Memory",
    }  # a name may mean different things in two papers
    seen = {}
    for name in METHODS:
        text = source(name)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name not in own:
                copy = ast.get_source_segment(text, node)
                assert seen.setdefault(node.name, copy) == copy, f"{node.name} differs in {name}.py"


OUTSIDE = {
    "target",
    "model",
    "module",
    "cache",
    "drafter",
    "layer",
    "head",
    "body",
    "own",
    "common",
}
ALLOWED = {
    # of an object that the same function has just made
    "common.py": {"head.weight"},
    "specdecpp.py": {"model.generation_config", "model.model.base_model_prefix"},
    "support/batching.py": {"cache.layers"},
    "support/default_target.py": {"target.hf_quantizer", "target.config.quantization_config"},
    # the target's linear layers are exchanged, once, before anything runs
    "support/packed.py": {"head.weight", "module.name"},
    # a cache of its own; and inside `use` torch.compile stays out of the caches
    "support/graphs.py": {"cache.layers", "common.GrowingLayer.update"},
}


def assigned(path):
    """`name.attribute` wherever a file assigns to an attribute, setattr and delete included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}"


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("support/*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_is_hung_on_an_object_from_outside(path):
    """A model, module or cache belongs to its class; what a method keeps is a dataclass of its own,
    and how a forward runs goes through common.forward_by."""
    hung = {each for each in assigned(path) if each.partition(".")[0] in OUTSIDE}
    hung -= ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert not hung


@pytest.mark.parametrize(
    "path",
    [path for kind in ("*.py", "support/*.py", "**/README.md") for path in sorted(ROOT.glob(kind))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_unfinished(path):
    assert not re.search(
        "TO" + "DO|FIX" + "ME|XX" + "X|NotImplemented" + "Error|@[A-Z]+@", path.read_text()
    )


def pairs(tree):
    """Assignments of a tuple to a tuple, but for swaps: no value reads what is assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for names in node.targets:
                if isinstance(names, ast.Tuple | ast.List):
                    stored = {ast.unparse(name) for name in names.elts}
                    reads = [each for each in ast.walk(node.value) if isinstance(each, ast.expr)]
                    if not stored & {ast.unparse(each) for each in reads}:
                        yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", LIMITS)
def test_no_tuple_is_assigned_to_save_lines(name):
    assert not list(pairs(ast.parse(source(name))))


def test_the_rule_on_tuples_can_fail():
    def found(text):
        return len(list(pairs(ast.parse(text))))

    assert found("a, b = 1, 2") == found("x.a, [y] = 1, [2]") == found("c = a, b = 1, 2") == 1
    assert found("a, b = b, a") == found("a, b = f(x)") == found("x[0], b = b, x[0]") == 0


def test_public_functions_are_documented():
    modules = [f"support/{path.stem}" for path in ROOT.glob("support/*.py")]
    for name in [*METHODS, "common", "train", "bench", *modules]:
        for node in ast.parse(source(name)).body:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name[0] != "_"
                and node.name not in ("main", "parse")
            ):
                assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"
