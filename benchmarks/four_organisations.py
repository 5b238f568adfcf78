"""Attack four organisations with a table of tumours, with and without noise: `python benchmarks/four_organisations.py`.

455 of the 569 records of the demo's data set are divided among four organisations, which train the usual model of
tables (32 ReLU units, δ = 0.02) in 50 steps. The smallest one attacks the 410 records of the others: it watches
(`records`, `membership`), or it steers the first layer (`traps`). With differential privacy, t is 1. The other 114
records are the fresh ones of membership inference. `results/four-organisations.json` has the figures of 20 seeds, each
of which draws the division, the origins and the noise; `tests/audit/test_four_organisations.py` repeats some of them.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cgd.audit.attacks import membership, records, traps
from cgd.audit.embedded import samples, split
from cgd.audit.scenario import Scenario
from cgd.audit.schemes import observe
from cgd.federation.config import FOR_PRIVATE_TABLES
from cgd.federation.model_section import Model
from cgd.tabular.models import build

if TYPE_CHECKING:
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme

FILE = Path(__file__).parent.parent / "results" / "four-organisations.json"
RECORDS = {"north": 182, "east": 137, "south": 91, "west": 45}
ATTACKER = "west"
SCHEMES: tuple[Scheme, ...] = ("cgd", "dp8", "dp2", "dp0.5")
SEEDS = 20
LEARNING_RATE = 0.5
MODEL = Model("mlp", (32,))
FEATURES, CLASSES = 30, 2


def scenario(seed: int) -> tuple[Scenario, Sample]:
    """Return the training of the four organisations, and the fresh records."""
    data, fresh = split(samples("breast-cancer", seed), RECORDS)
    network = partial(build, MODEL, FEATURES, CLASSES)
    steps = FOR_PRIVATE_TABLES.steps
    return Scenario(data, network, [ATTACKER], rounds=steps, lr=LEARNING_RATE, delta=MODEL.delta, seed=seed), fresh


def attack(scheme: Scheme, seed: int) -> dict[str, float]:
    """Return the numbers of records that come out, and the AUC of membership inference."""
    passive, fresh = scenario(seed)
    view, truth = observe(passive, scheme)
    steered, probe = traps.steer(passive, scheme)
    steered_view, _ = observe(steered, scheme)
    others = len(truth.all_y)
    found = {
        "records by watching": others * records.analytic_recovery(view, truth).value,
        "records by steering": others * traps.read_traps(steered_view, truth, probe.armed_rounds).value,
    }
    auc = {
        "AUC by the span": membership.span_membership,
        "AUC by leverage": membership.leverage_membership,
        "AUC by the gradient": membership.gradient_membership,
    }
    return {name: round(value) for name, value in found.items()} | {
        name: round(method(view, truth, fresh).value, 4) for name, method in auc.items()
    }


def measure(console: Console) -> dict[str, list[dict[str, float]]]:
    """Return the results of all seeds by scheme."""
    results: dict[str, list[dict[str, float]]] = {}
    for scheme in SCHEMES:
        for seed in range(SEEDS):
            results.setdefault(scheme, []).append(attack(scheme, seed))
            console.print(scheme, seed, results[scheme][-1])
    return results


def main() -> None:
    """Attack, print a table and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the figures")
    out: Path = parser.parse_args().out
    console = Console()
    found = measure(console)
    table = Table("scheme", *next(iter(found.values()))[0])
    for scheme, draws in found.items():
        spans: list[list[Any]] = [[each[name] for each in draws] for name in draws[0]]
        table.add_row(scheme, *(f"{min(each):g} to {max(each):g}" for each in spans))
    console.print(table)
    content = {"records": sum(RECORDS.values()) - RECORDS[ATTACKER], "schemes": found}
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
