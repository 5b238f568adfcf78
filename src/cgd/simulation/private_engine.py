"""The engine with differential privacy: clipped records, noise from every participant, charges, as in the product.

With `arithmetic="ring"` every participant encodes its sum of clipped gradients by the product's own `NoisyEncoding`,
and the words are added in the ring: given the same keys for the noise, the bits are those of real participants with
`cgd.Privacy`. With "float", one Gaussian of the same total standard deviation is added to the sum of floats; that is
faster, and only for studies of utility.

Neither is private: all noise follows from the seed of the simulation, so that a run can be repeated and resumed, and
the history has training losses without noise.
"""

from __future__ import annotations

import copy
import hmac
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError
from cgd.optim.record_gradients import RecordGradients
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.simulation.module_engine import ModuleEngine, Ring

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.dp.accountant import Spent
    from cgd.dp.mechanism import NoisyEncoding
    from cgd.dp.settings import PrivacySettings
    from cgd.simulation.local_training import Work
    from cgd.simulation.population import Loss, Participants

    Floats = npt.NDArray[np.float64]


def noise_key(seed: int, opening: int, member: int) -> bytes:
    """Return the key of a participant's noise in one opening: 0 for the number of records, k for step k."""
    return hmac.digest(f"cgd simulated noise {seed}".encode(), f"opening {opening} of {member}".encode(), "sha256")


def check_private(participants: Participants, steps: int, privacy: PrivacySettings, work: Work) -> None:
    """Check that these settings cover a simulation.

    Raises:
        InputError: there are several columns, batches, a local training, too few participants or too many steps, or δ
            is too large.
    """
    if participants.grid.columns > 1 or participants.mode == "joint":
        raise InputError(
            f"privacy is given, and the grid has {participants.grid.columns} columns in the mode "
            f"{participants.mode!r}; a record is private only if one participant has all of it: use one column and the "
            "mode towers, or no privacy"
        )
    if not work.is_full_gradient:
        raise InputError(
            f"privacy is given with {'a local training' if work.local else f'{work.batches} batches'}; the guarantee "
            "is for the gradients of all records in every step: leave local and batches out, or privacy"
        )
    privacy.check_members(participants.grid.rows)
    if steps > privacy.steps:
        raise InputError(
            f"steps is {steps}, and the noise is calibrated for {privacy.steps}; set PrivacySettings(steps={steps})"
        )
    if privacy.delta * participants.total_samples >= 1:
        raise InputError(
            f"delta of the privacy is {privacy.delta:g}, and there are {participants.total_samples} records; choose "
            f"it far below {1 / participants.total_samples:.2g}, or a record may be published"
        )


class PrivateEngine(ModuleEngine):
    """Computes noisy means of clipped gradients, for any module whose gradients can be separated by records.

    Args:
        participants: simulated participants, in one column.
        loss: loss function of outputs and labels, a mean over the samples.
        ring: settings of the ring; None for plain floats. Only `ring_bits` is used: clipping bounds the addends.
        memory: most bytes for origins in memory; the others are drawn again in every step.
        privacy: the settings of the mechanism.
    """

    summation_order = "PrivateEngine"

    def __init__(
        self, participants: Participants, loss: Loss, ring: Ring | None, memory: float, privacy: PrivacySettings
    ) -> None:
        super().__init__(participants, loss, ring, memory)
        self._models = copy.deepcopy(participants.models)  # the hooks stay out of the result
        self._clipping = RecordGradients(self._models[0], privacy.clip)
        self._privacy, self._budget = privacy, privacy.budget()
        self._records: int | None = None

    def spent(self) -> Spent:
        """Return what was charged so far."""
        return self._budget.spent()

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the noisy mean of all clipped gradients, and the exact mean loss; first open the number of records."""
        participants = self._participants
        if self._records is None:
            self._records = self._open_count()
        noisy_sum = self._new_noisy_sum(self._step_encoding(self._records), self._step + 1)
        loss = 0.0
        with torch.random.fork_rng(devices=[]):
            for cell in participants.grid.cells:
                value = self._backward(cell, displacement)[1]
                noisy_sum.add(self._clipping.take().gradient.numpy())
                loss += participants.samples[cell.row] / participants.total_samples * value
        self._budget.charge(noisy_sum.encoding.mu**2, "a step")
        self._step += 1
        return torch.from_numpy(noisy_sum.total()).to(displacement.dtype), loss

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and of records, as opened. The noise follows from the seed and the step."""
        return {**super().state_dict(), "records": self._records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, and charge its openings."""
        super().load_state_dict(state)
        self._records, self._budget = state["records"], self._privacy.budget()
        if self._records is not None:
            self._budget.charge(self._count_encoding().mu ** 2, "the number of records")
            step_mu = self._step_encoding(self._records).mu
            for _ in range(self._step):
                self._budget.charge(step_mu**2, "a step")

    def _open_count(self) -> int:
        """Return the number of all records, with noise, at least 1."""
        noisy_sum = self._new_noisy_sum(self._count_encoding(), 0)
        for samples in self._participants.samples:
            noisy_sum.add(np.array([float(samples)]))
        self._budget.charge(noisy_sum.encoding.mu**2, "the number of records")
        return max(1, round(float(noisy_sum.total()[0])))

    def _count_encoding(self) -> NoisyEncoding:
        return self._privacy.count_encoding(self._participants.grid.rows)

    def _step_encoding(self, records: int) -> NoisyEncoding:
        layout, bits = self._participants.layout, (self._ring or Ring()).ring_bits
        return self._privacy.step_encoding(self._participants.grid.rows, layout.size, records, bits)

    def _new_noisy_sum(self, encoding: NoisyEncoding, opening: int) -> NoisySum:
        return NoisySum(encoding, self._participants.seed, opening, in_ring=self._ring is not None)


class NoisySum:
    """A sum of all participants' clipped vectors, divided by the denominator of the encoding, with noise.

    Args:
        encoding: the encoding of every participant.
        seed: seed of the simulation.
        opening: number of the opening; no two of a run have the same noise.
        in_ring: add words of the ring with a share of the noise in each; else add floats, and all noise to their sum.
    """

    def __init__(self, encoding: NoisyEncoding, seed: int, opening: int, *, in_ring: bool) -> None:
        self.encoding = replace(encoding, random=self._next_key)
        self._seed, self._opening, self._in_ring, self._members = seed, opening, in_ring, 0
        self._sum: npt.NDArray[Any] = np.zeros(
            encoding.dimension, WORD_TYPES[encoding.ring_bits] if in_ring else np.float64
        )

    def add(self, values: Floats) -> None:
        """Add the sum of one participant's clipped vectors."""
        self._sum += self.encoding.encode(values) if self._in_ring else values

    def total(self) -> Floats:
        """Return the total; all participants must have been added."""
        if self._in_ring:
            return self.encoding.decode(self._sum)
        noise = np.random.default_rng([*self._next_key()]).standard_normal(self._sum.size)
        total: Floats = self._sum / self.encoding.denominator + self.encoding.sigma_total * noise
        return total

    def _next_key(self, _count: int = 32) -> bytes:
        """Return the key for the noise of the next participant."""
        key = noise_key(self._seed, self._opening, self._members)
        self._members += 1
        return key
