"""Copies of a checkpoint's pieces, from which it is written while the run continues."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch

from paceline.checkpoint.pieces import TensorPiece, copy
from paceline.launch.process.memory_use import LeftOut


class Staging:
    """CPU memory for copies of a rank's pieces, and the copies.

    The memory is kept from save to save, because the first write to a GB took 0.5 to 2.6 s on
    virtual machines with 2 cores, and later ones 0.1 s. Pinning a GB took 0.5 s on the host of an
    H200. The memory does not count as memory of the rank.
    """

    def __init__(self) -> None:
        self.memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None  # after the last copies from a GPU

    def missing_bytes(self, pieces: Iterable[TensorPiece]) -> int:
        """Return the bytes that copies of these pieces need in addition to the memory that is kept.

        torch pins blocks whose size is a power of two (at::CachingHostAllocator).
        """
        missing = [piece.tensor for piece in pieces if self._kept(piece) is None]
        return sum(
            1 << (tensor.nbytes - 1).bit_length()
            if tensor.is_cuda and tensor.nbytes
            else tensor.nbytes
            for tensor in missing
        )

    @torch.no_grad()
    def copy(self, pieces: Sequence[TensorPiece]) -> list[torch.Tensor]:
        """Copy the pieces. The copies are complete after `wait`. Call this only after an earlier
        save is written.

        A GPU copies its tensors before the work that is launched later, and the host does not wait.
        """
        if missing := [piece for piece in pieces if self._kept(piece) is None]:
            self._take_memory(missing)
        copies = [self.memory[piece.name, piece.offsets] for piece in pieces]
        for piece, target in zip(pieces, copies, strict=True):
            tensor = piece.tensor.detach()
            if tensor.is_cuda:
                target.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
            else:
                copy(target, tensor)
        if any(piece.tensor.is_cuda for piece in pieces):
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copies

    def wait(self) -> None:
        """Return when the copies are complete. Any thread may call this."""
        if self._copied is not None:
            self._copied.synchronize()

    def _take_memory(self, pieces: Sequence[TensorPiece]) -> None:
        """Take memory for copies of these pieces: pinned for those on a GPU, otherwise shared with
        forks, which would keep a copy of what they inherit.
        """
        num_bytes = sum(_aligned(piece.tensor) for piece in pieces if not piece.tensor.is_cuda)
        mapped, begin = mmap.mmap(-1, max(num_bytes, 1)), 0
        LeftOut(mapped).grow(num_bytes)
        shared = torch.frombuffer(mapped, dtype=torch.uint8)
        for piece in pieces:
            tensor = piece.tensor
            if tensor.is_cuda:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            else:
                memory = shared[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                begin += _aligned(tensor)
            self.memory[piece.name, piece.offsets] = memory

    def _kept(self, piece: TensorPiece) -> torch.Tensor | None:
        """Return the memory that was taken for such a piece."""
        memory = self.memory.get((piece.name, piece.offsets))
        is_alike = memory is not None and (memory.shape, memory.dtype) == (
            piece.tensor.shape,
            piece.tensor.dtype,
        )
        return memory if is_alike else None


def _aligned(tensor: torch.Tensor) -> int:
    """Return the bytes up to where the next tensor begins: a multiple of any dtype's size."""
    return tensor.nbytes + -tensor.nbytes % 64
