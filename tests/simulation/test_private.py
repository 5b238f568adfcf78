"""Simulations with differential privacy: the mechanism of the product, its noise, clipping, charges and checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cgd import (
    JOINT_REVEALS_RECORDS,
    Cell,
    ConfinedAdam,
    ConfinedSGD,
    InputError,
    Privacy,
    Ring,
    confine,
    local_peers,
    participant_seed,
    public_seed,
    simulate,
)
from cgd.dp.settings import PrivacySettings
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.record_norms import MARGIN
from cgd.simulation import loop
from cgd.simulation.baselines import BaselineSettings, private_centralised
from cgd.simulation.private_engine import NoisySum, noise_key
from support.networks import CLASSES, FEATURES, blocks, fully_connected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd import Block, ConfinedOptimizer, Peers
    from cgd.dp.mechanism import NoisyEncoding
    from cgd.optim.displacement import UpdateRule
    from cgd.simulation.result import SimulationResult

STEPS, LR, DELTA, SEED = 5, 0.3, 0.2, 4
WEAK = PrivacySettings(epsilon=8.0, delta=1e-5, steps=STEPS, reruns=0)
build = fully_connected(FEATURES, 8, CLASSES)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def run(privacy: PrivacySettings = WEAK, **options: Any) -> SimulationResult:
    settings: dict[str, Any] = {"steps": STEPS, "lr": LR, "delta": DELTA, "seed": SEED, "progress": False, **options}
    return simulate(settings.pop("build", build), settings.pop("blocks", blocks(4)), privacy=privacy, **settings)


class SeededSettings(PrivacySettings):
    """Settings whose encodings take the keys of noise from the simulator, for one member."""

    member: int
    opened: int

    def count_encoding(self, members: int) -> NoisyEncoding:
        return replace(super().count_encoding(members), random=self._key)

    def step_encoding(self, members: int, dimension: int, records: int, ring_bits: int) -> NoisyEncoding:
        return replace(super().step_encoding(members, dimension, records, ring_bits), random=self._key)

    def _key(self, _count: int) -> bytes:
        self.__dict__["opened"] += 1
        return noise_key(SEED, self.opened - 1, self.member)


def seed_noise(privacy: Privacy, member: int) -> None:
    """Replace the random noise of a real participant by that of the simulator."""
    seeded = SeededSettings(**{name: getattr(privacy.settings, name) for name in PrivacySettings.__dataclass_fields__})
    seeded.__dict__.update(member=member, opened=0)
    privacy.settings = seeded


@pytest.mark.parametrize("ring_bits", [32, 64])
@pytest.mark.parametrize(
    ("rule", "build_model", "dtype"),
    [
        ("momentum", build, torch.float32),
        ("adam", fully_connected(FEATURES, 8, CLASSES, dtype=torch.float64), torch.float64),
        ("momentum", convolutional, torch.float32),
    ],
    ids=["linear", "adam-float64", "convolutional"],
)
def test_ring_has_the_bits_of_the_protocol(
    rule: str, build_model: Callable[[], nn.Module], dtype: torch.dtype, ring_bits: Any
) -> None:
    split = blocks(4, count=50)
    make: dict[str, Callable[..., ConfinedOptimizer]] = {
        "momentum": partial(ConfinedSGD, lr=LR, momentum=0.9),
        "adam": partial(ConfinedAdam, lr=LR),
    }
    rules: dict[str, Callable[[float], UpdateRule]] = {"momentum": partial(SGDRule, momentum=0.9), "adam": AdamRule}
    options: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "clip": 0.5, "steps": STEPS, "colluders": 2}

    def train(peers: Peers, block: Block) -> tuple[dict[str, torch.Tensor], Any]:
        with public_seed(SEED):
            model = build_model()
        confine(model, DELTA, participant_seed(SEED, block.cell))
        privacy = Privacy(model, **options)
        seed_noise(privacy, block.cell.row)
        optimizer = make[rule](model.parameters(), peers=peers, samples=block.samples, privacy=privacy)
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(model(block.x.to(dtype)), block.y).backward()
            optimizer.step()
        return dict(model.named_parameters()), privacy.spent()

    with local_peers(4, ring_bits=ring_bits) as members:
        real = members.run(train, split.values())
    result = run(
        PrivacySettings(**options),
        build=build_model,
        blocks=split,
        rule=rules[rule],
        arithmetic="ring",
        ring=Ring(ring_bits=ring_bits),
    )
    for cell, (parameters, spent) in zip(split, real, strict=True):
        ours = dict(result.model(cell).named_parameters())
        assert all(torch.equal(ours[name], parameters[name]) for name in parameters)
        assert result.spent == spent
    assert result.spent is not None
    assert result.spent.openings == STEPS + 1


def test_noise_is_not_that_of_another_seed_step_or_member() -> None:
    """Control of the test above: each of these changes the key, so equal bits mean equal noise."""
    keys = {noise_key(seed, opening, member) for seed in (0, 1) for opening in (0, 1, 11) for member in (0, 1, 11)}
    assert len(keys) == 18


@pytest.mark.parametrize("in_ring", [True, False])
@pytest.mark.parametrize("colluders", [0, 1, 4])
def test_noise_has_the_stated_deviation(in_ring: bool, colluders: int) -> None:
    """Fixed seeds. The estimate of 200,000 numbers has an error of 0.16 %; 1 % is 6 of these."""
    dimension, members = 200_000, 5
    settings = PrivacySettings(epsilon=2.0, delta=1e-5, steps=100, colluders=colluders)
    encoding = settings.step_encoding(members, dimension, 1000, 32)
    noisy_sum = NoisySum(encoding, SEED, opening=1, in_ring=in_ring)
    values = np.linspace(-1, 1, dimension)
    for _ in range(members):
        noisy_sum.add(values)
    noise = noisy_sum.total() - members * values / 1000
    needed = settings.clip / (settings.step_mu * 1000) * math.sqrt(members / (members - colluders))
    assert encoding.sigma_total == pytest.approx(noise.std(), rel=0.01)
    assert needed <= encoding.sigma_total < 1.02 * needed
    assert abs(noise.mean()) < 6 * encoding.sigma_total / math.sqrt(dimension)
    assert np.abs(noise).max() < 7 * encoding.sigma_total


@pytest.mark.parametrize("arithmetic", ["float", "ring"])
def test_every_opening_has_noise_of_its_own(arithmetic: Any) -> None:
    """With tiny steps, all gradients are those of the first one, and the moves differ by the noise only."""
    moved = [run(steps=steps, lr=1e-9, arithmetic=arithmetic).flat_displacement / 1e-9 for steps in (1, 2, 3)]
    first, second, third = moved[0], moved[1] - moved[0], moved[2] - moved[1]
    sigma = WEAK.step_encoding(4, len(first), 60, 32).sigma_total
    for one, other in ((first, second), (second, third)):
        assert 0.5 < float((one - other).std()) / (sigma * math.sqrt(2)) < 2


def test_float_and_ring_agree_within_the_noise() -> None:
    """Both are the exact mean of clipped gradients plus noise: after one step they differ by two noises, no more."""
    privacy = PrivacySettings(epsilon=30.0, delta=1e-3, steps=1, reruns=0, clip=0.5)
    split = blocks(4, count=400)
    arithmetics: tuple[Any, Any] = ("float", "ring")
    one, other = (
        run(privacy, blocks=split, steps=1, lr=1.0, arithmetic=arithmetic).flat_displacement
        for arithmetic in arithmetics
    )
    # The opened numbers of records differ, too, and with them the lengths: by 10 deviations of the count at most.
    encoding = privacy.step_encoding(4, len(one), 400, 32)
    count = privacy.count_encoding(4).sigma_total
    allowed = encoding.sigma_total * (1 + 20 * count / 400)
    length = float(one.norm()) * 20 * count / 400
    assert float((one - other).norm()) < length + allowed * math.sqrt(2) * (math.sqrt(len(one)) + 6)
    assert float(one @ other) > 0.5 * float(one.norm() * other.norm())  # the noise is small: both have the signal


@pytest.mark.parametrize("arithmetic", ["float", "ring"])
def test_one_record_changes_the_total_by_at_most_the_clip_norm(arithmetic: Any) -> None:
    """An outlier replaces a record, which counts twice; the noise is the same, because it follows from the seed."""
    privacy = replace(WEAK, clip=0.01, steps=1, epsilon=20.0)
    split = blocks(4)
    outlier = dict(split)
    changed = split[Cell(1, 0)].x.clone()
    changed[0] *= 1e4
    outlier[Cell(1, 0)] = replace(split[Cell(1, 0)], x=changed)
    common: dict[str, Any] = {"steps": 1, "lr": 1.0, "arithmetic": arithmetic}
    plain, moved = (run(privacy, blocks=each, **common).flat_displacement.double() for each in (split, outlier))
    # The records as opened are at least 60 − 10 deviations of the count's noise.
    least = 60 - 10 * privacy.count_encoding(4).sigma_total
    rounding = 4 * math.sqrt(len(plain)) * 2.0 ** -privacy.step_encoding(4, len(plain), 60, 32).fraction_bits
    assert 0 < float((plain - moved).norm()) <= 2 * privacy.clip * (1 - MARGIN) / least + rounding + 1e-6
    assert least > 20


def test_record_that_is_not_finite_counts_as_zero() -> None:
    split = blocks(4)
    damaged = split[Cell(0, 0)].x.clone()
    damaged[0, 0] = math.inf
    with_infinity = {**split, Cell(0, 0): replace(split[Cell(0, 0)], x=damaged)}

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss; that of a record which is not finite does not stop the simulation."""
        return functional.cross_entropy(outputs, labels, reduction="none").nan_to_num(0.0, 0.0, 0.0).mean()

    result = run(blocks=with_infinity, loss=loss)
    assert torch.isfinite(result.flat_displacement).all()


def test_large_budget_is_close_to_a_training_without_noise() -> None:
    split = blocks(3, count=600)
    privacy = PrivacySettings(epsilon=30.0, delta=1e-3, steps=10, reruns=0, clip=5.0)
    private = run(privacy, blocks=split, steps=10)
    plain = simulate(build, split, steps=10, lr=LR, delta=DELTA, seed=SEED, engine="modules", progress=False)
    assert private.engine == "modules"
    assert private.history.training_loss[-1] == pytest.approx(plain.history.training_loss[-1], abs=0.05)
    assert plain.spent is None


@pytest.mark.parametrize("arithmetic", ["float", "ring"])
def test_resumed_run_has_the_same_bits_and_charges(
    arithmetic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(arithmetic=arithmetic, rule=partial(SGDRule, momentum=0.9))
    file = tmp_path / "run.pt"
    common: dict[str, Any] = {"arithmetic": arithmetic, "rule": partial(SGDRule, momentum=0.9), "checkpoint": file}
    monkeypatch.setattr(loop, "CHECKPOINT_INTERVAL_SECONDS", -1.0)

    def stop(step: int, _history: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(**common, on_step=stop)
    assert run(**common, steps=3).spent == run(arithmetic=arithmetic, steps=3).spent
    resumed = run(**common)
    assert torch.equal(resumed.flat_displacement, whole.flat_displacement)
    assert resumed.spent == whole.spent
    with pytest.raises(InputError, match="privacy was epsilon 8"):
        run(replace(WEAK, epsilon=4.0), **common)


def test_spends_at_most_the_budget() -> None:
    spent = run().spent
    assert spent is not None
    assert WEAK.budget().mu_squared * 0.95 < spent.mu**2 <= WEAK.budget().mu_squared
    assert 7.5 < spent.epsilon <= 8
    assert (spent.delta, spent.openings) == (1e-5, STEPS + 1)
    nothing = run(steps=0).spent
    assert nothing is not None
    assert nothing.openings == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": blocks(4, 2)}, "2 columns in the mode 'towers'.*use one column"),
        ({"blocks": blocks(4, 2), "mode": "joint", "accept": JOINT_REVEALS_RECORDS}, "mode 'joint'.*use one column"),
        ({"blocks": blocks(1)}, "colluders is 1, and there are 1 members"),
        ({"privacy": 3.0}, "privacy is float; pass PrivacySettings"),
        ({"steps": STEPS + 1}, r"calibrated for 5; set PrivacySettings\(steps=6\)"),
        ({"privacy": replace(WEAK, delta=0.02)}, "there are 60 records; choose it far below 0.017"),
        (
            {"build": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))},
            "BatchNorm|batch normalisation",
        ),
    ],
    ids=["towers", "joint", "colluders", "type", "steps", "delta", "batch-norm"],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(**options)


def test_schedule_is_the_factor_of_the_step_size() -> None:
    def linear(step: int) -> float:
        return 1 - step / STEPS

    split = blocks(4)
    options: dict[str, Any] = {"lr": LR, "delta": DELTA, "seed": SEED, "engine": "modules", "progress": False}
    first = simulate(build, split, steps=1, schedule=linear, **options)
    assert torch.equal(first.flat_displacement, simulate(build, split, steps=1, **options).flat_displacement)
    falling = simulate(build, split, steps=STEPS, schedule=linear, **options)
    assert not torch.equal(falling.flat_displacement, simulate(build, split, steps=STEPS, **options).flat_displacement)
    stopped = simulate(build, split, steps=STEPS, schedule=lambda step: float(step == 0), **options)
    assert torch.equal(stopped.flat_displacement, first.flat_displacement)
    with pytest.raises(InputError, match="either mu and hold, or schedule"):
        simulate(build, split, steps=STEPS, schedule=linear, mu=0.1, **options)
    with pytest.raises(InputError, match="at least 0"):
        simulate(build, split, steps=STEPS, schedule=lambda _: -1.0, **options)


def test_private_centralised_is_one_participant_with_all_records() -> None:
    settings = BaselineSettings(build, blocks(4), steps=STEPS, lr=LR, delta=DELTA, seed=SEED)
    result = private_centralised(settings, WEAK)
    assert len(result) == 1
    x, y = settings.pooled()
    pooled = {Cell(0, 0): replace(blocks(1)[Cell(0, 0)], x=x, y=y)}
    assert torch.equal(
        result.flat_displacement, run(replace(WEAK, colluders=0), blocks=pooled, build=build).flat_displacement
    )
    with public_seed(SEED):
        model = build()
    result.origin(Cell(0, 0)).apply(model)
    for initial, expected in zip(model.parameters(), settings.initial_model().parameters(), strict=True):
        assert torch.equal(initial, expected)
