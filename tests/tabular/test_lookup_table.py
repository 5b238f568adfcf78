from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

import cgd
from cgd import Peers, ProtocolError
from cgd.tabular import lookup_table
from cgd.tabular.category_union import CLAIM_TABLE, MAX_ENTRIES, TEXT_TABLE
from cgd.tabular.lookup_table import Layout, sum_sets

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

SHORT = Layout(8)
Sets = dict[bytes, int]


def key(number: int) -> bytes:
    return f"{number:08}".encode()


def union(members: list[Sets], total: int | None = None) -> list[Mapping[bytes, int]]:
    """Return the union at every member."""

    def learn(peers: Peers, own: Sets) -> Mapping[bytes, int]:
        size = sum(map(len, members)) if total is None else total
        return sum_sets(peers, SHORT, size, "test", lambda _: own, lambda _, found: found)

    with cgd.local_peers(len(members)) as group:
        return group.run(learn, members)


def test_union_has_total_counts_at_every_member() -> None:
    members: list[Sets] = [{key(1): 2, key(2): 1}, {key(1): 3}, {}]
    assert union(members) == [{key(1): 5, key(2): 1}] * 3


def test_members_retry_with_a_larger_table_if_decoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With very few cells the first attempts fail, at all members alike."""
    monkeypatch.setattr(lookup_table, "MIN_PART_CELLS", 1)
    members: list[Sets] = [{key(n): 1 for n in range(40) if (n + member) % 2} for member in range(3)]
    sums = []

    def learn(peers: Peers, own: Sets) -> Mapping[bytes, int]:
        found = sum_sets(peers, SHORT, 13, "test", lambda _: own, lambda _, found: found)
        sums.append(peers.number)
        return found

    with cgd.local_peers(3) as group:
        first, *others = group.run(learn, members)
    assert first.keys() == {key(n) for n in range(40)}
    assert others == [first] * 2
    assert len(set(sums)) == 1
    assert sums[0] > 1


def test_first_table_is_decodable_except_rarely() -> None:
    """600 tables of up to 60 keys that no two members share, the worst case: fewer than 1 in 500 fail.

    With 1.2 expected failures at most, 10 have a probability below 10⁻⁶. The control has half as many cells as keys.
    """
    failures, control = 0, 0
    for trial in range(600):
        entries = {key(1000 * trial + number): 1 for number in range(trial % 60 + 1)}
        enough, few = (
            SHORT.peel(SHORT.table(entries, part, "salt"), part, "salt")
            for part in (SHORT.part_cells(len(entries), 0), len(entries) // 6 + 1)
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
            for attempt in range(lookup_table.ATTEMPTS):
                cells = lookup_table.PARTS * SHORT.part_cells(2, attempt)
                peers.sum(np.ones((cells, SHORT.width), dtype=np.int64), context=f"test {attempt}")
            return "cheated"
        try:
            sum_sets(peers, SHORT, 2, "test", lambda _: {key(1): 1}, lambda _, found: found)
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
    """The sums of a member beside one that enters cells which cannot be decoded."""

    def __init__(self) -> None:
        self.table_bytes: list[int] = []

    def sum(self, values: npt.NDArray[np.int64], context: str) -> npt.NDArray[np.int64]:
        assert context
        self.table_bytes.append(values.nbytes)
        return values + 1


@pytest.mark.parametrize("layout", [CLAIM_TABLE, TEXT_TABLE])
@pytest.mark.parametrize("total", [0, 1000, MAX_ENTRIES // 2, MAX_ENTRIES])
def test_tables_that_cannot_be_decoded_have_a_bounded_size(
    total: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "peel", lambda *_: None)
    sums = UndecodableSums()
    with pytest.raises(ProtocolError, match="could not be decoded"):
        sum_sets(cast("Peers", sums), layout, total, "test", lambda _: {}, lambda _, found: found)
    assert len(sums.table_bytes) == lookup_table.ATTEMPTS
    assert max(sums.table_bytes) <= lookup_table.MAX_TABLE_BYTES


@pytest.mark.parametrize("layout", [CLAIM_TABLE, TEXT_TABLE])
def test_first_table_of_the_largest_number_of_keys_is_large_enough(layout: Layout) -> None:
    part = layout.part_cells(MAX_ENTRIES, 0)
    assert part < layout.max_part_cells
    assert lookup_table.PARTS * part > MAX_ENTRIES * 1.4


def test_attempts_with_tables_of_the_same_size_use_other_cells() -> None:
    """Beyond the limit of the size only the hashes change, so another attempt may succeed."""
    places = [SHORT.row(key(1), SHORT.max_part_cells, f"test {attempt}")[1] for attempt in range(3)]
    assert len({tuple(each) for each in places}) == 3


def test_opened_table_does_not_depend_on_who_had_which_key() -> None:
    """Two federations with the same totals have the same sum, so it discloses nothing but the totals."""
    part = SHORT.part_cells(4, 0)

    def table(entries: Sets) -> npt.NDArray[np.int64]:
        return SHORT.table(entries, part, "s")

    one = table({key(1): 3, key(2): 1}) + table({key(1): 1})
    assert np.array_equal(one, table({key(1): 1}) + table({key(2): 1, key(1): 3}))
    assert np.array_equal(one, table({key(1): 4}) + table({key(2): 1}))
