"""Recognise numbers that are written with more than digits and a decimal sign, as exports of spreadsheets have them.

These are thousands separators, percent signs, units, and limits of a measurement such as "<0.5". Nothing is converted:
whether 12 % is 12 or 0.12, and what stands for "<0.5", is for all participants to decide. Each has its own remedy.
"""

from __future__ import annotations

import re

import pyarrow

from cgd.tabular.cells import shorten

# What a text is, by `writing`.
NUMBER, THOUSANDS, COMMA, POINT = "number", "thousands", "comma", "point"
PERCENT, UNIT, LIMIT, MINUS, OTHER_TEXT = "percent", "unit", "limit", "minus", ""

_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?")
# Three digits between separators, and no 0 at the beginning, as phone numbers have.
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:([.,'’ \u00a0\u202f])[0-9]{3})(?:\1[0-9]{3})*(?:(?!\1)[.,][0-9]*)?")
_ANY = r"[+-]?(?:[0-9]+(?:[.,][0-9]*)?|[.,][0-9]+)"
_PERCENT = re.compile(rf"{_ANY}\s*[%‰]")
_LIMIT = re.compile(rf"(?:[<>]=?|[≤≥])\s*{_ANY}(?:\s*[^\d\s].*)?")
# A single letter directly behind a number is a code, such as 2b, and no unit.
_LETTER, _MORE = r"[^\W\d_]", r"[\w°/.^²³*-]{0,15}"
_UNIT = re.compile(
    rf"{_ANY}(\s+{_LETTER}{_MORE}(?: {_LETTER}+)?|{_LETTER}[^\W\d_/]{_MORE}|{_LETTER}/{_MORE}|\s*/{_LETTER}{_MORE}"
    rf"|\s*°\s?[CFK]?|\s+(?:[x×*] ?)?10\^?[0-9]*/{_LETTER}{_MORE})"
)
_MINUS = re.compile(r"[−–—](?=[0-9.,])")
_TOTAL = re.compile(
    r"(?:grand |sub-?)?(?:totals?|sum|summe|gesamt(?:summe)?|insgesamt|somme|suma|totaal|totale|mean|average|mittelwert"
    r"|durchschnitt|moyenne|promedio|media)\s*[:.]?",
    re.IGNORECASE,
)


def is_number(text: str | None) -> bool:
    """Return whether Arrow converts this text to a number; true for None."""
    try:
        pyarrow.scalar(text, pyarrow.string()).cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return False
    return True


def has_decimal_comma(text: str) -> bool:
    """Return whether a text is a number with a decimal comma, or maybe with commas between thousands."""
    return _DECIMAL_COMMA.fullmatch(text) is not None


def is_total(text: str) -> bool:
    """Return whether a text is a word with which the last row of a sheet names totals or means."""
    return _TOTAL.fullmatch(text) is not None


def unit_of(text: str) -> str:
    """Return what follows a number, such as "mmol/l"; empty if nothing or something else does."""
    found = _UNIT.fullmatch(text)
    return found[1].strip() if found else ""


def writing(text: str, decimal: str = ".") -> str:
    """Return how a number is written, given the decimal sign of the file.

    Examples:
        >>> [writing(text) for text in ("1.5", "1'045", "1,5", "12 %", "5.2 mmol/l", "<0.5", "old")]
        ['number', 'thousands', 'comma', 'percent', 'unit', 'limit', '']
        >>> [writing(text, ",") for text in ("1,5", "1.045", "1.045,5", "12.5")]
        ['number', 'thousands', 'thousands', 'point']
    """
    if decimal == "," and is_number(text) and "." in text:
        return THOUSANDS if _THOUSANDS.fullmatch(text) else POINT
    if is_number(text.replace(",", ".") if decimal == "," else text):
        return NUMBER
    if has_decimal_comma(text):
        return COMMA
    kinds = {THOUSANDS: _THOUSANDS, PERCENT: _PERCENT, LIMIT: _LIMIT, UNIT: _UNIT}
    found = next((kind for kind, pattern in kinds.items() if pattern.fullmatch(text)), OTHER_TEXT)
    return MINUS if not found and _MINUS.match(text) and writing(text[1:], decimal) == NUMBER else found


def not_a_number(text: str, decimal: str = ".") -> str:
    """Return the fact and the remedy about a text where a number is needed.

    Examples:
        >>> not_a_number("63,5")
        "'63,5' is not a number; write decimals with a point, as in 1.5, or add --decimal ','"
        >>> not_a_number("1.063", decimal=",")
        "'1.063' is not a number, because decimals have a comma here; write it without thousands separators"
    """
    kind = writing(text, decimal)
    fact = f"{shorten(text)} is {'a limit and ' if kind == LIMIT else ''}not a number"
    if kind in (COMMA, THOUSANDS, POINT):
        return f"{fact}{_sign_remedy(text, kind, decimal)}"
    remedies = {
        PERCENT: "write it without the percent sign, and agree with all participants whether 12 % is 12 or 0.12",
        UNIT: "correct it: write the number alone, in the unit on which all participants agree",
        LIMIT: "write a number instead, by a rule on which all participants agree, such as "
        f"{'the limit itself' if text.startswith(('>', '≥')) else 'half of the limit'}, or leave the field empty",
        MINUS: "write its minus sign as '-'",
    }
    total = "remove the row if it is a total and no record; otherwise " if is_total(text) else ""
    other = f"{total}correct it, list it as missing in [data], or make the column a category"
    return f"{fact}; {remedies.get(kind, other)}"


def _sign_remedy(text: str, kind: str, decimal: str) -> str:
    """Return the end of the sentence about a number with another decimal sign or with thousands separators."""
    if decimal == "," and is_number(text):
        reason = ", because decimals have a comma here; "
        if kind == THOUSANDS:
            return f"{reason}write it without thousands separators"
        return f"{reason}write all decimals of the file with a comma, or all with a point and without --decimal"
    if _THOUSANDS.fullmatch(text):
        example = "a comma, as in 1234,5" if decimal == "," else "a point, as in 1234.5"
        # With the option, it would be read as a decimal, without a further word.
        option = f". Only if it means {text.replace(',', '.')}, add --decimal ','" if kind == COMMA else ""
        return f"; write it without thousands separators, and decimals with {example}{option}"
    return "; write decimals with a point, as in 1.5, or add --decimal ','"
