"""GLIDE: a drafter that reads the target's KV cache (Du et al., ICML 2024).

Paper: arXiv:2402.02082, section 4.1. The drafter is a small transformer.
Each layer has a cross-attention sub-layer without keys and values of its own:
it attends to the keys and values that the target has cached, a row for each
earlier token. The newest token x_t and the tokens drafted after it have no
target rows yet (x readable, . absent):

              tokens      x_1 ... x_(t-1)     x_t     x_(t+1) ... x_(t+i-1)
        target's rows      x  x  x             .          .  .  .
        drafter's rows     x  x  x             x          x  x  x   ->  q_draft of x_(t+i)

Training imitates this delay with `block_mask`.

Names that differ from the paper's: M_T and M_D are `target` and `drafter`,
N_D is `Config.num_layers`, L is `block_size`, W_j and W^O are `q_proj` and
`o_proj`, H^m is the `x` of CrossAttention, p_D is `q_draft`, c is `cost`.

Deviations from the paper:
    1. The drafter uses the target's frozen embedding and LM head, so it is
       as wide as the target, and starts from the target's weights.
    2. It drafts only frequent tokens of the training data (`draft_vocab`).
    3. The loss takes the target's distribution as its label, over answers
       only. `distill=False` takes the data's tokens, as the paper does, but
       here the target wrote the data (the paper's appendix C).
    4. A query's block is that of its own token, as in the formula of 4.1; the
       prose there takes the predicted token's. The first block has a random
       length, new in each training step, so that every token is trained at
       every delay.
    5. Not in the paper: pre-norm and residual of the cross-attention, zero
       output where no row is readable. Queries are rotated, because the
       cached keys are. Every token is a query, those before x_t too.
    6. The shipped drafter has L = gamma = 3 (the paper: 5). It reads target
       layer 18 of 0 to 29, which holds induction heads; the paper reads the top
       layers. Trained alike, tau and speed are level (results/README.md).

Licence: Apache-2.0.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    num_layers: int = option(1, "drafter layers, N_D")
    intermediate_size: int = option(1536, "width of the feed-forward layer")
    cross_attention: bool = option(True, "read the target's cache; off is the Vanilla Drafter")
    kv_layer: int = option(-1, "target layer that every drafter layer reads; -1: the top ones")
    query_norm: bool = option(False, "normalise the queries, as Qwen3 does (filled in by build)")
    block_size: int = option(5, "L, tokens in a block of the training mask")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    distill: bool = option(True, "train on the target's distribution, not on the data")
    gamma: int = option(5, "draft tokens per round", decode=True)

    def __post_init__(self):
        common.at_least(self, num_layers=1, kv_layer=-1, block_size=1, draft_vocab=0, gamma=0)


VARIANTS = {f"gamma{n}": {"gamma": n} for n in (1, 2, 3, 4, 5)}


# -------------------------------------------------------------------------------- architecture


def attend_or_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q (B, H, T, Dh) over P rows; zero where all are masked."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    # A softmax over no keys can be NaN. So a query without readable rows reads
    # all of them, and its output is set to zero.
    some = mask.any(-1, keepdim=True)  # (B or 1, 1, T, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~some, enable_gqa=True)
    return out * some


class CrossAttention(nn.Module):
    """The drafter's queries read the target's keys and values (4.1)."""

    def __init__(self, config: Config):
        super().__init__()
        shape = config.target
        self.head_dim = shape["head_dim"]
        width = shape["num_heads"] * self.head_dim
        self.q_proj = nn.Linear(shape["hidden_size"], width, bias=False)
        self.o_proj = nn.Linear(width, shape["hidden_size"], bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if config.query_norm else None

    def forward(self, x: Tensor, kv, tables, mask: Tensor | None) -> Tensor:
        """x (B, T, D) to (B, T, D); kv: (K, V), each (B, Hkv, P, Dh).

        mask: (B or 1, 1, T, P) bool, True = may attend; None: attend to all.
        """
        # Q^(m,j) = H^m W_j, all heads j at once.
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, Dh)
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = common.rotate(q.transpose(1, 2), tables)  # (B, H, T, Dh)
        # hd_j = softmax(Q K^T / sqrt(d_k)) V
        k, v = (rows.to(q.dtype) for rows in kv)
        out = attend_or_zero(q, k, v, mask)
        # Concat(hd_1, ..., hd_h) W^O
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, cross-attention and feed-forward (Figure 2)."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        width = config.target["hidden_size"]
        llama = common.llama_config(config.target, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = LlamaAttention(llama, index)
        if config.cross_attention:
            self.cross_layernorm = nn.RMSNorm(width, eps=1e-5)
            self.cross_attn = CrossAttention(config)
        # Named as in the target's layers, so that weights can be copied.
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)

    def forward(self, x: Tensor, rotary, glimpse, self_mask, cross_mask, cache) -> Tensor:
        """x (B, T, D) to (B, T, D).

        glimpse: the kv and rotary tables of CrossAttention; None: leave it out.
        """
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, rotary, self_mask, past_key_values=cache)[0]
        if glimpse is not None:
            x = x + self.cross_attn(self.cross_layernorm(x), *glimpse, cross_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The layers and the final norm; embedding and head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_layers))
        self.norm = nn.RMSNorm(config.target["hidden_size"], eps=1e-5)
        self.register_buffer("draft_ids", common.placeholder_ids(config.target, config.draft_vocab))

    @property
    def kv_layers(self) -> list[int]:
        """Layer m = 0, 1, ... reads target layer N_T - N_D + m, or `kv_layer`."""
        config = self.config
        if not config.cross_attention:
            return []
        if config.kv_layer >= 0:
            return [config.kv_layer] * config.num_layers
        depth = config.target["num_layers"]
        return list(range(depth - config.num_layers, depth))

    def forward(
        self, target, ids, positions, kv: dict, self_mask=None, cross_mask=None, cache=None
    ) -> Tensor:
        """Final hidden states (B, T, D) of `ids` (B, T).

        Masks are bool, True = may attend.

        Args:
            positions: (B or 1, T).
            kv: {target layer: (K, V)}, each (B, Hkv, P, Dh); empty without
                cross-attention, or while the target has no rows.
            self_mask: (B or 1, 1, T, P_own + T). None is causal, and needs
                T = 1 or an empty cache.
            cross_mask: (B or 1, 1, T, P). With None every token reads all rows.
            cache: the drafter's own, of P_own rows; T rows are added.
        """
        dtype = self.norm.weight.dtype
        # LlamaAttention rotates all Dh dimensions, the target perhaps fewer.
        last = self.config.target["num_layers"] - 1
        rotary = common.rotary(target, positions, last)
        rotary = common.whole_rotary(rotary, self.config.target["head_dim"])
        rotary = tuple(table.to(dtype) for table in rotary)
        x = target.get_input_embeddings()(ids).to(dtype)  # (B, T, D)
        for index, layer in enumerate(self.layers):
            glimpse = None
            if kv:
                read = self.kv_layers[index]
                glimpse = kv[read], common.rotary(target, positions, read)
            x = layer(x, rotary, glimpse, self_mask, cross_mask, cache)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with the target's weights where they fit.

    A cross-attention copies its weights from the target layer that it reads,
    because the keys there match that layer's queries.
    """
    config.target = common.target_shape(target)
    depth = config.target["num_layers"]
    if max(config.num_layers - 1, config.kv_layer) >= depth:
        raise common.Mistake(
            f"num_layers {config.num_layers}, kv_layer {config.kv_layer}: the target has layers 0 "
            f"to {depth - 1}"
        )
    layers = common.target_layers(target)
    config.query_norm = norms_queries(target)
    drafter = Drafter(config)
    check_cache(drafter, target)
    pairs = list(zip(drafter.layers, layers[-config.num_layers :]))
    for layer, read in zip(drafter.layers, drafter.kv_layers):
        theirs = layers[read] if layers else None
        if hasattr(theirs, "self_attn"):  # GPT-NeoX lays out its attention differently
            pairs.append((layer.cross_attn, theirs.self_attn))
        if hasattr(theirs, "input_layernorm"):  # OLMo-2 has no norm there
            pairs.append((layer.cross_layernorm, theirs.input_layernorm))
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


def norms_queries(target) -> bool:
    """True if the target normalises the queries of each head separately (Qwen3)."""
    layer = next(iter(common.target_layers(target)), None)
    attention = getattr(layer, "self_attn", None)
    weight = getattr(getattr(attention, "q_norm", None), "weight", None)
    return weight is not None and len(weight) == common.target_shape(target)["head_dim"]


def check_cache(drafter: Drafter, target) -> None:
    """Raise a Mistake if a layer to read does not cache ordinary K, V."""
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    _, kv = common.target_features(target, token, drafter.kv_layers)
    shape = drafter.config.target
    ordinary = (1, shape["num_kv_heads"], 1, shape["head_dim"])
    for layer, (keys, values) in kv.items():
        if not tuple(keys.shape) == tuple(values.shape) == ordinary:
            raise common.Mistake(
                f"target layer {layer} caches keys of shape {tuple(keys.shape)}, not {ordinary}: "
                "take another layer, another method, or --no-cross-attention"
            )


# -------------------------------------------------------------------------- training objective


def block_mask(length: int, block_size: int, phase: Tensor) -> Tensor:
    """Mask_Block (4.1): a query may read keys of earlier blocks only.

    While drafting, the newest target rows do not exist yet: a query that predicts
    the i-th draft token lacks i of them, its own included. In training they
    exist, and without the mask the drafter would learn to rely on them. The mask
    hides the last 1 to L rows, so L should be at least gamma. L = 3 and phase 1, which
    shortens the first block by one token:

             key   0  1  2  3  4  5        blocks: 0 1 | 2 3 4 | 5
        query 0    .  .  .  .  .  .
              1    .  .  .  .  .  .
              2    x  x  .  .  .  .
              3    x  x  .  .  .  .
              4    x  x  .  .  .  .
              5    x  x  x  x  x  .

    phase: (B,) what the first block lacks. Returns (B, 1, T, T) bool.
    """
    places = torch.arange(length, device=phase.device)
    block = (places + phase[:, None]) // block_size  # (B, T)
    return (block[:, :, None] > block[:, None, :])[:, None]


def training_states(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """States (M, D) of drafter and target, where the next token has a loss."""
    length = batch.input_ids.shape[1]
    positions = torch.arange(length, device=batch.input_ids.device)[None]  # (1, T)
    block_size = drafter.config.block_size
    cross_mask = block_mask(length, block_size, batch.seed % block_size)
    # Sequences are padded on the right, where no earlier token looks.
    hidden = drafter(target, batch.input_ids, positions, batch.kv, cross_mask=cross_mask)
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T)
    return hidden[predicts], batch.hidden[predicts]


def training_logits(drafter: Drafter, target, hidden: Tensor) -> Tensor:
    """Draft logits (M, Vd) of hidden states (M, D)."""
    head = common.draft_head(target, drafter.draft_ids).to(hidden.dtype)
    return head(hidden).float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """Cross-entropy (5.1), summed over M positions, and M.

    The label is the target's distribution, renormalised over the draft
    vocabulary (`common.target_logits`). Without `distill` it is the data's next
    token, and positions whose next token cannot be drafted are left out.
    Column i of the draft logits belongs to token draft_ids[i].
    """
    hidden, theirs = training_states(drafter, target, batch)
    logits = training_logits(drafter, target, hidden)  # (M, Vd)
    if drafter.config.distill:
        teacher = common.target_logits(target, theirs, drafter.draft_ids)
        total = F.cross_entropy(logits, teacher.softmax(-1), reduction="sum")
        return total, len(logits)
    # Each token's place in the draft vocabulary; -100 (ignored) if none.
    vocab = drafter.config.target["vocab_size"]
    place = torch.full((vocab,), -100, device=logits.device)
    place[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=logits.device)
    labels = place[batch.input_ids[batch.loss_mask]]  # (M,)
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total, (labels >= 0).sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """alpha of 5.1: sum_x min(p_target, q_draft), summed over M positions, and M.

    The paper prints E_(x ~ p_D) min(p_T, p_D) and must mean E_(x ~ p_D)
    min(1, p_T / p_D), which is this sum. It is measured over a
    given text with the training mask, so a query lacks 1 to L target rows.
    """
    hidden, theirs = training_states(drafter, target, batch)
    q_draft = training_logits(drafter, target, hidden).softmax(-1)  # (M, Vd)
    return common.overlap(target, theirs, q_draft, drafter.draft_ids), len(q_draft)


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """E(Spd.) of 5.1; cost: drafter pass time over target pass time."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * cost + 1)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.DraftCache(drafter.config.num_layers)  # its own keys and values
        self.head = common.draft_head(target, drafter.draft_ids)  # D -> Vd


def feed(drafter: Drafter, decoding, memory: Memory, new: Tensor) -> Tensor:
    """Feed tokens (1, n) to the drafter; returns the last one's state (1, D).

    A round begins with the tokens that have no drafter row yet, at first the
    whole prompt. Rows of accepted draft tokens stay as they are. Each fed
    token reads the target rows before its own. P = 4, n = 2
    (an accepted draft token that was never fed, and the bonus token):

                   target's rows   drafter's rows
                      0 1 2 3        0 1 2 3 4
        token 3       x x x .        x x x x .
        token 4       x x x x        x x x x x
    """
    positions = memory.cache.record(new)  # (1, n)
    prefix = decoding.cache.get_seq_length()  # P; 0 after a prompt of one token
    layers = decoding.cache.layers
    kv = {n: (layers[n].keys, layers[n].values) for n in drafter.kv_layers if prefix}
    self_mask = cross_mask = None
    if new.shape[1] > 1:
        places = torch.arange(memory.cache.fed.shape[1], device=new.device)
        query = positions[0, :, None]  # (n, 1)
        self_mask = (query >= places)[None, None]  # (1, 1, n, P_own + n)
        cross_mask = (query > places[:prefix])[None, None]  # (1, 1, n, P)
    hidden = drafter(decoding.target, new, positions, kv, self_mask, cross_mask, memory.cache)
    return hidden[:, -1]


def propose(drafter: Drafter, decoding, memory: Memory):
    """Draft a chain after `decoding.ids`; the caller decides when to stop.

    Yields (token (1,), q_draft (V,), hidden (D,)); `hidden` is for stop rules
    (support/stopping.py). Ends by itself if the logits processors allow no
    token of the draft vocabulary.
    """
    ids = decoding.ids
    # Drop the rows of rejected tokens. If x_(t+2) was rejected, the row of
    # x_(t+1) stays, and only the bonus token is new. `verify` has dropped the
    # target's rows of rejected tokens.
    new = memory.cache.rewind(ids)  # (1, n)
    while True:
        hidden = feed(drafter, decoding, memory, new)  # (1, D)
        picked = decoding.pick(memory.head(hidden), drafter.draft_ids, ids)
        if picked is None:
            return
        token, q_draft = picked
        yield token, q_draft, hidden[0]
        new = token[None]  # (1, 1)
        ids = torch.cat([ids, new], dim=1)


@torch.no_grad()
def drafts(decoding, drafter: Drafter, config: Config):
    """Yield one draft per round; the caller verifies it before the next."""
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        steps = propose(drafter, decoding, memory)
        # islice does not resume `propose` after its last token, which is never fed.
        steps = itertools.islice(steps, min(config.gamma, decoding.room))
        yield common.chain(steps, decoding.ids)


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """`target.generate(..., custom_generate=glide.generate, drafter=...)`.

    Lossless. `config` replaces the drafter's Config in all fields with
    decode=True: start from `dataclasses.replace(drafter.config, ...)`. The
    arguments after it are those of `common.Decoding`.
    Returns prompt and new tokens (1, T').
    """
    common.check_drafter(drafter, Drafter, target, config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, drafter, config or drafter.config):
        decoding.verify(draft)
    return decoding.ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "glide")
