"""What the four papers claim, beside what a run in results/ shows: the tables of results/claims.md.

`tables.py` writes the tables, and a test holds the page to them.
"""

import json
from pathlib import Path

import glide
from support import report

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


def read(file: str):
    return json.loads((RESULTS / file).read_text())


# Each of these returns what was seen here, the verdict, and the file.


def ratio(file: str, ours: str, theirs: str, unit: str) -> tuple[str, str, str]:
    """How many times one arm's tau or tokens/s is another's, on the same prompts."""
    per = {"tau": "forwards", "tokens/s": "seconds"}[unit]
    by_prompt = []
    for name in (ours, theirs):
        sums = report.arms_of(read(file))[name]["by_prompt"]
        by_prompt.append({"tokens": sums["tokens"], "seconds": sums[per]})
    value, interval = report.paired(*by_prompt)
    low, high = (round(end, 2) for end in interval)  # judged as printed
    verdict = "confirmed" if low > 1 else "the opposite" if high < 1 else "not shown"
    return f"{ours} / {theirs}: {value:.2f} ({low:.2f}-{high:.2f}) in {unit}", verdict, file


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


def curves(*runs: str) -> tuple[str, str, str]:
    """Alpha on the target's answers after training, of runs LABEL=NAME."""
    shown = []
    for run in runs:
        label, name = run.split("=")
        alpha = read(f"curves/{name}.json")[-1]["eval_alpha"]
        shown.append(f"{label.replace('_', ' ')} {alpha:.3f}")
    first = runs[0].split("=")[1]
    return f"alpha on answers: {', '.join(shown)}", "-", f"curves/{first}.json"


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


READERS = (ratio, figures, batches, curves, predicted, sweep, linear_time)

# A claim is two lines: what the paper says and its figure, then the function that reads our figure.
CLAIMS = {
    "GLIDE": """
Reading the target's cache raises the acceptance rate (figure 4) | by 5.4 to 23.5 points
    ratio cpu_rivals_glide.json glide@layer29 glide@vanilla tau
The higher the layer that is read, the better (figure 7) | rising
    curves layer_0=rival_glide0 layer_9=rival_glide9 layer_18=rival_glide18 top=rival_glide29
GLIDE is faster than plain decoding (table 4) | 1.96 (7B)
    ratio cpu_main.json glide baseline tokens/s
Alpha, gamma and c predict the speedup (5.1) | -
    predicted cpu_t1.json
Small batches hardly slow GLIDE down (table 4) | 1.92 to 2.08 (7B)
    batches glide cpu_batch2.json cpu_batch4.json cpu_batch8.json
""",
    "CAPE": """
Expansion makes GLIDE faster (figure 6) | 2.17 to 2.61
    ratio cpu_variants.json cape cape:none tokens/s
Sizes by confidence beat one size for all (5.4) | 68.4 to 70.6 tokens/s
    ratio cpu_variants.json cape cape:fixed tokens/s
It is faster than a beam of four (figure 6) | -
    ratio cpu_variants.json cape beam tokens/s
Expansion costs no drafting time, a beam does (table 3) | 5.3, 5.5, 10.9 ms
    figures cpu_variants.json draft_ms .1f cape:none cape beam
""",
    "SpecDec++": """
The head is faster than the best fixed length (table 1) | 1.07 to 1.11
    sweep cpu_variants.json head K
An oracle would be much faster (2.1) | 1.54
    sweep cpu_variants.json oracle K
Time is linear in draft and target forwards (Eq. 2.1) | R^2 at least 0.98
    linear_time cpu_variants.json
SpecDec++ is faster than plain decoding (abstract) | 2.04 to 2.26
    ratio cpu_main.json specdecpp baseline tokens/s
""",
    "Falcon": """
CSGD raises tau (table 4) | 2.78 to 3.34
    ratio cpu_rivals_falcon.json falcon@k2 falcon@no-csgd tau
The tree raises tau (table 4) | 2.13 to 3.34
    ratio cpu_rivals_falcon.json falcon@k2 falcon:chain@k2 tau
k = 2 is better than 3 (table 5) | 3.34 and 2.52
    ratio cpu_rivals_falcon.json falcon@k2-tall falcon@k3-tall tau
k = 3 is better than 4 (table 5) | 2.52 and 2.35
    ratio cpu_rivals_falcon.json falcon@k3-tall falcon@k4-tall tau
Its tau is above that of Medusa's heads (table 3) | 3.34 and 1.51
    ratio cpu_main.json falcon medusa tau
Falcon is faster than plain decoding (abstract) | 2.91 to 3.51
    ratio cpu_main.json falcon baseline tokens/s
""",
    "CTC-drafter": """
The transform raises tau (table 2) | 3.02 to 3.56
    ratio cpu_rivals_ctc.json ctc_drafter:alignments@ctc ctc_drafter:none@ctc tau
A layer with CTC beats Medusa's heads (table 2) | 2.58 to 3.02
    ratio cpu_rivals_ctc.json ctc_drafter:none@ctc ctc_drafter:none@medusa tau
The transform harms Medusa's heads (table 2) | 2.58 to 2.38
    ratio cpu_rivals_ctc.json ctc_drafter:none@medusa ctc_drafter:alignments@medusa tau
CTC-drafter is faster than Medusa (table 1) | 2.78 and 2.13
    ratio cpu_variants.json ctc_drafter:alignments medusa tokens/s
CTC-drafter is faster than plain decoding (table 1) | 2.16 to 2.78
    ratio cpu_main.json ctc_drafter baseline tokens/s
""",
}


def table(method: str) -> str:
    """The claims of a method."""
    lines = CLAIMS[method].strip().splitlines()
    readers = {reader.__name__: reader for reader in READERS}
    rows = []
    for claim, ours in zip(lines[::2], lines[1::2]):
        said, theirs = claim.split(" | ")
        name, *words = ours.split()
        seen, verdict, file = readers[name](*words)
        rows.append([said, theirs, seen, verdict, f"[run]({file})"])
    return report.markdown(["what the paper says", "its figures", "here", "verdict", "from"], rows)
