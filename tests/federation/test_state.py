"""The state folder by itself: what was kept is there in the next life, whatever happened to this one."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.errors import InputError
from cgd.federation.state import StateFolder
from cgd.secagg.journal import Journal
from support.wire import spec

if TYPE_CHECKING:
    from pathlib import Path

FEDERATION = "trial"
EVERYONE = "everyone"


def entries(count: int) -> Journal:
    """A ledger with so many sums; the total of each is its place, twice."""
    journal = Journal()
    for place in range(count):
        journal.append(spec(2), np.full(2, place, dtype="<u4"), epoch=1)
    return journal


def keep(state: StateFolder, journal: Journal, *places: int) -> None:
    for place in places:
        state.append(EVERYONE, place, journal.entry(place))


def kept(folder: Path) -> list[int]:
    """The totals that a new life finds."""
    journal = StateFolder(folder, FEDERATION).load([EVERYONE]).get(EVERYONE, Journal())
    return [int(journal.total(place, spec(2))[0]) for place in range(len(journal))]


def lock(folder: Path) -> None:
    """Take the folder and give it back."""
    state = StateFolder(folder, FEDERATION)
    try:
        state.lock()
    finally:
        state.close()


def files(folder: Path) -> set[str]:
    return {path.name.removeprefix(f"{FEDERATION}+{EVERYONE}.") for path in folder.iterdir()}


def test_entries_are_there_at_once_and_in_the_next_life_too(tmp_path: Path) -> None:
    journal = entries(5)
    for life in range(5):  # of one entry each, and killed
        assert kept(tmp_path) == list(range(life))
        state = StateFolder(tmp_path, FEDERATION)
        keep(state, journal, life)
        assert kept(tmp_path) == list(range(life + 1))
        state.close()


def test_a_last_entry_that_was_cut_off_is_ignored_and_made_again(tmp_path: Path) -> None:
    journal = entries(3)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, journal, 0, 1)
    (segment,) = tmp_path.iterdir()
    before = segment.stat().st_size
    keep(state, journal, 2)
    state.close()
    whole = segment.read_bytes()
    for size in range(before, len(whole)):
        segment.write_bytes(whole[:size])
        assert kept(tmp_path) == [0, 1]
    again = StateFolder(tmp_path, FEDERATION)
    keep(again, journal, 2)
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
    journal = entries(4)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, journal, 0, 1)
    state.turn(EVERYONE)
    content = entries(2).to_bytes()
    assert kept(tmp_path) == [0, 1]
    keep(state, journal, 2)
    assert kept(tmp_path) == [0, 1, 2]  # killed before the save
    old = next(tmp_path.glob("*.0.entries")).read_bytes()
    state.save(EVERYONE, 2, content)
    assert kept(tmp_path) == [0, 1, 2]
    keep(state, journal, 3)
    assert kept(tmp_path) == [0, 1, 2, 3]
    (tmp_path / f"{FEDERATION}+{EVERYONE}.0.entries").write_bytes(old)  # killed before it was removed
    assert kept(tmp_path) == [0, 1, 2, 3]
    state.close()


def test_entries_that_a_saved_ledger_has_vanish(tmp_path: Path) -> None:
    journal = entries(6)
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, journal, 0, 1)
    state.turn(EVERYONE)
    keep(state, journal, 2, 3)
    assert files(tmp_path) == {"0.entries", "2.entries"}
    state.turn(EVERYONE)
    keep(state, journal, 4)
    state.save(EVERYONE, 4, entries(4).to_bytes())
    assert files(tmp_path) == {"ledger", "4.entries"}
    state.turn(EVERYONE)
    state.save(EVERYONE, 5, entries(5).to_bytes())
    assert files(tmp_path) == {"ledger"}
    keep(state, journal, 5)
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


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "my state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        InputError, match=rf"has mode {mode:04o}, so others can put files there; chmod 700 '.*my state'"
    ):
        lock(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)  # what others can only list is as good: the files are for their owner
    lock(folder)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InputError, match=rf"belongs to user {owner}, and we are user {owner + 1}; .*--state"):
        lock(tmp_path)


@pytest.mark.parametrize("name", ["lock", f"{FEDERATION}+{EVERYONE}.ledger", f"{FEDERATION}+{EVERYONE}.0.entries"])
def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, target = tmp_path / "state", tmp_path / "precious"
    folder.mkdir(mode=0o700)
    target.write_text("not ours to touch")
    (folder / name).symlink_to(target)
    with pytest.raises(InputError, match=r"is a symbolic link, and such are not followed; remove it"):
        lock(folder)
        StateFolder(folder, FEDERATION).load([EVERYONE])
    assert target.read_text() == "not ours to touch"


def test_a_link_that_appears_later_is_not_followed_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, target = tmp_path / "state", tmp_path / "precious"
    folder.mkdir(mode=0o700)
    target.write_text("not ours to touch")
    for name in ("new", "0.entries"):
        (folder / f"{FEDERATION}+{EVERYONE}.{name}").symlink_to(target)
    state = StateFolder(folder, FEDERATION)
    keep(state, entries(1), 0)
    state.turn(EVERYONE)
    assert not state.save(EVERYONE, 1, entries(1).to_bytes())
    assert target.read_text() == "not ours to touch"
    assert "the state cannot be saved" in caplog.text


def test_files_that_others_could_read_no_longer_can(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o666)
    lock(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_federations_with_similar_names_share_a_folder_and_nothing_else(tmp_path: Path) -> None:
    """Each has as many sums as its place in the list; whoever is saved removes its own entries only."""
    names = ("trial", "trial.2", "trial-1", "trial-everyone", "trial-everyone.2", "trial-everyone.0.entries", "trial-2")
    states = [StateFolder(tmp_path, name) for name in names]
    for count, state in enumerate(states, start=1):
        keep(state, entries(count), *range(count))
        state.close()

    def lengths() -> list[int]:
        return [len(StateFolder(tmp_path, name).load([EVERYONE])[EVERYONE]) for name in names]

    assert lengths() == [1, 2, 3, 4, 5, 6, 7]
    states[0].save(EVERYONE, 99, entries(1).to_bytes())
    assert lengths() == [1, 2, 3, 4, 5, 6, 7]


def test_groups_with_similar_names_share_nothing_either(tmp_path: Path) -> None:
    groups = ("everyone", "row-1", "row-10", "column-1")
    state = StateFolder(tmp_path, FEDERATION)
    for count, group in enumerate(groups, start=1):
        for place in range(count):
            state.append(group, place, entries(count).entry(place))
    state.close()
    assert [len(journal) for journal in StateFolder(tmp_path, FEDERATION).load(groups).values()] == [1, 2, 3, 4]


def test_a_damaged_entry_ends_the_replay_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever byte of it was changed: no total is ever taken from a damaged record."""
    state = StateFolder(tmp_path, FEDERATION)
    sizes = []
    for place in range(3):
        keep(state, entries(3), place)
        sizes.append(next(tmp_path.iterdir()).stat().st_size)
    state.close()
    (segment,) = tmp_path.iterdir()
    whole = segment.read_bytes()
    for at in range(sizes[0], sizes[1]):
        caplog.clear()
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert kept(tmp_path) == [0], at
        assert f"{segment} is damaged and not used" in caplog.text
    segment.write_bytes(whole)
    assert kept(tmp_path) == [0, 1, 2]


def test_an_entry_that_was_cut_off_is_nothing_to_warn_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = StateFolder(tmp_path, FEDERATION)
    keep(state, entries(1), 0)
    state.close()
    (segment,) = tmp_path.iterdir()
    whole = segment.read_bytes()
    for size in range(len(whole)):
        segment.write_bytes(whole[:size])
        assert kept(tmp_path) == []
    assert caplog.text == ""
