"""Recorded runs with differential privacy: the noise of the view, the attacks, and ε on the page."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from cgd.audit import report
from cgd.audit.results import AttackResult
from cgd.audit.runner import PartResult
from cgd.audit.sources import plan_for
from cgd.audit.trace_view import load, view_of
from cgd.audit.view import flat, sample_gradients
from cgd.cli import app
from cgd.dp.accountant import mu_of
from cgd.errors import InputError
from support.audits import assemble
from support.private_tables import PRIVATE_SCHEMA, private_settings
from support.tabular import table, write_csv, write_federation
from support.traces import NAMES, load_all, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.audit.trace_view import Trace

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of one run, which are only read."""
    there = tmp_path_factory.mktemp("private")
    settings = private_settings(epsilon=8.0, steps=STEPS)
    results, _ = run(settings, there, tables=[table(120, place) for place in range(4)])
    for trace, result in zip(load_all(there), results, strict=True):
        assert torch.equal(trace.origin + trace.displacements()[STEPS], flat(list(result.network.parameters())))
    return there


def exact_sum(traces: Sequence[Trace], view: Any, number: int) -> torch.Tensor:
    """The clipped gradients of these participants, divided by the number of records that was opened."""
    parts = [
        sample_gradients(view, each.origin + each.displacements()[number], *each.records).double().sum(0)
        for each in traces
    ]
    total: torch.Tensor = torch.stack(parts).sum(0) / view.samples
    return total


@pytest.mark.parametrize("coalition", [("ada",), ("ada", "cleo"), ()], ids=["one", "two", "all others"])
def test_view_has_the_noise_of_the_honest_members(folder: Path, coalition: tuple[str, ...]) -> None:
    """82 parameters in six steps: a deviation of 492 numbers is exact to 3.2 %, so 20 % is a false alarm in 10⁹."""
    traces = load_all(folder)
    honest = [each for each in traces if each.participant not in coalition] if coalition else traces[1:2]
    view, truth, _ = view_of(traces if coalition else honest, coalition)
    assert (view.scheme, view.clip, view.is_private) == ("dp", 1.0, True)
    assert view.honest_samples == len(truth.all_y) == sum(len(each.records[1]) for each in honest)
    # t is 1 of four, so that three members have the promised noise.
    assert view.mu == pytest.approx(mu_of(8.0, 1e-5) * math.sqrt(3 / len(honest)), rel=1e-6)
    off = torch.stack([view.honest_sum(number) - exact_sum(honest, view, number) for number in range(STEPS)])
    assert float(off.std()) == pytest.approx(view.noise, rel=0.2)
    assert not torch.allclose(off[0], off[1], atol=view.noise / 10)  # each step has its own noise


def test_attacks_run_and_the_page_says_epsilon(folder: Path, tmp_path: Path) -> None:
    plan = plan_for([folder / name for name in NAMES], ("ada",))
    results = [part.run(0) for part in plan.parts]
    found = [each for part in results for each in part if isinstance(each, AttackResult)]
    assert {each.scheme for each in found} == {"dp"}
    assert not any(each.succeeds for each in found if each.metric in ("AUC", "records recovered"))
    audit = assemble(plan, {place: PartResult(tuple(each)) for place, each in enumerate(results)})
    assert audit.schemes == {"dp": "CGD, ε = 8"}
    page = " ".join(report.write(tmp_path / "audit", audit).read_text().split())
    assert "attacks succeed against CGD with ε = 8" in page or "attack succeeds against CGD with ε = 8" in page
    assert "It has differential privacy: ε = 8, δ = 1e-05, t = 1, C = 1." in page
    assert "ε allows" in page


def test_larger_coalition_than_t_is_told_its_epsilon(folder: Path) -> None:
    about = plan_for([folder / "bob"]).source.about
    assert "3 collude, which is more than t: against them ε is 15.9." in about
    assert "the gradient of bob is open in every step, with its own noise" in about


def test_step_whose_noise_was_lost_is_left_out(folder: Path, tmp_path: Path) -> None:
    """As after a kill: the noise is in the process, until the sum is open."""
    there = shutil.copytree(folder, tmp_path / "traces")
    (there / "ada" / "steps" / "000003.own.safetensors").unlink()
    traces = load_all(there)
    assert traces[0].missing == (3,)
    view, _, _ = view_of(traces, ("ada",))
    assert len(view.rounds) == STEPS - 1
    view, _, _ = view_of(traces, ("bob",))  # the addend of an honest participant is not needed
    assert len(view.rounds) == STEPS
    assert len(view_of(traces[:1])[0].rounds) == STEPS - 1


def test_traces_with_other_privacy_are_not_of_one_run(folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(folder, tmp_path / "traces")
    path = there / "bob" / "recording.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"epsilon": 2.0}, "not of one run: privacy is"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it must be a positive number"),
        ({"epsilon": "much"}, "is damaged"),
        ({"colluders": 4}, "colluders is 4, and there are 4 members"),
    ):
        path.write_text(json.dumps({**content, "privacy": {**content["privacy"], **change}}))
        with pytest.raises(InputError, match=message):
            view_of(load_all(there), ("ada",))
    content.pop("privacy")
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="the weight is None"):
        load(there / "bob")


@pytest.mark.slow
def test_run_of_the_command_is_recorded_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ada", "bob", "cleo")
    join = [sys.executable, "-m", "cgd", "join"]
    for place, name in enumerate(names):
        write_csv(tmp_path / f"{name}.csv", table(150, place))
    path = write_federation(tmp_path, names, schema=PRIVATE_SCHEMA, steps=8, patience=0)
    processes = [
        subprocess.Popen(
            [*join, str(path), "--as", name, "--data", f"{name}.csv", "--record", f"recording-{name}"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for name in names
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    monkeypatch.chdir(tmp_path)
    folders = [f"recording-{name}" for name in names]
    result = CliRunner().invoke(app, ["audit", *folders, "--coalition", "ada", "--out", "audit", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    page = " ".join((tmp_path / "audit" / "audit.html").read_text().split())
    assert "ada pool their views and attack bob, cleo" in page
    assert "It has differential privacy: ε = 8, δ = 1e-05, t = 1" in page
