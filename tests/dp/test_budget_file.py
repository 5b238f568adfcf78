"""The budget of a data set on disk: limits, several processes, damaged files, and disks that fail."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from cgd.dp.accountant import MAX_DRAWS, Budget
from cgd.dp.budget_file import BudgetFile
from cgd.errors import BudgetSpentError, InputError, RevealError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = Budget(2.0, 1e-5, MAX_DRAWS).mu_squared


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.budget"


def open_file(path: Path, epsilon: float = 2.0) -> BudgetFile:
    return BudgetFile(path, epsilon, 1e-5)


def test_charges_are_found_by_the_next_process(path: Path) -> None:
    first = open_file(path)
    assert first.unused
    first.charge(0.01, "one", "a step")
    first.charge(0.02, "two", "a step")
    again = open_file(path, epsilon=20.0)
    assert not again.unused
    assert again.epsilon == 2.0
    assert again.charges == first.charges
    assert [each.mu_squared for each in again.of_training("two")] == [0.02]
    assert again.epsilon_spent == first.epsilon_spent > 0


def test_only_the_owner_can_read_it(path: Path) -> None:
    open_file(path).charge(0.01, "one", "a step")
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_limit_is_never_exceeded_and_can_be_reached(path: Path) -> None:
    budget = open_file(path)
    for _ in range(3):
        budget.charge(LIMIT / 4, "one", "a step")
    with pytest.raises(BudgetSpentError, match=r"epsilon = 2 at delta = 1e-05, of which 1\.7 is spent, by one \(3"):
        budget.charge(LIMIT / 4 * (1 + 1e-15), "two", "a step")
    assert len(open_file(path).charges) == 3
    budget.charge(LIMIT / 4, "two", "a step")
    with pytest.raises(BudgetSpentError):
        budget.charge(1e-300, "two", "a step")


def test_training_is_checked_before_it_begins_besides_its_own_charges(path: Path) -> None:
    budget = open_file(path)
    budget.check(LIMIT, "one")
    budget.charge(LIMIT / 2, "one", "a step")
    budget.check(LIMIT, "one")
    open_file(path).charge(LIMIT / 4, "two", "a step")  # in another process
    with pytest.raises(InputError, match=r"1\.\d+ is left for a training"):
        budget.check(LIMIT, "one")
    budget.check(LIMIT * 0.75, "one")


def test_limit_can_only_be_raised(path: Path) -> None:
    budget = open_file(path)
    budget.charge(LIMIT, "one", "a step")
    for epsilon in (1.0, 2.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="name a higher one"):
            budget.raise_limit(epsilon)
    with pytest.raises(InputError, match="cannot be promised"):
        budget.raise_limit(1e9)
    budget.raise_limit(3.0)
    again = open_file(path)
    assert (again.epsilon, len(again.charges)) == (3.0, 1)
    again.charge(0.01, "two", "a step")


def test_limit_of_an_attempt_without_charges_is_not_kept(path: Path) -> None:
    open_file(path, epsilon=8.0)
    again = BudgetFile(path, 0.5, 1e-6, "patient")
    assert (again.epsilon, again.delta, again.unit, again.unused) == (0.5, 1e-6, "patient", True)
    again.charge(1e-4, "one", "a step")
    shown = BudgetFile(path, 1.0, 1e-5, None)
    assert (shown.epsilon, shown.delta, shown.unit, len(shown.charges)) == (0.5, 1e-6, "patient", 1)


def test_limit_is_that_of_the_training_that_is_charged_first(path: Path) -> None:
    first, second = open_file(path, epsilon=2.0), open_file(path, epsilon=8.0)
    first.check(LIMIT, "one")
    first.charge(LIMIT / 2, "one", "a step")
    with pytest.raises(BudgetSpentError, match="epsilon = 2 at"):
        second.charge(LIMIT, "two", "a step")
    assert second.epsilon == open_file(path, epsilon=8.0).epsilon == 2.0


def test_waiting_training_does_not_take_the_unit_of_another_one(path: Path) -> None:
    records, persons = open_file(path), BudgetFile(path, 2.0, 1e-5, "patient")
    records.charge(0.01, "one", "a step")
    with pytest.raises(RevealError, match="are for single records, and those of this training for all records of one"):
        persons.charge(0.01, "two", "a step")
    with pytest.raises(InputError, match="are for single records"):
        persons.check(0.01, "two")
    assert [each.training for each in open_file(path).charges] == ["one"]


def test_check_before_a_charge_sees_the_charges_of_other_processes(path: Path) -> None:
    first, second = open_file(path), open_file(path)
    second.charge(0.01, "one", "a step")

    def check() -> None:
        assert len(first.charges) == 1
        raise BudgetSpentError("the training has spent its budget")

    with pytest.raises(BudgetSpentError, match="the training has spent"):
        first.charge(0.01, "one", "a step", check=check)
    assert len(open_file(path).charges) == 1


def test_decision_is_kept_with_its_time_and_reason(path: Path) -> None:
    open_file(path).raise_limit(3.0, "board of 3 May")
    again = open_file(path, epsilon=9.0)
    assert (again.epsilon, again.unused) == (3.0, False)
    ((epsilon, time, reason),) = [(each.epsilon, each.time, each.reason) for each in again.decisions]
    assert (epsilon, reason) == (3.0, "board of 3 May")
    assert time.startswith("20")


def test_another_file_is_not_called_a_damaged_budget(path: Path) -> None:
    path.write_text("age,outcome\n63,ill\n")
    with pytest.raises(InputError, match="is not a budget file, or its beginning was changed"):
        open_file(path)
    assert path.read_text() == "age,outcome\n63,ill\n"


def charge_many(path: Path, name: str) -> None:
    budget = open_file(path)
    for _ in range(25):
        budget.charge(LIMIT / 1000, name, "a step")


def test_processes_that_charge_at_the_same_time_lose_no_charge(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=charge_many, args=(path, name)) for name in "abcd"]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * 4
    budget = open_file(path)
    assert [len(budget.of_training(name)) for name in "abcd"] == [25] * 4


def test_charge_cut_by_a_crash_does_not_count_and_is_removed(path: Path) -> None:
    """It was not flushed, so the key did not leave."""
    budget = open_file(path)
    budget.charge(0.01, "one", "a step")
    whole = path.read_bytes()
    budget.charge(0.02, "one", "a step")
    for size in range(len(whole), path.stat().st_size):
        path.write_bytes(path.read_bytes()[:size] if size == len(whole) else (whole + b"{" * (size - len(whole))))
        again = open_file(path)
        assert [each.mu_squared for each in again.charges] == [0.01]
    again.charge(0.03, "one", "a step")
    assert [each.mu_squared for each in open_file(path).charges] == [0.01, 0.03]


def test_every_changed_byte_is_noticed(path: Path) -> None:
    """Of all lines but the end of the last one, which is like a crash."""
    budget = open_file(path)
    for number in range(3):
        budget.charge(0.01 * number, "one", "a step")
    data = path.read_bytes()
    for place in range(len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(InputError, match="take the whole budget as spent"):
            open_file(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        lambda lines: [lines[0][:20]],
        lambda lines: [b"\n"],
        lambda lines: [b"\xff" * 50 + b"\n"],
    ],
)
def test_lines_that_are_missing_moved_or_repeated_are_noticed(
    path: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    budget = open_file(path)
    for number in range(3):
        budget.charge(0.01 * number, "one", "a step")
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(InputError, match="restore it from a copy"):
        open_file(path)


@pytest.mark.parametrize(
    "content",
    [
        {"format": "cgd budget 2", "epsilon": 1.0, "delta": 1e-5},
        {"format": "cgd budget 1", "epsilon": -1.0, "delta": 1e-5},
        {"format": "cgd budget 1", "epsilon": 1.0},
        {"mu_squared": 0.1, "training": "", "what": "", "time": ""},
        [1, 2],
        "format",
        7,
        None,
    ],
)
def test_valid_checksum_of_an_invalid_line_is_not_enough(path: Path, content: Any) -> None:
    text = json.dumps(content).encode()
    path.write_bytes(text + b" %08x\n" % zlib.crc32(text))
    with pytest.raises(InputError, match="is damaged|is not a budget file"):
        open_file(path)


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan"), "x", None, [1]])
def test_invalid_charges_are_refused(path: Path, value: Any) -> None:
    budget = open_file(path)
    content = {"mu_squared": value, "training": "", "what": "", "time": ""}
    with path.open("ab") as file:
        file.write(budget._line(content))
    with pytest.raises(InputError, match="is damaged"):
        open_file(path)


@pytest.mark.parametrize("replace", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_file_that_vanishes_during_a_training_stops_it_and_is_not_created_again(
    path: Path, replace: Callable[[Path], object]
) -> None:
    budget = open_file(path)
    budget.charge(0.01, "one", "a step")
    replace(path)
    with pytest.raises(RevealError):
        budget.charge(0.01, "one", "a step")
    with pytest.raises(InputError):
        budget.check(0.01, "one")
    assert not path.exists() or path.stat().st_size == 0


def test_another_file_in_its_place_is_noticed(path: Path, tmp_path: Path) -> None:
    budget = open_file(path)
    budget.charge(0.01, "one", "a step")
    other = open_file(tmp_path / "other.budget", epsilon=8.0)
    for _ in range(5):
        other.charge(0.01, "one", "a step")
    (tmp_path / "other.budget").rename(path)
    with pytest.raises(RevealError, match="is damaged"):
        budget.charge(0.01, "one", "a step")


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_full_disk_is_an_error_before_the_key_leaves(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    budget = open_file(path)
    budget.charge(0.01, "one", "a step")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_a_part(self: BudgetFile, content: dict[str, Any]) -> bytes:
        return Short(line(self, content))

    class Short(bytes):
        """Longer than what is written, as if the disk were full."""

        def __len__(self) -> int:
            return super().__len__() + 1

    line = BudgetFile._line
    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(BudgetFile, "_line", write_a_part)
        with pytest.raises(RevealError, match="No space left on device"):
            budget.charge(0.02, "one", "a step")
    budget.charge(0.03, "one", "a step")
    charged = [each.mu_squared for each in open_file(path).charges]
    assert charged in ([0.01, 0.03], [0.01, 0.02, 0.03])  # never less than what was opened


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    with pytest.raises(InputError, match="Permission denied"):
        open_file(folder / "records.budget")


def test_missing_folder_and_links_are_errors(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory"):
        open_file(tmp_path / "missing" / "records.budget")
    with pytest.raises(InputError, match="Is a directory"):
        open_file(tmp_path)
    open_file(path)
    link = tmp_path / "link.budget"
    link.symlink_to(path)
    with pytest.raises(InputError, match="symbolic link"):
        open_file(link)


def test_charge_is_flushed_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = open_file(path)
    flushed: list[bytes] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", watch)
    budget.charge(0.01, "one", "a step")
    assert flushed == [path.read_bytes()]
