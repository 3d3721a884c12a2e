"""Vectors as fewer bytes: bf16, and int8 with a scale a block."""

from __future__ import annotations

import torch

from paceline.strategies.compress.size import BLOCK, coded_bytes

_STEPS = 127  # of int8 on either side of zero


def encode(form: str, values: torch.Tensor) -> torch.Tensor:
    """The bytes (uint8) of a vector.

    Args:
        form: "bf16" or "int8".
        values: 1-d floating-point, a multiple of `BLOCK` long for int8. Each is off by at most half a unit of
            bfloat16's last place, or by 1/254 of the largest of its block. A block with a value that is not finite
            comes back without finite values.
    """
    if form == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).float() / _STEPS
    steps = torch.where(scales > 0, blocks / scales, 0).nan_to_num_().round_().clamp_(-_STEPS, _STEPS)
    return torch.cat([steps.to(torch.int8).view(torch.uint8).flatten(), scales.flatten().view(torch.uint8)])


def decode(form: str, coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vector that `encode` was given, rounded, as `dtype`. coded: 1-d uint8 from a multiple of 4 bytes on."""
    if form == "bf16":
        return coded.view(torch.bfloat16).to(dtype)
    elements = len(coded) * BLOCK // coded_bytes(form, BLOCK)
    steps, scales = coded[:elements].view(torch.int8), coded[elements:].view(torch.float32)
    return (steps.view(-1, BLOCK).to(dtype) * scales.to(dtype).unsqueeze(1)).flatten()
