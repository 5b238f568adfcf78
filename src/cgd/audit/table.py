"""An audit as a table in a terminal: readable at 80 columns, in a pipe, and without colours."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cgd.audit import verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from cgd.audit.results import AttackFindings, Audit
    from cgd.audit.verdicts import Row, Tone, Verdict

CELL_WIDTH, NARROW_CELL_WIDTH = 14, 8
"""The width of a scheme's column, for "4.6e-7 (0.295)"; and with many columns, for these below each other."""
MAX_WIDE_CELLS = 4
"""The number of columns that fit 80 characters with their full width."""
MIN_SETTING_WIDTH = 12
"""The width of the settings in a narrow terminal."""
STYLES: dict[Tone, str] = {"bad": "bold yellow", "good": "green", "wrong": "bold white on red", "none": "dim"}


def render(audit: Audit) -> Group:
    """Return the whole table: attacks and schemes, controls, errors, and the summary line."""
    return Group(*_blocks(audit))


def _blocks(audit: Audit) -> Iterator[RenderableType]:
    schemes = list(audit.schemes)
    yield Text(f"Privacy audit: {audit.source.name}", style="bold")
    if audit.source.kind == "table":
        yield Text(f"{audit.source.about}\n")
    yield Text("Each cell: verdict, measured value, and in brackets the value of guessing.")
    if any(each.allowed is not None for attack in audit.attacks for each in attack.findings):
        yield Text("≤ is the largest value that ε allows.")
    yield Text()
    heading = _grid(schemes)
    heading.add_row("", *(Text(verdicts.SHORT.get(each, each), style="bold") for each in schemes))
    yield heading
    for attack in audit.attacks:
        yield from _attack(attack, schemes, verdicts.unmeasured(audit, attack))
    yield from _controls(audit)
    yield from _not_measured(audit)
    short = {each: verdicts.SHORT.get(each, each) for each in schemes}
    explained = [f"{short[each]}: {text}" for each, text in audit.schemes.items() if text != short[each]]
    if explained:
        yield Text()
        yield Text("; ".join(explained), style="dim")
    yield Text()
    style = STYLES["wrong"] if verdicts.failed_controls(audit) else "bold"
    yield Text(f"{verdicts.summary_line(audit)}.", style=style)


def _attack(attack: AttackFindings, schemes: list[str], unmeasured: dict[str, str]) -> Iterator[RenderableType]:
    yield Text()
    yield Text.assemble((attack.title, "bold"), f" [{attack.id}]")
    yield from _rows(verdicts.rows(attack), schemes)
    if unmeasured:
        table = _grid(schemes)
        table.add_row(Text(""), *(Text(unmeasured.get(each, ""), style=STYLES["none"]) for each in schemes))
        yield table


def _rows(rows: list[Row], schemes: list[str]) -> Iterator[RenderableType]:
    """Return the rows, with a line above those with the same variant and metric."""
    for (variant, metric), own in groupby(rows, key=lambda row: (row.variant, row.metric)):
        yield Text(": ".join(filter(None, (variant, metric))), style="dim")
        table = _grid(schemes)
        for row in own:
            narrow = len(schemes) > MAX_WIDE_CELLS
            cells = (_cell(row.cells.get(each), narrow=narrow) for each in schemes)
            table.add_row(Text(row.setting or "default"), *cells)
        yield table


def _cell(verdict: Verdict | None, *, narrow: bool) -> Text:
    if verdict is None:
        return Text("–", style=STYLES["none"])
    figures = f"{verdict.value}\n({verdict.chance})" if narrow else verdict.figures
    if verdict.allowed:
        figures += f"\n≤ {verdict.allowed}"
    if verdict.word == verdicts.FAILS:
        return Text(figures)
    return Text.assemble((verdict.word, STYLES[verdict.tone]), "\n", figures)


def _controls(audit: Audit) -> Iterator[RenderableType]:
    """Return the controls; those that must fail and do have no verdict."""
    if not verdicts.controls(audit):
        return
    yield Text()
    yield Text("Controls: settings with a known outcome", style="bold")
    yield Text("The attacks must fail here, except where a protection was removed (succeeds).")
    for attack in audit.attacks:
        rows = verdicts.rows(attack, control=True)
        if rows:
            yield Text()
            yield Text(attack.title)
            yield from _rows(rows, list(audit.schemes))


def _not_measured(audit: Audit) -> Iterator[RenderableType]:
    """Return the errors, and the reasons why attacks, or some of their methods, do not apply, each once."""
    lines = [f"failed: {each.label}: {each.why}" for each in audit.failed]
    limits = verdicts.limitations(audit)
    lines += [f"{verdicts.NOT_MEASURED}: {each.attack.title}: {each.why}" for each in limits if not each.partly]
    lines += [f"not all methods: {each.attack.title}: {each.why}" for each in limits if each.partly]
    if not lines:
        return
    yield Text()
    yield Text("Not measured", style="bold")
    yield from map(Text, lines)


def _grid(schemes: list[str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(ratio=1, min_width=MIN_SETTING_WIDTH, overflow="fold")
    for _ in schemes:
        table.add_column(width=CELL_WIDTH if len(schemes) <= MAX_WIDE_CELLS else NARROW_CELL_WIDTH, overflow="fold")
    return table
