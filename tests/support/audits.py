"""Audits to test with: parts that do what a test wants, in processes of their own, and one with something of all."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from cgd.audit import results
from cgd.audit.attacks import gram
from cgd.audit.pictures import strip
from cgd.audit.plan import AuditSource, Plan
from cgd.audit.registry import Attack
from cgd.audit.runner import Done, Measured, Outcome
from cgd.audit.view import Finding, Inapplicable

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit import plan as plans
    from cgd.audit.view import Scheme

WHEN = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


def attack(name: str) -> Attack:
    """One as the catalogue has them."""
    texts = ("Do the others learn anything?", "They look closely.", "they learn something", "Add noise.")
    return Attack(name, f"Attack {name}", *texts, gram)


@dataclass(frozen=True)
class Part:
    """A part that does as it is told."""

    attack: str
    scheme: Scheme = "cgd"
    control: bool = False
    does: Literal["measure", "raise", "die", "wait", "refuse", "count threads"] = "measure"
    value: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.attack}, {self.scheme}{', controls' * self.control}"

    def run(self, seed: int) -> dict[str, list[Finding | Inapplicable]]:
        match self.does:
            case "raise":
                raise ZeroDivisionError("a fault of\nthe attack")
            case "die":
                os.kill(os.getpid(), 9)
            case "wait":
                time.sleep(3600)
            case "refuse":
                return {self.attack: [Inapplicable(self.scheme, "the model is not linear")]}
        value = torch.get_num_threads() if self.does == "count threads" else self.value + seed
        images = {"recovered": torch.rand(3, 8, 8), "real": torch.rand(3, 8, 8)}
        found = Finding(self.attack, self.scheme, "AUC", value, 0.5, value > 0.6, "a setting", images=images)
        return {self.attack: [replace(found, control=self.control)]}


@dataclass
class ProgressListener:
    """Notes what it sees, and interrupts as Ctrl-C does after so many parts."""

    interrupt_after: int = 10**9
    seen: list[str] = field(default_factory=list)

    def began(self, part: plans.Part) -> None:
        self.seen.append(f"began {part.label}")

    def ended(self, part: plans.Part, done: Done) -> None:
        self.seen.append(f"ended {part.label}")
        if sum(each.startswith("ended") for each in self.seen) >= self.interrupt_after:
            raise KeyboardInterrupt


def plan(*parts: Part, kind: Literal["embedded", "spec", "recording"] = "embedded") -> Plan:
    """A plan of these parts."""
    ids = dict.fromkeys(part.attack for part in parts)
    source = AuditSource(kind, "a test", "Data of nobody.", () if kind == "embedded" else ("mine.toml",))
    return Plan(source, tuple(attack(each) for each in ids), parts)


def measured(attack: str, scheme: Scheme, value: float, succeeds: bool, **more: Any) -> Measured:
    """A finding, as a process hands it over."""
    given = {
        "metric": "AUC",
        "chance": 0.5,
        "setting": "",
        "detail": "",
        "control": False,
        "undecided": False,
        "must_succeed": False,
    }
    return Measured(attack, scheme, value=value, succeeds=succeeds, **{**given, "pictures": {}, **more})


@cache
def digits(seed: int = 0) -> dict[str, bytes]:
    """Pictures of something."""
    random = torch.Generator().manual_seed(seed)
    return {name: strip(torch.rand(9, 8, 8, generator=random)) for name in ("recovered", "real")}


def example(
    kind: Literal["embedded", "spec", "recording"] = "embedded", *, wrong_control: bool = False, complete: bool = True
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Something of everything: several schemes, variants and settings, controls, pictures, a failure, a refusal."""
    moments, records, liars, theory = "moments", "records", "liars", "theory"
    parts = [
        Part(moments, "secure"),
        Part(moments, "cgd"),
        Part(moments, "cgd", control=True),
        Part(records, "secure"),
        Part(records, "cgd"),
        Part(records, "dp", does="raise"),
        Part(liars, "cgd"),
        Part(liars, "cgd", control=True),
        Part(theory, "cgd", does="refuse"),
    ]
    error = {"metric": "relative error", "chance": 0.295}
    share = {"metric": "records recovered", "chance": 0.0, "setting": "2 × 4 records, 3 rounds", "detail": "8 of 8"}
    lies = {"metric": "lies caught", "chance": 0.0}
    found: list[Done] = [
        Done({moments: tuple(_moments("secure", error))}),
        Done({moments: tuple(_moments("cgd", error))}),
        Done(
            {moments: (measured("XᵀX of it", "cgd", 0.29, wrong_control, setting="one round", control=True, **error),)}
        ),
        Done({records: (measured("records", "secure", 1.0, True, pictures=digits(1), **share),)}),
        Done({records: (measured("records", "cgd", 0.035, False, pictures=digits(2), **share),)}),
        Done(failure="ZeroDivisionError: a fault of the attack (audits.py, line 60)"),
        Done({liars: (measured("lies", "cgd", 1.0, False, setting="to one", **lies),)}),
        Done({liars: (measured("lies", "cgd", 0.0, True, setting="all", control=True, must_succeed=True, **lies),)}),
        Done({theory: (Inapplicable("cgd", "the model is not linear"),)}),
    ]
    done = {place: each for place, each in enumerate(found) if complete or place < 4}
    return results.content(plan(*parts, kind=kind), Outcome(done, 72.4), 3, WHEN)


def _moments(scheme: Scheme, error: dict[str, Any]) -> list[Measured]:
    exact = 4.6e-7 if scheme == "secure" else 8e-7
    return [
        measured("XᵀX of it", scheme, 0.077, True, setting="passive", detail="60 rounds", **error),
        measured("XᵀX of it", scheme, exact, True, setting="own batches", **error),
        measured("Xᵀy of it", scheme, 0.289, scheme == "secure", setting="passive", **error),
    ]


def write(folder: Path, said: dict[str, Any], pictures: dict[str, bytes]) -> Path:
    """An audit's folder without its page."""
    for path, content in {results.FILE: results.to_bytes(said), **pictures}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder
