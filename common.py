"""What the method files share: load a target, verify a token tree without loss, count.

Shapes: B batch, T sequence, P cached prefix, N tree nodes, A accepted, V vocabulary, Vd of drafts,
D hidden, H heads, Hkv key/value heads, Dh head size. p_target, q_draft: a model's distribution.
"""

import contextlib
import contextvars
import inspect
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer


def load_target(name: str | None = None, *, dtype=torch.float32, device: str = "cpu"):
    """Load a target model, frozen and in eval mode, and its tokenizer.

    Args: name: Hugging Face id, folder of safetensors, or .gguf file; None: the default target.
    Raises: ValueError: the target cannot be read; the message names it and the remedy.
    """
    if name is None:
        try:  # only here: a project with a target of its own need not copy that file
            from support import default_target
        except ImportError as error:
            missing = "no target named, and support/default_target.py, which has one, is not here"
            raise ValueError(f"{missing}; copy it, or name a Hugging Face id or folder") from error
        return default_target.load(lambda folder: _read_target(folder, dtype, device))
    try:
        return _read_target(name, dtype, device)
    except Exception as error:  # whatever the readers raise becomes one clear line
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot load target {name!r} ({reason}); give a Hugging Face id, a folder with "
            "config.json, tokenizer files and *.safetensors, or a .gguf file"
        ) from error


def _read_target(path, dtype, device):
    path = Path(path)
    gguf = path.suffix == ".gguf"
    if gguf and not path.is_file():
        raise FileNotFoundError("no such file")
    folder = (path.parent if gguf else path).as_posix()
    options = {"trust_remote_code": False, "gguf_file": path.name if gguf else None}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    options |= {"dtype": dtype, "use_safetensors": None if gguf else True}
    target = AutoModelForCausalLM.from_pretrained(folder, **options)
    return target.to(device).eval().requires_grad_(False), tokenizer


def option(default, help: str, decode: bool = False):
    """A field of Config. A callable makes its default; `decode`: bench.py can change it, too."""
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"help": help, "decode": decode})


# ------------------------------------------------------------- what a drafter may see of the target


def target_shape(target) -> dict:
    """The numbers a drafter depends on; stored in its config and compared when it is loaded."""
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


def load_drafter(Drafter, path, target):
    """Read a drafter's config.json + model.safetensors; it takes the target's device and dtype.

    Raises: ValueError: nothing there, damaged, of another method, or made for another target.
    """
    path = Path(path)
    shape = target_shape(target)
    if not all((path / name).is_file() for name in ("config.json", "model.safetensors")):
        files = "config.json + model.safetensors"
        raise ValueError(f"no drafter in {path} ({files}); make one with train.py --out {path}")
    try:
        drafter = Drafter.from_pretrained(str(path), strict=True)
        made_for = drafter.config.target
        for x in drafter.state_dict().values():  # a flipped bit may show
            are_ids = not x.is_floating_point()
            if not ((0 <= x) & (x < made_for["vocab_size"]) if are_ids else x.isfinite()).all():
                raise ValueError("weights out of range")
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        kind = f"{Drafter.__module__} drafter ({reason})"
        raise ValueError(f"cannot read {path} as a {kind}; name one, or train it again") from error
    wrong = [f"{k} {made_for.get(k)} != {v}" for k, v in shape.items() if made_for.get(k) != v]
    if wrong:
        raise ValueError(f"{path} is for another target ({', '.join(wrong)}); train with train.py")
    return drafter.to(target.device, target.dtype).eval()


def _head_weight(target, token_ids: Tensor | None = None) -> Tensor:
    """The target's LM head (V, D), or the rows (Vd, D) of a reduced draft vocabulary (Vd,)."""
    weight = target.get_output_embeddings().weight
    if hasattr(weight, "full_tensor"):  # of a tensor-parallel target
        weight = weight.full_tensor()
    return weight if token_ids is None or len(token_ids) == len(weight) else weight[token_ids]


def draft_head(target, token_ids: Tensor) -> nn.Linear:
    """The LM head's rows `token_ids`, frozen, D -> Vd; proposals can do without bias and cap."""
    whole = target.get_output_embeddings()
    if hasattr(whole, "select"):  # support/packed.py: picked and packed once for each drafter
        return whole.select(token_ids)
    weight = _head_weight(target, token_ids)  # (Vd, D)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def rotary(target, position_ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Rotary cos and sin of a target's layer, each (B, T, R <= Dh), at `position_ids` (B, T)."""
    like = torch.empty(0, dtype=target.dtype, device=position_ids.device)  # for dtype and device
    module = getattr(target.get_decoder(), "rotary_emb", None)
    if module is None:  # no rotary embeddings: the tables of no rotation
        one = torch.ones(*position_ids.shape, 2, device=like.device, dtype=like.dtype)
        return one, torch.zeros_like(one)
    if "layer_type" not in inspect.signature(module.forward).parameters:
        return module(like, position_ids)
    kind = target.config.get_text_config().layer_types[layer]  # Gemma-3 has a table for each kind
    return module(like, position_ids, kind)


@torch.no_grad()
def target_features(target, input_ids: Tensor, layers=()) -> tuple[Tensor, dict]:
    """Last hidden states (B, T, D), {layer: (K, V)} of right-padded `input_ids` (B, T)."""
    cache = DynamicCache()  # without a config every layer keeps all its rows, sliding ones too
    hidden = target.get_decoder()(input_ids, past_key_values=cache, use_cache=True)[0]
    return hidden, {n: (cache.layers[n].keys, cache.layers[n].values) for n in layers}


def target_logits(target, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The target's logits (..., V) or (..., Vd), soft-capped as there, from its hidden states.

    In bfloat16 (the weights, or autocast: train.py --bf16) logits tie; argmax takes the lowest id.
    """
    weight = _head_weight(target, token_ids)
    bias = getattr(target.get_output_embeddings(), "bias", None)
    if bias is not None and token_ids is not None:
        bias = bias[token_ids]
    logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass
class Batch:
    """What `loss` and `alpha` take: right-padded sequences, and what the target made of them."""

    input_ids: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) bool, True where the token is to be predicted (never at t = 0)
    hidden: Tensor  # (B, T, D) last hidden states after the final norm
    kv: dict[int, tuple[Tensor, Tensor]]  # {layer: (K, V)}, each (B, Hkv, T, Dh) as cached
    seed: Tensor  # (B,) a fresh number per sequence and step, the only source of randomness
    progress: float  # share of the training run that is over, in [0, 1)


# ---------------------------------------------------------------------------------------- KV caches


class GrowingLayer(DynamicLayer):
    """A cache layer in a buffer that doubles when full: a step copies no rows but its own."""

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append rows (B, Hkv, n, Dh); returns all keys and values."""
        new = (key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.is_initialized or end > self.buffer[0].shape[-2]:
            buffer = [x.new_empty(*x.shape[:2], max(256, 2 * end), x.shape[3]) for x in new]
            for larger, old in zip(buffer, (self.keys, self.values) if start else ()):
                larger[:, :, :start] = old
            self.buffer = buffer
        for buffer, rows in zip(self.buffer, new):
            buffer[:, :, start:end] = rows
        self.adopt(self.buffer, end)
        return self.keys, self.values

    def adopt(self, buffer, rows: int) -> None:
        """Keep rows in `buffer`, K and V, each (B, Hkv, any, Dh), whose first `rows` are filled."""
        self.buffer = buffer
        self.is_initialized = True
        self.keys, self.values = (x[:, :, :rows] for x in buffer)  # views, (B, Hkv, P, Dh)

    def keep(self, start: int, rows: Tensor) -> None:
        """Move `rows` (n,), absolute and ascending, to start, start + 1, ...; cut off the rest."""
        for buffer in self.buffer:
            buffer[:, :, start : start + len(rows)] = buffer[:, :, rows.to(buffer.device)]
        self.adopt(self.buffer, start + len(rows))


class GrowingCache(DynamicCache):
    """An empty cache of `num_layers` growing layers."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.layers = [GrowingLayer() for _ in range(num_layers)]


class DraftCache(GrowingCache):
    """A drafter's own KV cache; knows whose rows it holds, and so which ones a refusal undoes."""

    fed: Tensor | None = None  # (1, P) tokens whose rows are in the cache

    def feed(self, token_ids: Tensor) -> Tensor:
        """Note that `token_ids` (1, n) are about to be consumed; returns their positions (1, n)."""
        self.fed = token_ids if self.fed is None else torch.cat([self.fed, token_ids], dim=1)
        return torch.arange(self.fed.shape[1], device=token_ids.device)[None, -token_ids.shape[1] :]

    def rewind(self, input_ids: Tensor) -> Tensor:
        """Keep the rows that agree with the committed `input_ids` (1, T); returns what to feed."""
        if self.fed is None:
            return input_ids
        end = min(self.fed.shape[1], input_ids.shape[1] - 1)
        agreed = int((self.fed[0, :end] == input_ids[0, :end]).cumprod(0).sum())
        self.crop(agreed - self.fed.shape[1])
        self.fed = self.fed[:, :agreed]
        return input_ids[:, agreed:]


# ---------------------------------------------------------------------------- one round of decoding


@dataclass
class Draft:
    """A token tree: M nodes of a known distribution, then others, copies from the context last."""

    tokens: Tensor  # (N,) ids
    parents: Tensor  # (N,) on the CPU, parents first; -1 is the newest committed token
    probs: Tensor | None = None  # (M, V) what the first M were drawn from, given earlier siblings
    copied: int = 0  # how many nodes, the last ones, are copies from the context

    def children(self) -> dict[tuple[int, int], int]:
        """{(parent, token): node}; of equal siblings the first."""
        places = zip(self.parents.tolist(), self.tokens.tolist())
        return {place: n for n, place in reversed(list(enumerate(places)))}


def chain(steps, input_ids: Tensor) -> Draft:
    """A draft without branches, of the (token (1,), q_draft (V,), hidden) of a proposer."""
    if not (steps := list(steps)):
        return Draft(input_ids.new_zeros(0), torch.zeros(0, dtype=torch.long))
    tokens, probs, _ = zip(*steps)
    return Draft(torch.cat(tokens), torch.arange(len(steps)) - 1, torch.stack(probs))


class Lookup:
    """Free drafts: what followed the last four tokens where they stood before (Saxena 2023).

    Args: most: tokens copied a round; fewer where only three or two stood before; 0: nothing.
    """

    def __init__(self, most: int):
        self.lengths = {4: most, 3: most // 2, 2: most // 3}  # {n: tokens copied}
        self.text: list[int] = []
        self.follows: dict[tuple, int] = {}  # n-gram: where in the text its last occurrence ended

    def find(self, input_ids: Tensor) -> list[int]:
        """Tokens to copy after the committed `input_ids` (1, T), which hold the last call's."""
        for token in input_ids[0, len(self.text) :].tolist():
            for n in self.lengths:
                self.follows[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)
        for n, length in self.lengths.items():
            start = self.follows.get(tuple(self.text[-n:]))
            if start is not None:
                period = self.text[start : start + length]  # repeated at its end
                return [period[i % len(period)] for i in range(length)]
        return []

    def merge(self, draft: Draft, input_ids: Tensor, room: int) -> Draft:
        """The draft with a branch of at most `room` copied tokens, not sampled; it shares nodes."""
        copy = self.find(input_ids)[:room] if self.lengths[4] else []
        child = draft.children() if copy else {}
        count = len(draft.tokens)
        node = -1
        while copy and (node, copy[0]) in child:
            node = child[node, copy.pop(0)]
        if not copy:
            return draft
        tokens = torch.cat([draft.tokens, input_ids.new_tensor(copy)])
        parents = torch.cat([draft.parents, torch.arange(count - 1, count - 1 + len(copy))])
        parents[count] = node  # the others hang on the one before
        return Draft(tokens, parents, draft.probs, len(copy))


@dataclass
class Stats:
    """What happened while decoding; the prompt's own forward counts as `prefill` only."""

    sync: bool = False  # wait for the GPU at each reading of the clock
    target_forwards: int = 0
    drafted: int = 0  # draft tokens submitted for verification
    emitted: int = 0  # tokens committed, bonus tokens included
    offered: list[int] = field(default_factory=list)  # depth of the draft, a number a round
    accepted: list[int] = field(default_factory=list)  # draft tokens accepted, a number a round
    copies: list[tuple[int, int]] = field(default_factory=list)  # (offered, accepted) a round
    seconds: dict[str, float] = field(default_factory=dict)  # by name of the timer
    trace: list[dict] | None = None  # a list here is filled with a record of each round
    noted: dict = field(default_factory=dict)

    @contextlib.contextmanager
    def timer(self, name: str):
        """Add the time of the block to `seconds[name]`."""
        if self.sync:
            torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        if self.sync:
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def note(self, **facts) -> None:
        """What a round's record should say of how it was drafted; free when nothing is recorded."""
        if self.trace is not None:
            self.noted |= facts


def ancestor_mask(parents: Tensor, prefix: int, dtype: torch.dtype) -> Tensor:
    """Additive attention mask (1, 1, N + 1, P + N + 1) of root + N nodes over P cached rows.

    Rows see the prefix, the root, their ancestors and themselves. Parents -1, 0, 0, 1 and P = 2:

                 prefix  root  n0 n1 n2 n3
           root   x  x    x    .  .  .  .
           n0     x  x    x    x  .  .  .
           n1     x  x    x    x  x  .  .
           n2     x  x    x    x  .  x  .
           n3     x  x    x    x  x  .  x
    """
    see = torch.eye(len(parents) + 1, dtype=torch.bool)  # (N + 1, N + 1)
    for node, parent in enumerate(parents.tolist()):
        see[node + 1] |= see[parent + 1]
    mask = torch.zeros(1, 1, len(see), prefix + len(see), dtype=dtype)  # eager attention adds it
    mask[0, 0, :, prefix:].masked_fill_(~see, torch.finfo(dtype).min)
    return mask


_instead = contextvars.ContextVar("(target, run) of forward_by", default=(None, None))


@contextlib.contextmanager
def forward_by(target, run):
    """In the block and this thread, forward(target, ids, cache, ...) is run(ids, cache, options).

    For support/batching.py and support/graphs.py; a `run` of None is the plain forward again.
    """
    token = _instead.set((target, run))
    try:
        yield
    finally:
        _instead.reset(token)


def forward(target, input_ids: Tensor, cache, **options) -> tuple[Tensor, Tensor]:
    """Logits (1, n, V), last hidden (1, n, D) of any forward while decoding; see `forward_by`."""
    whose, run = _instead.get()
    if run is not None and whose is target:
        return run(input_ids, cache, options)
    seen = []
    hook = target.get_decoder().register_forward_hook(lambda *given: seen.append(given[-1][0]))
    try:
        logits = target(input_ids, past_key_values=cache, use_cache=True, **options).logits
    finally:
        hook.remove()
    return logits, seen[0]


def prefill(target, input_ids: Tensor, generation_config, model_kwargs, stats=None, streamer=None):
    """Run the target over the prompt but its last token, which is the root of the first draft.

    Args: input_ids: (1, T) the prompt (streamed first). model_kwargs: of `generate`, only checked.
    Returns: (cache of T - 1 rows, hidden (1, T - 1, D)).
    Raises: ValueError: what `_check` refuses.
    """
    _check(target, input_ids, generation_config, model_kwargs)
    config = target.config.get_text_config()
    if streamer is not None:
        streamer.put(input_ids.cpu())
    cache = GrowingCache(config.num_hidden_layers)
    if input_ids.shape[1] == 1:
        return cache, input_ids.new_empty((1, 0, config.hidden_size), dtype=target.dtype)
    with (stats or Stats()).timer("prefill"):
        return cache, forward(target, input_ids[:, :-1], cache, logits_to_keep=1)[1]


def _check(target, input_ids: Tensor, generation_config, model_kwargs: dict) -> None:
    """Refuse what decoding by token trees would answer otherwise than the target, or not at all."""
    config = target.config.get_text_config()
    limit = generation_config.max_length
    mask = model_kwargs.get("attention_mask")
    if input_ids.shape[0] != 1 or input_ids.shape[1] == 0 or (mask is not None and not mask.all()):
        raise ValueError(f"ids of shape {tuple(input_ids.shape)}: one sequence, no padding or beam")
    if (past := model_kwargs.get("past_key_values")) is not None and past.get_seq_length():
        raise ValueError("past_key_values already holds tokens; pass all tokens without a cache")
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])  # Mistral lists none
    reaches = {"context": getattr(config, "max_position_embeddings", None)}
    if "sliding_attention" in kinds:
        reaches["sliding window"] = getattr(config, "sliding_window", None)
    if "chunked_attention" in kinds:
        reaches["attention chunk"] = getattr(config, "attention_chunk_size", None)
    for name, reach in reaches.items():
        if reach and limit > reach:
            raise ValueError(f"prompt + new tokens = {limit} exceed the target's {name} of {reach}")
    rope = getattr(config, "rope_parameters", None) or {}
    border = rope.get("original_max_position_embeddings", limit)  # other factors beyond it
    crossed = input_ids.shape[1] - 1 <= border < limit - 1
    attention = ("full_attention", "sliding_attention", "chunked_attention")
    refused = {
        f"a prompt on the {input_ids.device}": input_ids.device.type != target.device.type,
        "inputs of 3 axes or more": any(getattr(x, "ndim", 0) > 2 for x in model_kwargs.values()),
        "no position_ids": "position_ids" not in inspect.signature(target.forward).parameters,
        "ALiBi": getattr(config, "alibi", False),  # counts rows where a tree counts levels
        "layers of another kind": kinds.difference(attention),
        "flash attention": "flash" in str(config._attn_implementation),  # takes no tree's mask
        f"longrope across {border} tokens": crossed and rope.get("rope_type") == "longrope",
        "guidance_scale": generation_config.guidance_scale not in (None, 1),  # keeps a cache
        "SynthID": "SynthID" in type(generation_config.watermarking_config).__name__,  # a history
        "return_dict_in_generate": generation_config.return_dict_in_generate,
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"{what}: speculative decoding here cannot; leave custom_generate out")


class Verified(NamedTuple):
    """Outcome of a round."""

    tokens: Tensor  # (1, A + 1) to commit, the last one the target's own (bonus)
    path: list[int]  # the A accepted nodes
    hidden: Tensor  # (1, A + 1, D) the target's last ones, of the root and the accepted nodes


@torch.no_grad()
def verify(
    target, input_ids, draft: Draft, cache, logits_processor=None, do_sample=False, stats=None
) -> Verified:
    """Check a token tree with one target forward; the result is distributed as plain decoding is.

    Greedy: descend while a child holds the argmax. Sampling: try the sampled children in turn, each
    accepted with min(1, p_target / q_draft), a refusal leaving norm(max(p_target - q_draft, 0))
    (Leviathan et al. 2023, over siblings SpecInfer 2024); then draw from what is left, and descend
    if a deterministic child holds the draw, which does not depend on what those children are.

    Args: input_ids: (1, P + 1) committed tokens, the last one the root. cache: the target's, of P
        rows before and P + 1 + A after. logits_processor: a function of ids and scores alone; it
        sees each visited node's own prefix.
    """
    stats = stats or Stats()
    prefix = cache.get_seq_length()  # P
    count = len(draft.tokens)  # N
    assert prefix == input_ids.shape[1] - 1, "all committed tokens but the newest must be cached"
    with stats.timer("verify"):
        fed = torch.cat([input_ids[0, -1:], draft.tokens])[None]  # (1, N + 1), logits (1, N + 1, V)
        mask = ancestor_mask(draft.parents, prefix, target.dtype)
        depth = (mask[0, 0, :, prefix:] == 0).sum(-1) - 1  # (N + 1,) rows seen but one's own
        mask = mask.to(fed.device) if len(depth) > 1 else None  # one row needs none
        places = (prefix + depth).to(fed.device)[None]  # (1, N + 1)
        logits, hidden = forward(target, fed, cache, attention_mask=mask, position_ids=places)

        child = draft.children()
        sampled = len(draft.probs) if do_sample and draft.probs is not None else 0  # M
        greedy = not (do_sample or logits_processor)
        plain_argmax = logits[0].float().argmax(-1).tolist() if greedy else None
        path = []
        committed = []
        node = -1
        while node is not None:
            if plain_argmax is not None:
                choice = plain_argmax[node + 1]
            else:
                scores = logits[:, node + 1].to(copy=True, dtype=torch.float32)  # (1, V)
                if logits_processor:
                    ids = torch.cat([input_ids, fed.new_tensor([committed])], dim=1)
                    scores = logits_processor(ids, scores)
                siblings = [n for n in range(sampled) if draft.parents[n] == node]
                choice = _draw(scores[0], siblings, draft) if do_sample else int(scores.argmax())
            committed.append(choice)
            node = child.get((node, choice))
            if node is not None:
                path.append(node)
        kept = fed.new_tensor([-1, *path]) + 1  # (A + 1,)
        if path != list(range(len(path))):  # rows of a chain's accepted prefix are in place already
            for layer in cache.layers:
                if layer.is_initialized:  # not where layers share keys and values
                    layer.keep(prefix, prefix + kept)
        elif len(path) < count:
            cache.crop(len(path) - count)
    stats.target_forwards += 1
    stats.drafted += count
    stats.offered.append(int(depth.max()))
    stats.accepted.append(len(path))
    stats.copies.append((draft.copied, sum(n >= count - draft.copied for n in path)))
    if stats.trace is not None:
        p_plain = logits[0].float().softmax(-1)[draft.parents + 1, draft.tokens]  # unprocessed (N,)
        record = {"draft": draft, "path": path, "committed": committed}
        record |= {"p_target": p_plain.tolist(), "prefix": prefix, "seconds": dict(stats.seconds)}
        stats.trace.append(record | stats.noted)
        stats.noted = {}
    return Verified(fed.new_tensor([committed]), path, hidden[:, kept])


def _draw(scores: Tensor, siblings: list[int], draft: Draft) -> int:
    """A token distributed as softmax(scores (V,)), that of a sampled sibling where it can be."""
    p_target = scores.softmax(-1)  # (V,)
    assert not p_target.isnan().any(), "the logits processors forbid every token"
    for n in siblings:
        q_draft = draft.probs[n].to(p_target.dtype)  # (V,)
        token = int(draft.tokens[n])
        if torch.rand((), device=scores.device) * q_draft[token] < p_target[token]:
            return token
        residual = (p_target - q_draft).clamp(min=0)
        p_target = residual / residual.sum() if residual.sum() > 0 else p_target
    return int(sample(p_target))


def sample(probs: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Ids (..., 1) drawn from probs (..., V): where a running sum exceeds `uniform` (..., 1)."""
    # sums .5 .8 1: .6 is id 1. torch.multinomial: ten times as long on a CPU. No float64 on MPS.
    sums = (probs if probs.device.type == "mps" else probs.double()).cumsum(-1)  # (..., V)
    uniform = torch.rand_like(sums[..., :1]) if uniform is None else uniform
    return torch.searchsorted(sums, uniform * sums[..., -1:], right=True)


def commit(input_ids: Tensor, tokens: Tensor, stopping_criteria, stats=None, streamer=None):
    """Append tokens (1, n) to input_ids (1, T) up to where decoding stops: (ids, stopped)."""
    for count in range(1, tokens.shape[1] + 1):
        ids = torch.cat([input_ids, tokens[:, :count]], dim=1)
        if stopped := bool(stopping_criteria(ids, None).all()):
            break
    if stats is not None:
        stats.emitted += count
        lost = max(0, stats.accepted[-1] - count)  # accepted, beyond the end
        stats.accepted[-1] -= lost
        offered, copied = stats.copies[-1]
        stats.copies[-1] = (offered, max(0, copied - lost))
    if streamer is not None:
        streamer.put(tokens[:, :count].cpu())
        if stopped:
            streamer.end()
    return ids, stopped


def demo(generate, Drafter=None, folder="", argument: str = "drafter", **options) -> None:
    """Answer a prompt, with the drafter checkpoints/folder (`argument` of `generate`) if any."""
    try:
        target, tokenizer = load_target()
        if Drafter is not None:
            checkpoint = Path(__file__).with_name("checkpoints") / folder
            options[argument] = load_drafter(Drafter, checkpoint, target)
    except ValueError as problem:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr)
        sys.exit(2)
    text = "Explain photosynthesis to a child in five sentences."
    chat = tokenizer.chat_template
    if chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    stats = Stats()
    options |= {"max_new_tokens": 128, "do_sample": False, "stats": stats}
    output = target.generate(ids, custom_generate=generate, **options)
    print(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    print(f"\n{stats.emitted} tokens, {stats.emitted / stats.target_forwards:.2f} a target forward")
