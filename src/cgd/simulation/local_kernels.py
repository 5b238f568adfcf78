"""Compiled kernels for batches: each participant takes one or more steps by itself, and its update is added to a sum.

The local steps of layer 1 have two forms. If a participant has few records, its weights are never computed: a step adds
multiples of records to them, so the pre-activations of its records change by their dot products (the *Gram matrix*)
times these multiples. Otherwise the participant has a copy of the displacement that it moves. Layers 2…N are small, and
always moved.

The last bits do not depend on the number of threads: one call has several participants, and divides no participant.
"""

from __future__ import annotations

import numpy as np

from cgd.simulation.kernels import output_delta, row_heads
from cgd.simulation.vectors import ONE, ZERO, add, add_matrix, add_products, add_scaled, clear, compiled, copy, inlined


@compiled
def local_updates(
    first_row, end_row, row_offsets, samples, targets, origin_z, first, first_bias, heads, head_row, head, net, plan
):
    """Return the weighted sums of the updates of some participants, each in one column.

    Args:
        first_row: first participant.
        end_row: one past the last participant.
        row_offsets: index of the first sample of each participant, then the number of samples.
        samples: all samples, of `BlockedSamples`.
        targets: target outputs, samples × outputs.
        origin_z: pre-activations of layer 1 from the origins alone, samples × width.
        first: displacement of layer 1, features × width.
        first_bias: displacement of its biases, 1 × width; 0 × width without biases.
        heads: origins of layers 2…N, participants × head size, from `head_row` on.
        head_row: participant of the first row of `heads`.
        head: displacement of layers 2…N.
        net: widths of the layers, flags of layers 2…N that have biases, activation, loss.
        plan: records of all batches, end of each batch, end of each participant's batches, epochs, Gram matrices, end
            of each participant's Gram matrix, step size, momentum, samples of all participants of the simulation.

    Returns:
        The sums for layer 1, its biases and layers 2…N, and the sum of the losses, each with the weight n_l/n. The loss
        of a participant is the mean over its steps' records, each before its step.
    """
    order, batch_ends, row_ends, epochs, grams, gram_ends, lr, momentum, total_samples = plan
    sums = np.zeros_like(first), np.zeros_like(first_bias), np.zeros_like(head)
    loss = 0.0
    for row in range(first_row, end_row):
        start, end = row_offsets[row], row_offsets[row + 1]
        weight = np.float32((end - start) / total_samples)
        before, after = (0 if row == 0 else row_ends[row - 1]), row_ends[row]
        ends = batch_ends[before:after]
        records = order[(0 if before == 0 else batch_ends[before - 1]) : ends[-1]]
        ends = ends - (ends[-1] - len(records))
        gram = grams[(0 if row == 0 else gram_ends[row - 1]) : gram_ends[row]]
        weights = heads[row - head_row] + head
        origin_head = weights.copy()
        member = start, end, samples, targets, origin_z
        steps = records, ends, (after - before) // epochs, lr, momentum
        # One batch needs no Gram matrix: only later steps depend on how the first one moved the weights.
        if len(gram) or len(ends) == 1:
            total = _train_by_records(member, gram, first, first_bias, weights, net, steps, weight, sums)
        else:
            total = _train_by_weights(member, first, first_bias, weights, net, steps, weight, sums)
        loss += total * weight / len(records)
        for i in range(len(head)):
            sums[2][i] += weight * (origin_head[i] - weights[i])
    return sums[0], sums[1], sums[2], loss


@inlined
def _train_by_records(member, gram, first, first_bias, head, net, steps, weight, sums):
    """Take a participant's steps with multiples of records in place of weights of layer 1; return the sum of losses."""
    start, end, samples, targets, origin_z = member
    records, ends, epoch_batches, lr, momentum = steps
    width, count = first.shape[1], end - start
    z = np.empty((count, width), np.float32)
    moved = np.zeros((count, width), np.float32)
    velocity = np.zeros((count if momentum else 0, width), np.float32)
    products = gram.reshape(count if len(gram) else 0, count)
    head_velocity = np.zeros_like(head)
    hidden, back, batch_targets, rows = _batch_buffers(ends, width, targets.shape[1], count)
    loss, begin = 0.0, 0
    for b in range(len(ends)):
        batch = records[begin : ends[b]]
        size = len(batch)
        if b < epoch_batches:
            _pre_activations(batch, start, samples, origin_z, first, first_bias, hidden)
            for t in range(size):
                copy(hidden[t], z[batch[t]])
        for t in range(size):
            copy(z[batch[t]], hidden[t])
            copy(targets[start + batch[t]], batch_targets[t])
        if b > 0:
            for t in range(size):
                copy(products[batch[t]], rows[t])
            change = np.dot(rows[:size], moved)
            for t in range(size):
                add_scaled(hidden[t], -ONE, change[t])
        loss += _head_step(hidden, back, batch_targets, size, head, head_velocity, net, lr, momentum)
        scale = ONE / np.float32(size)
        if momentum:
            for i in range(count):
                for k in range(width):
                    velocity[i, k] *= momentum
            for t in range(size):
                add_scaled(velocity[batch[t]], scale, back[t])
            for i in range(count):
                add_scaled(moved[i], lr, velocity[i])
        else:
            for t in range(size):
                add_scaled(moved[batch[t]], lr * scale, back[t])
        begin = ends[b]
    _add_records(start, end, samples, moved, weight, sums[0])
    if len(first_bias):
        for i in range(count):
            add_scaled(sums[1][0], weight, moved[i])
    return loss


@inlined
def _train_by_weights(member, first, first_bias, head, net, steps, weight, sums):
    """Take a participant's steps with its own copy of the displacement of layer 1; return the sum of losses."""
    start, _, samples, targets, origin_z = member
    records, ends, _, lr, momentum = steps
    width = first.shape[1]
    own, own_bias = first.copy(), first_bias.copy()
    velocity = np.zeros((len(first) if momentum else 0, width), np.float32)
    bias_velocity = np.zeros_like(first_bias)
    head_velocity = np.zeros_like(head)
    hidden, back, batch_targets, _ = _batch_buffers(ends, width, targets.shape[1], np.int64(0))
    loss, begin = 0.0, 0
    for b in range(len(ends)):
        batch = records[begin : ends[b]]
        size = len(batch)
        _pre_activations(batch, start, samples, origin_z, own, own_bias, hidden)
        for t in range(size):
            copy(targets[start + batch[t]], batch_targets[t])
        loss += _head_step(hidden, back, batch_targets, size, head, head_velocity, net, lr, momentum)
        scale = ONE / np.float32(size)
        if momentum:
            for f in range(len(first)):
                for k in range(width):
                    velocity[f, k] *= momentum
            _add_batch(batch, start, samples, back, scale, velocity)
            for f in range(len(first)):
                add_scaled(own[f], -lr, velocity[f])
        else:
            _add_batch(batch, start, samples, back, -lr * scale, own)
        if len(first_bias):
            for k in range(width):
                bias_velocity[0, k] *= momentum
            for t in range(size):
                add_scaled(bias_velocity[0], scale, back[t])
            add_scaled(own_bias[0], -lr, bias_velocity[0])
        begin = ends[b]
    for f in range(len(first)):
        add_scaled(sums[0][f], weight, first[f])
        add_scaled(sums[0][f], -weight, own[f])
    for c in range(len(first_bias)):
        add_scaled(sums[1][c], weight, first_bias[c])
        add_scaled(sums[1][c], -weight, own_bias[c])
    return loss


@compiled
def _batch_buffers(ends, width, outputs, columns):
    """Return arrays for the pre-activations, their gradients, the targets and Gram rows of the largest batch."""
    most = ends[0]
    for b in range(1, len(ends)):
        most = max(most, ends[b] - ends[b - 1])
    shape = (most, width)
    return (
        np.empty(shape, np.float32),
        np.empty(shape, np.float32),
        np.empty((most, outputs), np.float32),
        np.empty((most, columns), np.float32),
    )


@compiled
def _pre_activations(batch, start, samples, origin_z, first, first_bias, out):
    """Set the rows of `out` to the pre-activations of layer 1 of a batch of the records from `start` on."""
    for t in range(len(batch)):
        copy(origin_z[start + batch[t]], out[t])
        for c in range(len(first_bias)):
            add(first_bias[c], out[t], out[t])
    if len(samples.dense):
        add_matrix(np.dot(_gather(batch, start, samples.dense), first), out)
        return
    offsets, indices, values = samples.rows
    for t in range(len(batch)):
        s = start + batch[t]
        add_products(out[t], indices, values, offsets[s], offsets[s + 1], first, 0)


@compiled
def _add_batch(batch, start, samples, back, scale, out):
    """Add the outer products of a batch of records with the rows of `back`, times `scale`, to `out`."""
    if len(samples.dense):
        product = np.dot(_gather(batch, start, samples.dense).T, back[: len(batch)])
        for f in range(len(out)):
            add_scaled(out[f], scale, product[f])
        return
    offsets, indices, values = samples.rows
    for t in range(len(batch)):
        s = start + batch[t]
        for k in range(offsets[s], offsets[s + 1]):
            add_scaled(out[indices[k]], scale * values[k], back[t])


@compiled
def _gather(batch, start, dense):
    rows = np.empty((len(batch), dense.shape[1]), np.float32)
    for t in range(len(batch)):
        copy(dense[start + batch[t]], rows[t])
    return rows


@compiled
def _add_records(start, end, samples, moved, weight, out):
    """Add the outer products of consecutive records with the rows of `moved`, times `weight`, to `out`."""
    if len(samples.dense):
        product = np.dot(samples.dense[start:end].T, moved)
        for f in range(len(out)):
            add_scaled(out[f], weight, product[f])
        return
    offsets, indices, values = samples.rows
    for s in range(start, end):
        for k in range(offsets[s], offsets[s + 1]):
            add_scaled(out[indices[k]], weight * values[k], moved[s - start])


@inlined
def _head_step(hidden, back, targets, size, head, velocity, net, lr, momentum):
    """Run a batch through layers 2…N and move these; set `back` to the gradients of the pre-activations of layer 1.

    Returns the sum of the losses before the step.
    """
    if len(net[0]) == 1:
        unit_counts, no_squares = np.ones(size, np.float32), np.empty(0, np.float64)
        return output_delta(hidden, back, targets, 1, unit_counts, no_squares, size, net[3])
    row_offsets = np.array([0, size])
    gradient = np.zeros_like(head)
    no_origin = np.zeros((1, len(head)), np.float32)
    zero, one = np.int64(0), np.int64(1)  # constants would have types of their own, for which Numba compiles again
    loss = row_heads(zero, size, row_offsets, one, targets, hidden, back, no_origin, zero, head, net, gradient)
    scale = ONE / np.float32(size)
    for i in range(len(head)):
        velocity[i] = momentum * velocity[i] + scale * gradient[i]
        head[i] -= lr * velocity[i]
    return loss


@compiled
def add_gram(start, end, samples, bias, out):
    """Add the dot products of consecutive records to `out`; 1 more with a bias, which is a feature that is always 1."""
    if len(samples.dense):
        add_matrix(np.dot(samples.dense[start:end], samples.dense[start:end].T), out)
    else:
        offsets, indices, values = samples.rows
        row = np.empty(samples.dense.shape[1], np.float32)
        for i in range(start, end):
            clear(row)
            for k in range(offsets[i], offsets[i + 1]):
                row[indices[k]] = values[k]
            for j in range(start, end):
                total = ZERO
                for k in range(offsets[j], offsets[j + 1]):
                    total += values[k] * row[indices[k]]
                out[i - start, j - start] += total
    if bias:
        for i in range(end - start):
            for j in range(end - start):
                out[i, j] += ONE
