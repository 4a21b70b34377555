"""CTC-drafter: all draft tokens in one pass, from slots that may stay blank.

Paper: Wen et al., 2024, arXiv:2412.00061.

One transformer layer fills the S slots after the newest token in a single pass, each
with a token or a blank (e) and each on its own (Eq. 7). The CTC transform turns such
a filling, an alignment, into a sequence of tokens: it merges equal neighbours, then
it drops the blanks. The likeliest sequences form the draft, a tree.

    a a e b c c  ->  a b c
    a e a b e e  ->  a a b   a blank splits a repeat

The CTC loss sums over all alignments of the right sequence (Eq. 6), so the layer may
choose which slot holds which token.

The target has not read the newest token x_(i+1), so its newest hidden state is h_i.
Row i of the drafter combines both. A row that slots follow is called an anchor: while
drafting it is the newest row, in training there are many in a text. The slots after
an anchor learn the next U labels, in order, and S > U leaves room for blanks. Label
y_t is the target's likeliest token after x_0 to x_(t-1). U = 3:

    anchor 0    h_0  x_1 [y_2  y_3  y_4]
    anchor 1         h_1  x_2 [y_3  y_4  y_5]

Each window has exactly U labels, so the length of a draft is never in doubt, and the
blank has little to learn. In the shipped drafter its mean probability in slots 1 to 6
is .00 .05 .00 1.00 .97 .98 (668 greedy contexts): the first three slots hold a token
each, the others are idle. With windows of 1 to 6 labels the blank is used (.06 .39 .50
.54 .55 .54 in a short trial), but tau is not higher (checkpoints/README.md).

Names that differ from the paper's: F_distill is `hidden`, F^ is `states`, P^ is
`q_slots` (in training its logarithm, `log_q`), beta^-1 is `collapse`, the T of Eq. 7
is S. The blank has index Vd. A counts the anchors of a sequence (not alignments), W
those of a batch.

Deviations from the paper:
    1. Anchors are random; log P is summed (Eq. 1), not P (Eq. 2).
    2. The next token in a row, how slots start and what they see, the norms, the
       initial weights and the blank's own logit are not in the paper. The next token,
       S = 6 and U = 3 are taken from the authors' code.
    3. By default a sequence is ranked by the sum over its alignments; the paper's
       transform, `alignments`, ranks it by the likeliest one. Both give a trie here;
       the paper masks what it removes.
    4. `first_token` adds a loss on the first token. Only frequent tokens are drafted
       (`draft_vocab`).
    5. Where section 2 prints min(1, p'/p) it must mean the target's probability over
       the drafter's; common.draw has it so.

Authors' code: it differs from the paper, which is followed here. Its drafter is
EAGLE's causal layer, and drafts autoregressively in four passes. The CTC loss has a
weight of 0.01 beside EAGLE's losses (SmoothL1 1.0, cross-entropy 0.1), so training
with `first_token` is nearer to it than CTC alone. The blank is <unk>, and blanks stay
where no candidate has a repeat. The tree is Medusa's, of 63 nodes (the variant
`paper` has as many).

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
    intermediate_size: int = option(1536, "width of the feed-forward layer")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    transform: str = option("prefixes", "prefixes, alignments or none", decode=True)
    symbols: int = option(10, "likeliest tokens tried per slot, k", decode=True)
    candidates: int = option(16, "prefixes kept per slot (`prefixes`)", decode=True)
    nodes: int = option(10, "most nodes in the tree", decode=True)

    def __post_init__(self):
        common.at_least(self, window=1, anchors=1, first_token=0, draft_vocab=0)
        common.at_least(self, slots=self.window, symbols=1, candidates=1, nodes=0)
        common.one_of(self, transform=("prefixes", "alignments", "none"))


VARIANTS = {
    "alignments": {"transform": "alignments"},  # "CTC verify" of Table 2
    "none": {"transform": "none"},  # "Medusa verify"
    "paper": {"transform": "alignments", "symbols": 10, "nodes": 63},
}


# ---------------------------------------------------------------------- architecture


class SlotAttention(LlamaAttention):
    """Slots read rows and slots. Rows read nothing, for nothing is learned there."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, rows, slots, tables, mask, cache) -> Tensor:
        """Output (B, m, D) of m slots after n rows.

        tables: cos, sin (B, n + m, R).
        mask: (B, 1, m, n + m) bool, True = reads; None: everything.
        """
        x = torch.cat([rows, slots], dim=1)
        k = self.split(self.k_proj(x))
        v = self.split(self.v_proj(x))
        k = common.rotate(k, tables)  # (B, Hkv, n + m, Dh)
        if cache is not None:
            k, v = cache.update(k, v, 0)  # (B, Hkv, P + n + m, Dh)
        q = self.split(self.q_proj(slots))  # (B, H, m, Dh)
        tables = [table[:, rows.shape[1] :] for table in tables]
        q = common.rotate(q, tables)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        heads = out.transpose(1, 2).flatten(2)
        return self.o_proj(heads)


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2412.00061",  # on the card of a drafter on the hub
    license="apache-2.0",
    tags=["speculative-decoding", "ctc-drafter"],
):
    """The Attention Draft Module (3.1). Embedding and LM head are the target's."""

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
        # Named as in the target, so that weights can be copied.
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = SlotAttention(llama, 0)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(llama)
        self.blank = nn.Linear(width, 1)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    def forward(self, target, hidden, next_ids, anchors, mask=None, cache=None):
        """States (B, A, S, D) of the slots after A of n rows (Eq. 9).

        hidden: (B, n, D), the target's. next_ids: (B, n), the tokens after them.
        anchors: (B, A), indices of rows.
        mask: of `slot_mask`. None while drafting: the only anchor is the newest row,
            so its slots read everything.
        cache: holds the P rows before these, and takes up all n + S (while drafting).
        """
        dtype = self.norm.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        rows = self.fusion(torch.cat(both, dim=-1))  # (B, n, D)

        # A slot starts as its anchor's row, plus a learned vector for its place.
        chosen = rows.take_along_dim(anchors[..., None], dim=1)  # (B, A, D)
        x = chosen[:, :, None] + self.slots  # (B, A, S, D)
        x = x.flatten(1, 2)

        # Row i has rotary position i, and the slots after it i + 1, i + 2, ...
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

    token_counts: (V,) how often each token occurs in the responses.
    """
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2D): a sum
    drafter.fusion.weight.data.copy_(both)
    pairs = [(drafter, layer) for layer in common.target_layers(target)[-1:]]
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# ---------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What the slots after anchors (B, A) read, (B, 1, A S, n + A S) bool.

    A slot reads the rows up to its anchor, and all slots of the same anchor. Anchors
    0 and 2, n = `length` = 4, S = `slots` = 2:

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
    # The slots of an anchor all read the same.
    mask = torch.cat([up_to, own.expand(B, -1, -1)], dim=-1)
    return mask.repeat_interleave(slots, dim=1)[:, None]


def windows(drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Draw anchors (B, A) and give their labels (W, U), indices into vocab_ids.

    A row can be an anchor if its U labels all lie in the answer. Where a sequence has
    fewer than A such rows, -1 fills up. W counts the anchors that are not -1. Labels
    are those of Eq. 3 to 5, the likeliest ones of the draft vocabulary.
    """
    U = drafter.config.window
    logits = common.target_logits(target, batch.hidden, drafter.vocab_ids)
    y = F.pad(logits.argmax(-1)[:, :-1], (1, 0))  # h_(t-1) gives y_t
    y = y.where(batch.loss_mask, -1)  # (B, T); -1 outside the answer

    # Row i learns y_(i+2), ..., y_(i+1+U).
    y = F.pad(y[:, 2:], (0, U), value=-1)
    labels = y.unfold(1, U, 1)  # (B, T - 1, U)
    whole = (labels >= 0).all(-1).cpu()

    # Anchors follow from a sequence's own seed, not from the batch that it is in.
    anchors = torch.full((len(y), drafter.config.anchors), -1)
    for b, seed in enumerate(batch.seed.tolist()):
        rows = whole[b].nonzero()[:, 0]
        order = torch.randperm(len(rows), generator=common.generator(seed))
        drawn = rows[order][: anchors.shape[1]]
        anchors[b, : len(drawn)] = drawn
    anchors = anchors.to(y.device)
    return anchors, rows_at(labels, anchors)


def rows_at(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows (W, ...) of x (B, n, ...) at anchors (B, A) that are not -1."""
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

    log_q: (W, S, Vd + 1). labels: (W, U). A window in which r neighbours are equal
    needs U + r slots, since a blank must split each repeat; with fewer it adds zero.
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
    """Log-probability (W, Vd) of each first token, in whichever slot it stands.

    In slot j it is the first if slots 1 to j - 1 are blank. log_q: (W, S, Vd + 1).
    """
    blanks = log_q[:, :-1, -1].cumsum(-1)
    before = F.pad(blanks, (1, 0))[..., None]  # (W, S, 1)
    return (before + log_q[..., :-1]).logsumexp(1)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """CTC loss (Eq. 6), summed over W anchors, and W.

    With `first_token`, the cross-entropy of the first token is added, times this
    weight; its label is the target's distribution over the draft vocabulary. Without
    it the first token counts no more than the others, although nothing of a draft is
    accepted where it is wrong.
    """
    anchors, labels = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    if len(labels) == 0:  # too few for F.ctc_loss
        return log_q.sum(), 0  # zero, with a gradient for all weights
    total = ctc_loss(log_q, labels)
    if drafter.config.first_token:
        # After anchor i, the first token is x_(i+2), which h_(i+1) predicts.
        hidden = rows_at(batch.hidden[:, 1:], anchors)
        logits = common.target_logits(target, hidden, drafter.vocab_ids)
        teacher = logits.softmax(-1)  # (W, Vd)
        cross_entropy = -(teacher * first_token_log_q(log_q)).sum()
        total = total + drafter.config.first_token * cross_entropy
    return total, len(labels)


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of the first token, summed over W anchors, and W."""
    anchors, _ = windows(drafter, target, batch)
    log_q = training_log_q(drafter, target, batch, anchors)
    q_draft = first_token_log_q(log_q).exp()  # (W, Vd)
    hidden = rows_at(batch.hidden[:, 1:], anchors)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(hidden)


# --------------------------------------------------------------------- CTC transform


def collapse(alignment, blank: int) -> tuple:
    """beta^-1 (2.3): merge equal neighbours, then drop the blanks."""
    merged = [symbol for symbol, _ in itertools.groupby(alignment)]
    return tuple(symbol for symbol in merged if symbol != blank)


def top_symbols(q_slots: Tensor, symbols: int) -> list[list[tuple]]:
    """(symbol, probability) of each slot's likeliest tokens, and last of its blank.

    q_slots: (S, Vd + 1). symbols: how many tokens, the "top k" of 3.3.
    """
    blank = q_slots.shape[-1] - 1
    tokens = q_slots[:, :-1].topk(min(symbols, blank)).indices  # (S, k)
    ids = F.pad(tokens, (0, 1), value=blank)  # (S, k + 1)
    q = q_slots.gather(1, ids)
    return [list(zip(*slot)) for slot in zip(ids.tolist(), q.tolist())]


def alignments(q_slots: Tensor, symbols: int, nodes: int, merge: bool = True) -> dict:
    """The transform of 3.3: {sequence: probability} of the `nodes` likeliest.

    A raw candidate fills the first one, two, ... slots with a symbol each. (The paper's
    fill all slots; their beginnings are the nodes of its tree.) Its probability is the
    product of theirs (Eq. 7), whatever the later slots hold. It is collapsed to a
    sequence, a tuple of indices into vocab_ids. Several raw candidates become the same
    sequence, whose probability is that of the likeliest one, while `prefix_search`
    sums over all of them. Slots a .6, e .4 and a .2, b .5, e .3:

        raw     probability    sequence
        a       .6             a
        e       .4
        a b     .6 x .5 = .30  a b
        e b     .4 x .5 = .20  b
        a e     .6 x .3 = .18  a         known already, as are a a and e a

    Without `merge`, raw candidates are drafted as they are, up to a blank: "Medusa
    verify" of Table 2, and Medusa's own heads, which have no blank.

    q_slots: (S, Vd + 1). symbols: tokens that are tried in each slot.
    """
    blank = q_slots.shape[-1] - 1
    slots = top_symbols(q_slots, symbols)
    if not merge:
        slots = [tokens for *tokens, _ in slots]
    # Best-first search. A raw candidate is at most as likely as its beginnings, so they
    # leave the heap in decreasing order, each before those that continue it.
    raw = [(-1.0, ())]  # a heap, with the likeliest on top
    seen = set()
    found = {}
    while raw and len(found) < nodes:
        p, candidate = heapq.heappop(raw)
        sequence = collapse(candidate, blank) if merge else candidate
        # Two that fill as many slots, become the same sequence and end in the same
        # symbol also continue alike, so that only the likelier one needs to.
        alike = (len(candidate), sequence, candidate[-1:])
        if alike in seen:
            continue
        seen.add(alike)
        if sequence:
            found.setdefault(sequence, -p)
        if len(candidate) < len(slots):
            for symbol, q in slots[len(candidate)]:
                heapq.heappush(raw, (p * q, (*candidate, symbol)))
    return found


def prefix_search(q_slots: Tensor, symbols: int, candidates: int) -> dict:
    """CTC prefix search: {prefix: probability that the draft begins with it}.

    A prefix is a tuple of indices into vocab_ids. Its probability is the sum over all
    alignments (Eq. 6) of all sequences that begin with it. The newest token is no part
    of a prefix, and slot 1 may repeat it.

    The slots are read one after another, and each adds the probability that it
    completes the prefix. What a symbol does depends on what the slots before it have
    become and on whether they end in a blank: the last token of the prefix lengthens
    it after a blank, and merges otherwise. So the alignments of a prefix are summed
    in two parts, those that end in a blank and those that end in its last token.
    Slots a .6, e .4 and a .2, b .5, e .3 (e is the blank):

        prefix  slot 1  slot 2        sum
        a       a   .6  e a  .4 x .2  .68  a a merges
        b               e b  .4 x .5  .20
        a b             a b  .6 x .5  .30
        a a                           0    needs a e a

    Two limits keep the search small, and can make a sum too small. In each slot, only
    the `symbols` likeliest tokens and the blank are tried. After each slot, only the
    `candidates` likeliest prefixes, to which the empty one may belong, are read on.
    The other prefixes stay in the dictionary with the sum that they have.
    """
    prefixes = defaultdict(float)
    kept = {(): (1.0, 0.0)}  # {prefix: (in_blank, in_token)}
    for *tokens, (_, q_blank) in top_symbols(q_slots, symbols):
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix, (in_blank, in_token) in kept.items():
            either = in_blank + in_token
            new_blank[prefix] = either * q_blank  # a blank changes nothing
            for token, q in tokens:
                entering = either * q
                if prefix[-1:] == (token,):  # a repeat: only after a blank is it new
                    new_token[prefix] += in_token * q
                    entering = in_blank * q
                if entering > 0:
                    longer = (*prefix, token)
                    new_token[longer] += entering
                    prefixes[longer] += entering
        total = {p: new_blank[p] + new_token[p] for p in new_blank | new_token}
        likeliest = heapq.nlargest(candidates, total, key=total.get)
        kept = {p: (new_blank[p], new_token[p]) for p in likeliest}
    return prefixes


def token_tree(prefixes: dict, vocab_ids: Tensor, nodes: int, depth: int, ends=()):
    """A Draft: the trie of the `nodes` likeliest prefixes. A node is the end of one.

    prefixes: {prefix: probability}, each a tuple of indices into vocab_ids (Vd,).
    Left out are prefixes of more than `depth` tokens, and those that go on after one
    of `ends`, the indices of end-of-sequence tokens. The notes have {"q": [...]}.
    """
    node_of = {(): -1}  # {prefix: its node}
    for prefix in sorted(prefixes, key=prefixes.get, reverse=True):
        if len(node_of) > nodes:
            break
        fits = len(prefix) <= depth and not any(token in ends for token in prefix[:-1])
        if fits and prefix[:-1] in node_of:  # rounding may rank it above its parent
            node_of[prefix] = len(node_of) - 1
    drafted = list(node_of)[1:]
    index = vocab_ids.new_tensor([prefix[-1] for prefix in drafted])
    parents = [node_of[prefix[:-1]] for prefix in drafted]
    q = [prefixes[prefix] for prefix in drafted]
    return common.Draft(vocab_ids[index], parents, notes={"q": q})


def end_symbols(decoding, vocab_ids: Tensor) -> set[int]:
    """The indices into vocab_ids (Vd,) of the end-of-sequence tokens."""
    return {n for n, token in enumerate(vocab_ids.tolist()) if token in decoding.ends}


# -------------------------------------------------------------------------- decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, decoding):
        self.cache = common.GrowingCache(1)  # keys and values of the rows
        self.head = common.draft_head(decoding.target, drafter.vocab_ids)  # D -> Vd
        self.ends = end_symbols(decoding, drafter.vocab_ids)


def fill_slots(drafter: Drafter, decoding, memory: Memory) -> Tensor:
    """One pass: the probabilities q_slots (S, Vd + 1) after the newest token."""
    # There is a new row for each token that the target has just cached: `hidden` and
    # the token after it, the last of which is the newest one.
    hidden = decoding.hidden  # (1, n, D)
    n = hidden.shape[1]
    next_ids = decoding.ids[:, -n:]  # (1, n)
    anchor = next_ids.new_full((1, 1), n - 1)
    states = drafter(decoding.target, hidden, next_ids, anchor, cache=memory.cache)
    memory.cache.cut(decoding.ids.shape[1] - 1)  # the rows stay, the slots do not
    return drafter.logits(states[0, 0], memory.head).softmax(-1)


def propose(drafter: Drafter, decoding, memory: Memory, config: Config) -> common.Draft:
    """Draft a tree after `decoding.ids`; its nodes are chosen, not sampled."""
    # A prompt of one token gives no row, and without room no token can be drafted.
    if decoding.hidden.shape[1] == 0 or decoding.room == 0:
        return common.chain([], decoding.ids)
    q_slots = fill_slots(drafter, decoding, memory)
    if config.transform == "prefixes":
        prefixes = prefix_search(q_slots, config.symbols, config.candidates)
    else:
        merge = config.transform == "alignments"
        prefixes = alignments(q_slots, config.symbols, config.nodes, merge)
    vocab_ids = drafter.vocab_ids
    draft = token_tree(prefixes, vocab_ids, config.nodes, decoding.room, memory.ends)
    draft.notes |= {"q_slots": q_slots, "vocab_ids": vocab_ids}
    return draft


@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    changes: other values for fields of the Config with decode=True, such as nodes.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    memory = Memory(drafter, decoding)
    while not decoding.done:
        yield propose(drafter, decoding, memory, config)


if __name__ == "__main__":
    common.demo(Drafter, "ctc_drafter", drafts)
