"""Members that die together, come back with something else, or give up half-way: what was summed stays what it was.

They are memberships inside this process, over a network that the tests hold still at the moments that matter. The same
with real processes and sockets, and at random moments, is in test_faults.py; without I/O, in protocol/test_assembly.py.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytest
import torch

from cgd import Cell, ConfinedSGD, local_peers
from cgd.errors import (
    DisagreementError,
    EquivocationError,
    InputError,
    LocalProtocolError,
    PeerAbortedError,
    PeerLeftError,
    PeerTimeoutError,
    RangeError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.federation import config_edit, member
from cgd.federation.keys import Keys
from cgd.federation.state import StateFolder
from cgd.secagg.journal import Journal
from cgd.secagg.messages import Confirm, JournalChunk, Message, Ready, RevealKey, Total
from cgd.secagg.statements import slot_of, statement
from cgd.transport import runtime
from support.lives import DEADLINE_SECONDS, FEDERATION, Life, Training, Village, found, stranger, undisturbed, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cgd import Peers
    from cgd.secagg.codec import Frame
    from cgd.secagg.messages import PeerId

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
GRID = tuple(f"r{row}c{column}" for row in range(3) for column in range(2))
COLUMN = tuple(name for name in GRID if name.endswith("c0"))
NEVER = 1e9
EVERYONE = "everyone"


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found(tmp_path_factory.mktemp("trio"), NAMES)


@pytest.fixture(scope="module")
def quiet(trio: Path) -> dict[str, str]:
    return undisturbed(trio, trio.parent / "undisturbed", Training())


@pytest.fixture
def village(trio: Path, tmp_path: Path) -> Iterator[Village]:
    with Village(trio, tmp_path / "state") as made:
        yield made


@pytest.fixture(scope="module")
def rectangle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found(tmp_path_factory.mktemp("grid"), GRID, [Cell(int(name[1]), int(name[3])) for name in GRID])


@pytest.fixture(scope="module")
def quiet_grid(rectangle: Path) -> dict[str, str]:
    return undisturbed(rectangle, rectangle.parent / "undisturbed", Training())


@pytest.fixture
def grid(rectangle: Path, tmp_path: Path) -> Iterator[Village]:
    with Village(rectangle, tmp_path / "state") as made:
        yield made


@pytest.fixture
def seldom_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody saves its whole ledger but at an orderly end."""
    monkeypatch.setattr(runtime, "SAVE_SECONDS", NEVER)


@dataclass(frozen=True)
class Summing:
    """A program that sums one number after the other, and returns the totals."""

    values: Sequence[float] = (1, 2, 3)
    context: str = ""

    def __call__(self, life: Life) -> tuple[float, ...]:
        totals = []
        for step, value in enumerate(self.values):
            life.at(step)
            totals.append(life.peers.sum(np.array([value]), context=self.context).item())
        return tuple(totals)


def idle(_: Life) -> None:
    """The program of a participant whose sums the test makes by itself."""


def a_weighted_ready(message: Message) -> bool:
    return isinstance(message, Ready) and message.spec.weighted


def an_unseal(message: Message) -> bool:
    return isinstance(message, RevealKey)


def stays(condition: Callable[[], bool], seconds: float = 0.3) -> bool:
    """Whether something stays as it is, as far as can be told in a moment."""
    end = time.monotonic() + seconds
    while condition():
        if time.monotonic() > end:
            return True
        time.sleep(0.01)
    return False


# Whoever comes back with other data.


def killed_and_back_with_more(village: Village, moment: str, lose_state: bool) -> BaseException | None:
    """What cleo's program raises if cleo comes back with another number of samples than was counted."""
    if moment == "before the first weighted sum":
        hold = village.network.hold("ada", {"cleo"}, a_weighted_ready)
        village.start_all(Training())
        village.until(lambda: hold.reached and len(village["cleo"].journal()) == 1)
        village.kill("cleo", lose_state=lose_state)
        village.network.release(hold)
    else:
        for name in NAMES:
            village.start(name, Training(), halt=3 if name == "cleo" else None)
        village["cleo"].until(3)
        village.kill("cleo", lose_state=lose_state)
    village.start("cleo", Training(more=1))
    return village.errors("cleo")["cleo"]


moments = pytest.mark.parametrize("moment", ["before the first weighted sum", "in mid-training"])
states = pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])


@moments
@states
def test_who_comes_back_with_other_samples_is_refused_before_it_shares(
    village: Village, moment: str, lose_state: bool
) -> None:
    error = killed_and_back_with_more(village, moment, lose_state)
    assert isinstance(error, InputError), error
    assert "samples is 10, and cleo was counted with another number" in str(error)
    assert Ready not in village["cleo"].connection.sent


@moments
@states
def test_the_others_wait_until_it_comes_back_with_the_samples_it_had(
    village: Village, quiet: dict[str, str], moment: str, lose_state: bool
) -> None:
    killed_and_back_with_more(village, moment, lose_state)
    assert stays(lambda: not village["ada"].over and not village["bob"].over), village.errors("ada", "bob")
    village["cleo"].stop()
    village.start("cleo", Training())
    assert village.results() == quiet


def test_all_of_a_grid_wait_for_one_that_comes_back_with_other_samples(
    grid: Village, quiet_grid: dict[str, str]
) -> None:
    for name in GRID:
        grid.start(name, Training(), halt=3 if name == "r0c0" else None)
    grid["r0c0"].until(3)
    grid.kill("r0c0", lose_state=True)
    grid.start("r0c0", Training(more=1))
    assert isinstance(grid.errors("r0c0")["r0c0"], InputError)
    others = GRID[1:]
    assert stays(lambda: not any(grid[name].over for name in others)), grid.errors(*others)
    grid["r0c0"].stop()
    grid.start("r0c0", Training())
    assert grid.results() == quiet_grid


def test_samples_may_be_others_until_they_are_counted(village: Village) -> None:
    """A count that nobody has opened is made anew."""
    hold = village.network.hold("cleo", {"ada", "bob"}, an_unseal)
    village.start_all(Training(), halt=1)
    village.until(lambda: hold.reached == {"ada", "bob"})
    village.kill("cleo", lose_state=True)
    village.start("cleo", Training(more=1), halt=1)
    for life in village:
        life.until(1)
        assert len(life.journal()) == 2


# Those who die together.


def whole_save(village: Village, name: str, group: str) -> int | None:
    """After how many steps a participant has saved its whole ledger; None if it has not."""
    path = village.folder(name) / f"{FEDERATION}+{group}.ledger"
    return Journal.from_bytes(path.read_bytes()).states[0].steps if path.exists() else None


def stop_and_start(village: Village, name: str, step: int, program: Training, *, halt: int | None) -> None:
    """A participant that halts at a step leaves in order there, which saves everything, and comes back."""
    village[name].until(step)
    village[name].stop()
    village.start(name, program, halt=halt)


@pytest.mark.usefixtures("seldom_saved")
@pytest.mark.parametrize("loop", ["plain", "steps"])
@pytest.mark.parametrize(
    "moment", ["between two steps", "between its sum and everyone's", "when only the others have opened everyone's"]
)
def test_a_column_killed_at_once_goes_on_from_its_folders(
    grid: Village, quiet_grid: dict[str, str], moment: str, loop: Any
) -> None:
    """Its members saved their whole ledgers after 1, 3 and 0 steps; whatever came later is in the entries."""
    program, between = Training(loop=loop), moment == "between two steps"
    halts = {"r0c0": 1, "r1c0": 3, "r2c0": 6 if between else None, "r0c1": None if between else 6}
    for name in GRID:
        grid.start(name, program, halt=halts.get(name))
    stop_and_start(grid, "r0c0", 1, program, halt=6 if between else None)
    stop_and_start(grid, "r1c0", 3, program, halt=6 if between else None)
    if between:
        for name in COLUMN:
            grid[name].until(6)
    else:
        grid.until(lambda: all(waits_for_everyone(grid[name], steps=7) for name in COLUMN))
    if moment == "when only the others have opened everyone's":
        made = len(grid["r0c0"].journal())
        hold = grid.network.hold("r0c1", COLUMN, an_unseal)
        grid["r0c1"].go_on()
        grid.until(lambda: all(len(grid[name].journal()) == made + 1 for name in GRID if name not in COLUMN))
        assert {len(grid[name].journal()) for name in COLUMN} == {made}
    grid.kill(*COLUMN)
    if moment == "when only the others have opened everyone's":
        grid.network.release(hold)
    assert [whole_save(grid, name, "column-0") for name in COLUMN] == [1, 3, None]
    if moment == "between its sum and everyone's":
        grid["r0c1"].go_on()
    for name in COLUMN:
        grid.start(name, program)
    assert grid.results() == quiet_grid


def waits_for_everyone(life: Life, steps: int) -> bool:
    """Whether it has made its column's sums of so many steps, and is in the sum with everyone that comes after."""
    return len(life.journal("column-0")) == 1 + steps and life.waiting_for()[0] == "Ready"


def test_a_column_that_has_lost_everything_says_so_and_sums_nothing(grid: Village) -> None:
    grid.start_all(Training(), halt=3)
    for life in grid:
        life.until(3)
    grid.kill(*COLUMN, lose_state=True)
    for name in COLUMN:
        grid.start(name, Training())
    for error in grid.errors(*COLUMN).values():
        assert isinstance(error, InputError), error
        assert "step 0 was taken with other members, and those of this group have lost their part of it" in str(error)
    assert {len(grid[name].journal("column-0")) for name in COLUMN} == {0}


@pytest.mark.usefixtures("seldom_saved")
@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_all_members_killed_at_once_go_on_from_their_folders(
    village: Village, quiet: dict[str, str], loop: Any
) -> None:
    program = Training(loop=loop)
    for name in NAMES:
        village.start(name, program, halt=2 if name == "ada" else 5)
    stop_and_start(village, "ada", 2, program, halt=5)
    for life in village:
        life.until(5)
    made = len(village["ada"].journal())
    village.kill(*NAMES)
    assert [whole_save(village, name, EVERYONE) for name in NAMES] == [2, None, None]
    for name in NAMES:
        assert len(StateFolder(village.folder(name), FEDERATION).load([EVERYONE])[EVERYONE]) == made
    village.start_all(program)
    assert village.results() == quiet


@pytest.mark.usefixtures("seldom_saved")
def test_who_was_caught_up_has_all_of_it_in_its_folder(village: Village, quiet: dict[str, str]) -> None:
    """Enough to bring back those who caught it up."""
    for name in NAMES:
        village.start(name, Training(), halt=3 if name == "cleo" else 5)
    village["cleo"].until(3)
    village.kill("cleo", lose_state=True)
    village.start("cleo", Training(), halt=5)
    for life in village:
        life.until(5)
    made = len(village["cleo"].journal())
    village.kill("cleo")
    village.kill("ada", "bob", lose_state=True)
    assert len(StateFolder(village.folder("cleo"), FEDERATION).load([EVERYONE])[EVERYONE]) == made
    village.start_all(Training())
    assert village.results() == quiet


@pytest.mark.usefixtures("seldom_saved")
def test_a_total_that_one_of_the_dead_had_opened_is_not_summed_again(village: Village) -> None:
    """Whatever they would add now: nobody may see the difference."""
    village.network.hold("cleo", {"ada", "bob"}, an_unseal)
    village.start_all(Summing([1, 2]), halt=1)
    village["cleo"].until(1)
    assert [len(village[name].journal()) for name in NAMES] == [0, 0, 1]
    village.kill(*NAMES)
    village.start_all(Summing([100, 2]))
    assert village.results() == dict.fromkeys(NAMES, (3, 6))


def kept(village: Village, name: str) -> Journal:
    return StateFolder(village.folder(name), FEDERATION).load([EVERYONE])[EVERYONE]


def test_that_the_first_sum_may_have_been_opened_is_known_after_a_kill(village: Village) -> None:
    for name in NAMES:
        village.network.hold(name, set(NAMES) - {name}, an_unseal)
    village.start_all(Summing([1, 2]))
    village.until(lambda: all(life.journal().mark is not None for life in village))
    village.kill(*NAMES)
    for name in NAMES:
        journal = kept(village, name)
        assert journal.mark is not None
        assert (len(journal), journal.mark.place, journal.mark.members) == (0, 0, NAMES)
    village.start_all(Summing([100, 2]))  # nobody has opened it: the same members run it again
    assert village.results() == dict.fromkeys(NAMES, (300, 6))


@pytest.mark.usefixtures("seldom_saved")
def test_that_a_sum_may_have_been_opened_is_known_with_a_past_that_others_gave(village: Village) -> None:
    """The program asked for none of the totals that came from them."""

    def jumping(life: Life) -> float:
        life.peers.memory.jump(1)
        life.peers.memory.reach(0)
        return float(life.peers.sum(np.array([3])).item())

    village.start_all(Summing([1, 2, 3]), halt=2)
    for life in village:
        life.until(2)
    village.kill("ada", lose_state=True)
    village.network.hold("bob", {"ada", "cleo"}, an_unseal)
    for life in village:
        life.go_on()
    ada = village.start("ada", jumping)
    village.until(lambda: ada.journal().mark is not None)
    mark = ada.journal().mark
    village.kill("ada")
    journal = kept(village, "ada")
    assert (len(journal), journal.mark) == (2, mark)


# A state folder that cannot be written.


def test_a_folder_that_cannot_be_used_is_told_before_anything_begins(village: Village) -> None:
    village.folder("ada").parent.mkdir()
    village.folder("ada").write_text("in the way")
    with pytest.raises(InputError, match="name another folder"):
        village.start("ada", Training())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_stops_nothing(
    village: Village, quiet: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "SAVE_SECONDS", 0.0)
    village.start_all(Training(), halt=0)
    folder, plain = village.folder("ada"), StateFolder._open

    def full(self: StateFolder, path: Path) -> BinaryIO:
        return open("/dev/full", "wb") if self.folder == folder else plain(self, path)

    monkeypatch.setattr(StateFolder, "_open", full)
    for life in village:
        life.go_on(halt=4)
    for life in village:
        life.until(4)
    ada = village["ada"]
    saved = ada.membership.runtime._saved
    village.until(lambda: saved.get(EVERYONE, (0,))[0] == -1 or not ada.alive)  # it did not work
    for life in village:
        life.go_on()
    assert village.results() == quiet
    assert f"the state cannot be saved in {folder} (No space left on device)" in caplog.text


# Who is asked for the past.


def lost_all(village: Village, *spoilt: PeerId, timeout: float | None = None) -> Life:
    """Ada comes back with nothing after two sums; these members' pasts do not arrive as they are."""
    village.start_all(Summing([1, 2, 3]), halt=2)
    for life in village:
        life.until(2)

    def spoil(sender: PeerId, _to: PeerId, frame: Frame) -> Frame:
        if not isinstance(frame.message, JournalChunk) or sender not in spoilt:
            return frame
        return replace(frame, message=replace(frame.message, words=bytes(len(frame.message.words))))

    village.kill("ada", lose_state=True)
    village.network.bend = spoil
    village["bob"].go_on()
    village["cleo"].go_on()
    return village.start("ada", Summing([1, 2, 3]), timeout=timeout)


def test_another_member_is_asked_if_ones_past_is_none(village: Village, caplog: pytest.LogCaptureFixture) -> None:
    lost_all(village, "bob")
    assert village.results() == dict.fromkeys(NAMES, (3, 6, 9))
    assert "bob: gave us its past, and " in caplog.text


def test_if_nobodys_past_can_be_used_it_is_named(village: Village) -> None:
    ada = lost_all(village, "bob", "cleo", timeout=0.5)
    error = village.errors("ada")["ada"]
    assert isinstance(error, PeerTimeoutError), error
    assert error.peers == {"bob", "cleo"}
    assert "the past" in str(error)
    assert ada.waiting_for() == ("the past", frozenset({"bob", "cleo"}))
    assert not village["bob"].over  # and nothing was summed in the meantime
    assert len(village["bob"].journal()) == 2


# What one member does, all hear of.


def test_who_declines_before_the_others_are_here_is_heard_when_they_are(village: Village) -> None:
    def declining(life: Life) -> float:
        life.peers.decline()
        life.at(0)
        return float(life.peers.sum(np.array([1.0])).item())

    def trying(life: Life) -> tuple[PeerId, float]:
        with pytest.raises(PeerAbortedError) as caught:
            life.peers.sum(np.array([1.0]))
        life.at(0)
        return caught.value.peer, float(life.peers.sum(np.array([1.0])).item())

    village.start("ada", declining, halt=0).until(0)
    village.start("bob", trying, halt=0)
    village.start("cleo", trying, halt=0)
    for life in village:
        life.until(0)
    for life in village:
        life.go_on()
    assert village.results() == {"ada": 3.0, "bob": ("ada", 3.0), "cleo": ("ada", 3.0)}


@pytest.mark.parametrize("last", NAMES)
def test_other_settings_are_told_to_all_whoever_is_last(village: Village, last: PeerId) -> None:
    for name in NAMES:
        program = Summing([1.0], context="another" if name == "cleo" else "")
        village.start(name, program, halt=0 if name == last else None)
    village.until(lambda: all(life.name == last or life.waits_for("Ready", last) for life in village))
    village[last].go_on()
    for name, error in village.errors().items():
        assert isinstance(error, SettingsError), error
        assert error.peer == "cleo"
        assert ("this member sums" in str(error)) == (name == "cleo")


def test_other_training_settings_are_told_to_all_and_mended_by_a_restart(
    village: Village, quiet: dict[str, str]
) -> None:
    for name in NAMES:
        village.start(name, Training(lr=0.25 if name == "bob" else 0.5))
    for error in village.errors().values():
        assert isinstance(error, SettingsError), error
        assert error.peer == "bob"
    village.kill(*NAMES)
    village.start_all(Training())
    assert village.results() == quiet


@pytest.mark.parametrize("last", [True, False], ids=["as the last word", "in the usual order"])
def test_a_total_that_one_member_was_told_otherwise_is_told_to_all(village: Village, last: bool) -> None:
    """Ada, who adds up a part, tells cleo another total than bob."""

    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        if (sender, to) != ("ada", "cleo") or not isinstance(frame.message, Total):
            return frame
        words = bytes(frame.message.words)
        return replace(frame, message=replace(frame.message, words=bytes([words[0] ^ 1]) + words[1:]))

    village.network.bend = lie
    hold = village.network.hold("ada", {"cleo"} if last else (), lambda message: isinstance(message, Total))
    village.start_all(Summing([1.0] * 3))
    if last:
        village.until(lambda: Confirm in village["bob"].connection.sent and hold.reached)
        village.network.release(hold)
    for name, error in village.errors().items():
        assert isinstance(error, DisagreementError), error  # who lied cannot be known
        differ = "ada, bob" if name == "cleo" else "cleo"
        assert str(error).startswith(f"{differ} and we have different totals of sum 1")


def test_a_digest_that_is_not_signed_fails_the_sum_for_all(village: Village) -> None:
    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        forged = (sender, to) == ("ada", "bob") and isinstance(frame.message, Confirm)
        return replace(frame, message=Confirm(bytes(32))) if forged else frame

    village.network.bend = lie
    village.start_all(Summing([1.0]))
    errors = village.errors()
    assert isinstance(errors["bob"], RemoteProtocolError), errors
    assert str(errors["bob"]) == "ada: sent a confirm statement without a valid signature of its own"
    for name in ("ada", "cleo"):  # who see nothing wrong
        error = errors[name]
        assert isinstance(error, PeerAbortedError), errors
        assert error.peer == "bob"
    assert {len(life.journal()) for life in village} == {0}


def convicts(problems: Callable[[], dict[PeerId, str]]) -> bool:
    return "dishonest" in problems().get("ada", "")


def test_who_signs_another_digest_for_one_member_is_convicted_by_all(village: Village) -> None:
    identity = Keys.load(village.path.parent / "ada.key").identity

    def lie(sender: PeerId, to: PeerId, frame: Frame) -> Frame:
        if (sender, to) != ("ada", "bob") or not isinstance(frame.message, Confirm):
            return frame
        view = village["ada"].membership.runtime.membership._view
        assert view is not None
        said = statement("confirm", slot_of(view.digest, EVERYONE, frame.number), sha256(bytes(32)).digest())
        return replace(frame, message=Confirm(bytes(32), identity.sign(said)))

    village.network.bend = lie
    village.start_all(Summing([1.0]))
    errors = village.errors("bob", "cleo")
    assert isinstance(errors["bob"], (DisagreementError, EquivocationError)), errors  # whichever it notices first
    assert isinstance(errors["cleo"], EquivocationError), errors
    assert errors["cleo"].peer == "ada"
    for name in ("bob", "cleo"):
        problems = village[name].membership.runtime.membership.problems
        village.until(partial(convicts, problems))
    assert {len(life.journal()) for life in village} == {0}


def test_a_value_out_of_range_is_told_to_all_and_mended_by_a_restart(village: Village) -> None:
    for name in NAMES:
        village.start(name, Summing([1.0, float("nan") if name == "bob" else 2.0]))
    errors = village.errors()
    assert isinstance(errors["bob"], RangeError)
    for name in ("ada", "cleo"):
        error = errors[name]
        assert isinstance(error, PeerAbortedError), error
        assert error.peer == "bob"
        assert "not finite or beyond the bound" in str(error)
    village.kill(*NAMES)
    village.start_all(Summing([10.0, 2.0]))  # the first sum was made
    assert village.results() == dict.fromkeys(NAMES, (3.0, 6.0))


def test_who_leaves_in_order_is_heard_to_leave(village: Village) -> None:
    """Also if it had nothing to say for a while."""
    for name in NAMES:
        village.start(name, Summing([1, 2]), halt=1 if name == "cleo" else None)
    village["cleo"].until(1)
    village.until(lambda: all(village[name].waits_for("Ready", "cleo") for name in ("ada", "bob")))
    village["cleo"].stop()
    memberships = [village[name].membership.runtime.membership for name in ("ada", "bob")]
    village.until(lambda: all(membership.left("cleo") is False for membership in memberships))


def test_who_waits_for_long_says_for_whom(
    village: Village, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "TELL_SECONDS", 0.1)
    village.start("ada", Summing())
    village.until(lambda: "ada waits for bob: " in caplog.text)
    for name in ("bob", "cleo"):
        village.start(name, Summing())
    assert village.results() == dict.fromkeys(NAMES, (3, 6, 9))
    assert caplog.text.count("ada waits for") == 1


def test_who_asks_for_one_more_sum_than_the_others_is_told(village: Village) -> None:
    def short(life: Life) -> None:
        with life.peers:
            Summing([1, 2])(life)

    village.start("ada", Summing([1, 2, 3]))
    village.start("bob", Summing([1, 2, 3]))
    village.start("cleo", short)
    for name, error in village.errors("ada", "bob").items():
        assert isinstance(error, PeerLeftError), (name, error)
        assert error.peer == "cleo"
        assert "our program asks for one more sum" in str(error)


def test_nobody_stays_when_the_last_one_is_done(village: Village) -> None:
    """Also if that is some time after the last sum."""

    def program(life: Life) -> None:
        with life.peers as peers:
            peers.sum(np.array([1]))
            life.at(0)

    for name in NAMES:
        village.start(name, program, halt=0 if name == "cleo" else None)
    cleo = village["cleo"]
    village.until(lambda: cleo.step == 0 and cleo.membership.runtime.membership.all_done)
    cleo.go_on()
    village.results()
    assert all(life.membership.runtime.membership.all_done for life in village)  # and did not give up waiting


# Sums that our program does not wait for.


@pytest.fixture
def waiting(village: Village) -> Village:
    """Ada's sums are up to the test; bob is in his first one, and cleo halts before hers."""
    village.start("ada", idle, timeout=DEADLINE_SECONDS)
    village.start("bob", Summing([1, 2, 3]))
    village.start("cleo", Summing([1, 2, 3]), halt=0)
    village.until(lambda: village["bob"].waits_for("Ready", "ada", "cleo"))
    village.until(lambda: village["ada"].membership.runtime.membership.current)
    return village


def timed_out(life: Life, values: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerTimeoutError) as caught:
        patch.setattr(life.membership.runtime, "_timeout", 0.2)
        life.peers.sum(values)
    assert caught.value.peers == {"cleo"}


def interrupted(life: Life, values: Any) -> None:
    """As by Ctrl-C in a notebook."""

    def press() -> None:
        until(in_the_sum)
        signal.pthread_kill(main, signal.SIGINT)

    def in_the_sum() -> bool:
        with life.membership.runtime.holding() as membership:  # the sum holds it but while it waits
            pending = membership.group(EVERYONE).pending
            return pending is not None and not pending.abandoned

    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            life.peers.sum(values)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


given_up = pytest.mark.parametrize("give_up", [timed_out, interrupted])


@given_up
def test_a_sum_that_was_given_up_goes_on_and_is_there_when_asked_for_again(waiting: Village, give_up: Any) -> None:
    ada, values = waiting["ada"], np.array([1])
    give_up(ada, values)
    values[0] = 1000  # what may have been shared is what counts
    waiting["cleo"].go_on()
    waiting.until(lambda: len(ada.journal()) == 1)
    assert [ada.peers.sum(values).item(), *(ada.peers.sum(np.array([k])).item() for k in (2, 3))] == [3, 6, 9]
    waiting.errors("bob", "cleo")
    assert [waiting[name].result for name in ("bob", "cleo")] == [(3, 6, 9)] * 2


@given_up
def test_a_sum_that_was_given_up_may_be_asked_for_again_while_it_runs(waiting: Village, give_up: Any) -> None:
    ada, values = waiting["ada"], np.array([1])
    for _ in range(2):
        give_up(ada, values)
    waiting["cleo"].go_on()
    assert [ada.peers.sum(np.array([k])).item() for k in (1, 2, 3)] == [3, 6, 9]


def test_a_sum_that_was_given_up_begins_again_with_what_it_was(waiting: Village) -> None:
    """Cleo is killed and comes back: what ada shares in the new view is what she may have shared in the old one."""
    ada, values = waiting["ada"], np.array([1])
    timed_out(ada, values)
    values[0] = 1000
    waiting.kill("cleo")
    waiting.start("cleo", Summing([1]))
    waiting.until(lambda: len(ada.journal()) == 1)
    assert ada.peers.sum(values).item() == 3


def test_another_sum_is_not_begun_while_one_that_was_given_up_runs(waiting: Village) -> None:
    ada = waiting["ada"]
    timed_out(ada, np.array([1]))
    with pytest.raises(LocalProtocolError, match="a sum is still running"):
        ada.peers.sum(np.array([1, 2]))
    waiting["cleo"].go_on()
    waiting.until(lambda: len(ada.journal()) == 1)
    assert ada.peers.sum(np.array([1])).item() == 3


def test_an_interrupt_while_a_total_is_written_down_loses_nothing(
    village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while the disk is slow."""
    append = StateFolder.append
    interrupts = [True]

    def slow(folder: StateFolder, group: str, place: int, entry: Any) -> None:
        is_mark = isinstance(json.loads(bytes(entry[1])), dict)
        if folder.folder.name == "ada" and not is_mark and interrupts and interrupts.pop():
            raise KeyboardInterrupt
        append(folder, group, place, entry)

    monkeypatch.setattr(StateFolder, "append", slow)
    ada = village.start("ada", idle, timeout=DEADLINE_SECONDS)
    village.start("bob", Summing([1, 2, 3]))
    village.start("cleo", Summing([1, 2, 3]))
    with pytest.raises(KeyboardInterrupt):
        ada.peers.sum(np.array([1]))
    assert [ada.peers.sum(np.array([k])).item() for k in (1, 2, 3)] == [3, 6, 9]
    village.kill("ada")
    assert len(StateFolder(village.folder("ada"), FEDERATION).load([EVERYONE])[EVERYONE]) == 3


# A loop that begins where the members are.


def test_steps_after_a_checkpoint_or_a_second_time_take_none_twice() -> None:
    """Inside one process, where nobody remembers anything."""

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


def test_steps_begin_when_all_groups_know_where_they_are(rectangle: Path, tmp_path: Path) -> None:
    """A sum with the column that the optimiser knows nothing of is of the step that the loop is at."""

    def program(life: Life) -> list[tuple[int, int]]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=0.5, peers=life.peers, samples=1)
        sums = []
        for step in optimizer.steps(6):
            life.at(step)
            sums.append((step, int(life.peers.groups["column"].sum(np.array(step)))))
            parameter.grad = torch.ones(1)
            optimizer.step()
        return sums

    with Village(rectangle, tmp_path) as village:
        village.start_all(program, halt=4)
        for life in village:
            life.until(4)
        village.kill("r0c0", lose_state=True)
        late = [
            village.network.hold(
                peer, {"r0c0"}, lambda message: isinstance(message, JournalChunk) and "col" in message.group
            )
            for peer in COLUMN[1:]
        ]
        back = village.start("r0c0", program)
        village.until(lambda: any(hold.reached for hold in late))
        with back.membership.runtime.holding() as membership:
            groups = membership.group(EVERYONE), membership.group("column-0")
        village.until(lambda: groups[0].current)
        assert stays(lambda: back.step < 0 and not groups[1].current)
        for hold in late:
            village.network.release(hold)
        for life in village:
            life.go_on()
        results = village.results()
    assert results["r0c0"] == [(step, 3 * step) for step in range(3, 6)]
    assert results["r1c0"] == [(step, 3 * step) for step in range(6)]


# A second process with the same key.


def test_a_second_process_does_not_get_at_the_folder_of_the_first(village: Village, quiet: dict[str, str]) -> None:
    village.start_all(Training(), halt=2)
    village["cleo"].until(2)
    with pytest.raises(InputError, match="is in use: this participant runs already"):
        village.start("cleo", Training())
    village.kill("cleo")
    village.start("cleo", Training())
    for life in village:
        life.go_on()
    assert village.results() == quiet


def test_a_process_that_lost_its_place_harms_nobody(village: Village, quiet: dict[str, str], tmp_path: Path) -> None:
    """The first is cut off, a second takes its place and dies; the first is heard again, and a third ends the run."""
    for name in NAMES:
        village.start(name, Training(), halt=2 if name == "cleo" else None)
    first = village["cleo"]
    first.until(2)
    second = village.start("cleo", Training(), halt=5, state=tmp_path / "elsewhere")
    second.until(5)
    village.kill("cleo")
    village.network.live["cleo"] = first.connection
    first.go_on()
    village.until(lambda: first.connection.sent[Ready] == 2 * (3 + 1))
    assert stays(lambda: not first.over and not village["ada"].over)
    first.cut()
    first.bury()
    village.start("cleo", Training())
    assert village.results() == quiet


# Epochs.


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation file is looked at all the time."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


@pytest.fixture
def own(tmp_path: Path, watched: None) -> Iterator[Village]:
    """A village of ada, bob and cleo whose file the test may change."""
    with Village(found(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def add(village: Village, name: str) -> None:
    keys = Keys.generate(name)
    keys.save(village.path.parent)
    config_edit.with_participant(village.path, stranger(keys, len(village.names)))


def all_in_epoch(village: Village, epoch: int) -> bool:
    return all(life.membership.runtime.membership.federation_spec.epoch == epoch for life in village)


def test_a_late_joiner_reads_old_totals_as_they_were_written(own: Village) -> None:
    """Three addends have another fixed point than four."""
    own.start_all(Summing([1.5, 1.5]), halt=1)
    for life in own:
        life.until(1)
    add(own, "dan")
    own.until(lambda: all_in_epoch(own, 2))
    for life in own:
        life.go_on()
    own.start("dan", Summing([1.5, 1.5]))
    assert own.results() == dict.fromkeys((*NAMES, "dan"), (4.5, 6.0))


def test_a_step_that_was_opened_before_a_new_epoch_is_the_same_for_who_opened_it_in_the_next(own: Village) -> None:
    """Bob and cleo have opened a step's sum and ada has not, when dan joins."""
    own.start("ada", Training(), halt=2)
    own.start("bob", Training())
    own.start("cleo", Training())
    own["ada"].until(2)
    made = len(own["ada"].journal())
    own.until(lambda: all(own[name].waits_for("Ready", "ada") for name in ("bob", "cleo")))
    hold = own.network.hold("bob", {"ada"}, an_unseal)
    own["ada"].go_on()
    own.until(lambda: hold.reached and [len(own[name].journal()) - made for name in NAMES] == [0, 1, 1])
    add(own, "dan")
    own.until(lambda: all_in_epoch(own, 2))
    own.network.release(hold)
    own.start("dan", Training())
    assert len(set(own.results().values())) == 1
    assert [entry.epoch for entry in own["ada"].journal().entries][made : made + 2] == [1, 2]
    assert [entry.addends for entry in own["dan"].journal().entries][made : made + 2] == [3, 4]


def test_a_count_that_was_under_way_is_made_anew_with_the_members_that_are_left(own: Village) -> None:
    """Bob and dan are killed before they are counted; dan is removed, and bob comes back."""
    add(own, "dan")
    add(own, "eve")
    for name in own.names:
        own.start(name, Training(), halt=0 if name in ("bob", "dan") else None)
    own.until(lambda: all(own[name].waits_for("Ready", "bob", "dan") for name in ("ada", "cleo", "eve")))
    own.kill("bob", "dan")
    config_edit.without(own.path, "dan")
    own.start("bob", Training())
    results = own.results()
    assert set(results) == {"ada", "bob", "cleo", "eve"}
    assert len(set(results.values())) == 1
    assert {entry.addends for entry in own["ada"].journal().entries} == {4}


@pytest.mark.usefixtures("watched")
def test_a_file_that_moves_a_running_participant_is_refused_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = found(tmp_path, GRID, [Cell(int(name[1]), int(name[3])) for name in GRID])
    with Village(path, tmp_path / "state") as village:
        village.start_all(Training(), halt=1)
        for life in village:
            life.until(1)
        text = path.read_text().replace("epoch = 1", "epoch = 2").replace("cell = [0, 0]", "cell = [9, 9]")
        text = text.replace("cell = [0, 1]", "cell = [0, 0]").replace("cell = [9, 9]", "cell = [0, 1]")
        path.write_text(text)
        moved = {"r0c0": (Cell(0, 0), Cell(0, 1)), "r0c1": (Cell(0, 1), Cell(0, 0))}
        lines = [
            f"it moves {name} from cell {ours} to {theirs}, and a running program cannot follow"
            for name, (ours, theirs) in moved.items()
        ]
        village.until(lambda: all(line in caplog.text for line in lines))
        for name in moved:
            assert village[name].membership.runtime.membership.federation_spec.epoch == 1
            assert not village[name].over


def test_a_file_of_an_older_epoch_than_the_state_is_refused(own: Village) -> None:
    old = own.path.parent / "old.toml"
    old.write_bytes(own.path.read_bytes())
    add(own, "dan")
    own.start_all(Summing([1]))
    own.results()
    own.kill("cleo")
    with pytest.raises(InputError, match=r"old.toml is of epoch 1, and cleo has taken part in epoch 2"):
        own.start("cleo", Summing([1]), path=old)
    own.start("cleo", Summing([1]))
    assert own.results()["cleo"] == (4,)


def test_a_file_that_is_mended_is_told(own: Village, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cgd")
    own.start("ada", idle)
    before = own.path.read_text()
    own.path.write_text("no TOML")
    own.until(lambda: "the federation file has changed and is not used" in caplog.text)
    own.path.write_text(before)
    own.until(lambda: "the federation file is as it was" in caplog.text)
