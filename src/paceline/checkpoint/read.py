"""Reads checkpoints. It checks a folder against its COMMIT, then gives any region of any tensor to
a run with any plan.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import torch
import xxhash

from paceline.base.errors import CheckpointError
from paceline.base.long_work import long_work
from paceline.checkpoint.dtypes import DTYPES, in_file
from paceline.checkpoint.files import CHECKSUM, bytes_of, read_header
from paceline.checkpoint.index import StoredPiece, TensorEntry, entries_of, plain_name
from paceline.checkpoint.pieces import Region, copy, pieces_of, uncovered
from paceline.checkpoint.write import DOCUMENT, FORMAT, INDEX, LOOK_S, VERSION
from paceline.launch.process.memory_files import read_at
from paceline.runs.folder import CHECKPOINTS, COMMIT, checkpoints_of
from paceline.strategies.layout import Extent

_SUMMED_BYTES = 256 * 1024  # read at a time for a checksum, as in hashlib.file_digest
_RUN_BYTES = 8 * 2**20  # of a piece, read at a time
# At most: there is a file for each rank that wrote. Opening one again means to parse its header
# again, and processes may often have no more than 1,024 files.
_OPEN_FILES = 256

# step-N, and the folder that was step-N until a save of the same step began to replace it and was
# interrupted.
_FOLDER = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")


class Store(Protocol):
    """What holds the bytes of pieces: a disk, or the memory of this host or of others."""

    def read_into(
        self, piece: StoredPiece, dtype: torch.dtype, start: int, target: memoryview
    ) -> None:
        """Fill the target with the bytes of a piece, from the byte `start` on.

        Raises:
            OSError, EOFError, LookupError, ValueError: the store has no such piece of this dtype.
        """


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a run. Its tensors stay in their store until they are read."""

    path: Path
    step: int
    # What the caller of `Writer.save` gave on rank 0, as JSON holds it (tuples are lists).
    document: dict[str, Any]
    tensors: Mapping[str, TensorEntry]
    store: Store = field(repr=False, compare=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: entry.shape for name, entry in self.tensors.items()}

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Read a tensor, or a region of it, into CPU memory.

        Only the rows of the region are read.

        Raises:
            CheckpointError: there is no such tensor, or no piece holds a part of the region.
        """
        entry = self._entry(name)
        region = Region.whole(entry.shape) if region is None else region
        target = torch.empty(region.shape, dtype=entry.dtype, device="cpu")
        self._fill(target, name, entry, region)
        return target

    def read_into(self, name: str, tensor: torch.Tensor, extent: Extent | None = None) -> None:
        """Fill a tensor in place: all of a plain tensor, or this rank's own part of a DTensor.

        extent: place of a plain tensor in a larger one, if it is a part of one.

        Raises:
            CheckpointError: there is no such tensor, or it has another global shape or another
                dtype.
        """
        entry = self._entry(name)
        if (
            extent.shape if extent else tuple(tensor.shape)
        ) != entry.shape or tensor.dtype != entry.dtype:
            raise CheckpointError(
                f"{self.path}: '{name}' is {_kind(entry.dtype, entry.shape)} there and "
                f"{_kind(tensor.dtype, tuple(tensor.shape))} here",
                hint="the checkpoint is of another model; resume with the job that wrote it",
            )
        for piece in pieces_of(name, tensor, extent):
            self._fill(piece.tensor, name, entry, piece.region)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            close = difflib.get_close_matches(name, self.tensors, n=1, cutoff=0.5)
            nearest = (
                f"; the nearest of its {len(self.tensors)} names is '{close[0]}'" if close else ""
            )
            raise CheckpointError(f"{self.path} holds no tensor '{name}'{nearest}")
        return self.tensors[name]

    def _fill(self, target: torch.Tensor, name: str, entry: TensorEntry, region: Region) -> None:
        if holes := uncovered(region, (piece.region for piece in entry.pieces)):
            raise CheckpointError(
                f"{self.path}: no piece of '{name}' (shape {entry.shape}) holds the part at "
                f"{holes[0].offsets} of shape {holes[0].shape}"
            )
        for piece in entry.pieces:
            if (common := piece.region.overlap(region)) is None:
                continue
            try:
                for run, part in self._runs(piece, entry.dtype, common):
                    box = run.overlap(common)
                    assert box is not None
                    copy(target[box.slices(region.offsets)], part[box.slices(run.offsets)])
            except (OSError, EOFError, LookupError, ValueError) as error:
                raise CheckpointError(
                    f"{self.path}: can't read '{piece.key}' from {piece.file}: {error}"
                ) from error

    def _runs(
        self, piece: StoredPiece, dtype: torch.dtype, box: Region
    ) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield the rows of a piece that a box needs, a few at a time. They are read whole, because
        only the bytes of whole rows lie one after the other.
        """
        whole = piece.region
        rows = Region((*box.offsets[:1], *whole.offsets[1:]), (*box.shape[:1], *whole.shape[1:]))
        for run in rows.in_runs(_RUN_BYTES // dtype.itemsize):
            part = torch.empty(run.shape, dtype=dtype, device="cpu")
            first = run.offsets[0] - whole.offsets[0] if run.shape else 0
            start = first * math.prod(whole.shape[1:]) * dtype.itemsize
            self.store.read_into(piece, dtype, start, bytes_of(part))
            yield run, part


class DiskStore:
    """The safetensors files of a folder. A few stay open, because a model has thousands of tensors
    in few files.
    """

    def __init__(self, folder: Path) -> None:
        self._open = lru_cache(_OPEN_FILES)(lambda name: _OpenFile(folder / name))

    def read_into(
        self, piece: StoredPiece, dtype: torch.dtype, start: int, target: memoryview
    ) -> None:
        """See `Store`."""
        file = self._open(piece.file)
        entry = file.header[piece.key]
        if (DTYPES[entry["dtype"]], tuple(entry["shape"])) != in_file(dtype, piece.region.shape):
            raise ValueError("its shape or dtype is not that of the index")
        read_at(file.descriptor, target, file.begin + entry["data_offsets"][0] + start)


class _OpenFile:
    """A safetensors file that is read at any place. It is not mapped, because pages of a mapping
    that were read count as this process's memory.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header, self.begin = read_header(file)
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


def open_checkpoint(path: Path, *, checksums: bool = True) -> Checkpoint:
    """Open a checkpoint folder after checking that it is complete and undamaged.

    Args:
        checksums: Whether to read all files in full to check their checksums. If many ranks open a
            checkpoint, it is enough that one of them does so. Sizes and structure are always
            checked.

    Raises:
        CheckpointError: the checkpoint can't be used; the message says why.
    """
    path = Path(path)
    commit = _load_commit(path)
    try:
        checksum = CHECKSUM if commit["version"] > 1 else "sha256"
        files = {
            plain_name(name): (int(entry["bytes"]), str(entry[checksum]))
            for name, entry in commit["files"].items()
        }
        step = int(commit["step"])
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{path}: {COMMIT} is malformed: {_reason(error)}") from error
    if (named := _FOLDER.fullmatch(path.name)) and int(named[1] or named[2]) != step:
        raise CheckpointError(
            f"{path}: {COMMIT} says that this is step {step}: the folder was renamed"
        )
    _check_sizes(path, files)
    if checksums:
        _check_sums(path, files, checksum)
    index, document = (_load_json(path, name, listed=files) for name in (INDEX, DOCUMENT))
    try:
        tensors = entries_of(index["tensors"], files)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{path}: {INDEX} is malformed: {_reason(error)}") from error
    return Checkpoint(path, step, document, tensors, DiskStore(path))


def newest_checkpoint(
    run_dir: Path,
    *,
    accept: Callable[[Checkpoint], str | None],
    warn: Callable[[str], None],
) -> Checkpoint | None:
    """Return the checkpoint of the highest step that is whole and accepted; None if the run has no
    checkpoint at all.

    Args:
        accept: Says why a checkpoint doesn't suit the caller, or None if it does.
        warn: Is told of each checkpoint that was passed over, with its path and the reason.

    Raises:
        CheckpointError: there are checkpoints, and none can be used; all reasons are listed.
    """
    folder = Path(run_dir) / CHECKPOINTS
    reasons = []
    for path in _candidates(folder):
        try:
            checkpoint = open_checkpoint(path)
            reason = accept(checkpoint)
        except CheckpointError as error:
            reason = error.args[0].removeprefix(f"{path}: ")
        if reason is None:
            return checkpoint
        reasons.append(f"{path.name}: {reason}")
        warn(f"checkpoint {path} is passed over: {reason}")
    if reasons:
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be used:\n  " + "\n  ".join(reasons),
            hint="bring one of them back from a copy, or start anew in another folder (--run DIR)",
        )
    return None


def newest_saved_step(run_dir: Path) -> int:
    """Return the step of the last checkpoint that was written to its end, damaged or not; -1 if
    there is none.
    """
    return max(checkpoints_of(run_dir), default=-1)


def _candidates(folder: Path) -> list[Path]:
    """Return the folders that may be checkpoints, highest step first. A replaced one comes after
    the one that replaced it.
    """
    if not folder.is_dir():
        return []
    candidates = [
        (int(match[1] or match[2]), bool(match[1]), path)
        for path in folder.iterdir()
        if (match := _FOLDER.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(candidates, reverse=True)]


def _load_commit(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if not (path / COMMIT).is_file():
        raise CheckpointError(
            f"{path}: it has no {COMMIT}: a save that never ended, or not a checkpoint of Paceline"
        )
    commit = _load_json(path, COMMIT)
    if commit.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: it is not a checkpoint of Paceline: {COMMIT} says format "
            f"{commit.get('format')!r} instead of '{FORMAT}'"
        )
    version = commit.get("version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{path}: {COMMIT} is malformed: version {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{path}: it has format version {version} and this Paceline reads up to {VERSION}",
            hint="install the newer Paceline that wrote it",
        )
    return commit


def _load_json(path: Path, name: str, *, listed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if listed is not None and name not in listed:
        raise CheckpointError(f"{path}: {COMMIT} is malformed: it lists no {name}")
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't read {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {name} is malformed: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: {name} is malformed: not a JSON object")
    return content


def _check_sizes(path: Path, files: Mapping[str, tuple[int, str]]) -> None:
    for name, (size_bytes, _) in files.items():
        try:
            actual_bytes = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {name} is missing") from error
        if actual_bytes < size_bytes:
            raise CheckpointError(
                f"{path}: {name} is truncated: {actual_bytes} bytes of {size_bytes}"
            )
        if actual_bytes > size_bytes:
            raise CheckpointError(
                f"{path}: {name} has {actual_bytes} bytes instead of {size_bytes}"
            )


def _check_sums(path: Path, files: Mapping[str, tuple[int, str]], checksum: str) -> None:
    num_read = [0] * len(files)  # number of buffers that were read of each file so far
    is_over = Event()  # set if a damaged file was found, because the rest need not be read then

    def sum_of(number: int, name: str) -> str:
        digest, buffer = (
            xxhash.xxh3_128() if checksum == CHECKSUM else hashlib.sha256(),
            bytearray(_SUMMED_BYTES),
        )
        try:
            with (path / name).open("rb", buffering=0) as file:
                while not is_over.is_set() and (count := file.readinto(buffer)):
                    digest.update(memoryview(buffer)[:count])
                    num_read[number] += 1
        except OSError as error:
            raise CheckpointError(f"{path}: can't read {name}: {error.strerror}") from error
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool, ExitStack() as stack:  # hashing releases the interpreter
        stack.callback(is_over.set)
        sums = [pool.submit(sum_of, number, name) for number, name in enumerate(files)]
        for (name, (_, expected)), summed in zip(files.items(), sums, strict=True):
            before = -1
            while not wait([summed], timeout=LOOK_S).done:
                if (now := sum(num_read)) != before:
                    before = now
                    long_work.advanced()
            if (actual := summed.result()) != expected:
                raise CheckpointError(
                    f"{path}: {name} is damaged: its {checksum} is {actual}, and {COMMIT} says "
                    f"{expected}"
                )


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"
