"""A device that exists in tests only: it computes on the CPU, counts transfers, and rejects tensors of the CPU.

Its tensors report the device "meta". Operations on them run on the CPU with their content. As on a real device, an
operation fails if a tensor of the CPU, other than a single number, is among its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    import pytest

FAKE = torch.device("meta")
TO_COPY = torch.ops.aten._to_copy.default
READ = torch.ops.aten._local_scalar_dense.default


class FakeDeviceTensor(torch.Tensor):
    """A tensor on the device that exists in tests only."""

    content: torch.Tensor

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> FakeDeviceTensor:
        made: FakeDeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, strides=content.stride(), dtype=content.dtype, device=FAKE
        )
        made.content = content
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} was called outside of a FakeDevice")


class FakeDevice(TorchDispatchMode):
    """The device, as a context; `transfers` lists the sizes of all transfers between it and the CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transfers: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        here = any(isinstance(each, FakeDeviceTensor) for each in tensors)
        to_here = device == FAKE if device is not None else here
        if function is TO_COPY and to_here != here:
            self.transfers.append(("to the device" if to_here else "to the CPU", args[0].numel()))
        elif function is READ and here:
            self.transfers.append(("to the CPU", 1))
        elif here:
            assert all(isinstance(each, FakeDeviceTensor) or each.dim() == 0 for each in tensors), function
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = pytree.tree_map_only(FakeDeviceTensor, lambda each: each.content, (args, kwargs))
        result = function(*args, **kwargs)
        if not to_here:
            return result
        if function._schema.is_mutable:  # in place: the argument itself is returned
            return next(each for each in tensors if isinstance(each, FakeDeviceTensor))
        return pytree.tree_map_only(torch.Tensor, FakeDeviceTensor, result)


def like_a_device(patch: pytest.MonkeyPatch) -> None:
    """Make `Module.to` keep the attributes of parameters: on a real device, each parameter stays the same object."""
    apply: Any = torch.nn.Module._apply

    def keep_attributes(module: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
        own = {name: vars(each) for name, each in module.named_parameters(recurse=False)}
        made = apply(module, function, recurse)
        for name, each in module.named_parameters(recurse=False):
            vars(each).update({key: value for key, value in own[name].items() if key != "content"})
        return made

    patch.setattr(torch.nn.Module, "_apply", keep_attributes)
