"""Copies of the run's state in memory that outlives the ranks, for those that take their place.

A copy holds what a checkpoint would: each rank's pieces, in memory of this host. Ranks that start again after one of
them was lost read the newest step of which all have a copy, and so lose no step that is older.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.launch.context import RankContext
from paceline.launch.state_copies import SLOTS, StateCopies
from paceline.runtime.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.runtime.checkpoint.pieces import Region, TensorPiece
from paceline.runtime.checkpoint.read import Checkpoint, StoredPiece, TensorEntry, newest_saved_step
from paceline.waiting import waiting

# Of a run's time, spent on copies. Watching, hashing and the journal have the rest of 1 %.
BUDGET = 0.007
MEMORY_SHARE = 0.5  # of this host's free memory that the copies of all its ranks may take


@dataclass
class Copier:
    """Makes one rank's copies, every so many steps.

    every: steps from copy to copy. next_step: after which to copy next; both alike on all ranks.
    blocked_s: time that the run spent on copies.
    """

    context: RankContext
    copies: StateCopies
    every: int = 1
    next_step: int = 1
    blocked_s: float = 0.0
    num_copies: int = 0
    num_bytes: int = 0
    _last_s: float = field(default=0.0, repr=False)

    def begin(self, step: int, *, is_copied: bool) -> None:
        """The run goes on from this step. is_copied: from the copies of it, which are kept, as they stand."""
        self.copies.keep(self.context.rank, step=step if is_copied else None)
        self.next_step = step + 1

    def copy(self, step: int, pieces: Iterable[TensorPiece], document: Mapping[str, Any] | None) -> None:
        """Copy the pieces that this rank owns, and on rank 0 the document.

        Raises:
            OSError: this host has no memory for it.
        """
        began_s = time.perf_counter()
        tensors: dict[str, dict[str, Any]] = {}
        parts, offset = [], 0
        for piece in pieces:
            data = _bytes_of(piece.tensor)
            entry = tensors.setdefault(piece.name, {"shape": piece.shape, "dtype": DTYPE_NAMES[piece.tensor.dtype],
                                                    "pieces": []})
            entry["pieces"].append((offset, piece.offsets, tuple(piece.tensor.shape)))
            parts.append(data)
            offset += len(data)
        index = json.dumps({"document": document, "tensors": tensors}).encode()
        self.copies.write(self.context.rank, step, parts, index)
        self.next_step = step + self.every
        self._last_s = time.perf_counter() - began_s
        self.blocked_s, self.num_copies, self.num_bytes = self.blocked_s + self._last_s, self.num_copies + 1, offset

    def affordable_every(self, step_s: float) -> int:
        """Steps from copy to copy that keep the last one's time within the budget. step_s: of one step."""
        return max(1, math.ceil(self._last_s / (BUDGET * step_s))) if step_s > 0 else 1

    def fits(self) -> bool:
        """Whether copies of all ranks of this host, each as large as this rank's, fit into its memory; some are made
        already."""
        free_bytes = psutil.virtual_memory().available + self.num_bytes
        return SLOTS * self.num_bytes * self.context.local_world_size <= MEMORY_SHARE * free_bytes


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as they lie in memory; a copy of them where they don't lie in a row on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return _view(flat)


def _view(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    elements: Any = flat.view(torch.uint8).numpy()
    return memoryview(elements)


@dataclass(frozen=True)
class CopiedState(Checkpoint):
    """A copy of all ranks' state, to be read as a checkpoint is."""

    copies: StateCopies | None = None

    def _open(self, file: str) -> Any:
        assert self.copies is not None
        return _RankCopy(self.copies, int(file), self.step)


@dataclass(frozen=True, slots=True)
class _RankCopy:
    copies: StateCopies
    rank: int
    step: int

    def read(self, piece: StoredPiece, dtype: torch.dtype, part: tuple[slice, ...]) -> torch.Tensor:
        flat = torch.empty(piece.region.numel, dtype=dtype, device="cpu")
        self.copies.read_into(self.rank, self.step, int(piece.key), _view(flat))
        return flat.reshape(piece.region.shape)[part]


def open_copy(copies: StateCopies, step: int) -> CopiedState:
    """What all ranks have copied after this step."""
    document: dict[str, Any] = {}
    tensors: dict[str, TensorEntry] = {}
    for rank in range(copies.num_ranks):
        index = json.loads(copies.index(rank, step))
        document = index["document"] or document
        for name, entry in index["tensors"].items():
            pieces = tuple(StoredPiece(str(rank), str(offset), Region(tuple(offsets), tuple(shape)))
                           for offset, offsets, shape in entry["pieces"])
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = TensorEntry(tuple(entry["shape"]), DTYPES[entry["dtype"]], before + pieces)
    return CopiedState(Path(f"copy-{step}"), step, document, tensors, copies)


def open_newest(context: RankContext, run_dir: Path) -> CopiedState | None:
    """The newest copy that all ranks of an earlier start have left, if it is newer than what the run folder has. Rank 0
    chooses for all ranks."""
    if context.copies is None or context.num_starts == 1:
        return None
    if context.rank == 0:
        step = context.copies.newest()
        if step is not None and step < newest_saved_step(run_dir):
            step = None
        if context.store is not None:
            context.store.set("copy", json.dumps(step))
    else:
        assert context.store is not None
        with waiting:
            step = json.loads(context.store.get("copy"))
    return None if step is None else open_copy(context.copies, step)
