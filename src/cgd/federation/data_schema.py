"""What is learned from tables: the sections `[data]` and `[model]` of the federation file, for `cgd join --data`.

    [data]
    target = "income"            # the column to predict
    task = "classification"      # or "regression"
    classes = ["<=50K", ">50K"]  # left out: learned, by a secure sum

    [data.columns]
    age = "number"
    workclass = "category"       # its categories are learned, by a secure sum
    sex = ["Female", "Male"]     # these categories, and no others

    [model]
    kind = "mlp"                 # or "linear", "logistic"; or function = "module:function"
    layers = [64, 32]
    activation = "relu"

In a grid, every column of the table says which column of the grid holds it: `age = { type = "number", held_by = 0 }`.
A column of a participant's file that is not listed here is not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from cgd.errors import InputError
from cgd.federation.toml_validation import at, check_keys, check_values, typed
from cgd.files import parse_toml

ColumnType = Literal["number", "category"]
Task = Literal["classification", "regression"]
ClassWeights = Literal["none", "balanced"]
ModelKind = Literal["linear", "logistic", "mlp", "custom"]
Activation = Literal["relu", "tanh", "gelu", "sigmoid"]

SCHEMA_SECTIONS = ("data", "model")
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
# In bytes of UTF-8: what is longer is a text, not a category.
MAX_CATEGORY_LENGTH = 90
MAX_LAYERS, WIDEST_LAYER = 32, 65536


@dataclass(frozen=True)
class Column:
    """One column of the tables, as the federation file describes it.

    Attributes:
        name: its name in the header.
        type: "number" or "category".
        categories: of a category, those that count, in order; none if they are to be learned.
        held_by: in a grid, the column of the grid whose participants have it.
    """

    name: str
    type: ColumnType
    categories: tuple[str, ...] = ()
    held_by: int | None = None

    def __post_init__(self) -> None:
        _choice("type", self.type, ColumnType)
        object.__setattr__(self, "categories", _texts("categories", self.categories))
        if self.categories and self.type != "category":
            raise InputError("it is a number and has categories; take them away, or write type = 'category'")
        if self.held_by is not None and (type(self.held_by) is not int or self.held_by < 0):
            raise InputError(f"held_by is {self.held_by!r}; it is a column of the grid, from 0")


@dataclass(frozen=True)
class Data:
    """What the tables hold and what is to be predicted; the same for all participants.

    Attributes:
        target: the column to predict.
        columns: the columns to predict it from, in order.
        task: "classification" or "regression".
        classes: the values of the target, in order; none if they are to be learned.
        class_weights: "balanced" makes every class count the same, however rare it is.
        id: the column that identifies a record; needed in a grid, where a row's participants have the same records.
        missing: texts that stand for a missing value.
        validation: the part of everybody's records that is kept back to see when to stop.
    """

    target: str
    columns: tuple[Column, ...]
    task: Task = "classification"
    classes: tuple[str, ...] = ()
    class_weights: ClassWeights = "none"
    id: str = ""
    missing: tuple[str, ...] = MISSING
    validation: float = 0.2

    def __post_init__(self) -> None:
        for name in ("target", "id"):
            typed(name, getattr(self, name), str)
        _choice("task", self.task, Task)
        _choice("class_weights", self.class_weights, ClassWeights)
        object.__setattr__(self, "classes", _texts("classes", self.classes))
        object.__setattr__(self, "missing", _texts("missing", self.missing))
        object.__setattr__(self, "validation", typed("validation", self.validation, float))
        if not self.target:
            raise InputError("target is empty; name the column to predict")
        if not 0 <= self.validation < 1:
            raise InputError(f"validation is {self.validation}; it is a part of the records, from 0 to below 1")
        if not self.columns:
            raise InputError("there are no columns to predict from; list them in [data.columns]")
        for name, what in ((self.target, "the target"), (self.id, "the id")):
            if name in self.names:
                raise InputError(f"{name!r} is {what} and a column to predict from; take it out of [data.columns]")
        if self.target == self.id:
            raise InputError(f"{self.id!r} is both the target and the id; name another id")
        if self.task == "regression" and (self.classes or self.class_weights != "none"):
            raise InputError("a regression has no classes; take classes and class_weights away")
        if len(self.classes) == 1:
            raise InputError(f"classes has {self.classes[0]!r} only; there must be two or more to tell apart")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns to predict from."""
        return tuple(each.name for each in self.columns)

    def held_by(self, column: int) -> tuple[Column, ...]:
        """The columns that a column of the grid holds."""
        return tuple(each for each in self.columns if each.held_by == column)

    def check_grid(self, columns: int) -> None:
        """See whether these tables can be cut into the columns of a grid (0: there is none).

        Raises:
            InputError: they cannot.
        """
        placed = [each for each in self.columns if each.held_by is not None]
        if not columns:
            if placed:
                raise InputError(f"{placed[0].name} has held_by, and there is no grid; give the participants cells")
            return
        for each in self.columns:
            if columns > 1 and each.held_by is None:
                raise InputError(
                    f"{each.name} does not say which column of the grid holds it; write held_by = 0, or 1 …"
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
                    "a row's participants have parts of the same records; name the id column that joins them"
                )


@dataclass(frozen=True)
class Model:
    """Which model everybody trains.

    Attributes:
        kind: "linear" or "logistic" (no hidden layer), "mlp", or "custom".
        layers: the widths of an mlp's hidden layers.
        activation: between them.
        function: of a custom model, `module:function`; it is called with the number of features and of outputs.
        delta: δ, the standard deviation of the origins; a participant may choose its own.
    """

    kind: ModelKind = "mlp"
    layers: tuple[int, ...] = ()
    activation: Activation = "relu"
    function: str = ""
    delta: float = 0.02

    def __post_init__(self) -> None:
        if self.function and self.kind == "mlp" and not self.layers:
            object.__setattr__(self, "kind", "custom")
        _choice("kind", self.kind, ModelKind)
        _choice("activation", self.activation, Activation)
        typed("function", self.function, str)
        object.__setattr__(self, "delta", typed("delta", self.delta, float))
        object.__setattr__(self, "layers", _widths(self.layers))
        if not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it is the standard deviation of the origins, above 0")
        if (self.kind == "custom") != bool(self.function):
            raise InputError(
                f"kind is {self.kind!r} and function is {self.function!r}; a model of your own has kind = 'custom' and "
                "a function, and no other has one"
            )
        if self.function and not all(self.function.partition(":")):
            raise InputError(f"function is {self.function!r}; it is MODULE:FUNCTION, such as models:network")
        if self.kind == "mlp" and not self.layers:
            raise InputError("layers is empty; give the widths of the hidden layers, such as layers = [64, 32]")
        if self.kind != "mlp" and self.layers:
            raise InputError(f"a {self.kind} model has no hidden layers; take layers away, or write kind = 'mlp'")


def parse_schema(text: str) -> tuple[Data, Model]:
    """Return what a text says that has `[data]` and `[model]`, and nothing else.

    It becomes a part of the federation file and may come from somebody else, so whatever else the file could hold, such
    as a participant or a hub, is refused.

    Raises:
        InputError: it cannot be used.
    """
    remedy = "write [data] and [model] there, as `cgd schema` suggests them, and nothing else"
    try:
        content = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the schema is not TOML: {error}; {remedy}") from None
    with at("the schema: "):
        check_values(content)
    for key in content:
        if key not in SCHEMA_SECTIONS:
            raise InputError(f"the schema has {key!r}, which is not about tables; {remedy}")
    for key in SCHEMA_SECTIONS:
        if key not in content:
            raise InputError(f"the schema has no [{key}]; {remedy}")
    with at("[data] "):
        data = parse_data(content["data"])
    with at("[model] "):
        return data, parse_model(content["model"])


def parse_data(table: Any) -> Data:
    """What a `[data]` section says.

    Raises:
        InputError: it cannot be used.
    """
    needed = ("target", "columns")
    check_keys(table, needed, [each.name for each in fields(Data) if each.name not in needed])
    columns = table["columns"]
    if not isinstance(columns, dict):
        raise InputError(f"columns is {columns!r}; write [data.columns] and below it NAME = TYPE in every line")
    return Data(**{**table, "columns": tuple(_column(name, says) for name, says in columns.items())})


def parse_model(table: Any) -> Model:
    """What a `[model]` section says.

    Raises:
        InputError: it cannot be used.
    """
    check_keys(table, (), [each.name for each in fields(Model)])
    return Model(**table)


def _column(name: str, says: Any) -> Column:
    with at(f"column {name!r}: "):
        if isinstance(says, str):
            return Column(name, cast("ColumnType", says))
        if isinstance(says, list):
            if not says:
                raise InputError("its list of categories is empty; name some, or write 'category' to learn them")
            return Column(name, "category", tuple(says))
        check_keys(says, ("type",), ("categories", "held_by"))
        return Column(name, **says)


def _choice(name: str, value: Any, kind: Any) -> None:
    choices = get_args(kind)
    if value not in choices:
        raise InputError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _texts(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(each, str) for each in values):
        raise InputError(f"{name} is {values!r}; it is a list of texts, in quotes")
    seen: set[str] = set()
    for each in values:
        if len(each.encode()) > MAX_CATEGORY_LENGTH:
            raise InputError(f"{name} has {each[:20]!r}…, of more than {MAX_CATEGORY_LENGTH} bytes; shorten it")
        if each in seen:
            raise InputError(f"{name} has {each!r} twice; name it once")
        seen.add(each)
    return tuple(values)


def _widths(layers: Any) -> tuple[int, ...]:
    if not isinstance(layers, (list, tuple)) or not all(type(each) is int for each in layers):
        raise InputError(f"layers is {layers!r}; it is a list of whole numbers, such as [64, 32]")
    if len(layers) > MAX_LAYERS or not all(1 <= each <= WIDEST_LAYER for each in layers):
        raise InputError(f"layers is {list(layers)}; up to {MAX_LAYERS} layers of 1 to {WIDEST_LAYER} units")
    return tuple(layers)
