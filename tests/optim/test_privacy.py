"""Private training in one process: the same bits at all members, the promised noise, and errors before sharing.

Statistical bounds are at least 6 standard deviations wide, for at most a few thousand numbers of the whole module: a
test fails by chance with a probability below 1e-6. Gradients that were multiplied by 2, or noise by 1.3, are noticed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import cgd
from cgd.dp.budget_file import BudgetFile
from cgd.dp.charges import TRAINING
from cgd.dp.mechanism import NoisyEncoding
from cgd.dp.settings import PrivacySettings
from cgd.errors import BudgetSpentError, CGDError, InputError, IntegrityError, RevealError, SettingsError
from cgd.local import solo_peers
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.optim.record_norms import MARGIN
from cgd.transport.driver import SessionDriver
from support.training import Network, data, makers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cgd import Peers, Privacy

SAMPLES = 400
DIMENSION = 21
TIGHT: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-5, "steps": 2, "clip": 0.5}


@dataclass
class Member:
    """A member that has trained.

    Attributes:
        optimizer: its optimiser.
        privacy: its privacy.
        mean: the mean of its clipped gradients at the origin.
    """

    optimizer: cgd.ConfinedOptimizer
    privacy: Privacy
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def begin(peers: Peers, optimizer: str = "sgd", samples: int = SAMPLES, **options: Any) -> tuple[Network, Member]:
    with cgd.public_seed(0):
        model = Network()
    cgd.confine(model, delta=0.1, seed=peers.seed)
    privacy = cgd.Privacy(model, **{**TIGHT, **options})
    return model, Member(makers[optimizer](model.parameters(), peers=peers, samples=samples, privacy=privacy), privacy)


def train(peers: Peers, *, taken: int = 1, batches: int = 0, zero: bool = False, **options: Any) -> Member:
    """Take some steps. With gradients that are `zero`, noise alone is summed."""
    model, member = begin(peers, **options)
    x, y = data(int(peers.me[-1]), options.get("samples", SAMPLES))
    if batches:
        member.mean = clipped_sum(model, x, y, member.privacy.settings.clip) / len(x)
    for _ in range(taken):
        member.optimizer.zero_grad()
        for one, other in zip(x.chunk(batches or 1), y.chunk(batches or 1), strict=True):
            (nn.functional.mse_loss(model(one), other) * (0 if zero else 1)).backward()
        member.optimizer.step()
    return member


def clipped_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: float) -> torch.Tensor:
    """Clip the gradients of single records, by means of torch alone."""

    copied = copy.deepcopy(model)  # without the hooks

    def loss(parameters: dict[str, torch.Tensor], each: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(copied, parameters, each[None]), target[None])

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    vectors = torch.cat([each.flatten(1).double() for each in gradients.values()], dim=1)
    factors = (clip * (1 - MARGIN) / vectors.norm(dim=1)).clamp(max=1)
    total: torch.Tensor = (vectors * factors[:, None]).sum(dim=0)
    return total


def run(function: Callable[..., Any], members: int = 3, ring_bits: int = 32, **options: Any) -> list[Any]:
    with cgd.local_peers(members, ring_bits=ring_bits) as peers:
        return peers.run(partial(function, **options))


def errors(function: Callable[..., Any], **options: Any) -> list[CGDError]:
    def work(peers: Peers) -> CGDError:
        with pytest.raises(CGDError) as caught:
            function(peers, **options)
        return caught.value

    return run(work)


def same_everywhere(members: Sequence[Member]) -> bool:
    return all(torch.equal(each.optimizer.displacement(), members[0].optimizer.displacement()) for each in members)


# What is summed.


@pytest.mark.parametrize("optimizer", makers)
@pytest.mark.parametrize("ring_bits", [32, 64])
def test_all_members_have_the_same_bits_and_the_same_charges(optimizer: str, ring_bits: int) -> None:
    members = run(train, ring_bits=ring_bits, optimizer=optimizer, taken=3, samples=20, epsilon=2.0)
    assert same_everywhere(members)
    assert {each.privacy.spent() for each in members} == {members[0].privacy.spent()}
    spent = members[0].optimizer.privacy.spent()
    assert (spent.delta, spent.openings) == (1e-5, 4)  # the number of records, and three steps
    assert 0 < spent.epsilon < 2.0


@pytest.mark.parametrize(
    ("ring_bits", "colluders", "batches"), [(32, 0, 1), (32, 1, 1), (32, 2, 4), (64, 0, 4), (64, 1, 1), (64, 2, 1)]
)
def test_step_is_the_mean_of_clipped_gradients_within_the_noise(ring_bits: int, colluders: int, batches: int) -> None:
    members = run(train, ring_bits=ring_bits, colluders=colluders, batches=batches)
    group = members[0].optimizer.param_groups[0]
    records, settings = group["total_samples"], members[0].privacy.settings
    encoding = settings.step_encoding(3, DIMENSION, records, ring_bits)
    count = settings.count_encoding(3)
    assert abs(records - 3 * SAMPLES) < 0.5 + 8 * count.sigma_total
    mean = sum(each.mean for each in members) * SAMPLES / records
    moved = -members[0].optimizer.displacement().double() / 0.2
    assert float(mean.norm()) > 50 * encoding.sigma_total  # so that the test can fail
    assert float((moved - mean).abs().max()) < 8 * encoding.sigma_total + 1e-6


@pytest.mark.parametrize("colluders", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_member_adds_its_share_of_the_noise(monkeypatch: pytest.MonkeyPatch, colluders: int) -> None:
    """Addends of gradients that are zero are noise alone."""
    addends: list[Any] = []
    encode = NoisyEncoding.encode

    def watch(self: NoisyEncoding, values: Any) -> Any:
        words = encode(self, values)
        if self.dimension == DIMENSION:
            assert not values.any()
            addends.append(self.decode(words) / self.sigma_total)
        return words

    monkeypatch.setattr(NoisyEncoding, "encode", watch)
    members = run(train, zero=True, taken=60, samples=8, colluders=colluders, steps=60)
    settings = members[0].privacy.settings
    encoding = settings.step_encoding(3, DIMENSION, members[0].optimizer.param_groups[0]["total_samples"], 32)
    needed = settings.clip / encoding.denominator / settings.step_mu
    assert encoding.sigma_total >= needed * np.sqrt(3 / (3 - colluders)) > 0.98 * encoding.sigma_total
    assert len(addends) == 3 * 60
    assert len({each.tobytes() for each in addends}) == len(addends)
    # The variance of 3780 normal numbers has the relative standard deviation √(2/3780) = 0.023.
    assert np.var(np.concatenate(addends)) * 3 == pytest.approx(1, abs=0.15)
    # No member's noise is that of another: 1260 products of independent numbers have a mean of 0 ± 0.028.
    triples = np.array(addends).reshape(60, 3, DIMENSION) * np.sqrt(3)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((triples[:, one] * triples[:, other]).mean())) < 0.2


def test_program_sizes_its_noise_for_the_quorum_of_the_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four members with a quorum of 3, one may be absent; the program does not state it."""
    monkeypatch.setattr(SessionDriver, "quorum", property(lambda _: 3))
    made: list[NoisyEncoding] = []
    encode = NoisyEncoding.encode

    def watch(self: NoisyEncoding, values: Any) -> Any:
        made.append(self)
        return encode(self, values)

    monkeypatch.setattr(NoisyEncoding, "encode", watch)
    members = run(train, members=4, zero=True, steps=1, samples=8)
    assert all(member.privacy.settings.quorum == 3 for member in members)
    assert "a quorum of 3" in members[0].privacy.settings.describe()
    assert len(made) == 2 * 4  # the count and the step of each
    assert {(each.members, each.quorum, each.noisy_members) for each in made} == {(4, 3, 2)}
    [message] = {str(error) for error in errors(train, colluders=3)}
    assert "a sum may have only 3 members, the quorum; choose at most 2" in message


def test_step_that_is_repeated_has_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session stores no totals, so a step whose result was lost is opened again, and charged again."""
    lost: list[str] = []
    decode = cgd.secagg.fixed_point.FixedPoint.decode

    def lose_once(self: Any, words: Any, *more: Any) -> Any:
        if words.size == DIMENSION and len(lost) < 3:
            lost.append("")
            raise KeyboardInterrupt
        return decode(self, words, *more)

    def interrupted(peers: Peers) -> Member:
        model, member = begin(peers)
        x, y = data(int(peers.me[-1]), SAMPLES)
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(KeyboardInterrupt):
            member.optimizer.step()
        assert member.privacy.spent().openings == 2
        member.optimizer.step()  # without backward: the gradient is kept
        assert member.privacy.spent().openings == 3
        return member

    monkeypatch.setattr(cgd.secagg.fixed_point.FixedPoint, "decode", lose_once)
    drawn: list[bytes] = []
    encode = NoisyEncoding.encode

    def watch(self: NoisyEncoding, values: Any) -> Any:
        words = encode(self, values)
        drawn.append(words.tobytes())
        return words

    monkeypatch.setattr(NoisyEncoding, "encode", watch)
    assert same_everywhere(run(interrupted))
    assert len(drawn) == len(set(drawn)) == 3 * 3


def test_records_that_are_not_finite_count_as_zero() -> None:
    def with_a_bad_record(peers: Peers) -> Member:
        model, member = begin(peers)
        x, y = data(int(peers.me[-1]), SAMPLES)
        x[7, 1] = float("nan")
        nn.functional.mse_loss(model(x), y).backward()
        member.optimizer.step()
        return member

    members = run(with_a_bad_record)
    assert same_everywhere(members)
    assert torch.isfinite(members[0].optimizer.displacement()).all()


def test_few_records_and_strong_privacy_raise_no_error() -> None:
    """The noise of the count is larger than the count: it may come out below 1."""
    members = run(train, samples=1, taken=2, epsilon=0.01, colluders=2)
    assert same_everywhere(members)
    assert members[0].optimizer.param_groups[0]["total_samples"] >= 1


# Settings and bad input.


@pytest.mark.parametrize(
    "odd", [{"epsilon": 19.0}, {"delta": 2e-5}, {"clip": 0.6}, {"steps": 3}, {"colluders": 2}, {"reruns": 6}]
)
def test_different_settings_of_one_member_are_reported_before_anything_is_opened(odd: dict[str, Any]) -> None:
    def work(peers: Peers) -> tuple[str, str, int, float]:
        model, member = begin(peers, samples=8, **(odd if peers.me == "participant-2" else {}))
        x, y = data(1)
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(SettingsError) as caught:
            member.optimizer.step()
        return caught.value.peer, str(caught.value), member.privacy.spent().openings, peers.traffic.sums

    for peer, message, openings, sums in run(work):
        assert peer == "participant-2"
        assert "epsilon 2" in message or "epsilon 19" in message
        assert (openings, sums) == (0, 0)


def test_member_without_privacy_is_reported_before_anything_is_opened() -> None:
    def work(peers: Peers) -> int:
        model, member = begin(peers, samples=8)
        if peers.me == "participant-2":
            model = Network()
            member.optimizer = makers["sgd"](model.parameters(), peers=peers, samples=8)
        x, y = data(1)
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(SettingsError):
            member.optimizer.step()
        return peers.traffic.sums

    assert run(work) == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"steps": 0}, "steps is 0"),
        ({"reruns": -2}, "reruns is -2"),
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"budget": "/nonexistent/records.budget"}, "cannot be used"),
    ],
)
def test_invalid_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cgd.Privacy(Network(), **{**TIGHT, **options})


def test_batch_normalisation_is_refused_at_construction() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(InputError, match="BatchNorm1d"):
        cgd.Privacy(model, **TIGHT)


@pytest.mark.parametrize("colluders", [3, 10])
def test_as_many_colluders_as_members_are_refused(colluders: int) -> None:
    for error in errors(train, samples=8, colluders=colluders):
        assert isinstance(error, InputError)
        assert "choose at most 2" in str(error)


def test_delta_above_one_divided_by_the_records_is_refused_by_all() -> None:
    for error in errors(train, samples=400, delta=0.01):
        assert isinstance(error, InputError)
        assert "delta is 0.01, and there are about" in str(error)


def test_groups_with_peers_of_their_own_are_refused() -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers)
        with pytest.raises(InputError, match="as in a grid"):
            member.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "peers": solo_peers()})
        privacy = cgd.Privacy(model, **TIGHT)
        groups: list[Any] = [{"params": model.first.parameters(), "peers": solo_peers()}]
        with pytest.raises(InputError, match="as in a grid"):
            cgd.ConfinedSGD(groups, 0.1, peers=peers, samples=1, privacy=privacy)

    run(work)


def test_optimiser_of_other_parameters_than_the_model_has_is_refused_before_sharing() -> None:
    def work(peers: Peers) -> None:
        model = Network()
        privacy = cgd.Privacy(model, **TIGHT)
        optimizer = cgd.ConfinedSGD(model.last.parameters(), 0.1, peers=peers, samples=8, privacy=privacy)
        x, y = data(1)
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(InputError, match="which are not the 4 trainable ones"):
            optimizer.step()
        assert (peers.traffic.sums, privacy.spent().openings) == (0, 0)

    run(work)


def test_privacy_in_16_bits_is_refused_before_anything_is_summed() -> None:
    def work(peers: Peers) -> None:
        with pytest.raises(InputError, match="privacy= and ring_bits=16 exclude each other"):
            begin(peers)
        assert peers.traffic.sums == 0

    run(work, ring_bits=16)


def test_privacy_of_another_optimiser_is_refused() -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers)
        with pytest.raises(InputError, match="belongs to another optimiser"):
            cgd.ConfinedAdam(model.parameters(), peers=peers, samples=1, privacy=member.privacy)

    run(work)


@pytest.mark.parametrize("samples", [7, 9])
def test_more_records_than_samples_or_none_are_refused_before_sharing(samples: int) -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers, samples=samples)
        if samples == 7:
            x, y = data(1)
            nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(InputError, match="use each record once per step"):
            member.optimizer.step()
        assert (peers.traffic.sums, member.privacy.spent().openings) == (0, 0)

    run(work)


@pytest.mark.parametrize(("persons", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.float64)])
def test_persons_with_several_records_are_the_samples(persons: int, dtype: torch.dtype) -> None:
    def work(peers: Peers) -> int:
        model, member = begin(peers, samples=persons)
        x, y = data(1, 7 * persons)
        for _ in range(2):
            member.optimizer.zero_grad()
            member.privacy.weigh_records(torch.full((len(x),), 1 / 7, dtype=dtype))
            nn.functional.mse_loss(model(x), y).backward()
            member.optimizer.step()
        return member.privacy.spent().openings

    assert set(run(work)) == {3}


def test_more_weight_than_persons_is_refused_before_sharing() -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers, samples=1)
        x, y = data(1, 7)
        member.privacy.weigh_records(torch.full((7,), 1 / 6))
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(InputError, match=r"7 records .* total weight 1.16667, and samples is 1"):
            member.optimizer.step()
        assert (peers.traffic.sums, member.privacy.spent().openings) == (0, 0)

    run(work)


def test_records_without_weight_are_a_step() -> None:
    def work(peers: Peers) -> int:
        model, member = begin(peers, samples=1)
        x, y = data(1, 7)
        member.privacy.weigh_records(torch.zeros(7))
        nn.functional.mse_loss(model(x), y).backward()
        member.optimizer.step()
        return member.privacy.spent().openings

    assert set(run(work)) == {2}


def test_gradients_before_zero_grad_are_discarded() -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers, samples=8)
        x, y = data(1)
        nn.functional.mse_loss(model(x), y).backward()
        member.optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        member.optimizer.step()  # 16 records would be refused

    run(work)


# The budget.


def test_spent_budget_ends_the_training_at_all_members_before_sharing() -> None:
    def work(peers: Peers) -> tuple[int, int]:
        with pytest.raises(BudgetSpentError, match="3 openings for a step"):
            train(peers, taken=4, samples=20, steps=3, reruns=0)
        return peers.traffic.sums, peers.number

    for sums, number in run(work):
        assert sums == 2 + 3
        assert number == 2 + 3 + 1  # the abort


@pytest.mark.parametrize("error", [RevealError("the disk is full"), ValueError("unexpected")])
def test_charge_that_fails_at_one_member_opens_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    charge = PrivacyLedger._charge
    failing: list[Privacy] = []

    def fail_at_one(self: PrivacyLedger, mu_squared: float, what: str, records: str) -> None:
        if what == "a step" and self is failing[0]._ledger:
            raise error
        charge(self, mu_squared, what, records)

    def work(peers: Peers) -> Member:
        model, member = begin(peers, samples=8)
        if peers.me == "participant-1":
            failing.append(member.privacy)
        x, y = data(1)
        nn.functional.mse_loss(model(x), y).backward()
        mine = peers.me == "participant-1"
        with pytest.raises(CGDError, match=str(error) if mine else "participant-1") as caught:
            member.optimizer.step()
        assert isinstance(caught.value, RevealError) == mine
        assert peers.traffic.sums == 2
        assert not member.optimizer.displacement().any()
        return member

    monkeypatch.setattr(PrivacyLedger, "_charge", fail_at_one)
    members = run(work)
    assert [each.privacy.spent().openings for each in members] == [1, 2, 2]  # the others' keys had left


def test_total_that_no_honest_members_produce_is_refused_by_all() -> None:
    def work(peers: Peers) -> None:
        model, member = begin(peers, clip=0.01)
        if peers.me == "participant-2":
            large = torch.full((DIMENSION,), 1e9, dtype=torch.float64)
            member.privacy.gradient = lambda *_: large  # type: ignore[method-assign]
        x, y = data(int(peers.me[-1]), SAMPLES)
        nn.functional.mse_loss(model(x), y).backward()
        with pytest.raises(IntegrityError, match="a member entered more than clipped gradients"):
            member.optimizer.step()
        assert not member.optimizer.displacement().any()

    run(work)


def test_budget_file_is_shared_by_all_trainings_on_the_records(tmp_path: Path) -> None:
    def work(peers: Peers) -> None:
        path = tmp_path / peers.me
        first = train(peers, samples=8, budget=path, training="first")
        file = first.privacy.budget_file
        assert file is not None
        assert [each.what for each in file.charges] == ["the number of records", "a step"]
        with pytest.raises(InputError, match="0.* is left for a training"):
            train(peers, samples=8, budget=path)
        file.raise_limit(24.0)
        second = train(peers, samples=8, budget=path, epsilon=1.0)
        assert second.privacy.spent().openings == 2
        assert len(second.privacy.budget_file.charges) == 4  # type: ignore[union-attr]

    run(work)


def test_two_processes_of_a_training_do_not_exceed_its_budget(tmp_path: Path) -> None:
    settings, path = PrivacySettings(1.0, 1e-5, 10, reruns=0), tmp_path / "records.budget"
    BudgetFile(path, 1.0, 1e-5).raise_limit(8.0)

    def charge(ledger: PrivacyLedger) -> None:
        with pytest.raises(BudgetSpentError):
            while True:
                ledger._charge(settings.step_mu**2, "a step", TRAINING)

    def work(peers: Peers) -> None:
        if peers.me == peers.members[0]:
            one, other = (PrivacyLedger(settings, path, "study") for _ in range(2))
            one.begin(peers)
            other.begin(peers)
            charge(one)
            charge(other)

    run(work)
    charges = BudgetFile(path, 1.0, 1e-5, None).charges
    assert len(charges) == settings.budget().mu_squared // settings.step_mu**2


def test_loaded_state_does_not_reset_the_budget(tmp_path: Path) -> None:
    def work(peers: Peers) -> None:
        before = train(peers, taken=2, samples=8, budget=tmp_path / peers.me, training="one")
        state = before.optimizer.state_dict()
        options: list[dict[str, Any]] = [
            {},
            {"budget": tmp_path / f"{peers.me}-other"},
            {"budget": tmp_path / peers.me},
        ]
        for each in options:
            _, other = begin(peers, samples=8, **each)
            with pytest.raises(InputError, match="at least 3 openings of this training"):
                other.optimizer.load_state_dict(state)
        model, after = begin(peers, samples=8, budget=tmp_path / peers.me, training="one")
        after.optimizer.load_state_dict(state)
        assert after.privacy.spent() == before.privacy.spent()
        x, y = data(int(peers.me[-1]))
        nn.functional.mse_loss(model(x), y).backward()
        after.optimizer.step()
        assert after.privacy.spent().openings == 4
        before.optimizer.load_state_dict(state)  # back, in the same process: nothing is taken back
        assert before.privacy.spent().openings == 3

    run(work)


def test_spent_before_the_first_step_is_nothing() -> None:
    privacy = cgd.Privacy(Network(), **TIGHT)
    assert privacy.spent() == (0.0, 1e-5, 0.0, 0)


def test_repeated_count_does_not_show_whether_the_number_of_records_changed() -> None:
    """Without noise there are only commitments; a commitment to the number would be equal if the number is."""

    def member(peers: Peers, samples: int) -> list[Any]:
        _, trained = begin(peers, samples=SAMPLES, steps=4)
        seen = []
        for number in (SAMPLES, samples):
            trained.optimizer.samples = number
            trained.optimizer.recount()
            trained.optimizer.zero_grad()
            x, y = data(0, number)
            nn.functional.mse_loss(trained.privacy._gradients._model(x), y).backward()
            trained.optimizer.step()
            seen.append(trained.optimizer.param_groups[0]["pledges"])
        return seen

    with cgd.local_peers(3) as members:
        for seen in members.run(member, [SAMPLES, SAMPLES - 1, SAMPLES]):
            assert seen == [[0, 0, 0], [0, 0, 0]]
