"""Linear layers with weights packed once for oneDNN: the same float32 arithmetic, two to three times faster on a CPU.

PyTorch's `F.linear` packs the weight again on every call. For one row that hardly matters, for the 2 to 32 rows of a
verification it costs more than the multiplication, and would hide what speculative decoding is about: on a machine that
reads weights more slowly than it multiplies, a few tokens cost about as much as one. The two operators are those that
torch.compile emits for frozen CPU models. The packed copy is kept beside the weight, which embeddings may share.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """x (..., D) times a packed weight (O, D), plus bias (O,); under four rows are padded, which is faster."""
    rows = x.flatten(0, -2)  # (n, D)
    padded = F.pad(rows, (0, 0, 0, 4 - len(rows))) if len(rows) < 4 else rows
    out = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[: len(rows)].unflatten(0, x.shape[:-1])


def pack(model: nn.Module, rows: int = 8) -> nn.Module:
    """Let every frozen float32 nn.Linear of `model` on the CPU compute with a packed weight; others are left alone.

    Args:
        rows: number of rows for which the layout is chosen; any number works.
    Returns:
        The model, changed in place.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) is nn.Linear and weight.device.type == "cpu" and weight.dtype == torch.float32:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
            module.forward = functools.partial(linear, packed, module.bias)
    heads = model.packed_heads = WeakIdKeyDictionary()  # for common.draft_head, which asks once for each drafter
    model.pack_head = lambda token_ids, head: heads.setdefault(token_ids, pack(head, rows))
    return model
