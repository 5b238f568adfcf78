"""Run the tutorial: five hospitals as five processes, one of which is killed and restarted. `make federation-demo`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from train import HOSPITALS

HERE = Path(__file__).parent
CGD = (sys.executable, "-m", "cgd")


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def join(folder: Path, hospital: str, output: int) -> subprocess.Popen[str]:
    command = [*CGD, "join", "federation.toml", "--as", hospital, "--run", "train:main"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    errors = subprocess.STDOUT if output == subprocess.PIPE else output
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=errors, text=True)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="cgd-federation-"))
    print(f"All files are in {folder}\n")
    participants = []
    for hospital, port in zip(HOSPITALS, free_ports(len(HOSPITALS)), strict=True):
        subprocess.run([*CGD, "keygen", hospital], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        participants += ["--participant", f"{hospital}=tcp://127.0.0.1:{port}={hospital}.pub"]
    new = ["federation", "new", "federation.toml", "--name", "five-hospitals", "--steps", "200", *participants]
    subprocess.run([*CGD, *new], cwd=folder, check=True)
    subprocess.run([*CGD, "federation", "show", "federation.toml"], cwd=folder, check=True)

    print("Five processes start. What follows is the output of hospital-a.\n")
    processes = {hospital: join(folder, hospital, subprocess.DEVNULL) for hospital in HOSPITALS[1:]}
    processes["hospital-a"] = join(folder, "hospital-a", subprocess.PIPE)
    try:
        for line in processes["hospital-a"].stdout or ():
            print(line, end="")
            if "step 60," in line:
                print("--- hospital-c is killed (kill -9), its state is deleted, and it is started again")
                processes["hospital-c"].kill()
                processes["hospital-c"].wait()
                shutil.rmtree(folder / "state" / "hospital-c", ignore_errors=True)
                processes["hospital-c"] = join(folder, "hospital-c", subprocess.DEVNULL)
        codes = {hospital: process.wait(timeout=300) for hospital, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    table = Table("hospital", "exit code", "accuracy on its held-out records", "displacement")
    for hospital in HOSPITALS:
        result = json.loads((folder / f"{hospital}.json").read_text())
        table.add_row(hospital, str(codes[hospital]), f"{100 * result['accuracy']:.1f} %", result["displacement"][:12])
    Console().print(table)


if __name__ == "__main__":
    main()
