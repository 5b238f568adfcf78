"""Adapting a trained model to our own records."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from cgd.tabular.adaptation import METHODS, STEPS, STEPS_BETWEEN, adapt
from cgd.tabular.training_loop import EncodedDataset

SEED = b"a" * 32


def own_records(rows: int = 200) -> EncodedDataset:
    """Records of which three quarters are of the second class, whatever their features are."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    return EncodedDataset(x, (torch.arange(rows) % 4 > 0).long(), torch.ones(rows))


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def changed(before: nn.Module, after: nn.Module) -> list[str]:
    weights = after.state_dict()
    return [name for name, each in before.state_dict().items() if not torch.equal(each, weights[name])]


@pytest.mark.parametrize(
    ("method", "names"), [("intercept", ["2.bias"]), ("weights", ["0.weight", "0.bias", "2.weight", "2.bias"])]
)
def test_method_changes_its_parameters_and_lowers_the_loss(method: str, names: list[str]) -> None:
    data, model = own_records(), network()
    before = copy.deepcopy(model)
    assert list(adapt(model, data, METHODS[method], SEED)) == list(range(STEPS_BETWEEN, STEPS + 1, STEPS_BETWEEN))
    assert changed(before, model) == names
    losses = [data.losses(each(data.x)).mean().item() for each in (before, model)]
    assert losses[1] < losses[0] - 0.05


def test_intercept_reaches_the_frequencies_of_our_records() -> None:
    """From a model that predicts equal frequencies, and nothing else to learn."""
    data = own_records(400)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    list(adapt(model, data, METHODS["intercept"], SEED))
    assert model(data.x).softmax(1).mean(0)[1].item() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_adaptation_is_repeatable_also_with_dropout_and_for_fewer_steps(method: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    data, first, second = own_records(), build(), build()
    torch.manual_seed(4)
    state = torch.get_rng_state()
    for steps in adapt(first, data, METHODS[method], SEED):
        if steps == 20:
            break
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)  # as in another process
    assert list(adapt(second, data, METHODS[method], SEED, steps=20))[-1] == 20
    assert changed(first, second) == []


def test_network_without_a_last_bias_has_no_intercept() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    assert list(adapt(model, own_records(), METHODS["intercept"], SEED)) == []
    assert list(adapt(model, own_records(0), METHODS["weights"], SEED)) == []


def test_adaptation_stops_at_the_end_of_its_time() -> None:
    assert list(adapt(network(), own_records(), METHODS["weights"], SEED, end=time.monotonic() - 1)) == [STEPS_BETWEEN]
