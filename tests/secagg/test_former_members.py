"""What a former member signed or said counts neither for a new key under its name nor after its removal."""

from __future__ import annotations

from dataclasses import replace

from cgd.secagg.federation_spec import Identity
from cgd.secagg.messages import Goodbye
from support.adversary import ADVERSARY
from support.dishonest import DirectedSimulation
from support.summing_program import federation_spec


def test_new_key_under_an_old_name_is_not_accused_of_what_the_former_one_signed() -> None:
    """The key was stolen, and its thief signed different reports; so the participant has a new one."""
    simulation = DirectedSimulation()
    simulation.alter = simulation.two_positions
    simulation.settle()
    memberships = [simulation.programs[me].membership for me in simulation.honest]
    assert all(each.equivocation is not None for each in memberships)
    later = federation_spec(simulation.federation_spec.members, 2)
    for each in memberships:
        each.adopt(later)
        assert each.equivocation is not None  # it has the same key
    new_key = {**later.keys, ADVERSARY: Identity.generate().public}
    for each in memberships:
        each.adopt(replace(later, epoch=3, keys=new_key))
        assert each.equivocation is None


def test_final_digests_of_a_removed_member_are_not_compared() -> None:
    """It was done before the others, or said so, and was removed; then the others continued without it."""
    simulation = DirectedSimulation(honest=3, sums=1)
    simulation.settle()
    for me in simulation.honest:
        simulation.inject(me, bytes(16), Goodbye(True, (("everyone", 1, bytes(32)),)))
    simulation.settle()
    for me in simulation.honest:
        membership = simulation.programs[me].membership
        assert membership.differences().keys() == {ADVERSARY}
        membership.adopt(federation_spec(simulation.honest, 2))
        assert not membership.differences()
