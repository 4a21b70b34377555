"""SpecDec++ after the fact: rates of every stop rule from one recording, speed, calibration.

    N_target / N     verification rate: target forwards per token of the answer
    N_discarded / N  discard rate: draft tokens thrown away per token of the answer

Both are free of the clock (Figure 4); Eq. 2.3 turns them into tokens per second for any pair of
forward times. How well a head predicts acceptance is told in two scales: its sigmoid as it is, low
on purpose where w_rej > 1 ("ece"), and with log w_rej added to its logits, an estimate of the
chance itself ("ece_reweighted", and all that `head_quality` gives).
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
    confidence: list[float]  # (m,) largest probability of q_draft, that of the drafted token
    entropy: list[float]  # (m,) of q_draft, in nats
    agreed: int  # how many of the drafted tokens the target would accept
    rank: int  # of the target's token in the drafter's order where it first disagreed, or 0


@torch.no_grad()
def record(
    chains, source, target, input_ids: Tensor, answer: list[int], longest: int = 20
) -> list[Round]:
    """Draft `longest` tokens from every place of a greedy answer, at most to its end.

    Args:
        chains: module of a chain proposer (new_memory, propose), source: its drafter.
        input_ids: (1, T) the prompt. answer: the target's greedy tokens.
    Returns:
        A Round for each token of the answer; it costs `longest` drafter passes each.
    """
    ids = torch.cat([input_ids, input_ids.new_tensor([answer])], dim=1)
    cache = common.GrowingCache(target.config.get_text_config().num_hidden_layers)
    memory, rounds = None, []
    for place in range(len(answer)):
        end = input_ids.shape[1] + place
        cached = cache.get_seq_length()
        if end - 1 > cached:
            common.forward(target, ids[:, cached : end - 1], cache, logits_to_keep=1)
        memory = memory or chains.new_memory(source, target)
        count = min(longest, len(answer) - place - 1)  # the bonus token is never drafted
        steps = chains.propose(source, target, ids[:, :end], cache, memory)
        rounds.append(round_of(list(itertools.islice(steps, count)), answer[place:]))
    return rounds


def round_of(steps: list, rest: list[int]) -> Round:
    """The Round of drafted (token (1,), q_draft (V,), hidden (D,)), `rest` being the answer."""
    if not steps:
        return Round(torch.zeros(0, 1), [], [], 0, 0)
    agreed = 0
    while agreed < len(steps) and int(steps[agreed][0]) == rest[agreed]:
        agreed += 1
    rank = 0
    if agreed < len(steps):
        order = steps[agreed][1].argsort(descending=True).tolist()
        rank = order.index(rest[agreed])
    q_draft = torch.stack([q for _, q, _ in steps]).float()  # (m, V)
    hidden = [state for _, _, state in steps[1:]]  # a hidden state comes with the next token
    return Round(
        torch.stack(hidden) if hidden else torch.zeros(0, 1),
        q_draft.amax(-1).tolist(),
        (-torch.xlogy(q_draft, q_draft)).sum(-1).tolist(),
        agreed,
        rank,
    )


def first(flags) -> int:
    """How many tokens a rule drafts, told of each whether it stops there; many if it never does."""
    for place, flag in enumerate(flags):
        if flag:
            return place + 1
    return 10**6


@torch.no_grad()
def accept_probs(head, rounds: list[Round]) -> list[list[float]]:
    """The head's prediction for each drafted token but the last, a list a round."""
    chances = []
    for each in rounds:
        if len(each.hidden):
            of_q = each.hidden.new_tensor(each.confidence[:-1])  # (m - 1,) greedy: the largest
            chances.append(head.accept_logit(each.hidden, of_q).float().sigmoid().tolist())
        else:
            chances.append([])
    return chances


def replay(rounds: list[Round], lengths: list[int]) -> tuple[int, int]:
    """(N_target, N_discarded) of an answer if a round at place i drafts lengths[i] tokens.

    Fewer where there is no room for so many.
    """
    place = n_target = n_discarded = 0
    while place < len(rounds):
        drafted = min(lengths[place], len(rounds[place].confidence))
        kept = min(drafted, rounds[place].agreed)
        n_target += 1
        n_discarded += drafted - kept
        place += kept + 1
    return n_target, n_discarded


def points(recordings: list[list[Round]], heads: dict) -> dict[str, dict[str, tuple[float, float]]]:
    """The points of Figure 4, {rule: {setting: (N_target / N, N_discarded / N)}}, and the oracle.

    Args: heads: {name: drafter whose head is read with every h}.
    """
    tokens = sum(len(rounds) for rounds in recordings)

    def rates(length_of) -> tuple[float, float]:
        """The rates if `length_of(answer, place)` tokens are drafted at each place."""
        n_target = n_discarded = 0
        for answer, rounds in enumerate(recordings):
            lengths = [length_of(answer, place) for place in range(len(rounds))]
            counts = replay(rounds, lengths)
            n_target += counts[0]
            n_discarded += counts[1]
        return n_target / tokens, n_discarded / tokens

    def below(level):
        return lambda n, i: first(c < level for c in recordings[n][i].confidence)

    def above(most):
        return lambda n, i: first(e > most for e in recordings[n][i].entropy)

    def beyond(chances, h):
        """The newest token is unjudged: a rule that stops for token i has drafted i + 1."""

        def length(n, i):
            products = itertools.accumulate(chances[n][i], float.__mul__)
            return 1 + first(1 - product > h for product in products)

        return length

    found = {
        "K": {str(k): rates(lambda n, i, k=k: k) for k in LENGTHS},
        "confidence": {str(level): rates(below(level)) for level in LEVELS},
        "entropy": {str(most): rates(above(most)) for most in ENTROPIES},
    }
    for name, head in heads.items():
        chances = [accept_probs(head, rounds) for rounds in recordings]
        found[name] = {str(h): rates(beyond(chances, h)) for h in LEVELS}
    # Lemma 2.1: a token is a disagreement if a round that begins at it accepts nothing; one at the
    # very end costs no round
    oracle = sum(1 + sum(not each.agreed for each in rounds[:-1]) for rounds in recordings)
    return found | {"oracle": {"": (oracle / tokens, 0.0)}}


def fit_times(n_draft, n_target, seconds) -> tuple[float, float, float]:
    """(t_draft, t_target, R^2) of T = t_draft N_draft + t_target N_target over answers, Eq. 2.1."""
    counts = torch.tensor([list(n_draft), list(n_target)], dtype=torch.float64).T  # (n, 2)
    seconds = torch.tensor(list(seconds), dtype=torch.float64)
    times = torch.linalg.lstsq(counts, seconds[:, None]).solution[:, 0]
    spread = (seconds - seconds.mean()).square().sum()
    return *times.tolist(), float(1 - (counts @ times - seconds).square().sum() / spread)


def forward_times(answers) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2) by fit_times, or by the drafting timer and R^2 None.

    The timer decides where counts cannot tell the two apart: with one fixed K, N_draft is
    K N_target in every answer, and any split of the time fits.

    Args: answers: (N_draft, N_target, seconds, seconds spent drafting) each, as of `measured`.
    """
    n_draft, n_target, seconds, drafting = zip(*answers)
    counts = torch.tensor([n_draft, n_target], dtype=torch.float64).T  # (n, 2)
    if len(answers) > 2 and torch.linalg.cond(counts / counts.norm(dim=0).clamp(min=1)) < 30:
        fitted = fit_times(n_draft, n_target, seconds)
        if min(fitted[:2]) > 0:
            return fitted
    t_draft = sum(drafting) / max(1, sum(n_draft))
    t_target = (sum(seconds) - sum(drafting)) / max(1, sum(n_target))
    return t_draft, t_target, None


def throughput(verification: float, discard: float, t_draft: float, t_target: float) -> float:
    """Modelled tokens per second at these rates, the inverse of Eq. 2.3."""
    return 1 / (t_draft + t_draft * discard + (t_target - t_draft) * verification)


def calibration(predicted: Tensor, actual: Tensor, bins: int = 10) -> tuple[list, float]:
    """Reliability bins and the expected calibration error.

    Args: predicted, actual: (M,) acceptance probabilities in [0, 1]; 1 belongs to the last bin.
    Returns: ([(mean prediction, mean label, count)] of the bins that are not empty, the mean of
        |mean prediction - mean label| weighted by count).
    """
    place = (predicted * bins).long().clamp(max=bins - 1)  # (M,)
    rows, error = [], 0.0
    for b in place.unique().tolist():
        inside = place == b
        said, true = float(predicted[inside].mean()), float(actual[inside].mean())
        rows.append((said, true, int(inside.sum())))
        error += rows[-1][2] * abs(said - true)
    return rows, error / max(1, len(predicted))


def auc(predicted: Tensor, actual: Tensor) -> float:
    """Chance that an accepted token has a higher prediction than a refused one; a tie is a half.

    Args: predicted: (M,) any score. actual: (M,) a label in [0, 1]; 0.7 counts as 0.7 of an
        accepted token and 0.3 of a refused one.
    Returns: nan where nothing was accepted, or nothing refused.
    """
    values, place = predicted.double().unique(return_inverse=True)  # ascending
    nothing = torch.zeros(len(values), dtype=torch.float64)
    accepted = nothing.index_add(0, place, actual.double())
    refused = nothing.index_add(0, place, 1 - actual.double())
    lower = refused.cumsum(0) - refused  # refused ones of a lower prediction
    pairs = accepted.sum() * refused.sum()
    return float((accepted * (lower + refused / 2)).sum() / pairs)


def unbiased(logits: Tensor, w_rej: float) -> Tensor:
    """The chance of acceptance that a head trained with w_rej estimates: log w_rej is added."""
    return (logits + math.log(w_rej)).sigmoid()


@torch.no_grad()
def head_quality(module, drafter, target, batches: list, **base) -> dict[str, float]:
    """How well an acceptance head predicts the labels of held-out conversations.

    Args:
        module: specdecpp, or what has its `labelled`. batches: of common.Batch.
        base: base and base_drafter, where another method's drafter drafts.
    Returns:
        {"auc": ranking of accepted over refused, "ece": calibration error, "bce": cross-entropy in
        nats, unweighted, "kl": what of it the labels themselves do not explain}, all of the chance
        with w_rej undone; {} where there is no trained head.
    """
    if getattr(drafter, "distils", True) or not batches:
        return {}
    predicted, actual = [], []
    for batch in batches:
        hidden, of_q, labels = module.labelled(drafter, target, batch, **base)
        logits = drafter.accept_logit(hidden, of_q).float()  # (M,)
        predicted.append(unbiased(logits, drafter.config.w_rej).cpu())
        actual.append(labels.float().cpu())
    predicted, actual = torch.cat(predicted).double(), torch.cat(actual).double()
    inside = predicted.clamp(1e-9, 1 - 1e-9)
    bce = -(torch.xlogy(actual, inside) + torch.xlogy(1 - actual, 1 - inside)).mean()
    entropy = -(torch.xlogy(actual, actual) + torch.xlogy(1 - actual, 1 - actual)).mean()
    return {
        "auc": auc(predicted, actual),
        "ece": calibration(predicted, actual)[1],
        "bce": float(bce),
        "kl": float(bce - entropy),
    }


def judged(recordings: list[list[Round]], values) -> tuple[Tensor, Tensor]:
    """(value, accepted) (M,) of each drafted token whose predecessors all agree with the answer.

    Args: values: for each answer and round a list of a value for each of its first drafted tokens.
    """
    pairs = []
    for rounds, answer in zip(recordings, values):
        for each, row in zip(rounds, answer):
            for i, value in enumerate(row[: each.agreed + 1]):
                pairs.append((value, float(i < each.agreed)))
    return torch.tensor(pairs).T.unbind() if pairs else (torch.zeros(0), torch.zeros(0))


def sweep(chains, source, heads: dict, target, turns: list[dict], answers) -> dict:
    """Figure 4, Eq. 2.1 and 2.3, and how well acceptance is predicted, for bench.py --sweep.

    Args:
        chains, source, heads: as from chain_and_heads.
        turns: {"input_ids" (1, T), "answer"} each. answers: timed ones, as for forward_times.
    Returns:
        {"t_draft_ms", "t_target_ms", "r2",
        "points": {rule: {setting: [N_target / N, N_discarded / N, tokens/s]}},
        "calibration": {head: {"ece", "bins" of its sigmoid, which w_rej > 1 makes low,
            "ece_reweighted", "bins_reweighted" with log w_rej added, "w_rej", "head_depth"}},
        "acceptance_by_confidence": [[confidence, share, count]]}, bins as of `calibration`.
        Ctrl-C ends the recording early.
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
    errors = {}
    for name, head in heads.items():
        predictions = [accept_probs(head, rounds) for rounds in recordings]
        chances, accepted = judged(recordings, predictions)
        logits = torch.logit(chances.clamp(1e-6, 1 - 1e-6))
        bins, ece = calibration(chances, accepted)
        true_bins, true_ece = calibration(unbiased(logits, head.config.w_rej), accepted)
        errors[name] = {
            "ece": ece,
            "ece_reweighted": true_ece,
            "bins": [list(row) for row in bins],
            "bins_reweighted": [list(row) for row in true_bins],
            "w_rej": head.config.w_rej,
            "head_depth": head.config.head_depth,
        }
    found = {}
    for rule, settings in points(recordings, heads).items():
        found[rule] = {
            setting: [*rates, throughput(*rates, t_draft, t_target)]
            for setting, rates in settings.items()
        }
    confidence = judged(recordings, [[each.confidence for each in rounds] for rounds in recordings])
    return {
        "t_draft_ms": 1000 * t_draft,
        "t_target_ms": 1000 * t_target,
        "r2": r2,
        "calibration": errors,
        "points": found,
        "acceptance_by_confidence": [list(row) for row in calibration(*confidence)[0]],
    }


def measured(arms: list) -> list[tuple]:
    """What forward_times fits: the answers of bench.py's arms that draft with what the first does.

    A drafter pass adds a level to the draft, so depths are counted, not CAPE's extras; arms with
    copies, which add levels for free, are left out. So is the first draft of an answer: it is timed
    with the prefill.
    """
    answers = []
    for arm in arms:
        alike = arm.drafters == arms[0].drafters and arm.module is arms[0].module
        if alike and not arm.kwargs.get("copies", arm.facts.get("copies")):
            for answer in arm.answers:
                n_draft = sum(answer.offered[1:])
                drafting = answer.timers.get("draft", 0.0)
                answers.append((n_draft, answer.rounds, answer.decode_seconds, drafting))
    return answers


def chain_and_heads(arm, target, folders: list[str]) -> tuple:
    """What an arm of bench.py drafts with, and the heads that judge it: its own, and `folders`'.

    Returns:
        (module of the chain proposer, its drafter, {name: drafter with a head}) for `sweep`.
    Raises:
        ValueError: the method drafts no chains, or a folder holds no trained head for this draft
            model.
    """
    drafter = arm.kwargs.get("drafter")
    chains = arm.base.get("base")
    source = arm.base.get("base_drafter")
    if chains is None:
        chains = cli.chain_proposer(getattr(arm.module, "__name__", arm.name))
        named = getattr(drafter.config, "draft_model", "")
        source = arm.kwargs.get("draft_model")
        if source is None:
            like = (target.dtype, target.device)
            source = arm.module.load_draft_model(named, *like) if named else drafter
    kind = (bool(arm.base), not arm.base and source is not drafter)

    def draft_weights(head) -> dict:
        weights = head.state_dict()
        return {name: weights[name] for name in weights if not name.startswith("head.")}

    def fits(head) -> bool:
        """Whether it is a trained head, on this draft model."""
        if getattr(head, "distils", True):
            return False
        if kind != (bool(head.config.base), bool(head.config.draft_model)):
            return False
        theirs, ours = draft_weights(head), draft_weights(drafter)
        same = (torch.equal(x, ours[name]) for name, x in theirs.items())
        return theirs.keys() == ours.keys() and all(same)

    heads = {"head": drafter} if fits(drafter) else {}
    for folder in folders:
        head = None
        if hasattr(arm.module, "Drafter"):
            head = common.load_drafter(arm.module.Drafter, folder, target)
        if not fits(head):
            raise ValueError(
                f"--sweep {folder}: no acceptance head trained on the draft model of {arm.name}; "
                "give --sweep folders of --stage head --init DIR, the same DIR for all"
            )
        name = folder.rstrip("/").rpartition("/")[2]
        heads[folder if name in {"K", "confidence", "entropy", "oracle", *heads} else name] = head
    return chains, source, heads
