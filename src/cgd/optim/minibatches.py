"""Batches of a member's records: the same number at every member, from its secret seed, repeatable after a restart.

All members must take the same number of steps, and they have different numbers of records. So the number of batches of
an epoch is common, and the size of a batch is each member's own.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch.utils.data
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cgd.errors import InputError
from cgd.optim.displacement import trainable
from cgd.optim.option_checks import check_whole
from cgd.optim.vertical import is_joint
from cgd.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    import numpy.typing as npt
    from torch.optim.lr_scheduler import LRScheduler

    from cgd.optim.optimizer import ConfinedOptimizer


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """The batches of an optimiser's steps, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    In each epoch, a fresh permutation of this member's records is divided into `batches` parts whose sizes differ by at
    most one. A member with fewer records than batches uses one record in each step: permutations follow each other, so
    that it uses no record a second time before all others.

    **The expectation of a step is the full gradient.** The places of a batch in the permutation are fixed, and each
    record is at each place with the same probability. So the expected mean gradient of a batch of any size is the mean
    over all of the member's records. The sum weights it by n_l/n, which gives the gradient of the mean loss over all
    samples. (The mean over the steps of one epoch is that of all records exactly if its batches have the same size;
    otherwise records in smaller batches count a little more, and chance decides which.) With `privacy=` the sum of a
    batch is divided by the number of all records: there a step is 1/batches as large in expectation, so multiply `lr`
    by `batches`.

    The permutation depends on `peers.seed` and the epoch only. A restarted member repeats its batches, and no other
    member can predict them. In a row of a grid, all members can: with `row=`, they take the same records in the same
    order, from a seed to which each of them adds a part. A `JointFirstLayer` needs this.

    Nothing is counted while the sampler is iterated, so a `DataLoader` may prefetch batches in other processes. Random
    augmentation is not part of this: seed it yourself, with a generator for the `DataLoader`.

    A step then reveals a sum over fewer records. If batches are small, many steps reveal single records, also to
    members that do not know the batches (threat model, "Batches and local steps"). The optimiser's privacy warnings
    take the size of a batch into account, and its members compare the number of batches.

    Args:
        optimizer: the optimiser whose steps use the batches; `samples` is the number of this member's records.
        batches: the number of batches in an epoch; the same at every member.
        row: in a grid, the members that hold other features of the same records, in the same order. They make one sum,
            in which they also compare the numbers of records and batches. All of them create the sampler at the same
            place of the program.

    Raises:
        InputError: there is no batch; or, when batches are drawn, the model has a `JointFirstLayer` and there is no
            `row`.
        SettingsError: a member of the row has another number of records or batches.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(1, 1)
        ...     cgd.confine(model, delta=0.1, seed=peers.seed)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(x))
        ...     sampler = cgd.BatchSampler(optimizer, batches=4)
        ...     loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_sampler=sampler)
        ...     sizes = []
        ...     for step, (own_x, own_y) in sampler.steps(loader, epochs=2):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(own_x), own_y).backward()
        ...         optimizer.step()
        ...         sizes.append(len(own_x))
        ...     return sizes
        >>> records = [torch.ones(8, 1), torch.ones(10, 1), torch.ones(3, 1)]
        >>> with cgd.local_peers(3) as members:
        ...     members.run(train, records, records)
        [[2, 2, 2, 2, 2, 2, 2, 2], [3, 3, 2, 2, 3, 3, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1]]
    """

    def __init__(self, optimizer: ConfinedOptimizer, batches: int, *, row: Peers | None = None) -> None:
        if isinstance(batches, bool) or not isinstance(batches, (int, np.integer)) or batches < 1:
            raise InputError(f"batches is {batches!r}; it is the number of batches in an epoch, at least 1")
        if not hasattr(optimizer, "step_input"):
            raise InputError(
                f"the optimiser is a {type(optimizer).__name__}; pass the confined optimiser whose steps use the "
                "batches, such as a ConfinedSGD"
            )
        if row is not None and not isinstance(row, Peers):
            raise InputError(
                f"row is a {type(row).__name__}; it is the Peers of a row of a grid, such as peers.groups['row']"
            )
        self.batches = int(batches)
        self._optimizer = optimizer
        self._epoch: int | None = None
        self._first = 0
        self._row_seed = b"" if row is None else _row_seed(row, optimizer, self.batches)
        optimizer.step_input.batches = self.batches

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Draw the batches of this epoch, from batch `first` on, when the sampler is iterated the next time.

        A loop over epochs calls it at the beginning of each, as with torch's `DistributedSampler`. After a restart such
        a loop begins with the first epoch, and its finished steps are skipped; `steps` begins where the members are.
        """
        epoch, first = check_whole("epoch", epoch), check_whole("first", first)
        if first >= self.batches:
            raise InputError(f"first is {first}, and an epoch has {self.batches} batches, counted from 0")
        self._epoch, self._first = epoch, first

    def __iter__(self) -> Iterator[list[int]]:
        if self._epoch is None:
            raise InputError(
                "the epoch is not known; call set_epoch(epoch) at the beginning of each epoch, or loop over "
                "sampler.steps(loader, epochs)"
            )
        if not self._row_seed and any(map(is_joint, trainable(*self._optimizer.param_groups))):
            raise InputError(
                "the model has a JointFirstLayer, which adds the pre-activations of a row, and each member of the row "
                "would take other records; pass row=, the peers of the layer, to BatchSampler at all members"
            )
        seed, samples = self._row_seed or self._optimizer.peers.seed, self._optimizer.samples
        return iter(draw_batches(seed, self._epoch, samples, self.batches)[self._first :])

    def __len__(self) -> int:
        return self.batches - self._first

    def steps(
        self, loader: torch.utils.data.DataLoader[Any], epochs: int, *schedulers: LRScheduler
    ) -> Iterator[tuple[int, Any]]:
        """Iterate over the remaining steps of all epochs, with their batches; see `ConfinedOptimizer.steps`.

        Schedulers that the loop steps once after every step must be given here: after a restart they are set to the
        first of these steps.

        Raises:
            InputError: the loader does not use this sampler, or its data set has another number of records than the
                optimiser's `samples`.
        """
        epochs = check_whole("epochs", epochs)
        if getattr(loader, "batch_sampler", None) is not self:
            raise InputError("the loader has another sampler; create it with batch_sampler= this one")
        records, samples = len(cast("Sized", loader.dataset)), self._optimizer.samples
        if records != samples:
            raise InputError(
                f"the data set has {records:,} records and the optimiser has samples={samples:,}, from which batches "
                "are drawn; pass the number of records"
            )
        batches: Iterator[Any] | None = None
        following = -1
        for step in self._optimizer.steps(epochs * self.batches, *schedulers):
            epoch, number = divmod(step, self.batches)
            if batches is None or number == 0 or step != following:  # with a quorum, others may have gone on
                self.set_epoch(epoch, number)
                batches = iter(loader)
            following = step + 1
            yield step, next(batches)


def _row_seed(row: Peers, optimizer: ConfinedOptimizer, batches: int) -> bytes:
    """Return 32 bytes that the members of a row have in common, the same again after a restart.

    Each member adds a secret part, so that nobody outside of the row can compute them.
    """
    own = hmac.digest(optimizer.peers.seed, b"cgd batches of a row", "sha256")
    words = np.frombuffer(own, dtype="<u4").astype(np.int64)  # their sum is exact
    total = row.sum(words, context=f"seed of a row with {optimizer.samples} records in {batches} batches")
    return hashlib.sha256(total.astype("<i8").tobytes()).digest()


def draw_batches(seed: bytes, epoch: int, samples: int, batches: int) -> list[list[int]]:
    """Return the numbers of the records of each batch in an epoch, which depend on the arguments only.

    Examples:
        >>> draw_batches(bytes(32), 0, 5, 2), draw_batches(bytes(32), 1, 5, 2)
        ([[4, 2, 0], [3, 1]], [[3, 1, 0], [2, 4]])
        >>> draw_batches(bytes(32), 0, 2, 5)
        [[0], [1], [0], [1], [1]]
    """
    permutations = [
        _permutation(hmac.digest(seed, f"cgd batches of epoch {epoch}, {number}".encode(), "sha256"), samples)
        for number in range(math.ceil(batches / samples))
    ]
    order = np.concatenate(permutations)[: max(samples, batches)]
    return [part.tolist() for part in np.array_split(order, batches)]


def round_batches(seed: bytes, number: int, samples: int, batches: int, local_epochs: int = 0) -> list[list[int]]:
    """Return the batches that a member uses in a round: the next one of its epoch, or those of its local epochs.

    They depend on the arguments only, so a restarted member repeats them.

    Args:
        seed: the member's seed.
        number: the number of the round, counted from 0.
        samples: the number of the member's records.
        batches: the number of batches in an epoch.
        local_epochs: the number of epochs of local steps in a round; 0 to sum gradients.

    Examples:
        >>> round_batches(bytes(32), 3, 5, 2)
        [[2, 4]]
        >>> round_batches(bytes(32), 0, 5, 2, local_epochs=2)
        [[4, 2, 0], [3, 1], [3, 1, 0], [2, 4]]
    """
    if not local_epochs:
        epoch, place = divmod(number, batches)
        return [draw_batches(seed, epoch, samples, batches)[place]]
    epochs = range(number * local_epochs, (number + 1) * local_epochs)
    return [batch for epoch in epochs for batch in draw_batches(seed, epoch, samples, batches)]


def _permutation(key: bytes, count: int) -> npt.NDArray[np.int64]:
    """Return the order of random words of 64 bits: two equal ones are less likely than count²/2⁶⁵."""
    words = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    return np.argsort(np.frombuffer(words, dtype="<u8"), kind="stable")
