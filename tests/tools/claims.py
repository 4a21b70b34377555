"""What the four papers claim, beside what a run in results/ shows: the tables of results/claims.md.

A row is a claim, the paper's figure, and a function that reads ours from a file. `tables.py` writes
the tables, and a test holds the page to them.
"""

import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

import glide  # noqa: E402
from support import report  # noqa: E402

RESULTS = ROOT / "results"


def read(file: str) -> dict:
    return json.loads((RESULTS / file).read_text())


def judged(value: float, low: float, high: float) -> tuple[str, str]:
    """A ratio with its interval, and the verdict on the claim that it is above 1."""
    low, high = round(low, 2), round(high, 2)  # judged as printed
    verdict = "confirmed" if low > 1 else "the opposite" if high < 1 else "not shown"
    return f"{value:.2f} ({low:.2f}-{high:.2f})", verdict


# Each of these returns what was seen here, the verdict, and the file.


def ratio(file: str, ours: str, theirs: str, unit: str = "tau") -> tuple[str, str, str]:
    """How many times one arm's tau (or tokens/s) is another's, on the same prompts."""
    arms = report.arms_of(read(file))
    by_prompt = []
    for name in (ours, theirs):
        sums = arms[name]["by_prompt"]
        per = sums["forwards"] if unit == "tau" else sums["seconds"]
        by_prompt.append({"tokens": sums["tokens"], "seconds": per})
    value, interval = report.paired(*by_prompt)
    text, verdict = judged(value, *interval)
    return f"{ours} / {theirs}: {text} in {unit}", verdict, file


def speedup(file: str, name: str) -> tuple[str, str, str]:
    """An arm's speedup over plain decoding."""
    arm = report.arms_of(read(file))[name]
    text, verdict = judged(arm["speedup"], *arm["speedup_ci"])
    return f"{name}: {text}", verdict, file


def figures(file: str, column: str, form: str, *names: str) -> tuple[str, str, str]:
    """One figure of some arms."""
    arms = report.arms_of(read(file))
    shown = ", ".join(f"{name} {arms[name][column]:{form}}" for name in names)
    return shown, "-", file


def batches(name: str, *files: str) -> tuple[str, str, str]:
    """An arm's speedups in batches of several sizes."""
    results = [read(file) for file in files]
    sizes = ", ".join(str(result["batch"]["size"]) for result in results)
    shown = ", ".join(f"{report.arms_of(result)[name]['speedup']:.2f}" for result in results)
    return f"{name} in batches of {sizes}: {shown}", "-", files[0]


def curves(**names: str) -> tuple[str, str, str]:
    """Alpha on the target's answers after training."""
    files = {label: f"curves/{name}.json" for label, name in names.items()}
    ends = {label: read(file)[-1]["eval_alpha"] for label, file in files.items()}
    shown = ", ".join(f"{label.replace('_', ' ')} {alpha:.3f}" for label, alpha in ends.items())
    return f"alpha on answers: {shown}", "-", next(iter(files.values()))


def predicted(file: str) -> tuple[str, str, str]:
    """GLIDE's speedup by its alpha, gamma and cost, beside the measured one."""
    arm = report.arms_of(read(file))["glide"]
    drafted = max(1, len(arm["acceptance_by_position"]))
    cost = arm["draft_ms"] / drafted / arm["verify_ms"]
    expected = glide.expected_speedup(arm["alpha"], drafted, cost)
    return f"glide: {expected:.2f} predicted, {arm['speedup']:.2f} measured", "-", file


def sweep(file: str, ours: str, theirs: str) -> tuple[str, str, str]:
    """The modelled tokens/s of one stop rule over another's, each with its best setting."""
    points = read(file)["sweep"]["points"]
    speeds = [max(point[2] for point in points[rule].values()) for rule in (ours, theirs)]
    return f"{ours} / {theirs}: {speeds[0] / speeds[1]:.2f} in modelled tokens/s", "-", file


def linear_time(file: str) -> tuple[str, str, str]:
    """How well Eq. 2.1 of SpecDec++ explains the measured times."""
    found = read(file)["sweep"]
    times = f"{found['t_draft_ms']:.1f} ms and {found['t_target_ms']:.1f} ms"
    return f"{times}, R^2 {found['r2']:.2f}", "-", file


MAIN = "cpu_main.json"
VARIANTS = "cpu_variants.json"
LAYERS = "cpu_rivals_glide.json"
CSGD = "cpu_rivals_falcon.json"
CTC = "cpu_rivals_ctc.json"

CLAIMS = {
    "GLIDE": [
        (
            "Reading the target's cache raises the acceptance rate (figure 4)",
            "by 5.4 to 23.5 points",
            partial(ratio, LAYERS, "glide@layer29", "glide@vanilla"),
        ),
        (
            "The higher the layer that is read, the better (figure 7)",
            "rising",
            partial(
                curves,
                layer_0="rival_glide0",
                layer_9="rival_glide9",
                layer_18="rival_glide18",
                top="rival_glide29",
            ),
        ),
        (
            "GLIDE is faster than plain decoding (table 4)",
            "1.96 (7B)",
            partial(speedup, MAIN, "glide"),
        ),
        (
            "Alpha, gamma and c predict the speedup (5.1)",
            "-",
            partial(predicted, "cpu_t1.json"),
        ),
        (
            "Small batches hardly slow GLIDE down (table 4)",
            "1.92 to 2.08 (7B)",
            partial(batches, "glide", "cpu_batch2.json", "cpu_batch4.json", "cpu_batch8.json"),
        ),
    ],
    "CAPE": [
        (
            "Expansion makes GLIDE faster (figure 6)",
            "2.17 to 2.61",
            partial(ratio, VARIANTS, "cape", "cape:none", "tokens/s"),
        ),
        (
            "Sizes by confidence beat one size for all (5.4)",
            "68.4 to 70.6 tokens/s",
            partial(ratio, VARIANTS, "cape", "cape:fixed", "tokens/s"),
        ),
        (
            "It is faster than a beam of four (figure 6)",
            "-",
            partial(ratio, VARIANTS, "cape", "beam", "tokens/s"),
        ),
        (
            "Expansion costs no drafting time, a beam does (table 3)",
            "5.3, 5.5, 10.9 ms",
            partial(figures, VARIANTS, "draft_ms", ".1f", "cape:none", "cape", "beam"),
        ),
    ],
    "SpecDec++": [
        (
            "The head is faster than the best fixed length (table 1)",
            "1.07 to 1.11",
            partial(sweep, VARIANTS, "head", "K"),
        ),
        (
            "An oracle would be much faster (2.1)",
            "1.54",
            partial(sweep, VARIANTS, "oracle", "K"),
        ),
        (
            "Time is linear in draft and target forwards (Eq. 2.1)",
            "R^2 at least 0.98",
            partial(linear_time, VARIANTS),
        ),
        (
            "SpecDec++ is faster than plain decoding (abstract)",
            "2.04 to 2.26",
            partial(speedup, MAIN, "specdecpp"),
        ),
    ],
    "Falcon": [
        (
            "CSGD raises tau (table 4)",
            "2.78 to 3.34",
            partial(ratio, CSGD, "falcon@k2", "falcon@no-csgd"),
        ),
        (
            "The tree raises tau (table 4)",
            "2.13 to 3.34",
            partial(ratio, CSGD, "falcon@k2", "falcon:chain@k2"),
        ),
        (
            "k = 2 is better than 3 (table 5)",
            "3.34 and 2.52",
            partial(ratio, CSGD, "falcon@k2-tall", "falcon@k3-tall"),
        ),
        (
            "k = 3 is better than 4 (table 5)",
            "2.52 and 2.35",
            partial(ratio, CSGD, "falcon@k3-tall", "falcon@k4-tall"),
        ),
        (
            "Its tau is above that of Medusa's heads (table 3)",
            "3.34 and 1.51",
            partial(ratio, MAIN, "falcon", "medusa"),
        ),
        (
            "Falcon is faster than plain decoding (abstract)",
            "2.91 to 3.51",
            partial(speedup, MAIN, "falcon"),
        ),
    ],
    "CTC-drafter": [
        (
            "The transform raises tau (table 2)",
            "3.02 to 3.56",
            partial(ratio, CTC, "ctc_drafter:alignments@ctc", "ctc_drafter:none@ctc"),
        ),
        (
            "A layer with CTC beats Medusa's heads (table 2)",
            "2.58 to 3.02",
            partial(ratio, CTC, "ctc_drafter:none@ctc", "ctc_drafter:none@medusa"),
        ),
        (
            "The transform harms Medusa's heads (table 2)",
            "2.58 to 2.38",
            partial(ratio, CTC, "ctc_drafter:none@medusa", "ctc_drafter:alignments@medusa"),
        ),
        (
            "CTC-drafter is faster than Medusa (table 1)",
            "2.78 and 2.13",
            partial(ratio, VARIANTS, "ctc_drafter:alignments", "medusa", "tokens/s"),
        ),
        (
            "CTC-drafter is faster than plain decoding (table 1)",
            "2.16 to 2.78",
            partial(speedup, MAIN, "ctc_drafter"),
        ),
    ],
}


def table(method: str) -> str:
    """The claims of a method."""
    rows = []
    for claim, theirs, look in CLAIMS[method]:
        seen, verdict, file = look()
        rows.append([claim, theirs, seen, verdict, f"[run]({file})"])
    return report.markdown(["what the paper says", "its figures", "here", "verdict", "from"], rows)
