"""Traces of runs in one process, for tests."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cgd
from cgd.audit.trace_view import load
from cgd.federation.model_section import Model
from cgd.tabular.trace_writer import TraceWriter
from cgd.tabular.training import train
from support.tabular import DATA, REGRESSION, records, table, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cgd.audit.trace_view import Trace
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

NAMES = ("ada", "bob", "cleo", "dan")
COALITION = ("ada", "cleo")
TABLES = [table(60, 1), table(40, 2, ("B", "C")), table(30, 3), table(20, 4)]
BALANCED = replace(DATA, class_weights="balanced")
SETTINGS: dict[str, TabularSettings] = {
    "sgd": tabular_settings(optimizer="sgd", lr=0.5, steps=12, validate_every=4),
    "learning rate schedule": tabular_settings(optimizer="sgd", lr=0.5, mu=0.1, steps=12, validate_every=4),
    "momentum": tabular_settings(optimizer="sgd", lr=0.2, momentum=0.9, steps=12, validate_every=4),
    "adam": tabular_settings(steps=12, validate_every=4),
    "class weights": tabular_settings(BALANCED, steps=12, validate_every=4),
    "regression": tabular_settings(REGRESSION, Model("linear"), optimizer="sgd", lr=0.1, steps=12, validate_every=4),
}

DELAYED: dict[str, TabularSettings] = {
    "delay": tabular_settings(optimizer="sgd", lr=0.2, mu=0.1, momentum=0.5, steps=12, validate_every=4, delay=2),
    "adam, delay": tabular_settings(steps=12, validate_every=4, delay=3),
}
"""Settings with which a gradient is not that of the displacement after all sums before it."""

BATCHED: dict[str, TabularSettings] = {
    "batches": tabular_settings(optimizer="sgd", lr=0.5, steps=6, validate_every=3, batches=2),
    "local epochs": tabular_settings(
        optimizer="sgd", lr=1.0, steps=6, validate_every=3, batches=2, local_epochs=2, local_lr=0.02
    ),
}
"""Settings whose sums are not about the gradients of all records."""


def seed_of(name: str) -> bytes:
    """Return the seed of a participant."""
    return name.encode().ljust(32, b".")


def run(
    settings: TabularSettings,
    folder: Path | None = None,
    *,
    names: Sequence[str] = NAMES,
    tables: Sequence[dict[str, list[Any]]] = TABLES,
    wrap: Callable[[TraceWriter], TraceWriter] = lambda trace_writer: trace_writer,
    **options: Any,
) -> tuple[list[TrainingResult], dict[str, cgd.Peers]]:
    """Train in one process, and record traces if a folder is given; origins follow from the names."""
    trace_writers: dict[str, TraceWriter] = {}

    def one(peers: cgd.Peers, content: dict[str, list[Any]]) -> TrainingResult:
        peers.seed = seed_of(peers.me)
        return train(peers, settings, records(content, settings.data), trace_writer=trace_writers.get(peers.me))

    with ExitStack() as open_files:
        if folder is not None:
            opened = {name: TraceWriter(folder / name, name, "trial") for name in names}
            trace_writers |= {name: wrap(open_files.enter_context(each)) for name, each in opened.items()}
        sinks = {name: each.frame for name, each in trace_writers.items()}
        with cgd.local_peers(names, sinks=sinks, **options) as group:
            results = group.run(one, tables)
    return results, {peers.me: peers for peers in group}


def load_all(folder: Path) -> list[Trace]:
    return [load(folder / name) for name in NAMES]
