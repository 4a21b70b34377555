"""A GPU that is not there: tensors on the device `pretend` compute on the CPU and keep the rules of
a GPU.

Mixing tensors of the CPU and of the device in an operator fails; waits of the CPU for the device
are counted, and so are copies to it. While a graph is being recorded both fail, as on a GPU, and a
replay does what was recorded once more on the same memory. So everything but kernels and speed can
be tested on a machine without a GPU.
"""

from __future__ import annotations

import collections
import contextlib
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # for torch.autocast
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
WAITING = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
)
counts: collections.Counter = collections.Counter()  # "waits", "copies", "operators"
recording: Graph | None = None


class Remote(torch.Tensor):
    """A tensor of the device; `inner` is its memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            storage_offset=inner.storage_offset(),
            device="pretend:0",
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self, **_):
        return f"Remote({self.inner!r})"


def change(tree, what):
    """The same arguments or results with `what` done to each tensor."""
    if isinstance(tree, torch.Tensor):
        return what(tree)
    if isinstance(tree, dict):
        return {key: change(x, what) for key, x in tree.items()}
    return type(tree)(change(x, what) for x in tree) if type(tree) in (list, tuple) else tree


def tensors_in(*trees) -> list[torch.Tensor]:
    found = []
    change(trees, found.append)
    return found


def local(tree):
    return change(tree, lambda x: x.inner if isinstance(x, Remote) else x)


def count(kind: str, operator) -> None:
    assert recording is None, f"{operator} {kind} while a graph is recorded"
    counts[kind] += 1


def run(operator, args: tuple, kwargs: dict):
    """One operator of ATen, under the rules."""
    tensors = tensors_in(args, kwargs)
    ours = [isinstance(x, Remote) for x in tensors]
    device = kwargs.get("device")
    to_device = any(ours) if device is None else torch.device(device).type == "pretend"
    kwargs_here = {**kwargs, "device": "cpu"} if device is not None and to_device else kwargs
    if operator in (aten.copy_.default, aten._to_copy.default):
        to_device = ours[0] if operator is aten.copy_.default else to_device
        if ours[-1] != to_device:
            count("copies" if to_device else "waits", operator)
    elif any(ours):
        counts["operators"] += 1
        foreign = [x for x, our in zip(tensors, ours) if not our and x.dim()]
        if (
            foreign and operator in INDEXING and ours[0]
        ):  # a GPU takes the CPU's indices: they are copied
            count("copies", operator)
        else:
            assert not foreign, (
                f"{operator} mixes devices: {[tuple(x.shape) for x in foreign]} are on the CPU"
            )
        by_mask = operator in INDEXING and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if by_mask or operator in WAITING:
            count("waits", operator)
    out = operator(*local(args), **local(kwargs_here))
    if recording is not None and to_device:
        recording.steps.append((operator, local(args), local(kwargs_here), out))
    if not to_device:
        return out
    return return_and_correct_aliasing(operator, args, kwargs, change(out, Remote))


class Rules(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


class Constructor(TorchFunctionMode):
    """torch.tensor and new_tensor make their result on the CPU and copy it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.new_tensor:
            args, kwargs = args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            function = torch.tensor
        device = kwargs.get("device")
        if function is torch.tensor and device is not None:
            return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        return function(*args, **kwargs)


@contextlib.contextmanager
def gpu():
    """Make the device usable; yields the counts, from zero."""
    counts.clear()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # module.to(dtype) would leave `inner` behind
    try:
        with Constructor(), Rules():
            yield counts
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self):
        self.steps = []

    def replay(self):
        for operator, args, kwargs, out in self.steps:
            again = operator(*args, **kwargs)
            for old, new in zip(tensors_in(out), tensors_in(again)):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def record(graph: Graph):
    """torch.cuda.graph; a GPU computes nothing while it records, so what came out is worth
    nothing."""
    global recording
    recording = graph
    try:
        yield
    finally:
        recording = None
    for _, args, kwargs, out in graph.steps:
        taken = {x.untyped_storage().data_ptr() for x in tensors_in(args, kwargs)}
        for x in tensors_in(out):
            if (
                x.untyped_storage().data_ptr() not in taken and x.is_floating_point()
            ):  # not a view of an argument
                x.fill_(float("nan"))


def stand_in_for_cuda(monkeypatch) -> None:
    """Let torch.cuda's graphs be those above."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "CUDAGraph": Graph,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": record,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
