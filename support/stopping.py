"""Compare stop rules (SpecDec++, Figure 4).

`sweep` records what a drafter would draft at every place of some greedy answers, twenty
tokens each time. From this record it computes two rates for every stop rule, without
drafting again:

    N_target / N       verification rate: target forwards per answer token
    N_discarded / N    discard rate: discarded draft tokens per answer token

Eq. 2.3 turns them into tokens per second, given the times of a pass and of a forward.
The paper's rules are a fixed K and a head with a threshold h. Two more stop after a
token whose q_draft has a small maximum (confidence) or a large entropy.
"""

import functools
import sys
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import common
import specdecpp
from support import cli

LONGEST = 20  # tokens drafted at each place


# --------------------------------------------------------------------- the recording


@dataclass
class Round:
    """What is drafted at one place of a greedy answer: m tokens."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # (m,) the maximum of q_draft
    entropy: list[float] = field(default_factory=list)  # (m,) of q_draft, in nats
    chances: list[float] = field(default_factory=list)  # (m - 1,) p^ of Algorithm 2
    agreed: int = 0  # how many of the tokens the target would accept


def round_of(draft: common.Draft) -> Round:
    """The Round of a chain; how many of its tokens agree is not known yet."""
    each = Round(draft.tokens.tolist(), chances=draft.notes.get("chances", []))
    for q_draft in [] if draft.probs is None else draft.probs:  # None if it is empty
        each.confidence.append(float(q_draft.max()))
        each.entropy.append(float(torch.special.entr(q_draft).sum()))
    return each


def has_head(arm) -> bool:
    """Whether the drafter of an arm has a head that has been trained."""
    drafter = arm.drafter
    return isinstance(drafter, specdecpp.Drafter) and drafter.config.stage == "head"


def longest_chains(arm):
    """A function of a Decoding, which yields the chains of an arm, LONGEST tokens each.

    Raises UserError if the arm drafts other trees than chains, or copies.
    """
    plain = arm.name.partition("@")[0]  # NAME[:SETTINGS]
    if plain.partition(":")[0] not in cli.CHAINS or "+" in plain:
        methods = " or ".join(cli.CHAINS)
        raise common.UserError(f"--sweep: {arm.name} drafts no plain chains: take {methods} first")
    changes = {"gamma": LONGEST}
    if has_head(arm):  # it judges all tokens, but 1 - p^ never exceeds 1
        changes = {"stop": "head", "threshold": 1.0, "max_draft": LONGEST}
    elif arm.module is specdecpp:
        changes["stop"] = "fixed"
    return functools.partial(arm.module.drafts, drafter=arm.drafter, **changes)


@torch.no_grad()
def record(chains, target, turn: dict) -> list[Round]:
    """The Round at every place of a greedy answer, with up to LONGEST tokens.

    chains: of `longest_chains`.
    turn: arguments of target.generate, such as input_ids (1, T).
    """
    decoding = common.start(target, **turn)
    rounds = []
    for draft in chains(decoding):
        rounds.append(round_of(draft))
        # What is verified is an empty draft: it commits one token of plain decoding,
        # and the next draft begins one place later.
        decoding.verify(common.chain([], decoding.ids))
    # Compare the drafts with the answer.
    answer = decoding.ids[0, -len(rounds) :].tolist()
    for place, each in enumerate(rounds):
        each.agreed = first(a != b for a, b in zip(each.tokens, answer[place:]))
    return rounds


# ------------------------------------------------------------------------- the rules


def first(flags) -> int:
    """How many flags stand before the first True."""
    return [*flags, True].index(True)


# {rule: (function of a Round and a setting, settings)}. The function returns how
# many tokens are drafted; where that is more than the Round holds, all of them are.
RULES = {
    "K": (lambda each, k: k, (1, 2, 3, 4, 6, 8, 10, 12, 14)),
    "confidence": (
        lambda each, level: 1 + first(c < level for c in each.confidence),
        (0.1, 0.3, 0.5, 0.7, 0.9),
    ),
    "entropy": (
        lambda each, most: 1 + first(e > most for e in each.entropy),
        (0.5, 1.0, 1.5, 2.0, 3.0),
    ),
    "head": (  # the newest token is unjudged: one more is drafted
        lambda each, h: 2 + first(1 - chance > h for chance in each.chances),
        (0.1, 0.3, 0.5, 0.7, 0.9),
    ),
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


def points(recordings: list[list[Round]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Figure 4: {rule: {setting: (N_target / N, N_discarded / N)}}."""
    tokens = sum(len(rounds) for rounds in recordings)  # N
    found = {}
    for name, (rule, settings) in RULES.items():
        found[name] = {}
        for setting in settings:
            counts = [replay(rounds, rule, setting) for rounds in recordings]
            n_target, n_discarded = map(sum, zip(*counts))
            found[name][str(setting)] = (n_target / tokens, n_discarded / tokens)
    agrees = [[each.agreed > 0 for each in rounds] for rounds in recordings]
    n_target = sum(map(specdecpp.oracle, agrees))
    return found | {"oracle": {"": (n_target / tokens, 0.0)}}


# ------------------------------------------------------------------------- the sweep


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
    drafting = torch.tensor([each.seconds.get("draft", 0.0) for each in answers]).double()
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
    Returns {"t_draft_ms", "t_target_ms", "r2", "points": {rule: {setting: [N_target / N,
    N_discarded / N, tokens/s]}}}, or {} if not even one answer was recorded.
    Raises UserError, see `longest_chains`.
    """
    chains = longest_chains(arm)
    recordings = []
    try:
        for turn in tqdm(turns, desc="recording", disable=None):
            recordings.append(record(chains, arm.target, turn))
    except KeyboardInterrupt:
        covered = f"the sweep covers {len(recordings)} answers"
        print(f"bench.py: interrupted; {covered}", file=sys.stderr)
    if not recordings:
        return {}
    t_draft, t_target, r2 = forward_times(answers)
    found = points(recordings)
    if not has_head(arm):
        del found["head"]
    for settings in found.values():
        for setting, rates in settings.items():
            speed = specdecpp.throughput(*rates, t_draft, t_target)
            settings[setting] = [*rates, speed]
    times = {"t_draft_ms": 1000 * t_draft, "t_target_ms": 1000 * t_target, "r2": r2}
    return times | {"points": found}
