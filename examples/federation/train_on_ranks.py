"""`train.py` for hospitals that train on several GPUs or machines: each process, a rank, has a part of the records.

    torchrun --nproc-per-node 2 -m -- cgd join federation.toml --as hospital-a --run train_on_ranks:main

Hospitals with one process start it with `cgd join`, as usual, and train with the others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch.nn import functional
from train import records, standardised

import cgd


def main(peers: cgd.Peers) -> None:
    torch.set_num_threads(1)
    rank, ranks = peers.ranks.rank, peers.ranks.size
    x, y = records(peers.me)
    x, y = x[rank::ranks], y[rank::ranks]  # this rank's part; any division will do
    x = standardised(x, peers)  # by a sum over all ranks of all hospitals
    held_out = len(x) // 5
    with cgd.public_seed(7):
        model = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    cgd.confine(model, delta=0.1, seed=peers.seed)  # the same origin on all ranks
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=peers.training["lr"], peers=peers, samples=len(x) - held_out)
    for _ in optimizer.steps(peers.training["steps"]):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[held_out:]), y[held_out:]).backward()
        optimizer.step()  # the mean over the ranks, the sum with the peers, and the same move on all ranks
    if rank == 0:  # which has a part of the held-out records
        with torch.no_grad():
            accuracy = (model(x[:held_out]).argmax(1) == y[:held_out]).float().mean().item()
        torch.save(model.state_dict(), f"{peers.me}.pt")
        digest = hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()
        Path(f"{peers.me}.json").write_text(json.dumps({"accuracy": accuracy, "displacement": digest}))
