"""Prepares a GPU's batches one step ahead: they are made, pinned and copied while the GPU computes
the previous step.

The rank's main thread makes them after it has launched a step and before it waits for the device.
Data sets may draw from the process's generators, and a thread beside the step would do that in
another order each time. Generators are left as they were. A CPU rank computes on its own cores, so
its batches are made when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.nested import map_tensors
from paceline.base.streams import kept_streams
from paceline.job.order import Window
from paceline.training.feed import MicroBatch


@dataclass(frozen=True, slots=True)
class Fed:
    """The samples of a step on this rank."""

    window: Window
    batches: list[MicroBatch]  # on the CPU
    placed: list[MicroBatch]  # the same on the device, if it is a GPU


class Prefetch:
    """Takes windows from a feed, at most one more than was requested.

    Args:
        dtype: Dtype of floating-point tensors on the device; None leaves them unchanged.
    """

    def __init__(
        self,
        feed: Iterator[tuple[Window, list[MicroBatch]]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.feed, self.device, self.dtype = feed, device, dtype
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: Fed | Exception | None = None
        self._is_ready = False

    def prepare_next(self) -> None:
        """Make the next step's batches now, if the device computes meanwhile.

        An error is raised when the batches are requested, because it belongs to their step.
        """
        if self.copies is None or self._is_ready:
            return
        with kept_streams():
            try:
                self._ready = self._next_fed()
            except Exception as error:
                self._ready = error
        self._is_ready = True

    def next(self) -> Fed | None:
        """Return the next step's batches; None if the feed has ended."""
        if not self._is_ready:
            self._ready = self._next_fed()
        ready, self._ready, self._is_ready = self._ready, None, False
        if isinstance(ready, Exception):
            raise ready
        if ready is not None and self.copies is not None:
            used_on = torch.cuda.current_stream(self.device)
            used_on.wait_stream(self.copies)
            for tensor in tensors(ready.placed):
                tensor.record_stream(
                    used_on
                )  # otherwise the copy stream would reuse its memory too early
        return ready

    def _next_fed(self) -> Fed | None:
        following = next(self.feed, None)
        if following is None:
            return None
        window, batches = following
        if self.copies is None:
            return Fed(window, batches, batches)
        if tensors(batches):  # the data set makes tensors on the GPU
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            return Fed(window, batches, [batch.to(self.device, self.dtype) for batch in batches])


def tensors(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Return the tensors of micro-batches that are on a GPU."""
    flat: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            flat.append(tensor)

    for batch in batches:
        map_tensors(note, (batch.input, batch.target))
    return flat
