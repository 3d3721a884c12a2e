"""Copies of the run's state in memory that outlives the ranks, for those that take their place.

A copy holds what a checkpoint would: the pieces of each rank that writes checkpoints, in memory of this host. Ranks
that start again after one of them was lost read the newest step of which all these have a copy, and so lose no step
that is older. Where a step is several updates, copies count updates in place of steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.logs import logger
from paceline.checkpoint.files import bytes_of
from paceline.checkpoint.index import add_piece, file_of
from paceline.checkpoint.pieces import TensorPiece
from paceline.checkpoint.staging import Staging
from paceline.cluster.limits import free_memory_bytes
from paceline.launch.hosts.copy_service import CopyAddress
from paceline.launch.process.context import RankContext
from paceline.launch.process.memory_store import SLOTS, TIME_SHARE, StateCopies
from paceline.training.parts.drift import FINGERPRINTS

if TYPE_CHECKING:
    from paceline.launch.hosts.host_copies import HostCopies

_REMEMBERED = 5  # copies, whose time is known
_NEVER = 2**62  # steps from copy to copy
_Copied = Sequence[tuple[TensorPiece, torch.Tensor]]  # pieces with copies of their tensors
MEMORY_SHARE = 0.5  # of this host's free memory that the copies of all its ranks may take


@dataclass
class Copier:
    """Makes one rank's copies, every so many steps.

    num_ranks: of this host that copy. part: which part of the state this rank holds, and how many there are.
    neighbour: the host's memory, where another host takes copies over now and then. every: steps from copy to copy.
    next_step: after which to copy next. send_every, next_send: likewise for copies that are taken over. All alike on
    all ranks. sending: step of the copy that is being taken over; -1 for none. sent: of the last one that was, on all
    hosts. blocked_s: time that the run spent on copies. has_failed: whether this host refused memory for one; this
    rank makes none then.
    """

    context: RankContext
    copies: StateCopies
    num_ranks: int
    part: tuple[int, int]
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
    _latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _staging: Staging = field(default_factory=Staging)
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    def begin(self, step: int, *, is_copied: bool) -> None:
        """The run goes on from this step. is_copied: from what is in memory of it, which is kept, as it stands: others
        may still read it, and it is there if ranks are lost again before the next copy. Collective with a neighbour."""
        context, host, kept_step = (
            self.context,
            self.context.host_copies,
            step if is_copied else None,
        )
        self.copies.keep(context.slot, until=kept_step)
        self.next_step = self.next_send = step + 1
        if host is not None and context.slot == 0:
            for slot in range(host.num_ranks, 2 * host.num_ranks):
                self.copies.keep(slot, until=kept_step)
        if self.neighbour is None:
            return
        sent = self.neighbour.sent_step
        self.sent = sent if is_copied and sent <= step else -1
        if context.slot == 0:
            self.neighbour.sent_step = self.sent
            self._keep_for_the_one_before(self.neighbour)
        if is_copied and step != self.sent and step in self.copies.steps(context.slot):
            self.send(step)

    def _keep_for_the_one_before(self, own: HostCopies) -> None:
        """Let this host keep the copies of the one before it."""
        store, num_local = self.context.store, self.context.local_world_size
        assert store is not None
        num_hosts, host = self.context.world_size // num_local, self.context.rank // num_local
        store.set(f"keeps/{host}", json.dumps(asdict(own.address)))
        address = self.context.hear(f"keeps/{(host - 1) % num_hosts}", "restore")
        own.keep_for(CopyAddress(**json.loads(address)))

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
        began_s: float | None = None,
    ) -> None:
        """Copy the pieces that this rank owns, and on rank 0 the document. Only a digest is kept of fingerprints.

        The host does not wait for copies from a GPU, which are there once another thread has put them into their place.

        began_s: When the run began to spend time on it, by `time.perf_counter`.
        """
        began_s = time.perf_counter() if began_s is None else began_s
        self.wait()
        pieces, text = list(pieces), json.dumps(document)
        if any(piece.tensor.is_cuda for piece in pieces):
            is_first = self.num_copies == 0
            copied = list(zip(pieces, self._staging.copy(pieces), strict=True))
            self._thread = threading.Thread(
                target=self._write_staged,
                args=(step, copied, text, None if is_first else began_s),
                name=f"paceline-copy-step-{step}",
                daemon=True,
            )
            self._thread.start()
        else:
            self._write(step, [(piece, piece.tensor) for piece in pieces], text)
            self._latest_s.append(time.perf_counter() - began_s)
        self.next_step, self.num_copies = step + self.every, self.num_copies + 1
        self.blocked_s += time.perf_counter() - began_s

    def wait(self) -> None:
        """Return when the last copy is in its place, if this host has memory for it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _write_staged(
        self, step: int, copied: _Copied, document: str, began_s: float | None
    ) -> None:
        """began_s: None where memory was pinned for the first time, which takes longer than what comes later."""
        try:
            self._staging.wait()
            if (
                began_s is not None
            ):  # the GPU is done with it, and this thread has a core of its own
                self._latest_s.append(time.perf_counter() - began_s)
            self._write(step, copied, document)
        except Exception as error:
            self._error = error

    def _write(self, step: int, copied: _Copied, document: str) -> None:
        """Without memory the run goes on: all ranks learn of it by `fits`, when they look for memory again."""
        if self.has_failed:
            return
        tensors, prints, parts, offset = dict[str, Any](), dict[str, str](), [], 0
        for piece, tensor in copied:
            data = bytes_of(tensor)
            if piece.name.startswith(FINGERPRINTS):
                prints[piece.name] = hashlib.sha256(data).hexdigest()[:16]
                continue
            add_piece(tensors, piece, file=file_of(self.context.rank), key=str(offset))
            parts.append(data)
            offset += len(data)
        origin = {
            "attempt": self.context.attempt,
            "rank": self.context.rank,
            "host_ranks": self.num_ranks,
            "part": self.part[0],
            "num_parts": self.part[1],
            "prints": prints,
        }
        index = {"document": document, "tensors": tensors, "origin": origin}
        try:
            self.copies.write(
                self.context.slot,
                step,
                parts,
                json.dumps(index).encode(),
                keep={self.sent, self.sending} - {-1},
            )
        except OSError as error:
            self.has_failed = True
            logger.warning(f"this host refuses memory for a copy of the state: {error.strerror}")

    def set_pace(
        self,
        pieces: Iterable[TensorPiece],
        latest_s: Sequence[float],
        *,
        steps: int = 1,
        greatest: Callable[[int], int] = lambda value: value,
    ) -> bool:
        """Set the steps from copy to copy, before the first one and after 1, 2, 4, 8, ... of them.

        Args:
            pieces: Of the next copy.
            latest_s: Times of the run's latest steps, each as long as `steps` of the steps that are counted here.
            greatest: Returns the greatest value over all ranks; collective.

        Returns:
            Whether there is memory for more copies, as far as is known.
        """
        if self.num_copies & (self.num_copies - 1):
            return True
        self.wait()  # so that its time is known
        step_s = statistics.median(latest_s or [0.0]) / steps
        fits = self.fits(list(pieces))
        self.every = greatest(self.affordable_every(step_s) if fits else _NEVER)
        if self.neighbour is not None:
            self.send_every = greatest(_affordable(self.neighbour.took_s, step_s))
        return self.every < _NEVER

    def affordable_every(self, step_s: float) -> int:
        """Return the steps from copy to copy that keep the time of one within `TIME_SHARE` of all.

        The time is the median of the latest, as other work on the machine delays some. On CPUs it is the whole time of
        a copy; on a GPU it ends when the tensors are in pinned memory. step_s: of one step.
        """
        return _affordable(statistics.median(self._latest_s) if self._latest_s else 0.0, step_s)

    def fits(self, pieces: Sequence[TensorPiece]) -> bool:
        """Whether copies of all ranks of this host, each of pieces as large as these, fit into its memory, where those
        that are there stand already, and none was refused. What is on a GPU is copied to pinned memory first."""
        if self.has_failed:
            return False
        num_bytes = sum(piece.tensor.nbytes for piece in pieces)
        num_bytes *= SLOTS + (SLOTS + 1 if self.neighbour is not None else 0)
        num_bytes += self._staging.missing_bytes(p for p in pieces if p.tensor.is_cuda)
        made_bytes = self.copies.num_bytes(self.context.slot)
        return self.num_ranks * num_bytes <= MEMORY_SHARE * (
            free_memory_bytes() + self.num_ranks * made_bytes
        )


def _affordable(took_s: float, step_s: float) -> int:
    """Return the steps between what takes so long, for `TIME_SHARE` of their time."""
    return max(1, math.ceil(took_s / (TIME_SHARE * step_s))) if step_s > 0 else 1
