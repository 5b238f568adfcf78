"""A participant of several processes: the *ranks* of one job, of which rank 0 alone communicates with the peers.

All ranks run the same program. Each call that concerns the peers is made on every rank: rank 0 makes it and sends the
result, or the error, to the others. So all ranks see the same totals, counts, epochs and states, and take the same
decisions. Before each call they compare what they call, so a rank that failed, or does something else, is an error on
all ranks and not a wait without end.

`Ranks` is the interface to the job, which `cgd.federation.process_group` implements with `torch.distributed`.
`RankDriver` and `RankRecovery` are what `Peers` uses on each rank in place of its driver and recovery store.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cgd.errors import ClosedError, LocalProtocolError, RankError
from cgd.secagg.journal import OptimizerState
from cgd.transport.driver import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import PeerId, Reason, SumSpec
    from cgd.transport.driver import Driver, Recovery
    from cgd.transport.waiting_times import WaitingTimes

    Reply = tuple[Any, bytes]
    """What rank 0 sends to the others: a value that JSON can represent, and bytes."""


class Ranks(Protocol):
    """The ranks of one participant. Every method is called on all ranks, in the same order."""

    rank: int
    """The number of this process; rank 0 communicates with the peers."""
    size: int
    """The number of ranks; with one, nothing is exchanged."""

    def exchange(self, call: str, **own: Any) -> list[dict[str, Any]]:
        """Return the small values of all ranks, in their order.

        Args:
            call: what is called; the same on all ranks.
            own: the values of this rank, which JSON can represent.

        Raises:
            RankError: a rank failed, makes another call, or was lost.
        """

    def lead(self, call: str, action: Callable[[], Reply], interrupt: Callable[[], None] = lambda: None) -> Reply:
        """Run `action` on rank 0, however long it takes, and return its result on every rank.

        Args:
            call: what is called; the same on all ranks.
            action: called on rank 0 only.
            interrupt: called on rank 0, in another thread, to end the action if a rank is lost meanwhile.

        Raises:
            CGDError: the action raised it on rank 0; here it is the same error on every rank.
            RankError: as for `exchange`, or the action raised another error.
        """

    def add(self, values: npt.NDArray[Any], factors: Sequence[float] | None = None) -> npt.NDArray[Any]:
        """Return the sum of the arrays of all ranks, each multiplied by its factor.

        Floats are added in double precision in the order of the ranks, and rounded once. All ranks get the same bits.
        """

    def report(self, error: BaseException) -> None:
        """Let the other ranks end their next call with an error, unless they know of this one."""

    def close(self) -> None:
        """Leave the group of the ranks. A second call does nothing."""


class OneRank:
    """A participant of one process; see `Ranks`."""

    rank, size = 0, 1

    def exchange(self, call: str, **own: Any) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the values of this process."""
        return [own]

    def lead(
        self,
        call: str,  # noqa: ARG002
        action: Callable[[], Reply],
        interrupt: Callable[[], None] = lambda: None,  # noqa: ARG002
    ) -> Reply:
        """Run the action."""
        return action()

    def add(
        self,
        values: npt.NDArray[Any],
        factors: Sequence[float] | None = None,  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        """Return the values."""
        return values

    def report(self, error: BaseException) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def add_weighted(ranks: Ranks, values: npt.NDArray[Any], weight: float | None) -> tuple[npt.NDArray[Any], float | None]:
    """Return the sum of the values of all ranks, and with weights their weighted mean and the sum of the weights.

    Raises:
        RankError: the values of another rank have another shape or type, or some ranks have a weight and others not.
    """
    if ranks.size == 1:
        return values, weight
    if values.dtype.kind in "iub":
        values = values.astype(np.int64)
    own = {"values": f"{values.dtype.name} of shape {values.shape}, {'without' if weight is None else 'with'} a weight"}
    found = ranks.exchange("sum of the ranks", **own, weight=weight)
    check_same(found, "values", "values of {}", "pass values of the same shape and type on all ranks")
    if weight is None:
        return ranks.add(values), None
    weights = [each["weight"] for each in found]
    total = float(sum(weights))
    return ranks.add(values, [each / total if total else 0.0 for each in weights]), total


def check_same(found: Sequence[dict[str, Any]], key: str, what: str, remedy: str) -> None:
    """Check that all ranks have exchanged the same value.

    Args:
        found: the values of all ranks.
        key: the name of the value.
        what: what a rank has, with `{}` for the value.
        remedy: what to do.

    Raises:
        RankError: a rank has another value than rank 0; on all ranks.
    """
    first = found[0][key]
    for rank, each in enumerate(found):
        if each[key] != first:
            raise RankError(rank, f"it has {what.format(each[key])}, and rank 0 {what.format(first)}; {remedy}")


class RankDriver:
    """A member's side of the sums on each rank of its job; see `Driver`.

    Args:
        ranks: the ranks of the job.
        driver: on rank 0, the driver that communicates with the peers; None on the others.
        state: on the others, what `describe_driver` returned on rank 0.
    """

    def __init__(self, ranks: Ranks, driver: Driver | None, state: dict[str, Any] | None = None) -> None:
        self._ranks, self._driver = ranks, driver
        self._state = describe_driver(driver) if driver is not None else dict(state or {})
        self._busy, self._closed = threading.Lock(), False
        self.traffic = Traffic() if driver is None else driver.traffic

    @property
    def waiting(self) -> WaitingTimes | None:
        """How long our program computed and waited until now; None on the other ranks."""
        return None if self._driver is None else self._driver.waiting

    # These are the values of the last call, so that they are the same on all ranks and can be read on one alone.

    @property
    def me(self) -> PeerId:
        """The name of this member."""
        return str(self._state["me"])

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The names of all members, in order."""
        return tuple(self._state["members"])

    @property
    def session_id(self) -> bytes:
        """The identifier of the session."""
        return bytes.fromhex(self._state["session_id"])

    @property
    def number(self) -> int:
        """The number of the latest sum."""
        return int(self._state["number"])

    @property
    def epoch(self) -> int:
        """The epoch of the membership."""
        return int(self._state["epoch"])

    @property
    def quorum(self) -> int | None:
        """The least number of members of a sum, if members may be absent."""
        found = self._state["quorum"]
        return None if found is None else int(found)

    def exclusive(self) -> AbstractContextManager[None]:
        """Admit one sum at a time."""
        if self._driver is not None:
            return self._driver.exclusive()
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; make new peers for further sums")
        return nullcontext()

    def lead(self, call: str, action: Callable[[], Reply]) -> Reply:
        """Make a call to the peers on rank 0, and return its result on every rank; see `Ranks.lead`."""
        if not self._busy.acquire(blocking=False):
            raise LocalProtocolError(f"{self.me} is in a call already; the calls of a rank run one after the other")
        try:
            (value, self._state), content = self._ranks.lead(call, lambda: self._with_state(action()), self._interrupt)
        finally:
            self._busy.release()
        return value, content

    def _with_state(self, reply: Reply) -> Reply:
        assert self._driver is not None  # noqa: S101 - for the type checker
        return (reply[0], describe_driver(self._driver)), reply[1]

    def _interrupt(self) -> None:
        if self._driver is not None:
            self._driver.close(done=False)

    def next_round(self) -> tuple[int, int]:
        """Return the epoch of the next sum and its number of addends."""
        driver = self._driver
        (epoch, addends), _ = self.lead("next_round", lambda: (driver.next_round(), b"") if driver else (None, b""))
        return int(epoch), int(addends)

    def run_sum(
        self,
        spec: SumSpec,
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,
        step: Step | None,
        before_reveal: Callable[[], None],
    ) -> npt.NDArray[Any]:
        """Run the next sum with the addend of rank 0, which all ranks have computed; return its total."""

        def run() -> Reply:
            assert self._driver is not None  # noqa: S101 - for the type checker
            total = self._driver.run_sum(spec, encode, epoch, step, before_reveal)
            return total.dtype.name, total.tobytes()

        # The context of an optimiser has a digest of the displacement: all ranks have the same, or this is an error.
        digest = hashlib.sha256(repr((spec, epoch, step)).encode()).hexdigest()
        dtype, content = self.lead(f"sum of {spec.context or 'values'} {digest}", run)
        if self._driver is None:
            self.traffic.sums += 1
        return np.frombuffer(content, dtype=dtype).copy()

    def abort_sum(self, reason: Reason) -> None:
        """Abort the next sum, or inform the other ranks of the error that is being handled.

        If another rank has failed, the sum is not aborted: the peers wait until the job is restarted.
        """
        error = sys.exception()
        if error is not None:
            self._ranks.report(error)
        if self._driver is not None and not any(isinstance(each, RankError) for each in causes(error)):
            self._driver.abort_sum(reason)

    def repeat_sum(self) -> None:
        """Return the total of the last sum again when the program requests it again."""
        if self._driver is not None:
            self._driver.repeat_sum()

    def close(self, *, done: bool) -> None:
        """Leave the group; only rank 0 notifies its members."""
        self._closed = True
        if self._driver is not None:
            self._driver.close(done=done)
        self._ranks.close()


class RankRecovery:
    """The recovery store of a member on each rank of its job: that of rank 0; see `Recovery`.

    Args:
        driver: the driver of this rank.
        recovery: on rank 0, the store; None on the others.
    """

    def __init__(self, driver: RankDriver, recovery: Recovery | None) -> None:
        self._driver, self._recovery = driver, recovery
        self.keeps_states = recovery is not None and recovery.keeps_states

    def _ask(self, call: str, action: Callable[[Recovery], Any]) -> Any:
        recovery = self._recovery
        return self._driver.lead(call, lambda: (action(recovery), b"") if recovery else (None, b""))[0]

    def is_replay(self) -> bool:
        """Return whether the program's next sum was finished before and comes from the journal."""
        return bool(self._ask("is_replay", lambda recovery: recovery.is_replay()))

    def save(self, slot: int, steps: int, content: bytes, *, fixed: bool = False) -> None:
        """Store an optimiser's state on rank 0."""
        if self._recovery is not None:
            self._recovery.save(slot, steps, content, fixed=fixed)

    def load(self, slot: int) -> OptimizerState | None:
        """Return an optimiser's state as the members have it."""

        def load() -> Reply:
            state = self._recovery.load(slot) if self._recovery is not None else None
            return (None, b"") if state is None else ((state.steps, state.fixed), state.content)

        found, content = self._driver.lead(f"load {slot}", load)
        return None if found is None else OptimizerState(int(found[0]), bytes(content), bool(found[1]))

    def is_overtaken(self, slot: int, steps: int) -> bool:
        """Return whether the other members have gone on without this one, beyond this number of steps."""
        if self._driver.quorum is None:
            return False
        return bool(self._ask(f"is_overtaken {slot} {steps}", lambda recovery: recovery.is_overtaken(slot, steps)))

    def size_in(self, epoch: int) -> int:
        """Return the number of members in an epoch, with those that are absent; 0 if it is not known."""
        return int(self._ask(f"size_in {epoch}", lambda recovery: recovery.size_in(epoch)))

    def require_all(self, *, required: bool) -> None:
        """Let the program's next sums wait for all members, although there is a quorum; or no longer."""
        if self._recovery is not None:
            self._recovery.require_all(required=required)

    def took_part_in_last(self) -> bool:
        """Return whether this member's addend is in the program's latest sum."""
        return bool(self._ask("took_part_in_last", lambda recovery: recovery.took_part_in_last()))

    def skip(self, slot: int, steps: int) -> None:
        """Skip the sums of an optimiser's first `steps` steps."""
        if self._recovery is not None:
            self._recovery.skip(slot, steps)

    def jump(self, step: int) -> None:
        """Start the program's loop at this step."""
        self._ask(f"jump {step}", lambda recovery: recovery.jump(step))

    def set_step(self, step: int) -> None:
        """Record the step that the program's loop is at."""
        if self._recovery is not None:
            self._recovery.set_step(step)

    def may_be_revealed(self, step: Step) -> bool:
        """Return whether the gradient sum of this step was attempted before."""
        return bool(self._ask(f"may_be_revealed {step}", lambda recovery: recovery.may_be_revealed(step)))

    def took_part(self) -> bool:
        """Return False if the program's next sum was finished by other members, before this one joined."""
        return bool(self._ask("took_part", lambda recovery: recovery.took_part()))


def describe_driver(driver: Any) -> dict[str, Any]:
    """Return what the properties of a driver, or of the peers that use it, are now."""
    return {
        "me": driver.me,
        "members": list(driver.members),
        "session_id": driver.session_id.hex(),
        "number": driver.number,
        "epoch": driver.epoch,
        "quorum": driver.quorum,
    }


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__context__
