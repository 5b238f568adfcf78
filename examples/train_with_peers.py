"""Training with peers: an ordinary PyTorch training loop with a confined optimiser.

Three labs with 600, 400 and 200 of scikit-learn's digits train together. In this example they are threads of one
process, connected by `local_peers`. Run it: python examples/train_with_peers.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import cgd

STEPS = 300


def train(peers: cgd.Peers, x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """Train one participant's model. Only `optimizer.step()` communicates with the other participants."""
    with cgd.public_seed(7):  # every participant builds the same start
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    cgd.confine(model, delta=0.1)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def main() -> None:
    """Split the data, train, and evaluate the model of every lab."""
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x = (x / 16).float()
    held_out, *parts = torch.randperm(len(x)).split([597, 600, 400, 200])

    with cgd.local_peers(["lab-a", "lab-b", "lab-c"]) as members:
        models = members.run(train, [x[part] for part in parts], [y[part] for part in parts])

    for peers, part, model in zip(members, parts, models, strict=True):
        accuracy = (model(x[held_out]).argmax(dim=1) == y[held_out]).float().mean()
        print(f"{peers.me}: {len(part)} own samples, {accuracy:.1%} on {len(held_out)} held-out digits")


if __name__ == "__main__":
    main()
