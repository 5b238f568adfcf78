"""Models of several participants' suggestions, joined to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.federation.data_schema import parse_schema
from cgd.tabular.schema_merge import merge_schemas

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = 'kind = "mlp"\nlayers = [16]\nactivation = "sigmoid"'
LARGE = 'kind = "mlp"\nlayers = [32]\nactivation = "sigmoid"'


def joined(folder: Path, task: str, *models: str) -> str:
    paths = []
    for place, model in enumerate(models):
        text = f'[data]\ntarget = "y"\ntask = "{task}"\n[data.columns]\nage = "number"\n[model]\n{model}\n'
        paths.append(folder / f"{place}.toml")
        paths[-1].write_text(text)
    return merge_schemas(paths)


@pytest.mark.parametrize("none", ['kind = "linear"', 'kind = "logistic"'])
def test_regression_takes_no_model_without_hidden_units_unless_all_suggest_it(tmp_path: Path, none: str) -> None:
    """It would disclose covariances (N2 of the threat model); an earlier version said that it discloses the least."""
    for models in ((LARGE, none, HIDDEN), (none, HIDDEN, LARGE)):
        text = joined(tmp_path, "regression", *models)
        model = parse_schema(text)[1]
        assert (model.kind, model.layers) == ("mlp", (16,))
        assert "the smallest of different models with hidden units: the others disclose covariances." in text
    alike = joined(tmp_path, "regression", none, none)
    assert none in alike
    assert "covariances" not in alike


def test_classification_takes_the_smallest_model(tmp_path: Path) -> None:
    text = joined(tmp_path, "classification", HIDDEN, 'kind = "logistic"', LARGE)
    assert parse_schema(text)[1].kind == "logistic"
    assert "# From 1.toml, the smallest of different models.\n" in text
