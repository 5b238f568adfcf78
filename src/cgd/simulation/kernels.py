"""Compiled gradient kernels for many fully-connected networks: one pass over the samples, all layers fused.

Batched matrix products are slow for a hundred thousand small networks: each is used for a few dozen samples, and the
memory traffic between two products costs more than the arithmetic. Here the weights of one participant, or of
STRIPE_MEMBERS members of a row, and a tile of samples stay in the fastest caches during the forward and the backward
pass through layers 2…N, and features that are zero are skipped.

A *tile* is up to TILE_SAMPLES samples of one row of the grid. Weights of layers 2…N (the *head*) are one
flat vector per participant, in the order of the parameters: weight, bias if there is one, next weight, …
All arithmetic is single precision. Sums are reordered for vector units, so the last bits depend on the processor, but
not on the number of threads.
"""

from __future__ import annotations

import numpy as np

from cgd.simulation.first_layer import add_gradient_of_block, add_products_of_samples
from cgd.simulation.vectors import (
    ONE,
    ZERO,
    activate,
    add,
    add_outer,
    add_products,
    add_rows,
    add_scaled,
    add_to_rows,
    add_transposed_product,
    clear,
    compiled,
    copy,
    exp,
    matrix_products,
    multiply_derivative,
)

TILE_SAMPLES = 64
STRIPE_MEMBERS = 32
CROSS_ENTROPY, SQUARED_ERROR = range(2)
MAX_PRODUCT = 1e100


@compiled
def joint_gradient(
    start, end, row_offsets, column_offsets, samples, targets, origin_z, first, first_bias, heads, first_row, head, net
):
    """Return gradient sums over the samples `start` to `end` when the row adds its pre-activations of layer 1.

    The loss of each member then depends on layer 1 of all members, so the row also adds the gradients with respect to
    the pre-activations. With one column this is the horizontal case; with one row as well, centralised training.

    Args:
        start: first sample.
        end: one past the last sample.
        row_offsets: index of the first sample of each row, then the number of samples.
        column_offsets: index of the first feature of each column, then the number of features.
        samples: all samples, of `BlockedSamples`; a block begins at `start`, and none contains `end` - 1 and `end`.
        targets: target outputs, samples × outputs.
        origin_z: pre-activations of layer 1 from the origins alone, samples × width.
        first: displacement of layer 1, features × width.
        first_bias: displacement of its biases, columns × width; 0 × width without biases.
        heads: origins of layers 2…N, participants × head size, from `first_row` on.
        first_row: row of the first participant in `heads`.
        head: displacement of layers 2…N.
        net: widths of the layers, flags of layers 2…N that have biases, activation, loss.

    Returns:
        The gradient sums for layer 1, its biases and layers 2…N, and the sum of the losses, over samples and columns.
    """
    widths, columns = net[0], len(column_offsets) - 1
    width = widths[0]
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    bias = np.zeros(width, np.float32)
    for c in range(len(first_bias)):
        add(first_bias[c], bias, bias)
    block_samples = np.max(samples.offsets[1:] - samples.offsets[:-1])
    hidden = np.empty((block_samples, width), np.float32)
    back = np.empty_like(hidden)
    unit_counts, no_squares = np.ones(block_samples, np.float32), np.empty(0, np.float64)
    loss = 0.0
    block = np.searchsorted(samples.offsets, start)
    while samples.offsets[block] < end:
        begin, stop = samples.offsets[block], samples.offsets[block + 1]
        for s in range(begin, stop):
            add(origin_z[s], bias, hidden[s - begin])
        add_products_of_samples(begin, stop, samples, first, hidden)
        if len(widths) > 1:
            loss += row_heads(
                begin, stop, row_offsets, columns, targets, hidden, back, heads, first_row, head, net, sums[2]
            )
        else:
            # There is no layer 2: all columns have the same outputs.
            block_targets = targets[begin:stop]
            loss += columns * output_delta(
                hidden, back, block_targets, 1, unit_counts, no_squares, stop - begin, net[3]
            )
            for t in range(stop - begin):
                for i in range(width):
                    back[t, i] *= np.float32(columns)
        for c in range(len(first_bias)):
            add_rows(back, sums[1][c], stop - begin)
        add_gradient_of_block(samples, block, back, sums[0])
        block += 1
    return sums[0], sums[1], sums[2], loss


@compiled
def row_heads(start, end, row_offsets, columns, targets, hidden, back, heads, first_row, head, net, sums):
    """Run layers 2…N of all members of the rows forward and backward; return the sum of the losses.

    Reads the rows' pre-activations in `hidden`, writes the gradients with respect to them to `back`, and adds the
    gradients of layers 2…N to `sums`. The members of a row share the activations of layer 1, so layer 2 of all members
    is one stacked matrix, large enough for the matrix products of a library.
    """
    widths, biased, activation, loss_kind = net
    width, second_width = widths[0], widths[1]
    size = width * second_width
    max_members = min(columns, STRIPE_MEMBERS)
    matrix = np.empty((max_members * second_width, width), np.float32)
    bias = np.empty(max_members * second_width, np.float32)
    second_buffer = np.empty(TILE_SAMPLES * max_members * second_width, np.float32)
    back_part = np.empty((TILE_SAMPLES, width), np.float32)
    # The gradient of layer 2 needs the sum of the members' deltas: a product with this 0/1 matrix.
    member_sum = np.zeros((max_members * second_width, second_width), np.float32)
    for o in range(max_members * second_width):
        member_sum[o, o % second_width] = ONE
    delta_sum = np.empty((TILE_SAMPLES, second_width), np.float32)
    weights = np.empty_like(head)
    buffer = np.empty(TILE_SAMPLES * np.sum(widths), np.float32)
    deltas = np.empty_like(buffer)
    second = buffer[TILE_SAMPLES * width : TILE_SAMPLES * (width + second_width)].reshape(TILE_SAMPLES, second_width)
    delta = deltas[TILE_SAMPLES * width : TILE_SAMPLES * (width + second_width)].reshape(TILE_SAMPLES, second_width)
    unit_counts, no_squares = np.ones(TILE_SAMPLES * max_members, np.float32), np.empty(0, np.float64)
    loss = 0.0
    row = np.searchsorted(row_offsets, start, side="right") - 1
    tile_start = start
    while tile_start < end:
        while row_offsets[row + 1] <= tile_start:
            row += 1
        count = min(TILE_SAMPLES, end - tile_start, row_offsets[row + 1] - tile_start)
        activations = hidden[tile_start - start : tile_start - start + count]
        tile_back = back[tile_start - start : tile_start - start + count]
        tile_targets = targets[tile_start : tile_start + count]
        activate(activations, count, activation)
        for t in range(count):
            clear(tile_back[t])
        for c0 in range(0, columns, STRIPE_MEMBERS):
            members = min(STRIPE_MEMBERS, columns - c0)
            member_heads = heads[(row - first_row) * columns + c0 : (row - first_row) * columns + c0 + members]
            for c in range(members):
                part = slice(c * second_width, (c + 1) * second_width)
                add(member_heads[c, :size], head[:size], matrix[part].reshape(size))
                if biased[0]:
                    add(member_heads[c, size : size + second_width], head[size : size + second_width], bias[part])
            second_out = second_buffer[: count * members * second_width].reshape(count, members * second_width)
            np.dot(activations, matrix[: members * second_width].T, second_out)
            if biased[0]:
                add_to_rows(bias[: members * second_width], second_out, count)
            if len(widths) == 2:
                flat_out = second_out.reshape(count * members, second_width)
                loss += output_delta(
                    flat_out, flat_out, tile_targets, members, unit_counts, no_squares, count * members, loss_kind
                )
            else:
                for c in range(members):
                    part = slice(c * second_width, (c + 1) * second_width)
                    for t in range(count):
                        copy(second_out[t, part], second[t])
                    add(member_heads[c], head, weights)
                    loss += _later_layers(
                        weights, net, buffer, deltas, tile_targets, unit_counts, no_squares, sums, count
                    )
                    for t in range(count):
                        copy(delta[t], second_out[t, part])
            np.dot(second_out, member_sum[: members * second_width], delta_sum[:count])
            add_outer(delta_sum, activations, sums[:size].reshape(second_width, width), count)
            if biased[0]:
                add_rows(delta_sum, sums[size : size + second_width], count)
            np.dot(second_out, matrix[: members * second_width], back_part[:count])
            for t in range(count):
                add(back_part[t], tile_back[t], tile_back[t])
        for t in range(count):
            multiply_derivative(tile_back[t], activations[t], activation)
        tile_start += count
    return loss


@compiled
def towers_gradient(
    start, end, row_offsets, column_offsets, samples, targets, firsts, first, first_bias, heads, first_row, head, net
):
    """Return gradient sums over the samples `start` to `end` when each participant has only its own features.

    The arguments are those of `joint_gradient`, except `samples`, of `SparseRows`, and `firsts`: the origins of layer
    1, rows × features × width, from `first_row` on; the biases of column c, if any, are at index features + c.

    All samples whose features in a column are zero have the same outputs there: they are computed once.
    """
    indptr, indices, values = samples
    widths, biased, activation, _ = net
    width, columns, outputs = widths[0], len(column_offsets) - 1, targets.shape[1]
    features = column_offsets[columns]
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    weights = np.empty_like(head)
    buffer = np.empty(TILE_SAMPLES * np.sum(widths), np.float32)
    hidden = buffer[: TILE_SAMPLES * width].reshape(TILE_SAMPLES, width)
    deltas = np.empty_like(buffer)
    back = deltas[: TILE_SAMPLES * width].reshape(TILE_SAMPLES, width)
    has_head = len(widths) > 1
    second_width = widths[1] if has_head else 0
    size = width * second_width
    second = buffer[TILE_SAMPLES * width : TILE_SAMPLES * (width + second_width)].reshape(TILE_SAMPLES, second_width)
    delta = deltas[TILE_SAMPLES * width : TILE_SAMPLES * (width + second_width)].reshape(TILE_SAMPLES, second_width)
    tile_targets = np.empty((TILE_SAMPLES, outputs), np.float32)
    counts = np.ones(TILE_SAMPLES, np.float32)
    squared_targets = np.zeros(TILE_SAMPLES, np.float64)
    starts = np.empty(TILE_SAMPLES, np.int64)
    ends = np.empty(TILE_SAMPLES, np.int64)
    own_weights = np.empty((np.max(column_offsets[1:] - column_offsets[:-1]), width), np.float32)
    own_bias = np.zeros(width, np.float32)
    positions = np.empty(np.max(row_offsets[1:] - row_offsets[:-1]), np.int64)
    empty_targets = np.empty(outputs, np.float32)
    loss = 0.0
    row = np.searchsorted(row_offsets, start, side="right") - 1
    while row < len(row_offsets) - 1 and row_offsets[row] < end:
        row_start, row_end = max(row_offsets[row], start), min(row_offsets[row + 1], end)
        for s in range(row_start, row_end):
            positions[s - row_start] = indptr[s]
        origin = firsts[row - first_row]
        for c in range(columns):
            for f in range(column_offsets[c], column_offsets[c + 1]):
                add(origin[f], first[f], own_weights[f - column_offsets[c]])
            if len(first_bias):
                add(origin[features + c], first_bias[c], own_bias)
            add(heads[(row - first_row) * columns + c], head, weights)
            empty_count = ZERO
            clear(empty_targets)
            empty_squares = 0.0
            s = row_start
            while s < row_end or empty_count > 0:
                count = 0
                while s < row_end and count < TILE_SAMPLES - 1:
                    k = positions[s - row_start]
                    k_end = k
                    while k_end < indptr[s + 1] and indices[k_end] < column_offsets[c + 1]:
                        k_end += 1
                    positions[s - row_start] = k_end
                    if k == k_end:
                        empty_count += ONE
                        add(empty_targets, targets[s], empty_targets)
                        for o in range(outputs):
                            empty_squares += np.float64(targets[s, o]) * np.float64(targets[s, o])
                    else:
                        starts[count], ends[count], counts[count] = k, k_end, ONE
                        copy(targets[s], tile_targets[count])
                        copy(own_bias, hidden[count])
                        add_products(hidden[count], indices, values, k, k_end, own_weights, column_offsets[c])
                        count += 1
                    s += 1
                if s == row_end and empty_count > 0:
                    starts[count], ends[count], counts[count], squared_targets[count] = 0, 0, empty_count, empty_squares
                    copy(empty_targets, tile_targets[count])
                    copy(own_bias, hidden[count])
                    count += 1
                    empty_count = ZERO
                if count == 0:
                    continue
                if has_head:
                    activate(hidden, count, activation)
                    matrix_products(hidden, weights[:size].reshape(second_width, width), second, count)
                    if biased[0]:
                        add_to_rows(weights[size : size + second_width], second, count)
                loss += _later_layers(
                    weights, net, buffer, deltas, tile_targets, counts, squared_targets, sums[2], count
                )
                if has_head:
                    add_outer(delta, hidden, sums[2][:size].reshape(second_width, width), count)
                    if biased[0]:
                        add_rows(delta, sums[2][size : size + second_width], count)
                    for t in range(count):
                        clear(back[t])
                        add_transposed_product(weights[:size].reshape(second_width, width), delta[t], back[t])
                        multiply_derivative(back[t], hidden[t], activation)
                for t in range(count):
                    if len(first_bias):
                        add(sums[1][c], back[t], sums[1][c])
                    for k in range(starts[t], ends[t]):
                        add_scaled(sums[0][indices[k]], values[k], back[t])
        row += 1
    return sums[0], sums[1], sums[2], loss


@compiled
def _later_layers(weights, net, buffer, deltas, targets, counts, squared_targets, sums, count):
    """Run layers 3…N forward and backward; return the loss, add their gradients to `sums`, set layer 2's deltas.

    The activations of the layers are stored one after another in `buffer`, their deltas at the same positions in
    `deltas`. Layer 2 is given before its activation. Without a layer 3, its values are the outputs.
    """
    widths, biased, activation, loss_kind = net
    last = len(widths) - 1
    w = b = 0  # offsets of the layer in `weights` and in `buffer`
    for layer in range(1, last + 1):
        inputs, outputs = widths[layer - 1], widths[layer]
        activations = buffer[b : b + TILE_SAMPLES * inputs].reshape(TILE_SAMPLES, inputs)
        b += TILE_SAMPLES * inputs
        if layer > 1:
            out = buffer[b : b + TILE_SAMPLES * outputs].reshape(TILE_SAMPLES, outputs)
            activate(activations, count, activation)
            matrix_products(activations, weights[w : w + inputs * outputs].reshape(outputs, inputs), out, count)
            if biased[layer - 1]:
                add_to_rows(weights[w + inputs * outputs : w + (inputs + 1) * outputs], out, count)
        w += (inputs + biased[layer - 1]) * outputs
    out = buffer[b : b + TILE_SAMPLES * widths[last]].reshape(TILE_SAMPLES, widths[last])
    delta = deltas[b : b + TILE_SAMPLES * widths[last]].reshape(TILE_SAMPLES, widths[last])
    loss = output_delta(out, delta, targets, 1, counts, squared_targets, count, loss_kind)
    for layer in range(last, 1, -1):
        inputs, outputs = widths[layer - 1], widths[layer]
        delta = deltas[b : b + TILE_SAMPLES * outputs].reshape(TILE_SAMPLES, outputs)
        b -= TILE_SAMPLES * inputs
        activations = buffer[b : b + TILE_SAMPLES * inputs].reshape(TILE_SAMPLES, inputs)
        input_delta = deltas[b : b + TILE_SAMPLES * inputs].reshape(TILE_SAMPLES, inputs)
        w -= (inputs + biased[layer - 1]) * outputs
        matrix = slice(w, w + inputs * outputs)
        add_outer(delta, activations, sums[matrix].reshape(outputs, inputs), count)
        if biased[layer - 1]:
            add_rows(delta, sums[matrix.stop : matrix.stop + outputs], count)
        for t in range(count):
            clear(input_delta[t])
            add_transposed_product(weights[matrix].reshape(outputs, inputs), delta[t], input_delta[t])
            multiply_derivative(input_delta[t], activations[t], activation)
    return loss


@compiled
def output_delta(out, delta, targets, outputs_per_target, counts, squared_targets, count, kind):
    """Set the outputs' deltas and return the sum of the losses; `delta` may be `out` itself.

    A row of `out` may stand for several samples with equal inputs: `counts` is their number, its targets are the sum of
    their targets, and `squared_targets` the sum of the squares. For the cross-entropy the targets of a sample are
    probabilities. One row of `targets` belongs to `outputs_per_target` rows of `out`.
    """
    outputs = out.shape[1]
    loss = 0.0
    if kind == SQUARED_ERROR:
        scale = np.float32(2) / np.float32(outputs)
        for t in range(count):
            target = targets[t // outputs_per_target]
            square = squared_targets[t] if counts[t] != 1 else 0.0
            for o in range(outputs):
                output = np.float64(out[t, o])
                error = counts[t] * out[t, o] - target[o]
                delta[t, o] = scale * error
                if counts[t] == 1:
                    square += np.float64(error) * np.float64(error)
                else:
                    square += (np.float64(counts[t]) * output - 2.0 * np.float64(target[o])) * output
            loss += square / outputs
        return loss
    for t in range(count):
        z, d, target = out[t], delta[t], targets[t // outputs_per_target]
        highest = z[0]
        for o in range(1, outputs):
            highest = max(highest, z[o])
        target_logit = ZERO
        for o in range(outputs):
            d[o] = z[o] - highest
            target_logit += target[o] * d[o]
        loss -= target_logit
    shifted = delta[:count].reshape(count * outputs)
    for i in range(len(shifted)):
        shifted[i] = exp(shifted[i])
    # Logarithms are slow, so take one of a product of totals. No total is below 1, and few products reach MAX_PRODUCT.
    product = 1.0
    for t in range(count):
        d, target = delta[t], targets[t // outputs_per_target]
        total = ZERO
        for o in range(outputs):
            total += d[o]
        if counts[t] == 1:
            product *= np.float64(total)
            if product > MAX_PRODUCT:
                loss += np.log(product)
                product = 1.0
        else:
            loss += counts[t] * np.log(total)
        scale = counts[t] / total
        for o in range(outputs):
            d[o] = scale * d[o] - target[o]
    return loss + np.log(product)
