from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cgd
from cgd import InputError, Peers, ProtocolError
from cgd.federation.data_schema import MAX_CATEGORY_LENGTH
from cgd.tabular import category_union

if TYPE_CHECKING:
    from collections.abc import Mapping


Own = dict[str, dict[str, int]]
COLUMNS = ("ward", "diagnosis")

# Few letters and any letters: categories that several members have, and strange ones.
texts = st.one_of(st.sampled_from(["a", "b", "ab", "", "ä", "1", "\0", "a\0"]), st.text(max_size=20))
categories = st.dictionaries(texts, st.integers(1, 2**31), max_size=12)
owns = st.fixed_dictionaries(dict.fromkeys(COLUMNS, categories))


def learned(members: list[Own], context: str = "test") -> list[Own]:
    with cgd.local_peers(len(members)) as colony:
        return colony.run(lambda peers, own: category_union.learn(peers, own, context), members)


def pooled(members: list[Own]) -> Own:
    totals: dict[str, Counter[str]] = {name: Counter() for name in COLUMNS}
    for own in members:
        for name in COLUMNS:
            totals[name].update(own[name])
    return {name: dict(sorted(counter.items())) for name, counter in totals.items()}


@given(st.lists(owns, min_size=3, max_size=6))
@settings(max_examples=40)
def test_it_is_the_plain_union_with_total_counts_at_every_member(members: list[Own]) -> None:
    for each in learned(members):
        assert each == pooled(members)
        assert [list(column) for column in each.values()] == [sorted(column) for column in each.values()]


def test_many_categories_of_the_longest_kind() -> None:
    rng = np.random.default_rng(0)
    names = [f"{number:05}".ljust(MAX_CATEGORY_LENGTH, "x") for number in range(1500)]
    members = [
        {name: {names[i]: int(rng.integers(1, 1000)) for i in rng.permutation(1500)[:700]} for name in COLUMNS}
        for _ in range(3)
    ]
    assert learned(members) == [pooled(members)] * 3


def test_nobody_has_any() -> None:
    assert learned([{name: {} for name in COLUMNS}] * 3) == [{name: {} for name in COLUMNS}] * 3


def test_a_count_of_zero_is_no_category() -> None:
    members: list[Own] = [{"ward": {"a": 0, "b": 1}, "diagnosis": {}}] * 3
    assert learned(members) == [{"ward": {"b": 3}, "diagnosis": {}}] * 3


def test_if_a_table_cannot_be_taken_apart_all_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any cells the first attempts fail; everybody sees it alike and takes the same number of them."""
    monkeypatch.setattr(category_union, "SLACK", 1)
    entries = {f"c{number}": number + 1 for number in range(40)}
    members: list[Own] = [
        {"ward": {name: n for name, n in entries.items() if (n + member) % 2}, "diagnosis": {}} for member in range(3)
    ]
    real = category_union._size

    def small(total: int, attempt: int) -> int:
        return real(total // 8, attempt)

    monkeypatch.setattr(category_union, "_size", small)
    sums = []

    def learn(peers: Peers, own: Own) -> Own:
        found = category_union.learn(peers, own, "test")
        sums.append(peers.number)
        return found

    with cgd.local_peers(3) as colony:
        assert colony.run(learn, members) == [pooled(members)] * 3
    assert len(set(sums)) == 1
    assert sums[0] > 2  # the size, one table in vain, another one


def test_it_rarely_takes_a_second_attempt() -> None:
    """600 tables of up to 60 entries that no two members share, the worst case: fewer than 1 in 500 fail.

    With 1.2 expected failures at most, 10 have a probability below 10⁻⁶. The control has half as many cells as entries.
    """
    failures, control = 0, 0
    for trial in range(600):
        entries = {(0, f"{trial} {number}"): 1 for number in range(trial % 60 + 1)}
        enough, few = (
            category_union._peel(category_union._table(entries, part, "salt"), part, "salt", 1)
            for part in (category_union._size(len(entries), 0), len(entries) // 6 + 1)
        )
        assert enough in (None, entries)
        assert few in (None, entries)
        failures += enough is None
        control += few is None
    assert failures < 10
    assert control > 300


def test_what_is_no_table_is_refused_by_all() -> None:
    def learn(peers: Peers, cheat: bool) -> str:
        if cheat:
            peers.sum(np.array([0]), context="test: size")
            for attempt in range(category_union.ATTEMPTS):
                noise = np.ones(
                    (category_union.PARTS * category_union._size(2, attempt), category_union.WIDTH), dtype=np.int64
                )
                peers.sum(noise, context=f"test: table {attempt}")
            return "cheated"
        try:
            category_union.learn(peers, {"ward": {"a": 1}}, "test")
        except ProtocolError as error:
            return str(error)
        return "learned"

    with cgd.local_peers(3) as colony:
        cheated, *others = colony.run(learn, [True, False, False])
    assert cheated == "cheated"
    assert all("could not be put together in 8 attempts" in each for each in others)


def test_a_category_that_is_too_long_is_refused_before_anything_is_sent() -> None:
    def learn(peers: Peers, own: Mapping[str, Mapping[str, int]]) -> str:
        try:
            category_union.learn(peers, own, "test")
        except cgd.CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "learned"

    with cgd.local_peers(3) as colony:
        refused, *told = colony.run(learn, [{"ward": {"ä" * MAX_CATEGORY_LENGTH: 1}}, {"ward": {}}, {"ward": {}}])
    assert refused.startswith("InputError: the category 'ääääää")
    assert all(each.startswith("PeerAbortedError") for each in told)


def test_too_many_categories_are_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(category_union, "MAX_ENTRIES", 5)

    def learn(peers: Peers, own: Mapping[str, Mapping[str, int]]) -> str:
        with pytest.raises(InputError) as error:
            category_union.learn(peers, own, "test")
        return str(error.value)

    with cgd.local_peers(3) as colony:
        says = colony.run(learn, [{"ward": {"a": 1, "b": 1}}] * 3)
    assert set(says) == {
        (
            "the members have 6 categories, added up, and 5 is the most; "
            "list the categories in the federation file, or leave the columns out that have many"
        )
    }


def test_the_table_of_a_total_does_not_tell_who_had_what() -> None:
    """Two federations with the same totals have the same sum, so nothing but the totals can be had from it."""
    part = category_union._size(4, 0)
    one = category_union._table({(0, "a"): 3, (0, "b"): 1}, part, "s") + category_union._table({(0, "a"): 1}, part, "s")
    other = category_union._table({(0, "a"): 1}, part, "s") + category_union._table(
        {(0, "b"): 1, (0, "a"): 3}, part, "s"
    )
    apart = category_union._table({(0, "a"): 4}, part, "s") + category_union._table({(0, "b"): 1}, part, "s")
    assert np.array_equal(one, other)
    assert np.array_equal(one, apart)
