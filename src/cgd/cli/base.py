"""The command line's root: options, errors, exit codes. Heavy imports are inside the commands: help comes at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import cgd
from cgd.errors import CGDError, InputError, PeerTimeoutError, RangeError

app = typer.Typer(
    help="Federated learning in which nobody shares data or a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# What a command's end tells whoever started it; docs/operations.md has the list.
FAILED, BAD_INPUT, PEER_MISSING, INTERRUPTED = 1, 2, 3, 130


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cgd {cgd.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning in which nobody shares data or a model."""


def printable(text: object) -> str:
    r"""Return a text for a terminal: a name from somebody's file could hold sequences that command the terminal.

    Examples:
        >>> printable("two\nlines, \x1b[2J")
        'two\nlines, \\x1b[2J'
    """
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in str(text))


def main() -> None:
    """Run the command line; an error of ours is one line on standard error, not a traceback."""
    try:
        app()
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except (CGDError, OSError) as error:
        typer.echo(f"cgd: {printable(error)}", err=True)
        # A value out of range is the training's failure, not the command's.
        kinds = ((RangeError, FAILED), (InputError, BAD_INPUT), (PeerTimeoutError, PEER_MISSING))
        sys.exit(next((code for kind, code in kinds if isinstance(error, kind)), FAILED))
