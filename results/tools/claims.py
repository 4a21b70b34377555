"""What the papers claim, and what was seen here: the tables of results/claims.md.

`tables.py` writes the figures and verdicts of a table, and a test holds the page to
them. The first and the last cell of a row are written on the page itself. The comment
above a table has a line for each row:

    PAPER | SEEN = LABEL; SEEN = LABEL; ... | no test

PAPER is what `printed` reads. SEEN is one of the comparisons below, such as
"run.json: OURS / THEIRS" for the ratio of two arms' taus; LABEL, which can be left out,
is shown after it. The first SEEN decides the verdict, unless the line ends in
"no test".
"""

import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import stop_rules
import torch
from torch import Tensor

import cape
from support.measuring import report

RESULTS = Path(__file__).resolve().parent.parent
TOKENS, FORWARDS, SECONDS = range(3)
USES = {"cape": "glide", "beam": "glide"}  # methods that draft with another's drafter


@functools.cache
def read(file: str):
    return json.loads((RESULTS / file).read_text())


# --------------------------------------------------------------------------- counts


def sums_of(file: str, names: str) -> Tensor:
    """An arm's tokens, forwards and seconds (nan: not timed) by prompt, (prompts, 3).

    names: NAME, or NAME&NAME for the sum of arms that differ in a seed.
    """
    result = read(file)
    total = 0
    for name in names.split("&"):
        if "runs" in result:  # counts of an untimed run
            rows = result["runs"][name]["prompts"].values()
            rows = [[tokens, forwards, torch.nan] for tokens, forwards, *_ in rows]
        else:
            counted = result["arms"][name]["by_prompt"]
            columns = [counted[part] for part in ("tokens", "forwards", "seconds")]
            rows = list(zip(*columns, strict=True))
        total = total + torch.tensor(rows, dtype=torch.float64)
    return total


def tau(sums: Tensor) -> Tensor:
    return sums[..., TOKENS] / sums[..., FORWARDS]


def ratio_of_taus(ours: Tensor, theirs: Tensor) -> Tensor:
    return tau(ours) / tau(theirs)


def ratio_of_speeds(ours: Tensor, theirs: Tensor) -> Tensor:
    return ratio_of_taus(ours[..., [TOKENS, SECONDS]], theirs[..., [TOKENS, SECONDS]])


# ------------------------------------------------------------------------- verdicts


class Seen(NamedTuple):
    """What was seen here."""

    figure: str  # as the page shows it
    side: int = 0  # on which side of "no difference" its interval lies; 0: see the page


VERDICTS = {1: "confirmed", 0: "open", -1: "the opposite"}


def side(low: float, high: float, neutral: float, digits: int) -> int:
    """1 if an interval, as it is printed, lies above a number, -1 if below, else 0."""
    return (round(low, digits) > neutral) - (round(high, digits) < neutral)


def interval(value: float, low: float, high: float, form: str = ".2f") -> str:
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def factor(value: float, low: float, high: float, digits: int = 2) -> Seen:
    figure = interval(value, low, high, f".{digits}f")
    return Seen(figure, side(low, high, 1, digits))


def points(value: float, low: float, high: float) -> Seen:
    figure = f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"
    return Seen(figure, side(low, high, 0, 1))


def printed(words: str) -> str:
    """The paper's figures in our unit, from words such as "3.34/2.78 +1", or "-".

    A pair is ours and its rival's, and +1 adds the bonus token that the paper's taus
    leave out. The smallest ratio comes first.
    """
    figures, *more = re.split(r" (?=\+1|in time|points)", words)
    ends = []
    for figure in figures.split() if words != "-" else []:
        ours, *theirs = (float(part) + ("+1" in more) for part in figure.split("/"))
        ends.append(ours / theirs[0] if theirs else ours)
    form = "+.1f" if "points" in more else ".2f"
    shown = " to ".join(dict.fromkeys(format(end, form) for end in ends)) or "-"
    return " ".join([shown, *(part for part in more if part != "+1")])


# ------------------------------------------------------------------- what is compared


def ratio(words: str, figure=ratio_of_taus) -> Seen:
    """How many times one arm's tau is another's: "run.json: OURS / THEIRS".

    THEIRS may begin with a file of its own. Sides with different drafters differ in
    more than any claim.
    """
    ours, theirs = words.split(" / ")
    file, ours = ours.split(": ")
    other, _, theirs = theirs.rpartition(": ")
    other = other or file
    if file != other:
        runs = [next(iter(read(each)["runs"].values())) for each in (file, other)]
        prompts = {tuple(run["prompts"]) for run in runs}
        assert len(prompts) == 1, "not the same prompts, in the same order"
    seen = factor(
        *report.bootstrap(figure, sums_of(file, ours), sums_of(other, theirs))
    )
    alike = drafter_of(file, ours) == drafter_of(other, theirs)
    return seen if alike else Seen(seen.figure)


def drafter_of(file: str, name: str) -> tuple[str, str, str]:
    """The drafter of an arm such as cape:cpu or falcon:chain@k2."""
    variant, _, folder = name.partition("@")
    method = re.split("[:+]", variant)[0]
    return file, USES.get(method, method), folder


def timed(words: str) -> Seen:
    """The ratio of two arms' taus, and after it that of their speeds."""
    seen, in_time = ratio(words), ratio(words, ratio_of_speeds)
    return seen._replace(figure=f"{seen.figure}; {in_time.figure} in time")


def drafting(words: str) -> Seen:
    """The time of drafting a round over that of another arm."""
    times = [read("beam_tau.json")["runs"][n]["draft_time"] for n in words.split(" / ")]
    return Seen(f"{times[0] / times[1]:.2f} in time")


def layers(words: str) -> Seen:
    """GLIDE's drafters by the layer that they read: points of alpha on answers.

    After 1000 steps: the mean, least and most of all pairs of seeds. They were trained
    alike if their curves do not cross in the second half of these steps.
    """
    curves = [read("curves/glide_layers.json")[layer] for layer in words.split(" / ")]

    def gaps(step):
        ours, theirs = (
            [row["eval_alpha"] for seed in curve for row in seed if row["step"] == step]
            for curve in curves
        )
        return [100 * (mine - other) for mine in ours for other in theirs]

    steps = [gaps(step) for step in range(500, 1001, 125)]
    pairs = steps[-1]
    seen = points(sum(pairs) / len(pairs), min(pairs), max(pairs))
    cross = len({gap > 0 for step in steps for gap in step}) > 1
    return Seen(seen.figure) if cross else seen


def rules(words: str) -> Seen:
    """How many times as fast a stop rule is as another: "rounds.json.gz: head / K 2 4".

    At the paper's cost of a pass, with two of stop_rules.RULES, and after a name the
    settings to choose from if not all.
    """
    file, _, pair = words.partition(": ")
    chosen = []
    for name, *settings in map(str.split, pair.split(" / ")):
        function, known = stop_rules.RULES[name]
        some = [each for each in known if str(each) in settings]
        chosen.append((function, some or known))
    answers = stop_rules.read(RESULTS / file)
    value, ends = stop_rules.compare(answers, *chosen, cost=0.209)
    seen = factor(value, *ends, digits=3)
    return seen._replace(figure=f"{seen.figure} in time")


def by_confidence() -> Seen:
    """Acceptance of GLIDE's first draft tokens, the surer half minus the other."""
    answers = stop_rules.read(RESULTS / "rounds_glide.json.gz")
    firsts = sorted(
        (each.confidence[0], each.agreed > 0, n)
        for n, rounds in enumerate(answers)
        for each in rounds
        if each.confidence
    )
    # (answers, 2, 2): of the less sure and of the surer half, tokens accepted and all
    sums = torch.zeros(len(answers), 2, 2, dtype=torch.float64)
    for place, (_, accepted, n) in enumerate(firsts):
        sums[n, int(place >= len(firsts) / 2)] += torch.tensor([accepted, 1.0])

    def gap(counts):
        shares = counts[..., 0] / counts[..., 1]
        return 100 * shares.diff()[..., 0]

    return points(*report.bootstrap(gap, sums))


def fixed(size: float):
    """A rule of sets with `size` extras on average, whatever the confidence."""
    steps = itertools.count()

    def rule(each, gamma):
        places = [next(steps) for _ in each.confidence[:gamma]]
        return [int((n + 1) * size) - int(n * size) for n in places]

    return rule


def sizes(words: str, gamma: int = 4) -> Seen:
    """Tau of CAPE's sets over sets of one size, which is given, with as many nodes.

    Both are replayed on what GLIDE drafted at every place of its answers.
    """
    answers = stop_rules.read(RESULTS / "rounds_glide.json.gz")
    tokens = torch.tensor([len(rounds) for rounds in answers]).double()

    def by_paper(each, gamma):
        return [cape.set_size(p, cape.Config()) for p in each.confidence[:gamma]]

    sums, nodes = [], []
    for rule in (by_paper, fixed(float(words))):
        counted = stop_rules.counts(answers, (rule, (gamma,)))[0]
        sums.append(torch.stack([tokens, counted[:, 0]], dim=-1))
        nodes.append(float(counted[:, 2].sum() / counted[:, 0].sum()))
    assert math.isclose(*nodes, rel_tol=1e-3), f"{nodes} nodes a round"
    return factor(*report.bootstrap(ratio_of_taus, *sums), digits=3)


# ---------------------------------------------------------------------- the tables


KINDS = {
    "timed": timed,
    "drafting": drafting,
    "layers": layers,
    "rules": rules,
    "confidence": by_confidence,
    "sizes": sizes,
}


def seen_of(words: str) -> Seen:
    """What a part of a line asks for: "KIND ..." or a ratio of taus."""
    kind, *rest = words.split(" ", 1)
    return KINDS[kind](*rest) if kind in KINDS else ratio(words)


def row_of(words: str) -> list[str]:
    """The cells of a row without the first and the last one."""
    paper, parts, *no_test = words.split(" | ")
    parts = [part.partition(" = ") for part in parts.split("; ")]
    seen = [seen_of(part) for part, _, _ in parts]
    here = [f"{each.figure} {part[2]}".strip() for each, part in zip(seen, parts)]
    return [printed(paper), "; ".join(here), *(no_test or [VERDICTS[seen[0].side]])]


def table(words: str, old: str) -> str:
    """The table `old` of the page with its figures and verdicts computed anew."""
    head, line, *rows = old.strip().splitlines()
    new = []
    for row, asked in zip(rows, words.strip().splitlines(), strict=True):
        claim, *_, note = row.strip("| ").split(" | ")
        new.append(f"| {' | '.join([claim, *row_of(asked), note])} |")
    return "\n".join([head, line, *new])
