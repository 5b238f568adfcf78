"""The section `[model]` of the federation file: the network that all participants train.

[model]
kind = "mlp"          # or "linear", "logistic"; or function = "module:function"
layers = [64, 32]
activation = "relu"
start = 0             # the public seed of the start that all networks have in common, or "zeros"
fresh_origins = false # another origin in each step
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from cgd.errors import InputError
from cgd.federation.toml_validation import check_keys, typed

ModelKind = Literal["linear", "logistic", "mlp", "custom"]
Activation = Literal["relu", "tanh", "gelu", "sigmoid"]

MAX_LAYERS, MAX_LAYER_WIDTH = 32, 65536
MAX_START = 2**63


@dataclass(frozen=True)
class Model:
    """The model that all participants train. Invalid values raise an `InputError`.

    Attributes:
        kind: "linear" or "logistic" (no hidden layer), "mlp", or "custom".
        layers: the widths of an mlp's hidden layers.
        activation: the activation between them.
        function: the `module:function` of a custom model, called with the numbers of features and outputs.
        delta: δ, the standard deviation of the origins; a participant may choose its own.
        start: the public seed from which the common start of all networks is drawn, to which every participant adds its
            origin; "zeros" for origins around zero, as in the paper. By default 0, and "zeros" for a linear or logistic
            model, which has no hidden units that must differ.
        fresh_origins: True to compute the gradient of each step at another origin, see `cgd.confine`.
    """

    kind: ModelKind = "mlp"
    layers: tuple[int, ...] = ()
    activation: Activation = "relu"
    function: str = ""
    delta: float = 0.02
    start: int | Literal["zeros"] | None = None
    fresh_origins: bool = False

    def __post_init__(self) -> None:
        if self.function and self.kind == "mlp" and not self.layers:
            object.__setattr__(self, "kind", "custom")
        check_choice("kind", self.kind, ModelKind)
        check_choice("activation", self.activation, Activation)
        typed("function", self.function, str)
        typed("fresh_origins", self.fresh_origins, bool)
        object.__setattr__(self, "delta", typed("delta", self.delta, float))
        object.__setattr__(self, "layers", _widths(self.layers))
        if not 0 < self.delta < math.inf:
            raise InputError(f"delta is {self.delta}; it is the standard deviation of the origins, above 0")
        if self.start is None:
            object.__setattr__(self, "start", "zeros" if self.kind in ("linear", "logistic") else 0)
        if self.start != "zeros" and (type(self.start) is not int or not 0 <= self.start < MAX_START):
            raise InputError(
                f"start is {self.start!r}; it is the public seed of the start, a whole number from 0 to below 2^63, or "
                "'zeros' for origins around zero, as in the paper"
            )
        if (self.kind == "custom") != bool(self.function):
            raise InputError(
                f"kind is {self.kind!r} and function is {self.function!r}; a custom model has kind = 'custom' and a "
                "function, and no other kind has a function"
            )
        if self.function and not all(self.function.partition(":")):
            raise InputError(f"function is {self.function!r}; write MODULE:FUNCTION, such as models:network")
        if self.kind == "mlp" and not self.layers:
            raise InputError("layers is empty; give the widths of the hidden layers, such as layers = [64, 32]")
        if self.kind != "mlp" and self.layers:
            raise InputError(f"a {self.kind} model has no hidden layers; remove layers, or write kind = 'mlp'")

    def as_stored(self) -> dict[str, Any]:
        """Return the fields as stored in files; without those that earlier versions did not have, by default."""
        stored = asdict(self)
        if not self.fresh_origins:
            del stored["fresh_origins"]
        return stored


def parse_model(table: Any) -> Model:
    """Parse a `[model]` section.

    Raises:
        InputError: it is not valid.
    """
    check_keys(table, (), [each.name for each in fields(Model)])
    return Model(**table)


def check_choice(name: str, value: Any, kind: Any) -> None:
    """Check that a value is one of the texts of a `Literal`.

    Raises:
        InputError: it is not.
    """
    choices = get_args(kind)
    if value not in choices:
        raise InputError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _widths(layers: Any) -> tuple[int, ...]:
    if not isinstance(layers, (list, tuple)) or not all(type(each) is int for each in layers):
        raise InputError(f"layers is {layers!r}; it must be a list of whole numbers, such as [64, 32]")
    if len(layers) > MAX_LAYERS or not all(1 <= each <= MAX_LAYER_WIDTH for each in layers):
        raise InputError(f"layers is {list(layers)}; use up to {MAX_LAYERS} layers of 1 to {MAX_LAYER_WIDTH} units")
    return tuple(layers)
