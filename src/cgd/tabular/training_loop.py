"""The steps of a training on a table, with evaluations and early stopping."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cgd.errors import DivergenceError, InputError
from cgd.optim.adam import ConfinedAdam
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.minibatches import BatchSampler, round_batches
from cgd.optim.random_numbers import own_random_numbers
from cgd.optim.recovery import BestCheckpoint
from cgd.optim.sgd import ConfinedSGD
from cgd.optim.vertical import first_layer_names
from cgd.reporting.run_file import EvalRecord
from cgd.tabular.opened_counts import check_counts, was_included
from cgd.tabular.wide_sums import wide_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from cgd.federation.model_section import Model
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.optim.privacy import Privacy
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings

CHUNK_RECORDS = 1 << 16  # records in one forward pass, to limit the memory of activations
LOCAL_MOMENTUM = 0.9  # of local steps, within one step of all
MIN_IMPROVEMENT = 1e-4  # relative decrease of the validation loss that counts as an improvement


def forward(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the network's outputs on the CPU, computed in chunks on the device of the network."""
    device = next(network.parameters()).device
    with torch.no_grad():
        chunks = [network(chunk.to(device)).cpu() for chunk in x.split(CHUNK_RECORDS)]
    return torch.cat(chunks) if chunks else torch.zeros(0, 1)


def add_gradient(network: nn.Module, data: EncodedDataset) -> float:
    """Add the gradient of the mean loss to that of the parameters, computed in chunks; return the loss."""
    total, count = 0.0, len(data)
    for start in range(0, count, CHUNK_RECORDS):
        part = slice(start, start + CHUNK_RECORDS)
        loss = data.losses(network(data.x[part]), part).sum() / count
        loss.backward()
        total += loss.item()
    return total


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

    def take(self, places: Sequence[int]) -> EncodedDataset:
        """Return some of the records."""
        chosen = torch.tensor(places).to(self.x.device)
        return EncodedDataset(self.x[chosen], self.y[chosen], self.weight[chosen])

    def to(self, device: torch.device) -> EncodedDataset:
        """Return the records on a device."""
        return EncodedDataset(self.x.to(device), self.y.to(device), self.weight.to(device))

    def with_features_on(self, device: torch.device) -> EncodedDataset:
        """Return the records with their features on a device, and the rest here: outputs are compared on the CPU."""
        return replace(self, x=self.x.to(device))

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
            return (outputs.argmax(1) == self.y).double().mean().item()  # as precise as the scores of the result
        y = self.y.double()
        spread = (y - y.mean()).square().sum().item()
        return 1 - (outputs[:, 0].double() - y).square().sum().item() / spread if spread else None


class TrainingLoop:
    """The training steps, with evaluations and early stopping."""

    def __init__(
        self,
        peers: Peers,
        settings: TabularSettings,
        network: nn.Module,
        training: EncodedDataset,
        validation: EncodedDataset,
        delta: float,
        privacy: Privacy | None = None,
        samples: int | None = None,
        merge: Callable[[npt.NDArray[np.float32]], object] | None = None,
    ) -> None:
        self._merge = merge  # changes the features of a batch in place, see `cgd.tabular.few_records`
        self.peers, self.settings, self.network = peers, settings, network
        self.training, self.validation = training.to(settings.device), validation.with_features_on(settings.device)
        count = len(training) if samples is None else samples
        self.optimizer = _build_optimizer(peers, settings, network, count, privacy)
        digests = training.digest(), validation.digest(), _network_digest(settings.model, delta)
        # Another model of device has other random numbers (dropout), and so another gradient of the same step.
        device = b"" if settings.device.type == "cpu" else settings.device.type.encode()
        if settings.device.type == "cuda":
            device += torch.cuda.get_device_name(settings.device).encode()
        self.optimizer.records_digest = b"".join((*digests, device))
        if settings.training.batches > 1 and not settings.training.local_epochs:
            BatchSampler(self.optimizer, settings.training.batches)  # members compare it, and warnings depend on it
        self.best = BestCheckpoint(self.optimizer)
        self._network_slot = peers.next_slot()
        self._check_network()
        self.evaluations: list[EvalRecord] = []
        self.step = 0
        self.clipped = 0
        self._lowest_loss = float("inf")

    def run(self, progress: Callable[[EvalRecord], None], caught_up: Callable[[int], None]) -> None:
        """Take all steps, or stop early; the arguments are as for `cgd.tabular.training.train`."""
        config = self.settings.training
        schedule = InverseSquareLR(self.optimizer, config.mu, config.steps) if config.mu else None
        replaying = True
        for self.step in range(1, config.steps + 1):
            self.peers.set_step(self.step - 1)
            new = self.step > self.optimizer.steps_taken()  # with a quorum, others may have gone on without us
            loss = self._take_step() if new else self.optimizer.step()
            if self.step == 1:
                self._save_network()
            if replaying and not self.optimizer.replayed:
                replaying = False
                caught_up(self.step - 1)
            if schedule is not None:
                schedule.step()
            if self.step == config.steps:
                self.optimizer.drain()
            if self.step % config.validate_every == 0 or self.step == config.steps:
                evaluation = self._evaluate(loss, new)
                progress(evaluation)
                if config.patience and self._should_stop(evaluation):
                    break
        self.optimizer.drain()  # after an early stop; all members have the same state at the end
        if replaying:
            caught_up(self.step)
        self.optimizer.eval()
        if self.best.steps:
            self.best.restore()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        if not self.clipped:
            return ()
        bound = self.settings.training.bound
        what = "update" if self.settings.training.local_epochs else "gradient"
        return (f"in {self.clipped} steps our {what} exceeded the bound {bound:g} and was clipped to it",)

    def _check_network(self) -> None:
        """Check that a training is continued with its own network, also in a new epoch; shapes are checked elsewhere.

        Raises:
            InputError: it was begun with another one.
        """
        model, stored = self.settings.model, self.peers.recovery.load(self._network_slot)
        if stored is not None and stored.content != _network_digest(model):
            function = f", function {model.function!r}" if model.function else ""
            raise InputError(
                f"this training was begun with another network than that of [model], whose kind is {model.kind!r}, "
                f"activation {model.activation!r}{function}, start {model.start!r} and fresh_origins "
                f"{model.fresh_origins}: the result would be a model that nobody trained. Restore [model] at all "
                "members; or start a new training under another name of the federation"
            )

    def _save_network(self) -> None:
        """Store a digest of the network with the members: the commitment to our records is for one epoch only."""
        if self.peers.recovery.load(self._network_slot) is None:
            self.peers.recovery.save(self._network_slot, 1, _network_digest(self.settings.model), fixed=True)

    def _take_step(self) -> float | None:
        """Take one step with our records, or with local steps on them; return our loss."""
        if self.settings.training.local_epochs:
            return self._take_local_steps()
        loss = self._compute_gradient()
        self.optimizer.step()
        return loss

    def _compute_gradient(self) -> float | None:
        """Compute the gradient of the mean loss over our records, or over those of a batch; return the loss."""
        self.network.train()
        self.optimizer.zero_grad()
        data = self.training
        if self.settings.training.batches > 1:
            (places,) = self._places()
            data = data.take(places)
            if self._merge is not None:
                x = data.x.cpu()
                self._merge(x.numpy())
                data = replace(data, x=x.to(data.x.device))
        with self._own_random_numbers():
            total = add_gradient(self.network, data)
        self._check_finite(total, "lr")
        self.clipped += self._clip()
        return total

    def _take_local_steps(self) -> float:
        """Train on our records for some epochs, and sum the update; return the mean loss of the last epoch."""
        config, parameters = self.settings.training, list(self.network.parameters())
        self.network.train()
        with self.optimizer.local_steps(), self._own_random_numbers():
            before = [each.detach().clone() for each in parameters]
            local = torch.optim.SGD(parameters, lr=config.local_lr, momentum=LOCAL_MOMENTUM)
            total = 0.0
            for number, places in enumerate(self._places()):
                local.zero_grad()
                loss = add_gradient(self.network, self.training.take(places)) / config.batches
                total = loss if number % config.batches == 0 else total + loss  # of this epoch
                local.step()
                self._check_finite(total, "local_lr")
            self.clipped += self._clip_update(parameters, before)
        return total

    def _places(self) -> list[list[int]]:
        """Return the places of the records of each batch of this step."""
        config = self.settings.training
        return round_batches(self.peers.seed, self.step - 1, len(self.training), config.batches, config.local_epochs)

    def _check_finite(self, loss: float, name: str) -> None:
        if not np.isfinite(loss):
            value = getattr(self.settings.training, name)
            raise DivergenceError(
                f"our loss is {loss} in step {self.step}; lower {name} in [training] (it is {value:g})"
            )

    @torch.no_grad()
    def _clip_update(self, parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
        """Clip the update of local steps to the bound."""
        bound, clipped = self.settings.training.bound, False
        for each, earlier in zip(parameters, before, strict=True):
            clipped |= bool((each - earlier).abs().max() > bound)
            each.copy_(earlier + (each - earlier).clamp(-bound, bound))
        return clipped

    def _clip(self) -> bool:
        """Clip gradients to the bound, so that a single extreme record does not stop the federation."""
        gradients = [each.grad for each in self.network.parameters() if each.grad is not None]
        bound = self.settings.training.bound
        if not any(each.abs().max().item() > bound for each in gradients):
            return False
        for each in gradients:
            each.clamp_(-bound, bound)
        return True

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw the random numbers of the network (dropout) from our seed and the step only, also after a restart."""
        seed = hmac.digest(self.peers.seed, f"cgd step {self.step}".encode(), "sha256")
        with own_random_numbers(int.from_bytes(seed[:7], "little"), self.settings.device):
            yield

    def _evaluate(self, loss: float | None, new: bool) -> EvalRecord:
        """Open the validation loss of all members, and save the model if it is the best so far.

        In replayed steps the sum comes from the members, and our own loss is not computed. Only the sum after the last
        replayed step may still be open; for that one the network is in the right state.
        """
        losses, score = torch.zeros(0, dtype=torch.float64), None
        self.peers.queue.wait()
        new = new or not self.peers.recovery.is_replay()
        if new and len(self.validation):
            self.optimizer.eval()
            outputs = forward(self.network.eval(), self.validation.x)
            self.optimizer.train()
            losses, score = self.validation.losses(outputs).double(), self.validation.score(outputs)
        mean = self._open_loss(losses)
        if mean is not None and mean < self._lowest_loss * (1 - MIN_IMPROVEMENT):
            self._lowest_loss = mean
            self.best.save(self.step)
        evaluation = EvalRecord(self.step, mean, self.best.steps)
        if new:
            own_loss = losses.sum().item() / len(losses) if len(losses) else None
            evaluation = msgspec.structs.replace(evaluation, training_loss=loss, validation_loss=own_loss, score=score)
        self.evaluations.append(evaluation)
        return evaluation

    def _open_loss(self, losses: torch.Tensor) -> float | None:
        """Return the mean validation loss of all members' records, given those of ours; None if there are none."""
        own, count = losses.sum().item(), len(self.validation)
        total, records = wide_sum(self.peers, np.array([own, count]), "validation loss").tolist()
        check_counts(self.peers, "validation records", [int(records)], [count] if was_included(self.peers) else None)
        return float(total / records) if records else None

    def _should_stop(self, evaluation: EvalRecord) -> bool:
        """Return whether the validation loss has not improved for `patience` evaluations."""
        config = self.settings.training
        since_best = evaluation.step - evaluation.best_step
        has_loss = evaluation.everyone_validation_loss is not None
        return has_loss and since_best >= config.patience * config.validate_every


def _network_digest(model: Model, delta: float | None = None) -> bytes:
    """Return a digest of what the shapes of a network do not show, with our δ if it is given.

    The start and fresh origins are part of it only if they are not the default, as before there was a choice.
    """
    parts = [model.kind, model.activation, model.function, *(() if delta is None else (delta,))]
    if model.start != replace(model, start=None).start:
        parts.append(model.start)
    if model.fresh_origins:
        parts.append("fresh origins")
    return hashlib.sha256(repr(tuple(parts)).encode()).digest()


def _build_optimizer(
    peers: Peers, settings: TabularSettings, network: nn.Module, samples: int, privacy: Privacy | None
) -> ConfinedOptimizer:
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
    common: dict[str, Any] = {"peers": peers, "samples": samples, "privacy": privacy, "delay": config.delay}
    if config.optimizer == "adam":
        return ConfinedAdam(groups, lr=config.lr, **common)
    return ConfinedSGD(groups, lr=config.lr, momentum=config.momentum, **common)
