"""Copies from the context as the only draft: prompt lookup decoding (Saxena, 2023).

There is no drafter. The last tokens are looked up where they stood before, and what followed them
there is the draft (common.Lookup).

Licence: Apache-2.0.
"""

from dataclasses import dataclass

import torch

import common
from common import option


@dataclass
class Config:
    most: int = option(16, "most tokens to copy a round", decode=True)

    def __post_init__(self):
        common.at_least(self, most=0)


VARIANTS = {}


@torch.no_grad()
def drafts(decoding, config: Config):
    """Yield one draft per round; the caller verifies it before it asks for the next one."""
    lookup = common.Lookup(config.most)
    while not decoding.done:
        nothing = common.chain([], decoding.ids)
        yield lookup.merge(nothing, decoding.ids, decoding.room)


def generate(target, input_ids, config=None, copies=0, stats=None, token_streamer=None, **given):
    """Lossless decoding: target.generate(**inputs, custom_generate=lookup.generate)."""
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, config or Config()):
        decoding.verify(draft)
    return decoding.ids
