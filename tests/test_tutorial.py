"""The commands of docs/tables.md and docs/real-tables.md print what the pages show: `make tutorial` as a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.pages import load_script

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture(scope="module")
def tutorial() -> ModuleType:
    return load_script("run_tutorial")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "participants"),
    [
        ("tutorial", [f"hospital-{name}" for name in "abcde"]),
        ("columns", [f"{who}-{town}" for who in ("clinic", "lab", "archive") for town in "abc"]),
        ("common", [f"{who}-{town}" for who in ("clinic", "lab", "archive") for town in "abc"]),
        ("clinics", [f"clinic-{name}" for name in "abcd"]),
    ],
)
def test_each_part_of_the_page_runs_and_prints_the_output_shown(
    tutorial: ModuleType, part: str, participants: list[str], tmp_path: Path
) -> None:
    progress: list[str] = []
    tutorial.run(part, tmp_path, progress.append)
    assert "ran with the output on the page" in progress[-1]
    for name in participants:
        assert (tmp_path / "runs" / name / "report.html").exists()


@pytest.mark.slow
def test_audit_of_a_table_runs_as_on_its_page(tutorial: ModuleType, tmp_path: Path) -> None:
    progress: list[str] = []
    tutorial.run("audit", tmp_path, progress.append)
    assert "ran with the output on the page" in progress[-1]
    page = (tmp_path / "cgd-audit" / "audit.html").read_text()
    assert "Which records were recovered" in page
    for name in [each.name for each in tutorial.PARTS["audit"]]:
        assert f"(images/{name})" in tutorial.AUDIT_PAGE.read_text()
        assert (tutorial.PICTURES / name).exists()


@pytest.mark.parametrize(
    ("output", "expected", "varies", "agrees"),
    [
        ("149 sums\n", "149 sums\n", "", True),
        ("150 sums\n", "149 sums\n", "", False),
        ("150 sums\n", "149 sums\n", "149 (100-250)", True),
        ("599 sums\n", "149 sums\n", "149 (100-250)", False),
        ("accuracy 96.1 %\n", "accuracy 97.8 %\n", "", True),
        ("accuracy 48.0 %\n", "accuracy 97.8 %\n", "", False),
        ("loss 0.1500\n", "loss 0.1113\n", "", True),
        ("loss 0.3113\n", "loss 0.1113\n", "", False),
        ("loss 1\n", "loss 1.0\n", "", False),
        ("digest 00ff00ff00ff0\n", "digest b6eec9f1c386a\n", "", True),
        ("one\ntwo 3\n", "…\ntwo 3\n", "", True),
        ("one\ntwo 3\n", "…\ntwo 4\n", "", False),
    ],
)
def test_numbers_of_an_output_must_agree_with_the_page(
    tutorial: ModuleType, output: str, expected: str, varies: str, *, agrees: bool
) -> None:
    assert (
        tutorial.matches(
            output, expected, {number: (int(low), int(high)) for number, low, high in tutorial.RANGE.findall(varies)}
        )
        is agrees
    )


def page(tutorial: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"<!-- run: trial -->\n{text}\n<!-- end -->\n")
    monkeypatch.setattr(tutorial, "PAGE", path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```sh\nexit 3\n```", "exit code 3"),
        ("```sh\necho 4 sums\n```\n\n```text\n4 steps\n```", "should print"),
        ("```sh\necho one; echo two\n```\n\n```text\none\n```", "should print"),
        ("```python\nraise SystemExit(2)\n```", "exit code 2"),
        ('```sh title="A"\nsleep 600\n```\n\n```sh title="B"\nexit 4\n```', "exit code 4"),
        ("```text\nof nothing\n```", "no block is above"),
        ("```sh\necho 4\n```\n\n<!-- varies: 5 (1-9) -->\n\n```text\n4\n```", "does not contain 5"),
    ],
)
def test_page_that_differs_from_the_output_is_rejected(
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
        f'```sh title="A"\ntouch a\n{wait.format("b")}\necho done 1\n```\n\n<!-- varies: 2 (1-3) -->\n\n```text\n'
        "done 2\n```\n\n"
        f'```sh title="B"\n{wait.format("a")}\ntouch b\n```\n\n'
        '```sh title="A"\ntest -e b && touch 127.0.0.1:7001\n```\n\n```sh\nls\n```\n\n```text\n127.0.0.1:7001\n…\n```'
    )
    page(tutorial, text, monkeypatch, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    tutorial.run("trial", folder, lambda _: None)
    assert not (folder / "127.0.0.1:7001").exists()  # with another port


def test_every_part_of_the_page_is_parsed(tutorial: ModuleType) -> None:
    text = tutorial.PAGE.read_text()
    for part in ("tutorial", "columns", "common"):
        assert len(tutorial.blocks(text, part)) > 5
    with pytest.raises(tutorial.TutorialError, match="no part 'poem'"):
        tutorial.blocks(text, "poem")
