from __future__ import annotations

import csv
import json
import math
import re
import stat
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import InputError
from cgd.files import write_private
from cgd.json_files import convert
from cgd.reporting import charts, class_scores, html, score_tables, training_report
from cgd.reporting.run_file import load_run
from cgd.reporting.run_scores import ClassificationScores, RegressionScores
from cgd.reporting.training_report import write_report
from support import runs
from support.pages import INJECTION, Page

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = [
    runs.classification,
    runs.many_classes,
    runs.regression,
    runs.without_validation,
    runs.grid,
    runs.minimal,
]


def report(run: dict[str, Any], folder: Path) -> Page:
    write_report(runs.write(run, folder))
    return Page((folder / "report.html").read_text())


@pytest.mark.parametrize("make", ALL)
def test_report_is_two_private_self_contained_files(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    folder = runs.write(make(), tmp_path / "run")
    (folder / "report.html").write_text("an earlier report with mode 0644")
    paths = write_report(folder)
    assert [path.name for path in paths] == ["metrics.csv", "report.html"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.csv", "report.html", "run.json"]
    text = paths[1].read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "form", "base", "audio", "video"}
    for _, attributes in page.elements:
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
        assert "src" not in attributes


@pytest.mark.parametrize("make", ALL)
def test_page_is_valid_and_accessible(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    page = report(make(), tmp_path)
    assert [tag for tag, _ in page.elements].count("h1") == 1
    assert len(page.ids) == len(set(page.ids))
    for tag, attributes in page.elements:
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in page.ids
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in page.ids
        if tag == "th":
            assert attributes.get("scope") in {"row", "col", "colgroup"}
        if tag == "svg":
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert "None" not in page.text
    assert "nan" not in page.text.split()


@pytest.mark.parametrize("make", ALL)
def test_report_is_deterministic(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    made = [write_report(runs.write(make(), tmp_path / name)) for name in ("first", "second")]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


def test_classification_report_shows_scores_and_data(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    scores = run["validation"]
    assert f"Accuracy {scores['accuracy']:.3f} on 1,203 of our own validation records" in page.text
    for name in ("baseline_accuracy", "balanced_accuracy", "auc", "log_loss"):
        assert f"{scores[name]:.3f}" in page.text
    assert "no better than that" not in page.text
    assert {"chart-loss", "chart-score", "chart-roc", "confusion"} < set(page.ids)
    assert "<=50K 24,720 (75.9 %)" in page.text
    assert "workclass category" in page.text
    assert "Private 22,696" in page.text
    assert "8 more" in page.text  # of sixteen levels of education
    assert "1,836 6.3 %" in page.text  # missing
    assert "constant" in page.text
    assert "A neural network with hidden layers of 32 and 16 units (relu), 4,034 parameters." in page.text
    assert "16 November 2026, 12:00 UTC" in page.text
    assert "hospital-a us" in page.text
    assert "13.6 MB sent" in page.text
    for note in run["notes"]:
        assert note in page.text


def test_report_says_when_a_model_learned_nothing(tmp_path: Path) -> None:
    run = runs.classification()
    run["validation"]["accuracy"] = run["validation"]["baseline_accuracy"]
    assert "The model is no better than that." in report(run, tmp_path / "classes").text
    run = runs.regression()
    run["validation"]["r2"] = -0.1
    page = report(run, tmp_path / "numbers")
    assert "R² −0.100" in page.text
    assert "would be as good or better" in page.text


def test_many_classes_are_numbered(tmp_path: Path) -> None:
    run = runs.many_classes()
    page = report(run, tmp_path)
    titles = [attributes["title"] for tag, attributes in page.elements if tag == "abbr"]
    assert titles == list(runs.TUMOURS)
    rows = training_report.class_rows(convert(run["validation"], ClassificationScores))
    for i, row in enumerate(rows):
        assert row.records == sum(run["validation"]["confusion"][i])
        assert f"{100 * row.cells[i] / row.records:.1f} %" in page.text
    assert "chart-roc" not in page.ids
    assert all(f"marker_{i:02}" in page.text for i in range(1, 56))


def test_class_without_records_has_no_recall() -> None:
    row, other = training_report.class_rows(ClassificationScores(3, 1.0, ["a", "b"], [[3, 0], [0, 0]]))
    assert (row.recall, row.precision, other.recall, other.precision) == (1.0, 1.0, None, None)
    assert html.share(None) == "–"


def test_regression_report_shows_errors(tmp_path: Path) -> None:
    run = runs.regression()
    page = report(run, tmp_path)
    assert f"R² {run['validation']['r2']:.3f} on 412 of our own validation records" in page.text
    assert {"chart-loss", "chart-score", "chart-scatter", "chart-residuals"} < set(page.ids)
    assert "length_of_stay 7.21 ± 4.13" in page.text
    clouds = [a["d"] or "" for tag, a in page.elements if tag == "path" and a.get("class") == "cloud"]
    assert [cloud.count("M") for cloud in clouds] == [412]
    bars = [float(a["height"] or 0) for tag, a in page.elements if tag == "rect"]
    chart = charts.residual_chart(convert(run["validation"], RegressionScores))
    assert chart is not None
    one = chart.bottom - chart.y_position(1)
    assert sum(bars) == pytest.approx(412 * one, abs=0.1 * (len(bars) + 412))  # positions are rounded to 0.1
    run["validation"] |= {"r2": None, "records": 1, "actual": [3.0], "predicted": [4.0], "rmse": 1.0, "mae": 1.0}
    assert "Root mean square error 1 on 1 of our own validation records" in report(run, tmp_path).text


def test_report_without_validation_records_has_no_scores(tmp_path: Path) -> None:
    page = report(runs.without_validation(), tmp_path)
    assert "without validation records of our own" in page.text
    assert "chart-loss" in page.ids
    assert not {"chart-score", "confusion", "validation"} & set(page.ids)
    assert "Validation records also selected" not in page.text


def test_report_shows_the_grid_cell(tmp_path: Path) -> None:
    page = report(runs.grid(), tmp_path)
    assert "a grid of 3 × 3" in page.text
    assert "row 0, column 1, counted from 0" in page.text
    assert "grid column 2" in page.text
    assert "north-laboratory us" in page.text


def test_report_explains_what_was_disclosed(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    for each in run["revealed"]:
        assert f"{each['what']} to {each['to']}" in page.text
    assert "210 4,034" in page.text
    for text in ("They are exact", "no noise is added", "The threat model", "the fewer records"):
        assert text in page.text
    assert "fewer records (" not in page.text
    run["records"]["everyone_training"] = 20
    assert "fewer records (20) than features (25)" in report(run, tmp_path).text


def test_report_shows_for_whom_we_waited(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    assert "summed for 3.5 s, and waited for others for 2 min" in page.text
    assert "hospital-c 30 s 0.5 s 1 min 1 min hospital-b 20 s 1.2 s 0.0 s 4.0 s" in page.text
    assert "Whoever gets this page learns how long the others compute" in page.text
    del run["waiting"]
    assert "waited for" not in report(run, tmp_path).text


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    run = runs.classification()
    run |= {
        "participant": INJECTION,
        "notes": [INJECTION],
        "features": [INJECTION],
        "finished": INJECTION,
        "version": INJECTION,
    }
    run["federation"] |= {"name": INJECTION, "participants": [INJECTION, "b", "c"], "digest": INJECTION}
    run["data"] |= {"target": INJECTION, "class_weights": INJECTION}
    run["columns"] = [{"name": INJECTION, "type": "category", "categories": {INJECTION: 3}}]
    run["columns"] += [{"name": "long", "type": "category", "categories": [f"{INJECTION}{i}" for i in range(20)]}]
    run["target"]["classes"] = {INJECTION: 4, "b": 5}
    run["validation"]["classes"] = [INJECTION, f"{INJECTION}2"]
    run["training"] |= {INJECTION: INJECTION}
    run["model"] |= {"kind": "custom", "function": INJECTION}
    run["records"]["file"] = INJECTION
    run["revealed"] = [{"what": INJECTION, "to": INJECTION}]
    run["subgroups"][0] |= {"column": INJECTION}
    run["subgroups"][0]["groups"][0] |= {"name": INJECTION}
    run["importance"][0]["column"] = run["coefficients"][0]["feature"] = INJECTION
    run["comparison"]["models"][1]["name"] = INJECTION
    page = report(run, tmp_path)
    assert not {"script", "img"} & page.tags
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert INJECTION.split("=")[0] in page.text
    assert "49" not in re.findall(r"&(\d+)", page.text)
    assert page.text.count("alert(1)") > 15


def test_content_security_policy_forbids_scripts_and_requests(tmp_path: Path) -> None:
    page = report(runs.classification(), tmp_path)
    policies = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_metrics_csv_has_the_history(tmp_path: Path) -> None:
    for run in (runs.classification(), runs.without_validation()):
        path, _ = write_report(runs.write(run, tmp_path))
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(run["history"])
        for row, each in zip(rows, run["history"], strict=True):
            assert {name: json.loads(value or "null") for name, value in row.items()} == each


@pytest.mark.parametrize("name", ["价格 $x_1$", "x" * 500, ""])
def test_any_name_is_accepted(name: str, tmp_path: Path) -> None:
    run = runs.classification()
    run["data"]["target"] = run["participant"] = name
    report(run, tmp_path)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_histories_are_drawn(count: int, tmp_path: Path) -> None:
    run = runs.classification()
    run["history"] = run["history"][:count]
    page = report(run, tmp_path)
    assert ("chart-loss" in page.ids) == (count > 0)


def test_losses_of_very_different_size_have_a_logarithmic_axis(tmp_path: Path) -> None:
    run = runs.classification()
    run["history"][0]["training_loss"] = 40.0
    report(run, tmp_path)
    chart = charts.loss_chart(load_run(tmp_path))
    assert chart is not None
    assert chart.y.logarithmic
    assert [chart.y.tick_label(tick) for tick in chart.y.ticks] == ["0.5", "1", "2", "5", "10", "20"]
    run["history"][0]["training_loss"] = math.nan  # left out of the chart
    report(run, tmp_path)
    chart = charts.loss_chart(load_run(tmp_path))
    assert chart is not None
    assert not chart.y.logarithmic


def test_scores_in_single_and_double_precision_have_an_axis_with_different_labels(tmp_path: Path) -> None:
    """54 of 57 records in single precision differs from 54 of 57 in double precision, in the ninth digit."""
    run = runs.classification()
    run["validation"]["baseline_accuracy"] = 54 / 57
    for each in run["history"]:
        each["score"] = float(np.float32(54 / 57))
    report(run, tmp_path)
    chart = charts.score_chart(load_run(tmp_path))
    assert chart is not None
    labels = [chart.y.tick_label(tick) for tick in chart.y.ticks]
    assert len(labels) == len(set(labels)) >= 3
    assert max(chart.y.ticks) == pytest.approx(1.0)  # no accuracy is higher
    assert max(map(len, labels)) <= 4


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_axis_contains_its_values_and_has_few_ticks(values: list[float]) -> None:
    axis = charts.loss_axis(values)
    positions = [axis.position(value, 0, 100) for value in (*values, *axis.ticks)]
    assert all(-0.1 <= each <= 100.1 for each in positions)
    assert len(axis.ticks) <= 11
    labels = [axis.tick_label(tick) for tick in axis.ticks]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("low", [0.947368, 1.0, 1e6, 123456789.0])
def test_labels_of_a_narrow_axis_differ(low: float) -> None:
    axis = charts.loss_axis([low, low * (1 + 3e-6)])
    labels = [axis.tick_label(tick) for tick in axis.ticks]
    assert len(labels) == len(set(labels)) >= 3


def test_number_formats() -> None:
    assert [html.figure(value) for value in (38.58, 1077.6, -0.25, 0.0, 0.00001, 2e9, math.nan)] == [
        *("38.58", "1,078", "−0.25", "0", "1.000e−05", "2.000e+09", "–")
    ]
    assert [html.share(value) for value in (0.0, 0.0001, 0.0625, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "6.2 %",
        "100.0 %",
    ]
    assert [html.size(value) for value in (12, 1500, 13_561_344)] == ["12 bytes", "1.5 kB", "13.6 MB"]
    assert [html.duration(value) for value in (3.21, 35.2, 95.2, 7300, math.inf)] == [
        "3.2 s",
        "35 s",
        "2 min",
        "2 h 2 min",
        "–",
    ]
    assert html.when("2026-11-16T13:30:00+02:00") == "16 November 2026, 11:30 UTC"
    assert html.when("yesterday") == "yesterday"
    assert html.when("2026-11-16T13:30:00") == "2026-11-16T13:30:00"  # without a time zone it is not known when


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "cgd-run-9"}, "has the format 'cgd-run-9', not 'cgd-run-1'; use the version"),
        ({"format": None}, "damaged: format is None: expected `str`"),
        ({"history": {}}, "damaged: history: expected `array`, got `object`"),
        ({"history": [{"step": "ten"}]}, r"history\[0\].step is 'ten': expected `int`, got `str`"),
        ({"history": [{"step": True}]}, r"history\[0\].step is True"),
        ({"participant": None}, "participant is None: expected `str`"),
        ({"data": {"target": "income", "task": "poetry"}}, "data.task is 'poetry': invalid enum value"),
        (
            {"columns": [{"name": "x", "type": "number", "mean": "3"}]},
            r"columns\[0\].mean is '3': expected `float \| null`, got `str`",
        ),
        ({"validation": {"records": 3}}, "validation.accuracy is missing"),
        (
            {"validation": {"records": 3, "accuracy": 1, "classes": ["a", "b"], "confusion": [[3]]}},
            "validation: confusion is not a table of 2 by 2",
        ),
        (
            {
                "data": {"target": "y", "task": "regression"},
                "validation": {"records": 1, "rmse": 1, "mae": 1, "actual": [1]},
            },
            "validation: actual and predicted have different lengths",
        ),
        (
            {"federation": {"name": "x", "participants": ["a"], "grid": {"rows": 3, "columns": 1, "cell": [0]}}},
            "federation.grid.cell: expected",
        ),
    ],
)
def test_damaged_run_file_is_refused_with_place_and_value(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = runs.write(runs.classification() | change, tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        write_report(folder)
    assert str(folder / "run.json") in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff", b"[" * 100_000, b'{"epoch": ' + b"9" * 5000 + b"}", b"[]", b"3", b'{"x": "\\ud800"}']
)
def test_file_that_is_not_json_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(raw)
    with pytest.raises(InputError, match="damaged: .*; restore it from a copy, or train again"):
        load_run(tmp_path)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no run.json; name the directory"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="does not exist; name the directory"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "run.json").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        load_run(tmp_path)


def test_missing_optional_values_are_none(tmp_path: Path) -> None:
    run = load_run(runs.write(runs.minimal() | {"unknown": 1}, tmp_path))
    assert (run.validation, run.notes, run.federation.grid) == (None, None, None)


@given(st.data())
def test_changed_run_gives_a_report_or_an_input_error(data: st.DataObject) -> None:
    """Replace one value anywhere in a run."""
    run = json.loads(json.dumps(data.draw(st.sampled_from(ALL))()))
    place: Any = run
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [
            each for each in (place.values() if isinstance(place, dict) else place) if isinstance(each, (dict, list))
        ]
        place = data.draw(st.sampled_from([each for each in inner if each])) if any(inner) else place
    key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
    place[key] = data.draw(st.sampled_from([None, "", "x", 0, -1, 1e300, math.nan, [], {}, ["x"], {"x": 1}, True]))
    with tempfile.TemporaryDirectory() as folder:
        runs.write(run, Path(folder))
        with suppress(InputError):
            training_report.render(load_run(Path(folder)))


def test_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match="No space left on device"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("finished", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_time_at_the_end_of_the_calendar_is_shown_or_refused(finished: str, tmp_path: Path) -> None:
    with suppress(InputError):
        report({**runs.classification(), "finished": finished}, tmp_path)


def test_classes_that_another_participant_invented_do_not_fill_the_page(tmp_path: Path) -> None:
    """One participant can enter thousands of classes; the matrix of all of them has a cell for every pair."""
    run, count = runs.classification(), 400
    run["validation"] |= {
        "classes": [f"class {number}" for number in range(count)],
        "confusion": [[int(row == column == 0) for column in range(count)] for row in range(count)],
    }
    page = report(run, tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1 << 20
    assert "340 more classes, with the fewest records and predictions, are not shown." in page.text


def test_column_whose_numbers_cancel_is_shown_or_refused(tmp_path: Path) -> None:
    run = runs.classification()
    run["columns"][0] |= {"present": -5, "missing": 5}
    with suppress(InputError):
        report(run, tmp_path)


def test_class_of_another_participant_cannot_reverse_the_numbers_beside_it(tmp_path: Path) -> None:
    """After a right-to-left override, a browser shows 1,234 as 432,1, up to the end of the line."""
    run = runs.classification()
    run["target"]["classes"] = {"benign\u202e": 1234, "malignant": 56}
    report(run, tmp_path)
    assert "\u202e" not in (tmp_path / "report.html").read_text()


# Alone and together.


def test_report_answers_what_we_would_have_had_alone(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    alone, together = run["comparison"]["models"]
    gain = together["gains"]["accuracy"]
    sentence = (
        f"On our 1,203 validation records, the accuracy is {together['scores']['accuracy']['value']:.3f} together and "
        f"{alone['scores']['accuracy']['value']:.3f} alone: better by {gain['value']:.3f} (95 % interval "
        f"{html.decimals(gain['low'])} to {html.decimals(gain['high'])}), no clear difference."
    )
    assert gain["low"] < 0 < gain["high"]
    assert sentence in page.text
    assert {"comparison", "compared-1", "compared-2", "compared-3"} < set(page.ids)
    assert f"The log loss is {together['scores']['log_loss']['value']:.3f} together" in page.text
    assert "alone − together" in page.text  # of the log loss, of which less is better
    assert "a model of our own 4,810 training records" in page.text
    assert "together − alone" in page.text


def test_clear_differences_are_called_clear_only_with_enough_records(tmp_path: Path) -> None:
    run = runs.classification()
    gain = run["comparison"]["models"][1]["gains"]["accuracy"]
    gain |= {"value": -0.2, "low": -0.3, "high": -0.1}
    assert "worse by 0.200 (95 % interval −0.300 to −0.100), a clear difference." in report(run, tmp_path).text
    run["validation"]["confusion"] = [[900, 0], [3, 4]]
    assert "(95 % interval −0.300 to −0.100), these records cannot decide." in report(run, tmp_path).text
    gain |= {"low": None, "high": None}
    assert "worse by 0.200; no interval." in report(run, tmp_path).text
    gain |= {"value": 0.0}
    assert "equal; no interval." in report(run, tmp_path).text


def test_gain_of_an_error_is_the_error_that_is_saved(tmp_path: Path) -> None:
    run = runs.regression()
    alone, together = (each["scores"]["rmse"]["value"] for each in run["comparison"]["models"])
    assert together < alone
    page = report(run, tmp_path)
    assert f"the R² is {run['validation']['r2']:.3f} together" in page.text
    assert f"{together:.4g} together and {alone:.4g} alone: better by {alone - together:.4g}" in page.text
    assert "alone − together" in page.text


def test_further_models_are_compared_with_the_first(tmp_path: Path) -> None:
    run = runs.classification()
    together = run["comparison"]["models"][1]
    run["comparison"]["models"].append(together | {"name": "personalised"})
    page = report(run, tmp_path)
    assert "personalised − alone" in page.text
    assert f"{together['scores']['auc']['value']:.3f} personalised and" in page.text


def test_reason_is_shown_if_there_is_no_model_alone(tmp_path: Path) -> None:
    page = report(runs.many_classes(), tmp_path)
    assert "to compare with: all our training records have the class 'Melanoma'" in page.text
    assert "compared-1" not in page.ids


# Few records, calibration, thresholds.


def test_auc_of_one_negative_record_has_a_remark_and_an_interval(tmp_path: Path) -> None:
    run = runs.classification()
    run["validation"] |= {"records": 57, "accuracy": 56 / 57, "auc": 1.0, "confusion": [[1, 0], [1, 55]]}
    page = report(run, tmp_path)
    assert "There are few validation records of <=50K (1). The AUC, the balanced accuracy" in page.text
    assert "95 % interval 0.431 to 1.000" in page.text
    assert "There are few validation records of <=50K (1)." in training_report.describe_result(load_run(tmp_path))[-1]
    assert "few validation records" not in report(runs.classification(), tmp_path).text
    run["validation"] |= {"auc": None, "confusion": [[0, 0], [1, 56]]}
    assert "few validation records" not in report(run, tmp_path).text  # there is no AUC


def test_calibration_is_drawn_and_described(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    found = run["validation"]["calibration"]
    assert f"The mean probability of >50K is {found['predicted']:.3f}; {found['observed']:.3f} are >50K." in page.text
    assert f"is {found['brier']:.3f}; always predicting" in page.text
    (points,) = [a["d"] or "" for tag, a in page.elements if tag == "path" and a.get("class") == "cloud points"]
    (spans,) = [a["d"] or "" for tag, a in page.elements if tag == "path" and a.get("class") == "spans"]
    assert points.count("M") == spans.count("M") == len(found["bins"]) == 10
    assert "equally frequent" not in page.text
    run["data"]["class_weights"] = "balanced"
    assert "equally frequent" in report(run, tmp_path).text
    many = report(runs.many_classes(), tmp_path)
    assert "Calibration of the predicted class" in many.text
    run["validation"]["calibration"] = None
    assert "chart-calibration" not in report(run, tmp_path).ids


def test_threshold_changes_the_confusion_matrix_only(tmp_path: Path) -> None:
    run = runs.classification()
    folder = runs.write(run, tmp_path)
    scores = convert(run["validation"], ClassificationScores)
    write_report(folder, 0.3)
    page = Page((folder / "report.html").read_text())
    assert "Confusion matrix at the threshold 0.30" in page.text
    assert f"Accuracy {scores.accuracy:.3f} on 1,203" in page.text
    (row,) = [each for each in class_scores.threshold_rows(scores, 30) if each.threshold == 0.3]
    negative, positive = training_report.class_rows(scores, None, class_scores.confusion_at(scores, 30))
    assert row.sensitivity == positive.recall
    assert row.specificity == negative.recall
    assert row.ppv == positive.precision
    assert row.npv == negative.precision
    assert row.predicted == negative.cells[1] + positive.cells[1]
    assert positive.records == sum(scores.confusion[1])
    assert f">{positive.cells[1]:,}<" in (folder / "report.html").read_text()
    lowest, highest = class_scores.threshold_rows(scores, 50)[0], class_scores.threshold_rows(scores, 50)[-1]
    assert lowest.predicted > highest.predicted
    assert class_scores.confusion_at(scores, 50) == scores.confusion


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.3, 0.305, 1.5, math.nan, math.inf])
def test_threshold_that_is_no_hundredth_is_refused(threshold: float, tmp_path: Path) -> None:
    folder = runs.write(runs.classification(), tmp_path)
    with pytest.raises(InputError, match="it is a probability from 0.01 to 0.99 with two decimals"):
        write_report(folder, threshold)


@pytest.mark.parametrize("make", [runs.many_classes, runs.regression, runs.without_validation, runs.minimal])
def test_threshold_needs_two_classes(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    folder = runs.write(make(), tmp_path)
    with pytest.raises(InputError, match="this run has no results at the threshold 0.3: .* omit --threshold"):
        write_report(folder, 0.3)
    assert not (folder / "report.html").exists()


# Subgroups, and what the model depends on.


def test_subgroups_are_shown_with_intervals(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    assert {"subgroups", "subgroup-1", "subgroup-2", "subgroup-3"} < set(page.ids)
    assert "Female 391 records 0.887 0.847 to 0.917 0.905 0.865 to 0.935" in page.text
    assert "missing 61 records" in page.text
    assert "5 others 196 records 0.810" in page.text
    assert "8 others 7 records – too few" in page.text
    assert "one in twenty misses" in page.text
    assert "paediatrics 100 records 2.1 1.9 to 2.3" in report(runs.regression(), tmp_path).text


def test_dependence_is_shown_and_long_lists_are_folded(tmp_path: Path) -> None:
    run = runs.classification()
    page = report(run, tmp_path)
    assert "age +0.206 ± 0.003" in page.text
    assert "workclass: Private −0.700" in page.text
    assert f"{len(run['features']) - 15} more" in page.text
    run |= {"importance": None, "coefficients": None, "subgroups": None}
    assert not {"importance", "subgroups"} & set(report(run, tmp_path).ids)
    run["importance"] = [
        {"column": "age", "rise": 0.0, "deviation": 0.0},
        {"column": "x", "rise": math.nan, "deviation": 0},
    ]
    assert "age 0.000 ± 0.000" in report(run, tmp_path).text


def test_report_says_where_recovered_records_are_found(tmp_path: Path) -> None:
    run = runs.classification()
    assert "This run was recorded: cgd audit on its recordings shows which records" in report(run, tmp_path).text
    run["recorded"] = False
    assert "record it ( cgd join --record ) and audit the recordings" in report(run, tmp_path).text


def test_run_of_an_earlier_version_is_still_reported(tmp_path: Path) -> None:
    """Without the parts that were added later."""
    run = runs.classification()
    for name in ("comparison", "kept", "subgroups", "importance", "coefficients", "recorded"):
        del run[name]
    for name in ("calibration", "thresholds"):
        del run["validation"][name]
    page = report(run, tmp_path)
    assert {"confusion", "chart-roc", "validation"} < set(page.ids)
    assert not {"comparison", "subgroups", "importance", "thresholds", "chart-calibration"} & set(page.ids)
    assert score_tables.describe_comparison(load_run(tmp_path)) == []
