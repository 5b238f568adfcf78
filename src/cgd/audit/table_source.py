"""The audit of one's own table before joining: the attacks on one's own records, under the settings of the federation.

See `own_table.py` for the training that is attacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cgd.audit.own_table import MAX_PARTICIPANTS, MAX_RECORDS, OwnTable, TableRequest, divide, names, simulated_training
from cgd.audit.private_sums import describe_privacy
from cgd.audit.registry import attacks_on_trainings, get
from cgd.audit.results import Source
from cgd.audit.runner import Plan
from cgd.audit.schemes import DELTA, describe_sums
from cgd.audit.view import SCHEMES
from cgd.errors import InputError
from cgd.tabular.sources import source_arguments, source_name

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.own_table import Parts
    from cgd.audit.results import AttackResult, Inapplicable
    from cgd.audit.view import Scheme, Truth, View
    from cgd.tabular.sources import TableSource

MAX_DEFAULT_ROUNDS = 300
"""The steps of a training that are simulated unless the user says otherwise: all, up to this number."""


def from_table(
    table: TableSource,
    federation: Path,
    *,
    target: str | None = None,
    decimal: str | None = None,
    rounds: int | None = None,
    honest: int | None = None,
    function: str | None = None,
) -> Plan:
    """Return the plan of attacks on one's own table.

    Args:
        table: where one's own records are.
        federation: the federation file.
        target: the name of the target in the table, if it is not that of the federation file.
        decimal: the decimal sign of numbers in the table, a point (the default) or a comma.
        rounds: the number of steps that the attackers see; by default all, up to `MAX_DEFAULT_ROUNDS`.
        honest: the number of honest members; by default, one member attacks all others.
        function: the `module:function` that builds the network, if the federation file names one.

    Raises:
        InputError: a file cannot be used, or there are too few records.
    """
    own = OwnTable.read(table, federation, target, function, decimal or ".")
    members, steps = len(own.federation.names), own.settings.training.steps
    if members > MAX_PARTICIPANTS:
        raise InputError(f"{federation} has {members} participants, and an audit takes at most {MAX_PARTICIPANTS}")
    if honest is not None and not 1 <= honest < members:
        raise InputError(
            f"{honest} of {members} members are honest; at least one must be honest and one must attack: choose with "
            f"--honest from 1 to {members - 1}"
        )
    request = TableRequest(
        table,
        federation,
        target,
        function,
        min(rounds or MAX_DEFAULT_ROUNDS, steps),
        members - 1 if honest is None else honest,
        decimal or ".",
    )
    simulated_training(request, 0)  # here, so that errors come before the work
    schemes: dict[Scheme, str] = dict(SCHEMES)
    if own.settings.privacy is not None:
        schemes = {**SCHEMES, "dp": f"CGD, ε = {own.settings.privacy.epsilon:g} of the file"}
    arguments = [*source_arguments(table), "--federation", str(federation)]
    given = {
        "--label": target,
        "--decimal": decimal,
        "--rounds": rounds,
        "--honest": honest,
        "--function": function,
    }
    for option, value in given.items():
        arguments += [] if value is None else [option, str(value)]
    attacks = attacks_on_trainings()
    parts = [TablePart(request, scheme, each.id) for scheme in schemes for each in attacks]
    source = Source("table", source_name(table), _about(own, request, divide(own, request.honest, 0)))
    return Plan(source, attacks, tuple(parts), tuple(arguments), schemes=schemes)


def _about(own: OwnTable, request: TableRequest, parts: Parts) -> str:
    """Return the training and the attackers in sentences."""
    sizes = sorted({each.rows for each in parts.members.values()})
    members, colluders = len(parts.members), len(parts.members) - request.honest
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    honest = sum(parts.members[name].rows for name in names(members, request.honest)[0])
    collude = "one of them attacks" if colluders == 1 else f"{colluders} of them collude"
    text = (
        f"The other participants are made from the same table, because nothing is known about their records: the "
        f"{members} members of {own.federation.name} get {each} of its records each at random, {collude}, the honest "
        f"ones have {honest:,} records together, and {parts.fresh.rows:,} are kept to compare with. You will bring "
        f"more records than such a part; of more records, a smaller part can be recovered. The attackers see "
        f"{request.rounds} of {own.settings.training.steps} steps."
    )
    if own.records.rows > MAX_RECORDS and own.records.units is None:
        text += f" Only {MAX_RECORDS:,} of {own.records.rows:,} records are used."
    text += f" With ε = 8, 2 and 0.5, the noise is for these steps, δ = {DELTA:g} and t = {colluders}."
    training = own.settings.training
    if training.batches > 1 or training.local_epochs:
        text += describe_sums(training.batches, local=training.local_epochs > 0)
    if own.settings.privacy is not None:
        described = describe_privacy(own.settings.privacy_settings(), members, request.honest)
        text += f" The federation file has its own privacy: {described}"
    else:
        text += " The federation file has no [privacy], so the training would be that of the column CGD."
    return text


@dataclass(frozen=True)
class TablePart:
    """One attack on one's own table under one scheme.

    Attributes:
        request: what is audited.
        scheme: the scheme.
        attack: the id of the attack.
    """

    request: TableRequest
    scheme: Scheme
    attack: str
    control: bool = False

    @property
    def label(self) -> str:
        """The name that progress shows."""
        return f"{get(self.attack).title}, {self.scheme}"

    def run(self, seed: int) -> list[AttackResult | Inapplicable]:
        """Simulate the training, and attack it; another seed gives another division, other origins and noise."""
        training, attack = simulated_training(self.request, seed), get(self.attack)
        results: list[AttackResult | Inapplicable] = []
        if attack.on_view and not attack.on_changing_members:  # the members do not change but in a variant
            results += attack.run_on(*_view(self.request, seed, self.scheme), training.fresh)
        return results + attack.run_in(
            training.scenario, self.scheme, lambda scenario: training.observe(scenario, self.scheme)
        )


@lru_cache(maxsize=1)  # a process that runs several attacks on a view computes it once
def _view(request: TableRequest, seed: int, scheme: Scheme) -> tuple[View, Truth]:
    training = simulated_training(request, seed)
    return training.observe(training.scenario, scheme)
