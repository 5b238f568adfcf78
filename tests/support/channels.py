"""Encrypted channels between processes of a, b and c, without a hub."""

from __future__ import annotations

import zmq

from cgd.transport.channel import Channel, ChannelFactory

PAIRS = {name: zmq.curve_keypair() for name in ("a", "b", "c")}
PUBLIC = {name: public for name, (public, _) in PAIRS.items()}
SECRET = b"a secret that only the peer may read"


def new_process(name: str, keys: dict[str, bytes] = PUBLIC) -> ChannelFactory:
    return ChannelFactory(name, PAIRS[name][1], dict(keys))


def complete_handshake(initiator: Channel, responder: Channel) -> tuple[bytes, bytes]:
    """Complete a handshake; return its two messages."""
    first = initiator.start_handshake()
    second = responder.open(first, 1).answer
    assert second is not None
    assert initiator.open(second, 1).content is None
    return first, second


class Ends:
    """The ends of a and b, with a session that a has started."""

    def __init__(self, a: ChannelFactory | None = None, b: ChannelFactory | None = None) -> None:
        self.a, self.b = a or new_process("a"), b or new_process("b")
        self.out: Channel = self.a.with_peer("b")
        self.into: Channel = self.b.with_peer("a")
        self.handshake = complete_handshake(self.out, self.into)

    def seal(self, content: bytes = SECRET, connection: int = 1) -> bytes:
        sealed = self.out.seal(content, self.b.process, connection)
        assert sealed is not None
        return bytes(sealed)
