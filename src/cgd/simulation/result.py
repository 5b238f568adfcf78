"""What a run leaves behind: the training loss of every step, and what sampled participants reached on held-out data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """Losses and accuracies on held-out data after so many steps.

    Attributes:
        step: the number of steps taken.
        loss: of each sampled participant.
        accuracy: of each sampled participant; empty if the labels are not classes.
        fused_loss: of sampled rows in `towers`, by late fusion.
        fused_accuracy: the same, accuracies.
    """

    step: int
    loss: list[float]
    accuracy: list[float] = field(default_factory=list)
    fused_loss: list[float] = field(default_factory=list)
    fused_accuracy: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """How some participants do: the mean, the worst, the standard deviation between them."""

    mean: float
    worst: float
    deviation: float

    @classmethod
    def of_losses(cls, values: list[float]) -> Spread:
        """The worst loss is the highest."""
        return cls(fmean(values), max(values), pstdev(values))

    @classmethod
    def of_accuracies(cls, values: list[float]) -> Spread:
        """The worst accuracy is the lowest."""
        return cls(fmean(values), min(values), pstdev(values))


@dataclass
class History:
    """The course of a run.

    Attributes:
        participants: the names of those that are evaluated.
        training_loss: the mean loss over all samples before each step, each sample under its own participant's model.
        evaluations: on held-out data.
    """

    participants: list[str] = field(default_factory=list)
    training_loss: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Numbers and lists only; what an evaluation does not have is left out."""
        content = asdict(self)
        content["evaluations"] = [
            {key: value for key, value in each.items() if value != []} for each in content["evaluations"]
        ]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> History:
        """The counterpart of `as_json`."""
        evaluations = [Evaluation(**each) for each in content["evaluations"]]
        return cls(list(content["participants"]), list(content["training_loss"]), evaluations)
