"""Noisy openings of a training, each charged before it can be seen: to its own budget, and to that of the data set.

A record is in one of two parts: it is trained on, or it is in the validation split. So the openings about each part
have the whole budget (parallel composition), and the training has spent the larger of the two sums. If a training of
the same name had another split, a record may be in the other part now, so its charges count for both.

An opening is charged when it may be seen, whether or not the sum finishes: a sum that failed before our key left costs
nothing, and one that failed afterwards is charged again when it is repeated, with fresh noise. A total that comes from
the journal costs nothing: it was charged when it was opened.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cgd.dp.budget_file import BudgetFile
from cgd.dp.charges import TRAINING, VALIDATION
from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.dp.accountant import Budget, Spent
    from cgd.dp.mechanism import NoisyEncoding
    from cgd.dp.settings import PrivacySettings
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step


class SpentOn(NamedTuple):
    """The charges for one purpose.

    Attributes:
        what: the purpose, such as a step.
        openings: the number of openings.
        mu_squared: their μ² together.
        records: the part of the records that they are about, "training" or "validation".
    """

    what: str
    openings: int
    mu_squared: float
    records: str


class PrivacyLedger:
    """The charges of one training.

    Args:
        settings: the settings, which all members share.
        budget: the file with the budget of these records, over all trainings; needed in a federation.
        training: the name under which the file lists the charges; by default the name of the federation, and in one
            process a new name every time.
        unit: the column that names the unit of privacy, if it is not the record.

    Attributes:
        file: the budget of these records, if there is a file.

    Raises:
        InputError: the budget file cannot be used.
    """

    def __init__(
        self, settings: PrivacySettings, budget: Path | None = None, training: str = "", unit: str = ""
    ) -> None:
        self.settings = settings
        self.file = None if budget is None else BudgetFile(budget, settings.epsilon, settings.delta, unit)
        self._training, self._split, self._begun = training, "", False
        self._budgets: dict[str, Budget] = {}
        self._charged: dict[tuple[str, str], SpentOn] = {}
        # In a federation, the runtime's thread charges, also for a sum that our program no longer waits for.
        self._lock = threading.Lock()

    def spent(self) -> Spent:
        """Return what was charged so far for this training, with all openings: those of the part that spent more.

        In a restarted process, charges of the earlier ones are included from the first sum on.
        """
        with self._lock:
            all_spent = [each.spent() for each in self._budgets.values()] or [self.settings.budget().spent()]
            largest = max(all_spent, key=lambda each: each.mu)
            return largest._replace(openings=self._openings)

    def spent_on(self) -> list[SpentOn]:
        """Return what was charged so far for this training, by purpose."""
        with self._lock:
            return list(self._charged.values())

    def size_for_quorum(self, quorum: int | None) -> PrivacySettings:
        """Let the noise of the sums be enough for a quorum of the members, and return the settings.

        The federation file has the quorum, so a program need not state it.
        """
        self.settings = replace(self.settings, quorum=quorum)
        return self.settings

    def check(self, training: str) -> None:
        """Check that a training of this name fits into the budget of the records, besides what it was charged before.

        Raises:
            InputError: it does not.
        """
        if self.file is not None:
            self.file.check(self.settings.budget().mu_squared, training)

    def begin(self, peers: Peers, slot: int = 0, split: str = "") -> None:
        """Check, before the first sum, that the training fits into the budget; continue that of an earlier process.

        Args:
            peers: the members.
            slot: the number of the optimiser in the program.
            split: names the rule by which a record is in the validation split, if there is one.

        Raises:
            InputError: there are too many colluders, the training does not fit into the budget of the records, or a
                federation needs a budget file.
        """
        self.settings.check_members(len(peers))
        if not self._begun:
            self._split = split
            self._load_charges(peers, slot)
            self.check(self._training)
            self._begun = True

    def check_affordable(self, peers: Peers, mu_squared: float, what: str) -> None:
        """Check, before a sum, that it may still be opened, unless it is replayed.

        Raises:
            BudgetSpentError: the budget of the training is spent.
        """
        if not peers.recovery.is_replay():
            with self._lock:
                self._budget(TRAINING).check(mu_squared, what)

    def check_charged(self, peers: Peers, slot: int, openings: int) -> None:
        """Check that openings which our records were part of are in the budget, before a training continues after them.

        Raises:
            InputError: fewer were charged: this is another budget than that of these records.
        """
        self._load_charges(peers, slot)
        found = self._openings
        if found < openings:
            where = f"{self.file.path} lists" if self.file is not None else "without a budget file, this process has"
            raise InputError(
                f"our records were part of at least {openings} openings of this training, and {where} {found} of "
                f"them under the name {self._training!r}; name the file in which they were charged (and the training, "
                "if it had another name). Without it, take the whole budget as spent"
            )

    def open(
        self,
        peers: Peers,
        values: Any,
        encoding: NoisyEncoding,
        what: str,
        *,
        context: str,
        epoch: int,
        step: Step | None = None,
        records: str = TRAINING,
    ) -> Any:
        """Return the sum of all members' values with noise, after it was charged; see `Peers.private_sum`.

        Args:
            peers: the members.
            values: our sum over records, as `encoding` expects it.
            encoding: the encoding.
            what: the purpose, for messages and the budget file.
            context: what members compare, with the settings.
            epoch: the epoch that the number of members belongs to.
            step: the step of an optimiser.
            records: the part of the records that the sum is about, "training" or "validation".

        Raises:
            RevealError: the budget is spent, or the charge cannot be written.
        """
        if peers.recovery.is_replay() and peers.recovery.took_part():
            self.check_charged(peers, 0 if step is None else step.slot, openings=1)
        charge = partial(self._charge, encoding.mu**2, what, records)
        return peers.private_sum(values, encoding, charge, context=context, step=step, epoch=epoch)

    def _charge(self, mu_squared: float, what: str, records: str) -> None:
        with self._lock:
            if self.file is None:
                self._budget(records).check(mu_squared, what)
                self._add(mu_squared, what, records, self._split)
            else:
                check = partial(self._check_training, self.file, mu_squared, what, records)
                self.file.charge(mu_squared, self._training, what, records, self._split, check)
                self._add_new_charges(self.file)

    def _check_training(self, file: BudgetFile, mu_squared: float, what: str, records: str) -> None:
        """Check that the training may open something, also if another process of it has charged meanwhile."""
        self._add_new_charges(file)
        self._budget(records).check(mu_squared, what)

    def _load_charges(self, peers: Peers, slot: int) -> None:
        """Add what earlier processes of this training have charged."""
        if peers.recovery.keeps_states and self.file is None:
            raise InputError(
                "a training in a federation charges the budget of its records in a file, which later trainings add "
                "to; name one beside the records: Privacy(..., budget='records.budget')"
            )
        alone = f"local training {secrets.token_hex(4)}"
        named = peers.federation + (f", optimiser {slot + 1}" if slot else "")
        self._training = self._training or (named if peers.federation else alone)
        if self.file is not None:
            with self._lock:
                self._add_new_charges(self.file)

    def _add_new_charges(self, file: BudgetFile) -> None:
        for each in file.of_training(self._training)[self._openings :]:
            self._add(each.mu_squared, each.what, each.records, each.split)

    def _add(self, mu_squared: float, what: str, records: str, split: str) -> None:
        for part in (records,) if split == self._split else (TRAINING, VALIDATION):
            self._budget(part).restore(mu_squared, what)
        before = self._charged.get((what, records), SpentOn(what, 0, 0.0, records))
        self._charged[what, records] = SpentOn(what, before.openings + 1, before.mu_squared + mu_squared, records)

    @property
    def _openings(self) -> int:
        return sum(each.openings for each in self._charged.values())

    def _budget(self, records: str) -> Budget:
        if records not in self._budgets:
            self._budgets[records] = self.settings.budget()
        return self._budgets[records]
