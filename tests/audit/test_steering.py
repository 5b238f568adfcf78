"""A colluder moves the displacement of everybody to a target, whatever the rule of the optimiser is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd.audit.steering import Steering, speed
from cgd.optim.displacement import AdamRule, SGDRule

if TYPE_CHECKING:
    from cgd.optim.displacement import UpdateRule

RULES: dict[str, UpdateRule] = {"sgd": SGDRule(0.5), "momentum": SGDRule(0.1, momentum=0.9), "adam": AdamRule(0.01)}


def distances(rule: UpdateRule, rounds: int, limit: float = 4.0) -> list[float]:
    """Return the largest distance from the target after each round; the others add gradients that vary."""
    random = torch.Generator().manual_seed(0)
    target = torch.randn(50, generator=random) / 2
    displacement, state, found = torch.zeros(50), dict[str, Any](), []
    steering = Steering(lambda _: rule, limit)
    for number in range(rounds):
        added = steering.vector(number, displacement - target)
        assert float(added.abs().max()) <= limit
        rule.move(displacement, added + 0.02 * torch.randn(50, generator=random), state)
        found.append(float((displacement - target).abs().max()))
    assert float(target.abs().max()) > 1
    return found


@pytest.mark.parametrize("name", RULES)
def test_target_is_reached_and_kept_although_others_add_gradients(name: str) -> None:
    found = distances(RULES[name], 250)
    assert max(found[-50:]) < 0.05


@pytest.mark.parametrize("name", RULES)
def test_no_weight_moves_faster_than_the_speed(name: str) -> None:
    rule, limit = RULES[name], 4.0
    displacement, state = torch.zeros(1), dict[str, Any]()
    for _ in range(400):
        rule.move(displacement, torch.full((1,), limit), state)
    assert abs(float(displacement)) / 400 == pytest.approx(speed(rule, limit), rel=0.05)
