"""SVG pictures of results, which tables.py draws.

A title says what the picture shows, in words that are computed from the numbers. The
background is transparent, text and axes are grey.
"""

import contextlib
import re
import sys
from pathlib import Path

from support import cli

GREY = "#808080"  # 3.9 : 1 on white, 5.3 : 1 on black
STYLE = {
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "the same file from the same numbers",
    "savefig.transparent": True,
    "font.size": 13,  # legible on a projector
    "axes.titlesize": 15,
    "figure.titlesize": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.framealpha": 0,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def colour(name: str) -> str:
    """The colour of a method in all pictures, and another one for all rivals."""
    method = re.split("[:@+]", name)[0]  # of an arm such as cape:cpu@DIR
    return f"C{cli.METHODS.index(method)}" if method in cli.METHODS else "C8"


@contextlib.contextmanager
def picture(path: Path, title: str, size=(8, 4.5)):
    """Axes to draw on, saved to `path`, which is printed.

    size: width and height in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots()
        figure.suptitle(title, wrap=True)
        figure.savefig(path, metadata={"Date": None})
    print(path, file=sys.stderr)


def costs(curve: dict, folder: Path) -> None:
    """Draw milliseconds of a target forward, by number of tokens."""
    times = {int(count): ms for count, ms in curve["by_tokens"].items()}
    one = times[min(times)]
    cheap = max(count for count, ms in times.items() if ms <= 1.1 * one)
    most = max(times)
    title = f"{cheap} tokens for little more than the price of one"
    title += f"; {most} for {times[most] / one:.1f} times that"
    with picture(folder / "cost.svg", title) as axes:
        axes.plot(list(times), list(times.values()), "o-", linewidth=2, markersize=7)
        axes.axhline(one, color=GREY, linestyle=":", zorder=0)
        axes.set(
            xlabel=f"tokens fed at once, after {curve['context']} cached ones",
            ylabel="milliseconds",
        )
        axes.set_ylim(bottom=0)


def lengths(by_length: dict, names: list[str], folder: Path) -> None:
    """Draw speedups of some arms by the length of the prompt (lengths.py)."""
    longest = list(by_length)[-1]
    best = max(names, key=lambda name: by_length[longest][name]["speedup"])
    title = f"{best} is the fastest after {longest} tokens"
    with picture(folder / "lengths.svg", title) as axes:
        for name in names:
            speeds = [arms[name]["speedup"] for arms in by_length.values()]
            line = {"color": colour(name), "linewidth": 2, "label": name}
            axes.plot(list(by_length), speeds, "o-", **line)
        axes.axhline(1, color=GREY, linestyle=":", zorder=0)
        axes.set(xlabel="tokens of the prompt", ylabel="speed over plain decoding (1)")
        axes.legend()


def stop_rules(points: dict, folder: Path) -> None:
    """Draw stop rules by what they cost (SpecDec++, Figure 4)."""
    fastest = {rule: max(p[2] for p in each.values()) for rule, each in points.items()}
    oracle = fastest.pop("oracle")
    best = max(fastest, key=fastest.get)
    reached = 100 * fastest[best] / oracle
    title = f"The best stop rule ({best}) reaches {reached:.0f}% of the oracle's speed"
    with picture(folder / "stopping.svg", title, size=(8, 5)) as axes:
        for rule, each in points.items():
            line = sorted((wasted, forwards) for forwards, wasted, _ in each.values())
            mark, size = ("*", 14) if rule == "oracle" else ("o", 8)
            axes.plot(*zip(*line), f"{mark}-", label=rule, linewidth=2, markersize=size)
        axes.set_xlabel("draft tokens discarded per token")
        axes.set_ylabel("target forwards per token")
        axes.legend()
