"""Key agreement: the keys of pairs and groups depend on everything that identifies a view."""

from __future__ import annotations

import os
from hashlib import sha256

import numpy as np
import pytest

from cgd.secagg import noise
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.key_agreement import EphemeralKey, MembershipView, PairKeys, derive_group_key, derive_pair_keys
from cgd.secagg.masking import PairwiseMasks
from cgd.secagg.positions import PositionReports
from cgd.secagg.statements import StatementLog, StatementSigner
from support.identities import identity, public_keys

MEMBERS = ("a", "b", "c", "d")


def federation_spec(**changes: object) -> FederationSpec:
    held = {"federation": "trial", "epoch": 1, "sections": {"training": "x"}, "version": "1.0", **changes}
    return FederationSpec(members=MEMBERS, groups={"everyone": MEMBERS}, keys=public_keys(MEMBERS), **held)  # type: ignore[arg-type]


def ephemerals() -> dict[str, EphemeralKey]:
    return {name: EphemeralKey() for name in MEMBERS}


def view_of(keys: dict[str, EphemeralKey], **announced: bytes) -> MembershipView:
    return MembershipView.of(federation_spec(), {name: each.public for name, each in keys.items()} | announced)


def pair_keys(me: str, peer: str, keys: dict[str, EphemeralKey], view: MembershipView) -> PairKeys:
    return derive_pair_keys(me, identity(me), keys[me], peer, federation_spec(), view)


def test_both_members_of_a_pair_derive_the_same_unique_keys() -> None:
    keys = ephemerals()
    view = view_of(keys)
    mask_keys = set()
    for one in MEMBERS:
        for other in MEMBERS:
            if one != other:
                ours, theirs = pair_keys(one, other, keys, view), pair_keys(other, one, keys, view)
                assert ours.mask_key == theirs.mask_key
                assert (ours.own_tag, ours.peer_tag) == (theirs.peer_tag, theirs.own_tag)
                assert ours.own_tag != ours.peer_tag
                assert ours.mask_key.hex() not in repr(ours)
                mask_keys.add(ours.mask_key)
    assert len(mask_keys) == len(MEMBERS) * (len(MEMBERS) - 1) // 2


def inverse(public: bytes) -> bytes:
    """Return the key plus the point of order two: its coordinate is the inverse."""
    prime = 2**255 - 19
    return pow(int.from_bytes(public, "little"), -1, prime).to_bytes(32, "little")


def with_top_bit(public: bytes) -> bytes:
    return public[:31] + bytes([public[31] | 0x80])


@pytest.mark.parametrize("forge", [bytes, with_top_bit, inverse], ids=["unchanged", "top bit set", "small order added"])
def test_copied_ephemeral_key_gives_other_keys_and_an_invalid_tag(forge: type[bytes]) -> None:
    """c announces the ephemeral key of b, or one with the same shared secrets."""
    keys = ephemerals()
    stolen = forge(keys["b"].public)
    assert noise.agree(keys["a"].private, stolen) == noise.agree(keys["a"].private, keys["b"].public)
    view = view_of(keys, c=stolen)
    with_copier, with_owner = pair_keys("a", "c", keys, view), pair_keys("a", "b", keys, view)
    assert with_copier.mask_key != with_owner.mask_key
    assert with_copier.peer_tag != with_owner.peer_tag
    attempts = [pair_keys("c", "a", keys, view).own_tag, with_owner.own_tag, with_owner.peer_tag, with_copier.own_tag]
    assert with_copier.peer_tag not in attempts
    assert pair_keys("c", "a", keys, view).mask_key != with_copier.mask_key


def test_view_digest_covers_spec_and_keys() -> None:
    keys = {name: each.public for name, each in ephemerals().items()}
    other = public_keys(("e", "f", "g", "h"))
    other_keys = dict(zip(MEMBERS, other.values(), strict=True))
    specs = [
        federation_spec(),
        federation_spec(federation="other"),
        federation_spec(epoch=2),
        federation_spec(version="1.1"),
        federation_spec(sections={"training": "y"}),
    ]
    others = FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {"training": "x"}, "1.0", other_keys)
    digests = {MembershipView.of(each, keys).digest for each in (*specs, others)}
    digests.add(MembershipView.of(federation_spec(), keys | {"a": with_top_bit(keys["a"])}).digest)
    assert len(digests) == len(specs) + 2


def test_pair_keys_change_when_one_of_the_two_restarts() -> None:
    keys = ephemerals()
    one = pair_keys("a", "b", keys, view_of(keys))
    keys["b"] = EphemeralKey()
    other = pair_keys("a", "b", keys, view_of(keys))
    assert len({one.mask_key, other.mask_key}) == len({one.own_tag, other.own_tag}) == 2


def test_tags_and_masks_change_when_a_third_member_restarts() -> None:
    keys = ephemerals()
    tags, masks = set(), set()
    for _ in range(2):
        keys["c"] = EphemeralKey()
        view = view_of(keys)
        made = pair_keys("a", "b", keys, view)
        group = Group("everyone", MEMBERS, Journal())
        log = StatementLog("a", identity("a"), public_keys(MEMBERS), sha256(b"a view").digest(), lambda _: None)
        reports = PositionReports("a", federation_spec(), {}, log)
        group.enter_view("a", view.digest, dict.fromkeys("bcd", made.mask_key), StatementSigner(), reports)
        assert group.session is not None
        words = np.zeros(8, dtype=np.uint32)
        PairwiseMasks("a", {"b": made.mask_key}, group.session.session).add_to(words, 1)
        tags |= {made.own_tag, made.peer_tag}
        masks.add(words.tobytes())
    assert (len(tags), len(masks)) == (4, 2)


def test_group_key_depends_on_all_contributions_and_the_session() -> None:
    contributions = {name: os.urandom(32) for name in MEMBERS}
    made = {
        derive_group_key(contributions, b"s"),
        derive_group_key(contributions, b"t"),
        derive_group_key(contributions | {"d": os.urandom(32)}, b"s"),
    }
    assert len(made) == 3
    assert derive_group_key(dict(reversed(contributions.items())), b"s") in made


@pytest.mark.parametrize("key", [b"", bytes(32), bytes([1]) + bytes(31), bytes(31), with_top_bit(bytes(32))])
def test_key_of_small_order_is_invalid(key: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        EphemeralKey().check(key)
