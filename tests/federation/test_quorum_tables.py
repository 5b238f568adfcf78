"""Training on tables with a quorum: statistics are those of all, and steps go on without a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from cgd.federation import config_edit
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, Absence
from cgd.federation.keys import Keys
from cgd.secagg.messages import Ready
from cgd.tabular.training import TrainingResult, train
from support.in_process import FEDERATION, InProcessFederation, participant_entry
from support.tabular import records, table, tabular_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.secagg.messages import Message
    from support.in_process import MemberProcess

NAMES = ("ada", "bob", "cleo", "dan")
REST = NAMES[:3]
PATIENCE = 0.5
SETTINGS = tabular_settings(steps=10, patience=0)
RECORDS = {"ada": 30, "bob": 30, "cleo": 30, "dan": 200}
"""Dan alone has more than all others, so that a total without him is below his own part."""


class QuorumFederation(InProcessFederation):
    """Its members have less patience than a federation file permits."""

    def start(self, name: str, program: Any, **options: Any) -> MemberProcess:
        process = super().start(name, program, **options)
        process.member.runtime._silence.patience = PATIENCE
        return process


@dataclass
class TableProgram:
    """A program that trains on a table."""

    rows: int
    seed: int

    def __call__(self, process: MemberProcess) -> TrainingResult:
        return train(process.peers, SETTINGS, records(table(self.rows, self.seed)))


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[QuorumFederation]:
    participants = []
    for place, name in enumerate(NAMES):
        keys = Keys.generate(name)
        keys.save(tmp_path)
        participants.append(participant_entry(keys, place))
    path = tmp_path / "federation.toml"
    absence = Absence(3, 60.0, ABSENCE_REVEALS_GRADIENTS)
    config_edit.create_federation(path, FEDERATION, participants, absence=absence)
    with QuorumFederation(path, tmp_path / "state") as made:
        yield made


class NthSum:
    """Matches the `Ready` of a sum, counted from 1."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, message: Message) -> bool:
        self._left -= isinstance(message, Ready)
        return isinstance(message, Ready) and self._left <= 0


def is_validation(message: Message) -> bool:
    return isinstance(message, Ready) and message.spec.context == "validation loss"


def lose_dan(federation: QuorumFederation, matches: Any, *, killed: bool) -> None:
    """Start all, and kill dan, or cut him off, when he is ready for a sum."""
    hold = federation.network.hold("dan", ["ada"], matches)
    for seed, name in enumerate(NAMES):
        federation.start(name, TableProgram(RECORDS[name], seed))
    federation.wait_until(lambda: hold.reached)
    if killed:
        federation.kill("dan")
    else:
        federation.network.cut({"dan"}, set(REST))
    federation.network.release(hold)


def return_dan(federation: QuorumFederation, *, killed: bool) -> list[int]:
    """Let dan come back; return the numbers of members of all sums, after all have finished with the same result."""
    if killed:
        federation.start("dan", TableProgram(RECORDS["dan"], NAMES.index("dan")))
    else:
        federation.network.heal()
    results = federation.results()
    losses = {name: [each.everyone_validation_loss for each in made.evaluations] for name, made in results.items()}
    assert len({str(each) for each in losses.values()}) == 1
    features = {str(made.preprocessing.to_dict()) for made in results.values()}
    assert len(features) == 1
    return [entry.addends for entry in federation["ada"].journal().entries]


@pytest.mark.parametrize(
    ("number", "killed"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(5, False, marks=pytest.mark.slow),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
)
def test_statistics_are_made_by_all(federation: QuorumFederation, number: int, *, killed: bool) -> None:
    """Counts, means and deviations of other members would not fit together; a category would be that of one only."""
    lose_dan(federation, NthSum(number), killed=killed)
    waiting = "its return: all members make this sum"
    federation.wait_until(lambda: all(federation[name].is_waiting_for(waiting, "dan") for name in REST))
    assert set(return_dan(federation, killed=killed)) == {4}


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_validation_loss_without_a_member_is_no_wrong_count_to_it(
    federation: QuorumFederation, *, killed: bool
) -> None:
    """Dan was ready for the sum, and takes over its total, which is below his own part of the validation records."""
    lose_dan(federation, is_validation, killed=killed)
    federation.wait_until(lambda: 3 in [entry.addends for entry in federation["ada"].journal().entries])
    assert 3 in return_dan(federation, killed=killed)
