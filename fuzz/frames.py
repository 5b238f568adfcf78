"""Fuzz what comes from the network: frames, datagrams, reports and proofs.

The first byte of an input says which reader gets the rest. Each reader may raise the errors that its callers catch, and
no others; and what it has read must be the same after it was written and read again.
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
    """Read one input; raise what the readers should not raise."""
    if data:
        READERS[data[0] % len(READERS)](data[1:])


def read_frame(data: bytes) -> None:
    """Read a frame as an assembly does."""
    codec.session_of(data)
    codec.kind_of_frame(data)
    try:
        frame = codec.from_bytes(data, "peer")
    except FrameError:
        return
    written = codec.to_bytes(frame)
    if codec.from_bytes(written, "peer") != frame or codec.to_bytes(codec.from_bytes(written, "peer")) != written:
        raise AssertionError(f"a frame is another one after it was written: {frame}")


def read_datagram(data: bytes) -> None:
    """Read a datagram, and give it to both ends of a link."""
    try:
        datagram = link.from_bytes(data)
    except link.DatagramError:
        return
    if link.from_bytes(datagram.to_bytes()) != datagram:
        raise AssertionError(f"a datagram is another one after it was written: {datagram}")
    outgoing, incoming = link.Outgoing(b"outgoing", b"name"), link.Incoming(b"incoming")
    outgoing.offer(b"frame")
    for now in (0.0, 1.0):
        outgoing.take(datagram, now)
        outgoing.next_datagram(now)
    if datagram.kind.from_sender:
        answer = incoming.hello(datagram, b"channel", 0.0)
        welcomed = link.Datagram(datagram.kind, datagram.sender, answer.sender, datagram.number, datagram.body)
        incoming.take(welcomed, b"channel", 0.0)


def read_report(data: bytes) -> None:
    """Read a report as `PositionReports.take` does."""
    try:
        report = PositionReport.from_bytes(data)
    except ValueError:
        return
    if PositionReport.from_bytes(report.to_bytes()) != report:
        raise AssertionError(f"a report is another one after it was written: {report}")


def read_terms(data: bytes) -> None:
    """Read the terms of a sum as `agreement` does."""
    try:
        terms = Terms.from_bytes(data)
    except (ValueError, TypeError):
        return
    if Terms.from_bytes(terms.to_bytes()) != terms:
        raise AssertionError(f"terms are others after they were written: {terms}")
    terms.differences(Terms.from_bytes(terms.to_bytes()))


def read_ready(data: bytes) -> None:
    """Read what a member was ready with, as it is signed."""
    try:
        content = codec.read_ready(data)
    except (ValueError, TypeError, KeyError):
        return
    if codec.read_ready(codec.ready_content(*content)) != content:
        raise AssertionError(f"what a member is ready with is something else after it was written: {content}")


def read_proof(kind: type[Certificate] | type[PendingReveal]) -> Callable[[bytes], None]:
    """Make a reader of proofs as `ViewChange` and `JournalTransfer` read them."""

    def reader(data: bytes) -> None:
        try:
            proof = kind.from_json(json.loads(data))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return
        if kind.from_json(json.loads(json.dumps(proof.to_json()))) != proof:
            raise AssertionError(f"a proof is another one after it was written: {proof}")

    return reader


class Trusting:
    """Stand for a public key under which every signature is right, so that the checks behind it are reached."""

    def verify(self, statement: bytes, signature: bytes) -> bool:
        """Accept any signature."""
        return len(statement) + len(signature) > 0


TRUSTING: dict[str, Any] = dict.fromkeys(("a", "b", "c"), Trusting())


def check_certificate(data: bytes) -> None:
    """Check a certificate for an entry and a total as `JournalTransfer` does."""
    try:
        value, fields = json.loads(data)
        certificate = Certificate.from_json(value)
        certificate.signers("everyone", TRUSTING)
        certificate.check_entry(None, fields)
        certificate.check_total(bytes(min(fields[4], MAX_INPUT_BYTES)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        return


READERS: tuple[Callable[[bytes], None], ...] = (
    read_frame,
    read_datagram,
    read_report,
    read_terms,
    read_ready,
    read_proof(Certificate),
    read_proof(PendingReveal),
    check_certificate,
)
