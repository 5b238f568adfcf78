"""The systemd units and the Dockerfile in examples/deployment are valid and match the exit codes."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cgd.cli import base

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "deployment"
UNITS = sorted(FOLDER.glob("*.service"))

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def verify(unit: str, name: str, folder: Path) -> str:
    """Return the messages of systemd about a unit; its program need not be installed here."""
    copied = folder / name
    copied.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.MULTILINE))
    command = ["systemd-analyze", "verify", "--man=no", str(copied)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{finished.stdout}{finished.stderr}{finished.returncode or ''}"


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(path: Path, tmp_path: Path) -> None:
    name = path.name.replace("@", "@hospital-a")
    assert verify(path.read_text(), name, tmp_path) == ""
    assert "ignoring: soon" in verify(path.read_text().replace("Status=2", "Status=soon"), name, tmp_path)


def settings(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return parser["Service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_restarts_after_failures_but_not_after_bad_input(path: Path) -> None:
    service = settings(path)
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(base.BAD_INPUT)
    assert service["SuccessExitStatus"] == str(base.INTERRUPTED)
    assert service["User"] != "root"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_calls_an_existing_command_with_existing_options(path: Path) -> None:
    program, command, *options = settings(path)["ExecStart"].split()
    assert program == "/opt/cgd/bin/cgd"
    asked = subprocess.run(
        [sys.executable, "-m", "cgd", command, "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert asked.returncode == 0, asked.stderr
    for option in (each for each in options if each.startswith("--")):
        assert option in asked.stdout


def test_image_copies_existing_files_and_does_not_run_as_root() -> None:
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    for name, rest in instructions:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    users = [rest for name, rest in instructions if name == "USER"]
    assert users
    assert all(user.isdigit() and int(user) > 0 for user in users)
    assert "constraints.txt" in next(rest for name, rest in instructions if name == "RUN")
