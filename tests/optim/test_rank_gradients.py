"""Participants that are jobs of several ranks: one gradient, one weight and one model for all ranks."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import cgd
from cgd.errors import InputError, RangeError, RankError
from support.ranks import NAMES, seed_of, train_on_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 4
SHARES = {"ada": (12, 8), "bob": (10, 10), "cleo": (5, 15)}


def shards(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(20, 4, generator=generator)
    return list(zip(x.split(SHARES[name]), (x.sum(1) > 0).long().split(SHARES[name]), strict=True))


def build(peers: cgd.Peers, samples: int, **options: Any) -> tuple[nn.Module, cgd.ConfinedSGD]:
    with cgd.public_seed(0):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    cgd.confine(model, delta=0.1, seed=seed_of(peers.me))
    return model, cgd.ConfinedSGD(model.parameters(), peers=peers, samples=samples, **{"lr": 0.5, **options})


def set_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()


def average(model: nn.Module, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], shares: Sequence[int]) -> None:
    """Set the mean of the gradients of several batches, as ranks compute it."""
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in model.parameters()]
    for (x, y), samples in zip(parts, shares, strict=True):
        set_gradients(model, x, y)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.double() * (samples / sum(shares))
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total.float()


def train(peers: cgd.Peers) -> torch.Tensor:
    """Train with this rank's records; on one rank with all of them, in two batches."""
    own, rank = shards(peers.me), peers.ranks.rank
    if peers.ranks.size > 1:
        own = own[rank : rank + 1]
    model, optimizer = build(peers, sum(len(x) for x, _ in own), momentum=0.5)
    for _ in range(STEPS):
        average(model, own, [len(x) for x, _ in own])
        optimizer.step()
    return optimizer.displacement()


@pytest.fixture(scope="module")
def ordinary() -> torch.Tensor:
    (digest, *_) = train_on_ranks([1, 1, 1], train)
    return torch.as_tensor(digest[0])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 1)])
def test_members_of_several_ranks_have_the_bits_of_ordinary_members(
    sizes: tuple[int, int, int], ordinary: torch.Tensor
) -> None:
    results = train_on_ranks(sizes, train)
    assert [len(each) for each in results] == list(sizes)
    for displacement in chain.from_iterable(results):
        assert torch.equal(displacement, ordinary)


def test_gradients_that_the_program_has_averaged_are_not_averaged_again(ordinary: torch.Tensor) -> None:
    def with_averages(peers: cgd.Peers) -> torch.Tensor:
        parts = shards("bob")
        if peers.me != "bob":
            return train(peers)
        model, optimizer = build(peers, 10, momentum=0.5)
        for _ in range(STEPS):
            average(model, parts, [10, 10])  # both ranks have these, as DistributedDataParallel makes them
            optimizer.step()
        return optimizer.displacement()

    for displacement in list(chain.from_iterable(train_on_ranks([1, 2, 1], with_averages))):
        assert torch.equal(displacement, ordinary)


def first_step(peers: cgd.Peers, samples: int, seed: bytes | None = None) -> Any:
    """Take a step; rank 0 alone has members that end when it does."""
    with cgd.public_seed(0):
        model = nn.Linear(4, 2)
    cgd.confine(model, delta=0.1, seed=seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=samples)
    set_gradients(model, *shards("bob")[0])
    optimizer.step()
    return optimizer


def test_averages_of_ranks_with_different_numbers_of_samples_are_an_error() -> None:
    def program(peers: cgd.Peers) -> Any:
        return first_step(peers, 10 + peers.ranks.rank, seed=seed_of(peers.me))

    ranks, *_ = train_on_ranks([2, 1, 1], program)
    for error in ranks:
        assert isinstance(error, InputError)
        assert "the ranks have 10, 11 samples" in str(error)
        assert "Do not wrap the model" in str(error)


def test_ranks_with_different_origins_are_an_error() -> None:
    ranks, *_ = train_on_ranks([2, 1, 1], lambda peers: first_step(peers, 10))
    for error in ranks:
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 1: it has a model with the digest ")
        assert "give seed=peers.seed and the same delta to cgd.confine" in str(error)


def test_ranks_that_load_different_states_are_an_error() -> None:
    def program(peers: cgd.Peers) -> Any:
        optimizer = first_step(peers, 10, seed=seed_of(peers.me))
        state = optimizer.state_dict()
        state["state"][0]["origin"] = state["state"][0]["origin"] + peers.ranks.rank
        optimizer.load_state_dict(state)
        optimizer.step()

    ranks, *_ = train_on_ranks([2, 1, 1], program)
    assert all("rank 1: it has a model with the digest" in str(error) for error in ranks)


def test_an_error_of_one_rank_ends_the_step_of_all() -> None:
    def program(peers: cgd.Peers) -> Any:
        own, rank = shards(peers.me), peers.ranks.rank
        model, optimizer = build(peers, len(own[rank][0]))
        set_gradients(model, *own[rank])
        if rank == 1:
            with torch.no_grad():
                model[0].weight.fill_(0.0)  # type: ignore[index]
        optimizer.step()

    (first, second), *_ = train_on_ranks([2, 1, 1], program)
    assert isinstance(second, InputError)
    assert isinstance(first, RankError)
    assert str(first).startswith("rank 1: InputError: the program has written into parameter")


def test_a_gradient_out_of_range_is_an_error_on_all_ranks_and_the_next_step_can_follow(ordinary: torch.Tensor) -> None:
    def program(peers: cgd.Peers) -> Any:
        own, rank = shards(peers.me), peers.ranks.rank
        own = own if peers.ranks.size == 1 else own[rank : rank + 1]
        model, optimizer = build(peers, sum(len(x) for x, _ in own), momentum=0.5)
        errors = 0
        for step in range(STEPS + 1):
            average(model, own, [len(x) for x, _ in own])
            if step == 2 and peers.me == "ada" and rank == 1:
                model[2].bias.grad[0] = torch.nan  # type: ignore[index]
            try:
                optimizer.step()
            except (RangeError, cgd.errors.PeerAbortedError):
                errors += 1
        return errors, optimizer.displacement()

    for errors, displacement in list(chain.from_iterable(train_on_ranks([2, 1, 2], program))):
        assert errors == 1
        assert torch.equal(displacement, ordinary)


def test_local_steps_and_batches_of_ranks() -> None:
    def program(peers: cgd.Peers) -> Any:
        x, y = shards(peers.me)[peers.ranks.rank]
        model, optimizer = build(peers, len(x), lr=1.0)
        for _ in optimizer.steps(3):
            with optimizer.local_steps():
                local = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(1 + peers.ranks.rank):
                    set_gradients(model, x, y)
                    local.step()
        sampler = cgd.BatchSampler(optimizer, batches=3)
        for _, batch in sampler.steps(DataLoader(TensorDataset(x, y), batch_sampler=sampler), epochs=2):
            set_gradients(model, *batch)
            optimizer.step()
        return optimizer.displacement(), peers.sum(torch.tensor(len(x))).item(), optimizer.param_groups[0]

    results = list(chain.from_iterable(train_on_ranks([2, 1, 2], program)))
    for displacement, total, group in results:
        assert torch.equal(displacement, results[0][0])
        assert total == 20 + 10 + 20
        assert group["total_samples"] == total


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("privacy", "privacy= is for a participant of one process, and this is a job of 2 ranks"),
        ("delay", "delay is 1, and this participant is a job of 2 ranks"),
    ],
)
def test_options_for_participants_of_one_process_are_refused(option: str, expected: str) -> None:
    def program(peers: cgd.Peers) -> Any:
        model = nn.Linear(4, 2)
        chosen: Any = cgd.Privacy(model, epsilon=8.0, delta=1e-4, steps=3) if option == "privacy" else 1
        return cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=10, **{option: chosen})

    ranks, *_ = train_on_ranks([2, 1, 1], program)
    for error in ranks:
        assert isinstance(error, InputError)
        assert expected in str(error)


def test_models_divided_among_ranks_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = nn.Linear(4, 2)
        torch.distributed.fsdp.fully_shard(model)
        assert isinstance(model.weight, DTensor)
        with pytest.raises(InputError, match="weight is divided among the ranks of a job"):
            cgd.confine(model)
        with cgd.local_peers(NAMES) as members, pytest.raises(InputError, match="Use DistributedDataParallel"):
            cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=members[0], samples=1)
    finally:
        torch.distributed.destroy_process_group()
    flat = nn.Linear(4, 2)
    flat.weight._fsdp_flattened = True  # type: ignore[attr-defined]  # as FSDP of version 1 does
    with pytest.raises(InputError, match="weight is divided"):
        cgd.confine(flat)
