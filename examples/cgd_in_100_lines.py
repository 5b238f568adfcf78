"""Confined Gradient Descent in 100 lines, for reading: without sockets, threads, or the cgd package.

Five hospitals train on the breast cancer data of scikit-learn. The records and the model of each hospital stay private.
In each step every hospital splits its gradient into secret shares; the secure sum opens the sum of all gradients and
nothing else, and every hospital moves its own model by that sum. Run it: python examples/cgd_in_100_lines.py
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

# The ring Z_2^32: a number x is encoded as the integer nearest to x·2^26, with a sign, for |x| < 16.
FRACTION_BITS = 26


def encode(values: np.ndarray, weight: float) -> np.ndarray:
    return np.rint(values.astype(np.float64) * weight * 2.0**FRACTION_BITS).astype(np.int64).astype(np.uint32)


def decode(words: np.ndarray) -> np.ndarray:
    return (words.view(np.int32) * 2.0**-FRACTION_BITS).astype(np.float32)


def split(secret: np.ndarray, count: int) -> list[np.ndarray]:
    """Shr: return `count` shares that sum to the secret; any count - 1 of them are uniformly random."""
    shares = [np.frombuffer(secrets.token_bytes(secret.nbytes), dtype=np.uint32) for _ in range(count - 1)]
    return [*shares, secret - reconstruct(shares)]


def reconstruct(shares: list[np.ndarray]) -> np.ndarray:
    """Rec: add the shares in the ring, modulo 2^32."""
    total: np.ndarray = np.add.reduce(shares, dtype=np.uint32)
    return total


def secure_sum(addends: list[np.ndarray]) -> np.ndarray:
    count = len(addends)
    sent = [split(addend, count) for addend in addends]  # participant l sends share j to participant j
    subtotals = [reconstruct([shares[j] for shares in sent]) for j in range(count)]  # j adds the shares it received
    return reconstruct(subtotals)  # the subtotals are published; they sum to the sum of all addends


class Participant:
    """A participant: data, origin and model are private, the displacement is the same for all."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, model: torch.nn.Module) -> None:
        self.x, self.y, self.model = x, y, model
        self.origin = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        self.displacement = torch.zeros_like(self.origin)

    def local_gradient(self) -> np.ndarray:
        self.model.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.nn.utils.parameters_to_vector(gradients).numpy()

    def descend(self, gradient_sum: np.ndarray, lr: float) -> None:
        self.displacement -= torch.from_numpy(gradient_sum) * lr
        torch.nn.utils.vector_to_parameters(self.origin + self.displacement, self.model.parameters())


def train(participants: list[Participant], steps: int, lr: float) -> None:
    """Algorithm 1. The weights make the sum the gradient of the mean loss over the samples of all participants."""
    total_samples = sum(len(each.y) for each in participants)
    for _ in range(steps):
        addends = [encode(each.local_gradient(), len(each.y) / total_samples) for each in participants]
        gradient_sum = decode(secure_sum(addends))
        for each in participants:
            each.descend(gradient_sum, lr)


def confined_model(features: int, classes: int, delta: float = 0.1) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(features, 16), torch.nn.ReLU(), torch.nn.Linear(16, classes))
    for parameter in model.parameters():  # the private origin: N(0, delta^2)
        torch.nn.init.normal_(parameter, std=delta)
    return model


def main() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.from_numpy((x - x.mean(axis=0)) / x.std(axis=0)).float()
    y = torch.from_numpy(y).long()
    order = torch.randperm(len(x))
    test, *parts = torch.split(order, [169, 200, 100, 50, 30, 20])
    participants = [Participant(x[part], y[part], confined_model(30, 2)) for part in parts]
    train(participants, steps=200, lr=0.5)
    for each in participants:
        accuracy = (each.model(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"{len(each.y):4d} own samples, {accuracy:.1%} on {len(test)} held-out samples")


if __name__ == "__main__":
    main()
