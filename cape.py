"""CAPE: confidence-aware expansion of a chain draft.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 4.2 and
appendix A. A chain drafter computes a distribution at every
step but uses one token of it. CAPE submits the next best tokens
as well: many if the drafter was unsure, few if it was sure.
These extras are leaves. They cost no pass of the drafter, only
rows in the verification.

    root -+- x_(t+1) -+- x_(t+2) -+- x_(t+3)   trajectory, gamma = 3
          |           |           |
          +- a1       +- a2       +- a3        X_1 = {a1, b1}: unsure
          +- b1                                X_2 = {a2}, X_3 = {a3}

CAPE has no weights. It expands any method that drafts a chain:
`base` is its module (with Drafter, Memory and propose) and
`base_drafter` its drafter. The paper's base is GLIDE. With
SpecDec++ as base, its head is not used.

Names that differ from the paper's: p_D is `q_draft`, p_i is
`confidences[i - 1]`, K_i is `counts[i - 1]`, S is `set_size`,
the proposal before its expansion is `trajectory`.

Deviations from the paper:
    1. Where 4.2 and Algorithm 1 differ, the code follows 4.2: a
       set excludes the trajectory's token, and p = .3, .6 and .8
       belong to the range below.
    2. gamma is 4 (the paper names none for CAPE): at most
       4 x (1 + 7) = 32 tokens are verified, as in 5.3. The
       shipped GLIDE is trained for three.
    3. The paper decodes greedily. If x_(t+i) is sampled, X_i
       excludes it; p_i is still the largest probability of
       q_draft, after temperature and filters.
    4. Tokens of probability 0 are never extras.

Licence: Apache-2.0.
"""

import bisect
import importlib
import inspect
import itertools
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

import common
from common import option


@dataclass
class Config:
    base: str = option("glide", "the method whose chains bench.py expands", decode=True)
    gamma: int = option(4, "length of the trajectory", decode=True)
    sizes: list[int] = option(lambda: [7, 5, 3, 1], "S(p): extras in each range", decode=True)
    bounds: list[float] = option(lambda: [0.3, 0.6, 0.8], "S(p): where a range ends", decode=True)

    def __post_init__(self):
        common.at_least(self, gamma=0)
        fits = len(self.sizes) == len(self.bounds) + 1
        if not fits or min(self.sizes) < 0 or self.bounds != sorted(self.bounds):
            raise common.Mistake(
                f"sizes {self.sizes}, bounds {self.bounds}: take one size more than bounds, no "
                "negative size, and ascending bounds"
            )


VARIANTS = {
    "none": {"sizes": [0], "bounds": []},  # the base alone, at this gamma
    "fixed": {"sizes": [4], "bounds": []},  # 5.4
    "cpu": {"gamma": 3, "sizes": [2, 1, 1, 0]},  # fitted to the shipped GLIDE on two CPU cores
}


# ----------------------------------------------------------------------------------- expansion


def set_size(confidence: float, sizes: list[int], bounds: list[float]) -> int:
    """S(p) of 4.2: how many extras a step gets.

    p      (0, .3]   (.3, .6]   (.6, .8]   (.8, 1]     bounds .3 .6 .8
    S(p)   7         5          3          1           sizes 7 5 3 1
    """
    return sizes[bisect.bisect_left(bounds, confidence)]


def expand(trajectory: common.Draft, config: Config) -> common.Draft:
    """Append the expansion sets to a chain (4.2, Algorithm 1).

    A set holds the most probable tokens of a step, in decreasing
    order, without the drafted one and those of probability 0. The
    confidence is the largest probability of its q_draft. Two steps
    over four tokens, with sizes [2, 1] and bounds [.55]:

        step   q_draft            drafted   confidence   extras
        0      .10 .50 .25 .15    1         .50          2, 3
        1      .60 .30 .06 .04    0         .60          1

    The tokens are 1, 0, then 2, 3, then 1. Their parents are -1
    (the root), 0, then -1, -1, then 0.

    trajectory: a chain with its `probs`, as common.chain makes it.
    Returns a Draft. `probs` stays the trajectory's, because extras
    are not drawn; `q` covers all nodes; `notes` is {"confidences":
    [...], "counts": [...]} with S(p) of each step as its count. An
    empty trajectory is returned as it is.
    """
    if len(trajectory.tokens) == 0:
        return trajectory

    # 1. K_i from the confidence of each step.
    q_draft = trajectory.probs  # (gamma, V)
    confidences = q_draft.max(-1).values.tolist()
    counts = [set_size(p, config.sizes, config.bounds) for p in confidences]

    # 2. The best tokens of each step, except the drafted one.
    others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)
    most = min(max(counts), others.shape[1])
    best = others.topk(most, dim=-1)  # (gamma, most)
    best_ids = best.indices.tolist()
    best_probs = best.values.tolist()

    # 3. At most K_i of them, as siblings of the drafted token.
    tokens = []
    parents = []
    q = []
    for step, count in enumerate(counts):
        extras = zip(best_ids[step][:count], best_probs[step])
        for token, probability in extras:
            if probability > 0:
                tokens.append(token)
                parents.append(step - 1)
                q.append(probability)
    return common.Draft(
        torch.cat([trajectory.tokens, trajectory.tokens.new_tensor(tokens)]),
        torch.cat([trajectory.parents, trajectory.parents.new_tensor(parents)]),
        q_draft,
        torch.cat([trajectory.q, trajectory.q.new_tensor(q)]),
        notes={"confidences": confidences, "counts": counts},
    )


def cape_mask(counts: list[int]) -> Tensor:
    """Mask_CAPE (4.2) of the linearised proposal.

    Token i attends to itself and to trajectory tokens before its
    position: i = j, or j <= gamma and pos(i) > j. For gamma 3 and
    counts 2, 1, 1:

                     x1 x2 x3  a1 b1  a2  a3
        pos 1   x1    x  .  .   .  .   .   .
            2   x2    x  x  .   .  .   .   .
            3   x3    x  x  x   .  .   .   .
            1   a1    .  .  .   x  .   .   .
            1   b1    .  .  .   .  x   .   .
            2   a2    x  .  .   .  .   x   .
            3   a3    x  x  .   .  .   .   x

    For readers and tests: decoding derives the same mask from
    the parents that `expand` returns (Algorithm 2 is
    common.tree_inputs).

    counts: K_i of each of the gamma sets.
    Returns (beta, beta) bool, beta = gamma + sum(counts).
    """
    gamma = len(counts)
    pos = torch.arange(1, gamma + 1)
    pos_of_extras = pos.repeat_interleave(torch.tensor(counts))
    pos = torch.cat([pos, pos_of_extras])  # (beta,)
    j = torch.arange(1, len(pos) + 1)  # (beta,)
    before = (j <= gamma) & (pos[:, None] > j)  # (beta, beta)
    return before | torch.eye(len(pos), dtype=torch.bool)


# ------------------------------------------------------------------------------------ decoding


@torch.no_grad()
def drafts(decoding, base, base_drafter, config: Config):
    """Yield one draft per round, which the caller verifies."""
    memory = base.Memory(base_drafter, decoding.target)
    while not decoding.done:
        length = min(config.gamma, decoding.room)
        steps = base.propose(base_drafter, decoding, memory)
        trajectory = common.chain(itertools.islice(steps, length), decoding.ids)
        yield expand(trajectory, config)


def generate(
    target,
    input_ids,
    base,
    base_drafter,
    config=None,
    copies=0,
    stats=None,
    token_streamer=None,
    **given,
):
    """Lossless decoding, as a `custom_generate` of transformers.

    target.generate(
        ..., custom_generate=cape.generate, base=glide, base_drafter=...)

    base: the module of a method that drafts chains.
    base_drafter: a drafter of this method.
    config: a Config; by default the paper's sizes.
    copies, stats, token_streamer: see `common.Decoding`.
    Returns prompt and new tokens (1, T').
    """
    if not inspect.isgeneratorfunction(getattr(base, "propose", None)):
        raise common.Mistake(f"base {base!r}: pass a module that drafts chains, such as glide")
    common.check_drafter(base_drafter, base.Drafter, target)
    common.check_config(config, Config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, base, base_drafter, config or Config()):
        decoding.verify(draft)
    return decoding.ids


if __name__ == "__main__":
    name = Config().base
    try:
        base = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"{error.name}.py, whose drafts it expands, is not here"
        print(f"cape.py: {missing}: copy it", file=sys.stderr)
        sys.exit(2)
    common.demo(generate, base.Drafter, name, "base_drafter", base=base)
