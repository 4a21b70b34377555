"""CUDA graphs: the target's forward recorded for each number of tokens, then replayed.

A small target on a GPU spends most of a forward launching kernels. A graph launches them all at
once, but it repeats the same shapes and the same memory. So the KV cache gets all its rows at the
start, every forward attends to all of them under a mask that hides what is not there, and the
number of tokens is rounded up:

                      rows of the cache: 3 are filled, 2 tokens come, 8 rows in all
                         0  1  2  3  4  5  6  7
        token 0          x  x  x  x  .  .  .  .
        token 1          x  x  x  x  x  .  .  .
        rounded up       x  x  x  x  x  .  .  .    a copy of token 1: to row 5, where nobody looks

common.forward comes here inside `use`, so all methods, and plain decoding by bench.plain_generate,
use the same graphs; transformers' own loops do not. Prompts run as usual. Drafters have few layers,
whose shapes differ from method to method, so torch.compile fuses what it can of them, for any
shape. On a CPU the same steps run unrecorded, which is for tests, not for speed.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

import common

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens of a recorded forward


class FixedLayer(DynamicLayer):
    """Keys and values (1, Hkv, L, Dh) of fixed memory; an update writes its rows `place` (n,)."""

    def __init__(self, buffer: list[Tensor], place: Tensor):
        super().__init__()
        self.buffer = buffer
        self.place = place

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write rows (1, Hkv, n, Dh); returns all L keys and values."""
        for buffer, rows in zip(self.buffer, (key_states, value_states)):
            buffer.index_copy_(2, self.place, rows)
        return tuple(self.buffer)


class Recorded:
    """The target's forward over n tokens with fixed inputs, cache and outputs."""

    def __init__(self, target, buffers: list[list[Tensor]], n: int):
        device = target.device
        ids, positions, place = (torch.zeros(n, dtype=torch.long, device=device) for _ in range(3))
        mask = torch.zeros(1, 1, n, buffers[0][0].shape[2], dtype=target.dtype, device=device)
        cache = DynamicCache()
        cache.layers = [FixedLayer(buffer, place) for buffer in buffers]
        self.inputs = (ids, positions, place, mask)
        self.graph = None

        def run() -> tuple[Tensor, Tensor]:
            hidden = []
            hook = target.get_decoder().register_forward_hook(
                lambda _module, _args, out: hidden.append(out[0])
            )
            # its forward, not the target itself: a replay passes by the target's hooks, too
            out = target.forward(
                ids[None],
                attention_mask=mask,
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
            )
            hook.remove()
            return out.logits, hidden[0]

        self.run = run
        if device.type != "cpu":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate what they need in the first runs
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = run()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        for fixed, new in zip(self.inputs, inputs):
            fixed.copy_(new)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.output[0].clone(), self.output[1].clone()  # the next replay writes over them


class Graphs:
    """What common.forward does for a target with graphs; one sequence at a time."""

    def __init__(self, target, length: int):
        shape = common.target_shape(target)
        like = {"dtype": target.dtype, "device": target.device}
        size = (1, shape["num_kv_heads"], length, shape["head_dim"])
        self.target = target
        self.length = length  # rows of the cache
        self.owner = None  # the cache that has the memory
        self.recorded: dict[int, Recorded] = {}
        self.buffers = []  # of each layer [K, V]
        for _ in range(shape["num_layers"]):
            self.buffers.append([torch.zeros(size, **like), torch.zeros(size, **like)])

    def __call__(self, input_ids: Tensor, cache, options: dict) -> tuple[Tensor, Tensor]:
        """common.forward(target, input_ids (1, n), cache, **options)."""
        start = cache.get_seq_length()
        n = input_ids.shape[1]
        device = input_ids.device
        if start == 0:  # a new sequence gets the memory; its prompt's forward is not recorded
            self.owner = cache
            for layer, buffer in zip(cache.layers, self.buffers):
                layer.adopt(buffer, 0)
        assert cache is self.owner, "graphs hold one sequence at a time"
        rounded = next((size for size in SIZES if size >= n), self.length + 1)
        moved = cache.layers[0].buffer[0] is not self.buffers[0][0]
        outgrown = moved or start + rounded > self.length
        if start == 0 or outgrown or "logits_to_keep" in options:
            with common.forward_by(self.target, None):
                return common.forward(self.target, input_ids, cache, **options)
        own = options.get("attention_mask")
        positions = options.get("position_ids")
        if own is None:
            parents = torch.arange(n - 1) - 1
            own = common.ancestor_mask(parents, start, self.target.dtype).to(device)
        if positions is None:
            positions = torch.arange(start, start + n, device=device)[None]
        last = torch.arange(rounded, device=device).clamp(max=n - 1)  # the last token repeated
        mask = own.new_full((1, 1, n, self.length), torch.finfo(own.dtype).min)
        mask[..., : start + n] = own
        if rounded not in self.recorded:
            self.recorded[rounded] = Recorded(self.target, self.buffers, rounded)
        place = torch.arange(start, start + rounded, device=device)
        logits, hidden = self.recorded[rounded](
            input_ids[0, last], positions[0, last], place, mask[:, :, last]
        )
        for layer, buffer in zip(cache.layers, self.buffers):
            layer.adopt(buffer, start + n)
        return logits[:, :n], hidden[:, :n]


def compiled(drafter):
    """The drafter with its forward, but no hooks on what is returned, compiled for any shape."""
    backend = "aot_eager" if next(drafter.parameters()).device.type == "cpu" else "inductor"
    return torch.compile(drafter, dynamic=True, backend=backend)


@contextlib.contextmanager
def use(target, length: int):
    """Meanwhile common.forward replays graphs over a cache of `length` rows.

    Args: length: SIZES[-1] more than the longest sequence, to have room for any draft.
    Yields: the Graphs.
    """
    graphs = Graphs(target, length)
    update = common.GrowingLayer.update
    # torch.compile cannot take a buffer that changes together with its views
    common.GrowingLayer.update = torch.compiler.disable(update)
    try:
        if target.device.type != "cpu":  # now, rather than while somebody measures
            with torch.no_grad():
                for size in SIZES:
                    if size <= length:
                        graphs.recorded[size] = Recorded(target, graphs.buffers, size)
        with common.forward_by(target, graphs):
            yield graphs
    finally:
        common.GrowingLayer.update = update
