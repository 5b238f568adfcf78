from __future__ import annotations

import torch
from hypothesis import settings

# No deadlines, because machines differ in speed. Examples are derandomised, so that a failure can be reproduced.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")

torch.set_num_threads(1)
