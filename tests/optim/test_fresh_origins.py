"""Participants with another private origin in each step."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cgd
from cgd import Cell, ConfinedAdam, ConfinedSGD, ConfinedTorchOptimizer, Grid, InputError, Skew, simulate
from cgd.optim import fresh_origins, recovery
from cgd.optim.origin import Origin
from cgd.simulation.population import participant_seed
from support.networks import CLASSES, FEATURES, blocks, fully_connected, samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd import ConfinedOptimizer, Peers

build = fully_connected(FEATURES, 8, CLASSES)
SEED = bytes(range(32))


def confined(seed: bytes = SEED, fresh: bool = True, delta: float = 0.1) -> nn.Module:
    with cgd.public_seed(0):
        model = build()
    cgd.confine(model, delta=delta, seed=seed, fresh_origins=fresh)
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def descend(optimizer: ConfinedOptimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


RULES: dict[str, Any] = {
    "sgd": partial(ConfinedSGD, lr=0.5),
    "momentum": partial(ConfinedSGD, lr=0.3, momentum=0.9),
    "adam": partial(ConfinedAdam, lr=0.05),
    "torch": partial(ConfinedTorchOptimizer, kind=torch.optim.AdamW, lr=0.05),
}


def run(work: Callable[[Peers, int, ConfinedOptimizer, nn.Module], Any], rule: str = "momentum", **options: Any) -> Any:
    """Run a program at three participants, with their optimiser and model."""
    fresh = options.pop("fresh", True)

    def member(peers: Peers, place: int) -> Any:
        model = confined(bytes([place]) * 32, fresh)
        return work(peers, place, RULES[rule](model.parameters(), peers=peers, samples=20, **options), model)

    with cgd.local_peers(3) as members:
        return members.run(member, range(3))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bits_are_those_of_a_simulation(momentum: float) -> None:
    split = blocks(3)
    expected = simulate(
        build, split, steps=6, lr=0.3, momentum=momentum, fresh_origins=True, arithmetic="ring", progress=False,
        engine="modules",
    )  # fmt: skip

    def member(peers: Peers, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        model, block = confined(participant_seed(0, cell)), split[cell]
        optimizer = ConfinedSGD(model.parameters(), 0.3, momentum=momentum, peers=peers, samples=block.samples)
        x, y = torch.as_tensor(block.x), torch.as_tensor(block.y)
        for _ in optimizer.steps(6):
            descend(optimizer, model, x, y)
        optimizer.eval()
        return optimizer.displacement(), flat(model)

    with cgd.local_peers(3) as members:
        found = members.run(member, list(split))
    for (displacement, weights), cell in zip(found, split, strict=True):
        assert torch.equal(displacement, expected.flat_displacement)
        assert torch.equal(weights, flat(expected.model(cell)))


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_those_of_the_next_step_and_of_the_confined_model(rule: str) -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        with cgd.public_seed(0):
            start = flat(build()).double()
        origin = Origin(0.1, {name: tuple(each.shape) for name, each in model.named_parameters()}, bytes([place]) * 32)

        def above_start(origin: Origin) -> torch.Tensor:
            drawn = torch.cat([each.reshape(-1) for _, each in origin.draw()])
            return (start + drawn).float() + optimizer.displacement()

        for step in range(3):
            assert torch.equal(flat(model), above_start(origin.of_step(step)))
            optimizer.eval()
            optimizer.eval()
            assert torch.equal(flat(model), above_start(origin))
            optimizer.train()
            assert torch.equal(flat(model), above_start(origin.of_step(step)))
            descend(optimizer, model, x, y)

    run(work, rule)


def test_constant_origins_have_the_same_bits_with_and_without_modes() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module, modes: bool) -> torch.Tensor:
        for _ in range(3):
            if modes:
                optimizer.eval()
            descend(optimizer, model, x, y)
        assert "step_origin" not in optimizer.state[next(model.parameters())]
        return flat(model)

    for one, other in zip(*(run(partial(work, modes=each), fresh=False) for each in (True, False)), strict=True):
        assert torch.equal(one, other)


def test_step_in_evaluation_mode_is_refused_before_anything_is_shared() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        descend(optimizer, model, x, y)
        optimizer.eval()
        before = optimizer.displacement()
        with pytest.raises(InputError, match=r"call optimizer.train\(\) before the forward pass"):
            descend(optimizer, model, x, y)
        with pytest.raises(InputError, match=r"call optimizer.train\(\)"), optimizer.local_steps():
            raise AssertionError
        assert torch.equal(optimizer.displacement(), before)

    run(work)


def test_modes_inside_local_steps_are_refused_and_no_update_has_a_difference_of_origins() -> None:
    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        with pytest.raises(InputError, match=r"inside local_steps\(\)"), optimizer.local_steps():
            optimizer.eval()
        assert not optimizer.displacement().any()

    run(work)


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_written_weights_are_noticed_in_both_modes(evaluating: bool, steps: int) -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        for _ in range(steps):
            descend(optimizer, model, x, y)
        if evaluating:
            optimizer.eval()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        with pytest.raises(InputError, match="has written into parameter 0.weight|has written into parameter number 0"):
            (optimizer.train if evaluating else optimizer.eval)()

    run(work)


def test_members_with_other_origins_are_told() -> None:
    x, y = samples(20)

    def member(peers: Peers, place: int) -> str:
        model = confined(bytes([place]) * 32, fresh=place != 1)
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=20)
        with pytest.raises(cgd.SettingsError) as error:
            descend(optimizer, model, x, y)
        return str(error.value)

    with cgd.local_peers(3) as members:
        for message in members.run(member, range(3)):
            assert "Use fresh_origins=True of cgd.confine at all members, or at none" in message


def test_saved_state_continues_with_the_same_bits() -> None:
    x, y = samples(20)

    def work(
        peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module, evaluate: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            descend(optimizer, model, x, y)
        if evaluate:
            optimizer.eval()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        if evaluate:
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model = confined(bytes([place]) * 32)
            optimizer = RULES["momentum"](model.parameters(), peers=peers, samples=20)
            optimizer.load_state_dict(saved)
        descend(optimizer, model, x, y)
        return flat(model), optimizer.displacement()

    continued, expected = (run(partial(work, evaluate=each)) for each in (True, False))
    for pair, same in zip(continued, expected, strict=True):
        assert all(map(torch.equal, pair, same))


@pytest.mark.parametrize(
    ("seed", "fresh", "error"),
    [(bytes(32), True, "the state has another origin than this model"), (SEED, False, "with fresh origins, and this")],
)
def test_state_of_other_origins_is_refused_and_nothing_changes(seed: bytes, fresh: bool, error: str) -> None:
    x, y = samples(20)

    def member(peers: Peers) -> None:
        model = confined()
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=20)
        descend(optimizer, model, x, y)
        other = confined(seed, fresh)
        before = flat(other)
        with pytest.raises(InputError, match=error):
            ConfinedSGD(other.parameters(), 0.1, peers=peers, samples=20).load_state_dict(optimizer.state_dict())
        assert torch.equal(flat(other), before)
        constant = ConfinedSGD(confined(fresh=False).parameters(), 0.1, peers=peers, samples=20)
        state = constant.state_dict()
        state["state"] = {0: {**optimizer.state_dict()["state"][0]}}
        del state["state"][0]["step_origin"]
        with pytest.raises(InputError, match="with constant origins, and this model has fresh ones"):
            optimizer.load_state_dict(state)

    with cgd.local_peers(3) as members:
        members.run(member)


def test_what_members_store_has_no_origin() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        descend(optimizer, model, x, y)
        parameters = list(model.parameters())
        stored = recovery.common_state(parameters, optimizer.state, [1, 0, 0])
        assert {name.rpartition(".")[2] for name in stored} == {"counts", "displacement", "momentum_buffer"}
        for key in ("origin", "step_origin"):
            forged = recovery.TensorWriter().to_bytes({**stored, f"0.{key}": parameters[0].detach()})
            with pytest.raises(InputError, match="no update rule stores"):
                recovery.restore(forged, parameters, optimizer.state)

    run(work)


def test_mixed_parameters_are_refused() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(InputError, match="some parameters of the optimiser have fresh origins and others not"):
            descend(optimizer, model, x, y)

    run(work)


def test_frozen_parameters_are_refused() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        descend(optimizer, model, x, y)
        next(model.parameters()).requires_grad_(False)
        with pytest.raises(InputError, match=r"was frozen after cgd\.confine"):
            descend(optimizer, model, x, y)

    run(work)


def test_second_optimiser_of_moved_parameters_is_refused() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        descend(optimizer, model, x, y)
        with pytest.raises(InputError, match="another optimiser has moved it"):
            descend(ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=20), model, x, y)

    run(work)


def test_saved_origin_repeats_the_mode_and_a_saved_model_has_no_seed(tmp_path: Path) -> None:
    with cgd.public_seed(0):
        model, other = build(), build()
    with cgd.public_seed(0):
        other = build()
    cgd.confine(model, seed=SEED, fresh_origins=True).save(tmp_path / "origin.json")
    Origin.load(tmp_path / "origin.json").apply(other)
    assert torch.equal(flat(model), flat(other))
    torch.save(model, tmp_path / "model.pt")
    assert SEED not in (tmp_path / "model.pt").read_bytes()
    text = (tmp_path / "origin.json").read_text()
    (tmp_path / "origin.json").write_text(text.replace('"fresh": true', '"fresh": 1'))
    with pytest.raises(InputError, match="fresh is 1, not true or false"):
        Origin.load(tmp_path / "origin.json")


def test_invalid_uses_are_refused() -> None:
    with pytest.raises(InputError, match="fresh_origins is 1; it must be True or False"):
        cgd.confine(build(), fresh_origins=1)  # type: ignore[arg-type]
    model = build()
    for parameter in model[0].parameters():
        parameter._cgd_joint = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="has a JointFirstLayer, and what fresh origins would tell its row"):
        cgd.confine(model, fresh_origins=True)


def test_half_precision() -> None:
    x, y = samples(20)

    def half(peers: Peers) -> torch.Tensor:
        model = confined(peers.seed).bfloat16()
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=20)
        for _ in range(2):
            descend(optimizer, model, x.bfloat16(), y)
            optimizer.eval()
            optimizer.train()
        return optimizer.displacement()

    with cgd.local_peers(3) as members:
        one, two, three = members.run(half)
    assert torch.equal(one, two)
    assert torch.equal(two, three)
    assert one.any()


def test_sums_with_noise() -> None:
    x, y = samples(20)

    def member(peers: Peers) -> torch.Tensor:
        model = confined(peers.seed)
        privacy = cgd.Privacy(model, epsilon=20.0, delta=1e-5, steps=2, clip=0.5)
        optimizer = ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=20, privacy=privacy)
        for _ in range(2):
            descend(optimizer, model, x, y)
            optimizer.eval()
            optimizer.train()
        return optimizer.displacement()

    with cgd.local_peers(3) as members:
        one, two, three = members.run(member)
    assert torch.equal(one, two)
    assert torch.equal(two, three)
    assert one.any()


@pytest.mark.slow
def test_displacement_does_not_adapt_to_participants_with_one_class_each() -> None:
    x, y = samples(600)
    split = Grid(12).split(x[:400], y[:400], skew=Skew(classes=1))
    cells = list(split)

    def member(peers: Peers, cell: Cell, fresh: bool) -> float:
        model, block = confined(participant_seed(0, cell), fresh, delta=0.5), split[cell]
        optimizer = ConfinedSGD(model.parameters(), 0.3, momentum=0.9, peers=peers, samples=block.samples)
        own = torch.as_tensor(block.x), torch.as_tensor(block.y)
        for _ in optimizer.steps(150):
            descend(optimizer, model, *own)
        optimizer.eval()
        return float((model(x[400:]).argmax(1) == y[400:]).float().mean())

    means = []
    for fresh in (True, False):
        with cgd.local_peers(len(cells)) as members:
            means.append(sum(members.run(partial(member, fresh=fresh), cells)) / len(cells))
    assert means[0] > means[1] + 0.1, means


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_delay_is_refused(first: str) -> None:
    def member(peers: Peers) -> None:
        with cgd.public_seed(0):
            model = build()
        if first == "model":
            cgd.confine(model, seed=peers.seed, fresh_origins=True)
        with pytest.raises(InputError, match="delay is 1, and the model has fresh origins"):
            optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=1, delay=1)
            cgd.confine(model, seed=peers.seed, fresh_origins=True)
            optimizer.step()

    with cgd.local_peers(3) as members:
        members.run(member)


@pytest.mark.parametrize("steps", [0, 3])
def test_gradient_of_the_confined_model_is_not_entered(steps: int) -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        for _ in range(steps):
            descend(optimizer, model, x, y)
        optimizer.eval()
        functional.cross_entropy(model(x), y).backward()
        with pytest.raises(InputError, match=r"a gradient was computed between optimizer.eval\(\) and"):
            optimizer.train()
        optimizer.zero_grad()
        optimizer.train()
        descend(optimizer, model, x, y)

    run(work)


def test_model_frozen_before_eval_is_not_left_at_the_weights_of_a_step() -> None:
    x, y = samples(20)

    def work(peers: Peers, place: int, optimizer: ConfinedOptimizer, model: nn.Module) -> None:
        descend(optimizer, model, x, y)
        model.requires_grad_(False)
        with pytest.raises(InputError, match="with fresh origins was frozen after"):
            optimizer.eval()

    run(work)


def test_group_that_is_added_later_has_the_origin_that_a_restart_gives_it() -> None:
    """Its own sum has other step numbers than that of the first group."""
    x, y = samples(20)

    def member(peers: Peers, others: Peers) -> None:
        model = confined(peers.seed)
        first, *rest = list(model.parameters())
        optimizer = ConfinedSGD(rest, lr=0.1, peers=peers, samples=20)
        descend(optimizer, model, x, y)
        optimizer.add_param_group({"params": [first], "peers": others})
        descend(optimizer, model, x, y)
        for parameter, step in ((first, 1), (rest[-1], 2)):
            assert torch.equal(optimizer.state[parameter]["step_origin"], fresh_origins.draw(parameter, step))

    with cgd.local_peers(3) as members, cgd.local_peers(3) as others:
        members.run(member, list(others))
