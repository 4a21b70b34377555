"""Falcon: a semi-autoregressive (SAR) drafter, CSGD, and a decoding tree.

Paper: Gao et al., AAAI 2025, arXiv:2412.12639.

An autoregressive drafter needs a pass for every level of its draft. Falcon drafts k
levels in one pass. It reads a sequence of slots. Slot i is the pair of h_i, the
target's last hidden state after its final norm (a "feature"), and the token one step
ahead, x_(i+1). It predicts its label, h_(i+k), and the LM head drafts x_(i+k+1) from
the prediction. The newest k slots form a block: they see each other and all earlier
slots. Their predictions and drafted tokens are the slots of the next pass. In 3.1's
example, k = 2, the newest token is x_3, and h'_i is a prediction of h_i:

    pass    slots                        predictions     tokens drafted
    1       (h_1, x_2)   (h_2, x_3)      h'_3   h'_4     x_4   x_5
    2       (h'_3, x_4)  (h'_4, x_5)     h'_5   h'_6     x_6   x_7

The second slot has to draft x_5 without knowing x_4, because one pass drafts both.
Coupled sequential glancing distillation (CSGD) gives that slot x_4, in training only,
by feeding the first slot of some blocks its own label: (h_3, x_4), not (h_1, x_2).

    in the paper           here
    t_i, f_i, f^draft      x_i, h_i (`hidden`, and as a label `labels`), `h_draft`
    p, p^draft             `log_p` and `log_q` in `loss`; when drafting, q_draft

Shapes, beside those of common.py: S slots, M slots that learn, b branches, c nodes of a
pass, r slots fed, P_own rows in the drafter's cache.

What differs from the paper, or is our choice where it says nothing (more in PAPERS.md):
    1. A slot predicts k places ahead, as in 3.1. With Eq. 1's shift of one, slot i + 1,
       which slot i may see, would hold the label of slot i.
    2. In Figure 2 CSGD replaces a slot's h_i by h_i^t, without saying of which place it
       is. Here it is the slot's label, as in the authors' code, with the token of the
       text. The figure replaces the first 1 to 3 of four slots; here a run leaves out
       the last slot of its block, so with k = 2 it is one slot.
    3. Blocks are counted from a random slot in training, from the newest in drafting.
       With several layers cached rows are not recomputed when the borders of blocks
       move (`first_pass`), which is an approximation.
    4. Inputs and predictions are normalised. Layers start as the target's top ones.
       Only frequent tokens are drafted, and enter L_dist and the Hamming distance.
    5. The default tree has 13 nodes in two passes; one of the paper's two trees has 118
       in four (by the authors' code). When sampling, only the first-rank chain ([0],
       [0, 0], ...) is drawn; in appendix A all nodes are.
    6. As in the authors' code, branches of one block are fed the same predictions (in
       Figure 1 each has its own), and siblings are drawn without replacement.

The authors' code differs, among other things, in that lambda falls from .45 to .10, the
label of L_hard is sampled, and slots that are fed their label have a loss (here none).
The shipped drafter has linear fusion like EAGLE, omega_dist = 1, nine nodes, and a last
stage without CSGD, which did not raise `acceptance` here (checkpoints/README.md).

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
    k: int = option(2, "levels drafted by a pass")
    num_layers: int = option(2, "attention layers (Figure 2)")
    intermediate_size: int = option(1536, "width of the feed-forward layers")
    fusion: str = option("lstm", "lstm or linear")
    csgd: bool = option(True, "coupled sequential glancing distillation")
    noise: float = option(0.1, "hidden states get U(-noise, noise) in training")
    distill_weight: float = option(0.1, "omega_dist, weight of L_dist")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    tree: list = option(
        lambda: layered_tree([4, 4, 3, 2]), "nodes, each a path of ranks", decode=True
    )
    sampled: str = option(
        "first", "sample first (the first-rank chain), all or none", decode=True
    )

    def __post_init__(self):
        common.at_least(self, k=1, num_layers=1, draft_vocab=0)
        common.at_least(self, noise=0, distill_weight=0)
        common.one_of(self, fusion=("lstm", "linear"), sampled=("first", "all", "none"))
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
        self.kv_layers = []  # it reads no keys and values of the target
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        if config.fusion == "linear":
            self.fusion = nn.Linear(2 * width, width)
        else:
            self.fusion = nn.LSTM(2 * width, width, num_layers=2, batch_first=True)
        llama = common.llama_config(config.target, config.intermediate_size)
        layers = [LlamaDecoderLayer(llama, n) for n in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    def fuse(self, target, hidden: Tensor, token_ids: Tensor, state=None):
        """Combine the hidden state and the token of each slot into one vector (3.2).

        hidden: (B, r, D), of B sequences or branches.
        token_ids: (B, r), each one step ahead of its hidden state.
        state: what the LSTM made of the slots before these, two (2, B, D); None before
            the first slot. A linear layer ignores it, and its new state is ().
        Returns fused slots (B, r, D), and the new state.
        """
        embeds = target.get_input_embeddings()(token_ids)
        embeds = self.embed_norm(embeds.to(hidden.dtype))
        pairs = torch.cat([self.feature_norm(hidden), embeds], dim=-1)  # (B, r, 2 D)
        if self.config.fusion == "linear":
            return self.fusion(pairs), ()
        # The LSTM reads the slots in order, so a slot sees the later slots of its block
        # only in `attend`. It is slow in bfloat16, so autocast leaves it out.
        with torch.autocast(pairs.device.type, enabled=False):
            return self.fusion(pairs, state)

    def attend(self, target, x: Tensor, positions: Tensor, mask: Tensor, cache=None):
        """The predictions h_draft (B, r, D) of r fused slots x (B, r, D).

        In a later pass B = 1, and r = b k slots of all branches.
        positions: (1, r), indices of the slots in the text.
        mask: (B, 1, r, P_own + r) bool, True where a slot sees another.
        cache: the drafter's own, of P_own rows, to which r are added.
        """
        tables = common.rotary(target, positions, -1)  # of the target's top layer
        tables = common.whole_rotary(tables, self.config.target["head_dim"])
        tables = tuple(table.to(x.dtype) for table in tables)
        for layer in self.layers:
            x = layer(x, mask, past_key_values=cache, position_embeddings=tables)
        return self.norm(x)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter for the target, whose shape it adds to the config.

    A linear fusion starts as the sum of its halves, and an LSTM at random. The layers
    get the weights of the target's top layers, where shapes are equal.

    token_counts: (V,) how often each token occurs in the training data.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    if config.fusion == "linear":
        identity = torch.eye(config.target["hidden_size"])  # for the sum of both halves
        drafter.fusion.weight.data.copy_(identity.repeat(1, 2))
        nn.init.zeros_(drafter.fusion.bias)
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

    phase: (B,) how many of its k slots the first block lacks, 0 to k - 1.
    Returns (B, 1, S, S) bool, True where a slot sees another; S is `length`.
    """
    indices = torch.arange(length, device=phase.device)
    block = (indices + phase[:, None]) // k  # (B, S)
    # The label of slot i is fed to slot i + k, a block later, so no slot sees its own
    # label. (One that `reveal` feeds its label does, but has no loss.)
    return (block[:, :, None] >= block[:, None, :])[:, None]


class Slots(NamedTuple):
    """The S = T - 1 slots of each sequence."""

    hidden: Tensor  # (B, S, D) h_i
    token_ids: Tensor  # (B, S) x_(i+1)
    labels: Tensor  # (B, S, D) h_(i+k)
    label_ids: Tensor  # (B, S) x_(i+k+1)
    learns: Tensor  # (B, S) bool, True for slots that have a loss
    phase: Tensor  # (B,) of `relaxed_mask`


def training_slots(drafter: Drafter, batch) -> Slots:
    """The slots of a batch (a common.Batch). For example, k = 2 and T = 6:

        slot      0        1        2        3        4
        input   h_0 x_1  h_1 x_2  h_2 x_3  h_3 x_4  h_4 x_5
        label   h_2 x_3  h_3 x_4  h_4 x_5  h_5 -      -

    A slot learns if its label's token is to be predicted (`batch.loss_mask`).
    """
    k = drafter.config.k
    hidden = batch.hidden.to(drafter.norm.weight.dtype)  # (B, T, D)
    return Slots(
        hidden=hidden[:, :-1],
        token_ids=batch.input_ids[:, 1:],
        # The last k slots do not learn, because their labels' tokens are beyond the
        # text. What is missing is padded with zeros.
        labels=F.pad(hidden, (0, 0, 0, k))[:, k:-1],
        label_ids=F.pad(batch.input_ids, (0, k))[:, k + 1 :],
        learns=F.pad(batch.loss_mask, (0, k))[:, k + 1 :],
        phase=batch.seed % k,  # random, as a block may start anywhere when drafting
    )


def predict(drafter: Drafter, target, slots: Slots) -> tuple[Tensor, Tensor, Tensor]:
    """h_draft (M, D), logits (M, Vd) and labels (M, D) of the M slots that learn."""
    length = slots.hidden.shape[1]
    positions = torch.arange(length, device=slots.phase.device)[None]
    mask = relaxed_mask(length, drafter.config.k, slots.phase)
    fused, _ = drafter.fuse(target, slots.hidden, slots.token_ids)
    h_draft = drafter.attend(target, fused, positions, mask)[slots.learns]
    head = common.draft_head(target, drafter.vocab_ids)
    logits = head.to(h_draft.dtype)(h_draft)
    labels = slots.labels[slots.learns]
    return h_draft.float(), logits.float(), labels.float()


def glance(wrong: Tensor, learns: Tensor, rate: float, k: int, seed: Tensor) -> Tensor:
    """Choose the slots to reveal (3.2): N = lambda d, rounded, in each sequence.

    For example, k = 3, phase 1, N = 3, and slots 8 to 10 do not learn:

        blocks                       0 1 | 2 3 4 | 5 6 7 | 8 9 10
        first, a run of two          . .   . . .   x x .   . . .
        then, cut short at N         . .   x . .   x x .   . . .

    wrong: (B, S) bool, True where a slot learns and its likeliest token is not the
        target's. Their number in a sequence is d, the Hamming distance.
    learns: (B, S) bool. rate: lambda.
    seed: (B,), which gives the phase of `relaxed_mask` and the random numbers.
    Returns (B, S) bool, True where revealed; fewer than N where all runs hold fewer.
    """
    # The paper reveals runs of slots "preceding those to be predicted" (Figure 2). So a
    # run starts a complete block whose slots all learn, and leaves out its last slot,
    # which learns from the labels before it. Figure 2 samples slots; that blocks are
    # uniform, and lengths from 1 to k - 1, is our reading. In the authors' code a run
    # starts at any k-th slot that has a loss, and for k > 2 there are N / k runs.
    revealed = torch.zeros_like(learns, device="cpu")
    learning = learns.cpu()
    for sequence, own_seed in enumerate(seed.tolist()):
        phase = own_seed % k  # as in `training_slots`
        starts = range(-phase % k, learning.shape[1] - k + 1, k)  # of complete blocks
        starts = [n for n in starts if learning[sequence, n : n + k].all()]
        numbers = common.generator(own_seed)
        order = []  # all slots of all runs, of which the first N are revealed
        for n in torch.randperm(len(starts), generator=numbers).tolist():
            run = int(torch.randint(1, k, (), generator=numbers))  # 1 to k - 1
            order += range(starts[n], starts[n] + run)
        count = round(rate * int(wrong[sequence].sum()))  # N
        revealed[sequence, order[:count]] = True
    return revealed.to(learns.device)


@torch.no_grad()
def reveal(drafter: Drafter, target, slots: Slots, batch) -> Slots:
    """CSGD (3.2, Figure 2): feed some slots their labels, in proportion to the errors.

    In the header's example the first slot is revealed. The second one can now read x_4:

        before     (h_1, x_2)  (h_2, x_3)      after    (h_3, x_4)  (h_2, x_3)
        label      (h_3, x_4)  (h_4, x_5)               -           (h_4, x_5)
    """
    # When drafting, the second slot never sees x_4. By the paper (3.3) the slots of a
    # block learn from such inputs to depend on each other.
    _, logits, labels = predict(drafter, target, slots)  # a pass without noise
    truth = common.target_logits(target, labels, drafter.vocab_ids)
    wrong = torch.zeros_like(slots.learns)
    wrong[slots.learns] = logits.argmax(-1) != truth.argmax(-1)
    rate = 0.4 * (1 - batch.progress)  # lambda, which in the paper falls by epochs
    revealed = glance(wrong, slots.learns, rate, drafter.config.k, batch.seed)
    return slots._replace(
        hidden=torch.where(revealed[..., None], slots.labels, slots.hidden),
        token_ids=torch.where(revealed, slots.label_ids, slots.token_ids),
        learns=slots.learns & ~revealed,  # they would only copy what they are fed
    )


def noisy(hidden: Tensor, amplitude: float, seed: Tensor) -> Tensor:
    """Hidden states (B, S, D) plus U(-amplitude, amplitude) (3.2)."""
    # Later passes are fed predictions; the noise stands in for their errors.
    noise = []
    for own_seed in seed.tolist():
        numbers = common.generator(own_seed, use=1)  # not the numbers of `glance`
        own_noise = torch.empty(hidden.shape[1:], dtype=torch.float32)
        noise.append(own_noise.uniform_(-1, 1, generator=numbers))
    return hidden + amplitude * torch.stack(noise).to(hidden)


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """L (Eq. 8), summed over the M slots that learn, and M. batch: a common.Batch."""
    config = drafter.config
    slots = training_slots(drafter, batch)
    if config.csgd and config.k > 1:  # with k = 1 no slot precedes another in its block
        slots = reveal(drafter, target, slots, batch)
    # Thus revealed labels are noisy, too; in the authors' code they have no noise.
    slots = slots._replace(hidden=noisy(slots.hidden, config.noise, batch.seed))
    h_draft, logits, labels = predict(drafter, target, slots)  # Eq. 1, but k ahead
    l_reg = F.smooth_l1_loss(h_draft, labels, reduction="sum")
    l_reg = l_reg / labels.shape[-1]  # Eq. 2, a mean over D
    truth = common.target_logits(target, labels, drafter.vocab_ids)  # (M, Vd)
    log_p = truth.log_softmax(-1)  # of p_target, Eq. 6
    log_q = logits.log_softmax(-1)  # of q_draft, Eq. 7
    l_soft = F.kl_div(log_q, log_p, log_target=True, reduction="sum")  # Eq. 3
    l_hard = F.nll_loss(log_q, log_p.argmax(-1), reduction="sum")  # Eq. 4
    l_dist = 0.9 * l_soft + 0.1 * l_hard  # Eq. 5
    return l_reg + config.distill_weight * l_dist, slots.learns.sum()  # Eq. 8


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft), summed over the M slots that learn, and M.

    The mean is the probability that a token of a first pass, drawn at temperature 1, is
    accepted after the text. The alpha of 4.2 is another quantity, accepted / tau.
    """
    slots = training_slots(drafter, batch)
    _, logits, labels = predict(drafter, target, slots)
    q_draft = logits.softmax(-1)  # (M, Vd)
    return common.overlap(target, labels, q_draft, drafter.vocab_ids), len(q_draft)


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
    """One of the paper's two trees: 118 nodes in eight levels, m = 20 at the root."""
    # Appendix A lists no nodes. They are those of kmask2_8layer_tree_3 in the authors'
    # code, but with ranks 0 to 7 below [0, 1] (PAPERS.md). `children` is {path: m}.
    children = {(): 20, (0,): 11, (1,): 4, (2,): 4, (0, 0): 7, (0, 1): 8}
    children |= {(0,) * 3: 10, (0,) * 4: 10, (0,) * 5: 4, (0,) * 6: 4, (0,) * 7: 3}
    tree = {(*path, rank) for path, m in children.items() for rank in range(m)}
    # Six branches go on with the likeliest token of each level, down to the eighth.
    for path in ((1,), (2,), (0, 1), (0, 2), (0, 3), (0, 0, 0, 1)):
        tree |= {path + (0,) * more for more in range(1, 9 - len(path))}
    return [list(path) for path in sorted(tree)]


def checked_tree(tree, vocab: float) -> list[list[int]]:
    """The paths without duplicates, sorted by depth; ranks may have gaps.

    vocab: number of tokens that can be drafted; inf if it is not known yet.
    Raises UserError if the paths form no tree, or if a rank is not below `vocab`.
    """
    try:
        known = {tuple(path) for path in tree}
        paths = sorted(known, key=lambda path: (len(path), path))
    except TypeError:
        remedy = "give a list of paths, as [[0], [0, 1]]"
        raise common.UserError(f"tree {tree!r}: {remedy}") from None
    for path in paths:
        name = f"tree path {list(path)}"
        # True is no rank, but isinstance(True, int).
        if not path or not all(type(r) is int and 0 <= r < vocab for r in path):
            limit = f" to {vocab - 1}, as can be drafted" if vocab < math.inf else ""
            raise common.UserError(f"{name}: give a list of ranks from 0 on{limit}")
        if path[:-1] not in known | {()}:
            raise common.UserError(f"{name}: add its parent {list(path[:-1])}")
    return [list(path) for path in paths]


VARIANTS = {
    "chain": {"tree": layered_tree([1, 1, 1, 1])},  # Table 4, of height 4 instead of 8
    "one_pass": {"tree": layered_tree([3, 4])},  # one pass only if k >= 2
    "paper": {"tree": paper_tree()},
    "none": {"sampled": "none"},  # the likeliest tokens, as in greedy decoding
    "all": {"sampled": "all"},  # appendix A
}


# A pass drafts k levels of the tree (3.4). Slot j of a branch gives the tokens of level
# j of the pass: a node of rank r holds the slot's r-th likeliest token, counted from 0.
# A node on the last of these levels is a tip if it has children. In the next pass each
# tip has a branch, a block of k slots with the k tokens down to and including the
# tip's. For example, k = 2 and this tree:
#
#     root -+- 0 -+- 2 --- 5 --- 7
#           |     +- 3
#           +- 1 --- 4 --- 6 --- 8
#
#     pass     1     1     2     2
#     slot     0     1     0     1
#
# Nodes 2 and 4 are the tips. Both hold the likeliest token of slot 1, because this slot
# knows neither node 0's token nor node 1's. This is the price of two levels at once.


class PassPlan(NamedTuple):
    """What a pass over b branches is fed, and which of its outputs give the c nodes."""

    # Pass 1 has one branch, fed committed slots: its origins and reads are empty, (0,).
    # in the example:            pass 1       pass 2
    origins: Tensor  # (b,)      -            0 0       the branch that each continues
    reads: Tensor  # (b, k)      -            0 2, 1 4  the nodes whose tokens are fed
    branch: Tensor  # (c,)       0 0 0 0 0    0 1 0 1   of nodes 0 to 4, and 5 to 8
    slot: Tensor  # (c,)         0 0 1 1 1    0 0 1 1
    rank: Tensor  # (c,)         0 1 0 1 0    0 0 0 0


class Plan(NamedTuple):
    """A tree of N nodes, sorted by depth."""

    passes: list[PassPlan]
    parents: list[int]  # of N nodes; -1 is the root
    above: list[list[int]]  # of N nodes: the nodes on the way to it, from the root down
    drawn: set[int]  # nodes to draw when sampling
    ranks: int  # how many of a slot's likeliest tokens are needed


def make_plan(config: Config, device) -> Plan:
    """Plan the passes that draft config.tree, for a target on `device`."""
    k = config.k
    paths = [tuple(path) for path in config.tree]
    node_of = {path: node for node, path in enumerate(paths)}
    passes, tips_before = [], []
    for depth in range(0, max(map(len, paths), default=0), k):  # of the pass's tips
        tips = sorted({path[:depth] for path in paths if len(path) > depth})
        ends = range(depth - k + 1, depth + 1)
        drafted = [path for path in paths if depth < len(path) <= depth + k]
        columns = (
            # the branch of its ancestor k levels up; pass 1's tip, the root, has none
            [tips_before.index(tip[:-k]) for tip in tips if tip],
            [[node_of[tip[:end]] for end in ends] for tip in tips if tip],
            [tips.index(path[:depth]) for path in drafted],
            [len(path) - depth - 1 for path in drafted],
            [path[-1] for path in drafted],
        )
        columns = (torch.tensor(x, dtype=torch.long, device=device) for x in columns)
        passes.append(PassPlan(*columns))
        tips_before = tips
    above = [[node_of[path[:end]] for end in range(1, len(path))] for path in paths]
    parents = [nodes[-1] if nodes else -1 for nodes in above]
    # Drawing more than the first-rank chain did not raise tau more (results/README.md).
    drawn = {
        "first": {node_of[path] for path in paths if not any(path)},  # all ranks are 0
        "all": set(node_of.values()),
        "none": set(),
    }[config.sampled]
    return Plan(passes, parents, above, drawn, 1 + max(map(max, paths), default=0))


# -------------------------------------------------------------------------- decoding


class Memory:
    """What the drafter keeps between the rounds of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.cache = common.GrowingCache(drafter.config.num_layers)
        self.head = common.draft_head(target, drafter.vocab_ids)  # D -> Vd
        self.slots = 0  # slots read so far
        # The last k - 1 slots, fused, and the LSTM's state after the last one.
        self.fused = drafter.norm.weight.new_empty(1, 0, len(drafter.norm.weight))
        self.state = None


class Pass(NamedTuple):
    """The output of a pass over b branches."""

    h_draft: Tensor  # (b, k, D) predictions
    positions: Tensor  # (k,) of the slots, the same in each branch
    mask: Tensor  # (b, P_own) which rows, cached after this pass, a branch sees
    state: tuple  # the LSTM's, two (2, b, D); () of a linear layer


def first_pass(drafter: Drafter, decoding, memory: Memory) -> Pass | None:
    """Feed the slots of the newly committed tokens, which memory then holds.

    The newest k slots form the one branch of this pass; None if there are fewer slots.
    """
    k = drafter.config.k
    total = decoding.ids.shape[1] - 1  # P
    if total == 0:  # a prompt of one token, before which there is no hidden state
        return None
    hidden = decoding.hidden  # (1, new, D)
    memory.slots += hidden.shape[1]
    assert memory.slots == total, "ask for a draft in every round, from the first"
    token_ids = decoding.ids[:, -hidden.shape[1] :]  # one step ahead
    new, memory.state = drafter.fuse(decoding.target, hidden, token_ids, memory.state)

    # Blocks are counted back from the newest slot, so that the last one is full, and
    # their borders move each round. For example, k = 3, and slots 5 and 6 are new:
    #
    #     blocks before     0 1 | 2 3 4
    #     blocks now        0 | 1 2 3 | 4 5 6
    #     attend now                3   4 5 6
    #
    # Up to k - 1 old slots, here slot 4, share a block with new ones. For simplicity
    # the last k - 1 old slots always attend again.
    fused = torch.cat([memory.fused, new], dim=1)  # (1, r, D)
    length = fused.shape[1]  # r
    memory.fused = fused[:, max(0, length - (k - 1)) :]  # the LSTM cannot step back
    if total < k:
        return None
    # Drop the cached rows of the slots that attend again, and those of the last draft,
    # which are of predictions. Older rows stay, although their blocks have changed:
    # with one layer a row depends on its slot alone, with more it is approximate.
    memory.cache.cut(total - length)
    positions = torch.arange(total, device=fused.device)
    phase = -total % k  # of `relaxed_mask`, so that the newest block is full
    block = (positions + phase) // k  # (P,)
    # A prompt attends in parts, because one mask for all of it would grow with the
    # square of its length. Parts are counted back as well, so none ends within a block.
    size = 256 * k  # a multiple of k
    for part in fused.tensor_split(sorted(range(length - size, 0, -size)), dim=1):
        start = memory.cache.get_seq_length()  # P_own
        end = start + part.shape[1]  # P_own + part
        mask = block[start:end, None] >= block[:end]
        here = positions[None, start:end]
        x = drafter.attend(decoding.target, part, here, mask[None, None], memory.cache)
    return Pass(x[:, -k:], positions[-k:], mask.new_ones(1, total), memory.state)


def branch_mask(mask: Tensor, origins: Tensor, k: int) -> Tensor:
    """What each branch of a later pass sees (Figure 3).

    It sees its own block, and all that is seen by the branch that it continues. k = 2;
    in pass 3, D continues A, and E continues C. Each column is a slot in the cache:

                  committed A A B B C C   D D E E
        pass 2  A   x x x   x x . . . .
                B   x x x   . . x x . .
                C   x x x   . . . . x x
        pass 3  D   x x x   x x . . . .   x x . .
                E   x x x   . . . . x x   . . x x

    mask: (b_before, P_own) bool, of the pass before.
    origins: (b,) the branch that each new branch continues.
    Returns (b, P_own + b k) bool.
    """
    own = torch.eye(len(origins), dtype=torch.bool, device=mask.device)
    own = own.repeat_interleave(k, 1)  # (b, b k)
    return torch.cat([mask[origins], own], dim=1)


def later_pass(drafter, decoding, memory, before: Pass, origins, token_ids) -> Pass:
    """Feed b branches, each a block of k predictions and drafted tokens.

    origins: (b,) the branches of `before` that they continue.
    token_ids: (b, k) the drafted tokens, the tip's last.
    """
    k = drafter.config.k
    # Branches that continue the same one share its predictions and differ in tokens.
    hidden = before.h_draft[origins]  # (b, k, D)
    state = tuple(x[:, origins] for x in before.state)  # (2, b, D) each
    fused, state = drafter.fuse(decoding.target, hidden, token_ids, state)
    positions = before.positions + k
    mask = branch_mask(before.mask, origins, k)  # (b, P_own + b k)
    # All branches form one sequence of b k slots, and the mask keeps them apart.
    x = drafter.attend(
        decoding.target,
        fused.flatten(0, 1)[None],
        positions.repeat(len(origins))[None],
        mask.repeat_interleave(k, dim=0)[None, None],  # slots of a branch see the same
        memory.cache,
    )
    return Pass(x[0].unflatten(0, (-1, k)), positions, mask, state)


def draw_nodes(drafter, decoding, plan: Plan, logits, tokens, chances, probs) -> None:
    """Draw the nodes of a pass that are to be sampled (appendix A).

    logits: (c, Vd), from which each of the c nodes chooses.
    tokens, chances: of all nodes so far, those of the pass last; both are changed in
        place. A chance is the drafter's probability of the node's token.
    probs: {node: q_draft (V,)} of the drawn nodes so far; the new ones are added.
    """
    ids = tokens.tolist()  # one look at the GPU; only drawn nodes take another
    for node, scores in enumerate(logits, len(tokens) - len(logits)):
        parent = plan.parents[node]
        first = plan.parents.index(parent)  # of the siblings, which stand side by side
        beside_drawn = any(n in probs for n in range(first, node))  # an earlier sibling
        # A logits processor may raise an error on a text that it would not have
        # allowed. So a node is drawn only below drawn ones, not after the text's end.
        allowed = parent == -1 or (
            parent in probs and ids[parent] not in decoding.eos_ids
        )
        to_draw = allowed and node in plan.drawn
        if not to_draw and not beside_drawn:
            continue
        # Siblings are drawn without replacement: q_draft is the distribution over the
        # tokens that earlier siblings leave. So it depends on them and on the tokens
        # above, and on no other drawn token, as `common.draw` requires.
        taken = torch.isin(drafter.vocab_ids, tokens[first:node])  # (Vd,)
        left = scores.masked_fill(taken, float("-inf"))
        picked = None
        if to_draw:
            above = [ids[n] for n in plan.above[node]]
            picked = common.pick(decoding, left, drafter.vocab_ids, above)
        if picked is not None:
            tokens[node], probs[node] = picked
            ids[node] = int(tokens[node])
            chances[node] = probs[node][ids[node]]
        elif beside_drawn:
            # Ranks do not count beside a drawn node: it gets the likeliest token left.
            best = left.argmax()
            tokens[node] = drafter.vocab_ids[best]
            chances[node] = scores.softmax(-1, dtype=torch.float32)[best]


def propose(drafter: Drafter, decoding, memory: Memory, plan: Plan) -> common.Draft:
    """Draft the planned tree after `decoding.ids`, as far down as there is room.

    Returns a Draft, which has no nodes while the text has k tokens or fewer, or where
    there is no room. Its notes are k, and for display q: the drafter's probability of
    each node's token, after the logits processors if it was drawn.
    """
    # Logits processors must see no text longer than max_length, so count the nodes of
    # depth <= room. Depth is len(above) + 1, and nodes are sorted by depth.
    count = sum(len(above) < decoding.room for above in plan.above)
    latest = first_pass(drafter, decoding, memory) if count else None
    tokens = decoding.ids.new_zeros(0)
    chances = torch.zeros(0, device=tokens.device)
    probs = {}  # {node: q_draft (V,)} of the nodes that are drawn
    for planned in plan.passes if latest is not None else []:
        start = len(tokens)
        if start >= count:
            break
        if start > 0:
            fed, origins = tokens[planned.reads], planned.origins
            latest = later_pass(drafter, decoding, memory, latest, origins, fed)
        logits = memory.head(latest.h_draft)  # (b, k, Vd)
        best = logits.softmax(-1, dtype=torch.float32).topk(plan.ranks)
        nodes = planned.branch, planned.slot, planned.rank
        tokens = torch.cat([tokens, drafter.vocab_ids[best.indices[nodes]]])[:count]
        chances = torch.cat([chances, best.values[nodes]])[:count]
        if decoding.do_sample and plan.drawn:
            by_node = logits[planned.branch, planned.slot][: len(tokens) - start]
            draw_nodes(drafter, decoding, plan, by_node, tokens, chances, probs)
    # Nodes below an end-of-sequence token are never accepted. They stay, so that all
    # rounds have one plan. Drawn nodes come first (common.Draft). The sort is stable,
    # and the parent of a drawn node is drawn, so parents still precede their children.
    order = sorted(range(len(tokens)), key=lambda node: node not in probs)
    place = {-1: -1} | {node: n for n, node in enumerate(order)}
    parents = [place[plan.parents[node]] for node in order]
    q_draft = torch.stack(list(probs.values())) if probs else None
    index = tokens.new_tensor(order)
    notes = {"k": drafter.config.k, "q": chances[index].tolist()}
    return common.Draft(tokens[index], parents, q_draft, notes)


@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    changes: other values for fields of the Config with decode=True, such as tree.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    plan = make_plan(config, decoding.ids.device)
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        yield propose(drafter, decoding, memory, plan)


if __name__ == "__main__":
    common.demo(Drafter, "falcon", drafts)
