"""A GPU that is not there: a device `pretend` that computes on the CPU and keeps a
GPU's rules.

An operator that mixes tensors of the CPU and of the device fails. So all but kernels
and speed can be tested on a machine without a GPU. `counts` tells how much a GPU would
have been asked to do.

This module must be imported before autograd first runs: autograd then learns which
devices there are.
"""

import contextlib
from collections import Counter

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
COPYING = (aten.copy_.default, aten._to_copy.default)
# The CPU waits for a number, and for a size that is known only afterwards.
DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What launches no kernel, besides views.
NO_KERNEL = (
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten._local_scalar_dense.default,
)
# What a GPU has one kernel for; here it is several operators.
ONE_KERNEL = (F.scaled_dot_product_attention, F.rms_norm)

# What a GPU would have done since the start: operators ("launches"), and copies
# between it and the CPU ("to_host", "to_device").
counts = Counter()


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
        foreign = [
            tuple(x.shape) for x, our in zip(tensors, ours) if not our and x.dim()
        ]
        if foreign and not (operator in INDEXING and ours[0]):  # a GPU copies indices
            raise AssertionError(f"{operator} mixes devices: {foreign} are on the CPU")
    count(operator, tensors, to_device)
    args_here, kwargs_here = tree_map_only(Remote, lambda x: x.inner, (args, kwargs))
    out = operator(*args_here, **kwargs_here)
    if not to_device:
        return out
    out = tree_map_only(torch.Tensor, Remote, out)
    return return_and_correct_aliasing(operator, args, kwargs, out)


def count(operator, tensors: list, to_device: bool) -> None:
    """Add an operator to `counts`; to_device: its result is on the device."""
    ours = [isinstance(x, Remote) for x in tensors]
    if not (any(ours) or to_device):
        return
    if operator in COPYING:
        if not ours[-1]:  # the source
            counts["to_device"] += 1
        else:
            counts["launches" if to_device else "to_host"] += 1
        return
    if operator in INDEXING:  # a boolean index is made a list of places
        waits = any(x.dtype == torch.bool for x in tensors[1:])
        counts["to_device"] += sum(
            not our and x.dim() > 0 for x, our in zip(tensors, ours)
        )
    else:
        waits = not DEPENDS_ON_DATA.isdisjoint(operator.tags)
    counts["to_host"] += waits
    if not (operator.is_view or operator in NO_KERNEL):
        counts["launches"] += 1


class Rules(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return run(operator, args, kwargs or {})


class Functions(TorchFunctionMode):
    """torch.tensor and new_tensor make their result on the CPU and copy it.

    ONE_KERNEL count as one launch.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.new_tensor:
            like, *args = args
            kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
            function = torch.tensor
        device = kwargs.get("device")
        if function is torch.tensor and device is not None:
            return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        launches = counts["launches"]
        out = function(*args, **kwargs)
        if function in ONE_KERNEL:
            counts["launches"] = min(counts["launches"], launches + 1)
        return out


@contextlib.contextmanager
def gpu():
    """Make the device usable."""
    # Otherwise module.to(dtype) would leave `inner` behind.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Functions(), Rules():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
