"""Honest members join, get a new key, restart, leave or are interrupted at bad moments, and the others continue."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cgd
from cgd import Cell
from cgd.errors import MembershipError
from cgd.federation import config_edit, member
from cgd.federation.keys import Keys
from cgd.secagg.messages import JournalPosition
from cgd.transport.group_driver import GroupDriver
from support.in_process import DEADLINE_SECONDS, InProcessFederation, new_federation, participant_entry
from support.programs import is_weighted_ready
from support.withheld_keys import (
    NAMES,
    SAMPLES,
    all_in_epoch,
    in_epoch,
    make_optimizer,
    replace_file,
    take_two_steps,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from cgd.secagg.messages import Message
    from cgd.transport.tap import Addend
    from support.in_memory_network import HeldFrames
    from support.in_process import MemberProcess


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessFederation]:
    """Ada, bob, cleo and dan, whose file is checked every 20 ms."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def new_grid(folder: Path, rows: int, columns: int) -> Path:
    cells = [Cell(row, column) for row in range(rows) for column in range(columns)]
    return new_federation(folder, [f"r{cell.row}c{cell.column}" for cell in cells], cells)


def reports_position(message: Message) -> bool:
    return isinstance(message, JournalPosition)


# Late joiners: they replay sums in which they took no part.


@pytest.mark.parametrize("steps_before", [0, 1])
def test_member_joins_between_a_count_and_the_gradient_sum_after_it(
    federation: InProcessFederation, steps_before: int
) -> None:
    """The others have counted their samples without dan, and wait for cleo."""
    text = federation.path.read_text()
    if steps_before == 0:
        replace_file(federation.path, without(text, "dan"))
    federation.start_all(take_two_steps, pause_at=steps_before)
    for process in federation:
        process.wait_for_step(steps_before)
    if steps_before == 1:
        federation.kill("dan", lose_state=True)
        replace_file(federation.path, without(in_epoch(text, 2), "dan"))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
    counted = len(federation["ada"].journal()) + 1
    hold = federation.network.hold("cleo", ("ada", "bob"), is_weighted_ready)
    for process in federation:
        process.resume()
    federation.wait_until(lambda: hold.reached == {"ada", "bob"})
    federation.wait_until(lambda: all(len(federation[name].journal()) == counted for name in NAMES[:3]))
    replace_file(federation.path, in_epoch(text, 3))
    federation.wait_until(lambda: all_in_epoch(federation, 3))
    federation.network.release(hold)
    federation.start("dan", take_two_steps)
    federation.results()
    assert [entry.addends for entry in federation["dan"].journal().entries[counted:][:2]] == [4, 4]


@pytest.mark.parametrize("samples_of_new_row", [2, 100])
def test_row_joins_between_the_sums_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples_of_new_row: int
) -> None:
    """The columns have opened their part of a step, and the sum of everyone waits for r2c1."""

    def train(process: MemberProcess) -> None:
        peers = process.peers
        first, rest = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": peers.groups["column"]}, {"params": [rest]}]
        samples = samples_of_new_row if process.name.startswith("r3") else 2
        optimizer = cgd.ConfinedSGD(groups, lr=0.5, peers=peers, samples=samples)
        for step in range(3):
            process.at_step(step)
            first.grad, rest.grad = torch.full((2,), 0.25), torch.full((2,), 0.125)
            optimizer.step()

    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    path = new_grid(tmp_path, 4, 2)
    text = path.read_text()
    replace_file(path, without(text, "r3c0", "r3c1"))
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(train, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        names = federation.names
        made = {name: len(federation[name].journal(f"column-{name[3]}")) for name in names}
        other_column = [name for name in names if name.endswith("c0")]  # r2c1 sends them nothing in its column's sum
        hold = federation.network.hold("r2c1", other_column, is_weighted_ready)
        for process in federation:
            process.resume()
        federation.wait_until(lambda: hold.reached == set(other_column))
        federation.wait_until(
            lambda: all(len(federation[name].journal(f"column-{name[3]}")) == made[name] + 1 for name in names)
        )
        replace_file(path, in_epoch(text, 2))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        federation.network.release(hold)
        for name in ("r3c0", "r3c1"):
            federation.start(name, train)
        federation.results()


def test_participant_with_a_new_key_joins_again(federation: InProcessFederation) -> None:
    federation.start_all(take_two_steps, pause_at=1)
    for process in federation:
        process.wait_for_step(1)
    federation.kill("bob", lose_state=True)
    folder = federation.path.parent
    config_edit.remove_participant(federation.path, "bob")
    for suffix in (".key", ".pub"):
        (folder / f"bob{suffix}").unlink()
    keys = Keys.generate("bob")
    keys.save(folder)
    config_edit.add_participant(federation.path, participant_entry(keys, 1))
    federation.wait_until(lambda: all_in_epoch(federation, 3))
    federation.start("bob", take_two_steps)
    for process in federation:
        process.resume()
    federation.results()


# A member restarts while another one restarts.


def test_member_restarts_while_another_one_restarts(federation: InProcessFederation) -> None:
    """Ada has replayed the count and takes its first step, when the report of bob's new process is missing."""

    def train(process: MemberProcess) -> None:
        parameter, optimizer = make_optimizer(process.peers, SAMPLES[process.name])
        for step in optimizer.steps(2):
            process.at_step(step)
            parameter.grad = torch.full((4,), SAMPLES[process.name] / 8)
            optimizer.step()

    before = federation.network.hold("dan", NAMES[:3], is_weighted_ready)
    federation.start_all(train)
    federation.wait_until(lambda: before.reached == set(NAMES[:3]) and len(federation["ada"].journal()) == 1)
    federation.kill("ada")
    federation.network.release(before)
    ada = federation.start("ada", train, pause_at=0)
    ada.wait_for_step(0)
    federation.kill("bob")
    hold = federation.network.hold("bob", ("ada",), reports_position)
    federation.start("bob", train)
    federation.wait_until(lambda: ada.is_waiting_for("its report", "bob"))
    release_while_waiting(federation, ada, hold, ada.resume)
    federation.results()


def test_member_takes_a_step_while_another_one_restarts(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleo is restarted, and does not report, when ada knows its next sum and asks whether it may be revealed."""
    next_round = GroupDriver.next_round
    between, go_on = threading.Event(), threading.Event()

    def stop_after_next_round(self: GroupDriver) -> tuple[int, int]:
        result = next_round(self)
        if self.me == "ada" and not between.is_set():
            between.set()
            go_on.wait(DEADLINE_SECONDS)
        return result

    federation.start_all(take_two_steps, pause_at=1)
    for process in federation:
        process.wait_for_step(1)
    monkeypatch.setattr(GroupDriver, "next_round", stop_after_next_round)
    for process in federation:
        process.resume()
    assert between.wait(DEADLINE_SECONDS)
    federation.kill("cleo")
    hold = federation.network.hold("cleo", ("ada",), reports_position)
    federation.start("cleo", take_two_steps)
    federation.wait_until(lambda: federation["ada"].is_waiting_for("its report", "cleo"))
    release_while_waiting(federation, federation["ada"], hold, go_on.set)
    federation.results()


def release_while_waiting(
    federation: InProcessFederation, process: MemberProcess, hold: HeldFrames, go_on: Callable[[], None]
) -> None:
    """Let a program go on; release the frames when it waits for something, or has ended."""
    runtime = process.member.runtime
    before = runtime._wait_condition
    go_on()
    federation.wait_until(lambda: runtime._wait_condition is not before or process.finished)
    federation.network.release(hold)


# A group disappears, or a program is interrupted.


@pytest.mark.parametrize("waiting", [False, True])
def test_row_disappears_while_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: bool) -> None:
    """The third column is removed, so no row has three members; the programs sum with their rows."""

    def sum_with_the_row(process: MemberProcess) -> None:
        row = process.peers.groups["row"]
        for step in range(2):
            process.at_step(step)
            row.sum(np.array([1.0, 2.0]))

    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    path = new_grid(tmp_path, 3, 3)
    removed = ("r0c2", "r1c2", "r2c2")
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(sum_with_the_row, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill(*removed)
        if waiting:
            for process in federation:
                process.resume()
            federation.wait_until(
                lambda: all(each.waiting_for(f"row-{each.name[1]}")[0] == "Ready" for each in federation)
            )
        replace_file(path, without(in_epoch(path.read_text(), 2), *removed))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        errors = federation.errors()
        assert {type(error) for error in errors.values()} == {MembershipError}
        assert str(errors["r1c0"]).startswith("there is no group row-1 in epoch 2: members were removed")


def test_row_disappears_while_a_program_waits_for_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's condition fails in the runtime's thread, too, which must go on."""

    def sum_with_the_row(process: MemberProcess) -> None:
        for step in range(2):
            process.at_step(step)
            process.peers.groups["row"].sum(np.array([1.0, 2.0]))

    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    path = new_grid(tmp_path, 3, 3)
    removed = ("r0c2", "r1c2", "r2c2")
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(sum_with_the_row, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill(*removed)
        others = [process.name for process in federation]
        federation.network.hold("r0c2", others, lambda m: isinstance(m, JournalPosition))
        for name in removed:
            federation.start(name, sum_with_the_row)
        federation.wait_until(lambda: federation["r0c0"].is_waiting_for("its report", "r0c2"))
        runtime = federation["r0c0"].member.runtime
        before = runtime._wait_condition
        federation["r0c0"].resume()
        federation.wait_until(lambda: runtime._wait_condition is not before)
        federation.kill(*removed)
        replace_file(path, without(in_epoch(path.read_text(), 2), *removed))
        federation.wait_until(lambda: federation["r0c0"].finished)
        assert isinstance(federation["r0c0"].error, MembershipError)
        received = runtime.traffic.frames_received
        federation.kill("r1c0")
        federation.start("r1c0", sum_with_the_row)
        federation.wait_until(lambda: runtime.traffic.frames_received > received)  # the thread goes on
        assert runtime._failure is None


def test_step_is_repeated_after_an_interrupt_behind_its_sum(federation: InProcessFederation) -> None:
    """As in a notebook: Ctrl-C reaches ada when it has the total, and the cell is run again."""

    class InterruptingObserver:
        sums = 0

        def before_sum(self, addend: Addend) -> None:
            """Do nothing."""

        def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
            self.sums += 1
            if self.sums == 2:  # after the count: the first gradient sum
                raise KeyboardInterrupt

    def train(process: MemberProcess) -> torch.Tensor:
        peers = process.peers
        parameter, optimizer = make_optimizer(peers, SAMPLES[peers.me])
        if peers.me == "ada":
            peers.observer = InterruptingObserver()
        for step in range(2):
            parameter.grad = torch.full((4,), SAMPLES[peers.me] / 8)
            if peers.me == "ada" and step == 0:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            optimizer.step()
        return optimizer.displacement()

    federation.start_all(train)
    results = federation.results()
    assert all(torch.equal(each, results["bob"]) for each in results.values())
    assert len(federation["ada"].journal()) == 3  # the count and two steps
