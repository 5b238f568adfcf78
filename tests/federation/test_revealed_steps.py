"""A step of an optimiser is opened once: a dishonest member cannot have it opened again with other members or data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd import Cell
from cgd.errors import CGDError, LocalProtocolError, WeightError
from cgd.federation import config_edit, member
from cgd.federation.state import StateFolder
from cgd.optim.sample_count import SampleCountMismatchError
from cgd.secagg.journal import Journal
from cgd.secagg.messages import Ready
from cgd.transport import runtime
from support.in_process import InProcessFederation, new_federation
from support.programs import GRID
from support.withheld_keys import (
    DISHONEST,
    HONEST,
    NAMES,
    SAMPLES,
    gradient_sums,
    make_optimizer,
    take_two_steps,
    train,
    wait_until_opened_alone,
    withhold_third_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.secagg.messages import Buffer
    from support.in_process import MemberProcess


@pytest.fixture(autouse=True)
def _watch_the_file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


def begin_epoch_2_with_the_same_members(path: Path) -> None:
    text = path.read_text()
    assert "epoch = 1" in text
    path.write_text(text.replace("epoch = 1", "epoch = 2").replace("127.0.0.1:7003", "127.0.0.1:7103"))


def open_second_step_alone(federation: InProcessFederation) -> None:
    """Let the dishonest member alone open the second step, deny it, and lose its state; then begin a new epoch."""
    hold = withhold_third_key(federation)
    federation.start_all(take_two_steps, pause_at=2)
    wait_until_opened_alone(federation)
    federation.kill(DISHONEST, lose_state=True)
    federation.network.release(hold)
    begin_epoch_2_with_the_same_members(federation.path)


def test_revealed_step_is_not_opened_without_a_member_after_a_new_count(tmp_path: Path) -> None:
    """In a new epoch the samples are counted again, in the place of the revealed sum; its record must survive that."""
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        open_second_step_alone(federation)
        federation.wait_until(lambda: all(federation[name].member.federation.epoch == 2 for name in HONEST))
        federation.network.hold(DISHONEST, HONEST, lambda m: isinstance(m, Ready) and m.spec.weighted)
        federation.start(DISHONEST, take_two_steps, pause_at=2)
        federation.wait_until(lambda: all(len(federation[name].journal()) == 3 for name in HONEST))  # the new count
        federation.kill(DISHONEST, "dan")
        config_edit.remove_participant(federation.path, "dan")
        federation.start(DISHONEST, take_two_steps, pause_at=2)
        federation.wait_until(
            lambda: all(isinstance(federation[each].error, LocalProtocolError) for each in HONEST[:2])
        )
        assert "may have been revealed with the members ada, bob, cleo, dan" in str(federation["ada"].error)
        assert len(gradient_sums(federation["ada"].journal())) == 1


def test_revealed_step_is_finished_with_the_same_members_after_a_new_count(tmp_path: Path) -> None:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        open_second_step_alone(federation)
        federation.start(DISHONEST, take_two_steps)
        for name in HONEST:
            federation[name].resume()
        federation.wait_until(lambda: all(each.finished for each in federation))
        assert [each.error for each in federation] == [None] * 4


def test_record_that_could_not_be_written_is_saved_with_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the key is revealed, and no further sum is finished."""
    append = StateFolder.append

    def append_unless_a_mark(self: StateFolder, group: str, place: int, entry: Sequence[Buffer]) -> bool:
        return b'"mark"' not in bytes(entry[1]) and append(self, group, place, entry)

    def saved(name: str) -> Journal:
        (snapshot,) = federation.folder(name).glob("*.ledger")
        return Journal.from_bytes(snapshot.read_bytes())

    monkeypatch.setattr(StateFolder, "append", append_unless_a_mark)
    monkeypatch.setattr(runtime, "SAVE_SECONDS", 0.05)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        withhold_third_key(federation)
        federation.start_all(take_two_steps, pause_at=1)
        federation.wait_until(lambda: all(list(federation.folder(name).glob("*.ledger")) for name in HONEST))
        federation.wait_until(lambda: all(len(saved(name)) == 2 for name in HONEST))  # the count and the first step
        for process in federation:
            process.resume()
        federation.wait_until(lambda: len(federation[DISHONEST].journal()) == 3)
        federation.wait_until(lambda: all(saved(name).revealed_steps[0].number == 1 for name in HONEST))
        assert all(len(saved(name)) == 2 for name in HONEST)


def test_member_with_other_samples_is_stopped_before_a_revealed_step(tmp_path: Path) -> None:
    """It was removed and added again, which the others saw as one new epoch with the same members."""

    def with_other_samples(process: MemberProcess) -> None:
        train(process, 2, {**SAMPLES, "bob": 7})

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        open_second_step_alone(federation)
        federation.kill("bob", lose_state=True)
        federation.start(DISHONEST, take_two_steps)
        federation.start("bob", with_other_samples)
        federation.wait_until(lambda: federation["bob"].error is not None)
        assert isinstance(federation["bob"].error, SampleCountMismatchError)
        assert len(gradient_sums(federation["ada"].journal())) == 1


def test_step_with_wrong_weights_is_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong weight makes all programs discard an opened step; they try again while a member is removed."""

    def retry_after_wrong_weights(process: MemberProcess) -> None:
        peers = process.peers
        parameter, optimizer = make_optimizer(peers, SAMPLES[peers.me])
        parameter.grad = torch.full((4,), SAMPLES[peers.me] / 8)
        with pytest.raises(WeightError):
            optimizer.step()
        optimizer.recount()
        process.at_step(1)
        optimizer.step()

    plain_sum = cgd.Peers.sum
    lies: list[float] = []

    def lying_sum(self: cgd.Peers, values: Any, weight: float | None = None, **options: Any) -> Any:
        if self.me == DISHONEST and weight is not None and not lies:
            lies.append(weight)
            weight /= 2
        return plain_sum(self, values, weight=weight, **options)

    monkeypatch.setattr(cgd.Peers, "sum", lying_sum)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        federation.start_all(retry_after_wrong_weights, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        config_edit.remove_participant(federation.path, "dan")
        federation.wait_until(lambda: all(each.member.federation.epoch == 2 for each in federation))
        for process in federation:
            process.resume()
        federation.wait_until(lambda: all(each.error is not None for each in federation))
        assert isinstance(federation["ada"].error, LocalProtocolError)
        assert "step 0 were summed before" in str(federation["ada"].error)
        assert len(gradient_sums(federation["ada"].journal())) == 1


def test_column_sum_is_not_opened_again_if_the_next_sum_fails(tmp_path: Path) -> None:
    """r2c0 enters NaN into the sum of everyone, after the columns were opened; all programs try again."""
    displacements = {}

    def retry(process: MemberProcess) -> None:
        peers = process.peers
        first, rest = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        groups: list[dict[str, Any]] = [{"params": [first], "peers": peers.groups["column"]}, {"params": [rest]}]
        optimizer = cgd.ConfinedSGD(groups, lr=0.5, peers=peers, samples=2)
        batches = {"r0c0": (0.5, 0.75)}.get(peers.me, (0.25, 0.25))  # r0c0 has another batch in its second attempt
        first.grad, rest.grad = torch.full((2,), batches[0]), torch.zeros(2)
        if peers.me == "r2c0":
            rest.grad = torch.full((2,), float("nan"))
        with pytest.raises(CGDError):
            optimizer.step()
        first.grad, rest.grad = torch.full((2,), batches[1]), torch.zeros(2)
        optimizer.step()
        displacements[peers.me] = optimizer.displacement()

    cells = [Cell(int(name[1]), int(name[3])) for name in GRID]
    with InProcessFederation(new_federation(tmp_path, GRID, cells), tmp_path / "state") as federation:
        federation.start_all(retry)
        federation.wait_until(lambda: all(each.finished for each in federation))
        assert [each.error for each in federation] == [None] * len(GRID)
        assert len(gradient_sums(federation["r1c0"].journal("column-0"))) == 1
    column = [displacements[name] for name in GRID if name.endswith("c0")]
    assert all(torch.equal(each, column[0]) for each in column)
    assert column[0][0].item() == pytest.approx(-0.5 * (0.5 + 0.25 + 0.25) / 3, abs=1e-6)  # the first batch
