"""Real processes killed at random moments, with local steps, batches of a prefetching loader, and a delay."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from support.federations import NAMES, ProcessFederation, uninterrupted_bits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

STEPS = 40
KILLS = 8

COMMON = """
import hashlib, os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import cgd

torch.set_num_threads(1)


def prepare(peers, build):
    generator = torch.Generator().manual_seed(sum(map(ord, peers.me)))
    x = torch.randn(24 + len(peers.me), 6, generator=generator)
    with cgd.public_seed(7):
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    cgd.confine(model, delta=0.1, seed=peers.seed)
    return model, x, (x.sum(1) > 0).long(), build(model.parameters(), peers=peers, samples=len(x))


def descend(model, optimizer, x, y):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def main(peers):
    displacement, _ = train(peers, peers.training["steps"], pause=0.2)
    with open(f"{peers.me}.bits", "w") as file:
        file.write(hashlib.sha256(displacement.numpy().tobytes()).hexdigest())
"""

ROUNDS = (
    COMMON
    + """

def train(peers, steps, pause=0.0):
    model, x, y, optimizer = prepare(peers, lambda params, **more: cgd.ConfinedSGD(params, 1.0, momentum=0.5, **more))
    for number in optimizer.steps(steps):
        generator = torch.Generator().manual_seed(int.from_bytes(peers.seed[:6], "big") + number)
        with optimizer.local_steps():
            local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for part in torch.randperm(len(x), generator=generator).chunk(4):
                time.sleep(pause / 4)
                descend(model, local, x[part], y[part])
    return optimizer.displacement(), None
"""
)

BATCHES = (
    COMMON
    + """

def train(peers, steps, pause=0.0):
    build = lambda params, **more: cgd.ConfinedTorchOptimizer(params, torch.optim.AdamW, lr=0.02, **more)
    model, x, y, optimizer = prepare(peers, build)
    sampler = cgd.BatchSampler(optimizer, batches=8)
    workers = {"num_workers": 2, "prefetch_factor": 3} if os.environ.get("WORKERS") else {}
    loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler, **workers)
    for _, (own_x, own_y) in sampler.steps(loader, epochs=steps // 8):
        time.sleep(pause)
        descend(model, optimizer, own_x, own_y)
    return optimizer.displacement(), None
"""
)
# The result is the confined model; its origin is another one in each step before.
FRESH = (
    COMMON.replace("seed=peers.seed)", "seed=peers.seed, fresh_origins=True)")
    + """

def train(peers, steps, pause=0.0):
    model, x, y, optimizer = prepare(peers, lambda params, **more: cgd.ConfinedAdam(params, lr=0.02, **more))
    for number in optimizer.steps(steps):
        time.sleep(pause)
        descend(model, optimizer, x, y)
        optimizer.eval()
        assert torch.isfinite(model(x)).all()
        optimizer.train()
    optimizer.eval()
    with torch.no_grad():
        for each in model.parameters():
            state = optimizer.state[each]
            assert torch.equal(each, state["origin"] + state["displacement"])
    return optimizer.displacement(), None
"""
)


DELAYED = (
    COMMON
    + """

def train(peers, steps, pause=0.0):
    build = lambda params, **more: cgd.ConfinedSGD(params, 0.1, momentum=0.5, delay=2, **more)
    model, x, y, optimizer = prepare(peers, build)
    for number in optimizer.steps(steps):
        time.sleep(pause)
        descend(model, optimizer, x, y)
        if number % 7 == 6:
            peers.sum(torch.ones(1))
    return optimizer.displacement(), None
"""
)


@pytest.mark.parametrize("lose_state", [False, True])
@pytest.mark.parametrize(
    "program", [ROUNDS, BATCHES, DELAYED, FRESH], ids=["rounds", "batches", "delay", "fresh origins"]
)
def test_kills_at_random_moments_do_not_change_the_result(program: str, lose_state: bool, tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, NAMES[:3], program=program, steps=STEPS)
    try:
        rng = random.Random(f"kills {lose_state}")
        federation.start_all(WORKERS="1")
        for _ in range(KILLS):
            time.sleep(rng.uniform(0, 1.5))
            victim = rng.choice(NAMES[:3])
            assert federation.processes[victim].poll() is None, federation.output(victim)
            federation.kill(victim, lose_state=lose_state)
            federation.start(victim, WORKERS="1")
        assert set(federation.wait(seconds=300).values()) == {0}
        assert set(federation.bits().values()) == {uninterrupted_bits(tmp_path, NAMES[:3], STEPS)}
    finally:
        federation.close()
