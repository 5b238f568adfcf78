"""The journal: the finished sums of a group, with which a restarted member catches up.

Every finished sum is an entry. A participant's program makes the same sums in the same order each time it runs, so a
restarted program gets the totals of finished sums from a journal and continues with the other members. To keep the
journal small, an optimiser stores its state (the displacement) after every step: the totals that the state includes are
dropped, and a restarted program skips those steps. The rules:

1. The total of an entry is kept until an optimiser state includes it *and* the next sum is finished: until then a
   member that was interrupted at the last moment may need it.
2. The longer of two journals of a group contains the shorter one. A member that is behind copies the missing entries.
3. Other totals (a count, a validation loss) are kept while they have at most `MAX_KEPT_BYTES` together.
4. The latest step of each optimiser whose gradient sum may have been revealed is kept, with its members: it is not
   summed with other members, and not again once it is finished.
5. A hash chain links every entry to the previous one. An entry's certificate (`certificates.py`) is kept as long as its
   total, and that of the last entry is always kept.

The entries and states of a journal are known to all members of the group and to no one else. The pending reveal ("mark"
in stored bytes) and the revealed steps are this member's own, and are not part of what it sends to members that are
behind.
"""

from __future__ import annotations

import json
import struct
from copy import copy
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, LocalProtocolError
from cgd.secagg.certificates import (
    GENESIS,
    WEIGHTED,
    Certificate,
    PendingReveal,
    RevealedStep,
    describe_sum,
    extend_chain,
)
from cgd.secagg.codec import read_spec
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.journal_entry import JournalEntry, Step
from cgd.secagg.positions import StateSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import Buffer, SumSpec

FORMAT = "cgd-ledger-3"  # in stored bytes, so it keeps its old name
MAX_KEPT_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """The state of an optimiser after `steps` steps, as bytes.

    Instances are compared by identity: comparing the contents before every sum would cost as much as the sum.

    Attributes:
        steps: the number of steps taken.
        content: the serialised state.
        fixed: True if the state stays the same until it is replaced, so that members can compare it at any time.
    """

    steps: int
    content: bytes
    fixed: bool = False


class Journal:
    """The finished sums of one group.

    Examples:
        >>> import numpy as np
        >>> from cgd.secagg.messages import SumSpec
        >>> spec = SumSpec((2,), "float32", 32, 20, "pairwise", "mesh")
        >>> ours, theirs = Journal(), Journal()
        >>> ours.append(spec, np.array([1, 2], dtype=np.uint32), epoch=1)
        >>> theirs.extend(Journal.from_bytes(ours.export_since(0, states=True)))
        >>> theirs.total(0, spec)
        array([1, 2], dtype=uint32)
    """

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.heads: list[bytes] = [GENESIS]
        """The heads of the hash chain: element i is the head after i entries."""
        self.states: dict[int, OptimizerState] = {}
        self.pending_reveal: PendingReveal | None = None
        """The unfinished sum for which our self-mask key may have been sent, if any."""
        self.step_reveal: PendingReveal | None = None
        """If there is a quorum, the pending reveal of a gradient sum that another sum has taken the place of."""
        self.revealed_steps: dict[int, RevealedStep] = {}
        """The latest step of each optimiser, by slot, whose gradient sum may have been revealed."""
        self.started = 0
        """If there is a quorum, the latest period in which we started a sum."""
        self._kept_bytes = 0
        self._fixed: tuple[dict[int, OptimizerState], bytes] = {}, sha256(b"").digest()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> bytes:
        """The head of the hash chain."""
        return self.heads[-1]

    def append(
        self,
        spec: SumSpec,
        total: npt.NDArray[Any],
        epoch: int,
        loop_step: int = 0,
        step: Step | None = None,
        addends: int = 0,
        certificate: Certificate | None = None,
    ) -> None:
        """Append a finished sum."""
        self._drop_totals_in_states()
        words = total.data.cast("B")
        attempt = certificate.attempt if certificate is not None else sha256(words).digest()
        description = describe_sum(spec)
        self._append_entry(
            JournalEntry(description, epoch, loop_step, step, len(words), addends, attempt, words, certificate)
        )
        if step is None:
            self._kept_bytes += total.nbytes
            self._drop_oldest_totals()

    def _append_entry(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self.heads.append(extend_chain(self.head, entry.fields))
        if entry.step is not None and entry.description.startswith(WEIGHTED):
            members = tuple(sorted(entry.certificate.keys)) if entry.certificate is not None else ()
            self.add_revealed_step(entry.step.slot, RevealedStep(entry.step.number, members, (), finished=True))
        if self.pending_reveal is not None and self.pending_reveal.index < len(self):
            self._replace_pending_reveal(None)
        self._drop_finished_step()

    def set_pending_reveal(self, pending_reveal: PendingReveal | None) -> None:
        """Record that our self-mask key for a sum may be sent from now on."""
        self._replace_pending_reveal(pending_reveal)
        if pending_reveal is not None and pending_reveal.step is not None:
            slot, number = pending_reveal.step
            members, keys, spec = pending_reveal.members, pending_reveal.keys, pending_reveal.spec
            self.add_revealed_step(slot, RevealedStep(number, members, keys, finished=False, spec=spec))

    def _replace_pending_reveal(self, new: PendingReveal | None) -> None:
        """Replace the pending reveal; that of an unfinished step is kept when a count of samples takes its place."""
        before, self.pending_reveal = self.pending_reveal, new
        if before is not None and before.step is not None and before.interrupted is not None:
            self.step_reveal = before
        if new is not None and new.step is not None:
            self.step_reveal = None
        self._drop_finished_step()

    def _drop_finished_step(self) -> None:
        reveal = self.step_reveal
        if reveal is not None and reveal.step is not None and self.is_finished(*reveal.step):
            self.step_reveal = None

    def is_finished(self, slot: int, number: int) -> bool:
        """Return whether the gradient sum of a step is in the journal."""
        latest = self.revealed_steps.get(slot)
        return latest is not None and (latest.number, latest.finished) >= (number, True)

    @property
    def has_unfinished(self) -> bool:
        """True if we may have revealed our key for a sum that is not finished."""
        return self.pending_reveal is not None or not all(step.finished for step in self.revealed_steps.values())

    def void_pending_reveal(self) -> None:
        """Drop our pending reveal: a quorum has gone on without this sum, so it can never be opened."""
        reveal, self.pending_reveal = self.pending_reveal, None
        self._void_step(reveal)

    def void_step_reveal(self) -> None:
        """Drop the pending reveal of a gradient sum that another sum has taken the place of, for the same reason."""
        reveal, self.step_reveal = self.step_reveal, None
        self._void_step(reveal)

    def _void_step(self, reveal: PendingReveal | None) -> None:
        if reveal is None or reveal.step is None:
            return
        slot, number = reveal.step
        step = self.revealed_steps.get(slot)
        if step is None or step.number != number or step.finished:
            return
        del self.revealed_steps[slot]
        if number:  # the steps before it were summed, by these members or by former ones
            self.revealed_steps[slot] = replace(step, number=number - 1, finished=True, spec="")

    def add_revealed_step(self, slot: int, step: RevealedStep) -> None:
        """Record the latest step of an optimiser whose gradient sum may have been revealed."""
        before = self.revealed_steps.get(slot)
        if before is None:
            self.revealed_steps[slot] = step
        elif (step.number, step.finished) >= (before.number, before.finished):
            self.revealed_steps[slot] = step.after(before)

    def total(self, index: int, spec: SumSpec) -> npt.NDArray[Any]:
        """Return the total of an entry, for a program that repeats the sum.

        Raises:
            LocalProtocolError: the program requests another sum than was made, or the total was dropped.
        """
        entry = self.entries[index]
        if entry.description != describe_sum(spec):
            raise LocalProtocolError(
                f"sum {index + 1} was of {entry.description} when it was made, but this program requests "
                f"{describe_sum(spec)}; a restarted program must make the same sums in the same order as before"
            )
        if entry.step is not None and entry.certificate is not None:
            # Otherwise a step would be repeated with another learning rate, and the wrong state would be saved.
            made = read_spec(entry.certificate.spec).context
            if made != spec.context:
                raise LocalProtocolError(
                    f"sum {index + 1} was made with the settings {made!r}, but this program repeats the step with "
                    f"{spec.context!r}; a restarted program must take its steps with the same settings as before: a "
                    "scheduler is set to the first step by optimizer.steps(count, scheduler), or by sampler.steps("
                    "loader, epochs, scheduler)"
                )
        if entry.words is None:
            raise LocalProtocolError(
                f"the total of sum {index + 1} is no longer kept; start at the step of the other members, with "
                "`for step in optimizer.steps(count)`"
            )
        dtype = WORD_TYPES[spec.ring_bits]
        if len(entry.words) != spec.size * dtype.itemsize:
            raise LocalProtocolError(f"the total of sum {index + 1} is damaged; delete the state folder and join again")
        return np.frombuffer(entry.words, dtype=dtype)

    def save_state(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        """Store an optimiser's state after `steps` steps."""
        self.states[slot] = OptimizerState(steps, content, fixed)

    def state_summaries(self, slots: Iterable[int] | None = None) -> tuple[StateSummary, ...]:
        """Summarise the stored states, for comparison with those of other members."""
        summaries = []
        for slot in sorted(self.states if slots is None else slots):
            state = self.states[slot]
            digest = sha256(state.content).digest()
            summaries.append(StateSummary(slot, state.steps, len(state.content), state.fixed, digest))
        return tuple(summaries)

    def fixed_states_digest(self) -> bytes:
        """Return the digest of the fixed states; it is cached until one of them is replaced."""
        fixed = {slot: state for slot, state in self.states.items() if state.fixed}
        if fixed != self._fixed[0]:
            rows = [[row.slot, row.steps, row.digest.hex()] for row in self.state_summaries(fixed)]
            self._fixed = fixed, sha256(json.dumps(rows).encode() if rows else b"").digest()
        return self._fixed[1]

    def final_digest(self) -> bytes:
        """Return the digest of the history and all states, which members compare when their programs are done."""
        rows = [[row.slot, row.steps, row.digest.hex()] for row in self.state_summaries()]
        return sha256(self.head + json.dumps(rows).encode()).digest()

    def extend(self, other: Journal, *, states: bool = True) -> None:
        """Append the entries of `other`, which start where this journal ends, and take its newer states."""
        for entry in other.entries:
            self._append_entry(entry)
        for slot, state in other.states.items() if states else ():
            if slot not in self.states or state.steps > self.states[slot].steps:
                self.states[slot] = state
        self._count_kept()

    def entry_record(self, index: int) -> tuple[Buffer, ...]:
        """Return the record of one entry for the write-ahead file, in pieces, so that a large total is not copied."""
        entry = self.entries[index]
        header = json.dumps(_row(entry)).encode()
        return (_LENGTH.pack(len(header)), header, *((entry.words,) if entry.words else ()))

    def pending_reveal_record(self) -> tuple[Buffer, ...]:
        """Return the record of the pending reveal, to be saved before our key is sent, in pieces as for an entry.

        If there is a quorum, it has all records that are this member's own.
        """
        own = self._own_records() if self.started else {"mark": self.pending_reveal and self.pending_reveal.to_json()}
        header = json.dumps(own).encode()
        return _LENGTH.pack(len(header)), header

    def add_record(self, data: Buffer) -> None:
        """Add a record of `entry_record` or `pending_reveal_record`, its pieces joined.

        Records have no digest, which would cost as much as the rest: truncation is detected here, and a wrong total
        when the members compare their displacements.

        Raises:
            InputError: the record is damaged.
        """
        try:
            view = memoryview(data)
            (length,) = _LENGTH.unpack_from(view)
            row, rest = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length])), view[_LENGTH.size + length :]
            if isinstance(row, dict):
                self._read_own_records(row)
                return
            entry, rest = _entry(row, rest)
            if len(rest):
                raise ValueError("it has too many bytes")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not a valid journal entry: {error}") from None
        self._append_entry(entry)
        self._count_kept()

    def snapshot(self) -> Journal:
        """Return a copy that shares the immutable entries and states, to be serialised while this journal grows."""
        copied = copy(self)
        copied.entries, copied.heads, copied.states = list(self.entries), list(self.heads), dict(self.states)
        copied.revealed_steps = dict(self.revealed_steps)
        return copied

    def to_bytes(self) -> bytes:
        """Encode the whole journal."""
        return b"".join(self.pieces())

    def pieces(self) -> tuple[Buffer, ...]:
        """Encode the whole journal in pieces, so that totals and states are not copied."""
        return self._encode(self.entries, self.states, self._own_records())

    def _own_records(self) -> dict[str, Any]:
        """Return the records that are this member's own, as JSON values."""
        own = {
            "mark": self.pending_reveal and self.pending_reveal.to_json(),
            "revealed": [[slot, *step.to_json()] for slot, step in self.revealed_steps.items()],
        }
        if self.step_reveal is not None:
            own["step"] = self.step_reveal.to_json()
        return own | ({"started": self.started} if self.started else {})

    def _read_own_records(self, own: Mapping[str, Any]) -> None:
        """Read the result of `_own_records`, or the part of it that was stored."""
        if "started" in own:  # then the revealed steps are complete, and some may have become void
            self.revealed_steps.clear()
            self.pending_reveal = self.step_reveal = None
            self.started = int(own["started"])
        self.set_pending_reveal(None if own["mark"] is None else PendingReveal.from_json(own["mark"]))
        for slot, *step in own.get("revealed", ()):
            if type(slot) is not int:
                raise ValueError("a revealed step is malformed")
            self.revealed_steps[slot] = RevealedStep.from_json(step)
        if own.get("step") is not None:
            self.step_reveal = PendingReveal.from_json(own["step"])

    def export_since(self, since: int, *, states: bool) -> bytes:
        """Encode the entries from index `since` on, without the totals that the states include."""
        last = len(self) - 1
        entries = [
            entry if index == last or not self._in_state(entry) else replace(entry, words=None, certificate=None)
            for index, entry in enumerate(self.entries[since:], start=since)
        ]
        return b"".join(self._encode(entries, self.states if states else {}, {"mark": None}))

    def _encode(
        self,
        entries: Sequence[JournalEntry],
        states: Mapping[int, OptimizerState],
        own: Mapping[str, Any],
    ) -> tuple[Buffer, ...]:
        """Encode a JSON header, followed by the totals and states; `own` are the fields of this member alone."""
        rows = [(slot, state.steps, len(state.content), state.fixed) for slot, state in states.items()]
        content = {"format": FORMAT, "entries": [_row(each) for each in entries], "states": rows, **own}
        header = json.dumps(content).encode()
        totals = (entry.words for entry in entries if entry.words)
        body = _LENGTH.pack(len(header)), header, *totals, *(state.content for state in states.values())
        digest = sha256()
        for piece in body:
            digest.update(piece)
        return digest.digest(), *body

    @classmethod
    def from_bytes(cls, data: Buffer) -> Journal:
        """Decode the result of `to_bytes` or `export_since`.

        Raises:
            InputError: it is damaged, or not a journal.
        """
        view = memoryview(data)
        digest, body = bytes(view[:32]), view[32:]
        try:
            if sha256(body).digest() != digest:
                raise ValueError("its digest is wrong")
            return cls._decode(*read_header(body))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not a valid journal: {error}") from None

    @classmethod
    def _decode(cls, header: dict[str, Any], rest: memoryview) -> Journal:
        journal = cls()
        for row in header["entries"]:
            entry, rest = _entry(row, rest)
            journal._append_entry(entry)
        for slot, steps, size, fixed in header["states"]:
            if not all(type(each) is int and each >= 0 for each in (slot, steps, size)) or size > len(rest):
                raise ValueError("a state is malformed")
            content, rest = bytes(rest[:size]), rest[size:]
            journal.states[slot] = OptimizerState(steps, content, bool(fixed))
        journal._read_own_records(header)
        return journal

    def _count_kept(self) -> None:
        self._kept_bytes = sum(len(entry.words) for entry in self.entries if entry.step is None and entry.words)

    def _drop_totals_in_states(self) -> None:
        """Apply rule 1; only the last entries can have such totals."""
        for index in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[index]
            if entry.step is None:
                continue
            if entry.words is None:
                return
            if self._in_state(entry):
                self.entries[index] = replace(entry, words=None, certificate=None)

    def _in_state(self, entry: JournalEntry) -> bool:
        step = entry.step
        return step is not None and step.slot in self.states and step.number < self.states[step.slot].steps

    def _drop_oldest_totals(self) -> None:
        """Apply rule 3."""
        for index, entry in enumerate(self.entries[:-1]):
            if self._kept_bytes <= MAX_KEPT_BYTES:
                return
            if entry.step is None and entry.words is not None:
                self._kept_bytes -= len(entry.words)
                self.entries[index] = replace(entry, words=None, certificate=None)


def read_header(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Decode the header of a journal's bytes after their digest; return it and the remaining bytes."""
    (length,) = _LENGTH.unpack_from(body)
    header = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
    return header, body[_LENGTH.size + length :]


def _row(entry: JournalEntry) -> list[Any]:
    """Encode an entry, without its total, as JSON values."""
    return [entry.fields, entry.words is not None, entry.certificate and entry.certificate.to_json()]


def read_row(row: Any) -> tuple[JournalEntry, bool]:
    """Decode the result of `_row`; return the entry without its total, and whether the total is kept."""
    (description, epoch, loop_step, step, size, addends, attempt), kept, certificate = row
    numbers = (epoch, loop_step, size, addends, *(step or ()))
    if not isinstance(description, str) or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("an entry is malformed")
    proof = None if certificate is None else Certificate.from_json(certificate)
    optimizer_step = None if step is None else Step(*step)
    fields = description, epoch, loop_step, optimizer_step, size, addends, bytes.fromhex(attempt)
    return JournalEntry(*fields, None, proof), bool(kept)


def _entry(row: Any, rest: memoryview) -> tuple[JournalEntry, memoryview]:
    """Decode an entry and its total from the remaining bytes; return it and what remains after it."""
    entry, kept = read_row(row)
    if not kept:
        return entry, rest
    if not 0 < entry.size <= len(rest):
        raise ValueError("it is truncated")
    return replace(entry, words=rest[: entry.size]), rest[entry.size :]
