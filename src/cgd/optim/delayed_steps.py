"""Bounded delay: a step enters its gradient, and moves by the sum that was entered some steps before.

With a delay τ, the program computes the gradients of the next τ steps while a sum is in progress, so computing and
summing overlap. A member that is late by up to τ steps stops nobody: the others wait for its addend only when the
displacement has to move by that sum. All members move by the same sums in the same order, and the gradient of step k is
computed at the displacement after the sums before k − τ, at every member. A sum keeps the options of the step in which
it was entered, so that D = −(α_1·G_1 + … + α_k·G_k) as without a delay, once all sums are in it.

The sums run one at a time, in the order of the steps (`cgd.sum_queue`). Their gradients are fixed before, so there is
nothing to gain from two sums at once but the round trips of a slow network.

**Recovery.** A member that is restarted must enter the gradient that it would have entered: a sum that failed after our
key left may be known to a dishonest member, and a second one with another gradient would disclose the difference. So it
must be computed at the same displacement. Therefore the state that members store is not the newest one, but that of the
oldest step whose sum may be unfinished. A restarted program takes the totals of the finished sums after it from the
journal, and computes exactly those gradients again that were not summed yet. The steps in between, whose gradients were
computed at earlier displacements, only repeat finished sums. Members compared a digest of the displacement before each
of them; these digests are part of the stored state.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cgd.errors import InputError, MembersChangedError, RangeError
from cgd.optim import sample_count
from cgd.optim.displacement import locate_range_error, trainable
from cgd.optim.flat_vectors import join, working_dtype
from cgd.optim.sample_count import abort_on_error
from cgd.secagg.fixed_point import FixedPoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.recovery import OptimizerRecovery
    from cgd.optim.step_sum import StepSum, StepSums
    from cgd.peers import Peers
    from cgd.sum_queue import QueuedSum


MAX_DELAY = 64
"""The largest delay. A member holds as many states and sums, and a larger one needs steps too small to be of use."""


def check_delay(delay: Any, steps: int | None = None) -> int:
    """Return a delay.

    Raises:
        InputError: it is not a number of steps from 0 to `MAX_DELAY`, or not below the number of all steps.
    """
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay <= MAX_DELAY:
        raise InputError(
            f"delay is {delay!r}; it is the number of steps after which the model moves by a sum, from 0 to {MAX_DELAY}"
        )
    if steps is not None and delay and delay >= steps:
        raise InputError(
            f"delay is {delay} and there are {steps} steps: all gradients would be those of the start. Choose a delay "
            "far below the number of steps, such as 1 or 2"
        )
    return delay


class Opened(NamedTuple):
    """The opened sum of a step.

    Attributes:
        totals: the total, by parameter.
        counted: the count of the samples that its weights belong to.
        replayed: whether it came from the journal.
    """

    totals: dict[torch.Tensor, torch.Tensor]
    counted: dict[str, Any]
    replayed: bool


@dataclass(eq=False)
class EnteredStep:
    """A step whose sum was entered, and that the displacement has not moved by.

    Attributes:
        number: the number of the step.
        parameters: the parameters whose gradients are summed.
        rules: the update rule of each of them, with the options of the step.
        opened: the opened sum, or the queued one.
    """

    number: int
    parameters: list[torch.Tensor]
    rules: dict[torch.Tensor, UpdateRule]
    opened: QueuedSum[Opened] | Opened


@dataclass
class _StoredState:
    """A state that may be stored once the sums of all steps before `first_step` are finished."""

    first_step: int
    moved: int
    content: bytes


@dataclass
class DelayedSteps:
    """The steps of an optimiser with a delay, for one set of peers.

    Attributes:
        peers: the members.
        delay: τ.
        sums: opens the sums.
        recovery: stores the states.
        private: whether they have noise.
        moved: the number of sums that the displacement has moved by.
        replayed_until: the first step whose sum may have been unfinished when the loaded state was stored.
        replaying: whether the next sum may come from the journal. Until it is known, the program waits for each sum.
    """

    peers: Peers
    delay: int
    sums: StepSums
    recovery: OptimizerRecovery
    private: bool = False
    moved: int = 0
    replayed_until: int = 0
    replaying: bool = True
    _entered: deque[EnteredStep] = field(default_factory=deque)
    _counted: dict[str, Any] = field(default_factory=dict)  # by the latest sum that ran
    _recount: bool = False
    _digests: dict[int, bytes] = field(default_factory=dict)  # of the states before the steps from `moved` on
    _latest: int = 0  # `moved` of the latest state that was added
    _states: deque[_StoredState] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._entered)

    def load(self, moved: int, digests: list[bytes], counted: dict[str, Any]) -> None:
        """Continue after a state that the members have stored, or that the program has loaded."""
        self.moved, self.replayed_until = moved, moved + len(digests)
        self._counted = {key: counted[key] for key in sample_count.NOT_COUNTED}
        self._digests, self._latest = dict(enumerate(digests, start=moved)), moved

    @property
    def steps_taken(self) -> int:
        """The number of steps that need no gradient, because their sums are finished."""
        return max(self.moved, self.replayed_until)

    def check_drained(self, what: str) -> None:
        """Check that the displacement has moved by all sums.

        Raises:
            InputError: it has not.
        """
        if self._entered:
            raise InputError(
                f"{what} was called and the sums of {len(self)} steps are in progress, because delay is {self.delay}; "
                "call optimizer.drain() before it, at all members"
            )

    def recount(self) -> None:
        """Let the next step that is entered count the samples again."""
        self._recount = True

    def _check_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Check that the entered sums are of the parameters that are trained now.

        Raises:
            InputError: layers were frozen, unfrozen or added since.
        """
        if self._entered and set(self._entered[-1].parameters) != set(parameters):
            raise InputError(
                f"the trained layers have changed, and {len(self)} steps were entered with the former ones; call "
                "optimizer.drain() before requires_grad or add_param_group changes them"
            )

    def enter(self, groups: list[dict[str, Any]], rules: dict[torch.Tensor, UpdateRule]) -> bool:
        """Enter the next step's gradients in a sum; return whether an earlier process of this participant has done it.

        As long as it may have, the program waits for the sum. After the first one that is new, sums run on their own.
        """
        number = groups[0]["steps"]
        if self.recovery.has_taken(self.peers, number):
            self.recovery.skip(self.peers, number + 1)
            return True
        if self._entered and self._entered[-1].number == number:  # this step failed later, in an earlier call
            return self.replaying
        self._check_parameters(trainable(*groups))
        requested = self.sums.request(self.peers, groups, number)
        requested.groups = [dict(group) for group in requested.groups]
        requested.step_input, requested.one_model = copy(requested.step_input), True
        if number < self.replayed_until:
            digests = {**requested.context.digests, "state": self._digests[number]}
            requested.context, requested.replay = replace(requested.context, digests=digests), True
            zeros = torch.zeros_like(join([each.to(working_dtype(each)) for each in requested.parameters]))
            requested.vector = lambda: zeros.double() if self.private else zeros  # nothing of it is sent
        self._digests[number] = requested.context.digests["state"]
        recount = [self._recount]

        def run() -> Opened:
            return self._run(requested, recount)

        opened: QueuedSum[Opened] | Opened
        if self.replaying:
            opened = run()
            self.replaying = opened.replayed
        else:
            with abort_on_error([self.peers]):
                vector = requested.vector().clone()  # the program may write into its gradients
                _check_range(vector, requested, self.peers, private=self.private)
            requested.vector = lambda: vector
            opened = self.peers.queue.submit(run)
        self._entered.append(EnteredStep(number, requested.parameters, rules, opened))
        self._recount = False
        return self.replaying

    def _run(self, requested: StepSum, recount: list[bool]) -> Opened:
        """Run the sum of a step, with the count of the sum before it, and count first if that is needed."""
        for group in requested.groups:
            group.update(self._counted)
            if recount[0]:
                sample_count.discard(group)
        recount[0] = False
        try:
            while True:
                with suppress(MembersChangedError):  # count and weight again for the new members
                    totals, replayed = self.sums.open(self.peers, requested)
                    break
        finally:
            self._counted = {key: requested.groups[0][key] for key in sample_count.NOT_COUNTED}
        return Opened(totals, self._counted, replayed)

    def due(self, *, everything: bool = False) -> Iterator[tuple[EnteredStep, Opened]]:
        """Yield the steps that the displacement has to move by now, with their sums; wait for each of them.

        If a sum has failed, its error is raised, and nothing is lost: the next call tries it again.
        """
        while len(self) > (0 if everything else self.delay):
            first = self._entered[0]
            opened = first.opened if isinstance(first.opened, Opened) else self.peers.queue.result(first.opened)
            self._entered.popleft()
            self.moved = first.number + 1
            yield first, opened

    def save(self, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Store the newest state before which no step is unfinished; keep the present one until that is true of it."""
        if not self.peers.recovery.keeps_states:
            return
        if not self._entered:
            self._states.clear()  # nothing is in progress: no older state is needed
        next_step = groups[0]["steps"]
        if self.moved != self._latest:
            self._digests = {step: each for step, each in self._digests.items() if step >= self.moved}
            digests = [self._digests[step] for step in range(self.moved, next_step)]
            content = self.recovery.content(self.peers, groups, state, digests)
            self._states.append(_StoredState(next_step, self.moved, content))
            self._latest = self.moved
        newest = None
        while self._states and self._states[0].first_step <= self.moved:
            newest = self._states.popleft()
        if newest is not None:
            self.recovery.put(self.peers, newest.moved, newest.content)


def _check_range(vector: torch.Tensor, requested: StepSum, peers: Peers, *, private: bool) -> None:
    """Check at once what would otherwise fail when the sum is at its turn.

    Raises:
        RangeError: a value is NaN, infinite or beyond the bound; the error names the parameter.
    """
    bound = peers.settings.bound
    if private or bool((vector.abs() <= bound).all()):
        return
    try:
        FixedPoint.for_weighted_sum(addends=1, bound=bound, ring_bits=64).encode(vector.numpy())
    except RangeError as error:
        what = requested.step_input.what
        raise locate_range_error(error, requested.groups, requested.parameters, what) from None
