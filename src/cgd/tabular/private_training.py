"""Training on a table with differential privacy: validation split, gradients, validation loss.

**Validation split.** Each record is in it by a coin of its own, a keyed digest of its content: adding a record moves no
other one. If `unit` in [privacy] names persons, the coin is that of the person, for all its records. So a record, or a
person, changes either what is opened about training records (statistics, number, gradients) or the validation losses,
and each has the whole budget (parallel composition).

**Validation loss.** The loss of a record is cut to L, and its vector is (loss/L − ½, ½). Its squared norm is at most ½,
whatever the loss is. From the opened sums S and H follows the mean loss L·(S/2H + ½).

**Persons.** The gradient of each of a person's k records is clipped to C and divided by k, and so is the vector of its
loss. So all records of a person together count as one record.

**Nothing depends on records but through noise.** A loss that is not finite is no error, as it is without privacy. A
participant without training records takes part with one that has no weight. Losses and scores of our own are exact;
they are for our own report, and are not sent.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from cgd.dp.charges import VALIDATION
from cgd.errors import MembersChangedError
from cgd.optim.privacy import Privacy
from cgd.tabular.columns import Categorical
from cgd.tabular.training_loop import EncodedDataset, TrainingLoop

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import nn

    from cgd.federation.data_schema import Data
    from cgd.optim.privacy_ledger import PrivacyLedger
    from cgd.peers import Peers
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings

LOSS_BOUND = 4.0
"""L: a class that was given a probability of 1.8 %, or an error of two standard deviations."""
LOSS_NORM = math.sqrt(0.5) * (1 + 1e-6)
"""The largest norm of a record's vector in the opening of the validation loss, with a margin for rounding."""
BATCH_RECORDS = 2048
"""All batches have this size, so that a record's gradient has the same bits whatever other records there are."""


def private_validation_split(records: TabularDataset, part: float, seed: bytes) -> npt.NDArray[np.bool_]:
    """Return the mask of our validation records: about this part of them, each chosen by its own content.

    Equal records have different coins: the second one is that of the content and the number 2. All records of a unit
    have the same coin.
    """
    key, threshold = hmac.digest(seed, b"cgd private validation", "sha256"), int(part * 2**64)
    seen: Counter[bytes] = Counter()
    mask = np.zeros(records.rows, dtype=np.bool_)
    for place, content in enumerate(_contents(records) if records.units is None else map(str.encode, records.units)):
        seen[content] += records.units is None
        drawn = hashlib.blake2b(seen[content].to_bytes(8, "little") + content, digest_size=8, key=key).digest()
        mask[place] = int.from_bytes(drawn, "little") < threshold
    return mask


def split_name(data: Data, unit: str, records: TabularDataset, seed: bytes) -> str:
    """Return a name of the split for the budget file: another one if a record may be in the other part.

    The coin of a record depends on the seed and on its values as the schema reads them; with `unit`, on that column
    only. A record with another value or label has another coin, so the name is that of all contents, in any order.
    """
    contents = sorted(_contents(records)) if records.units is None else []
    content = hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in contents)).hexdigest()
    text = f"cgd private validation of {data.as_stored()} by {unit!r}, {content}"
    return hmac.digest(seed, text.encode(), "sha256")[:8].hex()


def _contents(records: TabularDataset) -> list[bytes]:
    """Return the values of each record as bytes."""
    target = () if records.target is None else (records.target,)
    table = np.empty((records.rows, len(records.numbers) + len(records.categories) + len(target)), dtype="<f8")
    for place, each in enumerate((*records.numbers.values(), *records.categories.values(), *target)):
        table[:, place] = each.codes if isinstance(each, Categorical) else each
    table[np.isnan(table)] = np.nan  # there are several
    table += 0.0  # -0.0 becomes 0.0
    return [row.tobytes() for row in table]


class Shares(NamedTuple):
    """The weight of each record: 1/k if its unit of privacy has k records.

    Attributes:
        training: of the training records.
        validation: of the validation records.
    """

    training: torch.Tensor
    validation: torch.Tensor

    @classmethod
    def of(cls, records: TabularDataset, held_out: npt.NDArray[np.bool_]) -> Shares:
        """Return the shares of both parts; all records of a unit are in one of them."""
        weights = torch.from_numpy(records.unit_weights())
        return cls(weights[~held_out], weights[held_out])


class PrivateTrainingLoop(TrainingLoop):
    """The training steps with clipped gradients and noise, charged to a ledger."""

    def __init__(
        self,
        peers: Peers,
        settings: TabularSettings,
        network: nn.Module,
        training: EncodedDataset,
        validation: EncodedDataset,
        delta: float,
        ledger: PrivacyLedger,
        shares: Shares,
        statistics_digest: bytes,
    ) -> None:
        self._ledger, self._shares = ledger, shares
        whole = _pad(training, max(1, -(-len(training) // BATCH_RECORDS)) * BATCH_RECORDS)
        privacy = Privacy.from_ledger(network, ledger, reduction="sum", records=len(whole))
        units = max(1, round(shares.training.sum().item()))
        super().__init__(peers, settings, network, training, validation, delta, privacy, units)
        # The opened statistics have fresh noise in every training. Without them, the commitment to records without
        # numbers would be the same again in the next training, exactly if the records are.
        self.optimizer.records_digest += hashlib.sha256(shares.training.numpy().tobytes()).digest() + statistics_digest
        self._privacy = privacy
        parts = zip(*(each.split(BATCH_RECORDS) for each in (whole.x, whole.y, whole.weight)), strict=True)
        self._batches = [EncodedDataset(*each) for each in parts]
        self._batch_shares = _pad_end(shares.training, len(whole)).split(BATCH_RECORDS)

    def _compute_gradient(self) -> float | None:
        """Compute the clipped gradients of our records, in batches; return the mean loss if it is finite."""
        self.network.train()
        self.optimizer.zero_grad()
        total = 0.0
        with self._own_random_numbers():
            for batch, shares in zip(self._batches, self._batch_shares, strict=True):
                if self.settings.unit:
                    self._privacy.weigh_records(shares)
                loss = batch.losses(self.network(batch.x)).sum()
                loss.backward()
                total += loss.item()
        return total / max(1, len(self.training)) if math.isfinite(total) else None

    def _open_loss(self, losses: torch.Tensor) -> float | None:
        """Return the mean validation loss of all members with noise; None if it is not opened after this step."""
        settings = self._ledger.settings
        last = self.step == self.settings.training.steps
        if not settings.looks or not (last or self.settings.training.patience):
            return None
        scaled = (losses / LOSS_BOUND).nan_to_num(nan=1.0).clamp(0.0, 1.0)
        shares = self._shares.validation[: len(scaled)]  # none in a replayed step
        own = np.array([((scaled - 0.5) * shares).sum().item(), 0.5 * shares.sum().item()])
        while True:
            epoch, members = self.peers.next_round()
            encoding = settings.sum_encoding(members, 2, LOSS_NORM, settings.look_mu)
            with suppress(MembersChangedError):  # for the new members, with fresh noise
                opened = self._open(own, encoding, epoch)
                mean = opened[0] / max(1.0, 2 * opened[1]) + 0.5
                return LOSS_BOUND * min(max(mean, 0.0), 1.0)

    def _open(self, own: Any, encoding: Any, epoch: int) -> list[float]:
        what = "the validation loss"
        context = f"{what}, {self._ledger.settings.describe()}"
        opened: list[float] = self._ledger.open(
            self.peers, own, encoding, what, context=context, epoch=epoch, records=VALIDATION
        ).tolist()
        return opened


def _pad(data: EncodedDataset, rows: int) -> EncodedDataset:
    """Return the records and as many of no weight as are needed for this number."""
    x = functional.pad(data.x, (0, 0, 0, rows - len(data)))
    return EncodedDataset(x, _pad_end(data.y, rows), _pad_end(data.weight, rows))


def _pad_end(values: torch.Tensor, length: int) -> torch.Tensor:
    return functional.pad(values, (0, length - len(values)))
