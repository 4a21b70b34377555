"""Medusa: one head per future token (Cai et al., 2024), CTC-drafter's rival.

Paper: arXiv:2401.10774; Table 2 of CTC-drafter. Head j is a residual linear
layer. All heads read the same row and choose independently. The draft is a
tree of the most probable combinations of their tokens:

    row (h_i, x_(i+1))  ->  head 0: x_(i+2)    head 1: x_(i+3)    head 2: x_(i+4)

Deviations from the paper:
    1. The heads read h_i and the next token x_(i+1); the paper's only h_i.
    2. They share the target's LM head; in the paper each trains a copy.
    3. The tree's shape changes every round; the paper's is fixed.

Label windows, ranking and tree are those of ctc_drafter.py.

Licence: Apache-2.0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

import common
import ctc_drafter
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    window: int = option(3, "tokens ahead, a head for each, U")
    anchors: int = option(64, "places of a sequence to train at")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    symbols: int = option(10, "likeliest tokens of a head to consider", decode=True)
    candidates: int = option(16, "combinations kept after a head", decode=True)
    nodes: int = option(10, "most nodes of the tree", decode=True)

    def __post_init__(self):
        common.at_least(self, window=1, anchors=1, draft_vocab=0)
        common.at_least(self, symbols=1, candidates=1, nodes=0)


VARIANTS = {}


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The heads. Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # reads hidden states only
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(config.window))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.register_buffer("draft_ids", common.placeholder_ids(config.target, config.draft_vocab))

    def forward(self, target, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """States (..., U, D) of the heads.

        hidden: (..., D) the target's last hidden states.
        next_ids: (...) the tokens after them.
        """
        dtype = self.norm.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        row = self.fusion(torch.cat(both, dim=-1))  # (..., D)
        states = [row + F.silu(head(row)) for head in self.heads]
        return self.norm(torch.stack(states, dim=-2))


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to train; its fusion starts as the sum of both inputs.

    token_counts: (V,) how often each token occurs in the responses.
    """
    config.target = common.target_shape(target)
    drafter = Drafter(config)
    sum_of_both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2D)
    drafter.fusion.weight.data.copy_(sum_of_both)
    common.start_from(drafter, target, token_counts)
    return drafter


def training_logits(drafter: Drafter, target, batch, anchors: Tensor, used: Tensor) -> Tensor:
    """Logits (W, U, Vd) of the heads after the W anchors in use."""
    hidden = batch.hidden.take_along_dim(anchors[..., None], dim=1)[used]  # (W, D)
    next_ids = batch.input_ids[:, 1:].take_along_dim(anchors, dim=1)[used]  # (W,)
    states = drafter(target, hidden, next_ids)  # (W, U, D)
    head = common.draft_head(target, drafter.draft_ids).to(states.dtype)
    return head(states).float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of head j, times 0.8^j, and number of anchors."""
    anchors, labels, used = ctc_drafter.windows(drafter, target, batch)
    logits = training_logits(drafter, target, batch, anchors, used)  # (W, U, Vd)
    labels = labels[used]  # (W, U)
    surprise = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = 0.8 ** torch.arange(labels.shape[1], device=labels.device)  # (U,)
    return (surprise.view_as(labels) * weights).sum(), used.sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Sum of min(p_target, q_draft) of the first draft token; anchor count."""
    anchors, _, used = ctc_drafter.windows(drafter, target, batch)
    q_draft = training_logits(drafter, target, batch, anchors, used)[:, 0].softmax(-1)  # (W, Vd)
    hidden = ctc_drafter.teacher_hidden(batch, anchors, used)
    return common.overlap(target, hidden, q_draft, drafter.draft_ids), len(q_draft)


class Memory:
    """What the drafter keeps from round to round of one answer."""

    def __init__(self, drafter: Drafter, target):
        self.head = common.draft_head(target, drafter.draft_ids)  # D -> Vd


def propose(drafter: Drafter, decoding, memory: Memory) -> Tensor:
    """The heads' probabilities q_heads (U, Vd) after the newest token."""
    states = drafter(decoding.target, decoding.hidden[0, -1], decoding.ids[0, -1])  # (U, D)
    return memory.head(states).float().softmax(-1)


@torch.no_grad()
def drafts(decoding, drafter: Drafter, config: Config):
    """Yield one draft per round, which the caller verifies."""
    memory = Memory(drafter, decoding.target)
    while not decoding.done:
        if decoding.hidden.shape[1] == 0:  # prompt of one token
            yield common.chain([], decoding.ids)
            continue
        q_heads = propose(drafter, decoding, memory)
        q_slots = F.pad(q_heads, (0, 1))  # with a blank that never comes
        prefixes = ctc_drafter.alignments(q_slots, config.symbols, config.candidates, merge=False)
        yield ctc_drafter.token_tree(prefixes, drafter.draft_ids, config.nodes, decoding.room)


def generate(
    target, input_ids, drafter, config=None, copies=0, stats=None, token_streamer=None, **given
):
    """Lossless decoding: pass it to target.generate as `custom_generate`.

    Args:
        config: a Config to decode with; by default the drafter's.
        copies, stats, token_streamer: as for common.Decoding.
    Returns:
        (1, T') prompt and new tokens.
    """
    common.check_drafter(drafter, Drafter, target, config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, drafter, config or drafter.config):
        decoding.verify(draft)
    return decoding.ids
