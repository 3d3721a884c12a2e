"""Files without a name that lie in memory: a process shares them with its forks, and the kernel frees them with the
last process that has them open. Those that are written and read by calls do not count as memory of a process; where
one is mapped, see `LeftOut` in launch/process/memory_use.py."""

from __future__ import annotations

import os
import tempfile

from paceline.base.long_work import long_work

_CALL_BYTES = (
    256 * 2**20
)  # of one call: a rank that copies a large state gives a sign of life after each


def memory_file(name: str) -> int:
    """A descriptor of an empty file in memory, which forks share. name: for /proc alone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # macOS: in the system's cache, as far as that has room
        return os.dup(file.fileno())


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write all of the data. Returns where it ends.

    Raises:
        OSError: there is no memory for it.
    """
    while data:
        count = os.pwrite(descriptor, data[:_CALL_BYTES], offset)
        data, offset = data[count:], offset + count
        long_work.advanced()
    return offset


def read_at(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill the target from a place in the file on.

    Raises:
        EOFError: the file ends before the target is full.
    """
    while target:
        count = os.preadv(descriptor, [target[:_CALL_BYTES]], offset)
        if not count:
            raise EOFError(f"the file in memory ends at byte {offset}")
        target, offset = target[count:], offset + count
        long_work.advanced()
