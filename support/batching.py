"""Several sequences at once with any method: GLIDE's appendix E and Table 4.

Each sequence has its own Decoding and draft generator. A round takes one
draft from each and runs the target once over all drafts, side by side in
one row. The mask keeps the sequences apart:

                         sequence 0          sequence 1
                      prefix  root n0   prefix  root n0 n1
        0  root        x  x    x   .     .  .    .   .  .
           n0          x  x    x   x     .  .    .   .  .
        1  root        .  .    .   .     x  x    x   .  .
           n0          .  .    .   .     x  x    x   x  .
           n1          .  .    .   .     x  x    x   x  x

There is no padding, and a finished sequence leaves the row. The drafters
run one sequence after another.
"""

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import common


class JointLayer(DynamicLayer):
    """Layer `index` of several caches, joined; each gets its new rows."""

    def __init__(self, caches: list, sizes: list[int], index: int):
        super().__init__()
        self.parts = [cache.layers[index] for cache in caches]
        self.sizes = sizes  # new rows of each

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append (1, Hkv, sum(n), Dh); returns (1, Hkv, sum(P + n), Dh)."""
        new = zip(self.parts, key_states.split(self.sizes, 2), value_states.split(self.sizes, 2))
        keys, values = zip(*(part.update(k, v) for part, k, v in new))
        return torch.cat(keys, 2), torch.cat(values, 2)


def joint_forward(target, decodings: list, drafts: list) -> list[tuple[Tensor, Tensor]]:
    """One target forward over the drafts of several sequences.

    Returns: logits (1, N + 1, V), hidden states (1, N + 1, D) of each.
    """
    # 1. Lay the trees side by side.
    caches = [decoding.cache for decoding in decodings]
    inputs = []
    for decoding, draft in zip(decodings, drafts):
        inputs.append(common.tree_inputs(decoding.ids, draft, target.dtype))
    fed, masks, positions = zip(*inputs)
    sizes = [ids.shape[1] for ids in fed]

    # 2. Each block of the mask is one sequence's own; all else is forbidden.
    may_attend = torch.block_diag(*[(own == 0)[0, 0] for own in masks])
    mask = torch.zeros_like(may_attend, dtype=target.dtype)
    mask = mask.masked_fill(~may_attend, torch.finfo(target.dtype).min)[None, None]

    # 3. The layers write each sequence's rows to its own cache.
    cache = DynamicCache()
    cache.layers = [JointLayer(caches, sizes, n) for n in range(len(caches[0].layers))]
    logits, hidden = common.forward(
        target, torch.cat(fed, dim=1), cache, mask, torch.cat(positions, dim=1)
    )
    return list(zip(logits.split(sizes, dim=1), hidden.split(sizes, dim=1)))


@torch.no_grad()
def generate(target, module, kwargs: dict, decodings: list[common.Decoding]) -> list[Tensor]:
    """Decode several sequences at once, each as if it were alone.

    Args:
        module, kwargs: of a method, for module.drafts(decoding, **kwargs).
        decodings: of `common.open_decoding`; prompts of any lengths.
    Returns:
        Of each (1, T') prompt and new tokens.
    """
    generators = {decoding: module.drafts(decoding, **kwargs) for decoding in decodings}
    if len(decodings) == 1:  # its Decoding can tell drafting and verifying apart
        [decoding] = decodings
        for draft in generators[decoding]:
            decoding.verify(draft)
        return [decoding.ids]
    while live := [decoding for decoding in decodings if not decoding.done]:
        drafts = [decoding.with_copies(next(generators[decoding])) for decoding in live]
        scored = joint_forward(target, live, drafts)
        for decoding, draft, own in zip(live, drafts, scored):
            decoding.verify(draft, own)
    return [decoding.ids for decoding in decodings]
