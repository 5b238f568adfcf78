"""The program of each participant in the golden runs (`support.golden`): in a thread, or by `cgd join --run`.

This module is copied next to a federation file, so it imports only `cgd` and its dependencies.
"""

from __future__ import annotations

import math
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cgd

FEATURES, HIDDEN, OUTPUTS = 5, 4, 2
DELTA = 0.25


def numbers(label: str, *shape: int) -> torch.Tensor:
    """Make multiples of 1/8 from −2 to 2 that depend only on the label."""
    count = math.prod(shape)
    stream = b"".join(sha256(f"{label} {block}".encode()).digest() for block in range(-(-count // 32)))
    values = [(byte % 33 - 16) / 8 for byte in stream[:count]]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the samples of a participant; their number depends on its name."""
    count = 4 + sha256(name.encode()).digest()[0] % 7
    return numbers(f"x of {name}", count, FEATURES), numbers(f"y of {name}", count, OUTPUTS)


class Network(nn.Module):
    """Two layers with weights in single precision that compute in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.first.weight.double(), self.first.bias.double()).relu()
        return functional.linear(hidden, self.last.weight.double(), self.last.bias.double())


def train(peers: cgd.Peers, kind: str, steps: int, pause: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Train, and return the final displacement and weights."""
    x, y = samples(peers.me)
    model = Network()
    cgd.confine(model, DELTA, peers.seed, start="zeros")
    optimizer: cgd.ConfinedOptimizer
    common: dict[str, Any] = {"peers": peers, "samples": len(x)}
    if kind in {"adam", "amsgrad"}:
        optimizer = cgd.ConfinedAdam(model.parameters(), 0.125, amsgrad=kind == "amsgrad", **common)
    else:
        nesterov, max_norm = kind == "nesterov", 2.0**-6 if kind == "clipped" else None
        optimizer = cgd.ConfinedSGD(
            model.parameters(), 0.125, momentum=0.9, nesterov=nesterov, max_norm=max_norm, **common
        )
    members = int(peers.sum(np.array(1), context="members"))
    for step in range(steps):
        time.sleep(pause)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if pause:
            Path(f"{peers.me}.step").write_text(str(step))
    assert members == len(peers)
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return optimizer.displacement(), weights


def main(peers: Any) -> None:
    """Train with the settings of the federation file, and write the digests of displacement and weights to a file."""
    torch.set_num_threads(1)
    outcome = train(peers, peers.training["optimizer"], peers.training["steps"], float(os.environ.get("PAUSE", "0")))
    digests = [sha256(each.numpy().tobytes()).hexdigest() for each in outcome]
    Path(f"{peers.me}.bits").write_text(" ".join(digests))
