"""When to stop drafting, after the fact: rates of every rule from one recording, speed, calibration
(SpecDec++).

    N_target / N     verification rate: target forwards per token of the answer
    N_discarded / N  discard rate: draft tokens thrown away per token of the answer

Both are free of the clock (Figure 4); Eq. 2.3 turns them into tokens per second for any pair of
forward times.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import common
from support import cli

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 14)
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of h, and of the draft's confidence
ENTROPIES = (0.5, 1.0, 1.5, 2.0, 3.0)


class Round(NamedTuple):
    """What was drafted from one place of a greedy answer, m tokens."""

    hidden: Tensor  # (m - 1, D) what a head reads about each drafted token but the last
    confidence: list[float]  # (m,) largest probability of q_draft
    entropy: list[float]  # (m,) of q_draft, in nats
    agreed: int  # how many of the drafted tokens the target would accept
    rank: int  # of the target's token in the drafter's order where it first disagreed; 0 if nowhere


@torch.no_grad()
def record(
    chains, source, target, input_ids: Tensor, answer: list[int], longest: int = 20
) -> list[Round]:
    """Draft `longest` tokens from every place of a greedy answer, at most to its end; costs that
    many drafter passes.

    Args:
        chains: module of a chain proposer (new_memory, propose), source: its drafter.
        input_ids: (1, T) the prompt. answer: the target's greedy tokens.
    Returns:
        A Round for each token of the answer.
    """
    ids = torch.cat([input_ids, input_ids.new_tensor([answer])], dim=1)
    cache, memory, rounds = (
        common.GrowingCache(target.config.get_text_config().num_hidden_layers),
        None,
        [],
    )
    for place in range(len(answer)):
        end = input_ids.shape[1] + place
        if end - 1 > cache.get_seq_length():
            common.forward(
                target, ids[:, cache.get_seq_length() : end - 1], cache, logits_to_keep=1
            )
        memory = memory or chains.new_memory(source, target)
        count = min(longest, len(answer) - place - 1)  # the bonus token is never drafted
        steps = list(
            itertools.islice(chains.propose(source, target, ids[:, :end], cache, memory), count)
        )
        agreed = next(
            (i for i, step in enumerate(steps) if int(step[0]) != answer[place + i]), count
        )
        order = (
            steps[agreed][1].argsort(descending=True).tolist()
            if agreed < count
            else [answer[place + agreed]]
        )
        q_draft = torch.stack([step[1] for step in steps]).float() if steps else torch.zeros(0, 1)
        hidden = torch.stack([step[2] for step in steps[1:]]) if count > 1 else torch.zeros(0, 1)
        rounds.append(
            Round(
                hidden,
                q_draft.amax(-1).tolist(),
                (-torch.xlogy(q_draft, q_draft)).sum(-1).tolist(),
                agreed,
                order.index(answer[place + agreed]),
            )
        )
    return rounds


def first(flags) -> int:
    """How many tokens a rule drafts, given for each token whether it stops after it; more than all
    if it never does."""
    return 1 + next((i for i, flag in enumerate(flags) if flag), 10**6)


@torch.no_grad()
def accept_probs(head, rounds: list[Round]) -> list[list[float]]:
    """The head's prediction for each drafted token but the last, a list a round."""
    return [
        head(each.hidden).float().sigmoid().tolist() if len(each.hidden) else [] for each in rounds
    ]


def replay(rounds: list[Round], lengths: list[int]) -> tuple[int, int]:
    """(N_target, N_discarded) of decoding the answer when a round at place i drafts lengths[i]
    tokens, or what room there is."""
    place = n_target = n_discarded = 0
    while place < len(rounds):
        drafted = min(lengths[place], len(rounds[place].confidence))
        accepted = min(drafted, rounds[place].agreed)
        n_target, n_discarded, place = (
            n_target + 1,
            n_discarded + drafted - accepted,
            place + accepted + 1,
        )
    return n_target, n_discarded


def points(recordings: list[list[Round]], heads: dict) -> dict[str, dict[str, tuple[float, float]]]:
    """The points of Figure 4, {rule: {setting: (N_target / N, N_discarded / N)}}, and the oracle of
    Lemma 2.1.

    Args: heads: {name: module from hidden states (n, D) to logits of acceptance (n,)}, each read
    with every h.
    """
    rules = {"K": {str(k): [[k] * len(rounds) for rounds in recordings] for k in LENGTHS}}
    rules["confidence"] = {
        str(level): [
            [first(c < level for c in each.confidence) for each in rounds] for rounds in recordings
        ]
        for level in LEVELS
    }
    rules["entropy"] = {
        str(most): [
            [first(e > most for e in each.entropy) for each in rounds] for rounds in recordings
        ]
        for most in ENTROPIES
    }
    for name, head in heads.items():
        chances = [accept_probs(head, rounds) for rounds in recordings]
        rules[name] = {}
        for h in (
            LEVELS
        ):  # the newest token is unjudged, so a rule that stops at token i has drafted i + 1
            rules[name][str(h)] = [
                [
                    1
                    + first(
                        1 - product > h for product in itertools.accumulate(each, float.__mul__)
                    )
                    for each in answer
                ]
                for answer in chances
            ]
    tokens, found = sum(map(len, recordings)), {}
    for name, settings in rules.items():
        for setting, lengths in settings.items():
            counts = [replay(rounds, drafted) for rounds, drafted in zip(recordings, lengths)]
            found.setdefault(name, {})[setting] = tuple(
                sum(column) / tokens for column in zip(*counts)
            )
    # a token is a disagreement if a round that begins at it accepts nothing; one at the very end
    # costs no round
    oracle = sum(1 + sum(not each.agreed for each in rounds[:-1]) for rounds in recordings)
    return found | {"oracle": {"": (oracle / tokens, 0.0)}}


def fit_times(n_draft, n_target, seconds) -> tuple[float, float, float]:
    """(t_draft, t_target, R^2) of T = t_draft N_draft + t_target N_target (Eq. 2.1), by least
    squares over answers."""
    counts = torch.tensor([list(n_draft), list(n_target)], dtype=torch.float64).T  # (n, 2)
    seconds = torch.tensor(list(seconds), dtype=torch.float64)
    times = torch.linalg.lstsq(counts, seconds[:, None]).solution[:, 0]
    spread = (seconds - seconds.mean()).square().sum()
    return *times.tolist(), float(1 - (counts @ times - seconds).square().sum() / spread)


def forward_times(answers) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2) by fit_times; by the drafting timer, R^2 None, where counts cannot
    tell them apart.

    With one fixed K, N_draft is K N_target in every answer, and any split of the time fits.

    Args: answers: (N_draft, N_target, seconds, seconds spent drafting) each, as `measured` has
    them.
    """
    n_draft, n_target, seconds, drafting = zip(*answers)
    counts = torch.tensor([n_draft, n_target], dtype=torch.float64).T  # (n, 2)
    if len(answers) > 2 and torch.linalg.cond(counts / counts.norm(dim=0).clamp(min=1)) < 30:
        fitted = fit_times(n_draft, n_target, seconds)
        if min(fitted[:2]) > 0:
            return fitted
    return (
        sum(drafting) / max(1, sum(n_draft)),
        (sum(seconds) - sum(drafting)) / max(1, sum(n_target)),
        None,
    )


def throughput(
    verification_rate: float, discard_rate: float, t_draft: float, t_target: float
) -> float:
    """Modelled tokens per second, the inverse of Eq. 2.3."""
    return 1 / (t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate)


def calibration(
    predicted: Tensor, actual: Tensor, bins: int = 10
) -> tuple[list[tuple[float, float, int]], float]:
    """Reliability bins [(mean prediction, mean label, count)], empty ones left out, and the
    expected calibration error.

    Args:
        predicted, actual: (M,) acceptance probabilities in [0, 1].
    """
    place = (predicted * bins).long().clamp(max=bins - 1)
    rows = [
        (
            float(predicted[place == b].mean()),
            float(actual[place == b].mean()),
            int((place == b).sum()),
        )
        for b in place.unique().tolist()
    ]
    return rows, sum(count * abs(p - a) for p, a, count in rows) / max(1, len(predicted))


def judged(recordings: list[list[Round]], values) -> tuple[Tensor, Tensor]:
    """(value, accepted) (M,) of each drafted token whose predecessors all agree with the answer.

    Args: values: for each answer and round a list of a value for each of its first drafted tokens.
    """
    pairs = [
        (value, float(i < each.agreed))
        for rounds, answer in zip(recordings, values)
        for each, row in zip(rounds, answer)
        for i, value in enumerate(row[: each.agreed + 1])
    ]
    return torch.tensor(pairs).T.unbind() if pairs else (torch.zeros(0), torch.zeros(0))


def sweep(chains, source, heads: dict, target, turns: list[dict], answers) -> dict:
    """Figure 4, Eq. 2.1 and 2.3, and how well confidence and heads predict acceptance, for bench.py
    --sweep.

    Args:
        chains, source, heads: as from chain_and_heads. A head that was trained with w_rej > 1 is
            low on purpose, its sigmoid nears P / (P + w_rej (1 - P)); adding log w_rej to its
            logits asks for P itself.
        turns: {"input_ids" (1, T), "answer"} each. answers: timed ones, as for forward_times.
    Returns:
        {"t_draft_ms", "t_target_ms", "r2", "points": {rule: {setting: [N_target / N, N_discarded /
        N, tokens/s]}}, "calibration": {head: {"ece", "ece_reweighted", "bins", "bins_reweighted",
        "w_rej", "head_depth"}}, with bins as of `calibration`, "acceptance_by_confidence":
        [[confidence, share, count]]}. Ctrl-C ends the recording early.
    """
    recordings = []
    try:
        for turn in tqdm(turns, desc="recording", disable=None):
            recordings.append(record(chains, source, target, turn["input_ids"], turn["answer"]))
    except KeyboardInterrupt:
        print(f"the sweep is of {len(recordings)} answers, interrupted", file=sys.stderr)
        if not recordings:
            return {}
    t_draft, t_target, r2 = forward_times(answers)
    found, errors = points(recordings, heads), {}
    for name, head in heads.items():
        chances, accepted = judged(
            recordings, [accept_probs(head, rounds) for rounds in recordings]
        )
        corrected = (
            torch.logit(chances.clamp(1e-6, 1 - 1e-6)) + math.log(head.config.w_rej)
        ).sigmoid()
        (bins, ece), (bins_reweighted, ece_reweighted) = (
            calibration(p, accepted) for p in (chances, corrected)
        )
        errors[name] = {
            "ece": ece,
            "ece_reweighted": ece_reweighted,
            "bins": [*map(list, bins)],
            "bins_reweighted": [*map(list, bins_reweighted)],
            "w_rej": head.config.w_rej,
            "head_depth": head.config.head_depth,
        }
    confidence = judged(recordings, [[each.confidence for each in rounds] for rounds in recordings])
    return {
        "t_draft_ms": 1000 * t_draft,
        "t_target_ms": 1000 * t_target,
        "r2": r2,
        "calibration": errors,
        "points": {
            rule: {
                setting: [*rates, throughput(*rates, t_draft, t_target)]
                for setting, rates in settings.items()
            }
            for rule, settings in found.items()
        },
        "acceptance_by_confidence": [list(row) for row in calibration(*confidence)[0]],
    }


def measured(arms: list) -> list[tuple]:
    """What forward_times fits: the answers of those of bench.py's arms that draft with what the
    first one does.

    A drafter pass adds a level to the draft; CAPE's extras, which answer.drafted counts too, cost
    none. The first draft of an answer is timed with its prefill.
    """
    return [
        (
            sum(answer.offered[1:]),
            answer.rounds,
            answer.decode_seconds,
            answer.timers.get("draft", 0.0),
        )
        for arm in arms
        if arm.drafters == arms[0].drafters and arm.module is arms[0].module
        for answer in arm.answers
    ]


def chain_and_heads(arm, target, folders: list[str]) -> tuple:
    """What an arm of bench.py drafts with, and the heads that judge it: its own, if it has one, and
    those in `folders`.

    Returns:
        (module of the chain proposer, its drafter, {name: head}) for `sweep`.
    Raises:
        ValueError: the method drafts no chains, or a folder holds no trained head for this draft
            model.
    """
    drafter, chains, source = (
        arm.kwargs.get("drafter"),
        arm.base.get("base"),
        arm.base.get("base_drafter"),
    )
    if chains is None:
        chains = cli.chain_proposer(getattr(arm.module, "__name__", arm.name))
        named = getattr(drafter.config, "draft_model", "")
        source = arm.kwargs.get("draft_model") or (
            arm.module.load_draft_model(named, target) if named else drafter
        )
    kind = bool(arm.base), not arm.base and source is not drafter

    def fits(head) -> bool:
        if getattr(head, "distils", True) or kind != (
            bool(head.config.base),
            bool(head.config.draft_model),
        ):
            return False  # no head, an untrained one, or one that was trained on something else
        theirs, ours = (
            {name: x for name, x in each.state_dict().items() if not name.startswith("head.")}
            for each in (head, drafter)
        )
        return theirs.keys() == ours.keys() and all(
            torch.equal(x, ours[name]) for name, x in theirs.items()
        )

    heads = {"head": drafter} if fits(drafter) else {}
    for folder in folders:
        head = (
            common.load_drafter(arm.module.Drafter, folder, target)
            if hasattr(arm.module, "Drafter")
            else None
        )
        if not fits(head):
            raise ValueError(
                f"--sweep {folder}: no acceptance head trained on the draft model of {arm.name}; "
                "give --sweep folders of --stage head --init DIR, the same DIR for all"
            )
        name = folder.rstrip("/").rpartition("/")[2]
        heads[folder if name in {"K", "confidence", "entropy", "oracle", *heads} else name] = head
    return chains, source, heads
