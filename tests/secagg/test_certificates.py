"""Proofs of what was summed: whatever is wrong with one, it is refused, before it takes up memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import InputError
from cgd.secagg.certificates import GENESIS, Certificate, PendingReveal, Terms, acceptable, link
from cgd.secagg.codec import spec_bytes
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import FORMAT, Journal, Step
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.messages import JournalChunk
from cgd.secagg.positions import GroupRow
from support.histories import enter
from support.identities import public_keys
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

MEMBERS = ("a", "b", "c")
SIZE = 5
KEYS = public_keys(MEMBERS)
GROUP = "everyone"


def total(number: int) -> npt.NDArray[Any]:
    return np.arange(SIZE, dtype="<u4") + 10 * number


def past(count: int, step: bool = False, members: Sequence[str] = MEMBERS) -> Journal:
    journal = Journal()
    for number in range(count):
        enter(journal, spec(SIZE), total(number), members, step=Step(0, number) if step else None)
    return journal


def certificate() -> Certificate:
    made = past(1).entries[0].certificate
    assert made is not None
    return made


# Certificates.


def test_a_certificate_fits_its_entry_its_total_and_its_signers_also_after_a_round_trip() -> None:
    journal = past(3)
    for place, entry in enumerate(journal.entries):
        assert entry.certificate is not None
        proof = Certificate.from_json(json.loads(json.dumps(entry.certificate.to_json())))
        assert proof == entry.certificate
        assert proof.signers(GROUP, KEYS) == set(MEMBERS)
        proof.check_entry(journal.heads[place], entry.fields)
        proof.check_entry(None, entry.fields)
        proof.check_total(total(place).data)


def test_another_total_is_refused() -> None:
    words = total(0)
    for place in range(SIZE):
        other = words.copy()
        other[place] ^= 1
        with pytest.raises(ValueError, match="a total is not the one that was signed"):
            certificate().check_total(other.data)
    with pytest.raises(ValueError, match="a total is not the one that was signed"):
        certificate().check_total(words[:-1].data)


def test_another_key_is_refused() -> None:
    made = certificate()
    other = replace(made, keys={**made.keys, "b": bytes(16)})
    with pytest.raises(ValueError, match="a total is not the one that was signed"):
        other.check_total(total(0).data)
    with pytest.raises(ValueError, match="the signature of a is wrong"):
        other.signers(GROUP, KEYS)


def test_another_signature_is_refused() -> None:
    made = certificate()
    for signature in (bytes(64), b"", made.signatures["a"]):
        with pytest.raises(ValueError, match="the signature of b is wrong"):
            replace(made, signatures={**made.signatures, "b": signature}).signers(GROUP, KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {"view": bytes(32)},
        {"number": 2},
        {"spec": spec_bytes(spec(SIZE + 1))},
        {"terms": b"[]"},
        {"sealed": bytes(32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_signed_cannot_be_changed(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the signature of a is wrong"):
        replace(certificate(), **changes).signers(GROUP, KEYS)


def test_a_certificate_is_for_one_group() -> None:
    with pytest.raises(ValueError, match="the signature of a is wrong"):
        certificate().signers("column-0", KEYS)


def test_keys_and_signatures_are_of_the_same_members() -> None:
    made = certificate()
    halves: tuple[dict[str, Any], ...] = (
        {"keys": {name: key for name, key in made.keys.items() if name != "c"}},
        {"signatures": {name: each for name, each in made.signatures.items() if name != "c"}},
    )
    for changes in halves:
        with pytest.raises(ValueError, match="it lacks keys or signatures"):
            replace(made, **changes).signers(GROUP, KEYS)


def test_who_has_not_signed_is_no_signer() -> None:
    """Nor can it be left out: the digests of all keys are signed."""
    two = past(1, members=("a", "b")).entries[0].certificate
    assert two is not None
    assert two.signers(GROUP, KEYS) == {"a", "b"}
    made = certificate()
    without = replace(
        made,
        keys={name: made.keys[name] for name in "ab"},
        signatures={name: made.signatures[name] for name in "ab"},
    )
    with pytest.raises(ValueError, match="the signature of a is wrong"):
        without.signers(GROUP, KEYS)
    assert made.signers(GROUP, public_keys("ab")) == {"a", "b"}  # c has left, and its key is not known any more


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "float32[6] in 32 bits"), (1, 2), (2, 1), (3, [0, 0]), (4, 4 * SIZE + 4), (5, 4), (6, bytes(32).hex())],
)
def test_another_entry_is_refused(place: int, value: Any) -> None:
    journal = past(1)
    fields = journal.entries[0].fields
    fields[place] = value
    with pytest.raises(ValueError, match="than was signed|that was signed"):
        certificate().check_entry(GENESIS, fields)


def test_another_place_in_history_is_refused() -> None:
    journal = past(2)
    with pytest.raises(ValueError, match="a sum is not the one that was signed"):
        certificate().check_entry(journal.heads[1], journal.entries[0].fields)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        ["00", 1, "00", "", "00"],
        ["00", True, "00", "", "00", {}],
        ["00", -1, "00", "", "00", {}],
        ["00", 2**63, "00", "", "00", {}],
        ["xx", 1, "00", "", "00", {}],
        ["00", 1, "00", "", "00", {"a": ["00", "00"]}],
        ["00", 1, "00", "", "00", {"a": ["00" * 16]}],
    ],
)
def test_a_malformed_certificate_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Certificate.from_json(value)


# The hash chain.


def test_every_field_of_every_entry_is_in_the_chain() -> None:
    entries = past(3).entries
    assert len({link(GENESIS, entries[0].fields), link(bytes(32), entries[0].fields)}) == 2
    for place in range(len(entries[0].fields)):
        fields = entries[0].fields
        fields[place] = "other"
        assert link(GENESIS, fields) != link(GENESIS, entries[0].fields)


def test_the_chain_goes_on_from_what_was_saved_or_given() -> None:
    whole = past(4)
    assert whole.heads[0] == GENESIS
    assert len(set(whole.heads)) == 5
    saved = Journal.from_bytes(whole.to_bytes())
    assert saved.heads == whole.heads
    part = past(1)
    part.catch_up(Journal.from_bytes(whole.gift(1, states=True)))
    assert part.heads == whole.heads
    by_records = Journal()
    for place in range(4):
        by_records.add_record(b"".join(bytes(piece) for piece in whole.entry(place)))
    assert by_records.heads == whole.heads
    assert by_records.to_bytes() == whole.to_bytes()


def test_a_certificate_is_forgotten_with_its_total_and_the_last_one_never() -> None:
    journal = past(3, step=True)
    journal.remember(0, 3, lambda: b"state")
    assert [entry.certificate is not None for entry in Journal.from_bytes(journal.gift(0, states=True)).entries] == [
        False,
        False,
        True,
    ]
    enter(journal, spec(SIZE), total(3), MEMBERS, step=Step(0, 3))
    assert [entry.certificate is not None for entry in journal.entries] == [False, False, False, True]
    assert [entry.words is not None for entry in journal.entries] == [False, False, False, True]


# Terms.


def terms(**changes: Any) -> Terms:
    return replace(Terms(1, 2, bytes(32), 3, (0, 4), bytes(32)), **changes)


@pytest.mark.parametrize("step", [None, (0, 4)])
def test_terms_survive_a_round_trip(step: tuple[int, int] | None) -> None:
    assert Terms.from_bytes(terms(step=step).to_bytes()) == terms(step=step)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'["1", 2, "", "", 3, null]', b'[1, 2, "", "", 3, [0]]', b"[" * 10]
)
def test_malformed_terms_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        Terms.from_bytes(data)


def test_terms_tell_what_differs() -> None:
    other = terms(epoch=2, place=1, head=bytes([1] * 32), clock=0, step=None)
    assert terms().differences(terms()) == []
    assert terms().differences(other) == [
        "epoch 2 instead of 1",
        "1 sums finished instead of 2",
        "another history",
        "step 0 of its loop instead of 3",
        "step None of an optimiser instead of (0, 4)",
    ]


# Marks.

OPENING = sha256(b"an opening").digest()
MARK = PendingReveal(2, MEMBERS, OPENING)


def test_a_mark_survives_a_round_trip_and_is_saved_and_not_given() -> None:
    mark = MARK
    assert PendingReveal.from_json(json.loads(json.dumps(mark.to_json()))) == mark
    journal = past(2)
    journal.mark = mark
    assert Journal.from_bytes(journal.to_bytes()).mark == mark
    assert Journal.from_bytes(journal.gift(0, states=True)).mark is None
    again = past(2)
    again.add_record(b"".join(bytes(piece) for piece in journal.mark_record()))
    assert again.mark == mark
    assert again.heads == journal.heads


def test_a_mark_of_the_first_sum_is_saved() -> None:
    journal = Journal()
    journal.mark = replace(MARK, place=0)
    assert Journal.from_bytes(journal.to_bytes()).mark == journal.mark


def test_a_mark_is_over_when_its_sum_is_finished() -> None:
    for place, over in ((2, True), (3, False)):
        journal = past(2)
        journal.mark = replace(MARK, place=place)
        enter(journal, spec(SIZE), total(2), MEMBERS)
        assert (journal.mark is None) == over


@pytest.mark.parametrize("value", [None, [], [1, ["a"]], ["1", ["a"], ""], [1, [2], ""], [1, 2, ""], [1, ["a"], "x"]])
def test_a_malformed_mark_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        PendingReveal.from_json(value)


# Whose report speaks against a history.

HEAD = sha256(b"a head").digest()
TOOK_PART = GroupRow(2, bytes(32), OPENING, bytes(32))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (GroupRow(3, HEAD, None, bytes(32)), None),
        (GroupRow(3, bytes(32), None, bytes(32)), "has another history"),
        (GroupRow(2, bytes(32), None, bytes(32)), "is behind and has not signed it"),
        (GroupRow(2, bytes(32), OPENING, bytes(32)), "is behind and has not signed it"),
        (GroupRow(2, bytes(32), bytes(32), bytes(32)), "took part in another attempt"),
        (GroupRow(0, GENESIS, None, bytes(32)), None),
    ],
)
def test_who_speaks_against_an_opening(row: GroupRow, says: str | None) -> None:
    expected = {} if says is None else {"d": says}
    assert acceptable(2, OPENING, HEAD, TOOK_PART, {"d": row}, signers=MEMBERS) == expected


def test_who_has_signed_an_opening_and_agreed_to_no_other_does_not_speak_against_it() -> None:
    later = replace(TOOK_PART, mark=bytes(32))
    assert acceptable(2, OPENING, HEAD, TOOK_PART, {"c": TOOK_PART}, signers=MEMBERS) == {}
    assert acceptable(2, OPENING, HEAD, TOOK_PART, {"c": later}, signers=MEMBERS) != {}


def test_who_took_no_part_waits_for_those_who_did() -> None:
    new = GroupRow(0, GENESIS, None, bytes(32))
    assert acceptable(2, OPENING, HEAD, new, {"c": TOOK_PART}, signers=MEMBERS) == {"c": "has not finished it yet"}
    finished = GroupRow(3, HEAD, None, bytes(32))
    assert acceptable(2, OPENING, HEAD, new, {"c": finished}, signers=MEMBERS) == {}


# What a member gives of its past.


def federation_spec(epoch: int = 1) -> FederationSpec:
    return FederationSpec("trial", epoch, MEMBERS, {GROUP: MEMBERS}, {}, "1.0", KEYS)


def claim_of(journal: Journal, states: bool = True) -> GroupRow:
    return GroupRow(len(journal), journal.head, None, bytes(32), journal.state_rows() if states else None)


def journal_transfer(
    journal: Journal, own: Journal | None = None, states: bool = True, **claimed: Any
) -> JournalTransfer:
    """We hold `own` and are about to be given what `journal` has more."""
    group = Group(GROUP, MEMBERS, own or Journal())
    return JournalTransfer("b", group, replace(claim_of(journal), **claimed), federation_spec(), states=states)


def give(to: JournalTransfer, content: bytes, size: int | None = None, piece_bytes: int = 100) -> None:
    whole = len(content) if size is None else size
    for start in range(0, len(content), piece_bytes):
        to.take(JournalChunk(start, GROUP, whole, content[start : start + piece_bytes]))


def remembering(count: int) -> Journal:
    journal = past(count, step=True)
    journal.remember(0, count - 2, lambda: b"a state")
    journal.remember(1, 1, lambda: b"the best model", fixed=True)
    return journal


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("states", [True, False])
def test_a_past_is_taken_over_in_pieces_of_any_size(since: int, states: bool) -> None:
    journal, own = remembering(4), past(since, step=True)
    content = journal.gift(since, states=states)
    for piece_bytes in (1, 39, 1000, 1 << 20):
        taken = journal_transfer(journal, own, states)
        give(taken, content, piece_bytes=piece_bytes)
        assert taken.given is not None
        assert len(taken.given) == 4 - since
        assert taken.signers == set(MEMBERS)
        assert taken.opening == journal.entries[-1].opening
        assert taken.given.states.keys() == (journal.states.keys() if states else set())


def test_copies_of_pieces_and_pieces_out_of_order_change_nothing() -> None:
    journal = remembering(3)
    content = journal.gift(0, states=True)
    taken = journal_transfer(journal)
    taken.take(JournalChunk(5, GROUP, len(content), content[5:]))
    for _ in range(2):
        taken.take(JournalChunk(0, GROUP, len(content), content[:50]))
    taken.take(JournalChunk(50, GROUP, len(content), content[50:]))
    assert taken.given is not None
    taken.take(JournalChunk(0, GROUP, len(content), content))
    assert len(taken.given) == 3


def rewritten(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A ledger with another header, and a digest that fits."""
    length = int.from_bytes(content[32:40], "little")
    header = json.loads(content[40 : 40 + length])
    assert header["format"] == FORMAT
    change(header)
    written = json.dumps(header).encode()
    body = len(written).to_bytes(8, "little") + written + content[40 + length :]
    return sha256(body).digest() + body


def drop_certificate(place: int, header: dict[str, Any]) -> None:
    header["entries"][place][2] = None


def drop_total(header: dict[str, Any]) -> None:
    header["entries"][-1][1] = False


def drop_entry(header: dict[str, Any]) -> None:
    del header["entries"][0]


def other_field(place: int, value: Any, header: dict[str, Any]) -> None:
    header["entries"][0][0][place] = value


def swap_certificates(header: dict[str, Any]) -> None:
    one, other = header["entries"][-2:]
    one[2], other[2] = other[2], one[2]


def drop_signer(header: dict[str, Any]) -> None:
    del header["entries"][-1][2][5]["c"]


def forge_signature(header: dict[str, Any]) -> None:
    header["entries"][-1][2][5]["c"][1] = bytes(64).hex()


def other_state(place: int, value: Any, header: dict[str, Any]) -> None:
    header["states"][0][place] = value


def drop_states(header: dict[str, Any]) -> None:
    header["states"] = []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_entry, "it has 2 sums, not the 3 it told of"),
        (partial(other_field, 1, 7), "a sum is not the one that was signed|do not lead from our history"),
        (partial(drop_certificate, -1), "has no certificate"),
        (partial(drop_certificate, -2), "has no certificate"),
        (drop_total, "its last sum is not proved"),
        (swap_certificates, "a sum is not the one that was signed"),
        (drop_signer, "a sum is not the one that was signed"),
        (forge_signature, "the signature of c is wrong"),
        (partial(other_state, 0, 7), "its states are not those it told of"),
        (partial(other_state, 1, 7), "its states are not those it told of"),
        (partial(other_state, 2, 10**12), "its states are not those it told of"),
        (partial(other_state, 3, True), "its states are not those it told of"),
        (drop_states, "its states are not those it told of"),
    ],
)
def test_a_past_that_is_not_proved_is_refused_by_its_header(change: Callable[[Any], None], says: str) -> None:
    """Before a single byte of totals and states is taken in."""
    journal = remembering(3)
    content = rewritten(journal.gift(0, states=True), change)
    header = content[: 40 + int.from_bytes(content[32:40], "little")]
    taken = journal_transfer(journal)
    with pytest.raises(InputError, match=says):
        give(taken, header, len(content))
    assert taken.given is None


def test_totals_that_states_contain_need_no_certificate_but_their_entries_are_in_the_chain() -> None:
    journal = remembering(4)
    content = journal.gift(0, states=True)
    header = json.loads(content[40 : 40 + int.from_bytes(content[32:40], "little")])
    assert [row[2] is None for row in header["entries"]] == [True, True, False, False]
    with pytest.raises(InputError, match="a sum is not the one that was signed"):
        give(journal_transfer(journal), rewritten(content, partial(other_field, 2, 9)))


def test_another_head_than_was_told_of_is_refused() -> None:
    journal = remembering(3)
    with pytest.raises(InputError, match="do not lead from our history to the one it told of"):
        give(journal_transfer(journal, head=bytes(32)), journal.gift(0, states=True))


def test_what_does_not_continue_our_history_is_refused() -> None:
    journal = remembering(3)
    own = Journal()
    enter(own, spec(SIZE), total(9), MEMBERS, step=Step(0, 0))
    with pytest.raises(InputError, match="a sum is not the one that was signed|do not lead from our history"):
        give(journal_transfer(journal, own), journal.gift(1, states=True))


def test_a_sum_that_a_member_of_today_has_not_signed_is_refused() -> None:
    journal = past(2, members=("a", "b", "d"))
    with pytest.raises(InputError, match="its last sum is not signed by c"):
        give(journal_transfer(journal), journal.gift(0, states=True))
    fewer = past(2, members=("a", "b"))
    with pytest.raises(InputError, match="its last sum has 2 members; none has fewer than 3"):
        give(journal_transfer(fewer), fewer.gift(0, states=True))


def test_what_is_longer_than_its_entries_say_is_refused() -> None:
    journal = remembering(3)
    content = journal.gift(0, states=True)
    for longer in (content + b"x", content[:-1]):
        with pytest.raises(InputError, match=f"it has {len(longer)} bytes and its entries {len(content)}"):
            give(journal_transfer(journal), longer)
    for piece_bytes in (100, 1 << 20):
        taken = journal_transfer(journal)
        with pytest.raises(InputError, match="it is longer than its entries say"):
            give(taken, content[:-1] + bytes(1000), len(content), piece_bytes)
        assert taken.given is None


def test_a_header_that_is_too_long_is_refused_before_it_is_here() -> None:
    journal = remembering(3)
    for length in (1 << 20, 1 << 40, 2**64 - 1):
        taken = journal_transfer(journal)
        with pytest.raises(InputError, match=f"a header of {length} bytes is too long for its entries"):
            give(taken, bytes(32) + length.to_bytes(8, "little") + bytes(100), 1 << 60, 10)
        assert len(taken._received) <= 50


@pytest.mark.parametrize("header", [b"[" * 1000, b"7", b"\xff", b"{}", b'{"format": "x"}'])
def test_a_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(InputError):
        give(journal_transfer(remembering(3)), bytes(32) + len(header).to_bytes(8, "little") + header)


def test_another_total_or_state_than_was_told_of_is_refused() -> None:
    journal = remembering(3)
    content = journal.gift(0, states=True)
    for change, says in ((-60, "a total is not"), (-1, "its states are not those"), (-16, "its states are not those")):
        body = bytearray(content[32:])
        body[change if change != -60 else len(body) - len(b"a statethe best model") - 1] ^= 1
        taken = journal_transfer(journal)
        with pytest.raises(InputError, match=says):
            give(taken, sha256(body).digest() + bytes(body))
        assert taken.given is None
    with pytest.raises(InputError, match="its digest is wrong"):
        give(journal_transfer(journal), bytes(32) + content[32:])
