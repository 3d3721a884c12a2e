"""Replicas that should hold equal weights are compared every so often; the first that differs is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.errors import DriftError
from paceline.runtime.upload import uploaded
from paceline.strategies.mesh import Mesh, local_part

if TYPE_CHECKING:
    from paceline.runtime.stepper import Stepper

EVERY_STEPS = 100  # reading 13 MB of weights takes 3 ms, 1/10,000 of a hundred steps of the byte GPT


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Depends on every bit of a tensor: the sum of its words, and of its words weighted by their place. A whole number
    on the tensor's device, which the host need not wait for."""
    raw = local_part(tensor.detach()).contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 4:  # a view into an odd place of a 2-byte buffer can't be read as words
        raw = raw.clone()
    words = raw[: raw.numel() // 4 * 4].view(torch.int32)
    places = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int32)
    total = words.sum(dtype=torch.int64) + (words * places).sum(dtype=torch.int64) * 31
    return total + raw[words.numel() * 4:].sum(dtype=torch.int64)


def replicated(stepper: Stepper) -> dict[str, torch.Tensor]:
    """What replicas should hold alike: the run's weights, and all buffers."""
    buffers = {name: buffer for name, buffer in stepper.model.named_buffers() if name not in stepper.buffers.unlike}
    return {**stepper.step_sync.global_weights(stepper.held), **buffers}


def check_replicas(tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, step: int, edited: Collection[str] = (),
                   outside: Collection[str] = ()) -> None:
    """Compare every tensor along each axis of copies. Collective along them.

    Args:
        edited: Names of parameters that forwards were seen to change.
        outside: Names of those that something else than forward and update was seen to change on this rank.

    Raises:
        DriftError: on every rank of the group, naming the first tensor, the ranks that are in the minority, and what
            was seen to change it.
    """
    for axis in mesh.copy_axes:
        if mesh.sizes[axis] > 1:
            _check_along(axis, tensors, mesh=mesh, step=step, edited=edited, outside=outside)


def _check_along(axis: str, tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, step: int, edited: Collection[str],
                 outside: Collection[str]) -> None:
    group, ranks = mesh.group(axis), mesh.ranks_along(axis)
    device = next(iter(tensors.values())).device
    fingerprints = torch.stack([uploaded(fingerprint(tensor), device) for tensor in tensors.values()])
    least, most = fingerprints.clone(), fingerprints.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if torch.equal(least, most):
        return
    everyone = [torch.empty_like(fingerprints) for _ in ranks]
    dist.all_gather(everyone, fingerprints, group=group)
    at = int((least != most).nonzero()[0])
    values = [int(theirs[at]) for theirs in everyone]
    usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    name, when = list(tensors)[at], f"after step {step}" if step else "before the first step"
    flags = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(flags, torch.tensor([int(name in outside)]), group=group)
    writers = [rank for rank, flag in zip(ranks, flags, strict=True) if int(flag)]
    raise DriftError(
        f"replicas differ {when}: '{name}' on rank {', '.join(map(str, odd))} is not what the others hold "
        f"({int((least != most).sum())} of {len(fingerprints)} tensors differ)",
        hint=_cause(name, step, is_edited=name in edited, writers=writers))


def _cause(name: str, step: int, *, is_edited: bool, writers: Sequence[int]) -> str:
    """What was seen of it, and what it is likely to come from."""
    if not step:
        return "the model is not built alike on all ranks: its initial values depend on the rank, the time or the host"
    if is_edited:
        return (f"a forward changes '{name}' in place: if what it becomes depends on the samples, let it be a buffer, "
                "which becomes the mean of all replicas")
    if writers:
        return (f"'{name}' was written to between an update and the next forward on rank "
                f"{', '.join(map(str, writers))}: by the data set, a hook, or another thread")
    return ("replicas were equal when the run began, and nothing but updates was seen to change this tensor: an "
            "optimizer that draws random numbers or asks for the time, a hook on gradients that differs by rank, a "
            "write through .data, or faulty memory")
