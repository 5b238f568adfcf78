"""The bytes of journals: whatever is malformed is rejected."""

from __future__ import annotations

import json
import struct
from hashlib import sha256
from typing import Any

import pytest

from cgd.errors import InputError
from cgd.secagg.certificates import PendingReveal, describe_sum
from cgd.secagg.journal import FORMAT, Journal
from support.wire import spec


def journal_bytes(
    entries: Any = (), states: Any = (), *, pending: Any = None, header: bytes | None = None, rest: bytes = b""
) -> bytes:
    """Encode a journal with a valid digest."""
    content = {"format": FORMAT, "entries": entries, "states": states, "mark": pending}
    encoded = header or json.dumps(content).encode()
    body = struct.pack("<Q", len(encoded)) + encoded + rest
    return sha256(body).digest() + body


ATTEMPT = bytes(32).hex()
ENTRY = [[describe_sum(spec(5)), 1, 0, [0, 1], 8, 4, ATTEMPT], False, None]
TOTAL = b"12345678"


def entry(field: int, value: Any, *, kept: bool = False) -> list[Any]:
    """Return an entry with another value in this field."""
    fields: Any = ENTRY[0]
    return [[*fields[:field], value, *fields[field + 1 :]], kept, None]


INVALID_JOURNALS = {
    "no bytes": b"",
    "less than a digest": bytes(31),
    "zeros": bytes(100),
    "truncated": journal_bytes()[:-1],
    "header of nested brackets": journal_bytes(header=b"[" * 100_000),
    "header is a list": journal_bytes(header=b"[]"),
    "header is a number": journal_bytes(header=b"7"),
    "header is not a text": journal_bytes(header=b"\xff"),
    "another format": journal_bytes(header=b'{"format": "cgd-ledger-2", "entries": [], "states": [], "mark": null}'),
    "no pending reveal field": journal_bytes(header=f'{{"format": "{FORMAT}", "entries": [], "states": []}}'.encode()),
    "pending reveal with too few fields": journal_bytes(pending=[0, ["a"]]),
    "pending reveal without an index": journal_bytes(pending=["0", ["a"], ATTEMPT, None]),
    "pending reveal without members": journal_bytes(pending=[0, [7], ATTEMPT, None]),
    "pending reveal with a short extra field": journal_bytes(pending=[0, ["a"], ATTEMPT, [ATTEMPT, 1]]),
    "pending reveal with an extra field": journal_bytes(pending=[0, ["a"], ATTEMPT, [ATTEMPT, True, {}, {}]]),
    "entry with too few fields": journal_bytes([[ENTRY[0][:6], *ENTRY[1:]]]),  # type: ignore[index]
    "entry without the kept flag": journal_bytes([[ENTRY[0], None]]),
    "certificate with too few fields": journal_bytes([[*ENTRY[:2], [ATTEMPT, 1]]]),
    "certificate without a number": journal_bytes([[*ENTRY[:2], [ATTEMPT, "1", "", "", "", {}]]]),
    "certificate with short keys": journal_bytes([[*ENTRY[:2], [ATTEMPT, 1, "", "", "", {"a": ["", ""]}]]]),
    "truncated total": journal_bytes([entry(4, 8, kept=True)], rest=TOTAL[:-1]),
    "empty total": journal_bytes([entry(4, 0, kept=True)]),
    "total of negative size": journal_bytes([entry(4, -4, kept=True)], rest=TOTAL),
    "description is a number": journal_bytes([entry(0, 7)]),
    "epoch is a text": journal_bytes([entry(1, "1")]),
    "step with one number": journal_bytes([entry(3, [0])]),
    "step is a text": journal_bytes([entry(3, [0, "1"])]),
    "step is empty": journal_bytes([entry(3, [])]),
    "step is false": journal_bytes([entry(3, False)]),
    "entry without an attempt": journal_bytes([entry(6, None)]),
    "truncated state": journal_bytes([ENTRY], [[0, 1, 8, False]], rest=TOTAL[:-1]),
    "state of negative size": journal_bytes([ENTRY], [[0, 1, -1, False]], rest=TOTAL[:-1]),
    "steps of a state are a text": journal_bytes([ENTRY], [[0, "1", 8, False]], rest=TOTAL),
    "slot of a state is a text": journal_bytes([ENTRY], [["0", 1, 8, False]], rest=TOTAL),
    "slot of a state is a list": journal_bytes([ENTRY], [[[], 1, 8, False]], rest=TOTAL),
}


def test_valid_journal_is_read() -> None:
    rows = [entry(4, 8, kept=True), ENTRY], [[0, 1, 8, False]]
    journal = Journal.from_bytes(journal_bytes(*rows, pending=[2, ["a"], ATTEMPT], rest=2 * TOTAL))
    assert [bytes(each.words or b"") for each in journal.entries] == [TOTAL, b""]
    assert journal.states[0].content == TOTAL
    assert journal.pending_reveal == PendingReveal(2, ("a",), bytes(32))


@pytest.mark.parametrize("content", INVALID_JOURNALS.values(), ids=INVALID_JOURNALS)
def test_invalid_journal_is_rejected(content: bytes) -> None:
    with pytest.raises(InputError, match="this is not a valid journal"):
        Journal.from_bytes(content)
