"""Render HTML pages from jinja templates, and format numbers for readers.

All values stay text: the templates escape them and replace control characters, and the content security policy of the
pages allows neither scripts nor external addresses.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from jinja2 import Environment

# Not strftime, which uses the locale: the same run must give the same page.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


@cache
def templates(package: str) -> Environment:
    """Return the jinja environment of a package's templates, with the base template `page.html.jinja`."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("cgd.reporting", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"decimals": decimals, "figure": figure, "share": share, "size": size, "duration": duration, "when": when}
    environment.filters |= filters
    environment.filters["count"] = "{:,}".format
    return environment


def _shown(value: object) -> object:
    """Return a value without control characters, which could reverse the order of the text beside it; see `visible`.

    A number is not separated from its percent sign at the end of a line.
    """
    # Not Markup, which a macro returns: it was shown before.
    return visible(value).replace(" %", "\u00a0%") if type(value) is str else value


def visible(text: str) -> str:
    """Replace control and format characters, such as a right-to-left override, by U+FFFD.

    Names of classes and categories may be texts of other participants.

    Examples:
        >>> visible("benign\u202e, 5\u202f%")
        'benign�, 5\u202f%'
    """
    return "".join("\ufffd" if category(each)[0] == "C" and each not in "\t\n" else each for each in text)


def compact(page: str) -> str:
    """Return a page without the empty lines that a template leaves."""
    return "\n".join(line for line in page.splitlines() if line.strip()) + "\n"


def decimals(value: float | None) -> str:
    """Format a score with three decimals."""
    return "–" if value is None or not math.isfinite(value) else f"{value:z.3f}".replace("-", "−")


def figure(value: float | None) -> str:
    """Format a number of any size with four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    magnitude = abs(value)
    if magnitude >= 1e9 or 0 < magnitude < 1e-4:
        return f"{value:.3e}".replace("-", "−")
    return f"{value:,.{0 if magnitude >= 1000 else 4}{'f' if magnitude >= 1000 else 'g'}}".replace("-", "−")


def share(part: float | None) -> str:
    """Format a fraction as a percentage."""
    if part is None or not math.isfinite(part):
        return "–"
    return f"{100 * part:.1f} %" if part == 0 or part >= 0.001 else "< 0.1 %"


def size(count: int) -> str:
    """Format a number of bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """Format a duration."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def when(text: str) -> str:
    """Format an ISO timestamp as date and time in UTC; return other texts unchanged."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            return text
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError):  # not a time; or one that is not within the years 1 to 9999 in UTC
        return text
    return f"{moment.day} {_MONTHS[moment.month - 1]} {moment.year}, {moment:%H:%M} UTC"
