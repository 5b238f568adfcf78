"""Digests of the results of golden runs, fixed keys, and checks that no digest depends on the machine."""

from __future__ import annotations

import hmac
import threading
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zmq.utils import z85

from cgd.federation.keys import Keys
from cgd.secagg.fixed_point import FixedPoint
from support.federations import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from cgd.transport.tap import Addend

    Digests = dict[str, str]  # by label

FEDERATION = "trial"
BOUND = 2.0**22
STEPS = 6
SMALL = NAMES[:3]
# The bound of the error of gradients, in units in the last place of their largest value: of gradients computed in their
# own type, and of those computed in double precision and then rounded.
COMPUTED, CONVERTED = 16.0, 2.0


def digest(*parts: Any) -> str:
    """Return the digest of concatenated tensors, bytes or texts."""
    hashed = sha256()
    for part in parts:
        content = part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else part
        hashed.update(content.encode() if isinstance(content, str) else content)
    return hashed.hexdigest()


def fixed_keys(name: str) -> Keys:
    """Derive the keys of a participant from its name."""
    secret, seed = (sha256(f"golden {which} of {name}".encode()).digest() for which in ("secret", "seed"))
    curve = z85.encode(secret)
    signing = Ed25519PrivateKey.from_private_bytes(_signing_secret(seed)).public_key().public_bytes_raw()
    return Keys(name, (zmq.curve_public(curve) + z85.encode(signing)).decode(), curve, seed)


def _signing_secret(seed: bytes) -> bytes:
    return hmac.digest(seed, b"cgd signing key", "sha256")


class Roundings:
    """Records how close encoded values are to the middle between two ring elements.

    Args:
        errors: the largest error of a value, in units in the last place of the largest value.

    Attributes:
        least: the smallest distance to the middle between two elements, in units of that error.
    """

    def __init__(self, errors: float = COMPUTED) -> None:
        self._errors = errors
        self.least = float("inf")
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all encoded values, and fail at the end if the digests of this run may depend on the machine."""
        original = FixedPoint.encode

        def encode(own: FixedPoint, values: npt.NDArray[Any], weight: float = 1.0, **options: Any) -> npt.NDArray[Any]:
            self._record(own, np.asarray(values), weight)
            return original(own, values, weight, **options)

        with patch.object(FixedPoint, "encode", encode):
            yield
        assert self.least > 1, f"a value is rounded too close to a tie ({self.least:.2g} errors); use other data"

    def _record(self, fixed_point: FixedPoint, values: npt.NDArray[Any], weight: float) -> None:
        if values.dtype.kind != "f" or values.size < 2:  # a single value is a weight, a quotient that is rounded once
            return
        scaled = values.astype(np.float64) * weight * 2.0**fixed_point.fraction_bits
        distance = np.abs(scaled - np.floor(scaled) - 0.5)
        size = np.maximum(np.abs(values).max(), 1.0) * weight * 2.0**fixed_point.fraction_bits
        error = self._errors * np.finfo(values.dtype).eps * size
        with self._lock:
            self.least = min(self.least, float(distance.min() / error))


class Contexts:
    """Records the settings of every sum of one member, as the members compare them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def before_sum(self, addend: Addend) -> None:
        step = None if addend.step is None else (addend.step.slot, addend.step.number)
        shape = list(addend.values.shape)
        self.lines.append(f"{shape} {addend.values.dtype} {addend.weight!r} {step} {addend.context}")

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        pass


def equal_value(values: Iterable[Any]) -> Any:
    """Check that all values are equal, and return the first."""
    first, *others = values
    assert all(torch.equal(first, each) if isinstance(first, torch.Tensor) else first == each for each in others)
    return first
