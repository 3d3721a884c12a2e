"""Metrics over a validation set that is cut into parts. A metric whose parts don't add up to the
whole is refused, or gets all samples at once.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.base.errors import JobError, OutOfMemory
from paceline.base.nested import map_tensors
from paceline.cluster.limits import free_memory_bytes
from paceline.model.forward_state import function_kept
from paceline.strategies.mesh import Mesh
from paceline.torch_private import pytree
from paceline.training.feed import DataShard, MicroBatch
from paceline.training.loss import read_tally, without_total

_NEAR = 1e-3  # relative; a metric may be rounded to a few digits


def no_mean(
    name: str,
    metric: Callable[[Any, Any], Any],
    output: Any,
    target: Any,
    samples: int,
    model: nn.Module,
) -> JobError | None:
    """Return why a metric is refused, if its value for the parts does not give its value for the
    whole.

    It is checked for these samples, and for outputs with their values in another order, because an
    untrained model may give the same answer for all samples. The metric's state is restored.

    Returns None if it is a mean over samples or (sum, count), and keeps no state from one call to
    the next.
    """
    if not all(has_rows(leaf, samples) for leaf in pytree.tree_leaves((output, target))):
        return None  # it is unknown which part belongs to which sample
    for outputs in (output, map_tensors(_mixed, output)):
        with (
            suppress(Exception),
            function_kept(metric, model),
        ):  # the user's metric may refuse such outputs
            if words := unlike_its_parts(
                partial(_of_part, copied(metric), outputs, target, samples), samples, near=_NEAR
            ):
                return JobError(
                    f"{name} is no mean over samples: {words}, one after the other; plans cut the data "
                    "differently, so it would depend on the plan",
                    hint="return (sum, count), which add up over samples, or give pl.whole(metric), which is "
                    "called once with the outputs and targets of all samples; see `paceline docs data`",
                )
    return None


def _of_part(
    metric: Any, output: Any, target: Any, samples: int, part: range
) -> tuple[float, float]:
    rows = [
        map_tensors(lambda tensor: tensor[part.start : part.stop].clone(), each)
        for each in (output, target)
    ]
    value = without_total(metric(*rows), samples=len(part), whole=samples)
    read = read_tally(value, samples=len(part), name="a metric")
    return float(read.total), float(read.count)


def unlike_its_parts(
    tally: Callable[[range], tuple[float, float]], samples: int, *, near: float
) -> str | None:
    """Return in words how a mean over samples differs from the one that uneven parts of them give together; None if
    it doesn't.

    By chance, one cut may be even in what is counted. The second cut then is not, unless each sample counts the same.

    Args:
        tally: Returns the sum and the count of some samples; first it is asked for all.
        near: The greatest difference, relative to the mean or to 1.
    """
    total, count = tally(range(samples))
    third = max(1, samples // 3)
    for first in sorted({third, min(samples - 1, third + 1)}):
        sums, counts = zip(*map(tally, (range(first), range(first, samples))), strict=True)
        if not count or not sum(counts):
            continue
        whole, parted = total / count, sum(sums) / sum(counts)
        if math.isfinite(whole) and not abs(parted - whole) <= near * max(1.0, abs(whole)):
            return (
                f"{whole:.6g} of {samples} samples at once, {parted:.6g} as the mean of its parts"
            )
    return None


def copied(metric: Any) -> Any:
    """Return a copy of the metric, because it may add to a state of its own; itself if it can't be
    copied.
    """
    with suppress(Exception):
        return copy.deepcopy(metric)
    return metric


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0)).to(
        tensor.device
    )
    return tensor.flatten()[order].view(tensor.shape)


def has_rows(leaf: Any, samples: int) -> bool:
    """Whether this is a tensor with a row for each sample."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == samples


class AllSamples:
    """Outputs and targets of a validation set, gathered in the order of its samples."""

    def __init__(self, part: DataShard, mesh: Mesh, device: torch.device) -> None:
        self.part, self.mesh, self.device = part, mesh, device
        self.like: Any = None
        self.leaves: list[list[torch.Tensor]] = []
        self.sizes: list[int] = []

    def add(self, output: Any, batch: MicroBatch) -> None:
        """Add the next micro-batch of this rank. A padding batch only gives the shapes.

        Raises:
            JobError: something in it does not have the samples along dim 0.
        """
        rows = batch.samples or 1
        pair = output, batch.target
        for leaf in pytree.tree_leaves(pair):
            if not has_rows(leaf, rows):
                shape = f" of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else ""
                raise JobError(
                    "pl.whole brings outputs and targets together along dim 0, and among those of "
                    f"{rows} samples is a {type(leaf).__name__}{shape}",
                    hint="let the model and collate= give tensors of one row a sample",
                )
        taken: list[torch.Tensor] = []
        map_tensors(lambda tensor: taken.append(tensor[: batch.samples].cpu()), pair)
        self.like = pair
        self.leaves.append(taken)
        self.sizes.append(batch.samples)

    def together(self) -> tuple[Any, Any]:
        """Return outputs and targets of all samples, on the CPU. Collective over the replicas.

        Raises:
            JobError: micro-batches differ in more than dim 0.
            OutOfMemory: they don't fit here.
        """
        kinds = {
            tuple((leaf.dtype, tuple(leaf.shape[1:])) for leaf in leaves) for leaves in self.leaves
        }
        number = torch.tensor([zlib.crc32(repr(kinds).encode())])
        if len(kinds) != 1 or not torch.equal(self._summed(number.clone()), number * self._ranks):
            raise JobError(
                "pl.whole brings outputs and targets together, and they differ in shape by more than their "
                "number of samples",
                hint="pad them to one length, or return (sum, count)",
            )
        sizes = self._in_order(self.sizes)
        bytes_here = (
            2
            * sum(sizes)
            * sum(
                leaf.nbytes // max(len(leaf), 1)
                for leaf in max(self.leaves, key=lambda leaves: len(leaves[0]))
            )
        )
        if bytes_here > free_memory_bytes():
            raise OutOfMemory(
                f"pl.whole brings together outputs and targets of {sum(sizes)} samples, which takes "
                f"{bytes_here / 2**30:.1f} GiB on each rank",
                hint="return (sum, count), or a smaller validation set",
            )
        gathered = iter(
            [self._gathered(leaves, sizes) for leaves in zip(*self.leaves, strict=True)]
        )
        pair: tuple[Any, Any] = map_tensors(lambda tensor: next(gathered), self.like)
        return pair

    @property
    def _ranks(self) -> int:
        return len(self.mesh.replicas)

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._ranks == 1:
            return tensor
        moved = tensor.to(self.device)
        dist.all_reduce(moved, group=self.mesh.group("replicas"))
        return moved.cpu()

    def _places(self) -> list[int]:
        """Return the places of this rank's micro-batches among all. Each window is cut over
        replicas, and then into micro-batches.
        """
        cuts, replicas = self.part.num_microbatches, len(self.part.shares)
        return [
            number // cuts * cuts * replicas + self.part.index * cuts + number % cuts
            for number in range(len(self.sizes))
        ]

    def _in_order(self, sizes: list[int]) -> list[int]:
        """Return the number of samples of all micro-batches, in order."""
        every = torch.zeros(len(sizes) * self._ranks, dtype=torch.int64)
        every[self._places()] = torch.tensor(sizes)
        return list(map(int, self._summed(every).tolist()))

    def _gathered(self, parts: tuple[torch.Tensor, ...], sizes: list[int]) -> torch.Tensor:
        """Return the rows of all ranks. Each row comes from one rank, and is zero on the others."""
        starts = [sum(sizes[:place]) for place in self._places()]
        like = parts[0].to(torch.uint8) if parts[0].dtype == torch.bool else parts[0]
        every = like.new_zeros(sum(sizes), *like.shape[1:])
        for start, rows in zip(starts, parts, strict=True):
            every[start : start + len(rows)] = rows
        real = torch.view_as_real(every) if every.is_complex() else every
        summed = self._summed(real)
        return (torch.view_as_complex(summed) if every.is_complex() else summed).to(parts[0].dtype)
