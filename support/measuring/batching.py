"""Several sequences at once with any method: GLIDE's appendix E and Table 4.

Each sequence has its own Decoding and draft generator. A round takes one draft from
each and runs the target once over all drafts, side by side in one row. The mask keeps
the sequences apart:

                         sequence 0          sequence 1
                      prefix  root n0   prefix  root n0 n1
        0  root        x  x    x   .     .  .    .   .  .
           n0          x  x    x   x     .  .    .   .  .
        1  root        .  .    .   .     x  x    x   .  .
           n0          .  .    .   .     x  x    x   x  .
           n1          .  .    .   .     x  x    x   x  x

There is no padding, and a finished sequence leaves the row.

Only the target's forward is shared. The drafts are made one sequence after another,
because sequences accept different numbers of tokens, so that each drafter would have to
be written for rows of different lengths. Appendix E has no algorithm for that: it
repeats one prompt, so that all lengths stay equal.

Licence: Apache-2.0.
"""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import common


class JointLayer(DynamicLayer):
    """Layer `index` of several caches as one, which gives each cache its new rows."""

    def __init__(self, caches: list, sizes: list[int], index: int):
        super().__init__()
        self.parts = [cache.layers[index] for cache in caches]
        self.sizes = sizes  # new rows of each

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append (1, Hkv, sum(n), Dh); returns (1, Hkv, sum(P + n), Dh)."""
        new_keys = key_states.split(self.sizes, dim=2)
        new_values = value_states.split(self.sizes, dim=2)
        joined = [
            part.update(k, v) for part, k, v in zip(self.parts, new_keys, new_values)
        ]
        keys, values = zip(*joined)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def joint_mask(masks: list[Tensor]) -> Tensor:
    """Masks (1, 1, n, P + n) as the blocks of one; outside of them all is forbidden."""
    may_attend = torch.block_diag(*[own[0, 0] == 0 for own in masks])
    mask = torch.zeros_like(may_attend, dtype=masks[0].dtype)
    return mask.masked_fill(~may_attend, torch.finfo(mask.dtype).min)[None, None]


def joint_score(target, decodings: list, drafts: list) -> list[tuple[Tensor, Tensor]]:
    """`common.score` of several sequences, each with its own draft, in one forward.

    Returns logits (N + 1, V) and last hidden states (N + 1, D) of each.
    """
    inputs = [
        common.tree_inputs(target, decoding.ids, draft)
        for decoding, draft in zip(decodings, drafts)
    ]
    fed, masks, positions = zip(*inputs)
    sizes = [ids.shape[1] for ids in fed]
    caches = [decoding.cache for decoding in decodings]
    cache = DynamicCache()
    cache.layers = [JointLayer(caches, sizes, n) for n in range(len(caches[0].layers))]
    logits, hidden = common.forward(
        target,
        cache,
        torch.cat(fed, dim=1),
        {kind: joint_mask([own[kind] for own in masks]) for kind in masks[0]},
        torch.cat(positions, dim=1),
    )
    return list(zip(logits.split(sizes), hidden.split(sizes)))


@torch.no_grad()
def generate(target, drafts, decodings: list, callback=None) -> list[Tensor]:
    """Decode several sequences at once, each as if it were alone.

    drafts: a function of a Decoding, which returns the generator of its drafts.
    decodings: of `common.start`; prompts of any lengths.
    callback: called with (decoding, draft, path) of each sequence after each round.
    Returns (1, T) prompt and new tokens of each.
    """
    generators = {decoding: drafts(decoding) for decoding in decodings}
    while live := [decoding for decoding in decodings if not decoding.done]:
        made = [next(generators[decoding]) for decoding in live]
        if len(live) == 1:  # nothing to join
            scored = [common.score(target, live[0].ids, made[0], live[0].cache)]
        else:
            scored = joint_score(target, live, made)
        for decoding, draft, own in zip(live, made, scored):
            path = decoding.commit(draft, *own)
            if callback is not None:
                callback(decoding, draft, path)
    return [decoding.ids for decoding in decodings]
