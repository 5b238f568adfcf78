"""The gradient of a fully-connected first layer: a linear combination of the input records, for any weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from cgd.audit.view import unflat
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import View

# Comparing all rows with each other takes minutes beyond this.
MAX_ROWS = 4096
_SAME_VALUES = (nn.Flatten, nn.Identity, nn.Unflatten)


def has_bias(model: nn.Module) -> bool:
    """Return whether the fully-connected first layer of a model has a bias.

    Raises:
        InputError: the model begins with another layer.
    """
    return _first(model).bias is not None


def units(model: nn.Module) -> int:
    """Return the number of units of the fully-connected first layer of a model.

    Raises:
        InputError: the model begins with another layer.
    """
    return _first(model).out_features


def gradient_rows(view: View) -> torch.Tensor:
    """Return the honest participants' gradient of the first layer, a row per unit and round, in double precision.

    The gradient of a bias is the last column: a bias acts as an input that is always one.

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


def limit_rows(view: View) -> View:
    """Return the view of the first rounds, with at most `MAX_ROWS` gradient rows.

    Raises:
        InputError: the model does not begin with a fully-connected layer.
    """
    return view.until(max(1, MAX_ROWS // units(view.build_model())))


def _first(model: nn.Module) -> nn.Linear:
    leaves = [each for each in model.modules() if not list(each.children()) and not isinstance(each, _SAME_VALUES)]
    if not leaves or not isinstance(leaves[0], nn.Linear):
        found = type(leaves[0]).__name__ if leaves else "no layer"
        raise InputError(f"the network begins with {found}; this attack needs one that begins with a torch.nn.Linear")
    return leaves[0]
