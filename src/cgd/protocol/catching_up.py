"""How the members of a view find out where everybody stands, and how one that is behind catches up.

The rules:

1. Everybody reports once when the view is formed, and when it has all reports, tells all others their digest
   (`Gathered`). So once all digests are here, all members have the same reports, and nobody had left this view when we
   formed it: no report is older than what we did in another view. Then whoever has as many sums as anybody goes on.
   Whoever has fewer asks one that has more for what is missing.
2. Who is ahead tells its states as well while somebody is behind, and again when they change: what a member takes over
   must be what *all* that are ahead have. A member that lacks the last sum only, and has shown its key in it, needs no
   states. It is waited for: until it has caught up, a dishonest member may be the only one that is ahead.
3. What is given must be proved (`takeover.py`), and nobody's report may speak against it (`history.acceptable`).
   It must have been claimed in a first report: later ones only tell who has caught up. So all members know in time
   whether anything can be taken over in this view, or the next sum is run.
4. Who claims a history that is not ours, or gives us what cannot be, is named; nothing is summed with it in this view.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import InputError, RemoteProtocolError
from cgd.protocol.history import acceptable
from cgd.protocol.messages import CONTRIBUTION_BYTES, Ask, Gathered, Piece, Standing
from cgd.protocol.reports import Reports
from cgd.protocol.standings import Report
from cgd.protocol.statements import Notary
from cgd.protocol.takeover import Takeover

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd.protocol.charter import Charter
    from cgd.protocol.ephemeral import Pairing
    from cgd.protocol.group import Group
    from cgd.protocol.messages import Message, PeerId
    from cgd.protocol.standings import GroupRow
    from cgd.protocol.statements import Dossier

PIECE_BYTES = 1 << 20
# How often a member is given a ledger in one view: it may ask again when states have changed.
MAX_GIFTS = 8


class CatchingUp:
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
        charter: Charter,
        groups: Mapping[str, Group],
        pairings: Mapping[PeerId, Pairing],
        dossier: Dossier,
        say: Callable[[PeerId, Message], None],
        clock: Callable[[], int],
    ) -> None:
        self.reports = Reports(me, charter, pairings, dossier)
        self._me, self._charter, self._groups, self._pairings = me, charter, groups, pairings
        self._say, self._clock = say, clock
        self._others = [peer for peer in charter.members if peer != me]
        self._contributions = {name: os.urandom(CONTRIBUTION_BYTES) for name in groups}
        self._asked: set[tuple[PeerId, str]] = set()
        self._given: dict[tuple[PeerId, str], set[tuple[int, ...]]] = {}
        self._against: dict[str, dict[PeerId, str]] = {}
        self._settled: set[str] = set()  # groups in which nobody is behind: they stay together in this view
        for name, group in groups.items():
            masks = {peer: pairings[peer].mask_key for peer in group.members if peer != me}
            group.enter_view(me, dossier.view, masks, Notary(dossier, name), self.reports)
            self.reports.contributions[name][me] = self._contributions[name]

    def begin(self, greetings: tuple[tuple[PeerId, bytes, bytes], ...]) -> None:
        """Report to everybody where we stand."""
        report = Report(self.reports.view, 0, self._rows(states=False))
        signature = self.reports.sign(report)
        for peer in self._others:
            common = [name for name, group in self._groups.items() if peer in group.members]
            contributions = tuple((name, self._contributions[name]) for name in common)
            tag = self._pairings[peer].own_tag
            self._say(peer, Standing(report.to_bytes(), signature, tag, contributions, greetings))

    def receive(self, sender: PeerId, message: Message) -> None:
        """Take in a message of this view.

        Raises:
            RemoteProtocolError: it breaks a rule.
        """
        match message:
            case Standing():
                self.reports.take(sender, message)
                self._gather()
                self._weigh()
            case Gathered(digest):
                self.reports.gather(sender, digest)
                self._weigh()
            case Ask():
                self._give(sender, message)
            case Piece():
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
            return "all reports", frozenset(self._charter.members) - self.reports.gathered.keys()
        if self._against.get(group.name):
            return "an agreement about the past", frozenset(self._against[group.name])
        if group.takeover is not None:
            return "the past", frozenset({group.takeover.holder})
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
        if group.name in self._settled or len(group.ledger) > self.reports.longest[group.name]:
            return False
        return any(row.length < len(group.ledger) for row in self.reports.rows(group.name).values())

    def _report_again(self) -> None:
        latest, rows = self.reports.latest[self._me], self._rows(states=True)
        if rows == latest.groups:
            return
        report = Report(self.reports.view, latest.number + 1, rows)
        signature = self.reports.sign(report)
        for peer in self._others:
            self._say(peer, Standing(report.to_bytes(), signature))

    def _gather(self) -> None:
        """Tell all that we have everybody's first report, once."""
        if not self.reports.missing and self._me not in self.reports.gathered:
            for peer in self._others:
                self._say(peer, Gathered(self.reports.digest))
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
            group.takeover = None
        elif longest <= len(group.ledger):
            self._go_on(group, rows)
        elif group.takeover is not None and group.takeover.claim == rows[group.takeover.holder]:
            self._consider(group)
        else:
            self._ask_the_longest(group, rows, longest)

    def _go_on(self, group: Group, rows: Mapping[PeerId, GroupRow]) -> None:
        """Nobody is ahead of us."""
        group.takeover = None
        if self._against[group.name]:
            return
        if all(row.length == len(group.ledger) for row in rows.values()):
            self._settled.add(group.name)
        if not group.current:
            group.current = True
            group.run(self._clock())

    def _ask_the_longest(self, group: Group, rows: Mapping[PeerId, GroupRow], longest: int) -> None:
        """Ask one of those that are ahead of us."""
        holders = {peer: row for peer, row in rows.items() if row.length == longest}
        states = group.ledger.mark is None or longest - len(group.ledger) > 1
        told = {row.states for row in holders.values()}
        if states and (None in told or len(told) > 1 or _catches_up_without_states(rows, longest)):
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
        heads = group.ledger.heads
        return {
            peer: "has another history than we"
            for peer, row in rows.items()
            if row.length < len(heads) and row.head != heads[row.length]
        }

    def _ask(self, group: Group, holder: PeerId, row: GroupRow, *, states: bool) -> None:
        self._asked.add((holder, group.name))
        group.takeover = Takeover(holder, group, row, self._charter, states=states)
        self._say(holder, Ask(group.name, len(group.ledger), states))

    def _give(self, sender: PeerId, ask: Ask) -> None:
        group = self._groups.get(ask.group)
        if group is None or sender not in group.members:
            raise RemoteProtocolError(sender, f"asked for the ledger of {ask.group!r}, which it is not a member of")
        if ask.since > len(group.ledger):
            raise RemoteProtocolError(sender, f"asked for sums behind {ask.since}, and there are {len(group.ledger)}")
        state = (ask.states, len(group.ledger), *(each.steps for _, each in sorted(group.ledger.states.items())))
        given = self._given.setdefault((sender, ask.group), set())
        if state in given or len(given) >= MAX_GIFTS:  # nobody needs the same twice in a view
            return
        given.add(state)
        content = memoryview(group.ledger.gift(ask.since, states=ask.states))
        for start in range(0, len(content), PIECE_BYTES):
            self._say(sender, Piece(start, ask.group, len(content), content[start : start + PIECE_BYTES]))

    def _take_piece(self, sender: PeerId, piece: Piece) -> None:
        if (sender, piece.group) not in self._asked:
            raise RemoteProtocolError(sender, f"gave us a piece of the ledger of {piece.group!r}, unasked")
        group = self._groups[piece.group]
        if group.takeover is None or group.takeover.holder != sender:
            return  # we have it from another one
        try:
            group.takeover.take(piece)
        except InputError as error:
            stale = group.takeover.claim != self.reports.rows(group.name)[sender]
            group.takeover = None
            if not stale:
                group.doubted.add(sender)
            self._catch_up(group)
            if not stale:
                raise RemoteProtocolError(sender, f"gave us its past, and {error}") from None
        else:
            self._consider(group)

    def _consider(self, group: Group) -> None:
        """Take over what was given if it is all here and nobody's report speaks against it."""
        takeover = group.takeover
        if takeover is None or takeover.given is None:
            return
        own = group.row(bytes(32), states=False)
        self._against[group.name] = self._speaks_against(group, takeover, own)
        if not self._against[group.name]:
            group.take_over(takeover, self._clock())
            self._report_again()
            self._catch_up(group)

    def _speaks_against(self, group: Group, takeover: Takeover, own: GroupRow) -> dict[PeerId, str]:
        rows, claim = self.reports.rows(group.name), takeover.claim
        against = acceptable(claim.length - 1, takeover.opening, claim.head, own, rows, takeover.signers)
        if self._me in takeover.members and own.length == claim.length - 1 and own.mark not in (None, takeover.opening):
            against[takeover.holder] = "finished the last sum by another attempt than ours"
        vouching = {peer for peer, row in rows.items() if row.head == claim.head} | takeover.signers
        if not vouching - {takeover.holder}:
            against[takeover.holder] = "is the only one here that has signed its past"
        if own.length and self._me not in takeover.signers:
            # It was summed without us. Then everybody else must have signed it, or hold it.
            against |= {
                peer: "has neither signed nor finished the last sum"
                for peer, row in rows.items()
                if peer not in takeover.signers and (row.length, row.head) != (claim.length, claim.head)
            }
        return against


def _catches_up_without_states(rows: Mapping[PeerId, GroupRow], longest: int) -> bool:
    """Return whether a member lacks only the last sum, and has shown its key in it: it will report its own states."""
    return any(row.length == longest - 1 and row.mark is not None for row in rows.values())
