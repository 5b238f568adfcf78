"""Federations by columns: the same records in a row, a tower for each part of the columns, predictions together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data, Model
from cgd.tabular.alignment import align, kept_back_together, row_key
from cgd.tabular.loading import from_frame
from cgd.tabular.model import ConfinedModel
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train
from support.practice import TRAINING, in_columns, records, table, together

if TYPE_CHECKING:
    import cgd
    from cgd.tabular.dataset import TabularDataset

COLUMNS = (
    Column("age", "number", held_by=0),
    Column("dose", "number", held_by=1),
    Column("ward", "category", held_by=2),
)
DATA = Data("outcome", COLUMNS, id="id", validation=0.25)


def ids_only(ids: list[str]) -> TabularDataset:
    data = Data("y", (Column("x", "number"),), "regression", id="id")
    return from_frame({"x": list(range(len(ids))), "id": ids}, data, data.columns, ids=True)[0]


def test_a_row_gets_its_records_into_one_order_and_keeps_back_the_same() -> None:
    ids = [f"p{number}" for number in range(400)]
    shuffled = [list(np.random.default_rng(seed).permutation(ids)) for seed in (1, 2, 3)]

    def one(row: cgd.Peers, own: list[str]) -> tuple[Any, ...]:
        key = row_key(row)
        aligned = align(ids_only(own), row, key)
        assert [own[int(place)] for place in aligned.numbers["x"]] == list(aligned.ids or ())
        return key, aligned.ids, kept_back_together(aligned, 0.25, key).tolist()

    results = together(one, shuffled)
    assert results[0] == results[1] == results[2]
    # Of 400 with probability 1/4 each, by a key that is new every time: six deviations, once in 10⁸ runs.
    assert 48 <= sum(results[0][2]) <= 152


@pytest.mark.parametrize("others", [["p1", "p2", "p4"], ["p1", "p2"], ["p1", "p2", "p3", "p4"], ["p1p2", "p3", ""]])
def test_other_records_are_found_and_the_odd_one_is_named(others: list[str]) -> None:
    others = [each or "p" for each in others]

    def one(row: cgd.Peers, own: list[str]) -> str:
        with pytest.raises(InputError, match=r"other records than most of the row \(\d+ here\)") as error:
            align(ids_only(own), row, row_key(row))
        return str(error.value)

    told = together(one, [["p1", "p2", "p3"], others, ["p3", "p1", "p2"]])
    assert told[1].startswith("we have")
    assert told[0].startswith("member-1 has") or "has other" in told[0]
    for message in told:
        assert "p1" not in message  # nobody's IDs are shown


def test_nothing_that_a_stranger_could_compare_is_made_of_the_ids_alone() -> None:
    """The same IDs have another digest each time: without the row's key nobody can try out guesses."""
    seen: list[str] = []

    def one(row: cgd.Peers, own: list[str]) -> None:
        plain = row.sum

        def watched(values: Any, **options: Any) -> Any:
            seen.append(options.get("context", ""))
            return plain(values, **options)

        row.sum = watched  # type: ignore[method-assign]
        align(ids_only(own), row, row_key(row))

    for _ in range(2):
        together(one, [["p1", "p2"]] * 3)
    digests = {each for each in seen if each.startswith("records ")}
    assert len(digests) == 2
    assert {len(each.removeprefix("records ")) for each in digests} == {64}


def setting(column: int, data: Data = DATA, model: Model | None = None, **training: Any) -> TabularSettings:
    how = replace(TRAINING, **{"steps": 30, **training})
    return TabularSettings(data, model or Model("mlp", (6,)), how, column, 3)


def own_part(row: int, what: TabularSettings, rows: int = 60) -> TabularDataset:
    """A participant's own columns of its row's records, in an order of its own."""
    content = table(rows, row)
    if what.data.task == "regression":
        content["outcome"] = content["score"]
    order = np.random.default_rng(10 * row + what.column).permutation(rows)
    frame = {name: [values[place] for place in order] for name, values in content.items()}
    names = (*(each.name for each in what.own_columns), "outcome", "id")
    return from_frame({name: frame[name] for name in names}, what.data, what.own_columns, target=True, ids=True)[0]


@pytest.mark.parametrize("model", [Model("mlp", (6,)), Model("logistic")])
def test_towers_learn_together_and_predict_by_late_fusion(model: Model) -> None:
    test = {name: list(np.array(values, dtype=object)) for name, values in table(50, 9).items()}

    def one(peers: cgd.Peers, row: int, column: int) -> tuple[Any, ...]:
        what = setting(column, model=model)
        result = train(peers, what, own_part(row, what))
        mine = ConfinedModel.of(result, what, {})
        order = np.random.default_rng(column).permutation(50)
        names = (*(each.name for each in what.own_columns), "id")
        asked = mine.records({name: [test[name][place] for place in order] for name in names})
        said = mine.outputs(asked, peers.groups["row"])
        back = np.argsort(order)
        alone = mine._raw(mine.records({name: test[name] for name in names})).log_softmax(1)
        return result.best_step, result.validation.ids, said[back], alone, result.everyone_samples, result.samples

    results = in_columns(3, 3, one)
    assert len({each[0] for each in results.values()}) == 1
    for row in range(3):
        towers = [results[row, column] for column in range(3)]
        assert towers[0][1] == towers[1][1] == towers[2][1]  # the same records are kept back
        assert towers[0][4] == sum(results[other, 0][5] for other in range(3))
        fused = torch.stack([each[3] for each in towers]).sum(0).softmax(1).double().numpy()
        for each in towers:
            assert np.array_equal(each[2], towers[0][2])
            # Three addends, each rounded to the ring at bound 128, and single precision before.
            assert np.allclose(each[2], fused, rtol=0, atol=1e-4)
        right = np.array(test["outcome"]) == np.array(["ill", "well"])[towers[0][2].argmax(1)]
        assert right.mean() > 0.7


def test_numbers_are_predicted_by_the_mean_of_the_towers() -> None:
    data = replace(DATA, task="regression")
    test = table(20, 9)

    def one(peers: cgd.Peers, row: int, column: int) -> tuple[Any, Any]:
        what = setting(column, data, Model("linear"))
        mine = ConfinedModel.of(train(peers, what, own_part(row, what)), what, {})
        asked = mine.records({name: test[name] for name in (*(each.name for each in what.own_columns), "id")})
        return mine.predict(asked, peers.groups["row"]), mine.preparation.decode(mine._raw(asked)[:, 0].numpy())

    results = in_columns(3, 3, one)
    towers = [results[0, column] for column in range(3)]
    assert np.allclose(towers[0][0], np.mean([own for _, own in towers], axis=0), rtol=1e-5)


def test_a_tower_does_not_predict_alone() -> None:
    def one(peers: cgd.Peers, row: int, column: int) -> ConfinedModel:
        what = setting(column, steps=2)
        return ConfinedModel.of(train(peers, what, own_part(row, what)), what, {})

    model = in_columns(3, 3, one)[0, 1]
    with pytest.raises(InputError, match="the 3 members of its row predict together"):
        model.predict({"dose": [1.0], "id": ["x"]})
    with pytest.raises(InputError, match="has no column 'id'"):
        model.predict({"dose": [1.0]})


def test_records_without_ids_are_refused() -> None:
    def one(row: cgd.Peers, content: dict[str, list[Any]]) -> None:
        with pytest.raises(InputError, match="the records have no IDs"):
            align(records(content), row, b"k" * 32)

    together(one, [table(5, seed) for seed in (1, 2, 3)])
