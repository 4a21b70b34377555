"""Write the tables of the README files anew from results/.

    python tests/tools/tables.py

A test fails where a table is not what this would write. A comment above a table says what is in it:

    <!-- table: run.json -->                     the first one that bench.py --table prints
    <!-- table: run.json; after: Acceptance -->  the one after the paragraph that begins so
    <!-- table: run.json; glide cape; speedup tau; paper's: 1.96 2.5 -->
                                                 some arms and figures, and figures to compare
    <!-- curves: GLIDE: glide more; CAPE: cape -->
                                                 training runs, stage after stage
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

from support import report  # noqa: E402

RESULTS = ROOT / "results"
FILES = (
    "README.md",
    "results/README.md",
    "checkpoints/README.md",
    "tests/README.md",
)
TABLE = re.compile(r"(<!-- (table|curves): ((?:(?!-->).)*) -->\n\n)((?:\|[^\n]*\n)*\n?)", re.DOTALL)


def table(words: str) -> str:
    """The table that a comment asks for."""
    file, *parts = [part.strip() for part in words.split(";")]
    result = json.loads((RESULTS / file).read_text())
    if not parts or parts[0].startswith("after: "):
        printed = report.tables(result).split("\n\n")
        begin = parts[0].removeprefix("after: ") if parts else "**"
        places = [i for i, part in enumerate(printed) if part.startswith(begin)]
        if len(places) != 1:
            raise ValueError(f"{file}: {len(places)} paragraphs begin with {begin!r}")
        [place] = places
        return next(part for part in printed[place + 1 :] if part.startswith("|"))

    heads, rows = report.arm_table(report.arms_of(result), parts[0].split(), parts[1].split())
    for part in parts[2:]:
        head, _, values = part.partition(": ")
        heads.append(head)
        for row, value in zip(rows, values.split(), strict=True):
            row.append(None if value == "-" else value)
    return report.markdown(heads, rows)


def curves(words: str) -> str:
    """Training runs that went on from one another: what they came to, and how long they took."""
    heads = ["drafter", "steps", "token-steps", "last loss", "held-out alpha after each"]
    heads += ["on answers", "minutes"]
    rows = []
    for part in words.split(";"):
        label, _, names = part.strip().partition(": ")
        files = [RESULTS / "curves" / f"{name}.json" for name in names.split()]
        ends = [json.loads(file.read_text())[-1] for file in files]
        tokens = sum(end["tokens"] for end in ends) / 1e6
        rows.append(
            [
                label,
                ", ".join(str(end["step"]) for end in ends),
                f"{tokens:.2f}M",
                report.cell(ends[-1]["loss"]),
                ", ".join(f"{end['alpha']:.3f}" for end in ends),
                report.cell(ends[-1].get("eval_alpha"), ".3f"),
                " + ".join(f"{end['minutes']:.0f}" for end in ends),
            ]
        )
    return report.markdown(heads, rows)


def written(text: str) -> str:
    """A README with its tables made anew."""
    makers = {"table": table, "curves": curves}
    return TABLE.sub(lambda match: match[1] + makers[match[2]](match[3]) + "\n\n", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    for name in FILES:
        path = ROOT / name
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
