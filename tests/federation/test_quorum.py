"""A federation with a quorum goes on without absent members, and they follow it; all inside this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import InputError
from cgd.federation import config_edit
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, Absence
from cgd.federation.keys import Keys
from support.in_process import FEDERATION, InProcessFederation, participant_entry
from support.programs import Training, is_weighted_ready, reveals_key

if TYPE_CHECKING:
    from pathlib import Path

    from support.in_process import MemberProcess

NAMES = ("ada", "bob", "cleo", "dan")
PATIENCE = 0.5


@pytest.fixture
def quorum_file(tmp_path: Path) -> Path:
    participants = []
    for place, name in enumerate(NAMES):
        keys = Keys.generate(name)
        keys.save(tmp_path)
        participants.append(participant_entry(keys, place))
    absence = Absence(3, 60.0, ABSENCE_REVEALS_GRADIENTS)
    config_edit.create_federation(tmp_path / "federation.toml", FEDERATION, participants, absence=absence)
    return tmp_path / "federation.toml"


class QuorumFederation(InProcessFederation):
    """Its members have less patience than a federation file permits."""

    def start(self, name: str, program: Any, **options: Any) -> MemberProcess:
        process = super().start(name, program, **options)
        process.member.runtime._silence.patience = PATIENCE
        return process

    def present(self, name: str) -> set[str]:
        return set(self[name].member.runtime.membership.present)

    def wait_until_present(self, *names: str) -> None:
        """Wait until these members are in a view without the others."""
        self.wait_until(lambda: all(self.present(name) == set(names) for name in names))


def started(federation: QuorumFederation, program: Any, step: int = 2) -> None:
    """Start all programs, up to this step of their loops."""
    federation.start_all(program, pause_at=step)
    for name in NAMES:
        federation[name].wait_for_step(step)


@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_killed_participant_is_absent_and_comes_back(loop: Any, quorum_file: Path, tmp_path: Path) -> None:
    program = Training(steps=9, loop=loop)
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program)
        federation.kill("cleo")
        for name in ("ada", "bob", "dan"):
            federation[name].resume(pause_at=7)
        for name in ("ada", "bob", "dan"):
            federation[name].wait_for_step(7)
        assert federation.present("ada") == {"ada", "bob", "dan"}
        federation.start("cleo", program)
        federation.wait_until_present(*NAMES)
        for name in ("ada", "bob", "dan"):
            federation[name].resume()
        assert len(set(federation.results().values())) == 1


def test_delay_is_refused(quorum_file: Path, tmp_path: Path) -> None:
    """Steps with the gradients of one model must not be summed with and without a member."""
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        federation.start_all(Training(steps=3, delay=1))
        for error in federation.errors().values():
            assert isinstance(error, InputError)
            assert "delay is 1, and the federation has a quorum of 3" in str(error)


@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_participant_that_was_cut_off_follows_without_a_restart(loop: Any, quorum_file: Path, tmp_path: Path) -> None:
    program = Training(steps=9, loop=loop)
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program)
        cleo = federation["cleo"]
        federation.network.cut({"cleo"}, {"ada", "bob", "dan"})
        for name in NAMES:
            federation[name].resume(pause_at=7)
        for name in ("ada", "bob", "dan"):
            federation[name].wait_for_step(7)
        assert cleo.step <= 3
        federation.network.heal()
        federation.wait_until_present(*NAMES)
        for name in NAMES:
            federation[name].resume()
        assert len(set(federation.results().values())) == 1
        assert federation["cleo"] is cleo


def test_loop_over_steps_jumps_over_those_that_others_took(quorum_file: Path, tmp_path: Path) -> None:
    """It does not compute the gradients of all steps that it has missed, for which the others would wait."""
    seen: list[int] = []

    @dataclass(frozen=True)
    class Recorded(Training):
        def __call__(self, process: MemberProcess) -> str:
            at_step = process.at_step

            def record(step: int) -> None:
                if process.name == "cleo":
                    seen.append(step)
                at_step(step)

            process.at_step = record  # type: ignore[method-assign]
            return super().__call__(process)

    program = Recorded(steps=12, loop="steps")
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program)
        federation.network.cut({"cleo"}, {"ada", "bob", "dan"})
        for name in NAMES:
            federation[name].resume(pause_at=10)
        for name in ("ada", "bob", "dan"):
            federation[name].wait_for_step(10)
        federation.network.heal()
        for name in NAMES:
            federation[name].resume()
        assert len(set(federation.results().values())) == 1
    assert seen[:3] == [0, 1, 2]
    assert seen[3] >= 9


def test_sum_that_was_being_opened_is_completed(quorum_file: Path, tmp_path: Path) -> None:
    """Dan has confirmed the gradient sum of a step and has all other keys, but nobody receives his: he is killed."""
    program = Training(steps=6)
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program)
        held = federation.network.hold("dan", {"ada", "bob", "cleo"}, reveals_key)
        for name in NAMES:
            federation[name].resume()
        federation.wait_until(lambda: held.reached == {"ada", "bob", "cleo"})
        federation.wait_until(lambda: federation["dan"].journal().entries[-1].step is not None)
        opened = federation["dan"].journal().head
        federation.kill("dan")
        federation.wait_until(lambda: opened in federation["ada"].journal().heads)
        federation.start("dan", program)
        assert len(set(federation.results().values())) == 1


def test_sum_without_weights_is_repeated_by_those_present(quorum_file: Path, tmp_path: Path) -> None:
    totals: dict[str, list[float]] = {}

    def program(process: MemberProcess) -> None:
        for number in range(3):
            process.at_step(number)
            total = process.peers.sum(np.array([1.5]))
            totals.setdefault(process.name, []).append(float(total[0]))

    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program, step=1)
        federation.network.cut({"cleo"}, {"ada", "bob", "dan"})
        for name in NAMES:
            federation[name].resume(pause_at=2)
        for name in ("ada", "bob", "dan"):
            federation[name].wait_for_step(2)
        federation.network.heal()
        federation.wait_until_present(*NAMES)
        for name in NAMES:
            federation[name].resume()
        federation.results()
    assert totals == {name: [6.0, 4.5, 6.0] for name in NAMES}


def test_participant_that_only_computes_is_waited_for(quorum_file: Path, tmp_path: Path) -> None:
    program = Training(steps=3)
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, program, step=1)
        held = federation.network.hold("ada", {"bob"}, is_weighted_ready)
        for name in ("ada", "bob", "dan"):
            federation[name].resume()
        federation.wait_until(lambda: held.reached)
        federation.wait_until(lambda: federation["dan"].is_waiting_for("Ready", "cleo"))
        silence = federation["dan"].member.runtime._silence
        silence.patience = 0.0001  # whoever was silent for any time would be absent now
        before = silence._last
        federation.wait_until(lambda: silence._last > before + PATIENCE)
        assert federation.present("dan") == set(NAMES)
        federation.network.release(held)
        federation["cleo"].resume()
        assert len(set(federation.results().values())) == 1


def test_log_names_who_is_absent_and_who_is_back(
    quorum_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cgd.transport")
    with QuorumFederation(quorum_file, tmp_path / "state") as federation:
        started(federation, Training(steps=5))
        federation.network.cut({"cleo"}, {"ada", "bob", "dan"})
        federation.wait_until_present("ada", "bob", "dan")
        federation.network.heal()
        federation.wait_until_present(*NAMES)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("continuing without cleo (silent for ") for line in lines)
    assert any(line.endswith("; 3 of 4 members") for line in lines)
    assert "cleo is back; 4 of 4 members" in lines
