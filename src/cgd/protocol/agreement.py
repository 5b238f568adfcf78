"""Who differs from the others. Every member has what every member said, so all of them name the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgd.errors import DisagreementError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.protocol.messages import PeerId, SumSpec


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


def check_digests(me: PeerId, number: int, digests: Mapping[PeerId, bytes]) -> None:
    """All members must have the same sealed total, before anybody opens it.

    Raises:
        DisagreementError: somebody has not; it names the first that differs from most.
    """
    if odd := _odd_ones(digests):
        who = "this member has" if odd[0] == me else "has"
        more = f" (so have {', '.join(odd[1:])})" if odd[1:] else ""
        raise DisagreementError(
            odd[0],
            f"{who} another total of sum {number} than most{more}: a member added wrongly or told two stories; "
            "nothing was opened",
        )


def _odd_ones(said: Mapping[PeerId, Any]) -> list[PeerId]:
    """The members that say something else than most; with a draw, than the first."""
    words = list(said.values())
    usual = max(words, key=words.count)
    return [member for member, word in said.items() if word != usual]
