"""`joint` columns are refused unless it is said what they reveal; and what they reveal is what the audit finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import cgd
from cgd.audit.attacks import joint
from cgd.optim.vertical import JOINT_RECOVERED, JointFirstLayer

if TYPE_CHECKING:
    from cgd import Peers


def joined(peers: Peers, accept: Any) -> torch.Tensor:
    layer = torch.nn.Linear(2, 3)
    output: torch.Tensor = JointFirstLayer(layer, peers, accept=accept)(torch.ones(4, 2)).detach()
    return output


def test_a_joint_layer_is_refused_unless_it_is_accepted_in_these_words() -> None:
    with cgd.local_peers(3) as row:
        with pytest.raises(cgd.InputError, match="accept = 'joint reveals raw records'") as refused:
            JointFirstLayer(torch.nn.Linear(2, 3), row[0])
        assert JOINT_RECOVERED in str(refused.value)
        for other in ("yes", "Joint reveals raw records", True, None):
            with pytest.raises(cgd.InputError, match=f"accept is {other!r}"):
                joined(row[0], other)
        totals = row.run(joined, ["joint reveals raw records"] * 3)
    assert all(torch.equal(totals[0], each) for each in totals)


def test_the_refusal_has_the_figure_of_the_audit() -> None:
    rounds = 8
    found = joint.recover(*joint.observe_columns("joint", each=60, rounds=rounds))
    assert f"{found.detail.split(',')[0]} of a row from {rounds} steps" == JOINT_RECOVERED
    towers = joint.recover(*joint.observe_columns("towers", each=60, rounds=rounds))
    assert towers.value == 0
