"""Attacks on any view: those that apply have results, the others give a reason."""

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
from cgd.audit.registry import attacks_on_views, get
from cgd.audit.results import AttackResult, Inapplicable
from cgd.audit.scenario import Sample, Scenario
from cgd.audit.schemes import observe
from cgd.audit.view import Truth, View

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH = samples("digits", 1)[0][-50:], samples("digits", 1)[1][-50:]


def run(view: View, truth: Truth, fresh: Sample = FRESH) -> dict[str, list[AttackResult]]:
    return {
        attack.id: [each for each in attack.run_on(view, truth, fresh) if isinstance(each, AttackResult)]
        for attack in attacks_on_views()
    }


def reasons(view: View, truth: Truth, fresh: Sample = FRESH) -> dict[str, str]:
    return {
        attack.id: " ".join(each.why for each in attack.run_on(view, truth, fresh) if isinstance(each, Inapplicable))
        for attack in attacks_on_views()
    }


@pytest.mark.slow
def test_network_with_few_records_leaks_to_all_attacks_that_apply() -> None:
    scenario, fresh = membership.scenario(3, 4, hidden=16, seed=1)
    view, truth = observe(scenario, "cgd")
    assert view.describe() == "2 honest, 6 records, 4 rounds"
    results = run(view, truth, fresh)
    assert [each.succeeds for each in results["membership"]][:2] == [True, True]
    assert results["records"][0].succeeds
    assert [each.setting for each in results["inversion"]] == [
        "2 honest, 6 records, 1 round",
        "2 honest, 6 records, 3 rounds",
    ]
    for each in chain.from_iterable(results.values()):
        assert each.scheme == "cgd"
        assert not each.control
    why = reasons(view, truth, fresh)
    assert "linear model" in why["gram"]
    assert "nobody has dropped out" in why["dropout"]


def test_linear_regression_leaks_its_second_moments() -> None:
    view, truth = observe(gram.scenario("own batches"), "cgd")
    x, y = samples("diabetes", 0)
    results = run(view, truth, (x[-40:], y[-40:]))
    assert results["gram"][0].succeeds
    assert results["gram"][0].value < 1e-5
    assert not any(each.succeeds for each in results["membership"])
    why = reasons(view, truth, (x[-40:], y[-40:]))
    assert "numbers, not classes" in why["labels"]
    assert "300 records" in why["inversion"]


def test_dropout_reveals_a_gradient() -> None:
    assert run(*observe(dropout.scenario(), "cgd"))["dropout"][0].succeeds


@pytest.mark.parametrize("name", ["membership", "records", "labels", "gram"])
def test_other_attacks_use_the_rounds_before_members_change(name: str) -> None:
    """Their results are those of a run that ended there; a participant that joins later is not attacked."""
    scenario, fresh = membership.scenario(3, 6, hidden=16, seed=1)
    short = observe(replace(scenario, rounds=4), "cgd")
    view, truth = observe(replace(scenario, dropouts={4: ("colluder-2",)}), "cgd")
    x, y = fresh
    late = replace(view.rounds[-1], members=(*view.rounds[-1].members, "late"))
    view = replace(view, rounds=(*view.rounds[:-1], late))
    later = Truth(
        {**truth.x, "late": x[-3:]}, {**truth.y, "late": y[-3:]}, {**truth.models, "late": view.honest_sum(0)}
    )
    assert get(name).run_on(view, later, fresh) == get(name).run_on(*short, fresh)


def test_models_of_the_truth_are_those_before_members_change() -> None:
    """Minus the displacement after these rounds, they are the origins."""
    scenario, fresh = membership.scenario(3, 6, hidden=16, seed=1)
    view, truth = observe(replace(scenario, dropouts={4: ("colluder-2",)}), "cgd")
    seen: list[tuple[View, Truth]] = []

    def see(view: View, truth: Truth, _: Sample) -> list[AttackResult]:
        seen.append((view, truth))
        return []

    replace(get("labels"), on_view=(see,)).run_on(view, truth, fresh)
    [(cut, known)] = seen
    assert len(cut.rounds) == 4
    for name, model in known.models.items():
        origin = truth.models[name] - view.final_displacement
        # Sums of a few numbers below 1, in single precision.
        assert torch.allclose(model - cut.final_displacement, origin, rtol=0, atol=1e-6)
        assert not torch.allclose(truth.models[name] - cut.final_displacement, origin, rtol=0, atol=1e-3)


def test_change_of_n_counts_as_a_change_of_members() -> None:
    """As in the view of a single trace, in which all others are one colluder."""
    view, truth = observe(dropout.scenario(), "cgd")
    rounds = [replace(each, members=view.rounds[0].members) for each in view.rounds]
    [result] = get("labels").run_on(replace(view, rounds=tuple(rounds)), truth, FRESH)
    assert isinstance(result, AttackResult)
    assert result.setting == "3 honest, 120 records, 10 rounds"


def test_error_of_an_attack_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an InputError is a reason why an attack does not apply."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("cgd.audit.attacks.labels._estimate_counts", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        get("labels").run_on(*observe(dropout.scenario(), "cgd"), FRESH)


@pytest.mark.parametrize(
    ("layer", "on"),
    [(nn.Dropout, "random numbers"), (partial(nn.BatchNorm1d, 8, track_running_stats=False), "the other records")],
)
def test_inversion_does_not_apply_if_records_are_not_independent(layer: Callable[[], nn.Module], on: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), layer(), nn.Linear(8, 10))

    scenario, fresh = membership.scenario(2, 1)
    why = reasons(*observe(replace(scenario, build_model=build), "cgd"), fresh)["inversion"]
    assert f"a {type(layer()).__name__}, which makes a record's gradient depend on {on}" in why


@pytest.mark.parametrize("fresh", [0, 4])
def test_membership_does_not_apply_without_fresh_records(fresh: int) -> None:
    scenario, (x, y) = membership.scenario(5, 2)
    why = reasons(*observe(scenario, "secure"), (x[:fresh], y[:fresh]))["membership"]
    assert f"10 records and {fresh} fresh ones" in why


def test_attacks_on_the_first_layer_do_not_apply_to_convolutions() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))

    x, y = samples("digits", 2)
    data = {name: (x[place * 9 : place * 9 + 9], y[place * 9 : place * 9 + 9]) for place, name in enumerate("abc")}
    view, truth = observe(Scenario(data, build, ["c"], rounds=2), "cgd")
    why = reasons(view, truth)
    assert "begins with Conv2d" in why["membership"]
    assert "begins with Conv2d" in why["records"]
    assert [each.attack for each in run(view, truth)["membership"]] == [
        "membership, by the gradient of the record",
        "membership, from the loss of final models",
        "membership, from the loss of the displacement",
    ]


def test_view_of_the_first_rounds() -> None:
    view, _ = observe(dropout.scenario(), "cgd")
    first = view.until(3)
    assert len(first.rounds) == 3
    assert all(len(each.addends) == 3 for each in first.coalition.values())
    assert torch.equal(first.honest_sum(2), view.honest_sum(2))
    assert torch.equal(first.final_displacement, view.rounds[3].displacement)
