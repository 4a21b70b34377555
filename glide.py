"""GLIDE: a drafter that reads the target's KV cache.

Paper: Du et al., ICML 2024, arXiv:2402.02082, section 4.1.

The drafter is a small transformer. In addition to its self-attention, each layer has a
cross-attention over the keys and values that the target has cached. They hold what the
target made of the text so far, and the target has computed them anyway, so the drafter
pays only for attending to them.

The target chose the newest token x_t from its last logits, and will be fed x_t only
together with the next draft. Therefore it has no row for x_t yet, nor for the tokens
that are being drafted. While the drafter drafts x_(t+i), it can read these rows (*):

           tokens   x_1 ... x_(t-1)  x_t  x_(t+1) ... x_(t+i-1)
    target's rows    *   *   *        .    .       .   .
    drafter's own    *   *   *        *    *       *   *

The i-th draft token has to do without i of the target's rows. In training the target
has rows for the whole text, and `block_mask` hides the most recent ones, so that the
drafter learns to do without them.

Names that differ from the paper's: M_T and M_D are `target` and `drafter`, p_T and p_D
are `p_target` and `q_draft`, N_D is `num_layers`, L is `block_size`, c is `cost`.

Deviations from the paper and what the authors' code does: at the end.
Licence: Apache-2.0.
"""

import dataclasses
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
    cross_attention: bool = option(
        True, "read the target's cache; off: Vanilla Drafter (5.2)"
    )
    # A layer counted from 0, or one of two codes (not Python's indices from the end).
    kv_layer: int = option(
        -2, "target layer to read; -2: at 3/5 of the depth; -1: the top ones (paper)"
    )
    query_norm: bool = option(False, "normalise queries, as Qwen3 (filled in by build)")
    # The gamma-th draft token misses gamma rows of the target, and training hides at
    # most L, so L should be at least gamma.
    block_size: int = option(3, "L, tokens in a block of the training mask (paper: 5)")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    distill: bool = option(
        True, "learn the target's distribution; off: the text's tokens"
    )
    gamma: int = option(3, "draft tokens per round (paper: 5)", decode=True)

    def __post_init__(self):
        common.at_least(self, num_layers=1, kv_layer=-2, block_size=1)
        common.at_least(self, draft_vocab=0, gamma=0, intermediate_size=1)
        if self.kv_layer == -2 and "num_layers" in self.target:
            self.kv_layer = 3 * self.target["num_layers"] // 5  # 18 of 30


# Named settings for bench.py, as in --method glide:paper. For the paper's drafter train
# with --block-size 5 --kv-layer -1 --draft-vocab 0 --no-distill.
VARIANTS = {"paper": {"gamma": 5}}


# ---------------------------------------------------------------------- architecture


class CrossAttention(nn.Module):
    """The drafter's queries attend to the target's keys and values (4.1)."""

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

    def forward(self, x: Tensor, rows, tables, mask: Tensor | None) -> Tensor:
        """x (B, T, D) to (B, T, D).

        rows: the target's K and V, each (B, Hkv, P, Dh).
        tables: cos and sin of the queries' positions, (B or 1, T, R) each, R <= Dh.
        mask: (B or 1, 1, T, P) bool, True where a query may read; None: everywhere.
        """
        # Q^(m,j) = H^m W_j, for all heads j at once.
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, Dh)
        q = self.q_norm(q).transpose(1, 2)  # (B, H, T, Dh)
        q = common.rotate(q, tables)
        k, v = (each.to(q.dtype) for each in rows)

        # The queries of the first block, and the first token of a prompt, may read no
        # row at all. A softmax over nothing is undefined, so such a query reads all
        # rows, and its result is set to zero.
        any_row = 1
        if mask is not None:
            any_row = mask.any(-1, keepdim=True)  # (B or 1, 1, T, 1) bool
            mask = mask | ~any_row
        # hd_j = SoftMax(Q K^T / sqrt(d_k)) V
        heads = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        heads = heads * any_row  # (B, H, T, Dh)

        # Concat(hd_1, ..., hd_h) W^O
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Self-attention, cross-attention and feed-forward (Figure 2)."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        width = config.target["hidden_size"]
        llama = common.llama_config(config.target, config.intermediate_size)
        # The names are the target's, so that `build` can copy weights by name.
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = LlamaAttention(llama, index)
        if config.cross_attention:
            self.cross_layernorm = nn.RMSNorm(width, eps=1e-5)
            self.cross_attn = CrossAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)

    def forward(self, x: Tensor, own_tables, self_mask, cache, glimpse) -> Tensor:
        """x (B, T, D) to (B, T, D).

        own_tables: cos and sin for the self-attention, (B or 1, T, Dh) each.
        self_mask, cache: of the self-attention, see Drafter.forward.
        glimpse: rows, tables and mask for CrossAttention; None: it is left out.
        """
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, own_tables, self_mask, cache)[0]
        if glimpse is not None:
            normed = self.cross_layernorm(x)
            x = x + self.cross_attn(normed, *glimpse)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2402.02082",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "glide"],
):
    """The layers and the final norm. Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_layers))
        self.norm = nn.RMSNorm(config.target["hidden_size"], eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    @property
    def kv_layers(self) -> list[int]:
        """The target layer that each layer reads, counted from 0.

        All read `kv_layer` (5.4 varies it). If it is -1, layer m reads N_T - N_D + m,
        as in 4.1, where layers are counted from 1.
        """
        config = self.config
        if not config.cross_attention:
            return []
        if config.kv_layer >= 0:
            return [config.kv_layer] * config.num_layers
        depth = config.target["num_layers"]
        return list(range(depth - config.num_layers, depth))

    def forward(
        self, target, ids, positions, kv, self_mask=None, cross_mask=None, cache=None
    ):
        """Hidden states (B, T, D) of ids (B, T).

        positions: (B or 1, T).
        kv: {target layer: (K, V)}, each (B, Hkv, P, Dh); {}: no cross-attention.
        self_mask: (B or 1, 1, T, P_own + T) bool; None: causal. It is needed if T > 1
            and the cache is not empty.
        cross_mask: (B or 1, 1, T, P) bool; None: all rows are read.
        cache: the drafter's own, to which T rows are added.
        """
        shape = self.config.target
        x = target.get_input_embeddings()(ids)  # (B, T, D)
        x = x.to(self.norm.weight.dtype)
        top = shape["num_layers"] - 1
        # Without cross-attention no layer is read, and any layer's tables will do.
        sources = self.kv_layers or [top] * len(self.layers)
        for layer, source in zip(self.layers, sources):
            # A query must be rotated as the keys that it meets, and layers of a target
            # may rotate differently, so the tables are those of the layer that is read.
            # The self-attention uses the same tables, widened to all Dh dimensions.
            tables = common.rotary(target, positions, source)
            glimpse = (kv[source], tables, cross_mask) if kv else None
            own_tables = common.whole_rotary(tables, shape["head_dim"], x.dtype)
            x = layer(x, own_tables, self_mask, cache, glimpse)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with weights of the target.

    token_counts: (V,) how often each token occurs in the training data.
    Raises UserError for layers that the target does not have, or whose rows are not
    ordinary keys and values, and for a target that `check_target` refuses.
    """
    common.check_target(target)
    shape = common.target_shape(target)
    depth = shape["num_layers"]
    if config.num_layers > depth or config.kv_layer >= depth:
        raise common.UserError(
            f"num_layers {config.num_layers}, kv_layer {config.kv_layer}: take at most "
            f"{depth} layers, and a kv_layer below {depth}"
        )
    # Qwen3 normalises the query of each head, and its cached keys expect that.
    weights = dict(target.get_decoder().named_parameters())
    q_norm = weights.get("layers.0.self_attn.q_norm.weight", [])
    query_norm = len(q_norm) == shape["head_dim"]
    config = dataclasses.replace(config, target=shape, query_norm=query_norm)
    drafter = Drafter(config)

    # Not every layer caches ordinary keys, so feed one token and look at its row.
    probe = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    _, kv = common.target_features(target, probe, drafter.kv_layers)
    ordinary = (1, shape["num_kv_heads"], 1, shape["head_dim"])
    for index, (keys, values) in kv.items():
        if not keys.shape == values.shape == ordinary:
            raise common.UserError(
                f"target layer {index} caches keys of shape {tuple(keys.shape)}, not "
                f"{ordinary}: take another layer, another method, or "
                "--no-cross-attention"
            )

    # The layers start as the target's topmost ones (the feed-forward if it is as wide).
    # A cross-attention starts as the attention of the layer that it reads. In Llama,
    # Mistral and Qwen3 the copied queries match the cached keys. Training has to learn
    # the match where a target scales scores in its own way, has biases, normalises all
    # heads together, rotates other pairs of dimensions (Cohere, GLM-4, Ernie), or does
    # not rotate in some layers (SmolLM3).
    layers = common.target_layers(target)
    pairs = list(zip(drafter.layers, layers[-config.num_layers :]))
    for layer, source in zip(drafter.layers, drafter.kv_layers):
        theirs = layers[source] if layers else None
        if hasattr(theirs, "self_attn"):  # not in GPT-NeoX
            pairs.append((layer.cross_attn, theirs.self_attn))
        if hasattr(theirs, "input_layernorm"):  # not in OLMo-2
            pairs.append((layer.cross_layernorm, theirs.input_layernorm))
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# ---------------------------------------------------------------- training objective


def block_mask(length: int, block_size: int, phase: Tensor) -> Tensor:
    """Mask_Block (4.1): a query reads the keys of earlier blocks only.

    A block imitates a round. Its i-th query misses i rows: its own, and those of the
    i - 1 queries before it in the block. So does the query that drafts the i-th token
    of a round (see `feed`). Here L = 3, and with phase 1 the first block is one token
    short:

             key   0  1  2  3  4  5        blocks: 0 1 | 2 3 4 | 5
        query 0    .  .  .  .  .  .
              1    .  .  .  .  .  .
              2    x  x  .  .  .  .        feeds x_t:     misses 1 row
              3    x  x  .  .  .  .        feeds x_(t+1): misses 2
              4    x  x  .  .  .  .        feeds x_(t+2): misses 3
              5    x  x  x  x  x  .        feeds the next round's x_t

    By the formula, used here, a block's first token is predicted by the last query of
    the block before. (In the prose of 4.1 no query predicts it.)

    phase: (B,) how many tokens the first block of each sequence lacks.
    Returns (B, 1, T, T) bool, True where a query may read; T is `length`.
    """
    places = torch.arange(length, device=phase.device)
    block = (places + phase[:, None]) // block_size  # (B, T)
    return (block[:, :, None] > block[:, None, :])[:, None]


def training_pass(drafter: Drafter, target, batch) -> Tensor:
    """The drafter's logits (M, Vd) at the M places that `batch.predicts` marks.

    Column n belongs to drafter.vocab_ids[n]. batch: a common.Batch, whose kv has the
    layers `kv_layers`.
    """
    ids = batch.input_ids  # (B, T)
    # Padding is on the right, so under a causal mask no token sees it.
    positions = torch.arange(ids.shape[1], device=ids.device)[None]  # (1, T)
    size = drafter.config.block_size
    # If all blocks were whole, the token at some index would always miss equally many
    # rows. The first one therefore has a random length.
    phase = torch.randint(size, (len(ids),), device=ids.device)
    mask = block_mask(ids.shape[1], size, phase)
    states = drafter(target, ids, positions, batch.kv, cross_mask=mask)  # (B, T, D)
    states = states[batch.predicts]  # (M, D)
    head = common.draft_head(target, drafter.vocab_ids).to(states.dtype)
    return head(states).float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The cross-entropy, summed over the places that count, and their number.

    The labels are the target's distributions, or without `distill` the text's tokens,
    as in 5.1.
    """
    logits = training_pass(drafter, target, batch)  # (M, Vd)
    vocab_ids = drafter.vocab_ids  # (Vd,)
    if drafter.config.distill:
        # p_target over the tokens that the drafter can propose.
        hidden = batch.hidden[batch.predicts]  # (M, D)
        p_target = common.target_logits(target, hidden, vocab_ids).softmax(-1)
        return F.cross_entropy(logits, p_target, reduction="sum"), len(logits)
    # The index in vocab_ids of each token of the text. One that cannot be drafted is
    # not counted; F.cross_entropy ignores the label -100.
    tokens = batch.input_ids[:, 1:][batch.loss_mask[:, 1:]]  # (M,)
    same = tokens[:, None] == vocab_ids  # (M, Vd)
    labels = torch.where(same.any(1), same.int().argmax(1), -100)  # (M,)
    return F.cross_entropy(logits, labels, reduction="sum"), same.sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """The acceptance rate alpha (5.1), summed over M places, and M.

    It is measured at temperature 1 and under `block_mask`; each token is predicted
    after the batch's own text (teacher forcing). What p_target gives to tokens outside
    the draft vocabulary counts as rejected.
    """
    # Here tokens miss 1 to L rows, each number equally often. In decoding, the i-th
    # token of a round misses i rows and counts only if all before it were accepted, so
    # the acceptance rate of a run differs from this one.
    logits = training_pass(drafter, target, batch)
    q_draft = logits.softmax(-1)  # (M, Vd)
    target_hidden = batch.hidden[batch.predicts]  # (M, D)
    # The paper prints E_(x ~ p_D) min(p_T, p_D) and must mean the probability that a
    # drafted token is accepted, E_(x ~ p_D) min(1, p_T / p_D) = sum_x min(p_T, p_D).
    total = common.overlap(target, target_hidden, q_draft, drafter.vocab_ids)
    return total, len(logits)


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """E(Spd.) of 5.1, if every draft token is accepted with probability alpha.

    cost: c, the time of a drafter's pass divided by that of a target's forward.

    If alpha differs from round to round, do not choose gamma by its mean: with c = .1,
    and alpha .9 in half of the rounds and .3 in the others, gamma = 8 is the best, but
    for the mean, .6, it is 3.
    """
    # A round commits (1 - alpha^(gamma+1)) / (1 - alpha) tokens; as a sum, this holds
    # for alpha = 1 as well.
    tokens = sum(alpha**n for n in range(gamma + 1))
    return tokens / (gamma * cost + 1)


# -------------------------------------------------------------------------- decoding


def feed(drafter: Drafter, decoding, cache, new: Tensor) -> Tensor:
    """Feed tokens (1, n) that follow those in the drafter's cache.

    A single token must be the newest committed one or a drafted one, because it may
    read all rows of the target. Returns the last token's hidden state (1, D), from
    which the next one is drafted.
    """
    indices = cache.record(new)  # (1, n) of the tokens in decoding.ids
    prefix = decoding.hidden.shape[1]  # P
    kv = {}  # stays empty after a prompt of one token, when the target has no rows
    if prefix > 0:
        kv = {layer: decoding.rows(layer) for layer in drafter.kv_layers}
    self_mask = cross_mask = None  # a single token reads all rows
    if new.shape[1] > 1:
        # Several tokens: at first the prompt, later accepted tokens that were never fed
        # (the last of a chain, or an extra of CAPE's) and the bonus token. Each reads
        # the target's rows of the tokens before it. It misses one row, its own, as the
        # first query of a block does.
        query = indices[0, :, None]  # (n, 1)
        own_rows = torch.arange(cache.fed.shape[1], device=new.device)
        self_mask = (query >= own_rows)[None, None]  # (1, 1, n, P_own + n)
        target_rows = torch.arange(prefix, device=new.device)
        cross_mask = (query > target_rows)[None, None]  # (1, 1, n, P)
    # A query rotates by its position in the text, because the target's keys do.
    positions = decoding.first + indices
    target = decoding.target
    hidden = drafter(target, new, positions, kv, self_mask, cross_mask, cache)
    return hidden[:, -1]


def propose(drafter: Drafter, decoding, cache: common.DraftCache, head: nn.Module):
    """Draft a chain after `decoding.ids`, until the caller stops.

    cache: the drafter's, of this answer. head: the target's LM head, D -> Vd.
    Yields pairs of a token (1,) and the q_draft (V,) that it was chosen from. If there
    are logits processors, it ends where they leave no finite score, and after a token
    that ends the text.
    """
    # `rewind` drops the drafter's rows of rejected tokens, and returns the tokens that
    # have no row yet. The rows of accepted tokens stay. In the first layer they depend
    # on tokens only. Those of higher layers were made with fewer of the target's rows,
    # as in training, where a row is made under the mask of its block.
    new = cache.rewind(decoding.ids)  # (1, n)
    drafted = []
    while True:
        # A long text is fed in parts (with window=None), because a mask of all its
        # queries and keys would grow with the square of its length.
        for part in new.split(512, dim=1):
            hidden = feed(drafter, decoding, cache, part)  # (1, D)
        logits = head(hidden)[0]  # (Vd,)
        picked = common.pick(decoding, logits, drafter.vocab_ids, drafted)
        if picked is None:
            return
        yield picked
        token = picked[0]
        new = token[None]  # (1, 1); it is fed only if the caller wants another one
        if decoding.logits_processor:
            # Logits processors are given the tokens drafted so far, and a grammar may
            # allow nothing after the end of a text. Without processors, drafting beyond
            # it is merely wasted work: on a GPU, waiting for each token costs more.
            drafted.append(int(token))
            if drafted[-1] in decoding.eos_ids:
                return


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    changes: other values for fields of the Config with decode=True, such as gamma, or
        for the window (common.windowed).
    Raises UserError, at the first draft, for a change of any other field, and for a
    drafter that is not of this method or not for this target.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    cache = common.DraftCache(drafter.config.num_layers)
    head = common.draft_head(decoding.target, drafter.vocab_ids)
    while not decoding.done:
        steps = propose(drafter, decoding, cache, head)
        length = min(config.gamma, decoding.max_depth)
        yield common.chain(itertools.islice(steps, length), decoding.ids)


if __name__ == "__main__":
    common.demo(Drafter, "glide", drafts)


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper, and choices where it says nothing:
#  1. The drafter has the target's width (the paper: 4096), its embedding and LM head
#     (without bias and soft cap), both frozen, and starts from its weights (the paper:
#     from scratch).
#  2. Only frequent tokens are drafted and learned (`draft_vocab`), and p_target is
#     normalised over them.
#  3. The labels are the target's distributions (`distill`; 5.1: the text's tokens). The
#     texts are the target's answers, which appendix C calls distillation; 5.1 does not
#     train on them. There is no pre-training on SlimPajama (5.1), and batch, learning
#     rate and length are those of train.py (appendix B: 64, 5e-4, one epoch).
#  4. The first block has a random length. Every token queries; in 4.1 only x_t and
#     later ones do, and what they read is concatenated with the self-attention's other
#     outputs. This matters with more than one layer.
#  5. A query that may read no row gets zero, where the printed softmax is undefined.
#  6. The cross-attention has a residual connection, a norm before it and rotated
#     queries (normalised where the target's are), none of which 4.1 mentions. Query
#     heads may share a key-value head.
#  7. By default L = gamma = 3, and every layer reads the target layer at three fifths
#     of the depth (the paper: L = gamma = 5, and the top N_D layers). In 5.4 acceptance
#     rises with the layer. Here the top layer is better than layer 0, but worse than
#     layer 18 (results/claims.md).
#  8. In a long text the drafter sees only a window (common.windowed), and it reads the
#     target's rows of the tokens in this window only.
#
# Authors' code, run with the same random weights; the rest agrees:
#  - There is no norm before the cross-attention, and queries rotate with base 10000.
#  - The first block reads causally: its tokens read their own target rows as well.
#  - When decoding, the prompt's tokens query without a mask, and committed tokens are
#    fed again, so with two layers the drafts differ.
#  - It drafts 4 tokens a round. Sampled verification ends in an IndexError.
#  - The published script trains width 768; an option takes the target's shape.
