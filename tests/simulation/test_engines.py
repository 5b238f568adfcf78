"""The compiled kernels compute what autograd computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import Grid
from cgd.simulation.fused_engine import SHARDS, FusedEngine, Network, known_loss
from cgd.simulation.kernels import BLOCK, CROSS_ENTROPY, SQUARED_ERROR, STRIPE, TILE
from cgd.simulation.module_engine import ModuleEngine
from cgd.simulation.population import Participants
from support.networks import FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from collections.abc import Callable

PLENTY = 1e9
SHARED = nn.Linear(2, 2)


class Loud(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = 100 * super().forward(x)  # type: ignore[no-untyped-call]
        return output


def assert_engines_agree(
    build: Callable[[], nn.Module], of: Any, mode: Any, loss: Any = functional.cross_entropy, memory: float = PLENTY
) -> None:
    """Gradient and loss of both engines at a random displacement; the reference computes in double precision."""
    participants = Participants(build, of, mode, 0.5, seed=3)
    network, kind = Network.of(participants.models[0]), known_loss(loss)
    assert network is not None
    assert kind is not None
    displacement = 0.3 * torch.randn(participants.layout.size, generator=torch.Generator().manual_seed(1))
    fast, fast_loss = FusedEngine(participants, network, kind, memory).gradient_sum(displacement)
    exact = Participants(lambda: build().double(), of, mode, 0.5, seed=3)
    slow, slow_loss = ModuleEngine(exact, loss, None, PLENTY).gradient_sum(displacement.double())
    assert slow.abs().max() > 0.01
    # Origins are rounded to single precision in one and not in the other, and so are a few dozen products; and a shard
    # of the samples is summed up in single precision, which may lose half a unit in the last place with each.
    samples = participants.total_samples / SHARDS * participants.grid.columns
    assert float((fast.double() - slow).abs().max() / slow.abs().max()) < 3e-6 + samples * 2**-24
    assert fast_loss == pytest.approx(slow_loss, rel=3e-6)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("grid", [(1, 1), (7, 1), (5, 4)])
@pytest.mark.parametrize("widths", [(3,), (8, 6), (9, 7, 5, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_equals_autograd(mode: str, grid: tuple[int, int], widths: tuple[int, ...], bias: bool) -> None:
    assert_engines_agree(fully_connected(FEATURES, *widths, bias=bias), blocks(*grid), mode)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("activation", [nn.Identity, nn.Tanh, nn.Sigmoid])
def test_activations(mode: str, activation: type[nn.Module]) -> None:
    assert_engines_agree(fully_connected(FEATURES, 8, 6, 3, activation=activation), blocks(4, 3), mode)


@pytest.mark.parametrize("mode", ["towers", "joint"])
@pytest.mark.parametrize("columns", [1, 3])
def test_squared_errors(mode: str, columns: int) -> None:
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(0))
    x[::3] = 0  # samples without any feature go through a tower as one
    split = Grid(4, columns).split(x, torch.stack([x.sum(dim=1), x.prod(dim=1)], dim=1))
    assert_engines_agree(fully_connected(FEATURES, 8, 2, activation=nn.Tanh), split, mode, functional.mse_loss)


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_more_samples_in_a_shard_than_in_a_tile(mode: str) -> None:
    split = blocks(2, 4, count=3000)
    assert 3000 / SHARDS > 2 * TILE
    for block in split.values():
        block.x[::3] = 0  # samples that towers take together, more than a tile of them
    assert_engines_agree(fully_connected(FEATURES, 20, 11, 7), split, mode)


def test_more_members_in_a_row_than_in_a_stripe() -> None:
    columns = 2 * STRIPE + 3
    x = torch.randn(30, columns, generator=torch.Generator().manual_seed(0))
    for widths in [(8, 3), (8, 5, 3)]:
        split = Grid(2, columns).split(x, (x[:, 0] > 0).long())
        assert_engines_agree(fully_connected(columns, *widths, bias=True), split, "joint")


def test_more_samples_in_a_shard_than_in_a_block() -> None:
    of = blocks(1, 2, count=SHARDS * (BLOCK + 100))
    assert_engines_agree(fully_connected(FEATURES, 4, 3), of, "joint")


def test_many_outputs() -> None:
    """So many that the product of a tile's totals, whose logarithm is taken, must be cut in pieces."""
    of = blocks(1, 1, count=SHARDS * TILE)
    assert_engines_agree(fully_connected(FEATURES, 4, 6_000), of, "joint")


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_named_layers(mode: str) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(OrderedDict(fc=nn.Linear(FEATURES, 5), act=nn.ReLU(), out=nn.Linear(5, 3)))

    assert_engines_agree(build, blocks(3, 2), mode)
    assert_engines_agree(build, blocks(3), mode)


def test_large_squared_errors_do_not_cancel() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    split = Grid(2).split(x, 1000 + x.sum(dim=1, keepdim=True))
    participants = Participants(fully_connected(3, 1), split, delta=1e-3)
    network = Network.of(participants.models[0])
    assert network is not None
    engine = FusedEngine(participants, network, SQUARED_ERROR, PLENTY)
    displacement = torch.tensor([1.0, 1.0, 1.0, 1000.0])
    _, loss = engine.gradient_sum(displacement)
    _, exact = ModuleEngine(participants, functional.mse_loss, None, PLENTY).gradient_sum(displacement)
    # Outputs near 1000 are off by up to 3e-5, errors are a few thousandths, and the loss is their square.
    assert loss == pytest.approx(exact, rel=0.05)
    assert exact < 1e-4


@pytest.mark.parametrize("mode", ["towers", "joint"])
def test_origins_that_do_not_fit_the_memory_are_drawn_again(mode: str) -> None:
    assert_engines_agree(fully_connected(FEATURES, 8, 3), blocks(9, 2), mode, memory=2000)
    assert_engines_agree(fully_connected(FEATURES, 8, 3), blocks(9, 2), mode, memory=0)


def test_uneven_rows_are_weighted_by_their_samples() -> None:
    x = torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(5))
    split = Grid(3).split(x, (x[:, 0] > 0).long(), row_shares=(40, 9, 1))
    assert_engines_agree(fully_connected(FEATURES, 8, 2), split, "towers")


def test_bits_do_not_depend_on_threads() -> None:
    """In processes of their own: the threads of numpy and of torch are decided when a process starts."""
    program = (
        "import hashlib, cgd, torch; from support.networks import fully_connected; "
        "x = torch.randn(400, 784, generator=torch.Generator().manual_seed(0)); "
        "blocks = cgd.Grid(2, 8).split(x, (x[:, 0] > 0).long()); "
        "colony = cgd.simulate(fully_connected(784, 64, 40), blocks, mode='joint', accept=cgd.JOINT_REVEALS_RECORDS, "
        "steps=2, lr=0.1, progress=False); "
        "print(colony.engine, hashlib.sha256(colony.flat.numpy().tobytes()).hexdigest())"
    )
    said = set()
    for threads in ("1", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", program]
        said.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(said) == 1
    assert said.pop().startswith("fused ")


def test_a_nan_in_the_data_shows() -> None:
    x = torch.ones(9, 2)
    x[4, 1] = float("nan")
    participants = Participants(fully_connected(2, 4, 2), Grid(3).split(x, torch.zeros(9, dtype=torch.long)))
    network = Network.of(participants.models[0])
    assert network is not None
    engine = FusedEngine(participants, network, CROSS_ENTROPY, PLENTY)
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
        Loud(nn.Linear(2, 2)),
        nn.Sequential(SHARED, nn.ReLU(), SHARED),
        nn.Sequential(nn.Linear(2, 2)).requires_grad_(False),
    ],
)
def test_what_the_kernels_do_not_know_is_left_to_the_modules(model: nn.Module) -> None:
    assert Network.of(model) is None
