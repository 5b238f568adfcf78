"""Statistics with noise: the sensitivity, the noise of what is opened, and what is derived from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.tabular.columns import Categorical
from cgd.tabular.dataset import TabularDataset
from cgd.tabular.federated_stats import CategoryStats, NumberStats
from cgd.tabular.private_stats import _own_sums, _preprocessing, private_fit, sensitivity
from support.private_tables import COLUMNS, PRIVATE_DATA, PRIVATE_REGRESSION, private_settings
from support.tabular import records, run_members, table

if TYPE_CHECKING:
    from cgd.federation.data_schema import Data
    from cgd.peers import Peers
    from cgd.tabular.preprocessing import Preprocessing


def vector(age: float, dose: float, ward: int, target: float, data: Data) -> Any:
    """Return the vector of one record."""
    number = data.task == "regression"
    one = TabularDataset(
        1,
        {"age": np.array([age]), "dose": np.array([dose])},
        {"ward": Categorical(np.array([ward], dtype=np.int32), ("A", "B"))},
        np.array([target]) if number else Categorical(np.array([int(target > 0)], dtype=np.int32), data.classes),
    )
    return np.array(list(_own_sums(one, data, COLUMNS)))


schemas = st.sampled_from([PRIVATE_DATA, PRIVATE_REGRESSION])
numbers = st.one_of(st.just(math.nan), st.floats(-1e30, 1e30))


@settings(max_examples=300, deadline=None)
@given(
    numbers, numbers, st.integers(-1, 1), st.floats(-1e30, 1e30), st.sampled_from([PRIVATE_DATA, PRIVATE_REGRESSION])
)
def test_vector_of_a_record_is_never_longer_than_the_sensitivity(
    age: float, dose: float, ward: int, target: float, data: Data
) -> None:
    assert np.linalg.norm(vector(age, dose, ward, target, data)) <= sensitivity(data, COLUMNS)


@pytest.mark.parametrize(("data", "squared"), [(PRIVATE_DATA, 1 + 2 * 2 + 1 + 1), (PRIVATE_REGRESSION, 1 + 4 + 1 + 2)])
def test_sensitivity_is_reached_at_the_ends_of_the_ranges(data: Data, squared: int) -> None:
    longest = np.linalg.norm(vector(200.0, -20.0, -1, 6.0, data))
    assert longest**2 == pytest.approx(squared, rel=1e-12)
    assert longest == pytest.approx(sensitivity(data, COLUMNS), rel=2e-6)


def test_sums_of_records_are_the_sums_of_their_vectors() -> None:
    own = records(table(50, 1), PRIVATE_DATA)
    parts = [np.array(list(_own_sums(own.take([i]), PRIVATE_DATA, COLUMNS))) for i in range(50)]
    np.testing.assert_allclose(list(_own_sums(own, PRIVATE_DATA, COLUMNS)), np.sum(parts, axis=0), rtol=1e-12)


@pytest.mark.parametrize("data", [PRIVATE_DATA, PRIVATE_REGRESSION])
def test_one_opening_with_noise_as_large_as_promised(data: Data) -> None:
    """Each element is within 8 standard deviations; a false alarm has a probability below 1e-13."""
    config = private_settings(data)

    def fit_private(peers: Peers, own: TabularDataset) -> tuple[Preprocessing, list[Any], Any, list[int]]:
        ledger, opened = PrivacyLedger(config.privacy_settings()), []
        ledger.begin(peers)
        private_sum = peers.private_sum

        def spy(*args: Any, **options: Any) -> Any:
            opened.append((args[1], private_sum(*args, **options)))
            return opened[-1][1]

        peers.private_sum = spy  # type: ignore[method-assign]
        found, _ = private_fit(own, data, COLUMNS, peers, ledger)
        return found, opened, ledger.spent_on(), [peers.number]

    own = [records(table(300, seed), data) for seed in range(4)]
    results = run_members(fit_private, own)
    assert len({repr(each[0]) for each in results}) == 1  # all members have the same
    for found, opened, (spent,), sums in results:
        assert sums == [1]  # nothing else was summed
        ((encoding, total),) = opened
        exact = np.sum([list(_own_sums(each, data, COLUMNS)) for each in own], axis=0)
        share = config.privacy_settings().statistics_mu
        assert (spent.what, spent.openings, spent.mu_squared <= share**2) == ("statistics", 1, True)
        assert encoding.sigma_total == pytest.approx(sensitivity(data, COLUMNS) / share * math.sqrt(4 / 3), rel=0.02)
        assert np.abs(total - exact).max() < 8 * encoding.sigma_total
        assert any(total != exact)
        assert all(each.missing >= 1 for each in found.columns)  # always a feature for it
        if data.task == "classification":
            assert found.class_weights().min() > 0


def test_noise_below_zero_gives_usable_statistics() -> None:
    opened = [-5.0, -3.0, 4.0, -2.0, 2.0, 8.0, 9.0, -1.0, -2.0, -3.0, -7.0, -9.0]
    found = _preprocessing(iter(opened), 3.0, PRIVATE_DATA, COLUMNS)
    age, dose, ward = found.columns
    assert isinstance(age, NumberStats)
    assert isinstance(dose, NumberStats)
    assert isinstance(ward, CategoryStats)
    assert (age.present, age.missing, age.mean) == (1, 1, 120.0)
    assert (age.deviation, dose.deviation) == (60.0, 20.0)  # half of the range, the largest one that is possible
    assert (ward.counts, ward.missing) == ((0, 0), 1)
    assert found.target.counts == (1, 1)
    regression = _preprocessing(iter([*opened[:10], 0.0, -1.0]), 3.0, PRIVATE_REGRESSION, COLUMNS)
    assert (regression.target.mean, regression.target.deviation) == (0.0, 6.0)


@pytest.mark.parametrize("squares", [1e-9, 0.0, -30.0])
def test_small_variance_is_not_below_its_noise(squares: float) -> None:
    """Nor is it zero: a column whose variance is hidden by the noise remains a feature."""
    opened = [1000.0, 0.0, 0.0, squares, 0.0, 0.0, 90.0, 0.0, 0.0, 0.0, 500.0, 500.0]
    age, dose, _ = _preprocessing(iter(opened), 40.0, PRIVATE_DATA, COLUMNS).columns
    assert isinstance(age, NumberStats)
    assert isinstance(dose, NumberStats)
    assert age.deviation == pytest.approx(60 * math.sqrt(0.04), rel=1e-3)  # the range has a half of 60
    assert dose.deviation == pytest.approx(20 * 0.3, rel=1e-2)
