from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

# Several processes run at the same time, so each uses one thread; also those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadlines, because machines differ in speed. Examples are derandomised, so that a failure can be reproduced.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")

torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the millions of objects of modules and collected tests from garbage collection, which examines all others."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
