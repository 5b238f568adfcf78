"""The states that `state_dict` returns: which of them an optimiser accepts."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.optim import fresh_origins
from cgd.optim.displacement import place_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence, Set

    Pairs = list[tuple[dict[str, Any], torch.Tensor]]


def match(state_dict: Mapping[str, Any], groups: Sequence[dict[str, Any]], needed: Set[str], kind: str) -> Pairs:
    """Return each saved state with the parameter of these groups that it belongs to.

    Raises:
        InputError: the state is not that of this kind of optimiser with the options `needed`, or of another model, or
            of other origins than those of a model with fresh origins.
    """
    for group in state_dict["param_groups"]:
        if missing := needed - group.keys():
            raise InputError(
                f"the state has no {', '.join(sorted(missing))}: it is not that of a {kind}; "
                "load it into the kind of optimiser it was saved from"
            )
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    ours = chain.from_iterable(group["params"] for group in groups)
    states = state_dict["state"]
    pairs = [(states[i], parameter) for i, parameter in zip(saved, ours, strict=False) if i in states]
    for state, parameter in pairs:
        if "displacement" not in state or state["displacement"].shape != parameter.shape:
            raise InputError(
                f"the state does not fit a parameter of shape {tuple(parameter.shape)}; "
                "load the state of a confined optimiser over the same model"
            )
        fresh_origins.check_state(parameter, state)
    return pairs


def restore(states: MutableMapping[torch.Tensor, dict[str, Any]], pairs: Pairs) -> None:
    """Set these parameters to their saved states: torch has cast those to the parameters' types, less precise ones."""
    for state, parameter in pairs:
        states[parameter] = copy(state, parameter.device)
    place_weights([parameter for _, parameter in pairs], states, evaluating=False)


def copy(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a copy of a parameter's state whose tensors are on this device, of the same types as before."""
    return {
        key: to_device(key, value.detach(), device).clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def to_device(key: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of a state on this device. As in torch, the number of steps stays on the CPU, which reads it."""
    return tensor if key == "step" else tensor.to(device)
