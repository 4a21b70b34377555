"""Falcon: a semi-autoregressive drafter and a decoding tree made for it (Gao et al., AAAI 2025,
arXiv:2412.12639).

From the target's last hidden states ("features") and the tokens one step ahead, the drafter
predicts k further features in one pass; the target's LM head turns them into tokens. The k slots of
a block see each other, and training teaches them to agree: coupled sequential glancing distillation
(CSGD) shows some their answers, fewer as it goes on. Drafting grows a token tree by k levels a
pass. k = 2, newest token x_4, f predicting h:

    pass 1    (h_2, x_3) (h_3, x_4)  ->  f_4, f_5  ->  x_5, x_6        an ordinary next step, and
    one two tokens ahead pass 2    (f_4, x_5) (f_5, x_6)  ->  f_6, f_7  ->  x_7, x_8        for
    every branch x_5 x_6 of the tree

    symbol             name here                 section      function
    f_i, t_(i+1)       slot i: features, tokens  3.1, Eq. 1   training_pass, propose
    LSTM               Drafter.fusion            3.2          Drafter
    relaxed mask       relaxed_mask, tree_sight  3.2, Fig. 3  training_pass, propose
    d(), N, lambda     wrong, count, rate        3.2          loss, glance
    L_reg, L_dist      l1; soft, hard            Eq. 2-8      loss
    m passes, n nodes  Config.tree               3.4, App. A  propose

Deviations
    1. upstream != paper: upstream's LSTM has its axes mixed up and never recurs (`cell`); this one
       does, along every branch. What is shipped has none (`linear`): alike after 200 steps (alpha
       0.130, LSTM 0.128), in half the time.
    2. upstream != paper: blocks end at the newest token in every round (upstream counts from the
       start of a chunk and then drafts half its rounds without seeing that token); training draws a
       random phase.
    3. paper silent: CSGD's runs start at the first slot of a block and spare its last one, as 3.2
       wants what precedes the predicted. A replaced slot holds its answer, so no loss is taken on
       it (upstream takes it).
    4. ours: features and embeddings are normed before fusion (their scales differ by 20 on the
       default target); the attention layers and a final norm start as the target's; drafts are
       frequent tokens only (`draft_vocab`).
    5. paper silent: trees are drawn, not listed. `layered_tree` fills the paper's nodes per depth
       with the smallest products of ranks; `fit_tree` grows one for a drafter and a machine. Ranks
       of a slot serve all its block's nodes.
    6. ours: lossless sampling: trees are chosen by rank, so the target's draw decides where to
       descend, exactly.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

import common


@dataclass
class Config:
    target: dict = field(
        default_factory=dict, metadata={"help": "shape of the target (filled in by train.py)"}
    )
    k: int = field(default=2, metadata={"help": "tokens predicted by a pass"})
    num_layers: int = field(
        default=1, metadata={"help": "attention layers (Figure 2 shows two; one learns faster)"}
    )
    intermediate_size: int = field(
        default=1536, metadata={"help": "width of the feed-forward sub-layer"}
    )
    fusion: str = field(
        default="lstm", metadata={"help": "lstm, cell (LSTM without recurrence) or linear"}
    )
    csgd: bool = field(default=True, metadata={"help": "coupled sequential glancing distillation"})
    noise: float = field(
        default=0.1, metadata={"help": "features get U(-noise, noise) in training"}
    )
    distill_weight: float = field(
        default=0.1, metadata={"help": "omega_dist, weight of the losses on tokens"}
    )
    draft_vocab: int = field(
        default=8192, metadata={"help": "draft only the most frequent tokens; 0: all of them"}
    )
    tree: list = field(
        default_factory=lambda: layered_tree([4, 4, 3, 2]),
        metadata={"help": "rank paths; [0, 2] is the first node's third child", "decode": True},
    )


# ----------------------------------------------------------------------------------- decoding trees


def layered_tree(counts: list[int]) -> list[list[int]]:
    """A tree of counts[d] nodes at depth d + 1, more and deeper ones under likely tokens (Appendix
    A)."""
    tree, level = [], [[]]
    for count in counts:
        grown = [[*path, rank] for path in level for rank in range(count)]
        level = sorted(grown, key=lambda path: (math.prod(rank + 1 for rank in path), path))[:count]
        tree += level
    return tree


PAPER_TREE = layered_tree([20, 19, 19, 15, 16, 10, 10, 9])  # Figure 5: Vicuna, k = 2, 4 passes
VARIANTS = {
    "chain": {"chain": True},
    "paper": {"tree": PAPER_TREE},
}  # Table 4's ablation, and the paper's size


def prune(tree, depth: int, ranks: int) -> list[tuple]:
    """The tree's rank paths, parents first, without those too deep or of too high a rank;
    ValueError for a bad tree."""
    paths = {tuple(path) for path in tree}
    for path in paths:
        if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in paths):
            raise ValueError(
                f"tree path {list(path)} has no parent or is no list of ranks from 0; list every "
                "prefix"
            )
    return sorted(
        (p for p in paths if len(p) <= depth and max(p) < ranks), key=lambda path: (len(path), path)
    )


# ------------------------------------------------------------------------------------- architecture


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The relaxed causal SAR head. Holds only what is trained; embeddings and LM head of the target
    are passed in."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        shape, hidden, vocab = (
            config.target,
            config.target["hidden_size"],
            config.target["vocab_size"],
        )
        self.feature_norm, self.embed_norm, self.norm = (
            nn.RMSNorm(hidden, eps=1e-5) for _ in range(3)
        )
        lstm = config.fusion != "linear"
        self.fusion = (
            nn.LSTM(2 * hidden, hidden, 2, batch_first=True)
            if lstm
            else nn.Linear(2 * hidden, hidden)
        )
        llama = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            head_dim=shape["head_dim"],
            num_attention_heads=shape["num_heads"],
            num_key_value_heads=shape["num_kv_heads"],
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(llama, index) for index in range(config.num_layers)
        )
        self.register_buffer(
            "draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab))
        )  # (Vd,)
        self.kv_layers = []  # reads the target's features, not its keys and values

    def forward(
        self,
        features: Tensor,
        embeds: Tensor,
        rotary,
        head: nn.Module,
        rows,
        mask: Tensor,
        cache=None,
        state=None,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple | None]:
        """Draft logits (..., Vd), predicted features (..., D) of the chosen rows; fused slots (n,
        t, D), LSTM state.

        Args:
            features: (n, t, D) of the target, or predicted. embeds: (n, t, D) of the tokens one
                step ahead.
            rotary: cos and sin, each (1, r, R). head: the target's LM head for the draft
                vocabulary, D -> Vd.
            rows: index into the attention's rows (B, r): B = n, or 1 if n branches of a tree stand
                side by side.
            mask: (B, 1, r, cached + r) bool. state: the LSTM's. before: (1, <k, D) old fused slots
                that attend again.
        """
        pair = torch.cat(
            [self.feature_norm(features), self.embed_norm(embeds)], dim=-1
        )  # (n, t, 2D)
        if self.config.fusion == "lstm":
            with torch.autocast(
                pair.device.type, enabled=False
            ):  # bfloat16 triples the time of its backward on a CPU
                fused, state = self.fusion(pair, state)
        else:  # cell: every slot is a sequence of its own
            fused = self.fusion(pair.flatten(0, 1)[:, None])
            fused = (fused if self.config.fusion == "linear" else fused[0]).view_as(features)
        x = fused.reshape(len(mask), -1, fused.shape[-1])
        x = x if before is None else torch.cat([before, x], dim=1)
        missing = (
            self.config.target["head_dim"] - rotary[0].shape[-1]
        ) // 2  # some targets rotate a part of a head
        halves = (table[..., : table.shape[-1] // 2].to(x.dtype) for table in rotary)
        rotary = tuple(
            F.pad(half, (0, missing), value=fill).repeat(1, 1, 2)
            for half, fill in zip(halves, (1.0, 0.0))
        )
        for layer in self.layers:
            x = layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary)
        predicted = self.norm(x[rows])
        return head(predicted), predicted, fused, state


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from: layers copied from the target's top ones where names and
    shapes agree.

    Args: token_counts: (V,) how often each token occurs in the training responses; the top ones can
    be drafted.
    """
    if config.fusion not in ("lstm", "cell", "linear") or config.k < 1:
        raise ValueError(
            f"fusion {config.fusion!r}, k {config.k}: fusion is lstm, cell or linear, k at least 1"
        )
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
        if config.fusion == "linear":
            drafter.fusion.weight.copy_(
                torch.eye(config.target["hidden_size"]).repeat(1, 2)
            )  # starts as a sum
        sources = list(getattr(target.base_model, "layers", []))[-config.num_layers :]
        for layer, source in zip(drafter.layers, sources):
            theirs = source.state_dict()
            for name, weight in layer.state_dict().items():
                if name in theirs and theirs[name].shape == weight.shape:
                    weight.copy_(theirs[name])
        if hasattr(target.base_model, "norm"):
            drafter.norm.weight.copy_(target.base_model.norm.weight)
    return drafter


# ------------------------------------------------------------------------------- training objective


def relaxed_mask(length: int, k: int, phase: Tensor) -> Tensor:
    """Which slots each slot may attend to (3.2): all earlier blocks and the whole of its own. k =
    2, phase 1:

           key   0  1  2  3  4        blocks: 0 | 1 2 | 3 4
        slot 0   x  .  .  .  .
             1   x  x  x  .  .
             2   x  x  x  .  .
             3   x  x  x  x  x
             4   x  x  x  x  x

    Args: phase: (B,) shift of the block borders per sequence. Returns: (B, 1, S, S) bool.
    """
    block = (torch.arange(length, device=phase.device) + phase[:, None]) // k  # (B, S)
    return (block[:, :, None] >= block[:, None, :])[:, None]


def glance(wrong: Tensor, where: Tensor, rate: float, k: int, seed: Tensor) -> Tensor:
    """Choose the slots that CSGD shows their answers (3.2): N = rate * d per sequence, d slots
    having missed.

    Blocks in random order give runs of 1 to k - 1 slots, from their first on, while fewer than N. k
    = 3, a run of 2:

        slot                0        1        2                 0        1        2
        input            h_0 x_1  h_1 x_2  h_2 x_3     ->    h_3 x_4  h_4 x_5  h_2 x_3
        learns           h_3 x_4  h_4 x_5  h_5 x_6              -        -     h_5 x_6, seeing the
        two before it

    Args: wrong, where: (B, S) slots that missed the target's token, and that learn. seed: (B,), of
    the phase as well.
    Returns: (B, S) bool.
    """
    learns, replaced = where.cpu(), torch.zeros(where.shape, dtype=torch.bool)
    for row, number in enumerate(seed.tolist() if k > 1 else []):
        generator, count = (
            torch.Generator().manual_seed(number),
            round(rate * int(wrong[row].sum())),
        )
        starts = range(-number % k, where.shape[1], k)
        for block in torch.randperm(len(starts), generator=generator).tolist():
            run = min(count, int(torch.randint(1, k, (), generator=generator)))
            part = slice(starts[block], starts[block] + run)
            replaced[row, part] = learns[row, part]
            count -= int(learns[row, part].sum())
    return replaced.to(where.device)


def training_pass(drafter: Drafter, target, batch, replaced: Tensor | None = None):
    """Run over slots i = 0 .. S - 1 = T - 2, inputs (h_i, x_(i+1)), to predict h_(i+k) and so
    x_(i+k+1).

    Args: replaced: (B, S) slots that get their answers (h_(i+k), x_(i+k+1)) as input and teach
    nothing; adds the noise.
    Returns: logits (M, Vd), features (M, D), the target's own features (M, D), the M slots that
    learn, (B, S) bool.
    """
    k, length, hidden = (
        drafter.config.k,
        batch.input_ids.shape[1],
        batch.hidden.to(drafter.norm.weight.dtype),
    )
    features, tokens = hidden[:, :-1], batch.input_ids[:, 1:]
    answers = F.pad(hidden, (0, 0, 0, k))[:, k : k + length - 1]  # (B, S, D)
    answer_tokens, where = (
        F.pad(x, (0, k))[:, k + 1 : k + length] for x in (batch.input_ids, batch.loss_mask)
    )
    if replaced is not None:
        where = where & ~replaced
        features = torch.where(replaced[..., None], answers, features)
        tokens = torch.where(replaced, answer_tokens, tokens)
        generators = [torch.Generator().manual_seed(seed) for seed in batch.seed.tolist()]
        noise = torch.stack(
            [torch.rand(features.shape[1:], generator=generator) for generator in generators]
        )
        features = features + drafter.config.noise * (2 * noise.to(features) - 1)
    embeds = target.get_input_embeddings()(tokens).to(features.dtype)
    head = common.draft_head(target, drafter.draft_ids).to(features.dtype)
    rotary = common.rotary(target, torch.arange(length - 1, device=tokens.device)[None], -1)
    out = drafter(
        features, embeds, rotary, head, where, relaxed_mask(length - 1, k, batch.seed % k)
    )
    return out[0].float(), out[1].float(), answers[where].float(), where


def loss(drafter: Drafter, target, batch) -> Tensor:
    """Smooth L1 on features (mean over D) + omega (alpha KL + (1 - alpha) CE) on tokens, summed
    over slots (Eq. 2-8).

    With CSGD a first pass, without gradient, finds d. Hard labels are the target's argmax over the
    draft vocabulary.
    Args: batch: common.Batch.
    """
    config, ids, replaced = (
        drafter.config,
        drafter.draft_ids,
        torch.zeros_like(batch.loss_mask[:, 1:]),
    )
    if config.csgd:
        with torch.no_grad():
            logits, _, answers, where = training_pass(drafter, target, batch)
            wrong = where.clone()
            wrong[where] = logits.argmax(-1) != common.target_logits(target, answers, ids).argmax(
                -1
            )
        replaced = glance(wrong, where, 0.4 * (1 - batch.progress), config.k, batch.seed)
    logits, features, answers, _ = training_pass(drafter, target, batch, replaced)
    log_p, log_q = (
        common.target_logits(target, answers, ids).log_softmax(-1),
        logits.log_softmax(-1),
    )  # (M, Vd)
    l1 = F.smooth_l1_loss(features, answers, reduction="sum") / answers.shape[-1]
    soft = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    hard = F.nll_loss(log_q, log_p.argmax(-1), reduction="sum")
    return l1 + config.distill_weight * (0.9 * soft + 0.1 * hard)


def alpha(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Acceptance rate at temperature 1 of what the first pass drafts, mean over the k slots of a
    block.

    Sum over slots of sum_x min(p_target, q_draft), and their number. Inputs are the target's own
    features.
    """
    logits, _, answers, _ = training_pass(drafter, target, batch)
    p_target = common.target_logits(target, answers).softmax(-1)[:, drafter.draft_ids]
    return torch.minimum(p_target, logits.softmax(-1)).sum(), len(logits)


# ----------------------------------------------------------------------------------------- decoding


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
    return Memory(
        common.GrowingCache(drafter.config.num_layers), head, waiting=nothing, tail=nothing
    )


def tree_sight(sight: Tensor, parent: Tensor, k: int) -> Tensor:
    """What the branches of a pass see (Figure 3): what their parents saw, and their own k slots. k
    = 2:

                   stable   a a b b c c   d d e e        d continues a, e continues c;
        pass 2  a   x x x   x x . . . .                  both slots of a branch see the same
                b   x x x   . . x x . .
                c   x x x   . . . . x x
        pass 3  d   x x x   x x . . . .   x x . .
                e   x x x   . . . . x x   . . x x

    Args: sight: (b, rows) bool of the pass before. parent: (n,) which of its branches each new one
    continues.
    Returns: (n, rows + n k) bool.
    """
    own = torch.eye(len(parent), dtype=torch.bool, device=sight.device).repeat_interleave(k, dim=1)
    return torch.cat([sight[parent], own], dim=1)


def propose(
    drafter: Drafter, target, input_ids: Tensor, hidden: Tensor, memory: Memory, tree, depth: int
) -> common.Draft:
    """Draft a token tree, k levels a pass (3.4). Nothing is drafted while there are fewer than k
    slots.

    The newest k slots are one block. If the new slots do not fill their blocks, the last old ones
    attend again, seeing the new; what the LSTM made of them still holds. k = 3, stable slots 0-5,
    new 6 7: fed 5 6 7.

    Args: input_ids: (1, P + 1) committed tokens. hidden: (1, n, D) the target's features since the
        last call, token P - 1 being the last. memory: from new_memory. tree: rank paths. depth:
        most levels.
    """
    k, total, embed = drafter.config.k, input_ids.shape[1] - 1, target.get_input_embeddings()
    memory.waiting = torch.cat([memory.waiting, hidden], dim=1)
    paths = prune(tree, depth, len(drafter.draft_ids))
    if total < k or not paths:
        return common.chain([], input_ids)
    new, slots = memory.waiting.shape[1], torch.arange(total, device=input_ids.device)
    again = min(-new % k, memory.tail.shape[1])
    memory.cache.crop(-again)
    fed, block = (
        slots[total - new - again :],
        (slots - total) // k,
    )  # blocks count back from the newest slot
    mask, rotary = (block[fed, None] >= block)[None, None], common.rotary(target, fed[None], -1)
    logits, features, fused, state = drafter(
        memory.waiting,
        embed(input_ids[:, -new:]),
        rotary,
        memory.head,
        (slice(None), slice(-k, None)),
        mask,
        memory.cache,
        memory.state,
        before=memory.tail[:, memory.tail.shape[1] - again :],
    )
    memory.tail, memory.waiting, memory.state = (
        torch.cat([memory.tail, fused], dim=1)[:, -k:],
        memory.waiting[:, :0],
        state,
    )

    branches, tokens, ranks = {(): 0}, {}, 1 + max(map(max, paths))
    sight = torch.ones_like(slots, dtype=torch.bool)[None]  # (1, P)
    for level in range(0, len(paths[-1]), k):
        # the nodes at this depth that have children, each with its k - 1 ancestors, make a block
        if level:
            grown = list(dict.fromkeys(path[:level] for path in paths if len(path) > level))
            parent = torch.tensor([branches[path[:-k]] for path in grown], device=input_ids.device)
            drafted = [
                [tokens[path[:end]] for end in range(level - k + 1, level + 1)] for path in grown
            ]
            positions = (torch.arange(level - k, level, device=input_ids.device) + total).repeat(
                len(grown)
            )[None]
            sight, state = (
                tree_sight(sight, parent, k),
                state and tuple(x[:, parent] for x in state),
            )
            logits, features, _, state = drafter(
                features[parent],
                embed(input_ids.new_tensor(drafted)),
                common.rotary(target, positions, -1),
                memory.head,
                (slice(None),),
                sight.repeat_interleave(k, dim=0)[None, None],
                memory.cache,
                state,
            )
            logits, features = (
                x.unflatten(1, (-1, k))[0] for x in (logits, features)
            )  # (n, k, Vd), (n, k, D)
            branches = {path: number for number, path in enumerate(grown)}
        ranked = drafter.draft_ids[logits.topk(ranks).indices].tolist()  # [branch][slot][rank]
        tokens |= {
            path: ranked[branches[path[:level]]][len(path) - level - 1][path[-1]]
            for path in paths
            if level < len(path) <= level + k
        }
    memory.cache.crop(total - memory.cache.get_seq_length())  # rows of tree passes are guesses
    parents = torch.tensor([paths.index(path[:-1]) if path[:-1] else -1 for path in paths])
    return common.Draft(input_ids.new_tensor(list(tokens.values())), parents)


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
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=falcon.generate, drafter=drafter)`: lossless decoding
    with Falcon.

    Args: tree: rank paths, Config.tree by default. chain: first choices only, as deep as it. stats:
    common.Stats.
    Returns: (1, T') prompt and new tokens.
    """
    tree, stats = drafter.config.tree if tree is None else tree, stats or common.Stats()
    tree = (
        [[0] * depth for depth in range(1, 1 + max(map(len, tree), default=0))] if chain else tree
    )
    cache, hidden = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    memory, done = new_memory(drafter, target), False
    while not done:
        with stats.timer("draft" if memory.cache.get_seq_length() else "prefill"):
            room = (
                generation_config.max_length - input_ids.shape[1] - 1
            )  # the bonus token takes one place
            draft = propose(drafter, target, input_ids, hidden, memory, tree, room)
        tokens, _, hidden = common.verify(
            target, input_ids, draft, cache, logits_processor, generation_config.do_sample, stats
        )
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "falcon")
