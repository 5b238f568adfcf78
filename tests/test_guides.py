"""Commands, outputs, messages and examples of the guides in docs/ are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgd.cli import app
from cgd.experiments import experiment_file
from cgd.federation.config import Training
from support.pages import load_script

ROOT = Path(__file__).parent.parent
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src/cgd").rglob("*.py")))
# The source with strings that continue in the next line joined.
JOINED_SOURCE = re.sub(r'"\s*\n\s*f?"', "", SOURCE)
KEY = re.compile(r"(?<= )[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}(?:[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40})?(?=[ ,])")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", read(page), flags=re.MULTILINE | re.DOTALL)


def section(page: str, title: str) -> str:
    _, found, rest = read(page).partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def test_code_of_the_tutorial_is_part_of_the_example() -> None:
    program = (ROOT / "examples/federation/train.py").read_text()
    parts = [block for block in blocks("tutorial.md", "python") if "def " in block]
    assert len(parts) == 2
    assert all(part in program for part in parts)


def test_outputs_of_the_tutorial_are_those_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the digests and public keys; `make federation-demo` runs the rest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    matches = load_script("run_tutorial").matches
    ran = 0
    for block in blocks("tutorial.md", "console"):
        for command, expected in re.findall(r"^\$ (cgd (?:.*\\\n)*.*\n)((?:[^$].*\n)*)", block, flags=re.MULTILINE):
            arguments = command.replace("\\\n", " ").split()[1:]
            if arguments[0] != "keygen" and arguments[:2] not in (["federation", "new"], ["federation", "show"]):
                continue
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
            assert not expected or matches(KEY.sub("KEY", result.output), KEY.sub("KEY", expected)), command
            ran += 1
    assert ran == 8


@pytest.mark.parametrize(
    "text",
    [
        "is done after",
        "done; waiting for peers that may need us to recover (Ctrl-C leaves immediately)",
        "nobody answers there",
        "asking whether an earlier process with this key still runs",
        "the same command continues from here",
    ],
)
def test_messages_of_the_tutorial_exist(text: str) -> None:
    assert text in read("tutorial.md")
    assert text in JOINED_SOURCE


@pytest.mark.parametrize("title", ["The hub", "The log", "What the waiting messages mean"])
def test_messages_of_operations_exist(title: str) -> None:
    """The texts in the first column of a table, without the parts that vary."""
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", section("operations.md", title), re.M)))
    assert len(quoted) > 2
    varies = r"\b(?:NAME|ADDRESS|X|Y|N|\d+)\b|…|\[training\]|[()]"
    parts = [part.strip(" :;") for text in quoted for part in re.split(varies, text)]
    assert [part for part in parts if len(part) > 1 and part not in JOINED_SOURCE] == []


def test_training_settings_of_operations_are_the_real_ones() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `?\"?([\w.]*)\"?`? \|", section("operations.md", "The federation file"), re.M)
    stated = dict(reversed(rows[rows.index(("steps", "200")) :]))  # of names in several sections, the first
    defaults = {name: str(value) for name, value in vars(Training()).items()}
    assert {name: stated.get(name) for name in defaults} == defaults


def test_specs_of_the_pages_are_valid(tmp_path: Path) -> None:
    for number, text in enumerate(blocks("simulation.md", "toml") + blocks("audit.md", "toml")):
        named = re.match(r"# (\S+\.toml)", text)
        path = tmp_path / (named[1] if named else f"{number}.toml")
        path.write_text(text)
    (tmp_path / "patients.csv").write_text("age,diagnosis\n50,yes\n")
    runs = {path.name: len(experiment_file.read(path).entries["paper"]) for path in tmp_path.glob("*.toml")}
    assert runs == {"hospitals.toml": 4, "own-deltas.toml": 1, "patients.toml": 1, "skewed.toml": 3, "4.toml": 1}


def test_extras_of_the_page_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cells = re.findall(r"^\| (`cgd\[.*?) \|", section("getting-started.md", "Install"), flags=re.MULTILINE)
    stated = re.findall(r"`cgd\[(\w+)\]`", " ".join(cells))
    assert {*stated} == declared.keys() - {"dev", "docs"}
