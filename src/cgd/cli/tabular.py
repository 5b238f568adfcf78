"""Commands for tables: `cgd schema`, `cgd sample`, `cgd predict`, `cgd export`, `cgd report`."""

from __future__ import annotations

import io
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgd.cli.base import app, printable
from cgd.cli.federation import KeyFile, Listen, Salt
from cgd.errors import InputError
from cgd.files import PRIVATE, write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.tabular.model import ConfinedModel
    from cgd.tabular.predict import LoadedInputs, Predictions


ModelFunction = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Your function that built the network, if there is one."),
]
Decimal = Annotated[
    str | None, typer.Option(metavar="SIGN", help="The decimal sign of numbers in your file: '.' (the default) or ','.")
]


SOURCE_HELP = "a CSV, Parquet or Excel file, or the address of a database (with --query)"
Sheet = Annotated[
    str | None, typer.Option(metavar="NAME", help="The sheet of an Excel workbook, if several have values.")
]
Query = Annotated[
    str | None,
    typer.Option(
        metavar="SQL",
        help="The query of a database that gives the records: one SELECT, or the name of a file NAME.sql.",
    ),
]


@app.command()
def schema(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help=f"Your records: {SOURCE_HELP}; with --merge, schemas.")
    ],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column to predict.")] = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private", help="For differential privacy: also `privacy`, with ranges and categories to be replaced."
        ),
    ] = False,
    decimal: Decimal = None,
    sheet: Sheet = None,
    query: Query = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Join the suggestions of several participants to one, with comments.")
    ] = False,
) -> None:
    """Suggest the sections `data` and `model` of a federation file from a table of records; review them before use.

    They contain names and types of columns, and the classes of the label, but no other values. With --private, there
    are also rounded ranges and frequent categories of this file, with marks: replace them, and delete the marks.
    With --merge, the files are suggestions, one of each participant.
    """
    from cgd.tabular.schema import suggest_schema
    from cgd.tabular.schema_merge import merge_schemas
    from cgd.tabular.sources import parse_source

    if merge:
        if label is not None or private or (decimal, sheet, query) != (None, None, None):
            raise InputError("--merge has no other options; the suggestions contain what they state")
        typer.echo(merge_schemas([Path(file) for file in files]), nl=False)
        return
    if len(files) != 1:
        raise InputError(f"{len(files)} files are named; name one with records, or add --merge to join suggestions")
    if label is None:
        raise InputError("--label is missing; name the column to predict")
    typer.echo(suggest_schema(parse_source(files[0], sheet, query), label, private=private, decimal=decimal), nl=False)


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for the files.")],
    dataset: Annotated[
        str, typer.Option(help="breast-cancer, diabetes, clinics; or adult, credit-default, in the folder CGD_DATA.")
    ] = "breast-cancer",
) -> None:
    """Write sample tables: the records of five organisations, and test.csv for predictions.

    The tables of `clinics` are those of four clinics that export them differently: units, codes, dates, names.
    """
    from cgd.experiments import clinics, organisations

    names = (*organisations.SOURCES, "clinics")
    if dataset not in names:
        raise InputError(f"there is no data set {dataset!r}; choose one of {', '.join(names)}")
    if dataset == "clinics":
        tables, target = clinics.exports(), clinics.TARGET
        sizes = {path: len(tables[path.stem]) for path in clinics.write(folder, tables)}
    else:
        samples = organisations.split(dataset)
        target = samples.data.target
        sizes = {path: len(samples.tables.get(path.stem, samples.held_out)) for path in samples.write(folder)}
    for path, records in sizes.items():
        typer.echo(f"{path}  {records:,} records")
    typer.echo(f"the column to predict is {target}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, with its model.")],
    data: Annotated[str, typer.Option(metavar="FILE", help=f"The records: {SOURCE_HELP}.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a CSV file (default: standard output).")
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(
            metavar="FEDERATION.toml", help="With vertically split columns: the members of the row predict together."
        ),
    ] = None,
    function: ModelFunction = None,
    decimal: Decimal = None,
    salt: Salt = None,
    same_records: Annotated[
        bool,
        typer.Option(
            "--same-records",
            help="With `intersection`: all members of the row have the same records; they do not look for common ones.",
        ),
    ] = False,
    sheet: Sheet = None,
    query: Query = None,
    key: KeyFile = None,
    listen: Listen = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after this many seconds without received data (default: never).")
    ] = None,
) -> None:
    """Predict the label of every record with a trained model, with probabilities.

    With vertically split columns, every model uses some of the columns only. The members of a row then run this command
    at the same time, and learn a secure sum of their models' outputs: on the same records, or with `intersection` on
    those that all of them have.
    """
    from cgd.tabular.intersection import check_intersection, read_salt
    from cgd.tabular.model import load_model
    from cgd.tabular.predict import load_inputs, predict
    from cgd.tabular.sources import parse_source

    source = parse_source(data, sheet, query)
    loaded = load_model(model, function=function)
    if out is not None and out.exists():
        raise InputError(f"{out} exists and is never overwritten; name another file, or move it away")
    if (federation is None) != (loaded.towers == 1):
        remedy = "name its file with --federation" if federation is None else "omit --federation"
        raise InputError(f"{model} is one of {loaded.towers} models that predict together; {remedy}")
    inputs = load_inputs(loaded, source, decimal or ".")
    if federation is None:
        predictions = predict(loaded, inputs)
    else:
        needed = None if same_records else loaded.data.intersection
        secret = read_salt(salt, needed)
        if needed is not None:
            check_intersection(inputs.records, loaded.data)
        together = partial(predict, salt=secret, same_records=same_records)
        predictions = _predict_with_row(together, loaded, inputs, federation, key, listen, timeout)
    text = io.StringIO()
    predictions.write(text, loaded.data.target)
    if out is None:
        sys.stdout.write(printable(text.getvalue()) if sys.stdout.isatty() else text.getvalue())
    else:
        try:
            write_file(out, text.getvalue(), mode=PRIVATE, new=True)  # predictions reveal something about the records
        except OSError as error:
            raise InputError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None
    _print_scores(predictions, loaded)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, with its model.")],
    onnx: Annotated[Path, typer.Option(metavar="FILE", help="Write the model as an ONNX file.")],
    function: ModelFunction = None,
) -> None:
    """Write a trained model for other tools: preprocessing and network in one ONNX graph.

    The file contains the model that you keep, and is as secret as it is.
    """
    from cgd.reporting.kept_text import describe_publication
    from cgd.reporting.run_file import load_run
    from cgd.tabular.model import load_model
    from cgd.tabular.onnx_export import export_onnx

    model = load_model(run, function=function)
    lines = export_onnx(model, onnx)
    try:
        content = load_run(run)
    except InputError:  # the confined model, or one without its report, is the private one
        content = None
    typer.echo(printable("\n".join([f"{onnx} is written", *lines])))
    for sentence in describe_publication(content):
        typer.echo(f"cgd: {sentence}", err=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    threshold: Annotated[
        float,
        typer.Option(help="With two classes: the probability above which the confusion matrix counts the second one."),
    ] = 0.5,
) -> None:
    """Write the report of a run again, and print its path and the result."""
    from cgd.reporting.run_file import load_run
    from cgd.reporting.training_report import describe_result, write_report

    content = load_run(run)
    for path in write_report(run, threshold):
        typer.echo(path)
    typer.echo(printable("\n  ".join(describe_result(content))))


def _predict_with_row(
    together: Callable[..., Predictions],
    loaded: ConfinedModel,
    inputs: LoadedInputs,
    federation: Path,
    key: Path | None,
    listen: str | None,
    timeout: float | None,
) -> Predictions:
    from cgd.cli.display import Display
    from cgd.federation.config import Federation
    from cgd.federation.member import FederationMember
    from cgd.tabular.predict import row_federation

    name = loaded.provenance["participant"]
    row = row_federation(Federation.load(federation), name)
    with tempfile.TemporaryDirectory(prefix="cgd-predict-") as state:  # every prediction starts without a journal
        member = FederationMember(row, name, key=key, listen=listen, state=state, timeout=timeout)
        with Display(member) as display, member.peers as peers:
            return together(loaded, inputs, peers, show_message=display.show_message)


def _print_scores(predictions: Predictions, loaded: ConfinedModel) -> None:
    """Print notes and scores on standard error, because the predictions may go into a pipe."""
    for note in predictions.notes:
        typer.echo(f"cgd: {printable(note)}", err=True)
    scores = predictions.scores
    if scores is not None and loaded.data.task == "regression":
        typer.echo(f"cgd: root mean squared error {scores['rmse']:.4g}, mean absolute {scores['mae']:.4g}", err=True)
    elif scores is not None:
        auc = f", AUC {scores['auc']:.3f}" if scores["auc"] is not None else ""
        typer.echo(f"cgd: accuracy {100 * scores['accuracy']:.2f} %{auc}", err=True)
