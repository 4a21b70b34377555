"""Prompt lookup decoding: copies from the context (Saxena, 2023).

The draft is what followed an earlier occurrence of the last tokens. `with_copies`
adds such copies to the drafts of any method (`+copies` in bench.py):

    lookup.with_copies(glide.drafts(decoding, drafter), decoding)

Licence: Apache-2.0.
"""

import itertools
import math
from dataclasses import dataclass

import torch
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
        """Tokens to copy after ids (1, T), which extend those of the last call."""
        # The n-gram at the end of the text is looked up, and only later registered.
        for token in input_ids[0, len(self.text) :].tolist():
            for n in self.lengths:
                self.follows[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)
        for n, length in self.lengths.items():  # the longest n-gram first
            start = self.follows.get(tuple(self.text[-n:]))
            if start is not None:
                # A copy that reaches the end of the text continues with what it copied.
                found = self.text[start : start + length]
                return list(itertools.islice(itertools.cycle(found), length))
        return []

    def merge(self, draft: common.Draft, input_ids: Tensor, max_depth: int, eos_ids=()):
        """A Draft that also holds a copy; nodes that both have are shared.

        The copy holds at most `max_depth` tokens and ends with the first of `eos_ids`.
        Its new nodes come last; they were not sampled. The notes count them, as in
        {"copied": n}. Where there are none, the draft is returned as it is.
        """
        child = draft.children()
        tokens = []  # of the new nodes
        parents = list(draft.parents)
        node = -1
        for token in self.find(input_ids)[:max_depth]:
            if (node, token) in child:
                node = child[node, token]
            else:
                tokens.append(token)
                parents.append(node)
                node = len(parents) - 1
            if token in eos_ids:
                break
        if not tokens:
            return draft
        notes = draft.notes | {"copied": len(tokens)}
        if "q" in notes:  # an entry for each node; copies have no probability
            notes["q"] = notes["q"] + [math.nan] * len(tokens)
        tokens = torch.cat([draft.tokens, draft.tokens.new_tensor(tokens)])
        return common.Draft(tokens, parents, draft.probs, notes)


def with_copies(drafts, decoding, most: int = 16):
    """Yield the drafts of any method, each with a copy of at most `most` tokens.

    drafts: a generator of drafts for `decoding`. Wrappers that change drafts in other
    ways, such as CAPE, come before this one.
    """
    lookup = Lookup(most)
    for draft in drafts:
        yield lookup.merge(draft, decoding.ids, decoding.max_depth, decoding.eos_ids)


def drafts(decoding, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    changes: other values for fields of the Config, see there.
    """
    config = common.changed(Config(), changes)
    lookup = Lookup(config.most)
    while not decoding.done:
        nothing = common.chain([], decoding.ids)
        yield lookup.merge(nothing, decoding.ids, decoding.max_depth, decoding.eos_ids)
