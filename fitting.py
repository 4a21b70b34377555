"""Fit to a drafter and a machine what a method leaves open: CAPE's S(p), Falcon's tree (bench.py --refit).

Both weigh how often a draft token is accepted, measured on the target's own answers, against the milliseconds of
verifying one token more, measured by `bench.py --cost-curve`.
"""

from __future__ import annotations

import time

import torch

import common
import stopping

ANSWERS = 12  # to count acceptance on
RANKED_TREE = [12, 12, 8, 8, 6, 6]  # nodes per depth of the tree that Falcon's ranks are counted with


def milliseconds(by_tokens: dict, most: int) -> list[float]:
    """Time of a target forward over n tokens at index n = 0 .. most, between measured counts by interpolation."""
    known = sorted((int(n), ms) for n, ms in by_tokens.items())
    times = []
    for n in range(most + 1):
        low = max((pair for pair in known if pair[0] <= n), default=known[0])
        high = min((pair for pair in known if pair[0] >= n), default=known[-1])
        share = (n - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        times.append(low[1] + share * (high[1] - low[1]))
    return times


def draft_ms(target, turns: list[dict], **options) -> float:
    """Median over turns of the milliseconds that a round spends drafting."""
    times = []
    for turn in turns:
        stats = common.Stats(sync=target.device.type == "cuda")
        target.generate(turn["input_ids"], max_new_tokens=16, do_sample=False, stats=stats, **options)
        times.append(1000 * stats.seconds.get("draft", 0.0) / max(1, stats.target_forwards - 1))
    return float(torch.tensor(times).median())


def sizes_of_cape(arm, target, turns: list[dict], cost_curve: dict) -> dict:
    """The S(p) of most expected tokens per second for an arm of bench.py, with what it rests on.

    Args:
        turns: {"input_ids" (1, T), "answer"} each, of which some are taken. cost_curve: of bench.py.
    """
    module, turns = arm.module, turns[:ANSWERS]
    base, drafter, fields = arm.base["base"], arm.base["base_drafter"], vars(module.Config())
    config = module.Config(**{name: arm.kwargs.get(name, value) for name, value in fields.items() if name != "base"})
    rounds = [each for turn in turns
              for each in stopping.record(base, drafter, target, turn["input_ids"], turn["answer"], 1)]
    judged = torch.tensor([(each.confidence[0], each.rank) for each in rounds if each.confidence]).reshape(-1, 2)
    acceptance = module.rank_acceptance(judged[:, 0].contiguous(), judged[:, 1].long(), config.bounds)
    ranges = torch.bucketize(judged[:, 0].contiguous(), torch.tensor(config.bounds))
    frequency = torch.bincount(ranges, minlength=len(config.bounds) + 1) / max(1, len(ranges))
    drafting = draft_ms(target, turns[:4], **arm.kwargs | {"expansion": "cape"})
    times = milliseconds(cost_curve["by_tokens"], config.max_tokens + 1)
    sizes = module.refit_sizes(acceptance, frequency, times, drafting, config.gamma, config.max_tokens)
    return {"sizes": sizes, "paper": module.Config().sizes, "bounds": config.bounds, "frequency": frequency.tolist(),
            "acceptance_by_rank": acceptance.tolist(), "draft_ms": drafting}


def tree_of_falcon(arm, target, turns: list[dict], cost_curve: dict) -> dict:
    """The tree of most expected tokens per second, likewise."""
    module, turns, times = arm.module, turns[:ANSWERS], milliseconds(cost_curve["by_tokens"], 64)
    drafter, counts, k = arm.kwargs["drafter"], 0, arm.kwargs["drafter"].config.k
    tree, begin = module.layered_tree(RANKED_TREE), time.perf_counter()
    for turn in turns:
        ids = torch.cat([turn["input_ids"], turn["input_ids"].new_tensor([turn["answer"]])], dim=1)
        counts = counts + module.rank_acceptance(drafter, target, ids, turn["input_ids"].shape[1], tree)
        if time.perf_counter() - begin > 240:  # enough
            break
    passes = [draft_ms(target, turns[:4], custom_generate=module.generate, drafter=drafter,
                       tree=module.layered_tree([4] * k * n)) for n in (1, 2, 3)]
    return {"tree": module.fit_tree(counts, times, passes, k), "draft_ms_by_passes": passes,
            "acceptance": (counts[0] / counts[1].clamp(min=1)).tolist()}


def fitter(module):
    """The function above that fits what a method leaves open; ValueError if there is none."""
    for name, function in (("refit_sizes", sizes_of_cape), ("fit_tree", tree_of_falcon)):
        if hasattr(module, name):
            return function
    raise ValueError(f"--refit: {getattr(module, '__name__', 'this')} leaves nothing open that could be fitted; "
                     "take cape or falcon")
