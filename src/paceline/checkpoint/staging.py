"""Copies the parts of a checkpoint that lie on a GPU to pinned memory, on a separate stream, while
the run continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from paceline.checkpoint.pieces import TensorPiece


class Staging:
    """Pinned memory for a rank's pieces, kept from save to save, and the copies into it."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        # The stream on which copies run, and the event after those of the last save; None before
        # the first.
        self._stream: torch.cuda.Stream | None = None
        self._all_copied: torch.cuda.Event | None = None
        self._holds_up_update = False
        self._lock = threading.Lock()

    def reserve(self, pieces: Sequence[TensorPiece]) -> None:
        """Pin memory for these pieces, so that the first save has it. Call this on a separate
        thread, because pinning takes 0.5 s a GB on the host of an H200.
        """
        if pieces:  # this thread would use the first GPU otherwise
            torch.cuda.set_device(pieces[0].tensor.device)
        with suppress(RuntimeError):  # the save itself reports missing memory
            for piece in pieces:
                self._memory_for(piece)

    def missing_bytes(self, pieces: Iterable[TensorPiece]) -> int:
        """Return the bytes that copies of those of these pieces that are on a GPU need in addition
        to the pinned memory.

        torch pins blocks whose size is a power of two (at::CachingHostAllocator).
        """
        return sum(
            1 << (piece.tensor.nbytes - 1).bit_length()
            for piece in pieces
            if piece.tensor.is_cuda and piece.tensor.nbytes and self._pinned(piece) is None
        )

    @torch.no_grad()
    def copy(
        self, pieces: Sequence[TensorPiece], *, is_for_updates: Callable[[str], bool]
    ) -> list[torch.Tensor]:
        """Begin to copy the pieces. Their values are complete after `wait`. Call this only after an
        earlier save is written.

        The computing stream waits at once for the copies of tensors to which a forward may write.
        It waits for the other copies in `before_update`.

        Args:
            is_for_updates: Whether nothing but an update writes to the tensor of this name.
        """
        device = pieces[0].tensor.device
        if self._stream is None or self._all_copied is None:
            self._stream, self._all_copied = torch.cuda.Stream(device), torch.cuda.Event()
        computing = torch.cuda.current_stream(device)
        self._stream.wait_stream(computing)
        order = sorted(range(len(pieces)), key=lambda number: is_for_updates(pieces[number].name))
        targets: dict[int, torch.Tensor] = {}
        with torch.cuda.stream(self._stream):
            for number in order:
                if is_for_updates(pieces[number].name) and not self._holds_up_update:
                    computing.wait_stream(self._stream)
                    self._holds_up_update = True
                tensor = pieces[number].tensor.detach().resolve_conj().resolve_neg()
                tensor.record_stream(self._stream)  # else its memory could be reused before
                targets[number] = self._memory_for(pieces[number]).copy_(tensor, non_blocking=True)
            self._all_copied.record(self._stream)
        if not self._holds_up_update:
            computing.wait_event(self._all_copied)
        return [targets[number] for number in range(len(pieces))]

    def before_update(self) -> None:
        """Make all work that is launched from now on wait for the copies of tensors to which
        updates write. The host does not wait.
        """
        if self._holds_up_update and self._stream is not None and self._all_copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._all_copied)
            self._holds_up_update = False

    def wait(self) -> None:
        """Return when the copies are complete. Any thread may call this."""
        if self._all_copied is not None:
            self._all_copied.synchronize()

    def _memory_for(self, piece: TensorPiece) -> torch.Tensor:
        with self._lock:
            memory = self._pinned(piece)
            if memory is None:
                memory = self.memory[piece.name, piece.offsets] = torch.empty(
                    piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=True
                )
            return memory

    def _pinned(self, piece: TensorPiece) -> torch.Tensor | None:
        """Return the memory that was pinned for such a piece."""
        memory = self.memory.get((piece.name, piece.offsets))
        is_alike = memory is not None and (memory.shape, memory.dtype) == (
            piece.tensor.shape,
            piece.tensor.dtype,
        )
        return memory if is_alike else None
