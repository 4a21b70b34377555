"""Fit to a drafter and a machine what a method leaves open: CAPE's S(p), Falcon's tree (bench.py --refit).

Both weigh how often a draft token is accepted, measured on the target's own answers, against the milliseconds of
verifying one token more, measured by `bench.py --cost-curve`.
"""

from __future__ import annotations

import time

import torch

import common
import stopping

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


def fit(arm, target, turns: list[dict], by_tokens: dict) -> dict:
    """The settings of most expected tokens per second for an arm of bench.py, with what they rest on.

    Args:
        turns: {"input_ids" (1, T), "answer"} each. by_tokens: {n: ms} of a target forward over n tokens.
    Raises:
        ValueError: a method that leaves nothing open.
    """
    module = arm.module
    if hasattr(module, "refit_sizes"):
        config, base, drafter = module.Config(), arm.base["base"], arm.base["base_drafter"]
        rounds = [each for turn in turns
                  for each in stopping.record(base, drafter, target, turn["input_ids"], turn["answer"], 1)]
        judged = torch.tensor([(each.confidence[0], each.rank) for each in rounds if each.confidence])  # (M, 2)
        acceptance = module.rank_acceptance(judged[:, 0].contiguous(), judged[:, 1].long(), config.bounds)
        ranges = torch.bucketize(judged[:, 0].contiguous(), torch.tensor(config.bounds))
        frequency = torch.bincount(ranges, minlength=len(config.bounds) + 1) / len(ranges)
        drafting = draft_ms(target, turns[:4], custom_generate=module.generate, **arm.base)
        times = milliseconds(by_tokens, config.max_tokens + 1)
        sizes = module.refit_sizes(acceptance, frequency, times, drafting, config.gamma, config.max_tokens)
        return {"sizes": sizes, "paper": config.sizes, "bounds": config.bounds, "frequency": frequency.tolist(),
                "acceptance_by_rank": acceptance.tolist(), "draft_ms": drafting}
    if hasattr(module, "fit_tree"):
        drafter, counts, k = arm.kwargs["drafter"], 0, arm.kwargs["drafter"].config.k
        tree = module.layered_tree(RANKED_TREE)
        begin = time.perf_counter()
        for turn in turns:
            ids = torch.cat([turn["input_ids"], turn["input_ids"].new_tensor([turn["answer"]])], dim=1)
            counts = counts + module.rank_acceptance(drafter, target, ids, turn["input_ids"].shape[1], tree)
            if time.perf_counter() - begin > 240:  # enough
                break
        passes = [draft_ms(target, turns[:4], custom_generate=module.generate, drafter=drafter,
                           tree=module.layered_tree([4] * k * n)) for n in (1, 2, 3)]
        return {"tree": module.fit_tree(counts, milliseconds(by_tokens, 64), passes, k), "draft_ms_by_passes": passes,
                "acceptance": (counts[0] / counts[1].clamp(min=1)).tolist()}
    raise ValueError(f"--refit: {module.__name__} leaves nothing open that could be fitted; take cape or falcon")
