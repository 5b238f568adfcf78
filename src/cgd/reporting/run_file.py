"""The file `run.json`, which `cgd join --data` writes for reports and other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from msgspec import Struct

from cgd.json_files import read_json
from cgd.reporting.run_scores import (
    ClassificationScores,
    Coefficient,
    ColumnImportance,
    Comparison,
    Kept,
    RegressionScores,
    SubgroupColumn,
)

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "cgd-run-1"
FILE = "run.json"
REMEDY = "train again"

Task = Literal["classification", "regression"]
ScoresT = TypeVar("ScoresT")


class GridCell(Struct):
    """A grid and the participant's cell in it, row and column."""

    rows: int
    columns: int
    cell: tuple[int, int]


class FederationInfo(Struct):
    """The federation of a run."""

    name: str
    participants: list[str]
    epoch: int | None = None
    digest: str | None = None
    grid: GridCell | None = None
    hub: bool | None = None


class DataColumn(Struct):
    """A column of `[data.columns]`."""

    name: str
    held_by: int | None = None


class DataInfo(Struct):
    """The `[data]` section of the federation file."""

    target: str
    task: Task
    columns: list[DataColumn] | None = None
    class_weights: str | None = None
    id: str | None = None
    missing: list[str] | None = None
    validation: float | None = None


class ModelInfo(Struct):
    """The `[model]` section of the federation file, and the number of parameters."""

    kind: str
    layers: list[int] | None = None
    activation: str | None = None
    function: str | None = None
    delta: float | None = None
    parameters: int | None = None


class RecordCounts(Struct):
    """The participant's file and numbers of records."""

    file: str | None = None
    used: int | None = None
    training: int | None = None
    validation: int | None = None
    everyone_training: int | None = None


class ColumnSummary(Struct):
    """Statistics of a column over all members' records."""

    name: str
    type: Literal["number", "category"]
    present: int | None = None
    missing: int | None = None
    mean: float | None = None
    deviation: float | None = None
    constant: bool | None = None
    learned: bool | None = None
    categories: dict[str, int] | list[str] | None = None


class TargetSummary(Struct):
    """Statistics of the target over all members' records."""

    classes: dict[str, int] | list[str] | None = None
    mean: float | None = None
    deviation: float | None = None
    count: int | None = None


class EvalRecord(Struct, frozen=True):
    """An evaluation during the training, every few steps.

    Attributes:
        step: number of steps taken.
        everyone_validation_loss: mean over all members' validation records; None if there are none.
        best_step: step with the lowest loss so far.
        training_loss: loss on our own training records; this and the next two are None for steps that were taken
            before a restart.
        validation_loss: loss on our own validation records.
        score: accuracy, or R², on our own validation records.
    """

    step: int
    everyone_validation_loss: float | None = None
    best_step: int = 0
    training_loss: float | None = None
    validation_loss: float | None = None
    score: float | None = None


class Outcome(Struct):
    """The end of the training."""

    steps: int
    best_step: int | None = None
    early: bool | None = None
    seconds: float | None = None


class DisclosedSum(Struct):
    """A kind of opened sums; see `cgd.tabular.disclosure.disclosed_sums`."""

    what: str
    to: str | None = None
    times: int | None = None
    numbers: int | None = None


class SpentInfo(Struct):
    """The charges for one purpose, as a part of the budget of the training."""

    what: str
    openings: int
    records: Literal["training", "validation"]
    share: float


class BudgetInfo(Struct):
    """The privacy budget of the participant's records, over all trainings."""

    file: str
    epsilon: float
    delta: float
    spent: float


class CostInfo(Struct):
    """The lowest and highest loss in measurements with as much noise; see `cgd.tabular.privacy_expectation`.

    Attributes:
        accuracy: the losses of accuracy, as fractions.
        auc: the losses of the AUC.
        datasets: the data sets of the measurements.
        unknown: the reason, if there are no such measurements.
    """

    accuracy: tuple[float, float] | None = None
    auc: tuple[float, float] | None = None
    datasets: list[str] | None = None
    unknown: str | None = None


class PrivacyInfo(Struct):
    """The guarantee of differential privacy; see `cgd.tabular.private_run.privacy_summary`."""

    epsilon: float
    delta: float
    colluders: int
    members: int | None = None
    quorum: int | None = None
    unit: str = ""
    clip: float | None = None
    spent: list[SpentInfo] | None = None
    budget: BudgetInfo | None = None
    cost: CostInfo | None = None


class TrafficInfo(Struct):
    """Messages of the last process."""

    sums: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None


class PeerTimesInfo(Struct):
    """The seconds for which our program waited for a peer; see `cgd.transport.waiting_times`."""

    computing: float
    summing: float
    away: float
    alone: float


class WaitingInfo(Struct):
    """The seconds for which the last process computed, summed and waited; see `cgd.transport.waiting_times`."""

    computing: float
    summing: float
    waiting: float
    kept: float
    peers: dict[str, PeerTimesInfo]


class Run(Struct, Generic[ScoresT], kw_only=True):
    """The content of run.json. Optional values that are missing in the file are None; unknown keys are ignored."""

    format: str
    version: str | None = None
    participant: str
    finished: str | None = None
    federation: FederationInfo
    training: dict[str, Any] | None = None
    data: DataInfo
    model: ModelInfo | None = None
    records: RecordCounts | None = None
    features: list[str] | None = None
    columns: list[ColumnSummary] | None = None
    target: TargetSummary | None = None
    notes: list[str] | None = None
    history: list[EvalRecord]
    outcome: Outcome | None = None
    validation: ScoresT | None = None
    comparison: Comparison | None = None
    kept: Kept | None = None
    subgroups: list[SubgroupColumn] | None = None
    importance: list[ColumnImportance] | None = None
    coefficients: list[Coefficient] | None = None
    recorded: bool | None = None
    revealed: list[DisclosedSum] | None = None
    privacy: PrivacyInfo | None = None
    traffic: TrafficInfo | None = None
    waiting: WaitingInfo | None = None


AnyRun = Run[ClassificationScores] | Run[RegressionScores]


def load_run(run: Path) -> AnyRun:
    """Read the file of a run.

    Args:
        run: the directory of the run.

    Raises:
        InputError: it is not the directory of a run, or its file is damaged or of another format.
    """

    def read(kind: Any) -> Any:
        return read_json(run / FILE, kind, version=FORMAT, written_by="cgd join --data", remedy=REMEDY)

    kinds = {"classification": Run[ClassificationScores], "regression": Run[RegressionScores]}
    loaded: AnyRun = read(kinds[read(Run[Any]).data.task])
    return loaded
