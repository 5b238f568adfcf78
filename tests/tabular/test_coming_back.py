"""Participants with tables that are killed and come back, inside this process: with the table they had, or another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.cli.joining import _practice
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.reporting.run_file import load_run
from cgd.secagg.messages import Message, Ready
from cgd.tabular.run import DataSource, RunFolder, run
from cgd.tabular.training import EvalRecord, TrainingResult, train
from support.lives import Life, Village, found
from support.practice import federation_file, records, setting, table, write_csv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.tabular.settings import TabularSettings

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
SETTING = setting(steps=10, patience=0)


@dataclass
class Tabular:
    """A program that trains on a table.

    Attributes:
        rows: how many records it has.
        seed: which ones.
        looks: what it was told of.
    """

    rows: int = 30
    seed: int = 1
    setting: TabularSettings = SETTING
    looks: list[EvalRecord] = field(default_factory=list)

    def __call__(self, life: Life) -> TrainingResult:
        return train(life.peers, self.setting, records(table(self.rows, self.seed)), progress=self.looks.append)


@pytest.fixture
def village(tmp_path: Path) -> Iterator[Village]:
    with Village(found(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def a_validation_sum(message: Message) -> bool:
    return isinstance(message, Ready) and message.spec.context == "validation loss"


def killed_before_a_look(village: Village, step: int, *, lose_state: bool) -> dict[str, Tabular]:
    """Cleo is killed when a step is taken and the validation loss after it is not summed."""
    programs = {name: Tabular(seed=place) for place, name in enumerate(NAMES)}
    looks = step // SETTING.training.validate_every

    def this_look(message: Message) -> bool:
        return a_validation_sum(message) and len(programs["ada"].looks) == looks - 1

    holds = [village.network.hold(name, set(NAMES) - {name}, this_look) for name in NAMES]
    for name in NAMES:
        village.start(name, programs[name])
    village.until(lambda: all(len(hold.reached) == 2 for hold in holds))
    village.kill("cleo", lose_state=lose_state)
    for hold in holds:
        village.network.release(hold)
    return programs


def outcome(result: Any) -> tuple[Any, ...]:
    looks = [(look.step, look.everyone_validation_loss, look.best_step) for look in result.looks]
    return looks, [each.tolist() for each in result.network.parameters()]


@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
@pytest.mark.parametrize(("rows", "seed"), [(31, 2), (30, 77)], ids=["more records", "other records, as many"])
def test_who_comes_back_with_another_table_is_stopped_before_any_sum(
    village: Village, rows: int, seed: int, lose_state: bool
) -> None:
    programs = killed_before_a_look(village, 5, lose_state=lose_state)
    village.start("cleo", replace(programs["cleo"], rows=rows, seed=seed))
    error = village.errors("cleo")["cleo"]
    assert isinstance(error, InputError), error
    assert f"our {rows - 6} samples are not those that cleo was counted with, in number or in content" in str(error)
    assert "Come back with the data that you had; or remove and add this participant" in str(error)
    assert Ready not in village["cleo"].connection.sent
    assert not village["ada"].over
    assert not village["bob"].over
    village["cleo"].stop()
    village.start("cleo", replace(programs["cleo"], looks=[]))  # with those it had
    village.results()


def test_who_is_killed_between_a_step_and_its_validation_sum_says_its_own_loss_when_it_is_back(
    village: Village, tmp_path: Path
) -> None:
    programs = killed_before_a_look(village, 5, lose_state=True)
    back = replace(programs["cleo"], looks=[])
    village.start("cleo", back)
    disturbed = {name: outcome(result) for name, result in village.results().items()}
    assert back.looks[0].validation_loss is not None
    with Village(village.path, tmp_path / "undisturbed") as quiet:
        for place, name in enumerate(NAMES):
            quiet.start(name, Tabular(seed=place))
        assert {name: outcome(result) for name, result in quiet.results().items()} == disturbed


# A run and its folder.


@dataclass
class Running:
    """A program that trains on a table and leaves a run in a folder.

    Attributes:
        folder: for the runs of all.
        path: the federation file.
        said: what it told.
    """

    folder: Path
    path: Path
    said: list[str] = field(default_factory=list)

    def __call__(self, life: Life) -> dict[str, Any]:
        name, federation = life.name, Federation.load(self.path)
        source = DataSource(f"{name}.csv", records(table(30, len(name))))
        folder = RunFolder(self.folder / name, federation, name)
        return run(life.peers, federation, name, source, folder, say=self.said.append)


def all_run(path: Path, state: Path, folder: Path, *, orderly: bool = False) -> list[str]:
    """Let everybody run, and kill them in the end unless they leave in order, with their whole state; what ada said."""
    programs = {name: Running(folder, path) for name in NAMES}
    with Village(path, state) as village:
        for name in NAMES:
            village.start(name, programs[name])
        village.results()
        for life in village if orderly else ():
            life.stop()
    return programs["ada"].said


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes()) for each in folder.rglob("*") if each.is_file()}


def test_a_finished_run_that_is_joined_again_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = federation_file(tmp_path, NAMES, steps=10)
    state, folder = tmp_path / "state", tmp_path / "runs"
    all_run(path, state, folder)
    left = files(folder)
    assert len(left) == 3 * 7
    said = all_run(path, state, folder)
    assert files(folder) == left
    assert said[0] == "steps 1 to 10 of 10 were taken before, and are caught up"
    assert len(said) == 2  # and not the past again, step by step
    assert said[-1] == f"done after step 10; the run was finished before, and {folder / 'ada'} stays as it is"
    _practice(path, "ada", write_csv(tmp_path / "ada.csv", table(30, 3)), None, None, None, None)
    told = f"cgd: this training is finished, and {folder / 'ada'} has its model and report, which stay as they are"
    assert told in capsys.readouterr().err
    assert files(folder) == left
    # A file that is missing is made again, and with more steps the training goes on.
    (folder / "ada" / "report.html").unlink()
    all_run(path, state, folder, orderly=True)
    assert (folder / "ada" / "report.html").exists()
    path.write_text(path.read_text().replace("steps = 10", "steps = 15").replace("epoch = 1", "epoch = 2"))
    said = all_run(path, state, folder)
    assert said[0] == "steps 1 to 10 of 15 were taken before, and are caught up"
    assert said[1].startswith("step 15 of 15: validation loss of all ")
    assert [row["step"] for row in load_run(folder / "bob")["history"]] == [5, 10, 15]
