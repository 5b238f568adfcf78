"""Is our model better for our own records? Models alone, together and personalised, on an organisation's own records.

    python benchmarks/accuracy/personalisation.py [--out results/personalisation] [--dataset trades]

Public tables are split over organisations, five times. Each organisation trains alone and together with the others,
keeps a model (`cgd.tabular.kept_model`), and is tested on held-out records that are as its own: of the same trade
(`trades`), or with the same missing values (`adult`, `credit-default`). A difference of log losses is a mean over the
splits, with Student's 95 % interval of their means. Finished splits are stored, so that the program can continue.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from covered_tables import read_cells, with_categories
from organisations import MODELS
from table_runs import StoredRuns

import cgd
from cgd.errors import InputError
from cgd.experiments.organisations import split
from cgd.experiments.trades import split_by_trade
from cgd.federation.config import FOR_TABLES
from cgd.reporting.intervals import mean_interval
from cgd.tabular.adaptation import METHODS, Method, adapt
from cgd.tabular.alone import train_alone
from cgd.tabular.comparison import compare_classifiers
from cgd.tabular.kept_model import careful_losses, choose_model, clearly_best, scaled_network
from cgd.tabular.model import ConfinedModel
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import EncodedDataset, forward, train

if TYPE_CHECKING:
    from cgd.experiments.organisations import Organisations
    from cgd.federation.model_section import Model
    from cgd.tabular.dataset import TabularDataset

DATASETS = ("trades", "adult", "credit-default")
SEEDS = range(5)
NAMES = ("together", "scaled", "personalised")
OTHER_METHODS = {**METHODS, "last layer": Method(0.01, last=2), "larger steps": Method(0.01)}
MIXTURES = np.arange(1, 11) / 10
OTHERS = (*OTHER_METHODS, "mixture")


def run_split(dataset: str, model: Model, seed: int) -> dict[str, Any]:
    """Return the results of every organisation in one split."""
    organisations: Organisations = split_by_trade(seed) if dataset == "trades" else split(dataset, seed)
    data, tables = replace(organisations.data, rare=1), organisations.tables
    settings = TabularSettings(data, model, FOR_TABLES)
    listed = replace(settings, data=with_categories(data, np.concatenate(list(tables.values()))))
    own = [read_cells(data, cells) for cells in tables.values()]
    held_out = [read_cells(data, cells) for cells in organisations.own_held_out.values()]
    seeds = [f"{name} {seed}".encode().ljust(32) for name in tables]

    def member(peers: cgd.Peers, records: TabularDataset, own_seed: bytes) -> Any:
        peers.seed = own_seed
        return train(peers, listed, records)

    with cgd.local_peers(len(own)) as members:
        results = members.run(member, own, seeds)
    return {name: _test(settings, listed, *each) for name, *each in zip(tables, results, held_out, seeds, strict=True)}


def _test(settings: TabularSettings, listed: TabularSettings, trained: Any, test: TabularDataset, seed: bytes) -> Any:
    """Return one organisation's log losses on its held-out records, and what its report says."""
    models = {"together": ConfinedModel.from_training(trained, listed, {})}
    outputs = {"together": models["together"].outputs(trained.validation)}
    for keep in ("scaled", "personalised"):
        kept = choose_model(listed, models["together"], trained, seed, keep=keep)
        models[keep] = kept.model
        outputs[keep] = outputs["together"] if kept.outputs is None else kept.outputs
        choice = kept.summary
    models["alone"] = train_alone(settings, trained, seed)
    outputs = {"alone": models["alone"].outputs(trained.validation), **outputs}
    target = np.asarray(trained.preprocessing.encode_target(trained.validation))
    report = {each["name"]: each["gains"] for each in compare_classifiers(outputs, target)}
    scores = {name: each.scores(each.outputs(test), test) for name, each in models.items()}
    scores |= _other_ways(listed, models, trained, test, seed)
    return {
        "records": trained.samples,
        "validation": trained.validation.rows,
        "held out": test.rows,
        "choice": {name: choice.get(name) for name in ("part", "method", "steps")},
        "log loss": {name: each["log_loss"] for name, each in scores.items()},
        "auc": {name: each["auc"] for name, each in scores.items()},
        "report": {name: report[name]["log_loss"] for name in NAMES},
    }


def _other_ways(
    settings: TabularSettings, models: dict[str, ConfinedModel], trained: Any, test: TabularDataset, seed: bytes
) -> dict[str, Any]:
    """Return the scores of other ways to personalise the model together, each chosen by the same rule."""
    parts, together = (trained.validation, test), models["together"]
    training, *encoded = (
        EncodedDataset.encode(each, trained.preprocessing, settings) for each in (trained.own, *parts)
    )
    raw = [forward(together.network, each.x) for each in encoded]
    found = {}
    for name, method in OTHER_METHODS.items():
        network = scaled_network(settings, together.network, trained.preprocessing, seed, 1.0)
        path = adapt(network, training, method, seed)
        options = [[forward(network, each.x) for each in encoded] for _ in path]
        found[name] = _choose(raw, options, encoded[0])
    own = [torch.from_numpy(models["alone"].outputs(each)) for each in parts]
    mixtures = [
        [(part * a + (1 - part) * b.softmax(dim=1)).log() for a, b in zip(own, raw, strict=True)] for part in MIXTURES
    ]
    found["mixture"] = _choose(raw, mixtures, encoded[0])
    return {name: together.scores(together.decode(each), test) for name, each in found.items()}


def _choose(base: Any, options: Any, validation: EncodedDataset) -> Any:
    """Return the held-out outputs of the model that the validation records choose."""
    losses = [careful_losses(each[0], validation) for each in options]
    best = clearly_best(careful_losses(base[0], validation), losses)
    return base[1] if best is None else options[best][1]


def section(title: str, splits: list[dict[str, Any]]) -> str:
    """Return the results of a data set and a model as Markdown."""
    head = "| Organisation | Records | Alone | Together − alone | Scaled − alone | Personalised − alone |"
    lines = [f"### {title}", "", head, "|---|--:|--:|--:|--:|--:|"]
    for name in splits[0]:
        found = [each[name] for each in splits]
        alone = float(np.mean([each["log loss"]["alone"] for each in found]))
        cells = [_difference(found, each) for each in NAMES]
        lines.append(f"| {name} | {found[0]['records']:,} | {alone:.4f} | {' | '.join(cells)} |")
    lines += ["", *_summary(splits), "", f"| Organisation | {' | '.join(map(str.capitalize, OTHERS))} |"]
    lines.append("|---|" + "--:|" * len(OTHERS))
    for name in splits[0]:
        means = (interval([each[name] for each in splits], other)[0] for other in OTHERS)
        lines.append(f"| {name} | {' | '.join(map(_signed, means))} |")
    return "\n".join([*lines, ""])


def _difference(found: list[dict[str, Any]], name: str) -> str:
    mean, low, high = interval(found, name)
    return f"{_signed(mean)} ({_signed(low)} to {_signed(high)})"


def interval(found: list[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """Return the mean difference of a model's log loss to that of the model alone, and its interval."""
    values = np.array([each["log loss"][name] - each["log loss"]["alone"] for each in found])
    return (float(values.mean()), *mean_interval(float(values.mean()), float(values.std(ddof=1)), len(values)))


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _summary(splits: list[dict[str, Any]]) -> list[str]:
    """Return how often reports said what held-out records show."""
    cases = [each for found in splits for each in found.values()]
    worse = [each for each in cases if each["log loss"]["together"] > each["log loss"]["alone"]]
    said = [each["report"]["together"] for each in worse if each["report"]["together"]["value"] < 0]
    silent = [each for each in worse if each["report"]["together"]["value"] >= 0]
    largest = max((each["log loss"]["together"] - each["log loss"]["alone"] for each in silent), default=0.0)
    adapted = [each for each in cases if each["choice"]["method"]]
    better = [each for each in adapted if each["log loss"]["personalised"] < each["log loss"]["together"]]
    text = f"The model was adapted in {len(adapted)} of {len(cases)} cases, and was then better than together in "
    text += f"{len(better)}. Together was worse than alone in {len(worse)} cases"
    if worse:
        clearly = sum(each["high"] < 0 for each in said)
        text += f", and the report said so in {len(said)} of them, in {clearly} clearly"
    if silent:
        text += f"; in the others, the difference is {largest:.4f} at most"
    return textwrap.wrap(f"{text}.", 120)


HEAD = """\
# Alone, together and personalised

Built by `make personalisation-results`: log losses on held-out records that are as an organisation's own, and their
differences to a model of its own records alone, as means of five splits with 95 % intervals. Negative is better than
alone. *Scaled* is start + D + c·origin, with c chosen on the organisation's validation records; *personalised* is that,
adapted to its own records where they show that it helps. The second table of each has the differences of other ways to
personalise, from the whole model together: each method alone, the last layer only, all weights in larger steps, and a
mixture of the predictions alone and together. They are chosen by the same rule.

"""


def main() -> None:
    """Run all splits, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/personalisation"), help="the folder for the results")
    parser.add_argument("--dataset", action="append", choices=DATASETS, help="may be repeated; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored, sections = StoredRuns(options.out / "results.json"), []
    for dataset in options.dataset or DATASETS:
        for name, model in MODELS.items():
            try:
                splits = [
                    stored.get(f"{dataset}, {name}, split {seed}", lambda: run_split(dataset, model, seed))  # noqa: B023
                    for seed in SEEDS
                ]
            except InputError as error:
                print(f"{dataset} is skipped: {error}")
                break
            sections.append(section(f"{dataset}, {name}", splits))
            print(sections[-1], flush=True)
    (options.out / "report.md").write_text(HEAD + "\n".join(sections))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
