"""Memory that the ranks of a group map together, where they are on one host."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import NamedTuple

import torch
import torch.distributed as dist

# Size of the header of each rank's memory. It begins with a random mark, which must not be
# overwritten.
HEADER_BYTES = 4096
MARK_BYTES = 64


class SharedMemory(NamedTuple):
    """The memory of each rank, as this process maps it, and each rank's process number."""

    mappings: list[mmap.mmap]
    processes: list[int]


def shared_memory(num_bytes: int, group: dist.ProcessGroup | None) -> SharedMemory | None:
    """Allocate `num_bytes` bytes for each rank, zeros at first. Collective.

    The memory has no name in a file system, so that nothing is left after a kill, and a container's
    small /dev/shm is no limit. A random mark identifies a rank's memory, because two hosts may have
    the same process number.

    Returns:
        The memory of all ranks; None if a rank can't map another's.
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
    dist.all_reduce(missing, group=group)  # also ensures that no rank closes before all have mapped
    if descriptor is not None:
        os.close(descriptor)
    if missing.item():
        return None
    return SharedMemory(
        [mapping for mapping in maps if mapping is not None],
        [int(process) for process, _, _ in addresses],
    )


def _create(num_bytes: int, mark: int) -> int | None:
    """Return a file descriptor of new memory with a mark; None if the system can't provide it."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.memfd_create("paceline-shared")
        with contextlib.suppress(OSError):
            # A lack of memory fails here and not by a SIGBUS later.
            os.posix_fallocate(descriptor, 0, num_bytes)
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
