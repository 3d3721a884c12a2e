"""The memory of a server's share of the parameters, from which chunks go out and into which they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.strategies.server.shards import Chunk


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor, as bytes that can be sent and received into."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ShardMemory:
    """A server's elements of every dtype, one after another. Chunks are sent and received without a call of torch:
    each of those gives other threads the chance to run, and a server has many.
    """

    def __init__(self, numels: Mapping[str, int]) -> None:
        self.flat = {
            dtype: torch.empty(numel, dtype=getattr(torch, dtype))
            for dtype, numel in numels.items()
        }
        self.bytes = {dtype: bytes_of(flat) for dtype, flat in self.flat.items()}

    def elements(self, chunk: Chunk) -> torch.Tensor:
        return self.flat[chunk.dtype][chunk.start : chunk.stop]

    def sent(self, chunk: Chunk) -> memoryview:
        """A chunk as it is on the wire."""
        if chunk.wire_dtype != chunk.dtype:
            return bytes_of(self.elements(chunk).to(getattr(torch, chunk.wire_dtype)))
        item_bytes = chunk.num_bytes // (chunk.stop - chunk.start)
        return self.bytes[chunk.dtype][chunk.start * item_bytes : chunk.stop * item_bytes]

    def receive(self, chunk: Chunk, read_into: Callable[[memoryview], None]) -> None:
        """Fill a chunk with what is read."""
        if chunk.wire_dtype == chunk.dtype:
            read_into(self.sent(chunk))
            return
        narrow = torch.empty(chunk.stop - chunk.start, dtype=getattr(torch, chunk.wire_dtype))
        read_into(bytes_of(narrow))
        self.elements(chunk).copy_(narrow)
