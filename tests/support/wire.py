"""A simulated network: frames of different members arrive in any order, and all of them twice, late, or changed."""

from __future__ import annotations

import os
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import DisagreementError, RemoteProtocolError
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, SumSpec
from cgd.secagg.reduction import HubKeys
from cgd.secagg.session import Session

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Opening


# Without the hub, which is not a member.
MEMBER_OPENINGS: tuple[Opening, ...] = ("mesh", "aggregator")


def names(count: int) -> list[str]:
    return [f"p{i}" for i in range(count)]


def pair_keys(members: Sequence[str]) -> dict[str, dict[str, bytes]]:
    keys: dict[str, dict[str, bytes]] = {member: {} for member in members}
    for one, other in combinations(members, 2):
        keys[one][other] = keys[other][one] = os.urandom(16)
    return keys


def sessions(count: int, session: bytes = b"s" * 16) -> dict[str, Session]:
    members = names(count)
    keys = pair_keys(members)
    made = {me: Session(me, members, session, keys[me]) for me in members}
    for each in made.values():
        each.hub = HubKeys("everyone", b"h" * 16)
    return made


def spec(
    size: int, masking: Masking = "pairwise", opening: Opening = "mesh", ring_bits: int = 32, aggregator: str = "p0"
) -> SumSpec:
    return SumSpec((size,), "float32", ring_bits, 20, masking, opening, aggregator if opening == "aggregator" else "")


def random_secrets(rng: random.Random, count: int, size: int, ring_bits: int = 32) -> list[npt.NDArray[Any]]:
    dtype = f"<u{ring_bits // 8}"
    return [np.frombuffer(rng.randbytes(size * ring_bits // 8), dtype=dtype).copy() for _ in range(count)]


def ring_total(secrets: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    total: npt.NDArray[Any] = np.sum(secrets, axis=0, dtype=secrets[0].dtype)
    return total


class Network:
    """Delivers the frames of sessions, also to and from the hub, one at a time in an order that `rng` decides.

    As every transport, it keeps the order of the frames from one to another; but it may repeat them later.
    """

    def __init__(self, members: dict[str, Session], rng: random.Random, duplicates: float = 0.0) -> None:
        self.members = members
        self.aggregator = HubAggregator({"everyone": list(members)})
        self.rng = rng
        self.duplicates = duplicates
        self.in_flight: list[tuple[str, str, bytes]] = []
        self.delivered: list[tuple[str, str, bytes]] = []

    def collect(self) -> None:
        for sender, session in self.members.items():
            while (outgoing := session.next_outgoing()) is not None:
                self.in_flight.append((sender, outgoing[0], bytes(outgoing[1])))

    def deliver_one(self) -> None:
        chosen = self.rng.choice(self.in_flight)
        sender, to, frame = next(each for each in self.in_flight if each[:2] == chosen[:2])
        self.in_flight.remove((sender, to, frame))
        if self.rng.random() < self.duplicates:
            self.in_flight.append((sender, to, frame))
        self.delivered.append((sender, to, frame))
        if to == HUB:
            members, total = self.aggregator.receive(sender, frame) or ((), b"")
            self.in_flight += [(HUB, member, bytes(total)) for member in members]
        else:
            self.members[to].receive(sender, frame)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver until nothing is in flight, or `until` returns True."""
        self.collect()
        while self.in_flight and not until():
            self.deliver_one()
            self.collect()

    def run_past_faults(self) -> dict[str, RemoteProtocolError | DisagreementError]:
        """Deliver everything, although members fail; return the first error of each."""
        errors: dict[str, RemoteProtocolError | DisagreementError] = {}
        self.collect()
        while self.in_flight:
            try:
                self.deliver_one()
            except (RemoteProtocolError, DisagreementError) as error:
                errors.setdefault(self.delivered[-1][1], error)
            self.collect()
        return errors
