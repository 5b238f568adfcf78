"""Checks of single options: of which type a value is, before anything compares or computes with it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch

from cgd.errors import InputError


def check_whole(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number, also one of numpy, as an `int`.

    Raises:
        InputError: it is another value, such as True or 2.0, or less than `least`.

    Examples:
        >>> check_whole("epochs", 3)
        3
        >>> check_whole("epochs", 3.0)
        Traceback (most recent call last):
        ...
        cgd.errors.InputError: epochs is 3.0; it must be a whole number, at least 0
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf) -> float:
    """Return a finite number, which may be in a tensor, as a `float`.

    Raises:
        InputError: it is another value, such as True or NaN, or less than `least`.
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    found = math.nan if isinstance(number, bool) or not isinstance(number, Real) else _as_float(number)
    if not (math.isfinite(found) and found >= least):
        bound = f", at least {least:g}" if least > -math.inf else ""
        raise InputError(f"{name} is {value!r}; it must be a finite number{bound}")
    return found


def _as_float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number too large for a float
        return math.inf


def check_flag(name: str, value: Any) -> bool:
    """Return True or False, also if it is written as 1 or 0.

    Raises:
        InputError: it is another value, such as the text "false", which Python takes for true.
    """
    if not isinstance(value, (bool, np.bool_, int, float)) or value not in (0, 1):
        raise InputError(f"{name} is {value!r}; it must be True or False")
    return bool(value)
