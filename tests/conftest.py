from __future__ import annotations

import torch
from hypothesis import settings

# The machine's speed is no property of the code: no deadlines. CI runs are repeatable, and print what fails.
settings.register_profile("cgd", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("cgd")

torch.set_num_threads(1)
