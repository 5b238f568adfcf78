"""The threat model: every promise names existing tests and has a mutation; figures and attacks are up to date."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from cgd.audit import verdicts
from cgd.audit.registry import ATTACKS
from mutate import Mutation, mutations
from support.pages import load_script

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "threat-model.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def numbered(letter: str) -> dict[str, str]:
    """Return the paragraphs of the promises, or of the non-promises, by number."""
    return {
        found[1]: paragraph
        for paragraph in PAGE.split("\n\n")
        if (found := re.match(rf"\*\*({letter}\d+)\. ", paragraph))
    }


PROMISES, NON_PROMISES = numbered("P"), numbered("N")


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_promises_are_numbered_without_gaps() -> None:
    assert list(PROMISES) == [f"P{number}" for number in range(1, len(PROMISES) + 1)]
    assert list(NON_PROMISES) == [f"N{number}" for number in range(1, len(NON_PROMISES) + 1)]


@pytest.mark.parametrize("number", PROMISES)
def test_every_promise_names_tests_and_has_a_mutation(number: str) -> None:
    named = TEST.findall(PROMISES[number])
    assert named
    shown = [each for each in mutations() if each.promise == number]
    assert shown
    for each in shown:
        assert set(each.tests) <= {f"{path}::{name}" for path, name in named}


def test_every_named_test_exists() -> None:
    for path, name in TEST.findall(PAGE):
        assert name in functions(path), f"{path}::{name}"


def test_named_attacks_are_those_of_the_registry() -> None:
    assert {each.id for each in ATTACKS} == set(re.findall(r"[Aa]ttack:? `(\w+)`", PAGE))


@pytest.mark.parametrize("mutation", mutations(), ids=lambda each: f"{each.promise}: {each.what}")
def test_every_mutation_fits_the_code(mutation: Mutation) -> None:
    """`make mutations` checks that the tests fail, which takes minutes."""
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.promise in PROMISES


def test_figures_on_the_page_are_those_of_the_stored_audits() -> None:
    made = load_script("threat_table")
    audits = made.audits()
    assert [each.seed for each in audits] == [0, 1, 2, 3, 4]
    for audit in audits:
        assert audit.complete
        assert not audit.failed
        assert verdicts.controls(audit)
        assert not verdicts.failed_controls(audit)
        assert {each.id for each in audit.attacks} == {each.id for each in ATTACKS}
    assert made.with_table(PAGE, audits) == PAGE
