"""Cautions: in which settings there are some, in which there are none, and where they are told."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cgd
from cgd.federation import config_edit, member
from cgd.optim.grid import Cell
from cgd.optim.privacy_warnings import FirstLayer, cautions, of_departure
from cgd.secagg.messages import Ready
from support.lives import Village, found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.optim.privacy_warnings import PrivacyWarning
    from support.lives import Life

WIDE = FirstLayer(inputs=30, units=8)


def kinds(all_found: tuple[PrivacyWarning, ...]) -> list[str]:
    return [each.kind for each in all_found]


# In which settings.


@pytest.mark.parametrize(
    ("own", "layer", "everyone", "expected"),
    [
        (93, WIDE, None, []),
        (93, WIDE, 279, []),
        (92, WIDE, 5000, ["leverage"]),
        (31, WIDE, None, ["leverage"]),
        (500, WIDE, 5000, []),
        (30, WIDE, 5000, ["span"]),
        (30, FirstLayer(30, 8, bias=False), 5000, ["leverage"]),
        (90, FirstLayer(30, 8, bias=False), 5000, []),
        (12, WIDE, 30, ["span"]),
        (5, WIDE, 5000, ["span"]),
        (4, WIDE, 5000, ["few records"]),
        (1, WIDE, None, ["few records"]),
        (4, WIDE, 12, ["few records", "span"]),
        (4, FirstLayer(30, 8, relu=False), 5000, ["span"]),
        (4, FirstLayer(30, 8, bias=False), 5000, ["span"]),
        (5000, FirstLayer(30, 1, relu=False, alone=True), 20_000, ["second moments"]),
        (5000, FirstLayer(30, 2, relu=False, alone=True), 20_000, []),
        (5000, FirstLayer(30, 1), 20_000, []),
        (20, FirstLayer(30, 1, relu=False, alone=True), 20_000, ["span", "second moments"]),
        (1, None, 3, []),
    ],
)
def test_which_settings_are_cautioned(
    own: int, layer: FirstLayer | None, everyone: int | None, expected: list[str]
) -> None:
    assert kinds(cautions(own, layer, members=5, everyone=everyone)) == expected


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 5), st.booleans(), st.booleans())
def test_three_records_for_each_input_end_all_cautions_of_a_network(
    inputs: int, units: int, more: int, bias: bool, relu: bool
) -> None:
    layer = FirstLayer(inputs, units, bias, relu)
    enough = max(3 * layer.rank, 5) + more
    assert cautions(enough, layer, members=3, everyone=3 * enough) == ()
    if layer.rank > 1:
        assert kinds(cautions(layer.rank - 1, layer, members=3, everyone=3 * enough))[0] in ("few records", "span")
    assert cautions(3 * layer.rank - 1, layer, members=3, everyone=3 * enough) != ()


def test_a_caution_has_the_figures_of_the_run_and_who_it_takes() -> None:
    three, five, unknown = (str(cautions(12, WIDE, members=members)[0]) for members in (3, 5, 0))
    assert three.startswith(
        "we bring 12 records for a first layer with 30 inputs and a bias; each of the other two mem"
    )
    assert "3 of the 4 others together can tell" in five
    assert "the others, all but one, together can tell" in unknown
    assert five.endswith("Bring at least 93 records, merge with a neighbour before you join, or leave out columns")
    assert str(cautions(1, WIDE, members=5)[0]).startswith("we bring 1 record; 3 of the 4 others together can compute")
    together = str(cautions(12, WIDE, members=5, everyone=29)[0])
    assert together.startswith("all members together have 29 records for a first layer with 30 inputs and a bias; each")
    assert "Train on at least 186 records together" in together
    assert str(of_departure(["dan"])).startswith(
        "dan left between two steps; from the sums before and after, the others"
    )
    likely = str(cautions(40, WIDE, members=5)[0])
    assert "3 of the 4 others together can tell better than by chance" in likely
    assert "cleo, dan left between two steps" in str(of_departure(["dan", "cleo"]))
    assert "the sum of their gradients" in str(of_departure(["dan", "cleo"]))


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
        (nn.Linear(5, 1), FirstLayer(5, 1, relu=False, alone=True)),
        (nn.Sequential(nn.Linear(5, 1, bias=False)), FirstLayer(5, 1, bias=False, relu=False, alone=True)),
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
def test_which_layer_sees_the_records(model: nn.Module, layer: FirstLayer | None) -> None:
    assert FirstLayer.of(model) == layer


def test_a_confined_model_can_be_copied_and_saved_as_before() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    cgd.confine(model)
    content = io.BytesIO()
    torch.save([*copy.deepcopy(model).parameters()], content)
    content.seek(0)
    assert all(map(torch.equal, torch.load(content, weights_only=True), model.parameters()))


# Where they are told.


@dataclass
class Sharing:
    """A program that trains on so many records of 6 features; returns the cautions it was given."""

    records: int
    hidden: int = 3
    steps: int = 4
    size: float = 1.0

    def __call__(self, life: Life) -> list[str]:
        peers = life.peers
        x = self.size * torch.randn(self.records, 6, generator=torch.Generator().manual_seed(sum(map(ord, peers.me))))
        model = nn.Sequential(nn.Linear(6, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))
        cgd.confine(model, seed=peers.seed)
        groups: list[dict[str, Any]] = [
            {"params": list(model[0].parameters()), "peers": peers.groups.get("column", peers)},
            {"params": list(model[2].parameters())},
        ]
        optimizer = cgd.ConfinedSGD(groups, lr=0.1, peers=peers, samples=self.records)
        for step in range(self.steps):
            life.at(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            self.gradient(model)
            optimizer.step()
        return [str(each) for each in optimizer.cautions]

    def gradient(self, model: nn.Sequential) -> None:
        """Where one could enter something else."""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "caution"]


@pytest.fixture
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    with Village(found(tmp_path, ("ada", "bob", "cleo", "dan")), tmp_path / "state") as made:
        yield made


def test_in_a_federation_a_caution_is_logged_once_and_kept(village: Village, caplog: pytest.LogCaptureFixture) -> None:
    for name, records in {"ada": 5, "bob": 21, "cleo": 21, "dan": 21}.items():
        village.start(name, Sharing(records))
    results = village.results()
    layer = FirstLayer(6, 3)
    expected = [str(each) for each in cautions(5, layer, members=4, everyone=68)]
    assert expected[0].startswith("we bring 5 records for a first layer with 6 inputs and a bias; 2 of the 3 others")
    assert results == {"ada": expected, "bob": [], "cleo": [], "dan": []}
    assert told(caplog) == [f"caution: {each}" for each in expected]
    assert {(each.name, each.levelno) for each in caplog.records if getattr(each, "event", "") == "caution"} == {
        ("cgd.optim", logging.WARNING)
    }


def test_who_comes_back_is_told_again(village: Village, caplog: pytest.LogCaptureFixture) -> None:
    village.start("ada", Sharing(5), halt=2)
    for name in ("bob", "cleo", "dan"):
        village.start(name, Sharing(21))
    village["ada"].until(2)
    assert len(told(caplog)) == 1
    village.kill("ada")
    village.start("ada", Sharing(5))
    assert len(village.results()["ada"]) == 1
    assert len(told(caplog)) == 2


def test_who_stays_is_told_of_a_departure(village: Village, caplog: pytest.LogCaptureFixture) -> None:
    village.start_all(Sharing(21), halt=2)
    for life in village:
        life.until(2)
    village.kill("dan")
    config_edit.without(village.path, "dan")
    for life in village:
        life.go_on()
    results = village.results()
    assert results == {name: [str(of_departure(["dan"]))] for name in ("ada", "bob", "cleo")}
    assert told(caplog) == [f"caution: {of_departure(['dan'])}"] * 3


@dataclass
class Steering(Sharing):
    """A program that enters something else than its gradient."""

    times: float = 1.0

    def gradient(self, model: nn.Sequential) -> None:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad += self.times


@pytest.mark.parametrize("times", [0.0, 10.0])
def test_who_is_steered_is_told_once(village: Village, caplog: pytest.LogCaptureFixture, times: float) -> None:
    """Small records make small gradients, whatever the origins are: what is entered is hundreds of times larger.

    Without steering, records are of the usual size: gradients of small ones differ a lot between members, by chance.
    """
    size = 0.05 if times else 1.0
    for name in ("ada", "bob", "cleo"):
        village.start(name, Sharing(21, size=size))
    village.start("dan", Steering(21, size=size, times=times))
    results = village.results()
    for name in ("ada", "bob", "cleo"):
        assert len(results[name]) == (1 if times else 0)
    if times:
        assert results["ada"][0].startswith("in step 1 the sum of all first-layer gradients is ")
    assert len(told(caplog)) == (3 if times else 0)


def test_a_departure_before_the_first_step_shows_nothing(village: Village, caplog: pytest.LogCaptureFixture) -> None:
    """Dan is counted, and gone before the first gradients are summed: there is no sum to take a difference with."""
    others = ("ada", "bob", "cleo")
    hold = village.network.hold("dan", others, lambda message: isinstance(message, Ready) and message.spec.weighted)
    village.start_all(Sharing(21))
    village.until(lambda: all(village[name].waits_for("Ready", "dan") for name in others) and hold.reached)
    assert [len(village[name].journal()) for name in others] == [1, 1, 1]  # the count
    village.kill("dan")
    config_edit.without(village.path, "dan")
    assert village.results() == {"ada": [], "bob": [], "cleo": []}
    assert {entry.addends for entry in village["ada"].journal().entries} == {4, 3}
    assert told(caplog) == []


def test_in_a_grid_the_first_layer_is_the_columns(tmp_path: Path) -> None:
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    path = found(tmp_path, names, [Cell(int(name[1]), int(name[3])) for name in names])
    with Village(path, tmp_path / "state") as village:
        village.start_all(Sharing(5))
        for said in village.results().values():
            assert said == [str(each) for each in cautions(5, FirstLayer(6, 3), members=3, everyone=15)]


def test_inside_one_process_nothing_leaves_and_nobody_is_cautioned(caplog: pytest.LogCaptureFixture) -> None:
    def work(peers: cgd.Peers) -> int:
        model = nn.Linear(9, 1)
        cgd.confine(model)
        optimizer = cgd.ConfinedSGD(model.parameters(), 0.1, peers=peers, samples=1)
        model(torch.ones(1, 9)).sum().backward()
        optimizer.step()
        return len(optimizer.cautions)

    with cgd.local_peers(3) as colony:
        assert colony.run(work) == [0, 0, 0]
    assert told(caplog) == []
