"""A revealed sum is not opened again with a new key under an old name, after `recount`, or in a group that returns."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd import Cell
from cgd.errors import LocalProtocolError, RemoteProtocolError
from cgd.federation import config_edit, member
from cgd.federation.keys import Keys
from cgd.optim import sample_count
from cgd.optim.sample_count import SampleCountMismatchError
from cgd.secagg.messages import SELF_MASK_KEY_BYTES, RevealKey
from support.in_process import InProcessFederation, new_federation, participant_entry
from support.programs import idle, reveals_key
from support.withheld_keys import (
    DISHONEST,
    HONEST,
    NAMES,
    SAMPLES,
    all_in_epoch,
    gradient_sums,
    in_epoch,
    make_optimizer,
    replace_file,
    take_two_steps,
    wait_until_opened_alone,
    withhold_third_key,
    without,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cgd import Peers
    from cgd.secagg.codec import Frame
    from support.in_process import MemberProcess

GRID = tuple(f"r{row}c{column}" for row in range(3) for column in range(3))


@pytest.fixture(autouse=True)
def _watch_the_file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


def replace_key(federation: InProcessFederation, name: str) -> None:
    """Give a participant a new key: a removal and an addition, which running members see as one change."""
    folder = federation.path.parent
    for suffix in (".key", ".pub"):
        (folder / f"{name}{suffix}").unlink()
    keys = Keys.generate(name)
    keys.save(folder)
    edited = folder / "edited.toml"
    shutil.copy(federation.path, edited)
    config_edit.remove_participant(edited, name)
    config_edit.add_participant(edited, participant_entry(keys, NAMES.index(name)))
    edited.replace(federation.path)


def test_revealed_step_is_not_opened_with_a_new_key_under_an_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleo has opened a step alone. An accomplice takes the place of bob, with a gradient that cleo knows."""
    check = sample_count.check_commitment
    accomplices: set[str] = set()

    def check_unless_accomplice(peers: Peers, *arguments: Any, private: bool) -> None:
        if peers.me not in accomplices:
            check(peers, *arguments, private=private)

    def enter_zeros(process: MemberProcess) -> None:
        parameter, optimizer = make_optimizer(process.peers, SAMPLES["bob"])
        for _ in range(2):
            parameter.grad = torch.zeros(4)
            optimizer.step()

    monkeypatch.setattr(sample_count, "check_commitment", check_unless_accomplice)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        hold = withhold_third_key(federation)
        federation.start_all(take_two_steps)
        wait_until_opened_alone(federation)
        federation.kill(DISHONEST, "bob", lose_state=True)
        federation.network.release(hold)
        replace_key(federation, "bob")
        federation.wait_until(lambda: all_in_epoch(federation, 3, "ada", "dan"))
        accomplices.add("bob")
        federation.start("bob", enter_zeros)
        federation.start(DISHONEST, take_two_steps)
        errors = federation.errors("ada", "dan")
        assert [type(error) for error in errors.values()] == [LocalProtocolError] * 2
        assert "the members ada, bob, cleo, dan, and one of them has another key now" in str(errors["ada"])
        assert len(gradient_sums(federation["ada"].journal())) == 1


def test_revealed_step_is_not_opened_with_other_samples_after_recount(tmp_path: Path) -> None:
    """Cleo has opened a step alone, and makes it fail at the others. All count again, and bob has more records now."""

    def retry_after_recount(process: MemberProcess) -> None:
        peers = process.peers
        parameter, optimizer = make_optimizer(peers, SAMPLES[peers.me])
        parameter.grad = torch.full((4,), SAMPLES[peers.me] / 8)
        optimizer.step()
        process.at_step(1)
        with pytest.raises(RemoteProtocolError):
            optimizer.step()
        process.at_step(2)
        if peers.me == "bob":
            optimizer.samples = 7
            parameter.grad = torch.full((4,), 0.875)
        optimizer.recount()
        optimizer.step()

    def follow(process: MemberProcess) -> None:
        parameter, optimizer = make_optimizer(process.peers, SAMPLES[DISHONEST])
        parameter.grad = torch.full((4,), SAMPLES[DISHONEST] / 8)
        optimizer.step()  # of the journal
        optimizer.recount()
        optimizer.step()

    def send_wrong_keys(sender: str, _to: str, frame: Frame) -> Frame:
        wrong = sender == DISHONEST and isinstance(frame.message, RevealKey)
        return replace(frame, message=RevealKey(bytes(SELF_MASK_KEY_BYTES))) if wrong else frame

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        for name in NAMES:
            federation.start(name, take_two_steps if name == DISHONEST else retry_after_recount, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.network.rewrite = send_wrong_keys
        hold = federation.network.hold(DISHONEST, HONEST, reveals_key)
        for process in federation:
            process.resume(pause_at=2)
        wait_until_opened_alone(federation)
        federation.network.release(hold)
        for name in HONEST:
            federation[name].wait_for_step(2)
        federation.kill(DISHONEST, lose_state=True)
        federation.network.rewrite = lambda _sender, _to, frame: frame
        federation.start(DISHONEST, follow)
        for name in HONEST:
            federation[name].resume()
        federation.wait_until(lambda: federation["bob"].finished)
        assert isinstance(federation["bob"].error, SampleCountMismatchError)
        assert len(gradient_sums(federation["ada"].journal())) == 1


def test_pending_reveal_of_a_group_survives_a_restart_while_the_group_is_absent(tmp_path: Path) -> None:
    """The third column is removed after r0c2 has opened a sum alone: no row has three members until it returns."""

    def sum_twice_with_the_row(process: MemberProcess) -> None:
        for step in range(2):
            process.at_step(step)
            process.peers.groups["row"].sum(np.array([1.0, 2.0]))

    third_column = tuple(name for name in GRID if name.endswith("c2"))
    path = new_federation(tmp_path, GRID, [Cell(int(name[1]), int(name[3])) for name in GRID])
    text = path.read_text()
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(sum_twice_with_the_row, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.network.hold("r0c2", ("r0c0", "r0c1"), reveals_key)
        for process in federation:
            process.resume()
        federation.wait_until(lambda: len(federation["r0c2"].journal("row-0")) == 2)
        federation.kill(*third_column, lose_state=True)
        replace_file(path, without(in_epoch(text, 2), *third_column))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        federation.kill("r0c0")
        federation.start("r0c0", idle)
        assert "row-0" not in federation["r0c0"].member.runtime.membership.groups
        replace_file(path, in_epoch(text, 3))
        for name in third_column:
            federation.start(name, idle)
        federation.wait_until(lambda: all_in_epoch(federation, 3))
        membership = federation["r0c0"].member.runtime.membership
        federation.wait_until(lambda: "row-0" in membership.groups and membership.group("row-0").up_to_date)
        for restarted in (False, True):
            if restarted:
                federation["r0c0"].stop()
                federation.kill("r0c0")
                federation.start("r0c0", idle)
            journal = federation["r0c0"].journal("row-0")
            assert len(journal) == 1
            assert journal.pending_reveal is not None
            assert journal.pending_reveal.members == ("r0c0", "r0c1", "r0c2")
