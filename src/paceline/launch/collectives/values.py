"""Values that JSON can hold, told to the other ranks of a process group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")


def values_of_all(
    value: Any, group: dist.ProcessGroup | None = None, device: torch.device = _CPU
) -> list[Any]:
    """Return the values of all ranks, in their order. Collective."""
    padded = _padded(value, group, device)
    everyone = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, padded, group=group)
    return [_heard(text) for text in everyone]


def names_of_all(
    names: Iterable[str], group: dist.ProcessGroup | None = None, device: torch.device = _CPU
) -> list[str]:
    """Return the names of all ranks, in the same order on all of them. Collective."""
    return list(dict.fromkeys(chain(*values_of_all(list(names), group, device))))


def value_of_one(
    value: Any,
    source: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> Any:
    """Return the value of one rank; those of the others are not told. Collective.

    source: its number among all ranks.
    """
    padded = _padded(value if dist.get_rank() == source else None, group, device)
    dist.broadcast(padded, source, group=group)
    return _heard(padded)


def _padded(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Return a value as text, with as many blanks as make that of every rank as long."""
    data = json.dumps(value).encode()
    size = torch.tensor([len(data)], device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    return torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8).to(device)


def _heard(text: torch.Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
