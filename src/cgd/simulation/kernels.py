"""The arithmetic of a colony of fully-connected networks, compiled: one pass over the samples, all layers fused.

Batched matrix products are a poor fit for a hundred thousand small networks: each is used for a few dozen samples, and
what passes through memory between two products outweighs the arithmetic. Here the weights of one participant, or of
STRIPE members of a row, and a tile of samples stay in the nearest caches on the way through layers 2…N and back, and
features that are zero are skipped.

A *tile* is up to TILE samples of one row of the grid. Weights of layers 2…N (the *head*) are one
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
    add_all,
    add_back_products,
    add_outer,
    add_products,
    add_scaled,
    add_to_all,
    clear,
    compiled,
    copy,
    exp,
    products,
    times_slope,
)

TILE = 64  # samples
BLOCK = 2048  # samples that go through layer 1 before layer 2 pushes it out of the caches
STRIPE = 32  # members of a row
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
    widths, columns = net[0], len(cuts) - 1
    width = widths[0]
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    bias = np.zeros(width, np.float32)
    for c in range(len(first_bias)):
        bias += first_bias[c]
    hidden = np.empty((min(BLOCK, end - start), width), np.float32)
    back = np.empty_like(hidden)
    once, none = np.ones(BLOCK, np.float32), np.empty(0, np.float64)
    loss = 0.0
    for at in range(start, end, BLOCK):
        stop = min(at + BLOCK, end)
        for s in range(at, stop):
            add(fixed[s], bias, hidden[s - at])
            add_products(hidden[s - at], indices, values, indptr[s], indptr[s + 1], first, 0)
        if len(widths) > 1:
            loss += _row_heads(at, stop, rows, columns, targets, hidden, back, heads, first_row, head, net, sums[2])
        else:
            # Nobody has a layer of its own: all columns say the same.
            loss += columns * _output_delta(hidden, back, targets[at:stop], 1, once, none, stop - at, net[3])
            back[: stop - at] *= np.float32(columns)
        for s in range(at, stop):
            for c in range(len(first_bias)):
                add(sums[1][c], back[s - at], sums[1][c])
            for k in range(indptr[s], indptr[s + 1]):
                add_scaled(sums[0][indices[k]], values[k], back[s - at])
    return sums[0], sums[1], sums[2], loss


@compiled
def _row_heads(start, end, rows, columns, targets, hidden, back, heads, first_row, head, net, sums):
    """Layers 2…N of all members of the rows: from the row's sums `hidden` to what flows `back` into them.

    Adds up the gradients of layers 2…N in `sums` and returns the losses. A row shares its activations, so layer 2 of
    all its members is one matrix with the members below each other, and its products are worth a library's.
    """
    widths, biased, activation, loss_kind = net
    width, wide = widths[0], widths[1]
    size = width * wide
    most = min(columns, STRIPE)
    matrix = np.empty((most * wide, width), np.float32)
    bias = np.empty(most * wide, np.float32)
    outs = np.empty(TILE * most * wide, np.float32)
    flows = np.empty((TILE, width), np.float32)
    # What layer 2's own sum needs of the members' deltas is their sum: a product with ones in the right places.
    ones = np.zeros((most * wide, wide), np.float32)
    for o in range(most * wide):
        ones[o, o % wide] = ONE
    together = np.empty((TILE, wide), np.float32)
    weights = np.empty_like(head)
    buffer = np.empty(TILE * np.sum(widths), np.float32)
    deltas = np.empty_like(buffer)
    second = buffer[TILE * width : TILE * (width + wide)].reshape(TILE, wide)
    delta = deltas[TILE * width : TILE * (width + wide)].reshape(TILE, wide)
    once, none = np.ones(TILE * most, np.float32), np.empty(0, np.float64)
    loss = 0.0
    row = np.searchsorted(rows, start, side="right") - 1
    at = start
    while at < end:
        while rows[row + 1] <= at:
            row += 1
        count = min(TILE, end - at, rows[row + 1] - at)
        into = hidden[at - start : at - start + count]
        out = back[at - start : at - start + count]
        wanted = targets[at : at + count]
        activate(into, count, activation)
        for t in range(count):
            clear(out[t])
        for c0 in range(0, columns, STRIPE):
            members = min(STRIPE, columns - c0)
            mine = heads[(row - first_row) * columns + c0 : (row - first_row) * columns + c0 + members]
            for c in range(members):
                part = slice(c * wide, (c + 1) * wide)
                add(mine[c, :size], head[:size], matrix[part].reshape(size))
                if biased[0]:
                    add(mine[c, size : size + wide], head[size : size + wide], bias[part])
            say = outs[: count * members * wide].reshape(count, members * wide)
            np.dot(into, matrix[: members * wide].T, say)
            if biased[0]:
                add_to_all(bias[: members * wide], say, count)
            if len(widths) == 2:
                every = say.reshape(count * members, wide)
                loss += _output_delta(every, every, wanted, members, once, none, count * members, loss_kind)
            else:
                for c in range(members):
                    part = slice(c * wide, (c + 1) * wide)
                    for t in range(count):
                        copy(say[t, part], second[t])
                    add(mine[c], head, weights)
                    loss += _later_layers(weights, net, buffer, deltas, wanted, once, none, sums, count)
                    for t in range(count):
                        copy(delta[t], say[t, part])
            np.dot(say, ones[: members * wide], together[:count])
            add_outer(together, into, sums[:size].reshape(wide, width), count)
            if biased[0]:
                add_all(together, sums[size : size + wide], count)
            np.dot(say, matrix[: members * wide], flows[:count])
            for t in range(count):
                add(flows[t], out[t], out[t])
        for t in range(count):
            times_slope(out[t], into[t], activation)
        at += count
    return loss


@compiled
def towers_gradient(start, end, rows, cuts, data, targets, firsts, first, first_bias, heads, first_row, head, net):
    """Gradient sums over the samples `start` to `end` when every participant has its own features alone.

    The arguments are those of `joint_gradient`, except `firsts`: the origins of layer 1, rows × features × width, from
    `first_row` on; with biases, those of column c are in place features + c.

    Samples without a feature in a column are all the same to its participant: they go through its network as one.
    """
    indptr, indices, values = data
    widths, biased, activation, _ = net
    width, columns, outputs = widths[0], len(cuts) - 1, targets.shape[1]
    features = cuts[columns]
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    weights = np.empty_like(head)
    buffer = np.empty(TILE * np.sum(widths), np.float32)
    hidden = buffer[: TILE * width].reshape(TILE, width)
    deltas = np.empty_like(buffer)
    back = deltas[: TILE * width].reshape(TILE, width)
    deep = len(widths) > 1
    wide = widths[1] if deep else 0
    size = width * wide
    second = buffer[TILE * width : TILE * (width + wide)].reshape(TILE, wide)
    delta = deltas[TILE * width : TILE * (width + wide)].reshape(TILE, wide)
    wanted = np.empty((TILE, outputs), np.float32)
    times = np.ones(TILE, np.float32)
    squares = np.zeros(TILE, np.float64)
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
                    until = k
                    while until < indptr[s + 1] and indices[until] < cuts[c + 1]:
                        until += 1
                    place[s - begin] = until
                    if k == until:
                        empty += ONE
                        add(nothing, targets[s], nothing)
                        for o in range(outputs):
                            squared += np.float64(targets[s, o]) * np.float64(targets[s, o])
                    else:
                        from_[count], to[count], times[count] = k, until, ONE
                        copy(targets[s], wanted[count])
                        copy(own_bias, hidden[count])
                        add_products(hidden[count], indices, values, k, until, own, cuts[c])
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
                if deep:
                    activate(hidden, count, activation)
                    products(hidden, weights[:size].reshape(wide, width), second, count)
                    if biased[0]:
                        add_to_all(weights[size : size + wide], second, count)
                loss += _later_layers(weights, net, buffer, deltas, wanted, times, squares, sums[2], count)
                if deep:
                    add_outer(delta, hidden, sums[2][:size].reshape(wide, width), count)
                    if biased[0]:
                        add_all(delta, sums[2][size : size + wide], count)
                    for t in range(count):
                        clear(back[t])
                        add_back_products(weights[:size].reshape(wide, width), delta[t], back[t])
                        times_slope(back[t], hidden[t], activation)
                for t in range(count):
                    if len(first_bias):
                        add(sums[1][c], back[t], sums[1][c])
                    for k in range(from_[t], to[t]):
                        add_scaled(sums[0][indices[k]], values[k], back[t])
        row += 1
    return sums[0], sums[1], sums[2], loss


@compiled
def _later_layers(weights, net, buffer, deltas, targets, times, squares, sums, count):
    """From what layer 2 says to the outputs, their loss and back to layer 2's deltas; adds up layers 3…N.

    What the layers say lies one after the other in `buffer`, their deltas in the same places of `deltas`. Layer 2 is
    given before its activation. If there is no layer 3, what is given are the outputs.
    """
    widths, biased, activation, loss_kind = net
    last = len(widths) - 1
    w = a = 0
    for layer in range(1, last + 1):
        wide_in, wide_out = widths[layer - 1], widths[layer]
        into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
        a += TILE * wide_in
        if layer > 1:
            out = buffer[a : a + TILE * wide_out].reshape(TILE, wide_out)
            activate(into, count, activation)
            products(into, weights[w : w + wide_in * wide_out].reshape(wide_out, wide_in), out, count)
            if biased[layer - 1]:
                add_to_all(weights[w + wide_in * wide_out : w + (wide_in + 1) * wide_out], out, count)
        w += (wide_in + biased[layer - 1]) * wide_out
    out = buffer[a : a + TILE * widths[last]].reshape(TILE, widths[last])
    delta = deltas[a : a + TILE * widths[last]].reshape(TILE, widths[last])
    loss = _output_delta(out, delta, targets, 1, times, squares, count, loss_kind)
    for layer in range(last, 1, -1):
        wide_in, wide_out = widths[layer - 1], widths[layer]
        delta = deltas[a : a + TILE * wide_out].reshape(TILE, wide_out)
        a -= TILE * wide_in
        into = buffer[a : a + TILE * wide_in].reshape(TILE, wide_in)
        before = deltas[a : a + TILE * wide_in].reshape(TILE, wide_in)
        w -= (wide_in + biased[layer - 1]) * wide_out
        matrix = slice(w, w + wide_in * wide_out)
        add_outer(delta, into, sums[matrix].reshape(wide_out, wide_in), count)
        if biased[layer - 1]:
            add_all(delta, sums[matrix.stop : matrix.stop + wide_out], count)
        for t in range(count):
            clear(before[t])
            add_back_products(weights[matrix].reshape(wide_out, wide_in), delta[t], before[t])
            times_slope(before[t], into[t], activation)
    return loss


@compiled
def _output_delta(out, delta, targets, each, times, squares, count, kind):
    """Set the outputs' deltas and return the loss, of samples that may stand for several; delta may be `out`.

    Such a sample occurs `times`, its targets are summed up, and `squares` is the sum of their squares. If the loss is
    the cross-entropy, the targets of each are probabilities. One line of `targets` is for `each` lines of `out`.
    """
    outputs = out.shape[1]
    loss = 0.0
    if kind == SQUARED_ERROR:
        scale = np.float32(2) / np.float32(outputs)
        for t in range(count):
            target = targets[t // each]
            square = squares[t] if times[t] != 1 else 0.0
            for o in range(outputs):
                said = np.float64(out[t, o])
                error = times[t] * out[t, o] - target[o]
                delta[t, o] = scale * error
                if times[t] == 1:
                    square += np.float64(error) * np.float64(error)
                else:
                    square += (np.float64(times[t]) * said - 2.0 * np.float64(target[o])) * said
            loss += square / outputs
        return loss
    for t in range(count):
        z, d, target = out[t], delta[t], targets[t // each]
        highest = z[0]
        for o in range(1, outputs):
            highest = max(highest, z[o])
        likely = ZERO
        for o in range(outputs):
            d[o] = z[o] - highest
            likely += target[o] * d[o]
        loss -= likely
    shifted = delta[:count].reshape(count * outputs)
    for i in range(len(shifted)):
        shifted[i] = exp(shifted[i])
    # Logarithms are dear: that of a product is the sum. No total is below 1, and few products reach LARGE.
    product = 1.0
    for t in range(count):
        d, target = delta[t], targets[t // each]
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
            d[o] = scale * d[o] - target[o]
    return loss + np.log(product)
