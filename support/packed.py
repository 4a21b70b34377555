"""Linear layers whose weights are packed once for oneDNN: two to three times faster on a CPU.

The arithmetic is float32 as before. PyTorch's `F.linear` packs the weight again on every call. For
one row that hardly matters, for the 2 to 32 rows of a verification it costs more than the
multiplication, and would hide what speculative decoding is about: on a machine that reads weights
more slowly than it multiplies, a few tokens cost about as much as one. The two operators are those
that torch.compile emits for frozen CPU models. The packed copy is kept beside the weight, which
embeddings may share.

For the same reason `pack` asks transformers not to copy the cached keys and values for every query
head of a group, as it does for a forward with a mask but not for that of a single token: a tenth
of a verification or more, and the same numbers.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class PackedLinear(nn.Linear):
    """A frozen float32 linear layer on the CPU with a packed copy of its weight (O, D).

    Args: layer: whose weight and bias to share. rows: how many to choose the layout for; any number
        works.
    """

    def __init__(self, layer: nn.Linear, rows: int = 8):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.rows = rows
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
        self.selected = WeakIdKeyDictionary()  # {token_ids: their rows as a layer}, as they live

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) times the weight, plus bias: (..., O). One to three rows are padded to four,
        which is faster.
        """
        rows = x.flatten(0, -2)  # (n, D)
        padded = F.pad(rows, (0, 0, 0, 4 - len(rows))) if len(rows) < 4 else rows
        out = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return out[: len(rows)].unflatten(0, x.shape[:-1])

    def select(self, token_ids: Tensor) -> PackedLinear:
        """The rows `token_ids` (Vd,) as a packed layer D -> Vd, made once for each such tensor."""
        if token_ids not in self.selected:
            head = nn.Linear(self.in_features, len(token_ids), bias=False, device="meta")
            head.weight = nn.Parameter(self.weight[token_ids], requires_grad=False)
            self.selected[token_ids] = PackedLinear(head, self.rows)
        return self.selected[token_ids]


def pack(model: nn.Module) -> nn.Module:
    """The model with a PackedLinear in place of every float32 nn.Linear on the CPU.

    If there is one, this process leaves grouped keys and values uncopied from then on.
    """

    def packs(module: nn.Module) -> bool:
        if type(module) is not nn.Linear:
            return False
        return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32

    if any(map(packs, model.modules())):  # on a GPU that would choose a slower kernel
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # read at every attention
    for module in list(model.modules()):
        for name, child in module.named_children():
            if packs(child):
                setattr(module, name, PackedLinear(child))
    return PackedLinear(model) if packs(model) else model
