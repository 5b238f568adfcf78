"""The settings of a private training: invalid ones are refused, and all openings together fit into the budget."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cgd.dp.settings import PrivacySettings
from cgd.errors import BudgetSpentError, InputError

GOOD: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "steps": 10}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epsilon", value) for value in (0, -1.0, math.inf, math.nan, "1", None, True)),
        *(("delta", value) for value in (0, 1, 2.0, -1e-5, math.nan)),
        *(("clip", value) for value in (0, -1.0, math.inf, math.nan, None)),
        *(("steps", value) for value in (0, -1, 1.5, True)),
        *(("colluders", value) for value in (-1, 0.5, True)),
        *(("reruns", value) for value in (-2, 0.5, True)),
    ],
)
def test_invalid_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is"):
        PrivacySettings(**{**GOOD, name: value})


def test_epsilon_for_which_the_sampler_is_not_good_enough_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be promised"):
        PrivacySettings(epsilon=40.0, delta=1e-5, steps=1)


@pytest.mark.parametrize(("steps", "reruns"), [(1, 5), (250, 5), (251, 6), (1000, 20)])
def test_default_reruns_are_two_per_cent_and_at_least_five(steps: int, reruns: int) -> None:
    assert PrivacySettings(2.0, 1e-5, steps).reruns == reruns
    assert PrivacySettings(2.0, 1e-5, steps, reruns=0).reruns == 0


@pytest.mark.parametrize("colluders", [3, 4])
def test_colluders_must_be_fewer_than_members(colluders: int) -> None:
    settings = PrivacySettings(**GOOD, colluders=colluders)
    with pytest.raises(InputError, match="choose at most 2"):
        settings.count_encoding(3)
    with pytest.raises(InputError, match="choose at most 2"):
        settings.step_encoding(3, 5, 100, 32)


@pytest.mark.parametrize("ring_bits", [32, 64])
@pytest.mark.parametrize("colluders", [0, 1, 2])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-9), (2.0, 1e-5), (20.0, 1e-3)])
def test_a_count_and_all_steps_and_reruns_can_be_charged_and_not_one_more(
    epsilon: float, delta: float, colluders: int, ring_bits: int
) -> None:
    settings = PrivacySettings(epsilon, delta, steps=7, colluders=colluders, reruns=3)
    budget = settings.budget()
    budget.charge(settings.count_encoding(3).mu ** 2, "the number of records")
    encoding = settings.step_encoding(3, 50, 1000, ring_bits)
    for _ in range(10):
        budget.check(settings.step_mu**2, "a step")  # as before every sum
        budget.charge(encoding.mu**2, "a step")
    with pytest.raises(BudgetSpentError, match="10 openings for a step"):
        budget.charge(encoding.mu**2, "a step")
    assert 0.97 * epsilon < budget.spent().epsilon <= epsilon


@pytest.mark.parametrize("records", [1, 10, 10**4, 10**9])
def test_any_opened_number_of_records_can_be_used(records: int) -> None:
    """It is opened with noise, so it may be 1; or a dishonest member has made it large."""
    settings = PrivacySettings(**GOOD)
    encoding = settings.step_encoding(3, 1000, records, 64)
    assert encoding.mu <= settings.step_mu
    assert encoding.max_records > records


def test_delta_is_compared_with_the_number_of_records() -> None:
    settings = PrivacySettings(**GOOD)
    settings.check_records(99_999)
    with pytest.raises(InputError, match="choose it far below one divided by them, such as 1e-07"):
        settings.check_records(100_000)


def test_description_has_every_setting() -> None:
    base = PrivacySettings(**GOOD, clip=1.0, colluders=1, reruns=5)
    changes: list[dict[str, Any]] = [
        {"epsilon": 2.0000001},
        {"delta": 1.1e-5},
        {"steps": 11},
        {"clip": 1.5},
        {"colluders": 2},
        {"reruns": 6},
    ]
    given = {**GOOD, "clip": 1.0, "colluders": 1, "reruns": 5}
    described = {PrivacySettings(**{**given, **change}).describe() for change in changes}
    assert len(described | {base.describe()}) == len(changes) + 1
