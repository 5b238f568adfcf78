"""Optimisers that descend together: swap the optimiser, keep the training loop.

A step sends this participant's gradient, weighted by its part n_l/n of all samples, into a secure sum; the opened sum
moves the common displacement D; the private weights become origin + D. The weights sum to one, so the sum is the
gradient of the mean loss over everyone's samples and `lr` means what it means in ordinary training, at any m.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cgd.errors import InputError, RangeError
from cgd.learning.displacement import AdamDescent, Descent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim.optimizer import ParamsT

    from cgd.learning.displacement import Rule
    from cgd.network.peers import Peers


# What a group holds that need not be the same at every member.
_LOCAL_OPTIONS = frozenset({"params", "param_names"})


class ConfinedOptimizer(torch.optim.Optimizer, ABC):
    """What all confined optimisers do; a subclass says by which rule the displacement moves.

    The origin of a parameter is its value at its first step. From then on its value is origin + displacement, whatever
    is written into it in between. Parameters that do not require a gradient take no part; one that has no gradient in
    a step contributes zero, because a peer may have one. All members need the same parameters in the same order.

    A parameter group may name its own `peers` (in a grid, the first layer's are its column group).
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, peers: Peers, samples: int) -> None:
        if isinstance(samples, bool) or not isinstance(samples, (int, np.integer)) or samples < 1:
            raise InputError(f"samples is {samples!r}; it is the number of this participant's samples, at least 1")
        self.samples = int(samples)
        self._default_peers = peers
        self._group_peers: list[Peers] = []
        # n, opened once in the first step and kept in the state: a member that resumes must not ask again.
        super().__init__(params, {**defaults, "total_samples": None})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may carry options of its own and its own `peers`."""
        group = dict(param_group)
        peers = group.pop("peers", self._default_peers)
        _refuse_weight_decay(group.pop("weight_decay", 0.0))
        _check_lr(group.get("lr", self.defaults["lr"]))
        super().add_param_group(group)
        self._group_peers.append(peers)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise InputError(
                    f"a parameter is of type {parameter.dtype}; only floating-point parameters can be summed"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one common step. Every sum is opened before anything moves: if one fails, no parameter has changed.

        Args:
            closure: as in torch, an optional function that evaluates the model again and returns the loss.

        Raises:
            RangeError: a gradient is NaN, infinite or beyond the bound of the peers.
            RemoteProtocolError, PeerTimeoutError: see `Peers.sum`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradient_sums: dict[torch.Tensor, torch.Tensor] = {}
        for peers, groups in self._groups_by_peers():
            gradient_sums |= self._sum(peers, groups)
        for group in self.param_groups:
            rule = self._rule(group)
            for parameter in _trainable(group):
                state = self._state_of(parameter)
                rule.move(state["displacement"], gradient_sums[parameter], state)
                _place(parameter, state)
        return loss

    def displacement(self) -> torch.Tensor:
        """The common displacement of all trainable parameters, as one flat tensor: the same bits at every member."""
        parts = [
            self.state[parameter]["displacement"].reshape(-1).cpu()
            if parameter in self.state
            else torch.zeros(parameter.numel(), dtype=_working_type(parameter))
            for group in self.param_groups
            for parameter in _trainable(group)
        ]
        return torch.cat(parts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave: the parameters become its origin + displacement, bit for bit.

        The state holds the private origin: keep it as secret as the model.
        """
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        pairs = [
            (state_dict["state"][i], parameter)
            for i, parameter in zip(saved, ours, strict=False)
            if i in state_dict["state"]
        ]
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
                if parameter.requires_grad:
                    _place(parameter, self.state[parameter])

    @abstractmethod
    def _rule(self, group: dict[str, Any]) -> Rule:
        """By which rule the displacement of this group moves."""

    def _groups_by_peers(self) -> Iterable[tuple[Peers, list[dict[str, Any]]]]:
        """One sum for all groups that have the same peers."""
        together: dict[int, tuple[Peers, list[dict[str, Any]]]] = {}
        for peers, group in zip(self._group_peers, self.param_groups, strict=True):
            together.setdefault(id(peers), (peers, []))[1].append(group)
        return together.values()

    def _sum(self, peers: Peers, groups: list[dict[str, Any]]) -> dict[torch.Tensor, torch.Tensor]:
        parameters = [parameter for group in groups for parameter in _trainable(group)]
        if not parameters:
            return {}
        if groups[0]["total_samples"] is None:
            total_samples = int(peers.sum(np.array(self.samples)))
            for group in groups:
                group["total_samples"] = total_samples
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
        vector = torch.cat([_flat_gradient(each, dtype) for each in parameters])
        try:
            weight = self.samples / groups[0]["total_samples"]
            total = peers.sum(vector, weight=weight, context=self._context(groups, parameters))
        except RangeError as error:
            raise self._located(error, parameters) from None
        pieces = torch.split(total, [each.numel() for each in parameters])
        return {
            each: piece.reshape(each.shape).to(each.device, _working_type(each))
            for each, piece in zip(parameters, pieces, strict=True)
        }

    def _context(self, groups: list[dict[str, Any]], parameters: list[torch.Tensor]) -> str:
        """What must be the same at every member for the displacements to stay the same bits.

        It is compared before anything is shared, so that another lr, a missed step or a wrong checkpoint is told at
        once and in words. All of it is known to all members anyway.
        """
        options = [{key: value for key, value in group.items() if key not in _LOCAL_OPTIONS} for group in groups]
        state = hashlib.sha256(repr(options).encode())
        for parameter in parameters:
            state.update(self._state_of(parameter)["displacement"].cpu().contiguous().numpy().data)
        shown = ", ".join(f"{key} {value}" for key, value in options[0].items())
        return f"{type(self).__name__} with {shown}"[:150] + f", state {state.hexdigest()[:16]}"

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["origin"] = parameter.detach().to(_working_type(parameter), copy=True)
            state["displacement"] = torch.zeros_like(state["origin"])
        return state

    def _located(self, error: RangeError, parameters: list[torch.Tensor]) -> RangeError:
        """The same error, told in terms of the parameter instead of the flattened vector."""
        names = {
            parameter: name
            for group in self.param_groups
            for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        ends = np.cumsum([parameter.numel() for parameter in parameters])
        number = int(np.searchsorted(ends, error.index[0], side="right"))
        parameter = parameters[number]
        place = error.index[0] - int(ends[number]) + parameter.numel()
        index = tuple(int(i) for i in np.unravel_index(place, parameter.shape)) if parameter.dim() else ()
        called = names.get(parameter, f"number {number}, of shape {tuple(parameter.shape)},")
        return RangeError(error.value, index, error.bound, f"the gradient of parameter {called}")


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
        _refuse_weight_decay(weight_decay)
        if not 0 <= momentum < 1:
            raise InputError(f"momentum is {momentum}; it must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "momentum": momentum}, peers=peers, samples=samples)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return Descent(float(group["lr"]), group["momentum"])


class ConfinedAdam(ConfinedOptimizer):
    """Adam on the opened sums: every member sees the same sums, so every member takes the same step.

    Args:
        params: parameters or parameter groups, as for any torch optimiser.
        lr: the step size.
        peers: the others.
        samples: n_l, the number of this participant's samples; the others learn only the sum of all.
        betas: how fast the two moments forget.
        eps: keeps the division finite.
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
        _refuse_weight_decay(weight_decay)
        if not all(0 <= beta < 1 for beta in betas) or eps <= 0:
            raise InputError(f"betas are {betas} and eps is {eps}; betas must be in [0, 1) and eps above 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, peers=peers, samples=samples)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return AdamDescent(float(group["lr"]), group["betas"], group["eps"])


def _trainable(group: dict[str, Any]) -> list[torch.Tensor]:
    return [parameter for parameter in group["params"] if parameter.requires_grad]


def _working_type(parameter: torch.Tensor) -> torch.dtype:
    """Half-precision weights are moved in single precision: small steps would be lost otherwise."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _flat_gradient(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype)
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().reshape(-1).to("cpu", dtype)


def _place(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """W = origin + displacement: the one place where a private weight is written."""
    parameter.copy_(state["origin"] + state["displacement"])


def _copied(value: Any, device: torch.device) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _check_lr(lr: Any) -> None:
    if not 0 <= float(lr) < math.inf:
        raise InputError(f"lr is {lr}; it must be a finite number, at least 0")


def _refuse_weight_decay(weight_decay: float) -> None:
    if weight_decay != 0:
        raise InputError(
            f"weight_decay is {weight_decay}; it would pull every member by its own private weights, and the members "
            "would no longer move together. Leave it at 0; stop early or use a smaller model instead"
        )
