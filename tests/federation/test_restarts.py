"""Restarted participants: with other samples, in loops over `optimizer.steps`, and as second processes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd import ConfinedSGD, local_peers
from cgd.errors import (
    InputError,
)
from cgd.secagg.messages import JournalChunk, Ready
from support.in_process import (
    InProcessFederation,
    MemberProcess,
)
from support.programs import (
    COLUMN,
    EVERYONE,
    GRID,
    NAMES,
    Training,
    is_weighted_ready,
    reveals_key,
    stays,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cgd import Peers


pytestmark = pytest.mark.slow


# Restarts with other samples.


def restart_with_more_samples(federation: InProcessFederation, moment: str, lose_state: bool) -> BaseException | None:
    """Kill cleo and restart it with another number of samples than was counted; return its program's exception."""
    if moment == "before the first weighted sum":
        hold = federation.network.hold("ada", {"cleo"}, is_weighted_ready)
        federation.start_all(Training())
        federation.wait_until(lambda: hold.reached and len(federation["cleo"].journal()) == 1)
        federation.kill("cleo", lose_state=lose_state)
        federation.network.release(hold)
    else:
        for name in NAMES:
            federation.start(name, Training(), pause_at=3 if name == "cleo" else None)
        federation["cleo"].wait_for_step(3)
        federation.kill("cleo", lose_state=lose_state)
    federation.start("cleo", Training(extra_samples=1))
    return federation.errors("cleo")["cleo"]


moments = pytest.mark.parametrize("moment", ["before the first weighted sum", "in mid-training"])
states = pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])


@moments
@states
def test_restart_with_other_samples_is_rejected_before_anything_is_shared(
    federation: InProcessFederation, moment: str, lose_state: bool
) -> None:
    error = restart_with_more_samples(federation, moment, lose_state)
    assert isinstance(error, InputError), error
    assert "samples is 10, and cleo was counted with another number" in str(error)
    assert Ready not in federation["cleo"].connection.sent


@moments
@states
def test_peers_wait_for_a_restart_with_the_original_samples(
    federation: InProcessFederation, uninterrupted: dict[str, str], moment: str, lose_state: bool
) -> None:
    restart_with_more_samples(federation, moment, lose_state)
    assert stays(lambda: not federation["ada"].finished and not federation["bob"].finished), federation.errors(
        "ada", "bob"
    )
    federation["cleo"].stop()
    federation.start("cleo", Training())
    assert federation.results() == uninterrupted


def test_grid_waits_for_a_restart_with_the_original_samples(
    grid: InProcessFederation, uninterrupted_grid: dict[str, str]
) -> None:
    for name in GRID:
        grid.start(name, Training(), pause_at=3 if name == "r0c0" else None)
    grid["r0c0"].wait_for_step(3)
    grid.kill("r0c0", lose_state=True)
    grid.start("r0c0", Training(extra_samples=1))
    assert isinstance(grid.errors("r0c0")["r0c0"], InputError)
    others = GRID[1:]
    assert stays(lambda: not any(grid[name].finished for name in others)), grid.errors(*others)
    grid["r0c0"].stop()
    grid.start("r0c0", Training())
    assert grid.results() == uninterrupted_grid


def test_samples_may_change_before_they_are_counted(federation: InProcessFederation) -> None:
    """A count that no member has opened is repeated."""
    hold = federation.network.hold("cleo", {"ada", "bob"}, reveals_key)
    federation.start_all(Training(), pause_at=1)
    federation.wait_until(lambda: hold.reached == {"ada", "bob"})
    federation.kill("cleo", lose_state=True)
    federation.start("cleo", Training(extra_samples=1), pause_at=1)
    for process in federation:
        process.wait_for_step(1)
        assert len(process.journal()) == 2


# Loops over `optimizer.steps`.


def test_steps_after_a_checkpoint_or_a_second_loop_are_taken_once() -> None:
    """Inside one process, without journals."""

    def train(peers: Peers) -> list[Any]:
        def fresh() -> tuple[torch.nn.Parameter, ConfinedSGD]:
            parameter = torch.nn.Parameter(torch.zeros(1))
            return parameter, ConfinedSGD([parameter], lr=0.25, peers=peers, samples=1)

        def descend(parameter: torch.nn.Parameter, optimizer: ConfinedSGD, count: int) -> list[int]:
            taken = []
            for step in optimizer.steps(count):
                parameter.grad = torch.ones(1)
                optimizer.step()
                taken.append(step)
            return taken

        parameter, optimizer = fresh()
        before = descend(parameter, optimizer, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        again = descend(parameter, optimizer, 5)
        other, resumed = fresh()
        resumed.load_state_dict(saved)
        return [before, again, descend(other, resumed, 5), parameter.item(), other.item()]

    with local_peers(3) as peers:
        for outcome in peers.run(train):
            assert outcome == [[0, 1, 2], [3, 4], [3, 4], -1.25, -1.25]


def test_steps_start_after_all_groups_have_recovered(grid_file: Path, tmp_path: Path) -> None:
    """A sum over the column that the optimiser does not make belongs to the present step of the loop."""

    def program(process: MemberProcess) -> list[tuple[int, int]]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=0.5, peers=process.peers, samples=1)
        sums = []
        for step in optimizer.steps(6):
            process.at_step(step)
            sums.append((step, int(process.peers.groups["column"].sum(np.array(step)))))
            parameter.grad = torch.ones(1)
            optimizer.step()
        return sums

    with InProcessFederation(grid_file, tmp_path) as federation:
        federation.start_all(program, pause_at=4)
        for process in federation:
            process.wait_for_step(4)
        federation.kill("r0c0", lose_state=True)
        late = [
            federation.network.hold(
                peer, {"r0c0"}, lambda message: isinstance(message, JournalChunk) and "col" in message.group
            )
            for peer in COLUMN[1:]
        ]
        back = federation.start("r0c0", program)
        federation.wait_until(lambda: any(hold.reached for hold in late))
        with back.member.runtime.locked() as membership:
            groups = membership.group(EVERYONE), membership.group("column-0")
        federation.wait_until(lambda: groups[0].up_to_date)
        assert stays(lambda: back.step < 0 and not groups[1].up_to_date)
        for hold in late:
            federation.network.release(hold)
        for process in federation:
            process.resume()
        results = federation.results()
    assert results["r0c0"] == [(step, 3 * step) for step in range(3, 6)]
    assert results["r1c0"] == [(step, 3 * step) for step in range(6)]


# Second processes with the same key.


def test_second_process_cannot_use_the_state_folder_of_the_first(
    federation: InProcessFederation, uninterrupted: dict[str, str]
) -> None:
    federation.start_all(Training(), pause_at=2)
    federation["cleo"].wait_for_step(2)
    with pytest.raises(InputError, match="is in use: this participant is already running"):
        federation.start("cleo", Training())
    federation.kill("cleo")
    federation.start("cleo", Training())
    for process in federation:
        process.resume()
    assert federation.results() == uninterrupted


def test_superseded_process_does_not_disturb_the_others(
    federation: InProcessFederation, uninterrupted: dict[str, str], tmp_path: Path
) -> None:
    """The first is cut off by a second, which is killed; the first reconnects, and a third finishes the run."""
    for name in NAMES:
        federation.start(name, Training(), pause_at=2 if name == "cleo" else None)
    first = federation["cleo"]
    first.wait_for_step(2)
    second = federation.start("cleo", Training(), pause_at=5, state=tmp_path / "elsewhere")
    second.wait_for_step(5)
    federation.kill("cleo")
    federation.network.connected["cleo"] = first.connection
    first.resume()
    federation.wait_until(lambda: first.connection.sent[Ready] == 2 * (3 + 1))
    assert stays(lambda: not first.finished and not federation["ada"].finished)
    first.disconnect()
    first.finish_kill()
    federation.start("cleo", Training())
    assert federation.results() == uninterrupted
