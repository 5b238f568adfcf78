"""A run of a spec as a coalition of its participants would see it, under any scheme: to audit one's own setting.

Everything that is seen is kept, so this is for some rounds at the beginning, where most is given away, and not for the
whole run of a large colony.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from cgd.audit.schemes import Scenario, observe
from cgd.errors import InputError, RangeError
from cgd.experiments import runner
from cgd.experiments.runner import build_model, loaded
from cgd.optim.grid import Grid

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.schemes import Sample
    from cgd.audit.view import Scheme, Truth, View
    from cgd.experiments.datasets import Dataset
    from cgd.experiments.spec import RunSpec

MAX_PARTICIPANTS = 200
# Bytes of addends and sums that a view may keep.
MAX_BYTES = 4 << 30


def observed(
    spec: RunSpec, scheme: Scheme, *, rounds: int, honest: int = 2, data_dir: Path | None = None
) -> tuple[View, Truth, Sample]:
    """Run the first rounds of a spec under a scheme: what a coalition sees, the truth, and fresh records.

    Args:
        spec: the run; its method does not matter.
        scheme: how the participants train.
        rounds: how many steps, at most those of the spec.
        honest: how many of the participants, the first ones, do not collude.
        data_dir: where to look first for data sets.

    Raises:
        InputError: the run has columns, too few participants, a range of δ, or is too large to keep all that is seen.
    """
    check(spec, rounds, honest, data_dir)
    data = _data(spec, data_dir)
    cells = Grid(spec.rows, 1).split(data.x, data.y, seed=spec.seed)
    names = {cell: f"participant-{cell.row + 1}" for cell in cells}
    colony = Scenario(
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
        view, truth = observe(colony, scheme)
        finite = all(each.gradient_sum.abs().max() <= colony.bound for each in view.rounds)  # also if it is no number
    except RangeError:
        finite = False
    if not finite:
        raise InputError(
            f"the training diverges: gradients go beyond {colony.bound:g} within {min(rounds, spec.steps)} rounds; "
            f"lower lr in the spec (it is {spec.lr:g})"
        )
    return view, truth, (data.held_out_x, data.held_out_y)


def check(spec: RunSpec, rounds: int, honest: int = 2, data_dir: Path | None = None) -> None:
    """Refuse what `observed` cannot do, without doing it.

    Raises:
        InputError: see `observed`.
    """
    if spec.columns > 1:
        raise InputError(
            f"the run has {spec.columns} columns; an audit of one's own setting is for rows alone (columns = 1), and "
            "`cgd audit --only joint` shows what `joint` columns give away"
        )
    if spec.rows > MAX_PARTICIPANTS:
        raise InputError(
            f"the run has {spec.rows} participants, and views are made of at most {MAX_PARTICIPANTS}; take fewer "
            "rows, and fewer samples with them"
        )
    if not 1 <= honest < spec.rows:
        raise InputError(
            f"{honest} of {spec.rows} participants are honest, and at least one must be, and one must collude; "
            "give the run more rows, or choose with --honest"
        )
    runner.check(spec, data_dir)
    data = _data(spec, data_dir)
    seen = min(rounds, spec.steps)
    parameters = sum(each.numel() for each in build_model(spec, data).parameters())
    needed = 4 * parameters * seen * (spec.rows + 2)
    if needed > MAX_BYTES:
        raise InputError(
            f"{spec.rows} participants, {parameters:,} parameters and {seen} rounds make {needed / 2**30:.1f} GiB of "
            f"gradients, and at most {MAX_BYTES / 2**30:g} are kept; take fewer rounds, or fewer rows in the spec"
        )


def _data(spec: RunSpec, data_dir: Path | None) -> Dataset:
    data = loaded(spec.data, spec.seed, data_dir)
    return data.first(spec.samples) if spec.samples else data
