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

import numpy as np

from cgd.simulation.vectors import (
    ONE,
    ZERO,
    activate,
    add,
    add_back_products,
    add_outer,
    add_products,
    add_scaled,
    clear,
    compiled,
    copy,
    exp,
    products,
    times_slope,
)

TILE = 64
CROSS_ENTROPY, SQUARED_ERROR = range(2)
LARGE = 1e100


@compiled
def first_layer(start, end, data, first, out):
    """Add what a first layer gives for the samples `start` to `end`; `first` is features × width."""
    indptr, indices, values = data
    for s in range(start, end):
        add_products(out[s], indices, values, indptr[s], indptr[s + 1], first, 0)


@compiled
def joint_gradient(start, end, rows, cuts, data, targets, fixed, first, first_bias, heads, first_row, head, net):
    """Gradient sums over the samples `start` to `end` when the pre-activations of layer 1 are added over the row.

    Everybody's loss depends on everybody's layer 1 then, so the row adds what flows back into it, too. With one column
    this is the horizontal case; with one row as well, centralised training.

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
        The sums for layer 1, its biases and layers 2…N, and of the losses, all over samples and columns.
    """
    indptr, indices, values = data
    widths, biased, activation, loss_kind = net
    width, columns = widths[0], len(cuts) - 1
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    weights = np.empty_like(head)
    buffer = np.empty(TILE * np.sum(widths), np.float32)
    hidden = buffer[: TILE * width].reshape(TILE, width)
    deltas = np.empty_like(buffer)
    back = np.empty((TILE, width), np.float32)
    second = np.empty((TILE, widths[1] if len(widths) > 1 else 1), np.float32)
    times = np.ones(TILE, np.float32)
    squares = np.zeros(TILE, np.float64)
    bias = np.zeros(width, np.float32)
    for c in range(len(first_bias)):
        bias += first_bias[c]
    # Where the deltas of layer 2's outputs begin; of layer 1's, if there is no other.
    after = TILE * width if len(widths) > 1 else 0
    wide = widths[1] if len(widths) > 1 else width
    loss = 0.0
    row = np.searchsorted(rows, start, side="right") - 1
    at = start
    while at < end:
        while rows[row + 1] <= at:
            row += 1
        count = min(TILE, end - at, rows[row + 1] - at)
        for t in range(count):
            clear(back[t])
            clear(second[t])
            add(fixed[at + t], bias, hidden[t])
            add_products(hidden[t], indices, values, indptr[at + t], indptr[at + t + 1], first, 0)
        if len(widths) > 1:
            activate(hidden, count, activation)
        for c in range(columns):
            add(heads[(row - first_row) * columns + c], head, weights)
            _forward(weights, widths, biased, activation, buffer, count)
            loss += _output_delta(buffer, deltas, widths, targets[at : at + count], times, squares, count, loss_kind)
            _backward(weights, widths, biased, activation, buffer, deltas, sums[2], count)
            delta = deltas[after : after + TILE * wide].reshape(TILE, wide)
            for t in range(count):
                if len(widths) > 1:
                    # The row shares its activations: layer 2's weights need the columns' deltas in sum only.
                    add(second[t], delta[t], second[t])
                    add_back_products(weights[: width * wide].reshape(wide, width), delta[t], back[t])
                else:
                    add(back[t], delta[t], back[t])
        if len(widths) > 1:
            add_outer(second, hidden, sums[2][: widths[0] * widths[1]].reshape(widths[1], widths[0]), count)
        for t in range(count):
            if len(widths) > 1:
                times_slope(back[t], hidden[t], activation)
            for c in range(len(first_bias)):
                add(sums[1][c], back[t], sums[1][c])
            for k in range(indptr[at + t], indptr[at + t + 1]):
                add_scaled(sums[0][indices[k]], values[k], back[t])
        at += count
    return sums[0], sums[1], sums[2], loss


@compiled
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
    squares = np.zeros(TILE, np.float64)
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
                add(origin[f], first[f], own[f - cuts[c]])
            if len(first_bias):
                add(origin[features + c], first_bias[c], own_bias)
            add(heads[(row - first_row) * columns + c], head, weights)
            empty = ZERO
            clear(nothing)
            squared = 0.0
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
                        empty += ONE
                        add(nothing, targets[s], nothing)
                        for o in range(outputs):
                            squared += np.float64(targets[s, o]) * np.float64(targets[s, o])
                    else:
                        who[count], from_[count], to[count], times[count] = s, k, after, ONE
                        copy(targets[s], wanted[count])
                        copy(own_bias, hidden[count])
                        add_products(hidden[count], indices, values, k, after, own, cuts[c])
                        count += 1
                    s += 1
                if s == stop and empty > 0:
                    from_[count], to[count], times[count], squares[count] = 0, 0, empty, squared
                    copy(nothing, wanted[count])
                    copy(own_bias, hidden[count])
                    count += 1
                    empty = ZERO
                if count == 0:
                    continue
                if len(widths) > 1:
                    activate(hidden, count, activation)
                _forward(weights, widths, biased, activation, buffer, count)
                loss += _output_delta(buffer, deltas, widths, wanted, times, squares, count, loss_kind)
                _backward(weights, widths, biased, activation, buffer, deltas, sums[2], count)
                if len(widths) > 1:
                    after = TILE * widths[0]
                    delta = deltas[after : after + TILE * widths[1]].reshape(TILE, widths[1])
                    add_outer(delta, hidden, sums[2][: widths[0] * widths[1]].reshape(widths[1], widths[0]), count)
                    for t in range(count):
                        clear(back[t])
                        add_back_products(weights[: width * widths[1]].reshape(widths[1], width), delta[t], back[t])
                        times_slope(back[t], hidden[t], activation)
                for t in range(count):
                    if len(first_bias):
                        add(sums[1][c], back[t], sums[1][c])
                    for k in range(from_[t], to[t]):
                        add_scaled(sums[0][indices[k]], values[k], back[t])
        row += 1
    return sums[0], sums[1], sums[2], loss


@compiled
def _forward(weights, widths, biased, activation, buffer, count):
    """Layers 2…N for a tile; the activations of all layers lie one after the other in `buffer`."""
    w = a = 0
    for layer in range(1, len(widths)):
        wide_in, wide_out = widths[layer - 1], widths[layer]
        into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
        a += TILE * wide_in
        out = buffer[a : a + TILE * wide_out].reshape(TILE, wide_out)
        products(into, weights[w : w + wide_in * wide_out].reshape(wide_out, wide_in), out, count)
        w += wide_in * wide_out
        if biased[layer - 1]:
            for t in range(count):
                add(out[t], weights[w : w + wide_out], out[t])
            w += wide_out
        if layer < len(widths) - 1:
            activate(out, count, activation)


@compiled
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
                add(sums[w : w + wide_out], delta[t], sums[w : w + wide_out])
        w -= wide_in * wide_out
        if layer > 1:
            a -= TILE * wide_in
            into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
            before = deltas[a : a + TILE * wide_in].reshape(TILE, wide_in)
            add_outer(delta, into, sums[w : w + wide_in * wide_out].reshape(wide_out, wide_in), count)
            matrix = weights[w : w + wide_in * wide_out].reshape(wide_out, wide_in)
            for t in range(count):
                clear(before[t])
                add_back_products(matrix, delta[t], before[t])
                times_slope(before[t], into[t], activation)


@compiled
def _output_delta(buffer, deltas, widths, targets, times, squares, count, kind):
    """Set the outputs' deltas and return the loss, of samples that may stand for several.

    Such a sample occurs `times`, its targets are summed up, and `squares` is the sum of their squares. If the loss is
    the cross-entropy, the targets of each are probabilities.
    """
    outputs = widths[-1]
    last = len(buffer) - TILE * outputs
    out = buffer[last:].reshape(TILE, outputs)
    delta = deltas[last:].reshape(TILE, outputs)
    loss = 0.0
    if kind == SQUARED_ERROR:
        scale = np.float32(2) / np.float32(outputs)
        for t in range(count):
            square = squares[t] if times[t] != 1 else 0.0
            for o in range(outputs):
                error = times[t] * out[t, o] - targets[t, o]
                delta[t, o] = scale * error
                if times[t] == 1:
                    square += np.float64(error) * np.float64(error)
                else:
                    said = np.float64(out[t, o])
                    square += (np.float64(times[t]) * said - 2.0 * np.float64(targets[t, o])) * said
            loss += square / outputs
        return loss
    for t in range(count):
        z, d = out[t], delta[t]
        highest = z[0]
        for o in range(1, outputs):
            highest = max(highest, z[o])
        likely = ZERO
        for o in range(outputs):
            d[o] = z[o] - highest
            likely += targets[t, o] * d[o]
        loss -= likely
    shifted = deltas[last : last + count * outputs]
    for i in range(len(shifted)):
        shifted[i] = exp(shifted[i])
    # Logarithms are dear: that of a product is the sum. No total is below 1, and few products reach LARGE.
    product = 1.0
    for t in range(count):
        d = delta[t]
        total = ZERO
        for o in range(outputs):
            total += d[o]
        if times[t] == 1:
            product *= np.float64(total)
            if product > LARGE:
                loss += np.log(product)
                product = 1.0
        else:
            loss += times[t] * np.log(total)
        scale = times[t] / total
        for o in range(outputs):
            d[o] = scale * d[o] - targets[t, o]
    return loss + np.log(product)
