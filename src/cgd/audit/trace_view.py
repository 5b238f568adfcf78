"""The view of a coalition in a recorded run, for privacy attacks.

`load` reads a trace that `cgd join --record` wrote. `view_of` returns the view of

- the traces of all participants, some of whom collude: a rehearsal with data that may be shared;
- or of one trace, the worst case for its owner: all others collude, so that the sum without their addends is the
  owner's own gradient.

The displacement is replayed from the opened sums by the rule of the optimiser, bit for bit. With local epochs, the sums
are about updates. The coalition knows their settings, and divides addends and sums by the size of an update, as in a
simulated training (`cgd.audit.schemes`), to get numbers of the size of gradients.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from cgd.audit.private_sums import honest_noise, remaining_mu
from cgd.audit.record_table import RecordTable
from cgd.audit.scenario import LocalSteps
from cgd.audit.trace_reader import Trace, load
from cgd.audit.trace_replay import replay
from cgd.audit.view import Colluder, Round, Truth, View, flat
from cgd.errors import InputError
from cgd.federation.toml_validation import at
from cgd.optim.origin import Origin
from cgd.secagg.fixed_point import FixedPoint
from cgd.tabular.models import build
from cgd.tabular.training_loop import LOCAL_MOMENTUM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cgd.audit.scenario import Sample
    from cgd.audit.trace_reader import TraceStep
    from cgd.audit.trace_replay import Replay
    from cgd.federation.config import Training

__all__ = ["OTHERS", "Frames", "Trace", "WeightedCrossEntropy", "load", "view_of"]

OTHERS = "the others"
"""The name of all participants but the owner of a single trace, as one colluder."""
COMMON = (
    *("federation", "model", "features", "outputs", "task", "class_weights", "training", "bound", "ring_bits"),
    "privacy",
)
"""Attributes that are equal in all traces of one run."""


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy with class weights, as a mean over samples, not over weights.

    Attributes:
        weights: the weights of the classes.
    """

    weights: tuple[float, ...]

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of outputs and labels."""
        weights = torch.tensor(self.weights, dtype=outputs.dtype)
        return (functional.cross_entropy(outputs, labels, reduction="none") * weights[labels]).mean()


@dataclass(frozen=True)
class Frames:
    """The frames of some traces, which are read lazily: there may be gigabytes of them.

    Attributes:
        traces: the traces.
    """

    traces: tuple[Trace, ...]

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for each in self.traces:
            yield from each.frames()


def view_of(traces: Sequence[Trace], coalition: Sequence[str] = ()) -> tuple[View, Truth, Sample]:
    """Return the view of a coalition in a run, the secrets of the honest participants, and fresh records.

    With the traces of all participants, `coalition` names the colluders. The fresh records are the validation records
    of the honest participants (of the colluders, if the honest ones have none). Steps without a colluder's addend are
    left out.

    With one trace and no coalition, its owner is honest, and all others collude, as one participant: their addend is
    the sum without the owner's. They get half of the owner's validation records as background knowledge, and the other
    half is fresh. Their origin is drawn, and there are no frames: those that the owner received tell them nothing new.

    Raises:
        InputError: the traces are not of one run or not of all its participants; nobody colludes, or nobody is honest;
            or no step can be used.
    """
    if not traces:
        raise InputError("there is no trace; give those of all participants, or a single one")
    first = traces[0]
    if len(traces) == 1:
        if coalition:
            raise InputError(
                f"there is one trace, of {first.participant}: all others collude; name no coalition, or give the "
                "traces of all participants"
            )
        with at(f"{first.folder}: "):
            return _worst_case(first)
    _check_same_run(traces, coalition)
    totals = _merge_totals(traces)
    with at(f"{', '.join(str(each.folder) for each in traces)}: "):
        known = replay(first.training, len(first.origin), totals, _merge_states(traces)).from_start(first.start())
    totals = {**known.inferred, **totals}
    by_name, size = {each.participant: each for each in traces}, _update_size(first.training)
    colluding = {name: by_name[name] for name in coalition}
    found = {step: _find_step(step, traces, colluding) for step in sorted(totals) if step in known.displacements}
    used = {number: step for number, step in found.items() if step is not None}
    rounds = [
        Round(
            step.members,
            known.displacements[number],
            totals[number] / size,
            samples=step.samples,
            honest_samples=None if first.privacy is None else _honest_samples(by_name, step.members, coalition),
        )
        for number, step in used.items()
    ]
    colluders = {
        name: Colluder(
            *each.records,
            tuple(_addend(each, number, step) / size for number, step in used.items()),
            each.origin - each.start(),
        )
        for name, each in colluding.items()
    }
    honest = [each for each in traces if each.participant not in colluding]
    fresh = [each.validation for each in honest if len(each.validation[1])]
    fresh = fresh or [each.validation for each in colluding.values()]
    members = rounds[0].members if rounds else ()
    view = _view(
        first,
        colluders,
        rounds,
        known,
        len(members),
        sum(name not in coalition for name in members),
        Frames(tuple(colluding.values())),
    )
    return view, _truth(honest, known), (torch.cat([x for x, _ in fresh]), torch.cat([y for _, y in fresh]))


def _update_size(training: Training) -> float:
    """Return the size of an update by local steps, as a multiple of the gradient; 1 if gradients are summed."""
    if not training.local_epochs:
        return 1.0
    return LocalSteps(training.local_lr, LOCAL_MOMENTUM).update_size(training.local_epochs * training.batches)


def _honest_samples(traces: Mapping[str, Trace], members: Sequence[str], coalition: Sequence[str]) -> int:
    return sum(len(traces[name].records[1]) for name in members if name not in coalition)


def _find_step(number: int, traces: Sequence[Trace], colluding: Mapping[str, Trace]) -> TraceStep | None:
    """Return the members and n of a step; None if they are unknown, or if the addend of a colluder is missing."""
    newest = max(
        (each.steps[number] for each in traces if number in each.steps), key=lambda step: step.epoch, default=None
    )
    if newest is None or any(number not in colluding[name].steps for name in newest.members if name in colluding):
        return None
    return newest


def _addend(colluder: Trace, number: int, step: TraceStep) -> torch.Tensor:
    """Return its addend; zeros if it was not a member, although it may have recorded one when it was removed."""
    if colluder.participant in step.members:
        return colluder.steps[number].addend
    return torch.zeros_like(step.addend)


def _worst_case(owner: Trace) -> tuple[View, Truth, Sample]:
    x, y = owner.validation
    if len(y) < 2:
        raise InputError(
            f"{owner.participant} has {len(y)} validation records, which serve as background knowledge of the others "
            "and as fresh records; set validation in [data] so that there are more, or give the traces of all"
        )
    known = replay(owner.training, len(owner.origin), owner.totals, owner.states).from_start(owner.start())
    totals = {**known.inferred, **owner.totals}
    size = _update_size(owner.training)
    steps = [step for step in sorted(totals) if step in owner.steps and step in known.displacements]
    rounds = [
        Round(
            (owner.participant, OTHERS),
            known.displacements[step],
            totals[step] / size,
            samples=owner.steps[step].samples,
            honest_samples=None if owner.privacy is None else len(owner.records[1]),
        )
        for step in steps
    ]
    shapes = {name: tuple(each.shape) for name, each in owner.build_model().named_parameters()}
    drawn = Origin(owner.model.delta, shapes, hashlib.sha256(f"cgd: {OTHERS}".encode()).digest()).draw()
    others = Colluder(
        x[::2],
        y[::2],
        tuple((totals[step] - owner.steps[step].addend) / size for step in steps),
        flat(dict(drawn)).to(owner.origin.dtype),
        # With noise, the number of all may be below ours.
        samples=max(0, owner.steps[steps[0]].samples - len(owner.records[1])) if steps else None,
    )
    view = _view(owner, {OTHERS: others}, rounds, known, len(owner.members), 1)
    return view, _truth([owner], known), (x[1::2], y[1::2])


def _view(
    first: Trace,
    coalition: dict[str, Colluder],
    rounds: list[Round],
    known: Replay,
    addends: int,
    honest: int,
    frames: Iterable[tuple[str, bytes]] = (),
) -> View:
    if not rounds:
        raise InputError(f"no step of the trace {first.folder} can be used: files of all are missing; record again")
    samples = rounds[0].samples or 0
    private: dict[str, Any] = {}
    if first.privacy is not None:
        encoding = first.privacy.step_encoding(addends, len(first.origin), samples, first.ring_bits)
        noise = honest_noise(encoding, honest)
        private = {"clip": first.privacy.clip, "mu": remaining_mu(first.privacy, addends, honest)}
    else:
        fixed_point = FixedPoint.for_weighted_sum(addends=addends, bound=first.bound, ring_bits=first.ring_bits)
        noise = fixed_point.rounding_error * addends**0.5 / _update_size(first.training)
    return View(
        "cgd" if first.privacy is None else "dp",
        partial(build, first.model, first.features, first.outputs),
        _loss(first),
        samples,
        first.training.lr,
        first.model.delta,
        coalition,
        tuple(rounds),
        frames,
        noise=noise,
        final=known.final,
        **private,
    )


def _truth(honest: Sequence[Trace], known: Replay) -> Truth:
    return Truth(
        {each.participant: each.records[0] for each in honest},
        {each.participant: each.records[1] for each in honest},
        {each.participant: each.origin - each.start() + known.final for each in honest},
        _table(honest),
    )


def _table(honest: Sequence[Trace]) -> RecordTable | None:
    """Return how to show the records; None if a trace has no encoding. It is the same at all participants."""
    if honest[0].preprocessing is None:
        return None
    places = {
        each.participant: [f"{each.participant}, row {row + 1}" for row in each.rows or range(len(each.records[1]))]
        for each in honest
    }
    return RecordTable(places, honest[0].preprocessing)


def _loss(trace: Trace) -> Any:
    if trace.task == "regression":
        return functional.mse_loss
    return WeightedCrossEntropy(trace.class_weights) if trace.class_weights else functional.cross_entropy


def _check_same_run(traces: Sequence[Trace], coalition: Sequence[str]) -> None:
    """Raise InputError if the traces are not of all participants of one run, or the coalition is not some of them."""
    names = [each.participant for each in traces]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise InputError(f"there are {names.count(repeated[0])} traces of {repeated[0]}; give one of each participant")
    first = traces[0]
    for each in traces:
        for name in COMMON:
            if getattr(each, name) != getattr(first, name):
                raise InputError(
                    f"{each.folder} and {first.folder} are not of one run: {name} is {getattr(each, name)} and "
                    f"{getattr(first, name)}; give traces of the same run"
                )
    members = {name for each in traces for step in each.steps.values() for name in step.members}
    if absent := sorted(members - set(names)):
        raise InputError(
            f"the trace of {', '.join(absent)} is not given; give those of all participants, or a single one for the "
            "case that all others collude"
        )
    unknown = sorted(set(coalition) - set(names))
    if unknown or not coalition or not set(names) - set(coalition):
        given = ", ".join(coalition) or "nobody"
        raise InputError(f"the coalition is {given}; choose some of {', '.join(names)}, and not all (--coalition)")


def _merge_totals(traces: Sequence[Trace]) -> dict[int, torch.Tensor]:
    """Return the totals of all traces, which must be equal where several have them."""
    totals: dict[int, torch.Tensor] = {}
    for each in traces:
        for step, total in each.totals.items():
            if not torch.equal(totals.setdefault(step, total), total):
                raise InputError(
                    f"{each.folder} has another total of step {step} than {traces[0].folder}: they are not of one "
                    "run; give traces of the same run"
                )
    return totals


def _merge_states(traces: Sequence[Trace]) -> dict[int, Mapping[str, torch.Tensor]]:
    return {step: state for each in traces for step, state in each.states.items()}
