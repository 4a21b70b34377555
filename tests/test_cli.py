"""The command lines: help, options from a Config, and what becomes of a mistake."""

import argparse
import re
import sys
from dataclasses import dataclass, field

import pytest

import bench
import cape
import glide
import train
from support import bench_options, cli, default_target

# --------------------------------------------------------------------------------------------- help


def test_help_lists_the_methods_options_and_the_figures(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["--method", "glide", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "--gamma" in out and "--intermediate-size" not in out
    assert "overhead    decode time" in out
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    out = capsys.readouterr().out
    assert "--gamma" not in out
    assert "--method NAME --help also shows the options of that method" in " ".join(out.split())


@pytest.mark.parametrize("name", [*cli.METHODS, "copies", "all"])
def test_every_help_line_says_the_default_once(capsys, name):
    with pytest.raises(SystemExit):
        bench.main(["--method", name, "--help"])
    text = capsys.readouterr().out.partition("-h, --help")[2]
    lines = re.split(r"\n  (?=--)", text)[1:]
    assert len(lines) >= 25
    for line in lines:
        assert " ".join(line.split()).count("(default: ") == 1, line


def test_an_option_of_another_method_names_its_owners():
    with pytest.raises(ValueError, match=r"--expansion \(an option of cape\); see --help"):
        bench.parse(["--method", "glide", "--expansion", "none"])
    with pytest.raises(ValueError, match=r"--no-csgd \(an option of falcon\)"):
        bench.parse(["--method", "glide", "--no-csgd"])
    with pytest.raises(ValueError, match=r"unrecognized arguments: --nonsense; see"):
        bench.parse(["--method", "glide", "--nonsense"])


def test_a_method_whose_file_is_not_here(monkeypatch):
    find = cli.importlib.util.find_spec

    def absent(name):
        return None if name == "falcon" else find(name)

    monkeypatch.setattr(cli.importlib.util, "find_spec", absent)
    with pytest.raises(ValueError, match="no falcon.py here; put the method's file beside"):
        bench.parse(["--method", "falcon"])
    assert "falcon" not in cli.present() and "glide" in cli.trainable()


def test_what_can_be_trained():
    assert cli.trainable() == [name for name in cli.METHODS if name != "cape"]


def test_numbers_keep_their_bounds():
    read = cli.number(float, 0, 1)
    assert [read(text) for text in ("0", "1", "0.5")] == [0, 1, 0.5]
    for text in ("nan", "1.01", "-0.01", "inf", "-inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_the_default_target_answers_to_its_name(monkeypatch, tmp_path):
    asked = [default_target.NAME, "HuggingFaceTB/" + default_target.NAME]
    for name, expected in zip(asked, (None, asked[1])):
        for parse in (bench.parse, lambda argv: train.parse(argv)[0]):
            options = ["--method", "glide", "--target", name]
            if parse is not bench.parse:
                options += ["--data", "d.jsonl", "--out", "o", "--steps", "1"]
            assert parse(options).target == expected
    monkeypatch.chdir(tmp_path)
    (tmp_path / default_target.NAME).mkdir()  # a folder of that name is meant
    assert cli.target(default_target.NAME) == default_target.NAME


def test_json_options_have_the_types_of_their_default():
    read = cli.json_like([[0]])
    assert read("[[1, 2], []]") == [[1, 2], []]
    assert read("[]") == []
    for text in ("[1]", "[[1.5]]", "[[true]]", '[["a"]]', "{}", "[[1]", "[[1], 2]", '[[1, "a"]]'):
        with pytest.raises(argparse.ArgumentTypeError, match="give JSON like"):
            read(text)
    assert cli.json_like([0.5])("[1, 0.25]") == [1, 0.25]  # 1 is a fine number, too


# ------------------------------------------------------------------------------ options of a Config


@dataclass
class Config:
    target: dict = field(default_factory=dict, metadata={"help": "not on the command line"})
    layer: int = field(default=-1, metadata={"help": "which", "decode": True})
    count: int = field(default=3, metadata={"help": "100% of them", "decode": True})
    rate: float = field(default=0.5, metadata={"help": "how fast"})
    csgd: bool = field(default=True, metadata={"help": "whether"})
    word: str = field(default="a", metadata={"help": "what", "decode": True})
    sizes: list = field(default_factory=lambda: [1, 2], metadata={"help": "of each"})


def options_of(argv, **given):
    parser = cli.OneLineParser()
    parser.add_argument("--rate", help="the program's own")
    cli.add_config_options(parser, Config, **given)
    return vars(parser.parse_args(argv))


def test_every_field_of_a_config_is_an_option_of_its_type():
    nothing = options_of([])
    assert nothing == dict.fromkeys(["layer", "count", "rate", "csgd", "word", "sizes"])
    words = "--layer -1 --count 7 --rate x --no-csgd --word b --sizes [4]".split()
    given = {"layer": -1, "count": 7, "rate": "x", "csgd": False, "word": "b", "sizes": [4]}
    assert options_of(words) == given
    assert set(options_of([], decode=True)) == {"rate", "layer", "count", "word"}
    for bad in ("--layer -2", "--count -1", "--sizes 4", "--count 1.5", "--csg", "--target {}"):
        with pytest.raises(ValueError, match="see --help"):
            options_of(bad.split())


def test_the_defaults_of_a_config_are_shown(capsys):
    with pytest.raises(SystemExit):
        options_of(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    shown = ["which (default: -1)", "100% of them (default: 3)", "whether (default: true)"]
    shown += ["what (default: a)", "of each (default: [1, 2])", "the program's own (default: none)"]
    assert all(words in text for words in shown)


def test_training_shows_the_defaults_of_a_method_and_decoding_whose_they_are():
    """A trained drafter has its own, in config.json; CAPE has none, and its defaults hold."""
    for decode, method, shown in (
        (False, glide, "draft tokens a round (default: 5)"),
        (True, glide, "draft tokens a round (default: what config.json of the drafter says)"),
        (True, cape, "(greatest) length of the trajectory (default: 5)"),
    ):
        parser = cli.OneLineParser()
        cli.add_config_options(parser, method.Config, decode)
        assert shown in " ".join(parser.format_help().split())


def test_who_drafts_chains():
    assert cli.chain_proposer("glide", "training_logits") is glide
    for name in ("falcon", "os", "../x", "", "nothing"):
        with pytest.raises(ValueError, match="is no method that drafts chains"):
            cli.chain_proposer(name)
    with pytest.raises(ValueError, match="base 'glide'"):
        cli.chain_proposer("glide", "what_it_lacks")


def test_the_methods_named_whatever_else_is_there():
    argv = "--seed 3 --help --method glide falcon:chain --show --num-prompts 1".split()
    assert cli.method_named(argv) == ["glide", "falcon:chain"]
    assert cli.method_named([]) == []


def test_what_is_asked_together_before_anything_is_loaded():
    assert not bench.parse(["--method", "glide"]).variants
    assert bench.parse(["--method", "glide", "--json", "-"]).json == "-"
    apart = {
        "--method glide --top-p 0": "--top-p must be above 0",
        "--method glide falcon --checkpoint x": "--checkpoint goes with exactly one --method",
        "--method all --checkpoint x": "--checkpoint goes with exactly one --method",
        "--method glide --refit --temperature 1": "leave out --temperature",
        "--peers --sweep": "greedy drafts of a --method",
        "--method glide --batch-size 2 --show": "leave out --batch-size",
        "--method glide --graphs --cost-curve": "--graphs holds one sequence",
        f"--method glide --plot {bench_options.__file__}": "is not a folder",
        "--variants copies": "nothing to do",
    }
    for words, message in apart.items():
        with pytest.raises(ValueError, match=message):
            bench.parse(words.split())


# ----------------------------------------------------------------------------- the end of a program


def end_of(capsys, monkeypatch, problem):
    """(exit code, what stderr says) of a program that raises `problem`."""

    def main():
        raise problem

    monkeypatch.setattr(sys, "argv", ["some/where/bench.py"])
    with pytest.raises(SystemExit) as end:
        cli.run(main)
    return end.value.code, capsys.readouterr().err


def test_how_mistakes_and_interrupts_end(capsys, monkeypatch):
    mistake = end_of(capsys, monkeypatch, ValueError("two\n  lines"))
    assert mistake == (2, "bench.py: two lines\n")
    assert end_of(capsys, monkeypatch, FileNotFoundError("no x"))[0] == 2
    assert end_of(capsys, monkeypatch, KeyboardInterrupt()) == (130, "bench.py: interrupted\n")
    with pytest.raises(RuntimeError, match="a bug"):  # which is not the user's
        end_of(capsys, monkeypatch, RuntimeError("a bug"))
