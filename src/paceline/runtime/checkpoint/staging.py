"""What of a checkpoint lies on a GPU: copied to pinned memory on a stream of its own, while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.runtime.checkpoint.pieces import TensorPiece


class Staging:
    """Pinned memory for a rank's pieces, kept from save to save, and the copies into it.

    copies: the stream of the copies. all_copied: recorded behind those of the last save.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.copies = device, torch.cuda.Stream(device)
        self.memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.all_copied = torch.cuda.Event()
        self._holds_up_update = False

    @torch.no_grad()
    def copy(self, pieces: Sequence[TensorPiece], *, is_for_updates: Callable[[str], bool]) -> list[torch.Tensor]:
        """Begin to copy the pieces; their values are here after `wait`. Not before an earlier save is written.

        The computing stream waits at once for what a forward may write to, and for the rest in `before_update`.

        Args:
            is_for_updates: Whether nothing but an update writes to the tensor of this name.
        """
        computing = torch.cuda.current_stream(self.device)
        self.copies.wait_stream(computing)
        order = sorted(range(len(pieces)), key=lambda number: is_for_updates(pieces[number].name))
        targets: dict[int, torch.Tensor] = {}
        with torch.cuda.stream(self.copies):
            for number in order:
                if is_for_updates(pieces[number].name) and not self._holds_up_update:
                    computing.wait_stream(self.copies)
                    self._holds_up_update = True
                targets[number] = self._copied(pieces[number])
            self.all_copied.record(self.copies)
        if not self._holds_up_update:
            computing.wait_event(self.all_copied)
        return [targets[number] for number in range(len(pieces))]

    def before_update(self) -> None:
        """Let what is launched from now on wait for the copies of what updates write to. The host doesn't wait."""
        if self._holds_up_update:
            torch.cuda.current_stream(self.device).wait_event(self.all_copied)
            self._holds_up_update = False

    def wait(self) -> None:
        """Return when the copies are here. From any thread."""
        self.all_copied.synchronize()

    def _copied(self, piece: TensorPiece) -> torch.Tensor:
        tensor = piece.tensor.detach().resolve_conj().resolve_neg()
        place = piece.name, piece.offsets
        target = self.memory.get(place)
        if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            target = self.memory[place] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor.record_stream(self.copies)  # else its memory could be used again before it is read
        return target.copy_(tensor, non_blocking=True)
