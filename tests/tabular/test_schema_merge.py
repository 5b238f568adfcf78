"""Suggestions of several participants, joined to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.federation.data_schema import parse_schema
from cgd.federation.privacy_section import REVIEW_MARK, check_reviewed
from cgd.tabular.schema import suggest_schema
from cgd.tabular.schema_merge import merge_schemas
from support.tabular import table, write_csv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEAD = '[data]\ntarget = "num"\n'
MODEL = '[model]\nkind = "mlp"\nlayers = [32]\n'
NAMES = ("a.toml", "b.toml", "c.toml")


def merged(folder: Path, *texts: str) -> str:
    paths = [folder / name for name, _ in zip(NAMES, texts, strict=False)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    joined = merge_schemas(paths)
    parse_schema(joined)  # it is a schema
    return joined


def schema(columns: Sequence[str], data: str = "", model: str = MODEL, end: str = "") -> str:
    return "\n".join([HEAD + data, "[data.columns]", *columns, "", model, end])


def line(text: str, key: str) -> str:
    return next(each for each in text.splitlines() if each.lstrip("# ").startswith(key))


def test_suggestions_of_three_tables_are_joined(tmp_path: Path) -> None:
    suggestions = []
    for seed, wards in enumerate((("A", "B"), ("A", "C"), ("B", "C"))):
        path = write_csv(tmp_path / f"{seed}.csv", table(60, seed, wards))
        suggestions.append(suggest_schema(path, "outcome"))
    joined = merged(tmp_path, *suggestions)
    data, model, privacy = parse_schema(joined)
    assert [(each.name, each.type) for each in data.columns] == [
        ("age", "number"), ("dose", "number"), ("ward", "category"),
    ]  # fmt: skip
    assert (data.target, model.layers, privacy) == ("outcome", parse_schema(suggestions[0])[1].layers, None)
    assert line(joined, "classes") == '# classes = ["ill", "well"]  # left out: learned by a secure sum'


def test_private_suggestions_keep_their_marks_and_have_the_union_of_ranges(tmp_path: Path) -> None:
    columns = ["age = { type = 'number', range = [20, 80] }  # REVIEW", "sex = ['f', 'm']  # REVIEW"]
    others = ["age = { type = 'number', range = [0, 60] }", "sex = ['f', 'x']  # REVIEW"]
    sections = ["[privacy]\nepsilon = 2.0\ndelta = 1e-5", "[privacy]\nepsilon = 1.0\ndelta = 1e-6\ncolluders = 2"]
    joined = merged(
        tmp_path,
        schema(columns, "classes = ['0', '1']  # REVIEW\n", end=sections[0]),
        schema(others, "classes = ['0', '1', '4']  # REVIEW\n", end=sections[1]),
    )
    assert line(joined, "age") == 'age = { type = "number", range = [0, 80] }  # REVIEW'
    assert line(joined, "sex") == 'sex = ["f", "m", "x"]  # REVIEW'
    assert line(joined, "classes") == 'classes = ["0", "1", "4"]  # only in one table: \'4\'; REVIEW'
    privacy = parse_schema(joined)[2]
    assert privacy is not None
    assert (privacy.epsilon, privacy.delta, privacy.colluders) == (1.0, 1e-6, 2)
    with pytest.raises(InputError, match=f"have the mark {REVIEW_MARK}"):
        check_reviewed(joined)


def test_range_in_another_unit_is_noted(tmp_path: Path) -> None:
    columns = ["chol = { type = 'number', range = [0, 600] }"], ["chol = { type = 'number', range = [0, 20] }"]
    assert line(merged(tmp_path, *map(schema, columns)), "chol").endswith(
        "# much wider in a.toml than in b.toml: is it the same unit?"
    )


def test_column_of_different_types_is_left_out_with_both(tmp_path: Path) -> None:
    joined = merged(
        tmp_path, schema(['ca = "number"', 'age = "number"']), schema(['ca = "category"', 'age = "number"'])
    )
    assert line(joined, "ca") == (
        "# ca: left out, its type differs: 'number' in a.toml, 'category' in b.toml. Decide what it means, and write "
        "one line"
    )
    assert parse_schema(joined)[0].names == ("age",)


def test_column_that_one_table_left_out_as_names_is_left_out(tmp_path: Path) -> None:
    left_out = "# doctor: left out, more than half of its texts are distinct: names? All participants see them"
    joined = merged(tmp_path, schema(['doctor = "category"', 'age = "number"']), schema([left_out, 'age = "number"']))
    assert line(joined, "doctor") == (
        "# doctor: left out, as in b.toml: more than half of its texts are distinct: names? All participants see them"
    )


def test_column_that_one_table_does_not_have_or_has_no_values_of_stays(tmp_path: Path) -> None:
    first = schema(['age = "number"', '"body mass" = "number"', 'ward = "category"'])
    empty = schema(
        [
            'age = "number"',
            '# "body mass": left out, all its values are missing',
            '# ward = "category"  # left out, it has only one value',
        ]
    )
    joined = merged(tmp_path, first, empty)
    needed = "not in b.toml: that participant needs an empty column of this name"
    assert line(joined, '"body mass"') == f'"body mass" = "number"  # {needed}'
    assert line(joined, "ward") == f'ward = "category"  # {needed}'


def test_missing_texts_and_mappings_are_joined(tmp_path: Path) -> None:
    stage = 'stage = { type = "category", values = { "0" = "no", "1-4" = "yes" } }'
    one = schema([stage, 'chol = { type = "number", missing = ["0"] }'], 'missing = ["", "NA"]\n')
    other = schema([stage, 'chol = { type = "number", missing = ["-9"] }'], 'missing = ["", "unknown"]\n')
    data = parse_schema(merged(tmp_path, one, other))[0]
    assert data.missing == ("", "NA", "unknown")
    assert data.columns[0].values == {"0": "no", "1-4": "yes"}
    assert data.columns[1].missing == ("0", "-9")


def test_smallest_model_is_taken(tmp_path: Path) -> None:
    small = '[model]\nkind = "logistic"  # few records'
    joined = merged(tmp_path, schema(['age = "number"']), schema(['age = "number"'], model=small))
    assert parse_schema(joined)[1].kind == "logistic"
    assert "# From b.toml, the smallest of different models: it discloses the least." in joined
    assert 'kind = "logistic"  # few records' in joined


def test_edited_comments_are_no_error(tmp_path: Path) -> None:
    broken = schema(['# "a: left out, because', 'age = "number"'], '# classes = ["a]  # mine\n')
    assert parse_schema(merged(tmp_path, schema(['age = "number"']), broken))[0].names == ("age",)


def test_model_without_a_header_is_written_anew(tmp_path: Path) -> None:
    flat = 'data.target = "num"\ndata.columns.age = "number"\nmodel.kind = "mlp"\nmodel.layers = [4, 2]\n'
    model = parse_schema(merged(tmp_path, schema(['age = "number"']), flat))[1]
    assert (model.kind, model.layers) == ("mlp", (4, 2))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("task = 'classification'\n", "task = 'regression'\n", "the suggestions differ in task: 'classification'"),
        ("validation = 0.1\n", "", "the suggestions differ in validation: '0.1' in a.toml, '0.2' in b.toml"),
    ],
)
def test_suggestions_that_do_not_belong_together_are_refused(
    tmp_path: Path, one: str, other: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        merged(tmp_path, schema(['age = "number"'], one), schema(['age = "number"'], other))


def test_one_suggestion_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 file is named; name the suggestions of two participants or more"):
        merged(tmp_path, schema(['age = "number"']))
    with pytest.raises(InputError, match=r"b\.toml, line 5: \[data\] column 'age': type is 'integer'"):
        merged(tmp_path, schema(['age = "number"']), schema(['age = "integer"']))
