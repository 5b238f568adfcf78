from __future__ import annotations

import os

# Several processes run at the same time, so each uses one thread; also those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

# No deadlines, because machines differ in speed. Examples are derandomised, so that a failure can be reproduced.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")

torch.set_num_threads(1)
