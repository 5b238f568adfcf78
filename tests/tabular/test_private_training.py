"""Training on tables with differential privacy: the split, gradients, validation losses, and what was spent."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.dp.budget_file import BudgetFile
from cgd.dp.charges import TRAINING, VALIDATION
from cgd.errors import BudgetSpentError, RemoteProtocolError
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.optim import sample_count
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.tabular.private_training import BATCH_RECORDS, LOSS_BOUND, LOSS_NORM, private_validation_split, split_name
from cgd.tabular.training import EvalRecord, train
from cgd.tabular.training_loop import EncodedDataset
from support.private_tables import PRIVATE_DATA, PRIVATE_REGRESSION, private_settings
from support.tabular import records, run_members, table

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.dp.charges import Charge
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

SEED = bytes(range(32))
PARTS = (TRAINING, VALIDATION)


def joined(*parts: TabularDataset) -> TabularDataset:
    """Return the records of several tables."""
    content: dict[str, list[Any]] = {name: [] for name in ("age", "dose", "ward", "outcome")}
    for part in parts:
        content["age"] += [None if math.isnan(each) else each for each in part.numbers["age"]]
        content["dose"] += part.numbers["dose"].tolist()
        content["ward"] += [part.categories["ward"].names[code] for code in part.categories["ward"].codes]
        assert part.target is not None
        content["outcome"] += [part.target.names[code] for code in part.target.codes]  # type: ignore[union-attr]
    return records(content, PRIVATE_DATA)


def test_coin_of_a_record_does_not_depend_on_the_others() -> None:
    some, more = records(table(400, 1), PRIVATE_DATA), records(table(30, 2), PRIVATE_DATA)
    mask = private_validation_split(some, 0.2, SEED)
    assert abs(mask.sum() - 80) < 6 * math.sqrt(400 * 0.2 * 0.8)
    for other, place in ((joined(some, more), slice(0, 400)), (joined(more, some), slice(30, 430))):
        assert np.array_equal(private_validation_split(other, 0.2, SEED)[place], mask)
    assert np.array_equal(private_validation_split(some, 0.2, SEED), mask)  # after a restart
    assert not np.array_equal(private_validation_split(some, 0.2, bytes(32)), mask)
    assert not private_validation_split(some, 0.0, SEED).any()


def test_equal_records_have_coins_of_their_own() -> None:
    one = records(table(1, 1), PRIVATE_DATA).take([0] * 1000)
    mask = private_validation_split(one, 0.5, SEED)
    assert abs(mask.sum() - 500) < 6 * math.sqrt(250)
    assert np.array_equal(private_validation_split(one.take(range(999)), 0.5, SEED), mask[:999])


def test_vector_of_a_validation_record_is_never_longer_than_its_bound() -> None:
    for loss in np.linspace(0, LOSS_BOUND, 101):
        assert math.hypot(loss / LOSS_BOUND - 0.5, 0.5) <= LOSS_NORM
    assert math.hypot(0.5, 0.5) == pytest.approx(LOSS_NORM, rel=2e-6)


@pytest.mark.parametrize("data", [PRIVATE_DATA, PRIVATE_REGRESSION], ids=["classification", "regression"])
def test_training_learns_and_spends_what_was_planned(data: Any) -> None:
    """The loss of a model that has learned nothing is 0.69 or 1; with 1800 records and ε = 8 the noise is small."""
    settings = private_settings(data, steps=40)
    tables = [records(table(1000 - 200 * place, place), data) for place in range(3)]
    results = run_members(lambda peers, own: train(peers, settings, own), tables)
    assert len({repr(each.preprocessing) for each in results}) == 1
    assert len({each.evaluations[-1].everyone_validation_loss for each in results}) == 1
    for result, own in zip(results, tables, strict=True):
        assert result.validation.rows + result.samples == own.rows
        *earlier, last = result.evaluations
        assert [each.everyone_validation_loss for each in earlier] == [None] * 7  # one look, at the end
        assert last.everyone_validation_loss is not None
        assert last.everyone_validation_loss < 0.6
        assert result.best_step == result.steps == 40
        spent = {each.what: (each.openings, each.records) for each in result.ledger.spent_on()}
        assert spent == {
            "statistics": (1, "training"),
            "the number of records": (1, "training"),
            "a step": (40, "training"),
            "the validation loss": (1, "validation"),
        }
        assert result.ledger.spent().epsilon < 8.0
        assert result.ledger.spent().openings == 43
        losses = [each.evaluations[-1].validation_loss for each in results]
        counts = [each.validation.rows for each in results]
        mean = float(np.average(losses, weights=counts))
        # The opened loss is the mean, with noise and cut to L: 8 standard deviations of both sums.
        config = result.ledger.settings
        sigma = math.sqrt(0.5 * 3 / 2) / config.look_mu
        assert last.everyone_validation_loss < mean + 8 * LOSS_BOUND * 1.5 * sigma / sum(counts)


def test_early_stopping_shares_the_validation_budget() -> None:
    settings = private_settings(steps=40, patience=2)
    assert settings.looks == 8
    config = settings.privacy_settings()
    assert config.looks * config.look_mu**2 < config.budget().mu_squared
    tables = [records(table(300, place), PRIVATE_DATA) for place in range(3)]
    results = run_members(lambda peers, own: train(peers, settings, own), tables)
    for result in results:
        assert all(each.everyone_validation_loss is not None for each in result.evaluations)
        looks = next(each for each in result.ledger.spent_on() if each.records == "validation")
        assert looks.openings == len(result.evaluations)
    assert len({each.best_step for each in results}) == 1


def test_another_validation_split_in_a_training_of_the_same_name_is_charged_besides(tmp_path: Path) -> None:
    """A record of the first training's validation split may be trained on in the second one, and the other way round.

    So what was charged for one part in the first training and for the other part in the second one adds up.
    """
    first = private_settings(steps=6, patience=6, validate_every=1)
    second = replace(first, data=replace(PRIVATE_DATA, validation=0.5))
    tables = [records(table(100, place), PRIVATE_DATA) for place in range(3)]
    opened: list[list[Charge]] = []
    for settings in (first, second):

        def run(peers: Peers, own: TabularDataset, settings: TabularSettings = settings) -> None:
            ledger = PrivacyLedger(settings.privacy_settings(), tmp_path / peers.me, "again")
            with suppress(BudgetSpentError, RemoteProtocolError):
                train(peers, settings, own, ledger=ledger)

        run_members(run, tables)
        opened.append(BudgetFile(min(tmp_path.iterdir()), 8.0, 1e-5).charges[sum(map(len, opened)) :])
    total = [{part: sum(each.mu_squared for each in some if each.records == part) for part in PARTS} for some in opened]
    assert total[0][TRAINING] > 0.3
    limit = first.privacy_settings().budget().mu_squared
    assert total[0][TRAINING] + total[1][VALIDATION] <= limit
    assert total[0][VALIDATION] + total[1][TRAINING] <= limit


def test_name_of_a_split_is_another_one_if_a_record_may_change_sides() -> None:
    content = table(50, 1)
    some = records(content, PRIVATE_DATA)

    def name(own: TabularDataset, unit: str = "") -> str:
        return split_name(PRIVATE_DATA, unit, own, SEED)

    assert name(some.take(np.arange(50)[::-1])) == name(some)
    corrected = {**content, "age": [40.5, *content["age"][1:]]}
    relabelled = {**content, "outcome": content["outcome"][::-1]}
    others = [records(each, PRIVATE_DATA) for each in (corrected, relabelled)]
    assert len({name(each) for each in (some, some.take(range(49)), *others)}) == 4
    # With units, the coin is that of the unit, whatever its records are.
    units = tuple(str(place) for place in range(50))
    assert len({name(replace(each, units=units), "person") for each in (some, *others)}) == 1
    assert name(replace(some, units=units), "person") != name(replace(some, units=units), "patient")


def test_commitment_to_records_without_numbers_is_another_one_in_every_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal commitments would show to all members that the records of one of them are the same as before."""
    columns = (Column("ward", "category", ("A", "B")),)
    data = Data("outcome", columns, classes=("well", "ill"), validation=0.0)
    settings = replace(private_settings(data, steps=1), data=data)
    made: list[int] = []
    commitment = sample_count._commitment

    def spy(*arguments: Any, **options: Any) -> int:
        made.append(commitment(*arguments, **options))
        return made[-1]

    def member(peers: Peers, own: TabularDataset) -> None:
        peers.seed = peers.me.encode().ljust(32, b"s")  # the same again, as from a key file
        train(peers, settings, own)

    monkeypatch.setattr(sample_count, "_commitment", spy)
    tables = [records(table(100, place), data) for place in range(3)]
    for _ in range(2):
        run_members(member, tables)
    assert len(made) == len(set(made)) == 6


def test_participant_whose_records_are_all_in_the_validation_split_takes_part() -> None:
    settings = private_settings(steps=2)

    def member(peers: Peers, own: TabularDataset) -> TrainingResult:
        if own.rows == 1:
            while not private_validation_split(own, 0.2, peers.seed).all():
                peers.seed = np.random.default_rng(int.from_bytes(peers.seed[:8], "little")).bytes(32)
        return train(peers, settings, own)

    results = run_members(member, [records(table(rows, 3), PRIVATE_DATA) for rows in (200, 200, 1)])
    assert results[2].steps == 2
    assert results[2].validation.rows == 1


def test_loss_that_is_not_finite_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = EncodedDataset.losses
    monkeypatch.setattr(EncodedDataset, "losses", lambda *arguments: losses(*arguments) * math.inf)
    settings, history = private_settings(steps=5), list[EvalRecord]()
    tables = [records(table(100, place), PRIVATE_DATA) for place in range(3)]
    results = run_members(lambda peers, own: train(peers, settings, own, progress=history.append), tables)
    for result in results:
        assert result.evaluations[-1].training_loss is None
        assert all(torch.isfinite(each).all() for each in result.network.parameters())


def test_gradients_do_not_depend_on_how_many_other_records_there_are() -> None:
    """A member's sum of clipped gradients, with one record more, changes by at most C: exactly, not up to rounding."""
    from cgd.dp.settings import PrivacySettings
    from cgd.optim.privacy import Privacy
    from cgd.optim.privacy_ledger import PrivacyLedger
    from cgd.tabular.models import build
    from cgd.tabular.private_training import _pad

    torch.manual_seed(1)
    x, y = 3 * torch.randn(301, 5), torch.randint(2, (301,))
    network = build(Model("mlp", (16,)), 5, 2)
    ledger = PrivacyLedger(PrivacySettings(1.0, 1e-5, 10))

    def gradient(rows: int) -> torch.Tensor:
        data = _pad(EncodedDataset(x[:rows], y[:rows], torch.ones(rows)), BATCH_RECORDS)
        privacy = Privacy.from_ledger(network, ledger, reduction="sum", records=BATCH_RECORDS)
        data.losses(network(data.x)).sum().backward()
        taken = privacy.gradient(list(network.parameters()), rows)
        privacy._gradients.remove()
        network.zero_grad()
        return taken

    difference = gradient(301) - gradient(300)
    assert difference.norm() <= 1.0
    assert difference.norm() > 0.5  # it was clipped
