"""A table of numbers and categories, and a federation file for it."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np

from support.federation_files import THREE, block, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUMBERS = tuple(f"value_{number}" for number in range(8))
CLASSES = 'classes = ["no", "yes"]'
PRIVACY = "[privacy]\nepsilon = 4.0\ndelta = 1e-5\n"
FOUR = (*THREE, "dan")


def write_table(folder: Path, rows: int = 60, seed: int = 0, **more: Sequence[Any]) -> Path:
    """Write my.csv: eight numbers, a ward, and an outcome that depends on them; two rows have no outcome."""
    random = np.random.default_rng(seed)
    numbers = random.normal(50, 10, (rows, len(NUMBERS))).round(3)
    outcome = np.where(numbers[:, 0] + numbers[:, 1] > 100, "yes", "no").astype(object)
    outcome[[3, 4]] = ""
    columns: dict[str, Any] = {name: numbers[:, place] for place, name in enumerate(NUMBERS)}
    columns |= {"ward": random.choice(["A", "B"], rows), "outcome": outcome, **more}
    path = folder / "my.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_federation(
    folder: Path,
    training: str = 'steps = 8\nlr = 0.5\noptimizer = "sgd"',
    model: str = 'kind = "mlp"\nlayers = [24]',
    data: str = "",
    more: str = "",
    members: Sequence[str] = FOUR,
) -> Path:
    """Write federation.toml."""
    numbers = "\n".join(f'{name} = {{ type = "number", range = [0, 100] }}' for name in NUMBERS)
    sections = f'[data]\ntarget = "outcome"\n{CLASSES}\n{data}\n[data.columns]\n{numbers}\nward = ["A", "B"]\n'
    blocks = "\n".join(block(place, name) for place, name in enumerate(members))
    return write(
        folder, f'name = "trial"\nepoch = 1\n[training]\n{training}\n{sections}\n[model]\n{model}\n{more}\n{blocks}'
    )
