"""The report as a page: what the template is given, and how figures are written.

Whatever comes from a run's file stays text. The template escapes it, and the page's content security policy allows no
script and no address, so that even what got through could do nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from cgd.reporting import charts

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_CATEGORIES = 8
# From this many classes on, or with longer names, the confusion matrix has numbers for headings.
MAX_NAMED_CLASSES, MAX_HEADING_LENGTH = 4, 12
# Not strftime's, which speaks the language of the machine: the same run gives the same page.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_SETTINGS = {
    "steps": "Steps, at most",
    "lr": "Step size α",
    "mu": "Its decrease μ",
    "optimizer": "Optimiser",
    "momentum": "Momentum",
    "validate_every": "Steps between two looks at the validation loss",
    "patience": "Looks without a better one that end it",
    "delta": "Deviation of the origin δ",
    "bound": "Largest value of a sum",
    "ring_bits": "Bits of a ring element",
    "sharing": "Secret shares",
    "opening": "Opening of sums",
    "aggregator": "Aggregator",
    "minimum": "Fewest members of a sum",
}


@dataclass(frozen=True)
class Figure:
    """One figure of the result.

    Attributes:
        name: what it is.
        value: as written.
        meaning: in a sentence.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class ClassRow:
    """One class of the confusion matrix.

    Attributes:
        number: from 1.
        name: of the class.
        cells: how many of its records were taken for each class.
        shares: the same, as parts of the row.
        records: how many there are.
        found: the part that was recognised; None without records.
        right: the part of what was called so that is so; None if nothing was.
    """

    number: int
    name: str
    cells: list[int]
    shares: list[float]
    records: int
    found: float | None
    right: float | None


def render(run: dict[str, Any]) -> str:
    """The page of a run, as `load_run` gives it."""
    scores, classification = run["validation"], run["data"]["task"] == "classification"
    pictures = [charts.loss_chart(run), charts.score_chart(run)]
    detail = []
    if scores is not None:
        drawn = (charts.roc_chart,) if classification else (charts.scatter_chart, charts.residual_chart)
        detail = [each(scores) for each in drawn]
    classes = class_rows(scores) if scores is not None and classification else []
    page = templates("cgd.reporting").get_template("report.html.jinja")
    text = page.render(
        run=run,
        headline=headline(run),
        lead=lead(run),
        figures=figures(run),
        curves=[each for each in pictures if each],
        details=[each for each in detail if each],
        classes=classes,
        numbered=len(classes) > MAX_NAMED_CLASSES or any(len(each.name) > MAX_HEADING_LENGTH for each in classes),
        model=model_sentence(run),
        holders={each["name"]: each["held_by"] for each in run["data"]["columns"] or []},
        settings=[(_SETTINGS.get(name, name), name, value) for name, value in _settings(run)],
        fewer=_fewer_records_than_features(run),
        most_categories=MAX_CATEGORIES,
    )
    return compact(text)


def headline(run: dict[str, Any]) -> tuple[str, str, str]:
    """The result: what it is, the figure, and on what."""
    scores = run["validation"]
    if scores is None:
        return "A model of", run["data"]["target"], "and no records of our own to judge it by"
    kept = "record that was" if scores["records"] == 1 else "records that were"
    on = f"on {scores['records']:,} of our own {kept} kept back"
    if run["data"]["task"] == "classification":
        return "Accuracy", decimals(scores["accuracy"]), on
    if scores["r2"] is not None:
        return "R²", decimals(scores["r2"]), on
    return "Root mean square error", figure(scores["rmse"]), on


def lead(run: dict[str, Any]) -> list[str]:
    """What one has to know to judge the headline."""
    scores, outcome = run["validation"], run["outcome"] or {}
    told = [] if scores is not None else ["Nothing on this page says how well it does on records it has not seen."]
    if scores is not None and run["data"]["task"] == "classification":
        told += _accuracy_judged(scores)
    elif scores is not None:
        told.append(
            f"Predictions of {run['data']['target']} are {figure(scores['mae'])} off on average (root mean square "
            f"{figure(scores['rmse'])})."
        )
        if scores["r2"] is not None and scores["r2"] <= 0:
            told.append("Always saying the mean of these records would do as well or better.")
    if scores is not None and outcome.get("best_step") is not None:
        told.append("Kept-back records also decided which step's model was kept, so new ones may fare a little worse.")
    return told


def figures(run: dict[str, Any]) -> list[Figure]:
    """All figures of the result; those that the records cannot give are left out."""
    scores = run["validation"]
    if scores is None:
        return []
    if run["data"]["task"] == "regression":
        spread = (run["target"] or {}).get("deviation")
        compared = f"; {run['data']['target']} itself has a deviation of {figure(spread)}" if spread is not None else ""
        found = [
            ("R²", scores["r2"], decimals, "of the spread explained; 1 is perfect, 0 is the mean"),
            ("Root mean square error", scores["rmse"], figure, f"large errors count more{compared}"),
            ("Mean absolute error", scores["mae"], figure, "how far off on average"),
        ]
    else:
        ranked = "a record ranks above others for its own class"
        if len(scores["classes"]) == 2:
            first, second = (charts.shortened(name) for name in scores["classes"])
            ranked = f"a record of {second} ranks above one of {first}"
        found = [
            ("Accuracy", scores["accuracy"], decimals, "the part of the records that is right"),
            ("Commonest class", scores["baseline_accuracy"], decimals, "accuracy of always saying that"),
            ("Balanced accuracy", scores["balanced_accuracy"], decimals, "a rare class counts like a common one"),
            ("AUC", scores["auc"], decimals, f"how often {ranked}; 0.5 is guessing"),
            ("Log loss", scores["log_loss"], decimals, "confident errors count most; 0 is perfect"),
        ]
    return [Figure(name, write(value), meaning) for name, value, write, meaning in found if value is not None]


def class_rows(scores: dict[str, Any]) -> list[ClassRow]:
    """The confusion matrix, class by class."""
    confusion = scores["confusion"]
    called = [sum(column) for column in zip(*confusion, strict=True)]
    rows = []
    for i, (name, cells) in enumerate(zip(scores["classes"], confusion, strict=True)):
        total = sum(cells)
        shares = [cell / total if total else 0.0 for cell in cells]
        found, right = shares[i] if total else None, cells[i] / called[i] if called[i] else None
        rows.append(ClassRow(i + 1, name, cells, shares, total, found, right))
    return rows


def model_sentence(run: dict[str, Any]) -> str:
    """What the model is."""
    model = run["model"]
    if model is None:
        return ""
    kinds = {"linear": "A linear model", "logistic": "A logistic regression", "custom": f"{model['function']}"}
    told = kinds.get(model["kind"], model["kind"])
    if model["kind"] == "mlp":
        layers = " and ".join(f"{width:,}" for width in model["layers"] or [])
        told = f"A neural network with hidden layers of {layers} units ({model['activation']})"
    if model["parameters"] is not None:
        told += f", {model['parameters']:,} parameters"
    return f"{told}."


def interval(part: float, records: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a part of so many records."""
    z = 1.959964
    spread = z * math.sqrt(part * (1 - part) / records + z * z / (4 * records * records))
    middle, scale = part + z * z / (2 * records), 1 + z * z / records
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def decimals(value: float | None) -> str:
    """A score, with three decimals."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}".replace("-", "−")


def figure(value: float | None) -> str:
    """A figure of any size, with four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.3e}".replace("-", "−")
    return f"{value:,.{0 if size >= 1000 else 4}{'f' if size >= 1000 else 'g'}}".replace("-", "−")


def share(part: float | None) -> str:
    """A part as a percentage."""
    if part is None or not math.isfinite(part):
        return "–"
    return f"{100 * part:.1f} %" if part == 0 or part >= 0.001 else "< 0.1 %"


def size(count: int) -> str:
    """A number of bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """A time that something took."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def when(text: str) -> str:
    """A moment for people to read, in UTC; as it stands if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    if moment.tzinfo is None:
        return text
    moment = moment.astimezone(UTC)
    return f"{moment.day} {_MONTHS[moment.month - 1]} {moment.year}, {moment:%H:%M} UTC"


def _accuracy_judged(scores: dict[str, Any]) -> list[str]:
    accuracy, baseline = scores["accuracy"], scores["baseline_accuracy"]
    told = []
    if 0 <= accuracy <= 1 and scores["records"] > 0:
        low, high = interval(accuracy, scores["records"])
        told.append(f"The 95 % interval for this many records is {decimals(low)} to {decimals(high)}.")
    if baseline is not None:
        worse = " The model is no better than that." if accuracy <= baseline else ""
        told.append(f"Always saying the class that is commonest among them would reach {decimals(baseline)}.{worse}")
    return told


def _settings(run: dict[str, Any]) -> list[tuple[str, str]]:
    """What was set, the known names first and in their order; what is empty says nothing."""
    given = {name: value for name, value in (run["training"] or {}).items() if value not in ("", None)}
    ordered = [name for name in _SETTINGS if name in given] + sorted(given.keys() - _SETTINGS)
    return [(name, _setting(given[name])) for name in ordered]


def _setting(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _fewer_records_than_features(run: dict[str, Any]) -> tuple[int, int] | None:
    records, features = (run["records"] or {}).get("everyone_training"), len(run["features"] or [])
    return (records, features) if records is not None and records < features else None


@cache
def templates(package: str) -> Environment:
    """The templates of a package, and below them those that every page is made from (`page.html.jinja`)."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("cgd.reporting", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = {"decimals": decimals, "figure": figure, "share": share, "size": size, "duration": duration, "when": when}
    environment.filters |= written
    environment.filters["count"] = "{:,}".format
    return environment


def compact(page: str) -> str:
    """The page without the empty lines that a template leaves."""
    return "\n".join(line for line in page.splitlines() if line.strip()) + "\n"
