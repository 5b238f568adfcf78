"""The state folder by itself: what was kept is there in the next life, whatever happened to this one."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from cgd.federation.state import StateFolder
from cgd.protocol.ledger import Ledger
from support.wire import spec

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FEDERATION = "trial"
EVERYONE = "everyone"


def entries(count: int) -> Ledger:
    """A ledger with so many sums; the total of each is its place, twice."""
    ledger = Ledger()
    for place in range(count):
        ledger.append(spec(2), np.full(2, place, dtype="<u4"), epoch=1)
    return ledger


def keep(state: StateFolder, ledger: Ledger, *places: int) -> None:
    for place in places:
        state.append(EVERYONE, place, ledger.entry(place))


def kept(folder: Path) -> list[int]:
    """The totals that a new life finds."""
    ledger = StateFolder(folder, FEDERATION).load([EVERYONE]).get(EVERYONE, Ledger())
    return [int(ledger.total(place, spec(2))[0]) for place in range(len(ledger))]


def files(folder: Path) -> set[str]:
    return {path.name.removeprefix(f"{FEDERATION}-{EVERYONE}.") for path in folder.iterdir()}


def test_entries_are_there_at_once_and_in_the_next_life_too(tmp_path: Path) -> None:
    ledger = entries(5)
    for life in range(5):  # of one entry each, and killed
        assert kept(tmp_path) == list(range(life))
        state = StateFolder(tmp_path, FEDERATION)
        keep(state, ledger, life)
        assert kept(tmp_path) == list(range(life + 1))
        state.close()


def test_a_last_entry_that_was_cut_off_is_ignored_and_made_again(tmp_path: Path) -> None:
    ledger = entries(3)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, ledger, 0, 1)
    (journal,) = tmp_path.iterdir()
    before = journal.stat().st_size
    keep(state, ledger, 2)
    state.close()
    whole = journal.read_bytes()
    for size in range(before, len(whole)):
        journal.write_bytes(whole[:size])
        assert kept(tmp_path) == [0, 1]
    again = StateFolder(tmp_path, FEDERATION)
    keep(again, ledger, 2)
    assert kept(tmp_path) == [0, 1, 2]
    again.close()


def test_a_damaged_ledger_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateFolder(tmp_path, FEDERATION).save(EVERYONE, 3, entries(3).to_bytes())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert kept(tmp_path) == []
    assert f"{path} is damaged and not used" in caplog.text
    assert "the others will catch us up" in caplog.text


def test_what_comes_while_a_ledger_is_saved_is_not_lost(tmp_path: Path) -> None:
    """Nor if the process is killed at any moment of it."""
    ledger = entries(4)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, ledger, 0, 1)
    state.turn(EVERYONE)
    content = entries(2).to_bytes()
    assert kept(tmp_path) == [0, 1]
    keep(state, ledger, 2)
    assert kept(tmp_path) == [0, 1, 2]  # killed before the save
    old = next(tmp_path.glob("*.0.entries")).read_bytes()
    state.save(EVERYONE, 2, content)
    assert kept(tmp_path) == [0, 1, 2]
    keep(state, ledger, 3)
    assert kept(tmp_path) == [0, 1, 2, 3]
    (tmp_path / f"{FEDERATION}-{EVERYONE}.0.entries").write_bytes(old)  # killed before it was removed
    assert kept(tmp_path) == [0, 1, 2, 3]
    state.close()


def test_entries_that_a_saved_ledger_has_vanish(tmp_path: Path) -> None:
    ledger = entries(6)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, ledger, 0, 1)
    state.turn(EVERYONE)
    keep(state, ledger, 2, 3)
    assert files(tmp_path) == {"0.entries", "2.entries"}
    state.turn(EVERYONE)
    keep(state, ledger, 4)
    state.save(EVERYONE, 4, entries(4).to_bytes())
    assert files(tmp_path) == {"ledger", "4.entries"}
    state.turn(EVERYONE)
    state.save(EVERYONE, 5, entries(5).to_bytes())
    assert files(tmp_path) == {"ledger"}
    keep(state, ledger, 5)
    assert kept(tmp_path) == [0, 1, 2, 3, 4, 5]
    state.close()


def test_only_its_owner_can_read_a_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "ada"
    before = os.umask(0)
    try:
        state = StateFolder(folder, FEDERATION)
        keep(state, entries(1), 0)
        state.turn(EVERYONE)
        keep(state, entries(2), 1)
        state.save(EVERYONE, 1, entries(1).to_bytes())
        state.close()
    finally:
        os.umask(before)
    assert files(folder) == {"ledger", "1.entries"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
