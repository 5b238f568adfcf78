"""Running statistics of normalisation layers are not summed: a confined model must not change them."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd import CGDError, ConfinedSGD, InputError, Peers, confine, local_peers, public_seed
from cgd.optim.running_statistics import changes_statistics

if TYPE_CHECKING:
    from collections.abc import Callable


def switched_off(layer: nn.Module) -> nn.Module:
    layer.track_running_stats = False  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: nn.BatchNorm1d(4), r"0 \(BatchNorm1d"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm2d(4)), r"0\.1 \(BatchNorm2d"),
        (lambda: nn.BatchNorm1d(4, affine=False), r"0 \(BatchNorm1d"),
        (lambda: nn.SyncBatchNorm(4), r"0 \(SyncBatchNorm"),
        (lambda: nn.InstanceNorm1d(4, track_running_stats=True), r"0 \(InstanceNorm1d"),
        # torch updates the statistics of this one in every pass, also in evaluation mode.
        (lambda: switched_off(nn.InstanceNorm2d(4, track_running_stats=True).eval()), r"0 \(InstanceNorm2d"),
    ],
)
def test_layer_that_changes_its_statistics_is_refused(build: Callable[[], nn.Module], name: str) -> None:
    model = nn.Sequential(build(), nn.Linear(4, 1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=rf"module {name}\) .*nn.GroupNorm or nn.LayerNorm.*eval\(\)"):
        confine(model)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_model_that_is_such_a_layer_itself_is_refused() -> None:
    with pytest.raises(InputError, match=r"the model itself \(BatchNorm1d\)"):
        confine(nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.BatchNorm1d(4).eval(),
        lambda: nn.BatchNorm1d(4).eval().requires_grad_(False),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: switched_off(nn.BatchNorm1d(4)),
        lambda: nn.InstanceNorm1d(4, affine=True),
        lambda: nn.InstanceNorm1d(4, track_running_stats=True).eval(),
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.LayerNorm(4),
    ],
)
def test_layer_that_does_not_change_its_statistics_is_confined(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(build(), nn.Linear(4, 1))
    confine(model)
    layer = model[0]
    buffers = {name: values.clone() for name, values in layer.named_buffers()}
    layer(torch.randn(6, 4, 4))
    assert all(torch.equal(values, buffers[name]) for name, values in layer.named_buffers())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("tracked", "later"), [(True, True), (True, False), (False, False)])
def test_what_changes_statistics_is_what_torch_changes(
    kind: type[nn.BatchNorm1d], training: bool, tracked: bool, later: bool
) -> None:
    layer = kind(4, track_running_stats=tracked).train(training)
    layer.track_running_stats = later
    before = None if layer.running_mean is None else layer.running_mean.clone()
    expected = changes_statistics(layer)
    layer(torch.randn(6, 4, 4) + 3)
    assert expected == (before is not None and not torch.equal(layer.get_buffer("running_mean"), before))


def pretrained() -> nn.Sequential:
    with public_seed(7):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    return model


@pytest.mark.parametrize("local", [False, True])
def test_layer_in_training_mode_is_refused_before_the_sum(local: bool) -> None:
    """Many programs call `model.train()` in each epoch, which puts all layers into training mode."""

    def work(peers: Peers) -> tuple[str, int, float]:
        model = pretrained()
        confine(model, seed=peers.seed)
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4, 3)).mean().backward()
            optimizer.step()

        step()
        first, sums, outcome = optimizer.displacement(), peers.traffic.sums, "no error"
        kept = copy.deepcopy(model[1].state_dict())
        if peers.me == "participant-2":
            model.train()
        try:
            if local:
                with optimizer.local_steps():
                    nn.init.zeros_(next(model.parameters()))
            else:
                step()
        except CGDError as error:
            outcome = str(error)
        assert torch.equal(optimizer.displacement(), first)
        sums = peers.traffic.sums - sums
        model[1].eval()
        model[1].load_state_dict(kept)  # the refused pass has changed the statistics
        step()
        return outcome, sums, float((optimizer.displacement() - first).abs().max())

    with local_peers(3) as members:
        results = members.run(work)
    assert "module 1 (BatchNorm1d)" in results[1][0]
    assert "after every model.train()" in results[1][0]
    assert all("participant-2: aborted" in results[other][0] for other in (0, 2))
    assert all(sums == 0 and moved > 0 for _, sums, moved in results)


def test_copy_of_a_confined_model_may_be_trained_alone_in_training_mode() -> None:
    model = pretrained()
    confine(model)
    for alone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        alone.train()
        alone(torch.randn(5, 3))
        assert int(alone[1].get_buffer("num_batches_tracked")) == 1
