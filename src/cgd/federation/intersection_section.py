"""The section `[data.intersection]` of the federation file: the members of a row hold records of other people, too.

    [data.intersection]
    minimum = 100                   # with fewer people in common, nobody learns who they are
    maximum = 50000                 # nobody may enter more IDs: each can be a guess
    salt = true                     # everybody names the same secret file, with --salt
    normalize = ["case", "zeros"]   # differences of IDs that do not count
    accept = "each learns who is in all files of its row"

Without it, the members of a row must hold the same records.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from cgd.errors import InputError
from cgd.federation.toml_validation import at, check_keys, typed

EACH_LEARNS_WHO = "each learns who is in all files of its row"
"""The sentence that must be given to find out which records the members of a row have in common."""
MIN_MINIMUM = 5
MAX_MAXIMUM = 20_000_000
Difference = Literal["case", "spaces", "zeros"]


@dataclass(frozen=True)
class Intersection:
    """The settings of an intersection, equal for all members. Invalid values raise an `InputError`.

    Attributes:
        minimum: the least number of people in common.
        maximum: the most IDs that a member may enter.
        accept: `EACH_LEARNS_WHO`.
        salt: whether the members of a row hash their IDs with a secret of their own.
        normalize: the differences of IDs that do not count: "case", "spaces" (inside; those around never count) and
            "zeros" (leading ones).
    """

    minimum: int
    maximum: int
    accept: str
    salt: bool = False
    normalize: tuple[Difference, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in {"minimum": int, "maximum": int, "accept": str, "salt": bool}.items():
            typed(name, getattr(self, name), kind)
        if self.accept != EACH_LEARNS_WHO:
            raise InputError(
                f"accept is {self.accept!r}. Every member of a row learns which of its records all members of the row "
                "have, and how many each has; and a member that breaks the protocol can enter IDs of other people, up "
                "to `maximum`, and so find out whether all others have them. If all participants may learn that, write "
                f"accept = {EACH_LEARNS_WHO!r}"
            )
        if not MIN_MINIMUM <= self.minimum <= self.maximum <= MAX_MAXIMUM:
            raise InputError(
                f"minimum is {self.minimum} and maximum is {self.maximum}; the least number of people in common is at "
                f"least {MIN_MINIMUM}, and the most IDs of a member at least that, and at most {MAX_MAXIMUM:,}"
            )
        known = get_args(Difference)
        if not isinstance(self.normalize, (list, tuple)) or not all(each in known for each in self.normalize):
            raise InputError(f"normalize is {self.normalize!r}; it is a list of some of {', '.join(map(repr, known))}")
        object.__setattr__(self, "normalize", tuple(sorted(set(self.normalize))))

    def describe(self) -> str:
        """Return what the settings mean, in one sentence.

        Examples:
            >>> print(Intersection(100, 5000, EACH_LEARNS_WHO).describe())
            the members of a row find out which records all of them have (accepted: each learns who is in all files of \
its row); with fewer than 100 they stop, and nobody enters more than 5,000 IDs
        """
        return (
            f"the members of a row find out which records all of them have (accepted: {self.accept}); with fewer than "
            f"{self.minimum:,} they stop, and nobody enters more than {self.maximum:,} IDs"
        )

    def as_stored(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "normalize": list(self.normalize)}


def parse_intersection(table: Any) -> Intersection | None:
    """Parse a `[data.intersection]` section; None if there is none.

    Raises:
        InputError: it is not valid.
    """
    if table is None or isinstance(table, Intersection):
        return table
    with at("intersection: "):
        check_keys(table, ("minimum", "maximum", "accept"), [each.name for each in fields(Intersection)])
        return Intersection(**table)
