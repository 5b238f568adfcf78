"""The table in a terminal: what it says, at 80 columns and in a pipe."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cgd.audit import results, table, verdicts
from support import audits

if TYPE_CHECKING:
    from pathlib import Path


def printed(audit: dict[str, Any], width: int = 80, *, colour: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None).print(
        table.show(audit), highlight=False
    )
    return file.getvalue()


def loaded(folder: Path, **how: Any) -> dict[str, Any]:
    return results.load(audits.write(folder, *audits.example(**how)))


def test_it_reads_at_80_columns(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in printed(loaded(tmp_path)).splitlines()]
    assert max(map(len, lines)) <= 80
    heading = next(line for line in lines if "secure sums" in line)
    assert heading.split("  ")[-1].strip() == "CGD"
    at = lines.index("Attack moments [moments]")
    # What the variants have in common is left out; a verdict stands over its figures, under its scheme.
    assert lines[at + 1] == "XᵀX: relative error"
    words, figures = lines[at + 2], lines[at + 3]
    assert words.split() == ["passive", "leaks", "–", "leaks"]
    assert figures.split() == ["0.077", "(0.295)", "0.077", "(0.295)"]
    for text in ("leaks", "0.077"):
        assert {heading.index("secure"), heading.index("CGD")} == {
            place for line in (words, figures) for place in range(len(line)) if line.startswith(text, place)
        }
    assert lines[at + 5].split() == ["4.6e−7", "(0.295)", "8.0e−7", "(0.295)"]
    assert lines[at + 6] == "Xᵀy: relative error"
    assert lines[at + 7].split() == ["passive", "leaks", "–", "holds"]
    text = "\n".join(lines)
    assert "caught" in text
    assert "failed: records, dp: ZeroDivisionError: a fault of the attack" in " ".join(text.split())
    assert "not measured: Attack theory: the model is not linear" in " ".join(text.split())
    count = "1 of 3 attacks succeed against CGD, 1 could not be measured; all 2 controls come out as they must."
    assert text.split()[-len(count.split()) :] == count.split()


def test_settings_are_there_in_a_narrow_terminal_too(tmp_path: Path) -> None:
    text = printed(loaded(tmp_path), width=60)
    assert "passive" in text
    assert "own batches" in " ".join(text.split())


def test_what_too_few_records_say_is_not_counted_as_measured(tmp_path: Path) -> None:
    said, pictures = audits.example()
    for attack in said["attacks"]:
        for each in attack["findings"]:
            each["undecided"] = attack["id"] == "records" and not each["succeeds"]
    audit = results.load(audits.write(tmp_path, said, pictures))
    assert "too few" in printed(audit)
    assert {each["id"] for each in verdicts.unmeasured(audit, "cgd")} == {"records", "theory"}
    assert verdicts.tally(audit, "cgd").tried == 2


def test_colour_adds_nothing_that_words_do_not_say(tmp_path: Path) -> None:
    audit = loaded(tmp_path)
    assert "\x1b[" in printed(audit, colour=True)
    assert "\x1b[" not in printed(audit)


def test_a_control_that_does_not_fail_is_loud(tmp_path: Path) -> None:
    text = printed(loaded(tmp_path, wrong_control=True))
    assert "DOES NOT FAIL" in text
    assert "1 of 2 controls come out OTHERWISE THAN THEY MUST" in " ".join(text.split())
    assert "DOES NOT FAIL" not in printed(loaded(tmp_path))


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    assert "not run" in printed(loaded(tmp_path, complete=False))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    lines = printed(loaded(tmp_path), width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= max(width, 60)  # below that, the schemes need what they need


def test_the_verdict_of_each_kind() -> None:
    finding = {"metric": "AUC", "value": 1.0, "chance": 0.5, "control": False, "undecided": False}
    finding |= {"must_succeed": False}
    words = {
        (control, must, succeeds): verdicts.verdict(
            finding | {"control": control, "must_succeed": must, "succeeds": succeeds}
        )
        for control, must in ((False, False), (True, False), (True, True))
        for succeeds in (False, True)
    }
    assert {key: each.tone for key, each in words.items()} == {
        (False, False, False): "good",
        (False, False, True): "bad",
        (True, False, False): "good",
        (True, False, True): "loud",
        (True, True, False): "loud",
        (True, True, True): "good",
    }
    lie = finding | {"metric": "lies caught"}
    assert [verdicts.verdict(lie | {"succeeds": each}).word for each in (False, True)] == ["caught", "NOT CAUGHT"]
    assert verdicts.verdict(finding | {"succeeds": False, "undecided": True}).word == "too few"


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.0769, "relative error", "0.077"),
        (4.6e-7, "relative error", "4.6e−7"),
        (5.1e-16, "relative error", "5e−16"),
        (0.0, "relative error", "0"),
        (-1.25, "something new", "−1.250"),
        (1.0, "AUC", "1.000"),
        (0.0375, "labels wrong", "3.8 %"),
        (1.0, "records recovered", "100 %"),
        (17.26, "mean PSNR, dB", "17.3"),
        (math.inf, "mean PSNR, dB", "∞"),
        (math.nan, "AUC", "–"),
    ],
)
def test_figures_are_short(value: float, metric: str, text: str) -> None:
    assert verdicts.written(value, metric) == text


@given(st.floats(-1e4, 1e4), st.sampled_from(["relative error", "AUC", "something new"]))
def test_every_figure_fits_its_column(value: float, metric: str) -> None:
    assert len(verdicts.written(value, metric)) <= 7
