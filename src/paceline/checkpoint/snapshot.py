"""Copies the parts of a checkpoint that lie in CPU memory, to memory that is kept from save to
save.

The run waits while the tensors to which a forward may write are copied. Tensors to which only
updates write are copied during the next forward and backward, and the update waits for these
copies, as in CheckFreq (Mohan et al., FAST 2021, section 4.1).

Writing to memory that a process has used before is fast. Writing to fresh memory is slow: on
virtual machines with 2 cores the first write to a GB took 0.5 to 2.6 s, and later ones 0.09 to 0.11
s. Writing a file in memory by calls takes 0.25 to 0.3 s per GB, so this file is mapped.
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

from paceline.checkpoint.pieces import copy
from paceline.launch.process.memory_files import memory_file
from paceline.launch.process.memory_use import LeftOut

# Added to the niceness of a thread that runs beside the steps. A busy core then gives the thread a
# sixteenth of its time (weights of 70 and 1024, sched_prio_to_weight in Linux's
# kernel/sched/core.c). Steps take at most 1.1 times as long, although they also wait for the
# copies.
_NICER = 12
# Memory is reserved in parts of this size. A save waits for one part at most: about 3 ms if its
# memory was never used.
_RESERVED_BYTES = 2**20
# Each tensor begins at a multiple of this: a line of the cache, and a multiple of any dtype's size.
_ALIGNED_BYTES = 64


class Snapshot:
    """A rank's memory for copies of its pieces. It does not count as memory of the rank, and is
    freed with this object.
    """

    def __init__(self) -> None:
        self._descriptor = memory_file("paceline-save")
        self._mapped = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0  # of the file, for which the system has given memory
        self._end = 0  # end of the bytes that were copied since `begin`, or will be
        # Targets and sources of the copies that `copy_beside` makes.
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copying: threading.Thread | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, self._descriptor)
        self._left_out = LeftOut(self)

    def reserve(self, num_bytes: int) -> None:
        """Take so much memory from the system before the first save. That save takes what is still
        missing. Call this on a separate thread.

        The memory is written to, not only allocated, because the host of a virtual machine gives
        memory at the first write.
        """
        be_nice()
        with suppress(OSError):  # the save itself reports missing memory
            while self.num_bytes < num_bytes:
                with self._lock:
                    begin = self.num_bytes
                    self._take(min(begin + _RESERVED_BYTES, num_bytes), mapped_bytes=num_bytes)
                    # torch's operators would start threads for this thread.
                    ctypes.memset(self._mapped.data_ptr() + begin, 0, self.num_bytes - begin)

    def begin(self, num_bytes: int) -> None:
        """Forget the copies of the previous save, which is written, and provide so much memory.

        Raises:
            OSError: this host has not enough memory.
        """
        self._end = 0
        self._later.clear()
        with self._lock:
            self._take(num_bytes, mapped_bytes=num_bytes)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the place after the previous tensors."""
        target = self._place(tensor)
        copy(target, tensor)
        return target

    def copy_later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reserve the place after the previous tensors for a tensor that `copy_beside` copies. The
        tensor must lie in memory as in a file.
        """
        target = self._place(tensor)
        self._later.append((target, tensor))
        return target

    def copy_beside(self) -> None:
        """Copy the tensors given to `copy_later` on another thread. They must not change until
        `wait` returns.
        """
        if self._later:
            self._copying = threading.Thread(
                target=self._copy_later, name="paceline-snapshot", daemon=True
            )
            self._copying.start()

    def wait(self) -> None:
        """Return when everything is copied. Any thread may call this."""
        if self._copying is not None:
            self._copying.join()

    def _copy_later(self) -> None:
        while self._later:
            copy(*self._later.pop())

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like this one at the place after the previous tensors."""
        begin, end = self._end, self._end + tensor.nbytes
        self._end = aligned(end)
        return self._mapped[begin:end].view(tensor.dtype).view(tensor.shape)

    def _take(self, num_bytes: int, *, mapped_bytes: int) -> None:
        """Get memory for so many bytes of the file. Without memory, a write to the mapping would
        end the process.

        An earlier mapping stays mapped while tensors still refer to it.

        mapped_bytes: bytes that are mapped at least.
        """
        if len(self._mapped) < mapped_bytes:
            os.ftruncate(self._descriptor, mapped_bytes)
            self._mapped = torch.frombuffer(
                mmap.mmap(self._descriptor, mapped_bytes), dtype=torch.uint8
            )
        if num_bytes > self.num_bytes:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, self.num_bytes, num_bytes - self.num_bytes)
            self._left_out.grow(num_bytes - self.num_bytes)
            self.num_bytes = num_bytes


def aligned(num_bytes: int) -> int:
    """Round a size in bytes up to where the next tensor begins.

    >>> aligned(65), aligned(128)
    (128, 128)
    """
    return num_bytes + -num_bytes % _ALIGNED_BYTES


def be_nice() -> None:
    """Lower this thread's priority, so that threads that compute get busy cores. Only Linux can do
    so for a single thread.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER
            )
