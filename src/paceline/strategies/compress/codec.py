"""Codes for vectors in fewer bytes: bf16, and int8 with a scale per block."""

from __future__ import annotations

import torch

from paceline.strategies.compress.size import BLOCK, coded_bytes

_STEPS = 127  # int8 values on either side of zero


def encode(form: str, values: torch.Tensor) -> torch.Tensor:
    """Encode vectors as bytes (uint8), each vector by itself.

    A decoded value differs by at most half a unit of bfloat16's last place, or by 1/254 of the
    largest value of its block. A block with a value that is not finite decodes to no finite values.

    Args:
        form: "bf16" or "int8".
        values: (..., elements), floating-point. For int8, the number of elements is a multiple of
            `BLOCK`.
    """
    if form == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).float() / _STEPS
    # 0 / 0 occurs in a block of zeros.
    steps = (blocks / scales).nan_to_num_().round_().clamp_(-_STEPS, _STEPS)
    return torch.cat(
        [steps.to(torch.int8).view(torch.uint8).flatten(-2), scales.view(torch.uint8).flatten(-2)],
        -1,
    )


def decode(form: str, coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode the bytes of `encode` to rounded vectors (..., elements) of `dtype`.

    coded: (..., bytes), uint8. Each vector starts at a multiple of 4 bytes.
    """
    if form == "bf16":
        return coded.view(torch.bfloat16).to(dtype)
    elements = coded.shape[-1] * BLOCK // coded_bytes(form, BLOCK)
    steps = coded[..., :elements].view(torch.int8).unflatten(-1, (-1, BLOCK))
    scales = coded[..., elements:].view(torch.float32).unsqueeze(-1)
    return (steps.to(dtype) * scales.to(dtype)).flatten(-2)
