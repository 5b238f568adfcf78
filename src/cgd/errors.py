"""The exceptions of `cgd`.

    CGDError
    ├── InputError (also a ValueError)    an argument, option or file cannot be used; nothing was sent
    │   ├── RangeError                    a value does not fit the fixed-point encoding
    │   └── MembershipError               too few members, or not the members of this sum
    ├── DivergenceError                   a training loss is no longer finite
    ├── ClusterError                      workers of a simulation cannot be started or are lost again and again
    ├── ProtocolError
    │   ├── LocalProtocolError            this side called the protocol out of order
    │   ├── WeightError                   the members' weights do not sum to one
    │   ├── MembersChangedError           a new epoch began during a sum: compute the weight again
    │   ├── RevealError                   a charge or record that must come before our key could not be made
    │   │   └── BudgetSpentError          the opening needs more than is left of the privacy budget
    │   ├── IntegrityError                a total is larger than honest members can produce
    │   ├── DisagreementError             members hold different totals or histories; the cause cannot be attributed
    │   └── RemoteProtocolError           a member violated the protocol; `.peer` names it
    │       ├── FrameError                its bytes are not a frame of this protocol
    │       ├── SettingsError             its settings of the sum differ from those of the others
    │       ├── EquivocationError         it signed different statements for different members: it is dishonest
    │       ├── PeerAbortedError          it aborted this sum and sent a reason
    │       ├── PeerLeftError             it left the session
    │       └── HubError                  the hub sent what it may not send, or added wrongly
    ├── RankError                         another rank of this participant's job failed, or was lost
    └── TransportError
        ├── PeerTimeoutError              nothing was received from `.peers` in time
        └── ClosedError                   this side's connection is closed

One warning, UnconfinedWarning: a model is about to be trained whose weights `confine` did not draw.

A message states the fact, the value and the remedy. The reason of an abort, which is sent to other members, never
contains a value: values appear only in the error of the member that owns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class CGDError(Exception):
    """Base class of all exceptions of `cgd`."""


class InputError(CGDError, ValueError):
    """An argument, option or file cannot be used; nothing was sent."""


class MissingExtraError(ModuleNotFoundError, InputError):
    """A library of an optional extra is not installed."""


class RangeError(InputError):
    """A value does not fit the fixed-point encoding.

    Attributes:
        value: the first value that does not fit.
        index: its index in the array.
        bound: the largest magnitude that fits.
    """

    def __init__(self, value: float, index: tuple[int, ...], bound: float, where: str = "value") -> None:
        self.value, self.index, self.bound = value, index, bound
        at = f" at index {index}" if index else ""
        if value - value != 0:  # NaN or an infinity
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
    """There are too few members for a secure sum, or they are not its members."""


class DivergenceError(CGDError):
    """A training loss is no longer finite."""


class ClusterError(CGDError):
    """The workers of a simulation on a cluster cannot be started, or are lost again and again."""


class ProtocolError(CGDError):
    """The secure sum cannot continue."""


class LocalProtocolError(ProtocolError):
    """This side called the protocol out of order: an error in the calling program."""


class WeightError(ProtocolError):
    """The members' weights do not sum to one, so the weighted sum is not used."""


NUMBER_BITS = 40
"""With a quorum, the lower bits of a period are the number of the view in its epoch (`cgd.secagg.attendance`)."""


def period_text(period: int) -> str:
    """Describe an epoch, or with a quorum a period."""
    epoch, number = divmod(period, 1 << NUMBER_BITS)
    return f"view {number} of epoch {epoch}" if epoch else f"epoch {period}"


class MembersChangedError(ProtocolError):
    """A new epoch began while a sum was waiting; the addend must be weighted for the new members.

    Attributes:
        members: the members of the new epoch.
    """

    def __init__(self, before: int, now: int, members: Collection[str]) -> None:
        self.members = tuple(sorted(members))
        super().__init__(
            f"{period_text(now)} began during a sum of {period_text(before)}; the members are "
            f"{', '.join(self.members)} now: "
            "weight the values for them and sum again"
        )


class RevealError(ProtocolError):
    """What must be recorded before our self-mask key leaves could not be recorded: the key was not sent."""


class BudgetSpentError(RevealError):
    """An opening would use more than is left of the privacy budget; it was not charged, and is not opened."""


class IntegrityError(ProtocolError):
    """A private total is larger than honest members can produce: some member added more than it may."""


class DisagreementError(ProtocolError):
    """Members hold different totals or histories: a member added or reported wrongly; which one is not known."""


class RemoteProtocolError(ProtocolError):
    """A member violated the protocol.

    Attributes:
        peer: the name of that member.
    """

    def __init__(self, peer: str, what: str) -> None:
        self.peer = peer
        super().__init__(f"{peer}: {what}")


class FrameError(RemoteProtocolError):
    """A peer's bytes are not a frame of this protocol."""


class SettingsError(RemoteProtocolError):
    """A member's settings of the sum (shape, fixed point, masking, opening, context) differ from those of the others.

    All members name the same member; that member's own error names itself.
    """


class EquivocationError(RemoteProtocolError):
    """A member signed different statements for different members: it is dishonest, and its signatures prove it.

    Attributes:
        proof: both statements with their signatures, as evidence for the other members.
    """

    def __init__(self, peer: str, what: str, proof: object = None) -> None:
        self.proof = proof
        super().__init__(peer, f"{what}; it is dishonest: remove it from the federation file")


class PeerAbortedError(RemoteProtocolError):
    """A peer aborted this sum and sent a reason."""


class PeerLeftError(RemoteProtocolError):
    """A peer left the session."""


class HubError(RemoteProtocolError):
    """The hub sent what it may not send, or added wrongly.

    Summed values carry MACs, so a wrong total is detected before anything is revealed. Relayed messages are
    authenticated end to end. If one was altered, swapped, repeated or lost, its sender may have caused it as well as
    the hub, so it raises no error: it is logged and sent again.
    """

    def __init__(self, what: str) -> None:
        super().__init__("the hub", what)


class RankError(CGDError):
    """A rank of this participant's job failed, was lost, or does something else than the others.

    Nothing is aborted with the peers: they wait until the job is restarted.

    Attributes:
        rank: the number of that rank; None if it is not known.
    """

    def __init__(self, rank: int | None, what: str) -> None:
        self.rank = rank
        super().__init__(what if rank is None else f"rank {rank}: {what}")


class TransportError(CGDError):
    """Frames cannot be sent or received."""


class PeerTimeoutError(TransportError):
    """Nothing was received from some peers in time.

    Attributes:
        peers: the names of those peers.
    """

    def __init__(self, peers: Collection[str], seconds: float, what: str, remedy: str) -> None:
        self.peers = frozenset(peers)
        names = ", ".join(sorted(peers))
        super().__init__(f"received nothing from {names} for {seconds:g} s (missing: {what}); {remedy}")


class ClosedError(TransportError):
    """This side's connection is closed."""


class UnconfinedWarning(UserWarning):
    """A model is trained from weights that `confine` did not draw; others may be able to guess them."""
