"""One secure sum, as a state machine without I/O.

Every member l holds a secret vector x_l of the ring. At the end every member holds Σ x_l and nobody knows more.

The rules:

1. Nobody shares before everybody is ready under the same settings and, in a federation, at the same place of the same
   history (`Ready`, the barrier). If they differ, all members see it when they have heard from all, and name the same
   odd one.
2. A member's subtotal is its secret with shares mixed in. `uniform`: it keeps one share of its secret, gives every peer
   another (`Share`), and adds those it is given. `expanded`: it adds the shares it has in common with its peers, which
   need not travel. It is also sealed: hidden under a stream whose key the member keeps, for now.
3. The vector is cut into parts and each part has one reducer: with `mesh` every member reduces one part, with
   `aggregator` one member reduces the whole. Everybody sends each reducer its part of the subtotal (`Subtotal`); the
   reducer adds and sends the result to all (`Total`). The shares cancel in it and the seals do not. With `hub` the
   reducer is no member (`Deposit`), and its totals are checked by tags. `reducing.py` does all this.
4. Everybody sends everybody the digest of the sealed total, and of what all were ready with (`Confirm`). A reducer that
   told two members different things is caught here, before anybody could read anything; so is a member that was ready
   with different things for different members. `Ready` and `Confirm` are signed, if there is a notary.
5. When all digests agree, everybody shows everybody the key of its seal (`RevealKey`), which must be the one it was
   committed to when it was ready. Whoever has all keys has the total. So a total is opened by all or by none: as long
   as one member keeps its key, nobody has opened anything, and the sum can be given up and run again.
6. A slice from a peer counts once, and so does any other message. A copy changes nothing. A message that the peer could
   not have sent yet if it followed the rules is an error that names it.

`states.py` says how the state moves and what may arrive, `members.py` who may take part and who adds up what. Vectors
travel in slices, each made when it is pulled (`next_outgoing`) and added where it belongs when it arrives.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import (
    DisagreementError,
    HubError,
    InputError,
    LocalProtocolError,
    PeerAbortedError,
    ProtocolError,
    RemoteProtocolError,
)
from cgd.secagg.attestations import Attestations
from cgd.secagg.masking import PairwiseMasks, seal, unseal
from cgd.secagg.messages import (
    HUB,
    SEAL_KEY_BYTES,
    Abort,
    Confirm,
    Message,
    PeerId,
    Ready,
    Reason,
    RevealKey,
    Share,
    Subtotal,
    SumSpec,
    Total,
)
from cgd.secagg.partition import check_members, check_secret, slices
from cgd.secagg.reduction import HubReduction, MemberReduction, add_slice, as_bytes
from cgd.secagg.secret_sharing import uniform_words
from cgd.secagg.statements import StatementSigner
from cgd.secagg.states import EXPECTED, TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy.typing as npt

    from cgd.secagg.reduction import HubKeys, Reduction


class SecureSum:
    """One member's side of one sum: messages in by `receive`, messages out by `next_outgoing`.

    Args:
        me: this member's name.
        members: the names of all members, this one among them.
        number: the number of the sum, never used twice with the same `shares`.
        shares: the shares held in common with the peers, for `expanded` sharing.
        random: where uniform shares come from.
        hub: what is needed to have the hub add up, if there is one.
        notary: signs and checks statements; none are signed without.
        on_opening: called with the digest of what will be opened, before our key leaves us.

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
        shares: PairwiseMasks | None = None,
        random: Callable[[int], bytes] = os.urandom,
        hub: HubKeys | None = None,
        statement_signer: StatementSigner | None = None,
        on_opening: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        check_members(me, members)
        self.me = me
        self.members = tuple(sorted(members))
        self.others = tuple(peer for peer in self.members if peer != me)
        self.number = number
        self.state = State.IDLE
        self.unsealed = False
        """Whether our key may have left: from then on others may open the total, and a fault cannot be undone."""
        self._fault: ProtocolError | None = None
        self._told: PeerAbortedError | None = None
        self._said = Attestations(me, self.members, number, statement_signer or StatementSigner())
        self._on_opening = on_opening
        self._shares = shares
        self._random = random
        self._hub = hub
        self._key = random(SEAL_KEY_BYTES)
        self._shared: dict[PeerId, set[int]] = {peer: set() for peer in self.others}  # slices of shares, by their place
        self._outbox: deque[tuple[PeerId, Callable[[], Message]]] = deque()

    # What a driver calls.

    def start(self, spec: SumSpec, secret: npt.NDArray[Any], terms: bytes = b"") -> None:
        """Enter the sum with this member's secret, a flat ring array that the sum takes over.

        Raises:
            SettingsError: all others are ready, and not all under the same settings or terms.
            RemoteProtocolError: a peer gave this sum up before.
        """
        if self._fault is not None:
            raise self._fault
        if self.state is not State.IDLE:
            raise LocalProtocolError(f"sum {self.number} was started before (it is {self.state.name}); start the next")
        check_secret(spec, secret, self.me, self.members, self._shares)
        self._spec = spec
        self._subtotal = secret
        self._reduction = self._reduce_by(secret.dtype)
        self._said.get_ready(spec, self._key, terms)
        with self._failing_on_fault():
            self._move(Event.START)
            self._advance()

    def receive(self, sender: PeerId, message: Message) -> None:
        """Take in one message.

        Raises:
            RemoteProtocolError: the sender broke a rule, gave up, or has another total; the sum has failed.
                A fault that comes before `start` is raised again by `start`.
        """
        if sender not in (*self.others, HUB):
            raise RemoteProtocolError(sender, f"is not a member of this sum ({', '.join(self.members)})")
        if self.state in (State.FINISHED, State.FAILED):
            return
        if sender == HUB and not (isinstance(message, Total) and self._by_hub):
            raise HubError(f"sent {type(message).__name__}, which it has no business to say")
        if self._is_copy(sender, message):
            return
        with self._failing_on_fault():
            if type(message) not in EXPECTED[self.state]:
                raise RemoteProtocolError(
                    sender,
                    f"sent {type(message).__name__} of sum {self.number} while we are {self.state.name}: too soon",
                )
            self._take(sender, message)
            self._advance()

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, Message] | None:
        """The next message to send and its recipient; None while there is nothing to send.

        Args:
            blocked: peers whose messages wait; each peer's keep their order.
        """
        place = next((i for i, (to, _) in enumerate(self._outbox) if to not in blocked), None)
        if place is None:
            return None
        to, make = self._outbox[place]
        del self._outbox[place]
        message = make()
        with (
            suppress(RemoteProtocolError, DisagreementError),
            self._failing_on_fault(),
        ):  # see `fault`; the message goes out all the same
            self._advance()
        return to, message

    def again(self) -> None:
        """The hub has nothing of ours: deposit once more what another member may still lack the total of."""
        if self.state in (State.OPENING, State.CONFIRMING):
            self._outbox = deque((to, make) for to, make in self._outbox if to != HUB)
            self._reduction.again()

    def fail(self) -> None:
        """Give the sum up; what waits to be sent is dropped."""
        if (self.state, Event.FAULT) in TRANSITIONS:
            self._move(Event.FAULT)
            self._outbox.clear()

    @property
    def fault(self) -> ProtocolError | None:
        """Why the sum has failed, if a peer did it."""
        return self._fault

    @property
    def said(self) -> Attestations:
        """What the members have said of this sum."""
        return self._said

    @property
    def total(self) -> npt.NDArray[Any]:
        """The opened total, flat, as ring elements."""
        if self.state is not State.FINISHED:
            raise LocalProtocolError(f"sum {self.number} is {self.state.name}; its total is there when it is FINISHED")
        return self._total

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """What we are waiting for, and the peers it has to come from."""
        match self.state:
            case State.READYING:
                return "Ready", self._said.missing(self._said.readies)
            case State.SHARING:
                return "Share", self._unshared
            case State.OPENING:
                return self._reduction.waiting_for
            case State.CONFIRMING:
                return "Confirm", self._said.missing(self._said.confirms)
            case State.UNSEALING:
                return "RevealKey", self._said.missing(self._said.keys)
        return "nothing", frozenset()

    # How messages are taken in.

    def _is_copy(self, sender: PeerId, message: Message) -> bool:
        match message:
            case Ready():
                return sender in self._said.readies
            case Share(start, _):
                return start in self._shared.get(sender, ())
            case Subtotal() | Total() if self.state is not State.IDLE:
                return self._reduction.repeats(sender, message)
            case Confirm():
                return sender in self._said.confirms
            case RevealKey():
                return sender in self._said.keys
        return False

    def _take(self, sender: PeerId, message: Message) -> None:
        match message:
            case Abort(reason):
                fault = PeerAbortedError(sender, f"gave up sum {self.number}: {reason.text}")
                if reason is Reason.DIFFERS:  # it may have been told something else than we
                    self._said.dispute()
                if reason is not Reason.DIFFERS or self.state not in (State.IDLE, State.READYING, State.CONFIRMING):
                    raise fault
                self._told = fault  # when all have spoken we see for ourselves who differs
            case Ready():
                self._said.take_ready(sender, message)
            case Share():
                if self._expanded:
                    raise RemoteProtocolError(sender, "sent a Share, and the shares of this sum are expanded, not sent")
                add_slice(sender, message, slice(0, self._subtotal.size), self._subtotal)
                self._shared[sender].add(message.start)
            case Subtotal() | Total():
                self._reduction.take(sender, message)
            case Confirm():
                self._said.take_confirm(sender, message)
            case RevealKey(key):
                self._said.take_key(sender, key)

    # How the state moves.

    def _advance(self) -> None:
        while (event := self._event()) is not None:
            self._move(event)

    def _event(self) -> Event | None:
        """The event that has come about in this state, if any."""
        match self.state:
            case State.READYING if not self._outbox and not self._said.missing(self._said.readies):
                return Event.ALL_READY
            case State.SHARING if not self._outbox and (self._expanded or not self._unshared):
                return Event.ALL_SHARED
            case State.OPENING if not self._reduction.waiting_for[1]:
                return Event.ALL_OPENED
            case State.CONFIRMING if not self._outbox and not self._said.missing(self._said.confirms):
                return Event.ALL_CONFIRMED
            case State.UNSEALING if not self._said.missing(self._said.keys):
                return Event.ALL_UNSEALED
        return None

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
        match self.state:
            case State.READYING:
                self._say_to_all(self._said.readies[self.me])
            case State.SHARING:
                self._said.check_readies()
                self._check_told()
                self._share()
            case State.OPENING:
                seal(self._subtotal, self._key)
                self._reduction.open(self._subtotal)
            case State.CONFIRMING:
                self._total = self._reduction.total()
                self._say_to_all(self._said.confirm(sha256(self._total.data).digest()))
            case State.UNSEALING:
                self._said.check_confirms()
                self._check_told()
                self._on_opening(self._said.confirms[self.me].digest)
                self._unseal()
            case State.FINISHED:
                unseal(self._total, list(self._said.keys.values()))

    def _check_told(self) -> None:
        """Everything is the same here, and a peer says that it is not: somebody told it something else."""
        if self._told is not None:
            raise self._told

    @contextmanager
    def _failing_on_fault(self) -> Iterator[None]:
        try:
            yield
        except (RemoteProtocolError, DisagreementError) as fault:
            self._fault = fault
            self.fail()
            raise

    def _share(self) -> None:
        if self._shares is not None and self._expanded:
            self._shares.add_to(self._subtotal, self.number)
            return
        for place in slices(slice(0, self._subtotal.size)):
            for peer in self.others:
                self._outbox.append((peer, partial(self._draw_share, place)))

    def _draw_share(self, place: slice) -> Share:
        kept = self._subtotal[place]
        share = uniform_words(kept.size, kept.dtype, self._random)
        np.subtract(kept, share, out=kept)
        return Share(place.start, as_bytes(share))

    def _unseal(self) -> None:
        self.unsealed = True
        self._said.keys[self.me] = self._key
        self._say_to_all(RevealKey(self._key))

    # Small words for the above.

    @property
    def _by_hub(self) -> bool:
        return self.state is not State.IDLE and self._spec.opening == "hub"

    @property
    def _expanded(self) -> bool:
        return self._spec.sharing == "expanded"

    @property
    def _unshared(self) -> frozenset[PeerId]:
        """The peers that have not sent all of our share of their secret."""
        whole = slices(slice(0, self._subtotal.size))
        return frozenset(peer for peer, here in self._shared.items() if len(here) < len(whole))

    def _reduce_by(self, dtype: np.dtype[Any]) -> Reduction:
        if self._spec.opening != "hub":
            return MemberReduction(self.me, self.members, self._spec, dtype, self._say)
        if self._hub is None:
            raise InputError("opening is 'hub', and there is none here; a federation file can name one, in [hub]")
        return HubReduction(self.me, self.members, self.number, self._spec, dtype, self._hub, self._say)

    def _say(self, to: PeerId, message: Message) -> None:
        self._outbox.append((to, lambda: message))

    def _say_to_all(self, message: Message) -> None:
        for peer in self.others:
            self._say(peer, message)
