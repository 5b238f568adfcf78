"""Participants that are killed and restarted, all inside this process: real members over a simulated network.

Only the transport is simulated. A test pauses a program at a step of its loop (`MemberProcess.at_step`), or holds back
a frame (`InMemoryNetwork.hold`), and thereby decides at which moment a participant is killed.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import pytest

from cgd.errors import CGDError
from cgd.federation import config, config_edit, member
from cgd.federation.keys import Keys
from support.in_memory_network import Connection, InMemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cgd import Peers
    from cgd.optim.grid import Cell
    from cgd.secagg.journal import Journal
    from cgd.secagg.messages import PeerId

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
        """True if the program has ended."""
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        """True if its runtime runs: it was not killed and has not failed."""
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

    def __enter__(self) -> Self:
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
