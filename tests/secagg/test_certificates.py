"""Certificates, the hash chain, terms and pending reveals: every altered field is rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import pytest

from cgd.errors import LocalProtocolError
from cgd.secagg.certificates import GENESIS, Certificate, PendingReveal, Terms, extend_chain, find_objections
from cgd.secagg.codec import spec_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.positions import GroupPosition
from support.histories import append_certified, numbered_journal, numbered_total
from support.identities import public_keys
from support.wire import spec

MEMBERS = ("a", "b", "c")
SIZE = 5
KEYS = public_keys(MEMBERS)
GROUP = "everyone"

journal_of = partial(numbered_journal, spec(SIZE))
total = partial(numbered_total, SIZE)


def certificate(*members: str) -> Certificate:
    made = journal_of(1, members or MEMBERS).entries[0].certificate
    assert made is not None
    return made


# Certificates.


def test_certificate_matches_its_entry_total_and_signers_after_a_round_trip() -> None:
    journal = journal_of(3, MEMBERS)
    for index, entry in enumerate(journal.entries):
        assert entry.certificate is not None
        decoded = Certificate.from_json(json.loads(json.dumps(entry.certificate.to_json())))
        assert decoded == entry.certificate
        assert decoded.signers(GROUP, KEYS) == set(MEMBERS)
        decoded.verify_entry(journal.heads[index], entry.fields)
        decoded.verify_entry(None, entry.fields)
        decoded.verify_total(total(index).data)


def test_step_is_not_repeated_with_other_settings() -> None:
    """A program whose scheduler was not set after a restart would move the model by the total, with another lr."""
    made = replace(spec(SIZE), context="SGD with lr 0.1")
    journal = Journal()
    append_certified(journal, made, total(0), MEMBERS, step=Step(0, 0))
    append_certified(journal, made, total(1), MEMBERS)
    other = replace(made, context="SGD with lr 0.2")
    assert journal.total(0, made).tolist() == total(0).tolist()
    with pytest.raises(LocalProtocolError, match=r"settings 'SGD with lr 0.1', but .* with 'SGD with lr 0.2'; a rest"):
        journal.total(0, other)
    assert journal.total(1, other).tolist() == total(1).tolist()  # a sum of the program, which the model does not need


def test_certificate_rejects_another_total() -> None:
    words = total(0)
    for index in range(SIZE):
        other = words.copy()
        other[index] ^= 1
        with pytest.raises(ValueError, match="a total is not the one that was signed"):
            certificate().verify_total(other.data)
    with pytest.raises(ValueError, match="a total is not the one that was signed"):
        certificate().verify_total(words[:-1].data)


def test_certificate_rejects_another_key() -> None:
    made = certificate()
    other = replace(made, keys={**made.keys, "b": bytes(16)})
    with pytest.raises(ValueError, match="a total is not the one that was signed"):
        other.verify_total(total(0).data)
    with pytest.raises(ValueError, match="the signature of a is invalid"):
        other.signers(GROUP, KEYS)


def test_certificate_rejects_another_signature() -> None:
    made = certificate()
    for signature in (bytes(64), b"", made.signatures["a"]):
        with pytest.raises(ValueError, match="the signature of b is invalid"):
            replace(made, signatures={**made.signatures, "b": signature}).signers(GROUP, KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {"view": bytes(32)},
        {"number": 2},
        {"spec": spec_bytes(spec(SIZE + 1))},
        {"terms": b"[]"},
        {"masked_digest": bytes(32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_signatures_cover_every_field(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the signature of a is invalid"):
        replace(certificate(), **changes).signers(GROUP, KEYS)


def test_signatures_cover_the_group() -> None:
    with pytest.raises(ValueError, match="the signature of a is invalid"):
        certificate().signers("column-0", KEYS)


def test_certificate_needs_keys_and_signatures_of_the_same_members() -> None:
    made = certificate()
    incomplete: tuple[dict[str, Any], ...] = (
        {"keys": {name: key for name, key in made.keys.items() if name != "c"}},
        {"signatures": {name: each for name, each in made.signatures.items() if name != "c"}},
    )
    for changes in incomplete:
        with pytest.raises(ValueError, match="the certificate lacks keys or signatures"):
            replace(made, **changes).signers(GROUP, KEYS)


def test_signers_cannot_be_added_or_removed() -> None:
    """The signatures cover the commitments to all keys."""
    assert certificate("a", "b").signers(GROUP, KEYS) == {"a", "b"}
    made = certificate()
    without = replace(
        made,
        keys={name: made.keys[name] for name in "ab"},
        signatures={name: made.signatures[name] for name in "ab"},
    )
    with pytest.raises(ValueError, match="the signature of a is invalid"):
        without.signers(GROUP, KEYS)
    assert made.signers(GROUP, public_keys("ab")) == {"a", "b"}  # c has left, and its key is not known any more


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, "float32[6] in 32 bits"), (1, 2), (2, 1), (3, [0, 0]), (4, 4 * SIZE + 4), (5, 4), (6, bytes(32).hex())],
)
def test_certificate_rejects_another_entry(field: int, value: Any) -> None:
    fields = journal_of(1, MEMBERS).entries[0].fields
    fields[field] = value
    with pytest.raises(ValueError, match="than was signed|that was signed"):
        certificate().verify_entry(GENESIS, fields)


def test_certificate_rejects_another_position_in_the_history() -> None:
    journal = journal_of(2, MEMBERS)
    with pytest.raises(ValueError, match="a sum is not the one that was signed"):
        certificate().verify_entry(journal.heads[1], journal.entries[0].fields)


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
def test_malformed_certificate_is_rejected(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Certificate.from_json(value)


# The hash chain.


def test_hash_chain_covers_every_field_of_every_entry() -> None:
    entry = journal_of(1, MEMBERS).entries[0]
    assert extend_chain(GENESIS, entry.fields) != extend_chain(bytes(32), entry.fields)
    for field in range(len(entry.fields)):
        fields = entry.fields
        fields[field] = "other"
        assert extend_chain(GENESIS, fields) != extend_chain(GENESIS, entry.fields)


def test_hash_chain_is_the_same_for_saved_transferred_and_recorded_entries() -> None:
    whole = journal_of(4, MEMBERS)
    assert whole.heads[0] == GENESIS
    assert len(set(whole.heads)) == 5
    saved = Journal.from_bytes(whole.to_bytes())
    assert saved.heads == whole.heads
    extended = journal_of(1, MEMBERS)
    extended.extend(Journal.from_bytes(whole.export_since(1, states=True)))
    assert extended.heads == whole.heads
    recorded = Journal()
    for index in range(4):
        recorded.add_record(b"".join(bytes(piece) for piece in whole.entry_record(index)))
    assert recorded.heads == whole.heads
    assert recorded.to_bytes() == whole.to_bytes()


def test_certificate_is_dropped_with_its_total_except_the_last() -> None:
    journal = journal_of(3, MEMBERS, steps=True)
    journal.save_state(0, 3, b"state")
    exported = Journal.from_bytes(journal.export_since(0, states=True))
    assert [entry.certificate is not None for entry in exported.entries] == [False, False, True]
    append_certified(journal, spec(SIZE), total(3), MEMBERS, step=Step(0, 3))
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
def test_malformed_terms_are_rejected(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        Terms.from_bytes(data)


def test_terms_describe_differences() -> None:
    other = terms(epoch=2, index=1, head=bytes([1] * 32), loop_step=0, step=None)
    assert terms().differences(terms()) == []
    assert terms().differences(other) == [
        "epoch 2 instead of 1",
        "1 finished sums instead of 2",
        "another history of finished sums",
        "step 0 of its loop instead of 3",
        "optimiser step None instead of (0, 4)",
    ]


# Pending reveals.

ATTEMPT = sha256(b"an attempt").digest()
PENDING = PendingReveal(2, MEMBERS, ATTEMPT)


def test_pending_reveal_is_saved_and_not_transferred() -> None:
    assert PendingReveal.from_json(json.loads(json.dumps(PENDING.to_json()))) == PENDING
    journal = journal_of(2, MEMBERS)
    journal.pending_reveal = PENDING
    assert Journal.from_bytes(journal.to_bytes()).pending_reveal == PENDING
    assert Journal.from_bytes(journal.export_since(0, states=True)).pending_reveal is None
    other = journal_of(2, MEMBERS)
    other.add_record(b"".join(bytes(piece) for piece in journal.pending_reveal_record()))
    assert other.pending_reveal == PENDING
    assert other.heads == journal.heads


def test_pending_reveal_of_the_first_sum_is_saved() -> None:
    journal = Journal()
    journal.pending_reveal = replace(PENDING, index=0)
    assert Journal.from_bytes(journal.to_bytes()).pending_reveal == journal.pending_reveal


@pytest.mark.parametrize(("index", "removed"), [(2, True), (3, False)])
def test_pending_reveal_is_removed_when_its_sum_is_finished(index: int, removed: bool) -> None:
    journal = journal_of(2, MEMBERS)
    journal.pending_reveal = replace(PENDING, index=index)
    append_certified(journal, spec(SIZE), total(2), MEMBERS)
    assert (journal.pending_reveal is None) == removed


@pytest.mark.parametrize("value", [None, [], [1, ["a"]], ["1", ["a"], ""], [1, [2], ""], [1, 2, ""], [1, ["a"], "x"]])
def test_malformed_pending_reveal_is_rejected(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        PendingReveal.from_json(value)


# Objections to an attempt.

HEAD = sha256(b"a head").digest()
TOOK_PART = GroupPosition(2, bytes(32), ATTEMPT, bytes(32))


@pytest.mark.parametrize(
    ("position", "objection"),
    [
        (GroupPosition(3, HEAD, None, bytes(32)), None),
        (GroupPosition(3, bytes(32), None, bytes(32)), "has another history"),
        (GroupPosition(2, bytes(32), None, bytes(32)), "is behind and has not signed it"),
        (GroupPosition(2, bytes(32), ATTEMPT, bytes(32)), "is behind and has not signed it"),
        (GroupPosition(2, bytes(32), bytes(32), bytes(32)), "took part in another attempt"),
        (GroupPosition(0, GENESIS, None, bytes(32)), None),
    ],
)
def test_objection_of_a_member_that_has_not_signed(position: GroupPosition, objection: str | None) -> None:
    expected = {} if objection is None else {"d": objection}
    assert find_objections(2, ATTEMPT, HEAD, TOOK_PART, {"d": position}, signers=MEMBERS) == expected


def test_signer_objects_only_if_it_revealed_its_key_in_another_attempt() -> None:
    other_attempt = replace(TOOK_PART, pending_reveal=bytes(32))
    assert find_objections(2, ATTEMPT, HEAD, TOOK_PART, {"c": TOOK_PART}, signers=MEMBERS) == {}
    assert find_objections(2, ATTEMPT, HEAD, TOOK_PART, {"c": other_attempt}, signers=MEMBERS) != {}


def test_member_that_took_no_part_waits_for_those_that_did() -> None:
    new = GroupPosition(0, GENESIS, None, bytes(32))
    waits_for_c = {"c": "has not finished it yet"}
    assert find_objections(2, ATTEMPT, HEAD, new, {"c": TOOK_PART}, signers=MEMBERS) == waits_for_c
    finished = GroupPosition(3, HEAD, None, bytes(32))
    assert find_objections(2, ATTEMPT, HEAD, new, {"c": finished}, signers=MEMBERS) == {}
