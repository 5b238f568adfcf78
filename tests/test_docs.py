"""What the documentation says can be run, and shows what the code does."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cgd
from support.pages import script

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md", "docs/simulation.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(blocks))
    command = [sys.executable, "-W", "error", str(program)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_the_picture_of_the_states_is_the_one_the_tables_give() -> None:
    module = script("state_diagram")
    assert module.PICTURE.read_text(encoding="utf-8") == module.draw(), "run `make docs` to draw it anew"


@pytest.mark.slow
def test_the_gradients_journey_lists_the_files_that_a_step_enters() -> None:
    structure = script("structure")
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = page.partition("## A gradient's journey\n")[2].partition("\n## ")[0]
    here, _, there = section.partition("Over ZeroMQ")
    in_one_process, not_there, more = (
        set(re.findall(r"\w+/\w+\.py", text)) for text in (here, *there.partition("in addition:")[::2])
    )
    assert in_one_process == set(structure.walk("process"))
    assert not_there < in_one_process
    assert (in_one_process - not_there) | more == set(structure.walk("network"))
    assert not more & in_one_process


def test_the_modules_that_are_counted_are_those_of_the_package() -> None:
    structure = script("structure")
    found = structure.modules()
    files = {path.relative_to(ROOT / "src/cgd").as_posix() for path in ROOT.glob("src/cgd/**/*.py")}
    assert {*found["modules"]} == {file for file in files if not file.endswith("__init__.py")}
    assert sum(each["modules"] for each in found["packages"].values()) == len(found["modules"])
    assert len(found["modules"]["errors.py"]["importers"]) > 10
    assert structure.KEPT.exists()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        # The site's page of results is a copy of the one that is built beside the results.
        target = ROOT / "results/paper/report.md" if link == "results/report.md" else page.parent / link
        assert target.exists(), f"{page.name} links to {link}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("getting-started", "design")))
    for page in (*pages, "docs/tables.md", "docs/deployment.md"):
        named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / page).read_text()))
        assert named <= targets, f"{page}: {named - targets}"


def test_every_public_name_is_documented_and_has_a_docstring() -> None:
    listed = set(re.findall(r"^::: cgd\.(\w+)$", (ROOT / "docs/api/index.md").read_text(), flags=re.MULTILINE))
    errors = {name for name in cgd.__all__ if name.endswith(("Error", "Warning"))}  # they are on a page of their own
    assert listed == set(cgd.__all__) - errors - {"__version__"}
    assert all(getattr(cgd, name).__doc__ for name in cgd.__all__ if name != "__version__")


def test_the_lazy_names_are_those_for_the_type_checker() -> None:
    source = ast.parse((ROOT / "src/cgd/__init__.py").read_text())
    declared = {alias.asname for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared - {None} == set(cgd.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cgd.nonsense
