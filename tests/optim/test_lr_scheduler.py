from __future__ import annotations

import pytest
import torch

from cgd import InputError, InverseSquareLR


def rates(count: int, lr: float = 0.5, **settings: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = InverseSquareLR(optimizer, **settings)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_mu_zero_keeps_the_lr_constant() -> None:
    assert rates(10, mu=0.0, steps=5) == [0.5] * 10


@pytest.mark.parametrize("mu", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("hold", [0, 7])
def test_lr_follows_the_papers_formula(mu: float, hold: int) -> None:
    steps = 50
    alpha = 0.5 * (1 + mu * steps) ** 2  # so that α/(k + μT)² is 0.5 at k = 1
    expected = [0.5] * hold + [alpha / (k + mu * steps) ** 2 for k in range(1, steps + 1)]
    assert rates(hold + steps, mu=mu, steps=steps, hold=hold) == pytest.approx(expected, rel=1e-12)


def test_schedule_resumes_from_a_state_dict() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = InverseSquareLR(optimizer, mu=0.1, steps=10)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    resumed = InverseSquareLR(other, mu=0.1, steps=10)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for pair in ((optimizer, schedule), (other, resumed)):
        pair[0].step()
        pair[1].step()
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "settings",
    [
        {"mu": -1, "steps": 5},
        {"mu": "fast", "steps": 5},
        {"mu": 0.1, "steps": 0},
        {"mu": 0.1, "steps": float("nan")},
        {"mu": 0.1, "steps": 1, "hold": -1},
        {"mu": 0.1, "steps": 1, "hold": 1.5},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, float]) -> None:
    with pytest.raises(InputError):
        rates(1, **settings)
