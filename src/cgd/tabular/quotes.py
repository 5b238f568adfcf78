"""Check the quotes of a CSV file while it is read, without parsing it: a block of bytes takes some milliseconds.

In a regular file, every quoted field begins behind a delimiter or a line end and ends before one, and a quote within
it is doubled. So the quotes are opening and closing ones in turn, and the two quotes of a double one are a closing and
an opening one beside each other. A file with other quotes may be valid, and must be read by a strict parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

QUOTE = b'"'
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class QuoteChecker:
    """Check the quotes of a CSV file in UTF-8, block by block.

    Args:
        delimiter: its delimiter.
    """

    def __init__(self, delimiter: str) -> None:
        self._beside: npt.NDArray[np.bool_] = np.zeros(256, dtype=np.bool_)  # what may be beside a quote, outside
        self._beside[list(b"\r\n" + QUOTE + delimiter.encode())] = True
        self._last = b"\n"  # the last byte, whose next one is not known yet, and the byte before it
        self._quotes, self._regular = 0, True

    def add(self, data: bytes) -> None:
        """Check the next bytes."""
        first = len(self._last) == 1
        self._check(data.removeprefix(BYTE_ORDER_MARK) if first else data)

    def regular(self) -> bool:
        """Return whether all quotes are regular, after the whole file was read."""
        self._check(b"\n")
        return self._regular and self._quotes % 2 == 0

    def _check(self, data: bytes) -> None:
        data = self._last + data
        self._last = data[-2:]
        if not self._regular or QUOTE not in data:
            return
        octets = np.frombuffer(data, dtype=np.uint8)
        places = 1 + np.flatnonzero(octets[1:-1] == ord(QUOTE))
        opening, closing = places[self._quotes % 2 :: 2], places[1 - self._quotes % 2 :: 2]
        self._regular = bool(self._beside[octets[opening - 1]].all() and self._beside[octets[closing + 1]].all())
        self._quotes += len(places)
