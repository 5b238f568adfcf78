"""Puts the figures of some audits into the threat model: `make audit-results`.

results/audit has what `cgd audit` found on embedded data with some seeds: one draw of data, origins and noise each. The
same files give the same table, so a test can tell when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from cgd.audit import results
from cgd.audit.verdicts import SHORT, Audit, Verdict, rows, written

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "threat-model.md"
FOLDER = ROOT / "results" / "audit"
BEGIN, END = "<!-- figures: make audit-results -->", "<!-- end of figures -->"


def audits() -> list[Audit]:
    """Those that are kept."""
    return [results.load(folder) for folder in sorted(FOLDER.iterdir())]


def table(found: list[Audit]) -> str:
    """Every attack and setting, with what it came to against each scheme in all draws."""
    schemes = list(found[0]["schemes"])
    lines = [
        f"| Attack | Setting | {' | '.join(SHORT[scheme] for scheme in schemes)} |",
        f"|---|---|{'---|' * len(schemes)}",
    ]
    for attack in found[0]["attacks"]:
        same = [rows(next(each for each in audit["attacks"] if each["id"] == attack["id"])) for audit in found]
        for draws in zip(*same, strict=True):
            row = draws[0]
            what = ", ".join(filter(None, (row.variant, row.metric)))
            cells = [_cell([each.cells[scheme] for each in draws if scheme in each.cells]) for scheme in schemes]
            lines.append(f"| `{attack['id']}`: {what} | {row.setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, found: list[Audit]) -> str:
    """The page with the figures of these audits."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}"


def _cell(draws: list[Verdict]) -> str:
    """In how many draws it succeeds; the median of the values, the lowest and the highest; the median of chance."""
    if not draws:
        return "–"
    findings: list[dict[str, Any]] = [each.finding for each in draws]
    metric = findings[0]["metric"]
    values = [each["value"] for each in findings]
    low, middle, high = (written(each, metric) for each in (min(values), median(values), max(values)))
    spread = f", {low} to {high}" if low != high else ""
    chance = written(median(each["chance"] for each in findings), metric)
    return f"**{sum(each['succeeds'] for each in findings)}/{len(draws)}** {middle}{spread} ({chance})"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), audits()))
