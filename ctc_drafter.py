"""CTC-drafter: all draft tokens in one pass (Wen et al., 2024).

Paper: arXiv:2412.00061. One transformer layer fills S slots after the
newest token. A slot holds a token or a blank. The CTC transform merges
equal neighbours, then drops blanks. The likeliest results form the draft, a
tree. The CTC loss of a sequence sums over its alignments: all fillings of the
slots that the transform turns into it (a, b, c are tokens, e is the blank):

    slots   a  a  e  b  c  c    ->  a b c
            a  e  a  b  e  e    ->  a a b    a true repeat has a blank in between

The target has not read the newest token x_(i+1), so the newest hidden state is
h_i. Row i combines h_i with the embedding of x_(i+1). In training, many rows
are anchors. S slots follow each anchor and learn, in order, the U labels after
it; S > U leaves room for blanks. Label y_t is the target's argmax over the
draft vocabulary, given x_0 to x_(t-1). U = 3:

    place          0    1    2    3    4    5
    data          x_0  x_1  x_2  x_3  x_4  x_5
    anchor 0      h_0  x_1 [y_2  y_3  y_4]
    anchor 1           h_1  x_2 [y_3  y_4  y_5]

Names that differ from the paper's: F_distill is `hidden`, F^ `states`,
P^ `q_slots` (in training its logarithm, `log_q`), epsilon the blank (index
Vd), beta^-1 `collapse`, k `symbols`, T of Eq. 7 is S. A counts the anchors of
a sequence here (not alignments), W those of a batch, n rows, m slots.

Deviations from the paper:
    1. A row also holds the next token. This, S and U are as in the authors' code.
    2. Training uses random anchors and sums log P (Eq. 1); Eq. 2 sums P.
    3. Not in the paper: how slots start and what they see (`Drafter.forward`,
       `slot_mask`), norms, the weights at the start, the blank's own logit.
    4. The default transform, `prefix_search`, ranks prefixes by all their
       alignments; the paper's is `alignments`. Both give a trie here, so nothing
       is left to mask; the paper masks what the transform removes.
    5. `first_token` adds a loss on the first token (shipped drafter: 1).
    6. Labels, losses and drafts cover only frequent tokens (`draft_vocab`).

Licence: Apache-2.0.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    slots: int = option(6, "slots that a pass fills, S")
    window: int = option(3, "tokens ahead to learn, U")
    anchors: int = option(64, "places to train at, drawn from each sequence")
    first_token: float = option(0.0, "weight of the first token's own loss")
    intermediate_size: int = option(1536, "width of the feed-forward")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    transform: str = option("prefixes", "prefixes, alignments (the paper's) or none", decode=True)
    symbols: int = option(10, "likeliest tokens considered in a slot, beside blank", decode=True)
    candidates: int = option(16, "prefixes or combinations kept after each slot", decode=True)
    nodes: int = option(10, "maximum number of nodes in the tree", decode=True)

    def __post_init__(self):
        common.at_least(self, window=1, anchors=1, first_token=0, draft_vocab=0)
        common.at_least(self, slots=self.window, symbols=1, candidates=1, nodes=0)
        common.one_of(self, transform=("prefixes", "alignments", "none"))


# Nearest to Table 2's CTC verify and Medusa verify (deviation 4).
VARIANTS = {
    "alignments": {"transform": "alignments"},
    "none": {"transform": "none"},
}


# -------------------------------------------------------------------------------- architecture


class SlotAttention(nn.Module):
    """Slots attend to rows and to each other; rows only supply keys and values."""

    def __init__(self, shape: dict):
        super().__init__()
        width = shape["hidden_size"]
        self.head_dim = shape["head_dim"]
        heads = shape["num_heads"] * self.head_dim
        kv_heads = shape["num_kv_heads"] * self.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, kv_heads, bias=False)
        self.v_proj = nn.Linear(width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Split the heads: (B, T, H Dh) to (B, H, T, Dh)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, rows: Tensor, slots: Tensor, tables, mask: Tensor | None, cache) -> Tensor:
        """Output (B, m, D) of m slots, over P cached rows, n new rows and the slots.

        tables: cos and sin (B, n + m, R). mask: (B, 1, m, n + m) bool.
        """
        x = torch.cat([rows, slots], dim=1)  # (B, n + m, D)
        of_slots = [table[:, -slots.shape[1] :] for table in tables]
        q = common.rotate(self.split(self.q_proj(slots)), of_slots)  # (B, H, m, Dh)
        k = common.rotate(self.split(self.k_proj(x)), tables)  # (B, Hkv, n + m, Dh)
        v = self.split(self.v_proj(x))
        if cache is not None:
            k, v = cache.update(k, v, 0)  # (B, Hkv, P + n + m, Dh)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The Attention Draft Module (3.1).

    Parts that a target layer also has keep its names, to copy weights.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # it reads no K and V of the target
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.02 * torch.randn(config.slots, width))  # (S, D)
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = SlotAttention(config.target)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(common.llama_config(config.target, config.intermediate_size))
        self.blank = nn.Linear(width, 1)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("draft_ids", common.placeholder_ids(config.target, config.draft_vocab))

    def forward(self, target, hidden, next_ids, anchors, mask=None, cache=None) -> Tensor:
        """States (B, A, S, D) of the slots after A of n rows (Eq. 9).

        hidden: (B, n, D); next_ids: (B, n); anchors: (B, A), indices of rows.
        mask: see `slot_mask`; None lets slots see everything, as in decoding,
            where the only anchor is the newest row.
        cache: keys and values of rows and slots are added to it.
        """
        # 1. A row joins a hidden state and the embedding of the next token.
        dtype = self.norm.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        rows = self.fusion(torch.cat(both, dim=-1))  # (B, n, D)

        # 2. A slot starts as its anchor's row plus a vector of its own.
        chosen = rows.take_along_dim(anchors[..., None], dim=1)  # (B, A, D)
        x = (chosen[:, :, None] + self.slots).flatten(1, 2)  # (B, A S, D)

        # 3. Row i has rotary position i, slot j = 1, 2, ... after it i + j.
        start = 0 if cache is None else cache.get_seq_length()  # P
        places = torch.arange(rows.shape[1], device=anchors.device).expand(len(anchors), -1)
        steps = torch.arange(1, len(self.slots) + 1, device=anchors.device)
        ahead = anchors[..., None] + steps  # (B, A, S)
        positions = start + torch.cat([places, ahead.flatten(1)], dim=1)  # (B, n + A S)
        tables = common.rotary(target, positions, -1)

        # 4. The transformer layer.
        normed = self.input_layernorm(x)
        x = x + self.self_attn(self.input_layernorm(rows), normed, tables, mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (anchors.shape[1], len(self.slots)))

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits (..., Vd + 1), the blank last (Eq. 10); head: D -> Vd."""
        return torch.cat([head(states), self.blank(states)], dim=-1).float()


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter; weights of the target's top layer are copied if they fit."""
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    sum_of_both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2D)
    drafter.fusion.weight.data.copy_(sum_of_both)
    top = zip([drafter], common.target_layers(target)[-1:])  # nothing without layers
    common.start_from(drafter, target, token_counts, top)
    return drafter


# -------------------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What slots after anchors (B, A) see, (B, 1, A S, n + A S) bool.

    Rows up to their anchor and slots of the same anchor. Anchors 0, 2; S = 2:

                     rows  0 1 2 3    slots s1 s2 t1 t2
        after 0, s1        x . . .          x  x  .  .
                 s2        x . . .          x  x  .  .
        after 2, t1        x x x .          .  .  x  x
                 t2        x x x .          .  .  x  x
    """
    rows = torch.arange(length, device=anchors.device)
    anchor = anchors.repeat_interleave(slots, dim=1)  # (B, A S)
    up_to = rows <= anchor[..., None]  # (B, A S, n)
    group = torch.arange(anchor.shape[1], device=anchors.device) // slots  # (A S,)
    same = (group[:, None] == group).expand(len(anchors), -1, -1)  # (B, A S, A S)
    return torch.cat([up_to, same], dim=-1)[:, None]


def windows(drafter, target, batch) -> tuple[Tensor, Tensor, Tensor]:
    """Random anchors (B, A), labels (B, A, U) and used (B, A) (Eq. 3 to 5).

    Labels index draft_ids. Where fewer than A windows fit the answer, `used` is
    False for the rest.
    """
    U = drafter.config.window
    # 1. best[t], the target's choice of a draft token after x_t, is y_(t+1).
    best = common.target_logits(target, batch.hidden, drafter.draft_ids).argmax(-1)  # (B, T)

    # 2. The labels of row i are best[i + 1], ..., best[i + U].
    labels = F.pad(best[:, 1:-1], (0, U)).unfold(1, U, 1)  # (B, T - 1, U)
    whole = F.pad(batch.loss_mask[:, 2:], (0, U)).unfold(1, U, 1).all(-1)  # (B, T - 1)

    # 3. Draw the anchors of each sequence from its own seed.
    anchors = torch.full((len(best), drafter.config.anchors), -1)
    for sequence, seed in enumerate(batch.seed.tolist()):
        rows = whole[sequence].nonzero()[:, 0].cpu()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(rows), generator=generator)[: anchors.shape[1]]
        anchors[sequence, : len(drawn)] = rows[drawn]
    anchors = anchors.to(best.device)
    used = anchors >= 0
    anchors = anchors.clamp(min=0)
    return anchors, labels.take_along_dim(anchors[..., None], dim=1), used


def training_log_q(drafter: Drafter, target, batch, anchors: Tensor, used: Tensor) -> Tensor:
    """Log-probabilities (W, S, Vd + 1) of the slots of W used anchors."""
    next_ids = batch.input_ids[:, 1:]  # (B, n)
    mask = slot_mask(anchors, next_ids.shape[1], drafter.config.slots)
    states = drafter(target, batch.hidden[:, :-1], next_ids, anchors, mask)  # (B, A, S, D)
    head = common.draft_head(target, drafter.draft_ids).to(states.dtype)
    return drafter.logits(states[used], head).log_softmax(-1)


def teacher_hidden(batch, anchors: Tensor, used: Tensor) -> Tensor:
    """h_(i+1) (W, D), from which the target predicts the first label."""
    return batch.hidden[:, 1:].take_along_dim(anchors[..., None], dim=1)[used]


def ctc_loss(log_q: Tensor, labels: Tensor) -> Tensor:
    """Minus log P of Eq. 6, summed over W windows.

    log_q: (W, S, Vd + 1). labels: (W, U). A window with r pairs of equal
    neighbours needs U + r slots; one that does not fit adds zero.
    """
    W, S, _ = log_q.shape
    return F.ctc_loss(
        log_q.transpose(0, 1),  # (S, W, Vd + 1)
        labels,
        torch.full((W,), S),
        torch.full((W,), labels.shape[1]),
        blank=log_q.shape[-1] - 1,
        reduction="sum",
        zero_infinity=True,
    )


def first_token_log_q(log_q: Tensor) -> Tensor:
    """Log-probability (W, Vd) of the first token, whichever slot it falls in."""
    blank_before = F.pad(log_q[:, :-1, -1].cumsum(-1), (1, 0))  # (W, S)
    return (blank_before[..., None] + log_q[..., :-1]).logsumexp(1)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """CTC loss plus the first token's loss, summed over W windows, and W."""
    anchors, labels, used = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors, used)  # (W, S, Vd + 1)
    if not len(log_q):  # F.ctc_loss takes no empty batch
        return log_q.sum(), used.sum()  # zero, with a gradient for all weights
    total = ctc_loss(log_q, labels[used])
    if drafter.config.first_token:
        hidden = teacher_hidden(batch, anchors, used)  # (W, D)
        teacher = common.target_logits(target, hidden, drafter.draft_ids).softmax(-1)
        cross_entropy = -(teacher * first_token_log_q(log_q)).sum()
        total = total + drafter.config.first_token * cross_entropy
    return total, used.sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of the first token, summed over W anchors, and W."""
    anchors, _, used = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors, used)
    q_draft = first_token_log_q(log_q).exp()  # (W, Vd)
    hidden = teacher_hidden(batch, anchors, used)
    return common.overlap(target, hidden, q_draft, drafter.draft_ids), len(q_draft)


# ------------------------------------------------------------------------------- CTC transform


def collapse(alignment, blank: int) -> tuple:
    """beta^-1 (2.3): merge equal neighbours, drop blanks; a a e a -> a a."""
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank)


def top_symbols(q_slots: Tensor, symbols: int) -> list[list[tuple[int, float]]]:
    """(symbol, probability) of each slot's likeliest tokens, then blank."""
    blank = q_slots.shape[-1] - 1
    q, tokens = q_slots[:, :-1].topk(min(symbols, blank))  # (S, k) each
    slots = zip(tokens.tolist(), q.tolist(), q_slots[:, -1].tolist())
    return [[*zip(ids, q_ids), (blank, q_blank)] for ids, q_ids, q_blank in slots]


def alignments(q_slots: Tensor, symbols: int, candidates: int, merge: bool = True) -> dict:
    """The paper's transform: collapse the likeliest combinations (3.3).

    A combination is one symbol per slot. Returns {prefix: probability}, summed
    over `candidates` combinations; the tree is built from these prefixes, as
    from those of `prefix_search`. merge=False leaves a combination unmerged
    and cuts it at its first blank, which no target writes (Medusa verify).
    """
    blank = q_slots.shape[-1] - 1
    # 1. Slots are independent (Eq. 7): pruning after each slot is exact.
    kept = [(1.0, ())]
    for slot in top_symbols(q_slots, symbols):
        longer = []
        for probability, combination in kept:
            for symbol, q in slot:
                longer.append((probability * q, (*combination, symbol)))
        kept = heapq.nlargest(candidates, longer)

    # 2. A combination adds to every prefix of its sequence.
    prefixes = defaultdict(float)
    for probability, combination in kept:
        if merge:
            sequence = collapse(combination, blank)
        else:
            sequence = tuple(itertools.takewhile(lambda symbol: symbol != blank, combination))
        for end in range(1, len(sequence) + 1):
            prefixes[sequence[:end]] += probability
    return prefixes


def prefix_search(q_slots: Tensor, symbols: int, candidates: int) -> dict:
    """CTC prefix beam search: {prefix of indices into draft_ids: probability}.

    A prefix's probability is that of all sequences that begin with it, each by
    Eq. 6. It is summed slot by slot: each slot adds the probability that it
    completes the prefix (`entering`). A repeat lengthens the prefix only after a
    blank, so alignments that end in a blank are kept apart. The newest token is
    not part of the prefix, so the same token in slot 1 is a true repeat. After
    each slot only `candidates` prefixes grow on, those that are the likeliest
    results of the slots so far; the empty prefix competes too. The others stay
    in the dictionary. Both limits, `candidates` and `symbols`, can make a sum
    too small. Slots a 0.6, e 0.4 and a 0.2, b 0.5, e 0.3, where e is the blank:

        prefix   by slot 1           by slot 2            sum
        a        a    0.6            e a   0.4 x 0.2      0.68    a a adds nothing: slot 1 made a
        b                            e b   0.4 x 0.5      0.20
        a b                          a b   0.6 x 0.5      0.30
        a a                                               0       needs three slots: a e a
    """
    prefixes = defaultdict(float)
    kept = [()]  # the prefixes that grow on
    in_blank = defaultdict(float, {(): 1.0})  # {prefix: sum over alignments ending in blank}
    in_token = defaultdict(float)  # and over those ending in its last token
    for slot in top_symbols(q_slots, symbols):
        *tokens, (_, q_blank) = slot
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix in kept:
            either = in_blank[prefix] + in_token[prefix]
            # 1. A blank leaves the prefix as it is.
            new_blank[prefix] += either * q_blank
            for token, q in tokens:
                entering = either * q
                # 2. The last token again: it merges, unless after a blank.
                if prefix and token == prefix[-1]:
                    new_token[prefix] += in_token[prefix] * q
                    entering = in_blank[prefix] * q
                # 3. The token makes the prefix longer.
                if entering > 0:
                    longer = (*prefix, token)
                    new_token[longer] += entering
                    prefixes[longer] += entering
        # 4. Keep the likeliest results of the slots so far.
        total = {prefix: new_blank[prefix] + new_token[prefix] for prefix in new_blank | new_token}
        kept = heapq.nlargest(candidates, total, key=total.get)
        in_blank, in_token = new_blank, new_token
    return prefixes


def token_tree(prefixes: dict, draft_ids: Tensor, nodes: int, depth: int) -> common.Draft:
    """A trie of the `nodes` likeliest prefixes of at most `depth` tokens.

    A node's q is its prefix's probability.
    """
    node_of = {(): -1}  # {prefix: its node}
    parents = []
    for prefix in sorted(prefixes, key=prefixes.get, reverse=True):
        if len(parents) >= nodes:
            break
        # Skip a prefix that is too deep, or that rounding put ahead of its parent.
        if len(prefix) <= depth and prefix[:-1] in node_of:
            node_of[prefix] = len(parents)
            parents.append(node_of[prefix[:-1]])
    drafted = list(node_of)[1:]
    index = draft_ids.new_tensor([prefix[-1] for prefix in drafted])
    q = torch.tensor([prefixes[prefix] for prefix in drafted])
    return common.Draft(draft_ids[index], torch.tensor(parents, dtype=torch.long), q=q)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the drafter keeps from round to round of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(1)  # keys and values of the rows
        self.head = common.draft_head(target, drafter.draft_ids)  # D -> Vd


def fill_slots(drafter: Drafter, decoding, memory: Memory) -> Tensor:
    """Fill the slots after the newest token: q_slots (S, Vd + 1)."""
    # 1. Add a row for each token that the target has just read and kept.
    hidden = decoding.hidden  # (1, n, D)
    count = hidden.shape[1]  # n
    next_ids = decoding.ids[:, -count:]  # (1, n) the newest token last
    newest_row = next_ids.new_full((1, 1), count - 1)
    states = drafter(decoding.target, hidden, next_ids, newest_row, cache=memory.cache)
    # 2. Cut off the slots. Rejected draft tokens never had a row.
    memory.cache.cut(decoding.ids.shape[1] - 1)
    return drafter.logits(states[0, 0], memory.head).softmax(-1)


@torch.no_grad()
def drafts(decoding, drafter: Drafter, config: Config):
    """Yield one draft per round; its nodes are chosen, not sampled."""
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        # Draft nothing after a prompt of one token, or without room.
        if decoding.hidden.shape[1] == 0 or decoding.room == 0:
            yield common.chain([], decoding.ids)
            continue
        q_slots = fill_slots(drafter, decoding, memory)
        if config.transform == "prefixes":
            prefixes = prefix_search(q_slots, config.symbols, config.candidates)
        else:
            merge = config.transform == "alignments"
            prefixes = alignments(q_slots, config.symbols, config.candidates, merge)
        draft = token_tree(prefixes, drafter.draft_ids, config.nodes, decoding.room)
        draft.notes = {"q_slots": q_slots, "draft_ids": drafter.draft_ids}
        yield draft


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """`target.generate(..., custom_generate=ctc_drafter.generate, drafter=...)`.

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
    common.demo(generate, Drafter, "ctc_drafter")
