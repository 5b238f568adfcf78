"""Authentication of participants; both sides report why a connection is rejected."""

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
from cgd.secagg import codec
from cgd.transport import routes, state_log
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


class JoinableFederation(ProcessFederation):
    """Participants inside this process, or as processes."""

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
        """Join as `name`; `path` and `key` replace the federation file and the participant whose key is used."""
        state = self.folder / f"state-{len(self._joined)}"
        keys = self.folder / f"{key or name}.key"
        membership = FederationMember(path or self.path, name, key=keys, listen=listen, state=state, timeout=timeout)
        self._joined.append(membership)
        return self._joined[-1]

    def other_file(self, *changes: tuple[str, str]) -> Path:
        """Write a copy of the federation file with these replacements, and return its path."""
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
def federation(tmp_path: Path) -> Iterator[JoinableFederation]:
    made = JoinableFederation(tmp_path)
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
    """Wait until the participant reports this state and note of a peer."""
    eventually(lambda: reported(membership, peer) == (state, note), lambda: reported(membership, peer))


def expect_line(caplog: pytest.LogCaptureFixture, line: str) -> None:
    eventually(lambda: line in caplog.messages, lambda: f"{line!r} is not among {caplog.messages}")


# Rejections, reported on both sides.


def test_unlisted_key_is_rejected(federation: JoinableFederation, caplog: pytest.LogCaptureFixture) -> None:
    Keys.generate("mallory").save(federation.folder)
    mallory = federation.public_key("mallory")
    bob = federation.join("bob")
    path = federation.other_file((federation.public_key("ada"), mallory))
    impostor = federation.join("ada", path, "mallory")
    expect(
        *(impostor, "bob", "missing"),
        f"it refuses our key: our key is not in its federation file ({federation.address('bob')})",
    )
    stranger = f"key {mallory[:40]} at ::ffff:127.0.0.1 is not in the federation file"
    expect_line(caplog, f"refused a connection from an unknown client ({stranger})")
    # The impostor listens at the address of ada, so bob connects to it too, and finds another key than ada's.
    closed = "it closed the connection in the handshake: it has another key than in our file, or is not cgd"
    expect(bob, "ada", "missing", f"{closed} ({federation.address('ada')})")
    expect_line(
        caplog, "refused a handshake from an unknown client (it does not use CURVE, or expects another key than ours)"
    )


def test_listed_key_under_another_name_is_rejected(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture
) -> None:
    bob = federation.join("bob")
    Keys.generate("spare").save(federation.folder)
    ada, cleo = federation.public_key("ada"), federation.public_key("cleo")
    path = federation.other_file((cleo, federation.public_key("spare")), (ada, cleo))
    impostor = federation.join("ada", path, "cleo")
    expect(impostor, "bob", "missing", "your key is that of cleo, and you say that you are ada")
    expect_line(caplog, "refused a false name from cleo (it reports the name 'ada', and its key is that of cleo)")
    assert reported(bob, "cleo")[0] == "missing"


def test_wrong_key_file_is_rejected_before_connecting(federation: JoinableFederation) -> None:
    with pytest.raises(InputError, match="^this is the key of cleo; name the key file of ada$"):
        federation.join("ada", key="cleo")
    Keys.generate("spare").save(federation.folder)
    with pytest.raises(
        InputError, match=f"the key file's public key is .*, and {federation.path} lists another for ada"
    ):
        federation.join("ada", key="spare")


@pytest.mark.parametrize(
    ("change", "note_here", "note_there"),
    [
        (
            ('name = "trial"', 'name = "drill"'),
            "it belongs to another federation, 'drill'; ours is 'trial'",
            "it belongs to another federation, 'trial'; ours is 'drill'",
        ),
        (
            ("lr = 0.5", "lr = 0.25"),
            "its federation file differs from ours in [training]; compare the files (`cgd federation show`)",
            "its federation file differs from ours in [training]; compare the files (`cgd federation show`)",
        ),
        (
            ("epoch = 1", "epoch = 2"),
            "its federation file has epoch 2 and ours has epoch 1: this member needs the new federation file",
            "its federation file has epoch 1 and ours has epoch 2: it needs the new federation file",
        ),
    ],
    ids=["another name", "another training", "another epoch"],
)
def test_different_federation_file_is_rejected(
    federation: JoinableFederation,
    caplog: pytest.LogCaptureFixture,
    change: tuple[str, str],
    note_here: str,
    note_there: str,
) -> None:
    caplog.set_level("INFO", "cgd")
    bob, cleo = federation.join("bob", timeout=1.0), federation.join("cleo")
    other = federation.join("ada", federation.other_file(change))
    expect(bob, "ada", "refused", note_here)
    expect(other, "bob", "refused", note_there)
    expect(bob, "cleo", "here", "")
    expect(cleo, "bob", "here", "")
    expect_line(caplog, f"ada is refused: {note_here}")
    expect_line(caplog, f"bob is refused: {note_there}")
    with pytest.raises(PeerTimeoutError, match="received nothing from ada for 1 s") as caught:
        bob.peers.sum(np.array(1))
    assert f"ada: {note_here}" in str(caught.value)
    assert str(caught.value).endswith("; remove the reason for which ada cannot take part, then start again")


def test_different_version_of_cgd_is_rejected(federation: JoinableFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    bob, ours = federation.join("bob"), cgd.__version__
    monkeypatch.setattr(cgd, "__version__", "99.0")
    other = federation.join("ada")
    expect(bob, "ada", "refused", f"it runs cgd 99.0 and this member runs {ours}; install the same version")
    expect(other, "bob", "refused", f"it runs cgd {ours} and this member runs 99.0; install the same version")


def test_different_version_of_the_link_protocol_is_rejected(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture
) -> None:
    program = "import cgd.transport.link as link; link.VERSION = 2; from cgd.cli import main; main()"
    options = ["join", str(federation.path), "--as", "ada", "--run", "summing:once", "--timeout", "4"]
    bob = federation.join("bob")
    other = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=federation.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert other.returncode == 3
    there = "version 1 of the link, ours is 2; install the same cgd"
    assert f"bob: it answers with a message we cannot read: {there}" in other.stderr.splitlines()[-1]
    assert f"cgd: refused an incompatible message from bob ({there})" in other.stderr
    here = "version 2 of the link, ours is 1; install the same cgd"
    expect_line(caplog, f"refused an incompatible message from ada ({here})")
    assert reported(bob, "ada")[0] == "missing"


def test_different_version_of_the_messages_is_rejected(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture
) -> None:
    program = "import cgd.secagg.codec as codec; codec.VERSION = 2; from cgd.cli import main; main()"
    options = ["join", str(federation.path), "--as", "ada", "--run", "summing:once", "--timeout", "4"]
    bob = federation.join("bob")
    other = subprocess.run(
        [sys.executable, "-c", program, *options],
        cwd=federation.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert other.returncode == 3
    there = f"bob: uses protocol version {codec.VERSION}, this member uses 2; install the same cgd"
    assert f"cgd: refused a frame from bob ({there})" in other.stderr
    here = f"ada: uses protocol version 2, this member uses {codec.VERSION}; install the same cgd"
    expect_line(caplog, f"refused a frame from ada ({here})")
    assert reported(bob, "ada")[0] == "missing"


def test_reason_for_a_missing_peer_is_logged(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "cgd")
    monkeypatch.setattr(state_log, "SETTLE_SECONDS", 0.0)
    federation.join("bob")
    expect_line(caplog, f"ada is missing: nobody answers there ({federation.address('ada')})")
    with socket.create_server(("127.0.0.1", int(federation.address("ada").rsplit(":", 1)[1]))) as other:
        other.settimeout(20)
        client, _ = other.accept()
        with client:
            client.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" * 10)
            line = f"ada is missing: something answers there that is not cgd ({federation.address('ada')})"
            eventually(lambda: line in caplog.messages, lambda: caplog.messages, 3)


def test_check_names_the_section_that_differs(federation: JoinableFederation) -> None:
    federation.join("bob")
    path = federation.other_file(("lr = 0.5", "lr = 0.25"))
    shown = subprocess.run(
        [sys.executable, "-m", "cgd", "federation", "check", str(path), "--as", "ada", "--wait", "3"],
        cwd=federation.folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert shown.returncode == 3
    assert "its federation file differs from ours in [training]" in shown.stdout
    assert f"nobody answers there ({federation.address('cleo')})" in shown.stdout


# One process at a time.


def test_second_process_is_rejected_until_the_first_is_killed(federation: JoinableFederation) -> None:
    for name in NAMES:
        federation.start(name, run="summing:many")
    eventually(lambda: "the total is 3" in federation.output("ada"), lambda: federation.output("ada"))
    first = federation.processes["ada"]
    (federation.folder / "ada.err").rename(federation.folder / "first.err")  # its later output goes there too
    try:
        elsewhere = ("--address", f"tcp://127.0.0.1:{free_port()}", "--timeout", "3")
        assert federation.start("ada", *elsewhere, run="summing:many").wait(60) == 2
        assert "state/ada is in use: this participant is already running" in federation.output("ada").splitlines()[-1]
        assert federation.start("ada", *elsewhere, "--state", "copy", run="summing:many").wait(60) == 3
        refused = "another process with this key is connected; stop it first"
        assert f"bob: {refused}; cleo: {refused}" in federation.output("ada").splitlines()[-1]
        assert "the total" not in federation.output("ada")
        for name in ("bob", "cleo"):
            assert "cgd: refused a second process with the same key from ada" in federation.output(name)
        before = federation.output("first").count("the total is 3")
        eventually(
            lambda: federation.output("first").count("the total is 3") > before, lambda: federation.output("first")
        )
    finally:
        first.kill()
        first.wait()
    before = federation.output("bob").count("the total is 3")
    federation.start("ada", "--address", f"tcp://127.0.0.1:{free_port()}", run="summing:many")
    eventually(lambda: federation.output("bob").count("the total is 3") > before + 3, lambda: federation.output("ada"))
    assert "Traceback" not in "".join(federation.output(name) for name in NAMES)


def test_killed_and_restarted_participant_is_no_second_process(federation: JoinableFederation) -> None:
    for name in NAMES:
        federation.start(name, run="summing:many")
    eventually(lambda: "the total is 3" in federation.output("ada"), lambda: federation.output("ada"))
    federation.processes["ada"].kill()
    federation.processes["ada"].wait()
    before = federation.output("bob").count("the total is 3")
    federation.start("ada", run="summing:many")
    eventually(lambda: federation.output("bob").count("the total is 3") > before + 3, lambda: federation.output("ada"))
    for name in NAMES:
        assert "second process" not in federation.output(name)
        assert "another process" not in federation.output(name)


# Bad input.


def test_port_in_use_is_reported(federation: JoinableFederation) -> None:
    federation.join("ada")
    message = (
        f"cannot listen at {federation.address('ada')}: Address already in use; stop what listens there (it may be this"
    )
    with pytest.raises(TransportError) as caught:
        federation.join("ada")
    assert str(caught.value).startswith(message)
    assert federation.start("ada", run="summing:once").wait(60) == 1
    assert federation.output("ada").startswith(f"cgd: {message}")
    assert "Traceback" not in federation.output("ada")


def test_participant_that_peers_cannot_reach_is_informed_after_some_seconds(
    federation: JoinableFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that blocks incoming connections."""
    monkeypatch.setattr(routes, "SETTLE_SECONDS", 1e9)
    ada = federation.join("ada", listen=f"tcp://127.0.0.1:{free_port()}")
    federation.join("bob")
    where = federation.address("ada")
    expect(ada, "bob", "missing", f"we reach it; it has not connected to us yet, at {where}")
    monkeypatch.setattr(routes, "SETTLE_SECONDS", 0.0)
    expect(ada, "bob", "missing", f"we reach it, and it does not reach us at {where}: is our port open?")


def test_start_of_all_participants_raises_no_alarm(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order and the speed: all that is logged is that the others are waited for, and are here."""
    caplog.set_level("INFO", "cgd")
    for module in (routes, state_log):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 1e9)
    members = [federation.join(name) for name in NAMES]
    for membership in members:
        for peer in set(NAMES) - {membership.me}:
            expect(membership, peer, "here", "")
    eventually(lambda: sum(line.endswith(" is here") for line in caplog.messages) == 6, lambda: caplog.messages)
    lines = {line for line in caplog.messages if not line.startswith("refused a stale")}
    assert lines == {f"{name} is here" for name in NAMES}


def test_program_that_waits_for_its_peers_says_so_at_once(
    federation: JoinableFederation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cgd")
    ada = federation.join("ada", timeout=0.5)
    for _ in range(2):  # once, not for every sum
        with pytest.raises(PeerTimeoutError, match="; start bob, cleo, or remove the reason why it is not connected;"):
            ada.peers.sum(np.array(1))
    assert caplog.messages == ["waiting for bob, cleo"]


def test_computing_peer_is_the_only_reason_for_a_longer_timeout(federation: JoinableFederation) -> None:
    members = [federation.join(name, timeout=0.5) for name in NAMES]
    for membership in members:
        for peer in set(NAMES) - {membership.me}:
            expect(membership, peer, "here", "")
    ada = members[0]
    eventually(lambda: ada.runtime.membership.up_to_date, lambda: ada.runtime.membership.waiting_for("everyone"))
    with pytest.raises(PeerTimeoutError) as caught:
        ada.peers.sum(np.array(1))
    assert str(caught.value) == (
        "received nothing from bob, cleo for 0.5 s (missing: Ready); "
        "if its steps, or the transfer of its journal, take longer than this, raise the timeout"
    )


def test_timeout_names_the_missing_peer(federation: JoinableFederation) -> None:
    federation.start("bob", run="summing:once")
    eventually(lambda: "cgd: waiting for ada, cleo" in federation.output("bob"), lambda: federation.output("bob"))
    ada = federation.start("ada", "--timeout", "3", run="summing:once")
    assert ada.wait(60) == 3
    last = federation.output("ada").splitlines()[-1]
    assert last.startswith("cgd: received nothing from cleo for 3 s (missing: its hello; cleo: nobody answers there")
    assert federation.address("cleo") in last
    assert last.endswith("; then start again with the same command")
    assert "Traceback" not in federation.output("ada")


def test_unresolvable_address_is_reported(federation: JoinableFederation) -> None:
    path = federation.other_file((federation.address("cleo"), "tcp://no-such-host.invalid:7001"))
    ada = federation.join("ada", path, timeout=1.0)
    note = "its address is not known here: no such host, or no name service (tcp://no-such-host.invalid:7001)"
    expect(ada, "cleo", "missing", note)
    with pytest.raises(PeerTimeoutError) as caught:
        ada.peers.sum(np.array(1))
    assert caught.value.peers == {"bob", "cleo"}
    assert f"cleo: {note}" in str(caught.value)


def test_key_file_readable_by_others_is_rejected(federation: JoinableFederation) -> None:
    key = federation.folder / "ada.key"
    key.chmod(0o640)
    assert federation.start("ada", run="summing:once").wait(60) == 2
    assert federation.output("ada") == (
        f"cgd: {key} has mode 0640, so other users can access the secret in it; chmod 600 {key}\n"
    )


@pytest.mark.parametrize("what", ["name", "key"])
def test_file_with_a_duplicate_participant_is_rejected(federation: JoinableFederation, what: str) -> None:
    changes = {
        "name": (('name = "cleo"', 'name = "bob"'), "two participants have the same name, 'bob'"),
        "key": ((federation.public_key("cleo"), federation.public_key("bob")), "bob and cleo have the same key"),
    }
    change, message = changes[what]
    federation.path = federation.other_file(change)
    assert federation.start("ada", run="summing:once").wait(60) == 2
    assert federation.output("ada").startswith(f"cgd: {federation.path}: {message}")
    assert len(federation.output("ada").splitlines()) == 1
