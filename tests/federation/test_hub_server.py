"""The hub as an operator meets it: the file, the command, kills of real processes, and changes of the members."""

from __future__ import annotations

import random
import re
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import Cell
from cgd.errors import HubError, InputError, PeerTimeoutError, TransportError
from cgd.federation import Federation, HubSite, Keys, Participant, Training, config_edit, member
from cgd.federation import hub_server as module
from cgd.federation.hub_server import FederationHub
from cgd.secagg.messages import HUB
from support.federations import ProcessFederation
from support.hubs import eventually
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
KEYS = [Keys.generate("x").public for _ in range(4)]
SITE = HubSite("tcp://hub.example:7000", KEYS[3])


def participants(*away: str) -> list[Participant]:
    return [
        Participant(name, "" if name in away else f"tcp://{name}.example:7001", key)
        for name, key in zip(NAMES, KEYS, strict=False)
    ]


# The file.


def test_a_file_with_a_hub_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    made = config_edit.new(path, "trial", participants("ada", "bob"), Training(opening="hub"), SITE)
    read = Federation.load(path)
    assert read == made
    assert read.hub == SITE
    assert read.participant("ada").address == ""
    assert "address" not in path.read_text().split("[[participants]]")[1]
    assert set(read.sections()) == {"federation", "training", "participants", "hub"}
    assert read.contacts_and_hub[HUB].address == SITE.address
    assert HUB not in read.contacts
    keys = Keys.generate("dan")
    assert config_edit.with_participant(path, Participant("dan", "", keys.public)).hub == SITE
    assert config_edit.without(path, "bob").hub == SITE


def test_without_a_hub_nothing_is_said_of_it(tmp_path: Path) -> None:
    made = config_edit.new(tmp_path / "federation.toml", "trial", participants())
    assert set(made.sections()) == {"federation", "training", "participants"}
    assert "[hub]" not in (tmp_path / "federation.toml").read_text()


@pytest.mark.parametrize(
    ("away", "opening", "site", "says"),
    [
        (("bob",), "mesh", None, r"bob has no address, and there is no hub .* add a \[hub\]"),
        ((), "hub", None, r'opening in \[training\] is "hub", and there is none; add a \[hub\]'),
        ((), "mesh", HubSite("tcp://x:1", KEYS[1]), "the hub has the key of bob; it needs one of its own"),
        ((), "mesh", HubSite("tcp://x:1", KEYS[1][:40] + KEYS[3][40:]), "the hub has the key of bob; it needs one of"),
        ((), "mesh", HubSite("tcp://bob.example:7001", KEYS[3]), "the hub and bob have the same address"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, away: tuple[str, ...], opening: Any, site: HubSite | None, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        config_edit.new(tmp_path / "federation.toml", "trial", participants(*away), Training(opening=opening), site)
    assert not (tmp_path / "federation.toml").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[hub]\n", r"\[hub\] address is missing; add it"),
        ('[hub]\naddress = "tcp://x:1"\n', r"\[hub\] key is missing; add it"),
        ('[hub]\naddress = "x"\nkey = "y"\n', r"\[hub\] address is 'x'; write where the others reach it"),
        ('[hub]\naddress = "tcp://x:1"\nkey = "y"\n', r"\[hub\] key is 'y'; a key is 80 characters"),
        ('[hub]\naddress = "tcp://x:1"\nkeys = "y"\n', r"\[hub\] there is no 'keys' \(did you mean 'key'\?\)"),
        ("hub = 3\n", r"\[hub\] 3 is no table"),
    ],
)
def test_a_bad_hub_section(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "federation.toml"
    config_edit.new(path, "trial", participants())
    path.write_text(text + path.read_text() if text.startswith("hub") else f"{path.read_text()}\n{text}")
    with pytest.raises(InputError, match=says):
        Federation.load(path)


def test_in_a_grid_smaller_groups_sum_through_the_hub_too(tmp_path: Path) -> None:
    federation_of_processes = ProcessFederation(
        tmp_path, [f"r{i}" for i in range(3)], [Cell(i, 0) for i in range(3)], ["r0"], opening="hub"
    )
    membership = member.FederationMember(federation_of_processes.path, "r0")
    try:
        assert membership.peers.settings.opening == "hub"
        assert membership.peers.groups["column"].settings.opening == "hub"
    finally:
        membership.peers.close()


# Running it.


class Village:
    """Memberships inside this process, and a hub by the federation file."""

    def __init__(self, folder: Path, dialers: Collection[str] = NAMES, opening: str = "hub") -> None:
        self.federation_of_processes = ProcessFederation(folder, NAMES, dialers=dialers, opening=opening)
        self.path = self.federation_of_processes.path
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
def village(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.1)
    made = Village(tmp_path)
    yield made
    made.close()


def notes(membership: member.FederationMember) -> dict[str, str]:
    return {report.name: f"{report.state}: {report.note}" for report in membership.runtime.report()}


def test_a_hub_that_is_not_there_is_where_it_hangs(village: Village) -> None:
    ada = village.join("ada", timeout=1.5)
    eventually(lambda: "nobody answers there" in notes(ada)[HUB])
    assert "it is to be reached through the hub, and the hub is not: nobody answers there" in notes(ada)["bob"]
    with pytest.raises(PeerTimeoutError, match="bob: it is to be reached through the hub, and the hub is not"):
        ada.peers.sum(np.array([1.0]))
    village.hub()
    eventually(lambda: notes(ada) == notes(ada) | {HUB: "here: ", "bob": "missing: it is not connected with the hub"})


def test_members_may_know_of_a_new_epoch_before_the_hub_does(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have deposited by then it forgets, and is given again."""
    keys = Keys.generate("dan")
    keys.save(village.path.parent)
    config_edit.with_participant(village.path, Participant("dan", "", keys.public))
    monkeypatch.setattr(module, "WATCH_SECONDS", 3600.0)
    hub = village.hub()
    for name in (*NAMES, "dan"):
        village.join(name, timeout=20.0)
    assert village.sum_all() == {4.0}
    config_edit.without(village.path, "bob")
    village.joined.pop("bob").peers.close()

    def all_deposited() -> bool:
        tallies = list(hub.hub._aggregator._tallies.values())
        return any(len(givers) == 3 for tally in tallies for _, givers in tally.slices.values())

    def catch_up() -> None:
        eventually(all_deposited)
        new = Federation.load(village.path)
        hub.hub.update(new.contacts, new.groups())

    with ThreadPoolExecutor() as pool:
        late = pool.submit(catch_up)
        assert village.sum_all() == {3.0}
        late.result()


def test_the_file_is_followed_and_whoever_is_removed_is_heard_no_more(village: Village) -> None:
    hub = village.hub()
    keys = Keys.generate("dan")
    keys.save(village.path.parent)
    for name in NAMES:
        village.join(name)
    assert village.sum_all() == {3.0}
    config_edit.with_participant(village.path, Participant("dan", "", keys.public))
    village.join("dan", state=village.path.parent / "other")
    eventually(lambda: {each.federation.epoch for each in village.joined.values()} == {2} == {hub.federation.epoch})
    assert village.joined["dan"].peers.sum(np.array([1.0])) == 3.0  # what was summed before it came
    assert village.sum_all() == {4.0}
    config_edit.without(village.path, "bob")
    bob = village.joined.pop("bob")
    assert village.sum_all() == {3.0}
    eventually(lambda: hub.hub.rejections.counts.get(("a former participant", "a message"), 0) > 0)
    assert "bob" not in [report.name for report in hub.hub.report()]
    bob.runtime.transport.close()
    bob.peers.close()


def test_a_hub_with_an_old_file_refuses_the_new_key(village: Village) -> None:
    hub = village.hub()
    old = village.path.read_text()
    keys = Keys.generate("dan")
    keys.save(village.path.parent)
    config_edit.with_participant(village.path, Participant("dan", "", keys.public))
    eventually(lambda: hub.federation.epoch == 2)
    village.path.write_text(old.replace("epoch = 1", "epoch = 3"))
    eventually(lambda: hub.federation.epoch == 3)
    village.path.write_text(old)  # an epoch only goes up
    time.sleep(0.3)
    assert hub.federation.epoch == 3
    config_edit.with_participant(village.path, Participant("dan", "", keys.public))
    dan = village.join("dan")
    eventually(lambda: "it refuses our key: our key is not in its federation file" in notes(dan)[HUB])
    eventually(lambda: hub.hub.rejections.counts.get(("a stranger", "a connection"), 0) > 0)


def test_a_second_process_with_the_same_key_is_not_let_in(village: Village) -> None:
    village.hub()
    for name in NAMES:
        village.join(name)
    assert village.sum_all() == {3.0}
    copy = member.FederationMember(village.path, "ada", state=village.path.parent / "copy", timeout=60.0, linger=0.0)
    try:
        eventually(lambda: "another process with this key is connected" in notes(copy)[HUB])
        assert village.sum_all() == {3.0}
    finally:
        copy.peers.close()


def test_who_dials_out_has_nothing_to_listen_at(village: Village) -> None:
    with pytest.raises(InputError, match="ada has no address in the federation file: it only dials out, and cannot"):
        village.join("ada", listen="tcp://127.0.0.1:7001")
    with pytest.raises(
        InputError, match="ada has no address in .*: it only dials out, to the hub; leave out --address"
    ):
        village.join("ada", address="tcp://127.0.0.1:7001")


def test_an_address_cannot_come_or_go_while_a_participant_runs(
    village: Village, caplog: pytest.LogCaptureFixture
) -> None:
    village.join("ada")
    text = village.path.read_text().replace("epoch = 1", "epoch = 2")
    village.path.write_text(text.replace('name = "ada"', f'name = "ada"\naddress = "tcp://127.0.0.1:{free_port()}"'))
    eventually(lambda: "it gives the address of ada, and a running participant cannot" in caplog.text)


def test_a_hub_of_another_file_or_key_does_not_start(village: Village, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    Keys.generate("hub").save(other)
    with pytest.raises(InputError, match="lists another for the hub"):
        village.hub(key=other / "hub.key")
    village.hub()
    with pytest.raises(TransportError, match="cannot listen at .* in use"):
        village.hub()
    config_edit.new(other / "federation.toml", "trial", participants())
    with pytest.raises(InputError, match=r"names no hub; add a \[hub\]"):
        FederationHub(other / "federation.toml")


def test_what_the_hub_does_ends_the_program_and_the_others_are_told(
    village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = village.hub()
    for name in NAMES:
        village.join(name)
    assert village.sum_all() == {3.0}
    relay = hub.hub._relay

    def repeat(visitor: Any, to: bytes, payload: bytes) -> None:
        relay(visitor, to, payload)
        if (visitor.peer, to) == ("bob", b"ada"):
            relay(visitor, to, payload)

    monkeypatch.setattr(hub.hub, "_relay", repeat)
    with pytest.raises(HubError, match="the hub: repeated or reordered messages from bob"):
        village.joined["ada"].peers.sum(np.array([1.0]))
    village.joined["ada"].peers.close()
    eventually(lambda: notes(village.joined["bob"])["ada"].startswith("left: its program stopped"))


# The command, and real processes.


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_from_keys_to_a_running_hub(tmp_path: Path) -> None:
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
        assert "it is not connected with the hub" in " ".join(re.sub("[│\n]", " ", checked.stdout).split())
        running.send_signal(signal.SIGTERM)
        said = running.communicate(timeout=30)[1]
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert "cgd: ada is here" in said
    assert "cgd: the hub stops; participants wait until it is back" in said
    assert "Traceback" not in said
    assert '"event": "peer", "peer": "ada", "state": "here"' in (tmp_path / "hub.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("hub", "nowhere.toml"), 2, "nowhere.toml cannot be read"),
        (("hub", "plain.toml"), 2, "plain.toml names no hub"),
        (("federation", "new", "x.toml", "--participant", "a==a.pub", "--hub", "tcp://x:1"), 2, "--hub is 'tcp://x:1'"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    config_edit.new(tmp_path / "plain.toml", "trial", participants())
    Keys.generate("a").save(tmp_path)
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == code
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def quiet_bits(folder: Path, steps: int) -> str:
    faults = runpy.run_path(str(__file__).replace("test_hub.py", "test_faults.py"))
    bits: str = faults["quiet_bits"](folder, NAMES, steps)
    return bits


def test_kills_of_real_processes_change_nothing(tmp_path: Path) -> None:
    """The hub's among them, with state and without; ada and bob only dial out, cleo has an address."""
    rng = random.Random(1)
    federation_of_processes = ProcessFederation(tmp_path, NAMES, dialers=("ada", "bob"), opening="hub", steps=30)
    try:
        federation_of_processes.start_all(PAUSE="0.1")  # before the hub is
        federation_of_processes.start_hub()
        federation_of_processes.until_step(2)
        for victim in ("hub", "ada", "hub", "cleo"):
            time.sleep(rng.uniform(0, 0.5))
            federation_of_processes.kill(victim, lose_state=rng.random() < 0.5)
            if victim == "hub":
                federation_of_processes.start_hub()
            else:
                federation_of_processes.start(victim, PAUSE="0.1")
        assert set(federation_of_processes.wait(NAMES, seconds=200).values()) == {0}
        assert set(federation_of_processes.bits().values()) == {quiet_bits(tmp_path, 30)}
        for name in NAMES:
            assert not any(
                word in federation_of_processes.said(name) for word in ("altered", "swapped", "repeated or", "loses")
            )
    finally:
        federation_of_processes.close()
