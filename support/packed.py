"""Linear layers and LSTMs for the few tokens of a verification, on a CPU.

Speculative decoding pays because a target forward over a few tokens costs about as much
as one over a single token: most of its time goes into reading the weights from memory,
and they are read once either way. `F.linear` on a CPU hides this, because every call
rearranges the weight into the kernel's own layout, which for a few tokens costs more
than the multiplication. A packed weight is brought into this layout once. Three
kernels of torch compute the same product in float32:

    linear    F.linear, which needs no packing
    onednn    a float32 weight in oneDNN's layout (what torch.compile emits for a
              frozen model on a CPU); a bfloat16 weight where the processor has
              bfloat16 instructions
    float16   fbgemm: a weight kept as float16 and multiplied as float32. Half as many
              bytes are read, so one token takes half the time where memory is the
              bottleneck.

Which one is fastest depends on the processor and on the number of tokens, so `pack`
measures. fbgemm works in blocks of six: a draft of five nodes and its root fill one
block, a sixth node starts another. Its operator is part of torch's quantisation, whose
Python side is moving to torchao, which has nothing in its place. If it leaves torch,
`candidates` no longer lists it and the others remain.
"""

import copy
import time
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "grouped_sdpa"  # its name among transformers' attention functions
SEVERAL = 6  # tokens of a verification, to choose its kernel by
SAMPLE = 128 * 2**20  # bytes of weights to measure on: more than a cache holds


def pack(model: nn.Module, kernels: tuple[str, str] | None = None) -> nn.Module:
    """A second model over the same weights, whose linear layers and LSTMs are packed.

    Layers that read the same input share one product, and norms are torch's own where
    that gives the same bits.

    kernels: for one token and for several; None, or what would round the weights: what
        is measured to be the fastest.
    The model itself stays as it was. It is returned where there is nothing to pack: on
    a GPU, and in a dtype without kernels. `model.kernels` of what is returned tells the
    choice.
    """
    possible = candidates(model)
    if not possible:
        return model
    if not kernels or not {*kernels} <= {*possible}:
        kernels = fastest(model, possible)
    # A deep copy of the modules and configs, but not of the tensors.
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(x): x for x in tensors})
    for module in list(twin.modules()):
        for names in TOGETHER:
            join(module, names, kernels)
    for name, module in list(twin.named_modules()):
        if type(module) is nn.Linear:
            twin.set_submodule(name, PackedLinear(module, kernels))
        elif can_pack_lstm(module):
            twin.set_submodule(name, PackedLSTM(module, kernels))
        norm = short_norm(module)
        if norm is not None:
            twin.set_submodule(name, norm)
    # transformers' Falcon calls torch's attention itself, and takes other names for
    # eager.
    modules = list(twin.modules())
    if all(getattr(x, "_supports_attention_backend", True) for x in modules):
        for module in modules:  # a drafter has several with a config
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == "sdpa":
                config._attn_implementation = ATTENTION
    twin.kernels = kernels
    return twin


def packable(model: nn.Module):
    """Yield the matrices that `pack` packs."""
    for module in model.modules():
        if type(module) is nn.Linear:
            yield module.weight
        elif can_pack_lstm(module):
            yield from (x for x in module.parameters() if x.ndim == 2)


def with_own_weights(layer, memo):
    """A deep copy of a packed layer, in which only what is packed stays shared."""
    twin = copy.copy(layer)
    twin._parameters = copy.deepcopy(layer._parameters, memo)
    return twin


class PackedLinear(nn.Linear):
    """A frozen linear layer on the CPU that computes with the chosen kernels.

    kernels: the names of one for a single token, and one for several.
    outputs: a function from x (..., D) to (..., O); None: the layer's own product.
    """

    def __init__(self, layer: nn.Linear, kernels: tuple[str, str], outputs=None):
        super().__init__(
            layer.in_features, layer.out_features, bias=False, device="meta"
        )
        # The weight (O, D) itself stays beside what is packed, because embeddings share
        # it and because other code reads it.
        self.weight = layer.weight
        self.bias = layer.bias
        self.kernels = kernels
        if outputs is None:
            bias = None if layer.bias is None else layer.bias.detach()
            outputs = product(layer.weight.detach(), bias, kernels)
        self.outputs = outputs
        self.selected = WeakIdKeyDictionary()  # {token_ids: layer}

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., O)."""
        return self.outputs(x)

    __deepcopy__ = with_own_weights

    def select(self, token_ids: Tensor) -> "PackedLinear":
        """Outputs `token_ids` (Vd,) as a packed layer, made once per tensor."""
        if self.bias is None and len(token_ids) == self.out_features:
            return self
        if token_ids not in self.selected:
            size = len(token_ids)
            head = nn.Linear(self.in_features, size, bias=False, device="meta")
            head.weight = nn.Parameter(self.weight[token_ids], requires_grad=False)
            self.selected[token_ids] = PackedLinear(head, self.kernels)
        return self.selected[token_ids]


def can_pack_lstm(module: nn.Module) -> bool:
    """Whether a PackedLSTM can take its place."""
    return (
        type(module) is nn.LSTM
        and module.batch_first
        and module.bias
        and not (module.bidirectional or module.proj_size or module.dropout)
    )


class PackedLSTM(nn.Module):
    """A frozen LSTM on the CPU, for inputs of at least one step (`can_pack_lstm`).

    torch's own brings its weights into another layout in every call.
    """

    def __init__(self, lstm: nn.LSTM, kernels: tuple[str, str]):
        super().__init__()
        for name, weight in lstm.named_parameters():
            self.register_parameter(name, weight)
        self.hidden_size = lstm.hidden_size
        self.layers = []  # the products with the input and with h, of each layer
        for number in range(lstm.num_layers):
            w_ih, w_hh, b_ih, b_hh = (x.detach() for x in lstm.all_weights[number])
            from_input = product(w_ih, b_ih + b_hh, kernels)
            self.layers.append((from_input, product(w_hh, None, kernels)))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None):
        """Map x (B, T, D) to (B, T, H), and the state to the one after it.

        state: h and c of the layers, (layers, B, H) each; None: zeros.
        """
        if state is None:
            zeros = x.new_zeros(len(self.layers), x.shape[0], self.hidden_size)
            state = zeros, zeros
        last = []
        for (from_input, from_h), h, c in zip(self.layers, *state):
            outputs = []
            for gates in from_input(x).unbind(1):  # (B, 4 H), a step at a time
                i, f, g, o = (gates + from_h(h)).chunk(4, dim=-1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(h)
            x = torch.stack(outputs, dim=1)
            last.append((h, c))
        h, c = (torch.stack(of_layers) for of_layers in zip(*last))
        return x, (h, c)

    __deepcopy__ = with_own_weights


# --------------------------------------------------------------------- fewer operators

# Layers that read the same input, by their names in Llama and its relatives.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join(parent: nn.Module, names: tuple[str, ...], kernels: tuple[str, str]) -> None:
    """Let the linear layers of `parent` with these names share one product."""
    found = {name: getattr(parent, name, None) for name in names}
    layers = {name: x for name, x in found.items() if type(x) is nn.Linear}
    # `linear` packs nothing, so a joint weight would be a second one in memory.
    same_input = len({layer.in_features for layer in layers.values()}) == 1
    if len(layers) == 1 or not same_input or "linear" in kernels:
        return
    shared = SharedProduct(list(layers.values()), kernels)
    for index, (name, layer) in enumerate(layers.items()):
        packed = PackedLinear(layer, kernels, partial(shared, index))
        setattr(parent, name, packed)


class SharedProduct:
    """The product of several layers, computed when the first of them is called.

    For a few tokens, a call costs something whatever the size of its weight, so one
    large product takes less time than three small ones.
    """

    def __init__(self, layers: list[nn.Linear], kernels: tuple[str, str]):
        self.sizes = [layer.out_features for layer in layers]
        bias = None
        if any(layer.bias is not None for layer in layers):
            zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
            biases = [z if x.bias is None else x.bias for x, z in zip(layers, zeros)]
            bias = torch.cat(biases).detach()
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.product = product(weight, bias, kernels)
        self.newest = (None, None, None, 0)  # input, its version, outputs, calls so far

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """What layer `index` maps x (..., D) to."""
        # The names only say that the layers are likely to be called with the same
        # tensor. Whether they are is looked at here, and if not, each call computes.
        version = None if x.is_inference() else x._version  # it counts writes into x
        input, its_version, outputs, calls = self.newest
        if input is not x or its_version != version:
            outputs, calls = self.product(x).split(self.sizes, dim=-1), 0
        last = calls + 1 == len(self.sizes)  # in whatever order; then nothing is kept
        kept = (x, version, outputs, calls + 1)
        self.newest = (None, None, None, 0) if last else kept
        return outputs[index]


def short_norm(module: nn.Module) -> nn.RMSNorm | None:
    """torch's RMSNorm in the place of a model's own, where both give the same bits.

    transformers computes the norm in six operators, of which a forward over one token
    has hundreds. None: the module is something else.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    # A gated norm takes a second tensor, and FalconMamba's weight is not a parameter.
    named = type(module) is not nn.RMSNorm and type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, nn.Parameter) or eps is None:
        return None
    norm = nn.RMSNorm(weight.shape, eps, device="meta")
    norm.weight = weight
    # Some norms multiply by 1 + weight, or round in between, so it is tried.
    x = torch.arange(8 * weight.numel(), dtype=weight.dtype).sin() * 10
    x = x.view(8, *weight.shape)
    with torch.no_grad():
        return norm if torch.equal(norm(x), module(x)) else None


# ---------------------------------------------------------------------------- kernels


def product(weight: Tensor, bias: Tensor | None, kernels: tuple[str, str]):
    """A function from (..., D) to (..., O): one kernel for a token, one for several."""
    width = weight.shape[1]
    made = {name: prepare(name, weight, bias) for name in {*kernels}}
    one, several = (made[name] for name in kernels)

    def compute(x: Tensor) -> Tensor:
        if x.ndim == 1:  # fbgemm takes no vector
            return one(x[None])[0]
        return one(x) if x.numel() == width else several(x)

    return compute


@cache
def float16_product():
    """fbgemm's operator, as a function of x (..., D) and a packed weight."""
    # Called from Python it takes 24 us before it computes anything, because a packed
    # weight is not a tensor, and called from TorchScript 8 us. A forward of the default
    # target calls it 121 times.
    source = """
def product(x: Tensor, w: torch.classes.quantized.LinearPackedParamsBase) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, w)
"""
    return torch.jit.CompilationUnit(source).product


def prepare(kernel: str, weight: Tensor, bias: Tensor | None):
    """A function from (..., D) to (..., O), for a weight (O, D) that stays as it is."""
    if kernel == "float16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        return partial(float16_product(), w=packed)
    if kernel == "onednn":
        # The layout is chosen for 8 tokens, and serves any number of them.
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, reordered, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)


def candidates(model: nn.Module) -> list[str]:
    """The kernels that compute this model's product; [] if it stays as it is."""
    weights = [*packable(model)]
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
    for weight in packable(model):
        if size < SAMPLE:
            sample.append(weight.detach())
            size += weight.nbytes
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
