"""The sections `[data]` and `[model]` of the federation file, for `cgd join --data`.

    [data]
    target = "income"            # the column to predict
    task = "classification"      # or "regression"
    classes = ["<=50K", ">50K"]  # if left out: learned by a secure sum

    [data.columns]
    age = "number"
    workclass = "category"       # its categories are learned by a secure sum, those of few records as "other"
    sex = ["Female", "Male"]     # these categories, and no others
    weight = { type = "number", range = [0, 200] }  # values outside are cut to this range
    pulse = { type = "number", missing = ["0"] }    # 0 stands for a missing value in this column
    admission = { type = "date", format = "%d.%m.%Y" }  # its days, month and weekday; see `cgd.federation.date_format`
    stage = { type = "category", values = { "0" = "no", "1-4" = "yes" } }  # see `cgd.federation.value_map`

    [model]
    kind = "mlp"                 # or "linear", "logistic"; or function = "module:function"
    layers = [64, 32]
    activation = "relu"

In a grid, every column of the table names the column of the grid that holds it:
`age = { type = "number", held_by = 0 }`.
Columns of a participant's file that are not listed here are not read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, Literal, cast

from cgd.errors import InputError
from cgd.federation.date_format import check_format, check_time_zone, day_number
from cgd.federation.intersection_section import Intersection, parse_intersection
from cgd.federation.model_section import Model, check_choice, parse_model
from cgd.federation.privacy_section import PrivacySection, parse_privacy
from cgd.federation.toml_lines import at_line
from cgd.federation.toml_validation import at, check_keys, check_values, typed
from cgd.federation.value_map import check_values_table, listed_categories
from cgd.files import parse_toml

if TYPE_CHECKING:
    import os

ColumnType = Literal["number", "category", "date"]
Part = Literal["days", "month", "weekday"]
Task = Literal["classification", "regression"]
ClassWeights = Literal["none", "balanced"]
Range = tuple[float, float]

SCHEMA_SECTIONS = ("data", "model", "privacy")
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
# Of UTF-8; a longer value is free text, not a category.
MAX_CATEGORY_BYTES = 90
RARE = 5
"""Values of fewer records are not disclosed, and features of fewer training records are merged."""
MAX_RARE = 1_000_000
PARTS: tuple[Part, ...] = ("days", "month", "weekday")
REFERENCE = "2000-01-01"
"""The day from which days are counted, unless a column states another."""
MONTHS = tuple(map(str, range(1, 13)))
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OTHER = "other"
"""The category of values that are not disclosed."""
MAX_RANGE = 2.0**80  # as large as numbers in a table may be
MIN_RANGE = 2.0**-200  # of the difference of both ends, by which numbers are divided


@dataclass(frozen=True)
class Column:
    """One column of the tables.

    Attributes:
        name: the name in the header.
        type: "number", "category" or "date".
        categories: the categories in order; empty if they are learned, or for a number.
        held_by: in a grid, the column of the grid whose participants hold it.
        range: the lowest and highest value of a number, or the first and last day of a date, from 1970-01-01; values
            outside are cut to it. None: any value.
        rare: if the categories are learned, another `rare` than that of [data].
        missing: more texts that stand for a missing value, in this column.
        values: the category of each value of the tables; empty: the value itself. See `cgd.federation.value_map`.
        format: how dates are written, besides those with the year first; see `cgd.federation.date_format`.
        reference: the day from which days of a date are counted; empty: `REFERENCE`.
        time_zone: where the days of times with a time zone are meant.
        parts: what becomes of a date: its days, month and weekday; empty: all of them.
    """

    name: str
    type: ColumnType
    categories: tuple[str, ...] = ()
    held_by: int | None = None
    range: Range | None = None
    rare: int | None = None
    missing: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict, hash=False)
    format: tuple[str, ...] = ()
    reference: str = ""
    time_zone: str = ""
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        check_choice("type", self.type, ColumnType)
        self._check_date()
        object.__setattr__(self, "categories", _texts("categories", self.categories))
        if self.categories and self.type != "category":
            raise InputError(f"it is a {self.type} and has categories; remove them, or write type = 'category'")
        if self.held_by is not None and (type(self.held_by) is not int or self.held_by < 0):
            raise InputError(f"held_by is {self.held_by!r}; it must be a column of the grid, from 0")
        object.__setattr__(self, "range", _days(self.range) if self.type == "date" else _range(self.range))
        if self.range is not None and self.type == "category":
            raise InputError("it is a category and has a range; remove the range, or write type = 'number'")
        object.__setattr__(self, "missing", _texts("missing", self.missing))
        object.__setattr__(self, "values", check_values_table(self.values))
        if self.values and self.type != "category":
            raise InputError(
                f"it is a {self.type} and has values for categories; remove them, or write type = 'category'"
            )
        listed = listed_categories("categories", self.categories, self.values)
        object.__setattr__(self, "categories", _texts("values", listed))
        if self.rare is not None:
            _records("rare", self.rare)
            if not self.is_learned:
                raise InputError("rare is for categories that are learned; remove it")

    @property
    def is_learned(self) -> bool:
        """True if its categories are learned by secure sums."""
        return self.type == "category" and not self.categories

    @property
    def source(self) -> str:
        """The name of the column of the tables that it is read from."""
        return self.name

    @property
    def first_day(self) -> str:
        """The day from which days of a date are counted."""
        return self.reference or REFERENCE

    @property
    def input_columns(self) -> tuple[Column, ...]:
        """The columns of numbers and categories that it becomes: itself, or the parts of a date."""
        if self.type != "date":
            return (self,)
        return tuple(DatePart.from_date(self, part) for part in self.parts or PARTS)

    def _check_date(self) -> None:
        object.__setattr__(self, "format", tuple(map(check_format, _texts("format", self.format))))
        for name in ("reference", "time_zone"):
            typed(name, getattr(self, name), str)
        check_time_zone(self.time_zone)
        object.__setattr__(self, "parts", _texts("parts", self.parts))
        for part in self.parts:
            check_choice("parts", part, Part)
        if self.reference:
            with at("reference: "):
                day_number(self.reference)
        if self.type != "date" and (self.format or self.reference or self.time_zone or self.parts):
            raise InputError(
                f"it is a {self.type} and has format, reference, time_zone or parts; remove them, or write "
                "type = 'date'"
            )


@dataclass(frozen=True)
class DatePart(Column):
    """A column of numbers or categories that a date becomes.

    Attributes:
        of: the column of dates.
        part: which part it is.
    """

    of: Column = field(kw_only=True)
    part: Part = field(kw_only=True)

    @classmethod
    def from_date(cls, date: Column, part: Part) -> DatePart:
        """Return a part of a column of dates."""
        name, held_by = f"{date.name} {part}", date.held_by
        if part != "days":
            names = MONTHS if part == "month" else WEEKDAYS
            return cls(name, "category", names, held_by, of=date, part=part)
        first = day_number(date.first_day)
        limits = None if date.range is None else (date.range[0] - first, date.range[1] - first)
        return cls(name, "number", held_by=held_by, range=limits, of=date, part=part)

    @property
    def source(self) -> str:
        """The name of the column of dates."""
        return self.of.name


@dataclass(frozen=True)
class Data:
    """The columns of the tables and the target, equal for all participants. Invalid values raise an `InputError`.

    Attributes:
        target: the column to predict.
        columns: the columns to predict it from, in order.
        task: "classification" or "regression".
        classes: the values of the target, in order; empty if they are learned.
        class_weights: "balanced" gives every class the same total weight.
        id: the column that identifies a record; needed in a grid, where the participants of a row share records.
        missing: texts that stand for a missing value.
        validation: the fraction of every participant's records in the validation split.
        range: in a regression, the lowest and highest value of the target; values outside are cut to it.
        rare: a value of a learned category is disclosed only if a participant has this number of records of it, and
            another participant, too. With 1, all values that two participants have are disclosed. It is also the least
            number of records for listed categories, for numbers, and for features in training.
        other: whether values that are not disclosed become the category "other". If not, no participant with such
            values can train.
        values: in a classification, the class of each value of the target; empty: the value itself.
        intersection: in a grid, that the members of a row find out which records they have in common; None: they must
            hold the same ones.
    """

    target: str
    columns: tuple[Column, ...]
    task: Task = "classification"
    classes: tuple[str, ...] = ()
    class_weights: ClassWeights = "none"
    id: str = ""
    missing: tuple[str, ...] = MISSING
    validation: float = 0.2
    range: Range | None = None
    rare: int = RARE
    other: bool = True
    values: dict[str, str] = field(default_factory=dict, hash=False)
    intersection: Intersection | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "intersection", parse_intersection(self.intersection))
        for name in ("target", "id"):
            typed(name, getattr(self, name), str)
        check_choice("task", self.task, Task)
        check_choice("class_weights", self.class_weights, ClassWeights)
        object.__setattr__(self, "classes", _texts("classes", self.classes))
        object.__setattr__(self, "missing", _texts("missing", self.missing))
        object.__setattr__(self, "validation", typed("validation", self.validation, float))
        object.__setattr__(self, "range", _range(self.range))
        _records("rare", self.rare)
        typed("other", self.other, bool)
        if self.range is not None and self.task != "regression":
            raise InputError("a class has no range; remove range, or write task = 'regression'")
        object.__setattr__(self, "values", check_values_table(self.values))
        if self.values and self.task == "regression":
            raise InputError("a regression has no classes; remove values, or write task = 'classification'")
        object.__setattr__(self, "classes", _texts("values", listed_categories("classes", self.classes, self.values)))
        if self.values and not any(map(str.strip, self.values.values())):
            raise InputError(
                "values gives no class, so that no record would have a label; write a class for each value"
            )
        if not self.target:
            raise InputError("target is empty; name the column to predict")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation is {self.validation}; it is a fraction of the records, from 0 to below 1")
        if not self.columns:
            raise InputError("there are no columns to predict from; list them in [data.columns]")
        for name, what in ((self.target, "the target"), (self.id, "the id")):
            if name in self.names:
                raise InputError(f"{name!r} is {what} and a column to predict from; remove it from [data.columns]")
        parts = Counter(each.name for each in self.input_columns)
        if twice := [name for name, count in parts.items() if count > 1]:
            raise InputError(
                f"{twice[0]!r} is a part of a date and another column; rename that column, or omit the part"
            )
        if self.target == self.id:
            raise InputError(f"{self.id!r} is both the target and the id; name another id")
        if self.task == "regression" and (self.classes or self.class_weights != "none"):
            raise InputError("a regression has no classes; remove classes and class_weights")
        if len(self.classes) == 1:
            raise InputError(f"classes has {self.classes[0]!r} only; there must be two or more")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns to predict from."""
        return tuple(each.name for each in self.columns)

    @property
    def input_columns(self) -> tuple[Column, ...]:
        """The columns of numbers and categories to predict from, in order; see `Column.input_columns`."""
        return tuple(part for each in self.columns for part in each.input_columns)

    def as_stored(self) -> dict[str, Any]:
        """Return the content for digests and stored files, without optional keys that have their default."""
        content = asdict(self)
        for table, optional in ((content, OPTIONAL), *((each, OPTIONAL_OF_A_COLUMN) for each in content["columns"])):
            for key, default in optional.items():
                if table[key] == default:
                    del table[key]
        return content

    def rare_of(self, column: Column) -> int:
        """Return the number of records that a value of a column must have to be disclosed."""
        return self.rare if column.rare is None else column.rare

    def held_by(self, column: int) -> tuple[Column, ...]:
        """Return the columns that a column of the grid holds."""
        return tuple(each for each in self.columns if each.held_by == column)

    def check_grid(self, columns: int) -> None:
        """Check that every column is held by a column of the grid, and the reverse; `columns` is 0 without a grid.

        Raises:
            InputError: a column is not assigned, or assigned to a column that the grid does not have.
        """
        assigned = [each for each in self.columns if each.held_by is not None]
        if self.intersection is not None and columns < 2:
            raise InputError(
                "there is an intersection, and the participants hold no different columns of the same records; remove "
                "it, or give them cells of a grid with several columns"
            )
        if not columns:
            if assigned:
                raise InputError(f"{assigned[0].name} has held_by, and there is no grid; give the participants cells")
            return
        for each in self.columns:
            if columns > 1 and each.held_by is None:
                raise InputError(
                    f"{each.name} does not name the column of the grid that holds it; write held_by = 0, or 1 …"
                )
            if each.held_by is not None and each.held_by >= columns:
                raise InputError(f"{each.name} is held by column {each.held_by}, and the grid has {columns}, from 0")
        if columns > 1:
            for column in range(columns):
                if not self.held_by(column):
                    raise InputError(
                        f"column {column} of the grid holds nothing; give it a column with held_by = {column}"
                    )
            if not self.id:
                raise InputError(
                    "the participants of a row hold parts of the same records; name the id column that joins them"
                )


# Keys that are not stored if they have their default: files without them are as those of earlier versions.
OPTIONAL: dict[str, Any] = {"range": None, "rare": RARE, "other": True, "values": {}, "intersection": None}
OPTIONAL_OF_A_COLUMN: dict[str, Any] = {
    "range": None,
    "rare": None,
    "missing": (),
    "values": {},
    "format": (),
    "reference": "",
    "time_zone": "",
    "parts": (),
}
OF_A_COLUMN = (
    "categories",
    "held_by",
    "range",
    "rare",
    "missing",
    "values",
    "format",
    "reference",
    "time_zone",
    "parts",
)


def parse_schema(text: str, path: str | os.PathLike[str] | None = None) -> tuple[Data, Model, PrivacySection | None]:
    """Parse a text with `[data]`, `[model]` and maybe `[privacy]`; reject all other sections.

    The text becomes a part of the federation file and may come from another participant, so it must not contain, for
    example, a participant or a hub.

    Args:
        text: the text.
        path: its file; the message of an error then begins with it, and with the line.

    Raises:
        InputError: it is not valid.
    """
    if path is not None:
        with at_line(path, text):
            return parse_schema(text)
    remedy = "write [data] and [model] there, with [privacy] if wanted, as `cgd schema` suggests them, and nothing else"
    try:
        content = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the schema is not TOML: {error}; {remedy}") from None
    with at("the schema: "):
        check_values(content)
    for key in content:
        if key not in SCHEMA_SECTIONS:
            raise InputError(f"the schema has {key!r}, which does not belong there; {remedy}")
    for key in ("data", "model"):
        if key not in content:
            raise InputError(f"the schema has no [{key}]; {remedy}")
    with at("[data] "):
        data = parse_data(content["data"])
    with at("[model] "):
        model = parse_model(content["model"])
    with at("[privacy] "):
        return data, model, parse_privacy(content["privacy"]) if "privacy" in content else None


def parse_data(table: Any) -> Data:
    """Parse a `[data]` section.

    Raises:
        InputError: it is not valid.
    """
    needed = ("target", "columns")
    check_keys(table, needed, [each.name for each in fields(Data) if each.name not in needed])
    columns = table["columns"]
    if not isinstance(columns, dict):
        raise InputError(f"columns is {columns!r}; write [data.columns] and below it NAME = TYPE in every line")
    return Data(**{**table, "columns": tuple(_column(name, value) for name, value in columns.items())})


def _column(name: str, value: Any) -> Column:
    with at(f"column {name!r}: "):
        if isinstance(value, str):
            return Column(name, cast("ColumnType", value))
        if isinstance(value, list):
            if not value:
                raise InputError("its list of categories is empty; name some, or write 'category' to learn them")
            return Column(name, "category", tuple(value))
        check_keys(value, ("type",), OF_A_COLUMN)
        settings = {key: _without_dates(each) for key, each in value.items()}
        if isinstance(settings.get("format"), str):
            settings["format"] = (settings["format"],)
        return Column(name, **settings)


def _without_dates(value: Any) -> Any:
    """Return a value of TOML with dates, which may be written without quotes, as texts."""
    if isinstance(value, list):
        return [_without_dates(each) for each in value]
    return value.isoformat() if isinstance(value, date) and not isinstance(value, datetime) else value


def _days(value: Any) -> Range | None:
    """Return the range of a date as days from 1970-01-01; as such it may also be stored."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(each, str) for each in value):
        with at("range: "):
            value = tuple(float(day_number(each)) for each in value)
    try:
        return _range(value)
    except InputError:
        raise InputError(
            f"range is {value!r}; it must be the first and the last day, such as ['1920-01-01', '2025-12-31']"
        ) from None


def _range(value: Any) -> Range | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(each) in (int, float) for each in value):
        low, high = (float(each) + 0.0 for each in value)  # -0.0 becomes 0.0, which equals it
        if -MAX_RANGE <= low < high <= MAX_RANGE and high - low > MIN_RANGE:
            return low, high
    raise InputError(f"range is {value!r}; it must be the lowest and the highest value, such as [0, 120]")


def _records(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_RARE:
        raise InputError(f"{name} is {value!r}; it is a number of records from 1 to {MAX_RARE:,}, such as {RARE}")


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
        raise InputError(f"{name} is {values!r}; it must be a list of texts, in quotes")
    seen: set[str] = set()
    for each in values:
        if len(each.encode()) > MAX_CATEGORY_BYTES:
            raise InputError(f"{name} has {each[:20]!r}…, of more than {MAX_CATEGORY_BYTES} bytes; shorten it")
        if each in seen:
            raise InputError(f"{name} has {each!r} twice; name it once")
        seen.add(each)
    return tuple(values)
