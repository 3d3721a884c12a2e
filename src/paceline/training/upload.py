"""Copies tensors from the host to a device without making the host wait."""

from __future__ import annotations

import torch


def uploaded(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the tensor on the device. GPUs copy from pinned memory while the host continues; for
    other memory the host waits.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        tensor = tensor.to(
            dtype or tensor.dtype
        ).pin_memory()  # a tensor that torch converts during the copy is not pinned
    return tensor.to(device, dtype, non_blocking=True)
