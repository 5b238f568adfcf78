"""The hub server: changes of the members, wrong keys and files, the command, and kills of real processes."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import HubError, InputError, PeerAbortedError, PeerTimeoutError, TransportError
from cgd.federation import Federation, Keys, Participant, config_edit, member
from cgd.federation import hub_server as module
from cgd.federation.hub_server import FederationHub
from cgd.secagg.messages import HUB
from support.federation_files import participants
from support.federations import ProcessFederation, uninterrupted_bits
from support.ports import free_port
from support.transports import eventually

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")


# A running hub.


class HubFederation:
    """Participants inside this process, and a hub."""

    def __init__(self, folder: Path, dialers: Collection[str] = NAMES, opening: str = "hub") -> None:
        self.path = ProcessFederation(folder, NAMES, dialers=dialers, opening=opening).path
        self.hubs: list[FederationHub] = []
        self.joined: dict[str, member.FederationMember] = {}

    def hub(self, **options: Any) -> FederationHub:
        self.hubs.append(FederationHub(self.path, **options))
        return self.hubs[-1]

    def join(self, name: str, **options: Any) -> member.FederationMember:
        self.joined[name] = member.FederationMember(self.path, name, **{"linger": 0.0, "timeout": 60.0} | options)
        return self.joined[name]

    def sum_all(self) -> set[float]:
        with ThreadPoolExecutor() as pool:
            one = np.array([1.0])
            return {float(each[0]) for each in pool.map(lambda each: each.peers.sum(one), self.joined.values())}

    def close(self) -> None:
        for each in self.joined.values():
            each.runtime.transport.close()
            each.peers.close()
        for hub in self.hubs:
            hub.close()


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubFederation]:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.1)
    made = HubFederation(tmp_path)
    yield made
    made.close()


def notes(membership: member.FederationMember) -> dict[str, str]:
    return {report.name: f"{report.state}: {report.note}" for report in membership.runtime.report()}


def test_missing_hub_is_reported_as_the_reason(federation: HubFederation) -> None:
    ada = federation.join("ada", timeout=1.5)
    eventually(lambda: "nobody answers there" in notes(ada)[HUB])
    assert (
        "it can be reached through the hub only, and the hub is not connected: nobody answers there"
        in notes(ada)["bob"]
    )
    with pytest.raises(PeerTimeoutError, match="bob: it can be reached through the hub only, and the hub is not"):
        ada.peers.sum(np.array([1.0]))
    federation.hub()
    eventually(lambda: notes(ada) == notes(ada) | {HUB: "here: ", "bob": "missing: it is not connected to the hub"})


def test_members_may_adopt_a_new_epoch_before_the_hub(
    federation: HubFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub drops the values that were deposited before, and receives them again."""
    keys = Keys.generate("dan")
    keys.save(federation.path.parent)
    config_edit.add_participant(federation.path, Participant("dan", "", keys.public))
    monkeypatch.setattr(module, "WATCH_SECONDS", 3600.0)
    hub = federation.hub()
    for name in (*NAMES, "dan"):
        federation.join(name, timeout=120.0)
    assert federation.sum_all() == {4.0}
    config_edit.remove_participant(federation.path, "bob")
    federation.joined.pop("bob").peers.close()

    def all_deposited() -> bool:
        partial_sums = hub.hub._aggregator._sums.values()
        return any(len(part.depositors) == 3 for each in list(partial_sums) for part in each.slices.values())

    def catch_up() -> None:
        eventually(all_deposited)
        new = Federation.load(federation.path)
        hub.hub.update(new.contacts, new.groups())

    with ThreadPoolExecutor() as pool:
        late = pool.submit(catch_up)
        assert federation.sum_all() == {3.0}
        late.result()


def test_hub_reloads_the_file_and_rejects_removed_participants(federation: HubFederation) -> None:
    hub = federation.hub()
    keys = Keys.generate("dan")
    keys.save(federation.path.parent)
    for name in NAMES:
        federation.join(name)
    assert federation.sum_all() == {3.0}
    config_edit.add_participant(federation.path, Participant("dan", "", keys.public))
    federation.join("dan", state=federation.path.parent / "other")
    eventually(lambda: {each.federation.epoch for each in federation.joined.values()} == {2} == {hub.federation.epoch})
    assert federation.joined["dan"].peers.sum(np.array([1.0])) == 3.0  # a sum that was finished before it joined
    assert federation.sum_all() == {4.0}
    config_edit.remove_participant(federation.path, "bob")
    bob = federation.joined.pop("bob")
    assert federation.sum_all() == {3.0}
    eventually(lambda: hub.hub.rejections.counts.get(("a former participant", "a message"), 0) > 0)
    assert "bob" not in [report.name for report in hub.hub.report()]
    bob.runtime.transport.close()
    bob.peers.close()


def test_hub_with_an_old_file_rejects_a_new_key(federation: HubFederation, caplog: pytest.LogCaptureFixture) -> None:
    hub = federation.hub()
    old = federation.path.read_text()
    keys = Keys.generate("dan")
    keys.save(federation.path.parent)
    config_edit.add_participant(federation.path, Participant("dan", "", keys.public))
    eventually(lambda: hub.federation.epoch == 2)
    federation.path.write_text(old.replace("epoch = 1", "epoch = 3"))
    eventually(lambda: hub.federation.epoch == 3)
    federation.path.write_text(old)  # an older epoch is rejected
    eventually(lambda: "epoch 1, and the hub runs 'trial', epoch 3" in caplog.text)
    assert hub.federation.epoch == 3
    config_edit.add_participant(federation.path, Participant("dan", "", keys.public))
    dan = federation.join("dan")
    eventually(lambda: "it refuses our key: our key is not in its federation file" in notes(dan)[HUB])
    eventually(lambda: hub.hub.rejections.counts.get(("an unknown client", "a connection"), 0) > 0)


def test_hub_rejects_a_second_process_with_the_same_key(federation: HubFederation) -> None:
    federation.hub()
    for name in NAMES:
        federation.join(name)
    assert federation.sum_all() == {3.0}
    copy = member.FederationMember(
        federation.path, "ada", state=federation.path.parent / "copy", timeout=60.0, linger=0.0
    )
    try:
        eventually(lambda: "another process with this key is connected" in notes(copy)[HUB])
        assert federation.sum_all() == {3.0}
    finally:
        copy.peers.close()


def test_participant_without_an_address_cannot_listen(federation: HubFederation) -> None:
    with pytest.raises(InputError, match="ada has no address in the federation file: it only dials out, and cannot"):
        federation.join("ada", listen="tcp://127.0.0.1:7001")
    with pytest.raises(InputError, match="ada has no address in .*: it only dials out, to the hub; omit --address"):
        federation.join("ada", address="tcp://127.0.0.1:7001")


def test_running_participant_rejects_a_file_that_adds_its_address(
    federation: HubFederation, caplog: pytest.LogCaptureFixture
) -> None:
    federation.join("ada")
    text = federation.path.read_text().replace("epoch = 1", "epoch = 2")
    federation.path.write_text(text.replace('name = "ada"', f'name = "ada"\naddress = "tcp://127.0.0.1:{free_port()}"'))
    eventually(lambda: "it adds the address of ada, and a running participant cannot" in caplog.text)


def test_hub_with_a_wrong_key_or_file_does_not_start(federation: HubFederation, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    Keys.generate("hub").save(other)
    with pytest.raises(InputError, match="lists another for the hub"):
        federation.hub(key=other / "hub.key")
    federation.hub()
    with pytest.raises(TransportError, match="cannot listen at .* in use"):
        federation.hub()
    config_edit.create_federation(other / "federation.toml", "trial", participants())
    with pytest.raises(InputError, match=r"names no hub; add a \[hub\]"):
        FederationHub(other / "federation.toml")


def test_hub_that_repeats_messages_is_shown_in_the_status(
    federation: HubFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = federation.hub()
    for name in NAMES:
        federation.join(name)
    assert federation.sum_all() == {3.0}
    relay = hub.hub._relay

    def repeat(client: Any, to: bytes, payload: bytes) -> None:
        relay(client, to, payload)
        if (client.peer, to) == ("bob", b"ada"):
            relay(client, to, payload)

    monkeypatch.setattr(hub.hub, "_relay", repeat)
    assert federation.sum_all() == {3.0}
    note = "here: messages that the hub relayed from it were altered, repeated or lost, by the hub or by itself"
    eventually(lambda: notes(federation.joined["ada"])["bob"] == note)


def test_hub_that_adds_wrongly_stops_the_program_and_peers_are_notified(
    federation: HubFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = federation.hub()
    for name in NAMES:
        federation.join(name)
    assert federation.sum_all() == {3.0}
    add = hub.hub._aggregator.receive

    def add_wrongly(sender: str, frame: Any) -> Any:
        finished = add(sender, frame)
        return finished and (finished[0], bytes(finished[1][:-1]) + bytes([finished[1][-1] ^ 0x80]))

    monkeypatch.setattr(hub.hub._aggregator, "receive", add_wrongly)
    with pytest.raises((HubError, PeerAbortedError), match="the hub"):
        federation.sum_all()
    federation.joined["ada"].peers.close()
    eventually(lambda: notes(federation.joined["bob"])["ada"].startswith("left: its program stopped"))


# The command and real processes.


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_commands_create_keys_and_a_file_and_run_a_hub(tmp_path: Path) -> None:
    for name in (*NAMES, "hub"):
        Keys.generate(name).save(tmp_path)
    made = run(
        *("federation", "new", "federation.toml", "--name", "trial", "--steps", "3"),
        *(f"--participant={name}=={name}.pub" for name in NAMES),
        f"--hub=tcp://127.0.0.1:{free_port()}=hub.pub",
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    federation = Federation.load(tmp_path / "federation.toml")
    assert federation.training.opening == "hub"
    assert federation.hub is not None
    shown = run("federation", "show", "federation.toml", cwd=tmp_path).stdout
    assert f"Hub: {federation.hub.address}" in shown
    assert shown.count("dials out") == 3
    command = [sys.executable, "-m", "cgd", "hub", "federation.toml", "--log", "hub.jsonl"]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        checked = run("federation", "check", "federation.toml", "--as", "ada", "--wait", "3", cwd=tmp_path)
        assert checked.returncode == 3
        assert "the hub" in checked.stdout
        assert "it is not connected to the hub" in " ".join(re.sub("[│\n]", " ", checked.stdout).split())
        running.send_signal(signal.SIGTERM)
        output = running.communicate(timeout=120)[1]
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert "cgd: ada is here" in output
    assert "cgd: the hub has stopped; participants wait until it is restarted" in output
    assert "Traceback" not in output
    assert '"event": "peer", "peer": "ada", "state": "here"' in (tmp_path / "hub.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hub", "nowhere.toml"), 2, "nowhere.toml cannot be read"),
        (("hub", "plain.toml"), 2, "plain.toml names no hub"),
        (("federation", "new", "x.toml", "--participant", "a==a.pub", "--hub", "tcp://x:1"), 2, "--hub is 'tcp://x:1'"),
    ],
)
def test_bad_input_is_reported_in_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    config_edit.create_federation(tmp_path / "plain.toml", "trial", participants())
    Keys.generate("a").save(tmp_path)
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == code
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_kills_of_participants_and_hub_do_not_change_the_result(tmp_path: Path) -> None:
    """Of the hub too, with and without state; ada and bob only dial out, cleo has an address."""
    rng = random.Random(1)
    federation = ProcessFederation(tmp_path, NAMES, dialers=("ada", "bob"), opening="hub", steps=30)
    try:
        federation.start_all(PAUSE="0.1")  # before the hub
        federation.start_hub()
        federation.until_step(2)
        for victim in ("hub", "ada", "hub", "cleo"):
            time.sleep(rng.uniform(0, 0.5))
            federation.kill(victim, lose_state=rng.random() < 0.5)
            if victim == "hub":
                federation.start_hub()
            else:
                federation.start(victim, PAUSE="0.1")
        assert set(federation.wait(NAMES, seconds=200).values()) == {0}
        assert set(federation.bits().values()) == {uninterrupted_bits(tmp_path, NAMES, 30)}
        for name in NAMES:
            assert not any(word in federation.output(name) for word in ("altered", "swapped", "repeated or", "loses"))
    finally:
        federation.close()
