"""Participants with tables that are killed and restarted, in this process, with the same table or another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.cli.join import _prepare_table
from cgd.errors import InputError
from cgd.federation import config_edit, member
from cgd.federation.config import Federation
from cgd.federation.keys import Keys
from cgd.reporting.run_file import AnyRun, load_run
from cgd.secagg.messages import Message, Ready
from cgd.tabular.run import TabularRun
from cgd.tabular.run_folder import RunFolder
from cgd.tabular.run_inputs import RunOptions
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import EvalRecord, TrainingResult, train
from cgd.tabular.training_loop import TrainingLoop
from support.in_process import InProcessFederation, MemberProcess, new_federation, participant_entry
from support.tabular import records, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
SETTINGS = tabular_settings(steps=10, patience=0)


@dataclass
class TrainingProgram:
    """A program that trains on a table.

    Attributes:
        rows: number of records.
        seed: seed of the records.
        settings: the training settings.
        evaluations: the evaluations so far.
    """

    rows: int = 30
    seed: int = 1
    settings: TabularSettings = SETTINGS
    evaluations: list[EvalRecord] = field(default_factory=list)

    def __call__(self, process: MemberProcess) -> TrainingResult:
        return train(
            process.peers, self.settings, records(table(self.rows, self.seed)), progress=self.evaluations.append
        )


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[InProcessFederation]:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def is_validation_sum(message: Message) -> bool:
    return isinstance(message, Ready) and message.spec.context == "validation loss"


def kill_before_evaluation(
    federation: InProcessFederation, step: int, *, lose_state: bool, settings: TabularSettings = SETTINGS
) -> dict[str, TrainingProgram]:
    """Kill cleo between a step and the sum of the validation loss after it."""
    programs = {name: TrainingProgram(seed=place, settings=settings) for place, name in enumerate(NAMES)}
    expected = step // SETTINGS.training.validate_every

    def is_this_sum(message: Message) -> bool:
        return is_validation_sum(message) and len(programs["ada"].evaluations) == expected - 1

    holds = [federation.network.hold(name, set(NAMES) - {name}, is_this_sum) for name in NAMES]
    for name in NAMES:
        federation.start(name, programs[name])
    federation.wait_until(lambda: all(len(hold.reached) == 2 for hold in holds))
    federation.kill("cleo", lose_state=lose_state)
    for hold in holds:
        federation.network.release(hold)
    return programs


def outcome(result: Any) -> tuple[Any, ...]:
    evaluations = [
        (evaluation.step, evaluation.everyone_validation_loss, evaluation.best_step)
        for evaluation in result.evaluations
    ]
    return evaluations, [each.tolist() for each in result.network.parameters()]


@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
@pytest.mark.parametrize(("rows", "seed"), [(31, 2), (30, 77)], ids=["more records", "other records, as many"])
def test_restart_with_another_table_is_refused_before_any_sum(
    federation: InProcessFederation, rows: int, seed: int, lose_state: bool
) -> None:
    programs = kill_before_evaluation(federation, 5, lose_state=lose_state)
    federation.start("cleo", replace(programs["cleo"], rows=rows, seed=seed))
    error = federation.errors("cleo")["cleo"]
    assert isinstance(error, InputError), error
    assert f"our {rows - 6} samples are not those that cleo was counted with, in number or in content" in str(error)
    assert "Restart with what was counted: the data, and with a table also [model], δ and the kind of" in str(error)
    assert Ready not in federation["cleo"].connection.sent
    assert not federation["ada"].finished
    assert not federation["bob"].finished
    federation["cleo"].stop()
    federation.start("cleo", replace(programs["cleo"], evaluations=[]))  # with the same records
    federation.results()


def test_restart_with_more_records_than_were_counted_is_refused_and_the_others_wait(
    federation: InProcessFederation,
) -> None:
    programs = kill_before_evaluation(federation, 5, lose_state=False)
    federation.start("cleo", replace(programs["cleo"], rows=1000))
    error = federation.errors("cleo")["cleo"]
    assert "our table is not the one that was counted, or a member entered a wrong number; restart with" in str(error)
    federation["cleo"].stop()
    federation.start("cleo", replace(programs["cleo"], evaluations=[]))
    federation.results()


@pytest.mark.parametrize(
    "mode",
    [{}, {"batches": 3}, {"batches": 3, "local_epochs": 2, "optimizer": "sgd", "lr": 1.0}, {"delay": 2}],
    ids=["all records", "batches", "local epochs", "delay"],
)
def test_restart_between_step_and_validation_sum_evaluates_its_own_loss(
    mode: dict[str, Any], federation: InProcessFederation, tmp_path: Path
) -> None:
    settings = tabular_settings(**{"steps": 10, "patience": 0, **mode})
    programs = kill_before_evaluation(federation, 5, lose_state=True, settings=settings)
    restarted = replace(programs["cleo"], evaluations=[])
    federation.start("cleo", restarted)
    disturbed = {name: outcome(result) for name, result in federation.results().items()}
    assert restarted.evaluations[0].validation_loss is not None
    with InProcessFederation(federation.path, tmp_path / "undisturbed") as quiet:
        for place, name in enumerate(NAMES):
            quiet.start(name, TrainingProgram(seed=place, settings=settings))
        assert {name: outcome(result) for name, result in quiet.results().items()} == disturbed


# Run folders.


@dataclass
class RunProgram:
    """A program that trains on a table and writes the run into a folder.

    Attributes:
        folder: folder for the runs of all participants.
        path: the federation file.
        output: the messages.
    """

    folder: Path
    path: Path
    output: list[str] = field(default_factory=list)

    def __call__(self, process: MemberProcess) -> AnyRun:
        name, federation = process.name, Federation.load(self.path)
        settings = TabularSettings.from_federation(federation, name)
        folder = RunFolder(self.folder / name, federation, name)
        run = TabularRun(federation, name, settings, records(table(30, len(name))), folder)
        return run.run(process.peers, show_message=self.output.append)


def run_all(path: Path, state: Path, folder: Path, *, orderly: bool = False) -> list[str]:
    """Run all participants, kill them at the end unless `orderly`; return ada's messages about the training."""
    programs = {name: RunProgram(folder, path) for name in NAMES}
    with InProcessFederation(path, state) as federation:
        for name in NAMES:
            federation.start(name, programs[name])
        federation.results()
        for process in federation if orderly else ():
            process.stop()
    classes, wards, *output = programs["ada"].output
    assert classes.startswith("classes of 'outcome', learned: ")
    assert wards.startswith("categories of 'ward', learned: ")
    return output


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes()) for each in folder.rglob("*") if each.is_file()}


def test_finished_run_is_unchanged_when_joined_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_federation(tmp_path, NAMES, steps=10)
    state, folder = tmp_path / "state", tmp_path / "runs"
    run_all(path, state, folder)
    finished = files(folder)
    assert len(finished) == 3 * 6
    waiting = load_run(folder / "ada").waiting
    assert waiting is not None
    assert waiting.computing > 0
    assert waiting.waiting + waiting.summing > 0
    assert waiting.peers.keys() <= set(NAMES) - {"ada"}
    output = run_all(path, state, folder)
    assert files(folder) == finished
    assert output[0] == "steps 1 to 10 of 10 were taken before the restart and are replayed"
    assert len(output) == 2  # replayed steps are not reported again
    assert output[-1] == f"done after step 10; the run was finished before, and {folder / 'ada'} is not changed"
    _prepare_table(
        Federation.load(path), "ada", write_csv(tmp_path / "ada.csv", table(30, 3)), None, RunOptions(), alone=True
    )
    message = f"cgd: this training is finished; its model and report in {folder / 'ada'} are not changed"
    assert message in capsys.readouterr().err
    assert files(folder) == finished
    # A missing file is written again; with more steps the training continues.
    (folder / "ada" / "report.html").unlink()
    run_all(path, state, folder, orderly=True)
    assert (folder / "ada" / "report.html").exists()
    path.write_text(path.read_text().replace("steps = 10", "steps = 15").replace("epoch = 1", "epoch = 2"))
    output = run_all(path, state, folder)
    assert output[0] == "steps 1 to 10 of 15 were taken before the restart and are replayed"
    assert output[1].startswith("step 15 of 15: validation loss of all ")
    assert [row.step for row in load_run(folder / "bob").history] == [5, 10, 15]


def test_member_that_joins_later_accepts_statistics_without_its_own_records(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dan has more records than all others together, so all counts of the statistics are below its own."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    holds = [federation.network.hold(name, set(NAMES) - {name}, is_validation_sum) for name in NAMES]
    for place, name in enumerate(NAMES):
        federation.start(name, TrainingProgram(seed=place))
    federation.wait_until(lambda: all(len(hold.reached) == 2 for hold in holds))
    keys = Keys.generate("dan")
    keys.save(federation.path.parent)
    config_edit.add_participant(federation.path, participant_entry(keys, len(NAMES)))
    federation.wait_until(
        lambda: all(process.member.runtime.membership.federation_spec.epoch == 2 for process in federation)
    )
    for hold in holds:
        federation.network.release(hold)
    federation.start("dan", TrainingProgram(rows=1000, seed=5))
    results = federation.results()
    assert {name: result.steps for name, result in results.items()} == dict.fromkeys((*NAMES, "dan"), 10)
    assert len({result.preprocessing for result in results.values()}) == 1


def hold_before(federation: InProcessFederation, context: str) -> list[Any]:
    """Start all participants, and hold them before the sum with this context."""

    def is_this_sum(message: Message) -> bool:
        return isinstance(message, Ready) and message.spec.context == context

    holds = [federation.network.hold(name, set(NAMES) - {name}, is_this_sum) for name in NAMES]
    for place, name in enumerate(NAMES):
        federation.start(name, TrainingProgram(seed=place))
    federation.wait_until(lambda: all(len(hold.reached) == 2 for hold in holds))
    return holds


@pytest.mark.parametrize("context", ["classes: claims 0", "categories: shared", "categories: table 0", "count values"])
@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
def test_restart_while_categories_are_learned(
    federation: InProcessFederation, tmp_path: Path, context: str, lose_state: bool
) -> None:
    """The claims of a member are derived from its key file, so it recognises them."""
    holds = hold_before(federation, context)
    federation.kill("cleo", lose_state=lose_state)
    for hold in holds:
        federation.network.release(hold)
    federation.start("cleo", TrainingProgram(seed=NAMES.index("cleo")))
    disturbed = {name: outcome(result) for name, result in federation.results().items()}
    with InProcessFederation(federation.path, tmp_path / "undisturbed") as quiet:
        for place, name in enumerate(NAMES):
            quiet.start(name, TrainingProgram(seed=place))
        assert {name: outcome(result) for name, result in quiet.results().items()} == disturbed


@pytest.mark.parametrize("context", ["categories: shared", "categories: table 0", "count values"])
def test_member_that_joins_while_categories_are_learned(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    """Dan's values are not among the claims, so those who entered claims decide what is opened."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    holds = hold_before(federation, context)
    keys = Keys.generate("dan")
    keys.save(federation.path.parent)
    config_edit.add_participant(federation.path, participant_entry(keys, len(NAMES)))
    federation.wait_until(
        lambda: all(process.member.runtime.membership.federation_spec.epoch == 2 for process in federation)
    )
    for hold in holds:
        federation.network.release(hold)
    federation.start("dan", TrainingProgram(rows=40, seed=5))
    results = federation.results()
    (preprocessing,) = {result.preprocessing for result in results.values()}
    assert preprocessing.features[-2:] == ("ward=A", "ward=B")


@pytest.mark.parametrize("epoch", [1, 2], ids=["same epoch", "new epoch"])
@pytest.mark.parametrize("other", ['activation = "tanh"', "start = 1", 'start = "zeros"'])
def test_training_is_not_continued_with_another_network(other: str, epoch: int, tmp_path: Path) -> None:
    """With another activation or start the shapes are the same, and the model that is saved was trained by nobody."""
    path, state = write_federation(tmp_path, NAMES, steps=10), tmp_path / "state"
    run_all(path, state, tmp_path / "runs", orderly=True)
    text = path.read_text().replace('kind = "mlp"', f'kind = "mlp"\n{other}')
    if epoch == 2:
        text = text.replace("steps = 10", "steps = 15").replace("epoch = 1", "epoch = 2")
    path.write_text(text)
    with InProcessFederation(path, state) as federation:
        for name in NAMES:
            federation.start(name, RunProgram(tmp_path / "other", path))
        errors = federation.errors(*NAMES)
    for error in errors.values():
        assert isinstance(error, InputError), error
        assert "this training was begun with another network than that of [model], whose kind is 'mlp'" in str(error)
        assert other.split()[0] in str(error)
        assert "start a new training under another name of the federation" in str(error)
    assert not (tmp_path / "other" / "ada" / "model.json").exists()


@pytest.mark.parametrize("other", ['activation = "tanh"', "start = 1"])
def test_killed_training_is_not_continued_with_another_network(other: str, tmp_path: Path) -> None:
    """All members were killed before a snapshot has the network: the commitment of the count has it, too."""
    path, state = write_federation(tmp_path, NAMES, steps=10), tmp_path / "state"
    run_all(path, state, tmp_path / "runs")
    run_all(path, state, tmp_path / "again")
    path.write_text(path.read_text().replace('kind = "mlp"', f'kind = "mlp"\n{other}'))
    with InProcessFederation(path, state) as federation:
        for name in NAMES:
            federation.start(name, RunProgram(tmp_path / "other", path))
        error = federation.errors("ada")["ada"]
    assert isinstance(error, InputError), error
    assert "[model]" in str(error)


def test_training_of_a_version_that_did_not_store_the_network_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = write_federation(tmp_path, NAMES, steps=10), tmp_path / "state"
    with monkeypatch.context() as earlier:
        earlier.setattr(TrainingLoop, "_save_network", lambda _: None)
        run_all(path, state, tmp_path / "runs", orderly=True)
    path.write_text(path.read_text().replace("steps = 10", "steps = 15").replace("epoch = 1", "epoch = 2"))
    run_all(path, state, tmp_path / "runs")
    assert [row.step for row in load_run(tmp_path / "runs" / "bob").history] == [5, 10, 15]
