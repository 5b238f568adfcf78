"""IDs before an intersection: the differences that do not count, duplicates, and IDs that are easily guessed."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.tabular.cells import shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from cgd.federation.intersection_section import Intersection

MIN_POSSIBLE = 10**10
"""With fewer possible IDs, a salt is needed: a computer tries all of them in minutes."""
MIN_POSSIBLE_PER_ID = 100
"""With fewer possible IDs for each that a member may enter, it can test more than a hundredth of all people."""
_DIGITS = re.compile(r"[0-9]+")
_MAX_DIGITS = 40  # of an ID that is taken for a number
_CLASSES = tuple(
    map(
        frozenset,
        (
            string.digits,
            string.digits + "abcdef",
            string.digits + "ABCDEF",
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.ascii_letters,
            string.digits + string.ascii_uppercase,
            string.digits + string.ascii_letters,
        ),
    )
)
_DATE = re.compile(
    r"(18|19|20)\d\d[-./ ]?(0[1-9]|1[0-2])[-./ ]?(0[1-9]|[12]\d|3[01])"
    r"|(0[1-9]|[12]\d|3[01])[-./ ]?(0[1-9]|1[0-2])[-./ ]?(18|19|20)\d\d"
    r"|(0[1-9]|1[0-2])[-./ ]?(0[1-9]|[12]\d|3[01])[-./ ]?(18|19|20)\d\d"
)
_DAYS = 366 * 130  # of the dates of birth of people


def normalize_ids(ids: Sequence[str], settings: Intersection) -> tuple[str, ...]:
    """Return the IDs without the differences that do not count.

    Raises:
        InputError: two of them are then the same.

    Examples:
        >>> from cgd.federation.intersection_section import EACH_LEARNS_WHO, Intersection
        >>> normalize_ids(["A 07", "b-1"], Intersection(5, 9, EACH_LEARNS_WHO, normalize=("case", "spaces")))
        ('a07', 'b-1')
    """
    found = tuple(_normal(each, settings.normalize) for each in ids)
    if len(set(found)) < len(found):
        twice = next(text for text, count in Counter(found).items() if count > 1)
        one, other = [own for own, text in zip(ids, found, strict=True) if text == twice][:2]
        raise InputError(
            f"the ids {one!r} and {other!r} are the same, because normalize in [data.intersection] is "
            f"{list(settings.normalize)}; every record must have its own id: correct the file, or agree on another "
            "normalize with all participants"
        )
    return found


def check_ids(ids: Sequence[str], settings: Intersection, column: str) -> None:
    """Check that our IDs may be entered in an intersection.

    Args:
        ids: our IDs, normalized.
        settings: the settings of the intersection.
        column: the name of their column.

    Raises:
        InputError: there are too few or too many, or they are easily guessed.
    """
    if not settings.minimum <= len(ids) <= settings.maximum:
        raise InputError(
            f"we have {len(ids):,} records with an id, and [data.intersection] allows {settings.minimum:,} (minimum) "
            f"to {settings.maximum:,} (maximum) of each participant; bring more or fewer records, or agree on other "
            "limits"
        )
    possible, kind = possible_ids(ids), shorten(_example(ids))
    fact = f"the ids in {column!r}, such as {kind}, are few enough to guess: about {possible:,} are possible"
    if possible < MIN_POSSIBLE_PER_ID * settings.maximum and not settings.salt:
        raise InputError(
            f"{fact}, and a member that enters made-up ids may enter {settings.maximum:,} of them (maximum in "
            "[data.intersection]). Use ids with more characters, such as pseudonyms that a trust office makes for all "
            "with a key that it keeps; or lower maximum. A secret of the row (salt = true) helps against others, and "
            "not against its members; with it, this is your decision"
        )
    if possible < MIN_POSSIBLE and not settings.salt:
        raise InputError(
            f"{fact}. If a key of this run were ever known, they could all be tried. Agree on a secret file of the row "
            "(salt = true in [data.intersection], and --salt FILE), or use longer ids"
        )


def possible_ids(ids: Iterable[str]) -> int:
    """Estimate how many IDs of this kind are possible; an upper limit, because real ones follow rules.

    Examples:
        >>> possible_ids(["1974-03-01", "1990-12-24"]), possible_ids(["8001", "8952", "3011"])
        (47580, 5942)
        >>> possible_ids([f"P-{number}" for number in range(400, 900)])
        500
        >>> import hashlib
        >>> possible_ids(hashlib.sha256(bytes([number])).hexdigest() for number in range(200)) == 16**64
        True
    """
    texts = list(ids)
    by_length: dict[int, list[str]] = {}
    for each in texts:
        by_length.setdefault(len(each), []).append(each)
    possible = sum(map(_possible_of_length, by_length.values()))
    numbers = _numbers(texts)
    return possible if numbers is None else min(possible, max(numbers) - min(numbers) + 1)


def _possible_of_length(texts: Collection[str]) -> int:
    """Return the number of texts with these characters at each place, of texts of one length."""
    if all(map(_DATE.fullmatch, texts)):
        return _DAYS
    return math.prod(_size(frozenset(column)) for column in zip(*texts, strict=True))


def _size(found: frozenset[str]) -> int:
    """Return the size of the smallest usual set of characters that contains these; 1 for the same character always."""
    if len(found) == 1:
        return 1
    return min((len(each) for each in _CLASSES if found <= each), default=max(len(found), 64))


def _numbers(texts: Collection[str]) -> list[int] | None:
    """Return the numbers of texts that are one number each, with the same text around it."""
    parts = [(text, found) for text in texts if len(found := _DIGITS.findall(text)) == 1 and len(text) <= _MAX_DIGITS]
    if len(parts) < len(texts) or len({text.replace(found[0], "0", 1) for text, found in parts}) > 1:
        return None
    return [int(found[0]) for _, found in parts]


def _example(ids: Sequence[str]) -> str:
    """Return the shape of the first ID: its digits as 9, its letters as A."""
    return re.sub(r"[^\W\d_]", "A", re.sub(r"\d", "9", ids[0]))


def _normal(text: str, differences: Collection[str]) -> str:
    if "case" in differences:
        text = text.casefold()
    if "spaces" in differences:
        text = "".join(text.split())
    if "zeros" in differences:
        text = text.lstrip("0") or "0"
    return text
