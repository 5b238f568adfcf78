"""Commands for whoever has a table: suggest a schema, predict, report."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import app, printable
from cgd.cli.operations import KeyFile, Listen
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.tabular.model import ConfinedModel
    from cgd.tabular.predict import LoadedInputs, Predictions


@app.command()
def schema(
    data: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV or Parquet file with records.")],
    label: Annotated[str, typer.Option(metavar="COLUMN", help="The column to predict.")],
) -> None:
    """Suggest the sections for tables and models of a federation file, from a file with records. Look through them.

    Only names and types of columns are written, no values but the classes of the label.
    """
    from cgd.tabular.schema import suggest

    typer.echo(suggest(data, label), nl=False)


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    dataset: Annotated[
        str, typer.Option(help="breast-cancer, diabetes; or adult, credit-default, found by CGD_DATA.")
    ] = "breast-cancer",
) -> None:
    """Write real tables to try things with: the records of five organisations, and test.csv for predictions."""
    from cgd.experiments.organisations import split

    made = split(dataset)
    for path in made.write(folder):
        records = made.tables.get(path.stem, made.held_out)
        typer.echo(f"{path}  {len(records):,} records")
    typer.echo(f"the column to predict is {made.data.target}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, with its model.")],
    data: Annotated[Path, typer.Option(metavar="FILE", help="The records, a CSV or Parquet file.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a CSV file (default: the screen).")] = None,
    federation: Annotated[
        Path | None,
        typer.Option(metavar="FEDERATION.toml", help="In a federation by columns: the row predicts together."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Your own function that made the network, if one did."),
    ] = None,
    key: KeyFile = None,
    listen: Listen = None,
    timeout: Annotated[
        float | None, typer.Option(help="Give up after so many seconds without a word (default: never).")
    ] = None,
) -> None:
    """Predict with a trained model: the label of every record, with probabilities.

    A model that was trained in a federation by columns has seen some of the columns. The members of a row then run this
    command at the same time, on the same records, and a secure sum of what their models say is opened to them.
    """
    from cgd.tabular.model import load_model
    from cgd.tabular.predict import answers, questions

    loaded = load_model(model, function=function)
    if out is not None and out.exists():
        raise InputError(f"{out} exists and is never overwritten; name another file, or move it away")
    if (federation is None) != (loaded.towers == 1):
        remedy = "name its file with --federation" if federation is None else "leave --federation out"
        raise InputError(f"{model} is a model of {loaded.towers} that predict together; {remedy}")
    asked = questions(loaded, data)
    if federation is None:
        predicted = answers(loaded, asked)
    else:
        predicted = _together(loaded, asked, federation, key, listen, timeout)
    if out is None and sys.stdout.isatty():
        text = io.StringIO()
        predicted.write(text, loaded.data.target)
        typer.echo(printable(text.getvalue()), nl=False)
    elif out is None:
        predicted.write(sys.stdout, loaded.data.target)
    else:
        try:
            private = partial(os.open, mode=0o600)  # predictions say something about the records
            with open(out, "x", encoding="utf-8", newline="", opener=private) as file:
                predicted.write(file, loaded.data.target)
        except OSError as error:
            raise InputError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None
    _tell(predicted, loaded)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
) -> None:
    """Write the report of a run anew, and say where it is."""
    from cgd.reporting.report import write_report
    from cgd.reporting.run_file import load_run
    from cgd.tabular.run import summary

    content = load_run(run)
    for path in write_report(run):
        typer.echo(path)
    typer.echo(printable(summary(content)))


def _together(
    loaded: ConfinedModel,
    asked: LoadedInputs,
    federation: Path,
    key: Path | None,
    listen: str | None,
    timeout: float | None,
) -> Predictions:
    from cgd.cli.display import Display
    from cgd.federation.config import Federation
    from cgd.federation.member import FederationMember
    from cgd.tabular.predict import answers, row_of

    name = loaded.origin["participant"]
    row = row_of(Federation.load(federation), name)
    with tempfile.TemporaryDirectory(prefix="cgd-predict-") as state:  # a prediction is asked for anew each time
        membership = FederationMember(row, name, key=key, listen=listen, state=state, timeout=timeout)
        with Display(membership), membership.peers as peers:
            return answers(loaded, asked, peers)


def _tell(predicted: Predictions, loaded: ConfinedModel) -> None:
    """On standard error: the predictions themselves may go into a pipe."""
    for note in predicted.notes:
        typer.echo(f"cgd: {printable(note)}", err=True)
    scores = predicted.scores
    if scores is not None and loaded.data.task == "regression":
        typer.echo(f"cgd: root mean squared error {scores['rmse']:.4g}, mean absolute {scores['mae']:.4g}", err=True)
    elif scores is not None:
        auc = f", AUC {scores['auc']:.3f}" if scores["auc"] is not None else ""
        typer.echo(f"cgd: accuracy {100 * scores['accuracy']:.2f} %{auc}", err=True)
