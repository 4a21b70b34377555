"""Stop rules compared after the fact (Figure 4 of SpecDec++), and how well a head predicts.

`sweep` records once what is drafted at every place of some greedy answers. From this record it
computes for every stop rule, without drafting again, the two rates that no clock enters:

    N_target / N       verification rate: target forwards per token of the answer
    N_discarded / N    discard rate: draft tokens thrown away per token of the answer

Eq. 2.3 turns them into tokens per second for measured times of a forward pass. Beside the paper's
rules, fixed K and a head with every h, two rules without training are compared: stop after a token
whose distribution has a small maximum (confidence) or a large entropy.
"""

import itertools
import math
import operator
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor
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
    chances: dict[str, list[float]] = field(default_factory=dict)  # {head: sigmoids (m - 1,)}
    agreed: int = 0  # how many of the tokens the target would accept


def round_of(steps: list, heads: dict) -> Round:
    """The Round of a proposer's (token (1,), q_draft (V,), hidden (D,)) steps."""
    if not steps:
        return Round([], [], [], {name: [] for name in heads})
    q_draft = torch.stack([q for _, q, _ in steps]).float()  # (m, V)
    hidden = torch.stack([state for _, _, state in steps])  # (m, D) of the tokens before
    return Round(
        tokens=[int(token) for token, _, _ in steps],
        confidence=q_draft.amax(-1).tolist(),
        entropy=(-torch.xlogy(q_draft, q_draft)).sum(-1).tolist(),
        chances={
            name: drafter.head(hidden[1:]).sigmoid().tolist() for name, drafter in heads.items()
        },
    )


@torch.no_grad()
def record(chains, source, heads: dict, target, turn: dict) -> list[Round]:
    """Draft up to LONGEST tokens at every place of the greedy answer to a prompt.

    Args:
        chains: a module with Memory and propose. source: what drafts with it.
        turn: arguments of target.generate, such as input_ids (1, T) and max_new_tokens.
    Returns:
        A Round for each token of the answer.
    """
    decoding = common.open_decoding(target, **turn, do_sample=False)
    memory = chains.Memory(source, target)
    rounds = []
    while not decoding.done:
        steps = chains.propose(source, decoding, memory)
        steps = itertools.islice(steps, min(LONGEST, decoding.room))
        rounds.append(round_of(list(steps), heads))
        decoding.verify(common.chain([], decoding.ids))  # commits one token
    answer = decoding.ids[0, -len(rounds) :].tolist()
    for place, each in enumerate(rounds):
        same = itertools.starmap(operator.eq, zip(each.tokens, answer[place:]))
        each.agreed = len(list(itertools.takewhile(bool, same)))
    return rounds


def chain_of(module, kwargs: dict, heads: dict) -> tuple:
    """What drafts in an arm of bench.py: the module of the chain proposer, and its drafter.

    Args: module, kwargs, heads: as for `sweep`.
    Raises: Mistake: the arm drafts no chains, or a head was not trained on what it drafts with.
    """
    chains = kwargs.get("base", module)
    source = kwargs.get("draft_model") or kwargs.get("base_drafter") or kwargs.get("drafter")
    if chains.__name__ not in cli.CHAINS:
        chain_methods = " or ".join(cli.CHAINS)
        raise common.Mistake(f"--sweep: {chains.__name__} drafts no chains: take {chain_methods}")
    for name, head in heads.items():
        if not (chains is specdecpp and fits(head, source)):
            raise common.Mistake(
                f"--sweep: {name} is no acceptance head trained on the draft model of the first "
                "arm: train it with --stage head and --init that drafter"
            )
    return chains, source


def fits(head: specdecpp.Drafter, source) -> bool:
    """Whether this is a trained head, on the draft model `source`."""
    if head.config.stage != "head":
        return False
    if not isinstance(source, specdecpp.Drafter):
        return head.config.model == specdecpp.identity(source)
    if source.config.draft_model:
        return head.config.model == source.config.model
    ours = source.state_dict()
    theirs = head.state_dict()
    drafting = [name for name in {**ours, **theirs} if not name.startswith("head.")]
    both = all(name in ours and name in theirs for name in drafting)
    return both and all(torch.equal(ours[name], theirs[name]) for name in drafting)


# ----------------------------------------------------------------------------------- the rules


def first(flags) -> int:
    """How many tokens are drafted by a rule that stops after the first True; many without one."""
    for place, flag in enumerate(flags):
        if flag:
            return place + 1
    return 10**6


def lengths(each: Round) -> dict[tuple[str, str], int]:
    """How many tokens every rule would draft here, {(rule, setting): length}."""
    found = {("K", str(k)): k for k in LENGTHS}
    for level in LEVELS:
        found["confidence", str(level)] = first(c < level for c in each.confidence)
    for most in ENTROPIES:
        found["entropy", str(most)] = first(e > most for e in each.entropy)
    for name, chances in each.chances.items():
        products = list(itertools.accumulate(chances, operator.mul))
        for h in LEVELS:  # the newest token is not judged: one more is drafted
            found[name, str(h)] = 1 + first(1 - product > h for product in products)
    return found


def replay(rounds: list[Round], drafted: list[int]) -> tuple[int, int]:
    """(N_target, N_discarded) of an answer if drafted[i] tokens are drafted at place i.

    Fewer are drafted where fewer are recorded: near the end of the answer.
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
    """Figure 4: {rule: {setting: (N_target / N, N_discarded / N)}}, and the oracle's point."""
    tokens = sum(len(rounds) for rounds in recordings)  # N
    tables = [[lengths(each) for each in rounds] for rounds in recordings]
    found = {}
    for rule, setting in tables[0][0]:
        counts = [
            replay(rounds, [row[rule, setting] for row in table])
            for rounds, table in zip(recordings, tables)
        ]
        n_target, n_discarded = (sum(column) for column in zip(*counts))
        found.setdefault(rule, {})[setting] = (n_target / tokens, n_discarded / tokens)
    n_target = 0
    for rounds in recordings:
        n_target += specdecpp.oracle([each.agreed > 0 for each in rounds])
    return found | {"oracle": {"": (n_target / tokens, 0.0)}}


# ----------------------------------------------------------------------------------- the times


def fit_times(n_draft, n_target, seconds) -> tuple[float, float, float]:
    """(t_draft, t_target, R^2) of T = t_draft N_draft + t_target N_target (Eq. 2.1) in answers."""
    counts = torch.tensor([n_draft, n_target], dtype=torch.float64).T  # (n, 2)
    seconds = torch.tensor(seconds, dtype=torch.float64)  # (n,)
    times = torch.linalg.lstsq(counts, seconds[:, None]).solution[:, 0]  # (2,)
    spread = (seconds - seconds.mean()).square().sum()
    residual = (counts @ times - seconds).square().sum()
    return *times.tolist(), float(1 - residual / spread)


def forward_times(answers) -> tuple[float, float, float | None]:
    """(t_draft, t_target, R^2) in seconds, fitted (Eq. 2.1), or from the clock with R^2 None.

    The clock decides where the counts cannot: with one fixed K, N_draft is K N_target in every
    answer, and any split of the time fits.

    Args: answers: (N_draft, N_target, seconds, seconds of drafting) each. The first draft of an
        answer counts neither in N_draft nor in the seconds, because it is timed with the prefill.
    """
    n_draft, n_target, seconds, drafting = zip(*answers)
    counts = torch.tensor([n_draft, n_target], dtype=torch.float64).T  # (n, 2)
    alike = torch.linalg.cond(counts / counts.norm(dim=0).clamp(min=1)) >= 30
    if len(answers) > 2 and not alike:
        fitted = fit_times(n_draft, n_target, seconds)
        if min(fitted[:2]) > 0:
            return fitted
    t_draft = sum(drafting) / max(1, sum(n_draft))
    t_target = (sum(seconds) - sum(drafting)) / max(1, sum(n_target))
    return t_draft, t_target, None


# ------------------------------------------------------------------------- how well a head predicts


def unbiased(logits: Tensor, w_rej: float) -> Tensor:
    """The true probability that a head trained with w_rej estimates: log w_rej is added.

    Its sigmoid tends to P / (P + w_rej (1 - P)), so its logit to log(P / (1 - P)) - log w_rej.
    """
    return (logits + math.log(w_rej)).sigmoid()


def calibration(predicted: Tensor, actual: Tensor, bins: int = 10) -> tuple[list, float]:
    """Reliability bins, and the expected calibration error.

    Args: predicted, actual: (M,) acceptance probabilities in [0, 1]; 1 belongs to the last bin.
    Returns: ([[mean prediction, mean label, count]] of the bins that are not empty, the mean of
        |mean prediction - mean label| weighted by count).
    """
    bin_of = (predicted * bins).long().clamp(max=bins - 1)  # (M,)
    rows = []
    error = 0.0
    for number in bin_of.unique().tolist():
        inside = bin_of == number
        said = float(predicted[inside].mean())
        true = float(actual[inside].mean())
        count = int(inside.sum())
        rows.append([said, true, count])
        error += count * abs(said - true)
    return rows, error / max(1, len(predicted))


def auc(predicted: Tensor, actual: Tensor) -> float:
    """Probability that an accepted token has a higher prediction than a refused one; ties halve.

    Args: predicted: (M,) any score. actual: (M,) labels in [0, 1]; 0.7 counts as 0.7 of an
        accepted token and 0.3 of a refused one.
    Returns: nan where nothing was accepted, or nothing refused.
    """
    values, place = predicted.double().unique(return_inverse=True)  # ascending
    nothing = torch.zeros_like(values)
    accepted = nothing.index_add(0, place, actual.double())
    refused = nothing.index_add(0, place, 1 - actual.double())
    lower = refused.cumsum(0) - refused  # refused tokens of a lower prediction
    pairs = accepted.sum() * refused.sum()
    return float((accepted * (lower + refused / 2)).sum() / pairs)


def head_quality(logits: Tensor, labels: Tensor, w_rej: float) -> dict[str, float]:
    """How well logits (M,) of a head predict labels (M,), on the scale of true probabilities.

    Returns: {"auc", "ece": calibration error, "bce": cross-entropy in nats, unweighted, "kl": the
        part of it that the labels themselves do not explain}.
    """
    predicted = unbiased(logits.double(), w_rej)
    labels = labels.double()
    inside = predicted.clamp(1e-9, 1 - 1e-9)
    bce = -(torch.xlogy(labels, inside) + torch.xlogy(1 - labels, 1 - inside)).mean()
    entropy = -(torch.xlogy(labels, labels) + torch.xlogy(1 - labels, 1 - labels)).mean()
    return {
        "auc": auc(predicted, labels),
        "ece": calibration(predicted, labels)[1],
        "bce": float(bce),
        "kl": float(bce - entropy),
    }


def judged(recordings: list[list[Round]], values_of) -> tuple[Tensor, Tensor]:
    """(value, accepted) (M,) of each drafted token whose predecessors were all accepted.

    Args: values_of: a function of a Round that gives a value for each of its first tokens.
    """
    values = []
    accepted = []
    for each in itertools.chain(*recordings):
        reached = values_of(each)[: each.agreed + 1]
        values += reached
        accepted += [float(i < each.agreed) for i in range(len(reached))]
    return torch.tensor(values), torch.tensor(accepted)


# ----------------------------------------------------------------------------------- the sweep


def sweep(module, kwargs: dict, heads: dict, target, turns: list[dict], answers) -> dict:
    """Figure 4, Eq. 2.1 and 2.3, and how well acceptance is predicted; Ctrl-C ends it early.

    Args:
        module, kwargs: of an arm of bench.py: a method, and the arguments of its `drafts`.
        heads: {name: specdecpp.Drafter} whose heads are compared, on the arm's draft model.
        turns: arguments of target.generate for each prompt: input_ids, max_new_tokens, ...
        answers: timed ones, as for `forward_times`.
    Returns:
        {"t_draft_ms", "t_target_ms", "r2",
        "points": {rule: {setting: [N_target / N, N_discarded / N, tokens per second]}},
        "calibration": {head: {"ece", "bins" of its sigmoid, "ece_reweighted", "bins_reweighted"
            of the true probability it estimates, "w_rej", "head_depth"}},
        "acceptance_by_confidence": bins}; bins as of `calibration`.
    """
    chains, source = chain_of(module, kwargs, heads)
    recordings = []
    try:
        for turn in tqdm(turns, desc="recording", disable=None):
            recordings.append(record(chains, source, heads, target, turn))
    except KeyboardInterrupt:
        print(f"the sweep is of {len(recordings)} answers, interrupted", file=sys.stderr)
    if not recordings:
        return {}

    t_draft, t_target, r2 = forward_times(answers)
    found = {}
    for rule, settings in points(recordings).items():
        found[rule] = {}
        for setting, rates in settings.items():
            speed = specdecpp.throughput(*rates, t_draft, t_target)
            found[rule][setting] = [*rates, speed]
    errors = {}
    for name, drafter in heads.items():
        chances, accepted = judged(recordings, lambda each, name=name: each.chances[name])
        logits = torch.logit(chances.double().clamp(1e-6, 1 - 1e-6))
        bins, ece = calibration(chances, accepted)
        true_bins, true_ece = calibration(unbiased(logits, drafter.config.w_rej), accepted)
        errors[name] = {
            "ece": ece,
            "ece_reweighted": true_ece,
            "bins": bins,
            "bins_reweighted": true_bins,
            "w_rej": drafter.config.w_rej,
            "head_depth": drafter.config.head_depth,
        }
    by_confidence = judged(recordings, lambda each: each.confidence)
    return {
        "t_draft_ms": 1000 * t_draft,
        "t_target_ms": 1000 * t_target,
        "r2": r2,
        "calibration": errors,
        "points": found,
        "acceptance_by_confidence": calibration(*by_confidence)[0],
    }
