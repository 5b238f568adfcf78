"""Train on public tables with and without privacy, and store every finished run, so that a program can continue."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

import cgd
from cgd.files import write_file
from cgd.local import solo_peers
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import train

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings

METRICS = ("accuracy", "auc")
Scores = dict[str, float]


class StoredRuns:
    """The results of finished runs in a file, by a text that describes the run; each is run once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, run: str, compute: Callable[[], Any]) -> Any:
        """Return the stored result of a run, or compute and store it."""
        if run not in self.results:
            self.results[run] = compute()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, json.dumps(self.results, indent=0) + "\n")
            print(run, self.results[run], flush=True)
        return self.results[run]


def sample(records: TabularDataset, count: int, seed: int) -> TabularDataset:
    """Return some records, drawn at random."""
    mask = np.zeros(records.rows, dtype=np.bool_)
    mask[np.random.default_rng(seed).permutation(records.rows)[:count]] = True
    return records.take(mask)


def test_scores(peers: cgd.Peers, records: TabularDataset, settings: TabularSettings, test: TabularDataset) -> Scores:
    """Train a model together with the other members; return its scores on other records."""
    model = ConfinedModel.from_training(train(peers, settings, records), settings, {})
    found = model.scores(model.outputs(test), test)
    return {name: found[name] for name in METRICS}


def scores_alone(settings: TabularSettings, records: TabularDataset, test: TabularDataset, seed: str) -> Scores:
    """Train one model on all records, as a trusted curator would; return its scores."""
    return test_scores(solo_peers(seed.encode().ljust(32)), records, settings, test)


def scores_together(
    settings: TabularSettings, tables: Sequence[TabularDataset], test: TabularDataset, seeds: Sequence[str]
) -> list[Scores]:
    """Train together, each member with its own records and origin; return the scores of each model."""

    def run(peers: cgd.Peers, records: TabularDataset, seed: str) -> Scores:
        peers.seed = seed.encode().ljust(32)
        return test_scores(peers, records, settings, test)

    with cgd.local_peers(len(tables)) as members:
        return members.run(run, tables, seeds)
