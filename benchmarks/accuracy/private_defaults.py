"""Choose the settings of `[training]` with `[privacy]`: `make privacy-results` runs this first.

Every candidate trains on three quarters of the training records of a data set, and is scored on the last quarter: the
held-out records, with which all published figures are measured, are not used. A candidate's loss against exact
training is the mean over all data sets, models, seeds, accuracy and AUC; the candidate with the smallest one is chosen.
One trusted curator trains (one member, no colluder): only the amount of noise matters here.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import covered_tables
import numpy as np
import torch
from table_runs import METRICS, StoredRuns, sample, scores_alone

from cgd.federation.config import FOR_PRIVATE_TABLES, FOR_TABLES, Training
from cgd.federation.model_section import Model
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular.settings import TabularSettings

if TYPE_CHECKING:
    from table_runs import Scores

OUT = Path("results/privacy/defaults.json")
MODELS = {"logistic": Model("logistic"), "mlp": Model("mlp", (32,))}
SETTINGS = (("adult", 4000, 1.0), ("adult", 24_000, 1.0), ("credit-default", 4000, 1.0), ("tumours", 340, 3.0))
"""Data set, number of records, ε."""
PRIVACY_DELTA = 1e-6
SEEDS = (0, 1)
EXACT = "exact"
CANDIDATES = tuple(
    Training(steps=steps, lr=lr, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0, patience=0)
    for optimizer, lengths, rates in (("adam", (50, 100, 200), (0.02, 0.03, 0.05)), ("sgd", (50, 100), (1.0, 4.0)))
    for steps, lr in product(lengths, rates)
)


def describe(training: Training) -> str:
    """Return the settings that differ between the candidates."""
    momentum = f" with momentum {training.momentum:g}" if training.momentum else ""
    return f"{training.optimizer}{momentum}, {training.steps} steps, lr {training.lr:g}"


def losses(results: dict[str, Scores]) -> dict[str, list[float]]:
    """Return the losses of every candidate in all runs, in points, from the stored runs; the best candidate first."""
    found: dict[str, list[float]] = {}
    for run, scores in results.items():
        setting, _, candidate = run.partition(" | ")
        if candidate != EXACT:
            exact = results[f"{setting} | {EXACT}"]
            mean = np.mean([100 * (exact[metric] - scores[metric]) for metric in METRICS])
            found.setdefault(candidate, []).append(float(mean))
    return dict(sorted(found.items(), key=lambda item: fmean(item[1])))


def measure(runs: StoredRuns) -> None:
    """Train all candidates in all settings."""
    for (dataset, count, epsilon), (kind, model), seed in product(SETTINGS, MODELS.items(), SEEDS):
        table = covered_tables.load(dataset)
        order = np.random.default_rng(12345).permutation(table.training.rows)
        last = np.isin(np.arange(len(order)), order[: len(order) // 4])
        records, test = sample(table.training.take(~last), count, seed), table.training.take(last)
        exact = TabularSettings(table.data, model, FOR_TABLES)
        private = replace(exact, privacy=PrivacySection(epsilon, PRIVACY_DELTA, colluders=0))
        trained = {EXACT: exact} | {describe(each): replace(private, training=each) for each in CANDIDATES}
        for name, settings in trained.items():
            run = partial(scores_alone, settings, records, test, f"defaults {seed}")
            runs.get(f"{dataset}, {count} records, epsilon {epsilon:g}, {kind}, seed {seed} | {name}", run)


def main() -> None:
    """Run or continue; print the candidates in the order of their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = StoredRuns(options.out)
    measure(runs)
    for candidate, each in losses(runs.results).items():
        print(f"{candidate}: {fmean(each):.2f} points")
    print(f"`cgd federation new` writes {describe(FOR_PRIVATE_TABLES)}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
