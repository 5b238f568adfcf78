"""Vertical partitioning: alignment of a row's records, a tower for each grid column, joint predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.tabular.alignment import align, row_key, shared_validation_split
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.model import ConfinedModel
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train
from support.tabular import TRAINING, records, run_grid, run_members, table

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
    return dataset_from_frame({"x": list(range(len(ids))), "id": ids}, data, data.columns, ids=True)[0]


def test_row_has_the_same_order_and_validation_split() -> None:
    ids = [f"p{number}" for number in range(400)]
    shuffled = [list(np.random.default_rng(seed).permutation(ids)) for seed in (1, 2, 3)]

    def member(row: cgd.Peers, own: list[str]) -> tuple[Any, ...]:
        key = row_key(row)
        aligned = align(ids_only(own), row, key)
        assert [own[int(place)] for place in aligned.numbers["x"]] == list(aligned.ids or ())
        return key, aligned.ids, shared_validation_split(aligned, 0.25, key).tolist()

    results = run_members(member, shuffled)
    assert results[0] == results[1] == results[2]
    # 400 draws with probability 1/4 and a fresh key: within six standard deviations, except once in 10⁸ runs.
    assert 48 <= sum(results[0][2]) <= 152


@pytest.mark.parametrize("others", [["p1", "p2", "p4"], ["p1", "p2"], ["p1", "p2", "p3", "p4"], ["p1p2", "p3", ""]])
def test_member_with_other_records_is_named(others: list[str]) -> None:
    others = [each or "p" for each in others]

    def member(row: cgd.Peers, own: list[str]) -> str:
        with pytest.raises(InputError, match=r"other records than most of the row \(\d+ here\)") as error:
            align(ids_only(own), row, row_key(row))
        return str(error.value)

    messages = run_members(member, [["p1", "p2", "p3"], others, ["p3", "p1", "p2"]])
    assert messages[1].startswith("we have")
    assert messages[0].startswith("member-1 has") or "has other" in messages[0]
    for message in messages:
        assert "p1" not in message  # no ID is shown


def test_sent_digest_of_ids_depends_on_the_row_key() -> None:
    """The digest of the same IDs differs each time, so guesses cannot be tested without the row's key."""
    contexts: list[str] = []

    def member(row: cgd.Peers, own: list[str]) -> None:
        original_sum = row.sum

        def recorded_sum(values: Any, **options: Any) -> Any:
            contexts.append(options.get("context", ""))
            return original_sum(values, **options)

        row.sum = recorded_sum  # type: ignore[method-assign]
        align(ids_only(own), row, row_key(row))

    for _ in range(2):
        run_members(member, [["p1", "p2"]] * 3)
    digests = {each for each in contexts if each.startswith("records ")}
    assert len(digests) == 2
    assert {len(each.removeprefix("records ")) for each in digests} == {64}


def vertical_settings(column: int, data: Data = DATA, model: Model | None = None, **training: Any) -> TabularSettings:
    training_settings = replace(TRAINING, **{"steps": 30, **training})
    return TabularSettings(data, model or Model("mlp", (6,)), training_settings, column, 3)


def own_part(row: int, config: TabularSettings, rows: int = 60) -> TabularDataset:
    """Return a participant's own columns of its row's records, in a random order."""
    content = table(rows, row)
    if config.data.task == "regression":
        content["outcome"] = content["score"]
    order = np.random.default_rng(10 * row + config.column).permutation(rows)
    frame = {name: [values[place] for place in order] for name, values in content.items()}
    names = (*(each.name for each in config.own_columns), "outcome", "id")
    return dataset_from_frame(
        {name: frame[name] for name in names}, config.data, config.own_columns, target=True, ids=True
    )[0]


@pytest.mark.parametrize("model", [Model("mlp", (6,)), Model("logistic")])
def test_towers_train_together_and_predict_by_late_fusion(model: Model) -> None:
    test = {name: list(np.array(values, dtype=object)) for name, values in table(50, 9).items()}

    def member(peers: cgd.Peers, row: int, column: int) -> tuple[Any, ...]:
        config = vertical_settings(column, model=model)
        result = train(peers, config, own_part(row, config))
        model_ = ConfinedModel.from_training(result, config, {})
        order = np.random.default_rng(column).permutation(50)
        names = (*(each.name for each in config.own_columns), "id")
        inputs = model_.records({name: [test[name][place] for place in order] for name in names})
        outputs = model_.outputs(inputs, peers.groups["row"])
        back = np.argsort(order)
        alone = model_._raw_outputs(model_.records({name: test[name] for name in names})).log_softmax(1)
        return result.best_step, result.validation.ids, outputs[back], alone, result.everyone_samples, result.samples

    results = run_grid(3, 3, member)
    assert len({each[0] for each in results.values()}) == 1
    for row in range(3):
        towers = [results[row, column] for column in range(3)]
        assert towers[0][1] == towers[1][1] == towers[2][1]  # the same validation split
        assert towers[0][4] == sum(results[other, 0][5] for other in range(3))
        fused = torch.stack([each[3] for each in towers]).sum(0).softmax(1).double().numpy()
        for each in towers:
            assert np.array_equal(each[2], towers[0][2])
            # Three addends, each rounded to the ring at bound 128, and single precision before.
            assert np.allclose(each[2], fused, rtol=0, atol=1e-4)
        right = np.array(test["outcome"]) == np.array(["ill", "well"])[towers[0][2].argmax(1)]
        assert right.mean() > 0.7


def test_regression_predicts_the_mean_of_the_towers() -> None:
    data = replace(DATA, task="regression")
    test = table(20, 9)

    def member(peers: cgd.Peers, row: int, column: int) -> tuple[Any, Any]:
        config = vertical_settings(column, data, Model("linear"))
        model_ = ConfinedModel.from_training(train(peers, config, own_part(row, config)), config, {})
        inputs = model_.records({name: test[name] for name in (*(each.name for each in config.own_columns), "id")})
        return model_.predict(inputs, peers.groups["row"]), model_.preprocessing.decode(
            model_._raw_outputs(inputs)[:, 0].numpy()
        )

    results = run_grid(3, 3, member)
    towers = [results[0, column] for column in range(3)]
    assert np.allclose(towers[0][0], np.mean([own for _, own in towers], axis=0), rtol=1e-5)


def test_tower_refuses_to_predict_without_its_row() -> None:
    def member(peers: cgd.Peers, row: int, column: int) -> ConfinedModel:
        config = vertical_settings(column, steps=2)
        return ConfinedModel.from_training(train(peers, config, own_part(row, config)), config, {})

    model = run_grid(3, 3, member)[0, 1]
    with pytest.raises(InputError, match="the 3 members of its row must predict together"):
        model.predict({"dose": [1.0], "id": ["x"]})
    with pytest.raises(InputError, match="has no column 'id'"):
        model.predict({"dose": [1.0]})


def test_vertical_records_without_ids_are_refused() -> None:
    def member(row: cgd.Peers, content: dict[str, list[Any]]) -> None:
        with pytest.raises(InputError, match="the records have no IDs"):
            align(records(content), row, b"k" * 32)

    run_members(member, [table(5, seed) for seed in (1, 2, 3)])
