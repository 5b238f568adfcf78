"""The private origin of a confined model (paper, Alg. 1 and section 4.2).

Every participant draws δˡ·Rand from its own secret seed, and adds it to the public start that all members have in
common. The seed and δˡ suffice to draw the same origin again, bit for bit. In the paper the start is zero, so that the
origin is w₁ˡ, the initial weights.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import sys
import warnings
import weakref
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from cgd.errors import InputError, UnconfinedWarning
from cgd.files import PRIVATE, write_file
from cgd.optim import fresh_origins, privacy_warnings, running_statistics, untrained_values
from cgd.optim.normal import standard_normal
from cgd.optim.public_start import (
    CONFINED,
    SHARDED,
    ZEROS,
    check_start,
    is_as_written,
    is_sharded,
    mark_confined,
    remember_written,
    start_digest,
)
from cgd.optim.vertical import is_joint

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator

    from cgd.optim.public_start import Start

    Rand = Callable[[torch.Size, torch.Generator], torch.Tensor]

SEED_BYTES = 32
FORMAT = "cgd-origin-1"
# By each parameter with a private origin: the names and parameters of its model that have one.
_confined_together: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Torch's count of writes into a parameter when `check_besides` last compared it."""


@dataclass(frozen=True)
class Origin:
    """The private origin of one participant's model: a seed, δ, and the shapes of the parameters.

    Attributes:
        delta: the standard deviation δˡ of the origin.
        shapes: the shape of every trainable parameter, by name.
        seed: 32 secret bytes, not shown by `repr`.
        rand: the distribution Rand of the paper, if it is not N(0, 1).
        start: digest of the public start that the origin is added to; "zeros" if that is zero, as in the paper.
        fresh: True if the model is trained at another origin in each step, see `of_step`.
    """

    delta: float
    shapes: dict[str, tuple[int, ...]]
    seed: bytes = field(repr=False)
    rand: Rand | None = field(default=None, repr=False)
    start: str = field(default=ZEROS, repr=False)
    fresh: bool = field(default=False, repr=False)

    def of_step(self, step: int) -> Origin:
        """Return the origin at which a model with fresh origins computes the gradient of a step."""
        seed = hmac.digest(self.seed, f"cgd origin of step {step}".encode(), "sha256")
        return replace(self, seed=seed, fresh=False)

    def key(self, name: str) -> bytes:
        """Return the key from which a parameter is drawn.

        It depends on the parameter's name, so that its origin does not depend on the other parameters.
        """
        return hmac.digest(self.seed, f"cgd origin {name}".encode(), "sha256")

    def draw(self, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the origin of every parameter, or `only` of some, in double precision."""
        for name, shape in self.shapes.items():
            if only is not None and name not in only:
                continue
            key = self.key(name)
            if self.rand is None:
                numbers = torch.from_numpy(standard_normal(key, math.prod(shape))).reshape(shape)
            else:
                numbers = self._rand(key, torch.Size(shape))
            yield name, numbers * self.delta

    def apply(self, model: torch.nn.Module) -> None:
        """Add this origin to the model's parameters, which must have the values of the start.

        If the start is zero, set the parameters to the origin. With fresh origins it is that of the first step.

        Raises:
            InputError: the trainable parameters of the model are not those of the origin, their values are not the
                start, a layer changes running statistics (`cgd.optim.running_statistics`), or δ is too large.
        """
        running_statistics.check_model(model)
        parameters = _trainable(model)
        if self.fresh and any(map(is_joint, parameters.values())):
            raise InputError(
                "the model has a JointFirstLayer, and what fresh origins would tell its row has not been examined; "
                "confine it with constant origins, or train towers"
            )
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        if shapes != self.shapes:
            wrong = sorted(name for name in shapes.keys() | self.shapes if shapes.get(name) != self.shapes.get(name))
            ours, theirs = self.shapes.get(wrong[0], "absent"), shapes.get(wrong[0], "absent")
            raise InputError(
                f"the model does not fit this origin: {wrong[0]} is {theirs} in the model and {ours} in the origin; "
                "build the model the origin was drawn for"
            )
        if self.start == ZEROS:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.zero_()
        if self.start not in (ZEROS, start_digest(parameters)):
            raise InputError(
                "the model does not have the start that this origin was drawn for; build it in the same way, with the "
                "same cgd.public_seed or the same pretrained weights, and do not train or confine it before"
            )
        mark_confined(model, parameters.values())
        if self.fresh:
            starts = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
            fresh_origins.watch(self, starts, parameters)
        first = self.of_step(0) if self.fresh else self
        with torch.no_grad():
            for name, numbers in first.draw():
                parameter = parameters[name]
                parameter.copy_(parameter.cpu().double() + numbers)  # an accelerator may have no double precision
                if not bool(torch.isfinite(parameter).all()):
                    raise InputError(f"delta is {self.delta:g}, too large for {name} of {parameter.dtype}; lower it")
        remember_written(parameters.values())
        privacy_warnings.mark_first_layer(model)
        running_statistics.watch(model, parameters.values())
        untrained_values.watch(model, parameters.values())
        together = [(name, weakref.ref(parameter)) for name, parameter in parameters.items()]
        for parameter in parameters.values():
            _confined_together[parameter] = together

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the origin to a new file that only its owner can read. Keep it as secret as the model.

        Raises:
            InputError: the file exists; a seed is never overwritten.
        """
        content = {
            "format": FORMAT,
            "rand": "normal" if self.rand is None else "custom",
            "delta": self.delta,
            "seed": self.seed.hex(),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            **({} if self.start == ZEROS else {"start": self.start}),
            **({"fresh": True} if self.fresh else {}),
        }
        try:
            write_file(Path(path), json.dumps(content, indent=1), mode=PRIVATE, new=True)
        except FileExistsError:
            raise InputError(
                f"{path} exists; a seed is never overwritten, choose another name or move it away"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], rand: Rand | None = None) -> Origin:
        """Read an origin that `save` wrote; pass the same `rand` that it was drawn with, if any.

        Raises:
            InputError: the file is not an origin, or `rand` is missing or not applicable.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            custom = content["rand"] != "normal"
            shapes = {str(name): tuple(int(size) for size in shape) for name, shape in content["shapes"].items()}
            seed = _check_seed(bytes.fromhex(content["seed"]))
            start, fresh = str(content.get("start", ZEROS)), content.get("fresh", False)
            if not isinstance(fresh, bool):
                raise TypeError(f"fresh is {fresh!r}, not true or false")
            origin = cls(check_delta(content["delta"]), shapes, seed, rand, start, fresh)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not an origin that cgd saved: {error}") from None
        if custom != (rand is not None):
            needed = "needs the rand= it was drawn with" if custom else "was drawn from N(0, 1) and takes no rand="
            raise InputError(f"{path} {needed}")
        return origin

    def _rand(self, key: bytes, shape: torch.Size) -> torch.Tensor:
        assert self.rand is not None  # noqa: S101 - for the type checker
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
        numbers = self.rand(shape, generator).double()
        if numbers.shape != shape or not bool(torch.isfinite(numbers).all()):
            raise InputError(
                f"rand returned a tensor of shape {tuple(numbers.shape)} for shape {tuple(shape)}, or values that are "
                "not finite; it must return finite values of the given shape"
            )
        return numbers


def confine(
    model: torch.nn.Module,
    delta: float = 0.1,
    seed: bytes | None = None,
    *,
    start: Start = "model",
    rand: Rand | None = None,
    fresh_origins: bool = False,
) -> Origin:
    """Give the model a private origin: add numbers drawn from N(0, δ²) to every trainable parameter.

    The values that the model has are the public start, and must be the same at all members: build it inside
    `cgd.public_seed`, or load the same pretrained weights. Frozen parameters (`requires_grad=False`) and buffers do not
    change, also not later (`cgd.optim.untrained_values`), and must be the same at all members, except buffers with
    `persistent=False`. Call it before the first step, because an optimiser uses the values of the parameters at its
    first step as start + origin. Load or initialise weights before it: weights that are written after it have no
    origin, and the first step is an error.

    Args:
        model: any module.
        delta: the standard deviation of the origin; each participant chooses its own and may keep it secret.
        seed: 32 secret bytes; by default a new seed from the operating system. Store it with `Origin.save`.
        start: "model", or "zeros" to set all trainable parameters to zero first, as in the paper.
        rand: a distribution other than N(0, 1), as a function `rand(shape, generator)`; also scaled by `delta`.
        fresh_origins: True to compute the gradient of each step at another origin, for participants with different
            classes; the same at all members. Use the confined model after `optimizer.eval()` only; see
            `cgd.optim.fresh_origins`.

    Returns:
        The origin, which can be saved and drawn again.

    Raises:
        InputError: the model is confined already, has no trainable parameter, is divided among ranks (FSDP), or has a
            layer that changes running statistics, such as `nn.BatchNorm2d` in training mode; see
            `cgd.optim.running_statistics`.

    Examples:
        >>> import cgd, torch
        >>> with cgd.public_seed(7):
        ...     model = torch.nn.Linear(2, 1)
        >>> origin = cgd.confine(model, delta=0.1)
        >>> origin
        Origin(delta=0.1, shapes={'weight': (1, 2), 'bias': (1,)})
        >>> with cgd.public_seed(7):
        ...     copy = torch.nn.Linear(2, 1)
        >>> origin.apply(copy)
        >>> torch.equal(model.weight, copy.weight)
        True
    """
    check_start(start)
    if not isinstance(fresh_origins, bool):
        raise InputError(f"fresh_origins is {fresh_origins!r}; it must be True or False")
    parameters = _trainable(model)
    if not parameters:
        raise InputError("the model has no trainable parameter; set requires_grad on the parameters to train")
    for name, values in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(values):
            raise InputError(
                f"{name} of a lazy module has no shape yet; run the model on a batch once, then confine it"
            )
        if values.is_meta:
            raise InputError(
                f"{name} is on the device meta and has no values; build or load the model on the CPU, then confine it"
            )
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise InputError(SHARDED.format(name))
        if hasattr(parameter, CONFINED):
            raise InputError(f"{name} has a private origin already; confine a model once, or build it again")
        if start == "model" and not bool(torch.isfinite(parameter).all()):
            raise InputError(f"{name} has values that are not finite, and they would be the public start; load others")
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    seed = secrets.token_bytes(SEED_BYTES) if seed is None else _check_seed(seed)
    digest = ZEROS if start == ZEROS else start_digest(parameters)
    origin = Origin(check_delta(delta), shapes, seed, rand, digest, fresh_origins)
    origin.apply(model)
    return origin


def warn_if_unconfined(parameters: Collection[torch.Tensor], stacklevel: int) -> None:
    """Warn if any of these parameters was not drawn from a private origin."""
    if not all(hasattr(parameter, CONFINED) for parameter in parameters):
        warnings.warn(
            "the model has no private origin: anyone who can guess its initial weights, which depend on the torch seed "
            "only, knows the trained model; call cgd.confine(model) before the first step",
            UnconfinedWarning,
            stacklevel=stacklevel,
        )


def check_besides(parameters: Collection[torch.Tensor]) -> None:
    """Check that trainable parameters that were confined together with these are moved by confined optimisers only.

    As in `cgd.optim.untrained_values`, only those are compared that may have changed since the last step.

    Raises:
        InputError: one of them has been written since `confine`, by an ordinary optimiser or by the program.
    """
    own = set(parameters)
    models = {id(found): found for each in parameters if (found := _confined_together.get(each)) is not None}
    for name, reference in chain.from_iterable(models.values()):
        parameter = reference()
        if parameter is None or not parameter.requires_grad or parameter in own:
            continue
        if _checked.get(parameter) == parameter._version:
            continue
        if not is_as_written(parameter):
            raise InputError(
                f"{name} has changed since cgd.confine, and the confined optimiser does not have it: it would not be "
                "summed, and a restarted member would take a step with another gradient. Give the confined optimiser "
                "all parameters that are trained; or freeze it before cgd.confine, at all members"
            )
        _checked[parameter] = parameter._version


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_delta(delta: Any) -> float:
    """Return δ as a float.

    Raises:
        InputError: it is not a positive number.
    """
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta <= sys.float_info.max:
        raise InputError(f"delta is {delta!r}; it is a standard deviation, a positive number (0 would confine nothing)")
    return float(delta)


def _check_seed(seed: object) -> bytes:
    # The messages do not contain the seed: an error may be logged.
    if not isinstance(seed, bytes):
        raise InputError(
            f"the seed is of type {type(seed).__name__}; it must be {SEED_BYTES} secret bytes, "
            f"such as secrets.token_bytes({SEED_BYTES})"
        )
    if len(seed) != SEED_BYTES:
        raise InputError(f"the seed has {len(seed)} bytes; it must have {SEED_BYTES}")
    return seed
