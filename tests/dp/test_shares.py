"""The parts of a budget: what each kind of opening may use, and the two parts of a training's records."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from cgd.dp.accountant import epsilon_of
from cgd.dp.budget_file import BudgetFile
from cgd.dp.charges import TRAINING, VALIDATION
from cgd.dp.settings import COUNT_SHARE, STATISTICS_ATTEMPTS, PrivacySettings
from cgd.errors import InputError, RevealError

if TYPE_CHECKING:
    from pathlib import Path

EPSILON, DELTA = 2.0, 1e-5


@pytest.mark.parametrize("statistics_share", [0.0, 0.1, 0.5])
def test_all_planned_openings_fit_into_the_budget(statistics_share: float) -> None:
    settings = PrivacySettings(EPSILON, DELTA, 40, statistics_share=statistics_share, looks=4)
    total = settings.budget().mu_squared
    steps = (settings.steps + settings.reruns) * settings.step_mu**2
    statistics = STATISTICS_ATTEMPTS * settings.statistics_mu**2
    assert statistics == pytest.approx(statistics_share * total)
    assert settings.count_mu**2 == pytest.approx(COUNT_SHARE * (1 - statistics_share) * total)
    assert statistics + settings.count_mu**2 + steps == pytest.approx(total)
    assert 5 * settings.look_mu**2 == pytest.approx(total)  # four, and one again


def test_one_look_may_be_repeated_once() -> None:
    settings = PrivacySettings(EPSILON, DELTA, 40, looks=1)
    assert 2 * settings.look_mu**2 == pytest.approx(settings.budget().mu_squared)


@pytest.mark.parametrize(("name", "value"), [("statistics_share", 1.0), ("statistics_share", -0.1), ("looks", -1)])
def test_invalid_shares_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} is {value}"):
        PrivacySettings(EPSILON, DELTA, 40, **{name: value})  # type: ignore[arg-type]


def test_training_counts_with_the_part_of_its_records_that_was_charged_more(tmp_path: Path) -> None:
    file = BudgetFile(tmp_path / "records.budget", EPSILON, DELTA)
    limit = PrivacySettings(EPSILON, DELTA, 1).budget().mu_squared

    def spent(part: float) -> object:
        return pytest.approx(epsilon_of(math.sqrt(part * limit), DELTA))

    file.charge(0.4 * limit, "first", "a step")
    file.charge(0.3 * limit, "first", "the validation loss", VALIDATION)
    assert file.epsilon_spent == spent(0.4)
    file.charge(0.3 * limit, "first", "the validation loss", VALIDATION)
    assert file.epsilon_spent == spent(0.6)
    file.charge(0.3 * limit, "second", "the validation loss", VALIDATION)
    assert file.epsilon_spent == spent(0.9)  # trainings add up, whatever their parts
    file.charge(0.3 * limit, "second", "a step", TRAINING)
    for part in (TRAINING, VALIDATION):
        with pytest.raises(RevealError, match="is not opened"):
            file.charge(0.11 * limit, "second", "one more", part)
    again = BudgetFile(tmp_path / "records.budget", 1.0, DELTA)
    assert again.charges == file.charges
    assert again.epsilon_spent == file.epsilon_spent
    with pytest.raises(InputError, match="is left for a training"):
        again.check(0.2 * limit, "third")
    again.check(0.4 * limit, "second")
