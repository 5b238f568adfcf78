"""Recordings over sockets: the same bits as without, and nothing lost or doubled when a participant is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from cgd.audit.trace_view import load, view_of
from cgd.audit.view import flat
from cgd.cli import app
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.member import FederationMember
from cgd.optim.grid import Cell
from cgd.tabular.loading import read
from cgd.tabular.settings import TabularSettings
from cgd.tabular.trace_writer import FRAMES, STEPS, TraceWriter
from cgd.tabular.training import train
from support.practice import IN_COLUMNS, federation_file, table, write_csv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cgd.audit.trace_view import Recording
    from cgd.transport.driver import Traffic

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
STEPS_TAKEN = 20
EPSILON = float(torch.finfo(torch.float32).eps)


class Killed(BaseException):
    """Stands for the end of a process."""


class Mortal(TraceWriter):
    """Dies when step 7 was opened, before it is written down."""

    def opened(self, addend: Any, total: Any) -> None:
        if addend.weight is not None and addend.step.number == 7:
            raise Killed
        super().opened(addend, total)


class Patient(TraceWriter):
    """Takes step 8 when it is told to."""

    go = threading.Event()

    def entering(self, addend: Any) -> None:
        if addend.weight is not None and addend.step.number == 8:
            assert self.go.wait(timeout=100)
        super().entering(addend)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of three with tables of their own."""
    folder = tmp_path_factory.mktemp("federation")
    for place, name in enumerate(NAMES):
        write_csv(folder / f"{name}.csv", table(60 - 15 * place, place))
    return federation_file(folder, NAMES, steps=STEPS_TAKEN, lr=0.02, patience=0)


@pytest.fixture(scope="module")
def models(path: Path) -> dict[str, torch.Tensor]:
    """What comes out when nothing is recorded."""
    return {name: model for name, (model, _) in in_threads(lambda name: take_part(path, name, "plain")).items()}


def take_part(path: Path, name: str, life: str, recorder: TraceWriter | None = None) -> tuple[torch.Tensor, Traffic]:
    """One life of a participant; its model, flat, and what it received."""
    setting = TabularSettings.of(Federation.load(path), name)
    records, _ = read(path.parent / f"{name}.csv", setting.data, setting.own_columns)
    sink = None if recorder is None else recorder.frame
    membership = FederationMember(path, name, state=path.parent / f"{life}-state" / name, linger=10.0, sink=sink)
    try:
        trained = train(membership.peers, setting, records, recorder=recorder)
        membership.runtime.close(done=True)
    finally:
        membership.runtime.close(done=False)
        if recorder is not None:
            recorder.close()
    return flat(list(trained.network.parameters())), membership.peers.traffic


def in_threads(work: Callable[[str], Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            results[name] = work(name)
        except BaseException as error:
            results[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return results


def check(models: dict[str, torch.Tensor], recordings: list[Recording]) -> None:
    """The recordings are of this run: origin and replayed displacement are its models, bit for bit."""
    for each in recordings:
        assert each.best_step is not None
        assert torch.equal(each.origin + each.displacements()[each.best_step], models[each.participant])
        assert sorted(each.taken) == list(range(STEPS_TAKEN))  # nothing of its own is ever lost
    view, truth, fresh = view_of(recordings, ["cleo"])
    assert len(view.rounds) == STEPS_TAKEN
    assert view.honest == ("ada", "bob")
    assert len(fresh[1]) == len(recordings[0].kept[1]) + len(recordings[1].kept[1])
    resolution = view.noise / (3 / 12) ** 0.5
    for step in range(STEPS_TAKEN):
        honest = recordings[0].taken[step].addend + recordings[1].taken[step].addend
        # Three addends are rounded to the ring; they, the total and the difference to single precision.
        size = view.rounds[step].gradient_sum.abs().max() + 2 * honest.abs().max()
        assert (view.honest_sum(step) - honest).abs().max() <= 1.5 * resolution + 4 * EPSILON * size
    assert torch.equal(truth.models["bob"], recordings[1].origin + view.final_displacement)


def test_a_recorded_run_over_sockets_has_the_same_bits_and_who_dies_loses_one_total_at_most(
    path: Path, models: dict[str, torch.Tensor]
) -> None:
    """It has lost its state, too, so that the total can only be told from what the others give it."""
    folder = path.parent / "recorded-folders"

    def work(name: str) -> tuple[torch.Tensor, Traffic]:
        if name == "bob":
            with pytest.raises(Killed):
                take_part(path, name, "recorded", Mortal(folder / name, name, "trial"))
            shutil.rmtree(path.parent / "recorded-state" / name)
        return take_part(path, name, "recorded", TraceWriter(folder / name, name, "trial"))

    results = in_threads(work)
    assert all(torch.equal(results[name][0], models[name]) for name in NAMES)
    recordings = [load(folder / name) for name in NAMES]
    check(models, recordings)
    ada, bob, cleo = recordings
    assert (ada.missing, bob.missing, cleo.missing) == ((), (7,), ())
    assert list(bob.states) == [8]
    view, _, _ = view_of([bob])
    assert len(view.rounds) == STEPS_TAKEN
    told, real = view.rounds[7].gradient_sum, ada.totals[7]
    assert torch.allclose(told, real, rtol=0, atol=40 * EPSILON * real.abs().max().item())  # Adam's mean moves by 0.1·G
    assert torch.equal(view.final_displacement, view_of(recordings, ["cleo"])[0].final_displacement)
    for each in (ada, cleo):  # bob's first life received some, too
        frames = [frame for _, frame in each.frames()]
        received = results[each.participant][1]
        assert (len(frames), sum(map(len, frames))) == (received.frames_received, received.bytes_received)
    assert len(list(bob.frames())) > results["bob"][1].frames_received


def test_who_is_killed_goes_on_recording(path: Path, models: dict[str, torch.Tensor]) -> None:
    folder, said = path.parent / "killed-folders", []

    def work(name: str) -> None:
        if name != "bob":
            take_part(path, name, "killed", Patient(folder / name, name, "trial"))
            return
        process = start(path, folder / name)
        deadline = time.monotonic() + 60
        while len(list((folder / name / STEPS).glob("*.total.*"))) < 5:
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        Patient.go.set()
        with (folder / name / FRAMES).open("ab") as file:
            file.write(b"\x03")  # as if it had been killed while it wrote
        process = start(path, folder / name)
        said.append(process.communicate(timeout=120)[1])
        assert process.returncode == 0, said

    in_threads(work)
    saved = safetensors.torch.load_file(path.parent / "killed" / "bob" / "model.safetensors")
    names = [name for name, _ in load(folder / "bob").build_model().named_parameters()]
    assert torch.equal(flat([saved[name] for name in names]), models["bob"])
    assert f"recording into {folder / 'bob'} your prepared records" in said[0]
    assert "keep it as secret as the records; about 133 kB a step for each 10,000 parameters" in said[0]
    recordings = [load(folder / name) for name in NAMES]
    check(models, recordings)
    assert len(recordings[1].missing) <= 1
    assert len(view_of(recordings[1:2])[0].rounds) == STEPS_TAKEN
    assert {sender for sender, _ in recordings[1].frames()} == {"ada", "cleo"}


def start(path: Path, record: Path) -> subprocess.Popen[str]:
    here, name = path.parent, record.name
    where = ["--out", here / "killed" / name, "--state", here / "killed-state" / name, "--record", record]
    command = [sys.executable, "-m", "cgd", "join", path, "--as", name, "--data", here / f"{name}.csv", *where]
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_full_disk_stops_the_participant_in_words(path: Path) -> None:
    def full(sender: str, frame: Any) -> None:
        raise InputError("no room for the recording; make some")

    state = path.parent / "full-state"
    sinks = {"ada": full}
    memberships = {
        name: FederationMember(path, name, state=state / name, linger=0.0, timeout=60.0, sink=sinks.get(name))
        for name in NAMES
    }
    try:
        with pytest.raises(InputError, match="no room for the recording; make some"):
            memberships["ada"].peers.sum(torch.ones(2))
    finally:
        for membership in memberships.values():
            membership.runtime.close(done=False)


def test_what_cannot_be_recorded_is_refused_before_anybody_hears_of_us(path: Path, tmp_path: Path) -> None:
    def said(*options: str) -> str:
        result = CliRunner().invoke(app, ["join", *options, "--record", str(tmp_path / "recording")])
        assert result.exit_code != 0
        return str(result.exception or "") + result.output

    assert "--record goes with --data" in said(str(path), "--as", "ada", "--run", "train:main")
    other = tmp_path / "grid"
    other.mkdir()
    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    grid = federation_file(other, [f"p{each.row}{each.column}" for each in cells], cells, IN_COLUMNS)
    told = said(str(grid), "--as", "p00", "--data", str(tmp_path / "ada.csv"))
    assert "cut into 3 columns" in told
    assert "join without --record" in told
    assert not (tmp_path / "recording").exists()
