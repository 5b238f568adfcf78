"""Exported models: ONNX Runtime predicts what the model itself predicts, from the same values."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import cgd
from cgd import extras
from cgd.errors import InputError, MissingExtraError
from cgd.experiments import organisations
from cgd.federation.data_schema import WEEKDAYS, Column, Data
from cgd.federation.model_section import Model
from cgd.tabular.cells import MissingMarkers
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.model import ConfinedModel
from cgd.tabular.onnx_export import export_onnx
from cgd.tabular.onnx_graph import category_places, to_onnx
from cgd.tabular.training import train
from support.tabular import COLUMNS, DATA, REGRESSION, run_members, table, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgd.peers import Peers

PROVENANCE = {"participant": "ada-of-the-office", "federation": "trial-of-five", "epoch": 1, "digest": "abcdef0123"}
TOLERANCE = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore:column:UserWarning")


def trained(data: Data, tables: Sequence[Mapping[str, Any]], model: Model | None = None) -> ConfinedModel:
    """Return the first member's model after a few steps."""
    settings = tabular_settings(data, model, steps=10)

    def run(peers: Peers, own: Mapping[str, Any]) -> ConfinedModel:
        loaded = dataset_from_frame(own, data, data.columns, target=True)[0]
        return ConfinedModel.from_training(train(peers, settings, loaded), settings, PROVENANCE)

    first: ConfinedModel = run_members(run, tables)[0]
    return first


def small(data: Data = DATA, model: Model | None = None, **wards: Any) -> ConfinedModel:
    tables = [table(60, seed, **wards) for seed in range(3)]
    target = "score" if data.task == "regression" else "outcome"
    return trained(data, [{**each, "outcome": each[target]} for each in tables], model)


def inputs(model: ConfinedModel, frame: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of a table as the graph takes them."""
    found = {}
    for column in model.columns:
        values = list(frame[column.name])
        if column.type == "number":
            cells = np.array([np.nan if each in (None, "", "NA") else float(each) for each in values], dtype=np.float64)
        else:
            cells = np.array(["" if each is None else str(each) for each in values], dtype=object)
        found[column.name] = cells.reshape(-1, 1)
    return found


def session(model: ConfinedModel) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(to_onnx(model).SerializeToString(), providers=["CPUExecutionProvider"])


def check_equal(model: ConfinedModel, frame: Mapping[str, Sequence[Any]]) -> None:
    """Compare labels and probabilities, or numbers, of ONNX Runtime with those of the model."""
    found = session(model).run(None, inputs(model, frame))
    if model.data.task == "regression":
        expected = model.predict(frame)
        assert found[0].shape == expected.shape
        size = model.preprocessing.target.deviation + np.abs(expected)  # the network rounds to float32
        assert (np.abs(found[0] - expected) <= TOLERANCE * size).all()
        return
    expected = model.predict_proba(frame)
    assert found[1].shape == expected.shape
    assert np.abs(found[1] - expected).max() <= TOLERANCE
    clear = np.abs(np.diff(np.sort(expected, axis=1)[:, -2:], axis=1))[:, 0] > 2 * TOLERANCE
    assert np.array_equal(found[0][clear], model.predict(frame)[clear])


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(os.environ.get("CGD_DATA", "none")) / "adult").exists(),
    reason="adult and credit-default are not in CGD_DATA",
)
@pytest.mark.parametrize("name", ["adult", "credit-default"])
def test_predictions_of_public_tables_equal_those_of_onnx_runtime(name: str) -> None:
    found = organisations.split(name)
    tables = list(found.tables.values())[1:4]
    frames = [dict(zip((*found.data.names, found.data.target), cells.T.tolist(), strict=True)) for cells in tables]
    model = trained(found.data, frames, Model("mlp", (16, 8), "tanh"))
    assert any("other" in each.categories for each in model.preprocessing.columns if isinstance(each, CategoryStats))
    random = np.random.default_rng(0)
    for cells in (found.held_out, *found.own_held_out.values()):
        frame = {each: list(values) for each, values in zip(found.data.names, cells.T, strict=False)}
        for column in found.data.columns:
            for place in np.flatnonzero(random.random(len(cells)) < 0.02):
                frame[column.name][place] = ""
            if column.type == "category":
                for place in np.flatnonzero(random.random(len(cells)) < 0.02):
                    frame[column.name][place] = "never seen before"
        check_equal(model, frame)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "sigmoid"])
@pytest.mark.parametrize("data", [DATA, REGRESSION], ids=["classes", "numbers"])
def test_predictions_equal_those_of_onnx_runtime(data: Data, activation: Any) -> None:
    model = small(data, Model("mlp", (8, 4), activation), rare=0.3)
    frame: dict[str, list[Any]] = {name: table(40, 9)[name] for name in data.names}
    frame["age"][:3] = [None, 1e6, -40.0]
    frame["dose"][3:5] = [None, 0.0]
    frame["ward"][:5] = ["unheard-of", None, "NA", "other", "a"]
    check_equal(model, frame)


def test_values_are_read_as_from_a_table() -> None:
    columns = (
        Column("age", "number", range=(0.0, 100.0), missing=("-9",)),
        Column("dose", "number"),
        Column("ward", "category", values={"A": "one", "1-3": "one", "B": "two", "*": "rest", "x": ""}),
        Column("state", "category", ("true", "false", "7")),
        Column("code", "category", missing=("88",)),
        Column("constant", "number"),
    )
    data = Data("outcome", columns, missing=("", "NA", "-1"))

    def frame(seed: int) -> dict[str, list[Any]]:
        content, random = table(90, seed), np.random.default_rng(seed)
        content["state"] = random.choice(["True", "false", "7", "8", ""], 90).tolist()
        content["code"] = random.choice(["3", "4.0", "88", ""], 90).tolist()
        content["constant"] = [5.0] * 90
        return {name: content[name] for name in (*data.names, "outcome")}

    model = trained(data, [frame(seed) for seed in range(3)])
    wards = ["A", "B", "1", "2.0", "3", "4", "x", "NA", "", "-1", "rest", "two", "unheard-of"]
    states = ["true", "TRUE", "True", "False", "7", "7.0", "8", "yes", "", "NA", "-1", "false", "FALSE"]
    codes = ["3", "3.0", "4", "4.0", "5", "88", "88.0", "", "NA", "-1", "-1.0", "other", "03"]
    ages = [None, -9.0, -1.0, 120.0, -5.0, 0.0, 100.0, 50.0, 101.0, -9.5, 3.0, 4.0, 5.0]
    constants = [None, 5.0, 6.0, -1.0, *[5.0] * 9]
    doses = [None, -1.0, *np.linspace(-5, 5, 11).tolist()]
    check_equal(model, dict(zip(data.names, (ages, doses, wards, states, codes, constants), strict=True)))


@pytest.mark.parametrize("value", ["no such value", "5"])
def test_value_that_the_model_refuses_is_missing_in_the_graph(value: str) -> None:
    column = Column("ward", "category", values={"A": "one", "B": "two"})
    stats = CategoryStats("ward", ("one", "two"), (5, 5), 1)
    places, default = category_places(column, stats, MissingMarkers([]))
    assert (places["A"], places["B"], places[""], places.get(value, default)) == (0, 1, 2, 2)


def test_date_has_an_input_for_each_of_its_parts() -> None:
    """The graph cannot read dates: its caller gives the days since the reference, the month and the weekday."""
    data = Data("outcome", (Column("admitted", "date", reference="2020-01-01"),), classes=("well", "ill"))
    days = [date(2020, 1, 1) + timedelta(37 * place) for place in range(60)]
    frame: dict[str, list[Any]] = {
        "admitted": [None if place % 9 == 8 else day.isoformat() for place, day in enumerate(days)],
        "outcome": ["ill" if day.month > 6 else "well" for day in days],
    }
    settings = tabular_settings(data, steps=10)
    members = [dataset_from_frame(frame, data, data.input_columns, target=True)[0] for _ in range(3)]
    result = run_members(lambda peers, own: train(peers, settings, own), members)[0]
    model = ConfinedModel.from_training(result, settings, PROVENANCE)
    known = [each is not None for each in frame["admitted"]]
    parts = {
        "admitted days": np.where(known, [(day - days[0]).days for day in days], np.nan),
        "admitted month": np.where(known, [str(day.month) for day in days], "").astype(object),
        "admitted weekday": np.where(known, [WEEKDAYS[day.weekday()] for day in days], "").astype(object),
    }
    found = session(model).run(None, {name: values.reshape(-1, 1) for name, values in parts.items()})
    assert np.abs(found[1] - model.predict_proba({"admitted": frame["admitted"]})).max() <= TOLERANCE


def test_names_of_columns_may_be_those_of_outputs_and_nodes() -> None:
    names = {"age": "label", "dose": "IsNaN 0", "ward": "probabilities"}
    columns = tuple(replace(each, name=names[each.name]) for each in COLUMNS)
    data = Data("outcome", columns)

    def renamed(seed: int) -> dict[str, list[Any]]:
        return {names.get(name, name): values for name, values in table(60, seed).items()}

    model = trained(data, [renamed(seed) for seed in range(3)])
    found = session(model)
    assert [each.name for each in found.get_inputs()] == ["label", "IsNaN 0", "probabilities"]
    assert [each.name for each in found.get_outputs()] == ["label_", "probabilities_"]
    check_equal(model, {name: renamed(7)[name] for name in data.names})


def test_inputs_outputs_and_versions() -> None:
    model = small()
    made, found = to_onnx(model), session(model)
    shapes = [(each.name, each.type, each.shape) for each in (*found.get_inputs(), *found.get_outputs())]
    assert shapes == [
        ("age", "tensor(double)", ["records", 1]),
        ("dose", "tensor(double)", ["records", 1]),
        ("ward", "tensor(string)", ["records", 1]),
        ("label", "tensor(string)", ["records"]),
        ("probabilities", "tensor(double)", ["records", 2]),
    ]
    assert {each.domain: each.version for each in made.opset_import} == {"": 17, "ai.onnx.ml": 3}
    assert made.ir_version == 8
    check_equal(model, {name: values[:1] for name, values in table(5, 3).items()})


def test_file_has_no_names_of_participants_paths_or_seeds(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / "hospital-run")
    path = tmp_path / "model.onnx"
    export_onnx(cgd.load_model(tmp_path / "hospital-run"), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content, made = path.read_bytes(), onnx.load(path)
    for secret in (b"ada-of-the-office", b"trial-of-five", b"abcdef0123", b"hospital-run", str(tmp_path).encode()):
        assert secret not in content
    assert {each.key: each.value for each in made.metadata_props} == {"target": "outcome", "task": "classification"}
    assert (made.producer_name, made.domain, made.graph.name) == ("cgd", "", "cgd")
    with pytest.raises(InputError, match="model.onnx exists and is never overwritten"):
        cgd.export_onnx(model, path)
    assert path.read_bytes() == content
    with pytest.raises(InputError, match="cannot be written"):
        cgd.export_onnx(model, tmp_path / "none" / "model.onnx")


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"exporting a model needs onnx, .* pip install 'cgd\[onnx\]'"):
        export_onnx(model, tmp_path / "model.onnx")


def test_models_of_a_row_are_refused() -> None:
    with pytest.raises(InputError, match=r"one of 3 models of a row .* no file of one participant can predict"):
        to_onnx(replace(small(), towers=3))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def normalised(features: int, outputs: int) -> nn.Module:
    first = nn.Sequential(nn.Linear(features, 6, bias=False), nn.LayerNorm(6), nn.Dropout(0.5))
    return nn.Sequential(first, nn.GELU(), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, outputs))


def with_network(network: nn.Module) -> ConfinedModel:
    return replace(small(), network=network.eval())


def test_network_of_ones_own_of_known_layers_is_exported() -> None:
    features = len(small().preprocessing.features)
    with cgd.public_seed(3):
        model = with_network(normalised(features, 2))
    check_equal(model, {name: table(30, 4)[name] for name in DATA.names})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Doubled(4, 2), "layer 0 of the network is a Doubled, which this export cannot translate"),
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)), "layer 1 of layer 0 of the network is a Softmax"),
        (nn.GELU(approximate="tanh"), "layer 0 of the network is a GELU"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), "is a ParametrizedLinear"),
    ],
)
def test_other_layers_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_onnx(with_network(nn.Sequential(layer)))


def test_network_with_hooks_is_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    network[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="layer 0 of the network has hooks"):
        to_onnx(with_network(network))


def test_huge_ranges_are_refused() -> None:
    column = Column("ward", "category", values={"0-10000": "one", "-5": "two"})
    with pytest.raises(InputError, match="'ward' have 10,001 values, and a graph, which lists them one by one"):
        category_places(column, CategoryStats("ward", ("one", "two"), (5, 5), 0), MissingMarkers([]))
