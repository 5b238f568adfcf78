"""Five real processes over real sockets: kills and network faults do not change the bits of the result."""

from __future__ import annotations

import hashlib
import random
import runpy
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch

from cgd import Cell, simulate
from cgd.federation import config, config_edit
from cgd.federation.keys import Keys
from support.federations import NAMES, ProcessFederation, uninterrupted_bits
from support.ports import free_port
from support.proxy import UnreliableProxy
from support.transports import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[ProcessFederation]:
    made = ProcessFederation(tmp_path, steps=STEPS)
    yield made
    made.close()


def test_five_processes_give_the_same_bits_as_one_process(federation: ProcessFederation) -> None:
    federation.start_all()
    assert set(federation.wait().values()) == {0}
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}


def test_five_processes_give_the_same_bits_as_the_simulator(federation: ProcessFederation) -> None:
    for name in NAMES:
        federation.start(name, run="training:like_the_simulator")
    assert set(federation.wait().values()) == {0}
    training = runpy.run_path(str(federation.folder / "training.py"))
    simulated = simulate(
        training["network"], training["blocks"](), steps=6, lr=0.3, delta=0.2, seed=4, arithmetic="ring", progress=False
    )
    displacement = torch.cat([each.reshape(-1) for each in simulated.displacement().values()])
    expected = hashlib.sha256(displacement.numpy().tobytes()).hexdigest()
    assert set(federation.bits().values()) == {expected}


@pytest.mark.parametrize(("lose_state", "loop"), [(False, "plain"), (True, "steps")])
def test_twenty_kills_at_random_moments_do_not_change_the_result(
    federation: ProcessFederation, lose_state: bool, loop: str
) -> None:
    rng = random.Random(f"kills {lose_state}")
    federation.start_all(PAUSE="0.2", LOOP=loop)
    for _ in range(20):
        time.sleep(rng.uniform(0, 1.5))
        victim = rng.choice(NAMES)
        assert federation.processes[victim].poll() is None, "the training ended before twenty kills"
        federation.kill(victim, lose_state=lose_state)
        federation.start(victim, PAUSE="0.2", LOOP=loop)
    assert set(federation.wait(seconds=300).values()) == {0}
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}


def test_all_participants_killed_at_once_recover_from_their_state(federation: ProcessFederation) -> None:
    federation.start_all(PAUSE="0.2")
    federation.until_step(20)
    for name in NAMES:
        federation.kill(name)
    made = {name: federation.sums(name) for name in NAMES}
    assert min(made.values()) >= 20  # no finished sum is lost
    federation.start_all()
    assert set(federation.wait().values()) == {0}
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}


def test_bad_network_does_not_change_the_result(federation: ProcessFederation) -> None:
    """Every connection goes through a proxy that delays, throttles and cuts it."""
    text = federation.path.read_text()
    routes, listen = {}, {}
    for name in NAMES:
        address = config.Federation.load(federation.path).participant(name).address
        port, proxy = int(address.rsplit(":", 1)[1]), free_port()
        routes[proxy] = port
        listen[name] = f"tcp://127.0.0.1:{port}"
        text = text.replace(address, f"tcp://127.0.0.1:{proxy}")
    federation.path.write_text(text)
    with UnreliableProxy(routes, seed=1) as proxy_server:
        for name in NAMES:
            federation.start(name, "--listen", listen[name])
        federation.until_step(10)
        federation.kill("cleo", lose_state=True)
        federation.start("cleo", "--listen", listen["cleo"])
        assert set(federation.wait(seconds=300).values()) == {0}
        assert proxy_server.cuts > 20
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}


def test_participant_restarts_at_another_address_with_its_key_alone(federation: ProcessFederation) -> None:
    """The new address is not in the federation file."""
    federation.start_all(PAUSE="0.1")
    federation.until_step(10)
    federation.kill("bob", lose_state=True)
    federation.start("bob", "--address", f"tcp://127.0.0.1:{free_port()}")
    assert set(federation.wait().values()) == {0}
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}


def test_participant_is_removed_and_another_joins_late(federation: ProcessFederation) -> None:
    federation.start_all(PAUSE="0.1")
    federation.until_step(10)
    federation.kill("dan")
    reached = int((federation.folder / "ada.step").read_text())
    config_edit.remove_participant(federation.path, "dan")
    federation.until_step(reached + 10)
    keys = Keys.generate("fay")
    keys.save(federation.folder)
    config_edit.add_participant(
        federation.path, config.Participant("fay", f"tcp://127.0.0.1:{free_port()}", keys.public, None)
    )
    federation.start("fay", PAUSE="0.1")
    codes = federation.wait()
    assert set(codes) == {"ada", "bob", "cleo", "eve", "fay"}
    assert set(codes.values()) == {0}
    bits = federation.bits()
    assert len(set(bits.values())) == 1
    assert bits["fay"] != uninterrupted_bits(
        federation.folder, NAMES, STEPS
    )  # steps without dan or with fay have other results
    assert "epoch 3" in federation.output("ada")


def test_removed_participant_stops_with_an_error(federation: ProcessFederation) -> None:
    federation.start_all(PAUSE="0.2")
    federation.until_step(3)
    config_edit.remove_participant(federation.path, "dan")
    assert federation.processes["dan"].wait(60) == 2
    assert "dan is no longer in the federation: it was removed in epoch 2" in federation.output("dan")


def test_grid_recovers_in_its_groups(tmp_path: Path) -> None:
    names = ("r0c0", "r0c1", "r1c0", "r1c1", "r2c0", "r2c1")
    cells = [Cell(int(name[1]), int(name[3])) for name in names]
    federation = ProcessFederation(tmp_path, names, cells, steps=20)
    try:
        federation.start_all(PAUSE="0.1")
        federation.until_step(8)
        federation.kill("r1c0", lose_state=True)
        federation.start("r1c0")
        assert set(federation.wait().values()) == {0}
        bits = federation.bits()
    finally:
        federation.close()
    columns = {column: {bits[name] for name in names if name.endswith(column)} for column in ("c0", "c1")}
    assert all(len(each) == 1 for each in columns.values())
    assert columns["c0"] != columns["c1"]  # every column has its own first layer


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_participant_stops_cleanly_and_continues_after_a_restart(
    federation: ProcessFederation, how: signal.Signals
) -> None:
    federation.start_all(PAUSE="0.1")
    federation.until_step(5)
    federation.processes["ada"].send_signal(how)
    assert federation.processes["ada"].wait(30) == 130
    assert "interrupted; the same command continues from here" in federation.output("ada")
    assert "Traceback" not in federation.output("ada")
    eventually(lambda: "ada is left" in federation.output("bob"))
    federation.start("ada")
    assert set(federation.wait().values()) == {0}
    assert set(federation.bits().values()) == {uninterrupted_bits(federation.folder, NAMES, STEPS)}
