"""Frozen parameters and persistent buffers must stay as they were at `confine`."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd import CGDError, ConfinedSGD, Peers, confine, local_peers, public_seed

if TYPE_CHECKING:
    from collections.abc import Callable


class Statistics(nn.Module):
    """A layer with a running mean of its own."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.mean


def build(*layers: nn.Module) -> nn.Sequential:
    with public_seed(7):
        model = nn.Sequential(nn.Linear(3, 3), *(layers or (nn.BatchNorm1d(3),)), nn.Linear(3, 1))
    model.eval()
    model[0].requires_grad_(False)
    return model


def train(
    change: Callable[[nn.Sequential], object], layers: Callable[[], nn.Module], *, at: int = 1, local: bool = False
) -> list[str]:
    """Take three steps, with `change` at one member before one of them; return the errors."""

    def work(peers: Peers) -> str:
        with public_seed(3):
            model = build(layers())
        confine(model, seed=peers.seed)
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
        for step in range(3):
            if step == at and peers.me == "participant-2":
                change(model)
            sums = peers.traffic.sums
            x = torch.ones(4, 3, dtype=next(model.parameters()).dtype)
            try:
                if local:
                    with optimizer.local_steps():
                        inner = torch.optim.SGD(model.parameters(), lr=0.1)
                        model(x).mean().backward()
                        inner.step()
                        model.eval()
                else:
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    model.eval()
                    optimizer.step()
            except CGDError as error:
                assert peers.traffic.sums == sums
                return str(error)
        return ""

    with local_peers(3) as members:
        return members.run(work)


def write_frozen(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)


def replace_frozen_data(model: nn.Sequential) -> None:
    weight = model.get_parameter("0.weight")
    weight.data = weight.data + 1


def write_frozen_data(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data += 1


def load_other(model: nn.Sequential) -> None:
    own = {name: each + 1 if name.startswith("0.") else each for name, each in model.state_dict().items()}
    model.load_state_dict(own)


@pytest.mark.parametrize(
    ("change", "layers", "at", "name"),
    [
        (nn.Module.train, lambda: nn.BatchNorm1d(3), 0, "buffer 1.running_mean"),
        (nn.Module.train, lambda: nn.BatchNorm1d(3), 1, "buffer 1.num_batches_tracked"),
        (nn.Module.train, lambda: Statistics(persistent=True), 1, "buffer 1.mean"),
        (write_frozen, nn.Identity, 1, "frozen parameter 0.weight"),
        (replace_frozen_data, nn.Identity, 1, "frozen parameter 0.weight"),
        (write_frozen_data, nn.Identity, 0, "frozen parameter 0.weight"),
        (load_other, nn.Identity, 2, "frozen parameter 0.weight"),
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_change_is_reported_before_the_sum(
    change: Callable[[nn.Sequential], object], layers: Callable[[], nn.Module], at: int, name: str, local: bool
) -> None:
    errors = train(change, layers, at=at, local=local)
    assert errors[1].startswith(f"the {name} has changed since cgd.confine; it is not summed")
    assert "Put its values back" in errors[1]
    assert all("participant-2: aborted" in errors[i] for i in (0, 2))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))


def old_spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        (nn.Module.train, lambda: Statistics(persistent=False)),
        (nn.Module.train, spectral),
        (nn.Module.train, old_spectral),
        (lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())), lambda: nn.BatchNorm1d(3)),
    ],
    ids=["temporary", "spectral norm", "old spectral norm", "same values"],
)
def test_what_may_change_is_accepted(
    change: Callable[[nn.Sequential], object], layers: Callable[[], nn.Module]
) -> None:
    assert train(change, layers) == [""] * 3


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.half, nn.Module.bfloat16])
def test_model_may_be_converted_after_confine(convert: Callable[[nn.Module], nn.Module]) -> None:
    def work(peers: Peers) -> None:
        model = build()
        confine(model, seed=peers.seed)
        convert(model)
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3, dtype=next(model.parameters()).dtype)).mean().backward()
            optimizer.step()

    with local_peers(3) as members:
        members.run(work)


def test_layer_may_be_trained_later_and_frozen_again() -> None:
    def work(peers: Peers) -> None:
        model = build()
        confine(model, seed=peers.seed)
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
        for step in range(3):
            model[0].requires_grad_(step == 1)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).mean().backward()
            optimizer.step()

    with local_peers(3) as members:
        members.run(work)


def test_model_is_not_kept_in_memory() -> None:
    model = build()
    confine(model)
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None
