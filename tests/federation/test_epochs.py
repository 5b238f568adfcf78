"""New epochs of the federation file while members run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd import Cell
from cgd.errors import (
    InputError,
)
from cgd.federation import config_edit, member
from cgd.federation.keys import Keys
from support.in_process import (
    InProcessFederation,
    new_federation,
    participant_entry,
)
from support.programs import (
    GRID,
    NAMES,
    Summing,
    Training,
    idle,
    reveals_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.slow


@pytest.fixture
def fast_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the federation file every 20 ms."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


@pytest.fixture
def editable(tmp_path: Path, fast_watch: None) -> Iterator[InProcessFederation]:
    """Ada, bob and cleo, with a federation file that the test may change."""
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def add(federation: InProcessFederation, name: str) -> None:
    keys = Keys.generate(name)
    keys.save(federation.path.parent)
    config_edit.add_participant(federation.path, participant_entry(keys, len(federation.names)))


def all_in_epoch(federation: InProcessFederation, epoch: int) -> bool:
    return all(process.member.runtime.membership.federation_spec.epoch == epoch for process in federation)


def test_late_joiner_decodes_old_totals_with_their_own_fixed_point(editable: InProcessFederation) -> None:
    """The fixed point depends on the number of addends."""
    editable.start_all(Summing([1.5, 1.5]), pause_at=1)
    for process in editable:
        process.wait_for_step(1)
    add(editable, "dan")
    editable.wait_until(lambda: all_in_epoch(editable, 2))
    for process in editable:
        process.resume()
    editable.start("dan", Summing([1.5, 1.5]))
    assert editable.results() == dict.fromkeys((*NAMES, "dan"), (4.5, 6.0))


def test_step_opened_by_some_before_a_new_epoch_is_the_same_for_all(
    editable: InProcessFederation,
) -> None:
    """Bob and cleo have opened the sum of a step and ada has not, when dan joins."""
    editable.start("ada", Training(), pause_at=2)
    editable.start("bob", Training())
    editable.start("cleo", Training())
    editable["ada"].wait_for_step(2)
    made = len(editable["ada"].journal())
    editable.wait_until(lambda: all(editable[name].is_waiting_for("Ready", "ada") for name in ("bob", "cleo")))
    hold = editable.network.hold("bob", {"ada"}, reveals_key)
    editable["ada"].resume()
    editable.wait_until(lambda: hold.reached and [len(editable[name].journal()) - made for name in NAMES] == [0, 1, 1])
    add(editable, "dan")
    editable.wait_until(lambda: all_in_epoch(editable, 2))
    editable.network.release(hold)
    editable.start("dan", Training())
    assert len(set(editable.results().values())) == 1
    assert [entry.epoch for entry in editable["ada"].journal().entries][made : made + 2] == [1, 2]
    assert [entry.addends for entry in editable["dan"].journal().entries][made : made + 2] == [3, 4]


def test_unfinished_count_is_repeated_with_the_remaining_members(editable: InProcessFederation) -> None:
    """Bob and dan are killed before they are counted; dan is removed, and bob is restarted."""
    add(editable, "dan")
    add(editable, "eve")
    for name in editable.names:
        editable.start(name, Training(), pause_at=0 if name in ("bob", "dan") else None)
    editable.wait_until(
        lambda: all(editable[name].is_waiting_for("Ready", "bob", "dan") for name in ("ada", "cleo", "eve"))
    )
    editable.kill("bob", "dan")
    config_edit.remove_participant(editable.path, "dan")
    editable.start("bob", Training())
    results = editable.results()
    assert set(results) == {"ada", "bob", "cleo", "eve"}
    assert len(set(results.values())) == 1
    assert {entry.addends for entry in editable["ada"].journal().entries} == {4}


@pytest.mark.usefixtures("fast_watch")
def test_file_that_moves_a_running_participant_is_rejected_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = new_federation(tmp_path, GRID, [Cell(int(name[1]), int(name[3])) for name in GRID])
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(Training(), pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        text = path.read_text().replace("epoch = 1", "epoch = 2").replace("cell = [0, 0]", "cell = [9, 9]")
        text = text.replace("cell = [0, 1]", "cell = [0, 0]").replace("cell = [9, 9]", "cell = [0, 1]")
        path.write_text(text)
        moved = {"r0c0": (Cell(0, 0), Cell(0, 1)), "r0c1": (Cell(0, 1), Cell(0, 0))}
        lines = [
            f"it moves {name} from cell {ours} to {theirs}, and a running program cannot follow"
            for name, (ours, theirs) in moved.items()
        ]
        federation.wait_until(lambda: all(line in caplog.text for line in lines))
        for name in moved:
            assert federation[name].member.runtime.membership.federation_spec.epoch == 1
            assert not federation[name].finished


def test_file_with_an_older_epoch_than_the_state_is_rejected(editable: InProcessFederation) -> None:
    old = editable.path.parent / "old.toml"
    old.write_bytes(editable.path.read_bytes())
    add(editable, "dan")
    editable.start_all(Summing([1]))
    editable.results()
    editable.kill("cleo")
    with pytest.raises(InputError, match=r"old.toml has epoch 1, and cleo has taken part in epoch 2"):
        editable.start("cleo", Summing([1]), path=old)
    editable.start("cleo", Summing([1]))
    assert editable.results()["cleo"] == (4,)


def test_restored_file_is_logged(editable: InProcessFederation, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cgd")
    editable.start("ada", idle)
    before = editable.path.read_text()
    editable.path.write_text("no TOML")
    editable.wait_until(lambda: "the changed federation file is not used" in caplog.text)
    editable.path.write_text(before)
    editable.wait_until(lambda: "the federation file has its previous content again" in caplog.text)
