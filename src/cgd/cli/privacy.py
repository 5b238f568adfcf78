"""Commands for differential privacy: `cgd privacy expect`, `cgd privacy budget`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import app, printable
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.tabular.privacy_costs import Interval, ModelKind, PrivateSetting

privacy_app = typer.Typer(no_args_is_help=True, help="Choose ε; show and change the privacy budget of a data set.")
app.add_typer(privacy_app, name="privacy")

LOSSES = (0.02, 0.01, 0.005)

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
    model: Annotated[str | None, typer.Option(help="logistic or mlp (default: both).")] = None,
) -> None:
    """Show how much accuracy differential privacy is expected to cost, and how many records one would need.

    The figures come from a table of measurements on public data sets with the default settings. They are no promise:
    on your records the loss may be smaller or larger. Nothing is read but FILE, and nothing is sent.
    """
    from cgd.tabular.privacy_costs import read_setting

    given = {"columns": columns, "members": members, "epsilon": epsilon, "delta": delta, "colluders": colluders}
    asked = read_setting(file, records, {key: value for key, value in given.items() if value is not None}, model)
    for line in _expectation(records, asked.setting, asked.models, asked.cautions):
        typer.echo(printable(line))


def _expectation(
    records: int, setting: PrivateSetting, models: tuple[ModelKind, ...], cautions: tuple[str, ...]
) -> Iterator[str]:
    from cgd.reporting.privacy_text import describe_epsilon
    from cgd.tabular.privacy_costs import MODEL_NAMES, cost_table

    yield (
        f"{records:,} records ({round(setting.records):,} of them for training), {setting.columns} columns, "
        f"{setting.members} participants, up to {setting.colluders} of them collude, epsilon = {setting.epsilon:g}, "
        f"delta = {setting.delta:g}"
    )
    yield f"What this epsilon means: {describe_epsilon(setting.epsilon)}"
    for each in cautions:
        yield f"Caution: {each}"
    for model in models:
        yield ""
        yield f"{MODEL_NAMES[model]}:"
        yield from _losses(setting, model)
        yield from _needs(setting, model)
    names = ", ".join(dict.fromkeys(each.dataset for each in cost_table().curves))
    yield ""
    yield f"Measured on {names}, for two classes, with {cost_table().settings}. Your records may differ."


def _losses(setting: PrivateSetting, model: ModelKind) -> Iterator[str]:
    from cgd.tabular.privacy_costs import expected_loss, why_not_measured

    accuracy, auc = expected_loss(setting, model), expected_loss(setting, model, "auc")
    if accuracy is None or auc is None:
        yield f"  expected loss: unknown; {why_not_measured(setting, model)}"
        return
    yield (
        f"  expected loss: {_points(accuracy)} points of accuracy, {max(0.0, auc.low):.3f} to {max(0.0, auc.high):.3f} "
        f"of AUC (on {', '.join(accuracy.datasets)})"
    )


def _needs(setting: PrivateSetting, model: ModelKind) -> Iterator[str]:
    from cgd.tabular.privacy_costs import needed_signal

    if not setting.measured:
        return
    yield "  for a loss of accuracy below      this epsilon needs records      these records need an epsilon of"
    for loss in LOSSES:
        signal = needed_signal(model, loss)
        if signal is None:
            cells = ["more than was measured"] * 2
        else:
            scale = setting.total_records / setting.records
            counts = [_rounded(scale * setting.records_for(each)) for each in _ends(signal)]
            epsilons = [f"{setting.epsilon_for(each):.2g}" for each in _ends(signal)]
            cells = [_range(counts, signal), _range(epsilons, signal)]
        yield f"    {100 * loss:>3g} points                     {cells[0]:<32}{cells[1]}"
