"""What the papers claim beside what was seen here: the tables of results/claims.md.

`tables.py` writes them, and a test holds the page to them. No figure and no verdict is
written by hand: each row below names the paper's figures and the arms or runs whose
counts are compared. The rules are those of the page (`verdict`).
"""

import json
from pathlib import Path
from typing import NamedTuple

import stop_rules
import torch
from torch import Tensor

import cape
import glide
from support.measuring import report
from support.training import data

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "results"
DRAWS = 2000  # of the bootstrap, as in report.paired
BEAM, RANKING = "beam_tau.json", "ranking_tau.json"
GLIDE_ROUNDS = "rounds_glide.json.gz"
TRAINED = {  # the training runs of the shipped drafters, stage after stage
    "glide": "glide_before glide",
    "specdecpp": "specdecpp_before specdecpp",
    "falcon": "falcon_before falcon",
    "ctc_drafter": "ctc_drafter_before ctc_drafter",
    "medusa": "medusa_before medusa",
    "eagle": "eagle_before eagle",
}
USES = {"cape": "glide", "beam": "glide"}  # methods that draft with another's drafter
ALIKE = {  # and of those that were trained alike, after the @ of an arm
    "k2": "rival_fk2",
    "k2-seed1": "rival_fk2_seed1",
    "no-csgd": "rival_fk2n",
    "no-csgd-seed1": "rival_fk2n_seed1",
    "k2-tall": "rival_fk2",
    "k3-tall": "rival_fk3",
    "k4-tall": "rival_fk4",
}


def read(file: str):
    return json.loads((RESULTS / file).read_text())


# --------------------------------------------------------------------------- counts


class Arm(NamedTuple):
    """What an arm did, by prompt, and what it was trained with."""

    sums: Tensor  # (prompts, 4): tokens, forwards, accepted, seconds
    nodes: float | None  # draft tokens a round; None: nothing is drafted
    draft_ms: float | None  # of a round; None: not recorded
    plain_ms: float | None  # of a forward of plain decoding in the same run
    steps: float | None  # token-steps of its drafter; None: it has none


TOKENS, FORWARDS, ACCEPTED, SECONDS = range(4)


def arm_of(file: str, names: str) -> Arm:
    """An arm of a run, or the sum of some that differ in a seed: NAME&NAME."""
    arms = [one_arm(file, name) for name in names.split("&")]

    def mean(field):
        values = [getattr(arm, field) for arm in arms]
        return None if None in values else sum(values) / len(values)

    sums = sum(arm.sums for arm in arms)
    return Arm(sums, mean("nodes"), mean("draft_ms"), mean("plain_ms"), mean("steps"))


def one_arm(file: str, name: str) -> Arm:
    result = read(file)
    if "runs" in result:  # counts of an untimed run
        run = result["runs"][name]
        other, *_ = result["runs"].values()
        assert list(run["prompts"]) == list(other["prompts"]), "not in the same order"
        counts = torch.tensor(list(run["prompts"].values()), dtype=torch.float64)
        tokens, forwards, drafted, accepted = counts.unbind(1)
        no_seconds = torch.full_like(tokens, torch.nan)
        sums = torch.stack([tokens, forwards, accepted, no_seconds], dim=1)
        nodes = float(drafted.sum() / forwards.sum())
        if "draft_time" not in run:
            return Arm(sums, nodes, None, None, run["tokens"])
        main = read(MAIN)  # where CAPE's time is in milliseconds
        draft_ms = run["draft_time"] * report.arms_of(main)["cape"]["draft_ms"]
        return Arm(sums, nodes, draft_ms, plain_ms(main), run["tokens"])
    arm = report.arms_of(result)[name]
    by_prompt = arm["by_prompt"]
    accepted = [0.0 if "answers" in arm else torch.nan] * result["prompts"]
    for each in arm.get("answers", []):
        accepted[each["prompt"]] += sum(each["accepted"])
    columns = [
        by_prompt["tokens"],
        by_prompt["forwards"],
        accepted,
        by_prompt["seconds"],
    ]
    nodes = None
    if arm["accepted_per_round"] is not None:
        nodes = arm["accepted_per_round"] + arm["n_discarded_per_token"] * arm["tau"]
    sums = torch.tensor(columns, dtype=torch.float64).T
    return Arm(sums, nodes, arm["draft_ms"], plain_ms(result), token_steps(name))


def plain_ms(result: dict) -> float | None:
    """Milliseconds of a forward of our plain loop on the packed target, if known."""
    baseline = report.arms_of(result)["baseline"]
    plain = baseline.get("loops", {}).get("plain")
    if plain is None:
        return None
    if baseline["loop"] == "plain":
        return baseline["verify_ms"]
    if isinstance(plain, dict) and plain.get("verify_ms"):
        return plain["verify_ms"]
    # An older run, of which only the speed is known, with the prompt's forward in it.
    return 1000 / (plain["tokens_per_s"] if isinstance(plain, dict) else plain)


def token_steps(name: str) -> float | None:
    """The token-steps of an arm's drafter, by its training curves."""
    method, _, folder = name.partition("@")
    method = method.partition(":")[0].partition("+")[0]
    runs = ALIKE[folder] if folder else TRAINED.get(USES.get(method, method))
    if runs is None:
        return None
    return sum(read(f"curves/{run}.json")[-1]["tokens"] for run in runs.split())


def bootstrap(figure, *sums: Tensor) -> tuple[float, float, float]:
    """A figure of the sums over prompts, and its 95% interval.

    figure: a function of (..., 4) sums of each arm. sums: (prompts, 4) of each arm; the
        same prompts are drawn for all, because some prompts are easier than others.
    """
    generator = torch.Generator().manual_seed(0)
    count = len(sums[0])
    assert all(len(each) == count for each in sums), "not the same prompts"
    picks = torch.randint(count, (DRAWS, count), generator=generator)
    drawn = figure(*(each[picks].sum(1) for each in sums))
    ends = torch.tensor([0.025, 0.975], dtype=drawn.dtype)
    low, high = drawn.quantile(ends).tolist()
    return float(figure(*(each.sum(0) for each in sums))), low, high


def tau(sums: Tensor) -> Tensor:
    return sums[..., TOKENS] / sums[..., FORWARDS]


def share(sums: Tensor) -> Tensor:
    """Falcon's alpha (4.2): the share of accepted draft tokens in the answer."""
    return sums[..., ACCEPTED] / sums[..., TOKENS]


def speed(sums: Tensor) -> Tensor:
    return sums[..., TOKENS] / sums[..., SECONDS]


# ------------------------------------------------------------------------- verdicts


class Seen(NamedTuple):
    """What was seen here."""

    tokens: str  # as the page shows it
    low: float | None = None  # of the interval that is judged, as printed
    high: float | None = None
    flat: str | None = None  # at flat cost
    cpu: str | None = None
    source: str = ""
    neutral: float = 1.0  # no difference
    steps: tuple[float, float] | None = None  # token-steps of both sides, if they count


class Paper(NamedTuple):
    """The paper's figure in our unit; the smallest and largest if it has several."""

    low: float
    high: float
    form: str = ".2f"
    time: bool = False  # a ratio of times, whose size is not compared with tau's
    unit: str = ""  # if it is neither tau nor measured time

    def __str__(self):
        low, high = format(self.low, self.form), format(self.high, self.form)
        text = low if low == high else f"{low} to {high}"
        unit = "in time" if self.time else self.unit
        return f"{text} {unit}".strip()


def with_bonus(ours: float, theirs: float) -> Paper:
    """A ratio of two taus that leave out the bonus token, with it."""
    ratio = (ours + 1) / (theirs + 1)
    return Paper(ratio, ratio)


def over(ours: float, theirs: float, time: bool = False) -> Paper:
    return Paper(ours / theirs, ours / theirs, time=time)


LEAST = 4e6  # token-steps of both sides; the page's legend says why
LONGER = 1.35  # times as long as the other, at which a side is trained too long


def unfair(seen: Seen) -> str | None:
    """Why the training of the two sides leaves nothing to judge; None if it is fair."""
    if seen.steps is None:
        return None
    if min(seen.steps) < LEAST:
        return f"not compared: fewer than {LEAST / 1e6:.0f} million token-steps"
    ours, theirs = seen.steps
    longer = []  # how many times as long a side was trained that is, or may be, ahead
    if seen.high >= seen.neutral:
        longer.append(ours / theirs)
    if seen.low <= seen.neutral:
        longer.append(theirs / ours)
    if max(longer) < LONGER:
        return None
    return f"not compared: one side was trained {max(longer):.1f} times as long"


def verdict(seen: Seen, paper: Paper | None) -> str:
    """By the interval in tokens alone, and in this order."""
    sized = paper is not None and not paper.time
    above = sized and round(paper.low, 3) > seen.high  # its smallest size
    if seen.high < seen.neutral:
        return "the opposite"
    if seen.low <= seen.neutral:
        return "not shown; the paper's size is excluded" if above else "not shown"
    return "smaller" if above else "confirmed"


def row(says: str, paper: Paper | None, seen: Seen, judged: str | None = None) -> list:
    """A row of the page. judged: the verdict, where there is no comparison to judge."""
    if judged is None:
        judged = unfair(seen) or verdict(seen, paper)
    figure = None if paper is None else str(paper)
    return [says, figure, seen.tokens, seen.flat, seen.cpu, judged, seen.source]


HEADS = [
    "what the paper says",
    "paper",
    "here, in tokens",
    "at flat cost",
    "on this CPU",
    "verdict",
    "run; nodes a round; token-steps",
]


def interval(value: float, low: float, high: float, form: str = ".2f") -> str:
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def source(file: str, *arms: Arm) -> str:
    """The run, and what makes a comparison fair: nodes a round and token-steps."""
    nodes = [f"{arm.nodes:.1f}" for arm in arms if arm.nodes]
    steps = [f"{arm.steps / 1e6:.1f}M" for arm in arms if arm.steps]
    parts = [f"[{Path(file).stem}]({file})", ", ".join(nodes), ", ".join(steps)]
    return "; ".join(part for part in parts if part)


# ------------------------------------------------------------------- what is compared


def steps_of(ours: Arm, theirs: Arm) -> tuple[float, float] | None:
    """Token-steps of both sides; None if one of them has no drafter."""
    trained = ours.steps is not None and theirs.steps is not None
    return (ours.steps, theirs.steps) if trained else None


def flat(arm: Arm) -> float:
    """Tokens per plain forward, if verifying any draft cost as much as one token."""
    draft_ms = arm.draft_ms or 0.0
    return float(tau(arm.sums.sum(0))) * arm.plain_ms / (arm.plain_ms + draft_ms)


def ratio(file: str, ours: str, theirs: str, other: str | None = None) -> Seen:
    """How many times one arm's tau is another's, on the same prompts.

    other: the file of `theirs`, if it is not of the same run.
    """
    pair = [arm_of(file, ours), arm_of(other or file, theirs)]
    if other:
        prompts = [
            list(next(iter(read(each)["runs"].values()))["prompts"])
            for each in (file, other)
        ]
        assert prompts[0] == prompts[1], "not the same prompts, in the same order"
    sums = [arm.sums for arm in pair]
    value, low, high = bootstrap(lambda a, b: tau(a) / tau(b), *sums)
    shown = f"{title(ours)} / {title(theirs)}: {interval(value, low, high)}"
    low, high = round(low, 2), round(high, 2)  # judged as printed
    costs = cpu = None
    if pair[0].plain_ms and pair[1].plain_ms:
        costs = f"{flat(pair[0]) / flat(pair[1]):.2f}"
    if not sums[0][:, SECONDS].isnan().any():
        cpu = interval(*bootstrap(lambda a, b: speed(a) / speed(b), *sums))
    from_run = source(file, *pair)
    if other:
        files, _, fairness = from_run.partition("; ")
        from_run = f"{files}, [{Path(other).stem}]({other}); {fairness}"
    return Seen(shown, low, high, costs, cpu, from_run, steps=steps_of(*pair))


def title(names: str) -> str:
    """A short name of arms that differ in a seed."""
    name, *more = names.split("&")
    name = name.removesuffix(":gamma3").replace("_s0", "")
    return f"`{name}`" + (f" ({1 + len(more)} seeds)" if more else "")


def plain(file: str, name: str) -> Seen:
    """An arm beside plain decoding, whose tau is 1."""
    arm, base = arm_of(file, name), arm_of(file, "baseline")
    shown = interval(*bootstrap(tau, arm.sums))
    cpu = bootstrap(lambda a, b: speed(a) / speed(b), arm.sums, base.sums)
    return Seen(
        f"`{name}`: tau {shown}",
        flat=f"{flat(arm):.2f}",
        cpu=interval(*cpu),
        source=source(file, arm),
    )


def shares(file: str, ours: str, theirs: str) -> Seen:
    """Points of Falcon's alpha."""
    pair = [arm_of(file, name) for name in (ours, theirs)]
    sums = [arm.sums for arm in pair]
    value, low, high = bootstrap(lambda a, b: 100 * (share(a) - share(b)), *sums)
    each = [f"{100 * float(share(s.sum(0))):.1f}%" for s in sums]
    shown = f"`{ours}` {each[0]}, `{theirs}` {each[1]}: "
    shown += f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"
    low, high = round(low, 1), round(high, 1)
    return Seen(
        shown,
        low,
        high,
        source=source(file, *pair),
        neutral=0.0,
        steps=steps_of(*pair),
    )


def gaps(column: str, ours: list, theirs: list) -> tuple[float, float, float]:
    """Points of alpha between curve rows: the mean, least and most of all pairs."""
    all_pairs = [100 * (a[column] - b[column]) for a in ours for b in theirs]
    return sum(all_pairs) / len(all_pairs), min(all_pairs), max(all_pairs)


def layers(ours: str, theirs: str, step: int = 1000) -> Seen:
    """GLIDE's drafters that differ in the layer they read: points of alpha, and tau.

    ours, theirs: as NAME of the runs curves/gpu_glide_NAME_s*.json. Alpha is compared
    after `step` steps, tau with the last weights. The verdict is that of alpha on the
    target's answers, because it compares equal steps.
    """
    rows, names = [], []
    for name in (ours, theirs):
        runs = sorted((RESULTS / "curves").glob(f"gpu_glide_{name}_s*.json"))
        curves = [json.loads(run.read_text()) for run in runs]
        rows.append([row for curve in curves for row in curve if row["step"] == step])
        names.append(
            "&".join(f"{run.stem.removeprefix('gpu_')}:gamma3" for run in runs)
        )
    mean, low, high = gaps("eval_alpha", *rows)
    held_out = "{:+.1f} ({:+.1f} to {:+.1f})".format(*gaps("alpha", *rows))
    points = f"{mean:+.1f} points of alpha ({low:+.1f} to {high:+.1f} by seed)"
    seen = ratio("gpu_tau.json", *names)
    # Token-steps do not count, because the curves of alpha do not cross (a test holds).
    return seen._replace(
        tokens=f"{points}, held-out {held_out}; tau of {seen.tokens}",
        low=round(low, 1),
        high=round(high, 1),
        neutral=0.0,
        steps=None,
    )


def to_the_end(ours: str, theirs: str) -> str:
    """Points of alpha between two runs whose learning rate has fallen to the end."""
    ends = [[read(f"curves/{name}.json")[-1]] for name in (ours, theirs)]
    answers, *_ = gaps("eval_alpha", *ends)
    held_out, *_ = gaps("alpha", *ends)
    steps = ends[0][0]["tokens"] / 1e6
    return f"runs of {steps:.1f}M to the end: {answers:+.1f}, held-out {held_out:+.1f}"


def predicted(file: str, name: str) -> Seen:
    """GLIDE's tau and speedup by its alpha, gamma and c, beside the measured ones."""
    numbers = report.arms_of(read(file))[name]
    arm = arm_of(file, name)
    gamma, alpha = numbers["settings"]["gamma"], numbers["alpha"]
    a_pass = numbers["draft_ms"] / gamma
    tokens = glide.expected_speedup(alpha, gamma, 0.0)
    shown = interval(*bootstrap(tau, arm.sums))
    cpu = glide.expected_speedup(alpha, gamma, a_pass / numbers["verify_ms"])
    costs = glide.expected_speedup(alpha, gamma, a_pass / arm.plain_ms)
    return Seen(
        f"`{name}`, alpha {alpha:.2f}, gamma {gamma}: "
        f"tau {tokens:.2f} predicted, {shown} seen",
        flat=f"{costs:.2f} predicted, {flat(arm):.2f} seen",
        cpu=f"{cpu:.2f} predicted, {numbers['speedup']:.2f} seen",
        source=source(file, arm),
    )


def draft_time(file: str, ours: str, theirs: str) -> Seen:
    """The time of drafting a round over that of another arm; tokens say nothing."""
    times = [read(file)["runs"][name]["draft_time"] for name in (ours, theirs)]
    cpu = f"{times[0] / times[1]:.2f}"
    shown = f"`{ours}` / `{theirs}`"
    return Seen(f"- ({shown})", cpu=cpu, source=f"[{Path(file).stem}]({file})")


def drafting(file: str, name: str) -> tuple[float, float]:
    """Passes and milliseconds of a round; the first draft reads the prompt."""
    arm = report.arms_of(read(file))[name]
    rounds = [each for answer in arm["answers"] for each in answer["offered"][1:]]
    return sum(rounds) / len(rounds), arm["draft_ms"]


def head_cost(file: str, ours: str, *fixed: str) -> Seen:
    """Drafting a round with the head, over as many passes without it.

    fixed: two arms with a fixed K. Beside its passes a round has a cost of its own, so
    the line through these two arms is what a round without the head takes.
    """
    passes, with_head = drafting(file, ours)
    (few, least), (many, most) = (drafting(file, name) for name in fixed)
    without = least + (passes - few) * (most - least) / (many - few)
    each = f"{with_head:.1f} and {without:.1f} ms for {passes:.2f} passes"
    cpu = f"{with_head / without:.2f} ({each})"
    return Seen("-", cpu=cpu, source=f"[{Path(file).stem}]({file})")


def time_share(file: str, *names: str) -> Seen:
    """The share of drafting in the time of a round."""
    shown = []
    for name in names:
        arm = report.arms_of(read(file))[name]
        whole = sum(arm[part] for part in ("draft_ms", "verify_ms", "other_ms"))
        shown.append(f"`{name}` {100 * arm['draft_ms'] / whole:.1f}%")
    return Seen("-", cpu=", ".join(shown), source=f"[{Path(file).stem}]({file})")


def rule_speed(file: str, ours: str, theirs: str, at=None, even=False) -> Seen:
    """How many times as fast as another a stop rule is, at the paper's cost of a pass.

    at: the setting of `ours`, if not the best one. even: theirs is K, but even.
    """
    answers = stop_rules.read(RESULTS / file)
    rule, named = ours, ours
    if at is not None:
        function, _ = stop_rules.RULES[ours]
        rule, named = (function, (at,)), f"{ours} {at:g}"
    rival = theirs
    if even:
        function, lengths = stop_rules.RULES[theirs]
        rival = function, [k for k in lengths if k % 2 == 0]
        theirs = f"even {theirs}"
    value, (low, high) = stop_rules.compare(answers, rule, rival, cost=0.209)
    return Seen(
        f"{named} / {theirs}: {interval(value, low, high, '.3f')}, modelled",
        low,
        high,
        source=f"[{file.partition('.')[0]}]({file})",
    )


THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)  # the paper's h (4.1)


def frontier(file: str) -> Seen:
    """Figure 4 of SpecDec++: tau of the head over fixed K's at an equal discard rate.

    It is judged by the intervals of all thresholds together, because the paper's
    frontier is better everywhere.
    """
    answers = stop_rules.read(RESULTS / file)
    each = [at_equal_discards(answers, h) for h in THRESHOLDS]
    shown = ", ".join(f"{value:.3f}" for value, _, _ in each)
    low = round(min(low for _, low, _ in each), 3)
    high = round(max(high for _, _, high in each), 3)
    thresholds = ", ".join(f"{h:g}" for h in THRESHOLDS)
    return Seen(
        f"head / K at an equal discard rate, h = {thresholds}: {shown} "
        f"(all intervals within {low:.3f}-{high:.3f})",
        low,
        high,
        source=f"[{file.partition('.')[0]}]({file})",
    )


def at_equal_discards(answers: list, h: float) -> tuple[float, float, float]:
    """Tau of the head over that of fixed K's, and its interval.

    The head's discard rate lies between those of two K, so a line leads from each K to
    the next.
    """
    function, _ = stop_rules.RULES["head"]
    head, fixed = (
        stop_rules.counts(answers, (function, (h,))),
        stop_rules.counts(answers, "K"),
    )
    sums = torch.cat([head, fixed])[..., :2]  # N_target, N_discarded of (S, n)

    def over_fixed(drawn):  # (..., 2 S)
        target, discarded = drawn.unflatten(-1, (-1, 2)).unbind(-1)  # (..., S)
        wanted = discarded[..., :1].contiguous()
        target_k, discarded_k = target[..., 1:], discarded[..., 1:].contiguous()
        more = torch.searchsorted(discarded_k, wanted).clamp(1, len(fixed) - 1)
        (x0, x1), (y0, y1) = (
            [rates.gather(-1, place) for place in (more - 1, more)]
            for rates in (discarded_k, target_k)
        )
        without = y0 + (wanted - x0) * (y1 - y0) / (x1 - x0)
        return (without / target[..., :1]).squeeze(-1)

    return bootstrap(over_fixed, sums.transpose(0, 1).flatten(1))


def linear_time(file: str) -> Seen:
    """How well Eq. 2.1 of SpecDec++ explains the measured times."""
    r2 = read(file)["sweep"]["r2"]
    return Seen("-", cpu=f"R^2 {r2:.2f}", source=f"[{Path(file).stem}]({file})")


def batches(name: str, *files: str) -> Seen:
    """An arm's speedups in batches of several sizes, over plain decoding in batches."""
    results = [read(file) for file in files]
    sizes = ", ".join(str(result["batch"]["size"]) for result in results)
    arms = [report.arms_of(result)[name] for result in results]
    speedups = ", ".join(f"{arm['speedup']:.2f}" for arm in arms)
    first = results[0]["batch"]["size"]
    return Seen(
        f"`{name}`: tau {arms[0]['tau']:.2f} in batches of {first}",
        cpu=f"{speedups} in batches of {sizes}",
        source=f"[{Path(files[0]).stem}]({files[0]})",
    )


def curves_cross(ours: str, theirs: str, *names: str) -> Seen:
    """Alpha of two runs at the first and at the last token-steps that both have.

    names: of the two, as the page shows them.
    """
    curves = []
    for run in (ours, theirs):
        rows = read(f"curves/{run}.json")
        curves.append(
            {row["tokens"]: row["alpha"] for row in rows if row["tokens"] > 9e5}
        )
    both = sorted(curves[0].keys() & curves[1].keys())
    shown = []
    for tokens in (both[0], both[-1]):
        pair = [f"{name} {curve[tokens]:.3f}" for name, curve in zip(names, curves)]
        shown.append(f"{', '.join(pair)} after {tokens / 1e6:.1f}M")
    behind = [place for place, n in enumerate(both) if curves[0][n] <= curves[1][n]]
    ahead = both[behind[-1] + 1]  # from here to the end
    shown.append(f"{names[0]} is ahead from {ahead / 1e6:.1f}M on")
    return Seen(
        f"held-out alpha: {'; '.join(shown)}",
        source=f"curves [{ours}](curves/{ours}.json), [{theirs}](curves/{theirs}.json)",
    )


def by_confidence() -> Seen:
    """Whether the target accepts GLIDE's first draft token, by its confidence."""
    answers = stop_rules.read(RESULTS / GLIDE_ROUNDS)
    firsts = []  # confidence, whether accepted, and answer, of the first draft tokens
    for n, rounds in enumerate(answers):
        drafted = [each for each in rounds if each.confidence]
        firsts += [(each.confidence[0], each.agreed > 0, n) for each in drafted]
    firsts.sort()
    ends = [len(firsts) * n // 10 for n in range(11)]
    tenths = [firsts[start:end] for start, end in zip(ends, ends[1:])]
    rates = [sum(accepted for _, accepted, _ in part) / len(part) for part in tenths]
    shown = ", ".join(f"{100 * rate:.0f}%" for rate in rates)
    sums = torch.zeros(len(answers), 4, dtype=torch.float64)  # two of each half
    for place, (_, accepted, n) in enumerate(firsts):
        half = 2 * (place >= len(firsts) / 2)
        sums[n, half : half + 2] += torch.tensor([accepted, 1.0])
    gap = bootstrap(
        lambda s: 100 * (s[..., 2] / s[..., 3] - s[..., 0] / s[..., 1]), sums
    )
    value, low, high = (round(number, 1) for number in gap)
    return Seen(
        f"accepted, by tenths of rising confidence: {shown}; upper half over lower: "
        f"{value:+.1f} points ({low:+.1f} to {high:+.1f})",
        low,
        high,
        source=f"[{GLIDE_ROUNDS.partition('.')[0]}]({GLIDE_ROUNDS})",
        neutral=0.0,
    )


def by_paper(each: stop_rules.Round, gamma: int) -> list[int]:
    """CAPE's sets, S(p) of the paper."""
    return [cape.set_size(p, cape.Config()) for p in each.confidence[:gamma]]


def fixed(size: float):
    """A rule with `size` extras on average, whatever the confidence."""
    given = 0.0

    def rule(each, gamma):
        nonlocal given
        sizes = []
        for _ in each.confidence[:gamma]:
            before = int(given)
            given += size
            sizes.append(int(given) - before)
        return sizes

    return rule


def equal_nodes(answers: list, rule, gamma: int) -> float:
    """The size with which `fixed` drafts as many nodes a round as a rule."""

    def nodes_of(rule):
        n_target, _, nodes = stop_rules.counts(answers, (rule, (gamma,)))[0].sum(0)
        return float(nodes / n_target)

    wanted = nodes_of(rule)
    low, high = 0.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        if nodes_of(fixed(middle)) < wanted:
            low = middle
        else:
            high = middle
    return high


def replayed(ours, theirs, names: str, gamma: int = 4) -> Seen:
    """Tau of two rules for CAPE's sets in the same record."""
    answers = stop_rules.read(RESULTS / GLIDE_ROUNDS)
    tokens = torch.tensor([len(rounds) for rounds in answers]).double()
    sums = []  # (answers, 3): tokens, forwards, nodes
    for rule in (ours, theirs):
        n_target, _, nodes = stop_rules.counts(answers, (rule, (gamma,)))[0].unbind(-1)
        sums.append(torch.stack([tokens, n_target, nodes], -1))
    value, low, high = bootstrap(lambda a, b: tau(a) / tau(b), *sums)
    nodes = ", ".join(
        f"{float(s[:, 2].sum() / s[:, FORWARDS].sum()):.1f}" for s in sums
    )
    return Seen(
        f"{names}: {interval(value, low, high, '.3f')}",
        round(low, 3),
        round(high, 3),
        flat=f"{value:.2f}",  # both draft the same chain
        source=f"[{GLIDE_ROUNDS.partition('.')[0]}]({GLIDE_ROUNDS}); {nodes}",
    )


# ---------------------------------------------------------------- by kind of prompt


def kinds_of(result: dict) -> list[dict]:
    """File and category of each prompt of a run with the prompts of prompts/."""
    paths = sorted((ROOT / "prompts").glob("*.jsonl"))
    names = {"math": "math", "python": "python", "mt_style": "chat"}
    files = {
        json.loads(line)["question_id"]: names[path.stem]
        for path in paths
        for line in path.open()
    }
    prompts = data.read_prompts(paths, result["prompts"])
    for answer in report.arms_of(result)["baseline"]["answers"]:
        known = answer.get("question_id", prompts[answer["prompt"]]["question_id"])
        assert known == prompts[answer["prompt"]]["question_id"], "other prompts"
    return [
        {"file": files[prompt["question_id"]], "category": prompt["category"]}
        for prompt in prompts
    ]


def rank_of_coding(file: str, *names: str) -> Seen:
    """Figure 2 of CTC-drafter: the rank of coding among MT-Bench's categories."""
    places = {}  # of the prompts of a category
    for place, kind in enumerate(kinds_of(read(file))):
        if kind["file"] == "chat":
            places.setdefault(kind["category"], []).append(place)
    shown = []
    for name in names:
        sums = arm_of(file, name).sums
        taus = {
            category: float(tau(sums[at].sum(0))) for category, at in places.items()
        }
        order = sorted(taus, key=taus.get, reverse=True)
        best = ", ".join(f"{category} {taus[category]:.2f}" for category in order[:3])
        rank = f"rank {1 + order.index('coding')} of {len(order)}"
        shown.append(f"`{name}` {rank} (tau: {best})")
    return Seen("; ".join(shown), source=f"[{Path(file).stem}]({file})")


# ----------------------------------------------------------------------- the claims

MAIN, VARIANTS, ALIKE_FALCON = (
    "cpu_main.json",
    "cpu_variants.json",
    "cpu_rivals_falcon.json",
)
ROUNDS, DEEP_ROUNDS = "rounds_greedy.json.gz", "rounds_rounded.json.gz"
SAMPLED_ROUNDS, SIX_ROUNDS = "rounds_sampled.json.gz", "rounds_six.json.gz"
BY_MODEL = "(time by Eq. 2.3)"
GLIDE_18, GLIDE_29 = (
    "&".join(f"glide_{layer}_s{seed}:gamma3" for seed in range(3)) for layer in (18, 29)
)
NO_CSGD = "not compared: Falcon without CSGD, with one layer and linear fusion"
MEDUSA = "not compared: Medusa learns at 64 places of a text"
MORE = f"{MEDUSA}, and drafts fewer nodes"


def glide_claims() -> list[list]:
    def by_alpha(ours, theirs):  # tokens a round with gamma = 5, of Table 1
        return glide.expected_speedup(ours, 5, 0) / glide.expected_speedup(theirs, 5, 0)

    batch_files = [f"cpu_batch{size}.json" for size in (2, 4, 8)]
    top = layers("29", "none")
    top_to_the_end = to_the_end("rival_glide29", "rival_vanilla")
    alone = "GLIDE alone is better than Medusa (figure 6)"
    return [
        row(
            "Reading the target's cache raises acceptance (figure 4), top layer",
            Paper(5.4, 23.5, "+.1f"),
            top._replace(tokens=f"{top.tokens}; {top_to_the_end}"),
            "not compared: the size depends on step and text",
        ),
        row(
            "The same, with the best of the four layers tried",
            Paper(5.4, 23.5, "+.1f"),
            layers("18", "none"),
        ),
        row(
            "A high layer is better than a low one (figure 7): top and lowest",
            None,
            layers("29", "0"),
        ),
        row("The top layer is the best (figure 7)", None, layers("29", "18")),
        row(
            "Even a low layer is better than none (5.4)",
            None,
            layers("0", "none"),
            "not compared: fewer than 4 million token-steps, and the curves cross",
        ),
        row(
            "GLIDE is accepted more often than a small LM trained on the same data "
            "(table 1; LLaMA-45m)",
            Paper(by_alpha(0.564, 0.402), by_alpha(0.601, 0.367)),
            ratio(VARIANTS, "cape:none", "specdecpp:K4"),
            "not compared: the small LM here was distilled from the target",
        ),
        row(
            f"{alone}, at equal nodes, with layer 18",
            None,
            ratio("gpu_tau.json", GLIDE_18, "medusa:nodes3"),
            MEDUSA,
        ),
        row(
            f"{alone}, at equal nodes, with the top layer",
            None,
            ratio("gpu_tau.json", GLIDE_29, "medusa:nodes3"),
            MEDUSA,
        ),
        row(
            f"{alone}, as shipped",
            None,
            ratio(MAIN, "glide", "medusa"),
            MEDUSA,
        ),
        row(
            f"{alone}, a chain of four and Medusa with 63 nodes",
            None,
            ratio(BEAM, "cape:none", "medusa:63", RANKING),
            MEDUSA,
        ),
        row(
            "Alpha, gamma and c predict the speedup (5.1), at temperature 1",
            None,
            predicted("cpu_t1.json", "glide"),
            "-",
        ),
        row(
            "GLIDE is faster than plain decoding (table 4: 1.96 to 2.18)",
            over(106.8, 54.6, time=True)._replace(high=100.8 / 46.2),
            plain(MAIN, "glide"),
            "-",
        ),
        row(
            "Small batches hardly slow GLIDE down (table 4: 1.92 to 2.08 at 7B)",
            Paper(106.2 / 55.4, 116.5 / 55.9, time=True),
            batches("glide", *batch_files),
            "not compared: the drafters run one after another",
        ),
    ]


def cape_claims() -> list[list]:
    size = equal_nodes(stop_rules.read(RESULTS / GLIDE_ROUNDS), by_paper, gamma=4)
    return [
        row(
            "Acceptance rises with the drafter's confidence (figure 1 b)",
            None,
            by_confidence(),
        ),
        row(
            "Expansion makes GLIDE faster (abstract: up to 2.17, up to 2.61)",
            over(2.61, 2.17, time=True),
            ratio(VARIANTS, "cape", "cape:none"),
            "-",
        ),
        row(
            "Sizes by confidence beat one size for all (5.4: 68.4 → 70.6 tokens/s)",
            over(70.6, 68.4, time=True),
            replayed(
                by_paper,
                fixed(size),
                f"S(p) / sets of {int(size)} or {int(size) + 1} in turn, "
                "whatever the confidence",
            ),
        ),
        row(
            "It is faster than a beam of four (figure 6)",
            None,
            ratio(BEAM, "cape", "beam"),
            "-",
        ),
        row(
            "The same, and a beam of eight, which has as many nodes",
            None,
            ratio(BEAM, "cape", "beam:width8"),
            "-",
        ),
        row(
            "A beam can be slower than GLIDE alone (5.3)",
            None,
            ratio(BEAM, "beam", "cape:none"),
            "-",
        ),
        row(
            "It is better than Medusa with 63 nodes (figure 6)",
            None,
            ratio(BEAM, "cape", "medusa:63", RANKING),
            MEDUSA,
        ),
        row(
            "Expansion takes hardly any time (table 3: 5.3 → 5.5, at 33B 9.1 → 8.9 ms)",
            over(8.9, 9.1, time=True)._replace(high=5.5 / 5.3),
            draft_time(BEAM, "cape", "cape:none"),
            "-",
        ),
        row(
            "A beam of four takes twice as long to draft as CAPE "
            "(table 3: 5.5 → 10.9, at 33B 8.9 → 17.1 ms)",
            over(17.1, 8.9, time=True)._replace(high=10.9 / 5.5),
            draft_time(BEAM, "beam", "cape"),
            "-",
        ),
    ]


def specdecpp_claims() -> list[list]:
    best_k = Paper(18.88 / 17.62, 20.61 / 18.55, unit=BY_MODEL)
    hindsight = over(27.06, 17.58)._replace(unit=BY_MODEL)
    fewer = "At an equal discard rate the head needs fewer forwards (figure 4)"
    return [
        row(
            "The head is faster than the best fixed length (table 1: 7% to 11%)",
            best_k,
            rule_speed(ROUNDS, "head", "K"),
            "not compared: greedy, and two draft layers, which agree less often",
        ),
        row(
            "The same at temperature 1, where the paper's K are even",
            best_k,
            rule_speed(SAMPLED_ROUNDS, "head", "K", even=True),
            "not compared: a head for greedy drafts, and two draft layers",
        ),
        row(
            "The same, with a draft model of six layers",
            best_k,
            rule_speed(SIX_ROUNDS, "head", "K"),
            "not compared: greedy, and its head learned for 125 steps only",
        ),
        row(
            "The same, with a draft model of full depth",
            best_k,
            rule_speed(DEEP_ROUNDS, "head", "K"),
            "not compared: greedy, and its head learned from 77,000 labels only",
        ),
        row(
            "The same by the product of confidences, with a draft model of full depth",
            best_k,
            rule_speed(DEEP_ROUNDS, "product", "K"),
            "not compared: not the paper's rule",
        ),
        row(fewer, None, frontier(ROUNDS)),
        row(f"{fewer}, at temperature 1", None, frontier(SAMPLED_ROUNDS)),
        row(f"{fewer}, with six layers", None, frontier(SIX_ROUNDS)),
        row(f"{fewer}, with full depth", None, frontier(DEEP_ROUNDS)),
        row(
            "An oracle would be much faster (2.1: 1.90 → 2.92)",
            hindsight,
            rule_speed(ROUNDS, "oracle", "K"),
            "-",
        ),
        row(
            "The same, with a draft model of full depth",
            hindsight,
            rule_speed(DEEP_ROUNDS, "oracle", "K"),
            "-",
        ),
        row(
            "One setting is within .7% of the best (4.3): h = .7",
            Paper(0.993, 1.0, ".3f", unit=BY_MODEL),
            rule_speed(ROUNDS, "head", "head", at=0.7),
            "not compared: one head and one kind of data",
        ),
        row(
            "Time is linear in passes and forwards (Eq. 2.1: R^2 at least .98)",
            None,
            linear_time("cpu_sweep.json"),
            "not compared: the times are measured here, and fitted there",
        ),
        row(
            "The head takes hardly any time (4.2)",
            None,
            head_cost(VARIANTS, "specdecpp", "specdecpp:K2", "specdecpp:K4"),
            "not compared: two draft layers, the paper's model has 32",
        ),
        row(
            "SpecDec++ is faster than plain decoding (abstract: 2.04 to 2.26)",
            Paper(2.04, 2.26, time=True),
            plain(MAIN, "specdecpp"),
            "-",
        ),
    ]


def falcon_claims() -> list[list]:
    seeds = "falcon@k2&falcon@k2-seed1", "falcon@no-csgd&falcon@no-csgd-seed1"
    over_medusa = with_bonus(3.37, 1.59)._replace(high=4.70 / 2.55)
    return [
        row(
            "CSGD raises tau (table 4: 2.78 → 3.34)",
            with_bonus(3.34, 2.78),
            ratio(ALIKE_FALCON, *seeds),
        ),
        row(
            "CSGD raises tau, here in the last million token-steps alone",
            with_bonus(3.34, 2.78),
            ratio("csgd_tau.json", "csgd:tree", "no_csgd:tree"),
            "not compared: 22.3M of 23.4M token-steps were the same",
        ),
        row(
            "The tree raises tau (table 4: 2.13 → 3.34; without CSGD 1.64 → 2.78)",
            with_bonus(3.34, 2.13)._replace(high=3.78 / 2.64),
            ratio(VARIANTS, "falcon:paper", "falcon:chain"),
        ),
        row(
            "The tree raises tau, after CSGD (table 4: 2.13 → 3.34)",
            with_bonus(3.34, 2.13),
            ratio(ALIKE_FALCON, "falcon@k2", "falcon:chain@k2"),
        ),
        row(
            "k = 2 is better than 3 (table 5: 2.52 → 3.34)",
            with_bonus(3.34, 2.52),
            ratio(ALIKE_FALCON, "falcon@k2-tall", "falcon@k3-tall"),
        ),
        row(
            "k = 3 is better than 4 (table 5: 2.35 → 2.52)",
            with_bonus(2.52, 2.35),
            ratio(ALIKE_FALCON, "falcon@k3-tall", "falcon@k4-tall"),
        ),
        row(
            "Falcon's tau is above Medusa's (table 3: 1.51 → 3.34), at equal nodes",
            over_medusa,
            ratio("gpu_tau.json", "falcon_nocsgd:tree", "medusa:nodes9"),
            NO_CSGD,
        ),
        row(
            "Falcon's tau is above Medusa's (table 3: 1.51 → 3.34), as shipped",
            over_medusa,
            ratio(MAIN, "falcon", "medusa"),
            MORE,
        ),
        row(
            "Falcon has a larger share of draft tokens than Medusa (table 2)",
            Paper(15.76, 17.83, "+.1f"),
            shares(MAIN, "falcon", "medusa"),
            MORE,
        ),
        row(
            "Falcon is faster than Medusa (table 1: 1.28 to 1.50)",
            Paper(2.97 / 2.32, 3.10 / 2.06, time=True),
            ratio(MAIN, "falcon", "medusa"),
            MORE,
        ),
        row(
            "Falcon's tau is above EAGLE's (table 3: 2.91 → 3.37, Vicuna 13B)",
            with_bonus(2.95, 2.73)._replace(high=4.86 / 3.97),
            ratio("gpu_tau.json", "falcon_nocsgd:tree", "eagle:tree"),
            NO_CSGD,
        ),
        row(
            "Falcon's tau is above EAGLE's (table 3: 2.91 → 3.37), as shipped",
            with_bonus(2.95, 2.73)._replace(high=4.86 / 3.97),
            ratio(MAIN, "falcon", "eagle"),
        ),
        row(
            "Falcon is faster than EAGLE (table 1: 1.01 to 1.24)",
            Paper(2.95 / 2.93, 3.13 / 2.52, time=True),
            ratio(MAIN, "falcon", "eagle"),
            "not compared: tokens leave out that EAGLE makes twice the passes",
        ),
        row(
            "Falcon is faster than plain decoding (abstract: 2.91 to 3.51)",
            Paper(2.91, 3.51, time=True),
            plain(MAIN, "falcon"),
            "-",
        ),
    ]


def ctc_claims() -> list[list]:
    above_medusa = "CTC-drafter's tau is above Medusa's (table 1: 2.58 → 3.56)"
    size = over(3.53, 2.78)._replace(high=3.53 / 2.55)
    return [
        row(
            "The transform raises tau (table 2: 3.02 → 3.56), as shipped",
            over(3.56, 3.02),
            ratio(RANKING, "ctc_drafter:alignments:63", "ctc_drafter:none:63"),
            "not compared: the blank is used only to leave slots empty",
        ),
        row(
            "The transform raises tau, with a drafter whose blank is in use",
            over(3.56, 3.02),
            ratio("gpu_tau.json", "ctc_lengths:prefixes", "ctc_lengths:none"),
            "not compared: `none` leaves out the blanks, which the paper's rival keeps",
        ),
        row(
            "A layer with CTC is better than Medusa's heads (table 2: 2.58 → 3.02)",
            None,  # the paper's figures are taus
            curves_cross("ctc_drafter_before", "medusa_before", "CTC", "Medusa"),
            "not compared: the curves cross, and alpha is not tau",
        ),
        row(
            f"{above_medusa}, CTC alone",
            size,
            ratio("gpu_tau.json", "ctc_first0:prefixes", "medusa:nodes10"),
        ),
        row(
            f"{above_medusa}, with a loss on the first token as well",
            size,
            ratio("gpu_tau.json", "ctc_first1:prefixes", "medusa:nodes10"),
        ),
        row(
            f"{above_medusa}, as shipped, with 63 nodes",
            size,
            ratio(RANKING, "ctc_drafter:alignments:63", "medusa:63"),
        ),
        row(
            f"{above_medusa}, as shipped, with five nodes",
            size,
            ratio(MAIN, "ctc_drafter", "medusa"),
        ),
        row(
            "CTC-drafter is faster than Medusa (table 1: 1.03 to 1.31)",
            Paper(2.16 / 2.10, 2.78 / 2.13, time=True),
            ratio(MAIN, "ctc_drafter", "medusa"),
        ),
        row(
            "Coding is the best of eight categories for both (figure 2)",
            None,
            rank_of_coding(MAIN, "ctc_drafter", "medusa"),
            "-",
        ),
        row(
            "Drafting and the transform take 20.3% of the time (14.9 and 5.4), "
            "Medusa's drafting 3.7% (figure 3)",
            None,
            time_share(MAIN, "ctc_drafter", "medusa"),
            "-",
        ),
        row(
            "CTC-drafter is faster than plain decoding (table 1: 2.16 to 2.78)",
            Paper(2.16, 2.78, time=True),
            plain(MAIN, "ctc_drafter"),
            "-",
        ),
    ]


CLAIMS = {
    "GLIDE": glide_claims,
    "CAPE": cape_claims,
    "SpecDec++": specdecpp_claims,
    "Falcon": falcon_claims,
    "CTC-drafter": ctc_claims,
}


def table(method: str) -> str:
    """The claims of a method, or of "all" how many have which verdict."""
    if method != "all":
        head, rule, *rows = report.markdown(HEADS, CLAIMS[method]()).splitlines()
        return "\n".join([head, rule.replace("-:", "--"), *rows])  # text, from the left
    kinds = [
        "confirmed",
        "smaller",
        "not shown",
        "the opposite",
        "not compared",
        "reported",
    ]
    rows = []
    for name, claims in CLAIMS.items():
        words = [
            each[5].split(";")[0].split(":")[0].replace("-", "reported")
            for each in claims()
        ]
        assert set(words) <= set(kinds)
        rows.append([name, *map(words.count, kinds)])
    return report.markdown(["paper", *kinds], rows)
