"""What of a checkpoint lies in CPU memory: copied to memory that is kept from save to save, while the run waits.

Memory that a process has used is quick to write to. Fresh memory is not: on virtual machines of 2 cores the first write
to a GB took 0.5 to 2.6 s, and later ones 0.11 to 0.15 s.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextlib import suppress

import torch

from paceline.launch.memory_files import memory_file, write_at
from paceline.runtime.checkpoint.files import CopiedSource, bytes_of

# Of a thread beside the steps, which so take at most 1.1 times as long: a busy core gives it a tenth of its time
# (weights of 110 and 1024, sched_prio_to_weight in Linux's kernel/sched/core.c).
_NICER = 10
_RESERVED_BYTES = 2**20  # at a time: a save waits for no more, some 3 ms where memory was never used before


class Snapshot:
    """A rank's memory for its pieces. It does not count as memory of the rank, and is freed with this object."""

    def __init__(self) -> None:
        self._descriptor = memory_file("paceline-save")
        self._end = 0  # of what was copied since `begin`
        self._lock, self._is_needed = threading.Lock(), False
        weakref.finalize(self, os.close, self._descriptor)

    def reserve(self, num_bytes: int) -> None:
        """Take so much memory from the system before the first save, unless that begins. On a thread of its own.

        It is written to, not only allocated: the host of a virtual machine gives memory when it is first written to.
        """
        be_nice()
        zeros = memoryview(bytes(_RESERVED_BYTES))
        with suppress(OSError):  # the save itself says what is missing
            for start in range(0, num_bytes, _RESERVED_BYTES):
                with self._lock:
                    if self._is_needed:
                        return
                    write_at(self._descriptor, zeros[:num_bytes - start], start)

    def begin(self) -> None:
        """Forget what was copied for the save before, which is written."""
        with self._lock:
            self._is_needed = True
        self._end = 0

    def copy(self, tensor: torch.Tensor) -> CopiedSource:
        """Copy a tensor behind those before it.

        Raises:
            OSError: this host has no memory for it.
        """
        start, self._end = self._end, write_at(self._descriptor, bytes_of(tensor), self._end)
        return CopiedSource((tensor.dtype, tuple(tensor.shape)), self._descriptor, start)


def be_nice() -> None:
    """Let this thread leave busy cores to those that compute; Linux alone can for a single thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
