"""`FederationRuntime`: runs a participant's side of a federation in its own thread.

A participant must answer its peers at any time, also while its program computes a gradient: it must reply to a
restarted member, send it the journal, and report its own position. So the membership protocol runs in this thread; the
program's thread only submits a sum and waits for its total.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import (
    CGDError,
    ClosedError,
    DisagreementError,
    InputError,
    LocalProtocolError,
    MembershipError,
    RemoteProtocolError,
)
from cgd.secagg.messages import HUB
from cgd.transport.auth import RejectionLog
from cgd.transport.driver import FLUSH_SECONDS, MIN_PAUSE_WHEN_FULL_SECONDS, Traffic
from cgd.transport.silence import SilenceClock
from cgd.transport.state_log import PeerReport, StateHistory, StateLog
from cgd.transport.waiting import Wait, timeout_error
from cgd.transport.waiting_times import WaitingClock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.journal import Journal
    from cgd.secagg.membership import Membership
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import PeerStatus, ReconnectingTransport

log = logging.getLogger("cgd.transport")

STOPPED = "its program stopped, and its own output says why; the sums continue when it is restarted"
POLL_SECONDS = 0.2
SAVE_SECONDS = 5.0
MAX_PAUSE_WHEN_FULL_SECONDS = 0.05
# Frames that are processed before the next ones are sent.
MAX_FRAMES_PER_TURN = 32


class JournalStore(Protocol):
    """Storage for journals that survives the process."""

    def append(self, group: str, place: int, entry: Sequence[Buffer]) -> bool:
        """Append an entry, given in pieces, to a group's journal; return whether that succeeded."""

    def rotate(self, group: str) -> None:
        """Start a new segment: `save` will be called for the journal as it is now, later entries follow it."""

    def save(self, group: str, length: int, *journal: Buffer) -> bool:
        """Replace all entries up to `length` by the serialised journal, in pieces; return whether that succeeded."""


class FederationRuntime:
    """Runs the membership protocol over a transport until it is closed.

    Args:
        transport: carries the frames.
        membership: this participant's side of the federation.
        timeout: seconds that a sum waits while no frame is received from any peer; None waits without limit.
        linger: seconds to stay at most for members that still run after this program has finished; None for no limit.
        store: stores the journals, so that members that are killed at the same time lose nothing.
        on_close: called when everything is closed.
        patience: seconds of silence after which the others go on without a peer, if there is a quorum.
    """

    def __init__(
        self,
        transport: ReconnectingTransport,
        membership: Membership,
        timeout: float | None = None,
        linger: float | None = 0.0,
        store: JournalStore | None = None,
        on_close: Callable[[], None] = lambda: None,
        patience: float = inf,
    ) -> None:
        if timeout is not None and not timeout > 0:  # also NaN
            raise InputError(f"timeout is {timeout}; it is a number of seconds above 0, or None to wait without limit")
        self.membership, self.transport = membership, transport
        self.traffic, self.waiting = Traffic(), WaitingClock()
        self._timeout, self._linger = timeout, linger
        self._store, self._on_close = store, on_close
        self._storing = threading.Lock()  # held while entries are stored; its holder does not wait for `_changed`
        self._saver: threading.Thread | None = None  # saves snapshots, which takes longer than the peers should wait
        self._saved: dict[str, tuple[int, float]] = {}  # the length and time of the last `store.save`, by group
        self._persisted = {name: len(membership.group(name).journal) for name in membership.groups}
        membership.on_pending_reveal = self._persist_pending_reveal
        membership.on_present = self._log_present
        self._silence = SilenceClock(patience)
        self._changed = threading.Condition(threading.RLock())
        self._unsent: dict[PeerId, Buffer] = {}
        self._last_received = time.monotonic()
        self._rejections = RejectionLog()
        self._states, self._history = StateLog(), StateHistory()
        self._announced = False  # for whom our first sum waits
        self._failure: BaseException | None = None
        self._closed = self._close_at_once = self._done = False
        self._closing = threading.Lock()
        self._wait_condition: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name=f"cgd-runtime-{membership.me}", daemon=True)
        self._thread.start()

    def update(self, federation_spec: FederationSpec, contacts: Mapping[PeerId, Any], patience: float = inf) -> None:
        """Switch to another epoch of the federation, with these members and addresses."""
        self.transport.update(contacts)
        with self._changed:
            self._silence.patience = patience
            self.membership.adopt(federation_spec)
            self._changed.notify_all()
        self.transport.wakeup()

    def fail(self, error: BaseException) -> None:
        """Stop: raise this error in the thread that waits for a sum."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Stop as `fail` does, and make `close` return without waiting for the other members."""
        self._close_at_once = True
        self.fail(error)

    def report(self) -> list[PeerReport]:
        """Return the status of every peer and of the hub."""
        links = self.transport.status()
        with self._changed:
            problems = self.membership.suspected() | self.membership.problems()
            left = {peer: self.membership.left(peer) for peer in self.membership.others}
            hellos = {peer: self.membership.hello(peer) for peer in left}
        reports = []
        for peer in left:  # not membership.others: a new epoch may have started
            link = links.get(peer)
            if left[peer] is not None:
                state, note = ("done", "") if left[peer] else ("left", STOPPED)
                reports.append(PeerReport(peer, state, note))
            elif link is None or not link.connected:
                reports.append(PeerReport(peer, "missing", link.problem if link else "not in this epoch"))
            elif hellos[peer] is None:
                reports.append(PeerReport(peer, "missing", link.problem or "connected; its Hello has not arrived yet"))
            elif peer in problems:
                reports.append(PeerReport(peer, "refused", problems[peer], link.latency))
            else:
                reports.append(PeerReport(peer, "here", link.problem, link.latency))
        if (link := links.get(HUB)) is not None:
            reports.append(PeerReport(HUB, "here" if link.connected else "missing", link.problem, link.latency))
        with self._changed:
            return self._history.add(reports)

    def announce_done(self) -> None:
        """Announce that our program takes part in no further sum; `close` does not revoke it. Keep answering peers."""
        self.waiting.stop()
        with self._changed:
            self._done = True
            self.membership.send_goodbye(True)
        self.transport.wakeup()

    def close(self, *, done: bool) -> None:
        """Leave the federation; with `done`, stay until all programs have finished, so that others can recover.

        Several threads may call it; a call with done=False ends the wait of another one. All return when it is closed.
        """
        self._close_at_once = self._close_at_once or not done
        with self._closing:
            self._close(done=done)

    def _close(self, *, done: bool) -> None:
        self.waiting.stop()
        with self._changed:
            if self._closed:
                return
            self._done = self._done or done
            self.membership.send_goodbye(self._done)
            self.transport.wakeup()
            if done and self._failure is None:
                deadline = inf if self._linger is None else time.monotonic() + self._linger
                self._wait_condition = lambda: self.membership.all_done
                wait = Wait()
                while not (self.membership.all_done or self._close_at_once or time.monotonic() >= deadline):
                    if wait.reminder_is_due():
                        running = [peer for peer in self.membership.others if not self.membership.left(peer)]
                        self._remind(wait, "the end of its program", running)
                    self._changed.wait(POLL_SECONDS)
            differences = self.membership.differences() if done and self._failure is None else {}
            self._closed = True
            self._changed.notify_all()
        self.transport.wakeup()
        self._thread.join()  # the thread sends the remaining frames before it exits
        deadline = time.monotonic() + FLUSH_SECONDS
        while self.transport.backlog(connected=True) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        self._save_journals(now=True)
        self.transport.close()
        self._on_close()
        if differences:
            texts = "; ".join(f"{peer} has {what}" for peer, what in sorted(differences.items()))
            raise DisagreementError(
                f"the programs are done, and members end with different histories: {texts}. Do not use this model "
                "before you know who is wrong"
            )

    # Called by the groups' drivers.

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return self.membership.me

    @contextmanager
    def locked(self) -> Iterator[Membership]:
        """Lock the membership against the runtime's thread, and return it."""
        with self._changed:
            self._check()
            yield self.membership

    def wait(self, group: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition of a locked membership holds; the lock is released meanwhile."""
        if not condition():
            with self.waiting.in_sum(group):
                self._wait(group, condition)

    def _wait(self, group: str, condition: Callable[[], bool]) -> None:
        self._last_received = time.monotonic()
        self._announce_wait()
        wait = Wait()
        self._wait_condition = condition
        self.transport.wakeup()
        while not condition():
            self._check()
            if self.membership.equivocation is not None:
                raise self.membership.equivocation
            if self._timeout is not None and time.monotonic() - self._last_received > self._timeout:
                what, missing = self.membership.waiting_for(group)
                raise timeout_error(self.report(), missing, what, self._timeout)
            if wait.reminder_is_due():
                self._remind(wait, *self.membership.waiting_for(group))
            self._changed.wait(POLL_SECONDS)

    def _announce_wait(self) -> None:
        """Log once for whom our first sum waits, without reasons: members are not started in the same second."""
        if self._announced:
            return
        self._announced = True
        if names := ", ".join(each.name for each in self.report() if each.absent):
            log.info("waiting for %s", names, extra={"event": "waiting"})

    def _remind(self, wait: Wait, what: str, waited_for: Collection[PeerId]) -> None:
        """Log a warning, which is printed even if the user displays no status table."""
        if text := wait.reminder(self.report(), waited_for, what):
            log.warning("%s", text, extra={"event": "waiting"})

    def persist_new_entries(self, group: str, journal: Journal) -> None:
        """Store the new entries of a group's journal.

        This is done before the program gets a total. So no later sum of any group can finish unless all members of
        this group have stored the sums before it. The membership need not be locked: meanwhile the runtime's thread
        sends our last messages of the sum, for which others wait.
        """
        if self._store is None:
            return
        with self._storing:
            self._append_new_entries(self._store, group, journal)

    def _append_new_entries(self, store: JournalStore, group: str, journal: Journal) -> None:
        """Append to the stored journal what it lacks; the caller holds `_storing`."""
        persisted, length = self._persisted.get(group, 0), len(journal)
        if length > persisted + 1:  # a peer sent us entries; the states that came with them are stored, too
            snapshot = journal.snapshot()
            length = len(snapshot)
            store.rotate(group)
            store.save(group, length, *snapshot.pieces())
        elif length > persisted:
            store.append(group, persisted, journal.entry_record(persisted))
        self._persisted[group] = max(persisted, length)

    def _persist_pending_reveal(self, group: Group) -> None:
        """Store that this member is about to reveal its self-mask key, after all entries before that."""
        self.persist_new_entries(group.name, group.journal)
        record = group.journal.pending_reveal_record()
        if self._store is None:
            return
        with self._storing:
            if not self._store.append(group.name, len(group.journal), record):
                self._saved[group.name] = -1, 0.0  # save a snapshot as soon as possible, although no entry was added

    def _check(self) -> None:
        if isinstance(self._failure, CGDError):
            raise self._failure
        if self._failure is not None:
            raise LocalProtocolError(f"the runtime of {self.me} stopped: {self._failure}") from self._failure
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; join again for further sums")

    # The runtime's thread.

    def _run(self) -> None:
        full_pause, last_check = MIN_PAUSE_WHEN_FULL_SECONDS, 0.0
        try:
            while not self._closed:
                sent = self._send_all()
                full_pause = MIN_PAUSE_WHEN_FULL_SECONDS if sent else min(2 * full_pause, MAX_PAUSE_WHEN_FULL_SECONDS)
                with self._changed:
                    self.waiting.idle(self.membership)
                received = self._receive(full_pause if self._unsent else POLL_SECONDS)
                self.waiting.busy()
                while received is not None and not self._closed:
                    received = self._process_frames(received)
                    full_pause = MIN_PAUSE_WHEN_FULL_SECONDS
                    self._send_all()
                if time.monotonic() - last_check > POLL_SECONDS:
                    last_check = time.monotonic()
                    # When our program is done, members end one after the other, and nobody is missed.
                    reports = self.report()
                    self._note_silence()
                    self.waiting.absent = frozenset(each.name for each in reports if each.absent)
                    self._states.add(each for each in reports if not (self._done and each.state == "missing"))
                    self._save_journals()
            self._send_all()
        except ClosedError:
            pass
        except BaseException as error:
            log.exception("the runtime of %s stopped", self.me, extra={"event": "failed"})
            self._failure = error
        with self._changed:
            self._changed.notify_all()
        if self._saver is not None:
            self._saver.join()

    def _note_silence(self) -> None:
        """Let the members that are present go on without those that have been silent for too long."""
        links = self.transport.status()
        with self._changed:
            silent = {peer: _silent_seconds(links.get(peer)) for peer in self.membership.others}
            self.membership.set_absent(self._silence.update(silent))
            self._changed.notify_all()

    def _log_present(self, before: frozenset[PeerId]) -> None:
        """Log who is absent from now on, and who is back."""
        present, members = self.membership.present, self.membership.federation_spec.members
        count = f"{len(present)} of {len(members)} members"
        gone = [f"{peer} (silent for {self._silence.seconds(peer):.0f} s)" for peer in sorted(before - present)]
        extra = {"event": "present", "present": sorted(present)}
        if gone:
            log.warning("continuing without %s; %s", ", ".join(gone), count, extra=extra)
        if back := sorted(present - before):
            log.info("%s %s back; %s", ", ".join(back), "is" if len(back) == 1 else "are", count, extra=extra)

    def _receive(self, seconds: float) -> tuple[PeerId, Buffer] | None:
        try:
            return self.transport.receive(seconds)
        except InputError as error:  # a recording fails; the thread must still send our Goodbye
            self.fail(error)
            return None

    def _send_all(self) -> bool:
        """Send until only frames for peers with a full queue remain; return whether any frame was sent."""
        sent = False
        for peer, frame in list(self._unsent.items()):
            if self._send(peer, frame):
                del self._unsent[peer]
                sent = True
        while True:
            with self._changed:
                outgoing = self.membership.next_outgoing(self._unsent)
                if outgoing is None:
                    self._notify()
                    return sent
            if self._send(*outgoing):
                sent = True
            else:
                self._unsent[outgoing[0]] = outgoing[1]

    def _send(self, to: PeerId, frame: Buffer) -> bool:
        if to not in (*self.transport.members, HUB):
            return True  # removed in this epoch
        try:
            if not self.transport.send(to, frame):
                return False
        except MembershipError:  # removed in this moment
            return True
        self.traffic.frames_sent += 1
        self.traffic.bytes_sent += len(frame)
        return True

    def _process_frames(self, received: tuple[PeerId, Buffer] | None) -> tuple[PeerId, Buffer] | None:
        """Process some frames; return the next one if there are more."""
        with self._changed:
            for _ in range(MAX_FRAMES_PER_TURN):
                if received is None:
                    break
                sender, frame = received
                self.traffic.frames_received += 1
                self.traffic.bytes_received += len(frame)
                self._last_received = time.monotonic()
                with self._rejections.catch_errors(sender):
                    try:
                        self.membership.receive(sender, frame)
                    except RemoteProtocolError as error:
                        self._rejections.add(error.peer, "a frame", str(error))
                received = self._receive(0.0)
            self._notify()
        return received

    def _notify(self) -> None:
        """Wake the program's thread if its condition holds; waking it for every frame would be slow."""
        with suppress(MembershipError):  # its group is gone: the program's thread finds that out itself
            if self._wait_condition():
                self._changed.notify_all()

    def _save_journals(self, *, now: bool = False) -> None:
        """Save the journals that have grown since they were saved, at most every `SAVE_SECONDS`, or `now`."""
        if self._store is None or (self._saver is not None and self._saver.is_alive() and not now):
            return
        if self._saver is not None:
            self._saver.join()
        with self._changed:
            due = {}
            with self._storing:
                for name in filter(partial(self._is_due, now=now), self.membership.groups):
                    snapshot = self.membership.group(name).journal.snapshot()
                    self._append_new_entries(self._store, name, snapshot)  # they are on the disk before the snapshot
                    self._store.rotate(name)
                    due[name] = snapshot, self._saved[name]
        if due:
            self._saver = threading.Thread(target=self._save, args=(due,), name=f"cgd-journal-{self.me}", daemon=True)
            self._saver.start()
            if now:
                self._saver.join()

    def _is_due(self, name: str, now: bool) -> bool:
        """Return whether a group's journal has to be saved; the caller has locked the membership."""
        length, saved_at = self._saved.setdefault(name, (0, time.monotonic()))
        changed = len(self.membership.group(name).journal) != length
        return changed and (now or time.monotonic() - saved_at >= SAVE_SECONDS)

    def _save(self, journals: Mapping[str, tuple[Journal, tuple[int, float]]]) -> None:
        """Save snapshots of journals, each with its state in `_saved` when it was made; in a thread of its own."""
        assert self._store is not None  # noqa: S101 - for the type checker
        for name, (snapshot, before) in journals.items():
            saved = self._store.save(name, len(snapshot), *snapshot.pieces())
            with self._storing:
                if self._saved[name] == before:  # else a record could not be stored meanwhile, and this lacks it
                    self._saved[name] = len(snapshot) if saved else -1, time.monotonic()  # a failure is tried again


def _silent_seconds(status: PeerStatus | None) -> float:
    """Return for how long a peer has been silent; if that is not measured, for ever if it is not connected."""
    if status is None or (status.silent is None and not status.connected):
        return inf
    return status.silent or 0.0
