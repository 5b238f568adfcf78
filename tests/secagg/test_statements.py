"""Signed statements and pair keys: who tells two stories is convicted, and nobody else is."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.errors import EquivocationError, RemoteProtocolError
from cgd.secagg import noise
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.key_agreement import EphemeralKey, MembershipView, PairKeys, common_key, pair
from cgd.secagg.masking import PairwiseMasks
from cgd.secagg.messages import NO_SIGNATURE, SignedEvidence
from cgd.secagg.position_reports import PositionReports
from cgd.secagg.statements import MAX_REPORTED_SLOTS, MAX_SLOTS, StatementLog, StatementSigner, slot_of, statement
from support.identities import identity, public_keys

if TYPE_CHECKING:
    from cgd.secagg.statements import Kind

MEMBERS = ("a", "b", "c", "d")
VIEW = sha256(b"a view").digest()
SLOT = slot_of(VIEW, "everyone", 1)


def statement_log(me: str = "a", told: list[SignedEvidence] | None = None) -> StatementLog:
    return StatementLog(me, identity(me), public_keys(MEMBERS), VIEW, (told if told is not None else []).append)


def signed(name: str, content: bytes, kind: str = "ready", slot: bytes = SLOT) -> tuple[str, bytes, bytes]:
    """What a member has signed, as a `SignedEvidence` tells it."""
    digest = sha256(content).digest()
    return name, digest, identity(name).sign(statement(kind, slot, digest))


def take(statement_log: StatementLog, name: str, content: bytes, kind: Kind = "ready", slot: bytes = SLOT) -> None:
    statement_log.take(name, kind, slot, content, signed(name, content, kind, slot)[2])


# Who tells two stories.


def test_what_was_signed_is_taken_and_a_copy_changes_nothing() -> None:
    one, other = statement_log("a"), statement_log("b")
    signature = one.sign("ready", SLOT, b"content")
    for _ in range(2):
        other.take("a", "ready", SLOT, b"content", signature)


def test_a_statement_that_its_sender_has_not_signed_is_refused() -> None:
    _, _, of_c = signed("c", b"content")
    for signature in (NO_SIGNATURE, b"", of_c):
        with pytest.raises(
            RemoteProtocolError, match="b: sent a confirm statement without a valid signature"
        ) as caught:
            statement_log().take("b", "confirm", SLOT, b"content", signature)
        assert not isinstance(caught.value, EquivocationError)


@pytest.mark.parametrize(
    "elsewhere", [("ready", SLOT), ("confirm", slot_of(VIEW, "everyone", 2)), ("confirm", slot_of(VIEW, "other", 1))]
)
def test_a_signature_is_for_one_kind_and_one_slot(elsewhere: tuple[str, bytes]) -> None:
    _, _, signature = signed("b", b"content", *elsewhere)
    with pytest.raises(RemoteProtocolError, match="without a valid signature"):
        statement_log().take("b", "confirm", SLOT, b"content", signature)


UNSIGNED = "b: sent a ready statement without a valid signature"


def test_an_unsigned_readiness_is_noticed_in_a_dispute_and_not_told_to_others() -> None:
    told: list[SignedEvidence] = []
    ours = statement_log("a", told)
    ours.take("b", "ready", SLOT, b"content", NO_SIGNATURE)
    take(ours, "c", b"content")
    with pytest.raises(RemoteProtocolError, match=UNSIGNED):
        ours.dispute("ready", SLOT)
    assert told == [SignedEvidence("ready", SLOT, (signed("c", b"content"),))]


def test_an_unsigned_readiness_that_differs_from_a_signed_one_is_refused() -> None:
    ours = statement_log()
    ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(RemoteProtocolError, match=UNSIGNED):
        ours.take("b", "ready", SLOT, b"two", NO_SIGNATURE)


def test_an_unsigned_readiness_is_no_evidence_and_hides_none() -> None:
    ours = statement_log()
    ours.take("b", "ready", SLOT, b"unsigned", NO_SIGNATURE)
    ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(EquivocationError) as error:
        ours.compare("d", SignedEvidence("ready", SLOT, (signed("b", b"two"),)))
    convicted(error, "b")


def test_slots_are_told_apart() -> None:
    other = sha256(b"another view").digest()
    places = [(VIEW, "g", 1), (other, "g", 1), (VIEW, "h", 1), (VIEW, "g", 2), (VIEW, "", 0), (VIEW, "1g", 0)]
    assert len({slot_of(*place) for place in places}) == len(places)


def convicted(error: pytest.ExceptionInfo[EquivocationError], name: str) -> None:
    """The proof convinces somebody who knows nothing else."""
    assert error.value.peer == name
    assert isinstance(error.value.proof, SignedEvidence)
    with pytest.raises(EquivocationError) as again:
        statement_log("d").compare("a", error.value.proof)
    assert again.value.peer == name


def test_who_tells_us_two_things_is_convicted() -> None:
    ours = statement_log()
    take(ours, "b", b"one")
    with pytest.raises(EquivocationError, match="b: has signed two different ready statements") as error:
        take(ours, "b", b"two")
    convicted(error, "b")


def test_who_tells_another_member_something_else_is_convicted_whatever_comes_first() -> None:
    for seen_first in (True, False):
        ours = statement_log()
        seen = SignedEvidence("ready", SLOT, (signed("b", b"two"),))
        with pytest.raises(EquivocationError) as error:
            if seen_first:
                ours.compare("c", seen)
            take(ours, "b", b"one")
            ours.compare("c", seen)
        convicted(error, "b")


@pytest.mark.parametrize("second", ["c", "d"])
def test_two_reports_convict_even_if_we_were_told_nothing(second: str) -> None:
    ours = statement_log()
    ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    with pytest.raises(EquivocationError) as error:
        ours.compare(second, SignedEvidence("ready", SLOT, (signed("b", b"two"),)))
    convicted(error, "b")


def test_one_report_with_both_statements_convicts() -> None:
    with pytest.raises(EquivocationError) as error:
        statement_log().compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"), signed("b", b"two"))))
    convicted(error, "b")


def test_who_contradicts_itself_against_our_own_name_is_not_us() -> None:
    """Only our key can convict us."""
    ours = statement_log()
    ours.sign("ready", SLOT, b"one")
    name, digest, _ = signed("b", b"two")
    ours.compare("c", SignedEvidence("ready", SLOT, (("a", digest, signed(name, b"two")[2]),)))


def test_what_is_not_signed_or_of_strangers_convicts_nobody() -> None:
    ours = statement_log()
    take(ours, "b", b"one")
    name, digest, signature = signed("b", b"two")
    stranger = ("mallory", *signed("mallory", b"one")[1:]), ("mallory", *signed("mallory", b"two")[1:])
    for said in (
        ((name, digest, NO_SIGNATURE),),
        ((name, digest, b""),),
        ((name, sha256(b"three").digest(), signature),),
        (("b", digest, signed("c", b"two")[2]),),
        (signed("b", b"two", "confirm"),),
        (signed("b", b"two", slot=slot_of(VIEW, "everyone", 2)),),
        stranger,
    ):
        ours.compare("c", SignedEvidence("ready", SLOT, said))
    take(ours, "b", b"one")


def test_the_same_content_under_other_signatures_convicts_nobody() -> None:
    ours = statement_log()
    take(ours, "b", b"one")
    ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    ours.compare("d", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))


def test_a_dispute_tells_once_what_everybody_has_said() -> None:
    told: list[SignedEvidence] = []
    ours = statement_log("a", told)
    ours.dispute("ready", SLOT)
    assert told == []
    signature = ours.sign("ready", SLOT, b"content")
    take(ours, "c", b"content")
    for _ in range(3):
        ours.dispute("ready", SLOT)
    own = ("a", sha256(b"content").digest(), signature)
    assert told == [SignedEvidence("ready", SLOT, (own, signed("c", b"content")))]


def test_spam_does_not_push_out_what_others_report() -> None:
    ours = statement_log()
    ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"one"),)))
    for number in range(4 * MAX_SLOTS):
        slot = slot_of(VIEW, "everyone", 100 + number)
        ours.compare("d", SignedEvidence("ready", slot, (signed("d", b"spam", slot=slot), ("b", bytes(32), bytes(64)))))
    assert all(len(slots) <= MAX_REPORTED_SLOTS for slots in ours._reported.values())
    with pytest.raises(EquivocationError):
        take(ours, "b", b"two")


def test_spam_does_not_push_out_what_we_were_told() -> None:
    ours = statement_log()
    take(ours, "b", b"one")
    for number in range(4 * MAX_SLOTS):
        slot = slot_of(VIEW, "everyone", 100 + number)
        ours.compare("d", SignedEvidence("ready", slot, (signed("d", b"spam", slot=slot),)))
        ours.dispute("ready", slot)
    with pytest.raises(EquivocationError):
        ours.compare("c", SignedEvidence("ready", SLOT, (signed("b", b"two"),)))


def test_what_is_long_over_is_forgotten() -> None:
    ours = statement_log()
    for number in range(2 * MAX_SLOTS):
        ours.sign("ready", slot_of(VIEW, "everyone", number), b"content")
    assert len(ours._said) == MAX_SLOTS


def test_without_a_dossier_nothing_is_signed_or_checked() -> None:
    statement_signer = StatementSigner()
    assert statement_signer.sign("ready", 1, b"content") == NO_SIGNATURE
    statement_signer.take("b", "ready", 1, b"content", b"nothing")
    statement_signer.dispute("ready", 1)


def test_a_notary_disputes_what_was_said_of_a_sum() -> None:
    told: list[SignedEvidence] = []
    ours = statement_log("a", told)
    statement_signer = StatementSigner(ours, "everyone")
    statement_signer.sign("ready", 1, b"content")
    statement_signer.dispute("ready", 1)
    assert [(seen.kind, seen.slot) for seen in told] == [("ready", SLOT)]


# Keys of pairs.


def federation_spec(**changes: object) -> FederationSpec:
    held = {"federation": "trial", "epoch": 1, "sections": {"training": "x"}, "version": "1.0", **changes}
    return FederationSpec(members=MEMBERS, groups={"everyone": MEMBERS}, keys=public_keys(MEMBERS), **held)  # type: ignore[arg-type]


def ephemerals() -> dict[str, EphemeralKey]:
    return {name: EphemeralKey() for name in MEMBERS}


def view_of(keys: dict[str, EphemeralKey], **announced: bytes) -> MembershipView:
    return MembershipView.of(federation_spec(), {name: each.public for name, each in keys.items()} | announced)


def pairing(me: str, peer: str, keys: dict[str, EphemeralKey], view: MembershipView) -> PairKeys:
    return pair(me, identity(me), keys[me], peer, federation_spec(), view)


def test_both_sides_of_a_pair_agree_and_no_other_pair_has_the_same() -> None:
    keys = ephemerals()
    view = view_of(keys)
    mask_keys = set()
    for one in MEMBERS:
        for other in MEMBERS:
            if one != other:
                ours, theirs = pairing(one, other, keys, view), pairing(other, one, keys, view)
                assert ours.mask_key == theirs.mask_key
                assert (ours.own_tag, ours.peer_tag) == (theirs.peer_tag, theirs.own_tag)
                assert ours.own_tag != ours.peer_tag
                assert ours.mask_key.hex() not in repr(ours)
                mask_keys.add(ours.mask_key)
    assert len(mask_keys) == len(MEMBERS) * (len(MEMBERS) - 1) // 2


def inverse(public: bytes) -> bytes:
    """The key with the point of order two added to it: its coordinate is the inverse."""
    prime = 2**255 - 19
    return pow(int.from_bytes(public, "little"), -1, prime).to_bytes(32, "little")


def with_top_bit(public: bytes) -> bytes:
    return public[:31] + bytes([public[31] | 0x80])


@pytest.mark.parametrize("forge", [bytes, with_top_bit, inverse], ids=["as it is", "top bit set", "small order added"])
def test_a_copied_ephemeral_key_gives_other_keys_and_a_wrong_tag(forge: type[bytes]) -> None:
    """The thief c announces the ephemeral key of b, or one that makes the same shared secrets."""
    keys = ephemerals()
    stolen = forge(keys["b"].public)
    assert noise.agree(keys["a"].private, stolen) == noise.agree(keys["a"].private, keys["b"].public)
    view = view_of(keys, c=stolen)
    with_thief, with_victim = pairing("a", "c", keys, view), pairing("a", "b", keys, view)
    assert with_thief.mask_key != with_victim.mask_key
    assert with_thief.peer_tag != with_victim.peer_tag
    attempts = [pairing("c", "a", keys, view).own_tag, with_victim.own_tag, with_victim.peer_tag, with_thief.own_tag]
    assert with_thief.peer_tag not in attempts
    assert pairing("c", "a", keys, view).mask_key != with_thief.mask_key


def test_a_view_is_another_one_if_anything_is_different() -> None:
    keys = {name: each.public for name, each in ephemerals().items()}
    strangers = public_keys(("e", "f", "g", "h"))
    other_keys = dict(zip(MEMBERS, strangers.values(), strict=True))
    charters = [
        federation_spec(),
        federation_spec(federation="other"),
        federation_spec(epoch=2),
        federation_spec(version="1.1"),
        federation_spec(sections={"training": "y"}),
    ]
    others = FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {"training": "x"}, "1.0", other_keys)
    digests = {MembershipView.of(each, keys).digest for each in (*charters, others)}
    digests.add(MembershipView.of(federation_spec(), keys | {"a": with_top_bit(keys["a"])}).digest)
    assert len(digests) == len(charters) + 2


def test_a_pair_has_another_key_when_one_of_the_two_is_started_again() -> None:
    keys = ephemerals()
    one = pairing("a", "b", keys, view_of(keys))
    keys["b"] = EphemeralKey()
    other = pairing("a", "b", keys, view_of(keys))
    assert len({one.mask_key, other.mask_key}) == len({one.own_tag, other.own_tag}) == 2


def test_a_pair_has_other_tags_and_masks_when_a_third_member_is_started_again() -> None:
    keys = ephemerals()
    tags, masks = set(), set()
    for _ in range(2):
        keys["c"] = EphemeralKey()
        view = view_of(keys)
        made = pairing("a", "b", keys, view)
        group = Group("everyone", MEMBERS, Journal())
        reports = PositionReports("a", federation_spec(), {}, statement_log())
        group.enter_view("a", view.digest, dict.fromkeys("bcd", made.mask_key), StatementSigner(), reports)
        assert group.session is not None
        words = np.zeros(8, dtype=np.uint32)
        PairwiseMasks("a", {"b": made.mask_key}, group.session.session).add_to(words, 1)
        tags |= {made.own_tag, made.peer_tag}
        masks.add(words.tobytes())
    assert (len(tags), len(masks)) == (4, 2)


def test_the_key_for_all_depends_on_everybodys_part_and_on_the_session() -> None:
    parts = {name: os.urandom(32) for name in MEMBERS}
    made = {common_key(parts, b"s"), common_key(parts, b"t"), common_key(parts | {"d": os.urandom(32)}, b"s")}
    assert len(made) == 3
    assert common_key(dict(reversed(parts.items())), b"s") in made


@pytest.mark.parametrize("key", [b"", bytes(32), bytes([1]) + bytes(31), bytes(31), with_top_bit(bytes(32))])
def test_a_key_of_small_order_is_none(key: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        EphemeralKey().check(key)
