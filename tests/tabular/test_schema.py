from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd import InputError
from cgd.federation import config_edit
from cgd.federation.config import Federation, Participant
from cgd.federation.data_schema import MISSING, Data
from cgd.federation.keys import Keys
from cgd.federation.privacy_section import REVIEW_MARK, check_reviewed
from cgd.tabular import readers
from cgd.tabular.column_profile import ColumnProfile
from cgd.tabular.dataset import read_dataset
from cgd.tabular.schema import _outward, suggest_schema

ROWS = 60


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a federation file without tables."""
    path = tmp_path_factory.mktemp("federation") / "federation.toml"
    participants = [
        Participant(name, f"tcp://{name}.example:7001", Keys.generate(name).public, None) for name in ("a", "b", "c")
    ]
    config_edit.create_federation(path, "test", participants)
    return path.read_text()


def written(folder: Path, table: dict[str, list[Any]]) -> Path:
    path = folder / "table.csv"
    lines = [",".join('"' + name.replace('"', '""') + '"' for name in table)]
    lines += [",".join("" if each is None else str(each) for each in row) for row in zip(*table.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def pasted(federation: str, text: str) -> Data:
    found = Federation.parse(f"{federation}\n{text}", Path("federation.toml"))
    assert found.data is not None
    assert found.model is not None
    assert (found.model.activation == "relu") == (found.privacy is not None)  # records are read from exact sums
    return found.data


def table(rows: int = ROWS) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    return {
        "record": list(range(100, 100 + rows)),
        "insurance number": [f"X{number}" for number in rng.permutation(rows)],
        "age": rng.integers(0, 90, rows).tolist(),
        "weight": rng.normal(70, 10, rows).round(1).tolist(),
        "stage": rng.integers(1, 8, rows).tolist(),
        "smoker": rng.integers(0, 2, rows).tolist(),
        "ward": rng.choice(np.array(["A", "B", None]), rows).tolist(),
        "country": ["AT"] * rows,
        "empty": [None] * rows,
        "remark": [f"{'word ' * 25}{number % 3}" for number in range(rows)],
        "outcome": rng.choice(["yes", "no"], rows).tolist(),
    }


EXPECTED = {"age": "number", "weight": "number", "stage": "category", "smoker": "number", "ward": "category"}


def test_schema_of_columns_of_many_kinds(tmp_path: Path, federation: str) -> None:
    path = written(tmp_path, table())
    text = suggest_schema(path, "outcome")
    data = pasted(federation, text)
    assert {each.name: each.type for each in data.columns} == EXPECTED
    assert (data.target, data.task, data.classes, data.id, data.missing) == (
        "outcome",
        "classification",
        (),
        "",
        MISSING,
    )
    for line in (
        "# record: left out, all values are distinct: an ID?",
        '# "insurance number": left out, all values are distinct: an ID?',
        'stage = "category"  # 7 whole numbers: a code? For counts or measurements, write "number"',
        '# country = "category"  # left out, it has only one value',
        "# empty: left out, all its values are missing",
        "# remark: left out, 3 distinct values of up to 126 bytes: free text?",
        '# classes = ["no", "yes"]  # as in this table; left out: learned by a secure sum',
        '# id = "record"  # needed in a grid, where several participants hold parts of the same records',
    ):
        assert line in text.splitlines()
    records, _ = read_dataset(path, data, data.columns, label=None)
    assert records.rows == ROWS


def test_commented_lines_are_valid_toml(tmp_path: Path, federation: str) -> None:
    text = suggest_schema(written(tmp_path, table()), "outcome")
    used = text.replace("# classes", "classes").replace("# id", "id").replace("# country =", "country =")
    data = pasted(federation, used)
    assert (data.classes, data.id, data.columns[-1].name) == (("no", "yes"), "record", "country")


def test_parquet_gives_the_same_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({**table(), "empty": pa.nulls(ROWS)}), tmp_path / "table.parquet")
    assert suggest_schema(tmp_path / "table.parquet", "outcome") == suggest_schema(
        written(tmp_path, table()), "outcome"
    )


def test_small_blocks_give_the_same_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, table())
    whole = suggest_schema(path, "outcome")
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    assert suggest_schema(path, "outcome") == whole


@pytest.mark.parametrize(
    ("label", "task"),
    [
        ([0.5, 1.5], "regression"),
        (list(range(30)), "regression"),
        ([0, 1], "classification"),
        ([1.0, 2.0, 3.0], "classification"),
        (list(range(10)), "classification"),
        (["a", "b", "c"], "classification"),
        ([True, False], "classification"),
    ],
)
def test_task_depends_on_the_label(tmp_path: Path, federation: str, label: list[Any], task: str) -> None:
    values = (label * 30)[:30]
    data = pasted(federation, suggest_schema(written(tmp_path, {"x": [0.1, 0.2, 0.3] * 10, "y": values}), "y"))
    assert data.task == task


def test_few_texts_among_numbers_are_suggested_as_missing(tmp_path: Path, federation: str) -> None:
    values = [*range(40), "unknown", "n.d.", "unknown"]
    path = written(tmp_path, {"x": values, "y": (["a", "b"] * 30)[: len(values)]})
    text = suggest_schema(path, "y")
    data = pasted(federation, text)
    assert data.missing == (*MISSING, "n.d.", "unknown")
    assert "# 2 more than the default: texts in columns of numbers" in text
    records, _ = read_dataset(path, data, data.columns, label=None)
    assert np.count_nonzero(np.isnan(records.numbers["x"])) == 3


def test_many_categories_are_noted(tmp_path: Path, federation: str) -> None:
    rows = 6600
    some = {
        "few": [f"c{number % 150}" for number in range(rows)],
        "many": [f"t{number % 1100}u" for number in range(rows)],
    }
    text = suggest_schema(written(tmp_path, {**some, "y": ["a", "b"] * (rows // 2)}), "y")
    assert pasted(federation, text).names == ("few",)
    assert 'few = "category"  # 150 distinct values, a feature for each' in text
    assert "# many: left out, more than 1000 distinct values of up to 6 bytes: free text?" in text


def test_nested_columns_are_left_out(tmp_path: Path, federation: str) -> None:
    frame = pa.table({"a": [1.5, 2.5], "b": [[1], [2]], "c": [{"x": 1}, {"x": 2}], "y": ["u", "v"]})
    pq.write_table(frame, tmp_path / "t")
    text = suggest_schema(tmp_path / "t", "y")
    assert pasted(federation, text).names == ("a",)
    assert "# b: left out, its type is neither number nor text" in text


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).map(str.strip), min_size=1))
@settings(max_examples=50)
def test_any_name_is_accepted(tmp_path_factory: pytest.TempPathFactory, federation: str, names: list[str]) -> None:
    """Quotes, line ends, control characters, dots, brackets: the name in the file is the one in the suggestion."""
    names = [name for name in dict.fromkeys(names) if name and name != "y"] or ["x"]
    frame = {**{name: [0.1, 0.2, 0.2] for name in names}, "y": ["a", "b", "a"]}
    path = tmp_path_factory.getbasetemp() / "names.parquet"
    pq.write_table(pa.table(frame), path)
    text = suggest_schema(path, "y")
    assert list(tomllib.loads(text)["data"]["columns"]) == names
    assert pasted(federation, text).names == tuple(names)


def test_table_without_a_schema_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"x": [1, 2, 2], "y": [None, None, None]})
    with pytest.raises(InputError, match="has no column 'z'; name the column to predict"):
        suggest_schema(path, "z")
    with pytest.raises(InputError, match="no row has a label in column 'y'"):
        suggest_schema(path, "y")
    with pytest.raises(
        InputError, match="has no column to predict 'x' from; these are its columns:\n# y: left out, all"
    ):
        suggest_schema(path, "x")
    path.write_text("x,x,y\n1,2,3\n")
    with pytest.raises(InputError, match="has 2 columns called 'x'"):
        suggest_schema(path, "y")


def test_texts_among_numbers_are_not_published(tmp_path: Path) -> None:
    """docs/tables.md: the suggestion contains the names of the columns and the classes, and no other values."""
    remark = "see the file of Anna Smith"
    text = suggest_schema(written(tmp_path, {"age": [*range(40), remark], "y": (["a", "b"] * 30)[:41]}), "y")
    assert remark not in text
    assert 'age = "number"  # 1 distinct text is not a number: correct the table, or list the text as missing' in text


def test_long_text_among_numbers_gives_a_valid_suggestion(tmp_path: Path, federation: str) -> None:
    values = [*range(40), "a remark that somebody has typed into the wrong column and that never ends " * 2]
    text = suggest_schema(written(tmp_path, {"age": values, "y": (["a", "b"] * 30)[:41]}), "y")
    assert pasted(federation, text).names == ("age",)


@pytest.mark.parametrize("last", ["Anna Patient-0", None])
def test_names_of_patients_are_left_out_although_one_is_repeated_or_missing(
    tmp_path: Path, federation: str, last: str | None
) -> None:
    """All categories of a column are opened to all participants: the training would publish every name."""
    names = [*(f"Anna Patient-{number}" for number in range(59)), last]
    path = written(tmp_path, {"name": names, "age": [20 + number % 40 for number in range(60)], "y": ["a", "b"] * 30})
    assert "name" not in pasted(federation, suggest_schema(path, "y")).names


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("patient_name", [f"Anna{number} Berg" for number in range(ROWS)]),
        ("key", [f"a{number}@example.org" for number in range(ROWS)]),
    ],
)
def test_names_and_addresses_are_not_suggested_as_the_id(tmp_path: Path, column: str, values: list[str]) -> None:
    columns: dict[str, list[Any]] = {
        column: values,
        "age": [20 + number % 30 for number in range(ROWS)],
        "outcome": ["no", "yes"] * (ROWS // 2),
    }
    assert "# id =" not in suggest_schema(written(tmp_path, columns), "outcome")
    with_number = {**columns, "case": [f"C{number:06}" for number in range(ROWS)]}
    assert '# id = "case"' in suggest_schema(written(tmp_path, with_number), "outcome")


def test_number_of_records_is_not_in_the_schema(tmp_path: Path) -> None:
    """The text goes to all participants; a number of records is a secret of its participant."""
    rows = "".join(f"name {number % 110},{number / 7},{number % 2}\n" for number in range(123))
    (tmp_path / "table.csv").write_text(f"name,age,outcome\n{rows}")
    text = suggest_schema(tmp_path / "table.csv", "outcome")
    assert "# name: left out" in text
    assert "123" not in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([17, 45, 90.5], "[0, 100]"),
        ([0, 3, 100], "[0, 200]"),
        ([-9.3, 8.1], "[-20, 20]"),
        ([1990, 2021], "[1950, 2050]"),
        ([0.001, 0.0042], "[0, 0.005]"),
        ([-7, -7], "[-10, 0]"),
        ([0, 0], "[0, 1]"),
    ],
)
def test_suggested_ranges_are_rounded_outward_and_are_not_those_of_the_table(
    values: list[float], expected: str
) -> None:
    profile = ColumnProfile(lowest=min(values), highest=max(values))
    low, high = json.loads(_outward(profile))
    assert _outward(profile) == expected
    assert low < min(values) or low == 0
    assert max(values) < high or high == 0


def test_schema_for_differential_privacy_is_valid_and_has_marks(tmp_path: Path, federation: str) -> None:
    random = np.random.default_rng(1)
    content: dict[str, list[Any]] = {
        "age": random.normal(60, 10, ROWS).tolist(),
        "ward": (["A", "B"] * ROWS)[:ROWS],
        "grade": [number % 4 for number in range(ROWS)],
        "y": (["well", "ill"] * ROWS)[:ROWS],
    }
    text = suggest_schema(written(tmp_path, content), "y", private=True)
    assert "BEFORE you send this to anybody,\n# write what is known without looking at records" in text
    assert [line.partition(" =")[0] for line in text.splitlines() if line.endswith(f" {REVIEW_MARK}")] == [
        *("classes", "age", "ward", "grade"),
    ]
    made = Federation.parse(f"{federation}\n{text}", Path("federation.toml"))
    assert made.privacy is not None
    assert made.privacy.epsilon == 1.0
    assert made.data is not None
    assert made.data.classes == ("ill", "well")
    age, ward, grade = made.data.columns
    assert age.range is not None
    assert age.range not in ((min(content["age"]), max(content["age"])), None)
    assert (ward.categories, grade.categories) == (("A", "B"), ("0", "1", "2", "3"))
    for value in (min(content["age"]), max(content["age"])):
        assert str(value) not in text
    numbers = suggest_schema(written(tmp_path, {**content, "y": random.normal(5, 1, ROWS).tolist()}), "y", private=True)
    regression = Federation.parse(f"{federation}\n{numbers}", Path("federation.toml")).data
    assert regression is not None
    assert regression.range is not None


def test_rare_categories_are_not_suggested_for_differential_privacy(tmp_path: Path) -> None:
    """The only record of a category, or a value that one record has, would be published."""
    common = ["A", "B"] * (ROWS // 2)
    content: dict[str, list[Any]] = {
        "ward": [*common[:-9], *["secret"] * 9],
        "loss": [1594, 1741, 1848, *[0] * (ROWS - 3)],
        "y": [*common[:-1], "third"],
    }
    plain, private = (suggest_schema(written(tmp_path, content), "y", private=each) for each in (False, True))
    assert 'ward = ["A", "B"]' in private
    assert "# loss = []  # left out" in private
    assert 'classes = ["A", "B"]' in private
    assert not any(value in private for value in ("secret", "1594", "third"))
    assert 'loss = "category"' in plain


def test_column_of_many_values_is_not_listed_for_differential_privacy(tmp_path: Path) -> None:
    """Frequent values, too, may be those of persons; and nobody reviews a long list."""
    rows = 20 * 21
    content: dict[str, list[Any]] = {
        "few": [f"K{number % 20}" for number in range(rows)],
        "many": [f"Q{number % 21}" for number in range(rows)],
        "y": ["well", "ill"] * (rows // 2),
    }
    text = suggest_schema(written(tmp_path, content), "y", private=True)
    assert "# many = []  # left out: many values; list them if all know them without a table" in text
    assert "Q1" not in text
    assert 'few = ["K0", "K1", ' in text


def test_what_single_records_add_to_a_schema_for_differential_privacy_has_marks(tmp_path: Path) -> None:
    """A marker of a missing value, a remark or a long text may be that of one record."""
    content: dict[str, list[Any]] = {
        "dose": ["not tested", *(number % 30 for number in range(ROWS - 1))],
        "weight": ["as of Monday", *(number % 30 for number in range(ROWS - 1))],
        "note": ["x" * 300, *(f"text {number % 7}" for number in range(ROWS - 1))],
        "y": ["see letter", *np.linspace(0, 1, ROWS - 1).tolist()],
    }
    text = suggest_schema(written(tmp_path, content), "y", private=True)
    lines = {line.partition(" =")[0]: line for line in text.splitlines() if " = " in line}
    for name in ("target", "missing", "dose", "weight"):
        assert lines[name].endswith(f" {REVIEW_MARK}"), lines[name]
    assert "# note: left out, many distinct or long values: free text?" in text


def test_marked_schema_makes_no_federation_file(tmp_path: Path) -> None:
    content: dict[str, list[Any]] = {"ward": ["A", "B"] * (ROWS // 2), "y": ["well", "ill"] * (ROWS // 2)}
    text = suggest_schema(written(tmp_path, content), "y", private=True)
    with pytest.raises(InputError, match="2 lines of the schema have the mark REVIEW, the first one for 'classes'"):
        check_reviewed(text)
    check_reviewed(text.replace(f"  # {REVIEW_MARK}", ""))


def test_private_ranges_never_show_the_lowest_or_highest_value() -> None:
    random = np.random.default_rng(0)
    for _ in range(3000):
        digits = int(random.integers(0, 4))
        low = round(float(random.uniform(-2, 2)) * 10.0 ** random.integers(-6, 14), digits)
        high = round(low + float(random.uniform(0.01, 1)) * 10.0 ** random.integers(-3, 6), digits)
        profile = ColumnProfile(lowest=low, highest=max(low, high))
        below, above = json.loads(_outward(profile))
        assert below < low or low == below == 0
        assert above > high or high == above == 0


def test_private_comments_have_no_counts_that_one_record_changes(tmp_path: Path) -> None:
    codes, wards = [i % 6 for i in range(2200)], [f"w{i % 110}" for i in range(2200)]
    labels, sizes = ["ab"[i % 2] for i in range(2200)], [str(i % 90) for i in range(2200)]
    more: dict[str, Any] = {"code": 77, "ward": "very rare", "size": "refused", "y": "a"}
    content: dict[str, list[Any]] = {"code": codes, "ward": wards, "size": sizes, "y": labels}
    texts = [
        suggest_schema(written(tmp_path, each), "y", private=True)
        for each in (content, {name: [*values, more[name]] for name, values in content.items()})
    ]
    without = [[line.partition("#")[2] for line in text.splitlines() if "size" not in line] for text in texts]
    assert without[0] == without[1]
    assert "some texts are not numbers" in texts[1]
