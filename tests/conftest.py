from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

# Several processes run at the same time, so torch uses one thread in each; also in those that tests start. Torch is not
# imported here, because the process that only starts others needs a second for that.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadlines, because machines differ in speed. Examples are derandomised, so that a failure can be reproduced.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the objects of modules and collected tests, about a million, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
