"""The compiled kernels compute the gradients of autograd."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import Grid
from cgd.simulation import first_layer
from cgd.simulation.first_layer import MIN_BLOCK_SAMPLES, MIN_DENSE_FRACTION, BlockedSamples
from cgd.simulation.fused_engine import FusedEngine, Network, kernel_loss
from cgd.simulation.fused_rows import SHARDS
from cgd.simulation.kernels import CROSS_ENTROPY, SQUARED_ERROR, STRIPE_MEMBERS, TILE_SAMPLES
from cgd.simulation.module_engine import ModuleEngine
from cgd.simulation.population import Participants
from support.networks import FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from collections.abc import Callable

ENOUGH_MEMORY = 1e9
SHARED = nn.Linear(2, 2)


class ScaledSequential(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = 100 * super().forward(x)  # type: ignore[no-untyped-call]
        return output


def assert_engines_agree(
    build: Callable[[], nn.Module],
    data: Any,
    mode: Any,
    loss: Any = functional.cross_entropy,
    memory: float = ENOUGH_MEMORY,
) -> None:
    """Compare gradient and loss of both engines at a random displacement; the reference uses double precision."""
    participants = Participants(build, data, mode, 0.5, seed=3)
    network, kind = Network.from_model(participants.models[0]), kernel_loss(loss)
    assert network is not None
    assert kind is not None
    displacement = 0.3 * torch.randn(participants.layout.size, generator=torch.Generator().manual_seed(1))
    fused, fused_loss = FusedEngine(participants, network, kind, memory).gradient_sum(displacement)
    exact = Participants(lambda: build().double(), data, mode, 0.5, seed=3)
    # A tower's first layer that is drawn in double precision has other numbers.
    exact.starts = [{name: each.double() for name, each in own.items()} for own in participants.starts]
    reference, reference_loss = ModuleEngine(exact, loss, None, ENOUGH_MEMORY).gradient_sum(displacement.double())
    assert reference.abs().max() > 0.01
    # Origins and a few dozen products are rounded to single precision in one engine only; and each shard of the samples
    # is summed in single precision, with an error of up to half a unit in the last place per sample.
    samples = participants.total_samples / SHARDS * participants.grid.columns
    assert float((fused.double() - reference).abs().max() / reference.abs().max()) < 3e-6 + samples * 2**-24
    assert fused_loss == pytest.approx(reference_loss, rel=3e-6)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("grid", [(1, 1), (7, 1), (5, 4)])
@pytest.mark.parametrize("widths", [(3,), (8, 6), (9, 7, 5, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_engine_agrees_with_autograd(
    mode: str, grid: tuple[int, int], widths: tuple[int, ...], bias: bool
) -> None:
    assert_engines_agree(fully_connected(FEATURES, *widths, bias=bias), blocks(*grid), mode)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("activation", [nn.Identity, nn.Tanh, nn.Sigmoid])
def test_fused_engine_supports_activations(mode: str, activation: type[nn.Module]) -> None:
    assert_engines_agree(fully_connected(FEATURES, 8, 6, 3, activation=activation), blocks(4, 3), mode)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("columns", [1, 3])
def test_fused_engine_supports_squared_errors(mode: str, columns: int) -> None:
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(0))
    x[::3] = 0  # towers compute samples without any feature once
    split = Grid(4, columns).split(x, torch.stack([x.sum(dim=1), x.prod(dim=1)], dim=1))
    assert_engines_agree(fully_connected(FEATURES, 8, 2, activation=nn.Tanh), split, mode, functional.mse_loss)


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_shards_larger_than_a_tile(mode: str) -> None:
    split = blocks(2, 4, count=3000)
    assert 3000 / SHARDS > 2 * TILE_SAMPLES
    for block in split.values():
        block.x[::3] = 0  # samples that towers compute once, more than a tile of them
    assert_engines_agree(fully_connected(FEATURES, 20, 11, 7), split, mode)


def test_rows_larger_than_a_stripe() -> None:
    columns = 2 * STRIPE_MEMBERS + 3
    x = torch.randn(30, columns, generator=torch.Generator().manual_seed(0))
    for widths in [(8, 3), (8, 5, 3)]:
        split = Grid(2, columns).split(x, (x[:, 0] > 0).long())
        assert_engines_agree(fully_connected(columns, *widths, bias=True), split, "joint")


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_shards_larger_than_a_block_with_few_and_with_many_zeros(
    fraction: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 8
    monkeypatch.setattr(first_layer, "BLOCK_FLOATS", 1)
    count = SHARDS * (2 * MIN_BLOCK_SAMPLES + 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, generator=generator)
    x *= torch.rand(count, FEATURES, generator=generator) < fraction
    samples = BlockedSamples.of(x.numpy(), [np.array([0, count])], width)
    assert (len(samples.dense) == 0) == (fraction < MIN_DENSE_FRACTION)
    split = Grid(3, columns).split(x, (x.sum(dim=1) > 0).long())
    assert_engines_agree(fully_connected(FEATURES, width, 3, bias=True), split, "joint")


def test_blocks_contain_samples_of_one_part() -> None:
    x = np.eye(300, 2, dtype=np.float32)
    samples = BlockedSamples.of(x, [np.array([0, 70, 150]), np.array([150, 151, 300])], first_layer.BLOCK_FLOATS)
    assert samples.offsets.tolist() == [0, 64, 70, 134, 150, 151, 215, 279, 300]
    assert samples.columns.offsets[:5].tolist() == [0, 1, 2, 2, 2]
    assert samples.columns.indices.tolist() == [0, 1]


@pytest.mark.slow
def test_many_outputs() -> None:
    """So many that the product of a tile's totals exceeds MAX_PRODUCT."""
    data = blocks(1, 1, count=SHARDS * TILE_SAMPLES)
    assert_engines_agree(fully_connected(FEATURES, 4, 6_000), data, "joint")


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_named_layers(mode: str) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(OrderedDict(fc=nn.Linear(FEATURES, 5), act=nn.ReLU(), out=nn.Linear(5, 3)))

    assert_engines_agree(build, blocks(3, 2), mode)
    assert_engines_agree(build, blocks(3), mode)


def test_large_squared_errors_do_not_cancel() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    split = Grid(2).split(x, 1000 + x.sum(dim=1, keepdim=True))
    participants = Participants(fully_connected(3, 1), split, delta=1e-3, start="zeros")
    network = Network.from_model(participants.models[0])
    assert network is not None
    engine = FusedEngine(participants, network, SQUARED_ERROR, ENOUGH_MEMORY)
    displacement = torch.tensor([1.0, 1.0, 1.0, 1000.0])
    _, loss = engine.gradient_sum(displacement)
    _, exact = ModuleEngine(participants, functional.mse_loss, None, ENOUGH_MEMORY).gradient_sum(displacement)
    # Outputs near 1000 have rounding errors of up to 3e-5, residuals of a few thousandths are squared in the loss.
    assert loss == pytest.approx(exact, rel=0.05)
    assert exact < 1e-4


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_origins_that_do_not_fit_in_memory_are_drawn_again(mode: str) -> None:
    assert_engines_agree(fully_connected(FEATURES, 8, 3), blocks(9, 2), mode, memory=2000)
    assert_engines_agree(fully_connected(FEATURES, 8, 3), blocks(9, 2), mode, memory=0)


def test_uneven_rows_are_weighted_by_their_samples() -> None:
    x = torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(5))
    split = Grid(3).split(x, (x[:, 0] > 0).long(), row_shares=(40, 9, 1))
    assert_engines_agree(fully_connected(FEATURES, 8, 2), split, "towers")


@pytest.mark.slow
def test_bits_do_not_depend_on_threads() -> None:
    """In separate processes, because the number of threads of numpy and torch is fixed when a process starts."""
    program = (
        "import hashlib, cgd, torch; from support.networks import fully_connected; "
        "x = torch.randn(400, 784, generator=torch.Generator().manual_seed(0)); "
        "blocks = cgd.Grid(2, 8).split(x, (x[:, 0] > 0).long()); "
        "result = cgd.simulate(fully_connected(784, 64, 40), blocks, mode='joint', accept=cgd.JOINT_REVEALS_RECORDS, "
        "steps=2, lr=0.1, progress=False); "
        "print(result.engine, hashlib.sha256(result.flat_displacement.numpy().tobytes()).hexdigest())"
    )
    outputs = set()
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    for threads in ("1", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        command = [sys.executable, "-c", program]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert outputs.pop().startswith("fused ")


def test_nan_in_the_data_reaches_gradient_and_loss() -> None:
    x = torch.ones(9, 2)
    x[4, 1] = float("nan")
    participants = Participants(fully_connected(2, 4, 2), Grid(3).split(x, torch.zeros(9, dtype=torch.long)))
    network = Network.from_model(participants.models[0])
    assert network is not None
    engine = FusedEngine(participants, network, CROSS_ENTROPY, ENOUGH_MEMORY)
    gradient, loss = engine.gradient_sum(torch.zeros(participants.layout.size))
    assert loss != loss
    assert gradient.isnan().any()


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2, dtype=torch.float64)),
        nn.Sequential(nn.Conv1d(2, 2, 1)),
        ScaledSequential(nn.Linear(2, 2)),
        nn.Sequential(SHARED, nn.ReLU(), SHARED),
        nn.Sequential(nn.Linear(2, 2)).requires_grad_(False),
    ],
)
def test_network_is_none_for_models_that_the_kernels_do_not_support(model: nn.Module) -> None:
    assert Network.from_model(model) is None
