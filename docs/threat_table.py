"""Puts the figures of an audit into the threat model: `make audit-results`.

results/audit/audit.json is what `cgd audit` found on embedded data. The same file gives the same table, so a test can
tell when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path

from cgd.audit import results
from cgd.audit.verdicts import SHORT, Audit, Row, rows

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "threat-model.md"
AUDIT = ROOT / "results" / "audit"
BEGIN, END = "<!-- figures: make audit-results -->", "<!-- end of figures -->"


def table(audit: Audit) -> str:
    """Every attack and setting, with the verdict on each scheme."""
    schemes = list(audit["schemes"])
    lines = [
        f"| Attack | Setting | {' | '.join(SHORT[scheme] for scheme in schemes)} |",
        f"|---|---|{'---|' * len(schemes)}",
    ]
    for attack in audit["attacks"]:
        for row in rows(attack):
            what = ", ".join(filter(None, (row.variant, row.metric)))
            lines.append(f"| `{attack['id']}`: {what} | {row.setting} | {' | '.join(_cells(row, schemes))} |")
    return "\n".join(lines)


def with_table(page: str, audit: Audit) -> str:
    """The page with the figures of this audit."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(audit)}\n\n{END}{after}"


def _cells(row: Row, schemes: list[str]) -> list[str]:
    found = [row.cells.get(scheme) for scheme in schemes]
    return [f"{each.word} {each.figures}" if each else "–" for each in found]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), results.load(AUDIT)))
