"""The reports of all members in one view: taken in, checked and compared."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import RemoteProtocolError
from cgd.secagg.key_agreement import equal
from cgd.secagg.positions import PositionReport, digest_of_reports
from cgd.secagg.statements import slot_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.key_agreement import PairKeys
    from cgd.secagg.messages import JournalPosition, PeerId
    from cgd.secagg.positions import GroupRow
    from cgd.secagg.statements import StatementLog


class PositionReports:
    """What the members of a view have reported.

    Args:
        me: this member's name.
        charter: what all hold to.
        pairings: what we have in common with each peer.
        dossier: what the members have signed.

    Attributes:
        signed: everybody's first report, and its signature.
        latest: everybody's latest report.
        contributions: by group and member, the parts of the key that the members have in common.
        longest: by group, the most finished sums in a first report.
        gathered: by member, the digest of the first reports that it has.
    """

    def __init__(
        self,
        me: PeerId,
        federation_spec: FederationSpec,
        pair_keys: Mapping[PeerId, PairKeys],
        statement_log: StatementLog,
    ) -> None:
        self.signed: dict[PeerId, tuple[bytes, bytes]] = {}
        self.latest: dict[PeerId, PositionReport] = {}
        self.contributions: dict[str, dict[PeerId, bytes]] = {name: {} for name in federation_spec.groups}
        self._me, self._federation_spec, self._pair_keys, self._statement_log = (
            me,
            federation_spec,
            pair_keys,
            statement_log,
        )
        self.longest: dict[str, int] = {}
        self.gathered: dict[PeerId, bytes] = {}

    @property
    def view(self) -> bytes:
        """The name of the view, 32 bytes."""
        return self._statement_log.view

    @property
    def missing(self) -> frozenset[PeerId]:
        """The members that have not reported."""
        return frozenset(self._federation_spec.members) - self.latest.keys()

    @property
    def settled(self) -> bool:
        """Whether all members have everybody's first report, and the same."""
        return len(self.gathered) == len(self._federation_spec.members) and not self.differing

    @property
    def differing(self) -> frozenset[PeerId]:
        """The members that were told other first reports than we, as far as they have said so."""
        if self.missing:
            return frozenset()
        ours = self.digest
        return frozenset(name for name, digest in self.gathered.items() if digest != ours)

    def gather(self, sender: PeerId, digest: bytes) -> None:
        """Take in that a member has everybody's first report; if they are not ours, tell all what we have.

        Raises:
            RemoteProtocolError: it has said so before.
        """
        if sender in self.gathered:
            raise RemoteProtocolError(sender, "told twice which reports it has")
        self.gathered[sender] = digest
        if self.differing:
            self._statement_log.dispute("standing", slot_of(self.view))

    @property
    def digest(self) -> bytes:
        """The digest of everybody's first report."""
        return digest_of_reports({name: content for name, (content, _) in self.signed.items()})

    def rows(self, group: str) -> dict[PeerId, GroupRow]:
        """What each peer has reported of a group last."""
        return {
            name: self.latest[name].groups[group]
            for name in sorted(self._federation_spec.groups[group])
            if name != self._me
        }

    def sign(self, report: PositionReport) -> bytes:
        """Sign a report of ours, and count it as everybody's."""
        content = report.to_bytes()
        signature = self._statement_log.sign("standing", slot_of(self.view, "", report.number), content)
        self.latest[self._me] = report
        if report.number == 0:
            self.signed[self._me] = content, signature
            self._note_lengths(report)
        return signature

    def take(self, sender: PeerId, standing: JournalPosition) -> None:
        """Take in a report.

        Raises:
            RemoteProtocolError: it is malformed, not signed, or contradicts itself.
            EquivocationError: the sender has reported something else to another member.
        """
        try:
            report = PositionReport.from_bytes(standing.content)
        except ValueError as error:
            raise RemoteProtocolError(sender, f"sent a malformed Standing: {error}") from None
        if report.view != self.view:
            raise RemoteProtocolError(sender, "sent a report of another view")
        known = self.latest.get(sender)
        if report.number != (0 if known is None else known.number + 1):
            raise RemoteProtocolError(sender, f"sent its report {report.number} out of order")
        self._statement_log.take(
            sender, "standing", slot_of(self.view, "", report.number), standing.content, standing.signature
        )
        groups = {name for name, members in self._federation_spec.groups.items() if sender in members}
        if report.groups.keys() != groups:
            raise RemoteProtocolError(
                sender, f"reported of the groups {sorted(report.groups)}, and is in {sorted(groups)}"
            )
        if known is None:
            self._take_first(sender, standing, report)
        elif any(row.length < known.groups[name].length for name, row in report.groups.items()):
            raise RemoteProtocolError(sender, "reported fewer finished sums than before")
        self.latest[sender] = report

    def _take_first(self, sender: PeerId, standing: JournalPosition, report: PositionReport) -> None:
        if not equal(standing.tag, self._pair_keys[sender].peer_tag):
            raise RemoteProtocolError(
                sender, "cannot prove that the ephemeral key it announced is its own: it may be another member's"
            )
        contributions = dict(standing.contributions)
        common = [name for name, members in self._federation_spec.groups.items() if {self._me, sender} <= set(members)]
        for name in common:
            if sha256(contributions.get(name, b"")).digest() != report.groups[name].commitment:
                raise RemoteProtocolError(sender, f"contributed something else to the key of {name} than it told all")
        for name in common:
            self.contributions[name][sender] = contributions[name]
        self.signed[sender] = standing.content, standing.signature
        self._note_lengths(report)

    def _note_lengths(self, report: PositionReport) -> None:
        for name, row in report.groups.items():
            self.longest[name] = max(row.length, self.longest.get(name, 0))
