from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cgd
from cgd import InputError, Peers, ProtocolError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.tabular import category_union
from cgd.tabular.columns import MAX_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

Own = dict[str, dict[str, int]]
COLUMNS = ("ward", "diagnosis")

# A few common texts, so that members share categories, and arbitrary ones.
texts = st.one_of(st.sampled_from(["a", "b", "ab", "", "ä", "1", "\0", "a\0"]), st.text(max_size=20))
categories = st.dictionaries(texts, st.integers(1, 2**31), max_size=12)
own_categories = st.fixed_dictionaries(dict.fromkeys(COLUMNS, categories))


def union(members: list[Own], context: str = "test") -> list[Own]:
    with cgd.local_peers(len(members)) as group:
        return group.run(lambda peers, own: category_union.learn_categories(peers, own, context), members)


def pooled(members: list[Own]) -> Own:
    totals: dict[str, Counter[str]] = {name: Counter() for name in COLUMNS}
    for own in members:
        for name in COLUMNS:
            totals[name].update(own[name])
    return {name: dict(sorted(counter.items())) for name, counter in totals.items()}


@given(st.lists(own_categories, min_size=3, max_size=6))
@settings(max_examples=40)
def test_union_has_total_counts_at_every_member(members: list[Own]) -> None:
    for each in union(members):
        assert each == pooled(members)
        assert [list(column) for column in each.values()] == [sorted(column) for column in each.values()]


def test_union_of_many_categories_of_maximum_length() -> None:
    rng = np.random.default_rng(0)
    names = [f"{number:05}".ljust(MAX_CATEGORY_BYTES, "x") for number in range(1500)]
    members = [
        {name: {names[i]: int(rng.integers(1, 1000)) for i in rng.permutation(1500)[:700]} for name in COLUMNS}
        for _ in range(3)
    ]
    assert union(members) == [pooled(members)] * 3


def test_union_without_categories_is_empty() -> None:
    assert union([{name: {} for name in COLUMNS}] * 3) == [{name: {} for name in COLUMNS}] * 3


def test_category_with_count_zero_is_left_out() -> None:
    members: list[Own] = [{"ward": {"a": 0, "b": 1}, "diagnosis": {}}] * 3
    assert union(members) == [{"ward": {"b": 3}, "diagnosis": {}}] * 3


def test_members_retry_with_a_larger_table_if_decoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With very few cells the first attempts fail, at all members alike."""
    monkeypatch.setattr(category_union, "MIN_PART_CELLS", 1)
    entries = {f"c{number}": number + 1 for number in range(40)}
    members: list[Own] = [
        {"ward": {name: n for name, n in entries.items() if (n + member) % 2}, "diagnosis": {}} for member in range(3)
    ]
    original = category_union._part_cells

    def small(total: int, attempt: int) -> int:
        return original(total // 3, attempt)

    monkeypatch.setattr(category_union, "_part_cells", small)
    sums = []

    def learn(peers: Peers, own: Own) -> Own:
        found = category_union.learn_categories(peers, own, "test")
        sums.append(peers.number)
        return found

    with cgd.local_peers(3) as group:
        assert group.run(learn, members) == [pooled(members)] * 3
    assert len(set(sums)) == 1
    assert sums[0] > 2  # the size, one failed table, and another one


def test_first_table_is_decodable_except_rarely() -> None:
    """600 tables of up to 60 entries that no two members share, the worst case: fewer than 1 in 500 fail.

    With 1.2 expected failures at most, 10 have a probability below 10⁻⁶. The control has half as many cells as entries.
    """
    failures, control = 0, 0
    for trial in range(600):
        entries = {(0, f"{trial} {number}"): 1 for number in range(trial % 60 + 1)}
        enough, few = (
            category_union._peel(category_union._table(entries, part, "salt"), part, "salt", 1)
            for part in (category_union._part_cells(len(entries), 0), len(entries) // 6 + 1)
        )
        assert enough in (None, entries)
        assert few in (None, entries)
        failures += enough is None
        control += few is None
    assert failures < 10
    assert control > 300


def test_inconsistent_table_raises_protocol_error_at_all_members() -> None:
    def learn(peers: Peers, cheat: bool) -> str:
        if cheat:
            peers.sum(np.array([0]), context="test: size")
            for attempt in range(category_union.ATTEMPTS):
                noise = np.ones(
                    (category_union.PARTS * category_union._part_cells(2, attempt), category_union.WIDTH),
                    dtype=np.int64,
                )
                peers.sum(noise, context=f"test: table {attempt}")
            return "cheated"
        try:
            category_union.learn_categories(peers, {"ward": {"a": 1}}, "test")
        except ProtocolError as error:
            return str(error)
        return "learned"

    with cgd.local_peers(3) as group:
        cheated, *others = group.run(learn, [True, False, False])
    assert cheated == "cheated"
    assert all("could not be decoded in 3 attempts" in each for each in others)
    assert all("list the categories in the schema" in each for each in others)
    assert not any("participant" in each for each in others)  # it names nobody


class UndecodableSums:
    """The sums of a member with one category and of a dishonest one, which enters that it has `claimed` categories."""

    def __init__(self, claimed: int) -> None:
        self.claimed = claimed
        self.table_bytes: list[int] = []

    def sum(self, values: npt.NDArray[np.int64], context: str) -> npt.NDArray[np.int64]:
        if context.endswith("size"):
            return values + self.claimed
        self.table_bytes.append(values.nbytes)
        return values


@pytest.mark.parametrize("claimed", [0, 1000, category_union.MAX_ENTRIES // 2, category_union.MAX_ENTRIES - 1])
def test_tables_that_cannot_be_decoded_have_a_bounded_size(claimed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(category_union, "_peel", lambda *_: None)
    sums = UndecodableSums(claimed)
    with pytest.raises(ProtocolError, match="could not be decoded"):
        category_union.learn_categories(cast("Peers", sums), {"ward": {"a": 1}}, "test")
    assert len(sums.table_bytes) == category_union.ATTEMPTS
    assert max(sums.table_bytes) <= category_union.MAX_TABLE_BYTES


def test_first_table_of_the_largest_number_of_categories_is_large_enough() -> None:
    part = category_union._part_cells(category_union.MAX_ENTRIES, 0)
    assert part < category_union.MAX_PART_CELLS
    assert category_union.PARTS * part > category_union.MAX_ENTRIES * 1.4


def test_attempts_with_tables_of_the_same_size_use_other_cells() -> None:
    """Beyond the limit of the size only the hashes change, so another attempt may succeed."""
    key = category_union._key((0, "a"))
    places = [category_union._row(key, category_union.MAX_PART_CELLS, f"test {attempt}")[1] for attempt in range(3)]
    assert len({tuple(each) for each in places}) == 3


def test_too_long_category_is_refused_before_anything_is_sent() -> None:
    def learn(peers: Peers, own: Mapping[str, Mapping[str, int]]) -> str:
        try:
            category_union.learn_categories(peers, own, "test")
        except cgd.CGDError as error:
            return f"{type(error).__name__}: {error}"
        return "learned"

    with cgd.local_peers(3) as group:
        refused, *messages = group.run(learn, [{"ward": {"ä" * MAX_CATEGORY_BYTES: 1}}, {"ward": {}}, {"ward": {}}])
    assert refused.startswith("InputError: the category 'ääääää")
    assert all(each.startswith("PeerAbortedError") for each in messages)


def test_too_many_categories_are_refused_by_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(category_union, "MAX_ENTRIES", 5)

    def learn(peers: Peers, own: Mapping[str, Mapping[str, int]]) -> str:
        with pytest.raises(InputError) as error:
            category_union.learn_categories(peers, own, "test")
        return str(error.value)

    with cgd.local_peers(3) as group:
        messages = group.run(learn, [{"ward": {"a": 1, "b": 1}}] * 3)
    assert set(messages) == {
        (
            "the members have 6 categories in total, and the maximum is 5; "
            "list the categories in the federation file, or leave out the columns with many categories"
        )
    }


def test_opened_table_does_not_depend_on_who_had_which_category() -> None:
    """Two federations with the same totals have the same sum, so it discloses nothing but the totals."""
    part = category_union._part_cells(4, 0)
    one = category_union._table({(0, "a"): 3, (0, "b"): 1}, part, "s") + category_union._table({(0, "a"): 1}, part, "s")
    other = category_union._table({(0, "a"): 1}, part, "s") + category_union._table(
        {(0, "b"): 1, (0, "a"): 3}, part, "s"
    )
    apart = category_union._table({(0, "a"): 4}, part, "s") + category_union._table({(0, "b"): 1}, part, "s")
    assert np.array_equal(one, other)
    assert np.array_equal(one, apart)


def test_one_member_cannot_add_more_categories_than_a_table_may_have() -> None:
    """Every category is a column in the matrix of every member: 260,000 of them are 10 GB for 10,000 records."""
    honest: Own = {"ward": {"A": 30, "B": 30}}
    flood: Own = {"ward": {f"c{number}": 1 for number in range(5 * MAX_CATEGORIES)}}
    with pytest.raises((InputError, ProtocolError), match="categor"):
        union([honest, honest, flood])
