"""`joint` columns require a sentence that accepts their risk, and state the result of the audit's attack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd.audit.attacks import joint
from cgd.optim.vertical import JOINT_FIGURE, JointFirstLayer

if TYPE_CHECKING:
    from cgd import Peers


def joint_output(peers: Peers, accept: Any) -> torch.Tensor:
    layer = torch.nn.Linear(2, 3)
    output: torch.Tensor = JointFirstLayer(layer, peers, accept=accept)(torch.ones(4, 2)).detach()
    return output


def test_joint_layer_requires_the_exact_acceptance_sentence() -> None:
    with cgd.local_peers(3) as row:
        with pytest.raises(cgd.InputError, match="accept = 'joint reveals raw records'") as rejected:
            JointFirstLayer(torch.nn.Linear(2, 3), row[0])
        assert JOINT_FIGURE in str(rejected.value)
        for other in ("yes", "Joint reveals raw records", True, None):
            with pytest.raises(cgd.InputError, match=f"accept is {other!r}"):
                joint_output(row[0], other)
        totals = row.run(joint_output, ["joint reveals raw records"] * 3)
    assert all(torch.equal(totals[0], each) for each in totals)


def test_joint_error_states_the_figure_of_the_audit() -> None:
    rounds = 8
    found = joint.recover(*joint.observe_columns("joint", each=60, rounds=rounds))
    assert f"{found.detail.split(',')[0]} of a row from {rounds} steps" == JOINT_FIGURE
    towers = joint.recover(*joint.observe_columns("towers", each=60, rounds=rounds))
    assert towers.value == 0
