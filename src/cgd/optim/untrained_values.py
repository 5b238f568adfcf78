"""Frozen parameters and persistent buffers of a confined model: they stay as they were at `cgd.confine`.

They are not summed, and members compare a digest of them from the time of `confine`. A value that a program writes
later, or statistics that a layer computes from the member's records, would make the members' models differ in more than
their origins. So every step checks them before its sum. A step compares digests only of what may have changed: torch
counts the writes into a tensor. The first step compares all.

A write that torch does not count, through `tensor.data` after the first step, is not noticed. Buffers with
`persistent=False` may change, as may those that follow from the weights alone: u and v of torch's spectral norm. A
parameter that is no longer frozen is no longer checked.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.weak import WeakTensorKeyDictionary

from cgd.errors import InputError
from cgd.optim.public_start import has_values, value_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn


@dataclass
class _Value:
    """A frozen parameter or a buffer of a confined model, without a reference that keeps the model in memory."""

    module: weakref.ref[nn.Module]
    name: str
    title: str
    digests: dict[str, bytes]
    tensor: weakref.ref[torch.Tensor] | None = None
    writes: tuple[int, int] | None = None

    def current(self) -> torch.Tensor | None:
        """Return the tensor that the model has in this place; None if it has none, or trains it."""
        module = self.module()
        if module is None:
            return None
        parameter, buffer = module._parameters.get(self.name), module._buffers.get(self.name)
        tensor = buffer if parameter is None else parameter
        return None if tensor is None or tensor.requires_grad else tensor

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Return whether the values are others than at `confine`."""
        writes = _writes(tensor)
        if writes is not None and writes == self.writes and self.tensor is not None and self.tensor() is tensor:
            return False
        if not has_values(tensor, self.digests):
            return True
        self.tensor, self.writes = weakref.ref(tensor), writes
        return False


# By the trained parameters of the model. It is not an attribute of a parameter: a copy may change its buffers.
_values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def watch(model: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Remember the frozen parameters and persistent buffers of a confined model, for `check` with its parameters."""
    found = list(_find(model))
    for parameter in parameters:
        _values[parameter] = found


def check(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the models of confined parameters have the frozen parameters and buffers that they had at `confine`.

    Raises:
        InputError: one of them has changed.
    """
    models = {id(found): found for each in parameters if (found := _values.get(each))}
    for found in models.values():
        for value in tuple(found):
            tensor = value.current()
            if tensor is None:
                found.remove(value)
            elif value.has_changed(tensor):
                kind = "frozen parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
                raise InputError(
                    f"the {kind} {value.title} has changed since cgd.confine; it is not summed, so the members' models "
                    "would differ in more than their origins. Put its values back, and write them before cgd.confine; "
                    "keep layers with running statistics in eval() in every forward pass; use persistent=False of "
                    "register_buffer for values of this member alone"
                )


def _find(model: nn.Module) -> Iterator[_Value]:
    for prefix, module in model.named_modules():
        reference = weakref.ref(module)
        kept = [each for each in module.named_parameters(recurse=False) if not each[1].requires_grad]
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not _follows_from_weights(module, name):
                kept.append((name, tensor))
        for name, tensor in kept:
            yield _Value(reference, name, f"{prefix}.{name}" if prefix else name, value_digests(tensor))


def _follows_from_weights(module: nn.Module, name: str) -> bool:
    """Return whether a layer computes this buffer from its weights alone."""
    if isinstance(module, _SpectralNorm):
        return True
    hooks = [each for each in module._forward_pre_hooks.values() if isinstance(each, SpectralNorm)]
    return any(name in (f"{each.name}_u", f"{each.name}_v") for each in hooks)


def _writes(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return torch's count of writes and the place in memory; None if torch does not count."""
    if tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr() if tensor.layout == torch.strided else 0
