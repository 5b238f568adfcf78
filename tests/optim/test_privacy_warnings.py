"""Privacy warnings: the settings that get one, its text, and its place in the log and the optimiser."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cgd
from cgd.federation import config_edit, member
from cgd.optim.grid import Cell
from cgd.optim.privacy_warnings import FirstLayer, departure_warning, find_warnings
from cgd.secagg.messages import Ready
from support.in_process import InProcessFederation, new_federation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.optim.privacy_warnings import PrivacyWarning
    from support.in_process import MemberProcess

WIDE = FirstLayer(inputs=30, units=8, relu=False)
RELU = FirstLayer(inputs=30, units=8)


def kinds(warnings: tuple[PrivacyWarning, ...]) -> list[str]:
    return [each.kind for each in warnings]


# Settings.


@pytest.mark.parametrize(
    ("own_records", "layer", "total_records", "expected"),
    [
        (124, WIDE, None, []),
        (124, WIDE, 372, []),
        (123, WIDE, 5000, ["leverage"]),
        (31, WIDE, None, ["leverage"]),
        (500, WIDE, 5000, []),
        (30, WIDE, 5000, ["span"]),
        (30, FirstLayer(30, 8, bias=False), 5000, ["leverage"]),
        (120, FirstLayer(30, 8, bias=False), 5000, []),
        (12, WIDE, 30, ["span"]),
        (5, WIDE, 5000, ["span"]),
        (124, RELU, None, ["relu units"]),
        (100_000, FirstLayer(30, 1), 400_000, ["relu units"]),
        (50, RELU, 5000, ["relu units", "leverage"]),
        (5, RELU, 5000, ["relu units", "span"]),
        (4, RELU, 5000, ["relu units", "few records"]),
        (1, RELU, None, ["relu units", "few records"]),
        (4, RELU, 12, ["relu units", "few records", "span"]),
        (4, FirstLayer(30, 8, relu=False), 5000, ["span"]),
        (4, FirstLayer(30, 8, bias=False), 5000, ["span"]),
        (5000, FirstLayer(30, 1, relu=False, only_layer=True), 20_000, ["second moments"]),
        (5000, FirstLayer(30, 2, relu=False, only_layer=True), 20_000, []),
        (5000, FirstLayer(30, 1, relu=False), 20_000, []),
        (20, FirstLayer(30, 1, relu=False, only_layer=True), 20_000, ["span", "second moments"]),
        (1, None, 3, []),
    ],
)
def test_settings_that_get_a_warning(
    own_records: int, layer: FirstLayer | None, total_records: int | None, expected: list[str]
) -> None:
    assert kinds(find_warnings(own_records, layer, members=5, total_records=total_records)) == expected


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 5), st.booleans(), st.booleans())
def test_four_records_for_each_input_get_no_warning_about_membership(
    inputs: int, units: int, more: int, bias: bool, relu: bool
) -> None:
    layer = FirstLayer(inputs, units, bias, relu)
    always = ["relu units"] if relu and bias else []
    enough = max(4 * layer.rank, 5) + more
    assert kinds(find_warnings(enough, layer, members=3, total_records=3 * enough)) == always
    if layer.rank > 1:
        found = kinds(find_warnings(layer.rank - 1, layer, members=3, total_records=3 * enough))
        assert found[: len(always)] == always
        assert found[len(always)] in ("few records", "span")
    assert len(find_warnings(4 * layer.rank - 1, layer, members=3, total_records=3 * enough)) > len(always)


def test_warning_states_numbers_coalition_and_remedy() -> None:
    three, five, unknown = (str(find_warnings(12, WIDE, members=members)[0]) for members in (3, 5, 0))
    assert three.startswith(
        "this participant trains on 12 records for a first layer with 30 inputs and a bias; each of the other two"
    )
    assert "3 of the 4 other members together can tell" in five
    assert "all but one of the other members together can tell" in unknown
    remedy = (
        "Train on at least 124 records of your own, merge them with another participant's before joining, or remove"
    )
    assert five.endswith(f"{remedy} columns")
    assert str(find_warnings(1, RELU, members=5)[1]).startswith(
        "this participant trains on 1 record; 3 of the 4 other members together can compute"
    )
    together = str(find_warnings(12, WIDE, members=5, total_records=29)[0])
    assert together.startswith("all members together have 29 records for a first layer with 30 inputs and a bias; each")
    assert "Train on at least 248 records in total" in together
    assert str(departure_warning(["dan"])).startswith(
        "dan left between two steps; from the sums before and after, the other members can estimate its gradient"
    )
    likely = str(find_warnings(40, WIDE, members=5)[0])
    assert "3 of the 4 other members together can tell better than by chance" in likely
    assert likely.endswith(f"{remedy} columns; this reduces the advantage, and does not remove it")
    assert "cleo, dan left between two steps" in str(departure_warning(["dan", "cleo"]))
    assert "the sum of their gradients" in str(departure_warning(["dan", "cleo"]))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x).relu())
        return output


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (nn.Linear(5, 1), FirstLayer(5, 1, relu=False, only_layer=True)),
        (nn.Sequential(nn.Linear(5, 1, bias=False)), FirstLayer(5, 1, bias=False, relu=False, only_layer=True)),
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), FirstLayer(5, 4)),
        (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), FirstLayer(5, 4, relu=False)),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), FirstLayer(5, 4)),
        (Functional(), FirstLayer(5, 4)),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2)), None),
        (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), None),
        (nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2)), None),
        (nn.ReLU(), None),
    ],
)
def test_first_layer_of_a_model(model: nn.Module, layer: FirstLayer | None) -> None:
    assert FirstLayer.from_model(model) == layer


def test_confined_model_can_be_copied_and_saved() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    cgd.confine(model)
    content = io.BytesIO()
    torch.save([*copy.deepcopy(model).parameters()], content)
    content.seek(0)
    assert all(map(torch.equal, torch.load(content, weights_only=True), model.parameters()))


# The log and the optimiser.


@dataclass
class TrainingProgram:
    """A program that trains on records of 6 features; returns its optimiser's privacy warnings."""

    records: int
    hidden: int = 3
    steps: int = 4
    size: float = 1.0
    activation: type[nn.Module] = nn.Tanh

    def __call__(self, process: MemberProcess) -> list[str]:
        peers = process.peers
        x = self.size * torch.randn(self.records, 6, generator=torch.Generator().manual_seed(sum(map(ord, peers.me))))
        with cgd.public_seed(0):
            model = nn.Sequential(nn.Linear(6, self.hidden), self.activation(), nn.Linear(self.hidden, 2))
        cgd.confine(model, seed=sha256(peers.me.encode()).digest())  # the keys of a test federation are random
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "peers": peers.groups.get("column", peers)},
            {"params": list(model[2].parameters())},
        ]
        optimizer = cgd.ConfinedSGD(groups, lr=0.1, peers=peers, samples=self.records)
        for step in range(self.steps):
            process.at_step(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            self.modify_gradient(model)
            optimizer.step()
        return [str(each) for each in optimizer.privacy_warnings]

    def modify_gradient(self, model: nn.Sequential) -> None:
        """Do nothing; a dishonest program overrides it."""


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "privacy warning"]


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessFederation]:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    with InProcessFederation(new_federation(tmp_path, ("ada", "bob", "cleo", "dan")), tmp_path / "state") as made:
        yield made


def test_warning_is_logged_once_and_stored(federation: InProcessFederation, caplog: pytest.LogCaptureFixture) -> None:
    for name, records in {"ada": 5, "bob": 28, "cleo": 28, "dan": 28}.items():
        federation.start(name, TrainingProgram(records))
    results = federation.results()
    layer = FirstLayer(6, 3, relu=False)
    expected = [str(each) for each in find_warnings(5, layer, members=4, total_records=89)]
    assert expected[0].startswith(
        "this participant trains on 5 records for a first layer with 6 inputs and a bias; 2 of the 3 other"
    )
    assert results == {"ada": expected, "bob": [], "cleo": [], "dan": []}
    assert logged(caplog) == [f"privacy warning: {each}" for each in expected]
    assert {
        (each.name, each.levelno) for each in caplog.records if getattr(each, "event", "") == "privacy warning"
    } == {("cgd.optim", logging.WARNING)}


def test_every_member_is_warned_of_relu_units_before_its_first_sum(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[int] = []
    weighted_sum = cgd.Peers.sum

    def recording_sum(peers: cgd.Peers, *args: Any, **options: Any) -> Any:
        if options.get("weight") is not None:  # a sum of gradients, not the count of records
            warned.append(len(logged(caplog)))
        return weighted_sum(peers, *args, **options)

    monkeypatch.setattr(cgd.Peers, "sum", recording_sum)
    federation.start_all(TrainingProgram(28, activation=nn.ReLU))
    [expected] = find_warnings(28, FirstLayer(6, 3), members=4, total_records=112)
    assert expected.kind == "relu units"
    assert federation.results() == {name: [str(expected)] for name in ("ada", "bob", "cleo", "dan")}
    assert logged(caplog) == [f"privacy warning: {expected}"] * 4
    # When a member enters its k-th sum, it and all members that are ahead have been warned.
    assert len(warned) == 16
    assert min(warned) >= 1


def test_relu_warning_names_the_units_the_attacker_and_remedies() -> None:
    [one], [many] = (find_warnings(500, FirstLayer(30, units)) for units in (1, 32))
    assert one.fact.startswith("the first layer has 1 ReLU unit; ")
    assert many.fact.startswith("the first layer has 32 ReLU units; ")
    assert "each member, alone and by watching" in many.fact
    for remedy in ("tanh", "without a hidden layer", "fewer units make it rarer", "[privacy]"):
        assert remedy in many.remedy


def test_restarted_member_is_warned_again(federation: InProcessFederation, caplog: pytest.LogCaptureFixture) -> None:
    federation.start("ada", TrainingProgram(5), pause_at=2)
    for name in ("bob", "cleo", "dan"):
        federation.start(name, TrainingProgram(28))
    federation["ada"].wait_for_step(2)
    assert len(logged(caplog)) == 1
    federation.kill("ada")
    federation.start("ada", TrainingProgram(5))
    assert len(federation.results()["ada"]) == 1
    assert len(logged(caplog)) == 2


def test_departure_is_reported_to_the_remaining_members(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    federation.start_all(TrainingProgram(28), pause_at=2)
    for process in federation:
        process.wait_for_step(2)
    federation.kill("dan")
    config_edit.remove_participant(federation.path, "dan")
    for process in federation:
        process.resume()
    results = federation.results()
    assert results == {name: [str(departure_warning(["dan"]))] for name in ("ada", "bob", "cleo")}
    assert logged(caplog) == [f"privacy warning: {departure_warning(['dan'])}"] * 3


@dataclass
class SteeringProgram(TrainingProgram):
    """A program that adds a constant to its gradient."""

    added: float = 1.0

    def modify_gradient(self, model: nn.Sequential) -> None:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad += self.added


@pytest.mark.parametrize("added", [0.0, 10.0])
def test_steering_is_reported_once(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture, added: float
) -> None:
    """Small records make small gradients, so that the added constant is hundreds of times larger.

    Without steering, records have the usual size: gradients of small records differ a lot between members by chance.
    """
    size = 0.05 if added else 1.0
    for name in ("ada", "bob", "cleo"):
        federation.start(name, TrainingProgram(28, size=size))
    federation.start("dan", SteeringProgram(28, size=size, added=added))
    results = federation.results()
    for name in ("ada", "bob", "cleo"):
        assert len(results[name]) == (1 if added else 0)
    if added:
        assert results["ada"][0].startswith("in step 1 the sum of all first-layer gradients is ")
    assert len(logged(caplog)) == (3 if added else 0)


def test_departure_before_the_first_step_gets_no_warning(
    federation: InProcessFederation, caplog: pytest.LogCaptureFixture
) -> None:
    """Dan is counted and leaves before the first sum of gradients, so there is no sum to compare with."""
    others = ("ada", "bob", "cleo")
    hold = federation.network.hold("dan", others, lambda message: isinstance(message, Ready) and message.spec.weighted)
    federation.start_all(TrainingProgram(28))
    federation.wait_until(
        lambda: all(federation[name].is_waiting_for("Ready", "dan") for name in others) and hold.reached
    )
    assert [len(federation[name].journal()) for name in others] == [1, 1, 1]  # the count
    federation.kill("dan")
    config_edit.remove_participant(federation.path, "dan")
    assert federation.results() == {"ada": [], "bob": [], "cleo": []}
    assert {entry.addends for entry in federation["ada"].journal().entries} == {4, 3}
    assert logged(caplog) == []


def test_warnings_in_a_grid_count_the_column_group(tmp_path: Path) -> None:
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    path = new_federation(tmp_path, names, [Cell(int(name[1]), int(name[3])) for name in names])
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(TrainingProgram(5))
        for warnings in federation.results().values():
            assert warnings == [
                str(each) for each in find_warnings(5, FirstLayer(6, 3, relu=False), members=3, total_records=15)
            ]


def test_local_peers_get_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    def work(peers: cgd.Peers) -> int:
        model = nn.Linear(9, 1)
        cgd.confine(model, start="zeros")
        optimizer = cgd.ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=1)
        model(torch.ones(1, 9)).sum().backward()
        optimizer.step()
        return len(optimizer.privacy_warnings)

    with cgd.local_peers(3) as members:
        assert members.run(work) == [0, 0, 0]
    assert logged(caplog) == []
