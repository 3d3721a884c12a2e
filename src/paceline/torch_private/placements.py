"""How DTensor cuts and moves tensors. Importing this file imports torch.distributed.tensor.

Private names: `torch.distributed.tensor.placement_types._StridedShard`,
`torch.distributed.tensor._utils` with `compute_local_shape_and_global_offset`,
`torch.distributed.tensor._dispatch` with `redistribute_local_tensor`. Tested with torch 2.11 and
2.13.

If DTensor moves tensors by another function, `replaced_moves` must replace that one: operators of
split layers would otherwise send while they are recorded, or be recorded without their exchanges.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import _dispatch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard


def local_shape(shape: torch.Size, mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of this rank's part of a tensor."""
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


@contextmanager
def replaced_moves(move: Callable[..., Any]) -> Iterator[None]:
    """Let `move(local, before, after, **options)` make parts where DTensor would exchange them.

    before, after: specs, as of `dtensor.spec_of`.
    """
    real = _dispatch.redistribute_local_tensor
    _dispatch.redistribute_local_tensor = move
    try:
        yield
    finally:
        _dispatch.redistribute_local_tensor = real
