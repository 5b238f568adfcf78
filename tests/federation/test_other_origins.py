"""A participant that returns to a step that may have been opened, with another origin: its gradient would be another.

The dishonest member has the total of the first attempt. With the total of the second, it would have the difference of
the participant's two gradients, alone and exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pytest
import torch

import cgd
from cgd import ConfinedSGD
from cgd.optim.sample_count import SampleCountMismatchError
from support.in_process import InProcessFederation, new_federation
from support.withheld_keys import (
    DISHONEST,
    NAMES,
    SAMPLES,
    gradient_sums,
    wait_until_opened_alone,
    withhold_third_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    from support.in_process import MemberProcess


@pytest.fixture(autouse=True, scope="module")
def _import_before_there_is_a_deadline() -> None:
    """Let torch import what `public_seed` needs, which takes half a minute on a busy machine."""
    with cgd.public_seed(1):
        torch.nn.Linear(1, 1)


@dataclass(frozen=True)
class TwoSteps:
    """A program that takes two steps with a confined model.

    Attributes:
        seed: the seed of its origin; "own" for `peers.seed`, None for the default of `confine`.
        delta: δ.
        fresh: whether origins are fresh.
    """

    seed: Literal["own"] | None = "own"
    delta: float = 0.1
    fresh: bool = False

    def __call__(self, process: MemberProcess) -> None:
        peers, samples = process.peers, SAMPLES[process.name]
        with cgd.public_seed(1):
            model = torch.nn.Linear(4, 1, bias=False)
        cgd.confine(model, self.delta, peers.seed if self.seed else None, fresh_origins=self.fresh)
        optimizer = ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=samples)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(samples, 4)).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("fresh", [False, True], ids=["constant origins", "fresh origins"])
@pytest.mark.parametrize("other", [TwoSteps(seed=None), TwoSteps(delta=0.3)], ids=["another seed", "another delta"])
@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
def test_revealed_step_is_not_opened_with_a_gradient_at_another_origin(
    tmp_path: Path, fresh: bool, other: TwoSteps, lose_state: bool
) -> None:
    program = TwoSteps(fresh=fresh)
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as federation:
        hold = withhold_third_key(federation)
        federation.start_all(program)
        wait_until_opened_alone(federation)
        federation.kill(DISHONEST, lose_state=True)  # it denies what it has opened
        federation.kill("bob", lose_state=lose_state)
        federation.network.release(hold)
        federation.start(DISHONEST, program)
        federation.start("bob", replace(other, fresh=fresh))
        error = federation.errors("bob")["bob"]
        assert isinstance(error, SampleCountMismatchError), error
        assert "bob was counted with another number, or with another origin of its model" in str(error)
        assert len(gradient_sums(federation["ada"].journal())) == 1

        federation["bob"].stop()
        federation.start("bob", program)
        assert federation.results() == dict.fromkeys(NAMES)
