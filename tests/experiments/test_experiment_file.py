"""Files of experiments: merged settings, references to other files, invalid files, and the paper's experiments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd import InputError
from cgd.experiments import experiment_file
from cgd.experiments.spec import RunSpec
from support.toml_values import VALUES

PAPER = sorted((Path(experiment_file.__file__).parent / "paper").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


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
    found = experiment_file.read(write(tmp_path, EXAMPLE))
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
    assert [entry.run for entry in experiment_file.read(write(tmp_path, EXAMPLE)).entries["quick"]] == [
        RunSpec(data="wine", steps=50, rows=3, samples=90),
        RunSpec(method="fedsgd", data="wine", steps=50, rows=4, samples=80, lr=0.25),
    ]


@pytest.mark.parametrize("scale", ["", "[scale]\n"])
def test_read_uses_defaults(scale: str, tmp_path: Path) -> None:
    found = experiment_file.read(write(tmp_path, f"{scale}[[run]]"))
    assert (found.name, found.title, found.about, found.show) == ("mine", "mine", "", "curves")
    assert found.entries == {"paper": (experiment_file.RunEntry("run 1", RunSpec()),)}


def test_joint_is_rejected_unless_accepted(tmp_path: Path) -> None:
    for mode in ('mode = "joint"', 'method = "fedsgd"\ncolumns = 3\nmode = "joint"'):
        with pytest.raises(
            InputError, match=r"run 1: the mode is 'joint', .* Choose the mode 'towers'.*'joint reveals raw"
        ):
            experiment_file.read(write(tmp_path, f"[[run]]\n{mode}\n"))
        with pytest.raises(InputError, match="run 1: accept is 'yes'; it must be exactly 'joint reveals raw rec"):
            experiment_file.read(write(tmp_path, f"[[run]]\n{mode}\naccept = 'yes'\n"))
        read = experiment_file.read(write(tmp_path, f"[[run]]\n{mode}\naccept = 'joint reveals raw records'\n"))
        assert read.entries["paper"][0].run.mode == "joint"


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
    "[[run]]\nmethod = 'local'\nmu = 0.5": "mine.toml, run 1: mu is 0.5 and the method is local; only cgd uses it",
    "show = 'regret'\n[[run]]\nlabel = 'CGD'": "mine.toml: 'CGD' has no regret to show; it needs cgd, classes,",
    "show = 'gaps'\n[[run]]\ndata = 'diabetes'": "mine.toml: 'run 1' is a regression and has no accuracy to show gaps",
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
        experiment_file.read(write(tmp_path, text))
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(message)


def test_read_rejects_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(InputError, match=rf"^{re.escape(str(path))} cannot be read \(.*\); name a TOML file$"):
            experiment_file.read(path)
    (tmp_path / "latin.toml").write_bytes("title = 'Größe'\n[[run]]".encode("latin-1"))
    with pytest.raises(InputError, match="latin.toml cannot be read"):
        experiment_file.read(tmp_path / "latin.toml")


def test_like_shows_runs_of_another_file(tmp_path: Path) -> None:
    write(tmp_path, EXAMPLE).rename(tmp_path / "theirs.toml")
    theirs = experiment_file.read(tmp_path / "theirs.toml")
    ours = experiment_file.read(write(tmp_path, "like = 'theirs'\nonly = 'CGD'\nshow = 'gaps'"))
    assert (ours.name, ours.title, ours.about, ours.show) == ("mine", theirs.title, theirs.about, "gaps")
    assert ours.entries == {scale: entries[:1] for scale, entries in theirs.entries.items()}
    with pytest.raises(InputError, match="mine.toml: no run of theirs has 'PGD' in its group and label"):
        experiment_file.read(write(tmp_path, "like = 'theirs'\nonly = 'PGD'"))
    (tmp_path / "theirs.toml").write_text("like = 'mine'")
    with pytest.raises(InputError, match="theirs.toml: like is 'mine', a circular reference; name a file with runs"):
        experiment_file.read(write(tmp_path, "like = 'theirs'"))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, (bool, str)) else repr(value)


@given(
    st.dictionaries(st.sampled_from(["title", "about", "show", "common", "privacy", "scale", "run"]), VALUES),
    st.lists(
        st.dictionaries(st.sampled_from(["label", "group", "reported", "quick", "paper", "lr", "privacy"]), VALUES)
    ),
)
def test_read_raises_only_input_errors(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], runs: list[dict[str, Any]]
) -> None:
    table = {**content, "run": runs} if runs else content
    path = write(tmp_path_factory.mktemp("any"), "\n".join(f"{key} = {toml(each)}" for key, each in table.items()))
    try:
        found = experiment_file.read(path)
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
    found = experiment_file.read(path)
    assert found.title != found.name
    assert "paper" in found.entries
    for entries in found.entries.values():
        runs = {entry.run.slug: entry.run for entry in entries}
        assert all(runs[entry.run.slug] == entry.run for entry in entries)
        assert len({(entry.group, entry.label) for entry in entries}) == len(entries)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("'slower'", "why is 'slower'; it must be a table of settings"),
        ("{ text = 'slower' }", "why has the settings text; it must have text, experiment, row"),
        ("{ text = 1, experiment = 'b', row = 'c' }", "why: text is 1; it must be a text"),
        ("{ text = 'a', experiment = 'b', rows = 'c' }", "why has the settings text, experiment, rows; it must"),
    ],
)
def test_other_explanations_are_rejected(value: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"[[run]]\nwhy = {value}\n")
    with pytest.raises(InputError, match=re.escape(f"mine.toml, run 1: {message}")):
        experiment_file.read(tmp_path / "mine.toml")
