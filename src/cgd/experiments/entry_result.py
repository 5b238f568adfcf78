"""The results of an entry of an experiment: one for each seed, and their summary over the seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

from cgd.simulation.result import Spread

if TYPE_CHECKING:
    from cgd.experiments.experiment_file import RunEntry
    from cgd.experiments.runner import RunResult

    Metric = Literal["loss", "accuracy", "fused_loss", "fused_accuracy", "kept_loss", "kept_accuracy"]


@dataclass(frozen=True)
class SeedSpread:
    """A metric after the last step, over participants and seeds.

    Attributes:
        mean: mean over the seeds of the mean over the evaluated participants.
        worst: worst value of all evaluated participants of all seeds.
        deviation: standard deviation over the evaluated participants of a seed, mean over the seeds.
        seed_deviation: standard deviation over the seeds (with n − 1) of the means over participants; None for one.
    """

    mean: float
    worst: float
    deviation: float
    seed_deviation: float | None


@dataclass(frozen=True)
class EntryResult:
    """An entry of an experiment, with the results of those of its seeds that have been run.

    Attributes:
        entry: the entry.
        results: results, in the order of the seeds.
    """

    entry: RunEntry
    results: tuple[RunResult, ...]

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy over the seeds; None if there is no result, or the labels are not classes."""
        spread = self.spread("accuracy")
        return None if spread is None else spread.mean

    @property
    def missing(self) -> int:
        """The number of seeds that have not been run."""
        return self.entry.seeds - len(self.results)

    @property
    def seeds(self) -> str:
        """The number of seeds, such as "3", or "2 of 3" if some have not been run."""
        return f"{len(self.results)} of {self.entry.seeds}" if self.missing else str(self.entry.seeds)

    def spread(self, metric: Metric) -> SeedSpread | None:
        """Summarise a metric after the last step; None if no result has it."""
        summarise, worst = (Spread.of_losses, max) if metric.endswith("loss") else (Spread.of_accuracies, min)
        values = (getattr(result.last, metric) for result in self.results)
        seeds = [summarise(each) for each in values if each]
        if not seeds:
            return None
        means = [each.mean for each in seeds]
        return SeedSpread(
            fmean(means),
            worst(each.worst for each in seeds),
            fmean(each.deviation for each in seeds),
            stdev(means) if len(means) > 1 else None,
        )
