"""EAGLE's drafter (Li et al., 2024, arXiv:2401.15077), Falcon's rival.

It is Falcon's drafter with k = 1, so every level of a tree takes a pass. It has one
layer, no LSTM and no CSGD. Slots, tree, decoding and loss are those of falcon.py, so
the two differ in the drafter only. The architecture is its authors':

    falcon.py    norm(h_i), norm(x_(i+1)) -> fusion -> layers            -> norm
    here              h_i,       x_(i+1)  -> fusion -> layers, the first
                                                       without its input's norm

Falcon's authors have no norms either. With other values of `k` and `fusion` this file
makes their architecture, and their weights can be compared with falcon.py's.

Deviations from the paper: at the end of this file.
Licence: Apache-2.0.
"""

import dataclasses
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import common
import falcon
from common import option
from falcon import VARIANTS, acceptance, drafts, loss

__all__ = ["VARIANTS", "Config", "Drafter", "acceptance", "build", "drafts", "loss"]


@dataclass
class Config(falcon.Config):
    k: int = option(1, "levels of the tree drafted in a pass (EAGLE: 1)")
    num_layers: int = option(1, "attention layers (EAGLE: 1)")
    fusion: str = option("linear", "lstm or linear (EAGLE: linear)")
    csgd: bool = option(False, "Falcon's distillation, for k > 1")
    bias: bool = option(False, "give linear fusion a bias, as some of EAGLE's have")
    layer: dict = option(
        dict, "further fields of LlamaConfig (filled in by support.interop.authors)"
    )


class Drafter(
    falcon.Drafter,
    paper_url="https://arxiv.org/abs/2401.15077",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["eagle"],
):
    """Falcon's drafter without norms. Embedding and LM head are the target's."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.feature_norm = self.embed_norm = self.norm = nn.Identity()
        if config.fusion == "linear" and not config.bias:
            self.fusion.bias = None
        llama = common.llama_config(config.target, config.intermediate_size)
        llama.update(config.layer)
        layers = [LlamaDecoderLayer(llama, n) for n in range(config.num_layers)]
        layers[0].input_layernorm = nn.Identity()
        self.layers = nn.ModuleList(layers)


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter for the target, whose shape it adds to the config.

    A linear fusion starts as the sum of its inputs. Layers start at random, as in the
    authors' code.

    token_counts: (V,) how often each token occurs in the training data.
    """
    # The target's top layers write into a residual stream that only the final norm
    # brings to the size of h. (The default target's stream is 30 times as large.) So
    # without norms they would be a bad start.
    config = dataclasses.replace(config, target=common.target_shape(target))
    drafter = Drafter(config)
    common.start_from(drafter, target, token_counts)
    return drafter


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from the paper:
#  1. The loss is Falcon's: its distillation has a weight of 1 (`distill_weight`; EAGLE:
#     .1) and has a hard label as well.
#  2. Only frequent tokens are drafted and learned (`draft_vocab`).
#  3. The default tree has nine nodes, EAGLE's has more, and EAGLE-2's is made anew in
#     each round.
#  4. A linear fusion starts as the sum of its inputs, and has no bias (theirs has one
#     unless the config says otherwise).
#
# Authors' code. It was run with the same random weights as falcon.py with k = 1 and
# without norms. Forwards, both terms of the loss, drafts and trees agree.
# The measured drafters began with weights from N(0, .02).
