"""Measure what privacy costs: `python benchmarks/accuracy/privacy_costs.py`, by `make privacy-results`.

Models are trained on public tables with the whole private pipeline (statistics, count, steps, one look) and without
noise, by members in one process, and tested on held-out records. For each data set, the ratio s of signal to noise
(`cgd.tabular.privacy_costs`) grows by a factor of four from point to point. Each point is measured with two settings of
the same s: many records with ε = 1, five members and one colluder; and fewer than half with ε = 4, three members and
two colluders. If the theory holds, both have the same loss. Where a data set has too few records for its s, ε is
larger.

Writes runs.json (every run), report.md (the page) and src/cgd/tabular/privacy_costs.json (the table that is shipped).
The same command continues where it was stopped. Data sets that are not in the folder CGD_DATA are an error: the table
must have all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import stdev
from typing import Any

import covered_tables
import numpy as np
import torch
from private_defaults import MODELS, OUT, PRIVACY_DELTA, describe, losses
from table_runs import METRICS, StoredRuns, sample, scores_together

from cgd.federation.config import FOR_PRIVATE_TABLES, FOR_TABLES
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular.privacy_costs import FILE, PrivateSetting
from cgd.tabular.settings import TabularSettings

SHIPPED = Path(__file__).parents[2] / "src" / "cgd" / "tabular" / FILE
SIGNALS = tuple(10.0 * 4**power for power in range(5))
DATASETS = ("adult", "credit-default", "tumours", "digits", "synthetic-10", "synthetic-100")
SEEDS = (0, 1, 2)
VALIDATION = 0.2
MIN_RECORDS, MAX_EPSILON = 100, 20.0
SIDES = {"many records": (1.0, 5, 1), "fewer records": (4.0, 3, 2)}
"""ε, members and colluders of the two settings of each point."""


def setting_for(signal: float, available: int, columns: int, side: str) -> PrivateSetting | None:
    """Return a setting with this s, with the records that there are; None if ε would have to be too large."""
    epsilon, members, colluders = SIDES[side]
    most = math.floor((1 - VALIDATION) * available * (1 if side == "many records" else 0.5))
    one = PrivateSetting(most, columns, members, epsilon, PRIVACY_DELTA, colluders)
    records = max(one.records_for(signal), MIN_RECORDS)
    if records <= most:
        one = replace(one, records=records)
    needed = one.epsilon_for(signal)
    return replace(one, epsilon=needed) if needed <= MAX_EPSILON else None


def measure(runs: StoredRuns) -> list[dict[str, Any]]:
    """Run everything that is not stored; return the losses of every point, model, setting and seed."""
    rows = []
    for dataset, (kind, model), signal, side in product(DATASETS, MODELS.items(), SIGNALS, SIDES):
        table = covered_tables.load(dataset)
        one = setting_for(signal, table.training.rows, len(table.data.columns), side)
        if one is None:
            continue
        count = round(one.records / (1 - VALIDATION))
        for seed in SEEDS:
            chosen = sample(table.training, count, seed)
            parts = [sample_part(chosen, part, one.members) for part in range(one.members)]
            seeds = [f"{seed} {part}" for part in range(one.members)]
            section = PrivacySection(one.epsilon, PRIVACY_DELTA, colluders=one.colluders)
            settings = {
                "exact": TabularSettings(table.data, model, FOR_TABLES),
                "private": TabularSettings(table.data, model, FOR_PRIVATE_TABLES, privacy=section),
            }
            name = f"{dataset}, {kind}, {count} records, {one.members} members, seed {seed}"
            noise = f", epsilon {one.epsilon:.4g}, {one.colluders} colluders, {describe(FOR_PRIVATE_TABLES)}"
            found = {
                what: runs.get(
                    f"{name}{noise if what == 'private' else ''} | {what}",
                    lambda: mean_scores(scores_together(settings[what], parts, table.held_out, seeds)),  # noqa: B023
                )
                for what in settings
            }
            lost = {metric: found["exact"][metric] - found["private"][metric] for metric in METRICS}
            rows.append({"dataset": dataset, "model": kind, "signal": signal, "side": side, "seed": seed,
                         "setting": one, "exact": found["exact"], "losses": lost})  # fmt: skip
    return rows


def sample_part(records: Any, part: int, parts: int) -> Any:
    """Return every `parts`-th record."""
    return records.take(np.arange(records.rows) % parts == part)


def mean_scores(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean scores of the members' models."""
    return {metric: float(np.mean([each[metric] for each in scores])) for metric in METRICS}


def shipped_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the table in the package."""
    curves = []
    for dataset, kind in product(DATASETS, MODELS):
        own = [row for row in rows if (row["dataset"], row["model"]) == (dataset, kind)]
        records = [row["setting"].records for row in own]
        points = [
            {"signal": signal, **{metric: round(mean_loss(own, metric, signal), 5) for metric in METRICS}}
            for signal in sorted({row["signal"] for row in own})
        ]
        curves.append({"dataset": dataset, "model": kind, "columns": own[0]["setting"].columns,
                       "records": [min(records), max(records)], "points": points})  # fmt: skip
    return {"settings": describe_settings(), "curves": curves}


def describe_settings() -> str:
    """Return the settings of the private trainings in words."""
    return f"{describe(FOR_PRIVATE_TABLES)}, clip {PrivacySection(1.0, PRIVACY_DELTA).clip:g}"


def mean_loss(rows: list[dict[str, Any]], metric: str, signal: float, side: str | None = None) -> float:
    """Return the mean loss at one s, of both settings or of one."""
    return float(np.mean(chosen_losses(rows, metric, signal, side)))


def chosen_losses(rows: list[dict[str, Any]], metric: str, signal: float, side: str | None = None) -> list[float]:
    """Return the losses at one s."""
    return [row["losses"][metric] for row in rows if row["signal"] == signal and side in (None, row["side"])]


def page(rows: list[dict[str, Any]], defaults: dict[str, Any]) -> str:
    """Return the page with all results."""
    lines = [HEAD.format(settings=describe_settings(), exact=describe(FOR_TABLES), seeds=len(SEEDS))]
    lines += ["## Choice of the settings", "", CHOICE, "", "| Candidate | Mean loss, points |", "|---|---|"]
    lines += [
        f"| {candidate} | {np.mean(each):.2f} ± {standard_error(each):.2f} |"
        for candidate, each in losses(defaults).items()
    ]
    for kind in MODELS:
        lines += ["", f"## {'Logistic regression' if kind == 'logistic' else 'One hidden layer of 32'}", ""]
        lines += ["| Data set | s | Many records: n, ε | Loss | Fewer records: n, ε | Loss | Loss of AUC, both |",
                  "|---|---|---|---|---|---|---|"]  # fmt: skip
        for dataset, signal in product(DATASETS, SIGNALS):
            own = [row for row in rows if (row["dataset"], row["model"], row["signal"]) == (dataset, kind, signal)]
            if own:
                cells = [_side(own, signal, side) for side in SIDES]
                lines.append(f"| {dataset} | {signal:g} | {' | '.join(cells)} | {mean_loss(own, 'auc', signal):.4f} |")
    lines += ["", "## Is s enough?", "", agreement(rows), ""]
    return "\n".join(lines)


def _side(rows: list[dict[str, Any]], signal: float, side: str) -> str:
    own = [row for row in rows if row["side"] == side]
    if not own:
        return "– | –"
    found = [100 * each for each in chosen_losses(own, "accuracy", signal)]
    one = own[0]["setting"]
    return f"{one.records:,.0f}, {one.epsilon:.2g} | {np.mean(found):.2f} ± {standard_error(found):.2f}"


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / math.sqrt(len(values))


def agreement(rows: list[dict[str, Any]]) -> str:
    """Return by how much the two settings of a point differ."""
    differences = []
    for dataset, kind, signal in product(DATASETS, MODELS, SIGNALS):
        own = [row for row in rows if (row["dataset"], row["model"]) == (dataset, kind)]
        means = [chosen_losses(own, "accuracy", signal, side) for side in SIDES]
        if all(means):
            differences.append((signal, 100 * (np.mean(means[0]) - np.mean(means[1]))))
    texts = []
    for low, high in ((0, 80), (80, 400), (400, math.inf)):
        found = [each for signal, each in differences if low <= signal < high]
        where = f"below {high:g}" if not low else f"from {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        texts.append(
            f"s {where}: {np.mean(found):+.2f} on average, {np.median(np.abs(found)):.2f} in absolute value (median of "
            f"{len(found)} points)"
        )
    return f"Loss with many records minus loss with fewer records, in points of accuracy. {'; '.join(texts)}."


HEAD = """\
# What privacy costs

Built by `make privacy-results`. Loss: points of accuracy by which private training is below exact training on the same
records, both tested on held-out records; mean of {seeds} seeds ± standard error. n: all training records. The ratio of
signal to noise s = n·μ·√((m − t)/m)/√p has the same value in both settings of a line: many records have five members
and one colluder, fewer records have three members and two colluders. δ is 1e-6, that of the origins 0.02. Private:
{settings}, one look. Exact: {exact}, early stopping. Both are what `cgd federation new` writes.
"""
CHOICE = """\
On training records only: three quarters train, the last quarter scores, by one trusted curator. The loss of a candidate
is the mean over data sets (adult with 4,000 and 24,000 records and credit default with 4,000 at ε = 1, tumours at ε =
3), both models, two seeds, accuracy and AUC. The first one is chosen; some differ by less than their standard
errors."""


def main() -> None:
    """Run or continue; write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT.parent)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(StoredRuns(options.out / "runs.json"))
    (options.out / "report.md").write_text(page(rows, json.loads(OUT.read_text())))
    SHIPPED.write_text(json.dumps(shipped_table(rows), indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
