"""Federations inside one process: ada, bob and cleo, and a grid of three rows and two columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd import Cell
from cgd.federation.keys import Keys
from cgd.transport import runtime
from support.in_process import InProcessFederation, new_federation, uninterrupted_results
from support.programs import GRID, NAMES, Training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEVER_SECONDS = 1e9


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys.generate("hospital-a")


@pytest.fixture(scope="module")
def federation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_federation(tmp_path_factory.mktemp("federation_file"), NAMES)


@pytest.fixture(scope="module")
def uninterrupted(federation_file: Path) -> dict[str, str]:
    return uninterrupted_results(federation_file, federation_file.parent / "uninterrupted", Training())


@pytest.fixture
def federation(federation_file: Path, tmp_path: Path) -> Iterator[InProcessFederation]:
    with InProcessFederation(federation_file, tmp_path / "state") as made:
        yield made


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_federation(tmp_path_factory.mktemp("grid"), GRID, [Cell(int(name[1]), int(name[3])) for name in GRID])


@pytest.fixture(scope="module")
def uninterrupted_grid(grid_file: Path) -> dict[str, str]:
    return uninterrupted_results(grid_file, grid_file.parent / "uninterrupted", Training())


@pytest.fixture
def grid(grid_file: Path, tmp_path: Path) -> Iterator[InProcessFederation]:
    with InProcessFederation(grid_file, tmp_path / "state") as made:
        yield made


@pytest.fixture
def no_periodic_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save snapshots only at a clean stop."""
    monkeypatch.setattr(runtime, "SAVE_SECONDS", NEVER_SECONDS)
