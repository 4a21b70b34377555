"""CTC-drafter: all draft tokens in one pass, from slots that may stay blank.

Paper: Wen et al., 2024, arXiv:2412.00061.

One transformer layer fills the S slots after the newest token in a single pass. Given
the text the slots are independent (Eq. 7), and each holds a token or a blank (e). The
CTC transform turns such a filling, an alignment, into a sequence of tokens: it merges
equal neighbours, then it drops the blanks:

    a a e b c c  ->  a b c
    a e a b e e  ->  a a b   a blank splits a repeat

The likeliest sequences are drafted, as a tree.

The CTC loss sums over all alignments of the right sequence (Eq. 6), so the layer may
choose which slot holds which token. But here the right sequence has U = 3 tokens (in an
early stage of the shipped drafter also fewer), so the drafter need not choose how many
blanks to leave. Of the 84 alignments of three different tokens in six slots, it learned
one: the tokens in the first three slots and blanks in the others. The transform gains
at most about 1% in tau over `none`, which drafts the likeliest tokens of the first
slots and no blanks. In a trial with 1 to 6 tokens the blank was in use, and the
transform gained no more (checkpoints/README.md).

Names that differ from the paper's: F_distill is `hidden`, F^ is `states`, P^ is
`q_slots` (in training its logarithm, `log_q`), beta^-1 is `collapse`, T of Eq. 7 is S.
In Tables 1 and 2 beta means something else, the tokens per forward of the target (tau).

Deviations, and choices where the paper is silent:
    1. The layer also reads the embedding of the next token, as the authors' code does;
       Eq. 9 has hidden states alone. The slots' inputs, masks and initial weights, and
       the blank's own logit are ours, and besides the layer we train the fusion of its
       inputs, a vector for each slot, the blank's weights and three norms.
    2. We sum log P (Eq. 1), not P (Eq. 2). With `first_token` (1 in the shipped
       drafter) a cross-entropy of the first token is added.
    3. The paper takes the "most valuable" combinations of all slots, collapses them,
       and masks what falls away. `alignments` visits the combinations of the first 1,
       2, ..., S slots in decreasing probability, until they make enough sequences. The
       default, `prefixes`, ranks a sequence by the sum over its alignments, with
       `symbols` tokens a slot and `candidates` sequences kept. The blank is always
       among a slot's choices; in the paper it is one of the k likeliest or left out.
       The sequences make a trie. `none` never drafts blanks; in Table 2 they stay in
       the untransformed drafts and spoil them.
    4. Only frequent tokens are drafted, and labels are chosen among them
       (`draft_vocab`). A step trains at 64 places of a text at most (`anchors`). When
       sampling, the first tokens are sampled (`sampled`); the paper decodes greedily.
    5. Other training settings and data than in 4.1: see PAPERS.md.

Section 2 has the acceptance probability upside down, min(1, p'/p); p' is the drafter's.

Authors' code: where it differs, we follow the paper, except for the layer's input. It
drafts four tokens in four passes of EAGLE's layer, and trains with EAGLE's losses and
.01 of the CTC loss, whose S = 6 slots are consecutive places of the text; S and U = 3
are from it. Its blank is <unk>, its transform does nothing unless some candidate has a
repeat, so that most blanks stay, and the tree is Medusa's, of 63 nodes.

Licence: Apache-2.0.
"""

import dataclasses
import heapq
import itertools
import math
import operator
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


# The shipped drafter has first_token 1, symbols 6, candidates 8 and nodes 5.
@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    slots: int = option(6, "slots per pass, S")
    window: int = option(3, "labels that an anchor's slots learn, U")
    anchors: int = option(64, "places to train at, per sequence")
    first_token: float = option(0.0, "weight of the first token's own loss")
    intermediate_size: int = option(1536, "width of the feed-forward layer")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    transform: str = option(
        "prefixes",
        "rank by prefixes (a sum), alignments (the likeliest) or none (no transform)",
        decode=True,
    )
    symbols: int = option(10, "likeliest tokens tried per slot, k", decode=True)
    candidates: int = option(16, "how many survive each slot (`prefixes`)", decode=True)
    nodes: int = option(10, "at most this many nodes", decode=True)
    sampled: int = option(2, "at most this many are sampled", decode=True)

    def __post_init__(self):
        common.at_least(self, window=1, anchors=1, first_token=0, draft_vocab=0)
        common.at_least(self, slots=self.window, symbols=1, candidates=1)
        common.at_least(self, nodes=0, sampled=0)
        common.one_of(self, transform=("prefixes", "alignments", "none"))


# Changes to the settings that a drafter was saved with.
VARIANTS = {
    "alignments": {"transform": "alignments"},  # "CTC verify" of Table 2
    "none": {"transform": "none"},  # no merging, and no blanks: not quite Table 2's
    # As near to the paper's decoding as this file comes. k and the number of nodes are
    # the authors' code's. The shipped weights were trained with `first_token`.
    "paper": {"transform": "alignments", "symbols": 10, "nodes": 63, "sampled": 0},
    "deterministic": {"sampled": 0},  # differs from the default only when sampling
}


# ---------------------------------------------------------------------- architecture

# The layer reads rows. Row i joins h_i, the target's hidden state after x_i, with the
# embedding of x_(i+1), so x_0 has none. (The target has not read the newest token
# yet, so the newest hidden state belongs to the token before it.) An anchor is a row
# that slots follow. When drafting, it is the newest row; in training, a text has A of
# them. Its window is the U labels that its slots learn, and W anchors of a batch have
# one.


class SlotAttention(LlamaAttention):
    """Slots attend to rows and slots."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, rows, slots, tables, mask, cache) -> Tensor:
        """Output (B, m, D) of m slots, after n rows.

        rows: (B, n, D). slots: (B, m, D), m = A S, one anchor's after another's.
        tables: rotary cos and sin (B, n + m, R).
        mask: (B, 1, m, n + m) bool, True where a slot reads; None: everywhere.
        cache: holds P earlier rows, and gets rows and slots; None in training.
        """
        x = torch.cat([rows, slots], dim=1)
        k = self.split(self.k_proj(x))
        v = self.split(self.v_proj(x))
        k = common.rotate(k, tables)  # (B, Hkv, n + m, Dh)
        if cache is not None:
            k, v = cache.update(k, v, 0)  # (B, Hkv, P + n + m, Dh)
        q = self.split(self.q_proj(slots))  # (B, H, m, Dh); rows need no outputs
        tables = [table[:, rows.shape[1] :] for table in tables]
        q = common.rotate(q, tables)
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
        x = chosen[:, :, None] + self.slots  # (B, A, S, D)
        x = x.flatten(1, 2)

        # Row i has the rotary position i, and the slots after it i + 1, i + 2, ...
        start = 0 if cache is None else cache.get_seq_length()  # P
        B, n = next_ids.shape
        places = torch.arange(n, device=x.device).expand(B, n)
        steps = 1 + torch.arange(len(self.slots), device=x.device)
        ahead = anchors[..., None] + steps  # (B, A, S)
        places = torch.cat([places, ahead.flatten(1)], dim=1)
        tables = common.rotary(target, start + places, -1)

        rows = self.input_layernorm(rows)
        normed = self.input_layernorm(x)
        x = x + self.self_attn(rows, normed, tables, mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, ahead.shape[1:])

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits (..., Vd + 1) of states (..., D), the blank's last (Eq. 10)."""
        return torch.cat([head(states), self.blank(states)], dim=-1).float()


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with the weights of the target's top layer.

    token_counts: (V,) how often each token occurs in the training data.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2 D): a sum
    drafter.fusion.weight.data.copy_(both)
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


def anchors_and_labels(drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Choose anchors and their labels.

    Returns anchors (B, A), filled up with -1 where a sequence has fewer, and labels
    (W, U) of the W anchors that are not -1, as indices into vocab_ids.
    """
    # Labels are what the target would say (Eq. 3 to 5): y_t is its likeliest token
    # after x_0 ... x_(t-1). After each anchor its slots learn the next U of them:
    #
    #     anchor 0    h_0  x_1 [y_2  y_3  y_4]
    #     anchor 1         h_1  x_2 [y_3  y_4  y_5]
    #
    # The labels of a window need not be a coherent text: y_3 is what the target says
    # after x_0, x_1 and x_2, and x_2 is y_2 only where the text is the target's own
    # greedy answer.
    U = drafter.config.window
    logits = common.target_logits(target, batch.hidden, drafter.vocab_ids)
    y = F.pad(logits.argmax(-1)[:, :-1], (1, 0))  # h_(t-1) gives y_t
    y = y.where(batch.loss_mask, -1)  # (B, T); -1 outside the answer
    # Windows at the end of the text run into -1.
    y = F.pad(y[:, 2:], (0, U), value=-1)  # (B, T - 2 + U)
    labels = y.unfold(1, U, 1)  # (B, T - 1, U): row i learns y_(i+2) to y_(i+1+U)

    # Draw anchors among the rows whose labels all lie in the answer. They follow from a
    # sequence's own seed, so that it does not matter how a batch is split.
    whole = (labels >= 0).all(-1).cpu()
    anchors = torch.full((len(y), drafter.config.anchors), -1)
    for b, seed in enumerate(batch.seed.tolist()):
        usable = whole[b].nonzero()[:, 0]
        order = torch.randperm(len(usable), generator=common.generator(seed))
        drawn = usable[order][: anchors.shape[1]]
        anchors[b, : len(drawn)] = drawn
    anchors = anchors.to(y.device)
    return anchors, at_anchors(labels, anchors)


def at_anchors(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows (W, ...) of x (B, n, ...) at anchors (B, A) that are not -1."""
    b, a = (anchors >= 0).nonzero(as_tuple=True)
    return x[b, anchors[b, a]]


def training_log_q(drafter: Drafter, target, batch, anchors: Tensor) -> Tensor:
    """Log-probabilities (W, S, Vd + 1) of the slots after W anchors."""
    hidden = batch.hidden[:, :-1]  # (B, n, D)
    next_ids = batch.input_ids[:, 1:]  # (B, n)
    places = anchors.clamp(min=0)  # -1 becomes 0, and its slots are dropped below
    mask = slot_mask(places, next_ids.shape[1], drafter.config.slots)
    states = drafter(target, hidden, next_ids, places, mask)  # (B, A, S, D)
    states = states[anchors >= 0]  # (W, S, D)
    head = common.draft_head(target, drafter.vocab_ids).to(states.dtype)
    return drafter.logits(states, head).log_softmax(-1)


def ctc_loss(log_q: Tensor, labels: Tensor) -> Tensor:
    """Minus log P of Eq. 6, summed over W windows.

    log_q: (W, S, Vd + 1). labels: (W, U).
    """
    W, S, size = log_q.shape
    return F.ctc_loss(
        log_q.transpose(0, 1),  # (S, W, Vd + 1)
        labels,
        [S] * W,  # slots of each window
        [labels.shape[1]] * W,
        blank=size - 1,
        reduction="sum",
        # A window in which r neighbours are equal needs U + r slots, because a blank
        # has to split each repeat. With fewer its loss is infinite, and is set to 0.
        # That cannot happen with the default S and U.
        zero_infinity=True,
    )


def first_token_log_q(log_q: Tensor) -> Tensor:
    """Log-probability (W, Vd) that each token comes first; log_q: (W, S, Vd + 1)."""
    # The token in slot j comes first if slots 1 to j - 1 are blank.
    blanks = log_q[:, :-1, -1].cumsum(-1)
    before = F.pad(blanks, (1, 0))[..., None]  # (W, S, 1)
    return (before + log_q[..., :-1]).logsumexp(1)


def first_token_hidden(batch, anchors: Tensor) -> Tensor:
    """The target's states (W, D) that predict the first token after each anchor."""
    return at_anchors(batch.hidden[:, 1:], anchors)  # after row i, h_(i+1): x_(i+2)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Minus the logarithm of Eq. 6, summed over W anchors, and W.

    With `first_token` a cross-entropy of the first token is added (not in the paper).
    The target must be frozen, as load_target leaves it.
    """
    anchors, labels = anchors_and_labels(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    if len(labels) == 0:  # F.ctc_loss refuses an empty batch
        return log_q.sum(), 0  # zero, with a gradient for all weights
    total = ctc_loss(log_q, labels)
    # CTC weighs all tokens of a window equally, but nothing of a draft is accepted
    # where its first token is wrong. So the first token may get a cross-entropy of its
    # own, with the target's distribution as its label. In trials of 875 steps, one seed
    # each, it raised `acceptance` on answers from .374 to .396.
    if drafter.config.first_token:
        hidden = first_token_hidden(batch, anchors)
        logits = common.target_logits(target, hidden, drafter.vocab_ids)
        teacher = logits.softmax(-1)  # (W, Vd)
        cross_entropy = -(teacher * first_token_log_q(log_q)).sum()
        total = total + drafter.config.first_token * cross_entropy
    return total, len(labels)


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of the first token, summed over W anchors; and W."""
    anchors, _ = anchors_and_labels(drafter, target, batch)  # those of `loss`
    log_q = training_log_q(drafter, target, batch, anchors)
    # Divided by its sum, as in `sample_chain`.
    q_draft = first_token_log_q(log_q).softmax(-1)  # (W, Vd)
    hidden = first_token_hidden(batch, anchors)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(hidden)


# --------------------------------------------------------------------- CTC transform


def collapse(alignment, blank=BLANK) -> tuple:
    """beta^-1 (2.3): merge equal neighbours, then drop the blanks."""
    merged = [symbol for symbol, _ in itertools.groupby(alignment)]
    return tuple(symbol for symbol in merged if symbol != blank)


def top_symbols(q_slots: Tensor, vocab_ids: Tensor, symbols: int) -> list[list[tuple]]:
    """Pairs (token, probability) of each slot: its likeliest tokens, then its blank.

    q_slots: (S, Vd + 1). symbols: how many tokens, the "top k" of 3.3.
    """
    best = q_slots[:, :-1].topk(min(symbols, len(vocab_ids)))  # (S, k)
    ids = F.pad(vocab_ids[best.indices], (0, 1), value=BLANK)  # (S, k + 1)
    q = torch.cat([best.values, q_slots[:, -1:]], dim=1)
    return [list(zip(*slot)) for slot in zip(ids.tolist(), q.tolist())]


# Two searches look for the likeliest sequences. Suppose that slot 1 holds a (.6) or e
# (.4), and slot 2 holds a (.2), b (.5) or e (.3). These are all alignments, at first of
# slot 1 alone:
#
#     a       .6             a
#     e       .4             (nothing)
#     a b     .6 x .5 = .30  a b
#     e b     .4 x .5 = .20  b
#     a e     .6 x .3 = .18  a            as in slot 1 already: a merges, e is dropped
#     a a     .6 x .2 = .12  a            likewise
#     e e     .4 x .3 = .12  (nothing)
#     e a     .4 x .2 = .08  a            a comes in slot 2
#
# `likeliest_alignments`, nearer to the paper, gives each sequence the probability of
# its likeliest alignment: a .60, a b .30, b .20. `prefix_search` sums over all
# alignments that begin with it, whatever the later slots hold: a .60 + .08 = .68, a b
# .30, b .20.
# Neither finds a a, which needs three slots, a e a.


def likeliest_alignments(
    choices: list[list[tuple]], nodes: int, merge=True, ends=(), room=math.inf
) -> dict:
    """The sequences of the likeliest alignments (3.1, 3.3), at most `nodes`.

    Returns {sequence: probability}.

    choices: what `top_symbols` returns. A sequence is a tuple of tokens.
    merge: if not, sequences are not transformed, and blanks are left out.
    ends: tokens after which a sequence does not go on.
    room: how long a sequence may be.
    """
    if not merge:  # unlike Table 2's "Medusa verify", which drafts blanks as well
        choices = [pairs for *pairs, _ in choices]
    # Best-first search over alignments of the first one, two, ... slots. (The paper's
    # fill all slots.) An alignment has the product of its slots' probabilities (Eq. 7),
    # so a longer one is never likelier than one that it extends. Alignments therefore
    # leave the heap in decreasing order, each before its extensions.
    heap = [(-1.0, ())]  # of (minus the probability, alignment)
    seen = set()
    found = {}
    while heap and len(found) < nodes:
        minus_q, alignment = heapq.heappop(heap)
        if minus_q == 0:  # and so are all that are left
            break
        sequence = collapse(alignment) if merge else alignment
        # Alignments of as many slots that become the same sequence and end in the same
        # symbol have the same continuations. The likeliest of them comes first, so
        # the others are skipped.
        alike = (len(alignment), sequence, alignment[-1:])
        if alike in seen:
            continue
        seen.add(alike)
        if sequence:
            found.setdefault(sequence, -minus_q)
        over = sequence and (sequence[-1] in ends or len(sequence) >= room)
        if len(alignment) < len(choices) and not over:
            for symbol, q in choices[len(alignment)]:
                heapq.heappush(heap, (minus_q * q, (*alignment, symbol)))
    return found


def prefix_search(
    choices: list[list[tuple]], candidates: int, ends=(), room=math.inf
) -> dict:
    """Prefix search (Graves et al., 2006), as a beam: {prefix: probability}.

    The probability of a prefix, a tuple of tokens, is that of all sequences that begin
    with it: a sum over all their alignments (Eq. 6).

    choices: what `top_symbols` returns; other tokens count as impossible.
    candidates: how many prefixes are continued after each slot, the empty one among
        them; those that the slots so far have most probably become.
    ends, room: as in `likeliest_alignments`.
    """
    # The slots are read one after another. `kept` says how likely it is that those read
    # so far have become exactly this prefix. It is split in two, because the meaning of
    # the next slot depends on whether the last one is blank: after a blank, the last
    # token of the prefix is a repeat, and otherwise it merges. `prefixes` sums up how
    # likely it is that a slot completes the prefix. Whatever the later slots hold, the
    # sequence then begins with it. An alignment completes a prefix in one slot only, so
    # none is counted twice.
    prefixes = defaultdict(float)
    kept = {(): (1.0, 0.0)}  # {prefix: (in_blank, in_token)}
    for *pairs, (_, q_blank) in choices:
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix, (in_blank, in_token) in kept.items():
            if prefix and (prefix[-1] in ends or len(prefix) >= room):
                continue  # what would continue it is not drafted
            either = in_blank + in_token
            new_blank[prefix] = either * q_blank  # a blank changes nothing
            for token, q in pairs:
                entering = either * q
                if prefix[-1:] == (token,):  # a repeat: only after a blank is it new
                    new_token[prefix] += in_token * q
                    entering = in_blank * q
                if entering > 0:
                    longer = (*prefix, token)
                    new_token[longer] += entering
                    prefixes[longer] += entering
        total = {p: new_blank[p] + new_token[p] for p in new_blank | new_token}
        # A dropped prefix may come back from a shorter one, but without the probability
        # that it had. So some sums are too small.
        likeliest = heapq.nlargest(candidates, total, key=total.get)
        kept = {p: (new_blank[p], new_token[p]) for p in likeliest}
    return prefixes


def token_tree(ids: Tensor, ranked: dict, nodes: int, first=()) -> common.Draft:
    """A Draft of the `nodes` likeliest prefixes: a trie, where a node ends each.

    ids: on the device of the target. ranked: {prefix: probability}.
    first: the prefixes that become the first nodes.
    """
    node_of = {(): -1}  # {prefix: its node}
    for prefix in [*first, *sorted(ranked, key=ranked.get, reverse=True)]:
        if len(node_of) > nodes:
            break
        # A prefix is at least as likely as those that continue it, so its node is there
        # before theirs. But rounding may put equals into the wrong order.
        if prefix[:-1] in node_of and prefix not in node_of:
            node_of[prefix] = len(node_of) - 1
    drafted = list(node_of)[1:]
    tokens = ids.new_tensor([prefix[-1] for prefix in drafted], dtype=torch.long)
    parents = [node_of[prefix[:-1]] for prefix in drafted]
    return common.Draft(tokens, parents, notes={"q": [ranked[p] for p in drafted]})


# -------------------------------------------------------------------------- sampling


def continuations(q_slots: Tensor, prefix: tuple) -> Tensor:
    """Probability (Vd,) that the sequence begins with `prefix` and then each token.

    It is the sum of `prefix_search`, but without limits. Divided by its own sum, it is
    the distribution of the token after the prefix, if there is one.

    q_slots: (S, Vd + 1). prefix: indices of tokens in it.
    """
    # The steps of `prefix_search`, for one prefix and all slots. Entry t of a list, 0
    # to S, is the probability that slots 1 to t have become exactly the tokens so far;
    # in `in_blank` slot t is blank as well, and in `in_token` it is not.
    columns = torch.tensor([*prefix, -1], device=q_slots.device)
    *q_prefix, q_blank = q_slots[:, columns].T.tolist()
    in_blank = [1.0, *itertools.accumulate(q_blank, operator.mul)]  # no token so far
    either = in_blank
    for before, token, q in zip((None, *prefix), prefix, q_prefix):
        enters = in_blank if token == before else either  # a repeat: only after a blank
        # From here on `enters` is of the shorter prefix, and `either` of this one.
        in_blank, in_token, either = [0.0], [0.0], [0.0]
        for t in range(len(q_slots)):  # q[t] is of slot t + 1
            in_blank.append(either[t] * q_blank[t])
            in_token.append((in_token[t] + enters[t]) * q[t])
            either.append(in_blank[-1] + in_token[-1])
    # The next token may enter in any slot.
    enters = q_slots.new_tensor([either[:-1], in_blank[:-1]])  # (2, S)
    new, repeat = enters @ q_slots[:, :-1]  # (Vd,) each
    if prefix:
        new[prefix[-1]] = repeat[prefix[-1]]
    return new


def sample_chain(
    decoding, q_slots: Tensor, vocab_ids: Tensor, most: int, merge: bool
) -> tuple[dict, list[Tensor]]:
    """Sample up to `most` tokens, each from its distribution after those before it.

    merge: see `likeliest_alignments`.
    Returns {prefix: probability} of the first token, the first two and so on, and a
    list of the q_draft (V,) that each was drawn from.
    """
    chain = {}
    probs = []
    tokens = ()
    columns = ()  # of these tokens in q_slots
    q = 1.0
    for _ in range(min(most, len(q_slots))):
        if merge:
            next_q = continuations(q_slots, columns)
        else:
            next_q = q * q_slots[len(columns), :-1]
        if not next_q.max() > 0:  # the tokens so far take up all slots
            break
        # `pick` divides by the sum and applies temperature, top-p and so on.
        picked = common.pick(decoding, next_q.log(), vocab_ids, list(tokens))
        if picked is None:
            break
        token, q_draft = picked
        column = (vocab_ids == token).nonzero()[:, 0].tolist()
        # A logits processor may force a token that is not in the draft vocabulary. It
        # stays in the chain, because leaving out a token for its value would bias what
        # is sampled, but the slots do not say what comes after it.
        forced = not column
        q = 0.0 if forced else float(next_q[column[0]])
        columns = (*columns, *column)
        tokens = (*tokens, int(token))
        chain[tokens] = q
        probs.append(q_draft)
        if forced or tokens[-1] in decoding.eos_ids:
            break
    return chain, probs


# -------------------------------------------------------------------------- decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(1)  # keys and values of the rows
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd


def fill_slots(drafter: Drafter, decoding, memory: Memory) -> Tensor:
    """One pass: the probabilities q_slots (S, Vd + 1) after the newest token."""
    # Each token that the last round committed makes a row, with the hidden state before
    # it; in the first round, each token of the prompt but its first.
    hidden = decoding.hidden  # (1, n, D)
    n = hidden.shape[1]
    read = memory.cache.get_seq_length() + n
    message = "ask for a draft in every round, from the first"
    assert read == decoding.ids.shape[1] - 1, message
    next_ids = decoding.ids[:, -n:]  # (1, n)
    anchor = next_ids.new_full((1, 1), n - 1)  # the newest row: its slots read all
    states = drafter(decoding.target, hidden, next_ids, anchor, cache=memory.cache)
    memory.cache.cut(read)  # the rows stay, the slots do not
    return drafter.logits(states[0, 0], memory.head).softmax(-1)


def make_tree(decoding, q_slots, vocab_ids, config) -> common.Draft:
    """The tree of a pass; q_slots (S, Vd + 1), the blank last; vocab_ids (Vd,)."""
    choices = top_symbols(q_slots, vocab_ids, config.symbols)
    merge = config.transform != "none"
    limits = decoding.eos_ids, decoding.room
    if config.transform == "prefixes":
        ranked = prefix_search(choices, config.candidates, *limits)
    else:
        ranked = likeliest_alignments(choices, config.nodes, merge, *limits)
    # A node that was not sampled is accepted with the target's probability of its
    # token. One that was drawn from q is accepted with probability sum_x min(p(x),
    # q(x)), which is usually higher. So when sampling, the tree begins with a sampled
    # chain. At temperature 1 a chain of two raises tau by 7%, and a longer one by no
    # more (results/README.md).
    chain, probs = {}, []
    if decoding.do_sample:
        most = min(config.sampled, config.nodes, decoding.room)
        chain, probs = sample_chain(decoding, q_slots, vocab_ids, most, merge)
    # The chain's sums replace what the search has found for its prefixes.
    draft = token_tree(decoding.ids, ranked | chain, config.nodes, first=chain)
    # common.draw takes row i of `probs` for node i, so no node of the chain may be left
    # out or moved.
    assert draft.tokens[: len(chain)].tolist() == [prefix[-1] for prefix in chain]
    draft.probs = torch.stack(probs) if probs else None
    return draft


def propose(drafter: Drafter, decoding, memory: Memory, config: Config) -> common.Draft:
    """Draft a tree after `decoding.ids`."""
    # A prompt of one token has no row, and without room no token can be drafted.
    if decoding.hidden.shape[1] == 0 or decoding.room == 0:
        return common.chain([], decoding.ids)
    q_slots = fill_slots(drafter, decoding, memory)
    draft = make_tree(decoding, q_slots, drafter.vocab_ids, config)
    draft.notes |= {"q_slots": q_slots, "vocab_ids": drafter.vocab_ids}
    return draft


@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    changes: other values for fields of the Config with decode=True, such as nodes.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, config)


if __name__ == "__main__":
    common.demo(Drafter, "ctc_drafter", drafts)
