"""Journal transfers: an invalid or unproved journal is rejected before it takes up memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import InputError
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import FORMAT, Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.messages import JournalChunk
from cgd.secagg.positions import GroupPosition
from support.histories import append_certified, numbered_journal, numbered_total
from support.identities import public_keys
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = ("a", "b", "c")
SIZE = 5
GROUP = "everyone"

journal_of = partial(numbered_journal, spec(SIZE))


def transfer_of(
    journal: Journal,
    own: Journal | None = None,
    states: bool = True,
    epoch: int = 1,
    holders: tuple[str, ...] = ("b",),
    **claimed: Any,
) -> JournalTransfer:
    """Make the transfer from b of the entries that `journal` has in addition to `own`."""
    group = Group(GROUP, MEMBERS, Journal() if own is None else own)
    federation_spec = FederationSpec("trial", epoch, MEMBERS, {GROUP: MEMBERS}, {}, "1.0", public_keys(MEMBERS))
    position = GroupPosition(len(journal), journal.head, None, bytes(32), journal.state_summaries())
    claim = replace(position, **claimed)
    return JournalTransfer("b", group, claim, federation_spec, states=states, holders=holders)


def send(transfer: JournalTransfer, content: bytes, size: int | None = None, chunk_bytes: int = 100) -> None:
    for start in range(0, len(content), chunk_bytes):
        chunk = content[start : start + chunk_bytes]
        transfer.receive(JournalChunk(start, GROUP, len(content) if size is None else size, chunk))


def journal_with_states(count: int) -> Journal:
    journal = journal_of(count, MEMBERS, steps=True)
    journal.save_state(0, count - 2, b"a state")
    journal.save_state(1, 1, b"the best model", fixed=True)
    return journal


@pytest.mark.parametrize(("since", "states"), [(0, True), (2, True), (2, False)])
def test_journal_is_received_in_chunks_of_any_size(since: int, states: bool) -> None:
    journal, own = journal_with_states(4), journal_of(since, MEMBERS, steps=True)
    content = journal.export_since(since, states=states)
    for chunk_bytes in (1, 39, 1000, 1 << 20):
        transfer = transfer_of(journal, own, states)
        send(transfer, content, chunk_bytes=chunk_bytes)
        assert transfer.journal is not None
        assert len(transfer.journal) == 4 - since
        assert transfer.signers == set(MEMBERS)
        assert transfer.attempt == journal.entries[-1].attempt
        assert transfer.journal.states.keys() == (journal.states.keys() if states else set())


def test_duplicate_and_unordered_chunks_have_no_effect() -> None:
    journal = journal_with_states(3)
    content = journal.export_since(0, states=True)
    transfer = transfer_of(journal)
    transfer.receive(JournalChunk(5, GROUP, len(content), content[5:]))
    for _ in range(2):
        transfer.receive(JournalChunk(0, GROUP, len(content), content[:50]))
    transfer.receive(JournalChunk(50, GROUP, len(content), content[50:]))
    assert transfer.journal is not None
    transfer.receive(JournalChunk(0, GROUP, len(content), content))
    assert len(transfer.journal) == 3


# Altered headers.


def rewrite_header(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a journal with another header and a valid digest."""
    length = int.from_bytes(content[32:40], "little")
    header = json.loads(content[40 : 40 + length])
    assert header["format"] == FORMAT
    change(header)
    encoded = json.dumps(header).encode()
    body = len(encoded).to_bytes(8, "little") + encoded + content[40 + length :]
    return sha256(body).digest() + body


def drop_certificate(index: int, header: dict[str, Any]) -> None:
    header["entries"][index][2] = None


def drop_total(index: int, header: dict[str, Any]) -> None:
    header["entries"][index][1] = False


def drop_entry(header: dict[str, Any]) -> None:
    del header["entries"][0]


def change_field(field: int, value: Any, header: dict[str, Any]) -> None:
    header["entries"][0][0][field] = value


def swap_certificates(header: dict[str, Any]) -> None:
    one, other = header["entries"][-2:]
    one[2], other[2] = other[2], one[2]


def drop_signer(header: dict[str, Any]) -> None:
    del header["entries"][-1][2][5]["c"]


def forge_signature(header: dict[str, Any]) -> None:
    header["entries"][-1][2][5]["c"][1] = bytes(64).hex()


def change_state(field: int, value: Any, header: dict[str, Any]) -> None:
    header["states"][0][field] = value


def drop_states(header: dict[str, Any]) -> None:
    header["states"] = []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (drop_entry, "it has 2 sums, but 3 were reported"),
        (partial(change_field, 1, 7), "a sum is not the one that was signed|do not lead from our history"),
        (partial(drop_certificate, -1), "has no certificate"),
        (partial(drop_certificate, -2), "has no certificate"),
        (partial(drop_total, -1), "its last sum has no proof"),
        (swap_certificates, "a sum is not the one that was signed"),
        (drop_signer, "a sum is not the one that was signed"),
        (forge_signature, "the signature of c is invalid"),
        (partial(change_state, 0, 7), "its states are not the reported ones"),
        (partial(change_state, 1, 7), "its states are not the reported ones"),
        (partial(change_state, 2, 10**12), "its states are not the reported ones"),
        (partial(change_state, 3, True), "its states are not the reported ones"),
        (drop_states, "its states are not the reported ones"),
    ],
)
def test_unproved_journal_is_rejected_by_its_header(change: Callable[[Any], None], error: str) -> None:
    """No byte of totals and states is received."""
    journal = journal_with_states(3)
    content = rewrite_header(journal.export_since(0, states=True), change)
    header = content[: 40 + int.from_bytes(content[32:40], "little")]
    transfer = transfer_of(journal)
    with pytest.raises(InputError, match=error):
        send(transfer, header, len(content))
    assert transfer.journal is None


def test_entries_without_certificate_are_still_in_the_hash_chain() -> None:
    """The totals that states include have no certificates."""
    journal = journal_with_states(4)
    content = journal.export_since(0, states=True)
    header = json.loads(content[40 : 40 + int.from_bytes(content[32:40], "little")])
    assert [row[2] is None for row in header["entries"]] == [True, True, False, False]
    with pytest.raises(InputError, match="a sum is not the one that was signed"):
        send(transfer_of(journal), rewrite_header(content, partial(change_field, 2, 9)))


def test_head_that_was_not_reported_is_rejected() -> None:
    journal = journal_with_states(3)
    with pytest.raises(InputError, match="do not lead from our history to the reported one"):
        send(transfer_of(journal, head=bytes(32)), journal.export_since(0, states=True))


def test_journal_that_does_not_continue_ours_is_rejected() -> None:
    journal = journal_with_states(3)
    own = Journal()
    append_certified(own, spec(SIZE), numbered_total(SIZE, 9), MEMBERS, step=Step(0, 0))
    with pytest.raises(InputError, match="a sum is not the one that was signed|do not lead from our history"):
        send(transfer_of(journal, own), journal.export_since(1, states=True))


def test_last_sum_must_be_signed_by_all_present_members() -> None:
    journal = journal_of(2, ("a", "b", "d"))
    with pytest.raises(InputError, match="its last sum is not signed by c"):
        send(transfer_of(journal), journal.export_since(0, states=True))
    fewer = journal_of(2, ("a", "b"))
    with pytest.raises(InputError, match="its last sum has 2 members; a sum has at least 3 members"):
        send(transfer_of(fewer), fewer.export_since(0, states=True))


@pytest.mark.parametrize(("own_epochs", "epochs"), [([], [0]), ([], [2, 1]), ([2], [1])])
def test_sum_of_an_earlier_epoch_than_the_one_before_is_rejected(own_epochs: list[int], epochs: list[int]) -> None:
    own, journal = Journal(), Journal()
    for number, epoch in enumerate(own_epochs + epochs):
        for each in (own, journal) if number < len(own_epochs) else (journal,):
            append_certified(each, spec(SIZE), numbered_total(SIZE, number), MEMBERS, epoch)
    earlier = epochs[-1]
    with pytest.raises(InputError, match=f"a sum is of epoch {earlier}, but epoch {earlier + 1} had begun"):
        send(transfer_of(journal, own, epoch=3), journal.export_since(len(own), states=True))


def test_total_is_missing_only_if_a_state_includes_it() -> None:
    """Otherwise our program could never run again from this journal."""
    journal = journal_of(3, MEMBERS, steps=True)
    content = journal.export_since(0, states=True)
    at = int.from_bytes(content[32:40], "little") + 40
    shorter = content[:at] + content[at + 4 * SIZE :]
    without_first = rewrite_header(shorter, partial(drop_total, 0))
    with pytest.raises(InputError, match="a total is missing that no state includes"):
        send(transfer_of(journal), without_first)
    own = Journal()
    own.save_state(0, 1, b"our state")
    transfer = transfer_of(journal, own)
    send(transfer, without_first)
    assert transfer.journal is not None


def test_old_total_that_is_no_step_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member drops the oldest ones if they have too many bytes together."""
    for module in ("journal", "journal_transfer"):
        monkeypatch.setattr(f"cgd.secagg.{module}.MAX_KEPT_BYTES", 2 * 4 * SIZE)
    journal = journal_of(4, MEMBERS)
    assert [entry.words is None for entry in journal.entries] == [True, True, False, False]
    transfer = transfer_of(journal)
    send(transfer, journal.export_since(0, states=True))
    assert transfer.journal is not None
    monkeypatch.setattr("cgd.secagg.journal_transfer.MAX_KEPT_BYTES", 3 * 4 * SIZE)
    with pytest.raises(InputError, match="a total is missing that no state includes"):
        send(transfer_of(journal), journal.export_since(0, states=True))


# A history that one member alone has.


@pytest.mark.parametrize(("members", "holders"), [(("b", "x", "y"), ("b", "c")), (("b", "c", "x"), ("b",))])
def test_history_of_an_earlier_epoch_is_accepted_if_another_member_signed_or_holds_it(
    members: tuple[str, ...], holders: tuple[str, ...]
) -> None:
    journal = journal_of(2, members)
    transfer = transfer_of(journal, epoch=2, holders=holders)
    send(transfer, journal.export_since(0, states=True))
    assert transfer.refusal is None
    assert transfer.journal is not None


def test_history_that_the_source_alone_signed_is_refused_by_its_header() -> None:
    """Its other members, x and y, may be invented; the source may also be honest, so it is not accused."""
    journal = journal_of(2, ("b", "x", "y"))
    transfer = transfer_of(journal, epoch=2)
    send(transfer, journal.export_since(0, states=True))
    assert transfer.refusal == "is the only present member that signed its history"
    assert transfer.journal is None
    assert not transfer._received


# Sizes.


def test_states_much_larger_than_all_sums_are_rejected() -> None:
    journal = journal_with_states(3)
    content = journal.export_since(0, states=True)
    states = list(journal.state_summaries())
    states[0] = replace(states[0], size=(64 << 20) + 64 * 2 * 4 * SIZE + 1)
    larger = rewrite_header(content, partial(change_state, 2, states[0].size))
    transfer = transfer_of(journal)
    transfer.claimed = replace(transfer.claimed, states=tuple(states))
    size = len(larger) + states[0].size - len(b"a state")
    with pytest.raises(InputError, match=f"its states have {states[0].size + 14} bytes, and its largest sum has 20"):
        send(transfer, larger, size)


def test_journal_of_more_than_the_absolute_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(3, MEMBERS)
    monkeypatch.setattr("cgd.secagg.journal_transfer.MAX_CONTENT_BYTES", 3 * 4 * SIZE - 1)
    with pytest.raises(InputError, match="it has 60 bytes; at most 59 are accepted"):
        send(transfer_of(journal), journal.export_since(0, states=True))


@pytest.mark.parametrize(
    ("holders", "length", "refusal"),
    [
        (("b",), 33 << 20, "a list of sums of 33 MiB; at most 32 MiB are accepted from one member alone"),
        (("b", "c"), 129 << 20, "a list of sums of 129 MiB; at most 128 MiB are accepted$"),
        (("b", "c"), 33 << 20, None),
    ],
)
def test_long_list_of_sums_is_accepted_only_if_two_members_report_it(
    holders: tuple[str, ...], length: int, refusal: str | None
) -> None:
    """An honest member may have as many sums, so it is not accused."""
    transfer = transfer_of(journal_of(1, MEMBERS), holders=holders, length=1_000_000)
    send(transfer, bytes(32) + length.to_bytes(8, "little") + bytes(100), 1 << 60)
    if refusal is None:
        assert transfer.refusal is None
        assert len(transfer._received) == 140
    else:
        assert re.search(refusal, transfer.refusal or "")
        assert not transfer._received


def test_journal_longer_than_its_entries_is_rejected() -> None:
    journal = journal_with_states(3)
    content = journal.export_since(0, states=True)
    for other in (content + b"x", content[:-1]):
        with pytest.raises(InputError, match=f"it has {len(other)} bytes, but its entries have {len(content)}"):
            send(transfer_of(journal), other)
    for chunk_bytes in (100, 1 << 20):
        transfer = transfer_of(journal)
        with pytest.raises(InputError, match="it is longer than its entries state"):
            send(transfer, content[:-1] + bytes(1000), len(content), chunk_bytes)
        assert transfer.journal is None


def test_too_long_header_is_rejected_before_it_is_received() -> None:
    journal = journal_with_states(3)
    for length in (1 << 20, 1 << 40, 2**64 - 1):
        transfer = transfer_of(journal)
        with pytest.raises(InputError, match=f"a header of {length} bytes is too long for its entries"):
            send(transfer, bytes(32) + length.to_bytes(8, "little") + bytes(100), 1 << 60, 10)
        assert len(transfer._received) <= 50


@pytest.mark.parametrize("header", [b"[" * 1000, b"7", b"\xff", b"{}", b'{"format": "x"}'])
def test_malformed_header_is_rejected(header: bytes) -> None:
    with pytest.raises(InputError):
        send(transfer_of(journal_with_states(3)), bytes(32) + len(header).to_bytes(8, "little") + header)


def test_total_or_state_that_was_not_reported_is_rejected() -> None:
    journal = journal_with_states(3)
    content = journal.export_since(0, states=True)
    last_of_totals = -len(b"a statethe best model") - 1
    for changed, error in ((last_of_totals, "a total is not"), (-1, "its states are not"), (-16, "its states are not")):
        body = bytearray(content[32:])
        body[changed] ^= 1
        transfer = transfer_of(journal)
        with pytest.raises(InputError, match=error):
            send(transfer, sha256(body).digest() + bytes(body))
        assert transfer.journal is None
    with pytest.raises(InputError, match="its digest is wrong"):
        send(transfer_of(journal), bytes(32) + content[32:])
