"""Vertical federated learning (paper, Alg. 2): the members of a row hold different features of the same samples.

There are two modes. In `towers`, Algorithm 2 as printed, each member trains a network on its own features. Training
opens gradient sums only; for a prediction the row sums its log-probabilities (`late_fusion`). In `joint`, the row sums
the pre-activations of layer 1, so that layers 2…N of each member use all features, and each member minimises the mean
loss of the row (`JointFirstLayer`).

`joint` opens the pre-activations to the row. Displacements are public, so one colluder in each column recovers the raw
records of the row from a few steps: Δz = Σ_j X_j·ΔD_j. Use it to reproduce the paper's tables, not on real records. A
program or a file must accept this in a fixed sentence, where its reader sees it (`check_joint_accepted`).
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
"""The sentence that must be given to use `joint`."""

JOINT_FIGURE = "60 of 60 records of a row from 8 steps"
"""The result of the attack on `joint` columns (`cgd.audit.attacks.joint`); a test compares the two."""


_JOINT = "_cgd_joint"  # the attribute that marks the parameters of a joint layer


def is_joint(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to a `JointFirstLayer`."""
    return getattr(parameter, _JOINT, False)


def check_joint_accepted(mode: str, accept: str) -> None:
    """Check that `joint` is used only with the sentence that accepts its risk.

    Raises:
        InputError: the mode is "joint" and `accept` is empty, or `accept` is another sentence.
    """
    if accept not in ("", JOINT_REVEALS_RECORDS):
        raise InputError(f"accept is {accept!r}; it must be exactly {JOINT_REVEALS_RECORDS!r}, or empty")
    if mode == "joint" and not accept:
        raise InputError(
            "the mode is 'joint', which opens the pre-activations of a row: one colluder in each column computes raw "
            f"records from them ({JOINT_FIGURE} in `cgd audit`). Choose the mode 'towers', which opens none; or, "
            f"if all members may see the records, set accept = {JOINT_REVEALS_RECORDS!r}"
        )


def split_first_layer(model: nn.Module) -> tuple[nn.Linear, nn.Sequential]:
    """Return the first layer of a network, and the other layers.

    Raises:
        InputError: the model is not an `nn.Sequential` that begins with an `nn.Linear`.
    """
    if not isinstance(model, nn.Sequential) or len(model) == 0 or not isinstance(model[0], nn.Linear):
        raise InputError(
            f"the model is a {type(model).__name__}; columns of features need a torch.nn.Sequential that begins with a "
            "torch.nn.Linear, which is then split by columns"
        )
    return model[0], nn.Sequential(*list(model)[1:])


def first_layer_names(model: nn.Module) -> tuple[str, ...]:
    """Return the parameter names of the first layer; none if the model does not begin with a fully connected layer."""
    if not isinstance(model, nn.Sequential) or len(model) == 0 or not isinstance(model[0], nn.Linear):
        return ()
    child = next(iter(dict(model.named_children())))
    return tuple(f"{child}.{name}" for name, _ in model[0].named_parameters())


def build_tower(model: nn.Module, features: int) -> nn.Sequential:
    """Return a copy of the network with a new first layer for a participant's own features: its tower.

    All members build it inside `cgd.public_seed` with the same seed, from the same network.

    Examples:
        >>> build_tower(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), 7)[0]
        Linear(in_features=7, out_features=256, bias=True)
    """
    first, _ = split_first_layer(model)
    if not first.weight.requires_grad:
        raise InputError("the first layer is frozen and cannot be split by columns; train it, or use one column")
    tower: nn.Sequential = copy.deepcopy(model)  # type: ignore[assignment]
    bias = first.bias is not None
    tower[0] = nn.Linear(features, first.out_features, bias, device=first.weight.device, dtype=first.weight.dtype)
    return tower


@torch.no_grad()
def copy_columns(first: nn.Linear, features: slice, tower: nn.Module) -> None:
    """Start a `joint` row from one first layer for all features: copy the part for some features into a tower.

    The biases of the tower become zero, because the row adds those of all its columns.
    """
    own, _ = split_first_layer(tower)
    own.weight.copy_(first.weight[:, features])
    if own.bias is not None:
        own.bias.zero_()


class JointFirstLayer(nn.Module):
    """A first layer over all features of a row: the row opens the sum of its members' pre-activations.

    Each member's loss depends on each member's part of the layer. The backward pass therefore also opens a sum, that of
    the gradients with respect to the pre-activations; each member receives their mean. All members must call the layer
    the same number of times, in the same order.

    **One colluder in each column, one of them in this row, can recover the row's raw records**; see the module's
    docstring.

    Args:
        first: this member's part of the layer.
        row: the members that hold the same samples.
        accept: the sentence `cgd.JOINT_REVEALS_RECORDS`, which accepts this risk.
        bound: the largest magnitude of a pre-activation.
        gradient_bound: the largest magnitude of a gradient with respect to a pre-activation.

    Raises:
        InputError: the risk was not accepted.
    """

    def __init__(
        self, first: nn.Linear, row: Peers, *, accept: str = "", bound: float = 64.0, gradient_bound: float = 1.0
    ) -> None:
        check_joint_accepted("joint", accept)
        super().__init__()
        self.first, self.bound, self.gradient_bound = first, bound, gradient_bound
        self._row = row
        for parameter in first.parameters():
            setattr(parameter, _JOINT, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' pre-activations."""
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
    """Return the row's log-probabilities: the normalised sum over its towers. The row opens only the sum.

    Args:
        outputs: this member's outputs before the softmax, samples × classes.
        row: the members that hold the same samples.
        bound: log-probabilities below −bound are clamped to −bound.
    """
    return fuse([row.sum(log_probabilities(outputs, bound), bound=bound, context="late fusion")])


def log_probabilities(outputs: torch.Tensor, bound: float = 128.0) -> torch.Tensor:
    """Return one tower's log-probabilities, its addend of the row's sum."""
    return outputs.detach().log_softmax(dim=1).clamp(min=-bound)


def fuse(towers: list[torch.Tensor]) -> torch.Tensor:
    """Return the row's log-probabilities, given those of its towers or their sum."""
    return torch.stack(towers).sum(dim=0).log_softmax(dim=1)
