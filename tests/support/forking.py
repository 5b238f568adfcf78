"""Commands of `cgd` in processes forked from one that has loaded torch: many of them start at the price of one.

That one has loaded nothing of `cgd`: each process does that itself, and shares no state with another.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from support.federations import ProcessFederation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LOADED = ["torch", "torch._dynamo", "sklearn.metrics", "matplotlib.pyplot"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(LOADED)


class Forked:
    """A running command, to be handled as a `subprocess.Popen`.

    Args:
        arguments: of the command.
        folder: where it runs.
        log: the file to which it writes, behind what is there.
        environment: variables that it gets besides ours.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._process = _context.Process(
            target=_command, args=(list(arguments), str(folder), str(log), dict(os.environ) | dict(environment))
        )
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self._arguments), timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class ForkedColony(ProcessFederation):
    """A colony whose processes are forked."""

    def _run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        forked = Forked(arguments, self.folder, self.folder / f"{name}.err", environment)
        self.processes[name] = forked  # type: ignore[assignment]
        return self.processes[name]


def _command(arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    sys.argv = ["cgd", *arguments]
    import torch

    from cgd.cli import main

    torch.set_num_threads(1)
    main()
