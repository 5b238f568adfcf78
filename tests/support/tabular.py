"""Small tables, schemas and settings for tests of training on tables."""

from __future__ import annotations

import csv
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import cgd
from cgd.federation import config_edit
from cgd.federation.config import Training
from cgd.federation.data_schema import Column, Data
from cgd.federation.keys import Keys
from cgd.federation.model_section import Model
from cgd.federation.participants import HubSite, Participant
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.settings import TabularSettings
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from cgd.local import LocalPeers
    from cgd.optim.grid import Cell
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

COLUMNS = (Column("age", "number"), Column("dose", "number"), Column("ward", "category"))
DATA = Data("outcome", COLUMNS)
REGRESSION = Data("outcome", COLUMNS, "regression")
SCHEMA = """
[data]
target = "outcome"
[data.columns]
age = "number"
dose = "number"
ward = "category"
[model]
kind = "mlp"
layers = [8]
"""
TRAINING = Training(steps=40, lr=0.05, optimizer="adam", validate_every=5, patience=3)


VERTICAL_SCHEMA = """
[data]
target = "outcome"
id = "id"
classes = ["well", "ill"]
[data.columns]
age = { type = "number", held_by = 0 }
dose = { type = "number", held_by = 1 }
ward = { type = "category", held_by = 2 }
[model]
kind = "mlp"
layers = [6]
"""
"""The schema of a federation that is partitioned by columns."""


def tabular_settings(data: Data = DATA, model: Model | None = None, **training: Any) -> TabularSettings:
    """Return settings; `training` overrides fields of `TRAINING`."""
    return TabularSettings(data, model or Model("mlp", (8,)), replace(TRAINING, **training))


def table(rows: int, seed: int, wards: Sequence[str] = ("A", "B"), *, rare: float = 0.0) -> dict[str, list[Any]]:
    """Return records whose outcome depends on all columns; a tenth of the ages are missing; `rare` shifts classes."""
    random = np.random.default_rng(seed)
    age, dose = random.normal(60, 12, rows), random.normal(0, 3, rows)
    ward = random.integers(len(wards), size=rows)
    score = (age - 60) / 12 + dose / 3 + ward - 0.5 * (len(wards) - 1) - rare
    missing = random.random(rows) < 0.1
    return {
        "age": [None if absent else float(value) for absent, value in zip(missing, age, strict=True)],
        "dose": dose.tolist(),
        "ward": [wards[each] for each in ward],
        "outcome": ["ill" if each > 0 else "well" for each in score + random.normal(0, 0.3, rows)],
        "score": score.tolist(),
        "id": [f"p{seed}-{number}" for number in range(rows)],
    }


def records(content: dict[str, list[Any]], data: Data = DATA) -> TabularDataset:
    """Convert a table; in a regression the score is the outcome."""
    if data.task == "regression":
        content = {**content, "outcome": content["score"]}
    names = {*data.names, data.target, data.id} - {""}
    frame = {name: content[name] for name in names}
    return dataset_from_frame(frame, data, data.columns, target=True, ids=bool(data.id))[0]


def run_members(function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Run a function at every member of a federation in threads, with fixed seeds; return the results."""
    with cgd.local_peers(len(arguments[0])) as peers:
        for place, each in enumerate(peers):
            each.seed = bytes([place]) * 32
        return peers.run(function, *arguments)


def run_in_threads(function: Callable[[str], Any], names: Iterable[str], timeout: float = 120.0) -> dict[str, Any]:
    """Call a function with every name, in threads; return the results by name, or raise the first error."""
    results: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            results[name] = function(name)
        except BaseException as error:
            results[name] = error

    threads = {name: threading.Thread(target=call, args=(name,)) for name in names}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(timeout)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    assert results.keys() == threads.keys()
    return results


def run_grid(rows: int, columns: int, function: Callable[[Peers, int, int], Any]) -> dict[tuple[int, int], Any]:
    """Run a function at every participant of a grid, with its column and row as groups; return results by cell."""
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    everyone = cgd.local_peers([f"r{row}c{column}" for row, column in cells])
    groups: list[LocalPeers] = []
    for name, count, axis in (("column", columns, 1), ("row", rows, 0)):
        for index in range(count):
            members = [cell for cell in cells if cell[axis] == index]
            group = cgd.local_peers([f"r{row}c{column}" for row, column in members])
            groups.append(group)
            for peers, cell in zip(group, members, strict=True):
                everyone[cells.index(cell)].groups[name] = peers
    try:
        results = everyone.run(function, [row for row, _ in cells], [column for _, column in cells])
    finally:
        for group in (everyone, *groups):
            group.close()
    return dict(zip(cells, results, strict=True))


def write_federation(
    folder: Path,
    names: Sequence[str],
    cells: Sequence[Cell] = (),
    schema: str | None = SCHEMA,
    dialers: Collection[str] = (),
    make_keys: Callable[[str], Keys] = Keys.generate,
    **training: Any,
) -> Path:
    """Write the file of a federation on loopback, with keys beside it; with a hub if some participants dial out."""
    participants = []
    for place, name in enumerate(names):
        keys = make_keys(name)
        keys.save(folder)
        cell = cells[place] if cells else None
        address = "" if name in dialers else f"tcp://127.0.0.1:{free_port()}"
        participants.append(Participant(name, address, keys.public, cell))
    path = folder / "federation.toml"
    hub = None
    if dialers:
        keys = make_keys("hub")
        keys.save(folder)
        hub, training = HubSite(f"tcp://127.0.0.1:{free_port()}", keys.public), {"opening": "hub", **training}
    config_edit.create_federation(path, "trial", participants, replace(TRAINING, **training), hub, schema)
    return path


def write_csv(
    path: Path, content: dict[str, list[Any]], names: Sequence[str] = ("age", "dose", "ward", "outcome")
) -> Path:
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(names)
        lines.writerows(zip(*(content[name] for name in names), strict=True))
    return path
