"""CTC-drafter: parallel slots, a sequence-level loss, collapse before verifying (Wen et al., 2024,
arXiv:2412.00061).

From the target's last hidden states one transformer layer fills S slots after the newest token in a
single pass. Slots do not stand for positions: each holds a token or a blank, and a sequence is what
is left of the slots when repeats are merged and blanks dropped. The CTC loss sums over all ways to
write the target's continuation into the slots, so that their choices are trained together although
they are made at once. x_4 the newest token, e the blank:

    slots   x_5  x_5  e  x_6  e  x_7  x_7  e    ->  x_5 x_6 x_7       merge, then drop
            x_5  e  x_5  x_6  ...               ->  x_5 x_5 x_6       a genuine repeat has a blank
            between

    symbol            name here                   section      function
    F, F^             features; hidden            3.2, Eq. 9   Drafter.forward
    epsilon           index Vd, Drafter.blank     2.3          Drafter.forward
    beta^-1           collapse                    2.3          collapse
    P(Y|X)            alignments summed           Eq. 1, 3-8   loss
    top k, raw        symbols, candidates         3.3          alignments
    CTC transform     transform                   3.3          alignments, prefix_search
    gamma, beta       speedup, tau                Eq. 12, 13   bench.py

Deviations
    1. upstream != paper: the released code drafts token by token with EAGLE's loop; this is the
       parallel drafter of the paper: the slots after every position see the features up to it and
       one another, and nothing else.
    2. paper silent: the drafter reads the newest token's embedding next to the features, as
       upstream's does. A slot starts as its position's row plus a learned vector; S = 2U slots are
       trained on the next U tokens.
    3. ours: the tree is built after the collapse, as a trie, so masks and positions are those of
       any token tree. Upstream masks out collapsed nodes of a tree that was built before, and so
       loses exactness.
    4. ours: `prefix_search` ranks prefixes by the probability of all their alignments, `alignments`
       (the paper) by those among the most probable combinations. Nodes are taken by that value, at
       most `nodes` of them.
    5. ours: a random sample of anchors per sequence and step, layers that start as copies of the
       target's, drafts of frequent tokens only (`draft_vocab`). Labels are the target's argmax
       among those, given the data's tokens.
    6. ours: Medusa's heads (`kind="medusa"`, Table 2) share the target's LM head, and read what the
       slots read.
    7. ours: lossless sampling too. The tree is always deterministic, so the verifier draws from the
       target and descends where the draw is a node, which is exact.
"""

import heapq
from collections import defaultdict
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
    kind: str = field(
        default="ctc", metadata={"help": "ctc, or medusa: heads and cross-entropy (Table 2)"}
    )
    slots: int = field(
        default=6, metadata={"help": "slots a pass fills, S; Medusa has a head per token instead"}
    )
    window: int = field(default=3, metadata={"help": "tokens ahead to learn, U"})
    anchors: int = field(
        default=64, metadata={"help": "positions per sequence and step to train slots after"}
    )
    intermediate_size: int = field(
        default=1536, metadata={"help": "width of the feed-forward sub-layer"}
    )
    draft_vocab: int = field(
        default=8192, metadata={"help": "draft only the most frequent tokens; 0: all of them"}
    )
    transform: str = field(
        default="prefixes",
        metadata={
            "help": "prefixes (all alignments of each), alignments (the paper's) or none (Medusa "
            "verify)",
            "decode": True,
        },
    )
    symbols: int = field(
        default=10, metadata={"help": "symbols considered per slot", "decode": True}
    )
    candidates: int = field(
        default=16, metadata={"help": "raw combinations, or prefixes, kept", "decode": True}
    )
    nodes: int = field(
        default=10, metadata={"help": "most nodes of the token tree", "decode": True}
    )


VARIANTS = {
    "alignments": {"transform": "alignments"},
    "none": {"transform": "none"},
}  # Table 2's columns

# ------------------------------------------------------------------------------------- architecture


def rope(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R of Dh dimensions of x (B, H, T, Dh) by cos and sin (B, T, R)."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


class SlotAttention(nn.Module):
    """Attention of slots to context rows and slots. The rows have keys and values only: one layer
    needs no more."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, slots: int, rotary, mask: Tensor | None, cache) -> Tensor:
        """x (B, n + m, D), the last `slots` = m of it being slots; rotary (B, n + m, R); mask (B,
        1, m, P + n + m)."""
        split = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(
            1, 2
        )  # (B, H or Hkv, ..., Dh)
        q, k, v = split(self.q_proj(x[:, -slots:])), split(self.k_proj(x)), split(self.v_proj(x))
        q, k = rope(q, [table[:, -slots:] for table in rotary]), rope(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, m, D)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The Attention Draft Module, or Medusa's heads. Embeddings and LM head are the target's and
    passed in."""

    def __init__(self, config: Config):
        super().__init__()
        if config.kind not in ("ctc", "medusa"):
            raise ValueError(f"unknown kind {config.kind!r}; take ctc or medusa")
        self.config, self.kv_layers = (
            config,
            [],
        )  # reads the target's features, not its keys and values
        shape, hidden, vocab = (
            config.target,
            config.target["hidden_size"],
            config.target["vocab_size"],
        )
        self.feature_norm, self.embed_norm, self.norm = (
            nn.RMSNorm(hidden, eps=1e-5) for _ in range(3)
        )
        self.fusion = nn.Linear(2 * hidden, hidden, bias=False)
        if config.kind == "medusa":
            self.heads = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.window))
        else:
            self.slots = nn.Parameter(0.02 * torch.randn(config.slots, hidden))
            self.input_layernorm, self.post_attention_layernorm = (
                nn.RMSNorm(hidden, eps=1e-5) for _ in range(2)
            )
            self.self_attn = SlotAttention(
                hidden, shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
            )
            self.mlp = SwiGLU(hidden, config.intermediate_size)
            self.blank = nn.Linear(hidden, 1)
        self.register_buffer(
            "draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab))
        )  # (Vd,)

    def forward(
        self,
        features: Tensor,
        embeds: Tensor,
        anchors: Tensor,
        rotary,
        head: nn.Module,
        mask: Tensor | None = None,
        cache=None,
    ) -> Tensor:
        """Logits (B, A, S, Vd + 1) of the slots after A chosen rows, the blank last (-inf for
        Medusa).

        Args:
            features: (B, n, D) of the target. embeds: (B, n, D) of the tokens one step ahead.
            anchors: (B, A) which of the n rows. rotary: cos and sin (B, n + A S, R) of rows and
                slots.
            head: the target's LM head for the draft vocabulary, D -> Vd.
            mask: (B, 1, A S, P + n + A S) bool, None for all. cache: holds P earlier rows; gets
                rows and slots.
        """
        rows = self.fusion(
            torch.cat([self.feature_norm(features), self.embed_norm(embeds)], dim=-1)
        )  # (B, n, D)
        chosen = rows.gather(1, anchors[..., None].expand(-1, -1, rows.shape[-1]))[
            :, :, None
        ]  # (B, A, 1, D)
        if self.config.kind == "medusa":
            logits = head(
                self.norm(
                    torch.cat([chosen + F.silu(block(chosen)) for block in self.heads], dim=2)
                )
            )
            return F.pad(logits, (0, 1), value=float("-inf"))
        x = (chosen + self.slots).flatten(1, 2)  # (B, A S, D)
        both = self.input_layernorm(torch.cat([rows, x], dim=1))
        x = x + self.self_attn(both, x.shape[1], rotary, mask, cache)
        x = x + self.mlp(self.post_attention_layernorm(x))
        hidden = self.norm(x).unflatten(1, (-1, self.config.slots))
        return torch.cat([head(hidden), self.blank(hidden)], dim=-1)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from: the layer copied from the target's top one where names and
    shapes agree.

    Args:
        token_counts: (V,) how often each token occurs in the training responses; the top ones can
            be drafted.
    """
    if min(config.slots, config.window, config.anchors) < 1:
        raise ValueError(
            f"slots {config.slots}, window {config.window}, anchors {config.anchors}: each at "
            "least 1"
        )
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        drafter.fusion.weight.copy_(
            torch.eye(len(drafter.fusion.weight)).repeat(1, 2)
        )  # starts as a sum
        for source in list(getattr(target.base_model, "layers", []))[-1:]:
            theirs = dict(source.named_parameters())
            for name, weight in drafter.named_parameters():
                if name in theirs and theirs[name].shape == weight.shape:
                    weight.copy_(theirs[name])
        if hasattr(target.base_model, "norm"):
            drafter.norm.weight.copy_(target.base_model.norm.weight)
    return drafter


# ------------------------------------------------------------------------------- training objective


def slot_mask(anchors: Tensor, length: int, slots: int) -> Tensor:
    """What the slots after each anchor see: the rows up to it, and their own group. Anchors 0 and
    2, S = 2:

                          rows 0 1 2 3    slots a1 a2 b1 b2
        a, after row 0   a1    x . . .          x  x  .  .
                         a2    x . . .          x  x  .  .
        b, after row 2   b1    x x x .          .  .  x  x
                         b2    x x x .          .  .  x  x

    Args: anchors: (B, A) rows. length: number of rows n. Returns: (B, 1, A S, n + A S) bool.
    """
    upto = anchors.repeat_interleave(slots, dim=1)[..., None] >= torch.arange(
        length, device=anchors.device
    )
    group = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(slots)
    own = (group[:, None] == group).expand(len(anchors), -1, -1)  # (B, A S, A S)
    return torch.cat([upto, own], dim=-1)[:, None]


def windows(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors to train on, and what should follow their newest token: the target's argmax tokens.

    Row i holds (h_i, x_(i+1)); its window is the argmax after x_(i+1), x_(i+2), ..., while the data
    is response.

    Returns:
        (anchors (B, A), labels (B, A, U) as indices into draft_ids, counts (B, A) of labels in use;
        0 teaches nothing).
    """
    config, ids = drafter.config, batch.input_ids
    learns = batch.loss_mask & (
        torch.arange(ids.shape[1], device=ids.device) > 1
    )  # a row has two tokens before it
    best, where = torch.zeros_like(ids), learns[:, 1:]
    best[:, 1:][where] = common.target_logits(
        target, batch.hidden[:, :-1][where], drafter.draft_ids
    ).argmax(-1)
    draw = torch.stack(
        [
            torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(int(seed)))
            for seed in batch.seed
        ]
    ).to(ids.device)
    first = (
        (draw * learns).topk(min(config.anchors, ids.shape[1])).indices
    )  # (B, A) the first label's place
    places = first[..., None] + torch.arange(config.window, device=ids.device)  # (B, A, U)
    pick = lambda x: (
        x[:, None].expand(-1, first.shape[1], -1).gather(2, places.clamp(max=ids.shape[1] - 1))
    )
    counts = (pick(learns) & (places < ids.shape[1])).long().cumprod(-1).sum(-1)
    return (first - 2).clamp(min=0), pick(best), counts


def training_logits(drafter: Drafter, target, batch, anchors: Tensor) -> Tensor:
    """Logits (B, A, S, Vd + 1) after the anchors (B, A)."""
    config, rows = drafter.config, batch.input_ids.shape[1] - 1
    dtype = drafter.norm.weight.dtype
    embeds = target.get_input_embeddings()(batch.input_ids[:, 1:]).to(dtype)
    places = torch.arange(rows, device=anchors.device).expand(len(anchors), -1)
    ahead = anchors[..., None] + torch.arange(
        1, config.slots + 1, device=anchors.device
    )  # (B, A, S)
    rotary = common.rotary(target, torch.cat([places, ahead.flatten(1)], dim=1), -1)
    head = common.draft_head(target, drafter.draft_ids).to(dtype)
    return drafter(
        batch.hidden[:, :-1].to(dtype),
        embeds,
        anchors,
        rotary,
        head,
        slot_mask(anchors, rows, config.slots) if config.kind == "ctc" else None,
    )


def loss(drafter: Drafter, target, batch) -> Tensor:
    """CTC loss of the window given the slots (Eq. 3-11), or Medusa's cross-entropy, mean over
    anchors.

    A window that does not fit, because each repeat in it needs a blank between, gives no loss; with
    S >= 2U all fit.
    Args: batch: common.Batch. Returns: the mean times the number of loss tokens, by which train.py
    divides.
    """
    anchors, labels, counts = windows(drafter, target, batch)
    log_q = (
        training_logits(drafter, target, batch, anchors).float().log_softmax(-1)
    )  # (B, A, S, Vd + 1)
    log_q, labels, counts = (
        log_q[counts > 0],
        labels[counts > 0],
        counts[counts > 0],
    )  # (M, S, Vd + 1), (M, U), (M,)
    if drafter.config.kind == "medusa":  # head j for token j, discounted by 0.8^j as Medusa does
        place = torch.arange(labels.shape[1], device=labels.device)
        weight = 0.8**place * (place < counts[:, None])  # (M, U)
        total = -(log_q.gather(2, labels[..., None])[..., 0] * weight).sum()
    else:
        frames = torch.full_like(counts, log_q.shape[1])
        total = F.ctc_loss(
            log_q.transpose(0, 1),
            labels,
            frames,
            counts,
            log_q.shape[-1] - 1,
            "sum",
            zero_infinity=True,
        )
    return total / max(1, len(counts)) * batch.loss_mask.sum()


def alpha(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Acceptance rate at temperature 1 of the first draft token: sum over anchors of sum_x
    min(p_target, q_draft).

    q_draft(x) is the probability that the collapsed sequence begins with x: all slots before x's
    first one are blank.
    """
    anchors, _, counts = windows(drafter, target, batch)
    q_slots = (
        training_logits(drafter, target, batch, anchors)[counts > 0].float().softmax(-1)
    )  # (M, S, Vd + 1)
    still_blank = F.pad(q_slots[:, :-1, -1], (1, 0), value=1.0).cumprod(-1)  # (M, S)
    q_draft = (still_blank[:, None] @ q_slots[..., :-1])[:, 0]  # (M, Vd)
    newest = batch.hidden.gather(
        1, anchors[..., None].expand(-1, -1, batch.hidden.shape[-1]) + 1
    )  # predicts label 1
    p_target = common.target_logits(target, newest[counts > 0]).softmax(-1)[:, drafter.draft_ids]
    return torch.minimum(p_target, q_draft).sum(), len(q_draft)


# ------------------------------------------------------------------------------------ CTC transform


def collapse(alignment, blank: int) -> tuple:
    """beta^-1: merge neighbours that are equal, then drop blanks; (a, a, blank, a) becomes (a,
    a)."""
    return tuple(
        new for new, old in zip(alignment, [None, *alignment]) if new != old and new != blank
    )


def alignments(
    q_slots: Tensor, symbols: int, candidates: int, merge: bool = True
) -> dict[tuple, float]:
    """The paper's transform: collapse the most probable combinations of the slots' top symbols
    (3.3).

    Slots are independent given the context, so keeping the best `candidates` after each slot is
    exact.

    Args:
        q_slots: (S, Vd + 1) probabilities. merge: False takes them as they are, each up to its
            first blank, which no
        target would confirm (Medusa verify).
    Returns:
        {prefix of indices into draft_ids: total probability of the combinations that begin with
        it}.
    """
    blank, raw, value = q_slots.shape[-1] - 1, torch.zeros(1, 0, dtype=torch.long), torch.ones(1)
    for q_top, likely in zip(*(x.cpu() for x in q_slots.topk(min(symbols, blank)))):
        value, pick = (
            (value[:, None] * q_top).flatten().topk(min(candidates, len(value) * len(likely)))
        )
        raw = torch.cat([raw[pick // len(likely)], likely[pick % len(likely), None]], dim=1)
    worth = defaultdict(float)
    for alignment, probability in zip(raw.tolist(), value.tolist()):
        cut = [*alignment, blank].index(blank)
        sequence = collapse(alignment, blank) if merge else tuple(alignment[:cut])
        for end in range(1, len(sequence) + 1):
            worth[sequence[:end]] += probability
    return worth


def prefix_search(q_slots: Tensor, symbols: int, candidates: int) -> dict[tuple, float]:
    """CTC prefix beam search: the probability that the collapsed sequence begins with each prefix,
    all alignments.

    A prefix's mass is kept apart by whether its alignments end in a blank or in its last token,
    since only after a blank does the same token again make the prefix longer. What enters a prefix
    over all slots is its probability.

    Args: as for alignments; `candidates` prefixes survive each slot. Returns: {prefix:
    probability}.
    """
    blanks, (q_top, tokens) = (
        q_slots[:, -1].tolist(),
        q_slots[:, :-1].topk(min(symbols, q_slots.shape[-1] - 1)),
    )
    beams, worth = (
        {(): (1.0, 0.0)},
        defaultdict(float),
    )  # prefix: (mass ending in a blank, in its last token)
    for q_blank, likely in zip(blanks, map(zip, tokens.tolist(), q_top.tolist())):
        grown, likely = defaultdict(lambda: [0.0, 0.0]), list(likely)
        for prefix, (after_blank, after_token) in beams.items():
            grown[prefix][0] += (after_blank + after_token) * q_blank
            for token, q in likely:
                entering = (after_blank + after_token) * q
                if prefix and token == prefix[-1]:
                    grown[prefix][1] += after_token * q
                    entering = after_blank * q
                if entering:
                    worth[(*prefix, token)] += entering
                    grown[(*prefix, token)][1] += entering
        beams = dict(heapq.nlargest(candidates, grown.items(), key=lambda item: sum(item[1])))
    return worth


def token_tree(
    worth: dict[tuple, float], draft_ids: Tensor, nodes: int, depth: int
) -> common.Draft:
    """The trie of the most valuable prefixes, parents first; a prefix is worth no more than what it
    extends."""
    place, tokens, parents = {(): -1}, [], []
    for path in sorted(worth, key=lambda path: (-worth[path], len(path))):
        if len(tokens) < nodes and len(path) <= depth and path[:-1] in place:
            parents.append(place[path[:-1]])
            place[path] = len(tokens)
            tokens.append(path[-1])
    return common.Draft(
        draft_ids[torch.tensor(tokens, dtype=torch.long, device=draft_ids.device)],
        torch.tensor(parents, dtype=torch.long),
    )


# ----------------------------------------------------------------------------------------- decoding


@dataclass
class Memory:
    """What the drafter keeps from round to round of one answer."""

    cache: common.GrowingCache  # keys and values of the context rows
    head: nn.Module  # the target's LM head for the draft vocabulary, D -> Vd


def new_memory(drafter: Drafter, target) -> Memory:
    """An empty memory, to begin an answer with."""
    return Memory(common.GrowingCache(1), common.draft_head(target, drafter.draft_ids))


def propose(drafter: Drafter, target, input_ids: Tensor, hidden: Tensor, memory: Memory) -> Tensor:
    """Fill the slots after the newest token, in one pass: probabilities (S, Vd + 1).

    Args: input_ids: (1, P + 1) committed tokens. hidden: (1, n >= 1, D) the target's features since
        the last call, token P - 1 being the last. memory: from new_memory.
    """
    new, slots, end = hidden.shape[1], drafter.config.slots, input_ids.shape[1] - 1
    places = torch.arange(end - new, end + slots, device=input_ids.device)[
        None
    ]  # the new rows, then the slots
    embeds, newest = (
        target.get_input_embeddings()(input_ids[:, -new:]),
        places.new_full((1, 1), new - 1),
    )
    logits = drafter(
        hidden, embeds, newest, common.rotary(target, places, -1), memory.head, None, memory.cache
    )
    if drafter.config.kind == "ctc":
        memory.cache.crop(-slots)
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
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=ctc_drafter.generate, drafter=drafter)`: lossless
    decoding.

    Args: transform, symbols, candidates, nodes: as in Config. stats: a common.Stats to fill.
    Returns: (1, T') prompt and new tokens.
    """
    config, stats = drafter.config, stats or common.Stats()
    given = {"transform": transform, "symbols": symbols, "candidates": candidates, "nodes": nodes}
    transform, symbols, candidates, nodes = (
        getattr(config, name) if value is None else value for name, value in given.items()
    )
    if transform not in ("prefixes", "alignments", "none") or min(symbols, candidates) < 1:
        raise ValueError(
            f"transform {transform!r}, symbols {symbols}, candidates {candidates}: transform is "
            "prefixes, "
            "alignments or none, the others are at least 1"
        )
    cache, hidden = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    memory, done, started = new_memory(drafter, target), False, False
    while not done:
        room, draft = (
            generation_config.max_length - input_ids.shape[1] - 1,
            common.chain([], input_ids),
        )
        if hidden.shape[1]:  # all but a prompt of one token
            with stats.timer("draft" if started else "prefill"):
                q_slots, started = propose(drafter, target, input_ids, hidden, memory), True
            with stats.timer("transform"):
                worth = (
                    prefix_search(q_slots, symbols, candidates)
                    if transform == "prefixes"
                    else alignments(q_slots, symbols, candidates, merge=transform == "alignments")
                )
                draft = token_tree(
                    worth, drafter.draft_ids, nodes, room
                )  # the bonus token takes one place
        tokens, _, hidden = common.verify(
            target, input_ids, draft, cache, logits_processor, generation_config.do_sample, stats
        )
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "ctc_drafter")
