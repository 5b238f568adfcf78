"""Everything `cgd` raises on purpose.

    CGDError
    ├── InputError (also a ValueError)    what you passed cannot be used; nothing was sent
    │   ├── RangeError                    a value does not fit the fixed point
    │   └── MembershipError               too few members, or not the members of this sum
    ├── DivergenceError                   a training loss is no longer finite
    ├── ProtocolError
    │   ├── LocalProtocolError            this side called the protocol out of order
    │   ├── WeightError                   the members' weights do not sum to one
    │   ├── MembersChangedError           a new epoch began during a sum: weight the addend anew
    │   ├── DisagreementError             members hold different totals or histories; nobody can tell who is wrong
    │   └── RemoteProtocolError           a member broke the rules; `.peer` names it
    │       ├── FrameError                its bytes are not a frame of this protocol
    │       ├── SettingsError             it sums under other settings than the rest
    │       ├── EquivocationError         it has signed different things for different members: it is dishonest
    │       ├── PeerAbortedError          it gave up this sum and said why
    │       ├── PeerLeftError             it left the session
    │       └── HubError                  the hub altered, swapped, repeated or lost messages, or added wrongly
    └── TransportError
        ├── PeerTimeoutError              nothing came from `.peers` in time
        └── ClosedError                   this side's connection is closed

and one warning, UnconfinedWarning: a model is about to be trained that `confine` did not draw.

A message states the fact, the value and the remedy. What travels to other members (the reason of an abort) never holds
a value: values stay in the error of the member that owns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class CGDError(Exception):
    """Base of everything `cgd` raises on purpose."""


class InputError(CGDError, ValueError):
    """What was passed cannot be used; nothing was sent."""


class RangeError(InputError):
    """A value does not fit the fixed point.

    Attributes:
        value: the first value that does not fit.
        index: its place in the array.
        bound: the largest magnitude that fits.
    """

    def __init__(self, value: float, index: tuple[int, ...], bound: float, where: str = "value") -> None:
        self.value, self.index, self.bound = value, index, bound
        at = f" at index {index}" if index else ""
        if value - value != 0:  # NaN and the infinities, without asking which
            fact = f"{where}{at} is {value}"
            remedy = "look for a diverging loss (lower lr) or bad input data before the sum"
        elif isinstance(value, int):
            fact = f"{where}{at} is {value}, beyond the bound {bound}"
            remedy = "integers are summed exactly in 64 bits; scale them down, or pass floats"
        else:
            fact = f"{where}{at} is {value:.6g}, beyond the bound {bound:g}"
            remedy = "clip it, scale it down, or raise bound= for every member (ring_bits=64 keeps the precision)"
        super().__init__(f"{fact}; {remedy}")


class MembershipError(InputError):
    """Too few members for a secure sum, or not its members."""


class DivergenceError(CGDError):
    """A training loss is no longer finite."""


class ProtocolError(CGDError):
    """The secure sum cannot go on."""


class LocalProtocolError(ProtocolError):
    """This side called the protocol out of order: a fault in the calling program."""


class WeightError(ProtocolError):
    """The members' weights do not sum to one, so the weighted sum is not used."""


class MembersChangedError(ProtocolError):
    """A new epoch began while a sum was waiting; the addend has to be weighted for the new members.

    Attributes:
        members: those of the new epoch.
    """

    def __init__(self, before: int, now: int, members: Collection[str]) -> None:
        self.members = tuple(sorted(members))
        super().__init__(
            f"epoch {now} began during a sum of epoch {before}; the members are {', '.join(self.members)} now: "
            "weight the values for them and sum again"
        )


class DisagreementError(ProtocolError):
    """Members hold different totals or histories: somebody added wrongly, or lied. Nobody can tell who it was."""


class RemoteProtocolError(ProtocolError):
    """A member broke the rules.

    Attributes:
        peer: the name of that member.
    """

    def __init__(self, peer: str, what: str) -> None:
        self.peer = peer
        super().__init__(f"{peer}: {what}")


class FrameError(RemoteProtocolError):
    """A peer's bytes are not a frame of this protocol."""


class SettingsError(RemoteProtocolError):
    """A member sums under other settings than the rest: shape, fixed point, sharing, opening, context.

    All members name the same one; for that one, `peer` is its own name.
    """


class EquivocationError(RemoteProtocolError):
    """A member has signed different things for different members. It is dishonest, and its signatures prove it.

    Attributes:
        proof: both statements with their signatures, to be shown to the other members.
    """

    def __init__(self, peer: str, what: str, proof: object = None) -> None:
        self.proof = proof
        super().__init__(peer, f"{what}; it is dishonest: remove it from the federation file")


class PeerAbortedError(RemoteProtocolError):
    """A peer gave up this sum and said why."""


class PeerLeftError(RemoteProtocolError):
    """A peer left the session."""


class HubError(RemoteProtocolError):
    """The hub altered, swapped, repeated, reordered or lost messages, or added wrongly.

    What it passes on is sealed end to end, and what it adds up carries tags, so it is caught before anything is opened.
    """

    def __init__(self, what: str) -> None:
        super().__init__("the hub", what)


class TransportError(CGDError):
    """Frames cannot be carried."""


class PeerTimeoutError(TransportError):
    """Nothing came from some peers in time.

    Attributes:
        peers: the names of those peers.
    """

    def __init__(self, peers: Collection[str], seconds: float, what: str) -> None:
        self.peers = frozenset(peers)
        names = ", ".join(sorted(peers))
        super().__init__(
            f"no word from {names} for {seconds:g} s (missing: {what}); "
            "see what became of it, or raise the timeout if its steps take longer"
        )


class ClosedError(TransportError):
    """This side's connection is closed."""


class UnconfinedWarning(UserWarning):
    """A model is trained from weights that `confine` did not draw: others may be able to guess them."""
