"""Tables on disk or in memory, read in batches of Arrow arrays, whatever their format.

A table has a header, yields the requested columns batch by batch, and returns the place of a row for messages. At most
one batch of a file is in memory. A file that is not a table raises `InputError`.

CSV files are plain or gzipped, in UTF-8, separated by commas, semicolons, tabs or bars. Arrow reads the file in blocks,
every field as text. If Arrow fails, the file is read again line by line, to report the line that is wrong; this is slow
and happens once. Arrow accepts a quote that is never closed: the text up to the next quote, or the rest of the file,
would become one field, and its records would be lost silently. Therefore the characters beside every quote are checked
(`cgd.tabular.quotes`), and the file is read again if a quote is not where a field begins or ends.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow
import pyarrow.csv

from cgd.errors import InputError
from cgd.tabular.arrow_tables import ParquetTable, open_file
from cgd.tabular.quotes import QuoteChecker

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Sequence
    from typing import TextIO


DELIMITERS = (",", ";", "\t", "|")
BLOCK_BYTES = 1 << 22  # also the maximum length of a line
GZIP = b"\x1f\x8b"
_DELIMITER_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE | re.DOTALL)


class CsvTable:
    """A CSV file with a header.

    Args:
        path: the file.
        wanted: names expected in the header; they decide between delimiters that also occur in names.
        missing: texts to read as null.

    Raises:
        InputError: the file has no header, is not in UTF-8, or has no rows.
    """

    def __init__(self, path: Path, wanted: Collection[str], missing: Collection[str]) -> None:
        self.title = str(path)
        self._path, self._missing = path, tuple(missing)
        with path.open("rb") as file:
            self._gzipped = file.read(2) == GZIP
        self._stated, self._preamble_lines = "", 0
        header, self._header_lines = self._header()
        try:
            delimiters = self._stated or DELIMITERS
            splits = [(delimiter, tuple(_split(header, delimiter))) for delimiter in delimiters]
        except csv.Error:
            raise self._too_long(self._header_lines) from None
        # `max` returns the first of equally good delimiters: the comma.
        self._delimiter, self.names = max(splits, key=lambda pair: (len(set(wanted) & set(pair[1])), len(pair[1])))

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        # By position, because columns that are not read may share a name.
        labels = [str(position) for position in range(len(self.names))]
        include = [str(position) for position in positions]
        try:
            regular = self._has_regular_quotes()
            with self._bytes() as stream:
                # Not a file object of Python: Arrow reads ahead in threads, which abort the process if they call Python
                # when it ends.
                reader = pyarrow.csv.open_csv(
                    stream,
                    pyarrow.csv.ReadOptions(column_names=labels, skip_rows=self._header_lines, block_size=BLOCK_BYTES),
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
                if not regular:
                    self._find_open_quote()
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            self._find_fault()
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.title} cannot be read as CSV ({reason}); export it again") from None

    def locate(self, row: int) -> str:
        """See `Table`."""
        return self.locate_all([row])[0]

    def locate_all(self, rows: Sequence[int]) -> list[str]:
        """See `Table`."""
        wanted, found = set(rows), dict[int, str]()
        with self._lines() as lines:
            numbered = (line for line, fields in self._rows(lines) if fields)
            for number, line in enumerate(numbered, start=-1):  # the header is before row 0
                if number in wanted:
                    found[number] = f"line {line}"
                if len(found) == len(wanted):
                    break
        return [found.get(row, f"row {row + 1}") for row in rows]

    def remark(self, position: int) -> str:  # noqa: ARG002
        """See `Table`."""
        return ""

    def _header(self) -> tuple[str, int]:
        """Return the header, and the number of lines up to its end: lines before it count, too.

        A line `sep=;` before it, as Excel reads it, states the delimiter.
        """
        try:
            with self._lines() as lines:
                header, count, quoted = "", 0, False
                for line in lines:
                    header += line if header or line.strip() else ""
                    count += 1
                    if header == line and not self._stated and (stated := _DELIMITER_LINE.fullmatch(line)):
                        self._stated, self._preamble_lines, header = stated[1], count, ""
                        continue
                    quoted = _in_quotes(line, quoted)
                    if len(header) > BLOCK_BYTES:
                        raise self._too_long(1)
                    if header and not quoted:
                        break
                rows = any(line.strip() for line in lines)
        except csv.Error:
            raise self._too_long(count + 1) from None
        except (OSError, EOFError, zlib.error) as error:
            raise self._damaged(error) from None
        if self._stated and self._stated not in DELIMITERS:
            raise InputError(
                f"{self.title}, line {self._preamble_lines}: it states that {self._stated!r} separates the fields; "
                "export it with commas, semicolons, tabs or vertical bars"
            )
        if not header:
            raise InputError(f"{self.title} has blank lines only; a CSV file needs a header and a row for every record")
        if _undecoded(header):
            raise self._not_utf8(1)
        if not rows:
            raise InputError(f"{self.title} has a header and no rows; export it with its records")
        return header, count

    def _find_fault(self) -> None:
        """Raise InputError for the first wrong line, if there is one."""
        with self._lines() as lines:
            for number, (line, fields) in enumerate(self._rows(lines)):
                if fields and len(fields) != len(self.names):
                    raise InputError(
                        f"{self.title}, line {line}: it has {_fields(len(fields))}, but the header has "
                        f"{len(self.names)}; {self._remedy(fields, first=number == 1)}"
                    )
                if any(_undecoded(field) for field in fields):
                    raise self._not_utf8(line)
                if sum(map(len, fields)) > BLOCK_BYTES:
                    raise self._too_long(line)

    def _remedy(self, fields: Sequence[str], *, first: bool) -> str:
        """Return what to do about a line, or the first of all lines, with another number of fields than the header."""
        delimiter, more = f"a delimiter ({self._delimiter!r})", len(fields) - len(self.names)
        if "\n" in "".join(fields):
            return "check whether a quote is not closed"
        if first and more == 1 and not fields[-1]:
            return (
                f"the line ends with {delimiter}, and the header does not: add one to the header, too, or remove those "
                "of the lines"
            )
        if first and more == -1 and not self.names[-1]:
            return f"the header ends with {delimiter}, and the line does not: remove that of the header"
        return f"correct it: is a text with {delimiter} not in quotes?"

    def _find_open_quote(self) -> None:
        """Raise InputError for a quote that is not closed where its field ends; one within a text does not open any.

        Text behind a closing quote is allowed if the field is on one line: then no records are lost.
        """
        with self._lines() as lines:
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if reader.line_num > line or "expected after" not in str(error):
                        raise self._too_long(line) from None

    def _rows(self, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield every row from the header on, also blank ones, with the line where it begins, from 1."""
        reader = csv.reader(islice(lines, self._preamble_lines, None), delimiter=self._delimiter)
        while True:
            line = self._preamble_lines + reader.line_num + 1
            try:
                yield line, next(reader)
            except StopIteration:
                return
            except csv.Error:
                raise self._too_long(line) from None
            except (OSError, EOFError, zlib.error) as error:
                raise self._damaged(error) from None

    @contextmanager
    def _bytes(self) -> Iterator[Any]:
        with open_file(self._path) as file:
            yield pyarrow.CompressedInputStream(file, "gzip") if self._gzipped else file

    def _has_regular_quotes(self) -> bool:
        checker = QuoteChecker(self._delimiter)
        with self._bytes() as stream:
            while block := stream.read(BLOCK_BYTES):
                checker.add(block)
        return checker.regular()

    @contextmanager
    def _lines(self) -> Iterator[Iterator[str]]:
        opening = gzip.open if self._gzipped else open
        with opening(self._path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield _limited_lines(text)

    def _not_utf8(self, line: int) -> InputError:
        return InputError(
            f"{self.title}, line {line}: it is not in UTF-8 (perhaps in Latin-1 or Windows-1252); save it as CSV "
            "(UTF-8)"
        )

    def _damaged(self, error: Exception) -> InputError:
        return InputError(f"{self.title} is damaged ({error}); copy or export it again")

    def _too_long(self, line: int) -> InputError:
        return InputError(f"{self.title}, line {line}: a quote is not closed, or a field is too long; correct it there")


def _limited_lines(text: TextIO) -> Iterator[str]:
    """Yield the lines of a text; of a longer one than `BLOCK_BYTES`, raise csv.Error, before it is in memory."""
    while line := text.readline(BLOCK_BYTES + 1):
        if len(line) > BLOCK_BYTES:
            raise csv.Error("line too long")
        yield line


def _in_quotes(line: str, quoted: bool) -> bool:
    """Return whether a text in quotes continues after a line; a quote within a text without quotes opens none."""
    closed = -1
    for found in re.finditer('"', line):
        place = found.start()
        if quoted:
            quoted, closed = False, place
        else:  # a double quote is a closing one and an opening one
            quoted = place in (0, closed + 1) or line[place - 1] in DELIMITERS
    return quoted


def _split(header: str, delimiter: str) -> list[str]:
    lines = io.StringIO(header, newline="")  # unlike splitlines, does not split at a form feed or U+2028
    fields = next(csv.reader(lines, delimiter=delimiter))
    return [name.strip() for name in fields]


def _undecoded(text: str) -> bool:
    """Return whether the text has bytes that are not UTF-8, as `surrogateescape` keeps them."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _fields(count: int) -> str:
    return f"{count} field{'' if count == 1 else 's'}"


# Common kinds of files by their first bytes.
PARQUET = b"PAR1"
UNSUPPORTED = {
    b"PK\x03\x04": "a zip archive, and no Excel workbook (.xlsx); save the sheet as .xlsx or CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook, or one with a password; save it as .xlsx without a password, or as "
    "CSV (UTF-8)",
    b"\xff\xfe": "text in UTF-16; save it as CSV (UTF-8)",
    b"\xfe\xff": "text in UTF-16; save it as CSV (UTF-8)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it, or use gzip",
    b"BZh": "compressed by bzip2; decompress it, or use gzip",
    b"\xfd7zXZ": "compressed by xz; decompress it, or use gzip",
    b"ARROW1": "an Arrow file; save it as Parquet or CSV",
}


HEAD_BYTES = 1024
# Files of cgd. No message quotes them: one holds a secret.
OWN_FILES = {
    rb"^# The private keys of |(?m:^secret = \")": "a private key file of cgd",
    rb"^# The public key of |^\[\[participants\]\]": "a public key file of cgd",
    rb"(?s)^.{5}\0\0\0\{": "a model of cgd, or another file of tensors",  # safetensors: the header's length, the header
}


class Table(Protocol):
    """A table that is read batch by batch.

    Attributes:
        title: the table's name in messages.
        names: the header.
    """

    title: str
    names: tuple[str, ...]

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """Yield Arrow arrays of the columns at these positions of the header, some rows at a time."""

    def locate(self, row: int) -> str:
        """Return the place of a row, counted from 0, such as "line 17"."""

    def locate_all(self, rows: Sequence[int]) -> list[str]:
        """Return the places of many rows; a file is read once for all of them."""

    def remark(self, position: int) -> str:
        """Return what the user should know about how the values of a column are written; mostly nothing."""


def open_table(path: str | os.PathLike[str], wanted: Collection[str], missing: Collection[str]) -> Table:
    """Open a CSV file (gzipped or not) or a Parquet file.

    Args:
        path: the file.
        wanted: names expected in the header; they help to recognise the delimiter.
        missing: texts of a CSV file to read as null.

    Raises:
        InputError: the file does not exist, or is not a table.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # it is opened several times
        raise InputError(f"{path} is a pipe or a device; name a CSV or Parquet file")
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        fact = "is a folder" if path.is_dir() else f"cannot be read ({error.strerror})"
        raise InputError(f"{path} {fact}; name a CSV or Parquet file") from None
    if not head:
        raise InputError(
            f"{path} is empty; name a CSV file with a header and a row for every record, or a Parquet file"
        )
    if head.startswith(PARQUET):
        return ParquetTable(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        raise InputError(f"{path} is not a Parquet file, although its name says so; export it again")
    for magic, description in UNSUPPORTED.items():
        if head.startswith(magic):
            raise InputError(f"{path} is {description}")
    for pattern, description in OWN_FILES.items():
        if re.search(pattern, head):
            raise InputError(f"{path} is {description}; name a CSV or Parquet file with your records")
    return CsvTable(path, wanted, missing)
