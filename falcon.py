"""Falcon: a semi-autoregressive (SAR) drafter (Gao et al., AAAI 2025).

Paper: arXiv:2412.12639. Slot i pairs the target's last hidden
state h_i (a "feature") with the next token x_(i+1). It predicts
h_(i+k), which the LM head turns into token x_(i+k+1). A pass
drafts k tokens, in the newest k slots. These form a block: they
attend to each other and to all earlier blocks. The next pass
reads the predictions as its block. A draft is a token tree that
grows by k levels per pass. The paper's example (3.1) has k = 2
and newest token x_3; f_draft_i is the prediction of h_i:

    (h_1, x_2) (h_2, x_3) -> f_draft_3, f_draft_4 -> x_4, x_5
    (f_draft_3, x_4) (f_draft_4, x_5) -> x_6, x_7

In training, coupled sequential glancing distillation (CSGD) shows
some slots their answers as inputs. In the first line, slot 1 then
holds (h_3, x_4), and has no loss. Slot 2, predicting x_5, sees x_4.

Names that differ: t_i is x_i here, f_i is h_i (`features`,
`answers`), p and p^draft are `p_target` and `q_draft`, omega_dist
is `distill_weight`.

Deviations, and choices where the paper is silent:
    1. The code predicts k places ahead, as in 3.1; Eq. 1, one.
    2. Blocks begin at random in training (`relaxed_mask`); in
       decoding they are counted back from the newest slot.
    3. CSGD reveals the text's tokens (the paper: the target's) in
       slots that `glance` chooses, and gives them no loss.
    4. Features, embeddings and predictions are normalised; layers
       start as the target's top ones; `fusion="linear"` is ours.
    5. Drafts, losses on tokens and the Hamming distance cover only
       frequent tokens (`draft_vocab`).
    6. The default tree takes two passes (the paper: four), and its
       nodes are never sampled (the paper's are, when sampling).
The shipped drafter has linear fusion, omega_dist = 1, nine nodes
in two passes, and no CSGD in its last stage of training.

Licence: Apache-2.0.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import common
from common import option


def layered_tree(counts: list[int]) -> list[list[int]]:
    """A tree with counts[d] nodes at depth d + 1.

    A node is the path of ranks to it: [0, 2] is the third choice
    after the first. Likely tokens get more children (Figure 5).
    Our rule: a level keeps the paths with the smallest products of
    (rank + 1). [2, 3] gives [0] [1], [0, 0] [0, 1] [1, 0].
    """
    tree = []
    level = [[]]
    for count in counts:
        grown = []
        for path in level:
            grown += [[*path, rank] for rank in range(count)]
        grown.sort(key=lambda path: (math.prod(rank + 1 for rank in path), path))
        level = grown[:count]
        tree += level
    return tree


def checked_tree(tree, vocab: float) -> list[list[int]]:
    """Check the paths and sort them by depth."""
    try:
        paths = sorted({tuple(path) for path in tree})
    except TypeError:
        raise common.UserError(f"tree {tree!r}: give a list of paths, as [[0], [0, 1]]") from None
    for path in paths:
        name = f"tree path {list(path)}"
        good = all(isinstance(rank, int) and 0 <= rank < vocab for rank in path)
        if not path or not good:
            raise common.UserError(f"{name}: give a list of ranks from 0 on, below {vocab}")
        if path[:-1] not in [(), *paths]:
            raise common.UserError(f"{name}: add its parent {list(path[:-1])}")
    return [list(path) for path in sorted(paths, key=len)]


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    k: int = option(2, "tokens predicted by a pass")
    num_layers: int = option(2, "attention layers (Figure 2)")
    intermediate_size: int = option(1536, "width of the feed-forward")
    fusion: str = option("lstm", "lstm or linear")
    csgd: bool = option(True, "coupled sequential glancing distillation")
    noise: float = option(0.1, "features get U(-noise, noise) in training")
    distill_weight: float = option(0.1, "omega_dist, weight of the losses on tokens")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    tree: list = option(lambda: layered_tree([4, 4, 3, 2]), "nodes, as rank paths", decode=True)

    def __post_init__(self):
        common.at_least(self, k=1, num_layers=1, noise=0, distill_weight=0, draft_vocab=0)
        common.one_of(self, fusion=("lstm", "linear"))
        vocab = self.target.get("vocab_size", math.inf)
        size = min(self.draft_vocab or vocab, vocab)
        self.tree = checked_tree(self.tree, size)


VARIANTS = {
    "chain": {"tree": layered_tree([1, 1, 1, 1])},  # Table 4
    "one_pass": {"tree": layered_tree([3, 4])},  # with k = 2
    "paper": {"tree": layered_tree([20, 19, 19, 15, 16, 10, 10, 9])},  # widths of Figure 5
}


# -------------------------------------------------------------------------------- architecture


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The SAR head (3.2); the LM head follows it."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # no K, V of the target
        shape = config.target
        width = shape["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        if config.fusion == "linear":
            self.fusion = nn.Linear(2 * width, width)
        else:
            self.fusion = nn.LSTM(2 * width, width, num_layers=2, batch_first=True)
        llama = common.llama_config(shape, config.intermediate_size)
        layers = [LlamaDecoderLayer(llama, n) for n in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        vocab_ids = common.placeholder_ids(shape, config.draft_vocab)
        self.register_buffer("vocab_ids", vocab_ids)

    def fuse(self, target, features: Tensor, token_ids: Tensor, state=None):
        """Fuse the feature and token of each slot.

        The LSTM reads slots in order; only `attend` looks ahead.

        features: (n, t, D), in n sequences or branches.
        token_ids: (n, t), each one step ahead of its feature.
        state: the LSTM's (h, c) after earlier slots, each (2, n, D),
            for its two layers.
        Returns fused slots (n, t, D), new state (() if linear).
        """
        embeds = target.get_input_embeddings()(token_ids)
        embeds = self.embed_norm(embeds.to(features.dtype))
        features = self.feature_norm(features)
        pairs = torch.cat([features, embeds], dim=-1)
        if self.config.fusion == "linear":
            return self.fusion(pairs), ()
        # An LSTM is slow in bfloat16.
        with torch.autocast(pairs.device.type, enabled=False):
            return self.fusion(pairs, state)

    def attend(
        self,
        target,
        x: Tensor,  # (B, r, D) fused slots
        positions: Tensor,  # (1, r) slot numbers
        mask: Tensor,  # (B, 1, r, P_own + r) bool
        cache=None,  # the drafter's, of P_own rows
    ) -> Tensor:
        """Predict f_draft (B, r, D), k places ahead (3.1)."""
        # Rotary tables of the target's top layer.
        tables = common.rotary(target, positions, -1)
        tables = common.whole_rotary(tables, self.config.target["head_dim"])
        tables = tuple(table.to(x.dtype) for table in tables)
        for layer in self.layers:
            x = layer(x, mask, past_key_values=cache, position_embeddings=tables)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with the target's top layers."""
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    if config.fusion == "linear":
        # Start as the sum of normed feature and embedding.
        identity = torch.eye(config.target["hidden_size"])
        drafter.fusion.weight.data.copy_(identity.repeat(1, 2))
        nn.init.zeros_(drafter.fusion.bias)
    top_layers = common.target_layers(target)[-config.num_layers :]
    pairs = zip(drafter.layers, top_layers)
    common.start_from(drafter, target, token_counts, pairs)
    return drafter


# -------------------------------------------------------------------------- training objective


def relaxed_mask(length: int, k: int, phase: Tensor) -> Tensor:
    """Relaxed causal mask (3.4).

    A slot sees its own and earlier blocks. The answer of slot i is
    the input of slot i + k, in the next block. Later blocks are
    hidden, so no slot can read its answer.
    k = 2, phase 1:

           key   0  1  2  3  4        blocks: 0 | 1 2 | 3 4
        slot 0   x  .  .  .  .
             1   x  x  x  .  .
             2   x  x  x  .  .
             3   x  x  x  x  x
             4   x  x  x  x  x

    phase: (B,) how many slots the first block lacks, 0 to k - 1.
    It varies, so that tokens are trained at all places in a block.
    Returns (B, 1, S, S) bool, True = may attend; S is `length`.
    """
    slots = torch.arange(length, device=phase.device)
    block = (slots + phase[:, None]) // k  # (B, S)
    return (block[:, :, None] >= block[:, None, :])[:, None]


class Slots(NamedTuple):
    """The S = T - 1 slots of each sequence."""

    features: Tensor  # (B, S, D) h_i
    token_ids: Tensor  # (B, S) x_(i+1)
    answers: Tensor  # (B, S, D) h_(i+k)
    answer_ids: Tensor  # (B, S) x_(i+k+1)
    learns: Tensor  # (B, S) bool, has a loss
    phase: Tensor  # (B,) of `relaxed_mask`


def training_slots(drafter, batch) -> Slots:
    """The slots of a batch. k = 2, T = 6:

        slot      0        1        2        3        4
        input   h_0 x_1  h_1 x_2  h_2 x_3  h_3 x_4  h_4 x_5
        answer  h_2 x_3  h_3 x_4  h_4 x_5  h_5 -      -

    A slot learns if the loss mask is True at x_(i+k+1). The last k
    do not: for them this token lies beyond the text.
    """
    k = drafter.config.k
    hidden = batch.hidden.to(drafter.norm.weight.dtype)  # (B, T, D)
    return Slots(
        features=hidden[:, :-1],
        token_ids=batch.input_ids[:, 1:],
        answers=F.pad(hidden, (0, 0, 0, k))[:, k:-1],
        answer_ids=F.pad(batch.input_ids, (0, k))[:, k + 1 :],
        learns=F.pad(batch.loss_mask, (0, k))[:, k + 1 :],
        phase=batch.seed % k,
    )


def generators(seed: Tensor, use: int) -> list[torch.Generator]:
    """One per sequence; `use` is 0 for `glance`, 1 for noise."""
    return [torch.Generator().manual_seed(2 * n + use) for n in seed.tolist()]


def glance(wrong: Tensor, learns: Tensor, rate: float, k: int, seed: Tensor) -> Tensor:
    """Choose the slots to reveal answers in (3.2).

    In each sequence, N = rate * d (rounded), where the Hamming
    distance d is the number of wrong slots. Visit the blocks of
    `relaxed_mask` (phase = seed % k) in random order; skip an
    incomplete first block, and blocks in which no slot learns. In
    each, draw r uniformly from 1..k-1 and reveal those of its first
    r slots that learn, until N slots are revealed or no block is
    left. The later slots of the block see these answers.

    The paper reveals runs of slots before those to be predicted
    (Figure 2), but does not say which; random blocks and lengths
    are the authors'. Random numbers come from `generators(seed, 0)`,
    so that neither padding nor other sequences change the choice.

    For example, k = 3, phase 1, N = 3; slots 8 to 10 do not learn.
    Block 5 6 7 is visited first, with r = 2, then block 2 3 4, also
    with r = 2, but after one more slot N is reached:

        blocks       0 1 | 2 3 4 | 5 6 7 | 8 9 10
        revealed     . .   x . .   x x .   . . .

    wrong: (B, S) bool, True where a slot learns and its likeliest
    token is not the target's. learns: (B, S) bool. rate: lambda.
    Returns (B, S) bool, True where revealed.
    """
    revealed = torch.zeros_like(learns, device="cpu")
    for row, generator in enumerate(generators(seed, 0)):
        learning = learns[row].tolist()
        slots = range(len(learning))
        phase = int(seed[row]) % k
        starts = slots[-phase % k :: k]  # of whole blocks
        blocks = [slots[n : n + k] for n in starts]
        blocks = [b for b in blocks if any(learning[b.start : b.stop])]
        visits = torch.randperm(len(blocks), generator=generator)
        order = []  # slots, as they are visited
        for n in visits.tolist():
            run = torch.randint(1, k, (), generator=generator)  # r
            order += [slot for slot in blocks[n][:run] if learning[slot]]
        d = int(wrong[row].sum())
        count = round(rate * d)  # N
        revealed[row, order[:count]] = True
    return revealed.to(learns.device)


def noisy(features: Tensor, amplitude: float, seed: Tensor) -> Tensor:
    """Features (B, S, D) plus U(-amplitude, amplitude) (3.2).

    The noise stands in for the errors of predicted features, which
    later passes read. It depends on a sequence's seed alone.
    """
    noise = []
    for generator in generators(seed, 1):
        row = torch.empty(features.shape[1:])
        noise.append(row.uniform_(-1, 1, generator=generator))
    return features + amplitude * torch.stack(noise).to(features)


def predict(drafter: Drafter, target, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """f_draft (M, D), logits (M, Vd), answers (M, D) of slots that learn."""
    length = slots.features.shape[1]
    positions = torch.arange(length, device=slots.phase.device)[None]
    mask = relaxed_mask(length, drafter.config.k, slots.phase)
    fused, _ = drafter.fuse(target, slots.features, slots.token_ids)
    f_draft = drafter.attend(target, fused, positions, mask)[slots.learns]
    head = common.draft_head(target, drafter.vocab_ids)
    logits = head.to(f_draft.dtype)(f_draft)
    answers = slots.answers[slots.learns]
    return f_draft.float(), logits.float(), answers.float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """The loss (Eq. 8), summed over M slots, and M."""
    config = drafter.config
    vocab_ids = drafter.vocab_ids
    slots = training_slots(drafter, batch)

    # 1. Predict, count wrong slots, reveal answers.
    if config.csgd and config.k > 1:
        with torch.no_grad():
            _, logits, answers = predict(drafter, target, slots)
        truth = common.target_logits(target, answers, vocab_ids)
        wrong = torch.zeros_like(slots.learns)
        wrong[slots.learns] = logits.argmax(-1) != truth.argmax(-1)
        rate = 0.4 * (1 - batch.progress)  # lambda, by steps
        revealed = glance(wrong, slots.learns, rate, config.k, batch.seed)
        # A revealed slot would only copy: no loss.
        slots = slots._replace(
            features=torch.where(revealed[..., None], slots.answers, slots.features),
            token_ids=torch.where(revealed, slots.answer_ids, slots.token_ids),
            learns=slots.learns & ~revealed,
        )

    # 2. Predict with noise.
    features = noisy(slots.features, config.noise, batch.seed)
    slots = slots._replace(features=features)
    f_draft, logits, answers = predict(drafter, target, slots)
    # 3. Both distributions (Eq. 6 and 7).
    truth = common.target_logits(target, answers, vocab_ids)
    log_p_target = truth.log_softmax(-1)  # (M, Vd)
    log_q_draft = logits.log_softmax(-1)  # (M, Vd)
    # 4. L_reg (a mean over D), L_soft, L_hard (Eq. 2, 3 and 4).
    l_reg = F.smooth_l1_loss(f_draft, answers, reduction="sum")
    l_reg = l_reg / answers.shape[-1]
    l_soft = F.kl_div(log_q_draft, log_p_target, log_target=True, reduction="sum")
    l_hard = F.nll_loss(log_q_draft, log_p_target.argmax(-1), reduction="sum")
    # 5. L_dist with alpha = 0.9; L (Eq. 5 and 8).
    l_dist = 0.9 * l_soft + 0.1 * l_hard
    return l_reg + config.distill_weight * l_dist, slots.learns.sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft), summed over M slots, and M."""
    slots = training_slots(drafter, batch)
    _, logits, answers = predict(drafter, target, slots)
    q_draft = logits.softmax(-1)  # (M, Vd)
    return common.overlap(target, answers, q_draft, drafter.vocab_ids), len(q_draft)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the drafter keeps between rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(drafter.config.num_layers)
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd
        width = drafter.config.target["hidden_size"]
        # The last k - 1 slots, fused, and the LSTM's state after them.
        self.fused = drafter.norm.weight.new_empty(1, 0, width)
        self.state = None


class Pass(NamedTuple):
    """A pass over a block in each of b branches."""

    f_draft: Tensor  # (b, k, D) predictions
    slots: Tensor  # (k,) their numbers
    mask: Tensor  # (b, P_own) rows it attends to
    state: tuple  # LSTM's, two (2, b, D); () if linear


def first_pass(drafter: Drafter, decoding, memory: Memory) -> Pass | None:
    """Feed newly committed slots; None if fewer than k exist.

    Only a full block predicts k tokens. So blocks are counted back
    from the newest slot, and their borders move with it. The newest
    block can contain up to k - 1 old slots. For simplicity, the last
    k - 1 old slots always attend again, also outside it, as slot 3
    below. Memory keeps them fused: fusing them anew would need an
    older LSTM state. Older rows stay as they were computed, with
    earlier borders. k = 3, slots 5 and 6 are new:

        blocks before    0 1 | 2 3 4
        blocks now       0 | 1 2 3 | 4 5 6
        memory.fused             3   4
        fused now                      5 6
        attend                   3   4 5 6   (3 sees 0 to 3)
    """
    k = drafter.config.k
    target = decoding.target
    total = decoding.ids.shape[1] - 1  # P
    if total == 0:  # after a prompt of one token
        return None
    # 1. Fuse the new slots with their tokens.
    new = decoding.hidden  # (1, n, D)
    new_ids = decoding.ids[:, -new.shape[1] :]  # one step ahead
    fused, memory.state = drafter.fuse(target, new, new_ids, memory.state)
    fused = torch.cat([memory.fused, fused], dim=1)  # (1, r, D)
    length = fused.shape[1]  # r
    memory.fused = fused[:, max(0, length - (k - 1)) :]
    if total < k:
        return None
    # 2. Drop the rows of slots that attend again and of the last
    #    draft, accepted or not: its features were predicted.
    memory.cache.cut(total - length)
    # 3. Attend in parts, because one mask for a whole prompt would grow with the
    #    square of its length. Parts are counted back from the newest slot, as blocks
    #    are: a slot attends to its whole block, so a part must not end within one.
    slots = torch.arange(total, device=fused.device)
    block = (slots - total) // k  # (P,) ..., -2, -1
    borders = sorted(range(length - 256 * k, 0, -256 * k))
    for part in fused.tensor_split(borders, dim=1):  # (1, n, D)
        start = memory.cache.get_seq_length()  # P_own
        end = start + part.shape[1]  # P_own + n
        mask = block[start:end, None] >= block[:end]
        positions = slots[None, start:end]
        f_draft = drafter.attend(target, part, positions, mask[None, None], memory.cache)
    return Pass(f_draft[:, -k:], slots[-k:], mask[-1:], memory.state)


def tree_mask(mask: Tensor, origins: Tensor, k: int) -> Tensor:
    """What each branch may attend to (Figure 3).

    A branch attends to its own block and to all that the branch it
    continues attended to. Its k slots share a row of the mask.
    k = 2; in pass 3, D continues A, and E continues C. The columns
    are cache rows:

                  committed A A B B C C   D D E E
        pass 2  A   x x x   x x . . . .
                B   x x x   . . x x . .
                C   x x x   . . . . x x
        pass 3  D   x x x   x x . . . .   x x . .
                E   x x x   . . . . x x   . . x x

    mask: (b, P_own) bool, of the pass before.
    origins: (n,) the branch that each new branch continues.
    Returns (n, P_own + n k) bool.
    """
    own = torch.eye(len(origins), dtype=torch.bool, device=mask.device)
    own = own.repeat_interleave(k, 1)  # (n, n k)
    return torch.cat([mask[origins], own], dim=1)


def later_pass(drafter, decoding, memory, before: Pass, origins, blocks) -> Pass:
    """Feed n branches of k predictions each.

    origins: (n,) branches of `before` to continue.
    blocks: n lists of k drafted ids.
    """
    k = drafter.config.k
    # 1. Fuse, without changing `memory.state`.
    features = before.f_draft[origins]  # (n, k, D)
    token_ids = decoding.ids.new_tensor(blocks)  # (n, k)
    state = tuple(x[:, origins] for x in before.state)  # (2, n, D) each
    fused, state = drafter.fuse(decoding.target, features, token_ids, state)
    # 2. Attend, all blocks in one row.
    slots = before.slots + k
    positions = slots.repeat(len(origins))[None]  # (1, n k)
    mask = tree_mask(before.mask, origins, k)  # (n, P_own + n k)
    by_slot = mask.repeat_interleave(k, dim=0)[None, None]
    fused = fused.flatten(0, 1)[None]  # (1, n k, D)
    f_draft = drafter.attend(decoding.target, fused, positions, by_slot, memory.cache)
    return Pass(f_draft[0].unflatten(0, (-1, k)), slots, mask, state)


def propose(drafter, decoding, memory: Memory, config: Config) -> common.Draft:
    """Draft a token tree, k levels per pass (3.4).

    Slot j of a block drafts level j of the pass: the likeliest
    tokens of the slot, by rank. The next pass has one block for
    each node of the last level that has children: the last k
    tokens on the path to this node. k = 2:

        root -+- a -+- c --- e --- f
              |     +- d
              +- b --- c --- g --- h

        pass     1     1     2     2
        slot     0     1     0     1

    Slot 1 ranks c before d, whether a or b was chosen. Pass 2 has
    blocks a c and b c, with equal features but different tokens.
    """
    k = drafter.config.k
    paths = [tuple(path) for path in config.tree if len(path) <= decoding.room]
    latest = first_pass(drafter, decoding, memory) if paths else None
    if latest is None:
        return common.chain([], decoding.ids, k=k)  # no draft
    ranks = 1 + max(map(max, config.tree))
    drafted = {(): []}  # the tokens on each path
    q = []
    tips = [()]  # a branch drafts below its tip
    deepest = len(paths[-1])  # paths are sorted by depth
    for depth in range(0, deepest, k):  # of the tips
        # 1. Run another pass, with a branch for each parent.
        if depth > 0:
            old_tips = tips
            tips = sorted({path[:depth] for path in paths if len(path) > depth})
            origins = torch.tensor([old_tips.index(tip[:-k]) for tip in tips])
            blocks = [drafted[tip][-k:] for tip in tips]
            latest = later_pass(drafter, decoding, memory, latest, origins, blocks)
        # 2. Rank the tokens of its n k slots.
        logits = memory.head(latest.f_draft)  # (n, k, Vd)
        top = logits.softmax(-1, dtype=torch.float32).topk(ranks)
        top_q = top.values.tolist()
        top_ids = drafter.vocab_ids[top.indices].tolist()
        # 3. Add k levels, one per slot.
        for path in paths:
            slot = len(path) - depth - 1
            if 0 <= slot < k:
                branch = tips.index(path[:depth])
                rank = path[-1]
                token = top_ids[branch][slot][rank]
                drafted[path] = [*drafted[path[:-1]], token]
                q.append(top_q[branch][slot][rank])
    # Without `probs`, `verify` takes each token from the target and
    # accepts the node that holds it: the output follows the target.
    node_of = {path: n for n, path in enumerate([(), *paths], -1)}
    tokens = [drafted[path][-1] for path in paths]
    return common.Draft(
        decoding.ids.new_tensor(tokens),
        torch.tensor([node_of[path[:-1]] for path in paths]),
        q=torch.tensor(q),
        notes={"k": k},
    )


@torch.no_grad()
def drafts(decoding, drafter, config: Config):
    """Yield one draft per round; the caller verifies each."""
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, config)


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """Lossless decoding, as a `custom_generate` of transformers.

    target.generate(..., custom_generate=falcon.generate, drafter=...)

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
    common.demo(generate, Drafter, "falcon")
