"""How one secure sum moves: the tables that `SecureSum` runs on; docs/state_diagram.py draws them."""

from __future__ import annotations

from enum import Enum, auto

from cgd.secagg.messages import Abort, Confirm, Message, Ready, RevealKey, Share, Subtotal, Total


class State(Enum):
    """Where a sum stands."""

    IDLE = auto()
    READYING = auto()
    SHARING = auto()
    OPENING = auto()
    CONFIRMING = auto()
    UNSEALING = auto()
    FINISHED = auto()
    FAILED = auto()


class Event(Enum):
    """What moves it on."""

    START = "start"
    ALL_READY = "all ready"
    ALL_SHARED = "all shares given and held"
    ALL_OPENED = "the sealed total here"
    ALL_CONFIRMED = "all digests equal"
    ALL_UNSEALED = "all keys here"
    FAULT = "a fault, an abort"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.START): State.READYING,
    (State.READYING, Event.ALL_READY): State.SHARING,
    (State.SHARING, Event.ALL_SHARED): State.OPENING,
    (State.OPENING, Event.ALL_OPENED): State.CONFIRMING,
    (State.CONFIRMING, Event.ALL_CONFIRMED): State.UNSEALING,
    (State.UNSEALING, Event.ALL_UNSEALED): State.FINISHED,
    (State.IDLE, Event.FAULT): State.FAILED,
    (State.READYING, Event.FAULT): State.FAILED,
    (State.SHARING, Event.FAULT): State.FAILED,
    (State.OPENING, Event.FAULT): State.FAILED,
    (State.CONFIRMING, Event.FAULT): State.FAILED,
    (State.UNSEALING, Event.FAULT): State.FAILED,
}

# What a peer that follows the rules can be saying while we are in a state. It may be ahead of us, but nobody shares
# before our Ready, and nobody shows its key before our digest. That nobody has a total before our subtotal holds only
# if the reducer is honest: a peer that was told a made-up total confirms it, and must not be accused for that.
EXPECTED: dict[State, frozenset[type[Message]]] = {
    State.IDLE: frozenset({Ready, Abort}),
    State.READYING: frozenset({Ready, Share, Subtotal, Confirm, Abort}),
    State.SHARING: frozenset({Share, Subtotal, Confirm, Abort}),
    State.OPENING: frozenset({Subtotal, Total, Confirm, Abort}),
    State.CONFIRMING: frozenset({Confirm, RevealKey, Abort}),
    State.UNSEALING: frozenset({RevealKey, Abort}),
}
