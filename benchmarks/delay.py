"""Measure what a delay costs in accuracy and regret: `python benchmarks/delay.py`.

The files of `benchmarks/delay` are specs of `cgd simulate`. Runs are stored in `results/delay` one by one, and a
program that was stopped continues. Two tables of `docs/simulation.md` show what is stored. `benchmarks/delay_time.py`
measures the time of a step.

The data sets are read from the folder in CGD_DATA.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from cgd.experiments import experiment_file, reproduce, theory
from cgd.experiments.runner import ResultStore
from cgd.experiments.tables import ResultTable
from cgd.files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.experiment_file import Experiment

ROOT = Path(__file__).parent.parent
SPECS, RESULTS, PAGE = ROOT / "benchmarks" / "delay", ROOT / "results" / "delay", ROOT / "docs" / "simulation.md"
BEGIN, END = "<!-- figures: make delay-results -->", "<!-- end of figures -->"
SCALE = "paper"


def accuracy(entry: EntryResult) -> str:
    """Return the mean accuracy over the evaluated participants at the end, in percent."""
    return f"{100 * fmean(entry.results[0].last.accuracy):.1f}"


def regret(entry: EntryResult) -> str:
    """Return the regret of the worst participant, the excess loss at the end, and the sum of the bound's terms."""
    worst = theory.WorstCase.of(entry.results)
    return f"{worst.regret[-1]:.3f}, {worst.gap:.3f}, {sum(worst.terms):.3g}"


SHOWN: dict[str, Callable[[EntryResult], str]] = {"accuracy": accuracy, "regret": regret}


def table(experiment: Experiment) -> ResultTable:
    """Return a row for each group of runs, and a column for each delay."""
    found = reproduce.stored_results(experiment, SCALE, ResultStore(RESULTS)).found
    rows: dict[str, list[str]] = {}
    for each in found:
        rows.setdefault(each.entry.group, []).append(SHOWN[experiment.name](each) if each.results else "not run")
    delays = dict.fromkeys(each.entry.label for each in found)
    return ResultTable(experiment.title, ("", *delays), tuple((group, *cells) for group, cells in rows.items()))


def read() -> list[Experiment]:
    """Return the experiments."""
    return [experiment_file.read(SPECS / f"{name}.toml") for name in SHOWN]


def with_figures(page: str) -> str:
    """Return the page with the tables of the stored results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [f"{each.about.strip()}\n\n{table(each).to_markdown()}" for each in read()]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def main() -> None:
    """Run what is missing, and update the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="run nothing, update the page")
    if not parser.parse_args().page:
        for experiment in read():
            reproduce.run(experiment, SCALE, ResultStore(RESULTS), None, lambda *_: lambda *_: None)
    write_file(PAGE, with_figures(PAGE.read_text()))


if __name__ == "__main__":
    main()
