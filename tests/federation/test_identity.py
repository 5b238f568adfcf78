"""Who is let into a federation and who is not, and that both sides are told why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import cgd
from cgd.errors import InputError, PeerTimeoutError, TransportError
from cgd.federation import config
from cgd.federation.keys import Keys
from cgd.federation.member import FederationMember
from support.federations import ProcessFederation
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
SUMMING = """
import numpy as np


def once(peers):
    print("the total is", int(peers.sum(np.array(1))), flush=True)


def many(peers):
    import time
    for _ in range(10_000):
        print("the total is", int(peers.sum(np.array(1))), flush=True)
        time.sleep(0.05)
"""


class Town(ProcessFederation):
    """Participants as objects in this process, or as processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NAMES)
        (folder / "summing.py").write_text(SUMMING)
        self._joined: list[FederationMember] = []

    def join(
        self,
        name: str,
        path: Path | None = None,
        key: str = "",
        timeout: float | None = None,
        listen: str | None = None,
    ) -> FederationMember:
        """Take part as `name`, by a federation file of one's own and with somebody's key, if they are told."""
        state = self.folder / f"state-{len(self._joined)}"
        keys = self.folder / f"{key or name}.key"
        membership = FederationMember(path or self.path, name, key=keys, listen=listen, state=state, timeout=timeout)
        self._joined.append(membership)
        return self._joined[-1]

    def other_file(self, *changes: tuple[str, str]) -> Path:
        """A copy of the federation file in which something is changed."""
        text = self.path.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the file"
            text = text.replace(old, new)
        path = self.folder / f"other-{len(list(self.folder.glob('other-*')))}.toml"
        path.write_text(text)
        return path

    def address(self, name: str) -> str:
        return config.Federation.load(self.path).participant(name).address

    def public_key(self, name: str) -> str:
        return Keys.load(self.folder / f"{name}.key").public

    def close(self) -> None:
        super().close()
        for membership in self._joined:
            membership.runtime.close(done=False)


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    made.close()


def eventually(condition: Callable[[], object], otherwise: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)


def reported(membership: FederationMember, peer: str) -> tuple[str, str]:
    (report,) = [each for each in membership.runtime.report() if each.name == peer]
    return report.state, report.note


def expect(membership: FederationMember, peer: str, state: str, note: str) -> None:
    """The membership comes to report this of a peer."""
    eventually(lambda: reported(membership, peer) == (state, note), lambda: reported(membership, peer))


def expect_line(caplog: pytest.LogCaptureFixture, line: str) -> None:
    eventually(lambda: line in caplog.messages, lambda: f"{line!r} is not among {caplog.messages}")


# Refused, and told on both sides.


def test_an_unlisted_key_is_refused(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    Keys.generate("mallory").save(town.folder)
    mallory = town.public_key("mallory")
    bob = town.join("bob")
    path = town.other_file((town.public_key("ada"), mallory))
    impostor = town.join("ada", path, "mallory")
    expect(
        *(impostor, "bob", "missing"),
        f"it refuses our key: our key is not in its federation file ({town.address('bob')})",
    )
    stranger = f"key {mallory[:40]} at ::ffff:127.0.0.1 is not in the federation file"
    expect_line(caplog, f"refused a connection from a stranger ({stranger})")
    # She sits at the address of ada, so bob calls her too, and finds another key than ada's.
    expect(
        *(bob, "ada", "missing"),
        f"it hung up in the handshake: it has another key than our file says, or is not cgd ({town.address('ada')})",
    )
    expect_line(caplog, "refused a handshake from a stranger (it does not speak CURVE, or seeks another key than ours)")


def test_a_listed_key_under_anothers_name_is_refused(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    bob = town.join("bob")
    Keys.generate("spare").save(town.folder)
    ada, cleo = town.public_key("ada"), town.public_key("cleo")
    path = town.other_file((cleo, town.public_key("spare")), (ada, cleo))
    impostor = town.join("ada", path, "cleo")
    expect(impostor, "bob", "missing", "your key is that of cleo, and you say that you are ada")
    expect_line(caplog, "refused a false name from cleo (it says that it is 'ada', and its key is that of cleo)")
    assert reported(bob, "cleo")[0] == "missing"


def test_a_name_without_its_key_does_not_get_that_far(town: Town) -> None:
    with pytest.raises(InputError, match=f"the key file's public key is .*, and {town.path} lists another for ada"):
        town.join("ada", key="cleo")


@pytest.mark.parametrize(
    ("change", "note_here", "note_there"),
    [
        (
            ('name = "trial"', 'name = "drill"'),
            "it is of another federation, 'drill'; ours is 'trial'",
            "it is of another federation, 'trial'; ours is 'drill'",
        ),
        (
            ("lr = 0.5", "lr = 0.25"),
            "its federation file differs from ours in [training]",
            "its federation file differs from ours in [training]",
        ),
        (
            ("epoch = 1", "epoch = 2"),
            "its federation file is of epoch 2 and ours of epoch 1: we need the new one",
            "its federation file is of epoch 1 and ours of epoch 2: it needs the new federation file",
        ),
    ],
    ids=["another name", "another training", "another epoch"],
)
def test_another_federation_file_is_refused(
    town: Town, caplog: pytest.LogCaptureFixture, change: tuple[str, str], note_here: str, note_there: str
) -> None:
    caplog.set_level("INFO", "cgd")
    bob, cleo = town.join("bob", timeout=1.0), town.join("cleo")
    other = town.join("ada", town.other_file(change))
    expect(bob, "ada", "refused", note_here)
    expect(other, "bob", "refused", note_there)
    expect(bob, "cleo", "here", "")
    expect(cleo, "bob", "here", "")
    expect_line(caplog, f"ada is refused: {note_here}")
    expect_line(caplog, f"bob is refused: {note_there}")
    with pytest.raises(PeerTimeoutError, match="no word from ada for 1 s") as caught:
        bob.peers.sum(np.array(1))
    assert f"ada: {note_here}" in str(caught.value)


def test_another_version_of_cgd_is_refused(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    bob, ours = town.join("bob"), cgd.__version__
    monkeypatch.setattr(cgd, "__version__", "99.0")
    other = town.join("ada")
    expect(bob, "ada", "refused", f"it runs cgd 99.0 and we run {ours}; install the same version")
    expect(other, "bob", "refused", f"it runs cgd {ours} and we run 99.0; install the same version")


def test_another_version_of_the_link_is_refused(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    program = "import cgd.transport.link as link; link.VERSION = 2; from cgd.cli import main; main()"
    options = ["join", str(town.path), "--as", "ada", "--run", "summing:once", "--timeout", "4"]
    bob = town.join("bob")
    other = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=town.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert other.returncode == 3
    there = "version 1 of the link, we speak 2; install the same cgd"
    assert f"bob: it answers with a message we cannot read: {there}" in other.stderr.splitlines()[-1]
    assert f"cgd: refused a foreign message from bob ({there})" in other.stderr
    here = "version 2 of the link, we speak 1; install the same cgd"
    expect_line(caplog, f"refused a foreign message from ada ({here})")
    assert reported(bob, "ada")[0] == "missing"


def test_why_a_peer_is_missing_is_logged_when_it_becomes_known(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cgd")
    town.join("bob")
    expect_line(caplog, f"ada is missing: nobody answers there ({town.address('ada')})")
    with socket.create_server(("127.0.0.1", int(town.address("ada").rsplit(":", 1)[1]))) as other:
        other.settimeout(20)
        visitor, _ = other.accept()
        with visitor:
            visitor.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" * 10)
            line = f"ada is missing: something answers there that is not cgd ({town.address('ada')})"
            eventually(lambda: line in caplog.messages, lambda: caplog.messages, 3)


def test_a_check_names_the_section_that_differs(town: Town) -> None:
    town.join("bob")
    path = town.other_file(("lr = 0.5", "lr = 0.25"))
    shown = subprocess.run(
        [sys.executable, "-m", "cgd", "federation", "check", str(path), "--as", "ada", "--wait", "3"],
        cwd=town.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert shown.returncode == 3
    assert "its federation file differs from ours in [training]" in shown.stdout
    assert f"nobody answers there ({town.address('cleo')})" in shown.stdout


# One process at a time.


def test_a_second_process_waits_until_the_first_is_killed(town: Town) -> None:
    for name in NAMES:
        town.start(name, run="summing:many")
    eventually(lambda: "the total is 3" in town.said("ada"), lambda: town.said("ada"))
    first = town.processes["ada"]
    (town.folder / "ada.err").rename(town.folder / "first.err")  # what it says from here on goes there too
    try:
        elsewhere = ("--address", f"tcp://127.0.0.1:{free_port()}", "--timeout", "3")
        assert town.start("ada", *elsewhere, run="summing:many").wait(60) == 2
        assert "state/ada is in use: this participant runs already" in town.said("ada").splitlines()[-1]
        assert town.start("ada", *elsewhere, "--state", "copy", run="summing:many").wait(60) == 3
        refused = "another process with this key is connected; stop it first"
        assert f"bob: {refused}; cleo: {refused}" in town.said("ada").splitlines()[-1]
        assert "the total" not in town.said("ada")
        for name in ("bob", "cleo"):
            assert "cgd: refused a second process with the same key from ada" in town.said(name)
        before = town.said("first").count("the total is 3")
        eventually(lambda: town.said("first").count("the total is 3") > before, lambda: town.said("first"))
    finally:
        first.kill()
        first.wait()
    before = town.said("bob").count("the total is 3")
    town.start("ada", "--address", f"tcp://127.0.0.1:{free_port()}", run="summing:many")
    eventually(lambda: town.said("bob").count("the total is 3") > before + 3, lambda: town.said("ada"))
    assert "Traceback" not in "".join(town.said(name) for name in NAMES)


# Bad input.


def test_a_port_in_use_is_told(town: Town) -> None:
    town.join("ada")
    said = f"cannot listen at {town.address('ada')}: Address already in use; stop what listens there (it may be this"
    with pytest.raises(TransportError) as caught:
        town.join("ada")
    assert str(caught.value).startswith(said)
    assert town.start("ada", run="summing:once").wait(60) == 1
    assert town.said("ada").startswith(f"cgd: {said}")
    assert "Traceback" not in town.said("ada")


def test_who_is_not_reached_by_the_others_is_told(town: Town) -> None:
    """As behind a firewall that lets nothing in."""
    ada = town.join("ada", listen=f"tcp://127.0.0.1:{free_port()}")
    town.join("bob")
    deaf = f"nothing comes from it; if this lasts it does not reach us at {town.address('ada')}: is our port open?"
    expect(ada, "bob", "missing", deaf)


def test_a_peer_that_never_comes_is_named_after_the_timeout(town: Town) -> None:
    town.start("bob", run="summing:once")
    eventually(lambda: "ada is missing" in town.said("bob"), lambda: town.said("bob"))
    ada = town.start("ada", "--timeout", "3", run="summing:once")
    assert ada.wait(60) == 3
    last = town.said("ada").splitlines()[-1]
    assert last.startswith("cgd: no word from cleo for 3 s (missing: to be here; cleo: nobody answers there")
    assert town.address("cleo") in last
    assert "Traceback" not in town.said("ada")


def test_an_address_that_does_not_resolve_is_named(town: Town) -> None:
    path = town.other_file((town.address("cleo"), "tcp://no-such-host.invalid:7001"))
    ada = town.join("ada", path, timeout=1.0)
    note = "its address is not known here: no such host, or no name service (tcp://no-such-host.invalid:7001)"
    expect(ada, "cleo", "missing", note)
    with pytest.raises(PeerTimeoutError) as caught:
        ada.peers.sum(np.array(1))
    assert caught.value.peers == {"bob", "cleo"}
    assert f"cleo: {note}" in str(caught.value)


def test_an_open_key_file_is_refused(town: Town) -> None:
    key = town.folder / "ada.key"
    key.chmod(0o640)
    assert town.start("ada", run="summing:once").wait(60) == 2
    assert town.said("ada") == (
        f"cgd: {key} has mode 0640, so others than its owner can get at the secret in it; chmod 600 {key}\n"
    )


@pytest.mark.parametrize("what", ["name", "key"])
def test_a_file_with_a_participant_twice_is_refused(town: Town, what: str) -> None:
    changes = {
        "name": (('name = "cleo"', 'name = "bob"'), "two participants have the same name, 'bob'"),
        "key": ((town.public_key("cleo"), town.public_key("bob")), "bob and cleo have the same key"),
    }
    change, says = changes[what]
    town.path = town.other_file(change)
    assert town.start("ada", run="summing:once").wait(60) == 2
    assert town.said("ada").startswith(f"cgd: {town.path}: {says}")
    assert len(town.said("ada").splitlines()) == 1
