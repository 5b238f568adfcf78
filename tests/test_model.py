"""The model in models/views.pml: the laws hold in it, and its conditions are those of the code."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cgd.errors import LocalProtocolError
from cgd.secagg.certificates import PendingReveal, acceptable
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.positions import GroupRow
from cgd.secagg.view_change import ViewChange

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "models"))
import check  # noqa: E402 - it is a script

pytestmark = pytest.mark.skipif(bool(check.missing_tools()), reason="the model needs spin and gcc")

PLACE = 1
NAMES = "abc"
GROUP = "everyone"

Values = dict[tuple[int, ...], bool]


def digest(*what: Any) -> bytes:
    return sha256(repr(what).encode()).digest()


def opening(attempt: int) -> bytes | None:
    return digest("attempt", attempt) if attempt else None


def row(length: int, head: int = 1, mark: int = 0) -> GroupRow:
    return GroupRow(length, digest("head", head), opening(mark), bytes(32))


def names(mask: int) -> tuple[str, ...]:
    return tuple(name for place, name in enumerate(NAMES) if mask >> place & 1)


@cache
def table() -> dict[str, Values]:
    """The values of the model's conditions: what they depend on, and what comes out."""
    done = subprocess.run(["spin", "-T", "-DTABLE", str(check.MODEL)], check=True, text=True, capture_output=True)
    found: dict[str, Values] = {}
    for line in done.stdout.splitlines():
        kind, *numbers = line.split()
        if kind.isupper():
            *given, value = map(int, numbers)
            found.setdefault(kind, {})[tuple(given)] = bool(value)
    return found


def compare(kind: str, code: Values) -> None:
    """The model and the code say the same, and neither says always the same."""
    model = table()[kind]
    assert model.keys() == code.keys()
    assert {given: (model[given], code[given]) for given in code if model[given] != code[given]} == {}
    assert len(set(code.values())) == 2


def test_a_report_speaks_against_an_attempt_in_the_model_as_in_the_code() -> None:
    code: Values = {}
    for length, head, mark, took_part, signer in product(range(4), (1, 2), range(3), (0, 1), (0, 1)):
        own, rows = row(PLACE, 0, took_part), {"b": row(length, head, mark)}
        found = acceptable(PLACE, digest("attempt", 1), digest("head", 1), own, rows, {"b"} if signer else ())
        code[length, head, mark, took_part, signer] = bool(found)
    compare("AGAINST", code)


def test_a_mark_binds_members_in_the_model_as_in_the_code() -> None:
    code: Values = {}
    for marked, members, present in product((0, 1), range(1, 8), range(1, 8)):
        journal = Journal()
        journal.mark = PendingReveal(PLACE, names(members), digest("attempt", 1)) if marked else None
        try:
            Group(GROUP, names(present), journal)._check_mark()
        except LocalProtocolError:
            code[marked, members, present] = False
        else:
            code[marked, members, present] = True
    compare("MAY_ENTER", code)


def test_a_certificate_is_taken_in_the_model_as_in_the_code() -> None:
    code: Values = {}
    for members, mark, past, length, other, head in product(range(1, 4), range(3), (0, 1), range(3), range(3), (1, 2)):
        ours, peers = row(past, 0, mark), {"b": row(length, head, other)}
        side = cast("Any", object.__new__(ViewChange))
        side._me, side.reports = "a", SimpleNamespace(rows=lambda _, peers=peers: peers)
        signers = frozenset(names(members))
        journal_transfer = SimpleNamespace(
            holder="c", members=signers, signers=signers, claim=row(PLACE + 1), opening=digest("attempt", 1)
        )
        against = side._speaks_against(SimpleNamespace(name=GROUP), journal_transfer, ours)
        code[members, mark, past, length, other, head] = not against
    compare("ACCEPTS", code)


QUICK = [run for run in check.RUNS if not run.long]
LONG = [run for run in check.RUNS if run.long]


def _check(run: check.Run, out: Path) -> None:
    found = check.execute(run, out)
    assert found.outcome == run.expected, found


@pytest.mark.parametrize("run", [run for run in QUICK if run.name in ("two", "late-takeover")])
def test_the_laws_hold_in_the_model_and_break_without_a_rule(run: check.Run, tmp_path: Path) -> None:
    _check(run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("run", [*QUICK, *LONG], ids=lambda run: str(run.name))
def test_all_runs_of_the_model(run: check.Run, tmp_path: Path) -> None:
    _check(run, tmp_path)
