"""Falcon: a semi-autoregressive (SAR) drafter, CSGD, and a decoding tree.

Paper: Gao et al., AAAI 2025, arXiv:2412.12639.

An autoregressive drafter makes a pass for every level of its draft. Falcon drafts k
levels in one pass. It reads a sequence of slots. Slot i is a pair: h_i, the target's
last hidden state after its final norm (the paper's "feature"), and the next token,
x_(i+1). An LSTM fuses the pair into one vector, and attention layers read the vectors.
Slot i predicts h_(i+k), and the LM head drafts x_(i+k+1) from the prediction. In
training the true pair (h_(i+k), x_(i+k+1)) is the slot's label. The newest k slots form
a block: they see each other and all earlier slots. The k predictions and the k tokens
drafted from them are the slots of the next pass. In the example of 3.1, k is 2 and the
newest token is x_3; h'_i stands for a prediction of h_i (`h_draft` in the code):

    pass    slots                        predictions     tokens drafted
    1       (h_1, x_2)   (h_2, x_3)      h'_3   h'_4     x_4   x_5
    2       (h'_3, x_4)  (h'_4, x_5)     h'_5   h'_6     x_6   x_7

The second slot has to draft x_5 without knowing x_4, because one pass drafts both.
Coupled sequential glancing distillation (CSGD) shows it x_4, but only in training: the
first slots of some blocks are *revealed*, that is, fed their labels (3.2: "replace").
Here the first slot is fed (h_3, x_4) instead of (h_1, x_2).

Names that differ: the paper's t_i is x_i here, f_i is h_i (`hidden`; h_i in Figure 2
too), f^draft is `h_draft`, and p and p^draft are p_target and q_draft. Shapes: S slots,
M slots that learn, r slots fed, b branches of a pass; the rest as in common.py.

Deviations from the paper and what the authors' code does: at the end.
Licence: Apache-2.0.
"""

import dataclasses
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


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    k: int = option(2, "levels of the tree drafted in a pass (Table 5: 2, 3, 4)")
    num_layers: int = option(2, "attention layers (Figure 2)")
    intermediate_size: int = option(1536, "width of the feed-forward layers")
    fusion: str = option("lstm", "lstm (the paper) or linear (EAGLE's)")
    csgd: bool = option(True, "coupled sequential glancing distillation (if k > 1)")
    noise: float = option(0.1, "hidden states get U(-noise, noise) in training")
    distill_weight: float = option(1.0, "omega_dist, weight of L_dist (the paper: 0.1)")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    tree: list = option(
        lambda: layered_tree([3, 4, 1, 1]),
        "nodes, each a path of ranks (the authors' code: 118)",
        decode=True,
    )

    def __post_init__(self):
        common.at_least(self, k=1, num_layers=1, draft_vocab=0, intermediate_size=1)
        common.at_least(self, noise=0, distill_weight=0)
        common.one_of(self, fusion=("lstm", "linear"))
        vocab = self.target.get("vocab_size", math.inf)
        self.tree = checked_tree(self.tree, min(self.draft_vocab or vocab, vocab))


# ---------------------------------------------------------------------- architecture


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2412.12639",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "falcon"],
):
    """The SAR head (3.2, Figure 2). Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # it does not read the target's keys and values
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        if config.fusion == "linear":  # starts as the sum of its two inputs
            self.fusion = nn.Linear(2 * width, width)
            self.fusion.weight.data.copy_(torch.eye(width).repeat(1, 2))
            nn.init.zeros_(self.fusion.bias)
        else:
            self.fusion = nn.LSTM(2 * width, width, num_layers=2, batch_first=True)
        llama = common.llama_config(config.target, config.intermediate_size)
        layers = [LlamaDecoderLayer(llama, n) for n in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    def fuse(self, target, hidden: Tensor, token_ids: Tensor, state=None):
        """Combine the hidden state and the token of each slot into one vector (3.2).

        hidden: (B, r, D) of B sequences; in a later pass of its b branches, (b, k, D).
        token_ids: (B, r), each one step ahead of its hidden state.
        state: the LSTM's after the slots before these, two tensors (2, B, D); None
            before the first slot. A linear layer ignores it, and its new state is ().
        Returns fused slots (B, r, D), and the new state.
        """
        embeds = target.get_input_embeddings()(token_ids)
        embeds = self.embed_norm(embeds.to(hidden.dtype))
        pairs = torch.cat([self.feature_norm(hidden), embeds], dim=-1)  # (B, r, 2 D)
        if self.config.fusion == "linear":
            return self.fusion(pairs), ()
        # The LSTM reads the slots in order, so a slot sees the later slots of its block
        # only in `attend`. Without autocast, because an LSTM is slow in bfloat16.
        with torch.autocast(pairs.device.type, enabled=False):
            return self.fusion(pairs, state)

    def attend(self, target, x: Tensor, positions: Tensor, mask, cache=None):
        """The predictions h_draft (B, r, D) of r fused slots x (B, r, D).

        When drafting, B is 1. A later pass feeds the slots of all branches: r = b k.
        positions: (1, r) of the slots, counted from the first slot of the text or, when
            drafting, of the window.
        mask: (B, 1, r, P_own + r) bool, True where a slot sees another.
        cache: the drafter's own, which has P_own rows and gets r more.
        """
        tables = common.rotary(target, positions, -1)  # of the target's top layer
        head_dim = self.config.target["head_dim"]
        tables = common.whole_rotary(tables, head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, None, cache, position_embeddings=tables)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter for the target, whose shape it adds to the config.

    The layers and the last norm start with the weights of the target's top layers and
    final norm, where shapes are equal.

    token_counts: (V,) how often each token occurs in the training data.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    top_layers = common.target_layers(target)[-config.num_layers :]
    common.start_from(drafter, target, token_counts, zip(drafter.layers, top_layers))
    return drafter


# ---------------------------------------------------------------- training objective


def relaxed_mask(length: int, k: int, phase: Tensor) -> Tensor:
    """Relaxed causal mask (3.2, 3.4): a slot sees its own and all earlier blocks.

    For example, k = 2, phase 1:

           key   0  1  2  3  4        blocks: 0 | 1 2 | 3 4
        slot 0   x  .  .  .  .
             1   x  x  x  .  .
             2   x  x  x  .  .
             3   x  x  x  x  x
             4   x  x  x  x  x

    phase: (B,) how many of the first block's k slots are missing, 0 to k - 1.
    Returns (B, 1, S, S) bool, True where a slot sees another; S is `length`.
    """
    indices = torch.arange(length, device=phase.device)
    block = (indices + phase[:, None]) // k  # (B, S)
    # The label of slot i is the input of slot i + k, a block later, so no slot sees its
    # own. (`reveal` makes exceptions, which have no loss.) Padding needs no mask: the
    # block of a slot that learns ends before slot i + k, and so inside the text.
    return (block[:, :, None] >= block[:, None, :])[:, None]


class Slots(NamedTuple):
    """The S = T - 1 slots of each sequence."""

    hidden: Tensor  # (B, S, D) h_i
    token_ids: Tensor  # (B, S) x_(i+1)
    label_hidden: Tensor  # (B, S, D) h_(i+k)
    label_ids: Tensor  # (B, S) x_(i+k+1)
    learns: Tensor  # (B, S) bool, True for slots that have a loss
    phase: Tensor  # (B,) see `relaxed_mask`


def training_slots(drafter: Drafter, batch) -> Slots:
    """The slots of a batch (a common.Batch). For example, k = 2 and T = 6:

        slot      0        1        2        3        4
        input   h_0 x_1  h_1 x_2  h_2 x_3  h_3 x_4  h_4 x_5
        label   h_2 x_3  h_3 x_4  h_4 x_5  h_5 -      -

    A slot learns if its label's token is to be predicted (`batch.loss_mask`).
    """
    k = drafter.config.k
    hidden = batch.hidden.to(next(drafter.parameters()).dtype)  # (B, T, D)
    return Slots(
        hidden=hidden[:, :-1],
        token_ids=batch.input_ids[:, 1:],
        # The labels of the last slots are beyond the text. Zeros take their place, and
        # these slots do not learn.
        label_hidden=F.pad(hidden, (0, 0, 0, k))[:, k:-1],
        label_ids=F.pad(batch.input_ids, (0, k))[:, k + 1 :],
        learns=F.pad(batch.loss_mask, (0, k))[:, k + 1 :],
        # Random, because a block may start anywhere when drafting.
        phase=torch.randint(k, hidden.shape[:1], device=hidden.device),
    )


def predict(drafter: Drafter, target, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """h_draft (M, D), logits (M, Vd) and h_(i+k) (M, D) of the M slots that learn."""
    length = slots.hidden.shape[1]
    positions = torch.arange(length, device=slots.phase.device)[None]
    mask = relaxed_mask(length, drafter.config.k, slots.phase)
    fused, _ = drafter.fuse(target, slots.hidden, slots.token_ids)
    h_draft = drafter.attend(target, fused, positions, mask)[slots.learns]
    head = common.draft_head(target, drafter.vocab_ids)
    logits = head.to(h_draft.dtype)(h_draft)
    label_hidden = slots.label_hidden[slots.learns]
    return h_draft.float(), logits.float(), label_hidden.float()


@torch.no_grad()
def reveal(drafter: Drafter, target, slots: Slots, progress: float) -> Slots:
    """CSGD (3.2, Figure 2): feed some slots their labels, in proportion to the errors.

    progress: completed fraction of the training run.

    In the header's example the first slot is revealed. The second one can now read x_4:

        before     (h_1, x_2)  (h_2, x_3)      after    (h_3, x_4)  (h_2, x_3)
        label      (h_3, x_4)  (h_4, x_5)               -           (h_4, x_5)
    """
    _, logits, label_hidden = predict(drafter, target, slots)  # a pass without noise
    expected = common.target_logits(target, label_hidden, drafter.vocab_ids).argmax(-1)
    wrong = torch.zeros_like(slots.learns)
    wrong[slots.learns] = logits.argmax(-1) != expected
    rate = 0.4 * (1 - progress)  # lambda; in the paper it falls once per epoch
    revealed = glance(wrong, slots.learns, rate, drafter.config.k, slots.phase)
    return slots._replace(
        hidden=torch.where(revealed[..., None], slots.label_hidden, slots.hidden),
        token_ids=torch.where(revealed, slots.label_ids, slots.token_ids),
        learns=slots.learns & ~revealed,  # a revealed slot could copy its input
    )


def glance(wrong: Tensor, learns: Tensor, rate: float, k: int, phase: Tensor) -> Tensor:
    """Choose the slots to reveal (3.2): N = lambda d, rounded, in each sequence.

    For example, k = 3, phase 1, N = 3, and slots 8 to 10 do not learn:

        blocks                       0 1 | 2 3 4 | 5 6 7 | 8 9 10
        first, a run of two          . .   . . .   x x .   . . .
        then a run of two, cut at N  . .   x . .   x x .   . . .

    wrong: (B, S) bool, True where a slot learns and its likeliest token is not the
        target's likeliest of vocab_ids. Their number in a sequence is d, the Hamming
        distance.
    learns: (B, S) bool. rate: lambda. phase: (B,) of `relaxed_mask`.
    Returns (B, S) bool, True where revealed. If the runs of a sequence have fewer than
    N slots in all, all of them are revealed.
    """
    # The paper reveals runs of slots "preceding those to be predicted" (3.2). A run
    # begins with the first slot of a complete block whose slots all learn. It never
    # includes the last one, which learns to use the labels before it. The order of the
    # blocks and the lengths of the runs, from 1 to k - 1, are uniformly random.
    shifted = torch.arange(learns.shape[1], device=learns.device) + phase[:, None]
    block, place = shifted // k, shifted % k  # (B, S)
    learners = torch.zeros_like(block).scatter_add(1, block, learns.long())
    run = torch.randint_like(block, 1, k)  # the length of a block's run
    key = torch.rand_like(block, dtype=torch.float32)
    learners, run, key = (x.gather(1, block) for x in (learners, run, key))
    in_run = (learners == k) & (place < run)  # (B, S)
    # Reveal the first N slots of all runs, taking the blocks in their random order.
    key = key.masked_fill(~in_run, 2)  # what is in no run comes last
    turn = key.argsort(dim=1, stable=True).argsort(dim=1)
    number = (rate * wrong.sum(1, keepdim=True)).round()  # N
    return in_run & (turn < number)


def noisy(hidden: Tensor, amplitude: float) -> Tensor:
    """Hidden states (B, S, D) plus U(-amplitude, amplitude) (3.2)."""
    # Later passes are fed predictions. The noise is there "to avoid error accumulation
    # in features".
    return hidden + torch.empty_like(hidden).uniform_(-amplitude, amplitude)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """L (Eq. 8), summed over the M slots that learn, and M. batch: a common.Batch."""
    config = drafter.config
    slots = training_slots(drafter, batch)
    if config.csgd and config.k > 1:
        slots = reveal(drafter, target, slots, batch.progress)
    slots = slots._replace(hidden=noisy(slots.hidden, config.noise))
    h_draft, logits, h_label = predict(drafter, target, slots)  # Eq. 1, but k ahead
    l_reg = F.smooth_l1_loss(h_draft, h_label, reduction="none").mean(-1).sum()  # Eq. 2
    vocab_ids = drafter.vocab_ids
    p_target = common.target_logits(target, h_label, vocab_ids).softmax(-1)  # Eq. 6
    log_q = logits.log_softmax(-1)  # Eq. 7, the logarithm of q_draft
    l_soft = F.kl_div(log_q, p_target, reduction="sum")  # Eq. 3
    l_hard = F.cross_entropy(logits, p_target.argmax(-1), reduction="sum")  # Eq. 4
    l_dist = 0.9 * l_soft + 0.1 * l_hard  # Eq. 5, alpha = 0.9
    return l_reg + config.distill_weight * l_dist, slots.learns.sum()  # Eq. 8


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft), summed over the M slots that learn, and M.

    Their ratio is the probability that a token of the first pass, sampled at
    temperature 1, is accepted after the text's own tokens. The alpha of 4.2 is another
    quantity, the share of accepted draft tokens in the answer.
    """
    slots = training_slots(drafter, batch)
    _, logits, h_label = predict(drafter, target, slots)
    q_draft = logits.softmax(-1)  # (M, Vd)
    return common.overlap(target, h_label, q_draft, drafter.vocab_ids), len(q_draft)


# --------------------------------------------------------------------- decoding tree


def layered_tree(counts: list[int]) -> list[list[int]]:
    """A tree with counts[d] nodes at depth d + 1.

    A node is the path of ranks to it: [0, 2] is the third choice after the first one.
    For example, [2, 3] gives [0] [1], [0, 0] [0, 1] [1, 0].
    """
    # In appendix A "branches of higher-probability tokens should be deeper and wider".
    # Our rule for it: a level keeps the paths with the smallest products of (rank + 1).
    tree = []
    level = [[]]
    for count in counts:
        grown = [[*path, rank] for path in level for rank in range(count)]
        grown.sort(key=lambda path: (math.prod(rank + 1 for rank in path), path))
        level = grown[:count]
        tree += level
    return tree


def paper_tree() -> list[list[int]]:
    """The tree of appendix A with m = 20 at the root (Figure 5 or, in the PDF, 6)."""
    # The paper does not list its nodes. These 118, in eight levels, are those of the
    # authors' code (kmask2_8layer_tree_3). `children` is {path: m}.
    children = {(): 20, (0,): 11, (1,): 4, (2,): 4, (0, 0): 7, (0, 1): 8}
    children |= {(0,) * 3: 10, (0,) * 4: 10, (0,) * 5: 4, (0,) * 6: 4, (0,) * 7: 3}
    tree = {(*path, rank) for path, m in children.items() for rank in range(m)}
    # From six nodes a chain of likeliest tokens leads down to level 8.
    for path in ((1,), (2,), (0, 1), (0, 2), (0, 3), (0, 0, 0, 1)):
        tree |= {path + (0,) * more for more in range(1, 9 - len(path))}
    return [list(path) for path in sorted(tree)]


VARIANTS = {  # named settings for bench.py, as in --method falcon:chain
    "chain": {"tree": layered_tree([1, 1, 1, 1])},  # 4.5: as long as the tree is high
    "one_pass": {"tree": layered_tree([3, 4])},  # one pass only if k >= 2
    "paper": {"tree": paper_tree()},
}


# -------------------------------------------------------------------------- decoding

# One pass drafts k levels of the tree (3.4). It has one or more branches, each a block
# of k slots that continues the tree below one node, the branch's tip. In pass 1 the tip
# is the root. A later pass has a branch for each node with children on the deepest
# level drafted so far. This node is the tip, and the branch is fed the k tokens on the
# way down to it. The slot at place 0 drafts the children of the tip, that at place 1
# their children, and so on. In greedy decoding a node of rank r holds its slot's r-th
# likeliest token, counted from 0. When sampling, siblings are sampled in the order of
# their ranks. For example, k = 2 and a tree with two branches in pass 2 (the default
# one has only one there):
#
#     root -+- 0 -+- 2 --- 5 --- 7         node     0  1  2  3  4    5  6  7  8
#           |     +- 3                     branch   0  0  0  0  0    0  1  0  1
#           +- 1 --- 4 --- 6 --- 8         place    0  0  1  1  1    0  0  1  1
#                                          rank     0  1  0  1  0    0  0  0  0
#     pass     1     1     2     2
#
# Pass 2 has two branches, with the tips 2 and 4. One is fed the tokens of nodes 0 and
# 2, the other those of nodes 1 and 4. Both tips were drafted by the same slot, which
# knows neither node 0's token nor node 1's. In greedy decoding the two tips therefore
# hold the same token: the price of drafting two levels at once.


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(drafter.config.num_layers)
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd
        self.slots_read = 0
        # The last k - 1 slots, fused (see first_pass), and the LSTM's state after them.
        width = drafter.config.target["hidden_size"]
        self.fused = next(drafter.parameters()).new_empty(1, 0, width)
        self.state = None

    def read(self, drafter: Drafter, decoding) -> Tensor:
        """Fuse the new slots; return the last k - 1 old ones and these, (1, r, D)."""
        hidden = decoding.hidden[:, self.slots_read :]  # (1, new, D)
        token_ids = decoding.ids[:, self.slots_read + 1 :]  # one step ahead
        self.slots_read += hidden.shape[1]
        new, self.state = drafter.fuse(decoding.target, hidden, token_ids, self.state)
        fused = torch.cat([self.fused, new], dim=1)
        self.fused = fused[:, fused.shape[1] - drafter.config.k + 1 :]
        return fused


class Pass(NamedTuple):
    """The output of a pass over b branches."""

    h_draft: Tensor  # (b, k, D) predictions
    positions: Tensor  # (k,) of the slots, the same in each branch
    mask: Tensor  # (b, P_own) which rows, cached after this pass, a branch sees
    state: tuple  # the LSTM's, two tensors (2, b, D); () for a linear layer


def first_pass(drafter: Drafter, decoding, memory: Memory) -> Pass | None:
    """Feed the slots of the newly committed tokens.

    Returns a Pass with one branch, the newest k slots; None if there are fewer slots.
    """
    k = drafter.config.k
    total = decoding.ids.shape[1] - 1  # P
    if total < k:
        return None
    # Blocks are counted back from the newest slot, so that the last one is full. Their
    # borders may move from round to round. For example, k = 3, slots 5 and 6 are new:
    #
    #     blocks before     0 1 | 2 3 4
    #     blocks now        0 | 1 2 3 | 4 5 6
    #     attend now                3   4 5 6
    #
    # Up to k - 1 old slots, here slot 4, share a block with new ones. For simplicity
    # the last k - 1 old slots all attend again, here slot 3 as well. The LSTM does not
    # read them again, so memory keeps them fused.
    fused = memory.read(drafter, decoding)  # (1, r, D)
    length = fused.shape[1]  # r
    # Drop the cached rows of the slots that attend again, and those of the last draft,
    # which were made from predictions. Older rows stay, although blocks have changed.
    # The first layer's rows do not depend on blocks; those above are approximate.
    memory.cache.cut(total - length)
    positions = torch.arange(total, device=fused.device)
    block = (positions - total) // k  # (P,); -1 is the newest, which is full
    # A long text (with window=None) attends in parts, because one mask for all of it
    # would grow with the square of its length. Parts are counted back as well, so none
    # ends inside a block.
    size = 256 * k
    for part in fused.tensor_split(sorted(range(length - size, 0, -size)), dim=1):
        start = memory.cache.get_seq_length()  # P_own
        end = start + part.shape[1]
        mask = block[start:end, None] >= block[:end]
        of_part = positions[None, start:end]
        x = drafter.attend(
            decoding.target, part, of_part, mask[None, None], memory.cache
        )
    return Pass(x[:, -k:], positions[-k:], mask.new_ones(1, total), memory.state)


def branch_mask(mask: Tensor, continued: Tensor, k: int) -> Tensor:
    """What each branch of a later pass sees (Figure 3).

    It sees its own block, and all that the branch it continues has seen. For example,
    k = 2, and in pass 3 D continues A, and E continues C. Each column is a cached slot:

                  committed A A B B C C   D D E E
        pass 2  A   x x x   x x . . . .
                B   x x x   . . x x . .
                C   x x x   . . . . x x
        pass 3  D   x x x   x x . . . .   x x . .
                E   x x x   . . . . x x   . . x x

    mask: (b_previous, P_own) bool, of the previous pass.
    continued: (b,) the branch that each new branch continues.
    Returns (b, P_own + b k) bool.
    """
    own = torch.eye(len(continued), dtype=torch.bool, device=mask.device)
    own = own.repeat_interleave(k, 1)  # (b, b k)
    return torch.cat([mask[continued], own], dim=1)


def later_pass(drafter, decoding, memory, previous: Pass, continued, tokens) -> Pass:
    """Feed b branches, each a block of k predictions and drafted tokens.

    continued: the branches of `previous` that they continue, a list of b numbers.
    tokens: b lists of the k drafted tokens, the tip's last.
    """
    k = drafter.config.k
    continued = decoding.ids.new_tensor(continued)  # (b,)
    token_ids = decoding.ids.new_tensor(tokens)  # (b, k)
    # Branches that continue the same one share its predictions; their tokens differ.
    hidden = previous.h_draft[continued]  # (b, k, D)
    state = tuple(x[:, continued] for x in previous.state)  # (2, b, D) each
    fused, state = drafter.fuse(decoding.target, hidden, token_ids, state)
    positions = previous.positions + k
    mask = branch_mask(previous.mask, continued, k)  # (b, P_own + b k)
    # All branches form one sequence of b k slots, and the mask keeps them apart.
    x = drafter.attend(
        decoding.target,
        fused.flatten(0, 1)[None],
        positions.repeat(len(continued))[None],
        mask.repeat_interleave(k, dim=0)[None, None],  # slots of a branch see the same
        memory.cache,
    )
    return Pass(x[0].unflatten(0, (-1, k)), positions, mask, state)


def sample_siblings(decoding, logits: Tensor, vocab_ids: Tensor, above: list[int]):
    """Sample siblings (appendix A) without replacement, as the authors' code does.

    Yields pairs of a token and its q_draft (V,), until the processors allow no other.

    logits: (Vd,) of the tokens vocab_ids (Vd,).
    above: the tokens drafted on the way to the siblings.
    """
    # As `common.rejection_sample` requires, a node's distribution depends on the tokens
    # above it and on its earlier siblings, but not on any other sampled token.
    taken = vocab_ids[:0]  # earlier siblings
    while True:
        # A softmax over the tokens that earlier siblings leave, so q_draft sums to 1.
        picked = common.pick(decoding, logits, vocab_ids, above)
        # A processor may force a token that is taken. We test q_draft, not the token,
        # because which token is sampled must not decide whether it is submitted.
        if picked is None or picked[1][taken].any():
            return
        token, q_draft = picked
        yield int(token), q_draft
        taken = torch.cat([taken, token])
        logits = logits.masked_fill(vocab_ids == token, float("-inf"))


def propose(drafter: Drafter, decoding, memory: Memory, ranks: dict) -> common.Draft:
    """Draft a tree after `decoding.ids`, level by level, as far down as there is room.

    ranks: {path: the ranks of its children}, for the root, (), and all nodes with
        children.
    Returns a Draft. It has no nodes if the text has at most k tokens, if there is no
    room or no tree, or if no child of the root could be sampled. Nothing is drafted
    below an end-of-sequence token. When sampling, a sibling that could not be sampled
    is missing, with all below it. If there are nodes, the notes of the draft hold k
    and, in greedy decoding, q: the drafter's probability of each node's token.
    """
    k = drafter.config.k
    wanted = ranks and decoding.max_depth > 0
    latest = first_pass(drafter, decoding, memory) if wanted else None
    if latest is None:
        return common.chain([], decoding.ids)
    texts = {(): []}  # {path: the tokens on the way to a node, its own last}
    q_of = {}  # {path: q of its token (greedy), or all of q_draft (V,) (sampled)}
    branch_of = {(): 0}  # {path: its branch}, the nodes of one depth with children
    for depth in range(decoding.max_depth):
        place = depth % k  # in the block
        if place == 0:  # the first pass, or all slots of the last one are used up
            if depth > 0:
                fed = [texts[tip][-k:] for tip in branch_of]
                continued = list(branch_of.values())
                latest = later_pass(drafter, decoding, memory, latest, continued, fed)
                branch_of = {tip: branch for branch, tip in enumerate(branch_of)}
            logits = memory.head(latest.h_draft)  # (b, k, Vd)
        if not decoding.do_sample:
            count = 1 + max(max(ranks[parent]) for parent in branch_of)
            best = logits[:, place].softmax(-1, dtype=torch.float32).topk(count)
            ids, q = drafter.vocab_ids[best.indices].tolist(), best.values.tolist()
        grown = {}  # the parents of the next level
        for parent, branch in branch_of.items():
            if decoding.do_sample:
                scores, above = logits[branch, place], texts[parent]
                children = sample_siblings(decoding, scores, drafter.vocab_ids, above)
            else:
                children = [(ids[branch][r], q[branch][r]) for r in ranks[parent]]
            for rank, (token, q_token) in zip(ranks[parent], children):
                path = (*parent, rank)
                texts[path] = [*texts[parent], token]
                q_of[path] = q_token
                if path in ranks and token not in decoding.eos_ids:
                    grown[path] = branch
        branch_of = grown
        if not branch_of:
            break

    if not q_of:
        return common.chain([], decoding.ids)
    index_of = {(): -1} | {path: node for node, path in enumerate(q_of)}
    tokens = decoding.ids.new_tensor([texts[path][-1] for path in q_of])
    parents = [index_of[path[:-1]] for path in q_of]
    if decoding.do_sample:
        return common.Draft(tokens, parents, torch.stack(list(q_of.values())), {"k": k})
    return common.Draft(tokens, parents, notes={"k": k, "q": list(q_of.values())})


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    changes: other values for fields of the Config with decode=True, such as tree.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    ranks = {}  # {path: the ranks of its children}
    for *parent, rank in config.tree:
        ranks.setdefault(tuple(parent), []).append(rank)
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, ranks)


def checked_tree(tree, vocab: float) -> list[list[int]]:
    """The paths without duplicates, sorted by depth; ranks may have gaps.

    vocab: number of tokens that can be drafted; inf if it is not known yet.
    Raises UserError if the paths do not form a tree, or if a rank is not below `vocab`.
    """
    try:
        known = {tuple(path) for path in tree}
        paths = sorted(known, key=lambda path: (len(path), path))
    except TypeError:
        remedy = "give a list of paths, as [[0], [0, 1]]"
        raise common.UserError(f"tree {tree!r}: {remedy}") from None
    for path in paths:
        name = f"tree path {list(path)}"
        # True would pass isinstance(rank, int).
        if not path or not all(type(r) is int and 0 <= r < vocab for r in path):
            end = "on" if vocab == math.inf else f"to {vocab - 1} (draft vocabulary)"
            raise common.UserError(f"{name}: give a list of ranks from 0 {end}")
        if path[:-1] not in known | {()}:
            raise common.UserError(f"{name}: add its parent {list(path[:-1])}")
    return [list(path) for path in paths]


if __name__ == "__main__":
    common.demo(Drafter, "falcon", drafts)


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper, and choices where it says nothing:
#  1. A slot predicts k tokens ahead (3.1). If it predicted one ahead (Eq. 1), each slot
#     but the last of a block would see its label.
#  2. CSGD feeds a slot its own label, with the text's token, and gives it no loss. The
#     paper replaces inputs by those "from LLMs", and does not say which by which. Runs
#     stay in a block, are chosen at random and may have fewer than N slots (see
#     `glance`). lambda falls with each step, not each epoch.
#  3. In training the first block has a random length. When drafting, rows of older
#     slots stay cached, although the borders of blocks have moved. The LSTM's state is
#     kept between rounds; a later pass continues it through the predicted slots.
#  4. The paper has no norms. Here there are four more than in the authors' code: of
#     features, of embeddings, before the first layer's attention, and of the output.
#     Layers and the last norm start as the target's, where shapes are equal.
#  5. Only frequent tokens are drafted and learned: p is renormalised over them, the
#     likeliest of them is L_hard's class, and d compares them. q leaves out the LM
#     head's bias and soft cap. A slot whose label is in the prompt has no loss.
#  6. CSGD's first pass has no noise. In the second, revealed labels are noisy too.
#  7. By default the tree has nine nodes in two passes, and omega_dist is 1, not 0.1.
#     Nothing is drafted below an end token. Greedy drafts ignore logits processors.
#     fusion=linear, EAGLE's, is for comparison.
#  8. Branches that continue the same one are fed equal predictions (unlike Figure 1).
#  9. Siblings are sampled without replacement; appendix A says: "we sample m tokens".
# 10. The drafter sees a window of a long text (common.windowed).
#
# Authors' code. With equal random weights, without our four norms and without keeping
# the LSTM's state, forwards, drafts and losses agree, except:
#  - The first layer is handed the LSTM's whole output tuple, which fails. We compared
#    with a copy that hands on the output only.
#  - The LSTM has a dropout of .1. It has no batch_first, so it reads the sequences of a
#    batch as steps in time.
#  - A slot learns if x_i is in the answer (here x_(i+k+1)). Revealed slots have a loss.
#  - Drafting counts blocks from the first slot fed, and not back from the newest one.
#  - lambda falls from .45 to .10 in 21 epochs. With k > 2, N // k runs are revealed. A
#    run may begin anywhere in a block.
#  - Noise is multiplied by 512 / length. CSGD's first pass has it; revealed labels do
#    not.
#  - L_hard's class is sampled. L_soft mixes temperatures, so it is not a divergence.
#  - Each value of the gradient is clipped at .5.
#  - Sampled tokens are judged by their neighbours' q, unless an IndexError comes first.
