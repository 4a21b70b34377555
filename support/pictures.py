"""Pictures of results and training curves, as SVG that can be read on white and on black.

    python bench.py --table results/run.json --plot pictures/
    python train.py --plot pictures/ results/curves/*.json

The background is transparent, text and axes are mid-grey, colours neither pale nor dark.
"""

import contextlib
import itertools
import json
from pathlib import Path

import common

GREY = "#808080"  # 3.9 : 1 on white, 5.3 : 1 on black
COLOURS = ["#2f81d6", "#d2691e", "#2e9a5b", "#a05bc0", "#c9971c", "#d0506c", "#2a9d9d", "#8a7a5c"]
STYLE = {
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "the same file from the same numbers",
    "savefig.transparent": True,
    "font.size": 11,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextlib.contextmanager
def picture(path: Path, rows: int, title: str, x: str, y: str):
    """Axes to draw on, of a height for `rows` lines of text; written to `path` at the end."""
    try:
        import matplotlib
    except ImportError:
        raise common.Mistake("pictures need matplotlib: pip install matplotlib") from None
    from cycler import cycler

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        figure, axes = plt.subplots(figsize=(7, 1.6 + 0.35 * rows), layout="constrained")
        yield axes
        axes.set(title=title, xlabel=x, ylabel=y)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def curves(paths: list[str], folder: Path) -> list[Path]:
    """Draw alpha by loss tokens of training curves (curve.json of a checkpoint, results/curves/).

    Held-out alpha as a line; that of answers to prompts (`eval_alpha`), if any, as a dashed one.

    Raises: Mistake: a file that is no curve, or none.
    """
    if not paths:
        raise common.Mistake("name the curves to draw after the folder")
    drawn = {}
    for path in map(Path, paths):
        try:
            rows = json.loads(path.read_text())
            tokens = [row["tokens"] / 1e6 for row in rows]
            points = {"": (tokens, [row["alpha"] for row in rows])}
            if rows[-1].get("eval_alpha") is not None:
                points[", prompts"] = (tokens, [row["eval_alpha"] for row in rows])
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            raise common.Mistake(f"{path} is not a training curve of train.py") from None
        name = path.parent.name if path.stem == "curve" else path.stem
        drawn[name] = points
    folder.mkdir(parents=True, exist_ok=True)
    file, x, y = folder / "curves.svg", "million token-steps", "alpha"
    with picture(file, 8, "Acceptance rate while training", x, y) as axes:
        for (name, points), colour in zip(drawn.items(), itertools.cycle(COLOURS)):
            for kind, line in points.items():
                dashes = "--" if kind else "-"
                axes.plot(*line, dashes, label=name + kind, color=colour, marker=".", markersize=5)
        axes.set_ylim(bottom=0)
    return [file]


def arm_pictures(arms: dict[str, dict], folder: Path) -> list[Path]:
    """Speedups with their intervals, where a round's time goes, acceptance by draft position."""
    names = list(arms)[::-1]  # bars are stacked from below
    files = [folder / f"{name}.svg" for name in ("speedup", "time", "acceptance")]
    title = "Speedup over plain decoding"
    with picture(files[0], len(arms), title, "ratio of tokens/s, 95% interval", "") as axes:
        values = [arms[name]["speedup"] for name in names]
        bounds = [arms[name]["speedup_ci"] or [arms[name]["speedup"]] * 2 for name in names]
        below = [max(0, value - low) for value, (low, _) in zip(values, bounds)]
        above = [max(0, high - value) for value, (_, high) in zip(values, bounds)]
        error = {"ecolor": GREY, "capsize": 3}
        bars = axes.barh(names, values, xerr=[below, above], error_kw=error, height=0.7)
        axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
        axes.axvline(1, color=GREY, linewidth=1)
    title = "Where a round's time goes"
    with picture(files[1], len(arms) + 1, title, "milliseconds a round", "") as axes:
        left = [0.0] * len(names)
        for part in ("draft", "verify", "other"):
            widths = [arms[name][f"{part}_ms"] or 0.0 for name in names]
            axes.barh(names, widths, left=left, label=part, height=0.7)
            left = [a + b for a, b in zip(left, widths)]
    title = "Acceptance by draft position"
    with picture(files[2], 8, title, "draft position", "share of rounds") as axes:
        for name, a in arms.items():
            if rates := a["acceptance_by_position"]:
                axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=name)
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return files


def cost_picture(curve: dict, folder: Path) -> list[Path]:
    """Milliseconds of a target forward by the tokens it is fed."""
    title = f"Target forward at {curve['context']} tokens of context"
    with picture(folder / "cost.svg", 8, title, "tokens fed", "milliseconds") as axes:
        counts = [int(count) for count in curve["by_tokens"]]
        axes.plot(counts, list(curve["by_tokens"].values()), marker="o")
        axes.set_ylim(bottom=0)
    return [folder / "cost.svg"]


def sweep_picture(sweep: dict, folder: Path) -> list[Path]:
    """Stop rules by what they cost."""
    x, y = "draft tokens discarded per token", "target forwards per token"
    with picture(folder / "stopping.svg", 10, "Stop rules", x, y) as axes:
        for number, (rule, points) in enumerate(sweep["points"].items()):
            line = sorted((point[1], point[0]) for point in points.values())
            dashes = "--" if number >= len(COLOURS) else "-"  # the colours begin again
            marker, size = ("*", 12) if rule == "oracle" else ("o", 4)
            axes.plot(*zip(*line), dashes, label=rule, marker=marker, markersize=size)
    return [folder / "stopping.svg"]


def plot(results: list[dict], folder: Path) -> list[Path]:
    """Draw what the results of bench.py hold into `folder`; returns the files.

    Speedups, acceptance and a round's time of all arms; the first cost curve and sweep there is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arms: dict[str, dict] = {}
    for number, result in enumerate(results, 1):
        for name, a in (result.get("arms") or {}).items():
            arms[f"{name} [{number}]" if len(results) > 1 else name] = a
    drawn = arm_pictures(arms, folder) if arms else []
    for key, draw in (("cost_curve", cost_picture), ("sweep", sweep_picture)):
        found = [result[key] for result in results if result.get(key)]
        if found:
            drawn += draw(found[0], folder)
    return drawn
