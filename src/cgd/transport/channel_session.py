"""One session of a channel (`channel.py`): encryption under the keys of one handshake, and sequence numbers.

No I/O here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cgd.secagg.buffers import pool
from cgd.secagg.noise import TAG_BYTES, nonce

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer

_NUMBERS_PER_CONNECTION = 1 << 40
MAX_CONNECTIONS = 64


class SequenceError(ValueError):
    """The sequence number of a message is not above the last one."""


class ChannelSession:
    """Both directions between our process and one process of the peer, under the keys of one handshake.

    Args:
        name: the name of the session.
        process: the process of the peer.
        keys: the keys for encryption and for decryption.
    """

    def __init__(self, name: bytes, process: bytes, keys: tuple[bytes, bytes]) -> None:
        self.name, self.process = name, process
        self._encryption, self._decryption = (AESGCM(key) for key in keys)
        self._sent = (0, 0)  # our connection, and the number of messages sent by it
        self._last: dict[int, int] = {}  # the number of the peer's last message, by its connection to the hub
        self._received_by = 0  # our connection by which that message came

    def next_sequence(self, connection: int) -> int:
        """Return the sequence number of the next message on our connection; each is unique."""
        number = self._sent[1] if self._sent[0] == connection else 0
        self._sent = connection, number + 1
        return connection * _NUMBERS_PER_CONNECTION + number

    def encrypt(self, sequence: int, content: Buffer, header: bytes) -> Buffer:
        """Encrypt a transport message; return it after its header."""
        message = pool.take(len(header) + len(content) + TAG_BYTES)
        message[: len(header)] = header
        self._encryption.encrypt_into(nonce(sequence), content, header, message[len(header) :])
        return message.toreadonly()

    def decrypt(self, sequence: int, body: Buffer, header: bytes) -> Buffer:
        """Decrypt a transport message.

        Raises:
            ValueError: it was not created by the peer.
        """
        try:
            if len(body) < TAG_BYTES:
                raise InvalidTag
            content = pool.take(len(body) - TAG_BYTES)
            self._decryption.decrypt_into(nonce(sequence), body, header, content)
        except InvalidTag:
            raise ValueError("the authentication tag is wrong") from None
        return content.toreadonly()

    def check_sequence(self, sequence: int, connection: int) -> int | None:
        """Record a message that came by our connection `connection`; return the number of messages lost before it.

        Return None if it is late: the sender has replaced the connection by which it sent it.

        Raises:
            SequenceError: its number is not above the last one of its connection.
        """
        sent_by, number = divmod(sequence, _NUMBERS_PER_CONNECTION)
        first, latest, last = not self._last, max(self._last, default=0), self._last.get(sent_by, -1)
        if number <= last:
            raise SequenceError
        self._last[sent_by] = number
        if len(self._last) > MAX_CONNECTIONS:
            del self._last[min(self._last)]  # further messages of that connection are late, whatever their numbers
        if sent_by < latest:
            return None
        same_connection, self._received_by = not first and connection == self._received_by, connection
        return number - last - 1 if same_connection else 0
