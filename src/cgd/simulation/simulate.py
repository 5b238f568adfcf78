"""`simulate`: a whole colony in one process (paper, Algorithms 1 and 2)."""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn import functional

from cgd.errors import InputError
from cgd.optim.displacement import SGDRule
from cgd.optim.lr_scheduler import inverse_square
from cgd.optim.vertical import accept_joint
from cgd.simulation.colony import SimulationResult
from cgd.simulation.loop import digest_of, evaluations_every, follow, told
from cgd.simulation.module_engine import ModuleEngine, Ring
from cgd.simulation.population import Participants
from cgd.simulation.result import History

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.grid import Block, Cell
    from cgd.simulation.loop import OnStep
    from cgd.simulation.population import Delta, Loss, Mode
    from cgd.simulation.result import Evaluation

FUSED_ROWS = 4


class Engine(Protocol):
    """How the gradient sums of a colony are computed."""

    name: str

    @property
    def order(self) -> str:
        """In which order gradients are added, and so what the last bits depend on."""

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The gradient of Σ_l (n_l/n)·F_l(origin_l + D) with respect to D, and that loss."""

    def state(self) -> dict[str, Any]:
        """What changes from step to step besides the displacement."""

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""


def simulate(
    build_model: Callable[[], torch.nn.Module],
    blocks: Mapping[Cell, Block],
    *,
    steps: int,
    lr: float,
    delta: Delta = 0.1,
    loss: Loss = functional.cross_entropy,
    mode: Mode = "towers",
    accept: str = "",
    shared: Literal["mean", "sum"] | None = None,
    rule: Callable[[float], UpdateRule] = SGDRule,
    mu: float = 0.0,
    hold: int = 0,
    seed: int = 0,
    common_origin: bool = False,
    arithmetic: Literal["float", "ring"] = "float",
    ring: Ring | None = None,
    engine: Literal["auto", "modules"] = "auto",
    test: tuple[Any, Any] | None = None,
    evaluate_every: int | None = None,
    sample: int = 8,
    checkpoint: str | os.PathLike[str] | None = None,
    memory: float = 4e9,
    progress: bool = True,
    on_step: OnStep = lambda *_: None,
) -> SimulationResult:
    """Train a whole colony in one process: everybody's private model, as the real participants would end up with it.

    Args:
        build_model: makes the model, for all features; with several columns, a `torch.nn.Sequential` that begins with
            a `torch.nn.Linear`, which is cut by columns.
        blocks: everybody's data, from `Grid.split`.
        steps: T, the number of steps; every step uses all samples.
        lr: α, the step size.
        delta: δ, the standard deviation of the origins; a function of the cell gives everyone its own.
        loss: of outputs and labels, a mean over the samples.
        mode: how the members of a row go together, see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS`, which `joint` is refused without.
        shared: whether a step of layers 2…N takes the mean of the columns' gradients or their sum; by default the
            mean in `joint` and the sum in `towers`, where a mean over many columns learns nothing. To Adam, which
            does not see how large a gradient is, it makes no difference.
        rule: how a step of a given size moves the displacement: `SGDRule`, `AdamRule`, or a partial of these.
        mu: μ of the step size, see `InverseSquareLR`; 0 for a fixed one.
        hold: how many steps run with α before it shrinks.
        seed: decides all origins, see `participant_seed`.
        common_origin: whether everybody starts from the same weights, as in federated SGD, without confinement.
        arithmetic: "float", or "ring" for the bits of the real protocol.
        ring: the fixed point of "ring".
        engine: "auto" takes compiled kernels for fully-connected networks in single precision; "modules" never does.
        test: held-out samples and labels; without them nobody is evaluated.
        evaluate_every: how many steps lie between evaluations; by default a hundredth of all.
        sample: how many participants are evaluated, drawn at random.
        checkpoint: a file that is written every 20 seconds and at the end; if it exists, the run resumes from it.
        memory: how many bytes origins may take; what does not fit is drawn again in every step.
        progress: whether to show a bar.
        on_step: is called after each step with its number and the history.

    Raises:
        InputError: the model, the blocks or a setting cannot be used, or the checkpoint is of another run.
        RangeError: in the ring, a gradient is beyond the bound.
        DivergenceError: the loss is no longer finite; the last checkpoint is from before.

    Examples:
        >>> import cgd, torch
        >>> x = torch.randn(120, 2, generator=torch.Generator().manual_seed(0))
        >>> blocks = cgd.Grid(rows=40).split(x, (x.sum(dim=1) > 0).long())
        >>> colony = cgd.simulate(lambda: torch.nn.Linear(2, 2), blocks, steps=50, lr=1.0, progress=False)
        >>> colony
        Colony(40 × 1, 50 steps)
        >>> colony.history.training_loss[-1] < 0.2
        True
        >>> colony.model(cgd.Cell(3, 0))
        Linear(in_features=2, out_features=2, bias=True)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps is {steps!r}; it is a whole number, at least 0")
    if arithmetic not in ("float", "ring") or engine not in ("auto", "modules") or shared not in (None, "mean", "sum"):
        raise InputError(
            f"arithmetic is {arithmetic!r}, engine {engine!r} and shared {shared!r}; choose float or ring, "
            "auto or modules, mean or sum"
        )
    if isinstance(build_model, torch.nn.Module) or not callable(build_model):
        raise InputError(f"build_model is a {type(build_model).__name__}; pass a function that makes the model")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise InputError(f"lr is {lr!r}; it is a number")
    if ring is not None and arithmetic != "ring":
        raise InputError("a ring is given and arithmetic is 'float'; say arithmetic='ring'")
    accept_joint(mode, accept)
    every = evaluations_every(steps, evaluate_every)
    if sample < 1:
        raise InputError(f"sample is {sample}; it must be at least 1")
    participants = Participants(build_model, blocks, mode, delta, seed, common_origin=common_origin)
    shared = shared or ("sum" if mode == "towers" else "mean")
    shrinking = max(1, steps - hold)
    inverse_square(0, mu, shrinking, hold)  # refuses what makes no sense, as does the rule
    shared_lr = lr * (participants.grid.columns if shared == "sum" and rule(lr).follows_scale else 1)
    computed = _engine(participants, loss, arithmetic, ring or Ring(), engine, memory)
    settings = {
        **participants.told(),
        "lr": repr((lr, shared_lr)),
        "rule": repr(rule(lr)),
        "loss": told(loss),
        "schedule": repr((mu, hold, shrinking) if mu else "fixed"),
        "arithmetic": repr(ring or Ring()) if arithmetic == "ring" else computed.order,
        "evaluation": f"{sample} participants, test data {digest_of(test)}",
    }
    history = History()
    colony = SimulationResult(participants, computed.name, history, loss)
    cells = colony.sample(sample, seed)
    history.participants[:] = map(str, cells)

    def rules(step: int) -> tuple[UpdateRule, UpdateRule]:
        factor = inverse_square(step, mu, shrinking, hold)
        return rule(lr * factor), rule(shared_lr * factor)

    descent = _Descent(computed, colony, rules, test, cells)
    with _bar(progress, steps) as advance:

        def after(step: int, history: History) -> None:
            on_step(step, history)
            advance(step, history)

        follow(
            descent,
            history,
            steps=steps,
            lr=lr,
            every=every,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            settings=settings,
            on_step=after,
        )
    return colony


class _Descent:
    """The course of a colony: the engine gives gradient sums, the rules move the displacement by them."""

    def __init__(
        self,
        engine: Engine,
        colony: SimulationResult,
        rules: Callable[[int], tuple[UpdateRule, UpdateRule]],
        test: tuple[Any, Any] | None,
        cells: list[Cell],
    ) -> None:
        self._engine, self._colony, self._rules, self._test, self._cells = engine, colony, rules, test, cells
        self._rows = sorted({cell.row for cell in cells})[:FUSED_ROWS] if colony.fuses else []
        self._remembered: list[dict[str, Any]] = [{}, {}]

    def step(self, number: int) -> float:
        """Move everybody: the first layers of the columns by one rule, what all have in common by the other."""
        gradient_sum, loss = self._engine.gradient_sum(self._colony.flat)
        if math.isfinite(loss):
            for part, rule, remembered in zip(self._colony.parts, self._rules(number), self._remembered, strict=True):
                rule.move(self._colony.flat[part], gradient_sum[part], remembered)
            if not torch.isfinite(self._colony.flat).all():
                return math.inf  # the loss before the step was finite, no later one will be
        return loss

    def evaluate(self, taken: int) -> Evaluation | None:
        """A sample of participants, and in `towers` some of their rows."""
        if self._test is None:
            return None
        return self._colony.evaluate(*self._test, self._cells, self._rows, step=taken)

    def state(self) -> dict[str, Any]:
        """The displacement, and what rules and engine remember."""
        return {"displacement": self._colony.flat, "rule": self._remembered, "engine": self._engine.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `state`."""
        self._colony.flat.copy_(state["displacement"])
        self._remembered = state["rule"]
        self._engine.load_state(state["engine"])


def _engine(participants: Participants, loss: Loss, arithmetic: str, ring: Ring, engine: str, memory: float) -> Engine:
    if arithmetic == "float" and engine == "auto":
        from cgd.simulation.fused_engine import FusedEngine, Network, known_loss

        network, known = Network.of(participants.models[0]), known_loss(loss)
        if network is not None and known is not None and next(iter(participants.blocks.values())).x.ndim == 2:
            return FusedEngine(participants, network, known, memory)
    return ModuleEngine(participants, loss, ring if arithmetic == "ring" else None, memory)


@contextmanager
def _bar(shown: bool, steps: int) -> Iterator[OnStep]:
    """A progress bar with the latest figures, on standard error."""
    if not shown:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=steps)

        def advance(step: int, history: History) -> None:
            said = f"loss {history.training_loss[-1]:.4f}"
            if history.evaluations and history.evaluations[-1].accuracy:
                accuracy = history.evaluations[-1].accuracy
                said += f", accuracy {sum(accuracy) / len(accuracy):.2%}"
            bar.update(task, completed=step, description=said)

        yield advance
