"""Makes torch.cuda's Python side believe in GPUs: its C symbols are replaced, and say which process touched them.

Nothing of torch/cuda is replaced but what lies in C, so that a process that would begin to use CUDA does so here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from paceline.base.fork import ask_forks_about_cuda

_DRIVER = "/dev/nvidiactl"


@contextmanager
def stubbed_cuda(count: int = 2) -> Iterator[list[str]]:
    """Yields what this process did with CUDA, in words; forks have lists of their own."""
    touched: list[str] = []
    parent = os.getpid()

    def note(event: str) -> None:
        if os.getpid() == parent:
            touched.append(event)

    def counted() -> int:
        note("counted devices")
        return count

    exists = Path.exists
    replaced: list[Any] = [
        patch.object(torch._C, "_cuda_getDeviceCount", counted, create=True),
        patch.object(torch._C, "_cuda_init", lambda: note("initialised"), create=True),
        patch.object(
            torch._C,
            "_cuda_isInBadFork",
            lambda: bool(touched) and os.getpid() != parent,
            create=True,
        ),
        patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True),
        patch.object(
            torch._C, "_cuda_setDevice", lambda index: torch.cuda._lazy_init(), create=True
        ),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
        patch.object(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, create=True),
        patch.object(torch.cuda, "_is_compiled", lambda: True),
        patch.object(torch.cuda, "_cudart", object()),
        patch.object(torch.cuda, "_device_count_nvml", lambda: -1),
        patch.object(torch.cuda, "_queued_calls", []),
        patch.object(torch.cuda, "_initialized", False),
        patch.object(
            torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(count))
        ),
        # What this process asks its forks from the first job on: set back in the end.
        *(
            patch.object(torch.cuda, name, getattr(torch.cuda, name))
            for name in (
                "is_available",
                "device_count",
                "current_device",
                "get_device_capability",
                "get_device_name",
                "is_bf16_supported",
                "get_device_properties",
            )
        ),
        patch.object(
            torch.accelerator, "current_accelerator", torch.accelerator.current_accelerator
        ),
        patch.object(
            torch.cuda,
            "_get_device_properties",
            lambda index: SimpleNamespace(
                total_memory=80 * 2**30, name="Stub", major=9, minor=0, multi_processor_count=132
            ),
            create=True,
        ),
        patch.object(
            Path, "exists", lambda self, **options: str(self) == _DRIVER or exists(self, **options)
        ),
    ]
    for replacement in replaced:
        replacement.start()
    ask_forks_about_cuda.cache_clear()
    try:
        yield touched
    finally:
        for replacement in reversed(replaced):
            replacement.stop()
        ask_forks_about_cuda.cache_clear()
