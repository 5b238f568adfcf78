"""Participants that are killed and restarted, all inside this process: real members over a simulated network.

Only the transport is simulated. A test pauses a program at a step of its loop (`MemberProcess.at_step`), or holds back
a frame (`InMemoryNetwork.hold`), and thereby decides at which moment a participant is killed.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import CGDError, ClosedError
from cgd.federation import config, config_edit, member
from cgd.federation.keys import Keys
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.transport.base import PeerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from cgd import Peers
    from cgd.optim.grid import Cell
    from cgd.secagg.journal import Journal
    from cgd.secagg.messages import Message, PeerId

    Program = Callable[["MemberProcess"], Any]

FEDERATION = "trial"
DEADLINE_SECONDS = 20.0
LINGER_SECONDS = 5.0
POLL_SECONDS = 0.002


class KilledError(CGDError):
    """The process was killed."""


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], object] = lambda: "the condition was never met"
) -> None:
    """Wait until a condition holds; fail with the result of `otherwise` after a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(POLL_SECONDS)


# The network.


class HeldFrames:
    """Frames of one sender that are held back, from the first that matches on, for each recipient."""

    def __init__(self, sender: PeerId, to: Collection[PeerId], matches: Callable[[Message], bool]) -> None:
        self.sender = sender
        self._to = to
        self._matches = matches
        self.frames: list[tuple[PeerId, bytes]] = []

    @property
    def reached(self) -> set[PeerId]:
        """The recipients for which frames are held back."""
        return {to for to, _ in self.frames}

    def take(self, to: PeerId, message: Message, data: bytes) -> bool:
        """Hold back this frame if it is the first that matches, or a later one; return whether it was."""
        if to not in self._to or (to not in self.reached and not self._matches(message)):
            return False
        self.frames.append((to, data))
        return True


class InMemoryNetwork:
    """Deliver frames completely and in order; unread frames are delivered to the next process of the recipient.

    Attributes:
        connected: the connection of each participant that sends and receives; earlier ones are cut off.
        rewrite: a function that may change a frame on its way.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connected: dict[PeerId, Connection] = {}
        self.rewrite: Callable[[PeerId, PeerId, Frame], Frame] = lambda _sender, _to, frame: frame
        self._unread: defaultdict[PeerId, deque[tuple[PeerId, bytes]]] = defaultdict(deque)
        self._holds: list[HeldFrames] = []

    def connect(self, me: PeerId, contacts: Mapping[PeerId, Any], _secret: bytes, _listen: str | None) -> Connection:
        """Return a connection; replaces `ZeroMQTransport`, and cuts off an earlier connection of this participant."""
        with self.lock:
            self.connected[me] = Connection(self, me, contacts)
            return self.connected[me]

    def hold(self, sender: PeerId, to: Collection[PeerId], matches: Callable[[Message], bool]) -> HeldFrames:
        """Hold back the first matching message to each of these recipients, and all later ones."""
        with self.lock:
            self._holds.append(HeldFrames(sender, to, matches))
            return self._holds[-1]

    def release(self, hold: HeldFrames) -> None:
        """Deliver the frames that are held back, unless their sender was killed."""
        with self.lock:
            if hold in self._holds:
                self._holds.remove(hold)
                for to, data in hold.frames:
                    self._deliver(hold.sender, to, data)

    def drop_held(self, sender: PeerId) -> None:
        """Drop the frames of a killed sender that are held back."""
        self._holds = [hold for hold in self._holds if hold.sender != sender]

    def send(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        """Send a frame of the sender's present connection."""
        frame = from_bytes(data, sender)
        rewritten = self.rewrite(sender, to, frame)
        data = data if rewritten is frame else to_bytes(rewritten)
        if not any(hold.sender == sender and hold.take(to, frame.message, data) for hold in self._holds):
            self._deliver(sender, to, data)

    def next_for(self, me: PeerId) -> tuple[PeerId, bytes] | None:
        """Return the next frame for the present connection of a participant."""
        return self._unread[me].popleft() if self._unread[me] else None

    def _deliver(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        self._unread[to].append((sender, data))
        if to in self.connected:
            self.connected[to].notify()


class Connection:
    """The transport of one process; implements `ReconnectingTransport`.

    Attributes:
        sent: the number of messages sent, by kind.
    """

    def __init__(self, network: InMemoryNetwork, me: PeerId, contacts: Mapping[PeerId, Any]) -> None:
        self.me = me
        self.members: tuple[PeerId, ...] = tuple(sorted(contacts))
        self.sent: Counter[type[Message]] = Counter()
        self._network = network
        self._received = threading.Condition(network.lock)
        self._woken = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether this is the present connection of its participant."""
        return self._network.connected.get(self.me) is self

    def send(self, to: PeerId, frame: bytes) -> bool:
        """Send a frame; the queue is never full."""
        with self._network.lock:
            if self.connected:
                self.sent[type(from_bytes(frame, self.me).message)] += 1
                self._network.send(self.me, to, frame)
        return True

    def receive(self, timeout: float | None) -> tuple[PeerId, bytes] | None:
        """Return the next frame for this participant, if this is its present connection."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._network.lock:
            while True:
                if self._closed:
                    raise ClosedError(f"the connection of {self.me} is closed")
                if self.connected and (received := self._network.next_for(self.me)) is not None:
                    return received
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._woken or (remaining is not None and remaining <= 0):
                    self._woken = False
                    return None
                self._received.wait(remaining)

    def notify(self) -> None:
        """Wake `receive` after a frame was delivered."""
        with self._network.lock:
            self._received.notify_all()

    def wakeup(self) -> None:
        """Make `receive` return."""
        with self._network.lock:
            self._woken = True
            self._received.notify_all()

    def close(self) -> None:
        """Disconnect; frames of this participant that are held back are dropped."""
        with self._network.lock:
            if self.connected:
                del self._network.connected[self.me]
                self._network.drop_held(self.me)
            self._closed = True
            self._received.notify_all()

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Set the members."""
        self.members = tuple(sorted(contacts))

    def status(self) -> dict[PeerId, PeerStatus]:
        """Return the status of every peer."""
        with self._network.lock:
            here = set(self._network.connected) if self.connected else set()
        return {peer: PeerStatus(peer in here, problem="away") for peer in self.members if peer != self.me}

    def backlog(self, *, connected: bool) -> int:
        """Return the number of queued frames: delivery is immediate."""
        return 0


# Processes.


class MemberProcess:
    """One simulated process of a participant: a `FederationMember`, and its program in a thread.

    Args:
        participant: the participant.
        program: a function that is called with this process.
        halt: the step of the program's loop before which it halts; see `at_step`.

    Attributes:
        step: the present step of the program's loop; -1 before the first.
        result: the return value of the program.
        error: the exception of the program.
    """

    def __init__(self, participant: member.FederationMember, program: Program, pause_at: int | None = None) -> None:
        assert isinstance(participant.runtime.transport, Connection)
        self.member = participant
        self.connection = participant.runtime.transport
        self.step = -1
        self.result: Any = None
        self.error: BaseException | None = None
        self._pause_at = pause_at
        self._killed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self._thread.start()

    @property
    def name(self) -> PeerId:
        return self.member.me

    @property
    def peers(self) -> Peers:
        return self.member.peers

    @property
    def finished(self) -> bool:
        """Whether the program has ended."""
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        """Whether its runtime runs: it was not killed and has not failed."""
        return self.member.runtime._thread.is_alive()

    def journal(self, group: str = "everyone") -> Journal:
        return self.member.runtime.membership.group(group).journal

    def waiting_for(self, group: str = "everyone") -> tuple[str, frozenset[PeerId]]:
        with self.member.runtime.locked() as membership:
            return membership.waiting_for(group)

    def is_waiting_for(self, what: str, *peers: PeerId) -> bool:
        """Return whether the program waits in a sum with everyone for this message, from exactly these peers."""
        return self.waiting_for() == (what, frozenset(peers))

    def at_step(self, step: int) -> None:
        """Record that the program's loop is at this step; pause if the test asks for it. Called by programs."""
        with self._changed:
            self.step = step
            self._changed.wait_for(lambda: self._killed or self._pause_at is None or step < self._pause_at)
            if self._killed:
                raise KilledError(f"{self.name} was killed at step {step}")

    def wait_for_step(self, step: int) -> None:
        """Wait until the program's loop has reached this step."""
        wait_until(lambda: self.step >= step or self.finished, lambda: (self.name, self.step, self.waiting_for()))
        assert self.step >= step, self.error

    def resume(self, pause_at: int | None = None) -> None:
        """Resume the program, up to another step if one is given."""
        with self._changed:
            self._pause_at = pause_at
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop cleanly, as by Ctrl-C: peers are notified, and the state is saved."""
        self.peers.close()
        self._end()

    def disconnect(self) -> None:
        """First half of a kill: disconnect, so that no peer receives anything from now on."""
        self.connection.close()

    def finish_kill(self) -> BaseException | None:
        """Second half of a kill: stop all threads without saving; return the error if it had already failed."""
        runtime = self.member.runtime
        runtime._thread.join()
        failure = runtime._failure
        runtime.fail(KilledError(f"{self.name} was killed"))
        self._end()
        with suppress(OSError):
            self.member._close()  # closes the files; all entries are written already
        return failure

    def _end(self) -> None:
        with self._changed:
            self._killed = True
            self._changed.notify_all()
        self._thread.join(DEADLINE_SECONDS)
        assert self.finished

    def _run(self, program: Program) -> None:
        try:
            self.result = program(self)
        except BaseException as error:
            self.error = error


def new_federation(folder: Path, names: Sequence[str], cells: Sequence[Cell] = ()) -> Path:
    """Write the file of a new federation, and the keys of all participants next to it."""
    participants = []
    for place, name in enumerate(names):
        keys = Keys.generate(name)
        keys.save(folder)
        participants.append(participant_entry(keys, place, cells[place] if cells else None))
    config_edit.create_federation(folder / "federation.toml", FEDERATION, participants)
    return folder / "federation.toml"


def participant_entry(keys: Keys, place: int, cell: Cell | None = None) -> config.Participant:
    """Return a participant with an address that is not used."""
    return config.Participant(keys.name, f"tcp://127.0.0.1:{7000 + place}", keys.public, cell)


class InProcessFederation:
    """The participants of a federation file, with their present processes.

    Args:
        path: the federation file, with the keys next to it.
        state: the folder for all state folders.
    """

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self.network = InMemoryNetwork()
        self.processes: dict[str, MemberProcess] = {}
        self._state = state

    @property
    def names(self) -> tuple[str, ...]:
        return config.Federation.load(self.path).names

    def __getitem__(self, name: str) -> MemberProcess:
        return self.processes[name]

    def __iter__(self) -> Iterator[MemberProcess]:
        return iter(self.processes.values())

    def __enter__(self) -> InProcessFederation:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self.processes)

    def folder(self, name: str) -> Path:
        """Return the state folder of a participant."""
        return self._state / name

    def start(
        self,
        name: str,
        program: Program,
        *,
        pause_at: int | None = None,
        timeout: float | None = None,
        path: Path | None = None,
        state: Path | None = None,
    ) -> MemberProcess:
        """Start a process; `path` and `state` replace the common federation file and the usual state folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member, "ZeroMQTransport", self.network.connect)
            participant = member.FederationMember(
                path or self.path,
                name,
                key=self.path.parent / f"{name}.key",
                state=state or self.folder(name),
                timeout=timeout,
                linger=LINGER_SECONDS,
            )
        self.processes[name] = MemberProcess(participant, program, pause_at)
        return self.processes[name]

    def start_all(self, program: Program, *, pause_at: int | None = None, timeout: float | None = None) -> None:
        for name in self.names:
            self.start(name, program, pause_at=pause_at, timeout=timeout)

    def kill(self, *names: str, lose_state: bool = False) -> None:
        """Kill the processes of these participants, all at the same moment."""
        processes = [self.processes.pop(name) for name in names]
        for process in processes:
            process.disconnect()
        failures = {process.name: process.finish_kill() for process in processes}
        if lose_state:
            for name in names:
                shutil.rmtree(self.folder(name), ignore_errors=True)
        assert not any(failures.values()), failures

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; fail with the state of all processes after a deadline."""
        wait_until(condition, self._describe)

    def errors(self, *names: str) -> dict[str, BaseException | None]:
        """Wait for the programs of these participants, or of all, and return their exceptions."""
        processes = [self.processes[name] for name in names or self.processes]
        self.wait_until(lambda: all(process.finished for process in processes))
        return {process.name: process.error for process in processes}

    def results(self) -> dict[str, Any]:
        """Wait for all programs and return their results; none may fail."""
        self.wait_until(lambda: all(process.finished for process in self) or any(process.error for process in self))
        assert not any(process.error for process in self), self._describe()
        return {process.name: process.result for process in self}

    def _describe(self) -> dict[str, object]:
        return {
            process.name: process.error or ("finished" if process.finished else (process.step, process.waiting_for()))
            for process in self
        }


def uninterrupted_results(path: Path, state: Path, program: Program) -> dict[str, Any]:
    """Return the results of all programs without interruptions."""
    with InProcessFederation(path, state) as federation:
        federation.start_all(program)
        return federation.results()
