"""Copies from the host to a device, without the host waiting for them."""

from __future__ import annotations

import torch


def uploaded(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The tensor on the device. GPUs copy from pinned memory while the host goes on; other memory they wait for."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        tensor = tensor.to(
            dtype or tensor.dtype
        ).pin_memory()  # what torch converts itself on its way is not pinned
    return tensor.to(device, dtype, non_blocking=True)
