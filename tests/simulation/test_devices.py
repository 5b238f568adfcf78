"""Simulations whose models compute on a device: the same bits, and few transfers."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import cgd
from cgd import Block, Cell, InputError, LocalTraining
from cgd.dp.settings import PrivacySettings
from support.fake_device import FAKE, FakeDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd import SimulationResult

MODES: dict[str, dict[str, Any]] = {
    "gradients": {"momentum": 0.5},
    "ring": {"arithmetic": "ring"},
    "batches": {"batches": 2, "keep": 0.3},
    "local training": {"local": LocalTraining(epochs=2, batch=5, lr=0.1, momentum=0.5), "lr": 1.0},
    "weights of classes": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))},
}


def build(layers: int = 1) -> nn.Module:
    hidden = [each for _ in range(layers) for each in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(4, 2))


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return x, (x.sum(dim=1) > 0).long()


def blocks() -> Mapping[Cell, Block]:
    return cgd.Grid(rows=3).split(*records(20))


def run(build_model: Callable[[], nn.Module] = build, **settings: Any) -> SimulationResult:
    usual: dict[str, Any] = {"steps": 2, "lr": 0.5, "evaluate_every": 2, "test": records(30), "sample": 1}
    usual |= {"progress": False, "engine": "modules"}
    return cgd.simulate(build_model, blocks(), **usual | settings)


@pytest.mark.parametrize("mode", MODES)
def test_run_on_a_device_has_the_results_of_the_cpu(mode: str) -> None:
    """The fake device computes with the bits of the CPU, and rejects tensors that were left there."""
    expected = run(**MODES[mode])
    with FakeDevice() as device:
        found = run(device=FAKE, **MODES[mode])
    assert device.transfers
    assert torch.equal(found.flat_displacement, expected.flat_displacement)
    assert found.history == expected.history
    assert all(each.device.type == "cpu" for each in found.model(Cell(1, 0)).parameters())


@pytest.mark.parametrize("mode", ["gradients", "local training"])
def test_transfers_of_a_step_do_not_depend_on_the_number_of_layers(mode: str) -> None:
    def transfers(layers: int, steps: int) -> int:
        with FakeDevice() as device:
            run(partial(build, layers), steps=steps, device=FAKE, test=None, **MODES[mode])
        return len(device.transfers)

    few, many = (transfers(layers, steps=2) - transfers(layers, steps=1) for layers in (1, 6))
    assert few == many > 0


def test_kernels_are_for_the_cpu() -> None:
    with FakeDevice():
        assert run(engine="auto", device=FAKE).engine == "modules"


def test_checkpoint_continues_on_another_device(tmp_path: Any) -> None:
    expected = run(steps=3)
    with FakeDevice():
        run(device=FAKE, checkpoint=tmp_path / "run.pt")
    assert torch.equal(run(steps=3, checkpoint=tmp_path / "run.pt").flat_displacement, expected.flat_displacement)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("gpu", {}, "device is 'gpu', which torch cannot use here"),
        ("meta", {}, "device is 'meta', which torch cannot use here"),
        (None, {}, "device is None"),
    ],
)
def test_device_that_is_not_here_is_refused(device: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        run(device=device, **settings)


def test_columns_and_privacy_are_refused_on_a_device() -> None:
    grid = cgd.Grid(rows=3, columns=2).split(*records(20))
    with FakeDevice():
        with pytest.raises(InputError, match="2 columns, which are simulated on the CPU"):
            cgd.simulate(build, grid, steps=1, lr=0.1, device=FAKE)
        privacy = PrivacySettings(epsilon=8.0, delta=1e-5, steps=4, clip=1.0, colluders=1)
        with pytest.raises(InputError, match="privacy is given, which is simulated on the CPU"):
            run(device=FAKE, privacy=privacy)


ACCELERATORS = [
    name
    for name, available in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
    if available
]


@pytest.mark.skipif(not ACCELERATORS, reason="torch finds no CUDA and no MPS device here")
def test_accelerator_learns_as_the_cpu_does() -> None:
    expected, found = run(steps=50), run(steps=50, device=ACCELERATORS[0])
    assert found.history.training_loss[-1] == pytest.approx(expected.history.training_loss[-1], rel=0.01)
