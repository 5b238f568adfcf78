"""Cost of reading a large table and training on it: `make bench`.

The benchmark writes a table of mixed columns as CSV and as Parquet, and another with a tenth of its rows. One
participant reads it, computes the statistics together with two small participants, builds its matrix and trains some
steps. The result is the cost per row of the large table relative to the small one, in time and in memory: reading in
batches should cost the same per row for any number of rows. Every run has its own process; the fastest of several runs
counts, because the machine may be busy.
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
MAX_RATIO = 1.5  # cost of a row of the large table / cost of a row of the small table
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Cost of one run: seconds, bytes of peak memory beyond the imports, and bytes of the matrix."""

    reading: float
    training: float
    memory: int
    matrix: int

    @property
    def seconds(self) -> float:
        """The time from the file to the model."""
        return self.reading + self.training


def schema() -> Any:
    """Return the schema of the table, as in a federation file."""
    from cgd.federation.data_schema import Column, Data

    numbers = [Column(f"number {index}", "number") for index in range(COLUMNS - CATEGORICAL - 1)]
    return Data("outcome", (*numbers, *(Column(f"category {index}", "category") for index in range(CATEGORICAL))))


def chunk(rows: int, seed: int) -> Any:
    """Return random rows: numbers of several magnitudes and categories, with a twentieth of both missing."""
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(seed)
    table: dict[str, Any] = {}
    for index in range(COLUMNS - CATEGORICAL - 1):
        values = rng.normal(10.0 ** (index % 5), 10.0 ** (index % 3), rows).round(4)
        table[f"number {index}"] = pa.array(values, mask=rng.random(rows) < 0.05)
    for index in range(CATEGORICAL):
        names = np.array([f"category {name}" for name in range(2 + index)])
        table[f"category {index}"] = pa.array(names[rng.integers(0, len(names), rows)], mask=rng.random(rows) < 0.05)
    table["outcome"] = np.array(["yes", "no"])[rng.integers(0, 2, rows)]
    return pa.table(table)


def write_tables(folder: Path, rows: int) -> None:
    """Write a table as CSV and as Parquet, chunk by chunk."""
    import pyarrow.csv
    import pyarrow.parquet

    types = chunk(1, 0).schema
    with (
        pyarrow.csv.CSVWriter(folder / f"{rows}.csv", types) as csv,
        pyarrow.parquet.ParquetWriter(folder / f"{rows}.parquet", types) as parquet,
    ):
        for start in range(0, rows, CHUNK_ROWS):
            part = chunk(min(CHUNK_ROWS, rows - start), seed=start)
            csv.write_table(part)
            parquet.write_table(part)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def measure(path: Path, results: Any) -> None:
    """Read a file and train some steps together with two small participants; put the cost into the queue."""
    import torch

    import cgd
    from cgd.federation.config import Training
    from cgd.federation.model_section import Model
    from cgd.tabular.dataset import dataset_from_frame, read_dataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult, train

    torch.set_num_threads(1)
    data = schema()
    settings = TabularSettings(data, Model("mlp", (32,)), Training(steps=STEPS, optimizer="adam", lr=0.01, patience=0))
    others = [dataset_from_frame(chunk(500, seed), data, data.columns, target=True)[0] for seed in (1, 2)]

    def train_one(peers: cgd.Peers, own: TabularDataset) -> TrainingResult:
        return train(peers, settings, own)

    with cgd.local_peers(3) as members:
        members.run(train_one, [others[0], *others])  # imports and compiles everything
        before, started = peak_memory(), time.perf_counter()
        records, _ = read_dataset(path, data, data.columns)
        read_at = time.perf_counter()
        trained, *_ = members.run(train_one, [records, *others])
        ended = time.perf_counter()
    matrix = 4 * records.rows * len(trained.preprocessing.features)
    results.put(Cost(read_at - started, ended - read_at, peak_memory() - before, matrix))


def run_in_process(function: Any, *arguments: Any) -> None:
    """Call a function in a new process, so that earlier allocations do not count."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"{function.__name__}: the process ended with {process.exitcode}")


def measure_best(paths: Sequence[Path], repeats: int) -> list[Cost]:
    """Return the fastest of several runs and the least memory for each file, alternating between the files."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    costs: list[list[Cost]] = [[] for _ in paths]
    for _ in range(repeats):
        for path, found in zip(paths, costs, strict=True):
            run_in_process(measure, path, results)
            found.append(results.get())
    fastest = [min(found, key=lambda cost: cost.seconds) for found in costs]
    memory = [min(cost.memory for cost in found) for found in costs]
    return [replace(cost, memory=least) for cost, least in zip(fastest, memory, strict=True)]


def main() -> None:
    """Print the table, and fail if a row of the large table costs much more than a row of the small one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = Table(
        title=f"From a file of {COLUMNS} columns ({CATEGORICAL + 1} of categories) and a model, {STEPS} steps"
    )
    for heading in ("file", "rows", "MB", "read", "train", "time\nper row", "memory\nper row", "memory\n/ matrix"):
        table.add_column(heading, justify="right", no_wrap=True)
    exceeded = []
    with tempfile.TemporaryDirectory(prefix="cgd-bench-") as folder:
        sizes = (options.rows // 10, options.rows)
        for rows in sizes:
            run_in_process(write_tables, Path(folder), rows)
        for kind in ("csv", "parquet"):
            paths = [Path(folder) / f"{rows}.{kind}" for rows in sizes]
            small, large = measure_best(paths, options.repeats)
            ratios = {"time": large.seconds / small.seconds / 10, "memory": large.memory / small.memory / 10}
            for rows, path, cost in zip(sizes, paths, (small, large), strict=True):
                per_row = [f"{ratio:.2f}" for ratio in ratios.values()] if cost is large else ["1", "1"]
                figures = (f"{path.stat().st_size / MEGABYTE:.0f}", f"{cost.reading:.2f} s", f"{cost.training:.2f} s")
                table.add_row(kind, f"{rows:,}", *figures, *per_row, f"{cost.memory / cost.matrix:.2f}")
            exceeded += [f"{kind}: {what} {ratio:.2f}" for what, ratio in ratios.items() if ratio > MAX_RATIO]
    Console().print(table)
    if exceeded:
        raise SystemExit(
            f"a row of the large table costs more than {MAX_RATIO} times a row of the small one: {'; '.join(exceeded)}"
        )
    print(f"A row of the large table costs at most {MAX_RATIO} times a row of the small one.")


if __name__ == "__main__":
    main()
