"""Shared code: verify a draft, decode, load a target and a drafter.

A method is a generator of drafts. Given a Decoding, the state of one answer, it yields
one Draft per round until `decoding.done`, and the Decoding commits what the target
accepts of each before the next one is asked for:

    for draft in glide.drafts(decoding, drafter):
        decoding.verify(draft)

All methods share the first part, so read it before any of them: Draft, `score`, `walk`,
`draw`, Decoding, `pick`, `speculate`. It ends at the line "reading can stop here". The
rest is for looking up: masks and forwards, KV caches, what methods need from a target
and from a drafter (DraftCache and Batch, above all), and what is refused and why.

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
Vd draft vocabulary, D hidden size, H heads, Hkv key-value heads, Dh head size, R how
many of these are rotated. M is explained where it is used.

Licence: Apache-2.0.
"""

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import math
import re
import sys
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

# Caches, masks and `custom_generate` of transformers change between its versions.
TESTED = ("5.23", "5.24")
if not transformers.__version__.startswith(tuple(f"{x}." for x in TESTED)):
    warnings.warn(
        f"common.py was tested with transformers {' and '.join(TESTED)}, and this is "
        f"{transformers.__version__}: compare an answer with plain decoding first"
    )


# What a forward calls its KV cache: `cache` since transformers 5.24.
CACHE = "past_key_values"
if CACHE not in inspect.signature(LlamaAttention.forward).parameters:
    CACHE = "cache"


class UserError(ValueError):
    """A mistake of the user's; the message names the problem and the remedy."""


# ------------------------------------------------------------------------- a draft


@dataclass
class Draft:
    """A tree of N candidate tokens below the root.

    When sampling, the first M nodes were drawn from `probs`, siblings in the order of
    drawing, each below the root or another drawn node. A method must submit every token
    that it has drawn: to leave one out because of what it is changes the distribution
    of the text. The other nodes may have been chosen in any way, for instance as the
    likeliest tokens. Greedy decoding treats all nodes alike.
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

    def drawn(self) -> dict[int, list[tuple[int, Tensor]]]:
        """{parent: its sampled children in order, each as (token, q_draft (V,))}."""
        drawn = {}
        probs = () if self.probs is None else self.probs
        for parent, token, q_draft in zip(self.parents, self.tokens.tolist(), probs):
            drawn.setdefault(parent, []).append((token, q_draft))
        return drawn


def chain(steps, like: Tensor, **notes) -> Draft:
    """A draft in which each token follows the one before.

    steps: pairs of a token (1,) and the q_draft (V,) that it was drawn from.
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


@torch.no_grad()
def score(target, ids: Tensor, draft: Draft, cache) -> tuple[Tensor, Tensor]:
    """One target forward over root and nodes.

    ids: (1, P + 1) committed tokens; the last one is the root.
    cache: the target's. It has P rows before, and P + 1 + N after.
    Returns logits (N + 1, V) and last hidden states (N + 1, D); index 0 is the root.
    """
    prefix = ids.shape[1] - 1  # P
    assert cache.get_seq_length() == prefix, "all tokens but the newest must be cached"
    fed, masks, positions = tree_inputs(target, ids, draft)
    return forward(target, fed, cache, masks, positions)


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


def draw(p_target: Tensor, siblings: list[tuple[int, Tensor]]) -> int:
    """Draw a token that is distributed as p_target (V,), by rejection sampling.

    Whatever the drafter proposes, the token follows the target. An example with three
    tokens x shows why. The last two rows are the probabilities that x is drafted and
    accepted, and that the draft is rejected and x is drawn instead:

        x                           0     1     2     sum
        p_target                   .35   .55   .10     1
        q_draft                    .20   .05   .75     1
        drafted and accepted       .20   .05   .10    .35    min(p, q)
        after a rejection          .15   .50   .00    .65    max(p - q, 0)

    The token x is drafted with probability q(x) and then accepted with probability
    min(1, p(x) / q(x)), which makes min(p(x), q(x)) together. What p(x) still lacks is
    max(p(x) - q(x), 0), and the sum of all that is lacking is the probability of a
    rejection, here .65. So after a rejection we draw from the residual, which is
    max(p - q, 0) divided by its sum: this supplies exactly what is lacking, and the
    last two rows of the table add up to p.

    siblings: (token, q_draft (V,)) of the children that the drafter has sampled, in the
        order in which they were drawn. Each q_draft must be the distribution that its
        token was drawn from, given the text, the tokens above and the siblings before
        it. After a rejection the token must follow the residual, whichever token was
        rejected, so the next sibling is judged as the first was, with the residual in
        the place of p.
    Returns the token; all randomness is torch.rand's. The draw ignores children that
    were not sampled. If one of them holds the token, `walk` accepts it, which does not
    change how the token is distributed.
    Raises UserError for probabilities that are not numbers.
    Source: Leviathan et al. (2023), Algorithm 1, where the residual is p'; for siblings
        SpecInfer (Miao et al., 2024), multi-step speculative sampling, which takes them
        in random order; for those drawn without replacement Jeon et al. (2024,
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
        hidden    (1, n, D)   the target's last hidden states, after the final norm, of
                              the n tokens cached in the newest round; at first, of the
                              prompt's tokens but the last
        done                  True after the last token
        room                  how deep a draft may be
        do_sample             whether tokens are drawn, or the argmax is taken
        eos_ids               the end-of-sequence ids, a set

    After a round that accepted x_4 and added the bonus token x_5:

        ids       x_1  x_2  x_3  x_4  x_5
        hidden              h_3  h_4

    `commit` cuts the target's cache after every round. The drafter's is cut by its
    method when the next draft begins (`DraftCache.rewind`).

    given: what transformers passes to a `custom_generate` function.
    Raises UserError for a target or a request that cannot be decoded with token trees.
    """

    def __init__(self, target, input_ids: Tensor, **given):
        if "stopping_criteria" not in given:
            raise UserError("call target.generate(..., custom_generate=speculate(...))")
        self.logits_processor = given.pop("logits_processor", None)
        self.stopping_criteria = given.pop("stopping_criteria")
        self.generation_config = given.pop("generation_config")
        check_target(target)
        _check_request(target, input_ids, self.generation_config, given)
        self.target = target
        self.ids = input_ids.long()
        self.do_sample = self.generation_config.do_sample
        self.eos_ids = eos_ids(self.generation_config)
        self.done = False
        _check_processors(self)
        # Cache the prompt but for its last token, which is the first root.
        config = target.config.get_text_config()
        self.cache = GrowingCache(config.num_hidden_layers)
        if input_ids.shape[1] == 1:
            empty = (1, 0, config.hidden_size)
            self.hidden = input_ids.new_empty(empty, dtype=target.dtype)
        else:
            prompt = input_ids[:, :-1]
            # Without logits, which would be T x V numbers.
            self.hidden = last_hidden(target, prompt, self.cache)

    @property
    def room(self) -> int:
        """How deep a draft may be: what is left of max_length, less the bonus token."""
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

        The forward has left the rows of the P committed tokens, the root and the N
        nodes in the cache, in this order. logits: (N + 1, V). hidden: (N + 1, D).
        """
        prefix = self.ids.shape[1] - 1  # P
        drawn = draft.drawn() if self.do_sample else {}

        # Greedily, each token is the argmax after the tokens before it, whatever was
        # drafted, and a draft only decides how many of these one forward supplies. When
        # sampling, each token follows the target given those before it, as `draw`
        # guarantees, and so the whole text does.
        def choose(node: int) -> int:
            # `walk` goes down from the root, so self.ids ends with this node's token.
            scores = self.process(logits[node + 1])
            if self.do_sample:
                token = draw(scores.softmax(-1), drawn.get(node, []))
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
        # and the accepted nodes', except a last one that ended the answer.
        kept = [0, *(node + 1 for node in path)][: len(tokens)]
        if kept != list(range(len(kept))):  # a chain's accepted rows are in place
            rows = torch.tensor(kept, device=hidden.device)
            self.cache.move(prefix + rows, prefix)
            hidden = hidden[rows]
        self.cache.cut(prefix + len(kept))
        self.kept = len(kept)
        self.hidden = torch.cat([self.hidden, hidden[None, : len(kept)]], dim=1)
        return path


def pick(decoding: Decoding, logits: Tensor, vocab_ids: Tensor, drafted: list[int]):
    """Choose a draft token; returns it (1,) with its q_draft (V,).

    Returns None if the logits processors leave no finite score. A processor may force a
    token that is not among vocab_ids.

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


def speculate(drafts, *args, streamer=None, each=None, **changes):
    """A `custom_generate` for transformers that decodes with a method's drafts.

        target.generate(**inputs, custom_generate=speculate(glide.drafts, drafter))
        speculate(glide.drafts, drafter, gamma=5)        # another length of drafts
        speculate(lambda d: cape.drafts(glide.drafts(d, drafter, gamma=4), d))

    drafts: called with (decoding, *args, **changes), a generator of drafts.
    streamer: receives the prompt, and then the tokens of each round.
    each: called with (decoding, draft, path) after each round, as Stats is.

    transformers keeps three arguments of `generate` to itself: a `streamer` given there
    gets the prompt alone, `assistant_model` has no effect, and in place of
    `stop_strings` pass stopping_criteria=[StopStringCriteria(tokenizer, [...])]. The
    cache is always one of our own. Logits processors are called on draft tokens as
    well, so they must depend on the ids alone.
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
            if each is not None:
                each(decoding, draft, path)
            if decoding.done:
                break
        assert decoding.done, "the drafts ended before the answer"
        if streamer is not None:
            streamer.end()
        return decoding.ids

    return generate


@dataclass
class Stats:
    """Counts of one answer: speculate(..., each=stats)."""

    target_forwards: int = 0  # without the one over the prompt
    drafted: int = 0  # draft tokens submitted for verification
    emitted: int = 0  # tokens committed, bonus tokens included
    # The depth of each round's draft, and how many of its tokens were accepted.
    offered: list[int] = field(default_factory=list, repr=False)
    accepted: list[int] = field(default_factory=list, repr=False)

    def __call__(self, decoding: Decoding, draft: Draft, path: list[int]) -> None:
        self.target_forwards += 1
        self.drafted += len(draft.tokens)
        # One row was kept for each token committed: the root has one, the newest token
        # has none.
        self.emitted += decoding.kept
        self.offered.append(max(draft.depths(), default=0))
        self.accepted.append(len(path))


def start(target, **inputs) -> Decoding:
    """The Decoding that `target.generate(**inputs)` would use, for your own loop.

        decoding = common.start(target, input_ids=ids, max_new_tokens=64)
        for draft in glide.drafts(decoding, drafter):
            decoding.verify(draft)

    inputs: arguments of `generate`; the prompt is given by name, as `input_ids`.
    """

    def begin(target, input_ids, **given):
        return Decoding(target, input_ids, **given)

    # Without a mask, transformers guesses padding where the prompt holds pad_token_id.
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    return target.generate(**inputs, custom_generate=begin)


# ======================================================================================
#                               Reading can stop here.
#
#          Below is what the above is made of, for looking up where it is used.
# ======================================================================================

# ---------------------------------------------- what verifying and drafting are made of


def tree_inputs(target, ids: Tensor, draft: Draft) -> tuple:
    """What the target reads: ids (1, n), attention masks and positions (1, n)."""
    fed = torch.cat([ids[0, -1:], draft.tokens])[None]  # (1, N + 1)
    depths = torch.tensor([0, *draft.depths()])
    positions = ids.shape[1] - 1 + depths  # nodes of one depth share a position
    masks = attention_masks(target, tree_mask(draft.parents), positions)
    return fed, masks, positions[None].to(fed.device)


def forward(target, fed: Tensor, cache, masks, positions) -> tuple[Tensor, Tensor]:
    """Feed ids (1, n); returns logits (n, V) and last hidden states (n, D).

    masks: {kind of layer: mask}, of `attention_masks`.
    """
    # A model with several kinds of layers takes a mask for each kind, others just one.
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    output = target(
        fed,
        attention_mask=mask if fed.shape[1] > 1 else None,  # the root alone needs none
        position_ids=positions,
        output_hidden_states=True,
        **{CACHE: cache},
        **forward_options(target),
    )
    return output.logits[0], output.hidden_states[-1][0]


def last_hidden(target, ids: Tensor, cache=None) -> Tensor:
    """Last hidden states (B, T, D) of ids (B, T), whose rows go into an empty cache."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    output = target.get_decoder()(
        ids,
        position_ids=positions,  # RoBERTa would not count from 0
        output_hidden_states=False,
        **{CACHE: cache},
        **forward_options(target),
    )
    return output[0]


def forward_options(target) -> dict:
    """Arguments of a forward that override the target's config."""
    # Training leaves settings in a saved config: to return attention weights, to add
    # the loss of a router, or to keep no cache. They would slow down or break what is
    # done here, so each of them is given in the call.
    options = {"use_cache": True, "output_attentions": False}
    if hasattr(target.config.get_text_config(), "output_router_logits"):
        options["output_router_logits"] = False  # other models do not know it
    return options


def attention_masks(target, sees: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """The target's attention masks for n tokens after P cached rows, by kind of layer.

    sees: (n, n) bool, of the tokens among themselves; all see the P cached rows.
    positions: (n,) of the tokens; the first is at P, the cached rows at 0 to P - 1.
    Returns {kind: (1, 1, n, P + n)}, in the target's dtype, to be added to the scores.
    """
    prefix = int(positions[0])  # P
    window = getattr(decoder_config(target), "sliding_window", None)
    sees = F.pad(sees, (prefix, 0), value=True)  # (n, P + n)
    query = positions[:, None]
    key = torch.cat([torch.arange(prefix), positions])  # (P + n,)
    masks = {}
    for kind in layer_kinds(target):
        reach = sees
        # Distance is counted in positions, not in cache rows, because siblings share a
        # position.
        if kind == "sliding_attention":
            reach = sees & (query - key < window)
        # Not a boolean mask, because eager attention would add it as 0 and 1.
        mask = torch.zeros(reach.shape, dtype=target.dtype)
        mask.masked_fill_(~reach, torch.finfo(target.dtype).min)
        masks[kind] = mask[None, None].to(target.device)
    return masks


def layer_kinds(target) -> list[str]:
    """The kinds of attention in the target's layers, as `check_target` found them."""
    if target not in _TRIED:
        check_target(target)
    return _TRIED[target].kinds


def decoder_config(target):
    """The config that the target's decoder reads; it may be a copy of the target's."""
    return getattr(target.get_decoder(), "config", target.config).get_text_config()


def sample(probs: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Draw ids (..., 1) from probs (..., V).

    uniform: (..., 1) in [0, 1); None: torch.rand's.
    """
    # torch.multinomial takes many times as long on a CPU. float32 sums would lose rare
    # tokens, but MPS has no float64. With right=True the id is the first whose sum
    # exceeds the number, so never one of probability 0.
    exact = probs if probs.device.type == "mps" else probs.double()
    sums = exact.cumsum(-1)  # (..., V)
    if uniform is None:
        uniform = torch.rand_like(sums[..., :1])
    ids = torch.searchsorted(sums, uniform * sums[..., -1:], right=True)
    return ids.clamp(max=sums.shape[-1] - 1)  # a drafter's sums may overflow to nan


def eos_ids(generation_config) -> set[int]:
    """The end-of-sequence ids, of which a config names one, several or none."""
    named = generation_config.eos_token_id
    return set() if named is None else set(torch.as_tensor(named).view(-1).tolist())


# ---------------------------------------------------------------------------- KV caches


class GrowingLayer(DynamicLayer):
    """A cache layer that copies old rows only to double its buffers."""

    # DynamicLayer concatenates, which copies the whole cache at every forward. Layers
    # that share another's keys (Gemma 4) are never fed, and then there are no buffers.

    def update(self, key_states, value_states, *args, **kwargs) -> tuple:
        """Append n rows; returns keys and values (B, Hkv, P + n, Dh)."""
        old = self.get_seq_length()
        end = old + key_states.shape[2]
        if not self.is_initialized:
            self.buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.is_initialized = True
        if end > self.buffers[0].shape[2]:
            spare = (0, 0, 0, max(256, 2 * end) - old)
            self.buffers = [F.pad(x[:, :, :old], spare) for x in self.buffers]
        self.buffers[0][:, :, old:end] = key_states
        self.buffers[1][:, :, old:end] = value_states
        self.cut(end)
        return self.keys, self.values

    def cut(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.is_initialized:
            self.keys, self.values = (x[:, :, :length] for x in self.buffers)

    def move(self, rows: Tensor, first: int) -> None:
        """Copy `rows` (n,) to first, first + 1, ..."""
        if self.is_initialized:
            for x in self.buffers:
                x[:, :, first : first + len(rows)] = x[:, :, rows.to(x.device)]


class GrowingCache(DynamicCache):
    """An empty cache of `num_layers` growing layers."""

    def __init__(self, num_layers: int):
        super().__init__()  # without a config: sliding layers keep all rows as well
        self.layers = [GrowingLayer() for _ in range(num_layers)]

    def move(self, rows: Tensor, first: int) -> None:
        """Copy `rows` (n,) of every layer to first, first + 1, ..."""
        for layer in self.layers:
            layer.move(rows, first)

    def cut(self, length: int) -> None:
        """Keep the first `length` rows of every layer."""
        for layer in self.layers:
            layer.cut(length)


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
    Raises UserError if it cannot be loaded, in this dtype or on this device.
    """
    label = name or "the default target"
    try:
        torch.zeros(1, device=device)  # a wrong device is noticed before a long load
        if name is None:
            try:
                from support import default_target
            except ImportError:  # no support/, or one without this file
                raise UserError(
                    "the default target needs support.default_target, which cannot be "
                    "imported here: name a target, by its id or folder"
                ) from None
            name = default_target.folder()
        return _read_target(name, dtype, device)
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:  # torch and the readers of transformers raise many kinds
        raise UserError(
            f"cannot load {label} on {device} ({one_line(error)}); give a Hugging Face "
            "id, a folder of tokenizer and *.safetensors, or a .gguf file; and a "
            "device that torch has"
        ) from error


def _read_target(name, dtype, device):
    path = Path(name).expanduser()
    gguf = path.name if path.suffix == ".gguf" else None
    # Anything else is an id, which is looked for on the hub.
    local = gguf or path.is_absolute() or str(name).startswith(".")
    local = local or ("/" in str(name) and path.parent.is_dir())
    if local and not path.exists():
        raise FileNotFoundError("no such file or folder")
    folder = (path.parent if gguf else path).as_posix()
    options = {"gguf_file": gguf, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if len(tokenizer) < 2:  # transformers makes an empty one
        raise FileNotFoundError("no tokenizer files")
    if not gguf:
        options["use_safetensors"] = True
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if gguf:  # its weights are floats now, so it can be saved
        target.hf_quantizer = None
        del target.config.quantization_config
    return target.to(device).eval().requires_grad_(False), tokenizer


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


def _logit_scale(target) -> float:
    """The factor on a target's logits (Granite, Cohere), else 1."""
    config = target.config.get_text_config()
    if getattr(config, "logit_scale", None):
        return config.logit_scale
    return 1 / (getattr(config, "logits_scaling", None) or 1)


def _head_weight(target) -> Tensor | None:
    """The LM head's weight (V, D); None if only a call of the head gives its logits."""
    head = target.get_output_embeddings()
    # An adapter replaces the layer by one that is not an nn.Linear.
    if isinstance(head, nn.Linear) and is_plain_weight(head.weight):
        return head.weight
    return None


def _head_logits(target, hidden: Tensor, token_ids: Tensor | None) -> Tensor:
    """What the LM head makes of hidden (..., D), before scale and soft cap."""
    head = target.get_output_embeddings()
    weight = _head_weight(target)
    if weight is None:
        logits = head(hidden.to(target.dtype))
        return logits if token_ids is None else logits[..., token_ids]
    bias = head.bias
    if token_ids is not None and len(token_ids) < len(weight):
        weight = weight[token_ids]
        bias = None if bias is None else bias[token_ids]
    return F.linear(hidden.to(weight.dtype), weight, bias)


def target_logits(target, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Logits (..., V), or (..., Vd) of `token_ids`, of hidden (..., D).

    token_ids: (Vd,), ascending.
    """
    logits = _head_logits(target, hidden, token_ids).float()
    scale = _logit_scale(target)
    if scale != 1:  # saves a pass over all logits
        logits = logits * scale
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


class CalledHead(nn.Module):
    """Some logits of a target whose LM head can only be called, and not be copied."""

    def __init__(self, target, token_ids: Tensor):
        super().__init__()
        self.given = target, token_ids  # in a tuple, or `.to` would change the target

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (..., Vd) of hidden (..., D)."""
        target, token_ids = self.given
        return _head_logits(target, hidden, token_ids) * _logit_scale(target)


def draft_head(target, token_ids: Tensor) -> nn.Module:
    """The part of the LM head for `token_ids` (Vd,), ascending; frozen, for a drafter.

    No soft cap, and no bias unless the head can only be called.
    """
    head = target.get_output_embeddings()
    scale = _logit_scale(target)
    # A PackedLinear (support/packed.py) picks rows of its own packed weight.
    if hasattr(head, "select") and scale == 1:
        return head.select(token_ids)
    weight = _head_weight(target)
    if weight is None:
        return CalledHead(target, token_ids)
    if len(token_ids) < len(weight):
        weight = weight[token_ids]
    if scale != 1:
        weight = weight * scale
    weight = weight.to(target.dtype)  # an LM head may be kept in float32
    # On the device meta no time is spent on initial weights.
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
        with contextlib.suppress(KeyError):  # Beam's full layers do not rotate
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


def whole_rotary(tables: tuple[Tensor, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """Widen tables (B, T, R) to (B, T, Dh), for a drafter's Llama layers.

    Dimensions j and j + Dh/2 share an angle, which is 0 from j = R/2 on.
    R = 4 and Dh = 8: cos `a b a b` becomes `a b 1 1 a b 1 1`.
    """
    widened = []
    for table, fill in zip(tables, (1.0, 0.0)):
        half = table[..., : table.shape[-1] // 2]  # (B, T, R/2)
        missing = head_dim // 2 - half.shape[-1]
        half = F.pad(half, (0, missing), value=fill)  # (B, T, Dh/2)
        widened.append(torch.cat([half, half], dim=-1))  # (B, T, Dh)
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
    drafter.register_load_state_dict_pre_hook(_rename_vocab_ids)


def _rename_vocab_ids(module, state_dict: dict, prefix: str, *_) -> None:
    old = prefix + "draft_ids"  # their name in v1.0, which saved the shipped drafters
    if old in state_dict:
        state_dict[prefix + "vocab_ids"] = state_dict.pop(old)


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
    check_states(target)
    most_frequent = token_counts.topk(len(drafter.vocab_ids)).indices
    # Sorted, so that a whole vocabulary keeps the order of the LM head's rows.
    drafter.vocab_ids.copy_(most_frequent.sort().values)
    for ours, theirs in pairs:
        _copy_weights(ours, theirs)
    final_norm = getattr(target.get_decoder(), "norm", None)
    if hasattr(drafter, "norm") and final_norm is not None:
        _copy_weights(drafter.norm, final_norm)


def _copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy weights of equal name and shape; the others stay as they are."""
    source = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        # LoRA has renamed the weights that it adapts, and those of a quantised or
        # offloaded layer cannot be copied. A drafter learns without such a start.
        other = source.get(name)
        if not is_plain_weight(other) or other.shape != weight.shape:
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
    check_states(target)
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise UserError(
            f"{path} holds weights that are not finite in {target.dtype}: train the "
            "drafter anew, or load the target in another dtype"
        )
    return drafter


def read_drafter(Drafter, path, **hub):
    """`load_drafter` without a target: on the CPU, and not checked against one."""
    folder = _drafter_folder(path, hub)
    method = Drafter.__module__.rpartition(".")[2]  # a copied file may be in a package
    damaged = f"{path} holds no {method} drafter, or a damaged one"
    try:
        shape = json.loads((folder / "config.json").read_bytes())["target"]
        sizes = shape.values()
        whole = bool(shape) and all(type(x) is int and x > 0 for x in sizes)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:  # said here, so that the method's own code may rely on it
        raise UserError(f"{damaged} (config.json has no target): take another folder")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the hub's loader prints
            return Drafter.from_pretrained(str(folder), strict=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = one_line(error)
        raise UserError(f"{damaged} ({reason}): take another folder") from error


def _drafter_folder(path, hub: dict) -> Path:
    """The folder that a drafter is in; that of an id is in the hub's cache."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    missing = f"no drafter in {path}"
    remedy = f"name another folder, or make one with train.py --out {path}"
    # An id is owner/name, where owner is not a local folder.
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not folder.parent.is_dir()
    if not is_id:
        raise UserError(f"{missing}; {remedy}")
    files = ["config.json", "model.safetensors"]
    try:
        folder = Path(snapshot_download(str(path), allow_patterns=files, **hub))
    except (OSError, ValueError) as error:  # of the hub, the network and the cache
        reason = one_line(error)
        raise UserError(f"{missing}, nor on the hub ({reason}); {remedy}") from error
    if not (folder / "config.json").is_file():
        raise UserError(f"{path} on the hub has no config.json: take another id")
    return folder


@dataclass
class Batch:
    """What `loss` takes: right-padded sequences and the target's states."""

    input_ids: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool, True for tokens to predict, not at t = 0
    hidden: Tensor  # (B, T, D) last hidden states, after the final norm
    kv: dict[int, tuple[Tensor, Tensor]]  # {layer: (keys, values)}, (B, Hkv, T, Dh)
    seed: Tensor  # (B,) new in each step; all random choices follow from it
    progress: float  # completed fraction of the training run, in [0, 1)
    teacher: "Teacher | None" = None  # p_target at all places, where it is kept

    @property
    def predicts(self) -> Tensor:
        """(B, T) bool, True for places whose next token is to be predicted."""
        return F.pad(self.loss_mask[:, 1:], (0, 1))


class Teacher(NamedTuple):
    """What losses need of p, which is p_target renormalised over a draft vocabulary.

    A drafter's logits are W h, where W (Vd, D) are rows of the target's LM head and h
    is the drafter's last hidden state. So its cross-entropy does not need all of p:

        -sum_x p(x) log q(x)  =  logsumexp(logits) - sum_x p(x) logit_x
                              =  logsumexp(logits) - h . (sum_x p(x) W_x)

    The vector in brackets is `mean`. It takes as much room as a hidden state, so it can
    be kept for each token of the training data, and p is computed once instead of once
    an epoch.
    """

    mean: Tensor  # (..., D) the mean row of W, weighted by p
    entropy: Tensor  # (...,) of p
    best: Tensor  # (...,) which column of W h is the likeliest token's

    def expected_logit(self, states: Tensor) -> Tensor:
        """sum_x p(x) logit_x (...,) of a drafter's hidden states (..., D)."""
        return (states.float() * self.mean).sum(-1)

    def at(self, places: Tensor) -> "Teacher":
        """The same at some of the places, which a mask selects."""
        return Teacher(*(each[places] for each in self))


def teacher(target, batch: Batch, vocab_ids: Tensor, places: Tensor) -> Teacher:
    """The Teacher at M places of a batch: the batch's own, or else a new one.

    vocab_ids: (Vd,), ascending. places: (B, T) bool.
    """
    if batch.teacher is not None:
        return batch.teacher.at(places)
    return teach(target, batch.hidden[places], vocab_ids)


@torch.no_grad()
def teach(target, hidden: Tensor, vocab_ids: Tensor) -> Teacher:
    """Compute a Teacher, in float32, from the target's last hidden states (M, D)."""
    head = draft_head(target, vocab_ids)
    if isinstance(head, nn.Linear):
        rows = head.weight.float()  # (Vd, D)
    else:  # one that can only be called: ask it for each dimension
        eye = torch.eye(hidden.shape[1], dtype=target.dtype, device=hidden.device)
        rows = (head(eye) - head(0 * eye)).float().T
    parts = []
    for part in hidden.split(256):  # saves memory
        logits = target_logits(target, part, vocab_ids)  # (m, Vd)
        p = logits.softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        with torch.autocast(p.device.type, enabled=False):  # in float32
            parts.append((p @ rows, entropy, logits.argmax(-1)))
    return Teacher(*(torch.cat(part) for part in zip(*parts)))


@contextlib.contextmanager
def only_at(places: Tensor, layer: nn.Module):
    """Within this context, a layer computes only what a loss reads, to save time.

    A loss reads the layer's output at some places of a batch. Keys and values are still
    made everywhere, because those places attend to all others. Queries, the attention's
    outputs and the feed-forward are computed at `places` alone. Elsewhere the layer's
    output is meaningless.

    These parts are found by the names of their modules in Llama: q_proj, o_proj and
    mlp. A part that has another name is computed everywhere, so a layer with none of
    these names costs what it costs without this context. The output at `places` is the
    same in any case, provided that a module of such a name maps each place by itself.

    places: (B, T) bool.
    layer: the top one, because attention reads lower ones at all places.
    """
    size = places.shape
    chosen = places.flatten().nonzero()[:, 0]  # (M,)

    def gather(module, given):
        # Some families pass a second tensor (BLOOM), or None.
        return tuple(
            x if x is None else x.flatten(0, 1).index_select(0, chosen)[None]
            for x in given
        )  # (1, M, D) each

    def scatter(module, given, output):
        if isinstance(output, tuple):  # gpt-oss: what the router scored comes second
            return scatter(module, given, output[0]), *output[1:]
        output = output.flatten(0, -2)  # (M, D)
        everywhere = output.new_zeros(size.numel(), output.shape[-1])
        return everywhere.index_copy(0, chosen, output).unflatten(0, size)

    hooks = []
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "o_proj", "mlp"):
            hooks.append(module.register_forward_pre_hook(gather))
            hooks.append(module.register_forward_hook(scatter))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def generator(seed: int, use: int = 0) -> torch.Generator:
    """Random numbers for one sequence of a batch, from its seed.

    use: 0 or 1, so that a method may have two independent streams for a sequence.
    """
    # Neither padding nor the other sequences of the batch change them, so a step gives
    # the same result however it is split.
    return torch.Generator().manual_seed(2 * seed + use)


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
    wrong = []
    for name, size in target_shape(target).items():
        if made_for.get(name) != size:
            wrong.append(f"{name} {made_for.get(name)} != {size}")
    if wrong:
        wrong = ", ".join(wrong)
        raise UserError(
            f"the drafter is for another target ({wrong}): train one with train.py"
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
    options = dataclasses.fields(config)
    return [option.name for option in options if option.metadata.get("decode")]


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


def check_states(target) -> None:
    """Raise a UserError unless `target_logits` gives the target's logits.

    Drafters need that; copies from the context do not. ELECTRA and OPT-350m have
    another layer between their last hidden states and the LM head.
    """
    check_target(target)
    if hasattr(target, "get_base_model"):  # PEFT's wrapper
        target = target.get_base_model()
    if not _TRIED[target].follows:
        raise UserError(
            "the target's logits do not follow from its last hidden states: take "
            "another target"
        )


def check_target(target) -> None:
    """Raise a UserError if token trees would change the target's output.

    This is found by trying a small tree: once, and again when the target has changed
    its attention kernel, dtype, device, mode, window or adapters.
    """
    adapters = getattr(target, "peft_config", {})
    if hasattr(target, "get_base_model"):  # PEFT's wrapper, which `build` may be given
        target = target.get_base_model()
    _check_parts(target, adapters)
    active = []  # adapters, of each layer
    for module in target.modules():
        names = getattr(module, "active_adapters", None)
        active += names if isinstance(names, list) else []
    kernel = str(target.config.get_text_config()._attn_implementation)
    window = getattr(decoder_config(target), "sliding_window", None)
    state = kernel, target.dtype, target.device, target.training, window, active
    if target not in _TRIED or _TRIED[target].state != state:
        _TRIED[target] = Tried(state, *_try_tree(target))


def _check_parts(target, adapters: dict) -> None:
    """Raise a UserError for what a trial does not show, or not in half precision.

    A trial is short and on one device. adapters: the configs of PEFT's, by name.
    """
    instead = "take another target, or decode without drafts"
    config = target.config.get_text_config()
    # These kernels do not add a mask to the scores.
    kernel = str(config._attn_implementation)
    if "flash" in kernel or "flex" in kernel:
        load = "load the target with attn_implementation='sdpa'"
        raise UserError(f"{kernel} takes no tree mask: {load}")
    # Prompts and drafters go to the device of the embedding.
    if target.device.type == "meta":
        raise UserError(
            "the target's embedding is offloaded: load it with a device_map that has "
            "the embedding on a device"
        )
    # A mask is made for one device. The weights that accelerate has offloaded are on
    # meta, but it computes with them where the others are.
    devices = {str(x.device) for x in target.parameters()} - {"meta"}
    if len(devices) > 1:
        spread = ", ".join(sorted(devices))
        raise UserError(f"the target is spread over {spread}: load it on one device")
    # PEFT puts learned tokens before the prompt in `prepare_inputs_for_generation`,
    # which is not called here; aLoRA finds its start from the prompt's end.
    prepares = getattr(target.prepare_inputs_for_generation, "__self__", None)
    kinds = ("is_prompt_learning", "alora_invocation_tokens")
    unusual = any(getattr(x, kind, None) for x in adapters.values() for kind in kinds)
    if prepares is not target or unusual:
        raise UserError(
            f"learned prompts and aLoRA (PEFT) are not supported: {instead}"
        )
    # In eval mode, transformers ignores gradient checkpointing.
    if target.training and target.is_activation_checkpointing:
        raise UserError("gradient checkpointing drops the cache: call target.eval()")
    # For ModernBERT, transformers returns the LM head.
    if not hasattr(target.get_decoder(), "config"):
        raise UserError(f"the target's decoder cannot be run alone: {instead}")
    # Convolutions and recurrences cannot undo a rejected token, and `attention_masks`
    # makes no masks for chunks (Llama 4) and indexers (DeepSeek-V3.2).
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"token trees do not work with {kind} layers: {instead}")
    # GPT-Neo's local attention and Doge's choice of keys count cache rows, of which a
    # tree has several at one position.
    for module in target.modules():
        local = getattr(module, "attention_type", None) == "local"
        if local or hasattr(module, "keep_window_size"):
            name = type(module).__name__
            raise UserError(f"{name} counts cache rows, not positions: {instead}")


class Tried(NamedTuple):
    """What was found by trying a target with a small tree."""

    state: tuple | None  # in which the target was tried
    kinds: list[str]  # of attention in its layers
    follows: bool  # whether `target_logits` gives its logits


_TRIED = weakref.WeakKeyDictionary()  # {target: Tried}


@torch.no_grad()
def _try_tree(target) -> tuple[list[str], bool]:
    """Decode a short text in two rounds, and compare that with a plain forward.

    Returns the last two parts of Tried. Raises UserError if the two differ by more than
    rounding, or if one of them fails.
    """
    config = decoder_config(target)
    # Not the first ids: what a model makes of special tokens may be far from ordinary.
    ids = config.vocab_size * torch.arange(1, 8, device=target.device)[None] // 8
    half = target.dtype in (torch.float16, torch.bfloat16)
    tolerance = 0.15 if half else 2e-3
    # A config may hold keys that its model does not read. So each meaning that they may
    # have is tried, with a window that is shorter than the text.
    window = getattr(config, "sliding_window", None)
    meanings = [["full_attention"]]
    if window:
        named = getattr(config, "layer_types", None) or ()
        meanings += [["sliding_attention"], sorted(set(named))]
        config.sliding_window = 3
    results = []
    try:
        for kinds in meanings:
            # `attention_masks` reads it.
            _TRIED[target] = Tried(None, kinds, follows=False)
            try:
                result = _compare(target, ids, tolerance)
            except Exception as error:  # models raise many kinds
                result = math.inf, f"{type(error).__name__}: {one_line(error)}", False
            results.append((*result, kinds))
    finally:
        del _TRIED[target]
        if window:
            config.sliding_window = window
    error, what, follows, kinds = min(results, key=lambda result: result[0])
    if error <= tolerance:
        return kinds, follows
    remedy = "take another target, or decode without drafts"
    if target.training:  # dropout makes two forwards differ
        remedy = "call target.eval()"
    elif error < math.inf:
        alone, together = _plain(target, ids[:, :3]), _plain(target, ids)
        if _errors(alone[0], together[0][:3]).max() > tolerance:
            warnings.warn(
                "the target's logits depend on the later tokens of a forward (as where "
                "activations are quantised), so an answer may differ from plain "
                "decoding"
            )
            return kinds, follows
    raise UserError(f"token trees do not fit this target ({what}): {remedy}")


def _compare(target, ids: Tensor, tolerance: float) -> tuple[float, str, bool]:
    """Compare two rounds of decoding with a plain forward over the same text.

    Returns the largest relative error of a row, in words where it is, and whether
    `target_logits` gives the target's logits.

    The seven ids are a text t_0, t_1, ... whose tokens come after wrong siblings. There
    are eight before t_3, so that even in half precision the error is large if a model
    takes a token's cache row for its position:

        t_2 -- 8 wrong ones         t_5 -- wrong
         `---- t_3 -- wrong          `---- t_6
                `---- t_4
    """
    cache = GrowingCache(target.config.get_text_config().num_hidden_layers)
    outputs = []
    decoder = target.get_decoder()
    with decoder.register_forward_hook(lambda *x: outputs.append(x[-1][0])):
        logits, hidden = _plain(target, ids, cache)
    assert hidden.shape[:-1] == (7,), "a token has more than one hidden state"

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
        _errors(torch.cat([one[kept], two[:3:2]]), right[2:])
        for one, two, right in zip(first, second, (logits, hidden))
    ]
    error, row = torch.maximum(*errors).nan_to_num(math.inf).cpu().max(0)
    where = ["the root", "a sibling", "a sibling of depth 2"][int(row) % 3]
    what = f"its logits or last hidden states for {where} are off by {error:.1%}"

    # Drafters read what the decoder returns, and compute logits from that.
    width = target_shape(target)["hidden_size"]
    weight = _head_weight(target)
    shapes = [x.shape for x in (hidden[None], *outputs)]
    if shapes != [(1, 7, width)] * 2 or not (
        weight is None or weight.shape[1] == width
    ):
        return float(error), what, False
    some = torch.arange(0, logits.shape[1], 1 + logits.shape[1] // 256).to(ids.device)
    own = target_logits(target, outputs[0], some)[0]
    same = _errors(own, logits[:, some]), _errors(outputs[0][0], hidden)
    return float(error), what, bool(torch.cat(same).max() <= min(tolerance, 0.02))


def _plain(target, ids: Tensor, cache=None) -> tuple[Tensor, Tensor]:
    """Logits (T, V) and last hidden states (T, D) of ids (1, T)."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    options = forward_options(target) | {"output_hidden_states": True, CACHE: cache}
    output = target(ids, position_ids=positions, **options)
    return output.logits[0], output.hidden_states[-1][0]


def _errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative errors (n,) of rows (n, ...)."""
    # Some models forbid tokens by logits of -inf.
    ours, theirs = (x.float().clamp(min=-1e6) for x in (ours, theirs))
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-9)


# Settings of `generate` that token trees do not follow, with their usual values.
OUTSIDE = {"guidance_scale": 1, "return_dict_in_generate": False}
OUTSIDE |= {"num_return_sequences": 1, "num_beams": 1}


def _check_request(target, input_ids: Tensor, generation_config, given: dict) -> None:
    """Raise a UserError if this request cannot be decoded by token trees.

    given: the other arguments that transformers hands on.
    """
    for name, usual in OUTSIDE.items():
        value = getattr(generation_config, name, None)
        if value in (None, usual):
            continue
        # Models often ship with settings that the caller does not know about.
        own = getattr(target.generation_config, name, None) == value
        origin = ", which comes with the target," if own else ""
        raise UserError(
            f"{name} {value}{origin} is not supported by token trees: set "
            f"{name}={usual} in the call"
        )
    # Such as contrastive search, DoLa, constraints, prompt lookup or early exit.
    mode = generation_config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise UserError(
            f"{mode} is not supported by token trees: set to None what asks for it, "
            "and decode greedily or sample"
        )
    _check_prompt(target, input_ids, given)
    _check_window(target, given.get(CACHE), generation_config.max_length)
    config = target.config.get_text_config()
    _check_length(config, input_ids.shape[1], generation_config.max_length)


def _check_prompt(target, input_ids: Tensor, given: dict) -> None:
    """Raise a UserError unless the prompt is one text, all of it in `input_ids`."""
    batch, length = input_ids.shape
    if input_ids.device != target.device:
        raise UserError(
            f"the prompt is on {input_ids.device}: move it with .to(target.device)"
        )
    if length == 0:
        raise UserError("no token ids: pass input_ids, not inputs_embeds")
    if batch != 1:
        raise UserError(f"{batch} rows of ids: pass one prompt at a time")
    # Every token of the prompt is read, at a position that is its index.
    mask = given.get("attention_mask")
    if mask is not None and not mask.all():
        raise UserError(
            "attention_mask has zeros (transformers makes such a mask where the prompt "
            "holds pad_token_id): pass no padding, and a mask of ones"
        )
    positions = given.pop("position_ids", None)
    if positions is not None:
        counted = torch.arange(length, device=positions.device)
        # Qwen-VL makes several rows of positions, (3, 1, T).
        if not all(row.equal(counted) for row in positions.flatten(0, -2)):
            raise UserError("position_ids are counted from 0 here: leave them out")
    # Decoding makes a cache of its own, from which rejected nodes can be dropped.
    past = given.get(CACHE)
    if past is not None and past.get_seq_length() > 0:
        raise UserError("past_key_values holds tokens: pass all tokens, and no cache")
    # Images and embeddings have a dimension more than ids and masks of text.
    if any(getattr(x, "ndim", 0) > 2 for x in given.values()):
        raise UserError("only text is decoded: pass token ids alone, and no images")
    check_ids(target, input_ids)


def _check_window(target, past, max_length: int) -> None:
    """Raise a UserError if plain decoding would drop rows that token trees keep.

    past: the cache that `generate` has made.
    """
    # By such keys the cache of `generate` drops rows, even if the model ignores them.
    config = decoder_config(target)
    window = getattr(config, "sliding_window", None)
    slides = window and any(getattr(past, "is_sliding", ()))
    unread = slides and "sliding_attention" not in layer_kinds(target)
    if unread and max_length > window:
        keys = [x for x in ("sliding_window", "layer_types") if hasattr(config, x)]
        raise UserError(
            f"the target attends to all tokens, but by its config the cache of "
            f"transformers drops all but {window}: delete {' and '.join(keys)} from "
            "target.config"
        )


def _check_processors(decoding) -> None:
    """Raise a UserError for a logits processor that answers by more than the ids."""
    for processor in decoding.logits_processor or ():
        reason = "gives other answers, or counts,"
        try:
            fits = _answers_by_ids(processor, decoding)
        except Exception as error:  # a processor may raise anything
            fits, reason = False, f"fails ({one_line(error)})"
        if not fits:
            raise UserError(
                f"{type(processor).__name__} {reason} when it is asked again about a "
                "text, but token trees need logits processors that depend on the ids "
                "alone (for grammars see support/grammars.py): take another, or decode "
                "without drafts"
            )


def _answers_by_ids(processor, decoding) -> bool:
    """Whether a logits processor answers alike when it is asked again about a text.

    A round asks about several texts, and about some of them more than once. So it is
    asked three times about the prompt, and about one token more.
    """
    vocab = decoding.target.config.get_text_config().vocab_size
    scores = torch.linspace(-1, 1, vocab, device=decoding.ids.device)[None]
    answers = []
    states = []  # what it keeps, such as a count of its calls

    def ask(text: Tensor) -> None:
        answers.append(processor(text, scores.clone()))
        states.append(repr(getattr(processor, "__dict__", None)))

    ask(decoding.ids)
    longer = torch.cat([decoding.ids, answers[0].argmax(-1)[None]], dim=1)
    for text in (longer, decoding.ids, decoding.ids, longer, longer):
        ask(text)
    pairs = ((0, 2), (2, 3), (1, 4), (4, 5))  # calls about the same text
    same = all(answers[i].equal(answers[j]) for i, j in pairs)
    # The first calls may prepare something, but a count goes on for ever.
    return same and states[2] == states[3] and states[4] == states[5]


def check_ids(target, ids: Tensor) -> None:
    """Raise a UserError for token ids that the target has no embedding for."""
    vocab = target.config.get_text_config().vocab_size
    wrong = [int(x) for x in (ids.min(), ids.max()) if not 0 <= x < vocab]
    if wrong:
        raise UserError(
            f"token id {wrong[0]}, but the target has {vocab} tokens: take its own "
            "tokenizer, or target.resize_token_embeddings(len(tokenizer))"
        )


def _check_length(config, prompt_length: int, max_length: int) -> None:
    """Raise a UserError beyond the length that the target was made for."""
    rope = getattr(config, "rope_parameters", None) or {}
    border = rope.get("original_max_position_embeddings")
    context = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "yarn" and border:  # it extends the original context
        context = max(context or 0, round(rope["factor"] * border))
    reaches = {"context": context}
    # Beyond a border, long RoPE rotates all keys by other factors, but the cached ones
    # have been rotated already. A prompt that is already longer uses the long factors
    # throughout.
    long = rope.get("rope_type") == "longrope"
    if long and border and prompt_length - 1 <= border:
        reaches["range of short RoPE factors"] = border + 1
    fits = "set a lower max_new_tokens"
    for name, reach in reaches.items():
        if reach and max_length > reach:
            remedy = fits if prompt_length < reach else "shorten the prompt"
            raise UserError(
                f"prompt + new tokens = {max_length}, more than the target's {name} of "
                f"{reach}: {remedy}"
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
        sys.stdout.reconfigure(errors="replace")  # a code page may lack letters
    try:
        _show_answer(Drafter, folder, drafts, prompt)
    except (UserError, OSError) as problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\n{parser.prog}: interrupted\n")


def _show_answer(Drafter, folder: str, drafts, prompt: str) -> None:
    """Print an answer while it is decoded, with accepted draft tokens in green."""
    target, tokenizer = load_target()
    checkpoint = Path(__file__).with_name("checkpoints") / folder
    drafter = load_drafter(Drafter, checkpoint, target)
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
        stats(decoding, draft, path)
        end = decoding.ids.shape[1]
        accepted_end = end - decoding.kept + len(path)
        for stop, colour in ((accepted_end, green), (end, reset)):
            ids = decoding.ids[0, length:stop]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            text = text.rstrip("\ufffd")  # a part of a character
            print(colour + text[len(printed) :] + reset, end="", flush=True)
            printed = text

    decode = speculate(drafts, drafter, each=show)
    target.generate(**inputs, custom_generate=decode, max_new_tokens=128)
    tau = stats.emitted / stats.target_forwards
    accepted = f"{green}{sum(stats.accepted)} accepted from the drafter{reset}"
    print(
        f"\n\n{stats.emitted} tokens, {accepted}; {tau:.2f} tokens per target forward"
    )
