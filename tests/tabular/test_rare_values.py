"""Values of few records: nothing of them leaves, whatever another member enters."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd import CGDError, InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Data
from cgd.federation.member import FederationMember
from cgd.federation.model_section import Model
from cgd.tabular.category_union import CLAIM_TABLE, TEXT_TABLE, _key
from cgd.tabular.claims import Claims, make_claim, salt
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.learned_values import learned_messages, other_notes
from cgd.tabular.lookup_table import PARTS
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.rare_values import check_rare_values, fold_rare_values, value_counts
from cgd.tabular.run import TabularRun
from cgd.tabular.training import train
from support.tabular import SCHEMA, run_in_threads, run_members, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

NAMES = ("ada", "bob", "cleo")
WARD = Column("ward", "category")
DATA = Data("outcome", (WARD,))


def wards(data: Data = DATA, /, **counts: int) -> TabularDataset:
    """Return records with these numbers of records of each ward, and of both classes."""
    values: list[Any] = [None if ward == "missing" else ward for ward, count in counts.items() for _ in range(count)]
    frame = {"ward": values, "outcome": (["yes", "no"] * len(values))[: len(values)]}
    return dataset_from_frame(frame, data, data.columns, target=True)[0]


def fitted(members: Sequence[TabularDataset], data: Data = DATA) -> Preprocessing:
    results: list[Preprocessing] = run_members(lambda peers, own: fit(own, data, data.columns, peers), members)
    first, *others = results
    assert all(each == first for each in others)
    return first


def test_values_of_few_records_become_other() -> None:
    folded = fold_rare_values(wards(A=5, B=4, C=1, missing=2), DATA, DATA.columns).categories["ward"]
    assert value_counts(folded) == {"A": 5, "other": 5}
    assert folded.missing == 2
    assert folded.names == ("A", "other")
    again = fold_rare_values(wards(A=5, other=1), DATA, DATA.columns).categories["ward"]
    assert value_counts(again) == {"A": 5, "other": 1}
    merged = fold_rare_values(wards(A=5, other=1, B=2), DATA, DATA.columns).categories["ward"]
    assert value_counts(merged) == {"A": 5, "other": 3}


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (DATA, {"A"}),
        (replace(DATA, rare=1), {"A", "B", "C"}),
        (replace(DATA, rare=4), {"A", "B"}),
        (replace(DATA, columns=(replace(WARD, rare=2),)), {"A", "B"}),
        (replace(DATA, columns=(replace(WARD, categories=("A", "B", "C")),)), {"A"}),
        (replace(DATA, rare=2, columns=(replace(WARD, categories=("A", "B", "C")),)), {"A", "B"}),
    ],
)
def test_number_of_records_is_a_setting(data: Data, kept: set[str]) -> None:
    folded = fold_rare_values(wards(data, A=5, B=4, C=1), data, data.columns).categories["ward"]
    assert value_counts(folded).keys() - {"other"} == kept


def test_only_values_of_enough_records_at_two_members_are_learned() -> None:
    members = [wards(A=9, B=5, C=7, D=2), wards(A=5, B=4, D=2), wards(A=1, B=6, E=1, missing=3)]
    (column,) = fitted(members).columns
    # A: the record of the third member counts as other. C: only one member has it. D: two have it, with few records.
    assert column == CategoryStats("ward", ("A", "B", "other"), (14, 11, 17), missing=3)


def test_column_without_a_value_that_two_members_have_gives_a_note() -> None:
    preprocessing = fitted([wards(A=9), wards(B=9), wards(C=9, D=1)])
    assert preprocessing.columns == (CategoryStats("ward", ("other",), (28,), missing=0),)
    (note,) = preprocessing.columns[0].notes()
    assert note.startswith("column 'ward': all values count as 'other', because no two participants have a value of")


def test_value_called_other_is_merged() -> None:
    (column,) = fitted([wards(A=9, other=6), wards(A=9, other=1), wards(A=9, B=2)]).columns
    assert column == CategoryStats("ward", ("A", "other"), (27, 9), missing=0)


def test_other_that_a_member_has_opened_as_a_text_is_refused() -> None:
    """Its count, which the liar decides, would take the place of the real one."""

    def member(peers: Peers, own: TabularDataset) -> str:
        original = peers.sum

        def lie(values: Any, **options: Any) -> Any:
            context = options["context"]
            entry = {_key((0, "other")): 1}
            if context in ("categories: size", "categories: shared"):
                values = values + 2
            elif context.startswith("categories: claims"):
                salted = salt(peers, ["ward"], "categories", int(context[-1]))
                claims = {make_claim(salted, secret, _key((0, "other"))): 1 for secret in (b"1" * 32, b"2" * 32)}
                values = values + CLAIM_TABLE.table(claims, len(values) // PARTS, context)
            elif context.startswith("categories: table"):
                values = values + TEXT_TABLE.table(entry, len(values) // PARTS, context)
            return original(values, **options)

        if peers.me == peers.members[2]:
            peers.sum = lie  # type: ignore[method-assign]
        with pytest.raises(CGDError) as error:
            fit(own, DATA, DATA.columns, peers)
        return str(error.value)

    found = run_members(member, [wards(A=9, x=3), wards(A=9, B=6, z=4), wards(A=9, B=9)])
    assert any("'other' was opened as the text of a category" in each for each in found[:2])


def test_other_exists_only_if_it_has_records() -> None:
    (column,) = fitted([wards(A=9, B=5)] * 3).columns
    assert column == CategoryStats("ward", ("A", "B"), (27, 15), missing=0)


def test_unknown_category_of_a_prediction_counts_as_other() -> None:
    preprocessing = fitted([wards(A=9, B=2)] * 3)
    assert preprocessing.features == ("ward=A", "ward=other")
    later = dataset_from_frame({"ward": ["A", "B", "Z", None]}, DATA, DATA.columns)[0]
    matrix, notes = preprocessing.transform(later)
    assert matrix.tolist() == [[1, 0], [0, 1], [0, 1], [0, 0]]
    assert notes[0] == "column 'ward': 2 values are of categories that count as 'other': 'B' (1), 'Z' (1)"


def test_name_that_others_guess_is_not_disclosed_by_counts_or_features() -> None:
    """Bob and cleo collude: they enter a name, which is then learned. Ada has a record of it, and of no other name."""

    def total(name: str) -> tuple[Preprocessing, Any]:
        ada = wards(DATA, **{"A": 9, name: 1})
        preprocessing = fitted([ada, wards(A=9, Jones=5), wards(A=9, Jones=5)])
        return preprocessing, preprocessing.transform(fold_rare_values(ada, DATA, DATA.columns))[0]

    (with_name, matrix), (without, same) = total("Jones"), total("Smith")
    assert with_name == without
    assert with_name.columns == (CategoryStats("ward", ("A", "Jones", "other"), (27, 10, 1), missing=0),)
    assert np.array_equal(matrix, same)
    assert not matrix[:, 1].any()


def test_gradients_of_a_guessed_name_are_zero() -> None:
    """Otherwise bob and cleo, whose gradients of it are their own, would see that ada has a record of that name."""
    settings = tabular_settings(replace(DATA, validation=0.0), Model("logistic"), steps=3)
    addends: list[Any] = []

    def member(peers: cgd.Peers, number: int) -> tuple[str, ...]:
        if number == 0:
            peers.observer = Addends(addends)
        own = wards(A=20, Jones=1, Kim=4) if number == 0 else wards(A=20, Jones=9)
        return train(peers, settings, own).preprocessing.features

    features, *_ = run_members(member, [0, 1, 2])
    assert features == ("ward=A", "ward=Jones", "ward=other")
    assert len(addends) == 3
    for each in addends:
        gradients = each[: 2 * len(features)].reshape(2, len(features))  # of two classes, before their biases
        assert gradients[:, 0].any()
        assert gradients[:, 2].any()
        assert not gradients[:, 1].any()


class Addends:
    """Store our gradients."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def before_sum(self, addend: Any) -> None:
        """Store an addend of a step."""
        if addend.weight is not None:
            self.found.append(np.array(addend.values, dtype=np.float64))

    def after_sum(self, addend: Any, total: Any) -> None:
        """Do nothing."""


# Before anything is sent


def test_notes_count_values_and_do_not_name_them() -> None:
    assert check_rare_values(wards(A=9), DATA, DATA.columns) == ()
    (note,) = check_rare_values(wards(A=9, Jones=2, Smith=1), DATA, DATA.columns)
    assert note == (
        "column 'ward': 2 values have fewer than 5 records (3 records in total); nobody else learns them: they count "
        "as 'other'"
    )


@pytest.mark.parametrize(("counts", "noted"), [({"A": 6, "B": 3, "C": 3}, False), ({"A": 6, "B": 4, "C": 3}, True)])
def test_column_of_which_most_of_our_values_are_rare_gives_a_remedy(counts: dict[str, int], noted: bool) -> None:
    """More than half of the values: the column says nothing about most of our records, whatever the others have."""
    (note,) = check_rare_values(wards(DATA, missing=40, **counts), DATA, DATA.columns)
    assert ("more than half of our values, so the column says nothing about most of our records" in note) == noted
    assert ("list its categories" in note) == noted
    assert "'B'" not in note


def test_participants_are_told_if_single_records_are_disclosed() -> None:
    """Another participant may have written the federation file."""
    data = replace(DATA, columns=(replace(WARD, rare=1),))
    assert check_rare_values(wards(A=9), data, data.columns) == (
        "column 'ward': rare is 1, so others learn every value that another participant has, or guesses",
    )


def test_rare_values_are_refused_if_they_may_not_become_other() -> None:
    data = replace(DATA, other=False)
    with pytest.raises(InputError) as error:
        check_rare_values(wards(A=9, Jones=2, Smith=1), data, data.columns)
    assert str(error.value).startswith(
        "column 'ward': 2 values have fewer than 5 of our records. Its categories are to"
    )
    assert "List the categories in [data.columns], leave the column out, or remove other = false" in str(error.value)
    assert "Jones" not in str(error.value)
    assert check_rare_values(wards(A=9, B=5), data, data.columns) == ()


def test_value_of_one_member_stops_all_if_it_may_not_become_other() -> None:
    data = replace(DATA, other=False)

    def attempt(peers: cgd.Peers, own: TabularDataset) -> str:
        with pytest.raises(InputError) as error:
            fit(own, data, data.columns, peers)
        return str(error.value)

    ada, bob, _ = run_members(attempt, [wards(A=9, B=9), wards(A=9), wards(A=9)])
    assert ada.startswith("only we have 'B' of 'ward'. What is learned from the tables must occur at two participants")
    assert bob.startswith("1 value occurs at one other participant only. ")
    (column,) = fitted([wards(data, A=9, B=9), wards(data, A=9), wards(data, A=5, B=8)], data).columns
    assert column == CategoryStats("ward", ("A", "B"), (23, 17), missing=0)


def test_fit_with_rare_values_that_may_not_become_other_sends_nothing() -> None:
    data = replace(DATA, other=False, classes=("yes", "no"))

    def attempt(peers: cgd.Peers, own: TabularDataset) -> str:
        with pytest.raises(cgd.CGDError) as error:
            fit(own, data, data.columns, peers)
        return f"{type(error.value).__name__}: {error.value}"

    ada, *others = run_members(attempt, [wards(A=9, Jones=1), wards(A=9), wards(A=9)])
    assert ada.startswith("InputError: column 'ward': 1 value has fewer than 5 of our records")
    assert all(each.startswith("PeerAbortedError") for each in others)


def test_target_that_looks_like_names_is_refused() -> None:
    """Classes are not folded, so the participants could test guesses of all these names."""
    names = [f"Patient {number}" for number in range(219)]
    data = Data("name", (Column("age", "number"),))

    def people(rows: int, classes: Sequence[str]) -> TabularDataset:
        frame = {"age": list(range(rows)), "name": [classes[number % len(classes)] for number in range(rows)]}
        return dataset_from_frame(frame, data, data.columns, target=True)[0]

    with pytest.raises(InputError, match="column 'name' has 21 different values, and 21 of them have fewer than 5"):
        check_rare_values(people(84, names[:21]), data, data.columns)
    for few in (people(84, names[:20]), people(105, names[:21]), people(6, names)):
        assert check_rare_values(few, data, data.columns) == ()
    listed = replace(data, classes=tuple(names[:21]))
    frame = {"age": [1] * 21, "name": names[:21]}
    assert check_rare_values(dataset_from_frame(frame, listed, listed.columns, target=True)[0], listed, ()) == ()


# Before the first step


def test_learned_classes_and_categories_are_listed() -> None:
    settings = tabular_settings(DATA)
    own = wards(A=9, B=5, Jones=1, C=6)
    preprocessing = fitted([own, wards(A=9, B=7), wards(A=9)])
    assert learned_messages(settings, preprocessing, own) == [
        "classes of 'outcome', learned: 'no' (22), 'yes' (24)",
        "categories of 'ward', learned: 'A' (27), 'B' (12), 'other' (7); 2 values of ours count as 'other' (7 records)",
    ]
    listed = replace(DATA, classes=("yes", "no"), columns=(replace(WARD, categories=("A",)),))
    assert learned_messages(tabular_settings(listed), fitted([wards(listed, A=9)] * 3, listed), own) == []


def test_column_that_is_mostly_other_here_is_noted_for_its_owner_alone() -> None:
    settings = tabular_settings(DATA)
    members = [wards(A=9, C=6, D=7), wards(A=9, B=7), wards(A=9, B=9)]
    preprocessing = fitted(members)
    (note,), *others = (other_notes(settings, preprocessing, each) for each in members)
    assert others == [(), ()]
    assert note == (
        "column 'ward': 13 of our 22 values count as 'other', so the column says nothing about most of our records: no "
        "other participant has enough records of these values. If others spell them differently, agree on one "
        "spelling, or state in `values` what each means; if not, list the categories, or leave the column out. Only "
        "you see this note"
    )


def test_similar_spelling_of_a_learned_category_is_named_where_most_values_are_other() -> None:
    members = [wards(i=9, iii=6, East=7), wards(I=9, III=7), wards(I=9, III=9)]
    (note,) = other_notes(tabular_settings(DATA), fitted(members), members[0])
    assert (
        "enough records of these values. Some are spelled like others: 'i' (did you mean 'I'?), 'iii' (did you mean "
        "'III'?). If others spell them differently, agree"
    ) in note


@pytest.mark.parametrize(
    "own",
    [
        wards(A=9, C=9),  # half of them
        wards(A=9, **{f"C{number}": 4 for number in range(9)}),  # rare, of which a note was printed before connecting
        wards(A=9, other=20),  # the table says so itself
        wards(missing=9),
    ],
)
def test_columns_without_a_note_about_other(own: TabularDataset) -> None:
    preprocessing = fitted([own, wards(A=9, B=9), wards(A=9, B=9)])
    assert other_notes(tabular_settings(DATA), preprocessing, own) == ()


@pytest.mark.slow
def test_column_that_is_other_everywhere_is_noted_before_the_first_step_and_in_the_report(tmp_path: Path) -> None:
    """Every participant has wards of its own, with enough records each."""
    path = write_federation(tmp_path, NAMES, steps=4, patience=0)
    federation = Federation.load(path)
    shown: dict[str, list[str]] = {name: [] for name in NAMES}
    for number, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(60, number, (f"North {name}", f"South {name}")))

    def member(name: str) -> None:
        run = TabularRun.prepare(federation, name, tmp_path / f"{name}.csv", tmp_path / "runs" / name, alone=False)
        with FederationMember(path, name, state=tmp_path / "state" / name, linger=10.0).peers as peers:
            run.run(peers, shown[name].append, shown[name].append)

    run_in_threads(member, NAMES)
    start = "column 'ward': all values count as 'other', because no two participants have a value of enough records"
    remedy = "list its categories, or leave the column out"
    for name in NAMES:
        (place,) = (place for place, each in enumerate(shown[name]) if each.startswith(start) and remedy in each)
        assert place < next(place for place, each in enumerate(shown[name]) if each.startswith("step "))
        report = (tmp_path / "runs" / name / "report.html").read_text()
        assert report.count("all values count as") == 1
        assert not any("most of our records" in each for each in shown[name])


def test_list_of_many_categories_is_shortened() -> None:
    many = wards(DATA, **{f"ward{number:02}": 5 + number for number in range(30)})
    message = learned_messages(tabular_settings(DATA), fitted([many] * 3), many)[1]
    assert message.startswith("categories of 'ward', learned: 'ward29' (102), 'ward28' (99)")
    assert message.endswith("'ward20' (75) and 20 more")


# A whole run


PEOPLE = [f"{first} {last}" for last in ("Quillfeather", "Zwetschke", "Oyelaran") for first in ("Ana", "Ben", "Chi")]
PEOPLE_SCHEMA = SCHEMA.replace('ward = "category"', 'ward = "category"\nname = "category"\nborn = "category"')


def people(number: int) -> dict[str, list[Any]]:
    """Return a table with names and dates of birth that no other table has; two wards are common, one is rare."""
    content = table(60, number, ("North", "South"))
    content["name"] = [f"{PEOPLE[row % 9]} {number}{row}" for row in range(60)]
    content["born"] = [f"19{40 + number}-{1 + row % 12:02}-{1 + row % 28:02}" for row in range(60)]
    content["ward"][:2] = [f"Hospice of {PEOPLE[number]}"] * 2
    return content


def secrets(number: int) -> list[str]:
    content = people(number)
    return sorted({*content["name"], *content["born"], *(each for each in content["ward"] if "Hospice" in each)})


def test_no_rare_value_is_in_a_file_of_another_participant(tmp_path: Path) -> None:
    """Following the schema of earlier versions: names, dates of birth and a rare ward are categories."""
    path = write_federation(tmp_path, NAMES, schema=PEOPLE_SCHEMA, steps=4, patience=0)
    federation = Federation.load(path)
    messages: dict[str, list[str]] = {name: [] for name in NAMES}
    for number, name in enumerate(NAMES):
        content = people(number)
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(used := ["age", "dose", "ward", "name", "born", "outcome"])
            lines.writerows(zip(*(content[each] for each in used), strict=True))

    def member(name: str) -> None:
        run = TabularRun.prepare(federation, name, tmp_path / f"{name}.csv", tmp_path / "runs" / name)
        with FederationMember(path, name, state=tmp_path / "state" / name, linger=10.0).peers as peers:
            run.run(peers, messages[name].append)

    run_in_threads(member, NAMES)
    for number, name in enumerate(NAMES):
        files = [*(tmp_path / "runs" / name).rglob("*"), *(tmp_path / "state" / name).rglob("*")]
        stored = b"".join(each.read_bytes() for each in files if each.is_file())
        assert b"North" in stored  # a common ward, in model.json, run.json and the report
        for other in {0, 1, 2} - {number}:
            assert not [secret for secret in secrets(other) if secret.encode() in stored]
        learned = [each for each in messages[name] if "learned" in each]
        assert learned[0].startswith("classes of 'outcome', learned: 'ill' (")
        assert learned[1].startswith("categories of 'ward', learned: 'North' (")
        assert (
            learned[2]
            == "categories of 'name', learned: 'other' (180); 60 values of ours count as 'other' (60 records)"
        )
        assert next(place for place, each in enumerate(messages[name]) if "step" in each) > 2


class Totals:
    """Store every total that a member sees."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []

    def before_sum(self, addend: Any) -> None:
        """Do nothing."""

    def after_sum(self, addend: Any, total: Any) -> None:
        """Store a total."""
        self.found.append((addend.context, total))


def test_no_rare_value_is_in_an_opened_sum() -> None:
    """Texts are in sums as multiples of three bytes, and claims are digests, so both are decoded and tested."""
    columns = (WARD, Column("name", "category"), Column("born", "category"))
    data, totals, salts = Data("outcome", columns), Totals(), []

    def member(peers: cgd.Peers, number: int) -> None:
        if number == 2:
            peers.observer = totals
            salts.append(salt(peers, data.names, "categories", 0))
        names = [*data.names, "outcome"]
        frame = {name: people(number)[name] for name in names}
        fit(dataset_from_frame(frame, data, columns, target=True)[0], data, columns, peers)

    run_members(member, [0, 1, 2])
    opened = dict(totals.found)
    cells = opened["categories: claims 0"]
    claims = Claims.opened(salts[0], CLAIM_TABLE.peel(cells, len(cells) // PARTS, "categories: claims 0") or (), 3)
    cells = opened["categories: table 0"]
    texts = TEXT_TABLE.peel(cells, len(cells) // PARTS, "categories: table 0")
    places = {name: place for place, name in enumerate(sorted(data.names))}
    assert texts is not None
    assert texts.keys() == {_key((places["ward"], each)) for each in ("North", "South")}
    assert claims.participants(_key((places["ward"], "North"))) == 3
    tested = [_key((place, secret)) for number in range(3) for secret in secrets(number) for place in places.values()]
    assert len(tested) > 300
    assert not any(map(claims.participants, tested))
