"""The bytes of messages: a fixed header and a body, parsed by hand and checked byte for byte.

Received bytes are never unpickled or evaluated.

    offset  bytes  field
    0       3      "CGD"
    3       1      version of this format
    4       1      kind of message
    5       3      zero
    8       16     session
    24      8      number of the sum in the session, little-endian
    32      8      start of a slice in its vector, little-endian; 0 in other messages
    40      8      length of the body, little-endian
    48      …      body

The frame does not contain the sender: the transport authenticates it, so a member cannot pose as another one.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cgd.errors import FrameError
from cgd.secagg.buffers import pool
from cgd.secagg.messages import (
    CONTRIBUTION_BYTES,
    DIGEST_BYTES,
    EPHEMERAL_BYTES,
    KEY_SHARE_BYTES,
    MASKINGS,
    MAX_NAME_BYTES,
    OPENINGS,
    SELF_MASK_KEY_BYTES,
    SIGNATURE_BYTES,
    TAG_BYTES,
    Abort,
    Attendance,
    Buffer,
    CompleteSum,
    Confirm,
    Deposit,
    Goodbye,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    KeyShare,
    Leave,
    Message,
    PeerId,
    PositionsGathered,
    Ready,
    Reason,
    ResendRequest,
    RevealKey,
    Share,
    SignedEvidence,
    Slice,
    Subtotal,
    SumSpec,
    Total,
)

VERSION = 3
MAX_DIMENSIONS = 64
MAX_TERMS_BYTES = 4096
MAX_ATTENDANCE = 1 << 39
_MAGIC = b"CGD"
_HEADER = struct.Struct("<3sBB3x16sQQQ")
_SPEC = struct.Struct("<BBBB?B")
_SESSION = slice(8, 24)
_CHUNK = struct.Struct("<QB")
_DEPOSIT = struct.Struct("<BB")
_TERMS = struct.Struct("<H")

# The index in this tuple, from 1, is the number of the kind on the wire.
KINDS: tuple[type[Message], ...] = (
    *(Ready, Share, Subtotal, Total, Confirm, RevealKey, Abort, Leave),
    *(Hello, JournalPosition, JournalRequest, JournalChunk, Goodbye),
    *(Deposit, ResendRequest, SignedEvidence, PositionsGathered),
    *(KeyShare, Attendance, CompleteSum),
)


@dataclass(frozen=True)
class Frame:
    """A message with the session and the number of the sum it belongs to."""

    session: bytes
    number: int
    message: Message


def to_bytes(frame: Frame) -> bytes:
    """Encode a frame as one object; `encode` costs less."""
    return bytes(encode(frame))


def encode(frame: Frame) -> Buffer:
    """Encode a frame; a slice is copied once, into a buffer of the pool."""
    body = _body(frame.message)
    length = memoryview(body).nbytes
    kind = KINDS.index(type(frame.message)) + 1
    start = frame.message.start if isinstance(frame.message, Slice | JournalChunk | Deposit) else 0
    return pool.join(_HEADER.pack(_MAGIC, VERSION, kind, frame.session, frame.number, start, length), body)


def session_of(data: Buffer) -> bytes:
    """Return the session field of a frame, without checking anything."""
    return bytes(data[_SESSION])


def kind_of_frame(data: Buffer) -> type[Message] | None:
    """Return the message type of a frame, or None if it is unknown, without checking anything else."""
    kind = data[4] if len(data) >= _HEADER.size else 0
    return KINDS[kind - 1] if 1 <= kind <= len(KINDS) else None


def from_bytes(data: Buffer, sender: PeerId) -> Frame:
    """Decode a frame from `sender`.

    Raises:
        FrameError: the bytes are not a frame of this version; the error names the sender and the fault.
    """
    if len(data) < _HEADER.size:
        raise FrameError(sender, f"sent {len(data)} bytes, a frame has at least {_HEADER.size}: truncated")
    magic, version, kind, session, number, start, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise FrameError(sender, f"sent bytes that begin with {magic!r}, not a frame of cgd")
    if version != VERSION:
        raise FrameError(sender, f"uses protocol version {version}, this member uses {VERSION}; install the same cgd")
    if not 1 <= kind <= len(KINDS):
        raise FrameError(sender, f"sent a message of unknown kind {kind}")
    body = memoryview(data)[_HEADER.size :]
    if len(body) != length:
        fault = "truncated" if len(body) < length else "oversized"
        raise FrameError(sender, f"sent a frame of {len(body)} body bytes that declares {length}: {fault}")
    try:
        return Frame(session, number, _read_message(KINDS[kind - 1], start, body))
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        raise FrameError(sender, f"sent a malformed {KINDS[kind - 1].__name__}: {error}") from None


def _body(message: Message) -> Buffer:
    match message:
        case Ready(spec, commitment, terms, signature):
            return signature + ready_content(spec, commitment, terms)
        case Share(_, words) | Subtotal(_, words) | Total(_, words):
            return words
        case Confirm(digest, signature):
            return signature + digest
        case RevealKey(key):
            return key
        case KeyShare(share):
            return share
        case Abort(reason):
            return bytes([reason])
        case Leave() | ResendRequest():
            return b""
        case Hello():
            return message.signature + message.knows + hello_content(message)
        case JournalPosition(content, signature, tag, contributions, hellos):
            rest = (
                content.decode(),
                [(name, part.hex()) for name, part in contributions],
                [(name, key.hex(), sign.hex()) for name, key, sign in hellos],
            )
            return signature + tag + json.dumps(rest).encode()
        case PositionsGathered(digest):
            return digest
        case SignedEvidence(kind, slot, statements):
            signed = [(name, content.hex(), sign.hex()) for name, content, sign in statements]
            return slot + json.dumps([kind, signed]).encode()
        case JournalRequest(group, since, states):
            return json.dumps([group, since, states]).encode()
        case JournalChunk(_, group, size, words):
            name = group.encode()
            return b"".join((_CHUNK.pack(size, len(name)), name, words))
        case Goodbye(done, ends):
            return bytes([done]) + json.dumps([(name, count, digest.hex()) for name, count, digest in ends]).encode()
        case Attendance(number, members, processes, absent, begun):
            return json.dumps([number, members, processes.hex(), absent, begun]).encode()
        case CompleteSum(group, content):
            return json.dumps([group, content.decode()]).encode()
        case Deposit(_, group, bits, words):  # words first, so that they are aligned
            name = group.encode()
            return b"".join((words, name, _DEPOSIT.pack(len(name), bits)))


def _read_message(kind: type[Message], start: int, body: memoryview) -> Message:
    if kind is Share or kind is Subtotal or kind is Total:
        return kind(start, body)
    if kind is JournalChunk:
        return _read_chunk(start, body)
    if kind is Deposit:
        return _read_deposit(start, body)
    _expect(start == 0, f"it is not a slice, but has the start {start}")
    if kind is Ready:
        return Ready(*read_ready(bytes(body[SIGNATURE_BYTES:])), bytes(body[:SIGNATURE_BYTES]))
    if kind is JournalPosition:
        return _read_position(bytes(body))
    if kind is SignedEvidence:
        return _read_evidence(bytes(body))
    if kind is PositionsGathered:
        _expect(len(body) == DIGEST_BYTES, f"{len(body)} bytes, a digest has {DIGEST_BYTES}")
        return PositionsGathered(bytes(body))
    if kind is Hello:
        return _read_hello(bytes(body))
    if kind is Confirm:
        size = SIGNATURE_BYTES + DIGEST_BYTES
        _expect(len(body) == size, f"{len(body)} bytes, a signed digest has {size}")
        return Confirm(bytes(body[SIGNATURE_BYTES:]), bytes(body[:SIGNATURE_BYTES]))
    if kind is RevealKey:
        _expect(len(body) == SELF_MASK_KEY_BYTES, f"{len(body)} bytes, a key has {SELF_MASK_KEY_BYTES}")
        return RevealKey(bytes(body))
    if kind is Abort:
        _expect(len(body) == 1, f"{len(body)} bytes, a reason has 1")
        return Abort(Reason(body[0]))
    if kind is Leave or kind is ResendRequest:
        _expect(len(body) == 0, f"{len(body)} bytes, it has none")
        return kind()
    if kind is KeyShare:
        _expect(len(body) == KEY_SHARE_BYTES, f"{len(body)} bytes, a share has {KEY_SHARE_BYTES}")
        return KeyShare(bytes(body))
    if kind is Attendance:
        number, members, processes, absent, begun = json.loads(bytes(body))
        _expect(isinstance(begun, bool), "begun is not true or false")
        _expect(_count(number) < MAX_ATTENDANCE, f"the number {number} is too large")
        return Attendance(number, _names(members), _hex(processes, DIGEST_BYTES), _names(absent), begun)
    if kind is CompleteSum:
        group, content = json.loads(bytes(body))
        _expect(isinstance(content, str), "its content is not a text")
        return CompleteSum(_text(group), content.encode())
    if kind is Goodbye:
        _expect(len(body) > 1 and body[0] < 2, "done is neither 0 nor 1")
        ends = json.loads(bytes(body[1:]))
        return Goodbye(bool(body[0]), tuple((_text(name), _count(count), _hex(end, 32)) for name, count, end in ends))
    group, since, states = json.loads(bytes(body))
    _expect(isinstance(states, bool), "states is not true or false")
    return JournalRequest(_text(group), _count(since), states)


def ready_content(spec: SumSpec, commitment: bytes, terms: bytes) -> bytes:
    """Encode the content of a `Ready`, which its signature covers."""
    return b"".join((commitment, _TERMS.pack(len(terms)), terms, spec_bytes(spec)))


def hello_content(hello: Hello) -> bytes:
    """Encode the content of a `Hello`, which its signature covers."""
    return hello.ephemeral + json.dumps((hello.version, hello.federation, hello.epoch, hello.sections)).encode()


def read_ready(content: bytes) -> tuple[SumSpec, bytes, bytes]:
    """Decode the result of `ready_content`: the settings, the commitment and the terms.

    Raises:
        ValueError: it is malformed.
    """
    commitment, rest = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    _expect(len(rest) >= _TERMS.size, "it is truncated")
    (length,) = _TERMS.unpack_from(rest)
    _expect(length <= MAX_TERMS_BYTES and len(rest) >= _TERMS.size + length, f"terms of {length} bytes")
    return read_spec(rest[_TERMS.size + length :]), commitment, rest[_TERMS.size : _TERMS.size + length]


def _read_hello(body: bytes) -> Hello:
    signature, knows = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES : SIGNATURE_BYTES + EPHEMERAL_BYTES]
    content = body[SIGNATURE_BYTES + EPHEMERAL_BYTES :]
    version, federation, epoch, sections = json.loads(content[EPHEMERAL_BYTES:])
    _expect(len(sections) <= MAX_DIMENSIONS, f"{len(sections)} sections, at most {MAX_DIMENSIONS}")
    return Hello(
        content[:EPHEMERAL_BYTES],
        knows,
        _text(version),
        _text(federation),
        _count(epoch),
        tuple((_text(name), _text(digest)) for name, digest in sections),
        signature,
    )


def _read_position(body: bytes) -> JournalPosition:
    signature, tag = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES : SIGNATURE_BYTES + TAG_BYTES]
    content, contributions, hellos = json.loads(body[SIGNATURE_BYTES + TAG_BYTES :])
    _expect(isinstance(content, str), "a report is not a text")
    return JournalPosition(
        content.encode(),
        signature,
        tag,
        tuple((_text(name), _hex(part, CONTRIBUTION_BYTES)) for name, part in contributions),
        tuple((_text(name), _hex(key, EPHEMERAL_BYTES), _hex(sign, SIGNATURE_BYTES)) for name, key, sign in hellos),
    )


def _read_evidence(body: bytes) -> SignedEvidence:
    kind, signed = json.loads(body[DIGEST_BYTES:])
    statements = tuple(
        (_text(name), _hex(content, DIGEST_BYTES), _hex(sign, SIGNATURE_BYTES)) for name, content, sign in signed
    )
    return SignedEvidence(_text(kind), body[:DIGEST_BYTES], statements)


def _read_chunk(start: int, body: memoryview) -> JournalChunk:
    size, length = _CHUNK.unpack_from(body)
    _expect(len(body) >= _CHUNK.size + length, "a name is truncated")
    words = body[_CHUNK.size + length :]
    _expect(start + len(words) <= size, f"{len(words)} bytes from {start} on are more than {size}")
    return JournalChunk(start, _text(bytes(body[_CHUNK.size : _CHUNK.size + length])), size, words)


def _read_deposit(start: int, body: memoryview) -> Deposit:
    length, bits = _DEPOSIT.unpack_from(body, len(body) - _DEPOSIT.size)
    end = len(body) - _DEPOSIT.size - length
    _expect(end > 0, "a name is truncated, or nothing is deposited")
    _expect(bits in (16, 32, 64) and end % (bits // 8) == 0, f"{end} bytes in a ring of {bits} bits")
    return Deposit(start, _text(bytes(body[end : end + length])), bits, body[:end])


@lru_cache(maxsize=64)  # called again for every message of a sum
def spec_bytes(spec: SumSpec) -> bytes:
    """Encode the settings of a sum."""
    names = [spec.dtype.encode(), spec.aggregator.encode(), spec.context.encode()]
    return b"".join(
        (
            _SPEC.pack(
                spec.ring_bits,
                spec.fraction_bits,
                MASKINGS.index(spec.masking),
                OPENINGS.index(spec.opening),
                spec.weighted,
                len(spec.shape),
            ),
            struct.pack(f"<{len(spec.shape)}Q", *spec.shape),
            *(bytes([len(name)]) + name for name in names),
        )
    )


def read_spec(body: bytes) -> SumSpec:
    """Decode the result of `spec_bytes`; raise a ValueError if it is malformed."""
    _expect(len(body) >= _SPEC.size, "the settings are truncated")
    ring_bits, fraction_bits, masking, opening, weighted, dimensions = _SPEC.unpack_from(body)
    _expect(ring_bits in (16, 32, 64), f"ring of {ring_bits} bits")
    _expect(masking < len(MASKINGS) and opening < len(OPENINGS), "unknown masking or opening")
    _expect(dimensions <= MAX_DIMENSIONS, f"{dimensions} dimensions, at most {MAX_DIMENSIONS}")
    _expect(len(body) >= _SPEC.size + 8 * dimensions, "the settings are truncated")
    shape = struct.unpack_from(f"<{dimensions}Q", body, _SPEC.size)
    dtype, rest = _name(body[_SPEC.size + 8 * dimensions :])
    aggregator, rest = _name(rest)
    context, rest = _name(rest)
    _expect(not rest, f"{len(rest)} bytes too many")
    kinds = MASKINGS[masking], OPENINGS[opening]
    return SumSpec(shape, dtype, ring_bits, fraction_bits, *kinds, aggregator, context, weighted)


def _name(body: bytes) -> tuple[str, bytes]:
    _expect(len(body) > 0 and len(body) > body[0], "a name is truncated")
    name = body[1 : 1 + body[0]].decode()
    _expect(name == "" or name.isprintable(), "a name has unprintable characters")
    return name, body[1 + body[0] :]


def _text(value: object) -> str:
    text = value.decode() if isinstance(value, bytes) else value
    _expect(
        isinstance(text, str) and text.isprintable() and len(text.encode()) <= MAX_NAME_BYTES,
        "a text is not a valid name",
    )
    return str(text)


def _names(value: object) -> tuple[str, ...]:
    _expect(isinstance(value, list), "the names are not a list")
    return tuple(_text(each) for each in value)  # type: ignore[attr-defined]


def _count(value: object) -> int:
    _expect(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63, "a number is not a valid count"
    )
    return int(value)  # type: ignore[call-overload,no-any-return]


def _hex(value: Any, size: int) -> bytes:
    data = bytes.fromhex(value)
    _expect(len(data) == size, f"{len(data)} bytes instead of {size}")
    return data


def _expect(condition: bool, error: str) -> None:
    if not condition:
        raise ValueError(error)
