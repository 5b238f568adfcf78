"""The intersection of the sets of three members or more, as the steps of one member.

Every step is a secure sum whose total all members learn; what a member enters is a function of its set, of its secret,
and of the totals before. k is a member's secret scalar, r its second one, H(x) the point of an element (`curve.py`).

1. *announce*: the size of the set, a random number, and a commitment to the set.
2. *points*, m sums: r·H(x) of the own elements, in a secret order. Then each list visits all other members, one in each
   sum: a member multiplies every point by its k, and shuffles the list. Nobody else knows r, so to others a list is
   random points. Its owner divides by r and multiplies by its own k. It then has the product K of all members' k times
   H(x), for each of its elements, but does not know which point belongs to which element.
3. *table*: the sum of the members' tables (`zero_table.py`), in which K·H(x) stands for x. Every member finds in it
   which of its points all members have, and of the others nothing. So it knows the size of the intersection, and stops
   here if this is less than the minimum.
4. *shuffles*: the members open how they shuffled. Every member now knows which of its elements all have.
5. *positions*: every member marks these in its list of the first sum of points, for a later process of its own. To
   others this says nothing, because the order of that list is the owner's secret.

K·H(x) is an oblivious pseudorandom function of x, with a key that all members share (Meadows 1986; Jarecki, Kiayias
and Krawczyk 2014; RFC 9497): without the help of *every* other member nobody computes it for one more element. So
nobody can test guesses later, and a member tests at most as many elements as it has announced.

What a member enters is the same again after a restart: its scalars, shuffles and table follow from its secret, from
what all announced, and from the lists of the first sum of points. With other sets, or in another run, all of them are
others.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from cgd.errors import InputError, LocalProtocolError, ProtocolError
from cgd.psi import curve, zero_table
from cgd.psi.curve import POINT_BYTES, as_points, derive, derive_scalar, hash_to_points

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from cgd.psi.curve import Points
    from cgd.psi.zero_table import Words

    Kind = Literal["announce", "points", "table", "shuffles", "positions"]

SIZE_BYTES, NONCE_BYTES, COMMITMENT_BYTES, SHUFFLE_BYTES = 8, 16, 32, 32
ANNOUNCEMENT_BYTES = SIZE_BYTES + NONCE_BYTES + COMMITMENT_BYTES
MAX_ELEMENTS = 20_000_000
"""The largest set: a member must not exhaust the memory of the others by announcing more."""
CHANGED = (
    "a member has changed what another one entered, and the sums do not show which; find out which participant runs a "
    "changed program"
)
_LENGTH_BYTES = 8


@dataclass
class CommonState:
    """The state of all members after the finished steps, the same bytes at each.

    Attributes:
        step: the number of finished steps.
        announcements: the announcement of every member.
        start: a digest of all lists as their owners entered them.
        lists: the present list of points of every member.
        table: the sum of all tables.
        shuffles: of every member, the keys of its shuffles of all lists.
        positions: of every member, the marks of the elements that all have.
    """

    step: int = 0
    announcements: tuple[bytes, ...] = ()
    start: bytes = b""
    lists: tuple[bytes, ...] = ()
    table: bytes = b""
    shuffles: tuple[bytes, ...] = ()
    positions: tuple[bytes, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """The size of every member's set."""
        return [int.from_bytes(each[:SIZE_BYTES], "little") for each in self.announcements]

    def digest(self) -> str:
        """Return a digest, which members compare before the next step."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Encode the state."""
        parts = [self.step.to_bytes(_LENGTH_BYTES, "little")]
        for items in self._fields():
            parts.append(len(items).to_bytes(_LENGTH_BYTES, "little"))
            for item in items:
                parts += [len(item).to_bytes(_LENGTH_BYTES, "little"), item]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, members: int) -> CommonState:
        """Decode a state, which may come from another member.

        Raises:
            InputError: it is not one of this number of members.
        """
        view, place = memoryview(data), 0

        def number() -> int:
            nonlocal place
            found = int.from_bytes(view[place : place + _LENGTH_BYTES], "little")
            place += _LENGTH_BYTES
            return found

        def items() -> tuple[bytes, ...]:
            nonlocal place
            found = []
            count = number()
            if count > members:
                raise _not_a_state()
            for _ in range(count):
                length = number()
                if length > len(view) - place:
                    raise _not_a_state()
                found.append(bytes(view[place : place + length]))
                place += length
            return tuple(found)

        step = number()
        announcements, start, lists, table, shuffles, positions = (items() for _ in range(6))
        state = cls(step, announcements, b"".join(start), lists, b"".join(table), shuffles, positions)
        if place != len(view) or state.to_bytes() != data or not state._fits(members):
            raise _not_a_state()
        return state

    def _fields(self) -> tuple[tuple[bytes, ...], ...]:
        start, table = ((each,) if each else () for each in (self.start, self.table))
        return self.announcements, start, self.lists, table, self.shuffles, self.positions

    def _fits(self, members: int) -> bool:
        """Return whether the state has the parts, of the right lengths, that it has after its number of steps."""
        step, sizes = self.step, self.sizes
        if not 1 <= step <= steps_of(members) or [*map(len, self.announcements)] != [ANNOUNCEMENT_BYTES] * members:
            return False
        if not all(1 <= each <= MAX_ELEMENTS for each in sizes):
            return False
        has_points, has_table, has_shuffles, has_positions = (
            step > each for each in (1, members + 1, members + 2, members + 3)
        )
        points = [POINT_BYTES * each for each in sizes] if has_points and not has_positions else []
        cells = zero_table.WORD_BYTES * zero_table.cells_for(sum(sizes)) if has_table and not has_positions else 0
        shuffles = [SHUFFLE_BYTES * members] * members if has_shuffles and not has_positions else []
        positions = [-(-each // 8) for each in sizes] if has_positions else []
        return (
            [len(self.start), [*map(len, self.lists)], len(self.table), [*map(len, self.shuffles)]]
            == [32 * has_points, points, cells, shuffles]
        ) and [*map(len, self.positions)] == positions


def steps_of(members: int) -> int:
    """Return the number of steps."""
    return members + 4


@dataclass
class SetMember:
    """One member, its set, and the common state.

    Args:
        me: our place among the members, from 0.
        members: the number of members.
        elements: our set, as texts; no two are the same.
        secret: 32 secret bytes, the same after a restart.
        key: with which elements are hashed, the same at all members.
        minimum: the least size of an intersection that is opened.
        multiply: multiplies points by a scalar; by default `curve.multiply`.
        state: the common state; by default that before the first step.
    """

    me: int
    members: int
    elements: Sequence[str] = field(repr=False)
    secret: bytes = field(repr=False)
    key: bytes = field(repr=False)
    minimum: int
    multiply: Callable[[Points, bytes], Points] = field(default=curve.multiply, repr=False)
    state: CommonState = field(default_factory=CommonState, repr=False)
    _places: npt.NDArray[np.int64] | None = field(default=None, init=False, repr=False)

    # Steps.

    @property
    def done(self) -> bool:
        """True after the last step."""
        return self.state.step == steps_of(self.members)

    @property
    def kind(self) -> Kind:
        """The kind of the next step."""
        after_points = self.state.step - 1 - self.members
        if self.state.step == 0:
            return "announce"
        return "points" if after_points < 0 else ("table", "shuffles", "positions")[after_points]

    @property
    def segments(self) -> list[int]:
        """The lengths of the parts of the next step's total in bytes; those of a table are in `cells`."""
        sizes = self.state.sizes
        lengths: dict[Kind, list[int]] = {
            "announce": [ANNOUNCEMENT_BYTES] * self.members,
            "points": [POINT_BYTES * each for each in sizes],
            "shuffles": [SHUFFLE_BYTES * self.members] * self.members,
            "positions": [-(-each // 8) for each in sizes],
        }
        return lengths[self.kind]

    @property
    def own_segment(self) -> int:
        """The part of the next step's total that we enter: in a step of points, the list that is with us."""
        return (self.me - self._hop) % self.members if self.kind == "points" else self.me

    def contribution(self) -> bytes:
        """Return our part of the next step's total; not of a table.

        Raises:
            InputError: the intersection is too small, so it is not opened.
            ProtocolError: a member has entered something else than points, or changed what others entered.
        """
        if self.kind == "announce":
            return self._announcement(secrets.token_bytes(NONCE_BYTES))
        if self.kind == "points":
            return self._points().tobytes()
        if self.kind == "shuffles":
            self._check_size()
            return b"".join(self._shuffle_key(each) for each in range(self.members))
        if self.kind == "positions":
            return np.packbits(self._marks()).tobytes()
        raise LocalProtocolError("the next step of the intersection is a table")

    def table(self) -> Words:
        """Return our table of the next step.

        Raises:
            ProtocolError: a member has entered something else than points, or changed what others entered.
        """
        return zero_table.fill(self._own_places(), self.cells, derive(self.secret, b"table", *self._context))

    @property
    def cells(self) -> int:
        """The number of cells of a table."""
        return zero_table.cells_for(sum(self.state.sizes))

    def receive(self, parts: Sequence[bytes], own: bytes) -> None:
        """Take the total of a step; `own` is what we entered, empty if the total does not include us.

        Raises:
            InputError: a set is too small or too large.
            ProtocolError: a member has changed what another one entered.
        """
        kind, state, parts = self.kind, self.state, tuple(parts)
        if own and parts[self.own_segment] != own:
            raise ProtocolError(f"in the intersection, another value was opened than we entered: {CHANGED}")
        if kind == "announce":
            state.announcements = parts
            self._check_sizes()
        elif kind == "points":
            if not self._hop:
                state.start = hashlib.sha256(b"".join(parts)).digest()
            state.lists = parts
        elif kind == "shuffles":
            state.shuffles = parts
        else:
            state.positions, state.lists, state.table, state.shuffles = parts, (), b"", ()
        state.step += 1

    def receive_table(self, total: Words) -> None:
        """Take the sum of all tables."""
        self.state.table = total.astype("<u8").tobytes()
        self.state.step += 1

    # Results.

    def size(self) -> int:
        """Return the size of the intersection; known after the table."""
        return int(self._in_table().sum())

    def common(self) -> npt.NDArray[np.bool_]:
        """Return which of our elements all members have; after the last step."""
        marks = np.unpackbits(np.frombuffer(self.state.positions[self.me], dtype=np.uint8))[: len(self.elements)]
        found = np.zeros(len(self.elements), dtype=np.bool_)
        found[self._order()] = marks.astype(np.bool_)
        return found

    def is_committed(self) -> bool:
        """Return whether our set is the one that was announced in our name."""
        ours = self.state.announcements[self.me]
        return ours == self._announcement(ours[SIZE_BYTES : SIZE_BYTES + NONCE_BYTES])

    # What we enter.

    @property
    def _hop(self) -> int:
        """The number of the next step among those of points, from 0."""
        return self.state.step - 1

    @property
    def _context(self) -> tuple[bytes, ...]:
        """Return what our keys depend on besides our secret: all sets of this run."""
        return (*self.state.announcements, self.state.start)

    def _announcement(self, nonce: bytes) -> bytes:
        size = len(self.elements).to_bytes(SIZE_BYTES, "little")
        return size + nonce + derive(self.secret, b"set", nonce, *sorted(each.encode() for each in self.elements))

    def _order(self) -> npt.NDArray[np.int64]:
        """Return the secret order of our list: the element at each place."""
        key = derive(self.secret, b"order", *self.state.announcements)
        return zero_table.permutation(key, len(self.elements))

    def _blinding(self) -> bytes:
        return derive_scalar(self.secret, b"blinding", *self.state.announcements)

    def _scalar(self) -> bytes:
        return derive_scalar(self.secret, b"scalar", *self._context)

    def _shuffle_key(self, whose: int) -> bytes:
        return derive(self.secret, b"shuffle", whose.to_bytes(8, "little"), *self._context)

    def _points(self) -> Points:
        if not self._hop:
            elements = [self.elements[place] for place in self._order()]
            return self.multiply(hash_to_points(elements, self.key), self._blinding())
        whose = self.own_segment
        points = as_points(self.state.lists[whose])
        order = zero_table.permutation(self._shuffle_key(whose), len(points))
        return np.ascontiguousarray(self._multiply(points, self._scalar())[order])

    def _multiply(self, points: Points, scalar: bytes) -> Points:
        try:
            return self.multiply(points, scalar)
        except ProtocolError:
            raise ProtocolError(
                f"in the intersection, a member entered values that are not points, or {CHANGED}"
            ) from None

    def _own_points(self) -> Points:
        """Return K·H(x) of our elements, in an order that we do not know yet."""
        scalar = curve.divide(self._scalar(), self._blinding())
        points = self._multiply(as_points(self.state.lists[self.me]), scalar)
        if len(np.unique(points.view(f"V{POINT_BYTES}"))) < len(points):
            raise ProtocolError(f"in the intersection, two of our elements have the same point: {CHANGED}")
        return points

    def _own_places(self) -> npt.NDArray[np.int64]:
        """Return the cells of each of our points."""
        if self._places is None:
            self._places = zero_table.places_of(self._own_points(), self.cells, self.state.start)
        return self._places

    def _in_table(self) -> npt.NDArray[np.bool_]:
        """Return of each of our points, in the order that we do not know, whether all members have it."""
        return zero_table.contains(np.frombuffer(self.state.table, dtype="<u8"), self._own_places())

    def _marks(self) -> npt.NDArray[np.bool_]:
        """Return of each place of our first list whether all members have its element."""
        places = np.arange(len(self.elements))
        for hop in range(1, self.members):
            keys = self.state.shuffles[(self.me + hop) % self.members]
            key = keys[SHUFFLE_BYTES * self.me : SHUFFLE_BYTES * (self.me + 1)]
            places = places[zero_table.permutation(key, len(places))]
        marks = np.zeros(len(places), dtype=np.bool_)
        marks[places] = self._in_table()
        return marks

    # Checks.

    def _check_sizes(self) -> None:
        sizes = self.state.sizes
        if not self.minimum <= min(sizes) or max(sizes) > MAX_ELEMENTS:
            raise SizeError(self.minimum, sizes)

    def _check_size(self) -> None:
        if (size := self.size()) < self.minimum:
            raise SmallIntersectionError(size, self.minimum)


class SizeError(InputError):
    """A set has fewer elements than the minimum, or too many. Nothing of it was sent.

    Attributes:
        minimum: the least size.
        sizes: the sizes of all sets.
    """

    def __init__(self, minimum: int, sizes: Sequence[int]) -> None:
        self.minimum, self.sizes = minimum, tuple(sizes)
        super().__init__(
            f"the sets have {', '.join(map(str, sizes))} elements, and {minimum} to {MAX_ELEMENTS} are allowed"
        )


class SmallIntersectionError(InputError):
    """The intersection has fewer elements than the minimum. Nobody learns which.

    Attributes:
        size: its size.
        minimum: the least size.
    """

    def __init__(self, size: int, minimum: int) -> None:
        self.size, self.minimum = size, minimum
        super().__init__(f"the intersection has {size} elements, and the minimum is {minimum}")


def _not_a_state() -> InputError:
    return InputError(
        "the members' stored state of the intersection is damaged, or of other members; restore a state folder of this "
        "training, or start a new one"
    )
