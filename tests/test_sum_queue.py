"""The queue of a member's sums."""

from __future__ import annotations

import threading

import pytest

from cgd.sum_queue import SumQueue

DEADLINE_SECONDS = 120.0


def test_functions_run_in_the_order_of_submission() -> None:
    queue, ran = SumQueue("ada"), list[int]()
    queued = [queue.submit(lambda number=number: ran.append(number)) for number in range(20)]  # type: ignore[misc]
    queue.result(queued[-1])
    assert ran == list(range(20))


def test_failed_function_stops_the_queue_until_it_is_tried_again() -> None:
    queue, ran, failures = SumQueue("ada"), list[str](), [ValueError("first"), ValueError("second")]

    def fails() -> str:
        if failures:
            raise failures.pop(0)
        ran.append("one")
        return "one"

    one, two = queue.submit(fails), queue.submit(lambda: ran.append("two"))
    with pytest.raises(ValueError, match="first"):
        queue.result(two)
    assert ran == []
    with pytest.raises(ValueError, match="second"):
        queue.wait()
    assert queue.result(one) == "one"
    queue.result(two)
    assert ran == ["one", "two"]


def test_function_in_order_runs_after_those_in_progress_and_at_once_if_there_are_none() -> None:
    queue, ran, go = SumQueue("ada"), list[str](), threading.Event()
    queue.in_order(lambda: ran.append("now"))
    assert ran == ["now"]
    queue.submit(lambda: go.wait(DEADLINE_SECONDS), wanted=False)
    queue.in_order(lambda: ran.append("later"))
    assert ran == ["now"]
    go.set()
    queue.wait()
    assert ran == ["now", "later"]


def test_function_may_use_the_queue_itself() -> None:
    """As a sum does that aborts another one: it must not wait for itself."""
    queue, ran = SumQueue("ada"), list[str]()

    def one() -> None:
        queue.wait()
        queue.in_order(lambda: ran.append("within"))

    queue.result(queue.submit(one))
    assert ran == ["within"]


def test_end_waits_and_warns_of_results_that_were_not_taken() -> None:
    queue = SumQueue("ada")
    for _ in range(2):
        queue.submit(lambda: None)
    with pytest.warns(UserWarning, match=r"ada ends with 2 gradient sums .* call optimizer.drain\(\)|Call optimizer"):
        queue.finish()
    queue.finish()  # once


def test_end_does_not_wait_for_a_failed_sum() -> None:
    queue = SumQueue("ada")

    def fails() -> None:
        raise ValueError("it failed")

    queued = queue.submit(fails)
    with pytest.raises(ValueError, match="it failed"):
        queue.result(queued)
    with pytest.warns(UserWarning, match="1 gradient sum that"):
        queue.finish()
