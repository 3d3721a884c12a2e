"""Converts arrays, tensors and figures to pictures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image


def is_picture(value: Any) -> bool:
    """Whether a logged value is a picture: a figure, or an array of two or three dims."""
    return hasattr(value, "savefig") or getattr(value, "ndim", 0) in (2, 3)


def image_of(value: Any) -> Image:
    """Return a figure, an array or a tensor as a picture.

    An array or tensor has the shape (height, width), (height, width, channels) or (channels,
    height, width). Floats lie between 0 and 1, whole numbers between 0 and 255.

    Raises:
        UsageError: it has another shape.
    """
    import numpy as np
    import PIL.Image

    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png")
        return PIL.Image.open(file)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # NumPy has no bfloat16
    pixels = np.asarray(value)
    if pixels.ndim == 3 and pixels.shape[2] > 4 and pixels.shape[0] <= 4:
        pixels = pixels.transpose(1, 2, 0)
    if not pixels.size or (pixels.ndim == 3 and pixels.shape[2] > 4):
        raise UsageError(
            "an image must have the shape (height, width), (height, width, channels) or (channels, "
            f"height, width), got {tuple(np.shape(value))}"
        )
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype.kind in "bf":
        pixels = np.nan_to_num(pixels.astype(float)).clip(0, 1) * 255 + 0.5
    return PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
