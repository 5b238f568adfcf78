"""What the commands of operators read and say about a quorum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.federation.absence_section import Absence
    from cgd.federation.config import Federation

EXAMPLE_AVAILABILITY = 0.99


def read_absence(quorum: int | None, patience: float | None, accept: str) -> Absence | None:
    """Return the settings that options of `cgd federation new` state; None without a quorum.

    Raises:
        InputError: an option is missing, or not valid.
    """
    from cgd.federation.absence_section import Absence

    if quorum is None:
        if patience is not None or accept:
            option = "--patience" if patience is not None else "--accept-absence"
            raise InputError(f"there is {option} without --quorum; add --quorum NUMBER, or omit it")
        return None
    if patience is None:
        raise InputError(
            f"--quorum is {quorum}, without --patience; add --patience SECONDS, the silence after which the others go "
            "on without a member"
        )
    return Absence(quorum, patience, accept)


def describe_absence(federation: Federation) -> str:
    """Return what the section [absence] means, and how often the members are present if each is mostly."""
    from cgd.federation.absence_section import availability

    assert federation.absence is not None  # noqa: S101 - for the type checker
    members, quorum = len(federation.names), federation.absence.quorum
    each = EXAMPLE_AVAILABILITY
    some, everyone = (100 * availability(members, number, each) for number in (quorum, members))
    return (
        f"Absence: {federation.absence.describe(members)}. If each is here {100 * each:g} % of the time, {quorum} of "
        f"{members} are {some:.2f} % of it, and all {everyone:.2f} %"
    )


def describe_quorum(federation: Federation, present: int) -> str:
    """Return what the section [absence] means, and whether these many members are a quorum."""
    assert federation.absence is not None  # noqa: S101 - for the type checker
    members, quorum = len(federation.names), federation.absence.quorum
    reached = "a quorum" if present >= quorum else f"{quorum - present} more must answer before any sum"
    return f"Absence: {federation.absence.describe(members)}\n{present} of {members} are here: {reached}"
