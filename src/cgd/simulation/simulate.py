"""`simulate`: all participants in one process (paper, Algorithms 1 and 2)."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError
from cgd.optim.delayed_steps import check_delay
from cgd.optim.displacement import SGDRule
from cgd.optim.flat_vectors import CPU, check_device
from cgd.optim.lr_scheduler import check_decay, inverse_square_factor
from cgd.optim.option_checks import check_flag, check_number, check_whole
from cgd.optim.program_checks import check_rule
from cgd.optim.vertical import check_joint_accepted
from cgd.simulation.checkpoint import FIXED
from cgd.simulation.engines import choose_engine
from cgd.simulation.kept_model import hold_out
from cgd.simulation.local_training import Work
from cgd.simulation.loop import data_digest, describe_loss, evaluation_interval, run_loop
from cgd.simulation.module_engine import Ring
from cgd.simulation.population import Participants
from cgd.simulation.private_engine import PrivateEngine, check_private
from cgd.simulation.ray_cluster import RayCluster
from cgd.simulation.result import History, SimulationResult

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.grid import Block, Cell
    from cgd.optim.public_start import Start
    from cgd.simulation.engines import Engine
    from cgd.simulation.local_training import LocalTraining
    from cgd.simulation.loop import OnStep
    from cgd.simulation.population import Delta, Loss, Mode
    from cgd.simulation.result import Evaluation

    Schedule = Callable[[int], float]

MAX_FUSED_ROWS = 4
"""Most rows that are evaluated by late fusion: each takes the models of all its columns."""


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
    momentum: float = 0.0,
    nesterov: bool = False,
    batches: int = 1,
    local: LocalTraining | None = None,
    mu: float = 0.0,
    hold: int = 0,
    schedule: Schedule | None = None,
    delay: int = 0,
    seed: int = 0,
    start: Start = "model",
    common_origin: bool = False,
    fresh_origins: bool = False,
    arithmetic: Literal["float", "ring"] = "float",
    ring: Ring | None = None,
    privacy: PrivacySettings | None = None,
    engine: Literal["auto", "modules", "ray"] | RayCluster = "auto",
    test: tuple[Any, Any] | None = None,
    evaluate_every: int | None = None,
    sample: int = 8,
    keep: float = 0.0,
    device: str | torch.device = "cpu",
    checkpoint: str | os.PathLike[str] | None = None,
    memory: float = 4e9,
    progress: bool = True,
    on_step: OnStep = lambda *_: None,
) -> SimulationResult:
    """Train all participants of a federation in one process and return their private models.

    Args:
        build_model: function that builds the model for all features; with several columns, a `torch.nn.Sequential`
            that begins with a `torch.nn.Linear`, which is split by columns.
        blocks: data of all participants, from `Grid.split`.
        steps: number of steps, the paper's T. Each has one sum of all participants, a round.
        lr: step size, the paper's α; with `local`, the factor of the mean update, 1 for federated averaging.
        delta: standard deviation of the origins, the paper's δ; a function of the cell for a value per participant.
        loss: loss function of outputs and labels, a mean over the samples.
        mode: "towers" or "joint" for grids with several columns, see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS`; the mode "joint" is rejected without it.
        shared: "mean" or "sum" of the columns' gradients in a step of layers 2…N; by default the mean in `joint` and
            the sum in `towers`, where a mean over many columns learns nothing. Adam is invariant to the scale of
            gradients, so it makes no difference there. `GradientNormRule` needs the mean.
        rule: update rule, as a function of the step size: `SGDRule`, `AdamRule`, `GradientNormRule`, or a partial of
            these.
        momentum: momentum of the displacement, for the rule `SGDRule`.
        nesterov: use Nesterov's momentum.
        batches: number of batches of an epoch, of which each step uses one; 1 to use all samples in every step.
        local: local training of every participant between two sums; None to sum gradients.
        mu: the paper's μ of the step size, see `InverseSquareLR`; 0 for a fixed step size.
        hold: number of steps with a fixed step size before it decreases.
        schedule: factor of the step size in each step, counted from 0, instead of `mu` and `hold`.
        delay: number of steps after which the displacement moves by a sum, as with `delay` of an optimiser; the last
            sums move it at the end. One column only, and not with fresh origins.
        seed: seed of the public start, of all origins, see `participant_seed`, and of the noise of `privacy`.
        start: "model" for a public start with the values of the built model, to which every participant adds its
            origin; "zeros" for origins around zero, as in the paper.
        common_origin: start all participants from the same weights, as in federated SGD, without confinement.
        fresh_origins: draw another origin for each participant and step, so that the displacement cannot adapt to the
            origins of training; a participant's own origin is then not used before the end.
        arithmetic: "float", or "ring" for the bits of the real protocol.
        ring: fixed-point settings of the arithmetic "ring".
        privacy: clip the gradient of every record and add noise, as real participants with `cgd.Privacy` do, with their
            bits in the arithmetic "ring"; for studies of utility, because all noise follows from the seed. Always
            computed by the engine "modules"; one column only.
        engine: "auto" uses compiled kernels for fully-connected networks in single precision; "modules" never does;
            "ray" or a `cgd.RayCluster` computes with these kernels on a cluster, to the same bits.
        test: held-out samples and labels; without them no participant is evaluated.
        evaluate_every: steps between evaluations; by default a hundredth of all steps.
        sample: number of participants to evaluate, drawn at random.
        keep: part of each participant's records that it does not train on, but chooses by which model it keeps, see
            `cgd.simulation.kept_model`; evaluations then have the kept models, too. 0 for none.
        device: where models compute, such as "cuda", with the engine "modules"; the CPU otherwise. For one column, and
            without `privacy`. The displacement, the origins and the results stay on the CPU.
        checkpoint: file that is written every 20 seconds and at the end; if it exists, the run resumes from it. With
            `mu`, it may be that of a run with a fixed step size, after at most `hold` steps.
        memory: most bytes for origins in memory; origins that do not fit are drawn again in every step.
        progress: show a progress bar.
        on_step: callback after each step, with its number and the history.

    Raises:
        InputError: the model, the blocks or a setting cannot be used, or the checkpoint belongs to another run.
        RangeError: a gradient exceeds the bound of the ring.
        DivergenceError: the loss is not finite; the last checkpoint holds an earlier, finite state.
        ClusterError: workers of a cluster cannot be started, or are lost again and again.

    Examples:
        >>> import cgd, torch
        >>> x = torch.randn(120, 2, generator=torch.Generator().manual_seed(0))
        >>> blocks = cgd.Grid(rows=40).split(x, (x.sum(dim=1) > 0).long())
        >>> result = cgd.simulate(lambda: torch.nn.Linear(2, 2), blocks, steps=50, lr=1.0, progress=False)
        >>> result
        SimulationResult(40 × 1, 50 steps)
        >>> result.history.training_loss[-1] < 0.2
        True
        >>> result.model(cgd.Cell(3, 0))
        Linear(in_features=2, out_features=2, bias=True)
    """
    steps, seed = check_whole("steps", steps), check_whole("seed", seed)
    for name, flag in (("common_origin", common_origin), ("fresh_origins", fresh_origins)):
        check_flag(name, flag)
    cluster = RayCluster() if engine == "ray" else engine if isinstance(engine, RayCluster) else None
    known = cluster is not None or engine in ("auto", "modules")
    if arithmetic not in ("float", "ring") or not known or shared not in (None, "mean", "sum"):
        raise InputError(
            f"arithmetic is {arithmetic!r}, engine {engine!r} and shared {shared!r}; choose float or ring, "
            "auto, modules, ray or a RayCluster, mean or sum"
        )
    if isinstance(build_model, torch.nn.Module) or not callable(build_model):
        raise InputError(f"build_model is a {type(build_model).__name__}; pass a function that builds the model")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise InputError(f"lr is {lr!r}; it must be a number")
    check_number("memory", memory, 0)
    if ring is not None and arithmetic != "ring":
        raise InputError("a ring is given and arithmetic is 'float'; set arithmetic='ring'")
    check_joint_accepted(mode, accept)
    evaluate_every = evaluation_interval(steps, evaluate_every)
    sample = check_whole("sample", sample, 1)
    check_delay(delay, steps)
    work = Work(batches, local)
    if keep and common_origin:
        raise InputError(f"keep is {keep} and all participants have a common origin; there is no model to choose")
    training, validation = hold_out(blocks, keep, seed) if keep else (blocks, None)
    participants = Participants(
        build_model,
        training,
        mode,
        delta,
        seed,
        start=start,
        common_origin=common_origin,
        fresh_origins=fresh_origins,
        device=check_device(device),
    )
    if privacy is not None:
        if participants.device != CPU:
            raise InputError(f"device is {device!r} and privacy is given, which is simulated on the CPU; leave one out")
        if not isinstance(privacy, PrivacySettings):
            raise InputError(f"privacy is {type(privacy).__name__}; pass PrivacySettings(epsilon=…, delta=…, steps=…)")
        check_private(participants, steps, privacy, work)
    if delay and participants.grid.columns > 1:
        raise InputError(
            f"delay is {delay} and there are {participants.grid.columns} columns: a step has a sum of each column and "
            "one of all, which are opened together, and in the mode joint a row sums in every forward pass; a delay is "
            "for one column"
        )
    if delay and fresh_origins:
        raise InputError(
            f"delay is {delay} and there are fresh origins: a gradient would be that of a step before, at the origin "
            "of another one, and real participants refuse this, too; leave one of both out"
        )
    if local is not None and mode == "joint" and participants.grid.columns > 1:
        raise InputError(
            "there is a local training and the mode is joint, in which a row sums in every step; use the mode towers, "
            "or batches"
        )
    rule = _with_momentum(rule, momentum, nesterov=nesterov)
    shared = shared or ("sum" if mode == "towers" else "mean")
    factor, described_schedule = step_factor(steps, mu, hold, schedule)
    example_rule = rule(lr)
    check_rule(example_rule)
    if shared == "sum" and participants.grid.columns > 1 and not example_rule.elementwise:
        raise InputError(
            f"the rule is {type(example_rule).__name__} and the step of layers 2…N is the sum over "
            f"{participants.grid.columns} columns; this rule is defined for the mean, set shared='mean'"
        )
    shared_lr = lr * (participants.grid.columns if shared == "sum" and example_rule.scales_with_gradient else 1)
    chosen_engine = choose_engine(
        participants,
        loss,
        (ring or Ring()) if arithmetic == "ring" else None,
        memory,
        work=work,
        privacy=privacy,
        kernels=engine != "modules",
        cluster=cluster,
    )
    settings = {
        **participants.checkpoint_settings(),
        "lr": repr((lr, shared_lr)),
        "rule": repr(example_rule),
        "loss": describe_loss(loss),
        "schedule": described_schedule,
        "arithmetic": repr(ring or Ring()) if arithmetic == "ring" else chosen_engine.summation_order,
        "evaluation": f"{sample} participants, test data {data_digest(test)}",
        **({} if privacy is None else {"privacy": privacy.describe()}),
        **work.describe(),
        **({"keep": repr(keep)} if keep else {}),
        **({"delay": repr(delay)} if delay else {}),
    }
    history = History()
    result = SimulationResult(participants, chosen_engine.name, history, loss, validation)
    cells = result.sample(sample, seed)
    history.participants[:] = map(str, cells)

    def rules(step: int) -> tuple[UpdateRule, UpdateRule]:
        return rule(lr * factor(step)), rule(shared_lr * factor(step))

    with _progress_bar(progress, steps, result) as update_bar, chosen_engine.running():

        def after_step(step: int, history: History) -> None:
            result.workers = chosen_engine.workers
            on_step(step, history)
            update_bar(step, history)

        parts = result.displacement_parts(single_parameters=not example_rule.elementwise)
        loop = _SimulationLoop(chosen_engine, result, rules, parts, test, cells, delay)
        run_loop(
            loop,
            history,
            steps=steps,
            lr=lr,
            evaluate_every=evaluate_every,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            settings=settings,
            on_step=after_step,
            fixed_steps=hold,
            drain=loop.drain if delay else None,
        )
    if isinstance(chosen_engine, PrivateEngine):
        result.spent = chosen_engine.spent()
    return result


class _SimulationLoop:
    """The training loop of a simulation: the engine returns gradient sums, the rules move the displacement by them."""

    def __init__(
        self,
        engine: Engine,
        result: SimulationResult,
        rules: Callable[[int], tuple[UpdateRule, UpdateRule]],
        parts: list[tuple[slice, bool]],
        test: tuple[Any, Any] | None,
        cells: list[Cell],
        delay: int,
    ) -> None:
        self._delay, self._entered = delay, deque[tuple[int, torch.Tensor]]()
        self._engine, self._result, self._rules, self._test, self._cells = engine, result, rules, test, cells
        self._parts = parts
        self._rows = sorted({cell.row for cell in cells})[:MAX_FUSED_ROWS] if result.has_late_fusion else []
        self._rule_states: list[dict[str, Any]] = [{} for _ in parts]

    def step(self, number: int) -> float:
        """Compute the sum of a step, and move the displacement by the sum of as many steps ago as the delay is."""
        gradient_sum, loss = self._engine.gradient_sum(self._result.flat_displacement)
        if math.isfinite(loss):
            self._entered.append((number, gradient_sum.clone() if self._delay else gradient_sum))
            if len(self._entered) > self._delay:
                self._move(*self._entered.popleft())
            if not torch.isfinite(self._result.flat_displacement).all():
                return math.inf  # the loss before this step was finite, every later one is not
        return loss

    def drain(self) -> None:
        """Move the displacement by the last sums."""
        while self._entered:
            self._move(*self._entered.popleft())

    def _move(self, number: int, gradient_sum: torch.Tensor) -> None:
        """Move the displacement: the columns' first layers by one rule, the shared layers by the other."""
        displacement, rules = self._result.flat_displacement, self._rules(number)
        for (part, is_shared), state in zip(self._parts, self._rule_states, strict=True):
            rules[is_shared].move(displacement[part], gradient_sum[part], state)

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the sampled participants, and in `towers` some of their rows."""
        if self._test is None:
            return None
        return self._result.evaluate(*self._test, self._cells, self._rows, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return the displacement and the states of the rules and of the engine."""
        displacement = self._result.flat_displacement
        state = {"displacement": displacement, "rule": self._rule_states, "engine": self._engine.state_dict()}
        return {**state, "entered": list(self._entered)} if self._delay else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._result.flat_displacement.copy_(state["displacement"])
        self._rule_states = state["rule"]
        self._engine.load_state_dict(state["engine"])
        self._entered = deque(state["entered"] if self._delay else ())


def _with_momentum(
    rule: Callable[[float], UpdateRule], momentum: float, *, nesterov: bool
) -> Callable[[float], UpdateRule]:
    if not callable(rule):
        raise InputError(
            f"rule is {type(rule).__name__}; pass a function of the step size, such as SGDRule or a partial of AdamRule"
        )
    if not momentum and not nesterov:
        return rule
    if rule is not SGDRule:
        raise InputError(f"momentum is {momentum} and the rule is {rule}; set it in the rule, or leave the rule out")
    return partial(SGDRule, momentum=momentum, nesterov=nesterov)


def step_factor(steps: int, mu: float, hold: int, schedule: Schedule | None) -> tuple[Schedule, str]:
    """Return the factor of the step size as a function of the step, and a text that identifies it.

    Raises:
        InputError: a value is invalid, or there are both `mu` and a schedule.
    """
    if schedule is not None:
        if mu or hold:
            raise InputError(
                f"mu is {mu}, hold is {hold}, and there is a schedule; set either mu and hold, or schedule"
            )
        factors = [float(schedule(step)) for step in range(steps)]
        if not all(0 <= factor < math.inf for factor in factors):
            raise InputError(f"the schedule returns {factors}; every factor must be a finite number, at least 0")
        return factors.__getitem__, hashlib.sha256(repr(factors).encode()).hexdigest()[:16]
    shrinking_steps = max(1, steps - check_whole("hold", hold))
    check_decay(mu, shrinking_steps, hold)
    described = repr((mu, hold, shrinking_steps)) if mu else FIXED
    return (lambda step: inverse_square_factor(step, mu, shrinking_steps, hold)), described


@contextmanager
def _progress_bar(enabled: bool, steps: int, result: SimulationResult) -> Iterator[OnStep]:
    """Show the latest results, and the memory of workers, in a progress bar; yield the function that updates it."""
    if not enabled:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=steps)

        def update(step: int, history: History) -> None:
            description = f"loss {history.training_loss[-1]:.4f}"
            if history.evaluations and history.evaluations[-1].accuracy:
                accuracy = history.evaluations[-1].accuracy
                description += f", accuracy {sum(accuracy) / len(accuracy):.2%}"
            if result.workers:
                memory = max(worker.peak_memory for worker in result.workers) / 1e9
                description += f", {len(result.workers)} workers with up to {memory:.1f} GB"
            bar.update(task, completed=step, description=description)

        yield update
