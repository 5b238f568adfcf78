"""`cgd keygen`, `cgd federation` and `cgd join`: files, tables, exit codes, and errors in one line."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cgd.cli import app, display
from cgd.cli.display import EventFile
from cgd.errors import InputError
from cgd.federation import member
from cgd.federation.config import Federation
from cgd.federation.keys import Keys
from cgd.federation.state import StateFolder
from cgd.transport.waiting_times import PeerTimes, WaitingTimes
from support.federations import ProcessFederation
from support.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def create_federation(folder: Path) -> None:
    """Create keys and a federation file with the commands."""
    participants = []
    for name in NAMES:
        assert run("keygen", name, cwd=folder).returncode == 0
        participants += ["--participant", f"{name}=tcp://127.0.0.1:{free_port()}={name}.pub"]
    made = run("federation", "new", "federation.toml", "--name", "trial", "--steps", "3", *participants, cwd=folder)
    assert made.returncode == 0, made.stderr


def test_commands_create_show_and_change_a_federation_file(tmp_path: Path) -> None:
    create_federation(tmp_path)
    assert stat.S_IMODE((tmp_path / "ada.key").stat().st_mode) == 0o600
    federation = Federation.load(tmp_path / "federation.toml")
    assert (federation.name, federation.epoch, federation.training.steps) == ("trial", 1, 3)
    assert sorted(federation.contacts) == list(NAMES)
    shown = run("federation", "show", "federation.toml", cwd=tmp_path).stdout
    assert "trial, epoch 1" in shown
    assert federation.sections()["training"] in shown
    run("keygen", "dan", cwd=tmp_path)
    added = run(
        *("federation", "add", "federation.toml", "dan", "--address", "tcp://dan.example:7001"),
        *("--public-key", "dan.pub"),
        cwd=tmp_path,
    )
    assert "has epoch 2 now: ada, bob, cleo, dan" in added.stdout
    removed = run("federation", "remove", "federation.toml", "bob", cwd=tmp_path)
    assert "has epoch 3 now: ada, cleo, dan" in removed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("keygen", "ada"), "ada.key exists and is never overwritten"),
        (("keygen", "no/slash"), "no/slash"),
        (("federation", "show", "none.toml"), "none.toml"),
        (("federation", "remove", "federation.toml", "bob"), "is unchanged"),
        (("federation", "remove", "federation.toml", "bop"), "did you mean 'bob'?"),
        (("federation", "new", "federation.toml", "--participant", "ada"), "NAME=ADDRESS=PUBLIC-KEY-FILE"),
        (("join", "federation.toml", "--as", "zoe", "--run", "training:main"), "name one of ada, bob, cleo"),
        (("join", "federation.toml", "--as", "ada", "--run", "training"), "it is MODULE:FUNCTION"),
        (("join", "federation.toml", "--as", "ada", "--run", "nothing:main"), "there is no module 'nothing'"),
        (("join", "federation.toml", "--as", "ada", "--run", "json:nothing"), "module json has no function 'nothing'"),
        (
            ("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--key", "bob.key"),
            "this is the key of bob; name the key file of ada",
        ),
        (("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--key", "none.key"), "none.key"),
        (("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--key", "ada.pub"), "is a public key"),
        (("join", "federation.toml", "--as", "ada", "--run", "training.py:main"), "without .py: training:main"),
        (("join", "federation.toml", "--as", "ada", "--run", "os:getcwd"), "is called with one argument, the peers"),
        (("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--listen", "host:1"), "write tcp://HOST:P"),
        (
            ("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--state", "ada.key"),
            "name another folder (--state)",
        ),
        (("join", "federation.toml", "--as", "ada", "--run", "json:dumps", "--log", "/dev/null/x"), "with --log"),
        (("federation", "check", "federation.toml", "--as", "ada", "--wait", "0"), "a number of seconds above 0"),
    ],
)
def test_bad_input_is_reported_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    ProcessFederation(tmp_path, NAMES)
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.startswith("cgd: ")


def test_first_states_of_peers_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is logged once, maybe directly after the connection, so the log must be open before that."""
    calls = list[str]()

    def stop(*_: object) -> None:
        calls.append("transport")
        raise InputError("enough")

    ProcessFederation(tmp_path, NAMES)
    monkeypatch.setattr(display, "log_events", lambda folder, _: calls.append(f"log in {folder.name}"))
    monkeypatch.setattr(member, "ZeroMQTransport", stop)
    path = str(tmp_path / "federation.toml")
    CliRunner().invoke(app, ["join", path, "--as", "ada", "--run", "json:dumps"])
    assert calls == ["log in ada", "transport"]


def test_key_file_readable_by_others_is_rejected(tmp_path: Path) -> None:
    ProcessFederation(tmp_path, NAMES)
    (tmp_path / "ada.key").chmod(0o644)
    finished = run("join", "federation.toml", "--as", "ada", "--run", "json:dumps", cwd=tmp_path)
    assert finished.returncode == 2
    assert "chmod 600" in finished.stderr


def test_new_creates_a_grid(tmp_path: Path) -> None:
    participants = []
    for row, name in enumerate(NAMES):
        run("keygen", name, cwd=tmp_path)
        participants += ["--participant", f"{name}=tcp://127.0.0.1:{7001 + row}={name}.pub={row},0"]
    assert run("federation", "new", "grid.toml", *participants, cwd=tmp_path).returncode == 0
    federation = Federation.load(tmp_path / "grid.toml")
    assert federation.groups()["column-0"] == NAMES
    shown = run("federation", "show", "grid.toml", cwd=tmp_path).stdout
    for each in federation.participants:
        assert all(text in shown for text in (each.name, each.key[:40], each.key[40:]))  # unbroken, for comparison


def test_keygen_public_rewrites_the_public_key_from_the_private_one(tmp_path: Path) -> None:
    run("keygen", "ada", cwd=tmp_path)
    private, public = tmp_path / "ada.key", tmp_path / "ada.pub"
    new = public.read_text()
    key = Keys.load(private).public
    for path in (private, public):  # as older versions wrote them
        path.write_text(path.read_text().replace(key, key[:40]))
    made = run("keygen", "ada", "--public", cwd=tmp_path)
    assert made.returncode == 0
    assert key in made.stdout
    assert public.read_text() == new
    assert Keys.load(private).public == key


def test_participant_that_caused_an_error_exits_with_code_2(tmp_path: Path) -> None:
    """So that a service manager does not restart it, and the peers wait for it."""
    federation = ProcessFederation(tmp_path, NAMES)
    (tmp_path / "nan.py").write_text(
        "import sys, numpy as np\n\ndef main(peers):\n    peers.sum(np.array([np.nan if peers.me == 'bob' else 1.0]))\n"
    )
    try:
        for name in NAMES:
            federation.start(name, run="nan:main")
        assert federation.wait(seconds=90) == {"ada": 1, "bob": 2, "cleo": 1}
        assert "Traceback" not in federation.output("bob")
    finally:
        federation.close()


def test_check_reports_which_peers_answer(tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, NAMES)
    state = StateFolder(tmp_path / "state" / "ada", Federation.load(federation.path).name)
    state.save_waiting_times(WaitingTimes(1, 2, 30, peers={"cleo": PeerTimes(20, 0, 10, 25)}))
    try:
        federation.start("bob", run="time:sleep")  # any connected participant answers
        checked = run("federation", "check", "federation.toml", "--as", "ada", "--wait", "8", cwd=tmp_path)
        assert checked.returncode == 3
        present, _, last_run = checked.stdout.partition("The last run here ended at ")
        rows = {line.split()[1]: line for line in present.splitlines() if line.startswith("│")}
        assert "missing" in rows["cleo"]
        assert "nobody answers" in checked.stdout
        assert Federation.load(federation.path).digest in checked.stdout
        assert "we computed for 1.0 s, summed for 2.0 s and waited for 30.0 s" in last_run
        (row,) = [line.split("│")[1:-1] for line in last_run.splitlines() if line.startswith("│")]
        assert [cell.strip() for cell in row] == ["cleo", "20.0 s", "0.0 s", "10.0 s", "25.0 s"]
    finally:
        federation.close()


def test_timeout_names_the_missing_peer_and_events_are_json(tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, NAMES)
    try:
        for name in ("ada", "bob"):
            federation.start(name, "--timeout", "4", "--log", f"{name}.jsonl")
        assert set(federation.wait(("ada", "bob"), seconds=60).values()) == {3}
        assert "received nothing from cleo for 4 s" in federation.output("ada")
        assert "nobody answers there" in federation.output("ada")
    finally:
        federation.close()
    events = [json.loads(line) for line in (tmp_path / "ada.jsonl").read_text().splitlines()]
    assert {"time", "level", "text"} <= events[0].keys()
    assert any(each.get("peer") == "bob" and each.get("state") == "here" for each in events)
    secrets = [
        line.split('"')[1] for line in (tmp_path / "ada.key").read_text().splitlines() if line[:4] in ("secr", "seed")
    ]
    assert len(secrets) == 2
    text = (tmp_path / "ada.jsonl").read_text()
    assert not any(secret in text for secret in secrets)


def test_failing_function_is_reported_and_peers_wait_for_a_restart(tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, NAMES)
    (tmp_path / "broken.py").write_text("def main(peers):\n    raise ValueError('no such column')\n")
    try:
        federation.start("bob")
        assert federation.start("ada", run="broken:main").wait(60) == 1
        assert federation.output("ada").endswith(
            "ValueError: no such column\ncgd: broken:main failed: ValueError: no such column\n"
        )
        assert "typer" not in federation.output("ada")  # frames of our own code are left out
        federation.start("cleo")
        federation.start("ada")
        assert set(federation.wait(seconds=90).values()) == {0}
    finally:
        federation.close()
    assert os.path.exists(tmp_path / "bob.bits")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_unwritable_log_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    events = EventFile("/dev/full")
    for _ in range(3):
        events.handle(logging.LogRecord("cgd", logging.INFO, "", 0, "something", None, None))
    with suppress(OSError):  # the buffer still has the unwritten lines
        events.close()
    assert capsys.readouterr().err == "cgd: /dev/full can no longer be written; events are lost\n"


@pytest.mark.parametrize("option", ["--steps", "--lr"])
def test_zero_is_not_replaced_by_the_default(tmp_path: Path, option: str) -> None:
    participants = []
    for name in NAMES:
        Keys.generate(name).save(tmp_path)
        participants += ["--participant", f"{name}=tcp://{name}.example:7001={name}.pub"]
    finished = run("federation", "new", "federation.toml", option, "0", *participants, cwd=tmp_path)
    assert finished.returncode == 2, (tmp_path / "federation.toml").read_text()
