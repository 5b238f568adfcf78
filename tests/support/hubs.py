"""A hub and its participants inside this process, over real sockets; and hubs that do what they must not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from cgd.errors import HubError
from cgd.peers import Peers, SumSettings
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.journal import Journal
from cgd.secagg.membership import Membership
from cgd.secagg.messages import HUB
from cgd.transport.connections import Contact
from cgd.transport.group_driver import GroupDriver
from cgd.transport.hub import Hub, HubClient
from cgd.transport.runtime import FederationRuntime
from cgd.transport.zeromq import ZeroMQTransport
from support.identities import identity, public_keys
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy.typing as npt

MEMBERS = ("a", "b", "c")
EVERYONE = "everyone"
DEADLINE_SECONDS = 60.0


def eventually(condition: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.02)


class View:
    """Everything that a hub has ever seen or sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[bool, str, bytes, bytes]] = []

    def record(self, inward: bool, peer: str, name: bytes, payload: bytes) -> None:
        self.messages.append((inward, peer, name, payload))

    def __contains__(self, piece: bytes) -> bool:
        return any(piece in payload for _, _, _, payload in self.messages)


class Participant:
    """One life of a participant, without a program: whoever has it asks for sums."""

    def __init__(self, town: Town, name: str, journals: Mapping[str, Journal] | None, timeout: float) -> None:
        self.transport = ZeroMQTransport(name, town.contacts, town.pairs[name][1])
        self.membership = Membership(name, identity(name), town.federation_spec, journals)
        self.runtime = FederationRuntime(self.transport, self.membership, timeout)
        self.peers = {group: Peers(GroupDriver(self.runtime, group), town.settings) for group in self.membership.groups}

    def kill(self) -> dict[str, bytes]:
        """Stop it without a word to anybody; what its ledgers were."""
        self.transport.close()
        self.runtime._thread.join()
        self.runtime.fail(RuntimeError("killed"))
        return {name: self.membership.group(name).journal.to_bytes() for name in self.membership.groups}


class Town:
    """Keys, addresses, a hub and participants.

    Args:
        dialers: those who only dial out.
        settings: how they sum.
        groups: who sums together; everyone, if not given.
        hub: what kind of hub.
    """

    def __init__(
        self,
        dialers: Collection[str] = MEMBERS,
        settings: SumSettings | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        hub: type[Hub] = Hub,
        timeout: float = DEADLINE_SECONDS,
    ) -> None:
        members = tuple(sorted((groups or {EVERYONE: MEMBERS})[EVERYONE]))
        self.pairs = {name: zmq.curve_keypair() for name in (*members, HUB)}
        addresses = {name: "" if name in dialers else f"tcp://127.0.0.1:{free_port()}" for name in self.pairs}
        self.contacts = {name: Contact(addresses[name], public) for name, (public, _) in self.pairs.items()}
        self.settings = settings or SumSettings(opening="hub")
        named = {name: tuple(each) for name, each in (groups or {EVERYONE: MEMBERS}).items()}
        self.federation_spec = FederationSpec(
            "trial", 1, members, named, {"training": "x"}, "1.0", public_keys(members)
        )
        self.view = View()
        self.hub: Hub | None = None
        self._kind = hub
        self._timeout = timeout
        self.lives: dict[str, Participant] = {}

    def __enter__(self) -> Town:
        return self

    def __exit__(self, *outcome: object) -> None:
        for life in self.lives.values():
            life.kill()
        self.kill_hub()

    def start_hub(self) -> Hub:
        participants = {name: contact for name, contact in self.contacts.items() if name != HUB}
        self.hub = self._kind(
            participants, self.federation_spec.groups, self.pairs[HUB][1], self.contacts[HUB].address, self.view.record
        )
        return self.hub

    def kill_hub(self) -> None:
        if self.hub is not None:
            self.hub.close()
            self.hub = None

    def start(self, *names: str, journals: Mapping[str, bytes] | None = None) -> None:
        for name in names or self.federation_spec.members:
            kept = {group: Journal.from_bytes(content) for group, content in (journals or {}).items()}
            self.lives[name] = Participant(self, name, kept, self._timeout)

    def sums(
        self, values: Mapping[str, npt.NDArray[Any]], group: str = EVERYONE, count: int = 1
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, BaseException]]:
        """Everybody sums its values, so many times; the last totals, and the errors."""
        totals: dict[str, npt.NDArray[Any]] = {}
        errors: dict[str, BaseException] = {}
        for thread in self._work(values, group, count, totals, errors):
            thread.join(2 * DEADLINE_SECONDS)
            assert not thread.is_alive()
        return totals, errors

    def blamed(self, values: Mapping[str, npt.NDArray[Any]], count: int = 1) -> HubError:
        """Everybody sums until somebody blames the hub; then all are killed."""
        totals: dict[str, npt.NDArray[Any]] = {}
        errors: dict[str, BaseException] = {}
        threads = self._work(values, EVERYONE, count, totals, errors)
        eventually(lambda: any(isinstance(error, HubError) for error in errors.values()) or len(totals) == len(values))
        for name in list(self.lives):
            self.lives.pop(name).kill()
        for thread in threads:
            thread.join()
        return next(error for error in errors.values() if isinstance(error, HubError))

    def _work(
        self,
        values: Mapping[str, npt.NDArray[Any]],
        group: str,
        count: int,
        totals: dict[str, npt.NDArray[Any]],
        errors: dict[str, BaseException],
    ) -> list[threading.Thread]:
        def work(name: str, peers: Peers) -> None:
            try:
                for done in range(1, count + 1):
                    total = peers.sum(values[name])
                    if done == count:
                        totals[name] = total
            except BaseException as error:
                errors[name] = error

        peers = {name: self.lives[name].peers[group] for name in values}
        threads = [threading.Thread(target=work, args=each) for each in peers.items()]
        for thread in threads:
            thread.start()
        return threads


class BentHub(Hub):
    """A hub that does to messages whatever `bend` says: what to pass on instead, as from whom, and to whom."""

    bend: Callable[[str, str, bytes], list[tuple[str, str, bytes]]] = staticmethod(
        lambda sender, to, payload: [(sender, to, payload)]
    )

    def _relay(self, client: HubClient, to: bytes, payload: bytes) -> None:
        for sender, recipient, content in self.bend(client.peer, to.decode(), payload):
            super()._relay(self._clients[sender], recipient.encode(), content)


class Worker:
    """A participant's program that is killed and begins again: it makes one sum after the other."""

    def __init__(self, town: Town, name: str, count: int, addend: Callable[[str, int], npt.NDArray[Any]]) -> None:
        self.town, self.name, self.count, self._addend = town, name, count, addend
        self.totals: list[bytes] = []
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, journals: Mapping[str, bytes] | None = None) -> None:
        self.town.start(self.name, journals=journals)
        self.totals, self.error = [], None
        life = self.town.lives[self.name]
        self._thread = threading.Thread(target=self._work, args=(life, self.totals))
        self._thread.start()

    def _work(self, life: Participant, totals: list[bytes]) -> None:
        try:
            for number in range(self.count):
                values = self._addend(self.name, number)
                totals.append(life.peers[EVERYONE].sum(values).tobytes())
        except BaseException as error:
            if self.town.lives[self.name] is life:
                self.error = error

    def kill(self) -> dict[str, bytes]:
        journals = self.town.lives[self.name].kill()
        assert self._thread is not None
        self._thread.join()
        self.error = None
        return journals

    @property
    def done(self) -> bool:
        return len(self.totals) == self.count or self.error is not None


def addend(name: str, number: int) -> npt.NDArray[Any]:
    seed = sum(map(ord, name)) * 1000 + number
    return np.random.default_rng(seed).normal(size=40).astype(np.float32)
