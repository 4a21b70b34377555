"""CAPE: confidence-aware expansion of a chain draft.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 4.2 and appendix A.

A chain drafter computes a distribution at every step, but submits only one token of it.
CAPE submits the next best tokens as well (when sampling, further draws): many where the
drafter was unsure, few where it was sure. These extras are leaves of the tree. Nothing
is drafted after them, so they cost rows in the verification, but no pass:

    root -+- x_(t+1) -+- x_(t+2) -+- x_(t+3)   the trajectory, gamma = 3
          |           |           |
          +- a1       +- a2       +- a3        X_1 = {a1, b1}: the drafter was unsure
          +- b1                                X_2 = {a2}, X_3 = {a3}: it was sure

CAPE has no weights. It wraps any generator of chains:

    speculate(lambda d: cape.drafts(glide.drafts(d, drafter, gamma=4), d))

An extra helps only where the trajectory is first rejected, and nothing follows it, so
all of them together add at most one token to a round.

Names that differ from the paper's: p_D is `q_draft`, p_i is `confidences[i - 1]`, K_i
is `counts[i - 1]`, S is `set_size`, the unexpanded proposal is the `trajectory`, and
Algorithm 2 is common.tree_inputs.

Deviations from the paper and what the authors' code does: at the end of this file.
Licence: Apache-2.0.
"""

import bisect
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

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


VARIANTS = {  # named settings for bench.py, as in --method cape:cpu
    "none": {"sizes": [0], "bounds": []},  # the trajectory alone
    "fixed": {"sizes": [4], "bounds": []},  # 5.4, if its 4 leave out the drafted token
    # Fitted to the shipped GLIDE on two CPU cores. gamma is not a field of this Config:
    # bench.py gives it to the method whose chains are expanded.
    "cpu": {"gamma": 3, "sizes": [2, 1, 1, 0]},
}


# ------------------------------------------------------------------------- expansion


def set_size(confidence: float, config: Config) -> int:
    """S(p) of 4.2: how many extras a step gets.

    p      (0, .3]   (.3, .6]   (.6, .8]   (.8, 1]     bounds .3 .6 .8
    S(p)   7         5          3          1           sizes 7 5 3 1
    """
    return config.sizes[bisect.bisect_left(config.bounds, confidence)]


def expand(trajectory: common.Draft, config: Config, sampled=False) -> common.Draft:
    """Append the expansion sets X_i to a chain (4.2, Algorithm 1).

    X_i holds the S(p_i) most probable tokens of step i in decreasing order, except the
    drafted one and those of probability 0; p_i is the largest probability of the step.
    Two steps over four tokens, with sizes [2, 1] and bounds [.55]:

        i   q_draft            drafted   p_i   S(p_i)   X_i
        1   .10 .50 .25 .15    1         .50   2        2, 3
        2   .60 .30 .06 .04    0         .60   1        1

        tokens     1   0    2   3    1
        parents   -1   0   -1  -1    0        -1 is the root

    sampled: whether the extras are drawn instead, without replacement (see deviation 2
        at the end of this file).
    trajectory: a chain with its `probs`, as common.chain makes it; an empty one is
        returned as it is, without these notes.
    Returns a Draft with {"confidences": [...], "counts": [...]} in its notes. A count
    is S(p_i), even if fewer tokens had a probability above 0.
    Raises UserError for a draft that is not a chain.
    """
    length = len(trajectory.tokens)  # gamma, or less at the end of an answer
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
    # may be any. So it is taken out by its id, and not as the first in order.
    others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)
    most = min(max(counts), others.shape[1])
    possible = (others > 0).sum(1)
    rank = torch.arange(most, device=q_draft.device)
    extra = rank < torch.minimum(possible.new_tensor(counts), possible)[:, None]  # bool
    if sampled:
        best, left = draw_extras(others, most)
        q_draft = torch.cat([q_draft, left[extra]])
    else:  # the most probable tokens have no rows in `probs`, as they were not drawn
        best = others.topk(most).indices  # (gamma, max(K_i))
    tokens = torch.cat([trajectory.tokens, best[extra]])
    steps = extra.nonzero()[:, 0].tolist()  # counted from 0
    parents = trajectory.parents + [trajectory.parents[step] for step in steps]

    # Mask_CAPE follows from the parents, and common.tree_mask builds it: a token sees
    # itself, and the trajectory before its position. For gamma 3 and counts 2 1 1 (the
    # root, which all tokens see, is left out here):
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


def draw_extras(others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw tokens (gamma, count) without replacement; see deviation 2.

    others: (gamma, V) q_draft without the drafted tokens; the drawn ones are taken out.
    Returns the tokens, and the distributions (gamma, count, V) that they were drawn
    from. Of a row with fewer than `count` tokens, the last ones are meaningless.
    """
    drawn = others.new_empty(len(others), count, dtype=torch.long)
    left = others.new_empty(*drawn.shape, others.shape[1])
    for n in range(count):  # from what the tokens drawn before it have left
        left[:, n] = others / others.sum(1, keepdim=True)
        drawn[:, n : n + 1] = common.sample(left[:, n])
        others.scatter_(1, drawn[:, n : n + 1], 0.0)
    return drawn, left


# -------------------------------------------------------------------------- decoding


def drafts(chains, decoding, **changes):
    """Yield the expansion of each chain; the caller verifies each before the next.

    chains: a generator of chains for `decoding`, such as glide.drafts or
        specdecpp.drafts.
    changes: other values for sizes and bounds, see Config.
    Raises UserError, at the first draft, for other changes and for drafts that are not
    chains.
    """
    config = common.changed(Config(), changes)
    for trajectory in chains:
        yield expand(trajectory, config, decoding.do_sample)


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
        lambda d, drafter: drafts(glide.drafts(d, drafter, gamma=4), d),
    )


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper, and choices where it says nothing:
#  1. Section 4.2 and Algorithm 1 differ, and 4.2 is followed. The sizes of Algorithm 1,
#     8, 6, 4 and 2, count the drafted token as well, so they are 4.2's 7, 5, 3 and 1.
#     But its floor(10 p) gives 5, 3 and 1 extras at p = .3, .6 and .8, where 4.2 gives
#     7, 5 and 3. (No float32 is exactly .3, .6 or .8.) At p = 1 it points beyond the
#     end of S.
#  2. The paper evaluates CAPE greedily (5.1). When sampling, the extras are drawn as
#     well, without replacement. After a rejection the target's token follows the
#     residual, which is what q_draft has too little of, so q_draft's likeliest tokens
#     would be accepted less often (results/README.md, Temperature 1). p_i is still the
#     largest probability of q_draft, after temperature and filters.
#  3. The shipped drafters draft only frequent tokens. q_draft is normalised over these,
#     so confidences are higher than over the whole vocabulary.
#  4. Tokens of probability 0 are never extras.
#  5. The paper gives no gamma for CAPE. bench.py and the demo draft 4 tokens, as the
#     authors' code does. But the shipped GLIDE was trained with blocks of 3, so at its
#     fourth token it lacks one more of the target's rows than it ever did in training.
#  6. The limit of 32 draft tokens (5.3) holds with gamma 4, because 4 x (1 + 7) = 32.
#     Nothing enforces it.
#
# Authors' code. It was run beside this file with the same random weights, and all 30
# nodes of its draft are the same. gamma is fixed at 4. S is looked up by floor(10
# p), as in Algorithm 1, in an array with two more entries for p = 1.
