"""The fast engine for batches and local training: fully-connected networks with one column, by compiled kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.simulation.fused_engine import SHARDS, FusedEngine, kernel_threads
from cgd.simulation.local_kernels import add_gram, local_updates

if TYPE_CHECKING:
    from cgd.simulation.fused_engine import Network
    from cgd.simulation.local_training import Work
    from cgd.simulation.population import Participants

    Plan = tuple[Any, ...]

MAX_GRAM_FRACTION = 0.25
"""Of the features, as many records: a participant with more moves weights, which is faster then."""


class BatchEngine(FusedEngine):
    """Computes sums of the gradients of batches, or of the updates of local trainings.

    Args:
        participants: simulated participants, in one column.
        network: their network, from `Network.from_model`.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory, and for Gram matrices; other origins are drawn again in every round.
        work: the records that are used in each round.
    """

    def __init__(self, participants: Participants, network: Network, loss: int, memory: float, work: Work) -> None:
        super().__init__(participants, network, loss, memory)
        self._work = work
        samples = np.array(participants.samples)
        steps = np.array([work.local.steps(each) if work.local else 1 for each in participants.samples])
        uses_gram = (samples <= MAX_GRAM_FRACTION * self._features) & (steps > 1)
        if 4 * int((uses_gram * samples**2).sum()) > memory:
            uses_gram[:] = False
        self._gram_ends = np.cumsum(uses_gram * samples**2)
        self._grams = np.zeros(self._gram_ends[-1], np.float32)
        with kernel_threads() as pool:
            list(pool.map(self._compute_gram, np.flatnonzero(uses_gram)))

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the sum of all updates with the weights n_l/n, and that of the losses before each step."""
        first, first_bias, head = self._unpack(displacement.numpy())
        totals, loss = [np.zeros_like(each, dtype=np.float64) for each in (first, first_bias, head)], 0.0
        plan = self._plan()
        with kernel_threads() as pool:
            for chunk in self._chunks:
                _, heads = self._origins_of(chunk)
                shared = (self._row_offsets, self._samples, self._targets, self._origin_z)
                arguments = (*shared, first, first_bias, heads, chunk.rows.start, head, self._net, plan)
                ends = np.linspace(chunk.rows.start, chunk.rows.stop, min(SHARDS, len(chunk.rows)) + 1).astype(np.int64)
                run = partial(_run, arguments)
                for *parts, part_loss in pool.map(run, ends[:-1], ends[1:]):
                    loss += part_loss
                    with np.errstate(invalid="ignore"):  # a diverging run: its loss is not finite
                        for total, part in zip(totals, parts, strict=True):
                            total += part
        self._step += 1
        return torch.from_numpy(self._pack(*totals)), loss

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds: the batches follow from it and the seed."""
        return {"step": self._step}

    def _compute_gram(self, row: int) -> None:
        start, end = self._row_offsets[row], self._row_offsets[row + 1]
        stop = self._gram_ends[row]
        gram = self._grams[stop - (end - start) ** 2 : stop].reshape(end - start, end - start)
        add_gram(start, end, self._samples, self._network.first_bias, gram)

    def _plan(self) -> Plan:
        """Return the batches of this round, in the layout of the kernel."""
        rows = range(self._participants.grid.rows)
        batches = [self._work.batches_of_row(self._participants, row, self._step) for row in rows]
        local = self._work.local
        sizes = [len(batch) for own in batches for batch in own]
        return (
            np.concatenate([batch for own in batches for batch in own]),
            np.cumsum(sizes),
            np.cumsum([len(own) for own in batches]),
            local.epochs if local else 1,
            self._grams,
            self._gram_ends,
            np.float32(local.lr if local else 1.0),
            np.float32(local.momentum if local else 0.0),
        )


def _run(arguments: tuple[Any, ...], start: int, end: int) -> Any:
    return local_updates(start, end, *arguments)
