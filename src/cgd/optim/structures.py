"""Tensors in the outputs of models: in tuples, lists, mappings, dataclasses, and what is registered with torch."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable


def leaves(value: Any) -> list[Any]:
    """Return everything in a structure that is not a known structure itself, in a fixed order."""
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, value)  # type: ignore[func-returns-value]
    return found


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of a structure in which a function has replaced every leaf.

    Examples:
        >>> map_leaves(lambda leaf: leaf + 1, {"a": 1, "b": [2, (3,)]})
        {'a': 2, 'b': [3, (4,)]}
    """
    return pytree.tree_map(lambda leaf: _map_object(function, leaf), value)


def _map_object(function: Callable[[Any], Any], value: Any) -> Any:
    """Map a dataclass or a kind of dict that torch does not know; the outputs of many libraries are both."""
    if isinstance(value, (torch.Tensor, type)) or not (dataclasses.is_dataclass(value) or isinstance(value, dict)):
        return function(value)
    copied: Any = copy.copy(value)
    names: set[Any] = set()
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
        for name in sorted(names):
            mapped = map_leaves(function, getattr(value, name))
            try:
                setattr(copied, name, mapped)
            except dataclasses.FrozenInstanceError:
                object.__setattr__(copied, name, mapped)
    if isinstance(value, dict):
        for key, each in value.items():
            # The item of a field is the field's value, of which there must not be two copies.
            copied[key] = getattr(copied, key) if key in names else map_leaves(function, each)
    return copied
