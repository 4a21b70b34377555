"""Falcon: a semi-autoregressive drafter and a decoding tree made for it.

Gao et al., AAAI 2025, arXiv:2412.12639; "upstream" is the code that they published with it.
From the target's last hidden states ("features") and the tokens one step ahead, the drafter
predicts k further features in one pass; the target's LM head turns them into tokens. Its input is a
row of slots: slot i pairs feature h_i with the token after it, x_(i+1), which h_i has not seen, to
predict h_(i+k) and so x_(i+k+1). k neighbouring slots make a block and see each other; how far the
blocks' borders are shifted is their phase. Training teaches the slots of a block to agree: coupled
sequential glancing distillation (CSGD) shows some their answers, fewer as it goes on.
Drafting grows a token tree by k levels a pass. k = 2, newest token x_4, f predicting h:

    pass 1    (h_2, x_3) (h_3, x_4)  ->  f_4, f_5  ->  x_5, x_6      the next token and the second
    pass 2    (f_4, x_5) (f_5, x_6)  ->  f_6, f_7  ->  x_7, x_8      for every branch x_5 x_6

    symbol              name here                          section           function
    k                   Config.k                           3.1               all
    t_i                 x_i, a token; input_ids            3.1               all
    f_i; f_i^draft      h_i, hidden, answers; predicted    3.1, Eq. 1        training_pass, propose
    t_i^t, h_i^t        tokens, answers, where replaced    3.2, Fig. 2       training_pass
    p, p^draft          p_target, q_draft                  Eq. 6, 7          loss, alpha
    LSTM                Drafter.fusion                     3.2               Drafter
    relaxed mask        relaxed_mask, tree_sight           3.2, 3.4, Fig. 3  training_pass, propose
    Y^t, Y-hat, d()     truth, logits, sum of wrong        3.2               loss, glance
    N, lambda           count, rate (ep_c/ep_t: progress)  3.2               glance, loss
    L_{reg, soft, hard} l1, soft, hard                     Eq. 2, 3, 4       loss
    L_dist, L           0.9 soft + 0.1 hard, the result    Eq. 5, 8          loss
    alpha, omega_dist   0.9, Config.distill_weight         Eq. 5, 8          loss
    tau                 mean of Stats.accepted: no bonus   4.2               (ours counts the bonus)
    alpha               tau / (tau + 1), share drafted     4.2, Table 2      (`alpha` is another)
    m passes, n nodes   turns of the loop, len(grown)      3.4               propose
    m children          ranks under a path of Config.tree  App. A            layered_tree

Deviations
    1. upstream != paper: its nn.LSTM lacks batch_first, so it recurs over the batch, with a batch
       of 1 never (`cell`); `lstm` recurs over the slots, on every branch.
    2. ours: the shipped drafter has a linear layer (`linear`) where the paper has an LSTM, and was
       trained with one attention layer before it got figure 2's second, below. It saw 3.3 million
       tokens of the target, cut at 384 or 512 (4.3: 68,000 dialogues of ShareGPT); omega_dist 1
       (0.1); learning rates 2e-3 to 1e-3 (3e-5); norms clipped at 1 (silent).
    3. upstream != paper: blocks end at the newest token in every round (upstream counts from the
       first slot fed, so slots before the newest may not see it); training draws a random phase.
       A cached slot keeps what it saw in its old block: the lowest layer's keys and values depend
       on the fused slot alone, those of a layer above it (shipped: one) on borders since moved.
    4. paper silent: CSGD's runs start at the first slot of a block and spare its last one, as 3.2
       wants what precedes the predicted. They show the data's tokens (as upstream), and features
       with noise. Slots shown teach nothing; upstream's do, without noise. It samples hard labels,
       takes the KL at temperature 0.95, lambda from 0.45 to 0.1, noise times 512 / T in each pass.
    5. ours: features and embeddings are normed before fusion (scales differ by 20); layers, final
       norm start as a Llama-like target's; drafts, labels are frequent tokens (`draft_vocab`).
    6. ours: PAPER_TREE is of the paper's size only: figure 5's nodes per depth, chosen by our rule
       (`layered_tree`). Upstream's list with these counts shares 80 of the 118.
    7. ours: `best_nodes`, EAGLE-2's choice of nodes (Li et al. 2024); `copies`, a prompt lookup.
    8. ours: sampling. The paper samples a node's children; here no node is sampled, and the
       target's draw decides where to descend, so the output is exact.
    9. upstream != paper: Eq. 1 shifts by one place; 3.1 (its example) and upstream by k, as here.
"""

import heapq
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by train.py)")
    k: int = option(2, "tokens predicted by a pass")
    num_layers: int = option(1, "attention layers (Figure 2: two; one learns faster)")
    intermediate_size: int = option(1536, "width of the feed-forward sub-layer")
    fusion: str = option("lstm", "lstm, cell (LSTM without recurrence) or linear")
    csgd: bool = option(True, "coupled sequential glancing distillation")
    noise: float = option(0.1, "features get U(-noise, noise) in training")
    distill_weight: float = option(0.1, "omega_dist, weight of the losses on tokens")
    draft_vocab: int = option(8192, "draft only the most frequent tokens; 0: all of them")
    tree: list = option(lambda: layered_tree([4, 4, 3, 2]), "nodes; [0, 2]: [0]'s 3rd child", True)
    best_nodes: int = option(0, "draft so many of the likeliest nodes; 0: those of tree", True)
    passes: int = option(1, "with best_nodes: most passes a round", True)
    least_worth: float = option(0.0, "with best_nodes: least probability of a node's path", True)
    copies: int = option(0, "tokens copied from the context (prompt lookup); 0: the paper's", True)


def whole_head(table: Tensor, head_dim: int, fill: float) -> Tensor:
    """A rotary table (1, r, R) of a target that turns R of a head's numbers, widened to all Dh.

    Numbers j and j + Dh/2 turn by one angle, so each stands in a table twice; what is not to turn
    has cos 1 and sin 0, the `fill`. R = 4, Dh = 8: cos `a b a b` becomes `a b 1 1 a b 1 1`. Such a
    target itself pairs j with j + R/2, so attention weights copied from it must be relearnt.
    """
    half = table[..., : table.shape[-1] // 2]  # (1, r, R/2)
    half = F.pad(half, (0, head_dim // 2 - half.shape[-1]), value=fill)  # (1, r, Dh/2)
    return half.repeat(1, 1, 2)


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The relaxed causal SAR head (3.2); embeddings and LM head are the target's, not held here."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        shape = config.target
        hidden = shape["hidden_size"]
        self.feature_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.embed_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        if config.fusion == "linear":
            self.fusion = nn.Linear(2 * hidden, hidden)
        else:
            self.fusion = nn.LSTM(2 * hidden, hidden, num_layers=2, batch_first=True)
        llama = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            head_dim=shape["head_dim"],
            num_attention_heads=shape["num_heads"],
            num_key_value_heads=shape["num_kv_heads"],
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(llama, n) for n in range(config.num_layers))
        vocab = shape["vocab_size"]
        self.register_buffer("draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab)))
        self.kv_layers = []  # reads the target's features, not its keys and values

    def forward(self, features, embeds, rotary, mask, cache=None, state=None, before=None):
        """Predict from every slot the feature k places on (3.1; deviation 9).

        Fusion takes n sequences of t slots, attention B rows of r. In training both are the batch;
        in drafting B = 1: a pass's n branches side by side, r = n t, or `before` and one sequence.

        Args:
            features, embeds: (n, t, D) of the target or predicted; of the tokens one step ahead.
            rotary: the target's cos and sin for attention's rows, each (1, r, R).
            mask: (B, 1, r, cached + r) bool. cache: attention's. state: the LSTM's, to go on from.
            before: (1, a, D) old fused slots that attend again.
        Returns: predicted features (B, r, D), fused slots (n, t, D), the LSTM's state.
        """
        pair = torch.cat([self.feature_norm(features), self.embed_norm(embeds)], -1)  # (n, t, 2D)
        if self.config.fusion == "linear":
            fused = self.fusion(pair)  # (n, t, D)
        elif self.config.fusion == "cell":
            fused = self.fusion(pair.flatten(0, 1)[:, None])[0].view_as(features)  # each slot alone
        else:
            with torch.autocast(pair.device.type, enabled=False):  # bfloat16 takes 3 times as long
                fused, state = self.fusion(pair, state)
        x = fused.reshape(len(mask), -1, fused.shape[-1])  # (B, r - a, D)
        if before is not None:
            x = torch.cat([before, x], dim=1)  # (B, r, D)
        head_dim = self.config.target["head_dim"]
        cos = whole_head(rotary[0].to(x.dtype), head_dim, fill=1.0)  # (1, r, Dh)
        sin = whole_head(rotary[1].to(x.dtype), head_dim, fill=0.0)  # (1, r, Dh)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=(cos, sin))
        return self.norm(x), fused, state


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from: layers as the target's top ones, where they agree in shape.

    Args: token_counts: (V,) how often each token occurs in the responses; the top ones are drafted.
    Raises: ValueError: a fusion or k that there is not.
    """
    if config.fusion not in ("lstm", "cell", "linear") or config.k < 1:
        given = f"fusion {config.fusion!r}, k {config.k}"
        raise ValueError(f"{given}: fusion is lstm, cell or linear, k at least 1")
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        if config.fusion == "linear":  # starts as a sum
            drafter.fusion.weight.copy_(torch.eye(config.target["hidden_size"]).repeat(1, 2))
        sources = list(getattr(target.get_decoder(), "layers", []))[-config.num_layers :]
        for layer, source in zip(drafter.layers, sources):
            theirs = source.state_dict()
            for name, weight in layer.state_dict().items():
                if name in theirs and theirs[name].shape == weight.shape:
                    weight.copy_(theirs[name])
        if hasattr(getattr(target.get_decoder(), "norm", None), "weight"):
            drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    return drafter


# ------------------------------------------------------------------------------- masks and the loss


def relaxed_mask(length: int, k: int, phase: Tensor) -> Tensor:
    """Which slots each slot may attend to (3.2): all earlier blocks and the whole of its own.

    k = 2, phase 1:

           key   0  1  2  3  4        blocks: 0 | 1 2 | 3 4
        slot 0   x  .  .  .  .
             1   x  x  x  .  .
             2   x  x  x  .  .
             3   x  x  x  x  x
             4   x  x  x  x  x

    Args: length: S slots. phase: (B,) how many slots the first block lacks, 0 to k - 1.
    Returns: (B, 1, S, S) bool.
    """
    block = (torch.arange(length, device=phase.device) + phase[:, None]) // k  # (B, S)
    return (block[:, :, None] >= block[:, None, :])[:, None]


def tree_sight(sight: Tensor, parent: Tensor, k: int) -> Tensor:
    """What the branches of a pass see (Figure 3): what their parents saw, and their own k slots.

    k = 2; "stable" are the slots of committed tokens:

                   stable   a a b b c c   d d e e        d continues a, e continues c;
        pass 2  a   x x x   x x . . . .                  both slots of a branch see the same
                b   x x x   . . x x . .
                c   x x x   . . . . x x
        pass 3  d   x x x   x x . . . .   x x . .
                e   x x x   . . . . x x   . . x x

    Args: sight: (b, rows) bool, the pass before's. parent: (n,) which of them each continues.
    Returns: (n, rows + n k) bool.
    """
    own = torch.eye(len(parent), dtype=torch.bool, device=sight.device)  # (n, n)
    return torch.cat([sight[parent], own.repeat_interleave(k, dim=1)], dim=1)


def glance(wrong: Tensor, where: Tensor, rate: float, k: int, seed: Tensor) -> Tensor:
    """Choose the slots that CSGD shows their answers (3.2): N = rate * d per sequence.

    d is how many slots missed. Blocks in random order give runs of 1 to k - 1 slots, from their
    first on, while fewer than N are chosen. k = 3, a run of 2 in the block of slots 0 to 2:

        slot       0        1        2              0        1        2
        input   h_0 x_1  h_1 x_2  h_2 x_3   ->   h_3 x_4  h_4 x_5  h_2 x_3
        learns  h_3 x_4  h_4 x_5  h_5 x_6           -        -     h_5 x_6, seeing the two before

    Args: wrong, where: (B, S) bool, slots that missed, that learn. seed: (B,), as `training_pass`.
    Returns: (B, S) bool.
    """
    if k == 1:  # a block of one slot has none to couple
        return torch.zeros_like(where)
    learns = where.cpu()  # (B, S)
    replaced = torch.zeros(where.shape, dtype=torch.bool)  # (B, S)
    for row, number in enumerate(seed.tolist()):
        generator = torch.Generator().manual_seed(number)
        count = round(rate * int(wrong[row].sum()))
        first = -number % k  # where blocks of k begin: 2 in 0 1 | 2 3 4 | ..., k = 3, phase 1
        starts = range(first, where.shape[1], k)
        for block in torch.randperm(len(starts), generator=generator).tolist():
            run = min(count, int(torch.randint(1, k, (), generator=generator)))
            part = slice(starts[block], starts[block] + run)
            replaced[row, part] = learns[row, part]
            count -= int(learns[row, part].sum())
    return replaced.to(where.device)


def training_pass(drafter: Drafter, target, batch: common.Batch, replaced: Tensor | None = None):
    """Run over the S = T - 1 slots of whole sequences; slot i is to predict h_(i+k), x_(i+k+1).

    Args: replaced: (B, S) bool, slots that are shown their answers; None: none are, and no noise.
    Returns: of the M that learn logits (M, Vd), predicted, answers (M, D); which they are, (B, S).
    """
    k = drafter.config.k
    hidden = batch.hidden.to(drafter.norm.weight.dtype)  # (B, T, D)
    end = hidden.shape[1] - 1
    slots = torch.arange(end, device=hidden.device)  # (S,)
    features = hidden[:, :-1]  # (B, S, D) h_i
    tokens = batch.input_ids[:, 1:]  # (B, S) x_(i+1)
    # the last slots' answers lie beyond the end: another stands in, and the slot does not learn
    later = (slots + k + 1).clamp(max=end)  # (S,)
    answers = hidden[:, (slots + k).clamp(max=end)]  # (B, S, D) h_(i+k)
    where = batch.loss_mask[:, later] & (slots + k + 1 <= end)  # (B, S)
    if replaced is not None:
        where = where & ~replaced
        features = torch.where(replaced[..., None], answers, features)
        tokens = torch.where(replaced, batch.input_ids[:, later], tokens)  # x_(i+k+1)
        generators = [torch.Generator().manual_seed(seed) for seed in batch.seed.tolist()]
        noise = torch.stack([torch.rand(features.shape[1:], generator=each) for each in generators])
        features = features + drafter.config.noise * (2 * noise.to(features) - 1)  # (B, S, D)
    embeds = target.get_input_embeddings()(tokens).to(features.dtype)  # (B, S, D)
    rotary = common.rotary(target, slots[None], -1)  # two tables, each (1, S, R)
    mask = relaxed_mask(end, k, batch.seed % k)  # (B, 1, S, S)
    predicted = drafter(features, embeds, rotary, mask)[0][where]  # (M, D)
    head = common.draft_head(target, drafter.draft_ids).to(features.dtype)
    return head(predicted).float(), predicted.float(), answers[where].float(), where


def loss(drafter: Drafter, target, batch: common.Batch) -> Tensor:
    """L_reg (mean over D) + omega_dist (0.9 L_soft + 0.1 L_hard), summed over slots (Eq. 2-8)."""
    config = drafter.config
    ids = drafter.draft_ids
    replaced = torch.zeros_like(batch.loss_mask[:, 1:])  # (B, S)
    if config.csgd and config.k > 1:  # a first pass finds the slots that miss
        with torch.no_grad():
            logits, _, answers, where = training_pass(drafter, target, batch)
        truth = common.target_logits(target, answers, ids).argmax(-1)  # (M,)
        wrong = where.clone()  # (B, S)
        wrong[where] = logits.argmax(-1) != truth
        replaced = glance(wrong, where, 0.4 * (1 - batch.progress), config.k, batch.seed)
    logits, predicted, answers, _ = training_pass(drafter, target, batch, replaced)
    log_p_target = common.target_logits(target, answers, ids).log_softmax(-1)  # (M, Vd)
    log_q_draft = logits.log_softmax(-1)  # (M, Vd)
    l1 = F.smooth_l1_loss(predicted, answers, reduction="sum") / answers.shape[-1]
    soft = F.kl_div(log_q_draft, log_p_target, log_target=True, reduction="sum")
    hard = F.nll_loss(log_q_draft, log_p_target.argmax(-1), reduction="sum")  # the target's argmax
    return l1 + config.distill_weight * (0.9 * soft + 0.1 * hard)


def alpha(drafter: Drafter, target, batch: common.Batch) -> tuple[Tensor, int]:
    """Acceptance, sum_x min(p_target, q_draft), summed over a first pass's slots; their number."""
    logits, _, answers, _ = training_pass(drafter, target, batch)
    p_target = common.target_logits(target, answers).softmax(-1)  # (M, V)
    return torch.minimum(p_target[:, drafter.draft_ids], logits.softmax(-1)).sum(), len(logits)


# ------------------------------------------------------------------------------- trees and decoding


def layered_tree(counts: list[int]) -> list[list[int]]:
    """A tree of counts[d] nodes at depth d + 1, more and deeper ones under likely tokens (App. A).

    [2, 3] gives [0] [1], [0, 0] [0, 1] [1, 0]: the smallest products of (rank + 1) on a path.
    """
    tree = []
    level = [[]]
    for count in counts:
        grown = [[*path, rank] for path in level for rank in range(count)]
        level = sorted(grown, key=lambda path: (math.prod(rank + 1 for rank in path), path))[:count]
        tree += level
    return tree


PAPER_TREE = layered_tree([20, 19, 19, 15, 16, 10, 10, 9])  # figure 5's counts, see deviation 6
VARIANTS = {
    "chain": {"chain": True},  # Table 4's ablation
    "paper": {"tree": PAPER_TREE, "best_nodes": 0},
    "confidence": {"best_nodes": 5},
    "copies": {"copies": 16},
    "both": {"best_nodes": 5, "copies": 16},
}


def prune(tree, depth: int, ranks: int) -> list[tuple]:
    """The tree's rank paths, parents first, without those too deep or of too high a rank.

    Raises: ValueError: a path without its parent, or not of ranks.
    """
    paths = {tuple(path) for path in tree}
    for path in paths:
        if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in paths):
            raise ValueError(f"tree path {list(path)}: give ranks from 0, and every prefix")
    kept = [path for path in paths if len(path) <= depth and max(path) < ranks]
    return sorted(kept, key=lambda path: (len(path), path))


def best_paths(q_draft: dict, config: Config, depth: int) -> list[tuple]:
    """The `best_nodes` rank paths of the largest product of probabilities, parents first.

    All nodes of a block share a slot's distribution, whatever stands before them. k = 2, slot 0
    gives .6 .3 and slot 1 .5 .4: (0) .6, (0, 0) .6 * .5, (1) .3, (0, 1) .6 * .4, (1, 0) .3 * .5.
    Best first is exact: no node is worth more than its parent. So is choosing anew after a pass: it
    only adds candidates, so what was left out stays out. Of equals, smaller ranks come first.

    Args: q_draft: {path that a block continues: [slot][rank] probabilities}. depth: most levels.
    """
    heap = [(-1.0, ())]
    chosen = []
    while heap and len(chosen) <= config.best_nodes:
        minus_worth, path = heapq.heappop(heap)
        if -minus_worth < config.least_worth:
            break
        chosen.append(path)
        slot = len(path) % config.k
        block = q_draft.get(path[: len(path) - slot])  # where the node's children were drafted
        if block and len(path) < depth:
            for rank, q in enumerate(block[slot]):
                heapq.heappush(heap, (minus_worth * q, (*path, rank)))
    return chosen[1:]  # without the root


@dataclass
class Memory:
    """What the drafter keeps from round to round of one answer."""

    cache: common.GrowingCache  # its own keys and values of committed ("stable") slots
    head: nn.Module  # the target's LM head for the draft vocabulary, D -> Vd
    waiting: Tensor  # (1, n, D) features of the target that were not fed yet
    tail: Tensor  # (1, <= k, D) the last fused slots, which may have to attend again
    state: tuple | None = None  # the LSTM's, after the last slot


def new_memory(drafter: Drafter, target) -> Memory:
    """An empty memory, to begin an answer with."""
    head = common.draft_head(target, drafter.draft_ids)
    nothing = head.weight[None, :0]  # (1, 0, D)
    return Memory(common.GrowingCache(drafter.config.num_layers), head, nothing, nothing)


def first_pass(drafter: Drafter, target, input_ids: Tensor, memory: Memory) -> Tensor:
    """Feed the committed slots that are new: predicted features (1, k, D) of the newest block.

    Blocks are counted back from the newest slot, so their borders move from round to round. Old
    slots that now share a block with new ones attend again, to see them; what fusion made of them
    still holds. k = 3, slots 0 to 5 fed before, features 6 and 7 waiting:

        blocks   0 1 2 | 3 4 5   ->   0 1 | 2 3 4 | 5 6 7        tail    fused slots 3 4 5
        again    1: slot 5, taken out of the cache               before  fused slot 5
        fed      5 6 7, which see 0 to 7; slot 2 keeps what it saw: 0 1 2
    """
    k = drafter.config.k
    total = input_ids.shape[1] - 1  # P
    new = memory.waiting.shape[1]
    again = min(-new % k, memory.tail.shape[1])  # to fill blocks; a first round has no old slots
    memory.cache.crop(-again)
    slots = torch.arange(total, device=input_ids.device)  # (P,)
    fed = slots[total - new - again :]  # (again + new,)
    block = (slots - total) // k  # (P,) ..., -2, -1
    predicted, fused, memory.state = drafter(
        memory.waiting,
        target.get_input_embeddings()(input_ids[:, -new:]),
        common.rotary(target, fed[None], -1),
        (block[fed, None] >= block)[None, None],  # (1, 1, again + new, P)
        memory.cache,
        memory.state,
        before=memory.tail[:, memory.tail.shape[1] - again :],
    )
    memory.tail = torch.cat([memory.tail, fused], dim=1)[:, -k:]
    memory.waiting = memory.waiting[:, :0]
    return predicted[:, -k:]


def propose(drafter, target, input_ids, hidden, memory, config, depth, stats) -> common.Draft:
    """Draft a token tree, k levels a pass (3.4); none while there are fewer than k slots.

    Args: input_ids: (1, P + 1) committed tokens. hidden: (1, n, D) the target's features since the
        last call, token P - 1 being the last. config: its tree, or best_nodes, counts. depth: most
        levels. stats: is told k, and the probability of each node in its slot.
    """
    k = config.k
    total = input_ids.shape[1] - 1  # P
    memory.waiting = torch.cat([memory.waiting, hidden], dim=1)
    if config.best_nodes:
        ranks = min(config.best_nodes, len(drafter.draft_ids))  # the most that one parent needs
        depth = min(depth, config.passes * k)
    else:
        paths = prune(config.tree, depth, len(drafter.draft_ids))
        ranks = 1 + max(map(max, paths), default=-1)
    if total < k or min(ranks, depth) < 1:
        return common.chain([], input_ids)

    def entry(table, path):  # of node (4, 3, 1), k = 2: what stands below (4, 3), slot 0, rank 1
        slot = (len(path) - 1) % k
        return table[path[: len(path) - 1 - slot]][slot][path[-1]]

    # k = 2, a tree ac ad be (a b drafted in slot 0, c d e in slot 1) with deeper nodes:
    #   pass 2   grown ac ad be, parent 0 0 0: blocks (a c) (a d) (b e), 6 rows side by side
    #   pass 3   grown acfg beij, parent 0 2: block (f g) sees (a c) and itself, (i j) sees (b e)
    predicted = first_pass(drafter, target, input_ids, memory)  # (1, k, D)
    state = memory.state
    sight = torch.ones(1, total, dtype=torch.bool, device=input_ids.device)  # (1, P)
    grown = [()]  # the node that each block of the pass continues
    q_draft = {}  # {such a node: [slot][rank]}
    tokens = {}  # likewise
    for end in range(k, depth + k, k):  # the depth of the last tokens that a pass drafts
        top = memory.head(predicted).softmax(-1, dtype=torch.float32).topk(ranks)  # (n, k, ranks)
        q_draft |= zip(grown, top.values.tolist())
        tokens |= zip(grown, drafter.draft_ids[top.indices].tolist())
        blocks = grown
        if config.best_nodes:
            paths = best_paths(q_draft, config, depth)
            grown = [path for path in paths if len(path) == end and end < depth]
        else:
            grown = list(dict.fromkeys(path[:end] for path in paths if len(path) > end))
        if not grown:
            break
        parent = torch.tensor([blocks.index(path[:-k]) for path in grown], device=sight.device)
        last = range(end - k + 1, end + 1)
        fed = [[entry(tokens, path[:length]) for length in last] for path in grown]  # (n, k)
        slots = torch.arange(total + end - k, total + end, device=sight.device).repeat(len(grown))
        sight = tree_sight(sight, parent, k)  # (n, rows)
        predicted, _, state = drafter(
            predicted[parent],
            target.get_input_embeddings()(input_ids.new_tensor(fed)),
            common.rotary(target, slots[None], -1),
            sight.repeat_interleave(k, dim=0)[None, None],  # (1, 1, n k, rows)
            memory.cache,
            state and tuple(x[:, parent] for x in state),  # each (2, n, D)
        )
        predicted = predicted.view(len(grown), k, -1)  # (n, k, D)
    memory.cache.crop(total - memory.cache.get_seq_length())  # rows of later passes are guesses
    if stats.trace is not None:
        stats.note(k=k, q_nodes=[entry(q_draft, path) for path in paths])
    number = {path: n for n, path in enumerate(paths)}
    parents = torch.tensor([number.get(path[:-1], -1) for path in paths], dtype=torch.long)
    return common.Draft(input_ids.new_tensor([entry(tokens, path) for path in paths]), parents)


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter,
    tree=None,
    chain=False,
    best_nodes=None,
    passes=None,
    least_worth=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=falcon.generate, drafter=drafter)`: lossless.

    Args: tree to copies: as in Config, by default the drafter's; chain: first choices only, as deep
        as the tree. stats: a common.Stats to fill. token_streamer: a streamer of transformers.
    Returns: (1, T') prompt and new tokens.
    """
    given = {"tree": tree, "best_nodes": best_nodes, "passes": passes}
    given |= {"least_worth": least_worth, "copies": copies}
    config = replace(drafter.config, **{k: v for k, v in given.items() if v is not None})
    if chain:
        depths = range(1, 1 + max(map(len, config.tree), default=0))
        config = replace(config, tree=[[0] * depth for depth in depths], best_nodes=0)
    stats = stats or common.Stats()
    cache, hidden = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    memory = new_memory(drafter, target)
    lookup = common.Lookup(config.copies)
    done = False
    while not done:
        with stats.timer("draft" if memory.cache.get_seq_length() else "prefill"):
            room = generation_config.max_length - input_ids.shape[1] - 1  # one place is the bonus's
            draft = propose(drafter, target, input_ids, hidden, memory, config, room, stats)
            draft = lookup.merge(draft, input_ids, room)
        tokens, _, hidden = common.verify(
            target, input_ids, draft, cache, logits_processor, generation_config.do_sample, stats
        )
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "falcon")
