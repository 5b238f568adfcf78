"""Statistics with a dishonest member: a wrong total is refused by the members whose part it ignores."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.federation.data_schema import Column
from cgd.tabular.columns import MAX_LEARNED_CLASSES
from cgd.tabular.federated_stats import MAX_CLASS_RATIO, TargetStats
from cgd.tabular.opened_counts import MAX_DISTANCE
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.wide_sums import _digits
from support.tabular import DATA, REGRESSION, records, run_members, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.federation.data_schema import Data

LISTED = replace(DATA, classes=("well", "ill"))
WARDS = replace(LISTED, columns=(*DATA.columns[:2], Column("ward", "category", ("A", "B", "C"))))


def lying(peers: cgd.Peers, lies: dict[str, Callable[[Any], Any]]) -> None:
    """Let a member change what it enters into the sums with these contexts."""
    honest_sum = peers.sum

    def dishonest_sum(values: Any, **options: Any) -> Any:
        return honest_sum(lies.get(options.get("context", ""), lambda same: same)(values), **options)

    peers.sum = dishonest_sum  # type: ignore[method-assign]


def fit_with_lies(
    data: Data, lies: dict[str, Callable[[Any], Any]], tables: list[dict[str, list[Any]]]
) -> list[Preprocessing | str]:
    """Return the statistics, or the error, of every member. The last one lies."""

    def member(peers: cgd.Peers, number: int) -> Preprocessing | str:
        if number == len(tables) - 1:
            lying(peers, lies)
        try:
            return fit(records(tables[number], data), data, data.columns, peers)
        except cgd.CGDError as error:
            return f"{type(error).__name__}: {error}"

    return run_members(member, list(range(len(tables))))


def add(*numbers: int) -> Callable[[Any], Any]:
    """Return a lie: these numbers more, in the first places."""

    def change(values: Any) -> Any:
        changed = np.array(values)
        changed.reshape(-1)[: len(numbers)] += numbers
        return changed

    return change


def add_amount(amount: float) -> Callable[[Any], Any]:
    """Return a lie in a wide sum: another amount for the first column."""
    return add(*_digits(amount, 0))


@pytest.mark.parametrize(
    ("data", "context", "lie", "message"),
    [
        (LISTED, "count classes", add(-1_000_000), "records of a class: -9"),
        (LISTED, "count classes", add(0, -100), "but we alone have"),
        (LISTED, "count values", add(-80), "records, values and categories: "),
        (LISTED, "count values", add(0, 0, 500), "in total, but there are only 120 records"),
        (LISTED, "count values", add(0, -120), "but we alone have"),
        (WARDS, "count values", add(0, 0, 0, 0, -120), "but we alone have"),
        (REGRESSION, "count targets", add(-100), "values of the target: 20 in total, but we alone have 40"),
        (LISTED, "sums of columns", add_amount(1e40), "the mean of 'age' is .*, and no number may be beyond"),
        (LISTED, "squares of columns", add_amount(-1e5), "the squared distances of 'age' from the mean sum to less"),
        (REGRESSION, "squares of target", add_amount(-1e3), "the squared distances of 'outcome' from the mean"),
    ],
)
def test_total_that_ignores_our_part_is_refused(
    data: Data, context: str, lie: Callable[[Any], Any], message: str
) -> None:
    *honest, _ = fit_with_lies(data, {context: lie}, [table(40, number) for number in range(3)])
    errors = [each for each in honest if isinstance(each, str)]
    assert len(errors) == 2
    refused = [each for each in errors if each.startswith("ProtocolError")]
    assert refused  # the other one may see that it has aborted the next sum
    for each in refused:
        assert re.search(message, each)
        assert "a member entered a wrong number, and the sums do not show which" in each


def test_records_of_a_learned_category_cannot_be_removed() -> None:
    """Cleo enters fewer records of ward A than none; `tests/tabular/test_claims.py` removes the category itself."""
    tables = [table(40, number) for number in range(3)]
    *honest, _ = fit_with_lies(DATA, {"count values": add(0, 0, 0, 0, -80)}, tables)
    assert any("records, values and categories: " in str(each) and "we alone have" in str(each) for each in honest)


@pytest.mark.parametrize("holder", [0, 1])
def test_wrong_count_shows_who_alone_has_a_value(holder: int) -> None:
    """This is not prevented, and documented: a member whose records a total ignores must stop, and all see who stops.

    One member has ward C, besides cleo. She enters a record of it too few, in place of her own.
    """
    tables = [table(40, number, ("A", "C") if number in (holder, 2) else ("A", "B")) for number in range(3)]
    known, place = ["A", "C", "other"], 5  # after the rows, the values of two columns, missing wards, and ward A

    def member(peers: cgd.Peers, number: int) -> str:
        honest_sum = peers.sum

        def too_few(values: Any, **options: Any) -> Any:
            if options["context"] != "count values":
                return honest_sum(values, **options)
            assert len(values) == 4 + len(known)
            lie = np.array([0] * place + [-1 - values[place], 0])
            return honest_sum(values + lie, **options) - lie

        if number == 2:
            peers.sum = too_few  # type: ignore[method-assign]
        with pytest.raises(cgd.CGDError) as error:
            fit(records(tables[number]), DATA, DATA.columns, peers)
        return str(error.value)

    with cgd.local_peers(["ada", "bob", "cleo"]) as group:
        found = group.run(member, [0, 1, 2])
    assert "we alone have" in found[holder]
    for number in {0, 1, 2} - {holder}:
        assert found[number].startswith(f"{group[holder].me}: aborted sum")


def test_values_far_from_all_others_are_not_used() -> None:
    """Cleo invents 100,000 records of ada's value, so that bob's values are large numbers, and ada's are zero."""
    tables = [table(40, number) for number in range(3)]
    for place, content in enumerate(tables):
        content["dose"] = [0.0 if place == 0 else 500.0 + number for number in range(40)]
    invented = {
        "count values": add(100_000, 0, 100_000),
        "sums of columns": lambda digits: digits * np.array([[1], [0]]),
        "squares of columns": lambda digits: digits * np.array([[1], [0]]),
    }
    _, bob, _ = fit_with_lies(LISTED, invented, tables)
    assert isinstance(bob, str)
    assert "our values of 'dose' are 50" in bob
    assert f"and {MAX_DISTANCE:g} is the most" in bob
    honest = fit_with_lies(LISTED, {}, tables)
    assert all(isinstance(each, Preprocessing) for each in honest)


def test_class_weights_have_a_limited_ratio() -> None:
    weights = TargetStats(("a", "b", "c"), (100, 900, 2)).class_weights()
    assert weights.tolist() == pytest.approx([1002 / 300, 1002 / 2700, 1002 / 270])
    assert weights.max() / weights.min() == pytest.approx(MAX_CLASS_RATIO)
    assert TargetStats(("a", "b"), (90, 900)).weight_notes() == []
    (note,) = TargetStats(("a", "b"), (89, 900)).weight_notes()
    assert note.endswith("so the rare class 'a' has less total weight than the others")


def test_number_of_learned_classes_is_limited() -> None:
    """Two members collude: each class must occur at two."""
    tables = [table(MAX_LEARNED_CLASSES, number) for number in range(4)]
    for each in tables[2:]:
        each["outcome"] = [f"class {number}" for number in range(MAX_LEARNED_CLASSES)]
    for result in fit_with_lies(DATA, {}, tables):
        assert isinstance(result, str)
        assert "the members have 202 categories of 'outcome' in total, and the maximum is 200" in result


def test_missing_values_of_one_member_cannot_be_removed() -> None:
    """Cleo enters more values than records, so that no value of the column seems to be missing anywhere."""
    tables = [table(40, number) for number in range(3)]
    missing = sum(each["age"].count(None) for each in tables)
    *honest, _ = fit_with_lies(LISTED, {"count values": add(0, missing)}, tables)
    assert any("missing values: 0 in total, but we alone have" in str(each) for each in honest)


def test_categories_cannot_have_more_records_than_there_are() -> None:
    """Their sum could exceed 63 bits: then the honest members' run.json cannot be read, and `cgd join` never ends."""
    huge = 3 * 10**18
    tables = [table(40, number) for number in range(3)]
    *honest, _ = fit_with_lies(WARDS, {"count values": add(huge, 0, 0, 0, *3 * [huge - 500])}, tables)
    assert any("in total, but there are only" in str(each) for each in honest)
