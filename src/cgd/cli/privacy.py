"""Commands for differential privacy: `cgd privacy expect`, `cgd privacy budget`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cgd.cli.base import app, printable
from cgd.errors import InputError

privacy_app = typer.Typer(no_args_is_help=True, help="Choose ε; show and change the privacy budget of a data set.")
app.add_typer(privacy_app, name="privacy")

BudgetPath = Annotated[Path, typer.Argument(metavar="FILE", help="The budget file, beside the records: DATA.budget.")]


@privacy_app.command()
def expect(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A federation file or a schema, for what is not given by options."),
    ] = None,
    *,
    records: Annotated[int, typer.Option(help="The number of records of all participants together.")],
    columns: Annotated[int | None, typer.Option(help="The number of columns to predict from.")] = None,
    members: Annotated[int | None, typer.Option(help="The number of participants.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε, for every record.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ (default: at most a hundredth of one divided by the records).")
    ] = None,
    colluders: Annotated[
        int | None, typer.Option(help="How many participants may collude (default: 1, as in `privacy`).")
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(help="The least number of participants of a sum (default: all, as without `absence`).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="logistic or mlp (default: both).")] = None,
) -> None:
    """Show how much accuracy differential privacy is expected to cost, and how many records one would need.

    The figures come from a table of measurements on public data sets with the default settings. They are no promise:
    on your records the loss may be smaller or larger. Nothing is read but FILE, and nothing is sent.
    """
    from cgd.tabular.privacy_expectation import describe_expectation, read_question

    options = {"columns": columns, "members": members, "epsilon": epsilon, "delta": delta, "colluders": colluders}
    options["quorum"] = quorum
    given = {name: value for name, value in options.items() if value is not None}
    for line in describe_expectation(read_question(file, records, given, model)):
        typer.echo(line)


@privacy_app.command()
def budget(
    file: BudgetPath,
    raise_to: Annotated[
        float | None,
        typer.Option("--raise", metavar="EPSILON", help="Permit this ε for all trainings together, more than before."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --raise: why, for those who read the file later.")
    ] = None,
) -> None:
    """Show how much of the privacy budget of a data set is spent, by which trainings, and what is left.

    With --raise, the limit becomes higher. It is your decision about the people behind these records: all trainings on
    them together then disclose more. The file keeps the time and the reason.
    """
    from cgd.dp.budget_file import BudgetFile, round_down

    if not file.is_file():
        fact = "is not a file" if file.exists() else "does not exist"
        raise InputError(
            f"{file} {fact}; name the budget file of a data set, DATA.budget, which its first training creates"
        )
    found = BudgetFile(file, epsilon=1.0, delta=1e-5, unit=None)  # an existing file keeps its own limit and unit
    if reason is not None and raise_to is None:
        raise InputError("--reason is for a higher limit; give it with --raise EPSILON")
    if raise_to is not None:
        found.raise_limit(raise_to, reason or "")
    unit = f"all records of one {found.unit}" if found.unit else "every record"
    typer.echo(printable(f"limit: epsilon {found.epsilon:g} at delta {found.delta:g}, for {unit}"))
    for each in found.decisions:
        why = f": {each.reason}" if each.reason else ", without a reason"
        typer.echo(printable(f"  raised to epsilon {each.epsilon:g}, {each.time}{why}"))
    typer.echo(f"spent: epsilon {found.epsilon_spent:.4g}, by {len(found.charges)} openings")
    typer.echo(
        f"left: epsilon {round_down(found.epsilon_left)}, for one more training (trainings add up by μ², not by ε)"
    )
    for training in dict.fromkeys(each.training for each in found.charges):
        charges = found.of_training(training)
        typer.echo(printable(f"  {training}: {len(charges)} openings, {charges[0].time} to {charges[-1].time}"))
