"""Falcon: a semi-autoregressive (SAR) drafter (Gao et al., AAAI 2025).

Paper: arXiv:2412.12639. A pass of the drafter predicts k tokens. It reads
slots. Slot i pairs the target's last hidden state h_i (a "feature") with the
next token x_(i+1). It predicts the feature h_(i+k), which the target's LM head
turns into token x_(i+k+1). So the newest k slots of a pass give k new tokens.
These slots form a block: they attend to each other and to all earlier blocks.
The next pass reads the predictions as its block. A draft is a token tree that
grows by k levels per pass. The paper's example (3.1) has k = 2 and newest
token x_3; f_draft_i is the prediction of h_i:

    pass 1   (h_1, x_2) (h_2, x_3)  ->  f_draft_3, f_draft_4  ->  x_4, x_5
    pass 2   (f_draft_3, x_4) (f_draft_4, x_5)  ->  x_6, x_7

In training, coupled sequential glancing distillation (CSGD) replaces some
slots' inputs by their answers, what they are to predict. With k = 2, slot 1
gets (h_3, x_4) instead of (h_1, x_2) and has no loss. Slot 2, which predicts
x_5, now sees x_4.

Names that differ: the paper's t_i is x_i here, f_i is h_i (`features`,
`answers`), f_i^draft is `f_draft`, p and p^draft are `p_target` and `q_draft`,
omega_dist is `distill_weight`.

Deviations, and choices where the paper is silent:
    1. Eq. 1 predicts one place ahead; the code predicts k, as 3.1 does.
    2. Where blocks begin: at random in training (`relaxed_mask`), counted from
       the newest slot in decoding (`first_pass`).
    3. Which slots CSGD reveals (`glance`), with the text's tokens (the paper:
       the target's) and no loss. Lambda falls with the steps.
    4. Features and embeddings are normalised, because their scales differ. The
       layers start as the target's top ones. `fusion="linear"` is ours.
    5. Token losses, the Hamming distance and drafts cover only frequent tokens
       (`draft_vocab`).
    6. Nodes are the likeliest tokens; under sampling the paper draws them.
    7. The default tree takes two passes, the paper's four. The shipped drafter
       has linear fusion, omega_dist = 1, nine nodes in two passes, and no CSGD
       in its last stage (checkpoints/README.md).

Licence: Apache-2.0.
"""

import itertools
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
    """Rank paths of a tree with counts[d] nodes at depth d + 1.

    Path [0, 2] is the third choice after the first. Likely tokens
    get more children (App. A), by a rule of ours: a level keeps the
    paths with the smallest products of (rank + 1). [2, 3] gives
    [0] [1], [0, 0] [0, 1] [1, 0].
    """
    tree = []
    level = [[]]
    for count in counts:
        pairs = itertools.product(level, range(count))
        grown = [[*path, rank] for path, rank in pairs]
        grown.sort(key=lambda path: (math.prod(rank + 1 for rank in path), path))
        level = grown[:count]
        tree += level
    return tree


def checked_tree(tree, vocab: float) -> list[list[int]]:
    """Sort rank paths by depth; a Mistake if one cannot be drafted."""
    try:
        paths = {tuple(path) for path in tree}
    except TypeError:
        example = "give a list of rank paths, such as [[0], [0, 1]]"
        raise common.Mistake(f"tree {tree!r}: {example}") from None
    for path in paths:
        name = f"tree path {list(path)}"
        if not all(0 <= rank < vocab for rank in path):
            raise common.Mistake(f"{name}: give a list of ranks from 0 on, below {vocab}")
        if path[:-1] not in {(), *paths}:
            raise common.Mistake(f"{name}: add its parent {list(path[:-1])}")
    return [list(path) for path in sorted(paths, key=lambda path: (len(path), path))]


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
        self.tree = checked_tree(self.tree, self.draft_vocab or math.inf)


VARIANTS = {
    "chain": {"tree": layered_tree([1, 1, 1, 1])},  # Table 4; as deep as the shipped tree
    "one_pass": {"tree": layered_tree([3, 4])},  # with k = 2
    # The level sizes of Figure 5.
    "paper": {"tree": layered_tree([20, 19, 19, 15, 16, 10, 10, 9])},
}


# -------------------------------------------------------------------------------- architecture


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The SAR head (3.2), between the target's embedding and its LM head."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # nothing is read from the target's cache
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        if config.fusion == "linear":
            self.fusion = nn.Linear(2 * width, width)
        else:
            self.fusion = nn.LSTM(2 * width, width, num_layers=2, batch_first=True)
        llama = common.llama_config(config.target, config.intermediate_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(llama, n) for n in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("draft_ids", common.placeholder_ids(config.target, config.draft_vocab))

    def fuse(self, target, features: Tensor, token_ids: Tensor, state=None):
        """Fuse the feature and the token of each slot into one vector.

        The LSTM reads slots in order; only `attend` looks ahead in a block.

        Args:
            features: (n, t, D) of t slots in n sequences or branches.
            token_ids: (n, t), each one step ahead of its feature.
            state: the LSTM's state after the earlier slots, a pair of (2, n, D).
        Returns: fused slots (n, t, D), and the new state (None if linear).
        """
        embeds = target.get_input_embeddings()(token_ids).to(features.dtype)  # (n, t, D)
        pairs = torch.cat([self.feature_norm(features), self.embed_norm(embeds)], dim=-1)
        if self.config.fusion == "linear":
            return self.fusion(pairs), None
        with torch.autocast(pairs.device.type, enabled=False):  # an LSTM is slow in bfloat16
            return self.fusion(pairs, state)

    def attend(self, target, fused: Tensor, positions: Tensor, mask: Tensor, cache=None) -> Tensor:
        """Predict f_draft (B, r, D) from r fused slots (B, r, D) (Eq. 1, section 3.1).

        Args:
            positions: (1, r) the slots' numbers.
            mask: (B, 1, r, P_own + r) bool, True = may attend.
            cache: the drafter's own, of P_own rows (0 without one); r are added.
        """
        tables = common.rotary(target, positions, -1)  # as in the target's top layer
        tables = common.whole_rotary(tables, self.config.target["head_dim"])
        tables = tuple(table.to(fused.dtype) for table in tables)
        x = fused
        for layer in self.layers:
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=tables)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from; its layers copy the target's top ones.

    Args: token_counts: (V,) how often each token occurs in the responses.
    """
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    if config.fusion == "linear":  # starts as the sum of normed feature and embedding
        drafter.fusion.weight.data.copy_(torch.eye(config.target["hidden_size"]).repeat(1, 2))
        nn.init.zeros_(drafter.fusion.bias)
    layers = common.target_layers(target)[-config.num_layers :]
    common.start_from(drafter, target, token_counts, zip(drafter.layers, layers))
    return drafter


# -------------------------------------------------------------------------- training objective


def relaxed_mask(length: int, k: int, phase: Tensor) -> Tensor:
    """Relaxed causal mask (3.4): a slot attends to its own and earlier blocks.

    The answer of slot i is the input of slot i + k in the next block. The mask
    hides the next block, so no slot can read its answer, and a block sees only
    what is known when it is drafted. k = 2, phase 1:

           key   0  1  2  3  4        blocks: 0 | 1 2 | 3 4
        slot 0   x  .  .  .  .
             1   x  x  x  .  .
             2   x  x  x  .  .
             3   x  x  x  x  x
             4   x  x  x  x  x

    Args: length: S. phase: (B,) how many slots the first block lacks (< k),
    drawn anew so that a token is trained at every place in a block.
    Returns: (B, 1, S, S) bool.
    """
    slots = torch.arange(length, device=phase.device)
    block = (slots + phase[:, None]) // k  # (B, S)
    return (block[:, :, None] >= block[:, None, :])[:, None]


class Slots(NamedTuple):
    """The S = T - 1 slots of each training sequence, and their answers."""

    features: Tensor  # (B, S, D) h_i
    token_ids: Tensor  # (B, S) x_(i+1)
    answers: Tensor  # (B, S, D) h_(i+k)
    answer_ids: Tensor  # (B, S) x_(i+k+1) of the text, to reveal
    learns: Tensor  # (B, S) bool, True where it contributes to the loss


def training_slots(batch, k: int, dtype: torch.dtype) -> Slots:
    """The slots of a batch. k = 2, T = 6:

        slot      0        1        2        3        4
        input   h_0 x_1  h_1 x_2  h_2 x_3  h_3 x_4  h_4 x_5
        answer  h_2 x_3  h_3 x_4  h_4 x_5  h_5 -      -

    A slot learns if the loss mask is True at x_(i+k+1). The last k slots do
    not learn, because this token lies beyond the text.
    """
    hidden = batch.hidden.to(dtype)  # (B, T, D)
    return Slots(
        features=hidden[:, :-1],
        token_ids=batch.input_ids[:, 1:],
        answers=F.pad(hidden, (0, 0, 0, k))[:, k:-1],
        answer_ids=F.pad(batch.input_ids, (0, k))[:, k + 1 :],
        learns=F.pad(batch.loss_mask, (0, k))[:, k + 1 :],
    )


def generators(seed: Tensor, use: int) -> list[torch.Generator]:
    """A generator per sequence; `use` is 0 for `glance`, 1 for noise."""
    return [torch.Generator().manual_seed(2 * number + use) for number in seed.tolist()]


def glance(wrong: Tensor, learns: Tensor, rate: float, k: int, seed: Tensor) -> Tensor:
    """Choose the slots whose answers CSGD reveals (3.2): N = rate * d.

    The paper does not say which slots. Random blocks and runs of random length
    are as in the published code; that exactly N slots are revealed, and only
    slots that learn, is ours.

    In each sequence, d counts the slots that learn and whose likeliest token is
    not the target's (the Hamming distance). N is rounded. In random order, visit
    the blocks of `relaxed_mask` (phase = seed % k). In each, reveal the first
    r slots, with r uniform in 1..k-1, until N slots are revealed or no block
    is left. The later slots of the block see these answers and learn from them.

    An incomplete first block is skipped, and so is a block in which no slot
    learns. Among the r slots, only those that learn are revealed. Random
    numbers come from `generators(seed, 0)`, so that the choice depends neither
    on padding nor on the rest of the batch.

    For example, k = 3, phase 1, N = 3, slots 8 to 10 do not learn. Block 5 6 7
    is visited first with r = 2, then block 2 3 4 with r = 2, but after one more
    slot N is reached:

        blocks       0 1 | 2 3 4 | 5 6 7 | 8 9 10
        revealed     . .   x . .   x x .   . . .

    Slot 5 now reads its own answer (h_8, x_9) instead of (h_5, x_6).

    Args: wrong, learns: (B, S) bool. rate: lambda. seed: (B,).
    Returns: (B, S) bool, True where revealed.
    """
    revealed = torch.zeros(learns.shape, dtype=torch.bool)  # on the CPU
    counts = wrong.sum(1).tolist()
    phases = (seed % k).tolist()
    for row, generator in enumerate(generators(seed, 0)):
        learning = learns[row].tolist()
        borders = range(-phases[row] % k, len(learning), k)
        starts = [start for start in borders if any(learning[start : start + k])]
        order = []  # slots to reveal, in the order of the visits
        for block in torch.randperm(len(starts), generator=generator).tolist():
            run = int(torch.randint(1, k, (), generator=generator))  # r
            slots = range(starts[block], starts[block] + run)
            order += [slot for slot in slots if slot < len(learning) and learning[slot]]
        revealed[row, order[: round(rate * counts[row])]] = True  # the first N
    return revealed.to(learns.device)


def reveal(slots: Slots, revealed: Tensor) -> Slots:
    """Give revealed slots (B, S) their answers, and no loss.

    They would only have to copy their input. The revealed token is the text's.
    """
    return slots._replace(
        features=torch.where(revealed[..., None], slots.answers, slots.features),
        token_ids=torch.where(revealed, slots.answer_ids, slots.token_ids),
        learns=slots.learns & ~revealed,
    )


def noisy(features: Tensor, amplitude: float, seed: Tensor) -> Tensor:
    """Features (B, S, D) plus noise from U(-amplitude, amplitude) (3.2).

    It stands in for the errors of predicted features, which later passes read
    and training does not. It depends on a sequence's seed alone, not on batch or
    device.
    """
    shape = features.shape[1:]
    noise = [torch.empty(shape).uniform_(-1, 1, generator=each) for each in generators(seed, 1)]
    return features + amplitude * torch.stack(noise).to(features)


def predict(drafter: Drafter, target, slots: Slots, phase: Tensor) -> tuple[Tensor, Tensor]:
    """f_draft (M, D) and draft logits (M, Vd) of the M slots that learn."""
    length = slots.features.shape[1]
    positions = torch.arange(length, device=phase.device)[None]  # (1, S)
    mask = relaxed_mask(length, drafter.config.k, phase)  # (B, 1, S, S)
    fused, _ = drafter.fuse(target, slots.features, slots.token_ids)  # (B, S, D)
    f_draft = drafter.attend(target, fused, positions, mask)[slots.learns]  # (M, D)
    head = common.draft_head(target, drafter.draft_ids).to(f_draft.dtype)
    return f_draft.float(), head(f_draft).float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """The loss (Eq. 8), summed over the M slots that learn, and M."""
    config = drafter.config
    draft_ids = drafter.draft_ids
    phase = batch.seed % config.k
    slots = training_slots(batch, config.k, drafter.norm.weight.dtype)

    # 1. Predict once to count wrong slots, and reveal some answers.
    if config.csgd and config.k > 1:
        with torch.no_grad():
            _, logits = predict(drafter, target, slots, phase)
        truth = common.target_logits(target, slots.answers[slots.learns], draft_ids)  # (M, Vd)
        wrong = torch.zeros_like(slots.learns)  # (B, S)
        wrong[slots.learns] = logits.argmax(-1) != truth.argmax(-1)
        rate = 0.4 * (1 - batch.progress)  # lambda, from 0.4 down to 0
        slots = reveal(slots, glance(wrong, slots.learns, rate, config.k, batch.seed))

    # 2. Predict again, now with noise.
    slots = slots._replace(features=noisy(slots.features, config.noise, batch.seed))
    f_draft, logits = predict(drafter, target, slots, phase)  # (M, D), (M, Vd)
    answers = slots.answers[slots.learns].float()  # (M, D)
    # 3. The distributions of target and drafter (Eq. 6 and 7).
    log_p_target = common.target_logits(target, answers, draft_ids).log_softmax(-1)
    log_q_draft = logits.log_softmax(-1)  # (M, Vd)
    # 4. L_reg (a mean over D), L_soft and L_hard (Eq. 2, 3 and 4).
    regression = F.smooth_l1_loss(f_draft, answers, reduction="sum") / answers.shape[-1]
    soft = F.kl_div(log_q_draft, log_p_target, log_target=True, reduction="sum")
    hard = F.nll_loss(log_q_draft, log_p_target.argmax(-1), reduction="sum")
    # 5. L_dist with alpha = 0.9, and L (Eq. 5 and 8).
    distillation = 0.9 * soft + 0.1 * hard
    return regression + config.distill_weight * distillation, slots.learns.sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft), summed over M slots that learn, and M."""
    slots = training_slots(batch, drafter.config.k, drafter.norm.weight.dtype)
    _, logits = predict(drafter, target, slots, batch.seed % drafter.config.k)
    q_draft = logits.softmax(-1)  # (M, Vd)
    answers = slots.answers[slots.learns]  # (M, D)
    return common.overlap(target, answers, q_draft, drafter.draft_ids), len(q_draft)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the drafter keeps from round to round of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(drafter.config.num_layers)  # its own keys and values
        self.head = common.draft_head(target, drafter.draft_ids)  # D -> Vd
        width = drafter.config.target["hidden_size"]
        self.fused = drafter.norm.weight.new_empty(1, 0, width)  # the last k - 1 slots, fused
        self.state = None  # the LSTM's state after the last committed slot


class Pass(NamedTuple):
    """The result of a pass over one block in each of b branches."""

    f_draft: Tensor  # (b, k, D) predicted features
    slots: Tensor  # (k,) the slots' numbers, equal in all branches
    mask: Tensor  # (b, P_own) bool, cache rows a branch may attend to
    state: tuple | None  # the LSTM's state after each branch, a pair of (2, b, D)


def first_pass(drafter: Drafter, decoding, memory: Memory) -> Pass | None:
    """Feed the newly committed slots; None while fewer than k slots exist.

    Only a full block predicts k tokens, so blocks are counted backwards from
    the newest slot, and their borders move with it. The newest block can contain
    up to k - 1 old slots. So the last k - 1 old slots always attend again, even
    one that is not in it, such as slot 3 below; earlier rows stay as they are.
    Memory keeps these slots fused, because fusing them anew would need an older
    LSTM state. k = 3, slots 5 and 6 are new:

        blocks before        0 1 | 2 3 4
        blocks now           0 | 1 2 3 | 4 5 6
        memory.fused                 3   4
        fused now                          5 6
        attend                       3   4 5 6   3 sees 0 to 3, 4 to 6 see all
    """
    k = drafter.config.k
    total = decoding.ids.shape[1] - 1  # P
    new = decoding.hidden.shape[1]
    if new == 0:  # after a prompt of one token
        return None
    new_ids = decoding.ids[:, -new:]  # one step ahead of the features
    fused, memory.state = drafter.fuse(decoding.target, decoding.hidden, new_ids, memory.state)
    fused = torch.cat([memory.fused, fused], dim=1)  # (1, r, D)
    length = fused.shape[1]  # r
    memory.fused = fused[:, max(0, length - (k - 1)) :]
    if total < k:
        return None
    # Drop the rows of slots that attend again, and all rows of the last draft,
    # even those of accepted tokens: they came from predicted features.
    memory.cache.cut(total - length)
    slots = torch.arange(total, device=fused.device)
    block = (slots - total) // k  # (P,) ..., -2, -1
    mask = block[-length:, None] >= block  # (r, P)
    positions = slots[None, -length:]
    f_draft = drafter.attend(decoding.target, fused, positions, mask[None, None], memory.cache)
    return Pass(f_draft[:, -k:], slots[-k:], mask[-1:], memory.state)


def tree_mask(mask: Tensor, origins: Tensor, k: int) -> Tensor:
    """What each branch of a pass may attend to (Figure 3).

    A branch attends to its own block and to all that the branch it continues
    attended to. Its k slots share one row of the mask. k = 2; of the branches of
    pass 3, D continues A, and E continues C. The columns are cache rows:

                  committed A A B B C C   D D E E
        pass 2  A   x x x   x x . . . .
                B   x x x   . . x x . .
                C   x x x   . . . . x x
        pass 3  D   x x x   x x . . . .   x x . .
                E   x x x   . . . . x x   . . x x

    Args: mask: (b, P_own) bool, of the pass before. origins: (n,) the number of
    the branch that each new branch continues.
    Returns: (n, P_own + n k) bool.
    """
    own = torch.eye(len(origins), dtype=torch.bool, device=mask.device)  # (n, n)
    return torch.cat([mask[origins], own.repeat_interleave(k, dim=1)], dim=1)


def later_pass(drafter: Drafter, decoding, memory: Memory, before: Pass, origins, tokens) -> Pass:
    """Feed n branches, each a block of predicted features and drafted tokens.

    `memory.state` covers committed slots only, so a rejection leaves nothing to
    undo.

    Args:
        origins: n numbers of the branches of `before` that they continue.
        tokens: n lists of k ids.
    """
    k = drafter.config.k
    origins = torch.tensor(origins, device=before.f_draft.device)  # (n,)
    features = before.f_draft[origins]  # (n, k, D)
    tokens = decoding.ids.new_tensor(tokens)  # (n, k)
    state = before.state  # None if linear
    if state is not None:
        state = tuple(x[:, origins] for x in state)  # (2, n, D) each
    fused, state = drafter.fuse(decoding.target, features, tokens, state)  # (n, k, D)
    slots = before.slots + k
    positions = slots.repeat(len(origins))[None]  # (1, n k)
    mask = tree_mask(before.mask, origins, k)  # (n, P_own + n k)
    by_slot = mask.repeat_interleave(k, dim=0)[None, None]  # (1, 1, n k, P_own + n k)
    fused = fused.flatten(0, 1)[None]  # (1, n k, D)
    f_draft = drafter.attend(decoding.target, fused, positions, by_slot, memory.cache)
    return Pass(f_draft[0].unflatten(0, (-1, k)), slots, mask, state)


def propose(drafter: Drafter, decoding, memory: Memory, config: Config) -> common.Draft:
    """Draft a token tree, k levels per pass (3.4).

    Slot j of a block drafts level j of the pass: the slot's likeliest tokens, by
    rank. The next pass has one block for each node of the last level that has
    children. The block holds the last k tokens on the path to this node. k = 2:

        root -+- a -+- c --- e --- f
              |     +- d
              +- b --- c --- g --- h

        pass     1     1     2     2
        slot     0     1     0     1     of its block

    Slot 1 of pass 1 ranks c before d. It does not know whether a or b was
    chosen, so c is the first choice after both. Pass 2 has the blocks a c and
    b c, with equal features but different tokens.
    """
    k = drafter.config.k
    paths = [tuple(path) for path in config.tree]
    levels = [list(level) for _, level in itertools.groupby(paths, len)]
    levels = levels[: decoding.room]
    latest = first_pass(drafter, decoding, memory) if levels else None
    if latest is None:
        return common.chain([], decoding.ids, k=k)
    ranks = 1 + max(map(max, paths))
    tokens = {}  # of the node at a path
    q = {}
    tips = [()]  # the node that each branch continues; () is the root
    for first in range(0, len(levels), k):
        # 1. Run another pass, a branch for each node of the last level with children.
        if first > 0:
            before = tips
            tips = sorted({path[:-1] for path in levels[first]})
            origins = [before.index(tip[: first - k]) for tip in tips]
            blocks = []
            for tip in tips:
                ends = range(first - k + 1, first + 1)
                blocks.append([tokens[tip[:end]] for end in ends])
            latest = later_pass(drafter, decoding, memory, latest, origins, blocks)
        # 2. Rank the tokens of its n k slots.
        q_draft = memory.head(latest.f_draft).softmax(-1, dtype=torch.float32)
        top = q_draft.topk(ranks)  # of (n, k, Vd)
        top_q = top.values.tolist()
        top_ids = drafter.draft_ids[top.indices].tolist()
        # 3. Add the levels of this pass, one per slot.
        for slot, level in enumerate(levels[first : first + k]):
            for path in level:
                branch = tips.index(path[:first])
                tokens[path] = top_ids[branch][slot][path[-1]]
                q[path] = top_q[branch][slot][path[-1]]
    # Without `probs`, `verify` takes each token from the target itself and
    # accepts the node that holds it, so the output follows the target.
    numbers = {(): -1} | {path: node for node, path in enumerate(paths)}
    return common.Draft(
        tokens=decoding.ids.new_tensor(list(tokens.values())),
        parents=torch.tensor([numbers[path[:-1]] for path in tokens]),
        q=torch.tensor(list(q.values())),
        notes={"k": k},
    )


@torch.no_grad()
def drafts(decoding, drafter: Drafter, config: Config):
    """Yield one draft per round, which the caller verifies before the next."""
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, config)


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """`target.generate(..., custom_generate=falcon.generate, drafter=...)`.

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
    common.demo(generate, Drafter, "falcon")
