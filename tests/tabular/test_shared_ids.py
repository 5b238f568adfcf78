"""IDs before an intersection: what may be entered."""

from __future__ import annotations

import hashlib

import pytest

from cgd.errors import InputError
from cgd.federation.data_schema import parse_schema
from cgd.federation.intersection_section import EACH_LEARNS_WHO, Intersection
from cgd.tabular.shared_ids import check_ids, normalize_ids, possible_ids
from support.tabular import VERTICAL_SCHEMA

SETTINGS = Intersection(5, 1000, EACH_LEARNS_WHO)
SALTED = Intersection(5, 1000, EACH_LEARNS_WHO, salt=True)
PSEUDONYMS = [hashlib.sha256(bytes([number])).hexdigest()[:16] for number in range(100)]


@pytest.mark.parametrize(
    ("ids", "least", "most"),
    [
        ([f"{number}" for number in range(1000, 1400)], 400, 400),
        ([f"patient-{number}" for number in range(1000, 1400)], 400, 400),
        ([f"{1900 + number}-0{1 + number % 9}-1{number % 9}" for number in range(100)], 40_000, 50_000),
        ([f"1{number % 9}.0{1 + number % 9}.{1900 + number}" for number in range(100)], 40_000, 50_000),
        ([f"19{number:02d}0{1 + number % 9}1{number % 9}" for number in range(100)], 40_000, 50_000),
        ([f"{number * 7919 % 100_000:05d}" for number in range(100)], 90_000, 100_000),
        ([f"{number * 7919 % 10**9:09d}" for number in range(100, 5000)], 10**7, 10**9),
        ([f"{number * 104729 % 26**3:05d}AB" for number in range(100)], 1000, 100_000),
        (PSEUDONYMS, 2**64, 2**64),
        (["x"], 1, 1),
    ],
)
def test_possible_ids(ids: list[str], least: int, most: int) -> None:
    assert least <= possible_ids(ids) <= most


@pytest.mark.parametrize(
    "ids",
    [
        [f"{number}" for number in range(100)],
        [f"19{number:02d}-03-04" for number in range(100)],
        [f"{number * 7919 % 100_000:05d}" for number in range(100)],
    ],
    ids=["numbers", "dates of birth", "postal codes"],
)
def test_ids_that_are_easily_guessed_need_a_salt(ids: list[str]) -> None:
    with pytest.raises(
        InputError, match=r"the ids in 'id', such as '[9-]+', are few enough to guess: about [\d,]+ are"
    ):
        check_ids(ids, SETTINGS, "id")
    check_ids(ids, SALTED, "id")


def test_longer_ids_need_none() -> None:
    check_ids(PSEUDONYMS, SETTINGS, "id")
    numbers = [f"{number * 7919 % 10**9:09d}" for number in range(100)]
    with pytest.raises(InputError, match="If a key of this run were ever known, they could all be tried"):
        check_ids(numbers, SETTINGS, "id")


def test_error_does_not_show_an_id() -> None:
    with pytest.raises(InputError) as error:
        check_ids(["Smith-1961", *(f"Jones-19{number}" for number in range(10, 40))], SETTINGS, "id")
    assert "such as 'AAAAA-9999'" in str(error.value)
    assert "Smith" not in str(error.value)


@pytest.mark.parametrize("count", [4, 1001])
def test_number_of_ids_is_limited(count: int) -> None:
    ids = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    with pytest.raises(InputError, match=rf"we have {count:,} records with an id, and \[data.intersection\] allows 5"):
        check_ids(ids, SETTINGS, "id")


@pytest.mark.parametrize(
    ("differences", "text", "expected"),
    [
        ((), " A 07b", " A 07b"),
        (("case",), "A 07ß", "a 07ss"),
        (("spaces",), "A 07\u00a0b", "A07b"),
        (("zeros",), "007", "7"),
        (("zeros",), "000", "0"),
        (("case", "spaces", "zeros"), "00 A7", "0a7"[1:]),
    ],
)
def test_only_listed_differences_do_not_count(differences: tuple[str, ...], text: str, expected: str) -> None:
    settings = Intersection(5, 1000, EACH_LEARNS_WHO, normalize=differences)  # type: ignore[arg-type]
    assert normalize_ids([text], settings) == (expected,)


def test_ids_that_become_the_same_are_refused() -> None:
    settings = Intersection(5, 1000, EACH_LEARNS_WHO, normalize=("case", "zeros"))
    with pytest.raises(
        InputError, match=r"the ids '0a1' and 'A1' are the same, because normalize in .* is \['case', '"
    ):
        normalize_ids(["b", "0a1", "A1"], settings)


SECTION = f"""
[data.intersection]
minimum = 10
maximum = 500
accept = "{EACH_LEARNS_WHO}"
"""


def test_section_is_read_and_stored() -> None:
    head, _, model = VERTICAL_SCHEMA.partition("[model]")
    data, *_ = parse_schema(f"{head}{SECTION}salt = true\nnormalize = ['zeros', 'case']\n[model]{model}")
    assert data.intersection == Intersection(10, 500, EACH_LEARNS_WHO, salt=True, normalize=("case", "zeros"))
    assert data.as_stored()["intersection"]["minimum"] == 10
    assert "intersection" not in parse_schema(VERTICAL_SCHEMA)[0].as_stored()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f'accept = "{EACH_LEARNS_WHO}"', "", "accept is missing"),
        (
            EACH_LEARNS_WHO,
            "yes",
            r"accept is 'yes'. Every member of a row learns .* write accept = 'each learns who is",
        ),
        ("minimum = 10", "minimum = 4", "minimum is 4 and maximum is 500; the least number of people in common is at"),
        ("maximum = 500", "maximum = 9", "minimum is 10 and maximum is 9"),
        ("maximum = 500", "", "maximum is missing"),
        ("maximum = 500", "maximum = 500\nsalt = 1", "salt is 1; it must be"),
        ("maximum = 500", "maximum = 500\nnormalize = 'case'", "normalize is 'case'; it is a list of some of 'case', "),
        ("maximum = 500", "maximum = 500\nnormalise = ['case']", r"no 'normalise' \(did you mean 'normalize'\?\)"),
    ],
)
def test_wrong_sections(old: str, new: str, message: str) -> None:
    head, _, model = VERTICAL_SCHEMA.partition("[model]")
    with pytest.raises(InputError, match=message):
        parse_schema(f"{head}{SECTION.replace(old, new)}[model]{model}")


def test_intersection_needs_different_columns() -> None:
    head, _, model = VERTICAL_SCHEMA.partition("[model]")
    data, *_ = parse_schema(f"{head}{SECTION}[model]{model}")
    with pytest.raises(InputError, match="there is an intersection, and the participants hold no different columns"):
        data.check_grid(0)
    with pytest.raises(InputError, match="there is an intersection, and the participants hold no different columns"):
        data.check_grid(1)
    data.check_grid(3)
