"""The package: names that are imported on first use, and lock files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The libraries are imported once; every fork imports the modules of cgd.
LOADING = """
import os, sys, threading
import numba, pyarrow, sklearn.metrics, torch, zmq

def load_names():
    import cgd

    names = [name for name in cgd.__all__ if not name.startswith("_")]
    together = threading.Barrier(8)
    failures = []

    def load(first):
        together.wait()
        for name in names[first:] + names[:first]:
            try:
                getattr(cgd, name)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=load, args=(5 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(failures, file=sys.stderr, flush=True)
    return len(failures)

for _ in range(4):
    child = os.fork()
    if not child:
        os._exit(bool(load_names()))
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the processes that import")
def test_threads_may_import_names_at_the_same_time() -> None:
    """Without a lock, a thread sees a partially imported module nine times out of ten."""
    ended = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("[]\n") == 4


LOCKS = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.lock")}


@pytest.mark.parametrize("name", ["run", "dev", "docs"])
def test_lock_file_has_digests_of_all_packages_and_no_paths(name: str) -> None:
    lines = LOCKS[name].splitlines()[1:]
    package, digest = r"[a-z0-9-]+==[A-Za-z0-9.]+ \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert all(re.fullmatch(f"{package}|{digest}", line) for line in lines)
    packages = [line.split("==")[0] for line in lines if "==" in line]
    assert packages == sorted(set(packages))
    assert not {"cgd", "torch", "triton"} & set(packages)
    assert {"hatchling", "editables"} <= set(packages)


def test_pinned_packages_are_locked_in_that_version() -> None:
    pinned = re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) > 20
    locked = {found for text in LOCKS.values() for found in re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE)}
    assert set(pinned) - {("torch", "2.13.0")} <= locked
    for text in LOCKS.values():  # all files agree
        versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
        assert set(versions.items()) <= locked
    assert len(locked) == len({package for package, _ in locked})
