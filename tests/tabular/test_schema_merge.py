"""Suggestions of several participants, joined to one."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.federation.data_schema import parse_schema
from cgd.federation.privacy_section import REVIEW_MARK, check_reviewed
from cgd.tabular.schema import suggest_schema
from cgd.tabular.schema_merge import LEARNED, merge_schemas
from support.tabular import table, write_csv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HEAD = '[data]\ntarget = "num"\n'
MODEL = '[model]\nkind = "mlp"\nlayers = [32]\n'
NAMES = ("a.toml", "b.toml", "c.toml", "d.toml", "e.toml")


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
    assert line(joined, "ward") == f'ward = "category"  # {needed}; {LEARNED}'


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
    assert "# From b.toml, the smallest of different models.\n" in joined
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


PRIVACY = "[privacy]\nepsilon = 2\ndelta = 1e-5\n"
AGE = 'age = { type = "number", range = [17, 88] }'


@pytest.mark.parametrize(
    ("columns", "data", "start"),
    [
        ([AGE], 'classes = [\n  "a",\n  "b",\n]  # REVIEW\n', "classes = "),
        ([AGE], 'classes = [\n  "a",  # REVIEW\n  "b",\n]\n', "classes = "),
        ([AGE], 'classes = [\n  "a",\n# REVIEW\n  "b",\n]\n', "classes = "),
        (["[data.columns.age]", 'type = "number"', "range = [17, 88]  # REVIEW"], "", "age = "),
        (["[data.columns.age]  # REVIEW", 'type = "number"', "range = [17, 88]"], "", "age = "),
        (['age.type = "number"', "age.range = [17, 88]  # REVIEW"], "", "age = "),
        (['delta = { type = "number", range = [17, 88] }  # REVIEW'], "", "delta = { "),
        ([AGE, 'classes = { type = "number", range = [0, 9] }'], 'classes = ["a", "b"]  # REVIEW\n', "classes = ["),
        ([f"{AGE}  # REVIEW (by Ann)"], "", "age = "),
        ([f"{AGE}  # REVIEW."], "", "age = "),
        (['sex = ["#", "f"]  # REVIEW'], "", "sex = "),
        ([f"{AGE}  # REVIEW\r"], "", "age = "),
    ],
)
def test_mark_in_any_form_is_kept(tmp_path: Path, columns: list[str], data: str, start: str) -> None:
    text = schema(columns, data, end=PRIVACY)
    with pytest.raises(InputError, match=f"have the mark {REVIEW_MARK}"):
        check_reviewed(text)
    plain = re.sub("# REVIEW.*", "#", text)
    check_reviewed(plain)
    for texts in ((text, plain), (plain, text)):
        joined = merged(tmp_path, *texts)
        assert line(joined, start).endswith(f"# {REVIEW_MARK}")
        assert joined.count(REVIEW_MARK) == 1
        with pytest.raises(InputError, match=f"have the mark {REVIEW_MARK}"):
            check_reviewed(joined)


def test_mark_of_the_target_is_kept(tmp_path: Path) -> None:
    text = schema([AGE]).replace('"num"', '"num"  # a text in 2 records; REVIEW')
    assert line(merged(tmp_path, schema([AGE]), text), "target") == 'target = "num"  # REVIEW'


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (schema([AGE], end=PRIVACY.replace("1e-5", "1e-5  # REVIEW")), 13),
        (schema([AGE], model=MODEL.replace("[32]", "[32]  # REVIEW")), 9),
        (schema([AGE]).replace("[data.columns]", "[data.columns]  # REVIEW"), 4),
        (schema([]).replace("[data.columns]", f"columns = {{ {AGE}, b = 'number' }}  # REVIEW"), 4),
        (schema([AGE, "  # REVIEW the line above"]), 6),
    ],
)
def test_mark_that_belongs_to_no_line_of_the_result_is_refused(tmp_path: Path, text: str, number: int) -> None:
    with pytest.raises(InputError, match=rf"b\.toml, line {number}: the mark REVIEW .* review the file first"):
        merged(tmp_path, schema([AGE], end=PRIVACY if PRIVACY[:9] in text else ""), text)


def test_comments_and_texts_without_the_mark_are_reviewed() -> None:
    check_reviewed(schema([f"{AGE}  # REVIEWED by Ann", 'sex = ["#", "REVIEW"]', "# Lines with the mark REVIEW"]))


def test_larger_delta_and_an_activation_without_relu_are_taken_with_comments(tmp_path: Path) -> None:
    careless = schema(['age = "number"'], model=f'{MODEL}activation = "relu"\ndelta = 1e-9\n')
    careful = schema(['age = "number"'], model=MODEL.replace("32", "64") + 'activation = "tanh"  # not relu\n')
    for texts in ((careless, careful), (careful, careless)):
        joined = merged(tmp_path, *texts)
        model = parse_schema(joined)[1]
        assert (model.layers, model.activation, model.delta) == ((32,), "tanh", 0.02)
        one, other = ("a.toml", "b.toml") if texts[0] is careless else ("b.toml", "a.toml")
        for key, values in {
            "delta": {one: "1e-09", other: "0.02"},
            "activation": {one: "'relu'", other: "'tanh'"},
            "layers": {one: "[32]", other: "[64]"},
        }.items():
            differs = ", ".join(f"{values[where]} in {where}" for where in ("a.toml", "b.toml"))
            assert line(joined, key).endswith(f"differs: {differs}")
        assert "# not relu; differs" in line(joined, "activation")
        assert "differs" not in line(joined, "kind")


def test_activation_of_a_model_without_hidden_layers_is_not_compared(tmp_path: Path) -> None:
    logistic = '[model]\nkind = "logistic"\n'
    joined = merged(tmp_path, schema([AGE]), schema([AGE], model=logistic), schema([AGE], model=logistic))
    assert "activation" not in joined
    assert line(joined, "kind").endswith("# differs: 'mlp' in a.toml, 'logistic' in b.toml, 'logistic' in c.toml")


def test_texts_that_are_missing_in_one_suggestion_are_noted(tmp_path: Path) -> None:
    one = schema(['chol = { type = "number", missing = ["0", "9"] }'], 'missing = [""]\n')
    joined = merged(tmp_path, one, schema(['chol = { type = "number", missing = ["9", "-9"] }']))
    assert line(joined, "chol").endswith("# missing only in a.toml: '0'; missing only in b.toml: '-9'")
    assert "# missing only in b.toml: 'NA', 'N/A'" in line(joined, "missing")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('sex = ["f", "m"]', 'sex = { type = "category", categories = ["m", "f"], missing = ["f"] }'),
        ('sex = ["f", "m"]', 'sex = { type = "category", missing = ["f"] }'),
        (
            'sex = { type = "category", values = { f = "F", m = "M" } }',
            'sex = { type = "category", values = { f = "F", m = "M" }, missing = ["f"] }',
        ),
    ],
)
def test_category_of_another_participant_is_never_missing(tmp_path: Path, one: str, other: str) -> None:
    one, other = schema([AGE, one]), schema([AGE, other])
    for texts, where, listing in (((one, other), "b.toml", "a.toml"), ((other, one), "a.toml", "b.toml")):
        assert line(merged(tmp_path, *texts), "sex") == (
            f"# sex: left out, 'f' is missing in {where} and a category in {listing}. Decide what it means, and write "
            "one line"
        )


def test_text_that_is_missing_in_all_columns_of_one_is_no_category_or_class_of_another(tmp_path: Path) -> None:
    missing, sex = 'missing = ["", "f"]\n', 'sex = ["f", "m"]'
    joined = merged(tmp_path, schema([AGE, sex]), schema([AGE], missing))
    assert line(joined, "sex").startswith("# sex: left out, 'f' is missing in b.toml and a category in a.toml")
    for classes in ('classes = ["f", "m"]\n', '# classes = ["f", "m"]  # as in this table\n'):
        with pytest.raises(InputError, match=r"'f' is missing in b\.toml and a class in a\.toml; agree on one"):
            merged(tmp_path, schema([AGE], classes), schema([AGE], missing))


def test_own_category_that_is_missing_by_default_is_no_conflict(tmp_path: Path) -> None:
    text = schema([AGE, 'sex = ["None", "m"]'])
    assert parse_schema(merged(tmp_path, text, text))[0].names == ("age", "sex")


def test_categories_that_look_like_ranges_are_texts(tmp_path: Path) -> None:
    columns = [AGE, 'dose = ["0-10", "5-20"]', 'grade = { type = "category", values = { "*" = "any" } }']
    data = parse_schema(merged(tmp_path, schema(columns), schema(columns, 'missing = ["", "7"]\n')))[0]
    assert data.names == ("age", "dose", "grade")


@pytest.mark.parametrize("part", [" = #", "# classes = [", ": left out", '"\\', " "])
def test_long_comments_take_little_time(tmp_path: Path, part: str) -> None:
    text = schema([AGE, "#" + part * (400_000 // len(part))])
    before = time.process_time()
    merged(tmp_path, schema([AGE]), text)
    assert time.process_time() - before < 5  # more than 20 s for the first two, where the search is quadratic


def test_indented_header_ends_the_model(tmp_path: Path) -> None:
    data = schema([AGE], model="")
    turned = f"{MODEL.replace('32', '8')}  {data}"
    joined = merged(tmp_path, schema([AGE]), turned)
    assert joined.count("[data]") == 1
    assert parse_schema(joined)[1].layers == (8,)


def test_name_of_a_file_adds_no_lines(tmp_path: Path) -> None:
    paths = [tmp_path / "a\n[[participants]]\nname = 'eve'\n#\x1b.toml", tmp_path / "b.toml"]
    for path, model in zip(paths, (MODEL, MODEL.replace("32", "8")), strict=True):
        path.write_text(schema([AGE], model=model))
    for order in (paths, paths[::-1]):
        joined = merge_schemas(order)
        parse_schema(joined)
        assert r"a\n[[participants]]\nname = 'eve'\n#\x1b.toml" in joined
        assert not any(each.startswith("[[") for each in joined.splitlines())


def test_files_of_one_name_in_two_folders_are_two_suggestions(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "schema.toml" for folder in "ab"]
    for path, column in zip(paths, ('age = "number"', 'age = "category"'), strict=True):
        path.parent.mkdir()
        path.write_text(schema([column, 'dose = "number"']))
    assert line(merge_schemas(paths), "age").startswith(f"# age: left out, its type differs: 'number' in {paths[0]}")


def test_result_that_would_not_be_valid_is_refused(tmp_path: Path) -> None:
    narrow = schema(['age = { type = "number", range = [1, 1.0000000000001] }'])
    with pytest.raises(
        InputError, match=r"the suggestions cannot be joined, because of their values: .*range is \[1, 1\]"
    ):
        merged(tmp_path, narrow, narrow)


def test_classes_of_one_table_are_to_be_explained_and_not_only_accepted(tmp_path: Path) -> None:
    """Listed, ja and yes would be two classes, and every participant's own counts would be opened."""
    texts = [schema([AGE], f"# classes = {each}  # as in this table\n") for each in ('["ja", "nein"]', '["no", "yes"]')]
    joined = merged(tmp_path, *texts)
    assert line(joined, "values") == (
        '# values = { "ja" = "", "nein" = "", "no" = "", "yes" = "" }  # only in one table: '
        """'ja', 'nein', 'no', 'yes'; state the class that each means; "" removes the label"""
    )
    assert "classes =" not in joined
    with pytest.raises(InputError, match="values gives no class, so that no record would have a label"):
        parse_schema(joined.replace("# values", "values"))


def test_spellings_of_a_class_that_differ_by_case_or_spaces_are_filled_in(tmp_path: Path) -> None:
    listed = ('["Early relapse", "none"]', '["early  relapse", "none"]', '["early relapse", "none", "nein"]')
    texts = [schema([AGE], f"# classes = {each}  # as in this table\n") for each in listed]
    joined = merged(tmp_path, *texts)
    assert line(joined, "values").startswith(
        '# values = { "Early relapse" = "early relapse", "none" = "none", "early  relapse" = "early relapse", '
        '"early relapse" = "early relapse", "nein" = "" }  # only in one table: '
    )
    alike = merged(tmp_path, texts[0], texts[0], *[texts[2].replace(', "nein"', "")] * 2)
    assert line(alike, "values") == (  # each is in two tables, and they are one class all the same
        '# values = { "Early relapse" = "early relapse", "none" = "none", "early relapse" = "early relapse" }  '
        "# spelled differently: check the class that each means, and remove the first #"
    )
    assert parse_schema(alike.replace("# values", "values"))[0].classes == ("early relapse", "none")


def test_comments_of_columns_are_kept_once_and_with_the_file_if_they_differ(tmp_path: Path) -> None:
    code, total = "3 whole numbers: a code?", "the last row seems to be a total"
    one = schema([f'grade = "category"  # {code}', 'estrogen = "number"  # some values are limits', 'age = "number"'])
    other = schema([f'grade = "category"  # {code}; {total}', 'estrogen = "number"', 'age = "number"'])
    joined = merged(tmp_path, one, other)
    assert line(joined, "grade") == f'grade = "category"  # {code}; in b.toml: {total}; {LEARNED}'
    assert line(joined, "estrogen") == 'estrogen = "number"  # in a.toml: some values are limits'
    assert line(joined, "age") == 'age = "number"'
    (tmp_path / "f.toml").write_text(joined)
    again = merge_schemas([tmp_path / "f.toml", tmp_path / "f.toml"])
    assert line(again, "grade") == line(joined, "grade")


def test_only_learned_categories_are_to_be_spelled_alike(tmp_path: Path) -> None:
    text = schema([AGE, 'sex = ["f", "m"]', 'ward = "category"', 'arm = { type = "category", values = { a = "A" } }'])
    assert [each for each in merged(tmp_path, text, text).splitlines() if LEARNED in each] == [
        f'ward = "category"  # {LEARNED}'
    ]


def test_column_that_only_one_participant_has_is_left_out(tmp_path: Path) -> None:
    """In the sums, it would be that participant's own mean, and the others were asked to add an empty column."""
    private = 'crp = { type = "number", range = [0, 731] }  # REVIEW'
    for others in (1, 3):
        joined = merged(tmp_path, schema([AGE, private]), *[schema([AGE])] * others)
        assert line(joined, "crp") == (
            "# crp: left out, only a.toml has it, and the opened sums would be those of that participant alone. To use "
            "it all the same, copy its line from a.toml; then the others need an empty column of this name"
        )
        assert parse_schema(joined)[0].names == ("age",)
        assert "731" not in joined
        assert REVIEW_MARK not in joined
    (tmp_path / "f.toml").write_text(joined)
    again = merge_schemas([tmp_path / "f.toml", tmp_path / "a.toml"])  # the comment is a reason, too
    assert line(again, "crp").startswith("# crp: left out, as in f.toml: only a.toml has it")


def test_column_of_fewer_than_half_of_the_participants_is_left_out(tmp_path: Path) -> None:
    texts = [schema([AGE, 'crp = "number"'])] * 2 + [schema([AGE])] * 3
    assert line(merged(tmp_path, *texts), "crp") == (
        "# crp: left out, only a.toml, b.toml have it, fewer than half of the participants. To use it all the same, "
        "copy its line from a.toml; then the others need an empty column of this name"
    )


def test_column_that_half_of_the_participants_have_stays(tmp_path: Path) -> None:
    texts = [schema([AGE, 'crp = "number"'])] * 2 + [schema([AGE])] * 2
    assert line(merged(tmp_path, *texts), "crp") == (
        'crp = "number"  # not in c.toml: that participant needs an empty column of this name; '
        "not in d.toml: that participant needs an empty column of this name"
    )
    joined = merged(tmp_path, *texts[:3])
    assert line(joined, "crp") == 'crp = "number"  # not in c.toml: that participant needs an empty column of this name'


def test_column_of_one_part_of_a_grid_is_held_by_few(tmp_path: Path) -> None:
    parts = [schema([f'{name} = {{ type = "number", held_by = {place} }}']) for place, name in enumerate("abc")]
    joined = merged(tmp_path, *parts)
    assert parse_schema(joined)[0].names == ("a", "b", "c")
    assert "empty column" not in joined


def test_column_that_one_participant_must_write_otherwise_stays(tmp_path: Path) -> None:
    why = "its numbers have a percent sign: write the numbers alone, in one unit, on which all participants agree"
    joined = merged(tmp_path, *[schema([AGE, 'ef = "number"'])] * 2, schema([AGE, f"# ef: left out, {why}"]))
    assert line(joined, "ef") == f'ef = "number"  # left out in c.toml: {why}'
