"""Work that uses autograd or fake tensors, kept from using the GPUs of a machine that has some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paceline.base.fork import in_a_fork


def apart_from_cuda(work: Callable[[], Any]) -> Any:
    """`work()`, which runs backwards or fake tensors and answers in JSON; in a fork if this machine has GPUs.

    Raises:
        PacelineError: the work raised it, or one of its kinds.
        Exception: whatever the work raises; a RuntimeError in its place where a fork did it.
    """
    from paceline.cluster.accelerators import has_gpus

    if has_gpus():
        return in_a_fork(work)
    start_autograd_without_gpus()
    return work()


@functools.cache
def start_autograd_without_gpus() -> None:
    """Have autograd start its threads, one for each GPU, before fake tensors are used on a machine without GPUs.

    Where torch is built for GPUs and finds none, the mode of fake tensors has it count GPUs that are not there. The
    next backward, were it the first, would start threads for those, and no fork of this process could run one
    ("Unable to handle autograd's threading in combination with fork-based multiprocessing"). Source:
    `ensureCUDADeviceGuardSet` in c10/core/impl/DeviceGuardImplInterface.cpp, and `Engine::start_device_threads`.
    """
    import torch

    from paceline.cluster.accelerators import has_gpus

    if (torch.version.cuda or torch.version.hip) and not has_gpus():
        torch.ones((), requires_grad=True).backward()
