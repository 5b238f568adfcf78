"""The root of the command line: options, errors, exit codes.

Heavy imports are inside the commands, so that help is fast.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

import cgd
from cgd.errors import CGDError, InputError, LocalProtocolError, PeerTimeoutError, RangeError

app = typer.Typer(
    help="Federated learning in which no participant shares its data or its model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Exit codes; docs/operations.md lists them.
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
    """Federated learning in which no participant shares its data or its model."""


def printable(text: object) -> str:
    r"""Return a text with terminal control characters escaped: names come from other participants' files.

    Examples:
        >>> printable("two\nlines, \x1b[2J")
        'two\nlines, \\x1b[2J'
    """
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in str(text))


def error_text(error: BaseException) -> str:
    """Return the text of an error for the command line.

    Examples:
        >>> error_text(InputError("the port is in use; choose another (listen=, --listen)"))
        'the port is in use; choose another (--listen)'
    """
    # Of the names of a remedy, such as "(listen=, --listen)", the first is for Python.
    return re.sub(r"\(\w+=, (--[\w-]+)\)", r"(\1)", printable(error))


def exit_code(error: BaseException | None) -> int:
    """Return the code with which the command line ends after an error, or without one."""
    if error is None:
        return 0
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):  # of a program that calls sys.exit
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    # A value out of range is a failure of the training, not bad input of the command. A program that is out of order,
    # or a training that must not continue, ends in the same way at every restart, as bad input does.
    kinds: tuple[tuple[type[BaseException], int], ...] = (
        (RangeError, FAILED),
        (InputError, BAD_INPUT),
        (LocalProtocolError, BAD_INPUT),
        (PeerTimeoutError, PEER_MISSING),
        (KeyboardInterrupt, INTERRUPTED),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), FAILED)


def main() -> None:
    """Run the command line; print an expected error as one line on standard error, without a traceback."""
    try:
        app()
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except (CGDError, OSError) as error:
        typer.echo(f"cgd: {error_text(error)}", err=True)
        sys.exit(exit_code(error))
