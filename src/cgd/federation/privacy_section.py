"""The section `[privacy]` of the federation file: differential privacy for a training on tables.

    [privacy]
    epsilon = 1.0      # ε, for every record
    delta = 1e-6       # δ, far below one divided by the number of all records
    clip = 1.0         # the largest norm of a record's gradient
    colluders = 1      # how many participants may collude, or leave out their noise
    unit = "patient"   # optional: the column that names the person of a record; (ε, δ) is then for every person

What depends on records is opened with noise only. So nothing else may be learned from them: the file lists categories,
classes and the ranges of numbers, and `check_coverage` refuses a file without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.federation.toml_lines import statements
from cgd.federation.toml_validation import check_keys, typed

if TYPE_CHECKING:
    from cgd.federation.data_schema import Data

REVIEW_MARK = "REVIEW"
"""In a comment of a schema: the line was taken from a table, and must be reviewed before it is published."""
PERSONS_QUESTION = "does it name persons? If so, leave it out"
DAYS_QUESTION = "are these dates of birth, as days that Excel counts? If so, leave it out"
QUESTIONS = (PERSONS_QUESTION, DAYS_QUESTION)
"""In a comment of a column with the mark: what only people can tell."""
STATISTICS_SHARE = 0.1
"""The part of μ² for statistics of the tables; the steps have the rest."""


@dataclass(frozen=True)
class PrivacySection:
    """The settings of differential privacy, equal for all members. Invalid values raise an `InputError`.

    Attributes:
        epsilon: ε, for every record.
        delta: δ; it must be below one divided by the number of all records.
        clip: C, the largest norm of a record's gradient over all parameters.
        colluders: t, how many members may collude, or leave out their noise, without weakening the guarantee.
        reruns: how many attempts may be opened besides the steps; −1 for the default of `PrivacySettings`.
        unit: the column whose values name the person, or other unit, that a record belongs to. The guarantee is for all
            records of a unit together. Empty: every record is a unit of its own.
    """

    epsilon: float
    delta: float
    clip: float = 1.0
    colluders: int = 1
    reruns: int = -1
    unit: str = ""

    def __post_init__(self) -> None:
        kinds = {"epsilon": float, "delta": float, "clip": float, "colluders": int, "reruns": int, "unit": str}
        for name, kind in kinds.items():
            object.__setattr__(self, name, typed(name, getattr(self, name), kind))
        self.settings(1)  # raises if they are invalid

    def settings(self, steps: int, looks: int = 0, quorum: int | None = None) -> PrivacySettings:
        """Return the settings of a training of `steps` steps, with `looks` openings of the validation loss.

        `quorum` is the least number of members of a sum, if members may be absent.
        """
        return PrivacySettings(
            self.epsilon,
            self.delta,
            steps,
            self.clip,
            self.colluders,
            self.reruns,
            statistics_share=STATISTICS_SHARE,
            looks=looks,
            quorum=quorum,
        )


def parse_privacy(table: Any) -> PrivacySection:
    """Parse a `[privacy]` section.

    Raises:
        InputError: it is not valid.
    """
    names = [each.name for each in fields(PrivacySection)]
    check_keys(table, ("epsilon", "delta"), names[2:])
    if table.get("reruns", 0) == -1:  # our own mark of the default
        raise InputError("reruns is -1; it is a number of openings, at least 0. Leave it out for the default")
    if table.get("unit") == "":
        raise InputError("unit is empty; name the column whose values name persons, or leave it out")
    return PrivacySection(**table)


def has_mark(comment: str) -> bool:
    """Return whether a comment has the mark as a word."""
    return re.search(rf"(?<![A-Za-z]){REVIEW_MARK}(?![A-Za-z])", comment) is not None


def check_reviewed(schema: str) -> None:
    """Check that no header or key of a schema has the mark of `cgd schema --private`, in any of its comments.

    Raises:
        InputError: some have; the message names the first one.
    """
    marked = [
        (number, statement.partition("=")[0].strip(), comment)
        for number, statement, comment in statements(schema)
        if has_mark(comment)
    ]
    if marked:
        number, key, comment = marked[0]
        lines = f"{len(marked)} lines of the schema have the mark {REVIEW_MARK}"
        where = f"{lines}, the first one for {key!r} (line {number}):"
        for question in QUESTIONS:
            if question in comment:
                raise InputError(f"{where} {question}; if not, delete the mark")
        raise InputError(
            f"{where} their values come from one participant's table, and are not protected by noise. Write what is "
            "known without looking at records, and delete the marks"
        )


def check_coverage(
    section: PrivacySection, data: Data | None, members: int, *, grid: bool, quorum: int | None = None
) -> None:
    """Check that everything that a training opens can have noise.

    Args:
        section: the section.
        data: the `[data]` section, if there is one.
        members: the number of participants.
        grid: whether the participants have cells.
        quorum: the least number of members of a sum, if members may be absent.

    Raises:
        InputError: something cannot; the message names the remedy.
    """
    if data is None:
        raise InputError(
            "it is for tables, and there is no [data]; add [data] and [model], or remove [privacy] and pass "
            "cgd.Privacy to the optimiser of your own program"
        )
    if grid:
        raise InputError(
            "the participants have cells, and noise does not cover what a grid opens; remove the cells and let every "
            "participant hold all columns, or remove [privacy]"
        )
    section.settings(1, quorum=quorum).check_members(members)
    if section.unit in (*data.names, data.target):
        raise InputError(
            f"unit is {section.unit!r}, which is also a column to predict from, or the target; it must name persons, "
            "and nothing about them. Remove it from [data.columns], or name another column"
        )
    for column in data.columns:
        if column.type == "category" and not column.categories:
            raise InputError(
                f"the categories of {column.name!r} would be learned from records, without noise; list them in "
                f"[data.columns]: {column.name} = ['first', 'second']. Other values count as missing"
            )
        if column.type == "number" and column.range is None:
            raise InputError(
                f"{column.name!r} has no range, and noise needs one; write in [data.columns] {column.name} = "
                "{ type = 'number', range = [LOW, HIGH] }, with values that are known without looking at the records. "
                "Values outside are cut to it"
            )
        if (
            column.type == "date"
            and column.range is None
            and any(each.type == "number" for each in column.input_columns)
        ):
            raise InputError(
                f"the date {column.name!r} has no range, and noise needs one; write in [data.columns] {column.name} = "
                "{ type = 'date', range = ['FIRST', 'LAST'] }, with days such as 1920-01-01 that are known without "
                "looking at the records, or use parts = ['month', 'weekday'] only. Days outside are cut to it"
            )
    if data.task == "classification" and not data.classes:
        raise InputError(
            f"the classes of {data.target!r} would be learned from records, without noise; list them in [data]: "
            "classes = ['first', 'second']"
        )
    if data.task == "regression" and data.range is None:
        raise InputError(
            f"the target {data.target!r} has no range, and noise needs one; write range = [LOW, HIGH] in [data], with "
            "values that are known without looking at the records. Values outside are cut to it"
        )
