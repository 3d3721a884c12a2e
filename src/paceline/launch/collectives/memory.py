"""Memory of a process that the other processes of its host can map."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from typing import NamedTuple

import torch

# The part of a process's address space that its shared memory may take. Pages exist only where
# something is allocated. Addresses are not used twice, and a processor maps 128 such parts.
_ADDRESS_BYTES = 2**40
_PAGE_BYTES = 4096
_MARK_BYTES = 8


class Address(NamedTuple):
    """Where other processes find a process's memory.

    A random mark identifies it, because two hosts may have the same process number.
    """

    process: int
    descriptor: int
    mark: int


class SharedMemory:
    """The memory of one process, as this process maps it.

    It has no name in a file system, so that nothing is left after a kill, and a container's small
    /dev/shm is no limit.
    """

    def __init__(self, address: Address) -> None:
        """Map the memory.

        Raises:
            OSError, ValueError: it can't be mapped, or it is the memory of another process.
        """
        self.address = address
        with open(f"/proc/{address.process}/fd/{address.descriptor}", "r+b", buffering=0) as file:
            if os.pread(file.fileno(), _MARK_BYTES, 0) != address.mark.to_bytes(_MARK_BYTES):
                raise ValueError("another process's memory is at this address")
            self._bytes = mmap.mmap(file.fileno(), _ADDRESS_BYTES)
        self._start = torch.frombuffer(self._bytes, dtype=torch.uint8, count=1).data_ptr()

    def bytes(self, offset: int, count: int) -> memoryview:
        return memoryview(self._bytes)[offset : offset + count]

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the flat tensor of `count` elements at an offset in bytes."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor lies in this memory, in bytes; None if it is elsewhere."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset < _ADDRESS_BYTES else None


class OwnMemory(SharedMemory):
    """The shared memory of this process, in which tensors are allocated.

    Raises:
        OSError, AttributeError: the system can't provide it.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("paceline-shared")
        try:
            os.ftruncate(descriptor, _ADDRESS_BYTES)
            mark = secrets.randbits(62)
            os.pwrite(descriptor, mark.to_bytes(_MARK_BYTES), 0)
            super().__init__(Address(os.getpid(), descriptor, mark))
        except BaseException:
            os.close(descriptor)
            raise
        self._end = _PAGE_BYTES
        weakref.finalize(self, os.close, descriptor)

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return a tensor of zeros with `num_bytes` bytes; None if there is no memory left for it.

        Its pages are given back when nothing in this process refers to it.
        """
        start = self.reserve(num_bytes)
        if start is None:
            return None
        view = self.bytes(start, num_bytes)
        weakref.finalize(view, _give_back, self._bytes, start, _in_pages(num_bytes)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> int | None:
        """Return where `num_bytes` bytes begin that belong to the caller as long as the memory
        exists; None if there are none left."""
        start, size = self._end, _in_pages(num_bytes)
        if not num_bytes or start + size > _ADDRESS_BYTES:
            return None
        with contextlib.suppress(OSError):
            # A lack of memory fails here and not by a SIGBUS later.
            os.posix_fallocate(self.address.descriptor, start, size)
            self._end += size
            return start
        return None


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _give_back(mapping: mmap.mmap, start: int, size: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        mapping.madvise(mmap.MADV_REMOVE, start, size)


_mapped: weakref.WeakValueDictionary[Address, SharedMemory] = weakref.WeakValueDictionary()


def own_memory() -> OwnMemory | None:
    """Make shared memory of this process; None if the system can't provide it."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return OwnMemory()
    return None


def mapped(address: Address) -> SharedMemory | None:
    """Return another process's memory; None if this process can't map it.

    It is mapped once, and as long as something refers to it.
    """
    memory = _mapped.get(address)
    if memory is None:
        with contextlib.suppress(OSError, ValueError):
            memory = _mapped[address] = SharedMemory(address)
    return memory
