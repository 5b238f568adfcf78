"""Traces that are written, cut off, mixed up or damaged."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.audit.trace_view import load, view_of
from cgd.errors import InputError
from cgd.federation.model_section import Model
from cgd.tabular import trace_writer
from cgd.tabular.trace_writer import FILE, FRAMES, STEPS, TraceWriter, bytes_per_parameter, read_frames
from cgd.transport.tap import Addend
from support.tabular import tabular_settings
from support.traces import COALITION, NAMES, load_all, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT = tabular_settings(optimizer="sgd", lr=0.5, steps=3)


def test_only_the_owner_can_read_a_trace(tmp_path: Path) -> None:
    run(SHORT, tmp_path)
    for path in [tmp_path / "ada", *(tmp_path / "ada").rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert "origin" not in repr(load(tmp_path / "ada"))


def test_trace_that_was_cut_off_is_read_and_continued(tmp_path: Path) -> None:
    def write_frames(trace_writer: TraceWriter, *contents: bytes) -> None:
        for content in contents:
            trace_writer.frame("bob", memoryview(content))
        trace_writer.close()

    write_frames(TraceWriter(tmp_path / "ada", "ada", "trial"), b"one", b"", b"three")
    path = tmp_path / "ada" / FRAMES
    content = path.read_bytes()
    for cut in range(1, 18):  # within the last frame or its header
        path.write_bytes(content[:-cut])
        assert list(read_frames(path)) == [("bob", b"one"), ("bob", b"")]
    write_frames(TraceWriter(tmp_path / "ada", "ada", "trial"), b"again")
    assert list(read_frames(path)) == [("bob", b"one"), ("bob", b""), ("bob", b"again")]
    with pytest.raises(InputError, match="cannot be written"):
        write_frames(closed := TraceWriter(tmp_path / "ada", "ada", "trial"), b"more")
        closed.frame("bob", b"too late")


def test_other_folder_is_not_overwritten(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "ada", "ada", "trial").close()
    with pytest.raises(InputError, match="holds the trace of ada of trial, which is never overwritten"):
        TraceWriter(tmp_path / "ada", "bob", "trial")
    with pytest.raises(InputError, match="holds the trace of ada of trial"):
        TraceWriter(tmp_path / "ada", "ada", "another")
    with TraceWriter(tmp_path / "ada", "ada", "trial"), pytest.raises(InputError, match="written by another process"):
        TraceWriter(tmp_path / "ada", "ada", "trial")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(InputError, match="not a trace; name an empty folder"):
        TraceWriter(tmp_path / "mine", "ada", "trial")
    with pytest.raises(InputError, match="cannot be used"):
        TraceWriter(tmp_path / "mine" / "thesis.txt", "ada", "trial")


def test_two_runs_are_not_mixed(tmp_path: Path) -> None:
    run(SHORT, tmp_path)
    before = [torch.stack(list(each.totals.values())) for each in load_all(tmp_path)]
    run(SHORT, tmp_path)  # the same records and origins: the same run
    for each, totals in zip(load_all(tmp_path), before, strict=True):
        assert torch.equal(torch.stack(list(each.totals.values())), totals)
    with pytest.raises(InputError, match="other records, or of another training"):
        run(tabular_settings(optimizer="sgd", lr=0.6, steps=3), tmp_path)
    path = tmp_path / "ada" / STEPS / "000001.total.safetensors"
    path.write_bytes((tmp_path / "ada" / STEPS / "000002.total.safetensors").read_bytes())
    with pytest.raises(InputError, match="another total of step 1: it holds another run"):
        run(SHORT, tmp_path)
    with pytest.raises(InputError, match=r"ada has another total of step 1 than .*bob: they are not of one run"):
        view_of([load(tmp_path / name) for name in ("bob", "ada", "cleo", "dan")], COALITION)


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / FILE).read_text())
    change(content)
    (folder / FILE).write_text(json.dumps(content))


def remove_all_steps(folder: Path) -> None:
    for path in (folder / STEPS).iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda folder: (folder / FILE).write_text('{"format": '), r"recording\.json is damaged; restore it"),
        (
            lambda folder: change_header(folder, lambda content: content.update(format="cgd-recording-9")),
            "of the format 'cgd-recording-9' and not",
        ),
        (
            lambda folder: (folder / STEPS / "000001.total.safetensors").write_bytes(b"cut off"),
            r"000001\.total\.safetensors is damaged",
        ),
        (
            lambda folder: change_header(folder, lambda content: content.update(outputs=content["outputs"] + 1)),
            "parameters, and the trace .* is of one with",
        ),
        (
            lambda folder: change_header(folder, lambda content: content.pop("samples")),
            "is damaged: samples is missing; restore it",
        ),
        (remove_all_steps, "has no step yet"),
        (lambda folder: (folder / FILE).unlink(), r"has no recording\.json; name a folder"),
    ],
)
def test_damaged_trace_is_rejected(damage: Callable[[Path], object], match: str, tmp_path: Path) -> None:
    run(SHORT, tmp_path)
    damage(tmp_path / "ada")
    with pytest.raises(InputError, match=match):
        load(tmp_path / "ada")


def test_trace_without_a_step_is_rejected(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "ada", "ada", "trial").close()
    with pytest.raises(InputError, match="has no step yet"):
        load(tmp_path / "ada")


def test_unsupported_training_is_not_recorded(tmp_path: Path) -> None:
    vertical = replace(tabular_settings(), columns=3)
    network = torch.nn.Linear(2, 2)
    trace_writer = TraceWriter(tmp_path / "ada", "ada", "trial")
    trace_writer.close()
    with pytest.raises(InputError, match=r"into 3 grid columns.*join without --record"):
        trace_writer.begin(None, vertical, None, network, 0.1, None, None)  # type: ignore[arg-type]
    network.bias.requires_grad_(False)
    with pytest.raises(InputError, match="the parameter bias is frozen"):
        trace_writer.begin(None, tabular_settings(), None, network, 0.1, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"masking": "uniform"}, {"ring_bits": 64}])
def test_predicted_size_is_accurate(options: dict[str, Any], tmp_path: Path) -> None:
    """With a network that is large compared with headers; the difference of two runs, because of the statistics."""
    sizes, parameters = [], 0
    for steps in (1, 4):
        settings = tabular_settings(model=Model("mlp", (500, 40)), optimizer="sgd", lr=0.1, steps=steps)
        folder = tmp_path / str(steps)
        run(settings, folder, **options)
        recorded = [folder / "ada" / FRAMES, *(folder / "ada" / STEPS).iterdir()]
        sizes.append(sum(path.stat().st_size for path in recorded))
        parameters = len(load(folder / "ada").origin)
    predicted = bytes_per_parameter(replace(settings.training, **options), len(NAMES)) * parameters
    assert (sizes[1] - sizes[0]) / 3 == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_step_file_with_a_huge_number_does_not_keep_the_reader_busy(tmp_path: Path) -> None:
    run(SHORT, tmp_path)
    steps = tmp_path / "ada" / STEPS
    (steps / "999999999.total.safetensors").write_bytes((steps / "000000.total.safetensors").read_bytes())
    program = "import sys; from cgd.audit.trace_view import load, view_of; view_of([load(sys.argv[1])])"
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ada")], timeout=300, check=False, capture_output=True
    )


def test_sender_of_too_many_frames_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_writer, "FIRST_FRAME_BYTES", 1000)
    with TraceWriter(tmp_path / "ada", "ada", "trial") as writer:
        for _ in range(100):
            writer.frame("bob", bytes(100))
        writer.frame("cleo", b"last")
        size = (tmp_path / "ada" / FRAMES).stat().st_size
        writer.before_sum(Addend(np.zeros(10), None, "", None, ("ada", "bob", "cleo"), 0))
        writer.frame("bob", bytes(100))  # the next sum permits more
    assert 500 < size < 1100
    frames = list(read_frames(tmp_path / "ada" / FRAMES))
    assert frames[-2:] == [("cleo", b"last"), ("bob", bytes(100))]
    assert [record.getMessage() for record in caplog.records if "bob" in record.getMessage()] == [
        "bob has sent 0 MB, far more than the sums need; not all of its frames are recorded"
    ]


def test_trace_restored_from_a_backup_is_private_again(tmp_path: Path) -> None:
    """A copy without its modes is readable by everybody, and so would be all that is added to it."""
    TraceWriter(tmp_path / "ada", "ada", "trial").close()
    (tmp_path / "ada").chmod(0o755)
    (tmp_path / "ada" / FRAMES).chmod(0o644)
    try:
        with TraceWriter(tmp_path / "ada", "ada", "trial") as trace_writer:
            trace_writer.frame("bob", b"secret")
    except InputError:
        return
    assert stat.S_IMODE((tmp_path / "ada" / FRAMES).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "ada").stat().st_mode) == 0o700
