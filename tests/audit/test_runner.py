"""Parts in worker processes: errors, crashes and interrupts."""

from __future__ import annotations

import multiprocessing

import pytest

from cgd.audit.results import AttackResult, Inapplicable
from cgd.audit.runner import run
from cgd.errors import InputError
from support.audits import Part, Progress, plan

pytestmark = pytest.mark.slow


def test_failed_and_crashed_parts_do_not_affect_others() -> None:
    parts = (
        Part("a", value=0.1),
        Part("b", does="raise"),
        Part("c", does="die"),
        Part("d", does="not apply"),
        Part("e", does="count threads"),
        Part("f", does="exit"),
        Part("g", value=0.2),
    )
    progress = Progress()
    finished = run(plan(*parts), seed=2, jobs=2, progress=progress)
    assert sorted(finished) == list(range(7))
    for place, value in ((0, 2.1), (6, 2.2)):
        (found,) = finished[place].results
        assert isinstance(found, AttackResult)
        assert found.value == pytest.approx(value)
        assert (found.chance, found.succeeds) == (0.5, True)
        assert all(address.startswith("data:image/png;base64,") for address in found.pictures.values())
        assert list(found.pictures) == ["recovered", "real"]
    assert finished[1].failure.startswith("ZeroDivisionError: a fault of the attack (audits.py, line ")
    assert "killed by signal 9" in finished[2].failure
    assert finished[3].results == (Inapplicable("cgd", "the model is not linear"),)
    (threads,) = finished[4].results
    assert isinstance(threads, AttackResult)
    assert threads.value == 1
    assert finished[5].failure == "the process ended with code 0"
    assert sorted(progress.calls) == sorted(f"{call} {part.label}" for call in ("began", "ended") for part in parts)
    assert not multiprocessing.active_children()


def test_interrupt_keeps_finished_parts_and_ends_all_processes() -> None:
    parts = (Part("a"), Part("b", does="wait"), Part("c"), Part("d"), Part("e"))
    finished = run(plan(*parts), seed=0, jobs=2, progress=Progress(interrupt_after=2))
    assert len(finished) == 2
    assert 1 not in finished
    assert not multiprocessing.active_children()


def test_plan_chooses_attacks_and_rejects_unknown_ids() -> None:
    whole = plan(Part("a"), Part("b"), Part("b", "dp2"), Part("c"))
    chosen = whole.choose(["c", "b"])
    assert [part.label for part in chosen.parts] == ["b, cgd", "b, dp2", "c, cgd"]
    assert [each.id for each in chosen.attacks] == ["b", "c"]
    assert chosen.command(7) == "cgd audit --only b --only c --seed 7"
    assert whole.choose([]) == whole
    with pytest.raises(InputError, match="no attack 'x' here; choose from a, b, c"):
        whole.choose(["a", "x"])
