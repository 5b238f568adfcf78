"""The steps of private set intersection, without I/O: results, what is opened, and dishonest members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd.errors import InputError, ProtocolError
from cgd.psi import zero_table
from cgd.psi.curve import hash_to_points
from cgd.psi.protocol import CommonState, SetMember, SizeError, SmallIntersectionError, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY = b"k" * 32
MINIMUM = 2


def people(*numbers: int) -> list[str]:
    return [f"person {number}" for number in numbers]


def members_of(sets: Sequence[Sequence[str]], minimum: int = MINIMUM) -> list[SetMember]:
    return [
        SetMember(place, len(sets), elements, bytes([place]) * 32, KEY, minimum) for place, elements in enumerate(sets)
    ]


def run_step(members: Sequence[SetMember], tamper: Callable[[int, bytes], bytes] = lambda _, own: own) -> None:
    """Run the next step at all members; `tamper` may replace what a member enters."""
    if members[0].kind == "table":
        tables = [np.frombuffer(tamper(each.me, each.table().tobytes()), dtype="<u8") for each in members]
        total = np.zeros(members[0].cells, dtype=np.uint64)
        for table in tables:
            total += table
        for each in members:
            each.receive_table(total)
        return
    entered = [tamper(each.me, each.contribution()) for each in members]
    parts = [b""] * len(members)
    for each, own in zip(members, entered, strict=True):
        parts[each.own_segment] = own
    for each, own in zip(members, entered, strict=True):
        each.receive(parts, own)


def run(members: Sequence[SetMember], until: int | None = None) -> None:
    while members[0].state.step < (steps_of(len(members)) if until is None else until):
        run_step(members)


def found(member: SetMember) -> set[str]:
    return {element for element, common in zip(member.elements, member.common(), strict=True) if common}


@pytest.mark.parametrize("count", [3, 4, 5])
def test_members_find_what_all_have(count: int) -> None:
    random = np.random.default_rng(count)
    sets = [
        people(*random.permutation([*range(40), *range(100 * place, 100 * place + 60)])[:])
        for place in range(1, count + 1)
    ]
    members = members_of(sets)
    run(members)
    assert all(member.done and found(member) == set(people(*range(40))) for member in members)
    assert members[0].state == members[-1].state


def test_sets_of_different_sizes() -> None:
    members = members_of([people(*range(300)), people(*range(295, 320)), people(*range(290, 300))])
    run(members)
    assert [found(each) for each in members] == [set(people(*range(295, 300)))] * 3


@pytest.mark.parametrize("common", [0, 1])
def test_small_intersection_is_not_opened(common: int) -> None:
    members = members_of([people(*range(common), *range(100 * place, 100 * place + 20)) for place in (1, 2, 3)])
    run(members, until=5)
    for each in members:
        with pytest.raises(SmallIntersectionError, match=f"has {common} elements, and the minimum is 2"):
            each.contribution()
    assert not members[0].state.shuffles


def test_small_set_stops_before_any_point_is_sent() -> None:
    members = members_of([people(1, 2), people(1, 2, 3), people(1)])
    with pytest.raises(SizeError) as error:
        run_step(members)
    assert error.value.sizes == (2, 3, 1)


# What is learned.


def points_of(member: SetMember) -> set[bytes]:
    return {each.tobytes() for each in member._own_points()}


def test_nobody_can_tell_pairs_of_sets() -> None:
    """All share one person, and two of them a hundred more: the sum of the tables is the same as without these.

    The sum is decoded at the points of all members, which nobody has together: those that two members have are random,
    as those of one are.
    """
    shared = people(*range(1000, 1100))
    members = members_of(
        [people(1, 2, *range(10, 60)) + shared, people(1, 2, *range(110, 160)) + shared, people(1, 2, *range(210, 260))]
    )
    run(members, until=5)
    marks = [each._in_table() for each in members]
    assert [int(each.sum()) for each in marks] == [2, 2, 2]
    everywhere = set.intersection(*map(points_of, members))
    pair = points_of(members[0]) & points_of(members[1])
    assert len(everywhere) == 2
    assert len(pair) == 102
    # What is opened does have no point of a list: each list is blinded by its owner.
    for place, one in enumerate(members):
        assert not points_of(one) & {each.state.lists[place][:32] for each in members}
    opened = [set(map(bytes, as_rows(each))) for each in members[0].state.lists]
    assert not opened[0] & opened[1]
    # Words of the total: the cells of a person of the pair add up to a random word, never to another pattern.
    table = np.frombuffer(members[0].state.table, dtype="<u8")
    words = table[members[0]._own_places()].sum(axis=1, dtype=np.uint64)
    assert len(set(words.tolist())) == len(words) - 1  # two zeros, and all others differ


def as_rows(data: bytes) -> list[bytes]:
    return [data[start : start + 32] for start in range(0, len(data), 32)]


def test_list_on_its_way_never_has_the_same_points_and_is_shuffled() -> None:
    members = members_of([people(*range(50)), people(*range(40, 90)), people(*range(45, 95))])
    seen: list[bytes] = []
    for step in range(4):
        run_step(members)
        if step:
            seen += [each for part in members[0].state.lists for each in as_rows(part)]
    assert len(set(seen)) == len(seen) == 450


def test_size_is_known_before_anybody_knows_who() -> None:
    """Before the shuffles are opened, a member can only guess which of its points belongs to which of its elements."""
    members = members_of([people(*range(60)), people(*range(30, 90)), people(*range(30, 100))])
    run(members, until=5)
    assert [each.size() for each in members] == [30, 30, 30]
    one = members[0]
    truth = np.array([each in people(*range(30, 60)) for each in one.elements])[one._order()]
    # The order of the points is that of two shuffles that the member does not know: about 30 of 60 marks agree by
    # chance, with a standard deviation of 3.9.
    agreement = int((one._in_table() == truth).sum())
    assert 4 <= agreement <= 56
    run(members)
    assert found(one) == set(people(*range(30, 60)))


def test_member_that_enters_an_empty_condition_learns_no_more_than_with_made_up_elements() -> None:
    """A table of zeros stands for every element: a dishonest member tests those that it has announced, no others."""
    members = members_of([people(*range(60)), people(*range(30, 90)), people(35, 70, 500)])
    run(members, until=4)
    run_step(members, lambda me, own: bytes(len(own)) if me == 2 else own)
    assert int(members[2]._in_table().sum()) == 1  # of its three elements, 35 is in both other sets
    # Guesses that it did not announce: it can compute the point of an element, but not its product with K.
    cheat = members[2]
    own_scalar = cheat._scalar()
    guesses = cheat.multiply(hash_to_points(people(*range(90)), KEY), own_scalar)
    places = zero_table.places_of(guesses, cheat.cells, cheat.state.start)
    assert not zero_table.contains(np.frombuffer(cheat.state.table, dtype="<u8"), places).any()


def test_member_without_its_table_does_not_end_with_the_same_records() -> None:
    """The others then have more in common than it has: it is found out when the IDs of the row are compared."""
    members = members_of([people(*range(60)), people(*range(30, 90)), people(35, 36, 500)])
    run(members, until=4)
    run_step(members, lambda me, own: bytes(len(own)) if me == 2 else own)
    run(members)
    assert found(members[0]) == found(members[1]) == set(people(*range(30, 60)))
    assert found(members[2]) == set(people(35, 36))


# Dishonest members.


@pytest.mark.parametrize("step", [2, 3])
def test_copied_point_is_noticed_by_the_owner(step: int) -> None:
    """A member that puts one point of a list in two places would see whether both come back."""
    members = members_of([people(*range(20)), people(*range(20)), people(*range(20))])
    run(members, until=step)
    run_step(members, lambda me, own: own[:32] + own[:-32] if me == 1 else own)
    run(members, until=4)
    victim = (1 - (step - 1)) % 3
    with pytest.raises(ProtocolError, match="two of our elements have the same point"):
        members[victim].table()
    for each in members:
        if each.me != victim:
            each.table()


@pytest.mark.parametrize("content", [bytes(32), b"\xff" * 32, b"\x01" + bytes(31), bytes([7]) * 32])
def test_values_that_are_not_points_are_refused(content: bytes) -> None:
    """Zero, not canonical, the neutral element, and not on the curve or in the subgroup."""
    members = members_of([people(1, 2, 3)] * 3)
    run(members, until=1)
    run_step(members, lambda me, own: content * 3 if me == 0 else own)
    with pytest.raises(ProtocolError, match="values that are not points"):
        members[1].contribution()


def test_wrong_shuffles_do_not_move_marks_to_others_unnoticed() -> None:
    members = members_of([people(*range(60)), people(*range(30, 90)), people(*range(30, 100))])
    run(members, until=5)
    run_step(members, lambda me, own: bytes(len(own)) if me == 2 else own)
    run(members)
    assert found(members[2]) == set(people(*range(30, 60)))
    assert found(members[0]) != found(members[2])  # the row compares its IDs next, and stops


def test_opened_value_that_we_did_not_enter_is_noticed() -> None:
    members = members_of([people(1, 2, 3)] * 3)
    run(members, until=1)
    entered = [each.contribution() for each in members]
    with pytest.raises(ProtocolError, match="another value was opened than we entered"):
        members[0].receive([entered[1], *entered[1:]], entered[0])


# Restarts.


@pytest.mark.parametrize("step", range(1, 7))
def test_restarted_member_enters_the_same_again(step: int) -> None:
    sets = [people(*range(60)), people(*range(30, 90)), people(*range(30, 100))]
    members = members_of(sets)
    run(members, until=step)
    restarted = members_of(sets)
    for each, old in zip(restarted, members, strict=True):
        each.state = CommonState.from_bytes(old.state.to_bytes(), 3)
        assert each.state == old.state
        assert each.is_committed()
        if old.kind == "table":
            assert np.array_equal(each.table(), old.table())
        else:
            assert each.contribution() == old.contribution()
    run(restarted)
    assert found(restarted[1]) == set(people(*range(30, 60)))


def test_restart_with_other_elements_or_another_secret_is_noticed() -> None:
    sets = [people(*range(60)), people(*range(30, 90)), people(*range(30, 100))]
    members = members_of(sets)
    run(members, until=1)
    for elements, secret in ((people(*range(1, 61)), bytes(32)), (people(*range(61)), bytes(32)), (sets[0], b"x" * 32)):
        other = SetMember(0, 3, elements, secret, KEY, MINIMUM, state=members[0].state)
        assert not other.is_committed()
    shuffled = SetMember(0, 3, sets[0][::-1], bytes(32), KEY, MINIMUM, state=members[0].state)
    assert shuffled.is_committed()


def test_keys_depend_on_all_announcements() -> None:
    """A member that announces another set, or begins again, gets other scalars, shuffles and tables of the others."""
    first, second = members_of([people(1, 2, 3)] * 3), members_of([people(1, 2, 3)] * 3)
    run(first, until=2)
    run(second, until=2)
    assert first[0]._scalar() != second[0]._scalar()
    assert first[0]._blinding() != second[0]._blinding()
    assert first[0]._shuffle_key(1) != second[0]._shuffle_key(1)


@pytest.mark.parametrize("step", [1, 2, 5, 7])
def test_damaged_states_are_refused(step: int) -> None:
    members = members_of([people(*range(20))] * 3)
    run(members, until=step)
    content = members[0].state.to_bytes()
    assert CommonState.from_bytes(content, 3) == members[0].state
    damaged = [
        content[:-1],
        content + b"\0",
        b"\x09" + content[1:],
        b"\0" + content[1:],
        content[:8] + b"\xff" * 8,
        b"",
    ]
    damaged.append(content[:24] + b"\xff" * 8 + content[32:])
    for each in damaged:
        with pytest.raises(InputError, match="stored state of the intersection is damaged"):
            CommonState.from_bytes(each, 3)
    with pytest.raises(InputError, match="stored state of the intersection is damaged"):
        CommonState.from_bytes(content, 2)
