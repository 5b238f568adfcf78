"""A saved model: what comes back is what was saved, and what is damaged is told."""

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
from cgd.federation.data_schema import Model
from cgd.local import solo_peers
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.training import train
from support.practice import DATA, NUMBER, records, setting, table

if TYPE_CHECKING:
    from cgd.federation.data_schema import Data

ORIGIN = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}


def model(data: Data = DATA, **options: Any) -> ConfinedModel:
    what = setting(data, options.pop("model", None), steps=10)
    return ConfinedModel.of(train(solo_peers(b"s" * 32), what, records(table(60, 1), data)), what, ORIGIN)


@pytest.mark.parametrize("data", [DATA, NUMBER])
def test_what_is_loaded_predicts_what_was_saved(data: Data, tmp_path: Path) -> None:
    before = model(data)
    before.save(tmp_path / "run")
    asked = {name: table(20, 5)[name] for name in data.names}
    for path in (tmp_path / "run", str(tmp_path / "run"), tmp_path / "run" / "model.json"):
        after = cgd.load_model(path)
        assert np.array_equal(after.outputs(after.records(asked)), before.outputs(before.records(asked)))
        assert (after.data, after.model, after.preparation) == (before.data, before.model, before.preparation)
        assert after.origin == ORIGIN
    for name in ("model.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / "run" / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_predictions_are_as_in_scikit_learn(tmp_path: Path) -> None:
    made, asked = model(), table(20, 5)
    probabilities = made.predict_proba(asked)
    assert probabilities.shape == (20, 2)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert list(made.classes_) == ["ill", "well"]
    assert list(made.predict(asked)) == [made.classes_[row.argmax()] for row in probabilities]
    assert list(made.feature_names_in_) == ["age", "dose", "ward"]
    (tmp_path / "asked.csv").write_text("ward,dose,age\nA,1.5,\nunheard-of,2,60\n")
    with pytest.warns(UserWarning, match="1 value is of categories that nobody had: 'unheard-of'"):
        assert len(made.predict(tmp_path / "asked.csv")) == 2


def test_it_is_told_in_a_line() -> None:
    assert repr(model()) == "ConfinedModel(outcome from 3 columns, mlp, ada of trial)"


def test_a_model_of_numbers_has_no_classes() -> None:
    made = model(NUMBER, model=Model("linear"))
    for call in (lambda: made.predict_proba(table(3, 1)), lambda: made.classes_):
        with pytest.raises(InputError, match=r"predicts a number \(outcome\)"):
            call()


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
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
    assert "and model.safetensors has" in damaged({"model": huge})
    assert "preparation is missing" in damaged({"preparation": None})
    assert "the preparation's format is None" in damaged({"preparation": {}})
    content = json.loads(about)
    del content["towers"]
    assert "is damaged" in damaged(json.dumps(content))
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="there is no model"):
        load_model(folder)


def test_a_table_that_lacks_a_column_is_told() -> None:
    with pytest.raises(InputError, match="has no column 'dose'"):
        model().predict({"age": [1.0], "ward": ["A"]})
    with pytest.raises(InputError, match="a list is no table"):
        model().predict([1, 2, 3])


TELLTALE = """
from pathlib import Path
import torch
Path("imported").touch()

def network(features, outputs):
    return torch.nn.Linear(features, outputs)
"""


def test_a_function_that_a_folder_names_is_not_imported_before_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may come from somebody else, and so may what lies beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "telltale.py").write_text(TELLTALE)
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
    with pytest.raises(InputError, match="'telltale:network', and 'telltale:other' was named; name that of the file"):
        load_model("run", function="telltale:other")
    assert not Path("imported").exists()
    after = load_model("run", function="telltale:network")
    assert Path("imported").exists()
    assert np.array_equal(after.predict_proba(table(5, 5)), before.predict_proba(table(5, 5)))


def test_a_function_that_is_nowhere_is_told_as_such(tmp_path: Path) -> None:
    replace(model(model=Model("logistic")), model=Model(function="no.where:f; rm x")).save(tmp_path)
    with pytest.raises(InputError, match=r"module 'no' \(which is not here\).*--function 'no.where:f; rm x'"):
        load_model(tmp_path)


def test_a_function_is_not_named_where_there_is_none(tmp_path: Path) -> None:
    model().save(tmp_path)
    with pytest.raises(InputError, match="names no function, and 'json:dumps' was named; leave --function"):
        load_model(tmp_path, function="json:dumps")


@pytest.mark.parametrize(
    "change",
    [
        {"towers": "many"},
        {"towers": float("inf")},
        {"model": {"kind": "mlp", "layers": [65536, 65536]}},  # 17 GB, were it built
    ],
)
def test_a_model_that_says_something_else_than_its_weights(change: dict[str, Any], tmp_path: Path) -> None:
    model().save(tmp_path)
    about = json.loads((tmp_path / "model.json").read_bytes())
    (tmp_path / "model.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(InputError, match="is damaged"):
        load_model(tmp_path)


def test_a_model_that_is_nested_too_deeply(tmp_path: Path) -> None:
    model().save(tmp_path)
    (tmp_path / "model.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is damaged"):
        load_model(tmp_path)
