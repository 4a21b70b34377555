"""Beam search as a draft, CAPE's rival (Du et al., ICML 2024, Table 3).

Section 5.1. Each level keeps the `width` most probable continuations.
The proposals left at the end form the draft tree. Width 2, gamma 3:

        root -+- a -+- c --- f      proposals left: a c f, a d g
              |     +- d --- g
              (b fell out when a c and a d became more probable)

Like cape.py, it works on any method that drafts a chain.

Licence: Apache-2.0.
"""

import copy
import heapq
import math
from dataclasses import dataclass

import torch

import common
from common import option


@dataclass
class Config:
    base: str = option("glide", "chain proposer to search with", decode=True)
    gamma: int = option(4, "tokens of a proposal", decode=True)
    width: int = option(4, "proposals kept at each level", decode=True)

    def __post_init__(self):
        common.at_least(self, gamma=0, width=1)


VARIANTS = {"width8": {"width": 8}}


def propose(base, base_drafter, decoding, memory, depth: int, width: int) -> common.Draft:
    """The tree of the best `width` proposals of `depth` tokens.

    Each proposal costs a pass of the base. It feeds again the tokens
    that differ from the proposal before.
    """
    # 1. Rank tokens as in greedy decoding, without logits processors.
    ranking = copy.copy(decoding)
    ranking.do_sample = False
    ranking.logits_processor = None

    # 2. Search. A proposal is a tuple of tokens.
    beams = [(0.0, ())]  # log-probability, proposal
    q_of = {}  # {proposal: probability of its last token}
    for _ in range(depth):
        grown = []
        for score, path in beams:
            ranking.ids = torch.cat([decoding.ids, decoding.ids.new_tensor([path])], dim=1)
            _, q_draft, _ = next(base.propose(base_drafter, ranking, memory))
            best = q_draft.topk(min(width, len(q_draft)))
            for token, q in zip(best.indices.tolist(), best.values.tolist()):
                if q > 0:
                    q_of[(*path, token)] = q
                    grown.append((score + math.log(q), (*path, token)))
        beams = heapq.nlargest(width, grown)

    # 3. Every beginning of a proposal is a node of the tree.
    node_of = {}
    for _, path in beams:
        for end in range(1, depth + 1):
            node_of.setdefault(path[:end], len(node_of))
    parents = [node_of.get(path[:-1], -1) for path in node_of]
    return common.Draft(
        decoding.ids.new_tensor([path[-1] for path in node_of]),
        torch.tensor(parents, dtype=torch.long),
        q=torch.tensor([q_of[path] for path in node_of], device=decoding.ids.device),
    )


@torch.no_grad()
def drafts(decoding, base, base_drafter, config: Config):
    """Yield one draft per round, which the caller verifies."""
    memory = base.Memory(base_drafter, decoding.target)
    while not decoding.done:
        depth = min(config.gamma, decoding.room)
        yield propose(base, base_drafter, decoding, memory, depth, config.width)


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
    """Lossless decoding; the arguments are those of cape.generate."""
    common.check_drafter(base_drafter, base.Drafter, target)
    common.check_config(config, Config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, base, base_drafter, config or Config()):
        decoding.verify(draft)
    return decoding.ids
