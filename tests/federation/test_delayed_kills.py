"""Participants of a training with a delay that are killed, or removed, while sums are in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import LocalProtocolError
from cgd.federation import member
from support.in_process import InProcessFederation, new_federation, uninterrupted_results
from support.mode_programs import DELAYED, ModeTraining
from support.programs import Training, is_weighted_ready
from support.withheld_keys import all_in_epoch, in_epoch, replace_file, without

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from cgd.transport.tap import Addend
    from support.in_process import MemberProcess

CASES = [("delay 2", 6, False, "plain"), ("delay 2", 9, True, "steps"), ("delay 2", 7, False, "steps")]
CASES += [(mode, 7 + number % 3, bool(number % 2), "plain") for number, mode in enumerate(DELAYED)]


@dataclass
class Recording:
    """Wraps a program, and records what its member enters in the sum of each step, in all of its processes."""

    program: Callable[[MemberProcess], Any]
    entered: dict[int, set[bytes]] = field(default_factory=dict)

    def __call__(self, process: MemberProcess) -> Any:
        process.peers.observer = self
        return self.program(process)

    def before_sum(self, addend: Addend) -> None:
        if addend.step is not None and addend.weight is not None:
            self.entered.setdefault(addend.step.number, set()).add(addend.values.tobytes())

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        pass


@pytest.mark.parametrize(("mode", "moment", "lose_state", "loop"), CASES)
def test_killed_participant_ends_with_the_same_bits(
    mode: str, moment: int, lose_state: bool, loop: Any, federation_file: Path, tmp_path: Path
) -> None:
    """Killed twice, when sums of earlier steps are in progress; no step is entered with two gradients."""
    program = ModeTraining(mode, loop)
    expected = uninterrupted_results(federation_file, tmp_path / "uninterrupted", program)
    assert len(set(expected.values())) == 1
    cleo = Recording(program)
    with InProcessFederation(federation_file, tmp_path / "state") as federation:
        for name in federation.names:
            federation.start(name, cleo if name == "cleo" else program, pause_at=moment if name == "cleo" else None)
        federation["cleo"].wait_for_step(moment)
        federation.kill("cleo", lose_state=lose_state)
        federation.start("cleo", cleo, pause_at=moment + 2).wait_for_step(moment + 2)
        federation.kill("cleo", lose_state=lose_state)
        federation.start("cleo", cleo)
        assert federation.results() == expected
    assert {len(values) for values in cleo.entered.values()} == {1}
    assert sorted(cleo.entered) == list(range(6))


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_member_that_was_killed_in_a_sum_enters_the_same_gradient_again(
    delay: int, loop: Any, federation_file: Path, tmp_path: Path
) -> None:
    """Cleo has all of bob's part of a sum, and bob nothing of cleo's; the program makes other sums, too."""
    program = Training(steps=7, delay=delay, loop=loop)
    expected = uninterrupted_results(federation_file, tmp_path / "uninterrupted", program)
    bob = Recording(program)
    with InProcessFederation(federation_file, tmp_path / "state") as federation:
        for name in federation.names:
            federation.start(name, bob if name == "bob" else program, pause_at=3)
        for process in federation:
            process.wait_for_step(3)
        hold = federation.network.hold("cleo", ("ada", "bob"), is_weighted_ready)
        for process in federation:
            process.resume()
        federation.wait_until(lambda: hold.reached == {"ada", "bob"})
        federation["ada"].wait_for_step(min(3 + delay, 5))  # the loss is summed after step 5
        federation.kill("ada", "bob")
        federation.network.release(hold)
        federation.start("ada", program)
        federation.start("bob", bob)
        assert federation.results() == expected
    assert {len(values) for values in bob.entered.values()} == {1}


def test_member_that_was_killed_in_a_sum_in_16_bits_enters_the_same_elements_again(tmp_path: Path) -> None:
    """With another rounding, the totals of the two attempts would differ, and so would the bits at the end."""
    path = new_federation(tmp_path, ("ada", "bob", "cleo"))
    text = path.read_text()
    path.write_text(text.replace("ring_bits = 32", "ring_bits = 16"))
    assert path.read_text() != text
    program = Training(steps=6)
    expected = uninterrupted_results(path, tmp_path / "uninterrupted", program)
    with InProcessFederation(path, tmp_path / "state") as federation:
        for name in federation.names:
            federation.start(name, program, pause_at=3)
        for process in federation:
            process.wait_for_step(3)
        hold = federation.network.hold("cleo", ("ada", "bob"), is_weighted_ready)
        for process in federation:
            process.resume()
        federation.wait_until(lambda: hold.reached == {"ada", "bob"})
        federation.kill("ada", "bob")
        federation.network.release(hold)
        federation.start("ada", program)
        federation.start("bob", program)
        assert federation.results() == expected


def test_all_participants_are_killed_at_once(federation_file: Path, tmp_path: Path) -> None:
    program = Training(steps=7, delay=2)
    expected = uninterrupted_results(federation_file, tmp_path / "uninterrupted", program)
    with InProcessFederation(federation_file, tmp_path / "state") as federation:
        for name in federation.names:
            federation.start(name, program, pause_at={"ada": 5, "bob": 4, "cleo": 4}[name])
        federation["ada"].wait_for_step(5)
        federation.kill(*federation.names)
        for name in federation.names:
            federation.start(name, program)
        assert federation.results() == expected


def test_first_steps_are_not_summed_with_and_without_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps with a delay have the gradients of one model: a sum without dan would disclose its gradient."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    path = new_federation(tmp_path, ("ada", "bob", "cleo", "dan"))
    with InProcessFederation(path, tmp_path / "state") as federation:
        program = Training(steps=5, delay=2)
        federation.start_all(program, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        replace_file(path, without(in_epoch(path.read_text(), 2), "dan"))
        rest = ("ada", "bob", "cleo")
        federation.wait_until(lambda: all_in_epoch(federation, 2, *rest))
        for name in rest:
            federation[name].resume()
        for error in federation.errors(*rest).values():
            assert isinstance(error, LocalProtocolError), error
            assert "the difference of the two sums would disclose a member's gradient" in str(error)
        assert {len(federation[name].journal()) for name in rest} == {2}  # the count, and the first step


def test_members_may_change_between_steps_of_different_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    path = new_federation(tmp_path, ("ada", "bob", "cleo", "dan"))
    with InProcessFederation(path, tmp_path / "state") as federation:
        program = Training(steps=8, delay=2)
        federation.start_all(program, pause_at=5)
        for process in federation:
            process.wait_for_step(5)
        # The count, five steps and a loss: a sum that is in progress may be finished with dan only.
        federation.wait_until(lambda: {len(process.journal()) for process in federation} == {7})
        federation.kill("dan")
        replace_file(path, without(in_epoch(path.read_text(), 2), "dan"))
        rest = ("ada", "bob", "cleo")
        federation.wait_until(lambda: all_in_epoch(federation, 2, *rest))
        for name in rest:
            federation[name].resume()
        federation.wait_until(lambda: all(federation[name].finished for name in rest))
        assert [federation[name].error for name in rest] == [None] * 3
        assert len({federation[name].result for name in rest}) == 1
