"""Running statistics of normalisation layers: a confined model must not change them.

A layer such as `nn.BatchNorm2d` in training mode writes means and variances of the member's records into its buffers.
Buffers are not summed, so the model would no longer be start + origin + displacement, and the models of two members
would differ in more than their origins. In evaluation mode the statistics are constants, for example those of
pretrained weights. `cgd.confine` refuses a layer that changes its statistics. A layer that it accepts, but that is
switched to training mode later, is refused at the next step; statistics that have changed by then are noticed by
`untrained_values`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.nn.modules import batchnorm, instancenorm
from torch.utils.weak import WeakTensorKeyDictionary

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

# The layers with statistics, and their names, of the model that a confined parameter belongs to. It is not an attribute
# of the parameter, because a saved or copied parameter would contain the layers.
_layers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def changes_statistics(module: nn.Module) -> bool:
    """Return whether a forward pass of this module, in its present mode, changes its running statistics.

    Examples:
        >>> from torch import nn
        >>> changes_statistics(nn.BatchNorm1d(2)), changes_statistics(nn.BatchNorm1d(2).eval())
        (True, False)
        >>> changes_statistics(nn.BatchNorm1d(2, track_running_stats=False))
        False
    """
    if not has_statistics(module):
        return False
    if isinstance(module, instancenorm._InstanceNorm) and not module.track_running_stats:
        return True  # torch then uses the statistics of the input, and updates those that are stored, in every mode
    return module.training and bool(module.track_running_stats)


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module has running statistics of its inputs."""
    return isinstance(module, batchnorm._NormBase) and module.running_mean is not None


def title(module: nn.Module, name: str) -> str:
    """Return what errors call a module: its name in the model, and its class."""
    return f"module {name or 'the model itself'} ({type(module).__name__})"


def check_model(model: nn.Module) -> None:
    """Check that no layer of a model that is being confined changes its running statistics.

    Raises:
        InputError: a layer does.
    """
    for name, module in model.named_modules():
        _check(module, name)


def watch(model: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Remember the layers with running statistics of a confined model, for `check_layers` with its parameters."""
    found = [(weakref.ref(module), name) for name, module in model.named_modules() if has_statistics(module)]
    if found:
        for parameter in parameters:
            _layers[parameter] = found


def check_layers(parameters: Iterable[torch.Tensor]) -> None:
    """Check that no layer of the models of confined parameters has been switched to training mode.

    Raises:
        InputError: a layer has been.
    """
    models = {id(found): found for each in parameters if (found := _layers.get(each))}
    for found in models.values():
        for reference, name in found:
            if (module := reference()) is not None:
                _check(module, name)


def _check(module: nn.Module, name: str) -> None:
    if changes_statistics(module):
        raise InputError(
            f"{title(module, name)} writes statistics of this member's records into its buffers; buffers "
            "are not summed, so the members' models would differ in more than their origins. Use nn.GroupNorm "
            "or nn.LayerNorm; or keep the statistics of pretrained weights: call eval() of this module before "
            "cgd.confine, and again after every model.train()"
        )
