"""The package itself: names that load when they are first used."""

from __future__ import annotations

import subprocess
import sys

LOADING = """
import threading, cgd

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
assert not failures, failures
"""


def test_threads_may_load_names_at_the_same_time() -> None:
    """Without a lock, about every second time a thread finds a module half made."""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
