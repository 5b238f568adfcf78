"""Who is let in: CURVE keys, and a log of what was refused.

CURVE encrypts a connection and proves that its client has the secret key of a public key. Whether that key is one of
ours is asked here, by ZeroMQ's authentication protocol (ZAP, RFC 27). An accepted connection carries its key from then
on, so what arrives on it is bound to the key, whatever it says, and a key that is listed no more is heard no more.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd.secagg.messages import PeerId
    from cgd.transport.connections import Message
    from cgd.transport.limits import ConnectionLimits

log = logging.getLogger("cgd.transport")

DOMAIN = b"cgd"
# One line for each kind of refusal in this many seconds, with a count: a flood must not fill the disk.
SECONDS_BETWEEN_LINES = 10.0


class RejectionLog:
    """Counts what is refused and says so now and then.

    Attributes:
        counts: how often each kind of thing was refused, from whom.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self._clock = clock
        self._told: dict[tuple[str, str], tuple[float, int]] = {}

    def add(
        self, who: str, what: str, detail: str = "", level: int = logging.WARNING, fault: Exception | None = None
    ) -> None:
        """Refuse `what` from `who`; strangers and kinds are few, so the memory stays small.

        Args:
            who: the sender.
            what: the kind.
            detail: what is known of this one.
            level: of the line in the log.
            fault: what went wrong in our program; the line gets its traceback.
        """
        key = who, what
        self.counts[key] = self.counts.get(key, 0) + 1
        when, count = self._told.get(key, (-SECONDS_BETWEEN_LINES, 0))
        now = self._clock()
        if now - when < SECONDS_BETWEEN_LINES:
            return
        news = self.counts[key] - count
        self._told[key] = now, self.counts[key]
        times = f", {news} times since the last such line" if news > 1 else ""
        more = f" ({detail})" if detail else ""
        log.log(
            level,
            "refused %s from %s%s%s", what, who, more, times,
            extra={"event": "refused", "peer": who, "what": what, "count": self.counts[key]},
            exc_info=fault,
        )  # fmt: skip

    def guard(self, who: str) -> Guard:
        """Refuse what `who` sent if our program fails on it: whatever that is, it must not end the process."""
        return Guard(self, who)


class Guard:
    """Context manager of `RejectionLog.guard`, as a class: a generator for each message costs a tenth of a small sum."""

    __slots__ = ("_rejections", "_who")

    def __init__(self, rejections: RejectionLog, who: str) -> None:
        self._rejections, self._who = rejections, who

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, traceback: object) -> bool:
        if not isinstance(fault, Exception):
            return False
        what = "a message that cgd failed on"
        self._rejections.add(self._who, what, type(fault).__name__, logging.ERROR, fault)
        return True


class ZapAuthenticator:
    """Answers ZeroMQ's question whether a key may come in.

    Args:
        context: of the sockets to be guarded.
        names: the participant of each public key that may.
        refusals: where strangers are told.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], names: Mapping[bytes, PeerId], rejections: RejectionLog
    ) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self.names = names
        self._rejections = rejections

    def handle_request(self) -> None:
        """Answer one question."""
        request = self.socket.recv_multipart()
        version, number, _domain, address, _identity, mechanism, *credentials = request
        name, key = None, b""
        if mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0])
            name = self.names.get(key)
            detail = f"key {key.decode()} at {address.decode(errors='replace')} is not in the federation file"
        else:
            detail = f"mechanism {mechanism!r}"
        if name is None:
            self._rejections.add("a stranger", "a connection", detail)
            self.socket.send_multipart([version, number, b"400", b"this key is not listed", b"", b""])
        else:
            self.socket.send_multipart([version, number, b"200", b"OK", key, b""])

    def member_of(self, message: Message) -> PeerId | None:
        """Return whose key a message came with; None if that is not listed any more."""
        return self.names.get(str(message.last.get("User-Id")).encode())


class HandshakeMonitor:
    """Watches who comes to the door and gets no further than the handshake: ZeroMQ asks the gate about keys only.

    Args:
        refusals: where strangers are told.
        watch: told of their connections.
    """

    def __init__(self, rejections: RejectionLog, limits: ConnectionLimits) -> None:
        self._rejections = rejections
        self._limits = limits
        self._ended = 0  # handshakes whose end was reported
        self._came: dict[int, int] = {}  # connections by their descriptor: how many handshakes had ended before

    def note(self, monitor: zmq.Socket[bytes], most: int) -> None:
        """Take in what ZeroMQ reports, at most so much."""
        for _ in range(most):
            if not monitor.poll(0):
                return
            message = recv_monitor_message(monitor)
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._came[value] = self._ended
                self._limits.accepted(value)
            elif event != zmq.EVENT_DISCONNECTED:
                self._ended += 1
                if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                    self._refuse("it does not speak CURVE, or seeks another key than ours")
            else:
                self._limits.closed(value)
                if self._came.pop(value, -1) == self._ended:  # none ended while it was here, so its own did not
                    self._refuse("it does not speak our protocol")

    def _refuse(self, why: str) -> None:
        self._rejections.add("a stranger", "a handshake", why)


# What a failed connection attempt means, in words, by the event that ZeroMQ reports; the address is put behind it.
WHY_NOT = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses our key: our key is not in its federation file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak CURVE, or has another key than our file says",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "it hung up in the handshake: it has another key than our file says, or is not cgd"
    ),
    zmq.EVENT_CLOSED: "nobody answers there",
    zmq.EVENT_CONNECT_RETRIED: "its address is not known here: no such host, or no name service",
}
# ZeroMQ says no more than that the connection ended when it came to no handshake, or after one.
NO_HANDSHAKE = "something answers there that is not cgd"
BROKEN = "the connection broke"
