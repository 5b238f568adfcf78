"""The ranks of one job over real gloo groups, a thread for each rank: results, errors, lost and silent ranks."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from cgd.errors import InputError, MembersChangedError, PeerTimeoutError, RangeError, RankError
from cgd.federation.member import FederationMember
from cgd.federation.process_group import ProcessGroupRanks, ranks_of_job
from cgd.optim.grid import Grid
from cgd.transport.ranks import Ranks, add_weighted
from support.in_process import new_federation
from support.ranks import run_on_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_all_ranks_get_what_rank_0_computes_and_nobody_else_computes_it() -> None:
    calls = []

    def program(ranks: ProcessGroupRanks) -> Any:
        def action() -> tuple[Any, bytes]:
            calls.append(ranks.rank)
            return {"epoch": 3}, bytes(range(256)) * 1000

        return ranks.lead("ask", action), ranks.exchange("gather", own=ranks.rank + 10)

    results = run_on_ranks(3, program)
    assert calls == [0]
    for (value, content), found in results:
        assert value == {"epoch": 3}
        assert content == bytes(range(256)) * 1000
        assert [each["own"] for each in found] == [10, 11, 12]


def test_values_are_added_in_the_order_of_the_ranks_and_rounded_once() -> None:
    big = 2**60 + 1  # not exact as a float

    def program(ranks: ProcessGroupRanks) -> Any:
        values = np.random.default_rng(ranks.rank).normal(size=(5, 3)).astype(np.float32)
        mean = ranks.add(values, [0.5, 0.3, 0.2])
        integers, _ = add_weighted(ranks, np.array([big, ranks.rank]), None)
        return values, mean, integers, ranks.add(np.array(0.5))

    results = run_on_ranks(3, program)
    wide = [values.astype(np.float64) for values, *_ in results]
    expected = (wide[0] * 0.5 + wide[1] * 0.3 + wide[2] * 0.2).astype(np.float32)
    for _, mean, integers, number in results:
        assert mean.tobytes() == expected.tobytes()
        assert mean.shape == (5, 3)
        assert integers.tolist() == [3 * big, 3]
        assert number.shape == ()
        assert number == 1.5


def test_weights_of_ranks_add_up_and_weight_their_values() -> None:
    results = run_on_ranks(2, lambda ranks: add_weighted(ranks, np.array([8.0, 0.0])[ranks.rank :][:1], 0.1))
    assert [(values.tolist(), weight) for values, weight in results] == [([4.0], 0.2)] * 2
    shapes = run_on_ranks(2, lambda ranks: add_weighted(ranks, np.zeros(2 + ranks.rank), None))
    assert all("rank 1: it has values of float64 of shape (3,)" in str(error) for error in shapes)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (RangeError(99.0, (2,), 16.0), ("value", "index", "bound")),
        (MembersChangedError(1, 2, ["b", "a"]), ("members",)),
        (PeerTimeoutError(["b"], 3.0, "Ready", "wait"), ("peers",)),
    ],
)
def test_an_error_of_rank_0_is_the_same_on_all_ranks(error: Exception, attributes: tuple[str, ...]) -> None:
    def program(ranks: ProcessGroupRanks) -> Any:
        def action() -> tuple[Any, bytes]:
            raise error

        with pytest.raises(type(error)) as raised:
            ranks.lead("ask", action)
        ranks.report(raised.value)  # known to all: nothing is exchanged
        return raised.value, ranks.exchange("go on")

    for found, _ in run_on_ranks(2, program):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert all(getattr(found, each) == getattr(error, each) for each in attributes)


def test_another_error_of_rank_0_names_it() -> None:
    def program(ranks: ProcessGroupRanks) -> Any:
        return ranks.lead("ask", lambda: (dict[int, int]()[1], b""))

    first, second = run_on_ranks(2, program)
    assert isinstance(first, KeyError)
    assert isinstance(second, RankError)
    assert (str(second), second.rank) == ("rank 0: KeyError: 1", 0)


def test_while_rank_0_waits_it_tells_the_others_so() -> None:
    signs, enough = [], threading.Event()

    def program(ranks: ProcessGroupRanks) -> Any:
        send = ranks._send_waiting

        def count() -> None:
            send()
            signs.append(1)
            if len(signs) == 3:
                enough.set()

        ranks._send_waiting = count  # type: ignore[method-assign]
        return ranks.lead("ask", lambda: (enough.wait(), b""))

    assert run_on_ranks(2, program) == [(True, b"")] * 2
    assert len(signs) >= 3


def test_a_rank_that_is_lost_ends_the_wait_of_rank_0() -> None:
    waiting, interrupted = threading.Event(), threading.Event()

    def program(ranks: ProcessGroupRanks) -> Any:
        if ranks.rank == 1:
            ranks.exchange("ask")
            waiting.wait()
            return None  # its end closes the connection

        def action() -> tuple[Any, bytes]:
            waiting.set()
            return interrupted.wait(), b""

        return ranks.lead("ask", action, interrupted.set)

    lost, _ = run_on_ranks(2, program)
    assert isinstance(lost, RankError)
    assert "rank 0 has lost the connection to another rank of this job" in str(lost)


def test_a_silent_rank_is_an_error_after_the_timeout_of_the_group() -> None:
    over = threading.Event()

    def program(ranks: ProcessGroupRanks) -> Any:
        if ranks.rank == 1:
            over.wait()
            return None
        ranks._group._set_default_timeout(timedelta(seconds=0.1))
        try:
            return ranks.exchange("ask")
        finally:
            over.set()

    silent, _ = run_on_ranks(2, program)
    assert isinstance(silent, RankError)
    assert "does not answer" in str(silent)


def test_ranks_that_make_different_calls_get_an_error() -> None:
    first, second = run_on_ranks(2, lambda ranks: ranks.exchange(f"join as {'ab'[ranks.rank]}"))
    assert isinstance(first, RankError)
    assert "rank 1: it is at 'join as b' while rank 0 is at 'join as a'" in str(first)
    assert "rank 0: it is at 'join as a' while rank 1 is at 'join as b'" in str(second)


def test_a_rank_that_fails_tells_the_others_why() -> None:
    def program(ranks: ProcessGroupRanks) -> Any:
        if ranks.rank == 1:
            ranks.report(InputError("a bad record " + "\N{SNOWMAN WITHOUT SNOW}" * 5000))
            return None
        return ranks.exchange("step")

    first, _, third = run_on_ranks(3, program)
    for error in (first, third):
        assert isinstance(error, RankError)
        assert str(error).startswith("rank 1: InputError: a bad record \N{SNOWMAN WITHOUT SNOW}")


def test_a_rank_without_a_process_group_does_not_join_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"rank 1 of a job of 2 .* call torch.distributed.init_process_group\(\)"):
        ranks_of_job()
    monkeypatch.delitem(sys.modules, "torch.distributed")
    with pytest.raises(InputError, match="rank 1 of a job of 2"):
        ranks_of_job()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks_of_job().size == 1


def test_a_participant_of_a_grid_is_one_process(tmp_path: Path) -> None:
    path = new_federation(tmp_path, "abcdef", Grid(3, 2).cells)
    with pytest.raises(InputError, match="is a grid, in which a participant is one process and not a job of 2 ranks"):
        FederationMember(path, "a", ranks=cast("Ranks", SimpleNamespace(size=2)))
