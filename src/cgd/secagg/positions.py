"""What members report of themselves when a view is formed: how far they are, and by which history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import PeerId

MAX_GROUPS = 64
MAX_STATES = 1024


@dataclass(frozen=True)
class StateRow:
    """What a member remembers of an optimiser: after how many steps, how many bytes, if fixed, and their digest."""

    slot: int
    steps: int
    size: int
    fixed: bool
    digest: bytes


@dataclass(frozen=True)
class GroupRow:
    """Where a member stands in one group.

    Attributes:
        length: how many sums it has finished.
        head: of the hash chain over them.
        mark: the opening for which it has shown its key in the sum that comes next, if it has; of the latest attempt.
        commitment: the digest of its contribution to the key that the members have in common.
        states: what it remembers of optimisers; None in a first report.
    """

    length: int
    head: bytes
    mark: bytes | None
    commitment: bytes
    states: tuple[StateRow, ...] | None = None


@dataclass(frozen=True)
class PositionReport:
    """What a member reports in a view; `number` counts its reports, from 0.

    Examples:
        >>> row = GroupRow(3, bytes(32), None, bytes(32), (StateRow(0, 3, 80, False, bytes(32)),))
        >>> report = PositionReport(bytes(32), 0, {"everyone": row})
        >>> PositionReport.from_bytes(report.to_bytes()) == report
        True
    """

    view: bytes
    number: int
    groups: Mapping[str, GroupRow]

    def to_bytes(self) -> bytes:
        """Encode the report, always in the same way."""
        groups = {
            name: [
                row.length,
                row.head.hex(),
                None if row.mark is None else row.mark.hex(),
                row.commitment.hex(),
                None if row.states is None else [_state_json(state) for state in row.states],
            ]
            for name, row in sorted(self.groups.items())
        }
        return json.dumps([self.view.hex(), self.number, groups]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PositionReport:
        """Read what `to_bytes` made.

        Raises:
            ValueError: it is malformed.
        """
        try:
            view, number, groups = json.loads(data)
            if len(groups) > MAX_GROUPS:
                raise ValueError(f"{len(groups)} groups")
            rows = {str(name): _row(row) for name, row in groups.items()}
            return cls(_digest(view), _count(number), rows)
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a report is malformed: {error}") from None


def digest_of_reports(contents: Mapping[PeerId, bytes]) -> bytes:
    """Digest what all members reported."""
    said = [[name, sha256(contents[name]).hexdigest()] for name in sorted(contents)]
    return sha256(json.dumps(said).encode()).digest()


def _state_json(state: StateRow) -> list[Any]:
    return [state.slot, state.steps, state.size, state.fixed, state.digest.hex()]


def _row(row: Any) -> GroupRow:
    length, head, mark, commitment, states = row
    if states is not None:
        if len(states) > MAX_STATES:
            raise ValueError(f"{len(states)} states")
        states = tuple(
            StateRow(_count(slot), _count(steps), _count(size), bool(fixed), _digest(digest))
            for slot, steps, size, fixed, digest in states
        )
    return GroupRow(_count(length), _digest(head), None if mark is None else _digest(mark), _digest(commitment), states)


def _digest(value: Any) -> bytes:
    digest = bytes.fromhex(value)
    if len(digest) != sha256().digest_size:
        raise ValueError("a digest has another length than 32 bytes")
    return digest


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is no count")
    return int(value)
