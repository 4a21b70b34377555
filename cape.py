"""CAPE: confidence-aware expansion of a chain draft (Du et al., ICML 2024).

Paper: arXiv:2402.02082, section 4.2 and appendix A. "Upstream" below is the code that its authors
released.

A chain drafter has already computed a whole distribution at every step, and only its first choice
is used. CAPE lists further tokens from the same distribution beside each draft token: many where
the drafter was unsure, few where it was confident. The extra tokens are leaves: nothing is drafted
from them, so they cost no drafter pass, only rows in the verification. CAPE works on any chain
proposer (`base`); GLIDE is the default, and only the base has weights.

        root -+- x_(t+1) -+- x_(t+2) -+- x_(t+3)     the trajectory, gamma = 3
              +- a_1      +- a_2      +- a_3         X_1 = {a_1, b_1}, K_1 = 2: unsure here
              +- b_1                                 X_2 = {a_2}, K_2 = 1: sure

    symbol             name here                      section       function
    M_T, M_D           target, base_drafter           3             generate
    x_(<=t), x_t       input_ids, its last (root)     3, 4.1        generate
    x_(t+1..t+gamma)   trajectory                     4.2           expand
    gamma              Config.gamma                   3, 5.1        generate
    p_D(. | x_(<t+i))  q_draft of step i              4.2           expand
    p_i                confidences, max of q_draft    4.2           extras_wanted
    S(p)               Config.sizes, bounds           4.2           set_size
    X_i, K_i           extras of step i, counts       4.2           expand, extras_wanted
    x'_(t+i,j)         the j-th extra of step i       4.2           expand
    P, beta            Draft.tokens, their number     4.2, Alg. 2   expand
    pos(i)             depth of a node                4.2, Alg. 2   common.verify
    A                  (inside the target's layers)   4.2
    Mask_CAPE          ancestor_mask                  4.2           common (drawing in expand)
    k                  Config.width                   5.1           beam
    32 tokens          Config.max_tokens              5.3           expand
    S[..]              sizes, each one less           Alg. 1        set_size
    P, p_i, T          q_draft, its rows, trajectory  Alg. 1        expand
    K_i, R             extras, paths of the tree      Alg. 1        expand
    input, input_pi    tokens and depths              Alg. 2        common.verify
    CAM, VAM           chain's mask, whole mask       Alg. 2        common.ancestor_mask

Deviations
    1. paper silent, where section 4.2 and Algorithm 1 differ: here the sizes are those of 4.2,
       without the trajectory's token, and a range includes its upper bound. The algorithm's array
       of ten counts that token, includes the lower bounds, and has no entry for p = 1.
    2. paper silent: CAPE's gamma (5 is that of 5.1 for GLIDE alone; upstream drafts 4 tokens, and
       4 x 8 = 32), and how the limit of 32 is kept, which 5 x 8 can pass. Here the extras of least
       worth are dropped first, and the trajectory always stays. Worth is the chance of being
       reached and right, in greedy decoding by a calibrated drafter; in sampling a score only.
    3. ours: sampling is lossless too. Under sampling the trajectory is drawn from the drafter and
       verified by rejection sampling; when a draft token is refused, the target's own draw from the
       residual distribution may hit an extra, and is then kept together with its key and value. The
       residual does not depend on which extras were listed, so the output distribution is the
       target's. p_i stays the largest probability, after all processors and over the base's draft
       vocabulary, but X_i leaves out the drawn token, not the likeliest.
    4. ours: `expansion="confidence"` lists what is worth a row of the verification, at any step,
       and stops the trajectory where nothing is (`worthwhile`); tokens copied from the context may
       stand beside all of it (`copies`, off by default).
    5. ours: `max_tokens` cuts extras only. The trajectory, beams and copies are not cut. Beams are
       drafted one after another, so the drafting of four takes about four times as long (table 3:
       twice), and without the processors (temperature, penalties) that verification applies.
    6. ours: other S(p) than the paper's; refit_sizes in support/fitting.py chooses them for a
       machine from measured acceptance and cost (bench.py --refit). The default is the paper's.
"""

import bisect
import heapq
import importlib
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import common
from common import option


@dataclass
class Config:
    base: str = option("glide", "chain proposer to expand", True)
    gamma: int = option(5, "(greatest) length of the trajectory", True)
    expansion: str = option("cape", "cape, confidence, fixed, beam or none", True)
    sizes: list[int] = option(lambda: [7, 5, 3, 1], "S(p): extras for each range of p", True)
    bounds: list[float] = option(lambda: [0.3, 0.6, 0.8], "their upper bounds, but the last", True)
    # a row pays where this chance exceeds the ms it adds to a verification over those of a token
    least_worth: float = option(0.03, "confidence: least chance of being reached and right", True)
    width: int = option(4, "extras a step (fixed) or beams (beam)", True)
    max_tokens: int = option(32, "most draft tokens a round; cuts extras only", True)
    copies: int = option(0, "tokens copied from the context (prompt lookup); 0: the paper's", True)


VARIANTS = {
    "none": {"expansion": "none"},  # GLIDE alone
    "fixed": {"expansion": "fixed"},  # section 5.4
    "beam4": {"expansion": "beam", "width": 4},  # Table 3, and the next
    "beam8": {"expansion": "beam", "width": 8},
    "cpu": {"gamma": 2, "sizes": [2, 1, 1, 0]},  # fitted to the shipped GLIDE and two CPU cores
    "copies": {"copies": 16},
    "confidence": {"expansion": "confidence"},  # its least_worth: by hand
    "both": {"expansion": "confidence", "copies": 16},
}


# ---------------------------------------------------------------------------------------- expansion


def set_size(confidence: float, sizes: list[int], bounds: list[float]) -> int:
    """S(p) of 4.2: extras beside a draft token; sizes[i] serves up to and including bounds[i]."""
    return sizes[bisect.bisect_left(bounds, confidence)]


def extras_wanted(config: Config, confidences: list[float]) -> list[int]:
    """K_i: the most extras for each step, of these confidences."""
    if config.expansion == "cape":
        return [set_size(p, config.sizes, config.bounds) for p in confidences]
    most = {"none": 0, "fixed": config.width, "confidence": config.max_tokens}
    return [most[config.expansion]] * len(confidences)


def worthwhile(steps, least_worth: float):
    """The steps of a chain proposer up to where no token is worth a row of the verification.

    A node's worth is the probability that the round gets to its parent times the drafter's
    probability of the token: the chance that greedy decoding accepts it, under a calibrated
    drafter. Under sampling it is a score only, as a drawn token is accepted with min(1, p / q).

    Sampling stays exact, although it is cut here. Step i is left out for what the tokens before it
    are, and for its distribution as a whole (the largest probability), never for the token that was
    drawn from it: the drawn one may be worth less and stays. So, given that step i is in the tree,
    its token is still a draw from q_draft, as rejection sampling supposes; and where the trajectory
    ends, the target draws the next token itself. A cut by the drawn token's own probability would
    keep likely draws only, and the output would lean towards them.

    Args:
        steps: (token (1,), q_draft (V,), hidden) as a chain proposer yields them.
    """
    reached = 1.0
    for token, q_draft, hidden in steps:
        if reached * float(q_draft.max()) <= least_worth:
            return
        yield token, q_draft, hidden
        reached *= float(q_draft[token])
        if reached <= least_worth:  # the next step cannot pay: save its pass of the drafter
            return


def expand(
    steps: list,
    counts: list[int],
    max_tokens: int,
    input_ids: Tensor,
    do_sample: bool,
    least_worth: float = 0.0,
    stats=None,
) -> common.Draft:
    """Linearise a trajectory and its expansion sets into a token tree (4.2, Algorithms 1 and 2).

    The trajectory comes first, then the sets. A token sees the trajectory before it, and itself:

              root  x1 x2 x3  a1 b1 a2 a3      trajectory x1 x2 x3; a1, b1 in X_1; a2 in X_2;
         x1    x    x  .  .   .  .  .  .       a3 in X_3
         x2    x    x  x  .   .  .  .  .
         x3    x    x  x  x   .  .  .  .       parents: x1 -> root, x2 -> x1, x3 -> x2,
         a1    x    .  .  .   x  .  .  .                a1, b1 -> root, a2 -> x1, a3 -> x2
         b1    x    .  .  .   .  x  .  .
         a2    x    x  .  .   .  .  x  .
         a3    x    x  x  .   .  .  .  x

    An example: two steps over the tokens 0 to 3, counts [2, 1], max_tokens 4.

        step  q_draft             drafts   reached   next best   worth of an extra
        1     .10 .60 .25 .05     1        1         2, 0        .25, .10
        2     .50 .30 .15 .05     0        .60       1           .60 x .30 = .18

    Two extras fit beside the trajectory, and the best two are 2 of step 1 and 1 of step 2. So the
    tokens are 1, 0, 2, 1 and their parents -1 (the root), 0, -1, 0.

    Args:
        steps: (token (1,), q_draft (V,), hidden) as a chain proposer yields them, gamma of them.
        counts: K_i, the most extras for each step.
        max_tokens: most nodes in all; the extras of least worth are dropped first.
        least_worth: extras of this worth or less are left out, see `worthwhile`.
        stats: a common.Stats that is told every node's probability (for its trace).
    Returns:
        Draft; under sampling its probs are the trajectory's q_draft, as extras are not sampled.
    """
    trajectory = common.chain(steps, input_ids)
    gamma = len(steps)
    if not gamma:
        return trajectory
    room = max(0, max_tokens - gamma)
    q_draft = trajectory.probs  # (gamma, V)
    drafted = trajectory.tokens[:, None]  # (gamma, 1)
    chance = q_draft.gather(1, drafted)[:, 0].tolist()  # of the drafted tokens, gamma numbers
    others = q_draft.scatter(1, drafted, 0.0)  # (gamma, V) without the trajectory's own tokens
    best = others.topk(min(max(counts), room, others.shape[1]), dim=-1)
    probabilities = best.values.tolist()  # (gamma, count)
    choices = best.indices.tolist()  # (gamma, count)

    candidates = []  # (worth, step, rank in the step)
    reached = 1.0  # probability that the round gets to this step, if decoding is greedy
    for step in range(gamma):
        for rank, probability in enumerate(probabilities[step][: counts[step]]):
            worth = reached * probability
            if worth > least_worth:
                candidates.append((worth, step, rank))
        reached *= chance[step]
    chosen = heapq.nlargest(room, candidates)
    places = sorted((step, rank) for _, step, rank in chosen)  # in the order of the sets

    extras = [choices[step][rank] for step, rank in places]
    if stats is not None:
        stats.note(q_nodes=chance + [probabilities[step][rank] for step, rank in places])
    tokens = torch.cat([trajectory.tokens, input_ids.new_tensor(extras)])  # (N,)
    above = [step - 1 for step, _ in places]  # an extra hangs where its step's token does
    parents = torch.cat([trajectory.parents, torch.tensor(above, dtype=torch.long)])  # (N,)
    return common.Draft(tokens, parents, q_draft if do_sample else None)


def beam(
    base, base_drafter, target, input_ids, cache, memory, gamma: int, width: int
) -> common.Draft:
    """Beam search as a token tree, the paper's rival: the best `width` proposals of gamma tokens.

    Section 5.1: every level keeps the `width` continuations of highest probability among all of
    the beams before; the tree is that of the proposals left at the end, which share beginnings.
    Each beam is a call of the base with the beam's tokens appended: one drafter pass for the first
    level, `width` in turn for every later one. A pass feeds again what its beam does not share with
    the beam before. `max_tokens` does not cut the tree, and the logits processors do not shape it.
    """
    beams = [(0.0, [])]  # log-probability and tokens of each proposal
    for _ in range(gamma):
        grown = []
        for score, path in beams:
            ids = torch.cat([input_ids, input_ids.new_tensor([path])], dim=1)
            _, q_draft, _ = next(base.propose(base_drafter, target, ids, cache, memory))
            best = q_draft.topk(min(width, len(q_draft)))
            for probability, token in zip(best.values.tolist(), best.indices.tolist()):
                if probability > 0:
                    grown.append((score + math.log(probability), [*path, token]))
        beams = heapq.nlargest(width, grown)

    tokens = []
    parents = []
    node_of = {(): -1}  # tokens of a path: its last node
    for _, path in beams:
        for depth, token in enumerate(path):
            prefix = tuple(path[: depth + 1])
            if prefix not in node_of:
                node_of[prefix] = len(tokens)
                tokens.append(token)
                parents.append(node_of[prefix[:-1]])
    return common.Draft(input_ids.new_tensor(tokens), torch.tensor(parents, dtype=torch.long))


# ----------------------------------------------------------------------------------------- decoding


def checked_config(**given) -> Config:
    """The Config of what was given (None: not given); ValueError where its parts do not fit."""
    config = Config(**{name: value for name, value in given.items() if value is not None})
    kinds = ("cape", "confidence", "fixed", "beam", "none")
    if config.expansion not in kinds:
        raise ValueError(f"unknown expansion {config.expansion!r}; take one of {', '.join(kinds)}")
    fits = len(config.sizes) == len(config.bounds) + 1 and min(config.sizes) >= 0
    if not fits or list(config.bounds) != sorted(config.bounds):
        raise ValueError(
            "sizes needs one entry more than bounds, none negative, and bounds must ascend"
        )
    return config


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
    least_worth=None,
    width=None,
    max_tokens=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """Lossless decoding, on top of a chain proposer.

    `target.generate(**enc, custom_generate=cape.generate, base=glide, base_drafter=drafter)`

    Args:
        base, base_drafter: module of a chain proposer, its trained drafter. The module has propose
            and new_memory, whose result has a `cache`, a common.DraftCache.
        gamma to copies: the fields of Config, which holds their defaults.
        stats: a common.Stats to fill.
        token_streamer: a streamer of transformers (which does not hand `streamer` on).
    Returns:
        (1, T') prompt and new tokens.
    Raises:
        ValueError: an unknown expansion, a table whose parts do not fit, or a name as base.
    """
    config = checked_config(
        gamma=gamma,
        expansion=expansion,
        sizes=sizes,
        bounds=bounds,
        least_worth=least_worth,
        width=width,
        max_tokens=max_tokens,
        copies=copies,
    )
    if isinstance(base, str):
        raise ValueError(f"base is the module of a method: import {base}, then base={base}")
    least_worth = config.least_worth if config.expansion == "confidence" else 0.0
    stats = stats or common.Stats()
    do_sample = generation_config.do_sample
    cache, _ = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    memory = base.new_memory(base_drafter, target)
    lookup = common.Lookup(config.copies)
    done = False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = generation_config.max_length - input_ids.shape[1] - 1  # one place is the bonus's
            depth = min(config.gamma, room)
            if config.expansion == "beam":
                draft = beam(
                    base, base_drafter, target, input_ids, cache, memory, depth, config.width
                )
            else:
                steps = base.propose(
                    base_drafter, target, input_ids, cache, memory, logits_processor, do_sample
                )
                if config.expansion == "confidence":
                    steps = worthwhile(steps, least_worth)
                steps = list(itertools.islice(steps, depth))
                confidences = []  # p_i, as many as steps
                if steps:
                    confidences = torch.stack([q_draft.max() for _, q_draft, _ in steps]).tolist()
                counts = extras_wanted(config, confidences)
                stats.note(confidences=confidences, counts=counts)
                most = config.max_tokens
                draft = expand(steps, counts, most, input_ids, do_sample, least_worth, stats)
            draft = lookup.merge(draft, input_ids, room)
        verdict = common.verify(target, input_ids, draft, cache, logits_processor, do_sample, stats)
        tokens = verdict.tokens  # (1, A + 1)
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    name = Config().base
    if not Path(__file__).with_name(f"{name}.py").is_file():
        missing = f"{name}.py, whose drafts it expands, is not here; copy it, too"
        print(f"cape.py: {missing}", file=sys.stderr)
        sys.exit(2)
    base = importlib.import_module(name)
    common.demo(generate, base.Drafter, name, "base_drafter", base=base)
