"""Differential privacy of a training: clipped gradients in, noisy totals out, every opening charged before it is seen.

`Privacy` connects the parts: `RecordGradients` clips the gradient of each record, `NoisyEncoding` adds this member's
share of the noise where floats become ring elements, and `PrivacyLedger` charges the budget before our self-mask key
leaves. docs/differential-privacy.md has the mechanism and its proof.

No error depends on records, because an abort is visible to all members.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError, IntegrityError
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.optim.record_gradients import RecordGradients

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from cgd.dp.accountant import Spent
    from cgd.dp.budget_file import BudgetFile
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.optim.record_gradients import ClippedSum
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step


COUNT, STEP = "the number of records", "a step"
"""The purposes of openings, in the budget."""

WEIGHT_TOLERANCE = 1e-6
"""Relative error of the sum of the weights of records: 1/k in float32, k times, is not exactly 1."""


class Privacy:
    """(ε, δ)-differential privacy for every record of a training. Pass it to a confined optimiser as `privacy=`.

    The training loop stays: `zero_grad()`, a mean loss, `backward()`, `step()`. Each record may be used once per step.
    The guarantee is for every member's records, against all other members: up to `colluders` of them may pool what they
    know, and may leave out their own noise.

    Args:
        model: the model that the optimiser trains.
        epsilon: ε of the whole training.
        delta: δ of the whole training; below one divided by the number of all records.
        steps: T, the number of steps that the noise is calibrated for; stopping earlier is free.
        clip: C, the largest norm of a record's gradient.
        colluders: t, from 0 to m − 1; with m − 1 nothing rests on secure aggregation.
        reruns: r, how many openings besides the steps are calibrated for, for sums that fail at a bad moment; by
            default 5, or 2 % of the steps.
        budget: the file with the budget of these records, over all trainings; needed in a federation. If it does not
            exist, it is created with ε and δ of this training as its limit.
        training: the name under which the file lists the charges; a training that continues under its name continues
            with what is left. By default the name of the federation, and in one process a new name every time.
        reduction: of the loss over the records of a batch, "mean" or "sum".

    Raises:
        InputError: a setting is invalid, the model mixes records, or the budget file cannot be used.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(2, 1)
        ...     cgd.confine(model, delta=0.1, seed=peers.seed)
        ...     privacy = cgd.Privacy(model, epsilon=8.0, delta=1e-5, steps=20)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x), privacy=privacy)
        ...     for _ in range(20):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...     return privacy.spent()
        >>> x = torch.randn(3, 200, 2)
        >>> with cgd.local_peers(3) as members:
        ...     spent = members.run(train, x, x.sum(dim=2, keepdim=True))[0]
        >>> spent.epsilon < 8.0, spent.openings  # the number of records, and 20 steps
        (True, 21)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        clip: float = 1.0,
        colluders: int = 1,
        reruns: int | None = None,
        budget: str | os.PathLike[str] | None = None,
        training: str = "",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        settings = PrivacySettings(epsilon, delta, steps, clip, colluders, -1 if reruns is None else reruns)
        self._use(model, PrivacyLedger(settings, None if budget is None else Path(budget), training), reduction, None)

    @classmethod
    def from_ledger(
        cls,
        model: torch.nn.Module,
        ledger: PrivacyLedger,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        records: int | None = None,
    ) -> Privacy:
        """Return the privacy of a training that is charged to a ledger with other openings.

        Args:
            model: the model that the optimiser trains.
            ledger: the ledger, with the settings.
            reduction: of the loss over the records of a batch, "mean" or "sum".
            records: the largest number of records in a step, if it is not the optimiser's `samples`: with records whose
                loss is multiplied by zero, or with several records of a person.
        """
        privacy = cls.__new__(cls)
        privacy._use(model, ledger, reduction, records)
        return privacy

    def _use(
        self, model: torch.nn.Module, ledger: PrivacyLedger, reduction: Literal["mean", "sum"], records: int | None
    ) -> None:
        self.settings, self._ledger, self._records = ledger.settings, ledger, records
        self._gradients = RecordGradients(model, ledger.settings.clip, reduction=reduction)
        self._taken: ClippedSum | None = None
        self._optimizer: ConfinedOptimizer | None = None

    def weigh_records(self, weights: torch.Tensor) -> None:
        """Multiply the clipped gradients of the next batch's records by these weights, from 0 to 1.

        If k records are of one person, weights of 1/k make the guarantee one for persons. Then `samples` of the
        optimiser is the number of persons, which is the sum of the weights; with the number of records in its place,
        the guarantee would be weaker. Call it before every batch of every step. No person may be in two participants'
        data.

        Raises:
            InputError: a weight is below 0 or above 1.

        Examples:
            >>> import torch
            >>> persons = torch.tensor([7, 7, 7, 8, 9, 9])  # of each record
            >>> _, place, number = persons.unique(return_inverse=True, return_counts=True)
            >>> weights = 1 / number[place]
            >>> round(weights.sum().item())  # samples
            3
        """
        self._gradients.weigh_records(weights)

    def spent(self) -> Spent:
        """Return what was charged so far for this training: epsilon, delta, mu, openings.

        In a restarted process, charges of the earlier ones are included from the first step on.
        """
        return self._ledger.spent()

    @property
    def budget_file(self) -> BudgetFile | None:
        """The budget of these records over all trainings, if there is a file."""
        return self._ledger.file

    # Called by the optimiser.

    def attach(self, optimizer: ConfinedOptimizer) -> None:
        """Let an optimiser use this object. Only one may: the gradients since the last step are those of its step.

        Raises:
            InputError: another optimiser uses it, the participant is a job of several ranks, or sums have 16 bits.
        """
        if self._optimizer is not None:
            raise InputError(
                "this Privacy belongs to another optimiser already; create one for each optimiser. Their budgets add "
                "up if they use the same records: give both the same budget file"
            )
        if optimizer.peers.ranks.size > 1:
            raise InputError(
                f"privacy= is for a participant of one process, and this is a job of {optimizer.peers.ranks.size} "
                "ranks: the budget and the noise of its records would have to be kept once for all ranks. Start it "
                "without torchrun"
            )
        if optimizer.peers.settings.ring_bits == 16:
            raise InputError(
                "privacy= and ring_bits=16 exclude each other: the noise is proved for 32 and 64 bits; use one of those"
            )
        self._optimizer = optimizer
        if optimizer.peers.quorum != self.settings.quorum:
            self.settings = self._ledger.size_for_quorum(optimizer.peers.quorum)

    def begin(self, peers: Peers, slot: int = 0) -> None:
        """Check, before a sum, that it may be opened; first, that the whole training fits into the budget.

        Args:
            peers: the members of the sum.
            slot: the number of the optimiser in the program.

        Raises:
            InputError: there are too many colluders, the training does not fit into the budget of the records, or a
                federation needs a budget file.
            BudgetSpentError: the budget of the training is spent.
        """
        self._ledger.begin(peers, slot)
        self._ledger.check_affordable(peers, self.settings.step_mu**2, STEP)

    def check_charged(self, peers: Peers, slot: int, openings: int) -> None:
        """Check that openings which our records were part of are in the budget, before a training continues after them.

        Raises:
            InputError: fewer were charged: this is another budget than that of these records.
        """
        self._ledger.check_charged(peers, slot, openings)

    def open_count(self, peers: Peers, samples: int, step: Step, epoch: int, members: int) -> int:
        """Return the number of all records, with noise, at least 1.

        Raises:
            InputError: δ is not below one divided by that number; at all members.
        """
        encoding = self.settings.count_encoding(members)
        context = self.settings.describe()
        own = np.array([float(samples)])
        total = self._ledger.open(peers, own, encoding, COUNT, context=context, step=step, epoch=epoch)
        records = max(1, round(float(total[0])))
        self.settings.check_records(records)
        return records

    def open_gradients(
        self, peers: Peers, gradient: torch.Tensor, records: int, context: str, step: Step, epoch: int, members: int
    ) -> torch.Tensor:
        """Return the mean gradient over all records, with noise, as one vector.

        Args:
            peers: the members of the sum.
            gradient: this member's sum of clipped gradients.
            records: the number of all records, as opened.
            context: what members compare, with the settings of the privacy.
            step: the step of the optimiser.
            epoch: the epoch that the number of members belongs to.
            members: the number of members.

        Raises:
            RevealError: the budget is spent, or the charge cannot be written.
            IntegrityError: the total is larger than honest members can produce; at all members, because all have the
                same total.
        """
        encoding = self.settings.step_encoding(members, gradient.numel(), records, peers.settings.ring_bits)
        total = self._ledger.open(peers, gradient.numpy(), encoding, STEP, context=context, step=step, epoch=epoch)
        norm = float(np.linalg.norm(total))
        if norm > encoding.max_total_norm:
            raise IntegrityError(
                f"the sum of all gradients has the norm {norm:.3g}, and honest members produce at most "
                f"{encoding.max_total_norm:.3g}: a member entered more than clipped gradients, and the sum does not "
                "show which. Nothing was moved; find out who before you train again"
            )
        return torch.from_numpy(total)

    def gradient(self, parameters: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
        """Return the sum of the clipped gradients since the last step; the same until `reset`, if a sum is repeated.

        Raises:
            InputError: more records were used than there are, or none; with weights, more weight than persons.
        """
        if self._taken is None:
            self._taken = self._gradients.take(parameters)
        gradient, records, weight = self._taken
        if records == 0 or weight > (self._records or samples) * (1 + WEIGHT_TOLERANCE):
            weighed = f", with the total weight {weight:.6g}" if weight < records else ""
            raise InputError(
                f"{records} records were used in this step{weighed}, and samples is {samples}; call backward() before "
                "step(), and use each record once per step"
            )
        return gradient

    def reset(self) -> None:
        """Discard the gradients since the last step."""
        self._taken = None
        self._gradients.reset()
