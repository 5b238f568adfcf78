"""Train one participant's model on a table: the same program at every member, with other records.

Every run takes part in the same sums in the same order, whatever its records are. A participant that was killed is
restarted with the same command and continues at the step of the others: the members send it the sums it missed.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cgd.errors import DivergenceError, InputError
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.optimizer import ConfinedAdam, ConfinedOptimizer, ConfinedSGD
from cgd.optim.origin import confine
from cgd.optim.recovery import BestCheckpoint
from cgd.optim.vertical import first_layer_names
from cgd.reporting.run_file import EvalRecord
from cgd.tabular.alignment import align, row_key, shared_validation_split, validation_split
from cgd.tabular.models import build
from cgd.tabular.opened_counts import check_counts, is_included
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.wide_sums import wide_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.federation.data_schema import Model
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.trace_writer import TraceWriter

__all__ = ["EvalRecord", "TrainingResult", "train"]

CHUNK_RECORDS = 1 << 16  # records in one forward pass, to limit the memory of activations
WARNING_PREFIX = "privacy warning: "
MIN_IMPROVEMENT = 1e-4  # relative decrease of the validation loss that counts as an improvement


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        network: the confined model, at the best step.
        preprocessing: the encoding of tables and of the target.
        evaluations: the history.
        best_step: the step with the lowest validation loss over all members.
        steps: number of steps taken.
        validation: the validation split; in a grid, in the order of the row.
        samples: number of our training records.
        everyone_samples: number of all members' training records.
        clipped: number of steps in which our gradient was clipped to the bound.
        notes: notes for the user.
        seconds: duration.
    """

    network: nn.Module
    preprocessing: Preprocessing
    evaluations: tuple[EvalRecord, ...]
    best_step: int
    steps: int
    validation: TabularDataset
    samples: int
    everyone_samples: int
    clipped: int
    notes: tuple[str, ...]
    seconds: float


def train(
    peers: Peers,
    settings: TabularSettings,
    records: TabularDataset,
    *,
    delta: float | None = None,
    progress: Callable[[EvalRecord], None] = lambda _: None,
    caught_up: Callable[[int], None] = lambda _: None,
    trace_writer: TraceWriter | None = None,
) -> TrainingResult:
    """Train a confined model on our records, together with the other members.

    Args:
        peers: the members; in a grid, with the groups "column" and "row".
        settings: data, model and training settings.
        records: our records.
        delta: our own δ, if not that of the federation file.
        progress: called after every evaluation, also for replayed steps.
        caught_up: called once, before the first new step, with the number of steps replayed after a restart.
        trace_writer: records our addends and the opened sums, for privacy attacks; they are secret.

    Raises:
        InputError: the members' records cannot be learned from, or do not fit together.
        DivergenceError: the loss is no longer finite.
        RemoteProtocolError, PeerTimeoutError: see `Peers.sum`.
    """
    start = time.monotonic()
    records, held_out = _split_validation(peers, settings, records)
    column = peers.groups["column"] if settings.vertical else peers
    preprocessing = fit(records, settings.data, settings.own_columns, column)
    training, validation = (
        EncodedDataset.encode(records.take(mask), preprocessing, settings) for mask in (~held_out, held_out)
    )
    network = build(settings.model, len(preprocessing.features), preprocessing.outputs)
    origin = confine(network, delta=settings.model.delta if delta is None else delta, seed=peers.seed)
    if trace_writer is not None:
        trace_writer.begin(peers, settings, preprocessing, network, origin.delta, training, validation)
    loop = _TrainingLoop(peers, settings, network, training, validation, origin.delta)
    if trace_writer is not None:
        trace_writer.resume(loop.optimizer)
    loop.run(progress, caught_up)
    trained = TrainingResult(
        network=network.eval(),
        preprocessing=preprocessing,
        evaluations=tuple(loop.evaluations),
        best_step=loop.best.steps or loop.step,
        steps=loop.step,
        validation=records.take(held_out),
        samples=len(training),
        everyone_samples=int(loop.optimizer.param_groups[0]["total_samples"]),
        clipped=loop.clipped,
        notes=(
            *preprocessing.notes(records),
            *(preprocessing.target.weight_notes() if settings.data.class_weights == "balanced" else ()),
            *loop.notes,
            *(f"{WARNING_PREFIX}{each}" for each in loop.optimizer.privacy_warnings),
        ),
        seconds=time.monotonic() - start,
    )
    if trace_writer is not None:
        trace_writer.finish(trained)
    return trained


def forward(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the network's outputs, computed in chunks."""
    with torch.no_grad():
        chunks = [network(chunk) for chunk in x.split(CHUNK_RECORDS)]
    return torch.cat(chunks) if chunks else torch.zeros(0, 1)


@dataclass(frozen=True)
class EncodedDataset:
    """Records as tensors.

    Attributes:
        x: features.
        y: indices of classes, or standardised numbers.
        weight: weight of each record in the loss.
    """

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def encode(cls, records: TabularDataset, preprocessing: Preprocessing, settings: TabularSettings) -> EncodedDataset:
        """Encode records."""
        x, _ = preprocessing.transform(records)
        y = torch.from_numpy(preprocessing.encode_target(records))
        balanced = settings.data.class_weights == "balanced"
        weight = torch.from_numpy(preprocessing.class_weights())[y] if balanced else torch.ones(len(y))
        return cls(torch.from_numpy(x), y, weight)

    def __len__(self) -> int:
        return len(self.y)

    def digest(self) -> bytes:
        """Return a digest of features and targets."""
        digest = hashlib.sha256(f"{tuple(self.x.shape)} {self.y.dtype}".encode())
        for each in (self.x, self.y):
            digest.update(each.contiguous().numpy().data)
        return digest.digest()

    def losses(self, outputs: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """Return the weighted loss of every record of a part."""
        y, weight = self.y[part], self.weight[part]
        if y.is_floating_point():
            return (outputs[:, 0] - y).square() * weight
        return functional.cross_entropy(outputs, y, reduction="none") * weight

    def score(self, outputs: torch.Tensor) -> float | None:
        """Return accuracy or R²; None if it is undefined."""
        if not len(self):
            return None
        if not self.y.is_floating_point():
            return (outputs.argmax(1) == self.y).float().mean().item()
        spread = (self.y - self.y.mean()).square().sum().item()
        return 1 - (outputs[:, 0] - self.y).square().sum().item() / spread if spread else None


class _TrainingLoop:
    """The training steps, with evaluations and early stopping."""

    def __init__(
        self,
        peers: Peers,
        settings: TabularSettings,
        network: nn.Module,
        training: EncodedDataset,
        validation: EncodedDataset,
        delta: float,
    ) -> None:
        self.peers, self.settings, self.network = peers, settings, network
        self.training, self.validation = training, validation
        self.optimizer = _build_optimizer(peers, settings, network, len(training))
        digests = training.digest(), validation.digest(), _network_digest(settings.model, delta)
        self.optimizer.records_digest = b"".join(digests)
        self.best = BestCheckpoint(self.optimizer)
        self.evaluations: list[EvalRecord] = []
        self.step = 0
        self.clipped = 0
        self._lowest_loss = float("inf")

    def run(self, progress: Callable[[EvalRecord], None], caught_up: Callable[[int], None]) -> None:
        config = self.settings.training
        schedule = InverseSquareLR(self.optimizer, config.mu, config.steps) if config.mu else None
        steps_taken = self.optimizer.steps_taken()
        replaying = True
        for self.step in range(1, config.steps + 1):
            self.peers.recovery.set_step(self.step - 1)
            new = self.step > steps_taken
            loss = self._compute_gradient() if new else None
            self.optimizer.step()
            if replaying and not self.optimizer.replayed:
                replaying = False
                caught_up(self.step - 1)
            if schedule is not None:
                schedule.step()
            if self.step % config.validate_every == 0 or self.step == config.steps:
                evaluation = self._evaluate(loss, new)
                progress(evaluation)
                if config.patience and self._should_stop(evaluation):
                    break
        if replaying:
            caught_up(self.step)
        if self.best.steps:
            self.best.restore()

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.clipped:
            return ()
        bound = self.settings.training.bound
        return (f"in {self.clipped} steps our gradient exceeded the bound {bound:g} and was clipped to it",)

    def _compute_gradient(self) -> float:
        """Compute the gradient of the mean loss over our records, in chunks; return the loss."""
        self.network.train()
        self.optimizer.zero_grad()
        total, count = 0.0, len(self.training)
        with torch.random.fork_rng(devices=[]):
            # Random numbers of the network (dropout) depend on our seed and the step only, also after a restart.
            seed = hmac.digest(self.peers.seed, f"cgd step {self.step}".encode(), "sha256")
            torch.manual_seed(int.from_bytes(seed[:7], "little"))
            for start in range(0, count, CHUNK_RECORDS):
                part = slice(start, start + CHUNK_RECORDS)
                loss = self.training.losses(self.network(self.training.x[part]), part).sum() / count
                loss.backward()
                total += loss.item()
        if not np.isfinite(total):
            raise DivergenceError(
                f"our loss is {total} in step {self.step}; lower lr in [training] (it is {self.settings.training.lr:g})"
            )
        self.clipped += self._clip()
        return total

    def _clip(self) -> bool:
        """Clip gradients to the bound, so that a single extreme record does not stop the federation."""
        gradients = [each.grad for each in self.network.parameters() if each.grad is not None]
        bound = self.settings.training.bound
        if not any(each.abs().max().item() > bound for each in gradients):
            return False
        for each in gradients:
            each.clamp_(-bound, bound)
        return True

    def _evaluate(self, loss: float | None, new: bool) -> EvalRecord:
        """Sum the validation loss of all members, and save the model if it is the best so far.

        In replayed steps the sum comes from the members, and our own loss is not computed. Only the sum after the last
        replayed step may still be open; for that one the network is in the right state.
        """
        own, count, score = 0.0, len(self.validation), None
        new = new or not self.peers.recovery.is_replay()
        if new and count:
            outputs = forward(self.network.eval(), self.validation.x)
            own, score = self.validation.losses(outputs).double().sum().item(), self.validation.score(outputs)
        included = is_included(self.peers)
        total, records = wide_sum(self.peers, np.array([own, count]), "validation loss").tolist()
        check_counts(self.peers, "validation records", [int(records)], [count] if included else None)
        mean = total / records if records else None
        if mean is not None and mean < self._lowest_loss * (1 - MIN_IMPROVEMENT):
            self._lowest_loss = mean
            self.best.save(self.step)
        evaluation = EvalRecord(self.step, mean, self.best.steps)
        if new:
            own_loss = own / count if count else None
            evaluation = msgspec.structs.replace(evaluation, training_loss=loss, validation_loss=own_loss, score=score)
        self.evaluations.append(evaluation)
        return evaluation

    def _should_stop(self, evaluation: EvalRecord) -> bool:
        """Return whether the validation loss has not improved for `patience` evaluations."""
        config = self.settings.training
        since_best = evaluation.step - evaluation.best_step
        has_loss = evaluation.everyone_validation_loss is not None
        return has_loss and since_best >= config.patience * config.validate_every


def _split_validation(peers: Peers, settings: TabularSettings, records: TabularDataset) -> tuple[TabularDataset, Any]:
    """Return the records, in a grid in the order of the row, and the mask of the validation split."""
    part = settings.data.validation
    if not settings.vertical:
        return records, validation_split(records.rows, part, peers.seed)
    row = peers.groups["row"]
    key = row_key(row)
    records = align(records, row, key)
    mask = shared_validation_split(records, part, key)
    if mask.all():
        mask[0] = False
    return records, mask


def _network_digest(model: Model, delta: float) -> bytes:
    """Return a digest of what the shapes of a network do not show; after a restart, it must be the same."""
    return hashlib.sha256(repr((model.kind, model.activation, model.function, delta)).encode()).digest()


def _build_optimizer(peers: Peers, settings: TabularSettings, network: nn.Module, samples: int) -> ConfinedOptimizer:
    config = settings.training
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if settings.vertical:
        names = first_layer_names(network)
        if not names:
            raise InputError(
                "in a grid with several columns, the model is split at its first layer, so it must be a "
                "torch.nn.Sequential that begins with a torch.nn.Linear; give another function in [model]"
            )
        first = [each for name, each in network.named_parameters() if name in names]
        rest = [each for name, each in network.named_parameters() if name not in names]
        groups = [{"params": first, "peers": peers.groups["column"]}]
        # A tower uses some columns only, so the mean over all towers is small (docs/decisions/0002-grid-weights.md).
        # Adam is invariant to the scale.
        rate = config.lr if config.optimizer == "adam" else config.lr * settings.columns
        groups += [{"params": rest, "lr": rate}] if rest else []
    if config.optimizer == "adam":
        return ConfinedAdam(groups, lr=config.lr, peers=peers, samples=samples)
    return ConfinedSGD(groups, lr=config.lr, peers=peers, samples=samples, momentum=config.momentum)
