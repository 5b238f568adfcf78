"""What an audit is to do: the attacks, cut into parts that processes can take, and what is attacked.

Embedded data, somebody's own data and a recorded run all give a `Plan`; from there on everything is the same.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgd.audit.registry import Attack
    from cgd.audit.view import Finding, Inapplicable, Scheme

Kind = Literal["embedded", "spec", "recording"]


class Part(Protocol):
    """A piece of work for one process. It travels there by pickle, and what it needs with it."""

    @property
    def label(self) -> str:
        """What it is called while it runs."""

    @property
    def attack(self) -> str:
        """The id of the attack that it belongs to."""

    @property
    def scheme(self) -> Scheme:
        """What is attacked."""

    @property
    def control(self) -> bool:
        """Whether this shows what the measurement is worth."""

    def run(self, seed: int) -> Mapping[str, Sequence[Finding | Inapplicable]]:
        """Do it: what was found, by the attack's id. The same seed finds the same."""


@dataclass(frozen=True)
class AuditSource:
    """What is attacked, for the page and to run it again.

    Attributes:
        kind: where the data come from.
        name: what to call it.
        about: a sentence: the data, the participants, the coalition.
        arguments: what `cgd audit` was given to name it.
    """

    kind: Kind
    name: str
    about: str
    arguments: tuple[str, ...] = ()

    @property
    def confidential(self) -> bool:
        """Whether the findings, and above all the pictures, show somebody's own records."""
        return self.kind == "recording"


@dataclass(frozen=True)
class Plan:
    """An audit to be run.

    Attributes:
        source: what is attacked.
        attacks: those that are tried, in the order in which they are shown.
        parts: the work.
        only: the attacks that were asked for; everything if empty.
    """

    source: AuditSource
    attacks: tuple[Attack, ...]
    parts: tuple[Part, ...]
    only: tuple[str, ...] = ()

    def choose(self, ids: Sequence[str]) -> Plan:
        """Only these attacks; all of them if none is named.

        Raises:
            InputError: there is no such attack.
        """
        known = [each.id for each in self.attacks]
        for wrong in (each for each in ids if each not in known):
            raise InputError(f"there is no attack {wrong!r} here; choose from {', '.join(known)}")
        if not ids:
            return self
        return replace(
            self,
            attacks=tuple(each for each in self.attacks if each.id in ids),
            parts=tuple(each for each in self.parts if each.attack in ids),
            only=tuple(each for each in known if each in ids),
        )

    def command(self, seed: int) -> str:
        """What to type to run it again."""
        chosen = [word for each in self.only for word in ("--only", each)]
        return shlex.join(["cgd", "audit", *self.source.arguments, *chosen, "--seed", str(seed)])
