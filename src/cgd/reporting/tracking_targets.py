"""Write the figures of `cgd join --track` to event files of TensorBoard, or to a tracking server of MLflow.

Both know which figures they have, so nothing is written twice, and a run that is continued after a restart is one run.
"""

from __future__ import annotations

import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from cgd.errors import InputError
from cgd.extras import require
from cgd.files import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORM = "write tensorboard:DIR, or mlflow:https://HOST"
LOOPBACK = re.compile(r"localhost|127(\.[0-9]+){3}|::1")
STATUSES = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
RUN_TAG = "cgd.run"
MAX_METRICS = 1000
"""MLflow accepts this number of figures in one message."""
MLFLOW_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # we try again ourselves, after asking what has arrived
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
MLFLOW_SILENCE = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow otherwise reports its use to its developers
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackedRun(NamedTuple):
    """The names of a run.

    Attributes:
        federation: the name of the federation.
        participant: our name.
        id: identifies the run, also after a restart.
    """

    federation: str
    participant: str
    id: str


class Row(NamedTuple):
    """Figures after a step.

    Attributes:
        step: the number of steps taken.
        time: seconds since 1970.
        figures: the figures by name.
    """

    step: int
    time: float
    figures: Mapping[str, float]


class Store(Protocol):
    """The place of one run at a target; any error of its methods means that it must be opened again."""

    known: set[tuple[str, int]]
    """The names and steps of the figures that are there."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write figures."""

    def end(self, status: str) -> None:
        """Mark that the run is "done", "interrupted" or "failed"."""


class Target(Protocol):
    """A place for the figures of runs; its `str` contains no secret."""

    caution: str
    """A sentence for the participant: who sees what."""

    def open(self, run: TrackedRun) -> Store:
        """Open the place of a run, which is created if it does not exist."""


def parse_target(text: str) -> Target:
    """Return the target that `--track` names.

    Raises:
        InputError: it cannot be used.
        MissingExtraError: its library is not installed.
    """
    kind, _, place = text.partition(":")
    if kind == "tensorboard":
        if not place:
            raise InputError("--track tensorboard: names no folder; write tensorboard:DIR")
        require("tensorboard", "tracking with TensorBoard")
        return TensorBoardTarget(Path(place))
    if kind == "mlflow":
        target = MLflowTarget(place)
        require("mlflow", "tracking with MLflow")
        target.check_library()
        return target
    # The text may be a URL with a secret, so it is not shown.
    raise InputError(f"--track begins with neither tensorboard: nor mlflow:; {FORM}")


class TensorBoardTarget:
    """A folder with event files of TensorBoard, one folder for each run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.caution = f"losses and scores of our own records are written to {folder}, exactly"
        try:
            check_writable(folder)
        except OSError as error:
            raise InputError(f"--track tensorboard: {folder} cannot be used ({error.strerror}); name another") from None

    def __str__(self) -> str:
        return f"TensorBoard in {self._folder}"

    def open(self, run: TrackedRun) -> Store:
        """See `Target`."""
        return EventFiles(self._folder / f"{run.federation}.{run.participant}.{run.id[:8]}")


class EventFiles:
    """The event files of one run; each process writes one of its own."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = list(folder.glob("*tfevents*"))
        self.known: set[tuple[str, int]] = set()
        for path in files:
            for event in LegacyEventFileLoader(str(path)).Load():  # ends at a record that a kill has cut off
                self.known |= {(value.tag, event.step) for value in event.summary.value}
        # TensorBoard reads the files in the order of their names, and usually puts the name of the machine there.
        self._path, self._begun = folder / f"events.out.tfevents.{len(files) + 1:010d}.cgd", False

    def write(self, rows: Sequence[Row]) -> None:
        """See `Store`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [] if self._begun else [Event(wall_time=rows[0].time, file_version="brain.Event:2")]
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.figures.items()]
            events.append(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))
        flags = os.O_APPEND if self._begun else os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(self._path, os.O_WRONLY | flags, 0o600), "wb") as file:
            self._begun = True
            for event in events:
                RecordWriter(file).write(event.SerializeToString())

    def end(self, status: str) -> None:
        """See `Store`; event files have no status."""


class MLflowTarget:
    """A tracking server of MLflow, or its database in a file.

    Names and passwords belong into the variables of the environment that MLflow has for them, because other users can
    see the command line.

    Args:
        uri: https://HOST, http://HOST or sqlite:///FILE.

    Raises:
        InputError: it cannot be used.
    """

    def __init__(self, uri: str) -> None:
        try:
            parts = urlsplit(uri)
            host, _ = parts.hostname, parts.port
        except ValueError:  # its text may contain a secret
            raise InputError("--track mlflow: is followed by a wrong host or port; write mlflow:https://HOST") from None
        if not uri.isascii() or not uri.isprintable() or " " in uri:
            raise InputError("--track mlflow: has a space or a special character; encode it (%20)")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise InputError(
                "--track mlflow: has a user, a password or a query, which other users of this machine can see; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, and write "
                "mlflow:https://HOST"
            )
        self._uri, self._scheme = uri, parts.scheme
        own = "losses and scores of our own records are sent exactly, without noise, with the names of the federation "
        if parts.scheme in ("http", "https") and host:
            self._shown = f"MLflow at {parts.scheme}://{host}"
            local = bool(LOOPBACK.fullmatch(host))
            where = f"to this machine ({host})" if local else f"to {host}: they leave this machine"
            plain = ", and everybody on the way can read them" if parts.scheme == "http" and not local else ""
            self.caution = f"{own}and of ours, {where}{plain}"
        elif parts.scheme == "sqlite" and uri.startswith("sqlite:///") and len(uri) > len("sqlite:///"):
            file = uri.removeprefix("sqlite:///")
            self._shown = f"MLflow in {file}"
            self.caution = f"losses and scores of our own records are written to {file}, exactly"
        else:
            raise InputError(
                "--track mlflow: is followed by the address of a tracking server, or by a database in a file; write "
                "mlflow:https://HOST or mlflow:sqlite:///FILE"
            )

    def __str__(self) -> str:
        return self._shown

    def check_library(self) -> None:
        """Check that the installed parts of MLflow suffice.

        Raises:
            InputError: they do not.
        """
        if self._scheme == "sqlite" and (find_spec("sqlalchemy") is None or find_spec("alembic") is None):
            raise InputError(
                "--track mlflow:sqlite needs the complete MLflow, and the extra cgd[mlflow] has the part for servers; "
                "pip install mlflow, or start a server and name it"
            )

    def open(self, run: TrackedRun) -> Store:
        """See `Target`."""
        os.environ.update(MLFLOW_SILENCE)
        for name, value in MLFLOW_SETTINGS.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "urllib3", "alembic"):  # they write addresses, and what they do, to the terminal
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return MLflowRun(self._uri, run)


class MLflowRun:
    """A run at a tracking server; the experiment has the name of the federation."""

    def __init__(self, uri: str, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(run.federation)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, tags={RUN_TAG: run.id}, run_name=run.participant)
            self._id = made.info.run_id
        names = found[0].data.metrics if found else ()
        histories = (self._client.get_metric_history(self._id, name) for name in names)
        self.known = {(each.key, each.step) for history in histories for each in history}

    def write(self, rows: Sequence[Row]) -> None:
        """See `Store`."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * row.time), row.step) for row in rows for name, value in row.figures.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MAX_METRICS])

    def end(self, status: str) -> None:
        """See `Store`."""
        self._client.set_terminated(self._id, STATUSES[status])

    def _experiment(self, name: str) -> str:
        """Return the ID of an experiment, which is created if nobody has done so."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another participant may have created it at the same time
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
