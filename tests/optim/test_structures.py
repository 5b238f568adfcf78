from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

from cgd.optim.structures import leaves, map_leaves


@dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: Any = field(default=2, init=False)


class Named(OrderedDict[str, Any]):
    pass


def test_leaves_of_nested_structures() -> None:
    value: list[Any] = [Point((1, {"a": 3})), Named(b=4), defaultdict(int, c=5), None, "text", Point]
    assert leaves(value) == [1, 3, 2, 4, 5, None, "text", Point]
    changed = map_leaves(lambda leaf: leaf * 10 if isinstance(leaf, int) else leaf, value)
    assert (changed[0].x, changed[0].y, changed[1], changed[2]["c"]) == ((10, {"a": 30}), 20, {"b": 40}, 50)
    assert type(changed[1]) is Named
    assert (value[0].x, value[0].y, value[1]) == ((1, {"a": 3}), 2, {"b": 4})
