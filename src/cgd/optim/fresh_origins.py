"""Origins that change: a private origin for each step, in place of a constant one.

With a constant origin, the displacement adapts to each participant's own origin: if participants have different
classes, each confined model then predicts those of its own participant. With `cgd.confine(..., fresh_origins=True)` a
participant computes its gradient of step k at start + origin_k + D. Each origin_k is drawn from its seed and the number
of the step (`Origin.of_step`), so a step that is repeated after a restart has the same gradient. The confined model is
start + origin + D, with the constant origin that the participant would have without fresh ones.

So the parameters hold the weights of the next step most of the time, and those of the confined model after
`cgd.optim.evaluation_mode.EvaluationMode.eval`.

All members use fresh origins, or none: they compare it before they open a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cgd.errors import InputError
from cgd.optim.flat_vectors import working_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cgd.optim.origin import Origin

STEP_ORIGIN = "step_origin"
"""The key of a parameter's state for the origin of its next step, start included; absent with constant origins."""
DESCRIPTION = " at fresh origins"


@dataclass(frozen=True)
class _Source:
    """The source from which the origins of one parameter are drawn."""

    origin: Origin
    name: str
    start: torch.Tensor


# By the parameter. It is not an attribute: torch.save(model) would write the seed into the file.
_sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def watch(origin: Origin, starts: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Remember what the origins of these parameters are drawn from; `starts` has their values before `confine`."""
    for name, parameter in parameters.items():
        _sources[parameter] = _Source(origin, name, starts[name])


def is_fresh(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has another origin in each step."""
    return parameter in _sources


def draw(parameter: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """Return start + origin of a parameter in a step; without a step, with the origin of the confined model."""
    source: _Source = _sources[parameter]
    origin = source.origin if step is None else source.origin.of_step(step)
    ((_, numbers),) = origin.draw([source.name])
    # Rounded to the type at `confine` first, as every constant origin.
    drawn = (source.start.double() + numbers).to(source.start.dtype)
    return drawn.to(parameter.device).to(working_dtype(parameter))


def training_origin(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the origin, start included, at which the next gradient is computed, given a parameter's state."""
    found: torch.Tensor = state[STEP_ORIGIN] if STEP_ORIGIN in state else state["origin"]
    return found


def describe(parameters: Iterable[torch.Tensor]) -> str:
    """Return what members must have in common, for the context of a sum; empty with constant origins."""
    return DESCRIPTION if any(is_fresh(each) for each in parameters) else ""


def check(parameters: Sequence[torch.Tensor]) -> None:
    """Check that a step can be taken with these parameters of an optimiser, frozen ones included.

    Raises:
        InputError: some of the parameters have fresh origins and others not; or one was frozen later.
    """
    fresh = [is_fresh(each) for each in parameters]
    if not any(fresh):
        return
    if not all(known for known, each in zip(fresh, parameters, strict=True) if each.requires_grad):
        raise InputError(
            "some parameters of the optimiser have fresh origins and others not; confine all models with "
            "fresh_origins=True, or none"
        )
    if any(known and not each.requires_grad for known, each in zip(fresh, parameters, strict=True)):
        raise InputError(
            "a parameter with fresh origins was frozen after cgd.confine: it would keep the origin of one step. Set "
            "requires_grad before cgd.confine and leave it, or train with constant origins"
        )


def check_state(parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Check that a saved state is one of this parameter's origins.

    Raises:
        InputError: it is one of constant origins and the parameter has fresh ones, or the reverse; or of another seed.
    """
    if (STEP_ORIGIN in state) != is_fresh(parameter):
        its, ours = ("fresh", "constant") if STEP_ORIGIN in state else ("constant", "fresh")
        raise InputError(
            f"the state is that of a training with {its} origins, and this model has {ours} ones; confine the model "
            "with the same fresh_origins= and the same seed= as before"
        )
    if is_fresh(parameter) and not torch.equal(draw(parameter).to(state["origin"]), state["origin"]):
        raise InputError(
            "the state has another origin than this model, whose next origins would be drawn from another seed; "
            "confine the model with the same seed=, delta= and start as before"
        )
