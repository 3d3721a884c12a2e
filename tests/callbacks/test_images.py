"""Pictures of arrays, tensors and figures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from paceline.base.errors import UsageError
from paceline.callbacks.images import image_of


class Figure:
    """Draws a red picture, 5 wide and 4 high."""

    def savefig(self, file: io.BytesIO, *, format: str) -> None:
        from PIL import Image

        Image.new("RGB", (5, 4), "red").save(file, format)


@pytest.mark.parametrize(
    ("value", "size", "corner"),
    [
        (np.eye(4, 5, dtype=bool), (5, 4), 255),
        (torch.ones(4, 5, dtype=torch.bfloat16), (5, 4), 255),
        (torch.tensor([[0.5, float("nan")]], dtype=torch.float16), (2, 1), 128),
        (np.full((4, 5, 1), 300), (5, 4), 255),
        (torch.full((3, 4, 5), 7), (5, 4), (7, 7, 7)),
        (np.full((4, 5, 2), 7, np.uint8), (5, 4), (7, 7)),
        (Figure(), (5, 4), (255, 0, 0)),
    ],
)
def test_pictures(value: Any, size: tuple[int, int], corner: Any):
    """Masks are black and white, and floats of any precision lie between 0 and 1."""
    image = image_of(value)
    assert image.size == size and image.getpixel((0, 0)) == corner


@pytest.mark.parametrize("shape", [(8, 9, 7), (0, 4)])
def test_a_shape_that_is_no_picture_is_refused(shape: tuple[int, ...]):
    """With what may be given."""
    with pytest.raises(UsageError, match="must have the shape"):
        image_of(np.zeros(shape))
