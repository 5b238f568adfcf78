"""Measure the cost of noise in an addend: `make bench`.

The ratio compares the noisy encoding of a vector with the plain one; both alternate in the same run, and the best of
several times counts, because the machine may be busy. Absolute times are for information.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from cgd import FixedPoint
from cgd.dp.mechanism import NoisyEncoding
from cgd.dp.sampler import IntegerGaussian

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MILLISECONDS = 50  # the promised limit of the noise for 10⁶ elements in a ring of 32 bits
CASES = ((32, 1e-3), (32, 1.0), (64, 1e-3))


def best_of(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Return the shortest time of each function in milliseconds; the functions alternate."""
    shortest = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            started = time.perf_counter()
            function()
            shortest[i] = min(shortest[i], 1e3 * (time.perf_counter() - started))
    return shortest


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    elements, repeats = options.elements, options.repeats
    console = Console()
    started = time.perf_counter()
    IntegerGaussian(1e6).draw(1)
    console.print(f"The table of the sampler, once per process: {1e3 * (time.perf_counter() - started):.0f} ms.")

    draws = Table(title=f"Noise for {elements:,} elements")
    for heading in ("σ", "levels", "milliseconds"):
        draws.add_column(heading, justify="right")
    slowest = 0.0
    for bits in (18, 26, 34):
        noise = IntegerGaussian(2.0**bits)
        (milliseconds,) = best_of(repeats, partial(noise.draw, elements))
        slowest = max(slowest, milliseconds)
        draws.add_row(f"2^{bits}", str(1 + len(noise.multipliers)), f"{milliseconds:.1f}")
    console.print(draws)

    values = np.random.default_rng(0).normal(0, 0.01, elements)
    encodings = Table(title=f"Encoding of {elements:,} floats by one of 5 members, 60,000 records, t = 1")
    for heading in ("ring", "μ", "noisy / plain", "noisy, milliseconds", "plain, milliseconds"):
        encodings.add_column(heading, justify="right")
    for ring_bits, mu in CASES:
        noisy = NoisyEncoding(
            clip=1.0,
            denominator=60_000,
            dimension=elements,
            members=5,
            colluders=1,
            max_mu=mu,
            max_records=66_000,
            ring_bits=ring_bits,
        )
        plain = FixedPoint.for_weighted_sum(addends=5, bound=16.0, ring_bits=ring_bits)
        times = best_of(repeats, partial(noisy.encode, values), partial(plain.encode, values, weight=0.2))
        figures = (times[0] / times[1], *times)
        encodings.add_row(str(ring_bits), f"{mu:g}", *(f"{figure:.1f}" for figure in figures))
    console.print(encodings)
    met = "met" if slowest <= MAX_MILLISECONDS else "MISSED"
    console.print(f"Noise: {slowest:.1f} ms, limit {MAX_MILLISECONDS} ms: {met}.", highlight=False)


if __name__ == "__main__":
    main()
