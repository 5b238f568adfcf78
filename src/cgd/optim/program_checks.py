"""Checks of what a program does with a confined optimiser, and errors that name the likely cause and the remedy."""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cgd.errors import InputError, PeerLeftError, RemoteProtocolError, SettingsError
from cgd.optim.displacement import parameter_name, trainable
from cgd.optim.flat_vectors import join
from cgd.optim.fresh_origins import DESCRIPTION, draw, is_fresh, training_origin
from cgd.optim.public_start import SHARDED, is_as_written, is_sharded, was_moved
from cgd.optim.vertical import is_joint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cgd.peers import Peers

    Remote = TypeVar("Remote", bound=RemoteProtocolError)

_SCALING = ("grad_scale", "found_inf")  # what torch's GradScaler sets during a step
_CONTEXTS = re.compile(r"context '(.*?)' instead of '(.*?)'(?:;|$| \(so)")
_RATES = re.compile(r"\blr ([^,]*)")
_STEP = re.compile(r", (model [0-9a-f]{8}, start [0-9a-f]{8})(?:, frozen ([0-9a-f]{8}))?, state ")


def check_parameters(parameters: Iterable[Any]) -> None:
    """Check that an optimiser can move these parameters, which may have names.

    Raises:
        InputError: a parameter has no shape yet, is divided among ranks, or does not consist of floats.
    """
    for each in parameters:
        parameter = each[1] if isinstance(each, tuple) else each
        if is_sharded(parameter):
            raise InputError(SHARDED.format("a parameter"))
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                "a parameter of a lazy module has no shape yet; run one batch through the model, then call cgd.confine "
                "and create the optimiser"
            )
        if isinstance(parameter, torch.Tensor) and not parameter.is_floating_point():
            raise InputError(f"a parameter is of type {parameter.dtype}; only floats can be summed and moved")


def check_rule(rule: Any) -> None:
    """Check that an update rule has all that `UpdateRule` requires.

    Raises:
        InputError: something is missing.
    """
    missing = [name for name in ("move", "scales_with_gradient", "elementwise") if not hasattr(rule, name)]
    if missing:
        raise InputError(
            f"the update rule {type(rule).__name__} has no {', '.join(missing)}; a rule needs the method move and the "
            "attributes scales_with_gradient and elementwise, as in cgd.optim.displacement.UpdateRule"
        )


def check_delay_possible(delay: int, peers: Peers, own: Peers, parameters: Iterable[Any]) -> None:
    """Check, if there is a delay, that the sums of a parameter group can be delayed.

    Raises:
        InputError: they cannot, because of a grid, a quorum, fresh origins, or several ranks.
    """
    if not delay:
        return
    if own.quorum is not None:
        raise InputError(
            f"delay is {delay}, and the federation has a quorum of {own.quorum}: several steps have the gradients of "
            "one model, and two sums of these, with and without an absent member, would differ by its gradient "
            "exactly. Train without a delay, or without [absence]"
        )
    if own.ranks.size > 1:
        raise InputError(
            f"delay is {delay}, and this participant is a job of {own.ranks.size} ranks, which make all sums together: "
            "a sum cannot go on while they compute. Train without a delay, or with one process"
        )
    tensors = [each[1] if isinstance(each, tuple) else each for each in parameters]
    if any(map(is_fresh, tensors)):
        raise InputError(
            f"delay is {delay}, and the model has fresh origins: a gradient would be that of a step before, at the "
            "origin of another one. Train without a delay, or with constant origins"
        )
    if any(map(is_joint, tensors)):
        raise InputError(
            f"delay is {delay}, and the model has a JointFirstLayer: its row sums the activations of the present "
            "weights in every forward pass, and the pass cannot go on without that sum. Train without a delay"
        )
    if own is not peers or peers.groups:
        raise InputError(
            f"delay is {delay}, and the participants form a grid: a step has a sum of each column and one of all, "
            "which are opened together or not at all. A delay is for one sum of all members; train without it"
        )


def check_unwritten(
    groups: Sequence[dict[str, Any]], states: Mapping[torch.Tensor, dict[str, Any]], *, evaluating: bool = False
) -> None:
    """Check that the weights are those of the last step, origin + displacement; before the first, those of `confine`.

    With `evaluating`, check that they are those of the confined model, which matters with fresh origins.

    Raises:
        InputError: the program has written into a parameter since then.
    """
    for number, parameter in enumerate(trainable(*groups)):
        if parameter not in states and not evaluating and not is_as_written(parameter):
            raise InputError(
                f"the program has written into parameter {parameter_name(parameter, groups, number)} since "
                "cgd.confine: its weights are no longer start + origin, so the private origin would be lost. Load or "
                "initialise weights before cgd.confine; to continue a training, use optimizer.load_state_dict"
            )
        if parameter not in states and evaluating and is_fresh(parameter):
            written = parameter != draw(parameter).to(parameter.dtype)
            if count := int(written.sum()):
                raise _written_error(parameter_name(parameter, groups, number), count, parameter.numel())
        if parameter not in states and is_fresh(parameter) and was_moved(parameter):
            raise InputError(
                f"parameter {parameter_name(parameter, groups, number)} has fresh origins, and another optimiser has "
                "moved it: continue with that one, or load its state_dict() into this one"
            )
    parameters = [parameter for parameter in trainable(*groups) if parameter in states]
    if not parameters:
        return
    placed_now = partial(_placed, states=states, evaluating=evaluating)
    changed = join([(each != placed_now(each)).any() for each in parameters]).tolist()
    for number, parameter in enumerate(parameters):
        if not changed[number]:
            continue
        placed = placed_now(parameter)
        written = (parameter != placed) & ~(parameter.isnan() & placed.isnan())  # a diverging model may have NaN
        if count := int(written.sum()):
            raise _written_error(parameter_name(parameter, groups, number), count, parameter.numel())


def _placed(
    parameter: torch.Tensor, states: Mapping[torch.Tensor, dict[str, Any]], *, evaluating: bool
) -> torch.Tensor:
    """Return what the last step, or `eval`, wrote into a parameter."""
    state = states[parameter]
    origin = state["origin"] if evaluating else training_origin(state)
    placed: torch.Tensor = (origin + state["displacement"]).to(parameter.dtype)
    return placed


def _written_error(name: str, count: int, total: int) -> InputError:
    return InputError(
        f"the program has written into parameter {name} since the last step ({count} of {total} values): a confined "
        "model is its origin plus the common displacement, so the values would be lost. Clamp or normalise in "
        "forward(), or with torch.nn.utils.parametrize; average weights in a copy of the model, or put the weights "
        "back before step(); load weights before cgd.confine, or with optimizer.load_state_dict"
    )


# Mixed precision.


@contextmanager
def discard_scaling_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Delete what torch's GradScaler has set if the block raises: the scaler deletes it only after a step."""
    try:
        yield
    except BaseException:
        for name in _SCALING:
            optimizer.__dict__.pop(name, None)
        raise


def unscale(optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that torch's GradScaler has scaled, without the scale; without a scaler, return it as it is.

    If the scaled gradient is infinite, torch would skip the step, and the other members would wait. Here the member
    takes part with a zero gradient, and the scaler lowers its scale as usual. A gradient that is infinite without a
    scale is not replaced: it is an error of the sum.
    """
    scale, found = (getattr(optimizer, name, None) for name in _SCALING)
    factor = 1.0 if scale is None else float(scale)
    if found is not None and float(found) and (scale is None or factor > 1):
        warnings.warn(
            "the gradient is infinite with the scale of the GradScaler: this member takes part in this step with a "
            "zero gradient, and the next scale is lower. The sum is that of the others alone: choose an init_scale "
            "with which this is rare",
            stacklevel=2,
        )
        return torch.zeros_like(gradient)
    return gradient if factor == 1.0 else gradient * (1.0 / factor)


def reject_scaling(optimizer: torch.optim.Optimizer) -> None:
    """Reject a GradScaler.

    Raises:
        InputError: a GradScaler makes this step.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        raise InputError(
            "a GradScaler makes a step of an optimiser with privacy=, which clips the gradient of each record before "
            "it could be unscaled; train without a GradScaler"
        )


# Errors about other members.


def explain(error: Remote) -> Remote:
    """Return an error of a step's sum with the likely reason, if there is one, and a remedy."""
    hint = _hint(error)
    if not hint:
        return error
    return type(error)(error.peer, f"{str(error).removeprefix(f'{error.peer}: ')}. {hint}")


def _hint(error: RemoteProtocolError) -> str:
    if isinstance(error, PeerLeftError):
        return (
            "All members must take the same number of steps; if epochs have different numbers of batches, divide them "
            "with cgd.BatchSampler"
        )
    contexts = _CONTEXTS.search(str(error)) if isinstance(error, SettingsError) else None
    if contexts is None:
        return ""
    its, usual = contexts.groups()
    models = [_STEP.findall(each) for each in (its, usual)]
    if not all(models):
        return (
            "A member takes a step while another makes another sum: all programs must make the same sums in the same "
            "order. If epochs have different numbers of batches, divide them with cgd.BatchSampler"
        )
    if models[0] != models[1] and models[0][0][0] == models[1][0][0]:
        return (
            "The frozen layers or buffers are not the same: load the same weights at all members before cgd.confine or "
            "build them inside cgd.public_seed; use persistent=False of register_buffer for values of a member alone"
        )
    if models[0] != models[1]:
        return (
            "Build the same model at all members, inside cgd.public_seed with the same number, or load the same "
            "pretrained weights, before cgd.confine"
        )
    if (DESCRIPTION in its) != (DESCRIPTION in usual):
        return "Use fresh_origins=True of cgd.confine at all members, or at none"
    if (" of updates" in its) != (" of updates" in usual):
        return "Use local_steps() at all members in the same rounds, or at none"
    if _RATES.findall(its) != _RATES.findall(usual):
        return (
            "A scheduler must set the same lr at all members: step it equally often everywhere, give it to "
            "optimizer.steps(count, scheduler) for restarts, and give ReduceLROnPlateau a loss that all members have, "
            "such as peers.sum(loss)"
        )
    if "ConfinedTorchOptimizer" in its and its.partition(", model ")[0] == usual.partition(", model ")[0]:
        return (
            "If its state differs after steps that all have taken, torch computed other bits there: use the same "
            "processor and version of torch everywhere, or ConfinedSGD or ConfinedAdam, which round alike everywhere"
        )
    return ""
