"""The README says what is so: its tables are those of results/, its names exist, its commands are
understood."""

import gzip
import importlib
import json
import re
import shlex

import pytest
from test_house import METHODS, ROOT

import bench
import common
import train
from support import data, report

TEXT = (ROOT / "README.md").read_text()


def section(title):
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_results_are_those_of_the_measured_runs():
    rendered = "\n\n".join(
        report.tables(report.read_result(str(path))) for path in (ROOT / "results").glob("*.json")
    )
    parts = [part for part in section("Results").split("\n\n") if part.startswith("|")]
    assert len(parts) >= 5
    for part in parts:
        assert f"\n{part}\n" in f"\n{rendered}\n", part


def test_every_name_resolves():
    modules = "|".join(
        (*METHODS, "common", "train", "data", "report", "bench", "batching", "graphs")
    )
    names = set(re.findall(rf"`({modules})\.(\w+)`", TEXT))
    assert len(names) > 25
    for module, name in names - {(module, "py") for module in modules.split("|")}:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for path in set(re.findall(r"`([\w/]+(?:\.py|/))`", TEXT)):
        assert (ROOT / path).exists(), path


def test_every_named_test_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)
    assert len(named) > 10
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize("command", re.findall(r"python ((?:bench|train)\.py [^`\n]*)", TEXT))
def test_commands_are_understood(command, monkeypatch):
    for module, name in ((train, "train"), (data, "make_conversations")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(common, "load_target", lambda *_, **__: (None, None))
    script, *options = shlex.split(
        command.replace("...", "").replace("results/*.json", "r.json"), comments=True
    )
    if "--help" not in options and options[-1] != "--method":
        (bench.parse if script == "bench.py" else train.main)(options)


def test_no_prompt_of_ours_is_in_the_training_data():
    """No evaluation prompt shares eight consecutive words with a request that drafters were trained
    on."""

    def runs(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    asked = [
        json.loads(line) for path in (ROOT / "prompts").glob("*.jsonl") for line in path.open()
    ]
    evaluated = set().union(*(runs(turn) for prompt in asked for turn in prompt["turns"]))
    files = list((ROOT / "conversations").glob("*.jsonl.gz"))
    trained = [json.loads(line)["prompt"] for path in files for line in gzip.open(path, "rt")]
    assert len(asked) > 50 and len(trained) > 1000
    assert not [prompt for prompt in trained if runs(prompt) & evaluated]
