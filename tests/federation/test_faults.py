"""Five real processes over real sockets: whoever is killed, whatever breaks, the bits are those of a quiet run."""

from __future__ import annotations

import hashlib
import random
import runpy
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd import Cell, local_peers, simulate
from cgd.federation import config, config_edit
from cgd.federation.keys import Keys
from support.federations import NAMES, ProcessFederation
from support.ports import free_port
from support.proxy import BadProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd import Peers

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture
def federation_of_processes(tmp_path: Path) -> Iterator[ProcessFederation]:
    made = ProcessFederation(tmp_path, steps=STEPS)
    yield made
    made.close()


def quiet_bits(folder: Path, names: tuple[str, ...] = NAMES, steps: int = STEPS) -> str:
    """What the same participants, with the same keys, come to inside one process, undisturbed."""
    training = runpy.run_path(str(folder / "training.py"))

    def work(peers: Peers) -> Any:
        peers.seed = Keys.load(folder / f"{peers.me}.key").federation_seed("trial")
        return training["train"](peers, steps=steps)[0]

    with local_peers(names) as peers:
        displacements = peers.run(work)
    digests = {hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in displacements}
    (digest,) = digests
    return digest


def test_five_processes_give_the_bits_of_one(federation_of_processes: ProcessFederation) -> None:
    federation_of_processes.start_all()
    assert set(federation_of_processes.wait().values()) == {0}
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}


def test_five_processes_give_the_bits_of_the_simulator(federation_of_processes: ProcessFederation) -> None:
    for name in NAMES:
        federation_of_processes.start(name, run="training:like_the_simulator")
    assert set(federation_of_processes.wait().values()) == {0}
    training = runpy.run_path(str(federation_of_processes.folder / "training.py"))
    simulated = simulate(
        training["network"], training["blocks"](), steps=6, lr=0.3, delta=0.2, seed=4, arithmetic="ring", progress=False
    )
    displacement = torch.cat([each.reshape(-1) for each in simulated.displacement().values()])
    expected = hashlib.sha256(displacement.numpy().tobytes()).hexdigest()
    assert set(federation_of_processes.bits().values()) == {expected}


@pytest.mark.parametrize(("lose_state", "loop"), [(False, "plain"), (True, "steps")])
def test_twenty_kills_at_random_moments_change_nothing(
    federation_of_processes: ProcessFederation, lose_state: bool, loop: str
) -> None:
    rng = random.Random(f"kills {lose_state}")
    federation_of_processes.start_all(PAUSE="0.2", LOOP=loop)
    for _ in range(20):
        time.sleep(rng.uniform(0, 1.5))
        victim = rng.choice(NAMES)
        assert federation_of_processes.processes[victim].poll() is None, "it is over too soon for twenty kills"
        federation_of_processes.kill(victim, lose_state=lose_state)
        federation_of_processes.start(victim, PAUSE="0.2", LOOP=loop)
    assert set(federation_of_processes.wait(seconds=300).values()) == {0}
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}


def test_all_of_them_killed_at_once_go_on_from_their_state(federation_of_processes: ProcessFederation) -> None:
    federation_of_processes.start_all(PAUSE="0.2")
    federation_of_processes.until_step(20)
    for name in NAMES:
        federation_of_processes.kill(name)
    made = {name: federation_of_processes.sums(name) for name in NAMES}
    assert min(made.values()) >= 20  # none is lost that any of them had
    federation_of_processes.start_all()
    assert set(federation_of_processes.wait().values()) == {0}
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}


def test_a_bad_network_changes_nothing(federation_of_processes: ProcessFederation) -> None:
    """Every connection goes through a proxy that delays, throttles and cuts it."""
    text = federation_of_processes.path.read_text()
    routes, listen = {}, {}
    for name in NAMES:
        address = config.Federation.load(federation_of_processes.path).participant(name).address
        port, proxy = int(address.rsplit(":", 1)[1]), free_port()
        routes[proxy] = port
        listen[name] = f"tcp://127.0.0.1:{port}"
        text = text.replace(address, f"tcp://127.0.0.1:{proxy}")
    federation_of_processes.path.write_text(text)
    with BadProxy(routes, seed=1) as proxy_server:
        for name in NAMES:
            federation_of_processes.start(name, "--listen", listen[name])
        federation_of_processes.until_step(10)
        federation_of_processes.kill("cleo", lose_state=True)
        federation_of_processes.start("cleo", "--listen", listen["cleo"])
        assert set(federation_of_processes.wait(seconds=300).values()) == {0}
        assert proxy_server.cuts > 20
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}


def test_a_participant_comes_back_on_another_machine(federation_of_processes: ProcessFederation) -> None:
    """With its key alone, at another address, which no file mentions."""
    federation_of_processes.start_all(PAUSE="0.1")
    federation_of_processes.until_step(10)
    federation_of_processes.kill("bob", lose_state=True)
    federation_of_processes.start("bob", "--address", f"tcp://127.0.0.1:{free_port()}")
    assert set(federation_of_processes.wait().values()) == {0}
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}


def test_a_participant_is_removed_for_good_and_another_joins_late(federation_of_processes: ProcessFederation) -> None:
    federation_of_processes.start_all(PAUSE="0.1")
    federation_of_processes.until_step(10)
    federation_of_processes.kill("dan")
    reached = int((federation_of_processes.folder / "ada.step").read_text())
    config_edit.without(federation_of_processes.path, "dan")
    federation_of_processes.until_step(reached + 10)
    keys = Keys.generate("fay")
    keys.save(federation_of_processes.folder)
    config_edit.with_participant(
        federation_of_processes.path, config.Participant("fay", f"tcp://127.0.0.1:{free_port()}", keys.public, None)
    )
    federation_of_processes.start("fay", PAUSE="0.1")
    codes = federation_of_processes.wait()
    assert set(codes) == {"ada", "bob", "cleo", "eve", "fay"}
    assert set(codes.values()) == {0}
    bits = federation_of_processes.bits()
    assert len(set(bits.values())) == 1
    assert bits["fay"] != quiet_bits(federation_of_processes.folder)  # a step without dan, or with fay, is another step
    assert "epoch 3" in federation_of_processes.said("ada")


def test_whoever_is_removed_is_told(federation_of_processes: ProcessFederation) -> None:
    federation_of_processes.start_all(PAUSE="0.2")
    federation_of_processes.until_step(3)
    config_edit.without(federation_of_processes.path, "dan")
    assert federation_of_processes.processes["dan"].wait(60) == 2
    assert "dan is no longer in the federation: it was removed in epoch 2" in federation_of_processes.said("dan")


def test_a_grid_sums_in_its_groups(tmp_path: Path) -> None:
    names = ("r0c0", "r0c1", "r1c0", "r1c1", "r2c0", "r2c1")
    cells = [Cell(int(name[1]), int(name[3])) for name in names]
    federation_of_processes = ProcessFederation(tmp_path, names, cells, steps=20)
    try:
        federation_of_processes.start_all(PAUSE="0.1")
        federation_of_processes.until_step(8)
        federation_of_processes.kill("r1c0", lose_state=True)
        federation_of_processes.start("r1c0")
        assert set(federation_of_processes.wait().values()) == {0}
        bits = federation_of_processes.bits()
    finally:
        federation_of_processes.close()
    columns = {column: {bits[name] for name in names if name.endswith(column)} for column in ("c0", "c1")}
    assert all(len(each) == 1 for each in columns.values())
    assert columns["c0"] != columns["c1"]  # they have first layers of their own


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_cleanly_and_the_same_command_goes_on(
    federation_of_processes: ProcessFederation, how: signal.Signals
) -> None:
    federation_of_processes.start_all(PAUSE="0.1")
    federation_of_processes.until_step(5)
    federation_of_processes.processes["ada"].send_signal(how)
    assert federation_of_processes.processes["ada"].wait(30) == 130
    assert "interrupted; the same command goes on from here" in federation_of_processes.said("ada")
    assert "Traceback" not in federation_of_processes.said("ada")
    time.sleep(1)
    assert "ada is left" in federation_of_processes.said("bob")
    federation_of_processes.start("ada")
    assert set(federation_of_processes.wait().values()) == {0}
    assert set(federation_of_processes.bits().values()) == {quiet_bits(federation_of_processes.folder)}
