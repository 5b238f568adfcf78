"""A program for `MemberProcess` that trains in one of several modes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import cgd
from support.programs import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim.lr_scheduler import LRScheduler

    from cgd import ConfinedOptimizer, Peers
    from support.in_process import MemberProcess

    Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ModeTraining:
    """A program that trains for some steps; returns a digest of the displacement.

    Its loop is at step 2k of `MemberProcess` before step k, and at 2k + 1 when its gradient or update is computed.

    Attributes:
        mode: a key of `OPTIMIZERS`, or of `SCHEDULERS`, with momentum.
        loop: "plain" for a loop over range(), "steps" for a loop over `optimizer.steps`.
        steps: the number of steps.
    """

    mode: str
    loop: Literal["plain", "steps"] = "plain"
    steps: int = 6

    def __call__(self, process: MemberProcess) -> str:
        peers = process.peers
        x, y = Training()._data(peers.me)
        with cgd.public_seed(7):
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        cgd.confine(model, delta=0.1, seed=peers.seed, fresh_origins=self.mode.endswith("fresh origins"))
        first, rest = list(model[0].parameters()), list(model[2].parameters())
        groups: list[dict[str, Any]] = [{"params": first, "peers": peers.groups.get("column", peers)}, {"params": rest}]
        build = (OPTIMIZERS | DELAYED)["momentum" if self.mode in SCHEDULERS else self.mode]
        optimizer = build(groups, peers=peers, samples=len(x))
        schedulers = [SCHEDULERS[self.mode](optimizer)] if self.mode in SCHEDULERS else []
        take = take_round if self.mode.startswith("local") else take_step
        for step, batch in self._batches(optimizer, x, y, schedulers):
            process.at_step(2 * step)
            take(optimizer, model, batch, step, peers, partial(process.at_step, 2 * step + 1))
            if self.mode.endswith("fresh origins"):
                optimizer.eval()
                model(batch[0])
                optimizer.train()
            for schedule in schedulers:
                if isinstance(schedule, ReduceLROnPlateau):  # a loss that all members have, and that never falls
                    schedule.step(float(peers.sum(torch.ones(1))))
                else:
                    schedule.step()
        optimizer.drain()
        return hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()[:16]

    def _batches(
        self, optimizer: ConfinedOptimizer, x: torch.Tensor, y: torch.Tensor, schedulers: list[LRScheduler]
    ) -> Iterable[tuple[int, Batch]]:
        """Return the numbers of the steps, with their records: three batches in an epoch if the mode says so."""
        if not self.mode.startswith("batches"):
            steps = range(self.steps) if self.loop == "plain" else optimizer.steps(self.steps, *schedulers)
            yield from ((step, (x, y)) for step in steps)
            return
        sampler = cgd.BatchSampler(optimizer, batches=3)
        loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
        if self.loop == "steps":
            yield from sampler.steps(loader, self.steps // 3, *schedulers)
            return
        for epoch in range(self.steps // 3):
            sampler.set_epoch(epoch)
            yield from enumerate(loader, start=3 * epoch)


def take_step(
    optimizer: ConfinedOptimizer, model: nn.Module, batch: Batch, step: int, peers: Peers, pause: Callable[[], None]
) -> None:
    optimizer.zero_grad()
    x, y = batch
    nn.functional.cross_entropy(model(x), y).backward()
    pause()
    optimizer.step()


def take_round(
    optimizer: ConfinedOptimizer, model: nn.Module, batch: Batch, step: int, peers: Peers, pause: Callable[[], None]
) -> None:
    """Train locally in two batches, in an order that depends on the round."""
    x, y = batch
    generator = torch.Generator().manual_seed(int.from_bytes(peers.seed[:6], "big") + step)
    with optimizer.local_steps():
        local = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for part in torch.randperm(len(x), generator=generator).chunk(2):
            local.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            local.step()
        pause()


SCHEDULERS: dict[str, Callable[[ConfinedOptimizer], LRScheduler]] = {
    "batches with StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma=0.5)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]
    ),
    "InverseSquareLR": lambda optimizer: cgd.InverseSquareLR(optimizer, mu=0.1, steps=6),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
}
OPTIMIZERS: dict[str, Callable[..., ConfinedOptimizer]] = {
    "batches, fresh origins": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, **more),
    "batches": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, **more),
    "momentum": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, **more),
    "nesterov": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, nesterov=True, **more),
    "amsgrad": lambda params, **more: cgd.ConfinedAdam(params, 0.05, amsgrad=True, max_norm=0.1, **more),
    "AdamW": lambda params, **more: cgd.ConfinedTorchOptimizer(params, torch.optim.AdamW, lr=0.05, **more),
    "ASGD": lambda params, **more: cgd.ConfinedTorchOptimizer(params, torch.optim.ASGD, lr=0.5, t0=2, **more),
    "adam, fresh origins": lambda params, **more: cgd.ConfinedAdam(params, 0.05, **more),
    "local momentum, fresh origins": lambda params, **more: cgd.ConfinedSGD(params, 1.0, momentum=0.5, **more),
    "local sgd": lambda params, **more: cgd.ConfinedSGD(params, 1.0, **more),
    "local momentum": lambda params, **more: cgd.ConfinedSGD(params, 1.0, momentum=0.5, **more),
    "local adam": lambda params, **more: cgd.ConfinedAdam(params, 0.05, **more),
}
DELAYED: dict[str, Callable[..., ConfinedOptimizer]] = {
    "delay 1": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, delay=1, **more),
    "delay 2": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, delay=2, **more),
    "delay 3, amsgrad": lambda params, **more: cgd.ConfinedAdam(
        params, 0.05, amsgrad=True, max_norm=0.1, delay=3, **more
    ),
    "delay 2, AdamW": lambda params, **more: cgd.ConfinedTorchOptimizer(
        params, torch.optim.AdamW, lr=0.05, delay=2, **more
    ),
    "batches, delay 2": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, delay=2, **more),
    "local, delay 2": lambda params, **more: cgd.ConfinedSGD(params, 0.5, momentum=0.5, delay=2, **more),
}
"""Optimisers with a delay."""
