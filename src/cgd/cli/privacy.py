"""Commands for differential privacy: `cgd privacy budget`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cgd.cli.base import app, printable
from cgd.errors import InputError

privacy_app = typer.Typer(no_args_is_help=True, help="Show and change the privacy budget of a data set.")
app.add_typer(privacy_app, name="privacy")

BudgetPath = Annotated[Path, typer.Argument(metavar="FILE", help="The budget file, beside the records: DATA.budget.")]


@privacy_app.command()
def budget(
    file: BudgetPath,
    raise_to: Annotated[
        float | None,
        typer.Option("--raise", metavar="EPSILON", help="Permit this ε for all trainings together, more than before."),
    ] = None,
) -> None:
    """Show how much of the privacy budget of a data set is spent, and by which trainings.

    With --raise, the limit becomes higher. It is your decision about the people behind these records: all trainings on
    them together then disclose more.
    """
    from cgd.dp.budget_file import BudgetFile

    if not file.is_file():
        raise InputError(f"{file} does not exist; name the budget file of a data set, which its first training creates")
    found = BudgetFile(file, epsilon=1.0, delta=1e-5, unit=None)  # an existing file keeps its own limit and unit
    if raise_to is not None:
        found.raise_limit(raise_to)
    unit = f"all records of one {found.unit}" if found.unit else "every record"
    typer.echo(printable(f"limit: epsilon {found.epsilon:g} at delta {found.delta:g}, for {unit}"))
    typer.echo(f"spent: epsilon {found.epsilon_spent:.4g}, by {len(found.charges)} openings")
    for training in dict.fromkeys(each.training for each in found.charges):
        charges = found.of_training(training)
        typer.echo(printable(f"  {training}: {len(charges)} openings, {charges[0].time} to {charges[-1].time}"))
