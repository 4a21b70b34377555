"""Write the tables of the README files anew from results/.

    python tests/tools/tables.py

tests/test_readme.py fails where a table is not what this would write. A comment above a table says
what is in it:

    <!-- table: cpu_stages.json -->                     the first one that bench.py --table prints
    <!-- table: cpu_stages.json; after: Acceptance -->  the one after the paragraph that begins so
    <!-- table: cpu_stages.json; glide cape; speedup tau; in the paper: 1.96 2.5 -->
                                                     some arms, some figures, and figures to compare
    <!-- curves: `glide`: glide glide_more -->       rows of training runs, stage after stage
    <!-- claims: glide -->                           what a paper says beside ours (claims.py)
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

import claims  # noqa: E402

from support import report  # noqa: E402

FILES = (
    "README.md",
    "results/README.md",
    "results/claims.md",
    "checkpoints/README.md",
    "tests/README.md",
)
RESULTS = ROOT / "results"
TABLE = re.compile(
    r"(<!-- (table|curves|claims): ((?:(?!-->).)*) -->\n\n)((?:\|[^\n]*\n)*\n?)", re.DOTALL
)
COLUMNS = {  # figure of a result: heading, and how many decimals
    "tokens_per_s": ("tokens/s", 1),
    "speedup": ("speedup", 2),
    "speedup_ci": ("95%", 2),
    "tau": ("tau", 2),
    "accepted_per_round": ("accepted", 2),
    "alpha": ("alpha", 2),
    "draft_ms": ("draft ms", 1),
    "verify_ms": ("verify ms", 1),
    "n_target_per_token": ("N_t/N", 2),
    "n_discarded_per_token": ("N_d/N", 2),
    "overhead": ("overhead", 2),
}


def cell(value, digits: int) -> str | None:
    """A figure, or an interval, as text; None stays None."""
    if isinstance(value, list):
        return "-".join(cell(each, digits) for each in value)
    return None if value is None else f"{value:.{digits}f}"


def table(words: str) -> str:
    """The table that a comment asks for."""
    file, *parts = [part.strip() for part in words.split(";")]
    result = json.loads((RESULTS / file).read_text())
    if not parts or parts[0].startswith("after: "):
        printed = report.tables(result).split("\n\n")
        begin = parts[0].removeprefix("after: ") if parts else "**"
        [place] = [i for i, part in enumerate(printed) if part.startswith(begin)]
        return next(part for part in printed[place + 1 :] if part.startswith("|"))
    names, figures = parts[0].split(), parts[1].split()
    arms = result["arms"] if "arms" in result else result["batch"]["arms"]
    rows = [
        [name, *(cell(arms[name][figure], COLUMNS[figure][1]) for figure in figures)]
        for name in names
    ]
    heads = ["arm", *(COLUMNS[figure][0] for figure in figures)]
    for part in parts[2:]:
        head, _, values = part.partition(": ")
        heads.append(head)
        for row, value in zip(rows, values.split(), strict=True):
            row.append(None if value == "-" else value)
    return report.markdown(heads, rows)


def curves(words: str) -> str:
    """Runs that went on from one another: what they came to, and how long they took."""
    rows = []
    for part in words.split(";"):
        label, _, names = part.strip().partition(": ")
        ends = [
            json.loads((RESULTS / "curves" / f"{name}.json").read_text())[-1]
            for name in names.split()
        ]
        tokens = sum(end["tokens"] for end in ends) / 1e6
        row = [label, ", ".join(str(end["step"]) for end in ends), f"{tokens:.2f}M"]
        row += [f"{ends[-1]['loss']:.2f}", ", ".join(f"{end['alpha']:.3f}" for end in ends)]
        row += [cell(ends[-1].get("eval_alpha"), 3)]
        rows.append([*row, " + ".join(f"{end['minutes']:.0f}" for end in ends)])
    heads = ["drafter", "steps", "token-steps", "last loss", "held-out alpha after each"]
    heads += ["on answers", "minutes"]
    return report.markdown(heads, rows)


def written(text: str) -> str:
    """A README with its tables made anew."""
    makers = {"table": table, "curves": curves, "claims": claims.table}

    def make(match) -> str:
        return match[1] + makers[match[2]](match[3]) + "\n\n"

    return TABLE.sub(make, text)


def main() -> None:
    for name in FILES:
        path = ROOT / name
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
