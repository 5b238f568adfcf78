"""Public tables split over five organisations, trained with the whole private pipeline: `make private-table-results`.

    python benchmarks/accuracy/private_organisations.py [--out results/private-tables] [--exact results/tables]

Splits, seeds, models and held-out records are those of organisations.py, whose stored results are the exact training
and the training alone that private models are compared with. The schema has ranges and categories (covered_tables.py).
Settings are those that `cgd federation new` writes. Every finished run is stored; the same command continues.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from covered_tables import covered, read_cells
from organisations import MODELS, SEEDS
from private_defaults import PRIVACY_DELTA, describe
from table_runs import StoredRuns, scores_together

from cgd.experiments.organisations import split
from cgd.federation.config import FOR_PRIVATE_TABLES
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular.settings import TabularSettings

DATASETS = ("adult", "credit-default")
EPSILONS = (0.5, 1.0, 3.0)
COLLUDERS = (1, 4)


def measure(runs: StoredRuns) -> None:
    """Train everything that is not stored."""
    for dataset, seed in product(DATASETS, SEEDS):
        organisations = split(dataset, seed)
        cells = np.concatenate([*organisations.tables.values(), organisations.held_out])
        data = covered(organisations.data, cells)
        tables = [read_cells(data, each) for each in organisations.tables.values()]
        test, origins = read_cells(data, organisations.held_out), [f"{name} {seed}" for name in organisations.tables]
        for (name, model), epsilon, colluders in product(MODELS.items(), EPSILONS, COLLUDERS):
            section = PrivacySection(epsilon, PRIVACY_DELTA, colluders=colluders)
            settings = TabularSettings(data, model, FOR_PRIVATE_TABLES, privacy=section)
            run = partial(scores_together, settings, tables, test, origins)
            runs.get(run_name(dataset, name, epsilon, colluders, seed), run)


def run_name(dataset: str, model: str, epsilon: float, colluders: int, seed: int) -> str:
    """Return the text under which a run is stored."""
    settings = describe(FOR_PRIVATE_TABLES)
    return f"{dataset}, {model}, epsilon {epsilon:g}, {colluders} colluders, {settings}, seed {seed}"


def section(dataset: str, model: str, runs: dict[str, Any], exact: dict[str, Any]) -> str:
    """Return the results of one data set and one model as Markdown."""
    splits = exact[f"{dataset}, {model}"]
    smallest = list(splits[0]["records"])[-1]
    without = [list(each["confined"].values()) for each in splits]
    lines = [f"### {dataset}, {model}, with privacy", ""]
    lines += ["| ε | t | All models | Loss, points | Smallest organisation |", "|---|---|---|---|---|"]
    for epsilon, colluders in product(EPSILONS, COLLUDERS):
        found = [runs[run_name(dataset, model, epsilon, colluders, seed)] for seed in SEEDS]
        lost = losses(without, found)
        lines.append(
            f"| {epsilon:g} | {colluders} | {cell(list(chain(*found)))} | {np.mean(lost):.2f} "
            f"({min(lost):.2f} to {max(lost):.2f}) | {cell([each[-1] for each in found])} |"
        )
    alone = [each["alone"][smallest] for each in splits]
    lines.append(f"| exact | | {cell(list(chain(*without)))} | | {cell([each[-1] for each in without])} |")
    lines += [f"| alone | | | | {cell(alone)} |", ""]
    better = min(
        each[-1]["accuracy"] - splits[place]["alone"][smallest]["accuracy"]
        for epsilon, colluders in product(EPSILONS, COLLUDERS)
        if epsilon >= 1
        for place, each in enumerate(runs[run_name(dataset, model, epsilon, colluders, seed)] for seed in SEEDS)
    )
    text = (
        f"At ε = 1 and 3, in each of {len(SEEDS)} splits and with both t, the accuracy of the private model of the "
        f"smallest organisation minus that of its model alone is {100 * better:.1f} points or more."
    )
    lines += textwrap.wrap(text, 120)
    return "\n".join(lines) + "\n"


def losses(exact: list[list[dict[str, float]]], private: list[list[dict[str, float]]]) -> list[float]:
    """Return the loss of accuracy in each split, in points, as a mean over the organisations."""
    return [100 * (mean(one, "accuracy") - mean(other, "accuracy")) for one, other in zip(exact, private, strict=True)]


def mean(scores: list[dict[str, float]], metric: str) -> float:
    """Return the mean of a score."""
    return float(np.mean([each[metric] for each in scores]))


def cell(scores: list[dict[str, float]]) -> str:
    """Return mean accuracy and AUC."""
    return f"{100 * mean(scores, 'accuracy'):.2f} % / {mean(scores, 'auc'):.4f}"


HEAD = f"""\
# Private tables over five organisations

Built by `make private-table-results`: mean accuracy / AUC on held-out records over the models of five organisations and
{len(SEEDS)} random splits, with differential privacy for the whole pipeline: statistics, count, steps, one look. δ is
{PRIVACY_DELTA:g}, t the number of colluders; with t = 4 of five members, nothing rests on the others. Loss: accuracy
below that of the exact training of the same split (mean, lowest and highest split). The settings are those that `cgd
federation new` writes ({describe(FOR_PRIVATE_TABLES)}, clip 1); they were chosen on training records
(results/privacy). Exact training and training alone are those of `make table-results`.

"""


def main() -> None:
    """Run or continue; write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/private-tables"))
    parser.add_argument("--exact", type=Path, default=Path("results/tables"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = StoredRuns(options.out / "results.json")
    measure(runs)
    exact = json.loads((options.exact / "results.json").read_text())
    sections = [section(dataset, model, runs.results, exact) for dataset, model in product(DATASETS, MODELS)]
    (options.out / "report.md").write_text(HEAD + "\n".join(sections))
    print("\n".join(sections))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
