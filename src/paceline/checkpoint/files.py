"""Writes safetensors files from their beginning to their end: past the system's cache, and with a checksum on the way.

On machines of 2 cores a GB written through the system's cache took 2.2 s of CPU time, in the kernel's threads too, and
past it 0.03 s (ext4 on a virtual disk).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from paceline.checkpoint.dtypes import DTYPE_NAMES, in_file
from paceline.checkpoint.pieces import copy

BUFFER_BYTES = (
    8 * 2**20
)  # written at a time: 2.2 GB/s for 1 and 4 MiB, 3.1 GB/s for 16 MiB on the disk named above
# Shows damage, and is not meant against forgery: who can change a file can change what COMMIT says of it. On an Intel
# Xeon at 2.5 GHz without instructions for sha256 it read 7.6 GB/s, sha256 0.2.
CHECKSUM = "xxh3_128"
SYNCED_BYTES = 256 * 2**20  # of writes through the cache, after which they are forced to the disk
_BLOCK_BYTES = (
    4096  # that sizes of writes past the cache are multiples of; more than any disk's own block
)

Kind = tuple[torch.dtype, tuple[int, ...]]  # a tensor's dtype and shape


def num_bytes(kind: Kind) -> int:
    """
    >>> num_bytes((torch.float32, (3, 2)))
    24
    """
    return math.prod(kind[1]) * kind[0].itemsize


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in CPU memory as they lie in a file."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements lie in CPU memory as they lie in a file; copied only if they don't lie so."""
    if is_plain(tensor):
        return tensor.detach()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copy(target, tensor.detach())
    return target


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as they lie in a file; copied only if they don't lie in memory like that."""
    elements = plain(tensor).reshape(-1).view(torch.uint8)
    if not len(elements):
        return memoryview(b"")
    # Not by NumPy, which marks the tensor's memory for good as looked into.
    buffer = (ctypes.c_ubyte * len(elements)).from_address(elements.data_ptr())
    buffer.tensor = elements  # type: ignore[attr-defined]  # which has the memory
    return memoryview(buffer).cast("B")


def header(
    kinds: Mapping[str, Kind], *, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The beginning of a safetensors file, and the order in which the tensors' bytes follow.

    Widest dtypes come first, so that each tensor is aligned, for complex128 too if the file is mapped.
    """
    ordered = sorted(kinds, key=lambda name: -kinds[name][0].itemsize)
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name in ordered:
        dtype, shape = in_file(*kinds[name])
        end = start + num_bytes(kinds[name])
        document[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(document).encode()
    text += b" " * (-(8 + len(text)) % 16)
    return len(text).to_bytes(8, "little") + text, ordered


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Write tensors to a safetensors file and force it to the disk. Returns what COMMIT says of it.

    Args:
        tensors: Those on a GPU, or not contiguous, are copied to CPU memory one at a time.
        wrote: Called after each full buffer, with its bytes; what it takes, the writing waits.

    Raises:
        OSError: it can't be written; what was written of it stays.
    """
    first, ordered = header(
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    )
    with NewFile(path, wrote) as file:
        file.write(first)
        for name in ordered:
            file.write_from(plain(tensors[name]))
        return file.finish()


class NewFile:
    """A file that is written from its beginning to its end, past the system's cache where the file system allows it.

    num_bytes: written so far, or waiting in the buffer. wrote: called after each full buffer, with its bytes.
    """

    def __init__(self, path: Path, wrote: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.path, self.num_bytes, self._wrote = path, 0, wrote
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self._descriptor = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = 0
            self._descriptor = os.open(path, flags, 0o666)
        self._buffer = memoryview(
            mmap.mmap(-1, BUFFER_BYTES)
        )  # aligned, as writes past the cache want it
        self._waiting = 0  # bytes in the buffer
        self._synced = 0  # bytes that are on the disk for certain
        self._checksum = xxhash.xxh3_128()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append a few bytes, such as a header."""
        self.write_from(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def write_from(self, tensor: torch.Tensor) -> None:
        """Append all bytes of a plain tensor."""
        start, buffer = 0, ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        while start < tensor.nbytes:
            count = min(tensor.nbytes - start, BUFFER_BYTES - self._waiting)
            # By a call that leaves the interpreter free: assigning a slice of a memoryview would hold it.
            ctypes.memmove(buffer + self._waiting, tensor.data_ptr() + start, count)
            self._waiting, start = self._waiting + count, start + count
            if self._waiting == BUFFER_BYTES:
                self._empty()
                self._wrote(BUFFER_BYTES)

    def finish(self) -> dict[str, Any]:
        """Force the file to the disk. Returns its size and checksum, as COMMIT says them."""
        self._empty()
        os.ftruncate(self._descriptor, self.num_bytes)
        os.fsync(self._descriptor)
        return {"bytes": self.num_bytes, CHECKSUM: self._checksum.hexdigest()}

    def _empty(self) -> None:
        """Write what waits in the buffer. The last block of a file is filled up, and cut to its length at the end."""
        self._checksum.update(self._buffer[: self._waiting])
        block = _BLOCK_BYTES if self._direct else 1
        data, offset = self._buffer[: -(-self._waiting // block) * block], self.num_bytes
        self.num_bytes, self._waiting = self.num_bytes + self._waiting, 0
        while data:
            try:
                count = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # This file system opens a file like that and does not write it, or in other blocks.
                self._direct = 0
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
                continue
            data, offset = data[count:], offset + count
        if not self._direct and self.num_bytes - self._synced >= SYNCED_BYTES:
            os.fsync(self._descriptor)
            self._synced = self.num_bytes
