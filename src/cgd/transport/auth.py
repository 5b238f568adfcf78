"""Authentication of connections by CURVE keys, and the log of rejected messages.

CURVE encrypts a connection and proves that its client has the secret key of a public key. ZeroMQ asks the
`ZapAuthenticator` whether that public key is listed, by its authentication protocol (ZAP, RFC 27). An accepted
connection keeps its key, so every message that arrives on it belongs to that key. Messages from removed keys are
dropped.
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
# At most one line for each kind of rejection in this time, with a count: a flood must not fill the disk.
SECONDS_BETWEEN_LINES = 10.0
# Names for senders that are not participants, in the log and in `RejectionLog.counts`.
UNKNOWN_CLIENT = "an unknown client"
FORMER_PARTICIPANT = "a former participant"


class RejectionLog:
    """Counts rejected messages and connections, and logs them at a limited rate.

    Attributes:
        counts: the number of rejections, by sender and kind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self._clock = clock
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def add(
        self,
        sender: str,
        kind: str,
        detail: str = "",
        level: int = logging.WARNING,
        error: Exception | None = None,
        event: str = "refused",
        count: int = 1,
    ) -> None:
        """Record a rejection, or several of a kind. There are few senders and kinds, so the memory stays small.

        Args:
            sender: the sender.
            kind: what was rejected.
            detail: the reason in this case.
            level: the level of the line in the log.
            error: the exception that cgd raised; the line gets its traceback.
            event: "refused", or "missed" for messages that did not arrive.
            count: the number of rejections.
        """
        key = sender, kind
        self.counts[key] = self.counts.get(key, 0) + count
        logged_at, logged_count = self._logged.get(key, (-SECONDS_BETWEEN_LINES, 0))
        now = self._clock()
        if now - logged_at < SECONDS_BETWEEN_LINES:
            return
        new = self.counts[key] - logged_count
        self._logged[key] = now, self.counts[key]
        times = f", {new} times since the last such line" if new > 1 else ""
        reason = f" ({detail})" if detail else ""
        log.log(
            level,
            "%s %s from %s%s%s", event, kind, sender, reason, times,
            extra={"event": event, "peer": sender, "what": kind, "count": self.counts[key]},
            exc_info=error,
        )  # fmt: skip

    def catch_errors(self, sender: str) -> ErrorCatcher:
        """Return a context manager that records an exception as a rejection: no message must end the process."""
        return ErrorCatcher(self, sender)


class ErrorCatcher:
    """The context manager of `RejectionLog.catch_errors`.

    It is a class because a generator for each message would cost a tenth of a small sum.
    """

    __slots__ = ("_rejections", "_sender")

    def __init__(self, rejections: RejectionLog, sender: str) -> None:
        self._rejections, self._sender = rejections, sender

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        what = "a message that cgd failed on"
        self._rejections.add(self._sender, what, type(error).__name__, logging.ERROR, error)
        return True


class ZapAuthenticator:
    """Answers ZeroMQ's requests to authenticate a key.

    Args:
        context: the context of the protected sockets.
        names: the participant of each accepted public key.
        rejections: logs connections with other keys.
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
        """Answer one request."""
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
            self._rejections.add(UNKNOWN_CLIENT, "a connection", detail)
            self.socket.send_multipart([version, number, b"400", b"this key is not listed", b"", b""])
        else:
            self.socket.send_multipart([version, number, b"200", b"OK", key, b""])

    def member_of(self, message: Message) -> PeerId | None:
        """Return the participant whose key a message came with; None if the key is no longer listed."""
        return self.names.get(str(message.last.get("User-Id")).encode())


class HandshakeMonitor:
    """Logs clients that fail in the handshake: ZeroMQ asks the authenticator about keys only.

    Args:
        rejections: logs failed handshakes.
        limits: counts the connections.
    """

    def __init__(self, rejections: RejectionLog, limits: ConnectionLimits) -> None:
        self._rejections = rejections
        self._limits = limits
        self._ended = 0  # the number of handshakes whose end was reported
        self._ended_before: dict[int, int] = {}  # by descriptor: the value of `_ended` when it was accepted

    def process_events(self, monitor: zmq.Socket[bytes], limit: int) -> None:
        """Read and process at most `limit` events of the monitor."""
        for _ in range(limit):
            if not monitor.poll(0):
                return
            message = recv_monitor_message(monitor)
            event, value = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._ended_before[value] = self._ended
                self._limits.on_accepted(value)
            elif event != zmq.EVENT_DISCONNECTED:
                self._ended += 1
                if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                    self._reject("it does not use CURVE, or expects another key than ours")
            else:
                self._limits.on_closed(value)
                if self._ended_before.pop(value, -1) == self._ended:  # no handshake ended meanwhile, so not its own
                    self._reject("it does not use our protocol")

    def _reject(self, reason: str) -> None:
        self._rejections.add(UNKNOWN_CLIENT, "a handshake", reason)


# The reasons for a failed connection attempt, by the event that ZeroMQ reports; the address is appended.
CONNECT_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses our key: our key is not in its federation file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not use CURVE, or has another key than in our file",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "it closed the connection in the handshake: it has another key than in our file, or is not cgd"
    ),
    zmq.EVENT_CLOSED: "nobody answers there",  # refused; see NO_REPLY
    zmq.EVENT_CONNECT_RETRIED: "its address is not known here: no such host, or no name service",
}
# ZeroMQ reports only that the connection ended if there was no handshake, or after one.
NOT_CGD = "something answers there that is not cgd"
# The same event, after the whole time for a connection: not even a refusal has arrived.
NO_REPLY = "no reply at all from there: its machine is off, its address is wrong, or a firewall drops our connection"
CONNECTION_LOST = "the connection was lost"
