"""The view of a coalition in a run of a spec, under any scheme, to audit a setting of the user's own.

Every opened value is kept, so only the first rounds are simulated, which reveal the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from cgd.audit.schemes import Scenario, observe
from cgd.errors import InputError, RangeError
from cgd.experiments import runner
from cgd.experiments.runner import build_model, load_data
from cgd.optim.grid import Grid

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.schemes import Sample
    from cgd.audit.view import Scheme, Truth, View
    from cgd.experiments.spec import RunSpec

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
        clip=spec.clip,
    )
    try:
        view, truth = observe(scenario, scheme)
        finite = all(each.gradient_sum.abs().max() <= scenario.bound for each in view.rounds)  # false for NaN, too
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
