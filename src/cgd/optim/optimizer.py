"""Confined optimisers: replace the optimiser, keep the training loop.

A step adds this participant's gradient, weighted by its part n_l/n of all samples, to a secure sum; the opened sum
moves the common displacement D; the private weights become origin + D. The weights sum to one, so the sum is the
gradient of the mean loss over all samples, and `lr` has its usual meaning for any number of members.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch

from cgd.errors import InputError, MembersChangedError
from cgd.optim import program_checks, recovery, running_statistics, sample_count, saved_state, untrained_values
from cgd.optim.clipping import check_max_norm
from cgd.optim.delayed_steps import DelayedSteps, check_delay
from cgd.optim.displacement import initial_state, place_for_step, reject_weight_decay, trainable
from cgd.optim.evaluation_mode import EvaluationMode
from cgd.optim.flat_vectors import flatten_displacements
from cgd.optim.local_steps import LocalSteps
from cgd.optim.lr_scheduler import catch_up, check_schedulers
from cgd.optim.option_checks import check_whole
from cgd.optim.origin import check_besides, warn_if_unconfined
from cgd.optim.rank_gradients import RankGradients
from cgd.optim.sample_count import NOT_COUNTED, abort_on_error
from cgd.optim.step_input import StepInput
from cgd.optim.step_sum import StepSums
from cgd.optim.weighted_sum import WeightedSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.privacy import Privacy
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.peers import Peers


class ConfinedOptimizer(EvaluationMode, ABC):
    """Base class of confined optimisers; a subclass chooses the rule that moves the displacement.

    The origin of a parameter is its value at its first step. After that its value is origin + displacement, and a
    program that writes another value into it is stopped at the next step. Parameters that do not require a gradient are
    left out; a parameter without a gradient contributes zero, because a peer may have one. All members need the same
    parameters in the same order and the same options. Members compare these, and a digest of the displacement, before
    they share anything. A `torch.amp.GradScaler` can be used: with an infinite gradient, a member enters zeros.

    A parameter group may have its own `peers` (in a grid, those of the first layer are its column group). Groups with
    fewer members are summed first, and nothing moves before the last sum is open: if one member fails, none moves.

    In a federation (`cgd.join`) the members store the displacement. A restarted participant runs its program again: its
    first step restores the displacement, and earlier steps are skipped without a sum. Or it loops over `steps(count)`.

    Attributes:
        peers: the members of the sum.
        samples: n_l, the number of this participant's samples; in a job of several ranks, those of this rank.
        privacy: differential privacy, if wanted: clipping, noise and the budget.
        records_digest: a digest of the samples. If it is set before the first step, a restarted participant is stopped
            also if it has the same number of other samples. It is not sent; see `sample_count.py`.
        replayed: True if an earlier process of this participant took the latest step, so that nothing was sent for it.
        step_input: what is summed: gradients, or updates of local steps.
        max_norm: the largest norm of an opened sum; None to clip nothing.
        delay: the number of steps after which the displacement moves by a sum, see `cgd.optim.delayed_steps`.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler then calls `step` also if a gradient is infinite
    LATER_OPTIONS: ClassVar[dict[str, Any]] = {}
    """Options that earlier versions did not have, with their defaults. Only other values are part of the context."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        peers: Peers,
        samples: int,
        privacy: Privacy | None = None,
        max_norm: float | None = None,
        delay: int = 0,
    ) -> None:
        if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 1:
            raise InputError(f"samples is {samples!r}; it is the number of this participant's samples, at least 1")
        self.samples, self.privacy, self.max_norm = int(samples), privacy, check_max_norm(max_norm)
        self.records_digest, self.replayed, self.delay = b"", False, check_delay(delay)
        self.peers = peers
        self._group_peers: list[Peers] = []
        self._opened: dict[Peers, tuple[int, dict[torch.Tensor, torch.Tensor]]] = {}  # by a step that is not finished
        self._recovery, self._weighted_sums = recovery.OptimizerRecovery(), WeightedSums()
        self._ranks = RankGradients()
        self._options = sorted(defaults.keys() - self.LATER_OPTIONS)  # torch adds some of its own to self.defaults
        # Without a cycle of references: the state is large, and garbage collection may run in any thread.
        own = weakref.proxy(self), self._recovery, self._weighted_sums, self._ranks
        self._sums = StepSums(*own, self._describe(), self._options)
        self._delayed = DelayedSteps(peers, self.delay, self._sums, self._recovery, private=privacy is not None)
        self.step_input = StepInput()
        super().__init__(params, {**defaults, **NOT_COUNTED, "steps": 0})
        if privacy is not None:
            privacy.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options and its own `peers`."""
        group = dict(param_group)
        peers = group.pop("peers", self.peers)
        if "weight_decay" not in self.defaults:
            reject_weight_decay(group.pop("weight_decay", 0.0))
        program_checks.check_rule(self._rule({**self.defaults, **group}))  # rejects invalid options
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        program_checks.check_parameters(group["params"])
        program_checks.check_delay_possible(self.delay, self.peers, peers, group["params"])
        if self.privacy is not None and peers is not self.peers:
            raise InputError(
                "a group has peers of its own, as in a grid, and privacy= is for one sum of all members; train without "
                "a grid, or without privacy"
            )
        super().add_param_group(group)
        self._group_peers.append(peers)
        self._recovery.register(peers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one common step. All sums are opened before any parameter changes: a step that fails changes none.

        Args:
            closure: a function that evaluates the model and returns the loss, as in torch.

        Raises:
            RangeError: a gradient is NaN, infinite or beyond the bound of the peers.
            InputError: the members, or this participant's samples, are not those that n was counted with; the
                program has written into a parameter or a frozen layer; or a layer changes running statistics.
            RemoteProtocolError, WeightError, PeerTimeoutError: see `Peers.sum`.
        """
        loss, self.replayed, self.step_input.failed = None, True, True
        gradient_sums: dict[torch.Tensor, torch.Tensor] = {}
        pending = self.groups_by_peers()
        unfinished = (peers for peers, _ in pending)  # evaluated on an error: the sums that have not started
        with program_checks.discard_scaling_on_error(self), abort_on_error(unfinished):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.step_input.check_outside_local_steps()
            self.check_mode()
            rules = self._rules()
            self._load_states()
            program_checks.check_unwritten(self.param_groups, self.state)
            running_statistics.check_layers(trainable(*self.param_groups))
            untrained_values.check(trainable(*self.param_groups))
            check_besides(trainable(*self.param_groups))
            while pending:
                peers, groups = pending.pop(0)
                program_checks.check_delay_possible(self.delay, self.peers, peers, trainable(*groups))
                if self.delay:
                    self.replayed = self._delayed.enter(groups, rules)
                else:
                    gradient_sums |= self._sum_unless_taken(peers, groups)
            self._move_by_due()
        self._move(gradient_sums, rules)
        for group in self.param_groups:
            group["steps"] += 1
        self._opened.clear()
        if self.privacy is not None:
            self.privacy.reset()
        self._save()
        self.step_input.failed = False
        return loss

    @torch.no_grad()
    def drain(self) -> None:
        """Move by the sums of the last steps, which the delay has held back; wait for them. All members must call it.

        Call it after the last step of a training. Without a delay, and after a loop over `steps`, which does it at its
        end, it changes nothing. A further step begins with a full delay again.

        Raises:
            RemoteProtocolError, PeerTimeoutError: see `Peers.sum`; a further call tries the sum again.
        """
        if len(self._delayed):
            program_checks.check_unwritten(self.param_groups, self.state)
            self._move_by_due(everything=True)
            self._save()

    def local_steps(self) -> LocalSteps:
        """Return the context of one round: train in it with a local optimiser, and at its end the updates are summed.

        See `cgd.optim.local_steps` for what it means, an example, and what the program must do.

        Raises:
            InputError: with `privacy=` or a `JointFirstLayer`, which need gradients; or inside another such context.
        """
        return LocalSteps(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and with `privacy=` also those of single records."""
        if self.privacy is not None:
            self.privacy.reset()
        super().zero_grad(set_to_none)

    def steps(self, count: int, *schedulers: LRScheduler) -> Iterator[int]:
        """Iterate over the numbers of the remaining steps, of `count` in total.

        In a restarted participant the first of them is the last step that was taken. `step()` changes nothing in it,
        but sums that the program's loop makes after it may be missing. For programs with one optimiser. Schedulers that
        the loop steps once after every step can be given here: they are set to the first step.

        Each pass of the loop takes one step, also for a member without records for it; but a sum with zeros is that of
        the others, so use `cgd.BatchSampler`, with which every member has some. A pass that takes none or two is an
        error at its end, at all members: they would add gradients of different steps, and a restarted participant would
        continue at a wrong one. After a step that failed, a program may go on.

        Raises:
            InputError: a pass of the loop did not take one step; or a scheduler follows losses, which are not stored.
        """
        check_delay(self.delay, check_whole("count", count))
        check_schedulers(schedulers)
        self.peers.queue.wait()
        first = min((self._load_state(peers, groups) for peers, groups in self.groups_by_peers()), default=0)
        if first and self._delayed.steps_taken <= first:
            first -= all(self._recovery.has_taken(peers, first - 1) for peers, _ in self.groups_by_peers())
        for group in self.param_groups:
            group["steps"] = first
        catch_up(schedulers, first)
        self.peers.recovery.jump(first)
        step = first
        while step < count:
            self.peers.set_step(step)
            taken, self.step_input.failed = self._steps_made(), False
            yield step
            with abort_on_error(peers for peers, _ in self.groups_by_peers()):
                self.step_input.check_pass(step, self._steps_made() - taken)
            step = self._next_step(step, schedulers)
        self.drain()

    def steps_taken(self) -> int:
        """Return the number of steps that an earlier process of this participant took; they need no gradient."""
        self._load_states()
        return max(self._recovery.steps_taken(), self._delayed.replayed_until)

    def sums_taken(self) -> int:
        """Return the number of steps whose sums are part of the loaded displacement; with a delay, others are not."""
        self._load_states()
        return self._recovery.steps_taken()

    def displacement(self) -> torch.Tensor:
        """Return the displacement of all trainable parameters as one vector: the same bits at every member."""
        return flatten_displacements(trainable(*self.param_groups), self.state)

    @property
    def privacy_warnings(self) -> tuple[PrivacyWarning, ...]:
        """The privacy warnings for this participant's training, from its first step on."""
        return tuple(self._weighted_sums.risk_monitor.warnings)

    def recount(self) -> None:
        """Count samples and members again in the next step. All members must call it before the same step.

        Call it after a participant's `samples` or the members have changed. If members have changed, continue from the
        last finished step, never from an earlier one: if a step is repeated with other members, the difference of the
        two sums reveals a member's gradient.
        """
        for group in self.param_groups:
            sample_count.discard(group)
        self._delayed.recount()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the private origin; with a delay, call `drain` before."""
        self._delayed.check_drained("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned: the parameters become its origin + displacement.

        The state contains the private origin: keep it as secret as the model. Frozen parameters and buffers are not
        part of it; save `model.state_dict()` too.
        """
        self._delayed.check_drained("load_state_dict()")
        needed = {*self._options, *NOT_COUNTED, "steps"}
        pairs = saved_state.match(state_dict, self.param_groups, needed, type(self).__name__)
        if self.privacy is not None:  # before anything changes: the steps of this state were charged, with their count
            for peers, _ in self.groups_by_peers():
                steps = max(group.get("steps", 0) for group in state_dict["param_groups"])
                self.privacy.check_charged(peers, self._recovery.step_id(peers, 0).slot, openings=steps + bool(steps))
            self.privacy.reset()
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update({key: group.get(key, default) for key, default in self.LATER_OPTIONS.items()})
        self._opened.clear()
        self._ranks.forget()
        self._sums.forget_origins()
        self._evaluating = False
        saved_state.restore(self.state, pairs)
        self._delayed.load(self.param_groups[0]["steps"], [], self.param_groups[0])

    def __getstate__(self) -> NoReturn:
        raise TypeError("a confined optimiser holds a live connection and cannot be copied; copy its state_dict()")

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return the rule that moves the displacement of this group; raise InputError for an invalid option."""

    def _steps_made(self) -> int:
        return max((int(group["steps"]) for group in self.param_groups), default=0)

    def _describe(self) -> str:
        """Return the kind of optimiser, which members compare."""
        return type(self).__name__

    def _layout(self, group: dict[str, Any], parameter: torch.Tensor) -> recovery.Layout | None:  # noqa: ARG002
        """Return what the rule stores for a parameter; None if it is one of `RULE_STATES`."""
        return None

    def groups_by_peers(self) -> list[tuple[Peers, list[dict[str, Any]]]]:
        """Return the parameter groups of each sum, those that have the same peers; sums with fewer members first."""
        by_peers: dict[int, tuple[Peers, list[dict[str, Any]]]] = {}
        for peers, group in zip(self._group_peers, self.param_groups, strict=True):
            by_peers.setdefault(id(peers), (peers, []))[1].append(group)
        in_use = [(peers, groups) for peers, groups in by_peers.values() if trainable(*groups)]
        return sorted(in_use, key=lambda pair: len(pair[0]))

    def _sum_unless_taken(self, peers: Peers, groups: list[dict[str, Any]]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the sums of this step's gradients; none if the step is part of the loaded state.

        If an earlier call of `step` opened this sum and then failed in another one, the opened sum is used: if it were
        opened again, for example with another batch, the two would disclose the difference of a member's gradients.
        """
        number = groups[0]["steps"]
        if peers in self._opened and self._opened[peers][0] == number:
            return self._opened[peers][1]
        if self._recovery.has_taken(peers, number):
            self._recovery.skip(peers, number + 1)
            return {}
        if self._follow(peers, groups):
            return {}
        if self._recovery.any_has_taken(number) and not peers.recovery.is_replay():
            raise InputError(
                f"step {number} was taken in another group of members, but the members of this group have lost its "
                "result; restore a state folder of one of them, or start a new training"
            )
        while True:
            with suppress(MembersChangedError):  # count and weight again for the new members
                totals, replayed = self._sums.open(peers, self._sums.request(peers, groups, number))
                self._opened[peers], self.replayed = (number, totals), self.replayed and replayed
                return totals
            if self._follow(peers, groups):
                return {}

    def _follow(self, peers: Peers, groups: list[dict[str, Any]]) -> bool:
        """Move to the state of the other members if they have taken this step without us; return whether they have."""
        number = groups[0]["steps"]
        if not self._recovery.is_overtaken(peers, number):
            return False
        self._load_state(peers, groups)
        self._recovery.skip(peers, number + 1)
        return True

    def _next_step(self, step: int, schedulers: Sequence[LRScheduler]) -> int:
        """Return the step after this one; if others have taken it and more without us, the last of those."""
        last = self._recovery.steps_taken() - 1
        if self.peers.quorum is None or last <= step + 1:
            return step + 1
        for group in self.param_groups:
            group["steps"] = last
        catch_up(schedulers, last)
        self.peers.recovery.jump(last)
        return last

    def _move_by_due(self, *, everything: bool = False) -> None:
        """Move by the sums that were entered so many steps ago as the delay is, or by all of them."""
        for entered, opened in self._delayed.due(everything=everything):
            self._move(opened.totals, entered.rules)
            for group in self.param_groups:
                group.update(opened.counted)

    def _rules(self) -> dict[torch.Tensor, UpdateRule]:
        """Return the rule of each trained parameter, with its present options."""
        rules = [self._rule(group) for group in self.param_groups]
        return {each: rule for group, rule in zip(self.param_groups, rules, strict=True) for each in trainable(group)}

    def _move(self, gradient_sums: dict[torch.Tensor, torch.Tensor], rules: dict[torch.Tensor, UpdateRule]) -> None:
        for _, groups in self.groups_by_peers():
            following = groups[0]["steps"] + 1  # of this sum, as it is stored: a group may have been added later
            for parameter in trainable(*groups):
                if parameter in gradient_sums:
                    state = self._state_of(parameter)
                    rules[parameter].move(state["displacement"], gradient_sums[parameter], state)
                    place_for_step(parameter, state, following)

    def _save(self) -> None:
        """Store the state with the members; with a delay, the one of the oldest step that may be unfinished."""
        for peers, groups in self.groups_by_peers():
            if self.delay:
                self._delayed.save(groups, self.state)
            else:
                self._recovery.save(peers, groups, self.state)

    def _load_states(self) -> None:
        """Load the states of all groups before the first sum with any of them."""
        for peers, groups in self.groups_by_peers():
            if not self._recovery.is_loaded(peers):
                peers.queue.wait()  # for the sums of another optimiser
                number = groups[0]["steps"]
                self._load_state(peers, groups)
                self._recovery.skip(peers, number)

    def _load_state(self, peers: Peers, groups: list[dict[str, Any]]) -> int:
        """Load the state that the members have stored if it is newer; return the number of steps after that."""
        stored = self._recovery.load(peers)
        if stored is None or stored.steps <= groups[0]["steps"]:
            return int(groups[0]["steps"])
        parameters = trainable(*groups)
        self.check_mode()
        warn_if_unconfined([each for each in parameters if each not in self.state], stacklevel=8)
        program_checks.check_unwritten(groups, self.state)
        states = {parameter: self._state_of(parameter) for parameter in parameters}
        layouts = [self._layout(group, parameter) for group in groups for parameter in trainable(group)]
        digests = recovery.read_digests(stored.content, self.delay)
        counted = recovery.restore(stored.content, parameters, states, layouts)
        samples, digest = self._ranks.all_samples(peers, self.samples, self.records_digest)
        private = self.privacy is not None
        # In any other epoch all samples are counted again.
        if peers.epoch > 0 and sample_count.is_valid(peers, counted, peers.epoch, exact=not private):
            pledges, epoch, origin = counted["pledges"], counted["epoch"], self._sums.origin(peers, parameters)
            sample_count.check_commitment(peers, samples, pledges, epoch, digest, origin, private=private)
            if self.privacy is not None:  # we were counted, which was charged
                self.privacy.check_charged(peers, self._recovery.step_id(peers, 0).slot, openings=1)
        with torch.no_grad():
            for parameter in parameters:
                place_for_step(parameter, states[parameter], stored.steps)
        for group in groups:
            group.update(samples=samples, members=list(peers.members), **counted)
        self._weighted_sums.forget_weight(peers)  # the members may have forged the count
        self._delayed.load(stored.steps, digests, groups[0])
        return stored.steps

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(initial_state(parameter))
        return state
