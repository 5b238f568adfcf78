"""One secure sum, as a state machine without I/O.

Every member l holds a secret vector x_l of the ring. At the end every member holds Σ x_l and nobody knows more.

The rules:

1. Nobody shares before everybody is ready under the same settings (`Ready`, the barrier). If they differ, all members
   see it when they have heard from all, and name the same odd one.
2. A member's subtotal is its secret with shares mixed in. `uniform`: it keeps one share of its secret, gives every peer
   another (`Share`), and adds those it is given. `expanded`: it adds the shares it has in common with its peers, which
   need not travel.
3. The vector is cut into parts and each part has one reducer: with `mesh` every member reduces one part, with
   `aggregator` one member reduces the whole. Everybody sends each reducer its part of the subtotal (`Subtotal`); the
   reducer adds and sends the result to all (`Total`).
4. Everybody sends everybody the digest of the total (`Confirm`). Only when all agree is the sum finished: a reducer
   that told two members different things is caught here.
5. The first message of a kind from a peer counts. A copy changes nothing. A message that the peer could not have sent
   yet if it followed the rules is an error that names it.

`states.py` says how the state moves and what may arrive, `members.py` who may take part and who adds up what. Outgoing
messages are made when they are pulled (`next_outgoing`), so that of m − 1 uniform shares one is in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import (
    DisagreementError,
    InputError,
    LocalProtocolError,
    MembershipError,
    PeerAbortedError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.protocol.members import check_members, parts
from cgd.protocol.messages import Abort, Confirm, Message, PeerId, Ready, Share, Subtotal, SumSpec, Total
from cgd.protocol.states import EXPECTED, TRANSITIONS, Event, State
from cgd.ring.fixed_point import WORD_TYPES
from cgd.ring.sharing import ExpandedShares, uniform_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy.typing as npt


class SecureSum:
    """One member's side of one sum: messages in by `receive`, messages out by `next_outgoing`.

    Args:
        me: this member's name.
        members: the names of all members, this one among them.
        number: the number of the sum, never used twice with the same `shares`.
        shares: the shares held in common with the peers, for `expanded` sharing.
        random: where uniform shares come from.

    Examples:
        >>> import numpy as np
        >>> spec = SumSpec((2,), "float32", 32, 20, "uniform", "mesh")
        >>> sums = {name: SecureSum(name, "abc", number=1) for name in "abc"}
        >>> for each in sums.values():
        ...     each.start(spec, np.array([1, 2], dtype=np.uint32))
        >>> while not all(each.state is State.FINISHED for each in sums.values()):
        ...     for sender, each in sums.items():
        ...         while (outgoing := each.next_outgoing()) is not None:
        ...             to, message = outgoing
        ...             sums[to].receive(sender, message)
        >>> sums["a"].total
        array([3, 6], dtype=uint32)
    """

    def __init__(
        self,
        me: PeerId,
        members: Collection[PeerId],
        number: int,
        shares: ExpandedShares | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        check_members(me, members)
        self.me = me
        self.members = tuple(sorted(members))
        self.others = tuple(peer for peer in self.members if peer != me)
        self.number = number
        self.state = State.IDLE
        self.shared = False
        """Whether anything of the secret may have left: from then on a fault cannot be undone by trying again."""
        self._fault: RemoteProtocolError | None = None
        self._shares = shares
        self._random = random
        self._specs: dict[PeerId, SumSpec] = {}
        self._seen: dict[type[Message], set[PeerId]] = {
            kind: set() for kind in (Ready, Share, Subtotal, Total, Confirm)
        }
        self._digests: dict[PeerId, bytes] = {}
        self._outbox: deque[tuple[PeerId, Callable[[], Message]]] = deque()

    # What a driver calls.

    def start(self, spec: SumSpec, secret: npt.NDArray[Any]) -> None:
        """Enter the sum with this member's secret, a flat ring array that the sum takes over.

        Raises:
            SettingsError: all others are ready, and not all under the same settings.
            RemoteProtocolError: a peer gave this sum up before.
        """
        if self._fault is not None:
            raise self._fault
        if self.state is not State.IDLE:
            raise LocalProtocolError(f"sum {self.number} was started before (it is {self.state.name}); start the next")
        self._check_secret(spec, secret)
        self._spec = spec
        self._parts = parts(spec, self.members)
        self._subtotal = secret
        self._total = np.zeros_like(secret)
        self._specs[self.me] = spec
        with self._failing_on_fault():
            self._move(Event.START)
            self._advance()

    def receive(self, sender: PeerId, message: Message) -> None:
        """Take in one message.

        Raises:
            RemoteProtocolError: the sender broke a rule, gave up, or has another total; the sum has failed.
                A fault that comes before `start` is raised again by `start`.
        """
        if sender not in self.others:
            raise RemoteProtocolError(sender, f"is not a member of this sum ({', '.join(self.members)})")
        if self.state in (State.FINISHED, State.FAILED) or sender in self._seen.get(type(message), ()):
            return
        with self._failing_on_fault():
            if type(message) not in EXPECTED[self.state]:
                raise RemoteProtocolError(
                    sender,
                    f"sent {type(message).__name__} of sum {self.number} while we are {self.state.name}: too soon",
                )
            self._take(sender, message)
            self._advance()

    def next_outgoing(self) -> tuple[PeerId, Message] | None:
        """The next message to send and its recipient; None while there is nothing to send."""
        if not self._outbox:
            return None
        to, make = self._outbox.popleft()
        message = make()
        with self._failing_on_fault():
            self._advance()
        return to, message

    def fail(self) -> None:
        """Give the sum up; what waits to be sent is dropped."""
        if (self.state, Event.FAULT) in TRANSITIONS:
            self._move(Event.FAULT)
            self._outbox.clear()

    @property
    def total(self) -> npt.NDArray[Any]:
        """The opened total, flat, as ring elements."""
        if self.state is not State.FINISHED:
            raise LocalProtocolError(f"sum {self.number} is {self.state.name}; its total is there when it is FINISHED")
        return self._total

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """What we are waiting for, and the peers it has to come from."""
        waits: dict[State, tuple[type[Message], Collection[PeerId]]] = {
            State.READYING: (Ready, self.others),
            State.SHARING: (Share, self.others),
            State.CONFIRMING: (Confirm, self.others),
        }
        if self.state is State.OPENING:
            reducing = self.me in self._parts and not self._all_here(Subtotal)
            waits[State.OPENING] = (Subtotal, self.others) if reducing else (Total, self._other_reducers)
        if self.state not in waits:
            return "nothing", frozenset()
        kind, peers = waits[self.state]
        return kind.__name__, frozenset(peers) - self._seen[kind]

    # How messages are taken in.

    def _take(self, sender: PeerId, message: Message) -> None:
        match message:
            case Abort(reason):
                raise PeerAbortedError(sender, f"gave up sum {self.number}: {reason.text}")
            case Ready(spec):
                self._specs[sender] = spec
            case Share(words):
                if self._expanded:
                    raise RemoteProtocolError(sender, "sent a Share, and the shares of this sum are expanded, not sent")
                self._add(sender, message, words, self._subtotal)
            case Subtotal(words):
                if self.me not in self._parts:
                    raise RemoteProtocolError(sender, "sent us a Subtotal, and we add up no part of this sum")
                self._add(sender, message, words, self._total[self._parts[self.me]])
            case Total(words):
                if sender not in self._parts:
                    raise RemoteProtocolError(sender, "sent a Total, and it adds up no part of this sum")
                self._add(sender, message, words, self._total[self._parts[sender]])
            case Confirm(digest):
                self._digests[sender] = digest
                if self.state is State.CONFIRMING:
                    self._check_digest(sender, digest)
        self._seen[type(message)].add(sender)

    def _compare_settings(self) -> None:
        """All specs are here: whoever differs from most is named, the same one at every member."""
        specs = [self._specs[member] for member in self.members]
        usual = max(specs, key=specs.count)  # the first of them if there is a draw
        odd = [member for member in self.members if self._specs[member] != usual]
        if odd:
            who = "this member sums" if odd[0] == self.me else "sums"
            more = f" (so do {', '.join(odd[1:])})" if odd[1:] else ""
            raise SettingsError(
                odd[0],
                f"{who} under other settings than most: {'; '.join(usual.differences(self._specs[odd[0]]))}{more}; "
                "every member needs the same model, training settings, bound, ring_bits, sharing and opening",
            )

    def _add(self, sender: PeerId, message: Message, words: bytes | memoryview, to: npt.NDArray[Any]) -> None:
        if len(words) != to.nbytes:
            raise RemoteProtocolError(sender, f"sent a {type(message).__name__} of {len(words)} bytes, not {to.nbytes}")
        np.add(to, np.frombuffer(words, dtype=to.dtype), out=to)

    def _check_digest(self, sender: PeerId, digest: bytes) -> None:
        if digest != self._digest:
            raise DisagreementError(
                sender,
                f"has another total of sum {self.number} than we have: a member added wrongly or told two stories; "
                "the total is not used",
            )

    # How the state moves.

    def _advance(self) -> None:
        while (event := self._due()) is not None:
            self._move(event)

    def _due(self) -> Event | None:
        """The event that has come about in this state, if any."""
        match self.state:
            case State.READYING if not self._outbox and self._all_here(Ready):
                return Event.ALL_READY
            case State.SHARING if not self._outbox and (self._expanded or self._all_here(Share)):
                return Event.ALL_SHARED
            case State.OPENING if self._all_opened():
                return Event.ALL_OPENED
            case State.CONFIRMING if self._all_here(Confirm):
                return Event.ALL_CONFIRMED
        return None

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
        match self.state:
            case State.READYING:
                self._say_to_all(Ready(self._spec))
            case State.SHARING:
                self._compare_settings()
                self._share()
            case State.OPENING:
                self._open()
            case State.CONFIRMING:
                self._confirm()

    @contextmanager
    def _failing_on_fault(self) -> Iterator[None]:
        try:
            yield
        except RemoteProtocolError as fault:
            self._fault = fault
            self.fail()
            raise

    def _share(self) -> None:
        self.shared = True
        if self._shares is not None and self._expanded:
            self._shares.add_to(self._subtotal, self.number)
            return
        for peer in self.others:
            self._outbox.append((peer, self._draw_share))

    def _draw_share(self) -> Share:
        share = uniform_words(self._subtotal.size, self._subtotal.dtype, self._random)
        np.subtract(self._subtotal, share, out=self._subtotal)
        return Share(_as_bytes(share))

    def _open(self) -> None:
        for reducer, part in self._parts.items():
            if reducer == self.me:
                np.add(self._total[part], self._subtotal[part], out=self._total[part])
            else:
                self._say(reducer, Subtotal(_as_bytes(self._subtotal[part])))
        self._total_told = self.me not in self._parts

    def _all_opened(self) -> bool:
        if not self._total_told and self._all_here(Subtotal):
            self._total_told = True
            self._say_to_all(Total(_as_bytes(self._total[self._parts[self.me]])))
        return self._total_told and self._seen[Total] == self._other_reducers

    def _confirm(self) -> None:
        self._digest = hashlib.sha256(self._total.data).digest()
        self._say_to_all(Confirm(self._digest))
        for peer, digest in self._digests.items():
            self._check_digest(peer, digest)

    # Small words for the above.

    @property
    def _expanded(self) -> bool:
        return self._spec.sharing == "expanded"

    @property
    def _other_reducers(self) -> set[PeerId]:
        return self._parts.keys() - {self.me}

    def _all_here(self, kind: type[Message]) -> bool:
        return len(self._seen[kind]) == len(self.others)

    def _say(self, to: PeerId, message: Message) -> None:
        self._outbox.append((to, lambda: message))

    def _say_to_all(self, message: Message) -> None:
        for peer in self.others:
            self._say(peer, message)

    def _check_secret(self, spec: SumSpec, secret: npt.NDArray[Any]) -> None:
        size, dtype = spec.size, WORD_TYPES[spec.ring_bits]
        if secret.shape != (size,) or secret.dtype != dtype:
            raise LocalProtocolError(
                f"the secret is {secret.dtype}{list(secret.shape)}, the settings say {dtype}{[size]}; encode it first"
            )
        if size == 0:
            raise InputError(f"a vector of shape {spec.shape} is empty; there is nothing to sum")
        held = self._shares.peers if self._shares is not None else frozenset()
        if spec.sharing == "expanded" and held != set(self.others):
            raise LocalProtocolError(
                f"expanded sharing needs a pair key with every peer ({', '.join(self.others)}), "
                f"and there are keys with {', '.join(sorted(held)) or 'nobody'}"
            )
        if spec.opening == "aggregator" and spec.aggregator not in self.members:
            raise MembershipError(
                f"the aggregator {spec.aggregator!r} is not a member; name one of {', '.join(self.members)}"
            )


def _as_bytes(words: npt.NDArray[Any]) -> memoryview:
    return words.data.cast("B")
