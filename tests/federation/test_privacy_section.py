"""The section [privacy] of the federation file: what it may contain, and what is refused with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.data_schema import Column
from cgd.federation.privacy_section import PrivacySection
from support.federation_files import BLOCKS, block, rejection, text, write
from support.private_tables import PRIVATE_SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

REGRESSION = PRIVATE_SCHEMA.replace('classes = ["well", "ill"]', 'task = "regression"\nrange = [0, 10]')
CELLS = "\n".join(block(i, name, f"cell = [{i}, 0]\n") for i, name in enumerate(("ada", "bob", "cleo")))


def private(schema: str = PRIVATE_SCHEMA, blocks: str = BLOCKS, training: str = "") -> str:
    return text(training, blocks=f"{schema}\n{blocks}")


def test_section_has_defaults_and_is_part_of_the_digest(tmp_path: Path) -> None:
    with_privacy = Federation.load(write(tmp_path, private()))
    assert with_privacy.privacy == PrivacySection(8.0, 1e-5, clip=1.0, colluders=1)
    assert with_privacy.training.patience == 0  # one look at the validation loss, unless the file says otherwise
    assert Federation.load(write(tmp_path, private(training="patience = 4"))).training.patience == 4
    without = Federation.load(write(tmp_path, private(PRIVATE_SCHEMA.partition("[privacy]")[0])))
    assert with_privacy.sections().keys() - without.sections().keys() == {"privacy"}
    other = Federation.load(write(tmp_path, private(PRIVATE_SCHEMA.replace("8.0", "2"))))
    assert other.sections()["privacy"] != with_privacy.sections()["privacy"]
    again = Federation.load(write(tmp_path, private(PRIVATE_SCHEMA.replace("8.0", "8") + "clip = 1")))
    assert again.sections() == with_privacy.sections()
    assert Federation.load(write(tmp_path, private(REGRESSION))).data is not None


def test_sums_in_16_bits_are_refused(tmp_path: Path) -> None:
    message = rejection(tmp_path, private(training="ring_bits = 16"))
    assert "its noise is proved for 32 and 64 bits; use one of those" in message
    without = PRIVATE_SCHEMA.partition("[privacy]")[0]
    assert Federation.load(write(tmp_path, private(without, training="ring_bits = 16"))).settings.ring_bits == 16


def test_ranges_change_the_digest_of_the_data_only_if_there_are_some(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, private()))
    assert federation.data is not None
    stored = federation.data.as_stored()
    assert "range" not in stored
    assert [column.get("range") for column in stored["columns"]] == [(0.0, 120.0), (-20.0, 20.0), None]
    wider = Federation.load(write(tmp_path, private(PRIVATE_SCHEMA.replace("120", "150"))))
    assert wider.sections()["data"] != federation.sections()["data"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epsilon = 8.0", "epsilon = 0", "epsilon is 0.0; it must be a positive number"),
        ("epsilon = 8.0", "epsilon = inf", "epsilon is inf; it must be a positive number"),
        ("epsilon = 8.0", 'epsilon = "8"', "epsilon is '8'; it must be a number"),
        ("epsilon = 8.0\n", "", "epsilon is missing; add it"),
        ("delta = 1e-5", "delta = 1", "delta is 1.0; it must be a probability"),
        ("delta = 1e-5", "delta = 1e-5\nclip = -1", "clip is -1.0; it is the largest norm"),
        ("delta = 1e-5", "delta = 1e-5\nreruns = -2", "reruns is -2; it is a number of openings"),
        ("delta = 1e-5", "delta = 1e-5\nreruns = -1", "reruns is -1; it is a number of openings, at least 0. Leave it"),
        ("delta = 1e-5", 'delta = 1e-5\nunit = ""', "unit is empty; name the column whose values name persons"),
        ("delta = 1e-5", "delta = 1e-5\ncolluders = 3", "colluders is 3, and there are 3 members; choose at most 2"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 'age'", "unit is 'age', which is also a column to predict from"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 'outcome'", "unit is 'outcome', which is also a column to predict from"),
        ("delta = 1e-5", "delta = 1e-5\nunit = 3", "unit is 3; it must be a text"),
        ("delta = 1e-5", "delta = 1e-5\nsteps = 3", "there is no 'steps'"),
        ('["A", "B"]', '"category"', "the categories of 'ward' would be learned from records, without noise; list"),
        ('classes = ["well", "ill"]\n', "", "the classes of 'outcome' would be learned from records"),
        (", range = [0, 120] }", " }", "'age' has no range, and noise needs one; write in [data.columns] age = "),
        ('classes = ["well", "ill"]', 'task = "regression"', "the target 'outcome' has no range, and noise needs one"),
    ],
)
def test_what_cannot_be_covered_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PRIVATE_SCHEMA
    assert f"[privacy] {message}" in rejection(tmp_path, private(PRIVATE_SCHEMA.replace(old, new)))


def test_grids_and_programs_of_ones_own_are_refused(tmp_path: Path) -> None:
    grid = rejection(tmp_path, private(blocks=CELLS))
    assert "[privacy] the participants have cells, and noise does not cover what a grid opens; remove the cells" in grid
    alone = rejection(tmp_path, private("[privacy]\nepsilon = 1.0\ndelta = 1e-6\n"))
    assert "[privacy] it is for tables, and there is no [data]; add [data] and [model], or remove [privacy]" in alone


@pytest.mark.parametrize("written", ["[1]", "[2, 1]", "[0, 0]", "[0, inf]", "[nan, 1]", '["a", "b"]', "3", "[true, 2]"])
def test_invalid_ranges_are_rejected(tmp_path: Path, written: str) -> None:
    schema = PRIVATE_SCHEMA.replace("[0, 120]", written)
    assert "column 'age': range is" in rejection(tmp_path, private(schema))


def test_ranges_belong_to_numbers(tmp_path: Path) -> None:
    ward = PRIVATE_SCHEMA.replace('["A", "B"]', '{ type = "category", categories = ["A"], range = [0, 1] }')
    assert "column 'ward': it is a category and has a range" in rejection(tmp_path, private(ward))
    target = PRIVATE_SCHEMA.replace('classes = ["well", "ill"]', 'classes = ["well", "ill"]\nrange = [0, 1]')
    assert "[data] a class has no range; remove range" in rejection(tmp_path, private(target))


def test_range_by_which_numbers_cannot_be_divided_is_refused() -> None:
    """A value at the lower end would become NaN, and with it a sum that others open."""
    with pytest.raises(InputError, match=r"range is \[0, 1e-309\]; it must be the lowest and the highest value"):
        Column("dose", "number", range=[0, 1e-309])  # type: ignore[arg-type]
