"""The commands for tables: `cgd join --data`, `cgd predict`, `cgd report`, `cgd schema`, `cgd sample`."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.cli.display import log_events
from cgd.errors import InputError
from cgd.federation.config import FOR_PRIVATE_TABLES, FOR_TABLES, Federation
from cgd.federation.keys import Keys
from cgd.local import solo_peers
from cgd.tabular.model import ConfinedModel
from cgd.tabular.run_folder import HISTORY_FILE
from cgd.tabular.training import train
from support import runs
from support.private_tables import PRIVATE_SCHEMA
from support.tabular import DATA, SCHEMA, records, table, tabular_settings, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    return write_federation(tmp_path, NAMES)


GOOD = "age,dose,ward,outcome\n61,1.5,A,ill\n44,,B,well\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "nowhere.csv cannot be read (No such file or directory); name a CSV or Parquet file"),
        ("", [], "is empty; name a CSV file with a header"),
        ("age,dose,ward,outcome\n", [], "has a header and no rows; export it with its records"),
        (GOOD.replace("dose", "doses"), [], "has no column 'dose' (did you mean 'doses'?); rename the column"),
        (GOOD.replace("outcome", "result"), [], "has no column 'outcome'; name the column to predict with --label"),
        (GOOD, ["--label", "outcomes"], "has no column 'outcomes' (did you mean 'outcome'?); name the column to"),
        (GOOD.replace(",ill", ",").replace(",well", ","), [], "no row has a label in column 'outcome'"),
        (GOOD.replace("1.5", "high"), [], "line 2, column 'dose': 'high' is not a number"),
        (GOOD.replace("1.5", '"1,5"'), [], "'1,5' is not a number; write decimals with a point, as in 1.5"),
    ],
)
def test_invalid_table_is_rejected_before_connecting(
    command: Any, federation: Path, tmp_path: Path, content: str | None, options: list[str], message: str
) -> None:
    path = tmp_path / "nowhere.csv"
    if content is not None:
        path.write_text(content)
    code, _, err = command("join", federation, "--as", "ada", "--data", path, *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "state").exists()  # no connection was made
    assert not (tmp_path / "runs").exists()


def test_public_key_file_of_another_participant_is_rejected(command: Any, federation: Path, tmp_path: Path) -> None:
    before = federation.read_text()
    Keys.generate("dan").save(tmp_path)
    message = "dan.pub has the public key of 'dan', and the participant is 'dora'; give the .pub of dora"
    code, _, err = command(
        *("federation", "add", federation, "dora", "--address", "tcp://dora.example:1", "--public-key", "dan.pub")
    )
    assert (code, federation.read_text()) == (2, before)
    assert message in err
    assert len(err.strip().splitlines()) == 1
    participants = [f"--participant={name}=tcp://{name}.example:1={name}.pub" for name in NAMES]
    code, _, err = command(
        "federation", "new", "x.toml", *participants, "--participant=dora=tcp://dora.example:1=dan.pub"
    )
    assert code == 2
    assert message in err
    assert not (tmp_path / "x.toml").exists()
    code, _, err = command("federation", "add", federation, "dora", "--public-key", "dora.pub")
    assert code == 2
    assert "there is no file dora.pub" in err
    code, _, _ = command(
        *("federation", "add", federation, "dan", "--address", "tcp://dora.example:1", "--public-key", "dan.pub")
    )
    assert code == 0


def test_incompatible_options_are_rejected(command: Any, federation: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.csv").write_text(GOOD)
    join = ("join", federation, "--as", "ada")
    assert "give one of --data FILE (your records) and --run" in command(*join)[2]
    assert "give one of --data" in command(*join, "--data", "ada.csv", "--run", "train:main")[2]
    for option in (("--delta", "0.1"), ("--function", "networks:deep"), ("--keep", "confined"), ("--device", "cpu")):
        err = command(*join, "--run", "train:main", *option)[2]
        assert "--salt, --track, --dry-run and --no-alone need --data" in err
    for dry_run in ((), ("--dry-run",)):
        wrong = command(*join, "--data", "ada.csv", "--keep", "best", *dry_run)[2]
        assert "keep is 'best'; choose one of confined, scaled, personalised" in wrong
    assert "delta is -1.0" in command(*join, "--data", "ada.csv", "--delta", "-1")[2]
    assert "'dan' is not a participant" in command("join", federation, "--as", "dan", "--data", "ada.csv")[2]
    mistyped = command("join", federation, "--as", "adda", "--data", "ada.csv", "--dry-run")[2]
    assert "'adda' is not a participant of trial (did you mean 'ada'?); name one of ada, bob, cleo" in mistyped


def test_federation_file_without_schema_is_rejected(command: Any, tmp_path: Path) -> None:
    path = write_federation(tmp_path, NAMES, schema=None)
    (tmp_path / "ada.csv").write_text(GOOD)
    code, _, err = command("join", path, "--as", "ada", "--data", "ada.csv")
    assert code == 2
    assert "has no [data] and [model]" in err
    assert "`cgd schema FILE --label COLUMN` suggests some" in err


def test_folder_of_another_run_is_rejected_before_connecting(command: Any, federation: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.csv").write_text(GOOD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / HISTORY_FILE).write_text('{"participant": "bob", "federation": "other"}\n')
    code, _, err = command("join", federation, "--as", "ada", "--data", "ada.csv", "--out", "run")
    assert code == 2
    assert "run holds the run of bob of other, which is never overwritten" in err


def test_privacy_warning_is_printed_before_connecting(command: Any, federation: Path, tmp_path: Path) -> None:
    start = "cgd: privacy warning, from our own table alone: "
    for rows, warnings in ((2, 2), (60, 1)):
        write_csv(tmp_path / "ada.csv", table(rows, 1))
        code, _, err = command("join", federation, "--as", "ada", "--data", "ada.csv", "--key", "nowhere.key")
        assert code == 2
        assert "nowhere.key" in err  # without a key, no connection was made
        assert f"{start}the first layer has 8 ReLU units; " in err
        assert (f"{start}this participant trains on 2 records; each of the other two" in err) == (rows == 2)
        assert err.count(start) == err.count("privacy warning") == warnings


@pytest.fixture
def quiet_logger() -> Iterator[logging.Logger]:
    """Restore the logger of the package after the test."""
    logger = logging.getLogger("cgd")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    for handler in set(logger.handlers) - set(before[0]):
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("terminal", [True, False])
def test_privacy_warning_is_printed_with_and_without_a_terminal(
    terminal: bool,
    quiet_logger: logging.Logger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    log_events(tmp_path)
    quiet_logger.getChild("optim").warning("privacy warning: %s", "few records", extra={"event": "privacy warning"})
    quiet_logger.getChild("network").info("bob is here", extra={"event": "peer"})
    err = capsys.readouterr().err
    assert err.startswith("cgd: privacy warning: few records\n")
    assert ("bob" in err) != terminal  # in a terminal, the table shows it
    warning, bob = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (warning["level"], warning["event"]) == ("WARNING", "privacy warning")
    assert warning["text"] == "privacy warning: few records"
    assert bob["text"] == "bob is here"


def test_log_in_the_state_folder_must_not_be_a_symbolic_link_and_a_chosen_log_may_be(
    tmp_path: Path, quiet_logger: logging.Logger
) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"is a symbolic link, which is not followed"):
        log_events(tmp_path)
    log_events(tmp_path, tmp_path / "events.jsonl")
    quiet_logger.warning("a line")
    assert len((tmp_path / "precious").read_text().splitlines()) == 2


def test_chosen_log_that_exists_becomes_private(tmp_path: Path, quiet_logger: logging.Logger) -> None:
    """Privacy warnings in it contain the number of records."""
    path = tmp_path / "chosen.jsonl"
    path.touch(mode=0o644)
    log_events(tmp_path, path)
    quiet_logger.warning("a line")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture
def run(tmp_path: Path) -> Path:
    what = tabular_settings(steps=10)
    made = train(solo_peers(b"s" * 32), what, records(table(60, 1)))
    origin = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
    ConfinedModel.from_training(made, what, origin).save(tmp_path / "run")
    return tmp_path / "run"


def test_files_of_the_commands_are_readable_by_their_owner_alone(
    command: Any, run: Path, quiet_logger: logging.Logger, tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "new.csv", table(4, 7))
    before = os.umask(0)
    try:
        assert command("predict", run, "--data", data, "--out", "p.csv")[0] == 0
        log_events(tmp_path / "state")
    finally:
        os.umask(before)
    quiet_logger.info("a line")
    for path in (tmp_path / "p.csv", tmp_path / "state" / "events.jsonl"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_predictions_are_printed_or_written_to_a_new_file(command: Any, run: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "new.csv", table(4, 7))
    code, out, err = command("predict", run, "--data", data)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "predicted outcome,probability of ill,probability of well"
    assert len(lines) == 5
    assert "accuracy" in err  # because the file has the outcome
    assert command("predict", run, "--data", data, "--out", "p.csv")[0] == 0
    assert (tmp_path / "p.csv").read_text() == out
    code, _, err = command("predict", run, "--data", data, "--out", "p.csv")
    assert code == 2
    assert "p.csv exists and is never overwritten" in err
    assert (tmp_path / "p.csv").read_text() == out


def test_control_characters_in_class_names_are_escaped_in_a_terminal(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe they are unchanged; in both cases formulas are escaped."""
    data = replace(DATA, classes=("=ill\x1b[2J", "well\u202e"))
    content = table(60, 1)
    content["outcome"] = [data.classes[each == "well"] for each in content["outcome"]]
    what = tabular_settings(data, steps=10)
    made = train(solo_peers(b"s" * 32), what, records(content, data))
    ConfinedModel.from_training(
        made, what, {"participant": "a\x1b[2J", "federation": "t", "epoch": 1, "digest": ""}
    ).save("run")
    asked = write_csv(tmp_path / "new.csv", {**table(9, 7), "outcome": ["\x1b[2J"] * 9})
    _, out, err = command("predict", "run", "--data", asked)
    assert "\n'=ill\x1b[2J," in out
    assert "\\x1b[2J" in err
    assert "\x1b" not in err
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    _, shown, _ = command("predict", "run", "--data", asked)
    assert "\n'=ill\\x1b[2J," in shown
    assert "probability of well\\u202e" in shown
    assert not {"\x1b", "\u202e"} & set(shown)


def test_unknown_categories_and_missing_values_are_reported(command: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,dose,ward\n61,1.5,Z\n44,,B\n")
    code, out, err = command("predict", run, "--data", "new.csv")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "column 'ward': 1 value is of categories that no training record had: 'Z' (1)" in err
    assert "column 'dose': 1 value is missing" in err


def test_invalid_prediction_requests_are_rejected(command: Any, run: Path, federation: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,ward\n61,A\n")
    for arguments, message in (
        ((tmp_path / "none", "--data", "new.csv"), "there is no model in"),
        ((run, "--data", "new.csv"), "has no column 'dose'"),
        ((run, "--data", "none.csv"), "none.csv cannot be read"),
        ((run, "--data", "new.csv", "--federation", federation), "omit --federation"),
    ):
        code, _, err = command("predict", *arguments)
        assert code == 2
        assert message in err


def test_report_is_written_again(command: Any, tmp_path: Path) -> None:
    runs.write(runs.classification(), tmp_path / "run")
    code, out, _ = command("report", tmp_path / "run")
    assert code == 0
    assert "report.html" in out
    assert "accuracy" in out
    assert "on our 1,203 validation records, the accuracy is" in out.lower()
    assert "has no run.json" in command("report", tmp_path)[2]


def test_report_at_another_threshold(command: Any, tmp_path: Path) -> None:
    runs.write(runs.classification(), tmp_path / "run")
    assert command("report", tmp_path / "run", "--threshold", "0.3")[0] == 0
    assert "Confusion matrix at the threshold 0.30" in (tmp_path / "run" / "report.html").read_text()
    code, _, err = command("report", tmp_path / "run", "--threshold", "30")
    assert code == 2
    assert "the threshold is 30; it is a probability from 0.01 to 0.99 with two decimals" in err


def test_suggested_schema_is_used_in_a_new_federation_file(command: Any, tmp_path: Path) -> None:
    write_csv(tmp_path / "mine.csv", table(40, 1))
    code, out, _ = command("schema", "mine.csv", "--label", "outcome")
    assert code == 0
    (tmp_path / "schema.toml").write_text(out)
    participants = []
    for name in NAMES:
        command("keygen", name)
        participants += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    assert command("federation", "new", "federation.toml", "--schema", "schema.toml", *participants)[0] == 0
    federation = Federation.load(tmp_path / "federation.toml")
    assert federation.training == FOR_TABLES
    assert federation.data is not None
    assert [(each.name, each.type) for each in federation.data.columns] == [
        *(("age", "number"), ("dose", "number"), ("ward", "category")),
    ]
    assert command("schema", "mine.csv", "--label", "outcomes")[0] == 2
    (tmp_path / "broken.toml").write_text("[data]\ntarget = 1\n[model]\n")
    code, _, err = command("federation", "new", "other.toml", "--schema", "broken.toml", *participants)
    assert code == 2
    assert "columns is missing" in err
    assert not (tmp_path / "other.toml").exists()


def test_new_federation_with_privacy_has_settings_for_it(command: Any, tmp_path: Path) -> None:
    participants = []
    for name in NAMES:
        command("keygen", name)
        participants += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    (tmp_path / "schema.toml").write_text(PRIVATE_SCHEMA)
    code, _, err = command("federation", "new", "private.toml", "--schema", "schema.toml", *participants)
    assert code == 0, err
    made = Federation.load(tmp_path / "private.toml")
    assert made.privacy is not None
    assert made.training == FOR_PRIVATE_TABLES


EXTRA_PARTICIPANT = '[[participants]]\nname = "eve"\naddress = "tcp://eve.example:7001"\nkey = "KEY"\n'


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (EXTRA_PARTICIPANT, "the schema has 'participants'"),
        ('[hub]\naddress = "tcp://eve.example:7000"\nkey = "KEY"\n', "the schema has 'hub'"),
        ("[training]\nminimum = 3\n", "the schema has 'training'"),
        ("[[participants]", "the schema is not TOML"),
    ],
)
def test_schema_with_other_sections_is_rejected(command: Any, tmp_path: Path, more: str, message: str) -> None:
    """It comes from another participant, and its text becomes a part of the federation file."""
    participants = []
    for name in (*NAMES, "eve"):
        command("keygen", name)
        participants += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    key = Keys.load(tmp_path / "eve.key").public
    (tmp_path / "schema.toml").write_text(SCHEMA + more.replace("KEY", key))
    code, _, err = command("federation", "new", "federation.toml", "--schema", "schema.toml", *participants[:-2])
    assert code == 2
    assert message in err
    assert "[data] and [model]" in err
    assert not (tmp_path / "federation.toml").exists()


def test_schema_with_dotted_keys_is_rejected(command: Any, tmp_path: Path) -> None:
    """In the federation file, keys above the first section header would belong to the section before it."""
    participants = []
    for name in NAMES:
        command("keygen", name)
        participants += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    dotted = 'data.target = "outcome"\ndata.columns.age = "number"\nmodel.kind = "logistic"\n'
    (tmp_path / "schema.toml").write_text(dotted)
    code, _, err = command("federation", "new", "federation.toml", "--schema", "schema.toml", *participants)
    assert code == 2
    assert "write [data]" in err
    assert not (tmp_path / "federation.toml").exists()


def test_sample_writes_tables_and_never_overwrites(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = command("sample", "tables")
    assert code == 0
    assert sorted(each.name for each in (tmp_path / "tables").iterdir())[-1] == "test.csv"
    assert "the column to predict is diagnosis" in out
    assert "exists and is never overwritten" in command("sample", "tables")[2]
    assert "there is no data set 'iris'" in command("sample", "more", "--dataset", "iris")[2]
    monkeypatch.delenv("CGD_DATA", raising=False)
    assert "or set CGD_DATA to the parent of a folder adult" in command("sample", "more", "--dataset", "adult")[2]


def test_function_that_only_the_federation_file_names_is_not_imported(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may come from another participant, like the folder of a run; see `test_model.py`."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "wreck.py").write_text("open('imported', 'w').close()\n\ndef network(features, outputs): ...\n")
    monkeypatch.syspath_prepend(installed)
    schema = SCHEMA.replace('kind = "mlp"\nlayers = [8]', 'function = "wreck:network"')
    path = write_federation(tmp_path, NAMES, schema=schema)
    write_csv(tmp_path / "a.csv", table(40, 1))
    monkeypatch.setattr("cgd.tabular.run.RunFolder", lambda *_: (_ for _ in ()).throw(InputError("not further")))
    code, _, err = command("join", path, "--as", "ada", "--data", "a.csv")
    assert code == 2, err
    assert not (tmp_path / "imported").exists()
    assert "names the function 'wreck:network' for its network" in err
    assert "not further" in command("join", path, "--as", "ada", "--data", "a.csv", "--function", "wreck:network")[2]
    assert (tmp_path / "imported").exists()
