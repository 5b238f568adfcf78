"""A participant or a hub in its own process, whose memory and descriptors are measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zmq

from cgd.secagg.messages import HUB
from cgd.transport.connections import Contact
from cgd.transport.zeromq import ZeroMQTransport
from support.ports import free_port
from support.transports import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FLOOD_PARTS = 1000
# Each line on its standard input is answered with a line. Each answer opens files, as any program does.
PROGRAM = """
import json, logging, os, pathlib, resource, sys, threading
from cgd.transport.hub import Hub
from cgd.transport.connections import Contact
from cgd.transport.zeromq import ZeroMQTransport
from cgd.secagg.messages import HUB

logging.basicConfig(level=logging.INFO, format="%(message)s")
setup = json.loads(sys.stdin.readline())
if setup["limits"]:
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(setup["limits"]))
contacts = {name: Contact(address, key.encode()) for name, (address, key) in setup["contacts"].items()}
received = []
if setup["name"] == HUB:
    address = contacts.pop(HUB).address
    running = Hub(contacts, {"everyone": tuple(contacts)}, setup["secret"].encode(), address)
else:
    running = ZeroMQTransport(setup["name"], contacts, setup["secret"].encode())
    def receive():
        while True:
            received.append(running.receive(None)[0])
    threading.Thread(target=receive, daemon=True).start()
for _ in sys.stdin:
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({
        "peak": int(status["VmHWM"].split()[0]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "received": received,
        "counts": [[*key, count] for key, count in running.rejections.counts.items()],
    }), flush=True)
"""
# Sends one message of very many parts, as far as the other side reads it. It runs in its own process because it queues
# a gibibyte, and its libraries may fail when the connection is closed in the middle of that.
FLOOD = """
import json, sys, zmq

setup = json.loads(sys.stdin.readline())
key, *own = (each.encode() for each in setup["keys"])
context = zmq.Context()
if setup["listens"]:
    socket = context.socket(zmq.ROUTER)
    socket.curve_server, socket.curve_secretkey = True, own[1]
    socket.bind(setup["address"])
    begin = socket.recv_multipart()[:1]
else:
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey, (socket.curve_publickey, socket.curve_secretkey) = key, own
    socket.connect(setup["address"])
    begin = [bytes.fromhex(each) for each in setup["begin"]]
    if setup["first"]:
        socket.send_multipart([bytes.fromhex(each) for each in setup["first"]])
        socket.recv_multipart()
print("ready", flush=True)
sys.stdin.readline()
part = bytes(1 << 20)
for each in begin:
    socket.send(each, zmq.SNDMORE)
for _ in range(setup["parts"]):
    socket.send(part, zmq.SNDMORE, copy=False)
socket.send(b"")
sys.stdin.readline()
"""


class MeasuredProcess:
    """The participant or hub under attack.

    Args:
        name: the name of the participant, or of the hub.
        limits: its soft and hard limit of descriptors.
    """

    def __init__(self, name: str, limits: tuple[int, int] | None = None) -> None:
        names = (*MEMBERS, HUB) if name == HUB else MEMBERS
        self.pairs = {each: zmq.curve_keypair() for each in names}
        self.contacts = {
            each: Contact(f"tcp://127.0.0.1:{free_port()}", public) for each, (public, _) in self.pairs.items()
        }
        self.name = name
        self.log: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._receiver = threading.Thread(target=self._read)
        self._receiver.start()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._transports: list[ZeroMQTransport] = []
        contacts = {each: (contact.address, contact.public_key.decode()) for each, contact in self.contacts.items()}
        self._write({"name": name, "contacts": contacts, "secret": self.pairs[name][1].decode(), "limits": limits})
        self.measure()

    def __enter__(self) -> MeasuredProcess:
        return self

    def __exit__(self, *outcome: object) -> None:
        for transport in self._transports:
            transport.close()
        for each in self._sockets:
            each.close(linger=0)
        self._context.destroy(linger=0)
        self._process.kill()
        self._process.communicate()
        self._receiver.join()

    @property
    def port(self) -> int:
        return int(self.contacts[self.name].address.rpartition(":")[2])

    def measure(self) -> dict[str, Any]:
        """Return its peak memory, its descriptors, the senders of received frames, and its rejections."""
        self._write("measure")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {''.join(self.log)}"
        measured: dict[str, Any] = json.loads(line)
        return measured

    def rejections(self, sender: str, kind: str) -> int:
        return sum(count for *key, count in self.measure()["counts"] if key == [sender, kind])

    def connect_client(self, name: str) -> zmq.Socket[bytes]:
        """Connect a plain CURVE socket with the key of a participant."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.curve_serverkey = self.contacts[self.name].public_key
        dealer.curve_publickey, dealer.curve_secretkey = self.pairs[name]
        dealer.sndhwm = 16
        dealer.connect(self.contacts[self.name].address)
        self._sockets.append(dealer)
        return dealer

    @contextmanager
    def flood(
        self, name: str, first: Sequence[bytes] = (), begin: Sequence[bytes] = (), *, listens: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Return a function that starts to send a message of a thousand mebibytes, with the key of a participant.

        Args:
            name: the participant.
            first: a message that is sent before, and answered.
            begin: the first parts of the long message.
            listens: wait for the connection that the attacked process makes, and send by that.
        """
        setup = {
            "keys": [each.decode() for each in (self.contacts[self.name].public_key, *self.pairs[name])],
            "address": self.contacts[name if listens else self.name].address,
            "listens": listens,
            "first": [each.hex() for each in first],
            "begin": [each.hex() for each in begin],
            "parts": FLOOD_PARTS,
        }
        with subprocess.Popen(
            [sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(setup) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"

            def start_sending() -> None:
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]

            try:
                yield start_sending
            finally:
                process.kill()

    def open_peer(self, name: str) -> ZeroMQTransport:
        """Open the transport of another participant."""
        self._transports.append(ZeroMQTransport(name, self.contacts, self.pairs[name][1]))
        return self._transports[-1]

    def _write(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(self._process.stderr)
