"""`cgd join --dry-run`: everything is read, checked and foreseen, and nothing is sent, written or charged."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq
from typer.testing import CliRunner

import cgd
from cgd.cli import app
from cgd.dp.budget_file import BudgetFile
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.intersection_section import EACH_LEARNS_WHO
from cgd.federation.keys import Keys
from cgd.optim.grid import Cell
from cgd.tabular.disclosure import disclosed_sums
from cgd.tabular.dry_run import bytes_per_step, describe_dry_run, foresee
from cgd.tabular.run_inputs import RunOptions, read_inputs
from cgd.tabular.trace_writer import TraceWriter
from cgd.tabular.training import train
from support.private_tables import PRIVATE_DATA, PRIVATE_SCHEMA, private_settings
from support.tabular import (
    SCHEMA,
    VERTICAL_SCHEMA,
    records,
    run_members,
    table,
    tabular_settings,
    write_csv,
    write_federation,
)

if TYPE_CHECKING:
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset

NAMES = ("ada", "bob", "cleo")


def refuse_socket(*_: Any, **__: Any) -> None:
    raise AssertionError("a dry run opened a socket")


def write_private(folder: Path) -> Path:
    folder.mkdir()
    return write_federation(folder, NAMES, schema=PRIVATE_SCHEMA, steps=6, patience=0)


def dry_run(path: Path, *options: str) -> tuple[int, str]:
    data = path.parent / "ada.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "__init__", refuse_socket)
        patch.setattr(zmq.Context, "socket", refuse_socket)
        result = CliRunner().invoke(app, ["join", str(path), "--as", "ada", "--data", str(data), "--dry-run", *options])
    assert result.exception is None or isinstance(result.exception, (InputError, SystemExit)), result.exception
    if isinstance(result.exception, InputError):  # `main` makes it exit code 2
        return 2, str(result.exception)
    return result.exit_code, result.output


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(each): (each.read_bytes() if each.is_file() else b"", each.stat().st_mtime_ns)
        for each in sorted(folder.rglob("*"))
    }


WITH_INTERSECTION = VERTICAL_SCHEMA.replace(
    "[model]",
    f"""
[data.intersection]
minimum = 20
maximum = 50
accept = "{EACH_LEARNS_WHO}"
[model]""",
)


def test_dry_run_shows_what_would_happen_and_writes_nothing(tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES, steps=30)
    values = table(60, 0)
    values["age"][:2] = [-999, -999]
    write_csv(tmp_path / "ada.csv", values)
    before = content(tmp_path)
    code, output = dry_run(path)
    assert code == 0
    assert content(tmp_path) == before
    for text in (
        f"digest {Federation.load(path).digest}, as ada",
        "60 records of ada.csv",
        "column 'age': 2 values are -999",
        "the network would have 66 parameters, for the 5 features of our own table, and more if others",
        "model start: public seed 0",
        "30 steps or fewer, with an evaluation every 5",
        "to every participant, 30 times: the sum of all gradients, weighted",
        "to every participant, 6 times: the validation loss over all records",
        "nothing was sent or written",
    ):
        assert text in output
    path.write_text(path.read_text().replace('kind = "mlp"', 'kind = "mlp"\nstart = "zeros"'))
    assert "model start: zeros" in dry_run(path)[1]


def test_dry_run_shows_privacy_warnings_of_our_own_table(tmp_path: Path) -> None:
    write_csv(tmp_path / "ada.csv", table(5, 0))
    output = dry_run(write_federation(tmp_path, NAMES))[1]
    assert (
        "which are more if others have more categories or missing values: this participant trains on 4 records"
        in output
    )


def test_notes_are_shown_before_a_folder_is_refused(tmp_path: Path) -> None:
    federation = Federation.load(write_federation(tmp_path, NAMES))
    values = table(60, 0)
    values["age"][:2] = [-999, -999]
    data, options = write_csv(tmp_path / "ada.csv", values), RunOptions()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.jsonl").write_text('{"participant": "bob", "federation": "other"}\n')
    inputs = read_inputs(federation, "ada", data, options)
    lines = describe_dry_run(federation, "ada", inputs, tmp_path / "run", data, options)
    shown: list[str] = []
    with pytest.raises(InputError, match="holds the run of bob of other"):
        shown.extend(lines)
    assert any("column 'age': 2 values are -999" in each for each in shown)


def test_dry_run_neither_creates_nor_charges_the_budget(tmp_path: Path) -> None:
    path = write_private(tmp_path / "private")
    data = write_csv(path.parent / "ada.csv", table(200, 0))
    before = content(tmp_path)
    code, output = dry_run(path)
    assert code == 0
    assert content(tmp_path) == before
    assert "ada.csv.budget would be created: the privacy budget of these records, with a limit of epsilon = 8" in output
    assert "the sum of all clipped gradients, with noise" in output
    assert "the cost in accuracy is not known, because this training has hidden layers of [8]" in output
    BudgetFile(data.with_name("ada.csv.budget"), 8.0, 1e-5).charge(0.5, "earlier", "a step")
    before = content(tmp_path)
    code, output = dry_run(path)
    assert code == 2
    assert "is left for a training, and this one needs a limit of" in output
    assert content(tmp_path) == before


def test_dry_run_states_the_expected_cost_of_a_measured_training(tmp_path: Path) -> None:
    schema = PRIVATE_SCHEMA.replace("layers = [8]", "layers = [32]")
    path = write_federation(tmp_path, NAMES, schema=schema, steps=200, lr=0.02, patience=0)
    write_csv(tmp_path / "ada.csv", table(200, 0))
    output = dry_run(path)[1]
    assert "if every participant has as many records as we have:\n  600 records (480 of them to train on)" in output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("data", "'sixty' is not a number"),
        ("key", "lists another for ada"),
        ("no key", "there is no key file of ada"),
        ("run", "holds the run of bob of other"),
        ("state", "so other users can put files there"),
        ("running", "is in use: this participant is already running"),
        ("file in the way", "cannot be used (Not a directory)"),
    ],
)
def test_everything_that_join_would_refuse_is_refused(tmp_path: Path, fault: str, message: str) -> None:
    path = write_federation(tmp_path, NAMES)
    write_csv(tmp_path / "ada.csv", table(30, 0))
    state, run = tmp_path / "state" / "ada", tmp_path / "runs" / "ada"
    lock = None
    if fault == "data":
        (tmp_path / "ada.csv").write_text("age,dose,ward,outcome\nsixty,1,A,ill\n")
    elif fault == "key":
        (tmp_path / "ada.key").unlink()
        (tmp_path / "ada.pub").unlink()
        Keys.generate("ada").save(tmp_path)
    elif fault == "no key":
        (tmp_path / "ada.key").unlink()
    elif fault == "run":
        run.mkdir(parents=True)
        (run / "history.jsonl").write_text('{"participant": "bob", "federation": "other"}\n')
    elif fault == "state":
        state.mkdir(parents=True)
        state.chmod(0o777)
    elif fault == "running":
        state.mkdir(mode=0o700, parents=True)
        lock = (state / "lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        (tmp_path / "runs").write_text("")
    before = content(tmp_path)
    code, output = dry_run(path)
    assert code == 2
    assert message in output
    assert content(tmp_path) == before
    if lock is not None:
        lock.close()


def test_dry_run_of_a_federation_by_columns(tmp_path: Path) -> None:
    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    names = ["ada", *(f"p{number}" for number in range(8))]
    path = write_federation(tmp_path, names, cells, VERTICAL_SCHEMA)
    write_csv(tmp_path / "ada.csv", table(40, 0), ("id", "age", "outcome"))
    code, output = dry_run(path)
    assert code == 0
    assert "the joint prediction of the row's models for each validation record (numbers: 16)" in output


def test_dry_run_of_an_intersection(tmp_path: Path) -> None:
    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    names = ["ada", *(f"p{number}" for number in range(8))]
    path = write_federation(tmp_path, names, cells, WITH_INTERSECTION)
    content = table(40, 0) | {"id": [f"{number * 10**12 + number**9 % 10**12:015d}" for number in range(40)]}
    write_csv(tmp_path / "ada.csv", content, ("id", "age", "outcome"))
    code, output = dry_run(path)
    assert code == 0
    assert "to the row, once: how many IDs each member of the row has entered (numbers: 3)" in output
    assert "how many of our records the others of our row have, too; all figures above are about all of ours" in output
    assert "the same IDs" in output
    write_csv(tmp_path / "ada.csv", table(40, 0), ("id", "age", "outcome"))
    code, output = dry_run(path)
    assert code == 2
    assert "the ids in 'id', such as 'A9-9', are few enough to guess: about" in output


def test_dry_run_of_a_program_is_refused(tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES)
    result = CliRunner().invoke(app, ["join", str(path), "--as", "ada", "--run", "train:main", "--dry-run"])
    assert "--dry-run and --no-alone need --data" in str(result.exception)


def test_foreseen_sums_are_those_of_the_training() -> None:
    settings = tabular_settings(steps=7, patience=0)

    def program(peers: Peers, own: TabularDataset) -> Any:
        return disclosed_sums(settings, train(peers, settings, own))

    members = [records(table(60, seed)) for seed in range(3)]
    assert disclosed_sums(settings, foresee(settings, members[0])) == run_members(program, members)[0]


def test_rare_values_are_foreseen_as_other() -> None:
    settings = tabular_settings(steps=3)
    content = table(120, 0)
    content["ward"][:40] = [f"room {place // 2}" for place in range(40)]  # two records each
    own = records(content)

    def program(peers: Peers, mine: TabularDataset) -> Any:
        result = train(peers, settings, mine)
        return sorted(result.preprocessing.features), disclosed_sums(settings, result)

    foreseen = foresee(settings, own)
    features = sorted(foreseen.preprocessing.features)
    assert features[-3:] == ["ward=A", "ward=B", "ward=other"]
    expected = features, disclosed_sums(settings, foreseen)
    assert run_members(program, [own] * 3) == [expected] * 3


def test_foreseen_sums_with_noise_are_those_of_the_training() -> None:
    settings = private_settings(steps=3)

    def program(peers: Peers, own: TabularDataset) -> Any:
        return disclosed_sums(settings, train(peers, settings, own))

    members = [records(table(100, seed), PRIVATE_DATA) for seed in range(3)]
    assert disclosed_sums(settings, foresee(settings, members[0])) == run_members(program, members)[0]


@pytest.mark.parametrize("masking", ["pairwise", "uniform"])
def test_bytes_of_a_step_are_those_of_a_sum(masking: Any) -> None:
    settings = tabular_settings(masking=masking)
    parameters = 100_000

    def program(peers: Peers, _: int) -> int:
        peers.sum(torch.zeros(parameters), context="gradients")
        return peers.traffic.bytes_sent

    with cgd.local_peers(4, masking=masking) as peers:
        sent = peers.run(program, range(4))
    assert max(sent) == pytest.approx(bytes_per_step(settings.training, 4, parameters), rel=0.02)


# What needs the others


UNFORESEEN = "only with the others this is found out, so no note above does not mean that all is well:"


def ward_schema(*data: str, columns: str = 'ward = "category"') -> str:
    return SCHEMA.replace('target = "outcome"', "\n".join(['target = "outcome"', *data])).replace(
        'ward = "category"', columns
    )


def test_dry_run_lists_what_only_the_others_show(tmp_path: Path) -> None:
    write_csv(tmp_path / "ada.csv", table(60, 0))
    output = dry_run(write_federation(tmp_path, NAMES))[1]
    section = output.partition(UNFORESEEN)[2].splitlines()
    assert section[1:] == [
        "  whether the others can be reached, and have the same federation file and version",
        "  whether our values are far from those of all others, as in another unit: age, dose",
        "  whether a class occurs at one participant only, which stops the training",
        "  which of our categories nobody else has, which count as 'other': ward",
        "  whether a class has no or few records at all participants together",
        "  whether a column has no value, or the same value, at all participants",
        "  privacy warnings that depend on the records and categories of all, or on what others send",
        "nothing was sent or written; join without --dry-run to train",
    ]
    page = Path(__file__).parent.parent.parent / "docs" / "tables.md"
    assert "\n".join([f"```text\n{UNFORESEEN}", *section[1:-1], "```"]) in page.read_text()


@pytest.mark.parametrize(
    ("schema", "present", "absent"),
    [
        (ward_schema("other = false"), "which of our categories nobody else has, which stops the training: ward", ""),
        (ward_schema('classes = ["ill", "well"]', columns='ward = ["A", "B"]'), "", "nobody else has"),
        (ward_schema('classes = ["ill", "well"]'), "whether a class has no or few records", "at one participant only"),
        (PRIVATE_SCHEMA, "whether our values are far from those of all others", "privacy warnings that depend on"),
    ],
)
def test_list_of_what_only_the_others_show_depends_on_the_file(
    tmp_path: Path, schema: str, present: str, absent: str
) -> None:
    write_csv(tmp_path / "ada.csv", table(60, 0))
    section = dry_run(write_federation(tmp_path, NAMES, schema=schema))[1].partition(UNFORESEEN)[2]
    assert section
    assert present in section
    assert not absent or absent not in section


def test_dry_run_of_a_regression_by_columns_names_ids_and_the_target(tmp_path: Path) -> None:
    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    names = ["ada", *(f"p{number}" for number in range(8))]
    schema = VERTICAL_SCHEMA.replace('classes = ["well", "ill"]', 'task = "regression"')
    content = table(40, 0)
    write_csv(tmp_path / "ada.csv", {**content, "outcome": content["score"]}, ("id", "age", "outcome"))
    section = dry_run(write_federation(tmp_path, names, cells, schema))[1].partition(UNFORESEEN)[2]
    assert "as in another unit: age, outcome" in section
    assert "whether the files of our row have the same IDs" in section


def test_dry_run_foresees_notes_that_join_prints_after_the_first_sums(tmp_path: Path) -> None:
    content = table(60, 0)
    content["age"] = [None] * 60
    content["dose"] = [2.5] * 60
    content["ward"] = [*["A"] * 5, *[None] * 55]
    content["outcome"] = ["ill"] * 60
    write_csv(tmp_path / "ada.csv", content)
    schema = ward_schema('classes = ["well", "ill", "dead"]', columns='ward = ["A", "B"]')
    output = dry_run(write_federation(tmp_path, NAMES, schema=schema))[1]
    for text in (
        "we have no value of 'age'; if nobody else has one, its features are zero",
        "all our values of 'dose' are equal; if others have no other value, its feature is zero",
        "we have no record of the class 'well', 'dead'; a class that nobody has cannot be learned",
    ):
        assert text in output
    assert "'ward'" not in output


def test_dry_run_foresees_a_table_with_one_class_and_a_column_of_rare_values(tmp_path: Path) -> None:
    content = table(60, 0)
    content["outcome"] = ["ill"] * 60
    content["ward"] = [f"room {place}" for place in range(60)]
    write_csv(tmp_path / "ada.csv", content)
    output = dry_run(write_federation(tmp_path, NAMES))[1]
    assert "all our records are of the class 'ill'; if nobody has another one, there is nothing to predict" in output
    assert "These are more than half of our values, so the column says nothing about most of our records" in output


def test_dry_run_foresees_privacy_warnings_of_the_network_for_our_categories(tmp_path: Path) -> None:
    """They have the figures of the real run: the records without those for validation, and all inputs."""
    outputs = []
    for activation in ("tanh", "relu"):
        folder = tmp_path / activation
        folder.mkdir()
        write_csv(folder / "ada.csv", {**table(60, 0), "ward": [f"ward {place % 10}" for place in range(60)]})
        schema = f'{SCHEMA}activation = "{activation}"\n'
        outputs.append(dry_run(write_federation(folder, NAMES, schema=schema))[1])
    tanh, relu = outputs
    foreseen = "missing values: this participant trains on 48 records for a first layer with 13 inputs and a bias"
    assert foreseen in tanh
    assert foreseen in relu
    assert relu.count("the first layer has 8 ReLU units") == 1  # it holds in any case, and is not repeated


def test_dry_run_states_that_there_are_few_validation_records(tmp_path: Path) -> None:
    write_csv(tmp_path / "ada.csv", table(40, 0))
    path = write_federation(tmp_path, NAMES)
    assert "about 8 of our records would be set aside for validation: too few to judge the model" in dry_run(path)[1]
    write_csv(tmp_path / "ada.csv", table(60, 0))
    assert "set aside for validation" not in dry_run(path)[1]


def test_dry_run_checks_the_folder_of_a_trace(tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES)
    write_csv(tmp_path / "ada.csv", table(60, 0))
    before = content(tmp_path)
    output = dry_run(path, "--record", str(tmp_path / "trace"))[1]
    assert f"your prepared records, origin, gradients and everything received into {tmp_path / 'trace'}" in output
    assert content(tmp_path) == before
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "letter.txt").write_text("")
    code, output = dry_run(path, "--record", str(tmp_path / "trace"))
    assert code == 2
    assert "holds files that are not a trace" in output
    TraceWriter(tmp_path / "other", "bob", "trial").close()
    assert "holds the trace of bob of trial" in dry_run(path, "--record", str(tmp_path / "other"))[1]
