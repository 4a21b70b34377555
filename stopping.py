"""When to stop drafting, after the fact: rates of every rule from one recording, speed, calibration (SpecDec++).

    N_target / N     verification rate: target forwards per token of the answer
    N_discarded / N  discard rate: draft tokens thrown away per token of the answer

Both are free of the clock (Figure 4); Eq. 2.3 turns them into tokens per second for any pair of forward times.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import cli
import common

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
def record(chains, source, target, input_ids: Tensor, answer: list[int], longest: int = 20) -> list[Round]:
    """Draft `longest` tokens from every place of a greedy answer, at most to its end; costs that many drafter passes.

    Args:
        chains: module of a chain proposer (new_cache, propose), source: its drafter.
        input_ids: (1, T) the prompt. answer: the target's greedy tokens.
    Returns:
        A Round for each token of the answer.
    """
    ids = torch.cat([input_ids, input_ids.new_tensor([answer])], dim=1)
    cache, own, rounds = common.GrowingCache(target.config.get_text_config().num_hidden_layers), None, []
    for place in range(len(answer)):
        end = input_ids.shape[1] + place
        if end - 1 > cache.get_seq_length():
            common.forward(target, ids[:, cache.get_seq_length() : end - 1], cache, logits_to_keep=1)
        own = own or chains.new_cache(source, target)
        count = min(longest, len(answer) - place - 1)  # the bonus token is never drafted
        steps = list(itertools.islice(chains.propose(source, target, ids[:, :end], cache, own), count))
        agreed = next((i for i, step in enumerate(steps) if int(step[0]) != answer[place + i]), count)
        order = steps[agreed][1].argsort(descending=True).tolist() if agreed < count else [answer[place + agreed]]
        q_draft = torch.stack([step[1] for step in steps]).float() if steps else torch.zeros(0, 1)
        hidden = torch.stack([step[2] for step in steps[1:]]) if count > 1 else torch.zeros(0, 1)
        rounds.append(Round(hidden, q_draft.amax(-1).tolist(), (-torch.xlogy(q_draft, q_draft)).sum(-1).tolist(),
                            agreed, order.index(answer[place + agreed])))
    return rounds


def first(flags) -> int:
    """How many tokens a rule drafts, given for each token whether it stops after it; more than all if it never does."""
    return 1 + next((i for i, flag in enumerate(flags) if flag), 10**6)


@torch.no_grad()
def accept_probs(head, rounds: list[Round]) -> list[list[float]]:
    """The head's prediction for each drafted token but the last, a list a round."""
    return [head(each.hidden).float().sigmoid().tolist() if len(each.hidden) else [] for each in rounds]


def replay(rounds: list[Round], lengths: list[int]) -> tuple[int, int]:
    """(N_target, N_discarded) of decoding the answer when a round at place i drafts lengths[i] tokens, or what room
    there is."""
    place = n_target = n_discarded = 0
    while place < len(rounds):
        drafted = min(lengths[place], len(rounds[place].confidence))
        accepted = min(drafted, rounds[place].agreed)
        n_target, n_discarded, place = n_target + 1, n_discarded + drafted - accepted, place + accepted + 1
    return n_target, n_discarded


def points(recordings: list[list[Round]], heads: dict) -> dict[str, dict[str, tuple[float, float]]]:
    """The points of Figure 4, {rule: {setting: (N_target / N, N_discarded / N)}}, and the oracle of Lemma 2.1.

    Args: heads: {name: module from hidden states (n, D) to logits of acceptance (n,)}, each read with every h.
    """
    rules = {"K": {str(k): [[k] * len(rounds) for rounds in recordings] for k in LENGTHS}}
    rules["confidence"] = {str(level): [[first(c < level for c in each.confidence) for each in rounds]
                                        for rounds in recordings] for level in LEVELS}
    rules["entropy"] = {str(most): [[first(e > most for e in each.entropy) for each in rounds]
                                    for rounds in recordings] for most in ENTROPIES}
    for name, head in heads.items():
        chances = [accept_probs(head, rounds) for rounds in recordings]
        rules[name] = {}
        for h in LEVELS:  # the newest token is unjudged, so a rule that stops at token i has drafted i + 1
            rules[name][str(h)] = [[1 + first(1 - product > h for product in itertools.accumulate(each, float.__mul__))
                                    for each in answer] for answer in chances]
    tokens, found = sum(map(len, recordings)), {}
    for name, settings in rules.items():
        for setting, lengths in settings.items():
            counts = [replay(rounds, drafted) for rounds, drafted in zip(recordings, lengths)]
            found.setdefault(name, {})[setting] = tuple(sum(column) / tokens for column in zip(*counts))
    # a token is a disagreement if a round that begins at it accepts nothing; one at the very end costs no round
    oracle = sum(1 + sum(not each.agreed for each in rounds[:-1]) for rounds in recordings)
    return found | {"oracle": {"": (oracle / tokens, 0.0)}}


def fit_times(n_draft, n_target, seconds) -> tuple[float, float, float]:
    """(t_draft, t_target, R^2) of T = t_draft N_draft + t_target N_target (Eq. 2.1), by least squares over answers."""
    counts = torch.tensor([list(n_draft), list(n_target)], dtype=torch.float64).T  # (n, 2)
    seconds = torch.tensor(list(seconds), dtype=torch.float64)
    times = torch.linalg.lstsq(counts, seconds[:, None]).solution[:, 0]
    spread = (seconds - seconds.mean()).square().sum()
    return *times.tolist(), float(1 - (counts @ times - seconds).square().sum() / spread)


def throughput(verification_rate: float, discard_rate: float, t_draft: float, t_target: float) -> float:
    """Modelled tokens per second, the inverse of Eq. 2.3."""
    return 1 / (t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate)


def calibration(predicted: Tensor, actual: Tensor, bins: int = 10) -> tuple[list[tuple[float, float, int]], float]:
    """Reliability bins [(mean prediction, mean label, count)], empty ones left out, and the expected calibration error.

    Args:
        predicted, actual: (M,) acceptance probabilities in [0, 1].
    """
    place = (predicted * bins).long().clamp(max=bins - 1)
    rows = [(float(predicted[place == b].mean()), float(actual[place == b].mean()), int((place == b).sum()))
            for b in place.unique().tolist()]
    return rows, sum(count * abs(p - a) for p, a, count in rows) / len(predicted)


def judged(recordings: list[list[Round]], values) -> tuple[Tensor, Tensor]:
    """(value, accepted) (M,) of each drafted token whose predecessors all agree with the answer.

    Args: values: for each answer and round a list of a value for each of its first drafted tokens.
    """
    pairs = [(value, float(i < each.agreed)) for rounds, answer in zip(recordings, values)
             for each, row in zip(rounds, answer) for i, value in enumerate(row[: each.agreed + 1])]
    return torch.tensor(pairs).T.unbind() if pairs else (torch.zeros(0), torch.zeros(0))


def sweep(chains, source, target, turns: list[dict], heads: dict, measured) -> dict:
    """Figure 4, Eq. 2.1 and 2.3, and how well confidence and heads predict acceptance, for bench.py --sweep.

    Args:
        turns: {"input_ids" (1, T), "answer"} each. heads: {name: (head, w_rej)}; a head that was trained with
            w_rej > 1 is low on purpose, its sigmoid nears P / (P + w_rej (1 - P)); adding log w_rej to its logits asks
            for P itself. measured: (draft passes, target forwards, seconds) of timed answers.
    Returns:
        {"t_draft_ms", "t_target_ms", "r2", "points": {rule: {setting: [N_target / N, N_discarded / N, tokens/s]}},
        "calibration": {head: {"ece", "ece_reweighted"}}, "acceptance_by_confidence": [[confidence, share, count]]}.
    """
    recordings = [record(chains, source, target, turn["input_ids"], turn["answer"])
                  for turn in tqdm(turns, desc="recording", disable=None)]
    t_draft, t_target, r2 = fit_times(*zip(*measured))
    found = points(recordings, {name: head for name, (head, _) in heads.items()})
    errors = {}
    for name, (head, w_rej) in heads.items():
        chances, accepted = judged(recordings, [accept_probs(head, rounds) for rounds in recordings])
        corrected = (torch.logit(chances.clamp(1e-6, 1 - 1e-6)) + math.log(w_rej)).sigmoid()
        errors[name] = {"ece": calibration(chances, accepted)[1], "ece_reweighted": calibration(corrected, accepted)[1]}
    confidence = judged(recordings, [[each.confidence for each in rounds] for rounds in recordings])
    return {"t_draft_ms": 1000 * t_draft, "t_target_ms": 1000 * t_target, "r2": r2, "calibration": errors,
            "points": {rule: {setting: [*rates, throughput(*rates, t_draft, t_target)]
                              for setting, rates in settings.items()} for rule, settings in found.items()},
            "acceptance_by_confidence": [list(row) for row in calibration(*confidence)[0]]}


def sweep_arms(arms: list, target, turns: list[dict], folders: list[str]) -> dict:
    """`sweep` of the chains that the first of bench.py's arms drafts, with its head, if any, and those in `folders`.

    Raises:
        ValueError: the arm's method drafts no chains, or a folder holds no head for it.
    """
    arm = arms[0]
    chains = arm.base.get("base") or cli.chain_proposer(arm.module.__name__)
    heads = {"head": arm.kwargs.get("drafter")}
    heads |= {folder.rstrip("/").rpartition("/")[2]: common.load_drafter(arm.module.Drafter, folder, target)
              for folder in folders}
    heads = {name: (head, head.config.w_rej) for name, head in heads.items() if not getattr(head, "distils", True)}
    measured = [(answer.drafted, answer.rounds, answer.decode_seconds)
                for each in arms if each.module is arm.module and each.base == arm.base for answer in each.answers]
    return sweep(chains, arm.base.get("base_drafter") or arm.kwargs["drafter"], target, turns, heads, measured)
