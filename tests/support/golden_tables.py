"""Golden runs on tables; for `support.golden`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

import cgd
from cgd.federation.config import Federation
from cgd.tabular.dataset import read_dataset
from cgd.tabular.settings import TabularSettings
from cgd.tabular.training import train as train_on_table
from support.forking import Forked
from support.golden_digests import BOUND, FEDERATION, SMALL, Contexts, Roundings, digest, equal_value, fixed_keys
from support.golden_program import numbers
from support.tabular import SCHEMA, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.golden_digests import Digests

# The tables are so small that some values would be merged.
TABLE_SCHEMA = SCHEMA.replace("layers = [8]", "layers = [4]").replace("[data]\n", "[data]\nrare = 1\n")
TABLE_TRAINING = {
    "steps": 8,
    "lr": 0.125,
    "optimizer": "adam",
    "validate_every": 4,
    "patience": 0,
    "bound": BOUND,
}


def table(name: str, rows: int) -> dict[str, list[Any]]:
    """Make a table of pairs of numbers x and −x, so that means and deviations are exact."""
    half = numbers(f"table of {name}", rows // 2, 2)
    age, dose = (torch.stack([half[:, column], -half[:, column]], dim=1).reshape(-1) for column in range(2))
    other = numbers(f"more of {name}", rows, 2)
    return {
        "age": [None if i % 8 > 5 else value for i, value in enumerate((8 * age).tolist())],
        "dose": dose.tolist(),
        "ward": ["north" if value > 0 else "south" for value in other[:, 0].tolist()],
        "outcome": ["ill" if value > 0 else "well" for value in (age + dose + other[:, 1]).tolist()],
    }


def _table_federation(folder: Path) -> Path:
    path = write_federation(folder, SMALL, (), TABLE_SCHEMA, (), fixed_keys, **TABLE_TRAINING)
    for name, rows in zip(SMALL, (32, 24, 16), strict=True):
        write_csv(folder / f"{name}.csv", table(name, rows))
    return path


def tables_in_threads() -> Digests:
    """Train on tables as participants in threads."""
    contexts = Contexts()
    with tempfile.TemporaryDirectory(prefix="cgd-golden-") as name, Roundings().recording():
        folder = Path(name)
        federation = Federation.load(_table_federation(folder))

        def work(peers: cgd.Peers) -> Any:
            peers.seed = fixed_keys(peers.me).federation_seed(FEDERATION)
            if peers.me == SMALL[0]:
                peers.observer = contexts
            setting = TabularSettings.from_federation(federation, peers.me)
            records, _ = read_dataset(folder / f"{peers.me}.csv", setting.data, setting.own_columns)
            return train_on_table(peers, setting, records)

        with cgd.local_peers(SMALL, bound=federation.training.bound) as peers:
            trained = peers.run(work)
    return {
        "weights": digest(*(_tensors(dict(each.network.state_dict())) for each in trained)),
        "preparation": digest(equal_value(json.dumps(each.preprocessing.to_dict()) for each in trained)),
        "contexts": digest("\n".join(contexts.lines)),
    }


def tables() -> Digests:
    """Train on tables by `cgd join --data`; weights and preparation are those of participants in threads."""
    with tempfile.TemporaryDirectory(prefix="cgd-golden-") as name:
        folder = Path(name)
        path = _table_federation(folder)
        logs = {each: folder / f"{each}.err" for each in SMALL}
        joined = {each: Forked(_join(path, each), folder, logs[each], {}) for each in SMALL}
        try:
            assert {process.wait(120.0) for process in joined.values()} == {0}, logs[SMALL[0]].read_text()
        finally:
            for process in joined.values():
                process.kill()
        runs = [folder / "runs" / each for each in SMALL]
        about = [json.loads((run / "model.json").read_text()) for run in runs]
        weights = [_tensors(safetensors.torch.load_file(run / "model.safetensors")) for run in runs]
    for each in about:
        del each["version"], each["digest"], each["weights"]["sha256"]
    return {
        "weights": digest(*weights),
        "preparation": digest(equal_value(json.dumps(each["preparation"]) for each in about)),
        "about": digest(*map(json.dumps, about)),
    }


def _join(path: Path, name: str) -> list[str]:
    return ["join", str(path), "--as", name, "--data", str(path.parent / f"{name}.csv")]


def _tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(name.encode() + tensors[name].detach().numpy().tobytes() for name in sorted(tensors))
