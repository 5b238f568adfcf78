"""Simulations on a Ray cluster: the bits of one machine, whatever the number of workers and whichever are lost."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from cgd import Cell, Grid, InputError, LocalTraining, MissingExtraError, RayCluster, simulate
from cgd.cli import main
from cgd.dp.settings import PrivacySettings
from cgd.simulation import ray_cluster
from cgd.simulation.engines import choose_engine
from cgd.simulation.fused_engine import FusedEngine
from cgd.simulation.fused_rows import rows_of
from cgd.simulation.local_training import Work
from cgd.simulation.population import Participants
from support.networks import FEATURES, blocks, fully_connected

TESTS = Path(__file__).parents[1]
LOCAL = LocalTraining(epochs=2, batch=3, lr=0.1, momentum=0.9)


def mixed_density(nonzero_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of which one half has no zeros, and the other half is mostly zeros."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, FEATURES, generator=generator), torch.arange(60) % 3
    x[30:] *= torch.rand(30, FEATURES, generator=generator) < (0.05 if nonzero_first else 0.4)
    return (x, y) if nonzero_first else (x.flip(0), y)


def samples(name: str) -> dict[Any, Any]:
    if name == "columns":
        return blocks(7, 3)
    if name == "uneven":
        x = torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(5))
        return Grid(3).split(x, (x[:, 0] > 0).long(), row_shares=(40, 9, 1))
    return Grid(5).split(*mixed_density(name == "sparse"), seed=None)


@pytest.mark.parametrize("workers", [2, 3, 16])
@pytest.mark.parametrize("memory", [1e9, 500.0])
@pytest.mark.parametrize(
    ("data", "mode", "work", "settings"),
    [
        ("uneven", "towers", Work(), {}),
        ("dense", "towers", Work(), {}),
        ("sparse", "towers", Work(), {"fresh_origins": True}),
        ("columns", "joint", Work(), {}),
        ("columns", "towers", Work(), {}),
        ("uneven", "towers", Work(), {"common_origin": True}),
        ("dense", "towers", Work(batches=4), {}),
        ("sparse", "towers", Work(local=LOCAL), {}),
    ],
)
def test_workers_compute_the_bits_of_one_machine(
    data: str, mode: Any, work: Work, settings: dict[str, Any], memory: float, workers: int
) -> None:
    """Each worker has only what a cluster sends it: pickled settings without data, and the samples of its rows."""
    participants = Participants(fully_connected(FEATURES, 8, 3), samples(data), mode, 0.5, seed=3, **settings)
    engine = choose_engine(participants, functional.cross_entropy, None, memory, work=work, privacy=None, kernels=True)
    assert isinstance(engine, FusedEngine)
    displacement = (0.3 * torch.randn(participants.layout.size, generator=torch.Generator().manual_seed(1))).numpy()
    expected = list(engine._rows.part_sums(displacement, 2))
    dense = len(getattr(engine._rows._samples, "dense", ())) > 0  # type: ignore[attr-defined]
    factory = engine._factory(0, memory, dense=dense)
    parts = [(chunk, part) for chunk, own in enumerate(engine._chunks) for part in own]
    found = []
    for start, end in pairwise(np.linspace(0, len(parts), min(workers, len(parts)) + 1).astype(int)):
        chunks = [
            [part for number, part in parts[start:end] if number == chunk] for chunk in range(len(engine._chunks))
        ]
        chunks = [chunk for chunk in chunks if chunk]
        rows = rows_of(chunks)
        sent = pickle.loads(pickle.dumps(replace(factory, participants=participants.without_data(rows))))
        assert not sent.participants.blocks
        found += list(sent.create(chunks, factory.samples(rows)).part_sums(displacement, 2))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[3] == theirs[3]
        assert all(np.array_equal(one, other) for one, other in zip(ours[:3], theirs[:3], strict=True))


def test_a_worker_can_draw_only_the_origins_of_its_rows() -> None:
    participants = Participants(fully_connected(FEATURES, 8, 3), blocks(5))
    part = participants.without_data(range(2, 4))
    assert part.origin(Cell(3, 0)) == participants.origin(Cell(3, 0))
    with pytest.raises(InputError, match="r4c0 is not"):
        part.origin(Cell(4, 0))


@pytest.mark.parametrize(
    "address", ["head", "head:", ":6379", "head:0", "head:99999", "http://head:6379", "", "ray://"]
)
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=r"local, auto, HOST:PORT of the head node, or ray://HOST:PORT"):
        RayCluster(address)


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "2"])
def test_the_number_of_workers_is_a_positive_whole_number(workers: Any) -> None:
    with pytest.raises(InputError, match="workers is"):
        RayCluster("local", workers)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cgd.extras.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cgd\[ray\]'"):
        simulate(fully_connected(FEATURES, 8, 3), blocks(5), steps=2, lr=0.5, engine="ray", progress=False)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_answers_is_an_error(prefix: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # does not listen
        address = f"{prefix}127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InputError, match=f"nothing answers at the Ray address {address}"):
            ray_cluster.probe(address)


def test_a_server_that_is_not_ray_is_an_error_within_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InputError, match=f"what answers at the Ray address {address} is not Ray"):
            ray_cluster.probe(address)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arithmetic": "ring"}, "the arithmetic is 'ring' and the engine is Ray"),
        ({"privacy": PrivacySettings(epsilon=8.0, delta=1e-5, steps=2, clip=1.0, colluders=1)}, "privacy is given"),
        ({"loss": lambda outputs, y: functional.cross_entropy(outputs, y)}, "needs the engine 'modules'"),
    ],
)
def test_what_kernels_do_not_compute_is_refused_before_connecting(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayCluster, "connected", lambda _: pytest.fail("connected"))
    with pytest.raises(InputError, match=message):
        simulate(fully_connected(FEATURES, 8, 3), blocks(5), steps=2, lr=0.5, engine="ray", progress=False, **settings)


def test_the_command_line_reports_bad_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(tmp_path)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for options, message in (
            (["--ray", address], f"nothing answers at the Ray address {address}"),
            (["--ray", "nowhere"], "the Ray address is 'nowhere'"),
            (["--workers", "2"], "add --ray local"),
            (["--ray", "local", "--workers", "0"], "workers is 0"),
        ):
            monkeypatch.setattr(sys, "argv", ["cgd", "simulate", str(spec), "--out", str(tmp_path / "out"), *options])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 2
            shown = " ".join(capsys.readouterr().err.split())
            assert message in shown
            assert "Traceback" not in shown


def write_spec(folder: Path) -> Path:
    path = folder / "runs.toml"
    path.write_text('title = "workers"\n\n[[run]]\nlabel = "cgd"\ndata = "digits"\nrows = 20\nsteps = 3\nlr = 0.5\n')
    return path


@pytest.mark.slow
def test_any_number_of_workers_and_a_killed_node_give_the_bits_of_one_machine() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(TESTS / "support" / "ray_cluster.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    plain = found["plain"]
    assert len(set(plain.values())) == len(plain)
    runs = {name: digest for name, digest in found.items() if isinstance(digest, str)}
    assert len(runs) == 5
    for name, digest in runs.items():
        assert digest == plain[name.partition(",")[0]], name
    assert sum(found["losses"]) >= 1, "no worker was on the killed node"
    (one,) = found["reports of 1"]
    assert (one["participants"], one["samples"], one["losses"]) == (11, 60, 0)
    assert all(each["seconds"] > 0 and each["peak_memory"] > 1e7 for each in found["reports of 2"])
    assert sum(each["samples"] for each in found["reports of 4"]) == 60
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert found["listening"]
    assert set(found["listening"]) <= loopback
    assert found["left"] == 0, "processes of Ray are left"


@pytest.mark.slow
def test_the_command_line_computes_on_a_local_cluster(tmp_path: Path) -> None:
    spec, results = write_spec(tmp_path), []
    for options in ([], ["--ray", "local", "--workers", "2"]):
        out = tmp_path / f"out-{len(options)}"
        program = "import cgd.cli; cgd.cli.main()"
        command = [sys.executable, "-c", program, "simulate", str(spec), "--out", str(out), *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 0, ended.stderr
        results.append([json.loads(path.read_text()) for path in sorted(out.glob("*.json"))])
    assert len(results[0]) == 1
    assert results[0] == results[1]
    assert " GB " in ended.stderr
