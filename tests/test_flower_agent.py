"""The agent of the Flower example: what a dishonest ServerApp, SuperLink or ClientApp gets from it."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cgd.federation.config import Federation
from support.federation_files import BLOCKS, block, text
from support.in_process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

AGENT = Path(__file__).parent.parent / "examples" / "flower" / "agent.py"
spec = importlib.util.spec_from_file_location("flower_agent", AGENT)
assert spec is not None
assert spec.loader is not None
agent_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent_module)

TABLES = """
[data]
target = "outcome"
[data.columns]
age = "number"
[model]
function = "trial:network"
"""
HEAD = text("steps = 20\nlr = 0.1", blocks="")
APPROVED = HEAD + BLOCKS + TABLES
DIGEST = Federation.parse(APPROVED, Path("federation.toml")).digest
OWN_BLOCKS = "\n".join((block(0, "ada"), block(8, "bob"), block(9, "cleo")))
# What `cgd join` is replaced by: it writes its arguments, and then does what a test wants.
JOIN = "import sys; open('arguments', 'a').write(repr(sys.argv[1:]) + '\\n'); "


@pytest.fixture
def make_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.chdir(tmp_path)
    made = []

    def make(program: str = "", shown: Sequence[str] = ("step",)) -> Any:
        command = [sys.executable, "-c", JOIN + program, "--as", "ada"]
        made.append(agent_module.Agent("ada", DIGEST, tmp_path / "ada", command, shown))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(agent: Any, **request: object) -> dict[str, Any]:
    answer = agent.answer(json.dumps(request).encode())
    assert answer.keys() == {"participant", "state", "reason", "metrics"}
    assert answer["participant"] == "ada"
    return dict(answer)


def joined(folder: Path) -> list[str]:
    """Return the arguments of every start of `cgd join`."""
    path = folder / "arguments"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    "offered",
    [
        pytest.param(APPROVED.replace(BLOCKS, OWN_BLOCKS), id="its own keys as the other members"),
        pytest.param(
            "\n".join((HEAD, block(0, "ada"), block(2, "bob"), block(1, "cleo"), TABLES)), id="two members exchanged"
        ),
        pytest.param(APPROVED.replace("tcp://bob.example", "tcp://evil.example"), id="another address"),
        pytest.param(APPROVED.replace(block(2, "cleo"), ""), id="fewer members"),
        pytest.param(APPROVED + "\n" + block(3, "dan"), id="one more member"),
        pytest.param(APPROVED.replace("epoch = 1", "epoch = 2"), id="another epoch"),
        pytest.param(APPROVED.replace('name = "five"', 'name = "six"'), id="a second training of the same records"),
        pytest.param(APPROVED.replace("lr = 0.1", "lr = 1e6"), id="another step size"),
        pytest.param(APPROVED.replace("trial:network", "os:abort"), id="another function"),
        pytest.param(APPROVED.replace('target = "outcome"', 'target = "age"'), id="another target"),
        pytest.param(APPROVED.replace("steps = 20", "steps = "), id="no TOML"),
        pytest.param("\ud800", id="no text"),
        pytest.param("", id="nothing"),
    ],
)
def test_another_file_than_the_approved_one_is_refused_and_nothing_is_written(
    make_agent: Callable[..., Any], tmp_path: Path, offered: str
) -> None:
    assert offered != APPROVED
    agent = make_agent()
    for kind in ("offer", "join"):
        answer = ask(agent, **{kind: offered})
        assert answer["state"] == "refused"
        assert answer["reason"] == "the file is not the one that this organisation has approved"
    assert ask(agent, report=True)["state"] == "idle"
    assert list(tmp_path.iterdir()) == []


def test_approved_file_starts_our_own_command_once(make_agent: Callable[..., Any], tmp_path: Path) -> None:
    agent = make_agent("import time; time.sleep(60)")
    (tmp_path / "ada").mkdir()
    assert ask(agent, offer=APPROVED)["state"] == "approved"
    assert joined(tmp_path) == []
    reordered = "# --run os:abort\n" + APPROVED
    for _ in range(3):
        assert ask(agent, join=reordered)["state"] == "training"
    wait_until(lambda: joined(tmp_path))
    assert joined(tmp_path) == [repr(["--as", "ada", str(tmp_path / "ada" / "federation.toml")])]
    assert Federation.load(tmp_path / "ada" / "federation.toml").digest == DIGEST


def test_failed_training_is_continued_and_a_finished_one_is_not_repeated(
    make_agent: Callable[..., Any], tmp_path: Path
) -> None:
    agent = make_agent("sys.exit(0 if open('arguments').read().count('\\n') == 2 else 3)")
    assert ask(agent, join=APPROVED)["state"] in ("training", "failed")
    wait_until(lambda: ask(agent, report=True)["state"] == "failed")
    assert ask(agent, report=True)["reason"] == "cgd join ended with exit code 3"
    ask(agent, join=APPROVED)
    wait_until(lambda: ask(agent, report=True)["state"] == "done")
    assert ask(agent, join=APPROVED)["state"] == "done"
    assert len(joined(tmp_path)) == 2


def test_training_that_cannot_be_started_is_reported_without_a_path(
    make_agent: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada").write_text("a file in place of the folder")
    answer = ask(make_agent(), join=APPROVED)
    assert (answer["state"], answer["reason"]) == ("failed", "cgd join cannot be started")
    assert "cgd join cannot be started: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xff\n",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"run": "os:abort"}',
        b'{"join": 1}',
        b'{"join": ["a"]}',
        b'{"data": "/etc/passwd", "join": "x"}',
        b'{"join": "' + b"9" * 5000 + b'"}',
    ],
)
def test_request_that_is_not_understood_is_refused(
    make_agent: Callable[..., Any], tmp_path: Path, request_bytes: bytes
) -> None:
    answer = make_agent().answer(request_bytes)
    assert answer["state"] == "refused"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ((), {}),
        (("step",), {"step": 10}),
        (("step", "score", "training_loss", "validation_loss"), {"step": 10, "score": 0.75}),
    ],
)
def test_only_agreed_metrics_are_shown_and_only_numbers(
    make_agent: Callable[..., Any], tmp_path: Path, shown: tuple[str, ...], expected: dict[str, float]
) -> None:
    run = tmp_path / "ada" / "run"
    run.mkdir(parents=True)
    rows = {"step": 5}, {"step": 10, "score": 0.75, "training_loss": float("nan"), "validation_loss": "secret"}
    (run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = make_agent(shown=shown)
    assert ask(agent, offer="")["metrics"] == {}
    ask(agent, join=APPROVED)
    assert ask(agent, report=True)["metrics"] == expected


def test_socket_serves_many_requests_and_survives_bad_ones(make_agent: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with agent_module.Server(path, make_agent()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def send(request: bytes) -> bytes:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                try:
                    client.sendall(request)
                    client.shutdown(socket.SHUT_WR)
                    return client.makefile("rb").readline()
                except OSError:  # it was closed
                    return b""

        try:
            assert json.loads(send(b'{"report": true}\n'))["state"] == "idle"
            assert send(b'{"join": "' + b"x" * agent_module.MAX_REQUEST_BYTES + b'"}\n') == b""
            assert json.loads(send(b"nonsense\n"))["state"] == "refused"
            assert json.loads(send(json.dumps({"offer": APPROVED}).encode() + b"\n"))["state"] == "approved"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--digest", "3f0c"], "--digest is '3f0c'; copy the digest that `cgd federation show FILE` prints"),
        (["--digest", DIGEST, "--show", "gradient"], "invalid choice: 'gradient'"),
        (["--digest", DIGEST, "--socket", f"{'x' * 200}.sock"], "name a short path in a folder of your own"),
    ],
)
def test_bad_options_are_clear_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    required = ["--as", "ada", "--data", "a.csv", "--key", "a.key", "--socket", "a.sock"]
    with pytest.raises(SystemExit, match="2"):
        agent_module.main([*required, "--folder", str(tmp_path / "ada"), *options])
    assert message in capsys.readouterr().err
