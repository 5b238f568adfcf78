"""Build the network of the federation file's `[model]` section."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.errors import InputError
from cgd.optim.public_start import public_seed
from cgd.optim.vertical import first_layer_names
from cgd.user_functions import load_function

if TYPE_CHECKING:
    from cgd.federation.model_section import Model

FUNCTION_ARGUMENTS = ("the number of features", "the number of outputs")
"""The arguments of a user's own function, in words for messages."""
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}


def build(model: Model, features: int, outputs: int) -> nn.Module:
    """Return a network with one output per class, or one output for a number.

    Raises:
        InputError: a user's own function does not return a suitable network.

    Examples:
        >>> from cgd.federation.model_section import Model
        >>> build(Model("mlp", (8,)), features=5, outputs=2)
        Sequential(
          (0): Linear(in_features=5, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=2, bias=True)
        )
    """
    if model.kind == "custom":
        return _build_custom(model.function, features, outputs)
    layers: list[nn.Module] = []
    for width in model.layers:
        layers += [nn.Linear(features, width), ACTIVATIONS[model.activation]()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def build_start(model: Model, features: int, outputs: int, *, vertical: bool = False) -> nn.Module:
    """Return the network with the public start, which has the same values at every member.

    Args:
        model: the `[model]` section.
        features: number of our features.
        outputs: number of outputs.
        vertical: other members have other features, and so another first layer; the later layers must be the same.

    Raises:
        InputError: a user's own function does not return a suitable network.
    """
    if not isinstance(model.start, int):  # zeros
        return build(model, features, outputs)  # `confine` sets all parameters to zero
    with public_seed(model.start):
        network = build(model, features, outputs)
    if vertical:
        with public_seed(model.start):
            common = build(model, 1, outputs).state_dict()
        names = [name for name, _ in network.named_parameters() if name not in first_layer_names(network)]
        network.load_state_dict({name: common[name] for name in names}, strict=False)
    return network


def check_on_device(network: nn.Module, features: int, device: torch.device) -> None:
    """Check, with made-up records, that a network can be trained on a device.

    Raises:
        InputError: it cannot, for example because its forward pass makes tensors on the CPU.
    """
    try:
        network.to(device)
        network(torch.zeros(2, features).to(device)).sum().backward()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the network of [model] fails on the device {str(device)!r} ({reason}); a network of your own makes its "
            "tensors where those are that it is given (device=x.device). Or train on the CPU"
        ) from None


def count_parameters(model: Model, features: int, outputs: int) -> int:
    """Return the number of parameters of a network that is not custom, without building it."""
    return sum((inputs + 1) * units for inputs, units in pairwise((features, *model.layers, outputs)))


def _build_custom(place: str, features: int, outputs: int) -> nn.Module:
    function = load_function(place, "function in [model]", FUNCTION_ARGUMENTS)
    network = function(features, outputs)
    if not isinstance(network, nn.Module):
        raise InputError(f"{place} returned a {type(network).__name__}; it must return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise InputError(f"{place} returned a network without trainable parameters; there is nothing to train")
    buffers = [name for name, _ in network.named_buffers()]
    if buffers:
        raise InputError(
            f"{place} returned a network with the buffer {buffers[0]}; buffers are not summed, and are lost when a "
            "participant is restarted: use LayerNorm or GroupNorm instead of BatchNorm, or no buffers"
        )
    training = network.training
    try:
        with torch.no_grad():
            shape = tuple(network.eval()(torch.zeros(2, features)).shape)
    except Exception as error:
        raise InputError(f"{place} returned a network that fails on {features} features: {error}") from None
    if shape != (2, outputs):
        raise InputError(
            f"{place} returned a network with outputs of shape {shape} for inputs of (2, {features}); the shape must "
            f"be (2, {outputs})"
        )
    return network.train(training)
