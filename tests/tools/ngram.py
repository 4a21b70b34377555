"""A sixth method, without weights: bigrams of the text so far.

Paper: Leviathan et al., ICML 2023, arXiv:2211.17192, section 3.6. The draft goes from
the newest token to the one that followed it last, and on from there. For the text 5 6 7
5 it is 6 7 5.

test_add_method.py adds this file to a copy of the repository, by the steps of
tests/README.md.

Deviations from the paper:
    1. The bigrams are those of the conversation itself, not counted on a corpus.

Licence: Apache-2.0.
"""

from dataclasses import dataclass

import common
from common import option


@dataclass
class Config:
    gamma: int = option(3, "draft tokens a round", decode=True)

    def __post_init__(self):
        common.at_least(self, gamma=0)


VARIANTS = {"long": {"gamma": 10}}


def propose(ids: list[int], depth: int) -> list[int]:
    """At most `depth` draft tokens after the committed `ids`."""
    follows = dict(zip(ids, ids[1:]))  # a later pair replaces an earlier one
    tokens = []
    newest = ids[-1]
    while newest in follows and len(tokens) < depth:
        newest = follows[newest]
        tokens.append(newest)
    return tokens


def drafts(decoding, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next."""
    config = common.changed(Config(), changes)
    while not decoding.done:
        depth = min(config.gamma, decoding.max_depth)
        tokens = propose(decoding.ids[0].tolist(), depth)
        yield common.Draft(
            decoding.ids.new_tensor(tokens), list(range(-1, len(tokens) - 1))
        )
