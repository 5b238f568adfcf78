"""The audit of embedded data: demonstrations and controls of all attacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cgd.audit.registry import ATTACKS, get
from cgd.audit.results import Source
from cgd.audit.runner import Plan
from cgd.audit.schemes import DELTA

if TYPE_CHECKING:
    from cgd.audit.results import AttackResult
    from cgd.audit.view import Scheme


def embedded() -> Plan:
    """Return the plan of all attacks and controls on data of scikit-learn."""
    about = (
        "The data comes with scikit-learn: handwritten digits, tumours, diabetes patients. A few participants have "
        "some records each, and one or two of them collude. Each attack runs in settings where it is strong. With ε = "
        f"8, 2 and 0.5, the noise is that of cgd's own mechanism, for δ = {DELTA:g} and t = the number of colluders."
    )
    parts = [
        DemonstrationPart(attack.id, scheme, control)
        for attack in ATTACKS
        for control in (False, True)
        for scheme in (attack.control_schemes if control and attack.control_schemes else attack.schemes)
    ]
    return Plan(Source("embedded", "embedded data", about), ATTACKS, tuple(parts))


@dataclass(frozen=True)
class DemonstrationPart:
    """The demonstrations or the controls of one attack on embedded data under one scheme.

    Attributes:
        attack: the id of the attack.
        scheme: the scheme.
        control: true for the controls, false for the demonstrations.
    """

    attack: str
    scheme: Scheme
    control: bool = False

    @property
    def label(self) -> str:
        """The name that progress shows."""
        return f"{get(self.attack).title}, {self.scheme}{', controls' * self.control}"

    def run(self, seed: int = 0) -> list[AttackResult]:
        """Run the demonstrations or the controls."""
        attack = get(self.attack)
        if self.control:
            return [replace(each, control=True) for each in attack.control(self.scheme, seed)]
        return attack.demonstrate(self.scheme, seed)
