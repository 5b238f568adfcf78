"""Compare the model that `cgd schema` suggests for small tables with others: `python benchmarks/suggested_models.py`.

Four members train on 100 to 2,000 records of public tables with the default settings of tables (`small_tables.py`).
For every candidate, the AUC on records that nobody trained on is measured, or R² in a regression. The models that
`cgd schema` suggests to the members are attacked by the smallest member: it watches all 300 steps, without the early
stopping that ends most trainings before; or it steers the first layer (`cgd.audit.attacks.traps`), and reports
validation losses that keep falling, so that the training goes on. Adam moves a weight by at most the step size, so 300
steps are few to steer by; some trainings have 3,000. `results/suggested-models.json` has the results;
`tests/tabular/test_model_choice.py` compares them with what is promised.

The runs are stored one by one, and a program that was stopped continues. Adult and credit default are read from the
folder in CGD_DATA.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import small_tables
import torch
from rich.console import Console
from rich.table import Table

from cgd.audit.attacks.records import count_exact
from cgd.audit.attacks.traps import TrapProbe
from cgd.audit.steering import Steering
from cgd.audit.view import gradient_rows
from cgd.federation.config import FOR_TABLES
from cgd.federation.model_section import Model
from cgd.files import write_file
from cgd.optim.displacement import AdamRule
from cgd.tabular.model_choice import choose_model

if TYPE_CHECKING:
    from small_tables import Members

FILE = Path(__file__).parent.parent / "results" / "suggested-models.json"
RECORDS = {
    "breast-cancer": (100, 200, 455),
    "diabetes": (100, 200, 353),
    "credit-default": (100, 200, 500, 1000, 2000),
    "adult": (100, 200, 500, 1000, 2000),
}
CANDIDATES = {
    "logistic": Model("logistic"),
    **{f"relu {units}": Model("mlp", (units,)) for units in (8, 16, 32)},
    **{f"tanh {units}": Model("mlp", (units,), "tanh") for units in (8, 16, 32)},
    "gelu 16": Model("mlp", (16,), "gelu"),
    "sigmoid 16": Model("mlp", (16,), "sigmoid"),
}
ATTACKED_SEEDS = 10
LONG_STEPS, LONG_SEEDS = 3000, 3
LONG = (("breast-cancer", 455, "tanh 8"), ("breast-cancer", 455, "gelu 16"), ("diabetes", 353, "sigmoid 16"))
"""Trainings with more steps that are steered."""
TRAP_WEIGHT, LONG_TRAP_WEIGHT, MAX_DISTANCE, DAMPING = 0.25, 5.0, 0.02, 20.0


class DampedSteering(Steering):
    """Steering of Adam by numbers that are proportional to the distance when it is small, to stop at the target."""

    def vector(self, number: int, distance: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the same in every round
        """Return the vector of a round: Adam moves a weight by at most the step size, however large the sum is."""
        return self.limit * (distance / (DAMPING * FOR_TABLES.lr)).clamp(-1, 1)


def suggested(members: Members) -> list[str]:
    """Return the candidates that `cgd schema` suggests to the members, each of which knows its own records only."""
    parts = [round(part * members.records) for part in small_tables.PARTS.values()]
    models = [choose_model(records, regression=not members.classes) for records in parts]
    return [name for name, each in CANDIDATES.items() if each in models]


def seeds(records: int) -> int:
    """Return the number of seeds of a setting: scores of few records vary most with those that are drawn."""
    return 40 if records <= 100 else 20 if records < 1000 else 10


def score(table: str, records: int, candidate: str, seed: int) -> float:
    """Return the AUC or R² of a candidate."""
    members = small_tables.draw(table, records, seed)
    return round(small_tables.train(members, CANDIDATES[candidate], seed).score, 4)


def attack(table: str, records: int, candidate: str, seed: int) -> dict[str, int]:
    """Return the numbers of records that the smallest member reads by watching and by steering."""
    members = small_tables.draw(table, records, seed)
    watched = small_tables.train(members, CANDIDATES[candidate], seed, steps=FOR_TABLES.steps)
    return {
        "others": len(watched.truth.all_y),
        "watching": count_exact(gradient_rows(watched.view), watched.truth),
        "steering": steer(table, records, candidate, seed, FOR_TABLES.steps, TRAP_WEIGHT),
    }


def steer(table: str, records: int, candidate: str, seed: int, steps: int, weight: float) -> int:
    """Return the number of records in the rows of a steered training, and in the differences of successive rows."""
    members, model = small_tables.draw(table, records, seed), CANDIDATES[candidate]
    own, _ = members.own(small_tables.ATTACKER)
    units = model.layers[0] if model.layers else members.outputs
    limit = len(own) / float(members.weight.sum()) * FOR_TABLES.bound
    steering = DampedSteering(lambda _: AdamRule(FOR_TABLES.lr), limit)
    others = len(members.truth().all_y)
    probe = TrapProbe(own, others, units, steering, weight=weight, tolerance=MAX_DISTANCE)
    trained = small_tables.train(members, model, seed, steps=steps, probe=probe)
    rows = gradient_rows(trained.view)
    return count_exact(torch.cat([rows, rows[units:] - rows[:-units]]), trained.truth)


def steer_long(table: str, records: int, candidate: str, seed: int) -> int:
    """Return the number of records that come out of a steered training with many steps."""
    return steer(table, records, candidate, seed, LONG_STEPS, LONG_TRAP_WEIGHT)


def main() -> None:
    """Run or continue, store the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the results")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"scores": {}, "attacks": {}}
    settings = [(table, records) for table, sizes in RECORDS.items() for records in sizes]

    def add(runs: list[Any], seed: int, run: Any, *arguments: Any) -> None:
        if len(runs) == seed:
            runs.append(run(*arguments, seed))
            write_file(out, json.dumps(found, indent=0) + "\n")

    for seed in range(max(seeds(records) for _, records in settings)):
        for table, records in settings:
            scores = found["scores"].setdefault(f"{table}, {records} records", {})
            for candidate in CANDIDATES if seed < seeds(records) else ():
                add(scores.setdefault(candidate, []), seed, score, table, records, candidate)
    for seed in range(ATTACKED_SEEDS):
        for table, records in settings:
            attacks = found["attacks"].setdefault(f"{table}, {records} records", {})
            for candidate in suggested(small_tables.draw(table, records, 0)):
                add(attacks.setdefault(candidate, []), seed, attack, table, records, candidate)
    for seed in range(LONG_SEEDS):
        for table, records, candidate in LONG:
            name = f"{table}, {records} records, {candidate}"
            add(found.setdefault("long", {}).setdefault(name, []), seed, steer_long, table, records, candidate)
    Console(width=150).print(summary(found))


def summary(found: dict[str, Any]) -> Table:
    """Return a table: the mean score of every candidate below the best, and what was read from the suggested one."""
    table = Table("setting", "best", *CANDIDATES, "watching", "steering", box=None)
    for setting, scores in found["scores"].items():
        means = {candidate: fmean(each) for candidate, each in scores.items()}
        best = max(means.values())
        attacks = [run for runs in found["attacks"].get(setting, {}).values() for run in runs]
        read = [f"{sum(each[how] for each in attacks)} of {sum(each['others'] for each in attacks):,}"
                for how in ("watching", "steering")]  # fmt: skip
        table.add_row(setting, f"{best:.4f}", *(f"{means[each] - best:.4f}" for each in CANDIDATES), *read)
    return table


if __name__ == "__main__":
    main()
