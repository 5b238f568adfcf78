"""Charges to the privacy budget of a data set, and how they add up.

A training may set validation records aside. Then each record is in one of two parts, and the training counts with the
part that was charged more; if it began again with another split, the parts of both splits add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

TRAINING, VALIDATION = "training", "validation"
"""The two parts of the records of one training."""


@dataclass(frozen=True)
class Charge:
    """One opening that was charged.

    Attributes:
        mu_squared: the square of its μ.
        training: the training, such as a federation's name.
        what: what was opened, such as a step.
        time: when, in UTC.
        records: the part of the records that it is about: those trained on, or those of the validation split.
        split: names the rule by which a record is in one part or the other; empty if there is no validation split.
    """

    mu_squared: float
    training: str
    what: str
    time: str
    records: str
    split: str


@dataclass(frozen=True)
class Decision:
    """A higher limit that was decided on.

    Attributes:
        epsilon: ε of the limit.
        time: when, in UTC.
        reason: why, in the words of who decided.
    """

    epsilon: float
    time: str
    reason: str


@dataclass
class Charges:
    """All charges of a data set.

    Attributes:
        all: in the order in which they were made.

    Examples:
        >>> made = Charges()
        >>> for records, mu_squared in ((TRAINING, 0.25), (VALIDATION, 0.125), (TRAINING, 0.25)):
        ...     made.add(Charge(mu_squared, "study", "a step", "", records, ""))
        >>> float(made.total())
        0.5
    """

    all: list[Charge] = field(default_factory=list)
    _spent: dict[tuple[str, str, str], Fraction] = field(default_factory=dict)

    def add(self, charge: Charge) -> None:
        """Add a charge."""
        self.all.append(charge)
        key = charge.training, charge.split, charge.records
        self._spent[key] = self._spent.get(key, Fraction()) + Fraction(charge.mu_squared)

    def total(self, training: str | None = None) -> Fraction:
        """Return what one training, or all together, have used: of each split, the part that was charged more."""
        splits = {(name, split) for name, split, _ in self._spent if training in (None, name)}
        return sum((self._of_split(*each) for each in splits), Fraction())

    def total_with(self, mu_squared: float, training: str, split: str, records: str) -> Fraction:
        """Return what all together would have used after one more charge."""
        before = self._of_split(training, split)
        part = self._spent.get((training, split, records), Fraction()) + Fraction(mu_squared)
        return self.total() - before + max(before, part)

    def _of_split(self, training: str, split: str) -> Fraction:
        return max(self._spent.get((training, split, part), Fraction()) for part in (TRAINING, VALIDATION))
