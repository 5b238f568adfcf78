"""Gradients as the input of a secure sum: one vector, the context that members compare, and errors by parameter."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import RangeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    ParameterGroup = dict[str, Any]


# A context has at most 255 bytes, of which the digest takes 64.
MAX_OPTIONS_CHARACTERS = 130


def trainable(*groups: ParameterGroup) -> list[torch.Tensor]:
    """Return the parameters of these groups that require a gradient."""
    return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


def flatten_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all parameters as one vector; a missing gradient is zero, because a peer may have one."""
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    return torch.cat([_flatten(each, dtype) for each in parameters])


def _flatten(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().reshape(-1).to("cpu", dtype)


def step_context(
    kind: str,
    options: Sequence[str],
    groups: Sequence[ParameterGroup],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> str:
    """Return a description of everything that must be equal at all members for the displacements to stay equal.

    Members compare it before they share anything, so a different lr, a missed step or a wrong checkpoint is reported at
    once. It contains only what all members know anyway: options that a user adds to a group are not part of it.
    `groups` are those of one sum: in a grid, the first layers of different columns have different shapes.
    """
    values = {key: [_canonical(group[key]) for group in groups] for key in options}
    parameters = enumerate(chain.from_iterable(group["params"] for group in groups))
    layout = [(index, tuple(each.shape), str(each.dtype)) for index, each in parameters if each.requires_grad]
    model = hashlib.sha256(repr(layout).encode())
    state = hashlib.sha256()
    for parameter in trainable(*groups):
        for key, value in sorted(states[parameter].items() if parameter in states else ()):
            if key != "origin":
                state.update(key.encode())
                state.update(_to_bytes(value))
    text = f"{kind} with " + ", ".join(f"{key} {' '.join(each)}" for key, each in values.items())
    everything = hashlib.sha256(text.encode() + model.digest() + state.digest()).hexdigest()
    excerpt = text if len(text) <= MAX_OPTIONS_CHARACTERS else f"{text[:MAX_OPTIONS_CHARACTERS]}…"
    # The short digests show a reader which part differs; the comparison rests on the full digest at the end.
    return f"{excerpt}, model {model.hexdigest()[:8]}, state {state.hexdigest()[:8]}, all {everything}"


def locate_range_error(
    error: RangeError, groups: Sequence[ParameterGroup], parameters: Sequence[torch.Tensor]
) -> RangeError:
    """Return the same error with the name of the parameter and the index in it, instead of the index in the vector."""
    names = {
        parameter: name
        for group in groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    ends = np.cumsum([parameter.numel() for parameter in parameters])
    number = int(np.searchsorted(ends, error.index[0], side="right"))
    parameter = parameters[number]
    offset = error.index[0] - int(ends[number]) + parameter.numel()
    index = tuple(int(i) for i in np.unravel_index(offset, parameter.shape)) if parameter.dim() else ()
    name = names.get(parameter, f"number {number}, of shape {tuple(parameter.shape)},")
    return RangeError(error.value, index, error.bound, f"the gradient of parameter {name}")


def _canonical(value: Any) -> str:
    """Return an option as text that depends on its value only: 1, 1.0 and a tensor of 1 give the same text."""
    return "/".join(map(_canonical, value)) if isinstance(value, (tuple, list)) else repr(float(value))


def _to_bytes(value: Any) -> bytes | memoryview:
    return value.cpu().contiguous().numpy().data if isinstance(value, torch.Tensor) else repr(value).encode()
