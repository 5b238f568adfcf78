"""The Flower example: a SuperLink with three SuperNodes, and Flower's simulation, start and observe a training.

Flower needs an environment of its own: `make .venv/flower/installed`. Its processes listen on the loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgd.federation.config import Federation
from cgd.federation.keys import Keys
from support.ports import free_port
from support.tabular import table, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "flower"
ENVIRONMENT = ROOT / ".venv" / "flower"
NAMES = ("ada", "bob", "cleo")
STEPS = 20
# 127.0.0.1, the same in IPv6, and ::1, in /proc/net/tcp and tcp6; LISTENING is the state there.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
LISTENING = "0A"
SECONDS = 500.0  # of a machine that does much else

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / "installed").exists(), reason="needs Flower's environment: make .venv/flower/installed"
    ),
]


class Lab:
    """The processes of Flower and the agents on this machine, in one folder.

    Args:
        folder: the folder; every process gets its path in FLWR_HOME.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        home = folder / "flower"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
        switched_off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        agents = os.pathsep.join(str(folder / f"{name}.sock") for name in NAMES)
        # Ray joins a cluster that it finds in its folder, and listens on all interfaces if clusters are allowed.
        self.ray = Path(tempfile.mkdtemp(prefix="ray"))  # a short path, for the sockets in it
        switched_off |= {"RAY_TMPDIR": str(self.ray), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        own = {"FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1", "CGD_AGENTS": agents, **switched_off}
        self.environment = {**os.environ, **own}
        self.federation = write_federation(folder, NAMES, steps=STEPS)

    def start_agents(self) -> None:
        digest = Federation.load(self.federation).digest
        for seed, name in enumerate(NAMES):
            write_csv(self.folder / f"{name}.csv", table(60, seed))
            shown = () if name == "bob" else ("step", "everyone_validation_loss")
            files = ("--data", f"{name}.csv", "--key", f"{name}.key", "--digest", digest, "--socket", f"{name}.sock")
            self.start("python", str(EXAMPLE / "agent.py"), "--as", name, *files, "--show", *shown)
        self.until(lambda: all((self.folder / f"{name}.sock").exists() for name in NAMES))

    def start(self, *command: str) -> None:
        with open(self.folder / f"{len(self.processes)}-{Path(command[0]).name}.log", "wb") as log:
            program = str(ENVIRONMENT / "bin" / command[0])
            self.processes.append(
                subprocess.Popen([program, *command[1:]], cwd=self.folder, env=self.environment, stdout=log, stderr=log)
            )

    def start_superlink(self, *options: str) -> None:
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.start("flower-superlink", "--insecure", *address, "--disable-runtime-dependency-installation", *options)

    def start_supernode(self, name: str) -> None:
        address = ("--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(free_port()))
        self.start("flower-supernode", "--insecure", *address, "--node-config", f'agent="{self.folder / name}.sock"')

    def run(self, federation: Path, *options: str) -> str:
        """Run the app with a federation file, and return its log; the SuperLink may still be starting."""
        settings = f'federation="{federation}" report-seconds=8.0 wait-seconds=300.0 answer-seconds=400.0'
        program = str(ENVIRONMENT / "bin" / "flwr")
        command = [program, "run", str(EXAMPLE / "app"), "lab", "--stream", "--run-config", settings, *options]
        deadline = time.monotonic() + SECONDS
        while True:
            log = self.folder / "flwr-run.log"
            with log.open("wb") as output:
                running = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
            self.processes.append(running)
            while running.poll() is None:
                assert time.monotonic() < deadline, self.logs()
                assert self.listening() <= LOOPBACK
                time.sleep(0.5)
            if "Successfully started run" in log.read_text():
                assert self.listening()
                return log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def own_processes(self) -> list[int]:
        """Return the ids of all processes of this lab, also of those that Flower or Ray has started."""
        home, found = f"FLWR_HOME={self.folder / 'flower'}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if home in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def listening(self) -> set[str]:
        """Return the addresses at which processes of this lab listen, as Linux writes them."""
        sockets = {}
        for table_of in ("tcp", "tcp6"):
            for line in Path("/proc/net", table_of).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                if state == LISTENING:
                    sockets[f"socket:[{more[5]}]"] = local.partition(":")[0]
        found = set()
        for process_id in self.own_processes():
            for descriptor in Path("/proc", str(process_id), "fd").glob("*"):
                with suppress(OSError):  # it was closed, or the process has ended
                    found.add(sockets.get(os.readlink(descriptor), ""))
        return found - {""}

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(timeout=SECONDS)
        try:
            self.until(lambda: not self.own_processes())
        finally:
            for process_id in self.own_processes():
                os.kill(process_id, signal.SIGKILL)
            shutil.rmtree(self.ray, ignore_errors=True)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    try:
        made.start_agents()
        yield made
    finally:
        made.close()


def check_results(lab: Lab, log: str) -> None:
    """Check that all have trained together, and that Flower has seen what they agreed to show."""
    assert "all 3 participants are done" in log, log + lab.logs()
    runs = [json.loads((lab.folder / name / "run" / "run.json").read_text()) for name in NAMES]
    assert [run["outcome"]["steps"] for run in runs] == [STEPS] * 3
    losses = {run["history"][-1]["everyone_validation_loss"] for run in runs}
    assert len(losses) == 1
    shown = f"step {STEPS}, everyone_validation_loss {losses.pop():g}"
    lines = {line.rpartition("INFO")[2].partition(":")[2].strip() for line in log.splitlines()}
    assert {f"ada is done, {shown}", "bob is done", f"cleo is done, {shown}"} <= lines, log + lab.logs()


def test_superlink_with_three_supernodes_trains_only_with_the_approved_file(lab: Lab) -> None:
    lab.start_superlink()
    for name in NAMES:
        lab.start_supernode(name)
    forged = lab.folder / "forged.toml"
    forged.write_text(lab.federation.read_text().replace(Federation.load(lab.federation).participant("bob").key, key()))
    refusal = "refuses: the file is not the one that this organisation has approved"
    log = lab.run(forged)
    assert all(f"{name} {refusal}" in log for name in NAMES), log + lab.logs()
    assert not list(lab.folder.glob("*/join.log"))
    check_results(lab, lab.run(lab.federation))


def test_simulation_of_flower_with_three_supernodes_trains(lab: Lab) -> None:
    """Two processors for three ClientApps: none of them may wait for another."""
    lab.start_superlink("--simulation")
    simulated = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
    check_results(lab, lab.run(lab.federation, "--federation-config", simulated))


def key() -> str:
    """Return the public key of a dishonest server that poses as a member."""
    return Keys.generate("bob").public
