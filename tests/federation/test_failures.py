"""Failures of one member, which all members must report: aborts, settings, lies, departures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.errors import (
    DisagreementError,
    EquivocationError,
    PeerAbortedError,
    PeerLeftError,
    RangeError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.federation.keys import Keys
from cgd.secagg.messages import Confirm, Total
from cgd.secagg.statements import slot_of, statement
from cgd.transport import runtime, waiting
from support.programs import (
    EVERYONE,
    NAMES,
    Summing,
    Training,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.secagg.codec import Frame
    from cgd.secagg.messages import PeerId
    from support.in_process import (
        InProcessFederation,
        MemberProcess,
    )


pytestmark = pytest.mark.slow

TIME = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?: [^\s,]+(?=,))?")


def test_early_abort_reaches_peers_that_start_later(federation: InProcessFederation) -> None:
    def declining(process: MemberProcess) -> float:
        process.peers.abort_sum()
        process.at_step(0)
        return float(process.peers.sum(np.array([1.0])).item())

    def trying(process: MemberProcess) -> tuple[PeerId, float]:
        with pytest.raises(PeerAbortedError) as caught:
            process.peers.sum(np.array([1.0]))
        process.at_step(0)
        return caught.value.peer, float(process.peers.sum(np.array([1.0])).item())

    federation.start("ada", declining, pause_at=0).wait_for_step(0)
    federation.start("bob", trying, pause_at=0)
    federation.start("cleo", trying, pause_at=0)
    for process in federation:
        process.wait_for_step(0)
    for process in federation:
        process.resume()
    assert federation.results() == {"ada": 3.0, "bob": ("ada", 3.0), "cleo": ("ada", 3.0)}


@pytest.mark.parametrize("last", NAMES)
def test_different_settings_are_reported_to_all_members(federation: InProcessFederation, last: PeerId) -> None:
    for name in NAMES:
        program = Summing([1.0], context="another" if name == "cleo" else "")
        federation.start(name, program, pause_at=0 if name == last else None)
    federation.wait_until(
        lambda: all(process.name == last or process.is_waiting_for("Ready", last) for process in federation)
    )
    federation[last].resume()
    for name, error in federation.errors().items():
        assert isinstance(error, SettingsError), error
        assert error.peer == "cleo"
        assert ("this member's settings" in str(error)) == (name == "cleo")


def test_different_training_settings_are_reported_and_corrected_by_a_restart(
    federation: InProcessFederation, uninterrupted: dict[str, str]
) -> None:
    for name in NAMES:
        federation.start(name, Training(lr=0.25 if name == "bob" else 0.5))
    for error in federation.errors().values():
        assert isinstance(error, SettingsError), error
        assert error.peer == "bob"
    federation.kill(*NAMES)
    federation.start_all(Training())
    assert federation.results() == uninterrupted


@pytest.mark.parametrize("last", [True, False], ids=["after all other messages", "in the usual order"])
def test_inconsistent_total_is_reported_to_all_members(federation: InProcessFederation, last: bool) -> None:
    """Ada, which reduces a part, sends another total to cleo than to bob."""

    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        if (sender, to) != ("ada", "cleo") or not isinstance(frame.message, Total):
            return frame
        words = bytes(frame.message.words)
        return replace(frame, message=replace(frame.message, words=bytes([words[0] ^ 1]) + words[1:]))

    federation.network.rewrite = lie
    hold = federation.network.hold("ada", {"cleo"} if last else (), lambda message: isinstance(message, Total))
    federation.start_all(Summing([1.0] * 3))
    if last:
        federation.wait_until(lambda: Confirm in federation["bob"].connection.sent and hold.reached)
        federation.network.release(hold)
    for name, error in federation.errors().items():
        assert isinstance(error, DisagreementError), error  # which member deviated is not known
        differ = "ada, bob" if name == "cleo" else "cleo"
        assert str(error).startswith(f"the masked total of sum 1 differs between this member and {differ}: ")


def test_unsigned_confirmation_aborts_the_sum_for_all_members(federation: InProcessFederation) -> None:
    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        forged = (sender, to) == ("ada", "bob") and isinstance(frame.message, Confirm)
        return replace(frame, message=Confirm(bytes(32))) if forged else frame

    federation.network.rewrite = lie
    federation.start_all(Summing([1.0]))
    errors = federation.errors()
    assert isinstance(errors["bob"], RemoteProtocolError), errors
    assert str(errors["bob"]) == "ada: sent a confirm statement without a valid signature of its own"
    for name in ("ada", "cleo"):  # which received valid statements
        error = errors[name]
        assert isinstance(error, PeerAbortedError), errors
        assert error.peer == "bob"
    assert {len(process.journal()) for process in federation} == {0}


def convicts(problems: Callable[[], dict[PeerId, str]]) -> bool:
    return "dishonest" in problems().get("ada", "")


def test_equivocating_member_is_convicted_by_all_members(federation: InProcessFederation) -> None:
    identity = Keys.load(federation.path.parent / "ada.key").identity

    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        if (sender, to) != ("ada", "bob") or not isinstance(frame.message, Confirm):
            return frame
        view = federation["ada"].member.runtime.membership._view
        assert view is not None
        said = statement("confirm", slot_of(view.digest, EVERYONE, frame.number), sha256(bytes(32)).digest())
        return replace(frame, message=Confirm(bytes(32), identity.sign(said)))

    federation.network.rewrite = lie
    federation.start_all(Summing([1.0]))
    errors = federation.errors("bob", "cleo")
    assert isinstance(errors["bob"], (DisagreementError, EquivocationError)), errors  # whichever it notices first
    assert isinstance(errors["cleo"], EquivocationError), errors
    assert errors["cleo"].peer == "ada"
    for name in ("bob", "cleo"):
        problems = federation[name].member.runtime.membership.problems
        federation.wait_until(partial(convicts, problems))
    assert {len(process.journal()) for process in federation} == {0}


def test_value_out_of_range_aborts_the_sum_and_a_restart_continues(federation: InProcessFederation) -> None:
    for name in NAMES:
        federation.start(name, Summing([1.0, float("nan") if name == "bob" else 2.0]))
    errors = federation.errors()
    assert isinstance(errors["bob"], RangeError)
    for name in ("ada", "cleo"):
        error = errors[name]
        assert isinstance(error, PeerAbortedError), error
        assert error.peer == "bob"
        assert "not finite or beyond the bound" in str(error)
    federation.kill(*NAMES)
    federation.start_all(Summing([10.0, 2.0]))  # the first sum was made
    assert federation.results() == dict.fromkeys(NAMES, (3.0, 6.0))


def test_clean_stop_is_reported_to_peers(federation: InProcessFederation) -> None:
    """Also if it had sent nothing for a while."""
    for name in NAMES:
        federation.start(name, Summing([1, 2]), pause_at=1 if name == "cleo" else None)
    federation["cleo"].wait_for_step(1)
    federation.wait_until(lambda: all(federation[name].is_waiting_for("Ready", "cleo") for name in ("ada", "bob")))
    federation["cleo"].stop()
    memberships = [federation[name].member.runtime.membership for name in ("ada", "bob")]
    federation.wait_until(lambda: all(membership.left("cleo") is False for membership in memberships))


def test_long_wait_logs_the_missing_peers(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "REMINDER_SECONDS", (0.1,))
    federation.start("ada", Summing())
    reminder = "TIME, waiting since TIME for bob: not here yet"
    federation.wait_until(lambda: any(TIME.sub("TIME", line).startswith(reminder) for line in caplog.messages))
    for name in ("bob", "cleo"):
        federation.start(name, Summing())
    assert federation.results() == dict.fromkeys(NAMES, (3, 6, 9))
    assert sum(", waiting since " in line for line in caplog.messages) == 1


def test_reminder_tells_apart_peers_that_compute_stopped_or_were_killed(federation: InProcessFederation) -> None:
    for name in NAMES:
        federation.start(name, Summing([1, 2]), pause_at=None if name == "ada" else 1)
    ada = federation["ada"]
    for name in NAMES:
        federation[name].wait_for_step(1)
    federation.wait_until(lambda: ada.is_waiting_for("Ready", "bob", "cleo"))
    seconds = 0.0
    wait = waiting.Wait(lambda: seconds)

    def reminder() -> str:
        what, waited_for = ada.waiting_for()
        return TIME.sub("TIME", wait.reminder(ada.member.runtime.report(), waited_for, what))

    assert reminder() == ""  # nobody is missing, and the wait is not long
    seconds = waiting.INTERVAL_SECONDS
    text = f"TIME, waiting since TIME for bob: {waiting.COMPUTING}; cleo: {waiting.COMPUTING}"
    federation.wait_until(lambda: reminder() == text)
    federation["cleo"].stop()
    text = f"TIME, waiting since TIME for bob: {waiting.COMPUTING}; cleo: at TIME {runtime.STOPPED}"
    federation.wait_until(lambda: reminder() == text)
    federation.kill("bob")
    federation.wait_until(lambda: "for bob: missing since TIME, was here before" in reminder())


def test_one_sum_more_than_the_peers_is_an_error(federation: InProcessFederation) -> None:
    def short(process: MemberProcess) -> None:
        with process.peers:
            Summing([1, 2])(process)

    federation.start("ada", Summing([1, 2, 3]))
    federation.start("bob", Summing([1, 2, 3]))
    federation.start("cleo", short)
    for name, error in federation.errors("ada", "bob").items():
        assert isinstance(error, PeerLeftError), (name, error)
        assert error.peer == "cleo"
        assert "our program requests another sum" in str(error)


def test_members_leave_when_the_last_one_is_done(federation: InProcessFederation) -> None:
    """Also if the last one is done some time after the last sum."""

    def program(process: MemberProcess) -> None:
        with process.peers as peers:
            peers.sum(np.array([1]))
            process.at_step(0)

    for name in NAMES:
        federation.start(name, program, pause_at=0 if name == "cleo" else None)
    cleo = federation["cleo"]
    federation.wait_until(lambda: cleo.step == 0 and cleo.member.runtime.membership.all_done)
    cleo.resume()
    federation.results()
    assert all(
        process.member.runtime.membership.all_done for process in federation
    )  # they did not leave because of a timeout
