"""Can anything tell a coalition's real view from the simulated one?

`compare` runs the protocol and Theorem 2's simulator (`simulator.py`) many times on the same inputs, and measures

- every word of the view;
- the differences of any two words, within a sum and between two sums: what is used twice shows there;
- each of them once as it is and once with its bits in reverse order, so that low bits count as much as high ones.

Each is compared over n runs of both by the largest gap between the two empirical distributions (Kolmogorov–Smirnov).
If there is no difference, every order of the 2n values is equally likely, and by reflection of paths the gap reaches
k/n with a probability of at most 2·C(2n, n − k)/C(2n, n), whatever the distribution is; equal values only make it
smaller. Summed over all measurements this bounds false alarms. The other way round, Hoeffding's inequality says how
large a true gap is found with which probability (`Comparison.found`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from cgd.audit.ideal_simulator import FLAWS, Arrangement, run, simulate, stream
from cgd.audit.view import Finding
from cgd.secagg.messages import SHARINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.audit.ideal_simulator import Flaw, Words
    from cgd.audit.view import Scheme
    from cgd.secagg.messages import Sharing

FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class Comparison:
    """Whether real and simulated views were told apart.

    Attributes:
        runs: of each.
        measurements: how many were compared.
        threshold: the gap from which on a measurement counts; chance gets there, in any of them, with a probability of
            at most `false_alarm`.
        false_alarm: see above.
        gap: the largest that was found.
        where: the measurements beyond the threshold, the largest gap first.
    """

    runs: int
    measurements: int
    threshold: float
    false_alarm: float
    gap: float
    where: tuple[str, ...]

    @property
    def told_apart(self) -> bool:
        """Whether any measurement tells them apart."""
        return bool(self.where)

    def found(self, power: float = 0.99) -> float:
        """How large a true gap in any one measurement is found with at least this probability; above 1 none is."""
        return self.threshold + math.sqrt(2 * math.log(1 / (1 - power)) / self.runs)


def told_apart(
    scheme: Scheme, sharing: Sharing = "expanded", *, flaw: Flaw = "none", runs: int = 200, seed: int = 0
) -> Finding:
    """Two of four members collude over two sums of small gradients; whether their view is told from a simulated one.

    The scheme makes no difference to a secure sum.
    """
    arrangement = Arrangement(sharing=sharing, flaw=flaw, opened=flaw != "seals left out")
    found = compare(arrangement, small_inputs(arrangement, seed=seed), runs=runs, seed=seed)
    return Finding(
        "telling the real view from the simulated one",
        scheme,
        "largest gap between distributions",
        found.gap,
        found.threshold,
        succeeds=found.told_apart,
        setting=f"{sharing} shares, {'the protocol as it is' if flaw == 'none' else flaw}",
        detail=f"{found.measurements} measurements over {found.runs} runs each, false alarms below "
        f"{found.false_alarm:g}; a gap of {found.found():.2f} would be found with probability 0.99",
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Both ways of sharing."""
    return [told_apart(scheme, sharing, seed=seed) for sharing in SHARINGS]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Protocols with a flaw, which must be noticed."""
    flaws = [flaw for flaw in FLAWS if flaw != "none"]
    return [replace(told_apart(scheme, flaw=flaw, seed=seed), must_succeed=True) for flaw in flaws]


def small_inputs(arrangement: Arrangement, *, size: int = 4, sums: int = 2, seed: int = 0) -> list[dict[str, Words]]:
    """Gradients of the usual size in fixed point, of everybody for some sums: far from uniform words."""
    random = np.random.default_rng(seed)
    return [
        {name: (random.normal(0, 0.1, size) * 2**20).astype(np.int64).astype(np.uint32) for name in arrangement.members}
        for _ in range(sums)
    ]


def compare(
    arrangement: Arrangement,
    inputs: Sequence[Mapping[str, Words]],
    *,
    runs: int = 200,
    seed: int = 0,
    wrong_by: int = 0,
    false_alarm: float = FALSE_ALARM,
) -> Comparison:
    """Run the real protocol and the simulator many times, and compare the coalition's views.

    Args:
        arrangement: who sums, and how.
        inputs: everybody's true inputs to each sum: the same in every run.
        runs: of each.
        seed: decides all keys, shares and dummies.
        wrong_by: added to every word of the z that the simulator is given: with another z it must be noticed.
        false_alarm: the largest probability with which equal views may be told apart.
    """
    random = stream(seed)
    own = [{name: each[name] for name in arrangement.coalition} for each in inputs]
    z: list[Words | None] = [None] * len(inputs)
    if arrangement.opened:
        z = [np.sum([each[name] for name in arrangement.honest], axis=0, dtype=np.uint32) for each in inputs]
        z = [each + np.uint32(wrong_by) for each in z if each is not None]
    views = [
        [run(arrangement, inputs, random) for _ in range(runs)],
        [simulate(arrangement, own, z, random) for _ in range(runs)],
    ]
    names = [f"{name} [{place}]" for name, words in views[0][0].items() for place in range(len(words))]
    real, ideal = (np.stack([np.concatenate(list(view.values())) for view in each]) for each in views)
    return _compared(real, ideal, names, false_alarm)


def _compared(real: Words, ideal: Words, names: list[str], false_alarm: float) -> Comparison:
    """Every word and every difference of two, each with its bits in both orders."""
    pairs = np.array(list(combinations(range(len(names)), 2)))
    labels = [*names, *(f"{names[i]} − {names[j]}" for i, j in pairs)]
    both = [np.concatenate([each, each[:, pairs[:, 0]] - each[:, pairs[:, 1]]], axis=1) for each in (real, ideal)]
    gaps = np.maximum(_gaps(*both), _gaps(*(_reversed_bits(each) for each in both)))
    runs, measurements = len(real), 2 * len(labels)
    threshold = _threshold(runs, false_alarm / measurements)
    order = np.argsort(-gaps, kind="stable")
    where = tuple(labels[i] for i in order if gaps[i] >= threshold)
    return Comparison(runs, measurements, threshold, false_alarm, float(gaps.max()), where)


def _threshold(runs: int, false_alarm: float) -> float:
    """The smallest gap that one measurement reaches with at most this probability; above 1 if there is none."""
    paths = math.comb(2 * runs, runs)
    reached = (k for k in range(1, runs + 1) if 2 * math.comb(2 * runs, runs - k) / paths <= false_alarm)
    return next(reached, runs + 1) / runs


def _gaps(real: Words, ideal: Words) -> npt.NDArray[np.float64]:
    """The largest gap between the two empirical distribution functions, of every column."""
    runs = len(real)
    together = np.concatenate([real, ideal])
    order = np.argsort(together, axis=0, kind="stable")
    values = np.take_along_axis(together, order, axis=0)
    steps = np.cumsum(np.where(order < runs, 1, -1), axis=0)
    last = np.ones_like(values, dtype=bool)  # of those that are equal, only the last one counts
    last[:-1] = values[1:] != values[:-1]
    gaps: npt.NDArray[np.float64] = np.abs(np.where(last, steps, 0)).max(axis=0) / runs
    return gaps


def _reversed_bits(words: Words) -> Words:
    octets = np.ascontiguousarray(words.astype(">u4")).view(np.uint8)
    mirrored = np.array([int(f"{each:08b}"[::-1], 2) for each in range(256)], dtype=np.uint8)[octets]
    return mirrored.view("<u4").reshape(words.shape)
