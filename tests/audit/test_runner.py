"""Parts in processes: what happens when they fail, die or are interrupted."""

from __future__ import annotations

import multiprocessing

import pytest

from cgd.audit.runner import Measured, run
from cgd.audit.view import Inapplicable
from cgd.errors import InputError
from support.audits import Part, ProgressListener, plan

pytestmark = pytest.mark.slow


def test_a_failure_or_a_death_loses_nothing_else() -> None:
    parts = (
        Part("a", value=0.1),
        Part("b", does="raise"),
        Part("c", does="die"),
        Part("d", does="refuse"),
        Part("e", does="count threads"),
        Part("f", value=0.2),
    )
    watch = ProgressListener()
    outcome = run(plan(*parts), seed=2, jobs=2, watch=watch)
    assert sorted(outcome.done) == list(range(6))
    for place, value in ((0, 2.1), (5, 2.2)):
        (found,) = outcome.done[place].findings[parts[place].attack]
        assert isinstance(found, Measured)
        assert found.value == pytest.approx(value)
        assert (found.chance, found.succeeds) == (0.5, True)
        assert all(picture.startswith(b"\x89PNG") for picture in found.pictures.values())
        assert list(found.pictures) == ["recovered", "real"]
    assert outcome.done[1].failure.startswith("ZeroDivisionError: a fault of the attack (audits.py, line ")
    assert "killed by signal 9" in outcome.done[2].failure
    assert outcome.done[3].findings["d"] == (Inapplicable("cgd", "the model is not linear"),)
    (threads,) = outcome.done[4].findings["e"]
    assert isinstance(threads, Measured)
    assert threads.value == 1
    assert sorted(watch.seen) == sorted(f"{what} {part.label}" for what in ("began", "ended") for part in parts)
    assert not multiprocessing.active_children()


def test_an_interrupt_keeps_what_is_done_and_leaves_no_process() -> None:
    parts = (Part("a"), Part("b", does="wait"), Part("c"), Part("d"), Part("e"))
    outcome = run(plan(*parts), seed=0, jobs=2, watch=ProgressListener(interrupt_after=2))
    assert len(outcome.done) == 2
    assert 1 not in outcome.done
    assert not multiprocessing.active_children()


def test_what_is_asked_for_is_chosen_and_anything_else_refused() -> None:
    whole = plan(Part("a"), Part("b"), Part("b", "dp"), Part("c"))
    chosen = whole.choose(["c", "b"])
    assert [part.label for part in chosen.parts] == ["b, cgd", "b, dp", "c, cgd"]
    assert [each.id for each in chosen.attacks] == ["b", "c"]
    assert chosen.command(7) == "cgd audit --only b --only c --seed 7"
    assert whole.choose([]) == whole
    with pytest.raises(InputError, match="no attack 'x' here; choose from a, b, c"):
        whole.choose(["a", "x"])
