"""Builds a whole model without memory for all of it, for a rank that will hold a part of it.

Only a model's own program knows its initial weights, and each may depend on all earlier ones. Every
rank therefore runs the whole program, but large tensors are in unlinked files that are mapped into
memory. The operating system caches as much of them as it has room for, and this process drops their
pages regularly. A rank then copies out its own part.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch.utils.serialization import config

from paceline.launch.process.malloc import trim_heap
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OperatorMode, schema_of
from paceline.torch_private.storage import key_of, storage_key

LEAST_BYTES = 64 * 1024  # size of the smallest storage that goes to a file
RESIDENT_BYTES = 32 * 1024**2  # size of used storages at which their pages are dropped

# From <sys/mman.h> of Linux. MADV_DONTNEED is safe only for mappings of this module: they are
# shared with their files, so that nothing is lost. MADV_PAGEOUT loses nothing of any mapping.
_MADV_DONTNEED, _MADV_PAGEOUT = 4, 21
_IN_MEMORY = ("tmpfs", "ramfs")  # file systems
_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


class NoDiskForTensors(Exception):
    """This machine has no place for tensors but memory; the message says why."""


class MappedTensors:
    """Tensors in unlinked files on a disk, mapped into memory. The files vanish with the last tensor.

    Args:
        resident_bytes: Bytes of the files that stay in memory until their pages are dropped. A
            single operator may use more.

    Raises:
        NoDiskForTensors: there is no disk for temporary files, or the system is not Linux.
    """

    def __init__(self, *, resident_bytes: int = RESIDENT_BYTES) -> None:
        self.folder, self.resident_bytes = _folder_on_disk(), resident_bytes
        self._prefix = str(self.folder / f"paceline-{os.getpid()}-")
        self._madvise = ctypes.CDLL(None).madvise
        # By address: bytes, and the storage if it is in one of these files.
        self._used: dict[int, tuple[int, torch.UntypedStorage | None]] = {}
        self._used_bytes = 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """Put large CPU tensors that this thread makes into files, while the context is entered.

        Weights that are read from a file are mapped and not copied (torch's `config.load.mmap`).
        """
        before, config.load.mmap = config.load.mmap, True
        try:
            with self.running(moves=True):
                yield
        finally:
            config.load.mmap = before

    @contextmanager
    def running(self, *, moves: bool = False) -> Iterator[None]:
        """Drop pages of the files after operators have used them, while the context is entered.

        moves: whether large results of operators go to files.
        """
        try:
            with _Watch(self, moves=moves):
                yield
        finally:
            self._let_go()

    def holds(self, tensor: torch.Tensor) -> bool:
        return _is_plain(tensor) and self._owns(tensor.untyped_storage())

    def bring_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors from files into memory, in place.

        Tensors that share elements continue to share them.
        """
        by_storage: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            if self.holds(tensor):
                by_storage.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
        for sharing in by_storage.values():
            members = list(sharing.values())
            storage = members[0].untyped_storage()
            # If the members are smaller than the storage, the rest belongs to another rank.
            if sum(tensor.nbytes for tensor in members) < storage.nbytes():
                for tensor in members:
                    tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
                continue
            copied = storage.clone()
            for tensor in members:
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                    copied, tensor.storage_offset(), tensor.shape, tensor.stride()
                )

    def in_memory_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of large tensors that are in no file.

        They were not made by torch's operators on this thread.
        """
        mapped = _mapped_files()
        storage_bytes = {
            storage.data_ptr(): storage.nbytes()
            for storage in _storages(list(tensors))
            if storage.nbytes() >= LEAST_BYTES and not self._owns(storage)
        }
        return sum(
            count
            for start, count in storage_bytes.items()
            if not any(a <= start < b for a, b in mapped)
        )

    def _make(self, num_bytes: int) -> torch.UntypedStorage:
        descriptor, path = tempfile.mkstemp(dir=self.folder, prefix=Path(self._prefix).name)
        try:
            # A full disk raises an error here; later it would kill the process by a signal.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, True, num_bytes))
        finally:
            os.close(descriptor)
            Path(path).unlink()

    def _owns(self, storage: torch.UntypedStorage) -> bool:
        return (storage.filename or "").startswith(self._prefix)

    def _move(self, operator: Any, result: Any, inputs: Iterable[torch.UntypedStorage]) -> None:
        """Move new results of an operator to a storage in a file, before other code sees them."""
        if any(returned.alias_info is not None for returned in schema_of(operator).returns):
            return
        known = set(map(key_of, inputs))
        moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for tensor in filter(_is_plain, pytree.tree_leaves(result)):
            storage, key = tensor.untyped_storage(), storage_key(tensor)
            if storage.nbytes() < LEAST_BYTES or key in known or self._owns(storage):
                continue
            if key not in moved:
                moved[key] = storage, self._make(storage.nbytes())
                ctypes.memmove(moved[key][1].data_ptr(), storage.data_ptr(), storage.nbytes())
            tensor.set_(moved[key][1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def _note(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            address, num_bytes = storage.data_ptr(), storage.nbytes()
            if num_bytes >= LEAST_BYTES and address and address not in self._used:
                # The storage is held until its pages are dropped, so that nothing else gets its
                # address.
                self._used[address] = num_bytes, storage if self._owns(storage) else None
                self._used_bytes += num_bytes
        if self._used_bytes > self.resident_bytes:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the pages of used storages from this process. The files keep their contents."""
        others = [
            (start, start + count) for start, (count, owner) in self._used.items() if owner is None
        ]
        for start, (num_bytes, owner) in self._used.items():
            if owner is not None:
                self._advise(start, start + num_bytes, _MADV_DONTNEED)
        if others:
            for first, last in _mapped_files():
                for start, stop in others:
                    if first < stop and start < last:
                        self._advise(max(first, start), min(last, stop), _MADV_PAGEOUT)
        self._used.clear()
        self._used_bytes = 0
        trim_heap()

    def _advise(self, start: int, stop: int, advice: int) -> None:
        """Give the system advice about pages. If it refuses, the pages stay in memory."""
        start = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        if stop > start:
            self._madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class _Watch(OperatorMode):
    """Tells memory-mapped tensors of every operator. moves: whether results of operators go to files."""

    def __init__(self, mapped: MappedTensors, *, moves: bool) -> None:
        super().__init__()
        self.mapped, self.moves = mapped, moves

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            self.moves
            and func.overloadpacket in _EMPTY
            and (empty := self._empty(func, args, kwargs)) is not None
        ):
            return empty
        result = func(*args, **kwargs)
        inputs = _storages((args, kwargs))
        if self.moves:
            self.mapped._move(func, result, inputs)
        self.mapped._note([*inputs, *_storages(result)])
        return result

    def _empty(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Make a large uninitialised tensor in a file; None if it is small or no plain CPU
        tensor."""
        like = args[0] if isinstance(args[0], torch.Tensor) else torch.empty(0, device="cpu")
        device, layout = kwargs.get("device") or like.device, kwargs.get("layout") or like.layout
        if torch.device(device).type != "cpu" or layout is not torch.strided:
            return None
        shape = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
        if (num_bytes := shape.untyped_storage().nbytes()) < LEAST_BYTES:
            return None
        empty = torch.empty(0, dtype=shape.dtype)
        return empty.set_(self.mapped._make(num_bytes), 0, shape.shape, shape.stride())


def _is_plain(value: Any) -> bool:
    """Whether a value is a dense CPU tensor: no subclass, not sparse, not quantized."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(values) if _is_plain(leaf)]


def _mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges of private file mappings in this process's memory."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _, _, inode = line.split()[:5]
        if inode != "0" and mode.endswith("p"):
            start, _, stop = place.partition("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return ranges


def _folder_on_disk() -> Path:
    """Return the folder for temporary files, or /var/tmp if that folder is in memory.

    Raises:
        NoDiskForTensors: the system is not Linux, or both folders are in memory or not writable.
    """
    if not sys.platform.startswith("linux"):
        raise NoDiskForTensors(f"{sys.platform} doesn't let go of mapped pages")
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    for folder in folders:
        if (
            folder.is_dir()
            and os.access(folder, os.W_OK)
            and _file_system(folder) not in _IN_MEMORY
        ):
            return folder
    raise NoDiskForTensors(
        f"{' and '.join(str(folder) for folder in folders)} are in memory or can't be written to; TMPDIR "
        "names another folder"
    )


def _file_system(folder: Path) -> str:
    """Return the type of the file system that contains a folder."""
    mounted = [
        (len(mount.mountpoint), mount.fstype)
        for mount in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(mount.mountpoint)
    ]
    return max(mounted, default=(0, ""))[1]
