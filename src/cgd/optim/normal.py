"""Normal random numbers from a secret key, the same bits on every machine.

An origin must be reproducible bit for bit from 32 bytes on another computer. This excludes generators whose stream may
change between versions, and functions whose last bit depends on the processor, such as logarithms of vector libraries.
Here AES-256-CTR generates the random bits, and the normal quantile of Wichura (1988, AS 241, 16 digits) transforms them
with additions, multiplications, divisions and square roots only, each rounded once as IEEE 754 prescribes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

KEY_BYTES = 32
CHUNK = 1 << 14

# Numerators and denominators, highest power first: of the central part, the tails and the far tails.
# `cgd.simulation.vectors` compiles the same coefficients.
MIDDLE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)  # fmt: skip
FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580, 5.46378491116411436990, 6.65790464350110377720),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip
# log(m) = 2·artanh(s) with s = (m − 1)/(m + 1): the coefficients of s²⁰, s¹⁸, …, 1.
ARTANH = tuple(1.0 / power for power in range(21, 0, -2))
LN_2 = 0.6931471805599453
ROOT_HALF = 0.7071067811865476


def standard_normal(key: bytes, count: int) -> Floats:
    """Return `count` independent N(0, 1) numbers, a function of the key alone.

    Examples:
        >>> standard_normal(bytes(32), 3).round(6)
        array([0.093509, 0.069841, 0.593224])
    """
    numbers = np.empty(count)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    for start in range(0, count, CHUNK):
        chunk = numbers[start : start + CHUNK]
        words = np.frombuffer(stream.update(bytes(chunk.nbytes)), dtype="<u8")
        # The midpoints of 2⁵² equal intervals: never 0 or 1, and exact in double precision.
        chunk[:] = normal_quantile(((words >> 12).astype(np.float64) + 0.5) * 2.0**-52)
    return numbers


def normal_quantile(p: Floats) -> Floats:
    """Return the p-quantile of N(0, 1), for 0 < p < 1."""
    q = p - 0.5
    x = q * _ratio(MIDDLE, 0.180625 - q * q)
    tails = np.flatnonzero(np.abs(q) > 0.425)
    if tails.size:
        r = np.sqrt(-_log(np.minimum(p[tails], 1.0 - p[tails])))
        size = np.where(r <= 5.0, _ratio(TAIL, r - 1.6), _ratio(FAR, r - 5.0))
        x[tails] = np.copysign(size, q[tails])
    return x


def _ratio(fraction: tuple[Sequence[float], Sequence[float]], at: Floats) -> Floats:
    numerator, denominator = fraction
    return _horner(numerator, at) / _horner(denominator, at)


def _horner(coefficients: Sequence[float], at: Floats) -> Floats:
    value = np.full_like(at, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= at
        value += coefficient
    return value


def _log(x: Floats) -> Floats:
    """Return the natural logarithm, by exact scaling and a polynomial."""
    mantissa, exponent = np.frexp(x)
    low: npt.NDArray[Any] = mantissa < ROOT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    logarithm: Floats = (exponent - low) * LN_2 + 2.0 * s * _horner(ARTANH, s * s)
    return logarithm
