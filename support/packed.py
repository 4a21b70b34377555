"""Linear layers for the few tokens of a verification, on a CPU.

Speculative decoding pays because a target forward over a few tokens costs about as much
as one over a single token: most of its time goes into reading the weights from memory,
and they are read once either way. `F.linear` on a CPU hides this, because it brings the
weight into the kernel's own layout again in every call, which for a few tokens costs
more than the multiplication. A packed weight is brought into this layout once. Three
kernels of torch compute the same product in float32:

    linear    F.linear, which needs no packing
    onednn    a float32 weight in oneDNN's layout (what torch.compile emits for a
              frozen model on a CPU); a bfloat16 weight where the processor has
              bfloat16 instructions
    float16   fbgemm: a weight kept as float16 and multiplied as float32. Half as many
              bytes are read, so one token takes half the time where reading is what
              takes the time.

Which one is fastest depends on the processor and on the number of tokens, so `pack`
measures. fbgemm works in blocks of six: a draft of five nodes and its root fill one
block, a sixth node starts another. Its operator is part of torch's quantisation, whose
Python side is moving to torchao, which has nothing in its place. If it leaves torch,
`candidates` no longer lists it and the others remain.
"""

import copy
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

KERNELS = ("linear", "onednn", "float16")
ATTENTION = "grouped_sdpa"  # its name among transformers' attention functions
SEVERAL = 6  # tokens of a verification, to choose its kernel by
SAMPLE = 128 * 2**20  # bytes of weights to measure on: more than a cache holds


def pack(
    model: nn.Module, kernels: tuple[str, str] | None = None, choose=None
) -> nn.Module:
    """A second model over the same weights, whose linear layers are packed.

    kernels: for one token and for several; None: what is measured to be the fastest.
    choose: measures in place of `fastest`, for a caller who remembers what it found.
    The model itself stays as it was. It is returned where there is nothing to pack: on
    a GPU, and in a dtype without kernels. `model.kernels` of what is returned tells the
    choice.
    """
    possible = candidates(model)
    if not possible:
        return model
    kernels = kernels or (choose or fastest)(model, possible)
    # A deep copy of the modules and configs, but not of the tensors.
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(x): x for x in tensors})
    for name, layer in linear_layers(twin).items():
        twin.set_submodule(name, PackedLinear(layer, kernels))
    for module in twin.modules():  # a drafter has several with a config
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if config._attn_implementation == "sdpa":
            config._attn_implementation = ATTENTION
    twin.kernels = kernels
    return twin


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """{name: layer} of the layers that can be packed."""
    modules = model.named_modules()
    return {name: module for name, module in modules if type(module) is nn.Linear}


class PackedLinear(nn.Linear):
    """A frozen linear layer on the CPU that computes with the chosen kernels.

    kernels: the names of one for a single token, and one for several.
    """

    def __init__(self, layer: nn.Linear, kernels: tuple[str, str]):
        super().__init__(
            layer.in_features, layer.out_features, bias=False, device="meta"
        )
        # The weight (O, D) itself stays beside what is packed, because embeddings share
        # it and because other code reads it.
        self.weight = layer.weight
        self.bias = layer.bias
        self.kernels = kernels
        bias = None if layer.bias is None else layer.bias.detach()
        made = {name: prepare(name, layer.weight.detach(), bias) for name in {*kernels}}
        self.one, self.several = (made[name] for name in kernels)
        self.selected = WeakIdKeyDictionary()  # {token_ids: layer}

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., O)."""
        vectors = x.reshape(-1, self.in_features)  # (n, D)
        product = self.one if len(vectors) == 1 else self.several
        return product(vectors).view(*x.shape[:-1], self.out_features)

    def __deepcopy__(self, memo) -> "PackedLinear":
        return self  # all that it holds is frozen

    def select(self, token_ids: Tensor) -> "PackedLinear":
        """Outputs `token_ids` (Vd,) as a packed layer, made once per tensor."""
        if token_ids not in self.selected:
            size = len(token_ids)
            head = nn.Linear(self.in_features, size, bias=False, device="meta")
            head.weight = nn.Parameter(self.weight[token_ids], requires_grad=False)
            self.selected[token_ids] = PackedLinear(head, self.kernels)
        return self.selected[token_ids]


# ---------------------------------------------------------------------------- kernels


def prepare(kernel: str, weight: Tensor, bias: Tensor | None):
    """A function from (n, D) to (n, O), for a weight (O, D) that stays as it is."""
    if kernel == "float16":
        prepack = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        return partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=prepack)
    if kernel == "onednn":
        # The layout is chosen for 8 tokens, and serves any number of them.
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, reordered, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)


def candidates(model: nn.Module) -> list[str]:
    """The kernels that compute this model's product; [] if it stays as it is."""
    weights = [layer.weight for layer in linear_layers(model).values()]
    dtypes = {weight.dtype for weight in weights}
    if any(weight.device.type != "cpu" for weight in weights):
        return []
    if dtypes == {torch.float32}:
        found = ["linear"]
        if torch.backends.mkldnn.is_available():  # not on macOS
            found.append("onednn")
        if torch.backends.quantized.engine in ("x86", "fbgemm"):  # not on ARM
            if all(map(is_float16, weights)):
                found.append("float16")
        return found
    if dtypes == {torch.bfloat16} and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ["linear", "onednn"]
    return []


def is_float16(weight: Tensor) -> bool:
    """Whether float16 holds the weight up to 2^-25, half of its smallest number."""
    # A weight that was trained or stored in bfloat16 passes too: bfloat16 has fewer
    # digits, so only numbers below 6e-5 are rounded, by at most 3e-8. A float32 sum of
    # hundreds of products rounds by more than that.
    return bool((weight - weight.half().float()).abs().max() <= 2**-25)


@torch.no_grad()
def fastest(model: nn.Module, kernels: list[str]) -> tuple[str, str]:
    """The fastest kernel for one token, and for several: a measurement of a second."""
    # The sample must not fit into a cache, or reading it would cost nothing.
    sample = []
    size = 0
    for layer in linear_layers(model).values():
        if size < SAMPLE:
            sample.append(layer.weight.detach())
            size += layer.weight.nbytes
    products = {name: [prepare(name, w, None) for w in sample] for name in kernels}
    best = []
    for count in (1, SEVERAL):
        inputs = [w.new_ones(count, w.shape[1]) for w in sample]
        seconds = dict.fromkeys(kernels, float("inf"))
        for _ in range(5):  # in turn, because the speed of a machine drifts
            for name, layers in products.items():
                start = time.perf_counter()
                for product, x in zip(layers, inputs):
                    product(x)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
        best.append(min(seconds, key=seconds.get))
    return tuple(best)


# -------------------------------------------------------------------------- attention


def grouped_attention(
    module, query, key, value, attention_mask, scaling=None, **options
):
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
    out = F.scaled_dot_product_attention(
        queries, key, value, attn_mask=mask, scale=scaling
    )
    out = out.view(*query.shape[:3], -1)  # (B, H, T, Dh)
    return out.transpose(1, 2).contiguous(), None  # (B, T, H, Dh)


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
