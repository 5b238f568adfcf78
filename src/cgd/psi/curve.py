"""The group of private set intersection: the subgroup of prime order of edwards25519, from libsodium.

Points are rows of 32 bytes. libsodium refuses a point that is not canonical, or not in the subgroup, in every
multiplication, so a point of another member needs no check of its own.

An element is hashed to two field elements, which Elligator 2 maps to two points; their sum is the element's point.
With one map alone, only half of the points could occur, and they could be told from random ones.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import ProtocolError
from cgd.extras import require

require("psi", "private set intersection")

from nacl import bindings, exceptions  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Points = npt.NDArray[np.uint8]

POINT_BYTES, SCALAR_BYTES = 32, 32


def hash_to_points(elements: Sequence[str], key: bytes) -> Points:
    """Return the point of every element; it depends on the key, too."""
    points = bytearray()
    for element in elements:
        digest = hmac.digest(key, element.encode(), "sha512")
        halves = (bindings.crypto_core_ed25519_from_uniform(each) for each in (digest[:32], digest[32:]))
        points += bindings.crypto_core_ed25519_add(*halves)
    return as_points(points)


def multiply(points: Points, scalar: bytes) -> Points:
    """Return every point times the scalar.

    Raises:
        ProtocolError: a point is not one of the group.
    """
    data, products = points.tobytes(), bytearray()
    try:
        for start in range(0, len(data), POINT_BYTES):
            products += bindings.crypto_scalarmult_ed25519_noclamp(scalar, data[start : start + POINT_BYTES])
    except exceptions.CryptoError:
        raise ProtocolError("a point is not one of the group") from None
    return as_points(products)


def derive_scalar(secret: bytes, *context: bytes) -> bytes:
    """Return the scalar of a secret and a context: uniform, except for a bias of 2⁻²⁵⁶."""
    return bytes(bindings.crypto_core_ed25519_scalar_reduce(derive(secret, *context, size=64)))


def divide(dividend: bytes, divisor: bytes) -> bytes:
    """Return the quotient of two scalars."""
    inverse = bindings.crypto_core_ed25519_scalar_invert(divisor)
    return bytes(bindings.crypto_core_ed25519_scalar_mul(dividend, inverse))


def derive(secret: bytes, *context: bytes, size: int = 32) -> bytes:
    """Return pseudorandom bytes of a secret and a context."""
    hashed = hashlib.blake2b(key=secret, digest_size=size, person=b"cgd psi")
    for each in context:
        hashed.update(len(each).to_bytes(8, "little") + each)
    return hashed.digest()


def as_points(data: Any) -> Points:
    """Return bytes as rows of one point each."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, POINT_BYTES)
