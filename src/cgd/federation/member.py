"""`join`: from a federation file and a key to connected peers."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import cgd
from cgd.errors import CGDError, InputError, MembershipError
from cgd.federation.config import Federation
from cgd.federation.keys import Keys, find_key
from cgd.federation.state import StateFolder
from cgd.files import stamp
from cgd.peers import Peers
from cgd.secagg.membership import Membership
from cgd.transport.addresses import host_and_port
from cgd.transport.group_driver import GroupDriver
from cgd.transport.runtime import FederationRuntime
from cgd.transport.tap import TappedReconnectingTransport
from cgd.transport.zeromq import ZeroMQTransport

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from cgd.secagg.journal import Journal
    from cgd.transport.base import ReconnectingTransport
    from cgd.transport.connections import Contact
    from cgd.transport.tap import Sink

log = logging.getLogger("cgd.federation")

EVERYONE = "everyone"
WATCH_SECONDS = 1.0


class FederationMember:
    """One participant's running part in a federation: its connection, its state on disk, its eye on the file.

    `cgd.join` is the short way; this is for whoever wants to look inside, such as the command line.

    Args:
        path: the federation file; or what it says, for a federation that has no file of its own to watch.
        participant: which of its participants we are.
        key: our private key file; `PARTICIPANT.key` beside the federation file or here if not given.
        address: where others find us, if not where the file says: after a move to another machine.
        listen: where to bind, such as `tcp://0.0.0.0:7001`, if not at the port of our address.
        state: a folder for what outlives this process; `state/PARTICIPANT` beside the federation file if not given.
        timeout: how many seconds a sum waits while nothing comes from anybody; None waits for ever.
        linger: how many seconds to stay at most for the others when our program is done; None for as long as it takes.
        sink: is given every frame that we receive, for a recording; called by the conductor's thread.

    Raises:
        InputError: the file, the key, the address or the state folder cannot be used.
        TransportError: the port is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Federation,
        participant: str,
        *,
        key: str | os.PathLike[str] | None = None,
        address: str | None = None,
        listen: str | None = None,
        state: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        linger: float | None = 60.0,
        sink: Sink | None = None,
    ) -> None:
        self.federation = path if isinstance(path, Federation) else Federation.load(path)
        self.path = self.federation.path
        self.me = self.federation.participant(participant).name
        self.keys = Keys.load(key or find_key(self.path, participant))
        if self.keys.public != self.federation.participant(participant).key:
            raise InputError(
                f"the key file's public key is {self.keys.public}, and {self.path} lists another for {participant}; "
                "use the right key file, or have the new key listed"
            )
        if address is not None:
            host_and_port(address)
            if not self.federation.participant(participant).address:
                raise InputError(
                    f"{participant} has no address in {self.path}: it only dials out, to the hub; leave out --address, "
                    "or have its address listed"
                )
        self._address = address
        self._doubted = False
        folder = Path(state) if state is not None else self.path.parent / "state" / participant
        self.state = StateFolder(folder, self.federation.name)
        self.state.lock()
        try:
            journals = self.state.load(self.groups)
            self._check_epoch(journals)
            membership = Membership(
                self.me, self.keys.identity, self.federation.federation_spec(cgd.__version__), journals
            )
            transport: ReconnectingTransport = ZeroMQTransport(self.me, self._contacts(), self.keys.secret, listen)
            if sink is not None:
                transport = TappedReconnectingTransport(transport, sink)
        except BaseException:
            self.state.close()
            raise
        self._stop = threading.Event()
        self.runtime = FederationRuntime(transport, membership, timeout, linger, self.state, self._close)
        self.peers = self._peers()
        if not isinstance(path, Federation):
            threading.Thread(target=self._watch, name=f"cgd-file-{self.me}", daemon=True).start()

    @property
    def groups(self) -> list[str]:
        """The names of the groups that we sum with."""
        return [name for name, members in self.federation.groups().items() if self.me in members]

    def _contacts(self) -> dict[str, Contact]:
        contacts = self.federation.contacts_and_hub
        if self._address is not None:
            contacts[self.me] = replace(contacts[self.me], address=self._address)
        return contacts

    def _peers(self) -> Peers:
        settings = self.federation.settings
        seed = self.keys.federation_seed(self.federation.name)
        training = asdict(self.federation.training)
        groups = {}
        for name, members in self.federation.groups().items():
            if name != EVERYONE and self.me in members:
                kind = name.split("-")[0]
                foreign = settings.opening == "aggregator" and settings.aggregator not in members
                own = replace(settings, opening="mesh", aggregator="") if foreign else settings
                groups[kind] = Peers(GroupDriver(self.runtime, name), own, seed=seed, training=training)
        return Peers(GroupDriver(self.runtime, EVERYONE), settings, seed=seed, groups=groups, training=training)

    def _close(self) -> None:
        self._stop.set()
        self.state.close()

    # Epochs.

    def _check_epoch(self, journals: Mapping[str, Journal]) -> None:
        latest = max((entry.epoch for journal in journals.values() for entry in journal.entries), default=0)
        if latest > self.federation.epoch:
            raise InputError(
                f"{self.path} is of epoch {self.federation.epoch}, and {self.me} has taken part in epoch {latest}; "
                "get the newest federation file from another participant"
            )

    def _watch(self) -> None:
        """Adopt a new epoch of the federation file when the operator puts one there."""
        seen = None  # the first look reads it: it may have changed since we did
        while not self._stop.wait(WATCH_SECONDS):
            found = stamp(self.path)
            if found == seen:
                continue
            seen = found
            try:
                self._take_over(Federation.load(self.path))
            except MembershipError as error:
                self.runtime.fail(error)
            except CGDError as error:  # whatever it is, the next file must be read
                self._doubted = True
                log.warning("the federation file has changed and is not used: %s", error, extra={"event": "file"})

    def _take_over(self, new: Federation) -> None:
        if new.digest == self.federation.digest:
            if self._doubted:
                log.info("the federation file is as it was", extra={"event": "file"})
            self._doubted = False
            return
        self._doubted = True  # until it is taken over
        for section in ("training", "data", "model"):
            if getattr(new, section) != getattr(self.federation, section):
                raise InputError(
                    f"its [{section}] has changed, which running participants cannot; stop them all, then join"
                )
        if new.name != self.federation.name or new.epoch <= self.federation.epoch:
            raise InputError(
                f"it is {new.name!r}, epoch {new.epoch}, and we are in {self.federation.name!r}, epoch "
                f"{self.federation.epoch}; raise its epoch, or stop and join again"
            )
        if self.me not in new.contacts:
            raise MembershipError(f"{self.me} is no longer in the federation: it was removed in epoch {new.epoch}")
        before, after = self.federation.participant(self.me).address, new.participant(self.me).address
        if bool(before) != bool(after):
            raise InputError(
                f"it {'gives' if after else 'takes away'} the address of {self.me}, and a running participant cannot "
                "begin or cease to listen; stop it and join again"
            )
        ours, theirs = self.federation.participant(self.me).cell, new.participant(self.me).cell
        if ours != theirs:
            raise InputError(
                f"it moves {self.me} from cell {ours} to {theirs}, and a running program cannot follow: its model and "
                "data are those of a column; leave it where it is, or stop it and join anew"
            )
        self.federation, self._doubted = new, False
        self.runtime.adopt(new.federation_spec(cgd.__version__), self._contacts())
        names = ", ".join(sorted(new.contacts))
        log.info("epoch %d: %s", new.epoch, names, extra={"event": "epoch", "epoch": new.epoch})


def join(
    path: str | os.PathLike[str],
    participant: str,
    *,
    key: str | os.PathLike[str] | None = None,
    address: str | None = None,
    listen: str | None = None,
    state: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    linger: float | None = 60.0,
) -> Peers:
    """Take part in a federation: the same `Peers` as `local_peers` gives, over the network.

    It returns at once. The first sum waits until everybody is there. See `FederationMember` for the arguments, and
    docs/operations.md for what happens when somebody is killed, comes back, is removed or joins late.

    Examples:
        ```python
        with cgd.join("federation.toml", participant="hospital-a") as peers:
            cgd.confine(model, delta=0.1, seed=peers.seed)
            optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
            for step in range(200):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        ```
    """
    membership = FederationMember(
        path, participant, key=key, address=address, listen=listen, state=state, timeout=timeout, linger=linger
    )
    return membership.peers
