"""Train one participant's model on a table: the same program at every member, with other records.

Every run takes part in the same sums in the same order, whatever its records are. A participant that was killed is
restarted with the same command and continues at the step of the others: the members send it the sums it missed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from cgd.errors import InputError
from cgd.optim.origin import confine
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.reporting.run_file import EvalRecord
from cgd.tabular.alignment import align, row_key, shared_validation_split, validation_split
from cgd.tabular.few_records import batch_notes, few_states, merge_few_records, merge_notes
from cgd.tabular.intersection import FoundIntersection, intersect
from cgd.tabular.learned_values import other_notes
from cgd.tabular.models import build_start
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.private_stats import private_fit
from cgd.tabular.private_training import PrivateTrainingLoop, Shares, private_validation_split, split_name
from cgd.tabular.rare_values import check_rare_values, fold_rare_values
from cgd.tabular.training_loop import EncodedDataset, TrainingLoop, forward
from cgd.tabular.unit_checks import compare_with_others

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from cgd.optim.origin import Origin
    from cgd.optim.public_start import Start
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.trace_writer import TraceWriter

__all__ = ["EncodedDataset", "EvalRecord", "TrainingResult", "forward", "train"]

WARNING_PREFIX = "privacy warning: "


@dataclass(frozen=True)
class SplitRecords:
    """Our records in a training.

    Attributes:
        records: our records; in a grid, in the order of the row.
        held_out: the mask of the validation split.
        preprocessing: the encoding of tables and of the target.
        seconds: duration of the training; 0 if it is unknown.
        displacement: D of each trainable parameter, by its name, the same bits at every member; None if it is unknown.
    """

    records: TabularDataset
    held_out: npt.NDArray[np.bool_]
    preprocessing: Preprocessing
    seconds: float
    displacement: Mapping[str, torch.Tensor] | None = field(default=None, kw_only=True, compare=False)

    @cached_property
    def own(self) -> TabularDataset:
        """Our training records."""
        return self.records.take(~self.held_out)

    @cached_property
    def validation(self) -> TabularDataset:
        """The validation split, in the order of the records."""
        return self.records.take(self.held_out)


@dataclass(frozen=True)
class TrainingResult(SplitRecords):
    """The result of a training.

    Attributes:
        network: the confined model, at the best step, on the CPU.
        evaluations: the history.
        best_step: the step with the lowest validation loss over all members.
        steps: number of steps taken.
        samples: number of our training records.
        everyone_samples: number of all members' training records, or of their units of privacy.
        clipped: number of steps in which our gradient was clipped to the bound.
        notes: notes for the user.
        ledger: what was charged to the privacy budget; None without differential privacy.
        intersection: in a grid, the records that the row has in common, if that was not known before.
    """

    network: nn.Module
    evaluations: tuple[EvalRecord, ...]
    best_step: int
    steps: int
    samples: int
    everyone_samples: int
    clipped: int
    notes: tuple[str, ...]
    ledger: PrivacyLedger | None = None
    intersection: FoundIntersection | None = None


def train(
    peers: Peers,
    settings: TabularSettings,
    records: TabularDataset,
    *,
    delta: float | None = None,
    fitted: Callable[[Preprocessing], None] = lambda _: None,
    progress: Callable[[EvalRecord], None] = lambda _: None,
    caught_up: Callable[[int], None] = lambda _: None,
    trace_writer: TraceWriter | None = None,
    ledger: PrivacyLedger | None = None,
    show_note: Callable[[str], None] = lambda _: None,
    show_message: Callable[[str], None] = lambda _: None,
) -> TrainingResult:
    """Train a confined model on our records, together with the other members.

    Args:
        peers: the members; in a grid, with the groups "column" and "row".
        settings: data, model and training settings.
        records: our records.
        delta: our own δ, if not that of the federation file.
        fitted: called once, before the first step, with the statistics of all members' records.
        progress: called after every evaluation, also for replayed steps.
        caught_up: called once, before the first new step, with the number of steps replayed after a restart.
        trace_writer: records our addends and the opened sums, for privacy attacks; they are secret.
        ledger: with [privacy], charges the openings; by default one without a budget file.
        show_note: called with notes about our records and the statistics, as soon as the first sums are opened.
        show_message: called with messages about an intersection.

    Raises:
        InputError: the members' records cannot be learned from, or do not fit together.
            The memory of the device is not enough.
        DivergenceError: the loss is no longer finite.
        RevealError: with [privacy], the budget is spent, or a charge cannot be written.
        RemoteProtocolError, PeerTimeoutError: see `Peers.sum`.
    """
    start = time.monotonic()
    if settings.privacy is not None:
        ledger = ledger or PrivacyLedger(settings.privacy_settings())
        ledger.begin(peers, split=split_name(settings.data, settings.unit, records, peers.seed))
    with peers.all_members():  # counts, means and deviations of other members would not fit together
        found = _intersect(peers, settings, records, show_message)
        checked: tuple[str, ...] = ()
        if found is not None:
            records, checked = found.records, _check_common(peers.groups["row"], settings, found)
        records, held_out = _split_validation(peers, settings, records)
        preprocessing, statistics_digest = _fit(peers, settings, records, held_out, ledger)
    fitted(preprocessing)
    counted = records if ledger is not None else fold_rare_values(records, settings.data, settings.own_columns)
    # With noise, the statistics are about the training records.
    compared = counted if ledger is None else records.take(~held_out)
    notes = (
        *checked,
        *compare_with_others(compared, preprocessing, settings.data.target, noise=ledger is not None),
        *other_notes(settings, preprocessing, records),
        *preprocessing.notes(records),
        *(preprocessing.target.weight_notes() if settings.data.class_weights == "balanced" else ()),
    )
    told = few_states(records, settings.data, settings.own_columns) if ledger is None else {}
    records = counted
    training, validation = (
        EncodedDataset.encode(records.take(mask), preprocessing, settings) for mask in (~held_out, held_out)
    )
    if ledger is None:
        merged = merge_few_records(training.x.numpy(), preprocessing, settings.data)
        notes += merge_notes({name: count for name, count in merged.items() if name not in told})
        notes += batch_notes(settings, len(training))
    for note in notes:  # not logged: they contain figures of our records
        show_note(note)
    network, origin = build_confined(settings, preprocessing, peers.seed, delta)
    if trace_writer is not None:
        rows = records.take(~held_out).places
        trace_writer.begin(peers, settings, preprocessing, network, origin.delta, training, validation, rows)
    with _enough_memory(settings.device):
        network.to(settings.device)  # before the optimiser is created
        if ledger is None:
            merge = partial(merge_few_records, preprocessing=preprocessing, data=settings.data)
            loop = TrainingLoop(peers, settings, network, training, validation, origin.delta, merge=merge)
        else:
            shares = Shares.of(records, held_out)
            loop = PrivateTrainingLoop(
                peers, settings, network, training, validation, origin.delta, ledger, shares, statistics_digest
            )
        if trace_writer is not None:
            trace_writer.resume(loop.optimizer)
        loop.run(progress, caught_up)
    displacement = {
        name: loop.best.displacement_of(each).cpu().clone()
        for name, each in network.named_parameters()
        if each.requires_grad
    }
    trained = TrainingResult(
        network=network.eval().cpu(),
        preprocessing=preprocessing,
        evaluations=tuple(loop.evaluations),
        best_step=loop.best.steps or loop.step,
        steps=loop.step,
        records=records,
        held_out=held_out,
        samples=len(training),
        everyone_samples=int(loop.optimizer.param_groups[0]["total_samples"]),
        clipped=loop.clipped,
        notes=(
            *notes,
            *loop.notes,
            *(f"{WARNING_PREFIX}{each}" for each in loop.optimizer.privacy_warnings),
        ),
        seconds=time.monotonic() - start,
        ledger=ledger,
        intersection=found,
        displacement=displacement,
    )
    if trace_writer is not None:
        trace_writer.finish(trained)
    return trained


@contextmanager
def _enough_memory(device: torch.device) -> Iterator[None]:
    """Raise InputError if the memory of a device is not enough."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise InputError(
            f"device is {str(device)!r}, and its memory is not enough ({reason}); end other programs that use it, and "
            "start again with the same command; or agree on more batches in [training]. Before the first step, "
            "--device cpu is possible, too"
        ) from None


def build_confined(
    settings: TabularSettings, preprocessing: Preprocessing, seed: bytes, delta: float | None
) -> tuple[nn.Module, Origin]:
    """Return the network with its start and our origin, as before the first step, and the origin.

    Args:
        settings: data, model and training settings.
        preprocessing: the encoding of tables and of the target.
        seed: our seed.
        delta: our own δ, if not that of the federation file.
    """
    model = settings.model
    network = build_start(model, len(preprocessing.features), preprocessing.outputs, vertical=settings.vertical)
    kind: Start = "zeros" if model.start == "zeros" else "model"
    own = model.delta if delta is None else delta
    return network, confine(network, delta=own, seed=seed, start=kind, fresh_origins=model.fresh_origins)


def validation_mask(settings: TabularSettings, records: TabularDataset, seed: bytes) -> npt.NDArray[np.bool_]:
    """Return the mask of our validation split; not in a grid with several columns, where the row draws it."""
    if settings.privacy is not None:
        return private_validation_split(records, settings.data.validation, seed)
    return validation_split(records.rows, settings.data.validation, seed)


def _intersect(
    peers: Peers, settings: TabularSettings, records: TabularDataset, show_message: Callable[[str], None]
) -> FoundIntersection | None:
    """Return the records that all members of our row have; None if they must hold the same ones."""
    if settings.data.intersection is None:
        return None
    row = peers.groups["row"]
    with row.all_members():
        return intersect(records, row, settings.data, settings.salt, show_message)


def _check_common(row: Peers, settings: TabularSettings, found: FoundIntersection) -> tuple[str, ...]:
    """Return notes about the records that are left: values of enough records before may be rare now.

    Raises:
        InputError: as `check_rare_values`; the members of the row are told that we stop.
    """
    try:
        return (found.describe(), *check_rare_values(found.records, settings.data, settings.own_columns))
    except InputError:
        if not row.recovery.is_replay():
            row.abort_sum()
        raise


def _split_validation(peers: Peers, settings: TabularSettings, records: TabularDataset) -> tuple[TabularDataset, Any]:
    """Return the records, in a grid in the order of the row, and the mask of the validation split."""
    part = settings.data.validation
    if not settings.vertical:
        return records, validation_mask(settings, records, peers.seed)
    row = peers.groups["row"]
    key = row_key(row)
    records = align(records, row, key)
    mask = shared_validation_split(records, part, key)
    if mask.all():
        mask[0] = False
    return records, mask


def _fit(
    peers: Peers, settings: TabularSettings, records: TabularDataset, held_out: Any, ledger: PrivacyLedger | None
) -> tuple[Preprocessing, bytes]:
    """Return the statistics and, with differential privacy, a digest of the opened sum."""
    if ledger is not None:
        return private_fit(records.take(~held_out), settings.data, settings.own_columns, peers, ledger)
    column = peers.groups["column"] if settings.vertical else peers
    return fit(records, settings.data, settings.own_columns, column), b""
