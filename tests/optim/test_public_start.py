from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import cgd
from cgd import InputError, Origin, SettingsError, confine, public_seed
from cgd.optim.displacement import initial_state, step_context
from cgd.optim.public_start import start_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = b"\x5c" * 32

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True),
    "convolution": lambda: nn.Conv2d(1, 2, 3),
    "recurrent": lambda: nn.LSTM(2, 3),
    "embedding": lambda: nn.Embedding(5, 4),
    "truncated": lambda: nn.ParameterList([nn.init.trunc_normal_(torch.empty(4, 4))]),
    "orthogonal": lambda: nn.ParameterList([nn.init.orthogonal_(torch.empty(4, 4))]),
    "sparse": lambda: nn.ParameterList([nn.init.sparse_(torch.empty(4, 4), 0.5)]),
    "plain": lambda: nn.ParameterList([torch.rand(3), torch.randn(2), torch.rand_like(torch.zeros(4))]),
}


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def build(name: str, seed: int = 7) -> nn.Module:
    with public_seed(seed):
        return BUILDERS[name]()


@pytest.mark.parametrize("name", BUILDERS)
def test_every_member_builds_the_same_model(name: str) -> None:
    torch.manual_seed(1)
    one = build(name)
    torch.manual_seed(2)
    two = build(name)
    assert torch.equal(values(one), values(two))
    assert not torch.equal(values(one), values(build(name, seed=8)))


def test_numbers_have_the_distribution_of_the_module() -> None:
    torch.manual_seed(7)
    expected = nn.Linear(30, 20)
    with public_seed(7):
        model = nn.Linear(30, 20)
    assert torch.equal(model.weight, expected.weight)  # one generator with the same seed


def test_global_generator_and_other_threads_are_not_affected() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn: list[torch.Tensor] = []
    with public_seed(7):
        nn.Linear(3, 3)
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(4)))
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], expected)


def test_own_generator_is_kept() -> None:
    with public_seed(7):
        one = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="build it on the CPU"), public_seed(7):
        nn.Linear(3, 2, device="meta")


@pytest.mark.parametrize("seed", [True, 1.0, "7", None])
def test_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(InputError, match="whole number"), public_seed(seed):
        pass


def test_origin_is_added_to_the_start() -> None:
    model, start, origin = build("transformer"), build("transformer"), build("transformer")
    confine(model, 0.1, SEED)
    confine(origin, 0.1, SEED, start="zeros")
    assert torch.allclose(values(model), values(start) + values(origin), atol=1e-7)
    norm: Any = model.norm1
    assert float(norm.weight.detach().mean()) == pytest.approx(1.0, abs=0.2)  # a scale around 1


def test_pretrained_weights_are_kept() -> None:
    model = nn.Linear(300, 300)
    nn.init.constant_(model.weight, 5.0)
    confine(model, 0.1)
    assert float(model.weight.detach().mean()) == pytest.approx(5.0, abs=0.01)
    assert float(model.weight.detach().std()) == pytest.approx(0.1, rel=0.05)


def test_confined_model_is_not_confined_again() -> None:
    model = nn.Linear(2, 1)
    confine(model)
    for start in ("model", "zeros"):
        with pytest.raises(InputError, match="has a private origin already"):
            confine(model, start=start)


def test_start_must_be_finite_and_have_a_known_name() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(InputError, match="choose 'model'"):
        confine(model, start="ones")  # type: ignore[arg-type]
    nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(InputError, match="bias has values that are not finite"):
        confine(model)


def test_saved_origin_belongs_to_its_start(tmp_path: Path) -> None:
    model = build("linear")
    confine(model, 0.1, SEED).save(tmp_path / "origin.json")
    origin = Origin.load(tmp_path / "origin.json")
    copy = build("linear")
    origin.apply(copy)
    assert torch.equal(values(copy), values(model))
    for other in (build("linear", seed=8), model):
        with pytest.raises(InputError, match="does not have the start"):
            origin.apply(other)


def test_members_with_different_starts_open_nothing() -> None:
    def train(peers: cgd.Peers, seed: int) -> int:
        model = build("linear", seed)
        confine(model, seed=peers.seed)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
        model(torch.ones(4, 3)).sum().backward()
        with pytest.raises(SettingsError, match=r"start [0-9a-f]{8}.*inside cgd.public_seed with the same number"):
            optimizer.step()
        return peers.traffic.sums

    with cgd.local_peers(3) as members:
        members.run(train, [7, 7, 8])


def test_start_is_compared_after_a_state_was_loaded() -> None:
    """A program that resumes from a file does not call `confine`: the state has the digest of the start."""

    def train(peers: cgd.Peers, others: bool) -> None:
        model = build("linear")
        confine(model, seed=peers.seed)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        resumed_model = build("linear", seed=8)
        resumed = cgd.ConfinedSGD(resumed_model.parameters(), lr=0.1, peers=peers, samples=4)
        state = optimizer.state_dict()
        if others:
            state["state"][0]["start"] = torch.zeros(32, dtype=torch.uint8)
        resumed.load_state_dict(state)
        resumed_model(torch.ones(4, 3)).sum().backward()
        if any_differs:
            with pytest.raises(SettingsError, match="start"):
                resumed.step()
        else:
            resumed.step()

    for any_differs in (False, True):
        with cgd.local_peers(3) as members:
            members.run(train, [False, False, any_differs])


# What is not trained: frozen parameters and buffers.


class Pretrained(nn.Module):
    """A network with a frozen layer, a stored and a temporary buffer, and a trained layer."""

    def __init__(self, layer: float = 1.0, stored: float = 2.0, temporary: float = 3.0) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        nn.init.constant_(self.frozen.weight, layer)
        nn.init.zeros_(self.frozen.bias)
        self.register_buffer("stored", torch.tensor(stored))
        self.register_buffer("temporary", torch.tensor(temporary), persistent=False)
        with public_seed(7):
            self.trained = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.trained(self.frozen(x))
        return hidden


def first_step(build_model: Callable[[Any], nn.Module], odd: Any, usual: Any = None) -> list[str]:
    """Return the error of each member in its first step, of which the third one has an odd model."""

    def train(peers: cgd.Peers, own: Any) -> str:
        model = build_model(own)
        confine(model, seed=peers.seed)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = cgd.ConfinedSGD(trained, lr=0.1, peers=peers, samples=4)
        model(torch.ones(4, 3)).mean().backward()
        try:
            optimizer.step()
        except SettingsError as error:
            assert not optimizer.displacement().any()
            return str(error)
        return ""

    with cgd.local_peers(3) as members:
        return members.run(train, [usual, usual, odd])


@pytest.mark.parametrize("odd", [{"layer": 1.5}, {"stored": 2.5}])
def test_members_with_other_frozen_layers_or_buffers_open_nothing(odd: dict[str, float]) -> None:
    for error in first_step(lambda own: Pretrained(**own), odd, {}):
        assert "participant-3: " in error
        assert error.endswith("persistent=False of register_buffer for values of a member alone")
        assert re.search(r"start ([0-9a-f]{8}), frozen [0-9a-f]{8}, .* start \1, frozen [0-9a-f]{8}, ", error)


def test_member_without_the_frozen_layer_shares_nothing() -> None:
    def build_model(whole: bool) -> nn.Module:
        model = Pretrained()
        return model if whole else nn.Sequential(nn.Flatten(), nn.ReplicationPad1d((0, 1)), model.trained)

    for error in first_step(build_model, odd=False, usual=True):
        assert "participant-3: " in error
        assert "frozen layers" in error


def test_temporary_buffers_and_names_of_modules_may_differ() -> None:
    def build_model(own: bool) -> nn.Module:
        return nn.Sequential(Pretrained(temporary=4.0)) if own else Pretrained()

    assert first_step(build_model, odd=True, usual=False) == [""] * 3


def test_context_without_frozen_layers_and_buffers_has_no_digest_of_them() -> None:
    """Golden digests of contexts, and members of trainings that have begun, depend on it."""
    model = build("linear")
    confine(model, seed=SEED)
    context = step_context("ConfinedSGD", (), [{"params": list(model.parameters())}], {}).complete(3)
    assert "frozen" not in context
    assert len(start_of(model.get_parameter("weight"))) == 32


def test_frozen_layers_are_compared_after_a_state_was_loaded() -> None:
    def train(peers: cgd.Peers, layer: float) -> None:
        model = Pretrained(layer)
        confine(model, seed=peers.seed)
        optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.0, peers=peers, samples=4)
        state = optimizer.state_dict()
        state["state"] = {
            index: initial_state(parameter)
            for index, parameter in enumerate(model.parameters())
            if parameter.requires_grad
        }
        resumed_model = Pretrained(layer)
        resumed = cgd.ConfinedSGD(resumed_model.parameters(), lr=0.0, peers=peers, samples=4)
        resumed.load_state_dict(state)
        resumed_model(torch.ones(4, 3)).mean().backward()
        with pytest.raises(SettingsError, match="frozen"):
            resumed.step()

    with cgd.local_peers(3) as members:
        members.run(train, [1.0, 1.0, 1.5])


def test_columns_of_a_grid_may_have_other_frozen_layers() -> None:
    """The first trained layer is summed within its column, and so the frozen layers are compared there."""
    columns = [cgd.local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = cgd.local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])

    def train(peers: cgd.Peers, own: cgd.Peers, layer: float) -> str:
        model = nn.Sequential(Pretrained(layer), nn.Linear(2, 1))
        nn.init.ones_(model.get_parameter("1.weight"))
        nn.init.ones_(model.get_parameter("1.bias"))
        confine(model, seed=peers.seed)
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "peers": own},
            {"params": list(model[1].parameters())},
        ]
        optimizer = cgd.ConfinedSGD(groups, lr=0.1, peers=peers, samples=4)
        model(torch.ones(4, 3)).mean().backward()
        try:
            optimizer.step()
        except cgd.RemoteProtocolError as error:
            return str(error)
        return ""

    with everyone, columns[0], columns[1]:
        members = [*columns[0], *columns[1]]
        assert everyone.run(train, members, [1.0] * 3 + [2.0] * 3) == [""] * 6
    columns = [cgd.local_peers([f"r{row}c{column}" for row in range(3)]) for column in range(2)]
    everyone = cgd.local_peers([f"r{row}c{column}" for column in range(2) for row in range(3)])
    with everyone, columns[0], columns[1]:
        errors = everyone.run(train, [*columns[0], *columns[1]], [1.0] * 3 + [2.0, 2.0, 3.0])
    assert all("r2c1: " in error and "frozen" in error for error in errors[3:])
    assert all("aborted" in error for error in errors[:3])


@pytest.mark.parametrize(
    "values",
    [torch.eye(3).to_sparse(), torch.tensor(True), torch.empty(0), torch.ones(2).bfloat16()],
    ids=["sparse", "bool", "empty", "bfloat16"],
)
def test_buffers_of_all_kinds_have_a_digest(values: torch.Tensor) -> None:
    digests = []
    for _ in range(2):
        model = build("linear")
        model.register_buffer("extra", values)
        confine(model)
        digests.append(start_of(next(model.parameters())).tolist())
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64


def test_start_of_a_simulation_is_that_of_the_seed() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    blocks = cgd.Grid(3).split(x, (x[:, 0] > 0).long())
    run = {
        seed: cgd.simulate(BUILDERS["linear"], blocks, steps=2, lr=0.1, delta=1e-6, seed=seed, progress=False)
        for seed in (7, 8)
    }
    start = build("linear")
    near = values(run[7].model(cgd.Cell(1, 0))) - run[7].flat_displacement
    assert torch.allclose(near, values(start), atol=1e-4)
    assert not torch.allclose(values(run[8].model(cgd.Cell(1, 0))) - run[8].flat_displacement, values(start), atol=1e-2)


def test_checkpoint_of_another_start_is_refused(tmp_path: Path) -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    blocks = cgd.Grid(3).split(x, (x[:, 0] > 0).long())
    options: dict[str, Any] = {"lr": 0.1, "progress": False, "checkpoint": tmp_path / "run.pt"}
    cgd.simulate(BUILDERS["linear"], blocks, steps=2, **options)
    with pytest.raises(InputError, match="start"):
        cgd.simulate(BUILDERS["linear"], blocks, steps=4, start="zeros", **options)


def test_lazy_module_is_confined_after_its_first_batch() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(InputError, match="weight of a lazy module has no shape yet"):
        confine(model)
    model(torch.ones(1, 3))
    confine(model)


def test_model_without_values_is_refused() -> None:
    with pytest.raises(InputError, match="weight is on the device meta and has no values"):
        confine(nn.Linear(3, 2, device="meta"))
