"""Numbers that are written with more than digits: thousands separators, signs, units. Nothing is guessed silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd import InputError
from cgd.federation.data_schema import Column, Data, parse_schema
from cgd.tabular.dataset import read_dataset
from cgd.tabular.schema import suggest_schema
from cgd.tabular.written_numbers import not_a_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ROWS = 40
VALUES = [911.5, 1045.5, *(900 + 37.5 * (place * 17 % ROWS) for place in range(ROWS - 2))]
LAB = (Column("lab", "number"),)
POINT = "write it without thousands separators, and decimals with a point, as in 1234.5"
COMMA = "write it without thousands separators, and decimals with a comma, as in 1234,5"


def german(value: float) -> str:
    return f"{value:,.1f}".translate(str.maketrans(",.", ".,"))


def whole(value: float, separator: str) -> str:
    return f"{int(value):,}".replace(",", separator)


def written(folder: Path, cells: Sequence[str], name: str = "lab") -> Path:
    """Write a table with a column of these cells, and two good columns."""
    path = folder / "table.csv"
    rows = (f"{cell};{30 + place * 7 % 20};{place % 2}" for place, cell in enumerate(cells))
    path.write_text("\n".join([f"{name};age;num", *rows, ""]))
    return path


def refused(path: Path, label: str = "num", **options: Any) -> str:
    with pytest.raises(InputError) as error:
        suggest_schema(path, label, **options)
    return str(error.value).replace(str(path), "FILE")


def refused_by_join(path: Path, decimal: str) -> str:
    with pytest.raises(InputError) as error:
        read_dataset(path, Data("num", LAB), LAB, decimal=decimal)
    return str(error.value).replace(str(path), "FILE")


def lab_line(path: Path, **options: Any) -> str:
    """Return the suggested line of the column; it has no value of the table."""
    text = suggest_schema(path, "num", **options)
    parse_schema(text)
    return next(line for line in text.splitlines() if line.lstrip("# ").startswith("lab"))


# Thousands separators


@pytest.mark.parametrize(
    ("cells", "decimal", "place", "fact"),
    [
        (list(map(german, VALUES)), ",", 3, f"'1.045,5' is not a number; {COMMA}"),
        (list(map(german, VALUES)), None, 2, "'911,5' is not a number; write decimals with a point, as in 1.5, or"),
        (list(map(german, VALUES[1:3] + VALUES[-30:])), None, 2, f"'1.045,5' is not a number; {POINT}"),
        (
            [whole(value, ".") for value in VALUES],
            ",",
            3,
            "'1.045' is not a number, because decimals have a comma here; write it without thousands separators",
        ),
        ([f"{value:,.1f}" for value in VALUES], None, 3, f"'1,045.5' is not a number; {POINT}"),
        ([f"{value:,.1f}" for value in VALUES], ".", 3, f"'1,045.5' is not a number; {POINT}"),
        ([whole(value, "'") for value in VALUES], None, 3, f'"1\'045" is not a number; {POINT}'),
        ([whole(value, "’") for value in VALUES], None, 3, f"'1’045' is not a number; {POINT}"),
        ([whole(value, "'") for value in VALUES], ",", 3, f'"1\'045" is not a number; {COMMA}'),
        ([whole(value, " ") for value in VALUES], None, 3, f"'1 045' is not a number; {POINT}"),
        (["n.a.", *(whole(value, "'") for value in VALUES)], None, 4, f'"1\'045" is not a number; {POINT}'),
        (["1'045", *(str(value) for value in VALUES)], None, 2, f'"1\'045" is not a number; {POINT}'),
    ],
)
def test_thousands_separators_are_refused_as_by_join(
    tmp_path: Path, cells: list[str], decimal: str | None, place: int, fact: str
) -> None:
    path = written(tmp_path, cells)
    start = f"FILE, line {place}, column 'lab': {fact}"
    assert refused(path, decimal=decimal).startswith(start)
    if cells[0] != "n.a." and not (decimal == "." and "'" in cells[1]):
        assert refused_by_join(path, decimal or ".").startswith(start)


def test_message_names_all_columns_with_thousands_separators(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    rows = (f"{whole(value, chr(39))};{whole(3 * value, chr(39))};{place % 2}" for place, value in enumerate(VALUES))
    path.write_text("\n".join(["a;b;num", *rows, ""]))
    assert refused(path).startswith("FILE, line 3, column 'a': \"1'045\" is not a number; ")
    assert refused(path).endswith(" The same holds for column 'b'")


def test_codes_that_look_like_thousands_are_left_out_of_a_file_to_suggest_from(tmp_path: Path) -> None:
    path = written(tmp_path, ["1.045", "2.100"] * 20)
    message = refused(path, decimal=",")
    assert "If these are codes and no numbers, suggest from a copy of the file without the column" in message
    data = Data("num", (Column("lab", "category"),))
    assert read_dataset(path, data, data.columns, decimal=",")[0].rows == ROWS  # and write the line by hand


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("patient_id", [f"{100 + place} 204" for place in range(ROWS)]),
        ("lab", [f"044 {200 + place} 204" for place in range(ROWS)]),  # a phone number; numbers do not begin with 0
        ("lab", [f"{place % 28 + 1:02}.{place % 12 + 1:02}.1971" for place in range(ROWS)]),
        ("lab", [f"+41 {100 + place} 204 100" for place in range(ROWS)]),
    ],
)
def test_identifiers_have_no_thousands_separators(tmp_path: Path, name: str, cells: list[str]) -> None:
    for decimal in (None, ","):
        assert f"# {name}: left out" in suggest_schema(written(tmp_path, cells, name), "num", decimal=decimal)


def test_points_where_decimals_have_commas_are_no_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, [str(value) for value in VALUES])
    assert lab_line(path, decimal=",") == (
        "# lab: left out, its numbers have points, and decimals have commas in this file: write all of them in one "
        'way. If they are codes, write lab = "category"'
    )
    assert refused_by_join(path, ",") == (
        "FILE, line 2, column 'lab': '911.5' is not a number, because decimals have a comma here; write all decimals "
        "of the file with a comma, or all with a point and without --decimal"
    )


def test_target_with_thousands_separators_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, list(map(german, VALUES)))
    assert refused(path, "lab", decimal=",").startswith("FILE, line 3, column 'lab': '1.045,5' is not a number")


# Signs and units

ALONE = "write the numbers alone, in one unit, on which all participants agree"


@pytest.mark.parametrize("suffix", ["%", " %", " mmol/l", " mg/dl", "°C", " years", " µg", " 10^9/l"])
@pytest.mark.parametrize("decimal", [None, ","])
def test_numbers_with_a_unit_are_left_out(tmp_path: Path, suffix: str, decimal: str | None) -> None:
    sign = decimal or "."
    path = written(tmp_path, [f"{value / 100:.1f}{suffix}".replace(".", sign) for value in VALUES])
    what = "a percent sign" if "%" in suffix else "a unit"
    assert lab_line(path, decimal=decimal) == (
        f'# lab: left out, its numbers have {what}: {ALONE}. If they are categories, write lab = "category"'
    )
    cell = f"9.1{suffix}".replace(".", sign)
    remedy = (
        "write it without the percent sign, and agree with all participants whether 12 % is 12 or 0.12"
        if "%" in suffix
        else "correct it: write the number alone, in the unit on which all participants agree"
    )
    assert refused_by_join(path, sign) == f"FILE, line 2, column 'lab': {cell!r} is not a number; {remedy}"


def test_few_numbers_with_a_unit_may_be_categories(tmp_path: Path) -> None:
    path = written(tmp_path, ["5 mg", "10 mg", "20 mg", "40 mg"] * 10)
    assert lab_line(path) == f'lab = "category"  # its numbers have a unit; for a measurement, {ALONE}'


def test_some_percent_signs_are_no_markers_of_missing_values(tmp_path: Path) -> None:
    cells = [f"{value / 100}" for value in VALUES]
    assert "left out, its numbers have a percent sign" in lab_line(written(tmp_path, ["26%", *cells[1:]]))


@pytest.mark.parametrize("cells", [["1a", "2a", "2b", "3b"] * 10, [f"T{place}" for place in range(8)] * 5])
def test_codes_have_no_units(tmp_path: Path, cells: list[str]) -> None:
    assert lab_line(written(tmp_path, cells)) == 'lab = "category"'


def test_limits_of_a_measurement_are_no_missing_values(tmp_path: Path) -> None:
    cells = [f"{value / 100}" for value in VALUES]
    rule = "are limits, with < or >: write a number instead, by a rule on which all participants agree"
    assert lab_line(written(tmp_path, ["<0.5", "<0.5", *cells[2:]])) == f'lab = "number"  # some values {rule}'
    many = written(tmp_path, ["<0.5", "< 0,7", ">30", "≥35", "<=0.1", *cells[5:]])
    assert lab_line(many) == f"# lab: left out, some of its values {rule}"
    assert refused_by_join(many, ".") == (
        "FILE, line 2, column 'lab': '<0.5' is a limit and not a number; write a number instead, by a rule on which "
        "all participants agree, such as half of the limit, or leave the field empty"
    )


@pytest.mark.parametrize("text", [">500", "≥ 500", ">=500"])
def test_half_of_an_upper_limit_is_no_rule(text: str) -> None:
    assert not_a_number(text) == (
        f"{text!r} is a limit and not a number; write a number instead, by a rule on which all participants agree, "
        "such as the limit itself, or leave the field empty"
    )


def test_two_ranges_are_categories(tmp_path: Path) -> None:
    assert lab_line(written(tmp_path, ["<40", ">40"] * 20)) == 'lab = "category"'


def test_minus_sign_of_a_word_processor_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [f"−{value}" for value in VALUES])
    assert "its numbers have a minus sign that is not '-'" in lab_line(path)
    assert "'−911.5' is not a number; write its minus sign as '-'" in refused_by_join(path, ".")


def test_numbers_before_towns_have_no_units(tmp_path: Path) -> None:
    path = written(tmp_path, ["8001 Zürich", "3000 Bern", "4051 Basel"] * 10)
    assert "unit" not in lab_line(path)


def test_numbers_with_commas_are_no_names_although_decimals_have_points(tmp_path: Path) -> None:
    path = written(tmp_path, [f"{place + 1},783" for place in range(ROWS)])
    assert lab_line(path, decimal=".").startswith(
        "# lab: left out, its numbers have commas: write them without thousands"
    )


def test_target_with_units_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [f"{value} %" for value in VALUES])
    assert refused(path, "lab").startswith("FILE, line 2, column 'lab': '911.5 %' is not a number; write it without")


# Rows of totals


def test_row_of_totals_is_named(tmp_path: Path) -> None:
    cells = [f"{value}" for value in VALUES]
    path = written(tmp_path, [*cells, "Summe"])
    assert lab_line(path) == 'lab = "number"  # the last row seems to be a total: remove it, if it is no record'
    assert refused_by_join(path, ".") == (
        "FILE, line 42, column 'lab': 'Summe' is not a number; remove the row if it is a total and no record; "
        "otherwise correct it, list it as missing in [data], or make the column a category"
    )
    wards = written(tmp_path, [*(["A", "B"] * 20), "Total"])
    assert lab_line(wards).endswith("the last row seems to be a total: remove it, if it is no record")
    assert suggest_schema(path, "lab").splitlines()[3] == (
        'target = "lab"  # the last row seems to be a total: remove it, if it is no record'
    )
    quoted = written(tmp_path, [*cells, "Summe"], "lab  # 1")
    assert '"lab  # 1" = "number"  # the last row seems' in suggest_schema(quoted, "num")
    names = written(tmp_path, [*(f"Name {place}" for place in range(ROWS)), "Gesamt:"])
    assert lab_line(names).startswith("# lab: left out, ")
    assert lab_line(names).endswith("the last row seems to be a total: remove it, if it is no record")


def test_category_total_within_a_table_is_a_category(tmp_path: Path) -> None:
    assert lab_line(written(tmp_path, ["total", "partial"] * 20 + ["total"])) == 'lab = "category"'
