"""Replicas that should hold equal weights are compared every so often; the first that differs is named."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from paceline.errors import DriftError
from paceline.strategies.data.run import local
from paceline.strategies.mesh import Mesh

EVERY_STEPS = 100  # reading 13 MB of weights takes 3 ms, 1/10,000 of a hundred steps of the byte GPT


def fingerprint(tensor: torch.Tensor) -> int:
    """Depends on every bit of a tensor: the sum of its words, and of its words weighted by their place."""
    raw = local(tensor.detach()).contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 4:  # a view into an odd place of a 2-byte buffer can't be read as words
        raw = raw.clone()
    words = raw[: raw.numel() // 4 * 4].view(torch.int32)
    places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int32)
    total = words.sum(dtype=torch.int64) + (words * places).sum(dtype=torch.int64) * 31
    return int(total + raw[words.numel() * 4:].sum(dtype=torch.int64))


def check_replicas(tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, step: int) -> None:
    """Compare every tensor over the data axis. Collective along it.

    Raises:
        DriftError: on every rank of the group, naming the first tensor and the ranks that are in the minority.
    """
    if mesh.sizes.get("data", 1) == 1:
        return
    group, ranks = mesh.group("data"), mesh.ranks_along("data")
    device = next(iter(tensors.values())).device
    own = torch.tensor([fingerprint(tensor) for tensor in tensors.values()], dtype=torch.int64, device=device)
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if torch.equal(least, most):
        return
    everyone = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyone, own, group=group)
    at = int((least != most).nonzero()[0])
    values = [int(theirs[at]) for theirs in everyone]
    usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    name, when = list(tensors)[at], f"after step {step}" if step else "before the first step"
    raise DriftError(
        f"replicas differ {when}: '{name}' on rank {', '.join(map(str, odd))} is not what the others hold "
        f"({int((least != most).sum())} of {len(own)} tensors differ)",
        hint="something changes weights on one rank only: a model built with the rank or the time in its seed, "
             "an update outside the optimizer, or faulty memory")
