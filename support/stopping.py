"""Compare stop rules on recorded drafts (SpecDec++, Figure 4 and Table 1).

If it is known what a drafter drafts at every place of an answer, and how much of that
the target accepts, then what a stop rule saves and wastes follows without drafting
again. `record` finds this out, for LONGEST tokens at each place. `replay` goes through
an answer from round to round, as the rule would, and counts

    N_target / N       verification rate: target forwards per answer token
    N_discarded / N    discard rate: discarded draft tokens per answer token

from which Eq. 2.2 computes how long the answer takes. A rule of one's own is a function
of a Round and a setting:

    answers = stopping.read("results/rounds_greedy.json.gz")
    rule = lambda each, level: 1 + stopping.first(c < level for c in each.confidence)
    print(stopping.compare(answers, (rule, (0.3, 0.5, 0.7)), "K", cost=0.1))
"""

import functools
import gzip
import itertools
import json
import operator
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

import common
import specdecpp
from support import cli, report

LONGEST = 12  # tokens drafted at each place


# ------------------------------------------------------------------------ the recording


@dataclass
class Round:
    """What is drafted at one place of an answer: m tokens."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # (m,) the maximum of q_draft
    entropy: list[float] = field(default_factory=list)  # (m,) of q_draft, in nats
    accepts: list[float] = field(
        default_factory=list
    )  # (m - 1,) the head's predictions
    agreed: int = 0  # how many of the tokens, from the first on, the target accepts


def round_of(draft: common.Draft) -> Round:
    """The Round of a chain; how many of its tokens are accepted is not known yet."""
    each = Round(draft.tokens.tolist())
    for q_draft in [] if draft.probs is None else draft.probs:  # None if it is empty
        each.confidence.append(float(q_draft.max()))
        each.entropy.append(float(torch.special.entr(q_draft).sum()))
    # The notes hold p^, the product of the predictions so far.
    chances = draft.notes.get("chances", [])
    for chance, before in zip(chances, [1.0, *chances]):
        each.accepts.append(chance / before if before else 0.0)
    return each


def has_head(arm) -> bool:
    """Whether the drafter of an arm has a head that has been trained."""
    drafter = arm.drafter
    return isinstance(drafter, specdecpp.Drafter) and drafter.config.stage == "head"


def longest_chains(arm):
    """A function of a Decoding, which yields an arm's chains of LONGEST tokens.

    Raises UserError if the arm drafts other trees than chains, or copies.
    """
    plain = arm.name.partition("@")[0]  # NAME[:SETTINGS]
    if plain.partition(":")[0] not in cli.CHAINS or "+" in plain:
        methods = " or ".join(cli.CHAINS)
        raise common.UserError(
            f"--sweep: {arm.name} drafts no plain chains: take {methods} first"
        )
    changes = {"gamma": LONGEST}
    if has_head(arm):  # it judges all tokens, but 1 - p^ never exceeds 1
        changes = {"stop": "head", "threshold": 1.0, "max_draft": LONGEST}
    elif arm.module is specdecpp:
        changes["stop"] = "fixed"
    return functools.partial(arm.module.drafts, drafter=arm.drafter, **changes)


def commit_one(decoding: common.Decoding, draft: common.Draft) -> None:
    """Commit what verification puts in the place of the draft's first token.

    That is the first token itself if it is accepted, else a draw from the residual.
    """
    empty = common.chain([], decoding.ids)
    logits, hidden = common.score(decoding.target, decoding.ids, empty, decoding.cache)
    if decoding.do_sample and len(draft.tokens):
        p_target = decoding.process(logits[0]).softmax(-1)
        token = common.draw(p_target, [(int(draft.tokens[0]), draft.probs[0])])
        # Rule out all other tokens, so that `commit` draws this one.
        logits = torch.full_like(logits, float("-inf"))
        logits[0, token] = 0.0
    decoding.commit(empty, logits, hidden)


def join(rounds: list[Round]) -> None:
    """Let a draft go on as the next place's does, once its first token is accepted.

    rounds: of all places of an answer. Only the first token of each has been verified,
        so `agreed` is 0 or 1; afterwards it counts all tokens that are accepted.
    """
    # A draft whose first token is accepted stands where the next place's draft begins.
    # Decoding greedily, the two go on alike, and nothing changes here. When sampling,
    # they have drawn different tokens, from the same q_draft. But only the next place's
    # was verified together with the answer: it was accepted, and is the answer's token,
    # or it was rejected, and the answer's token came from the residual. So that draft
    # is taken, and a replayed round has the distribution of a real one.
    for each, after in reversed(list(itertools.pairwise(rounds))):
        if each.agreed:
            for name in ("tokens", "confidence", "entropy"):
                getattr(each, name)[1:] = getattr(after, name)[: LONGEST - 1]
            each.accepts[1:] = after.accepts[: LONGEST - 2]
            each.agreed += after.agreed


@torch.no_grad()
def record(chains, target, turn: dict) -> list[Round]:
    """The Round at every place of an answer, greedy or sampled.

    chains: of `longest_chains`.
    turn: arguments of target.generate, such as input_ids (1, T).
    """
    decoding = common.start(target, **turn)
    rounds = []
    for draft in chains(decoding):
        commit_one(decoding, draft)
        rounds.append(round_of(draft))
        newest = int(decoding.ids[0, -1])
        rounds[-1].agreed = int(draft.tokens[:1].tolist() == [newest])
    join(rounds)
    return rounds


# ----------------------------------------------------------------------------- the file

# What a value is multiplied by before it is rounded.
SCALES = {"tokens": 1, "confidence": 1000, "entropy": 100, "accepts": 1000}


def as_integers(rounds: list[Round]) -> dict:
    """The rounds of an answer as a file holds them, in lists of integers."""
    data = {"agreed": [each.agreed for each in rounds]}
    for name, scale in SCALES.items():
        rows = [getattr(each, name) for each in rounds]
        data[name] = [[round(scale * value) for value in row] for row in rows]
    return data


def read(path, kind: str = "") -> list[list[Round]]:
    """The answers in a file, each a list with the Round of every place.

    path: of a file of results/, or of `bench.py --sweep --json`.
    kind: take only the answers whose name begins with it, such as "math".
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        data = json.load(file)
    answers = []
    for answer in data.get("sweep", data)["answers"]:
        if answer["name"].startswith(kind):
            rounds = [Round(agreed=count) for count in answer["agreed"]]
            for name, scale in SCALES.items():
                for each, row in zip(rounds, answer[name], strict=True):
                    values = row if scale == 1 else [value / scale for value in row]
                    setattr(each, name, values)
            answers.append(rounds)
    return answers


# ---------------------------------------------------------------------------- the rules


def first(flags) -> int:
    """How many flags stand before the first True."""
    return [*flags, True].index(True)


def products(chances):
    """The product of the first, of the first two, ... of them."""
    return itertools.accumulate(chances, operator.mul)


H = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # settings of a threshold h

# {rule: (function of a Round and a setting, settings)}. The function returns how many
# tokens are drafted; where that is more than the Round holds, all of them are. The head
# has to read a token before it judges it, so one more is drafted by then and submitted
# as well. The other rules judge a token by the q_draft that it is drawn from.
RULES = {
    "K": (lambda each, k: k, (1, 2, 3, 4, 5, 6, 8, 10, 12)),
    "head": (
        lambda each, h: 2 + first(1 - p > h for p in products(each.accepts)),
        H,
    ),
    "product": (
        lambda each, h: 1 + first(1 - p > h for p in products(each.confidence)),
        H,
    ),
    "confidence": (
        lambda each, level: 1 + first(c < level for c in each.confidence),
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    ),
    "entropy": (
        lambda each, most: 1 + first(e > most for e in each.entropy),
        (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0),
    ),
    "oracle": (lambda each, _: each.agreed, ("",)),  # Lemma 2.1
}


def replay(rounds: list[Round], rule, setting) -> tuple[int, int]:
    """(N_target, N_discarded) of an answer whose drafts a rule ends."""
    place = 0
    n_target = 0
    n_discarded = 0
    while place < len(rounds):
        each = rounds[place]
        submitted = min(rule(each, setting), len(each.tokens))
        accepted = min(submitted, each.agreed)
        n_target += 1
        n_discarded += submitted - accepted
        place += accepted + 1
    return n_target, n_discarded


def counts(answers: list[list[Round]], rule) -> Tensor:
    """(N_target, N_discarded) of n answers at all S settings of a rule: (S, n, 2)."""
    function, settings = RULES[rule] if isinstance(rule, str) else rule
    rows = [[replay(each, function, s) for each in answers] for s in settings]
    return torch.tensor(rows, dtype=torch.float64)


def points(answers: list[list[Round]], rule) -> dict[str, tuple[float, float]]:
    """Figure 4: {setting: (N_target / N, N_discarded / N)} of a rule."""
    _, settings = RULES[rule]
    tokens = sum(map(len, answers))  # N
    rates = counts(answers, rule).sum(1) / tokens  # (S, 2)
    return {str(s): tuple(row) for s, row in zip(settings, rates.tolist())}


def times(answers: list[list[Round]], found: Tensor, cost: float) -> Tensor:
    """The time (n,) of each answer, in target forwards, by Eq. 2.2.

    Each is judged with the setting that is best on the other half of the answers (every
    second one), so that no setting is chosen on what it is judged on.

    found: (S, n, 2), of `counts`.
    cost: t_draft / t_target.
    """
    tokens = torch.tensor([len(rounds) for rounds in answers])  # (n,)
    n_target, n_discarded = found.unbind(-1)  # (S, n)
    rates = (n_target / tokens, n_discarded / tokens)
    taken = tokens / specdecpp.throughput(*rates, t_draft=cost, t_target=1.0)  # (S, n)
    odd = torch.arange(len(answers)) % 2 == 1
    for_even = taken[:, odd].sum(1).argmin()
    for_odd = taken[:, ~odd].sum(1).argmin()
    return torch.where(odd, taken[for_odd], taken[for_even])


def faster(answers, ours: Tensor, theirs: Tensor, cost: float) -> tuple:
    """How many times as fast one rule is as another, and a 95% interval over answers.

    ours, theirs: (S, n, 2), of `counts`.
    cost: t_draft / t_target.
    """
    tokens = [len(rounds) for rounds in answers]
    taken = [times(answers, found, cost).tolist() for found in (ours, theirs)]
    return report.paired(*({"tokens": tokens, "seconds": each} for each in taken))


def compare(answers: list[list[Round]], ours, theirs, cost: float) -> tuple:
    """`faster`, of two rules: names of RULES, or (function, settings)."""
    return faster(answers, counts(answers, ours), counts(answers, theirs), cost)


def auc(answers: list[list[Round]], judge) -> float:
    """How well a number tells draft tokens that are accepted from others.

    It is the probability that the number is higher for an accepted first token than for
    a rejected one, 0.5 if it tells nothing.

    judge: a function of a Round, which returns the number for its first token. It is
        asked where a second token was drafted, because the head judges only there.
    """
    rounds = [each for answer in answers for each in answer if len(each.tokens) > 1]
    pairs = [(judge(each), each.agreed > 0) for each in rounds]
    scores, accepted = map(torch.tensor, zip(*pairs))
    above = scores[accepted][:, None] - scores[~accepted]  # every accepted, every other
    return float((above.sign() + 1).double().mean() / 2)


# ---------------------------------------------------------------------------- the sweep


def forward_times(answers: list) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2): seconds of a pass, of a forward, and how Eq. 2.1 fits.

    Eq. 2.1 is T = t_draft N_draft + t_target N_target; R^2 is the share of T's variance
    over answers that it explains. The times are measured, not fitted as in the paper:
    with a fixed K, N_draft is nearly K N_target, and any split of T fits.

    answers: each with `offered` and `target_forwards`, as common.Stats has them, and
        `seconds` spent on "draft" and on "verify". The first draft reads the prompt, so
        its time does not count, and neither do its passes.
    """
    n_draft = torch.tensor([sum(each.offered[1:]) for each in answers]).double()  # (n,)
    n_target = torch.tensor([each.target_forwards for each in answers]).double()
    drafting = torch.tensor(
        [each.seconds.get("draft", 0.0) for each in answers]
    ).double()
    verifying = torch.tensor([each.seconds["verify"] for each in answers]).double()
    t_draft = drafting.sum() / n_draft.sum().clamp(min=1)
    t_target = verifying.sum() / n_target.sum()
    seconds = drafting + verifying  # T
    residual = (t_draft * n_draft + t_target * n_target - seconds).square().sum()
    spread = (seconds - seconds.mean()).square().sum()
    r2 = float(1 - residual / spread) if spread > 0 else None
    return float(t_draft), float(t_target), r2


def sweep(arm, turns: list[dict], answers: list) -> dict:
    """Figure 4, and Eq. 2.3, of the chains of an arm; Ctrl-C ends it early.

    turns: arguments of target.generate for each prompt.
    answers: of the arm to these turns, see `forward_times`.
    Returns {"t_draft_ms", "t_target_ms", "r2", "points": {rule: {setting: [N_target /
    N, N_discarded / N, tokens/s]}}, "answers"}, the latter for `read`, or {} if not
    even one answer was recorded.
    Raises UserError, see `longest_chains`.
    """
    chains = longest_chains(arm)
    recorded = []
    try:
        for turn in tqdm(turns, desc="recording", disable=None):
            recorded.append(record(chains, arm.target, turn))
    except KeyboardInterrupt:
        covered = f"the sweep covers {len(recorded)} answers"
        print(f"bench.py: interrupted; {covered}", file=sys.stderr)
    if not recorded:
        return {}
    t_draft, t_target, r2 = forward_times(answers)
    found = {rule: points(recorded, rule) for rule in RULES}
    if not has_head(arm):
        del found["head"]
    for settings in found.values():
        for setting, rates in settings.items():
            speed = specdecpp.throughput(*rates, t_draft, t_target)
            settings[setting] = [*rates, speed]
    milliseconds = {"t_draft_ms": 1000 * t_draft, "t_target_ms": 1000 * t_target}
    kept = []
    for answer, rounds in zip(answers, recorded):
        kept.append({"name": str(answer.question_id), **as_integers(rounds)})
    return milliseconds | {"r2": r2, "points": found, "answers": kept}
