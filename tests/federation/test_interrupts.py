"""Ctrl-C and SIGTERM at critical places: a real `cgd join`, whose program sends the signal to itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.cli.interrupt import Interruption, StoppedError
from support.in_process import InProcessFederation, new_federation
from support.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
MESSAGE = "cgd: interrupted; the same command continues from here"
# Code of every program; `press` sends Ctrl-C, which reaches the main thread at that place.
BEFORE = """
import signal, sys, threading, time
import numpy as np

def press(number=signal.SIGINT):
    signal.pthread_kill(threading.main_thread().ident, number)
    for _ in range(100):  # the handler is called between two of these
        pass

def in_main():
    return threading.current_thread() is threading.main_thread()

def runtime(peers):
    return peers._driver._runtime

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
    with runtime(peers)._changed as _:
        pass
    runtime(peers)._changed.__class__ = Pressed
"""
PROGRAMS = {
    "entering": "swap(peers); peers.sum(np.ones(1))",
    "leaving": "swap(peers); peers.members; runtime(peers).report(); peers.sum(np.ones(1))",
    "waiting": "swap(peers); peers.sum(np.ones(1))",
    "SIGTERM": "threading.Timer(1, press, [signal.SIGTERM]).start(); peers.sum(np.ones(1))",
    "joining": """
        thread = runtime(peers)._thread
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
            print("cleaned up", file=sys.stderr)
        """,
    "sleeping": "press(); time.sleep(1000)",
    "stubborn": """
        press()
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
        """,
}


def interrupted(folder: Path, place: str, lines: str) -> subprocess.CompletedProcess[str]:
    """Run `cgd join` with a program of these lines; the peers never start."""
    path = new_federation(folder, NAMES)
    program = f"{BEFORE}\nPLACE = {place!r}\n\ndef main(peers):\n{textwrap.indent(textwrap.dedent(lines), '    ')}\n"
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "cgd", "join", str(path), "--as", "ada", "--run", "program:main"]
    command += ["--listen", f"tcp://127.0.0.1:{free_port()}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("place", PROGRAMS)
def test_interrupt_stops_cleanly_at_every_place(tmp_path: Path, place: str) -> None:
    ended = interrupted(tmp_path, place, PROGRAMS[place])
    about_waiting = re.compile("cgd: (waiting for bob, cleo|we computed for .*|waited .* s for (bob|cleo): .*)")
    lines = [line for line in ended.stderr.splitlines() if not about_waiting.fullmatch(line)]
    if place == "joining":  # a second signal, while it leaves
        assert lines == [MESSAGE, "cgd: interrupted again and ended immediately; the same command continues from here"]
    else:
        assert lines == ["cleaned up"] * (place == "computing") + [MESSAGE]
    assert ended.returncode == 130
    assert ended.stdout == ""


def test_second_interrupt_ends_the_process_immediately(tmp_path: Path) -> None:
    program = """
        press()
        while not any(each.name == "cgd-stop" for each in threading.enumerate()):  # until the first has been noticed
            time.sleep(0.01)
        press()
        while True:
            sum(range(1000))
        """
    ended = interrupted(tmp_path, "twice", program)
    assert ended.returncode == 130
    lines = [line for line in ended.stderr.splitlines() if line != "cgd: waiting for bob, cleo"]
    assert lines == ["cgd: interrupted again and ended immediately; the same command continues from here"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_waiting_for_peers_leaves_as_done(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        for name in NAMES:
            federation.start(name, lambda _: None)
        runtime, bob = (federation[name].member.runtime for name in ("ada", "bob"))
        federation.wait_until(lambda: runtime.membership.up_to_date)
        runtime._linger = None  # without limit
        with Interruption() as interruption:
            interruption.defer()
            interruption.attach(runtime)
            interruption.program_ended = True
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
            runtime.close(done=True)
        assert interruption.stopped
        federation.wait_until(lambda: bob.membership.left("ada") is True)
        del federation.processes["ada"]  # it has already stopped
    assert signal.getsignal(number) is before


def test_member_that_has_announced_its_end_is_not_waited_for(tmp_path: Path) -> None:
    """It may compute for a long time after its last sum; interrupted or not, the others leave."""
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        for name in NAMES:
            federation.start(name, lambda process: process.peers.sum(np.ones(1)))
        federation.results()
        ada, bob, cleo = (federation[name].member.runtime for name in NAMES)
        bob._linger = cleo._linger = None  # without limit
        ada.announce_done()
        leaving = [threading.Thread(target=each.close, kwargs={"done": True}) for each in (bob, cleo)]
        for each in leaving:
            each.start()
        for each in leaving:
            each.join(20)
            assert not each.is_alive()
        assert federation["ada"].running
        ada.close(done=False)
        federation.processes.clear()  # they have stopped


def test_interrupt_after_the_announcement_does_not_revoke_it(tmp_path: Path) -> None:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        for name in NAMES:
            federation.start(name, lambda process: process.peers.sum(np.ones(1)))
        federation.results()
        ada, bob = (federation[name].member.runtime for name in ("ada", "bob"))
        ada.announce_done()
        federation.wait_until(lambda: bob.membership.left("ada") is True)
        ada.close(done=False)
        del federation.processes["ada"]
        federation.wait_until(lambda: bob.report()[0].state == "done")
        assert bob.membership.left("ada") is True


def test_signal_before_the_runtime_starts_stops_it_when_attached(tmp_path: Path) -> None:
    with (
        InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation,
        Interruption() as interruption,
    ):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        federation.wait_until(lambda: interruption.stopped)
        interruption.stopped = False
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        federation.wait_until(lambda: interruption.stopped)
        ada = federation.start("ada", lambda process: process.peers.sum(np.ones(1)))
        interruption.attach(ada.member.runtime)
        assert isinstance(federation.errors("ada")["ada"], StoppedError)
        interruption.program_ended = True
        ada.member.runtime.close(done=False)
        del federation.processes["ada"]
