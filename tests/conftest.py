from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

# Several processes run at the same time, so torch uses one thread in each; also in those that tests start. Torch is not
# imported here, because the process that only starts others needs a second for that.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# No deadlines, because machines differ in speed. Examples are derandomised, so that a failure can be reproduced.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the objects of modules and collected tests, about a million, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run a command in this process; return its exit code, standard output and standard error."""
    from cgd.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cgd", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
