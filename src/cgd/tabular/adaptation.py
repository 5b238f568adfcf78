"""Adapt a trained model to our own records (personalisation): steps on our training records alone, for our own use.

Two methods, of which the validation records choose (`cgd.tabular.kept_model`):

- `intercept`: only the biases of the last layer. It corrects how frequent the classes are here, or the mean of a
  number, and cannot fit single records.
- `weights`: all weights, in small steps from the common model, with early stopping (fine-tuning).

Nothing is sent, so neither noise nor merged values of few records are needed.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cgd.optim.random_numbers import own_random_numbers
from cgd.tabular.training_loop import add_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from cgd.tabular.training_loop import EncodedDataset


@dataclass(frozen=True)
class Method:
    """A way to adapt a network.

    Attributes:
        lr: the step size of Adam.
        last: how many parameters, counted from the last, change; None for all. If it is 1, it must be a bias.
    """

    lr: float
    last: int | None = None

    def parameters(self, network: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that change; none if the last one should be a bias, and is not."""
        named = [(name, each) for name, each in network.named_parameters() if each.requires_grad]
        if self.last == 1 and not named[-1][0].endswith("bias"):
            return []
        return [each for _, each in (named if self.last is None else named[-self.last :])]


METHODS = {"intercept": Method(0.03, last=1), "weights": Method(0.003)}
"""The methods in use, by their names; `benchmarks/accuracy/personalisation.py` compares them with others."""
STEPS, STEPS_BETWEEN = 100, 5


def adapt(
    network: nn.Module,
    training: EncodedDataset,
    method: Method,
    seed: bytes,
    *,
    steps: int = STEPS,
    end: float = float("inf"),
) -> Iterator[int]:
    """Train a network further, in place; yield the number of steps after every few of them.

    Args:
        network: a network of its own, without hooks.
        training: our training records.
        method: which parameters change, in which steps.
        seed: our seed, for networks with random numbers (dropout).
        steps: the largest number of steps.
        end: the time (of `time.monotonic`) at which to stop.
    """
    parameters = method.parameters(network)
    if not parameters or not len(training):
        return
    optimizer = torch.optim.Adam(parameters, lr=method.lr)
    for step in range(1, steps + 1):
        network.train()
        optimizer.zero_grad()
        digest = hmac.digest(seed, f"cgd adaptation step {step}".encode(), "sha256")
        with own_random_numbers(int.from_bytes(digest[:7], "little"), parameters[0].device):
            add_gradient(network, training)
        optimizer.step()
        if step % STEPS_BETWEEN == 0:
            network.eval()
            yield step
            if time.monotonic() > end:
                return
