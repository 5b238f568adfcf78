"""CSV files: plain or gzipped, in UTF-8, separated by commas, semicolons, tabs or bars.

Arrow reads them, in blocks, and every field as a text. When it gives up, the file is read again line by line to say
which line is wrong: that is slow, and happens once.
"""

from __future__ import annotations

import csv
import gzip
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.csv

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

DELIMITERS = (",", ";", "\t", "|")
BLOCK_BYTES = 1 << 22  # also the longest line
GZIP = b"\x1f\x8b"


class CommaSeparated:
    """A CSV file with a header.

    Args:
        path: where it is.
        wanted: names that the header should have; they tell delimiters apart that occur in names, too.
        missing: texts that come as null.

    Raises:
        InputError: it has no header, is not in UTF-8, or has no rows.
    """

    def __init__(self, path: Path, wanted: Collection[str], missing: Collection[str]) -> None:
        self.title = str(path)
        self._path, self._missing = path, tuple(missing)
        with path.open("rb") as file:
            self._gzipped = file.read(2) == GZIP
        headers = [(delimiter, self._header(delimiter)) for delimiter in DELIMITERS]
        # The first of those that are equally good: commas.
        self._delimiter, self.names = max(headers, key=lambda pair: (len(set(wanted) & set(pair[1])), len(pair[1])))

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        # Columns go by their position: names may come twice, in columns that nobody reads.
        labels = [str(position) for position in range(len(self.names))]
        include = [str(position) for position in positions]
        try:
            with self._bytes() as stream:
                reader = pyarrow.csv.open_csv(
                    stream,
                    pyarrow.csv.ReadOptions(column_names=labels, skip_rows_after_names=1, block_size=BLOCK_BYTES),
                    pyarrow.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                    pyarrow.csv.ConvertOptions(
                        column_types=dict.fromkeys(include, pyarrow.string()),
                        include_columns=include,
                        null_values=self._missing,
                        strings_can_be_null=True,
                    ),
                )
                for batch in reader:
                    yield batch.columns
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            self._find_fault()
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.title} cannot be read as CSV ({reason}); export it again") from None

    def place(self, row: int) -> str:
        """See `Table`."""
        with self._lines() as lines:
            rows = (line for line, fields in self._rows(lines) if fields)
            for number, line in enumerate(rows, start=-1):  # the header is before row 0
                if number == row:
                    return f"line {line}"
        return f"row {row + 1}"

    def _header(self, delimiter: str) -> tuple[str, ...]:
        with self._lines() as lines:
            rows = (fields for _, fields in self._rows(lines, delimiter) if fields)
            header = next(rows, None)
            if header is None:
                raise InputError(f"{self.title} has blank lines only; a CSV file has a header and a row per record")
            if any(_undecoded(name) for name in header):
                raise self._not_utf8(1)
            if next(rows, None) is None:
                raise InputError(f"{self.title} has a header and no rows; export it with its records")
        return tuple(name.strip() for name in header)

    def _find_fault(self) -> None:
        """Read line by line until a line is wrong, and say so."""
        with self._lines() as lines:
            for line, fields in self._rows(lines):
                if fields and len(fields) != len(self.names):
                    unclosed = "\n" in "".join(fields)
                    raise InputError(
                        f"{self.title}, line {line}: it has {_fields(len(fields))}, and the header {len(self.names)}; "
                        + ("see whether a quote is not closed" if unclosed else "mend it: is a text with a delimiter")
                        + ("" if unclosed else f" ({self._delimiter!r}) not in quotes?")
                    )
                if any(_undecoded(field) for field in fields):
                    raise self._not_utf8(line)
                if sum(map(len, fields)) > BLOCK_BYTES:
                    raise self._too_long(line)

    def _rows(self, lines: Iterator[str], delimiter: str | None = None) -> Iterator[tuple[int, list[str]]]:
        """Every row, blank ones too, and the line where it begins, from 1."""
        reader = csv.reader(lines, delimiter=delimiter or self._delimiter)
        while True:
            line = reader.line_num + 1
            try:
                yield line, next(reader)
            except StopIteration:
                return
            except csv.Error:
                raise self._too_long(line) from None
            except (OSError, EOFError) as error:
                raise InputError(f"{self.title} is damaged ({error}); copy or export it again") from None

    @contextmanager
    def _bytes(self) -> Iterator[Any]:
        with pyarrow.input_stream(str(self._path), compression="gzip" if self._gzipped else None) as stream:
            yield stream

    @contextmanager
    def _lines(self) -> Iterator[Iterator[str]]:
        opening = gzip.open if self._gzipped else open
        with opening(self._path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text

    def _not_utf8(self, line: int) -> InputError:
        return InputError(
            f"{self.title}, line {line}: it is not in UTF-8 (in Latin-1 or Windows-1252, perhaps); save it as CSV "
            "(UTF-8)"
        )

    def _too_long(self, line: int) -> InputError:
        return InputError(f"{self.title}, line {line}: a field does not end; see whether a quote is not closed")


def _undecoded(text: str) -> bool:
    """Whether bytes were left over that are no UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _fields(count: int) -> str:
    return f"{count} field{'' if count == 1 else 's'}"
