"""A suggestion for the sections `[data]` and `[model]` of a federation file, from one participant's table.

It is a start, for people to look over together: another participant may have categories and missing values that this
one has not. The text goes to all participants, so it holds no more of the table than names of columns, numbers of
different values and, in comments that can be deleted, the classes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_LENGTH, MISSING
from cgd.tabular.columns import MAX_NUMBER, MAX_CATEGORIES, Missing, canonical, is_number
from cgd.tabular.loading import position
from cgd.tabular.readers import open_table

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

MAX_CODES = 8  # whole numbers of so few different values are probably codes
MANY_CATEGORIES = 100
MAX_ODD_TEXTS = 3  # so few texts in a column of numbers probably stand for missing values
MAX_CLASSES = 20  # whole numbers of more different values are predicted as numbers


@dataclass
class Profile:
    """What is known of a column after some batches.

    Attributes:
        rows: how many values were seen, missing ones too.
        present: how many were there.
        numbers: different numbers, up to one more than a category may have values.
        texts: different texts that are no numbers, as many.
        whole: whether all numbers are whole.
        rising: whether every number is above the one before.
        different: whether no value came twice in a batch.
        longest: bytes of the longest text.
    """

    rows: int = 0
    present: int = 0
    numbers: set[float] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    whole: bool = True
    rising: bool = True
    different: bool = True
    longest: int = 0
    _last: float = -np.inf

    def take_in(self, array: Any, missing: Missing) -> None:
        """See some more values."""
        encoded = missing.trimmed(array).dictionary_encode()
        distinct, places = encoded.dictionary.to_pylist(), encoded.indices.drop_null().to_numpy()
        self.rows += len(array)
        self.present += len(places)
        self.different &= len(places) == len(distinct)
        if not distinct:
            return
        try:
            values = encoded.dictionary.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        except pyarrow.ArrowInvalid:
            odd = [text for text in distinct if len(self.texts) > MAX_ODD_TEXTS or not is_number(text)]
            self._see_texts(odd)
            self._see_numbers(np.array([float(text) for text in distinct if text not in set(odd)]))
            self.rising = False
            return
        in_order = np.concatenate([[self._last], values[places]])
        self.rising = self.rising and bool(np.all(np.diff(in_order) > 0))
        self._last = float(in_order[-1])
        self._see_numbers(values)

    def _see_numbers(self, values: Any) -> None:
        self.whole = self.whole and bool(np.all(values == np.floor(values)))
        if len(self.numbers) <= MAX_CATEGORIES:
            self.numbers.update(values[: MAX_CATEGORIES + 1].tolist())

    def _see_texts(self, texts: Sequence[str]) -> None:
        self.longest = max([self.longest, *(len(text.encode()) for text in texts)])
        if len(self.texts) <= MAX_CATEGORIES:
            self.texts.update(texts[: MAX_CATEGORIES + 1])

    @property
    def values(self) -> list[str]:
        """The different values as texts, in order."""
        return [canonical(number) for number in sorted(self.numbers)] + sorted(map(canonical, self.texts))

    @property
    def numeric(self) -> bool:
        """Whether it is a number, or could be if a few texts were taken for missing ones."""
        few = len(self.texts) <= MAX_ODD_TEXTS and len(self.numbers) > MAX_CODES
        finite = all(abs(number) <= MAX_NUMBER for number in self.numbers)
        return bool(self.numbers) and (not self.texts or few) and finite

    @property
    def id_like(self) -> bool:
        """Whether it tells records apart."""
        text = not self.numbers and self.present > MAX_CODES
        return self.different and self.present == self.rows > 2 and (text or (self.whole and self.rising))


def suggest(path: str | os.PathLike[str], label: str) -> str:
    """The text of `[data]` and `[model]` for a table, to be pasted into a federation file.

    Args:
        path: of a CSV or Parquet file.
        label: the column to predict.

    Raises:
        InputError: the file is no table, has a name twice, has no such column, or nothing to predict it from.
    """
    table = open_table(path, [label], MISSING)
    missing = Missing(MISSING)
    positions = {name: position(table, name, label) for name in dict.fromkeys((*table.names, label)) if name}
    profiles = {name: Profile() for name in positions}
    nested: set[str] = set()
    for arrays in table.batches(list(positions.values())):
        for name, array in zip(positions, arrays, strict=True):
            try:
                profiles[name].take_in(array, missing)
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):  # lists, structures, bytes
                nested.add(name)
    target = profiles.pop(label)
    if not target.present:
        raise InputError(f"{table.title}: no row has a label in column {label!r}; name the column to predict")
    lines = [_column(name, each, name in nested) for name, each in profiles.items()]
    if all(line.startswith("#") for line in lines):
        raise InputError(
            f"{table.title} has no column to predict {label!r} from; see what it holds:\n" + "\n".join(lines)
        )
    odd = [text for each in (*profiles.values(), target) if each.numeric for text in sorted(each.texts)]
    return "\n".join([*_data(label, target, odd, profiles), "", "[data.columns]", *lines, "", *MODEL, ""])


MODEL = (
    "[model]",
    'kind = "mlp"       # or "logistic" ("linear" in a regression): no hidden layer',
    "layers = [32]",
    'activation = "relu"',
)


def _data(label: str, target: Profile, odd: Sequence[str], profiles: dict[str, Profile]) -> list[str]:
    regression = target.numeric and (len(target.numbers) > MAX_CLASSES or not target.whole)
    lines = [
        "# A suggestion from one participant's table. The same text goes to all participants: look it over together,",
        "# and delete comments that say more about your table than you like.",
        "[data]",
        f"target = {_text(label)}",
        f'task = "{"regression" if regression else "classification"}"',
    ]
    if not regression and len(target.values) <= MAX_CLASSES:
        lines.append(f"# classes = {_list(target.values)}  # as here; left out: learned by a secure sum")
    if odd:
        texts = list(dict.fromkeys((*MISSING, *odd)))
        more = len(texts) - len(MISSING)
        lines.append(f"missing = {_list(texts)}  # {more} more than usual: texts in columns of numbers")
    ids = [name for name, each in profiles.items() if each.id_like]
    if ids:
        lines.append(f"# id = {_text(ids[0])}  # needed in a grid, where several have parts of the same records")
    return lines


def _column(name: str, profile: Profile, nested: bool) -> str:
    key = _key(name)
    count = len(profile.texts) + len(profile.numbers)
    many = f"more than {MAX_CATEGORIES}" if count > MAX_CATEGORIES else str(count)
    if nested:
        return f"# {key}: left out, its type is no number and no text"
    if not profile.present:
        return f"# {key}: left out, all its values are missing"
    if profile.id_like:
        return f"# {key}: left out, all values differ: an ID?"
    if count == 1:
        return f'# {key} = "category"  # left out, it has one value only'
    if profile.numeric:
        if profile.whole and 2 < count <= MAX_CODES:
            return f'{key} = "category"  # {count} whole numbers: a code? If they count or measure, write "number"'
        return f'{key} = "number"'
    if count > MAX_CATEGORIES or profile.longest > MAX_CATEGORY_LENGTH:
        return f"# {key}: left out, {many} different values of up to {profile.longest} bytes: free text?"
    if count > MANY_CATEGORIES:
        return f'{key} = "category"  # {count} different values, and a feature for each'
    return f'{key} = "category"'


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    # JSON's texts are TOML's, but for one character that TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"
