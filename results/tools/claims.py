"""What the papers claim, compared with what was seen here: tables of results/claims.md.

`tables.py` writes them, and a test holds the page to them. Every figure and verdict is
computed: a row below names the paper's figures and the arms or runs that are compared.
Only the sentence of a row is written by hand, on the page itself. The rules of the
verdicts are explained there (`unfair`, `verdict`).
"""

import functools
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
    "glide": "glide_before glide_second glide_third text_glide vocab_glide "
    "glide_fourth glide",
    "specdecpp": "specdecpp_before specdecpp_second specdecpp_third specdecpp_fourth "
    "vocab_specdecpp specdecpp_fifth specdecpp",
    "falcon": "falcon_before falcon_second falcon_third vocab_falcon falcon_fourth "
    "falcon",
    "ctc_drafter": "ctc_drafter_before ctc_drafter_second ctc_drafter_third "
    "ctc_drafter",
    "medusa": "medusa_before medusa_second medusa_third medusa",
    "eagle": "eagle_before eagle_second eagle_third eagle_fourth eagle_fifth "
    "eagle_sixth eagle",
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
    plain = report.arms_of(result)["baseline"].get("loops", {}).get("plain")
    if plain is None or isinstance(plain, dict):
        return plain and plain.get("verify_ms")
    return 1000 / plain  # an older run: a speed, with the prompt's forward in it


def token_steps(name: str) -> float | None:
    """The token-steps of the drafter of an arm, by its training curves."""
    method, _, folder = name.partition("@")
    method = method.partition(":")[0].partition("+")[0]
    method = USES.get(method, method)
    runs = ALIKE[folder] if folder else TRAINED.get(method)
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

    figure: str  # as the page shows it
    low: float | None = None  # of the interval that is judged, as printed
    high: float | None = None
    neutral: float = 1.0  # no difference
    what: str | None = None  # what was compared, and what else there is to report
    nodes: tuple = ()  # draft tokens a round of each side
    steps: tuple = ()  # token-steps of each side
    equal_steps: bool = False  # both sides were compared after the same steps
    flat: str | None = None  # the ratio at flat cost
    cpu: str | None = None  # and of measured speeds
    files: tuple = ()  # of the runs, in results/


class Paper(NamedTuple):
    """The paper's figure in our unit; the smallest and largest if it has several."""

    low: float
    high: float
    form: str = ".2f"
    time: bool = False  # a ratio of times, whose size is not compared with tau's
    pairs: tuple = ()  # the figures as printed, ours and their rival's

    def __str__(self):
        ends = dict.fromkeys(format(end, self.form) for end in (self.low, self.high))
        return " to ".join(ends) + (" in time" if self.time else "")


def printed(*pairs: tuple[float, float], bonus: int = 0, time: bool = False) -> Paper:
    """The ratios of pairs of figures in a paper, the smallest first.

    bonus: 1 for taus that leave out the bonus token.
    """
    ratios = [(ours + bonus) / (theirs + bonus) for ours, theirs in pairs]
    return Paper(ratios[0], ratios[-1], time=time, pairs=pairs)


LEAST, LONGER = 4e6, 1.1  # token-steps, and how unequal they may be: see the page
NOT_COMPARED, REPORTED = "not compared", "reported"


def unfair(seen: Seen) -> str | None:
    """What keeps the training of two sides from being compared; None if it is fair."""
    if len(seen.steps) != 2 or seen.equal_steps:
        return None
    if min(seen.steps) < LEAST:
        return f"{NOT_COMPARED}: fewer than {LEAST / 1e6:.0f}M token-steps"
    longer = max(seen.steps) / min(seen.steps)
    if longer < LONGER:
        return None
    return f"{NOT_COMPARED}: one side trained {longer:.1f} times as long"


def verdict(seen: Seen, paper: Paper | str | None) -> str:
    """By the interval in tokens alone, and in this order.

    paper: if it is text, or a ratio of times, its size is not compared.
    """
    sized = isinstance(paper, Paper) and not paper.time
    above = sized and round(paper.low, 3) > seen.high  # its smallest size
    if seen.high < seen.neutral:
        return "the opposite"
    if seen.low <= seen.neutral:
        return "not shown"
    return "smaller" if above else "confirmed"


class Row(NamedTuple):
    """A claim of a paper."""

    claim: str
    paper: Paper | str | None
    seen: Seen
    judged: str | None = None  # the verdict, where there is no comparison to judge

    @property
    def verdict(self) -> str:
        judged = self.judged or unfair(self.seen)
        return judged or verdict(self.seen, self.paper)


def interval(value: float, low: float, high: float, form: str = ".2f") -> str:
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def points(value: float, low: float, high: float) -> str:
    return f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"


def sides(*arms: Arm) -> dict:
    """What makes a comparison fair: nodes a round and token-steps, where there are."""
    return {
        "nodes": tuple(arm.nodes for arm in arms if arm.nodes),
        "steps": tuple(arm.steps for arm in arms if arm.steps),
    }


# ------------------------------------------------------------------- what is compared


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
    costs = cpu = None
    if pair[0].plain_ms and pair[1].plain_ms:
        costs = f"{flat(pair[0]) / flat(pair[1]):.2f}"
    if not sums[0][:, SECONDS].isnan().any():
        cpu = interval(*bootstrap(lambda a, b: speed(a) / speed(b), *sums))
    return Seen(
        interval(value, low, high),
        round(low, 2),  # judged as printed
        round(high, 2),
        what=f"{title(ours)} / {title(theirs)}",
        flat=costs,
        cpu=cpu,
        files=(file, other) if other else (file,),
        **sides(*pair),
    )


def title(names: str) -> str:
    """A short name of arms that differ in a seed."""
    name, *more = names.split("&")
    name = name.removesuffix(":gamma3").replace("_s0", "")
    return f"`{name}`" + (f" ({1 + len(more)} seeds)" if more else "")


def plain(file: str, name: str) -> Seen:
    """An arm compared with plain decoding, whose tau is 1."""
    arm, base = arm_of(file, name), arm_of(file, "baseline")
    cpu = bootstrap(lambda a, b: speed(a) / speed(b), arm.sums, base.sums)
    return Seen(
        f"tau {interval(*bootstrap(tau, arm.sums))}",
        what=f"`{name}` / plain decoding",
        flat=f"{flat(arm):.2f}",
        cpu=interval(*cpu),
        files=(file,),
        **sides(arm),
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
    steps = tuple(sum(row["tokens"] for row in side) / len(side) for side in rows)
    held_out = "{:+.1f} ({:+.1f} to {:+.1f})".format(*gaps("alpha", *rows))
    seen = ratio("gpu_tau.json", *names)
    return seen._replace(
        figure=points(mean, low, high),
        low=round(low, 1),
        high=round(high, 1),
        neutral=0.0,
        what=f"{seen.what}; held-out {held_out}; tau {seen.figure}",
        steps=steps,
        equal_steps=True,  # and the curves do not cross, which a test holds
    )


def predicted(file: str, name: str) -> Seen:
    """GLIDE's tau and speedup by its alpha, gamma and c, beside the measured ones."""
    numbers = report.arms_of(read(file))[name]
    arm = arm_of(file, name)
    gamma, alpha = numbers["settings"]["gamma"], numbers["alpha"]
    a_pass = numbers["draft_ms"] / gamma
    tokens = glide.expected_speedup(alpha, gamma, 0.0)
    cpu = glide.expected_speedup(alpha, gamma, a_pass / numbers["verify_ms"])
    costs = glide.expected_speedup(alpha, gamma, a_pass / arm.plain_ms)
    return Seen(
        f"tau {tokens:.2f} predicted, {interval(*bootstrap(tau, arm.sums))} seen",
        what=f"`{name}`, alpha {alpha:.2f}, gamma {gamma}",
        flat=f"{costs:.2f} predicted, {flat(arm):.2f} seen",
        cpu=f"{cpu:.2f} predicted, {numbers['speedup']:.2f} seen",
        files=(file,),
        **sides(arm),
    )


def draft_time(file: str, ours: str, theirs: str) -> Seen:
    """The time of drafting a round over that of another arm; tokens say nothing."""
    times = [read(file)["runs"][name]["draft_time"] for name in (ours, theirs)]
    figure = f"{times[0] / times[1]:.2f} in time"
    return Seen(figure, what=f"`{ours}` / `{theirs}`", files=(file,))


def drafting(file: str, name: str) -> tuple[float, float]:
    """Passes and milliseconds of a round; the first draft reads the prompt."""
    arm = report.arms_of(read(file))[name]
    rounds = [each for answer in arm["answers"] for each in answer["offered"][1:]]
    return sum(rounds) / len(rounds), arm["draft_ms"]


def head_cost(file: str, ours: str, *fixed: str) -> Seen:
    """Drafting a round with the head, over as many passes without it.

    fixed: two arms with a fixed K. A round costs more than its passes, so the line
        through these two arms is what a round without the head takes.
    """
    passes, with_head = drafting(file, ours)
    (few, least), (many, most) = (drafting(file, name) for name in fixed)
    without = least + (passes - few) * (most - least) / (many - few)
    what = f"{with_head:.1f} and {without:.1f} ms for {passes:.2f} passes"
    return Seen(f"{with_head / without:.2f} in time", what=what, files=(file,))


def time_share(file: str, *names: str) -> Seen:
    """The share of drafting in the time of a round."""
    shown = []
    for name in names:
        arm = report.arms_of(read(file))[name]
        whole = sum(arm[part] for part in ("draft_ms", "verify_ms", "other_ms"))
        shown.append(f"{100 * arm['draft_ms'] / whole:.1f}%")
    what = ", ".join(f"`{name}`" for name in names)
    return Seen(" and ".join(shown), what=what, files=(file,))


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
        interval(value, low, high, ".3f"),
        low,
        high,
        what=f"{named} / {theirs}",
        files=(file,),
    )


THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)  # the paper's h (4.1)


def frontier(file: str) -> Seen:
    """Figure 4 of SpecDec++: tau of the head over fixed K's at an equal discard rate.

    It is judged by the intervals of all thresholds together, because the paper's
    frontier is better everywhere.
    """
    answers = stop_rules.read(RESULTS / file)
    each = [at_equal_discards(answers, h) for h in THRESHOLDS]
    values = [f"{value:.3f}" for value, _, _ in each]
    low = round(min(low for _, low, _ in each), 3)
    high = round(max(high for _, _, high in each), 3)
    thresholds = ", ".join(f"{h:g}" for h in THRESHOLDS)
    return Seen(
        f"{min(values)} to {max(values)} ({low:.3f}-{high:.3f})",
        low,
        high,
        what=f"head / K, h = {thresholds}: {', '.join(values)}",
        files=(file,),
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
    return Seen(
        f"ahead from {ahead / 1e6:.1f}M on",
        what=f"held-out alpha: {'; '.join(shown)}",
        files=tuple(f"curves/{run}.json" for run in (ours, theirs)),
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
        points(value, low, high),
        low,
        high,
        neutral=0.0,
        what=f"upper half of confidences and lower; by tenths {shown}",
        files=(GLIDE_ROUNDS,),
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


def sizes_by_confidence(gamma: int = 4) -> Seen:
    """Tau of CAPE's sets over sets of one size, replayed in the same record."""
    answers = stop_rules.read(RESULTS / GLIDE_ROUNDS)
    size = equal_nodes(answers, by_paper, gamma)
    tokens = torch.tensor([len(rounds) for rounds in answers]).double()
    sums = []  # (answers, 3): tokens, forwards, nodes
    for rule in (by_paper, fixed(size)):
        n_target, _, nodes = stop_rules.counts(answers, (rule, (gamma,)))[0].unbind(-1)
        sums.append(torch.stack([tokens, n_target, nodes], -1))
    value, low, high = bootstrap(lambda a, b: tau(a) / tau(b), *sums)
    nodes = tuple(float(s[:, 2].sum() / s[:, FORWARDS].sum()) for s in sums)
    return Seen(
        interval(value, low, high, ".3f"),
        round(low, 3),
        round(high, 3),
        what=f"S(p) / sets of {int(size)} or {int(size) + 1} in turn",
        nodes=nodes,
        flat=f"{value:.2f}",  # both draft the same chain
        files=(GLIDE_ROUNDS,),
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
    ranks, shown = [], []
    for name in names:
        sums = arm_of(file, name).sums
        taus = {
            category: float(tau(sums[at].sum(0))) for category, at in places.items()
        }
        order = sorted(taus, key=taus.get, reverse=True)
        ranks.append(str(1 + order.index("coding")))
        best = ", ".join(f"{category} {taus[category]:.2f}" for category in order[:3])
        shown.append(f"`{name}`: {best}")
    figure = f"rank {' and '.join(ranks)} of {len(places)}"
    return Seen(figure, what="; ".join(shown), files=(file,))


# ----------------------------------------------------------------------- the claims

MAIN, VARIANTS, GPU = "cpu_main.json", "cpu_variants.json", "gpu_tau.json"
ALIKE_FALCON = "cpu_rivals_falcon.json"
ROUNDS, DEEP_ROUNDS = "rounds_greedy.json.gz", "rounds_rounded.json.gz"
SAMPLED_ROUNDS, SIX_ROUNDS = "rounds_sampled.json.gz", "rounds_six.json.gz"
GLIDE_29 = "&".join(f"glide_29_s{seed}:gamma3" for seed in range(3))


def glide_claims() -> dict[str, tuple]:
    def by_alpha(ours, theirs):  # tokens a round with gamma = 5, of Table 1
        return glide.expected_speedup(ours, 5, 0) / glide.expected_speedup(theirs, 5, 0)

    cache = "Reading the target's cache raises acceptance (figure 4)"
    alone = "GLIDE alone is better than Medusa (figure 6)"
    return {
        cache: ("+5.4 to +23.5 points", layers("29", "none")),
        "A high layer beats a low one (5.4, figure 7)": (None, layers("29", "0")),
        "The higher the layer, the better: 29 over 18 (5.4, figure 7)": (
            None,
            layers("29", "18"),
        ),
        "Even a low layer is better than none (5.4)": (
            None,
            layers("0", "none"),
            NOT_COMPARED,
        ),
        "GLIDE is accepted more often than a small LM trained on its data (table 1)": (
            Paper(by_alpha(0.564, 0.402), by_alpha(0.601, 0.367)),
            ratio(VARIANTS, "cape:none", "specdecpp:K4"),
            NOT_COMPARED,
        ),
        f"{alone}, at equal nodes, top layer": (
            None,
            ratio(GPU, GLIDE_29, "medusa:nodes3"),
            NOT_COMPARED,
        ),
        f"{alone}, as shipped": (None, ratio(MAIN, "glide", "medusa"), NOT_COMPARED),
        f"{alone}, against 63 nodes": (
            None,
            ratio(BEAM, "cape:none", "medusa:63", RANKING),
            NOT_COMPARED,
        ),
        "Alpha, gamma and c predict the speedup (5.1, 5.2)": (
            None,
            predicted("cpu_t1.json", "glide"),
            REPORTED,
        ),
        "GLIDE is faster than plain decoding (table 4, batch 1)": (
            printed((106.8, 54.6), (100.8, 46.2), time=True),
            plain(MAIN, "glide"),
            REPORTED,
        ),
    }


def cape_claims() -> dict[str, tuple]:
    return {
        "Acceptance rises with the drafter's confidence (figure 1 b)": (
            None,
            by_confidence(),
        ),
        "Expansion makes GLIDE faster (abstract)": (
            printed((2.61, 2.17), time=True),
            ratio(VARIANTS, "cape", "cape:none"),
            REPORTED,
        ),
        "Sizes by confidence beat one size for all (5.4)": (
            printed((70.6, 68.4), time=True),
            sizes_by_confidence(),
        ),
        "CAPE is faster than a beam of four (figure 6)": (
            None,
            ratio(BEAM, "cape", "beam"),
            REPORTED,
        ),
        "CAPE is faster than a beam of eight (5.1 with figure 6)": (
            None,
            ratio(BEAM, "cape", "beam:width8"),
            REPORTED,
        ),
        "CAPE is better than Medusa (figure 6), against 63 nodes": (
            None,
            ratio(BEAM, "cape", "medusa:63", RANKING),
            NOT_COMPARED,
        ),
        "Expansion takes hardly any time (table 3)": (
            printed((8.9, 9.1), (5.5, 5.3), time=True),
            draft_time(BEAM, "cape", "cape:none"),
            REPORTED,
        ),
        "A beam of four takes twice as long to draft as CAPE (table 3)": (
            printed((17.1, 8.9), (10.9, 5.5), time=True),
            draft_time(BEAM, "beam", "cape"),
            REPORTED,
        ),
    }


def specdecpp_claims() -> dict[str, tuple]:
    best_k = printed((18.88, 17.62), (20.61, 18.55), time=True)
    faster = "The head is faster than the best fixed length (table 1)"
    fewer = "At an equal discard rate the head needs fewer forwards (figure 4)"
    return {
        faster: (best_k, rule_speed(ROUNDS, "head", "K"), NOT_COMPARED),
        f"{faster}, at temperature 1": (
            best_k,
            rule_speed(SAMPLED_ROUNDS, "head", "K", even=True),
            NOT_COMPARED,
        ),
        f"{faster}, with six layers": (
            best_k,
            rule_speed(SIX_ROUNDS, "head", "K"),
            NOT_COMPARED,
        ),
        f"{faster}, with full depth": (
            best_k,
            rule_speed(DEEP_ROUNDS, "head", "K"),
            NOT_COMPARED,
        ),
        fewer: (None, frontier(ROUNDS), NOT_COMPARED),
        f"{fewer}, at temperature 1": (None, frontier(SAMPLED_ROUNDS), NOT_COMPARED),
        f"{fewer}, with six layers": (None, frontier(SIX_ROUNDS), NOT_COMPARED),
        f"{fewer}, with full depth": (None, frontier(DEEP_ROUNDS), NOT_COMPARED),
        "An oracle would be much faster (2.1)": (
            printed((27.06, 17.58), time=True),
            rule_speed(ROUNDS, "oracle", "K"),
            REPORTED,
        ),
        "h = .7 is within .7% of the best setting (4.3)": (
            Paper(0.993, 1.0, ".3f", time=True),
            rule_speed(ROUNDS, "head", "head", at=0.7),
            NOT_COMPARED,
        ),
        "The head takes hardly any time (4.2)": (
            None,
            head_cost(VARIANTS, "specdecpp", "specdecpp:K2", "specdecpp:K4"),
            NOT_COMPARED,
        ),
        "SpecDec++ is faster than plain decoding (abstract)": (
            Paper(2.04, 2.26, time=True),
            plain(MAIN, "specdecpp"),
            REPORTED,
        ),
    }


def falcon_claims() -> dict[str, tuple]:
    seeds = "falcon@k2&falcon@k2-seed1", "falcon@no-csgd&falcon@no-csgd-seed1"
    csgd = printed((3.34, 2.78), bonus=1)
    medusa = printed((3.37, 1.59), (3.70, 1.55), bonus=1)
    eagle = printed((2.95, 2.73), (3.86, 2.97), bonus=1)
    return {
        "CSGD raises tau (table 4, with the tree)": (csgd, ratio(ALIKE_FALCON, *seeds)),
        "CSGD raises tau (table 4, with the tree), in the last million token-steps": (
            csgd,
            ratio("csgd_tau.json", "csgd:tree", "no_csgd:tree"),
            NOT_COMPARED,
        ),
        "The tree raises tau (table 4)": (
            printed((3.34, 2.13), (2.78, 1.64), bonus=1),
            ratio(VARIANTS, "falcon:paper", "falcon:chain"),
        ),
        "k = 2 is better than 3 (table 5)": (
            printed((3.34, 2.52), bonus=1),
            ratio(ALIKE_FALCON, "falcon@k2-tall", "falcon@k3-tall"),
        ),
        "k = 3 is better than 4 (table 5)": (
            printed((2.52, 2.35), bonus=1),
            ratio(ALIKE_FALCON, "falcon@k3-tall", "falcon@k4-tall"),
        ),
        "Falcon's tau is above Medusa's (table 3), at equal nodes": (
            medusa,
            ratio(GPU, "falcon_nocsgd:tree", "medusa:nodes9"),
            NOT_COMPARED,
        ),
        "Falcon's tau is above Medusa's (table 3), as shipped": (
            medusa,
            ratio(MAIN, "falcon", "medusa"),
            NOT_COMPARED,
        ),
        "Falcon's tau is above EAGLE's (table 3), after equal training": (
            eagle,
            ratio(GPU, "falcon_nocsgd:tree", "eagle:tree"),
            NOT_COMPARED,
        ),
        "Falcon's tau is above EAGLE's (table 3), as shipped": (
            eagle,
            ratio(MAIN, "falcon", "eagle"),
            NOT_COMPARED,
        ),
        "Falcon is faster than plain decoding (abstract)": (
            Paper(2.91, 3.51, time=True),
            plain(MAIN, "falcon"),
            REPORTED,
        ),
    }


def ctc_claims() -> dict[str, tuple]:
    transform = printed((3.56, 3.02))
    above = "CTC-drafter's tau is above Medusa's (table 1)"
    size = printed((3.53, 2.78), (3.53, 2.55))
    return {
        "The transform raises tau (table 2)": (
            transform,
            ratio(RANKING, "ctc_drafter:alignments:63", "ctc_drafter:none:63"),
            NOT_COMPARED,
        ),
        "The transform raises tau (table 2), where the blank is in use": (
            transform,
            ratio(GPU, "ctc_lengths:prefixes", "ctc_lengths:none"),
            NOT_COMPARED,
        ),
        "A layer with CTC is better than Medusa's heads (table 2)": (
            printed((3.02, 2.58)),  # of taus, where ours is alpha
            curves_cross("ctc_drafter_before", "medusa_before", "CTC", "Medusa"),
            NOT_COMPARED,
        ),
        f"{above}, CTC loss alone": (
            size,
            ratio(GPU, "ctc_first0:prefixes", "medusa:nodes10"),
        ),
        f"{above}, as shipped, with 63 nodes": (
            size,
            ratio(RANKING, "ctc_drafter:alignments:63", "medusa:63"),
            NOT_COMPARED,
        ),
        f"{above}, as shipped, with five nodes": (
            size,
            ratio(MAIN, "ctc_drafter", "medusa"),
            NOT_COMPARED,
        ),
        "CTC-drafter is faster than Medusa (table 1)": (
            printed((2.16, 2.10), (2.78, 2.13), time=True),
            ratio(MAIN, "ctc_drafter", "medusa"),
            NOT_COMPARED,
        ),
        "Coding is the best of eight categories for both (figure 2)": (
            None,
            rank_of_coding(MAIN, "ctc_drafter", "medusa"),
            REPORTED,
        ),
        "Drafting takes much more of the time than Medusa's (figure 3)": (
            "20.3% and 3.7%",
            time_share(MAIN, "ctc_drafter", "medusa"),
            REPORTED,
        ),
        "CTC-drafter is faster than plain decoding (table 1)": (
            Paper(2.16, 2.78, time=True),
            plain(MAIN, "ctc_drafter"),
            REPORTED,
        ),
    }


CLAIMS = {
    "GLIDE": glide_claims,
    "CAPE": cape_claims,
    "SpecDec++": specdecpp_claims,
    "Falcon": falcon_claims,
    "CTC-drafter": ctc_claims,
}
VERDICTS = ("confirmed", "smaller", "not shown", "the opposite")
VERDICTS += (NOT_COMPARED, REPORTED)


# ----------------------------------------------------------------------- the tables


@functools.cache
def rows_of(paper: str) -> list[Row]:
    return [Row(claim, *others) for claim, others in CLAIMS[paper]().items()]


def table(words: str, old: str) -> str:
    """A table of the page: "all", the claims of a paper, or "PAPER; runs".

    old: the table that it replaces, of which the sentences are kept.
    """
    paper, _, runs = words.partition("; ")
    if words == "all":
        return summary()
    return run_table(rows_of(paper)) if runs else claim_table(rows_of(paper), old)


def summary() -> str:
    """How many claims of each paper have which verdict."""
    rows = []
    for paper in CLAIMS:
        words = [row.verdict.split(":")[0] for row in rows_of(paper)]
        assert set(words) <= set(VERDICTS)
        rows.append([paper, *map(words.count, VERDICTS)])
    papers, *columns = zip(*rows)
    found = [(word, *counts) for word, counts in zip(VERDICTS, columns) if any(counts)]
    totals = [sum(counts) for _, *counts in found]
    heads, *lines = zip(("paper", *papers), *found)
    return report.markdown(heads, [*lines, ("all", *totals)])


def claim_table(rows: list[Row], old: str) -> str:
    """Claims and verdicts, each with the sentence that it had, or a dash."""
    cells = [line.strip("| ").split(" | ") for line in old.strip().splitlines()]
    sentences = {claim: sentence for _, claim, *_, sentence in cells}
    lines = [["", "claim", "paper", "here", "verdict", "in a sentence"], ["---"] * 6]
    for number, row in enumerate(rows, 1):
        figures = [str(row.paper or "-"), row.seen.figure]
        sentence = sentences.get(row.claim, "-")
        lines.append([str(number), row.claim, *figures, row.verdict, sentence])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_table(rows: list[Row]) -> str:
    """What was compared in each row, and how fair that is, without empty columns."""
    heads = ["", "compared", "the paper's figures", "nodes a round", "token-steps"]
    heads += ["at flat cost", "on this CPU", "run"]
    lines = []
    for number, row in enumerate(rows, 1):
        seen = row.seen
        pairs = getattr(row.paper, "pairs", ())
        names = [Path(file).name.partition(".")[0] for file in seen.files]
        several = [
            [f"{theirs} → {ours}" for ours, theirs in pairs],
            [f"{each:.1f}" for each in seen.nodes],
            [f"{each / 1e6:.1f}M" for each in seen.steps],
        ]
        cells = [", ".join(each) or None for each in several]
        links = [f"[{name}]({file})" for name, file in zip(names, seen.files)]
        cells += [seen.flat, seen.cpu, ", ".join(links)]
        lines.append([number, seen.what, *cells])
    columns = [column for column in zip(heads, *lines) if any(column[1:])]
    heads, *lines = zip(*columns)
    head, rule, *body = report.markdown(heads, lines).splitlines()
    return "\n".join([head, rule.replace("-:", "--"), *body])  # text, from the left
