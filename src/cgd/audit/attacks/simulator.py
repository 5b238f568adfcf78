"""Distinguish a coalition's real view from the simulated one, as a statistical test of Theorem 2.

`compare` runs the protocol and Theorem 2's simulator (`ideal_simulator.py`) many times on the same inputs, and measures

- every word of the view;
- the differences of any two words, within a sum and between two sums, which show values that are used twice;
- each of these twice, also with its bits in reverse order, so that low bits count as much as high ones.

Each measurement is compared over n runs of both by the largest gap between the two empirical distributions
(Kolmogorov–Smirnov). If the distributions are equal, every order of the 2n values is equally likely, and by the
reflection principle the gap reaches k/n with a probability of at most 2·C(2n, n − k)/C(2n, n), for any distribution;
ties only make it smaller. The sum over all measurements bounds the false positive rate. Hoeffding's inequality bounds
the true gap that is detected with a given probability (`Comparison.detectable_gap`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from cgd.audit.ideal_simulator import FLAWS, ProtocolSetup, run, simulate, stream
from cgd.audit.results import AttackResult
from cgd.secagg.messages import MASKINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.audit.ideal_simulator import Flaw, Words
    from cgd.audit.view import Scheme
    from cgd.secagg.messages import Masking

FALSE_POSITIVE_RATE = 1e-6


@dataclass(frozen=True)
class Comparison:
    """The comparison of real and simulated views.

    Attributes:
        runs: the number of runs of each.
        measurements: the number of measurements.
        threshold: the gap from which on a measurement counts as different.
        false_positive_rate: the largest probability that any measurement of equal views reaches the threshold.
        gap: the largest gap.
        where: the measurements from the threshold on, the largest gap first.
    """

    runs: int
    measurements: int
    threshold: float
    false_positive_rate: float
    gap: float
    where: tuple[str, ...]

    @property
    def distinguishable(self) -> bool:
        """True if a measurement distinguishes the views."""
        return bool(self.where)

    def detectable_gap(self, power: float = 0.99) -> float:
        """Return the true gap in one measurement that is detected with this probability; above 1, none is."""
        return self.threshold + math.sqrt(2 * math.log(1 / (1 - power)) / self.runs)


def distinguish(
    scheme: Scheme, masking: Masking = "pairwise", *, flaw: Flaw = "none", runs: int = 200, seed: int = 0
) -> AttackResult:
    """Compare the views of two colluders of four members, over two sums of small gradients.

    The scheme makes no difference to a secure sum.
    """
    setup = ProtocolSetup(masking=masking, flaw=flaw, opened=flaw != "no self-masks")
    found = compare(setup, small_inputs(setup, seed=seed), runs=runs, seed=seed)
    return AttackResult(
        "distinguishing the real view from the simulated one",
        scheme,
        "largest gap between distributions",
        found.gap,
        found.threshold,
        succeeds=found.distinguishable,
        setting=f"{masking} masking, {'the protocol as it is' if flaw == 'none' else flaw}",
        detail=f"{found.measurements} measurements over {found.runs} runs each, false positive rate below "
        f"{found.false_positive_rate:g}; a gap of {found.detectable_gap():.2f} is detected with probability 0.99",
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with both kinds of masking."""
    return [distinguish(scheme, masking, seed=seed) for masking in MASKINGS]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results of protocols with a flaw, which must be detected."""
    flaws = [flaw for flaw in FLAWS if flaw != "none"]
    return [replace(distinguish(scheme, flaw=flaw, seed=seed), must_succeed=True) for flaw in flaws]


def small_inputs(setup: ProtocolSetup, *, size: int = 4, sums: int = 2, seed: int = 0) -> list[dict[str, Words]]:
    """Return gradients of the usual size in fixed point, of all members for each sum: far from uniform words."""
    random = np.random.default_rng(seed)
    return [
        {name: (random.normal(0, 0.1, size) * 2**20).astype(np.int64).astype(np.uint32) for name in setup.members}
        for _ in range(sums)
    ]


def compare(
    setup: ProtocolSetup,
    inputs: Sequence[Mapping[str, Words]],
    *,
    runs: int = 200,
    seed: int = 0,
    wrong_by: int = 0,
    false_positive_rate: float = FALSE_POSITIVE_RATE,
) -> Comparison:
    """Run the real protocol and the simulator many times, and compare the coalition's views.

    Args:
        setup: the members and the protocol.
        inputs: the true inputs of all members to each sum, the same in every run.
        runs: the number of runs of each.
        seed: the seed of all keys, shares and dummy inputs.
        wrong_by: a number to add to every word of the simulator's z; with another z the views must differ.
        false_positive_rate: the largest probability that equal views are distinguished.
    """
    random = stream(seed)
    own = [{name: each[name] for name in setup.coalition} for each in inputs]
    z: list[Words | None] = [None] * len(inputs)
    if setup.opened:
        z = [np.sum([each[name] for name in setup.honest], axis=0, dtype=np.uint32) for each in inputs]
        z = [each + np.uint32(wrong_by) for each in z if each is not None]
    views = [
        [run(setup, inputs, random) for _ in range(runs)],
        [simulate(setup, own, z, random) for _ in range(runs)],
    ]
    names = [f"{name} [{place}]" for name, words in views[0][0].items() for place in range(len(words))]
    real, ideal = (np.stack([np.concatenate(list(view.values())) for view in each]) for each in views)
    return _compare_words(real, ideal, names, false_positive_rate)


def _compare_words(real: Words, ideal: Words, names: list[str], false_positive_rate: float) -> Comparison:
    """Compare every word and every difference of two, each with its bits in both orders."""
    pairs = np.array(list(combinations(range(len(names)), 2)))
    labels = [*names, *(f"{names[i]} − {names[j]}" for i, j in pairs)]
    both = [np.concatenate([each, each[:, pairs[:, 0]] - each[:, pairs[:, 1]]], axis=1) for each in (real, ideal)]
    gaps = np.maximum(_gaps(*both), _gaps(*(_reversed_bits(each) for each in both)))
    runs, measurements = len(real), 2 * len(labels)
    threshold = _threshold(runs, false_positive_rate / measurements)
    order = np.argsort(-gaps, kind="stable")
    where = tuple(labels[i] for i in order if gaps[i] >= threshold)
    return Comparison(runs, measurements, threshold, false_positive_rate, float(gaps.max()), where)


def _threshold(runs: int, false_positive_rate: float) -> float:
    """Return the smallest gap that one measurement reaches with at most this probability; above 1 if there is none."""
    paths = math.comb(2 * runs, runs)
    reached = (k for k in range(1, runs + 1) if 2 * math.comb(2 * runs, runs - k) / paths <= false_positive_rate)
    return next(reached, runs + 1) / runs


def _gaps(real: Words, ideal: Words) -> npt.NDArray[np.float64]:
    """Return the Kolmogorov–Smirnov statistic of every column.

    `scipy.stats.ks_2samp` gives the same numbers, column by column, with a p-value each: too slow for thousands.
    """
    runs = len(real)
    together = np.concatenate([real, ideal])
    order = np.argsort(together, axis=0, kind="stable")
    values = np.take_along_axis(together, order, axis=0)
    steps = np.cumsum(np.where(order < runs, 1, -1), axis=0)
    last = np.ones_like(values, dtype=bool)  # of tied values, only the last one counts
    last[:-1] = values[1:] != values[:-1]
    gaps: npt.NDArray[np.float64] = np.abs(np.where(last, steps, 0)).max(axis=0) / runs
    return gaps


def _reversed_bits(words: Words) -> Words:
    octets = np.ascontiguousarray(words.astype(">u4")).view(np.uint8)
    mirrored = np.array([int(f"{each:08b}"[::-1], 2) for each in range(256)], dtype=np.uint8)[octets]
    return mirrored.view("<u4").reshape(words.shape)
