"""Parameters on a device: gradients cross to the CPU once, sums cross back once, and the bits are those of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cgd import Peers, confine, local_peers
from cgd.optim.flat_vectors import common_states_on_cpu, join, split_sum
from support.fake_device import FAKE, FakeDevice, FakeDeviceTensor
from support.training import Network, data, descend, makers

if TYPE_CHECKING:
    from cgd import ConfinedOptimizer

STEPS = 3


def take_steps(optimizer: ConfinedOptimizer, parameters: list[torch.Tensor]) -> None:
    for step in range(STEPS):
        for number, parameter in enumerate(parameters):
            values = torch.full(parameter.shape, 0.1 * (number + 1) + step, dtype=parameter.dtype)
            parameter.grad = values.to(parameter.device)
        optimizer.step()


def shapes(count: int) -> list[tuple[int, ...]]:
    return [(number % 3 + 1, 2) for number in range(count)]


@pytest.mark.parametrize("kind", makers)
def test_number_of_transfers_does_not_depend_on_the_number_of_parameters(kind: str) -> None:
    def transfers(peers: Peers, count: int) -> list[tuple[str, int]]:
        with FakeDevice() as device:
            parameters: list[torch.Tensor] = [nn.Parameter(torch.zeros(shape, device=FAKE)) for shape in shapes(count)]
            optimizer = makers[kind](parameters, peers=peers, samples=1)
            take_steps(optimizer, parameters)
            assert all(isinstance(optimizer.state[each]["displacement"], FakeDeviceTensor) for each in parameters)
            device.transfers.clear()
            gradients = [torch.ones(shape, device=FAKE) for shape in shapes(count)]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            crossed: list[tuple[str, int]] = device.transfers
            return crossed

    with local_peers(3) as members:
        few, many = (members.run(transfers, [count] * 3)[0] for count in (2, 12))
    assert [direction for direction, _ in few] == [direction for direction, _ in many]
    sizes = [sum(rows * 2 for rows, _ in shapes(count)) for count in (2, 12)]
    for crossed, size in zip((few, many), sizes, strict=True):
        assert crossed.count(("to the device", size)) == 1
        assert [size for direction, size in crossed if direction == "to the device"] == [size]
        assert ("to the CPU", size) in crossed


@pytest.mark.parametrize("kind", makers)
def test_displacement_on_a_device_has_the_bits_of_the_cpu(kind: str) -> None:
    def train(peers: Peers, device: torch.device) -> torch.Tensor:
        with FakeDevice():
            parameters: list[torch.Tensor] = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes(4)]
            optimizer = makers[kind](parameters, peers=peers, samples=1)
            take_steps(optimizer, parameters)
            found = optimizer.displacement()
            assert type(found) is torch.Tensor
            return found

    with local_peers(3) as members:  # one member uses the device: the others compare its state in every step
        mixed = members.run(train, [FAKE, torch.device("cpu"), FAKE])
    assert mixed[0].abs().max() > 0.01
    assert all(torch.equal(mixed[0], each) for each in mixed)


def test_parameters_on_several_devices_are_joined_in_their_order() -> None:
    with FakeDevice() as device:
        here, there = torch.arange(3.0), torch.arange(4.0, dtype=torch.bfloat16).to(FAKE)
        more = torch.arange(2.0, dtype=torch.float64)
        vector = join([there, here, more])
        assert torch.equal(vector, torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1], dtype=torch.float64))
        parts = split_sum(vector, [there, here, more])
        assert [(each.device, each.dtype) for each in parts.values()] == [
            (FAKE, torch.float32),
            (torch.device("cpu"), torch.float32),
            (torch.device("cpu"), torch.float64),
        ]
        assert torch.equal(parts[there].cpu(), torch.arange(4.0))
        device.transfers.clear()
        states: dict[torch.Tensor, dict[str, Any]] = {
            there: {"origin": there, "displacement": there, "mean": there + 1, "powers": (1.0, 1.0)},
            here: {"origin": here, "displacement": here},
        }
        found = common_states_on_cpu([there, here], states)
        assert device.transfers == [("to the CPU", 8)]
        assert found[there].keys() == {"displacement", "mean", "powers"}
        assert torch.equal(found[there]["mean"], torch.arange(1.0, 5.0, dtype=torch.bfloat16))
        assert found[here]["displacement"] is here


DEVICES = [
    name
    for name, available in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()))
    if available
]


@pytest.mark.skipif(not DEVICES, reason="torch finds no CUDA and no MPS device here")
@pytest.mark.parametrize("kind", makers)
def test_member_with_an_accelerator_trains_with_members_without_one(kind: str) -> None:
    """Gradients differ between devices; the displacement, which the members compare in every step, does not."""

    def train(peers: Peers, device: str) -> torch.Tensor:
        model = Network()
        confine(model, start="zeros")
        model.to(device)
        optimizer = makers[kind](model.parameters(), peers=peers, samples=8)
        x, y = data(1)
        descend(optimizer, model, x.to(device), y.to(device), steps=10)
        assert all(each["displacement"].device.type == device for each in optimizer.state.values())
        return optimizer.displacement()

    with local_peers(3) as members:
        found = members.run(train, [DEVICES[0], "cpu", DEVICES[-1]])
    assert all(torch.equal(found[0], each) for each in found)
