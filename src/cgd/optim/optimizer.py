"""Confined optimisers: replace the optimiser, keep the training loop.

A step adds this participant's gradient, weighted by its part n_l/n of all samples, to a secure sum; the opened sum
moves the common displacement D; the private weights become origin + D. The weights sum to one, so the sum is the
gradient of the mean loss over all samples, and `lr` has its usual meaning for any number of members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from cgd.errors import InputError, MembersChangedError
from cgd.optim import recovery, sample_count
from cgd.optim.displacement import (
    check_options,
    check_state,
    copy_state,
    flatten_displacements,
    flatten_gradients,
    initial_state,
    place,
    reject_weight_decay,
    split_sum,
    step_context,
    trainable,
)
from cgd.optim.origin import warn_if_unconfined
from cgd.optim.sample_count import NOT_COUNTED, abort_on_error
from cgd.optim.weighted_sum import WeightedSums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.privacy import Privacy
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step


class ConfinedOptimizer(torch.optim.Optimizer, ABC):
    """Base class of confined optimisers; a subclass chooses the rule that moves the displacement.

    The origin of a parameter is its value at its first step. After that its value is origin + displacement; what a
    program writes into it is overwritten. Parameters that do not require a gradient are left out; a parameter without
    a gradient contributes zero, because a peer may have one. All members need the same parameters in the same order
    and the same options. Members compare these, and a digest of the displacement, before they share anything.

    A parameter group may have its own `peers` (in a grid, those of the first layer are its column group). Groups with
    fewer members are summed first, and nothing moves before the last sum is open: if one member fails, none moves.

    In a federation (`cgd.join`) the members store the displacement. A restarted participant runs its program again: its
    first step restores the displacement, and earlier steps are skipped without a sum. Or it loops over `steps(count)`.

    Attributes:
        samples: n_l, the number of this participant's samples.
        privacy: differential privacy, if wanted: clipping, noise and the budget.
        records_digest: a digest of the samples. If it is set before the first step, a restarted participant is stopped
            also if it has the same number of other samples. It is not sent; see `sample_count.py`.
        replayed: True if an earlier process of this participant took the latest step, so that nothing was sent for it.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, peers: Peers, samples: int, privacy: Privacy | None = None
    ) -> None:
        if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 1:
            raise InputError(f"samples is {samples!r}; it is the number of this participant's samples, at least 1")
        self.samples, self.privacy = int(samples), privacy
        self.records_digest, self.replayed = b"", False
        self._default_peers = peers
        self._group_peers: list[Peers] = []
        self._opened: dict[Peers, tuple[int, dict[torch.Tensor, torch.Tensor]]] = {}  # by a step that is not finished
        self._recovery, self._weighted_sums = recovery.OptimizerRecovery(), WeightedSums()
        self._options = sorted(defaults)  # torch adds some of its own to self.defaults
        super().__init__(params, {**defaults, **NOT_COUNTED, "steps": 0})
        if privacy is not None:
            privacy.attach(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options and its own `peers`."""
        group = dict(param_group)
        peers = group.pop("peers", self._default_peers)
        reject_weight_decay(group.pop("weight_decay", 0.0))
        self._rule({**self.defaults, **group})  # rejects invalid options
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        for each in group["params"]:
            parameter = each[1] if isinstance(each, tuple) else each
            if isinstance(parameter, torch.Tensor) and not parameter.is_floating_point():
                raise InputError(f"a parameter is of type {parameter.dtype}; only floats can be summed and moved")
        if self.privacy is not None and peers is not self._default_peers:
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
            InputError: the members, or this participant's samples, are not those that n was counted with.
            RemoteProtocolError, WeightError, PeerTimeoutError: see `Peers.sum`.
        """
        loss, self.replayed = None, True
        gradient_sums: dict[torch.Tensor, torch.Tensor] = {}
        pending = self.groups_by_peers()
        with abort_on_error(peers for peers, _ in pending):  # evaluated on an error: the sums that have not started
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            rules = [self._rule(group) for group in self.param_groups]
            self._load_states()
            while pending:
                gradient_sums |= self._sum_unless_taken(*pending.pop(0))
        for group, rule in zip(self.param_groups, rules, strict=True):
            for parameter in trainable(group):
                if parameter in gradient_sums:
                    state = self._state_of(parameter)
                    rule.move(state["displacement"], gradient_sums[parameter], state)
                    place(parameter, state["origin"], state["displacement"])
            group["steps"] += 1
        self._opened.clear()
        if self.privacy is not None:
            self.privacy.reset()
        for peers, groups in self.groups_by_peers():
            self._recovery.save(peers, groups, self.state)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and with `privacy=` also those of single records."""
        if self.privacy is not None:
            self.privacy.reset()
        super().zero_grad(set_to_none)

    def steps(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the remaining steps, of `count` in total.

        In a restarted participant the first of them is the last step that was taken. `step()` changes nothing in it,
        but sums that the program's loop makes after it may be missing. For programs with one optimiser.

        Examples:
            >>> import cgd, torch
            >>> def train(peers):
            ...     model = torch.nn.Linear(1, 1)
            ...     cgd.confine(model)
            ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=1)
            ...     return list(optimizer.steps(3))
            >>> with cgd.local_peers(3) as members:
            ...     members.run(train)[0]
            [0, 1, 2]
        """
        first = min((self._load_state(peers, groups) for peers, groups in self.groups_by_peers()), default=0)
        if first and all(self._recovery.has_taken(peers, first - 1) for peers, _ in self.groups_by_peers()):
            first -= 1
        for group in self.param_groups:
            group["steps"] = first
        self._default_peers.recovery.jump(first)
        for step in range(first, count):
            self._default_peers.recovery.set_step(step)
            yield step

    def steps_taken(self) -> int:
        """Return the number of steps that an earlier process of this participant took; they need no gradient."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned: the parameters become its origin + displacement.

        The state contains the private origin: keep it as secret as the model. Buffers, such as those of batch
        normalisation, are not parameters; save `model.state_dict()` too.
        """
        for group in state_dict["param_groups"]:
            check_options(group, {*self._options, *NOT_COUNTED, "steps"}, type(self).__name__)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        states = state_dict["state"]
        pairs = [(states[i], parameter) for i, parameter in zip(saved, ours, strict=False) if i in states]
        for state, parameter in pairs:
            check_state(state, parameter)
        if self.privacy is not None:  # before anything changes: the steps of this state were charged, with their count
            for peers, _ in self.groups_by_peers():
                steps = max(group.get("steps", 0) for group in state_dict["param_groups"])
                self.privacy.check_charged(peers, self._recovery.step_id(peers, 0).slot, openings=steps + bool(steps))
            self.privacy.reset()
        super().load_state_dict(state_dict)
        self._opened.clear()
        with torch.no_grad():
            for state, parameter in pairs:  # torch has cast it to the parameter's type, which may be less precise
                own = self.state[parameter] = copy_state(state, parameter.device)
                place(parameter, own["origin"], own["displacement"])

    def __getstate__(self) -> NoReturn:
        raise TypeError("a confined optimiser holds a live connection and cannot be copied; copy its state_dict()")

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        """Return the rule that moves the displacement of this group; raise InputError for an invalid option."""

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
        if self._recovery.any_has_taken(number) and not peers.recovery.is_replay():
            raise InputError(
                f"step {number} was taken in another group of members, but the members of this group have lost its "
                "result; restore a state folder of one of them, or start a new training"
            )
        while True:
            with suppress(MembersChangedError):  # count and weight again for the new members
                self._opened[peers] = number, self._sum(peers, groups, self._recovery.step_id(peers, number))
                return self._opened[peers][1]

    def _load_states(self) -> None:
        """Load the states of all groups before the first sum with any of them."""
        for peers, groups in self.groups_by_peers():
            if not self._recovery.is_loaded(peers):
                number = groups[0]["steps"]
                self._load_state(peers, groups)
                self._recovery.skip(peers, number)

    def _load_state(self, peers: Peers, groups: list[dict[str, Any]]) -> int:
        """Load the state that the members have stored if it is newer; return the number of steps after that."""
        stored = self._recovery.load(peers)
        if stored is None or stored.steps <= groups[0]["steps"]:
            return int(groups[0]["steps"])
        parameters = trainable(*groups)
        self._warn_if_unconfined(parameters)
        states = {parameter: self._state_of(parameter) for parameter in parameters}
        counted = recovery.restore(stored.content, parameters, states)
        if (epoch := counted["epoch"]) == peers.epoch > 0:  # in any other epoch all samples are counted again
            private, pledges = self.privacy is not None, counted["pledges"]
            sample_count.check_commitment(peers, self.samples, pledges, epoch, self.records_digest, private=private)
            if self.privacy is not None:  # we were counted, which was charged
                self.privacy.check_charged(peers, self._recovery.step_id(peers, 0).slot, openings=1)
        with torch.no_grad():
            for parameter in parameters:
                place(parameter, states[parameter]["origin"], states[parameter]["displacement"])
        for group in groups:
            group.update(samples=self.samples, members=list(peers.members), **counted)
        self._weighted_sums.forget_weight(peers)  # the members may have forged the count
        return stored.steps

    def _sum(self, peers: Peers, groups: list[dict[str, Any]], step: Step) -> dict[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of all members' gradients of these groups."""
        parameters = trainable(*groups)
        epoch, addends = peers.next_round()
        with abort_on_error([peers]):
            revealed = peers.recovery.may_be_revealed(step) and not peers.recovery.is_replay()  # of a newer count
            was_counted = peers.recovery.took_part()
            # A count of an earlier epoch is replayed; the present epoch counts again.
            took_part = was_counted and epoch == peers.epoch
            check = partial(
                sample_count.check,
                peers,
                self.samples,
                groups,
                epoch,
                self.records_digest,
                exact=self.privacy is None,
            )
            check(revealed=revealed, took_part=took_part)
            self._warn_if_unconfined(parameters)
            if self.privacy is None:
                vector = flatten_gradients(parameters)
            else:
                self.privacy.begin(peers, step.slot)
                vector = self.privacy.gradient(parameters, self.samples)
        if groups[0]["total_samples"] is None:
            counted = sample_count.count(
                peers,
                self.samples,
                step,
                epoch,
                addends,
                self.records_digest,
                took_part=took_part,
                privacy=self.privacy,
            )
            if (current := peers.next_round()[0]) != epoch:  # no step was finished with this count
                sample_count.keep_commitments(groups if was_counted else (), counted)
                raise MembersChangedError(epoch, current, peers.members)
            for group in groups:
                group.update(counted)
            self._weighted_sums.forget_weight(peers)
            with abort_on_error([peers]):  # a replayed count may be that of an earlier process
                check(took_part=took_part)
        context, total_samples = self._context(groups), groups[0]["total_samples"]
        self.replayed = self.replayed and peers.recovery.is_replay()
        if self.privacy is not None:
            total = self.privacy.open_gradients(peers, vector, total_samples, context, step, epoch, addends)
        else:
            weight = self.samples / total_samples if took_part else 1 / addends  # the latter is not sent
            total = self._weighted_sums.open(
                peers, groups, parameters, vector, self.samples, weight, context, step, epoch
            )
        return split_sum(total, parameters)

    def _context(self, groups: list[dict[str, Any]]) -> str:
        kind = type(self).__name__
        if self.privacy is not None:
            kind += f" for {self.privacy.settings.describe()},"
        return step_context(kind, self._options, groups, self.state, groups[0]["total_samples"])

    def _warn_if_unconfined(self, parameters: list[torch.Tensor]) -> None:
        warn_if_unconfined([each for each in parameters if each not in self.state], stacklevel=8)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(initial_state(parameter))
        return state
