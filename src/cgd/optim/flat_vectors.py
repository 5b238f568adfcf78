"""The tensors of all parameters as one vector on the CPU: gradients before a sum, and their sum after it.

Tensors of one device are joined there and cross to the CPU in one transfer; a sum crosses back in one. The number of
transfers of a step does not depend on the number of parameters: a device waits in each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    ParameterState = dict[str, Any]

CPU = torch.device("cpu")
_ORIGINS = ("origin", "step_origin")  # of a parameter's state; private


def working_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which a parameter is moved: at least single precision, so that small steps are not lost."""
    return torch.promote_types(parameter.dtype, torch.float32)


def flatten_gradients(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all parameters as one vector; a missing gradient is zero, because a peer may have one."""
    return join([_gradient(parameter) for parameter in parameters])


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=working_dtype(parameter), device=parameter.device)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().to(working_dtype(parameter))


def flatten_displacements(
    parameters: Sequence[torch.Tensor], states: Mapping[torch.Tensor, ParameterState]
) -> torch.Tensor:
    """Return the displacements of all parameters as one vector; zeros for those that have not moved."""
    return join(
        [
            states[parameter]["displacement"]
            if parameter in states
            else torch.zeros(parameter.numel(), dtype=working_dtype(parameter), device=parameter.device)
            for parameter in parameters
        ]
    )


def check_device(device: Any) -> torch.device:
    """Return the device of this name, such as "cuda" or "cuda:1".

    Raises:
        InputError: there is none here.

    Examples:
        >>> check_device("cpu")
        device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.zeros((), device=found).item()
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"device is {device!r}, which torch cannot use here ({reason}); name one that it finds, such as cuda, mps "
            "or cpu"
        ) from None
    return found


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector on the CPU, of the widest of their types; one transfer for each device.

    Examples:
        >>> join([torch.ones(2, 1), torch.zeros(3, dtype=torch.float64)])
        tensor([1., 1., 0., 0., 0.], dtype=torch.float64)
    """
    numbers = _numbers_by(tensors, lambda each: each.device)
    joined = [torch.cat([tensors[number].reshape(-1) for number in those]).to(CPU) for those in numbers]
    if len(joined) == 1:
        return joined[0]
    parts: dict[int, torch.Tensor] = {}
    for those, vector in zip(numbers, joined, strict=True):
        parts |= zip(those, vector.split([tensors[number].numel() for number in those]), strict=True)
    return torch.cat([parts[number] for number in range(len(tensors))])


def split_sum(total: torch.Tensor, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """Return the part of each parameter in a sum of such vectors, of its shape and on its device."""
    pieces = torch.split(total, [each.numel() for each in parameters])
    found: dict[torch.Tensor, torch.Tensor] = {}
    for numbers in _numbers_by(parameters, lambda each: each.device):
        device = parameters[numbers[0]].device
        # Converted before the transfer: a device may lack a type that parameters elsewhere have.
        own = [pieces[number].to(working_dtype(parameters[number])) for number in numbers]
        moved = own if device == CPU else torch.cat(own).to(device).split([each.numel() for each in own])
        for number, piece in zip(numbers, moved, strict=True):
            parameter = parameters[number]
            found[parameter] = piece.reshape(parameter.shape).to(working_dtype(parameter))
    return found


def common_states_on_cpu(
    parameters: Sequence[torch.Tensor], states: Mapping[torch.Tensor, ParameterState]
) -> dict[torch.Tensor, ParameterState]:
    """Return the states of these parameters without the origins, on the CPU; one transfer for each device and type."""
    found = {
        parameter: {key: value for key, value in states[parameter].items() if key not in _ORIGINS}
        for parameter in parameters
        if parameter in states
    }
    places = [
        (parameter, key)
        for parameter, state in found.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.device != CPU
    ]
    tensors = [found[parameter][key] for parameter, key in places]
    for numbers in _numbers_by(tensors, lambda each: (each.device, each.dtype)):
        joined = join([tensors[number] for number in numbers])
        for number, piece in zip(numbers, joined.split([tensors[number].numel() for number in numbers]), strict=True):
            parameter, key = places[number]
            found[parameter][key] = piece.reshape(tensors[number].shape)
    return found


def _numbers_by(tensors: Sequence[torch.Tensor], kind: Any) -> list[list[int]]:
    """Return the numbers of the tensors of each kind, in order."""
    numbers: dict[Any, list[int]] = {}
    for number, each in enumerate(tensors):
        numbers.setdefault(kind(each), []).append(number)
    return list(numbers.values())
