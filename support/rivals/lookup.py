"""Prompt lookup decoding: copies from the context (Saxena, 2023).

The draft is what followed an earlier occurrence of the last tokens.
`Lookup` also adds copies to any method's drafts (`copies` of
common.Decoding, `+copies` in bench.py).

Licence: Apache-2.0.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import option


@dataclass
class Config:
    most: int = option(16, "most tokens to copy a round", decode=True)

    def __post_init__(self):
        common.at_least(self, most=0)


VARIANTS = {}


class Lookup:
    """Copies up to `most` tokens if the last four occurred before.

    It copies fewer if only the last three or two did.
    """

    def __init__(self, most: int):
        Config(most)  # checks it
        self.lengths = {4: most, 3: most // 2, 2: most // 3}  # {n: tokens to copy}
        self.text: list[int] = []
        self.follows: dict[tuple, int] = {}  # n-gram: where its last occurrence ended

    def find(self, input_ids: Tensor) -> list[int]:
        """Tokens to copy after ids (1, T), which extend the last call's."""
        # 1. Register the new n-grams, except the one at the end of the text.
        for token in input_ids[0, len(self.text) :].tolist():
            for n in self.lengths:
                self.follows[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)
        # 2. Look up the longest n-gram first. Past the end, copies repeat.
        for n, length in self.lengths.items():
            start = self.follows.get(tuple(self.text[-n:]))
            if start is not None:
                found = self.text[start : start + length]
                return list(itertools.islice(itertools.cycle(found), length))
        return []

    def merge(self, draft: common.Draft, input_ids: Tensor, room: int) -> common.Draft:
        """The draft with the missing copies as deterministic nodes."""
        found = self.find(input_ids)[:room]
        # 1. Share the nodes that the draft has already.
        child = draft.children()
        node = -1
        while found and (node, found[0]) in child:
            node = child[node, found.pop(0)]
        if not found:
            return draft
        # 2. Append the others, each below the one before.
        tokens = torch.cat([draft.tokens, input_ids.new_tensor(found)])
        below = torch.arange(len(draft.tokens) - 1, len(tokens) - 1)
        below[0] = node
        parents = torch.cat([draft.parents, below])
        q = None if draft.q is None else F.pad(draft.q, (0, len(found)), value=math.nan)
        return common.Draft(tokens, parents, draft.probs, q, len(found), draft.notes)


@torch.no_grad()
def drafts(decoding, config: Config):
    """Yield one draft per round, which the caller verifies."""
    lookup = Lookup(config.most)
    while not decoding.done:
        nothing = common.chain([], decoding.ids)
        yield lookup.merge(nothing, decoding.ids, decoding.room)


def generate(target, input_ids, config=None, copies=0, stats=None, token_streamer=None, **given):
    """Lossless decoding, for target.generate(custom_generate=...)."""
    common.check_config(config, Config)
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, config or Config()):
        decoding.verify(draft)
    return decoding.ids
