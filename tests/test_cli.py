"""Command lines: options from a Config, help, mistakes (one line and code 2)."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from chat import options, refused
from tiny import snapshot

import common
import train
from common import option
from support import cli, files

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


# ----------------------------------------------------------------- the end of a program


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

    for problem, code, said in (
        (common.UserError("two\n  lines"), 2, "two lines"),
        (FileNotFoundError("no x"), 2, "no x"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        assert end_of(capsys, raising(problem)) == (code, f"train.py: {said}\n")
    for bug in (ValueError, RuntimeError, KeyError, AssertionError):
        with pytest.raises(bug):
            cli.run(raising(bug("a bug")))


MADE = "--make-data 4 --target {folder} --out {tmp}"
# What the user types (... stands for the options of a run), and a part of the line.
MISTAKES = [
    ("--out x", "one of the arguments --method --make-data is required"),
    ("--method glide", "the following arguments are required: --out"),
    ("--method glide --make-data 4 --out x", "--make-data: not allowed with"),
    ("--method glide --out x", "training needs --data"),
    ("... --method nonsense", "argument --method: invalid choice: 'nonsense'"),
    ("... --method cape", "invalid choice: 'cape' (choose from "),
    ("... --nonsense", "unrecognized arguments: --nonsense; see --help"),
    ("... --device nonsense", " on nonsense ("),
    ("... --steps 0", "argument --steps: must be at least 1; see --help"),
    ("... --minutes 1", "give either --steps or --minutes"),
    ("... --lr nan", "argument --lr: must be at least 0"),
    ("... --warmup 1.1", "argument --warmup: must be from 0 to 1"),
    ("... --num-layers 0", "num_layers 0: take an int of at least 1"),
    ("... --gamma x", "argument --gamma: invalid int value"),
    ("... --target ./no-such", "cannot load ./no-such on cpu ([Errno 2] No such file"),
    ("... --data missing.jsonl", "no file missing.jsonl: check the path"),
    ("... --data {tmp}", "Is a directory"),
    ("... --data {tmp}/file --eval {tmp}/file", "/file: leave it out of --data"),
    ("... --out {tmp}/file", "file is a file; name a folder"),
    ("... --init {tmp}", "no drafter in"),
    ("... --init {tmp}/broken", "/broken holds no glide drafter, or a damaged one ("),
    ("... --resume", "nothing to resume in"),
    ("... --second-turns 0.5", "--second-turns goes with --make-data"),
    (MADE, "name a file in a folder where you may write"),
    (MADE + "/x.jsonl.gz", "give --out a plain .jsonl file"),
    (MADE + "/x.jsonl --steps 3", "--steps goes with --method"),
]


@pytest.mark.parametrize("words, said", MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_of_train_py_is_told_in_a_line(folder, tmp_path, capsys, words, said):
    """It names what is wrong, and nothing is written or lost."""
    (tmp_path / "file").write_bytes(b"notes\n\xff\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"target": null}')
    before = snapshot(tmp_path)
    argv = [word.format(tmp=tmp_path, folder=folder) for word in words.split()]
    if argv[0] == "...":
        argv = options(folder, tmp_path / "out", "--steps", 1, *argv[1:])
    code, text = end_of(capsys, train.main, *argv)
    [line] = [line for line in text.splitlines() if line.startswith("train.py: ")]
    assert code == 2 and said in line, text
    assert "Traceback" not in text
    assert snapshot(tmp_path) == before


CONFIG_MISTAKES = [
    ("glide", {"num_layers": 4}, "num_layers 4, kv_layer -2: take at most 3 layers"),
    ("glide", {"gamma": 2.5}, "gamma 2.5: take an int of at least 0"),
    ("falcon", {"noise": "3"}, "noise '3': take a number of at least 0"),
    ("ctc_drafter", {"intermediate_size": 0}, "take an int of at least 1"),
    ("falcon", {"intermediate_size": 0}, "take an int of at least 1"),
    ("glide", {"intermediate_size": 0}, "take an int of at least 1"),
    ("falcon", {"noise": float("nan")}, "noise nan: take a number of at least 0"),
    ("cape", {"sizes": [1, 2]}, "one size more than bounds"),
    ("cape", {"sizes": [7, 5, 3, -1]}, "no negative size"),
    ("cape", {"bounds": [0.6, 0.3, 0.8]}, "ascending bounds"),
    ("specdecpp", {"draft_model": "small"}, "use --stage head"),
    ("specdecpp", {"stop": "never"}, "stop 'never': take head or fixed"),
    ("specdecpp", {"w_rej": 0}, "w_rej 0: take a weight above 0"),
    ("specdecpp", {"w_rej": -1}, "w_rej -1: take a number of at least 0"),
    ("specdecpp", {"w_rej": float("inf")}, "take finite numbers"),
    ("specdecpp", {"temperature": float("inf")}, "take finite numbers"),
    ("specdecpp", {"layers": 5}, "layers 5: take a list of ints"),
    ("specdecpp", {"layers": []}, r"layers \[\]: take a list of ints"),
    ("specdecpp", {"layers": [True]}, r"layers \[True\]: take a list of ints"),
    ("specdecpp", {"layers": [3]}, "choose from -3 to 2"),
    ("falcon", {"tree": [[0], [1, 0]]}, r"tree path \[1, 0\]: add its parent \[1\]"),
    ("falcon", {"tree": 4}, "tree 4: give a list"),
    ("falcon", {"tree": [[-1]]}, r"tree path \[-1\]: give a list of ranks"),
    ("falcon", {"tree": [[0], [0, True]], "draft_vocab": 0}, "of ranks from 0 on$"),
    ("falcon", {"tree": [[]]}, "give a list of ranks"),
    ("falcon", {"tree": [[9]], "draft_vocab": 9}, r"from 0 to 8 \(draft vocabulary"),
    ("ctc_drafter", {"slots": 3, "labels": 4}, "slots 3: take an int of at least 4"),
    ("medusa", {"labels": 0}, " 0: take an int of at least 1"),
    ("beam", {"width": 0}, " 0: take an int of at least 1"),
]


@pytest.mark.parametrize("method, fields, said", CONFIG_MISTAKES, ids=str)
def test_a_config_checks_itself(llama, method, fields, said):
    """Some fields, when a drafter is built for a target (three layers, 48 tokens)."""
    module = cli.import_method(method)
    with refused(said):
        config = module.Config(**fields)
        module.build(config, llama, torch.arange(48))


def started(*words):
    """A process of python, in this repository."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cli.ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "program, option", [("bench.py", "--dtype"), ("train.py", "--method")]
)
def test_help_and_mistakes_do_not_wait_for_torch(program, option):
    """Nor for transformers and our own modules that import them."""
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not {'torch', 'transformers', 'common'} & sys.modules.keys()"
    )
    shown = started("-c", code, program, "--help")
    assert shown.returncode == 0 and f"usage: {program}" in shown.stdout, shown.stderr
    wrong = started("-c", code, program, option, "nonsense")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith(f"{program}: argument {option}: invalid choice")


@pytest.mark.slow
def test_train_and_bench_run_as_programs(folder, tmp_path):
    trained = started("train.py", *options(folder, tmp_path / "out", "--steps", "1"))
    assert (tmp_path / "out" / "config.json").is_file(), trained.stderr
    words = f"--method glide@{tmp_path}/out --target {folder} --max-new-tokens 4"
    measured = started("bench.py", *words.split(), "--prompt", "w1 w2")
    assert f"| glide@{tmp_path}/out" in measured.stdout, measured.stderr


def test_the_device_is_found_only_when_none_is_named(monkeypatch):
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert cli.device("auto") == device
        assert cli.device("cuda:1") == "cuda:1"


def test_saved_settings_do_not_reach_what_is_made_or_measured(folder, capsys):
    """What changes no answer is not told of."""
    target, _ = common.load_target(str(folder))
    saved = {"num_beams": 3, "return_dict_in_generate": True, "stop_strings": ["w3"]}
    idle = {"use_cache": True, "output_attentions": False}  # as transformers saves them
    target.generation_config.update(**saved, **idle)
    capsys.readouterr()
    cli.plain_settings(target)
    named = ", ".join(f"{name} {value}" for name, value in sorted(saved.items()))
    said = f"not used from the target's generation_config: {named}\n"
    assert capsys.readouterr().err == said
    config = target.generation_config
    assert config.num_beams is config.stop_strings is config.use_cache is None
    assert common.eos_ids(config) == {0}


def test_methods_and_rivals_by_name(monkeypatch, tmp_path):
    assert cli.import_method("medusa").__name__ == "support.rivals.medusa"
    trainable = set(cli.trainable())
    assert {"glide", "specdecpp", "falcon", "ctc_drafter"} <= trainable
    assert {"medusa", "eagle"} <= trainable
    assert not {"cape", "beam", "lookup"} & trainable
    said = "unknown method '../x': take glide, cape"
    with refused(said):
        cli.import_method("../x")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    (tmp_path / "glide.py").touch()
    assert cli.present() == ["glide"]
    with refused("unknown method 'falcon': take glide"):
        cli.import_method("falcon")


# ------------------------------------------------------------------ options of a Config


@dataclass
class Config:
    target: dict = option(dict, "a shape (filled in by build)")
    built: bool = option(False, "whether (filled in by build)")
    layer: int = option(-1, "which", decode=True)
    count: int = option(3, "100% of them", decode=True)
    rate: float = option(0.5, "how fast")
    csgd: bool = option(True, "whether")
    word: str = option("a", "what", decode=True)
    sizes: list = option(lambda: [1, 2], "of each")
    own = {"help": "of a course's own", "decode": False}  # no field, as it has no type
    more: int = field(default=1, metadata=own)


def parser_of():
    parser = cli.OneLineParser()
    parser.add_argument("--rate", help="the program's own")
    cli.add_config_options(parser, Config)
    return parser


def test_every_field_of_a_config_is_an_option_of_its_type():
    nothing = vars(parser_of().parse_args([]))
    assert set(nothing) == {"layer", "count", "rate", "csgd", "word", "sizes", "more"}
    assert set(nothing.values()) == {None}
    words = "--layer -1 --count 7 --rate x --no-csgd --word b --sizes [4] --more 2"
    given = {"layer": -1, "count": 7, "rate": "x", "csgd": False, "word": "b"}
    given |= {"sizes": [4], "more": 2}
    assert vars(parser_of().parse_args(words.split())) == given
    wrong = ("--count x", "--sizes 4", "--sizes [1", "--csg", "--target {}", "--built")
    for words in wrong:
        with refused("see --help"):
            parser_of().parse_args(words.split())


# ------------------------------------------------------------------------------- files


def test_a_file_is_written_where_its_link_points(tmp_path):
    (tmp_path / "run.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    files.write(tmp_path / "link.json", "new")
    assert (tmp_path / "run.json").read_text() == "new"
    assert (tmp_path / "link.json").is_symlink()
    # Some programs write files that only their owner may read.
    with files.whole(tmp_path / "run.json") as part:
        part.touch(0o600)
    (tmp_path / "other.json").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_pipe_and_a_device_are_no_place_for_a_file():
    """They would be replaced, or the result lost after hours."""
    reading, writing = os.pipe()
    for path in (f"/proc/self/fd/{writing}", "/dev/null"):
        with refused("name a file in a folder"):
            cli.check_writable(path)
    os.close(reading)
    os.close(writing)
