"""Audits for tests: parts with a given behaviour for worker processes, and an example with something of everything."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch

from cgd.audit import results
from cgd.audit.attacks import gram
from cgd.audit.matching import draw
from cgd.audit.registry import Attack
from cgd.audit.results import AttackResult, Audit, Inapplicable, RecoveredRecord, RecoveredRecords, Source
from cgd.audit.runner import PartResult, Plan
from cgd.audit.schemes import observe
from cgd.audit.view import SCHEMES
from cgd.dp.sampler import IntegerGaussian

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cgd.audit import runner
    from cgd.audit.scenario import Scenario
    from cgd.audit.view import Scheme, Truth, View

WEAKER = 10**6
"""The factor by which `observe_with_weak_noise` reduces noise."""


def observe_with_weak_noise(scenario: Scenario, scheme: Scheme = "dp2") -> tuple[View, Truth]:
    """Return the view of a private training with a millionth of the noise, which the coalition knows about.

    Attacks on noisy sums must succeed on it: they fail because of the noise, and not for another reason.
    """
    draw = IntegerGaussian.draw
    with patch.object(IntegerGaussian, "draw", lambda self, count: draw(self, count) // WEAKER):
        view, truth = observe(scenario, scheme)
    return replace(view, noise=view.noise / WEAKER), truth


END = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


def attack(name: str) -> Attack:
    return Attack(
        id=name,
        title=f"Attack {name}",
        question="Do the others learn anything?",
        about="They look closely.",
        rule="they learn something",
        remedy="Add noise.",
        demonstrate=gram.attacks,
        control=gram.controls,
    )


@dataclass(frozen=True)
class Part:
    """A part with a given behaviour."""

    attack: str
    scheme: Scheme = "cgd"
    control: bool = False
    does: Literal["measure", "raise", "die", "exit", "wait", "not apply", "count threads"] = "measure"
    value: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.attack}, {self.scheme}{', controls' * self.control}"

    def run(self, seed: int) -> list[AttackResult | Inapplicable]:
        match self.does:
            case "raise":
                raise ZeroDivisionError("a fault of\nthe attack")
            case "die":
                os.kill(os.getpid(), 9)
            case "exit":
                os._exit(0)
            case "wait":
                time.sleep(3600)
            case "not apply":
                return [Inapplicable(self.scheme, "the model is not linear")]
        value = torch.get_num_threads() if self.does == "count threads" else self.value + seed
        return [result(self.attack, self.scheme, value, value > 0.6, control=self.control, pictures=pictures(seed))]


@dataclass
class Progress:
    """Records its calls, and interrupts like Ctrl-C after some parts."""

    interrupt_after: int = 10**9
    calls: list[str] = field(default_factory=list)

    def began(self, part: runner.Part) -> None:
        self.calls.append(f"began {part.label}")

    def ended(self, part: runner.Part, result: PartResult) -> None:
        self.calls.append(f"ended {part.label}")
        if sum(each.startswith("ended") for each in self.calls) >= self.interrupt_after:
            raise KeyboardInterrupt


Kind = Literal["embedded", "spec", "table", "recording"]


def plan(*parts: Part, kind: Kind = "embedded") -> Plan:
    ids = dict.fromkeys(part.attack for part in parts)
    arguments = () if kind == "embedded" else ("mine.toml",)
    schemes: dict[Scheme, str] = {**SCHEMES, "dp": "CGD, ε = 4 of the file"}
    return Plan(Source(kind, "a test", "Data of nobody."), tuple(map(attack, ids)), parts, arguments, schemes=schemes)


def assemble(plan: Plan, finished: Mapping[int, PartResult], *, seed: int = 0, seconds: float = 1.0) -> Audit:
    return results.assemble(plan, finished, seed=seed, seconds=seconds, end=END)


def result(attack: str, scheme: Scheme, value: float, succeeds: bool, **more: Any) -> AttackResult:
    given: dict[str, Any] = {"metric": "AUC", "chance": 0.5} | more
    return AttackResult(attack, scheme, value=value, succeeds=succeeds, **given)


@cache
def pictures(seed: int = 0) -> dict[str, str]:
    random = torch.Generator().manual_seed(seed)
    return draw({name: torch.rand(9, 8, 8, generator=random) for name in ("recovered", "real")})


def recovered(records: int = 20, total: int = 31, columns: int = 30) -> RecoveredRecords:
    """Records of a wide table, with long names and values."""
    names = [f"a column with a long name, number {place}" for place in range(columns)]
    real = [f"{1000 + place / 7:.3f}" for place in range(columns - 1)]
    each = [RecoveredRecord(f"line {7 * place + 2}", [*real, "missing"], [*real, "a ward"]) for place in range(records)]
    return RecoveredRecords(total, names, each)


def example(kind: Kind = "embedded", *, failed_control: bool = False, complete: bool = True) -> Audit:
    """Several schemes, variants and settings, controls, pictures, an error, and an attack that does not apply.

    An audit of a table lists records instead of pictures, and one of its attacks does not apply by all methods.
    """
    error = {"metric": "relative error", "chance": 0.295}
    share = {"metric": "records recovered", "chance": 0.0, "setting": "2 × 4 records, 3 rounds", "detail": "8 of 8"}
    lies = {"metric": "lies caught", "chance": 0.0}
    shown = [{"recovered": recovered()}, {}] if kind == "table" else [{"pictures": pictures(each)} for each in (1, 2)]
    partly = (Inapplicable("cgd", "one of the methods needs more records"),) if kind == "table" else ()
    single = {"setting": "one round", "control": True} | error
    removed = {"setting": "all", "control": True, "must_succeed": True} | lies
    contents: list[tuple[Part, PartResult]] = [
        (Part("moments", "secure"), PartResult(tuple(_moments("secure", error)))),
        (Part("moments", "cgd"), PartResult((*_moments("cgd", error), *partly))),
        (
            Part("moments", "cgd", control=True),
            PartResult((result("XᵀX of it", "cgd", 0.29, failed_control, **single),)),
        ),
        (
            Part("records", "secure"),
            PartResult((result("records", "secure", 1.0, True, **shown[0], **share),)),
        ),
        (Part("records", "cgd"), PartResult((result("records", "cgd", 0.035, False, **shown[1], **share),))),
        (Part("records", "dp2"), PartResult(failure="ZeroDivisionError: a fault of the attack (audits.py, line 60)")),
        (Part("liars", "cgd"), PartResult((result("lies", "cgd", 1.0, False, **(lies | {"setting": "to one"})),))),
        (Part("liars", "cgd", control=True), PartResult((result("lies", "cgd", 0.0, True, **removed),))),
        (Part("theory", "cgd"), PartResult((Inapplicable("cgd", "the model is not linear"),))),
    ]
    if kind == "table":  # as many columns as there can be
        others: tuple[Scheme, ...] = ("plain", "dp8", "dp2", "dp0.5", "dp")
        guess = {each: result("AUC", each, 0.51, succeeds=False, allowed=0.952) for each in others}
        contents += [(Part("members", scheme), PartResult((each,))) for scheme, each in guess.items()]
    finished = {place: each for place, (_, each) in enumerate(contents) if complete or place < 4}
    return assemble(plan(*(part for part, _ in contents), kind=kind), finished, seed=3, seconds=72.4)


def _moments(scheme: Scheme, error: dict[str, Any]) -> list[AttackResult]:
    exact = 4.6e-7 if scheme == "secure" else 8e-7
    return [
        result("XᵀX of it", scheme, 0.077, True, **(error | {"setting": "passive", "detail": "60 rounds"})),
        result("XᵀX of it", scheme, exact, True, **(error | {"setting": "own batches"})),
        result("Xᵀy of it", scheme, 0.289, scheme == "secure", **(error | {"setting": "passive"})),
    ]


def to_json(audit: Audit) -> dict[str, Any]:
    """The content of `audit.json`."""
    content: dict[str, Any] = json.loads(results.to_files(audit)[results.FILE])
    return content


def write(folder: Path, audit: Audit, content: dict[str, Any] | None = None) -> Path:
    """Write an audit without its page, with another content of `audit.json` if given."""
    for path, data in results.to_files(audit).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    if content is not None:
        (folder / results.FILE).write_text(json.dumps(content))
    return folder
