"""Find the records that all members of a row have: private set intersection over the secure sums of the row.

`cgd.psi.protocol` has the steps and what they disclose. Here every step is one secure sum: a member enters its part at
its place, zeros elsewhere, and all learn all parts. So the messages, the agreement on each step, its repetition after a
failure and the recovery of a member are those of all other sums. Nobody can enter a part that depends on another
member's part of the same step, because keys of sums are revealed only after all have confirmed.

After every step the common state is stored with the members, as an optimiser's is. A participant that was killed
continues with the next step; its part is the same again, because everything that it draws follows from its seed and
from what was opened before. If it returns with other IDs, its commitment is not that of the first step, and it stops.

A second intersection, with other IDs, would show differences of sets to the others. A training has one.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, ProtocolError, SettingsError
from cgd.extras import require
from cgd.secagg.journal_entry import Step
from cgd.tabular.shared_ids import check_ids, normalize_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from cgd.federation.data_schema import Data
    from cgd.federation.intersection_section import Intersection
    from cgd.peers import Peers
    from cgd.psi.curve import Points
    from cgd.psi.protocol import CommonState, SetMember
    from cgd.tabular.dataset import TabularDataset

    ShowMessage = Callable[[str], None]

LIMB_BYTES = 7  # of an integer of 8: the sum of many members does not wrap
CHUNK_POINTS = 2000
SHOWN_PARTS = 10  # messages about one list of points
MIN_SHOWN_POINTS = 100_000
MIN_SALT_CHARACTERS = 16
CHECK_BYTES = 16
SALT_COST = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26}
REMEDY = (
    "find out with the others what happened. Another intersection is another training: it needs another federation "
    "name, because the difference of two intersections can be one person"
)


@dataclass(frozen=True)
class FoundIntersection:
    """Our records that all members of the row have.

    Attributes:
        records: these records; their IDs are normalized.
        mask: which of our records they are.
        sizes: how many IDs each member entered.
    """

    records: TabularDataset
    mask: npt.NDArray[np.bool_]
    sizes: Mapping[str, int]

    def describe(self) -> str:
        """Return what every member has learned."""
        entered = ", ".join(f"{name} {size:,}" for name, size in self.sizes.items())
        return f"{self.records.rows:,} records are in all files of our row, which entered {entered} IDs"

    def as_stored(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {"entered": dict(self.sizes), "common": self.records.rows}


@dataclass(frozen=True)
class IdHashing:
    """How the IDs of a row are hashed.

    Attributes:
        key: the key.
        check: what the members compare to see that they have the same salt.
    """

    key: bytes
    check: str

    @classmethod
    def from_salt(cls, federation: str, salt: bytes) -> IdHashing:
        """Return the hashing of a federation with a salt; an empty one if there is none.

        The salt is stretched, so that a comparison of what members check does not let them guess a weak one quickly.
        """
        scope = hashlib.sha256(b"cgd intersection" + federation.encode()).digest()
        key = hashlib.scrypt(salt, salt=scope, dklen=64, **SALT_COST) if salt else hashlib.sha512(scope).digest()
        return cls(key[:32], key[32 : 32 + CHECK_BYTES].hex())


def read_salt(path: Path | None, settings: Intersection | None) -> bytes:
    """Return the content of the file with the row's salt; empty if there is none.

    Raises:
        InputError: it cannot be read, is too short, is missing, or the federation has none.
    """
    if settings is None or not settings.salt:
        if path is not None:
            raise InputError("--salt is for an intersection with salt = true in [data.intersection]; omit it")
        return b""
    if path is None:
        raise InputError(
            "salt is true in [data.intersection]: name the file with the secret of your row (--salt FILE), the same "
            "for all its members. One of them makes it, and gives it to the others on a safe way; for example: "
            "python -c 'import secrets; print(secrets.token_urlsafe())' > row.salt"
        )
    try:
        salt = path.read_bytes().strip()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name the file with the salt of your row") from None
    if len(salt) < MIN_SALT_CHARACTERS:
        raise InputError(
            f"the salt in {path} has {len(salt)} characters, and {MIN_SALT_CHARACTERS} random ones are the least: "
            "others could guess it. Make one by a random generator"
        )
    return salt


def check_intersection(records: TabularDataset, data: Data) -> None:
    """Check what can be checked of our IDs before anything is sent; nothing if there is no intersection.

    Raises:
        MissingExtraError: a library is missing.
        InputError: the IDs cannot be entered.
    """
    if data.intersection is None:
        return
    require("psi", "an intersection of IDs ([data.intersection])")
    check_ids(normalize_ids(_ids(records), data.intersection), data.intersection, data.id)


def intersect(
    records: TabularDataset,
    row: Peers,
    data: Data,
    salt: bytes,
    show_message: ShowMessage = lambda _: None,
) -> FoundIntersection:
    """Return our records that all members of the row have.

    Args:
        records: our records, with IDs.
        row: the members of the row.
        data: the schema, with an intersection.
        salt: the secret of the row; empty if there is none.
        show_message: called with progress messages.

    Raises:
        MissingExtraError: a library is missing.
        InputError: the IDs cannot be entered; a member has another salt, too few or too many IDs; too few people are in
            common; or an earlier process entered other IDs.
        ProtocolError: a member has entered something else than the protocol says.
    """
    settings = data.intersection
    if settings is None:
        raise InputError("[data] has no intersection")
    check_intersection(records, data)
    from cgd.psi.protocol import SetMember

    ids = normalize_ids(_ids(records), settings)
    hashing = IdHashing.from_salt(row.federation, salt)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        secret = hashlib.blake2b(row.me.encode(), key=row.seed, digest_size=32, person=b"cgd psi").digest()
        multiplication = _Multiplication(pool, show_message)
        member = SetMember(
            row.members.index(row.me), len(row), ids, secret, hashing.key, settings.minimum, multiplication
        )
        show_message(f"intersection: {settings.describe()}; we enter {len(ids):,}")
        _Run(row, member, settings, hashing, multiplication, show_message).run()
    sizes = dict(zip(row.members, member.state.sizes, strict=True))
    mask = member.common()
    found = FoundIntersection(replace(records, ids=ids).take(mask), mask, sizes)
    show_message(f"intersection: {found.describe()}")
    return found


class _Multiplication:
    """Multiplication of many points in several threads, with progress: libsodium does not hold Python's lock."""

    def __init__(self, pool: ThreadPoolExecutor, show_message: ShowMessage) -> None:
        self._pool, self._show_message = pool, show_message
        self.what = ""
        """What is computed, for messages."""

    def __call__(self, points: Points, scalar: bytes) -> Points:
        from cgd.psi.curve import multiply

        parts = [points[start : start + CHUNK_POINTS] for start in range(0, len(points), CHUNK_POINTS)]
        products, shown = [], 0
        for product in self._pool.map(multiply, parts, [scalar] * len(parts)):
            products.append(product)
            done = len(products) * SHOWN_PARTS // len(parts)
            if done > shown and len(points) >= MIN_SHOWN_POINTS:
                self._show_message(f"intersection: {self.what}, {100 * done // SHOWN_PARTS} % of {len(points):,} IDs")
                shown = done
        return np.concatenate(products)


@dataclass
class _Run:
    """The steps of an intersection, each as a secure sum of the row."""

    row: Peers
    member: SetMember
    settings: Intersection
    hashing: IdHashing
    multiplication: _Multiplication
    show_message: ShowMessage

    def run(self) -> None:
        slot = self.row.next_slot()
        self._load(slot)
        while not self.member.done:
            step = Step(slot, self.member.state.step)
            self._take(step)
            if self.row.recovery.keeps_states:
                self.row.recovery.save(slot, step.number + 1, self.member.state.to_bytes())

    def _load(self, slot: int) -> None:
        """Continue with the state that the members have stored, if there is one."""
        from cgd.psi.protocol import CommonState

        stored = self.row.recovery.load(slot)
        if stored is None:
            return
        state: CommonState = CommonState.from_bytes(stored.content, len(self.row))
        if state.step != stored.steps:
            raise InputError("the members' stored state of the intersection is of another step; train anew")
        self.member.state = state
        self.row.recovery.skip(slot, state.step)
        self._check_commitment()
        self._check_maximum()

    def _take(self, step: Step) -> None:
        """Take one step with the other members.

        If the others have finished it before, because this process was restarted, its total comes from the journal.
        """
        from cgd.psi.protocol import SizeError, SmallIntersectionError

        member, kind = self.member, self.member.kind
        self.multiplication.what = f"{kind}, step {member.state.step + 1} of {len(self.row) + 4}"
        if max(member.state.sizes, default=0) >= MIN_SHOWN_POINTS:
            self.show_message(f"intersection: {self.multiplication.what}")
        context = self._context(kind)
        try:
            if kind == "table":
                table = member.table().view(np.int64)
                total = self._sum(table, context, step, modular=True)
                member.receive_table(total.view(np.uint64))
                return
            own = member.contribution()
            parts, included = self._exchange(member.segments, member.own_segment, own, context, step)
            member.receive(parts, own if included and kind != "announce" else b"")
        except SmallIntersectionError as error:
            self._abort()
            raise InputError(self._too_few(error.size)) from None
        except SizeError as error:
            raise InputError(self._wrong_size(error.sizes)) from None
        except ProtocolError as error:
            if type(error) is ProtocolError:  # found here, and not the failure of a sum
                self._abort()
            raise
        if kind == "announce":
            self._check_commitment()
            self._check_maximum()

    def _context(self, kind: str) -> str:
        if kind == "announce":
            return f"intersection: salt {self.hashing.check}"
        return f"intersection: {kind} {self.member.state.digest()}"

    def _exchange(
        self, lengths: Sequence[int], place: int, own: bytes, context: str, step: Step
    ) -> tuple[list[bytes], bool]:
        """Return the parts of all members, and whether ours is among them."""
        limbs = [-(-length // LIMB_BYTES) for length in lengths]
        starts = [0, *np.cumsum(limbs).tolist()]
        values = np.zeros(starts[-1], dtype=np.int64)
        values[starts[place] : starts[place + 1]] = _to_limbs(own)
        self.row.next_round()  # waits until it is known
        included = self.row.recovery.took_part()
        total = self._sum(values, context, step)
        if int(total.min()) < 0 or int(total.max()) >= 1 << 8 * LIMB_BYTES:
            raise ProtocolError(
                "in the intersection, members entered values at the same place: a member has changed what another one "
                "entered, and the sums do not show which; find out which participant runs a changed program"
            )
        parts = [_from_limbs(total[starts[each] : starts[each + 1]], lengths[each]) for each in range(len(lengths))]
        return parts, included

    def _sum(self, values: npt.NDArray[np.int64], context: str, step: Step, *, modular: bool = False) -> Any:
        try:
            return self.row.sum(values, modular=modular, context=context, step=step)
        except SettingsError as error:
            raise self._different(error) from None

    def _different(self, error: SettingsError) -> Exception:
        """Return the error about a member that goes another way; in the first step, because of its salt."""
        if self.member.state.step:
            return error
        subject = "we have" if error.peer == self.row.me else f"{error.peer} has"
        salt = (
            "another salt than most of the row: compare the files that you name with --salt"
            if self.settings.salt
            else "another setting of the intersection"
        )
        return InputError(f"{subject} {salt}, of {', '.join(self.row.members)}. No ID was sent")

    def _check_commitment(self) -> None:
        if not self.member.is_committed():
            raise InputError(
                "our IDs, or our key file, are not those with which an earlier process of ours began this "
                "intersection: with others, the members would learn the difference. Restart with the former file; or "
                "train anew, under another federation name"
            )

    def _check_maximum(self) -> None:
        for name, size in zip(self.row.members, self.member.state.sizes, strict=True):
            if size > self.settings.maximum:
                raise InputError(
                    f"{name} has announced {size:,} IDs, and maximum in [data.intersection] is "
                    f"{self.settings.maximum:,}; {REMEDY}"
                )

    def _wrong_size(self, sizes: Sequence[int]) -> str:
        entered = ", ".join(f"{name} {size:,}" for name, size in zip(self.row.members, sizes, strict=True))
        return (
            f"the members of our row have announced so many IDs: {entered}; minimum in [data.intersection] is "
            f"{self.settings.minimum:,}. No ID was sent; {REMEDY}"
        )

    def _too_few(self, size: int) -> str:
        what = "nobody is" if not size else f"{size:,} {'person is' if size == 1 else 'people are'}"
        return (
            f"{what} in all files of our row, and minimum in [data.intersection] is {self.settings.minimum:,}: no "
            "member was told who, and all know this number. Are the IDs written in the same way in all files (see "
            f"normalize)? If so, {REMEDY}"
        )

    def _abort(self) -> None:
        """Let the others have an error instead of waiting for us; not after a restart, when we may come back."""
        if not self.row.recovery.is_replay():
            self.row.abort_sum()


def _to_limbs(data: bytes) -> npt.NDArray[np.int64]:
    """Return bytes as integers of 7 bytes each, the last one filled up with zeros."""
    padded = np.zeros((-(-len(data) // LIMB_BYTES), 8), dtype=np.uint8)
    flat = np.zeros(len(padded) * LIMB_BYTES, dtype=np.uint8)
    flat[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    padded[:, :LIMB_BYTES] = flat.reshape(-1, LIMB_BYTES)
    return padded.view("<i8").reshape(-1).astype(np.int64, copy=False)


def _from_limbs(limbs: npt.NDArray[np.int64], length: int) -> bytes:
    """Return the bytes of integers that `_to_limbs` gave."""
    data = np.ascontiguousarray(limbs.astype("<i8", copy=False)).view(np.uint8).reshape(-1, 8)
    return data[:, :LIMB_BYTES].tobytes()[:length]


def _ids(records: TabularDataset) -> tuple[str, ...]:
    if records.ids is None:
        raise InputError("the records have no IDs; name the id column in [data], and include it in the file")
    return records.ids
