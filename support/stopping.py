"""Compare stop rules (SpecDec++, Figure 4).

`sweep` drafts once at every place of some greedy answers. From this record
it computes two rates for every stop rule, without drafting again:

    N_target / N       verification rate: target forwards per answer token
    N_discarded / N    discard rate: discarded draft tokens per answer token

Eq. 2.3 turns them into tokens per second, given the times of a forward.
The paper's rules are fixed K and a head with threshold h. Two more stop
after a token with a small maximum (confidence) or a large entropy of q_draft.
"""

import itertools
import sys
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import common
import specdecpp
from support import cli

LONGEST = 20  # tokens drafted at each place


# ------------------------------------------------------------------------------- the recording


@dataclass
class Round:
    """What is drafted at one place of a greedy answer: m tokens."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # (m,) the maximum of q_draft
    entropy: list[float] = field(default_factory=list)  # (m,) of q_draft, in nats
    chances: list[float] = field(default_factory=list)  # (m - 1,) p^ of Algorithm 2
    agreed: int = 0  # how many of the tokens the target would accept


def round_of(steps, head=None) -> Round:
    """The Round of a proposer's steps (token (1,), q_draft (V,), hidden (D,))."""
    each = Round()
    if head is not None:
        never = 1.0  # no probability exceeds it
        steps = specdecpp.until_stop(steps, head, never, each.chances)
    for token, q_draft, _ in steps:
        each.tokens.append(int(token))
        each.confidence.append(float(q_draft.max()))
        each.entropy.append(float(torch.special.entr(q_draft).sum()))
    return each


@torch.no_grad()
def record(chains, source, head, target, turn: dict) -> list[Round]:
    """The Round at every place of a greedy answer, with up to LONGEST tokens.

    Args:
        chains, source, head: as `chain_of` returns them.
        turn: arguments of target.generate, such as input_ids (1, T).
    """
    # 1. Draft at each place, and commit one token of plain decoding.
    decoding = common.open_decoding(target, **turn)
    memory = chains.Memory(source, target)
    rounds = []
    while not decoding.done:
        steps = chains.propose(source, decoding, memory)
        steps = itertools.islice(steps, min(LONGEST, decoding.room))
        rounds.append(round_of(steps, head))
        decoding.verify(common.chain([], decoding.ids))
    # 2. Compare the drafts with the answer.
    answer = decoding.ids[0, -len(rounds) :].tolist()
    for place, each in enumerate(rounds):
        each.agreed = first(a != b for a, b in zip(each.tokens, answer[place:]))
    return rounds


def chain_of(arm) -> tuple:
    """The module of an arm, what it drafts with, and its trained head or None.

    Raises: UserError: the arm drafts other trees than chains, or copies.
    """
    if arm.module.__name__ not in cli.CHAINS or arm.copies:
        methods = " or ".join(cli.CHAINS)
        raise common.UserError(f"--sweep: {arm.name} drafts no plain chains: take {methods} first")
    drafter = arm.kwargs["drafter"]
    trained = isinstance(drafter, specdecpp.Drafter) and drafter.config.stage == "head"
    return arm.module, drafter, drafter.head if trained else None


# ----------------------------------------------------------------------------------- the rules


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


# ----------------------------------------------------------------------------------- the sweep


def forward_times(answers: list[common.Stats]) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2): seconds of a forward, and how well Eq. 2.1 gives T.

    Eq. 2.1 is T = t_draft N_draft + t_target N_target; R^2 is the share of
    T's variance over answers that it explains. The times are measured, not
    fitted as in the paper: with fixed K, N_draft is nearly K N_target and any
    split of T fits. The first draft, timed with the prefill, is left out.
    """
    n_draft = torch.tensor([sum(stats.offered[1:]) for stats in answers]).double()  # (n,)
    n_target = torch.tensor([stats.target_forwards for stats in answers]).double()
    drafting = torch.tensor([stats.seconds.get("draft", 0.0) for stats in answers]).double()
    verifying = torch.tensor([stats.seconds["verify"] for stats in answers]).double()
    t_draft = drafting.sum() / n_draft.sum().clamp(min=1)
    t_target = verifying.sum() / n_target.sum()
    seconds = drafting + verifying  # T
    residual = (t_draft * n_draft + t_target * n_target - seconds).square().sum()
    spread = (seconds - seconds.mean()).square().sum()
    r2 = float(1 - residual / spread) if spread > 0 else None
    return float(t_draft), float(t_target), r2


def sweep(arm, target, turns: list[dict], answers: list[common.Stats]) -> dict:
    """Figure 4, and Eq. 2.3, of the chains of an arm; Ctrl-C ends it early.

    Args:
        turns: arguments of target.generate for each prompt.
        answers: of the arm to these turns, timed.
    Returns:
        {"t_draft_ms", "t_target_ms", "r2",
        "points": {rule: {setting: [N_target / N, N_discarded / N, tokens/s]}}}
    """
    chains, source, head = chain_of(arm)
    recordings = []
    try:
        for turn in tqdm(turns, desc="recording", disable=None):
            recordings.append(record(chains, source, head, target, turn))
    except KeyboardInterrupt:
        print(f"bench.py: interrupted; the sweep covers {len(recordings)} answers", file=sys.stderr)
    if not recordings:
        return {}
    t_draft, t_target, r2 = forward_times(answers)
    found = points(recordings)
    if head is None:
        del found["head"]
    for settings in found.values():
        for setting, rates in settings.items():
            settings[setting] = [*rates, specdecpp.throughput(*rates, t_draft, t_target)]
    return {"t_draft_ms": 1000 * t_draft, "t_target_ms": 1000 * t_target, "r2": r2, "points": found}
