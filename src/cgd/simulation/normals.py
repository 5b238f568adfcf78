"""A compiled version of `cgd.optim.normal` with the same bits, to draw the origins of many participants fast.

Every operation is rounded once, and none may be reordered or fused: this module is compiled without the fast-math flags
of the kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cgd.optim import normal

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_MIDDLE, _TAIL, _FAR = (np.array(each) for each in (normal.MIDDLE, normal.TAIL, normal.FAR))
_ARTANH = np.array(normal.ARTANH)
_LN_2, _ROOT_HALF = normal.LN_2, normal.ROOT_HALF


def draw(key: bytes, delta: float, out: npt.NDArray[np.float32]) -> None:
    """Fill `out` with `delta` times the numbers of `standard_normal(key, …)`, rounded to single precision.

    Examples:
        >>> out = np.empty(3, np.float32)
        >>> draw(bytes(32), 1.0, out)
        >>> bool((out == normal.standard_normal(bytes(32), 3).astype(np.float32)).all())
        True
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(stream.update(bytes(8 * out.size)), dtype="<u8")
    _quantiles(words, delta, out)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


@_compiled
def _quantiles(words, delta, out):
    for i in range(len(out)):
        p = (np.float64(words[i] >> np.uint64(12)) + 0.5) * 2.0**-52
        q = p - 0.5
        if abs(q) <= 0.425:
            x = q * _ratio(_MIDDLE, 0.180625 - q * q)
        else:
            r = math.sqrt(-_log(min(p, 1.0 - p)))
            x = math.copysign(_ratio(_TAIL, r - 1.6) if r <= 5.0 else _ratio(_FAR, r - 5.0), q)
        out[i] = x * delta  # rounded once more, to the type of `out`


@_compiled
def _ratio(fraction, at):
    return _horner(fraction[0], at) / _horner(fraction[1], at)


@_compiled
def _horner(coefficients, at):
    value = coefficients[0]
    for i in range(1, len(coefficients)):
        value = value * at + coefficients[i]
    return value


@_compiled
def _log(x):
    mantissa, exponent = math.frexp(x)
    if mantissa < _ROOT_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * _LN_2 + 2.0 * s * _horner(_ARTANH, s * s)
