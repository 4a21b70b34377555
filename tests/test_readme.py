"""The READMEs say what is so: tables and figures are those of results/, names, links and tests
exist, commands are understood."""

import gzip
import importlib
import json
import re
import shlex

import claims as papers
import coursework
import pytest
import tables
from test_house import METHODS, ROOT

import bench
import common
import glide
import specdecpp
import train
from support import data, pictures

FILES = tables.FILES
TEXTS = {name: (ROOT / name).read_text() for name in FILES}
TOP = TEXTS["README.md"]


def test_the_readme_is_short():
    lines = TOP.splitlines()
    assert len(lines) <= 160 and max(map(len, lines)) <= 100


def test_the_map_lists_what_lies_on_top():
    listed = re.findall(r"^\| `(\w+\.py)` \|", TOP, re.MULTILINE)
    assert listed == [f"{name}.py" for name in (*METHODS, "common", "train", "bench")]
    folders = set(re.findall(r"`(\w+)/`", TOP))
    assert folders == {path.name for path in ROOT.iterdir() if path.is_dir()} - hidden()


def hidden():
    """Folders that git does not know, and those of tools."""
    return {path.name for path in ROOT.iterdir() if path.name[0] in "._" or path.name == "shared"}


# ------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize("name", FILES)
def test_tables_are_those_of_the_measured_runs(name):
    """python tests/tools/tables.py writes them anew."""
    assert tables.written(TEXTS[name]) == TEXTS[name]
    without = tables.TABLE.sub("", TEXTS[name])
    assert not re.search(r"^\|.*\| +[\d.]+ \|", without, re.MULTILINE), "a table typed by hand"


def test_there_are_tables():
    found = {name: len(tables.TABLE.findall(TEXTS[name])) for name in FILES}
    assert found["README.md"] == 1 and found["results/README.md"] > 8
    [asked] = re.findall(r"<!-- table: ([^>]*) -->", TOP)
    rows = tables.table(asked).splitlines()[2:]
    assert [re.match(r"\| (\w+)", row)[1] for row in rows] == list(METHODS)


def test_a_claim_counts_as_confirmed_only_if_its_interval_says_so():
    assert papers.verdict(1.01, 1.2) == "confirmed" and papers.verdict(0.5, 0.99) == "the opposite"
    for low, high in ((0.99, 1.2), (1.004, 1.2), (0.8, 0.996)):
        assert papers.verdict(low, high) == "not shown"
    rows = papers.claims()
    assert list(rows) == list(METHODS)
    for said, _, (here, seen, file) in (row for each in rows.values() for row in each):
        found = re.search(r"[\d.]+ \(([\d.]+)-([\d.]+)\)", here)
        assert seen == (papers.verdict(*map(float, found.groups())) if found else "no interval")
        assert "" not in (here, file) and (ROOT / "results" / f"{file}.json").is_file(), said


def test_what_the_claims_say_of_a_sweep(monkeypatch):
    points = {  # target forwards, discards, modelled tokens/s
        "K": {"1": [1.0, 0.1, 8.0], "2": [0.8, 0.5, 10.0], "4": [0.7, 2.0, 9.0]},
        "head": {"0.1": [0.89, 0.3, 11.0], "0.3": [0.91, 0.3, 9.0], "0.5": [0.6, 2.5, 9.0]},
    }
    run = {"sweep": {"points": points, "acceptance_by_confidence": [[0.1, 0.2, 9], [0.9, 0.8, 7]]}}
    run["arms"] = {
        "baseline": {"verify_ms": 50.0},
        "glide": {
            "speedup": 1.2,
            "alpha": 0.5,
            "settings": {"gamma": 2},
            "draft_ms": 20.0,
            "tau": 2.0,
            "accepted_per_round": 1.0,
            "n_discarded_per_token": 1.5,
        },
    }
    run["batch"] = {"size": 4, "arms": {"glide": {"speedup": 0.5}}}
    monkeypatch.setattr(papers, "result", lambda file: run)
    assert papers.frontier("") == (
        "1 of 3 thresholds lie below the fixed lengths",
        "no interval",
        "",
    )
    assert "1.10 in modelled" in papers.modelled("", "head", "K")[0]
    # the best take 0.6 + 0.1 x (0.4 + 2.5) and 0.8 + 0.1 x (0.2 + 0.5); at 1, 1.30 and 1.10
    costs = papers.at_costs("", "head", "K", [0.1, 1])[0]
    assert costs == "head / K: 0.98 at 0.1, 0.85 at 1"
    assert "0.20 at a confidence of 0.10, 0.80 at 0.90" in papers.confidence("")[0]
    assert papers.nodes("", "glide")[0] == "glide 4.0 draft tokens a round"
    assert papers.token_times("", "glide")[0] == "glide 5.0 ms a draft token"
    assert papers.batched(("", ""), "glide")[0] == "glide in batches of 4, 4: 0.50, 0.50"
    predicted = 1.75 / (2 * 0.2 + 1)  # (1 - a^3) / (1 - a), c = 20 / 2 / 50
    assert papers.predicted("", "glide")[0] == f"glide: {predicted:.2f} predicted, 1.20 measured"
    points |= {"w1_d3": {"0.1": [1.0, 1.0, 9.5]}, "confidence": {"0.5": [1.0, 1.0, 12.0]}}
    said = "2 heads 9.50 to 11.00, K 10.00, confidence 12.00 modelled tokens/s"
    assert papers.heads("")[0] == said


def result(file):
    return json.loads((ROOT / "results" / f"{file}.json").read_text())


def arm(file, name, figure):
    return result(file)["arms"][name][figure]


def alpha(run, step=None, name="alpha"):
    """Held-out alpha at the end of a training run, or after some steps."""
    curve = result(f"curves/{run}")
    return next(point[name] for point in curve[::-1] if step in (None, point["step"]))


def claims():
    """Sentences of the READMEs whose figures come from results/: (file, sentence, figures)."""
    top = "CTC-drafter reached {:.2f} in another run"
    yield "README.md", top, [arm("cpu_copies", "ctc_drafter:copies", "speedup")]
    here = "results/README.md"
    arms = ("glide", "cape:cpu", "specdecpp", "falcon", "ctc_drafter")
    more = [
        arm("cpu_stages", name, "tau") / arm("cpu_stages", f"{name}@third", "tau") for name in arms
    ]
    yield (
        here,
        "{:.2f} times as much for GLIDE, {:.2f} with CAPE, {:.2f} for SpecDec++, {:.2f} for Falcon "
        "and {:.2f} for CTC-drafter",
        more,
    )
    likely, five = (
        papers.ratio("cpu_copies", name, "falcon", "speed")[0].split()[3]
        for name in ("falcon:confidence", "falcon@five")
    )
    yield here, "likeliest nodes gain {} over the six", [likely]
    yield here, "where five fixed ones ( ) gain {}.", [five]  # code is left out
    yield here, "are {} times as fast as the shipped six", [five]
    taus = [arm("cpu_copies", name, "tau") for name in ("falcon@five", "falcon")]
    yield here, ", with a tau of {:.2f} for {:.2f}, so", taus
    alphas = {
        name: arm("cpu_rivals_glide", f"glide@{name}", "alpha")
        for name in ("layer18", "layer29", "vanilla")
    }
    yield (
        here,
        "raises alpha by {:.1f} points with layer 18 and by {:.1f} with the top layer",
        [100 * (alphas[name] - alphas["vanilla"]) for name in ("layer18", "layer29")],
    )
    runs = ("glide_turns", "glide_turns-top")
    yield (
        here,
        "is {:.3f} with layer 18 and {:.3f} with the top layer, after 805,955 it is {:.3f} and "
        "{:.3f}",
        [alpha(run, step, "eval_alpha") for step in (450, 1050) for run in runs],
    )
    held = [alpha(run, 1050) for run in runs]
    yield here, "layer 18 was still behind ({:.3f} and {:.3f} after", held
    held = [alpha(run) for run in ("rival_glide18", "rival_glide29")]
    yield here, "layer 18 is ahead in held-out alpha, too ({:.3f} and {:.3f})", held
    sampled = result("cpu_t1")["arms"]
    plain_ms = sampled["baseline"]["verify_ms"]
    accepted = sampled["glide"]["alpha"]
    cost = sampled["glide"]["draft_ms"] / 2 / plain_ms
    yield here, "has an alpha of {:.2f}, and a draft token takes c = {:.2f}", [accepted, cost]
    yield (
        here,
        "predicts {:.2f} tokens a round and a speedup of {:.2f}; measured are {:.2f} and {:.2f}",
        [glide.expected_speedup(accepted, 2, c) for c in (0, cost)]
        + [sampled["glide"]["tau"], sampled["glide"]["speedup"]],
    )
    longer = 100 * (sampled["glide"]["verify_ms"] / plain_ms - 1)
    yield here, "where it takes {:.0f}% longer", [longer]
    greedy = {name: arm("cpu_variants", name, "tau") for name in METHODS}
    yield (
        here,
        "tau was {:.2f} for GLIDE, {:.2f} for SpecDec++, and {:.2f} for Falcon and CTC-drafter",
        [greedy[name] for name in ("glide", "specdecpp", "falcon")],
    )
    assert abs(greedy["falcon"] - greedy["ctc_drafter"]) < 0.005
    plain_ms = arm("cpu_copies", "baseline", "verify_ms")
    of_spec = result("cpu_copies")["arms"]["specdecpp"]
    drafted = of_spec["accepted_per_round"] + of_spec["n_discarded_per_token"] * of_spec["tau"]
    draft_ms = of_spec["draft_ms"] / drafted
    threshold = specdecpp.stop_threshold(draft_ms, plain_ms - draft_ms)
    yield (
        here,
        "a draft token takes {:.1f} ms and a plain one {:.1f} ms, so by",
        [draft_ms, plain_ms],
    )
    yield here, "the chance of a refusal is {:.2f} or more", [threshold]
    taus = [arm("cpu_variants", name, "tau") for name in ("specdecpp", "specdecpp@theorem")]
    yield here, "tau rises from {:.2f} to {:.2f}, and it is slower", taus
    weight = specdecpp.Config().w_rej
    yield here, "after one judged token, a chance of {:.2f}", [0.7 / (0.7 + weight * 0.3)]
    sweep = result("cpu_variants")["sweep"]
    speeds = {
        rule: [point[2] for point in sweep["points"][rule].values()]
        for rule in ("K", "oracle", "head")
    }
    yield (
        here,
        "({:.1f} ms a draft token, {:.1f} ms a verification, R^2 {:.2f}), is {:.0f}% ahead",
        [sweep["t_draft_ms"], sweep["t_target_ms"], sweep["r2"]]
        + [100 * (max(speeds["oracle"]) / max(speeds["K"]) - 1)],
    )
    measured = arm("cpu_variants", "specdecpp:K2", "verify_ms")
    each_ms = arm("cpu_variants", "specdecpp:K2", "draft_ms") / papers.drafted(
        "cpu_variants", "specdecpp:K2"
    )
    by_measured = {
        rule: {
            setting: 1000 / (each_ms * (1 - forwards + thrown) + measured * forwards)
            for setting, (forwards, thrown, _) in sweep["points"][rule].items()
        }
        for rule in ("K", "oracle")
    }
    best = {rule: max(each, key=each.get) for rule, each in by_measured.items()}
    assert best["K"] == "2"
    ahead = by_measured["oracle"][best["oracle"]] / by_measured["K"]["2"] - 1
    yield (
        here,
        "(By the times of K2 in the table, {:.1f} and {:.0f} ms, it is {:.0f}%, and two tokens",
        [each_ms, measured, 100 * ahead],
    )
    untrained = max(each[2] for each in sweep["points"]["confidence"].values())
    yield here, "threshold it is {:.0f}% ahead as", [100 * (max(speeds["head"]) / untrained - 1)]
    errors = sweep["calibration"]["head"]
    yield here, "The head's output has an ECE of {:.2f}", [errors["ece"]]
    yield here, "With the bias taken out the ECE is {:.2f}", [errors["ece_reweighted"]]
    more = result("cpu_rivals_more")
    four = more["arms"]["specdecpp:K2@four"]
    each_ms = four["draft_ms"] / papers.drafted("cpu_rivals_more", "specdecpp:K2@four")
    cost = each_ms / more["arms"]["baseline"]["verify_ms"]
    fit = more["sweep"]
    modelled = fit["t_draft_ms"] / fit["t_target_ms"]
    said = "it takes {:.2f} of a plain forward, by the fitted times, which the model uses, {:.2f} "
    yield here, said + "(R^2 {:.2f})", [cost, modelled, fit["r2"]]
    best = {
        rule: max(point[2] for point in more["sweep"]["points"][rule].values())
        for rule in ("K", "oracle", "head", "confidence")
    }
    assert best["K"] == more["sweep"]["points"]["K"]["2"][2]
    ahead = 100 * (best["oracle"] / best["K"] - 1)
    yield here, "best fixed length, two, where the oracle is {:.0f}% ahead", [ahead]
    ahead = 100 * (best["confidence"] / best["head"] - 1)
    yield here, "probability is {:.0f}% ahead of the head as modelled", [ahead]
    yield (
        here,
        "it has a tau of {:.2f} where the linear layer has {:.2f} and, from another seed, {:.2f}",
        [
            arm("cpu_rivals_more", "falcon@lstm", "tau"),
            arm("cpu_rivals_falcon", "falcon@k2", "tau"),
            arm("cpu_rivals_falcon", "falcon@k2-seed1", "tau"),
        ],
    )
    ends = [alpha(run, None, "eval_alpha") for run in ("rival_flstm", "rival_fk2")]
    yield here, "alpha on answers of {:.3f} and {:.3f}.", ends
    yield (
        here,
        "It drafts in {:.1f} ms a round, where the linear layer took {:.1f} in",
        [
            arm("cpu_rivals_more", "falcon@lstm", "draft_ms"),
            arm("cpu_rivals_falcon", "falcon@k2", "draft_ms"),
        ],
    )
    seeds = [
        arm("cpu_rivals_falcon", f"falcon@{name}{seed}", "tau")
        for seed in ("", "-seed1")
        for name in ("k2", "no-csgd")
    ]
    yield (
        here,
        "tau is {:.2f} with it and {:.2f} without from one seed, {:.2f} and {:.2f} from the other",
        seeds,
    )
    runs = ("rival_fk2", "rival_fk2_seed1", "rival_fk2n", "rival_fk2n_seed1")
    yield (
        here,
        "lower with it both times ({:.3f} and {:.3f}, without it {:.3f} and {:.3f})",
        [alpha(run, None, "eval_alpha") for run in runs],
    )
    tall = [arm("cpu_rivals_falcon", f"falcon@k{k}-tall", "draft_ms") for k in (2, 3)]
    yield here, "its four passes take {:.1f} ms instead of {:.1f} for two", tall
    without, masked, shown = map(alpha, ("falcon_k2-no-csgd", "falcon_k2-loss-only", "falcon_k2"))
    yield (
        here,
        "held-out alpha was {:.3f} without CSGD, {:.3f} when the slots that CSGD answers were "
        "only left out of the loss, and {:.3f} when their answers were shown, too: the one costs "
        "{:.3f}, the other wins back {:.3f}",
        [without, masked, shown, without - masked, shown - masked],
    )
    yield (
        here,
        "learn more slowly than one: alpha was {:.3f} against {:.3f} after",
        [alpha("falcon_2-layers"), alpha("falcon_k2", 300)],
    )
    ends = [alpha(f"falcon_{run}", None, "eval_alpha") for run in ("turns", "grown", "one-layer")]
    yield here, "rose from {:.3f} to {:.3f}, and to {:.3f} where the one layer learned on", ends
    layers = [arm("cpu_variants", name, "tau") for name in ("falcon", "falcon@one-layer")]
    yield here, "tau is {:.2f} with the shipped one and {:.2f} with the one-layer", layers
    layers = [
        arm("cpu_variants", name, part)
        for part in ("draft_ms", "verify_ms")
        for name in ("falcon@one-layer", "falcon")
    ]
    yield here, "it drafts in {:.1f} ms instead of {:.1f}, and its tree", layers[:2]
    yield here, "was verified in {:.0f} ms instead of {:.0f}.", layers[2:]
    verified = result("cpu_falcon_refit")["cost_curve"]["by_tokens"]
    six = [verified[number] for number in ("6", "8")]
    yield here, "were verified in {:.1f} ms there, and eight in {:.1f}", six
    near = ["glide:gamma1", "glide", "glide:gamma3", "cape:none", "falcon", "falcon@one-layer"]
    near += [f"ctc_drafter{each}" for each in ("", ":alignments", ":none")]
    near += [f"specdecpp{each}" for each in ("", ":K2", ":K4", ":confidence")]
    times = [arm("cpu_variants", name, "verify_ms") for name in near]
    yield (
        "results/claims.md",
        "verifying two to seven tokens took between {:.1f} and {:.1f} ms",
        [min(times), max(times)],
    )
    here = "checkpoints/README.md"
    last = {  # runs, and where their last million token-steps begins
        "glide_turns": 2400,
        "specdecpp_turns": 800,
        "falcon_grown": 1800,
        "ctc_drafter_longer": 800,
    }
    yield (
        here,
        "ended at {:.3f} for GLIDE, {:.3f} for SpecDec++, {:.3f} for Falcon and {:.3f} for "
        "CTC-drafter",
        [alpha(run, None, "eval_alpha") for run in last],
    )
    yield (
        here,
        "alpha on answers rose by {:.3f}, {:.3f}, {:.3f} and {:.3f}, though",
        [
            alpha(run, None, "eval_alpha") - alpha(run, step, "eval_alpha")
            for run, step in last.items()
        ],
    )
    runs = ("falcon_turns", "falcon_grown", "ctc_drafter_begins", "ctc_drafter_longer")
    ends = [alpha(run, None, "eval_alpha") for run in runs]
    yield (
        here,
        "rose from {:.3f} to {:.3f} (CTC-drafter's, in its last run, from {:.3f} to {:.3f})",
        ends,
    )
    for change, run in (("(`--no-distill`)", "hard"), ("draft tokens", "glide16k")):
        more = [
            alpha(f"rival_{run}", None, name) - alpha("rival_glide18", None, name)
            for name in ("alpha", "eval_alpha")
        ]
        said = f"{change} GLIDE ends {{:.3f}} higher in held-out alpha and {{:.3f}} higher on"
        yield here, re.sub(r"`[^`]*`", " ", said), more
    yield here, "got from there to {:.3f}", [alpha("falcon_one-layer", None, "eval_alpha")]
    four = [alpha(f"specdecpp_{run}", None, "eval_alpha") for run in ("four", "turns")]
    yield (
        here,
        "ended with {:.3f} on answers to built-in prompts, where the shipped one has {:.3f}",
        four,
    )
    heads = [alpha(f"specdecpp_{run}", None, "auc") for run in ("four_head", "head_turns")]
    yield here, "has an AUC of {:.3f} on held-out conversations, the shipped one {:.3f}", heads
    yield (
        here,
        "was {:.3f} after half of the run, where the linear layer had {:.3f}, and {:.3f} at its "
        "end ({:.3f})",
        [
            alpha(run, step, "eval_alpha")
            for step in (1600, None)
            for run in ("rival_flstm", "rival_fk2")
        ],
    )
    yield here, "trained on and {:.2f} on others", [alpha("glide")]
    for name, run in (
        ("draft model 0.54 and", "specdecpp"),
        ("Medusa 0.42 and", "medusa"),
        ("CTC-drafter 0.36 and", "ctc_drafter"),
        ("Falcon 0.32 and", "falcon"),
    ):
        yield here, name + " {:.2f}", [alpha(run)]
    for sentence, run in (
        ("held-out alpha is {:.3f} as above", "base"),
        ("{:.3f} with hard labels", "hard"),
        ("{:.3f} with 4,096 draft tokens", "v4096"),
        ("changed {:.3f} with a total-variation loss", "tv"),
        ("{:.3f} with a random layer", "rand"),
    ):
        yield here, sentence, [alpha(f"glide_try-{run}")]
    long = [alpha(f"glide_long-{run}", step) for step in (200, None) for run in ("rand", "base")]
    yield here, "({:.3f} against {:.3f}), and ended at {:.3f} against {:.3f}", long


# not in results/: alphas on conversations that were trained on; constants of falcon.py and
# specdecpp.py; a temperature; the best two logits of the one answer that float32 rounded otherwise
BY_HAND = {"0.52", "0.54", "0.42", "0.36", "0.32", "0.4", "0.7", "0.8", "25.3", "0.00002"}


@pytest.mark.parametrize("name", FILES)
def test_figures_in_the_text_were_measured(name):
    """Sentence by sentence; no decimal number stands outside those. (What a paper says is set in
    italics, options and versions as code.)"""
    text = tables.TABLE.sub(" ", TEXTS[name])
    for kind in (r"```.*?```", r"`[^`]*`", r"(?<!\*)\*(?!\*)[^*]+\*", r"\]\([^)]*\)"):
        text = re.sub(kind, " ", text, flags=re.DOTALL)
    text = re.sub(r"^\[\w+\]: .*$|^\|.*$", " ", text, flags=re.MULTILINE)
    text = " ".join(text.split())
    for file, sentence, figures in claims():
        if file == name:
            said = sentence.format(*figures)
            assert said in text, said
            text = text.replace(said, " ")
    of_tokens = r"[\d.]+ ?(?:million|M\b)"  # sums over runs, of token-steps
    text = re.sub(rf"{of_tokens}|(?:Lemma|Theorem|Eq\.|Python|Apache-|SmolLM) ?[\d.]+", " ", text)
    rest = set(re.findall(r"(?<![\w.])\d+\.\d+", text)) - BY_HAND
    assert not rest, f"{rest} are in no sentence of the list above"


# -------------------------------------------------------------------------- names, paths and links


def test_every_name_resolves():
    """`module.name`; and `name` alone after another one in the same cell of a table."""
    places = {name: name for name in (*METHODS, "common", "train", "bench")}
    places |= {path.stem: f"support.{path.stem}" for path in (ROOT / "support").glob("*.py")}
    modules = "|".join(places)
    names = set()
    for text in TEXTS.values():
        names |= set(re.findall(rf"`({modules})\.(\w+)`", text))
        for cell in re.findall(rf"`(?:{modules})\.\w+`[^|\n]*", text):
            module = re.match(r"`(\w+)", cell)[1]
            names |= {(module, each) for each in re.findall(r"[;,] `(\w+)`", cell)}
    names = {(module, name) for module, name in names if name not in ("py", "json")}
    assert len(names) > 25
    for module, name in names:
        assert hasattr(importlib.import_module(places[module]), name), f"{module}.{name}"


@pytest.mark.parametrize("name", FILES)
def test_every_path_and_link_leads_somewhere(name):
    folder, text = (ROOT / name).parent, TEXTS[name]
    kinds = r"py|json|jsonl|gz|sh|md|svg|html"
    for path in set(re.findall(rf"`([\w/.*-]+(?:\.(?:{kinds})|/))`", text)):
        places = (ROOT, folder, ROOT / "results" / "curves", ROOT / "conversations")
        made_by_a_run = path in ("config.json", "conversations.jsonl")
        assert made_by_a_run or any(list(place.glob(path)) for place in places), path
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (folder / path) if path else ROOT / name
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, link


def test_every_named_test_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", "\n".join(TEXTS.values()))
    assert len(named) > 10
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), name


# ----------------------------------------------------------------------------------------- commands


def commands():
    """Every command of the READMEs that starts one of our scripts: (script, options)."""
    for text in TEXTS.values():
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"(?<!`)`(\w[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in (*lines, *(" ".join(span.split()) for span in spans)):
            if found := re.search(r"(?:python|torchrun .*?) ([\w/]+\.py)(.*)", line):
                yield found[1], found[2].strip()


COMMANDS = sorted(set(commands()))


def test_there_are_commands():
    scripts = {script for script, _ in COMMANDS}
    tools = {"tests/coursework.py", "tests/tools/mutation.py", "tests/tools/tables.py"}
    assert scripts - {"METHOD.py"} == {"bench.py", "train.py"} | tools and len(COMMANDS) > 12
    assert sum("--help" in options for _, options in COMMANDS) >= 2


@pytest.mark.parametrize("script, options", COMMANDS)
def test_commands_are_understood(script, options, monkeypatch, capsys):
    for module, name in ((train, "train"), (data, "make_conversations")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(common, "load_target", lambda *_, **__: (None, None))
    monkeypatch.setattr(pictures, "curves", lambda *_: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # matplotlib is optional
    options = options.replace("results/*.json", "r.json").replace("--steps N", "--steps 9")
    options = options.replace("NAME", "glide")
    options = re.sub(r" (\.\.\.)$", " glide" if options.endswith("--method ...") else "", options)
    options = shlex.split(options.replace("...", "--data d.jsonl --out o"), comments=True)
    if script == "tests/coursework.py":
        assert not options or options[0] in coursework.EXERCISES
    elif script == "tests/tools/mutation.py":
        groups = {path.stem for path in (ROOT / "tests" / "tools" / "mutants").glob("*.py")}
        assert set(options) <= groups | {"--sample", "10"}
    elif script in ("bench.py", "train.py"):
        parse = bench.parse if script == "bench.py" else train.main
        if "--help" in options:
            with pytest.raises(SystemExit) as ended:
                parse(options)
            assert not ended.value.code and "options:" in capsys.readouterr().out
        else:
            if script == "train.py" and "--make-data" not in options:
                for needed in ("--method glide", "--data d.jsonl", "--out o", "--steps 9"):
                    flag, value = needed.split()
                    other = "--minutes" if flag == "--steps" else flag
                    if flag not in options and other not in options:
                        options += [flag, value]
            parse(options)
    else:
        assert script == "METHOD.py" or (ROOT / script).is_file()


# ------------------------------------------------------------------------------------- honest tests


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
