"""When to stop drafting, after the fact: rates of every rule from one recording, times, calibration (SpecDec++).

    N_target / N     verification rate: target forwards per token of the answer
    N_discarded / N  discard rate: draft tokens thrown away per token of the answer

Both are free of the clock; Eq. 2.3 turns them into tokens per second for any pair of forward times.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import common
import torch
from torch import Tensor


class Round(NamedTuple):
    """What could be drafted from one place of a greedy answer."""

    accept_probs: list[float]  # the head's prediction for each drafted token but the last
    agreed: int  # how many of the drafted tokens the target would accept


@torch.no_grad()
def record(chains, source, head, target, input_ids: Tensor, answer: list[int], longest: int = 20) -> list[Round]:
    """Draft `longest` tokens from every place of a greedy answer, at most to its end; costs that many drafter passes.

    Args:
        chains: module of a chain proposer (new_cache, propose), source: its drafter.
        head: hidden states (1, D) -> logits of acceptance (1,), as the Drafter of specdecpp.py.
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
        tokens = [int(token) for token, _, _ in steps]
        agreed = next((i for i, pair in enumerate(zip(tokens, answer[place:])) if pair[0] != pair[1]), count)
        rounds.append(Round([float(head(hidden[None]).float().sigmoid()) for _, _, hidden in steps[1:]], agreed))
    return rounds


def replay(rounds: list[Round], rule, longest: int = 20) -> tuple[int, int]:
    """(N_target, N_discarded) of decoding the answer under a stop rule.

    Args:
        rule: (accept_probs of all drafted tokens but the newest) -> whether to stop here.
        longest: most tokens a round, no more than were recorded.
    """
    place = n_target = n_discarded = 0
    while place < len(rounds):
        room, drafted = min(longest, len(rounds) - place - 1), 0
        while drafted < room:
            drafted += 1
            if rule(rounds[place].accept_probs[: drafted - 1]):
                break
        accepted = min(drafted, rounds[place].agreed)
        n_target, n_discarded, place = n_target + 1, n_discarded + drafted - accepted, place + accepted + 1
    return n_target, n_discarded


def sweep(recordings: list[list[Round]], lengths=(2, 4, 6, 8, 10, 12, 14),
          thresholds=(0.1, 0.3, 0.5, 0.7, 0.9)) -> dict[str, tuple[float, float]]:
    """The points of Figure 4: {rule: (N_target / N, N_discarded / N)} for each K and h, and the oracle of Lemma 2.1."""
    rules = {f"K={k}": (lambda probs, k=k: len(probs) + 1 >= k) for k in lengths}
    rules |= {f"h={h}": (lambda probs, h=h: 1 - math.prod(probs) > h) for h in thresholds}
    tokens, points = sum(map(len, recordings)), {}
    for name, rule in rules.items():
        counts = [replay(rounds, rule) for rounds in recordings]
        points[name] = (sum(n for n, _ in counts) / tokens, sum(n for _, n in counts) / tokens)
    # a token is a disagreement if a round that begins at it accepts nothing; one at the very end costs no round
    oracle = sum(1 + sum(not each.agreed for each in rounds[:-1]) for rounds in recordings)
    return points | {"oracle": (oracle / tokens, 0.0)}


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

    A head trained with w_rej > 1 is low on purpose: its sigmoid approaches P / (P + w_rej (1 - P)). Add log(w_rej) to
    its logits to ask for P itself.

    Args:
        predicted, actual: (M,) acceptance probabilities in [0, 1].
    """
    place = (predicted * bins).long().clamp(max=bins - 1)
    rows = [(float(predicted[place == b].mean()), float(actual[place == b].mean()), int((place == b).sum()))
            for b in place.unique().tolist()]
    return rows, sum(count * abs(p - a) for p, a, count in rows) / len(predicted)
