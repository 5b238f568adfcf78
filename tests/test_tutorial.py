"""docs/tables.md, followed by the letter: `make tutorial` as a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.pages import script

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def tutorial() -> ModuleType:
    return script("run_tutorial")


@pytest.mark.slow
def test_the_tutorial_of_the_page_runs_and_prints_what_the_page_shows(tutorial: ModuleType, tmp_path: Path) -> None:
    told: list[str] = []
    tutorial.run("tutorial", tmp_path, told.append)
    assert "ran as the page says" in told[-1]
    for hospital in "abcde":
        assert (tmp_path / "runs" / f"hospital-{hospital}" / "report.html").exists()


def page(tutorial: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"<!-- run: trial -->\n{text}\n<!-- end -->\n")
    monkeypatch.setattr(tutorial, "PAGE", path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```sh\nexit 3\n```", "exit code 3"),
        ("```sh\necho 4 eggs\n```\n\n```text\n5 hens\n```", "should print"),
        ("```sh\necho one; echo two\n```\n\n```text\none\n```", "should print"),
        ("```python\nraise SystemExit(2)\n```", "exit code 2"),
        ('```sh title="A"\nsleep 600\n```\n\n```sh title="B"\nexit 4\n```', "exit code 4"),
        ("```text\nof nothing\n```", "no block is above"),
    ],
)
def test_a_page_that_says_something_else_is_found_out(
    tutorial: ModuleType, text: str, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page(tutorial, text, monkeypatch, tmp_path)
    with pytest.raises(tutorial.TutorialError, match=fault):
        tutorial.run("trial", tmp_path, lambda _: None)


def test_terminals_run_at_the_same_time_and_one_terminal_in_order(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wait = "until test -e {}; do sleep 0.05; done"
    text = (
        f'```sh title="A"\ntouch a\n{wait.format("b")}\necho done 1\n```\n\n```text\ndone 9\n```\n\n'
        f'```sh title="B"\n{wait.format("a")}\ntouch b\n```\n\n'
        '```sh title="A"\ntest -e b && touch 127.0.0.1:7001\n```\n\n```sh\nls\n```\n\n```text\n127.0.0.1:7001\n…\n```'
    )
    page(tutorial, text, monkeypatch, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    tutorial.run("trial", folder, lambda _: None)
    assert not (folder / "127.0.0.1:7001").exists()  # with another port


def test_every_part_of_the_page_can_be_taken_apart(tutorial: ModuleType) -> None:
    text = tutorial.PAGE.read_text()
    for part in ("tutorial", "columns"):
        assert len(tutorial.blocks(text, part)) > 5
    with pytest.raises(tutorial.TutorialError, match="no part 'poem'"):
        tutorial.blocks(text, "poem")
