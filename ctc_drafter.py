"""CTC-drafter: slots filled in one pass, a loss over sequences, a collapse before verifying.

Wen et al., 2024, arXiv:2412.00061. From the target's last hidden states one transformer layer fills
S slots after the newest token in one pass. A slot belongs to no position: it holds a token or a
blank, and what all slots say becomes a sequence when repeats are merged and blanks dropped. The CTC
loss (connectionist temporal classification) sums over all ways to write the continuation into the
slots, so that choices made at once are trained together. a, b, c are tokens, e is the blank:

    slots   a  a  e  b  e  c  c  e    ->  a b c    merge, then drop
            a  e  a  b  e  e  e  e    ->  a a b    a real repeat has a blank between

    symbol               name here                  section      function
    D, X, theta          batch, input_ids, drafter  Eq. 2        loss
    F, F^                features, slot_states      Eq. 3, 9     Drafter.forward
    P_distill, Y         target_logits, labels      Eq. 4, 5     windows
    T = n; U is ours     S slots; window            Eq. 7, 8     Config
    epsilon              index Vd, the blank        2.3          Drafter.forward
    P^_t, p(a_t|X)       q_slots, log_q             Eq. 10, 11   propose, loss
    A, P(A|X)            combination, probability   Eq. 7, 8     alignments
    P(Y|X), beta(y)      a sum over alignments      Eq. 1, 6     ctc_loss, prefix_search
    beta^-1              collapse                   2.3          collapse
    top k, raw           symbols, candidates        3.3          alignments
    CTC transform        transform                  3.1, 3.3     generate
    beta = N / M, gamma  tau, speedup               Eq. 12, 13   support/report.py

Shapes: A anchors, n rows, D their width, W windows, S slots. An anchor is a row (h_i, x_(i+1))
whose continuation, from x_(i+2) on, the slots write: random rows in training, the last in decoding.

Deviations
    1. upstream != paper: the authors' code (upstream) drafts by EAGLE's loop, learns by SmoothL1 +
       0.1 cross-entropy + 0.01 CTC. This is the paper's parallel drafter, by CTC (but see 8).
    2. paper silent: slots see the rows up to their anchor and one another; S = 2U. A row joins a
       feature with the next token's embedding (as upstream); a slot starts as row plus own vector.
    3. ours: a head for the blank's logit. Eq. 10 and upstream (as `<unk>`, 0) take the LM head's.
    4. ours: the tree is a trie, built after the collapse; sampling is lossless too. The paper (3.1)
       and upstream build it before and mask what the collapse removes, upstream inexactly.
    5. ours: prefixes are ranked by all alignments that the cuts of `prefix_search` leave; in the
       paper, and `alignments`, by the most probable ones. `nodes` and `least_worth` bound the tree.
    6. ours: the loss sums logarithms (Eq. 1, not 2) over a random sample of anchors, X what is up
       to one. A layer starts as a Llama target's. Only `draft_vocab` frequent tokens are learnt.
    7. ours: learning rate 2e-3 (shipped: down to 8e-4), clip 1.0 of the norm, 512 tokens (shipped:
       384 first) of what the target wrote; paper 3e-5, 0.5 (upstream: by value), 2048, ShareGPT.
    8. ours: a window with fewer than U labels is scored as a beginning, as by Eq. 6 the slots would
       learn to stop there (shipped: in the last two runs). The end of a response makes such, and
       `cut_labels`, off by default like `first_token` and `copies` (shipped: the first two, late).
    9. ours: Medusa's heads share the target's LM head, read the anchor's row (there h_i) alone and
       draft likely combinations (there fixed). `transformer` slots: the control Table 2 lacks.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

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
    kind: str = option("ctc", "ctc, medusa (Table 2) or transformer")
    slots: int = option(6, "slots a pass fills, S (other kinds: window)")
    window: int = option(3, "tokens ahead to learn, U")
    anchors: int = option(64, "positions to train after, per sequence")
    cut_labels: bool = option(False, "cut windows where data != argmax, score beginnings")
    first_token: float = option(0.0, "weight of the first token's loss")
    intermediate_size: int = option(1536, "width of the feed-forward")
    draft_vocab: int = option(8192, "frequent tokens to draft; 0: all")
    transform: str = option("prefixes", "prefixes, alignments; other kinds: none (no merge)", True)
    symbols: int = option(10, "symbols per slot", True)
    candidates: int = option(16, "kept after each slot", True)
    nodes: int = option(10, "most nodes of the tree", True)
    least_worth: float = option(0.0, "draft no prefix of lower probability", True)
    copies: int = option(0, "tokens copied from the context a round", True)


VARIANTS = {
    "alignments": {"transform": "alignments"},  # the columns of Table 2: CTC verify
    "none": {"transform": "none"},  # and Medusa verify
    "copies": {"copies": 16},
    "confidence": {"least_worth": 0.06, "nodes": 16},
    "both": {"copies": 16, "least_worth": 0.06, "nodes": 16},
}

# ------------------------------------------------------------------------------------- architecture


def rope(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R of Dh dimensions of x (B, H, T, Dh) by cos and sin (B, T, R)."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)  # (B, 1, T, R)
    turned = x[..., : cos.shape[-1]]  # (B, H, T, R)
    rest = x[..., cos.shape[-1] :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class SlotAttention(nn.Module):
    """Slots attend to rows and slots. Rows need no queries: no layer follows to read the result."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, Dh)

    def forward(self, x: Tensor, slots: int, rotary, mask: Tensor | None, cache) -> Tensor:
        """From n rows and m = `slots` slots (B, n + m, D), after P cached rows, to (B, m, D)."""
        q = self.split(self.q_proj(x[:, -slots:]))  # (B, H, m, Dh)
        q = rope(q, [table[:, -slots:] for table in rotary])
        k = rope(self.split(self.k_proj(x)), rotary)  # (B, Hkv, n + m, Dh)
        v = self.split(self.v_proj(x))
        if cache is not None:
            k, v = cache.update(k, v, 0)  # (B, Hkv, P + n + m, Dh)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The Attention Draft Module (3.1), or Medusa's heads, on the target's embeddings and head."""

    def __init__(self, config: Config):
        super().__init__()
        if config.kind not in ("ctc", "transformer", "medusa"):
            raise ValueError(f"unknown kind {config.kind!r}; take ctc, transformer or medusa")
        self.config = config
        self.kv_layers = []  # reads the target's features, not its keys and values
        self.num_slots = config.slots if config.kind == "ctc" else config.window
        shape = config.target
        width = shape["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        if config.kind == "medusa":
            self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(self.num_slots))
        else:  # names as in the target's layers, to be copied from there
            self.slots = nn.Parameter(0.02 * torch.randn(self.num_slots, width))
            self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
            sizes = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
            self.self_attn = SlotAttention(width, *sizes)
            self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
            self.mlp = SwiGLU(width, config.intermediate_size)
        if config.kind == "ctc":
            self.blank = nn.Linear(width, 1)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        vocab = shape["vocab_size"]
        self.register_buffer("draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab)))

    def forward(self, features, embeds, anchors, rotary, lm_head, mask=None, cache=None) -> Tensor:
        """Logits (B, A, S, Vd + 1) of the slots after A chosen rows (Eq. 9, 10), the blank last.

        Args: features: (B, n, D) of the target. embeds: (B, n, D) of the tokens one step ahead.
            anchors: (B, A) which of the n rows. rotary: cos, sin (B, n + A S, R) of rows and slots.
            lm_head: the target's, D -> Vd for the tokens draft_ids (Vd,).
            mask: (B, 1, A S, P + n + A S) bool. cache: of P earlier rows; gets rows and slots.
        """
        both = torch.cat([self.feature_norm(features), self.embed_norm(embeds)], -1)  # (B, n, 2D)
        rows = self.fusion(both)  # (B, n, D)
        chosen = rows.take_along_dim(anchors[..., None], 1)[:, :, None]  # (B, A, 1, D)
        if self.config.kind == "medusa":
            filled = [chosen + F.silu(medusa_head(chosen)) for medusa_head in self.heads]
            slot_states = self.norm(torch.cat(filled, dim=2))  # (B, A, S, D)
        else:
            x = (chosen + self.slots).flatten(1, 2)  # (B, A S, D)
            seen = self.input_layernorm(torch.cat([rows, x], dim=1))  # (B, n + A S, D)
            x = x + self.self_attn(seen, x.shape[1], rotary, mask, cache)
            x = x + self.mlp(self.post_attention_layernorm(x))
            slot_states = self.norm(x).unflatten(1, (-1, self.num_slots))  # (B, A, S, D)
        logits = lm_head(slot_states)  # (B, A, S, Vd)
        if self.config.kind == "ctc":
            return torch.cat([logits, self.blank(slot_states)], dim=-1)
        return F.pad(logits, (0, 1), value=float("-inf"))  # never blank


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from, its layer copied from the target's top one where it fits.

    Args: token_counts: (V,) in the responses. Raises: ValueError: unknown kind, number below 1.
    """
    for name in ("slots", "window", "anchors"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name)}: must be at least 1")
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        drafter.fusion.weight.copy_(torch.eye(len(drafter.fusion.weight)).repeat(1, 2))  # a sum
        for source in list(getattr(target.get_decoder(), "layers", []))[-1:]:
            theirs = dict(source.named_parameters())
            for name, weight in drafter.named_parameters():
                if name in theirs and theirs[name].shape == weight.shape:
                    weight.copy_(theirs[name])
        if hasattr(getattr(target.get_decoder(), "norm", None), "weight"):
            drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    return drafter


# ------------------------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What the slots after each anchor see: the rows up to it, and their own group.

        anchors 0 and 2, S = 2    rows 0 1 2 3    slots a1 a2 b1 b2
        after row 0        a1          x . . .          x  x  .  .
                           a2          x . . .          x  x  .  .
        after row 2        b1          x x x .          .  .  x  x
                           b2          x x x .          .  .  x  x

    Args: anchors: (B, A) rows. length: number of rows n. Returns: (B, 1, A S, n + A S) bool.
    """
    rows = torch.arange(length, device=anchors.device)  # (n,)
    upto = anchors.repeat_interleave(slots, dim=1)[..., None] >= rows  # (B, A S, n)
    group = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(slots)  # (A S,)
    own = (group[:, None] == group).expand(len(anchors), -1, -1)  # (B, A S, A S)
    return torch.cat([upto, own], dim=-1)[:, None]


def windows(drafter: Drafter, target, batch: common.Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors to train on, and what should follow: windows of the target's choices (Eq. 3-5).

    y_t is the target's argmax at place t, given the data before. Row i is made of h_i and x_(i+1),
    so its slots go on after x_(i+1), and its first label stands at place i + 2. U = 3:

        place          0    1    2    3    4    5
        data           x_0  x_1  x_2  x_3  x_4  x_5
        anchor 0       h_0  x_1  y_2  y_3  y_4
        anchor 1            h_1  x_2  y_3  y_4  y_5

    Returns: anchors (B, A), labels (B, A, U) as indices into draft_ids, counts (B, A) in use.
    """
    length = batch.input_ids.shape[1]
    device = batch.input_ids.device
    learns = batch.loss_mask & (torch.arange(length, device=device) >= 2)  # (B, T)
    asked = batch.hidden[:, :-1][learns[:, 1:]]  # (learnt places, D) h_t is asked for y_(t + 1)
    best = torch.zeros_like(batch.input_ids)  # (B, T) y_t where it is learnt
    best[learns] = common.target_logits(target, asked, drafter.draft_ids).argmax(-1)
    # The A largest of random numbers choose first labels; 0, where nothing is learnt, comes last.
    generators = [torch.Generator().manual_seed(seed) for seed in batch.seed.tolist()]
    draw = torch.stack([torch.rand(length, generator=each) for each in generators])  # (B, T)
    first = (draw.to(device) * learns).topk(min(drafter.config.anchors, length)).indices  # (B, A)
    places = first[..., None] + torch.arange(drafter.config.window, device=device)  # (B, A, U)
    inside = places < length  # (B, A, U)
    places = places.clamp(max=length - 1)
    sequence = torch.arange(len(learns), device=device)[:, None, None]  # (B, 1, 1)
    used = learns[sequence, places] & inside  # (B, A, U)
    if drafter.config.cut_labels:  # labels after a difference to the data follow another text
        agrees = drafter.draft_ids[best] == batch.input_ids  # (B, T)
        used[..., 1:] &= agrees[sequence, places][..., :-1]
    counts = used.long().cumprod(-1).sum(-1)  # up to the first label that is not in use
    return (first - 2).clamp(min=0), best[sequence, places], counts


def training_logits(drafter: Drafter, target, batch: common.Batch, anchors: Tensor) -> Tensor:
    """Logits (B, A, S, Vd + 1) after the anchors (B, A)."""
    slots = drafter.num_slots
    dtype = drafter.norm.weight.dtype
    embeds = target.get_input_embeddings()(batch.input_ids[:, 1:]).to(dtype)  # (B, n, D)
    places = torch.arange(embeds.shape[1], device=anchors.device).expand(len(anchors), -1)  # (B, n)
    ahead = anchors[..., None] + torch.arange(1, slots + 1, device=anchors.device)  # (B, A, S)
    places = torch.cat([places, ahead.flatten(1)], dim=1)  # (B, n + A S)
    rotary = common.rotary(target, places, -1)  # cos, sin (B, n + A S, R)
    lm_head = common.draft_head(target, drafter.draft_ids).to(dtype)
    mask = None if drafter.config.kind == "medusa" else slot_mask(anchors, embeds.shape[1], slots)
    return drafter(batch.hidden[:, :-1].to(dtype), embeds, anchors, rotary, lm_head, mask)


def first_token(log_q: Tensor) -> Tensor:
    """Log-probability (W, Vd) of the sequence's first token, given log_q (W, S, Vd + 1)."""
    still_blank = F.pad(log_q[:, :-1, -1].cumsum(-1), (1, 0))  # (W, S) all slots before this one
    return (still_blank[..., None] + log_q[..., :-1]).logsumexp(1)  # whatever slot it stands in


def first_target(drafter: Drafter, target, batch: common.Batch, anchors: Tensor) -> Tensor:
    """The target's probabilities (B, A, Vd) of the token that the slots begin with."""
    newest = batch.hidden.take_along_dim(anchors[..., None] + 1, 1)  # (B, A, D) of x_(i+1)
    return common.target_logits(target, newest).softmax(-1)[..., drafter.draft_ids]


def ctc_loss(log_q: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Minus the log-probability (W,) of windows; 0 where none fits (they can need 2U - 1 slots).

    Of U labels: that the sequence is these (Eq. 6). Of fewer: that it begins so, summed over slots
    in which the last of them may be written first (Graves et al., 2006), as in `prefix_search`.
    Args: log_q: (W, S, Vd + 1). labels: (W, U). counts: (W,) how many of them to take, >= 1.
    """
    never = -1e30  # log 0, but finite for the gradients' sake
    symbols = F.pad(labels, (1, 0), value=log_q.shape[-1] - 1)  # (W, U + 1) the blank first
    log_q = log_q.gather(2, symbols[:, None].expand(-1, log_q.shape[1], -1))  # (W, S, U + 1)
    repeats = F.pad(labels[:, 1:] == labels[:, :-1], (1, 0))  # (W, U) enters after a blank only
    in_token = torch.full_like(log_q[:, 0], never)  # (W, U + 1) 0 to U labels written, a token last
    in_blank = F.pad(in_token[:, 1:], (1, 0))  # a blank last; none written at first
    entered = []
    for log_q_slot in log_q.unbind(1):  # (W, U + 1)
        either = torch.logaddexp(in_blank, in_token)
        before = torch.where(repeats, in_blank[:, :-1], either[:, :-1])  # (W, U) a label less
        entered.append(F.pad(before + log_q_slot[:, 1:], (1, 0), value=never))  # (W, U + 1)
        in_blank = either + log_q_slot[:, :1]
        in_token = torch.logaddexp(in_token + log_q_slot, entered[-1])
    exactly = torch.logaddexp(in_blank, in_token)[:, -1]  # (W,)
    begins = torch.stack(entered).logsumexp(0).gather(1, counts[:, None])[:, 0]  # (W,)
    log_p = torch.where(counts == labels.shape[1], exactly, begins)
    return -log_p.where(log_p > never / 2, 0.0)


def loss(drafter: Drafter, target, batch: common.Batch) -> Tensor:
    """CTC loss of the windows given the slots (Eq. 1-11), or a cross-entropy slot by slot.

    `first_token` adds the cross-entropy of the first token to the target's own distribution.
    Returns: the mean over anchors times the loss tokens, by which train.py divides.
    """
    anchors, labels, counts = windows(drafter, target, batch)
    teaches = counts > 0  # (B, A) W of them
    logits = training_logits(drafter, target, batch, anchors)[teaches]
    log_q = logits.float().log_softmax(-1)  # (W, S, Vd + 1)
    labels = labels[teaches]  # (W, U)
    counts = counts[teaches]  # (W,)
    if not len(counts):  # no anchor teaches: 0, by which every parameter still gets a gradient
        return log_q.sum()
    if drafter.config.kind == "ctc":
        total = ctc_loss(log_q, labels, counts).sum()
    else:  # slot j for token j, discounted by 0.8^j as Medusa does
        place = torch.arange(labels.shape[1], device=labels.device)  # (U,)
        weight = 0.8**place * (place < counts[:, None])  # (W, U)
        surprise = F.nll_loss(log_q.flatten(0, 1), labels.flatten(), reduction="none")  # (W U,)
        total = surprise @ weight.flatten()
    if drafter.config.first_token:
        p_target = first_target(drafter, target, batch, anchors)[teaches]  # (W, Vd)
        total = total - drafter.config.first_token * (p_target * first_token(log_q)).sum()
    return total / len(counts) * batch.loss_mask.sum()


def alpha(drafter: Drafter, target, batch: common.Batch) -> tuple[Tensor, int]:
    """Acceptance of the first draft token: sum over anchors of sum_x min(p_target, q_draft)."""
    anchors, _, counts = windows(drafter, target, batch)
    teaches = counts > 0  # (B, A) W of them
    logits = training_logits(drafter, target, batch, anchors)[teaches]  # (W, S, Vd + 1)
    q_draft = first_token(logits.float().log_softmax(-1)).exp()  # (W, Vd)
    p_target = first_target(drafter, target, batch, anchors)[teaches]  # (W, Vd)
    return torch.minimum(p_target, q_draft).sum(), len(q_draft)


# ------------------------------------------------------------------------------------ CTC transform


def collapse(alignment, blank: int) -> tuple:
    """beta^-1: merge equal neighbours, then drop blanks (2.3): (a, a, e, a) -> (a, a), e blank."""
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != blank)


def alignments(q_slots: Tensor, symbols: int, candidates: int, merge: bool = True) -> dict:
    """The paper's transform: collapse the most probable combinations of top symbols (3.3).

    Slots are independent given the context, so keeping the best after each slot is exact.
    Args: q_slots: (S, Vd + 1) probabilities. symbols: considered per slot, the blank among them.
        candidates: kept. merge: False takes a combination up to its first blank (Medusa verify).
    Returns: {prefix, of indices into draft_ids: probability of the combinations that begin so}.
    """
    blank = q_slots.shape[-1] - 1
    top = q_slots.topk(min(symbols, q_slots.shape[-1]))  # (S, k) each
    raw = [(1.0, ())]  # (probability, combination)
    for likely, q_likely in zip(top.indices.tolist(), top.values.tolist()):
        longer = []
        for probability, combination in raw:
            for symbol, q in zip(likely, q_likely):
                longer.append((probability * q, (*combination, symbol)))
        raw = heapq.nlargest(candidates, longer)
    worth = defaultdict(float)
    for probability, combination in raw:
        first_blank = (*combination, blank).index(blank)
        sequence = collapse(combination, blank) if merge else combination[:first_blank]
        for end in range(1, len(sequence) + 1):
            worth[sequence[:end]] += probability
    return worth


def prefix_search(q_slots: Tensor, symbols: int, candidates: int) -> dict:
    """CTC prefix beam search: the probability that the collapsed sequence begins with each prefix.

    Sums over alignments (Eq. 6), slot by slot: of the blank and the `symbols` likeliest tokens of
    each slot, through the `candidates` prefixes kept after it. A lower bound, exact if none is cut.
    Alignments of a prefix that end in a blank are summed apart from those in its last token: only
    after a blank does the same token make it longer. What once entered a prefix never leaves it, so
    these sums are its worth. By hand, slots of a 0.6, e 0.4 and a 0.2, b 0.5, e 0.3, e the blank:

        prefix   entered in slot 1   entered in slot 2    worth
        a        a    0.6            e a   0.4 x 0.2      0.68     a a merges: it is in already
        b                            e b   0.4 x 0.5      0.20
        a b                          a b   0.6 x 0.5      0.30     a a would take three slots: a e a

    Args: as for alignments, but `symbols` tokens and the blank. Returns: {prefix: probability}.
    """
    top = q_slots[:, :-1].topk(min(symbols, q_slots.shape[-1] - 1))  # (S, k) each
    by_slot = zip(q_slots[:, -1].tolist(), top.indices.tolist(), top.values.tolist())
    worth = defaultdict(float)
    in_blank = {(): 1.0}  # alignments of a prefix that end in a blank
    in_token = {(): 0.0}  # and in its last token
    for q_blank, likely, q_likely in by_slot:
        new_blank = defaultdict(float)
        new_token = defaultdict(float)
        for prefix in in_blank:
            either = in_blank[prefix] + in_token[prefix]
            new_blank[prefix] += either * q_blank
            for token, q in zip(likely, q_likely):
                entering = either * q
                if prefix and token == prefix[-1]:
                    new_token[prefix] += in_token[prefix] * q  # merges
                    entering = in_blank[prefix] * q
                if entering:
                    longer = (*prefix, token)
                    worth[longer] += entering
                    new_token[longer] += entering
        total = {prefix: new_blank[prefix] + new_token[prefix] for prefix in new_blank | new_token}
        survivors = heapq.nlargest(candidates, total, key=total.get)
        in_blank = {prefix: new_blank[prefix] for prefix in survivors}
        in_token = {prefix: new_token[prefix] for prefix in survivors}
    return worth


def token_tree(worth, draft_ids: Tensor, nodes: int, depth: int, least_worth=0.0) -> common.Draft:
    """A trie of the `nodes` likeliest prefixes, none longer than `depth` or below `least_worth`."""
    place = {(): -1}  # {prefix: its node}
    tokens = []
    parents = []
    for prefix in sorted(worth, key=lambda prefix: (-worth[prefix], len(prefix))):
        if len(tokens) >= nodes or worth[prefix] < least_worth:
            break
        if len(prefix) <= depth and prefix[:-1] in place:
            place[prefix] = len(tokens)
            tokens.append(prefix[-1])
            parents.append(place[prefix[:-1]])
    index = torch.tensor(tokens, dtype=torch.long, device=draft_ids.device)
    return common.Draft(draft_ids[index], torch.tensor(parents, dtype=torch.long))


# ----------------------------------------------------------------------------------------- decoding


@dataclass
class Memory:
    """What the drafter keeps from round to round of one answer."""

    cache: common.GrowingCache  # keys and values of the context rows
    lm_head: nn.Module  # the target's, for the draft vocabulary, D -> Vd


def new_memory(drafter: Drafter, target) -> Memory:
    """An empty memory, to begin an answer with."""
    return Memory(common.GrowingCache(1), common.draft_head(target, drafter.draft_ids))


def propose(drafter, target, input_ids: Tensor, features: Tensor, memory: Memory) -> Tensor:
    """Fill the slots after the newest token, in one pass: probabilities q_slots (S, Vd + 1).

    Args: input_ids: (1, P + 1) committed tokens. features: (1, n >= 1, D) of the target since the
        last call, the last one that of token P - 1. memory: from new_memory.
    """
    new = features.shape[1]  # n
    ahead = torch.arange(-new, drafter.num_slots, device=input_ids.device)[None]  # (1, n + S)
    anchor = ahead.new_full((1, 1), new - 1)
    embeds = target.get_input_embeddings()(input_ids[:, -new:])  # (1, n, D)
    rotary = common.rotary(target, input_ids.shape[1] - 1 + ahead, -1)  # at places P - n, ...
    logits = drafter(features, embeds, anchor, rotary, memory.lm_head, cache=memory.cache)
    if drafter.config.kind != "medusa":
        memory.cache.crop(-drafter.num_slots)
    return logits[0, 0].float().softmax(-1)


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    transform=None,
    symbols=None,
    candidates=None,
    nodes=None,
    least_worth=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=ctc_drafter.generate, drafter=drafter)`: lossless.

    Args: transform to copies: as in Config. stats, token_streamer: a common.Stats, a streamer.
    Returns: (1, T') prompt and new tokens. Raises: ValueError: bad options; see common.prefill.
    """
    given = {"transform": transform, "symbols": symbols, "candidates": candidates}
    given |= {"nodes": nodes, "least_worth": least_worth, "copies": copies}
    config = replace(drafter.config, **{k: v for k, v in given.items() if v is not None})
    cuts = {"symbols": config.symbols, "candidates": config.candidates}
    if config.transform not in ("prefixes", "alignments", "none") or min(cuts.values()) < 1:
        raise ValueError(f"{config.transform}, {cuts}: prefixes, alignments or none; both from 1")
    stats = stats or common.Stats()
    lookup = common.Lookup(config.copies)
    memory = new_memory(drafter, target)
    cache, features = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    timer = "prefill"  # the first pass reads the whole prompt
    done = False
    while not done:
        room = generation_config.max_length - input_ids.shape[1] - 1  # one place is the bonus's
        draft = common.chain([], input_ids)
        if features.shape[1] and room:  # not after a prompt of one token, nor for a last token
            with stats.timer(timer):
                q_slots = propose(drafter, target, input_ids, features, memory)
            with stats.timer("transform"):
                if config.transform == "prefixes":
                    worth = prefix_search(q_slots, **cuts)
                else:
                    worth = alignments(q_slots, **cuts, merge=config.transform == "alignments")
                draft = token_tree(worth, drafter.draft_ids, config.nodes, room, config.least_worth)
            stats.note(q_slots=q_slots, worth=worth, draft_ids=drafter.draft_ids)
            timer = "draft"
        with stats.timer(timer):
            draft = lookup.merge(draft, input_ids, room)
        tokens, _, features = common.verify(
            target, input_ids, draft, cache, logits_processor, generation_config.do_sample, stats
        )
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "ctc_drafter")
