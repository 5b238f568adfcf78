"""The program of every hospital in the tutorial: `cgd join federation.toml --as hospital-a --run train:main`."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch.nn import functional

import cgd

HOSPITALS = ("hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e")


def records(hospital: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of this hospital: in practice, a private file. The first fifth is held out for the test."""
    data = load_breast_cancer()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    mine = order[HOSPITALS.index(hospital) :: len(HOSPITALS)]
    return x[mine], y[mine]


def standardised(x: torch.Tensor, peers: cgd.Peers) -> torch.Tensor:
    """Standardise with the mean and deviation of all hospitals' records, which are computed by a secure sum."""
    statistics = torch.stack([torch.full((x.shape[1],), len(x)), x.sum(0), x.square().sum(0)]).double()
    count, total, squares = peers.sum(statistics, bound=2.0**40, ring_bits=64)
    mean: torch.Tensor = total / count
    deviation: torch.Tensor = (squares / count - mean.square()).sqrt()
    return (x - mean.float()) / deviation.float()


def main(peers: cgd.Peers) -> None:
    torch.set_num_threads(1)
    x, y = records(peers.me)
    x = standardised(x, peers)
    held_out = len(x) // 5
    with cgd.public_seed(7):  # every participant builds the same start
        model = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    # The origin is drawn from the seed in our key file: after a crash, or on another machine, it is the same.
    cgd.confine(model, delta=float(os.environ.get("DELTA", "0.1")), seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=peers.training["lr"], peers=peers, samples=len(x) - held_out)
    # All steps, or the remaining ones if this program was restarted.
    for step in optimizer.steps(peers.training["steps"]):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[held_out:]), y[held_out:])
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"{peers.me}: step {step}, loss on our own records {loss.item():.3f}", flush=True)
    with torch.no_grad():
        accuracy = (model(x[:held_out]).argmax(1) == y[:held_out]).float().mean().item()
    torch.save(model.state_dict(), f"{peers.me}.pt")  # our confined model is as private as our records
    digest = hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()
    Path(f"{peers.me}.json").write_text(json.dumps({"accuracy": accuracy, "displacement": digest}))
