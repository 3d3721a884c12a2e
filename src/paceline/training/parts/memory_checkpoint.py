"""Copies of the run's state in memory that outlives the ranks, for those that take their place.

A copy holds what a checkpoint would: the pieces of each rank that writes checkpoints, in memory of this host. Ranks
that start again after one of them was lost read the newest step of which all these have a copy, and so lose no step
that is older. Where a step is several updates, copies count updates in place of steps.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.logs import logger
from paceline.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.checkpoint.files import bytes_of
from paceline.checkpoint.pieces import Region, TensorPiece
from paceline.checkpoint.read import Checkpoint, StoredPiece, TensorEntry, newest_saved_step
from paceline.checkpoint.staging import Staging
from paceline.cluster.limits import free_memory_bytes
from paceline.launch.process.context import RankContext
from paceline.launch.process.memory_store import SLOTS
from paceline.launch.process.state_copies import TIME_SHARE, StateCopies
from paceline.training.parts.drift import disagreement

if TYPE_CHECKING:
    from paceline.launch.hosts.host_copies import HostCopies

_REMEMBERED = 5  # copies, whose time is known
MEMORY_SHARE = 0.5  # of this host's free memory that the copies of all its ranks may take


@dataclass
class Copier:
    """Makes one rank's copies, every so many steps.

    num_ranks: of this host that copy. origin: what a copy says of its rank. neighbour: the host's memory, where another
    host takes copies over now and then. every: steps from copy to copy. next_step: after which to copy next.
    send_every, next_send: likewise for copies that are taken over. All alike on all ranks. sending: step of the copy
    that is being taken over; -1 for none. sent: of the last one that was, on all hosts. blocked_s: time that the run
    spent on copies. has_failed: whether this host refused memory for one; this rank makes none then.
    """

    context: RankContext
    copies: StateCopies
    num_ranks: int
    origin: Mapping[str, Any] = field(default_factory=dict)
    neighbour: HostCopies | None = None
    every: int = 1
    next_step: int = 1
    send_every: int = 1
    next_send: int = 1
    sending: int = -1
    sent: int = -1
    blocked_s: float = 0.0
    num_copies: int = 0
    has_failed: bool = False
    _latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), repr=False)
    _staging: Staging | None = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: Exception | None = field(default=None, repr=False)

    def begin(self, step: int, *, is_copied: bool) -> None:
        """The run goes on from this step. is_copied: from what is in memory of it, which is kept, as it stands: others
        may still read it, and it is there if ranks are lost again before the next copy."""
        self.copies.keep(self.context.slot, until=step if is_copied else None)
        self.next_step = self.next_send = step + 1
        if self.neighbour is not None:
            self.sent = (
                self.neighbour.sent_step if is_copied and self.neighbour.sent_step <= step else -1
            )
            if self.context.slot == 0:
                self.neighbour.sent_step = self.sent
            if is_copied and step != self.sent and step in self.copies.steps(self.context.slot):
                self.send(step)

    def send(self, step: int) -> None:
        """Let another host take over the copies of this step."""
        assert self.neighbour is not None
        self.sending, self.next_send = step, step + self.send_every
        if self.context.slot == 0:
            self.neighbour.offer(step)

    def note_sent(self) -> None:
        """What was being taken over is there on all hosts."""
        assert self.neighbour is not None
        if self.sending >= 0:
            self.sent, self.sending = self.sending, -1
            if self.context.slot == 0:
                self.neighbour.sent_step = self.sent

    def copy(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        document: Mapping[str, Any] | None,
        *,
        is_for_updates: Callable[[str], bool] = lambda name: False,
        began_s: float | None = None,
    ) -> None:
        """Copy the pieces that this rank owns, and on rank 0 the document.

        From a GPU they are copied while this goes on: see `before_update`. The copy is there once another thread has
        put it into its place.

        Args:
            is_for_updates: Whether nothing but an update of the optimizer writes to the tensor of this name.
            began_s: When the run began to spend time on it, by `time.perf_counter`.
        """
        began_s = time.perf_counter() if began_s is None else began_s
        self.wait()
        pieces = list(pieces)
        index = _index(pieces, document, self.origin)
        if on_gpu := [piece for piece in pieces if piece.tensor.is_cuda]:
            is_first = self.num_copies == 0
            self._staging = self._staging or Staging(on_gpu[0].tensor.device)
            staged = iter(self._staging.copy(on_gpu, is_for_updates=is_for_updates))
            tensors = [
                next(staged) if piece.tensor.is_cuda else piece.tensor.clone() for piece in pieces
            ]
            self._thread = threading.Thread(
                target=self._write_staged,
                args=(step, tensors, index, None if is_first else began_s),
                name=f"paceline-copy-step-{step}",
                daemon=True,
            )
            self._thread.start()
        else:
            self._write(step, [piece.tensor for piece in pieces], index)
            self._latest_s.append(time.perf_counter() - began_s)
        self.next_step, self.num_copies = step + self.every, self.num_copies + 1
        self.blocked_s += time.perf_counter() - began_s

    def before_update(self) -> None:
        """What is launched on a GPU from now on may write to tensors that only updates write to: let it wait for the
        copies of them. The host does not wait."""
        if self._staging is not None:
            self._staging.before_update()

    def wait(self) -> None:
        """Return when the last copy is in its place, if this host has memory for it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _write_staged(
        self, step: int, tensors: Sequence[torch.Tensor], index: bytes, began_s: float | None
    ) -> None:
        """began_s: None where memory was pinned for the first time, which takes longer than what comes later."""
        assert self._staging is not None
        try:
            self._staging.wait()
            if (
                began_s is not None
            ):  # the GPU is done with it, and this thread has a core of its own
                self._latest_s.append(time.perf_counter() - began_s)
            self._write(step, tensors, index)
        except Exception as error:
            self._error = error

    def _write(self, step: int, tensors: Sequence[torch.Tensor], index: bytes) -> None:
        """Without memory the run goes on: all ranks learn of it by `fits`, when they look for memory again."""
        if self.has_failed:
            return
        try:
            self.copies.write(
                self.context.slot,
                step,
                [bytes_of(tensor) for tensor in tensors],
                index,
                keep={self.sent, self.sending} - {-1},
            )
        except OSError as error:
            self.has_failed = True
            logger.warning(f"this host refuses memory for a copy of the state: {error.strerror}")

    def affordable_every(self, step_s: float) -> int:
        """Return the steps from copy to copy that keep the time of one within `TIME_SHARE` of all.

        The time is the median of the latest, as other work on the machine delays some. On CPUs it is the whole time of
        a copy; on a GPU it ends when the tensors are in pinned memory. step_s: of one step.
        """
        return _affordable(statistics.median(self._latest_s) if self._latest_s else 0.0, step_s)

    def affordable_send_every(self, step_s: float) -> int:
        """Likewise from one copy that another host takes over to the next."""
        return _affordable(self.neighbour.took_s if self.neighbour is not None else 0.0, step_s)

    def fits(self, pieces: Sequence[TensorPiece]) -> bool:
        """Whether copies of all ranks of this host, each of pieces as large as these, fit into its memory, where those
        that are there stand already, and none was refused. What is on a GPU is copied to pinned memory first."""
        if self.has_failed:
            return False
        num_bytes = sum(piece.tensor.nbytes for piece in pieces)
        num_bytes *= SLOTS + (SLOTS + 1 if self.neighbour is not None else 0)
        if on_gpu := [piece for piece in pieces if piece.tensor.is_cuda]:
            self._staging = self._staging or Staging(on_gpu[0].tensor.device)
            num_bytes += self._staging.missing_bytes(on_gpu)
        made_bytes = self.copies.num_bytes(self.context.slot)
        return self.num_ranks * num_bytes <= MEMORY_SHARE * (
            free_memory_bytes() + self.num_ranks * made_bytes
        )


def _affordable(took_s: float, step_s: float) -> int:
    """Return the steps between what takes so long, for `TIME_SHARE` of their time."""
    return max(1, math.ceil(took_s / (TIME_SHARE * step_s))) if step_s > 0 else 1


def _index(
    pieces: Iterable[TensorPiece], document: Mapping[str, Any] | None, origin: Mapping[str, Any]
) -> bytes:
    """What lies where in a copy that holds the pieces one after the other."""
    tensors: dict[str, dict[str, Any]] = {}
    offset = 0
    for piece in pieces:
        entry = tensors.setdefault(
            piece.name,
            {"shape": piece.shape, "dtype": DTYPE_NAMES[piece.tensor.dtype], "pieces": []},
        )
        entry["pieces"].append((offset, piece.offsets, tuple(piece.tensor.shape)))
        offset += piece.tensor.nbytes
    return json.dumps({"document": document, "tensors": tensors, "origin": origin}).encode()


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
        return read_part(piece, dtype, part, partial(self.copies.read_into, self.rank, self.step))


def read_part(
    piece: StoredPiece,
    dtype: torch.dtype,
    part: tuple[slice, ...],
    read_into: Callable[[int, memoryview], None],
) -> torch.Tensor:
    """A part of a piece whose key is where it begins: only those of its rows are read. read_into: fills a target from a
    place on."""
    rows, row_shape = (part[0], piece.region.shape[1:]) if part else (slice(0, 1), ())
    flat = torch.empty((rows.stop - rows.start) * math.prod(row_shape), dtype=dtype, device="cpu")
    read_into(int(piece.key) + rows.start * math.prod(row_shape) * dtype.itemsize, bytes_of(flat))
    return (
        flat.reshape(-1, *row_shape)[:, *part[1:]]
        if part and flat.numel()
        else flat.reshape([each.stop - each.start for each in part])
    )


def open_copy(copies: StateCopies, step: int, ranks: Iterable[int]) -> CopiedState:
    """What these ranks have copied after this step, which together is the run's state."""
    document: dict[str, Any] = {}
    tensors: dict[str, TensorEntry] = {}
    for rank in ranks:
        index = json.loads(copies.index(rank, step))
        document = index["document"] or document
        for name, entry in index["tensors"].items():
            pieces = tuple(
                StoredPiece(str(rank), str(offset), Region(tuple(offsets), tuple(shape)))
                for offset, offsets, shape in entry["pieces"]
            )
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = TensorEntry(
                tuple(entry["shape"]), DTYPES[entry["dtype"]], before + pieces
            )
    return CopiedState(Path(f"copy-{step}"), step, document, tensors, copies)


def open_newest(
    context: RankContext,
    run_dir: Path,
    *,
    num_ranks: int,
    before: Callable[[int], int] = lambda step: step,
) -> CopiedState | None:
    """Return the newest state of which the first ranks of an earlier start have left copies in memory.

    None if the run folder has a newer one, or if replicas held different ones. Rank 0 chooses for all ranks.

    Args:
        num_ranks: Those that copy.
        before: What copies count up to the end of a step: updates, if not steps.
    """
    if context.copies is None or context.num_starts == 1:
        return None
    ranks = range(num_ranks)
    if context.rank == 0:
        step = _newest(context.copies, ranks, least=before(newest_saved_step(run_dir)))
        if context.store is not None:
            context.store.set("copy", json.dumps(step))
    else:
        step = json.loads(context.hear("copy", "restore"))
    return None if step is None else open_copy(context.copies, step, ranks)


def _newest(copies: StateCopies, ranks: range, *, least: int) -> int | None:
    """Return the last step of which ranks have left copies; None if replicas held different ones.

    least: older ones don't count.
    """
    step = copies.newest(ranks)
    if step is None or step < least:
        return None
    if (difference := disagreement(open_copy(copies, step, ranks))) is not None:
        logger.warning(f"the copies in memory of step {step} are passed over: {difference}")
        return None
    return step
