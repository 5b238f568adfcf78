from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.idx_files import register_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def no_idx_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Search empty folders only, and never contact the real mirrors."""
    monkeypatch.delenv("CGD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'share'}:{tmp_path / 'more'}")
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    register_source(monkeypatch)
