"""Journal positions: the reports that members send when a view is formed, and their comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cgd.errors import RemoteProtocolError
from cgd.secagg.key_agreement import constant_time_equal
from cgd.secagg.statements import slot_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.key_agreement import PairKeys
    from cgd.secagg.messages import JournalPosition, PeerId
    from cgd.secagg.statements import StatementLog

MAX_GROUPS = 64
MAX_STATES = 1024


@dataclass(frozen=True)
class StateSummary:
    """The summary of a stored optimiser state: number of steps, size in bytes, whether it is fixed, and digest."""

    slot: int
    steps: int
    size: int
    fixed: bool
    digest: bytes


@dataclass(frozen=True)
class OpenStep:
    """The gradient sum of an optimiser step that a member may have revealed, and that is not finished.

    Attributes:
        slot: the optimiser.
        number: the number of the step.
        attempt: the attempt in which the member revealed its key.
        period: the period of the attempt.
        members: its members.
    """

    slot: int
    number: int
    attempt: bytes
    period: int
    members: tuple[PeerId, ...]


@dataclass(frozen=True)
class Participation:
    """If there is a quorum: what a member has of sums that may have been opened; see `completion.py`.

    Attributes:
        started: the latest period in which the member started a sum.
        revealed_in: the period of its pending reveal; 0 if it has none.
        members: the members of the sum of its pending reveal.
        material: the attempt that it can help to complete, if there is one.
        has_total: whether it has the masked total of this attempt.
        step: the gradient sum that it may have revealed; another sum, a count, may have taken its place since.
    """

    started: int
    revealed_in: int = 0
    members: tuple[PeerId, ...] = ()
    material: bytes | None = None
    has_total: bool = False
    step: OpenStep | None = None


@dataclass(frozen=True)
class GroupPosition:
    """A member's position in the journal of one group.

    Attributes:
        length: the number of finished sums.
        head: the head of the hash chain over them.
        pending_reveal: the latest attempt at the next sum in which the member revealed its key, if any.
        commitment: the digest of its contribution to the key of the group.
        states: the summaries of its optimiser states; None in a first report.
        revealed: the slot and number of each optimiser step whose gradient sum it may have revealed and not finished.
        attendance: what it has of sums that may have been opened, if there is a quorum.
    """

    length: int
    head: bytes
    pending_reveal: bytes | None
    commitment: bytes
    states: tuple[StateSummary, ...] | None = None
    revealed: tuple[tuple[int, int], ...] = ()
    attendance: Participation | None = None


@dataclass(frozen=True)
class PositionReport:
    """A member's report in a view; `number` counts its reports, from 0.

    Examples:
        >>> position = GroupPosition(3, bytes(32), None, bytes(32), (StateSummary(0, 3, 80, False, bytes(32)),))
        >>> report = PositionReport(bytes(32), 0, {"everyone": position})
        >>> PositionReport.from_bytes(report.to_bytes()) == report
        True
    """

    view: bytes
    number: int
    groups: Mapping[str, GroupPosition]

    def to_bytes(self) -> bytes:
        """Encode the report; equal reports have equal bytes."""
        groups = {
            name: [
                position.length,
                position.head.hex(),
                None if position.pending_reveal is None else position.pending_reveal.hex(),
                position.commitment.hex(),
                None if position.states is None else [_state_row(state) for state in position.states],
                position.revealed,
                *([] if position.attendance is None else [_participation_row(position.attendance)]),
            ]
            for name, position in sorted(self.groups.items())
        }
        return json.dumps([self.view.hex(), self.number, groups]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PositionReport:
        """Decode the result of `to_bytes`.

        Raises:
            ValueError: it is malformed.
        """
        try:
            view, number, groups = json.loads(data)
            if len(groups) > MAX_GROUPS:
                raise ValueError(f"{len(groups)} groups")
            positions = {str(name): _read_position(row) for name, row in groups.items()}
            return cls(_digest(view), _count(number), positions)
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a report is malformed: {error}") from None


class PositionReports:
    """The reports of all members in one view.

    Args:
        me: the name of this member.
        federation_spec: the federation spec.
        pair_keys: the keys that we share with each peer.
        statement_log: the signed statements of the view.

    Attributes:
        first: the first report of each member, encoded, with its signature.
        first_reports: the first report of each member.
        latest: the latest report of each member.
        contributions: the contributions to the keys of the groups, by group and member.
        max_length: the largest number of finished sums in a first report, by group.
        gathered: the digest of the first reports that a member received, by member.
    """

    def __init__(
        self,
        me: PeerId,
        federation_spec: FederationSpec,
        pair_keys: Mapping[PeerId, PairKeys],
        statement_log: StatementLog,
    ) -> None:
        self.first: dict[PeerId, tuple[bytes, bytes]] = {}
        self.first_reports: dict[PeerId, PositionReport] = {}
        self.latest: dict[PeerId, PositionReport] = {}
        self.contributions: dict[str, dict[PeerId, bytes]] = {name: {} for name in federation_spec.groups}
        self.max_length: dict[str, int] = {}
        self.gathered: dict[PeerId, bytes] = {}
        self._me, self._federation_spec = me, federation_spec
        self._pair_keys, self._statement_log = pair_keys, statement_log

    @property
    def view(self) -> bytes:
        """The digest of the view, 32 bytes."""
        return self._statement_log.view

    @property
    def missing(self) -> frozenset[PeerId]:
        """The members that have not reported."""
        return frozenset(self._federation_spec.members) - self.latest.keys()

    @property
    def agreed(self) -> bool:
        """True if all members have the first reports of all members, and the same ones."""
        return len(self.gathered) == len(self._federation_spec.members) and not self.differing

    @property
    def differing(self) -> frozenset[PeerId]:
        """The members that announced other first reports than we have."""
        if self.missing:
            return frozenset()
        ours = self.digest
        return frozenset(name for name, digest in self.gathered.items() if digest != ours)

    def receive_gathered(self, sender: PeerId, digest: bytes) -> None:
        """Record that a member has all first reports; if they are not ours, send evidence to all members.

        Raises:
            RemoteProtocolError: the member announced it before.
        """
        if sender in self.gathered:
            raise RemoteProtocolError(sender, "sent PositionsGathered twice")
        self.gathered[sender] = digest
        if self.differing:
            self._statement_log.send_evidence("standing", slot_of(self.view))

    @property
    def digest(self) -> bytes:
        """The digest of the first reports of all members."""
        return digest_of_reports({name: content for name, (content, _) in self.first.items()})

    def first_positions(self, group: str) -> dict[PeerId, GroupPosition]:
        """Return the first position of each member in a group, also ours."""
        members = sorted(self._federation_spec.groups[group])
        return {name: self.first_reports[name].groups[group] for name in members}

    def positions(self, group: str) -> dict[PeerId, GroupPosition]:
        """Return the latest position of each peer in a group."""
        return {
            name: self.latest[name].groups[group]
            for name in sorted(self._federation_spec.groups[group])
            if name != self._me
        }

    def sign(self, report: PositionReport) -> bytes:
        """Sign and record our own report."""
        content = report.to_bytes()
        signature = self._statement_log.sign("standing", slot_of(self.view, "", report.number), content)
        self.latest[self._me] = report
        if report.number == 0:
            self.first[self._me] = content, signature
            self.first_reports[self._me] = report
            self._record_lengths(report)
        return signature

    def receive(self, sender: PeerId, message: JournalPosition) -> None:
        """Verify and record a peer's report.

        Raises:
            RemoteProtocolError: it is malformed, not signed, or contradicts an earlier report.
            EquivocationError: the sender signed another report for another member.
        """
        try:
            report = PositionReport.from_bytes(message.content)
        except ValueError as error:
            raise RemoteProtocolError(sender, f"sent a malformed JournalPosition: {error}") from None
        if report.view != self.view:
            raise RemoteProtocolError(sender, "sent a report of another view")
        known = self.latest.get(sender)
        if report.number != (0 if known is None else known.number + 1):
            raise RemoteProtocolError(sender, f"sent its report {report.number} out of order")
        slot = slot_of(self.view, "", report.number)
        self._statement_log.receive(sender, "standing", slot, message.content, message.signature)
        groups = {name for name, members in self._federation_spec.groups.items() if sender in members}
        if report.groups.keys() != groups:
            raise RemoteProtocolError(
                sender, f"reported the groups {sorted(report.groups)}, but is a member of {sorted(groups)}"
            )
        if any((each.attendance is None) != (self._federation_spec.quorum is None) for each in report.groups.values()):
            raise RemoteProtocolError(sender, "sent a report that does not fit the quorum of the federation file")
        if known is None:
            self._receive_first(sender, message, report)
        elif any(position.length < known.groups[name].length for name, position in report.groups.items()):
            raise RemoteProtocolError(sender, "reported fewer finished sums than before")
        self.latest[sender] = report

    def _receive_first(self, sender: PeerId, message: JournalPosition, report: PositionReport) -> None:
        if not constant_time_equal(message.tag, self._pair_keys[sender].peer_tag):
            raise RemoteProtocolError(
                sender, "cannot prove that the ephemeral key it announced is its own: it may be another member's"
            )
        contributions = dict(message.contributions)
        common = [name for name, members in self._federation_spec.groups.items() if {self._me, sender} <= set(members)]
        for name in common:
            part = contributions.get(name)
            if part is None or sha256(part).digest() != report.groups[name].commitment:
                raise RemoteProtocolError(
                    sender, f"sent a contribution to the key of {name} that does not match its commitment"
                )
        for name in common:
            self.contributions[name][sender] = contributions[name]
        self.first[sender] = message.content, message.signature
        self.first_reports[sender] = report
        self._record_lengths(report)

    def _record_lengths(self, report: PositionReport) -> None:
        for name, position in report.groups.items():
            self.max_length[name] = max(position.length, self.max_length.get(name, 0))


def digest_of_reports(contents: Mapping[PeerId, bytes]) -> bytes:
    """Return the digest of the encoded reports of all members."""
    digests = [[name, sha256(contents[name]).hexdigest()] for name in sorted(contents)]
    return sha256(json.dumps(digests).encode()).digest()


def _state_row(state: StateSummary) -> list[Any]:
    return [state.slot, state.steps, state.size, state.fixed, state.digest.hex()]


def _participation_row(each: Participation) -> list[Any]:
    material = None if each.material is None else each.material.hex()
    row: list[Any] = [each.started, each.revealed_in, each.members, material, each.has_total]
    if (step := each.step) is not None:
        row.append([step.slot, step.number, step.attempt.hex(), step.period, step.members])
    return row


def _read_participation(row: Any) -> Participation:
    started, revealed_in, members, material, has_total, *rest = row
    if len(rest) > 1:
        raise ValueError("a participation has too many fields")
    step = None
    if rest:
        slot, number, digest, period, names = rest[0]
        step = OpenStep(_count(slot), _count(number), _digest(digest), _count(period), _names(names))
    attempt = None if material is None else _digest(material)
    return Participation(_count(started), _count(revealed_in), _names(members), attempt, bool(has_total), step)


def _names(values: Any) -> tuple[PeerId, ...]:
    if not all(isinstance(name, str) for name in values) or len(values) > MAX_STATES:
        raise ValueError("the members of a sum are malformed")
    return tuple(values)


def _read_position(row: Any) -> GroupPosition:
    length, head, pending, commitment, states, revealed, *rest = row
    if len(rest) > 1:
        raise ValueError("a position has too many fields")
    if len(revealed) > MAX_STATES:
        raise ValueError(f"{len(revealed)} revealed steps")
    steps = tuple((_count(slot), _count(number)) for slot, number in revealed)
    if states is not None:
        if len(states) > MAX_STATES:
            raise ValueError(f"{len(states)} states")
        states = tuple(
            StateSummary(_count(slot), _count(taken), _count(size), bool(fixed), _digest(digest))
            for slot, taken, size, fixed, digest in states
        )
    pending_reveal = None if pending is None else _digest(pending)
    attendance = _read_participation(rest[0]) if rest else None
    fields = _count(length), _digest(head), pending_reveal, _digest(commitment), states, steps, attendance
    return GroupPosition(*fields)


def _digest(value: Any) -> bytes:
    digest = bytes.fromhex(value)
    if len(digest) != sha256().digest_size:
        raise ValueError("a digest does not have 32 bytes")
    return digest


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is not a valid count")
    return int(value)
