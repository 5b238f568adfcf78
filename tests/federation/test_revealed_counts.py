"""A member returns to a revealed step only with the samples of the last count, also if no state contains that count."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd.federation import member
from cgd.optim import sample_count
from cgd.optim.sample_count import SampleCountMismatchError
from cgd.secagg.messages import RevealKey
from support.in_process import InProcessFederation, new_federation
from support.withheld_keys import (
    DISHONEST,
    HONEST,
    NAMES,
    all_in_epoch,
    gradient_sums,
    make_optimizer,
    replace_file,
    train,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cgd import Peers
    from support.in_process import MemberProcess

SAMPLES = {"ada": 2, "bob": 3, "cleo": 10, "dan": 4}


@pytest.fixture(autouse=True)
def _watch_the_file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def _dishonest_member_has_any_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    check = sample_count.check_commitment

    def check_unless_dishonest(peers: Peers, *arguments: Any, private: bool) -> None:
        if peers.me != DISHONEST:
            check(peers, *arguments, private=private)

    monkeypatch.setattr(sample_count, "check_commitment", check_unless_dishonest)


def one_step(process: MemberProcess, samples: dict[str, int] = SAMPLES, records: bytes = b"") -> None:
    parameter, optimizer = make_optimizer(process.peers, samples[process.name])
    optimizer.records_digest = records
    parameter.grad = torch.full((4,), samples[process.name] / 8)
    optimizer.step()


def open_first_step_alone(federation: InProcessFederation) -> None:
    """Let the dishonest member alone open the first step, and deny it; then begin a new epoch with the same members."""
    sent = itertools.count()
    hold = federation.network.hold(DISHONEST, HONEST, lambda m: isinstance(m, RevealKey) and next(sent) >= 3)
    federation.start_all(partial(one_step, records=b"former"))
    federation.wait_until(lambda: len(federation[DISHONEST].journal()) == 2)
    assert all(federation[name].journal().pending_reveal is not None for name in HONEST)
    federation.kill(DISHONEST, lose_state=True)
    federation.network.release(hold)
    replace_file(federation.path, federation.path.read_text().replace("epoch = 1", "epoch = 2"))
    federation.wait_until(lambda: all_in_epoch(federation, 2, *HONEST))


@pytest.mark.parametrize("lose_state", [False, True])
@pytest.mark.parametrize("other", ["number", "records"])
def test_member_with_other_samples_is_stopped_before_a_revealed_first_step(
    tmp_path: Path, other: str, lose_state: bool
) -> None:
    """No step is finished, so no state contains the count. Cleo reports so many samples that their number is the same.

    The difference of the two totals would be that of dan's gradients.
    """
    returns = {**SAMPLES, "dan": 7, DISHONEST: 7} if other == "number" else SAMPLES
    records = b"other" if other == "records" else b"former"
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        open_first_step_alone(federation)
        federation.kill("dan", lose_state=lose_state)
        federation.start("dan", partial(one_step, samples=returns, records=records))
        federation.start(DISHONEST, partial(one_step, samples=returns))
        federation.wait_until(lambda: federation["dan"].finished or federation["ada"].finished)
        assert not gradient_sums(federation["ada"].journal())
        assert isinstance(federation["dan"].error, SampleCountMismatchError)


def test_member_with_the_same_samples_finishes_a_revealed_first_step(tmp_path: Path) -> None:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        open_first_step_alone(federation)
        federation.kill("dan", lose_state=True)
        federation.start("dan", partial(one_step, records=b"former"))
        federation.start(DISHONEST, one_step)
        federation.results()


@pytest.mark.parametrize("epoch", [2, 3])
@pytest.mark.parametrize("samples", [4, 7])
def test_member_returns_to_a_revealed_step_with_the_samples_of_the_last_count(
    tmp_path: Path, samples: int, epoch: int
) -> None:
    """Dan took the first step with 4 samples, and the second was revealed with 7, after a new count.

    His state is that of the first step; only the count in the journal shows with how many samples he must return.
    """
    first, second = SAMPLES, {**SAMPLES, "dan": 7}
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        text = federation.path.read_text()
        federation.start_all(partial(train, steps=2, samples=first), pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("dan")
        replace_file(federation.path, text.replace("epoch = 1", "epoch = 2"))
        federation.wait_until(lambda: all_in_epoch(federation, 2))
        sent = itertools.count()
        hold = federation.network.hold(DISHONEST, HONEST, lambda m: isinstance(m, RevealKey) and next(sent) >= 3)
        federation.start("dan", partial(train, steps=2, samples=second))
        for process in federation:
            process.resume()
        federation.wait_until(lambda: len(federation[DISHONEST].journal()) == 4)
        assert all(federation[name].journal().pending_reveal is not None for name in HONEST)
        federation.kill(DISHONEST, lose_state=True)
        federation.kill("dan")
        federation.network.release(hold)
        replace_file(federation.path, text.replace("epoch = 1", f"epoch = {epoch}"))
        federation.wait_until(lambda: all_in_epoch(federation, epoch))
        returns = {**SAMPLES, "dan": samples, DISHONEST: SAMPLES[DISHONEST] + 7 - samples}
        federation.start("dan", partial(train, steps=2, samples=returns))
        federation.start(DISHONEST, partial(train, steps=2, samples=returns))
        federation.wait_until(lambda: federation["dan"].finished or federation["ada"].finished)
        if samples == 7:
            federation.results()
        else:
            assert len(gradient_sums(federation["ada"].journal())) == 1
            assert isinstance(federation["dan"].error, SampleCountMismatchError)
