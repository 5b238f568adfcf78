"""The table in a terminal, at 80 columns and in a pipe."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cgd.audit import results, table, verdicts
from cgd.audit.runner import PartResult
from cgd.audit.view import SCHEMES
from support import audits

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.results import Audit


def to_text(audit: Audit, width: int = 80, *, colour: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None).print(
        table.render(audit), highlight=False
    )
    return file.getvalue()


def test_table_is_readable_at_80_columns() -> None:
    lines = [line.rstrip() for line in to_text(audits.example()).splitlines()]
    assert max(map(len, lines)) <= 80
    heading = next(line for line in lines if "secure sums" in line)
    assert heading.split("  ")[-1].strip() == "ε = 2"
    at = lines.index("Attack moments [moments]")
    # The common words of the variants are left out; a verdict is above its figures, below its scheme.
    assert lines[at + 1] == "XᵀX: relative error"
    words, figures = lines[at + 2], lines[at + 3]
    assert words.split() == ["passive", "leaks", "leaks", "–"]
    assert figures.split() == ["0.077", "(0.295)", "0.077", "(0.295)"]
    for text in ("leaks", "0.077"):
        assert {heading.index("secure"), heading.index("CGD")} == {
            place for line in (words, figures) for place in range(len(line)) if line.startswith(text, place)
        }
    assert lines[at + 5].split() == ["4.6e−7", "(0.295)", "8.0e−7", "(0.295)"]
    assert lines[at + 6] == "Xᵀy: relative error"
    assert lines[at + 7].split() == ["passive", "leaks", "holds", "–"]
    text = "\n".join(lines)
    assert "caught" in text
    assert "failed: records, dp2: ZeroDivisionError: a fault of the attack" in " ".join(text.split())
    assert "not measured: Attack theory: the model is not linear" in " ".join(text.split())
    summary = (
        "1 of 4 attacks succeed against CGD (Attack moments), 2 do not succeed, 1 does not apply to this data or "
        "model; all 2 controls passed."
    )
    assert text.split()[-len(summary.split()) :] == summary.split()


def test_six_schemes_fit_80_columns() -> None:
    """With many columns, a value is above that of guessing, and above what ε allows."""
    parts = [audits.Part("a", scheme) for scheme in SCHEMES]
    finished = {
        place: PartResult((audits.result("a", scheme, 0.51, False, setting="5 rounds", allowed=allowed),))
        for place, (scheme, allowed) in enumerate(zip(SCHEMES, (None,) * 3 + (0.952, 0.692, 0.557), strict=True))
    }
    lines = to_text(audits.assemble(audits.plan(*parts), finished)).splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["5", "rounds", *["holds"] * 6] in words
    assert [*["(0.500)"] * 6] in words
    assert ["≤", "0.952", "≤", "0.692", "≤", "0.557"] in words
    assert ["open", "sums"] in words


def test_narrow_table_has_settings() -> None:
    text = to_text(audits.example(), width=60)
    assert "passive" in text
    assert "own batches" in " ".join(text.split())


def test_undecided_result_does_not_count_as_measured(tmp_path: Path) -> None:
    content = audits.to_json(audits.example())
    for attack in content["attacks"]:
        for each in attack["findings"]:
            each["undecided"] = attack["id"] == "records" and not each["succeeds"]
    audit = results.load(audits.write(tmp_path, audits.example(), content))
    assert "too few" in to_text(audit)
    counts = verdicts.count_verdicts(audit, "cgd")
    assert [each.id for each in counts.undecided] == ["records"]
    assert [each.id for each in counts.inapplicable] == ["theory"]
    assert (counts.measured, counts.planned) == (2, 4)
    summary = (
        "1 of 4 attacks succeed against CGD (Attack moments), 1 does not succeed, 1 does not apply to this data or "
        "model, 1 has too few records to judge; all 2 controls passed"
    )
    assert verdicts.summary_line(audit) == summary


def test_undecided_method_is_not_outvoted_by_one_that_holds() -> None:
    found = (
        audits.result("a", "cgd", 0.51, False),
        audits.result("a", "cgd", 0.66, False, undecided=True),
    )
    audit = audits.assemble(audits.plan(audits.Part("a")), {0: PartResult(found)})
    assert verdicts.count_verdicts(audit, "cgd").measured == 0
    assert [each.id for each in verdicts.count_verdicts(audit, "cgd").undecided] == ["a"]
    assert verdicts.summary_line(audit) == "nothing was measured against CGD, 1 has too few records to judge"


@pytest.mark.parametrize(("other", "clear"), [(0.62, False), (0.51, True)])
def test_difference_within_chance_is_not_counted(other: float, clear: bool) -> None:
    parts = [audits.Part("a", scheme) for scheme in ("plain", "cgd")]
    finished = {
        0: PartResult((audits.result("a", "plain", other, False, deviation=0.03),)),
        1: PartResult((audits.result("a", "cgd", 0.673, True, deviation=0.03),)),
    }
    texts = dict(verdicts.summary(audits.assemble(audits.plan(*parts), finished)))
    compared = next(text for heading, text in texts.items() if heading.startswith("Compared with"))
    assert ("against CGD only" in compared) is clear
    assert ("do not differ clearly (Attack a)" in compared) is not clear


def test_colours_are_optional() -> None:
    assert "\x1b[" in to_text(audits.example(), colour=True)
    assert "\x1b[" not in to_text(audits.example())


def test_failed_control_is_shown_in_capitals() -> None:
    text = to_text(audits.example(failed_control=True))
    assert "CONTROL FAILED" in text
    assert "1 of 2 controls FAILED" in " ".join(text.split())
    assert "FAILED" not in to_text(audits.example())


def test_unfinished_parts_are_shown_as_not_run() -> None:
    text = " ".join(to_text(audits.example(complete=False)).split())
    assert "not run" in text
    assert "1 of 4 attacks succeed against CGD (Attack moments), 3 did not finish;" in text


def test_division_of_an_own_table_is_explained() -> None:
    """Otherwise nobody knows why the honest participants have fewer records than the table."""
    audit = audits.example("table")
    assert " ".join(audit.source.about.split()) in " ".join(to_text(audit).split())
    assert audits.example().source.about not in to_text(audits.example())


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = to_text(audits.example(), width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= max(width, 60)  # the columns of the schemes need 60


def test_verdicts_on_results_and_controls() -> None:
    tones = {
        (control, must_succeed, succeeds): verdicts.verdict(
            audits.result("a", "cgd", 1.0, succeeds, control=control, must_succeed=must_succeed)
        ).tone
        for control, must_succeed in ((False, False), (True, False), (True, True))
        for succeeds in (False, True)
    }
    assert tones == {
        (False, False, False): "good",
        (False, False, True): "bad",
        (True, False, False): "good",
        (True, False, True): "wrong",
        (True, True, False): "wrong",
        (True, True, True): "good",
    }
    lies = [audits.result("a", "cgd", 1.0, succeeds, metric="lies caught") for succeeds in (False, True)]
    assert [verdicts.verdict(each).word for each in lies] == ["caught", "NOT CAUGHT"]
    assert verdicts.verdict(audits.result("a", "cgd", 1.0, False, undecided=True)).word == "too few"


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
def test_values_are_formatted_briefly(value: float, metric: str, text: str) -> None:
    assert verdicts.format_value(value, metric) == text


@given(st.floats(-1e4, 1e4), st.sampled_from(["relative error", "AUC", "something new"]))
def test_every_value_fits_its_column(value: float, metric: str) -> None:
    assert len(verdicts.format_value(value, metric)) <= 7
