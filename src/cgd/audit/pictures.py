"""Records as pictures that a person can look at: small grey images in a row, every pixel a clean square."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_IMAGES = 8
"""At most so many records in a picture: more, and on a telephone nobody could see any."""
SIDE = 96
"""About the size of one record, in pixels of the picture."""


def strip(images: torch.Tensor) -> bytes:
    """The first few images of a stack side by side, as a PNG. The gaps are transparent: any page can be behind it.

    Args:
        images: grey ones in 0…1, in a stack of N × height × width.
    """
    import numpy as np
    from PIL import Image

    shown = images[:MAX_IMAGES].detach().cpu().float().nan_to_num(0.0).clamp(0, 1)
    scale = max(1, SIDE // max(shown.shape[1:]))
    # Repeated, not interpolated: what was recovered is shown as it is, without smoothing.
    grey = (shown * 255).round().numpy().astype(np.uint8).repeat(scale, 1).repeat(scale, 2)
    count, height, width = grey.shape
    gap = max(2, scale // 2)
    canvas = np.zeros((height, count * (width + gap) - gap, 2), dtype=np.uint8)
    for place, each in enumerate(grey):
        canvas[:, place * (width + gap) : place * (width + gap) + width] = np.stack([each, np.full_like(each, 255)], -1)
    content = io.BytesIO()
    Image.fromarray(canvas).save(content, format="PNG", optimize=True)
    return content.getvalue()
