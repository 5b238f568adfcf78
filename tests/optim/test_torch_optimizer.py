"""Optimisers of torch over the displacement."""

from __future__ import annotations

import copy
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from cgd import (
    ConfinedAdam,
    ConfinedOptimizer,
    ConfinedSGD,
    ConfinedTorchOptimizer,
    InputError,
    Peers,
    RemoteProtocolError,
    confine,
    local_peers,
)
from cgd.optim.recovery import TensorWriter, common_state, restore
from cgd.optim.torch_optimizer import TorchRule
from support.training import Network, data, descend

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.25}),
    (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}),
    (torch.optim.Adam, {"lr": 0.125, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.125, "weight_decay": 0.5}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {"lr": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Adafactor, {"lr": 0.5}),
    (torch.optim.Muon, {"lr": 0.5}),
]
IDS = [f"{kind.__name__} {number}" for number, (kind, _) in enumerate(KINDS)]
every_kind = pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)


def gradients(step: int) -> torch.Tensor:
    """Return multiples of 2⁻⁸, so that their weighted sums are exact."""
    numbers = torch.randint(-512, 512, (3, 2), generator=torch.Generator().manual_seed(step))
    return numbers * 2.0**-8


@every_kind
def test_displacement_has_the_bits_of_torchs_own_optimiser(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """On the opened sums, from zero: whatever the origin is, the optimiser reads the displacement only."""

    def work(peers: Peers, samples: int) -> list[torch.Tensor]:
        parameter = nn.Parameter(torch.full((3, 2), float(samples)))
        optimizer = ConfinedTorchOptimizer([parameter], kind, peers=peers, samples=samples, **options)
        ends = []
        for step in range(6):
            parameter.grad = gradients(step)
            optimizer.step()
            ends.append(optimizer.displacement().reshape(3, 2))
        return ends

    with local_peers(3) as members:
        results = members.run(work, [1, 1, 2])  # weights of 1/4 and 1/2 are exact
    reference = torch.zeros(3, 2)
    plain = kind([reference], **options)
    for step in range(6):
        reference.grad = gradients(step)
        plain.step()
        for ends in results:
            assert torch.equal(ends[step], reference)
    assert reference.abs().max() > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_kind
def test_state_dict_resumes_bit_for_bit(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    def work(peers: Peers) -> None:
        one, other = (nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(2))
        optimizer, resumed = (
            ConfinedTorchOptimizer([each], kind, peers=peers, samples=1, **options) for each in (one, other)
        )
        for step in range(3):
            one.grad = gradients(step).to(dtype)
            optimizer.step()
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 6):
            for parameter, each in ((one, optimizer), (other, resumed)):
                parameter.grad = gradients(step).to(dtype)
                each.step()
        assert torch.equal(optimizer.displacement(), resumed.displacement())

    with local_peers(3) as members:
        members.run(work)


def test_weight_decay_pulls_the_displacement_and_not_the_weights() -> None:
    def work(peers: Peers, origin: float) -> tuple[float, float]:
        parameter = nn.Parameter(torch.tensor([origin]))
        groups: list[dict[str, Any]] = [{"params": [parameter], "weight_decay": 0.5}]
        optimizer = ConfinedTorchOptimizer(groups, torch.optim.SGD, peers=peers, samples=1, lr=1.0)
        for gradient in (-1.0, 0.0):
            parameter.grad = torch.tensor([gradient])
            optimizer.step()
        return float(optimizer.displacement()), float(parameter.detach())

    with local_peers(3) as members:
        results = members.run(work, [0.0, 10.0, -3.0])
    for (displacement, weight), origin in zip(results, [0.0, 10.0, -3.0], strict=True):
        assert displacement == pytest.approx(0.5, abs=1e-6)
        assert weight == pytest.approx(origin + 0.5, abs=1e-6)


# Agreement.


def errors_of(build: Callable[[Peers, nn.Parameter], ConfinedTorchOptimizer], steps: int = 1) -> list[str]:
    def work(peers: Peers) -> str:
        parameter = nn.Parameter(torch.zeros(2, 2))
        optimizer = build(peers, parameter)
        for step in range(steps):
            parameter.grad = torch.ones(2, 2)
            before = optimizer.displacement()
            try:
                optimizer.step()
            except RemoteProtocolError as error:
                assert torch.equal(optimizer.displacement(), before)
                return str(error)
            if step == 0 and peers.me == "participant-3":
                optimizer.state[parameter]["exp_avg"][0, 0] += 2.0**-20
        return "no error"

    with local_peers(3) as members:
        return members.run(work)


def test_different_optimisers_of_torch_are_reported() -> None:
    def build(peers: Peers, parameter: nn.Parameter) -> ConfinedTorchOptimizer:
        kind = torch.optim.RAdam if peers.me == "participant-2" else torch.optim.NAdam
        return ConfinedTorchOptimizer([parameter], kind, peers=peers, samples=1, lr=0.1)

    errors = errors_of(build)
    assert all("participant-2: " in error and "ConfinedTorchOptimizer(RAdam) with" in error for error in errors)


def test_different_options_are_reported() -> None:
    def build(peers: Peers, parameter: nn.Parameter) -> ConfinedTorchOptimizer:
        adjust = "original" if peers.me == "participant-2" else None
        return ConfinedTorchOptimizer([parameter], torch.optim.Muon, peers=peers, samples=1, adjust_lr_fn=adjust)

    errors = errors_of(build)
    assert all("adjust_lr_fn 'original'" in error and "adjust_lr_fn None" in error for error in errors)


def test_state_that_drifted_is_reported_before_anything_is_opened() -> None:
    def build(peers: Peers, parameter: nn.Parameter) -> ConfinedTorchOptimizer:
        return ConfinedTorchOptimizer([parameter], torch.optim.AdamW, peers=peers, samples=1, lr=0.1)

    errors = errors_of(build, steps=2)
    for error in errors:
        assert error.startswith("participant-3: ")
        assert "torch computed other bits there: use the same processor and version of torch everywhere" in error


# Restored states.


def stored(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors that are stored after a step, and the layout."""
    rule, parameter = TorchRule(kind, options), nn.Parameter(torch.zeros(3, 2))
    displacement, state = torch.zeros(3, 2), dict[str, Any]()
    rule.move(displacement, torch.ones(3, 2), state)
    states: dict[torch.Tensor, dict[str, Any]] = {
        parameter: state | {"displacement": displacement, "origin": torch.ones(3, 2)}
    }
    return common_state([parameter], states, [9, 1, 5, 6, 7]), rule.layout(parameter)


@every_kind
def test_stored_state_is_restored(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    tensors, layout = stored(kind, options)
    parameter = nn.Parameter(torch.zeros(3, 2))
    states: dict[torch.Tensor, dict[str, Any]] = {parameter: {"origin": torch.full((3, 2), 4.0)}}
    restore(TensorWriter().to_bytes(tensors), [parameter], states, [layout])
    assert torch.equal(states[parameter]["origin"], torch.full((3, 2), 4.0))
    for name, tensor in tensors.items():
        if name != "counts":
            assert torch.equal(states[parameter][name.partition(".")[2]], tensor)


@pytest.mark.parametrize(
    "changed",
    [
        {"0.origin": torch.zeros(3, 2)},
        {"0.momentum_buffer": torch.zeros(3, 2)},
        {"0.exp_avg": torch.zeros(2, 3)},
        {"0.exp_avg": torch.zeros(3, 2, dtype=torch.float64)},
        {"0.step": torch.zeros(1)},
        {"0.exp_avg": None},
    ],
)
def test_forged_state_is_rejected(changed: dict[str, torch.Tensor | None]) -> None:
    tensors, layout = stored(torch.optim.Adam, {})
    forged = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    parameter = nn.Parameter(torch.zeros(3, 2))
    states: dict[torch.Tensor, dict[str, Any]] = {parameter: {"origin": torch.ones(3, 2)}}
    with pytest.raises(InputError, match="of other names, types or shapes; restore a state folder"):
        restore(safetensors.torch.save(forged), [parameter], states, [layout])
    assert states[parameter].keys() == {"origin"}
    assert torch.equal(states[parameter]["origin"], torch.ones(3, 2))


# Refusals.


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


class CountsInANumber(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["count"] = 1
        return super().step(closure)


class NeedsSteps(torch.optim.SGD):
    def __init__(self, params: Any, steps: int = 3) -> None:
        super().__init__(params, lr=0.1)
        self.defaults["steps"] = steps


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS needs a closure"),
        (torch.optim.SparseAdam, {}, "SparseAdam does not support dense gradients.* Use an optimiser for dense"),
        (torch.optim.Adam, {"fused": True}, "fused is True; it changes how torch computes"),
        (torch.optim.Adam, {"foreach": True}, "foreach is True"),
        (torch.optim.Adam, {"capturable": True}, "capturable is True"),
        (torch.optim.SGD, {"differentiable": True}, "differentiable is True"),
        (torch.optim.Adam, {"lr": -1.0}, "lr is -1.0; it must be a finite number, at least 0"),
        (torch.optim.Adam, {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        (torch.optim.Muon, {}, r"Muon cannot be used for a parameter of shape \(4,\)"),
        ("AdamW", {}, "the optimiser is 'AdamW'; it must be a class"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), {}, "the optimiser is of type SGD; it must be a class"),
        (ConfinedTorchOptimizer, {}, "it must be a class such as torch.optim.AdamW"),
        (CountsInItsGroup, {}, "changes the options of its parameter group in a step"),
        (CountsInANumber, {}, "'count' of type int; only tensors"),
        (NeedsSteps, {}, "has an option 'steps', a name that cgd uses"),
    ],
)
def test_optimisers_that_cannot_be_used_are_rejected(kind: Any, options: dict[str, Any], message: str) -> None:
    with local_peers(3) as members, pytest.raises(InputError, match=message):
        ConfinedTorchOptimizer([nn.Parameter(torch.zeros(4))], kind, peers=members[0], samples=1, **options)


def test_group_with_an_invalid_option_is_rejected_and_not_added() -> None:
    with local_peers(3) as members:
        optimizer = ConfinedTorchOptimizer(
            [nn.Parameter(torch.zeros(4))], torch.optim.Adam, peers=members[0], samples=1
        )
        for option in ({"lr": -1.0}, {"fused": True}):
            with pytest.raises(InputError):
                optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2)), **option})
        assert len(optimizer.param_groups) == 1


WRONG_RATES = [math.inf, -math.inf, math.nan, -0.1, True, "0.1", torch.tensor(math.inf), torch.tensor([0.1, 0.2])]


@pytest.mark.parametrize("lr", WRONG_RATES, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Rprop, ConfinedSGD, ConfinedAdam])
def test_wrong_lr_is_rejected_at_construction(kind: Any, lr: Any) -> None:
    def build(peers: Peers, lr: Any) -> Any:
        parameter = nn.Parameter(torch.zeros(2))
        if issubclass(kind, ConfinedOptimizer):
            return kind([parameter], lr=lr, peers=peers, samples=1)
        return ConfinedTorchOptimizer([parameter], kind, peers=peers, samples=1, lr=lr)

    with local_peers(3) as members:
        with pytest.raises(InputError, match=re.escape(f"lr is {lr!r}; it must be a finite number, at least 0")):
            build(members[0], lr)
        for right in (0, 1, 0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5)):
            build(members[0], right)


@pytest.mark.parametrize("lr", WRONG_RATES, ids=str)
def test_wrong_lr_of_a_scheduler_stops_the_step_before_its_sum(lr: Any) -> None:
    def work(peers: Peers) -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = ConfinedTorchOptimizer([parameter], torch.optim.AdamW, peers=peers, samples=1, lr=1.0)
        factors = {1: lr} if isinstance(lr, float) else {}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors.get(step, 1.0))
        parameter.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
        if not factors:
            optimizer.param_groups[0]["lr"] = lr
        before, state = optimizer.displacement(), copy.deepcopy(dict(optimizer.state[parameter]))
        sums, sent = peers.traffic.sums, peers.traffic.bytes_sent
        with pytest.raises(InputError, match="lr is .*; it must be a finite number, at least 0"):
            optimizer.step()
        assert torch.equal(optimizer.displacement(), before)
        assert all(torch.equal(value, state[key]) for key, value in optimizer.state[parameter].items())
        assert peers.traffic.sums == sums
        assert peers.traffic.bytes_sent - sent < 1000  # the messages that end the sum
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        assert float(optimizer.displacement()[0]) < float(before[0])

    with local_peers(3) as members:
        members.run(work)


def test_option_that_becomes_invalid_stops_the_step_before_its_sum() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        confine(model, start="zeros")
        optimizer = ConfinedTorchOptimizer(model.parameters(), torch.optim.AdamW, peers=peers, samples=8)
        descend(optimizer, model, *data(0), steps=1)
        before = optimizer.displacement()
        optimizer.param_groups[0]["betas"] = (0.9, 1.5)
        with pytest.raises((InputError, RemoteProtocolError), match=r"Invalid beta|aborted"):
            descend(optimizer, model, *data(0), steps=1)
        assert torch.equal(optimizer.displacement(), before)

    with local_peers(3) as members:
        members.run(work)


class PassesAll(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class PassesAllToAdamW(torch.optim.AdamW):
    def __init__(self, params: Any, *, weight_decay: float = 0.5, **options: Any) -> None:
        super().__init__(params, weight_decay=weight_decay, **options)


class OwnDefaults(torch.optim.Optimizer):
    """A class as users write them; subclasses change the factor of a step."""

    def __init__(self, params: Any, lr: float = 0.25, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale

    def factor(self, group: dict[str, Any]) -> float:
        return self.scale * float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            factor = self.factor(group)
            for parameter in group["params"]:
                parameter -= parameter.grad * factor
        return closure


class ByKeyword(torch.optim.Optimizer):
    """Its constructor names no option at all."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.25, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= parameter.grad * group["lr"]
        return closure


class Doubled(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.25) -> None:
        super().__init__(params, lr=2 * lr)


class WarmsUp(OwnDefaults):
    def factor(self, group: dict[str, Any]) -> float:
        self.t: float = getattr(self, "t", 0) + 1
        return super().factor(group) * min(1.0, self.t / 10)


class CountsForLater(OwnDefaults):
    def factor(self, group: dict[str, Any]) -> float:
        self.t: float = getattr(self, "t", 0) + 1
        return super().factor(group) * (1 if self.t < 1000 else 0.5)


class CountsInGlobalState(OwnDefaults):
    def factor(self, group: dict[str, Any]) -> float:
        state: dict[Any, Any] = self.state
        count = state["global"] = state.get("global", 0) + 1
        return super().factor(group) * (1 if count < 1000 else 0.5)


class Normalises(OwnDefaults):
    def factor(self, group: dict[str, Any]) -> float:
        squares = torch.stack([each.grad.square().sum() for each in group["params"]])
        return super().factor(group) / float(squares.sum().sqrt())


class Random(OwnDefaults):
    def factor(self, group: dict[str, Any]) -> float:
        return super().factor(group) * float(torch.rand(()))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PassesAll, {"lr": 0.25, "momentum": 0.5}),
        (PassesAllToAdamW, {"lr": 0.25}),
        (OwnDefaults, {"lr": 0.5}),
        (ByKeyword, {"lr": 0.5}),
    ],
)
def test_subclass_takes_its_own_steps_with_a_scheduler(kind: Any, options: dict[str, Any]) -> None:
    def descend(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            parameter.grad = gradients(step)
            optimizer.step()
            schedule.step()

    def work(peers: Peers, samples: int) -> torch.Tensor:
        parameter = nn.Parameter(torch.full((3, 2), float(samples)))
        optimizer = ConfinedTorchOptimizer([parameter], kind, peers=peers, samples=samples, **options)
        descend(parameter, optimizer)
        return optimizer.displacement().reshape(3, 2)

    reference = torch.zeros(3, 2)
    descend(reference, kind([reference], **options))
    with local_peers(3) as members:
        assert all(torch.equal(each, reference) for each in members.run(work, [1, 1, 2]))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Doubled, {"lr": 0.125}, "Doubled cannot be used: it takes another step 1 than"),
        (Doubled, {"lr": 0.0}, "Doubled cannot be used: it takes another step 1 than"),
        (WarmsUp, {}, "WarmsUp cannot be used: it takes another step 2 than"),
        (CountsForLater, {}, "its attribute 't' changes in a step.* keeps its counters in state"),
        (CountsInGlobalState, {}, "its state has 'global', which belongs to no parameter"),
        (Normalises, {}, "it takes another step 1 than .* a norm; or cgd's max_norm="),
        (Random, {}, "it takes another step 1 than .* draws no random numbers"),
        (OwnDefaults, {"scale": 3.0}, "does not have its option 'scale' both in its constructor and in `defaults`"),
        (ByKeyword, {}, "its option 'lr' both .*give it here if the constructor takes it by"),
        (torch.optim.Adam, {"betas": {"a": 1}}, "the option betas of Adam is of type dict; .* must be a number"),
        (torch.optim.Adam, {"betas": (0.5, [None, object()])}, "the option betas of Adam is of type tuple"),
        (torch.optim.Adam, {"betas": ()}, r"Adam cannot be used for a parameter .* with \{'betas': \(\)\}"),
        (torch.optim.SGD, {"lr": {}}, r"lr is \{\}; it must be a finite number"),
    ],
)
def test_options_and_memory_that_would_be_lost_are_rejected(kind: Any, options: dict[str, Any], message: str) -> None:
    with local_peers(3) as members, pytest.raises(InputError, match=message):
        ConfinedTorchOptimizer([nn.Parameter(torch.zeros(2, 2))], kind, peers=members[0], samples=1, **options)


def test_option_of_a_group_that_cannot_be_compared_is_rejected() -> None:
    with local_peers(3) as members:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = ConfinedTorchOptimizer([parameter], torch.optim.Adam, peers=members[0], samples=1)
        with pytest.raises(InputError, match="the option weight_decay of Adam is of type dict"):
            optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2)), "weight_decay": {}})
        optimizer.param_groups[0]["eps"] = {}
        with pytest.raises(InputError, match="the option eps of Adam is of type dict"):
            optimizer.step()
