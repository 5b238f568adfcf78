"""Runs of a spec file whose models compute on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cgd.cli import app
from cgd.errors import InputError
from cgd.experiments.runner import ResultStore, execute
from cgd.experiments.spec import RunSpec
from support.fake_device import FAKE, FakeDevice

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: dict[str, Any] = {"data": "iris", "hidden": (4,), "steps": 3, "evaluations": 1, "rows": 3, "sample": 1}


def test_result_on_a_device_is_that_of_the_cpu_and_has_its_name(tmp_path: Path) -> None:
    spec = RunSpec(**SETTINGS, arithmetic="ring")  # torch computes it on the CPU, too
    expected = execute(spec)
    store = ResultStore(tmp_path, FAKE)
    with FakeDevice() as device:
        found = store.run(spec)
    assert device.transfers
    assert found.extra == expected.extra
    assert found.as_json()["history"] == expected.as_json()["history"]
    assert ResultStore(tmp_path).get(spec) is not None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["centralised", "fedsgd", "fedavg"])
def test_baselines_that_are_simulations_have_a_device(method: str) -> None:
    local: dict[str, Any] = {"local": {"epochs": 1, "batch": 10, "lr": 0.1}} if method == "fedavg" else {}
    spec = RunSpec(**SETTINGS, **local, method=method)
    with FakeDevice() as device:
        found = execute(spec, device=FAKE)
    assert device.transfers
    # On the CPU, the compiled kernels add numbers in another order.
    assert found.history.training_loss[-1] == pytest.approx(execute(spec).history.training_loss[-1], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"method": "local"}, "the method is local"), ({"columns": 2}, "columns is 2")],
)
def test_other_runs_are_refused(settings: dict[str, Any], reason: str) -> None:
    spec = RunSpec(**{**SETTINGS, **settings})
    with FakeDevice(), pytest.raises(InputError, match=f"device is 'meta' and {reason}; such runs are computed on the"):
        execute(spec, device=FAKE)


def test_unknown_device_is_refused_before_the_file_is_read() -> None:
    error = CliRunner().invoke(app, ["simulate", "nowhere.toml", "--device", "gpu"]).exception
    assert isinstance(error, InputError)
    assert "device is 'gpu', which torch cannot use here" in str(error)
