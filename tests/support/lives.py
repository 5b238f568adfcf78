"""Participants that are killed and come back, all inside this process: real memberships over a network of our own.

Nothing is made up but the transport. A test halts a program at a step of its loop (`Life.at`), or a wire at a frame
(`Network.hold`), and so decides at what moment somebody is killed.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import cgd
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

    Program = Callable[["Life"], Any]

FEDERATION = "trial"
DEADLINE_SECONDS = 20.0
LINGER_SECONDS = 5.0
LOOK_SECONDS = 0.002


class KilledError(CGDError):
    """The process was killed."""


def until(condition: Callable[[], object], otherwise: Callable[[], object] = lambda: "it never comes about") -> None:
    """Wait for something; if it does not come about, say how things are."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(LOOK_SECONDS)


# The network.


class Hold:
    """A wire that stands still from some frame on; what comes behind it waits, too."""

    def __init__(self, sender: PeerId, to: Collection[PeerId], first: Callable[[Message], bool]) -> None:
        self.sender = sender
        self._to = to
        self._first = first
        self.frames: list[tuple[PeerId, bytes]] = []

    @property
    def reached(self) -> set[PeerId]:
        """Those who lack the frame that it was to hold."""
        return {to for to, _ in self.frames}

    def take(self, to: PeerId, message: Message, data: bytes) -> bool:
        """Keep this frame back, if it is the one or comes behind it."""
        if to not in self._to or (to not in self.reached and not self._first(message)):
            return False
        self.frames.append((to, data))
        return True


class Network:
    """Carries frames whole and in order. What one life has not read is there for the next life of that name.

    Attributes:
        live: the life that has a participant's place, by name: it alone is heard, and hears.
        bend: what becomes of a frame on its way.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.live: dict[PeerId, Connection] = {}
        self.bend: Callable[[PeerId, PeerId, Frame], Frame] = lambda _sender, _to, frame: frame
        self._unread: defaultdict[PeerId, deque[tuple[PeerId, bytes]]] = defaultdict(deque)
        self._holds: list[Hold] = []

    def connect(self, me: PeerId, contacts: Mapping[PeerId, Any], _secret: bytes, _listen: str | None) -> Connection:
        """Called in the place of `ZeroMQTransport`; whoever had the name is heard no more."""
        with self.lock:
            self.live[me] = Connection(self, me, contacts)
            return self.live[me]

    def hold(self, sender: PeerId, to: Collection[PeerId], first: Callable[[Message], bool]) -> Hold:
        """Hold back the first such message on each of these wires, and whatever comes behind it."""
        with self.lock:
            self._holds.append(Hold(sender, to, first))
            return self._holds[-1]

    def release(self, hold: Hold) -> None:
        """Let what is held go on its way, unless its sender is dead."""
        with self.lock:
            if hold in self._holds:
                self._holds.remove(hold)
                for to, data in hold.frames:
                    self._deliver(hold.sender, to, data)

    def lose(self, sender: PeerId) -> None:
        """The sender is dead: what is held of its frames never comes."""
        self._holds = [hold for hold in self._holds if hold.sender != sender]

    def carry(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        """Take a frame from the life that has the sender's place."""
        frame = from_bytes(data, sender)
        bent = self.bend(sender, to, frame)
        data = data if bent is frame else to_bytes(bent)
        if not any(hold.sender == sender and hold.take(to, frame.message, data) for hold in self._holds):
            self._deliver(sender, to, data)

    def next_for(self, me: PeerId) -> tuple[PeerId, bytes] | None:
        """The next frame for the life that has this place."""
        return self._unread[me].popleft() if self._unread[me] else None

    def _deliver(self, sender: PeerId, to: PeerId, data: bytes) -> None:
        self._unread[to].append((sender, data))
        if to in self.live:
            self.live[to].stir()


class Connection:
    """The transport of one life; see `ReconnectingTransport`.

    Attributes:
        sent: how many messages of each kind it has sent.
    """

    def __init__(self, network: Network, me: PeerId, contacts: Mapping[PeerId, Any]) -> None:
        self.me = me
        self.members: tuple[PeerId, ...] = tuple(sorted(contacts))
        self.sent: Counter[type[Message]] = Counter()
        self._network = network
        self._stirred = threading.Condition(network.lock)
        self._woken = False
        self._closed = False

    @property
    def live(self) -> bool:
        """Whether it has its participant's place."""
        return self._network.live.get(self.me) is self

    def send(self, to: PeerId, frame: bytes) -> bool:
        """There is always room."""
        with self._network.lock:
            if self.live:
                self.sent[type(from_bytes(frame, self.me).message)] += 1
                self._network.carry(self.me, to, frame)
        return True

    def receive(self, timeout: float | None) -> tuple[PeerId, bytes] | None:
        """The next frame for our name, if the name is ours."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._network.lock:
            while True:
                if self._closed:
                    raise ClosedError(f"the connection of {self.me} is closed")
                if self.live and (received := self._network.next_for(self.me)) is not None:
                    return received
                left = None if deadline is None else deadline - time.monotonic()
                if self._woken or (left is not None and left <= 0):
                    self._woken = False
                    return None
                self._stirred.wait(left)

    def stir(self) -> None:
        """Something has come."""
        with self._network.lock:
            self._stirred.notify_all()

    def wake(self) -> None:
        """Let `receive` return."""
        with self._network.lock:
            self._woken = True
            self._stirred.notify_all()

    def close(self) -> None:
        """Give the place up; what is still held of ours is lost."""
        with self._network.lock:
            if self.live:
                del self._network.live[self.me]
                self._network.lose(self.me)
            self._closed = True
            self._stirred.notify_all()

    def update(self, contacts: Mapping[PeerId, Any]) -> None:
        """Have these members from now on."""
        self.members = tuple(sorted(contacts))

    def status(self) -> dict[PeerId, PeerStatus]:
        """Whoever lives is connected."""
        with self._network.lock:
            here = set(self._network.live) if self.live else set()
        return {peer: PeerStatus(peer in here, problem="away") for peer in self.members if peer != self.me}

    def backlog(self, *, connected: bool) -> int:
        """Frames are there at once."""
        return 0


# Those who live.


class Life:
    """One life of a participant: a membership, and a program in a thread of its own.

    Args:
        membership: its part in the federation.
        program: is called with this life.
        halt: the step of the program's loop before which it halts; see `at`.

    Attributes:
        step: the step that the program's loop is at; -1 before the first.
        result: what the program returned.
        error: what it raised.
    """

    def __init__(self, membership: member.FederationMember, program: Program, halt: int | None = None) -> None:
        assert isinstance(membership.runtime.transport, Connection)
        self.membership = membership
        self.connection = membership.runtime.transport
        self.step = -1
        self.result: Any = None
        self.error: BaseException | None = None
        self._halt = halt
        self._dead = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self._thread.start()

    @property
    def name(self) -> PeerId:
        return self.membership.me

    @property
    def peers(self) -> Peers:
        return self.membership.peers

    @property
    def over(self) -> bool:
        """Whether the program has ended."""
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether it is driven: nobody killed it, and nothing has stopped its conductor."""
        return self.membership.runtime._thread.is_alive()

    def journal(self, group: str = "everyone") -> Journal:
        return self.membership.runtime.membership.group(group).journal

    def waiting_for(self, group: str = "everyone") -> tuple[str, frozenset[PeerId]]:
        with self.membership.runtime.holding() as membership:
            return membership.waiting_for(group)

    def waits_for(self, what: str, *peers: PeerId) -> bool:
        """Whether the program is in a sum with everyone that waits for this, from these peers."""
        return self.waiting_for() == (what, frozenset(peers))

    def at(self, step: int) -> None:
        """For programs: the loop is at this step. If the test wants it to halt here, wait until it may go on."""
        with self._changed:
            self.step = step
            self._changed.wait_for(lambda: self._dead or self._halt is None or step < self._halt)
            if self._dead:
                raise KilledError(f"{self.name} was killed at step {step}")

    def until(self, step: int) -> None:
        """Wait until the program's loop has come to this step."""
        until(lambda: self.step >= step or self.over, lambda: (self.name, self.step, self.waiting_for()))
        assert self.step >= step, self.error

    def go_on(self, halt: int | None = None) -> None:
        """Let the program go on, to another step if one is given."""
        with self._changed:
            self._halt = halt
            self._changed.notify_all()

    def stop(self) -> None:
        """Leave in order, as by Ctrl-C: the others are told, and the whole state is saved."""
        self.peers.close()
        self._end()

    def cut(self) -> None:
        """The first half of a kill: from now on nothing that it does can be noticed by anybody else."""
        self.connection.close()

    def bury(self) -> BaseException | None:
        """The second half: it does nothing any more, and nothing more is saved. If it was dead already, of what."""
        runtime = self.membership.runtime
        runtime._thread.join()
        failure = runtime._failure
        runtime.fail(KilledError(f"{self.name} was killed"))
        self._end()
        with suppress(OSError):
            self.membership._close()  # the files; nothing waits to be written to them
        return failure

    def _end(self) -> None:
        with self._changed:
            self._dead = True
            self._changed.notify_all()
        self._thread.join(DEADLINE_SECONDS)
        assert self.over

    def _run(self, program: Program) -> None:
        try:
            self.result = program(self)
        except BaseException as error:
            self.error = error


def found(folder: Path, names: Sequence[str], cells: Sequence[Cell] = ()) -> Path:
    """Write the file of a new federation, and everybody's keys beside it."""
    participants = []
    for place, name in enumerate(names):
        keys = Keys.generate(name)
        keys.save(folder)
        participants.append(stranger(keys, place, cells[place] if cells else None))
    config_edit.new(folder / "federation.toml", FEDERATION, participants)
    return folder / "federation.toml"


def stranger(keys: Keys, place: int, cell: Cell | None = None) -> config.Participant:
    """A participant at an address where nobody looks."""
    return config.Participant(keys.name, f"tcp://127.0.0.1:{7000 + place}", keys.public, cell)


class Village:
    """The participants of a federation file, each in its present life.

    Args:
        path: the federation file, with the keys beside it.
        state: a folder for everybody's state folder.
    """

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self.network = Network()
        self.lives: dict[str, Life] = {}
        self._state = state

    @property
    def names(self) -> tuple[str, ...]:
        return config.Federation.load(self.path).names

    def __getitem__(self, name: str) -> Life:
        return self.lives[name]

    def __iter__(self) -> Iterator[Life]:
        return iter(self.lives.values())

    def __enter__(self) -> Village:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self.lives)

    def folder(self, name: str) -> Path:
        """Where a participant's state is."""
        return self._state / name

    def start(
        self,
        name: str,
        program: Program,
        *,
        halt: int | None = None,
        timeout: float | None = None,
        path: Path | None = None,
        state: Path | None = None,
    ) -> Life:
        """Begin a life; `path` and `state` are a federation file and a state folder of its own, if it has some."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member, "ZeroMQTransport", self.network.connect)
            membership = member.FederationMember(
                path or self.path,
                name,
                key=self.path.parent / f"{name}.key",
                state=state or self.folder(name),
                timeout=timeout,
                linger=LINGER_SECONDS,
            )
        self.lives[name] = Life(membership, program, halt)
        return self.lives[name]

    def start_all(self, program: Program, *, halt: int | None = None, timeout: float | None = None) -> None:
        for name in self.names:
            self.start(name, program, halt=halt, timeout=timeout)

    def kill(self, *names: str, lose_state: bool = False) -> None:
        """Kill these participants, all in one moment."""
        lives = [self.lives.pop(name) for name in names]
        for life in lives:
            life.cut()
        failures = {life.name: life.bury() for life in lives}
        if lose_state:
            for name in names:
                shutil.rmtree(self.folder(name), ignore_errors=True)
        assert not any(failures.values()), failures

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something; if it does not come about, say how it stands with everybody."""
        until(condition, self._how_it_stands)

    def errors(self, *names: str) -> dict[str, BaseException | None]:
        """What the programs of these participants, or of all, raised in the end."""
        lives = [self.lives[name] for name in names or self.lives]
        self.until(lambda: all(life.over for life in lives))
        return {life.name: life.error for life in lives}

    def results(self) -> dict[str, Any]:
        """What everybody's program returned in the end; none may fail."""
        self.until(lambda: all(life.over for life in self) or any(life.error for life in self))
        assert not any(life.error for life in self), self._how_it_stands()
        return {life.name: life.result for life in self}

    def _how_it_stands(self) -> dict[str, object]:
        return {life.name: life.error or ("over" if life.over else (life.step, life.waiting_for())) for life in self}


def undisturbed(path: Path, state: Path, program: Program) -> dict[str, Any]:
    """What the programs of a federation return if nobody dies."""
    with Village(path, state) as village:
        village.start_all(program)
        return village.results()


# What they do.


@dataclass(frozen=True)
class Training:
    """A program that trains, and sums a loss now and then; returns a digest of the displacement.

    Its data come from its name, its origin from its key. In a grid, the first layer belongs to its column.

    Attributes:
        steps: how many.
        more: how many samples it has besides those that belong to its name.
        lr: the step size.
        loop: whether it counts the steps by itself ("plain") or asks the optimiser which are left ("steps").
    """

    steps: int = 8
    more: int = 0
    lr: float = 0.5
    loop: Literal["plain", "steps"] = "plain"

    def __call__(self, life: Life) -> str:
        peers = life.peers
        x, y = self._data(peers.me)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        cgd.confine(model, delta=0.1, seed=peers.seed)
        first, rest = list(model[0].parameters()), list(model[2].parameters())
        groups: list[dict[str, Any]] = [{"params": first, "peers": peers.groups.get("column", peers)}, {"params": rest}]
        optimizer = cgd.ConfinedSGD(groups, lr=self.lr, peers=peers, samples=len(x), momentum=0.5)
        for step in range(self.steps) if self.loop == "plain" else optimizer.steps(self.steps):
            life.at(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 3 == 2:
                peers.sum(np.array([loss.item()]))
        return hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()[:16]

    def _data(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        x = torch.randn(5 + len(name) + self.more, 4, generator=generator)
        return x, (x.sum(1) > 0).long()
