"""The network that the `[model]` section of the federation file asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.errors import InputError
from cgd.tabular.user_functions import load_function

if TYPE_CHECKING:
    from cgd.federation.data_schema import Model

SIZES = ("the number of features", "the number of outputs")
"""What a user's own function is called with."""
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}


def build(model: Model, features: int, outputs: int) -> nn.Module:
    """A network for so many features, with one output for each class, or one for a number.

    Raises:
        InputError: a user's own function gives none that fits.

    Examples:
        >>> from cgd.federation.data_schema import Model
        >>> build(Model("mlp", (8,)), features=5, outputs=2)
        Sequential(
          (0): Linear(in_features=5, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=2, bias=True)
        )
    """
    if model.kind == "custom":
        return _custom(model.function, features, outputs)
    layers: list[nn.Module] = []
    for width in model.layers:
        layers += [nn.Linear(features, width), ACTIVATIONS[model.activation]()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def _custom(place: str, features: int, outputs: int) -> nn.Module:
    function = load_function(place, "function in [model]", SIZES)
    network = function(features, outputs)
    if not isinstance(network, nn.Module):
        raise InputError(f"{place} gave a {type(network).__name__}; it must give a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise InputError(f"{place} gave a network without trainable parameters; there is nothing to train")
    buffers = [name for name, _ in network.named_buffers()]
    if buffers:
        raise InputError(
            f"{place} gave a network with {buffers[0]}, which is no parameter: it is not summed, and would be lost "
            "when a participant is started again; take LayerNorm or GroupNorm in place of BatchNorm, or do without"
        )
    training = network.training
    try:
        with torch.no_grad():
            shape = tuple(network.eval()(torch.zeros(2, features)).shape)
    except Exception as error:
        raise InputError(f"{place} gave a network that fails on {features} features: {error}") from None
    if shape != (2, outputs):
        raise InputError(f"{place} gave a network that makes {shape} of (2, {features}); it must make (2, {outputs})")
    return network.train(training)
