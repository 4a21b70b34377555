"""A sixth method without weights: bigrams of the text so far (Leviathan et al., ICML 2023,
arXiv:2211.17192, section 3.6).

test_sixth_method.py adds it to a copy of the repository by the eight steps of tests/README.md. The
draft goes from the newest token to the token that followed it last, and on from there.

    symbol   name here      section   function
    M_q      follows        3.6       propose
    gamma    Config.gamma   2.1       generate

Deviations
    1. ours: the bigrams are those of the conversation itself, not counted on a corpus.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import common


@dataclass
class Config:
    gamma: int = field(default=3, metadata={"help": "draft tokens a round", "decode": True})
    copies: int = field(
        default=0, metadata={"help": "tokens copied from the context a round", "decode": True}
    )


VARIANTS = {"copies": {"copies": 10}}


def propose(input_ids: Tensor, follows: dict[int, int], gamma: int) -> common.Draft:
    """Draft at most `gamma` tokens after the committed `input_ids` (1, T).

    Args: follows: {token: the one that followed it last}.
    """
    tokens = []
    newest = int(input_ids[0, -1])
    while newest in follows and len(tokens) < gamma:
        newest = follows[newest]
        tokens.append(newest)
    return common.Draft(input_ids.new_tensor(tokens), torch.arange(len(tokens)) - 1)


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    gamma=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=ngram.generate)`: lossless decoding.

    Args: gamma, copies: Config's by default. stats: a common.Stats to fill.
    Returns: (1, T') prompt and new tokens.
    """
    gamma = Config.gamma if gamma is None else gamma
    lookup = common.Lookup(Config().copies if copies is None else copies)
    do_sample, stats, done = generation_config.do_sample, stats or common.Stats(), False
    cache, _ = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    while not done:
        with stats.timer("draft"):
            text = input_ids[0].tolist()
            room = generation_config.max_length - len(text) - 1  # one place is the bonus's
            follows = dict(zip(text, text[1:]))  # a later pair replaces an earlier one
            draft = propose(input_ids, follows, min(gamma, room))
            draft = lookup.merge(draft, input_ids, room)
        verified = common.verify(
            target, input_ids, draft, cache, logits_processor, do_sample, stats
        )
        input_ids, done = common.commit(
            input_ids, verified.tokens, stopping_criteria, stats, token_streamer
        )
    return input_ids


if __name__ == "__main__":
    common.demo(generate)
