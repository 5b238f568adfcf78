"""`cgd audit` as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cgd.audit import results
from cgd.tabular.trace_writer import FILE
from support import traces
from support.own_tables import PRIVACY, write_federation, write_table
from support.tabular import tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", "audit", *arguments]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=env)


def test_one_attack_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    finished = run("--only", "labels", "--jobs", "1", "--seed", "1", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    lines = [line.rstrip() for line in finished.stdout.splitlines()]
    assert max(map(len, lines)) <= 80  # in a pipe, too
    assert any("leaks" in line for line in lines)
    summary = "1 of 1 attack succeeds against CGD (Histogram of labels); all 6 controls passed."
    assert summary in " ".join(finished.stdout.split())
    assert lines[-1] == "The page is cgd-audit/audit.html"
    assert "\x1b[" not in finished.stdout + finished.stderr
    assert len([line for line in finished.stderr.splitlines() if ": done (" in line]) == 12
    found = results.load(tmp_path / "cgd-audit")
    assert found.complete
    assert found.command == "cgd audit --only labels --seed 1"
    page = (tmp_path / "cgd-audit" / "audit.html").read_text()
    assert "Histogram of labels" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cgd-audit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "grams"), "there is no attack 'grams' here; choose from gram, membership, "),
        (("nowhere",), "nowhere does not exist; name a spec (.toml), a table with --federation, or folders that `cgd"),
        (("full/notes.txt",), "full/notes.txt is a file; to audit a table, name the file of the federation that it is"),
        (("full/notes.txt", "--federation", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("--federation", "full/notes.txt"), "nothing is to be audited; name one table, a file or a database"),
        (("--label", "outcome"), "--label is 'outcome'; it is for a table"),
        (("--decimal", ","), "--decimal is ','; it is for a table"),
        (("--rounds", "3"), "--rounds and --honest are for a spec or a table"),
        (("full",), "full has no recording.json"),
        (("nowhere.toml",), "nowhere.toml"),
        (("mine.toml", "full"), "mine.toml, full cannot be audited together"),
        (("--coalition", "a,b"), "--coalition is a, b; it is for recorded runs"),
        (("--out", "full"), "full is not empty and holds no audit; name another folder with --out"),
        (("--out", "full/notes.txt"), "is a file"),
        (("--out", "full/notes.txt/below"), "cannot be written"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
    ],
)
def test_bad_input_is_reported_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert message in " ".join(finished.stderr.replace("│", " ").split())
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


def test_own_table_is_audited_before_joining(tmp_path: Path) -> None:
    table, file = write_table(tmp_path, 40), write_federation(tmp_path, more=PRIVACY)
    table.write_text(table.read_text().replace(",", ";").replace(".", ","))
    given = (table.name, "--federation", file.name, "--decimal", ",", "--only", "gram", "--only", "traps")
    finished = run(*given, "--jobs", "1", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert max(map(len, finished.stdout.splitlines())) <= 80
    summary = "0 of 2 attacks succeed against CGD with ε = 4 of the file, 1 does not succeed, 1 does not apply to this"
    assert summary in " ".join(finished.stdout.split())
    ended = [line.partition(": ")[2].partition(" (")[0] for line in finished.stderr.splitlines() if " of 14)" in line]
    assert ended == ["not measured", "done"] * 7
    found = results.load(tmp_path / "cgd-audit")
    assert (
        found.command == "cgd audit my.csv --federation federation.toml --decimal , --only gram --only traps --seed 0"
    )
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "cgd-audit").iterdir()} == {0o600}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cgd-audit", "federation.toml", "my.csv"]


def test_interrupt_keeps_the_finished_parts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cgd", "audit", "--only", "reducer", "--only", "simulator", "--jobs", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    assert process.stderr is not None
    assert "A reducer that sends different totals, cgd: done" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the command and all of its processes
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "cgd: interrupted; " in errors
    assert "not run" in output
    found = json.loads((tmp_path / "cgd-audit" / "audit.json").read_text())
    assert not found["complete"]
    assert found["attacks"][0]["findings"]
    assert found["unfinished"][-1]["attack"] == "simulator"
    assert "Not complete" in (tmp_path / "cgd-audit" / "audit.html").read_text()


def test_names_in_a_trace_cannot_control_the_terminal(tmp_path: Path) -> None:
    """A trace may come from another participant: its names are printed, or refused, without escape sequences."""
    traces.run(tabular_settings(optimizer="sgd", lr=0.5, steps=3), tmp_path)
    path = tmp_path / "ada" / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "federation": "trial\x1b]0;owned\x07\x1b[2J"}))
    finished = run("ada", "--only", "labels", "--jobs", "1", cwd=tmp_path)
    assert "\x1b" not in finished.stdout + finished.stderr
