"""Numbers in the files of results: finite, and rounded."""

from __future__ import annotations

import math
from typing import Any


def finite(text: str) -> float:
    """Return a number of a JSON file."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text} is not finite")
    return number


def rounded(value: Any) -> Any:
    """Round to six significant digits: enough for a curve, and the file stays small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value
