"""Command lines: options from a Config, help, and mistakes that end with one line and code 2."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import chat
import pytest
from accelerate.state import AcceleratorState, GradientState
from chat import options

import bench
import cape
import common
import glide
import train
from common import option
from support import cli, default_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat.make_chat(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its settings for the rest of a process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


# --------------------------------------------------------------------------- the end of a program


def end_of(capsys, main, *argv):
    """(exit code, what stderr says) of a program that `cli.run` runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["some/where/train.py", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.run(main)
    return end.value.code, capsys.readouterr().err


def test_mistakes_are_one_line_and_bugs_are_tracebacks(capsys):
    def raising(problem):
        def main():
            raise problem

        return main

    assert end_of(capsys, raising(common.Mistake("two\n  lines"))) == (2, "train.py: two lines\n")
    assert end_of(capsys, raising(FileNotFoundError("no x"))) == (2, "train.py: no x\n")
    assert end_of(capsys, raising(KeyboardInterrupt())) == (130, "train.py: interrupted\n")
    for bug in (ValueError, RuntimeError, KeyError, NotImplementedError):
        with pytest.raises(bug):
            cli.run(raising(bug("a bug")))


def snapshot(top):
    """What is in a folder, to the byte."""
    return {path: path.read_bytes() for path in Path(top).rglob("*") if path.is_file()}


MISTAKES = [
    ("--method nonsense", "argument --method: invalid choice: 'nonsense'"),
    ("--method cape", "cape has nothing to train"),
    ("--nonsense", "unrecognized arguments: --nonsense; see --help"),
    ("--fusion lstm", "unrecognized arguments: --fusion lstm"),
    ("--device nonsense", "argument --device: "),
    ("--device meta", "argument --device: "),
    ("--dtype int8", "argument --dtype: invalid choice"),
    ("--steps 0", "argument --steps: must be at least 1"),
    ("--minutes 1", "give either --steps or --minutes"),
    ("--lr nan", "argument --lr: nan is out of range"),
    ("--warmup 1.1", "argument --warmup: 1.1 is out of range"),
    ("--batch-size 3 --accumulate 2", "--batch-size 3 must be a multiple of 1 processes"),
    ("--kv-layer 7", "kv_layer 7"),
    ("--num-layers 0", "num_layers 0: take at least 1"),
    ("--gamma x", "argument --gamma: invalid int value"),
    ("--target no/such-target", "cannot load target 'no/such-target'"),
    ("--target {tmp}/mamba", "cannot load target"),
    ("--data missing.jsonl", "no data file missing.jsonl; train.py --make-data"),
    ("--data {tmp}/file", "file, line 1: no JSON"),
    ("--data {tmp}/foo", "foo, line 1: no conversation; give prompt and response, mess"),
    ("--data {tmp}/empty", "empty holds no conversation with a response"),
    ("--data {tmp}/same --held-out 2", "every conversation is among the 2 held out"),
    ("--out {tmp}/file", "file is a file; name a folder"),
    ("--features {tmp}/file", "file"),
    ("--init {tmp}", "no drafter in"),
    ("--resume", "nothing to resume in"),
    ("--make-data 4 --out {tmp}", "Is a directory"),
    ("--make-data 4 --out {tmp}/a/b.jsonl", "No such file or directory"),
    ("--make-data 4 --out {tmp}/x.jsonl.gz", "give --out a plain .jsonl file"),
    ("--make-data 4 --out {tmp}/file", "holds something else than conversations"),
    ("--make-data 4 --requests {tmp}/missing", "missing"),
    ("--greedy 2", "argument --greedy: 2 is out of range"),
    ("--plot {tmp}", "name the curves"),
]


@pytest.mark.parametrize("words, said", MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_of_train_py_is_told_in_a_line(folder, tmp_path, capsys, words, said):
    """It names what is wrong, and nothing is written or lost."""
    (tmp_path / "file").write_bytes(b"notes\n\xff\n")
    (tmp_path / "foo").write_text('{"foo": 1}\n')
    (tmp_path / "empty").write_text('{"prompt": "w1", "response": ""}\n' * 4)
    (tmp_path / "same").write_text('{"prompt": "w1", "response": "w2"}\n' * 4)
    before = snapshot(tmp_path)
    more = [word.format(tmp=tmp_path) for word in words.split()]
    argv = options(folder, tmp_path / "out", "--steps", 1, *more)
    code, text = end_of(capsys, train.main, *argv)
    [line] = [line for line in text.splitlines() if line.startswith("train.py: ")]
    assert code == 2 and said in line, text
    assert "Traceback" not in text
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "words, said",
    [
        ("--out x", "nothing to do: give --method NAME"),
        ("--method glide", "give --out"),
        ("--method glide --out x", "training needs --data"),
    ],
)
def test_what_is_missing_is_named(capsys, words, said):
    code, text = end_of(capsys, train.main, *words.split())
    assert code == 2 and text.startswith("train.py: ") and said in text


def test_targets_that_token_trees_cannot_take_are_refused(folder, tmp_path, capsys, monkeypatch):
    """Layers without attention; a tokenizer with more words than the model has."""
    target, tokenizer = common.load_target(str(folder))
    monkeypatch.setattr(common, "load_target", lambda *_, **__: (target, tokenizer))
    argv = options(folder, tmp_path / "out", "--steps", 1)
    target.config.layer_types = ["linear_attention", "full_attention"]
    code, text = end_of(capsys, train.main, *argv)
    assert code == 2 and "layers other than attention cannot take back" in text
    target.config.layer_types = None
    tokenizer.add_tokens(["more"])
    code, text = end_of(capsys, train.main, *argv)
    assert code == 2 and "the tokenizer has 49 tokens and the model only 48" in text
    assert not (tmp_path / "out").exists()


def test_a_bug_in_a_loss_shows_its_traceback(folder, tmp_path, monkeypatch):
    def loss(drafter, target, batch):
        raise ValueError("half-written")

    monkeypatch.setattr(glide, "loss", loss)
    monkeypatch.setattr(sys, "argv", ["train.py", *options(folder, tmp_path, "--steps", 1)])
    with pytest.raises(ValueError, match="half-written"):
        cli.run(train.main)


# ----------------------------------------------------------------------------------- methods


def test_methods_and_rivals_by_name(monkeypatch, tmp_path):
    assert cli.import_method("glide") is glide
    assert cli.import_method("medusa").__name__ == "support.rivals.medusa"
    assert {"glide", "specdecpp", "falcon", "ctc_drafter", "medusa"} <= set(cli.trainable())
    assert not {"cape", "beam", "lookup"} & set(cli.trainable())
    for name in ("os", "../x", ""):
        with pytest.raises(common.Mistake, match=f"unknown method {name!r}: take glide, cape"):
            cli.import_method(name)
    assert cli.chain_proposer("glide") is glide
    for name in ("falcon", "os", ""):
        with pytest.raises(common.Mistake, match="drafts no chains: take glide or specdecpp"):
            cli.chain_proposer(name)
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    (tmp_path / "glide.py").touch()
    assert cli.present() == ["glide"]
    with pytest.raises(common.Mistake, match="no falcon.py here: put it at"):
        cli.import_method("falcon")


def test_the_methods_named_whatever_else_is_there():
    argv = "--seed 3 --help --method glide falcon:chain --show --num-prompts 1".split()
    assert cli.method_named(argv) == ["glide", "falcon:chain"]
    assert cli.method_named([]) == []


def test_the_default_target_answers_to_its_name(monkeypatch, tmp_path):
    assert cli.DEFAULT_TARGET == default_target.NAME
    assert cli.target(default_target.NAME) is None
    assert cli.target("HuggingFaceTB/" + default_target.NAME) is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / default_target.NAME).mkdir()  # a folder of that name is meant
    assert cli.target(default_target.NAME) == default_target.NAME


# ------------------------------------------------------------------------------ options of a Config


def test_numbers_keep_their_bounds():
    read = cli.number(float, 0, 1)
    assert [read(text) for text in ("0", "1", "0.5")] == [0, 1, 0.5]
    for text in ("nan", "1.01", "-0.01", "inf", "-inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_json_options_have_the_types_of_their_default():
    read = cli.json_like([[0]])
    assert read("[[1, 2], []]") == [[1, 2], []]
    assert read("[]") == []
    texts = ["[1]", "[[1.5]]", "[[true]]", '[["a"]]', "{}", "[[1]", "[[1], 2]"]
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match="give JSON like"):
            read(text)
    assert cli.json_like([0.5])("[1, 0.25]") == [1, 0.25]  # 1 is a fine number, too


@dataclass
class Config:
    target: dict = option(dict, "not on the command line")
    layer: int = option(-1, "which", decode=True)
    count: int = option(3, "100% of them", decode=True)
    rate: float = option(0.5, "how fast")
    csgd: bool = option(True, "whether")
    word: str = option("a", "what", decode=True)
    sizes: list = option(lambda: [1, 2], "of each")
    more: int = field(default=1, metadata={"help": "of a course's own", "decode": False})


def parser_of(**given):
    parser = cli.OneLineParser()
    parser.add_argument("--rate", help="the program's own")
    cli.add_config_options(parser, Config, **given)
    return parser


def test_every_field_of_a_config_is_an_option_of_its_type():
    nothing = vars(parser_of().parse_args([]))
    assert set(nothing) == {"layer", "count", "rate", "csgd", "word", "sizes", "more"}
    assert set(nothing.values()) == {None}
    words = "--layer -1 --count 7 --rate x --no-csgd --word b --sizes [4] --more 2".split()
    given = {"layer": -1, "count": 7, "rate": "x", "csgd": False, "word": "b", "sizes": [4]}
    assert vars(parser_of().parse_args(words)) == given | {"more": 2}
    decode = vars(parser_of(decode=True).parse_args([]))
    assert set(decode) == {"rate", "layer", "count", "word"}
    for bad in ("--layer -2", "--count -1", "--sizes 4", "--count 1.5", "--csg", "--target {}"):
        with pytest.raises(common.Mistake, match="see --help"):
            parser_of().parse_args(bad.split())


def test_the_defaults_are_shown_and_while_decoding_whose_they_are():
    """A trained drafter has its own, in config.json; CAPE has none, and its defaults hold."""
    text = " ".join(parser_of().format_help().split())
    for words in (
        "which (default: -1)",
        "100% of them (default: 3)",
        "whether (default: true)",
        "what (default: a)",
        "of each (default: [1, 2])",
        "the program's own",
    ):
        assert words in text
    for module, shown in ((glide, "what config.json of the drafter says"), (cape, "glide")):
        parser = cli.OneLineParser()
        cli.add_config_options(parser, module.Config, decode=True)
        assert f"(default: {shown})" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("program", [train, bench], ids=["train.py", "bench.py"])
@pytest.mark.parametrize("method", [[], ["--method", "glide"]], ids=["", "glide"])
def test_help_shows_the_options_of_the_method_that_is_named(capsys, program, method):
    with pytest.raises(SystemExit) as end:
        program.main([*method, "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage: ")
    assert ("\n  --gamma" in said) == bool(method)
    assert "(default: 0)" in said  # --seed


def test_no_option_reads_a_number_without_bounds():
    for path in (*cli.ROOT.glob("*.py"), *(cli.ROOT / "support").rglob("*.py")):
        text = path.read_text().replace(" ", "")
        assert "type=int" not in text and "type=float" not in text, path
