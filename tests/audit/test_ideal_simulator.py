"""Theorem 2 as a test: the coalition's real view and the simulator's cannot be told apart; flaws can.

Every comparison has a false-alarm rate of at most 10⁻⁶ over all its measurements. With 100 runs of both, a true gap of
0.8 in any measurement is found with a probability of at least 0.99; the flaws below open gaps of about 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from cgd.audit.attacks.simulator import _gaps, _reversed_bits, _threshold, compare, small_inputs, told_apart
from cgd.audit.ideal_simulator import Arrangement, run, simulate, stream
from cgd.errors import InputError
from cgd.secagg.messages import SHARINGS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.audit.ideal_simulator import Flaw
    from cgd.secagg.messages import Opening, Sharing

# (flaw, whether the sums come to their end): seals protect sums that do not.
FOUND: list[tuple[Flaw, bool]] = [("no masks", True), ("shares reused", True), ("seals left out", False)]


@pytest.mark.parametrize(("opening", "opened"), [("mesh", True), ("mesh", False), ("aggregator", True)])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_real_view_and_the_simulated_one_cannot_be_told_apart(
    sharing: Sharing, opening: Opening, opened: bool
) -> None:
    arrangement = Arrangement(sharing=sharing, opening=opening, opened=opened)
    found = compare(arrangement, small_inputs(arrangement), runs=100)
    assert not found.told_apart, found.where[:5]
    assert found.measurements > 5000
    assert found.found(power=0.99) < 0.85


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(("flaw", "opened"), FOUND)
def test_a_flaw_is_told_from_the_simulation_in_10_of_10_trials(sharing: Sharing, flaw: Flaw, opened: bool) -> None:
    """10 of 10 mean a power of at least 0.74, with 95 % confidence; all 60 together, 0.95 (Clopper and Pearson)."""
    arrangement = Arrangement(sharing=sharing, opened=opened, flaw=flaw)
    sums = 2 if flaw == "shares reused" else 1
    told_apart = [
        compare(arrangement, small_inputs(arrangement, size=2, sums=sums, seed=seed), runs=30, seed=seed).told_apart
        for seed in range(10)
    ]
    assert all(told_apart)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_a_flaw_shows_is_where_it_shows(sharing: Sharing) -> None:
    inputs = small_inputs(Arrangement())
    bare = compare(Arrangement(sharing=sharing, flaw="no masks"), inputs, runs=40)
    assert "sum 1: unexplained of c [0]" in bare.where
    twice = compare(Arrangement(sharing=sharing, flaw="shares reused"), inputs, runs=40)
    assert all(" − sum 2" in place for place in twice.where)


def test_without_seals_an_opened_sum_tells_no_more_than_z_and_an_unopened_one_tells_z() -> None:
    inputs = small_inputs(Arrangement())
    assert not compare(Arrangement(flaw="seals left out"), inputs, runs=50).told_apart
    unopened = compare(Arrangement(flaw="seals left out", opened=False), inputs, runs=50)
    assert "sum 1: unexplained of all [0]" in unopened.where


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_simulator_with_another_z_is_told_apart(sharing: Sharing) -> None:
    arrangement = Arrangement(sharing=sharing)
    found = compare(arrangement, small_inputs(arrangement), runs=40, wrong_by=1)
    assert found.gap == 1.0
    assert "sum 1: total [0]" in found.where


def test_the_simulator_sees_no_honest_input() -> None:
    """Its output is a function of the coalition's inputs, z and random bits: other honest inputs of the same sum."""
    arrangement = Arrangement()
    (inputs,) = small_inputs(arrangement, sums=1)
    own = {name: inputs[name] for name in arrangement.coalition}
    z = inputs["c"] + inputs["d"]
    view = simulate(arrangement, [own], [z], stream(1))
    assert set(view) == set(run(arrangement, [inputs], stream(2)))
    assert np.array_equal(view["sum 1: total"], inputs["a"] + inputs["b"] + z)
    assert np.array_equal(view["sum 1: unexplained of all"], z[:2])  # the words that a and b add up


def test_gaps_are_those_of_kolmogorov_and_smirnov_with_ties_too() -> None:
    random = np.random.default_rng(0)
    for top in (3, 2**32 - 1):
        one, other = (random.integers(0, top, (40, 5), dtype=np.uint32) for _ in range(2))
        expected = [stats.ks_2samp(one[:, i], other[:, i]).statistic for i in range(5)]
        assert _gaps(one, other) == pytest.approx(expected)


def test_the_threshold_keeps_the_false_alarm_rate() -> None:
    """Against scipy's exact distribution: at the threshold the rate is kept, one step lower it is not."""
    for runs in (30, 100):
        threshold = _threshold(runs, 1e-4)
        exact = [
            stats.ks_2samp(*_with_gap(runs, gap), method="exact").pvalue for gap in (threshold, threshold - 1 / runs)
        ]
        assert exact[0] <= 1e-4 < exact[1]
    assert _threshold(5, 1e-9) > 1


def _with_gap(runs: int, gap: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    shift = round(gap * runs)
    return np.arange(runs) + 0.0, np.arange(runs) + shift - 0.5


def test_bits_are_reversed() -> None:
    words = np.array([[1, 0x80000000, 0x00000100]], dtype=np.uint32)
    assert _reversed_bits(words).tolist() == [[0x80000000, 1, 0x00800000]]


def test_a_coalition_of_all_but_one_is_refused() -> None:
    with pytest.raises(InputError, match="up to m − 2"):
        Arrangement(coalition=frozenset("abc"))


def test_the_audit_shows_both_the_protocol_and_its_control() -> None:
    sound, broken = told_apart("cgd", runs=40), told_apart("cgd", runs=40, flaw="no masks")
    assert not sound.succeeds
    assert sound.value < sound.chance
    assert broken.succeeds
    assert broken.value == 1.0
