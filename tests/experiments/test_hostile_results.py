"""Result files that are damaged or made up: each is refused where it is read, so that no page fails or shows them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cgd import InputError
from cgd.experiments import reproduce
from cgd.experiments.runner import ResultStore, RunResult, execute
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REGRET = {"hidden": (), "measure": "training", "evaluations": 2}
RUN = RunSpec(data="iris", rows=3, columns=2, steps=2, hidden=(2,))
MISMATCH = "has not a loss, and an accuracy from 0 to 1, for each of the same participants"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return execute(RUN).as_json()


@pytest.fixture(scope="module")
def with_regret() -> dict[str, Any]:
    return execute(RunSpec(data="iris", rows=3, steps=2, **REGRET)).as_json()  # type: ignore[arg-type]


def changed(content: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(content))
    change(copy)
    return copy


def check_refused(content: Any, message: str, path: Path) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as caught:
        RunResult.read(path)
    assert str(caught.value).startswith(f"{path} is not a result that cgd wrote (")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; move it away to run it again")


def last(content: dict[str, Any]) -> dict[str, Any]:
    evaluation: dict[str, Any] = content["history"]["evaluations"][-1]
    return evaluation


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["history"].update(evaluations=[]), "are not those of 2 steps"),
        (lambda content: content["history"]["evaluations"].pop(), "are not those of 2 steps"),
        (lambda content: content["history"]["training_loss"].pop(), "are not those of 2 steps"),
        (lambda content: content.update(history=[]), "expected `object`, got `array`"),
        (lambda content: content["history"].update(training_loss="ab"), "training_loss is 'ab'"),
        (lambda content: content.update(cgd=[1]), "expected `str`, got `array`"),
        (lambda content: last(content).update(step="<b>"), "evaluations[2].step is '<b>'"),
        (lambda content: last(content).update(loss=["a"]), "evaluations[2].loss[0] is 'a'"),
        (lambda content: last(content).update(loss=[10**400]), "evaluations[2].loss[0] is 1000"),
        (lambda content: last(content).update(loss=[], accuracy=[]), MISMATCH),
        (lambda content: last(content)["accuracy"].append(0.5), MISMATCH),
        (lambda content: last(content)["fused_loss"].pop(), MISMATCH),
        (lambda content: last(content)["accuracy"].__setitem__(0, 1.5), MISMATCH),
        (lambda content: last(content)["fused_accuracy"].__setitem__(0, -0.5), MISMATCH),
        (lambda content: last(content)["loss"].__setitem__(0, float("nan")), "the number NaN is not finite"),
        (lambda content: last(content)["loss"].__setitem__(0, float("inf")), "the number Infinity is not finite"),
        (lambda content: content["spec"].update(rows=-1), "rows is -1"),
    ],
)
def test_impossible_results_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "unchanged.json").write_text(json.dumps(stored))
    assert RunResult.read(tmp_path / "unchanged.json").as_json() == stored
    check_refused(changed(stored, change), message, tmp_path / "mine.json")


@pytest.mark.parametrize("text", ["", "[", "[1]", "{}", "null", "\x00", "[" * 100_000, '{"format": "cgd-result-1"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    check_refused(text, "", tmp_path / "mine.json")


def test_numbers_beyond_the_range_of_floats_are_refused(stored: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(changed(stored, lambda content: last(content).update(step=-77)))
    check_refused(text.replace("-77", "1e999"), "the number 1e999 is not finite", tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("theory"), "theory.optimum"),
        (lambda content: content.update(theory=[]), "expected `object`, got `array`"),
        (lambda content: content["theory"].update(optimum="low"), "theory.optimum is 'low'"),
        (lambda content: content["theory"].update(epsilon=[]), "theory.epsilon has no participant"),
        (lambda content: content["theory"].pop("distance"), "distance"),
    ],
)
def test_a_regret_without_its_reference_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, with_regret: dict[str, Any], tmp_path: Path
) -> None:
    check_refused(changed(with_regret, change), message, tmp_path / "mine.json")


def test_the_report_names_a_damaged_file(tmp_path: Path) -> None:
    run = reproduce.get("table-8").entries["paper"][0].run
    store = ResultStore(tmp_path)
    store.path(run).write_text('{"format": "cgd-result-1"')
    with pytest.raises(InputError, match=f"{store.path(run).name} is not a result that cgd wrote"):
        reproduce.stored_results(reproduce.get("table-8"), "paper", store)
