"""Sums with differential privacy in a simulated training: the product's own encoding, noise and budget.

Every participant encodes its sum of clipped gradients by `NoisyEncoding`, as with `cgd.Privacy`, and the words are
added in the ring. The noise follows from a seed, so that an audit can be repeated.

A participant that steers leaves out its noise, which the promise allows for up to t members and which nobody can see:
so there is more room for the vector that it adds. The others refuse a total whose norm is above
`NoisyEncoding.max_total_norm`, and the training would end. So it adds as much of its vector as they accept. It is
assumed to know how much that is; a real one has to leave a margin for what the others enter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.dp.accountant import epsilon_of
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.simulation.private_engine import noise_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from cgd.dp.mechanism import NoisyEncoding
    from cgd.dp.settings import PrivacySettings

    Floats = npt.NDArray[np.float64]


class PrivateSums:
    """The openings of a private training of participants in one process.

    Args:
        settings: the settings of the mechanism.
        seed: of the noise.
        ring_bits: 32 or 64.
    """

    def __init__(self, settings: PrivacySettings, seed: int, ring_bits: int) -> None:
        self.settings = settings
        self._seed, self._ring_bits, self._openings = seed, ring_bits, 0
        self._budget = settings.budget()

    def count(self, samples: Mapping[str, int]) -> int:
        """Open the number of all samples with noise, at least 1, given that of each member."""
        encoding = self.settings.count_encoding(len(samples))
        counts = {name: np.array([float(count)]) for name, count in samples.items()}
        _, total = self._open(encoding, counts, {}, "the number of records")
        return max(1, round(float(total[0])))

    def statistics(self, sums: Mapping[str, Floats], clip: float) -> tuple[Floats, float]:
        """Open statistics of the tables, and return them with the standard deviation of their noise.

        Args:
            sums: the part of each member.
            clip: the largest norm of the vector of one record.
        """
        dimension = next(iter(sums.values())).size
        encoding = self.settings.sum_encoding(len(sums), dimension, clip, self.settings.statistics_mu)
        _, total = self._open(encoding, sums, {}, "statistics")
        return total, encoding.sigma_total

    def step(
        self, sums: Mapping[str, Floats], records: int, steering: Mapping[str, Floats]
    ) -> tuple[dict[str, Floats], Floats]:
        """Open the gradients of a step.

        Args:
            sums: the sum of clipped gradients of each member.
            records: the number of all samples, as opened.
            steering: vectors that members would add to the total, by name.

        Returns:
            The addend of each member, with its noise, and the total.
        """
        dimension = next(iter(sums.values())).size
        encoding = self.settings.step_encoding(len(sums), dimension, records, self._ring_bits)
        return self._open(encoding, sums, steering, "a step")

    def _open(
        self, encoding: NoisyEncoding, sums: Mapping[str, Floats], steering: Mapping[str, Floats], what: str
    ) -> tuple[dict[str, Floats], Floats]:
        words = {}
        for place, (name, values) in enumerate(sums.items()):
            key = noise_key(self._seed, self._openings, place)
            own = replace(encoding, random=partial(_first_bytes, key))
            words[name] = encode_without_noise(own, values) if name in steering else own.encode(values)
        if steering:
            part = _accepted_part(encoding, _add(encoding, words), sum(steering.values(), np.zeros(encoding.dimension)))
            for name, vector in steering.items():
                words[name] = _add(encoding, {"own": words[name], "added": _round(encoding, part * vector)})
        self._budget.charge(encoding.mu**2, what)
        self._openings += 1
        addends: dict[str, Floats] = {name: encoding.decode(each) for name, each in words.items()}
        return addends, encoding.decode(_add(encoding, words))


def remaining_mu(settings: PrivacySettings, members: int, honest: int) -> float:
    """Return μ of a training against a coalition of all but this many members.

    It is that of the settings if t members collude, larger if more do, and smaller if fewer do, or if more than a
    quorum are present.
    """
    noisy = (members if settings.quorum is None else settings.quorum) - settings.colluders
    return math.sqrt(settings.budget().mu_squared * noisy / honest)


def describe_privacy(settings: PrivacySettings, members: int, honest: int) -> str:
    """Return ε of a training, and what it is against a larger coalition than it was meant for, in sentences."""
    text = f"ε = {settings.epsilon:g}, δ = {settings.delta:g}, t = {settings.colluders}, C = {settings.clip:g}."
    colluders = members - honest
    if colluders <= settings.colluders:
        return text
    epsilon = epsilon_of(remaining_mu(settings, members, honest), settings.delta)
    return f"{text} {colluders} collude, which is more than t: against them ε is {epsilon:.3g}."


def honest_noise(encoding: NoisyEncoding, honest: int) -> float:
    """Return the standard deviation of the noise of this many members in a total."""
    return encoding.sigma_total * math.sqrt(honest / encoding.members)


def max_steering(encoding: NoisyEncoding, honest: int) -> float:
    """Return the norm of a vector that colluders without noise can add so that the total is mostly accepted.

    Args:
        encoding: the encoding of a step.
        honest: the number of members with noise.
    """
    others = math.hypot(encoding.clip, honest_noise(encoding, honest) * math.sqrt(encoding.dimension))
    return math.sqrt(max(0.0, encoding.max_total_norm**2 - others**2))


def encode_without_noise(encoding: NoisyEncoding, values: Floats) -> npt.NDArray[Any]:
    """Return the ring elements of `values`/N, as a member enters them that leaves out its noise."""
    return encoding.fixed_point.encode(values / encoding.denominator)


def _accepted_part(encoding: NoisyEncoding, words: npt.NDArray[Any], vector: Floats) -> float:
    """Return the largest part of a vector, at most 1, that can be added to a total without exceeding the norm."""
    total = encoding.decode(words)
    square, product = float(vector @ vector), float(vector @ total)
    room = encoding.max_total_norm**2 * (1 - 1e-6) - float(total @ total)
    if square == 0 or room <= 0:
        return 0.0
    return min(1.0, (math.sqrt(product**2 + square * room) - product) / square)


def _first_bytes(key: bytes, count: int) -> bytes:
    return key[:count]


def _round(encoding: NoisyEncoding, vector: Floats) -> npt.NDArray[Any]:
    scaled = np.rint(np.ldexp(vector, encoding.fraction_bits))
    return scaled.astype(np.int64).astype(WORD_TYPES[encoding.ring_bits])


def _add(encoding: NoisyEncoding, words: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the sum in the ring, which wraps around."""
    total = np.zeros(encoding.dimension, WORD_TYPES[encoding.ring_bits])
    for each in words.values():
        total += each
    return total
