"""SVG pictures of results and training curves, for white or black pages.

    python bench.py --table results/run.json --plot pictures/
    python train.py --plot pictures/ results/curves/*.json

The background is transparent, text and axes are grey, colours of medium tone.
"""

import contextlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import common
from support import cli, report

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


def check(folder: str) -> None:
    """Raise a Mistake if no pictures can be drawn into `folder`."""
    if Path(folder).is_file():
        raise common.Mistake(f"--plot {folder} is a file; name a folder to draw in")
    if importlib.util.find_spec("matplotlib") is None:
        raise common.Mistake("--plot needs matplotlib: pip install matplotlib")


@contextlib.contextmanager
def picture(path: Path, rows: int, title: str, x: str, y: str):
    """Axes, tall enough for `rows` lines of text; saved to `path`."""
    import matplotlib
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
    """Draw alpha by trained tokens (curve.json files, results/curves/).

    The solid line is held-out alpha, the dashed one `eval_alpha`, if any.

    Raises: Mistake: a file that is no curve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, x, y = folder / "curves.svg", "million token-steps", "alpha"
    with picture(file, 8, "Acceptance rate while training", x, y) as axes:
        for path, colour in zip(map(Path, paths), itertools.cycle(COLOURS)):
            name = path.parent.name if path.stem == "curve" else path.stem
            style = {"color": colour, "marker": ".", "markersize": 5}
            try:
                rows = json.loads(path.read_text())
                tokens = [row["tokens"] / 1e6 for row in rows]
                axes.plot(tokens, [row["alpha"] for row in rows], "-", label=name, **style)
                if rows[-1].get("eval_alpha") is not None:
                    prompts = [row["eval_alpha"] for row in rows]
                    axes.plot(tokens, prompts, "--", label=f"{name}, prompts", **style)
            except (ValueError, TypeError, KeyError, IndexError):
                raise common.Mistake(f"{path} is not a training curve of train.py") from None
        axes.set_ylim(bottom=0)
    return [file]


def speedup_picture(arms: dict[str, dict], folder: Path) -> list[Path]:
    """Speedups with their intervals; a method has one colour in all its arms."""
    arms = {name: arm for name, arm in arms.items() if not name.startswith("baseline")}
    title, x = "Speedup over plain decoding", "ratio of tokens/s, 95% interval"
    with picture(folder / "speedup.svg", len(arms), title, x, "") as axes:
        for name, arm in reversed(arms.items()):  # bars are stacked from below
            value = arm["speedup"]
            low, high = arm["speedup_ci"] or (value, value)
            error = {"ecolor": GREY, "capsize": 3}
            interval = [[max(0, value - low)], [max(0, high - value)]]
            method = re.split(r"[:+@ ]", name)[0]
            place = cli.METHODS.index(method) if method in cli.METHODS else -1  # a rival's: last
            bar = axes.barh(
                name, value, xerr=interval, error_kw=error, height=0.7, color=COLOURS[place]
            )
            axes.bar_label(bar, fmt="%.2f", label_type="center", color="white")
        axes.axvline(1, color=GREY, linewidth=1)
    return [folder / "speedup.svg"]


def cost_picture(curve: dict, folder: Path) -> list[Path]:
    """Milliseconds of a target forward, by number of tokens."""
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
            dashes = "--" if number >= len(COLOURS) else "-"  # colour repeats
            marker, size = ("*", 12) if rule == "oracle" else ("o", 4)
            drawn = axes.plot(*zip(*line), dashes, marker=marker, markersize=size)
            axes.annotate(
                f" {rule}", line[-1], va="center", color=drawn[0].get_color(), annotation_clip=False
            )
    return [folder / "stopping.svg"]


def plot(results: list[dict], folder: Path) -> list[Path]:
    """Draw what the results of bench.py hold into `folder`; returns the files.

    Speedups of all arms; the first cost curve and the first sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arms: dict[str, dict] = {}
    for number, result in enumerate(results, 1):
        for name, arm in report.arms_of(result).items():
            arms[f"{name} [{number}]" if len(results) > 1 else name] = arm
    drawn = speedup_picture(arms, folder) if arms else []
    for key, draw in (("cost_curve", cost_picture), ("sweep", sweep_picture)):
        found = [result[key] for result in results if result.get(key)]
        if found:
            drawn += draw(found[0], folder)
    return drawn
