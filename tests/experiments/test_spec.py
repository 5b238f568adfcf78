from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgd import JOINT_REVEALS_RECORDS, InputError
from cgd.experiments import spec
from cgd.experiments.datasets import NAMES
from cgd.experiments.spec import RunSpec

PAPER = sorted((Path(spec.__file__).parent / "paper").glob("*.toml"))


def positive(highest: float = 1e6) -> st.SearchStrategy[float]:
    return st.floats(0, highest, exclude_min=True)


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    method = draw(st.sampled_from(spec.METHODS))
    steps = draw(st.integers(1, 10**6))
    low, high = draw(positive()), draw(positive())
    return RunSpec(
        method=method,
        data=draw(st.sampled_from(NAMES)),
        samples=draw(st.integers(0, 10**5)),
        rows=draw(st.integers(1, 1000)),
        columns=draw(st.integers(1, 100)),
        mode=draw(st.sampled_from(["towers", "joint"])),
        accept=JOINT_REVEALS_RECORDS,
        hidden=tuple(draw(st.lists(st.integers(1, 1000), max_size=3))),
        activation=draw(st.sampled_from(spec.ACTIVATIONS)),
        bias=draw(st.booleans()),
        delta=(low, high) if low < high else low,
        steps=steps,
        lr=draw(st.one_of(st.integers(0, 9), st.floats(0, 10))),
        mu=draw(st.floats(0, 10)) if method == "cgd" else 0.0,
        hold=draw(st.integers(0, steps)) if method == "cgd" else 0,
        seed=draw(st.integers(0, 2**70)),
        sample=draw(st.integers(1, 100)),
        evaluations=draw(st.integers(1, 1000)),
        arithmetic=draw(st.sampled_from(["float", "ring"])) if method == "cgd" else "float",
        epsilon=draw(positive() if method == "dp-sgd" else st.floats(0, 10)),
        dp_delta=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        batch=draw(st.integers(1, 1000)),
        clip=draw(positive()),
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


# One run


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
    assert RunSpec.from_table({**table_8, "steps": 2000}, "").slug == "mnist-cgd-1000x1-d0.1-t2000-4cea957b"
    private = RunSpec("dp-sgd", "mnist", rows=7, columns=2, hidden=(), delta=(0.05, 0.2), epsilon=3)
    assert private.slug == "mnist-dp-sgd-towers-d0.05-0.2-eps3-t500-83a02e98"


def test_joint_is_rejected_unless_accepted(tmp_path: Path) -> None:
    for mode in ('mode = "joint"', 'method = "fedsgd"\ncolumns = 3\nmode = "joint"'):
        with pytest.raises(
            InputError, match=r"run 1: the mode is 'joint', .* Choose the mode 'towers'.*'joint reveals raw"
        ):
            spec.read(write(tmp_path, f"[[run]]\n{mode}\n"))
        with pytest.raises(InputError, match="run 1: accept is 'yes'; it must be exactly 'joint reveals raw rec"):
            spec.read(write(tmp_path, f"[[run]]\n{mode}\naccept = 'yes'\n"))
        read = spec.read(write(tmp_path, f"[[run]]\n{mode}\naccept = 'joint reveals raw records'\n"))
        assert read.entries["paper"][0].run.mode == "joint"


def test_accept_does_not_change_the_run() -> None:
    accepted = RunSpec(accept=JOINT_REVEALS_RECORDS)
    assert accepted == RunSpec()
    assert accepted.slug == RunSpec().slug
    assert accepted.as_json()["accept"] == JOINT_REVEALS_RECORDS
    assert "accept" not in RunSpec().as_json()


def test_explicit_defaults_do_not_change_the_slug() -> None:
    assert RunSpec.from_table(RunSpec().as_json(), "").slug == RunSpec().slug == "digits-cgd-1x1-d0.1-t500-44136fa3"


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (RunSpec(lr=1), RunSpec(lr=1.0)),
        (RunSpec(lr=0.0), RunSpec(lr=-0.0)),
        (RunSpec(delta=(1, 2)), RunSpec(delta=(1.0, 2.0))),
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
    ],
)
def test_from_table_converts_values(table: dict[str, Any], attribute: str, value: Any) -> None:
    found = getattr(RunSpec.from_table(table, "here"), attribute)
    assert found == value
    assert repr(found) == repr(value)  # the same types, also within a tuple


INVALID_TABLES: list[tuple[dict[str, Any], str]] = [
    # names
    ({"stepz": 5}, "there is no setting 'stepz' (did you mean 'steps'?); choose one of method, data, samples, rows"),
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
    ({"lr": 10**400}, "lr is inf; it must be a finite number, at least 0"),
    ({"lr": -(10**400)}, "lr is -inf; it must be a finite number, at least 0"),
    ({"mu": -1}, "mu is -1.0; it must be a finite number, at least 0"),
    ({"mu": math.inf}, "mu is inf; it must be a finite number, at least 0"),
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


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.sampled_from([10**400, "", "cgd", "quick", "a b"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["loss", "rows", "lr"]), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([each.name for each in fields(RunSpec)]), VALUES, max_size=3))
def test_from_table_raises_only_input_errors(table: dict[str, Any]) -> None:
    try:
        again = RunSpec.from_table(table, "here")
    except InputError as error:
        assert str(error).startswith("here: ")
    else:
        assert RunSpec.from_table(again.as_json(), "here") == again


# A file

EXAMPLE = """
title = "Two ways"
about = \"\"\"
Of training – on
wine.
\"\"\"
show = "table"

[common]
data = "wine"
steps = 1000
rows = 3

[scale.quick]
steps = 50
samples = 90

[scale.paper]

[[run]]
label = "CGD"
group = "3×1"
reported = { loss = 1, accuracy = 0.9 }

[[run]]
method = "fedsgd"
rows = 5
samples = 80
quick = { lr = 0.25, rows = 4 }
"""


def test_read_merges_common_settings_and_runs(tmp_path: Path) -> None:
    found = spec.read(write(tmp_path, EXAMPLE))
    assert (found.name, found.title, found.show) == ("mine", "Two ways", "table")
    assert found.about == "Of training – on wine."
    assert list(found.entries) == ["quick", "paper"]
    for entries in found.entries.values():
        assert [entry.label for entry in entries] == ["CGD", "run 2"]
        assert [entry.group for entry in entries] == ["3×1", ""]
        assert [entry.reported for entry in entries] == [{"loss": 1.0, "accuracy": 0.9}, {}]
    assert [entry.run for entry in found.entries["paper"]] == [
        RunSpec(data="wine", steps=1000, rows=3),
        RunSpec(method="fedsgd", data="wine", steps=1000, rows=5, samples=80),
    ]


def test_run_settings_override_the_scale_and_the_scale_overrides_common_settings(tmp_path: Path) -> None:
    assert [entry.run for entry in spec.read(write(tmp_path, EXAMPLE)).entries["quick"]] == [
        RunSpec(data="wine", steps=50, rows=3, samples=90),
        RunSpec(method="fedsgd", data="wine", steps=50, rows=4, samples=80, lr=0.25),
    ]


@pytest.mark.parametrize("scale", ["", "[scale]\n"])
def test_read_uses_defaults(scale: str, tmp_path: Path) -> None:
    found = spec.read(write(tmp_path, f"{scale}[[run]]"))
    assert (found.name, found.title, found.about, found.show) == ("mine", "mine", "", "curves")
    assert found.entries == {"paper": (spec.RunEntry("run 1", RunSpec()),)}


INVALID_FILES = {
    "[[run]\n": "mine.toml is not TOML: ",
    "a = 1\na = 2\n": "mine.toml is not TOML: ",
    f"[[run]]\nrows = {'9' * 5000}": "mine.toml is not TOML: ",
    f"a = {'[' * 5000}": "mine.toml is not TOML: ",
    "": "mine.toml has no run; write one or more [[run]] tables",
    "title = 'x'\nrun = []": "mine.toml has no run; write one or more [[run]] tables",
    "[run]\nrows = 3": "mine.toml has a run that is not in a list of tables; write one or more [[run]] tables",
    "run = [1, 2]": "mine.toml has a run that is not in a list of tables; write",
    "[[runs]]": "mine.toml: there is no table 'runs' (did you mean 'run'?); choose one of title, about, show",
    "rows = 3\n[[run]]": "mine.toml: there is no table 'rows'",
    "common = 3\n[[run]]": "mine.toml: common is 3; it must be a table of settings",
    "[[common]]\nrows = 3\n[[run]]": "mine.toml: common is [{'rows': 3}]; it must be a table of settings",
    "scale = 'quick'\n[[run]]": "mine.toml: scale is 'quick'; it must be a table of settings",
    "scale.quick = 50\n[[run]]": "mine.toml: scale: quick is 50; it must be a table of settings",
    "[scale.qick]\n[[run]]": "mine.toml: scale is 'qick' (did you mean 'quick'?); choose one of quick, paper",
    "show = 'tabel'\n[[run]]": "mine.toml: show is 'tabel' (did you mean 'table'?); choose one of table, curves",
    "show = ['table']\n[[run]]": "mine.toml: show is ['table']",
    "title = 8\n[[run]]": "mine.toml: title is 8; it must be a text, write it in quotes",
    "about = true\n[[run]]": "mine.toml: about is True; it must be a text, write it in quotes",
    "[[run]]\nlabel = 8": "mine.toml, run 1: label is 8; it must be a text, write it in quotes",
    "[[run]]\n[[run]]\ngroup = [1]": "mine.toml, run 2: group is [1]; it must be a text, write it in quotes",
    "[[run]]\nreported = 0.9": "mine.toml, run 1: reported is 0.9; it must be a table of settings",
    "[[run]]\nreported.loss = 'low'": "mine.toml, run 1: reported loss is 'low'; it must be a number",
    "[[run]]\nreported.loss = true": "mine.toml, run 1: reported loss is True; it must be a number",
    "[[run]]\nquick.rows = 3": "mine.toml, run 1: there is no scale 'quick' to change; write [scale.quick]",
    "[[run]]\npaper = 3": "mine.toml, run 1: paper is 3; it must be a table of settings",
    "[common]\nrowz = 3\n[[run]]": "mine.toml, run 1: there is no setting 'rowz' (did you mean 'rows'?)",
    "[[run]]\n[[run]]\nrows = 0": "mine.toml, run 2: rows is 0; it must be at least 1",
    "[[run]]\nlr = nan": "mine.toml, run 1: lr is nan; it must be a finite number",
    "[[run]]\nlr = 2001-01-01": "mine.toml, run 1: lr is datetime.date(2001, 1, 1); it must be a number",
    "like = 3": "mine.toml: like is 3; it must be a text, write it in quotes",
    "like = 'mine'": "mine.toml: like is 'mine', a circular reference; name a file with runs",
    "like = 'nowhere'": "nowhere.toml cannot be read",
    "like = 'nowhere/at-all'": "nowhere/at-all.toml cannot be read",
    "like = 'mine'\n[[run]]": "mine.toml: 'run' is not allowed with `like`; choose one of title, about, show, like",
    "[scale.paper]\n[scale.quick]\nsteps = 5\n[[run]]\nhold = 9": "mine.toml, run 1, scale quick: hold is 9 and steps",
}


@pytest.mark.parametrize(("text", "message"), INVALID_FILES.items(), ids=range(len(INVALID_FILES)))
def test_read_rejects_invalid_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        spec.read(write(tmp_path, text))
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_read_rejects_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))} cannot be read \(.*\); name a TOML file$"):
            spec.read(path)
    (tmp_path / "latin.toml").write_bytes("title = 'Größe'\n[[run]]".encode("latin-1"))
    with pytest.raises(InputError, match="latin.toml cannot be read"):
        spec.read(tmp_path / "latin.toml")


def test_like_shows_runs_of_another_file(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLE).rename(tmp_path / "theirs.toml")
    theirs = spec.read(tmp_path / "theirs.toml")
    ours = spec.read(write(tmp_path, "like = 'theirs'\nonly = 'CGD'\nshow = 'gaps'"))
    assert (ours.name, ours.title, ours.about, ours.show) == ("mine", theirs.title, theirs.about, "gaps")
    assert ours.entries == {scale: entries[:1] for scale, entries in theirs.entries.items()}
    with pytest.raises(InputError, match="mine.toml: no run of theirs has 'PGD' in its group and label"):
        spec.read(write(tmp_path, "like = 'theirs'\nonly = 'PGD'"))
    (tmp_path / "theirs.toml").write_text("like = 'mine'")
    with pytest.raises(InputError, match="theirs.toml: like is 'mine', a circular reference; name a file with runs"):
        spec.read(write(tmp_path, "like = 'theirs'"))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


@given(
    st.dictionaries(st.sampled_from(["title", "about", "show", "common", "scale", "run"]), VALUES),
    st.lists(st.dictionaries(st.sampled_from(["label", "group", "reported", "quick", "paper", "lr"]), VALUES)),
)
def test_read_raises_only_input_errors(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], runs: list[dict[str, Any]]
) -> None:
    table = {**content, "run": runs} if runs else content
    path = write(tmp_path_factory.mktemp("any"), "\n".join(f"{key} = {toml(each)}" for key, each in table.items()))
    try:
        found = spec.read(path)
    except InputError as error:
        assert "mine.toml" in str(error)
        assert "not TOML" not in str(error)
    else:
        assert found.entries


# The paper's


def test_paper_folder_has_experiments() -> None:
    assert {"table-3", "table-8"} <= {path.stem for path in PAPER}


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_read_paper_experiments(path: Path) -> None:
    found = spec.read(path)
    assert found.title != found.name
    assert "paper" in found.entries
    for entries in found.entries.values():
        runs = {entry.run.slug: entry.run for entry in entries}
        assert all(runs[entry.run.slug] == entry.run for entry in entries)
        assert len({(entry.group, entry.label) for entry in entries}) == len(entries)
