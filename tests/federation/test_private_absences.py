"""Differential privacy with a quorum: who is absent costs no budget, and every opening has enough noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.dp.budget_file import BudgetFile
from cgd.federation import absence_section, config, config_edit
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, Absence
from cgd.federation.keys import Keys
from cgd.secagg.messages import Confirm
from support.in_process import FEDERATION, InProcessFederation, participant_entry
from support.private_programs import STEPS, PrivateTraining, Watch, budget_path, is_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.secagg.codec import Frame

FOUR = ("ada", "bob", "cleo", "dan")
REST = FOUR[:3]


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessFederation]:
    """Four members with a quorum of three, which go on soon."""
    monkeypatch.setattr(absence_section, "MIN_PATIENCE", 0.1)
    entries = []
    for place, name in enumerate(FOUR):
        keys = Keys.generate(name)
        keys.save(tmp_path)
        entries.append(participant_entry(keys, place))
    path = tmp_path / "federation.toml"
    config_edit.create_federation(path, FEDERATION, entries, absence=Absence(3, 0.5, ABSENCE_REVEALS_GRADIENTS))
    assert config.Federation.load(path).quorum == 3
    with InProcessFederation(path, tmp_path / "state") as made:
        yield made


@pytest.fixture
def watch(federation: InProcessFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(tmp_path).install(federation, monkeypatch)


def purposes(folder: Path, name: str) -> list[str]:
    return [each.what for each in BudgetFile(budget_path(folder, name), 8.0, 1e-5).charges]


def test_records_are_counted_once_although_a_member_is_absent_and_returns(
    federation: InProcessFederation, watch: Watch
) -> None:
    training = PrivateTraining(watch.folder)
    federation.start_all(training, pause_at=2)
    for process in federation:
        process.wait_for_step(2)
    federation.kill("dan")
    for name in REST:
        federation[name].resume(pause_at=3)
    for name in REST:
        federation[name].wait_for_step(3)
    federation.start("dan", training)
    federation.wait_until(lambda: federation["ada"].peers.members == FOUR)
    for name in REST:
        federation[name].resume()
    results = federation.results()
    assert len({digest for digest, _ in results.values()}) == 1
    addends = [entry.addends for entry in federation["ada"].journal().entries]
    assert 3 in addends
    assert addends[-1] == 4
    for name in REST:
        assert sorted(purposes(watch.folder, name)) == ["a step"] * STEPS + ["the number of records"]
    assert purposes(watch.folder, "dan").count("a step") == STEPS - 1
    assert not watch.missed
    secrets, noises = watch.secrets, watch.noises
    assert len(secrets) == len(set(secrets))
    assert len(noises) == len({each.tobytes() for each in noises})


def test_member_has_charged_before_it_confirms(federation: InProcessFederation, watch: Watch) -> None:
    """The others can open a sum without it from then on."""
    see, missed = watch._see, []
    confirmed: dict[str, set[tuple[bytes, int]]] = {name: set() for name in FOUR}
    private: set[tuple[bytes, int]] = set()

    def check(sender: str, to: str, frame: Frame) -> Frame:
        attempt = frame.session, frame.number
        if hasattr(frame.message, "spec") and is_private(frame.message.spec):
            private.add(attempt)
        if isinstance(frame.message, Confirm) and attempt in private:
            confirmed[sender].add(attempt)
            if len(purposes(watch.folder, sender)) < len(confirmed[sender]):
                missed.append((sender, attempt))
        return see(sender, to, frame)

    federation.network.rewrite = check
    federation.start_all(PrivateTraining(watch.folder))
    federation.results()
    assert not missed
    assert {len(each) for each in confirmed.values()} == {STEPS + 1}
