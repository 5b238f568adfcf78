"""Results that are computed after the last sum: nobody learns of them, and an interruption loses nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.cli.join import _prepare_table
from cgd.federation.config import Federation
from cgd.json_files import convert
from cgd.reporting.run_file import load_run
from cgd.reporting.run_scores import ClassificationScores
from cgd.tabular import own_results
from cgd.tabular.model import ConfinedModel
from cgd.tabular.own_results import CONFINED, DISPLACEMENT_FILE, FinishedTraining, load_finished
from cgd.tabular.run import TabularRun
from cgd.tabular.run_inputs import RunOptions
from cgd.tabular.training import train
from support.private_tables import PRIVATE_DATA, private_settings
from support.tabular import records, run_members, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.reporting.run_file import AnyRun
    from cgd.tabular.dataset import TabularDataset

NAMES = ("ada", "bob", "cleo")
SEED = b"ada".ljust(32)


def content(name: str, rows: int = 200) -> dict[str, list[Any]]:
    """Return a table; the classes of ada are less frequent than the columns explain."""
    return table(rows, len(name), rare=2.0 if name == "ada" else 0.0)


def new_federation(folder: Path) -> Federation:
    for name in NAMES:
        write_csv(folder / f"{name}.csv", content(name))
    return Federation.load(write_federation(folder, NAMES, steps=20, patience=0))


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return new_federation(tmp_path)


def run_all(federation: Federation, out: str, output: list[str] | None = None, **options: Any) -> list[AnyRun]:
    folder = federation.path.parent

    def member(peers: Peers, name: str) -> AnyRun:
        peers.seed = name.encode().ljust(32)
        data = folder / f"{name}.csv"
        show = (lambda _: None) if output is None else output.append
        return TabularRun.prepare(federation, name, data, folder / out / name, **options).run(peers, show_message=show)

    with cgd.local_peers(NAMES) as group:
        return group.run(member, NAMES)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, AnyRun]:
    """A federation, and the run of ada in its folder `complete`, which tests only read."""
    federation = new_federation(tmp_path_factory.mktemp("complete"))
    return federation, run_all(federation, "complete")[0]


def test_kept_model_is_the_one_that_predicts_and_the_confined_one_is_beside_it(
    complete: tuple[Federation, AnyRun],
) -> None:
    federation, run = complete
    folder = federation.path.parent
    plain = run_all(federation, "plain", keep="confined")[0]
    assert run.kept is not None
    assert (run.kept.keep, run.kept.records, run.kept.unavailable) == ("personalised", 40, None)
    assert run.kept.method is not None
    assert plain.kept is None
    assert not (folder / "plain" / "ada" / CONFINED).exists()
    kept, confined = cgd.load_model(folder / "complete" / "ada"), cgd.load_model(folder / "complete" / "ada" / CONFINED)
    fresh = {name: values for name, values in content("ada", 400).items() if name in ("age", "dose", "ward")}
    before = cgd.load_model(folder / "plain" / "ada").predict_proba(fresh)
    assert np.array_equal(confined.predict_proba(fresh), before)
    assert not np.array_equal(kept.predict_proba(fresh), before)
    assert run.comparison is not None
    assert [each.name for each in run.comparison.models] == ["alone", "together", "personalised"]
    # All figures of the report are those of the kept model, on records that did not choose it.
    assert isinstance(run.validation, ClassificationScores)
    assert run.validation.accuracy == run.comparison.models[2].scores["accuracy"].value
    page = (folder / "complete" / "ada" / "report.html").read_text()
    assert "The model that we keep" in page
    assert "adapted to our own training records" in page


def test_nobody_can_see_what_a_member_keeps(federation: Federation) -> None:
    """The same messages of the same size, whatever is kept."""
    found = [run_all(federation, keep, keep=keep, alone=False) for keep in ("confined", "scaled", "personalised")]
    assert found[0][0].traffic is not None
    for runs in found[1:]:
        assert [run.traffic for run in runs] == [run.traffic for run in found[0]]
        assert [run.revealed for run in runs] == [run.revealed for run in found[0]]


def test_run_that_was_stopped_before_its_report_is_completed_without_the_others(
    complete: tuple[Federation, AnyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept model is saved already, and run.json still describes the confined one."""
    federation, expected = complete
    folder = federation.path.parent
    states: dict[str, bytes] = {}

    def stop(self: TabularRun, found: Any, *_: Any) -> None:
        if "kept" in found and self.participant == "ada":
            raise KeyboardInterrupt
        write(self, found, *_)

    write = TabularRun._write
    monkeypatch.setattr(TabularRun, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        run_all(federation, "stopped")
    monkeypatch.undo()
    own = folder / "stopped" / "ada"
    assert load_run(own).kept is None
    assert (own / DISPLACEMENT_FILE).stat().st_mode & 0o777 == 0o600
    assert (own / CONFINED / "model.json").exists()
    states["kept"] = (own / "model.safetensors").read_bytes()
    assert states["kept"] == (folder / "complete" / "ada" / "model.safetensors").read_bytes()
    monkeypatch.setattr("cgd.tabular.run.train", lambda *_, **__: pytest.fail("it would wait for the others"))
    with pytest.raises(pytest.fail.Exception, match="it would wait"):
        TabularRun.prepare(federation, "ada", folder / "ada.csv", own).run(
            SimpleNamespace(seed=SEED)  # type: ignore[arg-type]
        )
    again = load_run(own)
    assert (again.kept, again.comparison, again.validation) == (expected.kept, expected.comparison, expected.validation)
    assert (own / "model.safetensors").read_bytes() == states["kept"]
    assert not list(folder.glob(f"*/ada/{DISPLACEMENT_FILE}"))


def test_confined_model_that_is_wanted_too_late_is_named(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all(federation, "runs", alone=False)
    folder = federation.path.parent
    own = folder / "runs" / "ada"
    told = f"--keep confined was not applied, because the run is finished; the confined model is in {own / CONFINED}"
    for keep, expected in (("confined", True), (None, False)):
        _prepare_table(federation, "ada", folder / "ada.csv", own, RunOptions(keep=keep), alone=False)
        assert (told in capsys.readouterr().err) == expected
    output: list[str] = []
    run_all(federation, "runs", output, alone=False, keep="confined")
    assert told in output


def test_without_a_model_alone_the_kept_one_is_compared_with_the_confined_one(federation: Federation) -> None:
    run = run_all(federation, "runs", alone=False)[0]
    assert run.comparison is not None
    assert [each.name for each in run.comparison.models] == ["together", "personalised"]
    assert run.comparison.unavailable == "it was not trained (--no-alone)"
    assert run_all(federation, "runs")[0] == run  # a finished run is not changed


def trained_alone(tmp_path: Path) -> tuple[FinishedTraining, AnyRun]:
    """Train together; save the model of the first member, and return it with a run that has its scores."""
    settings = tabular_settings()

    def member(peers: Peers, own: TabularDataset) -> Any:
        peers.seed = SEED
        return train(peers, settings, own)

    trained = run_members(member, [records(table(60, seed)) for seed in (1, 10, 11)])[0]
    model = ConfinedModel.from_training(
        trained, settings, {"participant": "a", "federation": "f", "epoch": 1, "digest": ""}
    )
    model.save(tmp_path)
    outputs = model.outputs(trained.validation)
    scores = convert(model.scores(outputs, trained.validation), ClassificationScores)
    return FinishedTraining(model, trained, outputs), SimpleNamespace(validation=scores)  # type: ignore[return-value]


@pytest.mark.parametrize("damage", ["none", "weights", "model", "class"])
def test_finished_run_that_cannot_be_completed_is_no_error(damage: str, tmp_path: Path) -> None:
    """The others may wait for a participant that joins again."""
    training, run = trained_alone(tmp_path)
    own = records(table(60, 1))
    if damage == "class":
        own = records({**table(60, 1), "outcome": ["new"] * 60})
    elif damage != "none":
        file = tmp_path / ("model.safetensors" if damage == "weights" else "model.json")
        file.write_bytes(file.read_bytes()[:-8])
    found = load_finished(tabular_settings(), own, tmp_path, run, SEED)
    assert (found is None) == (damage != "none")
    if found is not None:
        assert np.array_equal(found.outputs, training.outputs)


def test_with_privacy_the_model_is_not_adapted_unless_that_is_wanted() -> None:
    settings = private_settings(steps=10)
    own = [records(table(200, seed, rare=2.0 if seed == 1 else 0.0), PRIVATE_DATA) for seed in (1, 2, 3)]

    def member(peers: Peers, mine: TabularDataset) -> tuple[FinishedTraining, bytes]:
        trained = train(peers, settings, mine)
        model = ConfinedModel.from_training(trained, settings, {})
        return FinishedTraining(model, trained, model.outputs(trained.validation)), peers.seed

    training, seed = run_members(member, own)[0]
    spent = training.trained.ledger.spent()
    found = {
        keep: own_results.own_results(settings, training, seed, keep=keep, alone=False).content["kept"]
        for keep in ("scaled", "personalised")
    }
    assert found["scaled"]["method"] is None
    assert found["personalised"]["method"] is not None
    assert json.dumps(found)
    assert training.trained.ledger.spent() == spent
