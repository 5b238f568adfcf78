"""The parts of `run.json` about the quality of a model: scores, a comparison, subgroups, importance of columns."""

from __future__ import annotations

from msgspec import Struct


class RocCurve(Struct):
    """Points of a ROC curve."""

    fpr: list[float]
    tpr: list[float]

    def __post_init__(self) -> None:
        if len(self.fpr) != len(self.tpr):
            raise ValueError("fpr and tpr have different lengths")


class CalibrationBin(Struct):
    """Some records with similar predictions: the mean predicted probability, and the observed fraction."""

    records: int
    predicted: float
    observed: float


class Calibration(Struct):
    """Predicted probabilities against observed fractions; see `cgd.tabular.metrics`.

    With two classes, they are those of the second class; with more, those of the predicted class.

    Attributes:
        bins: records in the order of their predictions, in about equal parts; equal predictions are in one.
        predicted: mean probability of all records.
        observed: fraction of all records.
        error: the expected calibration error, the mean distance of the two over the bins.
        brier: the Brier score; None with more than two classes.
    """

    bins: list[CalibrationBin]
    predicted: float
    observed: float
    error: float
    brier: float | None = None


class Thresholds(Struct):
    """The numbers of records of each of two classes that have a higher probability than 0.00, 0.01, …, 1.00."""

    true_positives: list[int]
    false_positives: list[int]

    def __post_init__(self) -> None:
        if (len(self.true_positives), len(self.false_positives)) != (101, 101):
            raise ValueError("true_positives and false_positives do not have 101 numbers")


class ClassificationScores(Struct):
    """Scores on the validation records; see `cgd.tabular.metrics.classification_scores`."""

    records: int
    accuracy: float
    classes: list[str]
    confusion: list[list[int]]
    balanced_accuracy: float | None = None
    auc: float | None = None
    log_loss: float | None = None
    roc: RocCurve | None = None
    baseline_accuracy: float | None = None
    calibration: Calibration | None = None
    thresholds: Thresholds | None = None

    def __post_init__(self) -> None:
        size = len(self.classes)
        if [len(row) for row in self.confusion] != [size] * size:
            raise ValueError(f"confusion is not a table of {size} by {size}, the number of classes")


class RegressionScores(Struct):
    """Scores on the validation records; see `cgd.tabular.metrics.regression_scores`."""

    records: int
    rmse: float
    mae: float
    r2: float | None = None
    actual: list[float] | None = None
    predicted: list[float] | None = None

    def __post_init__(self) -> None:
        if len(self.actual or []) != len(self.predicted or []):
            raise ValueError("actual and predicted have different lengths")


class Estimate(Struct):
    """A score, or a difference of two, with its 95 % interval; None if these records do not give one."""

    value: float
    low: float | None = None
    high: float | None = None


class ComparedModel(Struct):
    """A model in a comparison; see `cgd.tabular.comparison`.

    Attributes:
        name: "alone", "together", and "scaled" or "personalised", the model that is kept.
        scores: accuracy, auc and log_loss, or r2 and rmse.
        gains: how much better the scores are than those of the first model; None for that one.
    """

    name: str
    scores: dict[str, Estimate]
    gains: dict[str, Estimate] | None = None


class Comparison(Struct):
    """Our models beside one of our own records alone; see `cgd.tabular.alone`.

    Attributes:
        records: number of validation records, on which all models are scored.
        training: number of records that we train on alone.
        models: the models; none if there is no comparison.
        unavailable: the reason why there is no model alone.
    """

    records: int
    training: int
    models: list[ComparedModel]
    unavailable: str | None = None


class KeptStage(Struct):
    """A model on the way to the one that is kept, on all validation records, which chose it.

    Attributes:
        name: "trained", "scaled" (with another part of the origin), or "adapted".
        loss: the mean loss, as in training.
        score: accuracy or R².
    """

    name: str
    loss: float
    score: float | None = None


class Kept(Struct):
    """The model that is kept; see `cgd.tabular.kept_model`.

    Attributes:
        keep: what was wanted, "scaled" or "personalised".
        records: number of validation records, on which the model was chosen.
        models: the models from the trained to the kept one; none if there was no choice.
        part: c, the part of the origin.
        method: "intercept" or "weights"; None if it was not adapted.
        steps: the number of steps of the adaptation.
        unavailable: the reason if there was no choice.
    """

    keep: str
    records: int
    models: list[KeptStage]
    part: float = 1.0
    method: str | None = None
    steps: int = 0
    unavailable: str | None = None


class Subgroup(Struct):
    """The scores of some of the validation records; none of too few.

    Attributes:
        records: number of records.
        scores: accuracy and auc, or mae.
        name: the category; None for missing values, and for other groups.
        groups: how many categories are counted together.
    """

    records: int
    scores: dict[str, Estimate]
    name: str | None = None
    groups: int = 1


class SubgroupColumn(Struct):
    """The groups of a category column, the largest first; `others` are too small to be shown, or too many."""

    column: str
    groups: list[Subgroup]
    others: Subgroup | None = None


class ColumnImportance(Struct):
    """The rise of the loss if the values of a column are exchanged between records, in several repetitions."""

    column: str
    rise: float
    deviation: float


class Coefficient(Struct):
    """A weight of a model without hidden layers."""

    feature: str
    value: float
