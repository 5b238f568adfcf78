"""Whoever cannot take part in a sum says so."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from cgd.errors import CGDError
from cgd.optim.sample_count import SampleCountMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cgd.peers import Peers


@contextmanager
def declining(all_peers: Iterable[Peers]) -> Iterator[None]:
    """If something fails, nobody shall wait for us in the sums that were to follow."""
    try:
        yield
    except SampleCountMismatchError:
        raise
    except BaseException:
        for peers in all_peers:
            with suppress(CGDError):  # if they are closed already, the others know
                peers.decline()
        raise
