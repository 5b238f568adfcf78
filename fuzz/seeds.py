"""Write small valid inputs of every kind into tests/corpus: `python fuzz/seeds.py`.

Self-mask keys are drawn again each time, so some files differ from the present ones and are equivalent. Inputs that
once crashed a target are in the same folders, under names that begin with `crash-`; they stay.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from fuzz import files, frames  # noqa: E402
from zmq.utils import z85  # noqa: E402

from cgd.federation.keys import PRIVATE_FILE, Keys, derive_public  # noqa: E402
from cgd.federation.model_section import Model  # noqa: E402
from cgd.federation.state import entry_header  # noqa: E402
from cgd.psi.protocol import CommonState  # noqa: E402
from cgd.secagg.certificates import PendingReveal  # noqa: E402
from cgd.secagg.codec import Frame, from_bytes, ready_content, to_bytes  # noqa: E402
from cgd.secagg.journal import Journal  # noqa: E402
from cgd.secagg.messages import (  # noqa: E402
    Abort,
    Deposit,
    Goodbye,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    Leave,
    PositionsGathered,
    Ready,
    Reason,
    ResendRequest,
    SignedEvidence,
    Total,
)
from cgd.tabular.federated_stats import CategoryStats, NumberStats, TargetStats  # noqa: E402
from cgd.tabular.model import ConfinedModel  # noqa: E402
from cgd.tabular.models import build  # noqa: E402
from cgd.tabular.preprocessing import Preprocessing  # noqa: E402
from cgd.transport.link import Datagram, DatagramKind  # noqa: E402
from support import runs, summing_program  # noqa: E402
from support.dishonest import Simulation  # noqa: E402
from support.ideal import ideal_cryptography  # noqa: E402
from support.tabular import DATA, REGRESSION, SCHEMA, VERTICAL_SCHEMA  # noqa: E402

if TYPE_CHECKING:
    from collections import deque

    from cgd.federation.data_schema import Data

CORPUS = ROOT / "tests" / "corpus"
SESSION = b"s" * 16
SCHEDULES = 24


class RecordedSimulation(Simulation):
    """A simulation of honest members that records all frames, by type of message."""

    def __init__(self, seed: int, sums: int) -> None:
        super().__init__(seed, 2, sums)
        self.adversary.rate, self.adversary.withholds = 0.0, False
        self.frames: dict[str, list[bytes]] = {}

    def deliver(self, sender: str, to: str, frame: bytes) -> None:
        """Deliver and record a frame."""
        self.frames.setdefault(type(from_bytes(frame, sender).message).__name__, []).append(frame)
        super().deliver(sender, to, frame)

    def finish(self) -> None:
        """Run until all members have all sums, without disturbances."""
        with self.observations.recording():
            for me in self.federation_spec.members:
                self.advance(me)
            while not self.done:
                queues: dict[tuple[str, str], deque[bytes]] = {
                    ends: queue for ends, queue in self.queues.items() if queue
                }
                sender, to = next(iter(queues))
                self.deliver(sender, to, queues[sender, to].popleft())


def run_simulation(sums: int) -> RecordedSimulation:
    """Run a simulation of honest members, with the same bytes every time."""
    with ideal_cryptography(), patch("os.urandom", random.Random(0).randbytes):
        summing_program._identity.cache_clear()
        simulation = RecordedSimulation(0, sums)
        simulation.finish()
        summing_program._identity.cache_clear()
    return simulation


def frame_seeds(simulation: RecordedSimulation) -> dict[str, bytes]:
    """Make inputs of the target `frames`."""
    made: dict[str, bytes] = {}

    def add(name: str, reader: Any, content: bytes) -> None:
        made[name] = bytes([frames.READERS.index(reader)]) + content

    for name, found in simulation.frames.items():
        add(f"frame-{name.lower()}", frames.read_frame, found[0])
    words = memoryview(bytes(8))
    statements = tuple((name, bytes(32), bytes(64)) for name in ("a", "b"))
    others = (
        *(
            Abort(Reason.RANGE),
            Leave(),
            ResendRequest(),
            JournalRequest("everyone", 1, True),
            Total(0, words),
            SignedEvidence("ready", bytes(32), statements),
            PositionsGathered(bytes(32)),
        ),
        *(
            JournalChunk(0, "everyone", 8, words),
            Deposit(0, "everyone", 32, words),
            Goodbye(True, (("everyone", 1, bytes(32)),)),
        ),
    )
    for message in others:
        add(f"frame-{type(message).__name__.lower()}", frames.read_frame, to_bytes(Frame(SESSION, 1, message)))
    for kind in DatagramKind:
        body = struct.pack("<QQ", 1, 1) if kind is DatagramKind.ACK else b"name"
        datagram = Datagram(kind, b"incoming", b"outgoing", 0, body)
        add(f"datagram-{kind.name.lower()}", frames.read_datagram, datagram.to_bytes())
    position = from_bytes(simulation.frames["JournalPosition"][-1], "a").message
    ready = from_bytes(simulation.frames["Ready"][-1], "a").message
    assert isinstance(position, JournalPosition)
    assert isinstance(ready, Ready)
    add("report", frames.read_report, position.content)
    add("terms", frames.read_terms, ready.terms)
    content = ready_content(ready.spec, ready.commitment, ready.terms)
    add("ready", frames.read_ready, content)
    entry = simulation.programs["a"].journal.entries[-1]
    assert entry.certificate is not None
    certificate = entry.certificate.to_json()
    pending_reveal = PendingReveal(1, ("a", "b", "c"), bytes(32))
    for name, reader, value in zip(
        ("certificate", "pending-reveal"), frames.READERS[5:7], (certificate, pending_reveal.to_json()), strict=True
    ):
        add(name, reader, json.dumps(value).encode())
    add("checked", frames.check_certificate, json.dumps([certificate, entry.fields]).encode())
    return made


def membership_seeds() -> dict[str, bytes]:
    """Make inputs of the target `membership`."""
    made = {"honest": b"", "honest-2": bytes([1, 0, 255, 255])}
    for number in range(SCHEDULES):
        draw = random.Random(number)
        made[f"schedule-{number}"] = draw.randbytes(40 + 20 * number)
    return made


def file_seeds(simulation: RecordedSimulation) -> dict[str, bytes]:
    """Make inputs of the target `files`."""
    made: dict[str, bytes] = {}

    def add(name: str, reader: Any, content: bytes) -> None:
        made[name] = bytes([files.READERS.index(reader)]) + content

    journal = Journal.from_bytes(simulation.programs["a"].journal.to_bytes())
    journal.pending_reveal = PendingReveal(2, ("a", "b", "c"), bytes(32))
    whole = journal.to_bytes()[32:]
    entries = [b"".join(journal.entry_record(index)) for index in range(len(journal))]
    records = [*entries, b"".join(journal.pending_reveal_record())]
    indices = (*range(len(journal)), len(journal))
    segment = b"".join(entry_header(index, [each]) + each for index, each in zip(indices, records, strict=True))
    add("journal", files.read_journal, whole)
    add("journal-empty", files.read_journal, Journal().to_bytes()[32:])
    add("entry", files.read_entry, entries[-1])
    add("entry-pending-reveal", files.read_entry, records[-1])
    add("transfer", files.transfer_journal, bytes([10, 100, 200, 0]) + journal.export_since(0, states=True)[32:])
    add("transfer-whole", files.transfer_journal, bytes([0, 0, 0, 0]) + journal.export_since(0, states=True)[32:])
    add("state", files.read_state, two(whole, b""))
    add("state-entries", files.read_state, two(b"", segment))
    for name, text in federations().items():
        add(f"federation-{name}", files.read_federation, text.encode())
    keys = keys_of("a")
    content = {"name": keys.name, "secret": keys.secret.decode(), "seed": keys.seed.hex()}
    add("keys", files.read_keys, PRIVATE_FILE.format(**content, public=keys.public).encode())
    add("keys-before-signatures", files.read_keys, PRIVATE_FILE.format(**content, public=keys.public[:40]).encode())
    for make in (runs.classification, runs.regression, runs.grid, runs.minimal):
        add(f"run-{make.__name__}", files.read_run, json.dumps(make()).encode())
    for data in (DATA, REGRESSION):
        add(f"model-{data.task}", files.read_model, model(data))
    tables = {
        "commas": b"\0age,ward,id,outcome\n61,A,p1,ill\n,B,p2,well\n",
        "semicolons": b'\0id;age;"ward";outcome\r\np1;1.5;"A ""x""";0\r\np2;NA;B;1\r\n',
        "numbers": b"\xffage\tward\tdose\n1e3\tA\t2.5\n-7\tB\t\n",
        "quoted": b'\xff"age\nx",age,ward,dose\n1,2,A,3\n\n',
    }
    for name, table in tables.items():
        add(f"table-{name}", files.read_table, table)
    announcements = tuple(bytes([size]) + bytes(7) + bytes([size]) * 48 for size in (2, 3, 9))
    add("intersection-announced", files.read_intersection, CommonState(1, announcements).to_bytes())
    lists = tuple(bytes([7]) * 32 * size for size in (2, 3, 9))
    add("intersection-points", files.read_intersection, CommonState(2, announcements, bytes(32), lists).to_bytes())
    done = CommonState(7, announcements, bytes(32), positions=(b"\x80", b"\x60", b"\xff\x80"))
    add("intersection-done", files.read_intersection, done.to_bytes())
    return made


def two(one: bytes, other: bytes) -> bytes:
    """Join two parts, which `files.parts` separates."""
    return struct.pack("<H", len(one)) + one + other


def keys_of(name: str) -> Keys:
    """Make keys that are the same in every run."""
    secret, seed = z85.encode(sha256(f"secret {name}".encode()).digest()), sha256(f"seed {name}".encode()).digest()
    return Keys(name, derive_public(secret, seed), secret, seed)


def participant(name: str, address: str | None = None, cell: str = "") -> str:
    """Make the table of a participant."""
    where = f"tcp://{name}.example:7001" if address is None else address
    lines = [f'name = "{name}"', f'address = "{where}"', f"key = {json.dumps(keys_of(name).public)}"]
    return "\n".join(["[[participants]]", *lines, *([f"cell = {cell}"] if cell else []), ""])


def federations() -> dict[str, str]:
    """Make federation files."""
    head = 'name = "trial"\nepoch = 1\n'
    three = "".join(map(participant, files.MEMBERS))
    away = participant("a", "") + "".join(map(participant, files.MEMBERS[1:]))
    cells = "".join(
        participant(f"p{row}{column}", cell=f"[{row}, {column}]") for row in range(3) for column in range(2)
    )
    training = '[training]\nsteps = 10\nlr = 0.5\nring_bits = 64\nopening = "aggregator"\naggregator = "b"\n'
    hub = f'[hub]\naddress = "tcp://[2001:db8::1]:7000"\nkey = {json.dumps(keys_of("hub").public)}\n'
    in_columns = VERTICAL_SCHEMA.replace("held_by = 2", "held_by = 1")
    return {
        "least": head + three,
        "training": head + training + three,
        "hub": f'{head}[training]\nopening = "hub"\n{hub}{away}',
        "tables": head + SCHEMA + three,
        "grid": head + in_columns + cells,
    }


def model(data: Data) -> bytes:
    """Make a small model."""
    columns = (
        NumberStats("age", 3, 1, 60.0, 12.0),
        NumberStats("dose", 4, 0, 0.0, 3.0),
        CategoryStats("ward", ("A", "B"), (2, 1), 0),
    )
    preprocessing = Preprocessing(
        columns, TargetStats(("ill", "well"), (1, 2)) if data.task == "classification" else TargetStats()
    )
    described = Model("mlp", (2,))
    torch.manual_seed(0)
    network = build(described, len(preprocessing.features), preprocessing.outputs)
    origin = {"participant": "a", "federation": "trial", "epoch": 1, "digest": "ab"}
    with tempfile.TemporaryDirectory() as place:
        ConfinedModel(data, described, preprocessing, network, data.columns, 1, origin).save(place)
        return two((Path(place) / "model.json").read_bytes(), (Path(place) / "model.safetensors").read_bytes())


def main() -> None:
    """Write all inputs."""
    simulation = run_simulation(2)
    for target, made in (
        ("frames", frame_seeds(simulation)),
        ("membership", membership_seeds()),
        ("files", file_seeds(simulation)),
    ):
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if not file.name.startswith("crash-"):
                file.unlink()
        for name, content in made.items():
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
