"""Attack the ways to train: start, batches, local steps, origins. `python benchmarks/training_modes.py` (a minute).

Five participants have 40 digits each; two of them are honest, three collude and only watch twenty rounds. Each seed
draws the division, the origins and the batches. The attacks are those of `cgd audit SPEC` without noise. Where rounds
sum updates of local steps, the coalition divides them by their size; the attacks are not adapted otherwise, so a
failure shows little. `results/training-modes.json` has the values, and the threat model the table.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.markdown import Markdown

from cgd.audit.registry import get
from cgd.audit.results import AttackResult
from cgd.audit.spec_source import observed
from cgd.experiments.spec import RunSpec
from cgd.files import write_file
from cgd.simulation.local_training import LocalTraining

FILE = Path(__file__).parent.parent / "results" / "training-modes.json"
SEEDS = range(5)
ROUNDS, HONEST = 20, 2
RUN = RunSpec(data="digits", samples=200, rows=5, hidden=(32,), steps=ROUNDS, lr=0.5)
MODES = {
    "gradients, start of zeros": replace(RUN, start="zeros"),
    "gradients, public start": RUN,
    "4 batches": replace(RUN, batches=4),
    "10 batches": replace(RUN, batches=10),
    "updates of 20 steps on all records": replace(RUN, lr=1.0, local=LocalTraining(epochs=20, lr=0.05)),
    "updates of an epoch of 4 batches": replace(RUN, lr=1.0, local=LocalTraining(batch=10, lr=0.05)),
    "gradients, fresh origins": replace(RUN, fresh_origins=True),
    "updates of an epoch of 4 batches, fresh origins": replace(
        RUN, lr=1.0, local=LocalTraining(batch=10, lr=0.05), fresh_origins=True
    ),
    "gradients, δ 0.5": replace(RUN, delta=0.5),
    "gradients, fresh origins, δ 0.5": replace(RUN, delta=0.5, fresh_origins=True),
}
ATTACKS = ("records", "membership", "labels")

Values = dict[str, dict[str, list[float]]]


def measure() -> Values:
    """Return the values of all attacks by mode and name of the attack, one for each seed."""
    found: Values = {}
    for mode, spec in MODES.items():
        values: dict[str, list[float]] = defaultdict(list)
        for seed in SEEDS:
            view = observed(replace(spec, seed=seed), "cgd", rounds=ROUNDS, honest=HONEST)
            for attack in ATTACKS:
                for result in get(attack).run_on(*view):
                    if isinstance(result, AttackResult):
                        values[f"{attack}, {result.attack}, {result.metric}"].append(result.value)
        found[mode] = dict(values)
    return found


def table(found: Values) -> str:
    """Return the results as Markdown: means over the seeds; of several methods for membership, the best one."""
    lines = [
        "| Sums of | Records read, most in a draw | Membership, AUC | Labels wrong |",
        "|---|--:|--:|--:|",
    ]
    for mode, values in found.items():
        of = {each: [mine for name, mine in values.items() if name.startswith(f"{each},")] for each in ATTACKS}
        (records,), (labels,) = of["records"], of["labels"]
        membership = max(fmean(each) for each in of["membership"])
        lines.append(
            f"| {mode} | {100 * fmean(records):.1f} %, {100 * max(records):.1f} % | {membership:.2f} | "
            f"{100 * fmean(labels):.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, store the values and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the values")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    found = measure()
    write_file(out, json.dumps(found, indent=0) + "\n")
    Console(width=120).print(Markdown(table(found)))


if __name__ == "__main__":
    main()
