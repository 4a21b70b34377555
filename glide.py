"""GLIDE: a drafter that reads the target's KV cache.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 4.1.
Each layer of a small transformer has a cross-attention that
reads the keys and values that the target has cached, a row
for each earlier token. The newest token x_t and the tokens
drafted after it have none yet (x is readable):

         tokens   x_1 .. x_(t-1)  x_t  x_(t+1)..x_(t+i-1)
    target rows    x  x  x         .      .  .  .
    drafter rows   x  x  x         x      x  x  x
                                      q_draft of x_(t+i)

Training imitates this delay with `block_mask`.

Names that differ from the paper's: M_T and M_D are `target`
and `drafter`, N_D is `num_layers`, L is `block_size`, p_D
is `q_draft`, c is `cost`.

Deviations from the paper:
    1. The drafter has the target's width, frozen embedding and
       LM head, and starts from the target's weights.
    2. It drafts frequent tokens only (`draft_vocab`).
    3. Labels are the target's distributions (`distill`); the
       paper's are the data's tokens.
    4. A query's block is its own token's, as in the formula of
       4.1. In the prose, no query predicts the first token of
       a block. The first block has a random length, so that
       a position meets every delay.
    5. Not in the paper: pre-norm and residual of the cross-
       attention. Queries are rotated, as the cached keys are.
       A query that may read no row gets zero. All tokens
       query, not only x_t and those after it.
    6. The shipped drafter reads target layer 18 of 0 to 29.

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


VARIANTS = {}


# -------------------------------------------------------------------------------- architecture


class CrossAttention(nn.Module):
    """The drafter's queries read the target's keys and values (4.1)."""

    def __init__(self, config: Config):
        super().__init__()
        shape = config.target
        self.head_dim = shape["head_dim"]
        width = shape["num_heads"] * self.head_dim
        self.q_proj = nn.Linear(shape["hidden_size"], width, bias=False)
        self.o_proj = nn.Linear(width, shape["hidden_size"], bias=False)
        self.q_norm = nn.Identity()
        if config.query_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def forward(self, x: Tensor, kv, tables, mask: Tensor | None) -> Tensor:
        """x (B, T, D) to (B, T, D).

        kv: (K, V), each (B, Hkv, P, Dh).
        mask: (B or 1, 1, T, P) bool, True = reads.
        """
        # 1. Q^(m,j) = H^m W_j, all heads j at once.
        q = self.q_proj(x)
        q = q.unflatten(-1, (-1, self.head_dim))  # (B, T, H, Dh)
        q = self.q_norm(q).transpose(1, 2)  # (B, H, T, Dh)
        q = common.rotate(q, tables)
        # 2. hd_j = SoftMax(Q K^T / sqrt(d_k)) V. A softmax over
        #    no rows can be NaN. Such a query reads all rows, and
        #    its output is set to zero.
        k, v = (rows.to(q.dtype) for rows in kv)
        some = 1
        if mask is not None:
            some = mask.any(-1, keepdim=True)  # (B or 1, 1, T, 1)
            mask = mask | ~some
        heads = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        heads = heads * some  # (B, H, T, Dh)
        # 3. Concat(hd_1, ..., hd_h) W^O
        return self.o_proj(heads.transpose(1, 2).flatten(2))


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
        # Named as in the target, so that weights can be copied.
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)

    def forward(self, x: Tensor, tables, self_mask, cache, glimpse) -> Tensor:
        """x (B, T, D) to (B, T, D).

        glimpse: kv, with tables and mask to read it, or None.
        """
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, tables, self_mask, past_key_values=cache)[0]
        if glimpse is not None:
            normed = self.cross_layernorm(x)
            x = x + self.cross_attn(normed, *glimpse)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The layers and the final norm. The rest is the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        shape = config.target
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_layers))
        self.norm = nn.RMSNorm(shape["hidden_size"], eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    @property
    def kv_layers(self) -> list[int]:
        """Layer m reads target layer N_T - N_D + m, or `kv_layer`."""
        config = self.config
        if not config.cross_attention:
            return []
        if config.kv_layer >= 0:
            return [config.kv_layer] * config.num_layers  # Figure 7
        depth = config.target["num_layers"]
        return list(range(depth - config.num_layers, depth))

    def forward(self, target, ids, positions, kv, self_mask=None, cross_mask=None, cache=None):
        """Hidden states (B, T, D) of ids (B, T).

        positions: (B or 1, T).
        kv: {target layer: (K, V)}, each (B, Hkv, P, Dh).
        self_mask: (B or 1, 1, T, P_own + T) bool; None is
            causal, for T = 1 or without a cache.
        cross_mask: (B or 1, 1, T, P) bool; None: all rows.
        cache: the drafter's own, to which T rows are added.
        """
        shape = self.config.target
        x = target.get_input_embeddings()(ids)  # (B, T, D)
        x = x.to(self.norm.weight.dtype)
        top = shape["num_layers"] - 1
        reads = self.kv_layers or [top] * len(self.layers)
        for layer, read in zip(self.layers, reads):
            # The cross-attention's queries rotate as the keys of the layer that it reads.
            # The self-attention uses the same tables, so they are computed once, but
            # LlamaAttention rotates all Dh.
            tables = common.rotary(target, positions, read)
            glimpse = (kv[read], tables, cross_mask) if kv else None
            whole = common.whole_rotary(tables, shape["head_dim"])
            whole = tuple(table.to(x.dtype) for table in whole)
            x = layer(x, whole, self_mask, cache, glimpse)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with weights of the target.

    A cross-attention copies the layer that it reads,
    because that layer's queries match its keys.
    """
    # 1. Complete the Config. Qwen3 normalises each head's query.
    shape = common.target_shape(target)
    depth = shape["num_layers"]
    if max(config.num_layers - 1, config.kv_layer) >= depth:
        raise common.UserError(
            f"num_layers {config.num_layers}, kv_layer {config.kv_layer}: the target has layers 0 "
            f"to {depth - 1}"
        )
    weights = dict(target.get_decoder().named_parameters())
    q_norm = weights.get("layers.0.self_attn.q_norm.weight", [])
    config.target = shape
    config.query_norm = len(q_norm) == shape["head_dim"]
    drafter = Drafter(config)
    # 2. Check the rows that it will read.
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    _, kv = common.target_features(target, token, drafter.kv_layers)
    ordinary = (1, shape["num_kv_heads"], 1, shape["head_dim"])
    for layer, (keys, values) in kv.items():
        if not keys.shape == values.shape == ordinary:
            raise common.UserError(
                f"target layer {layer} caches keys of shape {tuple(keys.shape)}, not {ordinary}: "
                "take another layer, another method, or --no-cross-attention"
            )
    # 3. Copy weights of equal name and shape.
    layers = common.target_layers(target)
    pairs = list(zip(drafter.layers, layers[-config.num_layers :]))
    for layer, read in zip(drafter.layers, drafter.kv_layers):
        theirs = layers[read] if layers else None
        if hasattr(theirs, "self_attn"):  # not in GPT-NeoX
            pairs.append((layer.cross_attn, theirs.self_attn))
        if hasattr(theirs, "input_layernorm"):  # not in OLMo-2
            pairs.append((layer.cross_layernorm, theirs.input_layernorm))
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# -------------------------------------------------------------------------- training objective


def block_mask(length: int, block_size: int, phase: Tensor) -> Tensor:
    """Mask_Block (4.1): a query may read keys of earlier blocks only.

    While drafting, the query that predicts the i-th draft
    token lacks i target rows, its own included. In training
    they exist, and the drafter would learn to rely on them.
    So the mask hides the last 1 to L; L should be at least
    gamma. L = 3; phase 1 cuts one token off the first block:

             key   0  1  2  3  4  5        blocks: 0 1 | 2 3 4 | 5
        query 0    .  .  .  .  .  .
              1    .  .  .  .  .  .
              2    x  x  .  .  .  .
              3    x  x  .  .  .  .
              4    x  x  .  .  .  .
              5    x  x  x  x  x  .

    phase: (B,) tokens that the first block lacks.
    Returns (B, 1, T, T) bool.
    """
    places = torch.arange(length, device=phase.device)
    block = (places + phase[:, None]) // block_size  # (B, T)
    return (block[:, :, None] > block[:, None, :])[:, None]


def training_pass(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Draft logits (M, Vd), target states (M, D).

    M positions are those whose next token is learned.
    """
    # 1. Padding is on the right, where no earlier token looks.
    ids = batch.input_ids  # (B, T)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]  # (1, T)
    size = drafter.config.block_size
    mask = block_mask(ids.shape[1], size, batch.seed % size)
    hidden = drafter(target, ids, positions, batch.kv, cross_mask=mask)
    # 2. Place t predicts token t + 1.
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T)
    head = common.draft_head(target, drafter.vocab_ids).to(hidden.dtype)
    logits = head(hidden[predicts]).float()
    return logits, batch.hidden[predicts]


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """Cross-entropy (5.1), summed over M positions, and M.

    The label is the target's distribution, renormalised over
    the draft vocabulary (`common.target_logits`). Without
    `distill` it is the data's next token; positions whose
    next token cannot be drafted are left out. Column n of
    logits and labels belongs to token vocab_ids[n].
    """
    logits, hidden = training_pass(drafter, target, batch)
    vocab_ids = drafter.vocab_ids  # (Vd,)
    if drafter.config.distill:
        teacher = common.target_logits(target, hidden, vocab_ids)
        labels = teacher.softmax(-1)  # (M, Vd)
        count = len(labels)
    else:
        # A row is one-hot, or zero if vocab_ids lacks its token.
        token = batch.input_ids[batch.loss_mask]  # (M,)
        labels = (token[:, None] == vocab_ids).float()  # (M, Vd)
        count = labels.sum()
    return F.cross_entropy(logits, labels, reduction="sum"), count


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """alpha (5.1), summed over M positions, and M.

    It is measured on the batch's text, with `block_mask`.
    The paper prints E_(x ~ p_D) min(p_T, p_D) and must mean
    E_(x ~ p_D) min(1, p_T / p_D) = sum_x min(p_T, p_D).
    """
    logits, hidden = training_pass(drafter, target, batch)
    q_draft = logits.softmax(-1)  # (M, Vd)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(logits)


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """E(Spd.) of 5.1; cost: drafter pass time over target pass time."""
    # (1 - alpha^(gamma+1)) / (1 - alpha) as a sum.
    tokens = sum(alpha**n for n in range(gamma + 1))
    return tokens / (gamma * cost + 1)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.DraftCache(drafter.config.num_layers)
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd


def feed(drafter: Drafter, decoding, memory: Memory, new: Tensor) -> Tensor:
    """Feed tokens (1, n); returns the last one's hidden state (1, D).

    Each reads the target rows before its own. P = 4,
    n = 2 (an accepted token, never fed, and the bonus):

                   target rows    drafter rows
                     0 1 2 3       0 1 2 3 4
        token 3      x x x .       x x x x .
        token 4      x x x x       x x x x x
    """
    positions = memory.cache.record(new)  # (1, n)
    prefix = decoding.cache.get_seq_length()  # P
    end = memory.cache.fed.shape[1]  # P_own + n
    kv = {}  # stays empty for a prompt of one token
    if prefix > 0:
        for layer in drafter.kv_layers:
            rows = decoding.cache.layers[layer]
            # A part of a prompt reads no rows after it, so they are left out.
            kv[layer] = rows.keys[:, :, :end], rows.values[:, :, :end]
    self_mask = cross_mask = None
    if new.shape[1] > 1:
        places = torch.arange(end, device=new.device)
        query = positions[0, :, None]  # (n, 1)
        self_mask = (query >= places)[None, None]  # (1, 1, n, end)
        cross_mask = (query > places[:prefix])[None, None]  # (1, 1, n, min(P, end))
    hidden = drafter(decoding.target, new, positions, kv, self_mask, cross_mask, memory.cache)
    return hidden[:, -1]


def propose(drafter: Drafter, decoding, memory: Memory):
    """Draft a chain after `decoding.ids`, until the caller stops.

    Yields pairs of a token (1,) and the q_draft (V,) that it was chosen from. Ends
    after an end-of-sequence token, because no text follows it, and where the logits
    processors allow no token of `vocab_ids`.
    """
    # Drop the drafter's rows of rejected tokens. The tokens without a row are fed:
    # at first the whole prompt, later the bonus token and the one before it.
    new = memory.cache.rewind(decoding.ids)  # (1, n)
    drafted = []
    while True:
        # A prompt is fed in parts, because a mask of all its queries and keys would
        # grow with the square of its length.
        for part in new.split(512, dim=1):
            hidden = feed(drafter, decoding, memory, part)  # (1, D)
        logits = memory.head(hidden)[0]  # (Vd,)
        picked = common.pick(decoding, logits, drafter.vocab_ids, drafted)
        if picked is None:
            return
        yield picked
        token = picked[0]
        drafted.append(int(token))
        if drafted[-1] in decoding.ends:
            return
        new = token[None]  # (1, 1); fed only if the caller wants another one


@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    changes: other values for fields of the Config with decode=True, such as gamma.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        steps = propose(drafter, decoding, memory)
        length = min(config.gamma, decoding.room)
        yield common.chain(itertools.islice(steps, length), decoding.ids)


if __name__ == "__main__":
    common.demo(Drafter, "glide", drafts)
