"""Linear layers packed once for oneDNN: two to three times faster on a CPU.

The arithmetic stays float32. `F.linear` packs its weight on every call. For
the 2 to 32 rows of a verification, packing costs more than multiplying and
would hide why speculative decoding works: where reading weights is slower
than multiplying, a few tokens cost about as much as one. The two operators
are those that torch.compile emits for frozen CPU models. The packed copy
is kept beside the weight, which embeddings may share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "grouped_sdpa"  # its name among transformers' attention functions


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of query (B, H, T, Dh) to key and value (B, Hkv, P, Dh).

    With a mask, transformers copies keys and values for every query head of a group.
    This gives the same numbers without those copies.
    """
    if attention_mask is None or "position_bias" in options:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    # The G heads of a group read the same rows, so they become one head of G T queries,
    # for which those rows are read once.
    queries = query.reshape(*key.shape[:2], -1, key.shape[3])  # (B, Hkv, G T, Dh)
    mask = torch.cat([attention_mask] * (query.shape[1] // key.shape[1]), dim=2)
    out = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    out = out.view(*query.shape[:3], -1)  # (B, H, T, Dh)
    return out.transpose(1, 2).contiguous(), None  # (B, T, H, Dh)


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class PackedLinear(nn.Linear):
    """A frozen float32 CPU layer with a packed copy of its weight (O, D)."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        # The layout is chosen for 8 rows, and any number of rows works.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 8)
        self.selected = WeakIdKeyDictionary()  # {token_ids: layer}

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., O); pads one to three rows, for speed."""
        rows = x.reshape(-1, self.in_features)  # (n, D)
        padded = F.pad(rows, (0, 0, 0, 4 - len(rows))) if len(rows) < 4 else rows
        out = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return out[: len(rows)].view(*x.shape[:-1], self.out_features)

    def select(self, token_ids: Tensor) -> "PackedLinear":
        """Rows `token_ids` (Vd,) as a packed layer, made once per tensor."""
        if token_ids not in self.selected:
            head = nn.Linear(self.in_features, len(token_ids), bias=False, device="meta")
            head.weight = nn.Parameter(self.weight[token_ids], requires_grad=False)
            self.selected[token_ids] = PackedLinear(head)
        return self.selected[token_ids]


def pack(model: nn.Module) -> nn.Module:
    """A float32 model on the CPU with every nn.Linear packed; others stay."""
    weight = next(model.parameters())
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not (fits and torch.backends.mkldnn.is_available()):  # not on macOS
        return model
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear(module))
    for module in model.modules():  # a drafter has several with a config
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation = ATTENTION
    return model
