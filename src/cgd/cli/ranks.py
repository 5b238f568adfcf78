"""`cgd join --run` in a job of several ranks, as torchrun starts it: rank 0 connects, and the others follow it."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from cgd.cli.base import INTERRUPTED, error_text, exit_code
from cgd.errors import CGDError, InputError
from cgd.federation.process_group import ranks_of_job
from cgd.transport.ranks import OneRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.peers import Peers
    from cgd.transport.ranks import Ranks


def rank_in_job(data: str | None) -> int:
    """Return the number of this process in its job, as torchrun has set it in the environment; 0 if it is alone.

    Raises:
        InputError: a job of several ranks has a table.
    """
    if _job_size() == 1:
        return 0
    if data is not None:
        raise InputError(
            f"--data trains in one process, and this is a job of {_job_size()} ranks; start `cgd join --data` without "
            "torchrun. With a program of your own (--run), a participant may have several ranks"
        )
    return int(os.environ["RANK"])


@contextmanager
def job(run: str | None) -> Iterator[Ranks]:
    """Provide the ranks of this job during the block; initialise `torch.distributed` unless the program has done it.

    Args:
        run: the place of the program; its module is imported first.

    Raises:
        InputError, RankError: see `ranks_of_job`.
    """
    if _job_size() == 1:
        yield OneRank()
        return
    import torch.distributed

    if run is not None:
        load_program(run)
    own = not torch.distributed.is_initialized()
    if own:
        torch.distributed.init_process_group()
    try:
        ranks = ranks_of_job()
        try:
            yield ranks
        finally:
            ranks.close()
    finally:
        if own:
            torch.distributed.destroy_process_group()


def load_program(run: str) -> Callable[[Peers], Any]:
    """Import a training function.

    Raises:
        InputError: there is none at this place.
    """
    from cgd.user_functions import load_function

    return load_function(run, "--run", ("the peers",))


def follow(name: str, run: str) -> None:
    """Run a program on a rank other than 0: without a display, a log or files of its own."""
    from cgd.federation.member import follow_ranks
    from cgd.user_functions import print_user_traceback

    logging.getLogger("cgd").addHandler(logging.NullHandler())  # rank 0 logs
    try:
        with job(run) as ranks, follow_ranks(ranks, name) as peers:
            load_program(run)(peers)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        text = error_text(error)
        if not isinstance(error, CGDError):
            print_user_traceback(error)
            text = f"{run} failed: {type(error).__name__}: {text}"
        typer.echo(f"cgd: on rank {os.environ['RANK']}: {text}", err=True)
        raise typer.Exit(exit_code(error)) from None


def _job_size() -> int:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and os.environ.get("RANK", "").isdecimal() else 1
