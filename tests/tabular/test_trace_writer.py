"""Recorded traces over sockets: the same bits as without, and nothing is lost or repeated when a member is killed."""

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
from cgd.tabular.dataset import read_dataset
from cgd.tabular.settings import TabularSettings
from cgd.tabular.trace_writer import FRAMES, STEPS, TraceWriter
from cgd.tabular.training import train
from support.tabular import VERTICAL_SCHEMA, run_in_threads, table, write_csv, write_federation

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.trace_view import Trace
    from cgd.transport.driver import Traffic

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")
STEPS_TAKEN = 20
EPSILON = float(torch.finfo(torch.float32).eps)


class Killed(BaseException):
    """Simulates the end of a process."""


class KilledTraceWriter(TraceWriter):
    """Simulates a kill after the sum of step 7 is opened, before it is written."""

    def after_sum(self, addend: Any, total: Any) -> None:
        if addend.weight is not None and addend.step.number == 7:
            raise Killed
        super().after_sum(addend, total)


class PausingTraceWriter(TraceWriter):
    """Waits before step 8 until `go` is set."""

    go = threading.Event()

    def before_sum(self, addend: Any) -> None:
        if addend.weight is not None and addend.step.number == 8:
            assert self.go.wait(timeout=100)
        super().before_sum(addend)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a federation of three members with their tables."""
    folder = tmp_path_factory.mktemp("federation")
    for place, name in enumerate(NAMES):
        write_csv(folder / f"{name}.csv", table(60 - 15 * place, place))
    return write_federation(folder, NAMES, steps=STEPS_TAKEN, lr=0.02, patience=0)


@pytest.fixture(scope="module")
def models(path: Path) -> dict[str, torch.Tensor]:
    """Train without recording; return the models."""
    return {
        name: model for name, (model, _) in run_in_threads(lambda name: take_part(path, name, "plain"), NAMES).items()
    }


def take_part(
    path: Path, name: str, label: str, trace_writer: TraceWriter | None = None
) -> tuple[torch.Tensor, Traffic]:
    """Run a participant's process; return its model, flat, and its traffic."""
    settings = TabularSettings.from_federation(Federation.load(path), name)
    records, _ = read_dataset(path.parent / f"{name}.csv", settings.data, settings.own_columns)
    sink = None if trace_writer is None else trace_writer.frame
    member = FederationMember(path, name, state=path.parent / f"{label}-state" / name, linger=10.0, sink=sink)
    try:
        trained = train(member.peers, settings, records, trace_writer=trace_writer)
        member.runtime.close(done=True)
    finally:
        member.runtime.close(done=False)
        if trace_writer is not None:
            trace_writer.close()
    return flat(list(trained.network.parameters())), member.peers.traffic


def check(models: dict[str, torch.Tensor], traces: list[Trace]) -> None:
    """Check that origin and replayed displacement of the traces are the models of the run, bit for bit."""
    for each in traces:
        assert each.best_step is not None
        assert torch.equal(each.origin + each.displacements()[each.best_step], models[each.participant])
        assert sorted(each.steps) == list(range(STEPS_TAKEN))  # no own addend is ever lost
    view, truth, fresh = view_of(traces, ["cleo"])
    assert len(view.rounds) == STEPS_TAKEN
    assert view.honest == ("ada", "bob")
    assert len(fresh[1]) == len(traces[0].validation[1]) + len(traces[1].validation[1])
    resolution = view.noise / (3 / 12) ** 0.5
    for step in range(STEPS_TAKEN):
        honest = traces[0].steps[step].addend + traces[1].steps[step].addend
        # Three addends are rounded to the ring; they, the total and the difference to single precision.
        size = view.rounds[step].gradient_sum.abs().max() + 2 * honest.abs().max()
        assert (view.honest_sum(step) - honest).abs().max() <= 1.5 * resolution + 4 * EPSILON * size
    assert torch.equal(truth.models["bob"], traces[1].origin - traces[1].start() + view.final_displacement)


def test_recorded_run_has_the_same_bits_and_loses_at_most_one_total_when_killed(
    path: Path, models: dict[str, torch.Tensor]
) -> None:
    """The member also loses its state, so that the missing total follows only from the state the others send."""
    folder = path.parent / "recorded-folders"

    def work(name: str) -> tuple[torch.Tensor, Traffic]:
        if name == "bob":
            with pytest.raises(Killed):
                take_part(path, name, "recorded", KilledTraceWriter(folder / name, name, "trial"))
            shutil.rmtree(path.parent / "recorded-state" / name)
        return take_part(path, name, "recorded", TraceWriter(folder / name, name, "trial"))

    results = run_in_threads(work, NAMES)
    assert all(torch.equal(results[name][0], models[name]) for name in NAMES)
    traces = [load(folder / name) for name in NAMES]
    check(models, traces)
    ada, bob, cleo = traces
    assert (ada.missing, bob.missing, cleo.missing) == ((), (7,), ())
    assert list(bob.states) == [8]
    view, _, _ = view_of([bob])
    assert len(view.rounds) == STEPS_TAKEN
    computed, opened = view.rounds[7].gradient_sum, ada.totals[7]
    assert torch.allclose(
        computed, opened, rtol=0, atol=40 * EPSILON * opened.abs().max().item()
    )  # Adam's mean moves by 0.1·G
    assert torch.equal(view.final_displacement, view_of(traces, ["cleo"])[0].final_displacement)
    for each in (ada, cleo):  # bob's first process received some, too
        frames = [frame for _, frame in each.frames()]
        received = results[each.participant][1]
        assert (len(frames), sum(map(len, frames))) == (received.frames_received, received.bytes_received)
    assert len(list(bob.frames())) > results["bob"][1].frames_received


def test_killed_participant_continues_its_trace(path: Path, models: dict[str, torch.Tensor]) -> None:
    folder, output = path.parent / "killed-folders", []

    def work(name: str) -> None:
        if name != "bob":
            take_part(path, name, "killed", PausingTraceWriter(folder / name, name, "trial"))
            return
        process = start(path, folder / name)
        deadline = time.monotonic() + 60
        while len(list((folder / name / STEPS).glob("*.total.*"))) < 5:
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        PausingTraceWriter.go.set()
        with (folder / name / FRAMES).open("ab") as file:
            file.write(b"\x03")  # a frame truncated by a kill
        process = start(path, folder / name)
        output.append(process.communicate(timeout=120)[1])
        assert process.returncode == 0, output

    run_in_threads(work, NAMES)
    saved = safetensors.torch.load_file(path.parent / "killed" / "bob" / "model.safetensors")
    names = [name for name, _ in load(folder / "bob").build_model().named_parameters()]
    assert torch.equal(flat([saved[name] for name in names]), models["bob"])
    assert f"everything received into {folder / 'bob'}: keep it as secret as the records" in output[0]
    assert "about 133 kB per step for every 10,000 parameters" in output[0]
    traces = [load(folder / name) for name in NAMES]
    check(models, traces)
    assert len(traces[1].missing) <= 1
    assert len(view_of(traces[1:2])[0].rounds) == STEPS_TAKEN
    assert {sender for sender, _ in traces[1].frames()} == {"ada", "cleo"}


def start(path: Path, record: Path) -> subprocess.Popen[str]:
    here, name = path.parent, record.name
    where = ["--out", here / "killed" / name, "--state", here / "killed-state" / name, "--record", record]
    command = [sys.executable, "-m", "cgd", "join", path, "--as", name, "--data", here / f"{name}.csv", *where]
    return subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_full_disk_stops_the_recording_participant_with_an_error(path: Path) -> None:
    def full(sender: str, frame: Any) -> None:
        raise InputError("no disk space for the trace")

    state = path.parent / "full-state"
    sinks = {"ada": full}
    members = {
        name: FederationMember(path, name, state=state / name, linger=0.0, timeout=60.0, sink=sinks.get(name))
        for name in NAMES
    }
    try:
        with pytest.raises(InputError, match="no disk space for the trace"):
            members["ada"].peers.sum(torch.ones(2))
    finally:
        for member in members.values():
            member.runtime.close(done=False)


def test_unrecordable_run_is_refused_before_anything_is_sent(path: Path, tmp_path: Path) -> None:
    def output(*options: str) -> str:
        result = CliRunner().invoke(app, ["join", *options, "--record", str(tmp_path / "recording")])
        assert result.exit_code != 0
        return str(result.exception or "") + result.output

    assert "--record needs --data" in output(str(path), "--as", "ada", "--run", "train:main")
    other = tmp_path / "grid"
    other.mkdir()
    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    grid = write_federation(other, [f"p{each.row}{each.column}" for each in cells], cells, VERTICAL_SCHEMA)
    message = output(str(grid), "--as", "p00", "--data", str(tmp_path / "ada.csv"))
    assert "partitioned into 3 grid columns" in message
    assert "join without --record" in message
    assert not (tmp_path / "recording").exists()
