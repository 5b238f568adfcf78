"""A tracking server of MLflow, from an environment of its own: `make .venv/mlflow/installed`."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = Path(__file__).parent.parent.parent / ".venv" / "mlflow"
PYTHON = ENVIRONMENT / "bin" / "python"
SECONDS = 300.0

needs_mlflow = pytest.mark.skipif(
    not (ENVIRONMENT / "installed").exists(), reason="needs the complete MLflow: make .venv/mlflow/installed"
)


class MLflowServer:
    """A server with its database in a file; it can be stopped and started again.

    Attributes:
        url: its address.
        database: its database.
    """

    def __init__(self, folder: Path) -> None:
        self._port, self._folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self._port}"
        self.database = f"sqlite:///{folder / 'server.db'}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--workers", "1")
        artifacts = ("--artifacts-destination", str(self._folder / "artifacts"))
        log = (self._folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            [PYTHON, "-m", "mlflow", "server", "--backend-store-uri", self.database, *address, *artifacts],
            cwd=self._folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"},
        )
        log.close()
        deadline = time.monotonic() + SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < deadline, (self._folder / "server.log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def runs(uri: str, experiment: str) -> Iterator[tuple[Any, dict[str, list[tuple[int, float]]]]]:
    """Yield the runs of an experiment, each with the history of its figures, as MLflow itself reads them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    for run in client.search_runs([found.experiment_id]):
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        yield run, {name: sorted((each.step, each.value) for each in history) for name, history in histories.items()}
