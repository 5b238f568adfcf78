"""Weights that are written after `confine` and before the first step would delete the private origin."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import cgd
from cgd import CGDError, ConfinedSGD, Origin, Peers, confine, local_peers, public_seed
from support.in_process import InProcessFederation, new_federation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.in_process import MemberProcess


def build(seed: int = 7) -> nn.Sequential:
    with public_seed(seed):
        return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def first_step(model: nn.Module, optimizer: ConfinedSGD, *, local: bool = False) -> None:
    x = torch.ones(4, 3, dtype=next(model.parameters()).dtype)
    if local:
        with optimizer.local_steps():
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).mean().backward()
            inner.step()
        return
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def outcomes(change: Callable[[nn.Sequential], object], *, local: bool = False) -> list[tuple[str, int]]:
    """Take the first step after `change` at one member; return the error and the number of sums of each member."""

    def work(peers: Peers) -> tuple[str, int]:
        model = build()
        confine(model, seed=peers.seed)
        optimizer = ConfinedSGD(model.named_parameters(), lr=0.1, peers=peers, samples=4)
        if peers.me == "participant-2":
            change(model)
        try:
            first_step(model, optimizer, local=local)
        except CGDError as error:
            return f"{type(error).__name__}: {error}", peers.traffic.sums
        return "", peers.traffic.sums

    with local_peers(3) as members:
        return members.run(work)


def load_pretrained(model: nn.Sequential) -> None:
    model.load_state_dict(build(99).state_dict())


def initialise_again(model: nn.Sequential) -> None:
    with public_seed(1):
        model.get_submodule("2").reset_parameters()  # type: ignore[operator]


def write_data(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data[0, 0] += 2.0**-20


def write_digits_of_a_wider_type(model: nn.Sequential) -> None:
    model.double()
    model.get_parameter("0.weight").data[0, 0] += 2.0**-40


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("change", [load_pretrained, initialise_again, write_data])
def test_weights_written_after_confine_are_reported_before_the_first_sum(
    change: Callable[[nn.Sequential], None], local: bool
) -> None:
    results = outcomes(change, local=local)
    name = "2.weight" if change is initialise_again else "0.weight"
    assert results[1][0].startswith(f"InputError: the program has written into parameter {name} since cgd.confine: its")
    assert "Load or initialise weights before cgd.confine" in results[1][0]
    assert all("participant-2: aborted" in results[i][0] for i in (0, 2))
    assert all(sums == 0 for _, sums in results)


def reload_the_same(model: nn.Sequential) -> None:
    kept = copy.deepcopy(model.state_dict())
    load_pretrained(model)
    model.load_state_dict(kept)


def in_other_memory(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.t().clone().t() if parameter.dim() > 1 else parameter.data.clone()


@pytest.mark.parametrize("change", [reload_the_same, in_other_memory, nn.Module.cpu])
def test_the_same_values_are_accepted(change: Callable[[nn.Sequential], object]) -> None:
    assert [error for error, _ in outcomes(change)] == ["", "", ""]


@pytest.mark.parametrize(
    "change",
    [nn.Module.double, nn.Module.half, nn.Module.bfloat16, lambda model: model.half().float()],
    ids=["double", "half", "bfloat16", "half and back"],
)
def test_model_may_be_converted_after_confine(change: Callable[[nn.Module], object]) -> None:
    def work(peers: Peers) -> bool:
        model = build()
        confine(model, seed=peers.seed)
        change(model)
        origin = copy.deepcopy(model.state_dict())
        optimizer = ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=4)
        first_step(model, optimizer)
        return all(
            torch.equal(optimizer.state[p]["origin"].to(p.dtype), origin[n]) for n, p in model.named_parameters()
        )

    with local_peers(3) as members:
        assert members.run(work) == [True] * 3


def test_more_digits_after_a_conversion_are_reported() -> None:
    assert "InputError: the program has written" in outcomes(write_digits_of_a_wider_type)[1][0]


def test_pickled_model_keeps_its_digest_and_a_deep_copy_is_unconfined_as_before() -> None:
    def work(peers: Peers, kind: str) -> str:
        model = build()
        confine(model, seed=peers.seed)
        copied, written = (
            pickle.loads(pickle.dumps(model)) if kind == "pickle" else copy.deepcopy(model) for _ in range(2)
        )
        first_step(copied, ConfinedSGD(copied.parameters(), lr=0.1, peers=peers, samples=4))
        load_pretrained(written)
        try:
            first_step(written, ConfinedSGD(written.parameters(), lr=0.1, peers=peers, samples=4))
        except CGDError as error:
            return str(error)
        return ""

    with local_peers(3) as members:
        assert any("since cgd.confine" in error for error in members.run(work, ["pickle"] * 3))
    with local_peers(3) as members, pytest.warns(cgd.UnconfinedWarning):
        assert members.run(work, ["deep"] * 3) == [""] * 3


def test_origin_that_is_applied_again_is_remembered() -> None:
    def work(peers: Peers, write: bool) -> str:
        model = build()
        origin = confine(model, seed=peers.seed)
        again = build()
        Origin(origin.delta, origin.shapes, origin.seed, start=origin.start).apply(again)
        if write:
            load_pretrained(again)
        else:
            again.load_state_dict(model.state_dict())  # the saved confined model
        try:
            first_step(again, ConfinedSGD(again.parameters(), lr=0.1, peers=peers, samples=4))
        except CGDError as error:
            return str(error)
        return ""

    for write in (False, True):
        with local_peers(3) as members:
            errors = members.run(work, [write] * 3)
        assert any("since cgd.confine" in error for error in errors) is write


def test_training_is_resumed_and_a_second_optimiser_continues() -> None:
    """A state has its own origin, and an optimiser that follows another one starts where that ended."""

    def work(peers: Peers) -> None:
        model = build()
        confine(model, seed=peers.seed)
        optimizer = ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=4)
        first_step(model, optimizer)
        first_step(model, ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4))
        resumed_model = build()
        confine(resumed_model)  # not needed, and not an error: the state has another origin
        resumed_model.load_state_dict(model.state_dict())
        resumed = ConfinedSGD(resumed_model.parameters(), lr=0.5, peers=peers, samples=4)
        resumed.load_state_dict(optimizer.state_dict())
        first_step(resumed_model, resumed)

    with local_peers(3) as members:
        members.run(work)


def test_restarted_member_with_other_weights_is_stopped(tmp_path: Path) -> None:
    """It would take the common displacement, and place it on weights without its origin."""

    def program(process: MemberProcess, *, load: bool) -> str:
        model = build()
        confine(model, seed=process.peers.seed)
        if load:
            load_pretrained(model)
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=process.peers, samples=4)
        for step in range(4):
            process.at_step(step)
            try:
                first_step(model, optimizer)
            except cgd.InputError as error:
                return str(error)
        return ""

    names = ("ada", "bob", "cleo")
    with InProcessFederation(new_federation(tmp_path, names), tmp_path / "state") as federation:
        federation.start_all(lambda process: program(process, load=False), pause_at=2)
        for process in federation:
            process.wait_for_step(2)
        federation.kill("cleo")
        federation.start("cleo", lambda process: program(process, load=True))
        federation.wait_until(lambda: federation["cleo"].finished)
        assert "since cgd.confine" in federation["cleo"].result
