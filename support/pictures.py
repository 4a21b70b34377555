"""SVG pictures of results and training curves, for white or black pages.

    python bench.py --table results/run.json --plot pictures/
    python train.py --plot pictures/ results/curves/glide.json results/curves/falcon.json

The background is transparent, text and axes are grey.
"""

import contextlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import common
from support import cli, report

GREY = "#808080"  # 3.9 : 1 on white, 5.3 : 1 on black
STYLE = {
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "the same file from the same numbers",
    "savefig.transparent": True,
    "legend.framealpha": 0,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def check(folder: str) -> None:
    """Raise a UserError if no pictures can be drawn into `folder`."""
    if Path(folder).is_file():
        raise common.UserError(f"--plot {folder} is a file; name a folder to draw in")
    if importlib.util.find_spec("matplotlib") is None:
        raise common.UserError("--plot needs matplotlib: pip install matplotlib")


def colour(name: str) -> str | None:
    """The colour of a method in all pictures; None for other names."""
    words = re.split(r"[:@ ]", name)[0].split("+")  # perhaps with a base, or copies
    method = [word for word in words if word in cli.METHODS][-1:]
    return f"C{cli.METHODS.index(*method)}" if method else None


@contextlib.contextmanager
def picture(path: Path, title: str, x: str, y: str, height: float = 4):
    """Axes to draw on, saved to `path`, which is printed; height in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.set(title=title, xlabel=x, ylabel=y)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        figure.savefig(path, metadata={"Date": None})
    print(path, file=sys.stderr)


def curves(paths: list[str], folder: Path) -> None:
    """Draw alpha by trained tokens (curve.json files, results/curves/).

    The solid line is held-out alpha, the dashed one `eval_alpha`, if any.

    Raises: UserError: a file that is no curve.
    """
    title, x = "Acceptance rate while training", "million token-steps"
    with picture(folder / "curves.svg", title, x, "alpha") as axes:
        for path in map(Path, paths):
            name = path.parent.name if path.stem == "curve" else path.stem
            try:
                rows = json.loads(path.read_text())
                tokens = [row["tokens"] / 1e6 for row in rows]
                alphas = [row["alpha"] for row in rows]
                [line] = axes.plot(tokens, alphas, ".-", label=name, color=colour(name))
            except (ValueError, TypeError, KeyError):
                raise common.UserError(f"{path} is not a training curve of train.py") from None
            prompts = [row.get("eval_alpha") for row in rows]
            if any(prompts):
                label = f"{name}, prompts"
                axes.plot(tokens, prompts, ".--", label=label, color=line.get_color())
        axes.set_ylim(bottom=0)


def speedups(arms: dict[str, dict], folder: Path) -> None:
    """Draw speedups with their intervals."""
    title, x = "Speedup over plain decoding", "ratio of tokens/s, 95% interval"
    height = 1.6 + 0.35 * len(arms)
    with picture(folder / "speedup.svg", title, x, "", height) as axes:
        for name, arm in reversed(arms.items()):  # bars are stacked from below
            value = arm["speedup"]
            low, high = arm["speedup_ci"] or (value, value)
            interval = [[max(0, value - low)], [max(0, high - value)]]
            fill = colour(name) or "C8"  # of all rivals
            bar = axes.barh(name, value, xerr=interval, ecolor=GREY, capsize=3, color=fill)
            axes.bar_label(bar, fmt="%.2f", label_type="center", color="black")
        axes.axvline(1, color=GREY, zorder=0)


def costs(curve: dict, folder: Path) -> None:
    """Draw milliseconds of a target forward, by number of tokens."""
    title = f"Target forward at {curve['context']} tokens of context"
    with picture(folder / "cost.svg", title, "tokens fed", "milliseconds") as axes:
        counts = [int(count) for count in curve["by_tokens"]]
        axes.plot(counts, list(curve["by_tokens"].values()), "o-")
        axes.set_ylim(bottom=0)


def stop_rules(sweep: dict, folder: Path) -> None:
    """Draw stop rules by what they cost (SpecDec++, Figure 4)."""
    x, y = "draft tokens discarded per token", "target forwards per token"
    with picture(folder / "stopping.svg", "Stop rules", x, y) as axes:
        for rule, points in sweep["points"].items():
            line = sorted((discarded, forwards) for forwards, discarded, _ in points.values())
            axes.plot(*zip(*line), "*-" if rule == "oracle" else "o-", label=rule)


def plot(results: list[dict], folder: Path) -> None:
    """Draw what the results of bench.py hold into `folder`.

    Speedups of all arms; the first cost curve and the first sweep.
    """
    arms: dict[str, dict] = {}
    for number, result in enumerate(results, 1):
        for name, arm in report.arms_of(result).items():
            if name != "baseline":
                arms[f"{name} [{number}]" if len(results) > 1 else name] = arm
    if arms:
        speedups(arms, folder)
    for key, draw in (("cost_curve", costs), ("sweep", stop_rules)):
        found = [result[key] for result in results if result.get(key)]
        if found:
            draw(found[0], folder)
