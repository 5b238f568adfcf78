"""One secure sum, as a state machine without I/O.

Every member l holds a secret vector x_l of the ring. At the end every member holds Σ x_l and no member knows more.

The rules:

1. Every member announces its settings and, in a federation, its position in the history (`Ready`). If they differ,
   every member detects it once it has the `Ready` of all, and all members name the same deviating one: the sum fails,
   and what was sent of it stays masked. Before that, a member sends a peer the beginning of the sum at most: its
   `Ready`, a share of its key (with a quorum), and with pairwise masks the first slice of its masked vector. All else
   is sent after this barrier, which bounds the memory of a peer that has not started the sum.
2. A member's subtotal is its secret combined with shares or masks. `uniform`: it splits its secret into shares, keeps
   one, sends every peer another (`Share`), and adds the shares it receives. `pairwise`: it adds the pairwise masks that
   it shares with its peers, which are not sent. It also adds a self-mask, whose key it keeps secret for now.
3. The vector is cut into parts and each part has one reducer: with `mesh` every member reduces one part, with
   `aggregator` one member reduces the whole vector. Every member sends each reducer its part of the subtotal
   (`Subtotal`); the reducer adds them and sends the result to all (`Total`). Shares and pairwise masks cancel in it,
   self-masks do not. With `hub` the reducer is not a member (`Deposit`), and its totals are verified by a MAC. See
   `reduction.py`.
4. Every member sends all members the digest of the masked total and of all `Ready` messages (`Confirm`). A reducer that
   sent different totals is detected here, before anything can be read, and so is a member that sent different `Ready`
   messages. `Ready` and `Confirm` are signed if there is a statement signer.
5. When all digests agree, every member sends all members its self-mask key (`RevealKey`), which must match the
   commitment in its `Ready`. A member that has all keys has the total. As long as one member keeps its key, no member
   can read the total, and the sum can be aborted and repeated. A dishonest member may collect all keys and withhold its
   own; the others then finish the sum in the next view, by its certificate, or repeat it with the same members.
   The hooks for a charge and for the record of the pending reveal are called first, maybe before our last `Confirm`
   has left. A member finishes when it has the keys of all others; its own key may not have left then.
6. Every slice and every other message of a peer counts once; a duplicate has no effect. A message that an honest peer
   could not have sent yet is an error that names the peer.

`states.py` defines the transitions and the expected messages, `reduction.py` the members and parts. Vectors are sent in
slices, each made when it is pulled (`next_outgoing`) and added when it is received.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from functools import partial
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
    RevealError,
)
from cgd.secagg.agreement import SumAgreement
from cgd.secagg.codec import spec_bytes
from cgd.secagg.completion import InterruptedSum
from cgd.secagg.key_shares import deal
from cgd.secagg.masking import PairwiseMasks, add_self_mask, remove_self_masks, uniform_words
from cgd.secagg.messages import (
    HUB,
    SELF_MASK_KEY_BYTES,
    Abort,
    Confirm,
    KeyShare,
    Message,
    Outbox,
    PeerId,
    Ready,
    Reason,
    RevealKey,
    Share,
    Subtotal,
    SumSpec,
    Total,
)
from cgd.secagg.reduction import HubReduction, MemberReduction, add_slice, as_bytes, check_members, check_secret, slices
from cgd.secagg.statements import StatementSigner
from cgd.secagg.states import EXPECTED, TRANSITIONS, Event, State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy.typing as npt

    from cgd.secagg.reduction import HubKeys, Reduction


class SecureSum:
    """One member's side of one sum: messages in by `receive`, messages out by `next_outgoing`.

    Args:
        me: the name of this member.
        members: the names of all members, including this one.
        number: the number of the sum, used once with the same `masks`.
        masks: the masks shared with the peers, for `pairwise` masking.
        random: the source of random bytes for shares and the self-mask key.
        hub: the keys for sums through the hub, if there is one.
        statement_signer: signs and verifies statements; nothing is signed without it.
        on_reveal: called with the digest of the attempt before our self-mask key is sent.
        quorum: the number of members whose shares determine a self-mask key; None to deal no shares.

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
        masks: PairwiseMasks | None = None,
        random: Callable[[int], bytes] = os.urandom,
        hub: HubKeys | None = None,
        statement_signer: StatementSigner | None = None,
        on_reveal: Callable[[bytes], None] = lambda _: None,
        quorum: int | None = None,
    ) -> None:
        check_members(me, members)
        self.me = me
        self.members = tuple(sorted(members))
        self.others = tuple(peer for peer in self.members if peer != me)
        self.number = number
        self.state = State.IDLE
        self.revealed = False
        """True if our key may have been sent: from then on others may know the total, and a fault cannot be undone."""
        self.agreement = SumAgreement(me, self.members, number, statement_signer or StatementSigner())
        """The statements of all members about this sum."""
        self._fault: ProtocolError | None = None
        self._difference: PeerAbortedError | None = None
        self._on_reveal = on_reveal
        self._quorum = quorum
        self._masks = masks
        self._random = random
        self._hub = hub
        self._key = random(SELF_MASK_KEY_BYTES)
        self._key_shares: dict[PeerId, bytes] = {}  # our share of each member's self-mask key
        self._shared: dict[PeerId, set[int]] = {peer: set() for peer in self.others}  # starts of the received shares
        self._early: dict[PeerId, Subtotal] = {}  # the first slices that we received before we started
        self._outbox: Outbox[Callable[[], Message]] = Outbox()

    # Called by a driver.

    def start(
        self,
        spec: SumSpec,
        secret: npt.NDArray[Any],
        terms: bytes = b"",
        before_reveal: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the sum with this member's secret, a flat ring array that the sum modifies.

        `before_reveal` is called before our key is sent; if it raises a `RevealError`, the key is not sent.

        Raises:
            SettingsError: all others are ready, and the settings or terms differ.
            RemoteProtocolError: a peer aborted this sum before.
        """
        if self._fault is not None:
            raise self._fault
        if self.state is not State.IDLE:
            raise LocalProtocolError(f"sum {self.number} was already started ({self.state.name}); start the next one")
        check_secret(spec, secret, self.me, self.members, self._masks)
        self._spec = spec
        self._subtotal = secret
        self._before_reveal = before_reveal
        self._reduction = self._make_reduction(secret.dtype)
        self.agreement.make_ready(spec, self._key, terms)
        with self._failing_on_fault():
            self._transition(Event.START)
            self._advance()

    def receive(self, sender: PeerId, message: Message) -> None:
        """Process one message.

        Raises:
            RemoteProtocolError: the sender violated a rule, aborted, or has another total; the sum has failed.
                A fault before `start` is raised again by `start`.
        """
        if sender not in (*self.others, HUB):
            raise RemoteProtocolError(sender, f"is not a member of this sum ({', '.join(self.members)})")
        if self.state in (State.FINISHED, State.FAILED):
            return
        if sender == HUB and not (isinstance(message, Total) and self._by_hub):
            raise HubError(f"sent {type(message).__name__}, which the hub may not send here")
        if self._is_duplicate(sender, message):
            return
        with self._failing_on_fault():
            if type(message) not in EXPECTED[self.state]:
                raise RemoteProtocolError(
                    sender,
                    f"sent {type(message).__name__} of sum {self.number} too early: this member is {self.state.name}",
                )
            self._process(sender, message)
            self._advance()

    def next_outgoing(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, Message] | None:
        """Return the next recipient and message; return None while there is nothing to send.

        Args:
            blocked: recipients whose messages wait; the messages of each recipient keep their order.
        """
        outgoing = self._outbox.pop(blocked)
        if outgoing is None:
            return None
        to, make = outgoing
        message = make()
        with suppress(RemoteProtocolError, DisagreementError, RevealError), self._failing_on_fault():
            self._advance()  # a fault is in `fault`; the message is sent nevertheless
        return to, message

    def resend(self) -> None:
        """Deposit everything again after the hub lost it, while another member may still need the total."""
        if self.state in (State.PREPARING, State.SHARING, State.REDUCING, State.CONFIRMING):
            self._outbox.discard(lambda to, _: to == HUB)
            self._reduction.resend()

    def fail(self) -> None:
        """Abort the sum and drop all unsent messages."""
        if (self.state, Event.FAULT) in TRANSITIONS:
            self._transition(Event.FAULT)
            self._outbox.clear()

    @property
    def fault(self) -> ProtocolError | None:
        """The fault of a peer that made the sum fail, if any."""
        return self._fault

    @property
    def total(self) -> npt.NDArray[Any]:
        """The total, flat, as ring elements."""
        if self.state is not State.FINISHED:
            raise LocalProtocolError(f"sum {self.number} is {self.state.name}; it has a total when it is FINISHED")
        return self._total

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The missing message, and the peers that have to send it."""
        match self.state:
            case State.PREPARING:
                return "Ready", self.agreement.missing(self.agreement.readies)
            case State.SHARING:
                return "Share", self._unshared
            case State.REDUCING:
                missing = self._reduction.waiting_for
                return missing if missing[1] else ("KeyShare", self._without_key_share)
            case State.CONFIRMING:
                return "Confirm", self.agreement.missing(self.agreement.confirms)
            case State.REVEALING:
                return "RevealKey", self.agreement.missing(self.agreement.revealed_keys)
        return "nothing", frozenset()

    # Received messages.

    def _is_duplicate(self, sender: PeerId, message: Message) -> bool:
        match message:
            case Ready():
                return sender in self.agreement.readies
            case Share(start, _):
                return start in self._shared.get(sender, ())
            case KeyShare():
                return sender in self._key_shares
            case Subtotal() if self.state is State.IDLE:
                return sender in self._early
            case Subtotal() | Total() if self.state is not State.IDLE:
                return self._reduction.is_duplicate(sender, message)
            case Confirm():
                return sender in self.agreement.confirms
            case RevealKey():
                return sender in self.agreement.revealed_keys
        return False

    def _process(self, sender: PeerId, message: Message) -> None:
        if sender not in (HUB, *self.agreement.readies) and not isinstance(message, (Ready, Abort)):
            raise RemoteProtocolError(sender, f"sent {type(message).__name__} of sum {self.number} before its Ready")
        match message:
            case Abort(reason):
                fault = PeerAbortedError(sender, f"aborted sum {self.number}: {reason.text}")
                if reason is Reason.DIFFERS:  # it may have received other statements than we
                    self.agreement.send_evidence()
                if reason is not Reason.DIFFERS or self.state not in (State.IDLE, State.PREPARING, State.CONFIRMING):
                    raise fault
                self._difference = fault  # we detect the deviating member ourselves once we have all statements
            case Ready():
                self.agreement.receive_ready(sender, message)
            case Share():
                if self._pairwise:
                    raise RemoteProtocolError(
                        sender, "sent a Share, but the masks of this sum are pairwise and not sent"
                    )
                add_slice(sender, message, slice(0, self._subtotal.size), self._subtotal)
                self._shared[sender].add(message.start)
            case Subtotal() if self.state is State.IDLE:
                self._early[sender] = message
            case Subtotal() | Total():
                if sender == HUB or self.agreement.readies[sender].spec == self._spec:  # if not, the sum will fail
                    self._reduction.receive(sender, message)
            case KeyShare(share):
                if self._quorum is None:
                    raise RemoteProtocolError(sender, "sent a KeyShare, but there is no quorum")
                self._key_shares[sender] = share
            case Confirm():
                self.agreement.receive_confirm(sender, message)
            case RevealKey(key):
                self.agreement.receive_key(sender, key)

    # State transitions.

    def _advance(self) -> None:
        while (event := self._event()) is not None:
            self._transition(event)

    def _event(self) -> Event | None:
        """Return the event that has occurred in this state, if any."""
        match self.state:
            case State.PREPARING if not self._outbox and not self.agreement.missing(self.agreement.readies):
                return Event.ALL_READY
            case State.SHARING if not self._outbox and (self._pairwise or not self._unshared):
                return Event.ALL_SHARED
            case State.REDUCING if not (self._reduction.waiting_for[1] or self._without_key_share):
                return Event.TOTAL_RECEIVED
            case State.CONFIRMING if not self._outbox and not self.agreement.missing(self.agreement.confirms):
                return Event.ALL_CONFIRMED
            case State.REVEALING if not self.agreement.missing(self.agreement.revealed_keys):
                return Event.ALL_REVEALED
        return None

    def _transition(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]
        match self.state:
            case State.PREPARING:
                self._send_to_all(self.agreement.readies[self.me])
                self._deal_key_shares()
                if self._pairwise:
                    self._start_reduction()
                while self._early:
                    self._process(*self._early.popitem())
            case State.SHARING:
                self.agreement.check_readies()
                self._check_difference()
                if not self._pairwise:
                    self._share()
            case State.REDUCING:
                if not self._pairwise:
                    self._start_reduction()
                self._reduction.proceed()
            case State.CONFIRMING:
                self._total = self._reduction.total()
                if self._quorum is not None:  # others can recover our key from now on
                    self._before_reveal()
                self._send_to_all(self.agreement.make_confirm(self._reduction.digest()))
            case State.REVEALING:
                self.agreement.check_confirms()
                self._check_difference()
                if self._quorum is None:
                    self._before_reveal()
                self._on_reveal(self.agreement.confirms[self.me].digest)
                self._reveal()
            case State.FINISHED:
                remove_self_masks(self._total, list(self.agreement.revealed_keys.values()))

    def _check_difference(self) -> None:
        """Raise the abort of a peer that detected a difference, if we did not: it received other statements."""
        if self._difference is not None:
            raise self._difference

    @contextmanager
    def _failing_on_fault(self) -> Iterator[None]:
        try:
            yield
        except (RemoteProtocolError, DisagreementError, RevealError) as fault:
            self._fault = fault
            self.fail()
            raise

    def _start_reduction(self) -> None:
        if self._masks is not None and self._pairwise:
            self._masks.add_to(self._subtotal, self.number)
        add_self_mask(self._subtotal, self._key)
        self._reduction.start(self._subtotal)

    def _share(self) -> None:
        for part in slices(slice(0, self._subtotal.size)):
            for peer in self.others:
                self._outbox.put(peer, partial(self._draw_share, part))

    def _draw_share(self, part: slice) -> Share:
        own_share = self._subtotal[part]
        share = uniform_words(own_share.size, own_share.dtype, self._random)
        np.subtract(own_share, share, out=own_share)
        return Share(part.start, as_bytes(share))

    def _deal_key_shares(self) -> None:
        if self._quorum is None:
            return
        shares = deal(self._key, self.members, self._quorum, self._random)
        self._key_shares[self.me] = shares[self.me]
        for peer in self.others:
            self._send(peer, KeyShare(shares[peer]))

    @property
    def _without_key_share(self) -> frozenset[PeerId]:
        """The peers that have not sent our share of their self-mask key."""
        return frozenset() if self._quorum is None else self.agreement.missing(self._key_shares)

    def interrupted(self, view: bytes) -> InterruptedSum | None:
        """Return what we have of this sum, if we confirmed it and have not finished it, and there is a quorum."""
        confirms = self.agreement.confirms
        if self._quorum is None or self.me not in confirms or self.state is State.FINISHED:
            return None
        own, readies = confirms[self.me], self.agreement.readies
        return InterruptedSum(
            view,
            self.number,
            spec_bytes(self._spec),
            readies[self.me].terms,
            self.agreement.masked_digest,
            {name: readies[name].commitment for name in self.members},
            {name: each.signature for name, each in confirms.items() if each.digest == own.digest},
            {**self.agreement.revealed_keys, self.me: self._key},
            {name: {self.me: share} for name, share in self._key_shares.items()},
            self._total,
        )

    def _reveal(self) -> None:
        self.revealed = True
        self.agreement.revealed_keys[self.me] = self._key
        self._send_to_all(RevealKey(self._key))

    # Helpers.

    @property
    def _by_hub(self) -> bool:
        return self.state is not State.IDLE and self._spec.opening == "hub"

    @property
    def _pairwise(self) -> bool:
        return self._spec.masking == "pairwise"

    @property
    def _unshared(self) -> frozenset[PeerId]:
        """The peers that have not sent our whole share of their secret."""
        count = len(slices(slice(0, self._subtotal.size)))
        return frozenset(peer for peer, starts in self._shared.items() if len(starts) < count)

    def _make_reduction(self, dtype: np.dtype[Any]) -> Reduction:
        if self._spec.opening != "hub":
            return MemberReduction(self.me, self.members, self._spec, dtype, self._send)
        if self._hub is None:
            raise InputError("opening is 'hub', but there is no hub; a federation file can name one in [hub]")
        return HubReduction(self.me, self.members, self.number, self._spec, dtype, self._hub, self._send)

    def _send(self, to: PeerId, message: Message) -> None:
        self._outbox.put(to, lambda: message)

    def _send_to_all(self, message: Message) -> None:
        for peer in self.others:
            self._send(peer, message)
