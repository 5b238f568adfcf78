"""A hub and its participants in this process, over real sockets; and a hub that tampers with messages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from cgd.errors import HubError
from cgd.peers import Peers, SumSettings
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.journal import Journal
from cgd.secagg.membership import Membership
from cgd.secagg.messages import HUB, Buffer
from cgd.transport.connections import Contact
from cgd.transport.group_driver import GroupDriver, GroupRecovery
from cgd.transport.hub import Hub, HubClient
from cgd.transport.runtime import FederationRuntime
from cgd.transport.zeromq import ZeroMQTransport
from support.identities import identity, public_keys
from support.ports import free_port
from support.transports import DEADLINE_SECONDS, MEMBERS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy.typing as npt

    Relayed = list[tuple[str, str, bytes]]

EVERYONE = "everyone"


class RecordedView:
    """Every message that a hub has received or sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[bool, str, bytes, bytes]] = []

    def record(self, inward: bool, peer: str, name: bytes, payload: Buffer) -> None:
        self.messages.append((inward, peer, name, bytes(payload)))

    def __contains__(self, piece: bytes) -> bool:
        return any(piece in payload for _, _, _, payload in self.messages)


class Participant:
    """A running participant without a program: the test requests its sums."""

    def __init__(
        self, federation: HubFederation, name: str, journals: Mapping[str, Journal] | None, timeout: float
    ) -> None:
        self.transport = ZeroMQTransport(name, federation.contacts, federation.pairs[name][1])
        self.membership = Membership(name, identity(name), federation.spec, journals)
        self.runtime = FederationRuntime(self.transport, self.membership, timeout)
        self.peers = {
            group: Peers(
                GroupDriver(self.runtime, group), federation.settings, recovery=GroupRecovery(self.runtime, group)
            )
            for group in self.membership.groups
        }

    def kill(self) -> dict[str, bytes]:
        """Stop it without a Goodbye; return its journals."""
        self.transport.close()
        self.runtime._thread.join()
        self.runtime.fail(RuntimeError("killed"))
        return {name: self.membership.group(name).journal.to_bytes() for name in self.membership.groups}


class HubFederation:
    """A federation with a hub.

    Args:
        dialers: the participants without an address.
        settings: the settings of the sums.
        groups: the members of each group; everyone, if not given.
        hub: the class of the hub.
        timeout: the timeout of the participants.
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
        self.spec = FederationSpec("trial", 1, members, named, {"training": "x"}, "1.0", public_keys(members))
        self.view = RecordedView()
        self.hub: Hub | None = None
        self.participants: dict[str, Participant] = {}
        self._hub_class = hub
        self._timeout = timeout

    def __enter__(self) -> HubFederation:
        return self

    def __exit__(self, *outcome: object) -> None:
        for participant in self.participants.values():
            participant.kill()
        self.kill_hub()

    def start_hub(self) -> Hub:
        participants = {name: contact for name, contact in self.contacts.items() if name != HUB}
        self.hub = self._hub_class(
            participants, self.spec.groups, self.pairs[HUB][1], self.contacts[HUB].address, self.view.record
        )
        return self.hub

    def kill_hub(self) -> None:
        if self.hub is not None:
            self.hub.close()
            self.hub = None

    def start(self, *names: str, journals: Mapping[str, bytes] | None = None) -> None:
        for name in names or self.spec.members:
            loaded = {group: Journal.from_bytes(content) for group, content in (journals or {}).items()}
            self.participants[name] = Participant(self, name, loaded, self._timeout)

    def sums(
        self, values: Mapping[str, npt.NDArray[Any]], group: str = EVERYONE, count: int = 1
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, BaseException]]:
        """Sum the values `count` times at all members; return the last totals and the errors."""
        totals: dict[str, npt.NDArray[Any]] = {}
        errors: dict[str, BaseException] = {}
        for thread in self._start_sums(values, group, count, totals, errors):
            thread.join(2 * DEADLINE_SECONDS)
            assert not thread.is_alive()
        return totals, errors

    def sum_until_hub_fault(self, values: Mapping[str, npt.NDArray[Any]], count: int = 1) -> HubError:
        """Sum until a member raises HubError, then kill all members; return the error."""
        totals: dict[str, npt.NDArray[Any]] = {}
        errors: dict[str, BaseException] = {}
        threads = self._start_sums(values, EVERYONE, count, totals, errors)
        eventually(lambda: any(isinstance(error, HubError) for error in errors.values()) or len(totals) == len(values))
        for name in list(self.participants):
            self.participants.pop(name).kill()
        for thread in threads:
            thread.join()
        return next(error for error in errors.values() if isinstance(error, HubError))

    def _start_sums(
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

        peers = {name: self.participants[name].peers[group] for name in values}
        threads = [threading.Thread(target=work, args=each) for each in peers.items()]
        for thread in threads:
            thread.start()
        return threads


class TamperingHub(Hub):
    """A hub that relays what `tamper` returns for each message: senders, recipients and payloads."""

    tamper: Callable[[str, str, bytes], Relayed] = staticmethod(lambda sender, to, payload: [(sender, to, payload)])

    def _relay(self, client: HubClient, to: bytes, payload: Buffer) -> None:
        for sender, recipient, content in self.tamper(client.peer, to.decode(), bytes(payload)):
            super()._relay(self._clients[sender], recipient.encode(), content)


class RestartableProgram:
    """A participant's program that can be killed and restarted; it runs one sum after the other."""

    def __init__(
        self, federation: HubFederation, name: str, count: int, addend: Callable[[str, int], npt.NDArray[Any]]
    ) -> None:
        self.federation, self.name, self.count, self._addend = federation, name, count, addend
        self.totals: list[bytes] = []
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, journals: Mapping[str, bytes] | None = None) -> None:
        self.federation.start(self.name, journals=journals)
        self.totals, self.error = [], None
        participant = self.federation.participants[self.name]
        self._thread = threading.Thread(target=self._work, args=(participant, self.totals))
        self._thread.start()

    def _work(self, participant: Participant, totals: list[bytes]) -> None:
        try:
            for number in range(self.count):
                values = self._addend(self.name, number)
                totals.append(participant.peers[EVERYONE].sum(values).tobytes())
        except BaseException as error:
            if self.federation.participants[self.name] is participant:
                self.error = error

    def kill(self) -> dict[str, bytes]:
        journals = self.federation.participants[self.name].kill()
        assert self._thread is not None
        self._thread.join()
        self.error = None
        return journals

    @property
    def done(self) -> bool:
        return len(self.totals) == self.count or self.error is not None


def random_addend(name: str, number: int) -> npt.NDArray[Any]:
    seed = sum(map(ord, name)) * 1000 + number
    return np.random.default_rng(seed).normal(size=40).astype(np.float32)
