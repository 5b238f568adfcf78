"""Theorem 2 as a test: the coalition's real view and the simulated one cannot be distinguished; flaws can.

Every comparison has a false positive rate of at most 10⁻⁶ over all its measurements. With 100 runs of both, a true gap
of 0.8 in any measurement is detected with a probability of at least 0.99; the flaws below open gaps of about 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from cgd.audit.attacks.simulator import _gaps, _reversed_bits, _threshold, compare, distinguish, small_inputs
from cgd.audit.ideal_simulator import ProtocolSetup, run, simulate, stream
from cgd.errors import InputError
from cgd.secagg.messages import MASKINGS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.audit.ideal_simulator import Flaw
    from cgd.secagg.messages import Masking, Opening

# (flaw, whether the sums are opened): self-masks protect sums that are not.
DETECTED: list[tuple[Flaw, bool]] = [("no masks", True), ("masks reused", True), ("no self-masks", False)]


@pytest.mark.parametrize(
    ("masking", "opening", "opened"),
    [
        ("pairwise", "mesh", True),
        ("uniform", "mesh", False),
        ("uniform", "aggregator", True),
        pytest.param("uniform", "mesh", True, marks=pytest.mark.slow),
        pytest.param("pairwise", "mesh", False, marks=pytest.mark.slow),
        pytest.param("pairwise", "aggregator", True, marks=pytest.mark.slow),
    ],
)
def test_real_and_simulated_views_are_indistinguishable(masking: Masking, opening: Opening, opened: bool) -> None:
    setup = ProtocolSetup(masking=masking, opening=opening, opened=opened)
    found = compare(setup, small_inputs(setup), runs=100)
    assert not found.distinguishable, found.where[:5]
    assert found.measurements > 5000
    assert found.detectable_gap(power=0.99) < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize(("flaw", "opened"), DETECTED)
def test_flaw_is_detected_in_10_of_10_trials(masking: Masking, flaw: Flaw, opened: bool) -> None:
    """10 of 10 mean a power of at least 0.74, with 95 % confidence; all 60 together, 0.95 (Clopper and Pearson)."""
    setup = ProtocolSetup(masking=masking, opened=opened, flaw=flaw)
    sums = 2 if flaw == "masks reused" else 1
    detected = [
        compare(setup, small_inputs(setup, size=2, sums=sums, seed=seed), runs=30, seed=seed).distinguishable
        for seed in range(10)
    ]
    assert all(detected)


@pytest.mark.parametrize("masking", MASKINGS)
def test_flaw_is_detected_where_it_is(masking: Masking) -> None:
    inputs = small_inputs(ProtocolSetup())
    bare = compare(ProtocolSetup(masking=masking, flaw="no masks"), inputs, runs=40)
    assert "sum 1: unexplained of c [0]" in bare.where
    twice = compare(ProtocolSetup(masking=masking, flaw="masks reused"), inputs, runs=40)
    assert all(" − sum 2" in place for place in twice.where)


def test_missing_self_masks_reveal_z_of_an_unopened_sum_only() -> None:
    inputs = small_inputs(ProtocolSetup())
    assert not compare(ProtocolSetup(flaw="no self-masks"), inputs, runs=50).distinguishable
    unopened = compare(ProtocolSetup(flaw="no self-masks", opened=False), inputs, runs=50)
    assert "sum 1: unexplained of all [0]" in unopened.where


@pytest.mark.parametrize("masking", MASKINGS)
def test_simulator_with_a_wrong_z_is_detected(masking: Masking) -> None:
    setup = ProtocolSetup(masking=masking)
    found = compare(setup, small_inputs(setup), runs=40, wrong_by=1)
    assert found.gap == 1.0
    assert "sum 1: total [0]" in found.where


def test_simulator_needs_no_honest_input() -> None:
    """Its output is a function of the coalition's inputs, z and random bits."""
    setup = ProtocolSetup()
    (inputs,) = small_inputs(setup, sums=1)
    own = {name: inputs[name] for name in setup.coalition}
    z = inputs["c"] + inputs["d"]
    view = simulate(setup, [own], [z], stream(1))
    assert set(view) == set(run(setup, [inputs], stream(2)))
    assert np.array_equal(view["sum 1: total"], inputs["a"] + inputs["b"] + z)
    assert np.array_equal(view["sum 1: unexplained of all"], z[:2])  # the words that a and b reduce


def test_gaps_are_those_of_scipy_also_with_ties() -> None:
    random = np.random.default_rng(0)
    for top in (3, 2**32 - 1):
        one, other = (random.integers(0, top, (40, 5), dtype=np.uint32) for _ in range(2))
        expected = [stats.ks_2samp(one[:, i], other[:, i]).statistic for i in range(5)]
        assert _gaps(one, other) == pytest.approx(expected)


def test_threshold_keeps_the_false_positive_rate() -> None:
    """By scipy's exact distribution, the rate is kept at the threshold and exceeded one step below it."""
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


def test_coalition_of_all_but_one_is_rejected() -> None:
    with pytest.raises(InputError, match="up to m − 2"):
        ProtocolSetup(coalition=frozenset("abc"))


def test_attack_fails_on_the_protocol_and_succeeds_on_a_flawed_one() -> None:
    sound, broken = distinguish("cgd", runs=40), distinguish("cgd", runs=40, flaw="no masks")
    assert not sound.succeeds
    assert sound.value < sound.chance
    assert broken.succeeds
    assert broken.value == 1.0
