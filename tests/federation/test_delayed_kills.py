"""A killed participant of a training with a delay ends with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.in_process import InProcessFederation, uninterrupted_results
from support.mode_programs import DELAYED, ModeTraining

if TYPE_CHECKING:
    from pathlib import Path

CASES = [(6, False, "plain"), (7, True, "steps"), (7, False, "steps"), (6, True, "plain"), (9, False, "plain")]


@pytest.mark.parametrize(
    ("mode", "moment", "lose_state", "loop"), [(mode, *case) for mode in DELAYED for case in CASES]
)
def test_killed_participant_ends_with_the_same_bits(
    mode: str, moment: int, lose_state: bool, loop: Any, federation_file: Path, tmp_path: Path
) -> None:
    """Killed twice, at its gradient of a step or before it, when the sums of earlier steps are in progress."""
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
