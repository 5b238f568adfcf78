"""A second optimiser does not repeat a step of the first one with other members, whenever the members change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cgd.errors import LocalProtocolError
from cgd.federation import config_edit, member
from support.in_process import InProcessFederation, new_federation
from support.withheld_keys import DISHONEST, NAMES, SAMPLES, all_in_epoch, gradient_sums, make_optimizer

if TYPE_CHECKING:
    from pathlib import Path

    from support.in_process import MemberProcess

STEPS = 2


@pytest.fixture(autouse=True)
def _watch_the_file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


@pytest.mark.parametrize("removed_before", range(1, 2 * STEPS))
def test_no_step_of_the_first_training_is_opened_again_without_a_member(tmp_path: Path, removed_before: int) -> None:
    """All programs train twice from the same origins, with the same gradients; dan is removed at some moment.

    The difference of two sums of one step would be his gradient.
    """
    sums: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def train_twice(process: MemberProcess) -> None:
        samples = SAMPLES[process.name]
        for attempt in range(2):
            parameter, optimizer = make_optimizer(process.peers, samples)
            for step in range(STEPS):
                process.at_step(attempt * STEPS + step)
                before = optimizer.displacement() if step else torch.zeros(4)
                parameter.grad = torch.full((4,), (1 + step) * samples / 8)
                optimizer.step()
                if process.name == DISHONEST:
                    opened = (before - optimizer.displacement()) / 0.5
                    sums.setdefault(step, []).append((len(process.peers), opened))

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        federation.start_all(train_twice, pause_at=removed_before)
        for process in federation:
            process.wait_for_step(removed_before)
        federation.kill("dan")
        config_edit.remove_participant(federation.path, "dan")
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        errors = federation.errors("ada", "bob")
        for openings in sums.values():
            assert len({members for members, _ in openings}) == 1, openings
        assert {type(error) for error in errors.values()} == {LocalProtocolError}
        assert len(gradient_sums(federation["ada"].journal())) == max(removed_before, STEPS)


def test_second_training_after_a_restart_of_all_is_not_opened_without_a_member_of_the_first(tmp_path: Path) -> None:
    """The first training ended without dan; the record that he took part in its first step survives the processes."""

    def train(process: MemberProcess, trainings: int) -> None:
        for attempt in range(trainings):
            parameter, optimizer = make_optimizer(process.peers, SAMPLES[process.name])
            for step in range(STEPS):
                process.at_step(attempt * STEPS + step)
                parameter.grad = torch.full((4,), SAMPLES[process.name] / 8)
                optimizer.step()

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        federation.start_all(lambda process: train(process, 1), pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        config_edit.remove_participant(federation.path, "dan")
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        federation.results()
        federation.kill(*federation.processes)
        federation.start_all(lambda process: train(process, 2))
        errors = federation.errors("ada", "bob")
        assert {type(error) for error in errors.values()} == {LocalProtocolError}
        assert len(gradient_sums(federation["ada"].journal())) == STEPS


def test_two_optimisers_that_take_turns_continue_without_a_member(tmp_path: Path) -> None:
    """Neither repeats a step of the other: both have taken as many when the members change."""

    def take_turns(process: MemberProcess) -> None:
        pairs = [make_optimizer(process.peers, SAMPLES[process.name]) for _ in range(2)]
        for step in range(3):
            process.at_step(step)
            for parameter, optimizer in pairs:
                parameter.grad = torch.full((4,), SAMPLES[process.name] / 8)
                optimizer.step()

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        federation.start_all(take_turns, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        config_edit.remove_participant(federation.path, "dan")
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        federation.results()
