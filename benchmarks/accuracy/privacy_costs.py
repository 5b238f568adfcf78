"""Measure what privacy costs: `python benchmarks/accuracy/privacy_costs.py`, by `make privacy-results`.

Models are trained on public tables with the whole private pipeline (statistics, count, steps, one look) and without
noise on the same records, and tested on held-out records. For each data set, the ratio s of signal to noise
(`cgd.tabular.privacy_costs`) grows fourfold from point to point. Each point has two settings of the same s, by one
trusted curator: many records with ε = 1, and fewer than half with ε = 4; where a data set has too few records, ε is
larger. At some points, several members train, of whom some collude. If the theory holds, all settings of a point have
the same loss.

Writes runs.json (every run), report.md (the page) and src/cgd/tabular/privacy_costs.json (the table that is shipped).
The same command continues where it was stopped. Data sets that are not in the folder CGD_DATA are an error: the table
must have all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import covered_tables
import numpy as np
import torch
from private_defaults import MODELS, OUT, PRIVACY_DELTA, describe, losses
from table_runs import METRICS, StoredRuns, sample, scores_alone, scores_together

from cgd.federation.config import FOR_PRIVATE_TABLES, FOR_TABLES
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular.privacy_costs import FILE, PrivateSetting
from cgd.tabular.settings import TabularSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from table_runs import Scores

SHIPPED = Path(__file__).parents[2] / "src" / "cgd" / "tabular" / FILE
SIGNALS = tuple(10.0 * 4**power for power in range(5))
DATASETS = {
    "adult": (32_561, 14),
    "credit-default": (24_000, 23),
    "tumours": (455, 30),
    "digits": (1_438, 64),
    "synthetic-10": (16_000, 10),
    "synthetic-100": (16_000, 100),
}
"""The numbers of training records and of columns."""
SEEDS = (0, 1, 2)
VALIDATION = 0.2
MIN_RECORDS, MAX_EPSILON = 100, 20.0
MANY, FEWER = "many records", "fewer records"
SIDES = {MANY: (1.0, 1, 0), FEWER: (4.0, 1, 0)}
TOGETHER = {
    "five members, one colludes": (1.0, 5, 1),
    "three members, two collude": (4.0, 3, 2),
    "five members, four collude": (3.0, 5, 4),
}
"""ε, members and colluders of the settings of a point."""
POINTS_TOGETHER = (("adult", "logistic", 40.0), ("adult", "logistic", 640.0))


@dataclass(frozen=True)
class Row:
    """The result of one seed in one setting of a point."""

    dataset: str
    model: str
    signal: float
    side: str
    setting: PrivateSetting
    losses: dict[str, float]


def setting_for(signal: float, available: int, columns: int, side: str) -> PrivateSetting | None:
    """Return a setting with this s, with the records that there are; None if ε would have to be too large."""
    epsilon, members, colluders = (SIDES | TOGETHER)[side]
    most = math.floor((1 - VALIDATION) * available * (0.5 if epsilon == SIDES[FEWER][0] else 1))
    one = PrivateSetting(most, columns, members, epsilon, PRIVACY_DELTA, colluders)
    records = max(one.records_for(signal), MIN_RECORDS)
    if records <= most:
        one = replace(one, records=records)
    needed = one.epsilon_for(signal)
    return replace(one, epsilon=needed) if needed <= MAX_EPSILON else None


def points() -> Iterator[tuple[str, str, float, str]]:
    """Yield all data sets, models, s and settings."""
    yield from product(DATASETS, MODELS, SIGNALS, SIDES)
    for (dataset, kind, signal), side in product(POINTS_TOGETHER, TOGETHER):
        yield dataset, kind, signal, side


def measure(runs: StoredRuns) -> list[Row]:
    """Run everything that is not stored; return the losses."""
    rows = []
    for dataset, kind, signal, side in points():
        one = setting_for(signal, *DATASETS[dataset], side)
        if one is None:
            continue
        count = round(one.records / (1 - VALIDATION))
        noise = f"epsilon {one.epsilon:.4g}, {one.colluders} colluders, {describe(FOR_PRIVATE_TABLES)}"
        for seed in SEEDS:
            name = f"{dataset}, {kind}, {count} records, {one.members} members, seed {seed}"
            train = partial(scores, dataset, kind, count, one, seed)
            without = runs.get(f"{name} | exact", partial(train, private=False))
            found = runs.get(f"{name}, {noise} | private", partial(train, private=True))
            lost = {metric: without[metric] - found[metric] for metric in METRICS}
            rows.append(Row(dataset, kind, signal, side, one, lost))
    return rows


def scores(dataset: str, kind: str, count: int, one: PrivateSetting, seed: int, *, private: bool) -> Scores:
    """Train, alone or together, and return the mean scores of all models."""
    table = covered_tables.load(dataset)
    if (table.training.rows, len(table.data.columns)) != DATASETS[dataset]:
        raise SystemExit(f"{dataset} has other records or columns than this program states; get the original one")
    settings = TabularSettings(table.data, MODELS[kind], FOR_TABLES)
    if private:
        section = PrivacySection(one.epsilon, PRIVACY_DELTA, colluders=one.colluders)
        settings = replace(settings, training=FOR_PRIVATE_TABLES, privacy=section)
    records, members = sample(table.training, count, seed), one.members
    if members == 1:
        return scores_alone(settings, records, table.held_out, f"{seed}")
    parts = [records.take(np.arange(records.rows) % members == part) for part in range(members)]
    found = scores_together(settings, parts, table.held_out, [f"{seed} {part}" for part in range(members)])
    return {metric: fmean(each[metric] for each in found) for metric in METRICS}


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows that have certain values."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def lost_points(rows: list[Row]) -> list[float]:
    """Return the losses of accuracy in points."""
    return [100 * row.losses["accuracy"] for row in rows]


def shipped_table(rows: list[Row]) -> dict[str, Any]:
    """Return the content of the table in the package: means over the seeds and both settings of one curator."""
    curves = []
    for dataset, kind in product(DATASETS, MODELS):
        own = [row for row in select(rows, dataset=dataset, model=kind) if row.side in SIDES]
        records = [round(row.setting.records) for row in own]
        points = [
            {
                "signal": signal,
                **{m: round(fmean(row.losses[m] for row in select(own, signal=signal)), 5) for m in METRICS},
            }
            for signal in sorted({row.signal for row in own})
        ]
        curve = {"dataset": dataset, "model": kind, "columns": own[0].setting.columns}
        curves.append(curve | {"records": [min(records), max(records)], "points": points})
    return {"settings": describe_settings(), "curves": curves}


def describe_settings() -> str:
    """Return the settings of the private trainings in words."""
    return f"{describe(FOR_PRIVATE_TABLES)}, clip {PrivacySection(1.0, PRIVACY_DELTA).clip:g}"


def page(rows: list[Row], defaults: dict[str, Scores]) -> str:
    """Return the page with all results."""
    lines = [HEAD.format(settings=describe_settings(), exact=describe(FOR_TABLES), seeds=len(SEEDS))]
    for kind, title in (("logistic", "Logistic regression"), ("mlp", "One hidden layer of 32")):
        lines += [f"## {title}", "", "| Data set | s | n, ε | Loss | n, ε | Loss | Loss of AUC |", "|---" * 7 + "|"]
        for dataset, signal in product(DATASETS, SIGNALS):
            own = select(rows, dataset=dataset, model=kind, signal=signal)
            sides = [select(own, side=side) for side in SIDES]
            if sides[0]:
                auc = fmean(row.losses["auc"] for row in own if row.side in SIDES)
                lines.append(f"| {dataset} | {signal:g} | {_cells(sides[0])} | {_cells(sides[1])} | {auc:.4f} |")
        lines.append("")
    lines += ["## Is s enough?", "", *agreement(rows), ""]
    lines += ["## Choice of the settings", "", CHOICE, "", "| Candidate | Mean loss, points |", "|---|---|"]
    lines += [f"| {candidate} | {mean_and_error(each)} |" for candidate, each in losses(defaults).items()]
    return "\n".join(lines) + "\n"


def agreement(rows: list[Row]) -> Iterator[str]:
    """Yield lines about the losses of different settings of one point."""
    yield "| Data set, model | s | " + " | ".join((*SIDES, *TOGETHER)) + " |"
    yield "|---" * (2 + len(SIDES | TOGETHER)) + "|"
    for dataset, kind, signal in POINTS_TOGETHER:
        own = select(rows, dataset=dataset, model=kind, signal=signal)
        cells = [mean_and_error(lost_points(select(own, side=side))) for side in SIDES | TOGETHER]
        yield f"| {dataset}, {kind} | {signal:g} | {' | '.join(cells)} |"
    yield ""
    yield differences(rows)


def differences(rows: list[Row]) -> str:
    """Return by how much the losses with many and with fewer records differ."""
    found = []
    for dataset, kind, signal in product(DATASETS, MODELS, SIGNALS):
        own = select(rows, dataset=dataset, model=kind, signal=signal)
        sides = [lost_points(select(own, side=side)) for side in SIDES]
        if all(sides):
            found.append((signal, fmean(sides[0]) - fmean(sides[1])))
    texts = []
    for low, high in ((0, 80), (80, 400), (400, math.inf)):
        values = [each for signal, each in found if low <= signal < high]
        last = f"of {low:g} or more" if high == math.inf else f"of {low:g} to {high:g}"
        where = last if low else f"below {high:g}"
        typical = median(abs(each) for each in values)
        texts.append(f"for s {where} {fmean(values):+.2f} on average, and {typical:.2f} in absolute value (median)")
    text = f"With many records, the loss minus that with fewer records is {'; '.join(texts)}, in points."
    return "\n".join(textwrap.wrap(text, 120))


def _cells(rows: list[Row]) -> str:
    if not rows:
        return "– | –"
    one = rows[0].setting
    return f"{one.records:,.0f}, {one.epsilon:.2g} | {mean_and_error(lost_points(rows))}"


def mean_and_error(values: list[float]) -> str:
    """Return the mean and its standard error."""
    return f"{fmean(values):.2f} ± {stdev(values) / math.sqrt(len(values)):.2f}" if values else "–"


HEAD = """\
# What privacy costs

Built by `make privacy-results`. Loss: points of accuracy by which private training is below exact training on the same
records, both tested on held-out records; mean of {seeds} seeds ± standard error. n: the training records. All settings
of a line have the same ratio of signal to noise s = n·μ·√((m − t)/m)/√p, with p columns. δ is 1e-6, that of the origins
0.02. Private: {settings}, one look. Exact: {exact}, early stopping.
Both are what `cgd federation new` writes. The first n and ε are those of many records, the others of fewer.
"""
CHOICE = """\
On training records only: three quarters train, the last quarter scores, by one trusted curator. The loss of a candidate
is the mean over data sets (adult with 4,000 and 24,000 records and credit default with 4,000 at ε = 1, tumours at ε =
3), both models, two seeds, accuracy and AUC. The first one is chosen; some differ by less than their standard error."""


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
