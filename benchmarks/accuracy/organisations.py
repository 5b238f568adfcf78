"""Public tables split over five organisations: confined models, compared with training alone and on pooled records.

    python benchmarks/accuracy/organisations.py [--out results/tables] [--dataset adult] [--delta 0.02] [--start zeros]

Every model is tested on the same held-out records. "Pooled" and "alone" run the same program with the same settings, on
all records together and on those of one organisation (`cgd.local`). Adult and credit default are read from the folder
in CGD_DATA; data sets that are not available are skipped with a message.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from covered_tables import read_cells, with_categories
from table_runs import METRICS, scores_alone, scores_together

from cgd.errors import InputError
from cgd.experiments.organisations import Organisations, split
from cgd.federation.config import FOR_TABLES
from cgd.federation.model_section import Model
from cgd.tabular.settings import TabularSettings

MODELS = {"logistic regression": Model("logistic"), "one hidden layer of 32": Model("mlp", (32,))}
DELTA = Model("logistic").delta
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class SplitResult:
    """Results of one split: scores of each organisation's confined and local model, and of the pooled model."""

    records: dict[str, int]
    confined: dict[str, dict[str, float]]
    alone: dict[str, dict[str, float] | None]
    pooled: dict[str, float]


def run_split(organisations: Organisations, model: Model, seed: int) -> SplitResult:
    """Train all models of one split.

    The categories of public data are known to all, so they are listed; one who trains alone knows those of its own.
    """
    data, tables = replace(organisations.data, rare=1), organisations.tables
    settings = TabularSettings(data, model, FOR_TABLES)
    listed = replace(settings, data=with_categories(data, np.concatenate(list(tables.values()))))
    own = {name: read_cells(data, cells) for name, cells in tables.items()}
    test = read_cells(data, organisations.held_out)
    seeds = {name: f"{name} {seed}" for name in (*own, "pooled")}
    together = scores_together(listed, list(own.values()), test, [seeds[name] for name in own])
    confined = dict(zip(own, together, strict=True))
    alone: dict[str, dict[str, float] | None] = {}
    for name, records in own.items():
        try:
            alone[name] = scores_alone(settings, records, test, seeds[name])
        except InputError:  # all its records have the same class
            alone[name] = None
    pooled = scores_alone(settings, read_cells(data, np.concatenate(list(tables.values()))), test, seeds["pooled"])
    return SplitResult({name: each.rows for name, each in own.items()}, confined, alone, pooled)


def section(dataset: str, name: str, results: list[SplitResult]) -> str:
    """Return one data set and one model as Markdown: a table of the first split, and a summary of all splits."""
    first = results[0]
    lines = [f"### {dataset}, {name}", "", "| Organisation | Records | Confined model | Alone |", "|---|---|---|---|"]
    for each, records in first.records.items():
        lines.append(f"| {each} | {records:,} | {_cell(first.confined[each])} | {_cell(first.alone[each])} |")
    lines += [f"| all pooled | {sum(first.records.values()):,} | | {_cell(first.pooled)} |", ""]
    gaps = {metric: [each.pooled[metric] - value[metric] for each in results for value in each.confined.values()]
            for metric in METRICS}  # fmt: skip
    small_alone = [value["auc"] for each in results for value in list(each.alone.values())[-2:] if value is not None]
    small_confined = [value["auc"] for each in results for value in list(each.confined.values())[-2:]]
    mean, largest = ({metric: reduce(gaps[metric]) for metric in METRICS} for reduce in (np.mean, np.max))
    summary = (
        f"Over {len(results)} splits, a confined model is below the pooled one by {100 * mean['accuracy']:.2f} points "
        f"of accuracy and {mean['auc']:.4f} of AUC on average, and by {100 * largest['accuracy']:.2f} points and "
        f"{largest['auc']:.4f} at most. The two smallest organisations have an AUC of {np.mean(small_alone):.3f} alone "
        f"and {np.mean(small_confined):.3f} together with the others, on average."
    )
    lines += [*textwrap.wrap(summary, 120), ""]
    return "\n".join(lines)


def main() -> None:
    """Run all data sets and models, print the tables, and write them to a folder if given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write report.md and results.json to this folder")
    parser.add_argument(
        "--delta", type=float, default=DELTA, help=f"standard deviation of the origins, {DELTA:g} by default"
    )
    parser.add_argument(
        "--start",
        type=lambda text: text if text == "zeros" else int(text),
        help="as in [model]; by default that of each kind of model",
    )
    parser.add_argument("--dataset", action="append", help="adult, credit-default or breast-cancer; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sections, stored = [], {}
    for dataset in options.dataset or ("adult", "credit-default"):
        try:
            splits = [split(dataset, seed) for seed in SEEDS]
        except InputError as error:
            print(f"{dataset} is skipped: {error}")
            continue
        for name, model in MODELS.items():
            results = [
                run_split(each, replace(model, delta=options.delta, start=options.start), seed)
                for each, seed in zip(splits, SEEDS, strict=True)
            ]
            sections.append(section(dataset, name, results))
            stored[f"{dataset}, {name}"] = [vars(each) for each in results]
            print(sections[-1], flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.md").write_text(HEAD.format(options.delta) + "\n".join(sections))
        (options.out / "results.json").write_text(json.dumps(stored, indent=1) + "\n")


HEAD = f"""\
# Tables over five organisations

Built by `make table-results`: accuracy / AUC on held-out records. {FOR_TABLES.optimizer} with a step size of
{FOR_TABLES.lr:g}, at most {FOR_TABLES.steps} steps, early stopping, δ {{:g}}. The organisations
have very different sizes; some have missing values, one lacks a column, the small ones lack some categories.

"""


def _cell(scores: dict[str, float] | None) -> str:
    return "one class only" if scores is None else f"{100 * scores['accuracy']:.2f} % / {scores['auc']:.4f}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
