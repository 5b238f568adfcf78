"""The expected cost of differential privacy: looked up in a kept table, and never beyond it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.dp.accountant import epsilon_of, mu_of
from cgd.errors import InputError
from cgd.federation.config import FOR_PRIVATE_TABLES
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular import privacy_costs, privacy_expectation
from cgd.tabular.privacy_costs import CostCurve, CostPoint, CostTable, PrivateSetting, measured_losses, needed_signals
from cgd.tabular.privacy_expectation import describe_expectation, differences, expected_cost, read_question
from cgd.tabular.settings import TabularSettings
from support.private_tables import PRIVATE_SCHEMA
from support.tabular import write_federation

if TYPE_CHECKING:
    from pathlib import Path

ONE = PrivateSetting(10_000, 16, members=5, epsilon=1.0, delta=1e-6, colluders=1)
LIKE_MEASURED = TabularSettings(
    Data("y", tuple(Column(f"x{i}", "number", range=(0, 1)) for i in range(16)), classes=("a", "b")),
    Model("logistic"),
    FOR_PRIVATE_TABLES,
    privacy=PrivacySection(1.0, 1e-6),
)


def curve(dataset: str, scale: float, last: int = 3) -> CostCurve:
    points = [CostPoint(10.0**power, scale / 10**power, scale / 10**power / 2) for power in range(1, last + 1)]
    return CostCurve(dataset, "logistic", 16, (100, 20_000), tuple(points))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> CostTable:
    """A table in which the loss is 1/s on one data set, and 4/s on another one."""
    made = CostTable("some settings", (curve("easy", 1.0), curve("hard", 4.0, last=2)))
    for module in (privacy_costs, privacy_expectation):
        monkeypatch.setattr(module, "cost_table", lambda: made)
    return made


def test_signal_depends_on_effective_records_and_columns() -> None:
    expected = 10_000 * mu_of(1.0, 1e-6) * (4 / 5) ** 0.5 / 4
    assert ONE.signal == pytest.approx(expected)
    assert replace(ONE, colluders=4).signal == pytest.approx(expected / 2)
    assert replace(ONE, columns=64).signal == pytest.approx(expected / 2)
    doubled = epsilon_of(2 * mu_of(1.0, 1e-6), 1e-6)
    assert replace(ONE, epsilon=doubled).signal == pytest.approx(2 * expected)
    assert ONE.records_for(2 * expected) == pytest.approx(20_000, abs=1)
    assert ONE.epsilon_for(2 * expected) == pytest.approx(doubled)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be a positive number"),
        ({"epsilon": float("nan")}, "epsilon is nan; it must be a positive number"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1e-4}, "choose it far below one divided by them, such as 1e-06"),
        ({"colluders": 5}, "colluders is 5, and there are 5 members; choose at most 4"),
        ({"records": 0}, "records is 0"),
        ({"columns": 0}, "columns is 0"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(ONE, **values)


def at_signal(signal: float) -> PrivateSetting:
    return replace(ONE, records=ONE.records_for(signal))


@pytest.mark.usefixtures("kept")
def test_losses_are_interpolated_and_not_extrapolated() -> None:
    assert measured_losses(at_signal(10.01), "logistic") == pytest.approx({"easy": 0.1, "hard": 0.4}, rel=0.01)
    middle = measured_losses(at_signal(31.63), "logistic")
    assert middle == pytest.approx({"easy": 0.055, "hard": 0.22}, rel=0.01)
    assert measured_losses(at_signal(31.63), "logistic", "auc") == pytest.approx(
        {name: each / 2 for name, each in middle.items()}
    )
    assert measured_losses(at_signal(500), "logistic").keys() == {"easy"}  # the other one was not measured there
    assert measured_losses(at_signal(9), "logistic") == measured_losses(at_signal(1100), "logistic") == {}
    assert measured_losses(at_signal(50), "mlp") == {}
    many = replace(ONE, columns=33)
    assert measured_losses(replace(many, records=many.records_for(50)), "logistic") == {}


@pytest.mark.usefixtures("kept")
def test_needed_signal_is_the_last_crossing() -> None:
    assert needed_signals("logistic", 0.04) == pytest.approx({"easy": 10 ** (1 + 2 / 3), "hard": 100.0})
    assert needed_signals("logistic", 0.01) == pytest.approx({"easy": 100.0, "hard": None})
    assert needed_signals("logistic", 0.5) == {"easy": 10.0, "hard": 10.0}
    wavy = CostCurve(
        "x", "mlp", 16, (1, 2), tuple(CostPoint(s, a, a) for s, a in ((1, 0.1), (2, 0.0), (4, 0.2), (8, 0)))
    )
    assert wavy.needed(0.1, "accuracy") == pytest.approx(4 * 2**0.5)


@pytest.mark.usefixtures("kept")
def test_answer_names_the_range_the_needs_and_that_it_is_no_promise() -> None:
    records = round(at_signal(99.9).records / 0.8)
    given = {"columns": 16, "members": 5, "epsilon": 1.0, "delta": 1e-6, "colluders": 1}
    text = "\n".join(describe_expectation(read_question(None, records, given, "logistic")))
    assert "can be 73.1 % sure at most" in text
    assert "measured loss with as much noise: 1.0 to 4.0 points of accuracy, 0.005 to 0.020 of AUC" in text
    assert "a loss below 1 point needs 2,400 records, or epsilon 1, on easy; it was not reached on hard" in text
    assert "a loss below 0.5 points needs" in text
    assert "This is no promise: on your records, the loss may be smaller or larger." in text
    few = "\n".join(describe_expectation(read_question(None, 100, given, "logistic")))
    assert "no figure: so few records with so much noise were not measured" in few
    many = "\n".join(describe_expectation(read_question(None, 900_000, given, "logistic")))
    assert "no figure: so many records with so little noise were not measured; " in many
    wide = "\n".join(describe_expectation(read_question(None, 5000, given | {"columns": 40}, "logistic")))
    assert "no figure: tables with 16 to 16 columns were measured" in wide
    assert "needs" not in wide


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"columns": None}, "--columns is missing; give it, or a file that has it"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it must be a positive number"),
        ({"members": 2}, "--members is 2; a federation has at least 3"),
        ({"delta": 0.1}, "choose it far below one divided by them"),
    ],
)
def test_unusable_questions_are_refused(values: dict[str, Any], message: str) -> None:
    given = {"columns": 16, "members": 5, "epsilon": 1.0} | values
    with pytest.raises(InputError, match=message):
        read_question(None, 1000, {name: each for name, each in given.items() if each is not None})
    with pytest.raises(InputError, match="model is 'cnn'; choose one of logistic, mlp"):
        read_question(None, 1000, given, "cnn")
    with pytest.raises(InputError, match="--records is 0"):
        read_question(None, 0, {"columns": 16, "members": 5, "epsilon": 1.0})


def test_question_is_read_from_a_federation_file_and_from_a_schema(tmp_path: Path) -> None:
    like = PRIVATE_SCHEMA.replace("layers = [8]", "layers = [32]")
    steps, lr = FOR_PRIVATE_TABLES.steps, FOR_PRIVATE_TABLES.lr
    path = write_federation(tmp_path, ("ada", "bob", "cleo"), schema=like, steps=steps, lr=lr, patience=0)
    question = read_question(path, 1000, {})
    assert question.models == ("mlp",)
    assert question.setting == PrivateSetting(800, 3, 3, 8.0, 1e-5, 1)
    assert read_question(path, 1000, {"epsilon": 2.0}).setting.epsilon == 2.0
    (tmp_path / "schema.toml").write_text(like)
    assert read_question(tmp_path / "schema.toml", 1000, {"members": 3}) == question
    (tmp_path / "schema.toml").write_text(PRIVATE_SCHEMA)
    with pytest.raises(InputError, match=r"because it has hidden layers of \[8\] \(relu\)"):
        read_question(tmp_path / "schema.toml", 1000, {"members": 3})
    (tmp_path / "broken.toml").write_text("[data]\n")
    with pytest.raises(InputError, match="broken.toml: the schema has no"):
        read_question(tmp_path / "broken.toml", 1000, {})


def test_trainings_unlike_the_measured_ones_are_named() -> None:
    assert differences(LIKE_MEASURED) == []
    data, training = LIKE_MEASURED.data, LIKE_MEASURED.training
    section = replace(PrivacySection(1.0, 1e-6), clip=2.0, reruns=50)
    changed = TabularSettings(
        replace(data, classes=("a", "b", "c"), class_weights="balanced"),
        Model("mlp", (64, 32)),
        replace(training, steps=50, lr=0.1),
        privacy=section,
    )
    assert differences(changed) == [
        "3 classes instead of two",
        "class_weights = 'balanced'",
        "hidden layers of [64, 32] (relu)",
        "steps = 50 instead of 200",
        "lr = 0.1 instead of 0.02",
        "clip = 2.0 instead of 1.0",
        "reruns = 50 instead of 5",
    ]
    assert differences(replace(LIKE_MEASURED, model=Model(function="a:b"))) == ["a network of your own"]


@pytest.mark.usefixtures("kept")
def test_run_states_the_expected_cost_or_why_there_is_none() -> None:
    cost = expected_cost(LIKE_MEASURED, 5, ONE.records_for(99.5))
    assert cost["accuracy"] == pytest.approx([0.01, 0.04], rel=0.03)
    assert cost["datasets"] == ["easy", "hard"]
    assert "so few records" in expected_cost(LIKE_MEASURED, 5, 10)["unknown"]
    other = replace(LIKE_MEASURED, training=replace(FOR_PRIVATE_TABLES, steps=7))
    assert expected_cost(other, 5, 5000) == {"unknown": "this training has steps = 7 instead of 200"}


def test_shipped_table_is_complete() -> None:
    table = privacy_costs.cost_table()
    assert {each.model for each in table.curves} == {"logistic", "mlp"}
    for each in table.curves:
        signals = [point.signal for point in each.points]
        assert signals == sorted(set(signals))
        assert len(signals) > 1
