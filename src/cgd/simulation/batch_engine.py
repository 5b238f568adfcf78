"""The fast engine for batches and local training: fully-connected networks with one column, by compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.simulation.fused_engine import FusedEngine, RowsFactory
from cgd.simulation.fused_rows import FusedRows, divide, kernel_threads
from cgd.simulation.local_kernels import add_gram, local_updates

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from cgd.simulation.fused_engine import Network
    from cgd.simulation.fused_rows import Chunks, Floats, Part, Sums
    from cgd.simulation.local_training import Work
    from cgd.simulation.population import Participants
    from cgd.simulation.ray_cluster import RayCluster

    Plan = tuple[Any, ...]

MAX_GRAM_FRACTION = 0.25
"""Of the features, as many records: a participant with more moves weights, which is faster then."""


class BatchRows(FusedRows):
    """Computes the sums of the updates of consecutive participants.

    Args:
        factory: settings of the rows.
        chunks: the parts, by chunks; each has whole rows.
        samples: samples and targets of these rows.
    """

    def __init__(self, factory: BatchFactory, chunks: Chunks, samples: tuple[Floats, Floats]) -> None:
        of = factory
        super().__init__(of.participants, of.network, of.loss, of.memory, chunks, samples, dense=of.dense)
        self._work = of.work
        uses_gram = of.uses_gram[self._rows.start : self._rows.stop]
        squares = uses_gram * np.diff(self._row_offsets) ** 2
        self._gram_ends = np.cumsum(squares)
        self._grams = np.zeros(self._gram_ends[-1], np.float32)
        with kernel_threads() as pool:
            list(pool.map(self._compute_gram, np.flatnonzero(uses_gram)))

    def part_sums(self, displacement: Floats, step: int) -> Iterator[Sums]:
        """Yield the weighted sums of the updates in a round, of the parts in order."""
        self._plan = self._plan_of_round(step)
        yield from super().part_sums(displacement, step)

    def _sum_of_part(self, chunk: Any, displacement: tuple[Floats, Floats, Floats], step: int) -> Any:
        _, heads = self._origins_of(chunk, step)
        first, first_bias, head = displacement
        first_row = chunk.rows.start - self._rows.start
        shared = (self._row_offsets, self._samples, self._targets, self._origin_z)
        arguments = (*shared, first, first_bias, heads, first_row, head, self._net, self._plan)
        return partial(_run, arguments, self._rows.start)

    def _compute_gram(self, row: int) -> None:
        start, end = self._row_offsets[row], self._row_offsets[row + 1]
        stop = self._gram_ends[row]
        gram = self._grams[stop - (end - start) ** 2 : stop].reshape(end - start, end - start)
        add_gram(start, end, self._samples, self._network.first_bias, gram)

    def _plan_of_round(self, step: int) -> Plan:
        """Return the batches of a round, in the layout of the kernel."""
        batches = [self._work.batches_of_row(self._participants, row, step) for row in self._rows]
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
            self._participants.total_samples,
        )


@dataclass(frozen=True)
class BatchFactory(RowsFactory):
    """Creates rows whose participants compute on batches.

    Attributes:
        work: the records that are used in each round.
        uses_gram: for each row of the grid, True if its local steps use a Gram matrix.
    """

    work: Work
    uses_gram: npt.NDArray[np.bool_]

    def create(self, chunks: Chunks, samples: tuple[Floats, Floats]) -> BatchRows:
        """Return the rows that have these parts, with their samples and targets."""
        return BatchRows(self, chunks, samples)


class BatchEngine(FusedEngine):
    """Computes sums of the gradients of batches, or of the updates of local trainings.

    Args:
        participants: simulated participants, in one column.
        network: their network, from `Network.from_model`.
        loss: constant of the loss, from `kernel_loss`.
        memory: most bytes for origins in memory, and for Gram matrices; other origins are drawn again in every round.
        work: the records that are used in each round.
        cluster: Ray cluster whose workers compute the sums of the parts; None to compute them in this process.
    """

    def __init__(
        self,
        participants: Participants,
        network: Network,
        loss: int,
        memory: float,
        work: Work,
        cluster: RayCluster | None = None,
    ) -> None:
        self._work = work
        super().__init__(participants, network, loss, memory, cluster)

    def _divide(self, row_bytes: int, memory: float) -> list[list[Part]]:
        return divide(self._participants.samples, row_bytes, memory, whole_rows=True)

    def _factory(self, loss: int, memory: float, *, dense: bool) -> BatchFactory:
        work, samples = self._work, np.array(self._participants.samples)
        steps = np.array([work.local.steps(each) if work.local else 1 for each in samples])
        uses_gram = (samples <= MAX_GRAM_FRACTION * self._features) & (steps > 1)
        if 4 * int((uses_gram * samples**2).sum()) > memory:
            uses_gram[:] = False
        return BatchFactory(self._participants, self._network, loss, memory, dense, work, uses_gram)

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the sum of all updates with the weights n_l/n, and that of the losses before each step."""
        totals, loss = self._add_parts(displacement)
        return torch.from_numpy(self._pack(*totals)), loss

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds: the batches follow from it and the seed."""
        return {"step": self._step}


def _run(arguments: tuple[Any, ...], first_row: int, part: Part) -> Any:
    return local_updates(part.rows.start - first_row, part.rows.stop - first_row, *arguments)
