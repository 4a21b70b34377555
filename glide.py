"""GLIDE: a drafter that glimpses the target's KV cache (Du et al., ICML 2024, arXiv:2402.02082,
section 4.1).

The drafter is a transformer of one or two layers. Between self-attention and feed-forward each
layer has a cross-attention sub-layer whose keys and values are not computed at all: they are the
rows that the target cached when it verified the previous tokens. The drafter so reads what the
target thought of the context, for free. The newest token and the drafted ones have no target rows
yet; training imitates that delay with a block-wise mask.

    symbol        name here                section        function
    M_T, M_D      target, drafter          4.1
    gamma         Config.gamma             3, 5.1         generate
    N_D           Config.num_layers        4.1, App. F    Drafter
    l = N_T-N_D+m Drafter.kv_layers        4.1            Drafter
    W_j, W^O      cross_attn.q_proj/o_proj 4.1            CrossAttention
    Mask_Block, L block_mask, block_size   4.1            block_mask
    alpha         alpha                    5.1            alpha

Deviations
    1. paper silent: sub-layer order is self-attention, cross-attention, SwiGLU, each pre-normed
       with a residual, and one final norm; queries of the cross-attention take the target's rotary
       embedding at their own position, because the cached keys are already rotated; its K/V heads
       are shared by groups of queries as in the target.
    2. paper silent: the block mask has a random phase per sequence, so that every position meets
       every delay.
    3. ours: layers start as copies of the target's (the paper trains from scratch), embedding and
       head are the target's, and drafts come from the most frequent tokens only (`draft_vocab`).
       Verification covers all tokens.
    4. ours: the loss compares with the target's distribution; `distill=False` is the paper's
       cross-entropy with the data (appendix C reports a small gain from distillation on generated
       text, which our data already is).
"""

import itertools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

import common


@dataclass
class Config:
    target: dict = field(
        default_factory=dict, metadata={"help": "shape of the target (filled in by train.py)"}
    )
    num_layers: int = field(default=1, metadata={"help": "drafter layers, N_D"})
    intermediate_size: int = field(
        default=1536, metadata={"help": "width of the feed-forward sub-layer"}
    )
    cross_attention: bool = field(
        default=True, metadata={"help": "read the target's KV; off is the Vanilla Drafter"}
    )
    kv_layer: int = field(
        default=-1, metadata={"help": "target layer to read for all layers (Figure 7); -1: the top"}
    )
    block_size: int = field(default=5, metadata={"help": "L of the block-wise mask"})
    draft_vocab: int = field(
        default=8192, metadata={"help": "draft only the most frequent tokens; 0: all of them"}
    )
    distill: bool = field(
        default=True, metadata={"help": "train on the target's distribution, not on hard labels"}
    )
    gamma: int = field(default=5, metadata={"help": "draft tokens a round", "decode": True})


VARIANTS = {
    f"gamma{n}": {"gamma": n} for n in (1, 2, 3)
}  # shorter drafts pay where the acceptance rate is low

# ------------------------------------------------------------------------------------- architecture


def rope(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R of Dh dimensions of x (B, H, T, Dh) by cos and sin (B, T, R)."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, rotary, mask: Tensor | None, cache, layer: int) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or Hkv, T, Dh)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope(q, rotary), rope(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, layer)
        causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, D)


class CrossAttention(nn.Module):
    """Queries from the drafter, keys and values from the target's cache (the displayed equations of
    4.1)."""

    def __init__(self, hidden: int, heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(
        self, x: Tensor, rotary, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """x (B, T, D), keys and values (B, Hkv, P, Dh) or None, mask (B, 1, T, P) or None. No keys,
        no output."""
        if keys is None:  # nothing verified yet
            return torch.zeros_like(x)
        q = rope(
            self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2), rotary
        )  # (B, H, T, Dh)
        some = None if mask is None else mask.any(-1, keepdim=True)  # (B, 1, T, 1)
        mask = None if mask is None else mask | ~some  # softmax over nothing would be NaN
        out = F.scaled_dot_product_attention(
            q, keys.to(q.dtype), values.to(q.dtype), attn_mask=mask, enable_gqa=True
        )
        out = out if some is None else out * some
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
    def __init__(self, config: Config):
        super().__init__()
        shape = config.target
        hidden, heads, head_dim = shape["hidden_size"], shape["num_heads"], shape["head_dim"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.self_attn = SelfAttention(hidden, heads, shape["num_kv_heads"], head_dim)
        if config.cross_attention:
            self.cross_layernorm = nn.RMSNorm(hidden, eps=1e-5)
            self.cross_attn = CrossAttention(hidden, heads, head_dim)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, config.intermediate_size)

    def forward(self, x, rotary, kv, self_mask, cross_mask, cache, layer) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, self_mask, cache, layer)
        if kv is not None:
            x = x + self.cross_attn(self.cross_layernorm(x), rotary, *kv, cross_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The glimpse draft model. Holds only what is trained; embeddings and head of the target are
    passed in.

    Args:
        config: Config, or its fields as a dict.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.target["hidden_size"], eps=1e-5)
        vocab = config.target["vocab_size"]
        self.register_buffer(
            "draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab))
        )  # (Vd,)

    @property
    def kv_layers(self) -> list[int]:
        """The target layer whose K/V each drafter layer reads: N_T - N_D + m (4.1), counted from
        0."""
        top, own = self.config.target["num_layers"], self.config.num_layers
        if not self.config.cross_attention:
            return []
        return (
            [self.config.kv_layer] * own
            if self.config.kv_layer >= 0
            else list(range(top - own, top))
        )

    def forward(
        self,
        embeds: Tensor,
        rotary,
        kv: list,
        head: nn.Module,
        rows,
        self_mask=None,
        cross_mask=None,
        cache=None,
    ) -> tuple[Tensor, Tensor]:
        """Draft logits (..., Vd) and final hidden states (..., D) of the chosen rows.

        Args:
            embeds: (B, T, D) the target's embeddings of the input tokens.
            rotary: cos and sin, each (B, T, R).
            kv: for each layer the target's (K, V), each (B, Hkv, P, Dh); empty without
                cross-attention.
            head: the target's LM head for the draft vocabulary, D -> Vd.
            rows: index into (B, T), the positions to score.
            self_mask: (B or 1, 1, T, P + T) bool, None for causal. cross_mask: (B or 1, 1, T, P)
                bool, None for all.
        """
        x = embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, kv[index] if kv else None, self_mask, cross_mask, cache, index)
        hidden = self.norm(x[rows])
        return head(hidden), hidden


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from: layers copied from the target's top ones where names and
    shapes agree.

    Args:
        token_counts: (V,) how often each token occurs in the training responses; the top ones can
            be drafted.
    """
    if not -1 <= config.kv_layer < config.target["num_layers"]:
        raise ValueError(
            f"kv_layer {config.kv_layer} is not a layer of the target: use 0 to "
            f"{config.target['num_layers'] - 1}, or -1 for the top"
        )
    if config.block_size < 1:
        raise ValueError(f"block_size {config.block_size}: at least 1")
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        sources = list(getattr(target.base_model, "layers", []))[-config.num_layers :]
        for layer, source in zip(drafter.layers, sources):
            theirs = dict(source.named_parameters())
            theirs |= {
                name.replace("self_attn", "cross_attn"): w
                for name, w in theirs.items()
                if "self_attn" in name
            }
            for name, weight in layer.named_parameters():
                if name in theirs and theirs[name].shape == weight.shape:
                    weight.copy_(theirs[name])
        if hasattr(target.base_model, "norm"):
            drafter.norm.weight.copy_(target.base_model.norm.weight)
    return drafter


# ------------------------------------------------------------------------------- training objective


def block_mask(length: int, block_size: int, phase: Tensor) -> Tensor:
    """Which target rows each training position may read (Mask_Block, 4.1): block(query) >
    block(key).

    While drafting, the target's rows end where the last verification ended. Cutting the sequence
    into blocks and hiding a block's own rows gives a query 0 to L - 1 missing rows. L = 3, phase 1:

             key   0  1  2  3  4  5        blocks: 0 1 | 2 3 4 | 5
        query 0    .  .  .  .  .  .
              1    .  .  .  .  .  .
              2    x  x  .  .  .  .
              3    x  x  .  .  .  .
              4    x  x  .  .  .  .
              5    x  x  x  x  x  .

    Args:
        phase: (B,) shift of the block borders per sequence.
    Returns:
        (B, 1, T, T) bool.
    """
    block = (torch.arange(length, device=phase.device) + phase[:, None]) // block_size  # (B, T)
    return (block[:, :, None] > block[:, None, :])[:, None]


def training_logits(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Draft logits (M, Vd) at the M positions whose next token counts, and where they are, (B, T)
    bool."""
    config, length = drafter.config, batch.input_ids.shape[1]
    positions = torch.arange(length, device=batch.input_ids.device)[None]
    kv = [batch.kv[layer] for layer in drafter.kv_layers]
    mask = block_mask(length, config.block_size, batch.seed % config.block_size) if kv else None
    embeds = target.get_input_embeddings()(batch.input_ids).to(drafter.norm.weight.dtype)
    head = common.draft_head(target, drafter.draft_ids).to(embeds.dtype)
    where = F.pad(batch.loss_mask[:, 1:], (0, 1))  # a row predicts the next token
    logits, _ = drafter(
        embeds, common.rotary(target, positions, -1), kv, head, where, cross_mask=mask
    )
    return logits.float(), where


def loss(drafter: Drafter, target, batch) -> Tensor:
    """Cross-entropy summed over positions: against the target's distribution, or the data's next
    token (5.1).

    Args:
        batch: common.Batch.
    """
    logits, where = training_logits(drafter, target, batch)
    if drafter.config.distill:
        labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).softmax(
            -1
        )  # (M, Vd)
    else:
        inside = torch.full((drafter.config.target["vocab_size"],), -100, device=logits.device)
        inside[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=logits.device)
        labels = inside[
            batch.input_ids[:, 1:][where[:, :-1]]
        ]  # (M,), -100 for tokens that cannot be drafted
    return F.cross_entropy(logits, labels, reduction="sum")


def alpha(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Acceptance rate at temperature 1 (5.1): sum over positions of sum_x min(p_target, q_draft),
    and their number."""
    logits, where = training_logits(drafter, target, batch)
    p_target = common.target_logits(target, batch.hidden[where]).softmax(-1)[:, drafter.draft_ids]
    return torch.minimum(p_target, logits.softmax(-1)).sum(), len(logits)


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """E(Spd.) of 5.1 for acceptance rate alpha, draft length gamma and cost coefficient c (drafter
    / target time)."""
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


def propose(
    drafter: Drafter,
    target,
    input_ids: Tensor,
    cache,
    memory,
    logits_processor=None,
    do_sample=False,
):
    """Draft a chain one token at a time; take as many as you want.

    First the drafter consumes what was committed since its last step. Each of those tokens may read
    only the target rows before it, as in training; the newest one, and the drafted ones, read all
    there are.

    Args:
        input_ids: (1, P + 1) committed tokens, of which `cache`, the target's, holds P.
        memory: from new_memory.
    Yields:
        (token (1,), q_draft (V,) the processed distribution it comes from, hidden (D,)).
    Raises:
        ValueError: a tensor-parallel target, of whose KV heads each process has a part only.
    """
    ids, own = input_ids, memory.cache
    fed = own.rewind(input_ids)  # (1, n)
    kv = [(cache.layers[layer].keys, cache.layers[layer].values) for layer in drafter.kv_layers]
    if cache.get_seq_length() and any(
        keys.shape[1] != drafter.config.target["num_kv_heads"] for keys, _ in kv
    ):
        raise ValueError(
            "GLIDE reads all KV heads of the target, and a tensor-parallel one has a part of them "
            "on each "
            "process; take another method, or a drafter trained with --no-cross-attention"
        )
    while True:
        positions = own.feed(fed)
        self_mask = cross_mask = None
        if fed.shape[1] > 1:
            rows = torch.arange(own.fed.shape[1], device=ids.device)
            self_mask = (positions.mT >= rows)[None, None]  # (1, 1, n, P + 1)
            cross_mask = (positions.mT > rows[: cache.get_seq_length()])[None, None]  # (1, 1, n, P)
        embeds, rotary = target.get_input_embeddings()(fed), common.rotary(target, positions, -1)
        newest = (slice(None), -1)
        logits, hidden = drafter(
            embeds, rotary, kv, memory.head, newest, self_mask, cross_mask, own
        )  # (1, Vd), (1, D)
        scores = logits.new_full(
            (1, drafter.config.target["vocab_size"]), float("-inf"), dtype=torch.float32
        )
        scores[:, drafter.draft_ids] = logits.float()
        q_draft = (logits_processor(ids, scores) if logits_processor else scores).softmax(-1)[
            0
        ]  # (V,)
        token = torch.multinomial(q_draft, 1) if do_sample else q_draft.argmax(keepdim=True)
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
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=glide.generate, drafter=drafter)`: lossless decoding
    with GLIDE.

    Args:
        gamma: draft tokens a round, Config.gamma by default. stats: a common.Stats to fill.
    Returns:
        (1, T') prompt and new tokens.
    """
    gamma, stats = drafter.config.gamma if gamma is None else gamma, stats or common.Stats()
    do_sample = generation_config.do_sample
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    memory, done = new_memory(drafter, target), False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = (
                generation_config.max_length - input_ids.shape[1] - 1
            )  # the bonus token takes one place
            steps = propose(drafter, target, input_ids, cache, memory, logits_processor, do_sample)
            draft = common.chain(itertools.islice(steps, max(0, min(gamma, room))), input_ids)
        verified = common.verify(
            target, input_ids, draft, cache, logits_processor, do_sample, stats
        )
        input_ids, done = common.commit(
            input_ids, verified.tokens, stopping_criteria, stats, token_streamer
        )
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "glide")
