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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import InputError
from cgd.files import write_private
from cgd.reporting import charts, training_report
from cgd.reporting.report import load_run, write_report
from support import runs
from support.pages import EVIL, Page

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = [
    runs.classification,
    runs.many_classes,
    runs.regression,
    runs.without_validation,
    runs.grid,
    runs.least,
]


def report(run: dict[str, Any], folder: Path) -> Page:
    write_report(runs.write(run, folder))
    return Page((folder / "report.html").read_text())


@pytest.mark.parametrize("make", ALL)
def test_a_report_is_three_private_files_that_need_nothing_else(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    folder = runs.write(make(), tmp_path / "run")
    (folder / "report.html").write_text("an old one, open to all")
    paths = write_report(folder)
    assert [path.name for path in paths] == ["curves.png", "metrics.csv", "report.html"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "metrics.csv", "report.html", "run.json"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    text = paths[2].read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    found = Page(text)
    assert not found.tags & {"script", "img", "iframe", "object", "embed", "form", "base", "audio", "video"}
    for _, attributes in found.elements:
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
        assert "src" not in attributes


@pytest.mark.parametrize("make", ALL)
def test_the_page_is_well_made(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    found = report(make(), tmp_path)
    assert [tag for tag, _ in found.elements].count("h1") == 1
    assert len(found.ids) == len(set(found.ids))
    for tag, attributes in found.elements:
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in found.ids
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in found.ids
        if tag == "th":
            assert attributes.get("scope") in {"row", "col", "colgroup"}
        if tag == "svg":
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert "None" not in found.text
    assert "nan" not in found.text.split()


@pytest.mark.parametrize("make", ALL)
def test_the_same_run_gives_the_same_bytes(make: Callable[[], runs.Run], tmp_path: Path) -> None:
    made = [write_report(runs.write(make(), tmp_path / name)) for name in ("first", "second")]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


def test_a_classification_begins_with_its_result(tmp_path: Path) -> None:
    run = runs.classification()
    found = report(run, tmp_path)
    scores = run["validation"]
    assert f"Accuracy {scores['accuracy']:.3f} on 1,203 of our own records that were kept back" in found.text
    for name in ("baseline_accuracy", "balanced_accuracy", "auc", "log_loss"):
        assert f"{scores[name]:.3f}" in found.text
    assert "no better than that" not in found.text
    assert {"chart-loss", "chart-score", "chart-roc", "confusion"} < set(found.ids)
    assert "<=50K 24,720 (75.9 %)" in found.text
    assert "workclass category" in found.text
    assert "Private 22,696" in found.text
    assert "8 more" in found.text  # of sixteen levels of education
    assert "1,836 6.3 %" in found.text  # missing
    assert "constant" in found.text
    assert "A neural network with hidden layers of 32 and 16 units (relu), 4,034 parameters." in found.text
    assert "16 November 2026, 12:00 UTC" in found.text
    assert "hospital-a us" in found.text
    assert "13.6 MB sent" in found.text
    for note in run["notes"]:
        assert note in found.text


def test_a_model_that_learned_nothing_is_called_that(tmp_path: Path) -> None:
    run = runs.classification()
    run["validation"]["accuracy"] = run["validation"]["baseline_accuracy"]
    assert "The model is no better than that." in report(run, tmp_path / "classes").text
    run = runs.regression()
    run["validation"]["r2"] = -0.1
    found = report(run, tmp_path / "numbers")
    assert "R² −0.100" in found.text
    assert "would do as well or better" in found.text


def test_many_classes_have_numbers_and_their_names(tmp_path: Path) -> None:
    run = runs.many_classes()
    found = report(run, tmp_path)
    titles = [attributes["title"] for tag, attributes in found.elements if tag == "abbr"]
    assert titles == list(runs.TUMOURS)
    rows = training_report.class_rows(run["validation"])
    for i, row in enumerate(rows):
        assert row.records == sum(run["validation"]["confusion"][i])
        assert f"{100 * row.cells[i] / row.records:.1f} %" in found.text
    assert "chart-roc" not in found.ids
    assert all(f"marker_{i:02}" in found.text for i in range(1, 56))


def test_a_class_without_records_has_no_share() -> None:
    row, other = training_report.class_rows({"classes": ["a", "b"], "confusion": [[3, 0], [0, 0]]})
    assert (row.found, row.right, other.found, other.right) == (1.0, 1.0, None, None)
    assert training_report.share(None) == "–"


def test_a_regression_shows_its_errors(tmp_path: Path) -> None:
    run = runs.regression()
    found = report(run, tmp_path)
    assert f"R² {run['validation']['r2']:.3f} on 412 of our own records" in found.text
    assert {"chart-loss", "chart-score", "chart-scatter", "chart-residuals"} < set(found.ids)
    assert "length_of_stay 7.21 ± 4.13" in found.text
    clouds = [a["d"] or "" for tag, a in found.elements if tag == "path" and a.get("class") == "cloud"]
    assert [cloud.count("M") for cloud in clouds] == [412]
    bars = [float(a["height"] or 0) for tag, a in found.elements if tag == "rect"]
    chart = charts.residual_chart(run["validation"])
    assert chart is not None
    one = chart.bottom - chart.up(1)
    assert sum(bars) == pytest.approx(412 * one, abs=0.1 * (len(bars) + 412))  # places are rounded to 0.1
    run["validation"] |= {"r2": None, "records": 1, "actual": [3.0], "predicted": [4.0], "rmse": 1.0, "mae": 1.0}
    assert "Root mean square error 1 on 1 of our own record that was kept back" in report(run, tmp_path).text


def test_without_validation_records_nothing_is_claimed(tmp_path: Path) -> None:
    found = report(runs.without_validation(), tmp_path)
    assert "no records of our own to judge it by" in found.text
    assert "chart-loss" in found.ids
    assert not {"chart-score", "confusion", "validation"} & set(found.ids)
    assert "kept back, so" not in found.text


def test_a_grid_says_where_we_are(tmp_path: Path) -> None:
    found = report(runs.grid(), tmp_path)
    assert "a grid of 3 × 3" in found.text
    assert "row 0, column 1, counted from 0" in found.text
    assert "grid column 2" in found.text
    assert "north-laboratory us" in found.text


def test_what_was_revealed_is_told_with_what_it_means(tmp_path: Path) -> None:
    run = runs.classification()
    found = report(run, tmp_path)
    for each in run["revealed"]:
        assert f"{each['what']} to {each['to']}" in found.text
    assert "210 4,034" in found.text
    for told in ("They are exact", "no noise is added", "The threat model", "the fewer records"):
        assert told in found.text
    assert "fewer records (" not in found.text
    run["records"]["everyone_training"] = 20
    assert "fewer records (20) than features (25)" in report(run, tmp_path).text


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    run = runs.classification()
    run |= {"participant": EVIL, "notes": [EVIL], "features": [EVIL], "finished": EVIL, "version": EVIL}
    run["federation"] |= {"name": EVIL, "participants": [EVIL, "b", "c"], "digest": EVIL}
    run["data"] |= {"target": EVIL, "class_weights": EVIL}
    run["columns"] = [{"name": EVIL, "type": "category", "categories": {EVIL: 3}}]
    run["columns"] += [{"name": "long", "type": "category", "categories": [f"{EVIL}{i}" for i in range(20)]}]
    run["target"]["classes"] = {EVIL: 4, "b": 5}
    run["validation"]["classes"] = [EVIL, f"{EVIL}2"]
    run["training"] |= {EVIL: EVIL}
    run["model"] |= {"kind": "custom", "function": EVIL}
    run["records"]["file"] = EVIL
    run["revealed"] = [{"what": EVIL, "to": EVIL}]
    found = report(run, tmp_path)
    assert not {"script", "img"} & found.tags
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert EVIL.split("=")[0] in found.text
    assert "49" not in re.findall(r"&(\d+)", found.text)
    assert found.text.count("alert(1)") > 15


def test_a_policy_forbids_scripts_and_addresses(tmp_path: Path) -> None:
    found = report(runs.classification(), tmp_path)
    policies = [a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_the_metrics_are_a_table(tmp_path: Path) -> None:
    for run in (runs.classification(), runs.without_validation()):
        _, path, _ = write_report(runs.write(run, tmp_path))
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(run["history"])
        for row, each in zip(rows, run["history"], strict=True):
            assert {name: json.loads(value or "null") for name, value in row.items()} == each


@pytest.mark.parametrize("name", ["价格 $x_1$", "half \ud800 a character", "x" * 500, ""])
def test_any_name_can_be_written(name: str, tmp_path: Path) -> None:
    run = runs.classification()
    run["data"]["target"] = run["participant"] = name
    report(run, tmp_path)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_histories_can_be_drawn(count: int, tmp_path: Path) -> None:
    run = runs.classification()
    run["history"] = run["history"][:count]
    found = report(run, tmp_path)
    assert ("chart-loss" in found.ids) == (count > 0)


def test_losses_of_very_different_size_get_a_logarithmic_axis(tmp_path: Path) -> None:
    run = runs.classification()
    run["history"][0]["training_loss"] = 40.0
    report(run, tmp_path)
    chart = charts.loss_chart(load_run(tmp_path))
    assert chart is not None
    assert chart.y.logarithmic
    assert [chart.y.told(tick) for tick in chart.y.ticks] == ["0.5", "1", "2", "5", "10", "20"]
    run["history"][0]["training_loss"] = math.nan  # left out of the line, shown nowhere
    report(run, tmp_path)
    chart = charts.loss_chart(load_run(tmp_path))
    assert chart is not None
    assert not chart.y.logarithmic


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_axes_hold_their_values_and_have_few_round_ticks(values: list[float]) -> None:
    axis = charts.loss_axis(values)
    places = [axis.place(value, 0, 100) for value in (*values, *axis.ticks)]
    assert all(-0.1 <= place <= 100.1 for place in places)
    assert len(axis.ticks) <= 11
    told = [axis.told(tick) for tick in axis.ticks]
    assert len(told) == len(set(told))


@given(st.floats(0, 1), st.integers(1, 100_000))
def test_the_interval_holds_the_accuracy_and_shrinks(part: float, records: int) -> None:
    low, high = training_report.interval(part, records)
    assert 0 <= low <= part + 1e-12
    assert part - 1e-12 <= high <= 1
    wider = training_report.interval(part, max(1, records // 2))
    assert wider[1] - wider[0] >= high - low - 1e-12


def test_the_interval_is_wilsons() -> None:
    assert training_report.interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)


def test_figures_are_written_for_people() -> None:
    assert [training_report.figure(value) for value in (38.58, 1077.6, -0.25, 0.0, 0.00001, 2e9, math.nan)] == [
        *("38.58", "1,078", "−0.25", "0", "1.000e−05", "2.000e+09", "–")
    ]
    assert [training_report.share(value) for value in (0.0, 0.0001, 0.0625, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "6.2 %",
        "100.0 %",
    ]
    assert [training_report.size(value) for value in (12, 1500, 13_561_344)] == ["12 bytes", "1.5 kB", "13.6 MB"]
    assert [training_report.duration(value) for value in (3.21, 35.2, 95.2, 7300)] == [
        "3.2 s",
        "35 s",
        "2 min",
        "2 h 2 min",
    ]
    assert training_report.when("2026-11-16T13:30:00+02:00") == "16 November 2026, 11:30 UTC"
    assert training_report.when("yesterday") == "yesterday"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "cgd-run-9"}, "has the format 'cgd-run-9', not 'cgd-run-1'; use the version"),
        ({"format": None}, "damaged: format is missing"),
        ({"history": {}}, r"damaged: history is \{\}, not a list"),
        ({"history": [{"step": "ten"}]}, r"history\[0\].step is 'ten', not a whole number"),
        ({"history": [{"step": True}]}, r"history\[0\].step is True"),
        ({"participant": None}, "participant is missing"),
        ({"data": {"target": "income", "task": "poetry"}}, "data.task is 'poetry', not 'regression'"),
        ({"columns": [{"name": "x", "type": "number", "mean": "3"}]}, r"columns\[0\].mean is '3', not a number"),
        ({"validation": {"records": 3}}, "validation.accuracy is missing"),
        (
            {"validation": {"records": 3, "accuracy": 1, "classes": ["a", "b"], "confusion": [[3]]}},
            "validation.confusion is not a table of 2 by 2",
        ),
        (
            {
                "data": {"target": "y", "task": "regression"},
                "validation": {"records": 1, "rmse": 1, "mae": 1, "actual": [1]},
            },
            "actual and predicted of validation are not of one length",
        ),
        ({"federation": {"name": "x", "participants": ["a"], "grid": {"rows": 3, "columns": 1, "cell": [0]}}}, "cell"),
    ],
)
def test_a_damaged_run_is_refused_by_name(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = runs.write(runs.classification() | change, tmp_path)
    with pytest.raises(InputError, match=told) as caught:
        write_report(folder)
    assert str(folder / "run.json") in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["run.json"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b'{"epoch": ' + b"9" * 5000 + b"}", b"[]", b"3"])
def test_what_is_no_json_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(raw)
    with pytest.raises(InputError, match="damaged: .*; restore it from a copy, or train again"):
        load_run(tmp_path)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no run.json; name the directory"):
        load_run(tmp_path)
    with pytest.raises(InputError, match="does not exist; name the directory"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "run.json").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        load_run(tmp_path)


def test_what_a_run_leaves_out_is_none(tmp_path: Path) -> None:
    run = load_run(runs.write(runs.least() | {"more": 1}, tmp_path))
    assert (run["validation"], run["notes"], run["federation"]["grid"], run["more"]) == (None, None, None, 1)


@given(st.data())
def test_whatever_is_missing_there_is_a_report_or_an_error(data: st.DataObject) -> None:
    """Take one thing out of a run, anywhere, or put something else in its place."""
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


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match="No space left on device"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
