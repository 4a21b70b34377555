"""Beam search with GLIDE's drafter as a draft, CAPE's rival.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 5.1 and Table 3.

At each level the `width` most probable proposals are kept, and those that are left at
the end form the draft tree. Width 2, gamma 3:

        root -+- a -+- c --- f      proposals left: a c f, a d g
              |     +- d --- g
              (b fell out when a c and a d became more probable)

A level costs one pass of the drafter, in which all proposals are fed side by side.
Their rows in the drafter's cache form a tree, and each reads only its own branch:

                  text    root   a  b   c  d
        level 1  c   x  ..  x    x  .   x  .
                 d   x  ..  x    x  .   .  x

Licence: Apache-2.0.
"""

import heapq
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import glide
from common import option


@dataclass
class Config:
    gamma: int = option(4, "tokens of a proposal", decode=True)
    width: int = option(4, "proposals kept at each level", decode=True)

    def __post_init__(self):
        common.at_least(self, gamma=0, width=1)


VARIANTS = {"width8": {"width": 8}}


def feed_level(drafter, decoding, cache, fed: list[tuple], count: int) -> Tensor:
    """Feed the last tokens of the last `count` proposals; hidden states (count, D).

    fed: all proposals fed in this round, each a tuple of tokens; shorter ones first.
        Their rows follow those of the text in the drafter's cache, in this order.
    """
    root = decoding.ids.shape[1] - 1  # its row
    node_of = {path: node for node, path in enumerate([(), *fed], start=-1)}
    sees = common.tree_mask([node_of[path[:-1]] for path in fed])[-count:]
    self_mask = F.pad(sees, (root, 0), value=True)[None, None].to(decoding.ids.device)
    new = decoding.ids.new_tensor([[path[-1] for path in fed[-count:]]])  # (1, count)
    positions = torch.full_like(new, decoding.first + root + len(fed[-1]))
    kv = {}  # all rows of the target; none after a prompt of one token
    if root > 0:
        kv = {layer: decoding.rows(layer) for layer in drafter.kv_layers}
    # The next round's `rewind` drops these rows, because their tokens are not recorded
    # as text. Accepted tokens are therefore fed once more, but in the pass that has to
    # feed the bonus token anyway.
    target = decoding.target
    return drafter(target, new, positions, kv, self_mask, None, cache)[0]


def propose(drafter, decoding, cache, head, depth: int, width: int) -> common.Draft:
    """The tree of the best `width` proposals of `depth` tokens.

    They are ranked as in greedy decoding, without logits processors.
    """
    beams = [(0.0, ())]  # log-probability and tokens of each proposal
    q_of = {}  # {proposal: probability of its last token}
    fed = []  # all proposals with a row in the drafter's cache
    for level in range(depth):
        if level == 0:
            for part in cache.rewind(decoding.ids).split(512, dim=1):
                hidden = glide.feed(drafter, decoding, cache, part)  # (1, D)
        else:
            fed += [path for _, path in beams]
            hidden = feed_level(drafter, decoding, cache, fed, len(beams))
        q_draft = head(hidden).float().softmax(-1)  # (beams, Vd)
        best = q_draft.topk(min(width, q_draft.shape[1]))
        tokens = drafter.vocab_ids[best.indices].tolist()
        grown = []
        for (score, path), *columns in zip(beams, tokens, best.values.tolist()):
            for token, q in zip(*columns):
                if q > 0:
                    q_of[(*path, token)] = q
                    grown.append((score + math.log(q), (*path, token)))
        beams = heapq.nlargest(width, grown)
        if not beams:  # every q is NaN
            break

    # Every beginning of a proposal is a node of the tree, up to an end of the answer.
    node_of = {}
    for _, path in beams:
        for end in range(1, depth + 1):
            node_of.setdefault(path[:end], len(node_of))
            if path[end - 1] in decoding.eos_ids:
                break
    return common.Draft(
        decoding.ids.new_tensor([path[-1] for path in node_of]),
        [node_of.get(path[:-1], -1) for path in node_of],
        notes={"q": [q_of[path] for path in node_of]},
    )


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    drafter: GLIDE's. changes: other values for fields of the Config, see there.
    """
    common.check_drafter(drafter, glide.Drafter, decoding.target)
    config = common.changed(Config(), changes)
    cache = common.DraftCache(drafter.config.num_layers)
    head = common.draft_head(decoding.target, drafter.vocab_ids)  # D -> Vd
    while not decoding.done:
        depth = min(config.gamma, decoding.max_depth)
        yield propose(drafter, decoding, cache, head, depth, config.width)
