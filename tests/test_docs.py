"""The documentation agrees with the code: its programs run, and the files, names and targets that it names exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

import cgd
from support.pages import load_script

ROOT = Path(__file__).parent.parent
DESIGN_PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("design", "glossary", "model", "wire-format")),
    *sorted(ROOT.glob("docs/decisions/*.md")),
    ROOT / "CONTRIBUTING.md",
]


def code_of(page: str) -> str:
    """Return all Python code of a page, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    return "\n\n".join(blocks)


def test_the_code_of_the_readme_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported torch already."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(code_of("README.md"), "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/getting-started.md", "docs/simulation.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(code_of(page))
    command = [sys.executable, "-W", "error", str(program)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_state_diagram_is_up_to_date() -> None:
    module = load_script("state_diagram")
    assert module.PICTURE.read_text(encoding="utf-8") == module.draw(), "run `make docs` to draw it again"


@pytest.mark.slow
def test_path_of_a_gradient_lists_the_files_that_a_step_calls() -> None:
    structure = load_script("structure")
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = page.partition("## The path of a gradient\n")[2].partition("\n## ")[0]
    here, _, there = section.partition("Over ZeroMQ")
    in_one_process, not_there, more = (
        set(re.findall(r"(?:\w+/)*\w+\.py", text)) for text in (here, *there.partition("in addition:")[::2])
    )
    assert in_one_process == set(structure.walk("process"))
    assert not_there < in_one_process
    assert (in_one_process - not_there) | more == set(structure.walk("network"))
    assert not more & in_one_process


def test_counted_modules_are_those_of_the_package() -> None:
    structure = load_script("structure")
    found = structure.modules()
    files = {path.relative_to(ROOT / "src/cgd").as_posix() for path in ROOT.glob("src/cgd/**/*.py")}
    assert {*found["modules"]} == {file for file in files if not file.endswith("__init__.py")}
    assert sum(each["modules"] for each in found["packages"].values()) == len(found["modules"])
    assert len(found["modules"]["errors.py"]["importers"]) > 10
    assert structure.KEPT.exists()


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/paper/*.md")],
    ids=lambda page: page.name,
)
def test_links_between_pages_are_valid(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        # The site has copies of the pages of results, which are stored with the results.
        copied = page.parent == ROOT / "docs" and link in ("results/report.md", "results/claims.md")
        target = ROOT / "results/paper" / Path(link).name if copied else page.parent / link
        assert target.exists(), f"{page.name} links to {link}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("getting-started", "design")))
    for page in (*pages, "docs/tables.md", "docs/deployment.md"):
        named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / page).read_text()))
        assert named <= targets, f"{page}: {named - targets}"


def test_every_public_name_is_documented_and_has_a_docstring() -> None:
    listed = set(re.findall(r"^::: cgd\.(\w+)$", (ROOT / "docs/api/index.md").read_text(), flags=re.MULTILINE))
    errors = {name for name in cgd.__all__ if name.endswith(("Error", "Warning"))}  # they are on another page
    assert listed == set(cgd.__all__) - errors - {"__version__"}
    assert all(getattr(cgd, name).__doc__ for name in cgd.__all__ if name != "__version__")


def test_every_module_is_on_one_page_of_the_api() -> None:
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    listed = Counter(re.findall(r"^::: (cgd\.[\w.]+)$", pages, flags=re.MULTILINE))
    paths = (path.relative_to(ROOT / "src") for path in ROOT.glob("src/cgd/**/*.py") if not path.name.startswith("__"))
    modules = {".".join(path.with_suffix("").parts) for path in paths}
    assert {name: listed[name] for name in modules if listed[name] != 1} == {}


@pytest.mark.parametrize("page", DESIGN_PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = ("src", "tests", "docs", "examples", "models", "fuzz", "benchmarks", "requirements")
    files = {f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.*")}
    named = re.findall(r"`([\w./-]+\.(?:py|md|json|pml))`", page.read_text())
    missing = [name for name in named if not any(file.endswith(f"/{name}") for file in files) and "ID.py" not in name]
    assert missing == []


def test_the_lazy_names_are_those_for_the_type_checker() -> None:
    source = ast.parse((ROOT / "src/cgd/__init__.py").read_text())
    declared = {alias.asname for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared - {None} == set(cgd.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cgd.nonsense
