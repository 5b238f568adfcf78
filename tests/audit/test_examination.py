"""All attacks on any view: those that apply find what there is, the others say why they do not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd.audit.attacks import dropout, gram, membership
from cgd.audit.embedded import samples
from cgd.audit.examination import described, examine
from cgd.audit.registry import CATALOGUE
from cgd.audit.schemes import Sample, Scenario, observe
from cgd.audit.view import Finding, Inapplicable, Truth, View

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH = samples("digits", 1)[0][-50:], samples("digits", 1)[1][-50:]


def found(view: View, truth: Truth, fresh: Sample = FRESH) -> dict[str, list[Finding]]:
    return {
        name: [each for each in results if isinstance(each, Finding)]
        for name, results in examine(view, truth, fresh).items()
    }


def reasons(view: View, truth: Truth, fresh: Sample = FRESH) -> dict[str, str]:
    return {
        name: " ".join(each.why for each in results if isinstance(each, Inapplicable))
        for name, results in examine(view, truth, fresh).items()
    }


def test_a_network_with_few_records_leaks_in_every_way_that_applies() -> None:
    colony, fresh = membership.colony(3, 4, hidden=16, seed=1)
    view, truth = observe(colony, "cgd")
    assert described(view) == "2 honest, 6 records, 4 rounds"
    results = found(view, truth, fresh)
    assert set(results) <= {each.id for each in CATALOGUE}
    assert [each.succeeds for each in results["membership"]][:2] == [True, True]
    assert results["records"][0].succeeds
    assert len(results["inversion"]) == 2
    assert {each.setting for each in results["inversion"]} == {
        "2 honest, 6 records, 1 round",
        "2 honest, 6 records, 3 rounds",
    }
    for each in chain.from_iterable(results.values()):
        assert each.scheme == "cgd"
        assert not each.control
    why = reasons(view, truth, fresh)
    assert "linear model" in why["gram"]
    assert "nobody has dropped out" in why["dropout"]


def test_a_linear_regression_leaks_its_second_moments() -> None:
    view, truth = observe(gram.colony("own batches"), "cgd")
    x, y = samples("diabetes", 0)
    results = found(view, truth, (x[-40:], y[-40:]))
    assert results["gram"][0].succeeds
    assert results["gram"][0].value < 1e-5
    assert not any(each.succeeds for each in results["membership"])
    why = reasons(view, truth, (x[-40:], y[-40:]))
    assert "numbers, not classes" in why["labels"]
    assert "300 records" in why["inversion"]


def test_the_gradient_of_one_who_drops_out() -> None:
    assert found(*observe(dropout.colony(), "cgd"))["dropout"][0].succeeds


def test_other_attacks_use_the_rounds_before_the_members_change() -> None:
    """What they find is what they find in a run that ended there; who joins later is not looked for."""
    colony, fresh = membership.colony(3, 6, hidden=16, seed=1)
    short = observe(replace(colony, rounds=4), "cgd")
    view, truth = observe(replace(colony, dropouts={4: ("colluder-2",)}), "cgd")
    x, y = fresh
    late = replace(view.rounds[-1], members=(*view.rounds[-1].members, "late"))
    view = replace(view, rounds=(*view.rounds[:-1], late))
    later = Truth(
        {**truth.x, "late": x[-3:]}, {**truth.y, "late": y[-3:]}, {**truth.models, "late": view.honest_sum(0)}
    )
    names = ("membership", "records", "labels", "gram")
    assert examine(view, later, fresh, names) == examine(*short, fresh, names)


def test_a_change_of_n_alone_is_a_change_of_members() -> None:
    """As in the view of one recording, in which everybody else is one colluder."""
    view, truth = observe(dropout.colony(), "cgd")
    rounds = [replace(each, members=view.rounds[0].members) for each in view.rounds]
    [result] = examine(replace(view, rounds=tuple(rounds)), truth, FRESH, ["labels"])["labels"]
    assert isinstance(result, Finding)
    assert result.setting == "3 honest, 120 records, 10 rounds"


def test_a_failure_is_not_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("cgd.audit.attacks.labels.label_counts", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        examine(*observe(dropout.colony(), "cgd"), FRESH, ["labels"])


@pytest.mark.parametrize(
    ("layer", "on"),
    [(nn.Dropout, "chance"), (partial(nn.BatchNorm1d, 8, track_running_stats=False), "the other records")],
)
def test_a_network_that_does_not_take_records_one_by_one_is_not_searched(
    layer: Callable[[], nn.Module], on: str
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), layer(), nn.Linear(8, 10))

    colony, fresh = membership.colony(2, 1)
    why = reasons(*observe(replace(colony, build_model=build), "cgd"), fresh)["inversion"]
    assert f"a {type(layer()).__name__}, with which a record's gradient depends on {on}" in why


@pytest.mark.parametrize("fresh", [0, 4])
def test_without_fresh_records_membership_is_not_asked(fresh: int) -> None:
    colony, (x, y) = membership.colony(5, 2)
    told = reasons(*observe(colony, "secure"), (x[:fresh], y[:fresh]))["membership"]
    assert f"10 records and {fresh} fresh ones" in told


def test_a_network_that_begins_with_a_convolution_is_spared_what_needs_a_first_layer() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))

    x, y = samples("digits", 2)
    data = {name: (x[place * 9 : place * 9 + 9], y[place * 9 : place * 9 + 9]) for place, name in enumerate("abc")}
    view, truth = observe(Scenario(data, build, ["c"], rounds=2), "cgd")
    why = reasons(view, truth)
    assert "begins with Conv2d" in why["membership"]
    assert "begins with Conv2d" in why["records"]
    assert [each.attack for each in found(view, truth)["membership"]] == [
        "membership, from the loss of final models",
        "membership, from the loss of the displacement",
    ]


def test_the_first_rounds_are_a_view_of_their_own() -> None:
    view, _ = observe(dropout.colony(), "cgd")
    first = view.until(3)
    assert len(first.rounds) == 3
    assert all(len(each.addends) == 3 for each in first.coalition.values())
    assert torch.equal(first.honest_sum(2), view.honest_sum(2))
    assert torch.equal(first.final_displacement, view.rounds[3].displacement)
