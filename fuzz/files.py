"""Fuzz what is read from files: ledgers, journals, keys, federation files, models, runs and tables.

The first byte of an input says which reader gets the rest. Where a file begins with a digest, the digest is made right,
so that what is behind it is reached. Only a `CGDError` may come out.
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
from cgd.reporting.run_file import load_run
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.journal_transfer import JournalTransfer
from cgd.secagg.messages import JournalChunk
from cgd.secagg.positions import GroupRow
from cgd.tabular.loading import read
from cgd.tabular.model import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = ("a", "b", "c")
TABLE = Data("outcome", (Column("age", "number"), Column("ward", "category")), id="id")
NUMBERS = Data("dose", (Column("age", "number"), Column("ward", "category", ("A", "B"))), "regression")


def one_input(data: bytes) -> None:
    """Read one input; raise what the readers should not raise."""
    if not data:
        return
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except CGDError:
        return


@cache
def folder() -> Path:
    """Make a folder of this process, in memory if there is such a place."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    made = tempfile.TemporaryDirectory(prefix="cgd-fuzz-", dir=place)
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def written(name: str, data: bytes) -> Path:
    """Write a file that only its owner may read; returns its path."""
    path = folder() / name
    with open(path, "wb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
        file.write(data)
    return path


def parts(data: bytes) -> tuple[bytes, bytes]:
    """Cut an input in two; its first two bytes say where."""
    at = 2 + int.from_bytes(data[:2], "little")
    return data[2:at], data[at:]


def with_digest(body: bytes) -> bytes:
    """Put its digest before the body of a ledger."""
    return sha256(body).digest() + body


def read_ledger(data: bytes) -> None:
    """Read a ledger, use it, and read it again."""
    journal = Journal.from_bytes(with_digest(data))
    again = Journal.from_bytes(journal.to_bytes())
    if (again.heads, again.mark, again.state_rows()) != (journal.heads, journal.mark, journal.state_rows()):
        raise AssertionError("a ledger is another one after it was written")
    use(journal)


def use(journal: Journal) -> None:
    """Do what a member does with the ledger that it comes back with."""
    journal.kept_digest()
    journal.gift(0, states=True)
    journal.mark_record()
    for place in range(len(journal)):
        journal.entry(place)
    Journal().catch_up(journal)


def read_record(data: bytes) -> None:
    """Add a record of a journal to a ledger."""
    journal = Journal()
    journal.add_record(data)
    use(journal)


def take_over(data: bytes) -> None:
    """Take over a ledger in pieces; the first four bytes say where it is cut, and how many sums it has."""
    cuts, body = data[:4].ljust(4, b"\0"), with_digest(data[4:])
    given = Journal()
    with contextlib.suppress(CGDError):
        given = Journal.from_bytes(body)
    claim = GroupRow(len(given) or cuts[3], given.head, None, bytes(32), given.state_rows())
    journal_transfer = JournalTransfer(
        "b", Group("everyone", MEMBERS, Journal()), claim, agreed(), states=cuts[3] < 128
    )
    places = sorted({0, *(len(body) * cut // 256 for cut in cuts[:3]), len(body)})
    for start, end in pairwise(places):
        journal_transfer.take(JournalChunk(start, "everyone", len(body), body[start:end]))
    if journal_transfer.given is not None:
        Journal().catch_up(journal_transfer.given)


class Trusting:
    """Stand for a public key under which every signature is right, so that the checks behind it are reached."""

    def verify(self, statement: bytes, signature: bytes) -> bool:
        """Accept any signature."""
        return len(statement) + len(signature) > 0


@cache
def agreed() -> FederationSpec:
    """Make what the members of a takeover hold to."""
    own: Any = dict.fromkeys(MEMBERS, Trusting())
    return FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {}, "1.0", own)


def read_federation(data: bytes) -> None:
    """Read a federation file, and make everything of it that a participant needs."""
    federation = Federation.parse(data.decode(errors="replace"), Path("federation.toml"))
    federation.federation_spec("1.0")
    _ = federation.digest, federation.contacts_and_hub, federation.settings


def read_keys(data: bytes) -> None:
    """Read a key file."""
    _ = Keys.load(written("a.key", data)).identity


def read_state(data: bytes) -> None:
    """Read a state folder: a ledger, with its digest made right unless it is empty, and a journal."""
    journal, journal = parts(data)
    state = folder() / "state"
    state.mkdir(exist_ok=True)
    file = state / "trial+everyone.ledger"
    file.unlink(missing_ok=True)
    if journal:
        written("state/trial+everyone.ledger", with_digest(journal))
    written("state/trial+everyone.0.entries", journal)
    for each in StateFolder(state, "trial").load(["everyone"]).values():
        use(each)


def read_run(data: bytes) -> None:
    """Read the file of a run."""
    load_run(written("run.json", data).parent)


def read_model(data: bytes) -> None:
    """Read a model: what it says of itself, with the digest of its weights made right, and the weights."""
    about, weights = parts(data)
    try:
        content = json.loads(about)
        if content["model"]["function"]:
            return  # it would be imported
        content["weights"]["sha256"] = sha256(weights).hexdigest()
        about = json.dumps(content).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    written("model.json", about)
    written("model.safetensors", weights)
    load_model(folder()).records({"age": [1.0], "dose": [2.0], "ward": ["A"]})


def read_table(data: bytes) -> None:
    """Read a table as CSV; Parquet files are read by Arrow alone."""
    if data[1:5] == b"PAR1":
        return
    described = NUMBERS if data[:1] > b"\x7f" else TABLE
    read(written("table.csv", data[1:]), described, described.columns, ids=bool(described.id))


READERS: tuple[Callable[[bytes], None], ...] = (
    read_ledger,
    read_record,
    take_over,
    read_federation,
    read_keys,
    read_state,
    read_run,
    read_model,
    read_table,
)
