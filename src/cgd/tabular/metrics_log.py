"""The history of a run, `history.jsonl`: a row for every look at the training, written as it goes.

A full disk, or a process that may open no more files, must not end a training: all others would wait. So the file is
opened once, before anybody hears of us, and rows that cannot be written are kept and written as soon as that works.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.json_shapes import MisfitError, fit
from cgd.tabular.training import EvalRecord

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.json_shapes import Shape

log = logging.getLogger("cgd.tabular")

FILE = "history.jsonl"
COMPLAINT_SECONDS = 60.0
ROW: Shape = {
    "step": int,
    "everyone_validation_loss?": float,
    "best_step": int,
    "training_loss?": float,
    "validation_loss?": float,
    "score?": float,
}


class MetricsLog:
    """The file of one run's history.

    Args:
        path: where it is; made if it is not there.
        belongs: whose run it is, its first row.

    Raises:
        InputError: it is of another run.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, belongs: dict[str, str]) -> None:
        self.path = path
        self._unwritten = bytearray()
        self._complained = -inf
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        content = path.read_bytes()
        self.looks = _looks(path, content, belongs) if content else {}
        if not content:
            self._unwritten += _line(belongs)
        elif not content.endswith(b"\n"):  # a row that was cut off by a kill: what follows is no part of it
            self._unwritten += b"\n"
        self._write()

    def add(self, look: EvalRecord) -> None:
        """Write one more row; if that does not work, keep it and say so, once a minute at most."""
        self._unwritten += _line(asdict(look))
        try:
            self._write()
        except OSError as error:
            if time.monotonic() - self._complained >= COMPLAINT_SECONDS:
                self._complained = time.monotonic()
                log.warning(
                    "%s cannot be written (%s); training goes on, and what is missing is written when there is room",
                    self.path, error.strerror, extra={"event": "not saved"},
                )  # fmt: skip

    def complete(self) -> None:
        """Write the rows that are missing.

        Raises:
            InputError: that does not work yet.
        """
        try:
            self._write()
        except OSError as error:
            raise InputError(f"{self.path} cannot be written ({error.strerror}); make room for it") from None

    def _write(self) -> None:
        while self._unwritten:
            written = os.write(self._descriptor, self._unwritten)
            del self._unwritten[:written]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _looks(path: Path, content: bytes, belongs: dict[str, str]) -> dict[int, EvalRecord]:
    """Return what was seen before we were started anew, by step; a row that is cut off or damaged is left out."""
    first, *rows = content.splitlines()
    found = _row(first)
    if found != belongs:
        told = [found.get(key) for key in belongs] if isinstance(found, dict) else []
        whose = " of ".join(each for each in told if isinstance(each, str)) or "another"
        raise InputError(
            f"{path.parent} holds the run of {whose}, which is never overwritten; name another folder (--out), or "
            "move it away"
        )
    looks = {}
    for row in map(_row, rows):
        try:
            read = fit(row, ROW)
        except MisfitError:
            continue
        looks[read["step"]] = EvalRecord(**{name: read[name] for name in EvalRecord.__dataclass_fields__})
    return looks


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
