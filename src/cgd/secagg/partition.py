"""Who may take part in a secure sum, and who adds up which part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, LocalProtocolError, MembershipError
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.messages import MAX_NAME_BYTES, PeerId, SumSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from cgd.secagg.masking import PairwiseMasks

MIN_MEMBERS = 3
# Elements in one message. A mebibyte of 32-bit words is where encrypted channels were fastest, and small enough that
# nobody has to hold much of what another has not asked for.
SLICE = 1 << 18


def check_members(me: PeerId, members: Collection[PeerId]) -> None:
    """Refuse a sum that would hide nothing.

    Raises:
        MembershipError: there are fewer than 3 members, a name is there twice, or `me` is not a member.
    """
    if len(members) < MIN_MEMBERS:
        raise MembershipError(
            f"{len(members)} member(s): two members show each other everything; "
            f"a secure sum needs at least {MIN_MEMBERS}"
        )
    for name in members:
        if not name.isprintable() or not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise MembershipError(f"{name!r} is no name for a member; use 1 to {MAX_NAME_BYTES} printable characters")
    if len(set(members)) != len(members):
        raise MembershipError(f"a member is named twice: {', '.join(sorted(members))}")
    if me not in members:
        raise MembershipError(f"{me} is not a member of this sum ({', '.join(sorted(members))})")


def check_secret(
    spec: SumSpec, secret: npt.NDArray[Any], me: PeerId, members: Collection[PeerId], shares: PairwiseMasks | None
) -> None:
    """Refuse a secret, or settings, that cannot be summed by these members.

    Raises:
        LocalProtocolError: the secret is not encoded as the settings say, or pair keys are missing.
        InputError: there is nothing to sum, or the aggregator is not a member.
    """
    size, dtype = spec.size, WORD_TYPES[spec.ring_bits]
    if secret.shape != (size,) or secret.dtype != dtype:
        raise LocalProtocolError(
            f"the secret is {secret.dtype}{list(secret.shape)}, the settings say {dtype}{[size]}; encode it first"
        )
    if size == 0:
        raise InputError(f"a vector of shape {spec.shape} is empty; there is nothing to sum")
    held = shares.peers if shares is not None else frozenset()
    if spec.sharing == "expanded" and held != set(members) - {me}:
        raise LocalProtocolError(
            f"expanded sharing needs a pair key with every peer ({', '.join(members)}), "
            f"and there are keys with {', '.join(sorted(held)) or 'nobody'}"
        )
    if spec.opening == "aggregator" and spec.aggregator not in members:
        raise MembershipError(f"the aggregator {spec.aggregator!r} is not a member; name one of {', '.join(members)}")


def parts(spec: SumSpec, members: Collection[PeerId]) -> dict[PeerId, slice]:
    """Who adds up which part of the flat vector; empty parts are left out.

    Examples:
        >>> parts(SumSpec((5,), "float32", 32, 20, "uniform", "mesh"), ["a", "b", "c"])
        {'a': slice(0, 2, None), 'b': slice(2, 4, None), 'c': slice(4, 5, None)}
    """
    size = spec.size
    if spec.opening == "aggregator":
        return {spec.aggregator: slice(0, size)}
    length, longer = divmod(size, len(members))
    cuts = {}
    start = 0
    for i, member in enumerate(sorted(members)):
        stop = start + length + (i < longer)
        if stop > start:
            cuts[member] = slice(start, stop)
        start = stop
    return cuts


def slices(part: slice) -> list[slice]:
    """How a part travels: in slices of at most `SLICE` elements.

    Examples:
        >>> slices(slice(5, 6 + SLICE)) == [slice(5, 5 + SLICE), slice(5 + SLICE, 6 + SLICE)]
        True
    """
    return [slice_at(part, start) for start in range(part.start, part.stop, SLICE)]


def slice_at(part: slice, start: int) -> slice:
    """The slice of a part that begins at `start`; an empty one if none does."""
    begins = start in range(part.start, part.stop, SLICE)
    return slice(start, min(start + SLICE, part.stop)) if begins else slice(0, 0)
