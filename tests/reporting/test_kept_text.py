"""Sentences about the model that is kept, and whether joining helped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cgd.reporting import training_report
from cgd.reporting.run_file import load_run
from support import runs
from support.pages import Page

if TYPE_CHECKING:
    from pathlib import Path

PRIVACY = {"epsilon": 1.0, "delta": 1e-6, "colluders": 1}


def report(run: runs.Run, folder: Path) -> Page:
    training_report.write_report(runs.write(run, folder))
    return Page((folder / "report.html").read_text())


JOINING = {
    (
        0.01,
        0.09,
    ): "Joining helped: on our own records, the model that we keep is clearly better than one of our own",
    (-0.02, 0.09): "Our own records do not show whether joining helped: there is no clear difference",
    (-0.09, -0.02): "Joining did not help: on our own records, the model that we keep is clearly worse than one",
}


@pytest.mark.parametrize("interval", JOINING)
def test_report_says_plainly_whether_joining_helped(interval: tuple[float, float], tmp_path: Path) -> None:
    run = runs.classification()
    models = run["comparison"]["models"]
    models.append(json.loads(json.dumps(models[1])) | {"name": "personalised"})
    models[2]["gains"]["log_loss"] |= dict(zip(("low", "high"), interval, strict=True))
    page = report(run, tmp_path)
    assert page.text.count(JOINING[interval]) == 2  # at the top, and in its section
    printed = "\n".join(training_report.describe_result(load_run(tmp_path)))
    assert JOINING[interval] in printed
    assert " personalised and " in printed
    assert " together and 0." not in printed
    differ = "As it was trained, the model together is {} for our records than one of our own alone"
    assert "As it was trained, the model" not in page.text
    models[1]["gains"]["log_loss"] |= {"value": -0.15, "low": -0.2, "high": -0.1}
    assert differ.format("clearly worse") in report(run, tmp_path).text
    models[1]["gains"]["log_loss"] |= {"high": 0.1}
    assert differ.format("worse, if not clearly,") in report(run, tmp_path).text


UNDECIDED = {
    "few of a class": ([[90, 0], [3, 4]], "there are 90 of <=50K and 7 of >50K; at least 10 of each class are needed"),
    "one class": ([[0, 0], [300, 903]], "there are 0 of <=50K and 1,203 of >50K; records of two classes are needed"),
    "few of one class": ([[0, 0], [1, 2]], "there are 0 of <=50K and 3 of >50K; records of two classes are needed"),
}


@pytest.mark.parametrize(("confusion", "reason"), UNDECIDED.values(), ids=UNDECIDED)
def test_records_that_cannot_decide_whether_joining_helped(
    confusion: list[list[int]], reason: str, tmp_path: Path
) -> None:
    run = runs.classification()
    run["validation"] |= {"confusion": confusion, "auc": None, "records": sum(map(sum, confusion))}
    models = run["comparison"]["models"]
    models[1]["gains"]["log_loss"] |= {"value": -0.05, "low": -0.09, "high": -0.02}
    sentence = f"Our validation records cannot decide whether joining helped: {reason}."
    page = report(run, tmp_path)
    assert page.text.count(sentence) == 2  # at the top, and in its section
    assert sentence in training_report.describe_result(load_run(tmp_path))
    for verdict in ("Joining", "a clear difference", "no clear difference", "As it was trained, the model"):
        assert verdict not in page.text
    assert "these records cannot decide" in page.text


def test_few_records_of_many_classes_or_numbers_cannot_decide_whether_joining_helped(tmp_path: Path) -> None:
    run, compared = runs.many_classes(), runs.classification()["comparison"]
    run["comparison"] = compared
    size = len(run["validation"]["classes"])
    confusion = [[100 if row == column == 0 else 0 for column in range(size)] for row in range(size)]
    run["validation"] |= {"confusion": confusion, "auc": None}
    only = "there are 100 of Adenocarcinoma of the a… and 0 of 9 others; records of two classes are needed."
    assert only in report(run, tmp_path).text
    for place in range(1, 6):
        confusion[place][place] = place
    few = "1 of Carcinoid, 2 of Clear cell renal cell c…, 3 of Diffuse large B-cell ly… and few of 2 others; at least"
    assert few in report(run, tmp_path).text
    for place in range(1, 6):
        confusion[place][place] = 10
    assert "cannot decide" not in report(run, tmp_path).text
    numbers = runs.regression()
    numbers["validation"] |= {"records": 9}
    few = "cannot decide whether joining helped: there are 9; at least 10 are needed."
    assert few in report(numbers, tmp_path).text
    numbers = runs.regression()
    numbers["comparison"]["models"][1]["gains"]["rmse"] |= {"low": None, "high": None}
    reason = "the difference between the two models has no interval on them"
    assert f"cannot decide whether joining helped: {reason}." in report(numbers, tmp_path).text


def test_report_describes_the_model_that_is_kept(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    chosen = "with 0.5 of our origin, and all its weights adapted to our own training records in 35 steps. "
    stages = (
        "On our 1,203 validation records, which chose it: as trained, loss 0.402, accuracy 0.812; with 0.5 of the "
        "origin, loss 0.398, accuracy 0.815; adapted, loss 0.371, accuracy 0.829."
    )
    assert f"We keep the model {chosen}{stages}" in page.text
    assert "kept" in page.ids
    assert "come from choices on four fifths of the validation records, each scored on the other fifth" in page.text
    assert "whoever gets it may learn more about them than from the confined one" in page.text
    assert "folder confined" in page.text
    assert "ε" not in page.text
    private = run | {"privacy": PRIVACY}
    assert "without noise: the guarantee of ε does not cover this model" in report(private, tmp_path).text
    run["kept"] |= {"part": 0.0, "method": None, "models": run["kept"]["models"][:2]}
    page = report(run, tmp_path)
    assert "We keep the model without our origin. On our" in page.text
    assert "This is a model that all members have" in page.text
    private = run | {"privacy": PRIVACY}
    assert "depends on our validation records without noise" in report(private, tmp_path).text
    run["kept"] |= {"models": run["kept"]["models"][:1]}
    assert "as it was trained: no other one is clearly better on our 1,203 validation" in report(run, tmp_path).text
    run["kept"] |= {"models": [], "unavailable": "we have 7 validation records, and 20 are needed to choose on"}
    assert "as it was trained: we have 7 validation records" in report(run, tmp_path).text


SELECTED = "also chose the step at which the training stopped: so together{} may look slightly better on them than on"


@pytest.mark.parametrize(
    ("patience", "best_step", "told"),
    [(5, 160, True), (5, 200, True), (0, 160, True), (0, 200, False), (5, None, False)],
)
def test_scores_of_records_that_chose_the_step_are_called_too_good(
    patience: int, best_step: int | None, told: bool, tmp_path: Path
) -> None:
    run = runs.classification()
    run["training"]["patience"] = patience
    run["outcome"] |= {"steps": 200, "best_step": best_step}
    page = report(run, tmp_path)
    printed = "\n".join(training_report.describe_result(load_run(tmp_path)))
    for text in (page.text, printed):
        assert (SELECTED.format("") in text) == told
    models = run["comparison"]["models"]
    models.append(json.loads(json.dumps(models[1])) | {"name": "personalised"})
    assert (SELECTED.format(" and personalised") in report(run, tmp_path).text) == told
    run["comparison"] = None
    report(run, tmp_path)
    printed = "\n".join(training_report.describe_result(load_run(tmp_path)))
    assert ("so the model may look slightly better" in printed) == told
