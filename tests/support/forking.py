"""Commands of `cgd` in processes that are forked from one that has imported torch, so that they start fast.

The parent has imported nothing of `cgd`: every process does that itself, and they share no state.
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

PRELOADED = ["torch", "torch._dynamo", "sklearn.metrics", "matplotlib.pyplot"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Forked:
    """A running command with the interface of `subprocess.Popen`.

    Args:
        arguments: the arguments of the command.
        folder: its working directory.
        log: the file to which its output is appended.
        environment: additional environment variables.
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


class ForkedFederation(ProcessFederation):
    """A federation whose processes are forked."""

    def _run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        forked = Forked(arguments, self.folder, self.folder / f"{name}.err", environment)
        self.processes[name] = forked  # type: ignore[assignment]
        return self.processes[name]


def _command(arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = ["cgd", *arguments]
    import torch

    from cgd.cli import main

    torch.set_num_threads(1)
    main()
