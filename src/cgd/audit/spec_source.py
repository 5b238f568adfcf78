"""The audit of a spec: a setting of the user's own with a public data set, under any scheme.

Every opened value of the run is kept in memory, so only the first rounds are simulated, which reveal the most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from cgd.audit.private_sums import describe_privacy
from cgd.audit.registry import attacks_on_views, get
from cgd.audit.results import Source
from cgd.audit.runner import Plan
from cgd.audit.scenario import LocalSteps, Scenario
from cgd.audit.schemes import DELTA, describe_sums, observe
from cgd.audit.view import SCHEMES, flat
from cgd.errors import InputError, RangeError
from cgd.experiments import runner
from cgd.experiments.experiment_file import read
from cgd.experiments.runner import build_model, load_data, split_data, update_rule
from cgd.optim.public_start import public_seed
from cgd.simulation.kept_model import hold_out
from cgd.simulation.population import participant_seed

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.results import AttackResult, Inapplicable
    from cgd.audit.scenario import Sample
    from cgd.audit.view import Scheme, Truth, View
    from cgd.experiments.datasets import Dataset
    from cgd.experiments.spec import RunSpec
    from cgd.optim.grid import Cell


DEFAULT_ROUNDS, DEFAULT_HONEST = 30, 2
"""The number of rounds that the coalition sees, and of honest participants."""


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
    try:
        check(spec, rounds, honest, data_dir)
    except InputError as error:
        raise InputError(f"{path}, {chosen[0].label!r}: {error}; --run LABEL chooses another run") from None
    about = (
        f"{chosen[0].label}: {spec.data}, split over {spec.rows} participants. {honest} of them "
        f"{'is' if honest == 1 else 'are'} honest; the others collude and pool their views of the first "
        f"{min(rounds, spec.steps)} rounds, under each scheme. With ε = 8, 2 and 0.5, the noise is for these rounds, "
        f"δ = {DELTA:g} and t = {spec.rows - honest}."
    )
    if not spec.work.is_full_gradient:
        about += describe_sums(spec.batches, local=spec.local is not None)
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


# A process that runs several attacks on a view computes it once.


@lru_cache(maxsize=1)
def _spec_view(
    spec: RunSpec, scheme: Scheme, rounds: int, honest: int, data_dir: Path | None
) -> tuple[View, Truth, Sample]:
    return observed(spec, scheme, rounds=rounds, honest=honest, data_dir=data_dir)


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
    cells = split_data(spec, data)
    if spec.keep:
        cells, _ = hold_out(cells, spec.keep, spec.seed)
    names = {cell: f"participant-{cell.row + 1}" for cell in cells}
    seeds = {name: participant_seed(spec.seed, cell) for cell, name in names.items()}

    def draws(name: str, number: int, count: int) -> list[torch.Tensor]:
        return [torch.from_numpy(batch) for batch in spec.work.batches_of(seeds[name], count, number)]

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
        rule=partial(update_rule, spec),
        start=_start(spec, data),
        origins={name: (_delta(spec, cell), seeds[name]) for cell, name in names.items()},
        draws=None if spec.work.is_full_gradient else draws,
        local=None if spec.local is None else LocalSteps(spec.local.lr, spec.local.momentum),
        fresh_origins=spec.fresh_origins,
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


def _start(spec: RunSpec, data: Dataset) -> torch.Tensor | None:
    """Return the public start of a run, flat; None if it is zero."""
    if spec.start == "zeros":
        return None
    with public_seed(spec.seed):
        return flat(dict(build_model(spec, data).named_parameters())).detach()


def _delta(spec: RunSpec, cell: Cell) -> float:
    delta = spec.origin_delta()
    return delta(cell) if callable(delta) else delta


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
    if spec.rule != "sgd":
        raise InputError(f"the rule of the run is {spec.rule}; an audit of a spec needs the rule sgd")
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
