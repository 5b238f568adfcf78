"""Batches: the same number at every member, from its secret seed, with the right expectation."""

from __future__ import annotations

from contextlib import ExitStack
from fractions import Fraction
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cgd import (
    JOINT_REVEALS_RECORDS,
    BatchSampler,
    Cell,
    ConfinedSGD,
    InputError,
    Peers,
    SettingsError,
    confine,
    local_peers,
)
from cgd.optim import minibatches
from cgd.optim.minibatches import draw_batches, round_batches
from cgd.optim.privacy_warnings import FirstLayer, find_warnings
from cgd.optim.vertical import JointFirstLayer
from support.in_process import InProcessFederation, new_federation, uninterrupted_results
from support.training import Network, data, mse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.in_process import MemberProcess

seeds = st.binary(min_size=32, max_size=32)


@given(seeds, st.integers(0, 5), st.integers(1, 40), st.integers(1, 12))
def test_batches_of_an_epoch_are_a_partition_of_the_records(
    seed: bytes, epoch: int, samples: int, batches: int
) -> None:
    drawn = draw_batches(seed, epoch, samples, batches)
    sizes = [len(batch) for batch in drawn]
    assert len(drawn) == batches
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    counts = np.bincount([record for batch in drawn for record in batch], minlength=samples)
    if samples >= batches:
        assert (counts == 1).all()
    else:  # no record is used a second time before all others
        assert counts.max() - counts.min() <= 1


def test_batches_depend_on_the_seed_and_the_epoch() -> None:
    first, again = (draw_batches(bytes(32), 3, 50, 5) for _ in range(2))
    assert first == again
    assert first != draw_batches(bytes(32), 4, 50, 5)
    assert first != draw_batches(b"1" * 32, 3, 50, 5)


@given(seeds, st.integers(0, 5), st.integers(1, 20), st.integers(1, 6), st.integers(1, 3))
def test_a_round_uses_one_batch_or_all_of_its_local_epochs(
    seed: bytes, number: int, samples: int, batches: int, epochs: int
) -> None:
    (batch,) = round_batches(seed, number, samples, batches)
    assert batch == draw_batches(seed, number // batches, samples, batches)[number % batches]
    local = round_batches(seed, number, samples, batches, epochs)
    first = number * epochs
    drawn = [draw_batches(seed, epoch, samples, batches) for epoch in range(first, first + epochs)]
    assert local == [batch for epoch in drawn for batch in epoch]


def test_all_permutations_are_equally_likely() -> None:
    """6 permutations, 6000 draws: chi-squared with 5 degrees of freedom exceeds 35.9 once in a million."""
    orders = [tuple(draw_batches(bytes([7] * 32), epoch, 3, 1)[0]) for epoch in range(6000)]
    counts = [orders.count(each) for each in permutations(range(3))]
    assert sum(counts) == 6000
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 35.9


@pytest.mark.parametrize(("samples", "batches"), [(5, 2), (4, 2), (3, 5), (2, 3), (5, 5)])
def test_expected_mean_of_each_batch_is_the_mean_of_all_records(
    samples: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact, by enumeration of all permutations; with unequal batches, and with fewer records than batches."""
    values = [Fraction(3) ** record for record in range(samples)]
    totals, plain_epochs, count = [Fraction(0)] * batches, set(), 0
    needed = -(-batches // samples)
    for orders in permutations_of_permutations(samples, needed):
        source = iter(orders)
        monkeypatch.setattr(minibatches, "_permutation", lambda key, count: np.array(next(source)))  # noqa: B023
        drawn = draw_batches(bytes(32), 0, samples, batches)
        means = [sum((values[each] for each in batch), Fraction(0)) / len(batch) for batch in drawn]
        totals = [total + mean for total, mean in zip(totals, means, strict=True)]
        plain_epochs.add(sum(means) / batches)
        weighted = sum(mean * len(batch) for mean, batch in zip(means, drawn, strict=True))
        if samples >= batches:  # weighted by their sizes, the batches of one epoch give the full mean
            assert weighted / samples == sum(values) / samples
        count += 1
    full = sum(values) / samples
    assert [total / count for total in totals] == [full] * batches
    # Only with batches of one size is the plain mean of one epoch exact.
    assert (plain_epochs == {full}) == (samples % batches == 0 or (samples < batches and batches % samples == 0))


def permutations_of_permutations(samples: int, needed: int) -> Iterator[list[tuple[int, ...]]]:
    if needed == 0:
        yield []
        return
    for order in permutations(range(samples)):
        for rest in permutations_of_permutations(samples, needed - 1):
            yield [order, *rest]


def test_mean_step_of_an_epoch_is_the_gradient_of_the_mean_loss_of_all_members() -> None:
    """With batches of one size: 4, 8 and 12 records in 4 batches, the weights unchanged by lr=0."""
    samples = (4, 8, 12)

    def work(peers: Peers, number: int) -> tuple[torch.Tensor, nn.Module]:
        model = Network(torch.float64)
        confine(model, delta=0.1, seed=bytes(32), start="zeros")  # the same for all, so that there is one full gradient
        optimizer = ConfinedSGD(model.parameters(), lr=0.0, peers=peers, samples=samples[number], momentum=0.5)
        sampler = BatchSampler(optimizer, batches=4)
        loader = DataLoader(TensorDataset(*data(number, samples[number], torch.float64)), batch_sampler=sampler)
        total = torch.zeros(optimizer.displacement().numel(), dtype=torch.float64)
        before = total
        for _, (x, y) in sampler.steps(loader, epochs=1):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            buffers = [optimizer.state[each]["momentum_buffer"].reshape(-1) for each in model.parameters()]
            velocity = torch.cat(buffers)
            total = total + (velocity - 0.5 * before)
            before = velocity
        return total / 4, model

    with local_peers(3, ring_bits=64) as members:
        results = members.run(work, range(3))
    model = results[0][1]
    model.zero_grad()
    parts = [data(number, count, torch.float64) for number, count in enumerate(samples)]
    mse(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
    full = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
    assert full.abs().max() > 0.01
    torch.testing.assert_close(results[0][0], full, rtol=1e-9, atol=1e-9)


class PrefetchingLoader:
    """Reads batches ahead, as the workers of a `DataLoader` do."""

    def __init__(self, batch_sampler: BatchSampler, ahead: int = 3) -> None:
        self.batch_sampler, self._ahead, self.dataset = batch_sampler, ahead, range(10)

    def __iter__(self) -> Iterator[list[int]]:
        source, read = iter(self.batch_sampler), list[list[int]]()
        while True:
            while len(read) <= self._ahead:
                following = next(source, None)
                if following is None:
                    yield from read
                    return
                read.append(following)
            yield read.pop(0)


def test_loop_over_epochs_and_loop_over_steps_have_the_same_batches() -> None:
    def work(peers: Peers) -> None:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=peers, samples=10)
        sampler = BatchSampler(optimizer, batches=4)
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler)
        by_epoch = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert len(loader) == 4
            by_epoch += [batch.tolist() for (batch,) in loader]
        by_step, numbers = [], []
        ahead: Any = PrefetchingLoader(sampler)
        for step, batch in sampler.steps(ahead, epochs=3):
            numbers.append(step)
            by_step.append(batch)
            optimizer.step()
        assert numbers == list(range(12))
        assert by_step == by_epoch

    with local_peers(3) as members:
        members.run(work)


@pytest.mark.slow
def test_worker_processes_of_a_loader_do_not_change_the_batches() -> None:
    def work(peers: Peers) -> None:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=peers, samples=10)
        sampler = BatchSampler(optimizer, batches=4)
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn", "prefetch_factor": 4}
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler, **options)
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found += [batch.tolist() for (batch,) in loader]
        assert found == [*draw_batches(peers.seed, 0, 10, 4), *draw_batches(peers.seed, 1, 10, 4)]

    with local_peers(3) as members:
        work(members[0])


def test_different_numbers_of_batches_are_reported_before_anything_is_opened() -> None:
    def work(peers: Peers) -> str:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=0.1, peers=peers, samples=10)
        BatchSampler(optimizer, batches=5 if peers.me == "participant-2" else 4)
        parameter.grad = torch.ones(1)
        try:
            optimizer.step()
        except SettingsError as error:
            return str(error)
        return "no error"

    with local_peers(3) as members:
        errors = members.run(work)
    assert all("participant-2: " in error and "ConfinedSGD in 5 batches" in error for error in errors)


@pytest.mark.parametrize("batches", [0, -1, 2.5, True])
def test_invalid_number_of_batches_is_rejected(batches: Any) -> None:
    with local_peers(3) as members:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=10)
        with pytest.raises(InputError, match=f"batches is {batches!r}"):
            BatchSampler(optimizer, batches)


def test_sampler_without_an_epoch_and_foreign_loaders_are_rejected() -> None:
    with local_peers(3) as members:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=10)
        sampler = BatchSampler(optimizer, batches=4)
        with pytest.raises(InputError, match=r"call set_epoch\(epoch\) at the beginning"):
            iter(sampler)
        with pytest.raises(InputError, match="the loader has another sampler"):
            next(sampler.steps(DataLoader(TensorDataset(torch.arange(10))), epochs=1))
        with pytest.raises(InputError, match="the loader has another sampler"):
            next(sampler.steps([], epochs=1))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="first is 4, and an epoch has 4 batches, counted from 0"):
            sampler.set_epoch(0, 4)


@pytest.mark.parametrize("number", [-1, 1.0, True, float("nan"), None, "1"])
def test_number_that_is_no_whole_number_is_rejected(number: Any) -> None:
    """Otherwise epoch 1.0 would have other batches than epoch 1, and a loop over NaN epochs would take no step."""
    with local_peers(3) as members:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=10)
        sampler = BatchSampler(optimizer, batches=4)
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=sampler)
        message = f"is {number!r}; it must be a whole number, at least 0"
        with pytest.raises(InputError, match=f"epoch {message}"):
            sampler.set_epoch(number)
        with pytest.raises(InputError, match=f"first {message}"):
            sampler.set_epoch(0, number)
        with pytest.raises(InputError, match=f"epochs {message}"):
            next(sampler.steps(loader, epochs=number))
        with pytest.raises(InputError, match=f"count {message}"):
            next(optimizer.steps(number))


def test_other_optimisers_and_rows_that_are_no_peers_are_rejected() -> None:
    with local_peers(3) as members:
        parameters = [nn.Parameter(torch.zeros(1))]
        with pytest.raises(InputError, match="the optimiser is a SGD; pass the confined optimiser"):
            BatchSampler(torch.optim.SGD(parameters), batches=2)  # type: ignore[arg-type]
        optimizer = ConfinedSGD(parameters, lr=0.1, peers=members[0], samples=10)
        with pytest.raises(InputError, match=r"row is a int; it is the Peers of a row of a grid"):
            BatchSampler(optimizer, batches=2, row=3)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_accepted() -> None:
    with local_peers(3) as members:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=10)
        samplers = [BatchSampler(optimizer, batches=2) for _ in range(2)]
        for sampler, epoch in zip(samplers, (3, np.int64(3)), strict=True):
            sampler.set_epoch(epoch)  # type: ignore[arg-type]
        assert list(samplers[0]) == list(samplers[1])


@pytest.mark.parametrize("records", [9, 11, 1])
def test_data_set_with_another_number_of_records_is_rejected(records: int) -> None:
    """Records that are not counted would never be used, or batches would have records that do not exist."""
    with local_peers(3) as members:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=members[0], samples=10)
        sampler = BatchSampler(optimizer, batches=4)
        loader = DataLoader(TensorDataset(torch.arange(records)), batch_sampler=sampler)
        with pytest.raises(InputError, match=f"the data set has {records} records and the optimiser has samples=10"):
            next(sampler.steps(loader, epochs=1))


# Rows of a grid, whose members hold different features of the same records.


def in_rows(work: Callable[[Peers, Peers], Any], rows: int = 1) -> list[Any]:
    """Run members with their peers in everyone, and in their row of three."""
    with ExitStack() as stack:
        names = [[f"r{row}c{column}" for column in range(3)] for row in range(rows)]
        everyone = stack.enter_context(local_peers([each for row in names for each in row]))
        own = [peers for row in names for peers in stack.enter_context(local_peers(row))]
        return everyone.run(work, own)


@pytest.mark.parametrize("shared", [True, False])
def test_joint_row_adds_pre_activations_of_the_same_records(shared: bool) -> None:
    """Feature and weight of each member are such that the sum is three times the number of the record."""

    def work(peers: Peers, row: Peers) -> str:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        joint = JointFirstLayer(layer, row, accept=JOINT_REVEALS_RECORDS)
        optimizer = ConfinedSGD(joint.parameters(), lr=0.0, peers=peers, samples=10)
        sampler = BatchSampler(optimizer, batches=3, row=row if shared else None)
        loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_sampler=sampler)
        try:
            for _, (records,) in sampler.steps(loader, epochs=2):
                optimizer.zero_grad()
                outputs = joint(records[:, None])
                torch.testing.assert_close(outputs.detach()[:, 0], 3 * records, rtol=0, atol=1e-4)
                outputs.mean().backward()
                optimizer.step()
        except InputError as error:
            return str(error)
        return ""

    if shared:
        assert in_rows(work) == [""] * 3
    else:
        assert all("JointFirstLayer" in error and "pass row=" in error for error in in_rows(work))


def test_rows_have_different_batches_that_depend_on_the_seed_of_each_member() -> None:
    def work(peers: Peers, row: Peers) -> list[list[int]]:
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=peers, samples=20)
        sampler = BatchSampler(optimizer, batches=4, row=row)
        sampler.set_epoch(0)
        return list(sampler)

    def with_seeds(*seeds: int) -> list[list[list[int]]]:
        def seeded(peers: Peers, row: Peers) -> list[list[int]]:
            peers.seed = bytes([seeds[int(peers.me[-1])]]) * 32
            return work(peers, row)

        return in_rows(seeded)

    found = in_rows(work, rows=2)
    first, second = found[:3], found[3:]
    for row in (first, second):
        assert row[0] == row[1] == row[2]
        assert sorted(record for batch in row[0] for record in batch) == list(range(20))
    assert first != second
    assert with_seeds(1, 2, 3) == with_seeds(1, 2, 3)  # after a restart
    assert with_seeds(1, 2, 3)[0] != with_seeds(1, 2, 4)[0]


@pytest.mark.parametrize("odd", [{"samples": 21}, {"batches": 5}])
def test_members_of_a_row_with_other_records_or_batches_are_reported(odd: dict[str, int]) -> None:
    def work(peers: Peers, row: Peers) -> str:
        own = {"samples": 20, "batches": 4, **(odd if peers.me == "r0c2" else {})}
        optimizer = ConfinedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, peers=peers, samples=own["samples"])
        try:
            BatchSampler(optimizer, own["batches"], row=row)
        except SettingsError as error:
            return str(error)
        return ""

    assert all("r0c2: " in error and "records in" in error for error in in_rows(work))


@pytest.mark.parametrize("lose_state", [False, True])
def test_restarted_member_of_a_row_has_the_batches_of_its_row(tmp_path: Path, lose_state: bool) -> None:
    def program(process: MemberProcess) -> list[list[int]]:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = ConfinedSGD([parameter], lr=0.1, peers=process.peers, samples=8)
        sampler = BatchSampler(optimizer, batches=4, row=process.peers.groups["row"])
        sampler.set_epoch(0)
        batches = list(sampler)
        for step in range(len(batches)):
            process.at_step(step)
            parameter.grad = torch.ones(1)
            optimizer.step()
        return batches

    cells = [Cell(row, column) for row in range(3) for column in range(3)]
    path = new_federation(tmp_path, list(map(str, cells)), cells)
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(program, pause_at=2)
        for process in federation:
            process.wait_for_step(2)
        federation.kill("r1c2", lose_state=lose_state)
        federation.start("r1c2", program)
        for process in federation:
            process.resume()
        results = federation.results()
    assert results["r1c2"] == results["r1c0"] == results["r1c1"]
    assert results["r1c2"] != results["r0c2"]


# Privacy warnings.


def test_warnings_count_the_records_of_a_batch() -> None:
    layer = FirstLayer(6, 3, relu=False)
    whole = find_warnings(280, layer, members=4, total_records=1120)
    in_ten = find_warnings(280, layer, members=4, total_records=1120, batches=10)
    in_hundred = find_warnings(280, layer, members=4, total_records=1120, batches=100)
    in_thousand = find_warnings(280, FirstLayer(6, 3), members=4, total_records=1120, batches=1000)
    assert whole == ()
    assert in_ten == ()  # 28 records: four for each input and the bias
    assert [each.kind for each in in_hundred] == ["span"]
    assert in_hundred[0].fact.startswith(
        "this participant trains on 2 records in a batch for a first layer with 6 inputs"
    )
    assert "at least 28 records of your own in a batch" in in_hundred[0].remedy
    assert [each.kind for each in in_thousand] == ["relu units", "few records", "span"]
    assert "this participant trains on 1 record in a batch; " in in_thousand[1].fact
    assert "all members together have 1 record in a batch" in in_thousand[2].fact


@pytest.mark.parametrize(("mode", "expected"), [("all", []), ("batches", ["span"]), ("local", [])])
def test_optimiser_warns_of_small_batches_and_not_of_local_steps(
    mode: str, expected: list[str], tmp_path: Path
) -> None:
    def program(process: MemberProcess) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        confine(model, start="zeros")
        optimizer = ConfinedSGD(model.parameters(), lr=0.1, peers=process.peers, samples=40)
        if mode != "all":
            BatchSampler(optimizer, batches=20)
        if mode == "local":
            with optimizer.local_steps(), torch.no_grad():
                next(model[2].parameters()).add_(1)
        else:
            optimizer.step()
        return [each.kind for each in optimizer.privacy_warnings]

    names = ("ada", "bob", "cleo")
    assert uninterrupted_results(new_federation(tmp_path, names), tmp_path / "state", program) == dict.fromkeys(
        names, expected
    )
