"""Recovery of journals: from the state folders of members that were killed together, and from peers.

The members run inside this process, over a network that the tests hold back at the critical moments. test_faults.py
does the same with real processes and sockets at random moments; secagg/test_membership.py without I/O.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytest

from cgd.errors import (
    InputError,
    PeerTimeoutError,
)
from cgd.federation.state import StateFolder
from cgd.secagg.journal import Journal
from cgd.secagg.messages import JournalChunk, SumSpec
from cgd.transport import runtime
from support.in_process import (
    FEDERATION,
    InProcessFederation,
    MemberProcess,
)
from support.programs import (
    COLUMN,
    EVERYONE,
    GRID,
    NAMES,
    Summing,
    Training,
    reveals_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.secagg.codec import Frame
    from cgd.secagg.messages import PeerId


pytestmark = pytest.mark.slow


# Members that are killed together.


def snapshot_steps(federation: InProcessFederation, name: str, group: str) -> int | None:
    """Return the number of steps in a participant's snapshot; None if there is none."""
    path = federation.folder(name) / f"{FEDERATION}+{group}.ledger"
    return Journal.from_bytes(path.read_bytes()).states[0].steps if path.exists() else None


def restart_cleanly(
    federation: InProcessFederation, name: str, step: int, program: Training, *, pause_at: int | None
) -> None:
    """Stop a participant cleanly at the step where it pauses, which saves a snapshot, and start it again."""
    federation[name].wait_for_step(step)
    federation[name].stop()
    federation.start(name, program, pause_at=pause_at)


@pytest.mark.usefixtures("no_periodic_snapshots")
@pytest.mark.parametrize("loop", ["plain", "steps"])
@pytest.mark.parametrize(
    "moment", ["between two steps", "between its sum and everyone's", "when only the others have opened everyone's"]
)
def test_column_killed_at_once_recovers_from_its_state_folders(
    grid: InProcessFederation, uninterrupted_grid: dict[str, str], moment: str, loop: Any
) -> None:
    """Its members saved snapshots after 1, 3 and 0 steps; later entries are in segments."""
    program, between = Training(loop=loop), moment == "between two steps"
    halts = {"r0c0": 1, "r1c0": 3, "r2c0": 6 if between else None, "r0c1": None if between else 6}
    for name in GRID:
        grid.start(name, program, pause_at=halts.get(name))
    restart_cleanly(grid, "r0c0", 1, program, pause_at=6 if between else None)
    restart_cleanly(grid, "r1c0", 3, program, pause_at=6 if between else None)
    if between:
        for name in COLUMN:
            grid[name].wait_for_step(6)
    else:
        grid.wait_until(lambda: all(waits_in_sum_with_everyone(grid[name], steps=7) for name in COLUMN))
    if moment == "when only the others have opened everyone's":
        made = len(grid["r0c0"].journal())
        hold = grid.network.hold("r0c1", COLUMN, reveals_key)
        grid["r0c1"].resume()
        grid.wait_until(lambda: all(len(grid[name].journal()) == made + 1 for name in GRID if name not in COLUMN))
        assert {len(grid[name].journal()) for name in COLUMN} == {made}
    grid.kill(*COLUMN)
    if moment == "when only the others have opened everyone's":
        grid.network.release(hold)
    assert [snapshot_steps(grid, name, "column-0") for name in COLUMN] == [1, 3, None]
    if moment == "between its sum and everyone's":
        grid["r0c1"].resume()
    for name in COLUMN:
        grid.start(name, program)
    assert grid.results() == uninterrupted_grid


def waits_in_sum_with_everyone(process: MemberProcess, steps: int) -> bool:
    """Return whether it has made its column's sums of this many steps, and waits in the following sum with everyone."""
    return len(process.journal("column-0")) == 1 + steps and process.waiting_for()[0] == "Ready"


def test_column_without_state_reports_an_error_and_sums_nothing(grid: InProcessFederation) -> None:
    grid.start_all(Training(), pause_at=3)
    for process in grid:
        process.wait_for_step(3)
    grid.kill(*COLUMN, lose_state=True)
    for name in COLUMN:
        grid.start(name, Training())
    for error in grid.errors(*COLUMN).values():
        assert isinstance(error, InputError), error
        assert (
            "step 0 was taken in another group of members, but the members of this group have lost its result"
            in str(error)
        )
    assert {len(grid[name].journal("column-0")) for name in COLUMN} == {0}


@pytest.mark.usefixtures("no_periodic_snapshots")
@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_all_members_killed_at_once_recover_from_their_state_folders(
    federation: InProcessFederation, uninterrupted: dict[str, str], loop: Any
) -> None:
    program = Training(loop=loop)
    for name in NAMES:
        federation.start(name, program, pause_at=2 if name == "ada" else 5)
    restart_cleanly(federation, "ada", 2, program, pause_at=5)
    for process in federation:
        process.wait_for_step(5)
    made = len(federation["ada"].journal())
    federation.kill(*NAMES)
    assert [snapshot_steps(federation, name, EVERYONE) for name in NAMES] == [2, None, None]
    for name in NAMES:
        assert len(StateFolder(federation.folder(name), FEDERATION).load()[EVERYONE]) == made
    federation.start_all(program)
    assert federation.results() == uninterrupted


@pytest.mark.usefixtures("no_periodic_snapshots")
def test_recovered_journal_is_saved_in_the_state_folder(
    federation: InProcessFederation, uninterrupted: dict[str, str]
) -> None:
    """So that the peers from which it recovered can recover from it."""
    for name in NAMES:
        federation.start(name, Training(), pause_at=3 if name == "cleo" else 5)
    federation["cleo"].wait_for_step(3)
    federation.kill("cleo", lose_state=True)
    federation.start("cleo", Training(), pause_at=5)
    for process in federation:
        process.wait_for_step(5)
    made = len(federation["cleo"].journal())
    federation.kill("cleo")
    federation.kill("ada", "bob", lose_state=True)
    assert len(StateFolder(federation.folder("cleo"), FEDERATION).load()[EVERYONE]) == made
    federation.start_all(Training())
    assert federation.results() == uninterrupted


@pytest.mark.usefixtures("no_periodic_snapshots")
def test_total_that_one_killed_member_had_opened_is_not_summed_again(federation: InProcessFederation) -> None:
    """Not even with other values: the difference of two totals would reveal them."""
    federation.network.hold("cleo", {"ada", "bob"}, reveals_key)
    federation.start_all(Summing([1, 2]), pause_at=1)
    federation["cleo"].wait_for_step(1)
    assert [len(federation[name].journal()) for name in NAMES] == [0, 0, 1]
    federation.kill(*NAMES)
    federation.start_all(Summing([100, 2]))
    assert federation.results() == dict.fromkeys(NAMES, (3, 6))


def saved_journal(federation: InProcessFederation, name: str) -> Journal:
    return StateFolder(federation.folder(name), FEDERATION).load()[EVERYONE]


def test_pending_reveal_of_the_first_sum_survives_a_kill(federation: InProcessFederation) -> None:
    for name in NAMES:
        federation.network.hold(name, set(NAMES) - {name}, reveals_key)
    federation.start_all(Summing([1, 2]))
    federation.wait_until(lambda: all(process.journal().pending_reveal is not None for process in federation))
    federation.kill(*NAMES)
    for name in NAMES:
        journal = saved_journal(federation, name)
        assert journal.pending_reveal is not None
        assert (len(journal), journal.pending_reveal.index, journal.pending_reveal.members) == (0, 0, NAMES)
    federation.start_all(Summing([100, 2]))  # no member has opened it: the same members repeat it
    assert federation.results() == dict.fromkeys(NAMES, (300, 6))


@pytest.mark.usefixtures("no_periodic_snapshots")
def test_pending_reveal_after_recovery_from_peers_survives_a_kill(federation: InProcessFederation) -> None:
    """The program requested none of the totals that were recovered."""

    def jumping(process: MemberProcess) -> float:
        process.peers.recovery.jump(1)
        process.peers.recovery.set_step(0)
        return float(process.peers.sum(np.array([3])).item())

    federation.start_all(Summing([1, 2, 3]), pause_at=2)
    for process in federation:
        process.wait_for_step(2)
    federation.kill("ada", lose_state=True)
    federation.network.hold("bob", {"ada", "cleo"}, reveals_key)
    for process in federation:
        process.resume()
    ada = federation.start("ada", jumping)
    federation.wait_until(lambda: ada.journal().pending_reveal is not None)
    mark = ada.journal().pending_reveal
    federation.kill("ada")
    journal = saved_journal(federation, "ada")
    assert (len(journal), journal.pending_reveal) == (2, mark)


def test_totals_are_on_the_disk_while_a_snapshot_is_being_saved(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, goes_on, plain = threading.Event(), threading.Event(), StateFolder.save

    def slow_save(self: StateFolder, group: str, length: int, *journal: bytes) -> bool:
        started.set()
        goes_on.wait()
        return plain(self, group, length, *journal)

    monkeypatch.setattr(runtime, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(StateFolder, "save", slow_save)
    federation.start_all(Summing([1, 2, 3, 4]), pause_at=1)
    federation.wait_until(started.is_set)
    try:
        for step in (2, 3):
            for process in federation:
                process.resume(pause_at=step)
            for process in federation:
                process.wait_for_step(step)
            assert [len(saved_journal(federation, name)) for name in NAMES] == [step] * len(NAMES)
    finally:
        goes_on.set()
    for process in federation:
        process.resume()
    assert federation.results() == dict.fromkeys(NAMES, (3, 6, 9, 12))


def test_snapshot_that_was_overtaken_does_not_replace_a_longer_one(tmp_path: Path) -> None:
    state, journal = StateFolder(tmp_path, FEDERATION), Journal()
    spec = SumSpec((1,), "float32", 32, 20, "pairwise", "mesh")
    for place in range(2):
        journal.append(spec, np.full(1, place, dtype="<u4"), epoch=1)
    shorter = journal.snapshot()
    journal.append(spec, np.full(1, 2, dtype="<u4"), epoch=1)
    assert state.save(EVERYONE, 3, *journal.pieces())
    assert state.save(EVERYONE, 2, *shorter.pieces())
    assert len(StateFolder(tmp_path, FEDERATION).load()[EVERYONE]) == 3


# State folders that cannot be written.


def test_unusable_state_folder_is_rejected_at_start(federation: InProcessFederation) -> None:
    federation.folder("ada").parent.mkdir()
    federation.folder("ada").write_text("in the way")
    with pytest.raises(InputError, match="name another folder"):
        federation.start("ada", Training())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_full_disk_does_not_stop_training(
    federation: InProcessFederation,
    uninterrupted: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runtime, "SAVE_SECONDS", 0.0)
    federation.start_all(Training(), pause_at=0)
    folder, plain = federation.folder("ada"), StateFolder._open

    def full(self: StateFolder, path: Path) -> BinaryIO:
        return open("/dev/full", "wb") if self.folder == folder else plain(self, path)

    monkeypatch.setattr(StateFolder, "_open", full)
    for process in federation:
        process.resume(pause_at=4)
    for process in federation:
        process.wait_for_step(4)
    ada = federation["ada"]
    saved = ada.member.runtime._saved
    federation.wait_until(lambda: saved.get(EVERYONE, (0,))[0] == -1 or not ada.running)  # it did not work
    for process in federation:
        process.resume()
    assert federation.results() == uninterrupted
    assert f"the state cannot be saved in {folder} (No space left on device)" in caplog.text


# Recovery from peers.


def restart_without_state(
    federation: InProcessFederation, *corrupted: PeerId, timeout: float | None = None
) -> MemberProcess:
    """Restart ada without its state after two sums; the journals that these members send are corrupted."""
    federation.start_all(Summing([1, 2, 3]), pause_at=2)
    for process in federation:
        process.wait_for_step(2)

    def corrupt(sender: PeerId, _to: PeerId, frame: Frame) -> Frame:
        if not isinstance(frame.message, JournalChunk) or sender not in corrupted:
            return frame
        return replace(frame, message=replace(frame.message, words=bytes(len(frame.message.words))))

    federation.kill("ada", lose_state=True)
    federation.network.rewrite = corrupt
    federation["bob"].resume()
    federation["cleo"].resume()
    return federation.start("ada", Summing([1, 2, 3]), timeout=timeout)


def test_journal_is_requested_from_another_peer_if_the_first_is_invalid(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    restart_without_state(federation, "bob")
    assert federation.results() == dict.fromkeys(NAMES, (3, 6, 9))
    assert "bob: sent an invalid journal: " in caplog.text


def test_timeout_names_the_peers_if_no_journal_is_valid(federation: InProcessFederation) -> None:
    ada = restart_without_state(federation, "bob", "cleo", timeout=0.5)
    error = federation.errors("ada")["ada"]
    assert isinstance(error, PeerTimeoutError), error
    assert error.peers == {"bob", "cleo"}
    assert "its journal" in str(error)
    assert ada.waiting_for() == ("its journal", frozenset({"bob", "cleo"}))
    assert not federation["bob"].finished  # and nothing was summed in the meantime
    assert len(federation["bob"].journal()) == 2
