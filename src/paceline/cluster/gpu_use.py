"""Work with autograd or fake tensors that must not use the GPUs of this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paceline.base.fork import in_a_fork


def apart_from_cuda(work: Callable[[], Any]) -> Any:
    """Run `work()` and return its result, in a fork if this machine has GPUs.

    The work uses backwards or fake tensors, and its result is a value that `codec.encode` takes.

    Raises:
        PacelineError: the work raised it, or one of its kinds.
        Exception: the work raised it; if a fork did the work, a RuntimeError takes its place.
    """
    from paceline.cluster.accelerators import has_gpus

    if has_gpus():
        return in_a_fork(work)
    start_autograd_without_gpus()
    return work()


@functools.cache
def start_autograd_without_gpus() -> None:
    """Run a backward before fake tensors are used on a machine without GPUs, so that autograd
    starts its threads.

    If torch is built for GPUs and finds none, the mode of fake tensors makes it count GPUs that do
    not exist. If the first backward came after that, it would start threads for those GPUs, and no
    fork of this process could run a backward ("Unable to handle autograd's threading in combination
    with fork-based multiprocessing"). Source: `ensureCUDADeviceGuardSet` in
    c10/core/impl/DeviceGuardImplInterface.cpp, and `Engine::start_device_threads`.
    """
    import torch

    from paceline.cluster.accelerators import has_gpus

    if (torch.version.cuda or torch.version.hip) and not has_gpus():
        torch.ones((), requires_grad=True).backward()
