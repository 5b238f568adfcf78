"""Files of a user's data that are damaged or made to do harm: each gives one error, and none fills the memory."""

from __future__ import annotations

import io
import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import InputError
from cgd.experiments import data_files, experiment_file, runner

if TYPE_CHECKING:
    from pathlib import Path

X, Y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 3


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the beginning of an array of this shape, without its values."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def write_archive(path: Path, *files: tuple[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)


def load(folder: Path, name: str) -> None:
    target = "" if name.endswith(".npz") else 'target = "t"\n'
    (folder / "spec.toml").write_text(f'[[run]]\ndata = "{name}"\n{target}hidden = []\n')
    runner.load_data(experiment_file.read(folder / "spec.toml").entries["paper"][0].run, None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("x", b"plain text"), ("y.npy", npy(Y))], r"cannot be read as arrays \(it has .* a file that is no array\)"),
        ([("x.npy", npy_header((10**18, 3))), ("y.npy", npy(Y))], "cannot be read as arrays"),
        ([("x.npy", npy_header((10**9, 3)) + b"few"), ("y.npy", npy(Y))], "cannot be read|does not fit into memory"),
        ([("x.npy", npy_header((-4, 3))), ("y.npy", npy(Y))], "cannot be read as arrays"),
        ([("x.npy", npy(X)), ("y.npy", npy(Y)), ("held_out_x.npy", npy(X)), ("held_out_y.npy", npy(Y[:, None]))],
         r"held_out_x has 40 records and held_out_y has the shape \(40, 1\)"),
        ([("x.npy", npy(X)), ("y.npy", npy(Y)), ("held_out_x.npy", npy(X)), ("held_out_y.npy", npy(3))],
         r"held_out_x has 40 records and held_out_y has the shape \(\)"),
    ],
)  # fmt: skip
def test_arrays_that_are_none_or_have_other_shapes(
    files: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    write_archive(tmp_path / "mine.npz", *files)
    with pytest.raises(InputError, match=message):
        load(tmp_path, "mine.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name_are_rejected(tmp_path: Path) -> None:
    write_archive(tmp_path / "mine.npz", ("x.npy", npy(X)), ("x.npy", npy(2 * X)), ("y.npy", npy(Y)))
    with pytest.raises(InputError, match="it has two arrays of one name"):
        load(tmp_path, "mine.npz")


def test_a_small_archive_of_a_large_array_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archive(tmp_path / "mine.npz", ("x.npy", npy(np.zeros((100_000, 10)))), ("y.npy", npy(np.zeros(100_000))))
    assert (tmp_path / "mine.npz").stat().st_size < 20_000
    monkeypatch.setattr(data_files, "memory_bytes", lambda: 10_000_000)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(InputError, match=r"mine.npz has at least 11000\d\d numbers, which need .* GB of memory"):
        load(tmp_path, "mine.npz")


def test_bytes_that_do_not_fit_in_double_precision_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((1000, 100), np.uint8), y=np.arange(1000) % 2)
    monkeypatch.setattr(data_files, "memory_bytes", lambda: 1_000_000)
    with pytest.raises(InputError, match="mine.npz: x has at least 100000 numbers"):
        load(tmp_path, "mine.npz")


@pytest.mark.parametrize("cell", ["1.5", "text {0}"])
def test_a_table_that_does_not_fit_is_rejected_before_it_is_stored(
    cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of numbers has one feature for each record, one of 50 texts 50."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cells = [float(cell) if cell == "1.5" else cell.format(number % 50) for number in range(20_000)]
    parquet.write_table(
        pyarrow.table({"a": cells, "t": [number % 2 for number in range(20_000)]}), tmp_path / "mine.parquet"
    )
    limit = 1_000_000 if cell == "1.5" else 20_000_000
    monkeypatch.setattr(data_files, "memory_bytes", lambda: limit)
    with pytest.raises(InputError, match=r"mine.parquet has at least \d+ numbers, .* use fewer records or features"):
        load(tmp_path, "mine.parquet")


@pytest.mark.parametrize("name", ["mine.npz", "mine.csv"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to itself"])
def test_only_regular_files_are_read(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(
        InputError, match=rf"data is '{name}', and .*{name} cannot be read \(.+\); the path is relative"
    ):
        load(tmp_path, name)


def test_memory_of_this_machine_is_known() -> None:
    assert data_files.memory_bytes() > 1 << 28
    data_files.check_memory("mine.csv", 1000)
