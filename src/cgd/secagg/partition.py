"""The members of a secure sum, and the part of the vector that each of them adds."""

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
# Elements in one message. Encrypted channels were fastest with a mebibyte of 32-bit words, and it is small enough to
# bound the memory for unrequested data.
SLICE_ELEMENTS = 1 << 18


def check_members(me: PeerId, members: Collection[PeerId]) -> None:
    """Check the members of a sum.

    Raises:
        MembershipError: there are fewer than 3 members, a name occurs twice, or `me` is not a member.
    """
    if len(members) < MIN_MEMBERS:
        raise MembershipError(
            f"{len(members)} member(s): the sum of two members reveals both addends; "
            f"a secure sum needs at least {MIN_MEMBERS}"
        )
    for name in members:
        if not name.isprintable() or not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise MembershipError(
                f"{name!r} is not a valid name; use 1 to {MAX_NAME_BYTES} bytes of printable characters"
            )
    if len(set(members)) != len(members):
        raise MembershipError(f"a member is named twice: {', '.join(sorted(members))}")
    if me not in members:
        raise MembershipError(f"{me} is not a member of this sum ({', '.join(sorted(members))})")


def check_secret(
    spec: SumSpec, secret: npt.NDArray[Any], me: PeerId, members: Collection[PeerId], masks: PairwiseMasks | None
) -> None:
    """Check that these members can sum this secret with these settings.

    Raises:
        LocalProtocolError: the secret is not encoded according to the settings, or pair keys are missing.
        InputError: the vector is empty, or the aggregator is not a member.
    """
    size, dtype = spec.size, WORD_TYPES[spec.ring_bits]
    if secret.shape != (size,) or secret.dtype != dtype:
        raise LocalProtocolError(
            f"the secret is {secret.dtype}{list(secret.shape)}, the settings require {dtype}{[size]}; encode it first"
        )
    if size == 0:
        raise InputError(f"a vector of shape {spec.shape} is empty; there is nothing to sum")
    known = masks.peers if masks is not None else frozenset()
    if spec.masking == "pairwise" and known != set(members) - {me}:
        raise LocalProtocolError(
            f"pairwise masking needs a pair key with every peer ({', '.join(members)}), "
            f"but there are keys with {', '.join(sorted(known)) or 'none of them'}"
        )
    if spec.opening == "aggregator" and spec.aggregator not in members:
        raise MembershipError(f"the aggregator {spec.aggregator!r} is not a member; name one of {', '.join(members)}")


def parts(spec: SumSpec, members: Collection[PeerId]) -> dict[PeerId, slice]:
    """Return the part of the flat vector that each member adds, without empty parts.

    Examples:
        >>> parts(SumSpec((5,), "float32", 32, 20, "uniform", "mesh"), ["a", "b", "c"])
        {'a': slice(0, 2, None), 'b': slice(2, 4, None), 'c': slice(4, 5, None)}
    """
    size = spec.size
    if spec.opening == "aggregator":
        return {spec.aggregator: slice(0, size)}
    length, longer = divmod(size, len(members))
    found = {}
    start = 0
    for i, member in enumerate(sorted(members)):
        stop = start + length + (i < longer)
        if stop > start:
            found[member] = slice(start, stop)
        start = stop
    return found


def slices(part: slice) -> list[slice]:
    """Cut a part into slices of at most `SLICE_ELEMENTS` elements, each sent in one message.

    Examples:
        >>> end = 5 + SLICE_ELEMENTS
        >>> slices(slice(5, end + 1)) == [slice(5, end), slice(end, end + 1)]
        True
    """
    return [slice_at(part, start) for start in range(part.start, part.stop, SLICE_ELEMENTS)]


def slice_at(part: slice, start: int) -> slice:
    """Return the slice of a part that starts at `start`, or an empty slice if there is none."""
    exists = start in range(part.start, part.stop, SLICE_ELEMENTS)
    return slice(start, min(start + SLICE_ELEMENTS, part.stop)) if exists else slice(0, 0)
