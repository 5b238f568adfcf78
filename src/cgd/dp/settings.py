"""The settings of differential privacy, and what each opening of a training may use of the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from cgd.dp.accountant import MAX_DRAWS, Budget
from cgd.dp.mechanism import NoisyEncoding
from cgd.errors import InputError

COUNT_SHARE = 0.01
"""The part of a training's μ² for the number of records, by which all members divide; the steps have the rest."""
STATISTICS_ATTEMPTS = 2
"""The number of openings that share the part of statistics: one, and another if the first sum fails late."""

# The relative size of the noise in the number of records, in standard deviations, that the encoding has room for.
COUNT_RANGE = 10
MIN_RERUNS, RERUN_FRACTION = 5, 0.02
LOOK_RERUN_FRACTION = 0.1
MAX_STATISTICS_RECORDS = 1 << 32


def suggested_delta(records: float) -> float:
    """Return a δ far below one divided by a number of records: a power of ten, at most a hundredth of that.

    Examples:
        >>> suggested_delta(455), suggested_delta(32_561)
        (1e-05, 1e-07)
    """
    return float(f"1e-{math.ceil(math.log10(100 * records))}")


@dataclass(frozen=True)
class PrivacySettings:
    """The settings of a private training, equal for all members. Invalid values raise an `InputError`.

    Attributes:
        epsilon: ε, for every record.
        delta: δ; it must be below one divided by the number of all records.
        clip: C, the largest norm of a record's gradient over all parameters.
        steps: T, the number of steps.
        colluders: t, how many members may collude, or leave out their noise, without weakening the guarantee.
        reruns: r, how many attempts may be opened besides: sums that failed after they may have been seen.
        statistics_share: the part of μ² for statistics before the training; the training has the rest.
        looks: how many times the loss on validation records is opened. These are never used for anything else, so they
            have the whole budget for it: a record is in one of the two parts (parallel composition).
        quorum: q, the least number of members of a sum, if members may be absent; each of them counts as one that
            leaves out its noise. None if every sum has all members.

    Examples:
        >>> settings = PrivacySettings(epsilon=2.0, delta=1e-5, steps=100)
        >>> settings.reruns, round(settings.budget().mu_squared, 4), round(settings.step_mu, 4)
        (5, 0.2516, 0.0487)
    """

    epsilon: float
    delta: float
    steps: int
    clip: float = 1.0
    colluders: int = 1
    reruns: int = -1
    statistics_share: float = 0.0
    looks: int = 0
    quorum: int | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "clip", "statistics_share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name} is {value!r}; it must be a number")
            object.__setattr__(self, name, float(value))  # so that members with 1 and 1.0 agree
        if not 0 < self.epsilon < math.inf:
            raise InputError(
                f"epsilon is {self.epsilon}; it must be a positive number: 1 is strong, 8 is weak protection"
            )
        if not 0 < self.delta < 1:
            raise InputError(f"delta is {self.delta}; it must be a probability, far below one divided by the records")
        if not 0 < self.clip < math.inf:
            raise InputError(f"clip is {self.clip}; it is the largest norm of a record's gradient, a positive number")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(f"steps is {self.steps}; noise is calibrated for a whole number of steps, at least 1")
        if isinstance(self.colluders, bool) or not isinstance(self.colluders, int) or self.colluders < 0:
            raise InputError(f"colluders is {self.colluders}; it is a number of members, at least 0")
        if isinstance(self.reruns, bool) or not isinstance(self.reruns, int) or self.reruns < -1:
            raise InputError(f"reruns is {self.reruns}; it is a number of openings, at least 0")
        if not 0 <= self.statistics_share < 1:
            raise InputError(f"statistics_share is {self.statistics_share}; it is a part, from 0 to below 1")
        if isinstance(self.looks, bool) or not isinstance(self.looks, int) or self.looks < 0:
            raise InputError(f"looks is {self.looks}; it is a number of openings, at least 0")
        if self.reruns == -1:
            object.__setattr__(self, "reruns", max(MIN_RERUNS, math.ceil(RERUN_FRACTION * self.steps)))
        self.budget()

    def budget(self) -> Budget:
        """Return the budget of a whole training, with nothing charged."""
        return Budget(self.epsilon, self.delta, MAX_DRAWS)

    @cached_property
    def statistics_mu(self) -> float:
        """The largest μ of one opening of the statistics."""
        return math.sqrt(self.statistics_share * self.budget().mu_squared / STATISTICS_ATTEMPTS)

    @cached_property
    def count_mu(self) -> float:
        """The largest μ of the opening of the number of records."""
        return math.sqrt(COUNT_SHARE * self._training_mu_squared)

    @cached_property
    def step_mu(self) -> float:
        """The largest μ of one step's opening."""
        return math.sqrt((1 - COUNT_SHARE) * self._training_mu_squared / (self.steps + self.reruns))

    @cached_property
    def look_mu(self) -> float:
        """The largest μ of one opening of the validation loss."""
        return math.sqrt(self.budget().mu_squared / (self.looks + max(1, math.ceil(LOOK_RERUN_FRACTION * self.looks))))

    @property
    def _training_mu_squared(self) -> float:
        return (1 - self.statistics_share) * self.budget().mu_squared

    def check_members(self, members: int) -> None:
        """Check that members remain whose noise protects, also in a sum of a quorum only.

        Raises:
            InputError: there are not more members than colluders, or a quorum is not more.
        """
        if self.quorum is not None and self.colluders >= self.quorum:
            raise InputError(
                f"colluders is {self.colluders}, and a sum may have only {self.quorum} members, the quorum; choose at "
                f"most {self.quorum - 1}: then the noise of every member protects its records alone"
            )
        if self.colluders >= members:
            raise InputError(
                f"colluders is {self.colluders}, and there are {members} members; choose at most {members - 1}: then "
                "the noise of every member protects its records alone"
            )

    def count_encoding(self, members: int) -> NoisyEncoding:
        """Return the encoding of the number of records."""
        return self.sum_encoding(members, 1, 1.0, self.count_mu, max_records=1 << 40)

    def sum_encoding(
        self, members: int, dimension: int, clip: float, mu: float, max_records: int = MAX_STATISTICS_RECORDS
    ) -> NoisyEncoding:
        """Return the encoding of a sum over records that is not divided, such as statistics.

        Args:
            members: the number of members of the sum.
            dimension: the number of elements.
            clip: the largest norm of the vector of one record.
            mu: the largest μ of the opening.
            max_records: more than all members have together.
        """
        self.check_members(members)
        return NoisyEncoding(
            clip=clip,
            denominator=1.0,
            dimension=dimension,
            members=members,
            colluders=self.colluders,
            max_mu=mu,
            max_records=max_records,
            ring_bits=64,
            quorum=self.quorum,
        )

    def check_records(self, records: int) -> None:
        """Check δ against the number of records, as opened: the same check at all members.

        Raises:
            InputError: a mechanism that publishes one record at random would have this δ.
        """
        if self.delta * records >= 1:
            raise InputError(
                f"delta is {self.delta:g}, and there are about {records:,} records; choose it far below one divided by "
                f"them, such as {suggested_delta(records):g}, in a new training"
            )

    def step_encoding(self, members: int, dimension: int, records: int, ring_bits: int) -> NoisyEncoding:
        """Return the encoding of a step's gradients.

        Args:
            members: the number of members of the sum.
            dimension: the number of all trainable parameters.
            records: the number of records, as opened.
            ring_bits: the ring of the sums.
        """
        self.check_members(members)
        spread = COUNT_RANGE * math.sqrt(members) / self.count_mu
        return NoisyEncoding(
            clip=self.clip,
            denominator=float(records),
            dimension=dimension,
            members=members,
            colluders=self.colluders,
            max_mu=self.step_mu,
            max_records=math.ceil(records + spread),
            ring_bits=ring_bits,
            quorum=self.quorum,
        )

    def describe(self) -> str:
        """Return the settings as a text that members compare."""
        more = f", {self.statistics_share!r} for statistics, {self.looks} looks" if self.statistics_share else ""
        more += f", a quorum of {self.quorum}" if self.quorum is not None else ""
        return (
            f"epsilon {self.epsilon!r}, delta {self.delta!r}, clip {self.clip!r}, {self.steps} steps, "
            f"{self.colluders} colluders, {self.reruns} reruns{more}"
        )
