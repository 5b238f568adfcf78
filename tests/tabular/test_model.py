"""Saved models: a loaded model equals the saved one, and damaged files are refused."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch

import cgd
from cgd.errors import InputError
from cgd.federation.model_section import Model
from cgd.local import solo_peers
from cgd.tabular.columns import Categorical
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.training import train
from support.tabular import DATA, REGRESSION, records, run_members, table, tabular_settings

if TYPE_CHECKING:
    from cgd.federation.data_schema import Data
    from cgd.tabular.training import TrainingResult

PROVENANCE = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}


def model(data: Data = DATA, **options: Any) -> ConfinedModel:
    config = tabular_settings(data, options.pop("model", None), steps=10)
    return ConfinedModel.from_training(
        train(solo_peers(b"s" * 32), config, records(table(60, 1), data)), config, PROVENANCE
    )


@pytest.mark.parametrize("data", [DATA, REGRESSION])
def test_loaded_model_predicts_like_the_saved_one(data: Data, tmp_path: Path) -> None:
    before = model(data)
    before.save(tmp_path / "run")
    inputs = {name: table(20, 5)[name] for name in data.names}
    for path in (tmp_path / "run", str(tmp_path / "run"), tmp_path / "run" / "model.json"):
        after = cgd.load_model(path)
        assert np.array_equal(after.outputs(after.records(inputs)), before.outputs(before.records(inputs)))
        assert (after.data, after.model, after.preprocessing) == (before.data, before.model, before.preprocessing)
        assert after.provenance == PROVENANCE
    for name in ("model.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_prediction_api_is_that_of_scikit_learn(tmp_path: Path) -> None:
    trained, inputs = model(), table(20, 5)
    probabilities = trained.predict_proba(inputs)
    assert probabilities.shape == (20, 2)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert list(trained.classes_) == ["ill", "well"]
    assert list(trained.predict(inputs)) == [trained.classes_[row.argmax()] for row in probabilities]
    assert list(trained.feature_names_in_) == ["age", "dose", "ward"]
    (tmp_path / "inputs.csv").write_text("ward,dose,age\nA,1.5,\nunheard-of,2,60\n")
    with pytest.warns(UserWarning, match="1 value is of categories that no training record had: 'unheard-of'"):
        assert len(trained.predict(tmp_path / "inputs.csv")) == 2


def test_model_repr_is_one_line() -> None:
    assert repr(model()) == "ConfinedModel(outcome from 3 columns, mlp, ada of trial)"


def test_regression_model_has_no_classes() -> None:
    trained = model(REGRESSION, model=Model("linear"))
    for call in (lambda: trained.predict_proba(table(3, 1)), lambda: trained.classes_):
        with pytest.raises(InputError, match=r"predicts a number \(outcome\)"):
            call()


def test_damaged_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="there is no model in .*nowhere: model.json is missing; name the folder of a run"
    ):
        load_model(tmp_path / "nowhere")
    folder = tmp_path / "run"
    model().save(folder)
    about, weights = (folder / "model.json").read_text(), (folder / "model.safetensors").read_bytes()

    def damaged(change: dict[str, Any] | str, content: bytes = weights) -> str:
        text = change if isinstance(change, str) else json.dumps({**json.loads(about), **change})
        (folder / "model.json").write_text(text)
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(InputError) as error:
            load_model(folder)
        return str(error.value)

    assert "is damaged" in damaged(about[:100])
    assert "has the format 'other', not 'cgd-model-1'" in damaged({"format": "other"})
    assert "does not belong to" in damaged({}, weights[:-1])
    assert "is damaged: model.activation is missing" in damaged({"model": {"kind": "mlp", "layers": [9]}})
    huge = {**json.loads(about)["model"], "layers": [65536] * 32}
    assert "but model.safetensors has" in damaged({"model": huge})
    assert "preparation is None: expected `object`, got `null`" in damaged({"preparation": None})
    assert "the format of the preprocessing is None" in damaged({"preparation": {}})
    content = json.loads(about)
    del content["towers"]
    assert "is damaged" in damaged(json.dumps(content))
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="there is no model"):
        load_model(folder)


def test_table_without_a_needed_column_is_refused() -> None:
    with pytest.raises(InputError, match="has no column 'dose'"):
        model().predict({"age": [1.0], "ward": ["A"]})
    with pytest.raises(InputError, match="a list is not a table"):
        model().predict([1, 2, 3])


MARKING_MODULE = """
from pathlib import Path
import torch
Path("imported").touch()

def network(features, outputs):
    return torch.nn.Linear(features, outputs)
"""


def test_function_in_a_folder_is_imported_only_if_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder, and modules beside it, may come from another person."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "telltale.py").write_text(MARKING_MODULE)
    before = model(model=Model("logistic"))
    replace(before, model=Model(function="telltale:network")).save("run")
    about = json.loads(Path("run/model.json").read_text())
    weights = safetensors.torch.load_file("run/model.safetensors")
    content = safetensors.torch.save({name.removeprefix("0."): each for name, each in weights.items()})
    about["weights"]["sha256"] = hashlib.sha256(content).hexdigest()
    Path("run/model.json").write_text(json.dumps(about))
    Path("run/model.safetensors").write_bytes(content)
    where = re.escape(str(tmp_path / "telltale.py"))
    with pytest.raises(
        InputError, match=rf"names the function 'telltale:network' .*'telltale' \({where}\).* --function"
    ):
        load_model("run")
    with pytest.raises(
        InputError, match="'telltale:network', but 'telltale:other' was given; give the function of the file"
    ):
        load_model("run", function="telltale:other")
    assert not Path("imported").exists()
    after = load_model("run", function="telltale:network")
    assert Path("imported").exists()
    assert np.array_equal(after.predict_proba(table(5, 5)), before.predict_proba(table(5, 5)))


def test_missing_function_is_reported(tmp_path: Path) -> None:
    replace(model(model=Model("logistic")), model=Model(function="no.where:f; rm x")).save(tmp_path)
    with pytest.raises(InputError, match=r"module 'no' \(not found here\).*--function 'no.where:f; rm x'"):
        load_model(tmp_path)


def test_superfluous_function_is_refused(tmp_path: Path) -> None:
    model().save(tmp_path)
    with pytest.raises(InputError, match="names no function, but 'json:dumps' was given; leave --function"):
        load_model(tmp_path, function="json:dumps")


@pytest.mark.parametrize(
    "change",
    [
        {"towers": "many"},
        {"towers": float("inf")},
        {"model": {"kind": "mlp", "layers": [65536, 65536]}},  # would need 17 GB
    ],
)
def test_model_file_that_contradicts_its_weights_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    model().save(tmp_path)
    about = json.loads((tmp_path / "model.json").read_bytes())
    (tmp_path / "model.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(InputError, match="is damaged"):
        load_model(tmp_path)


def test_deeply_nested_model_file_is_refused(tmp_path: Path) -> None:
    model().save(tmp_path)
    (tmp_path / "model.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is damaged"):
        load_model(tmp_path)


class NegativeCounts(Categorical):
    """The labels of a dishonest member, which enters negative numbers of records into the sum of all classes."""

    def counts(self) -> Any:
        return super().counts() - 1000


def test_model_trained_with_a_member_that_enters_negative_counts_can_be_loaded(tmp_path: Path) -> None:
    """Either the training stops with an error, or the honest members can use what they have trained."""
    config = tabular_settings(replace(DATA, classes=("well", "ill")), steps=3)

    def member(peers: cgd.Peers, number: int) -> TrainingResult:
        own = records(table(60, number), config.data)
        if number == 3:
            assert isinstance(own.target, Categorical)
            own = replace(own, target=NegativeCounts(own.target.codes, own.target.names))
        return train(peers, config, own)

    try:
        trained = run_members(member, [1, 2, 3])
    except cgd.CGDError:
        return
    ConfinedModel.from_training(trained[0], config, PROVENANCE).save(tmp_path / "run")
    cgd.load_model(tmp_path / "run")
