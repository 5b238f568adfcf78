"""Federations of real processes on loopback, for tests."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cgd import local_peers
from cgd.federation import config as file
from cgd.federation import config_edit
from cgd.federation.keys import Keys
from cgd.federation.state import StateFolder
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from cgd import Peers
    from cgd.optim.grid import Cell

NAMES = ("ada", "bob", "cleo", "dan", "eve")

# The program of every participant. Its data depend on its name, its origin on its key.
TRAINING = """
import hashlib, os, time
import numpy as np
import torch
import cgd

torch.set_num_threads(1)


def data(name, samples=24):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = torch.randn(samples + len(name), 6, generator=generator)
    return x, (x.sum(1) > 0).long()


def network():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def train(peers, steps=None, pause=0.0, watched=False):
    x, y = data(peers.me)
    with cgd.public_seed(4):
        model = network()
    cgd.confine(model, delta=0.1, seed=peers.seed)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "peers": peers.groups["column"]}, {"params": parameters[2:]}] \
        if peers.groups else parameters
    optimizer = cgd.ConfinedSGD(groups, lr=0.5, peers=peers, samples=len(x), momentum=0.5)
    members = int(peers.sum(np.array(1)))
    losses = []
    count = steps or peers.training["steps"]
    for step in optimizer.steps(count) if os.environ.get("LOOP") == "steps" else range(count):
        time.sleep(pause)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if watched:
            with open(f"{peers.me}.step", "w") as file:
                file.write(str(step))
        if step % 10 == 9:
            losses.append(float(peers.sum(torch.tensor([loss.item()]))[0]) / members)
    return optimizer.displacement(), losses


def blocks():
    generator = torch.Generator().manual_seed(3)
    return cgd.Grid(5).split(torch.randn(60, 6, generator=generator), torch.arange(60) % 2)


def like_the_simulator(peers):
    cell = cgd.Cell(sorted(peers.members).index(peers.me), 0)
    block = blocks()[cell]
    with cgd.public_seed(4):
        model = network()
    cgd.confine(model, 0.2, cgd.participant_seed(4, cell))
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.3, peers=peers, samples=block.samples)
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(block.x), block.y).backward()
        optimizer.step()
    save(peers, optimizer.displacement())


def save(peers, displacement):
    with open(f"{peers.me}.bits", "w") as file:
        file.write(hashlib.sha256(displacement.numpy().tobytes()).hexdigest())


def main(peers):
    displacement, losses = train(peers, pause=float(os.environ.get("PAUSE", "0")), watched=True)
    save(peers, displacement)
"""


class ProcessFederation:
    """Participants as processes, with their keys and the federation file in one folder.

    Args:
        folder: the folder.
        names: the names of the participants.
        cells: their cells, in a grid.
        dialers: the participants that only dial out, to a hub; without any there is no hub.
        program: the source of the module `training` that every participant runs.
        make_keys: returns the keys of a participant, or of the hub.
        training: settings of the training.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = NAMES,
        cells: Sequence[Cell] = (),
        dialers: Collection[str] = (),
        program: str = TRAINING,
        make_keys: Callable[[str], Keys] = Keys.generate,
        **training: object,
    ) -> None:
        self.folder = folder
        self.path = folder / "federation.toml"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, str] = {}
        (folder / "training.py").write_text(program)
        participants = []
        for i, name in enumerate(names):
            keys = make_keys(name)
            keys.save(folder)
            cell = cells[i] if cells else None
            address = "" if name in dialers else f"tcp://127.0.0.1:{free_port()}"
            participants.append(file.Participant(name, address, keys.public, cell))
        site = None
        if dialers:
            keys = make_keys("hub")
            keys.save(folder)
            site = file.HubSite(f"tcp://127.0.0.1:{free_port()}", keys.public)
        settings = replace(file.Training(), **training)  # type: ignore[arg-type]
        config_edit.create_federation(self.path, "trial", participants, settings, site)

    @property
    def names(self) -> list[str]:
        return sorted(file.Federation.load(self.path).contacts)

    def start(self, name: str, *options: str, run: str = "training:main", **environment: str) -> subprocess.Popen[str]:
        return self._run(name, ["join", str(self.path), "--as", name, "--run", run, *options], environment)

    def start_hub(self, *options: str) -> subprocess.Popen[str]:
        return self._run("hub", ["hub", str(self.path), *options], {})

    def _run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cgd", *arguments]
        log = (self.folder / f"{name}.err").open("a")
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            stderr=log,
            stdout=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
        )
        log.close()
        return self.processes[name]

    def start_all(self, *options: str, **environment: str) -> None:
        for name in self.names:
            self.start(name, *options, **environment)

    def kill(self, name: str, *, lose_state: bool = False) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        if lose_state:
            shutil.rmtree(self.folder / "state" / name, ignore_errors=True)

    def wait(self, names: Iterable[str] | None = None, seconds: float = 120.0) -> dict[str, int]:
        deadline = time.monotonic() + seconds
        codes = {}
        for name in names or self.names:
            try:
                codes[name] = self.processes[name].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} has not ended:\n{self.output(name)}") from None
        return codes

    def until_step(self, step: int, names: Iterable[str] | None = None, seconds: float = 60.0) -> None:
        """Wait until these participants, or all, have taken a step."""
        deadline = time.monotonic() + seconds
        files = [self.folder / f"{name}.step" for name in names or self.names]
        while not all(file.exists() and int(file.read_text() or 0) >= step for file in files):
            if time.monotonic() > deadline:
                output = "\n".join(f"--- {name}\n{self.output(name)}" for name in self.processes)
                raise AssertionError(f"not all participants reached step {step}:\n{output}")
            time.sleep(0.05)

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def sums(self, name: str) -> int:
        """Return the number of finished sums in a participant's state folder."""
        journals = StateFolder(self.folder / "state" / name, "trial").load()
        return len(journals.get("everyone", ()))

    def bits(self) -> dict[str, str]:
        return {name: (self.folder / f"{name}.bits").read_text() for name in self.names}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def uninterrupted_bits(folder: Path, names: Sequence[str], steps: int) -> str:
    """Return the digest that the same participants, with the same keys, compute inside one process."""
    training = runpy.run_path(str(folder / "training.py"))

    def work(peers: Peers) -> Any:
        peers.seed = Keys.load(folder / f"{peers.me}.key").federation_seed("trial")
        return training["train"](peers, steps=steps)[0]

    with local_peers(names) as peers:
        (digest,) = {hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in peers.run(work)}
    return digest
