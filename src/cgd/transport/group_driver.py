"""`GroupDriver` and `GroupRecovery`: the sums and the recovery states of one group of a federation."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cgd.errors import LocalProtocolError
from cgd.secagg.attendance import epoch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.secagg.journal import OptimizerState
    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import PeerId, Reason, SumSpec
    from cgd.transport.runtime import FederationRuntime
    from cgd.transport.waiting_times import WaitingTimes


class GroupDriver:
    """Runs the sums of one group of a federation; see `Driver`."""

    def __init__(self, runtime: FederationRuntime, group: str) -> None:
        self._runtime = runtime
        self._group = group
        self._busy = threading.Lock()
        self.traffic = runtime.traffic

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return self._runtime.me

    @property
    def waiting(self) -> WaitingTimes:
        """How long our program computed and waited until now, in all groups."""
        return self._runtime.waiting.times()

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of the group's members in the current epoch."""
        return tuple(sorted(self._runtime.membership.group(self._group).members))

    @property
    def session_id(self) -> bytes:
        """The identifier of the current view."""
        return self._runtime.membership.view

    @property
    def number(self) -> int:
        """The number of sums of this group that the program has run."""
        return self._runtime.membership.group(self._group).next_index

    @property
    def epoch(self) -> int:
        """The current epoch of the membership."""
        with self._runtime.locked() as membership:
            return membership.group(self._group).epoch

    @property
    def quorum(self) -> int | None:
        """The least number of members of a sum in the current epoch; None if every sum has all."""
        return self._runtime.membership.federation_spec.quorum

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Admit one sum at a time."""
        if not self._busy.acquire(blocking=False):
            raise LocalProtocolError(f"{self.me} is in a sum already; a member's sums run one after the other")
        try:
            yield
        finally:
            self._busy.release()

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum and its number of addends, as recorded if it is replayed."""
        with self._runtime.locked() as membership:
            self._runtime.wait(self._group, lambda: membership.group(self._group).next_sum_known)
            group = membership.group(self._group)
            return group.next_epoch, group.next_addends

    def run_sum(
        self,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,
        step: Step | None,
        before_reveal: Callable[[], None],
    ) -> npt.NDArray[Any]:
        """Run the next sum, or read its total from the journal."""
        with self._runtime.locked() as membership:
            pending = membership.start(self._group, spec, encode, epoch, step, before_reveal)
            try:
                self._runtime.wait(self._group, lambda: pending.done)
            except BaseException:  # a timeout or an interrupt: the sum continues, and a repeated call gets its total
                membership.group(self._group).abandon()
                raise
            group = membership.group(self._group)
        try:
            self._runtime.persist_new_entries(self._group, group.journal)
        except BaseException:
            group.abandon()
            raise
        if pending.fault is not None:
            raise pending.fault
        assert pending.total is not None  # noqa: S101 - for the type checker
        self.traffic.sums += 1
        return pending.total

    def abort_sum(self, reason: Reason) -> None:
        """Abort the next sum."""
        with self._runtime.locked() as membership:
            membership.group(self._group).refuse(reason)
        self._runtime.transport.wakeup()

    def repeat_sum(self) -> None:
        """Return the total of the last sum again when the program requests it again."""
        with self._runtime.locked() as membership:
            membership.group(self._group).abandon()

    def close(self, *, done: bool) -> None:
        """Leave the federation: with `done` when all programs have finished, otherwise at once."""
        self._runtime.close(done=done)


class GroupRecovery:
    """The recovery store of one group of a federation, kept in the group's journal; see `Recovery`.

    The journal stores the latest bytes of each slot, compares them in view changes and sends them to members that lack
    them.
    """

    keeps_states = True

    def __init__(self, runtime: FederationRuntime, group: str) -> None:
        self._runtime = runtime
        self._group = group

    def is_replay(self) -> bool:
        """Return whether the program's next sum is in the journal."""
        with self._runtime.locked() as membership:
            group = membership.group(self._group)
            return group.next_index < len(group.journal)

    def save(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        """Store an optimiser's state in the journal, and offer it to members that wait for it."""
        with self._runtime.locked() as membership:
            membership.group(self._group).journal.save_state(slot, steps, content, fixed=fixed)
            membership.state_saved()

    def load(self, slot: int) -> OptimizerState | None:
        """Return an optimiser's state, once this member's journal is known to be complete."""
        with self._runtime.locked() as membership:
            self._runtime.wait(self._group, lambda: membership.group(self._group).up_to_date)
            return membership.group(self._group).journal.states.get(slot)

    def is_overtaken(self, slot: int, steps: int) -> bool:
        """Return whether the other members have gone on without this one, beyond this number of steps."""
        with self._runtime.locked() as membership:
            group = membership.group(self._group)
            state = group.journal.states.get(slot)
            return group.quorum is not None and state is not None and state.steps > steps

    def size_in(self, epoch: int) -> int:
        """Return the number of the group's members in an epoch, with those that are absent; 0 if it is not known.

        The first sum of an epoch is made by all of its members.
        """
        with self._runtime.locked() as membership:
            if epoch_of(epoch) == membership.federation_spec.epoch:
                return len(membership.federation_spec.groups[self._group])
            entries = membership.group(self._group).journal.entries
            return max((each.addends for each in entries if epoch_of(each.epoch) == epoch_of(epoch)), default=0)

    def require_all(self, *, required: bool) -> None:
        """Let the program's next sums wait for all members, although there is a quorum; or no longer."""
        with self._runtime.locked() as membership:
            membership.group(self._group).all_required = required

    def took_part_in_last(self) -> bool:
        """Return whether this member's addend is in the program's latest sum."""
        with self._runtime.locked() as membership:
            group = membership.group(self._group)
            certificate = group.journal.entries[group.next_index - 1].certificate if group.next_index else None
            return certificate is None or self._runtime.me in certificate.keys

    def skip(self, slot: int, steps: int) -> None:
        """Skip the sums of an optimiser's first `steps` steps."""
        with self._runtime.locked() as membership:
            membership.group(self._group).skip(slot, steps)

    def jump(self, step: int) -> None:
        """Start the program's loop at this step, in all groups."""
        with self._runtime.locked() as membership:  # a group that is not current yet would not be moved
            self._runtime.wait(self._group, lambda: membership.up_to_date)
            membership.jump(step)

    def set_step(self, step: int) -> None:
        """Record the step that the program's loop is at."""
        with self._runtime.locked() as membership:
            membership.loop_step = step

    def may_be_revealed(self, step: Step) -> bool:
        """Return whether this member, or as reported another one, may have revealed the gradient sum of this step."""
        with self._runtime.locked() as membership:
            self._runtime.wait(self._group, lambda: membership.group(self._group).up_to_date)
            return membership.group(self._group).may_be_revealed(step)

    def took_part(self) -> bool:
        """Return False if the program's next sum is in the journal, and this member was not one of its members."""
        with self._runtime.locked() as membership:
            group = membership.group(self._group)
            certificate = group.journal.entries[group.next_index].certificate if group.next_in_journal else None
            return certificate is None or self._runtime.me in certificate.keys
