"""Code that all methods share: load a target, verify a draft, decode.

A method proposes a `Draft`, a tree of candidate tokens. `verify` runs
the target once over the tree and accepts a path through it.
`Decoding` holds the state of one answer. Read these three first.
Below them are KV caches, what methods use of a target and of a
drafter, and checks.

Shapes: B batch, T sequence, P cached prefix, K draft depth, N nodes,
A accepted nodes, V vocabulary, Vd draft vocabulary, D hidden size,
H heads, Hkv key-value heads, Dh head size.
Distributions: `p_target`, `q_draft`.

Licence: Apache-2.0.
"""

import argparse
import contextlib
import inspect
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import rotate_half


class Mistake(ValueError):
    """A mistake of the user; the message names problem and remedy."""


# ------------------------------------------------------------------------------ drafts, verified


@dataclass
class Draft:
    """A tree of N candidate tokens below the newest committed token.

    That token is the root. The first M nodes were picked from `probs`:
    sampled, or its argmax in greedy decoding, where `verify` ignores
    `probs`. The other nodes were chosen deterministically.
    """

    tokens: Tensor  # (N,) ids
    parents: Tensor  # (N,) on the CPU, parents before children; -1 is the root
    probs: Tensor | None = None  # (M, V) processed q_draft of the first M
    q: Tensor | None = None  # (N,) for display, of a token (CTC-drafter: its path)
    copied: int = 0  # number of last nodes that are copies from the context
    notes: dict = field(default_factory=dict)  # on the round, for display

    def children(self) -> dict[tuple[int, int], int]:
        """{(parent, token): node}, with the first of equal siblings."""
        child = {}
        for node, place in enumerate(zip(self.parents.tolist(), self.tokens.tolist())):
            child.setdefault(place, node)
        return child

    def depths(self) -> list[int]:
        """The depth of the root, 0, and of each node."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent + 1] + 1)
        return depths


def chain(steps, input_ids: Tensor, **notes) -> Draft:
    """A chain of a proposer's steps: token (1,), q_draft (V,), hidden."""
    steps = list(steps)
    if not steps:
        empty = torch.zeros(0, dtype=torch.long)
        return Draft(input_ids.new_zeros(0), empty, notes=notes)
    tokens = torch.cat([token for token, _, _ in steps])  # (K,)
    probs = torch.stack([q_draft for _, q_draft, _ in steps])  # (K, V)
    parents = torch.arange(len(steps)) - 1
    q = probs.gather(1, tokens[:, None])[:, 0]  # (K,)
    return Draft(tokens, parents, probs, q, notes=notes)


def ancestor_mask(parents: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (1, 1, N + 1, P + N + 1) of root and nodes.

    A row attends to the prefix, the root, its ancestors and itself.
    For parents -1, 0, 0, 1 and P = 2:

                 prefix  root  n0 n1 n2 n3
           root   x  x    x    .  .  .  .
           n0     x  x    x    x  .  .  .
           n1     x  x    x    x  x  .  .
           n2     x  x    x    x  .  x  .
           n3     x  x    x    x  x  .  x

    x is 0 and . the dtype's lowest number. Eager attention would add a
    boolean mask to the scores.
    """
    may_attend = torch.eye(len(parents) + 1, dtype=torch.bool)  # (N + 1, N + 1)
    for node, parent in enumerate(parents.tolist()):
        may_attend[node + 1] |= may_attend[parent + 1]
    mask = torch.zeros_like(may_attend, dtype=dtype)
    mask.masked_fill_(~may_attend, torch.finfo(dtype).min)
    return F.pad(mask, (prefix, 0))[None, None]  # all attend to the prefix


def tree_inputs(input_ids: Tensor, draft: Draft, dtype) -> tuple:
    """What the target reads: ids, mask and positions of root and nodes."""
    in_order = draft.parents < torch.arange(len(draft.parents))
    assert in_order.all(), "a child before its parent would not see it"
    prefix = input_ids.shape[1] - 1  # P
    fed = torch.cat([input_ids[0, -1:], draft.tokens])[None]  # (1, N + 1)
    mask = ancestor_mask(draft.parents, prefix, dtype)  # (1, 1, N + 1, P + N + 1)
    depths = torch.tensor(draft.depths(), device=fed.device)
    positions = prefix + depths[None]  # (1, N + 1)
    return fed, mask.to(fed.device), positions


def forward(target, fed: Tensor, cache, mask=None, positions=None) -> tuple[Tensor, Tensor]:
    """Feed ids (1, n): logits (1, n, V), last hidden states (1, n, D)."""
    output = target(
        fed,
        past_key_values=cache,
        use_cache=True,
        attention_mask=mask if fed.shape[1] > 1 else None,  # one row: sees all
        position_ids=positions,
        output_hidden_states=True,
    )
    return output.logits, output.hidden_states[-1]


class Verified(NamedTuple):
    """Outcome of a round."""

    tokens: Tensor  # (1, A + 1) accepted tokens and the target's bonus token
    path: list[int]  # the A accepted nodes, from the root down
    hidden: Tensor  # (1, A + 1, D) last hidden states, root and accepted nodes
    logits: Tensor  # (1, N + 1, V) unprocessed, root and all nodes


@torch.no_grad()
def verify(
    target, input_ids, draft: Draft, cache, logits_processor=None, do_sample=False, scored=None
) -> Verified:
    """Verify a token tree with one target forward, without loss.

    At each node the target chooses a token: the argmax, or a draw by
    rejection sampling, see `_draw`. The walk descends while a child
    holds this token (Leviathan et al. 2023; trees: SpecInfer 2024).

    input_ids: (1, P + 1) committed tokens; the last one is the root.
    cache: the target's; P rows before, P + A + 1 after.
    logits_processor: receives each visited node's prefix and scores.
    scored: logits and hidden states of the tree, if already computed.
    """
    # 1. Run the target over the root and all nodes.
    prefix = input_ids.shape[1] - 1  # P
    if scored is None:
        assert cache.get_seq_length() == prefix, "all tokens but the newest must be cached"
        fed, mask, positions = tree_inputs(input_ids, draft, target.dtype)
        scored = forward(target, fed, cache, mask, positions)
    logits, hidden = scored  # (1, N + 1, V), (1, N + 1, D)

    # 2. Walk down from the root: choose a token, descend if a child holds it.
    child = draft.children()
    sampled = 0 if draft.probs is None else len(draft.probs)  # M
    path = []
    committed = []
    node = -1
    while node is not None:
        scores = logits[:, node + 1].to(copy=True, dtype=torch.float32)  # (1, V)
        if logits_processor:
            ids = torch.cat([input_ids, input_ids.new_tensor([committed])], dim=1)
            scores = logits_processor(ids, scores)
        if do_sample:
            siblings = [n for n in range(sampled) if draft.parents[n] == node]
            token = _draw(scores[0], siblings, draft)
        else:
            token = int(scores.argmax())
        committed.append(token)
        node = child.get((node, token))
        if node is not None:
            path.append(node)

    # 3. Keep the cache rows of the root (row 0) and of accepted nodes (n + 1).
    kept = torch.tensor([-1, *path], device=hidden.device) + 1  # (A + 1,)
    if path != list(range(len(path))):  # else they are in place
        for layer in cache.layers:
            layer.move(prefix + kept, prefix)
    cache.cut(prefix + len(kept))
    tokens = input_ids.new_tensor([committed])
    return Verified(tokens, path, hidden[:, kept], logits)


def _draw(scores: Tensor, siblings: list[int], draft: Draft) -> int:
    """A token distributed as softmax(scores (V,)), by rejection sampling.

    Each sibling in turn is accepted with probability
    min(1, p_target / q_draft). If it is rejected, the residual
    norm(max(p_target - q_draft, 0)) takes the place of p_target. If all
    are rejected, the token is drawn from the last residual. `verify`
    then accepts a deterministic child that holds it. This is exact:
    the draw ignores deterministic children.

    siblings: the sampled children of the current node, in the order of
        sampling. If rounding leaves a residual of zero, p_target stays.
    """
    p_target = scores.softmax(-1)  # (V,)
    assert not p_target.isnan().any(), "the logits processors forbid every token"
    for node in siblings:
        q_draft = draft.probs[node].to(p_target.dtype)  # (V,)
        token = int(draft.tokens[node])
        if torch.rand((), device=scores.device) * q_draft[token] < p_target[token]:
            return token
        residual = (p_target - q_draft).clamp(min=0)
        if residual.sum() > 0:  # zero by rounding only
            p_target = residual / residual.sum()
    return int(sample(p_target))


def sample(probs: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Draw ids (..., 1) from probs (..., V) with `uniform` in [0, 1)."""
    # torch.multinomial takes ten times as long on a CPU. MPS has no float64.
    exact = probs if probs.device.type == "mps" else probs.double()
    sums = exact.cumsum(-1)  # (..., V)
    if uniform is None:
        uniform = torch.rand_like(sums[..., :1])
    return torch.searchsorted(sums, uniform * sums[..., -1:], right=True)


# ------------------------------------------------------------------------------------- decoding


@dataclass
class Stats:
    """Counts and times of one decoding."""

    sync: bool = False  # wait for the GPU before the clock is read
    target_forwards: int = 0  # without the one over the prompt
    drafted: int = 0  # draft tokens submitted for verification
    emitted: int = 0  # tokens committed, bonus tokens included
    offered: list[int] = field(default_factory=list)  # draft depth per round
    accepted: list[int] = field(default_factory=list)  # draft tokens per round
    # Seconds of "prefill", which includes the first draft, "draft" and "verify".
    seconds: dict[str, float] = field(default_factory=dict)


class Decoding:
    """The state of one answer.

        ids     (1, P + 1)  committed tokens; the newest is not cached
        cache               the target's keys and values of the first P
        hidden  (1, n, D)   last hidden states of the n tokens that the
                            newest round (at first: the prefill) cached
        done                True after the last token
        do_sample, ends (end-of-sequence ids), stats

    After a round that accepted x_4 and added the bonus token x_5:

        ids     x_1  x_2  x_3  x_4  x_5
        hidden            h_3  h_4

    copies: most tokens to copy from the context per round.
    stats: a Stats that receives the counts and times.
    token_streamer: a streamer of transformers, which does not hand on
        its own argument `streamer`.
    given: what transformers passes to a `custom_generate` function.
        Stopping criteria receive the token ids, but no scores.
    """

    def __init__(
        self, target, input_ids: Tensor, copies=0, stats=None, token_streamer=None, **given
    ):
        if "stopping_criteria" not in given:
            raise Mistake("call target.generate(..., custom_generate=METHOD.generate) instead")
        # 1. Take what transformers passes. Refuse what trees cannot decode.
        self.logits_processor = given.pop("logits_processor", None)
        self.stopping_criteria = given.pop("stopping_criteria")
        self.generation_config = given.pop("generation_config")
        check_target(target)
        _check_request(target, input_ids, self.generation_config, given)
        # 2. Set up the state.
        self.target = target
        self.ids = input_ids
        self.do_sample = self.generation_config.do_sample
        self.done = False
        ends = self.generation_config.eos_token_id  # one id, several or None
        self.ends = {ends} if isinstance(ends, int) else set(ends or [])
        self.stats = stats or Stats()
        self.streamer = token_streamer
        self.lookup = None
        if copies:  # part of no method
            try:
                from support.rivals.lookup import Lookup
            except ImportError as error:
                raise Mistake("copies need support/rivals/lookup.py: copy it as well") from error
            self.lookup = Lookup(copies)
        self.clock_start = time.perf_counter()
        self.phase = "prefill"  # until the first draft is ready, then "draft"
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        # 3. Cache all prompt tokens but the last, the first draft's root.
        config = target.config.get_text_config()
        self.cache = GrowingCache(config.num_hidden_layers)
        if input_ids.shape[1] == 1:
            self.hidden = input_ids.new_empty((1, 0, config.hidden_size), dtype=target.dtype)
        else:
            decoder = target.get_decoder()  # no logits are needed here
            prompt = input_ids[:, :-1]
            self.hidden = decoder(prompt, past_key_values=self.cache, use_cache=True)[0]

    @property
    def room(self) -> int:
        """Levels that a draft may have: one place is the bonus token's."""
        return self.generation_config.max_length - self.ids.shape[1] - 1

    def pick(self, logits: Tensor, draft_ids: Tensor, ids: Tensor):
        """Choose a draft token (1,); also returns its q_draft (V,).

        Returns None if the logits processors allow no draft token.

        logits: (1, Vd) of `draft_ids` (Vd,).
        ids: (1, T) before the token, for the logits processors.
        """
        vocab = self.target.config.get_text_config().vocab_size
        scores = logits.new_full((1, vocab), float("-inf"), dtype=torch.float32)
        scores[:, draft_ids] = logits.float()
        if self.logits_processor:
            scores = self.logits_processor(ids, scores)
            if not scores.max() > float("-inf"):  # all -inf, or NaN
                return None
        q_draft = scores.softmax(-1)[0]  # (V,)
        token = sample(q_draft) if self.do_sample else q_draft.argmax(keepdim=True)
        return token, q_draft

    def with_copies(self, draft: Draft) -> Draft:
        """The draft, with copies from the context if `copies` is set."""
        if self.lookup is None:
            return draft
        return self.lookup.merge(draft, self.ids, self.room)

    def verify(self, draft: Draft, scored=None) -> Verified:
        """Verify a draft; commit accepted tokens and the bonus token."""
        # 1. Verify it. What passed since the last round was drafting.
        if scored is None:  # else the caller has added them
            draft = self.with_copies(draft)
        self._clock(self.phase)
        self.phase = "draft"
        verified = verify(
            self.target, self.ids, draft, self.cache, self.logits_processor, self.do_sample, scored
        )
        # 2. Commit tokens until the answer ends.
        before = self.ids.shape[1]
        for token in verified.tokens.split(1, dim=1):
            self.ids = torch.cat([self.ids, token], dim=1)
            self.done = bool(self.stopping_criteria(self.ids, None).all())
            if self.done:
                break
        new = self.ids[:, before:]
        count = new.shape[1]
        self.hidden = verified.hidden[:, :count]
        if self.streamer is not None:
            self.streamer.put(new.cpu())
            if self.done:
                self.streamer.end()
        # 3. Count the round.
        stats = self.stats
        stats.target_forwards += 1
        stats.drafted += len(draft.tokens)
        stats.emitted += count
        stats.offered.append(max(draft.depths()))
        stats.accepted.append(min(len(verified.path), count))
        self._clock("verify")
        return verified

    def _clock(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
        if self.stats.sync:
            torch.cuda.synchronize(self.target.device)
        now = time.perf_counter()
        seconds = self.stats.seconds
        seconds[phase] = seconds.get(phase, 0.0) + now - self.clock_start
        self.clock_start = now


def open_decoding(target, input_ids: Tensor, **options) -> Decoding:
    """The Decoding that `target.generate(input_ids, **options)` would use."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    return target.generate(input_ids, custom_generate=Decoding, **options)


# ------------------------------------------------------------------------------------ KV caches


class GrowingLayer(DynamicLayer):
    """A cache layer that copies old rows only to double its buffers."""

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append n rows; returns keys and values (B, Hkv, P + n, Dh)."""
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self.is_initialized:
            self.buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.is_initialized = True
        if end > self.buffers[0].shape[2]:
            spare = max(256, 2 * end) - start
            self.buffers = [F.pad(x[:, :, :start], (0, 0, 0, spare)) for x in self.buffers]
        self.buffers[0][:, :, start:end] = key_states
        self.buffers[1][:, :, start:end] = value_states
        self.cut(end)
        return self.keys, self.values

    def cut(self, length: int) -> None:
        """Keep the first `length` rows."""
        if self.is_initialized:
            self.keys, self.values = (x[:, :, :length] for x in self.buffers)

    def move(self, rows: Tensor, start: int) -> None:
        """Copy `rows` (n,) to start, start + 1, ..."""
        if self.is_initialized:
            for x in self.buffers:
                x[:, :, start : start + len(rows)] = x[:, :, rows.to(x.device)]


class GrowingCache(DynamicCache):
    """An empty cache of `num_layers` growing layers."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = [GrowingLayer() for _ in range(num_layers)]

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
        agreed = int(same.cumprod(0).sum())
        self.cut(agreed)
        self.fed = input_ids[:, :agreed]
        return input_ids[:, agreed:]

    def record(self, token_ids: Tensor) -> Tensor:
        """Note that `token_ids` (1, n) are fed; returns their positions."""
        start = self.fed.shape[1]
        self.fed = torch.cat([self.fed, token_ids], dim=1)
        return torch.arange(start, self.fed.shape[1], device=token_ids.device)[None]  # (1, n)


# ----------------------------------------------------------------------------------- the target


def load_target(name: str | None = None, *, dtype=torch.float32, device: str = "cpu"):
    """Load a target, frozen and in eval mode, and its tokenizer.

    name: Hugging Face id, folder or .gguf file; None: the default one.
    """
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Mistake(f"this torch has no device {device!r}: take another, such as cpu") from error
    if name is None:
        try:
            from support import default_target
        except ImportError as error:
            missing = "support/default_target.py, which fetches the default one, is not here"
            raise Mistake(f"no target named, and {missing}: name one, or copy it") from error
        name = default_target.folder()
    try:
        return _read_target(name, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the readers of transformers raise many kinds
        reason = str(error).strip().split("\n")[0]
        remedy = "give a Hugging Face id, a folder of tokenizer and *.safetensors, or a .gguf file"
        raise Mistake(f"cannot load model {str(name)!r} ({reason}); {remedy}") from error


def _read_target(name, dtype, device):
    path = Path(name)
    gguf = path.name if path.suffix == ".gguf" else None
    local = gguf or ("/" in str(name) and path.parent.is_dir())  # else ask the hub
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
    return target.to(device).eval().requires_grad_(False), tokenizer


def target_shape(target) -> dict:
    """The sizes that a drafter and its target must share."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _logit_scale(target) -> float:
    """The factor on a target's logits (Granite, Cohere), else 1."""
    config = target.config.get_text_config()
    if getattr(config, "logit_scale", None):
        return config.logit_scale
    return 1 / (getattr(config, "logits_scaling", None) or 1)


def target_logits(target, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Logits (..., V), or (..., Vd) of `token_ids`, of hidden (..., D)."""
    head = target.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if token_ids is not None and len(token_ids) < len(weight):
        weight = weight[token_ids]
        bias = None if bias is None else bias[token_ids]
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float()
    scale = _logit_scale(target)
    if scale != 1:  # saves a pass over all logits
        logits = logits * scale
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def draft_head(target, token_ids: Tensor) -> nn.Linear:
    """Rows `token_ids` (Vd,) of the LM head, frozen, for a drafter.

    No bias and no soft cap: a drafter learns without them.
    """
    head = target.get_output_embeddings()
    scale = _logit_scale(target)
    if hasattr(head, "select") and scale == 1:  # as in support/packed.py
        return head.select(token_ids)
    weight = head.weight
    if len(token_ids) < len(weight):
        weight = weight[token_ids]
    if scale != 1:
        weight = weight * scale
    rows = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    rows.weight = nn.Parameter(weight, requires_grad=False)
    return rows


def rotary(target, position_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's cos and sin (B, T, R), R <= Dh, at positions (B, T)."""
    like = torch.empty(0, dtype=target.dtype, device=position_ids.device)
    module = getattr(target.get_decoder(), "rotary_emb", None)
    if module is None:  # learned positions (GPT-2, OPT): rotate by zero
        one = torch.ones(*position_ids.shape, 2, dtype=like.dtype, device=like.device)
        return one, torch.zeros_like(one)
    if "layer_type" in inspect.signature(module.forward).parameters:  # Gemma-3
        kind = target.config.get_text_config().layer_types[layer]
        return module(like, position_ids, kind)
    return module(like, position_ids)


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
        half = F.pad(half, (0, head_dim // 2 - half.shape[-1]), value=fill)  # (B, T, Dh/2)
        widened.append(torch.cat([half, half], dim=-1))  # (B, T, Dh)
    return tuple(widened)


@torch.no_grad()
def target_features(target, input_ids: Tensor, layers=()) -> tuple[Tensor, dict]:
    """Last hidden states (B, T, D), {layer: (K, V)} of right-padded ids."""
    cache = DynamicCache()  # without a config: sliding layers keep all rows
    hidden = target.get_decoder()(input_ids, past_key_values=cache, use_cache=True)[0]
    if layers and max(layers) >= len(cache.layers):  # as Gemma-3n's top layers
        raise Mistake(f"target layer {max(layers)} caches no keys and values: name a lower one")
    return hidden, {n: (cache.layers[n].keys, cache.layers[n].values) for n in layers}


# ---------------------------------------------------------------------------------- the drafter


def option(default, help: str, decode: bool = False):
    """A Config field; with `decode` it may change after training."""
    metadata = {"help": help, "decode": decode}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(config, **bounds: float) -> None:
    """Raise a Mistake if a field is below its bound or of a wrong type."""
    for name, bound in bounds.items():
        value = getattr(config, name)
        kinds = (int, type(getattr(config.__class__, name)))  # of the default
        if not isinstance(value, kinds) or not value >= bound:  # nor nan
            kind = "a number" if float in kinds else "an int"
            raise Mistake(f"{name} {value!r}: take {kind} of at least {bound}")


def one_of(config, **choices) -> None:
    """Raise a Mistake if a field is not one of its choices."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise Mistake(f"{name} {getattr(config, name)!r}: take {' or '.join(allowed)}")


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


def placeholder_ids(shape: dict, size: int) -> Tensor:
    """Draft vocabulary (Vd,) before `start_from`; size 0: all tokens."""
    return torch.arange(min(size or shape["vocab_size"], shape["vocab_size"]))


def target_layers(target) -> list[nn.Module]:
    """The target's layers, bottom up; [] if it has no `layers`."""
    return list(getattr(target.get_decoder(), "layers", []))


@torch.no_grad()
def start_from(drafter, target, token_counts: Tensor, pairs=()) -> None:
    """Set `drafter.draft_ids` to the most frequent tokens; copy weights.

    token_counts: (V,) how often each token occurs in the responses.
    pairs: (drafter's module, target's module to copy from).
    """
    check_states(target)
    most_frequent = token_counts.topk(len(drafter.draft_ids)).indices
    drafter.draft_ids.copy_(most_frequent.sort().values)
    for ours, theirs in pairs:
        _copy_weights(ours, theirs)
    final_norm = getattr(target.get_decoder(), "norm", None)
    if hasattr(drafter, "norm") and final_norm is not None:
        _copy_weights(drafter.norm, final_norm)


def _copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy weights of equal name and shape."""
    source = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        other = source.get(name)
        if other is None or other.shape != weight.shape:
            continue
        parent = theirs.get_submodule(name.rpartition(".")[0])
        # Leave out norms that scale by 1 + w (Gemma): ours scale by w.
        if "Norm" in type(parent).__name__ and name.endswith("weight"):
            scale = parent(torch.ones_like(other))
            if not torch.allclose(scale, other, atol=1e-2, rtol=1e-2):
                continue
        weight.copy_(other)


def overlap(target, hidden: Tensor, q_draft: Tensor, draft_ids: Tensor) -> Tensor:
    """sum_x min(p_target, q_draft), summed over M rows.

    hidden: (M, D) of the target, for p_target. q_draft: (M, Vd).
    """
    total = torch.zeros((), device=q_draft.device)
    for part, q in zip(hidden.split(256), q_draft.split(256)):  # saves memory
        p_target = target_logits(target, part).softmax(-1)[:, draft_ids]  # (m, Vd)
        total += torch.minimum(p_target, q.float()).sum()
    return total


def load_drafter(Drafter, path, target):
    """Load a drafter to the target's device and dtype.

    Raises:
        Mistake: there is none in the folder `path`, it is damaged, it does not fit the
            target, or its weights are not finite.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise Mistake(f"no drafter in {path}; make one with train.py --out {path}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the hub's loader prints
            drafter = Drafter.from_pretrained(str(path), strict=True)
    except Exception as error:  # of any kind, because config.json may hold anything
        kind = Drafter.__module__
        reason = " ".join(str(error).split())[:200]
        raise Mistake(
            f"{path} holds no {kind} drafter, or a damaged one ({reason}): take another folder"
        ) from error
    drafter = drafter.to(target.device, target.dtype).eval()
    check_drafter(drafter, Drafter, target)
    check_states(target)
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise Mistake(
            f"{path} holds weights that are not finite in {target.dtype}: train the drafter anew, "
            "or load the target in another dtype"
        )
    return drafter


@dataclass
class Batch:
    """What `loss` takes: right-padded sequences and the target's states."""

    input_ids: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool, True for tokens to predict, not at t = 0
    hidden: Tensor  # (B, T, D) last hidden states, after the final norm
    kv: dict[int, tuple[Tensor, Tensor]]  # {layer: (K, V)}, (B, Hkv, T, Dh)
    seed: Tensor  # (B,) new in each step; all random choices follow from it
    progress: float  # completed fraction of the training run, in [0, 1)


# ------------------------------------------------------------------------------ what is refused


def refuse(*checks: tuple[object, str]) -> None:
    """Raise a Mistake for the first condition that holds."""
    for condition, message in checks:
        if condition:
            raise Mistake(message)


def check_drafter(drafter, Drafter, target, config=None) -> None:
    """Raise a Mistake if the drafter or its Config does not fit."""
    if not isinstance(drafter, Drafter):
        raise Mistake(f"the drafter is a {type(drafter)}: load a {Drafter}")
    made_for = drafter.config.target
    shape = target_shape(target)
    wrong = [f"{k} {made_for.get(k)} != {v}" for k, v in shape.items() if made_for.get(k) != v]
    weight = next(drafter.parameters())
    own = f"{weight.dtype} on {weight.device.type}"
    theirs = f"{target.dtype} on {target.device.type}"
    refuse(
        (wrong, f"the drafter is for another target ({', '.join(wrong)}): train one with train.py"),
        (own != theirs, f"the drafter is {own}: move it with .to(target.device, target.dtype)"),
    )
    check_config(config, type(drafter.config))


def check_config(config, Config) -> None:
    """Raise a Mistake if `config`, where given, is not a Config."""
    if config is not None and not isinstance(config, Config):
        raise Mistake(f"config is a {type(config)}: pass a {Config}")


@torch.no_grad()
def check_states(target) -> None:
    """Raise a Mistake unless `target_logits` gives the target's logits."""
    ids = torch.arange(1, 3, device=target.device)[None]
    output = target(ids, output_hidden_states=True)
    hidden = target.get_decoder()(ids)[0]
    logits = target_logits(target, hidden)
    close = {"atol": 0.05, "rtol": 0.05}  # bfloat16 rounds
    # OPT-350m projects its last hidden states to another width.
    same = hidden.shape[-1] == target_shape(target)["hidden_size"]
    same = same and torch.allclose(output.hidden_states[-1], hidden, **close)
    if not same or not torch.allclose(output.logits.float(), logits, **close):
        raise Mistake("the target's logits do not follow from its last hidden states: take another")


def check_target(target) -> None:
    """Raise a Mistake if token trees would change the target's output."""
    config = target.config.get_text_config()
    parameters = inspect.signature(target.forward).parameters
    missing = {"position_ids", "past_key_values"} - parameters.keys()
    # ALiBi, GPT-Neo and Doge count cache rows; trees count levels.
    row_counters = ("alibi", "attention_layers", "keep_window_size")
    counting = [name for name in row_counters if getattr(config, name, None)]
    kinds = set(getattr(config, "layer_types", None) or [])
    others = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    kernel = str(config._attn_implementation)
    no_mask = "flash" in kernel or "flex" in kernel
    plain = "leave custom_generate out, or take another target"
    refuse(
        (missing, f"the target takes no {', '.join(missing)}, which token trees need: {plain}"),
        (counting, f"{', '.join(counting)} counts cache rows, not positions: {plain}"),
        (others, f"{others} layers cannot undo a rejected token: {plain}"),
        (no_mask, f"{kernel} takes no tree mask: load the target with attn_implementation='sdpa'"),
    )


def _check_request(target, input_ids: Tensor, generation_config, model_kwargs: dict) -> None:
    """Raise a Mistake if this request cannot be decoded by token trees."""
    rows, length = input_ids.shape
    elsewhere = input_ids.device.type != target.device.type
    mask = model_kwargs.get("attention_mask")
    past = model_kwargs.get("past_key_values")
    positions = model_kwargs.get("position_ids")
    padded = mask is not None and not mask.all()
    cached = past is not None and past.get_seq_length() > 0
    shifted = positions is not None and positions.tolist() != [list(range(length))]
    more = any(getattr(x, "ndim", 0) > 2 for x in model_kwargs.values())
    mode = generation_config.get_generation_mode().value
    other_mode = mode not in ("greedy_search", "sample")
    guided = generation_config.guidance_scale not in (None, 1)
    as_dict = generation_config.return_dict_in_generate
    marked = "SynthID" in type(generation_config.watermarking_config).__name__
    refuse(
        (elsewhere, f"the prompt is on {input_ids.device}: move it with .to(target.device)"),
        (length == 0, "no token ids: pass input_ids, not inputs_embeds"),
        (rows != 1, f"{rows} rows of ids: pass one prompt, without beams or several answers"),
        (padded, "attention_mask has zeros: pass no padding, and a mask of ones"),
        (shifted, "position_ids are counted from 0 here: leave them out"),
        (cached, "past_key_values already holds tokens: pass all tokens, and no cache"),
        (more, "only text is decoded here: pass no images, and nothing beside token ids"),
        (other_mode, f"{mode} is not supported by token trees: decode greedily, or sample"),
        (guided, "guidance_scale is not supported by token trees: leave it out"),
        (as_dict, "return_dict_in_generate is not supported: leave it out, and pass stats="),
        (marked, "SynthID is not supported by token trees: leave it out"),
    )
    config = target.config.get_text_config()
    _check_length(config, length - 1, generation_config.max_length)


def _check_length(config, prefix: int, length: int) -> None:
    """Raise a Mistake beyond the length where token trees are exact."""
    # Mistral names no kinds; its layers slide if it has a window.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    reaches = {"context": getattr(config, "max_position_embeddings", None)}
    if "sliding_attention" in kinds:
        reaches["sliding window"] = getattr(config, "sliding_window", None)
    if "chunked_attention" in kinds:
        reaches["attention chunk"] = getattr(config, "attention_chunk_size", None)
    # Long RoPE changes its factors at a border. A prompt beyond it stays there.
    rope = getattr(config, "rope_parameters", None) or {}
    border = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and border and prefix <= border:
        reaches["range of short RoPE factors"] = border + 1
    for name, reach in reaches.items():
        if reach and length > reach:
            text = f"prompt + new tokens = {length} exceed the target's {name} of {reach}"
            remedy = "lower max_new_tokens" if prefix + 1 < reach else "shorten the prompt"
            raise Mistake(f"{text}: {remedy}")


# ---------------------------------------------------------------------------------- a first try


def demo(generate, Drafter, folder: str, argument: str = "drafter", **options) -> None:
    """Answer a prompt with a shipped drafter, for `python METHOD.py`."""
    parser = argparse.ArgumentParser(description="Answer a prompt with the shipped drafter.")
    prompt = "Explain photosynthesis to a child in five sentences."
    parser.add_argument("prompt", nargs="?", default=prompt)
    message = {"role": "user", "content": parser.parse_args().prompt}
    stats = Stats()
    try:
        target, tokenizer = load_target()
        checkpoint = Path(__file__).with_name("checkpoints") / folder
        options[argument] = load_drafter(Drafter, checkpoint, target)
        inputs = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(
            **inputs, **options, custom_generate=generate, max_new_tokens=128, stats=stats
        )
    except (Mistake, OSError) as problem:
        parser.exit(2, f"{parser.prog}: {problem}\n")
    answer = output[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True))
    tau = stats.emitted / stats.target_forwards
    print(f"\n{stats.emitted} tokens, {tau:.2f} per target forward")
