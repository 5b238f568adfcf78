"""`cgd join --track`: its options, and what it prints. See `cgd.reporting.tracking`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import typer

from cgd.cli.base import INTERRUPTED, exit_code, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from cgd.reporting.run_file import EvalRecord
    from cgd.reporting.tracking import Tracking


class RunTracking:
    """A context manager that tracks a run; without targets, it does nothing and needs no library.

    Args:
        tracking: the targets, if there are any.
    """

    def __init__(self, tracking: Tracking | None) -> None:
        self._tracking = tracking

    @classmethod
    def from_options(cls, track: Sequence[str]) -> Self:
        """Return the tracking for the values of `--track`.

        Raises:
            InputError: one cannot be used.
            MissingExtraError: the library of one is not installed.
        """
        if not track:
            return cls(None)
        from cgd.reporting.tracking import Tracking

        return cls(Tracking.from_options(track))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(exit_code(error))

    @property
    def cautions(self) -> Iterable[str]:
        """Return what it means to track a run, one sentence for each target."""
        targets = () if self._tracking is None else self._tracking.targets
        return (f"tracking with {each}: {each.caution}" for each in targets)

    def begin(self, federation: str, participant: str, folder: Path) -> None:
        """Print what it means, and track a run from now on; see `Tracking.begin`."""
        for caution in self.cautions:
            typer.echo(f"cgd: {printable(caution)}", err=True)
        if self._tracking is not None:
            self._tracking.begin(federation, participant, folder)

    def track(self, evaluation: EvalRecord, more: Mapping[str, float]) -> None:
        """See `Tracking.track`."""
        if self._tracking is not None:
            self._tracking.track(evaluation, more)

    def end(self, code: int) -> None:
        """Write the last figures, for some seconds at most, and print what is lacking; a second call does nothing."""
        tracking, self._tracking = self._tracking, None
        if tracking is None:
            return
        try:
            for line in tracking.end({0: "done", INTERRUPTED: "interrupted"}.get(code, "failed")):
                typer.echo(f"cgd: {printable(line)}", err=True)
        except KeyboardInterrupt:
            typer.echo("cgd: left before the last figures were written", err=True)
