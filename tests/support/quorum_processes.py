"""Five processes with a quorum, whose connections pass a proxy: they are stopped, killed and cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from cgd.federation import config as file
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, MIN_PATIENCE, Absence
from support.cut_proxy import LAUNCHER
from support.federations import NAMES, ProcessFederation
from support.ports import free_port

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable
    from pathlib import Path

    from support.cut_proxy import CutProxy

FAULTS = ("stop", "kill", "cut")
DEADLINE_SECONDS = 600.0  # only if something is wrong; a busy machine may need minutes to start five processes
STEP_SECONDS = 0.1  # of the program below
STEPS = 100_000  # `finish` ends the programs

PROGRAM = """
import os, time
from pathlib import Path
import torch
import cgd

torch.set_num_threads(1)


def main(peers):
    generator = torch.Generator().manual_seed(sum(map(ord, peers.me)))
    x = torch.randn(30 + len(peers.me), 6, generator=generator)
    y = (x.sum(1) > 0).long()
    with cgd.public_seed(4):
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    cgd.confine(model, delta=0.1, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.05, peers=peers, samples=len(x), momentum=0.5)
    for step in optimizer.steps(peers.training["steps"]):
        time.sleep(0.1)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        write(f"{peers.me}.step", str(step))
        if step % 4 == 3:  # all agree on the end
            if float(peers.sum(torch.tensor([float(Path("end").exists())]))[0]) > 0:
                break
    write(f"{peers.me}.bits", optimizer.displacement().numpy().tobytes().hex())


def write(name, text):
    temporary = Path(name + ".new")
    temporary.write_text(text)
    os.replace(temporary, name)
"""


class QuorumProcesses(ProcessFederation):
    """Five participants whose connections pass through a proxy."""

    def __init__(self, folder: Path, quorum: int) -> None:
        super().__init__(folder, program=PROGRAM, steps=STEPS)
        self.stopped: set[str] = set()
        addresses = {each.name: each.address for each in file.Federation.load(self.path).participants}
        port = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
        self.ports = {(one, other): (free_port(), port[other]) for one in NAMES for other in NAMES if one != other}
        self.routes = {
            one: {addresses[other]: f"tcp://127.0.0.1:{self.ports[one, other][0]}" for other in NAMES if other != one}
            for one in NAMES
        }
        (folder / "launcher.py").write_text(LAUNCHER)
        section = Absence(quorum, MIN_PATIENCE, ABSENCE_REVEALS_GRADIENTS)
        lines = f"quorum = {section.quorum}\npatience = {section.patience}\naccept = '{section.accept}'"
        text = self.path.read_text()
        self.path.write_text(text.replace("[training]", f"[absence]\n{lines}\n\n[training]", 1))

    def run(self, name: str) -> None:
        """Start a participant, which connects through the proxy."""
        arguments = ["join", str(self.path), "--as", name, "--run", "training:main"]
        with (self.folder / f"{name}.err").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "launcher.py", *arguments],
                cwd=self.folder,
                stderr=log,
                stdout=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "ROUTES": json.dumps(self.routes[name])},
            )

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.stopped.add(name)

    def resume(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)
        self.stopped.discard(name)

    def step(self, name: str) -> int:
        path = self.folder / f"{name}.step"
        return int(path.read_text()) if path.exists() else -1

    def advance(self, names: Iterable[str], steps: int = 3, seconds: float = DEADLINE_SECONDS) -> float:
        """Wait until each of these participants has taken some more steps; return how long that took."""
        start, targets = time.monotonic(), {name: self.step(name) + steps for name in names}
        while any(self.step(name) < target for name, target in targets.items()):
            if time.monotonic() - start > seconds:
                output = "\n".join(f"--- {name}\n{self.output(name)[-3000:]}" for name in NAMES)
                raise AssertionError({name: self.step(name) for name in NAMES}, output)
            assert not any(self.processes[name].poll() for name in targets), [self.output(name) for name in targets]
            time.sleep(0.05)
        return time.monotonic() - start

    def finish(self) -> None:
        """End all programs, and check that all have the same displacement."""
        (self.folder / "end").touch()
        assert set(self.wait().values()) == {0}
        assert len(set(self.bits().values())) == 1
        for name in NAMES:
            assert "different histories" not in self.output(name)

    def close(self) -> None:
        for name in list(self.stopped):
            self.resume(name)
        super().close()

    def fail_and_repair(self, kind: str, rng: random.Random, proxy: CutProxy) -> float:
        """Stop, kill or cut off a participant at a random moment; return how long the others took for three steps.

        When all have gone on, end the fault, and wait until the participant goes on, too.
        """
        name = rng.choice(NAMES)
        others = [each for each in NAMES if each != name]
        time.sleep(rng.random() * 4 * STEP_SECONDS)
        if kind == "stop":
            self.stop(name)
        elif kind == "kill":
            self.kill(name)
        else:
            proxy.cut([name], others)
        seconds = self.advance(others, 3)
        if kind == "stop":
            self.resume(name)
        elif kind == "kill":
            self.run(name)
        else:
            proxy.cut()
        self.advance(NAMES, 3)
        return seconds
