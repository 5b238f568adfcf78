"""The Spin model in models/views.pml: its invariants hold, and its conditions are those of the code."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cgd.errors import LocalProtocolError
from cgd.secagg.certificates import PendingReveal, find_objections
from cgd.secagg.group import Group, PendingSum
from cgd.secagg.journal import Journal
from cgd.secagg.positions import GroupPosition
from cgd.secagg.view_change import ViewChange
from support.wire import spec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "models"))
import check  # noqa: E402 - a script

pytestmark = pytest.mark.skipif(bool(check.missing_tools()), reason="the model needs spin and gcc")

INDEX = 1
NAMES = "abc"
GROUP = "everyone"

Values = dict[tuple[int, ...], bool]


def digest(*what: Any) -> bytes:
    return sha256(repr(what).encode()).digest()


def attempt_digest(attempt: int) -> bytes | None:
    return digest("attempt", attempt) if attempt else None


def position(length: int, head: int = 1, pending: int = 0) -> GroupPosition:
    return GroupPosition(length, digest("head", head), attempt_digest(pending), bytes(32))


def names(mask: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(NAMES) if mask >> i & 1)


@cache
def table() -> dict[str, Values]:
    """Return the values of the model's conditions for all values of their parameters."""
    done = subprocess.run(["spin", "-T", "-DTABLE", str(check.MODEL)], check=True, text=True, capture_output=True)
    found: dict[str, Values] = {}
    for line in done.stdout.splitlines():
        kind, *numbers = line.split()
        if kind.isupper():
            *given, value = map(int, numbers)
            found.setdefault(kind, {})[tuple(given)] = bool(value)
    return found


def compare(kind: str, code: Values) -> None:
    """Check that model and code have the same values, and that the condition is not constant."""
    model = table()[kind]
    assert model.keys() == code.keys()
    assert {given: (model[given], code[given]) for given in code if model[given] != code[given]} == {}
    assert len(set(code.values())) == 2


def test_objections_of_reports_are_the_same_in_model_and_code() -> None:
    code: Values = {}
    for length, head, pending, took_part, signer in product(range(4), (1, 2), range(3), (0, 1), (0, 1)):
        own, positions = position(INDEX, 0, took_part), {"b": position(length, head, pending)}
        signers = {"b"} if signer else ()
        found = find_objections(INDEX, digest("attempt", 1), digest("head", 1), own, positions, signers)
        code[length, head, pending, took_part, signer] = bool(found)
    compare("AGAINST", code)


def test_pending_reveal_restricts_members_equally_in_model_and_code() -> None:
    code: Values = {}
    pending_sum = PendingSum(spec(1), lambda: np.zeros(1, dtype="<u4"), 1, None)
    for pending, members, present in product((0, 1), range(1, 8), range(1, 8)):
        journal = Journal()
        journal.pending_reveal = PendingReveal(INDEX, names(members), digest("attempt", 1)) if pending else None
        try:
            Group(GROUP, names(present), journal)._check_revealed(pending_sum)
        except LocalProtocolError:
            code[pending, members, present] = False
        else:
            code[pending, members, present] = True
    compare("MAY_ENTER", code)


def test_acceptance_of_certificates_is_the_same_in_model_and_code() -> None:
    code: Values = {}
    values = product(range(1, 4), range(3), (0, 1), range(3), range(3), (1, 2))
    for members, own_pending, own_length, length, pending, head in values:
        own, positions = position(own_length, 0, own_pending), {"b": position(length, head, pending)}
        view_change = cast("Any", object.__new__(ViewChange))
        view_change._federation_spec = SimpleNamespace(quorum=None)
        view_change._me, view_change.reports = "a", SimpleNamespace(positions=lambda _, found=positions: found)
        signers = frozenset(names(members))
        transfer = SimpleNamespace(
            source="c", members=signers, signers=signers, claimed=position(INDEX + 1), attempt=digest("attempt", 1)
        )
        objections = view_change._find_objections(SimpleNamespace(name=GROUP), transfer, own)
        code[members, own_pending, own_length, length, pending, head] = not objections
    compare("ACCEPTS", code)


QUICK = [run for run in check.RUNS if not run.long]
LONG = [run for run in check.RUNS if run.long]


def _check(run: check.Run, out: Path) -> None:
    found = check.execute(run, out)
    assert found.outcome == run.expected, found


@pytest.mark.slow
@pytest.mark.parametrize("run", [*QUICK, *LONG], ids=lambda run: str(run.name))
def test_all_model_runs_have_the_expected_outcome(run: check.Run, tmp_path: Path) -> None:
    _check(run, tmp_path)
