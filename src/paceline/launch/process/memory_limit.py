"""Limits a CPU rank to the memory of its device, by the kernel's limit on a process's data (RLIMIT_DATA).

The limit counts private writable memory: heap, large tensors, stacks. It does not count shared memory, such as
libraries. It counts memory when it is requested, not when it is first used. A cgroup would count pages, but needs
rights that a user of a shared machine doesn't have, and kills without a message.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from paceline.base.errors import ClusterError, OutOfMemory
from paceline.cluster.devices import Device
from paceline.launch.process.failure import is_about_memory

# Stacks of threads that start while the limit holds: the checkpoint's writer, those of further process groups and of
# parallel operators. A stack counts with its greatest size and takes next to nothing. Measured: see docs/memory.md.
STACKS_BYTES = 64 * 2**20


@contextmanager
def limited_to(device: Device) -> Iterator[None]:
    """Let this process grow by no more than the limit of its device while the block runs.

    The limit is lifted when the block ends, so that a rank that ran out can still say so.

    Raises:
        OutOfMemory: in place of any error about memory under a limit.
        ClusterError: the kernel does not keep the limit.
    """
    if not device.is_limit:
        yield
        return
    before, highest = resource.getrlimit(resource.RLIMIT_DATA)
    allowed_bytes = psutil.Process().memory_info().data + device.memory_bytes + STACKS_BYTES
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (allowed_bytes if highest < 0 else min(allowed_bytes, highest), highest),
    )
    try:
        _check_kept(allowed_bytes)
        yield
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_DATA, (before, highest))
        if not is_about_memory(error):
            raise
        raise OutOfMemory(
            f"the rank needs more than its limit of {device.memory_bytes / 2**20:,.0f} MiB: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
            hint="a greater --memory, microbatches=M, recompute=full, or more ranks to split the state "
            "over (shard=N, pipeline=N, place=N)",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, highest))


def _check_kept(allowed_bytes: int) -> None:
    with suppress(OSError):
        mmap.mmap(-1, allowed_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        raise ClusterError(
            "this kernel doesn't keep the limit on a process's data (RLIMIT_DATA)",
            hint="leave --memory out, and limit the processes from outside",
        )
