"""CAPE: confidence-aware expansion of a chain draft.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 4.2 and appendix A.

A chain drafter computes a distribution at every step, but submits only one token of it.
CAPE submits the next best tokens as well: many where the drafter was unsure, few where
it was sure. These extras are leaves of the tree. Nothing is drafted after them, so they
make the forward of the target longer, but cost no pass of the drafter:

    root -+- x_(t+1) -+- x_(t+2) -+- x_(t+3)   the trajectory, gamma = 3
          |           |           |
          +- a1       +- a2       +- a3        X_1 = {a1, b1}: the drafter was unsure
          +- b1                                X_2 = {a2}, X_3 = {a3}: it was sure

CAPE has no weights. It wraps any generator of chains:

    speculate(lambda d: cape.drafts(glide.drafts(d, drafter, gamma=4)))

An extra helps only where the trajectory is first rejected, so all of them together add
at most one token to a round.

Names that differ from the paper's: p_D is `q_draft`, p_i is `confidences[i - 1]`, K_i
is `counts[i - 1]`, S is `set_size`, the unexpanded proposal is the `trajectory`, and
Algorithm 2 is common.tree_inputs.

Deviations from the paper and what the authors' code does: at the end.
Licence: Apache-2.0.
"""

import bisect
import sys
from dataclasses import dataclass

import torch

import common
from common import option


@dataclass
class Config:
    sizes: list[int] = option(
        lambda: [7, 5, 3, 1], "S(p): extras in each range", decode=True
    )
    bounds: list[float] = option(
        lambda: [0.3, 0.6, 0.8], "S(p): where ranges end", decode=True
    )

    def __post_init__(self):
        fits = len(self.sizes) == len(self.bounds) + 1
        ascending = list(self.bounds) == sorted(self.bounds)
        if not fits or min(self.sizes) < 0 or not ascending:
            raise common.UserError(
                f"sizes {self.sizes}, bounds {self.bounds}: take one size more than "
                "bounds, no negative size, and ascending bounds"
            )


# Named settings for bench.py, as in --method cape:cpu. gamma is not a field of this
# Config: bench.py gives it to the method whose chains are expanded, 4 by default.
VARIANTS = {
    "paper": {"gamma": 4, "sizes": [7, 5, 3, 1], "bounds": [0.3, 0.6, 0.8]},
    "none": {"sizes": [0], "bounds": []},  # only the trajectory
    "fixed": {"sizes": [4], "bounds": []},  # 5.4, counted as in 4.2
    "cpu": {"gamma": 3, "sizes": [2, 1, 1, 0]},  # fitted to two cores and our GLIDE
}


# ------------------------------------------------------------------------- expansion


def set_size(confidence: float, config: Config) -> int:
    """S(p) of 4.2: how many extras a step gets.

    p      (0, .3]   (.3, .6]   (.6, .8]   (.8, 1]     bounds .3 .6 .8
    S(p)   7         5          3          1           sizes 7 5 3 1
    """
    return config.sizes[bisect.bisect_left(config.bounds, confidence)]


def expand(trajectory: common.Draft, config: Config) -> common.Draft:
    """Append the expansion sets X_i to a chain (4.2, Algorithm 1).

    X_i holds the S(p_i) most probable tokens of step i in decreasing order, except the
    drafted one and those of probability 0; p_i is the largest probability of the step.
    Two steps over four tokens, with sizes [2, 1] and bounds [.55]:

        i   q_draft            drafted   p_i   S(p_i)   X_i
        1   .10 .50 .25 .15    1         .50   2        2, 3
        2   .60 .30 .06 .04    0         .60   1        1

        tokens     1   0    2   3    1
        parents   -1   0   -1  -1    0        -1 is the root

    trajectory: a chain with its `probs`, as common.chain makes it. An empty one is
        returned unchanged.
    Returns a Draft with {"confidences": [...], "counts": [...]} in its notes. A count
    is S(p_i); X_i is smaller where fewer tokens have a probability above 0.
    Raises UserError for a draft that is not a chain.
    """
    length = len(trajectory.tokens)
    if length == 0:
        return trajectory
    is_chain = trajectory.parents == list(range(-1, length - 1))
    if not is_chain or trajectory.probs is None:
        raise common.UserError(
            "CAPE expands chains: give it the drafts of glide or specdecpp"
        )

    q_draft = trajectory.probs  # (gamma, V)
    confidences = q_draft.max(-1).values.tolist()  # p_i
    counts = [set_size(confidence, config) for confidence in confidences]  # K_i

    # The drafted token is not always the most probable one, because when sampling it
    # may be any. It is therefore removed by its id, not by its rank.
    others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)
    most = min(max(counts), others.shape[1])
    best = others.topk(most)  # not sampled, so `probs` does not cover them
    rank = torch.arange(most, device=q_draft.device)
    wanted = rank < rank.new_tensor(counts)[:, None]  # (gamma, most) bool
    extra = wanted & (best.values > 0)
    tokens = torch.cat([trajectory.tokens, best.indices[extra]])
    steps = extra.nonzero()[:, 0].tolist()  # counted from 0
    parents = trajectory.parents + [trajectory.parents[step] for step in steps]

    # Mask_CAPE (Algorithm 2) follows from the parents; common.tree_mask builds it. A
    # token sees itself and the trajectory before its position. For gamma 3 and counts
    # 2 1 1 (the root, which all tokens see, is left out here):
    #
    #                  x1 x2 x3  a1 b1  a2  a3
    #     pos 1   x1    x  .  .   .  .   .   .
    #         2   x2    x  x  .   .  .   .   .
    #         3   x3    x  x  x   .  .   .   .
    #         1   a1    .  .  .   x  .   .   .
    #         1   b1    .  .  .   .  x   .   .
    #         2   a2    x  .  .   .  .   x   .
    #         3   a3    x  x  .   .  .   .   x
    notes = {"confidences": confidences, "counts": counts}
    return common.Draft(tokens, parents, q_draft, trajectory.notes | notes)


# -------------------------------------------------------------------------- decoding


def drafts(chains, **changes):
    """Yield the expansion of each chain. Verify each before you ask for the next one.

    chains: a generator of chains, such as glide.drafts(decoding, drafter).
    changes: other values for sizes and bounds, see Config.
    Raises UserError, at the first draft, for other changes and for drafts that are not
    chains.
    """
    config = common.changed(Config(), changes)
    for trajectory in chains:
        yield expand(trajectory, config)


if __name__ == "__main__":
    try:
        import glide  # any other generator of chains would do
    except ModuleNotFoundError:
        missing = "glide.py, whose drafts it expands, is not here: copy it"
        print(f"cape.py: {missing}", file=sys.stderr)
        sys.exit(2)
    common.demo(
        glide.Drafter,
        "glide",
        lambda d, drafter: drafts(glide.drafts(d, drafter, gamma=4)),
    )


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper, and choices where it says nothing:
#  1. The ranges of 4.2 are compared directly. Algorithm 1 looks S up by floor(10 p),
#     which reads past its end at p = 1, and gives fewer extras at p = .3, .6 and .8.
#  2. S is that of 4.2. Algorithm 1's 8, 6, 4 and 2 count the drafted token as well.
#  3. The paper evaluates CAPE greedily (5.1). When sampling, too, the extras are the
#     most probable tokens; p_i is the largest probability after the logits processors.
#  4. q_draft is normalised over the draft vocabulary, so confidences are higher.
#  5. Tokens of probability 0 are never extras.
#  6. bench.py gives CAPE chains of gamma = 4, as the authors' code does; the paper
#     gives no gamma for CAPE (5.1: 5, for GLIDE). 4 x (1 + 7) = 32 keeps the limit of
#     32 draft tokens (5.3), which is not checked here. The shipped GLIDE learned with
#     L = 3, so it never learned to draft a fourth token.
#  7. The sets are made after the whole chain, as in Algorithm 1. By 4.2 this "can be
#     done while the draft model continues", so that it costs no time.
#
# Authors' code, run with the same random weights: all 30 nodes of its draft agree.
#  - gamma is fixed at 4, and S is looked up by floor(10 p), with two entries for p = 1.
