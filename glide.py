"""GLIDE: a drafter that glimpses the target's KV cache (Du et al., ICML 2024).

Paper: arXiv:2402.02082, section 4.1.

The drafter is a transformer of one or two layers. Between self-attention and feed-forward each
layer has a cross-attention sub-layer whose keys and values are not computed at all: they are the
rows that the target cached when it verified the previous tokens. The drafter so reads what the
target thought of the context, for free. The newest token and the drafted ones have no target rows
yet; training imitates that delay with a block-wise mask.

              tokens      x_1 ... x_(t-1)     x_t     x_(t+1) ... x_(t+i-1)
              target's rows  x  x  x           .          .  .  .             (not there yet)
              drafter's rows x  x  x           x          x  x  x   ->  q_draft of x_(t+i)

    symbol                name here                        section      function
    M_T, M_D              target, drafter                  3            generate
    x_(<=t), x_t          input_ids (t = P + 1), its last  3, 4.1       propose
    x_(t+1..t+gamma)      Draft.tokens                     3            propose, common.chain
    gamma                 Config.gamma                     3, 5.1       generate
    i                     1 + tokens drafted so far        4.1          propose
    n, x'_(t+n+1)         len(path), last of tokens        3            common.verify
    N_T, N_D              num_layers of target, Config     4.1, App. F  Drafter
    m, l = N_T - N_D + m  drafter layer, kv_layers         4.1          Drafter (counted from 0)
    K^(l,j), V^(l,j)      Glimpse.keys, Glimpse.values     4.1          propose, training_logits
    h, d_k, d_D           heads, head_dim, hidden          4.1, 5.1     Layer, CrossAttention
    H^m, Q^(m,j), hd_j    x, queries, out (j: a head)      4.1          CrossAttention
    W_j, W^O              q_proj, o_proj                   4.1          CrossAttention
    Mask_Block, L         block_mask, Config.block_size    4.1          block_mask
    block(j), A_jk        block, (inside the SDPA)         4.1          block_mask
    p_T, p_D, alpha       p_target, q_draft, the result    5.1          alpha
    c, E(Spd.)            cost, the result                 5.1          expected_speedup

Deviations
    1. paper silent: sub-layers are pre-normed with a residual, and one norm ends the drafter; the
       queries of the cross-attention are rotated at their own position, as in the target layer they
       read, whose cached keys are rotated; groups of queries share a K/V head. A query that may
       read nothing gets zero. Accepted draft tokens keep the drafter's keys and values as drafted.
    2. paper silent: the borders of the training blocks are shifted at random for every sequence
       and step (the phase), so that every position meets every delay.
    3. ours: tokens that the drafter consumes but does not draft from (the prompt, the last accepted
       one) read the target's rows before them, too. In 4.1 only x_t and the drafted tokens read
       any; yet the mask of its training makes every position a query.
    4. ours: the drafter is as wide as the target (the paper has d_D = 4096 for targets of 4096 to
       6656), because embedding and head are the target's, frozen. It starts from copies, where
       shapes agree (the paper: from scratch): self-attention, feed-forward and final norm of the
       target's top; a cross-attention's norm, queries and output projection of the layer it reads.
    5. ours: drafts come from the 8192 most frequent tokens of the training answers only
       (`draft_vocab`; the paper's from all). Verification covers all tokens.
    6. ours: the loss compares with the target's distribution, renormalised over the draft
       vocabulary, at every position of the answers. `distill=False` with `draft_vocab=0` is the
       paper's cross-entropy with the data; with less, tokens that cannot be drafted are left out.
       (Appendix C gains 0.2 to 0.7 points of acceptance from training on text that the target
       wrote, which our data already is.)
    7. ours: AdamW with a peak learning rate of 2e-3 (shipped: later 1.5e-3), 4 conversations a
       step, cut at 384 tokens (512 in the last stage), warm-up, cosine decay, gradients clipped at
       1.0, on the target's own answers. The paper: 5e-4, 64 a step, the others not said,
       SlimPajama-6B, then ShareGPT, one epoch each.
    8. ours: alpha is sum_x min(p_T, p_D), which is E_(x~p_D) min(1, p_T / p_D) and what Leviathan
       et al. show; 5.1 prints E_(x~p_D) min(p_T, p_D), a slip.
    9. ours: tokens copied from the context may stand beside the chain (`copies`, off by default).
   10. ours: the shipped drafter reads layer 18 of the target's 30, in which heads look for what
       followed a token before; Figure 7 finds the top layer best, which stays the default. It
       drafts 2 tokens a round (the paper: 5) and learned in blocks of L = 3 (5) in its last stage.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by train.py)")
    num_layers: int = option(1, "drafter layers, N_D")
    intermediate_size: int = option(1536, "width of the feed-forward; copied if it is the target's")
    cross_attention: bool = option(True, "read the target's KV; off is the Vanilla Drafter")
    kv_layer: int = option(-1, "target layer to read for all layers (Figure 7); -1: top ones")
    block_size: int = option(5, "L of the block-wise mask")
    draft_vocab: int = option(8192, "draft only the most frequent tokens; 0: all of them")
    distill: bool = option(True, "train on the target's distribution, not on hard labels")
    gamma: int = option(5, "draft tokens a round", True)
    copies: int = option(0, "tokens copied from the context (prompt lookup); 0: the paper's", True)


VARIANTS = {
    "gamma1": {"gamma": 1},  # shorter drafts pay where the acceptance rate is low
    "gamma2": {"gamma": 2},
    "gamma3": {"gamma": 3},
    "copies": {"copies": 16},
}

# ------------------------------------------------------------------------------------- architecture

attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)


def rope(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R of Dh dimensions of x (B, H, T, Dh) by cos and sin (B, T, R)."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)  # (B, 1, T, R)
    turned = x[..., : cos.shape[-1]]  # (B, H, T, R)
    rest = x[..., cos.shape[-1] :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class SelfAttention(nn.Module):
    """Causal attention among the drafter's own rows; K/V heads as the target has them."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, rotary, mask: Tensor | None, cache, layer: int) -> Tensor:
        """x (B, T, D); mask (B or 1, 1, T, P_own + T) bool; None: causal (P_own = 0 or T = 1)."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, Dh)
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, Hkv, T, Dh)
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries = rope(queries, rotary)
        keys = rope(keys, rotary)
        if cache is not None:
            keys, values = cache.update(keys, values, layer)  # (B, Hkv, P_own + T, Dh)
        causal = mask is None and queries.shape[2] > 1
        out = attend(queries, keys, values, attn_mask=mask, is_causal=causal)  # (B, H, T, Dh)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Glimpse(NamedTuple):
    """What a drafter layer reads: the cache of one target layer, and that layer's rotary tables.

    Each drafter layer may read another target layer, and those of Gemma-3 rotate differently.
    """

    keys: Tensor | None  # (B, Hkv, P, Dh) as cached, already rotated; None before any verification
    values: Tensor | None  # (B, Hkv, P, Dh)
    rotary: tuple[Tensor, Tensor]  # cos and sin (B or 1, T, R) of that layer, where the queries are


class CrossAttention(nn.Module):
    """Queries from the drafter, keys and values from the target (the equations of 4.1)."""

    def __init__(self, hidden: int, heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, glimpse: Glimpse, mask: Tensor | None) -> Tensor:
        """What x (B, T, D) reads of P target rows, (B, T, D); zero where it may read none.

        Args:
            mask: (B or 1, 1, T, P) bool, None where every query reads every row.
        """
        if glimpse.keys is None:
            return torch.zeros_like(x)
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, Dh)
        queries = rope(queries, glimpse.rotary)
        keys = glimpse.keys.to(queries.dtype)  # (B, Hkv, P, Dh)
        values = glimpse.values.to(queries.dtype)
        if mask is None:
            out = attend(queries, keys, values)  # (B, H, T, Dh)
        else:  # a softmax over no rows is NaN: a query without any reads all, and is then erased
            sees = mask.any(-1, keepdim=True)  # (B or 1, 1, T, 1)
            out = attend(queries, keys, values, attn_mask=mask | ~sees)  # (B, H, T, Dh)
            out = out * sees
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Self-attention, cross-attention, feed-forward (Figure 2), with the target's names."""

    def __init__(self, config: Config):
        super().__init__()
        shape = config.target
        hidden = shape["hidden_size"]
        heads = shape["num_heads"]
        head_dim = shape["head_dim"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.self_attn = SelfAttention(hidden, heads, shape["num_kv_heads"], head_dim)
        if config.cross_attention:
            self.cross_layernorm = nn.RMSNorm(hidden, eps=1e-5)
            self.cross_attn = CrossAttention(hidden, heads, head_dim)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(self, x, rotary, glimpse, self_mask, cross_mask, cache, layer) -> Tensor:
        """x (B, T, D) to (B, T, D); the rest as for Drafter.forward, `glimpse` None for none."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, self_mask, cache, layer)
        if glimpse is not None:
            x = x + self.cross_attn(self.cross_layernorm(x), glimpse, cross_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The glimpse draft model; holds only what is trained, not the target's embedding and head."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.target["hidden_size"], eps=1e-5)
        vocab = config.target["vocab_size"]
        draft_vocab = min(config.draft_vocab or vocab, vocab)
        self.register_buffer("draft_ids", torch.arange(draft_vocab))  # (Vd,)

    @property
    def kv_layers(self) -> list[int]:
        """The target layer that each drafter layer reads: N_T - N_D + m (4.1), counted from 0."""
        if not self.config.cross_attention:
            return []
        if self.config.kv_layer >= 0:
            return [self.config.kv_layer] * self.config.num_layers
        top = self.config.target["num_layers"]
        return list(range(top - self.config.num_layers, top))

    def rotaries(self, target, positions: Tensor) -> tuple[tuple, list[tuple]]:
        """Cos and sin at `positions` (B or 1, T), of the top target layer and of all kv_layers."""
        top = self.config.target["num_layers"] - 1
        layers = {top, *self.kv_layers}
        tables = {layer: common.rotary(target, positions, layer) for layer in layers}
        return tables[top], [tables[layer] for layer in self.kv_layers]

    def forward(
        self,
        embeds: Tensor,
        rotary,
        glimpses: list[Glimpse],
        head: nn.Module,
        rows,
        self_mask=None,
        cross_mask=None,
        cache=None,
    ) -> tuple[Tensor, Tensor]:
        """Draft logits (M, Vd) and final hidden states (M, D) of M chosen rows.

        P counts the target's cached rows, P_own the drafter's.

        Args:
            embeds: (B, T, D) the target's embeddings of the input tokens.
            rotary: cos and sin of the self-attention, each (B or 1, T, R).
            glimpses: one for each layer, of P rows; empty without cross-attention.
            head: the target's LM head for the draft vocabulary, D -> Vd.
            rows: index into (B, T), what to score: in training a mask (B, T) bool with M set, in
                drafting (slice(None), -1), the newest token of each sequence, M = B.
            self_mask: (B or 1, 1, T, P_own + T) bool, None for causal (P_own = 0 or T = 1).
            cross_mask: (B or 1, 1, T, P) bool, None for all.
            cache: the drafter's own, of P_own rows, which T more join; None for none.
        """
        x = embeds
        for index, layer in enumerate(self.layers):
            glimpse = glimpses[index] if glimpses else None
            x = layer(x, rotary, glimpse, self_mask, cross_mask, cache, index)
        hidden = self.norm(x[rows])  # (M, D)
        return head(hidden), hidden


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from: copied from the target where names and shapes agree.

    Layers, and the final norm, come from the top of the target. Queries, output projection and norm
    of a cross-attention come from the layer that it reads: its keys were made for those queries,
    and for inputs scaled by that norm. Equal names mean equal things in the Llama family only:
    Gemma scales by 1 + weight and norms elsewhere, too, Qwen2's biases are left out.

    Args:
        token_counts: (V,) how often each token occurs in the training responses; the top ones can
            be drafted.
    Raises:
        ValueError: more layers than the target has, or none; a target layer that is not there;
            blocks of no tokens.
    """
    depth = config.target["num_layers"]
    if not 1 <= config.num_layers <= depth:
        raise ValueError(f"num_layers {config.num_layers}: take 1 to {depth}, the target's")
    if not -1 <= config.kv_layer < depth:
        raise ValueError(
            f"kv_layer {config.kv_layer} is not a layer of the target: use 0 to {depth - 1}, or -1 "
            "for the top"
        )
    if config.block_size < 1:
        raise ValueError(f"block_size {config.block_size}: at least 1")
    drafter = Drafter(config)
    layers = list(getattr(target.get_decoder(), "layers", []))
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        for ours, theirs in zip(drafter.layers, layers[-config.num_layers :]):
            copy_weights(ours, theirs.state_dict())
        if layers and drafter.kv_layers:
            for ours, read in zip(drafter.layers, drafter.kv_layers):
                theirs = layers[read]
                if hasattr(theirs, "self_attn"):  # GPT-NeoX's attention is laid out otherwise
                    copy_weights(ours.cross_attn, theirs.self_attn.state_dict())
                    norm = getattr(theirs, "input_layernorm", nn.Identity())  # OLMo-2: none
                    copy_weights(ours.cross_layernorm, norm.state_dict())
        if hasattr(getattr(target.get_decoder(), "norm", None), "weight"):
            drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    return drafter


def copy_weights(module: nn.Module, theirs: dict[str, Tensor]) -> None:
    """Fill the parameters of a module that have a namesake of the same shape."""
    for name, weight in module.named_parameters():
        if name in theirs and theirs[name].shape == weight.shape:
            weight.copy_(theirs[name])


# ------------------------------------------------------------------------------- training objective


def block_mask(length: int, block_size: int, phase: Tensor) -> Tensor:
    """Which target rows a training position may read (Mask_Block, 4.1): block(query) > block(key).

    While drafting, the target's rows end where the last verification ended. So the sequence is cut
    into blocks, and a block's own rows are hidden: a query misses its own row and 0 to L - 1 before
    it, as x_t and the drafted tokens do. L = 3, phase 1:

             key   0  1  2  3  4  5        blocks: 0 1 | 2 3 4 | 5
        query 0    .  .  .  .  .  .
              1    .  .  .  .  .  .
              2    x  x  .  .  .  .
              3    x  x  .  .  .  .
              4    x  x  .  .  .  .
              5    x  x  x  x  x  .

    Args:
        length: T tokens.
        block_size: L tokens.
        phase: (B,) by how many tokens the first block is cut short, in each sequence.
    Returns:
        (B, 1, T, T) bool.
    """
    block = (torch.arange(length, device=phase.device) + phase[:, None]) // block_size  # (B, T)
    return (block[:, :, None] > block[:, None, :])[:, None]


def training_logits(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits (M, Vd) of the M rows that are scored; which rows, (B, T) bool; hidden (M, D).

    A row predicts the token after it, so they are the rows before the tokens of the loss mask.
    """
    config = drafter.config
    length = batch.input_ids.shape[1]
    positions = torch.arange(length, device=batch.input_ids.device)[None]  # (1, T)
    rotary, cross_rotary = drafter.rotaries(target, positions)
    glimpses = [
        Glimpse(*batch.kv[layer], tables) for layer, tables in zip(drafter.kv_layers, cross_rotary)
    ]
    mask = None
    if glimpses:
        mask = block_mask(length, config.block_size, batch.seed % config.block_size)
    embeds = target.get_input_embeddings()(batch.input_ids)  # (B, T, D)
    embeds = embeds.to(drafter.norm.weight.dtype)
    head = common.draft_head(target, drafter.draft_ids).to(embeds.dtype)
    where = torch.zeros_like(batch.loss_mask)  # (B, T)
    where[:, :-1] = batch.loss_mask[:, 1:]
    logits, hidden = drafter(embeds, rotary, glimpses, head, where, cross_mask=mask)
    return logits.float(), where, hidden


def loss(drafter: Drafter, target, batch) -> Tensor:
    """Cross-entropy (5.1), summed over positions.

    Against the target's distribution over the draft vocabulary, or, with `distill=False`, against
    the next token of the data where it can be drafted. Position t predicts the token at t + 1, and
    learns where batch.loss_mask holds at t + 1 (`training_logits`).

    Args:
        batch: common.Batch, with the K/V of drafter.kv_layers.
    """
    logits, where, _ = training_logits(drafter, target, batch)  # (M, Vd), (B, T)
    if drafter.config.distill:
        teacher = common.target_logits(target, batch.hidden[where], drafter.draft_ids)  # (M, Vd)
        return F.cross_entropy(logits, teacher.softmax(-1), reduction="sum")
    count = len(drafter.draft_ids)
    index = torch.full((drafter.config.target["vocab_size"],), -100, device=logits.device)  # (V,)
    index[drafter.draft_ids] = torch.arange(count, device=logits.device)
    following = batch.input_ids[:, 1:][where[:, :-1]]  # (M,) the token after each row
    return F.cross_entropy(logits, index[following], reduction="sum")  # -100 is left out


def alpha(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Acceptance rate (5.1): sum over M positions of sum_x min(p_target, q_draft), and M.

    Temperature 1, each position with the delay of `block_mask`: figures of two L do not compare.
    """
    logits, where, _ = training_logits(drafter, target, batch)  # (M, Vd), (B, T)
    q_draft = logits.softmax(-1)  # (M, Vd)
    p_target = common.target_logits(target, batch.hidden[where]).softmax(-1)  # (M, V)
    p_target = p_target[:, drafter.draft_ids]  # (M, Vd)
    return torch.minimum(p_target, q_draft).sum(), len(q_draft)


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """E(Spd.) of 5.1: the tokens of a round over its time; cost is c, drafter over target time."""
    tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * cost + 1)


# ----------------------------------------------------------------------------------------- decoding


@dataclass
class Memory:
    """What the drafter keeps from round to round of one answer."""

    cache: common.DraftCache  # its own keys and values
    head: nn.Module  # the target's LM head for the draft vocabulary, D -> Vd


def new_memory(drafter: Drafter, target) -> Memory:
    """An empty memory, to begin an answer with."""
    head = common.draft_head(target, drafter.draft_ids)
    return Memory(common.DraftCache(drafter.config.num_layers), head)


def propose(drafter, target, input_ids, cache, memory, logits_processor=None, do_sample=False):
    """Draft a chain one token at a time; take as many as you want.

    First the drafter consumes the n tokens that it holds no row of: the bonus, and what
    it did not draft from. Each may read only the target's rows before it, like the first token of a
    training block; the newest and the drafted ones read all P there are. P = 4, n = 2 (the last
    draft token, accepted, and the bonus):

                   target's rows   drafter's rows
                      0 1 2 3        0 1 2 3 4
        token 3       x x x .        x x x x .
        token 4       x x x x        x x x x x      x_t: its row gives x_(t+1)

    Args:
        input_ids: (1, T) tokens to draft after. cache: the target's, of the first P of them.
    Yields:
        (token (1,), q_draft (V,) the processed distribution it comes from, hidden (D,) the
        drafter's final state at the token before, from which q_draft is computed). The chain ends
        early where the processors forbid every token that can be drafted.
    Raises:
        ValueError: a tensor-parallel target, of whose KV heads each process has a part only.
    """
    own = memory.cache
    shape = drafter.config.target
    cached = cache.get_seq_length()  # P
    read = [cache.layers[layer] for layer in drafter.kv_layers]
    if cached and any(layer.keys.shape[1] != shape["num_kv_heads"] for layer in read):
        raise ValueError(
            "GLIDE reads all KV heads of the target, and a tensor-parallel one has a part of them "
            "on each process; take another method, or a drafter trained with --no-cross-attention"
        )
    ids = input_ids
    newest = (slice(None), -1)  # of (1, n)
    fed = own.rewind(input_ids)  # (1, n)
    while True:
        positions = own.feed(fed)  # (1, n)
        rotary, cross_rotary = drafter.rotaries(target, positions)
        glimpses = [
            Glimpse(layer.keys, layer.values, tables) for layer, tables in zip(read, cross_rotary)
        ]
        self_mask = None  # one token, the newest: it reads everything
        cross_mask = None
        if fed.shape[1] > 1:
            place = torch.arange(own.fed.shape[1], device=ids.device)  # (T,)
            self_mask = (positions.mT >= place)[None, None]  # (1, 1, n, T)
            cross_mask = (positions.mT > place[:cached])[None, None]  # (1, 1, n, P)
        embeds = target.get_input_embeddings()(fed)  # (1, n, D)
        masks = (self_mask, cross_mask)
        # (1, Vd), (1, D)
        logits, hidden = drafter(embeds, rotary, glimpses, memory.head, newest, *masks, own)
        scores = torch.full((1, shape["vocab_size"]), float("-inf"), device=ids.device)  # (1, V)
        scores[:, drafter.draft_ids] = logits.float()
        if logits_processor:
            scores = logits_processor(ids, scores)
            if not scores.max() > float("-inf"):  # nothing is allowed, or that normalised: NaN
                return
        q_draft = scores.softmax(-1)[0]  # (V,)
        if do_sample:
            token = common.sample(q_draft)  # (1,)
        else:
            token = q_draft.argmax(keepdim=True)
        yield token, q_draft, hidden[0]
        fed = token[None]
        ids = torch.cat([ids, fed], dim=1)


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    gamma=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=glide.generate, drafter=drafter)`: lossless decoding.

    Args:
        gamma, copies: as in Config, by default the drafter's. stats: a common.Stats to fill.
        token_streamer: a streamer of transformers (which does not hand `streamer` on).
    Returns:
        (1, T') prompt and new tokens.
    """
    gamma = drafter.config.gamma if gamma is None else gamma
    copies = drafter.config.copies if copies is None else copies
    stats = stats or common.Stats()
    do_sample = generation_config.do_sample
    cache, _ = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    memory = new_memory(drafter, target)
    lookup = common.Lookup(copies)
    done = False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = generation_config.max_length - input_ids.shape[1] - 1  # one place is the bonus's
            steps = propose(drafter, target, input_ids, cache, memory, logits_processor, do_sample)
            draft = common.chain(itertools.islice(steps, min(gamma, room)), input_ids)
            draft = lookup.merge(draft, input_ids, room)
        verdict = common.verify(target, input_ids, draft, cache, logits_processor, do_sample, stats)
        tokens = verdict.tokens  # (1, A + 1)
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "glide")
