"""The audit of a recorded run: what some of its participants really saw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cgd.audit.private_sums import describe_privacy
from cgd.audit.registry import attacks_on_views, get
from cgd.audit.results import Source
from cgd.audit.runner import Plan
from cgd.audit.schemes import describe_sums
from cgd.audit.view import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.audit.results import AttackResult, Inapplicable
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, Truth, View


def from_recording(folders: Sequence[Path], coalition: Sequence[str], function: str | None = None) -> Plan:
    """Return the plan of attacks on a recorded run.

    Raises:
        InputError: the traces cannot be read, are not of one run, or the coalition is not in it.
    """
    from cgd.audit.trace_view import load, view_of

    traces = [load(folder, function=function) for folder in folders]
    view, _, _ = view_of(traces, coalition)  # here, so that errors come before the work
    first = traces[0]
    if coalition:
        who = f"{', '.join(coalition)} pool their views and attack {', '.join(view.honest)}"
    else:
        who = f"the worst case for {first.participant}: all others collude"
    named = {"--coalition": ",".join(coalition), "--function": function}
    arguments = (*map(str, folders), *(each for option, value in named.items() if value for each in (option, value)))
    about = f"A recorded run; {who}. {view.describe()}."
    schemes, training = SCHEMES, first.training
    if training.batches > 1 or training.local_epochs:
        about += describe_sums(training.batches, local=training.local_epochs > 0, noise=False)
    if first.privacy is not None:
        members = len(first.members)
        honest = len(view.honest)
        about += f" It has differential privacy: {describe_privacy(first.privacy, members, honest)}"
        schemes = {"dp": f"CGD, ε = {first.privacy.epsilon:g}"}
    steps = max(len(each.steps) for each in traces)
    if len(view.rounds) < steps:
        about += f" Only {len(view.rounds)} of {steps} steps can be used: parts of the others are missing."
    if len(view.honest) == 1:
        noise = ", with its own noise" if view.is_private else ""
        summed = "update" if training.local_epochs else "gradient"
        about += f" With no other honest participant, the {summed} of {view.honest[0]} is open in every step{noise}."
    attacks = attacks_on_views()
    parts = [TracePart(tuple(map(str, folders)), tuple(coalition), each.id, function, view.scheme) for each in attacks]
    source = Source("recording", f"a run of {first.federation}", about)
    return Plan(source, attacks, tuple(parts), arguments, schemes=schemes)


@dataclass(frozen=True)
class TracePart:
    """One attack on a recorded run.

    Attributes:
        folders: the folders of the traces.
        coalition: the colluders.
        attack: the id of the attack.
        function: the `module:function` that builds a custom network.
        scheme: "cgd", or "dp" if the run has differential privacy.
    """

    folders: tuple[str, ...]
    coalition: tuple[str, ...]
    attack: str
    function: str | None = None
    scheme: Scheme = "cgd"
    control: bool = False

    @property
    def label(self) -> str:
        """The name that progress shows."""
        return get(self.attack).title

    def run(self, seed: int) -> list[AttackResult | Inapplicable]:  # noqa: ARG002 - nothing is random
        """Read the traces, and attack them."""
        return get(self.attack).run_on(*_trace_view(self.folders, self.coalition, self.function))


# A process that runs several attacks on a view computes it once.


@lru_cache(maxsize=1)
def _trace_view(
    folders: tuple[str, ...], coalition: tuple[str, ...], function: str | None
) -> tuple[View, Truth, Sample]:
    from cgd.audit.trace_view import load, view_of

    return view_of([load(folder, function=function) for folder in folders], coalition)
