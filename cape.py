"""CAPE: confidence-aware expansion of a chain draft (Du et al., ICML 2024).

Paper: arXiv:2402.02082, section 4.2 and appendix A. A chain drafter computes a
whole distribution at every step but uses only one token of it. CAPE also submits
the next best tokens of this distribution: many where the drafter was unsure,
few where it was sure. These extras are leaves. They cost no pass of the
drafter, only rows in the verification.

        root -+- x_(t+1) -+- x_(t+2) -+- x_(t+3)     the trajectory, gamma = 3
              |           |           |
              +- a1       +- a2       +- a3          X_1 = {a1, b1}: unsure
              +- b1                                  X_2 = {a2}, X_3 = {a3}: sure

CAPE has no weights. It works with any method that drafts a chain: `base` is
that method's module (with Drafter, Memory and propose) and `base_drafter` its
drafter. The paper's base is GLIDE. With SpecDec++ as base, its head is not used.

Names that differ from the paper's: p_D is `q_draft`, the proposal before its
expansion is `trajectory`, p_i is `confidences[i]`, K_i is `counts[i]`, S is
`set_size`.

Deviations from the paper:
    1. Where 4.2 and Algorithm 1 differ, the code follows 4.2: a set excludes
       the trajectory's token.
    2. The paper names no gamma for CAPE; it is 4 here, so that 4 x (1 + 7)
       = 32 tokens are verified at most, the limit of 5.3. (The shipped GLIDE
       was trained with L = 3, so its fourth token is missing one more target
       row than any token was in training.)
    3. The paper decodes greedily. Under sampling the trajectory is sampled and
       X_i excludes the sampled token, but p_i is still the largest probability
       of q_draft. The output has the target's distribution.
    4. Tokens of probability 0 are never extras.

Licence: Apache-2.0.
"""

import bisect
import importlib
import inspect
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import common
from common import option


@dataclass
class Config:
    base: str = option("glide", "the method whose chains bench.py expands", decode=True)
    gamma: int = option(4, "length of the trajectory", decode=True)
    sizes: list[int] = option(lambda: [7, 5, 3, 1], "S(p): extras in each range", decode=True)
    bounds: list[float] = option(
        lambda: [0.3, 0.6, 0.8], "S(p): upper bounds of all ranges but the last", decode=True
    )

    def __post_init__(self):
        common.at_least(self, gamma=0)
        fits = len(self.sizes) == len(self.bounds) + 1
        if not fits or min(self.sizes) < 0 or list(self.bounds) != sorted(self.bounds):
            raise common.Mistake(
                f"sizes {self.sizes}, bounds {self.bounds}: take one size more than bounds, no "
                "negative size, and ascending bounds"
            )


VARIANTS = {
    "none": {"sizes": [0], "bounds": []},  # the base alone
    "fixed": {"sizes": [4], "bounds": []},  # 5.4
    "cpu": {"gamma": 3, "sizes": [2, 1, 1, 0]},  # fitted to the shipped GLIDE on two CPU cores
}


# ----------------------------------------------------------------------------------- expansion


def set_size(confidence: float, sizes: list[int], bounds: list[float]) -> int:
    """S(p) of 4.2: how many extras a step with this confidence gets.

    p      (0, .3]   (.3, .6]   (.6, .8]   (.8, 1]      bounds .3 .6 .8
    S(p)   7         5          3          1            sizes  7 5 3 1
    """
    return sizes[bisect.bisect_left(bounds, confidence)]


def expand(trajectory: common.Draft, config: Config) -> common.Draft:
    """Append the expansion sets to a trajectory (4.2, Algorithm 1).

    The confidence of a step is the largest probability of its q_draft. Extras
    are taken in order of decreasing probability. Two steps over a vocabulary
    of four tokens, with sizes [2, 1] and bounds [.55]:

        step   q_draft            drafted   confidence   extras
        0      .10 .50 .25 .15    1         .50          2, 3
        1      .60 .30 .06 .04    0         .60          1

    The tokens are 1, 0, then 2, 3, then 1. Their parents are -1 (the root), 0,
    then -1, -1, then 0.

    Verification chooses each token as it does without extras. An extra that
    equals the chosen token is accepted, and the target adds one token more.
    The accepted extra has no drafter row yet, so the next round feeds it.

    Args: trajectory: a chain with its `probs`, as common.chain makes it.
    Returns: a Draft. `probs` stays the trajectory's, because extras are not
    drawn; `q` covers all nodes; `notes` = {"confidences": [...], "counts":
    [...]} has an entry per step, a count being S(p). An empty trajectory is
    returned as it is.
    """
    gamma = len(trajectory.tokens)
    if gamma == 0:
        return trajectory

    # 1. K_i from the confidence of each step.
    q_draft = trajectory.probs  # (gamma, V)
    confidences = q_draft.max(-1).values.tolist()
    counts = [set_size(p, config.sizes, config.bounds) for p in confidences]

    # 2. The most probable tokens apart from the trajectory's, for all steps.
    others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)  # (gamma, V)
    best = others.topk(min(max(counts), others.shape[1]), dim=-1)
    best_probs = best.values.tolist()  # (gamma, max K_i)
    best_ids = best.indices.tolist()  # (gamma, max K_i)

    # 3. The sets in order. An extra is a sibling of its step's drafted token.
    tokens = []
    parents = []
    q = []
    for step, count in enumerate(counts):
        for token, probability in zip(best_ids[step][:count], best_probs[step][:count]):
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
    """Mask_CAPE (4.2) over the linearised proposal, for reading and tests.

    Token i attends to the trajectory tokens before its own position, and to
    itself: j <= gamma and pos(i) > j, or i = j. For gamma 3 and counts
    (2, 1, 1):

                     x1 x2 x3  a1 b1  a2  a3
        pos 1   x1    x  .  .   .  .   .   .
            2   x2    x  x  .   .  .   .   .
            3   x3    x  x  x   .  .   .   .
            1   a1    .  .  .   x  .   .   .
            1   b1    .  .  .   .  x   .   .
            2   a2    x  .  .   .  .   x   .
            3   a3    x  x  .   .  .   .   x

    Decoding computes the same mask from the parents that `expand` returns,
    with prefix and root added: Algorithm 2 is common.tree_inputs.

    Args: counts: K_i, the size of each of the gamma sets.
    Returns: (beta, beta) bool, beta = gamma + sum(counts).
    """
    gamma = len(counts)
    positions = list(range(1, gamma + 1))
    for position, count in enumerate(counts, start=1):
        positions += [position] * count
    pos = torch.tensor(positions)[:, None]  # (beta, 1)
    j = torch.arange(1, len(positions) + 1)  # (beta,)
    before = (j <= gamma) & (pos > j)  # (beta, beta)
    return before | torch.eye(len(positions), dtype=torch.bool)


# ------------------------------------------------------------------------------------ decoding


@torch.no_grad()
def drafts(decoding, base, base_drafter, config: Config):
    """Yield one draft per round, which the caller verifies before the next."""
    memory = base.Memory(base_drafter, decoding.target)
    while not decoding.done:
        steps = base.propose(base_drafter, decoding, memory)
        steps = itertools.islice(steps, min(config.gamma, decoding.room))
        yield expand(common.chain(steps, decoding.ids), config)


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
    """`target.generate(..., custom_generate=cape.generate, base=glide, base_drafter=...)`.

    Lossless.

    Args:
        base: module of the method whose chains are expanded, such as `glide`.
        base_drafter: a drafter of that method.
        config: by default the paper's S(p) and a gamma of 4.
        copies, stats, token_streamer: as for common.Decoding.
    Returns: (1, T') prompt and new tokens.
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
    if not Path(__file__).with_name(f"{name}.py").is_file():
        print(f"cape.py: {name}.py, whose drafts it expands, is not here: copy it", file=sys.stderr)
        sys.exit(2)
    base = importlib.import_module(name)
    common.demo(generate, base.Drafter, name, "base_drafter", base=base)
