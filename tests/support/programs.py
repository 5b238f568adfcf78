"""Programs for `MemberProcess`, and conditions on messages for `InMemoryNetwork.hold`."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

import cgd
from cgd.secagg.messages import Ready, RevealKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cgd.secagg.messages import Message
    from support.in_process import MemberProcess

NAMES = ("ada", "bob", "cleo")
GRID = tuple(f"r{row}c{column}" for row in range(3) for column in range(2))
COLUMN = tuple(name for name in GRID if name.endswith("c0"))
EVERYONE = "everyone"


@dataclass(frozen=True)
class Training:
    """A program that trains, and sums a loss at every third step; returns a digest of the displacement.

    Its data depend on its name, its origin on its key. In a grid, the first layer belongs to its column.

    Attributes:
        steps: the number of steps.
        extra_samples: the number of samples besides those that depend on its name.
        lr: the step size.
        loop: "plain" for a loop over range(), "steps" for a loop over `optimizer.steps`.
        delay: the delay of the optimiser.
    """

    steps: int = 8
    extra_samples: int = 0
    lr: float = 0.5
    loop: Literal["plain", "steps"] = "plain"
    delay: int = 0

    def __call__(self, process: MemberProcess) -> str:
        peers = process.peers
        x, y = self._data(peers.me)
        with cgd.public_seed(0):
            model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        cgd.confine(model, delta=0.1, seed=peers.seed)
        first, rest = list(model[0].parameters()), list(model[2].parameters())
        groups: list[dict[str, Any]] = [{"params": first, "peers": peers.groups.get("column", peers)}, {"params": rest}]
        options: dict[str, Any] = {"momentum": 0.5, "delay": self.delay}
        optimizer = cgd.ConfinedSGD(groups, lr=self.lr, peers=peers, samples=len(x), **options)
        for step in range(self.steps) if self.loop == "plain" else optimizer.steps(self.steps):
            process.at_step(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 3 == 2:
                peers.sum(np.array([loss.item()]))
        optimizer.drain()
        return hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()[:16]

    def _data(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        x = torch.randn(5 + len(name) + self.extra_samples, 4, generator=generator)
        return x, (x.sum(1) > 0).long()


@dataclass(frozen=True)
class Summing:
    """A program that sums one number after another, and returns the totals."""

    values: Sequence[float] = (1, 2, 3)
    context: str = ""

    def __call__(self, process: MemberProcess) -> tuple[float, ...]:
        totals = []
        for step, value in enumerate(self.values):
            process.at_step(step)
            totals.append(process.peers.sum(np.array([value]), context=self.context).item())
        return tuple(totals)


def idle(_: MemberProcess) -> None:
    """Do nothing: the test itself makes the sums of this participant."""


def is_weighted_ready(message: Message) -> bool:
    return isinstance(message, Ready) and message.spec.weighted


def reveals_key(message: Message) -> bool:
    return isinstance(message, RevealKey)


def stays(condition: Callable[[], bool], seconds: float = 0.3) -> bool:
    """Return whether a condition holds for this time."""
    end = time.monotonic() + seconds
    while condition():
        if time.monotonic() > end:
            return True
        time.sleep(0.01)
    return False
