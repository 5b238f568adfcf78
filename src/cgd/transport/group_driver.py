"""`GroupDriver`: what `Peers` sums with in a federation."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cgd.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.secagg.journal import OptimizerState, Step
    from cgd.secagg.messages import PeerId, Reason, SumSpec
    from cgd.transport.runtime import FederationRuntime


class GroupDriver:
    """Drives the sums of one group of a federation; see `Driver`."""

    def __init__(self, runtime: FederationRuntime, group: str) -> None:
        self._runtime = runtime
        self._group = group
        self._busy = threading.Lock()
        self.traffic = runtime.traffic

    @property
    def me(self) -> PeerId:
        """This member's name."""
        return self._runtime.me

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of the group's members in the present epoch."""
        return tuple(sorted(self._runtime.membership.group(self._group).members))

    @property
    def session(self) -> bytes:
        """The present view."""
        return self._runtime.membership.view

    @property
    def number(self) -> int:
        """How many sums of this group our program has made."""
        return self._runtime.membership.group(self._group).place

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One sum at a time."""
        if not self._busy.acquire(blocking=False):
            raise LocalProtocolError(f"{self.me} is in a sum already; a member's sums run one after the other")
        try:
            yield
        finally:
            self._busy.release()

    def total(
        self, spec: SumSpec, encode: Callable[[], npt.NDArray[Any]], epoch: int, step: Step | None
    ) -> npt.NDArray[Any]:
        """Run the next sum, or take its total from the ledger."""
        with self._runtime.holding() as membership:
            pending = membership.start(self._group, spec, encode, epoch, step)
            try:
                self._runtime.wait(self._group, lambda: pending.over)
                self._runtime.keep(self._group)
            except BaseException:  # a timeout, an interrupt: the sum goes on, and is there when it is asked for again
                membership.group(self._group).abandon()
                raise
            if pending.fault is not None:
                raise pending.fault
            assert pending.total is not None  # noqa: S101 - for the type checker
            self.traffic.sums += 1
            return pending.total

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum."""
        with self._runtime.holding() as membership:
            membership.group(self._group).refuse(reason)
        self._runtime.transport.wake()

    def close(self, *, done: bool) -> None:
        """Leave: when everybody is done if we are, else at once."""
        self._runtime.close(done=done)

    def outlook(self) -> tuple[int, int]:
        """The epoch of the next sum, and how many addends it has (or had, if it is of the past)."""
        with self._runtime.holding() as membership:
            self._runtime.wait(self._group, lambda: membership.group(self._group).ready)
            each = membership.group(self._group)
            return each.next_epoch, each.next_addends

    def present(self) -> int:
        """The present epoch."""
        with self._runtime.holding() as membership:
            return membership.group(self._group).epoch

    def past(self) -> bool:
        """Whether the next sum was made before."""
        with self._runtime.holding() as membership:
            each = membership.group(self._group)
            return each.place < len(each.journal)

    def moving(self) -> AbstractContextManager[object]:
        """Held while an optimiser's state changes."""
        return self._runtime.holding()

    def remember(self, slot: int, steps: int, content: Callable[[], bytes], *, fixed: bool = False) -> None:
        """Leave an optimiser's state with the members."""
        with self._runtime.holding() as membership:
            membership.group(self._group).journal.remember(slot, steps, content, fixed=fixed)
            membership.remembered()

    def recall(self, slot: int) -> OptimizerState | None:
        """The state of an optimiser as the members remember it; waits until that is known."""
        with self._runtime.holding() as membership:
            self._runtime.wait(self._group, lambda: membership.group(self._group).current)
            return membership.group(self._group).journal.states.get(slot)

    def skip(self, slot: int, steps: int) -> None:
        """Do without the sums of an optimiser's first steps."""
        with self._runtime.holding() as membership:
            membership.group(self._group).skip(slot, steps)

    def jump(self, step: int) -> None:
        """Begin with this step of the program's loop, in all groups."""
        with self._runtime.holding() as membership:  # who is not current yet would not be moved
            self._runtime.wait(self._group, lambda: membership.current)
            membership.jump(step)

    def reach(self, step: int) -> None:
        """The program's loop is at this step."""
        with self._runtime.holding() as membership:
            membership.clock = step
