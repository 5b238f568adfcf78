"""The privacy budget of a data set, in a file that every training on these records adds to.

Openings of several trainings on the same records add up: their μ² are summed, whatever the federation. So the file
belongs to the data set, not to a training, and lies beside it. A charge is on the disk before our self-mask key leaves
this machine: a process that is killed at any moment has charged what others may have opened, and maybe one opening
more.

The file has one line of JSON for the limit, and one for each charge, each with a checksum of itself and of all lines
before. A later line with a limit replaces it. The limit is that of the training that is charged first: an attempt that
failed before leaves none behind. Later, only a decision raises it. So a line that was changed, removed or inserted is
noticed. A last line without an end was cut by a crash while it was written: then the key did not leave, and the line
does not count. What cannot be noticed is an older copy of the file in its place, or another file: keep the file with
the records, and in their backups.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import zlib
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from cgd.dp.accountant import MAX_DRAWS, Budget, epsilon_of
from cgd.dp.charges import TRAINING, VALIDATION, Charge, Charges, Decision
from cgd.errors import BudgetSpentError, InputError, RevealError
from cgd.files import PRIVATE, open_private, write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

FORMAT = "cgd budget 1"
BEGINNING = b'{"format": "cgd budget '


class BudgetFile:
    """The budget of one data set: a limit (ε, δ), and all charges.

    Several processes may use a file at the same time.

    Args:
        path: the file. It is created if it does not exist, readable by its owner alone.
        epsilon: the limit for all trainings together, if nothing was charged or decided before. Otherwise the file
            keeps its own.
        delta: the δ of the limit.
        unit: the column that names the unit of privacy of the trainings, as in [privacy]; empty: every record is one;
            None: limit and unit are those of the file, which must exist.

    Attributes:
        decisions: all higher limits that were decided on.
        unit: the unit of privacy of all charges.

    Raises:
        InputError: the file cannot be read or written, is damaged, or is for another unit.

    Examples:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> budget = BudgetFile(pathlib.Path(folder.name) / "records.budget", epsilon=2.0, delta=1e-5)
        >>> budget.charge(0.1, "five-hospitals", "a step")
        >>> f"{budget.epsilon_spent:.2f} of {budget.epsilon}"
        '1.20 of 2.0'
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, epsilon: float, delta: float, unit: str | None = "") -> None:
        self.path, self.unit, self._own_unit = path, unit or "", unit
        self._charges = Charges()
        self.decisions: list[Decision] = []
        self._size = self._checksum = 0
        self._limit = self._own_limit = self._stored_limit = Budget(epsilon, delta, MAX_DRAWS)
        self._stored_unit = self.unit
        try:
            self._create()
            with _LockedFile(self, writing=True):
                pass
        except OSError as error:
            raise InputError(_unwritable(path, error)) from None

    @property
    def charges(self) -> list[Charge]:
        """All charges, as of the last call of `check` or `charge`."""
        return self._charges.all

    @property
    def unused(self) -> bool:
        """True if nothing was charged or decided: the limit is that of the training that is charged first."""
        return not self.charges and not self.decisions

    @property
    def epsilon(self) -> float:
        """ε of the limit."""
        return self._limit.epsilon

    @property
    def delta(self) -> float:
        """δ of the limit."""
        return self._limit.delta

    @property
    def epsilon_spent(self) -> float:
        """The ε of all charges together, at the δ of the limit."""
        return self._epsilon_of(self._charges.total())

    @property
    def epsilon_left(self) -> float:
        """The largest ε of one more training, at the δ of the limit."""
        return self._epsilon_of(max(Fraction(), Fraction(self._limit.mu_squared) - self._charges.total()))

    def of_training(self, training: str) -> list[Charge]:
        """Return the charges of one training."""
        return [each for each in self.charges if each.training == training]

    def check(self, mu_squared: float, training: str) -> None:
        """Check, before a training begins, that it fits into the budget, besides what it was charged before.

        Args:
            mu_squared: all that the training may use, with what it was charged before.
            training: the training.

        Raises:
            InputError: it does not.
        """
        try:
            with _LockedFile(self, writing=False):
                others = self._charges.total() - self._charges.total(training)
        except OSError as error:
            raise InputError(_unwritable(self.path, error)) from None
        left = Fraction(self._limit.mu_squared) - others
        if Fraction(mu_squared) > left:
            epsilon = self._epsilon_of(max(Fraction(), left))
            needed = self._epsilon_of(others + Fraction(mu_squared))
            raise InputError(
                f"{self._describe()}; {round_down(epsilon)} is left for a training, and this one needs a limit of "
                f"{math.ceil(100 * needed) / 100:g} (trainings add up by μ², not by ε). {REMEDY}"
            )

    def charge(
        self,
        mu_squared: float,
        training: str,
        what: str,
        records: str = TRAINING,
        split: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Charge an opening; see `Charge` for the arguments. Return when the charge is on the disk.

        Args:
            mu_squared: the square of its μ.
            training: the training.
            what: what is opened.
            records: the part of the records that it is about.
            split: names the split.
            check: called when the charges of all other processes are known, and none can be added before this one.
                If it raises, nothing is charged.

        Raises:
            BudgetSpentError: it exceeds the limit; nothing was charged.
            RevealError: it cannot be written; maybe it was charged.
        """
        try:
            with _LockedFile(self, writing=True) as file:
                check()
                if self._charges.total_with(mu_squared, training, split, records) > Fraction(self._limit.mu_squared):
                    raise BudgetSpentError(f"{self._describe()}; {what} is not opened. {REMEDY}")
                if self.unused and self._is_not_stored():
                    self._append(file, self._limit_line(self.epsilon))
                self._append(file, asdict(Charge(mu_squared, training, what, _now(), records, split)))
        except InputError as error:
            raise RevealError(str(error)) from None
        except OSError as error:
            raise RevealError(_unwritable(self.path, error)) from None

    def raise_limit(self, epsilon: float, reason: str = "") -> None:
        """Replace the limit by a higher one: a decision about these records, for all trainings.

        Args:
            epsilon: ε of the new limit.
            reason: why, for those who read the file later.

        Raises:
            InputError: it is not higher, or cannot be promised, or the file cannot be written.
        """
        try:
            with _LockedFile(self, writing=True) as file:
                if not self.epsilon < epsilon < math.inf:
                    raise InputError(
                        f"the limit of {self.path} is epsilon = {self.epsilon:g}; name a higher one, not {epsilon:g}"
                    )
                Budget(epsilon, self.delta, MAX_DRAWS)  # refuses a limit that nobody could read from the file
                decision = Decision(epsilon, _now(), reason)
                self._append(file, {**self._limit_line(epsilon), "decided": asdict(decision)})
                self._limit = self._stored_limit
        except OSError as error:
            raise InputError(_unwritable(self.path, error)) from None

    # The file.

    def load(self, file: BinaryIO) -> None:
        """Read the lines that were added since the last call."""
        if os.fstat(file.fileno()).st_size < max(self._size, 1):
            raise InputError(f"{self.path} was emptied, shortened or replaced, so charges are missing; {RESTORE}")
        file.seek(self._size)
        lines = file.readlines()
        if not self._size and not lines[0].startswith(BEGINNING):
            raise InputError(
                f"{self.path} is not a budget file, or its beginning was changed; name the one beside the records, "
                f"DATA.budget. If this was it, {RESTORE}"
            )
        for line in lines:
            if line.endswith(b"\n"):
                self._add(line)
        if not self._size:
            raise InputError(f"{self.path} has no line with a limit, so charges may be missing; {RESTORE}")
        if self.unused and self._own_unit is not None:
            self._limit, self.unit = self._own_limit, self._own_unit
            return
        self._limit, self.unit = self._stored_limit, self._stored_unit
        if self._own_unit not in (None, self.unit):
            raise InputError(
                f"the charges in {self.path} are for {_units(self.unit)}, and those of this training for "
                f"{_units(self._own_unit)}, which cannot be added; write the same unit in [privacy]. In another file "
                "(--budget), none of what was opened before would count: both limits together are then what may be "
                "disclosed"
            )

    def _create(self) -> None:
        if self.path.exists() or self.path.is_symlink():
            return
        # Written under another name first, and linked: no process ever finds a file without its limit.
        new = self.path.with_name(f".{self.path.name}.{os.urandom(4).hex()}.new")
        write_file(new, self._line(self._limit_line(self.epsilon)), mode=PRIVATE)
        try:
            os.link(new, self.path)
        except FileExistsError:  # another process was faster
            return
        finally:
            new.unlink()
        _flush_folder(self.path)

    def _is_not_stored(self) -> bool:
        stored = self._stored_limit.epsilon, self._stored_limit.delta, self._stored_unit
        return stored != (self.epsilon, self.delta, self.unit)

    def _limit_line(self, epsilon: float) -> dict[str, Any]:
        return {"format": FORMAT, "epsilon": epsilon, "delta": self.delta, "unit": self.unit}

    def _line(self, content: dict[str, Any]) -> bytes:
        text = json.dumps(content).encode()
        return text + b" %08x\n" % zlib.crc32(text, self._checksum)

    def _add(self, line: bytes) -> None:
        try:
            text, checksum = line[:-10], zlib.crc32(line[:-10], self._checksum)
            if line[-10:] != b" %08x\n" % checksum:
                raise ValueError("a line was changed, removed or inserted")
            self._read(json.loads(text))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"{self.path} is damaged ({error}), so it is not known what was opened of these records; {RESTORE}"
            ) from None
        self._size, self._checksum = self._size + len(line), checksum

    def _read(self, content: Any) -> None:
        if not self._size or "format" in content:
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            self._stored_limit = Budget(float(content["epsilon"]), float(content["delta"]), MAX_DRAWS)
            self._stored_unit = str(content["unit"])
            if "decided" in content:
                time, reason = (str(content["decided"][name]) for name in ("time", "reason"))
                self.decisions.append(Decision(self._stored_limit.epsilon, time, reason))
            return
        texts = [str(content[name]) for name in ("training", "what", "time", "records", "split")]
        charge = Charge(float(content["mu_squared"]), *texts)
        if not 0 <= charge.mu_squared < math.inf or charge.records not in (TRAINING, VALIDATION):
            raise ValueError(f"a charge is {charge.mu_squared} for {charge.records} records")
        self._charges.add(charge)

    def _append(self, file: BinaryIO, content: dict[str, Any]) -> None:
        line = self._line(content)
        file.seek(self._size)
        file.truncate()  # a line that was cut by a crash
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())
        self._add(line)

    # Messages.

    def _epsilon_of(self, mu_squared: Fraction) -> float:
        return epsilon_of(math.nextafter(math.sqrt(mu_squared), math.inf), self.delta) if mu_squared else 0.0

    def _describe(self) -> str:
        openings = Counter(each.training for each in self.charges)
        used = ", ".join(f"{training} ({count} openings)" for training, count in openings.items())
        return (
            f"the privacy budget of these records ({self.path}) is epsilon = {self.epsilon:g} at delta = "
            f"{self.delta:g}, of which {self.epsilon_spent:.3g} is spent" + (f", by {used}" if used else "")
        )


REMEDY = (
    "Choose a smaller epsilon for the training, or decide on a higher limit for these records "
    "(`cgd privacy budget FILE --raise EPSILON`): what was opened of them cannot be taken back"
)
RESTORE = "restore it from a copy. Without one, take the whole budget as spent"


class _LockedFile:
    """Open a budget's file, lock it, and read what other processes have added."""

    def __init__(self, budget: BudgetFile, *, writing: bool) -> None:
        self._budget, self._writing = budget, writing

    def __enter__(self) -> BinaryIO:
        flags = os.O_RDWR if self._writing else os.O_RDONLY
        # Without a buffer, so that nothing is written after an error.
        self._file: BinaryIO = os.fdopen(
            open_private(str(self._budget.path), flags), "r+b" if self._writing else "rb", buffering=0
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._budget.load(self._file)
        except BaseException:
            self._file.close()
            raise
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


def round_down(epsilon: float) -> str:
    """Return an ε with three digits that is not larger than it is.

    Examples:
        >>> round_down(0.24386), round_down(0.0)
        ('0.243', '0')
    """
    if epsilon <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.floor(epsilon / unit) * unit:.3g}"


def _flush_folder(path: Path) -> None:
    """Make the name of a new file survive a power failure."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _units(unit: str) -> str:
    return f"all records of one {unit!r}" if unit else "single records"


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"the privacy budget {path} cannot be used ({error.strerror}), and nothing is opened without a record of it; "
        "name a file in a folder that is yours and has room"
    )
