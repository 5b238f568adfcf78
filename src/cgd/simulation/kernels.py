"""The arithmetic of a colony of fully-connected networks, compiled: one pass over the samples, all layers fused.

Batched matrix products are a poor fit for a hundred thousand small networks: each is used for a few dozen samples, and
what passes through memory between two products outweighs the arithmetic. Here one participant's weights and a tile of
samples stay in the nearest caches from the first layer to the last and back, and features that are zero are skipped.

The functions work on a *tile*, up to TILE samples of one row of the grid. Weights of layers 2…N (the *head*) are one
flat vector per participant, in the order of the parameters: weight, bias if there is one, next weight, …
Everything is single precision. Sums are reordered for vector units, so the last bits depend on the processor, but not
on the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

TILE = 64
IDENTITY, RELU, TANH, SIGMOID = range(4)
CROSS_ENTROPY, SQUARED_ERROR = range(2)

_ZERO = np.float32(0)
_ONE = np.float32(1)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # No nnan or ninf: a diverging run must show up as NaN.
    compile_ = numba.njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, cache=True, error_model="numpy")
    compiled: Callable[..., Any] = compile_(function)
    return compiled


@_compiled
def joint_gradient(start, end, rows, cuts, data, targets, fixed, first, first_bias, heads, first_row, head, net):
    """Gradient sums over the samples `start` to `end` when the pre-activations of layer 1 are added over the row.

    With one column of participants this is the horizontal case; with one row as well, centralised training.

    Args:
        start: the first sample.
        end: one past the last sample.
        rows: where the samples of each row begin, and at last their number.
        cuts: where the features of each column begin, and at last their number.
        data: the samples as compressed rows: where each begins, the features that are not zero, their values.
        targets: what the network should say, samples × outputs.
        fixed: what the origins of layer 1 give for each sample, samples × width.
        first: the displacement of layer 1, features × width.
        first_bias: the displacement of its biases, columns × width (no columns: no biases).
        heads: the origins of layers 2…N, participants × numbers, from `first_row` on.
        first_row: the row of the first participant in `heads`.
        head: the displacement of layers 2…N.
        net: the widths of the layers, which of layers 2…N have biases, the activation, the loss.

    Returns:
        The sums for layer 1, its biases and layers 2…N, and the sum of the losses over samples and columns.
    """
    indptr, indices, values = data
    widths, biased, activation, loss_kind = net
    width, columns = widths[0], len(cuts) - 1
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    weights = np.empty_like(head)
    buffer = np.empty(TILE * np.sum(widths), np.float32)
    hidden = buffer[: TILE * width].reshape(TILE, width)
    deltas = np.empty_like(buffer)
    back = deltas[: TILE * width].reshape(TILE, width)
    scratch = np.empty(width, np.float32)  # one sample's, rather than the tile's: it stays in the nearest cache
    second = np.empty((TILE, widths[1] if len(widths) > 1 else 1), np.float32)
    place = np.empty(TILE, np.int64)
    times = np.ones(TILE, np.float32)
    bias = np.zeros(width, np.float32)
    for c in range(len(first_bias)):
        bias += first_bias[c]
    loss = 0.0
    row = np.searchsorted(rows, start, side="right") - 1
    at = start
    while at < end:
        while rows[row + 1] <= at:
            row += 1
        count = min(TILE, end - at, rows[row + 1] - at)
        for t in range(count):
            place[t] = indptr[at + t]
            _add(fixed[at + t], bias, hidden[t])
            _add_products(hidden[t], indices, values, indptr[at + t], indptr[at + t + 1], first, 0)
        if len(widths) > 1:
            _activate(hidden, count, activation)
        for t in range(count):
            _clear(second[t])
        for c in range(columns):
            _add(heads[(row - first_row) * columns + c], head, weights)
            _forward(weights, widths, biased, activation, buffer, count)
            loss += _output_delta(buffer, deltas, widths, targets[at : at + count], times, count, loss_kind)
            _backward(weights, widths, biased, activation, buffer, deltas, sums[2], count)
            if len(widths) > 1:
                # The row shares its activations, so the weights of layer 2 need the columns' deltas in sum only.
                after = TILE * widths[0]
                delta = deltas[after : after + TILE * widths[1]].reshape(TILE, widths[1])
                for t in range(count):
                    _add(second[t], delta[t], second[t])
            for t in range(count):
                k, stop = place[t], indptr[at + t + 1]
                touched = k < stop and indices[k] < cuts[c + 1]
                if not touched and len(first_bias) == 0:
                    continue
                if len(widths) > 1:
                    _to_first_layer(weights, widths, activation, hidden[t], delta[t], scratch)
                else:
                    _copy(back[t], scratch)
                if len(first_bias):
                    _add(sums[1][c], scratch, sums[1][c])
                while k < stop and indices[k] < cuts[c + 1]:
                    _add_scaled(sums[0][indices[k]], values[k], scratch)
                    k += 1
                place[t] = k
        if len(widths) > 1:
            _add_outer(second, hidden, sums[2][: widths[0] * widths[1]].reshape(widths[1], widths[0]), count)
        at += count
    return sums[0], sums[1], sums[2], loss


@_compiled
def towers_gradient(start, end, rows, cuts, data, targets, firsts, first, first_bias, heads, first_row, head, net):
    """Gradient sums over the samples `start` to `end` when every participant has its own features alone.

    The arguments are those of `joint_gradient`, except `firsts`: the origins of layer 1, rows × features × width, from
    `first_row` on; with biases, those of column c are in place features + c.

    Samples without a feature in a column are all the same to its participant: they go through its network as one.
    """
    indptr, indices, values = data
    widths, biased, activation, loss_kind = net
    width, columns, outputs = widths[0], len(cuts) - 1, targets.shape[1]
    features = cuts[columns]
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    weights = np.empty_like(head)
    buffer = np.empty(TILE * np.sum(widths), np.float32)
    hidden = buffer[: TILE * width].reshape(TILE, width)
    deltas = np.empty_like(buffer)
    back = deltas[: TILE * width].reshape(TILE, width)
    wanted = np.empty((TILE, outputs), np.float32)
    times = np.ones(TILE, np.float32)
    who = np.empty(TILE, np.int64)
    from_ = np.empty(TILE, np.int64)
    to = np.empty(TILE, np.int64)
    own = np.empty((np.max(cuts[1:] - cuts[:-1]), width), np.float32)
    own_bias = np.zeros(width, np.float32)
    place = np.empty(np.max(rows[1:] - rows[:-1]), np.int64)
    nothing = np.empty(outputs, np.float32)
    loss = 0.0
    row = np.searchsorted(rows, start, side="right") - 1
    while row < len(rows) - 1 and rows[row] < end:
        begin, stop = max(rows[row], start), min(rows[row + 1], end)
        for s in range(begin, stop):
            place[s - begin] = indptr[s]
        origin = firsts[row - first_row]
        for c in range(columns):
            for f in range(cuts[c], cuts[c + 1]):
                _add(origin[f], first[f], own[f - cuts[c]])
            if len(first_bias):
                _add(origin[features + c], first_bias[c], own_bias)
            _add(heads[(row - first_row) * columns + c], head, weights)
            empty = _ZERO
            _clear(nothing)
            s = begin
            while s < stop or empty > 0:
                count = 0
                while s < stop and count < TILE - 1:
                    k = place[s - begin]
                    after = k
                    while after < indptr[s + 1] and indices[after] < cuts[c + 1]:
                        after += 1
                    place[s - begin] = after
                    if k == after:
                        empty += _ONE
                        _add(nothing, targets[s], nothing)
                    else:
                        who[count], from_[count], to[count], times[count] = s, k, after, _ONE
                        _copy(targets[s], wanted[count])
                        _copy(own_bias, hidden[count])
                        _add_products(hidden[count], indices, values, k, after, own, cuts[c])
                        count += 1
                    s += 1
                if s == stop and empty > 0:
                    from_[count], to[count], times[count] = 0, 0, empty
                    _copy(nothing, wanted[count])
                    _copy(own_bias, hidden[count])
                    count += 1
                    empty = _ZERO
                if count == 0:
                    continue
                if len(widths) > 1:
                    _activate(hidden, count, activation)
                _forward(weights, widths, biased, activation, buffer, count)
                loss += _output_delta(buffer, deltas, widths, wanted, times, count, loss_kind)
                _backward(weights, widths, biased, activation, buffer, deltas, sums[2], count)
                if len(widths) > 1:
                    after = TILE * widths[0]
                    delta = deltas[after : after + TILE * widths[1]].reshape(TILE, widths[1])
                    _add_outer(delta, hidden, sums[2][: widths[0] * widths[1]].reshape(widths[1], widths[0]), count)
                    for t in range(count):
                        _to_first_layer(weights, widths, activation, hidden[t], delta[t], back[t])
                for t in range(count):
                    if len(first_bias):
                        _add(sums[1][c], back[t], sums[1][c])
                    for k in range(from_[t], to[t]):
                        _add_scaled(sums[0][indices[k]], values[k], back[t])
        row += 1
    return sums[0], sums[1], sums[2], loss


@_compiled
def _forward(weights, widths, biased, activation, buffer, count):
    """Layers 2…N for a tile; the activations of all layers lie one after the other in `buffer`."""
    w = a = 0
    for layer in range(1, len(widths)):
        wide_in, wide_out = widths[layer - 1], widths[layer]
        into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
        a += TILE * wide_in
        out = buffer[a : a + TILE * wide_out].reshape(TILE, wide_out)
        _products(into, weights[w : w + wide_in * wide_out].reshape(wide_out, wide_in), out, count)
        w += wide_in * wide_out
        if biased[layer - 1]:
            for t in range(count):
                _add(out[t], weights[w : w + wide_out], out[t])
            w += wide_out
        if layer < len(widths) - 1:
            _activate(out, count, activation)


@_compiled
def _backward(weights, widths, biased, activation, buffer, deltas, sums, count):
    """From the outputs' deltas to those of layer 2's outputs; adds up all weights but those of layer 2, and biases."""
    w = len(weights)
    a = len(buffer) - TILE * widths[-1]
    for layer in range(len(widths) - 1, 0, -1):
        wide_in, wide_out = widths[layer - 1], widths[layer]
        delta = deltas[a : a + TILE * wide_out].reshape(TILE, wide_out)
        if biased[layer - 1]:
            w -= wide_out
            for t in range(count):
                _add(sums[w : w + wide_out], delta[t], sums[w : w + wide_out])
        w -= wide_in * wide_out
        if layer > 1:
            a -= TILE * wide_in
            into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
            before = deltas[a : a + TILE * wide_in].reshape(TILE, wide_in)
            _add_outer(delta, into, sums[w : w + wide_in * wide_out].reshape(wide_out, wide_in), count)
            matrix = weights[w : w + wide_in * wide_out].reshape(wide_out, wide_in)
            for t in range(count):
                _back_products(matrix, delta[t], before[t])
                _times_slope(before[t], into[t], activation)


@_compiled
def _to_first_layer(weights, widths, activation, hidden, delta, back):
    _back_products(weights[: widths[0] * widths[1]].reshape(widths[1], widths[0]), delta, back)
    _times_slope(back, hidden, activation)


@_compiled
def _output_delta(buffer, deltas, widths, targets, times, count, kind):
    """Set the outputs' deltas, of samples that occur `times` with targets that are summed up; return the loss.

    The targets of a sample are probabilities if the loss is the cross-entropy.
    """
    outputs = widths[-1]
    last = len(buffer) - TILE * outputs
    out = buffer[last:].reshape(TILE, outputs)
    delta = deltas[last:].reshape(TILE, outputs)
    loss = 0.0
    if kind == SQUARED_ERROR:
        # Σ(o − t)² without its constant Σt², which the caller adds: summed targets do not tell it.
        scale = np.float32(2) / np.float32(outputs)
        for t in range(count):
            for o in range(outputs):
                delta[t, o] = scale * (times[t] * out[t, o] - targets[t, o])
                loss += (times[t] * out[t, o] - np.float32(2) * targets[t, o]) * out[t, o] / outputs
        return loss
    for t in range(count):
        z, d = out[t], delta[t]
        highest = z[0]
        for o in range(1, outputs):
            highest = max(highest, z[o])
        likely = _ZERO
        for o in range(outputs):
            d[o] = z[o] - highest
            likely += targets[t, o] * d[o]
        loss -= likely
    shifted = deltas[last : last + count * outputs]
    for i in range(len(shifted)):
        shifted[i] = _exp(shifted[i])
    for t in range(count):
        d = delta[t]
        total = _ZERO
        for o in range(outputs):
            total += d[o]
        loss += times[t] * np.log(total)
        scale = times[t] / total
        for o in range(outputs):
            d[o] = scale * d[o] - targets[t, o]
    return loss


@_compiled
def _exp(x):
    """e^x for x ≤ 0 in vector form, by the Cephes library's polynomial; the relative error is below 2e-7."""
    x = x if not x < np.float32(-87) else np.float32(-87)
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def _activate(a, count, kind):
    for t in range(count):
        row = a[t]
        if kind == RELU:
            for i in range(len(row)):
                row[i] = _ZERO if row[i] < 0 else row[i]  # NaN stays NaN
        elif kind == TANH:
            for i in range(len(row)):
                row[i] = np.tanh(row[i])
        elif kind == SIGMOID:
            for i in range(len(row)):
                row[i] = _ONE / (_ONE + np.exp(-row[i]))


@_compiled
def _times_slope(delta, a, kind):
    """Multiply by the activation's derivative, told from its value."""
    if kind == RELU:
        for i in range(len(a)):
            delta[i] = delta[i] if a[i] > 0 else _ZERO
    elif kind == TANH:
        for i in range(len(a)):
            delta[i] *= _ONE - a[i] * a[i]
    elif kind == SIGMOID:
        for i in range(len(a)):
            delta[i] *= a[i] * (_ONE - a[i])


@_compiled
def _clear(out):
    for i in range(len(out)):
        out[i] = _ZERO


@_compiled
def _copy(x, out):
    for i in range(len(out)):
        out[i] = x[i]


@_compiled
def _add(x, y, out):
    for i in range(len(out)):
        out[i] = x[i] + y[i]


@_compiled
def _add_scaled(out, scale, x):
    for i in range(len(out)):
        out[i] += scale * x[i]


@_compiled
def _add_products(out, indices, values, k, end, matrix, offset):
    """Add a sparse vector times `matrix`, whose first row belongs to index `offset`; four rows at a time."""
    while k + 4 <= end:
        r0, r1 = matrix[indices[k] - offset], matrix[indices[k + 1] - offset]
        r2, r3 = matrix[indices[k + 2] - offset], matrix[indices[k + 3] - offset]
        v0, v1, v2, v3 = values[k], values[k + 1], values[k + 2], values[k + 3]
        for i in range(len(out)):
            out[i] += v0 * r0[i] + v1 * r1[i] + v2 * r2[i] + v3 * r3[i]
        k += 4
    while k < end:
        _add_scaled(out, values[k], matrix[indices[k] - offset])
        k += 1


@_compiled
def _products(a, w, out, count):
    """out[t, o] = a[t]·w[o], two samples and five outputs at a time: what is loaded is used several times."""
    wide = len(w) // 5 * 5
    for t in range(0, count - 1, 2):
        x, y = a[t], a[t + 1]
        for o in range(0, wide, 5):
            w0, w1, w2, w3, w4 = w[o], w[o + 1], w[o + 2], w[o + 3], w[o + 4]
            x0 = x1 = x2 = x3 = x4 = y0 = y1 = y2 = y3 = y4 = _ZERO
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
        for o in range(wide, len(w)):
            out[t, o] = _dot(w[o], x)
            out[t + 1, o] = _dot(w[o], y)
    if count % 2:
        for o in range(len(w)):
            out[count - 1, o] = _dot(w[o], a[count - 1])


@_compiled
def _dot(x, y):
    total = _ZERO
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@_compiled
def _back_products(w, delta, out):
    """Out = delta·w, five rows at a time."""
    wide = len(w) // 5 * 5
    _clear(out)
    for o in range(0, wide, 5):
        w0, w1, w2, w3, w4 = w[o], w[o + 1], w[o + 2], w[o + 3], w[o + 4]
        d0, d1, d2, d3, d4 = delta[o], delta[o + 1], delta[o + 2], delta[o + 3], delta[o + 4]
        for i in range(len(out)):
            out[i] += d0 * w0[i] + d1 * w1[i] + d2 * w2[i] + d3 * w3[i] + d4 * w4[i]
    for o in range(wide, len(w)):
        _add_scaled(out, delta[o], w[o])


@_compiled
def _add_outer(delta, a, sums, count):
    """Sums += deltaᵀ·a over the tile, four samples at a time."""
    whole = count // 4 * 4
    for o in range(len(sums)):
        row = sums[o]
        for t in range(0, whole, 4):
            a0, a1, a2, a3 = a[t], a[t + 1], a[t + 2], a[t + 3]
            d0, d1, d2, d3 = delta[t, o], delta[t + 1, o], delta[t + 2, o], delta[t + 3, o]
            for i in range(len(row)):
                row[i] += d0 * a0[i] + d1 * a1[i] + d2 * a2[i] + d3 * a3[i]
        for t in range(whole, count):
            _add_scaled(row, delta[t, o], a[t])
