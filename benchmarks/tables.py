"""What it costs to read a large table and to train on it: `make bench`.

A table of mixed columns is made, as CSV and as Parquet, and another with a tenth of its rows. One participant reads it,
finds out the statistics together with two small ones, makes its matrix and trains some steps with them. What counts is
a row of the large table against a row of the small one, in time and in memory: reading in batches costs the same per
row, however many there are. Every run has a process of its own; the best of several counts, because the machine may be
busy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.tabular.dataset import TabularDataset

COLUMNS, CATEGORICAL, STEPS = 50, 15, 10
CHUNK_ROWS = 50_000
MAX_RATIO = 1.5  # times what a row of the small table costs
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What one run took: seconds, bytes at the peak beyond those of the imports, and bytes of the matrix."""

    reading: float
    training: float
    memory: int
    matrix: int

    @property
    def seconds(self) -> float:
        """From the file to the model."""
        return self.reading + self.training


def schema() -> Any:
    """What the federation file would say."""
    from cgd.federation.data_schema import Column, Data

    numbers = [Column(f"number {place}", "number") for place in range(COLUMNS - CATEGORICAL - 1)]
    return Data("outcome", (*numbers, *(Column(f"category {place}", "category") for place in range(CATEGORICAL))))


def chunk(rows: int, seed: int) -> Any:
    """Some rows: numbers of several sizes, categories, and a twentieth of both missing."""
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(seed)
    table: dict[str, Any] = {}
    for place in range(COLUMNS - CATEGORICAL - 1):
        values = rng.normal(10.0 ** (place % 5), 10.0 ** (place % 3), rows).round(4)
        table[f"number {place}"] = pa.array(values, mask=rng.random(rows) < 0.05)
    for place in range(CATEGORICAL):
        names = np.array([f"category {name}" for name in range(2 + place)])
        table[f"category {place}"] = pa.array(names[rng.integers(0, len(names), rows)], mask=rng.random(rows) < 0.05)
    table["outcome"] = np.array(["yes", "no"])[rng.integers(0, 2, rows)]
    return pa.table(table)


def make(folder: Path, rows: int) -> None:
    """Write a table as CSV and as Parquet, a chunk at a time."""
    import pyarrow.csv
    import pyarrow.parquet

    types = chunk(1, 0).schema
    with (
        pyarrow.csv.CSVWriter(folder / f"{rows}.csv", types) as csv,
        pyarrow.parquet.ParquetWriter(folder / f"{rows}.parquet", types) as parquet,
    ):
        for start in range(0, rows, CHUNK_ROWS):
            some = chunk(min(CHUNK_ROWS, rows - start), seed=start)
            csv.write_table(some)
            parquet.write_table(some)


def peak() -> int:
    """The most bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def measure(path: Path, results: Any) -> None:
    """Runs in a process of its own: read, prepare and train some steps together with two others."""
    import torch

    import cgd
    from cgd.federation.config import Training
    from cgd.federation.data_schema import Model
    from cgd.tabular.loading import from_frame, read
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult, train

    torch.set_num_threads(1)
    data = schema()
    setting = TabularSettings(data, Model("mlp", (32,)), Training(steps=STEPS, optimizer="adam", lr=0.01, patience=0))
    others = [from_frame(chunk(500, seed), data, data.columns, target=True)[0] for seed in (1, 2)]

    def one(peers: cgd.Peers, own: TabularDataset) -> TrainingResult:
        return train(peers, setting, own)

    with cgd.local_peers(3) as colony:
        colony.run(one, [others[0], *others])  # everything is imported and has run once
        before, started = peak(), time.perf_counter()
        records, _ = read(path, data, data.columns)
        read_at = time.perf_counter()
        trained, *_ = colony.run(one, [records, *others])
        ended = time.perf_counter()
    matrix = 4 * records.rows * len(trained.preparation.features)
    results.put(Cost(read_at - started, ended - read_at, peak() - before, matrix))


def in_process(function: Any, *arguments: Any) -> None:
    """Call it in a fresh process, so that nothing that was allocated before counts."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"{function.__name__}: the process ended with {process.exitcode}")


def best(paths: Sequence[Path], repeats: int) -> list[Cost]:
    """For each file the fastest of several runs, in turns so that all meet the same machine, and the least memory."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    costs: list[list[Cost]] = [[] for _ in paths]
    for _ in range(repeats):
        for path, found in zip(paths, costs, strict=True):
            in_process(measure, path, results)
            found.append(results.get())
    fastest = [min(found, key=lambda cost: cost.seconds) for found in costs]
    memory = [min(cost.memory for cost in found) for found in costs]
    return [replace(cost, memory=least) for cost, least in zip(fastest, memory, strict=True)]


def main() -> None:
    """Print the table, and fail if a row of the large table costs much more than one of the small."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = Table(
        title=f"From a file of {COLUMNS} columns ({CATEGORICAL + 1} of categories) and a model, {STEPS} steps"
    )
    for heading in ("file", "rows", "MB", "read", "train", "time\nper row", "memory\nper row", "memory\n/ matrix"):
        table.add_column(heading, justify="right", no_wrap=True)
    missed = []
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        sizes = (options.rows // 10, options.rows)
        for rows in sizes:
            in_process(make, Path(folder), rows)
        for kind in ("csv", "parquet"):
            paths = [Path(folder) / f"{rows}.{kind}" for rows in sizes]
            small, large = best(paths, options.repeats)
            ratios = {"time": large.seconds / small.seconds / 10, "memory": large.memory / small.memory / 10}
            for rows, path, cost in zip(sizes, paths, (small, large), strict=True):
                per_row = [f"{ratio:.2f}" for ratio in ratios.values()] if cost is large else ["1", "1"]
                figures = (f"{path.stat().st_size / MEGABYTE:.0f}", f"{cost.reading:.2f} s", f"{cost.training:.2f} s")
                table.add_row(kind, f"{rows:,}", *figures, *per_row, f"{cost.memory / cost.matrix:.2f}")
            missed += [f"{kind}: {what} {ratio:.2f}" for what, ratio in ratios.items() if ratio > MAX_RATIO]
    Console().print(table)
    if missed:
        raise SystemExit(f"a row of the large table costs more than {MAX_RATIO} times one of the small: {'; '.join(missed)}")
    print(f"A row of the large table costs at most {MAX_RATIO} times one of the small: met.")


if __name__ == "__main__":
    main()
