"""Write the tables of the pages, and the pictures, from results/.

    python results/tools/tables.py                          # all; needs matplotlib
    python results/tools/tables.py results/cpu_main.json    # print those of a result

A test fails where a table is not what this would write. A comment above a table says
what is in it:

    <!-- table: run.json; glide cape eagle; speedup tau; paper's: 1.96 2.5 - -->
            some arms or plain loops of a run, some of their figures, and figures to
            compare
    <!-- curves: GLIDE: glide; Falcon: falcon -->
            training curves, the sum of their stages
    <!-- layers: 18 29 9 0 none -->
            GLIDE's drafters by the target layer that they read, after 1000 steps
    <!-- taus: tau.json; GLIDE: glide; CAPE: cape -->
            tau of single drafters, each with one setting
    <!-- claims: PAPER | SEEN -->
            claims of a paper, one a line (claims.py); the first and the last column
            are written by hand and kept
    <!-- speedups: cpu_lengths.json; tokens of the prompt; glide falcon -->
            speedups of some arms by the length of the prompt, or the size of a batch
    <!-- rules: two layers: rounds.json.gz; six layers: rounds_six.json.gz -->
            SpecDec++'s stop rules, replayed (results/tools/stop_rules.py)
    <!-- heads: heads.json; D = 1; D = 5 -->
            some of SpecDec++'s heads, trained on cached states
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

import claims  # noqa: E402
import pictures  # noqa: E402
import stop_rules  # noqa: E402

from support.measuring import report  # noqa: E402

FILES = (
    "README.md",
    "PAPERS.md",
    "results/README.md",
    "results/claims.md",
    "results/runtimes.md",
    "results/log.md",
    "checkpoints/README.md",
    "conversations/README.md",
    "support/README.md",
    "support/interop/README.md",
    "tests/README.md",
    "tests/assignment.md",
    "tests/solutions.md",
    "CONTRIBUTING.md",
)
COMMENT = r"<!-- (\w+):\s((?:(?!-->).)*)\s-->\n\n"
TABLE = re.compile(rf"({COMMENT})((?:\|[^\n]*\n)*\n?)", re.DOTALL)


def table(words: str) -> str:
    """The table that a comment asks for."""
    file, names, columns, *more = [part.strip() for part in words.split(";")]
    arms = claims.read(file)["arms"]
    arms = arms | arms.get("baseline", {}).get("loops", {})
    heads, rows = report.arm_table(arms, names.split(), columns.split())
    for part in more:
        head, _, values = part.partition(": ")
        heads.append(head)
        for row, value in zip(rows, values.split(), strict=True):
            row.append(None if value == "-" else value)
    return report.markdown(heads, rows)


def curves(words: str) -> str:
    """Runs that continued one another: sums, and the last one's loss and alphas."""
    heads = ["drafter", "steps", "token-steps", "minutes", "loss", "held-out alpha"]
    rows = []
    for part in words.split(";"):
        label, _, name = part.strip().partition(": ")
        ends = [stage[-1] for stage in claims.read(f"curves/{name}.json")]
        last = ends[-1]
        rows.append(
            [
                label,
                str(sum(end["step"] for end in ends)),
                f"{sum(end['tokens'] for end in ends) / 1e6:.2f}M",
                f"{sum(end['minutes'] for end in ends):.0f}",
                report.cell(last["loss"]),
                report.cell(last["alpha"], ".3f"),
                report.cell(last.get("eval_alpha"), ".3f"),
            ]
        )
    return report.markdown([*heads, "on answers"], rows)


def layers(words: str) -> str:
    """Alphas by the layer that GLIDE reads, from the lowest seed to the highest."""
    rows = []
    for layer in words.split():
        seeds = claims.read("curves/glide_layers.json")[layer]
        ends = [row for curve in seeds for row in curve if row["step"] == 1000]
        alphas = [sorted(end[name] for end in ends) for name in ("alpha", "eval_alpha")]
        cells = [report.cell([each[0], each[-1]], ".3f") for each in alphas]
        rows.append([layer, str(len(seeds)), *cells])
    return report.markdown(["layer", "seeds", "held-out alpha", "on answers"], rows)


def taus(words: str) -> str:
    """Tau of drafters, and its ratio to that of the first one on the same prompts."""
    file, *parts = [part.strip() for part in words.split(";")]
    rows = []
    first = None
    for part in parts:
        label, _, name = part.partition(": ")
        run = claims.read(file)["runs"][name]
        _, forwards, drafted, _ = map(sum, zip(*run["prompts"].values()))
        sums = claims.sums_of(file, name)
        first = sums if first is None else first
        ratio, *ends = report.bootstrap(claims.ratio_of_taus, sums, first)
        own = float(claims.tau(sums.sum(0)))
        figures = [f"{run['tokens'] / 1e6:.2f}M", f"{drafted / forwards:.1f}"]
        cells = [label, *figures, f"{own:.2f}", f"{ratio:.2f}", report.cell(ends)]
        rows.append(cells)
    heads = ["drafter", "token-steps", "nodes a round", "tau", "ratio to the first"]
    return report.markdown([*heads, "95%"], rows)


def by_size(words: str) -> str:
    """Speedups of some arms by the number of sequences, or by the prompt's length."""
    file, head, names = (part.strip() for part in words.split(";"))
    result = claims.read(file)
    return report.speedups(
        head, result.get("sizes") or result["lengths"], names.split()
    )


COSTS = (stop_rules.COST, 0.209)  # the latter: of the paper's models


def rules(words: str) -> str:
    """How many times as fast stop rules are as the best K, for each cost of a pass."""
    names = ("head", "product", "confidence", "oracle")
    rows = []
    for part in words.split(";"):
        label, _, file = part.strip().partition(": ")
        answers = stop_rules.read(claims.RESULTS / file)
        for cost in COSTS:
            row = [label, f"{cost:g}"]
            for name in names:
                value, ends = stop_rules.compare(answers, name, "K", cost)
                row.append(claims.interval(value, *ends, ".3f"))
            rows.append(row)
    return report.markdown(["drafts", "c", *names], rows)


def trained_heads(words: str) -> str:
    """SpecDec++'s heads: how well they predict, and what they gain over a fixed K."""
    columns = ("loss", "constant", "auc", "auc_confidence", "auc_prompts")
    rows = []
    file, *labels = [part.strip() for part in words.split(";")]
    heads = {head["label"]: head for head in claims.read(file)["heads"]}
    for head in map(heads.get, labels):
        cells = [report.cell(head[name], ".3f") for name in columns]
        value, *ends = head["over_K_0.1"]
        gain = [report.cell(value, ".3f"), report.cell(ends, ".3f")]
        rows.append([head["label"], str(head["steps"]), *cells, *gain])
    heads = ["head", "steps", "loss", "of a constant", "AUC", "of the confidence"]
    return report.markdown([*heads, "AUC on prompts", "over best K", "95%"], rows)


def written(text: str) -> str:
    """A README with its tables written anew."""
    makers = {
        "table": table,
        "curves": curves,
        "layers": layers,
        "taus": taus,
        "speedups": by_size,
        "rules": rules,
        "heads": trained_heads,
    }

    def anew(match):
        comment, kind, words, old = match.groups()
        new = claims.table(words, old) if kind == "claims" else makers[kind](words)
        return f"{comment}{new}\n\n"

    return TABLE.sub(anew, text)


LENGTH_ARMS = ("glide", "specdecpp", "falcon", "ctc_drafter", "lookup")


def draw() -> None:
    """The pictures of results/README.md and results/log.md."""
    folder = claims.RESULTS / "pictures"
    pictures.costs(claims.read("cpu_cost.json")["cost_curve"], folder)
    pictures.lengths(claims.read("cpu_lengths.json")["lengths"], LENGTH_ARMS, folder)
    answers = stop_rules.read(claims.RESULTS / "rounds_greedy.json.gz")
    costs = {"t_draft": stop_rules.COST, "t_target": 1.0}
    points = {r: stop_rules.points(answers, r, **costs) for r in stop_rules.RULES}
    pictures.stop_rules(points, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", nargs="*", metavar="FILE", help="results of bench.py --json to print"
    )
    files = parser.parse_args().results
    if files:
        shown = [report.tables(claims.read(Path(file).resolve())) for file in files]
        print("\n\n".join(shown))
        return
    for name in FILES:
        path = ROOT / name
        path.write_text(written(path.read_text()))
    draw()


if __name__ == "__main__":
    main()
