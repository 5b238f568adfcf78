"""Values of Arrow arrays of any type, for columns; errors of Arrow become an `InputError` that names the column."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt


def distinct_values(array: Any, name: str, title: str) -> tuple[list[Any], npt.NDArray[Any]]:
    """Return the distinct values of an array, and each row's position among them; −1 for null."""
    with conversion(name, title):
        return _encoded(array, name, title)


def _encoded(array: Any, name: str, title: str) -> tuple[list[Any], npt.NDArray[Any]]:
    array, kind, types = decoded(array), decoded(array).type, pyarrow.types
    plain = is_text(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    if types.is_floating(kind):
        array = array.cast(pyarrow.float64())
    elif types.is_temporal(kind) or types.is_null(kind):
        array = array.cast(pyarrow.string())
    elif not plain:
        raise InputError(
            f"{title}: column {name!r} is of type {kind}, which is not a category; {nested_remedy(kind)}, or leave the "
            "column out"
        )
    encoded = array.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()


@contextmanager
def conversion(name: str, title: str) -> Iterator[None]:
    """Turn errors of Arrow into an InputError that names the column."""
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"{title}: column {name!r} cannot be converted ({str(error).partition(chr(10))[0]}); export it again as "
            "text in UTF-8 or as numbers, or leave the column out"
        ) from None


def decoded(array: Any) -> Any:
    """Return an array without a dictionary."""
    return array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array


def is_text(kind: Any) -> bool:
    """Return whether a type of Arrow is one of its types of text."""
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def nested_remedy(kind: Any) -> str:
    """Return what to do with a column of a type that is neither a number nor a text.

    Examples:
        >>> nested_remedy(pyarrow.struct({"value": pyarrow.float64()}))
        'export each of its fields as a column, as `flatten` of an Arrow table does'
    """
    types = pyarrow.types
    if types.is_struct(kind):
        return "export each of its fields as a column, as `flatten` of an Arrow table does"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "export each element that you need as a column, or their number, mean or largest value"
    if types.is_map(kind):
        return "export the value of each key that you need as a column"
    return "export it as text or as numbers"
