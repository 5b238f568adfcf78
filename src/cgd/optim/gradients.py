"""Gradients on their way to a sum: as one vector, and in words, for those who compare and for error messages."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import RangeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Group = dict[str, Any]


# Characters of the options that are said in words; a context has 255 bytes, of which the digest of all of it takes 64.
SHOWN = 130


def trainable(group: Group) -> list[torch.Tensor]:
    """The parameters of a group that take part."""
    return [parameter for parameter in group["params"] if parameter.requires_grad]


def flat(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of all parameters as one vector; one that has none counts as zero, because a peer may have one."""
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    return torch.cat([_flat(each, dtype) for each in parameters])


def _flat(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().reshape(-1).to("cpu", dtype)


def context(
    kind: str,
    options: Sequence[str],
    groups: Sequence[Group],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> str:
    """What must be the same at every member for the displacements to stay the same bits.

    It is compared before anything is shared, so that another lr, a missed step or a wrong checkpoint is told at
    once and in words. All of it is known to all members anyway; the options are ours, not what a user adds. `groups`
    are those of one sum: in a grid, the first layers of other columns have other shapes.
    """
    chosen = {key: [_plain(group[key]) for group in groups] for key in options}
    parameters = enumerate(chain.from_iterable(group["params"] for group in groups))
    layout = [(index, tuple(each.shape), str(each.dtype)) for index, each in parameters if each.requires_grad]
    model = hashlib.sha256(repr(layout).encode())
    state = hashlib.sha256()
    for parameter in (each for group in groups for each in trainable(group)):
        for key, value in sorted(states[parameter].items() if parameter in states else ()):
            if key != "origin":
                state.update(key.encode())
                state.update(_bytes(value))
    said = f"{kind} with " + ", ".join(f"{key} {' '.join(values)}" for key, values in chosen.items())
    everything = hashlib.sha256(said.encode() + model.digest() + state.digest()).hexdigest()
    shown = said if len(said) <= SHOWN else f"{said[:SHOWN]}…"
    # People see what differs by the first digits; what is compared is the digest of everything, in full length.
    return f"{shown}, model {model.hexdigest()[:8]}, state {state.hexdigest()[:8]}, all {everything}"


def located(error: RangeError, groups: Sequence[Group], parameters: Sequence[torch.Tensor]) -> RangeError:
    """The same error, told in terms of the parameter instead of the flattened vector."""
    names = {
        parameter: name
        for group in groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    ends = np.cumsum([parameter.numel() for parameter in parameters])
    number = int(np.searchsorted(ends, error.index[0], side="right"))
    parameter = parameters[number]
    place = error.index[0] - int(ends[number]) + parameter.numel()
    index = tuple(int(i) for i in np.unravel_index(place, parameter.shape)) if parameter.dim() else ()
    called = names.get(parameter, f"number {number}, of shape {tuple(parameter.shape)},")
    return RangeError(error.value, index, error.bound, f"the gradient of parameter {called}")


def _plain(value: Any) -> str:
    """An option as text that is equal if and only if the numbers are: 1, 1.0 and a tensor of it are the same."""
    return "/".join(map(_plain, value)) if isinstance(value, (tuple, list)) else repr(float(value))


def _bytes(value: Any) -> bytes | memoryview:
    return value.cpu().contiguous().numpy().data if isinstance(value, torch.Tensor) else repr(value).encode()
