"""Texts of federation files of ada, bob and cleo, and of grids, with fixed keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import zmq

from cgd import InputError
from cgd.federation.config import Federation, Participant
from cgd.optim.grid import Cell, Grid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEYS = [(zmq.curve_public(f"{digit}".encode() * 40) + f"{digit}".encode() * 40).decode() for digit in range(10)]
THREE = ("ada", "bob", "cleo")


def participant(number: int, name: str, cell: Cell | None = None) -> Participant:
    return Participant(name, f"tcp://{name}.example:7001", KEYS[number], cell)


def participants(names: Sequence[str] = THREE, cells: Sequence[Cell | None] = (None,) * 9) -> tuple[Participant, ...]:
    return tuple(participant(i, name, cells[i]) for i, name in enumerate(names))


def grid(rows: int, columns: int) -> tuple[Participant, ...]:
    return participants("abcdefghi"[: rows * columns], Grid(rows, columns).cells)


def block(number: int, name: str, extra: str = "") -> str:
    return f'[[participants]]\nname = "{name}"\naddress = "tcp://{name}.example:7001"\nkey = "{KEYS[number]}"\n{extra}'


BLOCKS = "\n".join(block(i, name) for i, name in enumerate(THREE))


def text(training: str = "", head: str = 'name = "five"\nepoch = 1\n', blocks: str = BLOCKS) -> str:
    return f"{head}\n[training]\n{training}\n\n{blocks}"


def cells(written: str) -> str:
    """Return a file whose participants have these cells, as written in TOML; "-" for none."""
    lines = ["" if cell == "-" else f"cell = {cell}\n" for cell in written.split()]
    return text(blocks="\n".join(block(i, "abcdefghi"[i], line) for i, line in enumerate(lines)))


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "federation.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rejection(folder: Path, content: str | bytes) -> str:
    """Return the error message for a file, without the file name and the line."""
    path = write(folder, content)
    with pytest.raises(InputError) as error:
        Federation.load(path)
    assert type(error.value) is InputError  # a MembershipError would end a running participant
    assert str(error.value).startswith(str(path))
    return re.sub(r"^, line \d+", "", str(error.value).removeprefix(str(path)))
