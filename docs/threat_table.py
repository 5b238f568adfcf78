"""Write the figures of the stored audits into the threat model: `make audit-results`.

`results/audit` contains the results of `cgd audit` on embedded data with several seeds; each seed is one draw of data,
origins and noise. The table depends on these files only, so a test detects a page that is out of date.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from cgd.audit import results
from cgd.audit.verdicts import SHORT, Verdict, format_value, rows

if TYPE_CHECKING:
    from cgd.audit.results import Audit

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "threat-model.md"
FOLDER = ROOT / "results" / "audit"
BEGIN, END = "<!-- figures: make audit-results -->", "<!-- end of figures -->"


def audits() -> list[Audit]:
    """Return the stored audits, in the order of their folders."""
    return [results.load(folder) for folder in sorted(FOLDER.iterdir())]


def table(found: list[Audit]) -> str:
    """Return a row for every attack and setting, with its results against each scheme in all draws."""
    schemes = list(found[0].schemes)
    lines = [
        f"| Attack | Setting | {' | '.join(SHORT[scheme] for scheme in schemes)} |",
        f"|---|---|{'---|' * len(schemes)}",
    ]
    for attack in found[0].attacks:
        same = [rows(next(each for each in audit.attacks if each.id == attack.id)) for audit in found]
        for draws in zip(*same, strict=True):
            row = draws[0]
            what = ", ".join(filter(None, (row.variant, row.metric)))
            cells = [_cell([each.cells[scheme] for each in draws if scheme in each.cells]) for scheme in schemes]
            lines.append(f"| `{attack.id}`: {what} | {row.setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, found: list[Audit]) -> str:
    """Return the page with the table of these audits."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}"


def _cell(draws: list[Verdict]) -> str:
    """Return the number of successful draws, the median, lowest and highest value, and the median of chance."""
    if not draws:
        return "–"
    found = [each.result for each in draws]
    metric = found[0].metric
    values = [each.value for each in found]
    low, middle, high = (format_value(each, metric) for each in (min(values), median(values), max(values)))
    spread = f", {low} to {high}" if low != high else ""
    chance = format_value(median(each.chance for each in found), metric)
    allowed = f", at most {draws[0].allowed}" if draws[0].allowed else ""
    return f"**{sum(each.succeeds for each in found)}/{len(draws)}** {middle}{spread} ({chance}{allowed})"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), audits()))
