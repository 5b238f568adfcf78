from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cgd
from cgd import InputError, Peers
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.tabular import category_union
from cgd.tabular.category_union import learn_categories
from cgd.tabular.lookup_table import Layout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Own = dict[str, set[str]]
Union = dict[str, tuple[str, ...]]
COLUMNS = ("ward", "diagnosis")

# A few common texts, so that members share categories, and arbitrary ones.
texts = st.one_of(st.sampled_from(["a", "b", "ab", "", "ä", "1", "\0", "a\0"]), st.text(max_size=20))
own_categories = st.fixed_dictionaries(dict.fromkeys(COLUMNS, st.sets(texts, max_size=12)))


def union(members: list[Own], **options: Any) -> list[Union]:
    """Return what every member learns."""
    with cgd.local_peers(len(members)) as group:
        return group.run(lambda peers, own: learn_categories(peers, own, "test", **options), members)


def expected(members: list[Own]) -> list[Union]:
    """Return what two members have, once for every member."""
    owners = {name: Counter(text for own in members for text in own[name]) for name in members[0]}
    shared = {name: tuple(sorted(text for text, n in found.items() if n > 1)) for name, found in owners.items()}
    return [shared] * len(members)


@given(st.lists(own_categories, min_size=3, max_size=6))
@settings(max_examples=40)
def test_union_has_what_two_members_have(members: list[Own]) -> None:
    assert union(members) == expected(members)


def test_union_of_many_categories_of_maximum_length() -> None:
    rng = np.random.default_rng(0)
    names = [f"{number:05}".ljust(MAX_CATEGORY_BYTES, "x") for number in range(1500)]
    members: list[Own] = [
        {name: {names[place] for place in rng.permutation(1500)[:700]} for name in COLUMNS} for _ in range(3)
    ]
    assert union(members) == expected(members)


def test_union_without_categories_is_empty() -> None:
    empty: Own = {name: set() for name in COLUMNS}
    assert union([empty] * 3) == [dict.fromkeys(COLUMNS, ())] * 3


def test_failed_attempt_is_repeated_with_other_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    members: list[Own] = [{"ward": {"a", "b"}}, {"ward": {"a"}}, {"ward": {"c"}}]
    sent: dict[str, list[Any]] = {}
    peel, failed = Layout.peel, []

    def fail_once(layout: Any, cells: Any, part: int, salt: str) -> Any:
        if salt == "test: claims 0":
            failed.append(salt)
            return None
        return peel(layout, cells, part, salt)

    monkeypatch.setattr(Layout, "peel", fail_once)

    def learn(peers: Peers, own: Own) -> Union:
        honest = peers.sum

        def record(values: Any, **options: Any) -> Any:
            sent.setdefault(f"{peers.me} {options['context']}", []).append(values)
            return honest(values, **options)

        peers.sum = record  # type: ignore[method-assign]
        return learn_categories(peers, own, "test")

    with cgd.local_peers(3) as group:
        assert group.run(learn, members) == expected(members)
        names = group[0].members
    assert len(failed) == 3
    for name in names:
        first, second = (
            {tuple(row) for row in sent[f"{name} test: claims {attempt}"][0].tolist() if any(row)} for attempt in (0, 1)
        )
        assert first
        assert second
        assert not first & second


def test_too_long_category_is_refused_before_anything_is_sent() -> None:
    def learn(peers: Peers, own: Mapping[str, Collection[str]]) -> str:
        try:
            learn_categories(peers, own, "test")
        except cgd.CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "learned"

    with cgd.local_peers(3) as group:
        refused, *messages = group.run(learn, [{"ward": ["ä" * MAX_CATEGORY_BYTES]}, {"ward": []}, {"ward": []}])
    assert refused.startswith("InputError: the category 'ääääää")
    assert all(each.startswith("PeerAbortedError") for each in messages)


def test_too_many_categories_are_refused_by_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(category_union, "MAX_ENTRIES", 5)

    def learn(peers: Peers, own: Own) -> str:
        with pytest.raises(InputError) as error:
            learn_categories(peers, own, "test")
        return str(error.value)

    with cgd.local_peers(3) as group:
        messages = group.run(learn, [{"ward": {"a", "b"}}] * 3)
    assert set(messages) == {
        (
            "the members have 6 categories in total, and the maximum is 5; "
            "list the categories in the federation file, or leave out the columns with many categories"
        )
    }


def test_members_that_collude_cannot_add_more_categories_than_the_tables_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every category is a column in the matrix of every member: 260,000 of them are 10 GB for 10,000 records."""
    monkeypatch.setattr(category_union, "MAX_CATEGORIES", 100)
    honest: Own = {"ward": {"A", "B"}}
    flood: Own = {"ward": {f"c{number}" for number in range(401)}}
    with pytest.raises(InputError, match="the members have 403 categories of 'ward' in total, and the maximum is 400"):
        union([honest, honest, flood, flood])


def test_value_of_one_member_stops_all_if_two_are_needed() -> None:
    def learn(peers: Peers, own: Own) -> str:
        contexts = []
        honest = peers.sum

        def record(values: Any, **options: Any) -> Any:
            contexts.append(options["context"])
            return honest(values, **options)

        peers.sum = record  # type: ignore[method-assign]
        with pytest.raises(InputError) as error:
            learn_categories(peers, own, "test", needs_two=True)
        assert not any("table" in each for each in contexts)  # no text was opened
        return str(error.value)

    digits: Own = {"outcome": {"0", "1"}}
    with cgd.local_peers(3) as group:
        ada, bob, cleo = group.run(learn, [digits, digits, {"outcome": {"yes", "no"}}])
    assert ada == bob
    assert ada.startswith("2 values occur at one other participant only. What is learned from the tables must occur")
    assert cleo.startswith("only we have 'no', 'yes' of 'outcome'. ")
    for message in (ada, bob):
        assert "'yes'" not in message
