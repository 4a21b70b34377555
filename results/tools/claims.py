"""What the papers claim, compared with what was seen here: tables of results/claims.md.

`tables.py` writes the tables, and a test holds the page to them. The comment above a
table has a line for each claim:

    CLAIM | PAPER | SEEN = LABEL; SEEN = LABEL; ... | open

PAPER is what `printed` reads. SEEN is one of the comparisons below, such as
"run.json: OURS / THEIRS" for the ratio of two arms' taus; LABEL, which can be left out,
is shown after it. The first one decides the verdict, unless a last word gives it.
Figures and verdicts are computed, by the rules that the page gives. Only the last cell
of a row is written by hand, on the page itself.
"""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import stop_rules
import torch
from torch import Tensor

import cape
from support.measuring import report

RESULTS = Path(__file__).resolve().parent.parent
DRAWS = 2000  # of the bootstrap, as in report.paired
MAIN, VARIANTS, GPU = "cpu_main.json", "cpu_variants.json", "gpu_tau.json"
BEAM, RANKING = "beam_tau.json", "ranking_tau.json"
USES = {"cape": "glide", "beam": "glide"}  # methods that draft with another's drafter


@functools.cache
def read(file: str):
    return json.loads((RESULTS / file).read_text())


# --------------------------------------------------------------------------- counts


class Arm(NamedTuple):
    """What an arm did, by prompt, and what it was trained with."""

    sums: Tensor  # (prompts, 3): tokens, forwards, seconds (nan: not timed)
    nodes: float | None  # draft tokens a round; None: nothing is drafted
    draft_ms: float | None  # of a round; None: not recorded
    plain_ms: float | None  # of a forward of plain decoding in the same run
    steps: float | None  # token-steps of its drafter; None: it has none


TOKENS, FORWARDS, SECONDS = range(3)


def arm_of(file: str, names: str) -> Arm:
    """An arm of a run, or the sum of some that differ in a seed: NAME&NAME."""
    arms = [one_arm(file, name) for name in names.split("&")]

    def mean(field):
        values = [getattr(arm, field) for arm in arms]
        return None if None in values else sum(values) / len(values)

    sums = sum(arm.sums for arm in arms)
    return Arm(sums, *map(mean, Arm._fields[1:]))


def one_arm(file: str, name: str) -> Arm:
    result = read(file)
    if "runs" in result:  # counts of an untimed run
        run = result["runs"][name]
        counts = torch.tensor(list(run["prompts"].values()), dtype=torch.float64)
        tokens, forwards, drafted, _ = counts.unbind(1)
        sums = torch.stack([tokens, forwards, tokens * torch.nan], dim=1)
        nodes = float(drafted.sum() / forwards.sum())
        if "draft_time" not in run:
            return Arm(sums, nodes, None, None, run["tokens"])
        main = read(MAIN)  # where CAPE's time is in milliseconds
        draft_ms = run["draft_time"] * report.arms_of(main)["cape"]["draft_ms"]
        return Arm(sums, nodes, draft_ms, plain_ms(main), run["tokens"])
    arm = report.arms_of(result)[name]
    columns = [arm["by_prompt"][part] for part in ("tokens", "forwards", "seconds")]
    nodes = None
    if arm["accepted_per_round"] is not None:
        nodes = arm["accepted_per_round"] + arm["n_discarded_per_token"] * arm["tau"]
    sums = torch.tensor(columns, dtype=torch.float64).T
    return Arm(sums, nodes, arm["draft_ms"], plain_ms(result), token_steps(name))


def plain_ms(result: dict) -> float | None:
    """Milliseconds of a forward of our plain loop on the packed target, if known."""
    plain = report.arms_of(result)["baseline"].get("loops", {}).get("plain")
    return plain.get("verify_ms") if isinstance(plain, dict) else None


def token_steps(name: str) -> float | None:
    """The token-steps of the drafter of an arm, by its training curves."""
    method, _, folder = name.partition("@")
    if folder:  # one of those that were trained alike
        curve = read("curves/falcon_alike.json")[folder.removesuffix("-tall")]
        return curve[-1]["tokens"]
    method = method.partition(":")[0].partition("+")[0]
    file = f"curves/{USES.get(method, method)}.json"
    if not (RESULTS / file).exists():
        return None
    return sum(stage[-1]["tokens"] for stage in read(file))


def bootstrap(figure, *sums: Tensor) -> tuple[float, float, float]:
    """A figure of the sums over prompts, and its 95% interval.

    figure: a function of (..., n) sums of each arm. sums: (prompts, n) of each arm; the
        same prompts are taken for all, because some prompts are easier than others.
    """
    generator = torch.Generator().manual_seed(0)
    count = len(sums[0])
    assert all(len(each) == count for each in sums), "not the same prompts"
    picks = torch.randint(count, (DRAWS, count), generator=generator)
    resampled = figure(*(each[picks].sum(1) for each in sums))
    ends = torch.tensor([0.025, 0.975], dtype=resampled.dtype)
    low, high = resampled.quantile(ends).tolist()
    return float(figure(*(each.sum(0) for each in sums))), low, high


def tau(sums: Tensor) -> Tensor:
    return sums[..., TOKENS] / sums[..., FORWARDS]


def speed(sums: Tensor) -> Tensor:
    return sums[..., TOKENS] / sums[..., SECONDS]


def ratio_of_taus(ours: Tensor, theirs: Tensor) -> Tensor:
    return tau(ours) / tau(theirs)


def flat(arm: Arm) -> float:
    """Tokens per plain forward, if verifying any draft cost as much as one token."""
    draft_ms = arm.draft_ms or 0.0
    return float(tau(arm.sums.sum(0))) * arm.plain_ms / (arm.plain_ms + draft_ms)


# ------------------------------------------------------------------------- verdicts


class Seen(NamedTuple):
    """What was seen here."""

    figure: str  # as the page shows it
    low: float | None = None  # of the interval that is judged, as printed
    high: float | None = None
    neutral: float = 1.0  # no difference
    flat: str | None = None  # the ratio at flat cost
    cpu: str | None = None  # and of measured speeds
    alike: bool = True  # both sides were trained alike


class Paper(NamedTuple):
    """The paper's figure in our unit; the smallest and largest if it has several."""

    low: float
    high: float
    form: str = ".2f"
    unit: str = ""  # "points", or "in time", whose size is not compared with tau's

    def __str__(self):
        ends = dict.fromkeys(format(end, self.form) for end in (self.low, self.high))
        return f"{' to '.join(ends)} {self.unit}".strip()


def printed(words: str) -> Paper | None:
    """The paper's figures: 3.34/2.78 +1, or 1.96 2.18 in time, or -.

    A pair is ours and its rival's, and +1 adds the bonus token that the paper's taus
    leave out. The smallest ratio comes first.
    """
    figures, *more = re.split(r" (?=\+1|in time|points)", words)
    bonus = "+1" in more
    ends = []
    for figure in figures.split() if words != "-" else []:
        ours, *theirs = (float(part) + bonus for part in figure.split("/"))
        ends.append(ours / theirs[0] if theirs else ours)
    form = {"points": "+.1f"}.get(more[-1] if more else "", ".2f")
    unit = "".join(part for part in more if part != "+1")
    return Paper(ends[0], ends[-1], form, unit) if ends else None


LEAST, LONGER = 4e6, 1.1  # token-steps, and how unequal they may be: see the page


def alike(*arms: Arm) -> bool:
    """Whether the training of both sides is long and equal enough for a verdict."""
    least, most = sorted(arm.steps for arm in arms)
    return least >= LEAST and most < LONGER * least


def verdict(seen: Seen, paper: Paper | None) -> str:
    """By the interval in tokens, and in this order."""
    if not seen.alike:
        return "open"
    if seen.high < seen.neutral:
        return "the opposite"
    if seen.low <= seen.neutral:
        return "not shown"
    above = paper and paper.unit != "in time" and round(paper.low, 3) > seen.high
    return "smaller" if above else "confirmed"


def interval(value: float, low: float, high: float, form: str = ".2f") -> str:
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def points(value: float, low: float, high: float) -> Seen:
    """A difference, which is none at 0."""
    figure = f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"
    return Seen(figure, round(low, 1), round(high, 1), neutral=0.0)


# ------------------------------------------------------------------- what is compared


def ratio(file: str, ours: str, theirs: str, other: str | None = None) -> Seen:
    """How many times one arm's tau is another's, on the same prompts.

    other: the file of `theirs`, if it is not of the same run.
    """
    pair = arm_of(file, ours), arm_of(other or file, theirs)
    if other:
        runs = [next(iter(read(each)["runs"].values())) for each in (file, other)]
        same = len({tuple(run["prompts"]) for run in runs}) == 1
        assert same, "not the same prompts, in the same order"
    sums = [arm.sums for arm in pair]
    value, low, high = bootstrap(ratio_of_taus, *sums)
    seen = Seen(interval(value, low, high), round(low, 2), round(high, 2))
    costs = cpu = None
    if all(arm.plain_ms for arm in pair):
        costs = f"{flat(pair[0]) / flat(pair[1]):.2f}"
    if not sums[0].isnan().any():
        cpu = interval(*bootstrap(lambda a, b: speed(a) / speed(b), *sums))
    return seen._replace(flat=costs, cpu=cpu, alike=alike(*pair))


def plain(name: str) -> Seen:
    """An arm of the main run compared with plain decoding, whose tau is 1."""
    arm, base = arm_of(MAIN, name), arm_of(MAIN, "baseline")
    cpu = bootstrap(lambda a, b: speed(a) / speed(b), arm.sums, base.sums)
    taus = interval(*bootstrap(tau, arm.sums))
    return Seen(f"tau {taus}", flat=f"{flat(arm):.2f}", cpu=interval(*cpu))


def drafting(file: str, ours: str, theirs: str) -> Seen:
    """The time of drafting a round over that of another arm."""
    times = [arm_of(file, name).draft_ms for name in (ours, theirs)]
    return Seen(f"{times[0] / times[1]:.2f} in time")


def layers(ours: str, theirs: str) -> Seen:
    """GLIDE's drafters by the layer that they read: points of alpha on answers.

    After 1000 steps: the mean, least and most of all pairs of seeds. They were trained
    alike if their curves do not cross in the second half of these steps.
    """
    curves = read("curves/glide_layers.json")

    def gaps(step):
        mine, others = (
            [
                100 * row["eval_alpha"]
                for row in itertools.chain(*side)
                if row["step"] == step
            ]
            for side in (curves[ours], curves[theirs])
        )
        return [a - b for a in mine for b in others]

    steps = [gaps(step) for step in range(500, 1001, 125)]
    ahead = all(min(each) > 0 for each in steps)
    behind = all(max(each) < 0 for each in steps)
    pairs = steps[-1]
    seen = points(sum(pairs) / len(pairs), min(pairs), max(pairs))
    return seen._replace(alike=ahead or behind)


def rules(file: str, *names: str) -> Seen:
    """How many times as fast a stop rule is as another, at the paper's cost of a pass.

    names: two of stop_rules.RULES, and the settings to choose from if not all.
    """
    answers = stop_rules.read(RESULTS / file)
    pair = []
    for name, *settings in map(str.split, names):
        function, known = stop_rules.RULES[name]
        chosen = (
            [each for each in known if str(each) in settings] if settings else known
        )
        pair.append((function, chosen))
    value, (low, high) = stop_rules.compare(answers, *pair, cost=0.209)
    return Seen(interval(value, low, high, ".3f"), low, high)


def by_confidence() -> Seen:
    """Whether the target accepts GLIDE's first draft token, by its confidence."""
    answers = stop_rules.read(RESULTS / "rounds_glide.json.gz")
    firsts = sorted(  # confidence, whether accepted, and answer
        (each.confidence[0], each.agreed > 0, n)
        for n, rounds in enumerate(answers)
        for each in rounds
        if each.confidence
    )
    sums = torch.zeros(len(answers), 4, dtype=torch.float64)  # two of each half
    for place, (_, accepted, n) in enumerate(firsts):
        half = 2 * (place >= len(firsts) / 2)
        sums[n, half : half + 2] += torch.tensor([accepted, 1.0])

    def gap(counts):
        lower, upper = (counts[..., n] / counts[..., n + 1] for n in (0, 2))
        return 100 * (upper - lower)

    return points(*bootstrap(gap, sums))


def by_paper(each: stop_rules.Round, gamma: int) -> list[int]:
    """CAPE's sets, S(p) of the paper."""
    return [cape.set_size(p, cape.Config()) for p in each.confidence[:gamma]]


def fixed(size: float):
    """A rule with `size` extras on average, whatever the confidence."""
    steps = 0

    def rule(each, gamma):
        nonlocal steps
        places = range(steps, steps + len(each.confidence[:gamma]))
        steps = places.stop
        return [int((n + 1) * size) - int(n * size) for n in places]

    return rule


def replayed(answers: list, rule, gamma: int) -> Tensor:
    """(answers, 3): tokens, forwards and nodes of GLIDE with a rule of sets."""
    n_target, _, nodes = stop_rules.counts(answers, (rule, (gamma,)))[0].unbind(-1)
    tokens = torch.tensor([len(rounds) for rounds in answers]).double()
    return torch.stack([tokens, n_target, nodes], -1)


def equal_nodes(answers: list, rule, gamma: int) -> float:
    """The size with which `fixed` drafts as many nodes a round as a rule."""

    def nodes_of(rule):
        _, forwards, nodes = replayed(answers, rule, gamma).sum(0)
        return float(nodes / forwards)

    wanted = nodes_of(rule)
    low, high = 0.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        if nodes_of(fixed(middle)) < wanted:
            low = middle
        else:
            high = middle
    return high


def sizes_by_confidence(gamma: int = 4) -> Seen:
    """Tau of CAPE's sets over sets of one size, replayed in the same record."""
    answers = stop_rules.read(RESULTS / "rounds_glide.json.gz")
    one_size = fixed(equal_nodes(answers, by_paper, gamma))
    sums = [replayed(answers, rule, gamma) for rule in (by_paper, one_size)]
    value, low, high = bootstrap(ratio_of_taus, *sums)
    return Seen(interval(value, low, high, ".3f"), round(low, 3), round(high, 3))


# ---------------------------------------------------------------------- the tables


def seen_of(words: str) -> Seen:
    """What a part of a row asks for, as the top of this file describes it."""
    kind, *names = re.split(": | / ", words)
    makers = {
        "plain": plain,
        "layers": layers,
        "drafting": drafting,
        "rules": rules,
        "confidence": by_confidence,
        "sizes": sizes_by_confidence,
    }
    return makers[kind](*names) if kind in makers else ratio(kind, *names)


def row_of(words: str) -> list[str]:
    """The cells of a claim, without the last one."""
    claim, paper, parts, *judged = words.split(" | ")
    parts = [part.partition(" = ") for part in parts.split("; ")]
    seen = [seen_of(part) for part, _, _ in parts]
    paper = printed(paper)
    here = [f"{each.figure} {part[2]}".strip() for each, part in zip(seen, parts)]
    known = [(each.flat, each.cpu) for each in seen if each.flat or each.cpu]
    costs = [f"{flat_cost or '-'}; {cpu or '-'}" for flat_cost, cpu in known]
    cells = [claim, str(paper or "-"), "; ".join(here)]
    word = judged[0] if judged else verdict(seen[0], paper)
    return [*cells, ", ".join(costs) or "-", word]


def table(words: str, old: str) -> str:
    """Claims and verdicts, each with the last cell that it had in `old`, or a dash."""
    cells = [line.strip("| ").split(" | ") for line in old.strip().splitlines()]
    notes = {claim: note for claim, *_, note in cells}
    heads = ["claim", "paper", "here", "flat; CPU", "verdict", "what to know"]
    lines = [heads, ["---"] * len(heads)]
    for row in map(row_of, words.strip().splitlines()):
        lines.append([*row, notes.get(row[0], "-")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
