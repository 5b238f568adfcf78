"""Fuzz the parsers of received data: frames, datagrams, reports and certificates.

The first byte of an input selects the reader of the rest. A reader may raise only the errors that its callers catch,
and the result must be the same after it was encoded and decoded again.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from cgd.errors import FrameError
from cgd.secagg import codec
from cgd.secagg.certificates import Certificate, PendingReveal, Terms
from cgd.secagg.positions import PositionReport
from cgd.transport import link

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_INPUT_BYTES = 1 << 16


def one_input(data: bytes) -> None:
    """Read one input; raise the errors that a reader must not raise."""
    if data:
        READERS[data[0] % len(READERS)](data[1:])


def read_frame(data: bytes) -> None:
    """Read a frame as `Membership` does."""
    codec.session_of(data)
    codec.kind_of_frame(data)
    try:
        frame = codec.from_bytes(data, "peer")
    except FrameError:
        return
    written = codec.to_bytes(frame)
    if codec.from_bytes(written, "peer") != frame or codec.to_bytes(codec.from_bytes(written, "peer")) != written:
        raise AssertionError(f"a frame changes when it is encoded and decoded: {frame}")


def read_datagram(data: bytes) -> None:
    """Read a datagram, and pass it to both ends of a link."""
    try:
        datagram = link.from_bytes(data)
    except link.DatagramError:
        return
    if link.from_bytes(datagram.to_bytes()) != datagram:
        raise AssertionError(f"a datagram changes when it is encoded and decoded: {datagram}")
    outbound, inbound = link.OutboundLink(b"outgoing", b"name"), link.InboundLink(b"incoming")
    outbound.enqueue(b"frame")
    for now in (0.0, 1.0):
        outbound.receive(datagram, now)
        outbound.next_datagram(now)
    if datagram.kind.from_sender:
        answer = inbound.on_hello(datagram, b"connection", 0.0)
        accepted = link.Datagram(datagram.kind, datagram.sender, answer.sender, datagram.number, datagram.body)
        inbound.receive(accepted, b"connection", 0.0)


def read_report(data: bytes) -> None:
    """Read a report as `PositionReports.receive` does."""
    try:
        report = PositionReport.from_bytes(data)
    except ValueError:
        return
    if PositionReport.from_bytes(report.to_bytes()) != report:
        raise AssertionError(f"a report changes when it is encoded and decoded: {report}")


def read_terms(data: bytes) -> None:
    """Read the terms of a sum as `agreement` does."""
    try:
        terms = Terms.from_bytes(data)
    except (ValueError, TypeError):
        return
    if Terms.from_bytes(terms.to_bytes()) != terms:
        raise AssertionError(f"terms change when they are encoded and decoded: {terms}")
    terms.differences(Terms.from_bytes(terms.to_bytes()))


def read_ready(data: bytes) -> None:
    """Read the signed content of a `Ready`."""
    try:
        content = codec.read_ready(data)
    except (ValueError, TypeError, KeyError):
        return
    if codec.read_ready(codec.ready_content(*content)) != content:
        raise AssertionError(f"the content of a Ready changes when it is encoded and decoded: {content}")


def read_json(kind: type[Certificate] | type[PendingReveal]) -> Callable[[bytes], None]:
    """Make a reader of certificates or pending reveals, as in a journal."""

    def reader(data: bytes) -> None:
        try:
            value = kind.from_json(json.loads(data))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return
        if kind.from_json(json.loads(json.dumps(value.to_json()))) != value:
            raise AssertionError(f"a value changes when it is encoded and decoded: {value}")

    return reader


class AcceptingKey:
    """A public key that accepts every signature, so that the checks after the signature are reached."""

    def verify(self, statement: bytes, signature: bytes) -> bool:
        """Accept any signature."""
        return len(statement) + len(signature) > 0


ACCEPTING_KEYS: dict[str, Any] = dict.fromkeys(("a", "b", "c"), AcceptingKey())


def check_certificate(data: bytes) -> None:
    """Check a certificate for an entry and a total as `JournalTransfer` does."""
    try:
        value, fields = json.loads(data)
        certificate = Certificate.from_json(value)
        certificate.signers("everyone", ACCEPTING_KEYS)
        certificate.verify_entry(None, fields)
        certificate.verify_total(bytes(min(fields[4], MAX_INPUT_BYTES)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        return


READERS: tuple[Callable[[bytes], None], ...] = (
    read_frame,
    read_datagram,
    read_report,
    read_terms,
    read_ready,
    read_json(Certificate),
    read_json(PendingReveal),
    check_certificate,
)
