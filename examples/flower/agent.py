"""Join one approved training when Flower says so: the part of the example that an organisation runs itself.

    python agent.py --as hospital-a --data hospital-a.csv --key hospital-a.key \
        --digest 3f0c... --socket /run/cgd/hospital-a.sock [--show step score] [-- OPTIONS OF cgd join]

Flower sends the code of a ClientApp together with each run, so a check in the ClientApp could be replaced by whoever
controls the SuperLink. So the keys, the data and the decision are here, in a process that no run can replace, and if
possible of another user than the SuperNode's. The ClientApp reaches it through a Unix socket. It can do two things:

    {"offer": TEXT}   TEXT is a federation file: answer whether it is the approved one
    {"join": TEXT}    the same, and start `cgd join` if it is; again if that has failed
    {"report": true}  answer with the state, and the metrics that --show names

Each request and each answer is one line of JSON. A file is approved if its digest is --digest, which `cgd federation
show FILE` prints. It covers the names, keys and addresses of all members, and all settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import socketserver
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import CGDError
from cgd.federation.config import Federation
from cgd.files import open_private, write_private

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_REQUEST_BYTES = 1 << 20
REQUEST_SECONDS = 10.0
METRICS = ("step", "best_step", "everyone_validation_loss", "training_loss", "validation_loss", "score")
NOT_APPROVED = "the file is not the one that this organisation has approved"


class Agent:
    """Answers the requests of a ClientApp.

    Args:
        name: the name of our participant.
        digest: the digest of the approved federation file.
        folder: where the approved file, the results and the log of `cgd join` are written.
        command: the command that joins; the path of the federation file is added.
        shown: the metrics that may be shown.
    """

    def __init__(self, name: str, digest: str, folder: Path, command: Sequence[str], shown: Collection[str]) -> None:
        self.name, self.digest, self.folder, self.command = name, digest, folder, list(command)
        self.shown = tuple(shown)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def answer(self, request: bytes) -> dict[str, Any]:
        """Return the answer to a request: names, states and agreed metrics, whatever the request contains."""
        try:
            content = json.loads(request)
            kind, text = next(iter(content.items()))
        except (ValueError, AttributeError, StopIteration, RecursionError):
            return self._state("refused", "the request is not understood")
        with self._lock:
            if kind == "report":
                return self._report()
            if kind not in ("offer", "join") or not isinstance(text, str):
                return self._state("refused", "the request is not understood")
            if not self._is_approved(text):
                return self._state("refused", NOT_APPROVED)
            if kind == "offer":
                return self._state("approved")
            try:
                if self._report()["state"] in ("idle", "failed"):
                    self._start(text)
            except (CGDError, OSError) as error:
                print(f"agent: cgd join cannot be started: {error}", file=sys.stderr)
                return self._state("failed", "cgd join cannot be started")
            return self._report()

    def close(self) -> None:
        """Stop a running training; the same request continues it later."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _is_approved(self, text: str) -> bool:
        try:
            text.encode()  # half a surrogate pair could not be written
            return Federation.parse(text, self.folder / "offered.toml").digest == self.digest
        except (CGDError, ValueError) as error:
            print(f"agent: an offered file is not used: {error!a}", file=sys.stderr)
            return False

    def _start(self, text: str) -> None:
        path = self.folder / "federation.toml"
        write_private(path, text.encode())
        print(f"agent: {self.name} joins", file=sys.stderr)
        with open(self.folder / "join.log", "ab", opener=open_private) as log:
            self._process = subprocess.Popen(
                [*self.command, str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _report(self) -> dict[str, Any]:
        if self._process is None:
            return self._state("idle")
        code, metrics = self._process.poll(), self._metrics()
        if code is None:
            return self._state("training", metrics=metrics)
        if code == 0:
            return self._state("done", metrics=metrics)
        return self._state("failed", f"cgd join ended with exit code {code}", metrics)

    def _state(self, state: str, reason: str = "", metrics: dict[str, float] | None = None) -> dict[str, Any]:
        return {"participant": self.name, "state": state, "reason": reason, "metrics": metrics or {}}

    def _metrics(self) -> dict[str, float]:
        """Return the agreed metrics of the latest evaluation."""
        try:
            last = json.loads((self.folder / "run" / "history.jsonl").read_bytes().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return {}
        chosen = [(name, last.get(name)) for name in self.shown] if isinstance(last, dict) else []
        return {name: x for name, x in chosen if isinstance(x, int | float) and math.isfinite(x)}


class Handler(socketserver.StreamRequestHandler):
    """Reads one request and writes one answer."""

    timeout = REQUEST_SECONDS
    server: Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            request = self.rfile.readline(MAX_REQUEST_BYTES + 1)
            if len(request) <= MAX_REQUEST_BYTES:
                self.wfile.write(json.dumps(self.server.agent.answer(request)).encode() + b"\n")


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Listens on a Unix socket: whoever may enter its folder may connect."""

    daemon_threads = True

    def __init__(self, path: Path, agent: Agent) -> None:
        self.agent = agent
        if path.is_socket():  # of an agent that was killed
            path.unlink()
        super().__init__(str(path), Handler)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Join one approved training when Flower says so.")
    parser.add_argument("--as", dest="name", required=True, help="the name of our participant")
    parser.add_argument("--data", type=Path, required=True, help="our records, as for cgd join")
    parser.add_argument("--key", type=Path, required=True, help="our private key file")
    parser.add_argument("--digest", required=True, help="of the approved federation file (cgd federation show FILE)")
    parser.add_argument("--socket", type=Path, required=True, help="the Unix socket for the ClientApp")
    parser.add_argument("--folder", type=Path, help="for state and results (default: the name of our participant)")
    parser.add_argument("--show", nargs="*", choices=METRICS, default=["step"], help="metrics that Flower may collect")
    parser.add_argument("options", nargs="*", help="after --: further options of cgd join")
    chosen = parser.parse_args(arguments)
    if not re.fullmatch("[0-9a-f]{64}", chosen.digest):
        parser.error(f"--digest is {chosen.digest!r}; copy the digest that `cgd federation show FILE` prints")
    folder: Path = chosen.folder or Path(chosen.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    cgd = str(Path(sysconfig.get_path("scripts")) / "cgd")
    command = [cgd, "join", "--as", chosen.name, "--data", str(chosen.data), "--key", str(chosen.key)]
    command += ["--out", str(folder / "run"), "--state", str(folder / "state"), *chosen.options]
    agent = Agent(chosen.name, chosen.digest, folder, command, chosen.show)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = Server(chosen.socket, agent)
    except OSError as error:
        parser.error(f"--socket {chosen.socket} cannot be used ({error}); name a short path in a folder of your own")
    with server:
        try:
            print(f"agent: {chosen.name} listens at {chosen.socket}", file=sys.stderr)
            server.serve_forever()
        except KeyboardInterrupt:
            agent.close()
        finally:
            chosen.socket.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
