"""The section `[absence]` of the federation file: a quorum, which goes on without members that are silent.

    [absence]
    quorum = 4         # the least number of members of a sum: more than half of all, and at least 3
    patience = 60.0    # the seconds of silence after which the others go on without a member
    accept = "absence reveals gradients"   # not needed with [privacy], whose noise covers it

Without this section every sum waits for all members.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cgd.errors import NUMBER_BITS, InputError
from cgd.federation.toml_validation import check_keys, typed
from cgd.secagg.federation_spec import tolerated_members
from cgd.secagg.reduction import MIN_MEMBERS
from cgd.transport.link import SILENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Opening

ABSENCE_REVEALS_GRADIENTS = "absence reveals gradients"
"""The sentence that must be given to use a quorum without differential privacy."""
MAX_EPOCH = (1 << 63 - NUMBER_BITS) - 1
"""With a quorum, the number of a view is stored with the epoch, in 63 bits."""
MIN_PATIENCE = SILENT_SECONDS + 1.0
"""The least patience: a link reports silence after `SILENT_SECONDS`."""


@dataclass(frozen=True)
class Absence:
    """The settings of a quorum, equal for all members. Invalid values raise an `InputError`.

    Attributes:
        quorum: the least number of members that go on together.
        patience: the seconds of silence after which the others go on without a member.
        accept: `ABSENCE_REVEALS_GRADIENTS`; may be empty with differential privacy.
    """

    quorum: int
    patience: float
    accept: str = ""

    def __post_init__(self) -> None:
        for name, kind in {"quorum": int, "patience": float, "accept": str}.items():
            object.__setattr__(self, name, typed(name, getattr(self, name), kind))
        if self.quorum < MIN_MEMBERS:
            raise InputError(
                f"quorum is {self.quorum}; a sum over fewer than {MIN_MEMBERS} members hides nothing, raise it"
            )
        if not MIN_PATIENCE <= self.patience < math.inf:  # also NaN
            raise InputError(
                f"patience is {self.patience}; it is a finite number of seconds, at least {MIN_PATIENCE:g}, because "
                f"silence is noticed after {SILENT_SECONDS:g}. To wait without limit, remove [absence]"
            )
        if self.accept not in ("", ABSENCE_REVEALS_GRADIENTS):
            raise InputError(f"accept is {self.accept!r}; it must be exactly {ABSENCE_REVEALS_GRADIENTS!r}")

    def check_members(self, members: int, minimum: int = MIN_MEMBERS) -> None:
        """Check that the quorum is more than half of the members, at least `minimum` in [training], and not all.

        Raises:
            InputError: it is not.
        """
        if self.quorum < minimum:
            raise InputError(
                f"quorum is {self.quorum}, and minimum in [training] is {minimum}: no sum has fewer members; raise "
                "quorum, or lower minimum"
            )
        least, most = max(minimum, members // 2 + 1), members - 1
        if least > most:
            raise InputError(
                f"quorum is {self.quorum}, and there are {members} participants; without one of them too few are left "
                f"for a sum. Remove [absence], or add participants"
            )
        if self.quorum > most:
            raise InputError(
                f"quorum is {self.quorum}, and there are {members} participants: no sum could go on without one of "
                f"them; choose {_range(least, most)}, or remove [absence]"
            )
        if self.quorum < least:
            raise InputError(
                f"quorum is {self.quorum}, and there are {members} participants: two parts of the network could go on "
                f"side by side, with two histories, unless it is more than half; choose {_range(least, most)}"
            )

    def check_use(self, *, epoch: int, private: bool, grid: bool, opening: Opening, delay: int) -> None:
        """Check that a quorum is possible, and that what it reveals is accepted.

        Args:
            epoch: the number of the file's version.
            private: there is differential privacy.
            grid: the members have cells in a grid.
            opening: how sums are opened.
            delay: the number of steps after which the models move by a sum.

        Raises:
            InputError: it is not.
        """
        if grid:
            raise InputError(
                f"quorum is {self.quorum}, and the participants form a grid: the others of a row need the columns of "
                "each of its members, and all sums of a step need the same members; remove [absence], or the cells"
            )
        if opening != "mesh":
            adder = "the hub, which waits for the values of all" if opening == "hub" else "one of the members"
            raise InputError(
                f"quorum is {self.quorum}, and opening in [training] is {opening!r}: sums are added by {adder}; choose "
                "opening = 'mesh', with which a [hub] still relays, or remove [absence]"
            )
        if delay:
            raise InputError(
                f"quorum is {self.quorum}, and delay in [training] is {delay}: several steps have the gradients of one "
                "model, and two sums of these, with and without an absent member, would differ by its gradient "
                "exactly; remove delay, or [absence]"
            )
        if epoch > MAX_EPOCH:
            raise InputError(f"epoch is {epoch}; with a quorum, it is at most {MAX_EPOCH}: write a smaller one")
        if not private and not self.accept:
            raise InputError(
                "from the sums before and after a member's absence its gradient is estimated, and whoever can cut its "
                "connections chooses when. Add a [privacy], whose noise covers it; or, if all participants may learn "
                f"such estimates, write accept = {ABSENCE_REVEALS_GRADIENTS!r}"
            )

    def describe(self, members: int) -> str:
        r"""Return what the settings mean, in one sentence.

        Examples:
            >>> print(*Absence(4, 60).describe(5).split("; "), sep="\n")
            after 60 seconds of silence of a member, at least 4 of 5 go on without it (covered by [privacy])
            the promises hold against up to 2 members that collude or break the protocol
        """
        how, tolerated = self.accept or "covered by [privacy]", tolerated_members(members, self.quorum)
        against = f"against up to {tolerated} member{'s' * (tolerated != 1)} that collude or break the protocol"
        if not tolerated:
            against = "only if no member breaks the protocol"
        return (
            f"after {self.patience:g} seconds of silence of a member, at least {self.quorum} of {members} go on "
            f"without it ({how}); the promises hold {against}"
        )

    def written(self) -> dict[str, Any]:
        """Return the settings that a federation file states."""
        return {name: value for name, value in asdict(self).items() if value != ""}


def availability(members: int, quorum: int, each: float) -> float:
    """Return the part of the time in which at least a quorum is present, if each is for a part of it, independently.

    Examples:
        >>> for quorum in (5, 4, 3):
        ...     print(quorum, f"{100 * availability(5, quorum, 0.99):.3f} %")
        5 95.099 %
        4 99.902 %
        3 99.999 %
    """
    return sum(
        math.comb(members, present) * each**present * (1 - each) ** (members - present)
        for present in range(quorum, members + 1)
    )


def parse_absence(table: Any) -> Absence:
    """Parse an `[absence]` section.

    Raises:
        InputError: it is not valid.
    """
    check_keys(table, ("quorum", "patience"), ("accept",))
    return Absence(**table)


def check_place(content: Mapping[str, Any]) -> None:
    """Check that the content of a file has no quorum in another section.

    Raises:
        InputError: it has.
    """
    training = content.get("training")
    if "quorum" in content or (isinstance(training, dict) and "quorum" in training):
        where = "[training]" if isinstance(training, dict) and "quorum" in training else "the head of the file"
        raise InputError(
            f"there is a quorum in {where}; write it in a section [absence], with quorum, patience and accept"
        )


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"
