"""CAPE: confidence-aware expansion of a chain draft (Du et al., ICML 2024, arXiv:2402.02082,
section 4.2, appendix A).

A chain drafter has already computed a whole distribution at every step, and only its first choice
is used. CAPE lists further tokens from the same distribution beside each draft token: many where
the drafter was unsure, few where it was confident. The extra tokens are leaves: nothing is drafted
from them, so they cost no drafter pass, only rows in the verification. CAPE works on any chain
proposer (`base`); GLIDE is the default, and only the base has weights.

    symbol           name here                 section      function
    x_{t+1..t+gamma} trajectory                4.2          expand
    X_i, K_i         extras of step i          4.2          expand
    p_i              confidence                4.2          expand
    S(p)             Config.sizes, bounds      4.2          set_size
    linearized P     Draft: trajectory, X_1..  4.2, Alg. 2  expand
    Mask_CAPE        common.ancestor_mask      4.2          (the drawing in expand)
    32 tokens        Config.max_tokens         5.3          expand

Deviations
    1. upstream != paper: Algorithm 1's array of ten sizes counts the top-1 token and has no entry
       for p = 1; here the sizes are those of section 4.2 (top-1 not counted) and each range
       includes its upper bound.
    2. paper silent: how the 32-token limit is kept. Here the least probable extras, by the
       probability that the round gets to them, are dropped first; the trajectory always stays.
    3. ours: sampling is lossless too. Under sampling the trajectory is drawn from the drafter and
       verified by rejection sampling; when a draft token is refused, the target's own draw from the
       residual distribution may hit an extra, and is then kept together with its key and value. The
       residual does not depend on which extras were listed, so the output distribution is the
       target's.
    4. ours: `refit_sizes` chooses S(p) for a machine from measured acceptance and cost; the default
       is the paper's.
"""

import heapq
import importlib
import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import common


@dataclass
class Config:
    base: str = field(
        default="glide", metadata={"help": "chain proposer to expand", "decode": True}
    )
    gamma: int = field(default=5, metadata={"help": "length of the trajectory", "decode": True})
    expansion: str = field(
        default="cape", metadata={"help": "cape, fixed, beam or none", "decode": True}
    )
    sizes: list[int] = field(
        default_factory=lambda: [7, 5, 3, 1],
        metadata={"help": "S(p): extras for each range of confidence", "decode": True},
    )
    bounds: list[float] = field(
        default_factory=lambda: [0.3, 0.6, 0.8],
        metadata={"help": "upper bounds of the ranges but the last", "decode": True},
    )
    width: int = field(
        default=4, metadata={"help": "extras a step (fixed) or beams (beam)", "decode": True}
    )
    max_tokens: int = field(
        default=32, metadata={"help": "most draft tokens a round", "decode": True}
    )


VARIANTS = {
    "none": {"expansion": "none"},
    "fixed": {"expansion": "fixed"},
    "beam4": {"expansion": "beam", "width": 4},
    "beam8": {
        "expansion": "beam",
        "width": 8,
    },  # these four: GLIDE alone, 5.4, and Table 3 of the paper
    "cpu": {"gamma": 2, "sizes": [2, 1, 1, 0]},
}  # fitted to the shipped GLIDE and two CPU cores (--refit)


# ---------------------------------------------------------------------------------------- expansion


def set_size(confidence: float, sizes: list[int], bounds: list[float]) -> int:
    """S(p) of 4.2: how many extras for a draft token of this confidence; sizes[i] up to and
    including bounds[i]."""
    return next((size for size, bound in zip(sizes, bounds) if confidence <= bound), sizes[-1])


def expand(
    steps: list, counts: list[int], max_tokens: int, input_ids: Tensor, do_sample: bool
) -> common.Draft:
    """Linearise a trajectory and its expansion sets into a token tree (4.2, Algorithms 1 and 2).

    The trajectory comes first, then the sets. Token i sees what precedes it in the trajectory, and
    itself:

                      root  x1 x2 x3  a1 b1 a2 a3       x1 x2 x3 trajectory, a1 b1 in X_1, a2 in
                      X_2, a3 in X_3
                 x1    x    x  .  .   .  .  .  .        parents: x1 -> root, x2 -> x1, x3 -> x2,
                 x2    x    x  x  .   .  .  .  .                 a1, b1 -> root, a2 -> x1, a3 -> x2
                 x3    x    x  x  x   .  .  .  .
                 a1    x    .  .  .   x  .  .  .
                 b1    x    .  .  .   .  x  .  .
                 a2    x    x  .  .   .  .  x  .
                 a3    x    x  x  .   .  .  .  x

    Args:
        steps: (token (1,), q_draft (V,), hidden) as a chain proposer yields them, gamma of them.
        counts: extras wanted for each step.
        max_tokens: most nodes in all; the least likely extras go first.
    Returns:
        Draft; under sampling its probs are q_draft on the trajectory and zero on the extras.
    """
    trajectory = common.chain(steps, input_ids)
    gamma = len(steps)
    if not gamma:
        return trajectory
    q_draft = trajectory.probs  # (gamma, V)
    own = q_draft.gather(1, trajectory.tokens[:, None])[
        :, 0
    ]  # (gamma,) confidence in the trajectory's tokens
    reached = torch.cat(
        [own.new_ones(1), own.cumprod(0)[:-1]]
    )  # probability that step i is reached
    others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)
    values, tokens = others.topk(min(max(counts), others.shape[1]), dim=-1)  # (gamma, most)
    wanted = (
        torch.arange(values.shape[1], device=values.device)
        < torch.tensor(counts, device=values.device)[:, None]
    )
    worth = torch.where(wanted & (values > 0), reached[:, None] * values, -1.0).flatten()
    best = worth.topk(min(max(0, max_tokens - gamma), len(worth)))
    chosen = best.indices[best.values >= 0].sort().values.cpu()  # in order of the sets
    step = chosen // max(1, values.shape[1])
    extras = tokens.flatten()[chosen.to(tokens.device)] if len(chosen) else tokens.new_zeros(0)
    probs = (
        torch.cat([q_draft, q_draft.new_zeros(len(chosen), q_draft.shape[1])])
        if do_sample
        else None
    )
    return common.Draft(
        torch.cat([trajectory.tokens, extras]), torch.cat([trajectory.parents, step - 1]), probs
    )


def beam(
    base, base_drafter, target, input_ids, cache, memory, gamma: int, width: int
) -> common.Draft:
    """Beam search as a token tree, the paper's rival: the `width` best continuations of every
    length (5.1).

    Each beam is a call of the base with the beam's tokens appended, so a level costs `width`
    drafter passes, in turn.
    """
    tokens, parents, beams = (
        [],
        [],
        [(0.0, -1, [])],
    )  # a beam: log-probability, its last node, its tokens
    for _ in range(gamma):
        grown = []
        for score, node, path in beams:
            ids = torch.cat([input_ids, input_ids.new_tensor([path])], dim=1) if path else input_ids
            q_draft = next(base.propose(base_drafter, target, ids, cache, memory))[1]
            values, choices = q_draft.topk(min(width, len(q_draft)))
            for value, token in zip(values.tolist(), choices.tolist()):
                if value > 0:
                    grown.append((score + math.log(value), node, [*path, token]))
        beams = []
        for score, node, path in heapq.nlargest(width, grown, key=lambda beam: beam[0]):
            beams.append((score, len(tokens), path))
            tokens.append(path[-1])
            parents.append(node)
    return common.Draft(input_ids.new_tensor(tokens), torch.tensor(parents, dtype=torch.long))


# ----------------------------------------------------------------------------------------- decoding


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    base,
    base_drafter,
    gamma=None,
    expansion=None,
    sizes=None,
    bounds=None,
    width=None,
    max_tokens=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=cape.generate, base=glide, base_drafter=drafter)`:
    lossless decoding.

    Args:
        base: module of a chain proposer (new_memory, propose). base_drafter: its trained drafter.
        The others are the fields of Config, which holds their defaults. stats: a common.Stats to
        fill.
    Returns:
        (1, T') prompt and new tokens.
    Raises:
        ValueError: an unknown expansion, or a table whose parts do not fit.
    """
    given = {
        "gamma": gamma,
        "expansion": expansion,
        "sizes": sizes,
        "bounds": bounds,
        "width": width,
        "max_tokens": max_tokens,
    }
    config = Config(**{name: value for name, value in given.items() if value is not None})
    if config.expansion not in ("cape", "fixed", "beam", "none"):
        raise ValueError(f"unknown expansion {config.expansion!r}; take cape, fixed, beam or none")
    if (
        len(config.sizes) != len(config.bounds) + 1
        or config.bounds != sorted(config.bounds)
        or min(config.sizes) < 0
    ):
        raise ValueError(
            "sizes needs one entry more than bounds, none negative, and bounds must ascend"
        )
    stats, do_sample = stats or common.Stats(), generation_config.do_sample
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    memory, done = base.new_memory(base_drafter, target), False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = max(0, min(config.gamma, generation_config.max_length - input_ids.shape[1] - 1))
            if config.expansion == "beam":
                draft = beam(
                    base, base_drafter, target, input_ids, cache, memory, room, config.width
                )
            else:
                steps = base.propose(
                    base_drafter, target, input_ids, cache, memory, logits_processor, do_sample
                )
                steps = list(itertools.islice(steps, room))
                counts = [0] * len(steps)
                if config.expansion == "fixed":
                    counts = [config.width] * len(steps)
                elif config.expansion == "cape" and steps:
                    confidences = torch.stack([q_draft.max() for _, q_draft, _ in steps]).tolist()
                    counts = [set_size(p, config.sizes, config.bounds) for p in confidences]
                draft = expand(steps, counts, config.max_tokens, input_ids, do_sample)
        verified = common.verify(
            target, input_ids, draft, cache, logits_processor, do_sample, stats
        )
        input_ids, done = common.commit(
            input_ids, verified.tokens, stopping_criteria, stats, token_streamer
        )
    return input_ids


if __name__ == "__main__":
    base = importlib.import_module(Config().base)
    common.demo(generate, base.Drafter, Config().base, "base_drafter", base=base)
