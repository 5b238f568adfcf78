"""Signed statements: a member that signs different contents is proved dishonest, and no other member is."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from cgd.errors import EquivocationError, RemoteProtocolError
from cgd.secagg.messages import NO_SIGNATURE, SignedEvidence
from cgd.secagg.statements import MAX_REPORTED_SLOTS, MAX_SLOTS, StatementLog, StatementSigner, slot_of, statement
from support.identities import identity, public_keys

if TYPE_CHECKING:
    from cgd.secagg.statements import Kind

MEMBERS = ("a", "b", "c", "d")
VIEW = sha256(b"a view").digest()
SLOT = slot_of(VIEW, "everyone", 1)


def statement_log(me: str = "a", sent: list[SignedEvidence] | None = None) -> StatementLog:
    return StatementLog(me, identity(me), public_keys(MEMBERS), VIEW, (sent if sent is not None else []).append)


def signed(name: str, content: bytes, kind: str = "ready", slot: bytes = SLOT) -> tuple[str, bytes, bytes]:
    """Return a member's signed statement, as in a `SignedEvidence`."""
    digest = sha256(content).digest()
    return name, digest, identity(name).sign(statement(kind, slot, digest))


def receive(statement_log: StatementLog, name: str, content: bytes, kind: Kind = "ready", slot: bytes = SLOT) -> None:
    statement_log.receive(name, kind, slot, content, signed(name, content, kind, slot)[2])


def test_signed_statement_and_its_duplicate_are_accepted() -> None:
    one, other = statement_log("a"), statement_log("b")
    signature = one.sign("ready", SLOT, b"content")
    for _ in range(2):
        other.receive("a", "ready", SLOT, b"content", signature)


def test_statement_with_an_invalid_signature_is_rejected() -> None:
    _, _, of_c = signed("c", b"content")
    for signature in (NO_SIGNATURE, b"", of_c):
        with pytest.raises(
            RemoteProtocolError, match="b: sent a confirm statement without a valid signature"
        ) as caught:
            statement_log().receive("b", "confirm", SLOT, b"content", signature)
        assert not isinstance(caught.value, EquivocationError)


@pytest.mark.parametrize(
    "elsewhere", [("ready", SLOT), ("confirm", slot_of(VIEW, "everyone", 2)), ("confirm", slot_of(VIEW, "other", 1))]
)
def test_signature_covers_kind_and_slot(elsewhere: tuple[str, bytes]) -> None:
    _, _, signature = signed("b", b"content", *elsewhere)
    with pytest.raises(RemoteProtocolError, match="without a valid signature"):
        statement_log().receive("b", "confirm", SLOT, b"content", signature)


UNSIGNED = "b: sent a ready statement without a valid signature"


def test_unsigned_ready_is_detected_in_a_dispute_and_not_sent_as_evidence() -> None:
    sent: list[SignedEvidence] = []
    ours = statement_log("a", sent)
    ours.receive("b", "ready", SLOT, b"content", NO_SIGNATURE)
    receive(ours, "c", b"content")
    with pytest.raises(RemoteProtocolError, match=UNSIGNED):
        ours.send_evidence("ready", SLOT)
    assert sent == [SignedEvidence("ready", SLOT, (signed("c", b"content"),))]


def test_unsigned_ready_that_differs_from_a_signed_one_is_rejected() -> None:
    ours = statement_log()
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(RemoteProtocolError, match=UNSIGNED):
        ours.receive("b", "ready", SLOT, b"two", NO_SIGNATURE)


def test_unsigned_ready_is_no_evidence_and_hides_none() -> None:
    ours = statement_log()
    ours.receive("b", "ready", SLOT, b"unsigned", NO_SIGNATURE)
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(EquivocationError) as error:
        ours.receive_evidence("d", SignedEvidence("ready", SLOT, (signed("b", b"two"),)))
    check_proof(error, "b")


def test_slots_are_unique() -> None:
    other = sha256(b"another view").digest()
    subjects = [(VIEW, "g", 1), (other, "g", 1), (VIEW, "h", 1), (VIEW, "g", 2), (VIEW, "", 0), (VIEW, "1g", 0)]
    assert len({slot_of(*subject) for subject in subjects}) == len(subjects)


def check_proof(error: pytest.ExceptionInfo[EquivocationError], name: str) -> None:
    """Check that the proof is sufficient for a member without other statements."""
    assert error.value.peer == name
    assert isinstance(error.value.proof, SignedEvidence)
    with pytest.raises(EquivocationError) as again:
        statement_log("d").receive_evidence("a", error.value.proof)
    assert again.value.peer == name


def test_two_statements_to_us_prove_equivocation() -> None:
    ours = statement_log()
    receive(ours, "b", b"one")
    with pytest.raises(EquivocationError, match="b: signed two different ready statements") as error:
        receive(ours, "b", b"two")
    check_proof(error, "b")


def test_another_statement_to_another_member_proves_equivocation_in_any_order() -> None:
    for evidence_first in (True, False):
        ours = statement_log()
        evidence = SignedEvidence("ready", SLOT, (signed("b", b"two"),))
        with pytest.raises(EquivocationError) as error:
            if evidence_first:
                ours.receive_evidence("c", evidence)
            receive(ours, "b", b"one")
            ours.receive_evidence("c", evidence)
        check_proof(error, "b")


@pytest.mark.parametrize("second", ["c", "d"])
def test_evidence_of_two_members_proves_equivocation_without_our_own(second: str) -> None:
    ours = statement_log()
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(EquivocationError) as error:
        ours.receive_evidence(second, SignedEvidence("ready", SLOT, (signed("b", b"two"),)))
    check_proof(error, "b")


def test_evidence_with_both_statements_proves_equivocation() -> None:
    with pytest.raises(EquivocationError) as error:
        statement_log().receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"), signed("b", b"two"))))
    check_proof(error, "b")


def test_forged_statement_in_our_name_proves_nothing() -> None:
    """Only our own signature can prove that we equivocated."""
    ours = statement_log()
    ours.sign("ready", SLOT, b"one")
    name, digest, _ = signed("b", b"two")
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (("a", digest, signed(name, b"two")[2]),)))


def test_unsigned_statements_and_those_of_unknown_members_prove_nothing() -> None:
    ours = statement_log()
    receive(ours, "b", b"one")
    name, digest, signature = signed("b", b"two")
    unknown = ("mallory", *signed("mallory", b"one")[1:]), ("mallory", *signed("mallory", b"two")[1:])
    for statements in (
        ((name, digest, NO_SIGNATURE),),
        ((name, digest, b""),),
        ((name, sha256(b"three").digest(), signature),),
        (("b", digest, signed("c", b"two")[2]),),
        (signed("b", b"two", "confirm"),),
        (signed("b", b"two", slot=slot_of(VIEW, "everyone", 2)),),
        unknown,
    ):
        ours.receive_evidence("c", SignedEvidence("ready", SLOT, statements))
    receive(ours, "b", b"one")


def test_equal_contents_prove_nothing() -> None:
    ours = statement_log()
    receive(ours, "b", b"one")
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    ours.receive_evidence("d", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))


def test_evidence_contains_all_statements_and_is_sent_once() -> None:
    sent: list[SignedEvidence] = []
    ours = statement_log("a", sent)
    ours.send_evidence("ready", SLOT)
    assert sent == []
    signature = ours.sign("ready", SLOT, b"content")
    receive(ours, "c", b"content")
    for _ in range(3):
        ours.send_evidence("ready", SLOT)
    own = ("a", sha256(b"content").digest(), signature)
    assert sent == [SignedEvidence("ready", SLOT, (own, signed("c", b"content")))]


def test_many_slots_do_not_displace_evidence_of_others() -> None:
    ours = statement_log()
    ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    for number in range(4 * MAX_SLOTS):
        slot = slot_of(VIEW, "everyone", 100 + number)
        ours.receive_evidence(
            "d", SignedEvidence("ready", slot, (signed("d", b"spam", slot=slot), ("b", bytes(32), bytes(64))))
        )
    assert all(len(slots) <= MAX_REPORTED_SLOTS for slots in ours._reported.values())
    with pytest.raises(EquivocationError):
        receive(ours, "b", b"two")


def test_many_slots_do_not_displace_received_statements() -> None:
    ours = statement_log()
    receive(ours, "b", b"one")
    for number in range(4 * MAX_SLOTS):
        slot = slot_of(VIEW, "everyone", 100 + number)
        ours.receive_evidence("d", SignedEvidence("ready", slot, (signed("d", b"spam", slot=slot),)))
        ours.send_evidence("ready", slot)
    with pytest.raises(EquivocationError):
        ours.receive_evidence("c", SignedEvidence("ready", SLOT, (signed("b", b"two"),)))


def test_old_slots_are_dropped() -> None:
    ours = statement_log()
    for number in range(2 * MAX_SLOTS):
        ours.sign("ready", slot_of(VIEW, "everyone", number), b"content")
    assert len(ours._received["ready"]) == MAX_SLOTS


def test_signer_without_a_log_signs_and_verifies_nothing() -> None:
    statement_signer = StatementSigner()
    assert statement_signer.sign("ready", 1, b"content") == NO_SIGNATURE
    statement_signer.receive("b", "ready", 1, b"content", b"nothing")
    statement_signer.send_evidence("ready", 1)


def test_signer_sends_evidence_about_a_sum() -> None:
    sent: list[SignedEvidence] = []
    ours = statement_log("a", sent)
    statement_signer = StatementSigner(ours, "everyone")
    statement_signer.sign("ready", 1, b"content")
    statement_signer.send_evidence("ready", 1)
    assert [(evidence.kind, evidence.slot) for evidence in sent] == [("ready", SLOT)]
