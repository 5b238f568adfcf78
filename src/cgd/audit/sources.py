"""The sources that `cgd audit` can attack, and the plan for each: embedded data, a spec, or recorded runs.

The plan for a spec audits a setting of the user's own, under any scheme. Every opened value of its run is kept in
memory, so only the first rounds are simulated, which reveal the most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch.nn import functional

from cgd.audit.private_sums import remaining_mu
from cgd.audit.registry import ATTACKS, attacks_on_views, get
from cgd.audit.results import Source
from cgd.audit.runner import Plan
from cgd.audit.schemes import DELTA, Scenario, observe
from cgd.audit.view import SCHEMES
from cgd.dp.accountant import epsilon_of
from cgd.errors import InputError, RangeError
from cgd.experiments import runner
from cgd.experiments.runner import build_model, load_data
from cgd.optim.grid import Grid
from cgd.tabular.trace_writer import FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cgd.audit.results import AttackResult, Inapplicable
    from cgd.audit.schemes import Sample
    from cgd.audit.view import Scheme, Truth, View
    from cgd.dp.settings import PrivacySettings
    from cgd.experiments.spec import RunSpec


DEFAULT_ROUNDS, DEFAULT_HONEST = 30, 2
"""Of a spec: the number of rounds that the coalition sees, and of honest participants."""


def plan_for(
    paths: Sequence[Path],
    coalition: Sequence[str] = (),
    *,
    label: str | None = None,
    rounds: int | None = None,
    honest: int | None = None,
    data_dir: Path | None = None,
    function: str | None = None,
) -> Plan:
    """Return the plan for the arguments of the command line.

    Args:
        paths: nothing, a spec (.toml), or the folders of a recorded run.
        coalition: the colluders of a recorded run; with one folder, none, and everybody else colludes.
        label: the run of a spec; the first that trains by cgd if not given.
        rounds: the number of rounds of a spec that the coalition sees; `DEFAULT_ROUNDS` if not given.
        honest: the number of honest participants of a spec; `DEFAULT_HONEST` if not given.
        data_dir: the folder to search first for data sets of a spec.
        function: the `module:function` that builds the network of a recorded run, if it is a custom one.

    Raises:
        InputError: the arguments do not fit together, or a file cannot be read.
    """
    specs = [path for path in paths if path.suffix == ".toml"]
    if coalition and (specs or not paths):
        raise InputError(f"--coalition is {', '.join(coalition)}; it is for recorded runs: name their folders")
    if function is not None and (specs or not paths):
        raise InputError(f"--function is {function!r}; it is for recorded runs: name their folders")
    if not specs and (label, rounds, honest, data_dir) != (None, None, None, None):
        raise InputError("--run, --rounds, --honest and --data-dir are for a spec; name one (SPEC.toml)")
    if not paths:
        return embedded()
    if specs:
        if len(paths) > 1:
            names = ", ".join(str(path) for path in paths)
            raise InputError(f"{names} cannot be audited together; name one spec, or the folders of one run")
        honest = DEFAULT_HONEST if honest is None else honest
        return from_spec(specs[0], label, rounds or DEFAULT_ROUNDS, honest, data_dir)
    for folder in paths:
        if not (folder / FILE).is_file():
            fact = f"has no {FILE}" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {fact}; name a spec (.toml), or folders that `cgd join --record` wrote")
    return from_recording(paths, coalition, function)


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


def from_spec(
    path: Path,
    label: str | None = None,
    rounds: int = DEFAULT_ROUNDS,
    honest: int = DEFAULT_HONEST,
    data_dir: Path | None = None,
) -> Plan:
    """Return the plan of attacks on a run of a spec, as `cgd simulate` reads it.

    Raises:
        InputError: the spec cannot be read, or has no such run, or one that cannot be attacked.
    """
    from cgd.experiments.spec import read

    entries = next(iter(read(path).entries.values()))
    chosen = [each for each in entries if (each.label == label if label else each.run.method == "cgd")]
    if not chosen:
        labels = ", ".join(repr(each.label) for each in entries)
        missing, remedy = "no run with the method cgd", "add one"
        if label:
            missing, remedy = f"no run {label!r}", "choose one with --run"
        raise InputError(f"{path} has {missing}; it has {labels}: {remedy}")
    spec = chosen[0].run
    if spec.method != "cgd":
        raise InputError(f"{path}: {label!r} trains by {spec.method}; choose a run with the method cgd")
    check(spec, rounds, honest, data_dir)
    about = (
        f"{chosen[0].label}: {spec.data}, split over {spec.rows} participants. {honest} of them "
        f"{'is' if honest == 1 else 'are'} honest; the others collude and pool their views of the first "
        f"{min(rounds, spec.steps)} rounds, under each scheme. With ε = 8, 2 and 0.5, the noise is for these rounds, "
        f"δ = {DELTA:g} and t = {spec.rows - honest}."
    )
    schemes = SCHEMES
    if spec.privacy is not None:
        about += f" The run has its own privacy, too: {describe_privacy(spec.privacy, spec.rows, honest)}"
        schemes = {**SCHEMES, "dp": f"CGD, its own ε = {spec.privacy.epsilon:g}"}
    arguments = [str(path)]
    for option, value, default in (
        ("--run", label, None),
        ("--rounds", rounds, DEFAULT_ROUNDS),
        ("--honest", honest, DEFAULT_HONEST),
    ):
        arguments += [option, str(value)] if value != default else []
    attacks = attacks_on_views()
    parts = [SpecPart(spec, rounds, honest, data_dir, scheme, each.id) for scheme in schemes for each in attacks]
    return Plan(Source("spec", path.name, about), attacks, tuple(parts), tuple(arguments), schemes=schemes)


def describe_privacy(settings: PrivacySettings, members: int, honest: int) -> str:
    """Return ε of a training, and what it is against a larger coalition than it was meant for, in sentences."""
    text = f"ε = {settings.epsilon:g}, δ = {settings.delta:g}, t = {settings.colluders}, C = {settings.clip:g}."
    colluders = members - honest
    if colluders <= settings.colluders:
        return text
    epsilon = epsilon_of(remaining_mu(settings, members, honest), settings.delta)
    return f"{text} {colluders} collude, which is more than t: against them ε is {epsilon:.3g}."


@dataclass(frozen=True)
class SpecPart:
    """One attack on a run of a spec under one scheme.

    Attributes:
        spec: the run.
        rounds: the number of rounds that the coalition sees.
        honest: the number of honest participants.
        data_dir: the folder to search first for data sets.
        scheme: the scheme.
        attack: the id of the attack.
    """

    spec: RunSpec
    rounds: int
    honest: int
    data_dir: Path | None
    scheme: Scheme
    attack: str
    control: bool = False

    @property
    def label(self) -> str:
        """The name that progress shows."""
        return f"{get(self.attack).title}, {self.scheme}"

    def run(self, seed: int) -> list[AttackResult | Inapplicable]:
        """Simulate the first rounds, and attack them; another seed gives another split and other origins."""
        spec = replace(self.spec, seed=self.spec.seed + seed)
        return get(self.attack).run_on(*_spec_view(spec, self.scheme, self.rounds, self.honest, self.data_dir))


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
    schemes = SCHEMES
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
        about += f" With no other honest participant, the gradient of {view.honest[0]} is open in every step{noise}."
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
def _spec_view(
    spec: RunSpec, scheme: Scheme, rounds: int, honest: int, data_dir: Path | None
) -> tuple[View, Truth, Sample]:
    return observed(spec, scheme, rounds=rounds, honest=honest, data_dir=data_dir)


@lru_cache(maxsize=1)
def _trace_view(
    folders: tuple[str, ...], coalition: tuple[str, ...], function: str | None
) -> tuple[View, Truth, Sample]:
    from cgd.audit.trace_view import load, view_of

    return view_of([load(folder, function=function) for folder in folders], coalition)


MAX_PARTICIPANTS = 200
# Of the addends and sums in a view.
MAX_BYTES = 4 << 30


def observed(
    spec: RunSpec, scheme: Scheme, *, rounds: int, honest: int = 2, data_dir: Path | None = None
) -> tuple[View, Truth, Sample]:
    """Run the first rounds of a spec under a scheme, and return the view, the truth and records nobody trained on.

    Args:
        spec: the run; its method is ignored.
        scheme: the scheme of the training.
        rounds: the number of steps, limited to those of the spec.
        honest: the number of honest participants, the first ones.
        data_dir: the folder to search first for data sets.

    Raises:
        InputError: the run has columns, too few participants, a training that diverges, or is too large.
    """
    check(spec, rounds, honest, data_dir)
    data = load_data(spec, data_dir)
    cells = Grid(spec.rows, 1).split(data.x, data.y, seed=spec.seed)
    names = {cell: f"participant-{cell.row + 1}" for cell in cells}
    scenario = Scenario(
        {names[cell]: (block.x, block.y) for cell, block in cells.items()},
        lambda: build_model(spec, data),
        list(names.values())[honest:],
        functional.cross_entropy if data.classes else functional.mse_loss,
        rounds=min(rounds, spec.steps),
        lr=spec.lr,
        delta=spec.delta if isinstance(spec.delta, float) else sum(spec.delta) / 2,
        seed=spec.seed,
        clip=spec.clip if spec.privacy is None else spec.privacy.clip,
        privacy=spec.privacy,
    )
    try:
        view, truth = observe(scenario, scheme)
        bound = math.inf if view.is_private else scenario.bound  # clipping bounds the rest
        finite = all(each.gradient_sum.abs().max() <= bound for each in view.rounds)  # false for NaN, too
    except RangeError:
        finite = False
    if not finite:
        raise InputError(
            f"the training diverges: gradients go beyond {scenario.bound:g} within {min(rounds, spec.steps)} rounds; "
            f"lower lr in the spec (it is {spec.lr:g})"
        )
    return view, truth, (data.held_out_x, data.held_out_y)


def check(spec: RunSpec, rounds: int, honest: int = 2, data_dir: Path | None = None) -> None:
    """Raise the errors of `observed` that can be found without running it.

    Raises:
        InputError: see `observed`.
    """
    if spec.columns > 1:
        raise InputError(
            f"the run has {spec.columns} columns; an audit of a spec needs columns = 1, and "
            "`cgd audit --only joint` measures what `joint` columns reveal"
        )
    if spec.rows > MAX_PARTICIPANTS:
        raise InputError(
            f"the run has {spec.rows} participants, and an audit takes at most {MAX_PARTICIPANTS}; set fewer rows, "
            "and fewer samples with them"
        )
    if not 1 <= honest < spec.rows:
        raise InputError(
            f"{honest} of {spec.rows} participants are honest; at least one must be honest and one must collude: "
            "set more rows in the spec, or choose with --honest"
        )
    runner.check(spec, data_dir)
    data = load_data(spec, data_dir)
    steps = min(rounds, spec.steps)
    parameters = sum(each.numel() for each in build_model(spec, data).parameters())
    needed = 4 * parameters * steps * (spec.rows + 2)
    if needed > MAX_BYTES:
        raise InputError(
            f"{spec.rows} participants, {parameters:,} parameters and {steps} rounds need {needed / 2**30:.1f} GiB of "
            f"gradients, and the limit is {MAX_BYTES / 2**30:g} GiB; set fewer rounds, or fewer rows in the spec"
        )
