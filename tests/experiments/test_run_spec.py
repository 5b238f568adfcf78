"""The settings of one run: conversion, invalid settings, JSON, and the names under which results are stored."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgd import JOINT_REVEALS_RECORDS, InputError, LocalTraining, Skew
from cgd.dp.settings import PrivacySettings
from cgd.experiments import spec
from cgd.experiments.datasets import NAMES
from cgd.experiments.spec import RunSpec
from support.toml_values import VALUES


def positive(highest: float = 1e6) -> st.SearchStrategy[float]:
    return st.floats(0, highest, exclude_min=True)


def local_trainings() -> st.SearchStrategy[LocalTraining]:
    return st.builds(LocalTraining, st.integers(1, 9), st.integers(0, 99), st.floats(0, 9), st.floats(0, 0.99))


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    method = draw(st.sampled_from(spec.METHODS))
    steps = draw(st.integers(1, 10**6))
    low, high = draw(positive()), draw(positive())
    linear = method in ("cgd", "private-centralised", "dp-sgd") and draw(st.booleans())
    by_norm = method in ("centralised", "local") and draw(st.booleans())
    return RunSpec(
        method=method,
        data=draw(st.sampled_from(NAMES)),
        samples=draw(st.integers(0, 10**5)),
        normalise=draw(st.sampled_from(["none", "unit"])),
        rows=draw(st.integers(1, 1000)),
        columns=draw(st.integers(1, 100)),
        skew=draw(st.none() | st.builds(Skew, st.integers(1, 10**9)) | st.builds(Skew, st.none(), positive())),
        mode="towers" if method == "fedavg" else draw(st.sampled_from(["towers", "joint"])),
        accept=JOINT_REVEALS_RECORDS,
        hidden=tuple(draw(st.lists(st.integers(1, 1000), max_size=3))),
        activation=draw(st.sampled_from(spec.ACTIVATIONS)),
        bias=draw(st.booleans()),
        delta=(low, high) if low < high else low,
        steps=steps,
        lr=draw(st.one_of(st.integers(0, 9), st.floats(0, 10))),
        mu=draw(st.floats(0, 10)) if method == "cgd" and not linear else 0.0,
        hold=draw(st.integers(0, steps)) if method == "cgd" and not linear else 0,
        schedule="linear" if linear else "paper",
        momentum=draw(st.floats(0, 0.99)) if linear else 0.0,
        batches=draw(st.integers(1, 10)) if method == "fedsgd" else 1,
        local=draw(local_trainings()) if method == "fedavg" else None,
        rule=draw(st.sampled_from(["running-norm", "first-norm"])) if by_norm else "sgd",
        seed=draw(st.integers(0, 2**70)),
        sample=draw(st.integers(1, 100)),
        evaluations=draw(st.integers(1, 1000)),
        measure=draw(st.sampled_from(["held-out", "training", "validation"])),
        arithmetic=draw(st.sampled_from(["float", "ring"])) if method == "cgd" else "float",
        epsilon=draw(positive() if method == "dp-sgd" else st.floats(0, 10)),
        dp_delta=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        batch=draw(st.integers(1, 1000)),
        clip=draw(positive()),
        privacy=PrivacySettings(2.0, 1e-5, steps) if method == "private-centralised" else None,
    )


@given(specs())
def test_run_spec_round_trips_through_json(one: RunSpec) -> None:
    again = RunSpec.from_table(json.loads(json.dumps(one.as_json())), "here")
    assert again == one
    assert again.slug == one.slug
    assert hash(again) == hash(one)


@given(specs(), specs(), st.sampled_from([each.name for each in fields(RunSpec)]))
def test_slugs_are_equal_only_for_equal_runs(one: RunSpec, other: RunSpec, name: str) -> None:
    assert (one.slug == other.slug) == (one == other)
    try:
        changed = replace(one, **{name: getattr(other, name)})
    except InputError:  # such as hold beyond the steps of the other
        assume(False)
    assert (changed.slug == one.slug) == (changed == one)
    assert re.fullmatch(r"[a-z0-9.+-]{1,200}", changed.slug)


def test_slugs_of_stored_results_do_not_change() -> None:
    """Results are stored under these names: another slug is another format."""
    table_8 = {"data": "mnist", "bias": False, "mode": "joint", "accept": JOINT_REVEALS_RECORDS, "rows": 1000}
    table_8 |= {"start": "zeros"}
    assert RunSpec.from_table({**table_8, "steps": 2000}, "").slug == "mnist-cgd-1000x1-d0.1-t2000-4cea957b"
    private = RunSpec("dp-sgd", "mnist", rows=7, columns=2, hidden=(), delta=(0.05, 0.2), epsilon=3, start="zeros")
    assert private.slug == "mnist-dp-sgd-towers-d0.05-0.2-eps3-t500-83a02e98"


def test_new_settings_do_not_change_the_results_of_former_versions() -> None:
    assert not {"normalise", "schedule", "momentum", "rule", "skew"} & RunSpec().as_json().keys()
    assert RunSpec(rule="first-norm").as_json()["rule"] == "first-norm"
    assert RunSpec(skew=Skew(dirichlet=1)).as_json()["skew"] == {"dirichlet": 1.0}
    changed = RunSpec(normalise="unit", schedule="linear", momentum=0.9).as_json()
    assert (changed["normalise"], changed["schedule"], changed["momentum"]) == ("unit", "linear", 0.9)


def test_accept_does_not_change_the_run() -> None:
    accepted = RunSpec(accept=JOINT_REVEALS_RECORDS)
    assert accepted == RunSpec()
    assert accepted.slug == RunSpec().slug
    assert accepted.as_json()["accept"] == JOINT_REVEALS_RECORDS
    assert "accept" not in RunSpec().as_json()


def test_explicit_defaults_do_not_change_the_slug() -> None:
    assert RunSpec.from_table(RunSpec().as_json(), "").slug == RunSpec().slug
    assert RunSpec(start="zeros").slug == "digits-cgd-1x1-d0.1-t500-44136fa3"
    assert RunSpec().slug != RunSpec(start="zeros").slug


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (RunSpec(lr=1), RunSpec(lr=1.0)),
        (RunSpec(lr=0.0), RunSpec(lr=-0.0)),
        (RunSpec(delta=(1, 2)), RunSpec(delta=(1.0, 2.0))),
        (RunSpec(skew=Skew(dirichlet=1)), RunSpec(skew=Skew(dirichlet=1.0))),
    ],
)
def test_equal_numbers_have_equal_slugs(one: RunSpec, same: RunSpec) -> None:
    assert one == same
    assert one.slug == same.slug


@pytest.mark.parametrize(
    ("table", "attribute", "value"),
    [
        ({"lr": 1}, "lr", 1.0),
        ({"delta": 2}, "delta", 2.0),
        ({"delta": [1, 2.5]}, "delta", (1.0, 2.5)),
        ({"hidden": []}, "hidden", ()),
        ({"hidden": [3, 4]}, "hidden", (3, 4)),
        ({"steps": 7, "hold": 7}, "hold", 7),
        ({"lr": 0}, "lr", 0.0),
        ({"skew": {"classes": 2}}, "skew", Skew(classes=2)),
        ({"skew": {"dirichlet": 1}}, "skew", Skew(dirichlet=1.0)),
    ],
)
def test_from_table_converts_values(table: dict[str, Any], attribute: str, value: Any) -> None:
    found = getattr(RunSpec.from_table(table, "here"), attribute)
    assert found == value
    assert repr(found) == repr(value)  # the same types, also within a tuple


INVALID_TABLES: list[tuple[dict[str, Any], str]] = [
    # names
    (
        {"stepz": 5},
        "there is no setting 'stepz' (did you mean 'steps'?); choose one of method, data, samples, normalise",
    ),
    ({"Rows": 5}, "there is no setting 'Rows' (did you mean 'rows'?)"),
    ({"xyzzy": 5}, "there is no setting 'xyzzy'; choose one of"),
    ({"label": "in common"}, "there is no setting 'label'"),
    # types
    ({"rows": True}, "rows is True; it must be a whole number"),
    ({"rows": 2.0}, "rows is 2.0; it must be a whole number"),
    ({"rows": "2"}, "rows is '2'; it must be a whole number"),
    ({"bias": 1}, "bias is 1; it must be true or false"),
    ({"lr": True}, "lr is True; it must be a number"),
    ({"lr": "0.5"}, "lr is '0.5'; it must be a number"),
    ({"lr": [0.5]}, "lr is [0.5]; it must be a number"),
    ({"method": 3}, "method is 3; it must be a text"),
    ({"data": ["iris"]}, "data is ['iris']; it must be a text"),
    ({"hidden": 256}, "hidden is 256; it must be a list of whole numbers"),
    ({"hidden": [2.5]}, "hidden is [2.5]; it must be a list of whole numbers"),
    ({"hidden": [True]}, "hidden is [True]; it must be a list of whole numbers"),
    ({"delta": True}, "delta is True; it must be a number"),
    ({"delta": "big"}, "delta is 'big'; it must be a number"),
    ({"delta": ["a", "b"]}, "delta is ['a', 'b']; it must be a number, or a list of two"),
    ({"delta": [True, 2]}, "delta is [True, 2]; it must be a number, or a list of two"),
    ({"delta": [[1], [2]]}, "delta is [[1], [2]]; it must be a number, or a list of two"),
    # choices
    ({"method": "cdg"}, "method is 'cdg' (did you mean 'cgd'?); choose one of cgd, centralised, local, fedsgd"),
    ({"data": "mnits"}, "data is 'mnits' (did you mean 'mnist'?); choose one of breast-cancer"),
    ({"mode": "tower"}, "mode is 'tower' (did you mean 'towers'?); choose one of towers, joint"),
    ({"activation": "swish"}, "activation is 'swish'; choose one of relu, tanh"),
    ({"arithmetic": "double"}, "arithmetic is 'double'; choose one of float, ring"),
    ({"measure": "test"}, "measure is 'test'; choose one of held-out, training, validation"),
    ({"normalise": "unity"}, "normalise is 'unity' (did you mean 'unit'?); choose one of none, unit, centred"),
    ({"schedule": "cosine"}, "schedule is 'cosine'; choose one of paper, linear"),
    # skew
    ({"skew": 2}, "skew is 2; it must be a table: skew = { classes = 2 } or skew = { dirichlet = 0.1 }"),
    (
        {"skew": {"class": 2}},
        "skew: the setting is 'class' (did you mean 'classes'?); choose one of classes",
    ),
    ({"skew": {}}, "skew: classes is None and dirichlet is None; a skew has exactly one of them"),
    ({"skew": {"classes": 2, "dirichlet": 0.1}}, "skew: classes is 2 and dirichlet is 0.1; a skew has exactly one"),
    ({"skew": {"classes": 0}}, "skew: classes is 0; it must be a whole number from 1"),
    ({"skew": {"classes": True}}, "skew: classes is True; it must be a whole number from 1"),
    ({"skew": {"classes": 2.0}}, "skew: classes is 2.0; it must be a whole number from 1"),
    ({"skew": {"dirichlet": 0.0}}, "skew: dirichlet is 0.0; it must be a number above 0"),
    ({"skew": {"dirichlet": -1}}, "skew: dirichlet is -1; it must be a number above 0"),
    ({"skew": {"dirichlet": math.nan}}, "skew: dirichlet is nan; it must be a number above 0"),
    ({"skew": {"dirichlet": math.inf}}, "skew: dirichlet is inf; it must be a number above 0, at most"),
    ({"skew": {"dirichlet": "low"}}, "skew: dirichlet is 'low'; it must be a number above 0"),
    # values
    ({"samples": -1}, "samples is -1; it must be at least 0"),
    ({"rows": 0}, "rows is 0; it must be at least 1"),
    ({"columns": 0}, "columns is 0; it must be at least 1"),
    ({"steps": 0}, "steps is 0; it must be at least 1"),
    ({"sample": 0}, "sample is 0; it must be at least 1"),
    ({"evaluations": 0}, "evaluations is 0; it must be at least 1"),
    ({"batch": 0}, "batch is 0; it must be at least 1"),
    ({"seed": -1}, "seed is -1; it must be at least 0"),
    ({"hold": -1}, "hold is -1; it must be at least 0"),
    ({"hold": 501}, "hold is 501 and steps is 500; hold must not be larger than steps"),
    ({"hidden": [3, 0]}, "hidden is [3, 0]; every layer needs at least one unit"),
    ({"delta": 0}, "delta is 0.0; it is a standard deviation and must be a finite number above 0"),
    ({"delta": -0.1}, "delta is -0.1; it is a standard deviation and must be a finite number above 0"),
    ({"delta": math.nan}, "delta is nan; it is a standard deviation and must be a finite number above 0"),
    ({"delta": math.inf}, "delta is inf; it is a standard deviation and must be a finite number above 0"),
    ({"delta": [-0.1, 0.1]}, "delta is [-0.1, 0.1]; a range must be [low, high] with 0 < low < high, both finite"),
    ({"delta": [0.2, 0.1]}, "delta is [0.2, 0.1]; a range must be [low, high]"),
    ({"delta": [0.1]}, "delta is [0.1]; a range must be [low, high]"),
    ({"delta": []}, "delta is []; a range must be [low, high]"),
    ({"delta": [1, 2, 3]}, "delta is [1.0, 2.0, 3.0]; a range must be [low, high]"),
    ({"delta": [1, math.inf]}, "delta is [1.0, inf]; a range must be [low, high] with 0 < low < high, both finite"),
    ({"delta": [math.nan, 1]}, "delta is [nan, 1.0]; a range must be [low, high]"),
    ({"lr": -0.5}, "lr is -0.5; it must be a finite number, at least 0"),
    ({"lr": math.nan}, "lr is nan; it must be a finite number, at least 0"),
    ({"lr": 1e39}, "lr is 1e+39, beyond the range of single precision; use at most 1e+30"),
    ({"delta": 1e300}, "delta is 1e+300, beyond the range of single precision; use at most 1e+30"),
    ({"delta": [1, 1e300]}, "delta is 1e+300, beyond the range of single precision; use at most 1e+30"),
    ({"lr": 10**400}, "lr is inf; it must be a finite number, at least 0"),
    ({"lr": -(10**400)}, "lr is -inf; it must be a finite number, at least 0"),
    ({"mu": -1}, "mu is -1.0; it must be a finite number, at least 0"),
    ({"mu": math.inf}, "mu is inf; it must be a finite number, at least 0"),
    ({"momentum": -0.1}, "momentum is -0.1; it must be a finite number, at least 0"),
    ({"momentum": 1}, "momentum is 1.0; it must be below 1, 0.9 is common"),
    ({"momentum": math.nan}, "momentum is nan; it must be a finite number, at least 0"),
    (
        {"schedule": "linear", "mu": 0.1},
        "mu is 0.1, hold is 0 and the schedule is linear; set either mu and hold, or schedule",
    ),
    (
        {"method": "centralised", "schedule": "linear"},
        "schedule is linear and the method is centralised; only cgd, private-centralised and dp-sgd use it",
    ),
    ({"rule": "adams"}, "rule is 'adams' (did you mean 'adam'?); choose one of sgd, adam, amsgrad, running-norm"),
    (
        {"method": "dp-sgd", "epsilon": 1.0, "rule": "adam"},
        "rule is adam and the method is dp-sgd; only cgd, centralised, local, fedsgd, secure-fedsgd and fedavg use it",
    ),
    (
        {"rule": "first-norm", "momentum": 0.9},
        "momentum is 0.9 and the rule is first-norm; only the rule sgd uses it, set either momentum or rule",
    ),
    (
        {"rule": "running-norm", "columns": 2},
        "the rule is running-norm, columns is 2 and the mode is towers, whose layers 2…N move by a sum over columns; ",
    ),
    ({"method": "fedsgd", "mu": 1}, "mu is 1.0 and the method is fedsgd; only cgd uses it, set it only in runs with"),
    ({"epsilon": -1}, "epsilon is -1.0; it must be a finite number, at least 0"),
    ({"method": "dp-sgd"}, "epsilon is 0.0; dp-sgd needs a privacy parameter above 0"),
    ({"method": "dp-sgd", "epsilon": math.nan}, "epsilon is nan; it must be a finite number"),
    ({"dp_delta": 0}, "dp_delta is 0.0; it is a probability and must be above 0 and below 1"),
    ({"dp_delta": 1}, "dp_delta is 1.0; it is a probability and must be above 0 and below 1"),
    ({"clip": 0}, "clip is 0.0; it must be a finite number above 0"),
    ({"clip": math.nan}, "clip is nan; it must be a finite number above 0"),
]


@pytest.mark.parametrize(("table", "message"), INVALID_TABLES)
def test_from_table_rejects_invalid_settings(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        RunSpec.from_table(table, "mine.toml, run 3")
    assert str(caught.value).startswith(f"mine.toml, run 3: {message}")


def test_run_spec_checks_types_in_python() -> None:
    with pytest.raises(InputError, match="^rows is '2'; it must be a whole number$"):
        RunSpec(rows="2")  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from([each.name for each in fields(RunSpec)]), VALUES, max_size=3))
def test_from_table_raises_only_input_errors(table: dict[str, Any]) -> None:
    try:
        again = RunSpec.from_table(table, "here")
    except InputError as error:
        assert str(error).startswith("here: ")
    else:
        assert RunSpec.from_table(again.as_json(), "here") == again
