"""The state folder: saved journals are found after a restart, wherever the process was killed."""

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


def make_journal(count: int) -> Journal:
    """Return a journal with this many sums; both numbers of a total are its position."""
    journal = Journal()
    for place in range(count):
        journal.append(spec(2), np.full(2, place, dtype="<u4"), epoch=1)
    return journal


def append(state: StateFolder, journal: Journal, *places: int) -> None:
    for place in places:
        state.append(EVERYONE, place, journal.entry_record(place))


def load_totals(folder: Path) -> list[int]:
    """Return the totals that a new process finds."""
    journal = StateFolder(folder, FEDERATION).load().get(EVERYONE, Journal())
    return [int(journal.total(place, spec(2))[0]) for place in range(len(journal))]


def lock(folder: Path) -> None:
    """Lock the folder and release it."""
    state = StateFolder(folder, FEDERATION)
    try:
        state.lock()
    finally:
        state.close()


def files(folder: Path) -> set[str]:
    return {path.name.removeprefix(f"{FEDERATION}+{EVERYONE}.") for path in folder.iterdir()}


def test_entries_are_readable_at_once_and_after_restarts(tmp_path: Path) -> None:
    journal = make_journal(5)
    for restart in range(5):  # each process appends one entry and is killed
        assert load_totals(tmp_path) == list(range(restart))
        state = StateFolder(tmp_path, FEDERATION)
        append(state, journal, restart)
        assert load_totals(tmp_path) == list(range(restart + 1))
        state.close()


def test_truncated_last_entry_is_ignored_and_written_again(tmp_path: Path) -> None:
    journal = make_journal(3)
    state = StateFolder(tmp_path, FEDERATION)
    append(state, journal, 0, 1)
    (segment,) = tmp_path.iterdir()
    before = segment.stat().st_size
    append(state, journal, 2)
    state.close()
    whole = segment.read_bytes()
    for size in range(before, len(whole)):
        segment.write_bytes(whole[:size])
        assert load_totals(tmp_path) == [0, 1]
    again = StateFolder(tmp_path, FEDERATION)
    append(again, journal, 2)
    assert load_totals(tmp_path) == [0, 1, 2]
    again.close()


def test_damaged_snapshot_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateFolder(tmp_path, FEDERATION).save(EVERYONE, 3, make_journal(3).to_bytes())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert load_totals(tmp_path) == []
    assert f"{path} is damaged and not used" in caplog.text
    assert "the journal is recovered from the peers" in caplog.text


def test_entries_appended_during_a_snapshot_are_not_lost(tmp_path: Path) -> None:
    """Also if the process is killed while the snapshot is saved."""
    journal = make_journal(4)
    state = StateFolder(tmp_path, FEDERATION)
    append(state, journal, 0, 1)
    state.rotate(EVERYONE)
    content = make_journal(2).to_bytes()
    assert load_totals(tmp_path) == [0, 1]
    append(state, journal, 2)
    assert load_totals(tmp_path) == [0, 1, 2]  # killed before the save
    old = next(tmp_path.glob("*.0.entries")).read_bytes()
    state.save(EVERYONE, 2, content)
    assert load_totals(tmp_path) == [0, 1, 2]
    append(state, journal, 3)
    assert load_totals(tmp_path) == [0, 1, 2, 3]
    (tmp_path / f"{FEDERATION}+{EVERYONE}.0.entries").write_bytes(old)  # killed before the segment was removed
    assert load_totals(tmp_path) == [0, 1, 2, 3]
    state.close()


def test_segments_contained_in_a_snapshot_are_removed(tmp_path: Path) -> None:
    journal = make_journal(6)
    state = StateFolder(tmp_path, FEDERATION)
    append(state, journal, 0, 1)
    state.rotate(EVERYONE)
    append(state, journal, 2, 3)
    assert files(tmp_path) == {"0.entries", "2.entries"}
    state.rotate(EVERYONE)
    append(state, journal, 4)
    state.save(EVERYONE, 4, make_journal(4).to_bytes())
    assert files(tmp_path) == {"ledger", "4.entries"}
    state.rotate(EVERYONE)
    state.save(EVERYONE, 5, make_journal(5).to_bytes())
    assert files(tmp_path) == {"ledger"}
    append(state, journal, 5)
    assert load_totals(tmp_path) == [0, 1, 2, 3, 4, 5]
    state.close()


def test_state_folder_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "ada"
    before = os.umask(0)
    try:
        state = StateFolder(folder, FEDERATION)
        append(state, make_journal(1), 0)
        state.rotate(EVERYONE)
        append(state, make_journal(2), 1)
        state.save(EVERYONE, 1, make_journal(1).to_bytes())
        state.close()
    finally:
        os.umask(before)
    assert files(folder) == {"ledger", "1.entries"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722, 0o1777])
def test_folder_writable_by_others_is_rejected(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "my state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        InputError, match=rf"has mode {mode:04o}, so other users can put files there; chmod 700 '.*my state'"
    ):
        lock(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)  # other users may list it: the files have mode 0600
    lock(folder)


def test_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        InputError, match=rf"belongs to user {owner}, and this process runs as user {owner + 1}; .*--state"
    ):
        lock(tmp_path)


@pytest.mark.parametrize("name", ["lock", f"{FEDERATION}+{EVERYONE}.ledger", f"{FEDERATION}+{EVERYONE}.0.entries"])
def test_symbolic_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, target = tmp_path / "state", tmp_path / "precious"
    folder.mkdir(mode=0o700)
    target.write_text("not ours to touch")
    (folder / name).symlink_to(target)
    with pytest.raises(InputError, match=r"is a symbolic link, which is not followed; remove it"):
        lock(folder)
        StateFolder(folder, FEDERATION).load()
    assert target.read_text() == "not ours to touch"


def test_symbolic_link_that_appears_later_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, target = tmp_path / "state", tmp_path / "precious"
    folder.mkdir(mode=0o700)
    target.write_text("not ours to touch")
    for name in ("new", "0.entries"):
        (folder / f"{FEDERATION}+{EVERYONE}.{name}").symlink_to(target)
    state = StateFolder(folder, FEDERATION)
    append(state, make_journal(1), 0)
    state.rotate(EVERYONE)
    assert not state.save(EVERYONE, 1, make_journal(1).to_bytes())
    assert target.read_text() == "not ours to touch"
    assert "the state cannot be saved" in caplog.text


def test_existing_file_gets_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o666)
    lock(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_federations_with_similar_names_do_not_share_files(tmp_path: Path) -> None:
    """Each federation has as many sums as its position in the list; a snapshot removes its own segments only."""
    names = ("trial", "trial.2", "trial-1", "trial-everyone", "trial-everyone.2", "trial-everyone.0.entries", "trial-2")
    states = [StateFolder(tmp_path, name) for name in names]
    for count, state in enumerate(states, start=1):
        append(state, make_journal(count), *range(count))
        state.close()

    def lengths() -> list[int]:
        return [len(StateFolder(tmp_path, name).load()[EVERYONE]) for name in names]

    assert lengths() == [1, 2, 3, 4, 5, 6, 7]
    states[0].save(EVERYONE, 99, make_journal(1).to_bytes())
    assert lengths() == [1, 2, 3, 4, 5, 6, 7]


def test_groups_with_similar_names_do_not_share_files(tmp_path: Path) -> None:
    groups = ("everyone", "row-1", "row-10", "column-1")
    state = StateFolder(tmp_path, FEDERATION)
    for count, group in enumerate(groups, start=1):
        for place in range(count):
            state.append(group, place, make_journal(count).entry_record(place))
    state.close()
    loaded = StateFolder(tmp_path, FEDERATION).load()
    assert [len(loaded[group]) for group in groups] == [1, 2, 3, 4]


def test_damaged_entry_ends_the_replay_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For every changed byte: no total is read from a damaged entry."""
    state = StateFolder(tmp_path, FEDERATION)
    sizes = []
    for place in range(3):
        append(state, make_journal(3), place)
        sizes.append(next(tmp_path.iterdir()).stat().st_size)
    state.close()
    (segment,) = tmp_path.iterdir()
    whole = segment.read_bytes()
    for at in range(sizes[0], sizes[1]):
        caplog.clear()
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert load_totals(tmp_path) == [0], at
        assert f"{segment} is damaged and not used" in caplog.text
    segment.write_bytes(whole)
    assert load_totals(tmp_path) == [0, 1, 2]


def test_truncated_entry_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = StateFolder(tmp_path, FEDERATION)
    append(state, make_journal(1), 0)
    state.close()
    (segment,) = tmp_path.iterdir()
    whole = segment.read_bytes()
    for size in range(len(whole)):
        segment.write_bytes(whole[:size])
        assert load_totals(tmp_path) == []
    assert caplog.text == ""
