"""The folder of a run and its history file, `history.jsonl`: one row for every evaluation, written during training.

A full disk, or a process without free file descriptors, must not end a training, because all other members would wait.
Therefore the history is opened once, before anything is sent; rows that cannot be written are kept in memory and
written as soon as possible.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from cgd.errors import InputError
from cgd.files import check_writable
from cgd.json_files import decode_json, parse_json
from cgd.reporting.run_file import EvalRecord, load_run
from cgd.reporting.training_report import REPORT_FILE
from cgd.tabular.model import MODEL_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.federation.config import Federation
    from cgd.reporting.run_file import AnyRun

log = logging.getLogger("cgd.tabular")

HISTORY_FILE = "history.jsonl"
WARNING_INTERVAL_SECONDS = 60.0


class RunFolder:
    """The folder of a run; created if it does not exist.

    Args:
        folder: its path.
        federation: the federation.
        participant: our name.

    Raises:
        InputError: it holds a run of another federation or participant, or cannot be used.
    """

    def __init__(self, folder: Path, federation: Federation, participant: str) -> None:
        self.path = folder
        self._training = federation.training.as_stored()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = {"participant": participant, "federation": federation.name}
            _check_model(folder, owner)
            self.history = MetricsLog(folder / HISTORY_FILE, owner)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be used ({error.strerror}); name another folder for the run (--out)"
            ) from None

    def finished_run(self) -> AnyRun | None:
        """Return the run that an earlier process finished; None if there is none.

        A run is not finished if a file is missing or damaged, or if [training] has changed since, for example to more
        steps. The files of a finished run are never changed.
        """
        return _finished_run(self.path, self._training)

    def known(self, evaluation: EvalRecord) -> EvalRecord | None:
        """Return the evaluation of a replayed step from before the restart; None if there is none."""
        return self.history.evaluations.get(evaluation.step) if evaluation.training_loss is None else None

    def add(self, evaluation: EvalRecord) -> EvalRecord:
        """Write an evaluation to the history; for a replayed step, return the one from before the restart."""
        known = self.known(evaluation)
        if known is not None:
            return known
        self.history.add(evaluation)
        return evaluation


def check_run_folder(folder: Path, federation: Federation, participant: str) -> AnyRun | None:
    """Check that a folder can be used for a run, without changing anything; return the finished run in it, if any.

    Raises:
        InputError: it holds a run of another federation or participant, or cannot be used.
    """
    owner = {"participant": participant, "federation": federation.name}
    try:
        check_writable(folder)
        _check_model(folder, owner)
        content = (folder / HISTORY_FILE).read_bytes() if (folder / HISTORY_FILE).exists() else b""
    except OSError as error:
        raise InputError(
            f"{folder} cannot be used ({error.strerror}); name another folder for the run (--out)"
        ) from None
    if content and not _line(owner).startswith(content):
        _read_history(folder / HISTORY_FILE, content, owner)
    return _finished_run(folder, federation.training.as_stored())


class MetricsLog:
    """The history file of one run.

    Args:
        path: the file; created if it does not exist.
        owner: participant and federation, the first row.

    Raises:
        InputError: the file belongs to another run.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, owner: dict[str, str]) -> None:
        self.path = path
        self._unwritten = bytearray()
        self._last_warning = -inf
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._descriptor)
        os.fchmod(self._descriptor, 0o600)  # a copy from a backup may have lost its modes
        content = path.read_bytes()
        if content != _line(owner) and _line(owner).startswith(content):  # a full disk truncated the first row
            os.ftruncate(self._descriptor, 0)
            content = b""
        self.evaluations = _read_history(path, content, owner) if content else {}
        if not content:
            self._unwritten += _line(owner)
        elif not content.endswith(b"\n"):  # the last row was truncated by a kill: begin a new line
            self._unwritten += b"\n"
        self._write()

    def add(self, evaluation: EvalRecord) -> None:
        """Append a row; if that fails, keep it in memory and log a warning, at most once a minute."""
        self._unwritten += _line(msgspec.to_builtins(evaluation))
        try:
            self._write()
        except OSError as error:
            if time.monotonic() - self._last_warning >= WARNING_INTERVAL_SECONDS:
                self._last_warning = time.monotonic()
                log.warning(
                    "%s cannot be written (%s); training continues, and the missing rows are written later",
                    self.path, error.strerror, extra={"event": "not saved"},
                )  # fmt: skip

    def complete(self) -> None:
        """Write the missing rows.

        Raises:
            InputError: the file still cannot be written.
        """
        try:
            self._write()
        except OSError as error:
            raise InputError(f"{self.path} cannot be written ({error.strerror}); free some disk space") from None

    def _write(self) -> None:
        while self._unwritten:
            written = os.write(self._descriptor, self._unwritten)
            del self._unwritten[:written]


def _finished_run(folder: Path, training: dict[str, Any]) -> AnyRun | None:
    if not all((folder / name).exists() for name in (WEIGHTS_FILE, MODEL_FILE, REPORT_FILE)):
        return None
    try:
        run = load_run(folder)
    except InputError:
        return None
    stored = run.training or {}
    return run if all(stored.get(key, value) == value for key, value in training.items()) else None


def _check_model(folder: Path, owner: dict[str, str]) -> None:
    """Refuse a folder with the model of another run, whose history may have been deleted; ignore a damaged file."""
    try:
        found = parse_json((folder / MODEL_FILE).read_bytes())
    except (FileNotFoundError, InputError):
        return
    if isinstance(found, dict) and {key: found.get(key) for key in owner} != owner:
        raise _other_run(folder, found, owner)


def _other_run(folder: Path, found: Any, owner: dict[str, str]) -> InputError:
    names = [found.get(key) for key in owner] if isinstance(found, dict) else []
    other = " of ".join(each for each in names if isinstance(each, str)) or "another participant"
    return InputError(
        f"{folder} holds the run of {other}, which is never overwritten; name another folder (--out), or move it away"
    )


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _read_history(path: Path, content: bytes, owner: dict[str, str]) -> dict[int, EvalRecord]:
    """Return the evaluations from before a restart, by step; skip rows that are truncated or damaged."""
    first, *rows = content.splitlines()
    try:
        found = parse_json(first)
    except InputError:
        found = None
    if found != owner:
        raise _other_run(path.parent, found, owner)
    evaluations = {}
    for row in rows:
        try:
            evaluation = decode_json(row, EvalRecord)
        except InputError:
            continue
        evaluations[evaluation.step] = evaluation
    return evaluations
