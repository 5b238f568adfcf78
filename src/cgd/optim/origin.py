"""Where a confined model starts: its private origin (paper, Alg. 1 and section 4.2).

Every participant draws w₁ˡ = δˡ·Rand from a seed of its own and never shows it. The seed and δˡ are all it takes to
draw the origin again, bit for bit, so whoever keeps them can lose everything else.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError, UnconfinedWarning
from cgd.optim import privacy_warnings
from cgd.optim.normal import standard_normal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    Rand = Callable[[torch.Size, torch.Generator], torch.Tensor]

SEED_BYTES = 32
FORMAT = "cgd-origin-1"
CONFINED = "_cgd_confined"
"""The attribute by which an optimiser knows a parameter that starts from a private origin."""


@dataclass(frozen=True)
class Origin:
    """The private origin of one participant's model: a seed, δ, and the parameters it belongs to.

    Attributes:
        delta: the standard deviation δˡ of the origin.
        shapes: the shape of every parameter that takes part, by name.
        seed: 32 secret bytes; not shown by `repr`.
        rand: the paper's Rand if it is not N(0, 1).
    """

    delta: float
    shapes: dict[str, tuple[int, ...]]
    seed: bytes = field(repr=False)
    rand: Rand | None = field(default=None, repr=False)

    def key(self, name: str) -> bytes:
        """The key from which a parameter is drawn.

        One for each name: a parameter's origin does not depend on which others take part.
        """
        return hmac.digest(self.seed, f"cgd origin {name}".encode(), "sha256")

    def draw(self, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The origin of one parameter after the other (of all, or only of some), with its name, in double precision."""
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
        """Set the model's parameters to this origin.

        Raises:
            InputError: the model has other trainable parameters than the origin was drawn for.
        """
        parameters = _trainable(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        if shapes != self.shapes:
            wrong = sorted(name for name in shapes.keys() | self.shapes if shapes.get(name) != self.shapes.get(name))
            ours, theirs = self.shapes.get(wrong[0], "absent"), shapes.get(wrong[0], "absent")
            raise InputError(
                f"the model does not fit this origin: {wrong[0]} is {theirs} in the model and {ours} in the origin; "
                "build the model the origin was drawn for"
            )
        with torch.no_grad():
            for name, numbers in self.draw():
                parameters[name].copy_(numbers)
                setattr(parameters[name], CONFINED, True)
        privacy_warnings.mark(model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the origin to a new file that only its owner can read. It is as secret as the model.

        Raises:
            InputError: the file exists; an old seed is never overwritten.
        """
        content = {
            "format": FORMAT,
            "rand": "normal" if self.rand is None else "custom",
            "delta": self.delta,
            "seed": self.seed.hex(),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(
                f"{path} exists; a seed is never overwritten, choose another name or move it away"
            ) from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str], rand: Rand | None = None) -> Origin:
        """Read an origin that `save` wrote. One drawn with a `rand` of your own needs that function again.

        Raises:
            InputError: the file is not an origin, or `rand` is missing or one too many.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            custom = content["rand"] != "normal"
            shapes = {str(name): tuple(int(size) for size in shape) for name, shape in content["shapes"].items()}
            origin = cls(check_delta(content["delta"]), shapes, _check_seed(bytes.fromhex(content["seed"])), rand)
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
                f"rand gave a tensor of shape {tuple(numbers.shape)} for {tuple(shape)}, or it is not finite"
            )
        return numbers


def confine(
    model: torch.nn.Module, delta: float = 0.1, seed: bytes | None = None, *, rand: Rand | None = None
) -> Origin:
    """Give the model a private origin: every trainable parameter is drawn anew from N(0, δ²).

    Frozen parameters (`requires_grad=False`) and buffers stay as they are. Call it before the first step: an optimiser
    takes the parameters as it finds them then for the origin.

    Args:
        model: any module.
        delta: the standard deviation of the origin; each participant chooses its own and need not tell.
        seed: 32 secret bytes. Without one, a fresh seed comes from the operating system; keep it with `Origin.save`.
        rand: another distribution than N(0, 1), as `rand(shape, generator)`; it is scaled by `delta` too.

    Returns:
        The origin, to save and to draw again.

    Examples:
        >>> import cgd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> origin = cgd.confine(model, delta=0.1)
        >>> origin
        Origin(delta=0.1, shapes={'weight': (1, 2), 'bias': (1,)})
        >>> twin = torch.nn.Linear(2, 1)
        >>> origin.apply(twin)
        >>> torch.equal(model.weight, twin.weight)
        True
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in _trainable(model).items()}
    if not shapes:
        raise InputError("the model has no trainable parameter; set requires_grad on what shall be trained")
    seed = secrets.token_bytes(SEED_BYTES) if seed is None else _check_seed(seed)
    origin = Origin(check_delta(delta), shapes, seed, rand)
    origin.apply(model)
    return origin


def warn_if_unconfined(parameters: Collection[torch.Tensor], stacklevel: int) -> None:
    """Warn whoever trains parameters that no private origin was drawn for."""
    if not all(getattr(parameter, CONFINED, False) for parameter in parameters):
        warnings.warn(
            "a model is trained that cgd.confine did not draw: whoever can guess its initial weights (they are the "
            "same for everyone with the same torch seed) knows the model; call cgd.confine(model) first",
            UnconfinedWarning,
            stacklevel=stacklevel,
        )


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_delta(delta: Any) -> float:
    """A standard deviation, or an error that says so."""
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < math.inf:
        raise InputError(f"delta is {delta!r}; it is a standard deviation, a positive number (0 would confine nothing)")
    return float(delta)


def _check_seed(seed: object) -> bytes:
    # Says nothing of the seed itself: an error may end up in a log.
    if not isinstance(seed, bytes):
        raise InputError(
            f"the seed is of type {type(seed).__name__}; it must be {SEED_BYTES} secret bytes, "
            f"such as secrets.token_bytes({SEED_BYTES})"
        )
    if len(seed) != SEED_BYTES:
        raise InputError(f"the seed has {len(seed)} bytes; it must have {SEED_BYTES}")
    return seed
