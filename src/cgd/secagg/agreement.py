"""Who differs from the others. Every member has what every member said, so all of them name the same one.

To differ from most is a fact and no accusation: most may be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgd.errors import DisagreementError, SettingsError
from cgd.secagg.certificates import Terms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import PeerId, SumSpec


def check_settings(me: PeerId, specs: Mapping[PeerId, SumSpec]) -> None:
    """All members must sum under the same settings, before anybody shares.

    Raises:
        SettingsError: somebody does not; it names the first that differs from most.
    """
    if odd := _odd_ones(specs):
        who = "this member sums" if odd[0] == me else "sums"
        more = f" (so do {', '.join(odd[1:])})" if odd[1:] else ""
        usual = next(spec for member, spec in specs.items() if member not in odd)
        raise SettingsError(
            odd[0],
            f"{who} under other settings than most: {'; '.join(usual.differences(specs[odd[0]]))}{more}; "
            "every member needs the same model, training settings, bound, ring_bits, sharing and opening",
        )


def check_terms(me: PeerId, terms: Mapping[PeerId, bytes]) -> None:
    """All members must be at the same place of the same history, before anybody shares.

    Raises:
        SettingsError: somebody is not; it names the first that differs from most.
    """
    if odd := _odd_ones(terms):
        who = "this member is" if odd[0] == me else "is"
        usual = next(said for member, said in terms.items() if member not in odd)
        differences = _differences(usual, terms[odd[0]])
        raise SettingsError(
            odd[0],
            f"{who} not where most are in the common history: {'; '.join(differences)}; start it again, with an empty "
            "state folder if this comes back",
        )


def _differences(usual: bytes, odd: bytes) -> list[str]:
    try:
        return Terms.from_bytes(usual).differences(Terms.from_bytes(odd))
    except (ValueError, TypeError):
        return ["its terms cannot be read"]


def check_digests(me: PeerId, number: int, digests: Mapping[PeerId, bytes]) -> None:
    """All members must have the same sealed total, before anybody opens it.

    Who has another one need not have made it wrong, so nobody is named as dishonest.

    Raises:
        DisagreementError: somebody has not.
    """
    others = sorted(member for member, digest in digests.items() if digest != digests[me])
    if others:
        raise DisagreementError(
            f"{', '.join(others)} and we have different totals of sum {number}: a member added wrongly or told two "
            "stories; nothing was opened"
        )


def _odd_ones(said: Mapping[PeerId, Any]) -> list[PeerId]:
    """The members that say something else than most; with a draw, than the first."""
    words = list(said.values())
    usual = max(words, key=words.count)
    return [member for member, word in said.items() if word != usual]
