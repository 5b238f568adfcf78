"""Fuzz the readers of files: journals, entries and states in them, keys, federation files, models, runs and tables.

The first byte of an input selects the reader of the rest. Where a file begins with a digest, the digest is made valid,
so that the code behind it is reached. Readers may raise `CGDError` only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import CGDError
from cgd.federation.config import Federation
from cgd.federation.data_schema import Column, Data
from cgd.federation.keys import Keys
from cgd.federation.state import StateFolder
from cgd.psi.protocol import CommonState
from cgd.reporting.run_file import load_run
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.messages import JournalChunk
from cgd.secagg.positions import GroupPosition
from cgd.tabular.dataset import read_dataset
from cgd.tabular.model import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = ("a", "b", "c")
CLASSIFICATION = Data("outcome", (Column("age", "number"), Column("ward", "category")), id="id")
REGRESSION = Data("dose", (Column("age", "number"), Column("ward", "category", ("A", "B"))), "regression")


def one_input(data: bytes) -> None:
    """Read one input; raise every error except CGDError."""
    if not data:
        return
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except CGDError:
        return


@cache
def folder() -> Path:
    """Create a folder for this process, in memory if possible."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    made = tempfile.TemporaryDirectory(prefix="cgd-fuzz-", dir=place)
    _FOLDERS.append(made)
    return Path(made.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def write(name: str, data: bytes) -> Path:
    """Write a file with mode 0600; return its path."""
    path = folder() / name
    with open(path, "wb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
        file.write(data)
    return path


def parts(data: bytes) -> tuple[bytes, bytes]:
    """Split an input in two, at the position in its first two bytes."""
    at = 2 + int.from_bytes(data[:2], "little")
    return data[2:at], data[at:]


def with_digest(body: bytes) -> bytes:
    """Return the body of a journal with its digest in front."""
    return sha256(body).digest() + body


def read_journal(data: bytes) -> None:
    """Read a journal, write it, read it again, and use it."""
    journal = Journal.from_bytes(with_digest(data))
    again = Journal.from_bytes(journal.to_bytes())
    if (again.heads, again.pending_reveal, again.state_summaries()) != (
        journal.heads,
        journal.pending_reveal,
        journal.state_summaries(),
    ):
        raise AssertionError("a journal differs after it was written and read")
    use(journal)


def use(journal: Journal) -> None:
    """Use a journal as a restarted member does."""
    journal.fixed_states_digest()
    journal.export_since(0, states=True)
    journal.pending_reveal_record()
    for place in range(len(journal)):
        journal.entry_record(place)
    Journal().extend(journal)


def read_entry(data: bytes) -> None:
    """Add an entry to a journal."""
    journal = Journal()
    journal.add_record(data)
    use(journal)


def transfer_journal(data: bytes) -> None:
    """Transfer a journal in chunks; the first four bytes give the cuts and the claimed number of sums."""
    cuts, body = data[:4].ljust(4, b"\0"), with_digest(data[4:])
    given = Journal()
    with contextlib.suppress(CGDError):
        given = Journal.from_bytes(body)
    claim = GroupPosition(len(given) or cuts[3], given.head, None, bytes(32), given.state_summaries())
    journal_transfer = JournalTransfer(
        "b", Group("everyone", MEMBERS, Journal()), claim, agreed(), states=cuts[3] < 128
    )
    places = sorted({0, *(len(body) * cut // 256 for cut in cuts[:3]), len(body)})
    for start, end in pairwise(places):
        journal_transfer.receive(JournalChunk(start, "everyone", len(body), body[start:end]))
    if journal_transfer.journal is not None:
        Journal().extend(journal_transfer.journal)


class AnySignature:
    """A public key that accepts every signature, so that the checks behind it are reached."""

    def verify(self, statement: bytes, signature: bytes) -> bool:
        """Accept any signature."""
        return len(statement) + len(signature) > 0


@cache
def agreed() -> FederationSpec:
    """Return the federation of a journal transfer."""
    own: Any = dict.fromkeys(MEMBERS, AnySignature())
    return FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {}, "1.0", own)


def read_federation(data: bytes) -> None:
    """Read a federation file, and derive everything that a participant needs."""
    federation = Federation.parse(data.decode(errors="replace"), Path("federation.toml"))
    federation.federation_spec("1.0")
    _ = federation.digest, federation.contacts_and_hub, federation.settings


def read_keys(data: bytes) -> None:
    """Read a key file."""
    _ = Keys.load(write("a.key", data)).identity


def read_state(data: bytes) -> None:
    """Read a state folder: a snapshot of a journal, with a valid digest unless it is empty, and further entries."""
    snapshot, entries = parts(data)
    state = folder() / "state"
    state.mkdir(exist_ok=True)
    file = state / "trial+everyone.ledger"
    file.unlink(missing_ok=True)
    if snapshot:
        write("state/trial+everyone.ledger", with_digest(snapshot))
    write("state/trial+everyone.0.entries", entries)
    for each in StateFolder(state, "trial").load().values():
        use(each)


def read_run(data: bytes) -> None:
    """Read the file of a run."""
    load_run(write("run.json", data).parent)


def read_model(data: bytes) -> None:
    """Read a model: model.json, with the digest of the weights made valid, and the weights."""
    document, weights = parts(data)
    try:
        content = json.loads(document)
        if content["model"]["function"]:
            return  # it would be imported
        content["weights"]["sha256"] = sha256(weights).hexdigest()
        document = json.dumps(content).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    write("model.json", document)
    write("model.safetensors", weights)
    load_model(folder()).records({"age": [1.0], "dose": [2.0], "ward": ["A"]})


def read_table(data: bytes) -> None:
    """Read a table as CSV; Parquet files are parsed by Arrow itself."""
    if data[1:5] == b"PAR1":
        return
    schema = REGRESSION if data[:1] > b"\x7f" else CLASSIFICATION
    read_dataset(write("table.csv", data[1:]), schema, schema.columns, ids=bool(schema.id))


def read_intersection(data: bytes) -> None:
    """Read the stored state of an intersection, and write it."""
    state = CommonState.from_bytes(data, len(MEMBERS))
    if state.to_bytes() != data:
        raise AssertionError("the state of an intersection differs after it was read and written")


READERS: tuple[Callable[[bytes], None], ...] = (
    read_journal,
    read_entry,
    transfer_journal,
    read_federation,
    read_keys,
    read_state,
    read_run,
    read_model,
    read_table,
    read_intersection,
)
