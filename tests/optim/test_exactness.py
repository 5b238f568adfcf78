"""CGD with equal origins is centralised gradient descent, up to the rounding errors of the fixed point."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cgd import ConfinedSGD, FixedPoint, Peers, confine, local_peers
from cgd.secagg.messages import MASKINGS, Masking


@pytest.mark.slow
@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("bound", [16.0, 1000.0])
def test_equal_origins_follow_centralised_descent_within_a_derived_tolerance(masking: Masking, bound: float) -> None:
    """Linear regression with α ≤ 1/L: a step of gradient descent then never enlarges a distance.

    A sum is off by at most m/2 units of the fixed point in each of d coordinates, so a step adds at most
    α·√d·m·resolution/2 to the distance between the two paths, and T steps at most T times that. The ring decides the
    precision here: the model is in double precision, whose own rounding adds a billionth of that and is allowed for.
    """
    count, samples, features, steps = 5, 20, 12, 200
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * samples, features, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(features, 1, generator=generator, dtype=torch.float64)
    hessian = 2 * x.T @ x / len(x)
    lr = 1.0 / float(torch.linalg.eigvalsh(hessian).max())
    start = nn.Linear(features, 1, bias=False, dtype=torch.float64)
    confine(start, delta=0.1, seed=bytes(32))

    def work(peers: Peers, i: int) -> torch.Tensor:
        model = copy.deepcopy(start)
        own = slice(samples * i, samples * (i + 1))
        optimizer = ConfinedSGD(model.parameters(), lr, peers=peers, samples=samples)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[own]), y[own]).backward()
            optimizer.step()
        return model.weight.detach()

    with local_peers(count, bound=bound, masking=masking) as members:
        confined = members.run(work, range(count))
    central = copy.deepcopy(start)
    optimizer = torch.optim.SGD(central.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(central(x), y).backward()
        optimizer.step()

    fixed_point = FixedPoint.for_weighted_sum(addends=count, bound=bound)
    tolerance = steps * lr * features**0.5 * count * fixed_point.resolution / 2 * (1 + 1e-6)
    distances = [float(torch.linalg.vector_norm(own - central.weight.detach())) for own in confined]
    assert max(distances) <= tolerance
    assert min(distances) > 0  # the fixed point rounds: the two results come from different code
    assert float(torch.linalg.vector_norm(central.weight.detach() - start.weight.detach())) > 1000 * tolerance
