"""Specs on data of a user: arrays and tables, their digests, and files that cannot be used."""

from __future__ import annotations

import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from cgd import InputError
from cgd.experiments import experiment_file, reproduce, runner
from cgd.experiments.runner import ResultStore, RunResult
from cgd.experiments.spec import RunSpec

if TYPE_CHECKING:
    from cgd.experiments.datasets import Dataset

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(3, 5, size=(40, 3)), np.arange(40) % 3


def write_arrays(folder: Path, **arrays: Any) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return path


def write_table(folder: Path, text: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def read_run(folder: Path, settings: str) -> RunSpec:
    path = folder / "spec.toml"
    path.write_text(f"[common]\nhidden = []\nsteps = 3\nrows = 2\n[[run]]\n{settings}\n")
    return experiment_file.read(path).entries["paper"][0].run


def load(folder: Path, settings: str) -> Dataset:
    return runner.load_data(read_run(folder, settings), None)


TABLE = "age,city,score\n" + "".join(f"{20 + row},{'ABC'[row % 3]},{'yes' if row % 4 else 'no'}\n" for row in range(24))


# Arrays


def test_arrays_are_split_by_the_seed_and_standardised(tmp_path: Path) -> None:
    write_arrays(tmp_path, x=X, y=Y + 5)
    one, other = (load(tmp_path, f"data = 'mine.npz'\nseed = {seed}") for seed in (0, 1))
    assert (one.name, one.features, one.classes) == ("mine.npz", 3, 3)
    assert (len(one.x), len(one.held_out_x)) == (30, 10)
    assert float(one.x.double().mean(dim=0).abs().max()) < 2**-23
    assert float((one.x.double().std(dim=0, correction=0) - 1).abs().max()) < 2**-23
    assert not torch.equal(one.held_out_x, other.held_out_x)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float32, np.bool_])
def test_arrays_of_other_types_are_standardised_too(kind: Any, tmp_path: Path) -> None:
    x = (X > 3).astype(kind)
    write_arrays(tmp_path, x=x.reshape(40, 3, 1), y=Y, held_out_x=x[:7].reshape(7, 3, 1), held_out_y=Y[:7])
    found = load(tmp_path, "data = 'mine.npz'")
    expected = (x.astype(float) - x.mean(axis=0)) / x.astype(float).std(axis=0)
    assert np.allclose(found.x, expected, atol=1e-6)
    assert np.allclose(found.held_out_x, expected[:7], atol=1e-6)
    assert found.held_out_y.tolist() == Y[:7].tolist()


def test_labels_are_classes_or_numbers(tmp_path: Path) -> None:
    write_arrays(tmp_path, x=X, y=np.array(["no", "yes"])[Y % 2])
    assert load(tmp_path, "data = 'mine.npz'").classes == 2
    write_arrays(tmp_path, x=X, y=Y.astype(float), held_out_x=X[:5], held_out_y=Y[:5] + 0.5)
    numbers = load(tmp_path, "data = 'mine.npz'")
    assert numbers.classes == 0
    assert numbers.y.shape == (40, 1)
    write_arrays(tmp_path, x=X, y=Y % 2, held_out_x=X[:5], held_out_y=np.full(5, 7))
    assert load(tmp_path, "data = 'mine.npz'").held_out_y.tolist() == [2] * 5


NAN = np.where(np.arange(120).reshape(40, 3) == 35, np.nan, X)
WRONG_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"x": X}, "the arrays are x; they must be x and y, .* There is no array y"),
    ({"features": X, "y": Y}, "There is no array x. Unknown: 'features'"),
    ({"x": X, "y": Y, "heldout_x": X, "held_out_y": Y}, r"'heldout_x' \(did you mean 'held_out_x'\?\)"),
    ({"x": X, "y": Y, "held_out_x": X}, "the arrays are x, y, held_out_x; they must be x and y, or"),
    ({"x": X, "y": Y[:7]}, r"x has 40 records and y has the shape \(7,\); .* \(40,\)"),
    ({"x": X, "y": Y.reshape(-1, 1)}, r"x has 40 records and y has the shape \(40, 1\)"),
    ({"x": X, "y": np.array(3)}, r"y has the shape \(\)"),
    ({"x": X[:, 0], "y": Y}, r"x has the shape \(40,\); it must be records × features"),
    ({"x": X[:, :0], "y": Y}, r"x has the shape \(40, 0\)"),
    ({"x": X.astype(complex), "y": Y}, "x has the type complex128; it must be numbers"),
    ({"x": X.astype(str), "y": Y}, "x has the type <U32; it must be numbers"),
    ({"x": NAN, "y": Y}, "x has 1 values that are not finite .* in record 11, feature 2, counted from 0: nan"),
    ({"x": X * 1e300, "y": Y}, "x has 120 values that are not finite numbers up to"),
    ({"x": X, "y": np.where(Y == 1, np.nan, 1.5)}, "y has 13 labels that are not finite numbers"),
    ({"x": X, "y": Y.astype(complex)}, "y has the type complex128; classes are whole numbers or texts"),
    (
        {"x": X, "y": Y, "held_out_x": X, "held_out_y": Y / 2},
        "y has the type int64 and, of the held-out records, float",
    ),
    ({"x": X, "y": np.arange(40)}, "y has 40 classes, as many as records; .* as decimals"),
    ({"x": X, "y": np.zeros(40, int)}, "all labels in y are 0; there must be two classes"),
    (
        {"x": X, "y": Y, "held_out_x": X[:, :2], "held_out_y": Y},
        "x has 3 features for each record and held_out_x has 2",
    ),
    ({"x": X, "y": Y, "held_out_x": X, "held_out_y": Y[:3]}, r"held_out_x has 40 records and held_out_y .* \(3,\)"),
    ({"x": X[:3], "y": np.array([0, 1, 1])}, "mine.npz has 3 records; holding out a quarter needs at least 4"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG_ARRAYS, ids=range(len(WRONG_ARRAYS)))
def test_wrong_arrays_are_rejected(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_arrays(tmp_path, **arrays)
    with pytest.raises(InputError, match=message):
        load(tmp_path, "data = 'mine.npz'")


class Touch:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    objects = np.array([Touch(tmp_path / "touched")] * 40, dtype=object)
    for path in (write_arrays(tmp_path, x=objects, y=Y), tmp_path / "mine.npz"):
        with pytest.raises(InputError, match="cannot be read as arrays .* without objects"):
            load(tmp_path, "data = 'mine.npz'")
        path.write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 damaged"])
def test_a_file_that_is_no_archive_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(InputError, match="mine.npz cannot be read as arrays"):
        load(tmp_path, "data = 'mine.npz'")


# Tables


@pytest.mark.parametrize("name", ["mine.csv", "mine.csv.gz", "MINE.CSV", "mine.parquet"])
def test_tables_have_numbers_and_categories(name: str, tmp_path: Path) -> None:
    path = write_table(tmp_path, TABLE, name if not name.endswith("parquet") else "mine.csv")
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(path), tmp_path / name)
    found = load(tmp_path, f"data = '{name}'\ntarget = 'score'")
    assert (found.features, found.classes) == (4, 2)  # age, and one feature for each city
    assert (len(found.x), len(found.held_out_x)) == (18, 6)
    assert float(found.x.double().mean(dim=0).abs().max()) < 2**-23


def test_a_target_of_decimals_or_many_numbers_is_a_regression(tmp_path: Path) -> None:
    write_table(tmp_path, TABLE)
    assert load(tmp_path, "data = 'mine.csv'\ntarget = 'age'").classes == 0
    assert load(tmp_path, "data = 'mine.csv'\ntarget = 'city'").classes == 3


def test_missing_numbers_become_the_mean_of_the_training_records(tmp_path: Path) -> None:
    lines = TABLE.splitlines()
    lines[3], lines[7] = ",A,no", "NA,,yes"
    write_table(tmp_path, "\n".join([*lines, "33,A,"]))
    found = load(tmp_path, "data = 'mine.csv'\ntarget = 'score'")
    assert found.features == 2 + 4  # age and where it is missing; three cities and a missing one
    assert len(found.x) + len(found.held_out_x) == 24  # the record without a label is left out
    both = torch.cat((found.x, found.held_out_x))
    missing = both[:, 1] > 0
    assert int(missing.sum()) == 2
    assert float(both[missing, 0].abs().max()) < 1e-6  # the standardised mean is 0


WRONG_TABLES: list[tuple[str, str, str]] = [
    (TABLE, "scores", r"no column 'scores' \(did you mean 'score'\?\); set target to one of age, city, score"),
    ("a,b\n1,x\n2,y\n3,z\n4,w\n", "b", "column 'b' has 4 classes, as many as records"),
    ("a,b\n1,1\n2,2\n3,3\n4,4\n", "b", "column 'b' has 4 classes, as many as records"),
    ("a,b\n1,x\n2,x\n3,x\n4,x\n", "b", "all labels in the column 'b' are x"),
    ("a,b\n1,\n2,\n", "b", "no record has a value in column 'b'"),
    ("b\nx\ny\nx\ny\n", "b", "has no column but 'b'"),
    ("a,b\n,x\n,y\n,x\n,x\n", "b", "column 'a' has no values; remove it"),
    ("a,b\nAda,x\nBob,y\nCy,x\nDee,x\n", "b", "column 'a' has a different text in each record: an identifier"),
    ("a;b\n1,5;x\n2,5;y\n3,5;x\n2;x\n", "b", "column 'a' has numbers such as '1,5'; write .* with a point"),
    ("a,b\n1 %,x\n2 %,y\n3 %,x\n2 %,x\n", "b", "column 'a' has numbers such as '1 %'; write them without units"),
    ("a,b\n" + "".join(f"{row}.5,{'xy'[row % 2]}\n" for row in range(20)) + "high,x\n", "b", "such as 'high'; correct"),
    ("a,b\n1,x\ninf,y\n3,x\n4,x\n", "b", "column 'a' has the number inf, beyond 1e"),
    ("a,b\n1,x\n2,y\n3,x\n", "b", "has 3 records; holding out a quarter needs at least 4"),
    ("a,b\n1,x,3\n2,y\n", "b", "line 2: it has 3 fields, but the header has 2"),
    ("a,a,b\n1,1,x\n2,2,y\n", "b", "has 2 columns called 'a'"),
    ("", "b", "is empty"),
]


@pytest.mark.parametrize(("text", "target", "message"), WRONG_TABLES, ids=range(len(WRONG_TABLES)))
def test_wrong_tables_are_rejected(text: str, target: str, message: str, tmp_path: Path) -> None:
    write_table(tmp_path, text)
    with pytest.raises(InputError, match=message):
        load(tmp_path, f"data = 'mine.csv'\ntarget = '{target}'")


def test_a_column_of_lists_is_rejected(tmp_path: Path) -> None:
    columns = {"a": [[1], [2], [3], [4]], "b": ["x", "y", "x", "y"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "mine.parquet")
    with pytest.raises(InputError, match="column 'a' is of the type list.*, neither numbers nor texts; remove it"):
        load(tmp_path, "data = 'mine.parquet'\ntarget = 'b'")


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "data = 'none.npz'",
            r"data is 'none.npz', and .*none.npz cannot be read \(No such file.*relative to the spec",
        ),
        ("data = 'folder.csv'\ntarget = 'a'", "folder.csv cannot be read"),
        ("data = 'mine.csv'", "data is 'mine.csv', a table; name its column to predict: target ="),
        ("data = 'mine.npz'\ntarget = 'a'", "data is 'mine.npz', whose labels are its array y; remove target"),
        ("data = 'iris'\ntarget = 'a'", "target is 'a' and data is 'iris', which is no file; remove target"),
        ("data_digest = 'abc'", "data_digest is 'abc' and data is 'digits', which is no file"),
        (
            "data = 'mine.npz'\ndata_digest = 'abc'",
            "data_digest is 'abc', and that of mine.npz is [0-9a-f]{64}; restore",
        ),
        ("data = 'mine.xlsx'", "data is 'mine.xlsx'; choose one of breast-cancer, .* ends with .npz, .csv"),
        ('data = "a\\u001b[2J.npz"', "with characters that cannot be printed; rename the file"),
        ("data_path = '/etc/passwd'", "there is no setting 'data_path'"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(settings: str, message: str, tmp_path: Path) -> None:
    write_arrays(tmp_path, x=X, y=Y)
    write_table(tmp_path, TABLE)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=f"^spec.toml, run 1: .*{message}"):
        read_run(tmp_path, settings)


def test_a_file_is_relative_to_the_spec_and_its_folder_is_not_stored(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    path = write_table(tmp_path / "tables", TABLE, "My table (2).csv")
    relative = read_run(tmp_path, f"data = 'tables/{path.name}'\ntarget = 'score'")
    absolute = read_run(tmp_path, f"data = '{path}'\ntarget = 'score'")
    assert relative == absolute
    assert relative.slug == absolute.slug
    assert relative.slug.startswith("my-table-2-cgd-2x1-d0.1-t3-")
    assert "/" not in json.dumps(relative.as_json())
    assert RunSpec.from_table(relative.as_json(), "here") == relative
    assert "data_digest" not in RunSpec().as_json()


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    write_arrays(tmp_path, x=X, y=Y)
    store, before = ResultStore(tmp_path / "results"), read_run(tmp_path, "data = 'mine.npz'")
    first = store.run(before)
    assert str(tmp_path) not in store.path(before).read_text()
    assert RunResult.read(store.path(before)) == first
    write_arrays(tmp_path, x=X + Y.reshape(-1, 1), y=Y)
    after = read_run(tmp_path, "data = 'mine.npz'")
    assert store.get(after) is None
    assert store.run(after).history != first.history
    with pytest.raises(InputError, match="was changed after the spec file had been read; run the command again"):
        runner.execute(replace(before, seed=9))
    with pytest.raises(InputError, match="the run has its data from the file mine.npz; run it from its spec file"):
        runner.execute(RunSpec.from_table(before.as_json(), "here"))


def test_gaps_of_numbers_to_predict_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    write_arrays(tmp_path, x=X, y=X[:, 0])
    (tmp_path / "spec.toml").write_text('show = "gaps"\n[[run]]\nlabel = "mine"\ndata = "mine.npz"\nhidden = []\n')
    study, store = experiment_file.read(tmp_path / "spec.toml"), ResultStore(tmp_path / "results")
    with pytest.raises(InputError, match="^mine: the labels of mine.npz are numbers and have no accuracy to show gaps"):
        reproduce.run(study, "paper", store, None, lambda *_: lambda *_: None)
    assert not store.folder.exists()
