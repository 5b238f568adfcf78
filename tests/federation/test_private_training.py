"""Kills at every moment of a private step: never less noise, never a charge missed, the same bits at all members.

What is checked at the end of each training (`Watch.check`), with k kills: an attempt at a sum can be opened if all
members have sent their keys. Every member has charged each of these on its disk before it sent its key, and at most k
attempts more, one for each kill between a charge and the last key. All attempts have different noise.
"""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cgd.dp.budget_file import BudgetFile
from cgd.errors import BudgetSpentError, CGDError, InputError, RevealError
from cgd.federation.state import StateFolder
from cgd.secagg.messages import Confirm, RevealKey, Subtotal
from support.in_process import InProcessFederation, KilledError
from support.private_programs import STEPS, PrivateTraining, Watch, budget_path, charges, is_step
from support.programs import NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.secagg.messages import Buffer, Message
    from support.in_memory_network import HeldFrames

SECOND_STEP = 2
"""The step of the loop whose sum is interrupted is the second one: two private sums are finished before it."""


@pytest.fixture
def watch(federation: InProcessFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(tmp_path).install(federation, monkeypatch)


def finish(federation: InProcessFederation, watch: Watch, kills: int) -> None:
    """Wait for all programs; check bits, noise and charges."""
    results = federation.results()
    assert len({digest for digest, _ in results.values()}) == 1
    assert {name: openings for name, (_, openings) in results.items()} == {
        name: charges(watch.folder, name) for name in NAMES
    }
    watch.check(*NAMES, kills=kills)


class InSecondStep:
    """Matches the messages of one kind to one member, or the `Ready`, in the sum of the second step's gradients.

    The key of the first step may follow the second `Ready`, but not the second step's `Confirm`.

    Args:
        kind: the kind; None for `Ready`.
    """

    def __init__(self, kind: type[Message] | None) -> None:
        self._kind = kind
        self._ready, self._confirmed = 0, False

    def __call__(self, message: Message) -> bool:
        self._ready += is_step(message)
        self._confirmed |= self._ready > 1 and isinstance(message, Confirm)
        found = is_step(message) if self._kind is None else isinstance(message, self._kind)
        return found and (self._confirmed if self._kind is RevealKey else self._ready > 1)


def test_training_without_kills_charges_every_opening_once(federation: InProcessFederation, watch: Watch) -> None:
    federation.start_all(PrivateTraining(watch.folder))
    finish(federation, watch, kills=0)
    assert charges(watch.folder, "ada") == STEPS + 1


MOMENTS: dict[str, type[Message] | None] = {
    "before it is ready": None,
    "while sharing": Subtotal,
    "before it confirms the total": Confirm,
    "before its key arrives": RevealKey,
}


def hold_second_step(
    federation: InProcessFederation, watch: Watch, sender: str, kind: type[Message] | None, to: Sequence[str]
) -> list[HeldFrames]:
    """Hold back the messages of a sender from this kind on, in the second step; start all, and wait for it.

    There is one hold for each recipient: the messages to one may be a sum ahead of those to another.
    """
    holds = [federation.network.hold(sender, [name], InSecondStep(kind)) for name in to]
    federation.start_all(PrivateTraining(watch.folder))
    federation.wait_until(lambda: all(hold.reached for hold in holds))
    return holds


def release(federation: InProcessFederation, holds: list[HeldFrames]) -> None:
    for hold in holds:
        federation.network.release(hold)


def settle(federation: InProcessFederation, watch: Watch, kind: type[Message] | None) -> None:
    """Wait until nobody can continue before the held messages arrive."""
    if kind is RevealKey:
        federation.wait_until(lambda: all(len(watch.revealed[name]) == SECOND_STEP + 1 for name in NAMES))
    elif kind is Confirm:
        federation.wait_until(lambda: len(watch.revealed["cleo"]) == SECOND_STEP + 1)


@pytest.mark.parametrize("killed", [("cleo",), ("ada",), ("ada", "bob"), NAMES], ids="+".join)
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_while_messages_are_on_their_way(
    federation: InProcessFederation, watch: Watch, moment: str, killed: tuple[str, ...]
) -> None:
    holds = hold_second_step(federation, watch, "cleo", MOMENTS[moment], ("ada", "bob"))
    settle(federation, watch, MOMENTS[moment])
    federation.kill(*killed)
    release(federation, holds)
    for name in killed:
        federation.start(name, PrivateTraining(watch.folder))
    finish(federation, watch, kills=1)


def test_kill_after_its_key_and_before_it_has_the_others(federation: InProcessFederation, watch: Watch) -> None:
    """The others have the total: it takes it from their journal, and nothing is charged again."""
    holds = hold_second_step(federation, watch, "ada", RevealKey, ("cleo",))
    federation.wait_until(lambda: all(len(watch.revealed[name]) == SECOND_STEP + 1 for name in NAMES))
    federation.wait_until(lambda: len(federation["ada"].journal()) > SECOND_STEP + 1)
    federation.kill("cleo")
    release(federation, holds)
    federation.start("cleo", PrivateTraining(watch.folder))
    finish(federation, watch, kills=0)


@pytest.mark.parametrize("charged", [False, True])
def test_kill_between_the_charge_and_the_key(
    federation: InProcessFederation, watch: Watch, monkeypatch: pytest.MonkeyPatch, charged: bool
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    charge = BudgetFile.charge

    def stop_in_second_step(self: BudgetFile, *arguments: Any) -> None:
        last = self.path.name == "cleo.budget" and len(self.charges) == SECOND_STEP and not reached.is_set()
        if last and not charged:
            reached.set()
            go_on.wait()
            raise KilledError("killed before the charge")
        charge(self, *arguments)
        if last:
            reached.set()
            go_on.wait()

    monkeypatch.setattr(BudgetFile, "charge", stop_in_second_step)
    federation.start_all(PrivateTraining(watch.folder))
    federation.wait_until(reached.is_set)
    federation["cleo"].disconnect()
    go_on.set()
    federation.kill("cleo")
    federation.start("cleo", PrivateTraining(watch.folder))
    finish(federation, watch, kills=1)
    assert len(watch.revealed["cleo"]) == STEPS + 1
    assert charges(watch.folder, "cleo") == STEPS + 1 + charged


def test_kill_before_the_journal_entry_is_stored(
    federation: InProcessFederation, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    append = StateFolder.append

    def stop_in_second_step(self: StateFolder, group: str, place: int, entry: Sequence[Buffer]) -> bool:
        is_entry = place == SECOND_STEP + 1 and b'"mark"' not in bytes(entry[1])
        if is_entry and self.folder == federation.folder("cleo") and not reached.is_set():
            reached.set()
            go_on.wait()
            return False
        return append(self, group, place, entry)

    monkeypatch.setattr(StateFolder, "append", stop_in_second_step)
    federation.start_all(PrivateTraining(watch.folder))
    federation.wait_until(reached.is_set)
    federation["cleo"].disconnect()
    go_on.set()
    federation.kill("cleo")
    federation.start("cleo", PrivateTraining(watch.folder))
    finish(federation, watch, kills=0)


def withhold_second_step(federation: InProcessFederation, watch: Watch, training: PrivateTraining) -> None:
    """Let cleo open the second step alone, and restart it as a member that denies this."""
    for name in ("ada", "bob"):
        federation.network.hold("cleo", [name], InSecondStep(RevealKey))
    federation.start_all(training)
    federation.wait_until(lambda: all(len(watch.revealed[name]) == SECOND_STEP + 1 for name in NAMES))
    federation.kill("cleo", lose_state=True)
    federation.start("cleo", training)


def test_step_that_a_member_opened_alone_is_charged_again(federation: InProcessFederation, watch: Watch) -> None:
    withhold_second_step(federation, watch, PrivateTraining(watch.folder))
    finish(federation, watch, kills=1)
    assert len(watch.openings(*NAMES)) == STEPS + 2
    assert [charges(watch.folder, name) for name in NAMES] == [STEPS + 2] * 3


def test_withheld_keys_cannot_spend_more_than_the_budget(federation: InProcessFederation, watch: Watch) -> None:
    """Without reruns, the training ends before its last step: a member can stop it, and learns no more."""
    withhold_second_step(federation, watch, PrivateTraining(watch.folder, reruns=0))
    errors = federation.errors()
    assert any(isinstance(error, BudgetSpentError) for error in errors.values())
    assert all(isinstance(error, CGDError) for error in errors.values())
    assert not watch.missed
    assert [charges(watch.folder, name) for name in NAMES] == [STEPS + 1] * 3


def test_member_with_another_budget_file_is_stopped(federation: InProcessFederation, watch: Watch) -> None:
    """Its records were counted, and the file knows nothing of it."""
    federation.start_all(PrivateTraining(watch.folder), pause_at=2)
    federation["cleo"].wait_for_step(2)
    federation.kill("cleo")
    budget_path(watch.folder, "cleo").rename(watch.folder / "kept")
    federation.start("cleo", PrivateTraining(watch.folder))
    error = federation.errors("cleo")["cleo"]
    assert isinstance(error, InputError)
    assert "take the whole budget as spent" in str(error)
    federation.kill("cleo")
    shutil.move(watch.folder / "kept", budget_path(watch.folder, "cleo"))
    federation.start("cleo", PrivateTraining(watch.folder))
    for name in ("ada", "bob"):
        federation[name].resume()
    finish(federation, watch, kills=2)


def test_restarted_member_with_other_records_continues_with_its_budget(
    federation: InProcessFederation, watch: Watch
) -> None:
    """There are no weights that would be wrong, and every opening has noise and is charged, whatever they are."""
    holds = hold_second_step(federation, watch, "cleo", RevealKey, ("ada", "bob"))
    settle(federation, watch, RevealKey)
    federation.kill("cleo")
    release(federation, holds)
    federation.start("cleo", PrivateTraining(watch.folder, samples=13))
    finish(federation, watch, kills=1)


def test_federation_needs_a_budget_file(federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.private_programs.budget_path", lambda _folder, _name: None)
    federation.start_all(PrivateTraining(federation.path.parent))
    for error in federation.errors().values():
        assert isinstance(error, (InputError, CGDError))
    assert any("charges the budget of its records in a file" in str(each) for each in federation.errors().values())


def test_full_disk_at_one_member_opens_nothing(
    federation: InProcessFederation, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = BudgetFile._append

    def fail_at_one(self: BudgetFile, file: Any, content: dict[str, Any]) -> None:
        if self.path.name == "cleo.budget" and len(self.charges) == SECOND_STEP:
            raise OSError(28, "No space left on device")
        append(self, file, content)

    monkeypatch.setattr(BudgetFile, "_append", fail_at_one)
    federation.start_all(PrivateTraining(watch.folder))
    error = federation.errors("cleo")["cleo"]
    assert isinstance(error, RevealError)
    assert "No space left on device" in str(error)
    assert len(watch.openings(*NAMES)) == SECOND_STEP
    assert not watch.missed
