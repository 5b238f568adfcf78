"""`--track mlflow:`: a real server and a real database, of which is read back what was written."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cgd.reporting import tracking
from cgd.reporting.run_file import EvalRecord
from cgd.reporting.tracking import Tracking
from support.mlflow_server import PYTHON, SECONDS, MLflowServer, needs_mlflow, runs

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parent.parent.parent / "src"

pytestmark = [pytest.mark.slow, needs_mlflow, pytest.mark.filterwarnings("ignore")]  # of MLflow's own libraries


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    with MLflowServer(tmp_path_factory.mktemp("mlflow")) as made:
        yield made


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "MAX_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "END_SECONDS", SECONDS)  # of a machine that does much else


def evaluation(step: int) -> EvalRecord:
    return EvalRecord(step, step / 4, step, step / 8, step / 16, step / 32)


def expected(*steps: int) -> dict[str, list[tuple[int, float]]]:
    parts = {"everyone_validation_loss": 4, "training_loss": 8, "validation_loss": 16, "score": 32}
    return {name: [(step, step / part) for step in steps] for name, part in parts.items()}


def begin(url: str, federation: str, participant: str, folder: Path) -> Tracking:
    found = Tracking.from_options([f"mlflow:{url}"])
    found.begin(federation, participant, folder)
    return found


def wait_until_written(found: Tracking) -> None:
    deadline = time.monotonic() + SECONDS
    while any(each.unwritten for each in found._trackers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_restarted_run_is_one_run_without_duplicates(server: MLflowServer, tmp_path: Path) -> None:
    first = begin(server.url, "restarted", "ada", tmp_path / "ada")
    first.track(evaluation(5), {"waiting_seconds": 2.5})
    first.track(evaluation(10), {})
    wait_until_written(first)  # the process is killed: nobody marks the end
    again = begin(server.url, "restarted", "ada", tmp_path / "ada")
    for step in (5, 10, 15):
        again.track(evaluation(step), {})
    assert again.end("done") == []
    other = begin(server.url, "restarted", "bob", tmp_path / "bob")
    other.track(evaluation(5), {})
    assert other.end("interrupted") == []
    first.end("failed")
    found = {run.info.run_name: (run, figures) for run, figures in runs(server.url, "restarted")}
    assert found.keys() == {"ada", "bob"}
    assert found["ada"][1] == expected(5, 10, 15) | {"waiting_seconds": [(5, 2.5)]}
    assert found["bob"][1] == expected(5)
    assert found["bob"][0].info.status == "KILLED"
    run = found["ada"][0]
    assert run.data.params == {}
    assert run.data.tags == {"cgd.run": (tmp_path / "ada" / "tracked").read_text().strip(), "mlflow.runName": "ada"}
    assert run.info.user_id in ("", "unknown", None)  # not the name of the user here


def test_members_that_begin_at_the_same_time_share_an_experiment(server: MLflowServer, tmp_path: Path) -> None:
    names = ("ada", "bob", "cleo")
    found = [begin(server.url, "together", name, tmp_path / name) for name in names]
    for each in found:
        each.track(evaluation(5), {})
    assert [each.end("done") for each in found] == [[], [], []]
    stored = {run.info.run_name: figures for run, figures in runs(server.url, "together")}
    assert stored == dict.fromkeys(names, expected(5))


def test_server_that_is_away_misses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = MLflowServer(tmp_path)
    found = begin(server.url + "/", "away", "ada", tmp_path / "ada")
    before = time.monotonic()
    for step in range(1, 101):
        found.track(evaluation(step), {})
    assert time.monotonic() - before < SECONDS / 4  # it waits for nothing, and the server is started later
    (tracker,) = found._trackers
    deadline = time.monotonic() + SECONDS
    while not tracker._warned:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tracker.unwritten == 100
    with server:
        wait_until_written(found)
        server.stop()
        found.track(evaluation(101), {})
        server.start()
        assert found.end("done") == []
        ((_, figures),) = runs(server.url, "away")
        assert figures == expected(*range(1, 102))
    assert [each.getMessage().partition(" (")[0] for each in caplog.records if each.name.startswith("cgd")] == [
        "MLflow at http://127.0.0.1 cannot be reached or written"
    ]
    assert capfd.readouterr() == ("", "")  # of MLflow, with addresses


class LossyProxy:
    """Forwards requests to a server, and loses some answers.

    Attributes:
        lose: the number of next answers to messages with figures that are lost, after the server has applied them.
        requests: the paths and headers of all requests.
    """

    def __init__(self, server: MLflowServer) -> None:
        self.lose, self.requests = 0, list[tuple[str, dict[str, str]]]()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                proxy.requests.append((self.path, dict(self.headers)))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                kept = {"Content-Type": "application/json"}
                path = self.path.removeprefix("/s3cret-path")
                request = urllib.request.Request(server.url + path, body or None, kept, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=SECONDS) as found:
                        status, content = found.status, found.read()
                except urllib.error.HTTPError as error:
                    status, content = error.code, error.read()
                if path.endswith("log-batch") and proxy.lose:
                    proxy.lose -= 1
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer  # noqa: N815 - the names of http.server

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/s3cret-path"


def test_lost_answers_give_no_duplicates_and_secrets_are_not_logged(
    server: MLflowServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret-token")
    caplog.set_level("DEBUG")
    proxy = LossyProxy(server)
    thread = threading.Thread(target=proxy.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        proxy.lose = 3
        found = begin(proxy.url, "lossy", "ada", tmp_path / "ada")
        for step in range(1, 6):
            found.track(evaluation(step), {})
            wait_until_written(found)
        assert found.end("done") == []
    finally:
        proxy.server.shutdown()
        thread.join()
        proxy.server.server_close()
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    ((run, figures),) = runs(server.url, "lossy")
    assert figures == expected(1, 2, 3, 4, 5)
    assert run.info.status == "FINISHED"
    assert proxy.lose == 0
    assert all(headers["Authorization"] == "Bearer s3cret-token" for _, headers in proxy.requests)
    out, err = capfd.readouterr()
    assert "s3cret" not in caplog.text + out + err
    assert {path.rpartition("/mlflow/")[2].partition("?")[0] for path, _ in proxy.requests} <= {
        "experiments/get-by-name", "experiments/create", "runs/search", "runs/create", "runs/update",
        "runs/log-batch", "metrics/get-history", "runs/get",
    }  # fmt: skip


PROGRAM = """
import json, sys
from pathlib import Path
from cgd.reporting.run_file import EvalRecord
from cgd.reporting import tracking

tracking.END_SECONDS = 300.0
for steps in ((5, 10), (5, 10, 15)):
    found = tracking.Tracking.from_options([f"mlflow:{sys.argv[1]}"])
    found.begin("trial", "ada", Path(sys.argv[2]))
    for step in steps:
        found.track(EvalRecord(step, step / 4, step, step / 8, step / 16, step / 32), {})
    assert found.end("done") == []

from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
read = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print(json.dumps({name: sorted([each.step, each.value] for each in history) for name, history in read.items()}))
"""


def test_database_in_a_file_needs_no_server(tmp_path: Path) -> None:
    """With the complete MLflow, in its environment."""
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    found = subprocess.run(
        [PYTHON, "-c", PROGRAM, uri, tmp_path / "ada"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    written = {name: [tuple(each) for each in history] for name, history in json.loads(found.stdout).items()}
    assert written == expected(5, 10, 15)
