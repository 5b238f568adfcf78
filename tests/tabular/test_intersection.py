"""Columns whose records are not aligned: the records that all members of a row have, over its secure sums."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.errors import CGDError, InputError, ProtocolError
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.psi.protocol import SetMember
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.disclosure import disclosed_sums
from cgd.tabular.intersection import FoundIntersection, check_intersection, intersect, read_salt
from cgd.tabular.model import ConfinedModel
from cgd.tabular.predict import Predictions, load_inputs, predict
from cgd.tabular.rare_values import check_rare_values
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import TrainingResult, _check_common, train
from support.intersections import COMMON, DATA, SETS, SETTINGS, person, records_of
from support.tabular import TRAINING, run_grid, run_members, table, write_csv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.tabular.dataset import TabularDataset


def run_row(sets: Sequence[Sequence[int]], data: Data = DATA, salts: Sequence[bytes] = (b"", b"", b"")) -> list[Any]:
    def member(row: cgd.Peers, numbers: Sequence[int], salt: bytes) -> FoundIntersection | Exception:
        try:
            return intersect(records_of(numbers, data), row, data, salt)
        except (InputError, ProtocolError) as error:
            return error

    return run_members(member, sets, salts)


def test_every_member_finds_its_records_that_all_have() -> None:
    results = run_row(SETS)
    for numbers, found in zip(SETS, results, strict=True):
        assert set(found.records.numbers["x"]) == COMMON
        assert found.records.numbers["x"].tolist() == [each for each in numbers if each in COMMON]
        assert found.sizes == {"participant-1": 120, "participant-2": 170, "participant-3": 140}
        assert found.describe().startswith("20 records are in all files of our row, which entered participant-1 120, ")


def test_salt_must_be_the_same() -> None:
    salted = replace(DATA, intersection=replace(SETTINGS, salt=True))
    right, wrong = b"a secret of the row", b"another secret of a row"
    results = run_row(SETS, salted, (right, wrong, right))
    assert [str(each).partition(",")[0] for each in results] == [
        "participant-2 has another salt than most of the row: compare the files that you name with --salt",
        "we have another salt than most of the row: compare the files that you name with --salt",
        "participant-2 has another salt than most of the row: compare the files that you name with --salt",
    ]


@pytest.mark.parametrize(("common", "text"), [(0, "nobody is"), (1, "1 person is"), (4, "4 people are")])
def test_too_few_in_common(common: int, text: str) -> None:
    sets = [[*range(common), *range(100 * place, 100 * place + 30)] for place in (1, 2, 3)]
    for error in run_row(sets):
        assert isinstance(error, InputError)
        assert str(error).startswith(f"{text} in all files of our row, and minimum in [data.intersection] is 5")


def test_member_that_announces_too_many_is_refused_before_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own check of a member is not what protects the others: a dishonest one has none."""
    monkeypatch.setattr("cgd.tabular.intersection.check_ids", lambda *_: None)
    sets = [[*range(30)], [*range(2001)], [*range(30)]]
    for error in run_row(sets):
        assert str(error).startswith(
            "participant-2 has announced 2,001 IDs, and maximum in [data.intersection] is 2,000"
        )


def test_member_that_announces_too_few_is_refused_before_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of one guess would test one person by the size alone."""
    monkeypatch.setattr("cgd.tabular.intersection.check_ids", lambda *_: None)
    for error in run_row([[*range(30)], [7], [*range(30)]]):
        assert "participant-2 1, participant-3 30; minimum in [data.intersection] is 5. No ID was sent" in str(error)


def test_points_that_are_not_points_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SetMember.contribution

    def contribution(self: SetMember) -> bytes:
        own = honest(self)
        return bytes([2]) * len(own) if self.me == 2 and self.kind == "points" and self.state.step == 1 else own

    monkeypatch.setattr(SetMember, "contribution", contribution)
    results = run_row(SETS)
    assert all(isinstance(each, ProtocolError) for each in results)
    assert any("entered values that are not points" in str(each) for each in results)


def test_value_at_the_place_of_another_member_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cgd.Peers.sum

    def sum_with_more(self: cgd.Peers, values: Any, **options: Any) -> Any:
        if self.me == "participant-3" and options.get("context", "").startswith("intersection: points"):
            values = values + 1
        return original(self, values, **options)

    monkeypatch.setattr(cgd.Peers, "sum", sum_with_more)
    results = run_row(SETS)
    assert all(isinstance(each, ProtocolError) for each in results[:2])


def test_no_id_is_in_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bytes] = []
    original = cgd.Peers.sum

    def recorded_sum(self: cgd.Peers, values: Any, **options: Any) -> Any:
        entered.append(values.tobytes() + options["context"].encode())
        return original(self, values, **options)

    monkeypatch.setattr(cgd.Peers, "sum", recorded_sum)
    run_row(SETS)
    assert len(entered) == 3 * 7  # announce, three times points, table, shuffles, positions
    assert not any(person(number).encode() in each for each in entered for number in range(400))


def test_another_run_of_the_same_sets_has_other_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seeds, as after each prediction: nothing of two runs can be compared."""
    lists: list[tuple[bytes, ...]] = []
    original = SetMember.receive

    def receive(self: SetMember, parts: Sequence[bytes], own: bytes) -> None:
        if self.kind == "points" and self.me == 0:
            lists.append(tuple(parts))
        original(self, parts, own)

    monkeypatch.setattr(SetMember, "receive", receive)
    run_row(SETS)
    run_row(SETS)
    points = [{part[start : start + 32] for start in range(0, len(part), 32)} for each in lists for part in each]
    assert len(lists) == 6
    assert len(set().union(*points)) == sum(map(len, points))


def test_missing_library_is_reported_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgd.extras.find_spec", lambda module: None if module == "nacl" else object())
    with pytest.raises(cgd.MissingExtraError, match=r"needs nacl, which is not installed; pip install 'cgd\[psi\]'"):
        check_intersection(records_of(SETS[0]), DATA)
    check_intersection(records_of(SETS[0]), replace(DATA, intersection=None))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", "has 5 characters, and 16 random ones are the least"),
        (None, r"cannot be read \(No such file"),
    ],
)
def test_salt_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "row.salt"
    if content is not None:
        path.write_bytes(content)
    salted = replace(SETTINGS, salt=True)
    with pytest.raises(InputError, match=message):
        read_salt(path, salted)
    path.write_bytes(b"  sixteen letters or more \n")
    assert read_salt(path, salted) == b"sixteen letters or more"
    with pytest.raises(InputError, match="name the file with the secret of your row"):
        read_salt(None, salted)
    for without in (SETTINGS, None):
        assert read_salt(None, without) == b""
        with pytest.raises(InputError, match="omit it"):
            read_salt(path, without)


def test_progress_of_many_ids_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgd.tabular.intersection.MIN_SHOWN_POINTS", 100)
    monkeypatch.setattr("cgd.tabular.intersection.CHUNK_POINTS", 20)
    shown: list[str] = []

    def member(row: cgd.Peers, numbers: Sequence[int]) -> None:
        intersect(records_of(numbers), row, DATA, b"", shown.append if row.me == "participant-1" else lambda _: None)

    run_members(member, SETS)
    assert shown[0].startswith(
        "intersection: the members of a row find out which records all of them have (accepted: each learns who is in "
        "all files of its row); with fewer than 5 they stop, and nobody enters more than 2,000 IDs; we enter 120"
    )
    assert "intersection: points, step 3 of 7, 50 % of 140 IDs" in shown
    assert shown[-1].startswith("intersection: 20 records are in all files of our row")


def test_normalized_ids_meet() -> None:
    data = replace(DATA, intersection=replace(SETTINGS, normalize=("case", "zeros", "spaces"), salt=True))
    spellings = [lambda text: text, lambda text: f"00{text.upper()}", lambda text: f"{text[:3]} {text[3:]}"]

    def member(row: cgd.Peers, spell: Any) -> tuple[str, ...]:
        ids = [spell(hashlib.sha256(bytes([number])).hexdigest()[:20].lstrip("0")) for number in range(40)]
        frame = {"x": [*range(40)], "id": ids}
        records = dataset_from_frame(frame, data, data.columns, ids=True)[0]
        found = intersect(records, row, data, b"a secret of the row")
        return found.records.ids or ()

    results = run_members(member, spellings)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 40


# Training and predicting.

COLUMNS = (
    Column("age", "number", held_by=0),
    Column("dose", "number", held_by=1),
    Column("ward", "category", held_by=2),
)
TOWNS = Data("outcome", COLUMNS, id="id", validation=0.25, intersection=SETTINGS)


def own_part(row: int, config: TabularSettings) -> TabularDataset:
    """Return a participant's own columns of some people of its town: 60 that all three have, and 15 others."""
    content = table(200, row)
    others = range(60 + 15 * config.column, 75 + 15 * config.column)
    chosen = np.random.default_rng(10 * row + config.column).permutation([*range(60), *others])
    names = (*(each.name for each in config.own_columns), "outcome")
    frame = {name: [content[name][place] for place in chosen] for name in names}
    frame["id"] = [person(1000 * row + place) for place in chosen]
    return dataset_from_frame(frame, config.data, config.own_columns, target=True, ids=True)[0]


@pytest.mark.slow
def test_row_trains_on_the_records_that_all_have() -> None:
    def member(peers: cgd.Peers, row: int, column: int) -> tuple[TrainingResult, list[str]]:
        config = TabularSettings(TOWNS, Model("mlp", (6,)), replace(TRAINING, steps=5), column, 3)
        shown: list[str] = []
        return train(peers, config, own_part(row, config), show_message=shown.append), shown

    results = run_grid(3, 3, member)
    for (row, column), (trained, shown) in results.items():
        expected = {person(1000 * row + place) for place in range(60)}
        assert set(trained.records.ids or ()) == expected
        assert trained.records.ids == results[row, 0][0].records.ids  # in the same order
        assert np.array_equal(trained.held_out, results[row, 0][0].held_out)
        names = [f"r{row}c{each}" for each in range(3)]
        note = f"60 records are in all files of our row, which entered {', '.join(f'{each} 75' for each in names)} IDs"
        assert note in trained.notes
        assert shown[-1] == f"intersection: {note}"
        assert trained.intersection is not None
        assert trained.intersection.as_stored() == {"entered": dict.fromkeys(names, 75), "common": 60}
        config = TabularSettings(TOWNS, Model("mlp", (6,)), TRAINING, column, 3)
        listed = [each for each in disclosed_sums(config, trained) if each.to == "the row"]
        assert (listed[0].what, listed[0].numbers) == ("how many IDs each member of the row has entered", 3)
        assert listed[1].what.startswith("how many of these all members of the row have, and to each which of its own")
        assert listed[1].numbers == 60


def test_value_that_is_rare_among_the_common_records_stops_the_row() -> None:
    """P25 is about the records that are trained on: the intersection can make a value rare."""
    data = replace(TOWNS, other=False)
    settings = TabularSettings(data, Model("mlp", (6,)), TRAINING, 2, 3)

    def member(row: cgd.Peers, numbers: Sequence[int]) -> str:
        wards = ["A" if 18 <= number < 35 else "B" for number in numbers]
        frame = {"ward": wards, "id": [*map(person, numbers)]}
        records = dataset_from_frame(frame, data, settings.own_columns, ids=True)[0]
        check_rare_values(records, data, settings.own_columns)
        with pytest.raises(CGDError) as error:
            _check_common(row, settings, intersect(records, row, data, b""))
            row.sum(np.ones(1))
        return str(error.value)

    common = range(15, 35)  # of B, 13 records at each member, and 3 in common
    errors = run_members(member, [[*common, *range(100 * place, 100 * place + 10)] for place in (1, 2, 3)])
    assert all("column 'ward': 1 value has fewer than 5 of our records" in each for each in errors)


@pytest.mark.slow
def test_predictions_are_about_the_records_that_all_have(tmp_path: Path) -> None:
    def member(peers: cgd.Peers, row: int, column: int) -> ConfinedModel:
        config = TabularSettings(TOWNS, Model("mlp", (6,)), replace(TRAINING, steps=5), column, 3)
        return ConfinedModel.from_training(train(peers, config, own_part(row, config)), config, {})

    models = run_grid(3, 3, member)
    content = table(40, 9) | {"id": [person(place) for place in range(40)]}
    spans = [range(30), range(10, 40), [*range(5, 25), *range(28, 33)]]
    common = [*range(10, 25), 28, 29]

    def predict_with_row(row: cgd.Peers, column: int) -> Predictions:
        model = models[0, column]
        path = tmp_path / f"{column}.csv"
        places = list(reversed(spans[column]))
        chosen = {name: [values[place] for place in places] for name, values in content.items()}
        write_csv(path, chosen, (COLUMNS[column].name, "outcome", "id"))
        shown: list[str] = []
        found = predict(model, load_inputs(model, path), row, show_message=shown.append)
        assert shown[-1].startswith("intersection: 17 records are in all files of our row")
        return found

    predictions = run_members(predict_with_row, range(3))
    for column, found in enumerate(predictions):
        assert found.ids == tuple(person(place) for place in reversed(spans[column]) if place in common)
        outputs = dict(zip(found.ids, found.outputs.tolist(), strict=True))
        assert outputs == dict(zip(predictions[0].ids or (), predictions[0].outputs.tolist(), strict=True))
        assert found.scores is not None
        assert found.scores == predictions[0].scores
        assert found.scores["records"] == 17

    def predict_same_records(row: cgd.Peers, column: int) -> Predictions:
        model = models[0, column]
        return predict(model, load_inputs(model, tmp_path / f"{column}.csv"), row, same_records=True)

    with pytest.raises(InputError, match="other records than most of the row"):
        run_members(predict_same_records, range(3))
