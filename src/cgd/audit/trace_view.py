"""Recordings of real runs, and what a coalition saw in them: a `View` for privacy attacks.

`load` reads a folder that `cgd join --record` wrote. `view_of` makes a view of

- the recordings of all participants, of whom some collude: a rehearsal with data that may be shown;
- or of one recording alone, the worst case for its owner: everybody else colludes, so that what remains of every sum is
  the owner's own gradient.

The displacement is replayed from the opened sums by the rule of the optimiser, so it is that of the run bit for bit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from cgd.audit.replay import replay
from cgd.audit.trace_reader import Recording, load
from cgd.audit.view import Colluder, Round, Truth, View, flat
from cgd.errors import InputError
from cgd.federation.toml_validation import at
from cgd.optim.origin import Origin
from cgd.secagg.fixed_point import FixedPoint
from cgd.tabular.models import build

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cgd.audit.replay import Replayed
    from cgd.audit.schemes import Sample
    from cgd.audit.trace_reader import Taken

__all__ = ["OTHERS", "Frames", "Recording", "WeightedCrossEntropy", "load", "view_of"]

OTHERS = "the others"
"""What everybody but the owner of a single recording is called, as one colluder."""
COMMON = ("federation", "model", "features", "outputs", "task", "class_weights", "training", "bound", "ring_bits")
"""What is the same in all recordings of one run."""


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The loss of a training in which every class has a weight: a mean over samples, not over weights.

    Attributes:
        weights: of the classes.
    """

    weights: tuple[float, ...]

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of these outputs."""
        weights = torch.tensor(self.weights, dtype=outputs.dtype)
        return (functional.cross_entropy(outputs, labels, reduction="none") * weights[labels]).mean()


@dataclass(frozen=True)
class Frames:
    """The frames of some recordings, read when they are asked for: there may be gigabytes of them.

    Attributes:
        recordings: whose.
    """

    recordings: tuple[Recording, ...]

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for each in self.recordings:
            yield from each.frames()


def view_of(recordings: Sequence[Recording], coalition: Sequence[str] = ()) -> tuple[View, Truth, Sample]:
    """What a coalition saw in a run, what the honest participants kept to themselves, and records nobody trained on.

    With the recordings of all participants, `coalition` names those who collude. The fresh records are those that the
    honest participants kept back (the coalition's, if they kept none). Steps are left out of which somebody's part is
    missing.

    With one recording and no coalition its owner is honest, and everybody else colludes, as one participant: what they
    put in is what remains of the sums. Half of the records that the owner kept back are theirs, for background
    knowledge, and the other half is fresh. Their origin is drawn anew, and there are no frames: those that the owner
    received tell them nothing new.

    Raises:
        InputError: the recordings are not of one run or not of all its participants; nobody colludes, or nobody is
            honest; or there are no steps that can be used.
    """
    if not recordings:
        raise InputError("there is no recording; give those of all participants, or one alone")
    first = recordings[0]
    if len(recordings) == 1:
        if coalition:
            raise InputError(
                f"there is one recording, of {first.participant}: everybody else colludes; name no coalition, or give "
                "the recordings of all participants"
            )
        with at(f"{first.folder}: "):
            return _worst_case(first)
    _check_together(recordings, coalition)
    totals = _same_totals(recordings)
    with at(f"{', '.join(str(each.folder) for each in recordings)}: "):
        known = replay(first.training, len(first.origin), totals, _states(recordings))
    totals = {**known.inferred, **totals}
    by_name = {each.participant: each for each in recordings}
    colluding = {name: by_name[name] for name in coalition}
    told = {step: _told(step, recordings, colluding) for step in sorted(totals) if step in known.displacements}
    used = {step: taken for step, taken in told.items() if taken is not None}
    rounds = [
        Round(taken.members, known.displacements[step], totals[step], samples=taken.samples)
        for step, taken in used.items()
    ]
    colluders = {
        name: Colluder(*each.records, tuple(_addend(each, step, taken) for step, taken in used.items()), each.origin)
        for name, each in colluding.items()
    }
    honest = [each for each in recordings if each.participant not in colluding]
    kept = [each.kept for each in honest if len(each.kept[1])] or [each.kept for each in colluding.values()]
    view = _view(
        first, colluders, rounds, known, len(rounds[0].members) if rounds else 0, Frames(tuple(colluding.values()))
    )
    return view, _truth(honest, known), (torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept]))


def _told(step: int, recordings: Sequence[Recording], colluding: Mapping[str, Recording]) -> Taken | None:
    """Who took part in a step, and n; None if nobody tells, or if a colluder took part and its addend is missing."""
    newest = max(
        (each.taken[step] for each in recordings if step in each.taken), key=lambda taken: taken.epoch, default=None
    )
    if newest is None or any(step not in colluding[name].taken for name in newest.members if name in colluding):
        return None
    return newest


def _addend(colluder: Recording, step: int, taken: Taken) -> torch.Tensor:
    """What it put in; nothing if it did not take part, though it may have been about to when it was removed."""
    if colluder.participant in taken.members:
        return colluder.taken[step].addend
    return torch.zeros_like(taken.addend)


def _worst_case(owner: Recording) -> tuple[View, Truth, Sample]:
    x, y = owner.kept
    if len(y) < 2:
        raise InputError(
            f"{owner.participant} kept back {len(y)} records, and the others' background knowledge and fresh records "
            "are taken from those; set validation in [data] so that there are more, or give all recordings"
        )
    known = replay(owner.training, len(owner.origin), owner.totals, owner.states)
    totals = {**known.inferred, **owner.totals}
    steps = [step for step in sorted(totals) if step in owner.taken and step in known.displacements]
    rounds = [
        Round((owner.participant, OTHERS), known.displacements[step], totals[step], samples=owner.taken[step].samples)
        for step in steps
    ]
    shapes = {name: tuple(each.shape) for name, each in owner.build_model().named_parameters()}
    drawn = Origin(owner.model.delta, shapes, hashlib.sha256(f"cgd: {OTHERS}".encode()).digest()).draw()
    others = Colluder(
        x[::2],
        y[::2],
        tuple(totals[step] - owner.taken[step].addend for step in steps),
        flat(dict(drawn)).to(owner.origin.dtype),
        samples=owner.taken[steps[0]].samples - len(owner.records[1]) if steps else None,
    )
    view = _view(owner, {OTHERS: others}, rounds, known, len(owner.members))
    return view, _truth([owner], known), (x[1::2], y[1::2])


def _view(
    first: Recording,
    coalition: dict[str, Colluder],
    rounds: list[Round],
    known: Replayed,
    addends: int,
    frames: Iterable[tuple[str, bytes]] = (),
) -> View:
    if not rounds:
        raise InputError(f"no step of the recording {first.folder} can be used: parts of all are missing; record anew")
    fixed_point = FixedPoint.for_weighted_sum(addends=addends, bound=first.bound, ring_bits=first.ring_bits)
    assert rounds[0].samples is not None  # noqa: S101 - for the type checker
    return View(
        "cgd",
        partial(build, first.model, first.features, first.outputs),
        _loss(first),
        rounds[0].samples,
        first.training.lr,
        first.model.delta,
        coalition,
        tuple(rounds),
        frames,
        # Every addend is off by up to half a step of the ring, uniformly.
        noise=fixed_point.resolution * (addends / 12) ** 0.5,
        final=known.final,
    )


def _truth(honest: Sequence[Recording], known: Replayed) -> Truth:
    return Truth(
        {each.participant: each.records[0] for each in honest},
        {each.participant: each.records[1] for each in honest},
        {each.participant: each.origin + known.final for each in honest},
    )


def _loss(recording: Recording) -> Any:
    if recording.task == "regression":
        return functional.mse_loss
    return WeightedCrossEntropy(recording.class_weights) if recording.class_weights else functional.cross_entropy


def _check_together(recordings: Sequence[Recording], coalition: Sequence[str]) -> None:
    """Whether these recordings are all of one run, and the coalition some of their owners."""
    names = [each.participant for each in recordings]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"there are {names.count(twice[0])} recordings of {twice[0]}; give one of each participant")
    first = recordings[0]
    for each in recordings:
        for what in COMMON:
            if getattr(each, what) != getattr(first, what):
                raise InputError(
                    f"{each.folder} and {first.folder} are not of one run: {what} is {getattr(each, what)} and "
                    f"{getattr(first, what)}; give recordings of the same run"
                )
    members = {name for each in recordings for taken in each.taken.values() for name in taken.members}
    if absent := sorted(members - set(names)):
        raise InputError(
            f"the recording of {', '.join(absent)} is not given; give those of all participants, or one alone, for "
            "the case that everybody else colludes"
        )
    strangers = sorted(set(coalition) - set(names))
    if strangers or not coalition or not set(names) - set(coalition):
        said = ", ".join(coalition) or "nobody"
        raise InputError(f"the coalition is {said}; choose some of {', '.join(names)}, and not all (--coalition)")


def _same_totals(recordings: Sequence[Recording]) -> dict[int, torch.Tensor]:
    """Everybody has the same totals, or they are not of one run; what one has missed another has."""
    totals: dict[int, torch.Tensor] = {}
    for each in recordings:
        for step, total in each.totals.items():
            if not torch.equal(totals.setdefault(step, total), total):
                raise InputError(
                    f"{each.folder} has another total of step {step} than {recordings[0].folder}: they are not of one "
                    "run; give recordings of the same run"
                )
    return totals


def _states(recordings: Sequence[Recording]) -> dict[int, Mapping[str, torch.Tensor]]:
    return {step: state for each in recordings for step, state in each.states.items()}
