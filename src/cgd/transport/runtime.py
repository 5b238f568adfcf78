"""`FederationRuntime`: drives a federation in a thread of its own.

A participant must answer its peers at any time, also while its program computes a gradient: greet one that comes back,
give it the ledger, tell where we stand. So the assembly is driven here, and the program's thread only leaves a sum to
be made and waits for its total.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import (
    CGDError,
    ClosedError,
    DisagreementError,
    HubError,
    InputError,
    LocalProtocolError,
    MembershipError,
    PeerTimeoutError,
    RemoteProtocolError,
)
from cgd.secagg.messages import HUB
from cgd.transport.auth import RejectionLog
from cgd.transport.driver import FAREWELL_SECONDS, MIN_PAUSE_WHEN_FULL_SECONDS, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.membership import Membership
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.transport.base import ReconnectingTransport

log = logging.getLogger("cgd.transport")

STOPPED = "its program stopped, and its own screen says why; all go on when it is started again"
LOOK_SECONDS = 0.2
TELL_SECONDS = 10.0
SAVE_SECONDS = 5.0
MAX_PAUSE_WHEN_FULL_SECONDS = 0.05
# Frames taken in before the next ones are sent.
TURN = 32


@dataclass(frozen=True)
class PeerReport:
    """How it stands with one peer, for people.

    Attributes:
        name: of the peer; the hub has a report, too, if there is one.
        state: "here", "done", "left", "missing" or "refused".
        note: why, if it is not here.
        latency: seconds to it and back, if known.
    """

    name: PeerId
    state: str
    note: str = ""
    latency: float | None = None


class JournalStore(Protocol):
    """Where ledgers outlive the process."""

    def append(self, group: str, place: int, entry: Sequence[Buffer]) -> None:
        """Keep one more entry of a group's ledger, given in pieces."""

    def turn(self, group: str) -> None:
        """The ledger as it is now will be saved; what is appended from now on goes with it."""

    def save(self, group: str, length: int, journal: bytes) -> bool:
        """Keep a group's ledger as it was, in place of all entries up to this length; whether that worked."""


class FederationRuntime:
    """Drives an assembly over a transport until it is closed.

    Args:
        transport: carries the frames.
        assembly: our side of the federation.
        timeout: how many seconds a sum waits while nothing comes from anybody; None waits for ever.
        linger: how many seconds we stay at most for the others when our program is done; None for as long as it takes.
        store: keeps the ledgers, so that members who die together lose nothing.
        on_close: called when all is closed.
    """

    def __init__(
        self,
        transport: ReconnectingTransport,
        membership: Membership,
        timeout: float | None = None,
        linger: float | None = 0.0,
        store: JournalStore | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        if timeout is not None and timeout <= 0:
            raise InputError(f"timeout is {timeout}; it is a number of seconds above 0, or None to wait for ever")
        self.membership = membership
        self.transport = transport
        self.traffic = Traffic()
        self._timeout = timeout
        self._linger = linger
        self._store = store
        self._on_close = on_close
        self._saved: dict[str, tuple[int, float]] = {}
        self._entered: dict[str, int] = {name: len(membership.group(name).journal) for name in membership.groups}
        membership.on_mark = self._keep_mark
        self._changed = threading.Condition(threading.RLock())
        self._unsent: dict[PeerId, bytes] = {}
        self._heard = time.monotonic()
        self._rejections = RejectionLog()
        self._states: dict[PeerId, tuple[str, str]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._hurried = False
        self._closing = threading.Lock()
        self._until: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name=f"cgd-conductor-{membership.me}", daemon=True)
        self._thread.start()

    def adopt(self, federation_spec: FederationSpec, contacts: Mapping[PeerId, Any]) -> None:
        """Hold to a new charter, whose members are found there."""
        self.transport.update(contacts)
        with self._changed:
            self.membership.adopt(federation_spec)
            self._changed.notify_all()
        self.transport.wake()

    def fail(self, error: BaseException) -> None:
        """Stop: whoever waits for a sum gets this error."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Stop, and do not stay for the others either: whoever waits in `close` closes at once."""
        self._hurried = True
        self.fail(error)

    def report(self) -> list[PeerReport]:
        """How it stands with every peer."""
        links = self.transport.status()
        with self._changed:
            problems = self.membership.doubts() | self.membership.problems()
            left = {peer: self.membership.left(peer) for peer in self.membership.others}
            hellos = {peer: self.membership.hello(peer) for peer in left}
        reports = []
        for peer in left:  # not of the assembly: a new epoch may have begun
            link = links.get(peer)
            if left[peer] is not None:
                state, note = ("done", "") if left[peer] else ("left", STOPPED)
                reports.append(PeerReport(peer, state, note))
            elif link is None or not link.connected:
                reports.append(PeerReport(peer, "missing", link.problem if link else "not in this epoch"))
            elif hellos[peer] is None:
                reports.append(PeerReport(peer, "missing", link.problem or "connected; its greeting is on the way"))
            elif peer in problems:
                reports.append(PeerReport(peer, "refused", problems[peer], link.latency))
            else:
                reports.append(PeerReport(peer, "here", "", link.latency))
        if (link := links.get(HUB)) is not None:
            reports.append(PeerReport(HUB, "here" if link.connected else "missing", link.problem, link.latency))
        return reports

    def close(self, *, done: bool) -> None:
        """Leave; if our program is done, we stay for a while until everybody's is, to be asked for the past.

        Several threads may call it. Who says that we are not done hurries one that stays; all return when it is closed.
        """
        self._hurried = self._hurried or not done
        with self._closing:
            self._close(done=done)

    def _close(self, *, done: bool) -> None:
        with self._changed:
            if self._closed:
                return
            self.membership.farewell(done)
            self.transport.wake()
            if done and self._failure is None:
                deadline = None if self._linger is None else time.monotonic() + self._linger
                self._until = lambda: self.membership.all_done
                while not (
                    self.membership.all_done or self._hurried or (deadline is not None and time.monotonic() >= deadline)
                ):
                    self._changed.wait(LOOK_SECONDS)
            differences = self.membership.differences() if done and self._failure is None else {}
            self._closed = True
            self._changed.notify_all()
        self.transport.wake()
        self._thread.join()  # its last deed is to send what is left to be said
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.transport.backlog(connected=True) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 10)
        self._save_all(now=True)
        self.transport.close()
        self._on_close()
        if differences:
            texts = "; ".join(f"{peer} has {what}" for peer, what in sorted(differences.items()))
            raise DisagreementError(
                f"the programs are done, and members end with different histories: {texts}. Do not use this model "
                "before you know who is wrong"
            )

    # What the groups' drivers call.

    @property
    def me(self) -> PeerId:
        """This member's name."""
        return self.membership.me

    @contextmanager
    def holding(self) -> Iterator[Membership]:
        """The assembly, while nobody else touches it."""
        with self._changed:
            self._check()
            yield self.membership

    def wait(self, group: str, until: Callable[[], bool]) -> None:
        """Wait, holding the assembly, until something is the case."""
        if until():
            return
        self._heard = time.monotonic()
        patience = self._heard + TELL_SECONDS
        self._until = until
        self.transport.wake()
        while not until():
            self._check()
            if self.membership.conviction is not None:
                raise self.membership.conviction
            if self._timeout is not None and time.monotonic() - self._heard > self._timeout:
                what, missing = self.membership.waiting_for(group)
                notes = {report.name: report.note for report in self.report() if report.note}
                why = "; ".join(f"{peer}: {notes[peer]}" for peer in sorted(missing) if peer in notes)
                raise PeerTimeoutError(missing, self._timeout, f"{what}{'; ' + why if why else ''}")
            if time.monotonic() > patience:
                patience = inf
                self._tell_who_is_missing()
            self._changed.wait(LOOK_SECONDS)

    def _tell_who_is_missing(self) -> None:
        """For those who look at no table and no log: a warning reaches the screen all the same."""
        away = [report for report in self.report() if report.state in ("missing", "refused", "left")]
        if away:
            names = "; ".join(f"{report.name}: {report.note or report.state}" for report in away)
            log.warning("%s waits for %s", self.me, names, extra={"event": "waiting"})

    def keep(self, group: str) -> None:
        """Keep what is new in a group's ledger; the caller holds the assembly.

        This is done before our program gets a total. So whatever is summed later, by whichever group, nobody has it
        unless all members of this group have kept what came before.
        """
        if self._store is None:
            return
        journal = self.membership.group(group).journal
        entered = self._entered.get(group, 0)
        if len(journal) > entered + 1:  # others have caught us up: what the entries alone do not tell is in the states
            self._store.turn(group)
            self._store.save(group, len(journal), journal.to_bytes())
        elif len(journal) > entered:
            self._store.append(group, entered, journal.entry(entered))
        self._entered[group] = len(journal)

    def _keep_mark(self, group: Group) -> None:
        """Keep that our key is about to leave us, and what came before: others may have caught us up since."""
        self.keep(group.name)
        if self._store is not None:
            self._store.append(group.name, len(group.journal), group.journal.mark_record())

    def _check(self) -> None:
        if isinstance(self._failure, CGDError):
            raise self._failure
        if self._failure is not None:
            raise LocalProtocolError(f"the conductor of {self.me} stopped: {self._failure}") from self._failure
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; join again for further sums")

    # What the thread does.

    def _run(self) -> None:
        full_pause, looked = MIN_PAUSE_WHEN_FULL_SECONDS, 0.0
        try:
            while not self._closed:
                moved = self._send_all()
                full_pause = MIN_PAUSE_WHEN_FULL_SECONDS if moved else min(2 * full_pause, MAX_PAUSE_WHEN_FULL_SECONDS)
                received = self._receive(full_pause if self._unsent else LOOK_SECONDS)
                while received is not None and not self._closed:
                    received = self._take_in(received)
                    full_pause = MIN_PAUSE_WHEN_FULL_SECONDS
                    self._send_all()
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._note_states()
                    self._save_all()
            self._send_all()
        except ClosedError:
            pass
        except BaseException as error:
            log.exception("the conductor of %s stopped", self.me, extra={"event": "failed"})
            self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _receive(self, seconds: float) -> tuple[PeerId, Buffer] | None:
        try:
            return self.transport.receive(seconds)
        except (HubError, InputError) as error:  # or a recording cannot go on; we do, to tell the others that we leave
            self.fail(error)
            return None

    def _send_all(self) -> bool:
        """Send until nothing is left but for peers that are full; whether anything went out."""
        moved = False
        for peer, frame in list(self._unsent.items()):
            if self._send(peer, frame):
                del self._unsent[peer]
                moved = True
        while True:
            with self._changed:
                outgoing = self.membership.next_outgoing(self._unsent)
                if outgoing is None:
                    self._notify()
                    return moved
            if self._send(*outgoing):
                moved = True
            else:
                self._unsent[outgoing[0]] = outgoing[1]

    def _send(self, to: PeerId, frame: bytes) -> bool:
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

    def _take_in(self, received: tuple[PeerId, Buffer] | None) -> tuple[PeerId, Buffer] | None:
        """Take in some frames; the next one, if there are more."""
        with self._changed:
            for _ in range(TURN):
                if received is None:
                    break
                sender, frame = received
                self.traffic.frames_received += 1
                self.traffic.bytes_received += len(frame)
                self._heard = time.monotonic()
                self._hand_over(sender, frame)
                received = self._receive(0.0)
            self._notify()
        return received

    def _hand_over(self, sender: PeerId, frame: Buffer) -> None:
        """Give a frame to the assembly; whatever comes of it, we go on."""
        with self._rejections.guard(sender):
            try:
                self.membership.receive(sender, frame)
            except RemoteProtocolError as error:
                self._rejections.add(error.peer, "a frame", str(error))

    def _notify(self) -> None:
        """Wake the program if what it waits for is there; not for less, because that would happen often."""
        if self._until():
            self._changed.notify_all()

    def _note_states(self) -> None:
        """Log who comes and goes."""
        for report in self.report():
            if self._states.get(report.name) == (report.state, report.note):
                continue
            self._states[report.name] = report.state, report.note
            log.info(
                "%s is %s%s", report.name, report.state, f": {report.note}" if report.note else "",
                extra={"event": "peer", "peer": report.name, "state": report.state, "note": report.note},
            )  # fmt: skip

    def _save_all(self, *, now: bool = False) -> None:
        if self._store is None:
            return
        with self._changed:
            names = self.membership.groups
        for name in names:
            length, when = self._saved.get(name, (0, time.monotonic()))
            with self._changed:
                if name not in self.membership.groups:
                    continue
                journal = self.membership.group(name).journal
                if len(journal) == length or (not now and time.monotonic() - when < SAVE_SECONDS):
                    self._saved.setdefault(name, (length, when))
                    continue
                self._store.turn(name)
                length, content = len(journal), journal.to_bytes()
                self._entered[name] = length
            saved = self._store.save(name, length, content)
            self._saved[name] = length if saved else -1, time.monotonic()  # if not, it is tried again
