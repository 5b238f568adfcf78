"""Estimate the gradient of a member that is absent for some rounds, with a quorum. `python benchmarks/absences.py`.

Five participants of the attack `dropout`: three honest ones with 40 digits each, and two that collude. After ten
rounds, honest ones are absent for single rounds and come back: one of them, or all three in turn, as if somebody cut
their connections. The coalition fits the sums (`cgd.audit.attacks.dropout.absent_gradient`). At least four members are
in every sum; the last part has a quorum of three, below what two colluders permit, and two honest members cut off.
`results/absences.json` has the values, and the threat model the table. It takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markdown import Markdown

from cgd.audit.attacks import dropout
from cgd.audit.schemes import observe
from cgd.files import write_file

if TYPE_CHECKING:
    from cgd.audit.view import Scheme

FILE = Path(__file__).parent.parent / "results" / "absences.json"
SEEDS = range(5)
ABSENCES = (1, 4, 16, 64)
IN_TURN = (1, 4, 16)
RATES = (0.1, 0.02)
BATCHES = {"all records": None, "10 of 40 records": 10}
PRIVATE: tuple[Scheme, ...] = ("dp8", "dp2", "dp0.5")
PRIVATE_ABSENCES = 16

Values = dict[str, list[float]]


def one(absences: int, batch: int | None, lr: float, seed: int, scheme: Scheme = "cgd") -> list[float]:
    """Return the relative error of the estimate, if one participant is absent in every other round."""
    made = dropout.absence_scenario(absences, batch=batch, lr=lr, seed=seed)
    return [dropout.difference_of_absences(*observe(made, scheme), dropout.LEAVER).value]


def in_turn(absences: int, batch: int | None, lr: float, seed: int) -> list[float]:
    """Return the relative errors of the estimates of all three, each of which is absent in turn."""
    made = dropout.absence_scenario(absences, in_turn=True, batch=batch, lr=lr, seed=seed)
    view, truth = observe(made, "cgd")
    return [dropout.difference_of_absences(view, truth, name).value for name in view.honest]


def alone(seed: int) -> list[float]:
    """Return the relative error if colluders and one honest participant are a quorum, and the others are cut off."""
    made = dropout.scenario(seed=seed)
    number = dropout.FULL_ROUNDS
    cut = replace(made, dropouts={number: ("honest-2", "honest-3")}, rounds=number + 1)
    view, truth = observe(cut, "cgd")
    found = view.samples_in(number) * view.honest_sum(number).double() / len(truth.y[dropout.LEAVER])
    return [dropout.relative_error(view, truth, dropout.LEAVER, number, found)]


def measure() -> Values:
    """Return all relative errors, one for each seed, and in turn for each honest participant."""
    found: Values = {}
    for lr in RATES:
        for records, batch in BATCHES.items():
            for absences in ABSENCES:
                name = f"one, {records}, {lr}, {absences}"
                found[name] = [each for seed in SEEDS for each in one(absences, batch, lr, seed)]
            for absences in IN_TURN:
                name = f"in turn, {records}, {lr}, {absences}"
                found[name] = [each for seed in SEEDS for each in in_turn(absences, batch, lr, seed)]
    for scheme in PRIVATE:
        found[f"one, {scheme}, 0.1, {PRIVATE_ABSENCES}"] = [
            each for seed in SEEDS for each in one(PRIVATE_ABSENCES, None, 0.1, seed, scheme)
        ]
    found["alone"] = [each for seed in SEEDS for each in alone(seed)]
    return found


def table(found: Values) -> str:
    """Return the results without noise as Markdown: means of the relative errors."""
    columns = [(lr, records) for lr in RATES for records in BATCHES]
    heads = " | ".join(f"{records}, step size {lr}" for lr, records in columns)
    lines = [f"| Absences of a round | {heads} |", f"|---|{'--:|' * len(columns)}"]
    rows = [("one", absences, f"{absences}, of one member") for absences in ABSENCES]
    rows += [("in turn", absences, f"{absences}, of each of three members") for absences in IN_TURN]
    for kind, absences, text in rows:
        values = [f"{fmean(found[f'{kind}, {records}, {lr}, {absences}']):.2f}" for lr, records in columns]
        lines.append(f"| {text} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, store the values and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the values")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    found = measure()
    write_file(out, json.dumps(found, indent=0) + "\n")
    console = Console(width=120)
    console.print(Markdown(table(found)))
    for name in (*(f"one, {scheme}, 0.1, {PRIVATE_ABSENCES}" for scheme in PRIVATE), "alone"):
        console.print(f"{name}: {min(found[name]):.2g} to {max(found[name]):.2g}")


if __name__ == "__main__":
    main()
