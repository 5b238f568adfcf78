"""AES-CTR keystreams, by whichever implementation of the counter mode is faster on this processor."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer

BLOCK_BYTES = 16
# GCM encrypts with the counter 2 first: 0 is not used, and 1 is for its tag.
_BEFORE_GCM = 2 * BLOCK_BYTES
_SAMPLE_BYTES, _SAMPLES = 1 << 16, 3


def keystream(key: bytes, position: int) -> Any:
    """Return AES-CTR at block 0 of a position: 2⁶⁴ blocks for each of 2⁶⁴ positions, all different under one key.

    It has the methods `update` and `update_into` of a cipher of `cryptography`; encrypt zeros to read the stream.

    Examples:
        >>> keystream(bytes(16), 1).update(bytes(4)).hex()
        '788bcd11'
    """
    return _GcmKeystream(key, position) if gcm_is_faster() else _counter_mode(key, position)


@cache
def gcm_is_faster() -> bool:
    """Measure whether GCM yields a keystream faster than the counter mode does: both have the same bits.

    On processors with AES for wide vectors (VAES), OpenSSL uses it in GCM only, which is twice as fast there although
    it also computes a tag. On others, GCM is slower.
    """
    streams = _counter_mode(bytes(16), 0), _gcm(bytes(16), 0)
    zeros, buffer, shortest = bytes(_SAMPLE_BYTES), bytearray(_SAMPLE_BYTES + BLOCK_BYTES), [float("inf")] * 2
    for _ in range(_SAMPLES):
        for i, stream in enumerate(streams):
            started = time.perf_counter()
            stream.update_into(zeros, buffer)
            shortest[i] = min(shortest[i], time.perf_counter() - started)
    return shortest[1] < shortest[0]


class _GcmKeystream:
    """The keystream of `_counter_mode`, by GCM from its third block on; GCM ends after 64 GiB."""

    def __init__(self, key: bytes, position: int) -> None:
        self._key, self._position, self._start = key, position, _BEFORE_GCM
        self._stream = _counter_mode(key, position)

    def update_into(self, data: Buffer, buffer: Any) -> int:
        """Encrypt into a buffer of one block more."""
        size = len(data)
        if self._start:
            first = min(self._start, size)
            self._stream.update_into(data[:first], buffer)
            self._start -= first
            if not self._start:
                self._stream = _gcm(self._key, self._position)
            if size == first:
                return size
            data, buffer = data[first:], memoryview(buffer)[first:]
        self._stream.update_into(data, buffer)
        return size

    def update(self, data: bytes) -> bytes:
        """Encrypt."""
        buffer = bytearray(len(data) + BLOCK_BYTES)
        return bytes(buffer[: self.update_into(data, buffer)])


def _counter_mode(key: bytes, position: int) -> Any:
    return Cipher(algorithms.AES(key), modes.CTR(position.to_bytes(8, "big") + bytes(8))).encryptor()


def _gcm(key: bytes, position: int) -> Any:
    """Return GCM whose nonce is the upper 12 bytes of the counter of `_counter_mode`."""
    return Cipher(algorithms.AES(key), modes.GCM(position.to_bytes(8, "big") + bytes(4))).encryptor()
