"""Compiled operations on short vectors, used by the kernels, and compiled draws of normal numbers.

Numba does not recompile the cached kernels when this file changes: delete the `__pycache__` folder after a change here.

`draw_normals` computes the bits of `cgd.optim.normal`, to draw the origins of many participants fast. Every operation
is rounded once, and none may be reordered or fused: it is compiled without the fast-math flags of the kernels.
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


IDENTITY, RELU, TANH, SIGMOID = range(4)

ZERO = np.float32(0)
ONE = np.float32(1)


# No nnan or ninf: a diverging run must result in NaN.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on its first call and cache the result on disk."""
    compiled_function: Callable[..., Any] = numba.njit(cache=True, **OPTIONS)(function)
    return compiled_function


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a long function as a part of its callers only: alone, with all that it calls, it takes as long again."""
    inlined_function: Callable[..., Any] = numba.njit(inline="always", **OPTIONS)(function)
    return inlined_function


@compiled
def exp(x):
    """Return e^x for x ≤ 0 by the polynomial of the Cephes library, which vectorises; relative error below 2e-7."""
    x = x if not x < np.float32(-87) else np.float32(-87)
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + ONE
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def activate(a, count, kind):
    """Apply the activation to the first `count` rows, in place."""
    for t in range(count):
        row = a[t]
        if kind == RELU:
            for i in range(len(row)):
                row[i] = ZERO if row[i] < 0 else row[i]  # NaN stays NaN
        elif kind == TANH:
            for i in range(len(row)):
                row[i] = np.tanh(row[i])
        elif kind == SIGMOID:
            for i in range(len(row)):
                row[i] = ONE / (ONE + np.exp(-row[i]))


@compiled
def multiply_derivative(delta, a, kind):
    """Multiply `delta` by the derivative of the activation, computed from its value `a`."""
    if kind == RELU:
        for i in range(len(a)):
            delta[i] = delta[i] if a[i] > 0 else ZERO
    elif kind == TANH:
        for i in range(len(a)):
            delta[i] *= ONE - a[i] * a[i]
    elif kind == SIGMOID:
        for i in range(len(a)):
            delta[i] *= a[i] * (ONE - a[i])


@compiled
def clear(out):
    """Set all values to zero."""
    for i in range(len(out)):
        out[i] = ZERO


@compiled
def copy(x, out):
    """Copy x to `out`."""
    for i in range(len(out)):
        out[i] = x[i]


@compiled
def add(x, y, out):
    """Set `out` to x + y; it may be one of them."""
    for i in range(len(out)):
        out[i] = x[i] + y[i]


@compiled
def add_to_rows(x, out, count):
    """Add x to each of the first `count` rows."""
    for t in range(count):
        add(x, out[t], out[t])


@compiled
def add_rows(rows, out, count):
    """Add each of the first `count` rows to `out`."""
    for t in range(count):
        add(rows[t], out, out)


@compiled
def add_matrix(x, out):
    """Add a matrix to the first rows of `out`; Numba takes seconds to compile `out += x`, which may broadcast."""
    for t in range(len(x)):
        add(x[t], out[t], out[t])


@compiled
def add_scaled(out, scale, x):
    """Add scale·x to `out`."""
    for i in range(len(out)):
        out[i] += scale * x[i]


@compiled
def add_products(out, indices, values, k, end, matrix, offset):
    """Add a sparse vector times `matrix`, whose first row belongs to index `offset`; four rows at a time."""
    while k + 4 <= end:
        r0, r1 = matrix[indices[k] - offset], matrix[indices[k + 1] - offset]
        r2, r3 = matrix[indices[k + 2] - offset], matrix[indices[k + 3] - offset]
        v0, v1, v2, v3 = values[k], values[k + 1], values[k + 2], values[k + 3]
        for i in range(len(out)):
            out[i] += v0 * r0[i] + v1 * r1[i] + v2 * r2[i] + v3 * r3[i]
        k += 4
    while k < end:
        add_scaled(out, values[k], matrix[indices[k] - offset])
        k += 1


@compiled
def matrix_products(a, w, out, count):
    """Set out[t, o] to a[t]·w[o], two samples and five outputs at a time, so that loaded values are reused."""
    unrolled = len(w) // 5 * 5
    for t in range(0, count - 1, 2):
        x, y = a[t], a[t + 1]
        for o in range(0, unrolled, 5):
            w0, w1, w2, w3, w4 = w[o], w[o + 1], w[o + 2], w[o + 3], w[o + 4]
            x0 = x1 = x2 = x3 = x4 = y0 = y1 = y2 = y3 = y4 = ZERO
            for i in range(len(x)):
                x0 += w0[i] * x[i]
                x1 += w1[i] * x[i]
                x2 += w2[i] * x[i]
                x3 += w3[i] * x[i]
                x4 += w4[i] * x[i]
                y0 += w0[i] * y[i]
                y1 += w1[i] * y[i]
                y2 += w2[i] * y[i]
                y3 += w3[i] * y[i]
                y4 += w4[i] * y[i]
            p, q = out[t], out[t + 1]
            p[o], p[o + 1], p[o + 2], p[o + 3], p[o + 4] = x0, x1, x2, x3, x4
            q[o], q[o + 1], q[o + 2], q[o + 3], q[o + 4] = y0, y1, y2, y3, y4
        for o in range(unrolled, len(w)):
            out[t, o] = dot(w[o], x)
            out[t + 1, o] = dot(w[o], y)
    if count % 2:
        for o in range(len(w)):
            out[count - 1, o] = dot(w[o], a[count - 1])


@compiled
def dot(x, y):
    """Return the dot product of two vectors."""
    total = ZERO
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled
def add_transposed_product(w, delta, out):
    """Add delta·w to `out`, five rows at a time."""
    unrolled = len(w) // 5 * 5
    for o in range(0, unrolled, 5):
        w0, w1, w2, w3, w4 = w[o], w[o + 1], w[o + 2], w[o + 3], w[o + 4]
        d0, d1, d2, d3, d4 = delta[o], delta[o + 1], delta[o + 2], delta[o + 3], delta[o + 4]
        for i in range(len(out)):
            out[i] += d0 * w0[i] + d1 * w1[i] + d2 * w2[i] + d3 * w3[i] + d4 * w4[i]
    for o in range(unrolled, len(w)):
        add_scaled(out, delta[o], w[o])


@compiled
def add_outer(delta, a, sums, count):
    """Add deltaᵀ·a over the tile to `sums`, four samples at a time."""
    unrolled = count // 4 * 4
    for o in range(len(sums)):
        row = sums[o]
        for t in range(0, unrolled, 4):
            a0, a1, a2, a3 = a[t], a[t + 1], a[t + 2], a[t + 3]
            d0, d1, d2, d3 = delta[t, o], delta[t + 1, o], delta[t + 2, o], delta[t + 3, o]
            for i in range(len(row)):
                row[i] += d0 * a0[i] + d1 * a1[i] + d2 * a2[i] + d3 * a3[i]
        for t in range(unrolled, count):
            add_scaled(row, delta[t, o], a[t])


_MIDDLE, _TAIL, _FAR = (np.array(each) for each in (normal.MIDDLE, normal.TAIL, normal.FAR))
_ARTANH = np.array(normal.ARTANH)
_LN_2, _ROOT_HALF = normal.LN_2, normal.ROOT_HALF


def draw_normals(key: bytes, delta: float, out: npt.NDArray[np.float32]) -> None:
    """Fill `out` with `delta` times the numbers of `standard_normal(key, …)`, rounded to single precision.

    Examples:
        >>> out = np.empty(3, np.float32)
        >>> draw_normals(bytes(32), 1.0, out)
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
