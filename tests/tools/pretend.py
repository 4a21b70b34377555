"""A GPU that is not there: a device `pretend` that computes on the CPU and keeps a GPU's rules.

An operator that mixes tensors of the CPU and of the device fails. So all but kernels and speed can
be tested on a machine without a GPU.

This module must be imported before autograd first runs: autograd then learns which devices there
are.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class Remote(torch.Tensor):
    """A tensor of the device; `inner` is its memory."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            device="pretend:0",
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()


def run(operator, args: tuple, kwargs: dict):
    """One operator of ATen, under the rules."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [isinstance(x, Remote) for x in tensors]
    device = kwargs.get("device")
    to_device = any(ours)
    if device is not None:
        to_device = torch.device(device).type == "pretend"
        if to_device:
            kwargs = {**kwargs, "device": "cpu"}
    if operator is aten.copy_.default:
        to_device = ours[0]
    elif operator is not aten._to_copy.default and any(ours):
        foreign = [tuple(x.shape) for x, our in zip(tensors, ours) if not our and x.dim()]
        if foreign and not (operator in INDEXING and ours[0]):  # a GPU copies indices
            raise AssertionError(f"{operator} mixes devices: {foreign} are on the CPU")
    args_here, kwargs_here = tree_map_only(Remote, lambda x: x.inner, (args, kwargs))
    out = operator(*args_here, **kwargs_here)
    if not to_device:
        return out
    out = tree_map_only(torch.Tensor, Remote, out)
    return return_and_correct_aliasing(operator, args, kwargs, out)


class Rules(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


class Constructor(TorchFunctionMode):
    """torch.tensor and new_tensor make their result on the CPU and copy it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
            function = torch.tensor
        device = kwargs.get("device")
        if function is torch.tensor and device is not None:
            return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        return function(*args, **kwargs)


@contextlib.contextmanager
def gpu():
    """Make the device usable."""
    # Otherwise module.to(dtype) would leave `inner` behind.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Constructor(), Rules():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
