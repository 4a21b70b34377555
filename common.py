"""Shared code: verify a draft, decode, load a target and a drafter.

A method is a generator of drafts. Given a Decoding, the state of one answer, it yields
one Draft per round until `decoding.done`. After each, `verify` commits the tokens of
the draft that the target accepts:

    for draft in glide.drafts(decoding, drafter):
        decoding.verify(draft)

All methods share the first part, so read it before any of them: Draft, `score`, `walk`,
`rejection_sample`, Decoding, `pick`, `speculate`, `windowed`. It ends at the line
"Reading can stop here". The rest is for looking up: `start`, forwards, KV caches, what
methods need from a target and from a drafter (DraftCache and Batch, above all), and
what is refused and why.

Words:
    target      the large model whose text is wanted; a *forward* is a run of it
    drafter     what proposes tokens; a *pass* is a run of it
    round       one draft, its verification by one forward, and the tokens committed
    root        the newest committed token (at first, the prompt's last one). It has no
                cached row yet, so each forward feeds it before the draft
    node        a draft token; the nodes form a tree below the root
    bonus token the target's own token that ends a round (other texts use the term only
                after a fully accepted draft)
    row         what a KV cache holds for one token: its key and its value
    residual    max(p - q, 0), divided by its sum: what is left of the target's
                distribution after a rejection
    p_target, q_draft     the distributions of target and drafter; when decoding, after
                the logits processors (temperature, top-p and so on)

Shapes: B batch, T sequence, P cached rows, n tokens fed at once, N nodes, V vocabulary,
Vd draft vocabulary, D hidden size, H heads, Hkv key-value heads, Dh head size, R
rotated dimensions of a head, P_own rows in a drafter's own cache. M is explained where
it is used.

Licence: Apache-2.0.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import math
import re
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half


class UserError(ValueError):
    """A mistake of the user's; the message names the problem and the remedy."""


# ------------------------------------------------------------------------- a draft


@dataclass
class Draft:
    """A tree of N candidate tokens below the root.

    When sampling, the first M nodes were sampled, and row i of `probs` is the
    distribution that node i was sampled from. Siblings are in the order of sampling,
    and the parent of a sampled node is the root or a sampled node. A method must
    submit every token that it has sampled: to leave one out because of what it is
    changes the distribution of the text. The other nodes may have been chosen in any
    way, for instance as the likeliest tokens. Greedy decoding treats all nodes alike.
    """

    tokens: Tensor  # (N,) ids, on the target's device
    parents: list[int]  # of each node, a smaller index; -1 is the root
    probs: Tensor | None = None  # (M, V) q_draft of the first M nodes
    notes: dict = field(default_factory=dict)  # of the method; decoding ignores them

    def depths(self) -> list[int]:
        """The depth of each node; children of the root have depth 1."""
        depths = []
        for parent in self.parents:
            assert parent < len(depths), "a parent must come before its children"
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self) -> dict[tuple[int, int], int]:
        """{(parent, token): node}; of siblings with equal tokens, the first."""
        child = {}
        for node, place in enumerate(zip(self.parents, self.tokens.tolist())):
            child.setdefault(place, node)
        return child

    def sampled(self) -> dict[int, list[tuple[int, Tensor]]]:
        """{parent: its sampled children in order, each as (token, q_draft (V,))}."""
        sampled = {}
        probs = () if self.probs is None else self.probs
        for parent, token, q_draft in zip(self.parents, self.tokens.tolist(), probs):
            sampled.setdefault(parent, []).append((token, q_draft))
        return sampled


def chain(steps, like: Tensor, **notes) -> Draft:
    """A draft in which each token follows the one before.

    steps: pairs of a token (1,) and the q_draft (V,) that it was sampled from.
    like: ids on the device of the target, for a chain without tokens.
    """
    steps = list(steps)
    if not steps:  # plain decoding: only the root is fed
        return Draft(like.new_zeros(0), [], notes=notes)
    tokens, probs = zip(*steps)
    parents = list(range(-1, len(steps) - 1))
    return Draft(torch.cat(tokens), parents, torch.stack(probs), notes)


# ---------------------------------------------------------------- verifying a draft


def tree_mask(parents: list[int]) -> Tensor:
    """What root and nodes see of one another, (N + 1, N + 1) bool.

    Each sees the root, its ancestors and itself. For parents -1, 0, 0, 1:

           key  root  n0 n1 n2 n3
        query
         root    x    .  .  .  .
         n0      x    x  .  .  .
         n1      x    x  x  .  .
         n2      x    x  .  x  .
         n3      x    x  x  .  x
    """
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents):
        sees[node + 1] |= sees[parent + 1]  # all that its parent sees, and itself
    return sees


def tree_inputs(target, ids: Tensor, draft: Draft) -> tuple:
    """What the target reads: ids, attention masks and positions of root and nodes.

    Returns ids (1, N + 1); masks {kind of layer: (1, 1, N + 1, P + N + 1)}, in the
    target's dtype, to be added to the scores; positions (1, N + 1).
    """
    prefix = ids.shape[1] - 1  # P
    fed = torch.cat([ids[0, -1:], draft.tokens])[None]
    # Nodes of one depth share a position. Sliding windows are therefore counted in
    # positions and not in cache rows.
    positions = prefix + torch.tensor([0, *draft.depths()])
    query = positions[:, None]
    key = torch.cat([torch.arange(prefix), positions])  # (P + N + 1,)
    # All of them see the P cached rows.
    sees = F.pad(tree_mask(draft.parents), (prefix, 0), value=True)
    masks = {}
    for kind, window in sliding_windows(target).items():
        reach = sees if window is None else sees & (query - key < window)
        # Not a boolean mask, because eager attention would add it as 0 and 1.
        mask = torch.zeros(reach.shape, dtype=target.dtype)
        mask.masked_fill_(~reach, torch.finfo(target.dtype).min)
        masks[kind] = mask[None, None].to(target.device)
    return fed, masks, positions[None].to(fed.device)


@torch.no_grad()
def score(target, ids: Tensor, draft: Draft, cache) -> tuple[Tensor, Tensor]:
    """One target forward over root and nodes.

    ids: (1, P + 1) committed tokens; the last one is the root.
    cache: the target's. It has P rows before, and P + 1 + N after.
    Returns logits (N + 1, V) and last hidden states (N + 1, D); index 0 is the root.
    """
    prefix = ids.shape[1] - 1  # P
    assert cache.get_seq_length() == prefix, "all tokens but the newest must be cached"
    return forward(target, cache, *tree_inputs(target, ids, draft))


def walk(draft: Draft, choose, ended) -> tuple[list[int], list[int]]:
    """Descend from the root while a child holds the token that the target chooses.

    choose: called with the root, which is -1, and then with each accepted node that did
        not end the answer; returns the token that the target chooses after it.
    ended: called without arguments after each choice; True ends the answer with the
        token chosen.
    Returns the accepted nodes from the root down, and the tokens chosen: theirs and
    then the bonus token, unless an accepted one ended the answer.
    """
    child = draft.children()
    path = []
    tokens = []
    node = -1
    while node is not None:
        tokens.append(choose(node))
        node = child.get((node, tokens[-1]))
        if node is not None:
            path.append(node)
        if ended():
            break
    return path, tokens


def rejection_sample(p_target: Tensor, siblings: list[tuple[int, Tensor]]) -> int:
    """Sample a token that is distributed as p_target (V,), given sampled drafts.

    Whatever the drafter proposes, the token follows the target. An example with three
    tokens x shows why. The last two rows are the probabilities that x is drafted and
    accepted, and that the draft is rejected and x is sampled instead:

        x                           0     1     2     sum
        p_target                   .35   .55   .10     1
        q_draft                    .20   .05   .75     1
        drafted and accepted       .20   .05   .10    .35    min(p, q)
        after a rejection          .15   .50   .00    .65    max(p - q, 0)

    The token x is drafted with probability q(x) and then accepted with probability
    min(1, p(x) / q(x)), which makes min(p(x), q(x)) together. p(x) exceeds this by
    max(p(x) - q(x), 0), and the sum of these over all x is the probability of a
    rejection, here .65. After a rejection we therefore sample from the residual, which
    adds exactly what p has in excess: the last two rows of the table add up to p.

    siblings: (token, q_draft (V,)) of the children that the drafter has sampled, in the
        order of sampling. Each q_draft must be the distribution that its token was
        sampled from, given the text, the tokens above and the siblings before it. After
        a rejection the token must follow the residual, whichever token was rejected, so
        the next sibling is judged as the first was, with the residual in place of p.
    Returns the token; all randomness is torch.rand's. Children that were not sampled
    play no part. If one of them holds the token, `walk` accepts it, which does not
    change how the token is distributed.
    Raises UserError for probabilities that are not numbers.
    Source: Leviathan et al. (2023), Algorithm 1, where the residual is p'; for siblings
        SpecInfer (Miao et al., 2024), multi-step speculative sampling, which takes them
        in random order; for siblings without replacement Jeon et al. (2024,
        arXiv:2402.14160).
    """
    if p_target.isnan().any():
        raise UserError(
            "the target's probabilities are not numbers: its logits overflow in this "
            "dtype, or the logits processors forbid every token"
        )
    left = p_target  # after a rejection, the residual
    for token, q_draft in siblings:
        # Accept with probability min(1, p / q).
        uniform = torch.rand((), dtype=left.dtype, device=left.device)
        if uniform * q_draft[token] < left[token]:
            return token
        residual = (left - q_draft).clamp(min=0)
        # Where p and q are equal but for rounding, a rejection may leave nothing.
        if residual.sum() > 0:
            left = residual / residual.sum()
    return int(sample(left))


# --------------------------------------------------------------------------- decoding


class Decoding:
    """The state of one answer; `verify` is what changes it.

        ids       (1, P + 1)  committed tokens; the newest, the root, is not cached
        cache                 the target's keys and values of the first P
        hidden    (1, P, D)   the target's last hidden states of these P, after the
                              final norm
        done                  True after the last token
        max_depth             how deep a draft may be
        do_sample             whether tokens are sampled, or the argmax is taken
        eos_ids               the end-of-sequence ids, a set
        first                 0; in a View, where the text that a drafter sees begins

    After a round that accepted x_4 and added the bonus token x_5:

        ids       x_1  x_2  x_3  x_4  x_5
        hidden    h_1  h_2  h_3  h_4

    `commit` cuts the target's cache after every round. Methods cut that of the drafter
    themselves, some with `DraftCache.rewind`.

    after: an earlier Decoding whose cache is taken over, see `start`.
    given: what transformers passes to a `custom_generate` function.
    Raises UserError for a target or a request that cannot be decoded with token trees.
    """

    first = 0

    def __init__(self, target, input_ids: Tensor, after=None, **given):
        if "stopping_criteria" not in given:
            raise UserError("call target.generate(..., custom_generate=speculate(...))")
        self.logits_processor = given.pop("logits_processor", None)
        self.stopping_criteria = given.pop("stopping_criteria")
        self.generation_config = given.pop("generation_config")
        state = check_target(target)
        reach = _check_request(target, input_ids, self.generation_config, given)
        self.state = (*state, reach)
        self.target = target
        self.ids = input_ids.long()
        self.do_sample = self.generation_config.do_sample
        self.eos_ids = eos_ids(self.generation_config)
        self.done = False
        self.prompt_length = input_ids.shape[1]
        _check_processors(self)
        config = target.config.get_text_config()
        self.cache = GrowingCache(config.num_hidden_layers)
        empty = (1, 0, config.hidden_size)
        self.buffer = input_ids.new_empty(empty, dtype=target.dtype)  # of hidden
        self.cached = 0  # P
        if after is not None:
            self._take_over(after)
        # Cache all of the prompt except its last token, which is the first root.
        prompt = self.ids[:, self.cached : -1]
        if prompt.shape[1] > 0:
            # Without logits, which would be T x V numbers.
            hidden = last_hidden(target, prompt, self.cache)
            self.buffer = appended(self.buffer, self.cached, hidden)
            self.cached += prompt.shape[1]

    def _take_over(self, after: "Decoding") -> None:
        """Keep the rows of `after` as far as its text and this prompt agree."""
        if after.cache is None or after.target is not self.target:
            raise UserError(
                "the cache of `after` was taken over already, or is another target's: "
                "pass the newest Decoding of this target"
            )
        if after.state != self.state:  # the target's, and the factors of a long RoPE
            warnings.warn("the cached rows do not fit, so the whole text is read anew")
            return
        # This also cuts what an interrupted round left after its P rows.
        end = min(after.cached, self.ids.shape[1] - 1)
        same = after.ids[0, :end] == self.ids[0, :end]
        self.cached = int(same.cumprod(0).sum())  # leading tokens that agree
        self.cache, self.buffer = after.cache, after.buffer
        self.cache.cut(self.cached)
        after.cache = after.buffer = None

    @property
    def hidden(self) -> Tensor:
        """Last hidden states (1, P, D) of the cached tokens."""
        return self.buffer[:, : self.cached]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """The target's keys and values (1, Hkv, P, Dh) of a layer."""
        cached = self.cache.layers[layer]
        return cached.keys, cached.values

    @property
    def max_depth(self) -> int:
        """How deep a draft may be: the tokens left until max_length, less the bonus."""
        return self.generation_config.max_length - self.ids.shape[1] - 1

    def process(self, logits: Tensor, tokens: list[int] = ()) -> Tensor:
        """Logits (V,) after the ids and `tokens`, through the logits processors."""
        # In float32, as transformers does, so that ties break alike. A copy, because
        # the processors may write in it.
        scores = logits[None].to(dtype=torch.float32, copy=True)
        if self.logits_processor:
            ids = torch.cat([self.ids, self.ids.new_tensor([tokens])], dim=1)
            scores = self.logits_processor(ids, scores)
        return scores[0]

    def verify(self, draft: Draft) -> list[int]:
        """Commit what the target accepts of a draft; returns the accepted nodes."""
        return self.commit(draft, *score(self.target, self.ids, draft, self.cache))

    def commit(self, draft: Draft, logits: Tensor, hidden: Tensor) -> list[int]:
        """The second half of `verify`, after a forward that was made elsewhere.

        The forward has left the rows of the P cached tokens, the root and the N nodes
        in the cache, in this order. logits: (N + 1, V). hidden: (N + 1, D).
        """
        prefix = self.cached  # P
        sampled = draft.sampled() if self.do_sample else {}

        # In greedy decoding each token is the argmax after the tokens before it. The
        # draft only decides how many of these one forward supplies. When sampling, each
        # token follows the target given those before it, as `rejection_sample`
        # guarantees, and therefore the whole text does.
        def choose(node: int) -> int:
            # `walk` goes down from the root, so self.ids ends with this node's token.
            scores = self.process(logits[node + 1])
            if self.do_sample:
                siblings = sampled.get(node, [])
                token = rejection_sample(scores.softmax(-1), siblings)
                token = self.ids.new_tensor(token)
            else:
                token = scores.argmax()
            self.ids = torch.cat([self.ids, token.view(1, 1)], dim=1)
            return int(token)

        def ended() -> bool:
            self.done = bool(self.stopping_criteria(self.ids, None).all())
            return self.done

        path, tokens = walk(draft, choose, ended)
        # The forward cached a row for the root and for each node. Keep the root's row
        # and those of the accepted nodes, but not of one that ended the answer: as in
        # every round, all committed tokens but the newest are cached.
        kept = [0, *(node + 1 for node in path)][: len(tokens)]
        if kept != list(range(len(kept))):  # a chain's accepted rows are in place
            rows = torch.tensor(kept, device=hidden.device)
            self.cache.move(prefix + rows, prefix)
            hidden = hidden[rows]
        self.cache.cut(prefix + len(kept))
        self.buffer = appended(self.buffer, prefix, hidden[None, : len(kept)])
        self.cached = prefix + len(kept)
        return path


def pick(
    decoding: Decoding, logits: Tensor, vocab_ids: Tensor, drafted: list[int]
) -> tuple[Tensor, Tensor] | None:
    """Choose a draft token.

    Returns the token (1,) and its q_draft (V,), or None if the logits processors leave
    no finite score. A processor may force a token that is not among vocab_ids.

    logits: (Vd,) of the tokens vocab_ids (Vd,).
    drafted: the tokens between the committed ones and this one.
    """
    vocab = decoding.target.config.get_text_config().vocab_size
    scores = logits.float()
    if decoding.logits_processor:  # they judge the whole vocabulary
        whole = scores.new_full((vocab,), float("-inf"))
        scores = decoding.process(whole.scatter(0, vocab_ids, scores), drafted)
        if not scores.max() > float("-inf"):  # -inf, or NaN
            return None
        vocab_ids = torch.arange(vocab, device=scores.device)
    q = scores.softmax(-1)
    index = sample(q) if decoding.do_sample else q.argmax(keepdim=True)
    return vocab_ids[index], q.new_zeros(vocab).scatter(0, vocab_ids, q)


def speculate(drafts, *args, streamer=None, callback=None, **changes):
    """A `custom_generate` for transformers that decodes with a method's drafts.

        target.generate(**inputs, custom_generate=speculate(glide.drafts, drafter))
        speculate(glide.drafts, drafter, gamma=5)        # another length of drafts
        speculate(lambda d: cape.drafts(glide.drafts(d, drafter, gamma=4)))

    drafts: called with (decoding, *args, **changes), a generator of drafts.
    streamer: receives the prompt, and then the tokens of each round.
    callback: called with (decoding, draft, path) after each round, such as a Stats; the
        path is the list of accepted nodes.

    transformers keeps three arguments of `generate` to itself: a `streamer` given there
    gets only the prompt, `assistant_model` has no effect, and in place of
    `stop_strings` pass stopping_criteria=[StopStringCriteria(tokenizer, [...])]. A
    cache that you pass is never used. Logits processors are called on draft tokens as
    well, so they must depend on nothing but the ids. Stopping criteria get None as
    their scores.
    """

    def generate(target, input_ids, **given):
        decoding = Decoding(target, input_ids, **given)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for draft in drafts(decoding, *args, **changes):
            length = decoding.ids.shape[1]
            path = decoding.verify(draft)
            if streamer is not None:
                streamer.put(decoding.ids[0, length:].cpu())
            if callback is not None:
                callback(decoding, draft, path)
            if decoding.done:
                break
        assert decoding.done, "the drafts ended before the answer"
        if streamer is not None:
            streamer.end()
        return decoding.ids

    return generate


WINDOW = 256  # tokens


class View:
    """A Decoding as a drafter sees it: the newest tokens of the text.

    Its ids, hidden states and rows begin with token `first` of the text. The rest is
    the Decoding's own.
    """

    def __init__(self, decoding: Decoding, first: int):
        self.decoding, self.first = decoding, first

    def __getattr__(self, name: str):
        return getattr(self.decoding, name)

    @property
    def ids(self) -> Tensor:
        return self.decoding.ids[:, self.first :]

    @property
    def hidden(self) -> Tensor:
        return self.decoding.hidden[:, self.first :]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.decoding.rows(layer)
        return keys[:, :, self.first :], values[:, :, self.first :]


def windowed(drafts):
    """Show the drafter of a method's `drafts` only a window of the text.

    A drafter learns on texts of a few hundred tokens, and beyond that length its drafts
    get worse while its passes get slower (LongSpec, arXiv:2502.17421, names the
    problem). It is therefore shown at most 2 x `window` tokens. When the text is longer
    than that, it begins anew with the newest `window`. The target reads all of it.

    With window=None the drafter, like the target, sees the whole text. The window
    changes the speed of an answer and not the answer, because verification does not
    depend on how a draft was made.
    """

    @functools.wraps(drafts)
    def renewed(decoding, drafter, window: int | None = WINDOW, **changes):
        if window is None:
            yield from drafts(decoding, drafter, **changes)
            return
        if type(window) is not int or window < 1:
            raise UserError(f"window {window!r}: take an int of at least 1, or None")
        first = 0
        while not decoding.done:
            if decoding.ids.shape[1] - first > 2 * window:
                first = decoding.ids.shape[1] - window
            for draft in drafts(View(decoding, first), drafter, **changes):
                yield draft
                if decoding.ids.shape[1] > first + 2 * window:
                    break

    return renewed


# ======================================================================================
#                               Reading can stop here.
#
#                What follows is reference, for looking things up.
# ======================================================================================

# --------------------------------------------------- counts, and a loop of your own


@dataclass
class Stats:
    """Counts of one answer: speculate(..., callback=stats)."""

    target_forwards: int = 0  # without the one over the prompt
    drafted: int = 0  # draft tokens submitted for verification
    emitted: int = 0  # tokens committed, bonus tokens included
    # The depth of each round's draft, and how many of its tokens were accepted.
    offered: list[int] = field(default_factory=list, repr=False)
    accepted: list[int] = field(default_factory=list, repr=False)

    def __call__(self, decoding: Decoding, draft: Draft, path: list[int]) -> None:
        self.target_forwards += 1
        self.drafted += len(draft.tokens)
        self.emitted = decoding.ids.shape[1] - decoding.prompt_length
        self.offered.append(max(draft.depths(), default=0))
        self.accepted.append(len(path))


def start(target, after: Decoding | None = None, **inputs) -> Decoding:
    """The Decoding that `target.generate(**inputs)` would use, for your own loop.

        decoding = common.start(target, input_ids=ids, max_new_tokens=64)
        for draft in glide.drafts(decoding, drafter):
            decoding.verify(draft)

    inputs: arguments of `generate`; the prompt is given by name, as `input_ids`.
    after: the Decoding of an earlier turn of a chat, which cannot be used again. Its
        cache is taken over as far as its text and the new prompt agree, so only the
        rest is read. Where the rows do not fit, a warning says that the whole text is
        read: where the target's adapters, dtype or device have changed, or where it
        rotates keys by the length of the text. Other weights or `adapter_names` are not
        noticed: pass no `after` then.
    """

    def begin(target, input_ids, **given):
        return Decoding(target, input_ids, after, **given)

    # Without a mask, transformers guesses padding where the prompt holds pad_token_id.
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    return target.generate(**inputs, custom_generate=begin)


# ---------------------------------------------- what verifying and drafting are made of


def forward(target, cache, fed: Tensor, masks, positions) -> tuple[Tensor, Tensor]:
    """Feed ids (1, n); returns logits (n, V) and last hidden states (n, D).

    masks, positions: from `tree_inputs`. masks: None for a plain text.
    """
    mask = None
    if masks and fed.shape[1] > 1:  # a root without nodes needs none
        # A model with several kinds of layers takes a mask for each, others just one.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
    options = OPTIONS | {"output_hidden_states": True, CACHE: cache}
    output = target(fed, attention_mask=mask, position_ids=positions, **options)
    return output.logits[0], output.hidden_states[-1][0]


def last_hidden(target, ids: Tensor, cache=None) -> Tensor:
    """Last hidden states (B, T, D) of ids (B, T), whose rows go into the cache."""
    options = OPTIONS | {"output_hidden_states": False, CACHE: cache}
    return target.get_decoder()(ids, **options)[0]


# What a forward calls its KV cache: `cache` since transformers 5.24.
CACHE = "past_key_values"
if CACHE not in inspect.signature(LlamaAttention.forward).parameters:
    CACHE = "cache"

# Training leaves settings in a saved config: to return attention weights, to add the
# loss of a router, or to keep no cache. They would slow down or break what is done
# here, so every forward gives its own. (Models ignore what they do not know.)
OPTIONS = {"use_cache": True, "output_attentions": False, "output_router_logits": False}


def sliding_windows(target) -> dict[str, int | None]:
    """{kind of attention: its window, or None}, as the target's config names them."""
    config = decoder_config(target)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or ["sliding_attention" if window else "full_attention"]
    return {x: window if x == "sliding_attention" else None for x in sorted(set(kinds))}


def decoder_config(target):
    """The config that the target's decoder reads; it may be a copy of the target's."""
    return getattr(target.get_decoder(), "config", target.config).get_text_config()


def sample(probs: Tensor) -> Tensor:
    """Draw ids (..., 1) from probs (..., V)."""
    # torch.multinomial takes many times as long on a CPU. float32 sums would lose rare
    # tokens, but MPS has no float64. With right=True the id is the first whose sum
    # exceeds the number, so never one of probability 0.
    exact = probs if probs.device.type == "mps" else probs.double()
    sums = exact.cumsum(-1)  # (..., V)
    drawn = torch.rand_like(sums[..., :1]) * sums[..., -1:]
    ids = torch.searchsorted(sums, drawn, right=True)
    return ids.clamp(max=sums.shape[-1] - 1)  # a drafter's sums may overflow to nan


def eos_ids(generation_config) -> set[int]:
    """The end-of-sequence ids, of which a config names one, several or none."""
    named = generation_config.eos_token_id
    return set() if named is None else set(torch.as_tensor(named).view(-1).tolist())


# ---------------------------------------------------------------------------- KV caches


def appended(buffer: Tensor, length: int, new: Tensor) -> Tensor:
    """A buffer (..., rows, D) with `new` (..., n, D) after its first `length` rows.

    It is the same tensor, written to, or a larger copy where there is no room.
    """
    end = length + new.shape[-2]
    if end > buffer.shape[-2]:
        spare = max(256, end // 8)
        buffer = F.pad(buffer[..., :length, :], (0, 0, 0, end + spare - length))
    buffer[..., length:end, :] = new
    return buffer


class GrowingLayer(DynamicLayer):
    """A cache layer that copies old rows only when its buffers are full."""

    # DynamicLayer concatenates, which copies the whole cache at every forward.

    buffers = ()  # layers that share another's keys (Gemma 4) never get any

    def update(self, key_states, value_states, *args, **kwargs) -> tuple:
        """Append n rows; returns keys and values (B, Hkv, P + n, Dh)."""
        new = (key_states, value_states)
        old = self.get_seq_length()
        if not self.is_initialized:
            self.buffers = [x[:, :, :0] for x in new]
            self.is_initialized = True
        self.buffers = [appended(x, old, n) for x, n in zip(self.buffers, new)]
        end = old + key_states.shape[2]
        self.keys, self.values = (x[:, :, :end] for x in self.buffers)
        return self.keys, self.values


class GrowingCache(DynamicCache):
    """An empty cache of `num_layers` growing layers."""

    def __init__(self, num_layers: int):
        super().__init__()  # without a config: sliding layers keep all rows as well
        self.layers = [GrowingLayer() for _ in range(num_layers)]

    def move(self, rows: Tensor, first: int) -> None:
        """Copy `rows` (n,) of every layer to first, first + 1, ..."""
        for layer in self.layers:
            for x in layer.buffers:
                x[:, :, first : first + len(rows)] = x[:, :, rows.to(x.device)]

    def cut(self, length: int) -> None:
        """Keep the first `length` rows of every layer."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (x[:, :, :length] for x in layer.buffers)


class DraftCache(GrowingCache):
    """A drafter's KV cache, which drops the rows of rejected tokens."""

    fed = torch.zeros(1, 0, dtype=torch.long)  # (1, P) the tokens of its rows

    def rewind(self, input_ids: Tensor) -> Tensor:
        """Keep the rows that agree with the ids; returns the ids to feed."""
        fed = self.fed.to(input_ids.device)
        end = min(fed.shape[1], input_ids.shape[1] - 1)  # feed at least one
        same = fed[0, :end] == input_ids[0, :end]
        agreed = int(same.cumprod(0).sum())  # leading tokens that agree
        self.cut(agreed)
        self.fed = input_ids[:, :agreed]
        return input_ids[:, agreed:]

    def record(self, token_ids: Tensor) -> Tensor:
        """Note, after `rewind`, that `token_ids` (1, n) are fed; returns positions."""
        old = self.fed.shape[1]
        self.fed = torch.cat([self.fed, token_ids], dim=1)
        end = self.fed.shape[1]
        return torch.arange(old, end, device=token_ids.device)[None]  # (1, n)


# --------------------------------------------------------------------------- the target


def load_target(name: str | None = None, *, dtype=torch.float32, device: str = "cpu"):
    """Load a target, frozen and in eval mode, and its tokenizer.

    name: Hugging Face id, folder or .gguf file; None: the default one. A .gguf is
        converted each time, which takes a minute for 250 MB; a folder, made with
        target.save_pretrained and tokenizer.save_pretrained, loads in seconds.
    Raises UserError if it cannot be loaded, in this dtype or on this device, or if
    weights are missing.
    """
    from_file = str(name).lower().endswith(".gguf")
    if name is None or from_file:
        try:
            from support import default_target
        except ImportError:  # no support/, or one without this file
            raise UserError(
                "the default target and .gguf files need support/default_target.py, "
                "which is not here: name a target by its id or folder"
            ) from None
    try:
        torch.zeros(1, device=device)  # a wrong device is noticed before a long load
        if from_file:
            target, tokenizer, missing = default_target.read_gguf(name, dtype)
        else:
            folder = name or default_target.folder()
            path = Path(folder).expanduser()
            if path.exists() or str(folder).startswith((".", "/", "~")):  # else an id
                folder = path.resolve(strict=True)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            if len(tokenizer) < 2:  # transformers makes an empty one
                raise FileNotFoundError("no tokenizer files")
            target, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
            missing = loading["missing_keys"]
        target = target.to(device)
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:  # torch and the readers of transformers raise many kinds
        raise UserError(
            f"cannot load {name or 'the default target'} on {device} "
            f"({one_line(error)}); give a Hugging Face id, a folder of tokenizer and "
            "*.safetensors without code of its own, or a .gguf file; and a device that "
            "torch has"
        ) from error
    if missing:  # transformers fills them with random numbers
        some = ", ".join(sorted(missing)[:3])
        raise UserError(
            f"{name} has no {some} ({len(missing)} weights are missing): take a whole "
            "checkpoint, whose weights have the names that its config expects"
        )
    return target.eval().requires_grad_(False), tokenizer


def target_shape(target) -> dict:
    """The sizes that a drafter and its target must share."""
    config = target.config.get_text_config()
    # Gemma 4's layers differ in the size of their heads, so transformers gives a config
    # for each layer. Drafters start from the topmost layer, so its sizes count.
    top = config.per_layer_config[-1]
    heads = top.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(top, "num_key_value_heads", None) or heads,
        "head_dim": getattr(top, "head_dim", None) or config.hidden_size // heads,
    }


def is_plain_weight(weight) -> bool:
    """Whether a weight is a tensor of numbers, which can be copied or indexed."""
    # A quantised weight holds codes. torchao's are of types of its own, and those of
    # torch's quantize_dynamic are not tensors. An offloaded one is on the device meta.
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ordinary = type(weight) in (Tensor, nn.Parameter)
    return ordinary and weight.dtype in floats and weight.device.type != "meta"


def _head(target) -> tuple[nn.Linear, float]:
    """The LM head, and the factor on its logits (Granite, Cohere), else 1.

    Raises UserError if its weight cannot be copied or indexed.
    """
    head = target.get_output_embeddings()
    # An adapter replaces the layer by one that is not an nn.Linear.
    if not isinstance(head, nn.Linear) or not is_plain_weight(head.weight):
        raise UserError(
            "drafters need the rows of the LM head, which is quantised, adapted or "
            "offloaded here: leave it out of the quantisation, or merge the adapter"
        )
    config = target.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    return head, scale or 1 / (getattr(config, "logits_scaling", None) or 1)


def target_logits(target, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Logits (..., V), or (..., Vd) of `token_ids`, of hidden (..., D).

    token_ids: (Vd,), ascending.
    """
    head, scale = _head(target)
    weight, bias = head.weight, head.bias
    if token_ids is not None and len(token_ids) < len(weight):
        weight = weight[token_ids]
        bias = None if bias is None else bias[token_ids]
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float()
    if scale != 1:  # saves a pass over all logits
        logits = logits * scale
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def draft_head(target, token_ids: Tensor) -> nn.Module:
    """The part of the LM head for `token_ids` (Vd,), ascending; frozen, for a drafter.

    It has neither soft cap nor bias.
    """
    head, scale = _head(target)
    # A PackedLinear (support/packed.py) picks rows of its own packed weight.
    if hasattr(head, "select") and scale == 1:
        return head.select(token_ids)
    weight = head.weight
    if len(token_ids) < len(weight):
        weight = weight[token_ids]
    if scale != 1:
        weight = weight * scale
    weight = weight.to(target.dtype)  # an LM head may be kept in float32
    # On the meta device no time is spent on initial weights.
    rows = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    return rows


def rotary(target, position_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's cos and sin (B, T, R), R <= Dh, at positions (B, T)."""
    # The tables get the dtype and device of `like`; nothing else is read from it.
    like = torch.empty(0, dtype=target.dtype, device=position_ids.device)
    module = getattr(target.get_decoder(), "rotary_emb", None)
    tables = None
    if module is not None:
        given = [like, position_ids]
        if "layer_type" in inspect.signature(module.forward).parameters:  # Gemma-3
            given.append(target.config.get_text_config().layer_types[layer])
        with contextlib.suppress(KeyError):  # the model Beam: full layers do not rotate
            tables = module(*given)
    if tables is None:  # as with learned positions (GPT-2, OPT): rotate by zero
        one = torch.ones(*position_ids.shape, 2, dtype=like.dtype, device=like.device)
        return one, torch.zeros_like(one)
    if not isinstance(tables, tuple):  # DeepSeek-V2: complex numbers (B, T, R/2)
        halves = tables.real.to(like.dtype), tables.imag.to(like.dtype)
        tables = tuple(torch.cat([half, half], dim=-1) for half in halves)
    return tables


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R dimensions of x (B, H, T, Dh) in Llama's pairs."""
    cos, sin = (table[:, None].to(x.dtype) for table in tables)  # (B, 1, T, R)
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    rotated = rotated * cos + rotate_half(rotated) * sin
    return torch.cat([rotated, rest], dim=-1)


def whole_rotary(tables: tuple, head_dim: int, dtype: torch.dtype) -> tuple:
    """Widen tables (B, T, R) to (B, T, Dh), for a drafter's Llama layers in `dtype`.

    Dimensions j and j + Dh/2 share an angle, which is 0 from j = R/2 on.
    R = 4 and Dh = 8: cos `a b a b` becomes `a b 1 1 a b 1 1`.
    """
    widened = []
    for table, fill in zip(tables, (1.0, 0.0)):
        half = table[..., : table.shape[-1] // 2]  # (B, T, R/2)
        missing = head_dim // 2 - half.shape[-1]
        half = F.pad(half, (0, missing), value=fill)  # (B, T, Dh/2)
        widened.append(torch.cat([half, half], dim=-1).to(dtype))  # (B, T, Dh)
    return tuple(widened)


@torch.no_grad()
def target_features(target, input_ids: Tensor, layers=()) -> tuple[Tensor, dict]:
    """Last hidden states (B, T, D), {layer: (keys, values)} of right-padded ids.

    layers: indices of target layers, from 0. Values at the padding are meaningless.
    """
    cache = DynamicCache()  # without a config: sliding layers keep all rows
    hidden = last_hidden(target, input_ids, cache)
    if layers and max(layers) >= len(cache.layers):  # as Gemma 4's top layers
        raise UserError(
            f"target layer {max(layers)} caches no keys and values: name a lower one"
        )
    return hidden, {n: (cache.layers[n].keys, cache.layers[n].values) for n in layers}


# -------------------------------------------------------------------------- the drafter


def option(default, help: str, decode: bool = False):
    """A Config field; with `decode` it may change after training."""
    metadata = {"help": help, "decode": decode}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(config, **bounds: float) -> None:
    """Raise a UserError if a field is below its bound or of a wrong type."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        # An int may stand for a float. isinstance would let True pass as an int, and
        # `not >=` refuses nan.
        kinds = (int, type(getattr(config.__class__, name)))  # of the default
        if type(value) not in kinds or not value >= bound:
            kind = "a number" if float in kinds else "an int"
            raise UserError(f"{name} {value!r}: take {kind} of at least {bound}")


def one_of(config, **choices) -> None:
    """Raise a UserError if a field is not one of its choices."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            value = getattr(config, name)
            raise UserError(f"{name} {value!r}: take {' or '.join(allowed)}")


def llama_config(shape: dict, intermediate_size: int) -> LlamaConfig:
    """Config of a drafter's Llama layer; `shape` is a `target_shape`."""
    return LlamaConfig(
        hidden_size=shape["hidden_size"],
        intermediate_size=intermediate_size,
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )


def add_vocab_ids(drafter, size: int) -> None:
    """Give a new drafter its buffer `vocab_ids` (Vd,), the tokens that it can draft.

    `start_from` fills it with the most frequent ones, and it is saved with the
    weights. size: Vd; 0 is the whole vocabulary of the target.
    """
    vocab = drafter.config.target["vocab_size"]
    drafter.register_buffer("vocab_ids", torch.arange(min(size or vocab, vocab)))


def target_layers(target) -> list[nn.Module]:
    """The target's layers, bottom up; [] if it has no `layers`."""
    return list(getattr(target.get_decoder(), "layers", []))


@torch.no_grad()
def start_from(drafter, target, token_counts: Tensor, pairs=()) -> None:
    """Set `drafter.vocab_ids` to the most frequent tokens; copy weights.

    token_counts: (V,) how often each token occurs in the responses.
    pairs: (drafter's module, target's module to copy from). A drafter's `norm` gets the
        weights of the target's final norm as well.
    """
    check_target(target)
    most_frequent = token_counts.topk(len(drafter.vocab_ids)).indices
    # Sorted, so that a whole vocabulary keeps the order of the LM head's rows.
    drafter.vocab_ids.copy_(most_frequent.sort().values)
    for ours, theirs in pairs:
        _copy_weights(ours, theirs)
    final_norm = getattr(target.get_decoder(), "norm", None)
    if hasattr(drafter, "norm") and final_norm is not None:
        _copy_weights(drafter.norm, final_norm)


def _copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy weights of equal name and shape; the rest stay as they are."""
    source = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        # LoRA has renamed the weights that it adapts, and those of a quantised or
        # offloaded layer cannot be copied. A drafter learns without such a start.
        other = source.get(name)
        if other is None or not is_plain_weight(other) or other.shape != weight.shape:
            continue
        parent = theirs.get_submodule(name.rpartition(".")[0])
        # The drafter's norms are RMS norms that scale by w, so ones become w. Leave out
        # those that scale by 1 + w (Gemma), and LayerNorms, which map ones to their
        # bias.
        if "Norm" in type(parent).__name__ and name.endswith("weight"):
            scale = parent(torch.ones_like(other))
            if not torch.allclose(scale, other, atol=1e-2, rtol=1e-2):
                continue
        weight.copy_(other)


def overlap(target, hidden: Tensor, q_draft: Tensor, vocab_ids: Tensor) -> Tensor:
    """sum_x min(p_target, q_draft), summed over M places.

    hidden: (M, D) of the target, for p_target. q_draft: (M, Vd).
    """
    total = torch.zeros((), device=q_draft.device)
    for part, q in zip(hidden.split(256), q_draft.split(256)):  # saves memory
        p_target = target_logits(target, part).softmax(-1)[:, vocab_ids]  # (m, Vd)
        total += torch.minimum(p_target, q.float()).sum()
    return total


def load_drafter(Drafter, path, target, **hub):
    """Load a drafter to the target's device and dtype.

    path: a folder, or the id of a repository on the Hugging Face hub, "org/name".
    hub: arguments of the download, such as revision, as from_pretrained has them.
    Raises UserError if the drafter is missing, damaged, made for another target, or has
    weights that are not finite.
    """
    check_target(target)  # an offloaded one has no device to go to
    drafter = read_drafter(Drafter, path, **hub)
    drafter = drafter.to(target.device, target.dtype).eval()
    check_drafter(drafter, Drafter, target)
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise UserError(
            f"{path} holds weights that are not finite in {target.dtype}: train the "
            "drafter anew, or load the target in another dtype"
        )
    return drafter


def read_drafter(Drafter, path, **hub):
    """`load_drafter` without a target: on the CPU, and not checked against one."""
    # An id is owner/name, where owner is not a local folder.
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
    is_id = is_id and not Path(path).parent.is_dir()
    file = Path(path) / "config.json"
    remedy = f"name another folder, or make one with train.py --out {path}"
    if not is_id and not file.is_file():
        raise UserError(f"no drafter in {path}; {remedy}")
    method = Drafter.__module__.rpartition(".")[2]  # a copied file may be in a package
    place = f"the hub's {path}" if is_id else path
    damaged = f"{place} holds no {method} drafter, or a damaged one"
    kinds = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
    try:
        if is_id:
            file = Path(hf_hub_download(str(path), "config.json", **hub))
        config = json.loads(file.read_bytes())
        sizes = config.get("target") if isinstance(config, dict) else None
        sizes = sizes.values() if isinstance(sizes, dict) else ()
        if not sizes or not all(type(x) is int and x > 0 for x in sizes):
            raise ValueError("config.json has no target with sizes above 0")
        # The method's code may rely on these sizes. Other kinds of errors are bugs.
        with contextlib.redirect_stdout(io.StringIO()):  # the hub's loader prints
            return Drafter.from_pretrained(str(path), strict=True, **hub)
    except (*kinds, StrictDataclassError) as error:
        raise UserError(f"{damaged} ({one_line(error)}); {remedy}") from error


@dataclass
class Batch:
    """What `loss` takes: right-padded sequences and the target's states."""

    input_ids: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool, True for tokens to predict, not at t = 0
    hidden: Tensor  # (B, T, D) last hidden states, after the final norm
    kv: dict[int, tuple[Tensor, Tensor]]  # {layer: (keys, values)}, (B, Hkv, T, Dh)
    progress: float  # completed fraction of the training run, in [0, 1)

    @property
    def predicts(self) -> Tensor:
        """(B, T) bool, True for places whose next token is to be predicted."""
        return F.pad(self.loss_mask[:, 1:], (0, 1))


# ---------------------------------------------------------------------- what is refused


def one_line(error: Exception) -> str:
    """What an error says, in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def refuse(*checks: tuple[object, str]) -> None:
    """Raise a UserError for the first condition that holds."""
    for condition, message in checks:
        if condition:
            raise UserError(message)


def check_drafter(drafter, Drafter, target) -> None:
    """Raise a UserError if the drafter is not of the method or not for the target."""
    if not isinstance(drafter, Drafter):
        raise UserError(f"the drafter is a {type(drafter)}: load a {Drafter}")
    made_for = drafter.config.target
    sizes = target_shape(target).items()
    wrong = [f"{x} {made_for.get(x)} != {n}" for x, n in sizes if made_for.get(x) != n]
    if wrong:
        raise UserError(
            f"the drafter is for another target ({', '.join(wrong)}): train one with "
            "train.py"
        )
    weight = next(drafter.parameters())
    own = f"{weight.dtype} on {weight.device}"
    theirs = f"{target.dtype} on {target.device}"
    if own != theirs:
        raise UserError(
            f"the drafter is {own}: move it with .to(target.device, target.dtype)"
        )


def decode_fields(config) -> list[str]:
    """The fields that may change after training, of a Config or of such a class."""
    return [x.name for x in dataclasses.fields(config) if x.metadata.get("decode")]


def changed(config, changes: dict):
    """The Config with other values of fields that may change after training.

    Raises UserError for any other field.
    """
    free = decode_fields(config)
    wrong = sorted(changes.keys() - set(free))
    if wrong:
        those = ", ".join(free) or "nothing"
        raise UserError(
            f"decoding cannot change {', '.join(wrong)}: it can change {those}"
        )
    return dataclasses.replace(config, **changes)


INSTEAD = "take another target, or decode without drafts"
_TRIED = weakref.WeakKeyDictionary()  # {target: the state in which it was tried}
_TRYING = threading.Lock()


def check_target(target) -> tuple:
    """Raise a UserError if token trees would change the target's output.

    It tries a small tree the first time, and again whenever the target has changed
    its attention kernel, dtype, device, mode, windows or adapters, which make up the
    state that is returned. Nothing of the target is changed, and other threads may use
    it at the same time. (A target with accelerate's hooks is run itself.)
    """
    adapters = getattr(target, "peft_config", {})
    if hasattr(target, "get_base_model"):  # PEFT's wrapper, which `build` may be given
        target = target.get_base_model()
    with _TRYING:
        active = []  # adapters, of each layer
        for module in target.modules():
            names = getattr(module, "active_adapters", None)
            disabled = getattr(module, "disable_adapters", False) is True
            active += names if isinstance(names, list) and not disabled else []
        kernel = str(target.config.get_text_config()._attn_implementation)
        placed = target.dtype, str(target.device), target.training
        state = kernel, *placed, *sliding_windows(target).items(), *active
        # Learned prompts may have come without any new module.
        _check_parts(target, kernel, adapters)
        if _TRIED.get(target) != state:
            _try_tree(target)
            _TRIED[target] = state
    return state


def _check_parts(target, kernel: str, adapters: dict) -> None:
    """Raise a UserError for what the trial is too short to show.

    adapters: PEFT's configs, by name.
    """
    config = decoder_config(target)
    devices = {str(x.device) for x in target.parameters()} - {"meta"}
    # Llama 4 attends in chunks, DeepSeek-V3.2 through an indexer. GPT-Neo and Doge
    # count rows of the cache, of which a tree has several at one position.
    unfit = {*sliding_windows(target)} - {"full_attention", "sliding_attention"}
    rows_counted = "local" in getattr(config, "attention_layers", ())
    if rows_counted or hasattr(config, "keep_window_size"):
        unfit.add("it counts cache rows")
    unfit = [f"the attention of {config.model_type} ({x})" for x in sorted(unfit)]
    # PEFT puts learned tokens before the prompt in `prepare_inputs_for_generation`,
    # which is not called here, and aLoRA finds its start from the prompt's end.
    prepares = getattr(target.prepare_inputs_for_generation, "__self__", None)
    unusual = ("is_prompt_learning", "alora_invocation_tokens")
    learned = any(getattr(x, name, None) for x in adapters.values() for name in unusual)
    if learned or prepares is not target:
        unfit.append("learned prompts and aLoRA (PEFT)")
    refuse(
        (
            "flash" in kernel or "flex" in kernel,
            f"{kernel} takes no tree mask: load the target with "
            "attn_implementation='sdpa'",
        ),
        (
            len(devices) > 1 or target.device.type == "meta",
            "the target is spread over devices, or its embedding is offloaded: load it "
            "on one device",
        ),
        (unfit, f"token trees do not work with {', '.join(unfit)}: {INSTEAD}"),
    )


def _try_tree(target) -> None:
    """Raise a UserError unless a tree and a plain forward agree, up to rounding."""
    half = target.dtype in (torch.float16, torch.bfloat16)
    tolerance = 0.15 if half else 2e-3
    cause = None
    try:
        model = target
        # accelerate's hooks are bound to the module that they were made for. Such a
        # target is tried itself, so a window that it does not read is not noticed.
        if not any("forward" in vars(module) for module in target.modules()):
            model = _twin(target, {})
            config = decoder_config(model)
            if getattr(config, "sliding_window", None):
                config.sliding_window = 3  # shorter than the text of the trial
        error = _compare(model)
        what = f"its logits or last hidden states are off by {error:.1%}"
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # models raise errors of many kinds
        cause, error = problem, math.inf
        what = f"{type(problem).__name__}: {one_line(problem)}"
    if not error <= tolerance:
        raise UserError(
            f"token trees do not fit this target ({what}): call target.eval(); or, if "
            "its config has a window that it does not read, delete sliding_window and "
            f"layer_types from target.config; or {INSTEAD}"
        ) from cause


def _twin(module: nn.Module, memo: dict) -> nn.Module:
    """The same modules again, with configs of their own; weights and hooks are shared.

    memo: {id: what was copied}, modules and parts of configs.
    """
    if id(module) in memo:
        return memo[id(module)]
    twin = memo[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        if name == "_modules":
            value = {n: x if x is None else _twin(x, memo) for n, x in value.items()}
        elif isinstance(value, dict):  # parameters, buffers, hooks
            value = value.copy()
        elif isinstance(value, PreTrainedConfig):
            value = copy.deepcopy(value, memo)
        elif name == "_compiled_call_impl":  # of the original
            value = None
        twin.__dict__[name] = value
    # Rotary embeddings of growing length write into their tables, which are not saved.
    for name in module._non_persistent_buffers_set:
        twin._buffers[name] = copy.deepcopy(twin._buffers[name])
    return twin


@torch.no_grad()
def _compare(target) -> float:
    """Compare two rounds of decoding with a plain forward over the same text.

    Returns the largest relative error of a row of logits or of last hidden states, from
    which drafters compute logits.

    The text is seven ids, t_0, t_1, ... In the tree its tokens follow wrong siblings:
    eight of them before t_3, so that even in half precision the error is large if a
    model takes a token's cache row for its position:

        t_2 -- 8 wrong ones         t_5 -- wrong
         `---- t_3 -- wrong          `---- t_6
                `---- t_4
    """
    config = target.config.get_text_config()
    # Not the first ids: special tokens may behave unlike ordinary ones.
    ids = config.vocab_size * torch.arange(1, 8, device=target.device)[None] // 8
    cache = GrowingCache(config.num_hidden_layers)
    positions = torch.arange(7, device=ids.device)[None]
    plain = forward(target, cache, ids, None, positions)

    cache.cut(2)
    fed = torch.tensor([0] * 8 + [3, 0, 4])
    draft = Draft(ids[0, fed], [-1] * 9 + [8, 8])
    first = score(target, ids[:, :3], draft, cache)
    kept = torch.tensor([0, 9, 11])  # t_2, t_3 and t_4
    cache.move(2 + kept, 2)
    cache.cut(5)
    draft = Draft(ids[0, torch.tensor([0, 6])], [-1, -1])
    second = score(target, ids[:, :6], draft, cache)
    errors = [
        _error(torch.cat([one[kept], two[:3:2]]), right[2:])
        for one, two, right in zip(first, second, plain)
    ]
    # A prompt is read in parts, and without logits.
    cache.cut(0)
    parts = [last_hidden(target, part, cache) for part in ids.split(5, dim=1)]
    read = torch.cat(parts, dim=1)[0]
    same = _error(target_logits(target, plain[1]), plain[0]) <= 0.02
    if read.shape[1] != config.hidden_size or not same:
        raise ValueError("its logits do not follow from its last hidden states")
    return max(*errors, _error(read, plain[1]))


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The largest relative error of rows (n, ...); inf for NaN."""
    # Some models forbid tokens by logits of -inf.
    never = ours.isneginf() & theirs.isneginf()
    ours, theirs = (x.float().masked_fill(never, 0) for x in (ours, theirs))
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-9)
    return float(errors.nan_to_num(math.inf).max())


def _check_request(target, input_ids: Tensor, generation_config, given: dict) -> float:
    """Raise a UserError if this request cannot be decoded by token trees.

    given: the other arguments that transformers hands on.
    Returns how long a text may get, given the length of the prompt.
    """
    unfit = [name for name, x in given.items() if isinstance(x, Tensor)]
    unfit = sorted({*unfit} - {"attention_mask", "cache_position", "position_ids"})
    # Such as beams, contrastive search, DoLa, constraints or prompt lookup.
    mode = generation_config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        unfit.append(mode)
    if generation_config.return_dict_in_generate:
        unfit.append("return_dict_in_generate")
    # Decoding makes a cache of its own, from which rejected nodes can be dropped.
    cache = given.get(CACHE)
    if cache is not None and cache.get_seq_length() > 0:
        unfit.append("a cache that holds tokens (see common.start)")
    mask = given.get("attention_mask")
    padded = mask is not None and (mask.shape != input_ids.shape or not mask.all())
    positions = given.get("position_ids")
    if positions is not None and not padded:  # Qwen-VL makes several rows, (3, 1, T)
        counted = torch.arange(input_ids.shape[1], device=positions.device)
        if not all(row.equal(counted) for row in positions.flatten(0, -2)):
            unfit.append("position_ids that do not count from 0")
    length = generation_config.max_length
    config = target.config.get_text_config()
    reach = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # several kinds of layers have one each
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            # Beyond a border keys are rotated by other factors, and the cached ones
            # have been rotated already. A longer prompt uses the long factors only.
            border = each.get("original_max_position_embeddings") or math.inf
            if input_ids.shape[1] - 1 <= border:
                reach = min(reach, border + 1)
    several = input_ids.numel() == 0 or len(input_ids) > 1
    refuse(
        (
            unfit,
            f"token trees do not work with {', '.join(unfit)}: leave it out, or set to "
            "None the option that asks for it",
        ),
        (
            several,
            f"{len(input_ids)} rows of {input_ids.shape[1]} ids: pass the input_ids of "
            "one prompt at a time, and ask for one answer",
        ),
        (
            padded,
            "attention_mask has zeros or another length than the prompt (transformers "
            "makes zeros where the prompt holds pad_token_id): pass no padding, and a "
            "mask of ones",
        ),
        (
            input_ids.device != target.device,
            f"the prompt is on {input_ids.device}: move it with .to(target.device)",
        ),
        (
            length > reach,
            f"prompt + new tokens = {length}, more than the {reach} positions of the "
            "target, or of its short RoPE factors: shorten it, or, if the target was "
            "made for longer texts, raise target.config.max_position_embeddings",
        ),
    )
    check_ids(target, input_ids)
    return reach


def _check_processors(decoding: Decoding) -> None:
    """Raise a UserError for a logits processor whose answer needs more than the ids.

    A round asks about several texts, and about some of them more than once. Each
    processor is therefore asked three times about the prompt, and about one token more.
    """
    for processor in decoding.logits_processor or ():
        reason = "gives other answers, or counts,"
        try:
            fits = _answers_by_ids(processor, decoding)
        except Exception as error:  # a processor may raise anything
            fits, reason = False, f"fails ({one_line(error)})"
        if not fits:
            raise UserError(
                f"{type(processor).__name__} {reason} when it is asked again about a "
                "text, but token trees need logits processors that depend on nothing "
                "but the ids (for grammars see support/interop/grammars.py): take "
                "another, or decode without drafts"
            )


def _answers_by_ids(processor, decoding: Decoding) -> bool:
    """Whether a logits processor gives the same answer about the same text again."""
    vocab = decoding.target.config.get_text_config().vocab_size
    scores = torch.linspace(-1, 1, vocab, device=decoding.ids.device)[None]

    def ask(text: Tensor) -> tuple[Tensor, str]:
        """The scores after a text, and what the processor keeps, such as a count."""
        asked = processor(text.clone(), scores.clone()).clone()
        return asked, repr(getattr(processor, "__dict__", None))

    short = longer = decoding.ids
    before = ask(short)[0]
    allowed = before.clone()
    # Plain decoding never asks about a text that has ended.
    allowed[:, [x for x in decoding.eos_ids if x < vocab]] = float("-inf")
    if allowed.max() > float("-inf"):
        longer = torch.cat([short, allowed.argmax(-1)[None]], dim=1)
    # The first calls may prepare something. Later ones must leave no trace.
    for text, first in ((short, before), (longer, ask(longer)[0])):
        (second, kept), (third, kept_then) = ask(text), ask(text)
        if not first.equal(second) or not second.equal(third) or kept != kept_then:
            return False
    return True


def check_ids(target, ids: Tensor) -> None:
    """Raise a UserError for token ids that the target has no embedding for."""
    vocab = target.config.get_text_config().vocab_size
    wrong = [int(x) for x in (ids.min(), ids.max()) if not 0 <= x < vocab]
    if wrong:
        raise UserError(
            f"token id {wrong[0]}, but the target has {vocab} tokens: take its own "
            "tokenizer, or target.resize_token_embeddings(len(tokenizer))"
        )


# -------------------------------------------------------------------------- a first try


def demo(Drafter, folder: str, drafts) -> None:
    """Answer a prompt with a shipped drafter, for `python METHOD.py "..."`.

    drafts: called with (decoding, drafter), a generator of drafts.
    """
    about = "Answer a prompt with the shipped drafter (for timings see bench.py)."
    parser = argparse.ArgumentParser(description=about)
    prompt = "Explain photosynthesis to a child in five sentences."
    parser.add_argument("prompt", nargs="?", default=prompt, help=f"default: {prompt}")
    prompt = parser.parse_args().prompt
    transformers.logging.disable_progress_bar()
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no such method
        sys.stdout.reconfigure(errors="replace")  # some code pages lack letters
    try:
        _show_answer(Drafter, folder, drafts, prompt)
    except (UserError, OSError) as problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n")


def _show_answer(Drafter, folder: str, drafts, prompt: str) -> None:
    """Print an answer while it is decoded, with accepted draft tokens in green."""
    if sys.stderr.isatty():
        print("loading target and drafter ...", file=sys.stderr)
    target, tokenizer = load_target()
    checkpoint = Path(__file__).with_name("checkpoints") / folder
    drafter = load_drafter(Drafter, checkpoint, target)
    with contextlib.suppress(ImportError):  # not here if only two files were copied
        from support import packed

        target, drafter = packed.pack(target), packed.pack(drafter)
    message = {"role": "user", "content": prompt}
    inputs = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    stats = Stats()
    green, reset = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")
    printed = ""

    def show(decoding, draft, path):
        nonlocal printed
        before = length + stats.emitted
        stats(decoding, draft, path)
        for stop, colour in ((before + len(path), green), (None, reset)):
            ids = decoding.ids[0, length:stop]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            text = text.rstrip("\ufffd")  # a part of a character
            print(colour + text[len(printed) :] + reset, end="", flush=True)
            printed = text

    target.generate(
        **inputs,
        custom_generate=speculate(drafts, drafter, callback=show),
        max_new_tokens=160,
    )
    tau = stats.emitted / stats.target_forwards
    accepted = f"{green}{sum(stats.accepted)} accepted from the drafter{reset}"
    print(
        f"\n\n{stats.emitted} tokens, {accepted}; {tau:.2f} tokens per target forward "
        "(plain decoding: 1)"
    )
