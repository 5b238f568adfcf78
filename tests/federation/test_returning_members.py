"""Members that return to a revealed step, spoiled counts, second trainings, and sums that end after a timeout."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd import Peers
from cgd.errors import LocalProtocolError, PeerTimeoutError, WeightError
from cgd.federation import member
from cgd.federation.state import StateFolder
from cgd.optim import sample_count
from cgd.optim.sample_count import SampleCountMismatchError
from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.key_agreement import MembershipView, derive_pair_keys
from cgd.secagg.messages import JournalChunk, JournalPosition, Ready, RevealKey
from cgd.secagg.positions import PositionReport
from cgd.secagg.statements import slot_of, statement
from cgd.transport import runtime
from support.in_process import InProcessFederation, new_federation
from support.withheld_keys import (
    DISHONEST,
    NAMES,
    SAMPLES,
    all_in_epoch,
    gradient_sums,
    in_epoch,
    make_optimizer,
    replace_file,
    take_two_steps,
    train,
    wait_until_opened_alone,
    withhold_third_key,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.in_process import MemberProcess


@pytest.fixture(autouse=True)
def _watch_the_file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


def stop_before_revealed_step_without_dan(federation: InProcessFederation, dishonest: str = DISHONEST) -> None:
    """One member alone opens the second step and denies it; all count again; dan is removed, and the others stop.

    Then dan is listed again, and no process runs.
    """
    text, sent = federation.path.read_text(), itertools.count()
    honest = tuple(name for name in NAMES if name != dishonest)
    hold = federation.network.hold(dishonest, honest, lambda m: isinstance(m, RevealKey) and next(sent) >= 6)
    federation.start_all(take_two_steps)
    federation.wait_until(lambda: len(federation[dishonest].journal()) == 3)
    assert all(federation[name].journal().pending_reveal is not None for name in honest)
    federation.kill(dishonest, lose_state=True)
    federation.network.release(hold)
    replace_file(federation.path, in_epoch(text, 2))
    federation.wait_until(lambda: all_in_epoch(federation, 2, *honest))
    federation.network.hold(dishonest, honest, lambda m: isinstance(m, Ready) and m.spec.weighted)
    federation.start(dishonest, take_two_steps)
    federation.wait_until(lambda: all(len(federation[name].journal()) == 3 for name in honest))  # the new count
    federation.kill(dishonest, "dan")
    replace_file(federation.path, without(in_epoch(text, 3), "dan"))
    federation.start(dishonest, take_two_steps)
    federation.wait_until(lambda: all(isinstance(federation[each].error, LocalProtocolError) for each in honest[:2]))
    assert len(federation[honest[0]].journal()) == 3  # nothing was counted without dan
    federation.kill(*federation.processes)
    replace_file(federation.path, in_epoch(text, 4))


def test_removed_member_is_stopped_before_a_revealed_step_with_other_samples(tmp_path: Path) -> None:
    """Dan returns without his state and with more records. Ada, who has opened the step, sends him the journal.

    She has renamed him in the certificate of a count: only that of the last sum is verified. So dan believes
    that he took no part in that count. No report shows that the step may have been revealed.
    """

    def with_other_samples(process: MemberProcess) -> None:
        train(process, 2, {**SAMPLES, "dan": 7})

    def rename_dan(sender: str, to: str, frame: Frame) -> Frame:
        if (sender, to) != ("ada", "dan") or not isinstance(frame.message, JournalChunk):
            return frame
        body = bytes(frame.message.words)[32:].replace(b'"dan": [', b'"daz": [')
        return replace(frame, message=replace(frame.message, words=sha256(body).digest() + body))

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        stop_before_revealed_step_without_dan(federation, "ada")
        federation.network.rewrite = rename_dan
        for name in ("ada", "bob", "cleo"):
            federation.start(name, take_two_steps)
        federation.start("dan", with_other_samples, state=tmp_path / "empty")
        federation.wait_until(lambda: federation["dan"].finished or len(federation["bob"].journal()) == 6)
        assert len(gradient_sums(federation["bob"].journal())) == 1
        assert isinstance(federation["dan"].error, SampleCountMismatchError)


def test_revealed_step_is_finished_when_a_removed_member_returns_with_its_samples(tmp_path: Path) -> None:
    """The way out of the operations guide: the former members, the same data, a higher epoch."""
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        stop_before_revealed_step_without_dan(federation)
        federation.start_all(take_two_steps)
        federation.wait_until(lambda: all(each.finished for each in federation) or federation["dan"].finished)
        assert federation["dan"].error is None
        assert [each.error for each in federation] == [None] * 4


def test_sum_that_ends_after_a_timeout_has_the_same_entry_at_all_members(tmp_path: Path) -> None:
    """Cleo delays her key to bob until bob's call times out and his program starts its loop again."""
    restarted: list[str] = []

    def loop_again_after_a_timeout(process: MemberProcess) -> None:
        parameter, optimizer = make_optimizer(process.peers, SAMPLES[process.name])
        done = False
        while not done:
            try:
                for _ in optimizer.steps(3):
                    process.at_step(1 if restarted and process.name == "bob" else 0)
                    parameter.grad = torch.full((4,), SAMPLES[process.name] / 8)
                    optimizer.step()
                done = True
            except PeerTimeoutError:
                restarted.append(process.name)

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        sent = itertools.count()
        hold = federation.network.hold(
            DISHONEST, ("bob",), lambda m: isinstance(m, RevealKey) and next(sent) >= 2
        )  # her keys for the count and the first step are sent
        for name in NAMES:
            timeout = 0.5 if name == "bob" else None
            federation.start(name, loop_again_after_a_timeout, pause_at=1, timeout=timeout)
        federation["bob"].wait_for_step(1)
        federation.network.release(hold)
        federation.wait_until(lambda: all(len(each.journal()) == 3 for each in federation))
        assert {each.journal().heads[3] for each in federation} == {federation["ada"].journal().heads[3]}
        federation["bob"].resume()
        federation.results()


def test_record_of_a_revealed_step_survives_two_crashes_with_a_count_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is the first of its segment, because a snapshot was saved just before; then ada's process is killed.

    The next process records that it reveals its key in a count, in the same file, and is killed, too.
    """
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        text = federation.path.read_text()
        hold = withhold_third_key(federation)
        monkeypatch.setattr(runtime, "SAVE_SECONDS", 0.05)
        federation.start_all(take_two_steps, pause_at=1)
        federation.wait_until(lambda: list(federation.folder("ada").glob("*.ledger")))
        federation.wait_until(lambda: len(StateFolder(federation.folder("ada"), "trial").load()["everyone"]) == 2)
        federation.wait_until(lambda: not list(federation.folder("ada").glob("*.entries")))
        monkeypatch.setattr(runtime, "SAVE_SECONDS", 5.0)
        for process in federation:
            process.resume()
        wait_until_opened_alone(federation)
        federation.kill("ada", DISHONEST)
        federation.network.release(hold)
        saved = StateFolder(federation.folder("ada"), "trial").load()["everyone"]
        assert saved.revealed_steps[0].number == 1
        replace_file(federation.path, in_epoch(text, 2))
        federation.network.hold(DISHONEST, ("ada", "bob", "dan"), lambda m: isinstance(m, Ready) and m.spec.weighted)
        federation.start("ada", take_two_steps)
        shutil.rmtree(federation.folder(DISHONEST))
        federation.start(DISHONEST, take_two_steps)
        federation.wait_until(lambda: len(federation["ada"].journal()) == 3)  # the count
        assert federation["ada"].journal().revealed_steps[0].number == 1
        federation.kill("ada")
        saved = StateFolder(federation.folder("ada"), "trial").load()["everyone"]
        assert saved.revealed_steps[0].number == 1


def openings(folder: Path, gradients: Mapping[str, float]) -> list[bytes]:
    """Return the totals of the second step that cleo opens, if she reports other numbers of samples the second time.

    She alone opens the step, denies it, and in a new epoch reports so many samples that our weights are small.
    """
    folder.mkdir()
    totals = []
    samples = {**SAMPLES, DISHONEST: 7}
    with InProcessFederation(new_federation(folder, NAMES), folder / "state") as federation:

        def take_steps(process: MemberProcess) -> None:
            parameter, optimizer = make_optimizer(process.peers, samples[process.name])
            for step in range(2):
                parameter.grad = torch.full((4,), gradients.get(process.name, 0.0) * step)
                optimizer.step()

        hold = withhold_third_key(federation)
        federation.start_all(take_steps)
        wait_until_opened_alone(federation)
        totals.append(bytes(federation[DISHONEST].journal().entries[2].words or b""))
        federation.kill(DISHONEST, lose_state=True)
        federation.network.release(hold)
        replace_file(federation.path, in_epoch(federation.path.read_text(), 2))
        samples[DISHONEST] = (1 << 24) - 9
        federation.start(DISHONEST, take_steps)
        federation.wait_until(lambda: all(federation[name].finished for name in ("ada", "bob", "dan")))
        entries = federation["ada"].journal().entries[3:]
        totals += [bytes(entry.words or b"") for entry in entries if entry.description.startswith("weighted")]
    return totals


def test_revealed_step_is_not_opened_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada and bob have other gradients with the same sum: nothing that cleo opens may show the difference.

    With small weights their values are rounded, each on its own, so the second total depends on more than the sum.
    """
    check = sample_count.check_commitment

    def check_unless_dishonest(peers: Peers, *arguments: Any, private: bool) -> None:
        if peers.me != DISHONEST:
            check(peers, *arguments, private=private)

    monkeypatch.setattr(sample_count, "check_commitment", check_unless_dishonest)
    ada, bob, small = 1.78125, 1.0, 1 / 64
    first = openings(tmp_path / "first", {"ada": ada, "bob": bob, "dan": 1.0})
    second = openings(tmp_path / "second", {"ada": ada + 3 * small, "bob": bob - 2 * small, "dan": 1.0})
    assert first[0] == second[0]
    assert first == second


def test_step_of_a_second_training_is_not_opened_without_a_member_of_the_first(tmp_path: Path) -> None:
    """All programs train again from the same origins with a new optimiser, for example after an error; dan has left.

    The first gradients are those of the first training, so the difference of the two sums would be dan's gradient.
    """
    sums: list[torch.Tensor] = []

    def train_twice(process: MemberProcess) -> None:
        for attempt in range(2):
            process.at_step(attempt)
            parameter, optimizer = make_optimizer(process.peers, SAMPLES[process.name])
            parameter.grad = torch.full((4,), SAMPLES[process.name] / 8)
            optimizer.step()
            if process.name == DISHONEST:
                sums.append(optimizer.displacement() / -0.5)

    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        text = federation.path.read_text()
        federation.start_all(train_twice, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        replace_file(federation.path, without(in_epoch(text, 2), "dan"))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        federation.wait_until(lambda: all(federation[name].finished for name in ("ada", "bob")))
        if len(sums) == 2:
            of_dan = (10 * sums[0] - 6 * sums[1]) / SAMPLES["dan"]
            assert not torch.allclose(of_dan, torch.full((4,), SAMPLES["dan"] / 8), atol=1e-5)
        assert len(gradient_sums(federation["ada"].journal())) == 1


@pytest.mark.parametrize("lie", ["total", "commitments"])
def test_training_continues_after_a_member_that_spoiled_a_count_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """All programs reject the count and end. No gradient was summed after it, and the next epoch counts again."""
    plain_sum = Peers.sum
    lying: list[bool] = []

    def lying_sum(self: Peers, values: Any, **options: Any) -> Any:
        if lying and self.me == DISHONEST and isinstance(values, np.ndarray):
            values = values + (np.arange(len(values)) == 0) * -1000 if lie == "total" else values + 1
        return plain_sum(self, values, **options)

    monkeypatch.setattr(Peers, "sum", lying_sum)
    honest = tuple(name for name in NAMES if name != DISHONEST)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        text = federation.path.read_text()
        federation.start_all(take_two_steps, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        lying.append(True)
        replace_file(federation.path, in_epoch(text, 2))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        for process in federation:
            process.resume()
        errors = federation.errors(*honest)
        assert all(isinstance(error, WeightError | SampleCountMismatchError) for error in errors.values())
        federation.kill(*federation.processes)
        replace_file(federation.path, without(in_epoch(text, 3), DISHONEST))
        for name in honest:
            federation.start(name, take_two_steps)
        assert federation.errors() == dict.fromkeys(honest)


def test_early_report_without_contribution_does_not_end_the_watcher_of_the_file(tmp_path: Path) -> None:
    """Cleo sends ada a report of the view that ada will form with her next file. It commits to no contribution.

    Then cleo is removed, and ada must notice it.
    """
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        text = federation.path.read_text()
        file_of_ada = tmp_path / "file_of_ada.toml"
        file_of_ada.write_text(text)
        for name in NAMES:
            path = file_of_ada if name == "ada" else None
            federation.start(name, take_two_steps, pause_at=1, path=path)
        for process in federation:
            process.wait_for_step(1)
        replace_file(federation.path, in_epoch(text, 2))
        federation.wait_until(lambda: all_in_epoch(federation, 2, "bob", "cleo", "dan"))
        memberships = {process.name: process.member.runtime.membership for process in federation}
        spec = memberships["cleo"].federation_spec
        view = MembershipView.of(spec, {name: each._hellos.ephemeral.public for name, each in memberships.items()})
        cleo, identity = memberships["cleo"], federation["cleo"].member.keys.identity
        keys = derive_pair_keys("cleo", identity, cleo._hellos.ephemeral, "ada", spec, view)
        position = federation["cleo"].member.runtime.membership.group("everyone").position(b"", states=False)
        position = replace(position, commitment=sha256(b"").digest())
        content = PositionReport(view.digest, 0, {"everyone": position}).to_bytes()
        signature = identity.sign(statement("standing", slot_of(view.digest), sha256(content).digest()))
        report = JournalPosition(content, signature, keys.own_tag)
        with federation.network.lock:
            federation.network.send("cleo", "ada", to_bytes(Frame(view.digest[:16], 0, report)))
        ada = memberships["ada"]
        federation.wait_until(lambda: all(getattr(ada.hello(peer), "epoch", 0) == 2 for peer in ada.others))
        federation.wait_until(lambda: any(session == view.digest[:16] for session, _ in ada._early.get("cleo", ())))
        replace_file(file_of_ada, in_epoch(text, 2))
        federation.wait_until(lambda: ada.federation_spec.epoch == 2)
        federation.kill("cleo")
        for path in (file_of_ada, federation.path):
            replace_file(path, without(in_epoch(text, 3), "cleo"))
        federation.wait_until(lambda: all_in_epoch(federation, 3, "ada", "bob", "dan"))
