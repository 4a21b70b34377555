"""Links, file names, commands and tables of the READMEs are right.

What the text says is not tested.
"""

import collections
import dataclasses
import gzip
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path

import claims
import coursework
import mutation
import pytest
import tables
import test_verify
import torch
from tiny import chi_square_p_value, enumerate_joint, make_llama

import common
import train
from support import cli
from support.measuring import arms

ROOT = Path(__file__).parent.parent
FILES = tables.FILES
TEXTS = {name: (ROOT / name).read_text() for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_tables_are_those_of_the_measured_runs(name):
    """python results/tools/tables.py writes them anew."""
    assert tables.written(TEXTS[name]) == TEXTS[name]
    if name in ("README.md", "results/README.md"):
        assert tables.TABLE.search(TEXTS[name])


@pytest.mark.parametrize("name", FILES)
def test_every_file_named_is_there(name):
    """Names in backquotes: from the top, from the README's folder, of data, curves."""
    kinds = r"py|json|jsonl|gz|sh|md|svg|html"
    made_by_a_command = {"config.json", "page.html", "run.json"}
    made_by_a_command |= {"AGENTS.md", "mine.py"}  # and by a student
    folders = ("", "results", "results/curves", "conversations", "prompts")
    places = [(ROOT / name).parent, *(ROOT / folder for folder in folders)]
    named = set(re.findall(rf"`([\w/.*-]+(?:\.(?:{kinds})|/))`", TEXTS[name]))
    for path in named - made_by_a_command:
        assert any(list(place.glob(path)) for place in places), path


def anchors(text):
    """The anchors that a page has for its headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", FILES)
def test_every_link_leads_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), link
        assert not anchor or anchor in anchors(page.read_text()), link


# ------------------------------------------------------------ the map of the papers


ROOMS = ("rivals", "training", "measuring", "interop", "replay")
PACKAGES = ("support.", *(f"support.{room}." for room in ROOMS))


def named(text):
    """What a name such as `glide.Layer` or `glide.Config.gamma` stands for."""
    name, *parts = text.split(".")
    for package in ("", *PACKAGES):
        if (ROOT / f"{package}{name}".replace(".", "/")).with_suffix(".py").exists():
            found = importlib.import_module(package + name)
            break
    else:
        found = importlib.import_module(name)  # in results/tools/ or tests/tools/
    for part in parts:
        if dataclasses.is_dataclass(found):
            fields = {field.name: field for field in dataclasses.fields(found)}
            found = fields.get(part) or getattr(found, part)
        else:
            found = getattr(found, part)
    return found


def spans():
    """What stands in backquotes on the page, and is no file."""
    found = set(re.findall(r"`([^`]+)`", TEXTS["PAPERS.md"]))
    return {span for span in found if not re.search(r"\.(py|md)", span)}


def test_every_name_on_the_map_is_in_the_code():
    names = {span for span in spans() if re.fullmatch(r"[a-z_]+(\.\w+)+", span)}
    assert len(names) > 60
    for name in names:
        assert named(name) is not None
    with pytest.raises(AttributeError):
        named("glide.Config.no_such_setting")


def test_every_arm_and_option_on_the_map_exists():
    found = {span for span in spans() if re.fullmatch(r"[a-z_]+:\w+", span)}
    assert len(found) > 5
    for arm in found:
        arms.parse(arm)
    options = set(re.findall(r"--[\w-]+", " ".join(spans())))
    fields = set()
    for name in cli.trainable():
        for field in dataclasses.fields(cli.import_method(name).Config):
            fields |= {f"--{field.name}".replace("_", "-"), f"--no-{field.name}"}
    assert options - {"--make-data"} <= fields


# How many of each the paper has; appendices that were not read are left out.
NUMBERED = {
    "GLIDE and CAPE": {"Figure": 9, "Table": 7, "Algorithm": 2},
    "SpecDec++": {"Figure": 4, "Table": 2, "Algorithm": 2},
    "Falcon": {"Figure": 6, "Table": 5, "Eq.": 12},
    "CTC-drafter": {"Figure": 4, "Table": 2, "Eq.": 13},
}


@pytest.mark.parametrize("paper", NUMBERED)
def test_the_map_leaves_out_no_figure_table_or_equation(paper):
    section = TEXTS["PAPERS.md"].split(f"## {paper}\n")[1].split("\n## ")[0]
    rows = "\n".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE))
    for kind, count in NUMBERED[paper].items():
        plural = re.escape(kind) + ("" if kind == "Eq." else "s?")
        lists = re.findall(rf"{plural} ((?:\d+(?:, | and )?)+)", rows)
        numbers = {int(number) for each in lists for number in re.findall(r"\d+", each)}
        assert numbers == set(range(1, count + 1)), kind
    if paper == "SpecDec++":
        for name in ("Eq. 2.1, 2.2, 2.3", "Eq. 3.1", "Lemma 2.1", "Theorem 3.1"):
            assert name in rows


# ------------------------------------------------------------------------- commands


def commands(text):
    """Every command that starts one of our scripts, [script, option, ...]."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`(\w[^`]*)`", rest)]
    for line in (*lines, *spans):
        for part in line.split("&&"):
            start = r"(?:python|torchrun .*?|accelerate launch) "
            if found := re.search(rf"{start}([\w/]+\.py|-m support[.\w]+)(.*)", part):
                yield [found[1], *shlex.split(found[2], comments=True)]


@pytest.mark.parametrize("page", TEXTS)
def test_a_block_of_code_begins_and_ends_on_a_line_of_its_own(page):
    lines = TEXTS[page].splitlines()
    assert all(re.fullmatch(r"```\w*", line) for line in lines if "```" in line)


COMMANDS = sorted({tuple(each) for text in TEXTS.values() for each in commands(text)})
STARTED = {script for script, *_ in COMMANDS}
assert {"bench.py", "train.py", "tests/coursework.py"} <= STARTED


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_of_a_command_exists(command, monkeypatch, capsys):
    """With --help after it, a command shows its options, a method's own as well."""
    script, *words = command
    monkeypatch.setattr("sys.argv", [script, *words, "--help"])
    # The real pretend.py adds a device to torch. Then autograd has threads for it, and
    # test_train.py cannot fork any more.
    monkeypatch.setitem(sys.modules, "pretend", types.ModuleType("pretend"))
    with pytest.raises(SystemExit) as ended:
        if script.startswith("-m "):
            runpy.run_module(script[3:], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not ended.value.code
    given = {word for word in words if word.startswith("--")}
    assert given <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    if script == "tests/coursework.py" and words:
        assert words[0] in coursework.EXERCISES


def python_block(start, page="README.md"):
    """The Python example of a page that begins with this text."""
    blocks = TEXTS[page].split("```python\n")
    [found] = [block for block in blocks if block.startswith(start)]
    return found.split("```")[0]


def test_the_python_examples_for_your_own_code_run(folder, tmp_path, capsys):
    """With a tiny target and drafter."""
    lines = python_block("import common")
    method = cli.import_method(re.match(r"import common, (\w+)", lines)[1])
    config = method.Config(intermediate_size=16, draft_vocab=16)
    target, _ = common.load_target(str(folder))
    method.build(config, target, torch.arange(48)).save_pretrained(tmp_path)
    given = {"your/model": folder, "checkpoints/mine": tmp_path, "=256": "=16"}
    for theirs, ours in given.items():
        assert theirs in lines
        lines = lines.replace(theirs, str(ours))
    scope = {}
    exec(lines, scope)
    assert capsys.readouterr().out
    scope["next_ids"] = scope["ids"]
    more = python_block("import cape", "support/README.md")
    exec(more.replace("=256", "=16"), scope)
    assert scope["decoding"].cached == scope["ids"]["input_ids"].shape[1] - 1


def test_the_idea_of_the_readme_follows_the_target(small_llama):
    """Two sampled tokens, of drafts of two; believing every draft is noticed."""
    idea = python_block("import torch\n")
    drafter = make_llama(vocab=7, layers=1, seed=4)
    prompt = torch.tensor([[1, 2, 3]])
    expected = enumerate_joint(small_llama, prompt, 2)

    def p_value(source, draws):
        scope = {"torch": torch}
        exec(source, scope)
        torch.manual_seed(0)
        counts = collections.Counter()
        for _ in range(draws):
            answer = scope["speculative_decoding"](small_llama, drafter, prompt, 2, 2)
            counts[tuple(answer[0, 3:].tolist())] += 1
        return chi_square_p_value(counts, expected)

    assert p_value(idea, 300) > 0.001
    judged = ">= p[kept, token]"
    assert judged in idea
    assert p_value(idea.replace(judged, "> 1"), 100) < 1e-4


@pytest.mark.slow
def test_no_prompt_that_is_measured_on_was_trained_on():
    """No eight consecutive words of a prompt stand in a training request."""

    def runs(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    measured = set()
    for path in (ROOT / "prompts").glob("*.jsonl"):
        for line in path.open():
            for turn in json.loads(line)["turns"]:
                measured |= runs(turn)
    trained = []  # what the target wrote to requests in words
    for path in (ROOT / "conversations").glob("*.jsonl.gz"):
        records = [json.loads(line) for line in gzip.open(path, "rt")]
        trained += [record["prompt"] for record in records if "prompt" in record]
    assert len(measured) > 100 and len(trained) > 1000
    shared = [prompt for prompt in trained if runs(prompt) & measured]
    assert not shared


def test_the_text_of_every_mutant_is_there_once():
    for file, changes in mutation.MUTANTS.items():
        source = (ROOT / file).read_text()
        for old, new, what in changes:
            assert source.count(old) == 1, f"{file}: {what}"
            assert new != old


def test_the_figures_of_solution_a2_come_out_of_draw():
    p, q = (torch.tensor(x).double() for x in ([0.4, 0.5, 0.1], [0.3, 0.2, 0.5]))
    told = " ".join((ROOT / "tests" / "solutions.md").read_text().split())
    law, accepted, _ = test_verify.law_of_draw(p, test_verify.two_siblings(q))
    torch.testing.assert_close(law, p)
    assert accepted == pytest.approx(0.86) and "In .86 of" in told
    given_q = []
    for weight, siblings in test_verify.two_siblings(q):
        given_q.append((weight, [(token, q) for token, _ in siblings]))
    for draws, text in (
        (given_q, ".5, .4, .1"),
        (test_verify.argmax(q, claimed=True), ".2, .6, .2"),
        (test_verify.without_duplicates(q), ".45, .45, .1"),
    ):
        law = test_verify.law_of_draw(p, draws)[0].tolist()
        assert law == pytest.approx([float(x) for x in text.split(", ")])
        assert f"({text})" in told


def test_the_solutions_of_part_d_follow_from_the_main_run():
    arms = json.loads((ROOT / "results" / "cpu_main.json").read_text())["arms"]
    one = arms["baseline"]["loops"]["plain"]["verify_ms"]  # T(1)
    alpha, verify_ms = arms["glide"]["alpha"], arms["glide"]["verify_ms"]
    c = arms["glide"]["draft_ms"] / 3 / one
    tokens = (1 - alpha**4) / (1 - alpha)
    slope = (verify_ms / one - 1) / 3  # of T(n) / T(1)
    costs = 3 * c + verify_ms / one
    line = {}
    for n in range(1, 9):
        line[n] = sum(alpha**i for i in range(n + 1)) / (n * c + n * slope + 1)
    second, best = sorted(line, key=line.get)[-2:]
    measured = arms["glide"]["speedup"]
    told = (ROOT / "tests" / "solutions.md").read_text()
    for figure in (
        f"alpha {alpha:.3f}, draft ms {3 * c * one:.2f}, T(1) {one:.2f}: c = {c:.3f}.",
        f"= {tokens / (3 * c + 1):.2f}. Measured: {measured:.2f}.",
        f"took {verify_ms:.1f} ms, {verify_ms / one:.2f} times T(1)",
        f"{verify_ms / one:.2f}) = {tokens / costs:.2f}.",
        f"so tau is {arms['glide']['tau']:.2f} and not {tokens:.2f}, which would give "
        f"{arms['glide']['tau'] / costs:.2f}.",
        f"it is {best} with {line[best]:.2f}, and {second} has {line[second]:.2f}.",
        f"3 c + T(4) / T(1) = {costs:.2f}: below",
    ):
        assert figure.replace(" 0.", " .") in " ".join(told.split()), figure
    arms = claims.read("cpu_variants.json")["arms"]
    two, three = (arms[name]["speedup"] for name in ("glide:gamma=2", "glide"))
    assert f"gamma = 2 gave {two:.2f} and 3 gave {three:.2f}" in " ".join(told.split())
    batch = claims.read("cpu_batches.json")["sizes"]["8"]["glide"]["speedup"]
    assert f"cpu_batches.json`: {batch:.2f})".replace(" 0.", " .") in told
    # At the alpha that is told, the tokens of a round are worth what the round costs.
    even = float(re.search(r"= \d\.\d\d: below (\.\d+)", told)[1])
    assert 1 + even + even**2 + even**3 == pytest.approx(costs, abs=0.02)


@pytest.mark.parametrize("given", [{}, {"FROM": "checkpoints"}])
def test_train_sh_makes_drafters_like_the_shipped_ones(tmp_path, monkeypatch, given):
    """With the same settings, most of them the default ones, and SpecDec++'s draft
    model before its head.
    """
    log = tmp_path / "log"
    stub = tmp_path / "python"  # finds no GPU, and notes what train.py is asked
    stub.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\necho "$*" >>"$LOG"\n')
    stub.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "LOG": str(log)} | given
    script = ROOT / "checkpoints" / "train.sh"
    subprocess.run(["bash", script, tmp_path / "out"], env=env, check=True)

    def shipped(module, name):
        return common.read_drafter(module.Drafter, ROOT / "checkpoints" / name).config

    made = {}  # {name: Config}

    def note(args, module, overrides):
        config = module.Config(**overrides)
        if args.init:
            name = Path(args.init).name
            config = made[name] if name in made else shipped(module, name)
            config = dataclasses.replace(config, **overrides)
        made[Path(args.out).name] = config

    monkeypatch.setattr(train, "train", note)
    for line in log.read_text().splitlines():
        train.main(line.split()[1:])

    def settings(config):
        others = ["target", "model", "layers", "layer"]  # filled in by build
        return {key: value for key, value in vars(config).items() if key not in others}

    assert made.pop("specdecpp-draft").stage == "draft"
    folders = (ROOT / "checkpoints").glob("*/config.json")
    assert made.keys() == {path.parent.name for path in folders}
    for name, config in made.items():
        module = cli.import_method(name)
        expected = settings(shipped(module, name))
        assert settings(config) == expected, name
        chosen = expected.keys() & {"kv_layer", "stage"}
        default = module.Config(**{key: expected[key] for key in chosen})
        assert settings(default) == expected, name
