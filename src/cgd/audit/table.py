"""An audit in a terminal: readable at 80 columns, in a pipe, and without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cgd.audit import verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from cgd.audit.verdicts import Audit, Tone, Verdict

CELL = 14
"""The width of a scheme's column: "4.6e-7 (0.295)"."""
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
        yield from _attack(attack, schemes)
    yield from _controls(audit)
    yield from _failures(audit)
    explained = [f"{verdicts.SHORT[each]}: {told}" for each, told in audit["schemes"].items() if each in verdicts.SHORT]
    yield Text()
    yield Text("; ".join(each for each in explained if len(set(each.split(": "))) > 1), style="dim")
    yield Text()
    unsure = bool(verdicts.loud(audit))
    yield Text(f"{verdicts.count(audit)}.", style=STYLES["loud"] if unsure else "bold")


def _attack(attack: dict[str, Any], schemes: list[str]) -> Iterator[RenderableType]:
    rows = verdicts.rows(attack)
    metrics = list(dict.fromkeys(row.metric for row in rows))
    yield Text()
    yield Text.assemble((attack["title"], "bold"), f" [{attack['id']}]", (f"  {', '.join(metrics)}", "dim"))
    table = _grid(schemes)
    for row in rows:
        label = row.label if len(metrics) == 1 else f"{row.label} ({row.metric})"
        table.add_row(Text(label), *(_cell(row.cells.get(each)) for each in schemes))
    spoilt = {each["scheme"]: "failed" for each in attack["failed"] if not each["control"]}
    spoilt |= {each["scheme"]: "not run" for each in attack["unfinished"] if not each["control"]}
    spoilt |= {each["scheme"]: "not possible" for each in attack["inapplicable"]}
    if spoilt:
        table.add_row(Text(""), *(Text(spoilt.get(each, ""), style=STYLES["none"]) for each in schemes))
    yield table


def _cell(found: Verdict | None) -> Text:
    if found is None:
        return Text("–", style=STYLES["none"])
    return Text.assemble((found.word, STYLES[found.tone]), "\n", found.figures)


def _controls(audit: Audit) -> Iterator[RenderableType]:
    found = verdicts.controls(audit)
    if not found:
        return
    yield Text()
    yield Text("Where they must fail (controls)", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for width in (None, None, 13, CELL, 13):
        table.add_column(width=width, overflow="fold")
    for attack, each in found:
        scheme = verdicts.SHORT.get(each.finding["scheme"], each.finding["scheme"])
        word = Text(each.word, style=STYLES[each.tone])
        table.add_row(Text(attack["id"]), Text(each.finding["setting"]), Text(scheme), Text(each.figures), word)
    yield table


def _failures(audit: Audit) -> Iterator[RenderableType]:
    """What failed and what was not possible, with the reasons."""
    told = [
        (attack, each["scheme"], f"{'control ' * each['control']}failed", each["why"])
        for attack, each in verdicts.failed(audit)
    ]
    told += [
        (attack, each["scheme"], "not possible", each["why"])
        for attack in audit["attacks"]
        for each in attack["inapplicable"]
    ]
    if not told:
        return
    yield Text()
    yield Text("What could not be measured", style="bold")
    for attack, scheme, how, why in told:
        yield Text(f"{attack['id']}, {verdicts.SHORT.get(scheme, scheme)}, {how}: {why}")


def _grid(schemes: list[str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(ratio=1, overflow="fold")
    for _ in schemes:
        table.add_column(width=CELL, overflow="fold")
    return table
