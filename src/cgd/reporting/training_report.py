"""The report of a run, for clinicians, data scientists and privacy officers.

    metrics.csv   loss and score against steps
    report.html   everything, on one self-contained page

Both disclose something about the participant's own records, so only their owner may read them. They are made from
run.json alone and can be written again at any time; the same run gives the same bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgd.federation.config import RENAMED
from cgd.federation.toml_validation import with_new_keys
from cgd.files import write_private, write_rows
from cgd.reporting import charts, class_scores, score_tables
from cgd.reporting.html import compact, decimals, figure, templates
from cgd.reporting.intervals import wilson_interval
from cgd.reporting.kept_text import describe_benefit, describe_kept, describe_selection
from cgd.reporting.privacy_text import describe_guarantee
from cgd.reporting.run_file import load_run
from cgd.reporting.run_scores import ClassificationScores, RegressionScores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.reporting.run_file import AnyRun, PeerTimesInfo

REPORT_FILE = "report.html"  # written last
METRICS = ("step", "training_loss", "validation_loss", "everyone_validation_loss", "score")
MAX_CATEGORIES = 8
# A confusion matrix with more classes, or longer names, has numbers for headings.
MAX_NAMED_CLASSES, MAX_HEADING_LENGTH = 4, 12
MAX_MATRIX_CLASSES = 60  # the matrix has a cell for every pair; other participants may add classes
MIN_RECORDS_TO_JUDGE = 10
_SETTINGS = {
    "steps": "Maximum number of steps",
    "lr": "Learning rate α",
    "mu": "Learning rate decay μ",
    "optimizer": "Optimiser",
    "momentum": "Momentum",
    "batches": "Batches of an epoch",
    "local_epochs": "Local epochs between two sums",
    "local_lr": "Learning rate of local steps",
    "delay": "Steps after which the model moves by a sum",
    "validate_every": "Steps between evaluations",
    "patience": "Evaluations without improvement before early stopping",
    "delta": "Standard deviation of the origin δ",
    "bound": "Bound of an addend",
    "ring_bits": "Bits of a ring element",
    "masking": "Masking of gradients",
    "opening": "Opening of sums",
    "aggregator": "Aggregator",
    "minimum": "Minimum members of a sum",
}


@dataclass(frozen=True)
class Figure:
    """A score of the result.

    Attributes:
        name: its name.
        value: the formatted value.
        meaning: a short explanation.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class ClassRow:
    """One class of the confusion matrix.

    Attributes:
        number: index from 1.
        name: the class's name.
        cells: number of its records predicted as each class of the matrix.
        shares: the cells as fractions of the row.
        records: number of its records.
        recall: fraction of its records predicted as this class; None without records.
        precision: fraction of the predictions of this class that are correct; None without predictions.
    """

    number: int
    name: str
    cells: list[int]
    shares: list[float]
    records: int
    recall: float | None
    precision: float | None


def write_report(folder: Path, threshold: float = class_scores.DEFAULT_THRESHOLD) -> list[Path]:
    """Write the report of a run next to its file; replace an earlier one.

    Args:
        folder: the directory of the run.
        threshold: the probability above which the confusion matrix counts a record as of the second of two classes.

    Returns:
        The files: metrics.csv, report.html.

    Raises:
        InputError: it is not the directory of a run, run.json is damaged, the run has no results at the threshold, or
            the files cannot be written.
    """
    run = load_run(folder)
    # Everything is rendered before anything is written: a report must not be half old and half new.
    files = {"metrics.csv": _metrics_csv(run).encode(), REPORT_FILE: render(run, threshold).encode()}
    for name, content in files.items():
        write_private(folder / name, content)
    return [folder / name for name in files]


def describe_result(run: AnyRun) -> list[str]:
    """Return the lines that a command prints about a run: its result, alone and together, and remarks."""
    scores = run.validation
    rare = class_scores.describe_rare_classes(scores) if isinstance(scores, ClassificationScores) else ""
    kept = describe_kept(run)[:1]  # the report has the rest
    compared = [*describe_benefit(run), *score_tables.describe_comparison(run, kept_only=True)]
    return [summarize(run), *kept, *compared, *describe_selection(run), *([rare] if rare else [])]


def summarize(run: AnyRun) -> str:
    """Return the result of a run in one sentence."""
    scores, outcome = run.validation, run.outcome
    step = "" if outcome is None else f", at step {outcome.best_step or outcome.steps}"
    if scores is None:
        return f"{run.participant} has a model{step}; there are no validation records to score it on"
    scored = f"on {scores.records:,} of our own validation records{step}"
    few = "; too few records to judge" if scores.records < MIN_RECORDS_TO_JUDGE else ""
    if isinstance(scores, RegressionScores):
        r2 = f", R² {scores.r2:.3f}" if scores.r2 is not None else ""
        poor = "; no better than the mean" if scores.r2 is not None and scores.r2 <= 0 else ""
        return f"root mean squared error {scores.rmse:.4g}{r2} {scored}{few or poor}"
    auc = f", AUC {scores.auc:.3f}" if scores.auc is not None else ""
    baseline = scores.baseline_accuracy
    poor = "; no better than the most common class" if baseline is not None and scores.accuracy <= baseline else ""
    return f"accuracy {100 * scores.accuracy:.1f} %{auc} {scored}{few or poor}"


def render(run: AnyRun, threshold: float = class_scores.DEFAULT_THRESHOLD) -> str:
    """Return the page of a run; see `write_report`."""
    scores = run.validation
    hundredth = class_scores.check_threshold(run, threshold)
    curves = [charts.loss_chart(run), charts.score_chart(run)]
    details: list[charts.Chart | None] = []
    classes: list[ClassRow] = []
    calibration: tuple[charts.Chart | None, list[str]] = None, []
    thresholds: list[class_scores.ThresholdRow] = []
    if isinstance(scores, ClassificationScores):
        shown = shown_classes(scores)
        details, classes = (
            [charts.roc_chart(scores)],
            class_rows(scores, shown, class_scores.confusion_at(scores, hundredth)),
        )
        balanced = run.data.class_weights == "balanced"
        calibration = charts.calibration_chart(scores), class_scores.describe_calibration(scores, balanced=balanced)
        thresholds = class_scores.threshold_rows(scores, hundredth)
    elif scores is not None:
        details = [charts.scatter_chart(scores), charts.residual_chart(scores)]
    page = templates("cgd.reporting").get_template("report.html.jinja")
    text = page.render(
        run=run,
        headline=headline(run),
        lead=lead(run),
        figures=figures(run),
        curves=[each for each in curves if each],
        details=[each for each in details if each],
        classes=classes,
        calibration=calibration,
        thresholds=thresholds,
        threshold=hundredth / 100,
        remarks=remarks(run),
        compared=score_tables.comparison_tables(run),
        comparison=[*describe_benefit(run), *score_tables.describe_comparison(run)],
        kept=describe_kept(run),
        selection=describe_selection(run),
        alone=alone(run),
        subgroups=score_tables.subgroup_tables(run),
        importance=score_tables.importance_rows(run),
        coefficients=score_tables.coefficient_rows(run),
        max_rows=score_tables.MAX_ROWS,
        hidden=len(scores.classes) - len(classes) if isinstance(scores, ClassificationScores) else 0,
        numbered=len(classes) > MAX_NAMED_CLASSES or any(len(each.name) > MAX_HEADING_LENGTH for each in classes),
        model=describe_model(run),
        holders={each.name: each.held_by for each in run.data.columns or []},
        settings=[(_SETTINGS.get(name, name), name, value) for name, value in _settings(run)],
        fewer=_fewer_records_than_features(run),
        max_categories=MAX_CATEGORIES,
        waited=waited_for(run),
        guarantee=describe_guarantee(run.privacy) if run.privacy else {},
    )
    return compact(text)


def headline(run: AnyRun) -> tuple[str, str, str]:
    """Return the name of the main score, its value, and the records it was computed on."""
    scores = run.validation
    if scores is None:
        return "A model of", run.data.target, "without validation records of our own"
    on = f"on {scores.records:,} of our own validation records"
    if isinstance(scores, ClassificationScores):
        return "Accuracy", decimals(scores.accuracy), on
    if scores.r2 is not None:
        return "R²", decimals(scores.r2), on
    return "Root mean square error", figure(scores.rmse), on


def lead(run: AnyRun) -> list[str]:
    """Return the sentences that put the headline into perspective."""
    scores = run.validation
    if scores is None:
        return ["Nothing on this page measures how well it predicts new records."]
    if isinstance(scores, ClassificationScores):
        sentences = _judge_accuracy(scores)
    else:
        errors = f"{figure(scores.mae)} (root mean square error {figure(scores.rmse)})"
        sentences = [f"The mean absolute error of {run.data.target} is {errors}."]
        if scores.r2 is not None and scores.r2 <= 0:
            sentences.append("Always predicting the mean of these records would be as good or better.")
    if run.outcome is not None and run.outcome.best_step is not None:
        sentences.append(
            "Validation records also selected the step of the model, so new records may score slightly lower."
        )
    if run.privacy is None or not run.privacy.unit:
        sentences.append("If a person has records in both parts, training and validation, these figures are too good.")
    return sentences


def waited_for(run: AnyRun) -> list[tuple[str, PeerTimesInfo]]:
    """Return the peers for which we waited, and the seconds; the longest first."""
    peers = run.waiting.peers if run.waiting is not None else {}
    return sorted(peers.items(), key=lambda item: (-item[1].computing - item[1].summing - item[1].away, item[0]))


def alone(run: AnyRun) -> str:
    """Return whether joining helped us; empty without a model of our own records alone."""
    return " ".join(describe_benefit(run))


def remarks(run: AnyRun) -> list[str]:
    """Return remarks about scores that rest on too few records."""
    scores = run.validation
    if scores is None:
        return []
    few = f"{scores.records:,} validation record{'' if scores.records == 1 else 's'}: too few to judge the model."
    rare = class_scores.describe_rare_classes(scores) if isinstance(scores, ClassificationScores) else ""
    return [*([few] if scores.records < MIN_RECORDS_TO_JUDGE else []), *([rare] if rare else [])]


def figures(run: AnyRun) -> list[Figure]:
    """Return all scores of the result that the records define."""
    scores = run.validation
    if scores is None:
        return []
    if isinstance(scores, RegressionScores):
        spread = run.target.deviation if run.target else None
        compared = f"; {run.data.target} itself has a deviation of {figure(spread)}" if spread is not None else ""
        rows = [
            ("R²", scores.r2, decimals, "fraction of the variance explained; 1 is perfect, 0 is the mean"),
            ("Root mean square error", scores.rmse, figure, f"large errors count more{compared}"),
            ("Mean absolute error", scores.mae, figure, "average error"),
        ]
    else:
        ranked = "a record ranks above others for its own class"
        if len(scores.classes) == 2:
            first, second = (charts.shorten(name) for name in scores.classes)
            ranked = f"a record of {second} ranks above one of {first}"
        interval = class_scores.describe_auc_interval(scores)
        rows = [
            ("Accuracy", scores.accuracy, decimals, "fraction of correct predictions"),
            ("Most common class", scores.baseline_accuracy, decimals, "accuracy of always predicting it"),
            ("Balanced accuracy", scores.balanced_accuracy, decimals, "all classes count the same"),
            ("AUC", scores.auc, decimals, f"how often {ranked}; 0.5 is guessing{'; ' if interval else ''}{interval}"),
            ("Log loss", scores.log_loss, decimals, "confident errors count most; 0 is perfect"),
        ]
    return [Figure(name, write(value), meaning) for name, value, write, meaning in rows if value is not None]


def shown_classes(scores: ClassificationScores) -> list[int]:
    """Return the indices of the classes to show: all, or those with the most records and predictions, in order."""
    columns = zip(*scores.confusion, strict=True)
    sizes = [sum(row) + sum(column) for row, column in zip(scores.confusion, columns, strict=True)]
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])[:MAX_MATRIX_CLASSES]
    return sorted(largest)


def class_rows(
    scores: ClassificationScores, shown: Sequence[int] | None = None, confusion: list[list[int]] | None = None
) -> list[ClassRow]:
    """Return the confusion matrix, class by class: all classes, or those with the given indices.

    Another matrix than that of the scores is one at another threshold.
    """
    shown = range(len(scores.classes)) if shown is None else shown
    confusion = scores.confusion if confusion is None else confusion
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    rows = []
    for i in shown:
        row, total = confusion[i], sum(confusion[i])
        cells = [row[j] for j in shown]
        shares = [cell / total if total else 0.0 for cell in cells]
        recall, precision = row[i] / total if total else None, row[i] / predicted[i] if predicted[i] else None
        rows.append(ClassRow(i + 1, scores.classes[i], cells, shares, total, recall, precision))
    return rows


def describe_model(run: AnyRun) -> str:
    """Return a sentence about the model's architecture."""
    model = run.model
    if model is None:
        return ""
    kinds = {"linear": "A linear model", "logistic": "A logistic regression", "custom": f"{model.function}"}
    text = kinds.get(model.kind, model.kind)
    if model.kind == "mlp":
        layers = " and ".join(f"{width:,}" for width in model.layers or [])
        text = f"A neural network with hidden layers of {layers} units ({model.activation})"
    if model.parameters is not None:
        text += f", {model.parameters:,} parameters"
    return f"{text}."


def _judge_accuracy(scores: ClassificationScores) -> list[str]:
    accuracy, baseline = scores.accuracy, scores.baseline_accuracy
    sentences = []
    if 0 <= accuracy <= 1 and scores.records > 0:
        low, high = wilson_interval(accuracy, scores.records)
        sentences.append(f"The 95 % interval for this number of records is {decimals(low)} to {decimals(high)}.")
    if baseline is not None:
        worse = " The model is no better than that." if accuracy <= baseline else ""
        sentences.append(f"Always predicting the most common class of these records gives {decimals(baseline)}.{worse}")
    return sentences


def _metrics_csv(run: AnyRun) -> str:
    text = io.StringIO()
    write_rows(text, [METRICS, *([getattr(each, name) for name in METRICS] for each in run.history)])
    return text.getvalue()


def _settings(run: AnyRun) -> list[tuple[str, str]]:
    """Return the training settings that are not empty: known names first, in order."""
    training = with_new_keys(run.training or {}, RENAMED["training"])
    unused = () if run.privacy is None else ("bound",)  # the clip norm takes its place
    used = {name: value for name, value in training.items() if value not in ("", None) and name not in unused}
    ordered = [name for name in _SETTINGS if name in used] + sorted(used.keys() - _SETTINGS)
    return [(name, _format_setting(used[name])) for name in ordered]


def _format_setting(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _fewer_records_than_features(run: AnyRun) -> tuple[int, int] | None:
    records, features = run.records.everyone_training if run.records else None, len(run.features or [])
    return (records, features) if records is not None and records < features else None
