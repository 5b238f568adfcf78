"""Ctrl-C and SIGTERM at the worst moments: a real `cgd join`, whose program sends the signal to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.cli.interrupting import Interruption, StoppedError
from support.lives import Village, found

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
TOLD = "cgd: interrupted; the same command goes on from here"
# What a program does before it is interrupted; `press` is Ctrl-C, which reaches the thread at that very place.
BEFORE = """
import signal, sys, threading, time
import numpy as np

def press(number=signal.SIGINT):
    signal.pthread_kill(threading.main_thread().ident, number)
    for _ in range(100):  # the handler is called between two of these
        pass

def in_main():
    return threading.current_thread() is threading.main_thread()

def conductor(peers):
    return peers.memory._conductor

class Pressed(threading.Condition):
    once = True

    def now(self, place):
        if in_main() and Pressed.once and place == PLACE:
            Pressed.once = False
            press()

    def __enter__(self):
        entered = super().__enter__()
        self.now("entering")
        return entered

    def __exit__(self, *error):
        self.now("leaving")
        return super().__exit__(*error)

    def wait(self, timeout=None):
        self.now("waiting")
        return super().wait(timeout)

def swap(peers):
    with conductor(peers)._changed as _:
        pass
    conductor(peers)._changed.__class__ = Pressed
"""
PROGRAMS = {
    "entering": "swap(peers); peers.sum(np.ones(1))",
    "leaving": "swap(peers); peers.members; conductor(peers).report(); peers.sum(np.ones(1))",
    "waiting": "swap(peers); peers.sum(np.ones(1))",
    "SIGTERM": "threading.Timer(1, press, [signal.SIGTERM]).start(); peers.sum(np.ones(1))",
    "joining": """
        thread = conductor(peers)._thread
        join = thread.join
        thread.join = lambda: (Pressed.once and (setattr(Pressed, "once", False), press()), join())
        press()
        peers.sum(np.ones(1))
        """,
    "computing": """
        press()
        try:
            while True:
                sum(range(1000))
        finally:
            print("tidied up", file=sys.stderr)
        """,
    "sleeping": "press(); time.sleep(100)",
    "stubborn": """
        press()
        while True:
            try:
                time.sleep(100)
            except BaseException:
                pass
        """,
}


def interrupted(folder: Path, place: str, lines: str) -> subprocess.CompletedProcess[str]:
    """`cgd join` with a program of these lines; the others never come."""
    path = found(folder, NAMES)
    program = f"{BEFORE}\nPLACE = {place!r}\n\ndef main(peers):\n{textwrap.indent(textwrap.dedent(lines), '    ')}\n"
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "cgd", "join", str(path), "--as", "ada", "--run", "program:main"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40, check=False)


@pytest.mark.parametrize("place", PROGRAMS)
def test_an_interrupt_ends_in_order_wherever_it_comes(tmp_path: Path, place: str) -> None:
    ended = interrupted(tmp_path, place, PROGRAMS[place])
    lines = [line for line in ended.stderr.splitlines() if " is missing" not in line]
    if place == "joining":  # a second one, while it leaves
        assert lines == [TOLD, "cgd: interrupted again and ended at once; the same command goes on from here"]
    else:
        assert lines == ["tidied up"] * (place == "computing") + [TOLD]
    assert ended.returncode == 130
    assert ended.stdout == ""


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    ended = interrupted(tmp_path, "twice", "press(); time.sleep(0.2); press()\nwhile True: sum(range(1000))")
    assert ended.returncode == 130
    lines = [line for line in ended.stderr.splitlines() if " is missing" not in line]
    assert lines == ["cgd: interrupted again and ended at once; the same command goes on from here"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_done_and_waits_for_the_others_leaves_as_done(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Village(found(tmp_path, NAMES), tmp_path / "state") as village:
        for name in NAMES:
            village.start(name, lambda _: None)
        runtime, bob = (village[name].membership.runtime for name in ("ada", "bob"))
        village.until(lambda: runtime.membership.current)
        runtime._linger = None  # for ever
        with Interruption() as interruption:
            interruption.defer()
            interruption.attach(runtime)
            interruption.left = True
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
            runtime.close(done=True)
        assert interruption.stopped
        village.until(lambda: bob.membership.left("ada") is True)
        del village.lives["ada"]  # it has ended by itself
    assert signal.getsignal(number) is before


def test_a_signal_before_there_is_a_conductor_stops_it_when_there_is_one(tmp_path: Path) -> None:
    with Village(found(tmp_path, NAMES), tmp_path / "state") as village, Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        village.until(lambda: interruption.stopped)
        interruption.stopped = False
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        village.until(lambda: interruption.stopped)
        ada = village.start("ada", lambda life: life.peers.sum(np.ones(1)))
        interruption.attach(ada.membership.runtime)
        assert isinstance(village.errors("ada")["ada"], StoppedError)
        interruption.left = True
        ada.membership.runtime.close(done=False)
        del village.lives["ada"]
