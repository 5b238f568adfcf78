"""`cgd export`: what it writes, and what it says about giving the file away."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import onnxruntime
import pytest

from cgd.local import solo_peers
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import train
from support import runs
from support.tabular import records, table, tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE_MODEL = "keep it as secret as the folder of the run"
COMMON_MODEL = "which all members have: it contains nothing of ours alone"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    what = tabular_settings(steps=10)
    made = train(solo_peers(b"s" * 32), what, records(table(60, 1)))
    origin = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
    ConfinedModel.from_training(made, what, origin).save(tmp_path / "run")
    return tmp_path / "run"


def write_kept(folder: Path, **kept: Any) -> None:
    content = runs.classification()
    content["kept"] = {"keep": "personalised", "records": 40, "models": [{"name": "trained", "loss": 0.5}], **kept}
    runs.write(content, folder)


def test_file_is_written_and_described(command: Any, run: Path, tmp_path: Path) -> None:
    code, out, err = command("export", run, "--onnx", "model.onnx")
    assert code == 0, err
    assert out.splitlines() == [
        "model.onnx is written",
        "input 'age', float64 of shape (records, 1): a number; NaN if it is missing",
        "input 'dose', float64 of shape (records, 1): a number; NaN if it is missing",
        "input 'ward', text of shape (records, 1): a category: A, B; empty if it is missing",
        "output 'label', text of shape (records): the class of outcome",
        "output 'probabilities', float64 of shape (records, 2): of ill, well",
    ]
    path = tmp_path / "model.onnx"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [each.name for each in found.get_outputs()] == ["label", "probabilities"]
    before = path.read_bytes()
    code, _, err = command("export", run, "--onnx", "model.onnx")
    assert (code, path.read_bytes()) == (2, before)
    assert "model.onnx exists and is never overwritten" in err


def test_somebody_who_gives_the_file_away_is_warned(command: Any, run: Path) -> None:
    """Without a report, and for the confined model beside the kept one, it is the private model."""
    _, _, err = command("export", run, "--onnx", "a.onnx")
    assert f"It is our private model with our whole origin: {PRIVATE_MODEL}" in err
    assert "Give it to others only if all members agree" in err
    write_kept(run, part=0.25)
    assert (
        f"our private model with 0.25 of our origin: {PRIVATE_MODEL}" in command("export", run, "--onnx", "b.onnx")[2]
    )
    write_kept(run, part=0.0, method="weights", steps=8)
    _, _, err = command("export", run, "--onnx", "c.onnx")
    assert "our private model, adapted to our records, of which it says more: keep it as secret" in err
    write_kept(run, part=0.0)
    _, _, err = command("export", run, "--onnx", "d.onnx")
    assert COMMON_MODEL in err
    assert PRIVATE_MODEL not in err
    write_kept(run, part=0.0, models=[], unavailable="we have few records")  # then the confined one is kept
    assert PRIVATE_MODEL in command("export", run, "--onnx", "e.onnx")[2]


def test_export_that_is_not_possible_is_an_error(command: Any, run: Path) -> None:
    for arguments, message in (
        (("none", "--onnx", "a.onnx"), "there is no model in none"),
        ((run, "--onnx", "no/a.onnx"), "a.onnx cannot be written"),
        ((run, "--onnx", "a.onnx", "--function", "x:y"), "names no function, but 'x:y' was given"),
    ):
        code, _, err = command("export", *arguments)
        assert code == 2
        assert message in err
        assert "Traceback" not in err
