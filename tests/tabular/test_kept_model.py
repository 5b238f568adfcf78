"""The model that a participant keeps: chosen on its own validation records, and scored on those that did not choose."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.errors import InputError
from cgd.federation.model_section import Model
from cgd.tabular import kept_model
from cgd.tabular.columns import Categorical
from cgd.tabular.kept_model import (
    FOLDS,
    KEEP,
    careful_losses,
    check_keep,
    choose_model,
    clearly_best,
    divide,
    scaled_network,
)
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import EncodedDataset, TrainingResult, train
from support.tabular import DATA, REGRESSION, records, run_members, table, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from cgd.federation.data_schema import Data
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.kept_model import Keep, KeptModel
    from cgd.tabular.settings import TabularSettings

LOGISTIC = Model("logistic")


def seed_of(place: int) -> bytes:
    return bytes([place]) * 32


def train_all(settings: TabularSettings, tables: Sequence[TabularDataset]) -> list[TrainingResult]:
    """Train together; all members have left when this returns, so nothing that follows can send anything."""

    def member(peers: Peers, own: TabularDataset, place: int) -> TrainingResult:
        peers.seed = seed_of(place)
        return train(peers, settings, own)

    return run_members(member, tables, range(len(tables)))


def keep_of(settings: TabularSettings, trained: TrainingResult, place: int = 0, keep: Keep = "personalised") -> Any:
    model = ConfinedModel.from_training(trained, settings, {})
    return choose_model(settings, model, trained, seed_of(place), keep=keep)


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in network.parameters()])


def weights(model: ConfinedModel) -> torch.Tensor:
    return flat(model.network)


def log_loss(model: ConfinedModel, rows: TabularDataset) -> float:
    found: float = model.scores(model.outputs(rows), rows)["log_loss"]
    return found


def shifted(rows: int, seed: int, data: Data = DATA) -> TabularDataset:
    """Return records of a participant whose classes are less frequent than the columns explain."""
    return records(table(rows, seed, rare=2.0), data)


@pytest.fixture(scope="module")
def scaled() -> tuple[TabularSettings, list[TrainingResult], list[KeptModel]]:
    """A training with large origins, and the models that its members keep if they scale their origins."""
    settings = tabular_settings(model=replace(LOGISTIC, delta=2.0), steps=150, lr=0.05)
    results = train_all(settings, [records(table(300, seed)) for seed in (1, 2, 3)])
    return settings, results, [keep_of(settings, trained, place, "scaled") for place, trained in enumerate(results)]


def test_with_a_large_origin_a_small_part_of_it_is_kept(
    scaled: tuple[TabularSettings, list[TrainingResult], list[KeptModel]],
) -> None:
    settings, results, kept = scaled
    fresh, changed = records(table(500, 9)), 0
    for each, trained in zip(kept, results, strict=True):
        together = ConfinedModel.from_training(trained, settings, {})
        if each.summary["part"] == 1:
            assert each.model.network is together.network
            assert [stage["name"] for stage in each.summary["models"]] == ["trained"]
            continue
        changed += 1
        assert [stage["name"] for stage in each.summary["models"]] == ["trained", "scaled"]
        assert each.summary["models"][1]["loss"] < each.summary["models"][0]["loss"]
        assert log_loss(each.model, fresh) < log_loss(together, fresh)
    assert changed


@pytest.mark.parametrize("start", [0, "zeros"])
def test_without_the_origin_all_members_have_the_same_model(start: Any, tmp_path: Path) -> None:
    settings = tabular_settings(steps=20)
    settings = replace(settings, model=replace(settings.model, start=start))
    results = train_all(settings, [records(table(100, seed)) for seed in (1, 2, 3)])
    bare, half, whole = (
        [
            flat(
                scaled_network(
                    settings, each.network, each.preprocessing, seed_of(place), part, displacement=each.displacement
                )
            )
            for place, each in enumerate(results)
        ]
        for part in (0.0, 0.5, 1.0)
    )
    for place, trained in enumerate(results):
        assert torch.equal(whole[place], flat(trained.network))
        assert torch.allclose(half[place], (bare[place] + whole[place]) / 2, rtol=0, atol=1e-6)
        assert torch.equal(bare[place], bare[0])
        network = scaled_network(
            settings, trained.network, trained.preprocessing, seed_of(place), 0.0, displacement=trained.displacement
        )
        replace(ConfinedModel.from_training(trained, settings, {}), network=network).save(tmp_path / str(place))
        for name in ("model.safetensors", "model.json"):
            assert (tmp_path / str(place) / name).read_bytes() == (tmp_path / "0" / name).read_bytes()
        if place:
            assert not torch.allclose(whole[place], whole[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("data", [DATA, REGRESSION], ids=["classification", "regression"])
def test_participant_with_other_records_gets_a_better_model_of_its_own(data: Data) -> None:
    settings = tabular_settings(data, LOGISTIC, steps=80)
    own = shifted(300, 1, data)
    (trained, *_) = train_all(settings, [own, *(records(table(300, seed), data) for seed in (2, 3))])
    kept: KeptModel = keep_of(settings, trained)
    fresh = shifted(500, 9, data)
    together = ConfinedModel.from_training(trained, settings, {})
    name = "rmse" if data is REGRESSION else "log_loss"
    losses = [model.scores(model.outputs(fresh), fresh)[name] for model in (together, kept.model)]
    assert kept.summary["method"] in ("intercept", "weights")
    assert kept.summary["steps"] > 0
    assert losses[1] < 0.9 * losses[0]
    # The figures of the report agree with those of fresh records.
    assert kept.outputs is not None
    scored = kept.model.scores(kept.outputs, trained.validation)[name]
    assert scored < together.scores(together.outputs(trained.validation), trained.validation)[name]
    assert keep_of(settings, trained, keep="scaled").summary["method"] is None


def test_same_choice_and_the_same_model_again() -> None:
    settings = tabular_settings(steps=40)
    (trained, *_) = train_all(settings, [shifted(150, 1), records(table(150, 2)), records(table(150, 3))])
    first, second = keep_of(settings, trained), keep_of(settings, trained)
    assert first.summary == second.summary
    assert torch.equal(weights(first.model), weights(second.model))
    assert np.array_equal(first.outputs, second.outputs)


def test_scored_output_of_a_record_does_not_depend_on_its_own_label() -> None:
    """A record that took part in its own choice would look better than a new one."""
    settings = tabular_settings(steps=40)
    (trained, *_) = train_all(settings, [shifted(100, 1), records(table(150, 2)), records(table(150, 3))])
    outputs = keep_of(settings, trained).outputs
    target = trained.records.target
    assert isinstance(target, Categorical)
    differ = 0
    for place in np.flatnonzero(trained.held_out)[:3]:
        codes = np.array(target.codes)
        codes[place] = 1 - codes[place]
        other = replace(trained, records=replace(trained.records, target=replace(target, codes=codes)))
        number = int(trained.held_out[:place].sum())
        found = keep_of(settings, other).outputs
        assert np.array_equal(found[number], outputs[number])
        differ += not np.array_equal(found, outputs)
    assert differ  # the label took part in the choice for other records


def test_few_records_rarely_take_another_model_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Participants with the same kind of records: the lowest loss on 20 validation records is mostly chance."""
    settings = tabular_settings(steps=60)
    others = [records(table(300, seed)) for seed in (2, 3)]
    fresh = records(table(500, 9))
    results = [train_all(settings, [records(table(100, seed)), *others])[0] for seed in range(10, 15)]

    def losses() -> list[float]:
        return [log_loss(keep_of(settings, trained).model, fresh) for trained in results]

    careful = losses()
    monkeypatch.setattr(kept_model, "MIN_STANDARD_ERRORS", 0.0)
    assert np.mean(careful) < np.mean(losses())


def test_choice_that_did_not_help_on_other_records_is_not_kept(
    scaled: tuple[TabularSettings, list[TrainingResult], list[KeptModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, results, kept = scaled
    place = next(number for number, each in enumerate(kept) if each.summary["part"] < 1)
    trained, clearly_best = results[place], kept_model.clearly_best

    def choose(base: Any, options: Any) -> int | None:
        """Return the best option for all records, and the worst one for a part of them, as it may be by chance."""
        if len(base) == trained.validation.rows:
            return clearly_best(base, options)
        return int(np.argmax([each.mean() for each in options]))

    monkeypatch.setattr(kept_model, "clearly_best", choose)
    rejected = keep_of(settings, trained, place, "scaled")
    model = ConfinedModel.from_training(trained, settings, {})
    assert (rejected.summary["part"], [each["name"] for each in rejected.summary["models"]]) == (1.0, ["trained"])
    assert torch.equal(weights(rejected.model), weights(model))
    assert np.array_equal(rejected.outputs, model.outputs(trained.validation))


def test_too_few_validation_records_choose_nothing() -> None:
    settings = tabular_settings(steps=10)
    (trained, *_) = train_all(settings, [records(table(95, seed)) for seed in (1, 2, 3)])
    model = ConfinedModel.from_training(trained, settings, {})
    kept = choose_model(settings, model, trained, seed_of(0), keep="personalised")
    assert kept.model is model
    assert kept.outputs is None
    assert kept.summary["unavailable"] == "we have 19 validation records, and 20 are needed to choose on"


def test_failure_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tabular_settings(steps=10)
    (trained, *_) = train_all(settings, [records(table(100, seed)) for seed in (1, 2, 3)])

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shape")

    monkeypatch.setattr(kept_model, "adapt", fail)
    kept = keep_of(settings, trained)
    assert kept.summary["unavailable"] == "the choice failed: shape"
    assert torch.equal(weights(kept.model), weights(ConfinedModel.from_training(trained, settings, {})))


def test_parts_are_of_equal_size_and_keep_units_together() -> None:
    parts = divide(53, None, seed_of(1))
    assert sorted(np.bincount(parts, minlength=FOLDS).tolist()) == [10, 10, 11, 11, 11]
    assert not np.array_equal(parts, divide(53, None, seed_of(2)))
    units = [f"person {number // 3}" for number in range(60)]
    grouped = divide(60, units, seed_of(1)).reshape(20, 3)
    assert (grouped == grouped[:, :1]).all()
    assert set(grouped.flatten().tolist()) == set(range(FOLDS))


def test_default_of_keep() -> None:
    assert check_keep(None, private=False, vertical=False) == "personalised"
    assert check_keep(None, private=True, vertical=False) == "scaled"
    assert check_keep(None, private=False, vertical=True) == "confined"
    for keep in KEEP:
        assert check_keep(keep, private=True, vertical=False) == keep
    with pytest.raises(InputError, match="keep is 'best'; choose one of confined, scaled, personalised"):
        check_keep("best", private=False, vertical=False)
    with pytest.raises(InputError, match="keep is 'scaled'; in a grid with several columns .*: choose 'confined'"):
        check_keep("scaled", private=False, vertical=True)


def test_records_without_an_error_do_not_choose_the_most_certain_model() -> None:
    data = EncodedDataset(torch.zeros(40, 1), torch.arange(40) % 2, torch.ones(40))
    right = torch.eye(2)[data.y]
    calm, certain = 4 * right, 12 * right  # a probability of 0.98, and of 0.999994
    assert data.losses(certain).mean() < data.losses(calm).mean()
    assert careful_losses(certain, data).mean() > careful_losses(calm, data).mean()
    many = EncodedDataset(torch.zeros(10_000, 1), torch.arange(10_000) % 2, torch.ones(10_000))
    right = torch.eye(2)[many.y]
    assert careful_losses(8 * right, many).mean() < careful_losses(4 * right, many).mean()


def test_infinite_losses_are_never_best() -> None:
    base = np.full(30, 1.0)
    assert clearly_best(base, [np.full(30, np.inf), base - 0.1]) == 1
    assert clearly_best(base, [np.full(30, np.inf)]) is None
    assert clearly_best(np.full(30, np.inf), [base]) is None
    assert clearly_best(base, []) is None
