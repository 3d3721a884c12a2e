"""Memory that the ranks of a group map together, where they are on one host."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import NamedTuple

import torch
import torch.distributed as dist

HEADER_BYTES = (
    4096  # of each rank's memory; a random mark comes first in it, and is not to be written over
)
MARK_BYTES = 64


class SharedMemory(NamedTuple):
    """Each rank's memory, as it is mapped here, and its process."""

    mappings: list[mmap.mmap]
    processes: list[int]


def shared_memory(num_bytes: int, group: dist.ProcessGroup | None) -> SharedMemory | None:
    """So many bytes of each rank, zeros at first; None if a rank can't map another's. Collective.

    The memory has no name in a file system, so nothing is left of it after a kill, and a container's small /dev/shm
    is no limit. A rank knows another's by a random mark: the same process number may exist on two hosts.
    """
    mark = secrets.randbits(62)
    descriptor = _create(num_bytes, mark)
    addresses = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(
        addresses,
        torch.tensor([os.getpid(), -1 if descriptor is None else descriptor, mark]),
        group=group,
    )
    maps = [_map(*map(int, address), num_bytes=num_bytes) for address in addresses]
    missing = torch.tensor([float(any(mapping is None for mapping in maps))])
    dist.all_reduce(missing, group=group)  # also: nobody closes before all have mapped
    if descriptor is not None:
        os.close(descriptor)
    if missing.item():
        return None
    return SharedMemory(
        [mapping for mapping in maps if mapping is not None],
        [int(process) for process, _, _ in addresses],
    )


def _create(num_bytes: int, mark: int) -> int | None:
    """A file descriptor of so much memory, marked; None where there is none to be had."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.memfd_create("paceline-shared")
        with contextlib.suppress(OSError):
            os.posix_fallocate(
                descriptor, 0, num_bytes
            )  # a lack of memory shows here and not as a SIGBUS later
            os.pwrite(descriptor, mark.to_bytes(8), 0)
            return descriptor
        os.close(descriptor)
    return None


def _map(process: int, descriptor: int, mark: int, *, num_bytes: int) -> mmap.mmap | None:
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file,
    ):
        if os.pread(file.fileno(), 8, 0) == mark.to_bytes(8):
            return mmap.mmap(file.fileno(), num_bytes)
    return None
