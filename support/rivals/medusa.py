"""Medusa: a head for each of the next tokens, CTC-drafter's rival.

Paper: Cai et al., 2024, arXiv:2401.10774; Table 2 of CTC-drafter.

All heads read the same row, and each predicts its token without knowing the others':

    row (h_i, x_(i+1)), heads 0, 1, 2 -> x_(i+2), x_(i+3), x_(i+4)

The combinations of their tokens with the greatest products of probabilities form a
tree. Label windows, ranking and tree are those of ctc_drafter.py, so that the two
differ only in the drafter and its loss.

Deviations from the paper and what the authors' code does: at the end of this file.
Licence: Apache-2.0.
"""

import dataclasses
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
    labels: int = option(3, "tokens that are learned: the number of heads, U")
    anchors: int = option(64, "places to train at, per sequence")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    symbols: int = option(10, "likeliest tokens tried per head", decode=True)
    nodes: int = option(
        5, "at most this many nodes (the authors' code: 63)", decode=True
    )

    transform = "none"  # no field: for ctc_drafter.make_tree, as heads have no blank

    def __post_init__(self):
        common.at_least(self, labels=1, anchors=1, draft_vocab=0)
        common.at_least(self, symbols=1, nodes=0)


VARIANTS = {"paper": {"symbols": 10, "nodes": 63}}


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2401.10774",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "medusa"],
):
    """The heads. Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.kv_layers = []  # it reads no K and V of the target
        width = config.target["hidden_size"]
        self.feature_norm = nn.RMSNorm(width, eps=1e-5)
        self.embed_norm = nn.RMSNorm(width, eps=1e-5)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        heads = [nn.Linear(width, width) for _ in range(config.labels)]
        self.heads = nn.ModuleList(heads)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        common.add_vocab_ids(self, config.draft_vocab)

    def forward(self, target, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """States (..., U, D) of the heads; hidden (..., D), next_ids (...)."""
        dtype = self.fusion.weight.dtype
        embeds = target.get_input_embeddings()(next_ids).to(dtype)
        both = [self.feature_norm(hidden.to(dtype)), self.embed_norm(embeds)]
        row = self.fusion(torch.cat(both, dim=-1))  # (..., D)
        # Head j adds SiLU of a linear layer to what it reads.
        states = [row + F.silu(head(row)) for head in self.heads]
        return self.norm(torch.stack(states, dim=-2))


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, whose rows are the sum of both inputs.

    token_counts: (V,) how often each token occurs in the training data.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    both = torch.eye(config.target["hidden_size"]).repeat(1, 2)  # (D, 2D): a sum
    drafter.fusion.weight.data.copy_(both)
    common.start_from(drafter, target, token_counts)
    return drafter


def training_logits(drafter: Drafter, target, batch, anchors: Tensor) -> Tensor:
    """Logits (W, U, Vd) of the heads at W anchors."""
    hidden = ctc_drafter.at_anchors(batch.hidden, anchors)  # (W, D)
    next_ids = ctc_drafter.at_anchors(batch.input_ids[:, 1:], anchors)
    states = drafter(target, hidden, next_ids)  # (W, U, D)
    head = common.draft_head(target, drafter.vocab_ids).to(states.dtype)
    return head(states).float()


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """Cross-entropy of head j times 0.8^j, summed over heads and W anchors; and W."""
    anchors, labels, _ = ctc_drafter.anchors_and_labels(drafter, target, batch)
    logits = training_logits(drafter, target, batch, anchors)
    logits = logits.flatten(0, 1)  # (W U, Vd)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    weights = 0.8 ** torch.arange(labels.shape[1], device=labels.device)
    return (losses.view_as(labels) * weights).sum(), len(labels)


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) of the first token, summed over W anchors, and W."""
    anchors, _, hidden = ctc_drafter.anchors_and_labels(drafter, target, batch)
    logits = training_logits(drafter, target, batch, anchors)
    q_draft = logits[:, 0].softmax(-1)  # (W, Vd)
    total = common.overlap(target, hidden, q_draft, drafter.vocab_ids)
    return total, len(hidden)


def run_heads(drafter: Drafter, decoding, head: nn.Module) -> Tensor:
    """One pass: log-probabilities (U, Vd) of the tokens after the newest one.

    head: the target's LM head, D -> Vd.
    """
    states = drafter(decoding.target, decoding.hidden[0, -1], decoding.ids[0, -1])
    return head(states).float().log_softmax(-1)


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter: Drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    changes: other values for fields of the Config with decode=True, such as nodes.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    vocab_ids = drafter.vocab_ids
    head = common.draft_head(decoding.target, vocab_ids)  # D -> Vd
    while not decoding.done:
        # As in ctc_drafter.propose.
        if decoding.hidden.shape[1] == 0 or decoding.max_depth == 0:
            yield common.chain([], decoding.ids)
            continue
        log_q = run_heads(drafter, decoding, head)
        log_q = F.pad(log_q, (0, 1), value=float("-inf"))  # a head has no blank
        yield ctc_drafter.make_tree(decoding, log_q, vocab_ids, config)


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper:
#  1. Heads read h_i and the next token, fused by a linear layer; the paper's read h_i.
#  2. Inputs and outputs are normalised, and the LM head is the target's; in the paper
#     each head trains a copy of it.
#  3. Heads start at random. In the paper they start as the identity.
#  4. Labels are the target's argmax over frequent tokens. The paper's are the data's.
#  5. The tree's shape changes every round; the paper's is fixed.
#  6. Verification is lossless; the paper's typical acceptance is not. When sampling,
#     the first token is sampled, as in ctc_drafter.py.
#
# Authors' code:
#  - train_legacy.py shares the target's LM head and sums the losses without weights.
#  - A head's weight starts at zero, but its bias does not: not quite the identity.
#  - Candidates are padded with token 0. After a leaf, the padding counts as accepted if
#    the target says token 0 there, and the tree's last node judges what follows.
