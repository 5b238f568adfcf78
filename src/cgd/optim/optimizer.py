"""Optimisers that descend together: swap the optimiser, keep the training loop.

A step sends this participant's gradient, weighted by its part n_l/n of all samples, into a secure sum; the opened sum
moves the common displacement D; the private weights become origin + D. The weights sum to one, so the sum is the
gradient of the mean loss over everyone's samples and `lr` means what it means in ordinary training, at any m.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from cgd.errors import InputError, MembersChangedError, RangeError
from cgd.optim import gradients, recovery, sample_count
from cgd.optim.abort import declining
from cgd.optim.displacement import AdamRule, SGDRule, refuse_weight_decay
from cgd.optim.gradients import trainable
from cgd.optim.origin import warn_if_unconfined
from cgd.optim.privacy_warnings import RiskMonitor
from cgd.optim.sample_count import NOT_COUNTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.peers import Peers
    from cgd.secagg.journal import Step


class ConfinedOptimizer(torch.optim.Optimizer, ABC):
    """What all confined optimisers do; a subclass says by which rule the displacement moves.

    The origin of a parameter is its value at its first step. From then on its value is origin + displacement, whatever
    is written into it in between. Parameters that do not require a gradient take no part; one that has no gradient in
    a step contributes zero, because a peer may have one. All members need the same parameters in the same order, and
    the same options; both are compared in every step, with a digest of the displacement, before anything is shared.

    A parameter group may name its own `peers` (in a grid, the first layer's are its column group). Groups with fewer
    members are summed first, and nothing moves before the last sum is open: if anybody fails, nobody moves.

    In a federation (`cgd.join`) the members remember the displacement. A participant that was stopped runs its program
    again from the beginning: its first step brings the displacement back, and steps that were taken before are passed
    over without a sum, so that random numbers and schedules end up where they were. Or it loops over `steps(count)`.

    Attributes:
        samples: n_l.
        records: a digest of the samples, if a participant that comes back is to be stopped also when it has as many
            others. To be set before the first step. It is not sent; see `counting.py`.
        again: whether the latest step was made in an earlier life of this program: nothing of ours went into it now.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, peers: Peers, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 1:
            raise InputError(f"samples is {samples!r}; it is the number of this participant's samples, at least 1")
        self.samples = int(samples)
        self.records = b""
        self.again = False
        self._default_peers = peers
        self._group_peers: list[Peers] = []
        self._memory = recovery.Memory()
        self._watch = RiskMonitor()
        self._options = sorted(defaults)  # torch adds some of its own to self.defaults
        super().__init__(params, {**defaults, **NOT_COUNTED, "steps": 0})  # not set by the user

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may carry options of its own and its own `peers`."""
        group = dict(param_group)
        peers = group.pop("peers", self._default_peers)
        refuse_weight_decay(group.pop("weight_decay", 0.0))
        self._rule({**self.defaults, **group})  # refuses options that make no sense
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        for each in group["params"]:
            parameter = each[1] if isinstance(each, tuple) else each
            if isinstance(parameter, torch.Tensor) and not parameter.is_floating_point():
                raise InputError(f"a parameter is of type {parameter.dtype}; only floats can be summed and moved")
        super().add_param_group(group)
        self._group_peers.append(peers)
        self._memory.add(peers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one common step. Every sum is opened before anything moves: if one fails, no parameter has changed.

        Args:
            closure: as in torch, an optional function that evaluates the model again and returns the loss.

        Raises:
            RangeError: a gradient is NaN, infinite or beyond the bound of the peers.
            InputError: the members, or this participant's samples, are not those that n was counted with.
            RemoteProtocolError, WeightError, PeerTimeoutError: see `Peers.sum`.
        """
        loss, self.again = None, True
        gradient_sums: dict[torch.Tensor, torch.Tensor] = {}
        waiting = self.groups_by_peers()
        with declining(peers for peers, _ in waiting):  # those that are left when something fails
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            rules = [self._rule(group) for group in self.param_groups]
            self._recall_all()
            while waiting:
                gradient_sums |= self._sum_unless_taken(*waiting.pop(0))
        with self._memory.moving():
            for group, rule in zip(self.param_groups, rules, strict=True):
                for parameter in trainable(group):
                    if parameter in gradient_sums:
                        state = self._state_of(parameter)
                        rule.move(state["displacement"], gradient_sums[parameter], state)
                        _place(parameter, state)
                group["steps"] += 1
            for peers, groups in self.groups_by_peers():
                self._memory.leave(peers, groups, self.state)
        return loss

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps that remain of `count`: all of them, or fewer if the members have taken some.

        A participant that comes back begins with the last step taken, in which `step()` changes nothing: sums that its
        loop makes after it may be missing. For programs with one optimiser.

        Examples:
            >>> import cgd, torch
            >>> def train(peers):
            ...     model = torch.nn.Linear(1, 1)
            ...     cgd.confine(model)
            ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=1)
            ...     return list(optimizer.steps(3))
            >>> with cgd.local_peers(3) as colony:
            ...     colony.run(train)[0]
            [0, 1, 2]
        """
        taken = [self._recall(peers, groups) for peers, groups in self.groups_by_peers()]
        begun = min(taken, default=0)
        if begun and all(self._memory.remembers(peers, begun - 1) for peers, _ in self.groups_by_peers()):
            begun -= 1  # `step` knows that it was taken
        for group in self.param_groups:
            group["steps"] = begun
        self._default_peers.memory.jump(begun)
        for step in range(begun, count):
            self._default_peers.memory.reach(step)
            yield step

    def taken(self) -> int:
        """How many steps the members took in an earlier life of this program: `step` needs no gradient for those."""
        self._recall_all()
        return self._memory.taken()

    def displacement(self) -> torch.Tensor:
        """The common displacement of all trainable parameters, as one flat tensor: the same bits at every member."""
        parts = [
            self.state[parameter]["displacement"].reshape(-1).cpu()
            if parameter in self.state
            else torch.zeros(parameter.numel(), dtype=_working_type(parameter))
            for group in self.param_groups
            for parameter in trainable(group)
        ]
        return torch.cat(parts)

    @property
    def cautions(self) -> tuple[PrivacyWarning, ...]:
        """Where this participant's setting is one that the audit shows to leak; known from the first step on."""
        return tuple(self._watch.given)

    def recount(self) -> None:
        """Count samples and members anew in the next step. All members must call it before the same step.

        It is needed after a participant's `samples` or the members have changed. Mind the members: if a step that was
        taken with some members is taken again with others, the difference of the two sums is somebody's gradient. Go
        on from the last step that was finished, never from one before.
        """
        for group in self.param_groups:
            group.update(NOT_COUNTED)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave: the parameters become its origin + displacement, bit for bit.

        The state holds the private origin: keep it as secret as the model. Buffers (of batch normalisation, say) are
        not parameters; save `model.state_dict()` beside it.
        """
        for group in state_dict["param_groups"]:
            if missing := {*self._options, *NOT_COUNTED, "steps"} - group.keys():
                raise InputError(
                    f"the state has no {', '.join(sorted(missing))}: it is not that of a {type(self).__name__}; "
                    "load it into the kind of optimiser it was saved from"
                )
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        states = state_dict["state"]
        pairs = [(states[i], parameter) for i, parameter in zip(saved, ours, strict=False) if i in states]
        for state, parameter in pairs:
            if "displacement" not in state or state["displacement"].shape != parameter.shape:
                raise InputError(
                    f"the state does not fit a parameter of shape {tuple(parameter.shape)}; "
                    "load the state of a confined optimiser over the same model"
                )
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for state, parameter in pairs:  # torch cast it to the parameter's type, which may be a coarser one
                self.state[parameter] = {key: _copied(value, parameter.device) for key, value in state.items()}
                _place(parameter, self.state[parameter])

    def __getstate__(self) -> NoReturn:
        raise TypeError("a confined optimiser holds a live connection and cannot be copied; copy its state_dict()")

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        """By which rule the displacement of this group moves; refuses options that make no sense."""

    def groups_by_peers(self) -> list[tuple[Peers, list[dict[str, Any]]]]:
        """The groups that have the same peers, which go into one sum; those with fewer members first."""
        together: dict[int, tuple[Peers, list[dict[str, Any]]]] = {}
        for peers, group in zip(self._group_peers, self.param_groups, strict=True):
            together.setdefault(id(peers), (peers, []))[1].append(group)
        in_use = [(peers, groups) for peers, groups in together.values() if any(map(trainable, groups))]
        return sorted(in_use, key=lambda pair: len(pair[0]))

    def _sum_unless_taken(self, peers: Peers, groups: list[dict[str, Any]]) -> dict[torch.Tensor, torch.Tensor]:
        """The sum of this step's gradients; nothing if the members have taken the step, whose outcome we then have."""
        number = groups[0]["steps"]
        if self._memory.remembers(peers, number):
            self._memory.skip(peers, number + 1)
            return {}
        if self._memory.taken_with_others(number) and not peers.memory.past():
            raise InputError(
                f"step {number} was taken with other members, and those of this group have lost their part of it; "
                "restore a state folder of theirs, or start anew"
            )
        while True:
            with suppress(MembersChangedError):  # then count and weight for the new ones
                return self._sum(peers, groups, self._memory.step(peers, number))

    def _recall_all(self) -> None:
        """Ask those who were not asked yet what they remember, before anything is summed with any of them."""
        for peers, groups in self.groups_by_peers():
            if not self._memory.asked(peers):
                number = groups[0]["steps"]
                self._recall(peers, groups)
                self._memory.skip(peers, number)

    def _recall(self, peers: Peers, groups: list[dict[str, Any]]) -> int:
        """Take over the state that the members remember if it is ahead of ours; how many steps we have after that."""
        remembered = self._memory.recall(peers)
        if remembered is None or remembered.steps <= groups[0]["steps"]:
            return int(groups[0]["steps"])
        parameters = [parameter for group in groups for parameter in trainable(group)]
        self._warn_if_unconfined(parameters)
        states = {parameter: self._state_of(parameter) for parameter in parameters}
        counted = recovery.restore(remembered.content(), parameters, states)
        if counted["epoch"] == peers.memory.present() > 0:  # in any other one all samples are counted anew
            sample_count.check_pledge(peers, self.samples, counted["pledges"], counted["epoch"], self.records)
        with torch.no_grad():
            for parameter in parameters:
                _place(parameter, states[parameter])
        for group in groups:
            group.update(samples=self.samples, members=list(peers.members), **counted)
        return remembered.steps

    def _sum(self, peers: Peers, groups: list[dict[str, Any]], step: Step) -> dict[torch.Tensor, torch.Tensor]:
        """The weighted sum of all members' gradients of these groups."""
        parameters = [parameter for group in groups for parameter in trainable(group)]
        epoch, addends = peers.memory.outlook()
        with declining([peers]):
            sample_count.check(peers, self.samples, groups, epoch, self.records)
            self._warn_if_unconfined(parameters)
            vector = gradients.flat(parameters)
            context = self._context(groups)
        if groups[0]["total_samples"] is None:
            counted = sample_count.count(peers, self.samples, step, epoch, addends, self.records)
            for group in groups:
                group.update(counted)
            with declining([peers]):  # we may have been counted in an earlier life
                sample_count.check(peers, self.samples, groups, epoch, self.records)
        self._watch.look(peers, groups[0], self.samples, parameters)
        weight = self.samples / groups[0]["total_samples"]
        self.again = self.again and peers.memory.past()
        try:
            total = peers.sum(vector, weight=weight, context=context, step=step, epoch=epoch)
        except RangeError as error:
            raise gradients.located(error, self.param_groups, parameters) from None
        self._watch.compare(peers, groups[0], parameters, vector, total)
        pieces = torch.split(total, [each.numel() for each in parameters])
        return {
            each: piece.reshape(each.shape).to(each.device, _working_type(each))
            for each, piece in zip(parameters, pieces, strict=True)
        }

    def _context(self, groups: list[dict[str, Any]]) -> str:
        return gradients.context(type(self).__name__, self._options, groups, self.state)

    def _warn_if_unconfined(self, parameters: list[torch.Tensor]) -> None:
        warn_if_unconfined([each for each in parameters if each not in self.state], stacklevel=8)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["origin"] = parameter.detach().to(_working_type(parameter), copy=True)
            state["displacement"] = torch.zeros_like(state["origin"])
        return state


class ConfinedSGD(ConfinedOptimizer):
    """Confined gradient descent (paper, Alg. 1), with momentum if asked for.

    Args:
        params: parameters or parameter groups, as for any torch optimiser.
        lr: α, the step size.
        peers: the others.
        samples: n_l, the number of this participant's samples; the others learn only the sum of all.
        momentum: the share of the last step that is taken again.
        weight_decay: refused, because it reads the private weights; here to say so.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     cgd.confine(model, delta=0.1)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
        ...     for _ in range(30):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...     return optimizer.displacement()
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> with cgd.local_peers(3) as colony:
        ...     one, two, three = colony.run(train, [x] * 3, [3 * x] * 3)
        >>> torch.equal(one, two) and torch.equal(two, three)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        peers: Peers,
        samples: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        refuse_weight_decay(weight_decay)
        super().__init__(params, {"lr": lr, "momentum": momentum}, peers=peers, samples=samples)

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        return SGDRule(float(group["lr"]), float(group["momentum"]))


class ConfinedAdam(ConfinedOptimizer):
    """Adam on the opened sums: every member sees the same sums, so every member takes the same step.

    Args:
        params: parameters or parameter groups, as for any torch optimiser.
        lr: the step size.
        peers: the others.
        samples: n_l, the number of this participant's samples; the others learn only the sum of all.
        betas: how fast the two moments forget.
        eps: keeps the division finite. Gradients smaller than the resolution of the sum (`Peers.resolution`) count as
            zero; with gradients that small, use peers with ring_bits=64.
        weight_decay: refused, because it reads the private weights; here to say so.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        peers: Peers,
        samples: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        refuse_weight_decay(weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, peers=peers, samples=samples)

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        first, second = group["betas"]
        return AdamRule(float(group["lr"]), (float(first), float(second)), float(group["eps"]))


def _working_type(parameter: torch.Tensor) -> torch.dtype:
    """Half-precision weights are moved in single precision: small steps would be lost otherwise."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _place(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """The parameter is origin + displacement: the one place where a private weight is written."""
    parameter.copy_(state["origin"] + state["displacement"])


def _copied(value: Any, device: torch.device) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value
