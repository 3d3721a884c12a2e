"""Gathers units and sums gradients of CPU ranks in shared memory, in buffers that are reused.

FSDP2 allocates new buffers for both. Ranks would copy them to shared memory, and the C library's
heap would keep several times the bytes that are in use; see docs/memory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.launch.collectives.group import all_gather, allocate, reduce_scatter
from paceline.torch_private.storage import num_references

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Buffers:
    """A pool of memory that is reused once nothing refers to it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._memory: list[torch.Tensor] = []

    def take(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor with arbitrary contents."""
        num_bytes = numbers * dtype.itemsize
        unused = [memory for memory in self._memory if num_references(memory) == _UNUSED]
        memory = next((memory for memory in unused if memory.numel() >= num_bytes), None)
        if memory is None:
            self._memory = [
                memory for memory in self._memory if all(memory is not other for other in unused)
            ]
            del unused  # frees the memory first
            memory = allocate(num_bytes, self.group)
            self._memory.append(memory)
        return memory[:num_bytes].view(dtype)


_UNUSED = num_references(torch.empty(1))


class InPlaceGather:
    """An implementation of FSDP2's `AllGather` with these buffers."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.buffers.take(math.prod(size), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather all parts into `output_tensor`.

        Collective. input_tensor: this rank's part of output_tensor.
        """
        all_gather(output_tensor, input_tensor, group)


class InPlaceReduceScatter:
    """An implementation of FSDP2's `ReduceScatter` with these buffers."""

    def __init__(self, buffers: Buffers, num_ranks: int) -> None:
        self.buffers, self.num_ranks, self._last = buffers, num_ranks, 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for the whole tensor, or new memory for a part of the last one.

        The part becomes gradients, which are kept.
        """
        numbers = math.prod(size)
        is_part, self._last = numbers * self.num_ranks == self._last, numbers
        return torch.empty(numbers, dtype=dtype) if is_part else self.buffers.take(numbers, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum this rank's part of all ranks' tensors. Collective."""
        reduce_scatter(output_tensor, input_tensor, op, group)


def exchange_in_place(modules: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
    """Make modules with parameters on the CPU use the same buffers."""
    buffers = Buffers(group)
    for module in modules:
        # These do not inherit from torch's base classes, which have no code, and whose import takes
        # as long as FSDP2's.
        module.set_custom_all_gather(InPlaceGather(buffers))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(InPlaceReduceScatter(buffers, group.size()))  # type: ignore[arg-type]
