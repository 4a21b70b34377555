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
import operator
import sys
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import common
import specdecpp
from support import cli

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 14)  # K
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of h, and of the confidence
ENTROPIES = (0.5, 1.0, 1.5, 2.0, 3.0)  # nats
LONGEST = 20  # tokens drafted at each place


# ------------------------------------------------------------------------------- the recording


@dataclass
class Round:
    """What is drafted at one place of a greedy answer: m tokens."""

    tokens: list[int]
    confidence: list[float]  # (m,) the largest probability of q_draft
    entropy: list[float]  # (m,) of q_draft, in nats
    chances: list[float] = field(default_factory=list)  # (m - 1,) acceptance
    agreed: int = 0  # how many of the tokens the target would accept


def round_of(steps: list, head=None) -> Round:
    """The Round of a proposer's steps (token (1,), q_draft (V,), hidden)."""
    if not steps:
        return Round([], [], [])
    q_draft = torch.stack([q for _, q, _ in steps]).float()  # (m, V)
    hidden = torch.stack([state for _, _, state in steps])  # (m, D), one token earlier
    return Round(
        tokens=[int(token) for token, _, _ in steps],
        confidence=q_draft.amax(-1).tolist(),
        entropy=torch.special.entr(q_draft).sum(-1).tolist(),
        chances=head(hidden[1:]).sigmoid().tolist() if head else [],
    )


@torch.no_grad()
def record(chains, source, head, target, turn: dict) -> list[Round]:
    """Draft up to LONGEST tokens at every place of a greedy answer.

    Args:
        chains, source, head: as `chain_of` returns them.
        turn: arguments of target.generate, such as input_ids (1, T).
    Returns:
        A Round for each token of the answer.
    """
    decoding = common.open_decoding(target, **turn)
    memory = chains.Memory(source, target)
    rounds = []
    while not decoding.done:
        steps = chains.propose(source, decoding, memory)
        steps = itertools.islice(steps, min(LONGEST, decoding.room))
        rounds.append(round_of(list(steps), head))
        decoding.verify(common.chain([], decoding.ids))  # commits one token
    answer = decoding.ids[0, -len(rounds) :].tolist()
    for place, each in enumerate(rounds):
        same = itertools.starmap(operator.eq, zip(each.tokens, answer[place:]))
        each.agreed = len(list(itertools.takewhile(bool, same)))
    return rounds


def chain_of(arm) -> tuple:
    """What drafts in an arm of support/arms.py.

    Returns: the method's module, what it drafts with, and the acceptance head
        that was trained on it, or None.
    Raises: Mistake: the arm drafts more than chains, or none.
    """
    if arm.module.__name__ not in cli.CHAINS or arm.copies:
        methods = " or ".join(cli.CHAINS)
        raise common.Mistake(f"--sweep: {arm.name} drafts no plain chains: take {methods} first")
    drafter = arm.kwargs["drafter"]
    draft_model = arm.kwargs.get("draft_model")
    head = None
    if isinstance(drafter, specdecpp.Drafter) and drafter.config.stage == "head":
        if draft_model is None or drafter.config.model == specdecpp.identity(draft_model):
            head = drafter.head
    return arm.module, draft_model or drafter, head


# ----------------------------------------------------------------------------------- the rules


def first(flags) -> int:
    """Draft length of a rule that stops after the first True, else 10**6."""
    for place, flag in enumerate(flags):
        if flag:
            return place + 1
    return 10**6


def lengths(each: Round) -> dict[tuple[str, str], int]:
    """How many tokens every rule drafts here, {(rule, setting): length}."""
    found = {("K", str(k)): k for k in LENGTHS}
    for level in LEVELS:
        found["confidence", str(level)] = first(c < level for c in each.confidence)
    for most in ENTROPIES:
        found["entropy", str(most)] = first(e > most for e in each.entropy)
    products = list(itertools.accumulate(each.chances, operator.mul))
    for h in LEVELS:  # the newest token is unjudged: one more is drafted
        found["head", str(h)] = 1 + first(1 - product > h for product in products)
    return found


def replay(rounds: list[Round], drafted: list[int]) -> tuple[int, int]:
    """(N_target, N_discarded) of an answer with drafted[i] tokens at place i.

    Near the end of the answer fewer tokens are recorded and drafted.
    """
    place = 0
    n_target = 0
    n_discarded = 0
    while place < len(rounds):
        submitted = min(drafted[place], len(rounds[place].tokens))
        accepted = min(submitted, rounds[place].agreed)
        n_target += 1
        n_discarded += submitted - accepted
        place += accepted + 1
    return n_target, n_discarded


def points(recordings: list[list[Round]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Figure 4: {rule: {setting: (N_target / N, N_discarded / N)}}."""
    tokens = sum(len(rounds) for rounds in recordings)  # N
    tables = [[lengths(each) for each in rounds] for rounds in recordings]
    found = {}
    for rule, setting in tables[0][0]:
        n_target = 0
        n_discarded = 0
        for rounds, table in zip(recordings, tables):
            forwards, discarded = replay(rounds, [row[rule, setting] for row in table])
            n_target += forwards
            n_discarded += discarded
        found.setdefault(rule, {})[setting] = (n_target / tokens, n_discarded / tokens)
    n_target = 0
    for rounds in recordings:
        n_target += specdecpp.oracle([each.agreed > 0 for each in rounds])
    return found | {"oracle": {"": (n_target / tokens, 0.0)}}


# ----------------------------------------------------------------------------------- the sweep


def forward_times(answers: list[common.Stats]) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2): measured seconds of a forward, fit of Eq. 2.1.

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
    """Figure 4, and Eq. 2.3; Ctrl-C ends it early.

    Args:
        arm: of support/arms.py; its chains are recorded.
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
    found = {}
    for rule, settings in points(recordings).items():
        if rule == "head" and head is None:
            continue
        found[rule] = {}
        for setting, rates in settings.items():
            speed = specdecpp.throughput(*rates, t_draft, t_target)
            found[rule][setting] = [*rates, speed]
    return {"t_draft_ms": 1000 * t_draft, "t_target_ms": 1000 * t_target, "r2": r2, "points": found}
