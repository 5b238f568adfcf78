"""`join`: take part in a federation, given its file and a private key."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cgd
from cgd.errors import CGDError, InputError, MembershipError
from cgd.federation.config import Federation
from cgd.federation.keys import Keys, find_key
from cgd.federation.process_group import ranks_of_job
from cgd.federation.state import StateFolder
from cgd.files import watch
from cgd.peers import Peers, SumSettings
from cgd.secagg.attendance import epoch_of
from cgd.secagg.membership import Membership
from cgd.transport.addresses import host_and_port
from cgd.transport.group_driver import GroupDriver, GroupRecovery
from cgd.transport.ranks import OneRank, RankDriver, RankRecovery, describe_driver
from cgd.transport.runtime import FederationRuntime
from cgd.transport.tap import TappedReconnectingTransport
from cgd.transport.zeromq import ZeroMQTransport

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from cgd.secagg.journal import Journal
    from cgd.transport.base import ReconnectingTransport
    from cgd.transport.connections import Contact
    from cgd.transport.ranks import Ranks, Reply
    from cgd.transport.tap import FrameSink

log = logging.getLogger("cgd.federation")

EVERYONE = "everyone"
WATCH_SECONDS = 1.0


class FederationMember:
    """A participant that runs in this process: its connections, its state folder and a watcher of the federation file.

    `cgd.join` returns its `peers`; use this class for access to the rest, as the command line does.

    Args:
        path: the federation file; or its content.
        participant: the name of this participant.
        key: its private key file; by default `PARTICIPANT.key` next to the federation file or in this folder.
        address: where others connect to it, if not at the address in the file, for example after a move.
        listen: the address to bind, such as `tcp://0.0.0.0:7001`; by default the port of its address.
        state: the folder for its persistent state; by default `state/PARTICIPANT` next to the federation file.
        timeout: the number of seconds that a sum waits while nothing is received; None waits without limit.
        linger: the maximum number of seconds to stay for the others after the program is done; None has no limit.
        sink: called with every received frame, for a recorded trace; it runs on the runtime's thread.
        watch: adopt new epochs of the file, also if its content was passed.
        before_connecting: called with the state folder, which is locked, before anything is sent or logged about peers.
        ranks: the processes of this participant's job; this is rank 0. See `lead_ranks`.

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
        sink: FrameSink | None = None,
        watch: bool = False,
        before_connecting: Callable[[Path], None] = lambda _: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.federation = path if isinstance(path, Federation) else Federation.load(path)
        self.path = self.federation.path
        self.me = self.federation.participant(participant).name
        self._ranks = ranks or OneRank()
        if self._ranks.size > 1 and len(self.groups) > 1:
            raise InputError(
                f"{self.path} is a grid, in which a participant is one process and not a job of {self._ranks.size} "
                "ranks: its first layer has peers of its own. Start it without torchrun, or let all have one column"
            )
        self.keys = load_own_keys(self.federation, participant, key, address)
        self._address = address
        self._file_rejected = False
        self.state = state_folder(self.federation, participant, state)
        self.state.lock()
        try:
            before_connecting(self.state.folder)
            journals = self.state.load()
            _check_epoch(self.federation, self.me, journals)
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
        self.runtime = FederationRuntime(
            transport, membership, timeout, linger, self.state, self._close, self.federation.patience
        )
        self.peers = self._peers()
        if watch or not isinstance(path, Federation):
            threading.Thread(target=self._watch, name=f"cgd-file-{self.me}", daemon=True).start()

    @property
    def groups(self) -> list[str]:
        """The names of the groups that this participant is a member of."""
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
                # An aggregator that is not a member must not take part in the group's sums.
                outside = settings.opening == "aggregator" and settings.aggregator not in members
                group_settings = replace(settings, opening="mesh", aggregator="") if outside else settings
                groups[kind] = self._group_peers(name, group_settings, seed=seed, training=training)
        return self._group_peers(EVERYONE, settings, seed=seed, groups=groups, training=training)

    def _group_peers(self, group: str, settings: SumSettings, **options: Any) -> Peers:
        driver, recovery = GroupDriver(self.runtime, group), GroupRecovery(self.runtime, group)
        options["federation"] = self.federation.name
        if self._ranks.size > 1:
            leader = RankDriver(self._ranks, driver)
            return Peers(leader, settings, recovery=RankRecovery(leader, recovery), ranks=self._ranks, **options)
        return Peers(driver, settings, recovery=recovery, **options)

    def _close(self) -> None:
        self._stop.set()
        times = self.runtime.waiting.times()
        if times.waiting or times.summing:  # our program has summed
            for line in times.describe():
                log.info("%s", line, extra={"event": "waited"})
            self.state.save_waiting_times(times)
        self.state.close()

    # Epochs.

    def _watch(self) -> None:
        """Adopt a new epoch of the federation file when the operator changes the file."""
        for _ in watch(self.path, self._stop, WATCH_SECONDS):  # the file may have changed since it was loaded
            try:
                self._adopt(Federation.load(self.path))
            except MembershipError as error:
                self.runtime.fail(error)
            except CGDError as error:
                self._file_rejected = True
                log.warning("the changed federation file is not used: %s", error, extra={"event": "file"})
            except Exception:  # the thread must survive any error, to read the next version
                self._file_rejected = True
                log.exception("the changed federation file is not used", extra={"event": "file"})

    def _adopt(self, new: Federation) -> None:
        if new.digest == self.federation.digest:
            if self._file_rejected:
                log.info("the federation file has its previous content again", extra={"event": "file"})
            self._file_rejected = False
            return
        self._file_rejected = True  # until it is adopted below
        for section in ("training", "data", "model", "privacy"):
            if getattr(new, section) != getattr(self.federation, section):
                raise InputError(
                    f"its [{section}] has changed, which running participants cannot adopt; stop them all, then join"
                )
        if new.privacy is not None and new.quorum != self.federation.quorum:
            raise InputError(
                f"quorum in [absence] is {new.quorum} and was {self.federation.quorum}, and the noise of [privacy] is "
                "sized for it; keep it, or train again under another name"
            )
        if new.name != self.federation.name or new.epoch <= self.federation.epoch:
            raise InputError(
                f"it is {new.name!r}, epoch {new.epoch}, and {self.me} runs {self.federation.name!r}, epoch "
                f"{self.federation.epoch}; increase its epoch, or stop and join again"
            )
        if self.me not in new.contacts:
            raise MembershipError(f"{self.me} is no longer in the federation: it was removed in epoch {new.epoch}")
        before, after = self.federation.participant(self.me).address, new.participant(self.me).address
        if bool(before) != bool(after):
            raise InputError(
                f"it {'adds' if after else 'removes'} the address of {self.me}, and a running participant cannot start "
                "or stop listening; stop it and join again"
            )
        before_cell, after_cell = self.federation.participant(self.me).cell, new.participant(self.me).cell
        if before_cell != after_cell:
            raise InputError(
                f"it moves {self.me} from cell {before_cell} to {after_cell}, and a running program cannot follow, "
                "because its model and data belong to a column; keep the cell, or stop it and join again"
            )
        self.federation, self._file_rejected = new, False
        self.runtime.update(new.federation_spec(cgd.__version__), self._contacts(), new.patience)
        names = ", ".join(sorted(new.contacts))
        log.info("epoch %d: %s", new.epoch, names, extra={"event": "epoch", "epoch": new.epoch})


def load_own_keys(
    federation: Federation, participant: str, key: str | os.PathLike[str] | None, address: str | None = None
) -> Keys:
    """Return the keys of a participant, after checking that the federation file lists them.

    Args:
        federation: the federation file.
        participant: the participant.
        key: its private key file; by default `PARTICIPANT.key` next to the federation file or in this folder.
        address: where others connect to it, if not at the address in the file.

    Raises:
        InputError: the key or the address cannot be used.
        MembershipError: there is no such participant.
    """
    listed = federation.participant(participant)  # first: a mistyped name has no key file
    keys = Keys.load(key or find_key(federation.path, participant))
    if keys.public != listed.key:
        owner = next((each.name for each in federation.participants if each.key == keys.public), "")
        if owner:
            raise InputError(f"this is the key of {owner}; name the key file of {participant}")
        raise InputError(
            f"the key file's public key is {keys.public}, and {federation.path} lists another for {participant}; use "
            "the right key file, or list the new key"
        )
    if address is not None:
        host_and_port(address)
        if not listed.address:
            raise InputError(
                f"{participant} has no address in {federation.path}: it only dials out, to the hub; omit --address, or "
                "list its address"
            )
    return keys


def check_join(
    federation: Federation,
    participant: str,
    *,
    key: str | os.PathLike[str] | None = None,
    address: str | None = None,
    state: str | os.PathLike[str] | None = None,
) -> Path:
    """Check what `FederationMember` would check before it connects, and return the state folder; change nothing.

    Raises:
        InputError: the key, the address or the state folder cannot be used.
    """
    load_own_keys(federation, participant, key, address)
    folder = state_folder(federation, participant, state)
    folder.check()
    _check_epoch(federation, participant, folder.load())
    return folder.folder


def state_folder(federation: Federation, participant: str, state: str | os.PathLike[str] | None) -> StateFolder:
    """Return the folder for a participant's persistent state."""
    folder = Path(state) if state is not None else federation.path.parent / "state" / participant
    return StateFolder(folder, federation.name)


def _check_epoch(federation: Federation, participant: str, journals: Mapping[str, Journal]) -> None:
    latest = max((epoch_of(entry.epoch) for journal in journals.values() for entry in journal.entries), default=0)
    if latest > federation.epoch:
        raise InputError(
            f"{federation.path} has epoch {federation.epoch}, and {participant} has taken part in epoch {latest}; "
            "get the newest federation file from another participant"
        )


def lead_ranks(ranks: Ranks, participant: str, connect: Callable[[], FederationMember]) -> FederationMember:
    """Connect on rank 0 of a participant's job, and let the other ranks know what they need.

    Args:
        ranks: the ranks; the others call `follow_ranks`.
        participant: the name of the participant.
        connect: connects, with these ranks.

    Raises:
        CGDError: `connect` raised it; the other ranks get the same error.
        RankError: another rank failed, or joins as another participant.
    """
    connected: list[FederationMember] = []

    def start() -> Reply:
        connected.append(connect())
        return describe_peers(connected[0].peers), b""

    ranks.lead(_joining(participant), start)
    return connected[0]


def describe_peers(peers: Peers) -> dict[str, Any]:
    """Return what another rank needs for its `Peers`."""
    more = {"training": peers.training, "federation": peers.federation}
    return {
        "driver": describe_driver(peers),
        "settings": asdict(peers.settings),
        "seed": peers.seed.hex(),
        "more": more,
    }


def follow_ranks(ranks: Ranks, participant: str) -> Peers:
    """Return the peers of a rank other than 0, which get every total from rank 0.

    Raises:
        CGDError: rank 0 could not connect.
        RankError: another rank failed, or joins as another participant.
    """
    found, _ = ranks.lead(_joining(participant), lambda: ({}, b""))  # this rank does not call the function
    driver = RankDriver(ranks, None, found["driver"])
    settings, seed = SumSettings(**found["settings"]), bytes.fromhex(found["seed"])
    return Peers(driver, settings, recovery=RankRecovery(driver, None), seed=seed, ranks=ranks, **found["more"])


def _joining(participant: str) -> str:
    return f"join as {participant}"


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
    """Take part in a federation, and return `Peers` as `local_peers` does, over the network.

    It returns immediately; the first sum waits until all members are connected. See `FederationMember` for the
    arguments, and docs/operations.md for crashes, restarts, removed participants and late joiners.

    A participant may be a job of several processes, as torchrun starts them. Then all ranks call this function, after
    `torch.distributed.init_process_group`, and rank 0 alone connects and needs the files; see docs/tutorial.md.

    Raises:
        InputError: the file, the key, the address or the state folder cannot be used; or this is one of several
            processes of a job, and `torch.distributed` is not initialised.
        RankError: another rank of the job failed, or has not called this function.
        TransportError: the port is in use.

    Examples:
        ```python
        with cgd.join("federation.toml", participant="hospital-a") as peers:
            with cgd.public_seed(7):
                model = build_model()
            cgd.confine(model, delta=0.1, seed=peers.seed)
            optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
            for step in range(200):
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        ```
    """
    ranks = ranks_of_job()
    options: dict[str, Any] = {"key": key, "address": address, "listen": listen, "state": state, "ranks": ranks}
    connect = partial(FederationMember, path, participant, timeout=timeout, linger=linger, **options)
    try:
        return follow_ranks(ranks, participant) if ranks.rank else lead_ranks(ranks, participant, connect).peers
    except BaseException:
        ranks.close()
        raise
