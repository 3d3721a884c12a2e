"""What of a checkpoint lies in CPU memory: copied to memory that is kept from save to save.

The run waits while what a forward may write to is copied. What only updates write to is copied beside the next forward
and backward, and the update waits for it, as in CheckFreq (Mohan et al., FAST 2021, section 4.1).

Memory that a process has used is quick to write to. Fresh memory is not: on virtual machines of 2 cores the first write
to a GB took 0.5 to 2.6 s, and later ones 0.09 to 0.11 s. A file in memory that is written by calls takes 0.25 to 0.3 s,
so this one is mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress

import torch

from paceline.checkpoint.files import plain
from paceline.launch.process.memory_files import memory_file
from paceline.launch.process.memory_use import LeftOut

# Of a thread beside the steps, which so take at most 1.1 times as long: a busy core gives it a sixteenth of its time
# (weights of 70 and 1024, sched_prio_to_weight in Linux's kernel/sched/core.c), and they wait for the copies too.
_NICER = 12
_RESERVED_BYTES = (
    2**20
)  # at a time: a save waits for no more, some 3 ms where memory was never used before
_ALIGNED_BYTES = (
    64  # where each tensor begins: a line of the cache, and a multiple of any dtype's size
)


class Snapshot:
    """A rank's memory for its pieces. It does not count as memory of the rank, and is freed with this object."""

    def __init__(self) -> None:
        self._descriptor = memory_file("paceline-save")
        self._mapped = torch.empty(0, dtype=torch.uint8)
        self._taken = 0  # bytes of it that the system has given
        self._end = 0  # of what was copied since `begin`, or is to be
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []  # and where to
        self._copying: threading.Thread | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._descriptor)
        self._left_out = LeftOut(self)

    def reserve(self, num_bytes: int) -> None:
        """Take so much memory from the system before the first save, which takes the rest. On a thread of its own.

        It is written to, not only allocated: the host of a virtual machine gives memory when it is first written to.
        """
        be_nice()
        with suppress(OSError):  # the save itself says what is missing
            while self._taken < num_bytes:
                with self._lock:
                    begin = self._taken
                    self._take(min(begin + _RESERVED_BYTES, num_bytes), mapped_bytes=num_bytes)
                    # Not by torch, whose operators would start threads for this one.
                    ctypes.memset(self._mapped.data_ptr() + begin, 0, self._taken - begin)

    @property
    def num_bytes(self) -> int:
        """What it has taken from the system."""
        return self._taken

    def begin(self, num_bytes: int) -> None:
        """Forget what was copied for the save before, which is written, and have memory for so much.

        Raises:
            OSError: this host has none.
        """
        self._end = 0
        self._later.clear()
        with self._lock:
            self._take(num_bytes, mapped_bytes=num_bytes)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor behind those before it."""
        target = self._place(tensor)
        _fill(target, tensor)
        return target

    def copy_later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a tensor that lies as in a file copied behind those before it, by `copy_beside`."""
        target = self._place(tensor)
        self._later.append((target, tensor))
        return target

    def copy_beside(self) -> None:
        """Copy on another thread what is to be copied later. It has to stay as it is until `wait` returns."""
        if self._later:
            self._copying = threading.Thread(
                target=self._copy_later, name="paceline-snapshot", daemon=True
            )
            self._copying.start()

    def wait(self) -> None:
        """Return when all is copied. From any thread."""
        if self._copying is not None:
            self._copying.join()

    def _copy_later(self) -> None:
        while self._later:
            _fill(*self._later.pop())

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one, behind those before it."""
        begin, end = self._end, self._end + tensor.nbytes
        self._end = aligned(end)
        return self._mapped[begin:end].view(tensor.dtype).view(tensor.shape)

    def _take(self, num_bytes: int, *, mapped_bytes: int) -> None:
        """Get memory for so much of the file: without it, a write to what is mapped would end the process. What is
        still read of an earlier mapping stays mapped until it is not. mapped_bytes: what is mapped at least."""
        if len(self._mapped) < mapped_bytes:
            os.ftruncate(self._descriptor, mapped_bytes)
            self._mapped = torch.frombuffer(
                mmap.mmap(self._descriptor, mapped_bytes), dtype=torch.uint8
            )
        if num_bytes > self._taken:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, self._taken, num_bytes - self._taken)
            self._left_out.grow(num_bytes - self._taken)
            self._taken = num_bytes


def aligned(num_bytes: int) -> int:
    """
    >>> aligned(65), aligned(128)
    (128, 128)
    """
    return num_bytes + -num_bytes % _ALIGNED_BYTES


def _fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """By a call that writes past the cache: 10 GB/s on these machines, where torch's own copy has 7."""
    elements = plain(tensor)
    ctypes.memmove(target.data_ptr(), elements.data_ptr(), elements.nbytes)


def be_nice() -> None:
    """Let this thread leave busy cores to those that compute; Linux alone can for a single thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER
            )
