"""A killed participant ends with the same bits, in every way to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd.errors import SettingsError
from cgd.optim import optimizer
from support.in_process import InProcessFederation, uninterrupted_results
from support.mode_programs import OPTIMIZERS, SCHEDULERS, ModeTraining

if TYPE_CHECKING:
    from pathlib import Path


CASES = [(6, False, "plain"), (7, True, "steps"), (7, False, "steps"), (6, True, "plain")]
MODES = [*OPTIMIZERS, *SCHEDULERS]


def cases(mode: str) -> list[Any]:
    """Return the cases of a mode. Fast are two of them: both loops, one with and one without its state.

    Momentum has all four.
    """
    place = 2 * (MODES.index(mode) % 2)
    fast = CASES if mode == "momentum" else CASES[place : place + 2]
    return [
        pytest.param(mode, *case, marks=() if case in fast else pytest.mark.slow)
        for case in CASES
        if (mode, case[-1]) != ("ReduceLROnPlateau", "steps")  # refused, see tests/optim/test_step_loop.py
    ]


@pytest.mark.parametrize(("mode", "moment", "lose_state", "loop"), [each for mode in MODES for each in cases(mode)])
def test_killed_participant_ends_with_the_same_bits(
    mode: str, moment: int, lose_state: bool, loop: Any, federation_file: Path, tmp_path: Path
) -> None:
    """Killed before step 3, or when its gradient or update is computed; twice, with and without its state folder."""
    program = ModeTraining(mode, loop)
    expected = uninterrupted_results(federation_file, tmp_path / "uninterrupted", program)
    assert len(set(expected.values())) == 1
    with InProcessFederation(federation_file, tmp_path / "state") as federation:
        for name in federation.names:
            federation.start(name, program, pause_at=moment if name == "cleo" else None)
        federation["cleo"].wait_for_step(moment)
        federation.kill("cleo", lose_state=lose_state)
        federation.start("cleo", program, pause_at=moment + 2).wait_for_step(moment + 2)
        federation.kill("cleo", lose_state=lose_state)
        federation.start("cleo", program)
        assert federation.results() == expected


@pytest.mark.parametrize("mode", ["local momentum", "adam, fresh origins"])
def test_column_killed_between_its_sum_and_everyones_ends_with_the_same_bits(
    mode: str, grid_file: Path, tmp_path: Path
) -> None:
    """Towers: a restarted member uses the opened sum of its column, with the update of everyone's."""
    program = ModeTraining(mode, "steps")
    expected = uninterrupted_results(grid_file, tmp_path / "uninterrupted", program)
    with InProcessFederation(grid_file, tmp_path / "state") as grid:
        for name in grid.names:
            grid.start(name, program, pause_at=7 if name == "r2c1" else None)
        grid.wait_until(lambda: len(grid["r0c0"].journal("column-0")) == 1 + 4)
        grid.kill("r0c0")
        grid.start("r0c0", program)
        grid["r2c1"].resume()
        assert grid.results() == expected


@pytest.mark.parametrize("mode", ["StepLR", "OneCycleLR", "batches with StepLR"])
def test_scheduler_that_was_not_set_after_a_restart_is_reported_before_anything_is_opened(
    mode: str, federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModeTraining(mode, "steps")
    for name in federation.names:
        federation.start(name, program, pause_at=6 if name == "cleo" else None)
    federation["cleo"].wait_for_step(6)
    federation.kill("cleo", lose_state=True)  # the others send it the state after step 2
    monkeypatch.setattr(optimizer, "catch_up", lambda schedulers, steps: None)
    federation.start("cleo", program)
    errors = federation.errors()
    assert all(isinstance(error, SettingsError) and "lr " in str(error) for error in errors.values())
