"""Nesterov's momentum and AMSGrad: options that earlier versions did not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cgd import ConfinedAdam, ConfinedOptimizer, ConfinedSGD, InputError, Peers, SettingsError, local_peers
from cgd.optim.displacement import AdamRule, SGDRule

GRADIENTS = (1.0, 4.0, 0.5, -0.25, 0.125, 2.0)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (SGDRule(0.1, 0.9), SGDRule(0.1, 0.9, nesterov=True)),
        (AdamRule(0.1, (0.5, 0.5)), AdamRule(0.1, (0.5, 0.5), amsgrad=True)),
    ],
)
def test_option_changes_the_steps(usual: Any, odd: Any) -> None:
    """Otherwise a comparison with torch could not fail."""
    ends = []
    for rule in (usual, odd):
        displacement, state = torch.zeros(1), dict[str, Any]()
        for gradient in GRADIENTS:
            rule.move(displacement, torch.tensor([gradient]), state)
        ends.append(float(displacement))
    assert abs(ends[0] - ends[1]) > 0.01


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ConfinedSGD, {"momentum": "0.9"}, "momentum is '0.9'; it must be a finite number"),
        (ConfinedSGD, {"momentum": None}, "momentum is None"),
        (ConfinedSGD, {"momentum": 0.9, "nesterov": "false"}, "nesterov is 'false'; it must be True or False"),
        (ConfinedAdam, {"betas": 0.9}, r"betas are 0.9; they must be two numbers, such as \(0.9, 0.999\)"),
        (ConfinedAdam, {"betas": "ab"}, "betas are 'ab'"),
        (ConfinedAdam, {"betas": (0.9, [1])}, r"one of betas is \[1\]; it must be a finite number"),
        (ConfinedAdam, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        (ConfinedAdam, {"eps": "small"}, "eps is 'small'"),
        (ConfinedAdam, {"eps": 10**400}, "it must be a finite number"),
        (ConfinedAdam, {"amsgrad": float("nan")}, "amsgrad is nan; it must be True or False"),
    ],
)
def test_option_of_another_type_is_rejected(
    kind: type[ConfinedOptimizer], options: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"lr": 0.1, "samples": 1, **options}
    with local_peers(3) as members, pytest.raises(InputError, match=message):
        kind([nn.Parameter(torch.zeros(1))], peers=members[0], **arguments)


def test_nesterov_needs_a_momentum() -> None:
    with local_peers(3) as members, pytest.raises(InputError, match="nesterov is True and momentum is 0"):
        ConfinedSGD([nn.Parameter(torch.zeros(1))], 0.1, peers=members[0], samples=1, nesterov=True)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (ConfinedSGD, {"momentum": 0.5, "nesterov": True}, "nesterov 1.0"),
        (ConfinedAdam, {"amsgrad": True}, "amsgrad 1"),
    ],
)
def test_different_option_is_reported_and_is_not_part_of_the_usual_context(
    kind: type[ConfinedOptimizer], options: dict[str, Any], text: str
) -> None:
    """Members of earlier versions have the same context unless the option is used."""
    name = "nesterov" if kind is ConfinedSGD else "amsgrad"

    def work(peers: Peers) -> str:
        parameter = nn.Parameter(torch.zeros(1))
        own = options if peers.me == "participant-3" else options | {name: False}
        optimizer: Any = kind([parameter], lr=0.1, peers=peers, samples=1, **own)  # type: ignore[call-arg]
        parameter.grad = torch.ones(1)
        try:
            optimizer.step()
        except SettingsError as error:
            return str(error)
        return "no error"

    with local_peers(3) as members:
        errors = members.run(work)
    for error in errors:
        assert error.startswith("participant-3: ")
        its, _, usual = error.partition(" instead of ")
        assert text in its
        assert name not in usual


def test_state_of_an_earlier_version_is_loaded() -> None:
    def work(peers: Peers) -> None:
        optimizers = [
            ConfinedSGD([nn.Parameter(torch.zeros(1))], 0.1, peers=peers, samples=1, momentum=0.5) for _ in range(2)
        ]
        saved = optimizers[0].state_dict()
        for group in saved["param_groups"]:
            del group["nesterov"]
        optimizers[1].load_state_dict(saved)
        optimizers[1].step()

    with local_peers(3) as members:
        members.run(work)
