"""View change: the members of a view compare their journal positions, and members that are behind catch up.

The rules:

1. Every member reports its positions once when the view is formed, and when it has all reports, it sends their digest
   to all others (`PositionsGathered`). So once all digests have arrived, all members have the same reports, and no
   member had left this view when we formed it: no report is older than our actions in another view. Then a member with
   the most finished sums continues. A member with fewer requests the missing entries from one with more.
2. While a member is behind, those ahead also report their states, and again when these change: a member copies only
   states that *all* members ahead have. A member that lacks only the last sum, and revealed its key in it, needs no
   states. The others wait for it: before it has caught up, a dishonest member may be the only one ahead.
3. A transferred journal must be proved (`journal_transfer.py`), and no report may object to it
   (`certificates.find_objections`). Its length must have been claimed in a first report: later reports only show which
   members have caught up, and a group that has finished a sum in this view is reported as before. So all members know
   whether entries are transferred in this view, or the next sum is run.
4. A member that claims a history that is not ours, or sends an invalid journal, is named; in this view nothing is
   summed with it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import InputError, RemoteProtocolError
from cgd.secagg.attendance import epoch_of
from cgd.secagg.certificates import find_objections, find_objections_in_period
from cgd.secagg.completion import InterruptedSum, OpenSums, find_open_sums, has_gone_on
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.key_agreement import derive_pair_keys
from cgd.secagg.messages import (
    CONTRIBUTION_BYTES,
    CompleteSum,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    PositionsGathered,
)
from cgd.secagg.positions import PositionReport, PositionReports
from cgd.secagg.statements import StatementLog, StatementSigner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cgd.secagg.federation_spec import FederationSpec, Identity
    from cgd.secagg.group import Group
    from cgd.secagg.key_agreement import EphemeralKey, MembershipView
    from cgd.secagg.messages import Message, PeerId, SignedEvidence
    from cgd.secagg.positions import GroupPosition

    EarlyReport = tuple[bytes, JournalPosition | PositionsGathered]

CHUNK_BYTES = 1 << 20
# The number of journal transfers to one member in a view. It may request the same one twice: if our states changed
# while its request was on the way, it drops what we sent, until all members that are ahead have reported the new ones.
MAX_TRANSFERS = 8


class ViewChange:
    """One member's side of a view change.

    Args:
        me: the name of this member.
        identity: its long-term keys.
        ephemeral: its ephemeral key.
        federation_spec: the federation spec, with the members of the view.
        view: the view.
        groups: the groups that we are a member of.
        send: sends a message of this view to a peer.
        send_evidence: sends evidence to all members.
        renew: asks for a new view, if possible of these members only.
        whole: the federation spec with the members that are absent; the same one without a quorum.

    Attributes:
        statement_log: the signed statements of the view.
        reports: the position reports of the view.
    """

    def __init__(
        self,
        me: PeerId,
        identity: Identity,
        ephemeral: EphemeralKey,
        federation_spec: FederationSpec,
        view: MembershipView,
        groups: Mapping[str, Group],
        send: Callable[[PeerId, Message], None],
        send_evidence: Callable[[SignedEvidence], None],
        renew: Callable[[frozenset[PeerId]], None] = lambda _: None,
        whole: FederationSpec | None = None,
    ) -> None:
        self._renew = renew
        self._open_sums: dict[str, OpenSums] = {}
        self._completions: dict[str, dict[PeerId, InterruptedSum]] = {}
        self._handed_out: set[str] = set()
        self._repeating: set[str] = set()
        self._me, self._federation_spec, self._groups = me, federation_spec, groups
        self._send = send
        self._others = [peer for peer in federation_spec.members if peer != me]
        self._whole = whole or federation_spec
        pair_keys = {
            peer: derive_pair_keys(me, identity, ephemeral, peer, federation_spec, view) for peer in self._others
        }
        self._pair_keys = pair_keys
        self.statement_log = StatementLog(me, identity, federation_spec.keys, view.digest, send_evidence)
        self.reports = PositionReports(me, federation_spec, pair_keys, self.statement_log)
        self._contributions = {name: os.urandom(CONTRIBUTION_BYTES) for name in groups}
        self._requested: set[tuple[PeerId, str]] = set()
        self._transferred: Counter[tuple[PeerId, str]] = Counter()
        self._objections: dict[str, dict[PeerId, str]] = {}
        self._level: set[str] = set()  # groups in which no member is behind: they stay so in this view
        for name, group in groups.items():
            mask_keys = {peer: pair_keys[peer].mask_key for peer in group.members if peer != me}
            signer = StatementSigner(self.statement_log, name)
            group.enter_view(me, view.digest, mask_keys, signer, self.reports)
            self.reports.contributions[name][me] = self._contributions[name]

    def start(self, hellos: tuple[tuple[PeerId, bytes, bytes], ...]) -> None:
        """Send our first report to all members."""
        report = PositionReport(self.reports.view, 0, self._positions(states=False))
        signature = self.reports.sign(report)
        for peer in self._others:
            common = [name for name, group in self._groups.items() if peer in group.members]
            contributions = tuple((name, self._contributions[name]) for name in common)
            tag = self._pair_keys[peer].own_tag
            self._send(peer, JournalPosition(report.to_bytes(), signature, tag, contributions, hellos))

    def receive_early(self, session: bytes, early: Mapping[PeerId, Iterable[EarlyReport]]) -> list[RemoteProtocolError]:
        """Process the reports of this view that arrived before we formed it, and return the faults of their senders."""
        faults = []
        for peer, reports in early.items():
            try:
                for report_session, message in reports:
                    if report_session == session:
                        self.receive(peer, message)
            except RemoteProtocolError as fault:  # the fault of one member does not stop the reports of the others
                faults.append(fault)
        return faults

    def receive(self, sender: PeerId, message: Message) -> None:
        """Process a message of this view.

        Raises:
            RemoteProtocolError: it violates a rule.
        """
        if sender not in self._others:
            raise RemoteProtocolError(sender, "is not a member of this view")
        match message:
            case JournalPosition():
                self.reports.receive(sender, message)
                self._announce_gathered()
                self._evaluate()
            case PositionsGathered(digest):
                self.reports.receive_gathered(sender, digest)
                self._evaluate()
            case JournalRequest():
                self._transfer(sender, message)
            case JournalChunk():
                self._receive_chunk(sender, message)
            case CompleteSum():
                self._receive_completion(sender, message)

    def report_progress(self) -> None:
        """Report again if a member is behind us and our positions have changed since the last report."""
        if self.reports.agreed and any(map(self._is_ahead, self._groups.values())):
            self._report_again()

    def objections(self) -> dict[PeerId, str]:
        """Return the members whose reports keep us from continuing, and the reasons."""
        return {peer: reason for objections in self._objections.values() for peer, reason in objections.items()}

    def waiting_for(self, group: Group) -> tuple[str, frozenset[PeerId]]:
        """Return what a group waits for before it can sum, and the peers that have to provide it."""
        if self.reports.missing:
            return "its report", self.reports.missing
        if self.reports.differing:
            return "the same reports for all members", self.reports.differing
        if not self.reports.agreed:
            return "all reports", frozenset(self._federation_spec.members) - self.reports.gathered.keys()
        if self._objections.get(group.name):
            return "agreement on the history", frozenset(self._objections[group.name])
        if (opened := self._open_sums.get(group.name)) is not None and not group.up_to_date:
            if opened.only:
                return "its part in a sum that may have been opened", opened.only - {self._me}
            if opened.attempt is not None:
                return "the completion of the last sum", frozenset(group.members) - {self._me}
        if group.journal_transfer is not None:
            return "its journal", frozenset({group.journal_transfer.source})
        positions = self.reports.positions(group.name)
        longest = max(position.length for position in positions.values())
        return "its journal", frozenset(peer for peer, position in positions.items() if position.length == longest)

    # Reports.

    def _positions(self, *, states: bool) -> dict[str, GroupPosition]:
        return {
            name: group.position(sha256(self._contributions[name]).digest(), states=states and self._is_ahead(group))
            for name, group in self._groups.items()
        }

    def _has_summed(self, group: Group) -> bool:
        """Return whether a sum was finished in this view: no member is behind, even if one claimed to be."""
        return len(group.journal) > self.reports.max_length[group.name]

    def _is_ahead(self, group: Group) -> bool:
        """Return whether a member is behind us."""
        if group.name in self._level or self._has_summed(group):
            return False
        return any(position.length < len(group.journal) for position in self.reports.positions(group.name).values())

    def _report_again(self) -> None:
        latest = self.reports.latest[self._me]
        positions = {
            name: latest.groups[name] if self._has_summed(self._groups[name]) else position
            for name, position in self._positions(states=True).items()
        }
        if positions == latest.groups:
            return
        report = PositionReport(self.reports.view, latest.number + 1, positions)
        signature = self.reports.sign(report)
        for peer in self._others:
            self._send(peer, JournalPosition(report.to_bytes(), signature))

    def _announce_gathered(self) -> None:
        """Announce once to all members that we have all first reports."""
        if not self.reports.missing and self._me not in self.reports.gathered:
            for peer in self._others:
                self._send(peer, PositionsGathered(self.reports.digest))
            self.reports.receive_gathered(self._me, self.reports.digest)

    # Catching up.

    def _evaluate(self) -> None:
        if not self.reports.agreed:
            return
        for group in self._groups.values():
            group.set_hub_key(self.reports.contributions[group.name])
        self.report_progress()
        faults = []
        for group in self._groups.values():
            try:
                self._catch_up(group)
            except RemoteProtocolError as fault:  # it must not keep the other groups from continuing
                faults.append(fault)
        if faults:
            raise faults[0]

    def _catch_up(self, group: Group) -> None:
        """Request the missing entries from a member that has finished more sums than we, if there is one."""
        if group.name in self._level and group.up_to_date:
            return
        positions = self.reports.positions(group.name)
        self._objections[group.name] = self._unproven_claims(group, positions) or self._forks(group, positions)
        longest = max(position.length for position in positions.values())
        transfer = group.journal_transfer
        if longest > self.reports.max_length[group.name]:
            group.journal_transfer = None
        elif longest <= len(group.journal):
            self._continue(group, positions)
        elif transfer is not None and transfer.claimed == positions[transfer.source]:
            self._apply_if_accepted(group)
        else:
            self._request_entries(group, positions, longest)

    def _continue(self, group: Group, positions: Mapping[PeerId, GroupPosition]) -> None:
        """Run our program's sum, since no member is ahead of us."""
        group.journal_transfer = None
        if self._objections[group.name]:
            return
        if all(position.length == len(group.journal) for position in positions.values()):
            self._level.add(group.name)
        if not group.up_to_date and not self._must_complete(group):
            group.up_to_date = True
            group.run()

    # With a quorum; see `completion.py`.

    def _must_complete(self, group: Group) -> bool:
        """Complete a sum that may have been opened; return whether it must be completed before the next one is run."""
        quorum = self._federation_spec.quorum
        if quorum is None:
            return False
        if group.name not in self._open_sums:
            positions = self.reports.first_positions(group.name)
            found = find_open_sums(positions, self._whole, group.journal.is_finished)
            own = group.proof(found.attempt or found.repeated)
            if own is not None and not own.is_proved(group.name, self._federation_spec.keys):
                # A member has another key now: `_check_members` in group.py stops the training.
                found = OpenSums(found.void, found.void_steps)
            self._open_sums[group.name] = found
            longest = self.reports.max_length[group.name]
            behind = {name for name, each in positions.items() if each.length < longest}
            group.ignored = found.void | found.void_steps | behind
            group.void_reveals(pending=self._me in found.void, step=self._me in found.void_steps)
        found = self._open_sums[group.name]
        if found.attempt is not None:
            self._complete(group, found.attempt, quorum)
        if found.only:
            self._repeat(group, found)
        found = self._open_sums[group.name]
        return found.attempt is not None or bool(found.only)

    def _repeat(self, group: Group, found: OpenSums) -> None:
        """Ask for a view of the members that have to repeat a sum, once it is proved that all of them confirmed it.

        A dishonest member could otherwise leave out anybody, by claiming a sum that never was.
        """
        own, keys = group.proof(found.repeated), self._federation_spec.keys
        if own is not None and group.name not in self._handed_out:
            self._handed_out.add(group.name)
            content = json.dumps(own.to_json()).encode()
            for peer in self._others:
                self._send(peer, CompleteSum(group.name, content))
        for each in [*([] if own is None else [own]), *self._completions.get(group.name, {}).values()]:
            if each.attempt != found.repeated or not group.may_be_repeated(each):
                continue
            if found.only == each.commitments.keys() and each.is_proved(group.name, keys):
                positions = self.reports.first_positions(group.name)
                if has_gone_on(positions, found.only, each.epoch, self._whole):
                    self._open_sums[group.name] = OpenSums(found.void, found.void_steps)
                elif group.name not in self._repeating:
                    self._repeating.add(group.name)
                    self._renew(found.only)
                return

    def _complete(self, group: Group, attempt: bytes, quorum: int) -> None:
        """Hand out what we have of an attempt, once it is proved that all confirmed it; open it if that suffices."""
        own = group.material()
        if own is None or own.attempt != attempt:
            return
        keys = self._federation_spec.keys
        for sender, theirs in self._completions.get(group.name, {}).items():
            if theirs.attempt == attempt:
                if not own.is_proved(group.name, keys) and theirs.is_proved(group.name, keys):
                    own.signatures = dict(theirs.signatures)
                own.add(sender, theirs)
        if not own.is_proved(group.name, keys):
            return
        if group.name not in self._handed_out:
            self._handed_out.add(group.name)
            group.record_completion(own)
            content = json.dumps(own.to_json(only=self._me)).encode()
            for peer in self._others:
                if peer in own.commitments:
                    self._send(peer, CompleteSum(group.name, content))
        if own.masked is not None and own.recover_keys(quorum):
            group.complete(own)
            self._renew(frozenset())

    def _receive_completion(self, sender: PeerId, message: CompleteSum) -> None:
        group = self._groups.get(message.group)
        if group is None or sender not in group.members or self._federation_spec.quorum is None:
            raise RemoteProtocolError(sender, f"sent its part in a sum of {message.group!r}, and should not")
        try:
            theirs = InterruptedSum.from_bytes(message.content)
        except ValueError as error:
            raise RemoteProtocolError(sender, f"sent a malformed CompleteSum: {error}") from None
        self._completions.setdefault(group.name, {})[sender] = theirs
        if self.reports.agreed:
            self._catch_up(group)

    def _request_entries(self, group: Group, positions: Mapping[PeerId, GroupPosition], longest: int) -> None:
        """Request the missing entries from one of the members that are ahead of us."""
        ahead = {peer: position for peer, position in positions.items() if position.length == longest}
        states = group.journal.pending_reveal is None or longest - len(group.journal) > 1
        reported = {position.states for position in ahead.values()}
        if states and (None in reported or len(reported) > 1 or _catches_up_without_states(positions, longest)):
            return  # not all have reported their states, or not of the same step; they will
        valid = [peer for peer in ahead if peer not in group.invalid_sources]
        if valid:
            source = valid[0]
            self._requested.add((source, group.name))
            claimed = ahead[source]
            group.journal_transfer = JournalTransfer(
                source,
                group,
                claimed,
                self._federation_spec,
                states=states,
                holders=[peer for peer, position in ahead.items() if position.head == claimed.head],
            )
            self._send(source, JournalRequest(group.name, len(group.journal), states))

    def _unproven_claims(self, group: Group, positions: Mapping[PeerId, GroupPosition]) -> dict[PeerId, str]:
        """Return the members that report more finished sums than any first report: none was finished meanwhile."""
        longest = self.reports.max_length[group.name]
        return {
            peer: "claims a sum that no member reported at first"
            for peer, position in positions.items()
            if position.length > longest
        }

    def _forks(self, group: Group, positions: Mapping[PeerId, GroupPosition]) -> dict[PeerId, str]:
        """Return the members that report a history that ours does not continue."""
        heads = group.journal.heads
        return {
            peer: "has another history than this member"
            for peer, position in positions.items()
            if position.length < len(heads) and position.head != heads[position.length]
        }

    def _transfer(self, sender: PeerId, request: JournalRequest) -> None:
        """Send the requested part of the journal in chunks."""
        group = self._groups.get(request.group)
        if group is None or sender not in group.members:
            raise RemoteProtocolError(sender, f"requested the journal of {request.group!r}, but is not a member of it")
        journal = group.journal
        if request.since > len(journal):
            raise RemoteProtocolError(sender, f"requested sums after {request.since}, but there are {len(journal)}")
        if (
            self._federation_spec.quorum is not None
            and len(journal) != self.reports.latest[self._me].groups[group.name].length
        ):
            return  # we have completed a sum since we reported: the member catches up in the next view
        if self._transferred[sender, request.group] >= MAX_TRANSFERS:
            return
        self._transferred[sender, request.group] += 1
        content = memoryview(journal.export_since(request.since, states=request.states))
        for start in range(0, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            self._send(sender, JournalChunk(start, request.group, len(content), chunk))

    def _receive_chunk(self, sender: PeerId, chunk: JournalChunk) -> None:
        if (sender, chunk.group) not in self._requested:
            raise RemoteProtocolError(sender, f"sent a chunk of the journal of {chunk.group!r} without a request")
        group = self._groups[chunk.group]
        transfer = group.journal_transfer
        if transfer is None or transfer.source != sender:
            return  # another member has sent it
        try:
            transfer.receive(chunk)
        except InputError as error:
            stale = transfer.claimed != self.reports.positions(group.name)[sender]
            group.journal_transfer = None
            if not stale:
                group.invalid_sources.add(sender)
            self._catch_up(group)
            if not stale:
                raise RemoteProtocolError(sender, f"sent an invalid journal: {error}") from None
        else:
            self._apply_if_accepted(group)

    def _apply_if_accepted(self, group: Group) -> None:
        """Extend our journal by a complete transfer if no report objects to it."""
        transfer = group.journal_transfer
        if transfer is not None and transfer.refusal is not None:
            self._objections[group.name] = {transfer.source: transfer.refusal}
        if transfer is None or transfer.journal is None:
            return
        own = group.position(bytes(32), states=False)
        self._objections[group.name] = self._find_objections(group, transfer, own)
        if not self._objections[group.name]:
            group.apply_transfer(transfer)
            self._report_again()
            self._catch_up(group)

    def _find_objections(self, group: Group, transfer: JournalTransfer, own: GroupPosition) -> dict[PeerId, str]:
        positions, claimed = self.reports.positions(group.name), transfer.claimed
        index, attempt, signers = claimed.length - 1, transfer.attempt, transfer.signers
        if self._federation_spec.quorum is not None and epoch_of(transfer.period) == self._federation_spec.epoch:
            return self._find_objections_in_period(group, transfer, own)
        objections = find_objections(index, attempt, claimed.head, own, positions, signers)
        if self._me in transfer.members and own.length == index and own.pending_reveal not in (None, attempt):
            objections[transfer.source] = "finished the last sum by another attempt than this member's"
        if own.length and self._me not in signers:
            # It was summed without us: then every other member must have signed it or hold it.
            objections |= {
                peer: "has neither signed nor finished the last sum"
                for peer, position in positions.items()
                if peer not in signers and (position.length, position.head) != (claimed.length, claimed.head)
            }
        return objections

    def _find_objections_in_period(
        self, group: Group, transfer: JournalTransfer, own: GroupPosition
    ) -> dict[PeerId, str]:
        positions, claimed, period = self.reports.positions(group.name), transfer.claimed, transfer.period
        index, part = claimed.length - 1, own.attendance
        objections = find_objections_in_period(index, transfer.attempt, claimed.head, period, own, positions)
        if own.length == index and part is not None and part.revealed_in > period:
            objections[transfer.source] = "finished the last sum before this member revealed its key in another"
        return objections


def _catches_up_without_states(positions: Mapping[PeerId, GroupPosition], longest: int) -> bool:
    """Return whether a member lacks only the last sum, and revealed its key in it: it will report its own states."""
    return any(each.length == longest - 1 and each.pending_reveal is not None for each in positions.values())
