"""An audit in a terminal: readable at 80 columns, in a pipe, and without colours."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cgd.audit import verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from cgd.audit.verdicts import Audit, Row, Tone, Verdict

CELL = 14
"""The width of a scheme's column: "4.6e-7 (0.295)"."""
NAME = 12
"""The least width of the settings, also where a terminal is narrow."""
STYLES: dict[Tone, str] = {"bad": "bold yellow", "good": "green", "loud": "bold white on red", "none": "dim"}


def show(audit: Audit) -> Group:
    """Everything: attacks against schemes, controls, what went wrong, the count."""
    return Group(*_parts(audit))


def _parts(audit: Audit) -> Iterator[RenderableType]:
    schemes = list(audit["schemes"])
    yield Text(f"What leaks: {audit['source']['name']}", style="bold")
    yield Text("Each cell: the verdict, and the value measured (what guessing alone would give).")
    yield Text()
    heading = _grid(schemes)
    heading.add_row("", *(Text(verdicts.SHORT.get(each, each), style="bold") for each in schemes))
    yield heading
    for attack in audit["attacks"]:
        yield from _attack(attack, schemes, verdicts.spoilt(audit, attack))
    yield from _controls(audit)
    yield from _failures(audit)
    short = {each: verdicts.SHORT.get(each, each) for each in schemes}
    explained = [f"{short[each]}: {told}" for each, told in audit["schemes"].items() if told != short[each]]
    if explained:
        yield Text()
        yield Text("; ".join(explained), style="dim")
    yield Text()
    unsure = bool(verdicts.loud(audit))
    yield Text(f"{verdicts.count(audit)}.", style=STYLES["loud"] if unsure else "bold")


def _attack(attack: dict[str, Any], schemes: list[str], spoilt: dict[str, str]) -> Iterator[RenderableType]:
    rows = verdicts.rows(attack)
    yield Text()
    yield Text.assemble((attack["title"], "bold"), f" [{attack['id']}]")
    yield from _rows(rows, schemes)
    if spoilt:
        table = _grid(schemes)
        table.add_row(Text(""), *(Text(spoilt.get(each, ""), style=STYLES["none"]) for each in schemes))
        yield table


def _rows(rows: list[Row], schemes: list[str]) -> Iterator[RenderableType]:
    """A line above those that have the variant and the metric in common."""
    for (variant, metric), own in groupby(rows, key=lambda row: (row.variant, row.metric)):
        yield Text(": ".join(filter(None, (variant, metric))), style="dim")
        table = _grid(schemes)
        for row in own:
            table.add_row(Text(row.setting or "as it is"), *(_cell(row.cells.get(each)) for each in schemes))
        yield table


def _cell(found: Verdict | None) -> Text:
    if found is None:
        return Text("–", style=STYLES["none"])
    if found.word == verdicts.FAILS:
        return Text(found.figures)
    return Text.assemble((found.word, STYLES[found.tone]), "\n", found.figures)


def _controls(audit: Audit) -> Iterator[RenderableType]:
    """Compact: what fails as it must need not say so."""
    if not verdicts.controls(audit):
        return
    yield Text()
    yield Text("Where the attacks must fail (controls)", style="bold")
    yield Text("They do, unless a word says otherwise. Where a protection was taken away, they must succeed.")
    for attack in audit["attacks"]:
        rows = verdicts.rows(attack, control=True)
        if rows:
            yield Text()
            yield Text(attack["title"])
            yield from _rows(rows, list(audit["schemes"]))


def _failures(audit: Audit) -> Iterator[RenderableType]:
    """What failed and what cannot be tried, with the reasons; each once."""
    told = [f"failed: {each['label']}: {each['why']}" for each in audit["failed"]]
    for attack in audit["attacks"]:
        reasons = dict.fromkeys(each["why"] for each in attack["inapplicable"])
        told += [f"{verdicts.NOT_MEASURED}: {attack['title']}: {why}" for why in reasons]
    if not told:
        return
    yield Text()
    yield Text("What could not be measured", style="bold")
    yield from map(Text, told)


def _grid(schemes: list[str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(ratio=1, min_width=NAME, overflow="fold")
    for _ in schemes:
        table.add_column(width=CELL, overflow="fold")
    return table
