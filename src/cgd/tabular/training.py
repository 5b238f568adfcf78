"""One participant's training on a table: the same program at every member, with other records.

It makes the same sums in the same order each time it is run, whatever its records are. So a participant that was killed
is started again by the same command and goes on where the others are: what was summed before comes from the members.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cgd.errors import DivergenceError, InputError
from cgd.optim.best_checkpoint import BestCheckpoint
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.optimizer import ConfinedAdam, ConfinedOptimizer, ConfinedSGD
from cgd.optim.origin import confine
from cgd.optim.vertical import first_layer_names
from cgd.tabular.alignment import align, kept_back, kept_back_together, row_key
from cgd.tabular.models import build
from cgd.tabular.preprocessing import Preprocessing, fit
from cgd.tabular.wide_sums import wide_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.trace_writer import TraceWriter

CHUNK = 1 << 16  # records that go through the network together, so that memory does not grow with activations
# A validation loss is better if it is lower by this part at least.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class EvalRecord:
    """How far the training is, as seen every few steps.

    Attributes:
        step: how many steps were taken.
        everyone_validation_loss: the mean over everybody's validation records; None if nobody keeps any back.
        best_step: after which step that was lowest.
        training_loss: on our own records; None of these is known for steps that were taken before we were started anew.
        validation_loss: likewise.
        score: accuracy, or R², on our own validation records.
    """

    step: int
    everyone_validation_loss: float | None
    best_step: int
    training_loss: float | None = None
    validation_loss: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class TrainingResult:
    """What comes out of a training.

    Attributes:
        network: the confined model, at the best step.
        preparation: what makes features of a table, and values of what the network says.
        looks: how it went.
        best_step: the step after which the validation loss of everybody was lowest.
        steps: how many were taken.
        validation: the records that were kept back, in the order of the row if there is one.
        samples: our training records.
        everyone_samples: everybody's.
        clipped: in how many steps a gradient of ours was cut to the bound.
        notes: what a person should know.
        seconds: how long it took.
    """

    network: nn.Module
    preparation: Preprocessing
    looks: tuple[EvalRecord, ...]
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
    setting: TabularSettings,
    records: TabularDataset,
    *,
    delta: float | None = None,
    progress: Callable[[EvalRecord], None] = lambda _: None,
    caught_up: Callable[[int], None] = lambda _: None,
    recorder: TraceWriter | None = None,
) -> TrainingResult:
    """Train a confined model on our records, together with the others.

    Args:
        peers: the others; in a grid, with the groups "column" and "row".
        setting: what is to be learned.
        records: ours.
        delta: our own δ, if not that of the file.
        progress: is told of every look at the validation loss, those of steps that were taken before, too.
        caught_up: is told with the first new step how many were taken before we were started anew, 0 if none were.
        recorder: writes down what we put in and what is opened, for attacks on it: all of that is secret.

    Raises:
        InputError: the records of all together cannot be learned from, or do not fit.
        DivergenceError: the loss is no longer finite.
        RemoteProtocolError, PeerTimeoutError: see `Peers.sum`.
    """
    begun = time.monotonic()
    records, kept = _kept_back(peers, setting, records)
    column = peers.groups["column"] if setting.in_columns else peers
    preparation = fit(records, setting.data, setting.own_columns, column)
    training, validation = (Sample.of(records.take(which), preparation, setting) for which in (~kept, kept))
    network = build(setting.model, len(preparation.features), preparation.outputs)
    origin = confine(network, delta=setting.model.delta if delta is None else delta, seed=peers.seed)
    if recorder is not None:
        recorder.begin(peers, setting, preparation, network, origin.delta, training, validation)
    loop = _Loop(peers, setting, network, training, validation)
    if recorder is not None:
        recorder.resume(loop.optimizer)
    loop.run(progress, caught_up)
    trained = TrainingResult(
        network=network.eval(),
        preparation=preparation,
        looks=tuple(loop.looks),
        best_step=loop.best.steps or loop.step,
        steps=loop.step,
        validation=records.take(kept),
        samples=len(training),
        everyone_samples=int(loop.optimizer.param_groups[0]["total_samples"]),
        clipped=loop.clipped,
        notes=(*preparation.notes(records), *loop.notes, *(f"caution: {each}" for each in loop.optimizer.cautions)),
        seconds=time.monotonic() - begun,
    )
    if recorder is not None:
        recorder.finish(trained)
    return trained


def outputs_of(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the network says of many records."""
    with torch.no_grad():
        parts = [network(part) for part in x.split(CHUNK)]
    return torch.cat(parts) if parts else torch.zeros(0, 1)


@dataclass(frozen=True)
class Sample:
    """Records as the network takes them.

    Attributes:
        x: features.
        y: classes, or standardised numbers.
        weight: how much each record counts.
    """

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, records: TabularDataset, preparation: Preprocessing, setting: TabularSettings) -> Sample:
        """Features, target and weights of these records."""
        x, _ = preparation.transform(records)
        y = torch.from_numpy(preparation.encode_target(records))
        balanced = setting.data.class_weights == "balanced"
        weight = torch.from_numpy(preparation.class_weights())[y] if balanced else torch.ones(len(y))
        return cls(torch.from_numpy(x), y, weight)

    def __len__(self) -> int:
        return len(self.y)

    def digest(self) -> bytes:
        """32 bytes that tell these records from others."""
        digest = hashlib.sha256(f"{tuple(self.x.shape)} {self.y.dtype}".encode())
        for each in (self.x, self.y):
            digest.update(each.contiguous().numpy().data)
        return digest.digest()

    def losses(self, outputs: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """The weighted loss of every record of a part."""
        y, weight = self.y[part], self.weight[part]
        if y.is_floating_point():
            return (outputs[:, 0] - y).square() * weight
        return functional.cross_entropy(outputs, y, reduction="none") * weight

    def score(self, outputs: torch.Tensor) -> float | None:
        """Accuracy, or R²; None if there is nothing to compare."""
        if not len(self):
            return None
        if not self.y.is_floating_point():
            return (outputs.argmax(1) == self.y).float().mean().item()
        spread = (self.y - self.y.mean()).square().sum().item()
        return 1 - (outputs[:, 0] - self.y).square().sum().item() / spread if spread else None


class _Loop:
    """The steps, and the looks at the validation loss between them."""

    def __init__(
        self, peers: Peers, setting: TabularSettings, network: nn.Module, training: Sample, validation: Sample
    ) -> None:
        self.peers, self.setting, self.network = peers, setting, network
        self.training, self.validation = training, validation
        self.optimizer = _optimizer(peers, setting, network, len(training))
        self.optimizer.records = training.digest() + validation.digest()
        self.best = BestCheckpoint(self.optimizer)
        self.looks: list[EvalRecord] = []
        self.step = 0
        self.clipped = 0
        self._lowest = float("inf")

    def run(self, progress: Callable[[EvalRecord], None], caught_up: Callable[[int], None]) -> None:
        how = self.setting.training
        schedule = InverseSquareLR(self.optimizer, how.mu, how.steps) if how.mu else None
        taken = self.optimizer.taken()
        past = True
        for self.step in range(1, how.steps + 1):
            self.peers.memory.reach(self.step - 1)
            new = self.step > taken
            loss = self._gradient() if new else None
            self.optimizer.step()
            if past and not self.optimizer.again:
                past = False
                caught_up(self.step - 1)
            if schedule is not None:
                schedule.step()
            if self.step % how.validate_every == 0 or self.step == how.steps:
                look = self._look(loss, new)
                progress(look)
                if how.patience and self._stagnant(look):
                    break
        if past:
            caught_up(self.step)
        if self.best.steps:
            self.best.restore()

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.clipped:
            return ()
        bound = self.setting.training.bound
        return (f"in {self.clipped} steps our gradient was beyond the bound {bound:g} and was cut to it",)

    def _gradient(self) -> float:
        """Compute the gradient of the mean loss over our records, chunk by chunk; the loss."""
        self.network.train()
        self.optimizer.zero_grad()
        total, count = 0.0, len(self.training)
        with torch.random.fork_rng(devices=[]):
            # What a network draws by itself (dropout) is the same whenever the step is taken, and nobody else's.
            drawn = hmac.digest(self.peers.seed, f"cgd step {self.step}".encode(), "sha256")
            torch.manual_seed(int.from_bytes(drawn[:7], "little"))
            for start in range(0, count, CHUNK):
                part = slice(start, start + CHUNK)
                loss = self.training.losses(self.network(self.training.x[part]), part).sum() / count
                loss.backward()
                total += loss.item()
        if not np.isfinite(total):
            raise DivergenceError(
                f"our loss is {total} in step {self.step}; lower lr in [training] (it is {self.setting.training.lr:g})"
            )
        self.clipped += self._clip()
        return total

    def _clip(self) -> bool:
        """Cut gradients to the bound: one extraordinary record must not stop everybody."""
        gradients = [each.grad for each in self.network.parameters() if each.grad is not None]
        bound = self.setting.training.bound
        if not any(each.abs().max().item() > bound for each in gradients):
            return False
        for each in gradients:
            each.clamp_(-bound, bound)
        return True

    def _look(self, loss: float | None, new: bool) -> EvalRecord:
        """Sum the validation loss of everybody, and keep the model if it is the best so far.

        For steps that were taken before, the total is known to the members; what we would say ourselves is not asked.
        Only the one after the last of them may be missing, and for that the network is as it should be.
        """
        own, count, score = 0.0, len(self.validation), None
        new = new or not self.peers.memory.past()
        if new and count:
            outputs = outputs_of(self.network.eval(), self.validation.x)
            own, score = self.validation.losses(outputs).double().sum().item(), self.validation.score(outputs)
        everyone, records = wide_sum(self.peers, np.array([own, count]), "validation loss").tolist()
        mean = everyone / records if records else None
        if mean is not None and mean < self._lowest * (1 - TOLERANCE):
            self._lowest = mean
            self.best.keep(self.step)
        look = EvalRecord(self.step, mean, self.best.steps)
        if new:
            look = replace(look, training_loss=loss, validation_loss=own / count if count else None, score=score)
        self.looks.append(look)
        return look

    def _stagnant(self, look: EvalRecord) -> bool:
        how = self.setting.training
        waited = look.step - look.best_step
        return look.everyone_validation_loss is not None and waited >= how.patience * how.validate_every


def _kept_back(peers: Peers, setting: TabularSettings, records: TabularDataset) -> tuple[TabularDataset, Any]:
    """The records, in the order of the row if there is one, and which of them are kept back for validation."""
    part = setting.data.validation
    if not setting.in_columns:
        return records, kept_back(records.rows, part, peers.seed)
    row = peers.groups["row"]
    key = row_key(row)
    records = align(records, row, key)
    kept = kept_back_together(records, part, key)
    if kept.all():
        kept[0] = False
    return records, kept


def _optimizer(peers: Peers, setting: TabularSettings, network: nn.Module, samples: int) -> ConfinedOptimizer:
    how = setting.training
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if setting.in_columns:
        names = first_layer_names(network)
        if not names:
            raise InputError(
                "the model is cut by columns at its first layer, so it must be a torch.nn.Sequential that begins with "
                "a torch.nn.Linear; give another function in [model]"
            )
        first = [each for name, each in network.named_parameters() if name in names]
        rest = [each for name, each in network.named_parameters() if name not in names]
        groups = [{"params": first, "peers": peers.groups["column"]}]
        # Every tower sees a few columns, and the mean over all of them is small: see docs/design.md, Decisions. Adam
        # does not mind how small.
        rate = how.lr if how.optimizer == "adam" else how.lr * setting.columns
        groups += [{"params": rest, "lr": rate}] if rest else []
    if how.optimizer == "adam":
        return ConfinedAdam(groups, lr=how.lr, peers=peers, samples=samples)
    return ConfinedSGD(groups, lr=how.lr, peers=peers, samples=samples, momentum=how.momentum)
