"""Measure a lower bound of ε with canaries, for claims of 0.5, 2 and 8: `python benchmarks/canaries.py`.

`cgd.audit.canaries` trains with the code of the product. For each claim there are 20 seeds, with 20,000 canaries each.
Then protections are removed: noise, half of it, its independence, clipping, and the noise of one member more than t.
With each of these, the bound must be above the claim. `results/canaries.json` has the figures, and
`tests/audit/test_canaries.py` repeats a part of them.
"""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from cgd.audit.canaries import ONE_RUN_CONFIDENCE, CanaryAudit, audit_canaries, judge_all
from cgd.dp.sampler import IntegerGaussian
from cgd.optim import record_gradients, record_norms

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = Path(__file__).parent.parent / "results" / "canaries.json"
CLAIMS = (0.5, 2.0, 8.0)
SEEDS = 20
RUNS = 20
CONFIDENCE = 1 - 1e-6
# The trainings of 1000 canaries with which a missing protection is noticed, by claim.
MUTATION_RUNS = {0.5: 100, 2.0: 40, 8.0: 8}
FORGETFUL, FORGETFUL_RUNS = "one member more than t leaves out its noise", {0.5: 500, 2.0: 40, 8.0: 8}

draw, clipped_sums = IntegerGaussian.draw, record_norms.clipped_sums


def no_noise() -> AbstractContextManager[Any]:
    """Remove the noise."""
    return patch.object(IntegerGaussian, "draw", lambda self, count: draw(self, count) * 0)


def half_noise() -> AbstractContextManager[Any]:
    """Halve the noise."""
    return patch.object(IntegerGaussian, "draw", lambda self, count: draw(self, count) // 2)


def repeated_noise() -> AbstractContextManager[Any]:
    """Use the noise of the first step in all steps of a member, which has a thread."""
    kept: dict[tuple[int, int], Any] = {}

    def repeat(self: IntegerGaussian, count: int) -> Any:
        return kept.setdefault((threading.get_ident(), count), draw(self, count)).copy()

    return patch.object(IntegerGaussian, "draw", repeat)


def no_clipping() -> AbstractContextManager[Any]:
    """Remove the clipping."""

    def unclipped(finished: Any, _clip: float, scale: float, *, plain: bool) -> Any:
        return clipped_sums(finished, 1e9, scale, plain=plain)

    return patch.object(record_gradients, "clipped_sums", unclipped)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no noise": no_noise,
    "half of the noise": half_noise,
    "the same noise in every step": repeated_noise,
    "no clipping": no_clipping,
    FORGETFUL: nullcontext,
}


def audit_mutation(name: str, epsilon: float, runs: int, confidence: float = CONFIDENCE) -> CanaryAudit:
    """Return the result of three members without a protection."""
    with MUTATIONS[name]():
        return audit_canaries(
            epsilon=epsilon,
            members=3,
            forgetful=2 if name == FORGETFUL else None,
            runs=runs,
            confidence=confidence,
        )


def figures(audit: CanaryAudit) -> dict[str, float]:
    """Return the bounds of an audit."""
    return {
        "canaries": audit.inside + audit.outside,
        "epsilon_lower": round(audit.epsilon_lower, 3),
        "epsilon_lower_one_run": round(audit.epsilon_lower_one_run, 3),
    }


def measure(console: Console) -> dict[str, Any]:
    """Return all figures."""
    claims: dict[str, Any] = {}
    mutations: dict[str, dict[str, Any]] = {}
    for epsilon in CLAIMS:
        audits = []
        for seed in range(SEEDS):
            audits.append(audit_canaries(epsilon=epsilon, runs=RUNS, seed=seed, confidence=CONFIDENCE))
            console.print(f"ε = {epsilon:g}, seed {seed}: {audits[-1].epsilon_lower:.3f}")
        claims[f"{epsilon:g}"] = {"seeds": [figures(each) for each in audits], "all": figures(judge_all(audits))}
    for name in MUTATIONS:
        mutations[name] = {}
        for epsilon in CLAIMS:
            runs = (FORGETFUL_RUNS if name == FORGETFUL else MUTATION_RUNS)[epsilon]
            mutations[name][f"{epsilon:g}"] = figures(audit_mutation(name, epsilon, runs))
            console.print(f"{name}, ε = {epsilon:g}: {mutations[name][f'{epsilon:g}']['epsilon_lower']:.3f}")
    return {
        "confidence": CONFIDENCE,
        "confidence_one_run": ONE_RUN_CONFIDENCE,
        "claims": claims,
        "mutations": mutations,
    }


def main() -> None:
    """Measure, print a table and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the figures")
    out: Path = parser.parse_args().out
    console = Console()
    found = measure(console)
    table = Table("claimed ε", "lower bound, 20 seeds", "together", *MUTATIONS)
    for claim, each in found["claims"].items():
        bounds = [seed["epsilon_lower"] for seed in each["seeds"]]
        removed = [f"{found['mutations'][name][claim]['epsilon_lower']:.2f}" for name in MUTATIONS]
        together = f"{each['all']['epsilon_lower']:.2f}"
        table.add_row(claim, f"{min(bounds):.2f} to {max(bounds):.2f}", together, *removed)
    console.print(table)
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
