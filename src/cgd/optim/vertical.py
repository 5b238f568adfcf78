"""Columns of features (paper, Alg. 2): what the members of a row do when each holds some features of its samples.

Two modes. In `towers`, Algorithm 2 as printed, everyone has a network on its own features; nothing but gradient sums is
opened in training, and for a prediction the row adds its log-probabilities (`late_fusion`). In `joint`, the row adds
the pre-activations of layer 1, so that everyone's layers 2…N see all features, and the mean of all its members' losses
is what everyone descends (`JointFirstLayer`).

`joint` opens those pre-activations to the row. Displacements are public, so one colluder in each column recovers
the row's raw records from a few steps: Δz = Σ_j X_j·ΔD_j. Use it to reproduce the paper's tables, not on real records.
Whoever asks for it has to say so, in a sentence that the reader of a program or a file will see (`accept_joint`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.peers import Peers

JOINT_REVEALS_RECORDS = "joint reveals raw records"
"""What has to be accepted, in these words, by whoever asks for `joint`."""

JOINT_RECOVERED = "60 of 60 records of a row from 8 steps"
"""What the audit makes of `joint` columns (`cgd.audit.attacks.joint`); a test holds it to that."""


def accept_joint(mode: str, accept: str) -> None:
    """Refuse `joint` unless it is said what that means.

    Raises:
        InputError: the mode is "joint" and nothing was accepted, or something else was.
    """
    if accept not in ("", JOINT_REVEALS_RECORDS):
        raise InputError(f"accept is {accept!r}; what can be accepted is {JOINT_REVEALS_RECORDS!r}, in these words")
    if mode == "joint" and not accept:
        raise InputError(
            "the mode is 'joint', in which a row opens its pre-activations: one colluder in each column computes raw "
            f"records from them ({JOINT_RECOVERED} in `cgd audit`). Choose the mode 'towers', which opens none; or, "
            f"if all may see the records, say accept = {JOINT_REVEALS_RECORDS!r}"
        )


def split_first_layer(model: nn.Module) -> tuple[nn.Linear, nn.Sequential]:
    """The first layer of a network, and the rest of it.

    Raises:
        InputError: the model is no `nn.Sequential` that begins with an `nn.Linear`.
    """
    if not isinstance(model, nn.Sequential) or len(model) == 0 or not isinstance(model[0], nn.Linear):
        raise InputError(
            f"the model is a {type(model).__name__}; columns of features need a torch.nn.Sequential that begins with a "
            "torch.nn.Linear, which is then cut by columns"
        )
    return model[0], nn.Sequential(*list(model)[1:])


def first_layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of the first layer, if the model begins with a fully-connected one."""
    if not isinstance(model, nn.Sequential) or len(model) == 0 or not isinstance(model[0], nn.Linear):
        return ()
    child = next(iter(dict(model.named_children())))
    return tuple(f"{child}.{name}" for name, _ in model[0].named_parameters())


def narrow(model: nn.Module, features: int) -> nn.Sequential:
    """The same network with a first layer for so many features: the tower of a participant that holds these.

    Examples:
        >>> narrow(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), 7)[0]
        Linear(in_features=7, out_features=256, bias=True)
    """
    first, _ = split_first_layer(model)
    if not first.weight.requires_grad:
        raise InputError("the first layer is frozen; it cannot be cut by columns, train it or use one column")
    tower: nn.Sequential = copy.deepcopy(model)  # type: ignore[assignment]
    bias = first.bias is not None
    tower[0] = nn.Linear(features, first.out_features, bias, device=first.weight.device, dtype=first.weight.dtype)
    return tower


class JointFirstLayer(nn.Module):
    """A first layer over all features of a row: each member multiplies its own, and the row opens the sum.

    Everybody's loss depends on everybody's part of the layer, so on the way back the row opens a sum, too: that of the
    gradients with respect to the pre-activations. Each member gets their mean. All members must call it in step.

    **One colluder in each column, one of them in this row, recover the row's raw records from it**, see the top of this
    module.

    Args:
        first: this member's part of the layer.
        row: the members that hold the same samples.
        accept: that this is so, in the words of `cgd.JOINT_REVEALS_RECORDS`; refused without.
        bound: the largest magnitude of a pre-activation.
        gradient_bound: the largest magnitude of a gradient with respect to one.

    Raises:
        InputError: it was not accepted.
    """

    def __init__(
        self, first: nn.Linear, row: Peers, *, accept: str = "", bound: float = 64.0, gradient_bound: float = 1.0
    ) -> None:
        accept_joint("joint", accept)
        super().__init__()
        self.first, self.bound, self.gradient_bound = first, bound, gradient_bound
        self._row = row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all members' pre-activations."""
        output: torch.Tensor = _RowSum.apply(self.first(x), self._row, self.bound, self.gradient_bound)  # type: ignore[no-untyped-call]
        return output


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, row: Peers, bound: float, gradient_bound: float) -> torch.Tensor:
        ctx.row, ctx.gradient_bound = row, gradient_bound
        return row.sum(own.detach(), bound=bound, context="joint pre-activations")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = ctx.row.sum(gradient, bound=ctx.gradient_bound, context="gradients of joint pre-activations")
        return total / len(ctx.row), None, None, None


def late_fusion(outputs: torch.Tensor, row: Peers, *, bound: float = 128.0) -> torch.Tensor:
    """Log-probabilities of the whole row: the sum of all towers' own, normalised. The row opens the sum alone.

    Args:
        outputs: this member's outputs before the softmax, samples × classes.
        row: the members that hold the same samples.
        bound: log-probabilities below −bound count as −bound.
    """
    return fuse([row.sum(log_probabilities(outputs, bound), bound=bound, context="late fusion")])


def log_probabilities(outputs: torch.Tensor, bound: float = 128.0) -> torch.Tensor:
    """What one tower adds to the row's sum."""
    return outputs.detach().log_softmax(dim=1).clamp(min=-bound)


def fuse(towers: list[torch.Tensor]) -> torch.Tensor:
    """The row's log-probabilities from those of its towers."""
    return torch.stack(towers).sum(dim=0).log_softmax(dim=1)
