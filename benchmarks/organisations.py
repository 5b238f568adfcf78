"""Real tables over five organisations: their confined models, beside each alone and one model on all records pooled.

    python benchmarks/organisations.py [--out results/tables] [--dataset adult] [--delta 0.02]

Every model is tried on the same records, which nobody trained on. "Pooled" and "alone" run the same program with the
same settings, on all records together and on one organisation's (`cgd.local`). Adult and credit default are
found by CGD_DATA; what is not found is left out and said.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cgd
from cgd.errors import InputError
from cgd.experiments.organisations import Organisations, split
from cgd.federation.config import FOR_TABLES
from cgd.federation.data_schema import Model
from cgd.local import solo_peers
from cgd.tabular.loading import from_frame
from cgd.tabular.model import ConfinedModel
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train

if TYPE_CHECKING:
    from cgd.tabular.dataset import TabularDataset

MODELS = {"logistic regression": Model("logistic"), "one hidden layer of 32": Model("mlp", (32,))}
DELTA = Model("logistic").delta
SEEDS = (0, 1, 2)
METRICS = ("accuracy", "auc")


@dataclass(frozen=True)
class Outcome:
    """What one split came to: scores by organisation, confined and alone, and of the pooled model."""

    records: dict[str, int]
    confined: dict[str, dict[str, float]]
    alone: dict[str, dict[str, float] | None]
    pooled: dict[str, float]


def scores(
    peers: cgd.Peers, records: TabularDataset, *, setting: TabularSettings, test: TabularDataset
) -> dict[str, float]:
    """Train, and try the model on records that nobody trained on."""
    model = ConfinedModel.of(train(peers, setting, records), setting, {})
    found = model.scores(model.outputs(test), test)
    return {name: found[name] for name in METRICS}


def outcome(organisations: Organisations, model: Model, seed: int) -> Outcome:
    """Train all models of one split."""
    setting = TabularSettings(organisations.data, model, FOR_TABLES)
    own = {name: _records(organisations, cells) for name, cells in organisations.tables.items()}
    whole = _records(organisations, np.concatenate(list(organisations.tables.values())))
    one = partial(scores, setting=setting, test=_records(organisations, organisations.held_out))
    seeds = {name: f"{name} {seed}".encode().ljust(32) for name in (*own, "pooled")}

    def together(peers: cgd.Peers, records: TabularDataset) -> dict[str, float]:
        peers.seed = seeds[peers.me]
        return one(peers, records)

    with cgd.local_peers(list(own)) as colony:
        confined = dict(zip(own, colony.run(together, own.values()), strict=True))
    alone: dict[str, dict[str, float] | None] = {}
    for name, records in own.items():
        try:
            alone[name] = one(solo_peers(seeds[name]), records)
        except InputError:  # all its records are of one class
            alone[name] = None
    pooled = one(solo_peers(seeds["pooled"]), whole)
    return Outcome({name: each.rows for name, each in own.items()}, confined, alone, pooled)


def section(dataset: str, name: str, outcomes: list[Outcome]) -> str:
    """One data set and one model as Markdown: a table of the first split, and what all splits came to."""
    first = outcomes[0]
    lines = [f"### {dataset}, {name}", "", "| Organisation | Records | Confined model | Alone |", "|---|---|---|---|"]
    for each, records in first.records.items():
        lines.append(f"| {each} | {records:,} | {_shown(first.confined[each])} | {_shown(first.alone[each])} |")
    lines += [f"| all pooled | {sum(first.records.values()):,} | | {_shown(first.pooled)} |", ""]
    gaps = {metric: [each.pooled[metric] - value[metric] for each in outcomes for value in each.confined.values()]
            for metric in METRICS}  # fmt: skip
    small = [value["auc"] for each in outcomes for value in list(each.alone.values())[-2:] if value is not None]
    theirs = [value["auc"] for each in outcomes for value in list(each.confined.values())[-2:]]
    mean, most = ({metric: fold(gaps[metric]) for metric in METRICS} for fold in (np.mean, np.max))
    said = (
        f"Over {len(outcomes)} splits, a confined model is below the pooled one by {100 * mean['accuracy']:.2f} points "
        f"of accuracy and {mean['auc']:.4f} of AUC on average, and by {100 * most['accuracy']:.2f} points and "
        f"{most['auc']:.4f} at most. The two smallest organisations have an AUC of {np.mean(small):.3f} alone and "
        f"{np.mean(theirs):.3f} together with the others, on average."
    )
    lines += [*textwrap.wrap(said, 120), ""]
    return "\n".join(lines)


def main() -> None:
    """Run everything, print the tables, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep report.md and results.json in this folder")
    parser.add_argument("--delta", type=float, default=DELTA, help=f"the spread of the origins, {DELTA:g} if not given")
    parser.add_argument("--dataset", action="append", help="adult, credit-default, breast-cancer; or several")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts, kept = [], {}
    for dataset in options.dataset or ("adult", "credit-default"):
        try:
            splits = [split(dataset, seed) for seed in SEEDS]
        except InputError as error:
            print(f"{dataset} is left out: {error}")
            continue
        for name, model in MODELS.items():
            outcomes = [
                outcome(each, replace(model, delta=options.delta), seed)
                for each, seed in zip(splits, SEEDS, strict=True)
            ]
            texts.append(section(dataset, name, outcomes))
            kept[f"{dataset}, {name}"] = [vars(each) for each in outcomes]
            print(texts[-1], flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.md").write_text(HEAD.format(options.delta) + "\n".join(texts))
        (options.out / "results.json").write_text(json.dumps(kept, indent=1) + "\n")


HEAD = f"""\
# Tables over five organisations

By `make table-results`: accuracy / AUC on records that nobody trained on. {FOR_TABLES.optimizer} with a step of
{FOR_TABLES.lr:g}, at most {FOR_TABLES.steps} steps, early stopping, δ {{:g}}. The organisations
are of very different sizes; some leave values out, one does not have a column, the small ones do not have all
categories.

"""


def _records(organisations: Organisations, cells: Any) -> TabularDataset:
    data = organisations.data
    frame = {name: cells[:, place].tolist() for place, name in enumerate((*data.names, data.target))}
    return from_frame(frame, data, data.columns, target=True)[0]


def _shown(found: dict[str, float] | None) -> str:
    return "one class only" if found is None else f"{100 * found['accuracy']:.2f} % / {found['auc']:.4f}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
