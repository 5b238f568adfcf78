"""Any optimiser of torch over the displacement, with the opened sums as its gradients.

It reads opened sums and the displacement only, which all members have, so every member takes the same step, as long as
torch computes the same bits everywhere. That is not certain: torch's optimisers use operations that one processor
rounds once and another twice. Members compare a digest of the displacement and of the optimiser's state before every
sum, so a difference is an error before anything more is opened. `ConfinedSGD` and `ConfinedAdam` have the same bits on
every machine.

Each parameter is moved by an optimiser of its own, built anew for each step from the options and the state of the
parameter: this is what members compare and store. An optimiser class with more memory than this, such as a counter of
its own or a norm over all parameters, would take other steps than it does in torch. `ConfinedTorchOptimizer` compares
the two in a trial at its construction, and refuses such a class.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cgd.errors import InputError
from cgd.optim.displacement import PRIVATE_STATES, canonical, check_lr
from cgd.optim.flat_vectors import working_dtype
from cgd.optim.optimizer import ConfinedOptimizer
from cgd.optim.sample_count import NOT_COUNTED

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import ParameterState
    from cgd.optim.privacy import Privacy
    from cgd.optim.recovery import Layout
    from cgd.peers import Peers

MACHINE_DEPENDENT = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose how torch computes, and with it the bits. All of them are switched off."""

_OURS = ("displacement", *PRIVATE_STATES)
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""What classes that cannot be used raise, in their constructors or steps."""
_TRIAL_STEPS = 12
_TRIAL_SHAPES = ((2, 2), (3, 4))  # Muon accepts only matrices
_TRIAL_LR = 0.125


@dataclass(frozen=True)
class TorchRule:
    """One step of a torch optimiser on the displacement of one parameter.

    Attributes:
        kind: the class of the optimiser.
        options: its options.
    """

    scales_with_gradient: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options.get("lr") is not None:  # torch accepts inf and NaN
            check_lr(self.options["lr"])

    def build(self, displacement: torch.Tensor) -> torch.optim.Optimizer:
        """Return a new optimiser of this tensor.

        Raises:
            InputError: torch rejects an option, or the shape.
        """
        try:
            return self.kind([displacement], **self.options)
        except _FAILURES as error:
            raise InputError(
                f"torch's {self.kind.__name__} cannot be used for a parameter of shape {tuple(displacement.shape)} "
                f"with {self.options}: {error}"
            ) from None

    def move(self, displacement: torch.Tensor, gradient_sum: torch.Tensor, state: ParameterState) -> None:
        """Move `displacement` in place by one step; `state` holds the state of the optimiser."""
        optimizer = self.build(displacement)
        if stored := {key: value for key, value in state.items() if key not in _OURS}:
            optimizer.state[displacement] = stored
        displacement.grad = gradient_sum
        try:
            optimizer.step()
        finally:
            displacement.grad = None
        state.update(optimizer.state[displacement])

    def layout(self, parameter: torch.Tensor) -> Layout:
        """Return the type and shape of each tensor that the optimiser stores for a parameter after a step."""
        displacement = torch.zeros(parameter.shape, dtype=working_dtype(parameter))
        state: ParameterState = {}
        self.move(displacement, torch.ones_like(displacement), state)
        return {key: (value.dtype, value.shape) for key, value in state.items()}


class ConfinedTorchOptimizer(ConfinedOptimizer):
    """An unmodified optimiser of torch that moves the displacement by the opened sums.

    Weight decay pulls the displacement towards zero, and thereby each member's weights towards its own origin: it reads
    nothing that is private. So do other options that read the weights.

    The members need machines and versions of torch that compute the same bits; see the module's docstring.

    Args:
        params: parameters or parameter groups, as in torch.
        kind: a class of `torch.optim`, or another one that reads gradients and weights only. Its state consists of
            tensors for each parameter, in `state[parameter]`, and its options are in `defaults`, as they were given.
            Optimisers that need a closure (`LBFGS`) or sparse gradients (`SparseAdam`), and those that use anything
            else (a counter of their own, a norm over all parameters) are rejected.
        peers: the members of the sum.
        samples: n_l, the number of this participant's samples; the other members learn only the total.
        max_norm: as for `ConfinedSGD`.
        privacy: differential privacy of every record, see `cgd.Privacy`.
        delay: as for `ConfinedSGD`.
        **options: the options of `kind`. Those that change how torch computes, such as `fused`, are rejected.

    Raises:
        InputError: the optimiser, or an option, cannot be used.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(1, 1, bias=False)
        ...     cgd.confine(model, delta=0.1)
        ...     optimizer = cgd.ConfinedTorchOptimizer(
        ...         model.parameters(), torch.optim.AdamW, peers=peers, samples=len(x), lr=0.1, weight_decay=0.01
        ...     )
        ...     for _ in range(30):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...     return optimizer.displacement()
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> with cgd.local_peers(3) as members:
        ...     one, two, three = members.run(train, [x] * 3, [3 * x] * 3)
        >>> torch.equal(one, two) and torch.equal(two, three)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        kind: type[torch.optim.Optimizer],
        *,
        peers: Peers,
        samples: int,
        max_norm: float | None = None,
        privacy: Privacy | None = None,
        delay: int = 0,
        **options: Any,
    ) -> None:
        self._kind = kind
        defaults = _check(kind, options)
        self._names = sorted(defaults.keys() - set(MACHINE_DEPENDENT))
        self._switched_off = dict.fromkeys(defaults.keys() & set(MACHINE_DEPENDENT), False)
        defaults = {key: defaults[key] for key in self._names}
        super().__init__(
            params, defaults, peers=peers, samples=samples, privacy=privacy, max_norm=max_norm, delay=delay
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own options and its own `peers`."""
        _reject_machine_dependent(param_group)
        params = param_group["params"]
        group = param_group | {"params": [params] if isinstance(params, torch.Tensor) else list(params)}
        rule = self._rule({**self.defaults, **group})
        for each in group["params"]:
            parameter = each[1] if isinstance(each, tuple) else each
            rule.build(torch.empty(parameter.shape, dtype=working_dtype(parameter), device="meta"))
        super().add_param_group(group)

    def _rule(self, group: dict[str, Any]) -> TorchRule:
        own = {key: group[key] for key in self._names}
        _check_comparable(self._kind, own)
        numbers = {key for key, value in own.items() if isinstance(value, torch.Tensor) and value.numel() == 1}
        options = {key: value.item() if key in numbers else value for key, value in own.items()}
        rule = TorchRule(self._kind, options | self._switched_off)
        rule.build(torch.zeros(2, 2))  # rejects options that a scheduler or the program has set
        return rule

    def _describe(self) -> str:
        return f"{super()._describe()}({self._kind.__name__})"

    def _layout(self, group: dict[str, Any], parameter: torch.Tensor) -> Layout | None:
        return self._rule(group).layout(parameter)


def _check(kind: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the optimiser with their values, after trial steps.

    Raises:
        InputError: the optimiser cannot be used.
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or issubclass(kind, ConfinedOptimizer):
        given = f"of type {type(kind).__name__}" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise InputError(f"the optimiser is {given}; it must be a class such as torch.optim.AdamW, which is not called")
    _reject_machine_dependent(options)
    _check_comparable(kind, options)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        raise InputError(
            f"torch's {kind.__name__} needs a closure, which it calls several times in a step; each of these would "
            "need a sum of its own. Use an optimiser that takes one gradient in a step"
        )
    rule = TorchRule(kind, dict(options))
    found = rule.build(torch.zeros(2, 2)).defaults
    if taken := found.keys() & {*NOT_COUNTED, "steps"}:
        raise InputError(f"torch's {kind.__name__} has an option {min(taken)!r}, a name that cgd uses; rename it")
    passed = {key: value for key, value in found.items() if key in _accepted(kind) | options.keys()}
    # A scheduler would look for lr in the parameter groups.
    if lost := (options.keys() | ({"lr"} & found.keys())) - passed.keys():
        raise InputError(
            f"{kind.__name__} does not have its option {min(lost)!r} both in its constructor and in `defaults`, so "
            "that it would not be used, compared or scheduled; use a class whose constructor names it and passes it to "
            "Optimizer.__init__ in defaults, or give it here if the constructor takes it by **kwargs"
        )
    try:
        _try_steps(rule)
        _compare_with_torch(kind, dict(options), passed.keys())
        if "lr" in passed:  # an lr of zero, as a warm-up may begin with, would hide every difference
            _compare_with_torch(kind, {**options, "lr": _TRIAL_LR}, passed.keys())
    except InputError:
        raise
    except _FAILURES as error:
        raise InputError(
            f"torch's {kind.__name__} failed in a step with the gradient of a matrix: {error}. Use an optimiser for "
            "dense gradients"
        ) from None
    return passed


def _accepted(kind: type[torch.optim.Optimizer]) -> set[str]:
    """Return the names of the constructor's parameters; with `**kwargs`, also those of the classes it inherits from."""
    names: set[str] = set()
    for each in kind.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(vars(each)["__init__"]).parameters
            names |= parameters.keys()
            if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names


def _check_comparable(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
    """Check that members can compare these options.

    Raises:
        InputError: an option is of another type than numbers, texts, None, and lists of these.
    """
    for key, value in options.items():
        try:
            canonical(value)
        except _FAILURES:
            if key == "lr":
                check_lr(value)
            raise InputError(
                f"the option {key} of {kind.__name__} is of type {type(value).__name__}; members compare options "
                "before each sum, so an option must be a number, a text, None, or a list of these"
            ) from None


def _compare_with_torch(kind: type[torch.optim.Optimizer], options: dict[str, Any], names: Set[str]) -> None:
    """Compare the steps of one ordinary optimiser of two parameters with those of `TorchRule`, bit for bit.

    `names` are the options that are passed on to a rule.

    Raises:
        InputError: they are not the same, or the optimiser has memory that belongs to no parameter.
    """
    parameters = [torch.zeros(shape) for shape in _TRIAL_SHAPES]
    displacements = [each.clone() for each in parameters]
    states: list[dict[str, Any]] = [{} for _ in parameters]
    ordinary = kind(parameters, **options)
    rule = TorchRule(kind, {key: key not in MACHINE_DEPENDENT and ordinary.defaults[key] for key in names})
    before = _own_numbers(ordinary)
    for step in range(_TRIAL_STEPS):
        for number, (parameter, displacement) in enumerate(zip(parameters, displacements, strict=True)):
            parameter.grad = _trial_gradient(parameter.shape, step, number)
            rule.move(displacement, parameter.grad.clone(), states[number])
        ordinary.step()
        pairs = zip(parameters, displacements, strict=True)
        if not all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs):
            raise _more_than_a_rule(kind, f"it takes another step {step + 1} than a new one with its options and state")
    if extra := [key for key in ordinary.state if not isinstance(key, torch.Tensor)]:
        raise _more_than_a_rule(kind, f"its state has {extra[0]!r}, which belongs to no parameter")
    after = _own_numbers(ordinary)
    if changed := sorted(key for key in after if key not in before or after[key] != before[key]):
        raise _more_than_a_rule(kind, f"its attribute {changed[0]!r} changes in a step")


def _own_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimiser that are numbers."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float))}


def _trial_gradient(shape: torch.Size, step: int, number: int) -> torch.Tensor:
    """Return a made-up gradient, other than those of other steps and parameters."""
    values = (torch.arange(shape.numel()) * 7 + step * 5 + number * 3) % 11 - 5.25
    return (values * 0.125 * (number + 1)).reshape(shape)


def _more_than_a_rule(kind: type[torch.optim.Optimizer], fact: str) -> InputError:
    return InputError(
        f"{kind.__name__} cannot be used: {fact}. Each parameter is moved by itself, from the options in `defaults` "
        "and the tensors in `state[parameter]`, which members compare and store. Use an optimiser that keeps its "
        "counters in state[parameter], reads its options from its parameter groups as they were given, draws no random "
        "numbers, and computes nothing over several parameters, such as a norm; or cgd's max_norm= for the latter"
    )


def _try_steps(rule: TorchRule) -> None:
    """Take steps with a matrix, as a trial.

    Raises:
        InputError: the state cannot be stored, or the optimiser stores something outside of it.
    """
    displacement, state, layouts = torch.zeros(2, 2), dict[str, Any](), []
    for _ in range(2):
        rule.move(displacement, torch.ones(2, 2), state)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16 or key in _OURS:
                raise InputError(
                    f"the state of {rule.kind.__name__} has {key!r} of type {type(value).__name__}; only tensors, "
                    "other than of bfloat16, are stored for a restart"
                )
        layouts.append({key: (value.dtype, value.shape) for key, value in state.items()})
    if layouts[0] != layouts[1]:
        raise InputError(
            f"the state of {rule.kind.__name__} has other tensors after its second step than after its first; use one "
            "whose state does not change its layout"
        )
    optimizer = rule.build(displacement)
    options = {**optimizer.param_groups[0], "params": None}
    displacement.grad = torch.ones(2, 2)
    optimizer.step()
    if {**optimizer.param_groups[0], "params": None} != options:
        raise InputError(
            f"{rule.kind.__name__} changes the options of its parameter group in a step; these are not stored for a "
            "restart. Use an optimiser whose state belongs to its parameters"
        )


def _reject_machine_dependent(options: Mapping[str, Any]) -> None:
    for key in MACHINE_DEPENDENT:
        if options.get(key):
            raise InputError(
                f"{key} is {options[key]}; it changes how torch computes, so that members with other machines would "
                "not take the same step. Leave it out"
            )
