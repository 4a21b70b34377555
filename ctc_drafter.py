"""CTC-drafter: all draft tokens in one pass (Wen et al., 2024).

Paper: arXiv:2412.00061. A transformer layer fills the S slots after
the newest token, each with a token or a blank (e). The transform
merges equal neighbours, then drops blanks. The likeliest results
form the draft, a tree. The CTC loss of a sequence sums over its
alignments, the fillings that become it:

    a a e b c c  ->  a b c
    a e a b e e  ->  a a b   a blank splits a repeat

The target has not read the newest token x_(i+1), so its newest
hidden state is h_i. Row i combines both. In training, many rows are
anchors. S slots follow each and learn the next U labels, in order;
S > U leaves room for blanks. Label y_t is the target's argmax over
the draft vocabulary, given x_0 to x_(t-1). U = 3:

    anchor 0    h_0  x_1 [y_2  y_3  y_4]
    anchor 1         h_1  x_2 [y_3  y_4  y_5]

Names that differ from the paper's: F_distill is `hidden`, F^ is
`states`, P^ is `q_slots` (in training its logarithm, `log_q`),
beta^-1 is `collapse`, the T of Eq. 7 is S. The blank has index Vd.
A counts the anchors of a sequence (not alignments), W those of a
batch.

Deviations from the paper:
    1. The next token in a row and the windows (S slots for U
       labels) are from the authors' code.
    2. Anchors are random; log P is summed (Eq. 1), not P (Eq. 2).
    3. How slots start and what they see, the norms, the initial
       weights and the blank's own logit are not in the paper.
    4. The default transform, `prefix_search`, ranks prefixes by all
       their alignments; the paper's is `alignments`. Both give a
       trie here; the paper masks what it removes.
    5. `first_token` adds a loss on the first token.
    6. Only frequent tokens are drafted (`draft_vocab`).

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
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    slots: int = option(6, "slots per pass, S")
    window: int = option(3, "labels per anchor, U")
    anchors: int = option(64, "places to train at, per sequence")
    first_token: float = option(0.0, "weight of the first token's own loss")
    intermediate_size: int = option(1536, "width of the feed-forward")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    transform: str = option("prefixes", "prefixes, alignments (the paper's) or none", decode=True)
    symbols: int = option(10, "likeliest tokens per slot, k", decode=True)
    candidates: int = option(16, "prefixes or combinations kept per slot", decode=True)
    nodes: int = option(10, "most nodes in the tree", decode=True)

    def __post_init__(self):
        common.at_least(self, window=1, anchors=1, first_token=0, draft_vocab=0)
        common.at_least(self, slots=self.window, symbols=1, candidates=1, nodes=0)
        common.one_of(self, transform=("prefixes", "alignments", "none"))


# Nearest to "CTC verify" and "Medusa verify" of Table 2.
VARIANTS = {
    "alignments": {"transform": "alignments"},
    "none": {"transform": "none"},
}


# -------------------------------------------------------------------------------- architecture


class SlotAttention(LlamaAttention):
    """Slots see rows and slots; rows see nothing."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, rows, slots, tables, mask, cache) -> Tensor:
        """Output (B, m, D) of m slots after n rows.

        tables: cos, sin (B, n + m, R).
        mask: (B, 1, m, n + m) bool, or None: see everything.
        """
        x = torch.cat([rows, slots], dim=1)
        k = self.split(self.k_proj(x))
        v = self.split(self.v_proj(x))
        k = common.rotate(k, tables)  # (B, Hkv, n + m, Dh)
        if cache is not None:
            k, v = cache.update(k, v, 0)  # + P rows
        q = self.split(self.q_proj(slots))  # (B, H, m, Dh)
        tables = [table[:, rows.shape[1] :] for table in tables]
        q = common.rotate(q, tables)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        heads = out.transpose(1, 2).flatten(2)
        return self.o_proj(heads)


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The Attention Draft Module (3.1)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # it reads no K and V of the target
        shape = config.target
        width = shape["hidden_size"]
        llama = common.llama_config(shape, config.intermediate_size)
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.02 * torch.randn(config.slots, width))
        # Named as in the target, to be copied.
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = SlotAttention(llama, 0)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)
        self.blank = nn.Linear(width, 1)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("vocab_ids", common.placeholder_ids(shape, config.draft_vocab))

    def forward(self, target, hidden, next_ids, anchors, mask=None, cache=None) -> Tensor:
        """States (B, A, S, D) of the slots after A of n rows (Eq. 9).

        hidden: (B, n, D); next_ids: (B, n); anchors: (B, A), rows.
        mask: of `slot_mask`. None while decoding: the only anchor
            is the newest row, so its slots see everything.
        """
        # 1. Rows: a hidden state and the next token.
        dtype = self.norm.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        rows = self.fusion(torch.cat(both, dim=-1))  # (B, n, D)

        # 2. Slots: the anchor's row, plus a vector each.
        chosen = rows.take_along_dim(anchors[..., None], dim=1)
        x = chosen[:, :, None] + self.slots  # (B, A, S, D)
        x = x.flatten(1, 2)

        # 3. Slot j = 1, 2, ... after row i has rotary position i + j.
        start = 0 if cache is None else cache.get_seq_length()  # P
        B, n = next_ids.shape
        places = torch.arange(n, device=x.device).expand(B, n)
        steps = 1 + torch.arange(len(self.slots), device=x.device)
        ahead = anchors[..., None] + steps  # (B, A, S)
        places = torch.cat([places, ahead.flatten(1)], dim=1)
        tables = common.rotary(target, start + places, -1)

        # 4. The transformer layer.
        rows = self.input_layernorm(rows)
        normed = self.input_layernorm(x)
        x = x + self.self_attn(rows, normed, tables, mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, ahead.shape[1:])

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits (..., Vd + 1), the blank's last (Eq. 10)."""
        return torch.cat([head(states), self.blank(states)], dim=-1).float()


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter; the target's top layer where it fits."""
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2D)
    drafter.fusion.weight.data.copy_(both)  # a sum
    pairs = [(drafter, layer) for layer in common.target_layers(target)[-1:]]
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# -------------------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What slots after anchors (B, A) see, (B, 1, A S, n + A S) bool.

    Rows up to their anchor, and all slots of it. Anchors 0 and 2,
    n = `length` = 4, S = `slots` = 2:

                    rows  0 1 2 3   slots s1 s2 t1 t2
        after 0, s1       x . . .         x  x  .  .
                 s2       x . . .         x  x  .  .
        after 2, t1       x x x .         .  .  x  x
                 t2       x x x .         .  .  x  x
    """
    B, A = anchors.shape
    rows = torch.arange(length, device=anchors.device)
    up_to = rows <= anchors[..., None]  # (B, A, n)
    own = torch.eye(A, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(slots, dim=1)  # (A, A S)
    # The slots of an anchor all see the same.
    mask = torch.cat([up_to, own.expand(B, -1, -1)], dim=-1)
    return mask.repeat_interleave(slots, dim=1)[:, None]


def windows(drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Anchors (B, A) and labels (W, U) of W anchors (Eq. 3 to 5).

    Anchors are random rows whose U labels all lie in the answer;
    -1 fills up where there are fewer. Labels index vocab_ids.
    """
    U = drafter.config.window
    # 1. y_t is the target's choice of x_t; -1 outside the answer.
    logits = common.target_logits(target, batch.hidden, drafter.vocab_ids)
    y = F.pad(logits.argmax(-1)[:, :-1], (1, 0))
    y = y.where(batch.loss_mask, -1)  # (B, T)

    # 2. Row i learns y_(i+2), ..., y_(i+1+U).
    y = F.pad(y[:, 2:], (0, U), value=-1)
    labels = y.unfold(1, U, 1)  # (B, T - 1, U)
    whole = (labels >= 0).all(-1).cpu()

    # 3. Draw anchors by each sequence's own seed.
    anchors = torch.full((len(y), drafter.config.anchors), -1)
    for b, seed in enumerate(batch.seed.tolist()):
        rows = whole[b].nonzero()[:, 0]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator)
        drawn = rows[order][: anchors.shape[1]]
        anchors[b, : len(drawn)] = drawn
    anchors = anchors.to(y.device)
    return anchors, rows_at(labels, anchors)


def rows_at(x: Tensor, anchors: Tensor) -> Tensor:
    """Rows (W, ...) of x (B, n, ...) at anchors that are not -1."""
    b, a = (anchors >= 0).nonzero(as_tuple=True)
    return x[b, anchors[b, a]]


def training_log_q(drafter: Drafter, target, batch, anchors: Tensor) -> Tensor:
    """Log-probabilities (W, S, Vd + 1) of the slots after W anchors."""
    hidden = batch.hidden[:, :-1]  # (B, n, D)
    next_ids = batch.input_ids[:, 1:]  # (B, n)
    rows = anchors.clamp(min=0)
    mask = slot_mask(rows, next_ids.shape[1], drafter.config.slots)
    states = drafter(target, hidden, next_ids, rows, mask)  # (B, A, S, D)
    states = states[anchors >= 0]  # (W, S, D)
    head = common.draft_head(target, drafter.vocab_ids).to(states.dtype)
    return drafter.logits(states, head).log_softmax(-1)


def ctc_loss(log_q: Tensor, labels: Tensor) -> Tensor:
    """Minus log P of Eq. 6, summed over W windows.

    log_q: (W, S, Vd + 1). labels: (W, U). A window with r pairs of
    equal neighbours needs U + r slots, and adds zero with fewer.
    """
    W, S, symbols = log_q.shape
    return F.ctc_loss(
        log_q.transpose(0, 1),  # (S, W, Vd + 1)
        labels,
        [S] * W,  # slots of each window
        [labels.shape[1]] * W,
        blank=symbols - 1,
        reduction="sum",
        zero_infinity=True,
    )


def first_token_log_q(log_q: Tensor) -> Tensor:
    """Log-probability (W, Vd) of the first token, in whichever slot."""
    blanks = log_q[:, :-1, -1].cumsum(-1)
    before = F.pad(blanks, (1, 0))[..., None]  # (W, S, 1)
    return (before + log_q[..., :-1]).logsumexp(1)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """CTC and first-token loss, summed over W anchors, and W."""
    anchors, labels = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    if len(labels) == 0:  # too few for F.ctc_loss
        return log_q.sum(), 0  # zero, with a gradient for all weights
    total = ctc_loss(log_q, labels)
    if drafter.config.first_token:
        # h_(i+1) predicts the first label.
        hidden = rows_at(batch.hidden[:, 1:], anchors)
        logits = common.target_logits(target, hidden, drafter.vocab_ids)
        teacher = logits.softmax(-1)  # (W, Vd)
        cross_entropy = -(teacher * first_token_log_q(log_q)).sum()
        total = total + drafter.config.first_token * cross_entropy
    return total, len(labels)


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of W first tokens, and W."""
    anchors, _ = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    q_draft = first_token_log_q(log_q).exp()  # (W, Vd)
    hidden = rows_at(batch.hidden[:, 1:], anchors)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(hidden)


# ------------------------------------------------------------------------------- CTC transform


def collapse(alignment, blank: int) -> tuple:
    """beta^-1 (2.3): merge equal neighbours, then drop blanks."""
    merged = [symbol for symbol, _ in itertools.groupby(alignment)]
    return tuple(symbol for symbol in merged if symbol != blank)


def top_symbols(q_slots: Tensor, symbols: int) -> list[list[tuple]]:
    """(symbol, probability) of each slot's likeliest tokens, then blank."""
    blank = q_slots.shape[-1] - 1
    tokens = q_slots[:, :-1].topk(min(symbols, blank)).indices  # (S, k)
    ids = F.pad(tokens, (0, 1), value=blank)  # (S, k + 1)
    q = q_slots.gather(1, ids)
    return [list(zip(*slot)) for slot in zip(ids.tolist(), q.tolist())]


def alignments(q_slots: Tensor, symbols: int, candidates: int, merge=True) -> dict:
    """The transform of 3.3: {prefix: probability}.

    Collapses the likeliest combinations of a symbol per slot, or cuts
    them at the first blank without `merge` (Medusa verify).
    """
    blank = q_slots.shape[-1] - 1
    # 1. By Eq. 7, pruning after each slot is exact.
    kept = [(1.0, ())]
    for slot in top_symbols(q_slots, symbols):
        longer = []
        for (p, combination), (symbol, q) in itertools.product(kept, slot):
            grown = (*combination, symbol)
            longer.append((p * q, grown))
        kept = heapq.nlargest(candidates, longer)

    # 2. Add its probability to all prefixes of its sequence.
    prefixes = defaultdict(float)
    for probability, combination in kept:
        if merge:
            sequence = collapse(combination, blank)
        else:
            sequence = combination[: (*combination, blank).index(blank)]
        for end in range(1, len(sequence) + 1):
            prefixes[sequence[:end]] += probability
    return prefixes


def prefix_search(q_slots: Tensor, symbols: int, candidates: int) -> dict:
    """CTC prefix search: {prefix: probability}.

    A prefix, a tuple of indices into vocab_ids, has the probability
    of all sequences that begin with it, each by Eq. 6. Each slot adds
    the probability that it completes the prefix. A repeat lengthens
    a prefix only after a blank, so alignments that end in a blank
    are summed apart. The newest token is no part of a prefix; slot 1
    may repeat it.

    In each slot, the `symbols` likeliest tokens and the blank are
    tried. After each slot, only the `candidates` likeliest prefixes
    so far are extended; the empty prefix may be one of them. The
    others stay in the dictionary. Both limits can make a sum too
    small. Slots a .6, e .4 and a .2, b .5, e .3 (e is the blank):

        prefix  slot 1  slot 2        sum
        a       a   .6  e a  .4 x .2  .68  a a merges
        b               e b  .4 x .5  .20
        a b             a b  .6 x .5  .30
        a a                           0    needs a e a
    """
    prefixes = defaultdict(float)
    kept = {(): (1.0, 0.0)}  # {prefix: (in_blank, in_token)}
    for slot in top_symbols(q_slots, symbols):
        *tokens, (_, q_blank) = slot
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix, (in_blank, in_token) in kept.items():
            either = in_blank + in_token
            # 1. A blank leaves the prefix as it is.
            new_blank[prefix] = either * q_blank
            for token, q in tokens:
                entering = either * q
                # 2. A repeat merges, unless after a blank.
                if prefix[-1:] == (token,):
                    new_token[prefix] += in_token * q
                    entering = in_blank * q
                # 3. The prefix grows by the token.
                if entering > 0:
                    longer = (*prefix, token)
                    new_token[longer] += entering
                    prefixes[longer] += entering
        # 4. Keep the likeliest results so far.
        total = {p: new_blank[p] + new_token[p] for p in new_blank | new_token}
        likeliest = heapq.nlargest(candidates, total, key=total.get)
        kept = {p: (new_blank[p], new_token[p]) for p in likeliest}
    return prefixes


def token_tree(prefixes: dict, vocab_ids: Tensor, nodes: int, depth: int) -> common.Draft:
    """A trie of the `nodes` likeliest prefixes of at most `depth` tokens."""
    node_of = {(): -1}  # {prefix: its node}
    for prefix in sorted(prefixes, key=prefixes.get, reverse=True):
        if len(node_of) > nodes:
            break
        # Skip a prefix that rounding ranks above its parent.
        if len(prefix) <= depth and prefix[:-1] in node_of:
            node_of[prefix] = len(node_of) - 1
    drafted = list(node_of)[1:]
    index = vocab_ids.new_tensor([prefix[-1] for prefix in drafted])
    parents = [node_of[prefix[:-1]] for prefix in drafted]
    q = torch.tensor([prefixes[prefix] for prefix in drafted])
    return common.Draft(vocab_ids[index], torch.tensor(parents).long(), q=q)


# ------------------------------------------------------------------------------------ decoding


def fill_slots(drafter: Drafter, decoding, cache, head) -> Tensor:
    """Fill the slots after the newest token: q_slots (S, Vd + 1)."""
    # 1. Add a row for each token that the target has just cached.
    hidden = decoding.hidden  # (1, n, D)
    n = hidden.shape[1]
    next_ids = decoding.ids[:, -n:]  # (1, n)
    anchor = next_ids.new_full((1, 1), n - 1)
    states = drafter(decoding.target, hidden, next_ids, anchor, cache=cache)
    # 2. Cut off the slots. Only rows stay.
    cache.cut(decoding.ids.shape[1] - 1)
    return drafter.logits(states[0, 0], head).softmax(-1)


@torch.no_grad()
def drafts(decoding, drafter: Drafter, config: Config):
    """Yield one draft per round; its nodes are chosen, not sampled."""
    cache = common.GrowingCache(1)  # keys and values of the rows
    head = common.draft_head(decoding.target, drafter.vocab_ids)  # D -> Vd
    while not decoding.done:
        # No row (prompt of one token) or no room.
        if decoding.hidden.shape[1] == 0 or decoding.room == 0:
            yield common.chain([], decoding.ids)
            continue
        q_slots = fill_slots(drafter, decoding, cache, head)
        if config.transform == "prefixes":
            prefixes = prefix_search(q_slots, config.symbols, config.candidates)
        else:
            merge = config.transform == "alignments"
            prefixes = alignments(q_slots, config.symbols, config.candidates, merge)
        draft = token_tree(prefixes, drafter.vocab_ids, config.nodes, decoding.room)
        draft.notes = {"q_slots": q_slots, "vocab_ids": drafter.vocab_ids}
        yield draft


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """Lossless decoding, as a `custom_generate` of transformers.

    target.generate(..., custom_generate=ctc_drafter.generate, drafter=...)

    config: replaces the drafter's in fields with decode=True.
    copies, stats, token_streamer: see `common.Decoding`.
    Returns prompt and new tokens (1, T').
    """
    common.check_drafter(drafter, Drafter, target, config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, drafter, config or drafter.config):
        decoding.verify(draft)
    return decoding.ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "ctc_drafter")
