"""The gradient of a participant that drops out; the protocol never opens the two sums that would reveal it exactly."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cgd.audit.attacks import dropout
from cgd.audit.schemes import observe
from cgd.errors import InputError, LocalProtocolError, MembersChangedError
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from support.audits import observe_with_weak_noise
from support.identities import identity, public_keys
from support.wire import spec

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.audit.scenario import Scenario
    from cgd.audit.view import Scheme

ALL, REST = ("a", "b", "c", "d"), ("a", "b", "c")
SIZE = 5


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_two_sums_of_one_step_reveal_the_gradient_exactly(scheme: Scheme) -> None:
    found = dropout.difference(*observe(dropout.scenario(lr=0.0), scheme))
    assert found.value < 1e-4
    assert found.succeeds


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
@pytest.mark.parametrize("seed", range(2))
def test_sums_of_consecutive_steps_reveal_most_of_the_gradient(scheme: Scheme, seed: int) -> None:
    found = dropout.difference(*observe(dropout.scenario(seed=seed), scheme))
    assert 1e-3 < found.value < 0.3
    assert found.succeeds


def test_plain_fedsgd_needs_no_difference() -> None:
    exact = dropout.difference(*observe(dropout.scenario(lr=0.0), "plain"))
    assert exact.value < 1e-6
    [apart], [hidden] = dropout.attacks("plain"), dropout.attacks("secure")
    assert apart.value < hidden.value


@pytest.mark.parametrize("scheme", ["secure", "cgd"])
def test_minibatches_hide_the_gradient_in_a_single_step(scheme: Scheme) -> None:
    found, again = dropout.controls(scheme)
    assert again.succeeds
    assert again.must_succeed
    assert found.value == pytest.approx(1.0, abs=0.1)
    assert not found.succeeds


@pytest.mark.slow
def test_noise_hides_the_gradient() -> None:
    """Also if the same step is summed twice: each sum has its own noise."""
    for scheme in ("dp8", "dp2", "dp0.5"):
        for found in (*dropout.attacks(scheme), *dropout.controls(scheme)):
            assert found.value == pytest.approx(1.0, abs=0.1)
            assert not found.succeeds
            assert not found.must_succeed


def test_attack_on_noisy_sums_succeeds_with_far_too_little_noise() -> None:
    assert dropout.difference(*observe_with_weak_noise(dropout.scenario())).succeeds


def test_attack_needs_a_dropout() -> None:
    view, _ = observe(dropout.scenario(leaves=3), "cgd")
    assert dropout.find_dropout(view) == (3, ("honest-1",))
    with pytest.raises(InputError, match="nobody has dropped out"):
        dropout.find_dropout(observe(dropout.scenario(leaves=0), "cgd")[0])


def without(*dropouts: tuple[int, tuple[str, ...]], lr: float = 0.1) -> Scenario:
    return replace(dropout.scenario(lr=lr), dropouts=dict(dropouts))


@pytest.mark.parametrize("scheme", ["plain", "secure", "cgd"])
def test_earlier_dropouts_do_not_matter(scheme: Scheme) -> None:
    """n and the past sums are those of the members just before the dropout."""
    exact = dropout.difference(*observe(without((5, ("colluder-2",)), (10, ("honest-1",)), lr=0.0), scheme))
    assert exact.value < 1e-4
    alone = dropout.difference(*observe(without((10, ("honest-1",))), scheme))
    after = dropout.difference(*observe(without((5, ("colluder-2",)), (10, ("honest-1",))), scheme))
    assert after.succeeds
    assert after.value == pytest.approx(alone.value, rel=0.5)


@pytest.mark.parametrize("scheme", ["plain", "secure", "cgd"])
@pytest.mark.parametrize("gone", [("honest-1", "honest-2"), ("honest-1", "colluder-2")])
def test_joint_dropout_reveals_the_sum_of_gradients(scheme: Scheme, gone: tuple[str, ...]) -> None:
    scenario = without((10, gone), lr=0.0)
    x, y = scenario.data["honest-2"]
    uneven = replace(scenario, data={**scenario.data, "honest-2": (x[:15], y[:15])})  # weighted by samples
    view, truth = observe(uneven, scheme)
    honest = tuple(name for name in gone if name.startswith("honest"))
    assert dropout.find_dropout(view) == (10, honest)
    found = dropout.difference(view, truth)
    assert found.value < 1e-4
    assert found.succeeds
    assert ("they have 55 records together" in found.detail) == (len(honest) == 2)


def test_colluder_counts_for_its_declared_samples() -> None:
    """Half of its records are in the view; the guess from the remaining participants is the same."""
    view, _ = observe(without((10, ("honest-1",))), "secure")
    half = {
        name: replace(each, x=each.x[::2], y=each.y[::2], samples=len(each.y)) for name, each in view.coalition.items()
    }
    guess = dropout.guess_from_remaining(replace(view, coalition=half))
    assert torch.equal(guess, dropout.guess_from_remaining(view))


def test_replaced_participant_is_no_dropout() -> None:
    """One left and another joined in the same round, so the difference contains both."""
    view, _ = observe(without((10, ("honest-1",))), "secure")
    last = replace(view.rounds[-1], members=(*view.rounds[-1].members, "new"))
    with pytest.raises(InputError, match="nobody has dropped out"):
        dropout.find_dropout(replace(view, rounds=(*view.rounds[:-1], last)))


# Members that are absent for some rounds, with a quorum. `make absence-results` measures more.


def absence(scheme: Scheme = "cgd", name: str = dropout.LEAVER, **options: Any) -> float:
    made = dropout.absence_scenario(**options)
    return dropout.difference_of_absences(*observe(made, scheme), name).value


@pytest.mark.parametrize("absences", [1, 4])
def test_absence_of_a_round_reveals_most_of_the_gradient(absences: int) -> None:
    assert 1e-3 < absence(absences=absences) < 0.3


def test_batches_hide_the_gradient_in_one_absence_and_not_in_many() -> None:
    assert absence(absences=1, batch=10) == pytest.approx(1.0, abs=0.1)
    assert absence(absences=16, batch=10) < 0.9


def test_whoever_cuts_connections_in_turn_gets_the_gradient_of_each_member() -> None:
    view, truth = observe(dropout.absence_scenario(2, in_turn=True), "cgd")
    assert {len(each.members) for each in view.rounds} == {4, 5}
    for name in ("honest-1", "honest-2", "honest-3"):
        found = dropout.difference_of_absences(view, truth, name)
        assert found.succeeds
        assert found.value < 0.3
        assert "is missing from 2 of 16 rounds; it has 40 records" in found.detail


def test_quorum_with_one_honest_member_reveals_its_gradient() -> None:
    """Quorum 3 of 5, two of which collude: more than the bound, and the network cuts off two honest members."""
    number = dropout.FULL_ROUNDS
    view, truth = observe(without((number, ("honest-2", "honest-3"))), "cgd")
    found = view.samples_in(number) * view.honest_sum(number).double() / len(truth.y[dropout.LEAVER])
    assert dropout.relative_error(view, truth, dropout.LEAVER, number, found) < 1e-4


def test_number_of_samples_follows_from_the_counts_with_and_without_a_member() -> None:
    made = dropout.absence_scenario(1, in_turn=True)
    x, y = made.data["honest-2"]
    uneven = replace(made, data={**made.data, "honest-2": (x[:15], y[:15])})
    view, _ = observe(uneven, "cgd")
    assert [view.samples_of(name) for name in view.honest] == [40, 15, 40]
    with pytest.raises(InputError, match="the counts do not tell the number of samples of honest-1 from those of the"):
        observe(without((5, ("honest-1", "honest-2"))), "cgd")[0].samples_of("honest-1")


def test_absent_gradient_needs_rounds_with_and_without_the_participant() -> None:
    view, truth = observe(dropout.scenario(leaves=3), "cgd")
    with pytest.raises(InputError, match="the rounds do not tell the gradient of honest-2 from those of the others"):
        dropout.difference_of_absences(view, truth, "honest-2")


@pytest.mark.slow
def test_noise_hides_the_gradient_of_an_absent_member() -> None:
    for scheme in ("dp8", "dp0.5"):
        assert absence(scheme, absences=4) == pytest.approx(1.0, abs=0.1)


# The exact attack on the protocol itself: four members, of which d drops out at any moment.


def addend(member: str, epoch: int) -> npt.NDArray[Any]:
    """The addend, which is weighted for the members of an epoch."""
    seed = f"{member} {epoch}"
    return np.frombuffer(random.Random(seed).randbytes(4 * SIZE), dtype="<u4").copy()


def total(members: tuple[str, ...], epoch: int) -> bytes:
    return np.sum([addend(member, epoch) for member in members], axis=0, dtype=np.uint32).tobytes()


def federation_spec(members: tuple[str, ...], epoch: int) -> FederationSpec:
    return FederationSpec(
        "trial", epoch, members, {"everyone": members}, {"training": "x"}, "1.0", public_keys(members)
    )


class Member:
    """A process that requests the first step's sum, and records when its addend is encoded."""

    def __init__(self, me: str, held: FederationSpec, journal: Journal | None = None) -> None:
        self.me = me
        self.membership = Membership(me, identity(me), held, {} if journal is None else {"everyone": journal})
        self.opened: set[bytes] = set()
        self.encoded: list[int] = []
        self.returned = False
        self.refused = False

    def advance(self) -> None:
        group = self.membership.group("everyone")
        pending = group.pending
        if pending is not None and pending.total is not None:
            self.opened.add(pending.total.tobytes())
            return
        if pending is not None and isinstance(pending.fault, LocalProtocolError):
            assert "sum 1 may have been revealed with the members a, b, c, d" in str(pending.fault)
            self.refused = True
            return
        if pending is not None and pending.fault is not None:
            assert isinstance(pending.fault, MembersChangedError)
            self.returned = True
        if (pending is None or pending.done) and group.next_sum_known:
            epoch = group.next_epoch

            def encode() -> npt.NDArray[Any]:
                self.encoded.append(epoch)
                return addend(self.me, epoch)

            self.membership.start("everyone", spec(SIZE), encode, epoch, Step(0, 0))


class Connections:
    """Connections between running members; each keeps the order of its messages."""

    def __init__(self, members: dict[str, Member], rng: random.Random) -> None:
        self.members, self.rng = members, rng
        self.queues: dict[tuple[str, str], deque[bytes]] = {}

    def step(self) -> None:
        for me, member in self.members.items():
            member.advance()
            while (outgoing := member.membership.next_outgoing()) is not None:
                self.queues.setdefault((me, outgoing[0]), deque()).append(bytes(outgoing[1]))
        loaded = [pair for pair, queue in self.queues.items() if queue and pair[1] in self.members]
        if loaded:
            sender, to = self.rng.choice(loaded)
            self.members[to].membership.receive(sender, self.queues[sender, to].popleft())

    def remove(self, me: str) -> None:
        del self.members[me]
        self.queues = {pair: queue for pair, queue in self.queues.items() if me not in pair}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def test_step_is_never_opened_for_two_sets_of_members() -> None:
    """Whenever d drops out, the others open one sum of the step, over all members or over the remaining ones.

    Or none: if a self-mask key was sent, d may have opened the sum over all, and the others open no second one.
    """
    outcomes = set()
    for seed in range(60):
        rng = random.Random(seed)
        members = {me: Member(me, federation_spec(ALL, 1)) for me in ALL}
        network = Connections(members, rng)
        network.run(rng.randrange(20, 110))
        known = set().union(*(members[me].opened for me in REST))
        network.remove("d")
        for me in REST:
            members[me].membership.adopt(federation_spec(REST, 2))
        network.run(250)
        opened = set().union(*(members[me].opened for me in REST))
        refused = any(members[me].refused for me in REST)
        assert all(members[me].opened == opened for me in REST)
        assert opened in (set(), {total(ALL, 1)}, {total(REST, 2)})
        assert known <= opened
        assert refused == (not opened)
        outcomes.add("none" if refused else "over all" if opened == {total(ALL, 1)} else "over the rest")
    assert outcomes == {"none", "over all", "over the rest"}  # the dropouts cover early and late moments


def test_repeated_step_returns_the_opened_sum() -> None:
    """All restart without d and request the first step again: no addend is encoded, nothing new is opened."""
    members = {me: Member(me, federation_spec(ALL, 1)) for me in ALL}
    Connections(members, random.Random(1)).run(400)
    assert all(member.opened == {total(ALL, 1)} for member in members.values())
    journals = {me: members[me].membership.group("everyone").journal.to_bytes() for me in REST}
    again = {me: Member(me, federation_spec(REST, 2), Journal.from_bytes(journals[me])) for me in REST}
    Connections(again, random.Random(2)).run(300)
    for member in again.values():
        assert member.opened == {total(ALL, 1)}
        assert member.encoded == []


def test_unopened_sum_is_repeated_with_new_weights() -> None:
    """d drops out before it sends its self-mask key: the sum stays masked, and the others start with other addends."""
    members = {me: Member(me, federation_spec(ALL, 1)) for me in ALL}
    network = Connections(members, random.Random(3))
    while any(1 not in members[me].encoded for me in ALL):
        network.step()
    network.remove("d")
    network.run(200)
    assert not any(members[me].opened for me in REST)
    for me in REST:
        members[me].membership.adopt(federation_spec(REST, 2))
    network.run(300)
    for me in REST:
        assert members[me].returned
        assert members[me].opened == {total(REST, 2)}
        assert members[me].encoded[-1] == 2
