"""The states of one secure sum: the tables that `SecureSum` runs on, and that docs/state_diagram.py draws."""

from __future__ import annotations

from enum import Enum, auto

from cgd.secagg.messages import Abort, Confirm, KeyShare, Message, Ready, RevealKey, Share, Subtotal, Total


class State(Enum):
    """The state of a sum."""

    IDLE = auto()
    PREPARING = auto()
    SHARING = auto()
    REDUCING = auto()
    CONFIRMING = auto()
    REVEALING = auto()
    FINISHED = auto()
    FAILED = auto()


class Event(Enum):
    """An event that changes the state."""

    START = "start"
    ALL_READY = "all members are ready"
    ALL_SHARED = "all shares sent and received"
    TOTAL_RECEIVED = "masked total received"
    ALL_CONFIRMED = "all digests are equal"
    ALL_REVEALED = "all keys received"
    FAULT = "fault or abort"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.START): State.PREPARING,
    (State.PREPARING, Event.ALL_READY): State.SHARING,
    (State.SHARING, Event.ALL_SHARED): State.REDUCING,
    (State.REDUCING, Event.TOTAL_RECEIVED): State.CONFIRMING,
    (State.CONFIRMING, Event.ALL_CONFIRMED): State.REVEALING,
    (State.REVEALING, Event.ALL_REVEALED): State.FINISHED,
    (State.IDLE, Event.FAULT): State.FAILED,
    (State.PREPARING, Event.FAULT): State.FAILED,
    (State.SHARING, Event.FAULT): State.FAILED,
    (State.REDUCING, Event.FAULT): State.FAILED,
    (State.CONFIRMING, Event.FAULT): State.FAILED,
    (State.REVEALING, Event.FAULT): State.FAILED,
}

# The messages that an honest peer can send while we are in a state. It may be ahead of us, but before it has our Ready,
# it sends no more than its Ready, a share of its key and one slice of its subtotal, and it reveals its key only when it
# has our digest. An honest reducer sends no total before it has our subtotal; but a peer that received a forged total
# confirms it, and must not be accused of that.
EXPECTED: dict[State, frozenset[type[Message]]] = {
    State.IDLE: frozenset({Ready, KeyShare, Subtotal, Abort}),
    State.PREPARING: frozenset({Ready, Share, KeyShare, Subtotal, Total, Confirm, Abort}),
    State.SHARING: frozenset({Share, KeyShare, Subtotal, Confirm, Abort}),
    State.REDUCING: frozenset({KeyShare, Subtotal, Total, Confirm, Abort}),
    State.CONFIRMING: frozenset({Confirm, RevealKey, Abort}),
    State.REVEALING: frozenset({RevealKey, Abort}),
}
