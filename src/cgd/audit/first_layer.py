"""The gradient of a fully-connected first layer: a combination of the input records, whatever the weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.audit.view import unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import View

_SAME_VALUES = (nn.Flatten, nn.Identity, nn.Unflatten)


def has_bias(model: nn.Module) -> bool:
    """Whether the fully-connected layer that a model begins with has a bias.

    Raises:
        InputError: the model begins with something else.
    """
    return _first(model).bias is not None


def units(model: nn.Module) -> int:
    """How many units the fully-connected layer has that a model begins with.

    Raises:
        InputError: the model begins with something else.
    """
    return _first(model).out_features


def gradient_rows(view: View) -> torch.Tensor:
    """What the honest participants' records add up to, a row for every unit of every round, in double precision.

    If the layer has a bias, its gradient is a last column: that of an input that is always one.

    Raises:
        InputError: the model does not begin with a fully-connected layer.
    """
    model = view.build_model()
    columns = 2 if has_bias(model) else 1
    rows = []
    for number in range(len(view.rounds)):
        gradient = list(unflat(view.honest_sum(number).double(), model).values())
        rows.append(torch.cat([each.reshape(len(each), -1) for each in gradient[:columns]], dim=1))
    return torch.cat(rows)


def _first(model: nn.Module) -> nn.Linear:
    leaves = [each for each in model.modules() if not list(each.children()) and not isinstance(each, _SAME_VALUES)]
    if not leaves or not isinstance(leaves[0], nn.Linear):
        found = type(leaves[0]).__name__ if leaves else "nothing"
        raise InputError(f"the network begins with {found}; this attack needs one that begins with a torch.nn.Linear")
    return leaves[0]
