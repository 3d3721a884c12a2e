"""Converts arrays, tensors and figures to PNG files in memory."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import UsageError


@dataclass(frozen=True)
class Image:
    """A picture."""

    data: bytes  # the PNG file
    height: int  # in pixels
    width: int  # in pixels
    channels: int  # 1 to 4


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

    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png")
        data = file.getvalue()
        width, height = struct.unpack(">II", data[16:24])
        return Image(data, height, width, 4)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    pixels = np.asarray(value)
    if pixels.ndim == 3 and pixels.shape[2] > 4 and pixels.shape[0] <= 4:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or not 1 <= pixels.shape[2] <= 4 or not pixels.size:
        raise UsageError(
            "an image must have the shape (height, width), (height, width, channels) or (channels, "
            f"height, width), got {tuple(np.shape(value))}"
        )
    if pixels.dtype.kind == "f":
        pixels = np.nan_to_num(pixels).clip(0, 1) * 255 + 0.5
    pixels = pixels.clip(0, 255).astype(np.uint8)
    height, width, channels = pixels.shape
    return Image(
        _png(pixels.reshape(height, width * channels), width, channels), height, width, channels
    )


def _png(rows: Any, width: int, channels: int) -> bytes:
    """Return rows of bytes as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    color = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), 8, color, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )
