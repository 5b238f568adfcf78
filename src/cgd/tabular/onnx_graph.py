"""Export a trained model as one ONNX graph: the preprocessing of the columns, the network, and its outputs decoded.

Other tools run the file without `cgd`, torch or this package's preprocessing. The graph does in the same order, and in
the same precision, what `ConfinedModel` does with a table: numbers are float64 until they are standardised, the network
computes in float32, and probabilities are float64.

The graph is written with the operators of ONNX itself, and not traced from torch: torch has no texts, which categories
are, and its exporter needs more packages. The networks that `[model]` describes are a sequence of layers, each of which
is one operator or a few.

The file has the weights and the statistics that predictions need, and names of columns, categories and classes. It has
no name of a participant or of a federation, no path and no seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import cgd
from cgd.errors import InputError
from cgd.federation.data_schema import OTHER
from cgd.federation.value_map import EVERY_OTHER, ValueMap, canonical
from cgd.tabular.cells import MissingMarkers
from cgd.tabular.federated_stats import CategoryStats, NumberStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.model import ConfinedModel

OPSET, ML_OPSET, IR_VERSION = 17, 3, 8
"""Versions of the operators and of the file, of 2022, so that older tools read them, too."""
RECORDS = "records"
"""The name of the first dimension, the number of records, which a caller chooses."""
LABEL, PROBABILITIES, PREDICTION = "label", "probabilities", "prediction"
MAX_FILE_BYTES = 2**31 - 2**20
"""A file of protocol buffers has less than two gigabytes; a part is for what is not a weight."""
MAX_RANGE_VALUES = 10_000
NOTHING = -1
"""The place of a value for which all features of its column are zero."""
MAX_NAMES_SHOWN = 20
KINDS = {TensorProto.DOUBLE: "float64", TensorProto.STRING: "text"}


def to_onnx(model: ConfinedModel) -> onnx.ModelProto:
    """Return a model as an ONNX graph; see `cgd.tabular.onnx_export`.

    It has one input for each column, named as the column, of shape (records, 1): a number as float64, NaN if it is
    missing; a category as a text, empty if it is missing. In a classification, the outputs are `label`, a text for each
    record, and `probabilities`, float64 of shape (records, classes); in a regression, `prediction`, a float64 for each
    record. An output whose name is that of a column has an underscore behind it.

    Raises:
        InputError: the model cannot be exported.
    """
    if model.towers > 1:
        raise InputError(
            f"this is one of {model.towers} models of a row that predict together: each uses some of the columns only, "
            "and a secure sum adds their outputs, so no file of one participant can predict; use `cgd predict`"
        )
    weights = sum(each.numel() * each.element_size() for each in model.network.parameters())
    if weights > MAX_FILE_BYTES:
        raise InputError(f"the network has {weights / 1e9:.1f} GB of weights, and an ONNX file has at most 2 GB")
    graph = _Graph({each.name for each in model.columns})
    encoded = [
        name
        for column, stats in zip(model.columns, model.preprocessing.columns, strict=True)
        for name in _encode(graph, column, stats, model.data)
    ]
    features = graph.add("Cast", graph.add("Concat", *encoded, axis=1), to=TensorProto.FLOAT)
    raw = graph.add("Cast", _apply(graph, model.network, features), to=TensorProto.DOUBLE)
    if model.data.task == "regression":
        target = model.preprocessing.target
        scaled = graph.add("Mul", raw, graph.number(target.deviation))
        flat = graph.add("Squeeze", graph.add("Add", scaled, graph.number(target.mean)), graph.integers([1]))
        graph.output(PREDICTION, flat, TensorProto.DOUBLE, [RECORDS], f"{model.data.target}, in its unit")
    else:
        classes = model.preprocessing.classes
        probabilities = graph.add("Softmax", raw, axis=1)
        best = graph.add("ArgMax", probabilities, axis=1, keepdims=0)
        labels = graph.add("Gather", graph.constant(np.array(classes, dtype=object)), best, axis=0)
        graph.output(LABEL, labels, TensorProto.STRING, [RECORDS], f"the class of {model.data.target}")
        shape = [RECORDS, len(classes)]
        graph.output(PROBABILITIES, probabilities, TensorProto.DOUBLE, shape, f"of {_names(classes)}")
    made = graph.model(f"Predict {model.data.target}", {"target": model.data.target, "task": model.data.task})
    onnx.checker.check_model(made, full_check=True)
    return made


def describe(made: onnx.ModelProto) -> list[str]:
    """Return a line for each input and output of a graph."""
    graph = made.graph
    lines = []
    for what, values in (("input", graph.input), ("output", graph.output)):
        for each in values:
            shape = ", ".join(size.dim_param or str(size.dim_value) for size in each.type.tensor_type.shape.dim)
            kind = KINDS[each.type.tensor_type.elem_type]
            lines.append(f"{what} {each.name!r}, {kind} of shape ({shape}): {each.doc_string}")
    return lines


@dataclass
class _Graph:
    """A graph under construction.

    Attributes:
        taken: the names of columns, which nothing else may have.
    """

    taken: set[str]
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def input(self, name: str, kind: int, text: str) -> str:
        """Add an input for a column, and return its name."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, [RECORDS, 1], doc_string=text))
        return name

    def constant(self, values: Any) -> str:
        """Add a constant, and return its name."""
        name = self._unused(f"constant {len(self.constants)}")
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def number(self, value: float) -> str:
        """Add a constant float64, and return its name."""
        return self.constant(np.array(value, dtype=np.float64))

    def integers(self, values: list[int]) -> str:
        """Add a constant list of integers, and return its name."""
        return self.constant(np.array(values, dtype=np.int64))

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        name = self._unused(f"{operator} {len(self.nodes)}")
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def output(self, name: str, value: str, kind: int, shape: list[Any], text: str) -> None:
        """Add an output with a value of the graph."""
        name = self._unused(name)
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape, doc_string=text))

    def model(self, text: str, metadata: dict[str, str]) -> onnx.ModelProto:
        """Return the complete model."""
        graph = helper.make_graph(self.nodes, "cgd", self.inputs, self.outputs, self.constants, doc_string=text)
        made = helper.make_model(
            graph,
            producer_name="cgd",
            producer_version=cgd.__version__,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)],
        )
        helper.set_model_props(made, metadata)
        return made

    def _unused(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


# Columns.


def _encode(graph: _Graph, column: Column, stats: NumberStats | CategoryStats, data: Data) -> list[str]:
    """Add the input of a column, and return its features as float64, as its statistics write them."""
    missing = MissingMarkers((*data.missing, *column.missing))
    if isinstance(stats, NumberStats):
        return _encode_number(graph, column, stats, missing)
    if isinstance(stats, CategoryStats):
        return _encode_category(graph, column, stats, missing)
    assert_never(stats)


def _encode_number(graph: _Graph, column: Column, stats: NumberStats, missing: MissingMarkers) -> list[str]:
    text = "a number; NaN if it is missing"
    if column.range is not None:
        text += f"; cut to {column.range[0]:g} to {column.range[1]:g}"
    value = graph.input(column.name, TensorProto.DOUBLE, text)
    absent = graph.add("IsNaN", value)
    for number in missing.numbers:
        absent = graph.add("Or", absent, graph.add("Equal", value, graph.number(number)))
    zero = graph.number(0.0)
    scaled = zero
    if not stats.constant:
        if column.range is not None:
            low, high = column.range
            value = graph.add("Clip", value, graph.number(low), graph.number(high))
        distance = graph.add("Sub", value, graph.number(stats.mean))
        scaled = graph.add("Div", distance, graph.number(stats.deviation))
    features = [graph.add("Where", absent, zero, scaled)]
    if stats.missing:
        features.append(graph.add("Cast", absent, to=TensorProto.DOUBLE))
    return features


def _encode_category(graph: _Graph, column: Column, stats: CategoryStats, missing: MissingMarkers) -> list[str]:
    if not stats.features:
        return []
    names = _names(tuple(column.values) or stats.categories)
    value = graph.input(column.name, TensorProto.STRING, f"a category: {names}; empty if it is missing")
    places, default = category_places(column, stats, missing)
    keys = {"keys_strings": list(places), "values_int64s": list(places.values()), "default_int64": default}
    place = graph.add("LabelEncoder", value, domain="ai.onnx.ml", **keys)
    is_place = graph.add("Equal", place, graph.integers([*range(len(stats.features))]))
    return [graph.add("Cast", is_place, to=TensorProto.DOUBLE)]


def category_places(column: Column, stats: CategoryStats, missing: MissingMarkers) -> tuple[dict[str, int], int]:
    """Return the feature that each text of a column sets, by its place, and that of all other texts.

    Args:
        column: the column of the schema.
        stats: its statistics.
        missing: the markers of missing values.

    Raises:
        InputError: the column has a range of too many values.
    """
    known = {canonical(each): place for place, each in enumerate(stats.categories)}
    absent = len(stats.categories) if stats.missing else NOTHING
    places = dict.fromkeys(("", *missing.canonical), absent)
    if column.values:
        values = ValueMap(column.values)
        for text in _mapped_texts(column):
            category = values.get(text)
            places.setdefault(text, known.get(category, absent) if category else absent)
        other = column.values.get(EVERY_OTHER)
        default = known.get(canonical(other), absent) if other else absent
    else:
        for text, place in known.items():
            places.setdefault(text, place)
        default = absent if column.categories else known.get(OTHER, NOTHING)
    return {each: place for text, place in places.items() for each in spellings(text)}, default


def _mapped_texts(column: Column) -> list[str]:
    """Return all values that `values` of a column names, also those of its ranges."""
    ranges = ValueMap(column.values).ranges
    count = sum(last - first + 1 for first, last in ranges)
    if count > MAX_RANGE_VALUES:
        raise InputError(
            f"the ranges of whole numbers in values of {column.name!r} have {count:,} values, and a graph, which lists "
            f"them one by one, has at most {MAX_RANGE_VALUES:,}; use `cgd predict`"
        )
    named = [canonical(key) for key in column.values if key != EVERY_OTHER]
    return [*named, *(str(number) for first, last in ranges for number in range(first, last + 1))]


def spellings(text: str) -> tuple[str, ...]:
    """Return a canonical text with other usual spellings: whole numbers as floats, and truth values in upper case.

    Examples:
        >>> spellings("3"), spellings("true"), spellings("A")
        (('3', '3.0'), ('true', 'True', 'TRUE'), ('A',))
    """
    others = (f"{text}.0", text.capitalize(), text.upper())
    return (text, *(each for each in others if each != text and canonical(each) == text))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", …" if len(names) > MAX_NAMES_SHOWN else "")


# The network.


def _apply(graph: _Graph, network: nn.Module, value: str) -> str:
    """Add the layers of a network, and return the name of its output."""
    layers = _layers(network, "the network")
    for place, layer in layers:
        value = _apply_layer(graph, layer, value, place)
    return value


def _layers(module: nn.Module, place: str) -> list[tuple[str, nn.Module]]:
    """Return the layers of a sequence, also of one in another."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise InputError(f"{place} has hooks, which a graph does not have; {_remedy()}")
    if type(module) is nn.Sequential:
        named = module.named_children()
        return [each for name, child in named for each in _layers(child, f"layer {name} of {place}")]
    return [(place, module)]


def _apply_layer(graph: _Graph, layer: nn.Module, value: str, place: str) -> str:
    """Add a layer; types are compared exactly, because a subclass may compute anything."""
    kind = type(layer)
    if isinstance(layer, (nn.Identity, nn.Dropout)) and kind in (nn.Identity, nn.Dropout):
        return value
    if isinstance(layer, nn.Linear) and kind is nn.Linear:
        tensors = [_weight(graph, each) for each in (layer.weight, layer.bias) if each is not None]
        return graph.add("Gemm", value, *tensors, transB=1)
    if isinstance(layer, nn.LayerNorm) and kind is nn.LayerNorm and len(layer.normalized_shape) == 1:
        scale = _weight(graph, layer.weight) if layer.weight is not None else _ones(graph, layer.normalized_shape[0])
        bias = () if layer.bias is None else (_weight(graph, layer.bias),)
        return graph.add("LayerNormalization", value, scale, *bias, axis=-1, epsilon=layer.eps)
    if isinstance(layer, nn.GELU) and kind is nn.GELU and layer.approximate == "none":
        return _apply_gelu(graph, value)
    operators = {nn.ReLU: "Relu", nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid"}
    if kind in operators:
        return graph.add(operators[kind], value)
    raise InputError(
        f"{place} is a {kind.__name__}, which this export cannot translate: it knows torch.nn.Sequential of Linear, "
        f"LayerNorm, ReLU, Tanh, Sigmoid, GELU, Dropout and Identity; {_remedy()}"
    )


def _apply_gelu(graph: _Graph, value: str) -> str:
    """Add x·(1 + erf(x/√2))/2."""
    half, one, root = (graph.constant(np.array(each, dtype=np.float32)) for each in (0.5, 1.0, math.sqrt(0.5)))
    erf = graph.add("Erf", graph.add("Mul", value, root))
    return graph.add("Mul", graph.add("Mul", value, half), graph.add("Add", erf, one))


def _weight(graph: _Graph, tensor: torch.Tensor) -> str:
    return graph.constant(np.ascontiguousarray(tensor.detach().cpu().numpy()))


def _ones(graph: _Graph, count: int) -> str:
    return graph.constant(np.ones(count, dtype=np.float32))


def _remedy() -> str:
    return "predict with `cgd predict`, or export `model.network`, which takes encoded records, with torch.onnx"
