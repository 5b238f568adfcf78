"""How the members of a view find out where everybody stands, and how one that is behind catches up.

The rules:

1. Everybody reports once when the view is formed, and when it has all reports, tells all others their digest
   (`PositionsGathered`). So once all digests are here, all members have the same reports, and nobody had left this view when we
   formed it: no report is older than what we did in another view. Then whoever has as many sums as anybody goes on.
   Whoever has fewer asks one that has more for what is missing.
2. Who is ahead tells its states as well while somebody is behind, and again when they change: what a member takes over
   must be what *all* that are ahead have. A member that lacks the last sum only, and has shown its key in it, needs no
   states.
3. What is given must be proved (`journal_transfer.py`), and nobody's report may speak against it (`history.acceptable`).
   It must have been claimed in a first report: later ones only tell who has caught up. So all members know in time
   whether anything can be taken over in this view, or the next sum is run.
4. Who claims a history that is not ours, or gives us what cannot be, is named; nothing is summed with it in this view.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import InputError, RemoteProtocolError
from cgd.secagg.certificates import acceptable
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.messages import CONTRIBUTION_BYTES, JournalChunk, JournalPosition, JournalRequest, PositionsGathered
from cgd.secagg.position_reports import PositionReports
from cgd.secagg.positions import PositionReport
from cgd.secagg.statements import StatementSigner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.group import Group
    from cgd.secagg.key_agreement import PairKeys
    from cgd.secagg.messages import Message, PeerId
    from cgd.secagg.positions import GroupRow
    from cgd.secagg.statements import StatementLog

PIECE_BYTES = 1 << 20
# How often a member is given a ledger in one view: it may ask again when states have changed.
MAX_GIFTS = 8


class ViewChange:
    """One member's side of it, in one view.

    Args:
        me: this member's name.
        charter: what all hold to.
        groups: those that we sum with.
        pairings: what we have in common with each peer.
        dossier: what the members have signed in this view.
        say: sends a message to a peer.
        clock: tells the step of our program's loop.
    """

    def __init__(
        self,
        me: PeerId,
        federation_spec: FederationSpec,
        groups: Mapping[str, Group],
        pair_keys: Mapping[PeerId, PairKeys],
        statement_log: StatementLog,
        say: Callable[[PeerId, Message], None],
        clock: Callable[[], int],
    ) -> None:
        self.reports = PositionReports(me, federation_spec, pair_keys, statement_log)
        self._me, self._federation_spec, self._groups, self._pair_keys = me, federation_spec, groups, pair_keys
        self._say, self._clock = say, clock
        self._others = [peer for peer in federation_spec.members if peer != me]
        self._contributions = {name: os.urandom(CONTRIBUTION_BYTES) for name in groups}
        self._asked: set[tuple[PeerId, str]] = set()
        self._given: dict[tuple[PeerId, str], set[tuple[int, ...]]] = {}
        self._against: dict[str, dict[PeerId, str]] = {}
        self._settled: set[str] = set()  # groups in which nobody is behind: they stay together in this view
        for name, group in groups.items():
            masks = {peer: pair_keys[peer].mask_key for peer in group.members if peer != me}
            group.enter_view(me, statement_log.view, masks, StatementSigner(statement_log, name), self.reports)
            self.reports.contributions[name][me] = self._contributions[name]

    def begin(self, greetings: tuple[tuple[PeerId, bytes, bytes], ...]) -> None:
        """Report to everybody where we stand."""
        report = PositionReport(self.reports.view, 0, self._rows(states=False))
        signature = self.reports.sign(report)
        for peer in self._others:
            common = [name for name, group in self._groups.items() if peer in group.members]
            contributions = tuple((name, self._contributions[name]) for name in common)
            tag = self._pair_keys[peer].own_tag
            self._say(peer, JournalPosition(report.to_bytes(), signature, tag, contributions, greetings))

    def receive(self, sender: PeerId, message: Message) -> None:
        """Take in a message of this view.

        Raises:
            RemoteProtocolError: it breaks a rule.
        """
        match message:
            case JournalPosition():
                self.reports.take(sender, message)
                self._gather()
                self._weigh()
            case PositionsGathered(digest):
                self.reports.gather(sender, digest)
                self._weigh()
            case JournalRequest():
                self._give(sender, message)
            case JournalChunk():
                self._take_piece(sender, message)

    def tell_progress(self) -> None:
        """Report again if somebody is behind us and something has changed since we reported last."""
        if self.reports.settled and any(map(self._is_ahead, self._groups.values())):
            self._report_again()

    def doubts(self) -> dict[PeerId, str]:
        """Who speaks against going on, by its reports, and why."""
        return {peer: why for against in self._against.values() for peer, why in against.items()}

    def waiting_for(self, group: Group) -> tuple[str, frozenset[PeerId]]:
        """What a group waits for before it can sum, and the peers it has to come from."""
        if self.reports.missing:
            return "its report", self.reports.missing
        if self.reports.differing:
            return "the same reports for all", self.reports.differing
        if not self.reports.settled:
            return "all reports", frozenset(self._federation_spec.members) - self.reports.gathered.keys()
        if self._against.get(group.name):
            return "an agreement about the past", frozenset(self._against[group.name])
        if group.journal_transfer is not None:
            return "the past", frozenset({group.journal_transfer.holder})
        rows = self.reports.rows(group.name)
        longest = max(row.length for row in rows.values())
        return "the past", frozenset(peer for peer, row in rows.items() if row.length == longest)

    # What is reported.

    def _rows(self, *, states: bool) -> dict[str, GroupRow]:
        return {
            name: group.row(sha256(self._contributions[name]).digest(), states=states and self._is_ahead(group))
            for name, group in self._groups.items()
        }

    def _is_ahead(self, group: Group) -> bool:
        """Whether somebody is behind us; reports are not renewed after a sum was finished in this view."""
        if group.name in self._settled or len(group.journal) > self.reports.longest[group.name]:
            return False
        return any(row.length < len(group.journal) for row in self.reports.rows(group.name).values())

    def _report_again(self) -> None:
        latest, rows = self.reports.latest[self._me], self._rows(states=True)
        if rows == latest.groups:
            return
        report = PositionReport(self.reports.view, latest.number + 1, rows)
        signature = self.reports.sign(report)
        for peer in self._others:
            self._say(peer, JournalPosition(report.to_bytes(), signature))

    def _gather(self) -> None:
        """Tell all that we have everybody's first report, once."""
        if not self.reports.missing and self._me not in self.reports.gathered:
            for peer in self._others:
                self._say(peer, PositionsGathered(self.reports.digest))
            self.reports.gather(self._me, self.reports.digest)

    # Who is behind, and what is done about it.

    def _weigh(self) -> None:
        if not self.reports.settled:
            return
        for group in self._groups.values():
            group.share_key(self.reports.contributions[group.name])
        self.tell_progress()
        faults = []
        for group in self._groups.values():
            try:
                self._catch_up(group)
            except RemoteProtocolError as fault:  # must not keep the other groups from going on
                faults.append(fault)
        if faults:
            raise faults[0]

    def _catch_up(self, group: Group) -> None:
        """Ask somebody that has finished more sums than we for what is missing, unless nobody has."""
        if group.name in self._settled:
            return
        rows = self.reports.rows(group.name)
        self._against[group.name] = self._boasts(group, rows) or self._forks(group, rows)
        longest = max(row.length for row in rows.values())
        if longest > self.reports.longest[group.name]:
            group.journal_transfer = None
        elif longest <= len(group.journal):
            self._go_on(group, rows)
        elif group.journal_transfer is not None and group.journal_transfer.claim == rows[group.journal_transfer.holder]:
            self._consider(group)
        else:
            self._ask_the_longest(group, {peer: row for peer, row in rows.items() if row.length == longest})

    def _go_on(self, group: Group, rows: Mapping[PeerId, GroupRow]) -> None:
        """Nobody is ahead of us."""
        group.journal_transfer = None
        if self._against[group.name]:
            return
        if all(row.length == len(group.journal) for row in rows.values()):
            self._settled.add(group.name)
        if not group.current:
            group.current = True
            group.run(self._clock())

    def _ask_the_longest(self, group: Group, holders: Mapping[PeerId, GroupRow]) -> None:
        """Ask one of those that are ahead of us."""
        lacks = next(iter(holders.values())).length - len(group.journal)
        states = group.journal.mark is None or lacks > 1
        told = {row.states for row in holders.values()}
        if states and (None in told or len(told) > 1):
            return  # not all have told their states, or they are not at the same step yet: they will be
        trusted = [peer for peer in holders if peer not in group.doubted]
        if trusted:
            self._ask(group, trusted[0], holders[trusted[0]], states=states)

    def _boasts(self, group: Group, rows: Mapping[PeerId, GroupRow]) -> dict[PeerId, str]:
        """Who reports more finished sums than anybody did at first: nobody can have finished one meanwhile."""
        longest = self.reports.longest[group.name]
        return {peer: "claims a sum that nobody had reported" for peer, row in rows.items() if row.length > longest}

    def _forks(self, group: Group, rows: Mapping[PeerId, GroupRow]) -> dict[PeerId, str]:
        """Who reports a history of which ours is no continuation."""
        heads = group.journal.heads
        return {
            peer: "has another history than we"
            for peer, row in rows.items()
            if row.length < len(heads) and row.head != heads[row.length]
        }

    def _ask(self, group: Group, holder: PeerId, row: GroupRow, *, states: bool) -> None:
        self._asked.add((holder, group.name))
        group.journal_transfer = JournalTransfer(holder, group, row, self._federation_spec, states=states)
        self._say(holder, JournalRequest(group.name, len(group.journal), states))

    def _give(self, sender: PeerId, ask: JournalRequest) -> None:
        group = self._groups.get(ask.group)
        if group is None or sender not in group.members:
            raise RemoteProtocolError(sender, f"asked for the ledger of {ask.group!r}, which it is not a member of")
        if ask.since > len(group.journal):
            raise RemoteProtocolError(sender, f"asked for sums behind {ask.since}, and there are {len(group.journal)}")
        state = (ask.states, len(group.journal), *(each.steps for _, each in sorted(group.journal.states.items())))
        given = self._given.setdefault((sender, ask.group), set())
        if state in given or len(given) >= MAX_GIFTS:  # nobody needs the same twice in a view
            return
        given.add(state)
        content = memoryview(group.journal.gift(ask.since, states=ask.states))
        for start in range(0, len(content), PIECE_BYTES):
            self._say(sender, JournalChunk(start, ask.group, len(content), content[start : start + PIECE_BYTES]))

    def _take_piece(self, sender: PeerId, piece: JournalChunk) -> None:
        if (sender, piece.group) not in self._asked:
            raise RemoteProtocolError(sender, f"gave us a piece of the ledger of {piece.group!r}, unasked")
        group = self._groups[piece.group]
        if group.journal_transfer is None or group.journal_transfer.holder != sender:
            return  # we have it from another one
        try:
            group.journal_transfer.take(piece)
        except InputError as error:
            stale = group.journal_transfer.claim != self.reports.rows(group.name)[sender]
            group.journal_transfer = None
            if not stale:
                group.doubted.add(sender)
            self._catch_up(group)
            if not stale:
                raise RemoteProtocolError(sender, f"gave us its past, and {error}") from None
        else:
            self._consider(group)

    def _consider(self, group: Group) -> None:
        """Take over what was given if it is all here and nobody's report speaks against it."""
        journal_transfer = group.journal_transfer
        if journal_transfer is None or journal_transfer.given is None:
            return
        own = group.row(bytes(32), states=False)
        self._against[group.name] = self._speaks_against(group, journal_transfer, own)
        if not self._against[group.name]:
            group.take_over(journal_transfer, self._clock())
            self._report_again()
            self._catch_up(group)

    def _speaks_against(self, group: Group, journal_transfer: JournalTransfer, own: GroupRow) -> dict[PeerId, str]:
        rows, claim = self.reports.rows(group.name), journal_transfer.claim
        against = acceptable(
            claim.length - 1, journal_transfer.opening, claim.head, own, rows, journal_transfer.signers
        )
        if (
            self._me in journal_transfer.members
            and own.length == claim.length - 1
            and own.mark not in (None, journal_transfer.opening)
        ):
            against[journal_transfer.holder] = "finished the last sum by another attempt than ours"
        vouching = {peer for peer, row in rows.items() if row.head == claim.head} | journal_transfer.signers
        if not vouching - {journal_transfer.holder}:
            against[journal_transfer.holder] = "is the only one here that has signed its past"
        if own.length and self._me not in journal_transfer.signers:
            # It was summed without us. Then everybody else must have signed it, or hold it.
            against |= {
                peer: "has neither signed nor finished the last sum"
                for peer, row in rows.items()
                if peer not in journal_transfer.signers and (row.length, row.head) != (claim.length, claim.head)
            }
        return against
