"""CTC-drafter: all draft tokens in one pass, from slots that may stay blank.

Paper: Wen et al., 2024, arXiv:2412.00061.

One transformer layer runs once, and gives each of the S slots after the newest token a
distribution over the tokens and a blank (-). One of these for each slot make an
alignment. Given the text, the slots are independent (Eq. 7), so the probability of an
alignment is a product over its slots. The CTC transform turns an alignment into a
sequence of tokens: it merges equal neighbours, and then it drops the blanks:

    slots       a a - b c c        a - a b - -
    merged      a   - b c          a - a b -
    sequence    a     b c          a   a b          a blank keeps two equal tokens apart

Many alignments become the same sequence, and CTC adds up their probabilities (Eq. 6).
Training maximises this sum for the tokens that the target would say (Eq. 2 to 5). One
pass trains many positions of a text, its *anchors*; each has S slots of its own. When
decoding, the likeliest sequences are drafted as a tree. The slots are independent, but
the tokens of a sequence are not: the slot that one token takes limits the slots left
for the next. This is how we read the paper's "correlations".

Two choices of ours change the method itself: the loss has a term for the first token,
and a sequence is ranked by the sum over its alignments. `first_token=0` leaves only the
CTC loss, and the variant `paper` comes closest to the paper's decoding. The end of the
file lists the others.

Names that differ from the paper's: F_distill is `hidden`, F^ is `states`, P^ is
`q_slots` (its logarithm `log_q`), beta^-1 is `collapse`, the top k of 3.3 are
`symbols`, T of Eq. 7 is S (here T is the length of a text). The base token is the
newest token, positions of a pass are slots, and raw sequences, A, are alignments (here
A counts anchors). In Tables 1 and 2, beta is the number of tokens per forward of the
target (tau), and gamma the speedup.

Deviations from the paper and what the authors' code does: at the end.
Licence: Apache-2.0.
"""

import dataclasses
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

BLANK = -1  # in an alignment, where tokens are ids; in tensors it is the last column


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    slots: int = option(6, "slots per pass, S")
    labels: int = option(3, "tokens that are learned after each anchor, U")
    anchors: int = option(64, "at most this many per text, chosen at random")
    first_token: float = option(
        1.0, "weight of the first token's own loss (the paper: 0)"
    )
    intermediate_size: int = option(1536, "width of the feed-forward layer")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    transform: str = option(
        "prefixes",
        "how sequences are ranked: prefixes (a sum), alignments (nearest to the paper) "
        "or none",
        decode=True,
    )
    symbols: int = option(
        6, "likeliest tokens tried per slot, k (the authors' code: 10)", decode=True
    )
    candidates: int = option(
        8, "beam width: prefixes that survive each slot (`prefixes`)", decode=True
    )
    nodes: int = option(
        5, "at most this many nodes (the authors' code: 63)", decode=True
    )

    def __post_init__(self):
        common.at_least(self, labels=1, anchors=1, first_token=0, draft_vocab=0)
        common.at_least(self, slots=self.labels, symbols=1, candidates=1, nodes=0)
        common.at_least(self, intermediate_size=1)
        common.one_of(self, transform=("prefixes", "alignments", "none"))


VARIANTS = {  # named settings for bench.py, as in --method ctc_drafter:paper
    "alignments": {"transform": "alignments"},  # "CTC verify" of Table 2, with our k
    "none": {"transform": "none"},  # as Table 2's "Medusa verify", but without blanks
    # The paper's transform, with the k and the tree size of the authors' code.
    "paper": {"transform": "alignments", "symbols": 10, "nodes": 63},
}


# ---------------------------------------------------------------------- architecture

# The inputs of the layer are called rows here, one for each token of the text but the
# newest. Row i combines h_i, the target's hidden state after x_i, with the embedding of
# x_(i+1). The slots after it predict what follows:
#
#     row i    h_i, x_(i+1)     its S slots    x_(i+2), x_(i+3), ..., and blanks
#
# Rows supply keys and values only: no second layer would read their outputs.
#
# An anchor is a row that slots follow. When drafting, it is the newest row. In training
# a text has up to A anchors, whose slots learn U labels each. A batch has W anchors in
# all: B A, or fewer where a text has too few.


class SlotAttention(LlamaAttention):
    """Slots attend to rows and slots."""

    def forward(self, rows, slots, tables, mask, cache) -> Tensor:
        """Output (B, m, D) of m slots, after n rows.

        rows: (B, n, D). slots: (B, m, D), m = A S, grouped by anchor.
        tables: rotary cos and sin (B, n + m, R).
        mask: (B, 1, m, n + m) bool, True where a slot reads; None: everywhere.
        cache: holds P_own earlier rows, and gets rows and slots; None in training.
        """
        x = torch.cat([rows, slots], dim=1)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        split = [each(x).unflatten(-1, (-1, self.head_dim)) for each in projections]
        q, k, v = (each.transpose(1, 2) for each in split)  # (B, H or Hkv, n + m, Dh)
        # Only the slots' queries are used. One product for all is simpler.
        q = common.rotate(q, tables)[:, :, rows.shape[1] :]  # (B, H, m, Dh)
        k = common.rotate(k, tables)  # (B, Hkv, n + m, Dh)
        if cache is not None:
            k, v = cache.update(k, v, 0)  # (B, Hkv, P_own + n + m, Dh)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        heads = out.transpose(1, 2).flatten(2)
        return self.o_proj(heads)


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2412.00061",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "ctc-drafter"],
):
    """The Attention Draft Module (3.1). Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # it reads no keys and values of the target
        shape = config.target
        width = shape["hidden_size"]
        llama = common.llama_config(shape, config.intermediate_size)
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.02 * torch.randn(config.slots, width))
        # The names are the target's, so that `build` can copy weights by name.
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = SlotAttention(llama, 0)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)
        self.blank = nn.Linear(width, 1)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    def forward(self, target, hidden, next_ids, anchors, mask=None, cache=None):
        """States (B, A, S, D) of the slots after A anchors (Eq. 9).

        hidden: (B, n, D) of the target. next_ids: (B, n), the tokens after them.
        anchors: (B, A), which of these n rows they are.
        mask: from `slot_mask`; None: slots read everything.
        cache: see SlotAttention.
        """
        dtype = self.norm.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        rows = self.fusion(torch.cat(both, dim=-1))  # (B, n, D)

        # A slot starts as its anchor, plus a vector that is learned for each slot.
        chosen = rows.take_along_dim(anchors[..., None], dim=1)  # (B, A, D)
        x = (chosen[:, :, None] + self.slots).flatten(1, 2)  # (B, A S, D)

        # Row i has the rotary position i, and the slots after it i + 1, i + 2, ...
        start = 0 if cache is None else cache.get_seq_length()  # P_own
        B, n = next_ids.shape
        positions = torch.arange(n, device=x.device).expand(B, n)
        steps = 1 + torch.arange(len(self.slots), device=x.device)
        slot_positions = anchors[..., None] + steps  # (B, A, S)
        positions = torch.cat([positions, slot_positions.flatten(1)], dim=1)
        tables = common.rotary(target, start + positions, -1)

        rows = self.input_layernorm(rows)
        normed = self.input_layernorm(x)
        x = x + self.self_attn(rows, normed, tables, mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, slot_positions.shape[1:])

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits (..., Vd + 1) of states (..., D), the blank's last; for Eq. 10."""
        return torch.cat([head(states), self.blank(states)], dim=-1).float()


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with the target's top layer where sizes agree.

    token_counts: (V,) how often each token occurs in the training data.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    identity = torch.eye(config.target["hidden_size"])
    drafter.fusion.weight.data.copy_(identity.repeat(1, 2))  # it adds its two inputs
    # The target's top layer; some targets have no `layers`.
    pairs = [(drafter, layer) for layer in common.target_layers(target)[-1:]]
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# ---------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What the slots after anchors (B, A) read, (B, 1, A S, n + A S) bool.

    A slot reads the rows up to its anchor, and all slots of this anchor. Anchors 0 and
    2, n = `length` = 4, S = `slots` = 2:

                       rows  0 1 2 3   slots s1 s2 t1 t2
        after row 0, s1      x . . .         x  x  .  .
                     s2      x . . .         x  x  .  .
        after row 2, t1      x x x .         .  .  x  x
                     t2      x x x .         .  .  x  x
    """
    B, A = anchors.shape
    rows = torch.arange(length, device=anchors.device)
    up_to = rows <= anchors[..., None]  # (B, A, n)
    own = torch.eye(A, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(slots, dim=1)  # (A, A S)
    mask = torch.cat([up_to, own.expand(B, -1, -1)], dim=-1)
    return mask.repeat_interleave(slots, dim=1)[:, None]


def anchors_and_labels(drafter, target, batch) -> tuple[Tensor, Tensor, Tensor]:
    """Choose anchors and their labels.

    Returns anchors (B, A), filled up with -1 where a text has fewer; of the W anchors
    that are not -1, labels (W, U) as indices into vocab_ids, and the target's hidden
    states (W, D) that predict the first token after them.
    """
    # Labels are what the target would say (Eq. 3 to 5): y_t is the likeliest token of
    # the draft vocabulary after x_0 ... x_(t-1). After each anchor its slots learn the
    # next U of them:
    #
    #     anchor 0    h_0  x_1 [y_2  y_3  y_4]
    #     anchor 1         h_1  x_2 [y_3  y_4  y_5]
    #
    # The labels of an anchor need not form a coherent text: y_4 is predicted after x_3,
    # which may differ from y_3 unless the text is the target's own greedy answer.
    U = drafter.config.labels
    hidden = batch.hidden[batch.predicts]
    logits = common.target_logits(target, hidden, drafter.vocab_ids)
    y = torch.full_like(batch.input_ids, -1)  # (B, T); column i holds y_(i+1)
    y[batch.predicts] = logits.argmax(-1)  # -1 outside the answer
    # The labels of row i begin with y_(i+2), in the next column. Those of the last rows
    # run into -1.
    labels = F.pad(y[:, 1:], (0, U - 1), value=-1).unfold(1, U, 1)  # (B, T - 1, U)

    # Anchors are drawn from the rows whose U labels all lie in the answer. Each adds S
    # slots to the pass, so their number is limited: 64 anchors add 384 slots, about as
    # many as a long text has rows.
    whole = (labels >= 0).all(-1)  # (B, T - 1)
    order = torch.rand_like(whole, dtype=torch.float32).masked_fill(~whole, -1)
    most = min(drafter.config.anchors, int(whole.sum(1).max()))  # A
    best = order.topk(most)
    anchors = best.indices.masked_fill(best.values < 0, -1)  # (B, A)
    next_hidden = batch.hidden[:, 1:]  # row i: h_(i+1), for x_(i+2)
    return anchors, at_anchors(labels, anchors), at_anchors(next_hidden, anchors)


def at_anchors(x: Tensor, anchors: Tensor) -> Tensor:
    """The entries (W, ...) of x (B, n, ...) at anchors (B, A) that are not -1."""
    b, a = (anchors >= 0).nonzero(as_tuple=True)
    return x[b, anchors[b, a]]


def training_log_q(drafter: Drafter, target, batch, anchors: Tensor) -> Tensor:
    """Log-probabilities (W, S, Vd + 1) of the slots after W anchors."""
    hidden = batch.hidden[:, :-1]  # (B, n, D)
    next_ids = batch.input_ids[:, 1:]  # (B, n)
    at = anchors.clamp(min=0)  # -1 becomes 0, and its slots are dropped below
    mask = slot_mask(at, next_ids.shape[1], drafter.config.slots)
    states = drafter(target, hidden, next_ids, at, mask)  # (B, A, S, D)
    states = states[anchors >= 0]  # (W, S, D)
    head = common.draft_head(target, drafter.vocab_ids).to(states.dtype)
    # `softmax` and then `log` would turn a probability that is too small for a float
    # into -inf. F.ctc_loss then returns a finite loss, but gradients that are NaN.
    return drafter.logits(states, head).log_softmax(-1)


def ctc_loss(log_q: Tensor, labels: Tensor) -> Tensor:
    """Minus log P of Eq. 6, summed over W anchors.

    log_q: (W, S, Vd + 1). labels: (W, U).
    """
    # F.ctc_loss is the dynamic programme of Figure 1.
    W, S, size = log_q.shape
    return F.ctc_loss(
        log_q.transpose(0, 1),  # (S, W, Vd + 1)
        labels,
        [S] * W,
        [labels.shape[1]] * W,
        blank=size - 1,
        reduction="sum",
        # A blank must come between a label and an equal one after it, so labels with r
        # such repeats need U + r slots. With fewer the loss would be infinite, so it is
        # set to 0. That cannot happen with the default S and U.
        zero_infinity=True,
    )


def first_token_log_q(log_q: Tensor) -> Tensor:
    """Log-probability (W, Vd) that each token comes first; log_q: (W, S, Vd + 1).

    It is the sum over all alignments whose sequence begins with the token. The
    probabilities add up to 1 minus the probability that all slots are blank.
    """
    # The token in slot j comes first if slots 1 to j - 1 are blank, whatever the later
    # slots hold.
    blanks = log_q[:, :-1, -1].cumsum(-1)
    before = F.pad(blanks, (1, 0))[..., None]  # (W, S, 1)
    return (before + log_q[..., :-1]).logsumexp(1)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """The loss, summed over W anchors; and W, by which train.py divides.

    It is minus log P of Eq. 6 and, by default, the first token's cross-entropy.
    """
    anchors, labels, hidden = anchors_and_labels(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    if len(labels) == 0:  # F.ctc_loss refuses an empty batch
        return log_q.sum(), 0  # zero, and a zero gradient for every weight
    total = ctc_loss(log_q, labels)
    # CTC weighs all labels of an anchor equally, but where the first is wrong, those
    # after it are lost as well. By default the first token therefore gets a
    # cross-entropy of its own, with the target's distribution as its label.
    if drafter.config.first_token:
        p_target = common.target_logits(target, hidden, drafter.vocab_ids).softmax(-1)
        cross_entropy = -(p_target * first_token_log_q(log_q)).sum()
        total = total + drafter.config.first_token * cross_entropy
    return total, len(labels)


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of the first token, summed over W anchors; and W."""
    anchors, _, hidden = anchors_and_labels(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    # Given that not all slots are blank, as in `make_tree` (`none` takes only slot 1).
    q_draft = first_token_log_q(log_q).softmax(-1)  # (W, Vd)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(hidden)


# --------------------------------------------------------------------- CTC transform


def collapse(alignment, blank=BLANK) -> tuple:
    """beta^-1 (2.3): merge equal neighbours, then drop the blanks."""
    merged = [symbol for symbol, _ in itertools.groupby(alignment)]
    return tuple(symbol for symbol in merged if symbol != blank)


def top_symbols(q_slots: Tensor, vocab_ids: Tensor, symbols: int) -> list[list[tuple]]:
    """Pairs (token, probability) of each slot: its likeliest tokens, then its blank.

    q_slots: (S, Vd + 1). symbols: how many tokens (the "top k" of 3.3), besides the
        blank.
    """
    best = q_slots[:, :-1].topk(min(symbols, len(vocab_ids)))  # (S, k)
    ids = F.pad(vocab_ids[best.indices], (0, 1), value=BLANK)  # (S, k + 1)
    q = torch.cat([best.values, q_slots[:, -1:]], dim=1)
    slots = zip(ids.tolist(), q.tolist())
    return [list(zip(slot_ids, slot_q)) for slot_ids, slot_q in slots]


def complete(sequence: tuple, eos_ids, max_depth: int) -> bool:
    """Whether nothing is drafted after a sequence.

    eos_ids: the end-of-sequence ids. max_depth: how long a sequence may be.
    """
    return len(sequence) > 0 and (sequence[-1] in eos_ids or len(sequence) >= max_depth)


# Which sequences are drafted? Take two slots. Slot 1 holds a (.6) or - (.4), slot 2
# holds a (.2), b (.5) or - (.3). They have six alignments:
#
#     alignment    a b    a -    a a    - b    - a    - -
#     q            .30    .18    .12    .20    .08    .12
#     sequence     a b    a      a      b      a      (empty)
#
# Each `transform` ranks the sequences in its own way:
#
#     prefixes     a .68   a b .30   b .20    the sum over all alignments whose sequence
#                  begins with it; for a: .30 + .18 + .12 + .08 (`prefix_search`)
#     alignments   a .60   a b .30   b .20    its likeliest alignment; it may fill only
#                  the first slots; for a: slot 1 by itself (`likeliest_alignments`)
#     none         a .60   a b .30   a a .12  the tokens of the first slots, neither
#                  merged nor blank (`likeliest_alignments`)
#
# The likeliest sequences become the nodes of a trie. That of `prefixes`:
#
#     root -+- a .68 --- b .30      the path a, b is the sequence a b
#           +- b .20
#
# With a transform, a a would need three slots: a - a. The transforms gain little over
# `none` here, even where training makes use of blanks (results/claims.md).


def prefix_search(
    choices: list[list[tuple]], candidates: int, eos_ids, max_depth: int
) -> dict:
    """{prefix: probability}, by a beam; prefix search is Graves et al.'s (2006).

    A prefix is a tuple of tokens. Its probability is the total of all sequences that
    begin with it; each of these sums over its own alignments (Eq. 6).

    choices: from `top_symbols`. Tokens that are not in it count as impossible.
    candidates: how many prefixes are kept after a slot; the empty one counts.
    eos_ids, max_depth: see `complete`.
    """
    # The slots are read one after another. For each prefix, `kept` holds the
    # probability that the slots read so far collapse to exactly this prefix. It is in
    # two parts, because a token that repeats the prefix's last one merges unless a
    # blank comes between them: in one part the last slot is blank, in the other it
    # holds a token. For the prefix a:
    #
    #     next slot    if the last one is blank    if the last one holds a token, a
    #     -            a                           a
    #     a            a a                         a    it merges
    #     b            a b                         a b
    #
    # In an alignment whose sequence begins with the prefix, exactly one slot adds the
    # prefix's last token, and later slots cannot undo it. The probability of a prefix
    # is therefore the sum, over the slots, of the probability that the slot adds it.
    prefixes = defaultdict(float)
    kept = {(): (1.0, 0.0)}  # {prefix: (in_blank, in_token)}; nothing can merge yet
    for *pairs, (_, q_blank) in choices:  # a slot's tokens, and then its blank
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix, (in_blank, in_token) in kept.items():
            either = in_blank + in_token
            new_blank[prefix] = either * q_blank
            for token, q in pairs:
                entering = either * q
                if prefix[-1:] == (token,):
                    new_token[prefix] += in_token * q  # it merges
                    entering = in_blank * q
                if entering > 0:  # this slot adds the last token of a longer prefix
                    longer = (*prefix, token)
                    new_token[longer] += entering
                    prefixes[longer] += entering
        # The next slot continues only the likeliest, and no complete ones. Dropping a
        # prefix loses its share of all longer ones, so their sums may be too small.
        total = {
            p: new_blank[p] + new_token[p]
            for p in new_blank | new_token
            if not complete(p, eos_ids, max_depth)
        }
        likeliest = heapq.nlargest(candidates, total, key=total.get)
        kept = {p: (new_blank[p], new_token[p]) for p in likeliest}
    return prefixes


def likeliest_alignments(
    choices: list[list[tuple]], nodes: int, eos_ids, max_depth: int, merge: bool
) -> dict:
    """The sequences of the likeliest alignments (3.1, 3.3), at most `nodes`.

    Returns {sequence: probability of its likeliest alignment}, likeliest first.

    choices: from `top_symbols`. eos_ids, max_depth: see `complete`.
    merge: False leaves out the CTC transform, and with it the blanks.
    """
    # The paper's alignments fill all slots. Here one may fill only the first slots, so
    # that the beginnings of a sequence are ranked as well.
    #
    # The heap holds alignments that have not been collapsed yet, the likeliest on top.
    # Another slot can only make an alignment less likely. Alignments therefore leave
    # the heap in decreasing probability, and the first that becomes a sequence is its
    # likeliest.
    if not merge:
        choices = [slot[:-1] for slot in choices]  # without the blank
    heap = [(-1.0, ())]  # of (minus the probability, alignment)
    ranked = {}
    seen = set()
    while heap and len(ranked) < nodes:
        minus_q, alignment = heapq.heappop(heap)
        if minus_q == 0:  # and so are all that are left
            break
        sequence = collapse(alignment) if merge else alignment
        # What an alignment can still become depends only on its length, its sequence
        # and its last symbol. Among those that agree in all three, the likeliest is
        # enough.
        remaining = (len(alignment), sequence, alignment[-1:])
        if remaining in seen:
            continue
        seen.add(remaining)
        if sequence:
            ranked.setdefault(sequence, -minus_q)
        if len(alignment) < len(choices) and not complete(sequence, eos_ids, max_depth):
            for symbol, q in choices[len(alignment)]:
                heapq.heappush(heap, (minus_q * q, (*alignment, symbol)))
    return ranked


def token_tree(ids: Tensor, ranked: dict, nodes: int, first: list) -> common.Draft:
    """A Draft of the `nodes` likeliest sequences: a trie with a node for each.

    ids: any ids on the device of the target. ranked: {sequence: probability}.
    first: the sequences of the first nodes, whatever their rank.
    """
    node_of = {(): -1}  # {sequence: its node}
    for sequence in [*first, *sorted(ranked, key=ranked.get, reverse=True)]:
        if len(node_of) > nodes:  # the root counts as well
            break
        # A sequence is at least as likely as those that continue it, so its node is
        # there before theirs. Rounding may reverse two equal ones; then the longer one
        # is left out.
        if sequence[:-1] in node_of and sequence not in node_of:
            node_of[sequence] = len(node_of) - 1
    drafted = list(node_of)[1:]
    tokens = ids.new_tensor([sequence[-1] for sequence in drafted], dtype=torch.long)
    parents = [node_of[sequence[:-1]] for sequence in drafted]
    return common.Draft(tokens, parents, notes={"q": [ranked[s] for s in drafted]})


# -------------------------------------------------------------------------- decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(1)  # keys and values of the rows
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd


def fill_slots(drafter: Drafter, decoding, memory: Memory) -> Tensor:
    """One pass: log-probabilities (S, Vd + 1) of the slots after the newest token."""
    # Each token that the last round committed makes a row, with the hidden state before
    # it. In the first round, and in a new window, each token but the first does.
    read = memory.cache.get_seq_length()  # rows in the cache
    hidden = decoding.hidden[:, read:]  # (1, n, D)
    next_ids = decoding.ids[:, 1 + read :]  # (1, n)
    n = next_ids.shape[1]
    anchor = next_ids.new_full((1, 1), n - 1)  # the newest row: its slots read all
    states = drafter(decoding.target, hidden, next_ids, anchor, cache=memory.cache)
    memory.cache.cut(read + n)  # the rows stay, the slots do not
    return drafter.logits(states[0, 0], memory.head).log_softmax(-1)


def make_tree(decoding, log_q, vocab_ids, config) -> common.Draft:
    """The likeliest sequences as a tree; when sampling, its first node is sampled.

    log_q: (S, Vd + 1), the blank last. vocab_ids: (Vd,).
    """
    choices = top_symbols(log_q.exp(), vocab_ids, config.symbols)
    limits = decoding.eos_ids, decoding.max_depth
    if config.transform == "prefixes":
        ranked = prefix_search(choices, config.candidates, *limits)
    else:
        merge = config.transform == "alignments"
        ranked = likeliest_alignments(choices, config.nodes, *limits, merge)
        if not merge:
            log_q = log_q[:1]  # only slot 1 may hold the first token

    # When sampling, a token that was not sampled is accepted with probability p(x). One
    # sampled from q is accepted with probability sum_x min(p(x), q(x)), usually more.
    # Node 0 is therefore sampled. The others are the likeliest sequences, as in greedy
    # decoding, which `common.rejection_sample` allows.
    first = []
    probs = None
    if decoding.do_sample and config.nodes > 0:
        # All slots may be blank, so the probabilities of the first token add up to less
        # than 1. `pick` divides by their sum.
        picked = common.pick(decoding, first_token_log_q(log_q[None])[0], vocab_ids, [])
        if picked is not None:
            token, q_draft = picked
            # It must be submitted whatever it is (see common.Draft), so it is node 0.
            # Below it is what the search found to continue it, which is nothing if the
            # search did not keep the token.
            first = [(int(token),)]
            ranked[first[0]] = float(q_draft[token])  # only for its note
            probs = q_draft[None]
    draft = token_tree(decoding.ids, ranked, config.nodes, first)
    draft.probs = probs
    return draft


def propose(drafter: Drafter, decoding, memory: Memory, config: Config) -> common.Draft:
    """Draft a tree after `decoding.ids`."""
    # A prompt of one token has no row, and at max_depth 0 no token may be drafted.
    if decoding.hidden.shape[1] == 0 or decoding.max_depth == 0:
        return common.chain([], decoding.ids)
    log_q = fill_slots(drafter, decoding, memory)
    draft = make_tree(decoding, log_q, drafter.vocab_ids, config)
    draft.notes |= {"q_slots": log_q.exp(), "vocab_ids": drafter.vocab_ids}
    return draft


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    changes: other values for fields of the Config with decode=True, such as nodes.
    Raises UserError, at the first draft, for a change of any other field, and for a
    drafter that is not of this method or not for this target.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, config)


if __name__ == "__main__":
    common.demo(Drafter, "ctc_drafter", drafts)


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper, and choices where it says nothing:
#  1. The layer also reads the embedding of the next token, as the authors' code does
#     (Eq. 9: hidden states only). Both are normalised and combined by a linear layer
#     that at first adds them. The layer starts as the target's top one where sizes
#     agree, and a final norm is added.
#  2. A slot starts as its anchor's row plus a learned vector, at the anchor's rotary
#     position plus its number. It attends to the text and to all slots of its anchor; a
#     linear layer gives the blank's logit. The paper does not say how slots are made.
#  3. The loss sums -log P (Eq. 1; Eq. 2 maximises the sum of P). `first_token` is ours.
#  4. Sequences of all lengths make a trie, ranked by sums (`prefixes`). The paper takes
#     the "most valuable" combinations of all slots (3.3), and masks what is removed
#     (3.1). With `alignments` one may end before the last slot. Nothing is drafted
#     after an end-of-sequence token.
#  5. The blank comes on top of the k tokens. In 3.3, as we read it, it must be among
#     the k likeliest.
#  6. `none` drafts no blanks. In Table 2 they stay in the drafts, and spoil them (4.3).
#  7. Only frequent tokens are drafted and learned (`draft_vocab`). Draft logits leave
#     out the LM head's bias and soft cap. Labels are the argmax after the text's own
#     tokens, as in the authors' code. At most 64 anchors in an answer have U labels
#     each; the paper has one Y for each X.
#  8. When sampling, the first token is sampled. The paper's example is greedy (3.3).
#     Only this token passes through logits processors.
#  9. S = 6 and U = 3 are those of the authors' code; k = 6 and five nodes are ours.
# 10. The drafter sees a window of a long text (common.windowed).
#
# Where the authors' code differs (run with the same random weights, see PAPERS.md):
#  - There are no slot inputs: slot j after position i is the output of a causal layer
#    at i + j, which in training has read the text's own tokens up to there. Four tokens
#    therefore take four passes (3.1: "in parallel"). The blank is <unk>.
#  - The loss is 1.0 SmoothL1 + 0.1 cross-entropy + 0.01 CTC (a mean over labels, S = 6
#    and U = 3). An anchor learns if the token of its feature is in the answer.
#  - k is 10, and the tree is Medusa's, of 63 nodes. Blanks are removed only if some
#    candidate of the tree has a repeat. Tokens after a removed repeat keep their
#    positions, and their logits are read at the indices from before the removal. We saw
#    answers that differ from greedy decoding although the drafts held its tokens.
