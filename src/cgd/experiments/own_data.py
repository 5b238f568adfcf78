"""Data of a user in a spec: arrays in an `.npz` file, or a table (CSV, Parquet) with a column to predict.

The path is relative to the spec file. A result stores the name of the file and the SHA-256 of its content, and no
folder: a changed file is another run. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError
from cgd.experiments import data_files
from cgd.experiments.datasets import NAMES, Dataset, hold_out
from cgd.experiments.setting_values import suggest

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]

ARRAYS = ".npz"
TABLES = (".csv", ".csv.gz", ".tsv", ".parquet", ".pq")
SUFFIXES = (ARRAYS, *TABLES)
REQUIRED, HELD_OUT = ("x", "y"), ("held_out_x", "held_out_y")
MIN_RECORDS = 4
"""The fewest records of which a quarter can be held out."""
MAX_NUMBER = 2.0**80
"""As in tables of `cgd join`; squares of larger numbers could not be added."""


def is_file(data: str) -> bool:
    """Return whether the setting `data` names a file, and not a data set."""
    return data.lower().endswith(SUFFIXES)


def check_settings(data: str, target: str, digest: str) -> None:
    """Check the settings `data`, `target` and `data_digest` of a run.

    Raises:
        InputError: there is no such data set, or the settings do not fit together.
    """
    if not is_file(data):
        if data not in NAMES:
            raise InputError(
                f"data is {data!r}{suggest(data, NAMES)}; choose one of {', '.join(NAMES)}, or name a file that ends "
                f"with {', '.join(SUFFIXES)}"
            )
        for name, value in (("target", target), ("data_digest", digest)):
            if value:
                raise InputError(f"{name} is {value!r} and data is {data!r}, which is no file; remove {name}")
        return
    is_table = not data.lower().endswith(ARRAYS)
    if target and not is_table:
        raise InputError(f"target is {target!r} and data is {data!r}, whose labels are its array y; remove target")
    if is_table and not target:
        raise InputError(f'data is {data!r}, a table; name its column to predict: target = "COLUMN"')
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise InputError(
            f"data is {data!r} and data_digest is {digest!r}, which is not the SHA-256 of a file; name the file in a "
            "spec file, and leave data_digest out"
        )


def locate(settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the settings with the name and the digest of their file instead of its path, and the path.

    Args:
        settings: settings of a run, as in a spec file.
        folder: folder of the spec file.

    Raises:
        InputError: the file cannot be read, or `data_digest` is given and differs.
    """
    data = settings.get("data", "")
    if not isinstance(data, str) or not is_file(data):
        return settings, None
    if not data.isprintable():  # it is printed: a control sequence could change the terminal
        raise InputError(f"data is {data!r}, with characters that cannot be printed; rename the file")
    path = folder / data
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device may never end
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:  # ValueError: as above, or a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"data is {data!r}, and {path} cannot be read ({reason}); the path is relative to the spec file"
        ) from None
    if settings.get("data_digest", digest) != digest:
        raise InputError(
            f"data_digest is {settings['data_digest']!r}, and that of {data} is {digest}; restore the file, or remove "
            "data_digest"
        )
    return {**settings, "data": path.name, "data_digest": digest}, path


def short_name(data: str) -> str:
    """Return the name of a data set or file for the name of a result.

    Examples:
        >>> short_name("digits"), short_name("My table (2).csv.gz")
        ('digits', 'my-table-2')
    """
    if not is_file(data):
        return data
    stem = data[: -max(len(each) for each in SUFFIXES if data.lower().endswith(each))]
    return re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "data"


def load(path: Path, digest: str, target: str, seed: int) -> Dataset:
    """Load the data of a file, in double precision, so that features are standardised as those of bundled data.

    Args:
        path: the file.
        digest: SHA-256 of its content.
        target: column to predict, of a table.
        seed: seed of the held-out part, if the file has none.

    Raises:
        InputError: the file was changed, is damaged, or has no data to train on.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); restore it") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise InputError(f"{path} was changed after the spec file had been read; run the command again")
    if path.name.lower().endswith(ARRAYS):
        return _from_arrays(path, _read_arrays(content, path), seed)
    from cgd.experiments import own_table

    x, y = own_table.read(path, target)
    codes, _ = _labels(path.name, f"the column {target!r}", y, y[:0])
    return own_table.fill_missing(_held_out(path.name, x, codes, seed))


def _read_arrays(content: bytes, path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            unpacked = sum(each.file_size for each in archive.infolist())  # zipfile never reads more of a file
        data_files.check_memory(path, unpacked // data_files.NUMBER_BYTES)
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            names = found.files
            arrays = {name: found[name] for name in names}
        if len(names) > len(arrays) or not all(isinstance(each, np.ndarray) for each in arrays.values()):
            raise ValueError("it has two arrays of one name, or a file that is no array")
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
        TypeError,
    ) as error:
        raise InputError(
            f"{path} cannot be read as arrays ({error}); write it with numpy.savez(FILE, x=…, y=…), without objects"
        ) from None
    except MemoryError:
        raise InputError(f"{path} has an array that does not fit into memory; write it with fewer records") from None
    known = (*REQUIRED, *HELD_OUT)
    unknown = [f"{name!r}{suggest(name, known)}" for name in arrays if name not in known]
    missing = [name for name in REQUIRED if name not in arrays]
    if unknown or missing or len(arrays) == len(known) - 1:
        listed = ", ".join(arrays) or "none"
        wrong = f" There is no array {' and no '.join(missing)}." if missing else ""
        wrong += f" Unknown: {', '.join(unknown)}." if unknown else ""
        raise InputError(
            f"{path}: the arrays are {listed}; they must be x and y, or x, y, held_out_x and held_out_y.{wrong}"
        )
    return arrays


def _from_arrays(path: Path, arrays: dict[str, Array], seed: int) -> Dataset:
    name = path.name
    x = _features(name, "x", arrays["x"])
    _check_lengths(name, "x", "y", x, arrays["y"])
    if "held_out_x" not in arrays:
        y, _ = _labels(name, "y", arrays["y"], arrays["y"][:0])
        return _held_out(name, x, y, seed)
    held_out_x = _features(name, "held_out_x", arrays["held_out_x"])
    _check_lengths(name, "held_out_x", "held_out_y", held_out_x, arrays["held_out_y"])
    y, held_out_y = _labels(name, "y", arrays["y"], arrays["held_out_y"])
    if held_out_x.shape[1] != x.shape[1]:
        raise InputError(
            f"{name}: x has {x.shape[1]} features for each record and held_out_x has {held_out_x.shape[1]}; they must "
            "have the same"
        )
    return Dataset(name, *(torch.from_numpy(each) for each in (x, y, held_out_x, held_out_y)))


def _held_out(name: str, x: Array, y: Array, seed: int) -> Dataset:
    if len(x) < MIN_RECORDS:
        raise InputError(f"{name} has {len(x)} records; holding out a quarter needs at least {MIN_RECORDS}")
    return hold_out(name, x, y, seed)


def _features(name: str, array: str, values: Array) -> Array:
    """Return records × features in double precision."""
    if values.ndim < 2 or 0 in values.shape:
        raise InputError(
            f"{name}: {array} has the shape {values.shape}; it must be records × features, with at least one of each"
        )
    if values.dtype.kind not in "biuf":
        raise InputError(f"{name}: {array} has the type {values.dtype}; it must be numbers")
    data_files.check_memory(f"{name}: {array}", values.size)
    flat = values.reshape(len(values), -1).astype(np.float64)
    wrong = np.argwhere(~(np.abs(flat) <= MAX_NUMBER))  # also true for NaN
    if len(wrong):
        record, feature = wrong[0].tolist()
        raise InputError(
            f"{name}: {array} has {len(wrong)} values that are not finite numbers up to {MAX_NUMBER:.0e}, the first in "
            f"record {record}, feature {feature}, counted from 0: {flat[record, feature]}; replace them"
        )
    return flat


def _check_lengths(name: str, samples: str, labels: str, x: Array, y: Array) -> None:
    if y.ndim != 1 or len(x) != len(y):
        raise InputError(
            f"{name}: {samples} has {len(x)} records and {labels} has the shape {y.shape}; it must have one label for "
            f"each record: ({len(x)},)"
        )


def _labels(name: str, what: str, y: Array, held_out: Array) -> tuple[Array, Array]:
    """Return numbers to predict in double precision, or classes as whole numbers from 0.

    Raises:
        InputError: the labels are neither, are not finite, have one value, or have as many classes as records.
    """
    if y.dtype.kind == held_out.dtype.kind == "f":
        wrong = int((~(np.abs(np.concatenate((y, held_out))) <= MAX_NUMBER)).sum())
        if wrong:
            raise InputError(f"{name}: {what} has {wrong} labels that are not finite numbers; remove their records")
        return y.astype(np.float64), held_out.astype(np.float64)
    if y.dtype.kind not in "biuU" or held_out.dtype.kind not in "biuU":
        kinds = y.dtype if y.dtype == held_out.dtype else f"{y.dtype} and, of the held-out records, {held_out.dtype}"
        raise InputError(
            f"{name}: {what} has the type {kinds}; classes are whole numbers or texts, numbers to predict are floats"
        )
    classes, codes = np.unique(np.concatenate((y, held_out)), return_inverse=True)
    if len(classes) == 1:
        raise InputError(f"{name}: all labels in {what} are {classes[0]}; there must be two classes or more")
    if len(classes) == len(codes):
        raise InputError(
            f"{name}: {what} has {len(classes)} classes, as many as records; name the column or array of the classes, "
            "or write numbers to predict as decimals, such as 3.0"
        )
    training, rest = np.split(codes.reshape(-1).astype(np.int64), [len(y)])
    return training, rest
