"""The displacement, and the update rules that move it by opened sums (paper, Alg. 1, last line).

A confined model is `origin + displacement`. The origin is private. The displacement is the same at every member: an
update rule computes it from opened sums alone, so that every model descends by the same α_k·Σg.

To compute the same *bits* on every processor, each operation here rounds once. For this reason no rule uses
`add_(alpha=)`, `addcmul_` or `lerp_`: a processor may fuse their multiplication and addition into one rounding.

The context that members compare before a sum, and errors that name a parameter, are also made here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from cgd.errors import InputError, RangeError
from cgd.optim import fresh_origins
from cgd.optim.flat_vectors import join, working_dtype
from cgd.optim.option_checks import check_flag, check_number
from cgd.optim.public_start import DIGEST_BYTES, forget_written, start_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    ParameterState = dict[str, Any]
    ParameterGroup = dict[str, Any]


# What an update rule may store for a parameter between steps, beside the origin and the displacement: tensors of the
# displacement's shape and type, and "powers", two numbers in [0, 1]. A stored state with anything else is rejected.
RULE_STATES = (
    frozenset[str](),
    frozenset({"momentum_buffer"}),
    frozenset({"mean", "square", "powers"}),
    frozenset({"mean", "square", "largest", "powers"}),
)
PRIVATE_STATES = ("origin", "start", fresh_origins.STEP_ORIGIN)
"""The keys of a parameter's state that members do not store: its value before the first step, and a digest."""
# A context has at most 255 bytes, of which the digest takes 64.
MAX_OPTIONS_CHARACTERS = 115
FROZEN_CHARACTERS = len(", frozen 01234567")


def trainable(*groups: ParameterGroup) -> list[torch.Tensor]:
    """Return the parameters of these groups that require a gradient."""
    return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


@dataclass(frozen=True)
class StepContext:
    """A description of everything that must be equal at all members for the displacements to stay equal.

    Members compare it before they open anything, so a different lr, a missed step or a wrong checkpoint is reported at
    once. It contains only what all members know anyway: options that a user adds to a group are not part of it.

    Attributes:
        text: the optimiser and its options.
        digests: digests of the model's layout, of the start, of frozen layers if there are any, and of the state.
    """

    text: str
    digests: dict[str, bytes]

    def complete(self, total_samples: int) -> str:
        """Return the text that members compare before a sum.

        The number of all samples is part of it: a step that may have been revealed is not repeated with other weights.
        """
        text = f"{self.text}, {total_samples} samples"
        everything = hashlib.sha256(text.encode() + b"".join(self.digests.values())).hexdigest()
        most = MAX_OPTIONS_CHARACTERS - (FROZEN_CHARACTERS if "frozen" in self.digests else 0)
        excerpt = text if len(text) <= most else f"{text[:most]}…"
        # The short digests show a reader which part differs; the comparison rests on the full digest at the end.
        shown = ", ".join(f"{name} {each.hex()[:8]}" for name, each in self.digests.items())
        return f"{excerpt}, {shown}, all {everything}"


def step_context(
    kind: str, options: Sequence[str], groups: Sequence[ParameterGroup], states: Mapping[torch.Tensor, dict[str, Any]]
) -> StepContext:
    """Return the description of a step; `groups` are those of one sum.

    In a grid, the first layers of different columns have different shapes.
    """
    values = {key: [canonical(group[key]) for group in groups] for key in options}
    parameters = enumerate(chain.from_iterable(group["params"] for group in groups))
    layout = [(index, tuple(each.shape), str(each.dtype)) for index, each in parameters if each.requires_grad]
    start, state, frozen = hashlib.sha256(), hashlib.sha256(), b""
    for parameter in trainable(*groups):
        own = states[parameter] if parameter in states else {"start": start_of(parameter)}
        digests = bytes(_to_bytes(own.get("start")))
        start.update(digests[:DIGEST_BYTES])
        frozen += digests[DIGEST_BYTES:]
        for key, value in sorted(own.items()):
            if key not in PRIVATE_STATES:
                state.update(key.encode())
                state.update(_to_bytes(value))
    text = f"{kind} with " + ", ".join(f"{key} {' '.join(each)}" for key, each in values.items())
    parts = {"model": hashlib.sha256(repr(layout).encode()).digest(), "start": start.digest()}
    if frozen:
        parts["frozen"] = hashlib.sha256(frozen).digest()
    return StepContext(text, parts | {"state": state.digest()})


def parameter_name(parameter: torch.Tensor, groups: Sequence[ParameterGroup], number: int) -> str:
    """Return the name of a parameter in these groups; its number and shape if it has none."""
    names: dict[torch.Tensor, str] = {
        parameter: name
        for group in groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return names.get(parameter, f"number {number}, of shape {tuple(parameter.shape)},")


def locate_range_error(
    error: RangeError, groups: Sequence[ParameterGroup], parameters: Sequence[torch.Tensor], what: str = "gradient"
) -> RangeError:
    """Return the same error with the name of the parameter and the index in it, instead of the index in the vector.

    `what` was summed: "gradient" or "update".
    """
    ends = np.cumsum([parameter.numel() for parameter in parameters])
    number = int(np.searchsorted(ends, error.index[0], side="right"))
    parameter = parameters[number]
    offset = error.index[0] - int(ends[number]) + parameter.numel()
    index = tuple(int(i) for i in np.unravel_index(offset, parameter.shape)) if parameter.dim() else ()
    name = parameter_name(parameter, groups, number)
    return RangeError(error.value, index, error.bound, f"the {what} of parameter {name}")


def canonical(value: Any) -> str:
    """Return an option as text that depends on its value only: 1, 1.0 and a tensor of 1 give the same text."""
    if value is None or isinstance(value, str):
        return repr(value)
    return "/".join(map(canonical, value)) if isinstance(value, (tuple, list)) else repr(float(value))


def _to_bytes(value: Any) -> bytes | memoryview:
    return value.cpu().contiguous().numpy().data if isinstance(value, torch.Tensor) else repr(value).encode()


class UpdateRule(Protocol):
    """One step of the displacement, given an opened sum.

    Attributes:
        scales_with_gradient: True if a gradient twice as large makes a step twice as large.
        elementwise: True if each coordinate moves by itself, so that any part of a displacement can be moved at once;
            otherwise the rule moves one parameter at a time.
    """

    scales_with_gradient: ClassVar[bool]
    elementwise: ClassVar[bool]

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place; `state` holds the rule's buffers between steps."""


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent, with optional momentum: v ← momentum·v + G, D ← D − lr·v.

    With `nesterov`, D ← D − lr·(G + momentum·v), as in torch.
    """

    scales_with_gradient: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_lr(self.lr)
        if not 0 <= check_number("momentum", self.momentum) < 1:
            raise InputError(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if check_flag("nesterov", self.nesterov) and not self.momentum:
            raise InputError("nesterov is True and momentum is 0; give a momentum, such as 0.9, or leave nesterov out")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place by one step; `state` holds the momentum buffer."""
        velocity = gradient_sum
        if self.momentum != 0:
            previous = state.get("momentum_buffer")
            velocity = gradient_sum.clone() if previous is None else previous * self.momentum + gradient_sum
            state["momentum_buffer"] = velocity
        if self.nesterov:
            velocity = gradient_sum + velocity * self.momentum
        displacement -= velocity * self.lr


@dataclass(frozen=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015) on the opened sums; with `amsgrad`, AMSGrad (Reddi et al., 2018)."""

    scales_with_gradient: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        check_lr(self.lr)
        check_flag("amsgrad", self.amsgrad)
        if not all(0 <= beta < 1 for beta in check_betas(self.betas)) or check_number("eps", self.eps) <= 0:
            raise InputError(f"betas are {self.betas} and eps is {self.eps}; betas must be in [0, 1) and eps above 0")

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place by one step; `state` holds the moments."""
        if "mean" not in state:
            state["mean"] = torch.zeros_like(displacement)
            state["square"] = torch.zeros_like(displacement)
            # β^k as a running product: pow() may differ in the last bit from one system to the next.
            state["powers"] = (1.0, 1.0)
        beta_1, beta_2 = self.betas
        power_1, power_2 = state["powers"]
        power_1, power_2 = state["powers"] = (power_1 * beta_1, power_2 * beta_2)
        mean = state["mean"] = state["mean"] * beta_1 + gradient_sum * (1.0 - beta_1)
        square = state["square"] = state["square"] * beta_2 + gradient_sum * gradient_sum * (1.0 - beta_2)
        if self.amsgrad:
            square = state["largest"] = torch.maximum(state.get("largest", square), square)
        denominator = torch.sqrt(square * (1.0 / (1.0 - power_2))) + self.eps
        displacement -= mean * (1.0 / (1.0 - power_1)) / denominator * self.lr


def initial_state(parameter: torch.Tensor) -> ParameterState:
    """Return the state of a parameter before its first step: its value becomes the origin, start included.

    With fresh origins, the origin is that of the confined model, and the value that of the first step.
    """
    origin = parameter.detach().to(working_dtype(parameter), copy=True)
    state = {"origin": origin, "start": start_of(parameter), "displacement": torch.zeros_like(origin)}
    if fresh_origins.is_fresh(parameter):
        state |= {"origin": fresh_origins.draw(parameter), fresh_origins.STEP_ORIGIN: origin}
    return state


def origin_digest(parameters: Iterable[torch.Tensor], states: Mapping[torch.Tensor, ParameterState]) -> bytes:
    """Return a digest of the origins of parameters, start included; of those without a state, as they would become."""
    found = join([(states.get(each) or initial_state(each))["origin"] for each in parameters])
    return hashlib.sha256(_to_bytes(found)).digest()


def place_for_step(parameter: torch.Tensor, state: ParameterState, step: int) -> None:
    """Set a parameter to the weights at which the gradient of a step is computed."""
    if fresh_origins.STEP_ORIGIN in state:
        state[fresh_origins.STEP_ORIGIN] = fresh_origins.draw(parameter, step)
    place(parameter, fresh_origins.training_origin(state), state["displacement"])


def place(parameter: torch.Tensor, origin: torch.Tensor, displacement: torch.Tensor) -> None:
    """Set a parameter to origin + displacement. No other code of a training writes private weights."""
    parameter.copy_(origin + displacement)
    forget_written(parameter)


@torch.no_grad()
def place_weights(
    parameters: Sequence[torch.Tensor], states: Mapping[torch.Tensor, ParameterState], *, evaluating: bool
) -> None:
    """Set parameters to the weights of the next step, or with `evaluating` to the confined model."""
    for parameter in parameters:
        if parameter in states:
            state = states[parameter]
            origin = state["origin"] if evaluating else fresh_origins.training_origin(state)
            place(parameter, origin, state["displacement"])
        else:  # before the first step
            parameter.copy_(fresh_origins.draw(parameter, None if evaluating else 0))


def reject_weight_decay(weight_decay: float) -> None:
    """Reject weight decay, the only option of torch's optimisers that reads the weights.

    Raises:
        InputError: it is not zero.
    """
    if weight_decay != 0:
        raise InputError(
            f"weight_decay is {weight_decay}; it would pull every member by its own private weights, and the members "
            "would no longer move together. Leave it at 0; stop early or use a smaller model instead"
        )


def check_betas(betas: Any) -> tuple[float, float]:
    """Return the two factors of Adam.

    Raises:
        InputError: they are not two finite numbers.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InputError(f"betas are {betas!r}; they must be two numbers, such as (0.9, 0.999)")
    first, second = (check_number("one of betas", each) for each in betas)
    return first, second


def check_lr(lr: Any) -> float:
    """Return a learning rate, which may be a tensor, as a float.

    Raises:
        InputError: it is not a finite number, at least 0.
    """
    return check_number("lr", lr, 0)
