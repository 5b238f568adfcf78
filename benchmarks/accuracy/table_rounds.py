"""Rounds of a training on tables: the default, Adam on sums of gradients, and local epochs.

    python benchmarks/accuracy/table_rounds.py [--dataset adult]

Five organisations train one hidden layer of 32 together, as in `organisations.py`. For each way and split: the
validation losses of all, the round after which they were lowest, the rounds until the training stopped, and the mean
AUC on held-out records of all organisations' confined models. The table has the rounds until the loss is within 1 % of
the lowest one of Adam. Finished runs are stored, so a program that was stopped continues.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from covered_tables import read_cells, with_categories
from table_runs import StoredRuns

import cgd
from cgd.experiments.organisations import split
from cgd.federation.config import FOR_TABLES
from cgd.federation.model_section import Model
from cgd.tabular.model import ConfinedModel
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train

OUT = Path("results/tables/rounds.json")
DATASETS, SEEDS, MODEL = ("adult", "credit-default"), (0, 1, 2), Model("mlp", (32,))
LOCAL = replace(
    FOR_TABLES,
    optimizer="sgd",
    lr=1.0,
    momentum=0.5,
    batches=8,
    local_epochs=2,
    local_lr=0.05,
    steps=60,
    validate_every=2,
)
TOLERANCE = 0.01
WAYS = {"Adam": FOR_TABLES, "local epochs": LOCAL}


def run(dataset: str, way: str, seed: int) -> dict[str, Any]:
    """Train together on one split; return the rounds and the mean AUC."""
    organisations = split(dataset, seed)
    data, tables = replace(organisations.data, rare=1), organisations.tables
    settings = TabularSettings(with_categories(data, np.concatenate(list(tables.values()))), MODEL, WAYS[way])
    test = read_cells(data, organisations.held_out)

    def member(peers: cgd.Peers, name: str) -> tuple[dict[int, float | None], int, float]:
        peers.seed = f"{name} {seed}".encode().ljust(32)
        trained = train(peers, settings, read_cells(data, tables[name]))
        model = ConfinedModel.from_training(trained, settings, {})
        losses = {each.step: each.everyone_validation_loss for each in trained.evaluations}
        return losses, trained.evaluations[-1].best_step, model.scores(model.outputs(test), test)["auc"]

    with cgd.local_peers(len(tables)) as members:
        found = members.run(member, list(tables))
    losses, best, _ = found[0]
    return {
        "losses": {str(step): round(loss or 0.0, 6) for step, loss in losses.items()},
        "best": best,
        "rounds": max(losses),
        "auc": round(fmean(auc for *_, auc in found), 4),
    }


def first_within(losses: dict[str, float], lowest: float) -> int:
    """Return the first round after which a loss exceeds another one by at most `TOLERANCE`."""
    return next(int(step) for step, loss in losses.items() if loss <= (1 + TOLERANCE) * lowest)


def row(dataset: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the figures of a data set as a row of the table in docs/tables.md."""
    adam, local = ([results[f"{dataset}, {way}, split {seed}"] for seed in SEEDS] for way in WAYS)
    lowest = [min(each["losses"].values()) for each in adam]
    cells = []
    for found in (adam, local):
        first = [first_within(each["losses"], loss) for each, loss in zip(found, lowest, strict=True)]
        cells += [f"{min(first)} to {max(first)}", f"{fmean(each['auc'] for each in found):.4f}"]
    return f"| {dataset} | {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, and print the figures of docs/tables.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dataset", action="append", choices=DATASETS, help="may be repeated; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = StoredRuns(options.out)
    for dataset in options.dataset or DATASETS:
        for way in WAYS:
            for seed in SEEDS:
                stored.get(f"{dataset}, {way}, split {seed}", partial(run, dataset, way, seed))
        print(row(dataset, stored.results), flush=True)


if __name__ == "__main__":
    main()
