"""A training on one's own table: the parts of the participants, the encoding, and what of it is shown to the owner."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.audit.attacks import records
from cgd.audit.own_table import OwnTable, TableRequest, divide, simulated_training
from cgd.audit.scenario import LocalSteps
from cgd.audit.trace_replay import replay
from cgd.audit.view import sample_gradients
from cgd.errors import InputError
from cgd.optim.displacement import AdamRule
from cgd.tabular.training_loop import LOCAL_MOMENTUM
from support.own_tables import NUMBERS, PRIVACY, write_federation, write_table

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.own_table import SimulatedTraining


def training(folder: Path, *, rounds: int = 4, honest: int = 3, seed: int = 0, rows: int = 60, **options: Any) -> Any:
    simulated_training.cache_clear()  # the files change
    request = TableRequest(write_table(folder, rows), write_federation(folder, **options), None, None, rounds, honest)
    return simulated_training(request, seed)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_record_with_a_label_is_in_one_part(tmp_path: Path) -> None:
    own = OwnTable.read(write_table(tmp_path), write_federation(tmp_path), None, None)
    parts = divide(own, 3, seed=0)
    assert list(parts.members) == ["honest-1", "honest-2", "honest-3", "colluder-1"]
    sizes = [each.rows for each in (*parts.members.values(), parts.fresh)]
    assert sizes == [12, 12, 11, 11, 12]  # a fifth is fresh
    places = np.concatenate([each.places for each in (*parts.members.values(), parts.fresh) if each.places is not None])
    assert sorted(places) == [row for row in range(60) if row not in (3, 4)]
    fresh = [np.array(divide(own, 3, seed).fresh.places).tolist() for seed in (0, 0, 1)]
    assert fresh[0] == fresh[1] != fresh[2]


BATCHES = 'steps = 8\nlr = 0.5\noptimizer = "sgd"\nbatches = 4'
LOCAL = 'steps = 8\nlr = 1.0\noptimizer = "sgd"\nbatches = 3\nlocal_epochs = 2\nlocal_lr = 0.01'


def test_batches_and_local_steps_are_those_of_the_federation_file(tmp_path: Path) -> None:
    found: SimulatedTraining = training(tmp_path, training=BATCHES, data="rare = 1")
    view, truth = found.observe(found.scenario, "cgd")
    draws = found.scenario.draws
    assert draws is not None
    for number, each in enumerate(view.rounds):
        expected = torch.zeros_like(each.gradient_sum)
        for name in view.honest:
            (batch,) = draws(name, number, len(truth.y[name]))
            assert len(batch) <= 3  # of eleven or twelve records
            weights = truth.models[name] - view.final_displacement + each.displacement
            gradients = sample_gradients(view, weights, truth.x[name][batch], truth.y[name][batch])
            expected += gradients.mean(0) * len(truth.y[name]) / view.samples
        assert torch.allclose(view.honest_sum(number), expected, atol=1e-5)
    epoch = [draws("honest-1", number, 12)[0] for number in range(4)]
    assert sorted(torch.cat(epoch).tolist()) == list(range(12))
    merged: SimulatedTraining = training(tmp_path, training=BATCHES)  # as in join, in batches of three records
    assert not merged.observe(merged.scenario, "cgd")[0].honest_sum(0)[:8].any()
    local: SimulatedTraining = training(tmp_path, training=LOCAL)
    assert local.scenario.local == LocalSteps(0.01, LOCAL_MOMENTUM)
    assert local.scenario.draws is not None
    assert [len(each) for each in local.scenario.draws("honest-1", 0, 12)] == [4] * 6
    whole: SimulatedTraining = training(tmp_path)
    update, gradient = (each.observe(each.scenario, "cgd")[0].honest_sum(0) for each in (local, whole))
    assert torch.cosine_similarity(update, gradient, dim=0) > 0.9  # an update of small steps is about a gradient


def test_records_of_a_person_stay_together(tmp_path: Path) -> None:
    persons = [f"p{row // 3}" for row in range(60)]
    path = write_table(tmp_path, patient=persons)
    own = OwnTable.read(path, write_federation(tmp_path, more=f'{PRIVACY}unit = "patient"\n'), None, None)
    parts = divide(own, 3, seed=0)
    holders: dict[str, set[str]] = {}
    for name, part in (*parts.members.items(), ("fresh", parts.fresh)):
        for person in part.units or ():
            holders.setdefault(person, set()).add(name)
    assert len(holders) == 20
    assert all(len(each) == 1 for each in holders.values())


def test_places_and_values_are_those_of_the_file(tmp_path: Path) -> None:
    found: SimulatedTraining = training(tmp_path, data="rare = 1")
    file = rows_of(tmp_path / "my.csv")
    _, truth = found.observe(found.scenario, "cgd")
    assert len(truth.all_places) == len(truth.all_y) == 35
    for place, x in zip(truth.all_places, truth.all_x, strict=True):
        line = file[int(place.removeprefix("line ")) - 2]
        *numbers, ward = found.table.decode(x)
        assert [float(each) for each in numbers] == pytest.approx([float(line[name]) for name in NUMBERS])
        assert ward == line["ward"]


def test_records_that_share_a_feature_with_few_others_are_merged_as_in_a_training(tmp_path: Path) -> None:
    """Of eleven or twelve records of a participant, two wards cannot both have fewer than five."""
    for rare in (1, 5):
        found: SimulatedTraining = training(tmp_path, rows=60, seed=3, data=f"rare = {rare}")
        names = found.table.preprocessing.features
        wards = [name for name in names if name.startswith("ward")]
        counts = [int(x[:, names.index(ward)].sum()) for x, _ in found.scenario.data.values() for ward in wards]
        assert any(0 < count < 5 for count in counts) == (rare == 1)
        assert sum(counts) == 46


def test_displacement_moves_by_the_rule_of_the_federation_file(tmp_path: Path) -> None:
    options = 'steps = 8\nlr = 0.02\noptimizer = "adam"\nmu = 0.1'
    found = training(tmp_path, rounds=6, training=options)
    view, _ = found.observe(found.scenario, "cgd")
    assert isinstance(found.scenario.rule_of(0), AdamRule)
    settings = OwnTable.read(tmp_path / "my.csv", tmp_path / "federation.toml", None, None).settings.training
    totals = {number: each.gradient_sum for number, each in enumerate(view.rounds)}
    assert found.scenario.start is not None
    moved = replay(settings, len(totals[0]), totals, {}).from_start(found.scenario.start)
    assert torch.equal(moved.final, view.final_displacement)


def test_privacy_of_the_file_has_its_noise_and_its_statistics(tmp_path: Path) -> None:
    exact = training(tmp_path, rows=2000)
    noisy = training(tmp_path, rows=2000, more=PRIVACY)
    view, _ = noisy.observe(noisy.scenario, "dp")
    assert view.is_private
    assert (view.scheme, view.clip) == ("dp", 1.0)
    one, other = (each.table.preprocessing.columns[0] for each in (exact, noisy))
    assert one.mean != other.mean
    assert one.mean == pytest.approx(other.mean, abs=5)
    again = training(tmp_path, rows=2000, more=PRIVACY)
    assert torch.equal(again.observe(again.scenario, "dp")[0].final_displacement, view.final_displacement)


def test_units_of_privacy_share_one_weight(tmp_path: Path) -> None:
    table = write_table(tmp_path, patient=[f"p{row // 3}" for row in range(60)])
    file = write_federation(tmp_path, more=f'{PRIVACY}unit = "patient"\n')
    found = simulated_training(TableRequest(table, file, None, None, 4, 3), 0)
    assert found.scenario.weights is not None
    for name, weights in found.scenario.weights.items():
        assert len(weights) == len(found.scenario.data[name][1])
        assert float(weights.sum()) == pytest.approx(round(float(weights.sum())))
        assert float(weights.sum()) < len(weights)
    view, _ = found.observe(found.scenario, "dp")
    persons = sum(float(each.sum()) for each in found.scenario.weights.values())
    assert persons == pytest.approx(view.samples, abs=60)  # with noise


def test_truth_is_not_in_the_view(tmp_path: Path) -> None:
    """The attack gets the view only: its own records are none of those that it attacks."""
    found = training(tmp_path)
    view, truth = found.observe(found.scenario, "cgd")
    own = torch.cat([each.x for each in view.coalition.values()])
    assert float(torch.cdist(own, truth.all_x).min()) > 0.1
    assert not hasattr(view, "table")


def test_recovered_records_are_listed_with_their_lines(tmp_path: Path) -> None:
    """Each honest participant has two records, which an attack by linear algebra recovers."""
    found = training(tmp_path, rows=14, honest=2, members=("ada", "bob", "cleo"), data="validation = 0.4\nrare = 1")
    view, truth = found.observe(found.scenario, "cgd")
    result = records.on_view(view, truth, found.fresh)[0]
    assert result.succeeds
    assert result.pictures == {}
    shown = result.recovered
    assert shown is not None
    assert shown.total == round(result.value * len(truth.all_y)) == len(shown.records) > 1
    assert shown.columns == [*NUMBERS, "ward"]
    file = rows_of(tmp_path / "my.csv")
    for each in shown.records:
        line = file[int(each.place.removeprefix("line ")) - 2]
        assert [float(value) for value in each.real[:-1]] == pytest.approx([float(line[name]) for name in NUMBERS])
        guessed = np.array([float(value) for value in each.guess[:-1]])
        assert np.abs(guessed - [float(line[name]) for name in NUMBERS]).max() < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 10}, "there are 8 records, of which 2 are kept as fresh ones, and 4 members of the federation"),
        ({"rounds": 512, "model": 'kind = "mlp"\nlayers = [1024, 1000]'}, "GiB of gradients"),
    ],
)
def test_unsuitable_tables_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training(tmp_path, **options)
