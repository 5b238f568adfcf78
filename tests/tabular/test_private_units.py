"""A guarantee for persons with several records: all records of a unit together count as one record."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.dp.budget_file import BudgetFile
from cgd.errors import InputError
from cgd.federation.model_section import Model
from cgd.optim.record_gradients import RecordGradients
from cgd.tabular.dataset import TabularDataset, dataset_from_frame, read_dataset
from cgd.tabular.models import build
from cgd.tabular.private_stats import _own_sums, sensitivity
from cgd.tabular.private_training import private_validation_split
from cgd.tabular.training import train
from support.private_tables import COLUMNS, PRIVATE_DATA, PRIVATE_REGRESSION, private_settings
from support.tabular import run_members, table

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.federation.data_schema import Data

SEED = bytes(range(32))


def visits(people: int, each: int, seed: int, data: Data = PRIVATE_DATA) -> TabularDataset:
    """Return the records of people with several visits, in a random order."""
    content: dict[str, Any] = table(people * each, seed)
    names = [f"patient {place % people} of {seed}" for place in range(people * each)]
    content["patient"] = np.random.default_rng(seed).permutation(names).tolist()
    return dataset_from_frame(content, data, data.columns, target=True, unit="patient")[0]


def per_person(own: Any, **training: Any) -> Any:
    given = private_settings(own, **training)
    assert given.privacy is not None
    return replace(given, privacy=replace(given.privacy, unit="patient"))


def test_person_whose_name_is_written_differently_is_one_unit() -> None:
    """Two persons that are taken for one are protected, too; one person that is taken for two is not."""
    names = ["Patient  7", " patient 7 ", "PATIENT\u00a07", "7.0", "7", "patient 8"]
    content = {**table(len(names), 1), "patient": names}
    records = dataset_from_frame(content, PRIVATE_DATA, COLUMNS, target=True, unit="patient")[0]
    assert records.unit_weights() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1])


def test_every_unit_has_the_weight_one() -> None:
    records = visits(people=30, each=4, seed=1).take(range(100))
    assert records.units is not None
    weights = records.unit_weights()
    for name in set(records.units):
        own = [weight for weight, each in zip(weights, records.units, strict=True) if each == name]
        assert sum(own) == pytest.approx(1.0)
    assert np.array_equal(replace(records, units=None).unit_weights(), np.ones(100))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([PRIVATE_DATA, PRIVATE_REGRESSION]))
def test_statistics_of_one_person_are_never_longer_than_the_sensitivity(visits: int, seed: int, data: Data) -> None:
    random = np.random.default_rng(seed)
    extremes = random.choice([-1e9, 1e9, math.nan], size=(2, visits))
    content = {
        "age": [None if math.isnan(each) else each for each in extremes[0]],
        "dose": [None if math.isnan(each) else each for each in extremes[1]],
        "ward": random.choice(["A", "B"], visits).tolist(),
        "outcome": random.choice([-6, 6] if data.task == "regression" else ["well", "ill"], visits).tolist(),
        "patient": ["one"] * visits,
    }
    person = dataset_from_frame(content, data, COLUMNS, target=True, unit="patient")[0]
    assert np.linalg.norm(list(_own_sums(person, data, COLUMNS))) <= sensitivity(data, COLUMNS)


@pytest.mark.parametrize("layers", [(), (16,)])
def test_gradient_of_one_person_is_never_longer_than_the_clip_norm(layers: tuple[int, ...]) -> None:
    """All records of a person are equal and large, in many blocks between those of others: the longest sum there is."""
    torch.manual_seed(1)
    network = build(Model("mlp", layers) if layers else Model("logistic"), 5, 2)
    x, y = torch.randn(640, 5), torch.randint(2, (640,))
    own = torch.arange(640) % 64 == 3
    x[own] = 100.0
    y[own] = network(x[own]).argmin(dim=1)  # the wrong class: the gradient of the right one is nearly zero

    def gradient(with_person: bool) -> torch.Tensor:
        clipping = RecordGradients(network, clip=1.0, reduction="sum")
        used = ~own | with_person
        clipping.weigh_records(torch.where(own, 0.1, 0.5).double())
        (torch.nn.functional.cross_entropy(network(x), y, reduction="none") * used).sum().backward()
        taken = clipping.take().gradient
        clipping.remove()
        network.zero_grad()
        return taken

    assert 0.99 < (gradient(True) - gradient(False)).norm().item() <= 1.0


def test_weights_of_records_are_checked() -> None:
    clipping = RecordGradients(network := torch.nn.Linear(2, 1), clip=1.0)
    for wrong in (torch.tensor([1.5, 0.5]), torch.tensor([-0.1, 0.5]), torch.tensor([math.nan, 0.5]), torch.ones(2, 1)):
        with pytest.raises(InputError, match="one dimension of numbers from 0 to 1"):
            clipping.weigh_records(wrong)
    clipping.weigh_records(torch.ones(3))
    with pytest.raises(InputError, match="3 weights were given for a batch of 2 records"):
        network(torch.ones(2, 2))


def test_all_records_of_a_person_are_on_one_side_of_the_split() -> None:
    records = visits(people=300, each=3, seed=1)
    mask = private_validation_split(records, 0.3, SEED)
    assert records.units is not None
    sides = {(name, bool(side)) for name, side in zip(records.units, mask, strict=True)}
    assert len(sides) == 300
    assert abs(sum(side for _, side in sides) - 90) < 6 * math.sqrt(300 * 0.3 * 0.7)
    others = np.array([each != records.units[0] for each in records.units])
    assert np.array_equal(private_validation_split(records.take(others), 0.3, SEED), mask[others])


def test_training_counts_persons() -> None:
    own = per_person(PRIVATE_DATA, steps=30)
    tables = [visits(people=300, each=5, seed=place) for place in range(3)]
    results = run_members(lambda peers, records: train(peers, own, records), tables)
    noise = 8 * math.sqrt(1.5) / own.privacy_settings().count_mu
    for result in results:
        assert abs(result.everyone_samples - 720) < noise + 6 * math.sqrt(900 * 0.2 * 0.8)
        assert result.samples + result.validation.rows == 1500
        loss = result.evaluations[-1].everyone_validation_loss
        assert loss is not None
        assert loss < 0.68  # it has learned: without, 0.69


def test_missing_person_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("age,dose,ward,outcome,patient\n40,1,A,well,1\n50,2,B,ill,\n")
    with pytest.raises(InputError, match=r"line 3: the unit in column 'patient' is missing; every record needs one"):
        read_dataset(file, PRIVATE_DATA, COLUMNS, unit="patient")
    with pytest.raises(InputError, match="has no column 'person'"):
        read_dataset(file, PRIVATE_DATA, COLUMNS, unit="person")
    with pytest.raises(InputError, match="the label is 'patient', which is the unit"):
        read_dataset(file, PRIVATE_DATA, COLUMNS, label="patient", unit="patient")


def test_budget_of_single_records_is_not_one_of_persons(tmp_path: Path) -> None:
    file = tmp_path / "records.budget"
    BudgetFile(file, 2.0, 1e-5).raise_limit(3.0)
    with pytest.raises(InputError, match=r"are for single records, and those of this training for all records of one"):
        BudgetFile(file, 2.0, 1e-5, "patient")
    assert BudgetFile(file, 2.0, 1e-5, None).unit == ""
    persons = tmp_path / "persons.budget"
    BudgetFile(persons, 2.0, 1e-5, "patient").raise_limit(3.0)
    assert BudgetFile(persons, 2.0, 1e-5, None).unit == "patient"
