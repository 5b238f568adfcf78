"""A dishonest member tries to have the text of a value opened that only one other member has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd import CGDError, Peers
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.tabular.category_union import CLAIM_TABLE, TEXT_TABLE, _entry, _key, learn_categories
from cgd.tabular.claims import CLAIM_BYTES, MARK_BYTES, TAG_BYTES, Claims, make_claim, member_secret, salt
from cgd.tabular.lookup_table import PARTS, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.local import LocalPeers

    Lie = Callable[[Any], Any]

SECRET = "Siobhan O'Example"
HONEST = [{"name": {"A", SECRET}}, {"name": {"A", "B"}}]
Learned = dict[str, tuple[str, ...]]
CLAIMS, SHARED, TEXTS = "test: claims 0", "test: shared", "test: table 0"


class Attack:
    """A dishonest third member, which changes what it enters, and stores the opened sums."""

    def __init__(self, lies: dict[str, Lie]) -> None:
        self.lies = lies
        self.opened: dict[str, Any] = {}

    def run(self, group: LocalPeers, own: dict[str, set[str]] | None = None) -> list[Learned | str]:
        """Return what each member learns, or its error."""
        members = [*HONEST, own or {"name": {"B"}}]

        def learn(peers: Peers, number: int) -> Learned | str:
            original = peers.sum

            def dishonest(values: Any, **options: Any) -> Any:
                context = options["context"]
                total = original(self.lies.get(context, lambda same: same)(values), **options)
                self.opened[context] = total
                return total

            if number == len(members) - 1:
                peers.sum = dishonest  # type: ignore[method-assign]
            try:
                return learn_categories(peers, members[number], "test")
            except CGDError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                peers.sum = original  # type: ignore[method-assign]

        return group.run(learn, list(range(len(members))))

    def texts(self) -> set[bytes]:
        """Return the keys that were opened as texts."""
        if TEXTS not in self.opened:
            return set()
        cells = self.opened[TEXTS]
        return set(TEXT_TABLE.peel(cells, len(cells) // PARTS, TEXTS) or ())


def decoded(layout: Layout, cells: Any, context: str) -> set[bytes]:
    found = layout.peel(cells, len(cells) // PARTS, context)
    assert found is not None
    return set(found)


def is_opened(attack: Attack) -> bool:
    """Return whether the secret is in a text table, also if the table as a whole could not be decoded."""
    needle = np.frombuffer(SECRET.encode()[1:13], dtype=np.uint8).reshape(-1, 3).astype(np.int64) @ (1, 256, 65536)
    cells = attack.opened.get(TEXTS, np.zeros((1, TEXT_TABLE.width), dtype=np.int64))
    in_cells = any(np.array_equal(cell[2 : 2 + len(needle)], needle * max(1, cell[0])) for cell in cells)
    return in_cells or any(SECRET.encode() in key for key in attack.texts())


def insert(claims: set[bytes]) -> Lie:
    def lie(cells: Any) -> Any:
        return cells + CLAIM_TABLE.table(dict.fromkeys(claims, 1), len(cells) // PARTS, CLAIMS)

    return lie


def test_value_that_two_members_have_is_opened_and_detected_here() -> None:
    """The control of `is_opened`: a member that knows the value can claim it, and then it is opened."""
    attack = Attack({})
    with cgd.local_peers(3) as group:
        ada, *_ = attack.run(group, {"name": {SECRET}})
    assert isinstance(ada, dict)
    assert SECRET in ada["name"]
    assert is_opened(attack)


@pytest.mark.parametrize("lie", ["count", "all counts", "double", "every cell"])
def test_no_change_of_the_cells_opens_a_value_of_one_member(lie: str) -> None:
    """The sums are linear: a member can add to cells whose content it does not know."""

    def change(cells: Any) -> Any:
        changed = cells.copy()
        if lie == "count":
            changed[: len(cells) // PARTS, 0] += 1
        elif lie == "all counts":
            changed[:, 0] += 1
        elif lie == "double":
            changed *= 2
        else:
            changed += 1
        return changed

    attack = Attack({f"test: claims {attempt}": change for attempt in range(3)})
    with cgd.local_peers(3) as group:
        attack.run(group)
    assert CLAIMS in attack.opened
    assert not is_opened(attack)


def shifted(claim: bytes, place: int) -> bytes:
    return claim[:place] + bytes([claim[place] ^ 1]) + claim[place + 1 :]


@pytest.mark.parametrize(
    "forge",
    [
        lambda claim: claim,  # a copy
        lambda claim: shifted(claim, MARK_BYTES),  # another nonce, with the same tag
        lambda claim: shifted(claim, CLAIM_BYTES - 1),  # another tag
        lambda claim: claim[:MARK_BYTES] + bytes(CLAIM_BYTES - MARK_BYTES),
    ],
)
def test_claims_that_were_seen_before_cannot_be_used_in_a_repeated_sum(forge: Callable[[bytes], bytes]) -> None:
    """A member that withholds its key has a total before the others, and the sum is repeated with the same salt."""
    first = Attack({})
    with cgd.local_peers(3) as group:
        first.run(group)
        seen = decoded(CLAIM_TABLE, first.opened[CLAIMS], CLAIMS)
        assert len(seen) == 5  # of ada A and the secret, of bob A and B, of the third B
        second = Attack({CLAIMS: insert({forge(claim) for claim in seen})})
        second.run(group)
    assert CLAIMS in second.opened
    assert not is_opened(second)
    assert len(decoded(CLAIM_TABLE, second.opened[CLAIMS], CLAIMS)) >= 5


def test_claims_of_a_failed_attempt_are_not_valid_in_the_next_one() -> None:
    """The third member makes the first table undecodable for the others, but decodes it itself."""
    noise: dict[str, Any] = {}

    def spoil(cells: Any) -> Any:
        noise["added"] = np.ones_like(cells)
        return cells + noise["added"]

    attack = Attack({CLAIMS: spoil})

    def replay(cells: Any) -> Any:
        seen = decoded(CLAIM_TABLE, attack.opened[CLAIMS] - noise["added"], CLAIMS)
        assert len(seen) == 5
        return cells + CLAIM_TABLE.table(dict.fromkeys(seen, 1), len(cells) // PARTS, "test: claims 1")

    attack.lies["test: claims 1"] = replay
    with cgd.local_peers(3) as group:
        attack.run(group)
    assert "test: claims 1" in attack.opened
    assert not is_opened(attack)


def test_claims_are_valid_under_their_salt_only() -> None:
    with cgd.local_peers(3) as group, cgd.local_peers(3) as another:
        salts = {
            salt(peers, columns, context, attempt)
            for peers in (group[0], another[0])
            for columns in (["a", "b"], ["ab"], [])
            for context in ("classes", "categories")
            for attempt in range(3)
        }
        assert len(salts) == 36
        assert salt(group[0], ["a"], "classes", 0) == salt(group[1], ["a"], "classes", 0)
    one, *others = salts
    claims = [make_claim(one, bytes(32), b"value"), make_claim(one, bytes(31) + b"1", b"value")]
    assert Claims.opened(one, claims, 3).is_shared(b"value")
    assert not any(Claims.opened(other, claims, 3).participants(b"value") for other in others)
    assert not Claims.opened(one, claims, 3).participants(b"another value")


def test_claims_of_one_member_differ_by_value_and_are_the_same_again() -> None:
    seeds, salt_ = [bytes([number]) * 32 for number in range(2)], bytes(32)
    claims = {(seed, value): make_claim(salt_, seed, value) for seed in seeds for value in (b"a", b"b")}
    nonces = {claim[MARK_BYTES:-TAG_BYTES] for claim in claims.values()}
    assert len(nonces) == 4  # nobody sees which claims belong to one member
    assert all(make_claim(salt_, *each) == claim for each, claim in claims.items())
    opened = Claims.opened(salt_, [claims[seeds[0], b"a"]] * 2, 3)
    assert opened.participants(b"a") == 1


def test_value_is_tested_by_guessing() -> None:
    """This is not prevented, and documented: a member can compute the claims' mark of a value that it guesses."""
    attack = Attack({})
    with cgd.local_peers(3) as group:
        attack.run(group)
        seen = decoded(CLAIM_TABLE, attack.opened[CLAIMS], CLAIMS)
        opened = Claims.opened(salt(group[2], (), "test", 0), seen, 3)
    assert opened.participants(_key((0, SECRET))) == 1
    assert opened.participants(_key((0, "nobody"))) == 0


# What a member can see of a lie


def test_removed_claim_is_noticed_by_its_owner() -> None:
    first = Attack({})
    with cgd.local_peers(3) as group:
        first.run(group)
        (bob,) = (
            each for each in decoded(CLAIM_TABLE, first.opened[CLAIMS], CLAIMS) if each == claim_of(group, 1, "A")
        )
        remove = Attack({CLAIMS: lambda cells: 2 * cells - insert({bob})(cells)})
        _, refused, _ = remove.run(group)
    assert isinstance(refused, str)
    assert "our claim of a category was removed from the sum: a member entered a wrong number" in refused


def claim_of(group: LocalPeers, member: int, text: str) -> bytes:
    return make_claim(salt(group[member], (), "test", 0), member_secret(group[member]), _key((0, text)))


def test_text_without_claims_of_two_members_is_refused() -> None:
    def lie(cells: Any) -> Any:
        return cells + TEXT_TABLE.table({_key((0, "Z")): 1}, len(cells) // PARTS, TEXTS)

    with cgd.local_peers(3) as group:
        ada, bob, _ = Attack({TEXTS: lie}).run(group)
    for each in (ada, bob):
        assert isinstance(each, str)
        assert "a text was opened that no two participants have claimed" in each or "Aborted" in each


def test_removed_text_is_noticed_by_its_owner() -> None:
    def lie(cells: Any) -> Any:
        return cells - TEXT_TABLE.table({_key((0, "A")): 2}, len(cells) // PARTS, TEXTS)

    with cgd.local_peers(3) as group:
        found = Attack({TEXTS: lie}).run(group)[:2]
    assert any("a category that we have was removed from the sum" in str(each) for each in found)


@pytest.mark.parametrize(("context", "number"), [("test: size", -4), (SHARED, -4), (SHARED, 1)])
def test_wrong_numbers_of_values_are_noticed(context: str, number: int) -> None:
    """With one more shared value than there are, the value that ada alone has would seem to have another owner."""
    with cgd.local_peers(3) as group:
        ada, *_ = Attack({context: lambda own: own + number}).run(group)
    assert isinstance(ada, str)
    assert "in total, but we alone have" in ada


def test_every_text_has_one_key() -> None:
    """Otherwise one member could have a class opened twice, and no model with it could be loaded."""
    for text in ("", "A", "z" * MAX_CATEGORY_BYTES):
        key = _key((0, text))
        assert _entry(key, 1) == (0, text)
        for length in set(range(256)) - {key[2]}:
            assert _entry(key[:2] + bytes([length]) + key[3:], 1) != (0, text)
    assert _entry(_key((1, "A")), 1) is None


def test_categories_of_all_columns_together_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgd.tabular.category_union.MAX_LEARNED", 3)

    def learn(peers: Peers) -> str:
        with pytest.raises(CGDError) as error:
            learn_categories(peers, {"one": ["a", "b"], "two": ["c", "d"]}, "test")
        return str(error.value)

    with cgd.local_peers(3) as group:
        for message in group.run(learn):
            assert message.startswith("the members have 4 categories of all columns together, and the maximum is 3")
