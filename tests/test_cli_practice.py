"""`cgd join --data`, `cgd predict`, `cgd report`, `cgd schema`, `cgd sample`: as whoever has a table meets them."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.cli import main
from cgd.cli.display import log_events
from cgd.errors import InputError
from cgd.federation.config import FOR_TABLES, Federation
from cgd.federation.keys import Keys
from cgd.local import solo_peers
from cgd.tabular.metrics_log import FILE as HISTORY
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import train
from support import runs
from support.practice import DATA, SCHEMA, federation_file, records, setting, table, write_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process: its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cgd", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    return federation_file(tmp_path, NAMES)


GOOD = "age,dose,ward,outcome\n61,1.5,A,ill\n44,,B,well\n"


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (None, [], "nowhere.csv cannot be read (No such file or directory); name a CSV or Parquet file"),
        ("", [], "is empty; name a CSV file with a header"),
        ("age,dose,ward,outcome\n", [], "has a header and no rows; export it with its records"),
        (GOOD.replace("dose", "doses"), [], "has no column 'dose' (did you mean 'doses'?); rename the column"),
        (GOOD.replace("outcome", "result"), [], "has no column 'outcome'; name the column to predict with --label"),
        (GOOD, ["--label", "outcomes"], "has no column 'outcomes' (did you mean 'outcome'?); name the column to"),
        (GOOD.replace(",ill", ",").replace(",well", ","), [], "no row has a label in column 'outcome'"),
        (GOOD.replace("1.5", "high"), [], "line 2, column 'dose': 'high' is no number"),
        (GOOD.replace("1.5", '"1,5"'), [], "'1,5' is no number; write decimals with a point, as in 1.5"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_before_anybody_hears_of_it(
    command: Any, federation: Path, tmp_path: Path, content: str | None, options: list[str], says: str
) -> None:
    path = tmp_path / "nowhere.csv"
    if content is not None:
        path.write_text(content)
    code, _, err = command("join", federation, "--as", "ada", "--data", path, *options)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "state").exists()  # nobody was joined
    assert not (tmp_path / "runs").exists()


def test_the_public_key_of_another_participant_is_not_listed(command: Any, federation: Path, tmp_path: Path) -> None:
    before = federation.read_text()
    Keys.generate("dan").save(tmp_path)
    says = "dan.pub has the public key of 'dan', and the participant is 'dora'; give the .pub of dora"
    code, _, err = command(
        *("federation", "add", federation, "dora", "--address", "tcp://dora.example:1", "--public-key", "dan.pub")
    )
    assert (code, federation.read_text()) == (2, before)
    assert says in err
    assert len(err.strip().splitlines()) == 1
    participants = [f"--participant={name}=tcp://{name}.example:1={name}.pub" for name in NAMES]
    code, _, err = command(
        "federation", "new", "x.toml", *participants, "--participant=dora=tcp://dora.example:1=dan.pub"
    )
    assert code == 2
    assert says in err
    assert not (tmp_path / "x.toml").exists()
    code, _, err = command("federation", "add", federation, "dora", "--public-key", "dora.pub")
    assert code == 2
    assert "there is no file dora.pub" in err
    code, _, _ = command(
        *("federation", "add", federation, "dan", "--address", "tcp://dora.example:1", "--public-key", "dan.pub")
    )
    assert code == 0


def test_options_that_do_not_go_together_are_told(command: Any, federation: Path, tmp_path: Path) -> None:
    (tmp_path / "ada.csv").write_text(GOOD)
    join = ("join", federation, "--as", "ada")
    assert "give one of --data FILE (your records) and --run" in command(*join)[2]
    assert "give one of --data" in command(*join, "--data", "ada.csv", "--run", "train:main")[2]
    assert "--label, --out and --delta go with --data" in command(*join, "--run", "train:main", "--delta", "0.1")[2]
    assert "delta is -1.0" in command(*join, "--data", "ada.csv", "--delta", "-1")[2]
    assert "'dan' is no participant" in command("join", federation, "--as", "dan", "--data", "ada.csv")[2]


def test_a_file_without_tables_is_told(command: Any, tmp_path: Path) -> None:
    path = federation_file(tmp_path, NAMES, schema=None)
    (tmp_path / "ada.csv").write_text(GOOD)
    code, _, err = command("join", path, "--as", "ada", "--data", "ada.csv")
    assert code == 2
    assert "has no [data] and [model]" in err
    assert "`cgd schema FILE --label COLUMN` suggests some" in err


def test_the_folder_of_another_run_is_told_before_anybody_hears_of_it(
    command: Any, federation: Path, tmp_path: Path
) -> None:
    (tmp_path / "ada.csv").write_text(GOOD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / HISTORY).write_text('{"participant": "bob", "federation": "other"}\n')
    code, _, err = command("join", federation, "--as", "ada", "--data", "ada.csv", "--out", "run")
    assert code == 2
    assert "run holds the run of bob of other, which is never overwritten" in err


def test_a_caution_is_told_before_anybody_hears_of_us(command: Any, federation: Path, tmp_path: Path) -> None:
    for rows, said in ((2, True), (60, False)):
        write_csv(tmp_path / "ada.csv", table(rows, 1))
        code, _, err = command("join", federation, "--as", "ada", "--data", "ada.csv", "--key", "nowhere.key")
        assert code == 2
        assert "nowhere.key" in err  # no key, so nobody was joined
        told = "cgd: caution, from our own table alone: we bring 2 records; each of the other two members, alone, can"
        assert (told in err) == said
        assert ("caution" in err) == said


@pytest.fixture
def quiet_logger() -> Iterator[logging.Logger]:
    """The logger of the package, as it was before, when the test is over."""
    logger = logging.getLogger("cgd")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    for handler in set(logger.handlers) - set(before[0]):
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("terminal", [True, False])
def test_a_caution_is_seen_whether_there_is_a_terminal_or_not(
    terminal: bool,
    quiet_logger: logging.Logger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    log_events(tmp_path)
    quiet_logger.getChild("learning").warning("caution: %s", "records are few", extra={"event": "caution"})
    quiet_logger.getChild("network").info("bob is here", extra={"event": "peer"})
    err = capsys.readouterr().err
    assert err.startswith("cgd: caution: records are few\n")
    assert ("bob" in err) != terminal  # in a terminal the table has it
    caution, bob = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (caution["level"], caution["event"], caution["text"]) == ("WARNING", "caution", "caution: records are few")
    assert bob["text"] == "bob is here"


def test_a_log_in_the_state_folder_is_no_link_and_one_that_was_chosen_may_be(
    tmp_path: Path, quiet_logger: logging.Logger
) -> None:
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"is a symbolic link, and such are not followed"):
        log_events(tmp_path)
    log_events(tmp_path, tmp_path / "events.jsonl")
    quiet_logger.warning("a line")
    assert len((tmp_path / "precious").read_text().splitlines()) == 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    what = setting(steps=10)
    made = train(solo_peers(b"s" * 32), what, records(table(60, 1)))
    origin = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
    ConfinedModel.of(made, what, origin).save(tmp_path / "run")
    return tmp_path / "run"


def test_what_the_commands_write_only_its_owner_can_read(
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


def test_predictions_go_to_the_screen_or_into_a_file(command: Any, run: Path, tmp_path: Path) -> None:
    data = write_csv(tmp_path / "new.csv", table(4, 7))
    code, out, err = command("predict", run, "--data", data)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "predicted outcome,probability of ill,probability of well"
    assert len(lines) == 5
    assert "accuracy" in err  # the file has the outcome, too
    assert command("predict", run, "--data", data, "--out", "p.csv")[0] == 0
    assert (tmp_path / "p.csv").read_text() == out
    code, _, err = command("predict", run, "--data", data, "--out", "p.csv")
    assert code == 2
    assert "p.csv exists and is never overwritten" in err
    assert (tmp_path / "p.csv").read_text() == out


def test_names_of_classes_do_not_command_a_terminal(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a pipe they go as they are; and neither way they are formulas."""
    data = replace(DATA, classes=("=ill\x1b[2J", "well\u202e"))
    content = table(60, 1)
    content["outcome"] = [data.classes[each == "well"] for each in content["outcome"]]
    what = setting(data, steps=10)
    made = train(solo_peers(b"s" * 32), what, records(content, data))
    ConfinedModel.of(made, what, {"participant": "a\x1b[2J", "federation": "t", "epoch": 1, "digest": ""}).save("run")
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


def test_what_was_never_seen_is_predicted_and_told(command: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,dose,ward\n61,1.5,Z\n44,,B\n")
    code, out, err = command("predict", run, "--data", "new.csv")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "column 'ward': 1 value is of categories that nobody had: 'Z' (1)" in err
    assert "column 'dose': 1 value is missing" in err


def test_predictions_that_cannot_be_made_are_told(command: Any, run: Path, federation: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,ward\n61,A\n")
    for arguments, says in (
        ((tmp_path / "none", "--data", "new.csv"), "there is no model in"),
        ((run, "--data", "new.csv"), "has no column 'dose'"),
        ((run, "--data", "none.csv"), "none.csv cannot be read"),
        ((run, "--data", "new.csv", "--federation", federation), "leave --federation out"),
    ):
        code, _, err = command("predict", *arguments)
        assert code == 2
        assert says in err


def test_a_report_is_written_anew(command: Any, tmp_path: Path) -> None:
    runs.write(runs.classification(), tmp_path / "run")
    code, out, _ = command("report", tmp_path / "run")
    assert code == 0
    assert "report.html" in out
    assert "accuracy" in out
    assert "has no run.json" in command("report", tmp_path)[2]


def test_a_schema_goes_into_a_new_federation_file(command: Any, tmp_path: Path) -> None:
    write_csv(tmp_path / "mine.csv", table(40, 1))
    code, out, _ = command("schema", "mine.csv", "--label", "outcome")
    assert code == 0
    (tmp_path / "schema.toml").write_text(out)
    people = []
    for name in NAMES:
        command("keygen", name)
        people += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    assert command("federation", "new", "federation.toml", "--schema", "schema.toml", *people)[0] == 0
    federation = Federation.load(tmp_path / "federation.toml")
    assert federation.training == FOR_TABLES
    assert federation.data is not None
    assert [(each.name, each.type) for each in federation.data.columns] == [
        *(("age", "number"), ("dose", "number"), ("ward", "category")),
    ]
    assert command("schema", "mine.csv", "--label", "outcomes")[0] == 2
    (tmp_path / "broken.toml").write_text("[data]\ntarget = 1\n[model]\n")
    code, _, err = command("federation", "new", "other.toml", "--schema", "broken.toml", *people)
    assert code == 2
    assert "columns is missing" in err
    assert not (tmp_path / "other.toml").exists()


STRANGER = '[[participants]]\nname = "eve"\naddress = "tcp://eve.example:7001"\nkey = "KEY"\n'


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (STRANGER, "the schema has 'participants'"),
        ('[hub]\naddress = "tcp://eve.example:7000"\nkey = "KEY"\n', "the schema has 'hub'"),
        ("[training]\nminimum = 3\n", "the schema has 'training'"),
        ("[[participants]", "the schema is not TOML"),
    ],
)
def test_a_schema_has_tables_and_a_model_and_nothing_else(command: Any, tmp_path: Path, more: str, says: str) -> None:
    """It comes from somebody else, and its text goes into the file that says who takes part."""
    people = []
    for name in (*NAMES, "eve"):
        command("keygen", name)
        people += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    key = Keys.load(tmp_path / "eve.key").public
    (tmp_path / "schema.toml").write_text(SCHEMA + more.replace("KEY", key))
    code, _, err = command("federation", "new", "federation.toml", "--schema", "schema.toml", *people[:-2])
    assert code == 2
    assert says in err
    assert "[data] and [model]" in err
    assert not (tmp_path / "federation.toml").exists()


def test_the_file_says_what_was_asked_for_whatever_is_in_the_schema(command: Any, tmp_path: Path) -> None:
    """Keys above the first section of a schema would belong to the section before it."""
    people = []
    for name in NAMES:
        command("keygen", name)
        people += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    dotted = 'data.target = "outcome"\ndata.columns.age = "number"\nmodel.kind = "logistic"\n'
    (tmp_path / "schema.toml").write_text(dotted)
    code, _, err = command("federation", "new", "federation.toml", "--schema", "schema.toml", *people)
    assert code == 2
    assert "write [data]" in err
    assert not (tmp_path / "federation.toml").exists()


def test_sample_tables(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = command("sample", "tables")
    assert code == 0
    assert sorted(each.name for each in (tmp_path / "tables").iterdir())[-1] == "test.csv"
    assert "the column to predict is diagnosis" in out
    assert "exists and is never overwritten" in command("sample", "tables")[2]
    assert "there is no data set 'iris'" in command("sample", "more", "--dataset", "iris")[2]
    monkeypatch.delenv("CGD_DATA", raising=False)
    assert "is not below CGD_DATA (which is not set)" in command("sample", "more", "--dataset", "adult")[2]
