"""The report of a run: what came of it, for a clinician, a data scientist and a privacy officer.

    curves.png    loss and score against steps
    metrics.csv   the same as a table
    report.html   everything, on one page that needs nothing else

All of them say something about the participant's own records, so nobody but their owner may read them. They are made
from run.json alone and can be made again at any time; the same run gives the same bytes.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from cgd.csv_writer import write_rows
from cgd.files import write_private
from cgd.reporting.plots import curves_png
from cgd.reporting.run_file import load_run
from cgd.reporting.training_report import render

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_run", "write_report"]

PAGE = "report.html"  # the last that is written of a run
METRICS = ("step", "training_loss", "validation_loss", "everyone_validation_loss", "score")


def write_report(run: Path) -> list[Path]:
    """Write the report of a run beside its file; what was there of an earlier one is replaced.

    Args:
        run: its directory.

    Returns:
        The files: curves.png, metrics.csv, report.html.

    Raises:
        InputError: it is no directory of a run, run.json is damaged, or nothing can be written there.
    """
    content = load_run(run)
    # Everything is made before anything is written: a report is not left half old and half new.
    made = {
        "curves.png": curves_png(content),
        "metrics.csv": _metrics(content).encode(),
        PAGE: render(content).encode(errors="replace"),  # JSON may hold half a character
    }
    for name, what in made.items():
        write_private(run / name, what)
    return [run / name for name in made]


def _metrics(run: dict[str, Any]) -> str:
    text = io.StringIO()
    write_rows(text, [METRICS, *([each[name] for name in METRICS] for each in run["history"])])
    return text.getvalue()
